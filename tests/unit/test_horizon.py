"""`offrl data horizon`: returns and losses by hand, a corridor where the values of random actions suffice, a lock where
they do not, and what is said of either.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch

from offrl.cli.main import main
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.ope.config import HorizonConfig
from offrl.ope.horizon import LAST, REMAINDER, RETURN, Horizon, Lookahead, horizon, with_returns
from offrl.tasks.task import Task

SMALL: dict[str, Any] = {"updates": 300, "seeds": 1, "episodes": 4, "discount": 0.95}
PLACES, LIMIT = 6, 15  # of the corridor, and its steps
CODE, DECOY = (1, 0, 1, 1), 0.2  # random play behind the first right digit earns 1/8, after the second 1/4


class Corridor(gym.Env):
    """The right end earns 1 and ends the episode; a time-out is no end."""

    observation_space = gym.spaces.Box(0.0, 1.0, (PLACES,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.at, self.t = 2, 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        self.at, self.t = min(max(self.at + (1 if action else -1), 0), PLACES - 1), self.t + 1
        goal = self.at == PLACES - 1
        return self._observed(), float(goal), goal, self.t == LIMIT and not goal, {}

    def _observed(self) -> np.ndarray:
        return np.eye(PLACES, dtype=np.float32)[self.at]


class Lock(Corridor):
    """A wrong digit ends the episode: the first of them with a little, which is more than random play earns beyond it;
    the whole code earns 1.
    """

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.at = 0
        return self._observed(), {}

    def step(self, action: Any) -> Any:
        right, first = action == CODE[self.at], self.at == 0
        self.at += bool(right)
        opened = self.at == len(CODE)
        return self._observed(), float(opened) or DECOY * (first and not right), opened or not right, False, {}


def random_play(kind: type[gym.Env], episodes: int, task: Task | None = None) -> Dataset:
    draw, rows = np.random.default_rng(0), []
    env = kind()
    for _ in range(episodes):
        observation, over = env.reset()[0], False
        while not over:
            action = int(draw.integers(2))
            after, reward, terminated, truncated, _ = env.step(action)
            rows.append((observation, action, reward, terminated, truncated, after))
            observation, over = after, terminated or truncated
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return from_arrays(*columns, num_actions=2, name=kind.__name__, task=task)


def scored(kind: type[gym.Env], episodes: int, **settings: Any) -> Any:
    task = Task(name=kind.__name__, env_factory=kind, max_episode_steps=LIMIT, ref_min=0.0, ref_max=1.0)
    return horizon(random_play(kind, episodes, task), HorizonConfig(**{**SMALL, **settings}))


def test_returns_of_a_termination_a_time_out_and_a_row_without_successor() -> None:
    data = from_arrays(
        np.arange(7, dtype=np.float32)[:, None],
        np.array([0, 1, 0, 1, 0, 1, 0]),
        np.array([1.0, 2.0, 3.0, 1.0, 1.0, 1.0, 5.0]),
        np.array([0, 0, 1, 0, 0, 0, 0], bool),
        np.array([0, 0, 0, 0, 1, 0, 1], bool),
    )
    known = data.columns["successor_known"].clone()
    known[4], data.columns["next_observations"][4] = True, 40.0  # the first time-out says what came
    data.columns["successor_known"] = known
    columns = with_returns(data, 0.5).columns
    np.testing.assert_allclose(columns[RETURN], [2.75, 3.5, 3.0, 1.5, 1.0, 1.0, 0.0])
    np.testing.assert_allclose(columns[REMAINDER], [0.0, 0.0, 0.0, 0.25, 0.5, 0.5, 1.0])
    assert columns[LAST][3:].flatten().tolist() == [40.0, 40.0, 6.0, 6.0]


def test_loss_by_hand() -> None:
    data = with_returns(random_play(Lock, 8), 0.5)
    lookahead = Lookahead(HorizonConfig(depth=2, discount=0.5), data)
    lookahead.level, lookahead.spread = 0.0, 1.0
    tables = {0.0: [[1.0, 3.0], [2.0, 4.0]], 1.0: [[5.0, 6.0], [7.0, 8.0]]}  # by state: Q_1, Q_2
    lookahead.values = lambda critic, x: torch.tensor([tables[float(row)] for row in x[:, 0]])  # type: ignore[method-assign]
    lookahead.shares = torch.tensor([0.25, 0.75])
    batch = {
        "observations": torch.tensor([[0.0]]),
        "next_observations": torch.tensor([[1.0]]),
        LAST: torch.tensor([[1.0]]),
        "actions": torch.tensor([1]),
        "rewards": torch.tensor([1.0]),
        "masks": torch.tensor([1.0]),
        RETURN: torch.tensor([1.0]),
        REMAINDER: torch.tensor([0.5]),
    }
    state = lookahead.init(0)
    # y_1 = 1 + .5 (5/4 + 18/4) = 3.875, y_2 = 1 + .5 * 6 = 4: ((3 - 3.875)^2 + (4 - 4)^2) / 2
    loss, _ = lookahead.critic_loss(state.params["critic"], state, batch)
    assert float(loss) == pytest.approx(0.3828125)
    # after a termination nothing follows: y_1 = 1, y_2 = 1
    ended = {**batch, "masks": torch.zeros(1), REMAINDER: torch.zeros(1)}
    loss, _ = lookahead.critic_loss(state.params["critic"], state, ended)
    assert float(loss) == pytest.approx((4.0 + 9.0) / 2)


def test_values_of_random_actions_suffice_in_a_corridor() -> None:
    result = scored(Corridor, 150)
    assert result.suffices == 1 and not result.uneven
    assert result.data[0] < 0.8 and all(float(e.returns.min()) == 1.0 for e in result.evaluations)
    headers, rows = result.table()
    assert len(rows) == 4 and all(len(row) == len(headers) for row in rows)
    assert rows[1][1:3] == ["1.00", "100.0"] and "k = 1" in result.lines()[-2]


def test_without_an_environment_values_alone() -> None:
    result = horizon(random_play(Lock, 50), HorizonConfig(**{**SMALL, "updates": 5}))
    assert result.suffices is None and result.values.shape == (3, 1) and "env=ID" in result.lines()[-1]
    assert all(len(row) == 3 for row in result.table()[1])


def test_what_chance_explains_is_no_gain() -> None:
    """Two seeds of four episodes for each of two depths; the data's mean is 1."""

    def played(*means: float) -> Any:
        return SimpleNamespace(returns=np.repeat(np.array(means)[:, None], 4, 1), scores=None)

    def of(*evaluations: Any) -> Horizon:
        return Horizon((1.0, 0.9, 1.1), 3.0, None, np.zeros((2, 2)), np.array([0.5, 0.5]), "", evaluations)

    assert of(played(1.0, 2.0), played(1.0, 1.0)).suffices is None
    assert of(played(1.0, 5.0), played(3.0, 3.1)).suffices == 2
    assert of(played(2.7, 2.8), played(3.0, 3.1)).suffices == 1
    assert "has no interval" in of(SimpleNamespace(returns=np.full((1, 1), 3.0), scores=None)).lines()[-1]
    assert not of().uneven and Horizon((1.0, 1.0, 1.0), 1.0, None, np.zeros((1, 1)), np.array([0.2, 0.8])).uneven


def test_a_lock_takes_two_steps() -> None:
    result = scored(Lock, 400)
    assert result.suffices == 2
    assert [float(e.returns.mean()) for e in result.evaluations] == pytest.approx([DECOY, 1.0, 1.0])
    assert result.values[:, 0] == pytest.approx([max(q[0]) for q in tabular(random_play(Lock, 400))], abs=0.05)


def tabular(data: Dataset) -> np.ndarray:
    """Q_1 to Q_3 of the lock's places and digits by means over the data's rows: [3, 4, 2]."""
    columns, discount = data.columns, SMALL["discount"]
    places, actions = columns["observations"].argmax(1).numpy(), columns["actions"].numpy()
    going = discount * ~columns["terminations"].numpy()
    after = columns["next_observations"].argmax(1).numpy() % len(CODE)
    y = columns["rewards"].double().numpy().copy()
    for row in reversed(range(len(y) - 1)):
        y[row] += going[row] * y[row + 1]
    tables = []
    for _ in range(3):
        pairs = [[(places == p) & (actions == a) for a in range(2)] for p in range(len(CODE))]
        tables.append(np.array([[y[pair].mean() for pair in row] for row in pairs]))
        y = columns["rewards"].double().numpy() + going * tables[-1].max(1)[after]
    return np.array(tables)


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    columns = random_play(Corridor, 5).columns
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        for name, key in {"terminations": "terminals", "truncations": "timeouts", "rewards": "rewards"}.items():
            file[key] = columns[name].numpy()
        file["observations"], file["actions"] = columns["observations"].numpy(), columns["actions"].numpy()
    assert main(["data", "horizon", str(tmp_path / "a.hdf5"), "updates=3", "seeds=1", "depth=2", "quiet=true"]) == 0
    out = capsys.readouterr().out
    assert "greedy on Q_2" in out and "greedy on Q_3" not in out and "nothing was played" in out


def test_refusals(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with h5py.File(tmp_path / "a.hdf5", "w") as file:
        file["observations"], file["actions"] = np.zeros((4, 2), np.float32), np.zeros((4, 1), np.float32)
        file["rewards"], file["terminals"] = np.zeros(4, np.float32), np.array([0, 1, 0, 1], bool)
    assert main(["data", "horizon", str(tmp_path / "a.hdf5")]) == 2
    error = capsys.readouterr().err.strip()
    assert "discrete actions" in error and "continuous" in error and "\n" not in error
    data = random_play(Lock, 3)
    empty = Dataset(
        {k: v[:0] for k, v in data.columns.items()}, data.episode_start[:0], data.episode_end[:0], data.spec
    )
    with pytest.raises(UserError, match="no episodes"):
        horizon(empty, HorizonConfig())
