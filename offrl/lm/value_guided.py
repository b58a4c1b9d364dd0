"""Policies that clone the data and are steered by values of single tokens: ILQL and Monte-Carlo returns.

"Offline RL for Natural Language Generation with Implicit Language Q Learning" (Snell et al., 2022, arXiv 2206.11871); the values' form and
the settings of tasks are those of LMRL-Gym (Abdulhai et al., 2023, arXiv 2311.18232). State i - 1 of the sequence values token i.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offrl.algorithm import Metrics, TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.lm.algorithm import language_model, tokenizer_of, trimmed
from offrl.lm.models import decoding
from offrl.lm.models.causal_lm import LM, Valued
from offrl.lm.reference_policy import ADAPTERS, SAME, Cloned, ClonedSettings, HeadSettings, head_of, ranged
from offrl.lm.sampler import DONE, IDS, KNOWN, LAST, NEXT, REWARD, SUCCESSOR, VALID
from offrl.optim import Params
from offrl.settings.field import setting

BEHAVIOUR = "behaviour/"  # before names of the cloned policy's tensors in policy files
TRUNKS = ("separate", "shared")
MOST_OUTPUTS = 100_000  # of a head with bins for each token: beyond, a batch does not fit in memory


@dataclass
class SteeredSettings(HeadSettings, ClonedSettings):
    """Settings of policies that are steered by values."""

    trunk: str = setting(
        "separate",
        "separate: values have a copy of the cloned policy's language model; shared: one language model has values and writes, and is "
        "trained for both at once",
        choices=TRUNKS,
    )
    clone_weight: float = setting(1.0, "trunk=shared: weight of the cloning loss", low=0.0)
    beta: float = setting(4.0, "logits are those of the cloned policy plus beta times the value of each token", low=0.0, acting=True)
    discount: float = setting(0.99, "discount factor, of each token of an action", low=0.0, high=1.0)
    conservative_weight: float = setting(0.01, "weight of CQL's term: a cross-entropy with the values as logits", low=0.0)
    value_layers: int = setting(2, "layers of each value head", low=1)
    value_bias: float = setting(0.0, "what all values are in the beginning, where they are numbers; LMRL-Gym's Wordle has -4.4")


class Steered(Cloned):
    """log pi(token) = log pi_clone + beta min_j Q_j, normalised (arXiv 2206.11871, section 4.3; subtracting V changes nothing)."""

    traits = replace(Cloned.traits, policy_modules=("value",))
    alike: ClassVar[tuple[str, ...]] = (*SAME, *ADAPTERS)  # with other adapters values would not begin with the clone's weights
    outs: ClassVar[tuple[str, ...]] = ("q1",)  # heads with a value for each token
    single: ClassVar[tuple[str, ...]] = ()  # heads with one value

    @classmethod
    def clones(cls, config: Any) -> bool:
        return config.trunk != "shared"

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """As the cloned policy's; the bins' range is from the data, whose turns are discounted for each token of an action."""
        c = super().fit_config(config, dataset, grid)
        if c.value_head == "scalar":
            return c
        actions, count = dataset.columns["actions"].cpu().unique(return_counts=True)
        lengths = [len(ids) + bool(c.append_end) for ids in tokenizer_of(c).encode([dataset.strings[i] for i in actions.tolist()])]
        return ranged(c, dataset, float((torch.tensor(lengths) * count).sum() / count.sum()))

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        self.head = self.v_head = head_of(c)  # of the heads with a value for each token, and of those with one
        lm = language_model(c)
        self.runtime.notes = [self.described(lm)]
        if self.head.out_dim * lm.vocabulary > MOST_OUTPUTS and self.head.out_dim > 1:
            many = f"algo.value_head={c.value_head}: {self.head.out_dim} bins for each of {lm.vocabulary:,} tokens are too many"
            if not self.single:
                raise UserError(f"{many}; take algo.value_head=scalar, or fewer algo.bins")
            self.runtime.notes.append(f"{many}: values of tokens are numbers, and V is a distribution")
            self.head = head_of(dataclasses.replace(c, value_head="scalar"))
        outs = dict.fromkeys(self.outs, lm.vocabulary * self.head.out_dim) | dict.fromkeys(self.single, self.v_head.out_dim)
        self.behaviour = self.clone()
        return {"value": Valued(lm, outs, c.value_layers, c.value_bias)}

    def init(self, seed: int) -> TrainState:
        """Values begin with the weights of the cloned policy."""
        state, clone = super().init(seed), self.cloned()
        if clone is None:
            return state
        own = {f"lm.{name}": value for name, value in clone.items()}
        value = {name: own[name].clone() if name in own else p for name, p in state.params["value"].items()}
        target = {name: {k: v.clone() for k, v in value.items()} for name in self.traits.targets}
        return state._replace(params={"value": value}, target=target)

    # ---- values

    def q_of(self, logits: Tensor) -> Tensor:
        """[..., V * K] -> [..., V] values of each token."""
        return self.head.mean(logits.unflatten(-1, (-1, self.head.out_dim)))

    def of_token(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[M, V * K] -> [M, K]: what a head says of the tokens [M]."""
        each = logits.unflatten(-1, (-1, self.head.out_dim))
        return each.gather(1, tokens.view(-1, 1, 1).expand(-1, 1, each.shape[-1])).squeeze(1)

    def conservative(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[M]: -log softmax(Q)[token], CQL's term at temperature 1 (arXiv 2206.11871, equation 6)."""
        return nn.functional.cross_entropy(self.q_of(logits), tokens, reduction="none")

    def clone_loss(self, params: Params, hidden: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """trunk=shared: the cloning loss of the same language model."""
        if self.config.trunk != "shared":
            return hidden.new_zeros(()), {}
        loss = self.cross_entropy("value", params, hidden, batch)
        return self.config.clone_weight * loss, {"policy/loss": loss}

    # ---- acting

    def lm(self) -> LM:
        return self.behaviour if self.behaviour is not None else super().lm()

    def reader(self, state: TrainState) -> decoding.Read:
        caches = LM.fresh_cache(), LM.fresh_cache()

        def read(ids: Tensor, valid: Tensor) -> Tensor:
            return self._steered(state, ids, valid, caches, last=True)

        return read

    def scores(self, state: TrainState, ids: Tensor) -> Tensor:
        return self._steered(state, ids, None, (None, None), last=False)

    def _steered(self, state: TrainState, ids: Tensor, valid: Tensor | None, caches: tuple[Any, Any], last: bool) -> Tensor:
        """Steered logits [B, V] after tokens [B, T], or [B, T, V] after each of them."""
        params = state.params["value"]
        hidden = self.apply("value", params, "hidden", ids, valid, caches[0])
        hidden = hidden[:, -1] if last else hidden
        if self.behaviour is None:
            logits = self.apply("value", params, "logits", hidden)
        else:
            clone = self.behaviour.to(ids.device)
            own = clone.hidden(ids, valid, caches[1])
            logits = clone.logits(own[:, -1] if last else own)
        q = torch.stack([self.q_of(x) for x in self.apply("value", params, "judge", hidden, *self.outs)]).amin(0)
        return logits.log_softmax(-1) + self.config.beta * q

    # ---- policy files

    def assets(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, about = super().assets()
        clone = self.cloned()
        if clone is None:
            return tensors, about
        own = {BEHAVIOUR + name: value for name, value in clone.items()}
        return {**tensors, **own}, {**about, "behaviour": self.config.policy_id}

    @classmethod
    def load_assets(cls, tensors: dict[str, Tensor], about: dict[str, Any]) -> Mapping[str, Any]:
        if "identity" in about:
            super().load_assets({name: t for name, t in tensors.items() if not name.startswith(BEHAVIOUR)}, about)
        own = {name.removeprefix(BEHAVIOUR): t for name, t in tensors.items() if name.startswith(BEHAVIOUR)}
        return {"policy": own} if own else {}


class TokenTD(Steered):
    """What a one-step target needs: V of the state after each token, and which targets are known."""

    def next_values(self, params: Params, hidden: Tensor, batch: Batch, head: str) -> Tensor:
        """V [M] of the states after the action tokens of a batch, without gradient: after an action, where the next one begins."""
        with torch.no_grad():
            picked = batch[SUCCESSOR].unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            after = self.v_head.mean(self.apply("value", params, "judge", hidden.gather(1, picked), head)[0])  # [B, L]
            if NEXT + IDS in batch:
                later = self.apply("value", params, "hidden", batch[NEXT + IDS])
                end = batch[NEXT + VALID].sum(-1) - 1
                state = later[torch.arange(len(end), device=end.device), end]
                window = self.v_head.mean(self.apply("value", params, "judge", state, head)[0])
                after = torch.where(batch[LAST], window.unsqueeze(-1), after)
            return after[action_mask(batch)]

    def target(self, batch: Batch, after: Tensor) -> tuple[Tensor, Tensor]:
        """(y = r + discount (1 - done) V(next) [M], whether it is known float32 [M])."""
        mask = action_mask(batch)
        y = batch[REWARD][mask] + self.config.discount * (~batch[DONE][mask]).float() * after
        return y, batch[KNOWN][mask].float()

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        state, metrics = self.descend(state, "value", self.value_loss, trimmed(batch))
        for name in self.traits.targets:
            state = self.polyak(state, name, self.config.polyak)
        return state, metrics

    @abstractmethod
    def value_loss(self, value: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        """To be minimised by the module "value"."""


def action_mask(batch: Batch) -> Tensor:
    """[B, L] bool: the action tokens of a batch, in the order in which `chosen` gives them."""
    mask = batch["action"].clone()
    mask[:, 0] = False
    return mask
