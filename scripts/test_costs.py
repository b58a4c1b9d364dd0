"""What each test costs and what it alone covers: CPU seconds of the test and of the processes it starts, and the lines
of offrl/ that no other test runs.

    # the fast tier, measured twice as slow as it is: coverage traces it
    python scripts/test_costs.py run --out costs
    # CPU seconds alone; what is unknown goes to pytest
    python scripts/test_costs.py run --out costs --no-coverage -m slow
    # or class, test, directory; --top 40
    python scripts/test_costs.py show costs --by file
    # CPU seconds by directory and share of lines covered, side by side
    python scripts/test_costs.py total costs other

`run` needs the package `coverage`. `costs/` then holds `seconds.jsonl`, a line a test, and `coverage`, coverage.py's
database with a context a test. A module's own lines (`def`, `import`) run once for whoever imports it first and count
for nobody.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import json
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# the last three are links in offrl/; coverage.py follows links
SOURCES = ("offrl", "algorithms", "envs", "world_models")
CONFIG = """[run]
source_dirs = {sources}
data_file = {out}/data
relative_files = true
parallel = true
concurrency = multiprocessing, thread
context = ${{OFFRL_TEST-}}
"""


# -- the plugin that `run` gives to pytest


def _cpu() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Writes a line for the test to OFFRL_COSTS/seconds-PROCESS.jsonl, and names the context of its coverage after
    it.
    """
    from coverage import Coverage

    tracer = Coverage.current()
    os.environ["OFFRL_TEST"] = item.nodeid
    if tracer is not None:
        tracer.switch_context(item.nodeid)
    before = _cpu()
    result = yield
    seconds = _cpu() - before
    if tracer is not None:
        tracer.switch_context("")
    with open(Path(os.environ["OFFRL_COSTS"]) / f"seconds-{os.getpid()}.jsonl", "a") as file:
        file.write(json.dumps({"test": item.nodeid, "seconds": round(seconds, 3)}) + "\n")
    return result


# -- run


def run(out: Path, trace: bool, arguments: list[str]) -> int:
    out.mkdir(parents=True)
    environment = {**os.environ, "OFFRL_COSTS": str(out), "PYTHONPATH": str(ROOT / "scripts")}
    if trace:
        config = out / "config"
        config.write_text(CONFIG.format(sources=",".join(str(ROOT / name) for name in SOURCES), out=out))
        environment["COVERAGE_PROCESS_START"] = str(config)
    status = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "test_costs", *arguments], cwd=ROOT, env=environment
    ).returncode
    parts = sorted(out.glob("seconds-*.jsonl"))
    (out / "seconds.jsonl").write_text("".join(part.read_text() for part in parts))
    for part in parts:
        part.unlink()
    if trace:
        from coverage import Coverage

        combined = Coverage(data_file=out / "coverage", config_file=False)
        combined.combine([str(part) for part in out.glob("data.*")])
        combined.save()
    return status


# -- show, total


def seconds(out: Path) -> dict[str, float]:
    """CPU seconds by test; of the processes that share nothing, so they add up."""
    spent: dict[str, float] = defaultdict(float)
    for line in (out / "seconds.jsonl").read_text().splitlines():
        row = json.loads(line)
        spent[row["test"]] += row["seconds"]
    return dict(spent)


def lines_by_test(out: Path) -> dict[tuple[str, int], set[str]]:
    """The tests that run each line (file, number) of the package."""
    from coverage import CoverageData

    data = CoverageData(str(out / "coverage"))
    data.read()
    ran: dict[tuple[str, int], set[str]] = {}
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            if tests := set(contexts) - {""}:
                ran[file, line] = tests
    return ran


def lines_in_functions() -> set[tuple[str, int]]:
    """The first lines of the package's statements inside functions, docstrings left out: what only a call runs."""
    found: set[tuple[str, int]] = set()
    for file in itertools.chain.from_iterable((ROOT / name).rglob("*.py") for name in SOURCES):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for inner in itertools.chain.from_iterable(map(ast.walk, node.body)):
                    text = isinstance(inner, ast.Expr) and isinstance(inner.value, ast.Constant)
                    if isinstance(inner, ast.stmt) and not text:
                        found.add((str(file.relative_to(ROOT)), inner.lineno))
    return found


GROUPS: dict[str, Callable[[str], str]] = {
    "directory": lambda test: "/".join(test.split("::")[0].split("/")[:2]),
    "file": lambda test: test.split("::")[0],
    "class": lambda test: test.split("[")[0],  # a test function with all its parameters, or a method with them
    "test": lambda test: test,
}


def show(out: Path, by: str, top: int) -> None:
    group = GROUPS[by]
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for test, cpu in seconds(out).items():
        spent[group(test)] += cpu  # type: ignore[assignment]
        count[group(test)] += 1
    alone: Counter[str] = Counter()
    if (out / "coverage").exists():
        inside = lines_in_functions()
        for line, tests in lines_by_test(out).items():
            groups = {group(test) for test in tests}
            if len(groups) == 1 and line in inside:
                alone[groups.pop()] += 1
    print(f"{'CPU s':>8} {'tests':>6} {'lines alone':>11}  {by}")
    for name, cpu in spent.most_common(top):
        print(f"{cpu:8.1f} {count[name]:6d} {alone[name]:11d}  {name}")
    print(f"{sum(spent.values()):8.1f} {sum(count.values()):6d} {sum(alone.values()):11d}  all {len(spent)}")


def total(outs: list[Path]) -> None:
    by_directory: dict[str, list[float]] = defaultdict(lambda: [0.0] * len(outs))
    for column, out in enumerate(outs):
        for test, cpu in seconds(out).items():
            by_directory[GROUPS["directory"](test)][column] += cpu
    print("CPU s".ljust(28), *(f"{out.name:>12}" for out in outs))
    for name, row in sorted(by_directory.items(), key=lambda item: -max(item[1])):
        print(name.ljust(28), *(f"{cpu:12.1f}" for cpu in row))
    print("all".ljust(28), *(f"{sum(row[i] for row in by_directory.values()):12.1f}" for i in range(len(outs))))
    inside = lines_in_functions()
    shares = [
        f"{len(inside & lines_by_test(out).keys()) / len(inside):.1%}" if (out / "coverage").exists() else ""
        for out in outs
    ]
    print("lines in functions that ran".ljust(28), *(f"{share:>12}" for share in shares))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument("--no-coverage", action="store_true")
    one = commands.add_parser("show")
    one.add_argument("out", type=Path)
    one.add_argument("--by", choices=list(GROUPS), default="file")
    one.add_argument("--top", type=int, default=40)
    one = commands.add_parser("total")
    one.add_argument("outs", type=Path, nargs="+")
    known, more = parser.parse_known_args()
    if more and known.command != "run":
        parser.error(f"unknown: {' '.join(more)}")
    if known.command == "run":
        return run(known.out.resolve(), not known.no_coverage, more)
    if known.command == "show":
        show(known.out, known.by, known.top)
    else:
        total(known.outs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
