"""One command for a machine with a CUDA GPU: is the captured training step right, how fast is it, how much memory does
it take.

    python scripts/gpu_check.py --out docs/benchmarks/gpu.md  # at most 9 minutes (--minutes)
    python scripts/gpu_check.py --full --only timed  # the 1,000,000 updates of IQL to their end, however long
    python scripts/gpu_check.py --device cpu --small  # the same logic in small, eager against compiled: 5 minutes

The measurements run in worker processes. One is replaced when a job breaks it or takes longer than it may; comparisons,
which mostly wait for the compiler, run in several at a time (--lanes). The report is printed in any case, also after
Ctrl-C or SIGTERM, and written to --out after every job. Needs torch, NumPy, pytest (tests/support/cases.py makes the
algorithms) and offrl's own files; some checks need offrl's other requirements, and say so.

To see what failures look like: OFFRL_CHECK_FAIL="equality:bc,speed:iql=hang,draws=die" makes these jobs fail (raise,
hang or die).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import itertools
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

SCRIPTS = Path(__file__).resolve().parent
ROOT = SCRIPTS.parent
sys.path[:0] = [str(SCRIPTS), str(ROOT)]

from gpu.plan import LIMITS, SHARED, Job, describe, limit, plan  # noqa: E402
from gpu.report import report  # noqa: E402

Answer = dict[str, Any]

FAIL = "OFFRL_CHECK_FAIL"
SHOWN = 6000  # characters of a failure
FRAMES = 12


def main(arguments: list[str] | None = None) -> str:
    """Measure, print and return the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try the logic")
    parser.add_argument(
        "--minutes", type=float, help="after this time the report is printed as it is; default: 9, with --small 4.8"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMITS["equality"], help="seconds of one comparison with the eager step"
    )
    parser.add_argument("--full", action="store_true", help="run all 1,000,000 updates of IQL, whatever the time")
    parser.add_argument("--small", action="store_true", help="few rows, replicas and updates")
    parser.add_argument(
        "--lanes",
        type=int,
        help="workers that share the device for what is not timed; default: half the cores, at most 6",
    )
    parser.add_argument(
        "--only", nargs="+", metavar="JOB", choices=LIMITS, help=f"these jobs only: {', '.join(LIMITS)}"
    )
    parser.add_argument("--modes", nargs="+", help="modes of the step to compare with eager; the last one is timed")
    parser.add_argument("--algos", nargs="+", help="algorithms to compare (default: all)")
    parser.add_argument("--out", type=Path, help="also write the report to this Markdown file, after every job")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        work(options.device)
        return ""
    start, jobs = time.monotonic(), plan(options)
    budget = 60.0 * (options.minutes or (4.8 if options.small else 9.0))
    cores = os.cpu_count() or 1
    lanes = options.lanes or (1 if options.device == "cpu" else max(1, min(6, cores // 2)))
    with tempfile.TemporaryDirectory(prefix="offrl-check-") as folder, contextlib.ExitStack() as stack:
        # compiled code of its own, which all workers share: what is timed as compiling is compiled
        settings = {**os.environ, "OFFRL_CHECK_SCRATCH": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/compiled"}
        settings["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(1, cores // lanes))
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--device", options.device]
        workers = [stack.enter_context(contextlib.closing(Worker(command, settings))) for _ in range(lanes)]
        stop = stopping(workers)

        def after(answers: Sequence[Answer | None]) -> None:
            if options.out:
                write(options.out, report(jobs, answers, time.monotonic() - start, options.device))

        answers = measure(jobs, workers, budget, full=options.full, comparison=options.limit, stop=stop, after=after)
        text = report(jobs, answers, time.monotonic() - start, options.device)
    print(text)
    if options.out:
        write(options.out, text)
    return text


def write(path: Path, text: str) -> None:
    """Whole or not at all: the machine may go away at any time."""
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def stopping(workers: Sequence[Worker]) -> threading.Event:
    """Set by the first Ctrl-C or SIGTERM, which also ends what the workers do; the second ends the command."""
    stop = threading.Event()

    def handler(number: int, frame: Any) -> None:
        for which in (signal.SIGINT, signal.SIGTERM):
            signal.signal(which, signal.SIG_DFL)
        stop.set()
        for worker in workers:
            worker.kill()

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, handler)
    return stop


class Asked(Protocol):
    """A `Worker`, or what stands for one."""

    def ask(self, job: Job, seconds: float) -> Answer: ...

    def close(self) -> None: ...


def measure(
    jobs: Sequence[Job],
    workers: Sequence[Asked],
    budget: float,
    *,
    full: bool = False,
    comparison: float = LIMITS["equality"],
    stop: threading.Event | None = None,
    after: Callable[[Sequence[Answer | None]], None] = lambda answers: None,
) -> list[Answer | None]:
    """An answer for each job: what was measured, {"error": why not}, or None if it was not reached within `budget`
    seconds.

    Jobs run in their order; neighbours that may share the device run in all workers at once. full: "timed" jobs have no
    end. stop: set when no more is to be begun. after: called with the answers so far after each job.
    """
    begin, lock = time.monotonic(), threading.Lock()
    answers: list[Answer | None] = [None] * len(jobs)
    stop = stop or threading.Event()

    def lane(worker: Asked, queue: list[int], last: bool) -> None:
        while not stop.is_set():
            with lock:
                if not queue:
                    return
                index = queue.pop(0)
            job = jobs[index]
            allowed = limit(job, comparison)
            left = budget * (1.0 if last else job["share"]) - (time.monotonic() - begin)
            seconds = min(allowed, left)
            if job["job"] == "timed":
                seconds = allowed if full else left
                # the rest for the start and the compiler
                job = {**job, "seconds": seconds if full else max(0.8 * left - 30.0, 0.5 * left)}
            if seconds <= min(0.25 * allowed, 10.0):
                continue  # perhaps later, or never
            started = time.monotonic()
            answer = worker.ask(job, seconds)
            if stop.is_set() and "error" in answer:
                answer = {"missed": "stopped by a signal"}
            elif answer.pop("late", False) and seconds < allowed:
                if not last:
                    continue  # its share of the time was over, not its own
                answer = {"missed": f"{answer['error']} (--minutes)"}
            with lock:
                answers[index] = answer
                after(answers)
            if job["job"] == "machine" and "error" in answer:  # there is no such device: nothing else would go
                stop.set()
            how = next((f"{k}: {answer[k]}" for k in ("error", "skipped", "missed") if k in answer), "done")
            print(f"{describe(job)}: {how}, {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)

    for last in (False, True):
        missing = [i for i, answer in enumerate(answers) if answer is None]
        for shared, group in itertools.groupby(missing, key=lambda i: jobs[i]["job"] in SHARED):
            queue = list(group)
            many = workers if shared else workers[:1]
            threads = [threading.Thread(target=lane, args=(worker, queue, last)) for worker in many]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for worker in many[1:]:  # whose memory the others may need
                worker.close()
    return answers


class Worker:
    """A process that answers jobs, one line of JSON for each; a new one takes over after it failed or took too long."""

    def __init__(self, command: list[str], environment: dict[str, str] | None = None) -> None:
        self.command, self.environment = command, environment
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: Job, seconds: float) -> Answer:
        """The answer to a job, or {"error": its first line, "trace": all that is known, "late": whether it took too
        long}.
        """
        if self.process is None:
            self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self.errors,
                text=True,
                start_new_session=True,
                env=self.environment,
            )
        assert self.process.stdin is not None and self.process.stdout is not None
        line, before = "", self._size()
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({**job, "limit": seconds}) + "\n")
            self.process.stdin.flush()
            if not select.select([self.process.stdout], [], [], seconds)[0]:
                reason = f"stopped after {seconds:.0f} s, when its time was over"
                answer = {"error": reason, "trace": "\n".join([reason, *hung(self._said(before))]), "late": True}
                self.close()
                return answer
            line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            lines = self._said(before)
            answer = {"error": f"the process ended with status {self.process.returncode}: {lines[-1] if lines else ''}"}
            answer["trace"] = "\n".join(
                [f"the process ended with status {self.process.returncode}; its last words:", *lines[-15:]]
            )
        else:
            answer = json.loads(line)
            if "error" in answer and (warned := [x for x in self._said(before) if x.startswith("offrl: warning")]):
                answer["trace"] = "\n".join([answer["trace"], *warned[-5:]])
        if "error" in answer:  # a failure on a GPU can spoil whatever comes after it in the same process
            self.close()
        return answer

    def _size(self) -> int:
        return os.fstat(self.errors.fileno()).st_size

    def _said(self, first: int) -> list[str]:
        """The standard error of the process from this byte on. Its own place in the file is not moved."""
        output = os.pread(self.errors.fileno(), self._size() - first, first).decode(errors="replace")
        return [x.rstrip() for x in output.splitlines() if x.strip()]

    def kill(self) -> None:
        """End the process, with the compilers and commands that it started; `ask` then comes back."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        if self.process is not None:
            self.process.communicate()
            self.errors.close()
            self.process = None


def hung(lines: Sequence[str]) -> list[str]:
    """The place where a process was when its time was over, from what faulthandler wrote: `places` of the main
    thread.
    """
    # the main thread comes last
    starts = [i for i, line in enumerate(lines) if line.startswith(("Thread ", "Current thread "))]
    matches = [re.match(r'\s*File "(.+)", line (\d+) in (.+)', line) for line in lines[starts[-1] if starts else 0 :]]
    frames = places([(m[1], int(m[2]), m[3]) for m in reversed(matches) if m])
    return [f"it was at {frame}" for frame in frames]


def places(frames: Sequence[tuple[str, int, str]]) -> list[str]:
    """`file:line function` of the last frames in the project (this file aside), and of the very last wherever it is."""
    shown = []
    for number, (file, line, function) in enumerate(frames, 1):
        path = Path(file)
        own = ROOT in path.parents and "site-packages" not in path.parts
        if (own and path != Path(__file__).resolve()) or number == len(frames):
            shown.append(f"{path.relative_to(ROOT) if own else '/'.join(path.parts[-3:])}:{line} {function}")
    return shown[-FRAMES:]


# ---- the worker: from here on torch is there


def work(device: str) -> None:
    """Answer the jobs on standard input."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        job = json.loads(line)
        if "limit" in job:  # so that it is known where it hung
            faulthandler.dump_traceback_later(max(0.9 * job["limit"], job["limit"] - 2.0), file=sys.stderr)
        try:
            answer = run(job, device)
        except Exception as error:  # whatever it is: the report says so, and the parent starts a new process
            answer = failure(error)
        faulthandler.cancel_dump_traceback_later()
        out.write(json.dumps(answer) + "\n")
        out.flush()


def failure(error: BaseException) -> Answer:
    """An error as an answer: its first line, and the project's last frames with the whole message."""
    frames = places([(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)])
    message = str(error).strip()
    first = message.splitlines()[0] if message else ""
    trace = [*frames, f"{type(error).__name__}: {message[:SHOWN]}"]
    return {"error": f"{type(error).__name__}: {first}"[:300], "trace": "\n".join(trace)}


def run(job: Job, device: str) -> Answer:
    """Do one job."""
    from gpu import checks, measures

    sabotage(job)
    measures.configure(device)
    settings = {k: v for k, v in job.items() if k not in ("job", "share", "limit")}
    return {**measures.JOBS, **checks.JOBS}[job["job"]](device=device, **settings)


def sabotage(job: Job) -> None:
    """Fail as the environment variable says: see the top of this file."""
    for request in filter(None, os.environ.get(FAIL, "").split(",")):
        name, _, how = request.partition("=")
        which, _, algo = name.partition(":")
        if job["job"] == which and algo in ("", job.get("algo")):
            if how == "hang":
                time.sleep(1e6)
            if how == "die":
                print("CUDA error: an illegal memory access (not really)", file=sys.stderr)
                os._exit(134)
            raise RuntimeError(f"{FAIL} asked for this failure of {describe(job)}")


if __name__ == "__main__":
    main()
