"""Observations that hold what came before them."""

from __future__ import annotations

from collections import deque

import gymnasium as gym

from offrl.envs.generated import Info, TextStep
from offrl.envs.text.space import LONGEST, AnyText
from offrl.errors import UserError


class HistoryWindow(gym.Wrapper):
    """Observations are the last `texts` texts of the episode, observations and actions in turn, joined: the newest is
    always the environment's own, and 1 changes nothing.

    info["history"]: these texts, oldest first, for who must know where one ends. `separator` goes between them where
    they do not end with a line break of their own. Language-model policies of offrl keep a history themselves and need
    no wrapper. Raises UserError for a number of texts below 1.
    """

    def __init__(self, env: gym.Env, texts: int, separator: str = "") -> None:
        if texts < 1:
            raise UserError(f"HistoryWindow(texts={texts}): a window holds 1 text at least")
        super().__init__(env)
        self.separator = separator
        self._texts: deque[str] = deque(maxlen=texts)
        longest = [getattr(s, "max_length", LONGEST) for s in (env.observation_space, env.action_space)]
        self.observation_space = AnyText(
            (longest[0] + len(separator)) * (texts // 2 + 1) + (longest[1] + len(separator)) * (texts // 2)
        )

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[str, Info]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._texts.clear()
        return self._window(observation, info)

    def step(self, action: str) -> TextStep:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._texts.append(action)
        text, info = self._window(observation, info)
        return text, float(reward), terminated, truncated, info

    def _window(self, observation: str, info: Info) -> tuple[str, Info]:
        self._texts.append(observation)
        return self.separator.join(self._texts), {**info, "history": list(self._texts)}
