"""Rows 3 and 4, for all writers: nothing but `offrl.system` opens a file for writing, replaces or deletes one under a
fixed name.

Files go through `offrl.system.files.replacing` (and `write`, `write_text`, `write_bytes`, which are made of it), those
that grow through `open_to_append`, locks through `trust.open_to_write`; `discard` and `discard_entry` delete what a
pattern names. What else opens, moves or deletes files is listed here with its reason.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FRESH = "in a new folder that mkdtemp has just made"
OWN = "deletes a file that it has named, a link itself where there is one"
ALLOWED = {
    "offrl/system/files.py": {
        "os.replace": "`replacing`",
        "part.unlink": "`replacing`",
        "path.unlink": "`discard`",
        "folder.rmdir": "`discard`",
        "folder.rename": "`discard_entry`: to a name that is no file's",
        "aside.rename": "`discard_entry`: back to its own name",
        "(folder / f'step_{old:09d}.safetensors').unlink": OWN,
    },
    "offrl/system/trust.py": {
        "open": "`open_part`: exclusively",
        "os.open": "`open_to_write`: not through links",
        "os.ftruncate": "`open_to_write`: after that check",
        "leftover.unlink": "`open_part`: unfinished ones",
    },
    "offrl/system/locks.py": {
        "shutil.rmtree": "of a TemporaryFolder, whose process has died or which ends",
        "folder.rmdir": "that it has made",
    },
    "offrl/system/backend.py": {
        "code.rename": "Inductor's own folder, by names of this machine",
        "Path(folder).rename": "the same",
        "code.with_suffix(SEAL).unlink": OWN,
    },
    "offrl/training/compiling/ahead.py": {
        "os.replace": "moves it into place, in the folder of compiled code",
        "shutil.rmtree": FRESH,
    },
    "offrl/training/compiling/kernels.py": {"os.replace": "moves it into place, in the folder of compiled code"},
    "offrl/runs/log.py": {"os.ftruncate": "takes back a line of the file that it has open"},
    "offrl/runs/results.py": {"target.with_suffix('.parquet').unlink": OWN},
    "offrl/benchmark/run.py": {"(folder / plan.CELLS / plan.STOP).unlink": OWN},
    "offrl/collect/train.py": {"path.unlink": OWN, "snapshot.path.unlink": OWN},
    "offrl/finetuning/replay/ring.py": {"self._path(first).unlink": OWN},
    "offrl/export/write.py": {"path.unlink": OWN},
    "offrl/data/memory.py": {
        "open": FRESH,
        "np.lib.format.open_memmap": FRESH,
        "np.save": FRESH,
        "np.savez": FRESH,
        "stale.unlink": FRESH,
        "(self.folder / MANIFEST).write_text": FRESH,
        "shutil.rmtree": FRESH,
        "os.replace": "moves it into place",
    },
    "offrl/lm/tokens.py": {
        "np.save": FRESH,
        "(staging / 'sizes.json').write_text": FRESH,
        "shutil.rmtree": FRESH,
        "os.replace": "moves it into place",
    },
    "offrl/data/formats/transfer.py": {"part.unlink": OWN, "path.unlink": OWN},
    "offrl/data/writing/output_path.py": {
        "os.replace": "`atomic_output`: moves from a TemporaryFolder into place",
        "folder.rmdir": "that it has made",
    },
    "offrl/data/formats/download.py": {"os.replace": "the part into place"},
    "offrl/data/formats/minari.py": {"path.rmdir": "empty ones", "folder.rmdir": "empty ones"},
    "offrl/data/writing/write_minari.py": {
        "path.write_text": "within `atomic_output`",
        "file.write_text": "where nothing is",
    },
    "offrl/data/writing/lerobot_video.py": {"av.open": "within `atomic_output`"},
    "offrl/data/writing/write_lerobot.py": {
        "(meta / 'info.json').write_text": "within `atomic_output`",
        "(meta / 'stats.json').write_text": "within `atomic_output`",
    },
    "offrl/system/processes.py": {"content.numpy().tofile": FRESH},
    "offrl/data/text/write.py": {
        "gzip.GzipFile": "the same",
        "path.open": "in `atomic_output`",
    },
    "offrl/data/containers/hdf5_sink.py": {
        "os.open": "within `atomic_output`",
        "os.ftruncate": "the file that it has open",
        "h5py.File": "a file-like object of this module",
    },
}
OPENS = ("open", "File", "open_memmap", "memmap", "GzipFile", "ZipFile")  # with a mode
ALWAYS = {  # whatever their arguments
    "os": ("replace", "rename", "remove", "unlink", "ftruncate", "truncate", "link", "symlink", "mkfifo"),
    "shutil": ("rmtree", "copy", "copy2", "copyfile", "copytree", "move"),
    "np": ("save", "savez", "savez_compressed"),
}
METHODS = (
    "write_text",
    "write_bytes",
    "touch",
    "unlink",
    "rename",
    "rmdir",
    "symlink_to",
    "hardlink_to",
    "savefig",
    "tofile",
)
QUALIFIED = [rf"\b{module}\.{name}\(" for module, names in ALWAYS.items() for name in names]
MODE = r"""["'](w|a|x|r\+|w\+|a\+|x\+)[bt]?\+?["']"""
# only files with one are parsed
CALLS = re.compile("|".join([MODE, r"\bos\.open\(", rf"\.({'|'.join(METHODS)})\(", *QUALIFIED]))
OWN_MODULES = ("checkpoint", "files", "plan")  # whose write_text is that of offrl.system.files


def writes(call: ast.Call) -> bool:
    """Whether this call may open for writing, replace or delete a file by its name."""
    func = call.func
    name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
    base = func.value.id if isinstance(func, ast.Attribute) and isinstance(func.value, ast.Name) else ""
    if base in ALWAYS and name in ALWAYS[base]:
        first = call.args[0] if call.args else None  # np.savez into a file that `replacing` has opened
        return not (base == "np" and isinstance(first, ast.Name) and first.id == "file")
    if base == "os" and name == "open":
        return ast.unparse(call.args[0]) != "os.devnull" and ast.unparse(call.args[1]) != "os.O_RDONLY"
    if isinstance(func, ast.Attribute) and name in METHODS and base not in OWN_MODULES:
        return not (
            name == "savefig"
            and call.args
            and isinstance(call.args[0], ast.Name)
            and call.args[0].id in ("file", "buffer")
        )
    if name in OPENS and base not in ("tarfile", "zipfile", "Image"):
        words = [*call.args, *(k.value for k in call.keywords if k.arg == "mode")]
        modes = [
            a.value for a in words if isinstance(a, ast.Constant) and isinstance(a.value, str) and len(a.value) <= 3
        ]
        computed = [a for a in words if isinstance(a, ast.IfExp)]
        return any(set(mode) & set("wax+") and set(mode) <= set("rwaxbt+") for mode in modes) or bool(computed)
    return False


def sources() -> Iterator[tuple[str, ast.Module]]:
    for top in ("offrl", "algorithms", "world_models", "envs"):
        for folder, _, names in os.walk(ROOT / top):  # which does not follow links
            for path in (Path(folder, name) for name in sorted(names) if name.endswith(".py")):
                if CALLS.search(text := path.read_text(encoding="utf-8")):
                    yield str(path.relative_to(ROOT)), ast.parse(text)


def test_writers_are_those_of_the_system() -> None:
    """Rows 3 and 4: a new writer that opens a fixed name by itself is found here."""
    seen: dict[str, set[str]] = {}
    for name, tree in sources():
        calls = {ast.unparse(n.func) for n in ast.walk(tree) if isinstance(n, ast.Call) and writes(n)}
        if calls:
            seen[name] = calls
    new = {name: calls - ALLOWED.get(name, {}).keys() for name, calls in seen.items()}
    assert not any(new.values()), {n: c for n, c in new.items() if c}
    stale = {name: calls.keys() - seen.get(name, set()) for name, calls in ALLOWED.items()}
    assert not any(stale.values()), {n: c for n, c in stale.items() if c}


def test_the_guard_sees_what_it_is_for() -> None:
    """What the writers of rows 3 and 4 did before."""
    for text in (
        'open(part, "wb")',
        'open(run_dir / ".lock", "w")',
        'path.open("ab" if have else "wb")',
        "state.write_text(x)",
        "np.savez_compressed(part, x=1)",
        'figure.savefig(part, format="png")',
        "os.open(path, os.O_RDWR | os.O_CREAT)",
        "shutil.copyfile(a, b)",
        "shutil.rmtree(path)",
        "os.replace(part, path)",
        "stop.touch()",
        'h5py.File(path, "a")',
        'open(path, mode="r+b")',
    ):
        assert writes(ast.parse(text).body[0].value), text  # type: ignore[attr-defined]
    for text in (
        "open(path)",
        'open(path, "rb")',
        "checkpoint.write_text(path, text)",
        'name.replace("a", "b")',
        "os.open(os.devnull, os.O_WRONLY)",
    ):
        assert not writes(ast.parse(text).body[0].value), text  # type: ignore[attr-defined]
