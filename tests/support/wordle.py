"""The best player of Wordle that is known here, against which a task's note is checked."""

from __future__ import annotations

import numpy as np

from offrl.envs.text.wordle import LETTERS
from offrl.envs.text.wordle_play import AT_ONCE, Consistent

MARKS = 3**LETTERS  # different feedbacks


class Greedy(Consistent):
    """A policy for `rollouts`: the word whose feedback has the highest entropy over the words that still agree with
    what was said; of equal ones a word that may itself be it, then the first. It draws nothing."""

    def __init__(self, words: str | None = None, yellow: str = "anywhere") -> None:
        super().__init__(0, 0.0, words, yellow)
        self._known: dict[bytes, int] = {}

    def guess(self, history: list[str]) -> int:
        return self.best(self.candidates(history))

    def best(self, left: np.ndarray) -> int:
        """The number of the word to guess where `left` are the numbers of the words that may be it."""
        key = left.tobytes()
        if key not in self._known:
            self._known[key] = self._best(left)
        return self._known[key]

    def _best(self, left: np.ndarray) -> int:
        words = len(self.words)
        if len(left) == 1:
            return int(left[0])
        entropy = np.zeros(words)
        block = max(1, AT_ONCE // len(left))
        for first in range(0, words, block):
            codes = self.table[first : first + block, left]
            codes = codes + MARKS * np.arange(len(codes))[:, None]
            share = np.bincount(codes.ravel(), minlength=len(codes) * MARKS).reshape(-1, MARKS) / len(left)
            entropy[first : first + block] = -(share * np.log(np.maximum(share, 1e-12))).sum(-1)
        entropy = entropy.round(9)  # equal ones stay equal on every machine
        return int(np.lexsort((np.arange(words), ~np.isin(np.arange(words), left), -entropy))[0])
