"""What the loop of `offrl finetune` asks of an algorithm that learns from what its present policy just played."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from offrl.actor import Actor, Carry
from offrl.algorithm import Adam, Algorithm, Batch, ConfigT, Dataset, Loss, Metrics, Params, TrainState, Tree, Update
from offrl.errors import UserError
from offrl.families.on_policy import ppo
from offrl.settings.field import setting

NAMES = ("actor", "critic")  # modules


@dataclass
class OnPolicySettings:
    """Settings of the iterations, and of the objective that they have in common."""

    horizon: int = setting(2048, "steps of each environment in an iteration", low=1)
    passes: int = setting(10, "passes over an iteration's steps, at most", low=1)
    batch_size: int = setting(
        0, "steps in an update, of which a pass makes as many as there are; 0: all of an iteration in one", low=0
    )
    target_kl: float | None = setting(
        None, "the passes end after one with a larger divergence from the policy that played; null: never"
    )
    clip: float = setting(0.2, "the ratio of densities counts up to 1 +- this", low=0.0)
    discount: float = setting(0.99, "per environment step", low=0.0, high=1.0)
    gae_decay: float = setting(0.95, "decay of later errors in an advantage (lambda)", low=0.0, high=1.0)
    gradient_norm: float = setting(1.0, "largest joint norm of both gradients; 0: any", low=0.0)
    observation_clip: float = setting(10.0, "normalised observations are cut off at +- this", low=0.0)
    scale_rewards: bool = setting(False, "divide rewards by their running standard deviation and cut off at +-5")
    time_limits: str = setting(
        "bootstrap",
        "a cut episode: bootstrap: goes on with the value of its last state; end: earns nothing more",
        choices=("bootstrap", "end"),
    )


class OnPolicyActor(Actor):
    """A policy that tells what it sees before it draws an action."""

    @abstractmethod
    def look(self, carry: Carry, observations: Tensor, key: Tensor) -> tuple[Batch, Carry]:
        """(what the policy sees of normalised observations [E, O], by name [E, ...], the next carry)."""


class PlayedOnly:
    """There are no batches of recorded data."""

    def __init__(self, usage: str) -> None:
        self.usage = usage

    def prepare(self, dataset: Dataset) -> Any:
        raise UserError(self.usage)

    def __call__(self, source: Any, key: Tensor, batch_size: int) -> Batch:
        raise UserError(self.usage)


class OnPolicy(Algorithm[ConfigT]):
    """An update is a step on one minibatch of what was just played: what the policy saw, what it drew, and
    "advantages", "returns", "values" (before the passes) and "weight" (0: the row does not count), all [B].

    `extra` has "learning" [], 0 once the passes of the iteration have ended, and the observations' "mean" and "std"
    [O].
    """

    usage: ClassVar[str]  # how it is trained, in one line

    @classmethod
    def requires(cls, config: Any, dataset: Dataset) -> dict[str, Any]:
        raise UserError(cls.usage)

    def sampler(self) -> Any:
        return PlayedOnly(self.usage)

    def extra(self, params: dict[str, Params]) -> Tree:
        width = self.spec.observation_dim
        return {"learning": torch.ones(()), "mean": torch.zeros(width), "std": torch.ones(width)}

    @property
    def statistics(self) -> str:
        """The observations' statistics: first: those of the first iteration, in which the policy acts the same whatever
        it sees; running: those of all iterations before; none: 0 and 1."""
        return "none"

    @property
    def learns_from_success(self) -> bool:
        """Whether rewards are 1 where the environment reports success, else 0."""
        return False

    @property
    def ends_on_success(self) -> bool:
        """Whether a success ends its episode."""
        return False

    def normalised(self, extra: Tree, observations: Tensor) -> Tensor:
        """Observations [..., O] by the statistics of `extra`, cut off."""
        limit = self.config.observation_clip
        return ((observations - extra["mean"]) / extra["std"]).clamp(-limit, limit)

    @abstractmethod
    def features(self, extra: Tree, sights: Batch) -> Tensor:
        """The networks' input x [..., X] of what an `OnPolicyActor` sees."""

    @abstractmethod
    def draw(self, actor: Params, x: Tensor, sights: Batch, key: Tensor) -> tuple[Tensor, Batch]:
        """(actions [E, A] in [-1, 1], what updates need of the draw: "u" [E, A], its "log_prob" [E], and so on)."""

    def value(self, critic: Params, x: Tensor) -> Tensor:
        """V [...] of features x [..., X]."""
        return self.apply("critic", critic, x).squeeze(-1)

    @abstractmethod
    def rates(self, iteration: int, iterations: int) -> dict[str, float]:
        """Learning rates of an iteration, from 0, by their settings."""

    def flags(self, iteration: int) -> dict[str, float]:
        """Entries of `extra` at the beginning of an iteration's passes."""
        return {"learning": 1.0}

    def prepared(self, batch: Batch) -> Batch:
        """The rows [R, ...] of an iteration before its passes."""
        return batch

    @abstractmethod
    def ppo_loss(self, params: dict[str, Params], state: TrainState, batch: Batch) -> Loss:
        """The loss of both modules, with "actor/kl" among its metrics."""

    def limited(self, gradients: dict[str, Params]) -> dict[str, Params]:
        """The gradients of both modules, within `gradient_norm`."""
        return ppo.clipped_together(gradients, self.config.gradient_norm)

    def adapted(self, extra: Tree, metrics: Metrics) -> Tree:
        """`extra` before the step that follows from `metrics`."""
        return extra

    def stepper(self, name: str, extra: Tree) -> Adam:
        """The optimiser of a module's next step."""
        return self.optimizer(name)

    def moves(self, name: str, extra: Tree) -> Tensor:
        """[] 1 where a module's next step is made, else 0."""
        return extra["learning"]

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        """One step on both modules, if the passes of this iteration have not ended: after a step whose divergence was
        too large.
        """
        grads, (_, metrics) = grad_and_value(self.ppo_loss, has_aux=True)(
            {n: state.params[n] for n in NAMES}, state, batch
        )
        grads, extra, limit = self.limited(grads), self.adapted(state.extra, metrics), self.config.target_kl
        params, opt, learning = dict(state.params), dict(state.opt), extra["learning"]
        for n in NAMES:
            flag = self.moves(n, extra)
            new, memory = self.stepper(n, extra).update(params[n], grads[n], opt[n])
            params[n], opt[n] = chosen(flag, new, params[n]), chosen(flag, memory, opt[n])
        again = learning if limit is None else learning * (metrics["actor/kl"] <= limit)
        state = state._replace(
            params=params, opt=opt, extra={**extra, "learning": again}, step=state.step + learning.long() - 1
        )
        # sums of these over `learning` are the means over the passes that were made
        return state, {"learning": learning, **{name: learning * value for name, value in metrics.items()}}


def chosen(flag: Tensor, new: Tree, old: Tree) -> Tree:
    """`new` where the flag [] is 1, else `old`, leaf by leaf."""
    return pytree.tree_map(lambda a, b: torch.where(flag > 0.0, a, b), new, old)
