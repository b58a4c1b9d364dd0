"""Text data as JSON lines or as a Minari dataset. Written beside the target, read back, compared, and only then put
into place.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.formats import minari
from offrl.data.text import minari as minari_text
from offrl.data.text.dataset import fingerprint, to_episodes, used_strings
from offrl.data.text.files import header, load, task_words
from offrl.data.writing import write_minari as minari_layout
from offrl.data.writing.output_path import atomic_output, output_path
from offrl.data.writing.write import Progress, add_namespaces, refuse_difference
from offrl.errors import UserError, warn
from offrl.settings.dataset import DatasetConfig


def write_text(
    dataset: Dataset,
    target: str | Path,
    form: str = "jsonl",
    metadata: Mapping[str, Any] | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Write a text dataset to `target`, and return the path of the file, or of the Minari dataset's folder.

    form: "jsonl" for a path that ends in .jsonl or .jsonl.gz: a header line, then an episode a line; "minari" for an id
    or a folder. metadata: what to say of the data besides (JSON), such as author and description; Minari keeps all of
    it, a file its history. Rewards are those of the columns. Raises UserError when the data hold no texts, `target`
    does not fit or exists, the data cannot be kept there, or what is read back differs.
    """
    if not dataset.spec.text:
        raise UserError(f"{dataset.spec.name} holds numbers; JSON lines and Minari's Text spaces hold texts")
    metadata = dict(metadata or {})
    path, data_id = output_path(target, form, str(metadata.get("dataset_id") or ""), force)
    config = DatasetConfig(name=str(path))

    def advance(count: int) -> None:
        if progress is not None:
            progress(min(1.0, count / dataset.num_episodes))

    with atomic_output(path) as written:
        if form == "jsonl":
            _write_lines(written, dataset, metadata, advance)
            reread = load(written, config)
        else:
            _write_minari(written, data_id, dataset, metadata, advance)
            reread = minari_text.load(written, config)
        contents = [
            (fingerprint(d), d.spec.task and task_words(d.spec.task), [e["meta"] for e in to_episodes(d)])
            for d in (dataset, reread.dataset)
        ]
        same = {name: a == b for name, a, b in zip(("turns", "task", "meta"), *contents, strict=True)}
        refuse_difference(same, path)
    if form == "minari":
        add_namespaces(path, data_id)
    return path


def _write_lines(path: Path, dataset: Dataset, metadata: dict[str, Any], advance: Callable[[int], None]) -> None:
    provenance = {k: metadata[k] for k in ("description", "history", "combined_datasets") if metadata.get(k)}
    with path.open("wb") as raw:
        # no time and no name in it: the same data make the same file
        packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if path.name.lower().endswith(".gz") else None
        with io.TextIOWrapper(packed or raw, encoding="utf-8", newline="\n") as file:
            file.write(json.dumps(header(dataset, provenance), ensure_ascii=False) + "\n")
            for number, episode in enumerate(to_episodes(dataset), 1):
                entry = {k: v for k, v in episode.items() if k != "meta" or v}
                file.write(json.dumps(entry, ensure_ascii=False, allow_nan=False) + "\n")
                advance(number)


def _write_minari(
    folder: Path, data_id: str, dataset: Dataset, metadata: dict[str, Any], advance: Callable[[int], None]
) -> None:
    """Minari's HDF5 layout. Where the final observation is not known the last one stands there twice; what offrl
    records says so.
    """
    from gymnasium.spaces import Text

    name = dataset.spec.name
    if any("\0" in text for text in dataset.strings):
        raise UserError(f"{name}: a text has a zero character, which HDF5 cannot keep; write JSON lines (.jsonl)")

    def space(columns: tuple[str, ...]) -> Text:
        texts = [dataset.strings[k] for k in used_strings(dataset, columns)]
        letters = "".join(sorted({letter for text in texts for letter in text}))
        return Text(max(1, *map(len, texts), 1), min_length=0, charset=letters or "a")

    task = dataset.spec.task
    meta = {k: v for k, v in metadata.items() if k not in (*minari.NOT_ABOUT, "env_spec")}
    meta.setdefault("description", f"{name or 'texts'}, written by offrl")
    meta |= minari_layout.task_metadata(task, False, lambda text: warn(f"{name}: {text}"))
    known = dataset.columns["successor_known"][dataset.episode_end - 1]
    record: dict[str, Any] = {
        "version": 1,
        "episodes": dataset.num_episodes,
        "turns": len(dataset),
        "task": None if task is None else task_words(task),
        "unknown": (~known).nonzero()[:, 0].tolist(),
    }
    if "meta" in dataset.columns:
        numbers = dataset.columns["meta"][dataset.episode_start].tolist()
        record["metas"] = [json.loads(dataset.metas[k]) for k in numbers]
    meta[minari.RECORD] = {minari_text.RECORD: record}
    spaces = space(("observations", "next_observations")), space(("actions",))
    episodes = _episodes(dataset, advance)
    minari_layout.write_dataset(folder, data_id, spaces, episodes, len(dataset), dataset.num_episodes, meta)


def _episodes(dataset: Dataset, advance: Callable[[int], None]) -> Iterator[dict[str, Any]]:
    import h5py

    kind = h5py.string_dtype("utf-8")
    for number, episode in enumerate(to_episodes(dataset), 1):
        turns = episode["turns"]
        last = turns[-1]["obs"] if episode["final_obs"] is None else episode["final_obs"]
        ends = np.zeros((2, len(turns)), bool)
        ends[:, -1] = episode["terminated"], episode["truncated"]
        yield {
            "observations": np.array([*(t["obs"] for t in turns), last], dtype=kind),
            "actions": np.array([t["action"] for t in turns], dtype=kind),
            "rewards": np.array([t["reward"] for t in turns], np.float32),
            "terminations": ends[0],
            "truncations": ends[1],
            "infos": {},
        }
        advance(number)
