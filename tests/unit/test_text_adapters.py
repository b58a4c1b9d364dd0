"""Text environments of other packages: what happens without the package, and with a stand-in that follows its
documented interface.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import gymnasium as gym
import numpy as np
import pytest

from offrl.envs.text import AnyText, babyai, chess_env, gem_env, textworld_env
from offrl.errors import UserError
from offrl.tasks.environments import make_env
from offrl.tasks.task import Task, lookup

PACKAGES = {"gem": "gem-llm", "chess": "chess", "textworld": "textworld", "minigrid": "minigrid"}


def module(name: str, **members: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(members)
    return made


@pytest.mark.parametrize(
    ("package", "task"),
    [
        ("gem", "text-gem-Game-v0"),
        ("chess", "text-chess"),
        ("textworld", "text-nav"),
        ("minigrid", "text-babyai-GoTo-v0"),
    ],
)
def test_missing_package_is_named_with_its_pip_line(package: str, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # the import system's way to say that there is none
    found = lookup(task)
    assert found is not None
    with pytest.raises(UserError, match=f"needs the package {PACKAGES[package]}.*pip install {PACKAGES[package]}"):
        make_env(found)


# -------------------------------------------------------------------------------------------------------------- gem-llm


class Guess:
    """As gem's games: it draws from Python's and NumPy's global generators, and ends both ways on its last turn."""

    def __init__(self, turns: int = 3, start: str = "?") -> None:
        self.turns, self.start = turns, start
        self.reset()

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        self.left, self.number, self.seed = (
            self.turns,
            random.randint(1, 1000) + 1000 * int(np.random.randint(1000)),
            seed,
        )
        return f"{self.start} {self.number}", {"suffix": "go"}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.left -= 1
        hint = f"{action} {random.random()}"
        if action == "fail":
            return hint, 0, False, True, {}
        return hint, 1, self.left == 0, self.left == 0, {}


@pytest.fixture
def gem(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, **settings: Any) -> Guess:
        if name != "game:Guess-v0":
            raise ValueError(f"Environment {name} not found in registry.")
        return Guess(**settings)

    monkeypatch.setitem(sys.modules, "gem", module("gem", make=make))
    monkeypatch.setitem(sys.modules, "gem.envs", module("gem.envs"))
    monkeypatch.setitem(
        sys.modules, "gem.envs.registration", module("gem.envs.registration", ENV_REGISTRY={"game:Guess-v0": None})
    )


@pytest.mark.usefixtures("gem")
def test_gem_episode_is_decided_by_its_seed_and_disturbs_nobody() -> None:
    task = lookup("text-gem-Guess-v0")
    assert task is not None
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    one, other = make_env(task), make_env(task)
    first = one.reset(seed=5)
    assert (
        first[1] == {"suffix": "go"}
        and first[0] in one.observation_space
        and isinstance(one.observation_space, AnyText)
    )
    assert other.reset(seed=6)[0] != first[0]
    assert other.reset(seed=5) == first
    answers = [(one.step("a"), other.step("a")) for _ in range(2)]  # in turn: each has numbers of its own
    assert all(a == b for a, b in answers) and answers[0][0][0] != answers[1][0][0]
    assert one.reset()[0] != one.reset()[0]
    assert (random.random(), np.random.rand()) == expected


@pytest.mark.usefixtures("gem")
def test_gem_endings_settings_and_unknown_names() -> None:
    env = gem_env.TextGem("game:Guess-v0", turns=2, start="number")
    assert env.reset(seed=0)[0].startswith("number ")
    said, reward, terminated, truncated, _ = env.step("a")
    assert said.startswith("a ") and (reward, terminated, truncated) == (1.0, False, False)
    assert env.step("a")[2:4] == (True, False)
    env.reset(seed=0)
    assert env.step("fail")[2:4] == (False, True)
    with pytest.raises(UserError, match=r"not found in registry.*Did you mean 'game:Guess-v0'"):
        gem_env.TextGem("game:Gues-v0")
    with pytest.raises(UserError, match="TypeError"):
        gem_env.TextGem("game:Guess-v0", wrong=1)


@pytest.mark.skipif(importlib.util.find_spec("gem") is None, reason="the package gem-llm is not installed")
def test_gem_itself() -> None:
    env = gem_env.TextGem("game:GuessTheNumber-v0-easy")
    said = env.reset(seed=1)[0]
    assert said == env.reset(seed=1)[0] and "number" in said.lower()
    over = False
    for guess in range(1, 30):
        _, reward, terminated, truncated, _ = env.step(f"\\boxed{{{guess}}}")
        over = terminated or truncated
        assert np.isfinite(reward) and not (terminated and truncated)
        if over:
            break
    assert over


# ---------------------------------------------------------------------------------------------------------------- chess


class Board:
    """A chess in which White has e4, Qxf7 (mate) and Kd1 (after which Black may mate), and Nb1 (a draw); "--" is the
    null move.
    """

    def __init__(self, position: str = "start w") -> None:
        if " " not in position:
            raise ValueError("expected 6 parts")
        self.moves: list[str] = []
        self.position, self.turn = position, position.endswith(" w")

    @property
    def legal_moves(self) -> list[str]:
        return [] if self.is_game_over() else ["e4", "Qxf7", "Kd1", "Nb1"] if self.turn else ["e5", "Qe1"]

    def parse_san(self, text: str) -> str:
        if text == "--":
            return "0000"
        if text not in self.legal_moves:
            raise ValueError(f"illegal san: {text}")
        return text

    def san(self, move: str) -> str:
        return move

    def push(self, move: str) -> None:
        assert move in self.legal_moves
        self.moves.append(move)
        self.turn = not self.turn

    def is_checkmate(self) -> bool:
        return self.moves[-1:] in (["Qxf7"], ["Qe1"])

    def is_game_over(self) -> bool:
        return self.is_checkmate() or self.moves[-1:] == ["Nb1"]

    def is_valid(self) -> bool:
        return self.position != "bad w"

    def is_check(self) -> bool:
        return False

    def fen(self) -> str:
        return f"{self.position} {len(self.moves)}"

    def copy(self) -> Board:
        return self

    def clear(self) -> None:
        self.position = ""

    def set_piece_at(self, square: int, piece: str) -> None:
        self.position += f"{piece}{square},"


@pytest.fixture
def chess(monkeypatch: pytest.MonkeyPatch) -> None:
    piece = SimpleNamespace(from_symbol=lambda letter: letter)
    monkeypatch.setitem(sys.modules, "chess", module("chess", Board=Board, WHITE=True, Piece=piece))
    played = SimpleNamespace(move="e5")

    class Engine:
        games: list[Any] = []  # noqa: RUF012
        options = {"Threads": 1}  # noqa: RUF012  # and no Hash

        @classmethod
        def popen_uci(cls, command: str) -> Engine:
            return cls()

        def configure(self, settings: dict[str, Any]) -> None:
            if settings != {"Threads": 1}:
                raise EngineError(f"unknown option {list(settings)}")

        def play(self, board: Board, limit: Any, game: Any) -> Any:
            assert limit.nodes == 7
            self.games.append(game)
            return played

        def quit(self) -> None:
            self.games.append("quit")

    class EngineError(RuntimeError):
        pass

    limit = SimpleNamespace
    monkeypatch.setitem(
        sys.modules, "chess.engine", module("chess.engine", SimpleEngine=Engine, Limit=limit, EngineError=EngineError)
    )
    Engine.games.clear()


def reply(move: str) -> Callable[[Any], str]:
    return lambda board: move


@pytest.mark.usefixtures("chess")
def test_chess_pays_wins_losses_draws_and_illegal_moves() -> None:
    env = chess_env.TextChess(opponent=reply("e5"))
    said, info = env.reset(seed=0)
    assert said == "s t a r t   w   0\n" and info["legal_actions"] == ["e 4\n", "Q x f 7\n", "K d 1\n", "N b 1\n"]
    assert env.step("e 4\n")[:4] == ("s t a r t   w   2\n", 0.0, False, False)
    for wrong in ("e 5\n", "", "--", "castle"):
        said, reward, terminated, truncated, info = env.step(wrong)
        assert (said, reward, terminated, truncated) == ("s t a r t   w   2\n", -1.0, False, False) and not info[
            "understood"
        ]
    _, reward, terminated, truncated, info = env.step("Qxf7")
    assert (reward, terminated, truncated, info["success"], info["legal_actions"]) == (1.0, True, False, True, [])
    env.reset()
    assert env.step("N b 1")[1:4] == (0.0, True, False)
    loser = chess_env.TextChess(opponent=reply("Qe1"))
    loser.reset()
    _, reward, terminated, _, info = loser.step("K d 1\n")
    assert (reward, terminated, info["success"]) == (-1.0, True, False)


@pytest.mark.usefixtures("chess")
def test_chess_is_cut_at_turn_401() -> None:
    env = chess_env.TextChess(opponent=reply("e5"))
    env.reset()
    ends = [env.step("no") for _ in range(401)]
    assert (
        sum(e[1] for e in ends) == -401.0
        and [e[3] for e in ends] == [False] * 400 + [True]
        and not any(e[2] for e in ends)
    )


@pytest.mark.usefixtures("chess")
def test_chess_positions_are_checked_and_drawn_by_the_seed() -> None:
    env = chess_env.TextChess(opponent=reply("e5"))
    assert env.reset(options={"position": "mine w"})[0].startswith("m i n e")
    for wrong, message in (
        ("nonsense", "no position in FEN"),
        ("bad w", "valid position"),
        ("mine b", "White to move"),
    ):
        with pytest.raises(UserError, match=message):
            env.reset(options={"position": wrong})
    task = lookup("text-chess-endgames")
    assert task is not None
    games = make_env(task)
    seen = {games.reset(seed=seed)[0] for seed in range(40)}
    assert len(seen) == 40 and games.reset(seed=3)[0] == games.reset(seed=3)[0]
    letters = {"".join(c for c in said if c in "KQRk") for said in seen}
    assert letters == {"KQk", "KRk", "KQRk", "KRRk"}
    squares = [s for s in next(iter(seen)).replace(" ", "").split(",") if s[0] in "KQRk"]
    assert len({s[1:] for s in squares}) == len(squares)


@pytest.mark.usefixtures("chess")
def test_chess_engine_is_asked_with_a_node_limit_and_told_of_new_games(monkeypatch: pytest.MonkeyPatch) -> None:
    env = chess_env.TextChess(nodes=7, engine="no-such-engine")
    env.reset()
    with pytest.raises(UserError, match=r"no chess engine no-such-engine.*apt install stockfish"):
        env.step("e4")
    env = chess_env.TextChess(nodes=7, engine="python3")
    for _ in range(2):
        env.reset()
        for _ in range(2):
            assert env.step("e4")[0].startswith("s t a r t")
    games = list(env._engine.games)
    env.close()
    assert len(games) == 4 and games[0] is games[1] is not games[2] and games[2] is games[3] and env._engine is None
    wrong = chess_env.TextChess(nodes=7, engine="python3", settings={"Skil": 1})
    wrong.reset()
    with pytest.raises(UserError, match="unknown option"):
        wrong.step("e4")
    monkeypatch.setattr(sys.modules["chess.engine"].SimpleEngine, "play", lambda *a, **k: SimpleNamespace(move=None))
    env.reset()
    with pytest.raises(UserError, match="gave no move"):
        env.step("e4")


@pytest.mark.skipif(importlib.util.find_spec("chess") is None, reason="the package chess is not installed")
def test_chess_itself() -> None:
    env = chess_env.TextChess(opponent=lambda board: next(iter(board.legal_moves)))
    said, info = env.reset(seed=0)
    assert (
        said.startswith("r n b q k b n r / p p p p p p p p /")
        and "N f 3\n" in info["legal_actions"]
        and len(info["legal_actions"]) == 20
    )
    assert env.step("N f 3\n")[1:4] == (0.0, False, False) and env.step("K e 2\n")[1] == -1.0
    mate = env.reset(options={"position": "k7/8/1K6/8/8/8/8/7R w - - 0 1"})
    assert "R h 8 #\n" in mate[1]["legal_actions"] and env.step("R h 8 #\n")[1:4] == (1.0, True, False)
    games = chess_env.TextChess(endgames=True)
    for seed in range(20):
        games.reset(seed=seed)
        assert games.board.is_valid() and not games.board.is_check()


# ------------------------------------------------------------------------------------------------------------ TextWorld


class House:
    """As a TextWorld game: states are dictionaries, the score adds up."""

    def __init__(self, plain: bool) -> None:
        self.plain = plain

    def state(self, feedback: str, **more: Any) -> dict[str, Any]:
        told = (
            {}
            if self.plain
            else {"objective": "Win.", "description": "-= Hall =-\nA hall. ", "admissible_commands": ["look", "win"]}
        )
        return {"feedback": feedback, "score": self.score, "won": False, "lost": False, **told, **more}

    def reset(self) -> dict[str, Any]:
        self.score = 0
        return self.state("  /\\ TextWorld /\\ ")

    def step(self, command: str) -> tuple[dict[str, Any], float, bool]:
        self.score += {"win": 2, "good": 1, "bad": -1}.get(command, 0)
        over = command in ("win", "lose")
        return self.state(f"You {command}.", won=command == "win", lost=command == "lose"), self.score, over

    def close(self) -> None:
        self.score = 0


@pytest.fixture
def textworld(monkeypatch: pytest.MonkeyPatch) -> Iterator[MagicMock]:
    made = MagicMock()

    def start(path: str, infos: Any) -> House:
        if path == "absent.z8":
            raise OSError("Unable to find game")
        return House(path.startswith("plain"))

    made.start = start
    for name in ("textworld", "textworld.generator", "textworld.generator.game"):
        monkeypatch.setitem(sys.modules, name, made if name == "textworld" else MagicMock())
    textworld_env.house.cache_clear()
    yield made
    textworld_env.house.cache_clear()


@pytest.mark.usefixtures("textworld")
def test_textworld_games_are_told_and_paid() -> None:
    env = textworld_env.TextWorld("game.z8", limit=4)
    said, info = env.reset()
    assert said == "Win.\n\n-= Hall =-\nA hall.\nAdmissible commands: look, win\n"
    assert info == {"success": False, "legal_actions": ["look\n", "win\n"]}
    assert env.step("good\n")[:4] == ("You good.\nAdmissible commands: look, win\n", 1.0, False, False)
    assert env.step("bad")[1] == -1.0 and env.step("good")[1] == 1.0
    assert env.step("look")[1:4] == (0.0, False, True)  # the fourth step of four
    env.reset()
    _, reward, terminated, truncated, info = env.step("win")
    assert (reward, terminated, truncated, info["success"]) == (2.0, True, False, True)
    env.reset()
    assert env.step("lose")[1:4] == (0.0, True, False)
    assert textworld_env.TextWorld("game.z8", commands=False).reset()[0] == "Win.\n\n-= Hall =-\nA hall.\n"
    assert textworld_env.TextWorld("plain.z5").reset() == ("/\\ TextWorld /\\\n", {"success": False})
    with pytest.raises(UserError, match=r"absent.z8 could not be started: OSError"):
        textworld_env.TextWorld("absent.z8")


def test_house_of_text_nav_is_built_once_for_each_room(textworld: MagicMock) -> None:
    generator = sys.modules["textworld.generator"]
    generator.compile_game.side_effect = lambda game, options: options.path  # type: ignore[attr-defined]
    env = textworld_env.TextNav()
    env.reset(options={"room": "garden"})
    maker = textworld.GameMaker.return_value
    assert [c.args[0] for c in maker.new_room.call_args_list] == list(textworld_env.ROOMS)
    assert maker.connect.call_count == 8 and maker.set_player.call_count == 1
    facts = [c.args[0] for c in maker.new_fact.call_args_list]
    assert facts == ["in", "closed", "eaten"] and maker.build.return_value.objective == textworld_env.OBJECTIVE
    assert {c.kwargs["name"] for c in maker.new.call_args_list} >= {"stale food", "fridge", "table"}
    env.reset(options={"room": "garden"})
    assert maker.set_player.call_count == 1
    for seed in range(30):
        env.reset(seed=seed)
    assert maker.set_player.call_count == 8  # every room, each once
    file = env._file
    env.reset(seed=29)
    assert env._file == file
    with pytest.raises(UserError, match="rooms are bedroom"):
        env.reset(options={"room": "cellar"})
    textworld_env.house.cache_clear()
    generator.compile_game.side_effect = RuntimeError("no compiler")  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="RuntimeError: no compiler"):
        env.reset(options={"room": "office"})


def test_every_room_leads_to_the_fridge() -> None:
    reached, border = {"kitchen"}, ["kitchen"]
    for room in border:
        for one, _, other, _ in textworld_env.WAYS:
            if room in (one, other):
                there = other if room == one else one
                if there not in reached:
                    reached.add(there)
                    border.append(there)
    assert reached == set(textworld_env.ROOMS)
    opposite = {"west": "east", "east": "west", "north": "south", "south": "north"}
    assert all(opposite[side] == back for _, side, _, back in textworld_env.WAYS)


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("textworld") is None, reason="the package textworld is not installed")
def test_text_nav_itself() -> None:
    env = textworld_env.TextNav()
    said, info = env.reset(options={"room": "living room"})
    assert textworld_env.OBJECTIVE in said and "go west\n" in info["legal_actions"]
    way = [
        "take stale food from table",
        "go west",
        "go west",
        "open fridge",
        "insert stale food into fridge",
        "close fridge",
    ]
    ends = [env.step(command) for command in way]
    assert [e[1] for e in ends] == [0.0] * 5 + [1.0] and ends[-1][2] and ends[-1][4]["success"]


# ------------------------------------------------------------------------------------------------------------- minigrid

OBJECTS = ("unseen", "empty", "wall", "floor", "door", "key", "ball", "box", "goal", "lava", "agent")
COLOURS, STATES = ("red", "green", "blue", "purple", "yellow", "grey"), ("open", "closed", "locked")


class Level(gym.Env):
    """As a level of minigrid's: a view of 7 x 7, one in the middle of the last row, who carries what is in that
    cell.
    """

    observation_space, action_space = gym.spaces.Dict({}), gym.spaces.Discrete(7)

    def __init__(self, view: dict[tuple[int, int], tuple[int, int, int]] | None = None) -> None:
        self.view, self.taken = view or {}, []  # type: ignore[var-annotated]

    def seen(self) -> dict[str, Any]:
        image = np.zeros((7, 7, 3), np.uint8)
        image[..., 0] = 1
        for at, cell in self.view.items():
            image[at] = cell
        return {"image": image, "direction": 3, "mission": "go to the red ball"}

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return self.seen(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.taken.append(action)
        return self.seen(), 0.9 * (action == 2), action == 2, action == 1, {}


@pytest.fixture
def minigrid(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tables = {"OBJECT_TO_IDX": OBJECTS, "COLOR_TO_IDX": COLOURS, "STATE_TO_IDX": STATES}
    constants = module("minigrid.core.constants", **{k: {n: i for i, n in enumerate(v)} for k, v in tables.items()})
    for name, made in (
        ("minigrid", module("minigrid")),
        ("minigrid.core", module("minigrid.core")),
        ("minigrid.core.constants", constants),
    ):
        monkeypatch.setitem(sys.modules, name, made)
    gym.register("BabyAI-Stand-v0", entry_point=Level)
    yield
    del gym.registry["BabyAI-Stand-v0"]


@pytest.mark.usefixtures("minigrid")
def test_babyai_is_told_in_words() -> None:
    view = {
        (3, 4): (6, 0, 0),  # a red ball two steps ahead
        (1, 6): (5, 4, 0),  # a yellow key beside one
        (5, 3): (4, 2, 2),  # a locked blue door
        (3, 0): (2, 5, 0),  # the wall ahead
        (4, 6): (2, 5, 0), (5, 6): (2, 5, 0),  # two walls to the right, of which the nearer counts
        (0, 0): (2, 5, 0),  # a wall that is neither ahead nor beside
        (2, 2): (0, 0, 0),
    }  # fmt: skip
    env = babyai.TextBabyAI("BabyAI-Stand-v0", view=view)
    said, info = env.reset(seed=1)
    assert said == (
        "Mission: go to the red ball. You see a yellow key 2 steps to your left, a red ball 2 steps ahead, a locked "
        "blue door 3 steps ahead and 2 steps to your right, a wall 6 steps ahead, a wall 1 step to your right. You "
        "carry nothing.\n"
    )
    assert info["legal_actions"] == ["turn left\n", "turn right\n", "go forward\n", "pick up\n", "drop\n", "toggle\n"]
    holding = babyai.TextBabyAI("BabyAI-Stand-v0", view={(3, 6): (7, 1, 0)})
    assert holding.reset()[0].endswith("You see nothing. You carry a green box.\n")


@pytest.mark.usefixtures("minigrid")
def test_babyai_actions_and_endings() -> None:
    task = lookup("text-babyai-Stand-v0")
    assert isinstance(task, Task)
    env = make_env(task)
    env.reset(seed=0)
    said, reward, terminated, truncated, info = env.step("dance")
    assert said.startswith("That is no action. Mission:") and (reward, terminated, truncated, info["understood"]) == (
        0.0,
        False,
        False,
        False,
    )
    for name in ("turn left\n", "pick up", "drop\n", "toggle\n"):
        assert env.step(name)[4]["understood"]
    assert env.step("turn right\n")[1:4] == (0.0, False, True)
    _, reward, terminated, truncated, info = env.step("go forward\n")
    assert (reward, terminated, truncated, info["success"]) == (0.9, True, False, True)
    assert env.unwrapped.game.unwrapped.taken == [6, 0, 3, 4, 5, 1, 2]
    with pytest.raises(UserError, match=r"no level 'BabyAI-Stan-v0'.*Did you mean 'BabyAI-Stand-v0'"):
        babyai.TextBabyAI("BabyAI-Stan-v0")


@pytest.mark.skipif(importlib.util.find_spec("minigrid") is None, reason="the package minigrid is not installed")
def test_minigrid_itself() -> None:
    env = babyai.TextBabyAI("BabyAI-GoToRedBallGrey-v0")
    said = env.reset(seed=3)[0]
    assert said == env.reset(seed=3)[0] and said.startswith("Mission: go to the red ball")
    assert env.step("turn left\n")[1:4] == (0.0, False, False)
