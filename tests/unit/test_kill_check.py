"""scripts/kill_check.py finds what it is there to find: a process that stays behind, a file that differs."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="reads /proc")
LEAVES = "import subprocess, time; subprocess.Popen(['sleep', '100'], start_new_session=True, env={}); time.sleep(100)"
# cat ends with its input
TAKES = "import ctypes, subprocess, time; subprocess.Popen(['cat'], stdin=subprocess.PIPE); time.sleep(100)"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("code", "left"), [(LEAVES, 1), (TAKES, 0)], ids=["left behind", "ends too"])
def test_processes_left_behind_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, left: int) -> None:
    import kill_check

    monkeypatch.setattr(kill_check, "SECONDS", 0.3)
    job = kill_check.start([sys.executable, "-S", "-c", code], tmp_path, {}, "0")
    while not [words for words in job.descendants().values() if words.startswith(("sleep", "cat"))]:
        assert job.process.poll() is None
    hit = kill_check.strike(job, signal.SIGKILL, 0.0)
    assert hit is not None and hit.processes == 1 and len(hit.left) == left
    assert not job.marked() and hit.last <= 0.5


def test_a_job_that_ended_before_is_no_hit(tmp_path: Path) -> None:
    import kill_check

    job = kill_check.start([sys.executable, "-S", "-c", "pass"], tmp_path, {}, "0")
    assert kill_check.strike(job, signal.SIGKILL, 30.0) is None and job.finish() < 30.0
    job = kill_check.start([sys.executable, "-S", "-c", "print(1 / 0)"], tmp_path, {}, "0")
    with pytest.raises(RuntimeError, match="division by zero"):
        job.finish()


def test_files_that_differ_are_found(tmp_path: Path) -> None:
    import kill_check

    for name in ("run/scores.csv", "run/timing.jsonl", "run/policies/seed_0.safetensors"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    expected = kill_check.compared(tmp_path)
    assert list(expected) == ["run/policies/seed_0.safetensors", "run/scores.csv"]
    (tmp_path / "run/timing.jsonl").write_text("other")
    assert kill_check.differences(tmp_path, expected) == []
    (tmp_path / "run/scores.csv").write_text("other")
    os.rename(tmp_path / "run/policies/seed_0.safetensors", tmp_path / "run/policies/seed_1.safetensors")
    assert kill_check.differences(tmp_path, expected) == [
        "run/policies/seed_0.safetensors is missing",
        "run/policies/seed_1.safetensors is there",
        "run/scores.csv differs",
    ]


@pytest.mark.nightly
def test_a_killed_benchmark_leaves_nothing_and_ends_the_same(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import kill_check

    monkeypatch.setattr(sys, "argv", ["kill_check.py", "--kills", "2", "--only", "benchmark"])
    assert kill_check.main() == 0, capfd.readouterr().out
    assert "| all |  | 2 |  |  | 0 | 0 |" in capfd.readouterr().out
