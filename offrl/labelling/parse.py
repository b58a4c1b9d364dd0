"""Parsers of a language model's answers. An answer that is not clear is None: it is counted, and nothing is guessed."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
_SIDE = r"(?:the\s+)?(?:segment|option|trajectory|number)?\s*#?([12])|(?:(?:it\s+is\s+|it's\s+)?a\s+)?(tie|equal|neither|both|tied|draw)"  # noqa: E501
_VERDICT = re.compile(
    r"(?:\b(?:answer|verdict|choice|preference|winner|(?:preferred|better)(?:\s+segment)?)\s*(?:is\b\s*:?|:|=)"
    r"|(?<!not )(?<!n't )\b(?:answer|prefer|choose)\b)"
    rf"\s*(?:{_SIDE})\b(?!\.?\d|\s*(?:or|and|/)\b)"
)
_BETTER = re.compile(
    r"\b(?:segment|option|trajectory)\s*([12])()\s+is\s+(?:(?:clearly|slightly|somewhat|significantly|definitely|probably|much|far)\s+)?(?:better|preferable|preferred)\b"
)
_SCORE = re.compile(
    rf"\b(?:answer|score|rating|rate|reward|grade|value)\b[^\w\n.+-]*(?:is\b|of\b|:|=)?[^\w\n.+-]*({_NUMBER})(?!\.?\d)"
)


def plain(answer: str) -> str:
    """An answer without a reasoning model's thoughts and without marks of emphasis, in lower case."""
    text = re.sub(r"(?s)<think(?:ing)?>.*?</think(?:ing)?>", " ", answer)
    text = re.sub(r"(?s)^.*</think(?:ing)?>", " ", text)  # the template has opened it
    text = re.sub(r"(?s)<think(?:ing)?>.*", " ", text)  # cut off inside
    text = re.sub(r"```\w*|[*`]|\\boxed|\$", "", text)
    return text.replace("\u2212", "-").strip().lower()


def _lines(text: str) -> list[str]:
    return [line.strip(" \t.!;:,\"'()[]{}_#>") for line in text.splitlines() if line.strip()]


def choice(answer: str) -> float | None:
    """0 where the first is better, 1 where the second is, 0.5 for a tie; None where the answer does not say.

    Taken are, in this order: an answer that is nothing else; the last "answer: 2", "better: tie" and the like; "segment
    2 is better"; a first or last line that is nothing else.
    """
    text = plain(answer)
    lines = _lines(text)
    if not lines:
        return None
    if len(lines) == 1 and (match := re.fullmatch(_SIDE, lines[0])):
        return _side(match)
    verdicts = list(_VERDICT.finditer(re.sub(r"[\"_]|(?<!\w)'|'(?!\w)", " ", text)))
    if verdicts:
        return _side(verdicts[-1])
    if len(sides := {_side(match) for match in _BETTER.finditer(text)}) == 1:
        return sides.pop()
    at_ends = {_side(match) for line in (lines[0], lines[-1]) if (match := re.fullmatch(_SIDE, line))}
    return at_ends.pop() if len(at_ends) == 1 else None


def _side(match: re.Match[str]) -> float:
    return 0.5 if match[2] else float(match[1]) - 1.0


def number(answer: str, low: float, high: float) -> float | None:
    """The number between `low` and `high` that an answer gives; None where there is none, or several and none is marked
    as the answer.

    "7", "7/10" and "7 out of 10" (where 10 is `high`), "score: 7", a JSON object's only number, a last line that is
    one, and the only number of a text.
    """
    text = plain(answer)
    text = re.sub(rf"({_NUMBER})\s*(?:/|out of)\s*{re.escape(f'{high:g}')}(?!\.?\d)", r"\1", text)
    text = re.sub(r"(?<=\d),(?=\d{3}\b)", "", text)
    if not _lines(text):
        return None
    last = re.fullmatch(_NUMBER, text.splitlines()[-1].strip(" \t!;:,\"'()[]{}_#>").rstrip("."))
    scores = _SCORE.findall(text.replace('"', " ").replace("'", " "))
    numbers = re.findall(rf"(?<![\w.])({_NUMBER})(?![\w])", text)
    if last:
        number = last[0]
    elif scores:
        number = scores[-1]
    elif len(numbers) == 1:
        number = numbers[0]
    else:
        return None
    value = float(number)
    return value if math.isfinite(value) and low <= value <= high else None


def points(answer: str, names: Sequence[str], most: int) -> list[list[float]] | None:
    """Up to `most` subgoals of as many numbers as `names` has: lists such as [1.0, 2.0], or objects {"x": 1.0, "y":
    2.0}, in their order.

    None where there is none, or a list or object of another form among them.
    """
    text = plain(answer)
    points: list[list[float]] = []
    for part in re.findall(r"\[[^\[\]{}()]*\]|\{[^{}\[\]()]*\}|\([^()\[\]{}]*\)", text):
        if part[0] == "(" and not re.fullmatch(rf"\(\s*{_NUMBER}(?:\s*,\s*{_NUMBER})*\s*\)", part):
            continue  # a remark
        value = _loads("[" + part[1:-1] + "]" if part[0] == "(" else part)
        if isinstance(value, dict):
            lower = {str(k).lower(): v for k, v in value.items()}
            value = [lower.get(name.lower()) for name in names]
        if not isinstance(value, list) or len(value) != len(names):
            return None
        if not all(isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) for x in value):
            return None
        points.append([float(x) for x in value])
    return points[:most] or None


def words(answer: str, choices: Sequence[str], most: int) -> list[str] | None:
    """Up to `most` subgoals as names: a JSON list of texts, or one a line, with or without numbers and bullets.

    choices: the allowed ones (empty: any), compared without regard to case. None where there is none, or one that is
    not allowed."""
    text = re.sub(r"(?s)<think(?:ing)?>.*?</think(?:ing)?>|^.*</think(?:ing)?>|<think(?:ing)?>.*", " ", answer)
    listed = re.search(r"(?s)\[.*\]", text)
    value = _loads(listed[0]) if listed else None
    if isinstance(value, list) and value and all(isinstance(x, str) for x in value):
        items = [str(x).strip() for x in value]
    else:
        lines = [re.sub(r"^\s*(?:[-*•]|\(?\d+[.):])\s*", "", line).strip(" \t.*\"'`") for line in text.splitlines()]
        items = [line for line in lines if line and not line.startswith("```") and not line.endswith(":")]
    if choices:
        known = {name.lower(): name for name in choices}
        if any(name.lower() not in known for name in items):
            return None
        items = [known[name.lower()] for name in items]
    return items[:most] or None


def _loads(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return None
