"""A trained policy as one object and one file: normalises observations, acts, and maps actions to the environment's
range.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import policy_file, rng
from offrl.actor import Actor, bind
from offrl.algorithm import Algorithm, TrainState, with_settings
from offrl.errors import UserError, nearest
from offrl.evaluation.evaluator import DISCOUNT
from offrl.evaluation.observations import as_array, as_texts, desired_goal, goals_of
from offrl.evaluation.predict import PredictState, numbered, own_value, predict, task_rewards, value_of
from offrl.evaluation.streams import EncodingActor, check_offsets, moved, tensors_of
from offrl.nn.custom.networks import factories
from offrl.settings.field import check, marked
from offrl.system import files as checkpoint
from offrl.system.plugins.loading import used_by

KEYS = 1_000  # steps of an episode whose keys are made at once


def acting_part(algorithm: Algorithm, state: TrainState) -> TrainState:
    """A state without what a `TrainedPolicy` does not need."""
    names = dict.fromkeys((*algorithm.traits.policy_modules, *algorithm.traits.critic_modules))
    params = {n: state.params[n] for n in names if n in state.params}
    return state._replace(params=params, target={}, opt={}, buffers={})


class TrainedPolicy:
    """One seed's policy. Takes raw observations, as the environment gives them, and returns actions in the
    environment's range.
    """

    def __init__(self, algorithm: Algorithm, state: TrainState, seed: int, device: torch.device | str = "cpu") -> None:
        """`state` without a replica axis; only what acting needs, and `value` where it is there, is kept, on the CPU.

        device: where it acts in this process, if the algorithm says that this pays (`Traits.acts_on_device`); else on
        the CPU. auto: on a GPU if there is one.
        """
        self.algorithm, self.seed = algorithm, seed
        device = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
        self.device = torch.device(device if algorithm.traits.acts_on_device else "cpu")
        acting = acting_part(algorithm, state)
        # copied: a part of the stacked state may lie where products round differently, and it goes on changing
        self.state: TrainState = pytree.tree_map(lambda x: x.detach().to("cpu", copy=True), acting)
        spec = self.spec = algorithm.data_spec
        self.mean = None if spec.observation_mean is None else torch.tensor(spec.observation_mean)
        self.std = None if spec.observation_std is None else torch.tensor(spec.observation_std)
        self.low, self.high = spec.action_bounds
        self._carry: Any = None
        self._t = self._draws = 0
        self._ready: tuple[Actor, Tensor] | None = None  # what acts, and keys, on the device
        self.find_critic: Callable[[TrainedPolicy], Mapping[str, Any]] | None = (
            None  # where `value` finds what acting does not need
        )

    def __getstate__(self) -> dict[str, Any]:
        # several processes would fight over a GPU
        return {**self.__dict__, "_ready": None, "find_critic": None, "device": torch.device("cpu")}

    @property
    def actor(self) -> Actor:
        """The algorithm's actor, bound to the state on `device`."""
        return self._bound()[0]

    @torch.no_grad()
    def _bound(self) -> tuple[Actor, Tensor]:
        if self._ready is None:
            # training uses the keys of steps 0, 1, ...; texts the CPU's
            state = pytree.tree_map(lambda x: x.to(self.device), self.state)
            keys = rng.fold_in(self.state.key, -1 - torch.arange(KEYS))
            actor = self.algorithm.actor(bind(self.algorithm, state))
            self._ready = (
                EncodingActor(actor, self.spec) if self.spec.streams or self.spec.windowed else actor,
                keys if self.algorithm.traits.text else keys.to(self.device),
            )
        return self._ready

    def start(self, episodes: int) -> Any:
        """The carry at the start of that many episodes played side by side."""
        return self.actor.start(episodes)

    @torch.no_grad()
    def step(self, carry: Any, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, Any]:
        """Actions for raw observations [E, O] at time step t: [E, A] in the environment's range, or [E] int64."""
        text = self.algorithm.traits.text
        obs: Any = list(observations) if text else self.normalised(observations)
        actor, keys = self._bound()
        key = keys[t] if t < KEYS else rng.fold_in(actor.state.key, -1 - t).to(keys.device)
        actions, carry = actor.act(carry, obs if text else moved(obs, self.device), key, explore=explore)
        if text:
            return np.array([*actions, None], object)[:-1], carry
        return self._to_environment(actions.cpu()), carry

    @torch.no_grad()
    def chunk(self, observations: np.ndarray, explore: bool = False) -> np.ndarray:
        """What one decision of a policy of chunks fixes for raw observations [E, O]: [E, h, A] in the environment's
        range.
        """
        actor, keys = self._bound()
        x = moved(self.normalised(observations), self.device)
        return self._to_environment(actor.chunk(x, keys[0], explore).cpu())  # type: ignore[attr-defined]

    @property
    def goal_conditioned(self) -> bool:
        """True where it acts towards a goal, which `set_goal` or `act` takes."""
        return self.algorithm.traits.goal_conditioned

    @torch.no_grad()
    def set_goal(self, carry: Any, goals: np.ndarray | None) -> Any:
        """The carry of episodes that just began, with their goals [E, G] as the environment or the data give them.

        Raises UserError for goals that are missing, not finite or of another width.
        """
        if not self.goal_conditioned:
            return carry
        name, spec = self.algorithm.config.name, self.spec
        if goals is not None and spec.streams and not spec.goal_dim:
            return self.actor.set_goal(carry, self.normalised(goals))
        width = spec.goal_dim or spec.observation_dim
        if goals is None:
            raise UserError(
                f"a policy of {name} acts towards a goal, and none was given: environments give one as info['goal'] or "
                f"as the observation's entry desired_goal, users as act(observation, goal=...), {width} numbers"
            )
        array = np.array(goals, np.float32).reshape(len(goals), -1)  # a copy: it may be read-only
        if array.shape[1] != width:
            meaning = "like achieved_goals in the data" if spec.goal_dim else "like an observation"
            raise UserError(f"the goal has {array.shape[1]} numbers; this policy of {name} takes {width}, {meaning}")
        if not np.isfinite(array).all():
            raise UserError("the goal holds NaN or infinity")
        return self.actor.set_goal(carry, torch.as_tensor(array) if spec.goal_dim else self.normalised(array))

    @torch.no_grad()
    def new_episode(self, carry: Any, observations: np.ndarray, lengths: np.ndarray) -> Any:
        """The carry where all episodes begin anew in the same tasks; see `Actor.new_episode`. observations [E, ...]:
        the last, raw.
        """
        return self.actor.new_episode(carry, self.normalised(observations), torch.as_tensor(lengths))

    def observe_reward(self, carry: Any, rewards: np.ndarray) -> Any:
        """The carry once the actions of the last `step` have earned `rewards` [E], in the units of the recorded
        ones.
        """
        if not self.uses_rewards:
            return carry
        spec = self.spec
        return self.actor.observe_reward(
            carry, torch.as_tensor(rewards * spec.reward_scale + spec.reward_shift, dtype=torch.float32)
        )

    def observe_cost(self, carry: Any, costs: np.ndarray) -> Any:
        """The same for the costs [E] of these actions."""
        return self.actor.observe_cost(carry, torch.as_tensor(costs).float())

    @property
    def cost_limit(self) -> float | None:
        """The limit of an episode's costs that it was trained for, or acts by; None where it has none."""
        return getattr(self.algorithm.config, "cost_limit", None)

    @property
    def uses_rewards(self) -> bool:
        """True where its actions depend on the rewards of the episode so far."""
        actor: Any = self.actor
        return type(getattr(actor, "inner", actor)).observe_reward is not Actor.observe_reward

    def with_target_return(self, target_return: float) -> TrainedPolicy:
        """The same policy with another target return, in the units of the recorded rewards. Raises UserError for one
        that takes none.
        """
        name = self.algorithm.config.name
        if not hasattr(self.algorithm.config, "target_return") or self.goal_conditioned:
            raise UserError(
                f"a policy of {name} cannot be asked for a return: only return-conditioned ones can, such as dt or rvs"
            )
        if not math.isfinite(target_return):
            raise UserError(f"target_return={target_return} is not finite")
        return self._with(target_return=float(target_return))

    def with_settings(self, settings: Mapping[str, Any]) -> TrainedPolicy:
        """The same policy with other values of settings that only acting looks at (`acting` in `setting`), such as
        {"beta": 16.0}.

        Raises UserError for other settings, and for values that are not allowed.
        """
        known = marked(config := self.algorithm.config, "acting")
        able = f"only {', '.join(known)}" if known else "there is nothing that only acting looks at"
        for key in settings:
            if key not in known:
                raise UserError(
                    f"a policy of {config.name} cannot act with another {key}, {able}.{nearest(key, known)}"
                )
        kinds = {f.name: type(getattr(type(config)(), f.name)) for f in dataclasses.fields(config)}
        values = {k: float(v) if kinds[k] is float and isinstance(v, int) else v for k, v in settings.items()}
        for key, value in values.items():
            if kinds[key] is float and not isinstance(value, float):
                raise UserError(f"acting.{key}={value} is no number")
        other = self._with(**values)
        check(other.algorithm.config, "acting.")
        return other

    def _with(self, **settings: Any) -> TrainedPolicy:
        return self._other(with_settings(self.algorithm, settings), self.state)

    def _other(self, algorithm: Algorithm, state: TrainState) -> TrainedPolicy:
        other = copy.copy(self)  # as for another process
        other.algorithm, other.state, other.device, other.find_critic = algorithm, state, self.device, self.find_critic
        other.reset()
        return other

    def infer_task(self, next_observations: np.ndarray, rewards: np.ndarray) -> TrainedPolicy:
        """The policy of the task with these rewards [K], earned by coming to these raw observations [K, O], drawn from
        the data: zero-shot.

        Raises UserError for a policy that would have to be trained for them, and for rewards that are no task.
        """
        actor = self.algorithm.actor(self.state).infer_task(self.normalised(next_observations), task_rewards(rewards))
        return self._other(actor.algorithm, actor.state)

    def normalised(self, observations: np.ndarray) -> Any:
        """Raw observations [E, ...] as actors take them: float32 [E, O], or the dictionary of streams; the vector of
        those who see windows, or a whole window.
        """
        spec = self.spec
        if spec.streams or spec.windowed:
            return tensors_of(observations, spec)
        obs = torch.as_tensor(np.asarray(observations, np.float32)).reshape(len(observations), spec.observation_dim)
        check_offsets(obs, spec)
        return obs if self.mean is None or self.std is None else (obs - self.mean) / self.std

    @property
    def discount(self) -> float:
        """The algorithm's discount factor; DISCOUNT for one without."""
        return float(getattr(self.algorithm.config, "discount", DISCOUNT))

    def own_value(self, observations: np.ndarray, actions: np.ndarray) -> np.ndarray | None:
        """Q(s, a) [E] for observations [E, O] and actions as `step` has them, in the trained rewards' units; None
        without a critic.
        """
        return own_value(self, observations, actions)

    def value(self, observation: Any, action: Any) -> Any:
        """Q(s, a) of the algorithm's critic, by a run's policy from its checkpoint, in recorded rewards; see
        `predict.value_of`.
        """
        return value_of(self, observation, action)

    def in_recorded_units(self, values: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Discounted returns of episodes with these lengths, from the units of the transformed rewards to those of the
        recorded ones.
        """
        spec, discount = self.spec, self.discount
        lengths = lengths if spec.reward_shift else np.zeros_like(lengths)  # they may be endless
        shifted = lengths if discount == 1.0 else (1.0 - discount**lengths) / (1.0 - discount)
        return (
            (values - spec.reward_shift * shifted) / spec.reward_scale
            if spec.reward_scale
            else np.full_like(values, np.nan)
        )

    def _to_environment(self, actions: Tensor) -> np.ndarray:
        values = actions.numpy()
        if self.spec.discrete:
            return values
        return np.clip(self.low + (values + 1.0) * 0.5 * (self.high - self.low), self.low, self.high)

    def reset(self) -> None:
        """Forget the episode so far; the next `act` starts a new one. Needed only by policies with a memory."""
        self._carry, self._t = None, 0

    def act(self, observation: Any, explore: bool = False, reward: Any = None, goal: Any = None) -> Any:
        """The action for one observation [O], or actions for a batch [B, O]. Greedy unless `explore`. A policy of texts
        takes a text, or a list of them, and returns the same. The dictionary of an environment with Dict observations
        is joined as the data's were, in the order of `dataset.observation_keys`; its entry desired_goal is the goal
        where none is given.

        `reward`: what the action before earned, a number or [B], in the units of the recorded rewards; for a policy
        that `uses_rewards`, such as a return-conditioned one, from its second step on. `goal`: [G] or [B, G]; for a
        goal-conditioned policy, with its first step, and again for another goal.

        Raises UserError for an observation of another shape, or one that holds NaN or infinity, and where such a reward
        is missing."""
        if self.algorithm.traits.text:
            return self._answer(observation, explore)
        batch, batched = as_array(observation, self.spec)
        if self._t == 0:
            self._carry = self.start(len(batch))
        elif self.uses_rewards:
            if reward is None:
                raise UserError(
                    f"a policy of {self.algorithm.config.name} must know what its last action earned: act(observation, "
                    "reward=...); call reset() where a new episode starts"
                )
            self._carry = self.observe_reward(self._carry, np.broadcast_to(np.asarray(reward, np.float64), len(batch)))
        if self.goal_conditioned and (goal is not None or self._t == 0):
            goal = desired_goal(observation) if goal is None else goal
            goals = None if goal is None else goals_of(goal, self.spec)
            if goals is not None and goals.ndim == (0 if goals.dtype.names else 1):
                goals = np.broadcast_to(goals, (len(batch), *goals.shape))
            self._carry = self.set_goal(self._carry, goals)
        actions, self._carry = self.step(self._carry, batch, self._t, explore)
        self._t += 1
        return numbered(self, actions if batched else actions[0])

    def predict(
        self,
        observation: Any,
        state: PredictState | None = None,
        episode_start: Any = None,
        deterministic: bool = False,
    ) -> tuple[Any, PredictState | None]:
        """(action, state) for one observation [O], or (actions, state) for a batch [B, O], as Stable-Baselines3's
        `predict`.

        state: what the last call returned, for a policy with a memory; None where episodes begin, and for all others.
        episode_start: True, or [B], where they do. deterministic: greedy; else a sample, another one at each call.
        Raises UserError as `act`, and for policies of texts or of returns, which take more than an observation.
        """
        self._draws += not deterministic
        return predict(self, observation, state, episode_start, deterministic, self._draws)

    def _answer(self, observation: Any, explore: bool) -> Any:
        texts = as_texts(observation, self.algorithm.config.name)
        if self._t == 0:
            self._carry = self.start(len(texts))
        actions, self._carry = self.step(self._carry, texts, self._t, explore)
        self._t += 1
        return actions[0] if isinstance(observation, str) else actions.tolist()

    def save(self, path: str | Path) -> None:
        """Write everything that acting needs into one safetensors file."""
        algorithm = self.algorithm
        meta = {
            "kind": "policy",
            "seed": self.seed,
            "config": dataclasses.asdict(algorithm.config),
            "spec": self.spec.to_json(),
        }
        if plugins := used_by(type(algorithm), *factories(algorithm.config).values()):
            meta["plugins"] = [Path(path).name for path in plugins]  # not where they lie: the file may go to others
        acting = self.state._replace(params={n: self.state.params[n] for n in algorithm.traits.policy_modules})
        tensors, description = algorithm.assets()
        assets = {policy_file.ASSETS + name: tensor for name, tensor in tensors.items()}
        checkpoint.write(
            Path(path),
            {**checkpoint.flatten(acting), **assets},
            {**meta, **({"assets": description} if description else {})},
        )

    @classmethod
    def load(cls, path: str | Path, device: torch.device | str = "auto") -> TrainedPolicy:
        """Read a file by `save`; `device` as for a policy that is made. Raises UserError when it is damaged or no
        policy.
        """
        algorithm, state, seed = policy_file.read(Path(path))
        return cls(algorithm, state, seed, device)
