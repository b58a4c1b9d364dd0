"""Chess and chess endgames in words (LMRL-Gym, arXiv 2311.18232), written anew from their rules; python-chess keeps the
board.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym

from offrl.envs.generated import BaseEnvironment, Info, TextStep
from offrl.envs.text.optional import package
from offrl.envs.text.space import AnyText
from offrl.errors import UserError

ENV = "offrl/TextChess-v0"
ENDGAMES = ("KQk", "KRk", "KQRk", "KRRk")  # White's pieces and Black's king, in FEN's letters
DEFAULTS = {"Threads": 1, "Hash": 16}  # UCI options, for an engine that has them
LIMIT = 401  # the turn that is one too many: a game has 400
PLACES = ("/usr/games/stockfish", "/usr/local/bin/stockfish")  # where Debian and others put it, outside many a PATH


def spaced(text: str) -> str:
    """Its characters with a space after each but the last, and a line break."""
    return f"{' '.join(text)}\n"


class TextChess(BaseEnvironment):
    """Play White. Observation: the position in FEN, its characters apart. Action: a move in SAN, its characters apart
    or not ("N f 3").

    Rewards: 1 for mate, -1 for being mated, 0 for a draw and for every other legal move; -1 for what is no legal move,
    which changes nothing. Turn 401 is the last: the game is truncated there. info["legal_actions"] are the legal moves,
    info["success"] that White won.

    endgames: begin in a random position of `pieces` (KQK, KRK, KQRK and KRRK) that the seed draws, neither side in
    check, White to move. position: the FEN to begin in (default: the usual one). `reset(options={"position": FEN})`
    does so once.
    engine, nodes, settings: the UCI engine that plays Black, how many positions it looks at for a move, and its UCI
    options. With the default ones (one thread, a fresh memory each game) it answers the same in the same game; "Skill
    Level" makes stockfish random. opponent: a function from a `chess.Board` to its move, in place of an engine.
    Raises UserError where python-chess or the engine is missing, and for a position that is none.
    """

    metadata: Info = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(
        self,
        endgames: bool = False,
        pieces: Sequence[str] = ENDGAMES,
        position: str | None = None,
        engine: str = "stockfish",
        nodes: int = 1_000,
        settings: dict[str, Any] | None = None,
        opponent: Callable[[Any], Any] | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._chess = package("chess", "chess", "chess")
        self.endgames, self.pieces, self.position, self.opponent, self.render_mode = (
            endgames,
            tuple(pieces),
            position,
            opponent,
            render_mode,
        )
        self.engine, self.nodes, self.settings = engine, nodes, dict(settings or {})
        self.observation_space, self.action_space = AnyText(500), AnyText(1_000)
        self.board = self._chess.Board()
        self.turns, self._game = 0, object()
        self._engine: Any = None

    def begin(self, options: Info) -> tuple[str, Info]:
        position = options.get("position", self.position)
        self.board = self._endgame() if position is None and self.endgames else self._board(position)
        self.turns, self._game = 0, object()  # python-chess has the engine forget where the game is another one
        return self._tell(won=False)

    def step(self, action: str) -> TextStep:
        self.turns += 1
        move = self._parse(action)
        reward = -1.0
        if move is not None:
            self.board.push(move)
            reward = 1.0 if self.board.is_checkmate() else 0.0
            if not self.board.is_game_over():
                self.board.push(self._answer())
                reward = -1.0 if self.board.is_checkmate() else 0.0
        over = bool(self.board.is_game_over())
        text, info = self._tell(won=reward > 0)
        return text, reward, over, self.turns >= LIMIT and not over, {**info, "understood": move is not None}

    def render(self) -> Any:
        """The board as eight lines."""
        return str(self.board)

    def close(self) -> None:
        if self._engine is not None:
            with contextlib.suppress(Exception):  # it may be gone already
                self._engine.quit()
            self._engine = None

    def _board(self, position: str | None) -> Any:
        if position is None:
            return self._chess.Board()
        try:
            board = self._chess.Board(position)
        except ValueError as error:
            raise UserError(f"position={position!r} is no position in FEN: {error}") from None
        if not board.is_valid() or board.turn != self._chess.WHITE or board.is_game_over():
            raise UserError(
                f"position={position!r}: a game begins in a valid position that is not over, with White to move"
            )
        return board

    def _endgame(self) -> Any:
        while True:
            letters = self.pieces[int(self.np_random.integers(len(self.pieces)))]
            board = self._chess.Board()
            board.clear()
            for letter, square in zip(
                letters, self.np_random.choice(64, len(letters), replace=False).tolist(), strict=True
            ):
                board.set_piece_at(square, self._chess.Piece.from_symbol(letter))
            if board.is_valid() and not board.is_check() and not board.is_game_over():
                return board

    def _parse(self, action: str) -> Any:
        try:
            move = self.board.parse_san("".join(action.split()))
        except ValueError:  # python-chess's errors of illegal, ambiguous and unreadable moves are ValueErrors
            return None
        return move if move in self.board.legal_moves else None  # "--" reads as a move that moves nothing

    def _answer(self) -> Any:
        if self.opponent is not None:
            return self.opponent(self.board.copy())
        if self._engine is None:
            self._engine = self._start_engine()
        engines = package("chess.engine", "chess", "chess")
        try:
            result = self._engine.play(self.board, engines.Limit(nodes=self.nodes), game=self._game)
        except engines.EngineError as error:
            raise UserError(f"the chess engine {self.engine} stopped playing: {error}") from error
        if result.move is None:
            raise UserError(f"the chess engine {self.engine} gave no move in {self.board.fen()}")
        return result.move

    def _start_engine(self) -> Any:
        path = shutil.which(self.engine) or next(
            (p for p in PLACES if self.engine == "stockfish" and shutil.which(p)), None
        )
        if path is None:
            raise UserError(
                f"there is no chess engine {self.engine}: install one (apt install stockfish), or give its path with "
                "engine=PATH"
            )
        engines = package("chess.engine", "chess", "chess")
        try:
            engine = engines.SimpleEngine.popen_uci(path)
            engine.configure({k: v for k, v in DEFAULTS.items() if k in engine.options} | self.settings)
        except Exception as error:  # not a program, no UCI engine, an option it does not know, no answer in time
            raise UserError(f"the chess engine {path} could not be started: {type(error).__name__}: {error}") from error
        return engine

    def _tell(self, won: bool) -> tuple[str, Info]:
        legal = [spaced(self.board.san(move)) for move in self.board.legal_moves]
        return spaced(self.board.fen()), {"legal_actions": legal, "success": won}


gym.register(ENV, entry_point="offrl.envs.text.chess_env:TextChess")
