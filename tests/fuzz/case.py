"""One case: its file made from layout, seed and number, loaded, and judged."""

from __future__ import annotations

import json
import os
import re
import time
import traceback
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz import containers, damage, drafts, drafts_minari, drafts_robots, excerpts, records
from tests.fuzz.compare import difference
from tests.fuzz.oracle import judge
from tests.fuzz.slips import slip

FAILURES = ("strict", "unclear", "wrong", "traceback", "memory", "crash", "hang")
OUTCOMES = ("right", "refused", "library", *FAILURES)
ALL: dict[str, Callable[[drafts.Rng], drafts.Draft]] = {
    "d4rl": drafts.d4rl,
    "hdf5": drafts.columns_of("hdf5", "case.hdf5"),
    "npz": drafts.columns_of("npz", "case.npz"),
    "parquet": drafts.columns_of("parquet", "case.parquet"),
    "ogbench": drafts.ogbench,
    "d3rlpy1": drafts.d3rlpy_v1,
    "d3rlpy2": drafts.d3rlpy_v2,
    "minari": drafts_minari.minari("minari"),
    "arrow": drafts_minari.minari("arrow"),
    "padded": drafts.padded,
    "text": drafts_minari.text,
    "minari-text": drafts_minari.minari_text,
    "lerobot": drafts_robots.lerobot,
    "robomimic": drafts_robots.robomimic,
    "vd4rl": drafts_robots.vd4rl,
    "written": records.written,
    "real": excerpts.real,
}
MEMORY = 300  # MB that loading a small file may take
QUOTED = r"'[^']*'|[-\d.]+\d|\d|/\S*"  # what differs between failures of one cause
DRAFT = "case.json"  # beside the file: how it was made, and the settings it is loaded with


@dataclass
class Result:
    outcome: str
    layout: str = ""
    number: int = 0
    seed: int = 0
    changes: list[str] = field(default_factory=list)
    verdict: str = ""  # of the oracle: valid | refuse | either
    reason: str = ""
    message: str = ""  # what offrl says, or how its dataset differs
    place: str = ""  # of a traceback: the last lines in offrl
    seconds: float = 0.0
    megabytes: float = 0.0

    @property
    def kind(self) -> str:
        """The same for failures of one cause, as far as one can tell."""
        about = self.reason if self.outcome == "wrong" else self.message.split(":", 1)[-1]
        return f"{self.layout}: {self.outcome}: {self.place or re.sub(QUOTED, '*', about)[:70]}"


def make(layout: str, seed: int, number: int, folder: Path, sound: bool = False) -> tuple[Path, list[str]]:
    """Write the case under `folder`: the path to load, and what was changed. The settings stand in DRAFT beside it.

    sound: change nothing.
    """
    rng = np.random.default_rng([seed, zlib.crc32(layout.encode()), number])
    draft = ALL[layout](rng)
    changes: list[str] = []
    plan = rng.choice(["none", "slip", "slips", "structure", "both", "bytes"], p=[0.08, 0.34, 0.06, 0.24, 0.08, 0.2])
    plan = "none" if sound else plan
    for _ in range({"slip": 1, "slips": 2, "both": 1}.get(str(plan), 0)):
        try:
            changes.append(slip(draft, rng))
        except (ValueError, TypeError, OverflowError, IndexError, KeyError):
            changes.append("a slip that the columns do not allow")
    try:
        path = containers.write(draft, folder, rng)
    except Exception as error:  # a container that does not hold such columns
        changes.append(f"not written ({type(error).__name__})")
        for left in sorted(folder.rglob("*"), reverse=True):
            left.rmdir() if left.is_dir() and not left.is_symlink() else left.unlink()
        draft = ALL[layout](rng)
        path = containers.write(draft, folder, rng)
    if plan in ("structure", "both"):
        try:
            changes.append(damage.structure(draft, path, rng))
        except Exception as error:  # the libraries refuse some of it
            changes.append(f"a structure that cannot be made ({type(error).__name__})")
    if plan == "bytes":
        changes.append(damage.bytes_of(path, rng))
    about = {
        "load": draft.name,
        "config": draft.config,
        "layout": layout,
        "seed": seed,
        "number": number,
        "changes": changes,
    }
    (folder / DRAFT).write_text(json.dumps(about))
    return path, changes


def load(path: Path, config: dict[str, Any]) -> Any:
    """offrl's dataset."""
    from offrl.data import load_dataset
    from offrl.settings.dataset import DatasetConfig

    return load_dataset(DatasetConfig(name=str(path), cache="never", memory="device", **config))


def run(path: Path, config: dict[str, Any], tell: Any = lambda stage: None) -> Result:
    """Judge and load the file at `path`; `tell` is called with each stage that begins."""
    from offrl.errors import UserError

    tell("oracle")
    verdict = judge(path, config)
    result = Result("right", verdict=verdict.kind, reason=verdict.reason)
    tell("load")
    before, began = _resident(), time.perf_counter()
    try:
        dataset = load(path, config)
    except UserError as error:
        result.outcome = _refusal(str(error), path, verdict.kind)
        result.message = str(error)
    except MemoryError as error:
        result.outcome, result.message, result.place = "memory", repr(error), _place(error)
    except Exception as error:
        result.outcome, result.message, result.place = (
            "traceback",
            f"{type(error).__name__}: {error}"[:300],
            _place(error),
        )
    else:
        if verdict.kind == "refuse":
            result.outcome, result.message = "wrong", f"loaded {len(dataset)} rows, though: {verdict.reason}"
        elif verdict.episodes is not None and (problem := difference(dataset, verdict.episodes)):
            result.outcome, result.message = "wrong", problem
            result.reason = result.reason or problem
        del dataset
    result.seconds = round(time.perf_counter() - began, 3)
    result.megabytes = round(max(0.0, _resident("VmHWM") - before), 1)
    if result.megabytes > MEMORY and result.outcome != "traceback":
        result.outcome, result.place = "memory", result.place or f"{result.outcome}, {verdict.reason}"
    return result


def _refusal(message: str, path: Path, verdict: str) -> str:
    """The outcome of a refusal."""
    names = [path.name, *([_dataset_id(path)] if path.is_dir() else [])]
    if "\n" in message or not any(name and name in message for name in names):
        return "unclear"
    return "strict" if verdict == "valid" else "refused"


def _dataset_id(path: Path) -> str:
    """The id that a Minari dataset gives itself: as good as the folder's name."""
    try:
        return str(json.loads((path / "data" / "metadata.json").read_bytes()).get("dataset_id", ""))
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""


def _place(error: BaseException) -> str:
    """Where the exception left offrl, and what it is."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f"{os.sep}offrl{os.sep}" in f.filename]
    if not frames:
        return type(error).__name__
    last = frames[-1]
    return (
        f"{type(error).__name__} in {last.filename.rpartition(f'{os.sep}offrl{os.sep}')[2]}:{last.lineno} ({last.name})"
    )


def _resident(field_name: str = "VmRSS") -> float:
    """MB of memory in use now; asking for VmRSS starts the peak, VmHWM, anew."""
    try:
        if field_name == "VmRSS":
            Path("/proc/self/clear_refs").write_text("5")
        text = Path("/proc/self/status").read_text()
        return float(text.split(f"{field_name}:")[1].split()[0]) / 1024
    except (OSError, IndexError, ValueError):  # not Linux: only the limit of the address space watches
        return 0.0


def settings_of(folder: Path) -> tuple[Path, dict[str, Any]]:
    """The path to load and the settings of a case's folder."""
    about = json.loads((folder / DRAFT).read_text())
    return folder / about["load"], about["config"]


def to_json(result: Result) -> str:
    return json.dumps(asdict(result))
