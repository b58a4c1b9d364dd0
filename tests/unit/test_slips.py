"""Slips of users that would go wrong without a word: each is an error, or a warning that says what was assumed."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch

import offrl
from offrl import registry
from offrl.algorithms.iql import IQL
from offrl.data import load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.fit import check_fit
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.settings.compose import flatten
from offrl.settings.dataset import DatasetConfig
from offrl.settings.evaluation import EvalConfig
from offrl.settings.presets import read_yaml
from offrl.tasks.entries import OWN_ORDER
from offrl.tasks.environments import resolve_task
from offrl.tasks.task import Task, lookup, with_factory
from offrl.training.updates import check_divergence, loss_limit, warn_of_no_rewards, warn_of_rates

OBS = np.random.default_rng(0).normal(size=(60, 3)).astype(np.float32)
ACT = np.random.default_rng(1).uniform(-1, 1, (60, 2)).astype(np.float32)
REW = np.ones(60, np.float32)
TENTH = np.arange(60) % 10 == 9  # episodes of 10 steps


def at(*rows: int, of: int = 60) -> np.ndarray:
    """Flags, True at these rows."""
    return np.isin(np.arange(of), rows)


# ---------------------------------------------------------------------------------------------------- columns and their
# names


def test_a_file_without_rewards_is_ogbenchs_only_by_its_name_or_its_physics(tmp_path: Path) -> None:
    arrays: dict[str, Any] = {"observations": OBS, "actions": ACT, "terminals": TENTH}
    np.savez(tmp_path / "log.npz", **arrays)
    with pytest.raises(UserError, match=r"log\.npz.*rewards is not clear.*dataset\.format=ogbench"):
        load_dataset(str(tmp_path / "log.npz"))
    assert load_dataset(DatasetConfig(name=str(tmp_path / "log.npz"), format="ogbench")).spec.source == "ogbench"
    np.savez(tmp_path / "made-here.npz", **arrays, qpos=OBS, qvel=OBS)
    np.savez(tmp_path / "cube-single-play-v0-val.npz", **arrays)
    for name in ("made-here", "cube-single-play-v0-val"):
        assert load_dataset(str(tmp_path / f"{name}.npz")).spec.source == "ogbench"


def test_d4rls_words_are_columns_of_arrays_too() -> None:
    timeouts = at(19, 39)
    data = from_arrays(OBS, ACT, REW, terminals=TENTH & ~timeouts, timeouts=timeouts)
    assert (
        data.num_episodes == 6
        and set(data.columns) >= {"terminations", "truncations"}
        and "terminals" not in data.columns
    )
    assert data.columns["terminations"].nonzero().squeeze(-1).tolist() == [9, 29, 49, 59]
    assert data.columns["truncations"].nonzero().squeeze(-1).tolist() == [19, 39]
    with pytest.raises(UserError, match=r"nothing takes the column 'terminals'.*'terminations' is taken"):
        from_arrays(OBS, ACT, REW, TENTH, terminals=TENTH)


@pytest.mark.parametrize("word", ["dones", "done"])
def test_dones_mean_in_arrays_and_fields_what_they_mean_in_files(word: str, tmp_path: Path) -> None:
    data = from_arrays(OBS, ACT, REW, **{word: TENTH})
    assert data.columns["terminations"].sum() == 6 and "is taken for terminations" in data.notes[-1]
    np.savez(tmp_path / "log.npz", observations=OBS, actions=ACT, rewards=REW, last=TENTH)
    assert (
        load_dataset(DatasetConfig(name=str(tmp_path / "log.npz"), fields={word: "last"})).columns["terminations"].sum()
        == 6
    )
    both = from_arrays(OBS, ACT, REW, truncations=at(19, 39), **{word: TENTH})
    assert both.columns["terminations"].nonzero().squeeze(-1).tolist() == [9, 29, 49, 59]
    with pytest.raises(UserError, match=f"row 9 is an end by 'terminations', and '{word}' does not mark it"):
        from_arrays(OBS, ACT, REW, TENTH, **{word: at(19)})


@pytest.mark.parametrize("kind", [float, int])
def test_one_hot_arrays_are_a_choice_as_in_tables(kind: type, capsys: pytest.CaptureFixture[str]) -> None:
    one_hot = np.eye(4, dtype=kind)[np.arange(60) % 4]
    data = from_arrays(OBS, one_hot, REW, truncations=TENTH)
    assert (
        data.spec.num_actions == 4
        and data.columns["actions"][:5].tolist() == [0, 1, 2, 3, 0]
        and data.spec.action_labels == ()
    )
    assert "one-hot columns, taken for one discrete choice" in capsys.readouterr().err
    assert not from_arrays(OBS, one_hot, REW, truncations=TENTH, action_kind="continuous").spec.discrete


def test_arrays_of_several_choices_ask(tmp_path: Path) -> None:
    choices = np.stack([np.arange(60) % 2, np.arange(60) % 4], 1)
    with pytest.raises(UserError, match=r"several choices at once.*action_kind=multi_discrete"):
        from_arrays(OBS, choices, REW, truncations=TENTH)
    data = from_arrays(OBS, choices, REW, truncations=TENTH, action_kind="multi_discrete")
    assert data.spec.num_actions == 8 and data.spec.action_labels[5] == "actions[0]=1, actions[1]=1"
    np.savez(tmp_path / "x.npz", observations=OBS, actions=choices, rewards=REW, timeouts=TENTH)
    config = DatasetConfig(name=str(tmp_path / "x.npz"), action_kind="multi_discrete")
    assert load_dataset(config).columns["actions"].equal(data.columns["actions"])


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
    assert (
        f"{(lengths == 60).sum()} of 40 episodes end by a termination after exactly 60 steps" in capsys.readouterr().err
    )
    cut = at(*(np.cumsum(lengths)[lengths == 60] - 1), of=len(ends))
    from_arrays(*columns, ends & ~cut, cut)
    assert capsys.readouterr().err == ""


def test_the_limit_of_the_environment_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    ends = at(199, 299, 499, of=600)
    columns = [np.zeros((600, 3)), np.zeros((600, 1)), np.ones(600)]
    from_arrays(*columns, ends, at(599, of=600), env="Pendulum-v1")  # of 200 steps
    assert (
        "2 of 4 episodes end by a termination after exactly 200 steps, the environment's time limit"
        in capsys.readouterr().err
    )


# ---------------------------------------------------------------------------------------------------- actions that look
# discrete


CHOICES = np.random.default_rng(2).integers(0, 4, (60, 2))


@pytest.mark.parametrize(
    ("actions", "words"),
    [
        (CHOICES[:, 0].astype(np.float32), "whole numbers from 0 to 3: it looks like a discrete action"),
        (CHOICES + np.array([0.5, 0.0]), ""),
        (np.sign(ACT), ""),  # full thrust either way
        (np.zeros((60, 2)), ""),
        (ACT, ""),
    ],
)
def test_continuous_actions_that_look_discrete(
    actions: np.ndarray, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from_arrays(OBS, actions, REW, truncations=TENTH)
    shown = capsys.readouterr().err
    assert ("taken as continuous" in shown) == bool(words) and words in shown
    from_arrays(OBS, actions, REW, truncations=TENTH, action_low=-3, action_high=4)  # the user says what they are
    assert "taken as continuous" not in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------- references


WALKER = lookup("walker2d-medium-v2")


@pytest.mark.parametrize("env", ["HalfCheetah-v4", "Walker2d-v5", "gymnasium:Walker2d-v4", "Walker2d-v3"])
def test_reference_scores_belong_to_data_and_environment_together(env: str, capsys: pytest.CaptureFixture[str]) -> None:
    task = resolve_task(WALKER, EvalConfig(env=env))
    assert task is not None and task.env_id == env and WALKER is not None
    if "Walker2d-v5" in env or "Cheetah" in env:
        assert task.normalise(1000.0) is None and task.ref_label == ""
        check_fit(DataSpec((17,), 6, name="walk", task=WALKER), task)
        words = (
            f"the D4RL returns that score 0 and 100 for walker2d-medium-v2 are those of Walker2d-v4, not of {env}: "
            "returns are not"
        )
        assert words in capsys.readouterr().err
    else:
        assert task.normalise(1000.0) == WALKER.normalise(1000.0) is not None and task.ref_label == "D4RL"


def test_reference_scores_of_arguments_are_not_those_of_the_id_alone() -> None:
    pen = lookup("pen-human-v1")
    assert pen is not None and pen.env_id is not None and pen.env_kwargs == {"hand": "pen"}
    assert resolve_task(pen, EvalConfig(env=pen.env_id)) is pen  # with its arguments
    assert not pen.holds_in(pen.env_id)


def test_a_function_keeps_them_where_its_environment_says_which_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    pendulum = Task("swing", env_id="Pendulum-v1", ref_min=-1000.0, ref_max=0.0)
    make = functools.partial(gym.make, "Pendulum-v1")
    assert with_factory(pendulum, lambda: gym.wrappers.ClipAction(make()), "swing").ref_max == 0.0
    assert capsys.readouterr().err == ""
    assert with_factory(pendulum, lambda: make().unwrapped.__class__(), "swing").ref_max is None
    assert with_factory(pendulum, functools.partial(gym.make, "CartPole-v1"), "swing").ref_max is None
    assert "those of Pendulum-v1, not of CartPole-v1" in capsys.readouterr().err


def test_a_file_that_names_another_robot_of_the_same_shape(tmp_path: Path) -> None:
    columns = {
        "observations": np.zeros((20, 17)),
        "actions": np.zeros((20, 6)),
        "rewards": np.zeros(20),
        "terminals": np.zeros(20, bool),
    }
    for recorded, env, known in (
        ("HalfCheetah-v2", "HalfCheetah-v4", False),
        ("Walker2d-v2", "Walker2d-v4", True),
        ("Walker2d-v5", "Walker2d-v5", False),
    ):
        with h5py.File(tmp_path / "walker2d_medium.hdf5", "w") as file:
            file.update({**columns, "timeouts": np.arange(20) % 10 == 9})
            file.attrs["env_id"] = recorded
        task = load_dataset(str(tmp_path / "walker2d_medium.hdf5")).spec.task
        assert task is not None and (task.env_id, task.ref_max is not None) == (env, known), recorded


# ---------------------------------------------------------------------------------------------------- training


def test_losses_are_measured_by_the_data() -> None:
    data = from_arrays(100 * OBS, ACT, REW, truncations=TENTH)
    limit = loss_limit(data)
    assert limit == 1e8 * 1000.0**2 and loss_limit(None) == 1e28
    assert loss_limit(from_arrays(OBS, ACT, 10 * REW, truncations=TENTH)) == pytest.approx(100 * limit)
    assert loss_limit(from_arrays(1e6 * OBS, ACT, REW, truncations=TENTH)) > 1e5 * limit
    alive = torch.tensor([True, True, True, True, False])
    metrics = {
        "critic/loss": torch.tensor([1e13, -2e14, 1.0, 1.0, 1e30]),
        "critic/q": torch.tensor([1e20, 0.0, torch.nan, 0.0, 0.0]),
    }
    left, reasons = check_divergence(metrics, alive, limit)
    assert left.tolist() == [True, False, False, True, False]
    assert reasons == {1: "critic/loss is -2e+14, which no loss on such data is", 2: "not finite: critic/q"}


def test_learning_rates_that_no_network_survives(capsys: pytest.CaptureFixture[str]) -> None:
    warn_of_rates(IQL.Config(learning_rate=3e4, actor_learning_rate=0.05), {})
    assert (
        "algo.learning_rate=30000 moves" in (shown := capsys.readouterr().err)
        and "is 0.0003 meant?" in shown
        and shown.count("\n") == 1
    )
    warn_of_rates(IQL.Config(learning_rate=3e4), {"learning_rate": [1e-4, 1e-2]})  # the grid's are what counts
    assert capsys.readouterr().err == ""
    warn_of_rates(IQL.Config(), {"learning_rate": [1e-4, 0.5]})
    assert "algo.learning_rate=0.5 moves" in (shown := capsys.readouterr().err) and "meant" not in shown


def test_rewards_that_are_all_zero(capsys: pytest.CaptureFixture[str]) -> None:
    none, some = (from_arrays(OBS, ACT, rewards, truncations=TENTH) for rewards in (0 * REW, TENTH))
    cases = (
        ("iql", none, "every reward of arrays is 0, and iql learns"),
        ("iql", some, ""),
        ("hiql", none, ""),
        ("bc", none, ""),
    )
    for name, data, words in cases:
        warn_of_no_rewards(registry.get("algo", name).traits, name, data)
        shown = capsys.readouterr().err
        assert bool(shown) == bool(words) and words in shown


# ---------------------------------------------------------------------------------------------------- policies and
# models


def policy(task: Task | None = None, goal_dim: int = 0, algo: str = "bc") -> TrainedPolicy:
    spec = DataSpec((3,), 1, action_low=(-1.0,), action_high=(1.0,), task=task, goal_dim=goal_dim)
    kind = registry.get("algo", algo)
    algorithm = kind(kind.Config(hidden=[4]), spec)
    return TrainedPolicy(algorithm, algorithm.init(0), 0)


def test_act_takes_the_dictionary_of_an_environment() -> None:
    flat = np.array([0.1, 0.2, 0.3])
    parts = {"b": flat[2], "a": {"y": flat[1:2], "x": flat[:1]}}  # sorted: a.x, a.y, b
    expected = policy().act(flat)
    np.testing.assert_array_equal(policy(Task("t", observation_keys=("a", "b"))).act(parts), expected)
    np.testing.assert_array_equal(
        policy(Task("t", observation_keys=("b", "a/x", "a/y"))).act({"b": flat[0], "a": {"y": flat[2], "x": flat[1]}}),
        expected,
    )
    # a file of before: what was compared, sorted
    np.testing.assert_array_equal(policy(Task("t", env_id="Old-v0")).act(parts), expected)
    for task in (None, Task("t", env_id="New-v0", observation_keys=OWN_ORDER)):
        with pytest.raises(
            UserError, match=r"data were flat, .* entries \(a, b\) is not known.*dataset\.observation_keys="
        ):
            policy(task).act(parts)
    keys = Task("t", observation_keys=("b", "a"))  # in the order of dataset.observation_keys, without the others
    np.testing.assert_array_equal(policy(keys).act({"b": flat[:1], "a": flat[1:], "z": 5.0}), expected)
    batch = {"b": np.tile(flat[:1], (4, 1)), "a": np.tile(flat[1:], (4, 1))}
    np.testing.assert_array_equal(policy(keys).act(batch), np.tile(expected, (4, 1)))
    for rows in (1, 3):
        assert policy(keys).act({k: v[:rows] for k, v in batch.items()}).shape == (rows, 1)
    with pytest.raises(UserError, match="entries b, a have 2 numbers together; this policy takes"):
        policy(keys).act({"b": flat[:1], "a": flat[:1]})
    with pytest.raises(UserError, match="no entry 'a'; they have b"):
        policy(keys).act({"b": flat})
    with pytest.raises(UserError, match="NaN"):
        policy(keys).act({"b": flat[:1], "a": flat[1:] * np.nan})


def test_the_dictionarys_goal_is_taken() -> None:
    task, place, goal = Task("t", observation_keys=("observation",)), np.ones(3), np.full(3, 2.0)
    expected = policy(task, algo="gcbc").act(place, goal=goal)
    given = {"observation": place, "achieved_goal": place, "desired_goal": goal}
    np.testing.assert_array_equal(policy(task, algo="gcbc").act(given), expected)
    assert not np.array_equal(policy(task, algo="gcbc").act(given, goal=-goal), expected)


def test_a_world_model_has_no_policy(tmp_path: Path) -> None:
    data = from_arrays(OBS, ACT, REW, truncations=TENTH)
    settings = {"algo.hidden": [4], "algo.batch_size": 4, "algo.members": 1, "algo.elites": 1, "compile": "eager"}
    run = offrl.train(
        "dynamics", data, seeds=1, steps=1, quiet=True, name="model", runs_dir=str(tmp_path), settings=settings
    )
    with pytest.raises(
        UserError, match=r"model is a run of dynamics, which trains a model and no policy.*offrl model .*world_model="
    ):
        run.evaluate()


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
