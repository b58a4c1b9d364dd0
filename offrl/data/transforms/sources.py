"""Rows of a second source, imagined rollouts or a person's interventions, with a share of the draws of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.errors import UserError, nearest


def flags(dataset: Dataset, column: str, setting: str) -> Tensor:
    """bool [R] of a column of 0 and 1, on the CPU. setting: what asks for it. Raises UserError for a column that is
    missing or holds anything else, naming the row.
    """
    where = f"{setting}: {dataset.spec.name}"
    if column not in dataset.columns:
        raise UserError(
            f"{where} has no column '{column}' of 0 and 1.{nearest(column, dataset.columns)} "
            f"dataset.fields.{column}=NAME reads one"
        )
    values = dataset.columns[column].cpu()
    if values.shape != (len(dataset),):
        raise UserError(f"{where} has rows of {list(values.shape[1:])} in the column '{column}'; 0 or 1 is due")
    bad = torch.nonzero((values != 0) & (values != 1))
    if len(bad):
        row = int(bad[0])
        raise UserError(f"{where} has {values[row].item():g} in the column '{column}', row {row}; 0 or 1 is due")
    return values.bool()


def share_draws(dataset: Dataset, share: float, column: str) -> Dataset:
    """The dataset with weights such that rows of which the column is 1 are this share of the draws; among themselves,
    these and the others keep theirs. Weights are of episodes where the column is the same in all rows of each.

    share: from 0 (none is drawn) to 1 (they alone are). Raises UserError where one side has nothing that can be drawn.
    """
    setting = f"dataset.{column}_share={share:g}"
    marks = flags(dataset, column, setting)
    episode = dataset.per_row(torch.arange(dataset.num_episodes))
    # stretches of rows of one episode that are all of one side
    begins = torch.ones(len(dataset), dtype=torch.bool)
    begins[1:] = (episode[1:] != episode[:-1]) | (marks[1:] != marks[:-1])
    stretch, first = torch.cumsum(begins, 0) - 1, marks[begins]
    # of transitions, which is what most algorithms draw: rollouts that were cut off have fewer than rows
    lengths = torch.bincount(stretch[dataset.transition_rows().cpu()], minlength=len(first)).double()
    parts = lengths if dataset.weights is None else lengths * dataset.row_weights()[begins]
    parts = parts / parts.sum().clamp(min=1e-12)
    current_share = float(parts[first].sum())
    for target, side, actual in ((share, 1, current_share), (1.0 - share, 0, 1.0 - current_share)):
        if target > 0.0 and not actual > 0.0:
            raise UserError(
                f"{setting}: {dataset.spec.name} has no row with {column} {side} to draw {target:g} of the rows from"
            )
    scaled = torch.where(
        first,
        parts * (share / current_share if current_share > 0.0 else 0.0),
        parts * ((1.0 - share) / (1.0 - current_share) if current_share < 1.0 else 0.0),
    )
    weights = scaled / lengths.clamp(min=1.0) * lengths.sum()
    if len(first) > dataset.num_episodes:
        weights = weights[stretch]
    note = f"{column} rows are {share:.3g} of the draws; by their number they would be {current_share:.3g}"
    return dataset.changed(f"{column} share {share:g}", note, weights=weights)
