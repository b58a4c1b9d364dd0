"""Value-guided decoding: a reference policy whose logits are shifted by values of single tokens.

"Offline RL for Natural Language Generation with Implicit Language Q Learning" (Snell et al., 2022, arXiv 2206.11871);
the values' form and the settings of tasks are those of LMRL-Gym (Abdulhai et al., 2023, arXiv 2311.18232). State i - 1
of a sequence values token i. Shapes in comments: B batch, L tokens, M tokens of actions, D width, V tokens of the
vocabulary, K outputs of a value head.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor, nn

from offrl.algorithm import Actor, Batch, Dataset, DataSpec, Grid, Loss, Metrics, Params, Part, TrainState
from offrl.errors import UserError
from offrl.lm import reference_policy
from offrl.lm.actor import TextActor
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models import decoding
from offrl.lm.models.causal_lm import LM, LMWithHeads, call
from offrl.lm.models.configured import describe, language_model, tokenizer_of
from offrl.lm.reference_policy import ReferenceSettings
from offrl.lm.sampler import DONE, IDS, KNOWN, LAST, NEXT, REWARD, SUCCESSOR, VALID, action_mask, cross_entropy
from offrl.lm.settings import ValueHeadSettings, head_of, with_value_range
from offrl.settings.field import setting

TRUNKS = ("separate", "shared")
MOST_OUTPUTS = 100_000  # of a head with bins for each token: beyond, a batch does not fit in memory


@dataclass
class ValueGuidedSettings(ValueHeadSettings, ReferenceSettings):
    """Settings of policies that are guided by values."""

    trunk: str = setting(
        "separate",
        "separate: values have a copy of the cloned policy's language model; shared: one language model has values and "
        "writes, and is trained for both at once",
        choices=TRUNKS,
    )
    clone_weight: float = setting(1.0, "trunk=shared: weight of the cloning loss", low=0.0)
    beta: float = setting(
        4.0, "logits are those of the cloned policy plus beta times the value of each token", low=0.0, acting=True
    )
    discount: float = setting(0.99, "discount factor, of each token of an action", low=0.0, high=1.0)
    conservative_weight: float = setting(
        0.01, "weight of CQL's term: a cross-entropy with the values as logits", low=0.0
    )
    value_layers: int = setting(2, "layers of each value head", low=1)
    value_bias: float = setting(
        0.0, "what all values are in the beginning, where they are numbers; LMRL-Gym's Wordle has -4.4"
    )

    @property
    def wants_reference(self) -> bool:
        return self.trunk != "shared"


def with_token_value_range(config: Any, dataset: Dataset) -> Any:
    """Settings whose bins have a range, from the data, whose turns are discounted for each token of an action."""
    c = config
    if c.value_head == "scalar":
        return c
    actions, count = dataset.columns["actions"].cpu().unique(return_counts=True)
    lengths = [
        len(ids) + bool(c.append_end) for ids in tokenizer_of(c).encode([dataset.strings[i] for i in actions.tolist()])
    ]
    return with_value_range(c, dataset, float((torch.tensor(lengths) * count).sum() / count.sum()))


class TokenValues(Part):
    """Values of tokens and states, the algorithm's module "value": a language model with heads Q, one value for each
    token of the vocabulary, and heads V, one value for each state."""

    config: ValueGuidedSettings

    def __init__(
        self,
        config: ValueGuidedSettings,
        spec: DataSpec,
        lm: LM,
        q_heads: tuple[str, ...],
        v_heads: tuple[str, ...] = (),
    ) -> None:
        """lm: the network's language model. Raises UserError where the bins of all tokens are too many."""
        super().__init__(config, spec)
        self.q_heads = q_heads
        self.head = self.v_head = head_of(config)  # of the heads Q, and of the heads V
        self.notes = [describe(lm, config)]
        if self.head.out_dim * lm.vocabulary > MOST_OUTPUTS and self.head.out_dim > 1:
            problem = (
                f"algo.value_head={config.value_head}: {self.head.out_dim} bins for each of {lm.vocabulary:,} tokens "
                "are too many"
            )
            if not v_heads:
                raise UserError(f"{problem}; take algo.value_head=scalar, or fewer algo.value_bins")
            self.notes.append(f"{problem}: values of tokens are numbers, and V is a distribution")
            self.head = head_of(dataclasses.replace(config, value_head="scalar"))
        outs = dict.fromkeys(q_heads, lm.vocabulary * self.head.out_dim) | dict.fromkeys(v_heads, self.v_head.out_dim)
        self.network = LMWithHeads(lm, outs, config.value_layers, config.value_bias)

    def __call__(self, params: Params, *x: Any) -> Any:
        """The method x[0] of the network."""
        return call(self.network, params, *x)

    def q(self, logits: Tensor) -> Tensor:
        """[..., V * K] -> [..., V]: Q of each token."""
        return self.head.mean(logits.unflatten(-1, (-1, self.head.out_dim)))

    def of_tokens(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[M, V * K] -> [M, K]: the outputs of a head Q for the tokens [M]."""
        outputs = logits.unflatten(-1, (-1, self.head.out_dim))
        return outputs.gather(1, tokens.view(-1, 1, 1).expand(-1, 1, outputs.shape[-1])).squeeze(1)

    def cql(self, logits: Tensor, tokens: Tensor) -> Tensor:
        """[M]: -log softmax(Q)[token], CQL's term at temperature 1 (arXiv 2206.11871, equation 6)."""
        return nn.functional.cross_entropy(self.q(logits), tokens, reduction="none")

    def next_values(self, params: Params, hidden: Tensor, batch: Batch, head: str) -> Tensor:
        """V [M] of the states after the action tokens of a batch, without gradient: after an action, where the next one
        begins.
        """
        with torch.no_grad():
            index = batch[SUCCESSOR].unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
            values = self.v_head.mean(self(params, "outputs", hidden.gather(1, index), head)[0])  # [B, L]
            if NEXT + IDS in batch:
                next_hidden = self(params, "hidden", batch[NEXT + IDS])
                end = batch[NEXT + VALID].sum(-1) - 1
                state = next_hidden[torch.arange(len(end), device=end.device), end]
                window = self.v_head.mean(self(params, "outputs", state, head)[0])
                values = torch.where(batch[LAST], window.unsqueeze(-1), values)
            return values[action_mask(batch)]

    def td_target(self, batch: Batch, next_values: Tensor) -> tuple[Tensor, Tensor]:
        """(y = r + discount (1 - done) V(next) [M], 1 where it is known float32 [M])."""
        mask = action_mask(batch)
        y = batch[REWARD][mask] + self.config.discount * (~batch[DONE][mask]).float() * next_values
        return y, batch[KNOWN][mask].float()


class ValueGuidedActor(TextActor):
    """log pi(token) = log pi_ref + beta min_j Q_j, normalised (arXiv 2206.11871, section 4.3; subtracting V changes
    nothing).
    """

    def __init__(self, algorithm: TextAlgorithm, state: TrainState, values: TokenValues, reference: LM | None) -> None:
        """reference: None where one language model has the values and writes."""
        super().__init__(algorithm, state)
        self.values, self.reference = values, reference

    def reader(self) -> decoding.Read:
        caches = LM.fresh_cache(), LM.fresh_cache()

        def read(ids: Tensor, valid: Tensor) -> Tensor:
            return self._guided(ids, valid, caches, last=True)

        return read

    def scores(self, ids: Tensor) -> Tensor:
        return self._guided(ids, None, (None, None), last=False)

    def _guided(self, ids: Tensor, valid: Tensor | None, caches: tuple[Any, Any], last: bool) -> Tensor:
        """Guided logits [B, V] after tokens [B, T], or [B, T, V] after each of them."""
        hidden = self.apply("value", "hidden", ids, valid, caches[0])
        hidden = hidden[:, -1] if last else hidden
        if self.reference is None:
            logits = self.apply("value", "logits", hidden)
        else:
            reference = self.reference.to(ids.device)
            states = reference.hidden(ids, valid, caches[1])
            logits = reference.logits(states[:, -1] if last else states)
        q = torch.stack([self.values.q(x) for x in self.apply("value", "outputs", hidden, *self.values.q_heads)]).amin(
            0
        )
        return logits.log_softmax(-1) + self.values.config.beta * q


ConfigT = TypeVar("ConfigT", bound=ValueGuidedSettings)


class ValueGuided(Generic[ConfigT]):
    """What algorithms of values of tokens share, the module "value"; named before `TextAlgorithm` among parents."""

    config: ConfigT
    spec: DataSpec
    pretrained: Any
    runtime: Any
    values: TokenValues
    q_heads: ClassVar[tuple[str, ...]] = ("q1",)
    v_heads: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        return with_token_value_range(super().fit_config(config, dataset, grid), dataset)  # type: ignore[misc]

    def modules(self) -> dict[str, nn.Module]:
        lm = language_model(self.config)
        self.reference = reference_policy.frozen_reference(self.config, self.pretrained)
        self.values = TokenValues(self.config, self.spec, lm, self.q_heads, self.v_heads)
        self.runtime.notes = self.values.notes
        return {"value": self.values.network}

    def with_cloning(self, loss: Tensor, metrics: Metrics, value: Params, hidden: Tensor, batch: Batch) -> Loss:
        """With trunk=shared the loss has the cloning loss of the same language model too."""
        if self.config.trunk != "shared":
            return loss, metrics
        cloning = cross_entropy(partial(self.values, value, "logits"), hidden, batch)
        return loss + self.config.clone_weight * cloning, {**metrics, "policy/loss": cloning}

    def actor(self, state: TrainState) -> Actor:
        return ValueGuidedActor(self, state, self.values, self.reference)  # type: ignore[arg-type]

    def assets(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, description = super().assets()  # type: ignore[misc]
        reference, identity = reference_policy.pack(self.pretrained, self.config.policy_id)
        return {**tensors, **reference}, {**description, **identity}

    @classmethod
    def load_assets(cls, tensors: dict[str, Tensor], description: dict[str, Any]) -> Mapping[str, Any]:
        remainder, pretrained = reference_policy.unpack(tensors)
        if "identity" in description:
            super().load_assets(remainder, description)  # type: ignore[misc]
        return pretrained
