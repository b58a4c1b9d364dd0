"""The settings of the encoder that stands before an algorithm where observations are images, streams or windows.
Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from offrl.settings.field import setting


@dataclass
class EncoderConfig:
    """One encoder for all networks of an algorithm, as DrQ-v2 has it (arXiv 2107.09645), or one inside each, as OGBench
    (arXiv 2410.20092).
    """

    name: str = setting(
        "auto",
        "drq, impala, impala_small, impala_large, resnet18, dreamer, tdmpc2, or file.py:NAME, a function of the "
        "image's shape [H,W,C]; of windows (dataset.history) stack or gru; auto: the algorithm's, mostly drq, or "
        "stack; also written encoder=NAME",
    )
    width: int = setting(50, "numbers that networks see of an observation", low=1)
    trained_by: str = setting(
        "auto",
        "the module whose loss trains it; auto: critic, else value, else actor; own: each network has an encoder of "
        "its own, and its target a copy; none: it stays as it was pretrained",
    )
    fusion: str = setting(
        "late",
        "late: states and goals are encoded alone; early: their images side by side (OGBench), with trained_by=own",
        choices=("late", "early"),
    )
    shift: int = setting(4, "pixels by which images are shifted at random in each update (DrQ); 0: none", low=0)
    learning_rate: float | None = setting(None, "null: that of the algorithm", above=0.0)
    pretrained: str = setting("", "a trained run, of algo=encoder say, whose encoder training starts from", place=True)
    pretrained_id: str = setting("", "which one that is", filled=True)
