"""Kill real jobs at random moments, look for processes that stay behind, continue the jobs, and compare what they
leave.

    python scripts/kill_check.py --kills 100 --seed 0                     # every kind of job in turn
    python scripts/kill_check.py --kills 10 --only finetune,export --keep /tmp/kills

Each kind of job runs once undisturbed. Then, in fresh folders, it is started, its main process gets a signal at a
moment drawn over the whole duration (SIGKILL mostly, SIGTERM and SIGINT else), and the same command is given again: at
most CHAIN signals to a job, then it runs to its end. After each signal every process that descends from the main one
(known by a mark in its environment, or seen as a descendant before) must be gone SECONDS after the main one is: those
that are not count as "left". A signal that finds the job over is drawn again.

All files of the job's folder are compared byte for byte with those of the undisturbed job, except what is of the clock,
of the process or of the moment of the signal: see `OTHERWISE`. TensorBoard's files are compared by what they show.
Linux only: it reads /proc. The exit status is 1 where a file differs, a process is left, or a job does not go on.
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import functools
import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = "OFFRL_KILL_CHECK"
COMPILERS = ("g++", "c++", "clang++", "cc1plus", "collect2", "as", "ld")  # which finish their file
SECONDS = 5.0  # after which nothing may be left
CHAIN = 4  # signals to one job
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
OTHERWISE = {  # files that are not compared byte for byte, and why
    "*timing.jsonl": "the clock",
    "*.lock": "empty",
    "*.log": "the screen's lines",
    "*tensorboard/*": "compared by what they show",
    "*/cells/*.json": "a cell's clock, host and process number",
    "*/checkpoints/latest": "the names of the checkpoints kept",
    "*/checkpoints/step_*": "the last one's tensors are compared; one of the moment of SIGTERM may stand before it",
    "*/replay/*": "compared as one: SIGTERM ends a part early",
    "*/policy_*/*": "a collection's episodes, in the same way",
    "*/benchmark.json": "the moment it began",
    "*/.submitit/*": "Slurm's stand-in: process numbers are their names",
    "cache/*": "compiled code",
}
TRAIN = (
    "compile=eager device=cpu compare=[] quiet=true log_every=50 eval.episodes=2 eval.max_steps=40 runs_dir=. name=run"
)


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of job: a command of offrl, in which {inputs} is the folder that `prepare` fills."""

    command: str
    share: int = 2  # of the kills; 0: only when it is asked for by `--only`
    environment: tuple[tuple[str, str], ...] = ()


BENCHMARK = Kind(
    "benchmark suite=own datasets=[{inputs}/small.hdf5] algos=[bc,iql] seeds=1 steps=400 compile=eager device=cpu "
    "algo.hidden=[8] algo.batch_size=16 eval.env=Hopper-v5 eval.episodes=1 eval.max_steps=20 eval.every=200 "
    "log_every=50 checkpoint.every=50 runs_dir=. name=grid quiet=true"
)
KINDS = {
    "training with evaluation workers": Kind(
        "train algo=td3_bc dataset=builtin seeds=1 steps=800 workers=1 eval.workers=2 eval.every=100 "
        f"checkpoint.every=100 algo.hidden=[16,16] algo.batch_size=16 {TRAIN}"
    ),
    "training in several workers": Kind(
        "train algo=bc dataset=builtin seeds=2 group=1 steps=1200 workers=2 eval.workers=1 eval.every=500 "
        f"checkpoint.every=100 algo.hidden=[16,16] algo.batch_size=16 {TRAIN}"
    ),
    "training, compiled": Kind(
        "train algo=bc dataset=builtin seeds=1 steps=800 workers=1 eval.workers=0 eval.every=500 checkpoint.every=200 "
        f"algo.hidden=[16] algo.batch_size=16 {TRAIN.replace('compile=eager', 'compile=compiled')}",
        share=1,
        environment=(("OFFRL_CACHE", "cache"),),
    ),
    "fine-tuning": Kind(
        "finetune {inputs}/run env=Hopper-v5 steps=300 eval.every=100 checkpoint.every=50 compile=eager device=cpu "
        "eval.episodes=1 eval.workers=1 max_steps=40 log_every=50 runs_dir=. name=run quiet=true"
    ),
    "benchmark, cells in processes": dataclasses.replace(
        BENCHMARK, command=f"{BENCHMARK.command} launcher=local jobs=2"
    ),
    "cells of Slurm's local stand-in": dataclasses.replace(
        BENCHMARK, command=f"{BENCHMARK.command} launcher=slurm_local jobs=2", share=0
    ),
    "cells of Ray": dataclasses.replace(BENCHMARK, command=f"{BENCHMARK.command} launcher=ray jobs=2", share=0),
    "world model": Kind(
        "train algo=dynamics dataset=builtin seeds=1 steps=400 workers=1 checkpoint.every=50 algo.hidden=[16,16] "
        f"algo.members=3 algo.elites=2 algo.batch_size=16 algo.epoch=100 {TRAIN}"
    ),
    "policy in a world model": Kind(
        "train algo=mopo dataset=builtin seeds=1 steps=200 workers=1 eval.workers=1 eval.every=100 "
        f"checkpoint.every=50 world_model={{inputs}}/model algo.hidden=[16,16] algo.batch_size=16 algo.members=3 "
        f"algo.rollouts=16 algo.horizon=2 algo.rollout_every=50 {TRAIN}"
    ),
    "collection": Kind("collect env=Hopper-v5 policy={inputs}/run rows=6000 max_steps=300 out=out quiet=true"),
    "conversion": Kind("data convert {inputs}/large.hdf5 out.hdf5 force=true", share=1),
    "export": Kind("export {inputs}/run format=onnx out=out", share=1),
}


def words_of(kind: Kind, inputs: Path) -> list[str]:
    return [sys.executable, "-m", "offrl.cli", *shlex.split(kind.command.format(inputs=inputs))]


def prepare(inputs: Path) -> None:
    """What the jobs begin with: a small trained run, and two files."""
    import h5py
    import numpy as np

    inputs.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, rows in (("small", 2_000), ("large", 400_000)):
        with h5py.File(inputs / f"{name}.hdf5", "w") as file:
            file["observations"] = rng.normal(size=(rows, 11)).astype(np.float32)
            file["actions"] = rng.uniform(-1, 1, (rows, 3)).astype(np.float32)
            file["rewards"] = rng.normal(size=rows).astype(np.float32)
            file["terminals"] = np.zeros(rows, bool)
            file["timeouts"] = np.arange(rows) % 100 == 99
    small = f"dataset=builtin algo.hidden=[16,16] algo.batch_size=16 eval.workers=0 workers=1 {TRAIN}"
    model = f"train algo=dynamics steps=100 seeds=1 {small} algo.members=3 algo.elites=2 algo.epoch=50 name=model"
    for command in (f"train algo=iql seeds=2 steps=100 {small}", model.replace(" name=run", "")):
        start([sys.executable, "-m", "offrl.cli", *shlex.split(command)], inputs, {}, "prepare").finish()


# ----------------------------------------------------------------------------------------------------------------
# processes


class Job:
    """A started command, its output in a file beside the folder it works in, and the processes that descend from it."""

    def __init__(self, process: subprocess.Popen[bytes], mark: str, output: Path) -> None:
        self.process, self.mark, self.output = process, mark.encode(), output
        self.began = time.monotonic()

    def finish(self, seconds: float = 900.0) -> float:
        """Seconds until its end. Raises RuntimeError where it fails."""
        try:
            status = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        if status:
            raise RuntimeError(f"status {status}: {self.output.read_text(errors='replace')[-2000:]}")
        return time.monotonic() - self.began

    def marked(self) -> dict[tuple[int, str], str]:
        """{(number, time of its start): command} of the living processes with this job's mark, but for the main one."""
        living = {}
        for number in filter(str.isdigit, os.listdir("/proc")):
            try:
                environment = Path(f"/proc/{number}/environ").read_bytes()
                if int(number) != self.process.pid and self.mark in environment and (about := stat(int(number))):
                    living[int(number), about[2]] = command(int(number))
            except OSError:
                continue
        return living

    def descendants(self) -> dict[tuple[int, str], str]:
        """The same of all processes below the main one, whatever they did to their environment."""
        table = {int(n): about for n in filter(str.isdigit, os.listdir("/proc")) if (about := stat(int(n)))}
        below = {self.process.pid}
        while more := {n for n, about in table.items() if about[1] in below} - below:
            below |= more
        return {(n, table[n][2]): command(n) for n in below - {self.process.pid}}


def stat(number: int) -> tuple[str, int, str] | None:
    """(state, parent, time of its start) of a process; None for one that is gone, or ended and was not waited for."""
    try:
        fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else (fields[0], int(fields[1]), fields[19])


def command(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    except OSError:
        return "?"


def start(words: list[str], folder: Path, more: dict[str, str], name: str) -> Job:
    mark = f"{MARK}={uuid.uuid4().hex}"
    variable, _, value = mark.partition("=")
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more, variable: value}
    output = folder.with_name(f"{folder.name}.{name}.out")
    with open(output, "wb") as out:
        process = subprocess.Popen(
            words,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
            preexec_fn=usual,
        )
    return Job(process, mark, output)


def usual() -> None:
    """Signals as in a terminal: a shell that starts this script in the background has Ctrl-C ignored."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@dataclasses.dataclass
class Hit:
    """One signal that found its job at work."""

    number: int
    moment: float  # seconds since the start
    processes: int  # at work beside the main one
    last: float  # seconds after the main one's end at which the last of them was gone
    left: list[str]  # those there after SECONDS


def strike(job: Job, number: int, moment: float) -> Hit | None:
    """Send the signal at its moment; None where the job ends before, or ends well in spite of it."""
    try:
        job.process.wait(max(0.0, job.began + moment - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass
    else:
        return None
    before = {**job.descendants(), **job.marked()}
    at = time.monotonic() - job.began
    job.process.send_signal(number)
    watched = dict(before)
    while job.process.poll() is None:  # it may save first
        watched |= job.marked()
        time.sleep(0.01)
    over = time.monotonic()
    if job.process.returncode == 0:
        return None
    last = 0.0
    while True:
        watched |= job.marked()
        alive = {key: words for key, words in watched.items() if (about := stat(key[0])) and about[2] == key[1]}
        passed = time.monotonic() - over
        if not alive or passed > SECONDS:
            break
        last = passed
        time.sleep(0.005)
    left = [words for words in alive.values() if Path(words.split()[0]).name.split("-")[-1] not in COMPILERS]
    for number_, _ in alive:
        os.kill(number_, signal.SIGKILL)
    return Hit(number, at, len(before), last, left)


# ----------------------------------------------------------------------------------------------------------------
# results


def compared(folder: Path) -> dict[str, Any]:
    """{name: content} of what must be equal."""
    import torch

    from offrl.system import files

    def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
        return {name: t.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for name, t in tensors.items()}

    contents: dict[str, Any] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(path.relative_to(folder))
        if not any(
            fnmatch.fnmatch(f"/{name}", f"*/{pattern}") or fnmatch.fnmatch(name, pattern) for pattern in OTHERWISE
        ):
            contents[name] = path.read_bytes()
    for checkpoints in sorted(folder.rglob("checkpoints")):
        last = max(checkpoints.glob("step_*.safetensors"), default=None)
        if last is not None:
            tensors, meta = files.read(last)
            about = {k: v for k, v in meta.items() if k != "files"}  # how many parts the replay has
            contents[str(last.relative_to(folder))] = bits(tensors), about
    for rows in sorted([*folder.rglob("replay"), *folder.rglob("episodes/policy_*")]):
        parts = [files.read(path)[0] for path in sorted(rows.glob("*.safetensors"))]
        contents[str(rows.relative_to(folder))] = bits(
            {k: torch.cat([part[k] for part in parts]) for k in parts[0]} if parts else {}
        )
    for board in sorted(folder.rglob("tensorboard")):
        contents[str(board.relative_to(folder))] = shown(board)
    return contents


def shown(board: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def differences(folder: Path, expected: dict[str, Any]) -> list[str]:
    contents = compared(folder)
    missing = [f"{name} is missing" for name in expected if name not in contents]
    return missing + [
        f"{n} {'differs' if n in expected else 'is there'}" for n in contents if contents[n] != expected.get(n)
    ]


# ---------------------------------------------------------------------------------------------------------------- the
# check


@dataclasses.dataclass
class Tally:
    """What came of a kind's jobs."""

    duration: float
    hits: list[Hit] = dataclasses.field(default_factory=list)
    jobs: int = 0
    different: list[str] = dataclasses.field(default_factory=list)


def check(name: str, kind: Kind, kills: int, rng: random.Random, place: Path, inputs: Path, keep: bool) -> Tally:
    """Signals to jobs of one kind."""
    say = functools.partial(print, flush=True)
    words, tag = words_of(kind, inputs), name.replace(",", "").replace(" ", "-")

    def begin(folder: Path, part: str) -> Job:
        return start(words, folder, dict(kind.environment), part)

    work = place / "job"  # for all of them: some files hold their own place
    work.mkdir()
    seconds = begin(work, "0").finish()
    expected = compared(work)
    work.rename(place / f"{tag}-undisturbed")
    tally = Tally(seconds)
    say(f"{name}: {seconds:.1f} s undisturbed, {len(expected)} files compared")
    while len(tally.hits) < kills:
        folder = place / f"{tag}-{tally.jobs}"
        work.mkdir()
        tally.jobs += 1
        begun = len(tally.hits)
        for part in range(min(CHAIN, kills - begun)):
            number = rng.choice(SIGNALS)
            job = begin(work, str(part))
            hit = strike(job, number, rng.uniform(0.0, seconds))
            if hit is None:
                if job.process.returncode:
                    tally.different.append(
                        f"{folder.name}: ended by itself: {job.output.read_text(errors='replace')[-600:]}"
                    )
                break
            tally.hits.append(hit)
            about = (
                f"{signal.Signals(number).name} after {hit.moment:.1f} s, {hit.processes} processes, last gone after "
                f"{hit.last:.2f} s"
            )
            say(f"  {folder.name}: {about}" + (f"; LEFT: {hit.left}" if hit.left else ""))
        try:
            begin(work, "end").finish()
            faults = differences(work, expected)
        except RuntimeError as error:
            faults = [f"does not go on: {error}"]
        work.rename(folder)
        if faults:
            tally.different.append(f"{folder.name}: {'; '.join(faults)}")
            say(f"  {folder.name}: DIFFERENT: {'; '.join(faults)}")
        elif not keep:
            shutil.rmtree(folder)
    return tally


def table(tallies: dict[str, Tally]) -> list[str]:
    head = [
        "job",
        "seconds",
        "kills (KILL/TERM/INT)",
        "moments",
        "processes",
        "differences",
        "left after 5 s",
        "longest survivor",
    ]
    rows = []
    for name, tally in tallies.items():
        hits, moments = tally.hits, sorted(h.moment for h in tally.hits)
        counts = "/".join(str(sum(h.number == n for h in hits)) for n in dict.fromkeys(SIGNALS))
        rows.append([
            name, f"{tally.duration:.0f}", f"{len(hits)} ({counts})", f"{moments[0]:.1f} to {moments[-1]:.1f} s",
            f"up to {max(h.processes for h in hits)}", str(len(tally.different)), str(sum(len(h.left) for h in hits)),
            f"{max(h.last for h in hits):.2f} s",
        ])  # fmt: skip
    hits = [h for tally in tallies.values() for h in tally.hits]
    rows.append(
        [
            "all",
            "",
            str(len(hits)),
            "",
            "",
            str(sum(len(t.different) for t in tallies.values())),
            str(sum(len(h.left) for h in hits)),
            f"{max(h.last for h in hits):.2f} s",
        ]
    )
    return ["| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help=f"kinds, by words in their names: {', '.join(KINDS)}")
    parser.add_argument("--keep", type=Path, help="a folder for all jobs' files, which are kept")
    options = parser.parse_args()
    asked = [word.strip() for word in options.only.split(",") if word.strip()]
    kinds = {name: kind for name, kind in KINDS.items() if not asked or any(word in name for word in asked)}
    if asked:
        kinds = {name: dataclasses.replace(kind, share=max(1, kind.share)) for name, kind in kinds.items()}
    total = sum(kind.share for kind in kinds.values())
    edges = [0]
    for kind in kinds.values():
        edges.append(edges[-1] + kind.share)
    kills = [
        options.kills * b // total - options.kills * a // total for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]
    tallies: dict[str, Tally] = {}
    with tempfile.TemporaryDirectory(prefix="offrl-kills-") as temporary:
        place = options.keep or Path(temporary)
        place.mkdir(parents=True, exist_ok=True)
        prepare(place / "inputs")
        for (name, kind), count in zip(kinds.items(), kills, strict=True):
            if count:
                rng = random.Random(f"{options.seed} {name}")
                tallies[name] = check(name, kind, count, rng, place, place / "inputs", options.keep is not None)
        print("\n" + "\n".join(table(tallies)))
        for tally in tallies.values():
            for line in tally.different:
                print(f"different: {line}")
        (place / "kills.json").write_text(
            json.dumps({k: dataclasses.asdict(t) for k, t in tallies.items()}, indent=1, default=str)
        )
    return int(any(t.different or any(h.left for h in t.hits) for t in tallies.values()))


if __name__ == "__main__":
    sys.exit(main())
