"""Forms of text data that others publish, and how they become canonical episodes (`offrl.data.text.dataset`).

- LMRL-Gym (arXiv 2311.18232): `{"sequence": [[text, is_action], ...], "reward": [...], "done": ...}`. Texts before an
  action are joined to its observation, those after the last one are the final observation; an action without a text
  before it observes "". `reward` has a number for each text, for each text but the first (as their Wordle data), or for
  each action. `done` says that the episode terminated; without it it was cut off.
- LMRL-Gym's mazes and Text-Nav: `{"text_history": [text, action, text, ...], "rewards": [...], "dones": [...]}`,
  actions in odd places; or a list of `{"state": ..., "action": ..., "reward": ..., "done": ...}`.
- ArCHer (arXiv 2402.19446): `{"conversation" or "lines": ["Question? Answer", ...], "done" or "correct": ..., "word":
  ...}`. The one who asks acts: a question is an action, the answer the next observation, each with a newline; the first
  observation is "Questions:\\n". As in their environment every question costs 1, the one that names the word nothing.
  `done`: the word was found; else the questions ran out, which is a cut.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from offrl.errors import UserError, nearest

Form = Callable[[Any, str], "dict[str, Any] | None"]  # (value, place) -> canonical episode, or None where nobody acts
FIRST = "Questions:\n"  # what ArCHer's environments show before the first question


def is_step(value: Any) -> bool:
    """True for a step of LMRL-Gym's lists of steps."""
    return isinstance(value, dict) and {"state", "action"} <= set(value)


def form_of(item: Any, where: str) -> Form:
    """The function that makes canonical episodes of values such as `item`."""
    if isinstance(item, list) and item and all(is_step(v) for v in item):
        return _steps
    if isinstance(item, dict):
        for keys, form in _FORMS:
            if any(k in item for k in keys):
                return form
        content = ", ".join(map(str, item)) or "nothing"
    else:
        content = f"no object, but {str(item)[:30]}"
    known = "turns (offrl), sequence or text_history (LMRL-Gym), conversation or lines (ArCHer)"
    raise UserError(f"{where} is no episode that offrl knows, which would have {known}; it has {content}")


def _need(item: Any, keys: tuple[str, ...], where: str, kind: type = object, type_name: str = "") -> Any:
    """The value of the first of `keys` that is there, of the type `kind`."""
    if not isinstance(item, dict):
        raise UserError(f"{where} is no object, unlike the episode before it")
    key = next((k for k in keys if k in item), None)
    if key is None:
        raise UserError(f"{where} has no '{keys[0]}'.{nearest(keys[0], item)} It has: {', '.join(item) or 'nothing'}")
    if not isinstance(item[key], kind):
        raise UserError(f"{where}: '{key}' is not {type_name}")
    return item[key]


def _flag(value: Any, key: str, where: str) -> bool:
    """true, false, or the number 0 or 1."""
    if value not in (0, 1) or isinstance(value, str):
        raise UserError(f"{where}: '{key}' is {str(value)[:30]}, not true or false")
    return bool(value)


def _done(item: Any, keys: tuple[str, ...], where: str) -> bool:
    """Whether the first of `keys` that is there says that the episode terminated."""
    return _flag(_need(item, keys, where), "done", where)


def _episode(
    texts: list[tuple[str, bool]], rewards: list[Any], terminated: bool, item: Mapping[str, Any], used: tuple[str, ...]
) -> dict[str, Any] | None:
    """Texts, each with whether it is an action, and a reward for each, as an episode; None where there is no action."""
    turns: list[dict[str, Any]] = []
    before: list[str] = []
    for (text, acts), reward in zip(texts, rewards, strict=True):
        if acts:
            turns.append({"obs": "".join(before), "action": text, "reward": reward})
            before = []
        else:
            before.append(text)
    if not turns:
        return None
    final = "".join(before) if before else None
    meta = {k: v for k, v in item.items() if k not in used}
    return {"turns": turns, "final_obs": final, "terminated": terminated, "truncated": not terminated, "meta": meta}


def _per_text(rewards: list[Any], acts: list[bool], where: str) -> list[Any]:
    """A reward for each text, from one for each text, for each action, or for each text but the first."""
    if len(rewards) == len(acts):
        return rewards
    if len(rewards) == sum(acts):
        remaining = iter(rewards)
        return [next(remaining) if a else 0.0 for a in acts]
    if len(rewards) == len(acts) - 1 and not acts[0]:
        return [0.0, *rewards]
    raise UserError(
        f"{where}: there are {len(rewards)} rewards for {len(acts)} texts, of which {sum(acts)} are actions"
    )


def _sequence(item: Any, where: str) -> dict[str, Any] | None:
    """LMRL-Gym's texts, each with a mark of whether it is an action."""
    texts: list[tuple[str, bool]] = []
    for number, entry in enumerate(_need(item, ("sequence",), where, list, "a list")):
        if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], str):
            raise UserError(f"{where}: 'sequence' has no [text, is_action] at {number}")
        texts.append((entry[0], _flag(entry[1], f"is_action of text {number}", where)))
    rewards = _per_text(
        _need(item, ("reward", "rewards"), where, list, "a list of numbers"), [a for _, a in texts], where
    )
    for number, ((_, acts), reward) in enumerate(zip(texts, rewards, strict=True)):
        if not acts and reward != 0:
            raise UserError(
                f"{where}: text {number}, an observation, has the reward {str(reward)[:30]}; only actions have rewards"
            )
    done = _done(item, ("done",), where)
    return _episode(texts, rewards, done, item, ("sequence", "reward", "rewards", "done"))


def _history(item: Any, where: str) -> dict[str, Any] | None:
    """LMRL-Gym's texts, of which every second one is an action. Rewards of the others are not used, as in its own
    loaders.
    """
    history = _need(item, ("text_history",), where, list, "a list of texts")
    for number, text in enumerate(history):
        if not isinstance(text, str):
            raise UserError(f"{where}: 'text_history' has no text at {number}")
    texts = [(text, number % 2 == 1) for number, text in enumerate(history)]
    acts = [a for _, a in texts]
    rewards, dones = (_need(item, keys, where, list, "a list") for keys in (("rewards", "reward"), ("dones", "done")))
    flags = [_flag(d, "dones", where) for d, a in zip(_per_text(dones, acts, where), acts, strict=True) if a]
    _end(flags, where)
    return _episode(
        texts,
        _per_text(rewards, acts, where),
        bool(flags and flags[-1]),
        item,
        ("text_history", "rewards", "reward", "dones", "done"),
    )


def _end(flags: list[bool], where: str) -> None:
    if any(flags[:-1]):
        raise UserError(
            f"{where}: step {flags.index(True)} is marked as done, and {len(flags) - 1 - flags.index(True)} follow it"
        )


def _steps(item: Any, where: str) -> dict[str, Any]:
    """LMRL-Gym's list of steps. The text after the last one is not in it, unless as the step's next_state."""
    if not isinstance(item, list) or not all(is_step(v) for v in item):
        raise UserError(
            f"{where} is no list of steps with state, action, reward and done, unlike the episode before it"
        )
    flags, turns = [], []
    for number, step in enumerate(item):
        at = f"{where}, step {number}"
        flags.append(_done(step, ("done",), at))
        turns.append({"obs": step["state"], "action": step["action"], "reward": _need(step, ("reward",), at)})
    _end(flags, where)
    done = bool(flags and flags[-1])
    final = item[-1].get("next_state") if item else None
    return {"turns": turns, "final_obs": final, "terminated": done, "truncated": not done}


def _dialogue(item: Any, where: str) -> dict[str, Any] | None:
    """ArCHer's questions and answers."""
    lines = _need(item, ("conversation", "lines"), where, list, "a list of texts")
    done = _done(item, ("done", "correct"), where)
    texts, rewards = [(FIRST, False)], [0.0]
    for number, line in enumerate(lines):
        question, mark, answer = line.rpartition("? ") if isinstance(line, str) else ("", "", "")
        if not mark:
            raise UserError(f"{where}: line {number} of the conversation is no 'Question? Answer': {str(line)[:60]!r}")
        texts += [(f"{question}?\n", True), (f"{answer}\n", False)]
        rewards += [0.0 if done and number == len(lines) - 1 else -1.0, 0.0]
    return _episode(texts, rewards, done, item, ("conversation", "lines", "done", "correct"))


_FORMS: tuple[tuple[tuple[str, ...], Form], ...] = (
    (("turns",), lambda item, where: item),  # TextBuilder checks it
    (("sequence",), _sequence),
    (("text_history",), _history),
    (("conversation", "lines"), _dialogue),
)
