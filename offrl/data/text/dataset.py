"""Text data: episodes of texts as a `Dataset` of indices into its unique texts, and back.

An episode is a mapping, in files a JSON object a line:
    {"turns": [{"obs": str, "action": str, "reward": float}, ...], "final_obs": str | null,
     "terminated": bool, "truncated": bool, "meta": {...}}

Termination and time-out stay apart: a learner bootstraps at the second only.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.raw import ends_of
from offrl.errors import UserError, nearest
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.task import Task

TEXTS = ("observations", "actions", "next_observations")  # the columns that hold indices of texts
# settings of `DatasetConfig` that text data refuse
NUMBERS_ONLY = (
    "fields",
    "observation_keys",
    "action_low",
    "action_high",
    "labelled_fraction",
    "action_free",
    "expert",
    "reward_labels",
    "cost_labels",
    "clip_actions",
    "action_margin",
    "normalize_observations",
    "augment",
)
LARGEST = float(np.finfo(np.float32).max)
_KINDS = {
    str: "a text",
    bool: "true or false",
    list: "a list",
    dict: "an object",
    float: "a number",
    int: "a number",
    type(None): "null",
}


def from_episodes(
    episodes: Iterable[Mapping[str, Any]],
    *,
    name: str,
    task: Task | None = None,
    where: str = "",
    source: str = "arrays",
) -> Dataset:
    """Episodes in the canonical form as a dataset with one row per turn.

    `meta`, which may be left out, is kept for `to_episodes`; other keys are not. The successor of an episode's last
    turn is `final_obs`; where that is None it is unknown. An episode that neither ended nor was cut off is one that the
    data stop inside (`complete` False). `where` names the data in messages (default: `name`). Raises UserError, naming
    the episode and what is wrong with it.
    """
    builder = TextBuilder(name, task, where or name, source)
    for number, episode in enumerate(episodes):
        builder.add(episode, f"episode {number}")
    return builder.finish()


def to_episodes(dataset: Dataset) -> Iterator[dict[str, Any]]:
    """The episodes of a text dataset in the canonical form; the inverse of `from_episodes`.

    Rewards are those of the columns, as transforms left them. Raises UserError for data that are not text.
    """
    if not dataset.spec.text:
        raise UserError(f"{dataset.spec.name}: the data hold no texts")
    strings, columns = dataset.strings, {k: c.cpu().numpy() for k, c in dataset.columns.items()}
    obs, actions, successors = (columns[k].tolist() for k in ("observations", "actions", "next_observations"))
    # the shortest decimal that is this float32: 0.1, not 0.10000000149011612
    rewards = [float(str(r)) for r in columns["rewards"]]
    for number, (start, end) in enumerate(dataset.spans()):
        last = end - 1
        terminated = bool(columns["terminations"][last])
        yield {
            "turns": [
                {"obs": strings[obs[i]], "action": strings[actions[i]], "reward": rewards[i]} for i in range(start, end)
            ],
            "final_obs": strings[successors[last]] if columns["successor_known"][last] else None,
            "terminated": terminated,
            "truncated": not terminated and bool(dataset.complete[number]),
            "meta": json.loads(dataset.metas[int(columns["meta"][start])]) if "meta" in columns else {},
        }


class TextBuilder:
    """Collects episodes one after the other, over one table of unique texts."""

    def __init__(self, name: str, task: Task | None, where: str, source: str) -> None:
        self.name, self.task, self.where, self.source, self.version = name, task, where, source, ""
        self._index: dict[str, int] = {}
        self._metas: dict[str, int] = {}
        self._columns = {k: array("q") for k in (*TEXTS, "meta")}
        self._rewards, self._lengths = array("d"), array("q")
        self._ends: list[tuple[bool, bool, bool]] = []  # terminated, truncated, final observation known

    def __len__(self) -> int:
        """Episodes so far."""
        return len(self._lengths)

    def add(self, episode: Mapping[str, Any], label: str) -> None:
        """Check and keep an episode; `label` ("line 3") names it in messages. Raises UserError."""
        where = f"{self.where}: {label}"
        if not isinstance(episode, Mapping):
            raise UserError(
                f"{where} is {_kind(episode)}, not an object with turns, final_obs, terminated and truncated"
            )
        turns = self._get(episode, "turns", list, where)
        if not turns:
            raise UserError(f"{where} has no turns: an episode needs one at least; leave it out")
        terminated, truncated = (self._get(episode, k, bool, where) for k in ("terminated", "truncated"))
        if terminated and truncated:
            raise UserError(
                f"{where} is both terminated and truncated; a learner must know which: set one of them to false"
            )
        if "final_obs" not in episode:
            raise UserError(
                f"{where} has no 'final_obs': the observation after the last action; write null where it is not known"
            )
        final = episode["final_obs"]
        if final is not None and not isinstance(final, str):
            raise UserError(f"{where}: 'final_obs' is {_kind(final)}, not a text or null")
        meta = episode.get("meta")
        if meta is not None and not isinstance(meta, Mapping):
            raise UserError(f"{where}: 'meta' is {_kind(meta)}, not an object")
        texts: list[int] = []
        actions: list[int] = []
        rewards: list[float] = []
        for number, turn in enumerate(turns):
            try:
                obs, action, reward = turn["obs"], turn["action"], turn["reward"]
                sound = (
                    type(obs) is type(action) is str and type(reward) in (float, int) and -LARGEST <= reward <= LARGEST
                )
            except (KeyError, TypeError, IndexError):
                sound = False
            if not sound:
                obs, action, reward = self._turn(turn, f"{where}, turn {number}")
            texts.append(self._intern(obs, where, number, "obs"))
            actions.append(self._intern(action, where, number, "action"))
            rewards.append(reward)
        after = texts[-1] if final is None else self._intern(final, where, None, "final_obs")
        try:
            encoded = json.dumps(meta or {}, sort_keys=True)
        except (TypeError, ValueError) as error:
            raise UserError(f"{where}: 'meta' cannot be written as JSON ({error})") from None
        # Nothing is kept before all of it is checked: a caller may leave out an episode that raised, and go on.
        self._columns["observations"].extend(texts)
        self._columns["actions"].extend(actions)
        self._columns["next_observations"].extend([*texts[1:], after])
        self._columns["meta"].extend([self._metas.setdefault(encoded, len(self._metas))] * len(turns))
        self._rewards.extend(rewards)
        self._lengths.append(len(turns))
        self._ends.append((terminated, truncated, final is not None))

    def finish(self) -> Dataset:
        """The dataset. Raises UserError when there is no episode."""
        if not self._lengths:
            raise UserError(f"{self.where}: there are no episodes")
        columns = {k: np.array(v, np.int64) for k, v in self._columns.items()}
        lengths = np.array(self._lengths, np.int64)
        ends = np.cumsum(lengths)
        last = ends_of(lengths)
        terminated, truncated, known = (np.array(v, bool) for v in zip(*self._ends, strict=True))
        terminations = last & np.repeat(terminated, lengths)
        rewards = np.array(self._rewards, np.float64).astype(np.float32)
        ordered: dict[str, np.ndarray] = {
            "observations": columns["observations"],
            "actions": columns["actions"],
            "rewards": rewards,
            "terminations": terminations,
            "truncations": last & ~terminations,
            "next_observations": columns["next_observations"],
            "successor_known": ~last | np.repeat(known, lengths),
        }
        metas: tuple[str, ...] = ()
        if set(self._metas) != {"{}"}:
            ordered["meta"], metas = columns["meta"], tuple(self._metas)
        spec = DataSpec((), 1, name=self.name, source=self.source, version=self.version, task=self.task, text=True)
        result = Dataset(
            columns={k: torch.from_numpy(v) for k, v in ordered.items()},
            episode_start=torch.from_numpy(ends - lengths),
            episode_end=torch.from_numpy(ends),
            spec=spec,
            raw_returns=torch.from_numpy(np.add.reduceat(rewards, ends - lengths, dtype=np.float64)),
            complete=torch.from_numpy(terminated | truncated),
            strings=tuple(self._index),
            metas=metas,
        )
        return replace(result, fingerprint=fingerprint(result))

    @staticmethod
    def _get(values: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
        if key not in values:
            names = [str(k) for k in values]
            raise UserError(f"{where} has no '{key}'.{nearest(key, names)} It has: {', '.join(names) or 'nothing'}")
        value = values[key]
        if kind is float:
            right = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
        elif kind is bool:
            right = isinstance(value, bool | np.bool_)
        elif kind is list:
            right = isinstance(value, Sequence) and not isinstance(value, str | bytes)
        else:
            right = isinstance(value, kind)
        if not right:
            raise UserError(f"{where}: '{key}' is {_kind(value)}, not {_KINDS[kind]}")
        return bool(value) if kind is bool else value

    def _turn(self, turn: Any, where: str) -> tuple[str, str, float]:
        """A turn that is not plainly sound: its values, or a UserError that says what is wrong."""
        if not isinstance(turn, Mapping):
            raise UserError(f"{where} is {_kind(turn)}, not an object with obs, action and reward")
        obs, action, reward = (
            self._get(turn, key, kind, where) for key, kind in (("obs", str), ("action", str), ("reward", float))
        )
        if not -LARGEST <= reward <= LARGEST:  # which NaN is not, either
            raise UserError(f"{where}: the reward is {str(reward)[:30]}, which is no finite float32 number")
        return str(obs), str(action), float(reward)

    def _intern(self, text: str, where: str, turn: int | None, key: str) -> int:
        number = self._index.get(text)
        if number is None:
            try:
                text.encode()
            except UnicodeEncodeError as error:
                at = where if turn is None else f"{where}, turn {turn}"
                broken = text[error.start : error.end].encode("unicode_escape").decode()
                raise UserError(
                    f"{at}: '{key}' holds half a character ({broken}, a lone surrogate) at {error.start}"
                ) from None
            number = self._index[text] = len(self._index)
        return number


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def refuse_settings(config: DatasetConfig, name: str) -> None:
    """Raises UserError for a setting that asks for what only numbers allow."""
    if changed := config.changed(NUMBERS_ONLY):
        raise UserError(
            f"{name} holds texts, and dataset.{changed[0]} is for numbers: leave it out, and take an algorithm for "
            "texts, such as lm_bc or ilql (others set it by themselves)"
        )
    if config.weighting == "advantage":
        raise UserError(
            f"dataset.weighting=advantage fits values to observations of numbers; {name} holds texts: use return or top"
        )


def fingerprint(dataset: Dataset) -> str:
    """sha256 of the turns and ends of text data; it does not depend on the order of `strings`, nor on `metas`."""
    columns = {k: c.cpu().numpy() for k, c in dataset.columns.items() if k != "meta"}
    order = sorted(used_strings(dataset, TEXTS).tolist(), key=dataset.strings.__getitem__)
    rank = np.zeros(len(dataset.strings), np.int64)
    rank[order] = np.arange(len(order))
    digest = hashlib.sha256(b"text 1 ")
    for number in order:
        text = dataset.strings[number].encode()
        digest.update(f"{len(text)} ".encode() + text)
    extra = {"ends": dataset.episode_end.cpu().numpy(), "complete": dataset.complete.numpy()}
    for name, column in sorted((columns | extra).items()):
        values = rank[column] if name in TEXTS else column
        little = values.dtype.newbyteorder("<")
        digest.update(f"{name} {little.str} {values.shape} ".encode() + np.ascontiguousarray(values, little).tobytes())
    return digest.hexdigest()


def used_strings(dataset: Dataset, columns: Sequence[str]) -> np.ndarray:
    """The indices, in ascending order, of the strings that some of the columns of texts name: a part of a dataset keeps
    the others.
    """
    used = np.zeros(len(dataset.strings), bool)
    for name in columns:
        used[dataset.columns[name].cpu().numpy()] = True
    return np.flatnonzero(used)


def shared_strings(datasets: Sequence[Dataset]) -> list[Dataset]:
    """The same text datasets over one common `strings` (and `metas`), so that their rows can stand in one column."""
    index: dict[str, int] = {}
    metas: dict[str, int] = {}
    with_meta = any("meta" in d.columns for d in datasets)
    moved = []
    for dataset in datasets:
        positions = torch.tensor([index.setdefault(s, len(index)) for s in dataset.strings], dtype=torch.int64)
        columns: dict[str, Tensor] = {k: positions[c] if k in TEXTS else c for k, c in dataset.columns.items()}
        if with_meta:
            numbers = torch.tensor(
                [metas.setdefault(m, len(metas)) for m in dataset.metas or ("{}",)], dtype=torch.int64
            )
            columns["meta"] = numbers[columns["meta"]] if "meta" in columns else numbers.expand(len(dataset)).clone()
        moved.append(replace(dataset, columns=columns))
    return [replace(d, strings=tuple(index), metas=tuple(metas)) for d in moved]
