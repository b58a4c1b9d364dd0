"""Replicas in groups, in worker processes, on bfloat16: the same numbers as one program, or a clear message."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from offrl import registry
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.settings.replicas import Replica, expand
from offrl.system import backend, devices, processes
from offrl.system import files as checkpoint
from offrl.system.locks import OWNED
from offrl.training.engine import LocalEngine, Plan, first_state, group_sizes
from offrl.training.execution import default_group, try_update
from offrl.training.workers import WorkerEngine, WorkersUnavailable, shares

CPU = torch.device("cpu")


def plan(name: str = "iql", group: int = 4, **settings: Any) -> tuple[Plan, Any]:
    g, n = np.random.default_rng(0), 2_000
    flags = np.zeros(n, bool), np.arange(n) % 100 == 99
    data = from_arrays(
        g.normal(size=(n, 4)), g.uniform(-1, 1, (n, 2)), g.normal(size=n), *flags, action_low=-1.0, action_high=1.0
    )
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(**{"hidden": [16, 16], "batch_size": 8, **settings}), data.spec)
    return Plan(algorithm, 8, "eager", "float32", group), algorithm.sampler().prepare(data)


def loaded(engine: Any, p: Plan, replicas: list[Replica]) -> Any:
    state = first_state(p.algorithm, replicas)
    engine.load(state, state, {})
    return engine


def same(a: Any, b: Any) -> None:
    left, right = checkpoint.flatten(a), checkpoint.flatten(b)
    assert list(left) == list(right)
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize(
    ("replicas", "largest", "sizes"), [(1, 4, [1]), (4, 2, [2, 2]), (5, 4, [3, 2]), (24, 4, [4] * 6), (7, 1, [1] * 7)]
)
def test_groups_cover_the_replicas_evenly(replicas: int, largest: int, sizes: list[int]) -> None:
    assert group_sizes(replicas, largest) == sizes


def test_workers_take_whole_groups() -> None:
    assert shares(8, 2, 2) == [(slice(0, 4), [2, 2]), (slice(4, 8), [2, 2])]
    assert shares(5, 2, 2) == [(slice(0, 4), [2, 2]), (slice(4, 5), [1])]
    assert shares(3, 4, 8) == [(slice(0, 3), [3])]
    assert default_group(4, 2, plan()[0], None, CPU) == 2
    assert default_group(24, 2, plan()[0], None, CPU) == 4


def test_worker_processes_give_the_bits_of_one_process() -> None:
    p, source = plan("td3_bc", group=2)
    replicas = expand({"alpha": [1.0, 4.0]}, [0, 7])
    alone = loaded(LocalEngine(p, source, replicas, CPU), p, replicas)
    several = WorkerEngine(p, source, replicas, [CPU, CPU], 1)
    try:
        loaded(several, p, replicas)
        assert len(several.children) == 2
        for engine in (alone, several):
            engine.run(0, 5)
            engine.settle(torch.tensor([True, True, True, True]))
            engine.run(5, 4)
            engine.freeze(torch.tensor([True, False, True, True]))
            engine.run(9, 3)
        for what in ("state", "good", "acting", "sums"):
            same(getattr(alone, what)(), getattr(several, what)())
        # one replica was put back by 4 updates
        assert alone.state().step.tolist() == several.state().step.tolist() == [12, 8, 12, 12]
        # and a copy was given out: training on does not change it
        before = several.state()
        kept = pytree.tree_map(torch.clone, before)
        several.run(12, 2)
        same(before, kept)
        copied = alone.state()
        kept = pytree.tree_map(torch.clone, copied)
        alone.run(12, 2)
        same(copied, kept)
    finally:
        several.close()


def test_the_loop_goes_on_from_what_it_loaded() -> None:
    p, source = plan(group=2)
    replicas = expand({}, [0, 1, 2])
    whole = loaded(LocalEngine(p, source, replicas, CPU), p, replicas)
    whole.run(0, 9)
    first = loaded(LocalEngine(p, source, replicas, CPU), p, replicas)
    first.run(0, 4)
    second = LocalEngine(p, source, replicas, CPU)
    second.load(first.state(), first.good(), first.sums())
    second.run(4, 5)
    same(whole.state(), second.state())
    same(whole.sums(), second.sums())


@pytest.mark.slow
def test_a_killed_worker_is_named_and_hangs_nobody() -> None:
    p, source = plan(group=1)
    replicas = expand({}, [0, 1])
    engine = WorkerEngine(p, source, replicas, [CPU, CPU], 1)
    try:
        loaded(engine, p, replicas)
        os.kill(engine.children[1].pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"a training process was killed by SIGKILL.*memory.*workers=1"):
            engine.run(0, 5)
    finally:
        engine.close()


def test_an_algorithm_of_the_script_itself_trains_in_its_process() -> None:
    p, source = plan()
    kind = type("Mine", (type(p.algorithm),), {"__module__": "__main__"})
    mine = kind(p.algorithm.config, p.algorithm.spec)
    with pytest.raises(WorkersUnavailable, match="Mine stands in the script"):
        WorkerEngine(Plan(mine, 8, "eager", "float32", 1), source, expand({}, [0, 1]), [CPU, CPU], 1)


def test_shared_memory_of_killed_processes_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=0))  # so not in memory
    alive = processes.Shared(torch.ones(3))
    for name in ("offrl-killed", "offrl-other"):
        (tmp_path / name).mkdir()
    (tmp_path / "offrl-killed" / OWNED).touch()
    processes.Shared(torch.ones(3)).close()
    assert set(tmp_path.glob("*")) == {alive.folder, tmp_path / "offrl-other"}
    alive.close()
    assert not alive.folder.exists()


def test_large_tensors_are_shared_and_gone_afterwards() -> None:
    big, small = torch.arange(100_000.0).reshape(1000, 100), torch.arange(3)
    shared = processes.Shared({"big": big, "small": small, "flag": big > 5.0})
    assert len(shared.blob[1]) < 10_000
    thing = processes.attach(shared.blob)
    folder = shared.folder
    shared.close()
    assert not folder.exists()
    assert (
        torch.equal(thing["big"], big) and torch.equal(thing["small"], small) and torch.equal(thing["flag"], big > 5.0)
    )


def test_a_grid_over_what_an_update_branches_on_is_refused() -> None:
    p, source = plan()
    real = type(p.algorithm).update

    def branching(self: Any, state: Any, batch: Any, key: Any, *, phase: int) -> Any:
        return real(self, state, batch, key, phase=phase) if self.config.temperature > 2.0 else (state, {})

    kind = type("Branching", (type(p.algorithm),), {"update": branching})
    q = Plan(kind(p.algorithm.config, p.algorithm.spec), 8, "eager", "float32", 4)
    replicas = expand({"temperature": [1.0, 3.0]}, [0])
    try_update(p, source, replicas, CPU)
    with pytest.raises(UserError, match=r"grid\.temperature.*algo\.temperature=VALUE"):
        try_update(q, source, replicas, CPU)


def test_bfloat16_is_on_only_where_asked_for() -> None:
    results = []
    for precision in ("float32", "bf16"):
        p, source = plan(group=2)
        p = Plan(p.algorithm, 8, "eager", precision, 2)
        replicas = expand({}, [0, 1])
        engine = loaded(LocalEngine(p, source, replicas, CPU), p, replicas)
        engine.run(0, 20)
        state = engine.state()
        assert {x.dtype for x in pytree.tree_leaves((state.params, state.opt, state.target))} == {torch.float32}
        assert all(v.isfinite().all() for v in engine.sums().values())
        results.append(state.params["value"]["head.weight"])
    gap = float((results[0] - results[1]).abs().max())
    assert 1e-6 < gap < 5e-2  # other arithmetic, the same learning


def test_tf32_is_refused_on_a_cpu() -> None:
    with pytest.raises(UserError, match="precision=tf32 needs a CUDA GPU"):
        backend.configure(CPU, 1, "tf32")


def test_short_attention_is_plain_where_products_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    fused = torch.backends.cuda.flash_sdp_enabled
    for routed, keys, expected in (("bf16", 76, False), ("bf16", 512, True), ("ieee", 76, True)):
        monkeypatch.setattr(devices, "matmul_switch", lambda routed=routed: SimpleNamespace(fp32_precision=routed))
        with backend.attention(CPU, keys):
            assert fused() is expected
        assert fused()
