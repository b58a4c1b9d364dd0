"""The range of a value head's bins: on hand-made episodes whose returns are known, and through the command line."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl import registry
from offrl.data import DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.transforms.apply import apply_transforms
from offrl.data.value_range import value_range
from offrl.errors import UserError
from offrl.runs.record import fit
from offrl.settings.compose import compose

MARGIN = 0.1


def episodes(*rewards: list[float], terminal: list[bool]) -> Dataset:
    """One episode for each list of rewards; those that are not terminal end in a time-out."""
    lengths = [len(r) for r in rewards]
    last = np.cumsum(lengths) - 1
    flags = np.zeros((2, sum(lengths)), bool)
    flags[0, last], flags[1, last] = terminal, ~np.array(terminal)
    n = sum(lengths)
    g = np.random.default_rng(0)
    return from_arrays(g.normal(size=(n, 2)), g.uniform(-1, 1, (n, 1)), np.concatenate(rewards), *flags)


def around(low: float, high: float) -> tuple[float, float]:
    """A tenth more at both ends, within what rounding outwards to few digits may add."""
    return low - MARGIN * (high - low), high + MARGIN * (high - low)


def close(found: tuple[float, float], low: float, high: float) -> None:
    wide = around(low, high)
    slack = 1e-2 * (wide[1] - wide[0])
    assert found[0] < low and high < found[1]
    assert abs(found[0] - wide[0]) <= slack and abs(found[1] - wide[1]) <= slack, (found, wide)


def test_terminal_episodes_count_as_they_are() -> None:
    """Returns to go of 1, 2, 3 at 0.5: 2.75, 3.5, 3; of -4: -4."""
    close(value_range(episodes([1, 2, 3], [-4], terminal=[True, True]), 0.5), -4, 3.5)


def test_an_episode_that_was_cut_off_goes_on_as_it_was() -> None:
    """Reward 1 for ever is worth 1 / (1 - discount), however short the episodes are."""
    for length in (1, 3, 200):
        close(value_range(episodes([1.0] * length, [0.0], terminal=[False, True]), 0.9), 0, 10)
    close(value_range(episodes([1.0] * 5, [0.0], terminal=[True, True]), 0.9), 0, (1 - 0.9**5) / 0.1)


def test_a_reward_just_before_the_cut_is_no_income() -> None:
    """One reward of 1 in 1000 rows, the last one; taken as a rate it would be worth 100."""
    late = [0.0] * 999 + [1.0]
    low, high = value_range(episodes(late, terminal=[False]), 0.99)
    assert -0.3 < low < 0.0 and 1.0 < high < 2.6
    low, high = value_range(episodes([1.0], *[[0.0] * 50] * 20, terminal=[False] * 21), 0.99)  # a file that ends there
    assert 1.0 < high < 10


def test_income_that_begins_in_the_middle_of_an_episode() -> None:
    """A door that stays open pays to the end of the episode and would go on: worth 10, and the start of the episode
    less.
    """
    close(value_range(episodes([0.0] * 30 + [1.0] * 60, terminal=[False]), 0.9), 10 * 0.9**30, 10)


def test_every_row_against_a_plain_loop() -> None:
    g, discount = np.random.default_rng(3), 0.95
    lists = [list(g.normal(1, 2, n)) for n in (1, 4, 30, 90, 7)]
    ends = [False, True, False, False, True]
    cut = [r for r, e in zip(lists, ends, strict=True) if not e]
    worth = lambda r: sum(discount**i * x for i, x in enumerate(r))  # noqa: E731
    usual = sum(map(worth, cut)) / sum(1 - discount ** len(r) for r in cut)
    values = []
    for rewards, terminal in zip(lists, ends, strict=True):
        for t in range(len(rewards)):
            rest, unknown = worth(rewards[t:]), discount ** len(rewards[t:])
            values.append(rest)
            if not terminal:
                # by itself as far as it is known, else as all
                rate = (1 - unknown) * (rest / (1 - unknown)) + unknown * usual
                values.append(rest + unknown * rate)
    close(value_range(episodes(*lists, terminal=ends), discount), min(values), max(values))


def test_equal_rewards_and_sparse_ones() -> None:
    """Antmaze after IQL's shift: -1 at each step, 0 at the goal, time-outs at 1000: within [-1 / (1 - discount), 0]."""
    data = episodes([-1.0] * 1000, [-1.0] * 300 + [0.0], [-1.0] * 1000, terminal=[False, True, False])
    close(value_range(data, 0.99), -100, 0)
    for reward in (0.0, 5.0, -1e4, 1e-6):  # one step, all the same
        low, high = value_range(episodes([reward], [reward], terminal=[True, True]), 0.99)
        assert low < reward < high and high - low <= 2.1 * max(1.0, abs(reward))
    # cut off too: the last row by itself is -1
    close(value_range(episodes([-1.0] * 400, terminal=[False]), 0.99), -100, -1)
    low, high = value_range(episodes([1000.0], [1000.0 + 2**-10], terminal=[True, True]), 0.99)
    assert low < 1000 < high and high - low > 1, "bins of a width that float32 cannot tell apart"


def test_discount_one_and_zero() -> None:
    close(value_range(episodes([1, 1, 1], [2], terminal=[True, False]), 1.0), 1, 3)
    close(value_range(episodes([1, -1, 1], [2], terminal=[True, False]), 0.0), -1, 2)


def test_few_digits_outwards() -> None:
    for scale in (1e-5, 0.037, 1.0, 777.7, 1e8):
        low, high = value_range(episodes([scale, -scale / 3], [scale / 7], terminal=[True, True]), 0.9)
        for x in (low, high):
            assert float(f"{x:.4g}") == x, "as it stands in config.yaml"


def test_after_reward_transforms() -> None:
    data = episodes([1, 2], [4], terminal=[True, True])
    moved = apply_transforms([data], DatasetConfig(reward_scale=10.0, reward_shift=-50.0, normalize_observations=False))
    close(value_range(moved, 0.5), -55, -10)


def test_memory_mapped(tmp_path: Path) -> None:
    files: dict[str, Any] = {"name": "builtin", "cache_dir": str(tmp_path)}
    plain, mapped = (load_dataset(DatasetConfig(**files, memory=m)) for m in ("device", "mmap"))
    assert mapped.mapped and value_range(mapped, 0.99) == value_range(plain, 0.99)


@pytest.mark.parametrize("name", ["iql", "xql", "f_dvl", "awac", "td3_bc", "rebrac", "td3_awr", "sac_n", "edac"])
def test_a_config_gets_the_range_once(name: str) -> None:
    kind, data = registry.get("algo", name), episodes([1, 2, 3], [-4], terminal=[True, True])
    scalar = kind.Config(value_head="scalar")
    assert kind.fit_config(scalar, data) == scalar and scalar.value_range == []
    config = kind.Config(value_head="hl_gauss", discount=0.5)
    fitted = kind.fit_config(config, data)
    close(tuple(fitted.value_range), -4, 3.5)
    assert dataclasses.replace(fitted, value_range=[]) == config
    assert kind.fit_config(fitted, episodes([100.0], terminal=[True])) == fitted
    given = dataclasses.replace(config, value_range=[-1.0, 1.0])
    assert kind.fit_config(given, data) == given


def test_a_grid_of_discounts_shares_one_range_wide_enough_for_all() -> None:
    data = episodes([1.0] * 300, [-1.0] * 300, terminal=[False, False])
    config = compose(
        {"algo": "iql", "algo.value_head": "two_hot", "grid.discount": [0.9, 0.99, 0.5], "dataset": "builtin"}
    )
    fitted = fit(config, data)
    close(tuple(fitted.algo.value_range), -100, 100)
    assert fitted.algo.discount == config.algo.discount


@pytest.mark.parametrize("bad", [[5.0], [1.0, -1.0], [1.0, 1.0], [0.0, 1.0, 2.0], [-math.inf, 1.0], [0.0, math.inf]])
def test_ranges_that_are_none(bad: list[float]) -> None:
    kind = registry.get("algo", "iql")
    data = episodes([1, 2, 3], terminal=[True])
    with pytest.raises(UserError, match=r"algo\.value_range=.* must be \[smallest,largest\]"):
        kind(kind.Config(value_head="c51", value_range=bad), data.spec)
    kind(kind.Config(value_head="scalar", value_range=bad), data.spec)  # without bins it is not looked at
    with pytest.raises(UserError, match=r"algo\.value_range=\[\] must be"):  # from Python, without `fit_config`
        kind(kind.Config(value_head="c51"), data.spec)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("5", "[smallest,largest]"),
        ("[a,b]", "must be a list of numbers"),
        ("[nan,1]", "NaN"),
        ("[2,1]", "[smallest,largest]"),
        ("[1]", "[smallest,largest]"),
    ],
)
def test_ranges_that_are_none_on_the_command_line(text: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    from offrl.cli.main import main

    command = [
        "train",
        "algo=iql",
        "algo.value_head=hl_gauss",
        f"algo.value_range={text}",
        "steps=10",
        "eval.env=none",
        "runs_dir=/nowhere",
    ]
    assert main(command) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("offrl: error: ") and "value_range" in line and message in line
