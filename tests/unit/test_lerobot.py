"""LeRobot datasets: rows as pyarrow reads them, frames as av decodes them, and one line for whatever is wrong."""

from __future__ import annotations

import importlib.util
import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from offrl.data.formats.lerobot import video as lerobot_video
from offrl.data.loading.read import read_raw
from offrl.data.loading.resolve import resolve
from offrl.data.raw import RawData
from offrl.data.tools.convert import convert
from offrl.data.writing import write_lerobot
from offrl.data.writing.write import write_data
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.system import processes
from tests.support import lerobot as files

FRONT, TOP = files.CAMERAS
VERSIONS = ("v2.1", "v3.0")


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A dataset of each version; tests that change one take a copy."""
    return {v: files.write(tmp_path_factory.mktemp(v) / "arm", v) for v in VERSIONS}


@pytest.fixture
def two(written: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of v2.1."""
    return Path(shutil.copytree(written["v2.1"], tmp_path / "arm"))


def read(folder: Path, *keys: str, **settings: Any) -> RawData:
    return read_raw(str(folder), DatasetConfig(observation_keys=list(keys), **settings))


def refusal(folder: Path, *keys: str, **settings: Any) -> str:
    with pytest.raises(UserError) as error:
        read(folder, *keys, **settings)
    assert "\n" not in str(error.value)
    return str(error.value)


def clip(folder: Path, camera: str, episode: int) -> Path:
    return folder / f"videos/chunk-000/{camera}/episode_{episode:06d}.mp4"


def decoded(path: Path) -> np.ndarray:
    """All frames of a file, as av decodes them when it opens its path."""
    import av

    with av.open(str(path)) as file:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)])


# ------------------------------------------------------------------------------------------------------------- rows


@pytest.mark.parametrize("version", VERSIONS)
def test_rows_are_those_of_the_files(written: dict[str, Path], version: str) -> None:
    raw = read(written[version])
    expected = [files.rows(e) for e in range(3)]
    joined = {k: np.concatenate([part[k] for part in expected]) for k in expected[0]}
    both = np.concatenate([joined["observation.state"], joined["observation.force"]], 1)
    assert np.array_equal(raw.columns["observations"], both)
    assert np.array_equal(raw.columns["actions"], joined["action"]) and raw.columns["actions"].dtype == np.float32
    assert np.array_equal(raw.columns["task"], joined["task_index"])
    assert raw.episode_ends is not None and np.flatnonzero(raw.episode_ends).tolist() == [4, 11, 17]
    assert not raw.columns["rewards"].any() and raw.final_observations is None and not raw.streams
    assert any("no rewards" in text for text in raw.notes) and any("images are left out" in text for text in raw.notes)
    assert raw.metadata["tasks"] == {"0": "pick", "1": "place"} and raw.metadata["fps"] == 10.0
    assert raw.dimension_names("actions") == ["shoulder", "elbow"]
    assert raw.dimension_names("observations")[2:4] == ["observation.state.z", "observation.force.0"]


@pytest.mark.parametrize("version", VERSIONS)
def test_episodes_that_are_named_are_those_that_are_read(written: dict[str, Path], version: str) -> None:
    every, starts = read(written[version], FRONT).streams[FRONT].values, np.cumsum([0, *files.LENGTHS])
    for chosen, numbers in (("1:3", (1, 2)), ("2,0", (0, 2)), ("2", (2,))):
        raw = read(written[version], "observation.state", FRONT, episodes=chosen)
        state = np.concatenate([files.rows(e)["observation.state"] for e in numbers])
        assert np.array_equal(raw.columns["observations"], state)
        due = np.concatenate([every[starts[e] : starts[e + 1]] for e in numbers])
        assert np.array_equal(raw.streams[FRONT].values, due)


def test_rewards_and_success_that_were_recorded(tmp_path: Path) -> None:
    rewards = [np.arange(n, dtype=np.float32) for n in files.LENGTHS]
    success = [np.arange(n) >= n - 2 if e else np.zeros(n, bool) for e, n in enumerate(files.LENGTHS)]
    folder = files.write(tmp_path / "arm", images="", **{"next.reward": rewards, "next.success": success})
    raw = read(folder)
    assert np.array_equal(raw.columns["rewards"], np.concatenate(rewards))
    assert np.flatnonzero(raw.columns["terminations"]).tolist() == [11, 17]
    assert any("next.success is true in 2 rows" in text for text in raw.notes)
    done = [np.arange(n) == n - 1 for n in files.LENGTHS]
    raw = read(files.write(tmp_path / "other", images="", **{"next.done": done}))
    assert "terminations" not in raw.columns and any("next.done" in text for text in raw.notes)


def test_fields_name_other_features(tmp_path: Path) -> None:
    score = [np.full(n, e, np.float32) for e, n in enumerate(files.LENGTHS)]
    folder = files.write(tmp_path / "arm", images="", score=score)
    raw = read(folder, "observation.state", fields={"rewards": "score", "costs": "timestamp"})
    assert np.array_equal(raw.columns["rewards"], np.concatenate(score)) and raw.columns["costs"][1] == np.float32(0.1)
    assert "dataset.observation_keys=[...]" in refusal(folder, fields={"observations": "observation.state"})
    assert "Did you mean 'score'?" in refusal(folder, fields={"rewards": "scores"})


def test_the_key_of_the_cache_knows_all_files(two: Path) -> None:
    source = resolve(str(two), DatasetConfig())
    assert source.kind == "lerobot" and source.name == "arm"
    before = source.identity()
    clip(two, TOP, 2).write_bytes(b"other")
    assert source.identity() != before


# ----------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("version", VERSIONS)
def test_frames_are_those_of_av(written: dict[str, Path], version: str) -> None:
    folder = written[version]
    raw = read(folder, TOP, "observation.state", FRONT)
    assert list(raw.streams) == [TOP, FRONT] and raw.columns["observations"].shape == (18, 3)
    for camera, stream in raw.streams.items():
        if version == "v2.1":
            due = np.concatenate([decoded(clip(folder, camera, e)) for e in range(3)])
        else:
            first, second = (decoded(folder / f"videos/{camera}/chunk-000/file-{k:03d}.mp4") for k in (0, 1))
            due = np.concatenate([first[:5], second, first[5:]])
        assert np.array_equal(stream.values, due) and np.array_equal(stream.entries, np.arange(18))
        assert len(stream.digest) == 64 and stream.final is None
        source = np.concatenate([files.pictures(files.CAMERAS.index(camera), e) for e in range(3)])
        assert np.abs(stream.values.astype(int) - source).mean() < 3
    assert raw.streams[TOP].digest != raw.streams[FRONT].digest


def test_resized_frames_are_means_of_areas(written: dict[str, Path]) -> None:
    plain, small = (read(written["v2.1"], FRONT, image_size=size).streams[FRONT] for size in (None, [8, 16]))
    means = plain.values.reshape(18, 8, 4, 16, 3, 3).mean((2, 4))
    assert small.values.shape == (18, 8, 16, 3) and np.abs(small.values - means).max() <= 1
    assert small.digest != plain.digest


@pytest.mark.parametrize("version", VERSIONS)
def test_images_in_the_data_files(tmp_path: Path, version: str) -> None:
    folder = files.write(tmp_path / "arm", version, images="image")
    stream = read(folder, TOP).streams[TOP]
    due = np.concatenate([files.pictures(1, e) for e in range(3)])
    assert np.array_equal(stream.values, due) and stream.digest == ""
    small = read(folder, TOP, episodes="1", image_size=[16, 24]).streams[TOP].values
    assert np.abs(small - files.pictures(1, 1).reshape(7, 16, 2, 24, 2, 3).mean((2, 4))).max() <= 1


def test_images_are_what_is_observed_where_there_is_no_vector(two: Path) -> None:
    for key in ("observation.state", "observation.force"):
        files.set_info(two, **{f"features.{key}.dtype": "string"})
    raw = read(two)
    assert raw.columns["observations"].shape == (18, 0) and list(raw.streams) == [FRONT, TOP]


# ---------------------------------------------------------------------------------------------------------- refusals


def test_what_is_not_there(two: Path, written: dict[str, Path]) -> None:
    text = refusal(two, "observation.images.frnt")
    assert "Did you mean 'observation.images.front'?" in text and "observation.state (float32)" in text
    clip(two, FRONT, 1).unlink()
    assert not read(two).streams  # which needs no video
    text = refusal(two, FRONT)
    assert "front/episode_000001.mp4 is missing" in text and "dataset.episodes=0:1" in text
    for episode in (0, 2):
        (two / f"data/chunk-000/episode_{episode:06d}.parquet").unlink()
    text = refusal(two)
    assert "episode_000000.parquet (and 1 more) is missing" in text and "dataset.episodes=1:2" in text
    assert read(two, episodes="1:2").rows == 7
    (two / "data/chunk-000/episode_000001.parquet").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    assert "git lfs pull" in refusal(two, episodes="1")
    assert "has the episodes 0 to 2, and not all of these" in refusal(two, episodes="5:9")
    assert "no meta/info.json" in refusal(two / "data", format="lerobot")


@pytest.mark.parametrize(("version", "cure"), [("v1.6", "scripts"), ("v4.0", "lerobot 0.4"), ("\x1b[2J", "v3.0")])
def test_other_versions(two: Path, version: str, cure: str) -> None:
    files.set_info(two, codebase_version=version)
    text = refusal(two)
    assert "codebase_version is " in text and cure in text and "\x1b" not in text


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"features.observation.state.shape": [4]}, "'observation.state' has 3 numbers in a row, where info.json"),
        ({"features.observation.state.dtype": "language"}, "'observation.state' is language, which is not read"),
        ({"features.observation.images.front.info": {"video.is_depth_map": True}}, "is depth, which is not read"),
        ({"features.observation.images.front.shape": [24, 48, 3]}, "32 x 48 pixels, where info.json says 24 x 48"),
        ({"features.observation.images.front.shape": [60000, 60000, 3]}, "at most 4096 an edge"),
        ({"features.observation.images.front.shape": [32, 48]}, "images [height, width, 3] are due"),
        ({"features.action.dtype": "string"}, "no numbers 'action' for the column actions"),
        ({"data_path": "../{episode_index:06d}.parquet"}, "leads out of the folder"),
        ({"data_path": "data/{episode_index.__class__}"}, "is missing"),
        ({"data_path": "data/{episode_index:999999999d}"}, "is missing"),
        ({"data_path": "data/{other}"}, "is none of episode_index, episode_chunk"),
        ({"features": []}, "features is [], where entries by name are due"),
        ({"fps": "fast"}, "fps is 'fast', where a number is due"),
        ({"fps": float("nan")}, "fps is nan, where frames per second are due"),
    ],
)
def test_what_info_says_wrongly(two: Path, change: dict[str, Any], says: str) -> None:
    files.set_info(two, **change)
    assert says in refusal(two, "observation.state", FRONT)


def test_rows_that_are_not_those_of_the_episode(two: Path) -> None:
    path = two / "data/chunk-000/episode_000001.parquet"
    table = pq.read_table(path)
    pq.write_table(table.slice(0, 6), path)
    assert "the 6 rows of episode 1 are not numbered 0 to 6" in refusal(two)
    halves = table.set_column(table.column_names.index("episode_index"), "episode_index", pa.array([1.5] * 7))
    pq.write_table(halves, path)
    assert "the 0 rows of episode 1" in refusal(two)
    uneven = pa.array([[1.0, 2.0, 3.0]] * 6 + [[1.0]], pa.list_(pa.float32()))
    pq.write_table(table.set_column(0, "observation.state", uneven), path)
    assert "lists of different lengths" in refusal(two)
    pq.write_table(table.drop_columns(["action"]), path)
    assert "has no column 'action'" in refusal(two)


def test_videos_that_are_damaged(two: Path) -> None:
    path, frames = clip(two, FRONT, 1), files.pictures(0, 1)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"#EXTM3U\nfile:///etc/passwd\n"):
        path.write_bytes(content)
        assert "front/episode_000001.mp4 cannot be decoded (" in refusal(two, FRONT, episodes="1")
    noise = np.random.default_rng(0).integers(0, 255, frames.shape, dtype=np.uint8)
    files.video(path, noise, options={"movflags": "faststart"})
    sound = path.read_bytes()
    path.write_bytes(sound[:-3500] + 100 * b"\xff" + sound[-3400:])
    assert "has a damaged frame at 0.4 s" in refusal(two, FRONT, episodes="1")
    path.write_bytes(sound[:-3000])
    assert "is cut off or damaged" in refusal(two, FRONT, episodes="1")


def test_videos_that_are_not_those_of_the_rows(two: Path) -> None:
    path, frames = clip(two, FRONT, 1), files.pictures(0, 1)
    files.video(path, frames[:6])
    assert "episode_000001.mp4 ends after 6 of 7 frames" in refusal(two, FRONT, episodes="1")
    files.video(path, frames, codec="mpeg4")
    assert "is coded as mpeg4; av1, h264, hevc, vp9 are read" in refusal(two, FRONT, episodes="1")
    files.video(path, np.concatenate([frames, frames]))  # more frames than rows: those of the rows
    assert len(read(two, FRONT, episodes="1").streams[FRONT].values) == 7
    table = pq.read_table(two / "data/chunk-000/episode_000001.parquet")
    late = pa.array(np.where(np.arange(7) < 3, np.arange(7) / 10, np.arange(7) / 10 + 0.05).astype(np.float32))
    at = table.column_names.index("timestamp")
    pq.write_table(table.set_column(at, "timestamp", late), two / "data/chunk-000/episode_000001.parquet")
    text = refusal(two, FRONT, episodes="1")
    assert "a frame is shown at 0.3000 s where row 3 of episode 1 is due at 0.3500 s" in text


def test_a_video_opens_no_other_file(two: Path) -> None:
    path = clip(two, FRONT, 0)
    other = path.with_name("other.mp4")
    other.write_bytes(path.read_bytes())
    files.alias(path, other)
    assert "an mp4 that refers to another file is not followed" in refusal(two, FRONT)


def test_a_picture_of_another_size(tmp_path: Path) -> None:
    folder = files.write(tmp_path / "arm", images="image")
    path = folder / "data/chunk-000/episode_000000.parquet"
    table = pq.read_table(path)
    at = table.column_names.index(FRONT)
    huge = bytearray(files.png(files.pictures(0, 0)[0]))
    huge[16:24] = (60000).to_bytes(4, "big") * 2
    huge[29:33] = zlib.crc32(huge[12:29]).to_bytes(4, "big")
    grey = files.png(files.pictures(0, 0)[0][..., 0])
    small = files.png(files.pictures(0, 0)[0][:16])
    bitmap = files.png(files.pictures(0, 0)[0], "BMP")
    for content, says in (
        (bytes(huge), "has more pixels than an image may"),
        (small, "has 16 x 48 pixels of RGB, where 32 x 48 of RGB are declared"),
        (grey, "has 32 x 48 pixels of L"),
        (bitmap, "cannot be read"),
        (None, "is no image in the file itself"),
    ):
        entries = table[FRONT].to_pylist()
        entries[3] = {"bytes": content, "path": "/etc/passwd"}
        pq.write_table(table.set_column(at, FRONT, pa.array(entries, table.schema.field(FRONT).type)), path)
        text = refusal(folder, FRONT)
        assert says in text and f"'{FRONT}' in row 3" in text


def test_a_decoder_that_falls_over(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = processes.launch
    monkeypatch.setattr(lerobot_video.processes, "launch", lambda target: launch("tests.support.lerobot:fall_over"))
    assert "its decoder was killed by SIGABRT: encode the video again" in refusal(two, FRONT)


def test_videos_need_av(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else find(name, *rest))
    assert "pip install 'offrl[video-data]'" in refusal(two, FRONT)
    assert read(two).rows == 18


def test_images_beyond_memory(written: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lerobot_video, "free_bytes", lambda: 50_000.0)
    text = refusal(written["v2.1"], FRONT)
    assert "18 images of 32 x 48 take 82.9 kB" in text and "dataset.image_size=[17,26]" in text
    assert read(written["v2.1"], FRONT, image_size=[17, 26]).streams
    for size in ([0, 4], [8], [5000, 5000]):
        assert "dataset.image_size" in refusal(written["v2.1"], FRONT, image_size=size)


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("v2.1", "data/chunk-000/episode_000000.parquet"),
        ("v2.1", f"videos/chunk-000/{FRONT}/episode_000001.mp4"),
        ("v2.1", "meta/info.json"),
        ("v2.1", "meta/episodes.jsonl"),
        ("v2.1", "meta/tasks.jsonl"),
        ("v3.0", "meta/episodes"),
        ("v3.0", "meta/tasks.parquet"),
    ],
)
def test_a_link_that_leads_out(written: dict[str, Path], tmp_path: Path, version: str, name: str) -> None:
    folder = shutil.copytree(written[version], tmp_path / "arm")
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    assert "is a link that leads out of the data" in refusal(folder, FRONT)


def test_tasks_are_one_line(two: Path) -> None:
    (two / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "\x1b[2Jpick\nno faults found"}) + "\n")
    assert read(two).metadata["tasks"] == {"0": "\\x1b[2Jpick\\nno faults found"}


def test_an_episode_that_is_named_twice(two: Path) -> None:
    path = two / "meta/episodes.jsonl"
    path.write_text(2 * path.read_text())
    assert "names an episode twice in meta" in refusal(two)


# ----------------------------------------------------------------------------------------------------------- writing


def test_a_written_dataset_is_read_again(written: dict[str, Path], tmp_path: Path) -> None:
    keys = ["observation.state", "observation.force", TOP]
    config = DatasetConfig(name=str(written["v3.0"]), observation_keys=keys)
    done = convert(config, str(tmp_path / "out.lerobot"), fps=10)
    assert done.form == "lerobot" and (done.rows, done.episodes) == (18, 3) and "H.264" in done.notes[0]
    before, after = read(written["v3.0"], *keys[:2]), read(done.path, "observation.state", TOP)
    for name in ("observations", "actions", "rewards", "task"):
        assert np.array_equal(after.columns[name], before.columns[name])
    assert after.version == "v3.0" and after.metadata == before.metadata and "no rewards" in after.notes[-1]
    assert after.dimension_names("observations") == before.dimension_names("observations")
    assert np.array_equal(after.episode_ends, before.episode_ends)
    values = after.streams[TOP].values
    assert np.abs(values.astype(int) - np.concatenate([files.pictures(1, e) for e in range(3)])).mean() < 3
    assert np.array_equal(values, decoded(done.path / f"videos/{TOP}/chunk-000/file-000.mp4"))
    pandas = pytest.importorskip("pandas")
    assert pandas.read_parquet(done.path / "meta/tasks.parquet").index.tolist() == list(files.TASKS)
    episodes = pq.read_table(done.path / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert [e["dataset_from_index"] for e in episodes] == [0, 5, 12] and episodes[1]["tasks"] == ["place"]
    assert [e[f"videos/{TOP}/from_timestamp"] for e in episodes] == pytest.approx([0.0, 0.5, 1.2])
    stats = json.loads((done.path / "meta/stats.json").read_text())
    assert stats["action"]["mean"] == pytest.approx(before.columns["actions"].mean(0), rel=1e-5)
    assert np.shape(stats[TOP]["q99"]) == (3, 1, 1) and 0 <= stats[TOP]["min"][0][0][0] <= 1


def test_several_files_and_terminations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_lerobot, "DATA_MB", 1e-3)
    rng = np.random.default_rng(0)
    ends = np.arange(60) % 20 == 19
    columns = {"observations": rng.normal(size=(60, 2)).astype(np.float32), "actions": rng.integers(0, 3, 60)}
    columns |= {"rewards": np.arange(60, dtype=np.float32), "terminations": ends & (np.arange(60) < 30)}
    raw = RawData({**columns, "infos/heat": np.arange(60, dtype=np.float32)}, episode_ends=ends, name="plant")
    path = write_data(raw, tmp_path / "plant.lerobot", "lerobot", fps=29.97)
    assert len(list((path / "data").rglob("*.parquet"))) == 3
    again = read(path, fields={"heat": "infos.heat"})
    for name, values in columns.items():
        assert np.array_equal(again.columns[name], values)
    assert np.array_equal(again.columns["heat"], np.arange(60))
    assert again.metadata["tasks"] == {"0": "plant"} and "next.done" not in " ".join(again.notes)


def test_what_cannot_be_written(written: dict[str, Path], tmp_path: Path) -> None:
    config = DatasetConfig(name=str(written["v2.1"]), observation_keys=["observation.state", FRONT])

    def refused(out: str, config: DatasetConfig = config, **options: Any) -> str:
        with pytest.raises(UserError) as error:
            convert(config, str(tmp_path / out), **options)
        assert not (tmp_path / out).exists()
        return str(error.value)

    assert "fps=30" in refused("a.lerobot")
    assert "HDF5 and Minari are not written with" in refused("a.hdf5")
    raw = RawData({k: np.zeros((9, 2), np.float32) for k in ("observations", "next_observations", "actions")})
    raw.columns |= {"rewards": np.zeros(9, np.float32), "terminations": np.arange(9) == 8}
    raw.columns["next_observations"][4] = 1.0
    raw.episode_ends = np.arange(9) == 8
    with pytest.raises(UserError, match="what follows row 4 is not the next row"):
        write_data(raw, tmp_path / "a.lerobot", "lerobot", fps=10)


# --------------------------------------------------------------------------------------------------------- real data


@pytest.mark.nightly
def test_a_real_part_of_a_dataset() -> None:
    folder = Path(__file__).resolve().parents[3] / "shared/data/lerobot/g1_v21_part"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    camera = "observation.images.cam_high"
    raw = read(folder, "observation.state", camera, episodes="29:32", image_size=[96, 128])
    tables = [pq.read_table(p) for p in sorted((folder / "data/chunk-000").iterdir())]
    state = np.concatenate([np.stack(t["observation.state"].to_numpy()) for t in tables])
    assert np.array_equal(raw.columns["observations"], state) and state.shape == (765, 26)
    assert raw.episode_ends is not None and np.flatnonzero(raw.episode_ends).tolist() == [220, 497, 764]
    plain = decoded(folder / f"videos/chunk-000/{camera}/episode_000030.mp4")
    due = np.stack([np.asarray(Image.fromarray(f).resize((128, 96), Image.Resampling.BOX)) for f in plain])
    assert np.array_equal(raw.streams[camera].values[221:498], due)
    assert "episode_000000.parquet" in refusal(folder)
