"""Probes of latent states: what a regression explains, by hand, and on which episodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.errors import UserError
from offrl.world_models.open_loop import CONTEXT
from offrl.world_models.probe import RIDGE, explained, halves_of, probe
from tests.unit.test_open_loop import SMALL, STEPS, episodes, small


def test_explained_by_hand() -> None:
    """One feature of mean 0 and squares 10: the ridge of 10 halves the slope 2; on others the error is x, of x + x."""
    x = torch.tensor([[-1.0, 2.0, -2.0, 1.0]]).T
    unseen = torch.tensor([[-3.0, 3.0]]).T
    assert RIDGE == 10.0
    # errors -3 and 3: 9, against a variance of 72 (n - 1)
    found = explained(
        (x, torch.cat([2.0 * x, torch.ones_like(x)], 1)), (unseen, torch.cat([2.0 * unseen, unseen * 0], 1))
    )
    assert float(found[0]) == pytest.approx(1.0 - 9.0 / 72.0) and bool(found[1].isnan())


def test_halves_are_of_different_episodes_and_carry_the_column() -> None:
    dataset = episodes()
    number = dataset.per_row(torch.arange(dataset.num_episodes)).float()
    dataset = dataclasses.replace(dataset, columns={**dataset.columns, "episode": number})
    first, second = (set(batch["episode"].flatten().tolist()) for batch in halves_of(dataset, "episode"))
    assert first == {0.0, 2.0, 4.0, 6.0, 8.0} and second == {1.0, 3.0, 5.0, 7.0, 9.0}
    with pytest.raises(UserError, match="a probe needs two episodes of more than 5 states"):
        halves_of(episodes(steps=CONTEXT), "rewards")
    with pytest.raises(UserError, match=r"needs the column 'reward', which the data lack\. Did you mean 'rewards'"):
        halves_of(dataset, "reward")


@torch.no_grad()
@pytest.mark.parametrize("name", list(SMALL))
@pytest.mark.parametrize("column", ["observations", "twice"])
def test_models_are_probed_for_columns(name: str, column: str) -> None:
    dataset = episodes()
    twice = 2.0 * dataset.columns["observations"][:, 0]
    dataset = dataclasses.replace(dataset, columns={**dataset.columns, "twice": twice})
    algorithm, state = small(name, dataset)
    halves = halves_of(dataset, column)
    states = algorithm.latent_states(state.params, halves[0], rng.make_key(0))  # type: ignore[attr-defined]
    assert states.shape[:2] == halves[0]["rewards"].shape and len(states) == STEPS
    r2 = probe(algorithm, state.params, halves, column)  # type: ignore[arg-type]
    assert len(r2) == (3 if column == "observations" else 1) and np.isfinite(r2).all()


def test_a_probe_does_not_depend_on_the_size_of_latent_states() -> None:
    dataset = episodes()

    class Scaled:
        def __init__(self, size: float) -> None:
            self.size = size

        def latent_states(self, params: Any, batch: Any, key: Any) -> torch.Tensor:
            return self.size * batch["observations"]

    one, other = (probe(Scaled(size), {}, halves_of(dataset, "rewards"), "rewards") for size in (1.0, 0.01))
    assert one == pytest.approx(other, abs=1e-6)


@torch.no_grad()
def test_images_beside_numbers_are_left_out() -> None:
    dataset = episodes(images=True)
    algorithm, state = small("rssm", dataset)
    r2 = probe(algorithm, state.params, halves_of(dataset, "observations"), "observations")  # type: ignore[arg-type]
    assert len(r2) == 3
