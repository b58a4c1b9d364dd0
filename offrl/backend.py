"""Picks the CPU's matrix back end and the number of threads, and says what it picked."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch


def _onednn() -> Any:
    """The switch that routes float32 products to oneDNN; None in torch before 2.9."""
    return getattr(torch.backends.mkldnn, "matmul", None)


@functools.lru_cache(maxsize=1)
def _onednn_is_exact() -> bool:
    """Whether routing float32 products to oneDNN keeps float32 accuracy on this machine.

    The switch that routes them there also permits bfloat16 arithmetic, which CPUs with AMX would use: so the CPU's flags are looked at
    first, and a product's error after.
    """
    try:
        cpu = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    if "AuthenticAMD" not in cpu or "amx_bf16" in cpu or not torch.backends.mkldnn.is_available():
        return False  # on Intel's CPUs torch's default, MKL, is as fast
    matmul = _onednn()
    if matmul is None:
        return False
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(256, 256, generator=generator), torch.randn(256, 256, generator=generator)
    exact = a.double() @ b.double()
    default = ((a @ b).double() - exact).abs().max()
    matmul.fp32_precision = "bf16"
    error = ((a @ b).double() - exact).abs().max()
    matmul.fp32_precision = "none"
    return bool(error <= 4.0 * default)


def configure(device: torch.device, threads: int) -> str:
    """Set up arithmetic for a run on `device`; returns one line for the log. TF32 and bfloat16 stay off."""
    torch.set_num_threads(threads)
    if device.type != "cpu":
        return f"{torch.cuda.get_device_name(device)}, float32"
    word = f"CPU, {threads} thread{'s' if threads > 1 else ''}, float32 products by "
    if _onednn_is_exact():
        _onednn().fp32_precision = "bf16"
        return word + "oneDNN (accuracy checked)"
    return word + "torch's default library"
