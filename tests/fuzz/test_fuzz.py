"""Damaged files of every layout, loaded and judged; and the fuzzer itself, which must see what it looks for."""

from __future__ import annotations

import ast
import dataclasses
import os
import signal
import threading
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl.errors import UserError
from tests.fuzz import case
from tests.fuzz.oracle import judge
from tests.fuzz.runner import Worker, fuzz, summary, table

CASES = 3500  # about two minutes of one core


@pytest.mark.parametrize("layout", case.ALL)
def test_sound_files_load_as_the_oracle_reads_them(layout: str, tmp_path: Path) -> None:
    path, changes = case.make(layout, 36, 0, tmp_path, sound=True)
    result = case.run(*case.settings_of(tmp_path))
    # with a record of offrl's, and of robot data, the oracle leaves room
    sound = result.verdict == "valid" or layout in ("real", "written", "lerobot", "robomimic", "vd4rl")
    assert changes == [] and result.outcome == "right" and sound, (path, result)


@pytest.fixture
def d4rl(tmp_path: Path) -> Path:
    return case.make("d4rl", 36, 0, tmp_path, sound=True)[0]


def test_the_outcomes(d4rl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader with each fault is found out."""
    sound = case.load(d4rl, {})

    def outcome(answer: Any) -> str:
        def load(path: Path, config: dict[str, Any]) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer

        monkeypatch.setattr(case, "load", load)
        return case.run(d4rl, {}).outcome

    def changed(name: str) -> Any:
        column = sound.columns[name].clone()
        column[0] = ~column[0] if column.dtype == np.bool_ or str(column.dtype) == "torch.bool" else column[0] + 0.25
        return dataclasses.replace(sound, columns=sound.columns | {name: column})

    assert outcome(sound) == "right"
    for name in (
        "observations",
        "actions",
        "rewards",
        "terminations",
        "truncations",
        "next_observations",
        "successor_known",
    ):
        assert outcome(changed(name)) == "wrong", name
    assert (
        outcome(dataclasses.replace(sound, episode_end=sound.episode_end[1:], episode_start=sound.episode_start[1:]))
        == "wrong"
    )
    assert outcome(KeyError("rewards")) == "traceback"
    assert outcome(MemoryError()) == "memory"
    assert outcome(UserError(f"{d4rl}: no")) == "strict"
    assert outcome(UserError("somewhere: no")) == outcome(UserError(f"{d4rl}:\nno")) == "unclear"
    with h5py.File(d4rl, "a") as file:
        file["timeouts" if "timeouts" not in file else "episode_ids"] = h5py.SoftLink("/nowhere")
    assert outcome(sound) == "wrong"
    assert outcome(UserError(f"{d4rl}: no")) == "refused"


def test_what_the_oracle_refuses(tmp_path: Path) -> None:
    """The mistakes of issue 36, each by itself."""
    rows = 60
    columns = {
        "observations": np.arange(rows, dtype=np.float32)[:, None],
        "actions": np.linspace(-0.9, 0.9, rows, dtype=np.float32)[:, None],
        "rewards": np.ones(rows, np.float32),
        "episode_ends": np.arange(9, rows, 10),
    }

    def kind(**changes: Any) -> str:
        path = tmp_path / "case.npz"
        np.savez(path, **{k: v for k, v in (columns | changes).items() if v is not None})
        return judge(path, {}).kind

    assert kind() == "valid"
    assert kind(episode_ends=np.arange(10, rows, 10)) == "refuse"  # exclusive, without the last
    assert kind(episode_ends=np.arange(10, rows + 1, 10)) == "refuse"  # one-based
    assert kind(terminals=np.full(rows, 0.5)) == "refuse"
    assert kind(actions=np.where(np.arange(rows) == 3, 10**9, 0)) == "refuse"
    # no OGBench by its name
    assert kind(rewards=None, terminals=np.arange(rows) % 10 == 9, episode_ends=None) == "refuse"
    assert kind(episode_ends=None) == "refuse"
    assert kind(episode_ids=np.arange(rows) % 2) == "either"  # with a warning


def test_the_oracle_stands_apart() -> None:
    for path in Path(case.__file__).parent.glob("oracle/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [a.name for a in node.names] if isinstance(node, ast.Import) else [str(getattr(node, "module", ""))]
            )
            assert not any(m.split(".")[0] == "offrl" for m in modules), path


@pytest.mark.slow
def test_a_case_that_ends_its_process() -> None:
    """What a signal ends is a crash, and the next case has a new process."""
    worker, order = Worker(), {"layout": "npz", "seed": 36, "number": 0}
    try:
        assert worker.run(order).outcome in case.OUTCOMES
        assert worker.process is not None
        os.kill(worker.process.pid, signal.SIGSTOP)
        threading.Timer(0.2, os.kill, (worker.process.pid, signal.SIGKILL)).start()
        assert worker.run(order).outcome == "crash"
        assert worker.run(order).outcome in ("right", "refused")
    finally:
        worker.close()


@pytest.mark.nightly
def test_damaged_files(tmp_path: Path) -> None:
    """`python -m tests.fuzz` runs more of them, and keeps the files."""
    counts, failures = fuzz(CASES, seed=36, keep=tmp_path)
    report = f"{table(counts)}\n{summary(failures)}\nfiles: {tmp_path}"
    print(report)
    assert not failures, report
    assert (
        sum(c["right"] for c in counts.values()) > CASES / 10
        and sum(c["refused"] for c in counts.values()) > CASES / 10
    )
