"""Pre-training of the encoder of images from video without rewards or actions: V-PTR's values ("Robotic Offline RL from
Internet Videos via Value-Function Pre-Training", Bhateja et al., 2023, arXiv 2309.13041), contrast of frames near in
time (time-contrastive networks, Sermanet et al., 2017, arXiv 1704.06888, with the InfoNCE loss of arXiv 1807.03748), or
autoencoding (SAC+AE, Yarats et al., 2019, arXiv 1910.01741)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Algorithm, Batch, Dataset, Loss, Params, Sampler, TrainConfig, TrainState, Traits, Update
from offrl.data.samplers.goals import SUCCESSES, GoalRows, GoalSampler, Mix, choose
from offrl.errors import UserError
from offrl.families.goal_conditioned import GoalTarget, expectile_td_loss, goal_rewards
from offrl.nn import EnsembleMLP
from offrl.nn.encoders.decoder import StreamDecoder
from offrl.pretrained import Requirement
from offrl.registry import register
from offrl.settings.field import setting

MODULES = {"value": "value", "contrast": "similarity", "autoencode": "decoder"}  # of the objectives
PICTURE = "picture of "  # and a stream's name: the images of a batch as they are


@dataclass
class EncoderTrainingConfig:
    """Settings of the pre-training of an encoder; those of values are GCIVL's."""

    name: str = "encoder"
    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(256, "frames in a batch", low=1)
    objective: str = setting(
        "value",
        "value: of goals that are later frames (V-PTR); contrast: which frame comes soon after which; autoencode: the "
        "images are reconstructed",
        choices=tuple(MODULES),
    )
    discount: float = setting(
        0.99, "value: discount factor; also of goals at geometric distances", high=1.0, shared=True
    )
    expectile: float = setting(0.9, "value: 0.5 values the video's behaviour, 1.0 the best in it", low=0.0, high=1.0)
    polyak: float = setting(
        0.005, "value: share of the online parameters that enters the targets at each update", low=0.0, high=1.0
    )
    hidden: list[int] = setting([512, 512, 512], "value: widths of the hidden layers", low=1)
    ahead: int = setting(5, "contrast: the later frame is 1 to so many steps ahead", low=1)


@dataclass(frozen=True)
class FrameSampler(GoalSampler):
    """B frames, and below them a later one of the episode for each, in one batch of observations [2B, ...], so that the
    encoder learns from both: goals drawn by `value`, with next_observations and SUCCESSES [B], or else frames 1 to
    `ahead` steps later (an episode's last one stands for its own). ahead 0: B frames alone, and PICTURE and a
    stream's name: its images.
    """

    ahead: int = 0

    def __call__(self, source: GoalRows, key: Tensor, batch_size: int) -> Batch:
        keys = rng.split(key, 3)
        rows = source.draw(keys[0], batch_size)
        frames = source.state(rows)
        if self.value is not None:
            later = choose(source, keys[1], rows, self.value).rows
            batch = {
                "next_observations": source.table.column("next_observations", rows),
                SUCCESSES: (later == rows).float(),
            }
        elif self.ahead:
            later = torch.minimum(rows + 1 + rng.randint(keys[2], (batch_size,), self.ahead), source.last[rows])
            batch = {}
        else:
            return {"observations": frames, **{PICTURE + name: x for name, x in frames.items()}}
        return {"observations": pytree.tree_map(lambda *x: torch.cat(x), frames, source.state(later)), **batch}


@register("algo", "encoder")
class EncoderTraining(Algorithm[EncoderTrainingConfig]):
    """An encoder learns from images alone, by one of three losses; it acts nowhere, and other runs start from it:
    `encoder.pretrained=RUN`. Frames, later frames and goals all train it; successors and targets are constants.
    """

    traits = Traits(policy_modules=(), observations="encoded", own_encoders=False)

    @classmethod
    def traits_for(cls, config: EncoderTrainingConfig) -> Traits:
        return replace(cls.traits, targets=("value",) if config.objective == "value" else ())

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """Raises UserError for data without images, and for images that are shifted before they are reconstructed."""
        if not any(stream.image for stream in dataset.spec.streams):
            raise UserError(f"algo=encoder learns from images, and {dataset.spec.name} has none")
        if config.algo.objective == "autoencode" and config.encoder.shift:
            raise UserError(
                f"algo.objective=autoencode draws images as they are, and encoder.shift={config.encoder.shift} moves "
                "what the encoder sees of them: encoder.shift=0"
            )
        return {}

    def modules(self) -> dict[str, nn.Module]:
        c, width = self.config, self.spec.observation_dim
        if c.objective == "autoencode":
            return {"decoder": StreamDecoder(width, self.data_spec)}
        if c.objective == "contrast":
            return {"similarity": nn.Linear(width, width, bias=False)}
        form: dict[str, Any] = {
            "activation": "gelu_tanh",
            "init": "xavier",
            "layer_norm": True,
            "layer_norm_epsilon": 1e-6,
        }
        return {"value": EnsembleMLP(2, 2 * width, c.hidden, 1, **form)}

    def sampler(self) -> Sampler:
        c = self.config
        if c.objective == "value":
            return FrameSampler(value=Mix(0.2, 0.5, 0.3, discount=c.discount))
        return FrameSampler(ahead=c.ahead if c.objective == "contrast" else 0)

    def autoencode_loss(self, decoder: Params, state: TrainState, batch: Batch) -> Loss:
        """E |D(z) - image / 255|^2, summed over pixels and streams."""
        images = self.apply("decoder", decoder, batch["observations"])
        errors = [(x - batch[PICTURE + name] / 255.0).square().flatten(1).sum(-1) for name, x in images.items()]
        loss = torch.stack(errors).sum(0).mean()
        return loss, {"decoder/loss": loss}

    def contrast_loss(self, similarity: Params, state: TrainState, batch: Batch) -> Loss:
        """-E log softmax_j(z_i W z'_j) at j = i: a frame's own later one among those of the batch's other frames."""
        frames, later = batch["observations"].chunk(2)
        logits = frames @ self.apply("similarity", similarity, later).mT
        pairs = torch.arange(len(frames), device=logits.device)
        loss = (logits.logsumexp(-1) - logits.diagonal(dim1=-2, dim2=-1)).mean()
        return loss, {"similarity/loss": loss, "similarity/accuracy": (logits.argmax(-1) == pairs).float().mean()}

    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> Loss:
        """E |tau - 1(A < 0)| (r + gamma V'(z', g) - V(z, g))^2 of both V, A = r + gamma min V'(z', g) - mean V'(z, g),
        r = -1 until the goal is reached.
        """
        c, target = self.config, state.target["value"]
        frames, goals = batch["observations"].chunk(2)
        step = GoalTarget(*goal_rewards(batch[SUCCESSES]), c.discount, batch["next_observations"])
        v, constant = self.v(value, frames, goals), goals.detach()
        target_v, next_v = self.v(target, frames.detach(), constant), self.v(target, step.observations, constant)
        loss = expectile_td_loss(v, target_v, next_v, step, c.expectile)
        return loss, {"value/loss": loss, "value/v": v.mean()}

    def v(self, value: Params, frames: Tensor, goals: Tensor) -> Tensor:
        """Twin values [2, B]."""
        return self.apply("value", value, torch.cat([frames, goals], -1)).squeeze(-1)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        objective = self.config.objective
        loss = {"value": self.value_loss, "contrast": self.contrast_loss, "autoencode": self.autoencode_loss}[objective]
        state, metrics = self.descend(state, MODULES[objective], loss, batch)
        return self.polyak(state, "value") if objective == "value" else state, metrics
