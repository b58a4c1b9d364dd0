"""What a classifier of success learns from and is judged by: rows of success and failure, episodes that are held out,
errors and thresholds.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.data.dataset import Dataset
from offrl.data.transforms.episodes import share_of
from offrl.data.transforms.sources import flags
from offrl.errors import UserError

PRECISION = 0.99  # of rewards on held-out episodes: what a policy finds are the false positives


def success_rows(dataset: Dataset, labels: str) -> Tensor:
    """bool [R] of the column `labels`. Raises UserError for other values than 0 and 1, and for data without images."""
    where = dataset.spec.name
    if not any(s.image for s in dataset.spec.streams):
        raise UserError(f"{where} has no images for a classifier of success: name them, dataset.observation_keys=[...]")
    return flags(dataset, labels, f"labels={labels}")


def held_out_rows(dataset: Dataset, success: Tensor, share: float, seed: int) -> Tensor:
    """bool [R]: the rows of held-out episodes, a share of those with success and of the others. Raises UserError where
    they, or those that are left, lack either kind of rows.
    """
    succeed = torch.tensor([bool(success[start:end].any()) for start, end in dataset.spans()])
    held_out, draw = torch.zeros_like(succeed), np.random.Generator(np.random.PCG64(seed))
    for kind in (True, False):
        episodes = torch.nonzero(succeed == kind).squeeze(-1)
        count = min(share_of(share, len(episodes)), len(episodes) - 1)
        held_out[episodes[torch.from_numpy(draw.permutation(len(episodes)))][: max(0, count)]] = True
    rows = dataset.per_row(held_out)
    for part, kind in ((part, kind) for part in (rows, ~rows) for kind in (True, False)):
        if not (part & (success == kind)).any():
            raise UserError(
                f"{dataset.spec.name}: {int(succeed.sum())} of {len(succeed)} episodes have success; a classifier "
                "learns from success and failure, and is judged by both in other episodes: two with success and two "
                "with failure are the least"
            )
    return rows


def balanced_error(logits: Tensor, truth: Tensor) -> float:
    """The mean cross-entropy of success and of failure, halved."""
    errors = F.binary_cross_entropy_with_logits(logits, truth.float(), reduction="none")
    return float(errors[truth].mean() + errors[~truth].mean()) / 2


def precise(probability: Tensor, truth: Tensor, where: str) -> float:
    """The smallest threshold from which on `PRECISION` of the rows [H] are success: midway to the next smaller
    probability. Raises UserError where there is none.
    """
    p, order = probability.double().sort(descending=True)
    precision = truth[order].double().cumsum(0) / torch.arange(1, len(p) + 1)
    lower = torch.cat([p[1:], p.new_zeros(1)])
    good = torch.nonzero((precision >= PRECISION) & (lower < p))
    if not len(good):
        raise UserError(
            f"{where}: no threshold rewards success alone on held-out episodes (of the likeliest rows "
            f"{float(precision.max()):.0%} are success): label more images, or take fit.reward=probability"
        )
    last = int(good[-1])
    return float(p[last] + lower[last]) / 2
