"""Score policies in their environment: all seeds and episodes side by side, the same numbers however many run at once.

Episode e of the policy with seed s always starts from a state that depends on (eval.seed, s, e) alone, and the policy always sees all of
its episodes at once, episode e in row e; so neither `parallel` nor the other policies can change a bit of a score.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from offrl.environments import action_kind, check_fit, flattener, make_env, resolve_task, time_limit, versions
from offrl.errors import UserError, warn
from offrl.evalconfig import EvalConfig
from offrl.stats import mean_interval
from offrl.tasks import Task

if TYPE_CHECKING:
    import gymnasium as gym

__all__ = ["Evaluation", "Evaluator", "Policy", "check_fit", "evaluate", "make_env", "mean_interval", "reset_seed", "resolve_task"]

ENDLESS = 10_000  # steps after which an episode is cut when neither the environment, the task nor the settings limit it
Progress = Callable[[int, int], None]


class Policy(Protocol):
    """What is scored. Row e of everything belongs to episode e; a row whose episode does not run holds zeros, and its action is ignored."""

    def start(self, episodes: int) -> Any:
        """A fresh carry for that many episodes."""

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        """Actions at step t, [E, A] in the environment's range or [E] whole numbers, from raw observations [E, ...], and the new carry."""


@dataclass(frozen=True)
class Evaluation:
    """Scores of N policies over E episodes each."""

    returns: np.ndarray  # [N, E] float64, undiscounted, of the environment's own rewards
    lengths: np.ndarray  # [N, E] int64 steps
    successes: np.ndarray | None  # [N, E] float64 in [0, 1]; None where the environment does not say
    scores: np.ndarray | None  # [N, E] float64 normalised; None without reference scores
    label: str  # data set or task, environment, package versions, whose reference scores
    seeds: tuple[int, ...] = ()
    faults: int = 0  # episodes stopped early by a NaN action or by physics that blew up

    @property
    def values(self) -> np.ndarray:
        """[N, E]: normalised scores where there are reference scores, else returns."""
        return self.returns if self.scores is None else self.scores

    def per_seed(self) -> np.ndarray:
        """[N]: each policy's mean of `values` over its episodes."""
        return self.values.mean(axis=1)

    def interval(self) -> tuple[float, float, float]:
        """(mean, low, high) of `per_seed`: the 95% Student-t interval over seeds, NaN for a single one."""
        return mean_interval(self.per_seed())

    def rows(self) -> list[dict[str, float | int | None]]:
        """One dict of plain numbers per policy, for tables and files."""
        return [
            {
                "seed": self.seeds[n] if self.seeds else n,
                "episodes": int(self.returns.shape[1]),
                "score": None if self.scores is None else float(self.scores[n].mean()),
                "return": float(self.returns[n].mean()),
                "return_std": float(self.returns[n].std()),
                "length": float(self.lengths[n].mean()),
                "success": None if self.successes is None else float(self.successes[n].mean()),
            }
            for n in range(len(self.returns))
        ]


def reset_seed(seed: int, policy_seed: int, episode: int) -> int:
    """The environment seed, 31 bits, of one episode: a hash, so that neighbouring seeds share no start state."""
    text = f"offrl evaluation {seed} {policy_seed} {episode}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFFFFFF


def evaluate(
    policies: Sequence[Policy], seeds: Sequence[int], task: Task, config: EvalConfig, progress: Progress | None = None
) -> Evaluation:
    """Score each policy, trained with the seed of the same index, over `config.episodes` episodes. `progress(done, total)` counts episodes
    and is called after every step of the environments.

    Raises UserError when the environment cannot be made, or a policy's actions do not fit it.
    """
    with Evaluator(task, config) as evaluator:
        return evaluator(policies, seeds, progress)


class Evaluator:
    """Keeps the environments of a task alive between evaluations. Use as a context manager, or call `close`."""

    def __init__(self, task: Task, config: EvalConfig) -> None:
        self.task, self.config = task, config
        self.envs: list[gym.Env] = [make_env(task)]
        env = self.envs[0]
        self.flatten, self.observation_shape, self.dtype = flattener(env, task.observation_keys)
        self.discrete, self.size = action_kind(env)
        limits = [n for n in (config.max_steps, task.max_episode_steps, time_limit(env)) if n is not None]
        self.limit, self.endless = (min(limits), False) if limits else (ENDLESS, True)
        scored = f"; 0 and 100 are {task.ref_label or 'given'} reference returns" if task.ref_min is not None else ""
        self.label = f"{task.name} in {versions(task, env)}{scored}"
        self._told: set[str] = set()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.close()
        self.envs.clear()

    def __call__(self, policies: Sequence[Policy], seeds: Sequence[int], progress: Progress | None = None) -> Evaluation:
        """See `evaluate`."""
        if len(policies) != len(seeds):
            raise ValueError(f"{len(policies)} policies but {len(seeds)} seeds")
        if not policies:
            raise ValueError("no policies to evaluate")
        shape = (len(policies), self.config.episodes)
        result = _Tally(np.zeros(shape), np.zeros(shape, np.int64), np.full(shape, np.nan))
        pairs = [(n, e) for n in range(shape[0]) for e in range(shape[1])]
        while len(self.envs) < min(self.config.parallel, len(pairs)):
            self.envs.append(make_env(self.task))
        with _mujoco_warnings(result.physics):
            for first in range(0, len(pairs), len(self.envs)):
                wave = pairs[first : first + len(self.envs)]
                self._wave(wave, policies, seeds, result, progress or (lambda done, total: None))
        successes = None if np.isnan(result.successes).all() else np.nan_to_num(result.successes)
        scores = self.task.normalise(result.returns)
        return Evaluation(result.returns, result.lengths, successes, scores, self.label, tuple(int(s) for s in seeds), result.faults)

    def _wave(
        self,
        wave: list[tuple[int, int]],
        policies: Sequence[Policy],
        seeds: Sequence[int],
        result: _Tally,
        progress: Progress,
    ) -> None:
        """Play these (policy, episode) pairs to their ends, each in an environment of its own, each policy with a fresh carry."""
        episodes = self.config.episodes
        running: dict[int, dict[int, gym.Env]] = {}
        observations: dict[int, np.ndarray] = {}
        for env, (n, e) in zip(self.envs, wave, strict=False):
            rows = observations.setdefault(n, np.zeros((episodes, *self.observation_shape), self.dtype))
            first = self.flatten(env.reset(seed=reset_seed(self.config.seed, int(seeds[n]), e))[0])
            if first.shape != self.observation_shape:
                raise UserError(f"{self.label}: reset gave an observation of shape {first.shape}, its space says {self.observation_shape}")
            rows[e] = first
            running.setdefault(n, {})[e] = env
        carries = {n: policies[n].start(episodes) for n in running}
        for t in range(self.limit):
            for n, games in running.items():
                if not games:
                    continue
                raw, carries[n] = policies[n].step(carries[n], observations[n], t)
                actions, finite = self._actions(raw)
                rows = observations[n]
                for e in list(games):
                    where = f"(seed {seeds[n]}, episode {e}, step {t})"
                    if finite[e]:
                        over = self._step(games[e], actions[e], rows, (n, e), result, where)
                    else:
                        over = True
                        self._fault(result, f"a policy gave NaN or infinite actions {where}")
                    if over or t + 1 == self.limit:
                        if not over and self.endless:
                            self._tell(f"an episode was cut after {ENDLESS} steps, for nothing limits it; set eval.max_steps")
                        del games[e]
                        rows[e] = 0
                        result.finished += 1
            progress(result.finished, result.returns.size)
            if not any(running.values()):
                break

    def _step(self, env: gym.Env, action: Any, rows: np.ndarray, at: tuple[int, int], result: _Tally, where: str) -> bool:
        """One environment step, counted in `result[at]`; the next observation goes to its row. True when the episode is over."""
        try:
            observation, reward, terminated, truncated, info = env.step(action)
        except Exception as error:  # a stranger's environment: say where it failed
            raise UserError(f"{self.task.env_id or self.task.name} failed {where}: {type(error).__name__}: {error}") from error
        gain, row = float(reward), self.flatten(observation)
        result.lengths[at] += 1
        if result.physics:  # MuJoCo has put the state back to its start: what it returned is not the policy's doing
            self._fault(result, f"the physics became unstable {where}: {result.physics[0]}")
            result.physics.clear()
            return True
        if not np.isfinite(gain) or not np.isfinite(row).all():
            self._fault(result, f"the environment gave a reward or observation that is not finite {where}")
            return True
        rows[at[1]] = row
        result.returns[at] += gain
        success = _success(info)
        if success is not None:
            result.successes[at] = np.fmax(result.successes[at], success)
        return bool(terminated or truncated)

    def _actions(self, raw: Any) -> tuple[Any, np.ndarray]:
        """Check a policy's actions against the environment: (one action per row in the form `step` takes, [E] bool: finite)."""
        actions = np.asarray(raw)
        episodes, space = self.config.episodes, self.envs[0].action_space
        expected = (episodes,) if self.discrete else (episodes, self.size)
        if actions.shape != expected:
            raise UserError(
                f"the policy gave actions of shape {actions.shape}, {self.task.env_id or self.task.name} takes {expected}: "
                "it was trained for another environment"
            )
        if self.discrete:
            finite = np.isfinite(actions)
            whole = np.where(finite, actions, 0).astype(np.int64)
            if (whole < 0).any() or (whole >= self.size).any():
                raise UserError(f"the policy gave action {whole.min()}..{whole.max()}, the environment has choices 0..{self.size - 1}")
            return whole + int(space.start), finite  # type: ignore[attr-defined]
        low, high = space.low.reshape(-1), space.high.reshape(-1)  # type: ignore[attr-defined]
        finite = np.isfinite(actions).all(axis=1)
        return np.clip(actions, low, high).astype(space.dtype).reshape(episodes, *space.shape), finite  # type: ignore[misc]

    def _fault(self, result: _Tally, message: str) -> None:
        result.faults += 1
        self._tell(f"{message}; the episode ends there and counts as it is", message.partition("(")[0])

    def _tell(self, message: str, kind: str | None = None) -> None:
        """Warn, once per kind of trouble and evaluator."""
        if (kind or message) not in self._told:
            self._told.add(kind or message)
            warn(f"evaluation in {self.task.env_id or self.task.name}: {message}")


@dataclass
class _Tally:
    returns: np.ndarray  # [N, E]
    lengths: np.ndarray  # [N, E]
    successes: np.ndarray  # [N, E], NaN where the environment said nothing
    physics: list[str] = field(default_factory=list)  # MuJoCo's warnings about unstable physics since they were last looked at
    finished: int = 0  # episodes
    faults: int = 0


def _success(info: dict[str, Any]) -> float | None:
    """How far the task is done, 0 to 1, in the words that Gymnasium's environments use; None when they say nothing."""
    for key in ("success", "is_success"):
        if key in info:
            return float(np.asarray(info[key]).reshape(-1)[0])
    if "episode_task_completions" in info:  # gymnasium-robotics' kitchen
        done, left = len(info["episode_task_completions"]), len(info.get("tasks_to_complete", ()))
        return done / max(1, done + left)
    return None


@contextlib.contextmanager
def _mujoco_warnings(messages: list[str]) -> Iterator[None]:
    """Collects MuJoCo's warnings of unstable physics, after which it silently resets, instead of a MUJOCO_LOG.TXT in the current folder."""
    mujoco: Any = sys.modules.get("mujoco")  # absent: none of the environments uses it
    if mujoco is None:
        yield
        return
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda text: messages.append(text) if "unstable" in text else warn(f"MuJoCo: {text}"))
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
