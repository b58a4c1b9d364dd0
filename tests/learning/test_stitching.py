"""Who puts two episodes together? On `point-stitch` the data's best return from the start scores 0, the stitched route
100.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import offrl

pytestmark = pytest.mark.nightly
COMMON: dict[str, Any] = {"compare": [], "quiet": True, "eval.every": 0, "eval.episodes": 20, "compile": "eager"}
SMALL: dict[str, Any] = {"algo.hidden": [128, 128], "algo.learning_rate": 1e-3}
WINDOWS: dict[str, Any] = {
    "algo.width": 32,
    "algo.layers": 2,
    "algo.learning_rate": 1e-3,
    "algo.warmup_steps": 100,
    "algo.dropout": 0.0,
}
IMITATE = {  # what was seen, whatever is asked for: none of them takes the stitched route
    "bc": (1000, SMALL),
    "rvs": (1000, SMALL),
    "rcsl": (1000, {**SMALL, "algo.condition": "to_go"}),
    "dt": (600, WINDOWS),
}
STITCH: dict[str, tuple[int, dict[str, Any]]] = {
    "mbrcsl": (1500, {**SMALL, "algo.weight_decay": 0.0}),
}


def score(folder: str, name: str, steps: int, settings: dict[str, Any], data: str = "point-stitch") -> np.ndarray:
    algo = "rvs" if name == "rcsl" else name
    run = offrl.train(algo, data, seeds=2, steps=steps, runs_dir=folder, settings={**COMMON, **settings})
    found = np.array([row["score"] for row in run.final_scores])
    print(f"{name}: {found.round(1)}")
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def parts(folder: str) -> dict[str, Any]:
    """A model and a behaviour policy smaller than the defaults; rewards and endings are the environment's own."""
    small = {"algo.members": 3, "algo.elites": 3, "algo.hidden": [64, 64], "algo.max_epochs": 6, "algo.test_share": 0.0}
    model = offrl.train(
        "dynamics",
        "point-stitch",
        seeds=1,
        steps=1500,
        runs_dir=folder,
        settings={**COMMON, **small, "algo.reward": "auto"},
    )
    small = {"algo.embedding": 32, "algo.hidden": [64, 64], "algo.learning_rate": 2e-3}
    behaviour = offrl.train(
        "diffusion_bc", "point-stitch", seeds=1, steps=1500, runs_dir=folder, settings={**COMMON, **small}
    )
    return {"mbrcsl": {"algo.world_model": str(model.dir), "algo.behaviour": str(behaviour.dir)}}


@pytest.mark.parametrize("name", IMITATE)
def test_imitation_does_not_stitch(folder: str, name: str) -> None:
    found = score(folder, name, *IMITATE[name])
    # a clone goes between the ways where they cross, and by chance some of its episodes end at G; who is asked for a
    # return takes the decoy
    assert (found.mean() < 60.0) if name == "bc" else (found.max() < 30.0), (name, found)


def test_asking_for_the_stitched_return_does_not_stitch(folder: str) -> None:
    """3 was never seen: the policy goes where the largest return was."""
    steps, settings = IMITATE["rcsl"]
    found = score(folder, "rcsl", steps, {**settings, "algo.target_return": 3.0})
    assert found.max() < 30.0, found


@pytest.mark.parametrize("name", STITCH)
def test_stitches(folder: str, parts: dict[str, Any], name: str) -> None:
    steps, settings = STITCH[name]
    found = score(folder, name, steps, {**settings, **parts.get(name, {})})
    assert found.mean() > 80.0, (name, found)


CHAIN: dict[str, Any] = {**WINDOWS, "algo.learning_rate": 2e-3, "algo.context": 1}


@pytest.fixture(scope="module")
def critics(folder: str) -> str:
    """A run of CQL with rates that suit so small a task."""
    rates = {"algo.learning_rate": 3e-3, "algo.actor_learning_rate": 3e-3, "algo.polyak": 0.02, "algo.hidden": [64, 64]}
    rates |= {"algo.conservative_weight": 0.3, "dataset.normalize_observations": True}
    return str(
        offrl.train("cql", "chain-stitch", seeds=1, steps=2000, runs_dir=folder, settings={**COMMON, **rates}).dir
    )


def test_on_the_chain_values_stitch_and_returns_do_not(folder: str, critics: str) -> None:
    """DT from its first step on goes to the decoy, with or without a memory; a memory does not keep V-ADT from
    stitching.
    """
    assert score(folder, "dt", 500, CHAIN, "chain-stitch").max() < 10.0
    assert score(folder, "dt", 500, {**CHAIN, "algo.context": 20}, "chain-stitch").max() < 10.0
    assert score(folder, "qdt", 500, {**CHAIN, "algo.values": critics}, "chain-stitch").min() > 90.0
    values = {
        "algo.values_steps": 2000,
        "algo.expectile": 0.9,
        "algo.value_hidden": [64, 64],
        "algo.value_learning_rate": 3e-3,
    }
    assert (
        score(
            folder, "vadt", 500, {**CHAIN, "algo.context": 20, "algo.temperature": 5.0, **values}, "chain-stitch"
        ).min()
        > 90.0
    )
