"""A cache of compiled code in a home that several kinds of machine share, and one that was damaged, through the
command.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512", reason="only a CPU with AVX-512 can imitate another"
    ),
]
SMALL = [
    "algo.hidden=[16,16]",
    "steps=40",
    "log_every=20",
    "seeds=1",
    "compile=compiled",
    "device=cpu",
    "eval.env=none",
    "compare=[]",
]


def train(cache: Path, run: Path, **environment: str) -> tuple[str, str]:
    """(metrics, what was said on standard error) of the command with this cache."""
    plain = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    command = [
        sys.executable,
        "-m",
        "offrl.cli",
        "train",
        "algo=bc",  # whose code is compiled soonest
        "dataset=builtin",
        *SMALL,
        f"runs_dir={run.parent}",
        f"name={run.name}",
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        env={**plain, "OFFRL_CACHE": str(cache), "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return (run / "metrics.jsonl").read_text(), done.stderr


def test_two_kinds_of_cpu_share_a_home_in_either_order_and_what_is_damaged_there_is_made_anew(tmp_path: Path) -> None:
    """One test, for each cache that is filled is a minute of compiling."""
    found: dict[str, list[str]] = {"": [], "avx2": []}
    for order in (["", "avx2"], ["avx2", ""]):
        for capability in order:
            way = f"{'-'.join(order)}-{capability}"
            metrics, said = train(
                tmp_path / "-".join(order),
                tmp_path / way,
                **({"ATEN_CPU_CAPABILITY": capability} if capability else {}),
            )
            assert "warning" not in said
            found[capability].append(metrics)
    # each as with a fresh cache, which the first of either order had
    assert found[""][0] == found[""][1] and found["avx2"][0] == found["avx2"][1]

    cache = tmp_path / "-avx2"
    libraries = list((cache / "compiled").glob("*/*/*.so"))
    assert libraries
    for library in libraries:
        content = bytearray(library.read_bytes())
        content[len(content) // 4 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 4)
        library.write_bytes(content)
    metrics, said = train(cache, tmp_path / "second")
    assert "of compiled code" in said and "were damaged" in said and said.count("warning") == 1
    assert metrics == found[""][0]
    metrics, said = train(cache, tmp_path / "third")
    assert metrics == found[""][0] and "warning" not in said
