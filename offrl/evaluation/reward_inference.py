"""Zero-shot reward inference: policies act for another reward without training, by a task inferred from the data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.transforms.reward_labels import Labeller, call_labeller, label_rewards, labeller
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.result import Evaluation
from offrl.settings.evaluation import EvalConfig
from offrl.settings.replicas import Replica
from offrl.system.csv_text import text_of
from offrl.system.files import write_text
from offrl.tasks.environments import make_env
from offrl.tasks.task import Task

TABLE = "rewards.csv"
SAMPLES = 10_000  # transitions from which the task is inferred


@dataclass(frozen=True)
class RewardEvaluation:
    """Scores of R replicas that act for a reward of this name."""

    name: str
    replicas: tuple[Replica, ...]
    evaluation: Evaluation  # by the environment's own reward
    returns: np.ndarray  # [R, E] undiscounted, by that reward
    data: float  # the mean return of the data's episodes by that reward


def sample(
    dataset: Dataset, rewards: str | Labeller, count: int = SAMPLES, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, float]:
    """`count` transitions of `dataset` (as recorded), all of them where it has no more: the observations [K, O] that
    they lead to, and their rewards [K] by `rewards`. And the mean return of the episodes by those. Raises UserError;
    see `label_rewards`."""
    labelled = label_rewards(dataset, rewards)
    rows = labelled.transition_rows()
    if len(rows) > count:
        pick = np.sort(np.random.default_rng(seed).choice(len(rows), count, replace=False))
        rows = rows[pick.tolist()]
    observations = labelled.columns["next_observations"][rows].flatten(1).float().numpy()
    return observations, labelled.columns["rewards"][rows].numpy(), float(labelled.episode_returns().mean())


@dataclass
class Diary:
    """One episode as it was played: observations as the environment gives them (the first one too), actions, its
    rewards, how it ended.
    """

    observations: list[Any]
    actions: list[Any] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    ends: list[tuple[bool, bool]] = field(default_factory=list)

    def columns(self, flatten: Callable[[Any], np.ndarray], steps: int) -> dict[str, np.ndarray]:
        """The arguments of a function of rewards, of the first `steps` steps; the last is cut off where nothing ended
        it.
        """
        observations = np.stack([np.asarray(flatten(o)) for o in self.observations[: steps + 1]])
        kind = np.uint8 if observations.dtype == np.uint8 else np.float32
        ended, cut = (np.array([e[i] for e in self.ends[:steps]], bool) for i in range(2))
        cut[-1] |= not ended[-1]
        actions = np.stack([np.asarray(a) for a in self.actions[:steps]])
        return {
            "observations": observations[:-1].astype(kind),
            "next_observations": observations[1:].astype(kind),
            "actions": actions.astype(np.int64 if actions.dtype.kind in "iu" else np.float32),
            "rewards": np.array(self.rewards[:steps], np.float32),
            "terminations": ended,
            "truncations": cut,
        }


class Observed(gym.Wrapper):
    """An environment that keeps a diary of each episode in a list that it shares with others, in the order in which
    they began.
    """

    def __init__(self, env: gym.Env, diaries: list[Diary]) -> None:
        super().__init__(env)
        self.diaries = diaries

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.diary = Diary([copy.deepcopy(observation)])
        self.diaries.append(self.diary)
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.diary.observations.append(copy.deepcopy(observation))
        self.diary.actions.append(np.array(action))
        self.diary.rewards.append(float(reward))
        self.diary.ends.append((bool(terminated), bool(truncated)))
        return observation, reward, terminated, truncated, info


def score(
    policies: Sequence[TrainedPolicy], task: Task, config: EvalConfig, rewards: str | Labeller
) -> tuple[Evaluation, np.ndarray]:
    """Score each policy in the environment, and its episodes by `rewards` as well: [N, E]. In this process."""
    function = labeller(rewards)[0] if isinstance(rewards, str) else rewards
    diaries: list[Diary] = []
    watched = replace(task, env_factory=lambda: Observed(make_env(task), diaries))
    with Evaluator(watched, config) as evaluator:
        evaluation = evaluator(policies, [p.seed for p in policies])
        choices = getattr(evaluator.envs[0].action_space, "start", 0)  # data number choices from 0
        returns = np.zeros(evaluation.returns.shape)
        for at, diary in enumerate(diaries):
            n, e = divmod(at, config.episodes)
            columns = diary.columns(evaluator.flatten, int(evaluation.lengths[n, e]))
            if columns["actions"].dtype == np.int64:
                columns["actions"] = columns["actions"] - int(choices)
            returns[n, e] = call_labeller(
                f"rewards={name_of(rewards)}, episode {e} of seed {evaluation.seeds[n]}", function, columns
            ).sum()
    return evaluation, returns


def name_of(rewards: str | Labeller) -> str:
    """The name of a reward."""
    return rewards if isinstance(rewards, str) else getattr(rewards, "__name__", type(rewards).__name__)


def write(earned: Sequence[RewardEvaluation], folder: Path) -> Path:
    """The table. Raises UserError where it cannot be written."""
    fields = [name for name, _ in earned[0].replicas[0].values]
    means = ("return_mean", "return_std", "environment_return_mean", "data_return_mean", "length_mean")
    lines: list[list[Any]] = [["rewards", *fields, "seed", *means]]
    for one in earned:
        for n, (replica, row) in enumerate(zip(one.replicas, one.evaluation.rows(), strict=True)):
            values = [one.returns[n].mean(), one.returns[n].std(), row["return_mean"], one.data, row["length_mean"]]
            lines.append([one.name, *(v for _, v in replica.values), replica.seed, *values])
    write_text(folder / TABLE, text_of(lines))
    return folder / TABLE
