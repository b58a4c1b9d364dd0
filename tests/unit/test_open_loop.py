"""Open-loop predictions of latent models: what they may see, their errors by hand, and the files of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from offrl import rng
from offrl.algorithm import Algorithm, Batch, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.settings.compose import compose
from offrl.settings.replicas import Replica
from offrl.training.run.artifacts import FinishedRun
from offrl.training.run.open_loop import OpenLoopReport
from offrl.training.setup import make_algorithm
from offrl.world_models.open_loop import CONTEXT, Expected, errors, windows_of

STEPS = 12  # of an episode
SMALL = {
    "rssm": {"recurrent_width": 8, "groups": 2, "classes": 4, "width": 8, "depth": 2, "members": 1, "penalty": 0.0},
    "drama": {"recurrent_width": 8, "blocks": 4, "groups": 2, "classes": 4, "width": 8, "depth": 2},
    "director": {"recurrent_width": 8, "groups": 2, "classes": 4, "width": 8, "depth": 2, "goal_steps": 2},
    "tdmpc2": {"hidden": [8], "latent": 8, "encoder_hidden": [8], "discount": 0.9, "episodic": False},
    "mrq": {"hidden": [8], "latent": 8, "action_latent": 4},
}


def episodes(images: bool = False, steps: int = STEPS, terminals: bool = False) -> Dataset:
    """Ten of `steps` rows each."""
    random, rows = np.random.default_rng(0), 10 * steps
    last = np.arange(rows) % steps == steps - 1
    seen: Any = random.normal(size=(rows, 3))
    if images:
        seen = {"camera": random.integers(0, 256, (rows, 32, 32, 3), np.uint8), "state": seen.astype(np.float32)}
    actions, rewards = random.uniform(-1.0, 1.0, (rows, 2)), random.normal(size=rows)
    ends = (last, ~last & last) if terminals else (~last & last, last)
    return from_arrays(seen, actions, rewards, *ends, action_low=[-1.0] * 2, action_high=[1.0] * 2)


def small(name: str, dataset: Dataset) -> tuple[Algorithm[Any], Any]:
    """An algorithm and a state, of which nothing is 0."""
    settings = {f"algo.{k}": v for k, v in SMALL[name].items()}
    algorithm = make_algorithm(compose({"algo": name, "dataset": "-", **settings}), dataset)
    state, g = algorithm.init(0), torch.Generator().manual_seed(1)
    for params in state.params.values():
        params.update({k: v + 0.1 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    return algorithm, state


def changed(batch: Batch, name: str, step: int) -> Batch:
    """The batch with another column from one step on."""
    column: Tensor = batch[name]  # type: ignore[assignment]
    return {**batch, name: torch.cat([column[:step], column[step:] + 0.5])}


@torch.no_grad()
@pytest.mark.parametrize("name", list(SMALL))
def test_models_see_actions_up_to_each_state_and_observations_of_the_context(name: str) -> None:
    dataset = episodes()
    algorithm: Any
    algorithm, state = small(name, dataset)
    batch = windows_of(dataset)
    assert batch is not None

    def expected(batch: Batch) -> Expected:
        return algorithm.open_loop(state.params, batch, CONTEXT, rng.make_key(0))

    one = expected(batch)
    assert one.rewards.shape == batch["rewards"][CONTEXT:].shape
    assert torch.equal(expected(changed(batch, "observations", CONTEXT)).rewards, one.rewards)
    assert not torch.equal(expected(changed(batch, "observations", CONTEXT - 1)).rewards, one.rewards)
    step = CONTEXT + 2  # the action before state `step` is that of the step from `step` - 1 on
    other = expected(changed(changed(batch, "actions", step - 1), "previous_actions", step))
    assert torch.equal(other.rewards[:2], one.rewards[:2]) and not torch.equal(other.rewards[2], one.rewards[2])


def test_a_decoder_gives_observations_in_the_units_of_the_data() -> None:
    dataset = episodes()
    algorithm: Any
    algorithm, state = small("rssm", dataset)
    for key, value in state.params["decoder"].items():  # its last layer: 1 in symlog units, whatever it sees
        state.params["decoder"][key] = torch.ones_like(value) if key.endswith("bias") else torch.zeros_like(value)
    batch = windows_of(dataset)
    assert batch is not None
    numbers = algorithm.open_loop(state.params, batch, CONTEXT, rng.make_key(0)).numbers
    torch.testing.assert_close(numbers, torch.full_like(numbers, np.e - 1.0))


def test_errors_by_hand() -> None:
    """Two windows, one state ahead; rewards 1 and 3, of a deviation of 1; numbers that go from 0 to 2 in one window."""
    rewards = torch.zeros(CONTEXT + 1, 2)
    rewards[CONTEXT] = torch.tensor([1.0, 3.0])
    numbers = torch.zeros(CONTEXT + 1, 2, 1)
    numbers[CONTEXT, 1] = 2.0
    image = torch.zeros(CONTEXT + 1, 2, 1, 1, 3, dtype=torch.uint8)
    image[CONTEXT] = 51
    batch: Any = {"arrival_rewards": rewards, "observations": {"camera": image, "state": numbers}}
    expected = Expected(torch.tensor([[1.0, 2.0]]), torch.full((1, 2, 1), 2.0), {"camera": torch.ones(1, 2, 1, 1, 3)})
    found = errors(batch, expected)
    deviation = float(numbers.std(unbiased=False))
    medians = {name: [kinds[kind]["median"][0] for kind in ("model", "guess")] for name, kinds in found.items()}
    assert medians["rewards"] == pytest.approx([0.5, 1.0])
    assert medians["numbers"] == pytest.approx([1.0 / deviation, 1.0 / deviation])
    assert medians["camera"] == pytest.approx([0.8, 0.2])


def test_windows_hold_states_that_are_known() -> None:
    batch = windows_of(episodes(terminals=True))
    assert batch is not None and len(batch["rewards"]) == STEPS and batch["valid"].all()
    assert windows_of(episodes(steps=CONTEXT)) is None


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    dataset = episodes()
    algorithm, state = small("rssm", dataset)
    for key, value in state.params["decoder"].items():
        state.params["decoder"][key] = torch.full_like(value, 1e6)
    OpenLoopReport.make(FinishedRun(tmp_path, algorithm, dataset, [Replica(0)], stack([state]), "auto", True))
    (model,) = json.loads((tmp_path / "open_loop.json").read_text(), parse_constant=pytest.fail)["models"]
    assert model["errors"]["numbers"]["model"]["median"] == [None] * (STEPS - CONTEXT)


@pytest.mark.parametrize("images", [False, True])
def test_the_files_of_a_run(images: bool, tmp_path: Path, pictures: dict[str, Any]) -> None:
    dataset = episodes(images)
    algorithm, state = small("rssm", dataset)
    replicas = [Replica(0), Replica(1)]
    OpenLoopReport.make(FinishedRun(tmp_path, algorithm, dataset, replicas, stack([state, state]), "auto", True))
    written = json.loads((tmp_path / "open_loop.json").read_text(), parse_constant=pytest.fail)
    kinds = ["rewards", "numbers", *["camera"] * images]
    assert [list(model["errors"]) for model in written["models"]] == [kinds, kinds]
    assert len(written["models"][0]["errors"]["rewards"]["model"]["median"]) == STEPS - CONTEXT
    assert (tmp_path / "open_loop.gif").exists() == images
    if images:
        with Image.open(tmp_path / "open_loop.gif") as animation:
            assert animation.n_frames == 1 + STEPS - CONTEXT
    shown = len(("last seen", 1, 2, 5))  # of 7 steps
    assert len(pictures["open_loop.png"].axes) == len(kinds) + images * 2 * 3 * shown


@torch.no_grad()
def test_goals_are_chosen_from_what_was_seen_until_then() -> None:
    dataset = episodes()
    algorithm: Any
    algorithm, state = small("director", dataset)
    batch = windows_of(dataset)
    assert batch is not None
    one = algorithm.goals(state.params, batch, CONTEXT, rng.make_key(0))
    assert list(one.states) == [4, 6, 8]  # of 12, each pursued for 2 steps
    windows = batch["rewards"].shape[1]
    assert one.goals.numbers.shape == (3, windows, 3) and one.imagined.numbers.shape == (3, 2, windows, 3)
    assert one.nearness.shape == (3, 3, windows) and float(one.nearness.abs().max()) <= 1.0
    other = algorithm.goals(state.params, changed(batch, "observations", 6), CONTEXT, rng.make_key(0))
    same = [torch.equal(a, b) for a, b in zip(one.nearness, other.nearness, strict=True)]
    assert same == [True, False, False]
    assert algorithm.goals(state.params, {k: x[:6] for k, x in batch.items()}, CONTEXT, rng.make_key(0)) is None


@pytest.mark.parametrize("images", [False, True])
def test_the_picture_of_goals(images: bool, tmp_path: Path, pictures: dict[str, Any]) -> None:
    dataset = episodes(images)
    algorithm, state = small("director", dataset)
    OpenLoopReport.make(FinishedRun(tmp_path, algorithm, dataset, [Replica(0)], stack([state]), "auto", True))
    (model,) = json.loads((tmp_path / "open_loop.json").read_text())["models"]
    assert len(model["nearness"]) == 3
    assert len(pictures["goals.png"].axes) == 3 * 2 + images * 2 * 4 * 3


def test_short_episodes_have_no_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = episodes(steps=CONTEXT)
    algorithm, state = small("mrq", dataset)
    OpenLoopReport.make(FinishedRun(tmp_path, algorithm, dataset, [Replica(0)], stack([state]), "auto", False))
    assert not list(tmp_path.iterdir()) and "half of the episodes have 5 states or fewer" in capsys.readouterr().out
