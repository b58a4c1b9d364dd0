"""`offrl data inspect` for texts: episodes, turns, texts and their lengths, an example, and what is likely to cause
trouble.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from offrl.data.dataset import Dataset
from offrl.data.raw.checks import Fault
from offrl.data.text.files import TextFile
from offrl.data.tools.findings import Findings, aligned, scores_of

FREQUENT = 10  # actions shown
LONG = 20_000  # characters of a text above which it is pointed out: some 5,000 tokens
WIDTH = 100  # characters of a text shown
TURNS = 6  # of the example


@dataclass(frozen=True)
class Texts:
    """One kind of text, by the characters that a text has."""

    name: str
    count: int
    unique: int
    lengths: np.ndarray  # [count] int64


@dataclass(frozen=True, kw_only=True)
class TextReport(Findings):
    """The findings of `inspect_dataset` about texts, whose `lengths` are numbers of turns."""

    turns: int
    returns: np.ndarray
    terminated: int
    truncated: int
    unfinished: int  # episodes that neither ended nor were cut off
    texts: list[Texts]
    frequent: list[tuple[str, int]]  # the most frequent actions, with how often each occurs

    kind: ClassVar[str] = ", texts"
    refusal: ClassVar[str] = "episode(s) are faulty and not counted above"

    def counts(self) -> str:
        kinds = [f"{self.terminated:,} terminated", f"{self.truncated:,} cut off"]
        kinds += [f"{self.unfinished:,} unfinished"] if self.unfinished else []
        return f"  {self.turns:,} turns, {len(self.returns):,} episodes ({', '.join(kinds)})"

    def tables(self) -> list[str]:
        total, width = self.texts[1].count, len(f"{self.frequent[0][1]:,}")
        frequent = [
            f"    {count:>{width},}  {100 * count / total:4.1f}%  {shown(text)}" for text, count in self.frequent
        ]
        return [*_table(self.texts), "", "  most frequent actions", *frequent]


def shown(text: str) -> str:
    """A text on one line, in quotes, cut where it is long; line breaks and the like are written as in JSON."""
    cut = text[:WIDTH].translate(_ESCAPES)
    return f'"{cut}"' + (f" ... ({len(text):,} characters)" if len(text) > WIDTH else "")


_ESCAPES = {ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", ord('"'): '\\"', ord("\\"): "\\\\"}
_ESCAPES |= {
    code: f"\\u{code:04x}" for code in (*range(32), *range(127, 160), 0x2028, 0x2029, 0xFEFF) if code not in _ESCAPES
}


def text_report(file: TextFile, path: str) -> TextReport:
    """The report on texts that were read with their faulty episodes left out."""
    dataset, task = file.dataset, file.dataset.spec.task
    columns = {k: c.numpy() for k, c in dataset.columns.items()}
    last = dataset.episode_end.numpy() - 1
    finals = columns["next_observations"][last][columns["successor_known"][last]]
    length = np.array([len(s) for s in dataset.strings], np.int64)
    kinds = (("observations", columns["observations"]), ("actions", columns["actions"]), ("final observations", finals))
    terminated = columns["terminations"][last]
    complete = dataset.complete.numpy()
    values, counts = np.unique(columns["actions"], return_counts=True)
    best = np.argsort(-counts, kind="stable")[:FREQUENT]
    returns = dataset.raw_returns.numpy()
    faults = [Fault("episode", "corrupting", text) for text in file.faults] + _troubles(dataset, columns, length)
    return TextReport(
        name=dataset.spec.name,
        source=" ".join(w for w in (dataset.spec.source, dataset.spec.version) if w),
        path=path,
        turns=len(dataset),
        returns=returns,
        lengths=dataset.episode_lengths().numpy(),
        terminated=int(terminated.sum()),
        truncated=int((~terminated & complete).sum()),
        unfinished=int((~complete).sum()),
        texts=[Texts(name, len(v), len(np.unique(v)), length[v]) for name, v in kinds],
        frequent=[(dataset.strings[values[k]], int(counts[k])) for k in best],
        example=_example(dataset, columns),
        faults=faults,
        notes=list(dataset.notes),
        environment=""
        if task is None
        else (task.env_id or task.name).rpartition(":")[2] + (f": {task.note}" if task.note else ""),
        **scores_of(task, returns),
    )


def _example(dataset: Dataset, columns: dict[str, np.ndarray]) -> list[str]:
    """The episode of median return, the first of those: its first turns, and its end."""
    returns = dataset.raw_returns.numpy()
    number = int(np.argmin(np.abs(returns - np.sort(returns)[(len(returns) - 1) // 2])))
    start, end = int(dataset.episode_start[number]), int(dataset.episode_end[number])
    lines = [
        f"  example: episode {number}, of median return ({returns[number]:g}), {end - start} "
        f"turn{'s' if end - start > 1 else ''}"
    ]
    for row in range(start, end):
        if TURNS - 1 <= row - start < end - start - 1:
            if row - start == TURNS - 1:
                remaining = end - start - TURNS
                lines.append(f"    ... {remaining} more turn{'s' if remaining > 1 else ''} ...")
            continue
        lines.append(f"    observation  {shown(dataset.strings[columns['observations'][row]])}")
        lines.append(
            f"    action       {shown(dataset.strings[columns['actions'][row]])}  (reward {columns['rewards'][row]:g})"
        )
    known = columns["successor_known"][end - 1]
    ending = (
        "terminated" if columns["terminations"][end - 1] else "cut off" if dataset.complete[number] else "unfinished"
    )
    lines.append(
        f"    {ending}     "[:17]
        + (shown(dataset.strings[columns["next_observations"][end - 1]]) if known else "final observation not known")
    )
    return lines


def _troubles(dataset: Dataset, columns: dict[str, np.ndarray], length: np.ndarray) -> list[Fault]:
    """Properties of sound data that are likely to be mistakes, or to make training go another way than meant."""
    faults: list[Fault] = []

    def add(kind: str, rows: np.ndarray, message: str, cure: str = "") -> None:
        """A trouble of some rows; `message` has a place for their number."""
        if len(rows):
            row = int(rows[0])
            episode = int(np.searchsorted(dataset.episode_end.numpy(), row, side="right"))
            faults.append(Fault(kind, "warning", message.format(f"{len(rows):,}"), episode, row, cure))

    def where(column: str, holds: np.ndarray) -> np.ndarray:
        return np.flatnonzero(holds[columns[column]])

    strings, actions = dataset.strings, columns["actions"]
    newline = np.array([s.endswith("\n") for s in strings])
    ends = newline[actions]
    if ends.any() and not ends.all():
        usual = 2 * ends.sum() >= len(ends)
        message = f"{{}} of {len(ends):,} actions end {'without' if usual else 'with'} a newline, unlike the others"
        cure = "let all end with one, or none: it is what tells a policy that its action is over"
        add("newline", np.flatnonzero(ends != usual), message, cure)
    inner = where("actions", np.array(["\n" in s[:-1] for s in strings]))
    if ends.any():
        add("newline", inner, "{} actions have a newline inside: a policy that stops at a newline cannot say them")
    add("empty", where("actions", length == 0), "{} actions are empty texts")
    add("empty", where("observations", length == 0), "{} observations are empty texts")
    marks = np.array([s.startswith("\ufeff") for s in strings])
    for column in ("observations", "actions"):
        message = f"{{}} {column} begin with a byte-order mark (U+FEFF)"
        add("mark", where(column, marks), message, "save their source as UTF-8 without one")
        longest = int(length[columns[column]].max())
        message = f"{{}} {column} have more than {LONG:,} characters, one {longest:,}"
        add(
            "long",
            where(column, length > LONG),
            message,
            "a language model sees no more of them than its context holds",
        )
    last = dataset.episode_end.numpy() - 1
    timeouts = last[~columns["terminations"][last]]
    message = "{} episodes were cut off and have no final_obs: value learning leaves their last turns out"
    add("final", timeouts[~columns["successor_known"][timeouts]], message)
    add(
        "unfinished",
        last[~dataset.complete.numpy()],
        "{} episodes are neither terminated nor truncated: they are taken for cut off",
    )
    rewards, returns = columns["rewards"], dataset.raw_returns.numpy()
    if len(np.unique(rewards)) == 1:
        message = f"every reward is {rewards[0]:g}: only the lengths of episodes tell them apart"
        faults.append(Fault("rewards", "warning", message))
    if len(returns) > 1 and np.ptp(returns) == 0:
        message = f"all {len(returns):,} episodes have the same return, {returns[0]:g}: none is better than another"
        faults.append(Fault("rewards", "warning", message))
    repeats = _repeats(dataset, columns)
    if repeats:
        later, earlier = repeats[0]
        verb = "episodes repeat" if len(repeats) > 1 else "episode repeats"
        message = f"{len(repeats):,} {verb} an earlier one, episode {later} the first (of {earlier})"
        faults.append(Fault("duplicate", "warning", message))
    if len(np.unique(actions)) == 1:
        faults.append(
            Fault("actions", "warning", f"every action is {shown(strings[actions[0]])}: there is no other to prefer")
        )
    return faults


def _repeats(dataset: Dataset, columns: dict[str, np.ndarray]) -> list[tuple[int, int]]:
    """(episode, the earlier one that it repeats): the same turns."""
    numbers: dict[bytes, int] = {}
    repeats = []
    for number, (start, end) in enumerate(dataset.spans()):
        key = b"".join(columns[k][start:end].tobytes() for k in ("observations", "actions", "rewards"))
        earlier = numbers.setdefault(key, number)
        if earlier != number:
            repeats.append((number, earlier))
    return repeats


def _table(texts: list[Texts]) -> list[str]:
    head = ("texts", "number", "different", "shortest", "median", "mean", "longest")
    rows = [head]
    for kind in (k for k in texts if k.count):
        n = kind.lengths
        cells = (
            f"{kind.count:,}",
            f"{kind.unique:,}",
            f"{n.min():,}",
            f"{np.median(n):,.0f}",
            f"{n.mean():,.1f}",
            f"{n.max():,}",
        )
        rows.append((kind.name, *cells))
    title, *lines = aligned(rows, 1)
    return [title + "  (characters)", *lines]
