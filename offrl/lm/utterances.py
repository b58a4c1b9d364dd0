"""Turns as transitions: what algorithms need for which an action is the whole text of a turn.

Shapes in comments: B batch, L tokens in a sequence, A tokens in an action, D width, I turns of the data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.data.transforms.columns import returns_to_go
from offrl.lm.algorithm import SHARE, chosen, language_model, noise_of
from offrl.lm.models.causal_lm import LM, Size, value_mlp
from offrl.lm.models.pretrained import SCRATCH
from offrl.lm.reference_policy import ADAPTERS, SAME, Cloned, ClonedSettings
from offrl.lm.sampler import ACTION, DONE, IDS, KNOWN, NEXT, RETURN, REWARD, VALID, Sequences, TextSampler, stream, take
from offrl.optim import Adam, Params
from offrl.settings.field import setting

ROW = "row"  # the row of the data that a turn is
EACH = "each"  # 1 over the number of turns in the whole batch, [B]
ALL = 1 << 40  # a history of so many texts holds them all


@dataclass(frozen=True)
class TurnSource:
    """What TurnSampler draws from."""

    sequences: Sequences
    columns: dict[str, Tensor]  # [I] each, of the same items


@dataclass(frozen=True)
class TurnSampler:
    """Turns: ids int64, valid and action bool [B, L + 1], next_ids int64 and next_valid bool [B, L' + 1] as of `TextSampler` with a
    history, and for each turn reward float32, done, known bool, return float32, discounted by `discount` for each turn, and its row of the
    data int64 [B]."""

    inner: TextSampler
    discount: float

    def prepare(self, dataset: Dataset) -> TurnSource:
        """Raises UserError for other than text data."""
        sequences = self.inner.prepare(dataset)
        s = stream(dataset, self.inner.tokenizer, self.inner.append_end)
        kept = torch.from_numpy(np.flatnonzero(s.action_end > s.action_begin)).to(dataset.device)
        columns = dataset.columns
        rewards, terminal = columns["rewards"].cpu().numpy(), columns["terminations"].cpu().numpy()
        start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
        returns = torch.from_numpy(returns_to_go(rewards, terminal, start, end, self.discount)).float().to(dataset.device)
        each = {
            REWARD: columns["rewards"].float(),
            DONE: columns["terminations"],
            KNOWN: columns["terminations"] | columns["successor_known"],
            RETURN: returns,
            ROW: torch.arange(len(dataset), device=dataset.device),
        }
        return TurnSource(sequences, {name: column[kept] for name, column in each.items()})

    def __call__(self, source: TurnSource, key: Tensor, batch_size: int) -> Batch:
        inner = source.sequences
        if inner.weighted is None:
            return turns(source, rng.randint(key, (batch_size,), len(inner.begin)))
        return turns(source, inner.weighted.draw(key, batch_size))


def turns(source: TurnSource, item: Tensor) -> Batch:
    """The turns of numbers [B]; see `TurnSampler`."""
    batch = take(source.sequences, item)
    kept = {name: batch[name] for name in (IDS, VALID, ACTION, NEXT + IDS, NEXT + VALID)}
    return {**kept, **{name: column[item] for name, column in source.columns.items()}}


def trim(batch: Batch) -> Batch:
    """A batch of turns without the positions that are padding in all rows, with `each` and `share` (see `offrl.lm.algorithm`)."""
    long, later = (int(batch[name].sum(-1).max()) for name in (VALID, NEXT + VALID))
    new = {**batch, **{name: batch[name][:, :long] for name in (IDS, VALID, ACTION)}}
    new |= {NEXT + name: batch[NEXT + name][:, :later] for name in (IDS, VALID)}
    many = len(new[IDS])
    count = new[ACTION].sum().clamp(min=1)
    return {**new, EACH: torch.full((many,), 1.0 / many, device=count.device), SHARE: (1.0 / count).expand(many)}


def first_of(batch: Batch) -> Tensor:
    """[B] int64: the position of each turn's first action token, which is how many tokens its state has."""
    return batch[ACTION].long().argmax(-1)


def action_of(batch: Batch) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, 1 + A], how many of them count int64 [B]): each turn's action on its own, after the start token."""
    count = batch[ACTION].sum(-1)
    step = torch.arange(int(count.max()), device=count.device)
    at = (first_of(batch).unsqueeze(-1) + step).clamp(max=batch[IDS].shape[1] - 1)
    tokens = torch.where(step < count.unsqueeze(-1), batch[IDS].gather(1, at), 0)
    return torch.cat([batch[IDS][:, :1], tokens], 1), count + 1


def answered(batch: Batch, answers: Sequence[Sequence[int]]) -> Batch:
    """The batch with other actions: token ids for each turn, at least one."""
    device, first = batch[IDS].device, first_of(batch)
    count = torch.tensor([len(a) for a in answers], device=device)
    tokens = np.zeros((len(answers), int(count.max())), np.int64)
    for row, answer in enumerate(answers):
        tokens[row, : len(answer)] = answer
    end = (first + count).unsqueeze(-1)
    at = torch.arange(int(end.max()), device=device)
    own = torch.from_numpy(tokens).to(device).gather(1, (at - first.unsqueeze(-1)).clamp(0, tokens.shape[1] - 1))
    before = nn.functional.pad(batch[IDS], (0, max(0, len(at) - batch[IDS].shape[1])))[:, : len(at)]
    state = at < first.unsqueeze(-1)
    ids = torch.where(state, before, torch.where(at < end, own, 0))
    new = {**batch, IDS: ids, VALID: at < end, ACTION: ~state & (at < end)}
    return {**new, SHARE: (1.0 / count.sum()).expand(len(answers))}


class TurnCritic(nn.Module):
    """A language model that reads states and actions, each on its own, and heads on what it makes of a text: its state at the last token
    (the authors of ArCHer use RoBERTa's first one). Methods are called by name, as `LM`'s."""

    def __init__(self, lm: LM, alone: Mapping[str, int], pairs: Mapping[str, int], layers: int) -> None:
        """alone: heads on the state, name -> width of the output; pairs: those on state and action. They begin at 0."""
        super().__init__()
        self.lm = lm
        sizes = {**{n: (lm.width, out) for n, out in alone.items()}, **{n: (2 * lm.width, out) for n, out in pairs.items()}}
        self.heads = nn.ModuleDict({n: value_mlp(width, [lm.width] * (layers - 1), out) for n, (width, out) in sizes.items()})

    def forward(self, method: str, *arguments: Any) -> Any:
        """The method of that name."""
        return getattr(self, method)(*arguments)

    def encode(self, ids: Tensor, count: Tensor) -> Tensor:
        """[B, D] of texts int64 [B, T], of which the first `count` [B] tokens are read."""
        hidden = self.lm.hidden(ids[:, : int(count.max())])
        return hidden[torch.arange(len(ids), device=ids.device), count - 1]

    def judge(self, encoded: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Outputs [B, out] of the heads of these names for [B, D], or for state and action [B, 2 D]."""
        return tuple(self.heads[name](encoded).float() for name in names)


# ---- the base of actors that learn whole turns


@dataclass
class TurnSettings(ClonedSettings):
    """Settings of actors that learn whole turns."""

    learning_rate: float = setting(1e-4, "Adam's learning rate of the lm_bc that is trained first", low=0.0)
    start: str = setting(
        "language_model",
        "what the actor begins with: the language model as it is, or a cloned policy (algo.policy)",
        choices=("language_model", "cloned"),
    )
    actor_learning_rate: float | None = setting(None, "Adam's learning rate of the actor; null: by whether algo.lm=scratch", low=0.0)


@dataclass
class CriticSettings(TurnSettings):
    """Settings of those that have a critic as well."""

    critic: str = setting(
        "same",
        "the language model that the critic reads texts with: one of its own like the actor's, or a small GPT-2 of random weights with the "
        "settings width, layers and heads and the same tokens",
        choices=("same", SCRATCH),
    )
    critic_learning_rate: float | None = setting(None, "Adam's learning rate of the critic; null: by whether it is from scratch", low=0.0)
    value_layers: int = setting(3, "layers of each value head", low=1)


class TurnAlgorithm(Cloned):
    """An actor, the module "policy", that learns whole turns, each of them a transition."""

    rates: ClassVar[dict[str, tuple[float, float]]] = {}  # setting -> its value for a trained language model, and for one from scratch
    alike: ClassVar[tuple[str, ...]] = (*SAME, *ADAPTERS)

    @classmethod
    def clones(cls, config: Any) -> bool:
        return bool(config.start == "cloned")

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """Learning rates that are not given depend on whether the language model was trained before."""
        c = super().fit_config(config, dataset, grid)
        for name, (trained, fresh) in cls.rates.items():
            if getattr(c, name) is None:
                scratch = c.lm == SCRATCH or (name == "critic_learning_rate" and c.critic == SCRATCH)
                c = dataclasses.replace(c, **{name: fresh if scratch else trained})
        return c

    def sampler(self) -> Sampler:
        c = self.config
        return TurnSampler(TextSampler(self.tokenizer, bool(c.append_end), c.history or ALL, c.length), float(getattr(c, "discount", 1.0)))

    def optimizer(self, name: str) -> Adam:
        c = self.config
        rate = c.actor_learning_rate if name == "policy" else c.critic_learning_rate
        return dataclasses.replace(super().optimizer(name), learning_rate=rate)

    def reader_lm(self) -> LM:
        """A new language model for the critic."""
        c = self.config
        if c.critic == SCRATCH and c.lm != SCRATCH:
            words = max(self.tokenizer.size, language_model(c).vocabulary)
            size = Size(c.width, c.layers, c.heads, c.length + int(c.action_tokens or 0) + 1, words)
            return LM(None, size, checkpointing=c.checkpointing)
        return language_model(c)

    def init(self, seed: int) -> TrainState:
        """Whatever has a language model like the cloned policy's begins with its weights."""
        state, own = super().init(seed), self.cloned()
        if own is None:
            return state
        alone = ("critic",) if getattr(self.config, "critic", "") == SCRATCH else ()
        params = {name: module if name in alone else _begun(module, own) for name, module in state.params.items()}
        return state._replace(params=params, target={n: {k: v.clone() for k, v in params[n].items()} for n in self.traits.targets})

    def log_probs(self, params: Params, batch: Batch) -> Tensor:
        """[B, L - 1]: log pi of each action token where it is predicted, 0 elsewhere. The sum over a row is that of its action."""
        return self.log_probs_of(batch, self.apply("policy", params, "hidden", batch[IDS]), params)

    def log_probs_of(self, batch: Batch, hidden: Tensor, params: Params) -> Tensor:
        """As `log_probs`, from states [B, L, D]."""
        return spread(batch, hidden, lambda before: self.apply("policy", params, "logits", before))

    def fresh(self, state: TrainState, batch: Batch, key: Tensor) -> Batch:
        """The batch with actions that the policy writes now."""
        first, ids = first_of(batch).tolist(), batch[IDS].cpu().numpy()
        prompts = [ids[row, :end] for row, end in enumerate(first)]
        with torch.no_grad():
            return answered(batch, self.continued(state, prompts, noise_of(key, range(len(prompts)), batch[IDS].device)))


def spread(batch: Batch, hidden: Tensor, logits: Any) -> Tensor:
    """[B, L - 1]: the log-probabilities of a batch's action tokens at the positions before them, 0 elsewhere.

    logits: gives those [M, V] of states [M, D].
    """
    before, tokens = chosen(hidden, batch)
    each = -nn.functional.cross_entropy(logits(before), tokens, reduction="none")
    mask = batch[ACTION][:, 1:]
    return torch.zeros(mask.shape, dtype=each.dtype, device=each.device).index_put(mask.nonzero(as_tuple=True), each)


def _begun(params: Params, own: Params) -> Params:
    """Parameters of a module that is a language model, or has one as `lm`, with those of another model of the same make in place."""
    new = {}
    for name, value in params.items():
        found = own.get(name.removeprefix("lm."))
        new[name] = value
        if found is not None:
            rows = min(len(found), len(value))  # only embeddings of positions may be more or fewer
            new[name] = torch.cat([found[:rows], value[rows:]])
    return new
