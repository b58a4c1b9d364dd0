"""A-LoL: "Leftover Lunch: Advantage-based Offline Reinforcement Learning for Language Models" (Baheti et al., 2023,
arXiv 2305.14718).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Dataset, Grid, Loss, Params, TrainState, Update
from offrl.data.samplers.transitions import Batch, Episodes, Sampler, alias_table
from offrl.errors import UserError
from offrl.lm import reference_policy
from offrl.lm.actor import PROMPTS
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models.causal_lm import value_mlp
from offrl.lm.models.configured import language_model
from offrl.lm.models.pretrained import SCRATCH
from offrl.lm.replay import of_episodes
from offrl.lm.rollouts import play_episodes
from offrl.lm.sampler import IDS, RETURN, REWARD, token_log_probs
from offrl.lm.utterances import (
    EACH,
    ROW,
    UtteranceSampler,
    UtteranceSettings,
    UtteranceSource,
    first_of,
    trim,
    turns,
    utterance_sampler,
    with_rates,
)
from offrl.registry import register
from offrl.settings.evaluation import EvalConfig
from offrl.settings.field import setting
from offrl.system import files as checkpoint
from offrl.system.files import cache_dir
from offrl.tasks.environments import resolve_task

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
        credits = source.columns[RETURN if c.credit_assignment == "return" else REWARD]
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
        targets = batch[RETURN if c.credit_assignment == "return" else REWARD]
        note = (
            f"{c.values_episodes:,} episodes of the reference policy, which earned {float(targets.mean()):.4g} on "
            "average"
        )
    values, error, constant = fit(states, targets, data_states, c.value_layers, c.values_steps)
    note = f"the reference's values are fitted to {note}; mean squared error {error:.4g}, of a constant {constant:.4g}"
    algorithm.runtime.notes = [*algorithm.runtime.notes, note]
    with contextlib.suppress(UserError, OSError):  # no room for it
        path.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(path, {"values": values}, {})
    return values


def _identity(config: ALoLConfig) -> str:
    names = (
        "lm",
        "lm_id",
        "policy_id",
        "start",
        "history",
        "length",
        "credit_assignment",
        "discount",
        "append_end",
        "action_tokens",
        "value_layers",
        "sampling_temperature",
        "legal",
        "vocabulary",
        "values_episodes",
        "values_steps",
    )
    return str([getattr(config, name) for name in names])


def _read(algorithm: ALoL, state: TrainState, batch: Batch) -> Tensor:
    """The policy's states [B, D] at the end of the prompts of a batch."""
    batch = trim(batch)
    with torch.no_grad():
        hidden = algorithm.apply("policy", state.params["policy"], "hidden", batch[IDS])
    return hidden[torch.arange(len(hidden), device=hidden.device), first_of(batch) - 1].float()


def fit(
    x: Tensor, y: Tensor, queries: Tensor, layers: int, steps: int, learning_rate: float = 1e-3
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


VARIANTS = ("a_lol", "a_lol_seq", "ref_free", "kl", "r_lol")


@dataclass
class ALoLConfig(UtteranceSettings):
    """Settings of A-LoL."""

    name: str = "alol"
    start: str = setting(
        "cloned",
        "the reference policy, which the actor begins with: a cloned policy (algo.policy), or the language model as it "
        "is",
        choices=("cloned", "language_model"),
    )
    variant: str = setting(
        "a_lol",
        "how the ratio of the actor's probability to the reference's weighs an action: that of the whole action "
        "(a_lol), of each token (a_lol_seq), not at all (ref_free), by a penalty on its logarithm (kl); r_lol: as "
        "a_lol, with rewards in place of advantages",
        choices=VARIANTS,
    )
    clip: float = setting(0.9, "ratios are kept within 1 - clip and 1 + clip", low=0.0)
    kl_weight: float = setting(0.1, "variant=kl: weight of the penalty", low=0.0)
    credit_assignment: str = setting(
        "return",
        "what an action earned: its turn's reward, or the rewards from there to the episode's end",
        choices=("reward", "return"),
    )
    discount: float = setting(1.0, "of these rewards, for each turn", low=0.0, high=1.0)
    sampling: str = setting(
        "advantage",
        "actions are drawn in proportion to their advantage, as in the paper, or as the data's weights say",
        choices=("advantage", "uniform"),
    )
    values_from: str = setting(
        "auto",
        "what values are fitted to: episodes that the reference plays, or the data's rewards; auto: episodes if an "
        "environment is there",
        choices=("auto", "rollouts", "data"),
    )
    values_episodes: int = setting(512, "episodes that the reference plays for it", low=1)
    values_steps: int = setting(1_000, "updates of the values", low=1)
    value_layers: int = setting(
        2, "layers of the values' head, on the reference's state at the end of the prompt", low=1
    )
    parallel: int = setting(32, "episodes that are played side by side", low=1, high=PROMPTS)


@register("algo", "alol")
class ALoL(TextAlgorithm[ALoLConfig]):
    """Minimise the mean of -A rho log pi(y|x), A = max(0, R - V_ref(x)), rho = clip(pi / pi_ref) without gradient, over
    actions y drawn in proportion to A (arXiv 2305.14718, equations 4 to 8).

    log pi(y|x) is the sum over the tokens of y, not their mean: so the authors' later code, which notes that the sum is
    always better."""

    @classmethod
    def fit_config(cls, config: ALoLConfig, dataset: Dataset, grid: Grid = None) -> ALoLConfig:
        """The config with its learning rates. Raises UserError for a reference that was never trained."""
        if config.lm == SCRATCH and config.start != "cloned":
            raise UserError(
                f"algo.start={config.start}: algo.lm=scratch is no policy to stay close to; take algo.start=cloned"
            )
        return with_rates(super().fit_config(config, dataset, grid), {"actor_learning_rate": (2e-5, 3e-4)})

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        # None: it is the actor without its adapters, or nothing is to be learnt
        self.reference = reference_policy.frozen_reference(c, self.pretrained)
        if c.start != "cloned" and c.tune != "adapters":
            self.reference = language_model(c, "none").requires_grad_(False)
        return {"policy": language_model(c)}

    def sampler(self) -> Sampler:
        return AdvantageSampler(utterance_sampler(self.config, self.config.discount), self)

    @property
    def plays(self) -> Any:
        """The task that the reference plays, or None where its values are fitted to the data. Raises UserError where
        there is none.
        """
        c = self.config
        task = None if c.values_from == "data" else resolve_task(self.spec.task, EvalConfig())
        if task is None and c.values_from == "rollouts":
            raise UserError(
                f"algo.values_from=rollouts: {self.spec.name} names no environment; take algo.values_from=data"
            )
        return task

    def reference_log_probs(self, policy: Params, batch: Batch) -> Tensor:
        """`log_probs` of the reference policy, without gradient: [B, L - 1]."""
        with torch.no_grad():
            if self.reference is None:
                with self.lm().reference():
                    return self.log_probs(policy, batch)
            reference = self.reference.to(batch[IDS].device)
            return token_log_probs(reference.logits, reference.hidden(batch[IDS]), batch)

    def actor_loss(self, policy: Params, state: TrainState, batch: Batch) -> Loss:
        """-E A rho log pi(y|x), rho = clip(pi(y|x) / pi_ref(y|x), 1 - eps, 1 + eps) without gradient (equation 4);
        variants: rho of each token (a_lol_seq), rho = 1 (ref_free), and rho = 1 with + lambda log(pi / pi_ref) (kl)."""
        c, row_weight, weight = self.config, batch[EACH], batch[WEIGHT]
        tokens = self.log_probs(policy, batch)
        log_prob = tokens.sum(-1)
        metrics = {"actor/advantage": (weight * row_weight).sum(), "actor/log_prob": (log_prob * row_weight).sum()}
        if c.variant == "ref_free":
            loss = -(weight * log_prob * row_weight).sum()
            return loss, {"actor/loss": loss, **metrics}
        reference = self.reference_log_probs(policy, batch)
        log_ratio = log_prob - reference.sum(-1)
        metrics["actor/kl"] = (log_ratio * row_weight).sum()
        if c.variant == "kl":
            loss = ((c.kl_weight * log_ratio - weight * log_prob) * row_weight).sum()
            return loss, {"actor/loss": loss, **metrics}
        low, high = 1.0 - c.clip, 1.0 + c.clip
        if c.variant == "a_lol_seq":
            ratio = (tokens - reference).exp().clamp(low, high).detach()
            objective = (ratio * tokens).sum(-1)
        else:
            ratio = log_ratio.exp().clamp(low, high).detach()
            metrics["actor/ratio"] = (ratio * row_weight).sum()
            objective = ratio * log_prob
        loss = -(weight * objective * row_weight).sum()
        return loss, {"actor/loss": loss, **metrics}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "policy", self.actor_loss, trim(batch))
