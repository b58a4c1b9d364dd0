"""Text environments: the maze and Wordle against what is known of them, their data, windows of history and rollouts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from offrl import registry
from offrl.envs.text import AnyText, HistoryWindow, maze, maze_data, wordle, wordle_play
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.lm.rollouts import rollouts
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.environments import make_env
from offrl.tasks.task import lookup
from tests.support.evaluation import evaluate
from tests.support.wordle import Greedy

START = {"start": (1, 1)}


def moves_of(env: gym.Env) -> dict[tuple[maze.Cell, str], tuple[maze.Cell, float, bool]]:
    """(cell, action) -> (next cell, reward, terminated), as the environment itself steps."""
    found = {}
    for cell in maze.STARTS:
        for action in maze.ACTIONS:
            env.reset(options={"start": cell})
            _, reward, terminated, truncated, _ = env.step(action)
            assert not truncated
            found[cell, action] = env.unwrapped.position, reward, terminated
    return found


def test_maze_has_the_known_optimal_and_random_returns() -> None:
    step = moves_of(maze.TextMaze())
    assert len(maze.STARTS) == 25 and len(maze.LAYOUT) == 10 and {len(row) for row in maze.LAYOUT} == {13}
    assert maze.GOAL == (8, 6) and maze.LAYOUT[8][6] == "G"
    best = dict.fromkeys(maze.STARTS, 0.0)
    mean, square = dict(best), dict(best)  # of the random policy's return, from step t on
    for t in range(maze.LIMIT, 0, -1):
        new_best, new_mean, new_square = {}, {}, {}
        for cell in maze.STARTS:
            tails = []
            for action in maze.ACTIONS:
                there, reward, over = step[cell, action]
                if t == maze.LIMIT:
                    tails.append((-1.0, -1.0, 1.0))  # fails, whatever is said
                elif over:
                    tails.append((reward, reward, reward**2))
                else:
                    m, s = mean[there], square[there]
                    tails.append((reward + best[there], reward + m, reward**2 + 2 * reward * m + s))
            new_best[cell] = max(x[0] for x in tails)
            new_mean[cell] = float(np.mean([x[1] for x in tails]))
            new_square[cell] = float(np.mean([x[2] for x in tails]))
        best, mean, square = new_best, new_mean, new_square
    assert np.mean(list(best.values())) == pytest.approx(-6.84, abs=1e-9)
    random = float(np.mean(list(mean.values())))
    # of 32 rollouts from each of the 25 cells
    error = np.sqrt(np.mean([square[c] - mean[c] ** 2 for c in maze.STARTS]) / 800)
    assert abs(random - -86.3) < 2 * error < 2.5


def test_solver_takes_the_shortest_way_from_everywhere() -> None:
    env, returns = maze.TextMaze(), []
    for cell in maze.STARTS:
        env.reset(options={"start": cell})
        total, over = 0.0, False
        while not over:
            _, reward, over, truncated, info = env.step(maze.solve(env.position))
            total += reward
            assert not truncated
        assert info["success"] and reward == 0.0
        returns.append(total)
    assert np.mean(returns) == pytest.approx(-6.84)


def test_maze_sentences() -> None:
    env = maze.TextMaze()
    assert env.reset(options={"start": (5, 3)})[0] == (
        "The goal is at position 8, 6. Your current position is at position 5, 3. There are walls to your left, below "
        "you.\n"
    )
    assert env.reset(options={"start": (5, 6)})[0].endswith("There is a wall above you.\n")
    assert env.reset(options={"start": (1, 3)})[0].endswith("There is a wall above you.\n")
    assert env.reset(options={"start": (1, 11)})[0].endswith(
        "position 1, 11. There are walls to your right, above you, below you.\n"
    )
    assert "position 1, 1 1." in maze.TextMaze(spaced_digits=True).reset(options={"start": (1, 11)})[0]
    assert (
        maze.TextMaze("walls").reset(options={"start": (7, 6)})[0] == "There are walls to your right, to your left.\n"
    )
    compact = {maze.words(cell, "compact") for cell in maze.STARTS}
    assert "1 11\n" in compact and len(compact) == 25
    with pytest.raises(UserError, match="Did you mean 'compact'"):
        maze.TextMaze("compct")


def test_maze_punishes_what_is_no_action_and_goes_on() -> None:
    env = maze.TextMaze("compact")
    env.reset(options=START)
    for said in ("", "move", "move right move right\n", "Move right", "move right\n\n", "去右边"):
        assert env.step(said)[:4] == ("1 1\n", -4.0, False, False)
    said, reward, _, _, info = env.step("move up\n")  # into the wall
    assert (said, reward, info["understood"], info["success"]) == ("1 1\n", -1.0, True, False)
    assert info["legal_actions"] == ["move left\n", "move right\n", "move up\n", "move down\n"]
    assert env.step("move right")[:2] == ("1 2\n", -1.0)
    assert env.step("nonsense")[4]["understood"] is False


def test_maze_fails_on_step_101_and_not_before() -> None:
    env = maze.TextMaze("compact")
    env.reset(options={"start": (7, 6)})
    ends = [env.step("move left\n") for _ in range(100)]
    assert not any(e[2] or e[3] for e in ends)
    said, reward, terminated, truncated, info = env.step("move down\n")  # which would have reached the goal
    assert (said, reward, terminated, truncated, info["success"]) == ("7 6\n", -1.0, False, True, False)
    assert sum(e[1] for e in ends) + reward == -101.0
    env.reset(options={"start": (7, 6)})
    assert env.step("move down\n")[:4] == ("8 6\n", 0.0, True, False)


def test_seed_or_option_decides_where_a_maze_begins() -> None:
    env = maze.TextMaze("compact")
    first = [env.reset(seed=seed)[0] for seed in range(200)]
    env.step("move up")
    assert [env.reset(seed=seed)[0] for seed in range(200)] == first and len(set(first)) == 25
    for wrong in ((0, 0), (8, 6), (99, 1), "5 3", 7, (1, "x")):
        with pytest.raises(UserError, match="no cell to begin in"):
            env.reset(options={"start": wrong})
    assert "#@....#" in (env.reset(options=START), env.render())[1]


@pytest.mark.parametrize("name", ["text-maze", "text-maze-compact", "text-maze-po", "text-wordle"])
def test_tasks_make_text_environments(name: str) -> None:
    task = lookup(name)
    assert task is not None and task.ref_min is not None and task.ref_max is not None
    env = make_env(task)
    assert isinstance(env.observation_space, spaces.Text) and isinstance(env.action_space, spaces.Text)
    for start in task.starts[:3] or (None,):
        said, info = env.reset(seed=3, options=start)
        assert said in env.observation_space and all(a in env.action_space for a in info["legal_actions"])
        assert said == env.reset(seed=3, options=start)[0]
    if name.startswith("text-maze"):
        assert len(task.starts) == len({env.reset(options=s) and env.unwrapped.position for s in task.starts}) == 25
    check_env(env.unwrapped, skip_render_check=True)


def test_scores_are_of_lmrl_gym() -> None:
    ends = {
        "text-maze": (-101, -6.84),
        "text-maze-po": (-101, -25.75),
        "text-wordle": (-6, -1.94),
        "text-chess": (-401, 1),
    }
    for name, (low, high) in {**ends, "text-chess-endgames": (-1, 1), "text-maze-compact": (-101, -6.84)}.items():
        task = lookup(name)
        assert task is not None and task.ref_label == "LMRL-Gym"
        assert task.normalise(np.array([low, high])).tolist() == pytest.approx([0.0, 100.0])
    gem, baby = lookup("text-gem-GuessTheNumber-v0-easy"), lookup("text-babyai-GoToLocal-v0")
    assert gem is not None and gem.env_kwargs == {"name": "game:GuessTheNumber-v0-easy"}
    assert baby is not None and baby.env_kwargs == {"level": "BabyAI-GoToLocal-v0"}
    assert lookup("text-gem-") is None and lookup("text-mazes") is None


class Solver:
    """A policy as `offrl.evaluation.evaluator` takes it, for compact observations."""

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        ways = [None if said is None else maze.solve(tuple(map(int, said.split()))) + "\n" for said in observations]
        return np.array(ways, object), None


def test_evaluation_begins_in_every_cell_in_turn() -> None:
    task = lookup("text-maze-compact")
    assert task is not None
    scored = evaluate([Solver()], [0], task, EvalConfig(episodes=50, parallel=7))
    ways = [maze.distances()[tuple(start["start"])] for start in task.starts]
    assert scored.lengths[0].tolist() == ways * 2 and scored.returns[0].tolist() == [1.0 - way for way in ways] * 2
    assert scored.values.mean() == pytest.approx(100.0) and scored.successes is not None and scored.successes.all()
    assert "LMRL-Gym" in scored.label and "TextMaze-v0" in scored.label


def test_some_starts_more_often_than_others_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    task = lookup("text-maze-compact")
    assert task is not None
    evaluate([Solver()], [0], task, EvalConfig(episodes=10))
    assert (
        capsys.readouterr().err.count(
            "10 episodes play some of its 25 starts more often than others: take a multiple of 25"
        )
        == 1
    )
    evaluate([Solver()], [0], task, EvalConfig(episodes=25))
    assert "more often" not in capsys.readouterr().err
    told: list[str] = []  # as an evaluation process has it: its parent has said so
    Evaluator(task, EvalConfig(episodes=10), lambda kind, message: told.append(kind)).close()
    assert not told


# ------------------------------------------------------------------------------------------------------------------ the
# maze's data


def test_walks_are_as_measured() -> None:
    walks = maze_data.generate("full")
    lengths = np.array([len(w["turns"]) for w in walks])
    success = np.array([w["terminated"] for w in walks])
    returns = np.array([sum(t["reward"] for t in w["turns"]) for w in walks])
    assert len(walks) == 1_240 and lengths.min() == 1 and lengths.max() == 40
    for got, known in ((lengths, 18.6), (success, 0.109), (returns, -18.5)):
        assert abs(got.mean() - known) < 2 * got.std() / np.sqrt(len(walks))
    assert np.mean([w["meta"]["solver"] for w in walks]) == pytest.approx(0.15, abs=0.002)
    assert np.bincount([w["meta"]["part"] for w in walks]).tolist() == [414, 413, 413]
    assert all(w["terminated"] != w["truncated"] for w in walks)
    assert all((w["turns"][-1]["reward"] == 0.0) == w["terminated"] for w in walks)


def test_walks_stay_in_their_part_and_parts_overlap() -> None:
    left, right, low = (maze_data.part(letters) for letters in maze_data.PARTS)
    assert left & low == {(5, 3)} and right & low == {(5, 9)} and not left & right
    assert len(left | right | low) == 26 and maze.GOAL in low
    cells = [left, right, low]
    visited: list[set[Any]] = [set(), set(), set()]
    for walk in maze_data.generate("compact", 1):
        said = [t["obs"] for t in walk["turns"]] + [walk["final_obs"]]
        visited[walk["meta"]["part"]] |= {tuple(map(int, text.split())) for text in said}
    assert [set(c) for c in cells] == visited


def test_walks_are_the_seeds_and_told_in_other_words() -> None:
    full, again, walls = (
        maze_data.generate("full", 5, 60),
        maze_data.generate("full", 5, 60),
        maze_data.generate("walls", 5, 60),
    )
    assert full == again != maze_data.generate("full", 6, 60)
    for one, other in zip(full, walls, strict=True):
        assert [t["action"] for t in one["turns"]] == [t["action"] for t in other["turns"]]
        assert all(o["obs"].endswith(p["obs"]) for o, p in zip(one["turns"], other["turns"], strict=True))
        for turn, following in zip(
            one["turns"], [*(t["obs"] for t in one["turns"][1:]), one["final_obs"]], strict=True
        ):
            env = maze.TextMaze()
            row, column = map(int, re.findall(r"position is at position (\d+), (\d+)", turn["obs"])[0])
            env.reset(options={"start": (row, column)})
            assert env.step(turn["action"])[0] == following


def test_registered_data_are_episodes_of_their_tasks() -> None:
    pytest.importorskip("offrl.data.text.dataset", reason="text datasets are not there yet")
    data = registry.get("dataset", "text-maze-compact")(None)
    assert data.spec.text and data.spec.task == lookup("text-maze-compact") and len(data.episode_start) == 1_240
    assert data.spec.name == "text-maze-compact" and "5 3\n" in data.strings and "move left\n" in data.strings
    assert bool(data.complete.all()) and 0.09 < float(data.columns["terminations"].sum()) / 1_240 < 0.13
    assert {"text-maze", "text-maze-po", "text-wordle"} <= set(registry.names("dataset"))


# --------------------------------------------------------------------------------------------------------------- Wordle


def test_words_are_a_list_of_plain_words(tmp_path: Path) -> None:
    words = wordle.load_words()
    assert len(words) == len(set(words)) == 431 and list(words) == json.loads(wordle.WORDS.read_text())
    assert all(re.fullmatch("[a-z]{5}", word) for word in words)
    (tmp_path / "mine.txt").write_text("zebra\ncrane  apple\n")
    (tmp_path / "mine.json").write_text('["crane", "apple"]')
    assert wordle.load_words(str(tmp_path / "mine.txt")) == ("apple", "crane", "zebra")
    assert wordle.TextWordle(words=str(tmp_path / "mine.json")).words == ("apple", "crane")
    for text, message in (("crane Apple", "'Apple'"), ("", "no list"), ("toolong", "5 letters")):
        (tmp_path / "bad.txt").write_text(text)
        wordle.load_words.cache_clear()
        with pytest.raises(UserError, match=message):
            wordle.load_words(str(tmp_path / "bad.txt"))
    with pytest.raises(UserError, match="cannot be read"):
        wordle.load_words(str(tmp_path / "absent.json"))


@pytest.mark.parametrize(
    ("guess", "target", "anywhere", "counted"),
    [
        ("crane", "crane", "ggggg", "ggggg"),
        ("adieu", "crane", "ybbyb", "ybbyb"),
        ("speed", "abide", "bbyyy", "bbyby"),  # one e in the target: the second guessed is one too many
        ("speed", "erase", "ybyyb", "ybyyb"),  # two of them: both are somewhere else
        ("allee", "apple", "gyyyg", "gybbg"),  # the green e uses up the only one
        ("eerie", "crane", "yyybg", "bbybg"),
        ("llama", "hello", "yybbb", "yybbb"),
        ("level", "hello", "ygbyy", "ygbby"),
    ],
)
def test_feedback_by_hand(guess: str, target: str, anywhere: str, counted: str) -> None:
    assert wordle.feedback(guess, target) == wordle.feedback(guess, target, "anywhere") == anywhere
    assert wordle.feedback(guess, target, "counted") == counted
    for kind, said in (("anywhere", anywhere), ("counted", counted)):
        both = tuple(sorted({guess, target}))
        code = wordle_play.table(both, kind)[both.index(guess), both.index(target)]
        assert code == sum("byg".index(mark) * 3**i for i, mark in enumerate(said))


def test_tables_are_the_feedback() -> None:
    words, draw = wordle.load_words(), np.random.default_rng(0)
    for kind in wordle.YELLOW:
        codes = wordle_play.table(words, kind)
        for i, j in draw.integers(0, len(words), (400, 2)).tolist():
            said = wordle.feedback(words[i], words[j], kind)
            assert codes[i, j] == sum("byg".index(mark) * 3**k for k, mark in enumerate(said))


def test_wordle_is_played_by_its_rules() -> None:
    env = wordle.TextWordle()
    said, info = env.reset(options={"word": "crane"})
    assert said == "Wordle:\n" and len(info["legal_actions"]) == 431 and "c r a n e\n" in info["legal_actions"]
    assert env.step("g r e a t\n")[:4] == ("b g y y b\n", -1.0, False, False)
    assert env.step("qqqqq\n")[:4] == ("invalid word\n", -1.0, False, False)
    assert env.step("great")[4]["understood"] and not env.step("c r a n")[4]["understood"]
    said, reward, terminated, truncated, info = env.step("c r a n e\n")
    assert (said, reward, terminated, truncated, info["success"]) == ("g g g g g\n", 0.0, True, False, True)
    env.reset(options={"word": "crane"})
    ends = [env.step("no word") for _ in range(6)]
    assert [e[2] for e in ends] == [False] * 5 + [True] and sum(e[1] for e in ends) == -6.0 and not ends[-1][3]
    seen = []
    for seed in range(50):
        env.reset(seed=seed)
        word = env.word
        assert env.reset(seed=seed)[0] == wordle.FIRST and env.word == word
        seen.append(word)
    assert len(set(seen)) > 40
    with pytest.raises(UserError, match="not in the list"):
        env.reset(options={"word": "qqqqq"})
    with pytest.raises(UserError, match="choose one of anywhere, counted"):
        wordle.TextWordle(yellow="count")
    assert wordle.TextWordle(yellow="counted").reset(options={"word": "crane"}) and env.render() == wordle.FIRST


def greedy_returns() -> np.ndarray:
    """[W]: the return of `Greedy` for each word of the list."""
    player = Greedy()
    returns = np.zeros(len(player.words))
    for target in range(len(returns)):
        left = np.arange(len(returns))
        for _ in range(wordle.TRIES):
            guess = player.best(left)
            if guess == target:
                break
            returns[target] -= 1.0
            left = left[player.table[guess, left] == player.table[guess, target]]
    return returns


def test_players_of_wordle_earn_what_is_known() -> None:
    """Known: what was measured with another list of 431 words."""
    words = wordle.load_words()
    for share, known, near in ((1.0, -5.94, 0.02), (wordle_play.RANDOM, -4.10, 0.06), (0.0, -2.39, 0.06)):
        targets, guesses, lengths = wordle_play.play(0, 3_000, share, words)
        solved = guesses[np.arange(3_000), lengths - 1] == targets
        assert float((solved - lengths).mean()) == pytest.approx(known, abs=near)
    greedy = greedy_returns()
    assert greedy.mean() == pytest.approx(-1.95, abs=0.06) and greedy.min() >= -5
    exact = -6 + 21 / len(words)  # each guess is right with probability 1 / W and then saves as many steps as were left
    assert exact == pytest.approx(-5.951, abs=1e-3)


def test_games_are_as_measured_and_told_as_the_environment_tells_them() -> None:
    games = wordle_play.generate(0, 2_000)
    returns = np.array([sum(t["reward"] for t in g["turns"]) for g in games])
    solved = np.array([g["turns"][-1]["reward"] == 0.0 for g in games])
    assert abs(returns.mean() - -4.10) < 3 * returns.std() / np.sqrt(2_000)
    assert abs(solved.mean() - 0.706) < 3 * solved.std() / np.sqrt(2_000)
    assert games[:50] == wordle_play.generate(0, 2_000)[:50] != wordle_play.generate(1, 2_000)[:50]
    env = wordle.TextWordle()
    for game in games[:100]:
        said, _ = env.reset(options={"word": game["meta"]["word"]})
        for number, turn in enumerate(game["turns"]):
            assert turn["obs"] == said
            said, reward, terminated, _, _ = env.step(turn["action"])
            assert reward == turn["reward"] and terminated == (number == len(game["turns"]) - 1)
        assert said == game["final_obs"] and game["terminated"] and not game["truncated"]


# ------------------------------------------------------------------------------------------------- windows and rollouts


def test_window_holds_the_last_texts() -> None:
    env = HistoryWindow(maze.TextMaze("compact"), 3)
    assert env.reset(options=START)[0] == "1 1\n"
    assert env.step("move right\n")[0] == "1 1\nmove right\n1 2\n"
    said, _, _, _, info = env.step("what?")
    assert (
        said == "1 2\nwhat?1 2\n" and info["history"] == ["1 2\n", "what?", "1 2\n"] and said in env.observation_space
    )
    assert env.reset(options=START)[0] == "1 1\n"
    plain = HistoryWindow(maze.TextMaze("compact"), 1)
    assert plain.reset(options=START)[0] == "1 1\n" and plain.step("move right\n")[0] == "1 2\n"
    lines = HistoryWindow(maze.TextMaze("compact"), 2, separator="|")
    lines.reset(options=START)
    assert lines.step("go")[0] == "go|1 1\n"
    with pytest.raises(UserError, match="1 text at least"):
        HistoryWindow(maze.TextMaze(), 0)


def test_texts_of_every_script_are_in_the_space() -> None:
    space = AnyText(20)
    for text in ("", "a b\n", "Füße", "去右边", "🙂", "\t\x00"):
        assert text in space
    assert "x" * 21 not in space and "\ud800" not in space and 5 not in space and space.sample() in space
    assert isinstance(space, spaces.Text) and AnyText(20) == space != AnyText(21)


@pytest.mark.parametrize("parallel", [1, 4, 100])
def test_rollouts_do_not_depend_on_how_many_run_at_once(parallel: int) -> None:
    sizes = []

    def policy(histories: list[list[str]], legal: list[list[str] | None]) -> list[str]:
        sizes.append(len(histories))
        assert all(len(h) % 2 == 1 for h in histories) and all(x is not None and len(x) == 4 for x in legal)
        return [f"{maze.solve(tuple(map(int, h[-1].split())))}\n" if len(h) > 1 else "hm" for h in histories]

    played = rollouts(
        lambda: maze.TextMaze("compact"), policy, 9, 7, parallel, starts=[{"start": c} for c in maze.STARTS[:5]]
    )
    assert max(sizes) == min(parallel, 9)
    assert [p["turns"][0]["obs"] for p in played[:5]] == [maze.words(c, "compact") for c in maze.STARTS[:5]]
    assert played[0]["turns"] == played[5]["turns"] and played[0]["meta"]["seed"] != played[5]["meta"]["seed"]
    for episode in played:
        assert episode["terminated"] and not episode["truncated"] and episode["final_obs"] == "8 6\n"
        assert episode["meta"]["success"] == 1.0 and episode["meta"]["misunderstood"] == 1
        assert episode["turns"][0]["reward"] == -4.0 and episode["turns"][-1]["reward"] == 0.0
        row, column = map(int, episode["turns"][0]["obs"].split())
        assert len(episode["turns"]) == maze.distances()[row, column] + 1


def test_rollouts_are_the_seeds_cut_where_told_and_refuse_wrong_answers() -> None:
    def stay(histories: list[list[str]], legal: Any) -> list[str]:
        return ["move up\n"] * len(histories)

    def make() -> gym.Env:
        return maze.TextMaze("compact")

    one, other = rollouts(make, stay, 6, 1, 3, max_steps=4), rollouts(make, stay, 6, 1, 2, max_steps=4)
    assert one == other != rollouts(make, stay, 6, 2, 3, max_steps=4)
    assert all(len(e["turns"]) == 4 and e["truncated"] and not e["terminated"] for e in one)
    assert [len(e["turns"]) for e in rollouts(make, stay, 2)] == [101, 101]
    for wrong, message in (
        (lambda h, a: ["x"], "1 actions for 2"),
        (lambda h, a: [1, 2], "int"),
        (lambda h, a: "xx", "one text"),
    ):
        with pytest.raises(UserError, match=message):
            rollouts(make, wrong, 2)
    with pytest.raises(UserError, match="parallel=0"):
        rollouts(make, stay, 2, parallel=0)


def test_players_and_rollouts_agree() -> None:
    words = wordle.load_words()
    some = list(range(0, len(words), 7))
    played = rollouts(wordle.TextWordle, Greedy(), len(some), starts=[{"word": words[i]} for i in some])
    assert [sum(t["reward"] for t in e["turns"]) for e in played] == greedy_returns()[some].tolist()
    player = wordle_play.Consistent(0)
    for episode in rollouts(wordle.TextWordle, player, 20):
        marks = [("".join(t["action"].split()), "".join(s.split())) for t, s in _answers(episode)]
        for k, (guess, _) in enumerate(marks):
            assert all(wordle.feedback(before, guess) == said for before, said in marks[:k])
    guess = player([[wordle.FIRST, "qqqqq\n", wordle.INVALID]])  # an invalid guess tells nothing
    assert "".join(guess[0].split()) in words
    guess = player([[wordle.FIRST, "crane\n", "g g g g b\n", "crane\n", "b b b b b\n"]])  # nothing agrees with that
    assert "".join(guess[0].split()) in words


def _answers(episode: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    following = [t["obs"] for t in episode["turns"][1:]] + [episode["final_obs"]]
    return list(zip(episode["turns"], following, strict=True))
