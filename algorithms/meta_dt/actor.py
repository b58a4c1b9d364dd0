"""Acting in new tasks: the memory of a task, and prompts from the best of its episodes so far."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Batch, Carry
from offrl.algorithms.meta_dt.prompts import begin_logits, best_of
from offrl.data.samplers.histories import PROMPT
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID
from offrl.families.return_conditioned import recorded
from offrl.families.sequence import History, TargetReturnActor, with_last

if TYPE_CHECKING:
    from offrl.algorithms.meta_dt.algorithm import MetaDT

PROMPTING = -(1 << 42)  # keys of the prompts of new episodes: other draws have smaller numbers
TASK = "task"


@dataclass(frozen=True)
class TaskHistory(History):
    """The memory of E tasks: the window, the episode so far, and episodes before it."""

    episode: Batch = field(default_factory=dict)  # [E, t, ...] observations, actions as a network takes them, rewards
    # the P best episodes so far, [E, P, T, ...]; see `MetaDTActor.prompts_of`
    pool: Batch = field(default_factory=dict)
    prompt: Batch = field(default_factory=dict)  # [E, L, ...]; nothing valid in the first episode
    episodes: int = 0  # that are over


pytree.register_dataclass(TaskHistory)


class MetaDTActor(TargetReturnActor):
    """Policy after a prompt from earlier episodes of the same task. A carry is a `TaskHistory`, whose pool of prompts
    outlives episodes.
    """

    algorithm: MetaDT

    def start(self, episodes: int) -> Carry:
        carry, algorithm = super().start(episodes), self.algorithm
        actions = torch.zeros(episodes, 0, algorithm.spec.encoded_action_dim)
        episode = {
            "observations": carry.window["observations"],
            "actions": actions,
            "rewards": torch.zeros(episodes, 0),
        }
        steps, prompt = algorithm.config.prompt, {}
        if steps:
            prompt = {
                "observations": torch.zeros(episodes, steps, algorithm.spec.observation_dim),
                "actions": torch.zeros(
                    episodes, steps, *carry.window["actions"].shape[2:], dtype=carry.window["actions"].dtype
                ),
                RETURNS: torch.zeros(episodes, steps),
                STEPS: torch.zeros(episodes, steps, dtype=torch.int64),
                VALID: torch.zeros(episodes, steps, dtype=torch.bool),
            }
        window = {**carry.window, TASK: torch.zeros(episodes, 0, algorithm.embedding)}
        return TaskHistory(window, carry.remaining, carry.t, episode, {}, prompt)

    def current_step(self, carry: History, observations: Tensor) -> Batch:
        assert isinstance(carry, TaskHistory)
        task = self.algorithm.model.task(self.state.extra["task_model"], *self.recent(carry.episode))
        return {**super().current_step(carry, observations), TASK: task}

    def recent(self, episode: Batch) -> tuple[Tensor, ...]:
        """The last transitions as the encoder takes them, behind zeros where the episode is shorter."""
        h = self.algorithm.model.config.history
        columns = (episode[name] for name in ("observations", "actions", "rewards"))
        return tuple(
            torch.cat([column.new_zeros(len(column), h, *column.shape[2:]), column], 1)[:, -h:] for column in columns
        )

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        window = self.enter(carry, observations)
        dist = self.action_distribution({**window, **{PROMPT + name: column for name, column in carry.prompt.items()}})
        actions = self.choose(dist, key, explore)
        transition = {
            "observations": observations,
            "actions": self.algorithm.spec.encode(actions),
            "rewards": torch.zeros(len(observations)),
        }
        episode = {
            name: torch.cat([column, transition[name].unsqueeze(1)], 1) for name, column in carry.episode.items()
        }
        return actions, dataclasses.replace(
            carry, window=with_last(window, "actions", actions), t=carry.t + 1, episode=episode
        )

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        carry = super().observe_reward(carry, rewards)
        return dataclasses.replace(carry, episode=with_last(carry.episode, "rewards", rewards))

    def new_episode(self, carry: Carry, observations: Tensor, lengths: Tensor) -> Carry:
        """The carry with a prompt from one of the best episodes so far."""
        restart, c = self.start(len(lengths)), self.algorithm.config
        if not c.prompt or 0 < c.prompt_warmup >= int(self.state.step):  # it has not learnt to read one
            return restart
        pool = best_of(carry.pool, self.prompts_of(carry.episode, observations, lengths), c.prompts)
        keys = rng.split(rng.fold_in(self.state.key, PROMPTING - carry.episodes))
        rows = torch.arange(len(lengths))
        choice = rng.randint(keys[0], (len(lengths),), pool["error"].shape[1])
        episode = {name: column[rows, choice] for name, column in pool.items()}  # [E, T, ...]
        begin = rng.categorical(
            keys[1], begin_logits(episode["error"], episode["length"], c.prompt, self.algorithm.model.config.history)
        )
        steps = begin.unsqueeze(-1) + torch.arange(c.prompt)
        valid = steps < episode["length"].unsqueeze(-1)
        steps = steps.clamp(max=episode["error"].shape[1] - 1)
        prompt = {name: episode[name][rows.unsqueeze(-1), steps] for name in ("observations", "actions", RETURNS)}
        return dataclasses.replace(
            restart, pool=pool, prompt={**prompt, STEPS: steps, VALID: valid}, episodes=carry.episodes + 1
        )

    def prompts_of(self, episode: Batch, observations: Tensor, lengths: Tensor) -> Batch:
        """An episode as a source of prompts: columns [E, 1, T, ...], the model's error at each step, and its return and
        length [E, 1].
        """
        algorithm, count = self.algorithm, episode["rewards"].shape[1]
        h = algorithm.model.config.history
        step, ends = torch.arange(count), lengths.unsqueeze(-1)
        mask = step < ends
        next_observations = torch.cat([episode["observations"][:, 1:], observations.unsqueeze(1)], 1)
        next_observations = torch.where((step == ends - 1).unsqueeze(-1), observations.unsqueeze(1), next_observations)
        windows = {}
        for name, column in episode.items():
            history = torch.cat([column.new_zeros(len(column), h, *column.shape[2:]), column], 1)
            windows["past_" + name] = torch.stack([history[:, t : t + h] for t in range(count)], 1).flatten(0, 1)
        rows = {
            **{name: column.flatten(0, 1) for name, column in episode.items()},
            "next_observations": next_observations.flatten(0, 1),
        }
        error = algorithm.model.errors(self.state.extra["task_model"], {**rows, **windows})[2].unflatten(0, mask.shape)
        rewards = torch.where(mask, recorded(episode["rewards"], algorithm.spec), 0.0)
        returns = rewards.flip(1).cumsum(1).flip(1)
        actions = episode["actions"].argmax(-1) if algorithm.spec.discrete else episode["actions"]
        columns = {
            "observations": episode["observations"],
            "actions": actions,
            RETURNS: returns,
            "error": torch.where(mask, error, 0.0),
        }
        return {name: x.unsqueeze(1) for name, x in {**columns, "return": rewards.sum(1), "length": lengths}.items()}
