"""What people type, as settings: `--steps 1e5`, `--algo=iql`, a dataset's name or file alone, files that the shell made
of a pattern.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import UserError, few, note
from offrl.settings import known
from offrl.settings.aliases import algorithms, datasets
from offrl.settings.compose import parse
from offrl.settings.presets import config_names

SETTING = re.compile(r"\+{0,2}[A-Za-z_][\w.-]*=")
SHORT = {"-q": "quiet=true", "--quiet": "quiet=true"}
LISTS = ("seeds", "algos", "datasets", "compare", "target_returns", "rewards", "frequency")


def as_settings(arguments: Sequence[str], switches: Collection[str] = ()) -> list[str]:
    """`["--steps", "1e5", "--dry-run", "x"]` as `["steps=1e5", "dry_run=true", "x"]`; everything else stays as it is.

    switches: names of the settings that are true or false, which need no value. An option without a value that is none
    of them stays, for the command to say what it knows.
    """
    result: list[str] = []
    queue = list(arguments)
    while queue:
        word = queue.pop(0)
        if word in SHORT:
            result.append(SHORT[word])
            continue
        option = re.fullmatch(r"--([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
        if option is None or word == "--help":
            result.append(_underscored(word))
            continue
        name, value = option[1].replace("-", "_"), option[2]
        if value is not None:
            result.append(f"{name}={value}")
        elif name in switches or (name.startswith("no_") and name[3:] in switches):
            if queue and queue[0].lower() in ("true", "false"):
                result.append(f"{name}={queue.pop(0).lower()}")
            else:
                result.append(f"{name[3:]}=false" if name not in switches else f"{name}=true")
        elif queue and not queue[0].startswith("--") and not SETTING.match(queue[0]):
            values = [queue.pop(0)]
            while (
                name in LISTS
                and queue
                and not (queue[0].startswith("-") or SETTING.match(queue[0]) or Path(queue[0], "run.json").exists())
            ):
                values.append(queue.pop(0))
            result.append(f"{name}={','.join(values)}")
        else:
            result.append(word)
    return result


def _underscored(word: str) -> str:
    """A setting's name with underscores: `batch-size=256`. Columns and launchers have names of their own."""
    name, equals, value = word.partition("=")
    if (
        equals
        and SETTING.match(word)
        and not re.match(r"dataset\.fields\.|launcher\.", name)
        and not Path(word).exists()
    ):
        return f"{name.replace('-', '_')}={value}"
    return word


def train_values(arguments: Sequence[str]) -> dict[str, Any]:
    """The settings of `offrl train`: those that are written name=value, and the algorithm and the dataset that words
    without `=` name; files become one dataset.

    Raises UserError for a word that is neither, for two datasets in one command, and for a value that cannot be read.
    """
    settings = [a for a in arguments if SETTING.match(a)]
    files: list[str] = []
    for word in (a for a in arguments if not SETTING.match(a)):
        if (name := algorithms.meant(word, config_names("algo"))) and not Path(word).exists():
            settings.append(f"algo={name}")
        elif (Path(word) / "run.json").exists():
            raise UserError(
                f"{word} is a run; resume={word} continues it, offrl evaluate {word} scores it, offrl finetune {word} "
                "goes on"
            )
        elif Path(word).expanduser().exists() or glob.has_magic(word) or datasets.is_name(word):
            files.append(word)
        else:
            raise UserError(_neither(word))
    sources = [a for a in settings if re.match(r"(dataset|data|dataset\.name)=", a)]
    if files and sources:
        raise UserError(f"{files[0]} and {sources[0]} are both given; leave one of them out")
    if len(names := [a for a in settings if a.startswith("algo=")]) > 1:
        raise UserError(
            f"{' and '.join(names)} are both given; several algorithms are compared by offrl benchmark algos=a,b"
        )
    values = parse([a for a in settings if a not in sources])
    names = files
    if sources:
        text = str(parse([f"dataset={sources[0].partition('=')[2]}"])["dataset"])
        names = [text] if Path(text).expanduser().exists() or not text.isprintable() else text.split(",")
    several = datasets.expanded(names)
    if len(several) > 1 and "dataset.concatenate" in values:
        raise UserError(
            f"{','.join(names)} are {len(several)} datasets and dataset.concatenate= names more; name all of them in "
            "one place"
        )
    if several:
        values["dataset"] = several[0]
    if len(several) > 1:
        values["dataset.concatenate"] = several[1:]
        shown = f"{', '.join(several[1:4])}{' ...' if len(several) > 4 else ''}"
        note(
            f"{len(several)} datasets are trained on as one, {several[0]} and {shown}; offrl data merge writes them as "
            "one file"
        )
    elif files:
        note(f"{files[0]} is taken as dataset={several[0]}")
    return values


def _neither(word: str) -> str:
    """The message for a word that is no setting, algorithm, dataset or file."""
    cure = "write name=value, such as algo=iql or steps=50000"
    if re.search(r"[./~\\]", word):
        return f"'{word}' is not a setting, and there is no file of that name; {cure}"
    hint = datasets.hint(word) or few(word, [*config_names("algo"), *known.datasets()], 3)
    return f"'{word}' is not a setting, an algorithm, a dataset or a file.{hint} {cure[0].upper() + cure[1:]}"
