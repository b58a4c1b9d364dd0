"""What is played becomes rows: true last observations, terminals apart from time-outs, and the same again after a
stop.
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.samplers.transitions import TransitionSampler
from offrl.data.transforms.columns import add_returns_to_go
from offrl.errors import UserError
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.snapshots import TASK
from offrl.finetuning.play.turns import start_seed
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.tasks.task import Task


class Walk(gym.Env):
    """x moves by the action; a terminal beyond 1, a time-out after `limit` steps. Observations (x, steps so far)."""

    observation_space = spaces.Box(-9, 9, (2,))
    action_space = spaces.Box(-2.0, 2.0, (1,))

    def __init__(self, limit: int = 4, bad_at: int = -1, drift: float = 0.0) -> None:
        self.limit, self.bad_at, self.drift = limit, bad_at, drift

    def _see(self) -> np.ndarray:
        return np.array([self.x, self.t], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = float(self.np_random.uniform(-0.1, 0.1)), 0
        self.x += self.drift * np.random.default_rng().uniform(0.5, 1.0)  # not decided by the seed
        return self._see(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x, self.t = self.x + float(action[0]), self.t + 1
        reward = float("nan") if self.t == self.bad_at else self.x
        return self._see(), reward, abs(self.x) > 1.0, self.t >= self.limit, {}


RETURNS = returns_of(None, 0.9)
SPEC = DataSpec((2,), 1, action_low=(-2.0,), action_high=(2.0,), name="walk")


def play(
    envs: int = 1, seeds: tuple[int, ...] = (0,), max_steps: int | None = None, spec: DataSpec = SPEC, **kwargs: Any
) -> Play:
    made = Play(Task("walk", env_factory=lambda: Walk(**kwargs)), spec, seeds, envs, 0, max_steps)
    made.begin()
    return made


def step(made: Play, *actions: float) -> Any:
    return made.step(np.array(actions, np.float32)[:, None])


def test_the_last_observation_is_the_true_one_and_the_next_episode_begins_elsewhere() -> None:
    with play() as made:
        began = made.current.copy()
        turns = [step(made, 0.0) for _ in range(4)]
    assert [bool(t.terminated[0]) for t in turns] == [False] * 4  # a time-out is no terminal
    assert [bool(t.over[0]) for t in turns] == [False, False, False, True]
    for before, after in zip(turns, turns[1:], strict=False):
        assert (before.next_observations == after.observations).all()
    last = turns[-1]
    assert last.next_observations.tolist() == [[began[0, 0], 4.0]]
    assert made.current[0, 1] == 0.0 and made.current[0, 0] != began[0, 0]  # the new episode's own start
    assert last.ended == [(0, pytest.approx(4 * began[0, 0]), 4, TASK, None)]
    start = Walk()
    assert (made.current[0] == start.reset(seed=start_seed(0, 0, 0, 1))[0]).all()


def test_a_terminal_has_mask_zero_and_a_time_out_one() -> None:
    columns = columns_for(SPEC, TransitionSampler(), "x")
    with play(envs=2) as made:
        rows = Rows(SPEC, columns, 1, 2, RETURNS)
        found = [rows.take(step(made, 0.0, 0.9)) for _ in range(4)]
    masks = [r["masks"].tolist() for _, r in found]
    assert masks[0] == [1.0, 0.0]  # 0.9 is 1.8 in the environment: beyond 1
    assert masks[3] == [1.0, 0.0]  # the first timed out
    assert all(owner.tolist() == [0, 0] for owner, _ in found)
    assert found[0][1]["next_observations"][1, 0] > 1.7


def test_max_steps_cuts_and_is_no_terminal() -> None:
    with play(max_steps=2) as made:
        turns = [step(made, 0.0) for _ in range(4)]
    assert [bool(t.over[0]) for t in turns] == [False, True, False, True]
    assert not any(t.terminated[0] for t in turns)


def test_rewards_and_observations_are_transformed_as_the_datas() -> None:
    spec = DataSpec((2,), 1, action_low=(-2.0,), action_high=(2.0,), reward_scale=10.0, reward_shift=-1.0,
                    observation_mean=(0.5, 2.0), observation_std=(2.0, 4.0))  # fmt: skip
    with play(spec=spec) as made:
        rows = Rows(spec, columns_for(spec, TransitionSampler(), "x"), 1, 1, RETURNS)
        x = made.current[0, 0]
        _, row = rows.take(step(made, 0.25))
    np.testing.assert_allclose(row["observations"], [[(x - 0.5) / 2, -0.5]], rtol=1e-6)
    np.testing.assert_allclose(row["next_observations"], [[(x + 0.5 - 0.5) / 2, -0.25]], rtol=1e-6)
    np.testing.assert_allclose(row["rewards"], [10 * (x + 0.5) - 1], rtol=1e-5)
    assert row["actions"].tolist() == [[0.25]]  # in [-1, 1], as in the data


@pytest.mark.parametrize("extra", [("next_actions",), ("returns_to_go",), ("next_actions", "returns_to_go")])
def test_late_columns_are_those_of_the_data_sampler(extra: tuple[str, ...]) -> None:
    """The rows of whole episodes, as the offline sampler gives them for a dataset of the same episodes."""
    sampler, chosen = TransitionSampler(extra), np.random.default_rng(0)
    with play() as made:
        rows = Rows(SPEC, columns_for(SPEC, sampler, "x"), 1, 1, RETURNS)
        turns = [step(made, float(chosen.uniform(-0.6, 0.6))) for _ in range(60)]
        parts = [rows.take(turn)[1] for turn in turns]
    last = max(i for i, t in enumerate(turns) if t.over[0]) + 1
    assert {bool(t.terminated[0]) for t in turns if t.over[0]} == {True, False}
    flags = [np.array([bool(getattr(t, k)[0]) for t in turns[:last]]) for k in ("terminated", "over")]
    arrays = [
        np.concatenate([getattr(t, k) for t in turns[:last]])
        for k in ("observations", "actions", "rewards", "next_observations")
    ]
    dataset = from_arrays(
        arrays[0], arrays[1] * 2, arrays[2], flags[0], flags[1] & ~flags[0], arrays[3], action_low=-2, action_high=2
    )
    source = sampler.prepare(add_returns_to_go(dataset, 0.9))
    expected = source.table.take(torch.arange(source.count))
    whole = len(expected["rewards"])
    for name, column in expected.items():
        mine = np.concatenate([p[name] for p in parts if len(p[name])])[:whole]
        np.testing.assert_allclose(mine, column.numpy(), rtol=1e-6, atol=1e-6, err_msg=name)


def test_what_cannot_be_played_is_refused() -> None:
    with pytest.raises(UserError, match="column 'infos'"):
        columns_for(SPEC, TransitionSampler(("infos",)), "x")
    with pytest.raises(UserError, match="batches of its own kind"):
        columns_for(SPEC, object(), "x")
    with (
        pytest.raises(UserError, match=r"observations of shape \(3,\)"),
        play(spec=DataSpec((3,), 1, action_low=(-2.0,), action_high=(2.0,))),
    ):
        pass


def test_a_reward_that_is_not_finite_names_environment_and_step() -> None:
    with play(seeds=(3,), bad_at=2) as made:
        step(made, 0.0)
        state = {k: v.clone() for k, v in made.state().items()}
        with pytest.raises(
            UserError, match=r"walk gave a reward .* not finite \(seed 3, environment 0, episode 0, step 1\)"
        ):
            step(made, 0.0)
        assert all(torch.equal(v, state[k]) for k, v in made.state().items() if k != "current")


@pytest.mark.parametrize("extra", [(), ("next_actions",), ("returns_to_go",)])
def test_the_middle_of_episodes_comes_back(extra: tuple[str, ...]) -> None:
    """Three environments of two replicas, stopped at every moment: what follows is the same, rows that waited
    included.
    """
    columns = columns_for(SPEC, TransitionSampler(extra), "x")
    chosen = np.random.default_rng(1).uniform(-0.5, 0.5, (12, 6, 1)).astype(np.float32)

    def fresh() -> tuple[Play, Rows]:
        return play(envs=3, seeds=(0, 1)), Rows(SPEC, columns, 2, 3, RETURNS)

    made, rows = fresh()
    states, expected = [], []
    for actions in chosen:
        states.append({k: v.clone() for k, v in made.state().items()})
        turn = made.step(actions)
        expected.append((turn, rows.take(turn)))
    for stopped in (0, 1, 3, 7, 11):
        made, rows = fresh()
        turns, lost = made.resume(states[stopped])
        assert lost == []
        for turn in turns:
            rows.take(turn)
        for actions, (old, (owner, parts)) in list(zip(chosen, expected, strict=True))[stopped:]:
            turn = made.step(actions)
            assert turn.ended == old.ended and (turn.next_observations == old.next_observations).all()
            mine, now = rows.take(turn)
            assert (mine == owner).all()
            assert all((now[k] == parts[k]).all() for k in parts)


def test_an_environment_of_chance_begins_a_new_episode() -> None:
    with play(envs=2, drift=0.01) as made:
        step(made, 0.1, 0.1)
        state = made.state()
    with play(envs=2, drift=0.01) as made:
        _, lost = made.resume(state)
        assert lost == [0, 1]
        assert [seat.episode for seat in made.seats] == [1, 1] and (made.current[:, 1] == 0).all()


def test_mujoco_is_stepped_as_gymnasium_does() -> None:
    """A plain loop over an environment of its own, over ends of episodes; and a fall is a terminal, the limit is
    none.
    """
    spec = DataSpec((11,), 3, action_low=(-1.0,) * 3, action_high=(1.0,) * 3, name="hopper")
    env, episode, steps, ends = gym.make("Hopper-v4"), 0, 0, []
    row = env.reset(seed=start_seed(0, 0, 0, 0))[0].astype(np.float32)
    with Play(Task("hopper", env_id="Hopper-v4"), spec, (0,), 1, 0, 30) as made:
        made.begin()
        # scaling rounds none of these
        for action in np.random.default_rng(0).integers(-64, 65, (250, 3)).astype(np.float32) / 64:
            turn = made.step(action[None])
            assert (turn.observations[0] == row).all()
            after, reward, terminated, _, _ = env.step(action)
            row, steps = after.astype(np.float32), steps + 1
            assert (turn.next_observations[0] == row).all() and turn.rewards[0] == reward
            assert turn.terminated[0] == terminated and turn.over[0] == (terminated or steps == 30)
            if turn.over[0]:
                ends.append(bool(terminated))
                episode, steps = episode + 1, 0
                row = env.reset(seed=start_seed(0, 0, 0, episode))[0].astype(np.float32)
    assert True in ends and False in ends
