"""Rewards from preferences between segments of trajectories, by the Bradley-Terry model (Christiano et al., arXiv
1706.03741).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.algorithm import Dataset, DataSpec, Params
from offrl.data.containers.guard import reading
from offrl.data.transforms.reward_labels import episode_columns
from offrl.errors import UserError
from offrl.nn.meta_check import outline
from offrl.registry import register
from offrl.relabel.bradley_terry import LabelledPairs, Preferences, PreferenceSettings, check_pairs
from offrl.relabel.images import CHUNK, images_of, seen_by
from offrl.relabel.train_ensemble import train_members
from offrl.settings.encoder import EncoderConfig
from offrl.settings.field import check
from offrl.settings.kinds import check_types
from offrl.system import files as checkpoint
from offrl.tasks.entries import VECTOR
from offrl.training.stages import encoder_run, first_encoder

KIND = "offrl preference model"


@register("reward_labels", KIND)
@dataclass
class PreferenceModel:
    """A learnt reward of a state and an action, between 0 and 1: the mean of an ensemble. `dataset.reward_labels` takes
    its file.

    Comparing sums over segments of one length leaves a constant open that is added to every reward. It is chosen so
    that no reward is negative: an episode is then never the better for having ended early. (With rewards between -1 and
    1 the labelled returns of D4RL's hopper-medium-replay had a correlation of -0.91 with the recorded ones, because its
    best episodes are its longest.)

    Called with an episode's columns it gives its rewards, as `offrl.data.transforms.reward_labels.label_rewards` wants
    it.
    """

    spec: DataSpec
    hidden: list[int]
    mean: Tensor  # [W] of the networks' input: observations as recorded, actions scaled to [-1, 1] or one-hot
    std: Tensor  # [W]
    members: list[Params]
    accuracy: float = float("nan")  # share of the held-out pairs whose order it gets right; NaN where all were ties
    name: str = field(default="preference model", compare=False)
    encoders: list[Params] = field(default_factory=list)  # of the members; [] without images

    def __post_init__(self) -> None:
        self.algorithm = Preferences(PreferenceSettings(hidden=list(self.hidden)), self.spec)

    @torch.no_grad()
    def __call__(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Rewards [T] of rows: observations as recorded, actions in the environment's units. Raises UserError for other
        shapes.
        """
        x = (_inputs(self.spec, columns, self.name) - self.mean) / self.std
        if self.encoders:
            images = images_of(self.spec, columns, "", self.name)
            inputs = [self._encoded(x, images, encoder) for encoder in self.encoders]
        else:
            inputs = [x] * len(self.members)
        pairs = zip(self.members, inputs, strict=True)
        return (0.5 + 0.5 * torch.stack([self.algorithm.rewards(params, x) for params, x in pairs]).mean(0)).numpy()

    def _encoded(self, x: Tensor, images: Mapping[str, Tensor], encoder: Params) -> Tensor:
        """The reward network's inputs [T, Z + A]: the encoder's vector of states and images, and actions."""
        width, z = self.spec.observation_dim, []
        for rows in torch.arange(len(x)).split(CHUNK):
            shown = {VECTOR: x[rows, :width]} if width else {}
            shown |= {name: image[rows] for name, image in images.items()}
            z.append(self.algorithm.apply("encoder", encoder, shown))
        return torch.cat([torch.cat(z), x[:, width:]], -1)

    @staticmethod
    def fit(
        dataset: Dataset,
        pairs: Any,
        labels: Any,
        length: int,
        settings: PreferenceSettings | None = None,
        *,
        encoder: EncoderConfig | None = None,
        device: str = "cpu",
        quiet: bool = False,
    ) -> PreferenceModel:
        """Learn from preferences between segments of `length` rows of a dataset whose observations are not normalised.

        pairs: first rows of the segments, int [P, 2]. labels: [P], 1 where the second is better, 0 where the first is,
        0.5 where neither is. encoder: of images, which the reward is of, too; None: it is of the numbers alone. Raises
        UserError for segments that leave their episode and other labels.
        """
        settings = settings or PreferenceSettings()
        check(settings, "")
        starts, targets = check_pairs(dataset, pairs, labels, length, encoder is not None)
        spec = dataset.spec if encoder is None else seen_by(dataset.spec, encoder)
        pretrained = {}
        if encoder is not None and encoder.pretrained:
            pretrained = first_encoder(encoder_run(encoder.pretrained, spec))
        x = _inputs(spec, episode_columns(replace(dataset, stores={}), 0, len(dataset)), spec.name)
        used = x[torch.unique(starts.unsqueeze(-1) + torch.arange(length))]
        mean, std = used.mean(0), used.std(0, unbiased=False) + 1e-6
        x = (x - mean) / std
        count = len(starts)
        order = torch.from_numpy(np.random.Generator(np.random.PCG64(settings.seed)).permutation(count))
        held_out = order[: min(max(1, int(settings.held_out * count)), count - 1)]
        training = order[len(held_out) :]

        algorithm, where = Preferences(settings, spec, pretrained), torch.device(device)
        width = 0 if encoder is None else spec.observation_dim
        states, inputs = x[:, :width].to(where), x[:, width:].to(where)
        stores = {} if encoder is None else {s.name: dataset.stores[s.name].to(where) for s in spec.streams}

        def part(indices: Tensor) -> LabelledPairs:
            rows = starts[indices].unsqueeze(-1) + torch.arange(length)  # [P, 2, H]
            return LabelledPairs(rows.to(where), targets[indices].to(where), inputs, states, stores)

        judge = part(held_out)
        pairs_at_once = max(1, CHUNK // length) if stores else len(held_out)

        @torch.no_grad()
        def rewards(params: Mapping[str, Params]) -> Tensor:
            """Of both segments of the held-out pairs, [2, P, H]."""
            parts = []
            for some in torch.arange(len(held_out), device=where).split(pairs_at_once):
                batch = judge.take(some)
                if stores:
                    batch["observations"] = algorithm.apply("encoder", params["encoder"], batch["observations"])
                parts.append(torch.stack(algorithm.pair_rewards(params["reward"], batch)))
            return torch.cat(parts, 1)

        def validate(params: Mapping[str, Params]) -> float:
            first, second = rewards(params)
            return float(F.binary_cross_entropy_with_logits((second - first).sum(-1), judge.label))

        source = algorithm.sampler().prepare(part(training))  # type: ignore[arg-type]
        trained = train_members(algorithm, source, validate, where, f"preferences on {spec.name}", quiet)
        members, encoders = (
            [{k: v.cpu() for k, v in params[name].items()} for params in trained.params if name in params]
            for name in ("reward", "encoder")
        )
        model = PreferenceModel(spec, list(settings.hidden), mean, std, members, encoders=encoders)
        first, second = torch.stack([rewards(params) for params in trained.params]).mean(0).sum(-1).cpu()
        decided = targets[held_out] != 0.5
        right = ((second > first) == (targets[held_out] > 0.5))[decided]
        model.accuracy = float(right.double().mean()) if len(right) else float("nan")
        return model

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file. Raises UserError."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise UserError(f"{path}: a preference model is kept in a .safetensors file")
        meta = {
            "kind": KIND,
            "spec": self.spec.to_json(),
            "hidden": self.hidden,
            "accuracy": self.accuracy,
            "members": len(self.members),
        }
        checkpoint.write(path, self._tensors(), meta)

    @staticmethod
    def load(path: str | Path) -> PreferenceModel:
        """Read what `save` wrote. Raises UserError for a missing, damaged or other file."""
        tensors, meta = checkpoint.read(Path(path))
        if meta.get("kind") != KIND:
            raise UserError(
                f"{path} holds no preference model (offrl.relabel.preferences.PreferenceModel.save writes one)"
            )
        with reading(path, " as a preference model"):
            spec, count = DataSpec.from_json(meta["spec"], str(path)), meta["members"]
            settings = {"hidden": meta["hidden"], "members": count}
            check_types(PreferenceSettings, settings, str(path))
            config = PreferenceSettings(**settings)
            check(config, f"{path}: ")
            with outline(str(path)):
                networks = Preferences(config, spec).networks
            parts = {"members": "reward", "encoders": "encoder"} if spec.encoder is not None else {"members": "reward"}
            members: dict[str, list[Params]] = {"members": [], "encoders": []}
            for part, module in parts.items():
                template = dict(networks[module].named_parameters())
                for n in range(count):  # the first that is missing ends it
                    params = checkpoint.unflatten({f"{part}/{n}": template}, tensors, str(path))[f"{part}/{n}"]
                    # cloned: products of tensors that are not aligned in memory, as those of a file, can round
                    # differently
                    members[part].append({k: v.clone() for k, v in params.items()})
            mean, std = tensors["mean"], tensors["std"]
            if not mean.shape == std.shape == (spec.observation_dim + spec.encoded_action_dim,):
                raise UserError(
                    f"{path} is damaged: its means and standard deviations are not those of its networks' inputs"
                )
            return PreferenceModel(
                spec, meta["hidden"], mean, std, accuracy=float(meta["accuracy"]), name=str(path), **members
            )

    def digest(self) -> str:
        """A hash of the numbers in it."""
        return checkpoint.tensor_digest(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "mean": self.mean,
            "std": self.std,
            **checkpoint.flatten({"members": self.members, "encoders": self.encoders}),
        }


def _inputs(spec: DataSpec, columns: Mapping[str, np.ndarray], where: str) -> Tensor:
    """The networks' input [T, W], not normalised yet, for rows of the environment's own units. Raises UserError for
    other shapes.
    """
    observations, actions = columns["observations"], columns["actions"]
    width = int(np.prod(observations.shape[1:]))
    if width != spec.observation_dim:
        raise UserError(f"{where} was learnt on observations of {spec.observation_dim} numbers; these have {width}")
    states = torch.from_numpy(observations.reshape(len(observations), -1).astype(np.float32))
    if spec.discrete:
        if actions.ndim != 1 or (len(actions) and int(actions.max()) >= spec.num_actions):
            raise UserError(f"{where} was learnt on {spec.num_actions} discrete actions; these are others")
        return torch.cat([states, torch.eye(spec.num_actions)[torch.from_numpy(actions.astype(np.int64))]], -1)
    if actions.ndim != 2 or actions.shape[1] != spec.action_dim:
        raise UserError(
            f"{where} was learnt on actions of {spec.action_dim} dimensions; these have shape {list(actions.shape)}"
        )
    low, high = spec.action_bounds
    return torch.cat([states, torch.from_numpy((2.0 * (actions - low) / (high - low) - 1.0).astype(np.float32))], -1)


def segment_pairs(dataset: Dataset, count: int, length: int, seed: int = 0) -> np.ndarray:
    """First rows [count, 2] of pairs of segments of `length` rows, each uniform among those that lie in one episode.
    Raises UserError.
    """
    room = np.maximum(0, dataset.episode_lengths().numpy() - length + 1)
    if not room.any():
        raise UserError(f"{dataset.spec.name}: no episode has {length} rows; choose shorter segments")
    pick = np.random.Generator(np.random.PCG64(seed)).integers(0, room.sum(), (count, 2))
    stops = np.cumsum(room)
    episode = np.searchsorted(stops, pick, side="right")
    return dataset.episode_start.numpy()[episode] + pick - (stops - room)[episode]


def preferred_by_return(dataset: Dataset, pairs: Any, length: int) -> np.ndarray:
    """Labels [P] of a teacher who prefers the larger sum of recorded rewards; 0.5 where they are equal. For
    experiments.
    """
    sums = np.concatenate([[0.0], np.cumsum(dataset.columns["rewards"].numpy().astype(np.float64))])
    totals = sums[np.asarray(pairs) + length] - sums[np.asarray(pairs)]
    return np.where(
        np.isclose(totals[:, 0], totals[:, 1], rtol=0.0, atol=1e-9),
        0.5,
        (totals[:, 1] > totals[:, 0]).astype(np.float64),
    )
