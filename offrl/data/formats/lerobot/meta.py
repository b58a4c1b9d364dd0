"""What a LeRobot dataset says of itself: its features, its episodes, and the files that they are in."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypedDict

from offrl.data.containers.guard import FREE, from_json, reading
from offrl.data.containers.parquet import arrow_values, open_parquet, read_columns
from offrl.data.containers.plain_files import refuse_link, refuse_special
from offrl.data.containers.video import EDGE, PIXELS
from offrl.data.raw.ranges import numbers_of
from offrl.errors import UserError, one_line, some
from offrl.settings.kinds import misfit

INFO = Path("meta") / "info.json"
VERSIONS = ("v2.0", "v2.1", "v3.0")  # v2.0 differs from v2.1 in its statistics, which are not read
POINTER = b"version https://git-lfs"


class _Feature(TypedDict):
    dtype: str
    shape: list[int]


class _Info(TypedDict):
    codebase_version: str
    fps: float
    data_path: str
    features: dict[str, _Feature]


class _Line(TypedDict):
    episode_index: int
    length: int


class _Task(TypedDict):
    task_index: int
    task: str


@dataclass(frozen=True)
class Feature:
    """A column of the data, or the images of a camera."""

    name: str
    dtype: str  # image | video | a type of numbers; depth, language, string and others are not read
    shape: tuple[int, ...]  # of a row; of images [H, W, C]
    names: tuple[str, ...] = ()  # of its dimensions; () where there are none

    @property
    def image(self) -> bool:
        return self.dtype in ("image", "video")

    @property
    def numeric(self) -> bool:
        return re.fullmatch(r"bool|u?int\d+|float\d+", self.dtype) is not None


@dataclass(frozen=True)
class EpisodeFiles:
    """An episode's place in the files."""

    number: int
    length: int
    data: Path
    videos: dict[str, tuple[Path, float]]  # of each camera: the file, and when the episode begins there, in seconds


@dataclass(frozen=True)
class LerobotMetadata:
    """The dataset in the folder `root`."""

    root: Path
    version: str
    features: dict[str, Feature]
    info: dict[str, Any]

    def tasks(self) -> dict[int, str]:
        """The texts of the tasks by their numbers; {} where there are none."""
        if self.version == "v3.0":
            path = self.root / "meta" / "tasks.parquet"
            if not path.is_file():
                return {}
            refuse_link(path, self.root)
            with reading(path):
                table = read_columns(open_parquet(path), path)
                texts = next(n for n in ("task", "__index_level_0__") if n in table.column_names)
                lines = zip(table["task_index"].to_pylist(), table[texts].to_pylist(), strict=True)
                return {int(number): one_line(str(text)) for number, text in lines}
        path = self.root / "meta" / "tasks.jsonl"
        return {v["task_index"]: one_line(v["task"]) for v in _lines(path, _Task)} if path.is_file() else {}

    def episodes(self, chosen: str, videos: Sequence[str]) -> list[EpisodeFiles]:
        """The episodes that dataset.episodes names (see `numbers_of`; "": all), with the files of the cameras
        `videos`. Raises UserError for the first file that is not there.
        """
        with reading(self.root / "meta"):
            rows = list(self._joined(videos) if self.version == "v3.0" else self._single(videos))
        known = {number: (number, *row) for number, *row in sorted(rows, key=lambda row: row[0])}
        if not known or len(known) < len(rows):
            fault = "an episode twice" if known else "no episode"
            raise UserError(f"{self.root} names {fault} in meta; the dataset is damaged: get it again")
        numbers = list(known)
        if chosen:
            numbers = [numbers[k] for k in sorted(numbers_of(chosen, len(known), "dataset.episodes", str(self.root)))]
        episodes = [EpisodeFiles(*known[number]) for number in numbers]
        missing = {p: None for e in episodes for p in (e.data, *(v for v, _ in e.videos.values())) if not p.is_file()}
        if missing:
            self._refuse(missing, episodes)
        for path in {p: None for e in episodes for p in (e.data, *(v for v, _ in e.videos.values()))}:
            refuse_special(path)
            refuse_link(path, self.root)
            with path.open("rb") as file:
                if file.read(len(POINTER)) == POINTER:
                    raise UserError(f"{path} is a pointer of Git LFS, not the file itself: run `git lfs pull` there")
        return episodes

    def _refuse(self, missing: dict[Path, None], episodes: Sequence[EpisodeFiles]) -> None:
        """Raises UserError for files that are not there."""
        present = [e.number for e in episodes if not {e.data, *(v for v, _ in e.videos.values())} & missing.keys()]
        cure = "get it"
        if present:
            run = sum(1 for _ in takewhile(lambda pair: pair[1] == present[0] + pair[0], enumerate(present)))
            cure += f", or name episodes that are there: dataset.episodes={present[0]}:{present[0] + run}"
        more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
        raise UserError(f"{next(iter(missing))}{more} is missing: {cure}")

    def _single(self, videos: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """v2: a file for each episode."""
        for line in _lines(self.root / "meta" / "episodes.jsonl", _Line):
            number = line["episode_index"]
            keys = {"episode_index": number, "episode_chunk": number // max(1, int(self.info.get("chunks_size", 1000)))}
            clips = {v: (self._path("video_path", video_key=v, **keys), 0.0) for v in videos}
            yield number, line["length"], self._path("data_path", **keys), clips

    def _joined(self, videos: Sequence[str]) -> Iterator[tuple[Any, ...]]:
        """v3: several episodes in a file."""
        folder = self.root / "meta" / "episodes"
        for path in sorted(folder.rglob("*.parquet")):
            refuse_link(path, self.root)
            names = ["episode_index", "length", "data/chunk_index", "data/file_index"]
            parts = ("chunk_index", "file_index", "from_timestamp")
            names += [f"videos/{v}/{part}" for v in videos for part in parts]
            table = read_columns(open_parquet(path), path, names)
            lists = {n: arrow_values(table[n], f"{path}: '{n}'").tolist() for n in names}
            for k, number in enumerate(lists["episode_index"]):
                clips = {}
                for v in videos:
                    chunk, index, begin = (lists[f"videos/{v}/{part}"][k] for part in parts)
                    clips[v] = (
                        self._path("video_path", video_key=v, chunk_index=chunk, file_index=index),
                        float(begin),
                    )
                chunk, index = lists["data/chunk_index"][k], lists["data/file_index"][k]
                data = self._path("data_path", chunk_index=chunk, file_index=index)
                yield number, lists["length"][k], data, clips

    def _path(self, template: str, **values: Any) -> Path:
        """A file by the template in info.json. Raises UserError for a path that leads out of the folder."""
        text, where = str(self.info.get(template)), f"{self.root / INFO}: '{template}'"

        def value(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise UserError(f"{where} is {text}, whose {match[0]} is none of {', '.join(values)}")
            return str(values[match[1]]).zfill(int(match[2] or 0))

        path = Path(re.sub(r"\{(\w+)(?::0?(\d{1,2})d)?\}", value, text))  # no attribute, no width without end
        if path.is_absolute() or ".." in path.parts:
            raise UserError(f"{where} is {text}, which leads out of the folder; the data are damaged, or made to")
        return self.root / path


def load(root: Path) -> LerobotMetadata:
    """The metadata of the dataset in the folder `root`. Raises UserError."""
    path = root / INFO
    if not path.is_file():
        raise UserError(
            f"{root} holds no LeRobot dataset (no {INFO}); name the folder that holds meta, data and videos"
        )
    with reading(path):
        info = from_json(_text(path))
        version = str(info.get("codebase_version"))[:20] if isinstance(info, dict) else "none"
    if version not in VERSIONS:
        old = version.startswith(("v0", "v1"))
        cure = "convert it with lerobot's scripts" if old else "write it with lerobot 0.4"
        raise UserError(
            f"{path}: codebase_version is {one_line(version)}; {', '.join(VERSIONS)} are read: {cure}, or install a "
            "newer offrl"
        )
    if wrong := misfit(info, _Info, "", complete=True):
        raise UserError(f"{path} is damaged: {wrong}")
    if not 0 < info["fps"] < math.inf:
        raise UserError(f"{path}: fps is {info['fps']}, where frames per second are due; correct it")
    return LerobotMetadata(root, version, {k: _feature(k, v, path) for k, v in info["features"].items()}, info)


def _feature(name: str, values: dict[str, Any], path: Path) -> Feature:
    dtype, shape, names = values["dtype"], tuple(values["shape"]), values.get("names")
    details = [d for d in (values, values.get("info"), values.get("video_info")) if isinstance(d, dict)]
    if any(d.get(k) for d in details for k in ("video.is_depth_map", "is_depth_map")):
        dtype = "depth"
    feature = Feature(name, dtype, shape)
    if feature.image:
        if len(shape) == 3 and shape[2] not in (1, 3) and shape[0] in (1, 3):
            shape = (*shape[1:], shape[0])
        if len(shape) != 3 or shape[2] not in (1, 3) or min(shape) < 1:
            raise UserError(f"{path}: '{name}' has shape {list(shape)}, and images [height, width, 3] are due")
        if max(shape) > EDGE or math.prod(shape[:2]) > PIXELS:
            raise UserError(f"{path}: '{name}' has {shape[0]} x {shape[1]} pixels; at most {EDGE} an edge are read")
        return Feature(name, dtype, shape)
    if min(shape, default=1) < 1 or math.prod(shape) > FREE:
        raise UserError(f"{path}: '{name}' has shape {list(shape)}; correct it")
    while isinstance(names, dict) or (isinstance(names, list) and len(names) == 1 and isinstance(names[0], list)):
        names = names[0] if isinstance(names, list) else [n for v in names.values() for n in _listed(v)]
    if not isinstance(names, list) or len(names) != math.prod(shape):
        names = []
    return Feature(name, dtype, shape, tuple(one_line(str(n)) for n in names))


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(path: Path) -> str:
    """A file of the folder meta."""
    refuse_link(path, path.parents[1])
    refuse_special(path)
    if (size := path.stat().st_size) > FREE:
        raise UserError(f"{path} has {size:,} bytes, which no metadata have")
    return path.read_text(encoding="utf-8")


def _lines(path: Path, kind: Any) -> Iterator[dict[str, Any]]:
    """The lines of JSON in a file. Raises UserError, naming the line."""
    with reading(path):
        for number, line in enumerate(_text(path).splitlines(), 1):
            value = from_json(line)
            if wrong := misfit(value, kind, "", complete=True):
                raise UserError(f"{path}, line {number}: {wrong}")
            yield value


def files(path: Path) -> list[Path]:
    """All files of the dataset in the folder `path`, less those of folders such as .git and .cache."""
    paths = []
    for base, folders, names in os.walk(path):
        folders[:] = sorted(f for f in folders if not f.startswith("."))
        paths += [Path(base) / name for name in sorted(names)]
    return [p for p in paths if p.is_file()]


def is_lerobot(path: Path) -> bool:
    """Whether the folder `path` holds a LeRobot dataset."""
    return (path / INFO).is_file()


def listed(features: dict[str, Feature]) -> str:
    """What there is, for messages."""
    return some((f"{f.name} ({f.dtype})" for f in features.values()), 12)
