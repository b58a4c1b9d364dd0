"""Names of datasets as people write them: patterns, lists, old versions, and environments taken for datasets. Opens no
file.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Sequence
from pathlib import Path

from offrl.errors import UserError
from offrl.settings import known

FILES = (".hdf5", ".h5", ".npz", ".parquet", ".npy", ".pq", ".hdf", ".jsonl", ".ndjson", ".csv")
GYM_ID = re.compile(r"(?:gym(?:nasium)?:)?([A-Z][A-Za-z0-9]+(?:[A-Z_]\w*)*)-v(\d+)")
MUJOCO = ("Hopper", "HalfCheetah", "Walker2d", "Ant", "Humanoid", "Swimmer", "Reacher", "Pusher", "InvertedPendulum",
          "InvertedDoublePendulum", "HumanoidStandup")  # fmt: skip


def is_name(text: str) -> bool:
    """Whether `text` is a dataset's name, as far as can be told without reading: a known one, or of OGBench's or
    Minari's form.
    """
    forms = (
        r"(minari:|d4rl:|ogbench:).+",
        r"[\w.-]+(/[\w.-]+)+-v\d+",
        r"[a-z0-9]+(-[a-z0-9]+)*-(navigate|stitch|explore|play|noisy)\S*-v\d+",
    )
    return text in known.datasets() or any(re.fullmatch(form, text) for form in forms)


def expanded(names: Sequence[str]) -> list[str]:
    """The names with patterns (data/*.hdf5) as the files they stand for, by name. Raises UserError for one without
    files.
    """
    result: list[str] = []
    for name in names:
        if glob.has_magic(name) and not Path(name).expanduser().exists():
            files = sorted(glob.glob(str(Path(name).expanduser())))
            if not files:
                raise UserError(f"dataset={name}: no file fits this pattern")
            result += files
        else:
            result.append(name)
    return result


def environment_hint(env_id: str) -> str:
    """` Hopper-v5 works here` for an id whose version needs packages of the past, or an empty text."""
    match = GYM_ID.fullmatch(env_id)
    if match is None or match[1] not in MUJOCO or int(match[2]) > 3:
        return ""
    return (
        f" {match[1]}-v5 works, and so does {match[1]}-v4, which D4RL's scores belong to; v{match[2]} needs the "
        "abandoned mujoco-py."
    )


def hint(name: str) -> str:
    """What to write in place of a dataset's name that is none: an environment's id, or a version that there is not."""
    if match := GYM_ID.fullmatch(name):
        family = match[1].lower()
        siblings = [n for n in known.datasets() if n.partition("-")[0] == family]
        env = f"{match[1]}-v5" if match[1] in MUJOCO else name
        shown = ", ".join([n for n in siblings if "medium" in n and n.endswith("-v2")][:3] or siblings[:3])
        cure = f" It is an environment's id; to score in it, env={env} (offrl train: eval.env={env})."
        return cure + (f" Datasets recorded there: {shown}." if shown else "")
    stem = re.sub(r"-v\d+$", "", name.lower())
    versions = [n for n in known.datasets() if re.sub(r"-v\d+$", "", n) == stem]
    return f" There is {', '.join(versions)}." if versions and name not in versions else ""
