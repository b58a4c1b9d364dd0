"""Text MDPs: environments whose observations and actions are texts.

The protocol is Gymnasium's own. A text MDP is a `gymnasium.Env` with `spaces.Text` on both sides. There may be
`info["legal_actions"]`, a list of the actions that the environment understands now, `info["understood"]`, whether the
last one was such, and `info["success"]`. Observations hold no history: who wants one keeps it, or wraps the environment
in `HistoryWindow`. An action that makes no sense is answered by the environment, and the episode goes on. The seed and
the options given to `reset` decide an episode, whatever was played before.
"""

from offrl.envs.text import tasks
from offrl.envs.text.history import HistoryWindow
from offrl.envs.text.space import AnyText

__all__ = ["AnyText", "HistoryWindow", "tasks"]
