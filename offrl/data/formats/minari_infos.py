"""The infos that the episodes of a Minari dataset have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from offrl.data.containers.guard import reading
from offrl.data.containers.hdf5 import checked_links, open_hdf5
from offrl.data.formats.minari_episodes import numbered
from offrl.errors import UserError


def info_leaves(folder: Path) -> list[str]:
    """Paths such as "infos/success" of the numbers that every episode has, in one shape, for each of its steps.

    Those that only some episodes have, and text, are left out.
    """
    path = folder / "main_data.hdf5"
    return _hdf5_infos(path) if path.is_file() else _arrow_infos(folder)


def _hdf5_infos(path: Path) -> list[str]:
    import h5py

    shapes: dict[str, tuple[int, ...]] = {}

    def numbers(key: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset) and item.dtype.kind in "biuf":
            shapes[key] = item.shape[1:]

    with open_hdf5(path) as file:
        checked_links(file)  # also those inside the infos
        for index, name in enumerate(numbered(file, "episode_")):
            if not index and "infos" in file[name]:
                file[name]["infos"].visititems(numbers)
            if not shapes:
                break
            steps, infos = file[name]["rewards"].shape[0], file[name].get("infos", {})
            for key in list(shapes):
                item = infos.get(key)
                if getattr(item, "shape", None) not in ((steps, *shapes[key]), (steps + 1, *shapes[key])):
                    del shapes[key]
    return [f"infos/{key}" for key in shapes]


def _arrow_infos(folder: Path) -> list[str]:
    """The infos that all episodes have, with one type that `info_leaves` can read; lists of uneven lengths are found on
    reading.
    """
    try:
        import pyarrow as pa
        import pyarrow.dataset as ds
    except ImportError:
        raise UserError("this dataset is stored as Arrow: pip install pyarrow") from None

    common: dict[str, Any] | None = None
    for episode in (p for p in folder.iterdir() if p.is_dir()):
        files = sorted(p for p in episode.iterdir() if p.suffix in (".arrow", ".parquet"))
        if not files:
            raise UserError(f"{episode} has no .arrow or .parquet file; the dataset is incomplete")
        with reading(files[0]):
            schema = ds.dataset(str(files[0]), format=files[0].suffix[1:]).schema
        types: dict[str, Any] = {}

        def add(key: str, kind: Any) -> None:
            if pa.types.is_struct(kind):
                for field in kind:
                    add(f"{key}/{field.name}", field.type)
                return
            inner = kind
            while pa.types.is_fixed_size_list(inner) or pa.types.is_list(inner):
                inner = inner.value_type
            if pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner):
                types[key] = kind  # noqa: B023 (called at once)

        if "infos" in schema.names:
            add("infos", schema.field("infos").type)
        common = types if common is None else {k: v for k, v in common.items() if types.get(k) == v}
        if not common:
            break
    return list(common or {})
