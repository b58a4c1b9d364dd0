"""Windows of states, from hand-made episodes: which there are, how often each is drawn, and what they hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.states import StateSampler
from offrl.errors import UserError


def episodes(lengths: tuple[int, ...], ends: str, *, successors: bool = True) -> Dataset:
    """Episode e's state t is 100 e + t, its action t / 10 and its reward t + 1; ends: t terminals, o time-outs."""
    t = np.concatenate([np.arange(n) for n in lengths])
    episode = np.repeat(np.arange(len(lengths)), lengths)
    last = t == np.array(lengths)[episode] - 1
    terminal = last & (np.array(list(ends))[episode] == "t")
    observations = (100.0 * episode + t)[:, None].astype(np.float32)
    more: dict[str, Any] = {"next_observations": observations + 1.0} if successors else {}
    return from_arrays(observations, (t / 10.0)[:, None], t + 1.0, terminal, last & ~terminal, action_low=[-1.0],
                       action_high=[1.0], **more)  # fmt: skip


def draw(sampler: StateSampler, dataset: Dataset, n: int = 10_000) -> dict[str, Tensor]:
    return sampler(sampler.prepare(dataset), rng.make_key(0), n)


def window(batch: dict[str, Tensor], first: float) -> dict[str, list[Any]]:
    """The columns of the first window that begins at this observation."""
    row = int(torch.nonzero(batch["observations"][:, 0, 0] == first)[0])
    return {name: x[row].squeeze(-1).tolist() if x.ndim == 3 else x[row].tolist() for name, x in batch.items()}


def test_strict_windows_are_all_alike_and_in_one_episode() -> None:
    batch = draw(StateSampler(4), episodes((5, 2, 9), "too"))
    starts, counts = batch["observations"][:, 0, 0].unique(return_counts=True)
    assert starts.tolist() == [0, 1, 2, 200, 201, 202, 203, 204, 205, 206]  # of 6, 3 and 10 states
    # chi-square with 9 degrees of freedom, p = 0.001
    assert float(((counts.double() - 1000) ** 2 / 1000).sum()) < 27.9
    assert torch.equal(batch["observations"][:, 1:], batch["observations"][:, :1] + torch.tensor([[[1.0], [2], [3]]]))


def test_rewards_of_arrival() -> None:
    """An episode whose rewards are 1, 2, 3: they arrive at its states 1, 2, 3."""
    got = window(draw(StateSampler(4), episodes((3, 3), "to")), 0.0)
    assert got["observations"] == [0, 1, 2, 3]
    assert got["rewards"][:3] == [1, 2, 3] and got["arrival_rewards"] == [0, 1, 2, 3]
    assert got["actions"][:3] == pytest.approx([0, 0.1, 0.2])
    assert got["previous_actions"] == pytest.approx([0, 0, 0.1, 0.2])
    assert got["is_first"] == [True, False, False, False]
    assert got["is_last"] == got["is_terminal"] == [False, False, False, True] and all(got["valid"])


def test_a_window_inside_an_episode_knows_what_came_before() -> None:
    got = window(draw(StateSampler(2), episodes((5,), "o")), 2.0)
    assert got["arrival_rewards"] == [2, 3] and got["previous_actions"] == pytest.approx([0.1, 0.2])
    assert not any(got["is_first"]) and not any(got["is_last"])


def test_time_outs_are_no_terminals() -> None:
    got = window(draw(StateSampler(4), episodes((3, 3), "to")), 100.0)
    assert got["is_last"] == [False, False, False, True] and not any(got["is_terminal"])


def test_ends_that_the_data_lack() -> None:
    """Without successors a time-out's last row has none, and a terminal's is not seen."""
    dataset = episodes((3, 3), "to", successors=False)
    got = window(draw(StateSampler(4), dataset), 0.0)
    assert got["observations"] == [0, 1, 2, 2] and got["valid"] == [True, True, True, False]
    assert got["is_terminal"] == [False, False, False, True] and got["arrival_rewards"] == [0, 1, 2, 3]
    got = window(draw(StateSampler(3), dataset), 100.0)
    assert got["observations"] == [100, 101, 102] and got["is_last"] == [False, False, True]
    assert set(draw(StateSampler(4), dataset)["observations"][:, 0, 0].tolist()) == {0.0}


def test_a_chain_goes_on_into_the_next_episode() -> None:
    batch = draw(StateSampler(4, "chain"), episodes((2, 3), "to"))
    assert batch["observations"][:, 0, 0].unique().tolist() == [0, 1, 2, 100]  # of 7 states in a row
    got = window(batch, 1.0)
    assert got["observations"] == [1, 2, 100, 101]
    assert got["is_first"] == [True, False, True, False] and got["is_terminal"] == [False, True, False, False]
    assert got["arrival_rewards"] == [0, 2, 0, 1] and got["previous_actions"] == pytest.approx([0, 0.1, 0, 0])


@pytest.mark.parametrize("kind", ["strict", "chain"])
def test_windows_are_drawn_by_weight(kind: str) -> None:
    """An episode of weight 0 is in no window; the others in proportion."""
    dataset = replace(episodes((3, 3, 3), "ttt"), weights=torch.tensor([1.0, 0.0, 3.0], dtype=torch.float64))
    batch = draw(StateSampler(2, kind), dataset)
    assert not ((batch["observations"] >= 100) & (batch["observations"] < 200)).any()
    share = float((batch["observations"][:, 0] >= 200).double().mean())
    assert share == pytest.approx(9 / 12 if kind == "strict" else 9 / 13, abs=0.02)


def test_windows_longer_than_every_episode_are_refused() -> None:
    with pytest.raises(UserError, match=r"no window of 7 states .* at most 6 follow one another"):
        StateSampler(7).prepare(episodes((5, 2), "to"))
