"""Decision Transformer: "Decision Transformer: Reinforcement Learning via Sequence Modeling" (Chen et al., 2021, arXiv
2106.01345).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from offrl.algorithm import Actor, Batch, Carry, Loss, Params, Sampler, TrainState, Traits
from offrl.data.samplers.goals import ACHIEVED, ACTOR_GOALS
from offrl.data.samplers.sequences import STEPS, VALID, GoalSequenceSampler
from offrl.families.goal_conditioned import required_goals
from offrl.families.return_conditioned import TargetReturnSettings
from offrl.families.sequence import (
    GoalHistory,
    SequenceActor,
    SequenceModel,
    SequenceSettings,
    TargetReturnActor,
    masked_mean,
)
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class DTConfig(TargetReturnSettings, SequenceSettings):
    """Settings of DT."""

    name: str = "dt"
    prompt: str = setting(
        "return",
        "what the policy is asked for: return: to earn target_return; goal: to reach a goal, in training a later state "
        "of the episode",
        choices=("return", "goal"),
    )


@register("algo", "dt")
class DT(SequenceModel[DTConfig]):
    """Imitate the data's actions given the last K steps and the return to go; act with a target return, less the
    rewards earned so far.

    With `prompt` goal, as in arXiv 2401.11237, the token of a return is the goal's, the same at all steps, and a step's
    time its place in the window.
    """

    @classmethod
    def traits_for(cls, config: DTConfig) -> Traits:
        return dataclasses.replace(cls.traits, goal_conditioned=config.prompt == "goal")

    @property
    def goal_dim(self) -> int:
        """G: the dimension of a goal."""
        return self.spec.goal_dim or self.spec.observation_dim

    def sampler(self) -> Sampler:
        c = self.config
        if c.prompt == "return":
            return super().sampler()
        goals, extra = (ACHIEVED, (ACHIEVED,)) if self.spec.goal_dim else ("observations", ())
        return GoalSequenceSampler(c.context, extra, c.padding == "left", goals=goals)

    def sizes(self) -> dict[str, int]:
        if self.config.prompt == "goal":
            s = self.spec
            return {"goal": self.goal_dim, "observation": s.observation_dim, "action": s.encoded_action_dim}
        return super().sizes()

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        """(R_1, s_1, a_1, ..., R_K, s_K, a_K), or the goal in the place of a return."""
        if self.config.prompt == "goal":
            goals = batch[ACTOR_GOALS].unsqueeze(1).expand(-1, batch["actions"].shape[1], -1)
            return {"goal": goals, "observation": batch["observations"], "action": self.spec.encode(batch["actions"])}
        return super().tokens(batch)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |a_t - pi(R_1, s_1, a_1, ..., R_t, s_t)|^2, or -log pi(a_t | ...), the mean over all steps of the windows
        (algorithm 1).
        """
        timesteps = (batch[VALID].cumsum(-1) - 1).clamp(min=0) if self.config.prompt == "goal" else batch[STEPS]
        dist = self.apply("actor", actor, self.tokens(batch), timesteps, batch[VALID], key)
        loss = masked_mean(self.policy.bc_loss(dist, batch["actions"]), batch[VALID])
        return loss, {"actor/loss": loss}

    def actor(self, state: TrainState) -> Actor:
        return GoalPromptActor(self, state) if self.config.prompt == "goal" else TargetReturnActor(self, state)


class GoalPromptActor(SequenceActor):
    """Policy given the goal at every step."""

    algorithm: DT

    def start(self, episodes: int) -> Carry:
        carry = super().start(episodes)
        return GoalHistory(carry.window, carry.remaining)

    def set_goal(self, carry: Carry, goals: Tensor) -> Carry:
        return dataclasses.replace(carry, goals=goals)

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        window = self.enter(carry, observations)
        tokens = self.algorithm.tokens({**window, ACTOR_GOALS: required_goals(self.algorithm, carry.goals)})
        timesteps = torch.arange(window[STEPS].shape[1], device=observations.device).expand(window[STEPS].shape)
        dist = tuple(x[:, -1] for x in self.apply("actor", tokens, timesteps))
        actions = self.choose(dist, key, explore)
        return actions, self.with_actions(carry, window, actions)
