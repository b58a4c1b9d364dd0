"""Policy expansion: "Policy Expansion for Bridging Offline-to-Online Reinforcement Learning" (PEX; Zhang et al., 2023,
arXiv 2302.00935).

`offrl finetune RUN mode=expansion env=ID` trains it beside the policies of a run of IQL (`offrl.finetuning.expansion`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.actor import Actor, Carry
from offrl.algorithm import Algorithm, Batch, Dataset, Loss, Params, TrainState, Tree, Update
from offrl.errors import UserError
from offrl.families.critics import Critic, Value, Values, WithCritic
from offrl.families.in_sample import InSampleSettings, WeightedImitation, expectile_loss
from offrl.nn import make_policy
from offrl.registry import register
from offrl.settings.field import setting

HOW = "pex learns beside the policies of a run of iql: offrl finetune RUN mode=expansion env=ID"


@dataclass
class PEXConfig(InSampleSettings):
    """Settings of PEX: those of the run, and what chooses between its policy and the new one."""

    name: str = "pex"
    expectile: float = setting(0.7, "tau of IQL's V, the run's", low=0.0, high=1.0)
    inverse_temperature: float = setting(
        10.0,
        "multiplies Q in the softmax that draws the action of the run's policy or of the new one; 0: each half of the "
        "time",
        low=0.0,
        acting=True,
    )


class ExpandedActor(Actor):
    """The run's policy, greedy, and the new one, a sample where it explores: their Q draws which of the two actions is
    taken; greedily it is the new policy's mode or the old one's, whichever has the larger Q.
    """

    algorithm: PEX

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        return self.algorithm.choose(self.state, observations, key, explore)[0], carry


@register("algo", "pex")
class PEX(WeightedImitation, Algorithm[PEXConfig]):
    """IQL's V and critics, a policy that stays as it is, in `extra["old"]`, and a new one that imitates what is chosen
    of the two where that is better than V.

    Modules: value, actor (the new policy), critic.
    """

    traits = replace(WithCritic.traits, policy_modules=("actor", "critic"), observations="vector")
    actor_class = ExpandedActor

    @classmethod
    def requires(cls, config: Any, dataset: Dataset) -> dict[str, Any]:
        raise UserError(HOW)

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.value = Value(c, s)
        form = {"activation": c.activation, "dropout": c.dropout, "init": c.init}
        actor = make_policy(c.policy, s.observation_dim, s.action_dim, s.num_actions, c.hidden, **form)
        self.critic = critic = Critic(c, s)
        return {"value": self.value.network, "actor": actor, "critic": critic.network}

    def extra(self, params: dict[str, Params]) -> Tree:
        return {"old": {name: value.clone() for name, value in params["actor"].items()}}

    def after(self, run: TrainState, fresh: TrainState) -> TrainState:
        """The first state behind that of a run of IQL, with its values and its policy, which stays; optimisers and the
        new policy begin anew.
        """
        params = {**run.params, "actor": fresh.params["actor"]}
        fresh = fresh._replace(params=params, target=run.target, step=run.step, key=run.key)
        return fresh._replace(extra={**run.extra, "old": run.params["actor"]})

    def log_shares(self, critic: Params, observations: Tensor, *actions: Tensor) -> Tensor:
        """log softmax(beta min_i Q_i(s, a)) over actions of the same states: [B, number of them] (equation 4)."""
        q = torch.stack([self.critic.min_q(critic, observations, a).mean for a in actions], -1)
        return (self.config.inverse_temperature * q).log_softmax(-1)

    def choose(self, state: TrainState, observations: Tensor, key: Tensor, explore: bool) -> tuple[Tensor, Tensor]:
        """Actions [B, A] (or [B]) of one of the two policies, and whether it is the new one's, bool [B]."""
        sample_key, choice_key = rng.split(key)
        old = self.policy.mode(self.apply("actor", state.extra["old"], observations))
        dist = self.apply("actor", state.params["actor"], observations)
        new = self.policy.sample(dist, sample_key) if explore else self.policy.mode(dist)
        log_shares = self.log_shares(state.params["critic"], observations, old, new)
        chosen = (rng.categorical(choice_key, log_shares) if explore else log_shares.argmax(-1)).bool()
        return torch.where(chosen.view(-1, *[1] * (new.ndim - 1)), new, old), chosen

    def value_loss(self, value: Params, state: TrainState, batch: Batch, q: Values) -> Loss:
        """E |tau - 1(Q - V < 0)| (Q - V)^2 (IQL)."""
        return expectile_loss(self.value, value, batch, q, self.config.expectile)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch, next_v: Values, key: Tensor) -> Loss:
        """E (r + gamma V(s') - Q(s, a))^2 (IQL)."""
        return self.critic.loss(critic, batch, self.critic.td_target(batch, next_v), key)

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        observations = batch["observations"]
        q = self.critic.min_q(self.critic.target_critics(state, key), observations, batch["actions"])
        # of V before its step, as in the authors' code
        next_v = self.value(state.params["value"], batch["next_observations"])
        state, value = self.descend(state, "value", self.value_loss, batch, q)
        state, critic = self.descend(state, "critic", self.critic_loss, batch, next_v, key)
        state = self.polyak(self.critic.regularised(state), "critic")
        actions, chosen = self.choose(state, observations, rng.fold_in(key, 300), explore=True)
        q = self.critic.min_q(self.critic.target_critics(state, key), observations, actions)
        state, actor = self.descend(state, "actor", self.actor_loss, {**batch, "actions": actions}, q.mean, key)
        return state, {**value, **critic, **actor, "actor/new": chosen.float().mean()}
