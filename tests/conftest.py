"""Nothing that a test loads or compiles is left in the user's cache; a process takes one thread, for several of them
run at a time; and `heeds_signals`, for tests that send some; `pictures`, which keeps figures and spares rendering them.
A test is in one tier, and those of the fast tier that take long are named at the end."""

from __future__ import annotations

import gc
import os
import re
import signal
import tempfile
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.register_assert_rewrite("tests.support")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported; more would fight over the cores
os.environ["OFFRL_CACHE"] = tempfile.mkdtemp(prefix="offrl-tests-")


def _fsync(handle: int) -> None:
    """os.fsync without the wait, which takes longer than most files take to be made: no test can see whether bytes are
    on the disk.
    """
    os.fstat(handle)  # a handle that is closed is an error still


os.fsync = _fsync  # type: ignore[assignment]


@pytest.fixture
def heeds_signals() -> Iterator[None]:
    """This process, and those it starts meanwhile, take Ctrl-C and SIGTERM as they would in a terminal. A shell without
    job control starts what it runs in the background (`pytest &` in a script, `nohup`) with SIGINT ignored, and
    children inherit that."""
    usual: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    old = {number: signal.signal(number, handler) for number, handler in usual.items()}
    try:
        yield
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


@pytest.fixture
def no_collection() -> Iterator[None]:
    """No garbage is collected meanwhile. What is nested too deeply is refused where Python's stack ends; an unfinished
    generator of an earlier test that the collector closes just there has no stack left, and pytest blames the test that
    runs."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Generator[None, Any, Any]:
    made = yield
    for item in made if isinstance(made, list) else []:
        if item.get_closest_marker("slow") and item.get_closest_marker("nightly"):
            raise pytest.Collector.CollectError(f"{item.nodeid} is marked slow and nightly: a test is in one tier")
    return made


FAST, LONG = "not slow and not nightly", 5.0  # -m of pyproject.toml, seconds


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Names the tests of the fast tier that took longer than the others may (CONTRIBUTING); a busy machine is no
    failure.
    """
    if config.option.markexpr != FAST:
        return
    spent: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            spent[getattr(report, "nodeid", "")] += getattr(report, "duration", 0.0)
    for name, seconds in spent.most_common():
        if seconds > LONG:
            terminalreporter.write_line(f"{seconds:.1f} s, more than the {LONG:.0f} s of a fast test: {name}")


def pytest_collection_finish() -> None:
    """Modules and test cases stay until the end: the collector of garbage need not look at them again and again. Nor
    need it come as often as Python would have it, which is after every 700 new objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 50)


BLANK = bytes.fromhex(  # a PNG of one white pixel
    "89504e470d0a1a0a0000000d49484452000000010000000108000000003a7e9b550000000a49444154789c63f80f0001010100b138f6140000000049454e44ae426082"
)


@pytest.fixture(autouse=True)
def pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The figures of the PNG files that a test of this process writes, by the file's name. Drawing one takes longer
    than most tests: only those marked `rendered` do, the others' files are blank."""
    figures: dict[str, Any] = {}
    try:
        from matplotlib.figure import Figure
    except ImportError:  # the extra `report` is not installed
        return figures
    rendered = request.node.get_closest_marker("rendered") is not None
    render = Figure.savefig

    def savefig(self: Any, target: Any, **options: Any) -> Any:
        if not hasattr(target, "name"):  # a page's, which is text in memory
            return render(self, target, **options)
        figures[re.sub(r"^\.(.*)\.\d+\.part$", r"\1", Path(target.name).name)] = self
        return render(self, target, **options) if rendered else target.write(BLANK)

    monkeypatch.setattr(Figure, "savefig", savefig)
    return figures
