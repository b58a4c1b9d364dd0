"""A compiled step is found again by what it computes, and by nothing less."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from offrl import losses
from offrl.algorithm import Algorithm, Traits
from offrl.algorithms.director.algorithm import Director
from offrl.algorithms.director.settings import DirectorConfig
from offrl.algorithms.rssm import RSSM, RSSMConfig
from offrl.settings.replicas import Replica
from offrl.training import execution
from offrl.training.compiling import ahead, cost_model
from offrl.training.compiling.fingerprint import Fingerprint, Unnamed
from offrl.training.engine import Plan
from offrl.training.execution import choose_mode
from offrl.training.run.header import title
from tests.support.problems import compiled_problem

CPU = torch.device("cpu")


def name(*things: Any) -> str:
    fingerprint = Fingerprint()
    for thing in things:
        fingerprint.add(thing)
    return fingerprint.digest()


def test_the_same_settings_have_the_same_name_whatever_the_first_weights() -> None:
    assert name(*compiled_problem()) == name(*compiled_problem())


def test_another_setting_has_another_name() -> None:
    names = {
        name(*compiled_problem(**settings))
        for settings in ({}, {"temperature": 3.5}, {"hidden": [16, 17]}, {"expectile": 0.71})
    }
    assert len(names) == 4


def test_a_function_that_was_replaced_gives_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    before = name(*compiled_problem())
    monkeypatch.setattr(losses, "expectile", lambda *a, **k: 0.0)
    assert name(*compiled_problem()) != before


def test_small_tensors_count_with_their_values_and_networks_with_their_shapes() -> None:
    assert name(torch.tensor([1.0, 2.0])) != name(torch.tensor([1.0, 2.5]))
    assert name(nn.Linear(2, 3)) == name(nn.Linear(2, 3)) != name(nn.Linear(3, 2))


def test_what_closures_hold_belongs_to_the_name() -> None:
    def scaled(factor: float) -> Any:
        return lambda x: x * factor

    assert name(scaled(2.0)) == name(scaled(2.0)) != name(scaled(3.0))


def test_an_open_file_has_no_name(tmp_path: Path) -> None:
    with (tmp_path / "file").open("w") as file, pytest.raises(Unnamed):
        name(file.buffer.raw)


@pytest.mark.slow  # imports a compiler
def test_what_an_update_reads_from_elsewhere_becomes_an_input() -> None:
    table = torch.arange(6.0).view(3, 2)

    def work(state: dict[str, Any], rows: torch.Tensor) -> None:
        state["x"].add_(table[rows].sum())
        state["y"].copy_(table.sum() + state["x"])

    leaves, structure = pytree.tree_flatten(({"x": torch.zeros(()), "y": torch.zeros(())}, torch.tensor([0, 2])))
    graph, constants = ahead._traced(work, leaves, structure)
    assert len(constants) == 1 and constants[0] is table
    assert float(leaves[0]) == 0.0  # tracing left the state alone
    graph(*leaves, table * 2.0)
    assert float(leaves[0]) == 20.0 and float(leaves[1]) == 50.0


def test_compiling_pays_by_the_time_of_updates_not_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    small, large = (cost_model.Cost(seconds, ahead.compiling_seconds(500)) for seconds in (0.0005, 0.5))
    assert not small.compiling_pays(6000, 1) and large.compiling_pays(300, 2)
    assert not small.processes_pay(6000) and large.processes_pay(300)
    usual = ahead.compiling_seconds(500)
    ahead._note_seconds(2 * usual, 500)  # on a slow machine
    assert ahead.compiling_seconds(500) == pytest.approx(2 * usual, rel=0.01)
    (tmp_path / ahead.PACE).write_text("[]")
    assert ahead.compiling_seconds(500) == usual


def test_costs_are_measured_once_for_the_same_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that is given twice is carried out alike, to the last bit, whatever else the machine does meanwhile."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    algorithm, source = compiled_problem()
    plan = Plan(algorithm, 8, "eager", "float32", 2)
    measured = cost_model.cost(plan, source, [Replica(0), Replica(1)])
    assert measured.seconds > 0 and measured.compiling > 0
    ahead._note_seconds(1e3, 500)
    monkeypatch.setattr(cost_model, "_measured", lambda *x: cost_model.Cost(1.0, 2.0))
    assert cost_model.cost(plan, source, [Replica(0), Replica(1)]) == measured
    assert cost_model.cost(
        dataclasses.replace(plan, batch_size=16), source, [Replica(0), Replica(1)]
    ) == cost_model.Cost(1.0, 2.0)
    for file in tmp_path.glob("cost-*"):
        file.write_text('{"seconds": "many"}')
    assert cost_model.cost(plan, source, [Replica(0), Replica(1)]) == cost_model.Cost(1.0, 2.0)


def test_the_mode_follows_what_was_measured() -> None:
    assert (
        choose_mode("auto", CPU, 100_000, compiling_pays=False)
        == "eager"
        == choose_mode("eager", CPU, 100, compiling_pays=True)
    )
    assert (
        choose_mode("compiled", CPU, 100, compiling_pays=False)
        == "compiled"
        == choose_mode("auto", CPU, 100, compiling_pays=True)
    )


@pytest.mark.parametrize("kind, config", [(RSSM, RSSMConfig), (Director, DirectorConfig)])
def test_an_unrolled_program_is_compiled_unless_it_is_too_long(kind: type[Algorithm[Any]], config: type) -> None:
    """Up to the length that was measured, where that pays; of a longer one the first lines say why not."""
    at, plain = 5_000, kind.traits_for(config(length=16, horizon=8))
    longest, longer = (kind.traits_for(config(length=n, horizon=16)) for n in (execution.LONGEST - 16, 100))
    assert (plain.unrolled, longest.unrolled, longer.unrolled) == (24, execution.LONGEST, 116)

    def mode(compile_: str, traits: Traits, updates: int = at, pays: bool | None = None) -> str:
        return choose_mode(compile_, CPU, updates, SimpleNamespace(traits=traits), pays)  # type: ignore[arg-type]

    published = kind.traits_for(config())
    assert published.unrolled > execution.LONGEST and mode("auto", published) == "eager"
    assert mode("auto", plain) == mode("auto", longest) == mode("auto", longest, 300, True) == "compiled"
    assert mode("auto", plain, at - 1) == mode("auto", plain, at, False) == mode("auto", longer) == "eager"
    assert mode("auto", longer, at, True) == "eager" and mode("compiled", longer) == "compiled"
    (line,) = execution.why_eager("auto", "eager", CPU, at, longer)
    assert "unrolled over 116 steps" in line and "compile=compiled" in line
    for given in (("auto", "eager", CPU, at - 1, longer), ("eager", "eager", CPU, at, longer)):
        assert not execution.why_eager(*given)
    assert not execution.why_eager("auto", "compiled", CPU, at, longer)  # as the run was begun
    assert not execution.why_eager("auto", "eager", CPU, at, longest)
    plan = SimpleNamespace(mode="eager", algorithm=SimpleNamespace(traits=longer))
    setup = SimpleNamespace(replicas=[Replica(0)], arithmetic="CPU", plan=plan, devices=[CPU])
    run = SimpleNamespace(grid={}, match=[], label="x", steps=at, experiment="none", compile="auto")
    dataset = MagicMock(num_episodes=1)
    assert line in title(setup, run, dataset, Path("run"), "").splitlines()  # type: ignore[arg-type]


def test_steps_of_a_recurrence_are_counted_in_what_compiling_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, source = compiled_problem()
    counted: list[int] = []

    def compiling_seconds(operations: int) -> float:
        counted.append(operations)
        return 1.0

    monkeypatch.setattr(ahead, "compiling_seconds", compiling_seconds)
    for unrolled in (0, 10):
        algorithm.traits = dataclasses.replace(algorithm.traits, unrolled=unrolled)
        cost_model._measured(Plan(algorithm, 8, "eager", "float32", 1), source, [Replica(0)], 1)
    assert counted[1] - counted[0] == 10 * cost_model.UNROLLED


CODE = """
import sys, json, torch
from tests.support.problems import compiled_problem
from offrl.algorithm import stack
from offrl.system import backend
from offrl.training.step import Step
backend.configure(torch.device("cpu"), 1)
algorithm, source = compiled_problem()
step = Step(algorithm, source, batch_size=8, replicas=2, mode=sys.argv[1])
state, sums = step.run(stack([algorithm.init(s) for s in (0, 1)]), {}, 0, 6)
print(json.dumps([step.mode, "torch._inductor" in sys.modules, "torch._dynamo" in sys.modules, {k: v.tolist() for k, v in sums.items()}]))
"""  # noqa: E501


@pytest.mark.slow
def test_processes_share_one_compilation_and_the_next_ones_need_no_compiler(tmp_path: Path) -> None:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.getcwd()}

    def start(mode: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", CODE, mode], env=environment, stdout=subprocess.PIPE, text=True)

    first = [start("compiled") for _ in range(2)]
    results = [json.loads(process.communicate(timeout=300)[0]) for process in first]
    assert sorted(compiler for _, compiler, *_ in results) == [False, True]  # the other one waited
    libraries = [path for path in tmp_path.glob("programs/*.so") if not path.name.startswith("kernels-")]
    assert len(libraries) == 1
    later, eager = (json.loads(start(mode).communicate(timeout=300)[0]) for mode in ("compiled", "eager"))
    assert later[:3] == ["compiled", False, False] and later[3] == results[0][3] == results[1][3]
    assert eager[0] == "eager" and not eager[1]
    for metric, values in eager[3].items():
        assert later[3][metric] == pytest.approx(values, rel=1e-4, abs=1e-5)
