"""Compare our updates with the reference implementations', five in a row, in float64, and print a table.

    git clone https://github.com/corl-team/CORL REFERENCES/corl-team+CORL  # what is missing is named, with its commit
    python scripts/parity --checkouts REFERENCES  # all methods
    python scripts/parity --checkouts REFERENCES td3_bc iql  # some
    python scripts/parity --checkouts REFERENCES --out docs/benchmarks/parity.md

    # that a draw used twice is noticed: must be above its limit
    python scripts/parity --checkouts REFERENCES --reuse-draws fql

A checkout is looked for under REFERENCES/OWNER+NAME, OWNER/NAME and NAME. Comparisons with JAX code need packages of
their own, which are named; where these are absent there is no row, and a line says so. Exit status: 1 where a
comparison is missing or a difference is above its limit.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from peers.checkouts import checkout_of, commit_of

from parity.common import CASES, Case, Outcome, reused_draws

MODULES = (
    "corl",
    "corl_cql",
    "offlinerl_kit",
    "kit_rambo",
    "in_sample",
    "expansion",
    "jax_actor_critics",
    "warm_start",
    "sphere",
    "fast_td3",
    "crossq",
    "brc",
    "ogbench",
    "flows",
    "idql",
    "diffusion",
    "plans",
    "latent",
    "mrq",
    "conditioned_plans",
    "digits",
    "horizons",
    "zero_shot",
    "sequence",
    "trajectory",
    "conditioned",
    "text",
    "ilql",
    "osrl",
)
LIMIT = 1e-9  # float64, five updates: what is above is a difference of method


def absent(case: Case) -> list[str]:
    """Packages that a comparison needs and that are not installed."""
    return [name for name in case.needs if importlib.util.find_spec(name) is None]


def row(case: Case, outcome: Outcome) -> str:
    """A row of the table."""
    losses, parameters = outcome.loss_difference(), outcome.parameter_difference()
    reference = f"[{case.repository}](https://github.com/{case.repository}/tree/{case.commit}) {case.commit[:7]}"
    return (
        f"| {case.method} | {reference} | {losses:.1e} | {parameters:.1e} | {case.aligned or 'nothing'} | "
        f"{case.remains} |"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("methods", nargs="*", help="names of rows; none: all")
    parser.add_argument("--checkouts", type=Path, required=True, help="folder of the reference repositories")
    parser.add_argument("--repository", default="", help="OWNER/NAME: only the comparisons with this one")
    parser.add_argument(
        "--reuse-draws", action="store_true", help="give our algorithms one key in place of all that are made of it"
    )
    parser.add_argument("--out", type=Path, help="also write the table there, between its marks")
    options = parser.parse_args()
    for name in MODULES:
        importlib.import_module(f"parity.{name}")
    cases = [
        c
        for c in CASES
        if not options.methods or c.method in options.methods or c.method.split(",")[0] in options.methods
    ]
    cases = [c for c in cases if options.repository in ("", c.repository)]
    unknown = set(options.methods) - {c.method for c in CASES} - {c.method.split(",")[0] for c in CASES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(c.method for c in CASES)}")
    torch.set_default_dtype(torch.float64)
    head = [
        "| method | reference | losses | parameters | made equal for this | remains, and why |",
        "|---|---|---|---|---|---|",
    ]
    rows, missing = [], []

    def leave_out(case: Case, reason: str, details: str = "") -> None:
        missing.append(f"{case.method} beside {case.repository}: {reason}")
        print(f"{missing[-1]}{details}", file=sys.stderr)

    above = 0
    print("\n".join(head), flush=True)
    for case in cases:
        checkout = checkout_of(options.checkouts, case.repository)
        if checkout is None:
            leave_out(
                case, f"fetch https://github.com/{case.repository} at {case.commit}", f" into {options.checkouts}"
            )
            continue
        if packages := absent(case):
            leave_out(case, f"pip install {' '.join(packages)}")
            continue
        if (commit := commit_of(checkout)) and not commit.startswith(case.commit):
            print(f"{case.method}: {checkout} is at {commit[:7]}; compared was {case.commit[:7]}", file=sys.stderr)
        try:
            with reused_draws() if options.reuse_draws else contextlib.nullcontext():
                outcome = case.compare(checkout)
        except Exception:
            leave_out(case, "the comparison failed", f"\n{traceback.format_exc()}")
            continue
        rows.append(row(case, outcome))
        print(rows[-1], flush=True)
        if not max(outcome.loss_difference(), outcome.parameter_difference()) <= LIMIT:
            print(f"{case.method}: above {LIMIT:g}", file=sys.stderr)
            above += 1
    if options.out:
        write(
            options.out,
            [
                *head,
                *rows,
                *(["", "Not compared for this table:", ""] if missing else []),
                *(f"- {line}" for line in missing),
            ],
        )
    return int(bool(missing or above))


def write(path: Path, table: list[str]) -> None:
    """Put the table between the two marks of a page."""
    text = path.read_text(encoding="utf-8")
    start, end = "<!-- parity: python scripts/parity -->\n", "<!-- end of parity -->"
    before, _, rest = text.partition(start)
    after = rest.partition(end)[2]
    path.write_text(before + start + "\n" + "\n".join(table) + "\n\n" + end + after, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
