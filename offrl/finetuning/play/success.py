"""Rewards of what is played from a classifier of success that sees images (SERL, arXiv 2401.16013; HIL-SERL, arXiv
2410.21845).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.dataset import DataSpec
from offrl.data.transforms.reward_labels import load_labels
from offrl.errors import UserError
from offrl.evaluation import streams
from offrl.evaluation.steppers import Steps


class SuccessRewards:
    """In place of the environment's: 1 for a step after which the classifier sees success, which ends the episode as a
    terminal, else 0. Successes that the environment names stay as they are.
    """

    def __init__(self, path: str, spec: DataSpec) -> None:
        """path: what `offrl data label kind=success` wrote. Raises UserError for another file, for one without a
        threshold, and for images that `spec` has not.
        """
        labels: Any = load_labels(Path(path))
        self.classifier, self.spec = labels, spec
        if not hasattr(labels, "threshold"):
            raise UserError(
                f"success={path} is no classifier of success: offrl data label DATA kind=success learns one"
            )
        if labels.threshold is None:
            raise UserError(
                f"success={path} gives probabilities, of which none ends an episode: learn it with fit.reward=success"
            )
        known = {stream.name: stream.shape for stream in spec.streams}
        for stream in labels.spec.streams:
            if known.get(stream.name) != stream.shape:
                size = list(known.get(stream.name, ())) or "none"
                raise UserError(
                    f"success={path} was learnt on images {stream.name} {list(stream.shape)}, and the policy's are "
                    f"{size}: read both data with the same dataset.observation_keys and dataset.image_size"
                )

    def judge(self, rows: np.ndarray, steps: Steps) -> None:
        """Write the rewards and ends of `steps`, which led to `rows` [K] as the environments gave them."""
        images = {f"next_{name}": x.numpy() for name, x in streams.tensors_of(rows, self.spec).items()}
        steps.rewards[:] = self.classifier(images)
        for ends in (steps.terminated, steps.over):
            ends |= steps.rewards > 0.0
