"""`offrl data convert`, `subset` and `merge` as functions: against arrays put together by hand, and on the real
datasets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.loading.read import read_raw
from offrl.data.tools.convert import convert, merge, subset
from offrl.data.tools.subset import Choice
from offrl.data.transforms.episodes import subsample, top_fraction
from offrl.errors import UserError
from tests.support.tiers import nightly_but

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
real = pytest.mark.skipif(not SHARED.is_dir(), reason=f"the real datasets are not at {SHARED}")
LENGTHS = np.array([3, 1, 4, 2])
START = np.array([0, 3, 4, 8])


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))


def columns(shift: float = 0.0) -> dict[str, np.ndarray]:
    """Ten rows in four episodes with returns 3, 3, 22, 17: the first and the third terminate, the last row is no
    end.
    """
    ends = np.zeros(10, bool)
    ends[[2, 3, 7]] = True
    return {
        "observations": (np.arange(20, dtype=np.float32) + np.float32(shift)).reshape(10, 2),
        "actions": np.linspace(-1, 1, 10, dtype=np.float32)[:, None],
        "rewards": np.arange(10, dtype=np.float32),
        "terminals": ends & np.isin(np.arange(10), (2, 7)),
        "timeouts": ends & (np.arange(10) == 3),
    }


def hdf5(path: Path, attributes: dict[str, Any] | None = None, **values: np.ndarray) -> str:
    with h5py.File(path, "w") as file:
        for key, value in values.items():
            file[key] = value
        file.attrs.update(attributes or {})
    return str(path)


@pytest.fixture
def source(tmp_path: Path) -> str:
    return hdf5(
        tmp_path / "a.hdf5",
        **columns(),
        **{"infos/qpos": np.arange(10.0) * 2, "metadata/algorithm": "SAC", "wear": np.arange(10.0)},
    )


def config(name: str | Path, **settings: Any) -> DatasetConfig:
    return DatasetConfig(name=str(name), cache="never", **settings)


def load(name: str | Path, **settings: Any) -> Dataset:
    return load_dataset(config(name, **settings))


def equal(a: Dataset, b: Dataset) -> None:
    assert a.columns.keys() == b.columns.keys()
    for name in a.columns:
        assert (
            a.columns[name].dtype == b.columns[name].dtype
            and a.columns[name].numpy().tobytes() == b.columns[name].numpy().tobytes()
        ), name
    assert a.episode_end.tolist() == b.episode_end.tolist() and a.complete.equal(b.complete)
    assert (a.spec.action_low, a.spec.action_high, a.spec.task) == (b.spec.action_low, b.spec.action_high, b.spec.task)


# ----------------------------------------------------------------------------------------------------------------
# convert


@real
@pytest.mark.parametrize(
    "name",
    nightly_but(
        ("d3rlpy/pendulum_v1.1.0.h5",),
        (
            "d4rl/hopper_medium.hdf5",
            "d4rl/halfcheetah_medium_replay.hdf5",
            "minari/D4RL/door/human-v2",
            "d3rlpy/pendulum_v1.1.0.h5",
            "ogbench/pointmaze-medium-navigate-v0-val.npz",
        ),
    ),
)
def test_real_data_through_both_layouts(name: str, tmp_path: Path) -> None:
    first = load(SHARED / name)
    minari = convert(config(SHARED / name), "real/data-v0")
    equal(first, load("real/data-v0"))
    d4rl = convert(config("real/data-v0"), str(tmp_path / "x.hdf5"))
    equal(first, load(d4rl.path))
    back = convert(config(d4rl.path), "real/data-v1")
    equal(first, load("real/data-v1"))
    assert minari.fingerprint == d4rl.fingerprint == back.fingerprint == first.fingerprint
    assert (minari.form, d4rl.form, d4rl.rows, d4rl.episodes) == ("minari", "d4rl", len(first), first.num_episodes)


@real
def test_a_minari_data_set_comes_back_whole(tmp_path: Path) -> None:
    """Minari -> D4RL -> Minari, seen by Minari: observations, actions, rewards, flags, infos, environment, author,
    scores.
    """
    library = pytest.importorskip("minari")
    there = convert(config(SHARED / "minari/D4RL/door/human-v2"), str(tmp_path / "x.hdf5"))
    convert(config(there.path), "D4RL/door/mine-v2")
    old = library.MinariDataset(SHARED / "minari/D4RL/door/human-v2/data")
    new = library.load_dataset("D4RL/door/mine-v2")
    assert (old.total_episodes, old.total_steps, old.env_spec) == (new.total_episodes, new.total_steps, new.env_spec)
    for a, b in zip(old.iterate_episodes(), new.iterate_episodes(), strict=True):
        np.testing.assert_array_equal(a.observations.astype(np.float32), b.observations)
        np.testing.assert_array_equal(a.rewards.astype(np.float32), b.rewards)
        for part in ("actions", "terminations", "truncations"):
            np.testing.assert_array_equal(getattr(a, part), getattr(b, part))
        np.testing.assert_array_equal(a.infos["success"], b.infos["success"])
    a, b = old.storage.metadata, new.storage.metadata
    for key in (
        "author",
        "author_email",
        "code_permalink",
        "ref_min_score",
        "ref_max_score",
        "requirements",
        "description",
    ):
        assert a[key] == b[key], key


def test_every_column_of_every_file_is_kept(tmp_path: Path, source: str) -> None:
    plain = {k: v for k, v in columns().items() if k not in ("terminals", "timeouts")}
    flags = {"terminations": columns()["terminals"], "truncations": columns()["timeouts"]}
    np.savez(tmp_path / "n.npz", **plain, **flags, wear=np.arange(10.0))
    np.savez(
        tmp_path / "og.npz",
        observations=plain["observations"],
        actions=plain["actions"],
        terminals=columns()["timeouts"],
        qpos=np.eye(10),
    )
    for name, kept in (
        (source, {"infos/qpos", "infos/wear"}),
        (tmp_path / "n.npz", {"infos/wear"}),
        (tmp_path / "og.npz", {"infos/qpos"}),
    ):
        there = convert(config(name), str(tmp_path / "out.hdf5"), force=True)
        with h5py.File(there.path) as file:
            assert {f"infos/{k}" for k in file["infos"]} == kept
        assert set(load(there.path).columns) == set(load(name).columns)  # which are loaded stays as it was
        again = convert(config(there.path), "x-v0", force=True)
        raw = read_raw(str(again.path), DatasetConfig(fields={k: k for k in kept}))
        assert kept <= set(raw.columns)
    assert read_raw(str(convert(config(source), "y-v0").path)).metadata["algorithm_name"] == "SAC"


def test_columns_asked_for_keep_their_names(tmp_path: Path, source: str) -> None:
    asked = config(source, fields={"wear": "wear"})
    for name in ("y.hdf5", "y-v0"):
        convert(asked, str(tmp_path / name))
        np.testing.assert_array_equal(load(tmp_path / name).columns["wear"], np.arange(10))
    assert "wear" in load(convert(config(tmp_path / "y-v0"), str(tmp_path / "z.hdf5")).path).columns


def test_faulty_data_are_refused_unless_asked_for(tmp_path: Path) -> None:
    bad = columns()
    bad["rewards"][5] = np.nan
    name = hdf5(tmp_path / "bad.hdf5", **bad)
    with pytest.raises(UserError, match=r"'rewards' has NaN in 1 row .first at episode 2, row 5"):
        convert(config(name), str(tmp_path / "x.hdf5"))
    assert not (tmp_path / "x.hdf5").exists()
    convert(config(name, check=False), str(tmp_path / "x.hdf5"))
    equal(load(name, check=False), load(tmp_path / "x.hdf5", check=False))
    wild = columns()
    wild["actions"] *= 2
    name = hdf5(tmp_path / "wild.hdf5", **wild)
    with pytest.raises(UserError, match="leaves the environment's range"):
        convert(config(name), str(tmp_path / "y.hdf5"))
    convert(config(name, clip_actions=True), str(tmp_path / "y.hdf5"))
    np.testing.assert_array_equal(load(tmp_path / "y.hdf5").columns["actions"], np.clip(wild["actions"], -1, 1))


def test_settings_that_change_data_on_loading_are_refused(tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match=r"dataset\.reward_scale is for loading"):
        convert(config(source, reward_scale=2.0), str(tmp_path / "x.hdf5"))
    with pytest.raises(UserError, match="exists; give another name"):  # before anything is read
        convert(config("nowhere.hdf5"), source)


def test_more_memory_than_allowed_goes_to_files_that_are_removed(tmp_path: Path) -> None:
    there = convert(config("builtin", memory="mmap", cache_dir=str(tmp_path / "cache")), str(tmp_path / "x.hdf5"))
    equal(load("builtin"), load(there.path))
    assert list((tmp_path / "cache" / "mapped").iterdir()) == []


# -----------------------------------------------------------------------------------------------------------------
# subset


def rows_of(data: Dataset) -> list[int]:
    return (data.columns["observations"][:, 0] / 2).long().tolist()


@pytest.mark.parametrize("out", ["x.hdf5", "x-v0"])
@pytest.mark.parametrize(
    ("choice", "rows", "lengths"),
    [
        (Choice(episodes="1:3"), [3, 4, 5, 6, 7], [1, 4]),
        (Choice(episodes=[3, 0]), [8, 9, 0, 1, 2], [2, 3]),
        (Choice(episodes=-1), [8, 9], [2]),
        (Choice(rows="2:6"), [2, 3, 4, 5], [1, 1, 2]),
        (Choice(rows=":-1", episodes="2:"), [4, 5, 6, 7, 8], [4, 1]),
        (Choice(top=0.5), [4, 5, 6, 7, 8, 9], [4, 2]),
        (Choice(min_return=3.5), [4, 5, 6, 7, 8, 9], [4, 2]),
        (Choice(min_return=3, max_return=20), [0, 1, 2, 3, 8, 9], [3, 1, 2]),
        (Choice(min_return=3, max_return=20, top=0.4), [8, 9], [2]),
    ],
)
def test_subset(choice: Choice, rows: list[int], lengths: list[int], out: str, tmp_path: Path, source: str) -> None:
    written = subset(config(source), str(tmp_path / out), choice)
    part = load(written.path)
    assert rows_of(part) == rows and part.episode_lengths().tolist() == lengths
    assert (written.rows, written.episodes, written.fingerprint) == (len(rows), len(lengths), part.fingerprint)
    whole = load(source)
    for name in ("actions", "rewards", "terminations"):
        np.testing.assert_array_equal(part.columns[name], whole.columns[name][rows])
    np.testing.assert_array_equal(
        read_raw(str(written.path), DatasetConfig(fields={"q": "infos/qpos"})).columns["q"], np.array(rows) * 2.0
    )


def test_subset_by_share_is_what_the_transforms_keep(source: str, tmp_path: Path) -> None:
    builtin = load("builtin")
    for choice, kept in (
        (Choice(fraction=0.3, seed=5), subsample(builtin, 0.3, 5)),
        (Choice(top=0.1), top_fraction(builtin, 0.1)),
        (Choice(top=0.5, fraction=0.5), subsample(top_fraction(builtin, 0.5), 0.5)),
    ):
        part = load(subset(config("builtin"), str(tmp_path / "x.hdf5"), choice, force=True).path)
        equal(kept, part)
        assert part.spec.task == builtin.spec.task


def test_what_is_known_of_ends_survives_a_subset(tmp_path: Path) -> None:
    """Where rows are cut inside an episode the next row is known; a successor that was another episode's start stays
    unknown.
    """
    data = columns()
    # shifted: wrong at time-outs
    data["next_observations"] = np.concatenate([data["observations"][1:], data["observations"][:1]])
    data["next_observations"][[2, 7]] = -1.0  # true last observations where the episode terminates
    name = hdf5(tmp_path / "a.hdf5", **data)
    whole = load(name)
    assert whole.columns["successor_known"].tolist() == [True] * 3 + [False] + [True] * 5 + [False]
    for choice in (Choice(episodes=[1, 0]), Choice(episodes=[3, 1]), Choice(rows="1:6")):
        for out in ("x.hdf5", "x-v0"):
            part = load(subset(config(name), str(tmp_path / out), choice, force=True).path)
            rows = rows_of(part)
            expected = whole.columns["successor_known"][rows].tolist()
            assert part.columns["successor_known"].tolist() == expected
            known = np.flatnonzero(expected)
            np.testing.assert_array_equal(
                part.columns["next_observations"][known], whole.columns["next_observations"][np.array(rows)[known]]
            )


def test_terminals_that_lead_elsewhere_survive_subset_and_merge(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = columns()
    data["next_observations"] = np.concatenate([data["observations"][1:], data["observations"][:1]])
    name = hdf5(tmp_path / "a.hdf5", **data)
    ended = np.flatnonzero(data["terminals"])
    assert not load(name).columns["successor_known"][ended].any()
    part = load(subset(config(name), str(tmp_path / "x.hdf5"), Choice(episodes=[2, 0, 1]), force=True).path)
    assert not part.columns["successor_known"][part.columns["terminations"]].any()
    both = load(merge([config(name), config(name)], str(tmp_path / "m.hdf5")).path)
    assert not both.columns["successor_known"][both.columns["terminations"]].any()
    subset(config(name), str(tmp_path / "y.hdf5"), Choice(episodes=[3, 1, 0]), force=True)
    assert "what 1 terminals lead to is not known" in capsys.readouterr().err


def test_final_observations_survive_a_subset(tmp_path: Path) -> None:
    data = columns() | {"final_observations": np.array([[-1, -1], [-2, -2], [-3, -3], [-4, -4]], np.float32)}
    data["timeouts"][-1] = True
    part = load(
        subset(
            config(hdf5(tmp_path / "a.hdf5", **data)), str(tmp_path / "x-v0"), Choice(rows="2:6", episodes=[0, 2])
        ).path
    )
    assert rows_of(part) == [2, 4, 5] and part.columns["next_observations"].tolist() == [[-1, -1], [10, 11], [12, 13]]
    assert part.columns["successor_known"].all() and part.complete.tolist() == [True, False]


def test_a_part_keeps_the_range_of_the_whole(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "a.npz", **{k: v for k, v in columns().items() if k != "actions"}, actions=columns()["actions"] * 3
    )
    whole, part = (
        load(tmp_path / "a.npz"),
        load(subset(config(tmp_path / "a.npz"), str(tmp_path / "x.hdf5"), Choice(episodes=[1])).path),
    )
    assert (
        part.spec.action_low == whole.spec.action_low == (-3.0,)
        and part.columns["actions"].item() == whole.columns["actions"][3].item()
    )
    discrete = {k: v for k, v in columns().items() if k != "actions"} | {"actions": np.arange(10)}
    np.savez(tmp_path / "d.npz", **discrete)
    assert load(subset(config(tmp_path / "d.npz"), "d-v0", Choice(episodes=[0])).path).spec.num_actions == 10


def test_faulty_episodes_are_left_out(tmp_path: Path) -> None:
    bad = columns()
    bad["rewards"][5], bad["observations"][3, 1], bad["actions"][0] = np.nan, np.inf, 1.5
    name = hdf5(tmp_path / "bad.hdf5", **bad)
    message = r"bad\.hdf5 \(episodes 1:3\): 'observations' has infinite values in 1 row .first at episode 0, row 0"
    with pytest.raises(UserError, match=message):
        subset(config(name), str(tmp_path / "x.hdf5"), Choice(episodes="1:3"))
    written = subset(config(name), str(tmp_path / "x.hdf5"), Choice(drop_faulty=True))
    assert rows_of(load(written.path)) == [8, 9]
    written = subset(config(name, clip_actions=True), str(tmp_path / "y.hdf5"), Choice(drop_faulty=True))
    assert rows_of(load(written.path)) == [0, 1, 2, 8, 9]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice(), "say what to keep"),
        (Choice(episodes="5:9"), "the dataset has the episodes 0 to 3, and not all of these"),
        (Choice(episodes=[0, 4]), r"the dataset has the episodes 0 to 3, and none is 4"),
        (Choice(episodes=[0, -4]), "names an episode twice"),
        (Choice(episodes="first"), "'first' is no number"),
        (Choice(rows="4:99"), "the dataset has the rows 0 to 9, and not all of these"),
        (Choice(rows="7"), r"rows=7 must be a range such as 0:100"),
        (Choice(rows="a:b"), "rows=a:b must be a range"),
        (Choice(min_return=1e9), "no episode is left"),
        (Choice(top=0.0), "top=0 must be above 0"),
        (Choice(fraction=-1.0), "fraction=-1 must be above 0"),
    ],
)
def test_bad_choices(choice: Choice, message: str, tmp_path: Path, source: str) -> None:
    with pytest.raises(UserError, match=message):
        subset(config(source), str(tmp_path / "x.hdf5"), choice)
    assert not (tmp_path / "x.hdf5").exists()


# ------------------------------------------------------------------------------------------------------------------
# merge


@pytest.mark.parametrize("out", ["m.hdf5", "m-v0"])
def test_merge(out: str, tmp_path: Path) -> None:
    a, b = hdf5(tmp_path / "a.hdf5", **columns()), hdf5(tmp_path / "b.hdf5", **columns(100.0))
    written = merge([config(a), config(b)], str(tmp_path / out))
    both = load(written.path)
    np.testing.assert_array_equal(
        both.columns["observations"], np.concatenate([columns()["observations"], columns(100.0)["observations"]])
    )
    assert both.episode_end.tolist() == [3, 4, 8, 10, 13, 14, 18, 20]
    assert both.columns["successor_known"].tolist() == [*load(a).columns["successor_known"].tolist()] * 2
    assert both.columns["truncations"].nonzero().reshape(-1).tolist() == [3, 9, 13, 19] and not both.complete[-1]
    raw = read_raw(str(written.path), DatasetConfig(fields={"from": "infos/source"}))
    assert raw.columns["from"].tolist() == [0] * 10 + [1] * 10 and raw.metadata["combined_datasets"] == ["a", "b"]
    assert len(raw.metadata["history"]) == 2 and "merged from" in raw.metadata["history"][0]
    three = merge([config(written.path), config(b)], str(tmp_path / f"3{out}"))  # the parts of a part are kept
    raw = read_raw(str(three.path), DatasetConfig(fields={"from": "infos/source"}))
    assert raw.columns["from"].tolist() == [0] * 10 + [1] * 10 + [2] * 10 and raw.metadata["combined_datasets"] == [
        "a",
        "b",
        "b",
    ]


def test_merging_data_that_know_different_ends(tmp_path: Path) -> None:
    """One with next_observations (one of them shifted), one with final observations, one that knows none: each keeps
    what it knew.
    """
    first = columns() | {
        "next_observations": np.concatenate([columns()["observations"][1:], columns()["observations"][:1]])
    }
    first["next_observations"][[2, 7]] = -1.0
    second = columns(100.0) | {"final_observations": np.full((4, 2), -5, np.float32)}
    second["timeouts"][-1] = True
    names = [hdf5(tmp_path / f"{k}.hdf5", **v) for k, v in (("a", first), ("b", second), ("c", columns(200.0)))]
    parts = [load(name) for name in names]
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        both = load(merge([config(names[i]) for i in order], str(tmp_path / "m-v0"), force=True).path)
        for column in (
            "observations",
            "next_observations",
            "successor_known",
            "terminations",
            "truncations",
            "rewards",
        ):
            np.testing.assert_array_equal(
                both.columns[column], np.concatenate([parts[i].columns[column] for i in order])
            )


def test_what_does_not_belong_together_is_not_merged(tmp_path: Path) -> None:
    def make(name: str, attributes: dict[str, Any] | None = None, **other: np.ndarray) -> DatasetConfig:
        return config(hdf5(tmp_path / f"{name}.hdf5", attributes, **{**columns(), **other}))

    plain = make("plain")

    def refused(other: DatasetConfig, message: str) -> None:
        with pytest.raises(UserError, match=message):
            merge([plain, other], str(tmp_path / "m.hdf5"))
        assert not (tmp_path / "m.hdf5").exists()

    refused(make("wide", observations=np.zeros((10, 3))), r"wide.*plain.*observations of shape \[3\] instead of \[2\]")
    refused(make("two", actions=np.zeros((10, 2))), "2 continuous actions instead of 1 continuous actions")
    refused(make("discrete", actions=np.zeros(10, int)), "discrete actions instead of 1 continuous actions")
    refused(
        make("pixels", observations=np.zeros((10, 2, 2), np.uint8)), r"observations of shape \[2, 2\] instead of \[2\]"
    )
    np.savez(
        tmp_path / "big.npz", **{k: v for k, v in columns().items() if k != "actions"}, actions=columns()["actions"] * 2
    )
    refused(config(tmp_path / "big.npz"), r"the actions range from -2 to 2 instead of -1 to 1.*dataset\.action_low")
    with pytest.raises(UserError, match="two datasets at least"):
        merge([plain], str(tmp_path / "m.hdf5"))
    hopper, walker = make("h", {"env_id": "Mine/A-v4"}), make("w", {"env_id": "Mine/B-v4"})
    with pytest.raises(UserError, match=r"recorded in Mine/B-v4, the other in Mine/A-v4"):
        merge([hopper, walker], str(tmp_path / "m.hdf5"))
    written = merge([hopper, make("h5", {"env_id": "Mine/A-v5"})], str(tmp_path / "m.hdf5"))
    assert written.notes[-1] == "recorded in Mine/A-v4 and Mine/A-v5; scores will be measured in Mine/A-v4"
    wide = [
        config(tmp_path / "big.npz", action_low=[-2.0], action_high=[2.0]),
        config(plain.name, action_low=[-2.0], action_high=[2.0]),
    ]
    np.testing.assert_allclose(
        load(merge(wide, str(tmp_path / "n.hdf5")).path).columns["actions"][10:, 0] * 2, columns()["actions"][:, 0]
    )


def test_infos_that_not_all_have_are_left_out_with_a_note(tmp_path: Path, source: str) -> None:
    written = merge([config(source), config(hdf5(tmp_path / "b.hdf5", **columns()))], str(tmp_path / "m.hdf5"))
    assert "a.hdf5 has no end there; merged, it counts as whole" in " ".join(written.notes)
    assert written.notes[:2] == (
        "left out: infos/qpos, which not all of them have",
        "left out: infos/wear, which not all of them have",
    )
    with pytest.raises(UserError, match="the column 'wear' is in one of them only"):
        merge([config(source, fields={"wear": "wear"}), config(tmp_path / "b.hdf5")], str(tmp_path / "n.hdf5"))
