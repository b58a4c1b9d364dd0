"""Rewards from preferences between segments of trajectories, by the Bradley-Terry model (Christiano et al., arXiv
1706.03741).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Dataset, DataSpec, Loss, Params, Sampler, TrainState, Traits, Update
from offrl.data.containers.guard import reading
from offrl.data.transforms.reward_labels import episode_columns
from offrl.errors import UserError
from offrl.nn import MLP
from offrl.nn.meta_check import outline
from offrl.registry import register
from offrl.relabel.train_ensemble import train_members
from offrl.settings.field import check, setting
from offrl.settings.kinds import check_types
from offrl.system import files as checkpoint

KIND = "offrl preference model"


@dataclass
class PreferenceSettings:
    """Settings of the learning of a preference model."""

    members: int = setting(3, "networks, whose rewards are averaged", low=1)
    hidden: list[int] = setting([256, 256], "layers", low=1)
    updates: int = setting(
        5_000, "at most so many updates of each; they end where the validation error no longer falls", low=1
    )
    learning_rate: float = setting(3e-4, "Adam's", low=0.0)
    batch_size: int = setting(64, "pairs of segments", low=1)
    held_out: float = setting(0.1, "share of the pairs that says which model is best", low=0.0, high=0.9)
    seed: int = setting(0, "of the first member", low=0)


class PairSampler:
    """Uniform pairs of segments, with replacement: first and second [B, H, W] and label [B]."""

    def prepare(self, dataset: Any) -> Batch:
        return dict(dataset)

    def __call__(self, source: Batch, key: Tensor, batch_size: int) -> Batch:
        pick = rng.randint(key, (batch_size,), len(source["label"]))
        return {name: column[pick] for name, column in source.items()}


class Preferences(Algorithm):
    """P(second better than first) = sigmoid(sum of r over the second - sum of r over the first), r = tanh(f(s, a)).

    The loss is the cross-entropy to labels from 0 (first) to 1 (second). It acts in no environment, so it is not
    registered.
    """

    Config = PreferenceSettings
    traits = Traits(policy_modules=())

    def modules(self) -> dict[str, nn.Module]:
        return {"reward": MLP(self.spec.observation_dim + self.spec.encoded_action_dim, self.config.hidden, 1)}

    def sampler(self) -> Sampler:
        return PairSampler()

    def rewards(self, params: Params, x: Tensor) -> Tensor:
        """[..., W] -> [...] in (-1, 1)."""
        return self.apply("reward", params, x).squeeze(-1).tanh()

    def loss(self, params: Params, state: TrainState | None, batch: Batch) -> Loss:
        logits = (self.rewards(params, batch["second"]) - self.rewards(params, batch["first"])).sum(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch["label"])
        return loss, {"reward/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "reward", self.loss, batch)


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

    def __post_init__(self) -> None:
        self.algorithm = Preferences(PreferenceSettings(hidden=list(self.hidden)), self.spec)

    @torch.no_grad()
    def __call__(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Rewards [T] of rows: observations as recorded, actions in the environment's units. Raises UserError for other
        shapes.
        """
        x = (_inputs(self.spec, columns, self.name) - self.mean) / self.std
        return (0.5 + 0.5 * torch.stack([self.algorithm.rewards(params, x) for params in self.members]).mean(0)).numpy()

    @staticmethod
    def fit(
        dataset: Dataset,
        pairs: Any,
        labels: Any,
        length: int,
        settings: PreferenceSettings | None = None,
        *,
        device: str = "cpu",
        quiet: bool = False,
    ) -> PreferenceModel:
        """Learn from preferences between segments of `length` rows of a dataset whose observations are not normalised.

        pairs: first rows of the segments, int [P, 2]. labels: [P], 1 where the second is better, 0 where the first is,
        0.5 where neither is. Raises UserError for segments that leave their episode and other labels.
        """
        settings = settings or PreferenceSettings()
        check(settings, "")
        starts, targets = check_pairs(dataset, pairs, labels, length)
        spec = dataset.spec
        x = _inputs(spec, episode_columns(dataset, 0, len(dataset)), spec.name)
        used = x[torch.unique(starts.unsqueeze(-1) + torch.arange(length))]
        mean, std = used.mean(0), used.std(0, unbiased=False) + 1e-6
        x = (x - mean) / std
        count = len(starts)
        order = torch.from_numpy(np.random.Generator(np.random.PCG64(settings.seed)).permutation(count))
        held_out = order[: min(max(1, int(settings.held_out * count)), count - 1)]
        training = order[len(held_out) :]

        def part(indices: Tensor) -> Batch:
            rows = starts[indices].unsqueeze(-1) + torch.arange(length)  # [P, 2, H]
            return {"first": x[rows[:, 0]], "second": x[rows[:, 1]], "label": targets[indices]}

        algorithm, where = Preferences(settings, spec), torch.device(device)
        source = algorithm.sampler().prepare({k: v.to(where) for k, v in part(training).items()})  # type: ignore[arg-type]
        judge = {k: v.to(where) for k, v in part(held_out).items()}

        def validate(params: dict[str, Params]) -> float:
            with torch.no_grad():
                return float(algorithm.loss(params["reward"], None, judge)[0])

        trained = train_members(algorithm, source, validate, where, f"preferences on {spec.name}", quiet)
        members = [{k: v.cpu() for k, v in params["reward"].items()} for params in trained.params]
        model = PreferenceModel(spec, list(settings.hidden), mean, std, members)
        first, second = (
            torch.stack([model.algorithm.rewards(m, part(held_out)[k]) for m in members]).mean(0).sum(-1)
            for k in ("first", "second")
        )
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
                template = dict(Preferences(config, spec).networks["reward"].named_parameters())
            members = []
            for n in range(count):  # the first that is missing ends it
                params = checkpoint.unflatten({f"members/{n}": template}, tensors, str(path))[f"members/{n}"]
                # cloned: products of tensors that are not aligned in memory, as those of a file, can round differently
                members.append({k: v.clone() for k, v in params.items()})
            mean, std = tensors["mean"], tensors["std"]
            if not mean.shape == std.shape == (spec.observation_dim + spec.encoded_action_dim,):
                raise UserError(
                    f"{path} is damaged: its means and standard deviations are not those of its networks' inputs"
                )
            return PreferenceModel(spec, meta["hidden"], mean, std, members, float(meta["accuracy"]), str(path))

    def digest(self) -> str:
        """A hash of the numbers in it."""
        return checkpoint.tensor_digest(self._tensors())

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "mean": self.mean,
            "std": self.std,
            **{f"members/{n}/{k}": v for n, m in enumerate(self.members) for k, v in m.items()},
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


def check_pairs(dataset: Dataset, pairs: Any, labels: Any, length: int) -> tuple[Tensor, Tensor]:
    """(first rows int64 [P, 2], labels float32 [P]). Raises UserError, naming the pair, for what does not fit."""
    starts, targets = np.asarray(pairs), np.asarray(labels, np.float64).reshape(-1)
    name = dataset.spec.name
    if dataset.spec.observation_mean is not None:
        raise UserError(f"{name}: learn preferences before observations are normalised")
    if not dataset.spec.observation_dim:
        raise UserError(f"{name}: preferences are learnt from observations of numbers only")
    if (
        starts.ndim != 2
        or starts.shape[1] != 2
        or starts.dtype.kind not in "iu"
        or len(starts) != len(targets)
        or len(starts) < 2
    ):
        raise UserError(
            f"{name}: pairs must be whole numbers [P, 2] and labels [P], P > 1; here {list(starts.shape)} and "
            f"{list(targets.shape)}"
        )
    bad = np.flatnonzero(~np.isin(targets, (0.0, 0.5, 1.0)))
    if len(bad):
        raise UserError(
            f"{name}: the label of pair {bad[0]} is {targets[bad[0]]}; 1 says that its second segment is better, 0 the "
            "first, 0.5 neither"
        )
    ends = dataset.episode_end.numpy()
    inside = (starts >= 0) & (starts < len(dataset))
    episode_end = ends[np.searchsorted(ends, np.where(inside, starts, 0), side="right")]
    bad = np.flatnonzero(~(inside & (starts + length <= episode_end)).all(1))
    if length < 1 or len(bad):
        pair = int(bad[0]) if len(bad) else 0
        raise UserError(
            f"{name}: pair {pair}, first rows {starts[pair].tolist()}: {length} rows from there do not lie in one "
            "episode"
        )
    return torch.from_numpy(starts.astype(np.int64)), torch.from_numpy(targets.astype(np.float32))


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
