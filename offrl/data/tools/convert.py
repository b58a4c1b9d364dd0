"""Making datasets from datasets: another layout, several as one, a part of one. What is written is `write_data`'s,
checked by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

from offrl.data.containers.file_type import file_type
from offrl.data.containers.guard import reading
from offrl.data.containers.hdf5 import hdf5_keys, open_hdf5
from offrl.data.containers.npz import Npz
from offrl.data.formats import d4rl as d4rl_source
from offrl.data.formats import minari as minari_source
from offrl.data.formats.minari_infos import info_leaves
from offrl.data.formats.minari_spaces import load_metadata
from offrl.data.formats.provenance import INFOS, extra_columns
from offrl.data.loading.assemble import identity
from offrl.data.loading.read import read_raw
from offrl.data.loading.resolve import Source, resolve
from offrl.data.memory import Memory, chunks, memory_budget
from offrl.data.raw import CORE, RawData
from offrl.data.raw.checks import find_faults, form_faults, refuse
from offrl.data.raw.infer import action_range, find_ends
from offrl.data.tables.csv_file import is_csv
from offrl.data.tables.mapping import choose
from offrl.data.tables.names import USUAL, meaning
from offrl.data.text import tools as text_tools
from offrl.data.text.dataset import fingerprint as text_fingerprint
from offrl.data.text.files import TextFile
from offrl.data.text.write import write_text
from offrl.data.tools.merge import join
from offrl.data.tools.subset import Choice, settle, take
from offrl.data.writing.output_path import D4RL_SUFFIX, LEROBOT_SUFFIX, TEXT_SUFFIX, output_path
from offrl.data.writing.pixels import with_pixels
from offrl.data.writing.write import Progress, write_data
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.system.files import cache_dir

FORMS = ("auto", "d4rl", "minari", "jsonl", "lerobot")


@dataclass(frozen=True)
class Written:
    """The dataset that a tool wrote, verified by reading it back."""

    path: Path
    form: str  # d4rl | minari | jsonl | lerobot
    rows: int
    episodes: int
    fingerprint: str  # that `load_dataset` gives it
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Output:
    """Where a tool writes, and how."""

    target: str
    form: str  # d4rl | minari | jsonl | lerobot
    force: bool
    progress: Progress | None
    fps: float | None = None  # of LeRobot data


def convert(
    config: DatasetConfig,
    out: str,
    form: str = "auto",
    *,
    force: bool = False,
    progress: Progress | None = None,
    fps: float | None = None,
    change: Callable[[RawData, Memory], str] = lambda raw, memory: "converted from",
) -> Written:
    """Write the dataset `config` to `out` as D4RL HDF5, as a Minari or LeRobot dataset, or texts as JSON lines.

    What offrl loads is the same, bit for bit; of LeRobot data the columns are, which hold less.

    form: "auto" takes d4rl for a path that ends in .hdf5 or .h5, jsonl (texts only) for .jsonl and .jsonl.gz, lerobot
    for .lerobot, which needs `fps`, rows per second, else minari. change: adds columns, and says what was done.

    Raises UserError for faulty data (unless `config.check` is off), for settings that change the data when they are
    loaded, and for what `write_data` and `write_text` refuse.
    """
    output = _output(out, form, force, progress, fps)
    if (texts := _texts(config)) is not None:
        return _write_texts(texts, output, [f"converted from {text_tools.origin(texts.dataset, config.name)}"])
    with _memory(config) as memory:
        raw = read_whole(config, memory, output.form == "lerobot")
        check(raw, config)
        return _write(raw, output, [f"{change(raw, memory)} {_origin(raw, memory)}"], memory)


def subset(
    config: DatasetConfig,
    out: str,
    choice: Choice,
    form: str = "auto",
    *,
    force: bool = False,
    progress: Progress | None = None,
    fps: float | None = None,
) -> Written:
    """Write the part of the dataset `config` that `choice` names, as `convert` does.

    Actions keep the range of the whole. Faults are looked for in what is kept. Raises UserError where nothing is left.
    """
    output = _output(out, form, force, progress, fps)
    if (texts := _texts(config, choice.drop_faulty)) is not None:
        selection, description = text_tools.take(texts, choice, config.name)
        origin = text_tools.origin(texts.dataset, config.name)
        return _write_texts(selection, output, [f"{description} of {origin}"])
    with _memory(config) as memory:
        raw = read_whole(config, memory)
        refuse(raw, form_faults(raw), config.check)
        settle(raw)
        part, description = take(raw, choice, memory, config)
        part.path = f"{raw.where} ({description})"
        check(part, config)
        return _write(part, output, [f"{description} of {_origin(raw, memory)}"], memory)


def merge(
    configs: Sequence[DatasetConfig],
    out: str,
    form: str = "auto",
    *,
    force: bool = False,
    progress: Progress | None = None,
    fps: float | None = None,
) -> Written:
    """Write several datasets of the same spaces as one, in the given order.

    The column infos/source says which of them (0, 1, ...) a row comes from, and the metadata name them. Raises
    UserError where shapes, kinds or ranges of actions, or environments differ.
    """
    if len(configs) < 2:
        raise UserError("offrl data merge needs two datasets at least, and the name of the new one")
    output = _output(out, form, force, progress, fps)
    read = [_texts(config) for config in configs]
    if any(t is not None for t in read):
        return _merge_texts(read, configs, output)
    with _memory(configs[0]) as memory:
        parts = []
        for config in configs:
            parts.append(read_whole(config, memory))
            check(parts[-1], config)
            settle(parts[-1])
        raw, notes = join(parts, memory)
        return _write(raw, output, [f"merged from {_origin(p, memory)}" for p in parts], memory, notes)


# ----------------------------------------------------------------------------------------------------------------
# reading


def read_whole(config: DatasetConfig, memory: Memory, streams: bool = False) -> RawData:
    """All columns of a dataset, also those that `load_dataset` leaves out: they are named infos/... here. streams: what
    is written may hold several.

    Raises UserError for settings that change data on loading.
    """
    _refuse_transforms(config)
    source = resolve(config.name, config)
    with reading(source.path):
        extra_fields = _other_columns(source, config)
    raw = read_raw(config.name, replace(config, fields={**extra_fields, **config.fields}), memory, source)
    return raw if streams else with_pixels(raw, memory)


def _refuse_transforms(config: DatasetConfig) -> None:
    if changed := config.changed(DatasetConfig.CHANGES):
        raise UserError(
            f"dataset.{changed[0]} is for loading data, not for making datasets; leave it out (offrl data subset keeps "
            "parts)"
        )


def _texts(config: DatasetConfig, faults: bool = False) -> TextFile | None:
    """The texts that `config` names, or None where it names data of numbers."""
    _refuse_transforms(config)
    return text_tools.read(config, faults)


def _other_columns(source: Source, config: DatasetConfig) -> dict[str, str]:
    """Column -> key for what the source's file holds besides what is loaded, with a row for each step."""
    if source.path is None or source.files or source.kind == "lerobot" or is_csv(source.path):
        return {}
    taken = {*map(str, config.fields.values()), *CORE, "terminals", "timeouts", "final_observations"}
    if source.kind == "minari":
        folder = minari_source.data_folder(source.path)
        assert folder is not None
        metadata = load_metadata(folder)
        record = minari_source.record_of(metadata.values, folder)
        if record is not None:  # what offrl wrote itself comes back under its own name
            taken |= {INFOS + column for column in extra_columns(record)}
        elif "costs" not in config.fields:
            taken |= {INFOS + name for name in USUAL["costs"]}
        return {key: key for key in info_leaves(folder, metadata.format) if key not in taken}
    shapes: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
    kind, columns = file_type(source.path), source.kind in ("columns", "d4rl", "builtin")
    if kind == "npz":
        shapes = {k: (tuple(s), d) for k, (s, d) in Npz(source.path).shapes.items()}
    elif kind == "hdf5" and source.kind != "d3rlpy":
        with open_hdf5(source.path) as file:
            items = hdf5_keys(file)
            record = d4rl_source.record_of(items, source.path) if source.kind in ("d4rl", "builtin") else None
            taken |= set(record.columns) if record else set()
            columns = columns and record is None
            shapes = {
                k: (tuple(item.shape or ()), item.dtype) for k, item in items.items() if not k.startswith("metadata/")
            }
    if columns:  # whose names are usual ones
        chosen = choose([k for k, (s, _) in shapes.items() if s], config.fields, str(source.path), CORE)
        taken |= {part.column for parts in chosen.values() for part in parts}
        rows = shapes[chosen["observations"][0].column][0][:1]
    else:
        rows = shapes.get(str(config.fields.get("observations", "observations")), ((0,), None))[0][:1]
    remaining = {k: d for k, (s, d) in shapes.items() if k not in taken and s and s[:1] == rows}
    extra = [k for k, d in remaining.items() if d.kind in "biuf" and meaning(k) in ("", "costs")]
    return {k if k.startswith(INFOS) else INFOS + k: k for k in extra}


@contextmanager
def _memory(config: DatasetConfig) -> Iterator[Memory]:
    """Storage of columns: in memory up to a limit, then in files under the cache, which are deleted at the end."""
    limit = config.memory_limit_gb * 1e9 if config.memory_limit_gb else memory_budget()
    memory = Memory(-1.0 if config.memory == "mmap" else limit, cache_dir(config.cache_dir) / "mapped")
    try:
        yield memory
    finally:
        memory.discard()


def check(raw: RawData, config: DatasetConfig) -> None:
    """Refuse faulty data with the message of `load_dataset` (with `config.check`), warn of the rest; clip actions if
    asked to.
    """
    refuse(raw, find_faults(raw, clip_actions=config.clip_actions), config.check)
    for text in raw.notes:
        raw.warn(text)
    if config.clip_actions and not raw.discrete:
        low, high = action_range(raw)
        actions = raw.columns["actions"]
        for part in chunks(raw.rows):
            np.clip(actions[part], low, high, out=actions[part])


# ----------------------------------------------------------------------------------------------------------------
# writing


def _origin(raw: RawData, memory: Memory) -> str:
    """The description of a dataset, for the history in the new one."""
    return f"{raw.where} ({raw.source}, {raw.rows} rows, fingerprint {_fingerprint(raw, memory)[:16]})"


def _fingerprint(raw: RawData, memory: Memory) -> str:
    """The fingerprint of the `Dataset` that `load_dataset` makes of these columns."""
    loaded = replace(raw, columns={k: v for k, v in raw.columns.items() if not k.startswith(INFOS)}, notes=[])
    return identity(loaded, find_ends(raw), memory)


def _output(out: str, form: str, force: bool, progress: Progress | None, fps: float | None) -> _Output:
    """Where to write, in the format that `form` means for `out`. Raises UserError at once where nothing could be."""
    if form not in FORMS:
        raise UserError(f"format={form} is not allowed; choose one of {', '.join(FORMS)}")
    if form == "auto":
        name = Path(out).name.lower()
        suffixes = {"d4rl": D4RL_SUFFIX, "jsonl": TEXT_SUFFIX, "lerobot": LEROBOT_SUFFIX}
        form = next((f for f, suffix in suffixes.items() if name.endswith(suffix)), "minari")
    output_path(out, form, force=force)
    return _Output(out, form, force, progress, fps)


def _maker() -> str:
    try:
        return f"offrl {version('offrl')}"
    except PackageNotFoundError:
        return "offrl"


def _write_texts(texts: TextFile, output: _Output, steps: list[str], notes: Sequence[str] = ()) -> Written:
    layout = {"d4rl": "D4RL's", "lerobot": "LeRobot's"}.get(output.form)
    if layout is not None:
        raise UserError(
            f"{output.target}: {layout} layout holds numbers, and the data are texts: write JSON lines (.jsonl) or a "
            "Minari dataset"
        )
    dataset, history = texts.dataset, [*texts.metadata.get("history", []), *(f"{step}; {_maker()}" for step in steps)]
    options = {k: v for k, v in vars(output).items() if k != "fps"}
    path = write_text(dataset, **options, metadata=texts.metadata | {"history": history})
    left_out = [f"left out: {fault}" for fault in texts.faults]
    return Written(
        path, output.form, len(dataset), dataset.num_episodes, text_fingerprint(dataset), (*notes, *left_out)
    )


def _merge_texts(read: Sequence[TextFile | None], configs: Sequence[DatasetConfig], output: _Output) -> Written:
    names = [config.name for config in configs]
    texts = [t for t in read if t is not None]
    if len(texts) < len(read):
        numbers = names[next(k for k, t in enumerate(read) if t is None)]
        raise UserError(
            f"cannot merge data of numbers and of texts: {numbers} holds numbers, {texts[0].dataset.spec.name} texts"
        )
    merged, notes = text_tools.join(texts, names)
    steps = [f"merged from {text_tools.origin(t.dataset, c.name)}" for t, c in zip(texts, configs, strict=True)]
    return _write_texts(merged, output, steps, notes)


def _write(raw: RawData, output: _Output, steps: list[str], memory: Memory, notes: Sequence[str] = ()) -> Written:
    raw.metadata = {k: v for k, v in raw.metadata.items() if k != "description" or "converted" in steps[0]}
    history = [*raw.metadata.get("history", []), *(f"{step}; {_maker()}" for step in steps), *raw.notes]
    path = write_data(raw, **vars(output), metadata={"history": history}, memory=memory)
    ends = find_ends(raw)
    result = raw
    if output.form == "lerobot":
        result = read_raw(str(path))
        lossy = "; images are coded as H.264, which changes pixels a little" if raw.streams else ""
        left_out = "not kept: what followed each episode's last row, the range of the actions, the environment"
        notes = [*notes, left_out + lossy]
    return Written(path, output.form, raw.rows, int(ends.sum()), _fingerprint(result, memory), tuple(notes))
