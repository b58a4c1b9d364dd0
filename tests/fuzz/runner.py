"""Runs cases in a worker process that is started anew whenever a case ends it, and counts how they end."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from tests.fuzz.case import ALL, FAILURES, OUTCOMES, Result

SECONDS = (
    10.0  # of the processor that a case may take; ten times as many by the clock, where others keep the machine busy
)
START = 180.0  # that a worker may take to start
CASES = 500  # that a worker runs: libraries do not give back all that a damaged file made them take
AGAIN = ("crash", "hang", "library", "memory", "strict")  # outcomes that cases before this one may have caused
KEPT = 3  # files of each kind of failure
ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A process that runs cases, and the folder that it makes them in."""

    def __init__(self, tree: Path | None = None) -> None:
        self.tree, self.process = tree, None
        self._temporary = tempfile.TemporaryDirectory(prefix="offrl-fuzz-")
        self.folder = Path(self._temporary.name)
        self.buffer = b""

    def _start(self) -> Any:
        environment = dict(
            os.environ, MALLOC_ARENA_MAX="1", OMP_NUM_THREADS="1", OFFRL_CACHE=str(self.folder / "cache")
        )
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        if self.tree is not None:
            environment["FUZZ_TREE"] = str(self.tree)
        command = [sys.executable, "-m", "tests.fuzz.worker"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, env=environment)
        self.process, self.buffer = process, b""
        if not any("stage" in answer and answer["stage"] == "ready" for answer in self._answers(START)):
            raise RuntimeError("the worker does not start: python -m tests.fuzz.worker < /dev/null says why")
        return process

    def _answers(self, seconds: float) -> Iterable[dict[str, Any]]:
        """What the process writes, until it ends or has taken so many seconds of the processor."""
        assert self.process is not None and self.process.stdout is not None
        handle = self.process.stdout.fileno()
        began, used = time.monotonic(), self._used()
        while True:
            while b"\n" in self.buffer:
                line, _, self.buffer = self.buffer.partition(b"\n")
                yield json.loads(line)
            if not select.select([handle], [], [], 0.5)[0]:
                if self._used() - used > seconds or time.monotonic() - began > 10 * seconds:
                    yield {"silent": True}
                    return
                continue
            data = os.read(handle, 1 << 16)
            if not data:
                return
            self.buffer += data

    def _used(self) -> float:
        """Seconds of the processor that the process has taken; 0 where nothing says it."""
        try:
            numbers = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")
        except (OSError, AttributeError, IndexError):
            return 0.0

    def run(self, order: dict[str, Any]) -> Result:
        """One case: `order` as `worker` takes it."""
        process = self.process if self.process is not None and self.process.poll() is None else self._start()
        order = {"folder": str(self.folder / "case"), **order}
        process.stdin.write(json.dumps(order).encode() + b"\n")
        process.stdin.flush()
        stage, silent = "make", False
        for answer in self._answers(SECONDS):
            if "result" in answer:
                return Result(**answer["result"])
            stage, silent = answer.get("stage", stage), "silent" in answer
        self.stop()
        result = Result("library" if stage == "oracle" else "hang" if silent else "crash")
        result.place = f"in {stage}" + ("" if silent else f", status {process.returncode}")
        draft = Path(order["folder"]) / "case.json"
        if draft.exists():
            result.changes = json.loads(draft.read_text())["changes"]
        return result

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout):
                stream.close()
            self.process = None

    def close(self) -> None:
        self.stop()
        self._temporary.cleanup()


def fuzz(
    cases: int,
    seed: int = 0,
    layouts: Iterable[str] = (),
    minutes: float | None = None,
    tree: Path | None = None,
    keep: Path | None = None,
    first: int = 0,
    progress: Callable[[int, Counter[str]], None] | None = None,
) -> tuple[dict[str, Counter[str]], list[Result]]:
    """Run `cases` cases, the layouts in turn, for at most so many minutes.

    Returns how often each layout had each outcome (and each verdict, as "oracle: valid"), and the failures. `keep`: a
    folder for the files of failures, a few of each kind. Some failures are run again in a new process: what went before
    may have been their cause.
    """
    names = list(layouts) or list(ALL)
    counts: dict[str, Counter[str]] = {name: Counter() for name in names}
    failures: list[Result] = []
    kinds: Counter[str] = Counter()
    worker, until = Worker(tree), time.monotonic() + (minutes or 1e9) * 60
    try:
        for k in range(cases):
            if time.monotonic() > until:
                break
            order = {"layout": names[k % len(names)], "seed": seed, "number": first + k // len(names)}
            result = worker.run(order)
            if result.outcome in AGAIN:
                worker.stop()
                again = worker.run(order)
                again.place += "" if again.outcome == result.outcome else f" ({result.outcome} after other cases)"
                result = again
            result.layout, result.number, result.seed = str(order["layout"]), int(order["number"]), seed
            if result.outcome == "memory" or k % CASES == CASES - 1:
                worker.stop()
            row = counts[result.layout]
            row[result.outcome] += 1
            row[f"oracle: {result.verdict}"] += 1
            if result.outcome not in ("right", "refused", "library"):
                failures.append(result)
                kinds[result.kind] += 1
                if keep is not None and kinds[result.kind] <= KEPT:
                    _keep(worker.folder / "case", keep, result)
            if progress is not None and k % 100 == 99:
                progress(k + 1, sum(counts.values(), Counter()))
    finally:
        worker.close()
    return counts, failures


def _keep(case: Path, keep: Path, result: Result) -> None:
    target = keep / f"{result.layout}-{result.seed}-{result.number}"
    shutil.rmtree(target, ignore_errors=True)
    if case.exists():
        shutil.copytree(case, target, symlinks=True)
        (target / "result.json").write_text(json.dumps(vars(result), indent=1))


def table(counts: dict[str, Counter[str]]) -> str:
    """The counts as a table, one line a layout."""
    columns = [
        "cases",
        *(
            o
            for o in (*OUTCOMES, "fuzzer")
            if o in ("right", "refused", "wrong", "traceback") or any(c[o] for c in counts.values())
        ),
    ]
    verdicts = ["valid", "refuse", "either"]
    lines = ["| layout | " + " | ".join([*columns, *(f"oracle: {v}" for v in verdicts)]) + " |"]
    lines.append("|---" * (1 + len(columns) + len(verdicts)) + "|")
    rows = {**counts, "all": sum(counts.values(), Counter())}
    for name, count in rows.items():
        total = sum(count[o] for o in (*OUTCOMES, "fuzzer"))
        numbers = [total, *(count[o] for o in columns[1:]), *(count[f"oracle: {v}"] for v in verdicts)]
        lines.append(f"| {name} | " + " | ".join(f"{n:,}" for n in numbers) + " |")
    return "\n".join(lines)


def summary(failures: list[Result]) -> str:
    """Failures of one kind together, the most frequent first."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for result in failures:
        groups[result.kind].append(result)
    lines = []
    for kind, results in sorted(
        groups.items(), key=lambda item: (FAILURES + ("fuzzer",)).index(item[1][0].outcome) * 10**6 - len(item[1])
    ):
        r = results[0]
        lines.append(
            f"{len(results):5} x {kind}\n        {r.layout}-{r.seed}-{r.number}: {'; '.join(r.changes)[:200]}\n        "
            f"{r.message[-260:]}"
        )
    return "\n".join(lines)
