"""The start states of episodes in a model: states of the data, kept with the model, so that it can be played in where
the data are not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.world_models.model import Trained, Tree, past_at

MOST = 10_000  # states of each kind that are kept
KINDS = ("data", "initial")


def sample(model: Any, dataset: Dataset) -> Tree:
    """The entries that `of` finds in a model's tree: "initial" [n, O], first observations of episodes; "starts",
    observations [n, O] of any step and, where the model looks back, what came before them, "past" [n, history - 1, O +
    A]. At most MOST of each, drawn at random."""
    dataset = dataset.to("cpu")
    rows = _some(dataset.transition_rows())
    return {"initial": _at(dataset, _some(dataset.episode_start)), "starts": _with_past(model, dataset, rows)}


def of(trained: Trained, dataset: Dataset | None, kind: str) -> tuple[Tensor, Tensor]:
    """Observations [n, O] in the model's units, and what came before them: of `dataset`, or those that the model's file
    holds.

    kind: "data" (any step) or "initial" (the first of an episode). Raises UserError for data of other spaces, and where
    neither has any."""
    model, tree = trained.model, trained.tree
    if dataset is not None:
        trained.check(dataset.spec)
        tree = sample(model, dataset)
    if kind == "initial" and "initial" in tree:
        return tree["initial"], model.first_past(tree["initial"])
    if kind == "data" and "starts" in tree:
        states = tree["starts"]["observations"]
        return states, tree["starts"].get("past", model.first_past(states))
    raise UserError(
        f"{trained.path} holds no states to start from (an older version wrote it): hand in the dataset too, or train "
        "it anew"
    )


def _some(rows: Tensor) -> Tensor:
    """All rows, or MOST of them; the same for every seed."""
    if len(rows) <= MOST:
        return rows
    chosen = np.random.Generator(np.random.PCG64(0)).permutation(len(rows))[:MOST]
    return rows[torch.from_numpy(np.sort(chosen))]


def _at(dataset: Dataset, rows: Tensor) -> Tensor:
    return dataset.flat("observations")[rows].float()


def _with_past(model: Any, dataset: Dataset, rows: Tensor) -> Tree:
    states = {"observations": _at(dataset, rows)}
    return states if model.history == 1 else {**states, "past": past_at(model, dataset, rows)}
