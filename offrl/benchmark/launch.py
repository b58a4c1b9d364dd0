"""Cells handed to processes of this machine, or to Hydra's launchers: Ray, Slurm. Cells' files say which are done,
failed or lost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offrl.benchmark import plan
from offrl.errors import UserError, nearest
from offrl.settings.compose import flatten
from offrl.settings.evaluation import cores
from offrl.settings.presets import check_entries, config_folder, config_names, read_yaml
from offrl.system import children
from offrl.system.files import open_to_append

KEYS = ("plugin", "package", "extra", "command", "jobs", "batches", "settings")
LOCAL = "local"
QUIET_SECONDS = 3.0  # after a launcher gave up: how long no cell may begin before those that wait are sent again


@dataclass(frozen=True)
class Launcher:
    """A launcher of configs/launcher."""

    name: str
    plugin: str  # Hydra's name for it; LOCAL: processes of our own; empty: cells run in this process
    jobs: str | None = None  # the plugin's setting for how many cells run at once
    batches: bool = False  # starts all that it is given at once: it gets `jobs` cells at a time
    settings: dict[str, Any] = field(default_factory=dict)  # of the plugin, dotted


def load(name: str, settings: Mapping[str, Any]) -> Launcher:
    """The launcher `name`, one of configs/launcher or the path of a YAML file like them, with a command's `settings`
    over its own.

    Raises UserError for an unknown name, and where its package is missing.
    """
    known = config_names("launcher")
    path = Path(name).expanduser()
    if name.replace("-", "_") in known:
        path = config_folder() / "launcher" / f"{name.replace('-', '_')}.yaml"
    elif path.suffix not in (".yaml", ".yml"):
        raise UserError(
            f"unknown launcher '{name}'.{nearest(name, known)} Known: {', '.join(known)}; or launcher=FILE.yaml"
        )
    values = read_yaml(path)
    check_entries(values, KEYS, str(path))
    plugin, package, extra = (str(values.get(k) or "") for k in ("plugin", "package", "extra"))
    if plugin in ("", LOCAL) and settings:
        raise UserError(
            f"launcher={path.stem} has no settings, so launcher.{next(iter(settings))} does nothing; choose ray or "
            "slurm"
        )
    if package and not _there(package):
        raise UserError(f"launcher={path.stem} needs pip install 'offrl[{extra}]'")
    program = str(values.get("command") or "")
    if program and shutil.which(program) is None:
        raise UserError(
            f"launcher={path.stem} needs the command {program}, which this machine does not have; launcher=slurm_local "
            "does without"
        )
    options = {**flatten(values.get("settings") or {}), **settings}
    return Launcher(path.stem, plugin, values.get("jobs"), bool(values.get("batches")), options)


def jobs_of(launcher: Launcher, folder: Path, jobs: int | None) -> Jobs | None:
    """The launcher, set up for the cells of the benchmark in `folder`; None: they train in this process. Raises
    UserError.
    """
    if not launcher.plugin:
        return None
    return (
        LocalJobs(launcher.name, folder, jobs or cores())
        if launcher.plugin == LOCAL
        else HydraJobs(launcher, folder, jobs)
    )


def _there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


class Jobs(ABC):
    """Several cells of one benchmark at once, each in a process of its own. Making one checks its settings; it starts
    nothing.
    """

    batch: int | None = None  # cells that are handed over at a time; None: all of them

    def __init__(self, name: str, folder: Path, jobs: int) -> None:
        self.name, self.folder, self.jobs = name, folder, jobs
        self.at_once = jobs

    @abstractmethod
    def _train(self, runs: Sequence[str]) -> str:
        """Train the cells and wait; in words, why a process died or the launcher gave up."""

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """Surrounds the training of all cells."""
        yield

    def run(self, runs: Sequence[str], token: str) -> None:
        """Train the cells whose run directories are called `runs`; returns when none of them is at work or waits.

        A launcher that gives up because one worker died is asked again for the cells that had not begun. A cell whose
        worker died, and one that never began, is written down as failed.
        """
        waiting = list(runs)
        with plan.environment(_variables()), self._running():
            while waiting:
                now = waiting[: self.batch]
                error = self._train(now)
                self._settle(now, patient=bool(error))
                if (self.folder / plan.CELLS / plan.STOP).exists():
                    return
                statuses = {r: plan.read_status(self.folder, r) for r in now}
                begun = {r: s for r, s in statuses.items() if s.get("token") == token or s.get("status") == "done"}
                for run, status in begun.items():
                    if status["status"] == "running":
                        reason = (
                            f"its worker died ({error or 'no reason given'}); the next command goes on from its last "
                            "checkpoint"
                        )
                        plan.write_status(self.folder, run, **{**status, "status": "failed", "error": reason})
                unfinished = [r for r in now if r not in begun and not plan.at_work(self.folder, r)]
                if not begun or not error:
                    for run in unfinished:
                        reason = f"the launcher {self.name} did not begin it ({error or 'no reason given'})"
                        plan.write_status(self.folder, run, status="failed", error=reason, seconds=0.0, token=token)
                    unfinished = []
                waiting = unfinished + waiting[len(now) :]

    def _settle(self, runs: Sequence[str], patient: bool) -> None:
        """Wait until none of the cells is at work; after a launcher gave up also until no other one begins."""
        quiet = time.monotonic()
        while True:
            if any(plan.at_work(self.folder, r) for r in runs):
                quiet = time.monotonic()
            elif not patient or time.monotonic() - quiet > QUIET_SECONDS:
                return
            time.sleep(0.2)


class LocalJobs(Jobs):
    """Processes of this machine, one for each cell, `jobs` at once."""

    def _train(self, runs: Sequence[str]) -> str:
        from offrl.system.processes import ending

        waiting, working, reasons = list(runs), list[subprocess.Popen[bytes]](), dict[str, None]()
        stop = self.folder / plan.CELLS / plan.STOP
        while working or (waiting and not stop.exists()):
            while waiting and len(working) < self.jobs and not stop.exists():
                working.append(self._start(waiting.pop(0)))
            time.sleep(0.05)
            ended = [process for process in working if process.poll() is not None]
            working = [process for process in working if process not in ended]
            reasons |= {f"it {ending(process)}": None for process in ended if process.returncode}
        return " or ".join(reasons)

    def _start(self, run: str) -> subprocess.Popen[bytes]:
        """In a session of its own, so that Ctrl-C in the terminal does not reach it: it is asked to stop by a file."""
        with open_to_append(self.folder / plan.CELLS / f"{run}.log") as log:
            return children.start("offrl.benchmark.cell:work", [str(self.folder), run], stdout=log, stderr=log)


class HydraJobs(Jobs):
    """A launcher plugin of Hydra."""

    def __init__(self, launcher: Launcher, folder: Path, jobs: int | None) -> None:
        """Raises UserError for a setting that the launcher does not have."""
        from hydra import compose, initialize_config_dir
        from hydra._internal.callbacks import Callbacks
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.plugins import Plugins
        from hydra.types import HydraContext

        from offrl.benchmark.cell import job

        super().__init__(launcher.name, folder, jobs or cores())
        self.launcher = launcher
        fixed = [
            f"hydra/launcher={launcher.plugin}",
            "hydra/job_logging=none",
            "hydra/hydra_logging=none",
            "hydra.output_subdir=null",
            "hydra.job.chdir=false",
            "hydra.job.name=offrl",
            f"hydra.sweep.dir={_quoted(str(folder / plan.CELLS))}",
            "hydra.sweep.subdir=.",
        ]
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(config_folder().resolve()), version_base="1.3", job_name="offrl"):
            config = compose(None, overrides=fixed, return_hydra_config=True)
            loader = GlobalHydra.instance().config_loader()
        node = config.hydra.launcher
        settings = dict(launcher.settings)
        remote = launcher.plugin == "ray" and settings.get("ray.init.address") not in (None, "local")
        # a cluster has its own number
        if launcher.jobs and not remote and (jobs is not None or launcher.jobs not in settings):
            settings[launcher.jobs] = self.jobs
        if remote:  # options that only a cluster of our own takes
            settings = {
                k: v
                for k, v in settings.items()
                if k not in ("ray.init.object_store_memory", "ray.init.include_dashboard")
            }
        for name, value in settings.items():
            _set(node, name, value, launcher.name)
        most = settings.get(launcher.jobs or "", self.jobs)
        self.at_once = most if isinstance(most, int) and most > 0 else cores()
        self.batch = self.jobs if launcher.batches else None
        context = HydraContext(config_loader=loader, callbacks=Callbacks())
        self.hydra: Any = Plugins.instance().instantiate_launcher(
            hydra_context=context, task_function=job, config=config
        )

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        """A running Ray, where that is the launcher, ended afterwards. The plugin's own start cannot join a cluster: it
        always asks for an object store. Raises UserError where there is no cluster."""
        if self.launcher.plugin != "ray":
            yield
            return
        import ray
        from omegaconf import OmegaConf

        started = not ray.is_initialized()
        if started:
            try:
                settings: Any = OmegaConf.to_container(self.hydra.ray_cfg.init, resolve=True)
                ray.init(**settings)
            except Exception as error:  # Ray has many ways to say so
                raise UserError(
                    f"launcher={self.launcher.name} cannot start: {' '.join(str(error).split())[:300]}"
                ) from None
        try:
            yield
        finally:
            if started:
                ray.shutdown()

    def _train(self, runs: Sequence[str]) -> str:
        overrides = [[f"+folder={_quoted(str(self.folder))}", f"+run={_quoted(run)}"] for run in runs]
        try:
            self.hydra.launch(overrides, 0)
        except Exception as error:  # each launcher has its own, for a worker that died or a cluster that is not there
            first = " ".join(str(error).split()).partition(". ")[0]
            return f"{type(error).__name__}: {first}"[:240]
        return ""


def _quoted(text: str) -> str:
    """A string as a value of Hydra's grammar."""
    escaped = text.replace("'", "\\'")
    return f"'{escaped}'"


def _set(node: Any, name: str, value: Any, launcher: str) -> None:
    """Set one value of a plugin's config. Raises UserError for a name that it does not have, or a value of a wrong
    kind.
    """
    from omegaconf import DictConfig, OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    parts = name.split(".")
    at = node
    for i, part in enumerate(parts):
        free = isinstance(at, DictConfig) and OmegaConf.get_type(at) is dict  # entries of any name
        if not isinstance(at, DictConfig) or (part not in at and not free):
            known = [str(k) for k in at if not str(k).startswith("_")] if isinstance(at, DictConfig) else []
            prefix = "".join(f"{p}." for p in parts[:i])
            hint = f"{nearest(part, known)} It has: {', '.join(prefix + k for k in known)}" if known else ""
            raise UserError(f"launcher.{name}: {launcher} has no such setting.{hint}")
        at = at._get_node(part) if part in at else OmegaConf.create({})
    try:
        with open_dict(node):
            OmegaConf.update(node, name, value, force_add=True)
    except OmegaConfBaseException as error:
        raise UserError(f"launcher.{name}={value}: {str(error).splitlines()[0]}") from None


def _variables() -> dict[str, str]:
    """Environment variables of worker processes: our module path, so that they find what this process finds, and no
    statistics sent by Ray.
    """
    return {
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(str(Path(p).resolve()) for p in sys.path if isinstance(p, str))),
        "RAY_USAGE_STATS_ENABLED": os.environ.get("RAY_USAGE_STATS_ENABLED", "0"),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
