"""MBPO: "When to Trust Your Model: Model-Based Policy Optimization" (Janner et al., 2019, arXiv 1906.08253), with the
exploration of COPlanner (Wang et al., 2023, arXiv 2310.07220).

For environments: `offrl finetune algo=mbpo env=ID` begins with fresh parameters and learns from play alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.actor import Actor, Carry, MemorylessActor
from offrl.algorithm import Batch, TrainState, Traits, Tree, Update
from offrl.data.samplers.tables import Experience
from offrl.data.samplers.transitions import Transitions
from offrl.errors import UserError
from offrl.families.sac import SoftActorCritic, SoftSettings
from offrl.registry import register
from offrl.settings.field import defaults, setting
from offrl.world_models.model_rollouts import LOOKAHEAD_DISCOUNT, LOOKAHEAD_UNCERTAINTY, RolloutSettings
from offrl.world_models.online import LearnsModel, OnlineModelSettings, experienced
from offrl.world_models.rollout import Act, ImaginedRing, branched, careful, describe
from offrl.world_models.uncertainty import fault, measure


@dataclass
@defaults(horizon=1, rollouts=100_000, rollout_every=5_000, rollout_retain=4)
class MBPOConfig(OnlineModelSettings, RolloutSettings, SoftSettings):
    """Settings of MBPO; the defaults are the authors' for Walker2d, with 20 updates in each environment step."""

    name: str = "mbpo"
    horizon_growth: list[int] = setting(
        [],
        "horizon>1: [a,b]: rollouts have 1 step until update a, and as many as horizon from update b on (Hopper: "
        "horizon=15, [400000,3000000]); []: always as many",
        low=0,
    )
    candidates: int = setting(
        1,
        "actions of the policy that each step in the environment chooses from, by looking ahead in the model "
        "(COPlanner: 5); 1: no look-ahead",
        low=1,
    )
    lookahead: int = setting(5, "candidates>1: steps that each one is followed", low=1)
    optimism: float = setting(
        1.0, "candidates>1: times the uncertainty, is added to each reward of those steps (COPlanner's beta)", low=0.0
    )


class OptimisticActor(MemorylessActor):
    """Explores by the sample of the policy with the best imagined future, where what is uncertain counts as good."""

    algorithm: MBPO

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        if not explore:
            return super().act(carry, observations, key, explore=False)
        return self.algorithm.explore(self.state, observations, key), carry


@register("algo", "mbpo")
class MBPO(LearnsModel[MBPOConfig], SoftActorCritic[MBPOConfig]):
    """SAC on batches that are mostly imagined. Before every `rollout_every` updates an ensemble of dynamics models
    goes on learning from all transitions so far, and new rollouts of the policy begin in their states (algorithm 2).

    Module "dynamics" is a replica's own ensemble. The losses of policy, critics and entropy are SAC's.
    """

    traits = replace(
        SoftActorCritic.traits, actions=("continuous",), n_step=False, observations="vector", learns_model=True
    )

    @classmethod
    def traits_for(cls, config: MBPOConfig) -> Traits:
        return cls.traits if config.candidates == 1 else replace(cls.traits, policy_modules=("actor", "dynamics"))

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        ordered = c.horizon_growth == sorted(set(c.horizon_growth))
        if len(c.horizon_growth) not in (0, 2) or not ordered:
            raise UserError(f"algo.horizon_growth={c.horizon_growth} must be [] or two updates, the first one smaller")
        modules = super().modules()
        self.imagined = ImaginedRing(c, self.spec)
        if c.candidates > 1 and (problem := fault(LOOKAHEAD_UNCERTAINTY, self.model)):
            raise UserError(f"algo.candidates={c.candidates}: {problem}: more algo.members, or algo.candidates=1")
        return modules

    def actor(self, state: TrainState) -> Actor:
        return (MemorylessActor if self.config.candidates == 1 else OptimisticActor)(self, state)

    def policy_of(self, state: TrainState) -> Act:
        """Samples of the policy."""
        return lambda observations, past, key: self.sample(state.params["actor"], observations, key)[0]

    def explore(self, state: TrainState, observations: Tensor, key: Tensor) -> Tensor:
        """Actions [B, A]: of `candidates` samples those with the largest sum of 0.97^i (r_i + optimism u_i) over
        `lookahead` steps of the model, u the disagreement of its members (UP-MPC, arXiv 2310.07220).
        """
        c = self.config
        return careful(
            self.model,
            self.tree(state),
            self.policy_of(state),
            observations,
            self.model.first_past(observations),
            key,
            horizon=c.lookahead,
            candidates=c.candidates,
            measure=measure(LOOKAHEAD_UNCERTAINTY),
            penalty=-c.optimism,
            discount=LOOKAHEAD_DISCOUNT,
        )

    # ---- rollouts

    @property
    def every(self) -> int:
        return self.config.rollout_every

    def buffers(self) -> Tree:
        return self.imagined.buffers()

    def length(self, step: int) -> int:
        """Steps of the rollouts before update `step`: 1 + (step - a) / (b - a) (horizon - 1), between 1 and horizon."""
        horizon = self.config.horizon
        if not self.config.horizon_growth:
            return horizon
        first, last = self.config.horizon_growth
        return min(horizon, max(1, 1 + (step - first) * (horizon - 1) // (last - first)))

    def refresh(self, state: TrainState, source: Experience | Transitions, key: Tensor, *, step: int) -> Update:
        """The model goes on learning, and rollouts of the policy begin in random states of what it learnt from."""
        c, (rows, count) = self.config, experienced(source)
        learn_key, start_key, roll_key = rng.split(key, 3)
        state, metrics = self.learn_model(state, rows, count, learn_key)
        observations = rows["observations"][rng.randint(start_key, (c.rollouts,), count)]
        past, length = self.model.first_past(observations), self.length(step)
        imagined = branched(self.model, self.tree(state), self.policy_of(state), observations, past, length, roll_key)
        ring = self.imagined.push(state.buffers["ring"], imagined, c.rollout_retain * c.rollouts * length)
        return state._replace(buffers={**state.buffers, "ring": ring}), {**metrics, **describe(imagined)}

    # ---- the policy

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        """SAC's update on `real_share` of the batch, evenly spread over it, and imagined rows in place of the
        others.
        """
        size, real = self.config.batch_size, self.imagined.real_rows
        index = torch.arange(real, device=key.device) * size // max(real, 1)
        batch = self.imagined.mixed(state, {n: x[index] for n, x in batch.items()}, rng.fold_in(key, 301))
        return super().update(state, batch, key, phase=phase)
