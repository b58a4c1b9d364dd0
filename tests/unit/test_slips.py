"""Slips of users that would go wrong without a word: each is an error, or a warning that says what was assumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.data.arrays import from_arrays
from offrl.data.load import load_dataset
from offrl.errors import UserError
from offrl.settings.compose import flatten
from offrl.settings.dataset import DatasetConfig
from offrl.settings.presets import read_yaml

OBS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
ACT = np.random.default_rng(1).uniform(-1, 1, (60, 2)).astype(np.float32)
REW = np.ones(60, np.float32)
TENTH = np.arange(60) % 10 == 9  # episodes of 10 steps


def at(*rows: int, of: int = 60) -> np.ndarray:
    """Flags, True at these rows."""
    return np.isin(np.arange(of), rows)


# ---------------------------------------------------------------------------------------------------- columns and their names


def test_a_file_without_rewards_is_ogbenchs_only_by_its_name_or_its_physics(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"observations": OBS, "actions": ACT, "terminals": TENTH}
    np.savez(tmp_path / "log.npz", **arrays)
    with pytest.raises(UserError, match=r"log\.npz has no 'rewards'.*dataset\.format=ogbench"):
        load_dataset(str(tmp_path / "log.npz"))
    assert load_dataset(DatasetConfig(name=str(tmp_path / "log.npz"), format="ogbench")).spec.source == "ogbench"
    np.savez(tmp_path / "made-here.npz", **arrays, qpos=OBS, qvel=OBS)
    np.savez(tmp_path / "cube-single-play-v0-val.npz", **arrays)
    for name in ("made-here", "cube-single-play-v0-val"):
        assert load_dataset(str(tmp_path / f"{name}.npz")).spec.source == "ogbench"


def test_d4rls_words_are_columns_of_arrays_too() -> None:
    timeouts = at(19, 39)
    data = from_arrays(OBS, ACT, REW, terminals=TENTH & ~timeouts, timeouts=timeouts)
    assert data.num_episodes == 6 and set(data.columns) >= {"terminations", "truncations"} and "terminals" not in data.columns
    assert data.columns["terminations"].nonzero().squeeze(-1).tolist() == [9, 29, 49, 59]
    assert data.columns["truncations"].nonzero().squeeze(-1).tolist() == [19, 39]
    with pytest.raises(UserError, match="terminations and terminals are the same column"):
        from_arrays(OBS, ACT, REW, TENTH, terminals=TENTH)


@pytest.mark.parametrize(("word", "meant"), [("dones", "terminations if"), ("done", "episode_ends"), ("next_obs", "next_observations")])
def test_words_that_leave_open_what_they_are_for_are_refused(word: str, meant: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"'{word}' would be a further column.*{meant}"):
        from_arrays(OBS, ACT, REW, **{word: TENTH})
    np.savez(tmp_path / "log.npz", observations=OBS, actions=ACT, rewards=REW, last=TENTH)
    with pytest.raises(UserError, match=f"dataset.fields: '{word}' would be.*{meant}"):
        load_dataset(DatasetConfig(name=str(tmp_path / "log.npz"), fields={word: "last"}))


def test_fields_take_d4rls_words(tmp_path: Path) -> None:
    np.savez(tmp_path / "log.npz", observations=OBS, actions=ACT, rewards=REW, last=TENTH)
    data = load_dataset(DatasetConfig(name=str(tmp_path / "log.npz"), fields={"timeouts": "last"}))
    assert data.num_episodes == 6 and data.columns["truncations"].sum() == 6


def test_arrays_without_ends_are_one_episode_and_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert from_arrays(OBS, ACT, REW).num_episodes == 1
    assert "all 60 rows are taken for one episode" in capsys.readouterr().err
    assert from_arrays(OBS, ACT, REW, truncations=at()).num_episodes == 1
    assert "no row of truncations is set" in capsys.readouterr().err
    from_arrays(OBS, ACT, REW, episode_ends=[59])
    assert capsys.readouterr().err == ""


# ---------------------------------------------------------------------------------------------------- time limits


LIMIT = "a time limit stored as a termination"


@pytest.mark.parametrize(
    ("terminations", "words"),
    [
        (TENTH, "all 6 episodes end by a termination after exactly 10 steps, which none exceeds"),
        (TENTH & ~at(59), "all 5 episodes"),  # the last one is cut by the end of the data
        (TENTH & ~at(19), ""),  # one is twice as long
        (TENTH | at(13), ""),  # several lengths, and a short longest one
        (np.ones(60, bool), ""),  # bandits
    ],
)
def test_terminations_at_one_length_look_like_a_time_limit(
    terminations: np.ndarray, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from_arrays(OBS, ACT, REW, terminations)
    shown = capsys.readouterr().err
    assert (LIMIT in shown) == bool(words) and words in shown


def test_a_time_limit_among_falls(capsys: pytest.CaptureFixture[str]) -> None:
    g = np.random.default_rng(0)
    lengths = np.minimum(g.geometric(0.02, 40), 60)  # dones of episodes that fall or reach step 60
    ends = at(*(np.cumsum(lengths) - 1), of=lengths.sum())
    columns = [g.normal(size=(len(ends), 2)), g.uniform(-1, 1, (len(ends), 1)), np.ones(len(ends))]
    from_arrays(*columns, ends)
    assert f"{(lengths == 60).sum()} of 40 episodes end by a termination after exactly 60 steps" in capsys.readouterr().err
    cut = at(*(np.cumsum(lengths)[lengths == 60] - 1), of=len(ends))
    from_arrays(*columns, ends & ~cut, cut)
    assert capsys.readouterr().err == ""


def test_the_limit_of_the_environment_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    ends = at(199, 299, 499, of=600)
    columns = [np.zeros((600, 3)), np.zeros((600, 1)), np.ones(600)]
    from_arrays(*columns, ends, at(599, of=600), env="Pendulum-v1")  # of 200 steps
    assert "2 of 4 episodes end by a termination after exactly 200 steps, the environment's time limit" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- actions that look discrete


CHOICES = np.random.default_rng(2).integers(0, 4, (60, 2))


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (CHOICES[:, 0].astype(np.float32), "whole numbers from 0 to 3: it looks like a discrete action"),
        (np.eye(4)[CHOICES[:, 0]], "a single 1 among 4 numbers: it looks like a one-hot"),
        (np.eye(4, dtype=np.int64)[CHOICES[:, 0]], "a single 1 among 4 numbers: it looks like a one-hot"),
        (CHOICES, "2 whole numbers from 0 to 3 a row: they look like several discrete choices"),
        (CHOICES + np.array([0.5, 0.0]), ""),
        (np.sign(ACT), ""),  # full thrust either way
        (np.zeros((60, 2)), ""),
        (ACT, ""),
    ],
)
def test_continuous_actions_that_look_discrete(actions: np.ndarray, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    from_arrays(OBS, actions, REW, truncations=TENTH)
    shown = capsys.readouterr().err
    assert ("taken as continuous" in shown) == bool(words) and words in shown
    from_arrays(OBS, actions, REW, truncations=TENTH, action_low=-3, action_high=4)  # the user says what they are
    assert "taken as continuous" not in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 5\nseeds: 2\nsteps: 6\n", "'steps' is given twice, in lines 1 and 3"),
        ("algo:\n  name: iql\n  discount: 0.9\n\n  discount: 0.8\n", "'discount' is given twice, in lines 3 and 5"),
        ("suites:\n- {a: 1, b: 2, a: 3}\n", "'a' is given twice, in lines 2 and 2"),
    ],
)
def test_a_name_that_a_yaml_file_has_twice(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"mine.yaml: {words}"):
        read_yaml(path)


def test_names_that_occur_once_in_each_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: &base {a: 1, b: 2}\nother:\n  <<: *base\n  a: 3\nlast: *base\n")
    assert read_yaml(path) == {"base": {"a": 1, "b": 2}, "other": {"a": 3, "b": 2}, "last": {"a": 1, "b": 2}}
    path.write_text("")
    assert read_yaml(path) == {}
    with pytest.raises(UserError, match=r"algo\.discount is given twice"):
        flatten({"algo": {"discount": 0.9}, "algo.discount": 0.8})
