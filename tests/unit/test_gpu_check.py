"""scripts/gpu_check.py on a CPU: its measurements, its verdicts, its order, and that it ends with its report whatever
happens.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("OFFRL_CHECK_SCRATCH", str(tmp_path))
    import gpu_check

    return gpu_check


class Here:
    """Answers jobs in this process."""

    def __init__(self, check: Any) -> None:
        self.check, self.seen = check, []

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.seen.append((job, seconds))
        answer: dict[str, Any] = self.check.run(job, "cpu")
        return answer

    def close(self) -> None:
        pass


class Instant(Here):
    """Answers at once, or as it is told."""

    def __init__(self, answers: dict[str, dict[str, Any]] | None = None) -> None:
        self.seen, self.answers, self.closed = [], answers or {}, 0

    def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.seen.append((job, seconds))
        return dict(self.answers.get(job["job"], {}))

    def close(self) -> None:
        self.closed += 1


def options(**changes: Any) -> argparse.Namespace:
    values = {"device": "cpu", "small": True, "modes": ["eager"], "algos": ["bc"], "only": None}
    return argparse.Namespace(**{**values, **changes})


@pytest.mark.nightly
def test_the_whole_check_in_small(check: Any) -> None:
    only = ["equality", "speed", "timed", "draws", "precision", "memory", "kernels", "replica", "texts"]
    jobs = [
        j
        for j in check.plan(options(only=only))
        if not (j.get("options") or (j["job"] == "draws" and j["mode"] == "compiled"))
    ]
    for job in jobs:
        small = {"seconds": 0.05, "rows": 1_000, "updates": 20, "looks": [4, 8]}
        job.update({k: v for k, v in small.items() if k in job})
    answers = check.measure(jobs, [Here(check)], 120.0)
    text = check.report(jobs, answers, 1.0, "cpu")
    assert all(a is not None and "error" not in a for a in answers), answers
    assert "| bc | small | eager | 0.0e+00 | - | 0.0e+00 |" in text and "| equal |" in text
    assert "| iql | eager | 2 |" in text
    assert "- 2 seeds: 20 updates" in text and "EXTRAPOLATED to 1,000,000 updates" in text
    assert (
        "| random numbers and batches (eager) | right | bits, uniform, randint and 5 columns of a batch equal" in text
    )
    assert "| precision (tf32, eager) |  | needs a GPU |" in text
    assert "### kernels (iql, eager, 1)" in text and "`aten::" in text
    assert "Nothing that was compared is wrong." in text and text.rstrip().endswith("## Failures\n\nNone.")


def test_a_mode_is_compared_with_eager_and_with_what_rounding_does(check: Any) -> None:
    from gpu import measures

    what = measures.subject("td3_bc", "small")
    trees = measures.history(*what, "eager", "cpu")[1]
    moved = measures.rounding(what, trees, "cpu")
    assert 0.0 < moved["rounding early"] < 1e-2 and 0.0 < moved["rounding late"] < 1e-2
    assert measures.on_cpu(what, trees[0])["cpu"] < 1e-5  # one replica alone against four side by side
    calls: list[int] = []
    for _ in range(2):
        assert measures.once("x", lambda: calls.append(0) or {"y": 1}) == {"y": 1}  # type: ignore[func-returns-value]
    assert len(calls) == 1


def test_plan_on_a_gpu(check: Any) -> None:
    from gpu.plan import CHECKS, FIRST, LIMITS, SHARED

    from offrl import registry

    jobs = check.plan(options(device="cuda", small=False, modes=None, algos=None))
    equal = [(j["algo"], j["mode"]) for j in jobs if j["job"] == "equality"]
    modes = ("cudagraph", "compiled-cudagraph")
    assert len(equal) == len(set(equal)) and set(equal) == {(a, m) for a in registry.names("algo") for m in modes}
    assert set(equal[:10]) == {(a, m) for a in FIRST for m in modes}
    assert {j["size"] for j in jobs if j["job"] == "equality" and j["algo"] in FIRST} == {"real"}
    rest = [a for a, m in equal[10:] if m == modes[0]]
    assert rest.index("bc") < rest.index("cql") < rest.index("modt") < rest.index("breeze")
    kinds = [j["job"] for j in jobs]
    assert kinds[0] == "machine" and kinds[-2:] == ["timed", "timed"]
    last_of_first = max(i for i, j in enumerate(jobs) if j["job"] == "equality" and j["algo"] in FIRST)
    assert last_of_first < kinds.index("speed") < kinds.index("command") < kinds.index("memory")
    speed = [(j["algo"], j["replicas"], j["mode"]) for j in jobs if j["job"] == "speed" and "options" not in j]
    assert {(a, n, modes[1]) for a in ("iql", "td3_bc") for n in (1, 8, 64)} <= set(speed)
    assert {a for a, _, _ in speed} == set(FIRST) and {m for _, _, m in speed} == {"eager", *modes}
    timed_in_compiled = {(a, n) for a, n, m in speed if m == modes[1]}
    # compiled before they are timed
    assert {(j["algo"], j["replicas"]) for j in jobs if j["job"] == "warm"} == timed_in_compiled
    assert {next(iter(j["options"])) for j in jobs if j["job"] == "speed" and "options" in j} == {
        "deterministic",
        "combo_kernels",
        "assert_indirect_indexing",
    }
    assert [(j["replicas"], j["updates"]) for j in jobs if j["job"] == "timed"] == [(1, 1_000_000), (64, 1_000_000)]
    assert set(CHECKS) | {"machine", "equality", "warm", "speed", "timed"} == set(kinds) == set(LIMITS)
    assert not {"speed", "timed", "memory", "pair", "kernels"} & set(SHARED)  # which others would disturb
    only = check.plan(options(device="cuda", small=False, modes=None, only=["timed"]))
    assert [j["job"] for j in only] == ["machine", "timed", "timed"]


def test_a_difference_is_seen(check: Any) -> None:
    import torch
    from gpu.measures import by_module, difference, largest

    ours = {"params": {"actor": {"w": torch.ones(2, 3, 3), "b": torch.ones(2, 3), "alone": torch.ones(2)}}}
    theirs = {"params": {"actor": {"w": torch.ones(2, 3, 3), "b": torch.ones(2, 3), "alone": torch.ones(2)}}}
    assert difference(ours, theirs)[0] == 0.0
    theirs["params"]["actor"]["w"][1, 0, 0] += 0.3  # of one replica, whose norm is 3
    worst, where = difference(ours, theirs)
    assert worst == pytest.approx(0.1) and where == "params/actor/w"
    theirs["params"]["actor"]["alone"][1] = 1.5
    assert difference(ours, theirs) == (0.5, "params/actor/alone")
    worst, where = difference(by_module(ours), by_module(theirs))
    assert worst == pytest.approx((0.3**2 + 0.5**2) ** 0.5 / 13**0.5) and where == "params/actor"
    theirs["params"]["actor"]["b"][0, 0] = float("nan")
    assert difference(ours, theirs) == (float("inf"), "params/actor/b")
    assert largest([{"loss": 4.0}], [{"loss": 5.0}]) == 0.25 and largest(
        [{"loss": 1.0}], [{"loss": float("nan")}]
    ) == float("inf")


@pytest.mark.parametrize(
    ("early", "late", "rounding", "modules", "cpu", "word"),
    [
        (0.0, 9e-6, 0.0, 1e-6, None, "equal"),
        (1e-7, 2e-4, 1e-4, 2e-4, None, "as rounding"),
        (1e-7, 4e-4, 1e-4, 2e-4, None, "DIFFERENT at x"),
        (3e-2, 2e-4, 1e-4, 2e-4, None, "DIFFERENT at x"),
        (3e-2, 4e-2, 1e-4, 5e-5, None, "as rounding"),
        (0.0, 0.0, 0.0, 0.0, 9e-5, "equal"),
        (0.0, 0.0, 0.0, 0.0, 2e-4, "DIFFERENT from the CPU at y"),
        (0.0, 0.0, 0.0, 0.0, float("inf"), "DIFFERENT from the CPU at y"),
        (0.0, 0.0, None, 0.0, None, "equal"),
    ],
)
def test_verdict(
    check: Any, early: float, late: float, rounding: float | None, modules: float, cpu: float | None, word: str
) -> None:
    from gpu.report import summary, verdict

    answer = {
        "parameters early": early,
        "parameters late": late,
        "rounding early": 1e-7,
        "rounding late": rounding,
        "where": "x",
    }
    answer |= {"modules": modules, "cpu": cpu, "cpu where": "y", "losses": 0.0}
    assert verdict(answer) == word
    told = summary([({"job": "equality", "algo": "bc", "mode": "eager"}, answer)])[1]
    assert ("equality bc eager" in told) == word.startswith("DIFFERENT")


def test_what_cannot_be_compared_is_skipped_with_a_reason(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl import registry

    def skipped(algo: str) -> str:
        return str(check.run({"job": "equality", "algo": algo, "mode": "eager", "size": "small"}, "cpu")["skipped"])

    assert "waits for values" in skipped("sindy") and "texts" in skipped("lm_bc")
    bc = registry.get("algo", "bc")
    monkeypatch.setattr(bc, "traits", dataclasses.replace(bc.traits, vectorized=False))
    assert "not vectorised" in skipped("bc")


WORKER = """
import faulthandler, json, os, sys, time
for line in sys.stdin:
    job = json.loads(line)
    if job["job"] == "hang":
        faulthandler.dump_traceback_later(0.1)
        time.sleep(60)
    if job["job"] == "die":
        sys.exit("one line\\nout of memory")
    print("offrl: warning: of job " + job["job"], file=sys.stderr, flush=True)
    failed = {"error": "failed", "trace": "where"}
    print(json.dumps(failed if job["job"] == "fail" else {"pid": os.getpid(), "limit": job["limit"]}), flush=True)
"""


def test_worker_is_replaced_when_it_hangs_dies_or_fails(check: Any) -> None:
    worker = check.Worker([sys.executable, "-c", WORKER])
    try:
        answer = worker.ask({"job": "ok"}, 20.0)
        first = answer["pid"]
        assert answer["limit"] == 20.0 and worker.ask({"job": "ok"}, 20.0)["pid"] == first
        late = worker.ask({"job": "hang"}, 1.0)
        assert "when its time was over" in late["error"] and late["late"]
        second = worker.ask({"job": "ok"}, 20.0)["pid"]
        died = worker.ask({"job": "die"}, 20.0)
        assert died["error"] == "the process ended with status 1: out of memory" and died["trace"].endswith(
            "one line\nout of memory"
        )
        third = worker.ask({"job": "ok"}, 20.0)["pid"]
        assert worker.ask({"job": "fail"}, 20.0) == {"error": "failed", "trace": "where\noffrl: warning: of job fail"}
        assert len({first, second, third, worker.ask({"job": "ok"}, 20.0)["pid"]}) == 4
    finally:
        worker.close()


def test_where_it_hung_and_where_it_failed(check: Any) -> None:
    said = [
        "Timeout (0:00:58)!",
        "Thread 0x2 (most recent call first):",
        f'  File "{SCRIPTS.parent}/offrl/processes.py", line 4 in wait',
        "Thread 0x1 (most recent call first):",
        '  File "/usr/lib/python3/site-packages/torch/x.py", line 3 in compile',
        f'  File "{SCRIPTS.parent}/offrl/step.py", line 7 in run',
        f'  File "{SCRIPTS}/gpu/measures.py", line 9 in history',
        f'  File "{SCRIPTS}/gpu_check.py", line 1 in work',
    ]
    places = ("scripts/gpu/measures.py:9 history", "offrl/step.py:7 run", "site-packages/torch/x.py:3 compile")
    assert check.hung(said) == [f"it was at {place}" for place in places]
    with pytest.raises(Exception, match="nonsense") as caught:
        check.run(
            {"job": "speed", "algo": "nonsense", "replicas": 1, "mode": "eager", "rows": 100, "seconds": 0.1}, "cpu"
        )
    told = check.failure(caught.value)
    assert "\n" not in told["error"] and "nonsense" in told["error"]
    frames = told["trace"].splitlines()
    assert (
        any("scripts/gpu/measures.py" in f for f in frames)
        and any("offrl/registry.py" in f for f in frames)
        and "nonsense" in frames[-1]
    )


def test_failures_are_kept_in_full(check: Any) -> None:
    jobs = [
        {"job": "machine", "share": 1.0},
        {"job": "equality", "algo": "bc", "mode": "cudagraph", "size": "small", "share": 1.0},
    ]
    failed = {"error": "ValueError: a | b", "trace": "offrl/step.py:1 run\nValueError: a | b\nsecond line"}
    answers = check.measure(jobs, [Instant({"machine": {"text": "a machine"}, "equality": failed})], 60.0)
    text = check.report(jobs, answers, 1.0, "cuda")
    table, _, end = text.partition("## Failures")
    assert "| bc | small | cudagraph | | | | | | | | ValueError: a \\| b |" in table and "second line" not in table
    assert "### equality bc cudagraph small\n\n```text\noffrl/step.py:1 run\nValueError: a | b\nsecond line\n```" in end
    assert "1 jobs done, 0 skipped, 1 failed, 0 not reached." in table


def test_failures_can_be_asked_for(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRL_CHECK_FAIL", "speed,equality:bc")
    for job in ({"job": "speed"}, {"job": "equality", "algo": "bc"}):
        with pytest.raises(RuntimeError, match="asked for this failure"):
            check.run(job, "cpu")
    assert "skipped" in check.run({"job": "equality", "algo": "sindy", "mode": "eager", "size": "small"}, "cpu")


def test_limits_and_shares(check: Any) -> None:
    worker = Instant()
    jobs = [
        {"job": "equality", "share": 0.5},
        {"job": "command", "share": 0.5},
        {"job": "timed", "updates": 1_000_000, "share": 1.0},
    ]
    check.measure(jobs, [worker], 480.0)
    assert [s for _, s in worker.seen] == pytest.approx([60.0, 240.0, 480.0], abs=1.0)
    assert 0.0 < worker.seen[2][0]["seconds"] < 480.0
    worker = Instant()
    check.measure(jobs, [worker], 480.0, full=True, comparison=5.0)
    assert worker.seen[0][1] == 5.0 and worker.seen[2][0]["seconds"] > 1e6


def test_without_time_there_is_still_a_report(check: Any) -> None:
    jobs, worker = check.plan(options()), Instant()
    answers = check.measure(jobs, [worker], 0.0)
    assert not worker.seen and answers == [None] * len(jobs)
    text = check.report(jobs, answers, 0.0, "cpu")
    assert f"0 jobs done, 0 skipped, 0 failed, {len(jobs)} not reached." in text
    for part in ("## The same", "## Speed", "## Options", "## 1,000,000", "## Checks", "## Failures"):
        assert part in text


def test_what_its_share_cut_short_is_tried_again_at_the_end(check: Any) -> None:
    class Slow(Instant):
        def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
            super().ask(job, seconds)
            return {"error": "stopped", "late": True} if job["job"] == "equality" and seconds < 60.0 else {}

    jobs = [{"job": "equality", "share": 0.3}, {"job": "speed", "share": 1.0}]
    worker = Slow()
    assert check.measure(jobs, [worker], 180.0) == [{}, {}]
    assert [j["job"] for j, _ in worker.seen] == ["equality", "speed", "equality"]
    assert check.measure(jobs, [Slow()], 50.0)[0] == {"missed": "stopped (--minutes)"}


def test_the_report_so_far_is_there_after_every_job(check: Any, tmp_path: Path) -> None:
    jobs = [{"job": "machine", "share": 1.0}, {"job": "draws", "mode": "eager", "share": 1.0}]
    out, seen = tmp_path / "report.md", []

    def after(answers: Any) -> None:
        check.write(out, check.report(jobs, answers, 1.0, "cpu"))
        seen.append(out.read_text())

    check.measure(
        jobs,
        [Instant({"machine": {"text": "a machine"}, "draws": {"verdict": "right", "text": "fine"}})],
        60.0,
        after=after,
    )
    assert len(seen) == 2 and all("a machine" in text for text in seen)
    assert "not reached" in seen[0].partition("## Checks")[2] and "| right | fine |" in seen[1]
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith("report")] == ["report.md"]


def test_lanes_share_what_is_not_timed(check: Any) -> None:
    class Waiting(Instant):
        def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
            time.sleep(0.02)
            return super().ask(job, seconds)

    first, second = Waiting(), Waiting()
    jobs = [{"job": "equality", "number": i, "share": 1.0} for i in range(6)] + [{"job": "speed", "share": 1.0}] * 2
    assert check.measure(jobs, [first, second], 60.0) == [{}] * 8
    assert {j.get("number") for j, _ in second.seen} < set(range(6)) and second.seen
    # its memory is the others' then
    assert [j["job"] for j, _ in first.seen][-2:] == ["speed"] * 2 and second.closed == 1


def test_a_signal_ends_it_with_what_was_measured(check: Any) -> None:
    stop = threading.Event()

    class Stopped(Instant):
        def ask(self, job: dict[str, Any], seconds: float) -> dict[str, Any]:
            if job["job"] == "draws":
                stop.set()
                return {"error": "the process ended with status -9: "}
            return {"text": "a machine"}

    jobs = [
        {"job": "machine", "share": 1.0},
        {"job": "draws", "mode": "eager", "share": 1.0},
        {"job": "pair", "share": 1.0},
    ]
    answers = check.measure(jobs, [Stopped()], 60.0, stop=stop)
    assert answers == [{"text": "a machine"}, {"missed": "stopped by a signal"}, None]
    assert "## Failures\n\nNone." in check.report(jobs, answers, 1.0, "cpu")


def test_without_the_device_nothing_else_is_tried(check: Any) -> None:
    jobs = [{"job": "machine", "share": 1.0}, {"job": "pair", "share": 1.0}]
    worker = Instant({"machine": {"error": "no driver"}})
    assert check.measure(jobs, [worker], 60.0) == [{"error": "no driver"}, None] and len(worker.seen) == 1


def test_words_for_gaps_between_kernels(check: Any) -> None:
    from gpu.checks import gaps

    def kernel(first: float, last: float) -> Any:
        return argparse.Namespace(time_range=argparse.Namespace(start=first, end=last))

    # two at a time, then gaps of 10 and 2
    spans = [kernel(0.0, 10.0), kernel(5.0, 20.0), kernel(30.0, 40.0), kernel(42.0, 50.0)]
    assert gaps(spans, 2) == "gaps 6 µs an update (24% of the time), median 6.0 µs, longest 10 µs"
    assert gaps(spans[:2], 1) == "no gaps between kernels"


def test_what_compute_sanitizer_says(check: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from gpu.checks import sanitizer

    # what it runs
    assert check.run({"job": "warm", "algo": "bc", "replicas": 1, "mode": "eager", "rows": 500}, "cpu")["warm"] > 0.0
    assert "skipped" in sanitizer("cpu", "eager", 500)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not installed" in sanitizer("cuda", "eager", 500)["skipped"]
    tool = tmp_path / "compute-sanitizer"
    for count, verdict in ((0, "right"), (10, "WRONG")):
        tool.write_text(f"#!/bin/sh\necho '{{\"warm\": 1.0}}'\necho '========= ERROR SUMMARY: {count} errors'\n")
        tool.chmod(0o755)
        assert sanitizer("cuda", "eager", 500) == {"verdict": verdict, "text": f"eager: ERROR SUMMARY: {count} errors"}
    tool.write_text("#!/bin/sh\necho 'Device not supported'\n")
    with pytest.raises(RuntimeError, match="Device not supported"):
        sanitizer("cuda", "eager", 500)


def test_what_runs_in_another_mode_than_asked_for_is_no_measurement(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offrl.training.compiling import program

    def refuse(*arguments: Any, **settings: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(program.torch, "compile", refuse)  # the step then goes on without
    monkeypatch.setattr(program.ahead, "available", lambda: False)
    with pytest.raises(RuntimeError, match=r"to run compiled and goes on eager|no compiler"):
        check.run({"job": "speed", "algo": "bc", "replicas": 1, "mode": "compiled", "rows": 500, "seconds": 0.1}, "cpu")
