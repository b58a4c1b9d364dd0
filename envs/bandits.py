"""Bandits, each a task of its own, their data, and the classical ways to learn one: "Supervised Pretraining Can Learn
In-Context Reinforcement Learning" (Lee et al., 2023, arXiv 2306.14892, section 4).

An arm pays its mean plus Gaussian noise. Either means are independent and uniform in [0, 1], or, with `features`,
linear: each arm has a fixed feature vector, and a task is a parameter theta ~ N(0, I / features) of which the mean is
the product.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import BaseEnvironment, Info, Step, raw_data, register_generated, task_number
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from offrl.data.raw import RawData

NAME = "bandits"
ENV = "offrl/Bandit-v0"
ARMS, STD, PULLS = 5, 0.3, 200
TASKS = 2_000  # in the data
FEATURE_SEED = 1234  # of the arms' fixed features
MIXES = 11  # shares of one arm in the data's behaviour: 0, 0.1, ..., 1


class Bandit(BaseEnvironment):
    """Observation: always 1. Action: the arm. Reward: its mean plus noise of standard deviation `std`. It never ends by
    itself.

    task: the number of the bandit; None: another one in each episode, of those that are `held_out`. `info["regret"]`:
    by how much the best arm's mean exceeds that of the arm that was pulled.
    """

    held_out = range(1_000_000, 2_000_000)  # numbers of tasks that no dataset of offrl's holds

    def __init__(
        self,
        arms: int = ARMS,
        std: float = STD,
        features: int | None = None,
        task: int | None = None,
        render_mode: str | None = None,
    ) -> None:
        self.arms, self.std, self.features, self.task, self.render_mode = arms, std, features, task, render_mode
        self.observation_space = spaces.Box(1.0, 1.0, (1,), np.float32)
        self.action_space = spaces.Discrete(arms)
        self.phi = np.eye(arms)  # [K, d] features of the arms
        if features is not None:
            self.phi = np.random.default_rng(FEATURE_SEED).standard_normal((arms, features)) / np.sqrt(features)
        self.means = self.means_of(0 if task is None else task)
        self.tables: dict[Any, Any] = {}  # device -> phi as a tensor

    def means_of(self, task: int) -> np.ndarray:
        """The arms' means [K] in the task of that number, the same on every machine."""
        draw = np.random.default_rng([self.arms, self.features or 0, task])
        if self.features is None:
            return draw.uniform(0.0, 1.0, self.arms)
        return self.phi @ (draw.standard_normal(self.features) / np.sqrt(self.features))

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        number = task_number(self)
        self.means = self.means_of(number)
        return np.ones(1, np.float32), {"task": number}

    def step(self, action: int) -> Step:
        mean = float(self.means[action])
        reward = mean + self.std * float(self.np_random.standard_normal())
        return np.ones(1, np.float32), reward, False, False, {"regret": float(self.means.max()) - mean}

    def contexts(self, key: Tensor, batch: int, length: int) -> dict[str, Tensor]:
        """Contexts of new tasks, as `offrl.data.samplers.contexts.FreshContexts` asks for them; the behaviour is that
        of the data.
        """
        import torch

        from offrl import rng

        keys = rng.split(key, 6)
        if self.features is None:
            means = rng.uniform(keys[0], (batch, self.arms))
        else:
            theta = rng.normal(keys[0], (batch, self.features)) * self.features**-0.5
            if key.device not in self.tables:  # once: while an update is captured for a GPU nothing can be copied there
                self.tables[key.device] = torch.tensor(self.phi.T, dtype=torch.float32, device=key.device)
            means = theta @ self.tables[key.device]
        # exponential; divided by their sum: Dirichlet(1)
        weight = -torch.log1p(-rng.uniform(keys[1], (batch, self.arms)))
        share = rng.randint(keys[2], (batch, 1), MIXES).float() / (MIXES - 1)
        arm = torch.arange(self.arms, device=key.device)
        lone = (rng.randint(keys[3], (batch, 1), self.arms) == arm).float()
        mixed = (1.0 - share) * weight / weight.sum(-1, keepdim=True).clamp(min=1e-9) + share * lone
        edges = mixed.cumsum(-1).unsqueeze(-2)  # [B, 1, K]
        actions = (rng.uniform(keys[4], (batch, length)).unsqueeze(-1) >= edges).sum(-1).clamp(max=self.arms - 1)
        rewards = means.gather(-1, actions) + self.std * rng.normal(keys[5], (batch, length))
        one = torch.ones(batch, length, 1, device=key.device)
        return {
            "observations": one,
            "actions": actions,
            "next_observations": one,
            "rewards": rewards,
            "valid": torch.ones(batch, length, dtype=torch.bool, device=key.device),
            "queries": torch.ones(batch, 1, device=key.device),
            "labels": means.argmax(-1),
        }

    def learners(self) -> dict[str, Any]:
        """The classical ways to learn this bandit, as `offrl.evaluation.in_context` plays them."""
        prior = (0.5, 1.0 / 12.0) if self.features is None else (0.0, 1.0 / self.features)
        kinds: dict[str, Any] = {
            "Thompson sampling": Thompson(self.phi, self.std, *prior),
            "UCB": Optimist(self.phi, 1.0, self.features is None),
            "empirical mean": Optimist(self.phi, 0.0, self.features is None),
        }
        return kinds


Memory = dict[str, Any]  # of a learner: see `Linear.begin`


class Linear(ABC):
    """Sufficient statistics of N bandits: A = sum of phi phi^T [N, d, d] and b = sum of phi r [N, d], phi the arm's
    features.

    Independent arms are linear ones whose features are the unit vectors: A then counts the pulls.
    """

    def __init__(self, phi: np.ndarray) -> None:
        self.phi = phi

    def begin(self, tasks: Sequence[int], seed: int) -> Memory:
        d = self.phi.shape[1]
        return {"A": np.zeros((len(tasks), d, d)), "b": np.zeros((len(tasks), d)), "rng": np.random.default_rng(seed)}

    def step(self, memory: Memory, observations: np.ndarray, t: int) -> tuple[np.ndarray, Memory]:
        """The arms to pull, [N]."""
        actions = self.choose(memory)
        return actions, {**memory, "actions": actions}

    @abstractmethod
    def choose(self, memory: Memory) -> np.ndarray:
        """The arms to pull, [N]."""

    def observe_reward(self, memory: Memory, rewards: np.ndarray) -> Memory:
        phi = self.phi[memory["actions"]]
        return {**memory, "A": memory["A"] + phi[:, :, None] * phi[:, None], "b": memory["b"] + phi * rewards[:, None]}

    def new_episode(self, memory: Memory, observations: np.ndarray, lengths: np.ndarray) -> Memory:
        """Another episode is the same bandit."""
        return memory


class Thompson(Linear):
    """Pulls the best arm of a parameter drawn from its posterior under a Gaussian prior and noise of known size
    (Thompson, 1933).
    """

    def __init__(self, phi: np.ndarray, std: float, prior_mean: float, prior_variance: float) -> None:
        super().__init__(phi)
        self.std, self.mean, self.variance = std, prior_mean, prior_variance

    def posterior(self, memory: Memory) -> tuple[np.ndarray, np.ndarray]:
        """Mean [N, d] and covariance [N, d, d] of the parameter."""
        d = self.phi.shape[1]
        covariance = np.linalg.inv(np.eye(d) / self.variance + memory["A"] / self.std**2)
        return np.einsum("nij,nj->ni", covariance, self.mean / self.variance + memory["b"] / self.std**2), covariance

    def choose(self, memory: Memory) -> np.ndarray:
        mean, covariance = self.posterior(memory)
        noise = memory["rng"].standard_normal(mean.shape)
        sample = mean + np.einsum("nij,nj->ni", np.linalg.cholesky(covariance), noise)
        return (sample @ self.phi.T).argmax(-1)


class Optimist(Linear):
    """Pulls the arm with the highest estimate plus `bonus` sqrt(phi^T A^-1 phi), for independent arms mean + bonus /
    sqrt(pulls) (UCB, Auer et al., 2002; LinUCB with I added to A, arXiv 1003.0146). Independent arms are pulled once
    each first."""

    def __init__(self, phi: np.ndarray, bonus: float, independent: bool) -> None:
        super().__init__(phi)
        self.bonus, self.independent = bonus, independent

    def choose(self, memory: Memory) -> np.ndarray:
        if self.independent:
            pulls = np.einsum("nii->ni", memory["A"])
            bounds = memory["b"] / np.maximum(pulls, 1.0) + self.bonus / np.sqrt(np.maximum(pulls, 1.0))
            return np.where((pulls == 0).any(-1), pulls.argmin(-1), bounds.argmax(-1))
        inverse = np.linalg.inv(np.eye(self.phi.shape[1]) + memory["A"])
        estimate = np.einsum("nij,nj->ni", inverse, memory["b"]) @ self.phi.T
        return (estimate + self.bonus * np.sqrt(np.einsum("kd,nde,ke->nk", self.phi, inverse, self.phi))).argmax(-1)


gym.register(ENV, entry_point="offrl.envs.bandits:Bandit", max_episode_steps=PULLS)


TASK = Task(
    name=NAME,
    env_id=f"offrl.envs.bandits:{ENV}",
    max_episode_steps=PULLS,
    ref_min=0.5 * PULLS,
    ref_max=ARMS / (ARMS + 1) * PULLS,
    ref_label="offrl",
    observation_dim=1,
    note="0 is what a random arm pays, 100 what the best one does, on average over all bandits; each episode is "
    "another one, and none of them is in the data",
)
register_generated(TASK, lambda: generate(0, TASKS, PULLS))


def generate(
    seed: int, tasks: int, pulls: int, arms: int = ARMS, std: float = STD, features: int | None = None
) -> RawData:
    """One episode of `pulls` in each of the tasks 0, ..., `tasks` - 1, with the columns tasks and optimal_actions.

    Behaviour as in the authors' code: an arm is drawn from a mixture of a Dirichlet(1) distribution and one lone arm,
    whose share is 0, 0.1, ... or 1.
    """
    env, draw = Bandit(arms, std, features), np.random.Generator(np.random.PCG64(seed))
    means = np.stack([env.means_of(n) for n in range(tasks)])
    share = draw.integers(0, MIXES, (tasks, 1)) / (MIXES - 1)
    mixed = (1.0 - share) * draw.dirichlet(np.ones(arms), tasks) + share * np.eye(arms)[draw.integers(0, arms, tasks)]
    actions = (draw.uniform(size=(tasks, pulls, 1)) >= mixed.cumsum(-1)[:, None]).sum(-1).clip(max=arms - 1)
    rewards = np.take_along_axis(means, actions, 1) + std * draw.standard_normal((tasks, pulls))
    rows = tasks * pulls
    columns = {
        "observations": np.ones((rows, 1), np.float32),
        "next_observations": np.ones((rows, 1), np.float32),
        "actions": actions.reshape(rows).astype(np.int64),
        "rewards": rewards.reshape(rows).astype(np.float32),
        "terminations": np.zeros(rows, bool),
        "truncations": np.arange(rows) % pulls == pulls - 1,
        "tasks": np.repeat(np.arange(tasks), pulls),
        "optimal_actions": np.repeat(means.argmax(-1), pulls),
    }
    task = TASK
    if (arms, std, features, pulls) != (ARMS, STD, None, PULLS):
        settings = {"arms": arms, "std": std, "features": features}
        task = Task(name=NAME, env_id=TASK.env_id, env_kwargs=settings, max_episode_steps=pulls)
    return raw_data(columns, task, seed, num_actions=arms)
