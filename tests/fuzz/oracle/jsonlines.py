"""Texts in JSON: offrl's own form, and those of LMRL-Gym and ArCHer, as docs/datasets.md describes them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from tests.fuzz.oracle.verdict import Doubts, Refused, Truth

LARGEST = 3.4028235e38


def read(path: Path, doubts: Doubts) -> list[Truth]:
    data = path.read_bytes()
    try:
        if data.startswith(b"\x1f\x8b"):
            data = gzip.decompress(data)
        text = data.decode("utf-8-sig")
        values = _values(text, path, doubts)
    except Refused:
        raise
    except (ValueError, OSError, EOFError, RecursionError) as error:
        raise Refused(f"no JSON: {error!r}"[:120]) from None
    except Exception as error:  # zlib.error
        raise Refused(f"cannot be unpacked: {error!r}"[:120]) from None
    if values and isinstance(values[0], dict) and set(values[0]) == {"offrl"}:
        _header(values.pop(0)["offrl"], doubts)
    if not values:
        raise Refused("no episodes")
    read_one = _form(values[0])
    truths = []
    for value in values:
        truth = read_one(value, doubts)
        if truth is None:
            doubts.add("an episode in which nobody acts")
        else:
            truths.append(truth)
    if not truths:
        raise Refused("nobody acts")
    return truths


def _pairs(doubts: Doubts) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({k for k, _ in items}) < len(items):
            doubts.add("a key twice")
        return dict(items)

    return pairs


def _values(text: str, path: Path, doubts: Doubts) -> list[Any]:
    """The values: a line each, or one list."""
    lines = [line for line in text.split("\n") if line.strip()]
    if not lines:
        raise Refused("nothing but blank lines")
    pairs = _pairs(doubts)
    try:
        values = [json.loads(line, object_pairs_hook=pairs) for line in lines]
    except ValueError:
        if path.name.endswith((".json", ".json.gz")) or text.lstrip()[0] == "[" or len(lines) > 1:
            document = json.loads(text, object_pairs_hook=pairs)
            return (
                document
                if isinstance(document, list) and not (document and all(_step(v) for v in document))
                else [document]
            )
        raise
    if len(values) == 1 and isinstance(values[0], list) and not (values[0] and all(_step(v) for v in values[0])):
        return values[0]
    return values


def _header(value: Any, doubts: Doubts) -> None:
    if not isinstance(value, dict):
        raise Refused("the header is no object")
    if not isinstance(value.get("name", ""), str) or value.get("task") is not None:
        doubts.add("a header that says more than a name")


def _step(value: Any) -> bool:
    return isinstance(value, dict) and "state" in value and "action" in value


def _form(value: Any) -> Any:
    if isinstance(value, list) and value and all(_step(v) for v in value):
        return _steps
    if isinstance(value, dict):
        for key, form in (
            ("turns", _turns),
            ("sequence", _sequence),
            ("text_history", _history),
            ("conversation", _dialogue),
            ("lines", _dialogue),
        ):
            if key in value:
                return form
    raise Refused("an episode in no known form")


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise Refused(f"{what} is no text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Refused(f"{what} holds half a character") from None
    return value


def _number(value: Any, what: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not -LARGEST <= value <= LARGEST:
        raise Refused(f"{what} is no number that a float32 can hold")
    return float(value)


def _bool(value: Any, what: str, numbers: bool = True) -> bool:
    if value is True or value is False or (numbers and type(value) in (int, float) and value in (0, 1)):
        return bool(value)
    raise Refused(f"{what} is neither true nor false")


def _need(value: Any, key: str, kind: type) -> Any:
    if not isinstance(value, dict) or key not in value:
        raise Refused(f"no '{key}'")
    if not isinstance(value[key], kind):
        raise Refused(f"'{key}' is of another type")
    return value[key]


def _truth(
    observations: list[str], actions: list[str], rewards: list[float], final: str | None, ended: bool, complete: bool
) -> Truth:
    return Truth(observations, actions, rewards, ended, [*observations[1:], final], complete)


def _turns(value: Any, doubts: Doubts) -> Truth:
    turns = _need(value, "turns", list)
    if not turns:
        raise Refused("no turns")
    ended, cut = (_bool(_need(value, k, object), k, False) for k in ("terminated", "truncated"))
    if ended and cut:
        raise Refused("both terminated and truncated")
    final = _need(value, "final_obs", object)
    if final is not None:
        _text(final, "final_obs")
    if value.get("meta") is not None and not isinstance(value["meta"], dict):
        raise Refused("meta is no object")
    parts: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for turn in turns:
        for part, key in zip(parts, ("obs", "action", "reward"), strict=True):
            part.append(_need(turn, key, object))
    observations = [_text(t, "obs") for t in parts[0]]
    return _truth(
        observations,
        [_text(t, "action") for t in parts[1]],
        [_number(r, "reward") for r in parts[2]],
        final,
        ended,
        ended or cut,
    )


def _joined(texts: list[str], acts: list[bool], rewards: list[float], done: bool) -> Truth | None:
    observations, actions, earned = [], [], []
    before: list[str] = []
    for text, act, reward in zip(texts, acts, rewards, strict=True):
        if act:
            observations.append("".join(before))
            actions.append(text)
            earned.append(reward)
            before = []
        else:
            before.append(text)
    if not actions:
        return None
    return _truth(observations, actions, earned, "".join(before) if before else None, done, True)


def _spread(values: list[Any], acts: list[bool], filler: Any) -> list[Any]:
    """One value for each text, from as many as there are texts, actions, or texts but the first."""
    if len(values) == len(acts):
        return values
    if len(values) == sum(acts):
        rest = list(values)
        return [rest.pop(0) if act else filler for act in acts]
    if len(values) == len(acts) - 1 and not acts[0]:
        return [filler, *values]
    raise Refused("as many rewards as neither texts nor actions")


def _sequence(value: Any, doubts: Doubts) -> Truth | None:
    entries = _need(value, "sequence", list)
    if any(not isinstance(e, list) or len(e) != 2 for e in entries):
        raise Refused("an entry that is no pair")
    texts, acts = [_text(e[0], "a text") for e in entries], [_bool(e[1], "is_action") for e in entries]
    rewards = _spread(_need(value, "reward" if "reward" in value else "rewards", list), acts, 0.0)
    done = _bool(_need(value, "done", object), "done")
    if not any(acts):
        if any(r != 0 for r in rewards):
            raise Refused("rewards of observations")
        return None
    numbers = []
    for act, reward in zip(acts, rewards, strict=True):
        if not act and reward != 0:
            raise Refused("rewards of observations")
        numbers.append(_number(reward, "reward") if act else 0.0)
    return _joined(texts, acts, numbers, done)


def _history(value: Any, doubts: Doubts) -> Truth | None:
    texts = [_text(t, "a text") for t in _need(value, "text_history", list)]
    acts = [k % 2 == 1 for k in range(len(texts))]
    rewards = _spread(_need(value, "rewards" if "rewards" in value else "reward", list), acts, 0.0)
    dones = _spread(_need(value, "dones" if "dones" in value else "done", list), acts, False)
    flags = [_bool(d, "dones") for d, act in zip(dones, acts, strict=True) if act]
    if any(flags[:-1]):
        raise Refused("done before the last step")
    if not flags:
        return None
    numbers = [_number(r, "reward") if act else 0.0 for r, act in zip(rewards, acts, strict=True)]
    return _joined(texts, acts, numbers, flags[-1])


def _steps(value: Any, doubts: Doubts) -> Truth:
    if not isinstance(value, list) or not all(_step(v) for v in value) or not value:
        raise Refused("no list of steps")
    flags = [_bool(_need(v, "done", object), "done") for v in value]
    if any(flags[:-1]):
        raise Refused("done before the last step")
    final = value[-1].get("next_state")
    if final is not None:
        _text(final, "next_state")
    rewards = [_number(_need(v, "reward", object), "reward") for v in value]
    return _truth(
        [_text(v["state"], "state") for v in value],
        [_text(v["action"], "action") for v in value],
        rewards,
        final,
        flags[-1],
        True,
    )


def _dialogue(value: Any, doubts: Doubts) -> Truth | None:
    lines = _need(value, "conversation" if isinstance(value, dict) and "conversation" in value else "lines", list)
    done = _bool(_need(value, "done" if isinstance(value, dict) and "done" in value else "correct", object), "done")
    texts, acts, rewards = ["Questions:\n"], [False], [0.0]
    for number, line in enumerate(lines):
        if "? " not in _text(line, "a line"):
            raise Refused("a line without a question")
        at = line.rfind("? ")
        texts += [line[: at + 1] + "\n", line[at + 2 :] + "\n"]
        acts += [True, False]
        rewards += [0.0 if done and number == len(lines) - 1 else -1.0, 0.0]
    return _joined(texts, acts, rewards, done)
