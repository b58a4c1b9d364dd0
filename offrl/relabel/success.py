"""Rewards from a classifier of success that sees images (SERL, Luo et al., arXiv 2401.16013; HIL-SERL, arXiv
2410.21845).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Dataset, DataSpec, Loss, Params, Sampler, TrainState, Traits, Update
from offrl.data.containers.guard import reading
from offrl.data.store import Store
from offrl.errors import UserError
from offrl.nn import MLP
from offrl.nn.meta_check import outline
from offrl.registry import register
from offrl.relabel.held_out import balanced_error, held_out_rows, precise, success_rows
from offrl.relabel.images import CHUNK, images_of, seen_by
from offrl.relabel.train_ensemble import train_members
from offrl.settings.encoder import EncoderConfig
from offrl.settings.field import check, setting
from offrl.settings.kinds import check_types
from offrl.system import files as checkpoint
from offrl.training.stages import encoder_run, first_encoder

KIND = "offrl success classifier"


@dataclass
class SuccessSettings:
    """Settings of the learning of a classifier of success; those of the network and batch are HIL-SERL's."""

    members: ClassVar[int] = 1
    hidden: list[int] = setting([256], "layers behind the encoder", low=1)
    dropout: float = setting(0.1, "share of the hidden units left out", low=0.0, high=0.9)
    updates: int = setting(1_000, "at most so many; they end where the validation error no longer falls", low=1)
    learning_rate: float = setting(1e-4, "Adam's", low=0.0)
    batch_size: int = setting(256, "images, half of them of success", low=2)
    held_out: float = setting(0.2, "share of the episodes, of those with success and of others", low=0.01, high=0.9)
    reward: str = setting(
        "success", "success: 1 from `threshold` on, else 0; probability: as it is", choices=("success", "probability")
    )
    threshold: float | None = setting(
        None, "null: the smallest that gives 99% precision on held-out episodes", low=0.0, high=1.0
    )
    seed: int = setting(0, "of the network and the held-out episodes", low=0)


@dataclass(frozen=True)
class LabelledImages:
    """The source of BalancedSampler."""

    stores: Mapping[str, Store]
    rows: tuple[Tensor, Tensor]  # of failure, of success


class BalancedSampler:
    """What the steps of rows led to, as observations, half of them failures and then as many successes; label [B]."""

    def prepare(self, dataset: Any) -> LabelledImages:
        return dataset

    def __call__(self, source: LabelledImages, key: Tensor, batch_size: int) -> Any:
        sizes = batch_size // 2, batch_size - batch_size // 2
        draws = [
            rows[rng.randint(k, (size,), len(rows))]
            for rows, size, k in zip(source.rows, sizes, rng.split(key), strict=True)
        ]
        label = torch.cat([torch.full((n,), float(i), device=draws[0].device) for i, n in enumerate(sizes)])
        return {"observations": led_to(source.stores, torch.cat(draws)), "label": label}


def led_to(stores: Mapping[str, Store], rows: Tensor) -> dict[str, Tensor]:
    """The images [B, H, W, C] that follow rows [B]; their own where what follows is not known."""
    return {name: store.frames(rows, 1, following=True) for name, store in stores.items()}


class SuccessPrediction(Algorithm[SuccessSettings]):
    """P(success | image) = sigmoid(f(z)), by the cross-entropy of labels; it acts in no environment, so it is not
    registered.
    """

    traits = Traits(policy_modules=(), observations="encoded")

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        return {"success": MLP(self.spec.observation_dim, c.hidden, 1, layer_norm=True, dropout=c.dropout)}

    def sampler(self) -> Sampler:
        return BalancedSampler()

    def loss(self, params: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        logits = self.apply("success", params, batch["observations"], key).squeeze(-1)
        loss = F.binary_cross_entropy_with_logits(logits, batch["label"])
        return loss, {"success/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "success", self.loss, batch, key)

    @torch.no_grad()
    def logits(self, params: Mapping[str, Params], images: Mapping[str, Tensor]) -> Tensor:
        """[B] of images [B, H, W, C] by stream."""
        z = self.apply("encoder", params["encoder"], images)
        return self.apply("success", params["success"], z).squeeze(-1)


@register("reward_labels", KIND)
@dataclass
class SuccessClassifier:
    """A learnt reward of images: of what a row's step led to, which the columns next_NAME hold. `dataset.reward_labels`
    takes its file; called with an episode's columns it gives their rewards.
    """

    spec: DataSpec  # of the images alone, with the encoder
    hidden: list[int]
    params: dict[str, Params]
    scale: float = 1.0  # the logits' divisor
    threshold: float | None = None  # None: rewards are probabilities
    # on held-out episodes: the shares of rows that are right, of rewarded rows that are success, and of success that is
    # rewarded (from a probability of 0.5 on where there is no threshold)
    accuracy: float = float("nan")
    precision: float = float("nan")
    recall: float = float("nan")
    name: str = field(default="success classifier", compare=False)

    def __post_init__(self) -> None:
        self.algorithm = SuccessPrediction(SuccessSettings(hidden=list(self.hidden)), self.spec)

    def __call__(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Rewards [T]. Raises UserError for images that are missing or of other shapes."""
        images = images_of(self.spec, columns, "next_", self.name)
        chunks = zip(*(x.split(CHUNK) for x in images.values()), strict=True)
        logits = [self.algorithm.logits(self.params, dict(zip(images, part, strict=True))) for part in chunks]
        probability = torch.sigmoid(torch.cat(logits) / self.scale).numpy()
        return probability if self.threshold is None else (probability >= self.threshold).astype(np.float32)

    @staticmethod
    def fit(
        dataset: Dataset,
        labels: str,
        settings: SuccessSettings | None = None,
        encoder: EncoderConfig | None = None,
        *,
        device: str = "cpu",
        quiet: bool = False,
    ) -> SuccessClassifier:
        """Learn from the column `labels`, 1 where a row's step led to success and 0 where not, and what the images then
        show; the share `held_out` of the episodes says which parameters and which threshold.

        Raises UserError for data without images or such a column, and fewer than two episodes of either kind.
        """
        settings, encoder = settings or SuccessSettings(), encoder or EncoderConfig()
        check(settings, "fit.")
        success = success_rows(dataset, labels)
        streams = tuple(s for s in dataset.spec.streams if s.image)
        spec = seen_by(DataSpec((0,), 1, name=dataset.spec.name, streams=streams), encoder)
        pretrained = first_encoder(encoder_run(encoder.pretrained, spec)) if encoder.pretrained else None
        algorithm, where = SuccessPrediction(settings, spec, pretrained), torch.device(device)
        held_out = held_out_rows(dataset, success, settings.held_out, settings.seed)
        stores = {s.name: dataset.stores[s.name].to(where) for s in streams}
        rows = [torch.nonzero(~held_out & (success == kind)).squeeze(-1).to(where) for kind in (False, True)]
        judge, truth = torch.nonzero(held_out).squeeze(-1).to(where), success[held_out]

        def logits(params: Mapping[str, Params]) -> Tensor:
            return torch.cat([algorithm.logits(params, led_to(stores, part)) for part in judge.split(CHUNK)]).cpu()

        source = algorithm.sampler().prepare(LabelledImages(stores, (rows[0], rows[1])))  # type: ignore[arg-type]
        title = f"success on {dataset.spec.name}"
        trained = train_members(algorithm, source, lambda p: balanced_error(logits(p), truth), where, title, quiet)
        params = {name: {k: v.cpu() for k, v in module.items()} for name, module in trained.params[0].items()}
        model = SuccessClassifier(spec, list(settings.hidden), params)
        values = logits(trained.params[0])
        # below 1 a few held-out images that are told apart would make every probability 0 or 1
        scales = torch.logspace(0.0, 1.0, 21).tolist()
        model.scale = min(scales, key=lambda scale: balanced_error(values / scale, truth))
        probability = torch.sigmoid(values / model.scale)
        if settings.reward == "success":
            model.threshold = (
                precise(probability, truth, dataset.spec.name) if settings.threshold is None else settings.threshold
            )
        positive = probability >= (0.5 if model.threshold is None else model.threshold)
        model.accuracy = float((positive == truth).double().mean())
        model.precision = float(truth[positive].double().mean())
        model.recall = float(positive[truth].double().mean())
        return model

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file. Raises UserError."""
        names = ("hidden", "scale", "threshold", "accuracy", "precision", "recall")
        meta = {"kind": KIND, "spec": self.spec.to_json(), **{name: getattr(self, name) for name in names}}
        checkpoint.write(Path(path), checkpoint.flatten({"params": self.params}), meta)

    @staticmethod
    def load(path: str | Path) -> SuccessClassifier:
        """Read what `save` wrote. Raises UserError for a missing, damaged or other file."""
        tensors, meta = checkpoint.read(Path(path))
        with reading(Path(path), " as a success classifier"):
            spec = DataSpec.from_json(meta["spec"], str(path))
            if spec.encoder is None or not spec.streams:
                raise UserError(f"{path} is damaged: it is of no images")
            settings = {name: meta[name] for name in ("hidden", "threshold")}
            check_types(SuccessSettings, settings, str(path))
            config = SuccessSettings(**settings)
            check(config, f"{path}: ")
            with outline(str(path)):
                networks = SuccessPrediction(config, spec).networks
                template = {name: dict(module.named_parameters()) for name, module in networks.items()}
            params = checkpoint.unflatten({"params": template}, tensors, str(path))["params"]
            params = {name: {k: v.clone() for k, v in module.items()} for name, module in params.items()}
            numbers = {name: float(meta[name]) for name in ("scale", "accuracy", "precision", "recall")}
            return SuccessClassifier(spec, config.hidden, params, threshold=config.threshold, name=str(path), **numbers)

    def digest(self) -> str:
        """A hash of the numbers in it."""
        return f"{self.scale} {self.threshold} {checkpoint.tensor_digest(checkpoint.flatten(self.params))}"
