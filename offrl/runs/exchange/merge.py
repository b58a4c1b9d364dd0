"""Documents and tables of others beside the runs that were read: the same scores, told apart where they are not of one
experiment.

Seeds stand in one cell of a report only where dataset, settings and the way they were scored agree. What states the
same dataset checksum, settings hash and seed again is counted once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError, one_line
from offrl.runs.exchange.check import mean_return
from offrl.runs.exchange.describe import FINGERPRINT, documents
from offrl.runs.exchange.files import documents_in
from offrl.runs.exchange.tables import add_table
from offrl.runs.score import Missing, Results, Score
from offrl.settings.diff import Variant, digest, flatten

if TYPE_CHECKING:
    from offrl.runs.reader import Reader

LABEL = 100  # characters of a name or value, as labels and tables show it
Key = tuple[str, str, str]  # dataset, algorithm, settings


def add(reader: Reader) -> list[dict[str, Any]]:
    """Read the files that `reader` met, and add what they state to its lists. Returns the documents.

    Raises UserError for a damaged file that a person named; one that was met in a folder is a problem, and left out.
    """
    merge = _Merge(reader)
    for path, explicit in reader.files:
        try:
            if path.suffix == ".csv":
                add_table(path, reader)
                continue
            parts = documents_in(path)
        except UserError as error:
            if explicit:
                raise
            reader.problems.append(f"{error}: left out")
            continue
        for where, value in parts:
            merge.add(where, value)
    return merge.documents


def documents_of(results: Results, license: str | None = None) -> list[dict[str, Any]]:
    """Documents of all that `collect` found: of its runs that were scored, one a grid point, and those of others as
    they are.

    What repeats data, settings and seeds is left out. license: of the runs' results. Raises UserError where nothing was
    scored."""
    scored = {s.run for s in results.scores}
    run_documents = [one for run in results.runs if str(run.dir) in scored for one in documents(run, license=license)]
    seeds: dict[tuple[str, str], set[int]] = {}
    result = []
    for one in [*run_documents, *results.documents]:
        known = seeds.setdefault((one["dataset"]["checksum"], one["algorithm"]["settings_hash"]), set())
        if new := {run["seed"] for run in one["runs"]} - known:
            known |= new
            result.append(one)
    if not result:
        raise UserError(
            "nothing that was read is a scored run or a results document, so there are no results to write: leave "
            "results= out"
        )
    return result


class _Merge:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.documents: list[dict[str, Any]] = []
        self.variants = {v.key for v in reader.variants}
        self.missing = {(m.dataset, m.algorithm, m.settings, m.seed) for m in reader.missing}
        # (checksum, settings) -> (dataset, algorithm) as the first calls them
        self.names: dict[tuple[str, str], tuple[str, str]] = {}
        self.places: dict[Key, dict[str, Any]] = {}  # how the scores of a cell were made
        # (checksum, settings, seed) -> where it stands, its cell
        self.seeds: dict[tuple[str, str, int], tuple[str, Key]] = {}
        checksums = {str(run.dir): run.fingerprint for run in reader.runs}
        for s in reader.scores:
            conditions = {
                "environment": s.env_id,
                "scored_by": s.scored_by,
                "reference": s.reference,
                "steps": s.step if s.final else None,
            }
            known = self.places.setdefault(s.key, conditions)
            known["steps"] = known["steps"] or conditions["steps"]
            if s.run in checksums:
                self.names.setdefault((checksums[s.run], s.settings), (s.dataset, s.algorithm))
                self.seeds.setdefault((checksums[s.run], s.settings, s.seed), (s.run, s.key))

    def add(self, where: str, value: Mapping[str, Any]) -> None:
        """Add what a checked document states. where: the file, and the line."""
        self.documents.append(dict(value))
        checksum, algorithm = value["dataset"]["checksum"], value["algorithm"]
        settings = _settings(value)
        stated = _text(value["dataset"]["name"]), _text(algorithm["name"])
        names = self.names.setdefault((checksum, settings), stated)
        if names != stated:
            lines = (
                f"{where} calls {stated[1]} on {stated[0]} what is {names[1]} on {names[0]} elsewhere, by checksum and "
                "settings"
            )
            self.reader.problems.append(f"{lines}: shown under that name")
        conditions = _place(value)
        key = (*names, settings)
        differing = _unlike(self.places.setdefault(key, conditions), conditions)
        flat = (
            {_text(k): _value(v) for k, v in flatten(dict(algorithm["settings"])).items()}
            if algorithm["settings"]
            else {}
        )
        user_values = {_text(k): _value(v) for k, v in (algorithm.get("given") or {}).items()}
        if value["library"] != "offrl":
            user_values["library"] = _text(value["library"])
        if differing:
            key = (*names, digest({"settings": settings, **differing}))
            self.places[key] = conditions
            user_values |= {_text(k): _value(v) for k, v in differing.items()}
        runs = self._fresh(where, value, (checksum, settings), key, bool(differing))
        if key not in self.variants:
            self.variants.add(key)
            self.reader.variants.append(
                Variant(*key, {**flat, FINGERPRINT: _text(checksum[:12]), **user_values}, user_values)
            )
        self._scores(where, value, runs, key)

    def _fresh(
        self, where: str, value: Mapping[str, Any], data: tuple[str, str], key: Key, otherwise: bool
    ) -> list[Mapping[str, Any]]:
        """The runs of a document that nothing else states, and of those that are stated twice what `collect` shall
        choose from.
        """
        last: dict[int, Mapping[str, Any]] = {}
        for run in value["runs"]:
            if run["seed"] in last:
                self.reader.problems.append(
                    f"{where} states seed {run['seed']} twice; counted once, the one that got further"
                )
            if run["seed"] not in last or run["step"] > last[run["seed"]]["step"]:
                last[run["seed"]] = run
        result, dropped = [], []
        for seed, run in last.items():
            first, other = self.seeds.setdefault((*data, seed), (where, key))
            if other != key:
                dropped.append((seed, first))
            else:
                result.append(run)
        if dropped:
            seeds = f"seed{'s' if len(dropped) > 1 else ''} {', '.join(str(seed) for seed, _ in dropped[:8])}"
            suffix = "; scored otherwise there" if otherwise else ""
            self.reader.problems.append(
                f"{where} states {seeds} of {key[1]} on {key[0]} again, same data and settings: counted once, from "
                f"{dropped[0][1]}{suffix}"
            )
        return result

    def _scores(self, where: str, value: Mapping[str, Any], runs: list[Mapping[str, Any]], key: Key) -> None:
        task, protocol, scale = value["task"], value["protocol"], _scale(value["task"])
        reference, packages = task["reference_scores"], [f"{k} {v}".strip() for k, v in task["packages"].items()]

        def score(entry: Mapping[str, Any], raw: float, episodes: int, final: bool) -> Score:
            stated, success = entry["score"], entry.get("success")
            due = None if scale is None else 100.0 * (raw - scale[0]) / (scale[1] - scale[0])
            return Score(
                suite="",
                dataset=key[0],
                env_id=_text(task["environment"]),
                packages=_text(", ".join(packages), 10 * LABEL),
                reference="" if reference is None else _text(reference["source"]),
                scored_by=task.get("scored_by", "return"),
                algorithm=key[1],
                settings=key[2],
                seed=entry["seed"],
                step=entry["step"],
                episodes=episodes,
                raw=float(raw),
                normalised=due if stated is None else float(stated),
                success=None if success is None else float(success),
                cell="",
                run=where,
                final=final,
            )

        seeds = {run["seed"] for run in runs}
        by_seed: dict[int, list[Score]] = {}
        ends = {(run["seed"], run["step"]) for run in runs}
        for point in value["curve"]:
            raw = point.get("return_mean")
            if raw is None and scale is not None and point["score"] is not None:
                raw = scale[0] + point["score"] / 100.0 * (scale[1] - scale[0])
            if point["seed"] in seeds and raw is not None and (point["seed"], point["step"]) not in ends:
                by_seed.setdefault(point["seed"], []).append(score(point, raw, protocol["episodes"], False))
        for curve in by_seed.values():
            stride = self.reader.stride
            self.reader.scores += [s for i, s in enumerate(curve, start=1) if i % stride == 0]
        for run in runs:
            raw, step = mean_return(run), run["step"]
            final = not run["diverged"] and step >= protocol["steps"] and raw is not None
            if raw is not None:
                count = protocol["episodes"] if run["returns"] is None else len(run["returns"])
                self.reader.scores.append(score(run, raw, count, final))
            if not final and (*key, run["seed"]) not in self.missing:
                self.missing.add((*key, run["seed"]))
                cause = "diverged" if run["diverged"] else f"unfinished: step {step:,} of {protocol['steps']:,}"
                self.reader.missing.append(Missing(*key, run["seed"], where, cause))


def _settings(value: Mapping[str, Any]) -> str:
    """The hash of a document's settings as scores have it: 8 hex digits, which hold the data's checksum too."""
    stated = value["algorithm"]["settings_hash"]
    if value["library"] == "offrl" and re.fullmatch("[0-9a-f]{8}", stated):
        return str(stated)
    return digest({"library": value["library"], "settings": stated, "data": value["dataset"]["checksum"]})


def _place(value: Mapping[str, Any]) -> dict[str, Any]:
    """What must agree where seeds are averaged; None: not known, which agrees with everything."""
    task, protocol = value["task"], value["protocol"]
    reference = task["reference_scores"]
    finished = any(not run["diverged"] and run["step"] >= protocol["steps"] for run in value["runs"])
    return {
        "environment": task["environment"],
        "scored_by": task.get("scored_by", "return"),
        "reference": "" if reference is None else reference["source"],
        "steps": protocol["steps"] if finished else None,
        "max_steps": task["max_steps"],
        "evaluation": protocol["evaluation"],
        "deterministic": protocol["deterministic"],
    }


def _unlike(known: dict[str, Any], conditions: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `conditions` that contradict those that are known; where none does, `known` learns the others."""
    differing = {k: v for k, v in conditions.items() if v is not None and known.get(k) is not None and known[k] != v}
    if not differing:
        known |= {k: v for k, v in conditions.items() if known.get(k) is None}
    return differing


def _scale(task: Mapping[str, Any]) -> tuple[float, float] | None:
    """The returns that score 0 and 100; None where scores are of something else, or they are not stated."""
    reference = task["reference_scores"]
    if reference is None or reference["min"] is None or task.get("scored_by", "return") != "return":
        return None
    return reference["min"], reference["max"]


def _text(text: Any, most: int = LABEL) -> str:
    """A stranger's text as tables show it: one line, and not longer than a page is wide."""
    line = one_line(str(text))
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _value(value: Any) -> Any:
    """A setting; as text where it is long."""
    if isinstance(value, str):
        return _text(value)
    text = repr(value)
    return value if len(text) <= LABEL and text.isprintable() else _text(text)
