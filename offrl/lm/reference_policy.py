"""Algorithms that build on a cloned policy: a run of `lm_bc`, named or trained first.

They steer it (`offrl.lm.value_guided`), begin with its weights, or stay close to it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.data.value_range import value_range
from offrl.errors import UserError
from offrl.lm.algorithm import TextAlgorithm, TextSettings, language_model
from offrl.lm.models.causal_lm import LM
from offrl.nn.heads import ValueHead, make_head
from offrl.optim import Params
from offrl.pretrained import Requirement
from offrl.settings.field import setting

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

SAME = ("lm", "lm_id", "tokenizer", "vocabulary", "width", "layers", "heads", "history", "append_end")  # settings of both policies
ADAPTERS = ("tune", "rank", "lora_alpha", "lora_layers")


@dataclass
class ClonedSettings(TextSettings):
    """Settings of policies that build on a cloned one."""

    policy: str = setting("", "a trained run of lm_bc to build on; empty: one is trained first", place=True)
    policy_id: str = setting("", "which one that is", filled=True)
    policy_settings: dict[str, Any] = setting({}, "its settings", filled=True)
    policy_steps: int | None = setting(None, "updates of the lm_bc that is trained first; null: as many as this run has", low=1, place=True)
    observation_weight: float = setting(0.0, "of the lm_bc that is trained first: weight of the loss on tokens of observations", low=0.0)


class Cloned(TextAlgorithm):
    """Finds or trains the cloned policy, takes its settings over, and knows its parameters."""

    alike: ClassVar[tuple[str, ...]] = SAME  # settings that are those of the cloned policy

    @classmethod
    def clones(cls, config: Any) -> bool:
        """Whether a cloned policy is wanted with these settings."""
        return True

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """The cloned policy, where one is wanted."""
        c = config.algo
        if not cls.clones(c):
            if c.policy:
                cause = next(f"algo.{n}={getattr(c, n)}" for n in ("start", "trunk") if hasattr(c, n))
                raise UserError(f"algo.policy={c.policy} is not looked at with {cause}: leave it out, or take the cloned policy there")
            return {}
        kind = registry.get("algo", "lm_bc")
        settings = {f.name: getattr(c, f.name) for f in dataclasses.fields(kind.Config) if f.name != "name" and hasattr(c, f.name)}
        steps = c.policy_steps or config.steps
        return {"policy": Requirement("lm_bc", settings, steps=steps, label="policy-lm_bc", take=lambda run: run.state.params["policy"])}

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The cloned policy's language model: where that lies is no part of its settings."""
        if "policy" not in pretrained:
            return config
        lm = pretrained["policy"].algorithm.config.lm
        return dataclasses.replace(config, algo=dataclasses.replace(config.algo, lm=lm))

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """The language model's settings are those of the cloned policy."""
        told = config.policy_settings
        same = {name: told[name] for name in cls.alike if name in told}
        # the cloned policy looks back no further
        shorter = {n: min(getattr(config, n) or told[n], told[n]) for n in ("length", "action_tokens") if told.get(n)}
        return super().fit_config(dataclasses.replace(config, **same, **shorter), dataset, grid)

    def cloned(self) -> Params | None:
        """The cloned policy's parameters; None where none is wanted, or nothing is to be learnt."""
        return self.pretrained.get("policy")

    def clone(self) -> LM | None:
        """The cloned policy, frozen; None where `cloned` is."""
        params = self.cloned()
        if params is None:
            return None
        kind = registry.get("algo", "lm_bc")
        known = {f.name for f in dataclasses.fields(kind.Config)}
        settings = {k: v for k, v in self.config.policy_settings.items() if k in known}
        clone = language_model(kind.Config(**{**settings, "lm": self.config.lm}))
        clone.load_state_dict(params)
        return clone.requires_grad_(False)


# ---- values that are numbers or distributions


@dataclass
class HeadSettings:
    """Settings of value heads."""

    value_head: str = setting(
        "scalar", "values are numbers, or distributions over bins (for each token: small vocabularies only)", choices=("scalar", "hl_gauss")
    )
    bins: int = setting(51, "of such a distribution", low=2)
    value_min: float | None = setting(None, "lowest value of its bins; null: from the data")
    value_max: float | None = setting(None, "highest value of its bins; null: from the data")


def ranged(config: Any, dataset: Dataset, tokens: float = 1.0) -> Any:
    """Settings whose bins have a range, from the data where it is not given. tokens: how often a turn is discounted, on average."""
    c = config
    if c.value_head == "scalar" or None not in (c.value_min, c.value_max):
        return c
    low, high = value_range(dataset, c.discount**tokens)
    return dataclasses.replace(
        c,
        value_min=min(low, 0.0) if c.value_min is None else c.value_min,
        value_max=max(high, 0.0) if c.value_max is None else c.value_max,
    )


def head_of(config: Any) -> ValueHead:
    """The value head of these settings."""
    c = config
    low, high = (-1.0, 1.0) if c.value_min is None or c.value_max is None else (c.value_min, c.value_max)
    return make_head(c.value_head, c.bins, low, high)
