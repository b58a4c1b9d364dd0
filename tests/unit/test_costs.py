"""Costs: from every kind of file into a column, checked, shown, summed by episodes, and computed by a function."""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from offrl import rng
from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.samplers.sequences import SequenceSampler
from offrl.data.samplers.transitions import TransitionSampler
from offrl.data.tools.convert import convert
from offrl.errors import UserError
from offrl.report.dataset import doctor

ROWS = 12  # three episodes of four steps
COSTS = np.array([0, 1, 0, 1, 0, 0, 0, 0, 5, 0, 7, 0], np.float32)


def dsrl(path: Path, **changed: np.ndarray) -> Path:
    """A file in DSRL's layout: D4RL's, with costs, single numbers as columns [R, 1]."""
    row = np.arange(ROWS)
    columns = {
        "observations": np.stack([row, row % 4], 1).astype(np.float32),
        "next_observations": np.stack([row + 1, row % 4 + 1], 1).astype(np.float32),
        "actions": (np.linspace(-1, 1, ROWS)[:, None]).astype(np.float32),
        "rewards": np.repeat([1.0, 2.0, 3.0], 4)[:, None].astype(np.float32),
        "costs": COSTS[:, None],
        "terminals": np.zeros((ROWS, 1), bool),
        "timeouts": (row % 4 == 3)[:, None],
        **changed,
    }
    with h5py.File(path, "w") as file:
        for name, values in columns.items():
            file[name] = values
    return path


def loaded(path: Path, **settings: object) -> Dataset:
    return load_dataset(DatasetConfig(name=str(path), cache="never", **settings))  # type: ignore[arg-type]


def test_dsrl_files_are_read_and_shown(tmp_path: Path) -> None:
    path = dsrl(tmp_path / "SafetyToy-v1-12-3.hdf5")
    data = loaded(path)
    assert data.spec.costs and data.columns["costs"].tolist() == COSTS.tolist()
    assert data.episode_costs().tolist() == [2.0, 0.0, 12.0]
    findings = doctor(DatasetConfig(name=str(path)), tmp_path / "page")
    assert "cost <= 10: 66.7% of the episodes, best return 8" in findings.render()
    assert "episode costs: mean 4.66667" in findings.render()
    assert (tmp_path / "page" / "costs.png").is_file()


@pytest.mark.parametrize("form", ["d4rl", "minari"])
def test_written_costs_come_back(tmp_path: Path, form: str) -> None:
    data = loaded(dsrl(tmp_path / "x.hdf5"))
    target = tmp_path / ("y.hdf5" if form == "d4rl" else "made-v0")
    convert(DatasetConfig(name=str(tmp_path / "x.hdf5")), str(target), form)
    assert torch.equal(loaded(target).columns["costs"], data.columns["costs"])


def test_minari_puts_the_costs_of_a_step_in_the_row_after_it(tmp_path: Path) -> None:
    """Its collector records what `reset` says as row 0, so that an episode of four steps has five rows."""
    convert(DatasetConfig(name=str(dsrl(tmp_path / "x.hdf5"))), tmp_path / "made-v0", "minari")
    with h5py.File(tmp_path / "made-v0" / "data" / "main_data.hdf5") as file:
        assert file["episode_2/infos/costs"][()].tolist() == [0, 5, 0, 7, 0]


def test_negative_costs_and_nan_are_refused_and_zeros_are_pointed_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    negative, gap = COSTS.copy(), COSTS.copy()
    negative[6], gap[9] = -0.5, np.nan
    with pytest.raises(UserError, match=r"'costs' holds -0.5, .*\(first at episode 1, row 6\)"):
        loaded(dsrl(tmp_path / "x.hdf5", costs=negative))
    with pytest.raises(UserError, match=r"'costs' has NaN in 1 row \(first at episode 2, row 9\)"):
        loaded(dsrl(tmp_path / "x.hdf5", costs=gap))
    with pytest.raises(UserError, match="'costs' has 3 rows"):
        loaded(dsrl(tmp_path / "x.hdf5", costs=COSTS[:3]))
    capsys.readouterr()
    loaded(dsrl(tmp_path / "x.hdf5", costs=0 * COSTS))
    assert "'costs' are all 0" in capsys.readouterr().err
    ended = np.arange(ROWS) == 3
    loaded(dsrl(tmp_path / "x.hdf5", terminals=ended, timeouts=~ended & (np.arange(ROWS) % 4 == 3)))
    assert "1 episode(s) terminate in a step with a cost" in capsys.readouterr().err


def test_a_function_gives_costs(tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(
        "def far(columns):\n    return columns['observations'][:, 1] > 2\n\n\n"
        "def wrong(columns):\n    return columns['observations'][:, 1] - 1\n"
    )
    path = dsrl(tmp_path / "x.hdf5")
    data = loaded(path, cost_labels=f"{tmp_path / 'rules.py'}:far")
    assert data.columns["costs"].tolist() == [0, 0, 0, 1] * 3 and data.fingerprint != loaded(path).fingerprint
    with pytest.raises(UserError, match=r"dataset.cost_labels=.*episode 0: the cost of its step 0 \(row 0\) is -1"):
        loaded(path, cost_labels=f"{tmp_path / 'rules.py'}:wrong")


def test_episodes_are_kept_by_their_costs(tmp_path: Path) -> None:
    path = dsrl(tmp_path / "x.hdf5")
    assert loaded(path, keep="cost <= 2").episode_costs().tolist() == [2.0, 0.0]
    assert loaded(path, keep="cost > 0 and cost < 12").episode_returns().tolist() == [4.0]
    assert loaded(path, keep="return>4", top_fraction=0.5).episode_costs().tolist() == [12.0]
    for condition, reason in {
        "cost < 0": "leaves no episode of x: the costs of its episodes lie between 0 and 12",
        "costs <= 2": "Did you mean 'cost'",
        "cost = 2": '"cost = 2" is no condition',
        "cost <= nan": '"cost <= nan" is no condition',
    }.items():
        with pytest.raises(UserError, match=reason):
            loaded(path, keep=condition)
    with pytest.raises(UserError, match=r"dataset.keep=cost <= 2 needs costs, and .* has none"):
        load_dataset(DatasetConfig(keep="cost <= 2"))


def test_samplers_hand_costs_on(tmp_path: Path) -> None:
    data = loaded(dsrl(tmp_path / "x.hdf5"))
    key = rng.make_key(0)
    batch = TransitionSampler(extra=("costs",))
    rows = batch(batch.prepare(data), key, 64)
    assert torch.equal(rows["costs"], data.columns["costs"][rows["observations"][:, 0].long()])
    window = TransitionSampler(extra=("costs",), n_step=3)
    rows = window(window.prepare(data), key, 64)
    first = rows["observations"][:, 0].long()
    after = torch.tensor([[*COSTS[r : r // 4 * 4 + 4], 0, 0, 0][:3] for r in range(ROWS)])
    assert torch.equal(rows["step_costs"], after[first])
    sequence = SequenceSampler(4, extra=("costs_to_go",))
    rows = sequence(sequence.prepare(data), key, 64)
    to_go = torch.tensor([2, 2, 1, 1, 0, 0, 0, 0, 12, 7, 7, 0.0])
    assert torch.equal(rows["costs_to_go"][:, 0], to_go[rows["observations"][:, 0, 0].long()])
