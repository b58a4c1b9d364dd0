"""What is decided about devices before anything runs there; `torch.cuda` is made up."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from offrl import registry
from offrl.actor import bind
from offrl.algorithm import Algorithm, TrainState, Traits
from offrl.data import memory as mmap
from offrl.errors import UserError
from offrl.settings.replicas import Replica
from offrl.settings.train import TrainConfig
from offrl.system import backend
from offrl.training import distributed, execution
from offrl.training.engine import LocalEngine, Plan, first_state
from offrl.training.execution import choose_mode, default_group, training_devices
from offrl.training.step import Step
from tests.support import cases
from tests.support.imitated import META, Held, Machine, imitated

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda as far as decisions look at it: two GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *a: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (9, 0))
    # the check that `set_device` begins with, which refuses a device without an index
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: torch.cuda._utils._get_device_index(device))


def test_a_device_without_an_index_is_the_current_one(two_gpus: None) -> None:
    """C1."""
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device(CUDA)
    for device in ("cuda", "cuda:1"):
        assert backend.configure(torch.device(device), 1) == "H100, float32"


@pytest.fixture
def triton(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Whether a line of code compiles there."""
    there = SimpleNamespace(fails=None, tried=0)

    def compile_(function: Any, **options: Any) -> Any:
        there.tried += 1
        if there.fails:
            raise RuntimeError(there.fails)
        return lambda x: x

    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(backend, "cache_compiled", lambda: None)
    monkeypatch.setattr(torch, "zeros", lambda *a, **k: None)
    monkeypatch.setattr(execution.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(execution.shutil, "which", lambda name: f"/usr/bin/{name}")
    execution.no_triton.cache_clear()
    return there


def test_modes_on_a_gpu(triton: SimpleNamespace) -> None:
    """C3: eager is eager; what waits for values is never captured."""
    iql, text, lamo = (registry.get("algo", name) for name in ("iql", "lm_bc", "lamo"))
    assert choose_mode("auto", CUDA, 10, iql) == "cudagraph"
    assert choose_mode("auto", CUDA, 10_000, iql) == "compiled-cudagraph"
    assert choose_mode("compiled", CUDA, 10, iql) == "compiled-cudagraph"
    assert choose_mode("eager", CUDA, 10_000, iql) == "eager"
    assert choose_mode("cudagraph", CUDA, 10_000, iql) == "cudagraph"
    assert choose_mode("auto", CUDA, 10_000, lamo) == "cudagraph"
    for compile_ in ("auto", "eager", "compiled", "cudagraph"):
        assert choose_mode(compile_, CUDA, 10_000, text) == "eager"
    assert [name for name, kind in registry.names("algo").items() if kind.traits.text and kind.traits.cuda_graph] == []
    assert choose_mode("auto", CPU, 10_000, lamo) == "eager"
    unrolled = SimpleNamespace(traits=Traits(unrolled=21))  # what that takes on a GPU has not been measured
    assert choose_mode("auto", CUDA, 10_000, unrolled) == "cudagraph"  # type: ignore[arg-type]
    assert choose_mode("compiled", CUDA, 10, unrolled) == "compiled-cudagraph"  # type: ignore[arg-type]
    with pytest.raises(UserError, match="needs a CUDA GPU"):
        choose_mode("cudagraph", CPU, 10, iql)


def test_without_headers_the_step_is_captured_as_it_is(
    triton: SimpleNamespace, capfd: pytest.CaptureFixture[str]
) -> None:
    """C9: found out with one line of code, once."""
    triton.fails = "fatal error: Python.h: No such file or directory"
    assert choose_mode("auto", CUDA, 10_000) == choose_mode("auto", CUDA, 10_000) == "cudagraph"
    assert "Python.h" in capfd.readouterr().err and triton.tried == 1
    with pytest.raises(UserError, match=r"Python\.h.*compile=auto does without"):
        choose_mode("compiled", CUDA, 10_000)


def test_an_old_gpu_has_no_triton(triton: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *a: (6, 1))
    assert choose_mode("auto", CUDA, 10_000) == "cudagraph" and not triton.tried


def test_each_process_of_torchrun_has_its_gpu(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """C5."""
    assert distributed.own_device(CUDA) == CUDA
    for name, value in {"WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert distributed.own_device(CUDA) == torch.device("cuda", 1)
    assert distributed.own_device(CPU) == CPU
    with pytest.raises(UserError, match="names one GPU, and torchrun started 2"):
        distributed.own_device(torch.device("cuda", 1))
    monkeypatch.setenv("LOCAL_RANK", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with pytest.raises(UserError, match="--nproc_per_node=2"):
        distributed.own_device(CUDA)


def test_the_group_of_processes_is_told_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}
    monkeypatch.setattr(torch.distributed, "init_process_group", lambda kind, **k: seen.update(kind=kind, **k))
    monkeypatch.setenv("WORLD_SIZE", "2")
    distributed.join(torch.device("cuda", 1), 1, 8)
    assert seen["kind"] == "nccl" and seen["device_id"] == torch.device("cuda", 1)


@pytest.mark.parametrize(("workers", "many", "expected"), [(None, 8, 2), (8, 8, 2), (1, 8, 1), (None, 1, 1)])
def test_a_process_for_each_gpu_at_most(
    workers: int | None, many: int, expected: int, two_gpus: None, capfd: pytest.CaptureFixture[str]
) -> None:
    """S5."""
    devices = training_devices(TrainConfig(workers=workers), CUDA, many, mapped=False)
    assert len(devices) == expected and len({str(d) for d in devices}) == expected
    assert ("at most one for each of the 2 GPUs" in capfd.readouterr().err) == (workers == 8)


def test_named_tuples_move_with_what_holds_them() -> None:
    """C4."""
    state = TrainState({"a": {"w": torch.ones(2)}}, {}, {}, {}, {}, torch.zeros(()), torch.zeros(()))

    @dataclasses.dataclass(frozen=True)
    class Source:
        inner: TrainState
        pair: tuple[torch.Tensor, int]

    moved = backend.move(Source(state, (torch.ones(1), 3)), META)
    assert isinstance(moved.inner, TrainState) and moved.inner.params["a"]["w"].device == META
    assert moved.pair[0].device == META and moved.pair[1] == 3


def test_frozen_tensors_follow_the_parameters() -> None:
    """C6: a policy with adapters holds its frozen weights as buffers."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Parameter(torch.ones(2))
            self.register_buffer("given", torch.ones(2), persistent=False)

    module = Adapted()
    algorithm = SimpleNamespace(networks={"policy": module})
    with imitated(), Machine():
        params = {"policy": {"own": torch.ones(2).to(META)}}
        state = TrainState(params, {}, {}, {}, {}, torch.zeros(()).to(META), torch.zeros(()).to(META))
        bound: Any = bind(algorithm, state).params["policy"]  # type: ignore[arg-type]
        assert isinstance(bound.module.given, Held) and isinstance(bound.module.own, (Held, nn.Parameter))
    assert module.given.device == CPU  # the algorithm's own stay


def small() -> tuple[Algorithm, Any]:
    case = next(c for c in cases.BASE if c.name == "iql" and not c.discrete)
    algorithm = case.make()
    return algorithm, algorithm.sampler().prepare(cases.data(False))


def test_a_group_is_what_fits(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """C7: what updates of two and of four replicas take is measured; states stay for all, activations for one group."""
    algorithm, source = small()
    plan, used, ran = Plan(algorithm, cases.BATCH, "cudagraph", "float32", 64), [0], []
    kind = type(Step(algorithm, source, batch_size=4, replicas=1))
    monkeypatch.setattr(
        kind, "run", lambda self, *a, **k: (ran.append(self.replicas), used.__setitem__(0, 10_000_000 * self.replicas))
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda *a: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *a: 5_000_000)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda *a: 5_000_000)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda *a: 5_000_000 + used[0])
    state = 3.0 * sum(x.nbytes for x in torch.utils._pytree.tree_leaves(first_state(algorithm, [Replica(0)])))
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: self)
    for free, expected in ((1e12, 64), (4e8, int((3.2e8 - 64 * state) / 1e7)), (1e7, 1)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a, free=free: (free, 8e10))
        assert default_group(64, 1, plan, source, CUDA) == expected
    assert ran[:2] == [2, 4]
    assert default_group(1, 1, plan, source, CUDA) == 1


def test_data_take_a_quarter_of_a_gpu(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "free_bytes", lambda: 100.0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *a: (40.0, 80.0))
    assert mmap.memory_budget() == mmap.memory_budget("cpu") == 50.0
    assert mmap.memory_budget("cuda") == 10.0


def test_bfloat16_follows_the_device_whatever_the_mode() -> None:
    """W2: under torchrun and with compile=eager there is no graph, and autocast all the same."""
    algorithm, source = small()
    made = Step(algorithm, source, batch_size=4, replicas=1, mode="eager", precision="bf16")
    for device, kind in ((CPU, "cpu"), (META, "cuda")):
        state = SimpleNamespace(step=torch.zeros((), device=device))
        autocast = made._autocast(state)  # type: ignore[arg-type]
        assert (autocast.device, autocast.fast_dtype) == (kind, torch.bfloat16)  # type: ignore[attr-defined]


def test_a_stretch_of_updates_ends_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """W4: speeds are of updates, not of launches."""
    algorithm, source = small()
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    engine = LocalEngine(Plan(algorithm, cases.BATCH, "eager", "float32", 1), source, [Replica(0)], CPU)
    engine.load(first_state(algorithm, [Replica(0)]), first_state(algorithm, [Replica(0)]), {})
    engine.run(0, 1)
    assert waited == []
    engine.device = CUDA
    engine.run(1, 1)
    assert waited == [CUDA]
