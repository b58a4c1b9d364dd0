"""Page faults and CPU time of an eager update with and without `devices.keep_memory`: a Markdown table.

    python scripts/bench/page_faults.py --only cql --only dt

Two processes for each algorithm take turns; medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(SCRIPTS))

from peers.contest import span  # noqa: E402 - only the scripts' folder has it

NAMES = ("iql", "cql", "edac", "dt", "ensemble")
WAYS = ("returned", "kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=NAMES, action="append")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--updates", type=int, default=6, help="of a round")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        serve(*options.part, updates=options.updates)
        return
    print("| eager update | page faults, memory returned | kept | CPU ms, returned | kept | kept / returned (range) |")
    print("|---|---|---|---|---|---|")
    for name in options.only or NAMES:
        print(line(name, options.rounds, options.updates), flush=True)


def line(name: str, rounds: int, updates: int) -> str:
    """A row of the table."""
    surroundings = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join((str(SCRIPTS), str(SCRIPTS.parent))),
    }
    command = [sys.executable, str(Path(__file__).resolve()), "--updates", str(updates), "--part", name]
    pipe = subprocess.PIPE
    programs = {
        way: subprocess.Popen([*command, way], stdin=pipe, stdout=pipe, text=True, env=surroundings) for way in WAYS
    }
    answers: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds + 1):  # the first is for warming up
        for way, program in programs.items():
            assert program.stdin is not None and program.stdout is not None
            program.stdin.write("go\n")
            program.stdin.flush()
            answers[way].append(json.loads(program.stdout.readline()))
    for program in programs.values():
        program.communicate()
    kept, returned = (answers[way][1:] for way in ("kept", "returned"))
    ratios = [a["ms"] / b["ms"] for a, b in zip(kept, returned, strict=True)]
    cells = [
        f"{statistics.median(a[what] for a in part):,.{digits}f}"
        for what, digits in (("faults", 0), ("ms", 1))
        for part in (returned, kept)
    ]
    return f"| {name} | {' | '.join(cells)} | {span(ratios)} |"


def serve(name: str, way: str, updates: int) -> None:
    """Do `updates` updates for each line of standard input."""
    import resource

    import torch
    from peers import offrl_speed
    from peers.runner import Runner

    from offrl.system import backend, devices

    if way == "returned":
        devices.keep_memory = lambda: None  # type: ignore[assignment]
    backend.configure(torch.device("cpu"), 1)
    algorithm, dataset = offrl_speed.build(name, 50_000)
    runner = Runner(algorithm, dataset, seeds=[0], mode="eager", batch_size=offrl_speed.batch_size(name))
    for _ in sys.stdin:
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
        runner.updates(updates)
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        print(json.dumps({"faults": faults / updates, "ms": 1e3 * (time.process_time() - start) / updates}), flush=True)


if __name__ == "__main__":
    main()
