"""Policies of texts: an action is a text that answers the dialogue so far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from offrl.actor import Actor, Carry

if TYPE_CHECKING:
    from offrl.lm.algorithm import TextAlgorithm

PROMPTS = 256  # that are written to at once


class TextActor(Actor):
    """Continues dialogues. A carry is a list with the dialogue of each episode: a tuple of texts, observation, action, observation, ..."""

    algorithm: TextAlgorithm

    def start(self, episodes: int) -> Carry:
        return [()] * episodes

    def act(self, carry: Carry, observations: Any, key: Tensor, *, explore: bool) -> tuple[Any, Carry]:
        """Actions (a list of E texts) for observations (E texts; None: an episode that is over, whose action is empty), and the next carry.

        Drawn or the likeliest, as `decoding` says; with `explore` always drawn. An observation may bring `legal_actions`.
        """
        running = [e for e, text in enumerate(observations) if text is not None]
        histories = {e: (*carry[e], str(observations[e])) for e in running}
        written: dict[int, str] = {}
        for first in range(0, len(running), PROMPTS):
            some = running[first : first + PROMPTS]
            legal = [getattr(observations[e], "legal_actions", None) for e in some]
            texts = self.algorithm.reply(self.state, [histories[e] for e in some], legal, some, key, explore)
            written |= dict(zip(some, texts, strict=True))
        actions = [written.get(e, "") for e in range(len(observations))]
        return actions, [(*histories[e], actions[e]) if e in histories else carry[e] for e in range(len(observations))]
