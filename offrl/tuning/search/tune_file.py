"""The file that says what a tune is, by which its folder is found again and no other tune writes to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from offrl.data.containers.guard import from_json
from offrl.errors import UserError
from offrl.settings import diff
from offrl.settings.field import marked
from offrl.system import files, trust
from offrl.tuning.config import TuneConfig

FILE, VERSION = "tune.json", 1


def read(path: Path) -> dict[str, Any]:
    """The file that says what a tune is. Raises UserError where it is missing, damaged, or of a newer version."""
    try:
        record = from_json(trust.read_text(path))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{path.parent} holds no tune: there is no {FILE} in it") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read ({error}); restore it, or begin again with another out=") from None
    if not isinstance(record, dict) or not isinstance(record.get("version"), int) or record["version"] > VERSION:
        raise UserError(
            f"{path} is of a newer offrl, or no file of a tune; upgrade offrl, or begin again with another out="
        )
    if not all(isinstance(record.get(k), kind) for k, kind in (("identity", str), ("settings", dict), ("given", dict))):
        raise UserError(
            f"{path} is damaged: identity, settings or given is missing; restore it, or begin again with another out="
        )
    return record


def claim(folder: Path, identity: str, settings: Mapping[str, Any], command_values: Mapping[str, Any]) -> str:
    """Write what a tune is, or check that the folder holds this very one; returns the UTC date of its beginning,
    YYYY-MM-DD.

    identity: a hash of `settings`, flat. command_values: as the command had them. Raises UserError where the folder
    holds anything else.
    """
    path = folder / FILE
    if path.exists():
        old = read(path)
        if old["identity"] != identity:
            changed = diff.difference(old["settings"], json.loads(json.dumps(settings, default=str)))
            detail = next((f"{k}: {a} there, {b} here" for k, (a, b) in changed.items()), "other settings")
            raise UserError(
                f"{folder} holds another tune ({detail}); choose another out=, or `offrl tune resume={folder}`"
            )
        return str(old.get("created", ""))
    if folder.exists() and (entries := sorted(p.name for p in folder.iterdir() if not p.name.startswith("."))):
        raise UserError(
            f"{folder} holds no tune and is not empty (it has {', '.join(entries[:3])}); choose another out="
        )
    place_fields = marked(TuneConfig, "place")
    stored = {k: v for k, v in command_values.items() if k not in place_fields}
    created = datetime.now(timezone.utc).date().isoformat()
    record = {"version": VERSION, "created": created, "identity": identity, "settings": settings, "given": stored}
    files.write_text(path, json.dumps(record, indent=1, default=str) + "\n")
    return created
