"""What the C++ kernels and the ahead-of-time library give: compiled updates with each on and off, in turns on one core.

    python scripts/bench/kernels.py                     # this machine's instructions
    python scripts/bench/kernels.py --avx2              # the same machine without AVX-512, in torch and in g++

Rates are of CPU time, medians over rounds; a ratio is taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SCRIPTS))

from bench import two_trees  # noqa: E402 - only the scripts' folder has it
from peers.contest import machine, span  # noqa: E402

NAMES = ("iql", "td3_bc", "rebrac", "cql")
VARIANTS = {  # what is taken away before the updates are compiled
    "library and kernels": "",
    "library": "kernels.kinds = lambda: ()",
    "torch.compile": "ahead.available = lambda: False",
}
NARROW = "kernels.FLAGS += ('-mno-avx512f',)"
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=NAMES, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="length of a burst")
    parser.add_argument("--avx2", action="store_true", help="without AVX-512")
    options = parser.parse_args()
    print(f"{machine()}{', without AVX-512' * options.avx2}\n")
    print("| algorithm | | updates/s | of torch.compile (range) |\n|---|---|---|---|")
    for name in options.only or NAMES:
        print("\n".join(table(name, options)), flush=True)


def table(name: str, options: argparse.Namespace) -> list[str]:
    """The rows of an algorithm."""
    programs = {variant: start(name, change, options) for variant, change in VARIANTS.items()}
    rates: dict[str, list[float]] = {variant: [] for variant in programs}
    for _ in range(options.rounds):
        for variant, program in programs.items():
            assert program.stdin is not None and program.stdout is not None
            program.stdin.write(f"{options.seconds}\n")
            program.stdin.flush()
            rates[variant].append(json.loads(program.stdout.readline())["rate"])
    for program in programs.values():
        program.communicate()
    return [
        f"| {name} | {variant} | {statistics.median(rate):.1f} | "
        f"{span(two_trees.ratios(rate, rates['torch.compile']))} |"
        for variant, rate in rates.items()
    ]


def start(name: str, change: str, options: argparse.Namespace) -> subprocess.Popen[str]:
    """A contestant, warm."""
    changes = f"from offrl.training.compiling import ahead, kernels\n{NARROW * options.avx2}\n{change}\n"
    arguments = ["offrl_speed", "11", "3", "--algo", name, "--mode", "compiled", "--rows", "200000"]
    program = subprocess.Popen(
        [sys.executable, "-c", changes + two_trees.CONTESTANT, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPTS), **(AVX2 if options.avx2 else {})},
        cwd=SCRIPTS.parent,
    )
    assert program.stdout is not None
    if not program.stdout.readline():
        raise SystemExit(f"{name} ended")
    return program


if __name__ == "__main__":
    main()
