"""A bare world model of offrl's parts: 7 probabilistic networks of 4 x 200, each with its own bootstrap of the data.

Gaussian negative log-likelihood with learned bounds on the log-variance and a decay of each layer (specification D.0,
after PETS and MBPO)."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from peers.flops import ENSEMBLE_HIDDEN, ENSEMBLE_MEMBERS
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.algorithm import Algorithm, Metrics, TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.tables import Packed, layout_of, pack
from offrl.data.samplers.transitions import Batch
from offrl.nn import EnsembleMLP
from offrl.optim import Params

DECAY = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4)
BOUND_WEIGHT = 0.01


@dataclass
class EnsembleConfig:
    learning_rate: float = 1e-3
    hidden: tuple[int, ...] = field(default=ENSEMBLE_HIDDEN)
    members: int = ENSEMBLE_MEMBERS


class Dynamics(nn.Module):
    """[E, B, inputs] -> mean and bounded log-variance, each [E, B, outputs]."""

    def __init__(self, config: EnsembleConfig, inputs: int, outputs: int) -> None:
        super().__init__()
        self.net = EnsembleMLP(config.members, inputs, config.hidden, 2 * outputs, activation="silu")
        self.max_logvar, self.min_logvar = (
            nn.Parameter(torch.full((outputs,), 0.5)),
            nn.Parameter(torch.full((outputs,), -10.0)),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.net(x).chunk(2, -1)
        logvar = self.max_logvar - F.softplus(self.max_logvar - logvar)
        return mean, self.min_logvar + F.softplus(logvar - self.min_logvar)


@dataclass(frozen=True)
class Bootstrapped:
    packed: Packed
    keys: Tensor  # [E] int64: each stands for a member's own rows, drawn once with replacement


@dataclass(frozen=True)
class BootstrapSampler:
    """Batches [E, B, ...] of standardised inputs x and targets y = (s' - s, r); member e draws among its own rows."""

    members: int

    def prepare(self, dataset: Dataset) -> Bootstrapped:
        c = dataset.columns
        x = torch.cat([c["observations"], c["actions"]], -1)
        y = torch.cat([c["next_observations"] - c["observations"], c["rewards"].unsqueeze(-1)], -1)
        parts = {"x": ((x - x.mean(0)) / x.std(0), None), "y": (y, None)}
        layout = layout_of(parts)
        assert layout is not None
        return Bootstrapped(pack(parts, layout), torch.stack(rng.split(rng.make_key(0, x.device), self.members)))

    def __call__(self, source: Bootstrapped, key: Tensor, batch_size: int) -> Batch:
        count = len(source.packed.table)
        pick = rng.randint(key, (self.members, batch_size), count)
        flat = source.packed.take(rng.randint_at(source.keys.unsqueeze(-1), pick, count).reshape(-1))
        return {k: v.reshape(self.members, batch_size, -1) for k, v in flat.items()}


class Ensemble(Algorithm):
    Config = EnsembleConfig

    def modules(self) -> dict[str, nn.Module]:
        s = self.spec
        return {"model": Dynamics(self.config, s.observation_dim + s.action_dim, s.observation_dim + 1)}

    def sampler(self) -> BootstrapSampler:
        return BootstrapSampler(self.config.members)

    def loss(self, model: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        mean, logvar = self.apply("model", model, batch["x"])
        likelihood = ((mean - batch["y"]).square() * torch.exp(-logvar) + logvar).mean((1, 2)).sum()
        weights = [v for k, v in model.items() if k.endswith("weight")]
        decay = torch.stack([0.5 * d * w.square().sum() for d, w in zip(DECAY, weights, strict=True)]).sum()
        total = likelihood + decay + BOUND_WEIGHT * (model["max_logvar"].sum() - model["min_logvar"].sum())
        return total, {"model/loss": total}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        return self.descend(state, "model", self.loss, batch)
