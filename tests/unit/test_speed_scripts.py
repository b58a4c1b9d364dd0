"""The contestants of scripts/compare_speed.py train what offrl trains; counts of products; memory does not grow."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from offrl import rng

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["iql", "td3_bc", "rebrac", "cql", "edac", "dt", "qrl", "fql", "qc", "ensemble"])
def test_plain_loop_has_the_same_losses(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import compare_speed
    from peers import common, ensemble_plain, offrl_speed, plain
    from peers.cql_plain import CQL
    from peers.dt_plain import DT, QUIET
    from peers.edac_plain import EDAC
    from peers.flops import QC_LENGTH
    from peers.fql_plain import checked
    from peers.iql_plain import IQL
    from peers.qrl_plain import QRL
    from peers.rebrac_plain import ReBRAC
    from peers.td3_bc_plain import TD3BC

    from offrl import rng

    for draw in ("normal", "uniform"):  # a check replaces them for good, in a process of its own
        monkeypatch.setattr(rng, draw, getattr(rng, draw))
    file = tmp_path / "check.npz"
    ours = offrl_speed.check(name, file)
    weights, batches = common.load_check(file)
    assert len(batches) == common.CHECKED_UPDATES
    if name == "ensemble":
        model = ensemble_plain.Model()
        ensemble_plain.load(model, weights)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        theirs = [ensemble_plain.update(model, optimizer, b["x"], b["y"]) for b in batches]
    else:
        made: dict[str, Any] = {
            "iql": IQL,
            "td3_bc": lambda: TD3BC(noise=0.0),
            "cql": lambda: CQL(plain.zeros, plain.spread),
            "edac": lambda: EDAC(plain.zeros),
            "dt": lambda: DT(**QUIET),
            "rebrac": lambda: ReBRAC(noise=0.0),
            "qrl": QRL,
            "fql": lambda: checked(1),
            "qc": lambda: checked(QC_LENGTH),
        }
        trainer = made[name]()
        trainer.load(weights)
        theirs = [trainer.update(plain.tensors(b)) for b in batches]
    assert compare_speed.difference(ours, theirs) < 1e-4


def test_plain_windows_are_those_of_the_sampler() -> None:
    import numpy as np
    from peers import common, dt_plain
    from peers.flops import DT_CONTEXT
    from peers.runner import synthetic

    from offrl.data.samplers.sequences import SequenceSampler, windows

    batch = dt_plain.Windows(2_000).sample(200)
    assert not batch["valid"].all()  # some are padded
    every = common.transitions(2_000)["observations"]
    first = [int(np.flatnonzero((every == row).all(-1))[0]) for row in batch["observations"][:, 0].numpy()]
    ours = windows(SequenceSampler(DT_CONTEXT).prepare(synthetic(2_000)), torch.tensor(first), DT_CONTEXT)
    for name, column in batch.items():
        torch.testing.assert_close(column, ours[name], rtol=1e-5, atol=1e-4)


def test_data_on_disk_are_those_in_memory_over_and_over(tmp_path: Path) -> None:
    from peers.runner import Runner, make, on_disk, synthetic

    once, mapped = synthetic(1_500), on_disk(4_500, tmp_path, repeated=1_500)
    assert mapped.mapped and len(mapped) == 4_500
    assert (
        mapped.episode_start[1:].tolist() == mapped.episode_end[:-1].tolist() and int(mapped.episode_end[-1]) == 4_500
    )
    assert torch.equal(mapped.transition_rows(), torch.cat([once.transition_rows() + k for k in (0, 1_500, 3_000)]))
    assert all(torch.equal(column[3_000:], once.columns[name]) for name, column in mapped.columns.items())
    losses = []
    for data in (mapped, replace(mapped, mapped=False)):  # what is read ahead is what the step would have drawn
        runner = Runner(make("iql", data, {"hidden": [8, 8]}), data, seeds=[0], mode="eager", batch_size=8)
        losses.append(runner.updates(2))
        runner.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_difference_of_losses_tells_loops_apart() -> None:
    import compare_speed

    ours = [{"critic/loss": 2.0, "actor/loss": 0.1}, {"critic/loss": 4.0}]
    assert compare_speed.difference(
        ours, [{"critic/loss": 2.0, "actor/loss": 0.2}, {"critic/loss": 5.0}]
    ) == pytest.approx(0.25)
    assert not compare_speed.difference(ours, [{"critic/loss": 2.0}, {"critic/loss": 4.0}]) < 1e-3


def test_counted_products_are_those_that_a_plain_loop_does() -> None:
    from peers import common, flops, plain
    from peers.dt_plain import DT, Windows
    from peers.iql_plain import IQL
    from peers.td3_bc_plain import TD3BC
    from torch.utils.flop_counter import FlopCounterMode

    batch = plain.tensors({k: v[: common.BATCH] for k, v in common.transitions(common.BATCH).items()})
    sizes = (common.BATCH, common.OBSERVATION, common.ACTION, common.HIDDEN)
    for name, trainer, updates in (("iql", IQL(), 1), ("td3_bc", TD3BC(), 2)):
        with FlopCounterMode(display=False) as counter:
            for _ in range(updates):
                trainer.update(batch)
        # the plain TD3+BC also works out the critic's own gradients in the actor's half, which nobody needs
        spare = flops.flops(flops.backward(common.BATCH, [14, 256, 256, 1])) - flops.flops(
            flops.backward(common.BATCH, [14, 256, 256, 1], weights=False)
        )
        assert counter.get_total_flops() / updates == flops.needed(name, *sizes) + (
            spare / 2 if name == "td3_bc" else 0.0
        )
    sizes = (8, common.OBSERVATION, common.ACTION, flops.DT_HIDDEN)
    windows = Windows(2_000).sample(8)
    with FlopCounterMode(display=False) as counter:
        DT().update(windows)
    assert counter.get_total_flops() == flops.flops(flops.dt(*sizes, spared=False))


def test_offrl_spares_the_last_block_what_nobody_reads() -> None:
    from peers import common, flops
    from peers.offrl_speed import QUIET, build
    from torch.utils.flop_counter import FlopCounterMode

    algorithm, dataset = build("dt", 2_000, QUIET["dt"])
    sampler = algorithm.sampler()
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), 8)
    with FlopCounterMode(display=False) as counter:
        algorithm.update(algorithm.init(0), batch, rng.make_key(0), phase=0)
    assert counter.get_total_flops() == flops.needed("dt", 8, common.OBSERVATION, common.ACTION, flops.DT_HIDDEN)


def test_counted_products_of_cql_and_edac_are_a_floor() -> None:
    """A plain loop does more than is needed: gradients of critics in the actor's half, a second forward pass for EDAC's
    gradients.
    """
    from peers import common, flops, plain
    from peers.cql_plain import CQL
    from peers.edac_plain import EDAC
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils.flop_counter import flop_registry

    class Counter(
        TorchDispatchMode
    ):  # torch's own tracks modules as well, which autograd.grad with respect to a leaf does not allow
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            count = flop_registry.get(func._overloadpacket)
            self.total += count(*args, **(kwargs or {}), out_val=out) if count else 0
            return out

    batch = plain.tensors({k: v[: common.BATCH] for k, v in common.transitions(common.BATCH).items()})
    for name, trainer, most in (("cql", CQL(), 1.1), ("edac", EDAC(), 1.6)):
        with Counter() as counter:
            trainer.update(batch)
        needed = flops.needed(name, common.BATCH, common.OBSERVATION, common.ACTION, flops.HIDDEN[name])
        assert 1.0 < counter.total / needed < most, (name, counter.total, needed)


def test_counted_products_of_rebrac_and_qrl_are_a_floor() -> None:
    """A plain loop works out gradients in the actor's half that nobody needs: the critics' own, QRL's encoder's and its
    dynamics'.
    """
    from peers import common, flops, plain
    from peers.qrl_plain import QRL
    from peers.rebrac_plain import ReBRAC
    from torch.utils.flop_counter import FlopCounterMode

    columns = {k: v[:32] for k, v in common.with_next_actions(32).items()}
    batch = plain.tensors({**columns, "value_goals": columns["observations"], "actor_goals": columns["observations"]})
    for name, trainer, updates, most in (("rebrac", ReBRAC(), 2, 1.1), ("qrl", QRL(), 1, 1.4)):
        with FlopCounterMode(display=False) as counter:
            for _ in range(updates):
                trainer.update(batch)
        needed = flops.needed(name, 32, common.OBSERVATION, common.ACTION, flops.HIDDEN[name])
        assert 1.0 < counter.get_total_flops() / updates / needed < most, (
            name,
            counter.get_total_flops() / updates / needed,
        )


def test_table_has_ratios_within_a_round() -> None:
    from compare_speed import BEST, JAX, OURS, PLAIN, Row, line_of, references, summary_line
    from peers.contest import Contestant

    plain = Row(PLAIN, ["plain"], roles=(PLAIN,), rates=[100.0, 200.0, 100.0])
    row = Row(OURS, ["c"], seeds=4, rates=[300.0, 400.0, 250.0])
    floor = Row("the floor", [], rates=[600.0, 800.0, 500.0])
    line = line_of(row, [Contestant("c", "m")] * 2, {PLAIN: plain, "the floor": floor})
    assert line == f"| {OURS} | 4 | 75.0 | 300.0 | 2.50 (2.00 to 3.00) | 0.25 (0.25 to 0.25) |"
    failed = Contestant("d3rlpy", "m", failure="no such package")
    assert line_of(Row("d3rlpy", ["d3rlpy"]), [failed], {PLAIN: plain}) == "| d3rlpy | 1 | no such package | | |"

    slow, fast = (
        Row(label, [label], roles=(JAX,), rates=rates)
        for label, rates in (("ours", [90.0] * 3), ("theirs", [100.0] * 3))
    )
    absent = Row("unifloral", ["unifloral"], roles=(JAX,))
    rows = [plain, slow, fast, absent, Row(OURS, ["one"], roles=(OURS,), rates=[150.0, 200.0, 125.0])]
    reference = references(rows)
    assert reference == {PLAIN: plain, BEST: fast}
    line = summary_line("iql", rows, {**reference, "the floor": floor})
    assert line == "| IQL | 150.0 | 1.25 (1.00 to 1.50) | - | - | 1.50 (1.25 to 2.00), theirs | 0.25 (0.25 to 0.25) |"


@pytest.mark.nightly
def test_memory_does_not_grow() -> None:
    from peers.runner import Runner, make, resident, synthetic

    def tensors() -> int:
        gc.collect()
        return sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects())

    dataset = synthetic(1_000)
    runner = Runner(make("bc", dataset, {"hidden": [8]}), dataset, seeds=[0], mode="eager", batch_size=4)
    runner.updates(400)
    count, size = tensors(), resident()
    runner.updates(1_000)
    assert tensors() == count
    assert resident() - size < 2_000_000  # 2 kB for each update


def test_resident_bytes_of_a_state_are_those_of_its_tensors() -> None:
    from peers.runner import nbytes

    a = torch.zeros(10)
    assert nbytes({"x": [a, a[:5]], "y": (torch.zeros(3, dtype=torch.int64), None)}) == 40 + 24
