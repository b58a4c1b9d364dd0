"""Wordle players, at random or with words that agree with all feedback so far; and the behaviour data."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from offrl.envs.text.wordle import FIRST, LETTERS, TRIES, YELLOW, feedback, load_words, spaced

EPISODES = 10_000
RANDOM = 2.0 / 3.0  # share of the behaviour's guesses that are any word
POWERS = 3 ** np.arange(LETTERS)
AT_ONCE = 4_000_000  # numbers in memory, about


@cache
def table(vocabulary: tuple[str, ...], yellow: str = "anywhere") -> np.ndarray:
    """[W, W] uint8: the feedback to each guess for each target, its marks (b 0, y 1, g 2) the digits of a number to
    base 3.
    """
    if yellow not in YELLOW:
        raise ValueError(f"yellow={yellow}: choose one of {', '.join(YELLOW)}")
    letters = np.array([[ord(c) for c in word] for word in vocabulary])  # [W, 5]
    codes = np.zeros((len(vocabulary), len(vocabulary)), np.uint8)
    for number, guess in enumerate(letters):
        same = letters == guess  # [W, 5], of the targets
        marks = 2 * same
        if yellow == "anywhere":
            marks = np.maximum(marks, (letters[:, None, :] == guess[:, None]).any(-1))
        else:
            unused = ~same  # letters of the targets about which nothing has been said
            for position, letter in enumerate(guess):
                matches = (letters == letter) & unused & ~same[:, position, None]
                targets = np.flatnonzero(matches.any(-1))
                marks[targets, position] = 1
                unused[targets, matches[targets].argmax(-1)] = False
        codes[number] = marks @ POWERS
    return codes


class Consistent:
    """A policy for `rollouts`: any word that agrees with all feedback so far; with probability `share`, at each guess,
    any word at all.

    share 1: random. Raises UserError for a word list that cannot be read.
    """

    def __init__(self, seed: int = 0, share: float = 0.0, words: str | None = None, yellow: str = "anywhere") -> None:
        self.words, self.share, self.draw = load_words(words), share, np.random.Generator(np.random.PCG64(seed))
        self.table, self.number = table(self.words, yellow), {w: i for i, w in enumerate(self.words)}

    def candidates(self, history: list[str]) -> np.ndarray:
        """The numbers of the words that agree with the feedback in these texts of an episode."""
        agree = np.ones(len(self.words), bool)
        for guess, reply in zip(history[1::2], history[2::2], strict=True):
            number = self.number.get("".join(guess.split()))
            if number is not None:
                agree &= self.table[number] == sum(
                    "byg".index(mark) * p for mark, p in zip(reply.split(), POWERS.tolist(), strict=True)
                )
        # none: the feedback is by other rules or of another list
        return np.flatnonzero(agree) if agree.any() else np.arange(len(agree))

    def guess(self, history: list[str]) -> int:
        """The number of the next word."""
        if self.draw.uniform() < self.share:
            return int(self.draw.integers(len(self.words)))
        candidates = self.candidates(history)
        return int(candidates[self.draw.integers(len(candidates))])

    def __call__(self, histories: list[list[str]], legal: Any = None) -> list[str]:
        return [spaced(self.words[self.guess(history)]) for history in histories]


def play(
    seed: int, episodes: int, share: float, vocabulary: tuple[str, ...], yellow: str = "anywhere"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Games of `Consistent`, many at once: the numbers of the targets [E] and of the guesses [E, 6], and the number of
    guesses of each game [E]; the entries behind those were never played."""
    draw, codes, count = np.random.Generator(np.random.PCG64(seed)), table(vocabulary, yellow), len(vocabulary)
    targets = draw.integers(0, count, episodes)
    at_random, nth = draw.uniform(size=(episodes, TRIES)) < share, draw.uniform(size=(episodes, TRIES))
    guesses = draw.integers(0, count, (episodes, TRIES))
    block = max(1, AT_ONCE // count)
    for first in range(0, episodes, block):
        block_rows = slice(first, first + block)
        agree = np.ones((len(targets[block_rows]), count), bool)
        for k in range(TRIES):
            counts = agree.sum(-1)  # one at least: the target
            # the n-th of the words that agree, n uniform
            rank = np.minimum((nth[block_rows, k] * counts).astype(np.int64), counts - 1)
            chosen = (agree.cumsum(-1) > rank[:, None]).argmax(-1)
            guesses[block_rows, k] = np.where(at_random[block_rows, k], guesses[block_rows, k], chosen)
            agree &= codes[guesses[block_rows, k]] == codes[guesses[block_rows, k], targets[block_rows]][:, None]
    right = guesses == targets[:, None]
    return targets, guesses, np.where(right.any(-1), right.argmax(-1) + 1, TRIES)


def generate(
    seed: int = 0, episodes: int = EPISODES, share: float = RANDOM, words: str | None = None, yellow: str = "anywhere"
) -> list[dict[str, Any]]:
    """Games in the canonical form of a player each of whose guesses is any word with probability `share`, else one that
    agrees with all feedback so far. `meta`: the word."""
    known = load_words(words)
    targets, guesses, lengths = play(seed, episodes, share, known, yellow)
    games = []
    answer: Callable[[str, str], str] = cache(lambda guess, target: spaced(feedback(guess, target, yellow)))
    for target, row, length in zip(targets.tolist(), guesses.tolist(), lengths.tolist(), strict=True):
        reply, turns = FIRST, []
        for guess in row[:length]:
            before, reply = reply, answer(known[guess], known[target])
            turns.append({"obs": before, "action": spaced(known[guess]), "reward": 0.0 if guess == target else -1.0})
        games.append(
            {
                "turns": turns,
                "final_obs": reply,
                "terminated": True,
                "truncated": False,
                "meta": {"word": known[target]},
            }
        )
    return games
