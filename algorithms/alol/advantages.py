"""Advantages of the data's actions over what a reference policy earns, worked out once before training, and turns drawn
by them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Episodes, alias_table
from offrl.errors import UserError
from offrl.lm.models.causal_lm import value_mlp
from offrl.lm.replay import of_episodes
from offrl.lm.rollouts import play_episodes
from offrl.lm.sampler import IDS, RETURN, REWARD
from offrl.lm.utterances import ROW, UtteranceSampler, UtteranceSource, first_of, trim, turns
from offrl.system import files as checkpoint
from offrl.system.files import cache_dir

if TYPE_CHECKING:
    from offrl.algorithms.alol.algorithm import ALoL

WEIGHT = "weight"  # the batch's column of advantages, [B]
PART = 256  # turns read at once
EVERY = 50  # updates of the values between two evaluations on the held-out rows
BATCH = 256


@dataclass(frozen=True)
class AdvantageSampler:
    """`UtteranceSampler` with a column "weight" [B]: max(0, R - V_ref(state)), or max(0, R). Turns are drawn in
    proportion to it.
    """

    inner: UtteranceSampler
    algorithm: ALoL

    def prepare(self, dataset: Dataset) -> UtteranceSource:
        """The source of weighted turns. Raises UserError where no action has an advantage above 0."""
        c, source = self.algorithm.config, self.inner.prepare(dataset)
        credits = source.columns[RETURN if c.credit == "return" else REWARD]
        by_reward = c.variant == "r_lol"
        values = torch.zeros_like(credits) if by_reward else reference_values(self.algorithm, source, credits)
        weight = (credits - values).clamp(min=0.0)
        share = float((weight > 0.0).float().mean())
        if not share:
            cure = "rewards must be above 0 (dataset.reward_shift)" if by_reward else "all rewards seem to be the same"
            raise UserError(
                f"{dataset.spec.name}: no action has a {'reward' if by_reward else 'advantage'} above 0: {cure}"
            )
        quantity = "reward" if by_reward else "advantage"
        self.algorithm.runtime.notes = [
            *self.algorithm.runtime.notes,
            f"{share:.0%} of the actions have {quantity}s above 0, and are learnt from",
        ]
        source = dataclasses.replace(source, columns={**source.columns, WEIGHT: weight})
        if c.sampling == "uniform":
            return source
        rows = dataset.row_weights()[source.columns[ROW].cpu()].numpy()
        indices = np.flatnonzero(weight.cpu().numpy() * rows > 0.0)
        if not len(indices):
            raise UserError(
                f"{dataset.spec.name}: no action that is worth learning has a weight above 0: take another "
                "dataset.weighting"
            )
        threshold, alias = alias_table((weight.cpu().numpy().astype(np.float64) * rows)[indices])
        tables = (threshold, alias, indices, np.ones_like(indices))
        weighted = Episodes(*(torch.from_numpy(x).to(weight.device) for x in tables))
        return dataclasses.replace(source, sequences=dataclasses.replace(source.sequences, weighted=weighted))

    def __call__(self, source: UtteranceSource, key: Tensor, batch_size: int) -> Batch:
        return self.inner(source, key, batch_size)


def reference_values(algorithm: ALoL, source: UtteranceSource, credits: Tensor) -> Tensor:
    """V_ref [I] at the states of the data's turns: a head on the reference policy's state at the end of the prompt.

    It is fitted to the rewards of the reference in episodes it plays (the paper: on validation prompts, scored by a
    reward function), or, where there is no environment, to those of the data's actions: the values of the authors of
    the data, whom the reference imitates. The result is kept on disk, so that a run that continues learns from the same
    numbers.
    """
    c, task = algorithm.config, algorithm.plays
    digest = hashlib.sha256(f"1 {algorithm.spec.name} {task} {_identity(c)}".encode())
    for tensor in (source.sequences.flat[IDS], source.sequences.begin, source.sequences.end, credits):
        digest.update(tensor.cpu().contiguous().numpy().tobytes())
    path = cache_dir() / "values" / f"{digest.hexdigest()[:24]}.safetensors"
    with contextlib.suppress(UserError):  # not there, or damaged: made anew
        return checkpoint.read(path)[0]["values"].to(credits.device)
    state = pytree.tree_map(lambda x: x.to(credits.device), algorithm.init(0))
    indices = torch.arange(len(credits), device=credits.device)
    data_states = torch.cat([_read(algorithm, state, turns(source, item)) for item in indices.split(PART)])
    states, targets, note = data_states, credits, "the data's rewards"
    if task is not None:
        episodes = play_episodes(algorithm, state, task, c.values_episodes, rng.make_key(0), c.parallel)
        batch = of_episodes(algorithm, episodes, int(c.length + (c.action_tokens or 1)), credits.device, c.discount)
        chunks = [{k: v[i : i + PART] for k, v in batch.items()} for i in range(0, len(batch[IDS]), PART)]
        states = torch.cat([_read(algorithm, state, chunk) for chunk in chunks])
        targets = batch[RETURN if c.credit == "return" else REWARD]
        note = (
            f"{c.values_episodes:,} episodes of the reference policy, which earned {float(targets.mean()):.4g} "
            "on average"
        )
    values, error, constant = fit(states, targets, data_states, c.value_layers, c.values_steps, c.values_learning_rate)
    note = f"the reference's values are fitted to {note}; mean squared error {error:.4g}, of a constant {constant:.4g}"
    algorithm.runtime.notes = [*algorithm.runtime.notes, note]
    with contextlib.suppress(UserError, OSError):  # no room for it
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(path, {"values": values}, {})
    return values


def _identity(config: Any) -> str:
    names = (
        "lm",
        "lm_id",
        "policy_id",
        "start",
        "history",
        "length",
        "credit",
        "discount",
        "append_end",
        "action_tokens",
        "value_layers",
        "sampling_temperature",
        "legal",
        "vocabulary",
        "values_episodes",
        "values_steps",
        "values_learning_rate",
    )
    return str([getattr(config, name) for name in names])


def _read(algorithm: ALoL, state: TrainState, batch: Batch) -> Tensor:
    """The policy's states [B, D] at the end of the prompts of a batch."""
    batch = trim(batch)
    with torch.no_grad():
        hidden = algorithm.apply("policy", state.params["policy"], "hidden", batch[IDS])
    return hidden[torch.arange(len(hidden), device=hidden.device), first_of(batch) - 1].float()


def fit(
    x: Tensor, y: Tensor, queries: Tensor, layers: int, steps: int, learning_rate: float
) -> tuple[Tensor, float, float]:
    """(values [I] at states `at` [I, D], mean squared error, that of a constant) of a head fitted to targets y [n] of
    states x [n, D].

    A tenth is held out; of the heads evaluated on it, the constant among them, the one of least error is returned.
    """
    mean, spread = x.mean(0), x.std(0, correction=0) + 1e-6
    offset, scale = y.mean(), y.std(correction=0) + 1e-8
    x, queries, y = (x - mean) / spread, (queries - mean) / spread, (y - offset) / scale
    key = rng.make_key(17)
    order = rng.permuted(key, torch.arange(len(x)), len(x)).to(x.device)
    held_out = order % 10 == 0 if len(x) >= 20 else torch.ones_like(order, dtype=torch.bool)
    training = torch.nonzero(~held_out if len(x) >= 20 else held_out).flatten()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = value_mlp(x.shape[1], [2 * x.shape[1]] * (layers - 1), 1)
    net = net.to(x.device)
    adam = torch.optim.Adam(net.parameters(), learning_rate)

    def evaluate() -> tuple[float, Tensor]:
        with torch.no_grad():
            return float((net(x[held_out]).squeeze(-1) - y[held_out]).square().mean()), net(queries).squeeze(-1)

    best = initial = evaluate()
    for step in range(steps):
        rows = training[rng.randint(rng.fold_in(key, step), (min(BATCH, len(training)),), len(training)).to(x.device)]
        with torch.enable_grad():
            loss = (net(x[rows]).squeeze(-1) - y[rows]).square().mean()
            adam.zero_grad()
            loss.backward()
        adam.step()
        if (step + 1) % EVERY == 0 or step + 1 == steps:
            best = min(best, evaluate(), key=lambda pair: pair[0])
    return best[1] * scale + offset, best[0] * float(scale) ** 2, initial[0] * float(scale) ** 2
