"""ms of CPU for an eager update of small networks, by offrl and by a plain loop in turns: what a newcomer's first own
run is made of.

    python scripts/bench/small_runs.py [--out FILE.md] [--rounds 7]
    python scripts/bench/small_runs.py --tree /path/to/older/checkout      # the same of another commit's package, in
    the same rounds

2 x 16 networks, batch 256, 11 observations, 3 actions, 10,000 transitions. Each contestant is a program of its own,
held on one core, with one thread, and runs a burst in every round; a ratio is taken within a round. CPU time, so that
what else the machine does counts little."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS)]

from peers.contest import Contestant, burst, cores, machine, span, start, stop  # noqa: E402 - only the scripts' folder has it

PLAIN = "plain PyTorch loop"
ALGORITHMS = {"iql": "IQL", "td3_bc": "TD3+BC"}


def contestants(algo: str, trees: list[Path], width: int) -> dict[str, tuple[int, Contestant]]:
    """Label -> (seeds, program)."""
    common = ["--algo", algo, "--width", str(width)]
    found = {PLAIN: (1, Contestant(PLAIN, "small", [*common, "--by", "plain"]))}
    for tree in [None, *trees]:
        where = ["--tree", str(tree.resolve())] if tree else []
        for seeds in (1, 4):
            label = "offrl" + (f" in {tree.resolve().name}" if tree else "") + (f", {seeds} seeds" if seeds > 1 else "")
            found[label] = seeds, Contestant(label, "small", [*common, *where, "--replicas", str(seeds)])
    return found


def table(algo: str, options: argparse.Namespace) -> list[str]:
    """Measure one algorithm's contestants."""
    programs = contestants(algo, options.tree, options.width)
    spent: dict[str, list[float]] = {label: [] for label in programs}
    try:
        for _, program in programs.values():
            start(program, sys.executable, options.rows, cores()[0])
            if program.failure:
                raise SystemExit(f"{program.key}: {program.failure}")
        for _ in range(options.rounds):
            for label, (seeds, program) in programs.items():
                spent[label].append(1e3 / burst([program], options.seconds)[0] / seeds)
    finally:
        stop([program for _, program in programs.values()])
    lines = [
        f"| {ALGORITHMS[algo]} | ms of CPU for an update of a seed (range) | of the plain loop (range) |",
        "|---|---|---|",
    ]
    for label, values in spent.items():
        ratios = [a / b for a, b in zip(values, spent[PLAIN], strict=True)]
        lines.append(f"| {label} | {span(values)} | {span(ratios)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(ALGORITHMS), action="append")
    parser.add_argument(
        "--tree", type=Path, action="append", default=[], help="another checkout of offrl; may be repeated"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a burst")
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--out", type=Path, help="also write the text to this Markdown file")
    options = parser.parse_args()
    lines = [machine()]
    for algo in options.only or ALGORITHMS:
        lines += ["", *table(algo, options)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
