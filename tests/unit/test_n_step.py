"""algo.n_step in every algorithm that has it: its targets change, or it is refused before anything is trained."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from offrl.errors import UserError
from offrl.settings.train import TrainConfig
from offrl.training.setup import make_algorithm
from offrl.training.stages import ready
from tests.support.cases import ALGORITHMS, Case, data, train

HAVE = [name for name, kind in ALGORITHMS.items() if "n_step" in {f.name for f in dataclasses.fields(kind.Config)}]
POSSIBLE = [name for name in HAVE if ALGORITHMS[name].traits.n_step]


@pytest.mark.parametrize("name", POSSIBLE)
def test_windows_change_what_is_learnt(name: str) -> None:
    dataset = data(False)
    trained = []
    for n_step in (1, 3):
        algorithm = Case(name).make(dataset, n_step=n_step)
        state, metrics = train(algorithm, [0], 2, dataset)
        assert (
            all(bool(torch.isfinite(x).all()) for x in metrics.values())
            and getattr(algorithm.sampler(), "n_step", 1) >= n_step
        )
        trained.append(state.params["critic" if "critic" in state.params else "value"])
    assert any(not torch.equal(trained[0][k], trained[1][k]) for k in trained[0])


@pytest.mark.parametrize("name", [name for name in HAVE if name not in POSSIBLE])
def test_algorithms_of_other_batches_refuse_it_before_they_train_what_they_build_on(name: str) -> None:
    kind, dataset = ALGORITHMS[name], data(False)
    config = TrainConfig(algo=kind.Config(n_step=3), seeds=[0], steps=1, runs_dir="/nowhere", quiet=True)
    with pytest.raises(UserError, match=rf"^algo\.n_step=3: {name} has no n-step targets, .*; leave it at 1") as error:
        ready(config, dataset)
    assert "\n" not in str(error.value)


def test_a_sampler_without_windows_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plugin's, whose author did not say that it has none."""
    kind, dataset = ALGORITHMS["recoil"], data(False)
    monkeypatch.setattr(kind, "traits", dataclasses.replace(kind.traits, n_step=True))
    config = TrainConfig(algo=kind.Config(n_step=2, hidden=[8]), seeds=[0], steps=1)
    with pytest.raises(UserError, match=r"^algo\.n_step=2: recoil has no n-step targets"):
        make_algorithm(config, dataset)
