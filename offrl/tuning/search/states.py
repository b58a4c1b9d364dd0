"""What the files in `state/` of a tune must hold before anything is made of them: a stranger may have written the
folder.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from offrl.settings.kinds import misfit
from offrl.tuning.search.space import Space, rounded

_POLICIES = {"setting": str, "seed": int}
# by the first word of a stage's name: the entries that are used, and their types
NEEDED: dict[str, dict[str, Any]] = {
    "bracket": {"settings": dict[str, list[Any]]},
    "judged": {"methods": list[str], "policies": list[dict[str, Any]]},
    "kept": {"settings": dict[str, str]},
    "chosen": {"setting": str, "why": str, "order": list[str], "members": list[str], "vetoed": dict[str, str],
               "overruled": dict[str, str], "unsafe": dict[str, str], "cost": list[float] | None,
               "reference": float | None},
    "played": {"setting": str, "why": str, "episodes": int},
    "truth": {"environment": str, "episodes": int, "normalised": bool, "policies": list[dict[str, Any]]},
    "retrained": {"rows": list[dict[str, Any]]},
}  # fmt: skip
# of the rows in their lists
ROWS: dict[str, dict[str, Any]] = {
    "judged": {**_POLICIES, "distance": float | None, "exploded": str},
    "truth": {**_POLICIES, "returns": list[float], "score": float | None},
    "retrained": {"return_mean": float | None, "score": float | None},
}
ROW_LISTS = {"judged": "policies", "truth": "policies", "retrained": "rows"}


def fault(stage: str, record: Mapping[str, Any], settings: Collection[str], judges: Collection[str] = ()) -> str:
    """What is wrong with what the file of a stage holds, in words; "" where it is sound.

    settings: those that it may name. judges: the methods that a judgement is by, in their order.
    """
    kind = stage.partition("-")[0]
    if text := _misfit(record, NEEDED.get(kind, {}), ""):
        return text
    for i, row in enumerate(record[ROW_LISTS[kind]] if kind in ROWS else ()):
        if text := _misfit(row, ROWS[kind], f"row {i}: ", () if kind != "retrained" else ("score", "return_mean")):
            return text
        for method in (*record["methods"], *({"cost"} & row.keys())) if kind == "judged" else ():
            wrong = _misfit(row, {method: float | None}, f"row {i}: ")
            draws = misfit(row.get(f"{method}_draws"), list[float | None] | None, f"row {i}: {method}_draws")
            if text := wrong or draws or misfit(row.get(f"{method}_sd"), float | None, f"row {i}: {method}_sd"):
                return text
    if kind == "judged" and list(record["methods"]) != list(judges):
        return f"it is by {', '.join(record['methods'])}, and the tune is judged by {', '.join(judges)}"
    names = {
        "kept": lambda: list(record["settings"]),
        "chosen": lambda: [
            record["setting"],
            *record["order"],
            *record["members"],
            *record["vetoed"],
            *record["overruled"],
            *record["unsafe"],
        ],
        "played": lambda: [record["setting"]],
    }.get(kind, list)()
    if kind == "kept" and not names:
        return "no setting goes on"
    return next(
        (f"it names the setting {str(n)[:60]}, which this stage does not have" for n in names if n not in settings), ""
    )


def unknown_proposal(proposals: Mapping[str, Any], spaces: Mapping[str, Space]) -> str:
    """What the proposals in a file hold that no space has, in words; "" where there is none. Settings can name code."""
    for name, entry in proposals.items():
        algo, values = entry if len(entry) == 2 else ("", {})
        space = spaces.get(algo) if isinstance(algo, str) else None
        if space is None or not isinstance(values, Mapping) or {d.name for d in space.dimensions} != set(values):
            return f"{name} holds other settings than are searched"
        for d in space.dimensions:
            value = values[d.name]
            listed = [*map(_plain, d.values), _plain(space.default[d.name])]
            number = isinstance(value, int | float) and not isinstance(value, bool) and not d.values
            if _plain(value) not in listed and not (
                number and min(d.low, rounded(d.low)) <= value <= max(d.high, rounded(d.high))
            ):
                return f"{name} has {d.name}={str(value)[:60]}, which is not among what is searched, {d.text()}"
    return ""


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _misfit(record: Mapping[str, Any], needed: Mapping[str, Any], where: str, optional: Collection[str] = ()) -> str:
    for name, kind in needed.items():
        if name not in record and name not in optional:
            return f"{where}'{name}' is missing"
        if name in record and (text := misfit(record[name], kind, f"{where}{name}")):
            return text
    return ""
