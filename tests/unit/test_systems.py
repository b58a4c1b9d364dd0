"""Windows and macOS as far as this machine can stand for them; docs/systems.md lists what was never tried."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offrl.benchmark.plan import hold
from offrl.errors import UserError
from offrl.settings.evaluation import cores
from offrl.system import backend, children, devices, files, locks, trust
from offrl.training.execution import choose_mode, default_group
from offrl.training.updates import metric_means

ROOT = Path(__file__).resolve().parents[2]

HIDDEN = """
import importlib, os, pkgutil, signal, select, sys, traceback
import torch, numpy, gymnasium, h5py, matplotlib.pyplot  # which have Windows' own builds
gone = ("fcntl", "resource", "pwd", "grp", "termios", "pty", "tty")
for name in gone:
    sys.modules[name] = None
for name in ("sched_getaffinity", "getuid", "geteuid", "fork", "O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK", "O_DIRECTORY", "killpg", "uname"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGHUP"):
    delattr(signal, name)
del select.poll
import offrl
failed = []
for module in pkgutil.walk_packages(offrl.__path__, "offrl.", onerror=lambda name: None):
    if module.name.startswith(("offrl.docs", "offrl.scripts", "offrl.tests")) or module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
    except (ImportError, AttributeError) as error:
        frames = [f.filename for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename]
        if "site-packages" not in frames[-1]:  # another package has its own build for Windows
            failed.append((module.name, str(error)))
assert not failed, failed
from offrl.cli.main import main
sys.exit(main(["train", "steps=20", "seeds=2", "eval.env=none", "compare=[]", "algo=bc", "compile=eager", "quiet=true"]))
"""  # noqa: E501


@pytest.mark.slow  # imports everything, and trains
def test_everything_is_imported_and_trains_without_the_modules_of_unix(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HIDDEN], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len([*tmp_path.glob("runs/*/policies/*")]) >= 2


def test_no_module_asks_for_unix_at_import() -> None:
    """Only `offrl.system.locks` may, where it has an answer for its absence."""
    names = ("fcntl", "resource", "pwd", "grp", "termios")
    faults = [
        f"{path.relative_to(ROOT)}: {line}"
        for top in ("offrl", "algorithms", "envs", "world_models")
        for folder, _, inside in os.walk(ROOT / top)
        for path in (Path(folder, name) for name in inside if name.endswith(".py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if line.startswith(tuple(f"{word} {name}" for word in ("import", "from") for name in names))
    ]
    assert not faults


class Windows:
    """`msvcrt` as Windows has it: one byte of a file, which one handle holds."""

    LK_NBLCK = 2

    def __init__(self) -> None:
        self.held: set[tuple[int, int]] = set()

    def locking(self, handle: int, mode: int, count: int) -> None:
        place = (os.fstat(handle).st_ino, os.lseek(handle, 0, os.SEEK_CUR))
        if mode != self.LK_NBLCK or count != 1 or place in self.held:
            raise PermissionError(errno.EACCES, "Permission denied")
        self.held.add(place)


def test_locks_of_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    windows = Windows()
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", windows)
    with (
        locks.exclusive(tmp_path / "run"),
        pytest.raises(UserError, match="another process is training"),
        locks.exclusive(tmp_path / "run"),
    ):
        pass
    with hold(tmp_path / "lock") as first, hold(tmp_path / "lock") as second:
        assert first and not second
    assert all(position == locks.FAR for _, position in windows.held)
    tries = []

    def freed(_: float) -> None:
        tries.append(1)
        windows.held.clear()

    monkeypatch.setattr(locks, "time", SimpleNamespace(sleep=freed))
    with (tmp_path / "lock").open("a") as file:
        locks.lock(file)
        with (tmp_path / "lock").open("a") as other:
            locks.lock(other)  # waits until the first is gone
    assert tries


def test_a_system_without_locks_trains_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "fcntl", None)
    monkeypatch.setattr(locks, "msvcrt", None)
    with locks.exclusive(tmp_path / "run"), hold(tmp_path / "lock") as free, locks.alone(tmp_path / "x", "x", True):
        assert free


def test_files_and_children_on_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("O_CLOEXEC", "O_NOFOLLOW", "O_NONBLOCK"):
        monkeypatch.delattr(os, name)
    with trust.open_to_write(tmp_path / "file", "w") as file:
        file.write("a\n")
    assert (tmp_path / "file").read_bytes() == b"a\n"
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() >= 1
    opened: list[str] = []
    real = os.open
    with monkeypatch.context() as patch:
        patch.setattr(os, "name", "nt")
        patch.setattr(
            os, "open", lambda path, *rest, **options: opened.append(str(path)) or real(path, *rest, **options)
        )
        files._sync_folder(tmp_path)  # Windows opens no folders
        with pytest.raises(OSError, match="Windows hands no pipes"):
            children.start("os:getcwd", [])
    assert not opened


def test_a_checkout_without_links_is_imported(tmp_path: Path) -> None:
    """git on Windows writes a link as a small file that holds its target."""
    shutil.copytree(
        ROOT / "offrl",
        tmp_path / "offrl",
        ignore=shutil.ignore_patterns("algorithms", "envs", "world_models", "configs", "__pycache__"),
    )
    for name in ("algorithms", "envs", "world_models", "configs"):
        (tmp_path / "offrl" / name).write_text(f"../{name}")
        (tmp_path / name).symlink_to(ROOT / name)
    code = (
        "import sys; from importlib.util import find_spec; from offrl.cli.main import main; assert "
        "find_spec('offrl.algorithms.iql').origin"
    )
    code = code.replace(
        "find_spec('offrl.algorithms.iql').origin", "find_spec('offrl.algorithms') and find_spec('offrl.envs')"
    )
    code += "; sys.exit(main(['list', 'algo=iql', 'dataset=hopper-medium-v2']))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True
    )
    assert done.returncode == 0 and b"iql/d4rl-gym" in done.stdout, done.stderr


def test_device_mps(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="finds no GPU of Apple's"):
        devices.pick_device("mps")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    device = devices.pick_device("mps")
    assert device.type == "mps" and devices.pick_device("auto").type != "mps"
    monkeypatch.setattr(torch.cuda, "set_device", lambda *_: pytest.fail("CUDA is asked for"))
    assert "MPS" in backend.configure(device, 1)
    with pytest.raises(UserError, match="precision=bf16 is not for device=mps"):
        backend.configure(device, 1, "bf16")
    assert choose_mode("auto", device, 10**9) == "eager"
    with pytest.raises(UserError, match="not for device=mps"):
        choose_mode("compiled", device, 10)
    plan = SimpleNamespace(algorithm=SimpleNamespace(traits=SimpleNamespace(vectorized=True)))
    assert default_group(8, 1, plan, None, device) == 4  # type: ignore[arg-type]


def test_means_of_metrics_are_taken_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPS has no float64; neither has the meta device values, so a copy to the host must come first."""
    moved = torch.ones(2)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: moved if self.is_meta else self)
    assert metric_means({"loss": torch.ones(2, device="meta")}, 4)["loss"].tolist() == [0.25, 0.25]
