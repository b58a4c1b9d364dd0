"""scripts/gpu_check.py on a CPU: its measurements, its verdicts, and that it ends with its tables whatever happens."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    return gpu_check


class Here:
    """Answers jobs in this process."""

    def __init__(self, check: Any) -> None:
        self.check, self.seen = check, []

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.seen.append((job, seconds))
        return self.check.run(job, "cpu")


def options(**changes: Any) -> argparse.Namespace:
    values = {"device": "cpu", "small": True, "modes": ["eager"], "algos": ["bc"], "minutes": 8.0, "full": False}
    return argparse.Namespace(**{**values, **changes})


def test_the_whole_check_in_small(check: Any) -> None:
    jobs = check.plan(options())
    for job in jobs:
        if job["job"] == "speed":
            job.update(seconds=0.05, rows=1_000)
        if job["job"] == "timed":
            job.update(updates=20, rows=1_000)
        if job["job"] == "equality":
            job.update(updates=10)
    answers = check.measure(jobs, Here(check), 60.0, full=False)
    text = check.report(jobs, answers, 1.0, options())
    assert all("error" not in a for a in answers)
    assert "| bc | eager | 0.0e+00 |" in text and "| equal |" in text
    assert "| iql | 2 |" in text
    assert "EXTRAPOLATED to 1,000,000 updates" in text


def test_plan_on_a_gpu_covers_every_algorithm_and_size(check: Any) -> None:
    from offrl import registry

    jobs = check.plan(options(device="cuda", small=False, modes=None, algos=None))
    equal = {(j["algo"], j["mode"]) for j in jobs if j["job"] == "equality"}
    assert equal == {(a, m) for a in registry.names("algo") for m in ("cudagraph", "compiled-cudagraph")}
    speed = {(j["algo"], j["replicas"], j["mode"]) for j in jobs if j["job"] == "speed"}
    assert speed == {(a, n, "compiled-cudagraph") for a in ("iql", "td3_bc") for n in (1, 4, 16, 64)}
    assert {j["rows"] for j in jobs if j["job"] == "speed"} == {2_000_000}
    assert jobs[-1]["job"] == "timed" and jobs[-1]["updates"] == 1_000_000


def test_a_difference_is_seen(check: Any) -> None:
    import torch

    ours = {"params": {"actor": {"w": torch.ones(2, 3, 3), "b": torch.ones(2, 3)}}}
    theirs = {"params": {"actor": {"w": torch.ones(2, 3, 3), "b": torch.ones(2, 3)}}}
    assert check.difference(ours, theirs)[0] == 0.0
    theirs["params"]["actor"]["w"][1, 0, 0] += 0.3  # of one replica, whose norm is 3
    worst, where = check.difference(ours, theirs)
    assert worst == pytest.approx(0.1) and where == "params/actor/w"
    theirs["params"]["actor"]["b"][0, 0] = float("nan")
    assert check.difference(ours, theirs) == (float("inf"), "params/actor/b")


@pytest.mark.parametrize(
    ("early", "late", "rounding", "word"),
    [(0.0, 9e-6, 0.0, "equal"), (1e-7, 2e-4, 1e-4, "as rounding"), (1e-7, 4e-4, 1e-4, "DIFFERENT"), (3e-2, 2e-4, 1e-4, "DIFFERENT")],
)
def test_verdict(check: Any, early: float, late: float, rounding: float, word: str) -> None:
    answer = {"parameters early": early, "parameters late": late, "rounding early": 1e-7, "rounding late": rounding, "where": "x"}
    assert check.verdict(answer).startswith(word)


def test_what_does_not_vectorise_is_skipped_with_a_reason(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl import registry

    monkeypatch.setattr(registry.get("algo", "bc"), "vectorized", False)
    assert "not vectorised" in check.run({"job": "equality", "algo": "bc", "mode": "eager", "updates": 10}, "cpu")["skipped"]


WORKER = """
import json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)["job"]
    if job == "hang":
        time.sleep(60)
    if job == "die":
        sys.exit("out of memory")
    print(json.dumps({"error": "failed"} if job == "fail" else {"pid": os.getpid()}), flush=True)
"""


def test_worker_is_replaced_when_it_hangs_dies_or_fails(check: Any) -> None:
    worker = check.Worker([sys.executable, "-c", WORKER])
    try:
        first = worker.ask({"job": "ok"}, 20.0)["pid"]
        assert worker.ask({"job": "ok"}, 20.0)["pid"] == first
        assert "when its time was over" in worker.ask({"job": "hang"}, 0.2)["error"]
        second = worker.ask({"job": "ok"}, 20.0)["pid"]
        assert worker.ask({"job": "die"}, 20.0)["error"] == "the process ended with status 1: out of memory"
        third = worker.ask({"job": "ok"}, 20.0)["pid"]
        assert worker.ask({"job": "fail"}, 20.0) == {"error": "failed"}
        assert len({first, second, third, worker.ask({"job": "ok"}, 20.0)["pid"]}) == 4
    finally:
        worker.close()


def test_without_time_there_is_still_a_report(check: Any) -> None:
    jobs = check.plan(options())
    worker = Here(check)
    answers = check.measure(jobs, worker, 0.0, full=False)
    assert not worker.seen
    text = check.report(jobs, answers, 0.0, options())
    assert text.count("not reached in the time given") == len(jobs)


def test_part_of_the_time_is_kept_for_the_long_run(check: Any) -> None:
    class Instant:
        seen: list[Any] = []  # noqa: RUF012

        def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
            self.seen.append((job, seconds))
            return {}

    worker = Instant()
    check.measure([{"job": "machine"}, {"job": "timed", "updates": 1_000_000}], worker, 480.0, full=False)
    assert worker.seen[0][1] == pytest.approx(360.0, abs=1.0)
    assert worker.seen[1][1] == pytest.approx(480.0, abs=1.0)
    assert 0.0 < worker.seen[1][0]["limit"] < 480.0
