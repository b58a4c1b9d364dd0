"""A person's interventions have a share of the draws of their own, row by row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.samplers.sequences import SequenceSampler
from offrl.data.samplers.transitions import TransitionSampler
from offrl.data.transforms.episodes import concatenate, keep_episodes
from offrl.data.transforms.sources import share_draws
from offrl.data.transforms.weights import weight_episodes
from offrl.errors import UserError

LENGTHS = [6, 4, 5]
ROWS, ENDS = sum(LENGTHS), np.cumsum(LENGTHS) - 1
MARKS = np.isin(np.arange(ROWS), [1, 2, 5, 7, 12])
DRAWS = 20_000


def values(**changes: Any) -> dict[str, Any]:
    columns = {"observations": np.arange(ROWS, dtype=np.float32)[:, None], "actions": np.zeros((ROWS, 1))}
    ends = {"terminations": np.isin(np.arange(ROWS), ENDS)}
    return {**columns, "rewards": np.arange(ROWS), **ends, "intervention": MARKS, **changes}


def data(**changes: Any) -> Dataset:
    return from_arrays(**values(**changes), action_low=-1.0, action_high=1.0)


def frequencies(dataset: Dataset, n_step: int = 1) -> np.ndarray:
    sampler = TransitionSampler(n_step=n_step)
    rows = sampler(sampler.prepare(dataset), rng.make_key(0), DRAWS)["observations"].long().flatten()
    return torch.bincount(rows, minlength=ROWS).numpy() / DRAWS


@pytest.mark.parametrize("n_step", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_marked_rows_have_their_share_of_the_draws(share: float, n_step: int) -> None:
    dataset = share_draws(data(), share, "intervention")
    expected = np.where(MARKS, share / MARKS.sum(), (1.0 - share) / (~MARKS).sum())
    np.testing.assert_allclose(dataset.row_weights() / ROWS, expected, rtol=1e-12)
    np.testing.assert_allclose(frequencies(dataset, n_step), expected, atol=5 * (0.1 / DRAWS) ** 0.5)
    np.testing.assert_allclose(dataset.episode_shares(), np.add.reduceat(expected, [0, 6, 10]), rtol=1e-12)
    sequences = SequenceSampler(2)  # windows begin at rows that are drawn so
    begins = sequences(sequences.prepare(dataset), rng.make_key(1), DRAWS)["observations"][:, 0].long().flatten()
    found = torch.bincount(begins, minlength=ROWS).numpy() / DRAWS
    np.testing.assert_allclose(found, expected, atol=5 * (0.1 / DRAWS) ** 0.5)


def test_weights_of_rows_go_along() -> None:
    dataset = share_draws(weight_episodes(data(), "top", fraction=0.4), 0.5, "intervention")  # the third episode alone
    expected = np.zeros(ROWS)
    expected[10:] = np.where(MARKS[10:], 0.5, 0.5 / 4)
    np.testing.assert_allclose(dataset.row_weights() / ROWS, expected, rtol=1e-12)
    assert not frequencies(dataset)[:10].any()
    marked = share_draws(data(), 0.5, "intervention")
    shares = marked.row_weights().numpy() / ROWS
    kept = keep_episodes(marked, torch.tensor([2, 0]), "two")
    chosen = np.concatenate([shares[10:], shares[:6]])
    np.testing.assert_allclose(kept.row_weights() / len(kept), chosen / chosen.sum(), rtol=1e-12)
    joined = concatenate([marked, data()])
    np.testing.assert_allclose(joined.row_weights() / (2 * ROWS), np.r_[shares, np.full(ROWS, 1 / ROWS)] / 2)
    whole = share_draws(data(intervention=np.arange(ROWS) < 6), 0.5, "intervention")  # as imagined episodes
    assert whole.weights is not None and len(whole.weights) == 3


def test_from_a_setting_in_memory_and_on_disk(tmp_path: Path) -> None:
    np.savez(path := tmp_path / "robot.npz", **values(intervention=MARKS.astype(np.uint8)))
    settings = {"name": str(path), "fields": {"intervention": "intervention"}, "intervention_share": 0.5}
    expected = np.where(MARKS, 0.5 / MARKS.sum(), 0.5 / (~MARKS).sum())
    for memory in ("device", "mmap", "mmap"):
        config = DatasetConfig(**settings, cache_dir=str(tmp_path), memory=memory)  # type: ignore[arg-type]
        dataset = load_dataset(config, quiet=True)
        np.testing.assert_allclose(dataset.row_weights() / ROWS, expected, rtol=1e-12)
    assert "intervention rows are 0.5 of the draws; by their number they would be 0.333" in dataset.notes


def test_what_does_not_fit() -> None:
    with pytest.raises(UserError, match=r"intervention_share=0.5: arrays has no column 'intervention' .*fields.interv"):
        share_draws(from_arrays(**{k: v for k, v in values().items() if k != "intervention"}), 0.5, "intervention")
    with pytest.raises(UserError, match=r"arrays has 0.5 in the column 'intervention', row 3; 0 or 1 is due"):
        share_draws(data(intervention=np.where(np.arange(ROWS) == 3, 0.5, 0.0)), 0.5, "intervention")
    with pytest.raises(UserError, match=r"has rows of \[2\] in the column 'intervention'"):
        share_draws(data(intervention=np.zeros((ROWS, 2))), 0.5, "intervention")
    with pytest.raises(UserError, match=r"arrays has no row with intervention 1 to draw 0.5 of the rows from"):
        share_draws(data(intervention=np.zeros(ROWS)), 0.5, "intervention")
    with pytest.raises(UserError, match="each decide all draws"):
        DatasetConfig(imagined=["x"], imagined_share=0.5, intervention_share=0.5).validate()
