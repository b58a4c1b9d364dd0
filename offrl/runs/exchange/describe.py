"""A run directory as a results document: what a report would show of it, and the return of each episode."""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.runs.exchange.check import VERSION, Document, check, near
from offrl.runs.log import EPISODES
from offrl.runs.parse import lines_backwards, times, yaml_or_error
from offrl.runs.reader import Reader, planned
from offrl.runs.record import CONFIG
from offrl.runs.run import SavedRun
from offrl.runs.score import Missing, Score
from offrl.settings.diff import Variant
from offrl.system.addresses import without_logins

FINGERPRINT = "data.fingerprint"  # among the settings of a variant; a document has it as dataset.checksum
TAIL = 1 << 26  # bytes of episodes.jsonl that are read for its last lines
# what a text that is a path of this machine begins with
_WHOLE = re.compile(r"(file://|~|\.\.[/\\]|[/\\]|[A-Za-z]:[/\\])")
# the folders of one within a text
_WITHIN = re.compile(r"(?<![\w/\\-])(?:~[\w.-]*|[A-Za-z]:)?[/\\](?![/\\])(?:[^\s/\\'\"]+[/\\])+")


def document(
    run: SavedRun | str | Path,
    *,
    values: Mapping[str, float] | None = None,
    tuned: Mapping[str, Any] | None = None,
    created: str | None = None,
    license: str | None = None,
    commit: str | None = None,
    notes: str | None = None,
    hardware: bool = True,
) -> dict[str, Any]:
    """The results document of a run, or of one point of its grid.

    values: the point, `{"temperature": 3.0}`; it may be left out where the run has one. tuned: how its settings were
    chosen, `{"by": ..., "candidates": ..., "judge": ..., "episodes_used": ..., "split": ...}` (`schema.TunedEntry`).
    created: the date, YYYY-MM-DD; None: today's in UTC. license: of the results. commit: of the library. hardware:
    whether the device and the seconds of training are in it; with False and `created` given, the same run gives the
    same bytes.

    Raises UserError where there is no run, it was never scored, its settings cannot be read, or the point is not one of
    its grid."""
    facts = {"created": created, "license": license, "commit": commit, "notes": notes}
    pairs = _made(run, tuned, facts, hardware)
    selection = dict(values or {})
    chosen = [
        one for point, one in pairs if all(name in point and point[name] == value for name, value in selection.items())
    ]
    if len(chosen) != 1:
        points = "; ".join(
            ", ".join(f"{k}={v:g}" if isinstance(v, (int, float)) else f"{k}={v}" for k, v in p.items())
            for p, _ in pairs
        )
        raise UserError(
            f"{_dir(run)} has {len(chosen)} grid points with values={selection}: say which of {points[:400] or 'none'}"
        )
    return chosen[0]


def documents(
    run: SavedRun | str | Path,
    *,
    created: str | None = None,
    license: str | None = None,
    notes: str | None = None,
    hardware: bool = True,
) -> list[dict[str, Any]]:
    """The results documents of a run: one for each point of its grid, one without a grid. See `document`."""
    facts = {"created": created, "license": license, "commit": None, "notes": notes}
    return [one for _, one in _made(run, None, facts, hardware)]


def _dir(run: SavedRun | str | Path) -> Path:
    return run.dir if isinstance(run, SavedRun) else Path(run)


def _made(
    run: SavedRun | str | Path,
    tuned: Mapping[str, Any] | None,
    facts: Mapping[str, str | None],
    hardware: bool,
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """(values of the grid point, its document) in the grid's order."""
    reader = Reader()
    saved = reader.run(_dir(run), "")
    if saved is None:
        raise UserError(reader.problems[0].removesuffix(": left out") if reader.problems else f"{_dir(run)} is no run")
    config = yaml_or_error(saved.dir / CONFIG)
    steps = planned(saved.dir, config) if isinstance(config, dict) else None
    if steps is None:
        raise UserError(reader.problems[0])
    if not reader.scores:
        raise UserError(
            f"{saved.dir} was never scored, so it has no results: offrl train resume={saved.dir} eval.env=ID scores it"
        )
    seconds = times(saved)[1]
    created = facts["created"] or datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    duration = round(seconds, 1) if math.isfinite(seconds) else None
    machine = {"kind": str(saved.record.get("device", "")), "wall_s": duration} if hardware else None
    episodes = _episodes(saved, {s.step for s in reader.scores})
    points = {r.cell: dict(r.values) for r in saved.replicas}
    result = []
    for cell, variant in zip(points, reader.variants, strict=True):  # in the order of the replicas
        rows = [s for s in reader.scores if s.cell == cell]
        if not rows:
            continue
        scored = _scored(rows, [m for m in reader.missing if m.settings == variant.settings], episodes)
        one = _document(saved, variant, rows[-1], config, steps, tuned)
        document = {**one, **facts, "created": created, "hardware": machine, **scored}
        result.append((points[cell], check(document, str(saved.dir))))
    return [(point, {name: one[name] for name in Document.__annotations__}) for point, one in result]


def _document(
    run: SavedRun, variant: Variant, row: Score, config: Mapping[str, Any], steps: int, tuned: Mapping[str, Any] | None
) -> dict[str, Any]:
    """All of a document that its scores do not decide, but for the task."""
    data, evaluation = run.record["data"], config.get("eval") or {}
    number = {name: data[name] if isinstance(data.get(name), int) else None for name in ("rows", "episodes")}
    settings = {name: value for name, value in variant.flat.items() if name != FINGERPRINT}
    packages = run.record.get("packages") or {}
    return {
        "schema": VERSION,
        "library": "offrl",
        "version": str(packages.get("offrl") or ""),
        "dataset": {
            "name": run.dataset,
            "checksum": run.fingerprint,
            **number,
            "source": public(data.get("source")),
            "transforms": [str(public(t)) for t in data.get("transforms") or []],
        },
        "task": {
            "name": run.dataset,
            "environment": str(public(row.env_id)) or "unknown",
            "packages": row.provenance.versions,
            "reference_scores": _reference(run, row),
            "max_steps": evaluation.get("max_steps")
            or ((run.record.get("spec") or {}).get("task") or {}).get("max_episode_steps"),
            "scored_by": row.scored_by,
        },
        "algorithm": {
            "name": run.algorithm,
            "settings": public(settings),
            "settings_hash": variant.settings,
            "tuned": None if tuned is None else dict(tuned),
            "given": public(dict(variant.user_values)),
        },
        "protocol": {
            "steps": steps,
            "evaluation": "last",
            "episodes": row.episodes,
            "deterministic": None,  # the algorithm decides: its page says how its policies act
            "reset_seeds": None,  # a hash of (eval.seed, seed, episode): docs/statistics.md
            "eval_seed": evaluation["seed"] if isinstance(evaluation.get("seed"), int) else 0,
        },
    }


def _reference(run: SavedRun, row: Score) -> dict[str, Any] | None:
    """What 0 and 100 mean; the two returns only where they are those that the scores were made with."""
    if row.normalised is None or not row.reference:
        return None
    task = (run.record.get("spec") or {}).get("task") or {}
    low, high = task.get("ref_min"), task.get("ref_max")
    if isinstance(low, (int, float)) and isinstance(high, (int, float)) and low < high:
        due = 100.0 * (row.raw - low) / (high - low)
        if near(due, row.normalised):
            return {"source": row.reference, "min": low, "max": high}
    return {"source": row.reference, "min": None, "max": None}


def _scored(
    rows: Sequence[Score], missing: Sequence[Missing], episodes: Mapping[tuple[int, int, str], Any]
) -> dict[str, Any]:
    """`runs` and `curve`: the last evaluation of each seed, and the earlier ones."""
    last = {s.seed: s for s in sorted(rows, key=lambda s: s.step)}
    dead = {m.seed for m in missing if m.reason.startswith("diverged")}
    runs, curve = [], []
    for s in sorted(rows, key=lambda s: (s.seed, s.step)):
        if s is not last[s.seed]:
            curve.append({"seed": s.seed, "step": s.step, "score": s.normalised, "return_mean": s.raw})
            continue
        returns, lengths, costs = episodes.get((s.step, s.seed, s.cell), (None, None, None))
        one = {"seed": s.seed, "step": s.step, "returns": returns, "lengths": lengths, "costs": costs}
        one |= {"score": s.normalised, "diverged": s.seed in dead, "return_mean": s.raw}
        runs.append(one | ({} if s.success is None else {"success": s.success}))
    return {"runs": runs, "curve": curve}


def _episodes(run: SavedRun, steps: set[int]) -> dict[tuple[int, int, str], tuple[Any, Any, Any]]:
    """(step, seed, grid point) -> returns, lengths and costs of the single episodes, of the last evaluation; {} for a
    run that has no such file or a damaged one."""
    result = {}
    for line in lines_backwards(run.dir / EPISODES, TAIL):
        returns = line.get("returns")
        if line["step"] not in steps or not isinstance(returns, list) or len(returns) != len(run.replicas):
            continue
        more = [line.get(name) for name in ("lengths", "costs")]
        columns = [v if isinstance(v, list) and len(v) == len(returns) else [None] * len(returns) for v in more]
        for replica, row, counts, costs in zip(run.replicas, returns, *columns, strict=True):
            if isinstance(row, list) and row and all(isinstance(x, (int, float)) for x in row):
                result[line["step"], replica.seed, replica.cell] = row, counts, costs
        break
    return result


def public(value: Any) -> Any:
    """`value`, text or nested dictionaries and lists with texts in them, without logins, and with the last part only of
    paths that say where something lies on this machine."""
    if isinstance(value, str):
        text = without_logins(value)
        if _WHOLE.match(text):
            return re.split(r"[/\\]", text.rstrip("/\\"))[-1]
        return _WITHIN.sub("", text)
    if isinstance(value, Mapping):
        return {public(str(key)): public(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [public(entry) for entry in value]
    return value
