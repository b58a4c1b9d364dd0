"""Inverse dynamics: which action led from one state to the next (SS-ORL, arXiv 2210.06518)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import (
    Algorithm,
    Batch,
    Dataset,
    Loss,
    Params,
    Sampler,
    TrainState,
    Traits,
    TransitionSampler,
    Update,
)
from offrl.data.memory import chunks
from offrl.data.samplers.transitions import episode_of
from offrl.data.transforms.episodes import share_of
from offrl.errors import UserError
from offrl.nn import MLP
from offrl.nn.policies import Categorical, Policy, TanhGaussian
from offrl.relabel.train_ensemble import Trained, train_members
from offrl.settings.field import setting

ROWS = 8_192  # rows that are labelled at once
EDGE = 1.0 - 1e-6  # labels lie inside (-1, 1), where atanh is finite


@dataclass
class InverseSettings:
    """Settings of the learning of inverse dynamics; the defaults are the paper's but for `updates` and `edge`.

    Where many actions lie on the edge of their range, as those of a clipped Gaussian policy do, their images under
    atanh lie so far out that a Gaussian's mean fits neither them nor the others; learnt times 1 - edge they stay near.
    """

    members: int = setting(3, "models, whose actions are averaged; 0: leave action-free episodes out", low=0)
    updates: int = setting(10_000, "at most so many updates of each", low=1)
    hidden: list[int] = setting([1024, 1024], "layers", low=1)
    dropout: float = setting(0.1, "share of the hidden units left out", low=0.0, high=0.9)
    learning_rate: float = setting(1e-4, "Adam's", low=0.0)
    batch_size: int = setting(1024, "transitions", low=1)
    edge: float = setting(0.05, "actions are learnt times 1 - edge, and labels divided by it", low=1e-6, high=0.5)
    held_out: float = setting(
        0.1, "share of the labelled episodes (at least one) that says which model is best", low=0.0, high=0.9
    )
    seed: int = setting(0, "of the first member", low=0)


class SeparateGaussian(TanhGaussian):
    """A squashed Gaussian whose mean and log standard deviation are networks of their own; log_std in [-5, 2]."""

    def __init__(self, in_dim: int, action_dim: int, hidden: Sequence[int], dropout: float) -> None:
        nn.Module.__init__(self)
        self.mean = MLP(in_dim, hidden, action_dim, dropout=dropout)
        self.log_std = MLP(in_dim, hidden, action_dim, dropout=dropout)
        self.bounds = (-5.0, 2.0)

    def forward(self, observations: Tensor, key: Tensor | None = None) -> tuple[Tensor, ...]:
        keys = (None, None) if key is None else rng.split(key)
        return self.mean(observations, keys[0]), self.log_std(observations, keys[1]).clamp(*self.bounds)


class InverseDynamics(Algorithm):
    """p(a_t | s_{t-1}, s_t, s_{t+1}) by maximum likelihood: a squashed Gaussian, or for discrete actions a softmax.

    Its data have the column "previous"; see `prepared`. It acts in no environment, so it is not registered.
    """

    Config = InverseSettings
    traits = Traits(policy_modules=())

    def modules(self) -> dict[str, nn.Module]:
        c, width = self.config, 3 * self.spec.observation_dim
        if self.spec.discrete:
            return {"inverse": Categorical(width, self.spec.num_actions, c.hidden, dropout=c.dropout)}
        return {"inverse": SeparateGaussian(width, self.spec.action_dim, c.hidden, c.dropout)}

    def sampler(self) -> Sampler:
        return TransitionSampler(extra=("previous",))

    def loss(self, params: Params, state: TrainState, batch: Batch, key: Tensor | None) -> Loss:
        """The mean negative log-likelihood of the actions; with a key dropout is on."""
        x = torch.cat([batch["previous"], batch["observations"], batch["next_observations"]], -1)
        dist = self.apply("inverse", params, x, key)
        actions = batch["actions"] if self.spec.discrete else batch["actions"] * (1.0 - self.config.edge)
        loss = -self.network.log_prob(dist, actions).mean()
        return loss, {"inverse/loss": loss}

    def joint_action(self, dists: Sequence[tuple[Tensor, ...]]) -> Tensor:
        """One action of the members' distributions: the mean of their modes [B, A], or the likeliest by their mean
        probabilities [B].
        """
        if self.spec.discrete:
            return torch.stack([d[0].exp() for d in dists]).mean(0).argmax(-1)
        modes = torch.stack([self.network.mode(d) for d in dists]) / (1.0 - self.config.edge)
        return modes.clamp(-EDGE, EDGE).mean(0)

    @property
    def network(self) -> Policy:
        """For its distribution's methods; its own parameters are not used."""
        network = self.networks["inverse"]
        assert isinstance(network, Policy)
        return network

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "inverse", self.loss, batch, key)


@dataclass(frozen=True)
class Inputs:
    """Normalisation of rows to the networks' input: (s - mean) / std for each of the three states."""

    mean: Tensor  # [O]
    std: Tensor  # [O]

    @staticmethod
    def of(datasets: Sequence[Dataset]) -> Inputs:
        """Mean and standard deviation + 1e-6 of all observations, labelled or not."""
        rows = sum(len(d) for d in datasets)
        columns = [d.columns["observations"].numpy().reshape(len(d), -1) for d in datasets]
        zero = np.zeros(columns[0].shape[1])
        mean = sum((c[p].sum(0, dtype=np.float64) for c in columns for p in chunks(len(c))), zero) / rows
        square = sum((((c[p] - mean) ** 2).sum(0) for c in columns for p in chunks(len(c))), zero) / rows
        return Inputs(
            torch.from_numpy(mean.astype(np.float32)), torch.from_numpy((np.sqrt(square) + 1e-6).astype(np.float32))
        )

    def states(self, dataset: Dataset, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """s_{t-1}, s_t, s_{t+1} at rows [B], each [B, O]. Before an episode's first row there are zeros, put in before
        normalising.
        """
        observations = dataset.flat("observations")
        first = torch.isin(rows, dataset.episode_start)
        before = torch.where(first.unsqueeze(-1), 0.0, observations[(rows - 1).clamp(min=0)])
        after = dataset.flat("next_observations")[rows]
        previous, current, following = ((x - self.mean) / self.std for x in (before, observations[rows], after))
        return previous, current, following


def prepared(dataset: Dataset, rows: Tensor, inputs: Inputs) -> Dataset:
    """The rows as a dataset of their own for `InverseDynamics`: normalised states, and the column "previous"."""
    previous, current, following = inputs.states(dataset, rows)
    columns = {
        "observations": current,
        "actions": dataset.columns["actions"][rows],
        "rewards": torch.zeros(len(rows)),
        "next_observations": following,
        "previous": previous,
        "terminations": torch.zeros(len(rows), dtype=torch.bool),
        "successor_known": torch.ones(len(rows), dtype=torch.bool),
    }
    return Dataset(columns, torch.arange(len(rows)), torch.arange(len(rows)) + 1, dataset.spec)


def learn(
    dataset: Dataset, action_free: Sequence[Dataset], settings: InverseSettings, device: torch.device, quiet: bool
) -> tuple[Tensor, str]:
    """The actions of all rows of `action_free`, one after the other, and what a person should know about them."""
    inputs = Inputs.of([dataset, *action_free])
    training, held_out = _held_out(dataset, settings)
    algorithm = InverseDynamics(settings, dataset.spec)
    source = algorithm.sampler().prepare(prepared(dataset, training, inputs).to(device))
    judge = prepared(dataset, held_out, inputs)

    def validate(params: dict[str, Params]) -> float:
        with torch.no_grad():
            total = 0.0
            for part in chunks(len(judge), ROWS):
                rows = {k: v[part].to(device) for k, v in judge.columns.items()}
                total += float(algorithm.loss(params["inverse"], None, rows, None)[0]) * (part.stop - part.start)  # type: ignore[arg-type]
        return total / len(judge)

    title = f"inverse dynamics of {dataset.spec.name}"
    trained = train_members(algorithm, source, validate, device, title, quiet)
    labels = [_predict(algorithm, trained, other, inputs, device) for other in action_free]
    predictions = _ensemble(algorithm, trained, inputs, dataset, held_out, device)
    return torch.cat(labels), _note(
        dataset, action_free, trained, predictions, dataset.columns["actions"][held_out], settings
    )


def _held_out(dataset: Dataset, settings: InverseSettings) -> tuple[Tensor, Tensor]:
    """Rows to train on and rows of other episodes to judge by; of one episode alone, its last rows. All have a known
    successor.
    """
    known = torch.nonzero(dataset.columns["successor_known"]).squeeze(-1)
    if len(known) < 2:
        raise UserError(
            f"{dataset.spec.name} has {len(known)} labelled transition(s): too few to learn the actions of others from"
        )
    total = dataset.num_episodes
    episode = episode_of(dataset, known)
    count = min(share_of(settings.held_out, total), total - 1)
    held_out_episodes = np.random.Generator(np.random.PCG64(settings.seed)).permutation(total)[:count]
    out = torch.isin(episode, torch.from_numpy(held_out_episodes))
    if not bool(out.any()) or bool(out.all()):
        out = torch.arange(len(known)) >= min(len(known) - 1, int((1.0 - settings.held_out) * len(known)))
    return known[~out], known[out]


@torch.no_grad()
def _ensemble(
    algorithm: InverseDynamics, trained: Trained, inputs: Inputs, dataset: Dataset, rows: Tensor, device: torch.device
) -> Tensor:
    """The members' joint actions at rows [M]."""
    predictions = []
    for part in rows.split(ROWS):
        x = torch.cat(inputs.states(dataset, part), -1).to(device)
        predictions.append(
            algorithm.joint_action(
                [algorithm.apply("inverse", params["inverse"], x) for params in trained.params]
            ).cpu()
        )
    return torch.cat(predictions)


def _predict(
    algorithm: InverseDynamics, trained: Trained, dataset: Dataset, inputs: Inputs, device: torch.device
) -> Tensor:
    """Actions of every row. A row without a known successor repeats the action before it, where its episode has one."""
    actions = _ensemble(algorithm, trained, inputs, dataset, torch.arange(len(dataset)), device)
    unknown = ~dataset.columns["successor_known"]
    unknown[dataset.episode_start] = False
    rows = torch.nonzero(unknown).squeeze(-1)
    actions[rows] = actions[rows - 1]
    return actions


def _note(
    dataset: Dataset,
    action_free: Sequence[Dataset],
    trained: Trained,
    predictions: Tensor,
    true: Tensor,
    settings: InverseSettings,
) -> str:
    rows, episodes = sum(len(d) for d in action_free), sum(d.num_episodes for d in action_free)
    if dataset.spec.discrete:
        share = float((predictions == true).double().mean())
        usual = float(torch.bincount(true).max() / len(true))
        error = f"{100 * share:.1f}% of held-out actions are right (always the commonest: {100 * usual:.1f}%)"
    else:
        rmse = (predictions - true).double().square().mean(0).sqrt()
        plain = float(true.double().var(0, unbiased=False).mean().sqrt())
        shown = " ".join(f"{e:.3g}" for e in rmse[:12].tolist()) + (" ..." if len(rmse) > 12 else "")
        error = (
            f"held-out RMSE {float(rmse.square().mean().sqrt()):.3g} (always the mean: {plain:.3g}), by dimension "
            f"{shown}"
        )
    likelihood = ", ".join(f"{e:.3g}" for e in trained.errors.tolist())
    return (
        f"actions of {episodes:,} episodes ({rows:,} rows) are labelled by inverse dynamics learnt from "
        f"{dataset.num_episodes:,} episodes ({settings.members} models, {trained.updates:,} updates): {error}; "
        f"validation loss {likelihood}"
    )
