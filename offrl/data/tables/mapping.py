"""Which columns of a table are observations, actions, rewards and so on: what `dataset.fields` says, and usual names
for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from offrl.data.tables.names import LETTERS, MEANINGS, REQUIRED, SINGLE, STEMS, USUAL, VECTORS, meaning
from offrl.data.tables.tabular import Tabular
from offrl.errors import UserError, nearest

# Words in other names, for the command that an error proposes.
HINTS = {
    "rewards": r"reward|score|profit|kpi|utility|objective",
    "costs": r"cost|violation",
    "actions": r"action|control|setpoint|set_point|command|cmd|valve|dose|heater|heating|cooling|power_level|motor|torque|pump"  # noqa: E501
    # FV-101, TIC101.OUT, u
    r"|opening|throttle|manipulated|(^|[._ -])([ftlhx]|[ftlp]c)v[._ -]?\d|\d[._](out|op|mv)$|^u_?\d*$",
    "episode_ids": r"episode|batch|trial|session|trajectory|(^|_)(run|day|patient|user)(_?id)?$",
    "time": r"time|date|stamp",
}
SHOWN, FEW = 40, 12  # columns that a message lists, and a note
UNNAMED = ("Unnamed:", "__index_level_")  # what pandas calls an index without a name
SEPARATOR = re.compile(r"[_.\-\[ ]?(\d+)\]?$")


@dataclass(frozen=True)
class Term:
    """A column of the table in one of ours: its values times `scale` plus `offset`."""

    column: str
    scale: float = 1.0
    offset: float = 0.0

    @property
    def plain(self) -> bool:
        """Whether values stay as they are."""
        return self.scale == 1.0 and self.offset == 0.0


Chosen = dict[str, tuple[Term, ...]]


def used_columns(chosen: Chosen) -> set[str]:
    """The columns of the table that any of ours is made of."""
    return {part.column for parts in chosen.values() for part in parts}


def choose(
    names: Sequence[str],
    fields: Mapping[str, Any],
    where: str,
    optional: Collection[str] = (),
    example: str = "",
    kinds: Callable[[], Mapping[str, str]] = dict,
) -> Chosen:
    """Our column -> columns of the table `names`.

    fields: as `dataset.fields`: a name, a glob, {column, scale, offset}, or a list of them. optional: columns that may
    be missing. example: the data in the command that an error proposes. kinds: what columns hold, number, text or time,
    for that command. Raises UserError, in one line with that command, where required ones are not clear.
    """
    entries = {column: entry for column, entry in fields.items() if entry != "*"}
    chosen: Chosen = {
        c: _parts(c, entry, names, where)
        for c, entry in entries.items()
        if not (c in optional and isinstance(entry, str) and entry not in names)
    }
    used = used_columns(chosen)
    for column in (*SINGLE, *VECTORS):
        if column not in fields and (free := usual_columns(column, [n for n in names if n not in used])):
            chosen[column] = tuple(map(Term, free))
            used.update(free)
    for column in (c for c, entry in fields.items() if entry == "*"):
        chosen[column] = tuple(Term(n) for n in names if n and n not in used and not n.startswith(UNNAMED))
    missing = [c for c in REQUIRED if not chosen.get(c) and c not in optional]
    if missing:
        raise UserError(f"{where}: {_proposal(names, chosen, missing, example or where, kinds())}")
    for column in SINGLE:
        if len(chosen.get(column, ())) > 1:
            listing = ", ".join(p.column for p in chosen[column])
            raise UserError(
                f"{where}: dataset.fields.{column} takes one column, and {listing} are {len(chosen[column])}"
            )
    return chosen


def refuse_unread(names: Sequence[str], chosen: Chosen, fields: Mapping[str, Any], where: str) -> None:
    """Raises UserError where a column that nothing takes means ends, episodes, times or costs by its name, unless
    `fields` says which column is that."""
    used = used_columns(chosen)
    for name in (n for n in names if n not in used):
        column = meaning(name)
        if (
            not column
            or column in fields
            or (column == "episode_starts" and {"episode_ids", "episode_ends"} & chosen.keys())
        ):
            continue
        problem = f"nothing takes the column '{name}', which holds {MEANINGS[column]} by its name"
        if column in chosen:
            taken = chosen[column][0].column
            setting = f"dataset.fields.{column}"
            cure = (
                f"'{taken}' is taken for them. Leave one of them out, or say which it is: {setting}={taken} or "
                f"{setting}={name}"
            )
        elif column == "episode_starts":
            cure = f"write numpy.append({name}[1:], True), which marks the last rows, as episode_ends"
        else:
            cure = f"dataset.fields.costs={name} makes it what a limit bounds"
            cure += f', "dataset.fields.rewards=[{{column:{name},scale:-1}}]" the reward'
        raise UserError(f"{where}: {problem}: {cure}")


def left_over(table: Tabular, chosen: Chosen, guessed: Sequence[str]) -> str:
    """What to say of columns that nothing takes; "" where there are none. guessed: vectors that `dataset.fields` does
    not name.
    """
    used = used_columns(chosen)
    known = (*UNNAMED, *table.own_names)
    free = [
        n for n in table.names if n and n not in used and not n.startswith(known) and meaning(n) != "episode_starts"
    ]
    if not free:
        return ""
    alone = {c: chosen[c][0].column for c in guessed if len(chosen.get(c, ())) == 1 and c != "next_observations"}
    single = " and ".join(
        f"{name} alone is {c}, by its name"
        for c, name in alone.items()
        if name.lower() not in ("action", "actions", "observation", "observations")
    )
    free_ones = f"column{'s' if len(free) > 1 else ''} {listing(free, FEW)}{f' ({single})' if single else ''}"
    return f"nothing takes the {free_ones}: the policy sees only what dataset.fields.observations=[...] names"


def _parts(column: str, entry: Any, names: Sequence[str], where: str) -> tuple[Term, ...]:
    """The columns that an entry of `dataset.fields` names."""
    setting = f"dataset.fields.{column}"
    parts: list[Term] = []
    for item in entry if isinstance(entry, list | tuple) else [entry]:
        scale = offset = None
        text = item
        if isinstance(item, Mapping):
            if unknown := [str(k) for k in item if k not in ("column", "scale", "offset")]:
                raise UserError(
                    f"{setting} has '{unknown[0]}'; an entry is a name, a pattern, or {{column: NAME, scale: 0.1, "
                    f"offset: 0}}"
                )
            text, scale, offset = item.get("column"), item.get("scale"), item.get("offset")
        for key, value in (("scale", scale), ("offset", offset)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise UserError(f"{setting}: {key}={value} of column {text} is no number")
        if text is None or isinstance(text, list | tuple):
            raise UserError(
                f"{setting}={entry}: an entry is a name, a pattern such as obs_*, or {{column: NAME, scale: 0.1, "
                f"offset: 0}}"
            )
        for name in _named(str(text), names, where, setting):
            parts.append(Term(name, 1.0 if scale is None else float(scale), 0.0 if offset is None else float(offset)))
    columns = [part.column for part in parts]
    if repeated := [name for i, name in enumerate(columns) if name in columns[:i]]:
        raise UserError(f"{setting} names the column '{repeated[0]}' twice")
    if not parts:
        raise UserError(f"{setting}=[] names no column")
    return tuple(parts)


def _named(text: str, names: Sequence[str], where: str, setting: str) -> list[str]:
    """The columns called `text`, or that fit it as a pattern, or are its numbered series."""
    if text in names:
        return [text]
    if any(c in text for c in "*?["):
        matches = by_number([n for n in names if fnmatchcase(n, text)])
    else:
        matches = by_number([n for n in names if n.startswith(text) and SEPARATOR.fullmatch(n[len(text) :])])
        if matches and _gap(matches):
            raise UserError(
                f"{where} has no column '{text}' ({setting}), and of its numbered ones, {listing(matches)}, some are "
                f"missing; if these are all there are to be, name them, or write {setting}={text}*"
            )
    if not matches:
        raise UserError(f"{where} has no column '{text}' ({setting}).{nearest(text, names)} It has: {listing(names)}")
    return matches


def by_number(names: list[str]) -> list[str]:
    """Names that end in numbers in the order of these, others as they stand."""
    numbers = dict(zip(names, _numbers(names), strict=False))
    return sorted(names, key=numbers.__getitem__) if numbers else names


def usual_columns(column: str, names: Sequence[str]) -> list[str]:
    """The columns that are by their names what we call `column`; [] where none is."""
    lower = {n.lower().strip(): n for n in reversed(names)}
    for word in USUAL.get(column, ()):
        if word in lower:
            return [lower[word]]
    for stem in STEMS.get(column, ()):
        if stem in lower:
            return [lower[stem]]
        if matches := [n for n in names if re.match(rf"{stem}[_.\-\[ ]?\d|{stem}[_.]\w", n.lower())]:
            return [] if _gap(matches) else by_number(matches)
    for letter in LETTERS.get(column, ()):
        if matches := [n for n in names if re.fullmatch(rf"{letter}_?\d+", n.lower())]:
            return [] if _gap(matches) else by_number(matches)
    return []


def _gap(names: Sequence[str]) -> bool:
    """Whether a series of numbered columns misses one: it may have been lost, so that it must be named."""
    numbers = sorted(_numbers(names))
    return bool(numbers) and numbers != list(range(min(numbers[0], 1), min(numbers[0], 1) + len(numbers)))


def _numbers(names: Sequence[str]) -> list[int]:
    """The numbers that names end in; [] where one ends in none."""
    ends = [SEPARATOR.search(n) for n in names]
    return [int(e[1]) for e in ends if e] if all(ends) else []


def listing(names: Sequence[str], most: int = SHOWN) -> str:
    """Names of columns for a message."""
    shown = [n or "(no name)" for n in names[:most]]
    return ", ".join(shown) + (f" and {len(names) - most} more" if len(names) > most else "")


def _proposal(
    names: Sequence[str], chosen: Chosen, missing: Sequence[str], example: str, kinds: Mapping[str, str]
) -> str:
    """Which columns there are, what is not known of them, and a command to copy."""
    used = used_columns(chosen)
    free = [n for n in names if n and n not in used and not n.startswith(UNNAMED)]
    guesses: dict[str, list[str]] = {}
    for column in ("rewards", "costs", "time", "episode_ids", "actions"):
        if column not in chosen:
            hits = [n for n in free if re.search(HINTS[column], n.lower())]
            if column == "time":
                hits = [n for n in free if kinds.get(n) == "time"] or [n for n in hits if kinds.get(n) != "text"]
            elif column == "episode_ids":
                hits = hits or [
                    n for n in free if kinds.get(n) == "text" and not re.search(HINTS["actions"], n.lower())
                ]
            elif column in ("rewards", "costs"):
                hits = [n for n in hits if kinds.get(n, "number") == "number"]
            hits = hits if column == "actions" else hits[:1]
            guesses[column] = hits
            free = [n for n in free if n not in hits]
    if "observations" in missing:
        guesses["observations"] = [n for n in free if kinds.get(n, "number") == "number"]
    # an action may be among them
    blind = "observations" in missing and not guesses.get("actions", chosen.get("actions"))
    if blind and len(guesses["observations"]) == len(free) > 1:
        guesses["observations"], blind = ["*"], False  # less what is named as the action
    arguments = []
    negative = ""
    python = example.startswith("offrl.")  # of a DataFrame: arguments
    costs = guesses.get("costs", used_columns({"costs": chosen.get("costs", ())}))
    for cost in costs if "rewards" in missing and not guesses["rewards"] else ():
        scaled = (
            f"rewards={ {'column': cost, 'scale': -1} }"
            if python
            else f'"dataset.fields.rewards=[{{column:{_quoted(cost)},scale:-1}}]"'
        )
        negative = (
            f" ('{cost}' is taken for costs, which a limit bounds; where less of it is the aim, say {scaled}, without "
            "the scale where it is negative already)"
        )
    for column in ("observations", "actions", "rewards", "costs", "episode_ids", "time"):
        hits = guesses.get(column, [])
        if column in missing or hits:
            text = ",".join(n if n == "*" else _quoted(n) for n in hits[:SHOWN]) or "COLUMN"
            if python:
                arguments.append(f"{column}={hits[:SHOWN] if len(hits) > 1 else hits[0] if hits else 'COLUMN'!r}")
                continue
            arguments.append(f'"dataset.fields.{column}={f"[{text}]" if len(hits) > 1 else text}"')
    unclear = " and ".join([", ".join(missing[:-1]), missing[-1]] if len(missing) > 1 else missing)
    command = f"{example}{', '.join(arguments)})" if python else f"offrl data inspect {example} {' '.join(arguments)}"
    if missing == ["rewards"] and "terminals" in names:
        negative += ", or dataset.format=ogbench for goal data that need none"
    return (
        f"its columns are {listing(names)}; which of them are {unclear} is not clear from their names. Say it, and "
        f"look at the result, perhaps{negative}: "
        f"{command}{', with COLUMN taken out of the observations' if blind else ''}"
    )


def seen_actions(chosen: Chosen) -> str:
    """What to say of columns that are actions and observations; "" where there are none."""
    actions = {part.column for part in chosen.get("actions", ())}
    both = [part.column for part in chosen.get("observations", ()) if part.column in actions]
    return (
        f"among the observations are actions ({listing(both, FEW)}): the policy sees what it is to choose, and repeats "
        "it"
        if both
        else ""
    )


def _quoted(name: str) -> str:
    """A name as an element of a list on the command line."""
    return name if re.fullmatch(r"[A-Za-z_][\w.-]*", name) else "'" + name.replace("'", "\\'") + "'"
