"""Policies of Stable-Baselines3 as plain tensors, acting without SB3: names and shapes of the tensors say what a policy
is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.errors import UserError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "ReLU": F.relu,
    "Tanh": torch.tanh,
    "ELU": F.elu,
    "LeakyReLU": F.leaky_relu,
    "SiLU": F.silu,
    "GELU": F.gelu,
    "Mish": F.mish,
    "Softplus": F.softplus,
    "Sigmoid": torch.sigmoid,
    "Identity": lambda x: x,
}
KINDS = ("squashed", "tanh", "gaussian", "categorical", "q")
KNOWN = "SAC, TQC, TD3, DDPG, PPO, A2C and DQN with MLP policies"
CURE = "wrap it in a Python function instead: policy=file.py:name, act(observations, rng) -> actions"


@dataclass(frozen=True)
class Actor:
    """A feed-forward policy. `kind`: squashed (SAC: tanh of a Gaussian), tanh (TD3), gaussian (PPO: clipped),
    categorical (PPO) or q (DQN: the largest value)."""

    kind: str
    layers: tuple[
        tuple[Tensor, Tensor], ...
    ]  # (weight [out, in], bias [out]) of the hidden layers, each followed by the activation
    head: tuple[Tensor, Tensor]  # mean [A], logits or values of the choices [N]
    activation: str = "ReLU"
    spread: tuple[Tensor, Tensor] | Tensor | None = (
        None  # log std: a second head (squashed) or numbers [A] (gaussian); None: unknown
    )
    low: np.ndarray | None = None  # [A] range of the actions; None for discrete ones
    high: np.ndarray | None = None
    epsilon: float = 0.0  # of a q policy that explores
    clip_mean: float = 0.0  # the mean is clipped to +- this before tanh (SAC with gSDE); 0: not
    seed: int = 0
    where: str = ""

    @property
    def discrete(self) -> bool:
        return self.kind in ("categorical", "q")

    @property
    def observation_dim(self) -> int:
        return (self.layers[0] if self.layers else self.head)[0].shape[1]

    @property
    def size(self) -> int:
        """Dimensions of an action, or number of choices."""
        return self.head[1].shape[0]

    def start(self, episodes: int) -> np.random.Generator:
        """The source of the noise of that many episodes played side by side."""
        return np.random.default_rng(self.seed)

    def step(self, carry: Any, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, Any]:
        """Actions for raw observations [E, O]: [E, A] float32 in the environment's range, or [E] int64. See
        `offrl.evaluation.result.Policy`."""
        return self.act(observations, carry if explore else None)[0], carry

    @torch.no_grad()
    def act(self, observations: np.ndarray, rng: np.random.Generator | None = None) -> tuple[np.ndarray, np.ndarray]:
        """Actions, and the log density or probability of each [E] float32 under the noisy policy. Greedy without `rng`.

        The density is that of the actions as they are returned, in the environment's range; of a Gaussian policy (PPO)
        before they are clipped to it, as SB3 and D4RL have it. NaN where the policy knows no noise. Raises UserError
        where noise is asked of such."""
        x = torch.as_tensor(np.asarray(observations, np.float32)).reshape(len(observations), -1)
        if x.shape[1] != self.observation_dim:
            raise UserError(
                f"{self.where}: observations have {x.shape[1]} numbers; this policy takes {self.observation_dim}"
            )
        activation = ACTIVATIONS[self.activation]
        for weight, bias in self.layers:
            x = activation(F.linear(x, weight, bias))
        out = F.linear(x, *self.head)
        if rng is not None and self.spread is None and not self.discrete:
            raise UserError(
                f"{self.where}: this policy has no noise of its own to explore with; use explore=false, or noise=0.1"
            )
        return self._choose(out, rng) if self.discrete else self._continuous(x, out, rng)

    def _choose(self, out: Tensor, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        best = out.argmax(1)
        if self.kind == "q":
            log = torch.full_like(out, self.epsilon / self.size)
            log[torch.arange(len(out)), best] += 1.0 - self.epsilon
            log = log.log()
        else:
            log = F.log_softmax(out, 1)
        chosen = best
        if rng is not None:  # the Gumbel trick: argmax of log p + Gumbel noise has the distribution p
            chosen = (log.double() + torch.from_numpy(rng.gumbel(size=tuple(log.shape)))).argmax(1)
        return chosen.numpy(), log.gather(1, chosen[:, None])[:, 0].numpy()

    def _continuous(self, x: Tensor, mean: Tensor, rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
        assert self.low is not None and self.high is not None
        low, high = torch.as_tensor(self.low), torch.as_tensor(self.high)
        if self.clip_mean:
            mean = mean.clamp(-self.clip_mean, self.clip_mean)
        raw, log = mean, torch.full((len(mean),), torch.nan)
        if self.spread is not None:
            log_std = (
                F.linear(x, *self.spread).clamp(-20, 2)
                if isinstance(self.spread, tuple)
                else self.spread.expand_as(mean)
            )
            noise = torch.zeros_like(mean)
            if rng is not None:
                noise = torch.from_numpy(rng.standard_normal(tuple(mean.shape), np.float32))
                raw = mean + log_std.exp() * noise
            log = (-0.5 * noise**2 - log_std - 0.5 * float(np.log(2 * np.pi))).sum(1)
        if self.kind == "gaussian":
            return torch.clamp(raw, low, high).numpy(), log.numpy()
        squashed = torch.tanh(raw)
        # log(1 - tanh(u)^2), stable for large u, and the width of the range
        slope = 2.0 * (float(np.log(2.0)) - raw - F.softplus(-2.0 * raw)) + torch.log((high - low) / 2)
        return (low + 0.5 * (squashed + 1.0) * (high - low)).numpy(), (log - slope.sum(1)).numpy()


def actor_of(model: Any, where: str) -> Actor:
    """The policy of a model of SB3 (or sb3-contrib) that was loaded. Raises UserError for one that its tensors do not
    show: a class or features extractor of the user's.
    """
    policy, box = model.policy, hasattr(model.action_space, "low")
    extractor = getattr(policy, "features_extractor_class", type(None)).__name__
    if type(policy).__module__.partition(".")[0] not in ("stable_baselines3", "sb3_contrib") or (
        extractor != "FlattenExtractor"
    ):
        raise UserError(
            f"{where} is a {type(policy).__name__} with a {extractor}; only {KNOWN} are read. To use it, {CURE}"
        )
    low, high = (b.reshape(-1) for b in (model.action_space.low, model.action_space.high)) if box else (None, None)
    return actor_from(
        policy.state_dict(),
        activation=policy.activation_fn.__name__,
        low=low,
        high=high,
        discrete=not box,
        epsilon=getattr(model, "exploration_rate", 0.0),
        clip_mean=getattr(getattr(model, "actor", None), "clip_mean", 2.0),
        where=where,
    )


def actor_from(
    tensors: Mapping[str, Tensor],
    *,
    activation: str | None = None,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
    discrete: bool = False,
    epsilon: float = 0.0,
    clip_mean: float = 2.0,
    where: str = "the policy",
) -> Actor:
    """An SB3 policy's state dict (`policy.pth`, or `model.policy.state_dict()`) as an Actor.

    `activation`: None is the default of its algorithm. Raises UserError for tensors that no MLP policy of SB3 has.
    """
    own = {
        k: v.detach().cpu().float()
        for k, v in tensors.items()
        if not re.match(r"(critic|q_net_target|actor_target|value_net)", k)
    }
    own = {k: v for k, v in own.items() if not k.startswith("mlp_extractor.value_net.")}
    if strange := [k for k in own if re.search(r"features_extractor|lstm", k)]:
        what = "a recurrent policy" if "lstm" in strange[0] else "a policy for images or dict observations"
        raise UserError(
            f"{where} is {what} (it has '{strange[0]}'), which is not read; only {KNOWN} are. To use it, {CURE}"
        )
    prefix, head, spread = _parts(own, where)
    layers, names = _layers(own, prefix, where)
    default = "Tanh" if prefix.startswith("mlp_extractor") else "ReLU"
    heads, unread = [f"{head}.weight", f"{head}.bias"], set(own) - names
    result: dict[str, Any] = {"low": low, "high": high, "where": where, "activation": activation or default}
    if result["activation"] not in ACTIVATIONS:
        raise UserError(
            f"{where} has the activation {result['activation']}; known are {', '.join(ACTIVATIONS)}. To use it, {CURE}"
        )
    if head == "":  # the last layer of the stack is the head
        *layers, last = layers
        kind = "q" if prefix.startswith("q_net") else "tanh"
        result["epsilon"] = epsilon
    else:
        last = (own[heads[0]], own[heads[1]])
        unread -= set(heads)
        kind = "squashed" if prefix.startswith("actor") else "categorical" if discrete else "gaussian"
        if f"{spread}.weight" in own:
            result["spread"] = (own[f"{spread}.weight"], own[f"{spread}.bias"])
        elif spread in own and own[spread].ndim == 1 and kind == "gaussian":
            result["spread"] = own[spread]
        elif kind == "squashed":
            result["clip_mean"] = clip_mean  # gSDE
        unread -= {spread, f"{spread}.weight", f"{spread}.bias"}
    if unread:
        raise UserError(
            f"{where} has tensors of a policy that is not known ('{min(unread)}'); only {KNOWN} are read. To use it, "
            f"{CURE}"
        )
    actor = Actor(kind, tuple(layers), last, **result)
    if not actor.discrete:
        for name in ("low", "high"):
            if np.size(result[name]) != actor.size or not np.isfinite(np.asarray(result[name], float)).all():
                raise UserError(f"{where}: the range of its {actor.size} actions is not known ({name}: {result[name]})")
    if any(not torch.isfinite(v).all() for v in own.values()):
        raise UserError(f"{where} holds NaN or infinite weights: its training had diverged")
    return actor


def _parts(own: Mapping[str, Tensor], where: str) -> tuple[str, str, str]:
    """The names of the hidden layers, the head and the log std among the tensors'; an empty head: the last of the
    layers.
    """
    if any(k.startswith("actor.mu.") for k in own):
        if "actor.mu.weight" in own:
            return "actor.latent_pi.", "actor.mu", "actor.log_std"
        if any(k.startswith("actor.latent_pi.") for k in own):
            return "actor.latent_pi.", "actor.mu.0", "actor.log_std"  # gSDE: the mean passes a clip
        return "actor.mu.", "", ""
    if any(k.startswith("q_net.q_net.") for k in own):
        return "q_net.q_net.", "", ""
    if "action_net.weight" in own:
        return "mlp_extractor.policy_net.", "action_net", "log_std"
    first = min(own, default="nothing")
    raise UserError(
        f"{where} has no policy that is known (its tensors begin with '{first}'); only {KNOWN} are read. To use it, "
        f"{CURE}"
    )


def _layers(own: Mapping[str, Tensor], prefix: str, where: str) -> tuple[list[tuple[Tensor, Tensor]], set[str]]:
    """The linear layers 0, 2, 4, ... of a stack, and the names they had."""
    layers = sorted({int(m[1]) for k in own if (m := re.fullmatch(re.escape(prefix) + r"(\d+)\.(weight|bias)", k))})
    names = {f"{prefix}{i}.{part}" for i in layers for part in ("weight", "bias")}
    regular = layers == list(range(0, 2 * len(layers), 2)) and names <= set(own)
    if not regular or any(own[f"{prefix}{i}.weight"].ndim != 2 for i in layers):
        raise UserError(
            f"{where}: '{prefix}*' is not a plain stack of linear layers and activations (layers {layers}). To use it, "
            f"{CURE}"
        )
    return [(own[f"{prefix}{i}.weight"], own[f"{prefix}{i}.bias"]) for i in layers], names
