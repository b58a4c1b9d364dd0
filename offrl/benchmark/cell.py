"""One cell: all seeds of one algorithm on one dataset, trained in this process, whoever started it. The status file
says how it went.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offrl.benchmark import plan
from offrl.errors import UserError, out_of_memory, printable
from offrl.system import children
from offrl.system.addresses import split_login, without_logins
from offrl.system.files import open_to_append, write_private
from offrl.system.signals import terminable

# The variables that a job on another machine is told of, each without the logins in it. A key is never among them: a
# job that needs one has it from the environment that its launcher gives it.
PASSED_ON = (
    "OFFRL_CACHE",
    "OFFRL_SHARED_CACHE",
    "OFFRL_MIRROR",
    "OFFRL_LM",
    "OFFRL_NEORL2",
    "OFFRL_TRUST",
    "OFFRL_PLUGINS",
    "MINARI_DATASETS_PATH",
    "D4RL_DATASET_DIR",
    "OGBENCH_DATASET_DIR",
    "MUJOCO_GL",
)
STOP_SECONDS = 1.0  # between two looks for a request to stop


@contextlib.contextmanager
def write_job_spec(folder: Path, jobs: Mapping[str, Any]) -> Iterator[None]:
    """Write what the jobs read that a launcher starts, perhaps on other machines: the settings of the cells and some of
    this environment.

    No other user can read it, and it holds no key and no login. Meanwhile a login in dataset.mirror is in
    $OFFRL_MIRROR: jobs have it where their launcher hands the environment on.
    """
    mirrors = (cell["values"].get("dataset.mirror") for cell in jobs["cells"].values())
    mirror = next((m for m in mirrors if m and split_login(m)[1]), None)
    with plan.environment({"OFFRL_MIRROR": mirror} if mirror else {}):
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        content = without_logins({**jobs, "environment": environment})
        write_private(folder / plan.CELLS / plan.PLAN, json.dumps(content, indent=1, default=str) + "\n")
        yield


def job(config: Any) -> None:
    """The task of Hydra's launchers."""
    work(config.folder, config.run)


def work(folder: Path | str, run: str) -> None:
    """Train the cell `run` of the benchmark in `folder` in this process, which a launcher started for it.

    Raises nothing: a failed cell must not take the other jobs of a launcher with it.
    """
    folder = Path(folder)
    where = json.loads((folder / plan.CELLS / plan.PLAN).read_text(encoding="utf-8"))
    # nobody would know of a cell that goes on after its command was killed
    children.live_with_parent(other=where.get("command"))
    for name, value in where["environment"].items():
        os.environ.setdefault(name, value)
    old = os.getcwd()
    if Path(where["cwd"]).is_dir():
        os.chdir(where["cwd"])
    try:
        log_file = open_to_append(folder / plan.CELLS / f"{run}.log", "a", encoding="utf-8", buffering=1)
        with log_file as log, contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(KeyboardInterrupt))
            stack.enter_context(contextlib.redirect_stdout(log))
            stack.enter_context(contextlib.redirect_stderr(log))
            stack.enter_context(_stoppable(folder / plan.CELLS / plan.STOP))
            train(folder, run, where["cells"][run], where["token"], in_parallel=True)
    finally:
        os.chdir(old)


def train(folder: Path, run: str, settings: Mapping[str, Any], token: str, in_parallel: bool) -> None:
    """Train a cell unless another process does, or it is done, and write its status.

    settings: `values` for `compose` and `dataset`, the label. token: names the command that trains it. in_parallel:
    other cells train beside it, so it takes one process only. Raises KeyboardInterrupt after a signal, when all is
    saved.
    """
    from offrl.errors import Interrupted

    with plan.hold(plan.cell_lock(folder, run), patience=2.0) as lock:
        if not lock:
            return
        if plan.finished(folder, run, int(settings["steps"])):
            return
        before = float(plan.read_status(folder, run).get("seconds") or 0.0)
        start = time.monotonic()
        details = {"steps": int(settings["steps"]), "token": token, "host": socket.gethostname(), "pid": os.getpid()}

        def write(status: str, error: str = "", **more: Any) -> None:
            seconds = round(before + time.monotonic() - start, 2)
            plan.write_status(folder, run, status=status, error=error, seconds=seconds, **details, **more)

        write("running")
        try:
            diverged, count = _train(folder, run, settings, in_parallel)
        except (Interrupted, KeyboardInterrupt) as stop:
            step = f": stopped at step {stop.step:,}" if isinstance(stop, Interrupted) else ""
            write("running", f"interrupted{step}")
            raise KeyboardInterrupt from None
        except UserError as error:
            write("failed", " ".join(str(error).split()))
        except Exception as error:  # whatever it was, the other cells go on
            with open_to_append(folder / plan.CELLS / f"{run}.log", "a", encoding="utf-8") as log:
                log.write(printable(traceback.format_exc()))
            write("failed", f"{_words(error)} (traceback in {plan.CELLS}/{run}.log)")
        else:
            seeds = f"{len(diverged)} of {count} replicas diverged: {', '.join(diverged)}" if diverged else ""
            if len(diverged) == count:
                names = ", ".join(diverged)
                write("failed", f"every replica diverged ({names}); a smaller algo.learning_rate often helps")
            else:
                write("done", **({"note": seeds} if seeds else {}))


def _train(folder: Path, run: str, settings: Mapping[str, Any], in_parallel: bool) -> tuple[list[str], int]:
    """Train the run; returns the replicas that diverged, in words, and how many there are."""
    from offrl.data import load_dataset
    from offrl.figures.curves import plot_run
    from offrl.runs.run import SavedRun
    from offrl.settings.compose import compose
    from offrl.system.devices import pick_device
    from offrl.training.loop import train as run_training
    from offrl.training.stages import ready

    config = compose(settings["values"])
    device = pick_device(config.device)
    config.group = group_size(config, device.type)
    if in_parallel:
        config.workers = config.workers or 1
        config.eval.workers = config.eval.workers or 0
    data = load_dataset(config.dataset, str(device), config.quiet)
    if data.spec.name != settings["dataset"]:  # two files of one name in different folders
        data = dataclasses.replace(data, spec=dataclasses.replace(data.spec, name=str(settings["dataset"])))
    home, config.runs_dir = config.runs_dir, str(folder / plan.PARTS)
    config, pretrained = ready(config, data)
    run_training(dataclasses.replace(config, runs_dir=home), data, folder / run, pretrained)
    done = SavedRun(folder / run)
    plot_run(done)
    return [str(r) for r in done.diverged], len(done.replicas)


def group_size(config: Any, device: str) -> int:
    """The number of replicas that train as one program: a function of the settings and the kind of device, not of cores
    or launcher.

    Group sizes decide last bits, so the cores that happen to be free must not decide them. On a CPU half of the
    replicas at most, so that two cores find work where one cell trains at a time; larger groups are hardly faster there
    (docs/benchmarks/speed-journal.md).
    """
    from offrl import registry
    from offrl.settings.replicas import replicas
    from offrl.training.execution import CPU_GROUP

    if config.group is not None:
        return config.group
    if not registry.get("algo", config.algo.name).traits.vectorized:
        return 1
    many = len(replicas(config))
    return min(-(-many // 2), CPU_GROUP) if device == "cpu" else many


def _words(error: Exception) -> str:
    """An unforeseen error in one line."""
    if out_of_memory(error):
        return "out of memory; a smaller algo.batch_size, group=1, fewer jobs=, or dataset.memory=mmap needs less"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:400]


@contextlib.contextmanager
def _stoppable(request: Path) -> Iterator[None]:
    """Ends the work inside as SIGTERM would, saving first, once the file `request` is there, which reaches jobs on any
    machine.
    """
    over = threading.Event()

    def watch() -> None:
        while not over.wait(STOP_SECONDS):
            if request.exists() and not over.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    if request.exists():
        raise KeyboardInterrupt
    with terminable():
        thread = threading.Thread(target=watch, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
