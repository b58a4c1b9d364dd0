"""How many broken lines a tier of the tests catches: lines are drawn at random from all packages and broken one at a
time.

    python scripts/mutants.py draw --count 30 --seed 52 --out mutants.json
    python scripts/mutants.py run mutants.json --tree ../scratch --costs costs --out before.json

`draw` takes the packages in random order, in turn, and in each a random comparison, operator, constant, condition,
return value or call inside a function. `run` breaks the line in `--tree` (a `git worktree` of the same commit, mended
again afterwards) and runs the tests that run this line, cheapest first, until one fails. Which those are, and what they
cost, is read from what `scripts/test_costs.py run` left in `--costs`; `--known OLD.json` takes over what an earlier
result's test caught, where that test is still among them.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from test_costs import ROOT, SOURCES, lines_by_test, seconds

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Add,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
TIMEOUT = 600  # seconds for the tests of one broken line; a loop that no longer ends is caught


# -- draw


def packages() -> dict[str, list[Path]]:
    """The package's files by the folder of offrl/ that they are in, or by their own name."""
    found: dict[str, list[Path]] = {}
    for source in SOURCES:
        for file in sorted((ROOT / source).rglob("*.py")):
            parts = file.relative_to(ROOT).parts
            found.setdefault(parts[1] if source == "offrl" else source, []).append(file)
    return found


def breaks(tree: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    """(what stands there, what to write instead) for all that can be broken inside functions."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for statement in function.body:
                yield from _breaks(statement)


def _breaks(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, ast.AST]]:
    if isinstance(node, (ast.JoinedStr, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return  # the parts of an f-string have no place of their own; functions inside are walked by themselves
    other = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        other.ops[0] = COMPARISONS[type(node.ops[0])]()  # type: ignore[attr-defined]
        yield node, other
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        other.op = OPERATORS[type(node.op)]()  # type: ignore[attr-defined]
        yield node, other
    elif isinstance(node, ast.BoolOp):
        other.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()  # type: ignore[attr-defined]
        yield node, other
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        value = node.value
        yield (
            node,
            ast.Constant(
                not value if isinstance(value, bool) else value + 1 if isinstance(value, int) else 2 * value or 1.0
            ),
        )
    elif isinstance(node, ast.Return) and node.value is not None:
        yield node, ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield node, ast.Pass()
    elif isinstance(node, (ast.If, ast.IfExp)):
        yield node.test, ast.UnaryOp(ast.Not(), node.test)
    for name, child in ast.iter_fields(node):
        if name != "annotation":
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST):
                    yield from _breaks(one)


def draw(count: int, seed: int) -> list[dict[str, Any]]:
    source = random.Random(seed)
    by_package = packages()
    names = sorted(by_package)
    source.shuffle(names)
    chosen: list[dict[str, Any]] = []
    while len(chosen) < count:
        name = names[len(chosen) % len(names)]
        file = source.choice(by_package[name])
        text = file.read_text()
        found = [(a, b) for a, b in breaks(ast.parse(text)) if a.lineno == a.end_lineno]
        if not found:
            continue
        old, new = source.choice(found)
        line = text.splitlines()[old.lineno - 1].encode()
        parts = line[: old.col_offset], line[old.col_offset : old.end_col_offset], line[old.end_col_offset :]
        written = ast.unparse(ast.fix_missing_locations(new))
        broken = parts[0].decode() + (f"({written})" if isinstance(old, ast.expr) else written) + parts[2].decode()
        row = {"file": str(file.relative_to(ROOT)), "line": old.lineno, "old": line.decode(), "new": broken}
        if row not in chosen:
            chosen.append(row)
    return chosen


# -- run


def caught(row: dict[str, Any], tree: Path, tests: list[str]) -> dict[str, Any]:
    """The result of the tests with the line broken: the first that fails, or none."""
    file = tree / row["file"]
    text = file.read_text()
    lines = text.splitlines(keepends=True)
    assert lines[row["line"] - 1].rstrip("\n") == row["old"], f"{file}:{row['line']} is another line than was drawn"
    lines[row["line"] - 1] = row["new"] + "\n"
    file.write_text("".join(lines))
    began = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-x",
        "-q",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "--no-header",
        *tests,
    ]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TIMEOUT)
        failed = [
            s.split(" - ")[0].split(" ", 1)[1] for s in done.stdout.splitlines() if s.startswith(("FAILED ", "ERROR "))
        ]
        if missing := re.findall(r"^ERROR: not found: .*", done.stdout + done.stderr, re.M):
            raise SystemExit(
                f"{row['file']}:{row['line']}: of the tests in --costs {len(missing)} are not there: {missing[0]}"
            )
        by = failed[0] if failed else None if done.returncode == 0 else f"pytest ended with {done.returncode}"
    except subprocess.TimeoutExpired:
        by = "does not end"
    finally:
        file.write_text(text)
    return {"caught_by": by, "seconds": round(time.monotonic() - began)}


def run(
    rows: list[dict[str, Any]], trees: list[Path], costs: Path, known: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    spent, ran = seconds(costs), lines_by_test(costs)
    free = list(trees)

    def one(index: int) -> dict[str, Any]:
        row = rows[index]
        tests = sorted(ran.get((row["file"], row["line"]), ()), key=lambda t: spent.get(t, 0.0))
        before = known[index]["caught_by"] if known else None
        if before in tests:
            result = {"caught_by": before, "seconds": 0}
        elif tests:
            tree = free.pop()
            try:
                result = caught(row, tree, tests)
            finally:
                free.append(tree)
        else:
            result = {"caught_by": None, "seconds": 0}
        print(f"{row['file']}:{row['line']}  {row['new'].strip()[:70]}  {len(tests)} tests  {result}", flush=True)
        return {**row, "tests": len(tests), **result}

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(one, range(len(rows))))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("draw")
    one.add_argument("--count", type=int, default=30)
    one.add_argument("--seed", type=int, required=True)
    one.add_argument("--out", type=Path, required=True)
    one = commands.add_parser("run")
    one.add_argument("mutants", type=Path)
    one.add_argument(
        "--tree", type=Path, action="append", required=True, help="a scratch checkout; several work side by side"
    )
    one.add_argument("--costs", type=Path, required=True)
    one.add_argument("--known", type=Path)
    one.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "draw":
        result = draw(given.count, given.seed)
    else:
        known = json.loads(given.known.read_text()) if given.known else []
        result = run(json.loads(given.mutants.read_text()), [t.resolve() for t in given.tree], given.costs, known)
        print(f"{sum(row['caught_by'] is not None for row in result)} of {len(result)} caught")
    given.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
