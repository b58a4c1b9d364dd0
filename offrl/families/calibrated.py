"""Penalties on Q over actions whose values stay above the data's returns: Cal-QL, and WSRL's training on data.

"Cal-QL: Calibrated Offline RL Pre-Training for Efficient Online Fine-Tuning" (Nakamoto et al., 2023, arXiv 2303.05479).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Dataset, Loss, Params, TrainState
from offrl.data.samplers.transitions import Batch, Transitions, TransitionSampler
from offrl.data.transforms.columns import returns_to_go
from offrl.families import conservative
from offrl.families.conservative import Conservative, ConservativeSettings
from offrl.settings.field import setting


@dataclass
class CalibratedSettings(ConservativeSettings):
    """Settings of penalties that the data's returns bound."""

    discount: float = setting(0.99, "discount factor; also of the data's returns", low=0.0, high=1.0, shared=True)


@dataclass(frozen=True)
class ReturnsSampler(TransitionSampler):
    """Transitions with the discounted return of the rest of their episode, `returns_to_go`, computed here with the
    algorithm's discount.
    """

    extra: tuple[str, ...] = ("returns_to_go",)
    discount: float = 0.99

    def returns(self, rewards: np.ndarray, terminations: np.ndarray, start: np.ndarray, end: np.ndarray) -> np.ndarray:
        """G_t = r_t + discount (1 - d_t) G_{t+1} inside each episode, float64 [R], episode e being rows start[e] to
        end[e] - 1.

        An episode that has nothing but the smallest reward of all and was cut off has never succeeded, and would go on
        like that: r / (1 - discount) in each of its rows, as in the authors' code for sparse rewards.
        """
        out = returns_to_go(rewards, terminations, start, end, self.discount)
        if self.discount < 1.0:
            minimum = rewards.min()
            failures = (np.maximum.reduceat(rewards, start) == minimum) & ~terminations[end - 1].astype(bool)
            out[np.repeat(failures, end - start)] = float(minimum) / (1.0 - self.discount)
        return out

    def prepare(self, dataset: Dataset) -> Transitions:
        rewards, terminations = (dataset.columns[k].cpu().numpy() for k in ("rewards", "terminations"))
        start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
        column = torch.from_numpy(self.returns(rewards, terminations, start, end).astype(np.float32)).to(dataset.device)
        return super().prepare(dataclasses.replace(dataset, columns={**dataset.columns, "returns_to_go": column}))


ConfigT = TypeVar("ConfigT", bound=CalibratedSettings)


class Calibrated(Conservative[ConfigT]):
    """CQL whose penalty pushes no value of the policy below the return that the data had from the state; named before
    `SoftActorCritic` among a class's parents.
    """

    sample: Any

    def sampler(self) -> TransitionSampler:
        return ReturnsSampler(n_step=self.config.n_step, discount=self.config.discount)

    def calibrated(self, q: Tensor, returns: Tensor) -> Tensor:
        """max(Q(s, a), G(s)) of values [E, M, B] at the policy's actions (equation 4.1); uniform ones, which come
        first, stay.
        """
        uniform, policy = q[:, : self.config.actions], q[:, self.config.actions :]
        return torch.cat([uniform, torch.maximum(policy, returns)], 1)

    def penalty(
        self, critic: Params, state: TrainState, batch: Batch, key: Tensor, logits: Tensor | None = None
    ) -> Loss:
        """alpha E [log sum_a exp max(Q_i(s, a), G(s)) - Q_i(s, a_data)], summed over critics i (equation 4.1 in CQL's
        penalty).

        With `action_gap` it is multiplier * alpha * (E [...] - gap). logits: the critics' at (s, a_data), where known.
        """
        c, n = self.config, self.config.actions
        rows = conservative.spread_rows(batch, c.penalty_share)
        logits = logits if rows is batch else None
        returns = rows["returns_to_go"]
        sampled = conservative.sampled_actions(partial(self.sample, state.params["actor"]), rows, n, key)
        soft = conservative.soft_maximum(
            self.critic,
            critic,
            rows,
            sampled,
            c,
            rng.fold_in(key, 3),
            logits,
            bound=lambda q: self.calibrated(q, returns),
        )
        loss, metrics = self.weighted(state, soft)
        metrics |= {"cql/q_uniform": soft.q[:, :n].mean(), "cql/q_policy": soft.q[:, n : 2 * n].mean()}
        return loss, {
            **metrics,
            "cal_ql/bounded": (soft.q[:, n:] < returns).float().mean(),
            "cal_ql/returns": returns.mean(),
        }
