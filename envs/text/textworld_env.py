"""TextWorld's games (arXiv 1806.11532) as text environments of Gymnasium, and LMRL-Gym's Text-Nav, a house built with
it.
"""

from __future__ import annotations

import contextlib
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import gymnasium as gym

from offrl.envs.generated import BaseEnvironment, Info, TextStep
from offrl.envs.text.optional import package
from offrl.envs.text.space import AnyText
from offrl.errors import UserError, nearest

GAME, NAV = "offrl/TextWorld-v0", "offrl/TextNav-v0"
INFOS = ("feedback", "description", "objective", "admissible_commands", "won", "lost", "score", "max_score")


class TextWorld(BaseEnvironment):
    """The game in a file (.z8, .ulx, ...). Observation: the game's answer, at first the objective and the room; then,
    with `commands`, the commands that it understands now. Reward: by how much the score rises. It ends when it is won
    or lost; after `limit` steps it is truncated. info["legal_actions"]: the commands, where the game gives them.
    info["success"]: whether it is won. Games have no randomness of their own. Raises UserError where textworld is not
    installed or the file is no game.
    """

    def __init__(self, game: str, limit: int = 50, commands: bool = True, render_mode: str | None = None) -> None:
        self.limit, self.commands, self.render_mode = limit, commands, render_mode
        self.observation_space, self.action_space = AnyText(), AnyText(1_000)
        self._textworld = package("textworld", "a TextWorld game", "textworld")
        self._file = ""
        self._env: Any = None
        self._score, self._steps = 0.0, 0
        if game:
            self._open(game)

    def _open(self, game: str) -> None:
        if game == self._file:
            return
        self.close()
        try:
            self._env = self._textworld.start(str(game), self._textworld.EnvInfos(**dict.fromkeys(INFOS, True)))
        except Exception as error:  # a file that is not there, not a game, or of a kind this installation cannot run
            raise UserError(f"the game {game} could not be started: {type(error).__name__}: {error}") from error
        self._file = game

    def begin(self, options: Info) -> tuple[str, Info]:
        state = self._env.reset()
        self._score, self._steps = float(state.get("score") or 0.0), 0
        parts = [state.get("objective"), state.get("description")]
        # the first feedback is a picture made of letters, and then these two; games that were not made with TextWorld
        # give neither
        return self._tell(
            state, "\n\n".join(t.strip() for t in parts if t) if parts[1] else str(state.get("feedback") or "")
        )

    def step(self, action: str) -> TextStep:
        self._steps += 1
        state, score, done = self._env.step(action.strip())
        points = state.get("score")
        points = float(score if points is None else points)
        reward, self._score = points - self._score, points
        text, info = self._tell(state, str(state.get("feedback") or ""))
        over = bool(done or state.get("won") or state.get("lost"))
        return text, reward, over, self._steps >= self.limit and not over, info

    def _tell(self, state: Any, text: str) -> tuple[str, Info]:
        info: Info = {"success": bool(state.get("won"))}
        text = text.strip() + "\n"
        legal = state.get("admissible_commands")
        if legal:
            info["legal_actions"] = [f"{command}\n" for command in legal]
            if self.commands:
                text += f"Admissible commands: {', '.join(legal)}\n"
        return text, info

    def close(self) -> None:
        if self._env is not None:
            with contextlib.suppress(Exception):  # what is left of a game that would not even start
                self._env.close()
            self._env, self._file = None, ""


ROOMS = ("bedroom", "living room", "dining room", "kitchen", "garden", "backyard", "office", "bathroom")
WAYS = (
    ("bedroom", "west", "living room", "east"),
    ("living room", "west", "dining room", "east"),
    ("dining room", "west", "kitchen", "east"),
    ("kitchen", "north", "garden", "south"),
    ("kitchen", "west", "backyard", "east"),
    ("living room", "south", "office", "north"),
    ("office", "east", "bathroom", "west"),
    ("bedroom", "south", "bathroom", "north"),
)
# room: TextWorld's type (s: one can put things on it; c: in it), name, what is there (f: food, o: an object)
FURNITURE = {
    "bedroom": ("s", "night table", (("o", "bowl"),)),
    "office": ("c", "chest", (("o", "fork"),)),
    "living room": ("s", "table", (("f", "stale food"), ("f", "fresh food"))),
    "dining room": ("s", "dining table", (("o", "coffee cup"), ("o", "plate"))),
    "kitchen": ("c", "fridge", (("f", "fruit"),)),
}
OBJECTIVE = (
    "Put the stale food, which is on the table in the living room, into the fridge in the kitchen, and close the "
    "fridge."
)


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="offrl-textnav-")  # it goes when the process does


@cache
def house(room: str) -> str:
    """The file of the house in which one begins in `room`, compiled by TextWorld once a process. Raises UserError where
    that fails.
    """
    textworld = package("textworld", "text-nav", "textworld")
    generator = package("textworld.generator", "text-nav", "textworld")
    game_module = package("textworld.generator.game", "text-nav", "textworld")
    options = textworld.GameOptions()
    options.path, options.force_recompile = str(Path(_folder().name) / f"{room.replace(' ', '-')}.z8"), True
    options.grammar.include_adj = False
    try:
        maker = textworld.GameMaker(options)
        rooms = {name: maker.new_room(name) for name in ROOMS}
        for one, side, other, back in WAYS:
            maker.connect(getattr(rooms[one], side), getattr(rooms[other], back))
        games: dict[str, Any] = {}
        for where, (kind, name, things) in FURNITURE.items():
            games[name] = maker.new(type=kind, name=name)
            rooms[where].add(games[name])
            if kind == "c":
                games[name].add_property("closed")
            for thing_kind, thing in things:
                games[thing] = maker.new(type=thing_kind, name=thing)
                if thing_kind == "f":
                    games[thing].add_property("edible")
                games[name].add(games[thing])
        maker.set_player(rooms[room])
        food, fridge = games["stale food"], games["fridge"]
        put_away = {maker.new_fact("in", food, fridge), maker.new_fact("closed", fridge)}
        maker.quests = [
            game_module.Quest(
                win_events=[], fail_events=[game_module.Event(conditions={maker.new_fact("eaten", food)})]
            ),
            game_module.Quest(win_events=[game_module.Event(conditions=put_away)], reward=1),
        ]
        game = maker.build()
        game.objective = OBJECTIVE
        return str(generator.compile_game(game, options))
    except Exception as error:  # its compiler is a program of its own, which may be missing
        raise UserError(f"textworld could not build text-nav's house: {type(error).__name__}: {error}") from error


class TextNav(TextWorld):
    """A house of eight rooms: take the stale food from the living room's table, put it into the fridge and close it,
    which pays 1 and ends the episode. Eating it ends it with 0. The seed draws the room to begin in, or
    `reset(options={"room": "garden"})` names it."""

    def __init__(self, limit: int = 50, commands: bool = True, render_mode: str | None = None) -> None:
        super().__init__("", limit, commands, render_mode)

    def begin(self, options: Info) -> tuple[str, Info]:
        room = options.get("room") or ROOMS[int(self.np_random.integers(len(ROOMS)))]
        if room not in ROOMS:
            raise UserError(f"room={room}: text-nav's rooms are {', '.join(ROOMS)}.{nearest(room, ROOMS)}")
        self._open(house(room))
        return super().begin({})


gym.register(GAME, entry_point="offrl.envs.text.textworld_env:TextWorld")
gym.register(NAV, entry_point="offrl.envs.text.textworld_env:TextNav")
