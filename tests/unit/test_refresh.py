"""`Algorithm.refresh`: called before certain updates, alone changes `buffers`, and shows neither slices, nor modes, nor
other replicas.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import Algorithm, Metrics, TrainState, Traits
from offrl.data.dataset import DataSpec
from offrl.settings.replicas import Replica
from offrl.system import files as checkpoint
from offrl.training.engine import LocalEngine, Plan, first_state
from offrl.training.step import Step
from offrl.training.updates import metric_means

compiler = pytest.mark.skipif(
    not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="needs a C++ compiler"
)


@dataclass
class Config:
    name: str = "ring"
    learning_rate: float = 0.1
    batch_size: int = 4
    push: float = 1.0
    most: int = 1_000


class Sums:
    """Prepares a number that all replicas share; draws nothing."""

    def prepare(self, dataset: Any) -> dict[str, Tensor]:
        return {"unit": torch.tensor(2.0)}

    def __call__(self, source: Any, key: Tensor, batch_size: int) -> dict[str, Tensor]:
        return {}


class Toy(Algorithm):
    """Updates pull a weight towards a ring's mean; `refresh`, before updates 0, 4, 8, ..., writes the weight and noise
    into the ring.
    """

    Config = Config
    traits = Traits(policy_modules=())
    calls: ClassVar[list[int]] = []

    def modules(self) -> dict[str, nn.Module]:
        return {"w": nn.Linear(1, 1)}

    def sampler(self) -> Any:
        return Sums()

    def init(self, seed: int) -> TrainState:
        return (
            super().init(seed)._replace(buffers={"ring": torch.zeros(3), "count": torch.zeros((), dtype=torch.int64)})
        )

    @property
    def every(self) -> int:
        return 4

    def refresh(self, state: TrainState, source: Any, key: Tensor, *, step: int) -> tuple[TrainState, Metrics]:
        Toy.calls.append(step)
        ring, count = state.buffers["ring"], state.buffers["count"]
        value = state.params["w"]["weight"].reshape(()) + self.config.push * source["unit"] * rng.normal(key, ())
        new = ring.index_put((count % 3,), value)
        return state._replace(buffers={"ring": new, "count": count + 1}), {"ring/value": value}

    def update(self, state: TrainState, batch: Any, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        def loss(params: Any, state: TrainState) -> tuple[Tensor, Metrics]:
            away = params["weight"].sum() - state.buffers["ring"].mean() * self.runtime.source["unit"]
            return away.square(), {"loss": away.square()}

        return self.descend(state, "w", loss)

    def finished(self, state: TrainState) -> Tensor:
        return state.buffers["count"] >= self.config.most


SPEC = DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,))


def begun(seeds: list[int], mode: str = "eager", hyper: Any = None, **settings: Any) -> tuple[Step, TrainState]:
    toy = Toy(Config(**settings), SPEC)
    step = Step(toy, toy.sampler().prepare(None), batch_size=4, replicas=len(seeds), mode=mode, hyper=hyper)
    return step, first_state(toy, [Replica(s) for s in seeds])


def test_it_comes_before_every_fourth_update_however_they_are_sliced() -> None:
    Toy.calls.clear()
    step, state = begun([0, 1])
    whole, sums = step.run(state, {}, 0, 11)
    assert Toy.calls == [0, 0, 4, 4, 8, 8]  # once for each replica
    Toy.calls.clear()
    parts, total, at = begun([0, 1])[1], {}, 0
    for count in (1, 3, 4, 2, 1):
        parts, total = step.run(parts, total, at, count)
        at += count
    assert Toy.calls == [0, 0, 4, 4, 8, 8]  # once for each replica
    for a, b in zip(pytree.tree_leaves((whole, sums)), pytree.tree_leaves((parts, total)), strict=True):
        assert torch.equal(a, b)


def test_its_metrics_are_means_over_its_calls() -> None:
    step, state = begun([0])
    after, sums = step.run(state, {}, 0, 12)
    values = metric_means(sums, 12)
    # three calls filled a ring of three
    assert torch.allclose(values["ring/value"], after.buffers["ring"].mean(-1).double())
    assert set(values) == {"loss", "ring/value"}


def test_a_replica_alone_is_as_among_others() -> None:
    several = begun([5, 6, 7])
    among, _ = several[0].run(several[1], {}, 0, 9)
    step, state = begun([6])
    alone, _ = step.run(state, {}, 0, 9)
    for a, b in zip(pytree.tree_leaves(among), pytree.tree_leaves(alone), strict=True):
        assert torch.allclose(a[1].double(), b[0].double(), atol=1e-6)
    assert not torch.allclose(among.buffers["ring"][0], among.buffers["ring"][1])


def test_a_grid_reaches_it() -> None:
    step, state = begun([5, 5], hyper={"push": torch.tensor([0.0, 1.0])})
    after, _ = step.run(state, {}, 0, 1)
    first = state.params["w"]["weight"].reshape(2)
    assert after.buffers["ring"][0, 0] == first[0] and after.buffers["ring"][1, 0] != first[1]


@pytest.mark.slow
@compiler
def test_compiled_it_writes_over_the_state_and_gives_the_same_numbers() -> None:
    eager, state = begun([0, 1])
    expected, sums = eager.run(state, {}, 0, 10)
    step, state = begun([0, 1], "compiled")
    ring = state.buffers["ring"]
    after, found = step.run(state, {}, 0, 6)
    after, found = step.run(after, found, 6, 4)
    assert after.buffers["ring"] is ring
    for a, b in zip(
        pytree.tree_leaves((expected, sums)), pytree.tree_leaves((after, {k: found[k] for k in sums})), strict=True
    ):
        assert torch.allclose(a.double(), b.double(), atol=1e-5)


def test_an_engine_keeps_buffers_out_of_what_it_remembers_and_of_policies() -> None:
    toy = Toy(Config(most=3), SPEC)
    replicas = [Replica(0), Replica(1), Replica(2)]
    engine = LocalEngine(
        Plan(toy, 4, "eager", "float32", 2), toy.sampler().prepare(None), replicas, torch.device("cpu")
    )
    state = first_state(toy, replicas)
    engine.load(state, state, {})
    engine.run(0, 8)
    assert engine.finished().tolist() == [False] * 3  # type: ignore[union-attr]
    engine.settle(torch.tensor([True, True, True]))
    engine.run(8, 4)
    assert engine.finished().tolist() == [True] * 3  # type: ignore[union-attr]
    engine.freeze(torch.tensor([True, False, True]))
    now = engine.state()
    assert now.step.tolist() == [12, 8, 12] and now.buffers["count"].tolist() == [3, 3, 3]
    assert engine.good().buffers == {} and engine.acting().buffers == {}
    assert "buffers/ring" in checkpoint.flatten(now)


def test_the_interval_must_be_whole_patterns() -> None:
    class Odd(Toy):
        traits = replace(Toy.traits, period=3)

    toy = Odd(Config(), SPEC)
    with pytest.raises(ValueError, match="every 4 is no multiple of period 3"):
        Step(toy, None, batch_size=4, replicas=1)
