"""Score policies in their environment: a policy's episodes side by side, the same numbers however many run at once.

Episode e of the policy with seed s always starts from a state that depends on (eval.seed, s, e) alone, and the policy
always sees all of its episodes at once, episode e in row e; so neither `parallel` nor the other policies can change a
bit of a score.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.errors import UserError, warn
from offrl.evaluation.arrays import aligned_zeros, finite_rows
from offrl.evaluation.result import Evaluation, OwnValues, Policy, Tally
from offrl.evaluation.steppers import StepFailed, observed, step_all
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.environments import action_kind, episode_limit, flattener, make_env, to_space
from offrl.tasks.episodes import ENDLESS, goal_of, mujoco_warnings, observe_reward, reset_seed, set_goal
from offrl.tasks.perturbed import perturbed
from offrl.tasks.provenance import provenance
from offrl.tasks.task import Task

if TYPE_CHECKING:
    import gymnasium as gym

DISCOUNT = 0.99  # of the discounted returns of a policy without a discount of its own
Progress = Callable[[int, int], None]


class Evaluator:
    """Keeps the environments of a task alive between evaluations. Use as a context manager, or call `close`.

    Policies act under `plain_products`, so a score depends neither on `threads` nor on what trains beside it.
    """

    def __init__(self, task: Task, config: EvalConfig, tell: Callable[[str, str], None] | None = None) -> None:
        """`tell(kind, message)` is called in place of `warn`, each time that something is amiss. Raises UserError when
        the environment cannot be made."""
        self.task, self.config = task, config
        env = make_env(task)
        self.envs = [env]
        self.flatten, self.observation_shape, self.dtype = flattener(env, task.observation_keys)
        self.discrete, self.size = action_kind(env)
        self.text = self.dtype is object
        limit, longest = episode_limit(env, task, config.max_steps), episode_limit(env, task, None)
        self.limit, self.endless = ENDLESS if limit is None else limit, limit is None
        self.provenance = provenance(task, env)
        self._told: set[str] = set()
        self._tell = tell or self._warn_once
        if tell is not None:  # what follows are facts of the settings: an evaluation process need not repeat them
            return
        if (count := len(task.starts)) and config.episodes % count:
            self._warn_once(
                "starts",
                f"{config.episodes} episodes play some of its {count} starts more often than others: take a multiple "
                f"of {count}",
            )
        if self.provenance.reference and limit != longest:
            self._warn_once(
                "cut",
                f"max_steps={limit} cuts the episodes, and its scores 0 and 100 are returns of episodes of "
                f"{longest or 'all'} steps: compare returns, not scores",
            )

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the environments."""
        for env in self.envs:
            env.close()
        self.envs.clear()

    def __call__(
        self, policies: Sequence[Policy], seeds: Sequence[int], progress: Progress | None = None
    ) -> Evaluation:
        """Score each policy, trained with the seed of the same index, over `config.episodes` episodes.
        `progress(done, total)` counts episodes and is called after every step of the environments.

        Raises UserError where a policy's actions do not fit the environment.
        """
        tally = Tally.of(policies, seeds, self.config.episodes)
        for n, (policy, seed) in enumerate(zip(policies, seeds, strict=True)):
            self.play(n, policy, int(seed), range(self.config.episodes), tally, progress)
        return tally.evaluation(self.task, self.provenance, seeds)

    def play(
        self, n: int, policy: Policy, seed: int, episodes: Sequence[int], tally: Tally, progress: Progress | None = None
    ) -> None:
        """Play these episodes of one policy, and write what comes of them to row n of `tally`."""
        alive = self.config.parallel
        while len(self.envs) < min(alive, len(episodes)):
            self.envs.append(make_env(self.task))
        changes = getattr(policy, "perturbation", None)
        with mujoco_warnings() as unstable, plain_products(), perturbed(self.envs[: len(episodes)], changes) as envs:
            for first in range(0, len(episodes), alive):
                at = list(episodes[first : first + alive])
                self._wave(_Games(n, policy, seed, at, tally, unstable, envs[: len(at)]), progress)

    def _wave(self, games: _Games, progress: Progress | None) -> None:
        """Play these episodes to their ends, each in an environment of its own, with a fresh carry."""
        count, tally = self.config.episodes, games.tally
        rows = games.rows = (
            np.full(count, None, object) if self.text else aligned_zeros((count, *self.observation_shape), self.dtype)
        )
        goals: list[np.ndarray | None] = [None] * count
        for env, e in zip(games.envs, games.at, strict=True):
            options = dict(self.task.starts[e % len(self.task.starts)]) if self.task.starts else None
            first, info = env.reset(seed=reset_seed(self.config.seed, games.seed, e), options=options)
            goals[e] = goal_of(first, info, self.flatten if np.dtype(self.dtype).names else None)
            row = self._read(first, info)
            if not self.text and row.shape != self.observation_shape:
                raise UserError(
                    f"{self.task.name} in {self.provenance.place}: reset gave an observation of shape {row.shape}, its "
                    f"space says {self.observation_shape}"
                )
            rows[e] = row
        games.unstable.clear()
        carry = set_goal(games.policy, games.policy.start(count), _rows(goals, games.at))
        started_at, value = list(games.at), None
        interventions = getattr(games.policy, "interventions", None)
        games.discount = float(getattr(games.policy, "discount", DISCOUNT))
        limit = getattr(games.policy, "cost_limit", None) if self.config.cost_limit is None else self.config.cost_limit
        tally.limits[games.n, started_at] = np.nan if limit is None else limit
        for t in range(self.limit):
            actions, carry = games.policy.step(carry, rows, t)
            if interventions is not None:
                sums = np.nan_to_num(tally.shielded[games.n, games.at])
                tally.shielded[games.n, games.at] = sums + interventions(carry, games.at)
            if t == 0 and isinstance(games.policy, OwnValues):
                value = games.policy.own_value(rows, np.asarray(actions))
            self._turn(games, actions, t)
            carry = observe_reward(games.policy, carry, games.rewards, games.costs)
            if progress is not None:
                progress(tally.finished, tally.returns.size)
            if not games.at:
                break
        if value is not None and isinstance(games.policy, OwnValues):
            tally.estimates[games.n, started_at] = games.policy.in_recorded_units(
                value[started_at], tally.lengths[games.n, started_at]
            )

    def _turn(self, games: _Games, raw: Any, t: int) -> None:
        """Step t of all running episodes, with the policy's actions for all rows; the next observations go to their
        rows.
        """

        def where(e: int) -> str:
            return f"(seed {games.seed}, episode {e}, step {t})"

        n, tally = games.n, games.tally
        games.rewards, games.costs = np.zeros(self.config.episodes), None
        actions, finite = self._actions(raw)
        if not finite.all():
            for e in [e for e in games.at if not finite[e]]:
                self._fault(tally, f"a policy gave NaN or infinite actions {where(e)}")
                games.end(e)
            if not games.at:
                return
        at = list(games.at)
        try:
            chosen = [str(action) for action in actions[at]] if self.text else actions[at]
            steps = step_all(games.envs, chosen, self._read, games.unstable)
        except StepFailed as failure:  # a third-party environment: say where it failed
            error = failure.__cause__
            name = self.task.env_id or self.task.name
            raise UserError(f"{name} failed {where(at[failure.index])}: {type(error).__name__}: {error}") from error
        gains, good = steps.rewards, np.isfinite(steps.rewards)
        rows = _texts(steps.observations) if self.text else np.stack(steps.observations)
        if not self.text:
            good &= finite_rows(rows)
        for k in np.flatnonzero(~good).tolist():
            if k not in steps.unstable:
                self._fault(tally, f"the environment gave a reward or observation that is not finite {where(at[k])}")
        # MuJoCo has put the state back to its start: what it returned is not the policy's doing
        for k, text in steps.unstable.items():
            self._fault(tally, f"the physics became unstable {where(at[k])}: {text}")
            good[k] = False
        tally.lengths[n, at] += 1
        counted, successes, costs = at, steps.successes, steps.costs
        if not good.all():
            counted, gains, rows = [e for e, ok in zip(at, good, strict=True) if ok], gains[good], rows[good]
            successes, costs = successes[good], costs[good]
        games.rows[counted], games.rewards[counted] = rows, gains
        if not np.isnan(costs).all():
            games.costs = np.zeros(self.config.episodes)
            games.costs[counted] = np.nan_to_num(costs)
            tally.costs[n, counted] = np.nan_to_num(tally.costs[n, counted]) + np.nan_to_num(costs)
        tally.returns[n, counted] += gains
        tally.discounted[n, counted] += games.discount**t * gains
        tally.successes[n, counted] = np.fmax(tally.successes[n, counted], successes)
        over = steps.over | ~good
        if t + 1 == self.limit:
            if self.endless and not over.all():
                self._tell(
                    "endless", f"an episode was cut after {ENDLESS} steps, for nothing limits it; set eval.max_steps"
                )
            over[:] = True
        for k in np.flatnonzero(over).tolist():
            games.end(at[k])

    def _read(self, observation: Any, info: Any) -> Any:
        return observed(observation, info) if self.text else self.flatten(observation)

    def _actions(self, raw: Any) -> tuple[Any, np.ndarray]:
        """Check a policy's actions against the environment: (one action per row in the form `step` takes, [E] bool:
        finite).
        """
        actions = np.asarray(raw, object if self.text else None)
        episodes, space = self.config.episodes, self.envs[0].action_space
        expected = (episodes,) if self.discrete or self.text else (episodes, self.size)
        if actions.shape != expected:
            raise UserError(
                f"the policy gave actions of shape {actions.shape}, {self.task.env_id or self.task.name} takes "
                f"{expected}: it was trained for another environment"
            )
        if self.text:
            return actions, np.ones(episodes, bool)
        if self.discrete:
            finite = np.isfinite(actions)
            choices = np.where(finite, actions, 0).astype(np.int64)
            if (choices < 0).any() or (choices >= self.size).any():
                raise UserError(
                    f"the policy gave action {choices.min()}..{choices.max()}, the environment has choices "
                    f"0..{self.size - 1}"
                )
            return to_space(space, choices), finite
        return to_space(space, actions), np.isfinite(actions).all(axis=1)

    def _fault(self, tally: Tally, message: str) -> None:
        tally.faults += 1
        self._tell(message.partition("(")[0], f"{message}; the episode ends there and counts as it is")

    def _warn_once(self, kind: str, message: str) -> None:
        """Warn, once per kind of trouble and evaluator."""
        if kind not in self._told:
            self._told.add(kind)
            warn(f"evaluation in {self.task.env_id or self.task.name}: {message}")


def _texts(texts: Sequence[str]) -> np.ndarray:
    """[E] objects."""
    return np.array([*texts, None], object)[:-1]


def _rows(goals: Sequence[np.ndarray | None], running: Sequence[int]) -> np.ndarray | None:
    """The goals as one array with a row for each episode, zeros where none runs; None where a running one has none, or
    they differ in width."""
    known = [goal for e in running if (goal := goals[e]) is not None]
    if len(known) < len(running) or len({goal.shape for goal in known}) > 1:
        return None
    rows = np.zeros((len(goals), *known[0].shape), known[0].dtype)
    rows[list(running)] = np.stack(known)
    return rows


@dataclass
class _Games:
    """The running episodes of one policy."""

    n: int  # row in the tally
    policy: Policy
    seed: int
    at: list[int]  # the running episodes
    tally: Tally
    unstable: list[str]  # see `mujoco_warnings`
    envs: list[gym.Env]  # of the running episodes
    discount: float = DISCOUNT
    rows: np.ndarray = field(init=False)  # [E, ...] observations; zeros (of texts: None) where no episode runs
    rewards: np.ndarray = field(init=False)  # [E] of the last step; likewise
    costs: np.ndarray | None = None  # likewise; None where the environment said nothing

    def end(self, e: int) -> None:
        """Episode e is over."""
        k = self.at.index(e)
        del self.at[k], self.envs[k]
        self.rows[e] = None if self.rows.dtype == object else 0
        self.tally.finished += 1


@contextlib.contextmanager
def plain_products() -> Iterator[None]:
    """PyTorch's float32 products by its default library on one thread, whatever `offrl.system.backend` set up for
    training: both choices round differently, and a score is to be the same during training, afterwards and in any
    process. For a few rows it is the fastest choice."""
    torch: Any = sys.modules.get("torch")  # absent: none of the policies uses it
    if torch is None:
        yield
        return
    threads, matmul = torch.get_num_threads(), getattr(torch.backends.mkldnn, "matmul", None)  # None before PyTorch 2.9
    precision = getattr(matmul, "fp32_precision", None)
    if threads != 1:
        torch.set_num_threads(1)
    if matmul is not None:
        matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        if matmul is not None:
            matmul.fp32_precision = precision
        if threads != 1:
            torch.set_num_threads(threads)
