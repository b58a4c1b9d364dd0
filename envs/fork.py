"""A point that has to go round an obstacle in its way, above it or below, and demonstrations of both ways: the data
fork.

           . - - - .
        .     ___     .
   S  .      /   \\      .  G
      .      \\___/      .
        .             .
          . - toll- .

The way above pays 2 at the goal G; the way below pays as much, and costs a toll: 5 times its depth. Whoever touches the
disc has crashed: the episode ends and costs 0.5. Each step costs 0.2. A demonstration begins anywhere in S and takes
either way, whatever its start, so the mean of the two ways leads into the disc. Some steps of demonstrations go
anywhere: they show what is not to be done, and how to come back.

`point-fork`: one action leads from S to where the way can be seen. `stale-fork`: an action moves the point by a quarter
of that, and the point's position is seen at every fourth step only, with its age. A policy that draws each action by
itself changes its mind before it sees what it has done (it dithers); one that draws chunks of four goes through with
what it has begun.

Small steps that are all seen would be no fork: the mean of two ways is then a way. Points that move at the mean
velocity E [v | x] are distributed at all times as those of the demonstrations are (arXiv 2210.02747, theorem 1), and
pass the disc on both sides as often."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from offrl.envs.generated import (
    GREEN,
    GREY,
    RED,
    BaseEnvironment,
    Info,
    Step,
    discs,
    of_steps,
    raw_data,
    register_generated,
)
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.data.raw import RawData

ENV = "offrl/PointFork-v0"
EDGE = np.array([1.3, 1.1])  # |x| and |y| at most
# the middle of S, and how far a start lies from it along each axis, at most
START, SPREAD = (np.array([-0.8, 0.0]), 0.05)
RADIUS = 0.4  # of the disc, whose middle is (0, 0)
GOAL, REACH = np.array([1.0, 0.0]), 0.2  # where it is, and the distance that counts as there
PLACES = ((-0.45, 0.8), (0.25, 0.8))  # x and |y| of the places that demonstrations pass on the way to the goal
PRIZE, TOLL, CRASH, TIME = 2.0, 5.0, 0.5, 0.2  # the higher the better: some -3 deep below, -1 into the disc, 1 above
ABOVE = -0.5  # return of who reaches the goal: more above the disc, however slowly, less below
# what an action of 1 moves along an axis, the length of a demonstration's steps at most, and steps
STEP, SPEED, LIMIT = (0.85, 0.9, 12)
EPISODES = 4000
NOISE = 0.07  # standard deviation of what is added to a demonstration's actions, for each of the parts of a step more
STRAY = 0.1  # share of a demonstration's actions that go anywhere, of single parts of a step accordingly fewer
PARTS = {"point-fork": 1, "stale-fork": 4}  # in which a step is made; the position is seen before the first of them


def clearance(before: np.ndarray, after: np.ndarray) -> float:
    """The least distance from the disc's middle on the straight line from one position [2] to another."""
    along = after - before
    share = np.clip(-(before @ along) / max(float(along @ along), 1e-12), 0.0, 1.0)
    return float(np.linalg.norm(before + share * along))


def height(before: np.ndarray, after: np.ndarray) -> float | None:
    """How far above the disc's middle a step from one position [2] to another passes it from left to right; None if it
    does not.
    """
    if not before[0] < 0.0 <= after[0]:
        return None
    return float(before[1] - before[0] / (after[0] - before[0]) * (after[1] - before[1]))


def side(before: np.ndarray, after: np.ndarray) -> int:
    """1 where such a step passes above, -1 below, 0 if it does not pass."""
    passed = height(before, after)
    return 0 if passed is None else 1 if passed >= 0.0 else -1


def move(position: np.ndarray, action: np.ndarray, parts: int) -> tuple[np.ndarray, float, bool]:
    """One of the `parts` of a step from a position [2]: the next one, the reward, and whether the episode ends."""
    following = np.clip(position + STEP / parts * np.clip(action, -1.0, 1.0), -EDGE, EDGE)
    crashed = clearance(position, following) < RADIUS
    arrived = not crashed and bool(np.linalg.norm(following - GOAL) <= REACH)
    depth = 0.0 if crashed else max(0.0, -(height(position, following) or 0.0))
    return following, PRIZE * arrived - TOLL * depth - CRASH * crashed - TIME / parts, crashed or arrived


def observe(position: np.ndarray, age: int, parts: int) -> np.ndarray:
    """Observation of a position [2] that was seen `age` parts of a step ago: [2], or [3] with the age as a share of a
    step.
    """
    return np.asarray(position if parts == 1 else [*position, age / parts], np.float32)


class PointFork(BaseEnvironment):
    """Observation: see `observe`. Action in [-1, 1]: how far to move along each axis. `info["success"]`: the goal was
    reached; `info["side"]`: 1 once the disc was passed above, -1 below, 0 before.

    parts: those of a step.
    """

    metadata: Info = {"render_modes": ["rgb_array"], "render_fps": 4}  # noqa: RUF012  # Gymnasium declares it so

    def __init__(self, parts: int = 1, render_mode: str | None = None) -> None:
        self.parts, self.render_mode = parts, render_mode
        high = np.append(EDGE, [1.0] * (parts > 1)).astype(np.float32)
        self.observation_space = spaces.Box(-high, high, dtype=np.float32)
        self.action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.position, self.seen, self.age, self.side = START, START, 0, 0

    def begin(self, options: Info) -> tuple[np.ndarray, Info]:
        self.position = self.seen = START + self.np_random.uniform(-SPREAD, SPREAD, 2)
        self.age = self.side = 0
        return observe(self.seen, 0, self.parts), {"success": False, "side": 0}

    def step(self, action: np.ndarray) -> Step:
        before, self.age = self.position, (self.age + 1) % self.parts
        self.position, reward, over = move(before, np.asarray(action, np.float64), self.parts)
        self.side = self.side or side(before, self.position)
        if self.age == 0:
            self.seen = self.position
        success = over and bool(np.linalg.norm(self.position - GOAL) <= REACH)
        return observe(self.seen, self.age, self.parts), reward, over, False, {"success": success, "side": self.side}

    def render(self) -> np.ndarray | None:
        """A picture [220, 260, 3] uint8: the disc, the goal and the point."""
        if self.render_mode is None:
            return None
        spots = [(0.0, RADIUS, GREY), (GOAL, REACH, GREEN), (self.position, 0.03, RED)]
        return discs(EDGE, (220, 260), spots)


gym.register(ENV, entry_point="offrl.envs.fork:PointFork")


FORKS = {
    name: Task(
        name=name,
        env_id=f"offrl.envs.fork:{ENV}",
        env_kwargs={"parts": parts},
        max_episode_steps=LIMIT * parts,
        ref_min=PRIZE - TOLL * PLACES[0][1] - 4 * TIME,
        ref_max=PRIZE - 4 * TIME,
        ref_label="offrl",
        observation_dim=2 if parts == 1 else 3,
        action_dim=2,
        note="0 is the way below in four steps, 100 the way above in as many; some 50 to crash, 10 to stay where it is",
    )
    for name, parts in PARTS.items()
}


def generate(name: str, seed: int, episodes: int) -> RawData:
    """Demonstrations for one of `PARTS`: every second one goes above the disc, the others below, with noise in each
    action.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    rows = [row for e in range(episodes) for row in play(PARTS[name], 1 if e % 2 else -1, draw)]
    return raw_data(of_steps(rows), FORKS[name], seed, action_low=-1.0, action_high=1.0)


def play(parts: int, way: int, draw: np.random.Generator) -> list[tuple[Any, ...]]:
    """The steps of one demonstration; way: 1 above, -1 below. It knows where it is at all times, and crashes where
    noise leads it.
    """
    position, speed = START + draw.uniform(-SPREAD, SPREAD, 2), SPEED / parts * draw.uniform(0.8, 1.0)
    waypoints, observed_position, age = [*(np.array([x, way * y]) for x, y in PLACES), GOAL], position, 0
    rows: list[tuple[Any, ...]] = []
    ended = False
    while not ended and len(rows) < LIMIT * parts:
        if len(waypoints) > 1 and np.linalg.norm(waypoints[0] - position) < 0.5 * speed:
            waypoints.pop(0)
        to = waypoints[0] - position
        displacement = to * min(1.0, speed / float(np.linalg.norm(to)))
        action = np.clip(displacement * parts / STEP + NOISE * parts**0.5 * draw.standard_normal(2), -1.0, 1.0)
        if draw.random() < STRAY / parts:
            action = draw.uniform(-1.0, 1.0, 2)
        action = action.astype(np.float32).astype(np.float64)  # what is recorded is what was done
        before = observe(observed_position, age, parts)
        position, reward, ended = move(position, action, parts)
        age = (age + 1) % parts
        observed_position = position if age == 0 else observed_position
        rows.append(
            (
                before,
                action,
                reward,
                ended,
                not ended and len(rows) == LIMIT * parts - 1,
                observe(observed_position, age, parts),
            )
        )
    return rows


for _name, _task in FORKS.items():
    register_generated(_task, partial(generate, _name, 0, EPISODES))
