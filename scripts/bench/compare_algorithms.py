"""The cost of an update of every registered algorithm, relative to TD3+BC's, compiled and eager, on one core.

    # about 8 minutes where nothing else runs
    python scripts/bench/compare_algorithms.py --out docs/benchmarks/algorithms.md
    # shows that it works
    python scripts/bench/compare_algorithms.py --quick --only td3_bc iql --modes eager

All of them are kept in memory, warm; in every round each trains for --seconds while the others wait, and ratios are
taken within a round, so that whatever else happens on the machine meets all of them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(SCRIPTS))
sys.path.insert(1, str(SCRIPTS.parent))

REFERENCE = "td3_bc"
SMALL: dict[str, Any] = {"hidden": [256, 256], "batch_size": 256}  # TD3+BC's own sizes
# measured beside the sizes above; setting -> value
VARIANTS: dict[str, dict[str, Any]] = {"cql": {"penalty_share": 0.25}}


@dataclass
class Row:
    """An algorithm with some settings, and what was measured of it."""

    algorithm: str
    settings: dict[str, Any]
    label: str
    flops: float = 0.0
    shape: str = ""
    # mode -> updates/s of all replicas together, one for each round
    rates: dict[str, list[float]] = field(default_factory=dict)
    runners: dict[str, Any] = field(default_factory=dict)
    failure: dict[str, str] = field(default_factory=dict)


def rows_of(names: Sequence[str]) -> list[Row]:
    """TD3+BC first; then each algorithm with its defaults, with TD3+BC's sizes where they differ, and the variants."""
    from offrl import registry

    rows = []
    for name in sorted(names, key=lambda n: (n != REFERENCE, n)):
        config = registry.get("algo", name).Config()
        rows.append(Row(name, {}, "as published"))
        small = {k: v for k, v in SMALL.items() if getattr(config, k, v) != v}
        if small:
            rows.append(Row(name, small, "TD3+BC's sizes"))
        for setting, value in VARIANTS.get(name, {}).items():
            rows.append(Row(name, {**small, setting: value}, f"TD3+BC's sizes, {setting}={value}"))
    return rows


def prepare(row: Row, dataset: Any, modes: Sequence[str], replicas: int) -> None:
    """Build a row's runners and warm them up; counts the products of an update."""
    from peers.runner import Runner, counted, make

    algorithm = make(row.algorithm, dataset, row.settings)
    config = algorithm.config
    critic = getattr(config, "critic_hidden", []) or config.hidden
    layers = " x ".join(str(n) for n in (len(config.hidden), config.hidden[0]))
    deeper = f", critics {len(critic)} x {critic[0]}" if critic != config.hidden else ""
    row.shape = f"{layers}{deeper}, batch {config.batch_size}" + (
        f", {config.critics} critics" if hasattr(config, "critics") else ""
    )
    row.flops = counted(algorithm, dataset, config.batch_size)
    for mode in modes:
        start = time.perf_counter()
        try:
            runner = Runner(algorithm, dataset, seeds=range(replicas), mode=mode, batch_size=config.batch_size)
            runner.run(2 * algorithm.traits.period)
            runner.run(2 * algorithm.traits.period)
        except Exception as error:  # one algorithm that does not compile must not cost the others' numbers
            row.failure[mode] = f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"
            say(f"{row.algorithm}, {row.label}, {mode}: {row.failure[mode]}")
            continue
        row.runners[mode], row.rates[mode] = runner, []
        say(f"{row.algorithm}, {row.label}, {mode}: warm after {time.perf_counter() - start:.0f} s")


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def measure(rows: Sequence[Row], modes: Sequence[str], rounds: int, seconds: float) -> None:
    """Bursts in turns."""
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for mode in modes:
            for row in rows:
                if mode in row.runners:
                    row.rates[mode].append(row.runners[mode].rate(seconds))


def table(rows: Sequence[Row], modes: Sequence[str], replicas: int, speed: float) -> list[str]:
    """Lines of Markdown: what an update of one replica costs, absolutely and in TD3+BC's."""
    reference = next(r for r in rows if r.algorithm == REFERENCE)
    head = ["algorithm", "settings", "networks", "MFLOP", "of TD3+BC"]
    for mode in modes:
        head += [f"ms, {mode}", "of TD3+BC (range)", "of the floor"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        cells = [row.algorithm, row.label, row.shape, f"{row.flops / 1e6:.0f}", f"{row.flops / reference.flops:.2f}"]
        for mode in modes:
            if mode in row.failure:
                cells += [row.failure[mode], "-", "-"]
                continue
            rates, baseline = row.rates[mode], reference.rates.get(mode, [])
            each = 1e3 / statistics.median(rates) / replicas
            ratios = [b / a for a, b in zip(rates, baseline, strict=True)] if baseline else []
            cells += [
                f"{each:.2f}",
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-",
                f"{row.flops / speed * 1e3 / each:.2f}",
            ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(lines: list[str], command: str, about: str, speed: float, replicas: int) -> str:
    """docs/benchmarks/algorithms.md."""
    return "\n".join(
        [
            "# Cost of an update",
            "",
            f"    {command}",
            "",
            f"Observations 11, actions 3, {replicas} replicas in one program on one core; an update of one replica. "
            "MFLOP: the",
            "matrix products that an eager update really does (torch's counter). The floor is their time at the rate "
            "of products of",
            f"256 x 256 matrices on this machine, {speed / 1e9:.0f} GFLOP/s. Ratios are taken within a round of turns "
            "and shown with their",
            "smallest and largest.",
            "",
            about,
            "",
            *lines,
            "",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", nargs="+", default=[], help="algorithms (default: all that are registered); TD3+BC is always there"
    )
    parser.add_argument("--modes", nargs="+", choices=("compiled", "eager"), default=["compiled", "eager"])
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.8, help="length of a burst")
    parser.add_argument("--rows", type=int, default=100_000, help="transitions in the data")
    parser.add_argument("--quick", action="store_true", help="1 round of 0.05 s on 2,000 transitions")
    parser.add_argument("--out", type=Path, help="also write the page to this Markdown file")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.seconds, options.rows = 1, 0.05, 2_000
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    import torch
    from peers.contest import cores, machine
    from peers.runner import products_per_second, synthetic

    from offrl import registry
    from offrl.errors import UserError
    from offrl.system import backend
    from offrl.system import files as checkpoint

    about = machine()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores()[:1])
    note = backend.configure(torch.device("cpu"), 1)
    if "compiled" in options.modes:
        backend.cache_compiled()
    try:
        names = [
            n for n in dict.fromkeys([REFERENCE, *(options.only or registry.names("algo"))]) if registry.get("algo", n)
        ]
    except UserError as error:
        say(f"error: {error}")
        return 1
    rows, dataset = rows_of(names), synthetic(options.rows)
    for row in rows:
        prepare(row, dataset, options.modes, options.replicas)
    speed = products_per_second()
    measure(rows, options.modes, options.rounds, options.seconds)
    speed = max(speed, products_per_second())
    command = " ".join(
        ["python scripts/bench/compare_algorithms.py", *(arguments if arguments is not None else sys.argv[1:])]
    )
    lines = table(rows, options.modes, options.replicas, speed)
    text = page(lines, command, f"{about} {note}; torch {torch.__version__}.", speed, options.replicas)
    print(text)
    if options.out:
        checkpoint.write_text(options.out, text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
