"""Zero-shot algorithms: forward-backward representations, the tasks z that they are trained on, and the inference of a
task.

"Does Zero-Shot Reinforcement Learning Exist?" (Touati, Rapin and Ollivier, 2023, arXiv 2209.14935), after "Learning One
Representation to Optimize All Rewards" (arXiv 2103.07945); details as in the code of arXiv 2309.15178. Shapes in
comments: B batch, D dimension of z."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import (
    Actor,
    Adam,
    Algorithm,
    Batch,
    Carry,
    Dataset,
    Grid,
    Params,
    TrainState,
    Traits,
    Tree,
    with_config,
)
from offrl.errors import UserError
from offrl.families.goal_conditioned import required_goals
from offrl.nn.representations.forward_backward import on_sphere
from offrl.settings.field import setting

TASKS = ("reward", "goal")
ONCE = 1 << 40  # updates between two calls of `refresh`: there is one, before the first


@dataclass
class ZeroShotSettings:
    """Settings of zero-shot algorithms."""

    learning_rate: float = setting(1e-4, "Adam's learning rate", low=0.0)
    actor_learning_rate: float | None = setting(None, "the actor's, where it is another; null: learning_rate", low=0.0)
    batch_size: int = setting(512, "transitions in a batch; each is compared with each", low=2)
    discount: float = setting(0.98, "discount factor", high=1.0)
    polyak: float = setting(
        0.01, "share of the online parameters that enters the targets at each update", low=0.0, high=1.0
    )
    z_dim: int = setting(50, "dimension of F, of B and of z", low=1)
    goal_share: float = setting(
        0.5, "share of the z trained on that are B of a state; the others are uniform on the sphere", low=0.0, high=1.0
    )
    gradient_limit: float = setting(
        1.0, "largest size of each entry of a gradient; 0: no limit", low=0.0, structural=True
    )
    inputs_hidden: list[int] = setting(
        [1024, 512], "widths of the layers that read (s, a) or (s, z), before both are joined", low=1
    )
    hidden: list[int] = setting([1024, 1024], "widths of the hidden layers after that, of F and of the actor", low=1)
    backward_hidden: list[int] = setting([256, 256, 256], "widths of B's hidden layers", low=1)
    task: str = setting(
        "reward",
        "what the trained policy does: reward: earn the data's rewards; goal: reach the goal it is told. Training is "
        "the same",
        choices=TASKS,
    )
    inference_samples: int = setting(
        10_000, "task=reward: transitions of the data, drawn once, from which the task is inferred", low=1
    )


ConfigT = TypeVar("ConfigT", bound=ZeroShotSettings)


class ZeroShot(Algorithm[ConfigT]):
    """Base of zero-shot algorithms. Module "representation" holds F and B, `TrainState.extra` a sample of states and
    their rewards.

    F(s, a, z) . B(s') is the density, with respect to the data, of the discounted times spent in s' from (s, a) on by
    the policy for z. So F(s, a, z) . z is that policy's Q for the rewards whose mean of r(s') B(s') over the data is z:
    the policy is to maximise it."""

    traits = Traits(targets=("representation",), policy_modules=("actor", "representation"), actions=("continuous",))

    def __init__(self, config: Any, spec: Any, pretrained: Mapping[str, Any] | None = None) -> None:
        if config.task == "goal" and spec.goal_dim:
            raise UserError(
                f"{config.name} is told goals as observations, and those of {spec.name} are {spec.goal_dim} numbers of "
                "their own (achieved_goals): take algo.task=reward, or gciql, crl or hiql"
            )
        super().__init__(config, spec, pretrained)

    @classmethod
    def fit_config(cls, config: ConfigT, dataset: Dataset, grid: Grid = None) -> ConfigT:
        """The config completed from the data. Raises UserError where the task would be inferred from rewards that are
        all 0.
        """
        if config.task == "reward" and not bool((dataset.columns["rewards"] != 0.0).any()):
            raise UserError(
                f"all rewards of {dataset.spec.name} are 0, so that they name no task: take algo.task=goal, or label "
                "rewards (dataset.reward_labels)"
            )
        return super().fit_config(config, dataset, grid)

    @classmethod
    def traits_for(cls, config: ConfigT) -> Traits:
        return replace(cls.traits, goal_conditioned=config.task == "goal")

    def optimizer(self, name: str) -> Adam:
        c = self.config
        rate = c.actor_learning_rate if name == "actor" and c.actor_learning_rate is not None else c.learning_rate
        return Adam(rate, clip_value=c.gradient_limit)

    # ---- learning

    def forward_map(self, params: Params, observations: Tensor, actions: Tensor, z: Tensor) -> Tensor:
        """F(s, a, z), twice: [2, B, D]."""
        return self.apply("representation", params, "forward", observations.flatten(1), actions, z)

    def backward_map(self, params: Params, observations: Tensor) -> Tensor:
        """B(s) [B, D]."""
        return self.apply("representation", params, "backward", observations.flatten(1))

    def q(self, params: Params, observations: Tensor, actions: Tensor, z: Tensor) -> Tensor:
        """F(s, a, z) . z, twice: [2, B]."""
        return (self.forward_map(params, observations, actions, z) * z).sum(-1)

    def draw_z(self, state: TrainState, batch: Batch, key: Tensor) -> Tensor:
        """The tasks [B, D] of a batch: uniform on the sphere of radius sqrt(D), or B of the batch's states, shuffled.
        Constants.
        """
        count = len(batch["rewards"])
        sphere_key, mix_key, shuffle_key = rng.split(key, 3)
        z = on_sphere(rng.normal(sphere_key, (count, self.config.z_dim)))
        order = rng.permuted(shuffle_key, torch.arange(count, device=key.device), count)
        goals = self.backward_map(state.params["representation"], batch["observations"][order])
        from_goals = rng.uniform(mix_key, (count, 1)) < self.config.goal_share
        return torch.where(from_goals, goals.to(z.dtype), z)

    def target_measure(self, state: TrainState, batch: Batch, actions: Tensor, z: Tensor) -> Tensor:
        """The smaller of the target networks' F(s', a', z) . B(s'_j): [B, B]."""
        f = self.forward_map(state.target["representation"], batch["next_observations"], actions, z)
        return measure(f, self.backward_map(state.target["representation"], batch["next_observations"])).amin(0)

    # ---- the task

    def extra(self, params: dict[str, Params]) -> Tree:
        if self.config.task != "reward":
            return {}
        samples = self.config.inference_samples
        return {"states": torch.zeros(samples, self.spec.observation_dim), "rewards": torch.zeros(samples)}

    @property
    def every(self) -> int:
        return ONCE if self.config.task == "reward" else 0

    def refresh(
        self, state: TrainState, source: Any, key: Tensor, *, step: int
    ) -> tuple[TrainState, dict[str, Tensor]]:
        """Draw the transitions from which the task is inferred. They are drawn where the data lie, which may be on
        disk.
        """
        batch = self.sampler()(source, key.to(source.table.device), self.config.inference_samples)
        states = batch["next_observations"].flatten(1).to(key.device, torch.float32)
        return state.with_extra(states=states, rewards=batch["rewards"].to(key.device)), {}

    def infer(self, state: TrainState) -> Tensor:
        """z [D] of the sample's rewards: the mean of r(s') B(s'), scaled to length sqrt(D)."""
        b = self.backward_map(state.params["representation"], state.extra["states"])
        return on_sphere((state.extra["rewards"].unsqueeze(-1) * b).mean(0))


class ZeroShotActor(Actor):
    """Base of zero-shot policies. A carry is z [E, D] of the goals (task=goal; None: none was set), or None: all
    episodes have one task.
    """

    algorithm: ZeroShot

    def __init__(self, algorithm: ZeroShot, state: TrainState) -> None:
        super().__init__(algorithm, state)
        self.inferred = algorithm.infer(state) if algorithm.config.task == "reward" else None

    def set_goal(self, carry: Carry, goals: Tensor) -> Carry:
        return self.algorithm.backward_map(self.state.params["representation"], goals)

    def task(self, carry: Carry, observations: Tensor) -> Tensor:
        """z [E, D] of the running episodes. Raises UserError where no goal was set."""
        return (
            required_goals(self.algorithm, carry)
            if self.inferred is None
            else self.inferred.expand(observations.shape[0], -1)
        )

    def infer_task(self, next_observations: Tensor, rewards: Tensor) -> Actor:
        config = dataclasses.replace(self.algorithm.config, task="reward", inference_samples=len(rewards))
        algorithm = with_config(self.algorithm, config)
        return algorithm.actor(
            self.state._replace(extra={**self.state.extra, "states": next_observations, "rewards": rewards})
        )


def measure(f: Tensor, b: Tensor) -> Tensor:
    """M_ij = F_i . B_j of F [2, B, D] and B [B, D]: [2, B, B]."""
    return f @ b.transpose(-1, -2)


def off_diagonal(x: Tensor) -> Tensor:
    """The mean over i != j of x [..., B, B]: [...]."""
    n = x.shape[-1]
    index = torch.arange(n, device=x.device)
    return torch.where(index.unsqueeze(-1) == index, 0.0, x).sum((-2, -1)) / (n * (n - 1))


def measure_loss(m: Tensor, target: Tensor, discounts: Tensor) -> Tensor:
    """The loss of both M [2, B, B] (arXiv 2103.07945, equation 18): half the mean square of M_ij - discount_i M'_ij
    over i != j, less the mean of M_ii. discounts [B]: 0 where the episode ended. []."""
    error = m - discounts.unsqueeze(-1) * target
    return (0.5 * off_diagonal(error.square()) - m.diagonal(dim1=-2, dim2=-1).mean(-1)).sum()


def orthonormality_loss(b: Tensor) -> Tensor:
    """The mean of (B_i . B_j)**2 over i != j, less twice the mean of B_i . B_i, for B [B, D]: least where B's
    covariance is 1. [].
    """
    products = b @ b.transpose(-1, -2)
    return off_diagonal(products.square()) - 2.0 * products.diagonal(dim1=-2, dim2=-1).mean()
