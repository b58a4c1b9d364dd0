"""A trained model as an environment: Gymnasium's single and vectorised ones over one batched simulator, so that any
agent can train in it.

    env = offrl.ModelEnv("runs/dynamics-hopper...", penalty=1.0)
    envs = offrl.ModelVectorEnv("runs/dynamics-hopper...", num_envs=64)          # one batched call for all of them
    agent = stable_baselines3.PPO("MlpPolicy", envs.for_sb3())
    env = gymnasium.make("offrl.world_models.environment:offrl/Model-v0", model="runs/dynamics-hopper...")

After `import offrl.world_models.environment` the id is "offrl/Model-v0" alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.errors import UserError, nearest
from offrl.system.devices import pick_device
from offrl.tasks.task import Task
from offrl.world_models import starts, uncertainty
from offrl.world_models.model import Trained, Tree, load
from offrl.world_models.units import Units

ENV_ID = "offrl/Model-v0"
LEAVING = ("truncate", "clip")
Source = Trained | str | Path
Info = dict[str, Any]  # what Gymnasium's methods tell and take by name


class Step(NamedTuple):
    """One step of N episodes, in the environment's units."""

    observations: np.ndarray  # [N, *O] float32
    rewards: np.ndarray  # [N] float64
    terminated: np.ndarray  # [N] bool
    truncated: np.ndarray  # [N] bool
    reason: np.ndarray  # [N] object: "horizon" or "out of range" where truncated, else None
    uncertainty: np.ndarray  # [N] float64
    clipped: np.ndarray  # [N] bool


class Simulator:
    """N episodes side by side in a model. See `ModelEnv` for the arguments."""

    def __init__(
        self,
        model: Source,
        dataset: Dataset | None = None,
        count: int = 1,
        *,
        horizon: int | None = None,
        penalty: float = 0.0,
        uncertainty: str = "aleatoric",
        start: str = "data",
        range_margin: float = 1.0,
        out_of_range: str = "truncate",
        device: str = "cpu",
    ) -> None:
        for name, value, known in (("start", start, starts.KINDS), ("out_of_range", out_of_range, LEAVING)):
            if value not in known:
                raise UserError(f"{name}={value} is not known.{nearest(value, known)} Known: {', '.join(known)}")
        for name, number, bound in (
            ("penalty", penalty, 0.0),
            ("range_margin", range_margin, 0.0),
            ("num_envs", count, 1),
            ("horizon", 1 if horizon is None else horizon, 1),
        ):
            if not number >= bound:
                raise UserError(f"{name}={number} is out of range: the smallest allowed value is {bound}")
        where = pick_device(device)
        self.trained = (model if isinstance(model, Trained) else load(model)).to(where)
        self.model, spec = self.trained.model, self.trained.model.spec
        self.units, self.count, self.device = Units(spec, where), count, where
        self.horizon = horizon_of(self.trained, dataset) if horizon is None else horizon
        self.penalty, self.leaving = float(penalty), out_of_range == "truncate"
        self.pool = tuple(x.to(where) for x in starts.of(self.trained, dataset, start))
        self.tree = self._measured(uncertainty, dataset)
        self.tree |= widened(self.tree, range_margin)
        self.low, self.high = (self.units.raw(self.tree[k].unsqueeze(0))[0] for k in ("low", "high"))
        self.observation_space = spaces.Box(self.low, self.high, dtype=np.float32)
        self.action_space: spaces.Space = (
            spaces.Discrete(spec.num_actions)
            if spec.discrete
            else spaces.Box(self.units.low, self.units.high, dtype=np.float32)
        )
        self.observations, self.past = (x[:1].expand(count, *x.shape[1:]).clone() for x in self.pool)
        self.steps = np.zeros(count, np.int64)
        self.seed(0)

    def _measured(self, name: str, dataset: Dataset | None) -> Tree:
        """The model's tensors with what the measure of uncertainty needs."""
        self.measure = None
        if name == "none":
            if self.penalty:
                known = ", ".join(uncertainty.names())
                raise UserError(
                    f"penalty={self.penalty:g} is times an uncertainty, and uncertainty=none: choose one of {known}"
                )
            return dict(self.trained.tree)
        self.measure = uncertainty.measure(name)
        if name == "density" and "density" not in self.trained.tree and dataset is None:
            raise UserError("uncertainty=density is fitted to the data: hand in the dataset too")
        return dict(uncertainty.prepare(name, self.model, self.trained.tree, dataset))  # type: ignore[arg-type]

    def seed(self, seed: int) -> None:
        """All that follows is a function of this number and of the actions."""
        self._key, self._draws = rng.make_key(seed, self.device), 0

    def _next_key(self) -> torch.Tensor:
        self._draws += 1
        return rng.fold_in(self._key, self._draws)

    @torch.no_grad()
    def begin(self, rows: np.ndarray, observation: Any = None) -> np.ndarray:
        """New episodes in `rows` (indices), from a state of the data each, or all from `observation`; returns all
        observations [N, *O].
        """
        where = torch.from_numpy(rows).to(self.device)
        if observation is None:
            picks = rng.randint(self._next_key(), (len(rows),), len(self.pool[0]))
            first, past = (x[picks] for x in self.pool)
        else:
            start = np.asarray(observation, np.float32)
            if start.shape != self.observation_space.shape or not self.observation_space.contains(start):
                raise UserError(
                    f"the observation to start from is not in the environment's space, {self.observation_space}"
                )
            first = self.units.observations(start[None]).expand(len(rows), -1)
            past = self.model.first_past(first)
        self.observations, self.past = (
            old.index_copy(0, where, new) for old, new in ((self.observations, first), (self.past, past))
        )
        self.steps[rows] = 0
        return self._shown(self.observations)

    @torch.no_grad()
    def step(self, raw_actions: np.ndarray) -> Step:
        """One step of every episode, with actions [N, A] in the environment's range, or choices [N]."""
        actions = self.units.actions(raw_actions, self.count)
        # all members are asked even if nobody wants to know how they differ: the model deals only many rows out to its
        # members
        prediction = self.model.predict(self.tree, self.observations, actions, self.past)
        outcome = self.model.outcome(self.tree, prediction, self.observations, actions, self._next_key())
        uncertainty = np.zeros(self.count)
        if self.measure is not None:
            estimate = self.measure(self.model, self.tree, prediction, self.observations, actions)
            uncertainty = estimate.nan_to_num(1e6, 1e6).cpu().double().numpy()
        self.past = self.model.later_past(self.past, self.observations, actions)
        self.observations = outcome.next_observations
        self.steps += 1
        rewards = self.units.rewards(outcome.rewards) - self.penalty * uncertainty
        terminated, clipped = outcome.terminations.cpu().numpy(), outcome.clipped.cpu().numpy()
        reason = np.full(self.count, None, object)
        reason[self.steps >= self.horizon] = "horizon"
        if self.leaving:
            reason[clipped] = "out of range"
        reason[terminated] = None
        truncated = np.array([r is not None for r in reason])
        return Step(self._shown(self.observations), rewards, terminated, truncated, reason, uncertainty, clipped)

    def _shown(self, observations: torch.Tensor) -> np.ndarray:
        return np.clip(self.units.raw(observations), self.low, self.high)  # rounding may lead past the edge


def widened(tree: Tree, margin: float) -> Tree:
    """The data's range, "low" and "high", made wider on both sides by `margin` times its width; for an entry that never
    changes by `margin` times its size or 1, the larger: a model's noise would lead out of it at once."""
    low, high = tree["low"], tree["high"]
    room = margin * torch.where(high > low, high - low, high.abs().clamp(min=1.0))
    return {"low": low - room, "high": high + room}


def horizon_of(trained: Trained, dataset: Dataset | None = None) -> int:
    """Steps of an episode: the task's limit where it is known, else the longest episode of the data. Raises UserError
    where neither is.
    """
    limit = task_limit(trained.model.spec.task)
    limit = limit or (int(dataset.episode_lengths().max()) if dataset is not None else trained.meta.get("longest"))
    if not limit:
        raise UserError(f"{trained.path} does not say how long an episode is: give horizon=")
    return int(limit)


def task_limit(task: Task | None) -> int | None:
    """The task's limit on the steps of an episode, without making its environment."""
    if task is None:
        return None
    if task.max_episode_steps is not None:
        return task.max_episode_steps
    spec = gym.registry.get(task.env_id or "")
    return None if spec is None else spec.max_episode_steps


class ModelEnv(gym.Env):
    """Episodes in a trained model. Observations, actions and rewards are those of the real environment: raw, as its
    dataset records them.

    model: a run of algo=dynamics, a file of its models/, or what `offrl.world_models.model.load` gives. dataset: where
    episodes begin; by default in the states that the model's file holds (10,000 of the data's).
    horizon: steps after which an episode is truncated; by default the task's limit, else the longest episode of the
    data. penalty: times the uncertainty of a step, is taken off its reward (in recorded units). uncertainty: which
    (`offrl model` names them), or "none". start: "data", any state of the data, or "initial", the first state of an
    episode.
    range_margin: the data's range, widened by so many times its width, is the observation space; a step that leaves it
    is cut off there and, with out_of_range="truncate", truncates the episode ("clip": it goes on).

    Each step asks one of the model's elites, drawn anew. `info` has "uncertainty", "clipped" and, of a truncated step,
    "truncation": "horizon" or "out of range". reset(options={"observation": x}) begins at x, as after an episode's
    start. The same seed and actions give the same episode. Raises UserError for models, data and settings that do not
    fit, and for actions that are not finite."""

    metadata: Info = {"render_modes": []}  # noqa: RUF012 - Gymnasium's own form

    def __init__(
        self, model: Source, dataset: Dataset | None = None, *, seed: int | None = None, **options: Any
    ) -> None:
        self.simulator = Simulator(model, dataset, **options)
        self.observation_space, self.action_space = self.simulator.observation_space, self.simulator.action_space
        self._first_seed = seed

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        seed, self._first_seed = (self._first_seed if seed is None else seed), None
        super().reset(seed=seed)
        self.simulator.seed(int(self.np_random.integers(2**62)))
        return self.simulator.begin(np.zeros(1, np.int64), _observation(options))[0], {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, Info]:
        done = self.simulator.step(np.asarray(action)[None])
        info: Info = {"uncertainty": float(done.uncertainty[0]), "clipped": bool(done.clipped[0])}
        if done.truncated[0]:
            info["truncation"] = done.reason[0]
        return done.observations[0], float(done.rewards[0]), bool(done.terminated[0]), bool(done.truncated[0]), info


class ModelVectorEnv(gym.vector.VectorEnv):
    """`num_envs` episodes in a trained model, all in one call; arguments as `ModelEnv`'s.

    autoreset_mode: Gymnasium's "NextStep", "SameStep" or "Disabled". Random numbers are those of the whole batch: the
    same seed, number of environments and actions give the same episodes.
    """

    metadata: Info = {"render_modes": []}  # noqa: RUF012

    def __init__(
        self,
        model: Source,
        dataset: Dataset | None = None,
        *,
        num_envs: int = 16,
        autoreset_mode: str | AutoresetMode = AutoresetMode.NEXT_STEP,
        seed: int | None = None,
        device: str = "auto",
        **options: Any,
    ) -> None:
        self.simulator = Simulator(model, dataset, num_envs, device=device, **options)
        self.num_envs = num_envs
        self.autoreset_mode = AutoresetMode(autoreset_mode)
        self.metadata = {**self.metadata, "autoreset_mode": self.autoreset_mode}
        self.single_observation_space, self.single_action_space = (
            self.simulator.observation_space,
            self.simulator.action_space,
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._over = np.zeros(num_envs, bool)
        self._first_seed = seed

    def for_sb3(self) -> Any:
        """The same episodes as a VecEnv of stable-baselines3. Raises UserError where that is not installed."""
        try:
            from offrl.world_models.environment_sb3 import ModelVecEnv
        except ModuleNotFoundError as error:
            raise UserError(f"for_sb3 needs stable-baselines3 ({error}): pip install 'offrl[collect]'") from None
        return ModelVecEnv(self)

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: Info | None = None
    ) -> tuple[np.ndarray, Info]:
        if isinstance(seed, (list, tuple, np.ndarray)):  # one for each: the whole batch has one
            seeds = [int(s) for s in seed if s is not None]
            seed = int(np.random.SeedSequence(seeds).generate_state(1)[0]) if len(seeds) == len(seed) else None
        seed, self._first_seed = (self._first_seed if seed is None else seed), None
        options = dict(options or {})
        mask = np.asarray(options.pop("reset_mask", np.ones(self.num_envs, bool)))
        if mask.shape != (self.num_envs,) or mask.dtype != bool or not mask.any():
            raise UserError(f"reset_mask must be {self.num_envs} booleans, one of them true at least")
        super().reset(seed=seed)
        if seed is not None or mask.all():
            self.simulator.seed(int(self.np_random.integers(2**62)))
        self._over &= ~mask
        return self.simulator.begin(np.flatnonzero(mask), _observation(options)), {}

    def step(self, actions: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, Info]:
        if self._over.any():
            if self.autoreset_mode == AutoresetMode.DISABLED:
                raise UserError(
                    "an episode is over: reset(options={'reset_mask': ...}) begins a new one, as "
                    "autoreset_mode=Disabled asks"
                )
            actions = np.where(self._over.reshape(-1, *[1] * (np.ndim(actions) - 1)), np.zeros_like(actions), actions)
        done = self.simulator.step(np.asarray(actions))
        fresh = self._over.copy()
        observations, terminated, truncated = done.observations, done.terminated & ~fresh, done.truncated & ~fresh
        reason = done.reason.copy()
        reason[~truncated] = None
        infos: Info = {
            "uncertainty": np.where(fresh, 0.0, done.uncertainty), "_uncertainty": ~fresh,
            "clipped": done.clipped & ~fresh, "_clipped": ~fresh,
            "truncation": reason, "_truncation": truncated.copy(),
        }  # fmt: skip
        self._over = terminated | truncated
        if self.autoreset_mode == AutoresetMode.SAME_STEP:
            fresh = self._over
            self._over = np.zeros(self.num_envs, bool)
            if fresh.any():
                final = np.full(self.num_envs, None, object)
                for i in np.flatnonzero(fresh):
                    final[i] = observations[i].copy()
                last = {name: value.copy() for name, value in infos.items()}
                infos |= {"final_obs": final, "_final_obs": fresh.copy()}
                infos |= {"final_info": last, "_final_info": fresh.copy()}
        if fresh.any():
            observations = self.simulator.begin(np.flatnonzero(fresh))
        rewards = done.rewards if self.autoreset_mode == AutoresetMode.SAME_STEP else np.where(fresh, 0.0, done.rewards)
        return observations, rewards, terminated, truncated, infos


def _observation(options: Info | None) -> Any:
    """`options["observation"]`. Raises UserError for options that are not known."""
    if strange := sorted(set(options or {}) - {"observation"}):
        raise UserError(
            f"reset has no option '{strange[0]}'.{nearest(strange[0], ['observation', 'reset_mask'])} It has: "
            "observation"
        )
    return (options or {}).get("observation")


gym.register(ENV_ID, entry_point=f"{__name__}:ModelEnv", vector_entry_point=f"{__name__}:ModelVectorEnv")
