"""The reference policy of algorithms of texts: a run of `lm_bc`, named or trained first.

An algorithm's language models begin with its weights; some are guided by values beside it (`offrl.lm.value_guided`) or
stay close to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from offrl import registry
from offrl.errors import UserError
from offrl.lm.models.causal_lm import LM
from offrl.lm.models.configured import language_model
from offrl.lm.settings import TextSettings
from offrl.optim import Params
from offrl.pretrained import Requirement
from offrl.settings.field import setting

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

# settings of both policies; with other adapters an algorithm's language models could not begin with the reference's
# weights
SAME = (
    "lm", "lm_id", "tokenizer", "vocabulary", "width", "layers", "heads", "history", "append_end",
    "tune", "rank", "lora_alpha", "lora_layers",
)  # fmt: skip
BEHAVIOUR = "behaviour/"  # before names of the reference policy's tensors in policy files


@dataclass
class ReferenceSettings(TextSettings):
    """Settings of algorithms that build on a reference policy."""

    policy: str = setting("", "a trained run of lm_bc to build on; empty: one is trained first", place=True)
    policy_id: str = setting("", "which one that is", filled=True)
    policy_settings: dict[str, Any] = setting({}, "its settings", filled=True)
    policy_steps: int | None = setting(
        None, "updates of the lm_bc that is trained first; null: as many as this run has", low=1, place=True
    )
    observation_weight: float = setting(
        0.0, "of the lm_bc that is trained first: weight of the loss on tokens of observations", low=0.0
    )

    @property
    def wants_reference(self) -> bool:
        return True


def requirement(config: TrainConfig) -> dict[str, Requirement]:
    """The reference policy's run, where the settings need one. Raises UserError for one that is named but unused."""
    c = config.algo
    if not c.wants_reference:
        if getattr(c, "policy", ""):
            cause = next(f"algo.{n}={getattr(c, n)}" for n in ("start", "trunk") if hasattr(c, n))
            raise UserError(
                f"algo.policy={c.policy} is not looked at with {cause}: leave it out, or take the cloned policy there"
            )
        return {}
    kind = registry.get("algo", "lm_bc")
    settings = {
        f.name: getattr(c, f.name) for f in dataclasses.fields(kind.Config) if f.name != "name" and hasattr(c, f.name)
    }
    steps = c.policy_steps or config.steps
    return {
        "policy": Requirement(
            "lm_bc", settings, steps=steps, label="policy-lm_bc", select=lambda run: run.state.params["policy"]
        )
    }


def with_reference_model(config: TrainConfig, pretrained: Mapping[str, Any]) -> TrainConfig:
    """The run's settings with the reference policy's language model: where that lies is no part of its settings."""
    if "policy" not in pretrained:
        return config
    lm = pretrained["policy"].algorithm.config.lm
    return dataclasses.replace(config, algo=dataclasses.replace(config.algo, lm=lm))


def with_reference_settings(config: Any) -> Any:
    """The settings with those of the reference policy's language model, where there is one."""
    reference = getattr(config, "policy_settings", {})
    shared = {name: reference[name] for name in SAME if name in reference}
    # the reference policy looks back no further
    limits = {
        n: min(getattr(config, n) or reference[n], reference[n])
        for n in ("length", "action_tokens")
        if reference.get(n)
    }
    return dataclasses.replace(config, **shared, **limits)


def frozen_reference(config: Any, pretrained: Mapping[str, Any]) -> LM | None:
    """The reference policy as a module; None where the settings need none, or nothing is to be learnt."""
    params = pretrained.get("policy")
    if params is None:
        return None
    kind = registry.get("algo", "lm_bc")
    names = {f.name for f in dataclasses.fields(kind.Config)}
    settings = {k: v for k, v in config.policy_settings.items() if k in names}
    reference = language_model(kind.Config(**{**settings, "lm": config.lm}))
    reference.load_state_dict(params)
    return reference.requires_grad_(False)


def with_reference_weights(params: Params, reference: Params) -> Params:
    """Parameters of a module that is a language model, or has one as `lm`, with the reference policy's weights in
    place.
    """
    result = {}
    for name, value in params.items():
        weight = reference.get(name.removeprefix("lm."))
        result[name] = value
        if weight is not None:
            rows = min(len(weight), len(value))  # only embeddings of positions may be more or fewer
            result[name] = torch.cat([weight[:rows].to(value.device), value[rows:]])
    return result


# ---- policy files of policies that act beside their reference


def pack(pretrained: Mapping[str, Any], identity: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The reference policy for a policy file: its tensors and its identity; see `Algorithm.assets`."""
    reference = pretrained.get("policy")
    if reference is None:
        return {}, {}
    return {BEHAVIOUR + name: value for name, value in reference.items()}, {"behaviour": identity}


def unpack(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """(the file's other tensors, the value of `Algorithm.pretrained`); see `Algorithm.load_assets`."""
    remainder = {name: tensor for name, tensor in tensors.items() if not name.startswith(BEHAVIOUR)}
    reference = {name.removeprefix(BEHAVIOUR): tensor for name, tensor in tensors.items() if name.startswith(BEHAVIOUR)}
    return remainder, {"policy": reference} if reference else {}
