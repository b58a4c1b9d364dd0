"""What is compiled is trusted only once it computed what the uncompiled step does; and it is kept apart for each kind
of machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import offrl
from offrl.algorithm import stack
from offrl.data.arrays import from_arrays
from offrl.settings.replicas import Replica
from offrl.system import backend, devices
from offrl.training.compiling import ahead
from offrl.training.engine import LocalEngine, Plan, first_state
from offrl.training.step import Step
from tests.support.problems import compiled_problem

CPU = torch.device("cpu")
Broken = Callable[..., Callable[..., None]]


@pytest.fixture(autouse=True)
def by_torch_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes the library's place where none can be made, and is checked in the same way."""
    monkeypatch.setattr(ahead, "available", lambda: False)


def steps(algorithm: Any, source: Any, mode: str, updates: int) -> tuple[Any, Any, Step]:
    step = Step(algorithm, source, batch_size=8, replicas=2, mode=mode)
    state, sums = step.run(stack([algorithm.init(s) for s in (0, 1)]), {}, 0, updates)
    return state, sums, step


def half(program: Callable[..., None], **options: Any) -> Callable[..., None]:
    """Code for longer vectors than the machine has: every other element is garbage."""

    def garbage(state: Any, sums: Any, *rest: Any) -> None:
        program(state, sums, *rest)
        for x in pytree.tree_leaves((state.params, state.opt)):
            x.view(-1)[1::2] = 7.0

    return garbage


def refused(program: Callable[..., None], **options: Any) -> Callable[..., None]:
    def fail(*arguments: Any) -> None:
        raise RuntimeError("CppCompileError: Python.h: No such file or directory\nand more")

    return fail


def slightly_off(program: Callable[..., None], **options: Any) -> Callable[..., None]:
    """Other rounding alone."""

    def rounded(state: Any, sums: Any, *rest: Any) -> None:
        program(state, sums, *rest)
        for x in pytree.tree_leaves((state.params, state.opt)):
            x.mul_(1.0 + 1e-6)

    return rounded


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of offrl's own choice with something in it."""
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path))
    folder = tmp_path / "compiled" / "0123"
    folder.mkdir(parents=True)
    (folder / "code.so").write_text("x")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    return folder


def test_garbage_is_set_aside_and_the_run_goes_on(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", half)
    algorithm, source = compiled_problem()
    state, sums, step = steps(algorithm, source, "compiled", 5)
    said = capfd.readouterr().err
    assert (
        said.count("\n") == 1
        and "computes something else than the uncompiled one" in said
        and "goes on without compilation" in said
    )
    assert not cache.exists() and (cache.parent / "0123.aside0" / "code.so").exists() and "0123.aside0" in said
    assert step.mode == "eager"
    expected, expected_sums, _ = steps(algorithm, source, "eager", 5)
    for a, b in zip(pytree.tree_leaves((state, sums)), pytree.tree_leaves((expected, expected_sums)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_cache_of_the_users_own_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "mine"
    own.mkdir()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(own))
    monkeypatch.setattr(torch, "compile", half)
    steps(*compiled_problem(), "compiled", 2)
    assert own.exists() and f"remove {own}" in capfd.readouterr().err


def test_a_compiler_that_fails_is_no_traceback(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "compile", refused)
    _, _, step = steps(*compiled_problem(), "compiled", 3)
    said = capfd.readouterr().err
    assert "cannot be compiled here (RuntimeError: CppCompileError: Python.h" in said and said.count("\n") == 1
    assert step.mode == "eager" and cache.exists()


def test_rounding_is_no_reason(cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "compile", slightly_off)
    _, _, step = steps(*compiled_problem("td3_bc"), "compiled", 4)
    assert step.mode == "compiled" and not capfd.readouterr().err and cache.exists()


@pytest.mark.parametrize(
    ("what", "named"), [("opt", "moments of"), ("extra", "targets or statistics"), ("key", "number or key")]
)
def test_what_differs_is_named(what: str, named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(program: Callable[..., None], **options: Any) -> Callable[..., None]:
        def run(state: Any, sums: Any, *rest: Any) -> None:
            program(state, sums, *rest)
            for x in pytree.tree_leaves({"opt": state.opt, "extra": state.target, "key": state.key}[what]):
                x.add_(1)

        return run

    monkeypatch.setattr(torch, "compile", broken)
    algorithm, source = compiled_problem()
    step = Step(algorithm, source, batch_size=8, replicas=2, mode="compiled")
    found = step.verify_compiled(stack([algorithm.init(s) for s in (0, 1)]))
    assert found is not None and named in found


def test_an_engine_says_whether_its_steps_are_to_be_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, source = compiled_problem()
    state = first_state(algorithm, [Replica(0), Replica(1)])
    for compile_, doubted in ((half, True), (slightly_off, False)):
        monkeypatch.setattr(torch, "compile", compile_)
        engine = LocalEngine(Plan(algorithm, 8, "compiled", "float32", 2), source, [Replica(0), Replica(1)], CPU)
        engine.load(state, state, {})
        assert bool(engine.verify_compiled()) is doubted
    engine = LocalEngine(Plan(algorithm, 8, "eager", "float32", 2), source, [Replica(0), Replica(1)], CPU)
    engine.load(state, state, {})
    assert engine.verify_compiled() is None


@pytest.mark.parametrize("found", [None, "moments of critic by 1.4"])
def test_a_run_that_diverges_asks_the_compiled_step_first(
    found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LocalEngine, "verify_compiled", lambda self: found)
    g, n = np.random.default_rng(0), 200
    data = from_arrays(
        g.normal(size=(n, 2)),
        g.uniform(-1, 1, (n, 1)),
        g.normal(size=n),
        np.arange(n) % 20 == 19,
        action_low=-1.0,
        action_high=1.0,
    )
    settings: dict[str, Any] = {"algo.hidden": [8], "algo.learning_rate": 1e30, "device": "cpu", "compile": "eager"}
    offrl.train(
        algo="td3_bc", dataset=data, seeds=1, steps=20, log_every=10, runs_dir=str(tmp_path), quiet=True, **settings
    )
    said = capfd.readouterr().err
    assert "seed 0 diverged" in said
    assert ("A smaller algo.learning_rate" in said) == (found is None)
    assert (f"than the uncompiled one ({found})" in said and "compile=eager" in said) == (found is not None)


def chosen(monkeypatch: pytest.MonkeyPatch, **facts: Any) -> str:
    """The folder that is chosen on a machine with these facts."""
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    backend._machine.cache_clear()
    devices.processor.cache_clear()
    with monkeypatch.context() as m:
        m.setattr(torch, "get_num_threads", lambda: facts.get("threads", 1))
        m.setattr(torch, "__version__", facts.get("torch", "2.13.0"))
        m.setattr(torch.backends.cpu, "get_cpu_capability", lambda: facts.get("capability", "AVX512"))
        m.setenv("ATEN_CPU_CAPABILITY", facts.get("asked", ""))
        text = (
            f"processor: 0\nmodel name: {facts.get('cpu', 'one')}\nflags: {facts.get('flags', 'avx2')}\ncpu MHz: "
            f"{facts.get('clock', 1)}\n"
        )
        m.setattr(Path, "read_text", lambda self, **k: text)
        compiler = type("Done", (), {"stdout": facts.get("compiler", "g++ 12")})
        m.setattr(backend.subprocess, "run", lambda *a, **k: compiler)
        backend.cache_compiled()
        folder = os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
    backend._machine.cache_clear()
    devices.processor.cache_clear()
    return folder


def test_the_folder_is_named_by_what_compiled_code_depends_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path))
    others: list[dict[str, Any]] = [
        {}, {"threads": 2}, {"torch": "2.14.0"}, {"capability": "AVX2"}, {"asked": "avx2"}, {"cpu": "other"},
        {"flags": "avx2 avx512f"}, {"compiler": "g++ 13"},
    ]  # fmt: skip
    folders = [chosen(monkeypatch, **facts) for facts in others]
    assert len(set(folders)) == len(others)
    assert {Path(f).parent for f in folders} == {tmp_path / "compiled"}
    assert chosen(monkeypatch, clock=2) == folders[0]  # the clock changes all the time
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    backend.cache_compiled()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")
