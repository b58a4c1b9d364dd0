"""Rows, episodes and successors of hand-made data: terminals, time-outs and both, with and without the optional
columns.
"""

from __future__ import annotations

import json
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from offrl.data import DatasetConfig, DataSpec, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.loading.assemble import assemble
from offrl.data.raw import RawData
from offrl.data.raw.infer import find_ends
from offrl.data.store import StreamSpec
from offrl.errors import UserError
from offrl.tasks.task import Task

# Three episodes: rows 0-2 end in a terminal, rows 3-4 in a time-out, rows 5-6 in both at once. Observation of row i is
# [i, 10 i].
OBS = np.array([[i, 10.0 * i] for i in range(7)], np.float32)
ACT = np.linspace(-1, 1, 7, dtype=np.float32)[:, None]
REW = np.array([1, 2, 3, 4, 5, 6, 7], np.float32)
TERM = np.array([0, 0, 1, 0, 0, 0, 1], bool)
TIME = np.array([0, 0, 0, 0, 1, 0, 1], bool)
# 9x: true successors at the ends
NEXT = np.array([[1, 10], [2, 20], [92, 920], [4, 40], [94, 940], [6, 60], [96, 960]], np.float32)


def write(path: Path, **columns: np.ndarray) -> Path:
    with h5py.File(path, "w") as file:
        for key, value in columns.items():
            file[key] = value
    return path


def core(**more: np.ndarray) -> dict[str, np.ndarray]:
    return {"observations": OBS, "actions": ACT, "rewards": REW, "terminals": TERM, **more}


def test_rows_and_successors_without_stored_ones(tmp_path: Path) -> None:
    data = load_dataset(str(write(tmp_path / "a.hdf5", **core(timeouts=TIME))))
    assert data.episode_start.tolist() == [0, 3, 5] and data.episode_end.tolist() == [3, 5, 7]
    assert data.columns["terminations"].tolist() == [False, False, True, False, False, False, True]
    # a termination wins over a time-out
    assert data.columns["truncations"].tolist() == [False, False, False, False, True, False, False]
    # never the next episode's first observation
    assert data.columns["next_observations"][:, 0].tolist() == [1, 2, 2, 4, 4, 6, 6]
    assert data.columns["successor_known"].tolist() == [True, True, False, True, False, True, False]
    # the time-out of row 4 is unusable, the terminals are usable
    assert data.transition_rows().tolist() == [0, 1, 2, 3, 5, 6]
    assert data.raw_returns.tolist() == [6, 9, 13] and data.episode_returns().tolist() == [6, 9, 13]
    assert data.episode_lengths().tolist() == [3, 2, 2]
    assert data.complete.tolist() == [True, True, True]


def test_stored_successors_are_kept_at_terminals_and_timeouts(tmp_path: Path) -> None:
    path = str(write(tmp_path / "a.hdf5", **core(timeouts=TIME, next_observations=NEXT)))
    data = load_dataset(path)
    assert torch.equal(data.columns["next_observations"], torch.from_numpy(NEXT))
    assert data.transition_rows().tolist() == list(range(7))
    dropped = load_dataset(DatasetConfig(name=path, drop_timeout_rows=True))
    assert dropped.transition_rows().tolist() == [0, 1, 2, 3, 5, 6]
    assert len(dropped) == 7  # the row itself stays, for returns and sequences


def test_shifted_successors_at_a_timeout_are_unknown(tmp_path: Path) -> None:
    shifted = np.concatenate([OBS[1:], OBS[:1]])  # what `next_observations = roll(observations)` writes
    timeouts = np.array([0, 0, 0, 0, 1, 0, 1], bool)
    terminals = np.array([0, 0, 1, 0, 0, 0, 0], bool)
    columns = core(timeouts=timeouts, next_observations=shifted) | {"terminals": terminals}
    data = load_dataset(str(write(tmp_path / "a.hdf5", **columns)))
    assert data.columns["successor_known"].tolist() == [True, True, True, True, False, True, False]
    assert data.columns["next_observations"][4].tolist() == [4, 40] and data.columns["next_observations"][
        6
    ].tolist() == [6, 60]


def test_shifted_successors_at_terminals_are_unknown(tmp_path: Path) -> None:
    """As `d4rl.qlearning_dataset` hands them out, so that a model of the dynamics would learn jumps to start states."""
    shifted = np.concatenate([OBS[1:], OBS[-1:] + 1])
    terminals = np.array([0, 0, 1, 0, 1, 0, 1], bool)
    data = load_dataset(str(write(tmp_path / "a.hdf5", **(core(next_observations=shifted) | {"terminals": terminals}))))
    assert data.columns["successor_known"].tolist() == [True, True, False, True, False, True, True]
    assert any("at 2 terminals next_observations hold the next episode's start" in n for n in data.notes)
    own = shifted.copy()
    own[2] = -1.0  # one that is not the next start: then the other is a coincidence
    data = load_dataset(str(write(tmp_path / "b.hdf5", **(core(next_observations=own) | {"terminals": terminals}))))
    assert data.columns["successor_known"].all()


def test_ends_of_episodes_by_the_names_of_plain_files(tmp_path: Path) -> None:
    """An HDF5 file that has D4RL's columns, and its time-outs under Gymnasium's name, or ends or numbers of
    episodes.
    """
    other: dict[str, np.ndarray] = {
        "truncations": TIME,
        "episode_ends": TERM | TIME,
        "episode_ids": np.array([0, 0, 0, 1, 1, 2, 2]),
    }
    for name, values in other.items():
        data = load_dataset(str(write(tmp_path / f"{name}.hdf5", **core(**{name: values}))))
        assert data.episode_end.tolist() == [3, 5, 7], name
        assert data.columns["successor_known"].tolist() == [True, True, False, True, False, True, False], name


def test_flags_without_a_value_are_no_ends(tmp_path: Path) -> None:
    """NaN counts as True in NumPy."""
    holes = np.where(np.arange(7) == 1, np.nan, TERM.astype(np.float32))
    for name in ("terminals", "timeouts", "episode_ids"):
        columns = core(timeouts=TIME) | {name: holes}
        with pytest.raises(
            UserError,
            match=r"a.hdf5: column '(terminations|truncations|episode_ids)' has no value in row 1 \(1 such rows\)",
        ):
            load_dataset(str(write(tmp_path / "a.hdf5", **columns)))


def test_bytes_in_vectors_are_numbers() -> None:
    data = from_arrays(np.full((7, 2), 200, np.uint8), ACT, REW, TERM, TIME)
    assert (
        data.columns["observations"].dtype == torch.float32 and float(data.columns["next_observations"].max()) == 200.0
    )
    images = from_arrays(np.zeros((7, 4, 4, 3), np.uint8), ACT, REW, TERM, TIME)
    assert images.stores["pixels"].values.dtype == torch.uint8


def test_arrays_that_are_none() -> None:
    with pytest.raises(UserError, match="column 'rewards' is a single value"):
        from_arrays(OBS, ACT, 0.0, TERM, TIME)
    nested = {"b": OBS, "a": {"z": OBS[:, :1], "y": OBS[:, 1]}}
    assert from_arrays(nested, ACT, REW, TERM, TIME).columns["observations"][1].tolist() == [10.0, 1.0, 1.0, 10.0]


def test_bounds_that_are_no_range() -> None:
    most = float(np.finfo(np.float32).max)
    data = from_arrays(OBS, ACT, REW, TERM, TIME, action_low=-most, action_high=most)
    assert data.spec.action_low == (-1.0,) and data.spec.action_high == (1.0,)


def test_without_timeouts_jumps_end_episodes(tmp_path: Path) -> None:
    terminals = np.array([0, 0, 1, 0, 0, 0, 0], bool)
    data = load_dataset(str(write(tmp_path / "a.hdf5", **(core(next_observations=NEXT) | {"terminals": terminals}))))
    assert data.episode_end.tolist() == [3, 5, 7]  # row 4's stored successor is not row 5's observation
    assert data.columns["truncations"].tolist() == [False, False, False, False, True, False, True]
    assert data.transition_rows().tolist() == list(range(7))
    assert data.complete.tolist() == [True, True, False]  # nothing says that the data end where the last episode does
    assert any("time-outs" in n for n in data.notes)


def test_without_timeouts_the_tasks_step_limit_ends_episodes() -> None:
    rows = 9
    columns: dict = {
        "observations": np.arange(rows, dtype=np.float32)[:, None],
        "actions": np.zeros((rows, 1), np.float32),
    }
    columns |= {"rewards": np.ones(rows, np.float32), "terminations": np.isin(np.arange(rows), [1])}
    raw = RawData(columns, source="d4rl", task=Task("t", max_episode_steps=3))
    # terminal after 2, then the limit of 3 twice, then the rest
    assert np.flatnonzero(find_ends(raw)).tolist() == [1, 4, 7, 8]
    data = assemble(raw)
    assert data.complete.tolist() == [True, True, True, False]
    assert data.columns["terminations"].sum() == 1 and data.columns["truncations"].sum() == 3
    assert data.transition_rows().tolist() == [0, 1, 2, 3, 5, 6]


def test_episodes_are_not_cut_at_a_limit_when_timeouts_are_given() -> None:
    columns = {
        "observations": np.zeros((6, 1), np.float32),
        "actions": np.zeros((6, 1), np.float32),
        "rewards": np.ones(6, np.float32),
    }
    columns |= {"terminations": np.zeros(6, bool), "truncations": np.arange(6) == 5}
    assert np.flatnonzero(find_ends(RawData(columns, task=Task("t", max_episode_steps=3)))).tolist() == [5]


def test_final_observations_are_the_last_rows_successors(tmp_path: Path) -> None:
    final = np.array([[92, 920], [94, 940], [96, 960]], np.float32)
    data = load_dataset(str(write(tmp_path / "a.hdf5", **core(timeouts=TIME, final_observations=final))))
    assert torch.equal(data.columns["next_observations"], torch.from_numpy(NEXT))
    assert data.columns["successor_known"].all()


def test_from_arrays_with_rows_flags_and_without_ends() -> None:
    by_rows = from_arrays(OBS, ACT, REW, episode_ends=[2, 4, 6])
    by_flags = from_arrays(OBS, ACT, REW, episode_ends=np.isin(np.arange(7), [2, 4, 6]))
    assert by_rows.episode_end.tolist() == by_flags.episode_end.tolist() == [3, 5, 7]
    assert by_rows.fingerprint == by_flags.fingerprint
    assert by_rows.transition_rows().tolist() == [0, 1, 3, 5]
    none = from_arrays(OBS, ACT, REW)
    assert none.num_episodes == 1 and none.transition_rows().tolist() == [0, 1, 2, 3, 4, 5] and not none.complete[0]
    assert from_arrays(OBS.astype(np.float64), torch.from_numpy(ACT), REW.tolist(), TERM, TIME).num_episodes == 3


def test_from_arrays_copies() -> None:
    obs, act = OBS.copy(), ACT.copy()
    data = from_arrays(obs, act * 2, REW, TERM, TIME, NEXT.copy(), action_low=-2, action_high=2)
    data.columns["observations"][0] = 55.0
    assert obs[0, 0] == 0.0 and (act == ACT).all()


def test_actions_are_scaled_from_the_range() -> None:
    actions = np.array([[0.0, -3.0], [5.0, 1.0], [10.0, 3.0]], np.float32)
    data = from_arrays(np.zeros((3, 2)), actions, np.zeros(3), action_low=[0, -3], action_high=[10, 3])
    np.testing.assert_allclose(data.columns["actions"].numpy(), [[-1, -1], [0, 1 / 3], [1, 1]], rtol=1e-6)
    assert data.spec.action_low == (0.0, -3.0) and data.spec.action_high == (10.0, 3.0)
    inside = from_arrays(np.zeros((3, 2)), actions / 20, np.zeros(3))
    assert inside.spec.action_low == (-1.0, -1.0) and torch.equal(
        inside.columns["actions"], torch.from_numpy(actions / 20)
    )


def test_an_unknown_range_is_the_datas_own_and_said(capsys: pytest.CaptureFixture[str]) -> None:
    actions = np.array([[-2.0, 7.0], [4.0, 7.0]], np.float32)  # the second dimension is constant
    data = from_arrays(np.zeros((2, 1)), actions, np.zeros(2))
    assert data.spec.action_low == (-2.0, 6.0) and data.spec.action_high == (4.0, 8.0)
    assert data.columns["actions"].tolist() == [[-1.0, 0.0], [1.0, 0.0]]
    assert "action range is not known" in capsys.readouterr().err


def test_the_range_is_the_environments_where_there_is_one() -> None:
    data = from_arrays(np.zeros((2, 3)), np.array([[0.5], [-1.0]]), np.zeros(2), env="Pendulum-v1")
    assert data.spec.action_low == (-2.0,) and data.columns["actions"].tolist() == [[0.25], [-0.5]]


def test_discrete_actions() -> None:
    data = from_arrays(OBS, np.array([0, 1, 2, 3, 0, 1, 2]), REW, TERM, TIME)
    assert data.spec.discrete and data.spec.num_actions == 4 and data.spec.action_dim == 1
    assert data.columns["actions"].dtype == torch.int64 and data.columns["actions"].shape == (7,)
    assert from_arrays(OBS, np.zeros((7, 1), np.int32), REW, num_actions=5).spec.num_actions == 5
    with pytest.raises(UserError, match=r"'actions' holds 3.*0 to 2.*row 3"):
        from_arrays(OBS, np.array([0, 1, 2, 3, 0, 1, 2]), REW, num_actions=3)


def test_dict_observations_are_joined_sorted_and_goals_kept() -> None:
    parts = {"observation": OBS, "desired_goal": OBS[:, :1] + 100, "achieved_goal": OBS[:, :1] + 200}
    data = from_arrays(parts, ACT, REW, TERM, TIME)
    assert data.columns["observations"][1].tolist() == [201, 101, 1, 10]  # achieved_goal, desired_goal, observation
    assert data.columns["desired_goals"][1].tolist() == [101] and data.columns["achieved_goals"][1].tolist() == [201]


def test_columns_have_the_promised_types_and_images_stay_bytes() -> None:
    images = np.arange(7 * 4 * 4 * 3, dtype=np.uint8).reshape(7, 4, 4, 3)
    data = from_arrays(
        images, ACT.astype(np.float64), REW.astype(np.float64)[:, None], TERM.astype(int), TIME.astype(float), cost=REW
    )
    kinds = {k: str(c.dtype).removeprefix("torch.") for k, c in data.columns.items()}
    assert kinds == {
        "observations": "float32",
        "actions": "float32",
        "rewards": "float32",
        "terminations": "bool",
        "truncations": "bool",
        "next_observations": "float32",
        "successor_known": "bool",
        "costs": "float32",
    }
    assert data.spec.observation_shape == (0,) and data.spec.streams == (StreamSpec("pixels", (4, 4, 3)),)
    assert all(len(c) == 7 and c.is_contiguous() for c in data.columns.values())
    assert torch.equal(data.stores["pixels"].values, torch.from_numpy(images))


def test_fingerprint_follows_the_data_and_nothing_else(tmp_path: Path) -> None:
    a = load_dataset(str(write(tmp_path / "a.hdf5", **core(timeouts=TIME))))
    doubles = {k: v.astype(np.float64) if v.dtype == np.float32 else v for k, v in core(timeouts=TIME).items()}
    assert load_dataset(str(write(tmp_path / "b.hdf5", **doubles))).fingerprint == a.fingerprint
    scaled = load_dataset(DatasetConfig(name=str(tmp_path / "a.hdf5"), reward_scale=3.0, normalize_observations=True))
    assert scaled.fingerprint == a.fingerprint and scaled.transforms
    changed = core(timeouts=TIME) | {"rewards": REW + np.float32(1e-6)}
    assert load_dataset(str(write(tmp_path / "c.hdf5", **changed))).fingerprint != a.fingerprint
    # a known answer, so that it stays the same on every machine and in every version
    assert a.fingerprint == "ee46bf60ccdffcbe5bf92b42eaadbb5973e82e71465383dfdc2bd3d63c98f5bb"


def test_spec_survives_json() -> None:
    task = Task(
        "hopper", env_id="Hopper-v4", ref_min=1.5, ref_max=2.5, observation_keys=("a", "b"), env_factory=lambda: None
    )
    data = from_arrays(OBS, ACT, REW, TERM, TIME, task=task)
    plain = json.loads(json.dumps(data.spec.to_json()))
    back = DataSpec.from_json(plain)
    assert back.task is not None and back.task.env_factory is None and back.task.observation_keys == ("a", "b")
    assert back.observation_shape == (2,) and back.observation_dim == 2 and back.action_low == (-1.0,)
    assert DataSpec.from_json({**plain, "from_the_future": 1}) == back


def test_memory_mapped_columns_are_the_same_and_their_files_are_safe(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    n = 4000
    columns: dict = {
        "observations": rng.normal(size=(n, 5)),
        "actions": rng.uniform(-1, 1, (n, 2)),
        "rewards": rng.normal(size=n),
    }
    columns |= {"terminals": rng.random(n) < 0.01, "timeouts": rng.random(n) < 0.01}
    path = str(write(tmp_path / "big.hdf5", **columns))
    common = {"name": path, "cache_dir": str(tmp_path / "cache"), "normalize_observations": True}
    common |= {"top_fraction": 0.7, "discount_returns": 0.9}
    plain = load_dataset(DatasetConfig(**common, memory="device"))  # type: ignore[arg-type]
    mapped = load_dataset(DatasetConfig(**common, memory="mmap"))  # type: ignore[arg-type]
    assert mapped.mapped and not plain.mapped
    assert {k: v.dtype for k, v in plain.columns.items()} == {k: v.dtype for k, v in mapped.columns.items()}
    for name, column in plain.columns.items():
        assert torch.equal(column, mapped.columns[name]), name
    assert (mapped.fingerprint, mapped.spec, mapped.transforms) == (plain.fingerprint, plain.spec, plain.transforms)
    assert torch.equal(mapped.raw_returns, plain.raw_returns) and torch.equal(mapped.episode_end, plain.episode_end)
    mapped.columns["rewards"][0] = 99.0  # stays private to this process
    folders = list((tmp_path / "cache" / "mapped").iterdir())
    assert len(folders) == 1  # nothing half-built is left
    stamp = (folders[0] / "manifest.json").stat().st_mtime_ns
    again = load_dataset(DatasetConfig(**common, memory="auto", memory_limit_gb=1e-6))  # type: ignore[arg-type]
    assert again.mapped and again.columns["rewards"][0] == plain.columns["rewards"][0]
    assert (folders[0] / "manifest.json").stat().st_mtime_ns == stamp  # read from the cache, not built again
    assert not load_dataset(DatasetConfig(**common, memory="auto", memory_limit_gb=1.0)).mapped  # type: ignore[arg-type]
    write(Path(path), **(columns | {"rewards": columns["rewards"] + 1.0}))
    assert load_dataset(DatasetConfig(**common, memory="mmap")).fingerprint != plain.fingerprint  # type: ignore[arg-type]


def test_describe_is_plain_data(tmp_path: Path) -> None:
    data = load_dataset(str(write(tmp_path / "a.hdf5", **core(timeouts=TIME))))
    about = json.loads(json.dumps(data.describe()))
    assert (about["rows"], about["episodes"], about["transitions"], about["return_max"]) == (7, 3, 6, 13.0)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"format": "d4r"}, "'d4rl'"),
        ({"memory": "disk"}, "device"),
        ({"top_fraction": 0.0}, "top_fraction"),
        ({"subsample": 1.5}, "subsample"),
        ({"action_margin": 1.0}, "action_margin"),
        ({"discount_returns": 1.1}, "discount_returns"),
        ({"action_low": [0.0]}, "together"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_dataset(DatasetConfig(name="builtin", **setting))


def test_an_unmarked_jump_ends_an_episode() -> None:
    """Stored successors give away a missing end mark: returns must not run across it (the test of IQL's code)."""
    observations = np.arange(12, dtype=np.float32)[:, None]
    successors = observations + 1.0
    successors[4] = 50.0  # row 4 ended an episode that nobody marked
    truncations = np.zeros(12, bool)
    truncations[11] = True
    data = from_arrays(
        observations, np.zeros((12, 1)), np.ones(12), truncations=truncations, next_observations=successors
    )
    assert data.episode_start.tolist() == [0, 5] and data.episode_end.tolist() == [5, 12]
    assert data.episode_returns().tolist() == [5.0, 7.0]
    assert bool(data.columns["successor_known"][4]) and float(data.columns["next_observations"][4, 0]) == 50.0
    assert data.columns["truncations"].nonzero().squeeze(-1).tolist() == [4, 11]


def test_data_in_which_no_episode_times_out() -> None:
    """Stored successors are looked at where an episode timed out, and here none did."""
    observations = np.arange(8.0).reshape(4, 2)
    flags = [False, True, False, True]
    data = from_arrays(observations, np.zeros((4, 1)), np.ones(4), flags, [False] * 4, observations + 2.0)
    assert (
        data.columns["successor_known"].all()
        and data.num_episodes == 2
        and data.columns["terminations"].tolist() == flags
    )
