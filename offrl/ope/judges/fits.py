"""Several fits of Q for the same policies, between which a tournament chooses, policy by policy: the methods lstd and
bvft.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
import torch

from offrl.errors import UserError
from offrl.ope.config import OPEConfig
from offrl.ope.fqe import Fitted, summarise
from offrl.ope.judges.critics import check_rewards
from offrl.ope.judges.tournament import bvft_losses, lstd_losses
from offrl.ope.problem import Estimates, Problem

ROWS = 50_000  # transitions of a tournament, at most


def variants(settings: OPEConfig) -> dict[str, OPEConfig]:
    """The settings of each fit that `settings.fits` names. Raises UserError for fewer than two, and for one that comes
    twice.
    """
    c = settings
    settings_by_name = {
        "base": c,
        "narrow": replace(c, hidden=[max(1, width // 2) for width in c.hidden]),
        "wide": replace(c, hidden=[2 * width for width in c.hidden]),
        "norm": replace(c, layer_norm=not c.layer_norm),
        "short": replace(c, updates=max(1, c.updates // 2)),
    }
    if len(c.fits) < 2 or len(set(c.fits)) < len(c.fits):
        raise UserError(
            f"fits=[{','.join(c.fits)}]: a tournament needs two different ones of {', '.join(settings_by_name)}"
        )
    return {name: settings_by_name[name] for name in c.fits}


def lstd(fits: Mapping[str, Fitted], settings: OPEConfig) -> Estimates:
    """Values of all policies, each by the fit that wins its LSTD tournament (arXiv 2502.08021) by the loss
    `settings.tournament`.

    fits: of the same problem, by name. details: "chosen", the winning fit of each policy; "losses" and "values", {fit:
    K numbers}; "seeds", [N, K], each policy's values by the seeds of its chosen fit. A policy all of whose fits
    diverged is NaN. Raises UserError for rewards that say nothing.
    """

    def judge(name: str, q: np.ndarray, v: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        return lstd_losses(q, v, rewards, settings.discount)[settings.tournament]

    return _judged("lstd", fits, settings, judge)


def bvft(fits: Mapping[str, Fitted], settings: OPEConfig) -> Estimates:
    """Values of all policies, each by the fit that wins its BVFT (arXiv 2008.04990); otherwise as `lstd`.

    Raises UserError for a fit that is the same in every row too.
    """

    def judge(name: str, q: np.ndarray, v: np.ndarray, rewards: np.ndarray) -> np.ndarray:
        return bvft_losses(q, v, rewards, settings.discount, names=[f"{name}'s fit '{fit}'" for fit in fits]).losses

    return _judged("bvft", fits, settings, judge)


def vectors(fitted: Fitted, rows: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """(q, v) of each policy at transitions [n], both [K, n]: means over seeds of Q(s, a) and of Q(s', pi(s')), 0 where
    episodes end.
    """
    problem = fitted.problem
    ended = problem.dataset.columns["terminations"][rows].numpy()
    q = fitted.data_values(rows).mean(0).numpy().T
    v = fitted.values(rows, problem.after[rows], "next_observations").mean(0).numpy().T
    return q, np.where(ended, 0.0, v)


def _rows(problem: Problem, seed: int) -> torch.Tensor:
    rows = problem.dataset.transition_rows()
    if len(rows) <= ROWS:
        return rows
    order = np.random.Generator(np.random.PCG64(seed)).permutation(len(rows))[:ROWS]
    return rows[torch.from_numpy(np.sort(order))]


Judge = Callable[[str, np.ndarray, np.ndarray, np.ndarray], np.ndarray]


def _judged(method: str, fits: Mapping[str, Fitted], settings: OPEConfig, judge: Judge) -> Estimates:
    problem = next(iter(fits.values())).problem
    check_rewards(problem.dataset)
    rows, labels = _rows(problem, settings.seed), list(fits)
    rewards = problem.dataset.columns["rewards"][rows].double().numpy()
    pairs = [vectors(fitted, rows) for fitted in fits.values()]
    q, v = (np.stack([pair[part] for pair in pairs]) for part in (0, 1))  # [m, K, n]
    results = [summarise(fitted) for fitted in fits.values()]
    value, low, high = (np.full(len(problem.names), np.nan) for _ in range(3))
    losses, chosen = np.full((len(labels), len(problem.names)), np.inf), []
    seeds = np.full((settings.seeds, len(problem.names)), np.nan)
    for k, name in enumerate(problem.names):
        able = np.isfinite(q[:, k]).all(1) & np.isfinite(v[:, k]).all(1)
        if not able.any():
            chosen.append("")
            continue
        losses[:, k] = judge(name, q[:, k], v[:, k], rewards)
        best = int(np.argmin(losses[:, k]))  # of equals the first
        chosen.append(labels[best])
        value[k], low[k], high[k] = (x[k] for x in (results[best].value, results[best].low, results[best].high))
        seeds[:, k] = np.array(results[best].details["seeds"])[:, k]
    details = {
        "chosen": chosen,
        "losses": {name: losses[i].tolist() for i, name in enumerate(labels)},
        "values": {name: results[i].value.tolist() for i, name in enumerate(labels)},
        "seeds": seeds.tolist(),
    }
    return Estimates(method, problem.names, value, low, high, settings.discount, details)
