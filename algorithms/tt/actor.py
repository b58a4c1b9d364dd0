"""Acting by the best plan that a beam search finds in the model of trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Actor, Carry, TrainState
from offrl.algorithms.tt.beam_search import Plans, Search, beam_search
from offrl.algorithms.tt.discretizer import Bins, decode, encode

if TYPE_CHECKING:
    from offrl.algorithms.tt.algorithm import TT

CHUNK = 2_048  # sequences that are decoded at once; no random number depends on it


class PlanCarry(NamedTuple):
    """The memory of planning in E episodes."""

    past: Tensor  # [E, n, D] int64: the tokens of whole steps; values, which no token sees, are 0
    step_tokens: Tensor  # [E, O + A] of the last step, without the reward
    reward: Tensor  # [E] that it earned, in training units
    queue: Tensor  # [E, m, A] int64: tokens of the actions that are planned already
    t: int


class TTActor(Actor):
    """The first action of the best plan.

    Without `explore` random numbers depend on the seed and the step of the episode alone; with it they are the key's,
    and the plan is drawn from the beams that are left.
    """

    algorithm: TT
    remembers_actions = True

    def __init__(self, algorithm: TT, state: TrainState) -> None:
        super().__init__(algorithm, state)
        c, self.bins, self.sizes = algorithm.config, Bins(**state.extra), algorithm.sizes
        self.search = Search(
            c.plan_horizon,
            c.beam_width,
            c.beam_expand,
            min(c.plan_context, c.context),
            algorithm.longest,
            c.discount,
            c.action_cdf,
            c.action_top_k,
            c.observation_top_k,
        )

    def start(self, episodes: int) -> Carry:
        observation_dim, action_dim = self.sizes
        empty = torch.zeros(episodes, 0, self.algorithm.dims, dtype=torch.int64)
        step_tokens = empty.new_zeros(episodes, observation_dim + action_dim)
        queue = empty.new_zeros(episodes, 0, action_dim)
        return PlanCarry(empty, step_tokens, torch.zeros(episodes), queue, 0)

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        return carry._replace(reward=rewards)

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        c, bins, device, (observation_dim, _) = self.algorithm.config, self.bins, observations.device, self.sizes
        past = carry.past.to(device)
        if carry.t:
            reward = encode(carry.reward.to(device).unsqueeze(-1), bins.edges[-2:-1])
            step = torch.cat([carry.step_tokens, reward, torch.zeros_like(reward)], -1)
            past = torch.cat([past, step.unsqueeze(1)], 1)[:, 1 - self.search.context :]
        observation_tokens, queue = encode(observations, bins.edges[:observation_dim]), carry.queue.to(device)
        if not queue.shape[1]:
            if not explore:
                key = rng.fold_in(rng.fold_in(self.state.key, 211), carry.t)
            plans = self.plan(torch.cat([past.flatten(1), observation_tokens], -1), key)
            beam = 0 * observation_tokens[:, 0]
            if explore:
                beam = rng.randint(rng.fold_in(key, 0), (len(observations),), c.beam_width)
            queue = plans.actions[torch.arange(len(observations), device=device), beam, : c.plan_every]
        action_tokens = queue[:, 0]
        action = decode(action_tokens, bins.values[observation_dim:-2])
        carry = PlanCarry(
            past,
            torch.cat([observation_tokens, action_tokens], -1),
            torch.zeros_like(observations[:, 0]),
            queue[:, 1:],
            carry.t + 1,
        )
        return (action[:, 0].round().long() if self.algorithm.spec.discrete else action.clamp(-1.0, 1.0)), carry

    def plan(self, prefix: Tensor, key: Tensor) -> Plans:
        """Plans after the tokens of whole steps, at most plan_context - 1, and of an observation, prefix [E, P]."""
        values = self.bins.values[-2], self.bins.values[-1]

        def decoder(tokens: Tensor, past: Any) -> tuple[Tensor, Any]:
            return cast(tuple[Tensor, Any], self.apply("trajectory", tokens, None, past or ()))

        parts = prefix.split(max(1, CHUNK // (self.search.width * self.search.expand)))
        plans = [beam_search(decoder, part, self.sizes, values, self.bins.occupied, self.search, key) for part in parts]
        return Plans(*(torch.cat(column) for column in zip(*plans, strict=True)))
