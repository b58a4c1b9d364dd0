"""Child processes end with their parent, whatever it died of and whatever they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offrl.system import children

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
# holds Python's lock: no other thread runs
BUSY = "import ctypes, os; print(os.getpid(), flush=True); ctypes.PyDLL(None).sleep(100)"


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[object]:
    """`parent(code)`: a process that runs it; its first line is the number of a process that must not outlive it."""
    started: list[subprocess.Popen[str]] = []

    def run(code: str) -> tuple[subprocess.Popen[str], int]:
        script = tmp_path / "parent.py"
        script.write_text(textwrap.dedent(code))
        path = os.pathsep.join(p for p in sys.path if p)
        command = [sys.executable, "-S", str(script)]
        started.append(
            subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)
        )
        assert started[-1].stdout is not None
        return started[-1], int(started[-1].stdout.readline())

    yield run
    for process in started:
        process.kill()
        process.communicate()


def alive(number: int) -> bool:
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def assert_gone(number: int, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while alive(number) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(number)


def test_while_it_starts(parent) -> None:  # type: ignore[no-untyped-def]
    process, child = parent("""
        import os, signal
        from offrl.system import children
        print(children.start("signal:pause", []).pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert process.wait() == -signal.SIGKILL
    assert_gone(child)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux's kernel ends what holds Python's lock")
def test_deep_in_a_library(parent, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "busy.py").write_text(BUSY)
    process, child = parent(f"""
        import signal
        from offrl.system import children
        children.start("runpy:run_path", [{str(tmp_path / "busy.py")!r}])
        signal.pause()
    """)
    assert alive(child)
    process.kill()
    assert_gone(child)


def test_without_the_kernels_help(parent) -> None:  # type: ignore[no-untyped-def]
    process, child = parent("""
        import signal, subprocess, sys
        from offrl.system import children
        code = "import os, signal, sys; sys.platform = 'other'; from offrl.system import children\\n"
        code += f"children.live_with_parent({children._own_side().read}); print(os.getpid(), flush=True); signal.pause()"
        subprocess.Popen([sys.executable, "-c", code], pass_fds=[children._own_side().read], start_new_session=True)
        signal.pause()
    """)  # noqa: E501
    assert alive(child)
    process.kill()
    assert_gone(child)


def test_the_end_of_a_thread_is_not_the_end_of_the_parent() -> None:
    started: list[subprocess.Popen[bytes]] = []
    thread = threading.Thread(
        target=lambda: started.append(children.start("time:sleep", ["100"], stderr=subprocess.PIPE))
    )
    thread.start()
    thread.join()
    (child,) = started
    # it got as far as `sleep`, which takes no text
    assert child.stderr is not None and b"TypeError" in child.stderr.read()
    assert child.wait() == 1


def test_a_job_of_another_system_ends_with_the_command_that_began_it(parent) -> None:  # type: ignore[no-untyped-def]
    """Its own parent lives on: this process."""
    process, command = parent("""
        import os, signal
        from offrl.system import children
        print(os.getpid(), flush=True)
        signal.pause()
    """)
    where = [*children.address()[:2], command]
    code = "from offrl.system import children; import signal; children.PATIENCE = children.GRACE = 0.1\n"
    code += "signal.signal(signal.SIGTERM, lambda *_: print('saved', flush=True))\n"
    code += f"children.live_with_parent(other={where!r}); "
    job = subprocess.Popen(
        [sys.executable, "-c", code + "print(1, flush=True)\nwhile True: signal.pause()"], stdout=subprocess.PIPE
    )
    assert job.stdout is not None and job.stdout.readline() and job.poll() is None
    process.kill()
    process.wait()
    assert job.stdout.read() == b"saved\n" and job.wait(10.0) == 1
    elsewhere = ["another host", *where[1:]]
    code = code.replace(repr(where), repr(elsewhere))
    job = subprocess.Popen([sys.executable, "-c", code + "import time; time.sleep(0.1)"])
    assert job.wait(10.0) == 0
