"""Types of files by their first bytes, and the refusal of those that may run code when they are read."""

from __future__ import annotations

import gzip
import zipfile
from pathlib import Path

import numpy as np

from offrl.data.containers.plain_files import refuse_special
from offrl.errors import UserError

_MAGIC = {b"\x89HDF\r\n\x1a\n": "hdf5", b"PK\x03\x04": "npz", b"PK\x05\x06": "npz", b"PAR1": "parquet"}


def file_type(path: Path) -> str:
    """hdf5 | npz | parquet, from the first bytes. Raises UserError for an empty file or another type."""
    refuse_special(path)
    try:
        with path.open("rb") as file:
            head = file.read(8)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not head:
        raise UserError(f"{path} is empty (0 bytes): download or copy it again")
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            if kind == "npz" and pickled(path):
                raise UserError(
                    f"{path} is a file of PyTorch, a pickle, which may run code when it is read, and is refused on "
                    "purpose. Where you trust it, torch.load(FILE, weights_only=True) reads its tensors, numpy.savez "
                    "writes them (docs/datasets.md#pickles)"
                )
            return kind
    if head.startswith(b"\x93NUMPY"):
        if _objects(path):
            raise UserError(
                f"{path} holds Python objects, a pickle, which may run code and is not read; where you trust it, write "
                "its arrays with numpy.savez and give that file (docs/language-labels.md has the lines)"
            )
        raise UserError(f"{path} is a single .npy array; save all columns with numpy.savez and give that file")
    if pickled(path):
        raise UserError(
            f"{path} is a pickle, which may run code when it is read, and is refused on purpose. Where you trust it, "
            f"three lines of Python make an npz file of a list of episodes: p = pickle.load(open({path.name!r}, "
            "'rb')); ids = numpy.repeat(range(len(p)), [len(e['rewards']) for e in p]); "
            f"numpy.savez({path.name.partition('.')[0] + '.npz'!r}, episode_ids=ids, **{{k: numpy.concatenate([e[k] "
            f"for e in p]) for k in p[0]}}) (docs/datasets.md#pickles: other layouts)"
        )
    raise UserError(
        f"{path} is neither HDF5 nor npz nor Parquet (it starts with {head!r}); it may be damaged or an error page "
        "(the name of a CSV file ends in .csv or .csv.gz)"
    )


def pickled(path: Path) -> bool:
    """Whether a file is a pickle by its first bytes (of protocol 0 and 1 by its name), maybe packed, or PyTorch's zip
    around one.
    """
    try:
        with path.open("rb") as file:
            head = file.read(9)
        if head.startswith(b"\x1f\x8b"):
            with gzip.open(path) as packed:
                head = packed.read(9)
        if head.startswith(b"PK\x03\x04"):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            return any(n.endswith((".pkl", ".pickle", ".pth")) for n in names) and not any(
                n.endswith(".npy") for n in names
            )
    except Exception:  # of damaged ones, which their reader names
        return False
    if len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5:
        return head[2:] != b"\0\0\0\0\0\0{"  # as a safetensors file may begin, with the length of its header
    return path.name.lower().endswith((".pkl", ".pickle", ".pkl.gz")) and bool(head) and head[:1] in b"(cdli}]"


def _objects(path: Path) -> bool:
    """True where a .npy file holds Python objects, by its header."""
    try:
        return bool(np.load(path, mmap_mode="r", allow_pickle=False).dtype.hasobject)
    except ValueError:  # NumPy maps no objects
        return True
    except OSError:
        return False
