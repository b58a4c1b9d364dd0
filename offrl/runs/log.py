"""Records and displays of a run: metrics.jsonl, scores.csv, timing.jsonl, TensorBoard, a progress bar, the final table.

`metrics.jsonl`, `scores.csv` and `episodes.jsonl` hold nothing that depends on the clock, so that a run that was killed
and resumed ends with the same bytes as one that was not. Times and speeds go to `timing.jsonl`.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.runs.loggers import Loggers
from offrl.runs.parse import header
from offrl.runs.score import BY_TASK, COSTS
from offrl.settings.replicas import Replica
from offrl.system.csv_text import text_of
from offrl.system.files import open_to_append, replacing
from offrl.system.progress import TrainingProgress
from offrl.system.trust import refuse_sparse

SCORE_COLUMNS = (
    "step", "seed", "episodes", "return_mean", "return_std", "length_mean", "success", "score", "dataset",
    "env_id", "packages", "reference", "scored_by",
    "discounted_mean", "q_overestimation", "success_by_task",
)  # fmt: skip
OWN_COLUMNS = {*SCORE_COLUMNS, *BY_TASK, *COSTS}  # all but those of a grid
TIMING = "timing.jsonl"
EPISODES = "episodes.jsonl"  # the single episodes behind scores.csv
BOARD = {  # what TensorBoard calls the columns of scores.csv
    "eval/return": "return_mean", "eval/length": "length_mean", "eval/success": "success", "eval/score": "score",
    "eval/discounted_return": "discounted_mean", "eval/q_overestimation": "q_overestimation",
    "eval/cost": "cost", "eval/safe": "safe",
}  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- files


def write_error(error: OSError, path: Path) -> UserError:
    """The one-line message for a write that failed."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UserError(
            f"disk full while writing {path}; the last checkpoint survives: free some space, then run the same command "
            "again"
        )
    return UserError(
        f"cannot write {path}: {error.strerror or error}; give another run directory, or fix its permissions"
    )


class LineFile:
    """An append-only text file that holds whole lines only: a line that does not fit on the disk is taken back."""

    def __init__(self, path: Path, step_of: Callable[[bytes], int], keep_to: int, header: str = "") -> None:
        """Keeps the lines whose step is at most `keep_to` (and the header); a half-written or unreadable line goes."""
        self.path = path
        head = header.encode()
        lines, old = [head], b""
        try:
            if path.exists():
                refuse_sparse(path)
                old = path.read_bytes()
                for line in old.splitlines(keepends=True):
                    try:
                        if line.endswith(b"\n") and line != head and step_of(line) <= keep_to:
                            lines.append(line)
                    except (ValueError, KeyError, TypeError):  # what a crash of the whole machine leaves behind
                        continue
            new = b"".join(lines)
            if new != old or not path.exists() or path.is_symlink():  # a link within the run becomes a file of its own
                with replacing(path) as out:
                    out.write(new)
            self.file = open_to_append(path, buffering=0)
        except OSError as error:
            raise write_error(error, path) from None

    def write(self, text: str) -> None:
        """Append whole lines. Raises UserError; the file is then as it was."""
        data = text.encode()
        size = os.fstat(self.file.fileno()).st_size
        try:
            while data:
                data = data[self.file.write(data) :]
        except OSError as error:
            os.ftruncate(self.file.fileno(), size)
            raise write_error(error, self.path) from None

    def widen(self, columns: str, count: int) -> None:
        """Give a table `count` more columns, empty so far. columns: the new first line. Raises UserError."""
        _, *lines = self.path.read_text(encoding="utf-8").splitlines()
        self.file.close()
        try:
            with replacing(self.path) as out:
                out.write("".join(f"{line}\n" for line in [columns, *(line + "," * count for line in lines)]).encode())
            self.file = open_to_append(self.path, buffering=0)
        except OSError as error:
            raise write_error(error, self.path) from None

    def sync(self) -> None:
        """Make what was written survive a power failure."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise write_error(error, self.path) from None


def json_step(line: bytes) -> int:
    """The step of a line of JSON."""
    return int(json.loads(line)["step"])


def csv_step(line: bytes) -> int:
    """The step of a line of CSV, its first column."""
    return int(line.split(b",", 1)[0])


def _floats(values: Iterable[Any]) -> list[float | None]:
    """Python floats; None (JSON's null) for what JSON cannot say: NaN and the infinities."""
    numbers = [float(v) for v in (values.tolist() if hasattr(values, "tolist") else values)]
    return [v if math.isfinite(v) else None for v in numbers]


def cell_text(value: Any) -> str:
    """A CSV field; floats so that reading them back gives the same bits."""
    if value is None:
        return ""
    if isinstance(value, (str, Integral)) and not isinstance(value, bool):  # NumPy's integers are Integral, not int
        return str(value)
    number = float(value)
    return repr(number) if math.isfinite(number) else ""


# -------------------------------------------------------------------------------------------------------------- the log


class RunLog:
    """All files that one run writes besides checkpoints. Use it as a context manager, or call `close`.

    Write a step's metrics and scores before its checkpoint (and call `sync` in between): a resumed run drops what came
    after the checkpoint and writes it again.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        resume_step: int | None,
        quiet: bool,
        total_steps: int,
        replicas: Sequence[Replica],
        title: str,
        unscored: int | None = None,
        loggers: Sequence[str] = ("tensorboard",),
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`resume_step`: the step of the checkpoint that the run goes on from; None for a new run, which starts with
        empty files. `replicas`: what the values of `metrics` and the rows of `scores` belong to, in their order.
        `unscored`: the step whose scores come again, because the checkpoint was written before they were there; they
        are the last ones. `loggers`: names of `offrl.runs.loggers`, which are shown the curves, and the `settings` of
        the run.

        Raises UserError when `run_dir` cannot be written to.
        """
        self.run_dir = Path(run_dir)
        self.replicas = tuple(replicas)
        fields = [field for field, _ in self.replicas[0].values]
        if clashes := set(fields) & OWN_COLUMNS:
            raise UserError(
                f"grid.{min(clashes)}: scores.csv has another column of that name; rename that field of the algorithm"
            )
        self._columns = (*SCORE_COLUMNS[:2], *fields, *SCORE_COLUMNS[2:])
        keep_to = -1 if resume_step is None else resume_step
        try:
            self.run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(error, self.run_dir) from None
        self._metrics = LineFile(self.run_dir / "metrics.jsonl", json_step, keep_to)
        scores_to = keep_to if unscored is None else unscored - 1
        path = self.run_dir / "scores.csv"
        if resume_step is not None:
            known = header(path).split(",")
            self._columns += tuple(name for name in (*BY_TASK, *COSTS) if name in known)
        self._scores = LineFile(path, csv_step, scores_to, header=",".join(self._columns) + "\n")
        self._episodes = LineFile(self.run_dir / EPISODES, json_step, scores_to)
        self._timing = LineFile(self.run_dir / TIMING, json_step, keep_to)
        # TensorBoard's purge takes metrics of these steps too
        lines = self._metrics.path.read_bytes().splitlines() if scores_to < keep_to else []
        again = [json.loads(line) for line in lines if json_step(line) > scores_to]
        self._loggers = Loggers(list(loggers), self.run_dir, self.replicas, scores_to + 1, again, settings or {})
        self._final: tuple[int, dict[str, list[float | None]]] | None = None  # the last scores
        count = f"{len(self.replicas)} {'replicas' if fields else 'seeds'}" if len(self.replicas) > 1 else ""
        self._show = TrainingProgress(title, total_steps, len(self.replicas), count, resume_step or 0, quiet)
        self._closed = False

    def metrics(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Training metrics at `step`: name -> one value per replica, in their order. What is not finite becomes
        null.
        """
        rows = {name: _floats(column) for name, column in values.items()}
        self._metrics.write(json.dumps({"step": int(step), **rows}, allow_nan=False) + "\n")
        self._shown(lambda logger: logger.scalars(step, rows))

    def scores(
        self,
        step: int,
        rows: Sequence[Mapping[str, Any]],
        returns: Any = None,
        lengths: Any = None,
        costs: Any = None,
    ) -> None:
        """Evaluation results at `step`: one row per replica, in their order, with the keys of SCORE_COLUMNS (`step` and
        the grid's values are filled in, the rest stays empty), of BY_TASK of multi-task data, and of COSTS where there
        are costs. `returns`
        (undiscounted), `lengths` (steps) and `costs`, all [N, E]: of the single episodes, for episodes.jsonl; the
        returns for TensorBoard too."""
        for names, due in ((BY_TASK, BY_TASK[0] in rows[0]), (COSTS, costs is not None)):
            if due and names[0] not in self._columns:
                self._columns += names
                self._scores.widen(",".join(self._columns), len(names))
        lines = []
        for replica, row in zip(self.replicas, rows, strict=True):
            if unknown := set(row) - {*self._columns}:
                raise ValueError(f"scores.csv has no column {sorted(unknown)}")
            full = {**row, "step": int(step), **dict(replica.values)}
            lines.append([cell_text(full.get(name)) for name in self._columns])
        self._scores.write(text_of(lines))
        if returns is not None:
            counts = {} if lengths is None else {"lengths": [[int(n) for n in row] for row in lengths]}
            spent = {} if costs is None else {"costs": [_floats(row) for row in costs]}
            line = {"step": int(step), "returns": [_floats(row) for row in returns], **counts, **spent}
            self._episodes.write(json.dumps(line, allow_nan=False) + "\n")
        columns = {tag: [row.get(key) for row in rows] for tag, key in BOARD.items()}
        shown = {tag: _floats(v) for tag, v in columns.items() if all(x is not None for x in v)}
        self._final = step, shown

        def show(logger: Any) -> None:
            logger.scalars(step, shown)
            if returns is not None:
                logger.histogram(step, "eval/episode_returns", returns)

        self._shown(show)

    def hparams(self, settings: Mapping[str, Any]) -> None:
        """Put the run, with its settings and its last scores, into TensorBoard's HPARAMS table. Nothing where this log
        has no scores.
        """
        if self._final is not None:
            step, results = self._final
            self._shown(
                lambda logger: logger.hparams(step, settings, {k.removeprefix("eval/"): v for k, v in results.items()})
            )

    def timing(self, step: int, **seconds: float) -> None:
        """Durations (seconds) and speeds at `step`."""
        self._timing.write(
            json.dumps({"step": int(step), **{k: round(float(v), 4) for k, v in seconds.items()}}) + "\n"
        )

    def progress(self, step: int, steps_per_second: float, extra: str = "") -> None:
        """Show how far the run is. `extra` is the last evaluation's result; a new one is always shown."""
        self._show.update(step, steps_per_second, extra)

    def say(self, message: str) -> None:
        """One line for the reader, above the progress bar. Nothing when quiet."""
        self._show.say(message)

    def sync(self) -> None:
        """Make what was written survive a power failure. Call it before a checkpoint that relies on it is put in
        place.
        """
        self._metrics.sync()
        self._scores.sync()
        self._episodes.sync()

    def close(self) -> None:
        """Take the progress bar down and close the files. May be called twice."""
        if self._closed:
            return
        self._closed = True
        self._show.stop()
        for lines in (self._metrics, self._scores, self._episodes, self._timing):
            lines.file.close()
        try:
            self._loggers.close()
        except OSError as error:
            raise write_error(error, self.run_dir / "tensorboard") from None

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _shown(self, show: Callable[[Any], None]) -> None:
        try:
            self._loggers.show(show)
        except OSError as error:
            raise write_error(error, self.run_dir / "tensorboard") from None


class NoLog:
    """The log of a process that shares a run with the one that writes: `RunLog`'s methods do nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None

    def __enter__(self) -> NoLog:
        return self

    def __exit__(self, *_: object) -> None: ...
