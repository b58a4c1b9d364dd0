"""BabyAI's missions (arXiv 1810.08272; package minigrid) in words: the mission and the view."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np

from offrl.envs.generated import Info, TextStep
from offrl.envs.text.optional import package
from offrl.envs.text.space import AnyText
from offrl.errors import UserError, nearest
from offrl.system import trust

ENV = "offrl/TextBabyAI-v0"
ACTIONS = {"turn left": 0, "turn right": 1, "go forward": 2, "pick up": 3, "drop": 4, "toggle": 5}  # minigrid's numbers
NOTHING = 6  # minigrid's "done", which does nothing but take a step
HIDDEN = ("unseen", "empty", "floor", "agent")


class TextBabyAI(gym.Env):
    """A level of minigrid's, such as "BabyAI-GoToLocal-v0", its observations in words. Rewards, endings and the limit
    on steps are minigrid's: 1 - 0.9 steps / limit for a mission that is done, else 0.

    Actions: "turn left", "turn right", "go forward", "pick up", "drop", "toggle" (open or close a door or box); a line
    break may follow. What is none of them takes a step and does nothing; the observation says so. info["legal_actions"]
    are these six, info["success"] whether the mission is done. Raises UserError where minigrid is not installed or has
    no such level.
    """

    metadata: Info = {"render_modes": []}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, level: str = "BabyAI-GoToLocal-v0", render_mode: str | None = None, **settings: Any) -> None:
        package("minigrid", f"level {level}", "minigrid")  # registers the levels
        constants = package("minigrid.core.constants", f"level {level}", "minigrid")
        self.objects, self.colours, self.states = (
            {number: name for name, number in table.items()}
            for table in (constants.OBJECT_TO_IDX, constants.COLOR_TO_IDX, constants.STATE_TO_IDX)
        )
        trust.check_environment(level)
        try:
            self.game = gym.make(level, disable_env_checker=True, **settings)
        except gym.error.Error as error:
            levels = [name for name in gym.registry if name.startswith(("BabyAI-", "MiniGrid-"))]
            raise UserError(f"minigrid has no level '{level}'.{nearest(level, levels)}") from error
        self.level, self.render_mode = level, render_mode
        self.observation_space, self.action_space = AnyText(5_000), AnyText(1_000)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[str, Info]:
        super().reset(seed=seed)
        observation, _ = self.game.reset(seed=seed, options=options)
        return self.tell(observation), {"legal_actions": [f"{name}\n" for name in ACTIONS], "success": False}

    def step(self, action: str) -> TextStep:
        number = ACTIONS.get(action.strip())
        observation, reward, terminated, truncated, _ = self.game.step(NOTHING if number is None else number)
        text = self.tell(observation)
        if number is None:
            text = f"That is no action. {text}"
        done = bool(terminated) and float(reward) > 0
        info = {"legal_actions": [f"{name}\n" for name in ACTIONS], "success": done, "understood": number is not None}
        return text, float(reward), bool(terminated), bool(truncated) and not terminated, info

    def close(self) -> None:
        self.game.close()

    def tell(self, observation: dict[str, Any]) -> str:
        """Minigrid's observation in words: the mission, what one carries, and the things and the nearest walls within
        sight, from where one stands and looks. Its "image" [X, Y, 3] has one in the middle of the last row, looking
        towards the first."""
        image = np.asarray(observation["image"])
        middle, last = image.shape[0] // 2, image.shape[1] - 1
        things: list[tuple[int, int, int, str]] = []
        walls: dict[str, int] = {}
        for x, y in np.ndindex(image.shape[:2]):
            name, ahead, right = self.objects[int(image[x, y, 0])], last - y, x - middle
            if (ahead, right) == (0, 0) or name in HIDDEN:
                continue
            if name == "wall":  # only those straight ahead or beside one: the first on each side
                if ahead == 0 or right == 0:
                    side = "ahead" if right == 0 else "to your right" if right > 0 else "to your left"
                    walls[side] = min(walls.get(side, image.shape[1] + image.shape[0]), ahead + abs(right))
                continue
            state = f"{self.states[int(image[x, y, 2])]} " if name == "door" else ""
            things.append((ahead + abs(right), ahead, right, f"{state}{self.colours[int(image[x, y, 1])]} {name}"))
        objects = [f"a {thing} {_where(ahead, right)}" for _, ahead, right, thing in sorted(things)]
        objects += [
            f"a wall {_steps(walls[side])} {side}"
            for side in ("ahead", "to your left", "to your right")
            if side in walls
        ]
        item = image[middle, last]
        name = self.objects[int(item[0])]
        carried = (
            "nothing" if name in (*HIDDEN, "door", "goal", "lava", "wall") else f"a {self.colours[int(item[1])]} {name}"
        )
        return f"Mission: {observation['mission']}. You see {', '.join(objects) or 'nothing'}. You carry {carried}.\n"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _where(ahead: int, right: int) -> str:
    parts = [f"{_steps(ahead)} ahead"] if ahead else []
    if right:
        parts.append(f"{_steps(abs(right))} to your {'right' if right > 0 else 'left'}")
    return " and ".join(parts)


gym.register(ENV, entry_point="offrl.envs.text.babyai:TextBabyAI")
