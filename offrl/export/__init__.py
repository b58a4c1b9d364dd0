"""Export: a trained policy as one file that runs without offrl, checked against the Python policy, with a description
beside it.

`offrl.export.write` has the functions; this module imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offrl.settings.evaluation import ACTING_HELP
from offrl.settings.field import setting

SUFFIX = {"onnx": ".onnx", "pt2": ".pt2", "c": ".c"}
OPSET, LARGEST_OPSET = 18, 23  # the first is what PyTorch's exporter writes without converting


@dataclass
class ExportConfig:
    """Settings of `offrl export`."""

    format: str = setting(
        "onnx", "onnx, pt2 (torch.export), or c (C code of a policy of algo=distill)", choices=tuple(SUFFIX)
    )
    seed: int | None = setting(None, "whose policy; null: the run's first seed")
    out: str | None = setting(None, "the file, or a folder for policy.SUFFIX; null: RUN/export/REPLICA/")
    stochastic: bool = setting(
        False, "true: sample the policy's distribution, with random numbers as inputs of the file; false: greedy"
    )
    acting: dict[str, Any] = setting({}, ACTING_HELP)
    shield: str | None = setting(
        None, "what corrects actions, in the file too: file.py:FUNCTION, critic or model, as in offrl evaluate"
    )
    constraint: str | None = setting(None, "shield=model: file.py:FUNCTION of next observations")
    world_model: str | None = setting(None, "shield=model: a run of algo=dynamics")
    safe_action: list[float] = setting([], "where the shield has no solution; []: the middle of the range")
    opset: int | None = setting(
        None, "of ONNX; null: 18, which onnxruntime 1.18 and later reads", low=OPSET, high=LARGEST_OPSET
    )
