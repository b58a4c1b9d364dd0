"""Compiled updates of this tree and of another commit's, in turns on one core: a Markdown table.

    git worktree add ../before 9bd262b
    python scripts/bench/two_trees.py ../before --only cql --only edac
    python scripts/bench/two_trees.py ../before --only cql --observation 111 --action 8

Beside both: a plain PyTorch loop, with torch's own library of products and with the one that offrl picks, and the
update's matrix products alone. Rates are of CPU time, medians over rounds; a ratio is taken within a round.
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

from peers import common, flops  # noqa: E402 - only the scripts' folder has it
from peers.contest import span  # noqa: E402

NAMES = ("iql", "td3_bc", "cql", "edac", "dt", "ensemble")
# a contestant of scripts/peers, in the tree where it is started, that says what its bursts cost
CONTESTANT = """
import json, resource, runpy, sys, time
from peers import common
module, common.OBSERVATION, common.ACTION = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.argv[1:4] = []
def serve(updates, chunk=20, **facts):
    updates(chunk), updates(chunk)
    common.report(ready=True)
    for line in sys.stdin:
        done, start, faults = 0, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        while (spent := time.process_time() - start) < float(line):
            updates(chunk)
            done += chunk
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        common.report(rate=done / spent, faults=faults / done)
common.serve = serve
runpy.run_module(f"peers.{module}", run_name="__main__")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="a checkout of the other commit")
    parser.add_argument("--only", choices=NAMES, action="append")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a burst")
    parser.add_argument("--observation", type=int, default=11)
    parser.add_argument("--action", type=int, default=3)
    options = parser.parse_args()
    for name in options.only or NAMES:
        print(f"\n**{name}**, observations {options.observation}, actions {options.action}\n")
        print(
            "| | updates/s | of before (range) | page faults an update | of the products alone | of the floor "
            "|\n|---|---|---|---|---|---|"
        )
        print("\n".join(table(name, options)), flush=True)


def table(name: str, options: argparse.Namespace) -> list[str]:
    """The rows of an algorithm."""
    sizes = {"before": (options.before, "offrl_speed", "--algo", name, "--mode", "compiled")}
    sizes["now"] = (SCRIPTS.parent, *sizes["before"][1:])
    sizes["plain PyTorch loop"] = (SCRIPTS.parent, f"{name}_plain")
    sizes["the same with offrl's matrix back end"] = (SCRIPTS.parent, f"{name}_plain", "--onednn")
    sizes["its products alone"] = (SCRIPTS.parent, "gemm", "--products", name)
    sizes["square"] = (SCRIPTS.parent, "gemm", "--products", "square")
    programs = {label: start(tree, options, *arguments) for label, (tree, *arguments) in sizes.items()}
    answers: dict[str, list[dict[str, float]]] = {label: [] for label in programs}
    for _ in range(options.rounds):
        for label, program in programs.items():
            assert program.stdin is not None and program.stdout is not None
            program.stdin.write(f"{options.seconds}\n")
            program.stdin.flush()
            answers[label].append(json.loads(program.stdout.readline()))
    for program in programs.values():
        program.communicate()
    rates = {label: [answer["rate"] for answer in part] for label, part in answers.items()}
    floor = [2 * 256**3 * rate / needed(name, options) for rate in rates.pop("square")]
    lines = []
    for label, rate in rates.items():
        before, alone, least = (ratios(rate, other) for other in (rates["before"], rates["its products alone"], floor))
        faults = statistics.median(answer["faults"] for answer in answers[label])
        shares = f"{statistics.median(alone):.2f} | {statistics.median(least):.2f}"
        lines.append(f"| {label} | {statistics.median(rate):.1f} | {span(before)} | {faults:,.0f} | {shares} |")
    return lines


def ratios(rates: list[float], others: list[float]) -> list[float]:
    return [a / b for a, b in zip(rates, others, strict=True)]


def needed(name: str, options: argparse.Namespace) -> float:
    """FLOPs of the products that an update needs."""
    hidden = flops.HIDDEN.get(name, common.HIDDEN)
    return flops.needed(name, flops.BATCHES.get(name, common.BATCH), options.observation, options.action, hidden)


def start(tree: Path, options: argparse.Namespace, module: str, *arguments: str) -> subprocess.Popen[str]:
    """A contestant, warm."""
    tree = tree.resolve()
    surroundings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(tree / "scripts"), str(tree))),
    }
    command = [
        sys.executable,
        "-c",
        CONTESTANT,
        module,
        str(options.observation),
        str(options.action),
        *arguments,
        "--rows",
        "200000",
    ]
    pipe = subprocess.PIPE
    program = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=surroundings, cwd=tree
    )
    assert program.stdout is not None
    if not program.stdout.readline():
        raise SystemExit(f"{module} {' '.join(arguments)} ended in {tree}")
    return program


if __name__ == "__main__":
    main()
