"""Changes of a written npz file: its members, their headers, the list of members."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from pathlib import Path

import numpy as np

from tests.fuzz.drafts import Rng

FORMS = (
    "twice",
    "above",
    "pickle",
    "header",
    "header",
    "header",
    "flip",
    "flip",
    "cut",
    "crc",
    "size",
    "bomb",
    "stranger",
    "encrypted",
    "method",
)


def change(path: Path, rng: Rng) -> str:
    """Change something in the archive at `path`; what."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    packed = bool(rng.random() < 0.5)
    if not members:
        return "as it was"
    name = str(rng.choice(sorted(members)))
    form = str(rng.choice(FORMS))
    more: list[tuple[str, bytes]] = []
    if form == "twice":
        more = [(name, _npy(np.zeros(3, np.float32)))]
    elif form == "above":
        more = [("../../outside.npy", members[name]), ("/tmp/outside.npy", members[name])]
    elif form == "pickle":
        members[name] = _npy(np.array([{"x": 1}, None], object))
    elif form == "stranger":
        more = [("readme.txt", b"hello"), ("broken.npy", b"\x93NUMPY\x01"), ("empty.npy", b"")]
    elif form == "header":
        members[name], what = _header(members[name], rng)
        form = f"header: {what}"
    elif form == "cut":
        members[name] = members[name][: int(rng.integers(len(members[name]) + 1))]
    if form == "bomb":
        _bomb(path, members, name)
        return f"{name}: packed zeros of gigabytes"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        for key, data in [*members.items(), *more]:
            archive.writestr(zipfile.ZipInfo(key), data, zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED)
        info = archive.getinfo(name)
    data = bytearray(path.read_bytes())
    start = info.header_offset + 30 + len(name.encode())
    if form == "flip":
        for _ in range(int(rng.integers(1, 4))):
            data[start + int(rng.integers(max(info.compress_size, 1)))] ^= 1 << int(rng.integers(8))
    entry = data.rfind(b"PK\x01\x02", 0, data.rfind(name.encode()))
    field = {"crc": (16, 0x12345678), "size": (24, 0x7FFFFFF0), "encrypted": (8, 1), "method": (10, 99)}.get(form)
    if field is not None:
        wide = form in ("crc", "size")
        struct.pack_into("<I" if wide else "<H", data, entry + field[0], field[1])
        if form == "size" and rng.random() < 0.5:
            struct.pack_into("<I", data, entry + 20, field[1])
    path.write_bytes(bytes(data))
    return f"{name}: {form}"


def _npy(values: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, values, allow_pickle=True)
    return file.getvalue()


def _header(data: bytes, rng: Rng) -> tuple[bytes, str]:
    """Another header before the same numbers."""
    values = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    shape, descr, order = values.shape, values.dtype.str, "False"
    body = values.tobytes()
    form = str(
        rng.choice(
            [
                "more rows",
                "huge",
                "overflow",
                "fewer rows",
                "negative",
                "fortran",
                "object",
                "no type",
                "text",
                "no dictionary",
                "version",
                "wide",
            ]
        )
    )
    texts = {
        "more rows": (shape[:1] and (shape[0] + 5, *shape[1:])),
        "huge": (10**9, *shape[1:]),
        "overflow": (2**62, 2**62),
        "fewer rows": (max(shape[0] - 2, 0), *shape[1:]) if shape else (),
        "negative": (-5, *shape[1:]),
        "wide": (*shape, 10**6),
    }
    text = str(texts.get(form, shape))
    if form == "fortran":
        order = "True"
    if form in ("object", "no type", "text"):
        descr = {"object": "|O", "no type": "nonsense", "text": "<U4"}[form]
    header = f"{{'descr': {descr!r}, 'fortran_order': {order}, 'shape': {text}, }}"
    if form == "no dictionary":
        header = "[1, 2"
    encoded = header.encode().ljust(117) + b"\n"
    version = b"\x09\x00" if form == "version" else b"\x01\x00"
    return b"\x93NUMPY" + version + struct.pack("<H", len(encoded)) + encoded + body, form


def _bomb(path: Path, members: dict[str, bytes], name: str, blocks: int = 96, block: int = 8 << 20) -> None:
    """`members` with an array of zeros in place of `name`, 800 MB in 800 kB: one deflated block, again and again."""
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"descr": "<f4", "fortran_order": False, "shape": (blocks * block // 4,)}
    )
    first = zlib.compressobj(9, zlib.DEFLATED, -15)
    start = first.compress(head.getvalue()) + first.flush(zlib.Z_FULL_FLUSH)
    zeros = zlib.compressobj(9, zlib.DEFLATED, -15)
    body = zeros.compress(bytes(block)) + zeros.flush(zlib.Z_FULL_FLUSH)
    packed = start + body * blocks + zlib.compressobj(9, zlib.DEFLATED, -15).flush()
    crc = zlib.crc32(head.getvalue())
    for _ in range(blocks):
        crc = zlib.crc32(bytes(block), crc)
    size = len(head.getvalue()) + blocks * block
    del members[name]
    with zipfile.ZipFile(path, "w") as archive:
        for key, data in members.items():
            archive.writestr(key, data)
        info = zipfile.ZipInfo(name)
        info.compress_type, info.CRC, info.file_size, info.compress_size = zipfile.ZIP_DEFLATED, crc, size, len(packed)
        assert archive.fp is not None
        info.header_offset = archive.fp.tell()
        archive.fp.write(info.FileHeader(False))
        archive.fp.write(packed)
        archive.start_dir = archive.fp.tell()
        archive.filelist.append(info)
        archive.NameToInfo[name] = info
        archive._didModify = True  # type: ignore[attr-defined]
