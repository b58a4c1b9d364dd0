"""Every source: hand-made files, other libraries' own writers, and the real data of ../shared/data where it is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from offrl import registry
from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.formats import d4rl
from offrl.data.loading.read import read_raw
from offrl.data.loading.resolve import resolve
from offrl.errors import UserError

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
real = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real datasets are not at {SHARED}")

OBS = np.arange(12, dtype=np.float64).reshape(6, 2)
ACT = np.array([[-1.0], [1.0], [0.5], [0.0], [-0.5], [0.25]])
REW = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
DONE = np.array([0, 0, 1, 0, 0, 0], bool)
STOP = np.array([0, 0, 0, 0, 0, 1], bool)


# ---- plain files
# ----------------------------------------------------------------------------------------------------------------------


def assert_is_the_example(data: Dataset) -> None:
    assert data.episode_end.tolist() == [3, 6] and data.raw_returns.tolist() == [6, 15]
    np.testing.assert_array_equal(data.columns["observations"], OBS.astype(np.float32))
    np.testing.assert_array_equal(data.columns["actions"], ACT.astype(np.float32))
    assert data.columns["terminations"].nonzero().tolist() == [[2]] and data.columns[
        "truncations"
    ].nonzero().tolist() == [[5]]


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("order", ["C", "F"])
def test_npz_with_our_names(tmp_path: Path, compressed: bool, order: str) -> None:
    save: Any = np.savez_compressed if compressed else np.savez
    obs = np.asarray(OBS, order=order)  # type: ignore[call-overload]
    save(tmp_path / "x.npz", observations=obs, actions=ACT, rewards=REW, terminations=DONE, truncations=STOP)
    assert_is_the_example(load_dataset(str(tmp_path / "x.npz")))


def test_npz_with_other_names_and_extra_columns(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", s=OBS, a=ACT, r=REW, d=DONE, t=STOP, cost=REW * 2)
    fields = {
        "observations": "s",
        "actions": "a",
        "rewards": "r",
        "terminations": "d",
        "truncations": "t",
        "costs": "cost",
    }
    data = load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), fields=fields))
    assert_is_the_example(data)
    assert data.columns["costs"].tolist() == (REW * 2).tolist()


@pytest.mark.parametrize("how", ["flags", "rows", "ids"])
def test_ways_to_mark_episodes(tmp_path: Path, how: str) -> None:
    marks: dict[str, Any] = {
        "flags": {"episode_ends": np.array([0, 0, 1, 0, 0, 1])},
        "rows": {"episode_ends": np.array([2, 5])},
        "ids": {"episode_ids": np.array([7, 7, 7, 3, 3, 3])},
    }[how]
    np.savez(tmp_path / "x.npz", observations=OBS, actions=ACT, rewards=REW, **marks)
    data = load_dataset(str(tmp_path / "x.npz"))
    assert (
        data.episode_end.tolist() == [3, 6] and data.transition_rows().tolist() == [0, 1, 3, 4] and data.complete.all()
    )


def test_hdf5_with_nested_keys(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for key, value in {
            "log/state": OBS,
            "log/act": ACT,
            "r": REW[:, None],
            "flags/done": DONE,
            "flags/limit": STOP.astype(np.int8),
        }.items():
            file[key] = value
    fields = {
        "observations": "log/state",
        "actions": "log/act",
        "rewards": "r",
        "terminations": "flags/done",
        "truncations": "flags/limit",
    }
    assert_is_the_example(load_dataset(DatasetConfig(name=str(tmp_path / "x.h5"), fields=fields)))


@pytest.mark.parametrize("layout", ["fixed lists", "lists", "one column per dimension"])
def test_parquet(tmp_path: Path, layout: str) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    if layout == "one column per dimension":
        columns = {"observations_0": OBS[:, 0], "observations_1": OBS[:, 1], "actions_0": ACT[:, 0]}
    else:
        kind = pa.list_(pa.float64(), 2) if layout == "fixed lists" else pa.list_(pa.float64())
        columns = {"observations": pa.array(OBS.tolist(), kind), "actions": pa.array(ACT.tolist())}
    columns |= {"rewards": REW, "terminations": DONE, "truncations": STOP}
    pq.write_table(pa.table(columns), tmp_path / "x.parquet", row_group_size=4)
    assert_is_the_example(load_dataset(str(tmp_path / "x.parquet")))


def test_parquet_lists_of_different_lengths(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {
        "observations": pa.array([[1.0, 2.0], [3.0]]),
        "actions": [0.0, 0.0],
        "rewards": [0.0, 0.0],
        "terminations": [False, True],
    }
    pq.write_table(pa.table(columns), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"'observations' has lists of different lengths"):
        load_dataset(str(tmp_path / "x.parquet"))


def test_integer_actions_are_discrete_and_pickles_are_not_opened(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", observations=OBS, actions=np.array([0, 1, 2, 0, 1, 2]), rewards=REW, terminations=DONE)
    assert load_dataset(str(tmp_path / "x.npz")).spec.num_actions == 3
    np.savez(tmp_path / "y.npz", observations=OBS, actions=ACT, rewards=np.array([object()] * 6), terminations=DONE)
    with pytest.raises(UserError, match=r"'rewards'"):
        load_dataset(str(tmp_path / "y.npz"))


def test_the_action_range_can_be_given(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", observations=OBS, actions=ACT, rewards=REW, terminations=DONE)
    data = load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), action_low=[-2.0], action_high=[2.0]))
    np.testing.assert_allclose(data.columns["actions"], ACT / 2)
    assert data.spec.action_high == (2.0,)


def test_several_files_make_one_data_set(tmp_path: Path) -> None:
    for name in ("x", "y"):
        np.savez(
            tmp_path / f"{name}.npz", observations=OBS, actions=ACT, rewards=REW, terminations=DONE, truncations=STOP
        )
    data = load_dataset(DatasetConfig(name=str(tmp_path / "x.npz"), concatenate=[str(tmp_path / "y.npz")]))
    assert data.raw_returns.tolist() == [6, 15, 6, 15]


def test_a_registered_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        registry._table.setdefault("dataset", {}), "mine", lambda config: from_arrays(OBS, ACT, REW, DONE, STOP)
    )
    assert_is_the_example(load_dataset("mine"))
    assert load_dataset(DatasetConfig(name="mine", reward_scale=2.0)).columns["rewards"].tolist() == (REW * 2).tolist()
    data = load_dataset("mine")
    assert load_dataset(data) is data


# ---- D4RL
# ----------------------------------------------------------------------------------------------------------------------


def write_d4rl(path: Path, width: int = 11, actions: int = 3, env_id: str | None = None, scale: float = 1.0) -> Path:
    rng = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        file["observations"], file["actions"] = rng.normal(size=(50, width)), rng.uniform(-scale, scale, (50, actions))
        file["rewards"], file["terminals"] = rng.normal(size=50), np.zeros(50, bool)
        file["timeouts"] = np.arange(50) % 10 == 9
        if env_id:
            file["metadata/env_id"] = np.bytes_(env_id)
    return path


def test_the_task_is_found_by_the_files_name(tmp_path: Path) -> None:
    task = load_dataset(str(write_d4rl(tmp_path / "hopper_medium_expert.hdf5"))).spec.task
    assert task is not None and (task.env_id, task.ref_max, task.ref_label) == ("Hopper-v4", 3234.3, "D4RL")


def test_a_wrong_guess_is_dropped_with_a_note(tmp_path: Path) -> None:
    data = load_dataset(str(write_d4rl(tmp_path / "hopper_mine.hdf5", width=5)))
    assert data.spec.task is None and any("11-dimensional observations, the data 5" in n for n in data.notes)
    assert read_raw(str(tmp_path / "hopper_mine.hdf5")).task is None  # what `offrl data inspect` shows


def test_the_environment_recorded_in_the_file_counts(tmp_path: Path) -> None:
    newer = load_dataset(str(write_d4rl(tmp_path / "hopper_medium.hdf5", env_id="Hopper-v5"))).spec.task
    # D4RL's scores are of v2, which v4 stands for
    assert newer is not None and (newer.env_id, newer.ref_max) == ("Hopper-v5", None)
    older = load_dataset(str(write_d4rl(tmp_path / "hopper_medium.hdf5", env_id="Hopper-v2"))).spec.task
    assert older is not None and older.env_id == "Hopper-v4"  # v2 needs mujoco-py
    other = load_dataset(str(write_d4rl(tmp_path / "hopper_medium.hdf5", env_id="Walker2d-v4"))).spec.task
    assert other is not None and (other.env_id, other.ref_max) == ("Walker2d-v4", None)  # no scores of another robot
    own = load_dataset(str(write_d4rl(tmp_path / "swing.hdf5", width=3, actions=1, env_id="Pendulum-v1", scale=2.0)))
    assert own.spec.task is not None and own.spec.task.env_id == "Pendulum-v1" and own.spec.action_high == (2.0,)


def test_neither_d4rl_nor_gym_is_imported(tmp_path: Path) -> None:
    write_d4rl(tmp_path / "hopper_medium.hdf5")
    for package in ("d4rl", "gym"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('imported')")
    path = str(tmp_path / "hopper_medium.hdf5")
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from offrl.data import load_dataset; "
        f"print(len(load_dataset({path!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "50", done.stderr


@real
@pytest.mark.parametrize(
    ("name", "rows", "cut", "mean", "smallest", "largest"),
    [
        ("hopper_medium", 200_000, [221], 2509.4, 471.3, 2982.6),
        ("hopper_medium_replay", 200_000, None, None, None, 2966.2),
        ("hopper_medium_expert", 200_000, None, None, None, 3696.6),
        ("hopper_mixed", 200_000, None, None, None, 3686.2),
        ("halfcheetah_medium_replay", 200_000, "short", 2377.9, -396.1, 3480.5),
    ],
)
def test_real_d4rl_files(name: str, rows: int, cut: Any, mean: Any, smallest: Any, largest: float) -> None:
    data = load_dataset(str(SHARED / "d4rl" / f"{name}.hdf5"))
    returns, lengths = data.raw_returns.numpy(), data.episode_lengths().numpy()
    assert len(data) == rows and data.spec.task is not None and data.spec.task.ref_label == "D4RL"
    assert returns.max() == pytest.approx(largest, abs=0.05)
    whole = np.ones(len(returns), bool)
    if cut == "short":
        whole = lengths == 1000
        assert whole.sum() == 187
    elif cut is not None:
        whole[cut] = False
        assert whole.sum() == 221
    if mean is not None:
        assert returns[whole].mean() == pytest.approx(mean, abs=0.05) and returns[whole].min() == pytest.approx(
            smallest, abs=0.05
        )
    unknown = len(data) - len(data.transition_rows())
    # hopper_medium stores successors
    assert unknown == (0 if name == "hopper_medium" else int(data.columns["truncations"].sum()))


@real
def test_real_d4rl_parts() -> None:
    data = load_dataset(str(SHARED / "d4rl" / "hopper_medium_expert.hdf5"))
    medium, expert = data.raw_returns[:108].mean(), data.raw_returns[109:-1].mean()  # each part's last episode is cut
    assert float(medium) == pytest.approx(2549.2, abs=0.05) and float(expert) == pytest.approx(3325.8, abs=0.05)
    assert len(data.raw_returns) == 108 + 110 + 2
    replay = load_dataset(str(SHARED / "d4rl" / "hopper_medium_replay.hdf5"))
    assert replay.num_episodes == 2281 + 4  # four policies, one cut episode each
    assert load_dataset(str(SHARED / "d4rl" / "hopper_mixed.hdf5")).num_episodes == 2858 + 4


@real
def test_stored_successors_agree_with_inferred_ones() -> None:
    data = load_dataset(str(SHARED / "d4rl" / "hopper_medium.hdf5"))
    inner = torch.ones(len(data), dtype=torch.bool)
    inner[data.episode_end - 1] = False
    rows = inner.nonzero().squeeze(-1)
    assert torch.equal(data.columns["next_observations"][rows], data.columns["observations"][rows + 1])
    ends = data.episode_end[:-1] - 1
    assert (data.columns["next_observations"][ends] != data.columns["observations"][ends + 1]).any(1).all()


# ---- the built-in dataset
# ------------------------------------------------------------------------------------------------------------


def test_builtin_layout_with_final_observations_and_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_d4rl(tmp_path / "hopper-mixed-v0.hdf5")
    with h5py.File(path, "a") as file:
        file["final_observations"] = np.full((5, 11), 3.0, np.float32)
        file.attrs.update(
            env_id="Hopper-v5", dataset_id="offrl/hopper-mixed-v0", ref_min_score=10.0, ref_max_score=3000.0
        )
    monkeypatch.setattr("offrl.data.loading.resolve.BUILTIN", path)
    data = load_dataset("builtin")
    task = data.spec.task
    assert task is not None and (task.env_id, task.ref_min, task.ref_max, task.ref_label) == (
        "Hopper-v5",
        10.0,
        3000.0,
        "offrl",
    )
    assert data.spec.source == "builtin" and data.spec.name == "offrl/hopper-mixed-v0"
    assert len(data.transition_rows()) == 50 and (data.columns["next_observations"][9] == 3.0).all()


# ---- Minari
# ----------------------------------------------------------------------------------------------------------------------


def make_minari(
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    goal: bool = False,
    discrete: bool = False,
    repeat: int = 1,
) -> list[dict]:
    """A dataset written by Minari itself; the episodes that went in."""
    minari = pytest.importorskip("minari")
    from gymnasium import spaces
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(root))
    rng, episodes, buffers = np.random.default_rng(0), [], []
    box = lambda n, high=np.inf: spaces.Box(-high, high, (n,), np.float64)  # noqa: E731
    observation_space: Any = (
        spaces.Dict({"observation": box(3), "achieved_goal": box(2), "desired_goal": box(2)}) if goal else box(3)
    )
    for steps, terminated in ((4, True), (1, True), (12, False), (3, False)) * repeat:
        obs: Any = rng.normal(size=(steps + 1, 3))
        if goal:
            obs = {"observation": obs, "achieved_goal": obs[:, :2] + 10, "desired_goal": obs[:, :2] + 20}
        actions = rng.integers(0, 4, steps) if discrete else rng.uniform(-2, 2, (steps, 2)).astype(np.float32)
        rewards = rng.normal(size=steps)
        done = np.arange(steps) == steps - 1
        episodes.append({"observations": obs, "actions": actions, "rewards": rewards, "terminated": terminated})
        buffers.append(
            EpisodeBuffer(
                observations=obs,
                actions=list(actions) if discrete else actions,
                rewards=list(rewards),
                terminations=list(done & terminated),
                truncations=list(done & (not terminated)),
            )
        )
    minari.create_dataset_from_buffers(
        name,
        buffers,
        observation_space=observation_space,
        action_space=spaces.Discrete(4) if discrete else spaces.Box(-2, 2, (2,), np.float32),
        data_format=kind,
    )
    metadata = root / name / "data" / "metadata.json"  # Minari takes reference scores only together with an environment
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"ref_min_score": -1.0, "ref_max_score": 9.0}))
    return episodes


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["hdf5", "arrow", "parquet"])
@pytest.mark.parametrize("form", ["box", "goal", "discrete"])
def test_minari_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, form: str) -> None:
    episodes = make_minari(tmp_path, monkeypatch, "test/made-v0", kind, form == "goal", form == "discrete")
    data = load_dataset("test/made-v0")
    assert data.episode_end.tolist() == [4, 5, 17, 20]
    for episode, start, end in zip(episodes, data.episode_start, data.episode_end, strict=True):
        obs = episode["observations"]
        if form == "goal":
            obs = np.concatenate([obs["achieved_goal"], obs["desired_goal"], obs["observation"]], 1)
            np.testing.assert_array_equal(data.columns["achieved_goals"][start:end], obs[:-1, :2].astype(np.float32))
            np.testing.assert_array_equal(data.columns["desired_goals"][start:end], obs[:-1, 2:4].astype(np.float32))
        np.testing.assert_array_equal(data.columns["observations"][start:end], obs[:-1].astype(np.float32))
        np.testing.assert_array_equal(data.columns["next_observations"][start:end], obs[1:].astype(np.float32))
        np.testing.assert_array_equal(data.columns["rewards"][start:end], episode["rewards"].astype(np.float32))
        if form == "discrete":
            np.testing.assert_array_equal(data.columns["actions"][start:end], episode["actions"])
        else:
            np.testing.assert_allclose(data.columns["actions"][start:end], episode["actions"] / 2, rtol=1e-6)
        assert bool(data.columns["terminations"][end - 1]) == episode["terminated"]
        assert bool(data.columns["truncations"][end - 1]) != episode["terminated"]
    assert data.columns["successor_known"].all() and data.complete.all()
    assert data.spec.task is not None and (data.spec.task.ref_min, data.spec.task.ref_max) == (-1.0, 9.0)
    assert data.spec.num_actions == (4 if form == "discrete" else 0)
    by_path = load_dataset(str(tmp_path / "test" / "made-v0"))
    assert by_path.fingerprint == data.fingerprint and by_path.spec.name == "test/made-v0"
    assert load_dataset("minari:test/made-v0").fingerprint == data.fingerprint


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["hdf5", "arrow"])
def test_minari_episodes_are_in_the_order_of_their_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    episodes = make_minari(tmp_path, monkeypatch, "test/made-v0", kind, repeat=3)  # 12: as text, 10 comes before 2
    returns = load_dataset("test/made-v0").raw_returns
    np.testing.assert_allclose(returns, [e["rewards"].sum() for e in episodes], rtol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_minari_chosen_observation_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_minari(tmp_path, monkeypatch, "test/goal-v0", "hdf5", goal=True)
    data = load_dataset(DatasetConfig(name="test/goal-v0", observation_keys=["observation", "desired_goal"]))
    assert data.spec.observation_shape == (5,) and data.spec.task is not None
    assert data.spec.task.observation_keys == ("observation", "desired_goal")
    with pytest.raises(UserError, match=r"no entry 'observations'.*Did you mean 'observation'"):
        load_dataset(DatasetConfig(name="test/goal-v0", observation_keys=["observations"]))


@pytest.mark.filterwarnings("ignore")
def test_minari_metadata_that_promise_too_few_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("hdf5", "arrow"):
        make_minari(tmp_path, monkeypatch, f"test/{kind}-v0", kind)
        path = tmp_path / "test" / f"{kind}-v0" / "data" / "metadata.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"total_steps": 6}))
        assert load_dataset(f"test/{kind}-v0").episode_end.tolist() == [4, 5, 17, 20]


@pytest.mark.filterwarnings("ignore")
def test_minari_values_in_other_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Big-endian, compressed, whole numbers for flags, a soft link: the same data. A float64 that float32 cannot hold
    is found.
    """
    make_minari(tmp_path, monkeypatch, "test/made-v0", "hdf5")
    before = load_dataset("test/made-v0")

    def replace(name: str, **options: Any) -> None:
        values = file[name][()]
        del file[name]
        file.create_dataset(name, data=values, **options)

    with h5py.File(tmp_path / "test" / "made-v0" / "data" / "main_data.hdf5", "a") as file:
        replace("episode_0/rewards", dtype=">f8")
        replace("episode_1/observations", dtype=">f8", chunks=True, compression="gzip")
        replace("episode_2/terminations", dtype="i4")
        file.move("episode_3/actions", "elsewhere")
        file["episode_3/actions"] = h5py.SoftLink("/elsewhere")
    assert load_dataset("test/made-v0").fingerprint == before.fingerprint
    with h5py.File(tmp_path / "test" / "made-v0" / "data" / "main_data.hdf5", "a") as file:
        file["episode_2/rewards"][:2] = [1e300, -1e300]
    with pytest.raises(UserError, match="'rewards' has infinite values"):
        load_dataset("test/made-v0")


@pytest.mark.filterwarnings("ignore")
def test_minari_damage_is_named_with_its_episode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_minari(tmp_path, monkeypatch, "test/made-v0", "hdf5")
    before = load_dataset("test/made-v0")
    with h5py.File(tmp_path / "test" / "made-v0" / "data" / "main_data.hdf5", "a") as file:
        flags = file["episode_0/terminations"][()]
        del file["episode_0/terminations"]
        file["episode_0/terminations"] = flags.astype(np.uint8) * 255  # numbers for flags are fine
    assert load_dataset("test/made-v0").fingerprint == before.fingerprint
    with h5py.File(tmp_path / "test" / "made-v0" / "data" / "main_data.hdf5", "a") as file:
        del file["episode_2/actions"]
        file["episode_2/actions"] = np.zeros((3, 2), np.float32)
    with pytest.raises(UserError, match=r"episode_2: 'actions' has shape \[3, 2\], expected \[12, 2\]"):
        load_dataset("test/made-v0")


@real
def test_real_minari(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(SHARED / "minari"))
    data = load_dataset("D4RL/door/human-v2")
    assert data.num_episodes == 25 and len(data) == 6729 == len(data.transition_rows())
    assert float(data.raw_returns.mean()) == pytest.approx(802.8, abs=0.05)
    assert data.spec.observation_shape == (39,) and data.spec.action_dim == 28
    task = data.spec.task
    assert task is not None and task.env_id == "AdroitHandDoor-v1" and task.env_kwargs == {"reward_type": "dense"}
    assert (task.ref_min, task.ref_max, task.ref_label) == (-45.80706024169922, 2940.578369140625, "Minari")
    assert load_dataset(str(SHARED / "minari" / "D4RL" / "door" / "human-v2")).fingerprint == data.fingerprint


def test_a_minari_id_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    data = tmp_path / "D4RL" / "door" / "human-v2" / "data"
    data.mkdir(parents=True)
    (data / "metadata.json").write_text("{}")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))

    def offline(name: str) -> None:
        (tmp_path / name).mkdir(parents=True)  # what Minari leaves behind
        raise ConnectionError("no network")

    monkeypatch.setattr(minari, "download_dataset", offline)
    with pytest.raises(
        UserError, match=r"cannot be downloaded \(no network\)\. Did you mean 'D4RL/door/human-v2'"
    ) as caught:
        load_dataset("D4RL/dor/human-v2")
    assert "\n" not in str(caught.value) and sorted(p.name for p in (tmp_path / "D4RL").iterdir()) == ["door"]
    with pytest.raises(UserError, match="no Minari id"):
        load_dataset("minari:door")


# ---- OGBench and d3rlpy ---------------------------------------------------------------------------------------------------------------  # noqa: E501


def test_ogbench_compact_terminals_are_ends_not_terminations(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "pointmaze-medium-navigate-v0.npz",
        observations=OBS,
        actions=ACT,
        terminals=np.array([0, 0, 1, 0, 0, 1], bool),
    )
    data = load_dataset(str(tmp_path / "pointmaze-medium-navigate-v0.npz"))
    assert (
        data.spec.source == "ogbench" and not data.columns["terminations"].any() and not data.columns["rewards"].any()
    )
    assert data.columns["truncations"].nonzero().squeeze(-1).tolist() == [2, 5] and data.transition_rows().tolist() == [
        0,
        1,
        3,
        4,
    ]


def test_ogbench_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "cube-single-play-v0.npz", observations=OBS, actions=ACT, terminals=STOP)
    monkeypatch.setenv("OGBENCH_DATASET_DIR", str(tmp_path))
    assert resolve("cube-single-play-v0", DatasetConfig()).kind == "ogbench"
    assert len(load_dataset("cube-single-play-v0")) == 6


@real
def test_real_ogbench() -> None:
    for suffix, episodes in (("", 1000), ("-val", 100)):
        data = load_dataset(str(SHARED / "ogbench" / f"pointmaze-medium-navigate-v0{suffix}.npz"))
        assert data.num_episodes == episodes and (data.episode_lengths() == 1001).all()
        assert len(data.transition_rows()) == 1000 * episodes


@pytest.mark.parametrize("discrete", [False, True])
def test_d3rlpy_version_1(tmp_path: Path, discrete: bool) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        actions = np.array([0, 1, 2, 0, 1, 2], np.float32)[:, None] if discrete else ACT
        for key, value in {
            "observations": OBS,
            "actions": actions,
            "rewards": REW,
            "terminals": DONE.astype(np.float32),
        }.items():
            file[key] = value
        file["episode_terminals"], file["discrete_action"], file["version"] = (
            (DONE | STOP).astype(np.float32),
            discrete,
            "1.0",
        )
    data = load_dataset(str(tmp_path / "x.h5"))
    assert data.spec.source == "d3rlpy" and data.episode_end.tolist() == [3, 6] and data.spec.discrete == discrete
    assert data.columns["terminations"].nonzero().tolist() == [[2]] and data.columns[
        "truncations"
    ].nonzero().tolist() == [[5]]
    with h5py.File(tmp_path / "x.h5", "a") as file:
        del file["version"]
    with pytest.raises(UserError, match=r"before 1\.0"):
        load_dataset(str(tmp_path / "x.h5"))


def test_d3rlpy_version_2(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w") as file:
        for i, part in enumerate((slice(0, 3), slice(3, 6))):
            file[f"observations_{i}"], file[f"actions_{i}"] = OBS[part].astype(np.float32), ACT[part].astype(np.float32)
            file[f"rewards_{i}"], file[f"terminated_{i}"] = REW[part][:, None].astype(np.float32), i == 0
        file["total_size"], file["version"] = 2, "2.1"
    assert_is_the_example(load_dataset(str(tmp_path / "x.h5")))


@real
def test_real_d3rlpy() -> None:
    replay, random = (load_dataset(str(SHARED / "d3rlpy" / f"pendulum{n}_v1.1.0.h5")) for n in ("", "_random"))
    for data in (replay, random):
        assert len(data) == 99_500 and data.num_episodes == 500 and not data.columns["terminations"].any()
        assert data.spec.observation_shape == (3,) and data.spec.action_high == (2.0,)
    assert float(random.raw_returns.mean()) == pytest.approx(-1224, abs=1.0)
    assert float(replay.raw_returns[:10].mean()) == pytest.approx(-1290, abs=1.0)
    assert float(replay.raw_returns[-10:].mean()) == pytest.approx(-169, abs=1.0)
    # the reward of row i belongs to its observation and action: -(angle^2 + 0.1 speed^2 + 0.001 torque^2)
    s, a = random.columns["observations"], random.columns["actions"][:, 0] * 2
    expected = -(torch.atan2(s[:, 1], s[:, 0]) ** 2 + 0.1 * s[:, 2] ** 2 + 0.001 * a**2)
    assert float((random.columns["rewards"] - expected).abs().max()) < 1e-3


def test_d4rl_verify(tmp_path: Path) -> None:
    d4rl.verify(write_d4rl(tmp_path / "x.hdf5"))
    with h5py.File(tmp_path / "x.hdf5", "a") as file:
        del file["rewards"]
        file["rewards"] = np.zeros(3)
    with pytest.raises(UserError, match="different lengths"):
        d4rl.verify(tmp_path / "x.hdf5")
