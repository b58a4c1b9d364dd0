"""Wordle in letters (LMRL-Gym, arXiv 2311.18232), written anew from its rules, with a word list of offrl's own."""

from __future__ import annotations

import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym

from offrl.envs.generated import BaseEnvironment, Info, TextStep
from offrl.envs.text.space import AnyText
from offrl.errors import UserError, nearest

ENV = "offrl/TextWordle-v0"
TRIES, LETTERS = 6, 5
FIRST, INVALID = "Wordle:\n", "invalid word\n"
YELLOW = ("anywhere", "counted")
WORDS = Path(__file__).parent / "words.json"


@cache
def load_words(path: str | None = None) -> tuple[str, ...]:
    """The words of a file, sorted: a JSON list (*.json), or text with words between white space. None: those that come
    with offrl.

    Raises UserError for a file that cannot be read and for a word that is not of five letters a to z, in lower case.
    """
    file = WORDS if path is None else Path(path).expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        vocabulary = json.loads(text) if file.suffix.lower() == ".json" else text.split()
    except (OSError, ValueError) as error:  # JSON's and UTF-8's errors are ValueErrors
        raise UserError(f"the word list {file} cannot be read: {error}") from None
    if not isinstance(vocabulary, list) or not vocabulary:
        raise UserError(f"the word list {file} is no list of words")
    for word in vocabulary:
        if (
            not isinstance(word, str)
            or len(word) != LETTERS
            or not (word.isascii() and word.isalpha() and word.islower())
        ):
            raise UserError(f"the word list {file} has {word!r}: a word is {LETTERS} letters a to z, in lower case")
    return tuple(sorted(set(vocabulary)))


def feedback(guess: str, target: str, yellow: str = "anywhere") -> str:
    """A letter for each of the guess: g, the target has it there; y, it has it elsewhere; b, it does not.

    yellow: "anywhere" marks every letter that occurs in the target, however often it is guessed (LMRL-Gym's way, not
    the game's); "counted" marks no more of them than the target has, the green ones first and then from the left, as
    the game does.
    """
    if yellow == "anywhere":
        return "".join("g" if a == b else "y" if a in target else "b" for a, b in zip(guess, target, strict=True))
    remaining = Counter(b for a, b in zip(guess, target, strict=True) if a != b)
    marks = []
    for a, b in zip(guess, target, strict=True):
        mark = "g" if a == b else "y" if remaining[a] > 0 else "b"
        if mark == "y":
            remaining[a] -= 1
        marks.append(mark)
    return "".join(marks)


def spaced(word: str) -> str:
    """A word or its feedback as it is said: "c r a n e\\n", so that every tokenizer sees letters."""
    return f"{' '.join(word)}\n"


class TextWordle(BaseEnvironment):
    """Guess a word in six tries. Rewards: 0 for the word, which ends the episode; else -1, also for what is no word of
    the list, which takes a try as well. The sixth wrong guess ends the episode: six tries are the game's rules, no time
    limit.

    First text: "Wordle:"; then the feedback to the last guess (see `feedback`), "b y g b b", or "invalid word".
    Actions: "c r a n e" or "crane". info["legal_actions"] are all words; info["understood"] says whether the last guess
    was one.
    words: the path of another list (see `load_words`). yellow: see `feedback`. `reset(options={"word": "crane"})` says
    which word it is, else the seed does. Raises UserError for a word that is not in the list.
    """

    metadata: Info = {"render_modes": ["ansi"], "render_fps": 4}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, words: str | None = None, yellow: str = "anywhere", render_mode: str | None = None) -> None:
        if yellow not in YELLOW:
            raise UserError(f"yellow={yellow}: choose one of {', '.join(YELLOW)}.{nearest(yellow, YELLOW)}")
        self.words = load_words(None if words is None else str(words))
        self.yellow, self.render_mode = yellow, render_mode
        self.observation_space, self.action_space = AnyText(100), AnyText(1_000)
        self._known, self._legal = frozenset(self.words), [spaced(word) for word in self.words]
        self.word = self.words[0]
        self.guesses: list[tuple[str, str]] = []  # what was said, and the answer to it

    def begin(self, options: Info) -> tuple[str, Info]:
        word = options.get("word")
        if word is None:
            word = self.words[int(self.np_random.integers(len(self.words)))]
        elif word not in self._known:
            raise UserError(f"word={word!r} is not in the list of {len(self.words)} words.{nearest(word, self.words)}")
        self.word, self.guesses = word, []
        return FIRST, {"legal_actions": list(self._legal), "success": False}

    def step(self, action: str) -> TextStep:
        guess = "".join(action.split()) if isinstance(action, str) else ""
        reply = spaced(feedback(guess, self.word, self.yellow)) if guess in self._known else INVALID
        self.guesses.append((guess, reply))
        solved = guess == self.word
        over = solved or len(self.guesses) >= TRIES
        info = {"legal_actions": list(self._legal), "success": solved, "understood": guess in self._known}
        return reply, 0.0 if solved else -1.0, over, False, info

    def render(self) -> Any:
        """The guesses so far and the answers."""
        return "".join(f"{spaced(guess)}{reply}" for guess, reply in self.guesses) or FIRST


gym.register(ENV, entry_point="offrl.envs.text.wordle:TextWordle")
