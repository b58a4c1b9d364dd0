"""The model's side of RAMBO: the data that it goes on learning from, and the density of the transitions that it
imagines.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from offrl.algorithm import Tree
from offrl.data.dataset import Dataset
from offrl.world_models import ensemble
from offrl.world_models.dynamics import targets
from offrl.world_models.model import input_table
from offrl.world_models.model_rollouts import ModelSource


def training_table(source: ModelSource, dataset: Dataset) -> Tree:
    """All transitions, for the model to go on learning from, and the "decay" of each of its layers' weights.

    "table" [R, I + D + 2]: inputs, targets, terminations and whether the next observation is known.
    """
    model, c, known = source.model, source.model.config, dataset.columns["successor_known"]
    rows = dataset.transition_rows()
    flags = torch.stack([dataset.columns["terminations"][rows], known[rows]], -1).float()
    table = torch.cat([input_table(model, dataset, rows), targets(dataset, rows, c.delta), flags], -1)
    decay = ensemble.decay_of_layers(c.weight_decay, len(c.hidden) + 1)
    return {"table": table, "decay": torch.tensor(decay, device=rows.device)}


def log_mixture(mean: Tensor, std: Tensor, x: Tensor) -> Tensor:
    """log of the mean over K of N(x; mean, diag(std^2)), [B], for means and standard deviations [K, B, D] and x [B, D].

    Densities themselves would underflow: at 18 dimensions, five standard deviations off, they are below float32's
    smallest number."""
    log_p = -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)
    return log_p.sum(-1).logsumexp(0) - math.log(mean.shape[0])
