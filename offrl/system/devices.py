"""The device that a setting names."""

from __future__ import annotations

import torch

from offrl.errors import UserError


def pick_device(name: str) -> torch.device:
    """The device of a setting: auto, cpu, cuda or cuda:N. Raises UserError for anything else or a GPU that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()) or (kind == "cpu" and index):
        raise UserError(f"device={name} is not known; use auto, cpu, cuda or cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device={name}, but torch {torch.__version__} finds no CUDA GPU; use device=cpu or install a CUDA build of torch")
    if index and int(index) >= torch.cuda.device_count():
        raise UserError(f"device={name}, but there are only {torch.cuda.device_count()} GPUs")
    return torch.device(name)
