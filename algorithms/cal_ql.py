"""Cal-QL: "Cal-QL: Calibrated Offline RL Pre-Training for Efficient Online Fine-Tuning" (Nakamoto et al., 2023, arXiv 2303.05479)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from offrl.algorithm import Metrics
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Transitions, TransitionSampler
from offrl.data.transforms.columns import returns_to_go
from offrl.families.conservative import Conservative, ConservativeSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class CalQLConfig(ConservativeSettings):
    """Settings of Cal-QL; the defaults are CQL's for D4RL's locomotion tasks (the paper's own tasks: `offrl list`, experiments)."""

    name: str = "cal_ql"
    discount: float = setting(0.99, "discount factor; also of the data's returns", low=0.0, high=1.0, shared=True)


@dataclass(frozen=True)
class ReturnsSampler(TransitionSampler):
    """Transitions with the discounted return of the rest of their episode, `returns_to_go`, computed here with the algorithm's discount."""

    extra: tuple[str, ...] = ("returns_to_go",)
    discount: float = 0.99

    def returns(self, rewards: np.ndarray, terminations: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """G_t = r_t + discount (1 - d_t) G_{t+1} inside each episode, float64 [R], episode e being rows start[e] to end[e] - 1.

        An episode that has nothing but the smallest reward of all and was cut off has never succeeded, and would go on like that:
        r / (1 - discount) in each of its rows, as in the authors' code for sparse rewards.
        """
        out = returns_to_go(rewards, terminations, start, end, self.discount)
        if self.discount < 1.0:
            lowest = rewards.min()
            failed = (np.maximum.reduceat(rewards, start) == lowest) & ~terminations[end - 1].astype(bool)
            out[np.repeat(failed, end - start)] = float(lowest) / (1.0 - self.discount)
        return out

    def prepare(self, dataset: Dataset) -> Transitions:
        rewards, terminations = (dataset.columns[k].cpu().numpy() for k in ("rewards", "terminations"))
        start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
        column = torch.from_numpy(self.returns(rewards, terminations, start, end).astype(np.float32)).to(dataset.device)
        return super().prepare(dataclasses.replace(dataset, columns={**dataset.columns, "returns_to_go": column}))


@register("algo", "cal_ql")
class CalQL(Conservative):
    """CQL whose penalty pushes no value of the policy below the return that the data had from the state (equation 4.1)."""

    Config = CalQLConfig
    traits = replace(Conservative.traits, actions=("continuous",))

    def sampler(self) -> ReturnsSampler:
        return ReturnsSampler(discount=self.config.discount)

    def calibrate(self, values: Tensor, batch: Batch) -> tuple[Tensor, Metrics]:
        """max(Q(s, a), G(s)) for the policy's actions; uniform ones are not the policy's, and stay as they are."""
        uniform, policy = values[:, : self.config.actions], values[:, self.config.actions :]
        floor = batch["returns_to_go"]
        bounded = (policy < floor).float().mean()
        return torch.cat([uniform, torch.maximum(policy, floor)], 1), {"cal_ql/bounded": bounded, "cal_ql/returns": floor.mean()}
