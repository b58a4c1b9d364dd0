"""LaMo's network: embeddings of an episode's tokens, a language model as trunk, and the action's head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor, nn

from offrl.families.sequence import StepPolicy
from offrl.lm.models.adapters import Trunk
from offrl.lm.models.pretrained import Language
from offrl.nn.mlp import ACTIVATIONS, Linear
from offrl.nn.policies import Deterministic, make_policy
from offrl.nn.transformer import Norm, Table, interleave, visible


class Embedding(nn.Module):
    """h = W x + b; with `deep` W' gelu(h) + b' + h. x [..., in] -> [..., D]."""

    def __init__(self, in_dim: int, width: int, deep: bool) -> None:
        super().__init__()
        self.first = Linear(in_dim, width)
        self.second = Linear(width, width) if deep else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h if self.second is None else self.second(ACTIVATIONS["gelu"](h)) + h


class Clipped(Deterministic):
    """a = f(s), cut off at the ends of its range when acting: the authors' head with a hidden layer has no tanh."""

    def forward(self, observations: Tensor, key: Tensor | None = None) -> tuple[Tensor, ...]:
        return (self.net(observations, key),)

    def mode(self, dist: tuple[Tensor, ...]) -> Tensor:
        return dist[0].clamp(-1.0, 1.0)

    def sample(self, dist: tuple[Tensor, ...], key: Tensor) -> Tensor:
        return self.mode(dist)


class LanguageSteps(nn.Module):
    """`Steps` with a language model for its transformer. The embedding of time is added after the norm, as in the
    authors' code.
    """

    def __init__(self, sizes: Mapping[str, int], config: Any, language: Language) -> None:
        super().__init__()
        c, self.kinds = config, tuple(sizes)
        self.embed = nn.ModuleDict(
            {kind: Embedding(size, language.width, c.embedding == "mlp") for kind, size in sizes.items()}
        )
        self.time = Table(c.max_timestep, language.width)
        nn.init.normal_(self.time.weight)  # as large as what the norm gives
        self.norm = Norm(language.width)
        self.trunk = trunk(c, language)

    def forward(
        self,
        tokens: Mapping[str, Tensor],
        timesteps: Tensor,
        valid: Tensor | None,
        key: Tensor | None,
        output_kind: str | None = None,
    ) -> dict[str, Tensor]:
        """tokens [B, K, size] by kind, timesteps and valid [B, K] -> the trunk's outputs at them, [B, K, D] by kind,
        whichever is read.
        """
        count = len(self.kinds)
        x = self.norm(interleave([self.embed[kind](tokens[kind]) for kind in self.kinds]))
        x = x + self.time(timesteps).repeat_interleave(count, -2)
        mask = None if valid is None else visible(valid.repeat_interleave(count, -1), x.shape[-2])
        x = self.trunk(x, mask, key).unflatten(-2, (-1, count))
        return {kind: x[..., i, :] for i, kind in enumerate(self.kinds)}


class LanguagePolicy(StepPolicy):
    """`StepPolicy` on a language model. Given text int64 [B, T] in place of an episode's tokens, it returns the loss on
    that.
    """

    def __init__(self, sizes: Mapping[str, int], config: Any, spec: Any, language: Language) -> None:
        nn.Module.__init__(self)
        self.output_kind, c = "observation", config
        self.steps = cast(Any, LanguageSteps(sizes, c, language))
        hidden = [language.width] if c.embedding == "mlp" else []
        if hidden and c.policy == "deterministic" and not spec.discrete:
            self.head = Clipped(language.width, spec.action_dim, hidden, activation="gelu")
        else:
            self.head = make_policy(
                c.policy, language.width, spec.action_dim, spec.num_actions, hidden, activation="gelu"
            )

    def forward(self, tokens: Any, timesteps: Any, valid: Tensor | None = None, key: Tensor | None = None) -> Any:
        if isinstance(tokens, Tensor):
            return trunk_of(self).text_loss(tokens, key)
        return super().forward(tokens, timesteps, valid, key)


def trunk(config: Any, language: Language) -> Trunk:
    """The trunk of these settings."""
    c = config
    return Trunk(
        language,
        tune=c.tune,
        rank=c.rank,
        alpha=c.lora_alpha,
        dropout=c.dropout,
        layers=c.lora_layers,
        talks=bool(c.text),
    )


def trunk_of(actor: nn.Module) -> Trunk:
    """The trunk in a policy's module."""
    return cast(Trunk, actor.get_submodule("steps.trunk"))
