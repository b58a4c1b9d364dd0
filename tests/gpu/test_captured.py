"""Every algorithm's captured update on an imitated GPU: no host reads, no CPU tensors, no sums without an order, the
CPU's numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.utils import _pytree as pytree

from offrl.algorithm import select, stack
from offrl.algorithms.breeze.implicit_reward import RIDGE, inverse_by_products
from offrl.evaluation.policy import TrainedPolicy
from offrl.finetuning.learner import Learner
from offrl.finetuning.replay import balanced
from offrl.finetuning.replay.batches import MixedBatches
from offrl.finetuning.replay.ring import Ring
from offrl.nn.representations.quasimetric import _running_maximum
from offrl.settings.replicas import Replica
from offrl.system import backend
from offrl.training.engine import LocalEngine, Plan, first_state
from offrl.training.step import Step
from tests.support import cases
from tests.support.imitated import META, Held, Machine, imitated, kernels_of, largest_difference, main, numbers, trace

FAMILIES = ("iql", "dt", "dynamics")  # one of each stands for it
APART = {"breeze": 2e-4}  # it inverts a matrix otherwise there


def first(case: Any) -> bool:
    return case.name in FAMILIES and not case.discrete and not case.settings


@cases.each([pytest.param(c, marks=() if first(c) else pytest.mark.nightly) for c in cases.ALL])
def test_update_can_be_captured(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises where the host would wait for a value, copy, or mix devices inside the graph; replays give the CPU's eager
    numbers.
    """
    # rollouts of one replica at a time round otherwise, and a ReLU at its kink makes much of that
    monkeypatch.setattr(Step, "_refreshed_together", lambda self, state: self.batched)
    algorithm, dataset = case.make(), cases.data(case.discrete)
    found = trace(algorithm, dataset, cases.BATCH)
    expected, _ = cases.train(algorithm, list(range(len(found.state.step))), found.updates)
    assert found.kernels > 10
    assert found.unordered == 0.0
    assert largest_difference(found.state, expected) <= APART.get(case.name, 1e-5)


@pytest.mark.nightly
@cases.each(cases.BASE)
def test_data_can_be_prepared_on_the_device(case: Any) -> None:
    """As a run on one GPU does; where several processes train, the data are prepared on the CPU and moved."""
    algorithm, dataset = case.make(), cases.data(case.discrete)
    found, moved = (trace(algorithm, dataset, cases.BATCH, early=early).state for early in (True, False))
    assert largest_difference(found, moved) <= 1e-5


def test_the_table_of_another_commit_stands_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cases, "ALL", [c for c in cases.BASE if c.name == "bc"])
    main(["bc"])
    first = capsys.readouterr().out
    assert list(kernels_of(first)) == ["bc", "bc-discrete"]
    (tmp_path / "before.md").write_text(
        re.sub(r"\| bc \| \d+", "| bc | 987", first.replace("| bc-discrete |", "| gone |"))
    )
    main(["bc", "--before", str(tmp_path / "before.md")])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[-1] for line in lines if " | " in line] == ["kernels before |", "987 |", "- |"]
    assert [line.rpartition(" | ")[0] for line in lines[2:]] == [
        line.removesuffix(" |") for line in first.splitlines()[2:]
    ]


def test_the_machine_sees_what_no_graph_can_hold() -> None:
    with imitated(), Machine(), pytest.raises(RuntimeError, match="the host waits for a value"):
        x = torch.ones(3).to(META)
        backend.capture(lambda: x.mul_(float(x[0])))
    with imitated(), Machine(), pytest.raises(RuntimeError, match="copy between host and GPU"):
        y = torch.ones(3)
        backend.capture(lambda: y.to(META))
    with imitated(), Machine(), pytest.raises(RuntimeError, match="mixes tensors of CPU and GPU"):
        z = torch.ones(3).to(META)
        backend.capture(lambda: z + torch.ones(3))
    with imitated(), Machine() as machine:
        rows = torch.tensor([0, 0, 1]).to(META)
        backend.capture(lambda: torch.zeros(2, device=META).index_add_(0, rows, torch.ones(3, device=META)))
        assert machine.captured["unordered"] == 1


@pytest.mark.parametrize("name", ["tt", "pets"])
def test_planners_act_where_they_were_trained(name: str) -> None:
    """S9: with the state on a device observations go there and actions come back, the same as on the CPU."""
    case = next(c for c in cases.BASE if c.name == name and not c.discrete)
    algorithm = case.make()
    state = select(cases.train(algorithm, [0], 4)[0], 0)
    observations = np.random.default_rng(0).normal(size=(2, 3, 4)).astype(np.float32)

    def walk(policy: TrainedPolicy) -> list[np.ndarray]:
        carry, actions = policy.start(3), []
        for t, observation in enumerate(observations):
            action, carry = policy.step(carry, observation, t)
            carry = policy.observe_reward(carry, np.ones(3))
            actions.append(action)
        return actions

    expected = walk(TrainedPolicy(algorithm, state, 0))
    with imitated(), Machine():
        policy = TrainedPolicy(algorithm, state, 0, META)
        found = walk(policy)
        assert isinstance(policy.actor.state.step, Held)
    np.testing.assert_allclose(found, expected, atol=1e-5)
    assert policy.__getstate__()["device"].type == "cpu"  # an evaluation worker does not take the GPU


def test_what_takes_no_time_acts_on_the_cpu() -> None:
    case = next(c for c in cases.BASE if c.name == "iql" and not c.discrete)
    algorithm = case.make()
    assert TrainedPolicy(algorithm, algorithm.init(0), 0, "cuda").device.type == "cpu"


def test_batches_from_outside_are_replayed() -> None:
    """S1: fine-tuning and memory-mapped data hand in batches; settings that change between updates reach the graph."""
    case = next(c for c in cases.BASE if c.name == "td3_bc" and not c.discrete)
    algorithm = case.make()
    source = algorithm.sampler().prepare(cases.data(False))
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(len(source.table.table), (12, 2, cases.BATCH), generator=generator)

    class Given:
        def __init__(self, put: Any) -> None:
            self.put = put

        def get(self, step: int) -> dict[str, Tensor]:
            return {k: self.put(v) for k, v in vmap(lambda i: source.table.take(i))(rows[step]).items()}

    def train(put: Any, mode: str) -> Any:
        alpha = [put(torch.tensor([1.0, 2.0])), put(torch.tensor([9.0, 2.0]))]
        step = Step(
            algorithm,
            None,
            batch_size=cases.BATCH,
            replicas=2,
            mode=mode,
            batches=Given(put),
            hyper={"alpha": alpha[0]},
        )
        state = pytree.tree_map(put, stack([algorithm.init(s) for s in (0, 1)]))
        state, sums = step.run(state, {}, 0, 6)
        state, sums = step.run(state, sums, 6, 6, 0, {"alpha": alpha[1]})
        return state, sums

    expected = train(lambda x: x, "eager")
    with imitated(), Machine() as machine:
        found = numbers(train(lambda x: x.to(META), "cudagraph"))
        assert machine.captured["kernels"] > 50
    assert largest_difference(found[0], expected[0]) <= 1e-5
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("noise", [*(pytest.param(x, marks=pytest.mark.nightly) for x in (None, 0.0)), 0.1])
def test_online_actions_and_updates_are_graphs(noise: float | None) -> None:
    """S1, S2: actions for new observations and changing parameters, and updates from the ring and the data."""
    case = next(c for c in cases.BASE if c.name == "iql" and not c.discrete)
    algorithm, them = case.make(), [Replica(0), Replica(1)]
    sampler = algorithm.sampler()
    dataset = cases.data(False)
    names = [*sampler.prepare(dataset).table.layout]

    def play(mode: str, device: torch.device) -> tuple[list[np.ndarray], Any]:
        source = sampler.prepare(dataset if device.type == "cpu" else dataset.to(device))
        layout = source.table.layout
        ring = Ring({n: (layout[n][2], layout[n][3]) for n in names}, 2, 50, device)
        state = first_state(algorithm, them)
        batches = MixedBatches(ring, sampler, source, state.key, cases.BATCH, 0.5)
        learner = Learner(
            Plan(algorithm, cases.BATCH, mode, "float32", 2),
            batches,
            them,
            device,
            {},
            {"temperature": (2.0, 1.0, 1.0)},
        )
        learner.load(state, state, {})
        g, found = np.random.default_rng(1), []
        for t in range(4):
            learner.progress(t / 4)
            found.append(learner.act(g.normal(size=(2, 3, 4)).astype(np.float32), t, noise, np.full((2, 3), t == 0)))
            rows = {n: g.normal(size=(6, *layout[n][2])).astype(np.float32) for n in names}
            ring.add(np.array([0, 0, 0, 1, 1, 1]), rows)
            learner.run(2 * t, 2)
        return found, learner.state()

    actions, state = play("eager", torch.device("cpu"))
    with imitated(), Machine():
        captured, after = play("cudagraph", META)
        after = numbers(after)
    for a, b in zip(actions, captured, strict=True):
        np.testing.assert_allclose(b, a, atol=1e-5)
    assert largest_difference(after, state) <= 1e-5


@pytest.mark.nightly
def test_batches_are_balanced_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Networks that weigh rows learn where the ring and the data are, between two replays of an update."""
    monkeypatch.setattr(balanced, "WIDTHS", (8, 8))
    case = next(c for c in cases.BASE if c.name == "iql" and not c.discrete)
    algorithm, them, dataset = case.make(), [Replica(0), Replica(1)], cases.data(False)
    sampler = algorithm.sampler()

    def train(mode: str, device: torch.device) -> Any:
        source = sampler.prepare(dataset if device.type == "cpu" else dataset.to(device))
        columns = {name: (shape, dtype) for name, (_, _, shape, dtype) in source.table.layout.items()}
        ring, state = Ring(columns, 2, 50, device), first_state(algorithm, them)
        batches = balanced.BalancedBatches(ring, sampler, source, state.key, cases.BATCH, dataset.spec, 5.0, 0.5)
        learner = Learner(Plan(algorithm, cases.BATCH, mode, "float32", 2), batches, them, device, {}, {})
        learner.load(state, state, {})
        g = np.random.default_rng(1)
        for t in range(4):
            rows = {name: g.normal(size=(6, *shape)).astype(np.float32) for name, (shape, _) in columns.items()}
            ring.add(np.array([0, 0, 0, 1, 1, 1]), rows)
            learner.run(2 * t, 2)
        return learner.state(), batches.state()

    expected = train("eager", torch.device("cpu"))
    with imitated(), Machine():
        found = numbers(train("cudagraph", META))
    assert largest_difference(found[0], expected[0]) <= 1e-5
    torch.testing.assert_close(found[1]["params"], expected[1]["params"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[1]["sums"], expected[1]["sums"], rtol=1e-5, atol=1e-5)


@pytest.mark.nightly
def test_groups_share_memory_and_keep_their_numbers() -> None:
    """C7: one pool of memory for the graphs of all groups; each group has its own state."""
    case = next(c for c in cases.BASE if c.name == "iql" and not c.discrete)
    algorithm = case.make()
    source, them = algorithm.sampler().prepare(cases.data(False)), [Replica(seed) for seed in range(4)]
    pools = []

    def train(mode: str, device: torch.device) -> Any:
        engine = LocalEngine(
            Plan(algorithm, cases.BATCH, mode, "float32", 2), backend.move(source, device), them, device
        )
        state = first_state(algorithm, them)
        engine.load(state, state, {})
        for at in (0, 3):
            engine.run(at, 3)
        pools.append([step.program.pool for step in engine.groups if step.program is not None])
        return engine.state()

    expected = train("eager", torch.device("cpu"))
    with imitated() as many, Machine():
        many.enter_context(pytest.MonkeyPatch.context()).setattr(torch.cuda, "graph_pool_handle", object)
        found = train("cudagraph", META)
    assert largest_difference(found, expected) <= 1e-5
    assert len(set(map(id, pools[1]))) == 1 and pools[1][0] is not None


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float32, 1e-6), (torch.float64, 1e-10)])
def test_inverse_by_products(dtype: torch.dtype, limit: float) -> None:
    """C8: BREEZE's covariance, half of whose coordinates repeat: its inverse, and the gradient through it, under
    vmap.
    """
    g = torch.Generator().manual_seed(0)
    b = torch.randn(3, 256, 50, generator=g, dtype=dtype) @ torch.randn(50, 50, generator=g, dtype=dtype)
    b[..., 25:] = b[..., :25]
    matrix = b.transpose(-1, -2) @ b / 256 + RIDGE * torch.eye(50, dtype=dtype)
    weight = torch.randn(50, 50, generator=g, dtype=dtype)

    def relative(ours: Tensor, theirs: Tensor) -> float:
        return float((ours.double() - theirs).norm() / theirs.norm())

    def slope(inverse: Any) -> Any:
        return vmap(grad(lambda m: (inverse(m) * weight.to(m.dtype)).sum()))

    assert relative(vmap(inverse_by_products)(matrix), torch.linalg.inv(matrix.double())) < limit
    assert relative(slope(inverse_by_products)(matrix), slope(torch.linalg.inv)(matrix.double())) < limit


def test_running_maximum_is_cummax() -> None:
    """W3: values and gradients, with equal neighbours and NaN."""
    x = torch.tensor([[0.0, 2.0, 2.0, 1.0, 3.0], [5.0, float("nan"), 6.0, 7.0, 1.0], [1.0, 1.0, 1.0, 1.0, 1.0]])
    weight = torch.arange(1.0, 6.0)
    torch.testing.assert_close(_running_maximum(x)[[0, 2]], x.cummax(-1).values[[0, 2]])
    assert _running_maximum(x)[1].isnan().any()
    ours, theirs = (
        grad(lambda x, f=f: (f(x)[[0, 2]] * weight).sum())(x) for f in (_running_maximum, lambda x: x.cummax(-1).values)
    )
    torch.testing.assert_close(ours[[0, 2]], theirs[[0, 2]])
