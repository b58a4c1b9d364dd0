"""Doubly robust estimates: fitted Q corrected by weighted TD errors (Jiang and Li, arXiv 1511.03722; Thomas and
Brunskill, 1604.00923).
"""

from __future__ import annotations

import torch
from torch import Tensor

from offrl.ope.config import OPEConfig
from offrl.ope.fqe import Fitted
from offrl.ope.importance import episode_counts, log_ratios, percentile_interval, target_log_prob, weighted_sums
from offrl.ope.problem import Estimates, candidate_actions


def state_values(fitted: Fitted, draws: int) -> tuple[Tensor, Tensor]:
    """(V(s_t), V(s_{t+1})) of each candidate, float64 [R, K]: mean over the seeds of Q at its own actions.

    Greedy candidates have one action; as they explore, it is the mean over `draws` of them.
    """
    problem = fitted.problem
    rows = torch.arange(len(problem.dataset))
    here, after = _own(fitted, problem.here, problem.after, rows)
    if problem.explore:
        for draw in range(1, draws):
            more = [
                candidate_actions(name, policy, problem.dataset, True, draw)
                for name, policy in zip(problem.names, problem.policies, strict=True)
            ]
            h, a = _own(fitted, torch.stack([m.here for m in more], 1), torch.stack([m.after for m in more], 1), rows)
            here, after = here + h, after + a
        here, after = here / draws, after / draws
    return here, after


def _own(fitted: Fitted, here: Tensor, after: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    return fitted.values(rows, here).mean(0), fitted.values(rows, after, "next_observations").mean(0)


def doubly_robust(fitted: Fitted, behavior: Tensor, settings: OPEConfig) -> Estimates:
    """mean V(s0) + sum_t discount**t (weighted mean of r_t + discount m_t V(s_{t+1}) - Q(s_t, a_t)).

    The weights are those of `wis`, self-normalised at each step; the sum of TD errors telescopes to the usual form
    sum_t discount**t [w_t (r_t - Q_t) + w_{t-1} V_t]. The interval is a bootstrap over episodes with Q held fixed.
    """
    problem = fitted.problem
    dataset = problem.dataset
    columns, starts = dataset.columns, problem.starts
    here, after = state_values(fitted, settings.draws)
    q = fitted.data_values(torch.arange(len(dataset))).mean(0)
    masks = (~columns["terminations"]).double().unsqueeze(1)
    rewards = columns["rewards"].double().unsqueeze(1)
    errors = rewards + settings.discount * masks * after - q
    ratios = log_ratios(target_log_prob(problem, settings.target_std), behavior, settings.clip_low, settings.clip_high)
    counts = episode_counts(dataset.num_episodes, settings.bootstrap, settings.seed)
    sums, effective = weighted_sums(ratios, errors, dataset, settings.discount, counts, problem.known)
    first = torch.cat([torch.ones(1, dataset.num_episodes), counts]).double() @ here[starts] / dataset.num_episodes
    values = (first + sums).numpy()
    low, high = percentile_interval(values[1:])
    details = {"effective_episodes": effective.tolist(), "correction": sums[0].tolist()}
    return Estimates("dr", problem.names, values[0], low, high, settings.discount, details)
