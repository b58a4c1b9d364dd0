"""The command line of the fuzzer; see the package."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path

from tests.fuzz.case import ALL, FAILURES
from tests.fuzz.runner import Worker, fuzz, summary, table


def main() -> int:
    """Status 1 where a case failed."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Damaged files of every layout, loaded and judged."
    )
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case of each layout")
    parser.add_argument("--minutes", type=float, default=30.0, help="at most")
    parser.add_argument("--layout", action="append", default=[], choices=list(ALL))
    parser.add_argument("--tree", type=Path, help="a checkout whose offrl is fuzzed, instead of this one's")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="folder for the files of failures")
    parser.add_argument("--replay", type=Path, help="a folder that --keep made, a file, or a Minari dataset: only this")
    options = parser.parse_args()
    if options.replay is not None:
        return replay(options.replay, options.tree)
    began = time.monotonic()

    def progress(done: int, counts: Counter[str]) -> None:
        bad = ", ".join(f"{counts[o]} {o}" for o in (*FAILURES, "fuzzer") if counts[o])
        print(
            f"\r{done} cases, {time.monotonic() - began:.0f} s: {bad or 'no failure'}   ",
            end="",
            file=sys.stderr,
            flush=True,
        )

    counts, failures = fuzz(
        options.cases,
        options.seed,
        options.layout,
        options.minutes,
        options.tree,
        options.keep,
        options.first,
        progress,
    )
    print(file=sys.stderr)
    print(table(counts))
    print(summary(failures))
    if failures:
        print(f"files: {options.keep}; python -m tests.fuzz --replay {options.keep}/NAME shows one")
    return bool(failures)


def replay(path: Path, tree: Path | None) -> int:
    """One file or kept case again."""
    worker = Worker(tree)
    try:
        result = worker.run({"folder": str(path.resolve()), "make": False})
    finally:
        worker.close()
    print(json.dumps(vars(result), indent=1))
    return result.outcome in FAILURES


if __name__ == "__main__":
    sys.exit(main())
