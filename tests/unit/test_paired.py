"""Paired grids: lists read side by side; and data in two parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import offrl
from offrl.data.transforms.episodes import split
from offrl.errors import UserError
from offrl.runs.run import SavedRun
from offrl.settings.compose import compose
from offrl.settings.replicas import replicas

SMALL = {
    "algo": "iql",
    "dataset": "builtin",
    "steps": 2,
    "seeds": 2,
    "algo.hidden": [4],
    "algo.batch_size": 8,
    "compile": "eager",
    "eval.env": "none",
    "eval.estimate": False,
    "quiet": True,
    "logger": "none",
    "compare": [],
    "device": "cpu",
}


def test_the_first_values_belong_together() -> None:
    config = compose({**SMALL, "grid.temperature": [1, 2, 2], "grid.expectile": [0.5, 0.6, 0.7], "paired": True})
    assert [r.name for r in replicas(config)][::2] == [
        "temperature=1,expectile=0.5,seed=0",
        "temperature=2,expectile=0.6,seed=0",
        "temperature=2,expectile=0.7,seed=0",
    ]


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        ({"grid.temperature": [1, 2], "grid.expectile": [0.5]}, "grid.temperature has 2, grid.expectile has 1"),
        ({"grid.temperature": [1, 1], "grid.expectile": [0.5, 0.5]}, "the grid has temperature=1,expectile=0.5 twice"),
    ],
)
def test_lists_that_do_not_pair_are_refused(grid: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        compose({**SMALL, **grid, "paired": True})


def test_a_paired_run_is_read_back_and_is_another_run_than_its_product(tmp_path: Path) -> None:
    grid = {"grid.temperature": [1, 2], "grid.expectile": [0.5, 0.6]}
    run = offrl.train(settings={**SMALL, **grid, "paired": True, "runs_dir": str(tmp_path)})
    again = SavedRun(run.dir)
    assert again.paired and len(again.replicas) == 4
    assert again.replica(1, {"temperature": 2.0}).name == "temperature=2,expectile=0.6,seed=1"
    with pytest.raises(UserError, match="several policies of seed 0; say which"):
        again.replica(0, {})
    with pytest.raises(UserError, match="its grid pairs values"):
        again.replica(0, {"temperature": 1.0, "expectile": 0.6})
    product = offrl.train(settings={**SMALL, **grid, "runs_dir": str(tmp_path)})
    assert product.dir != run.dir and len(product.replicas) == 8
    for seed in (0, 1):
        values = {"temperature": 2.0, "expectile": 0.6}
        left, right = (r.policy(seed, **values).state.params["actor"] for r in (run, product))
        assert all(torch.allclose(left[k], right[k], atol=1e-6) for k in left), "the same numbers as in the product"


def test_two_parts_of_the_episodes_are_all_of_them_and_alike() -> None:
    data = offrl.load_dataset("builtin")
    first, second = (split(data, 0.25, part, seed=3) for part in (False, True))
    assert (
        first.num_episodes == round(0.25 * data.num_episodes)
        and first.num_episodes + second.num_episodes == data.num_episodes
    )
    returns = torch.cat([first.raw_returns, second.raw_returns]).sort().values
    assert torch.equal(returns, data.raw_returns.sort().values)
    thirds = np.quantile(data.raw_returns.numpy(), [1 / 3, 2 / 3])
    shares = np.histogram(first.raw_returns.numpy(), [-np.inf, *thirds, np.inf])[0] / first.num_episodes
    assert np.allclose(shares, 1 / 3, atol=0.02), "a share of each third of them by return"
    assert not torch.equal(split(data, 0.25, False, seed=4).raw_returns, first.raw_returns), (
        "another seed, other episodes"
    )
    loaded = offrl.load_dataset(
        compose(
            {"dataset": "builtin", "dataset.split": 0.25, "dataset.split_part": "second", "dataset.split_seed": 3}
        ).dataset
    )
    assert torch.equal(loaded.raw_returns, second.raw_returns)
    with pytest.raises(UserError, match=r"leaves a part of the \d+ episodes"):
        split(data, 1e-9, False)
    with pytest.raises(UserError, match="split_part=second needs"):
        compose({"dataset": "builtin", "dataset.split_part": "second"})
