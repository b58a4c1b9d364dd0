"""A point in the plane whose data hold no episode as good as two of them put together, and the data themselves, made
anew from a seed.

        G
        |
D - A - M - X
        |
        B

Episodes in the data:

- A -> M -> X, return 1, all of it earned before M: X is a dead end
- A -> D, return 1.5: a decoy, the best that the data show from A
- B -> M -> G, return 2, all of it earned after M

An episode that is scored begins at A. The best one, A -> M -> G, earns 3: the first half of one kind and the second
half of another. At a target return of 2 or more, a policy that knows returns of whole episodes takes D.

A step earns by how much it climbs a hill (`height`), so no way round and round pays. What could distinguish the kinds
but the point's position and the rewards does not: A and B are as far from M as A from D, X is as far from M as G, and
each episode has a random speed of its own, so that the time steps at which M is passed are distributed alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.envs.generated import of_steps, raw_data, register_generated
from offrl.registry import register
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from torch import Tensor

    from offrl.data.raw import RawData

NAME = "point-stitch"
ENV = "offrl/PointStitch-v0"
PLACES: dict[str, tuple[float, float]] = {
    "A": (0.0, 0.0), "B": (1.2, -1.2), "M": (1.2, 0.0), "D": (-1.2, 0.0), "X": (2.4, 0.0), "G": (1.2, 1.2),
}  # fmt: skip
ENDS = ("D", "X", "G")  # an episode ends where one of them is reached
# Where the hill begins and ends to rise, and by how much: from A to D and from A to M along x, from M to G along y.
# Elsewhere it is flat.
SLOPES_X = ((-0.25, -0.85, 1.5), (0.25, 0.85, 1.0))
SLOPE_Y = (0.25, 0.85, 2.0)
RIDGE = 0.2  # half the width of the slope to G; beside it that height falls off within about as much
EDGE = np.array([2.8, 1.6])  # |x| and |y| at most
STEP = 0.1  # distance that an action of 1 moves the point, along each axis
REACH = 0.25  # distance from a place that counts as there
SPREAD = 0.05  # of the starts, along each axis
LIMIT = 100  # steps
DECOY, BEST = 1.5, 3.0  # returns that score 0 and 100
EPISODES = 300
KINDS = ((0.45, "AMX"), (0.3, "AD"), (0.25, "BMG"))  # share of the episodes, and the places they pass


def rise(at: Any, begin: float, end: float, by: float) -> Any:
    """A smooth step from 0 to `by`."""
    fraction = ((at - begin) / (end - begin)).clip(0.0, 1.0)
    return by * fraction * fraction * (3.0 - 2.0 * fraction)


def height(x: Any, y: Any) -> Any:
    """The height of the hill at positions, arrays or tensors [...]."""
    beside = ((abs(x - PLACES["G"][0]) - RIDGE) / RIDGE).clip(0.0, 1.0)
    return sum(rise(x, *slope) for slope in SLOPES_X) + rise(y, *SLOPE_Y) * (1.0 - beside * beside)


def over(x: Any, y: Any) -> Any:
    """True where an end is reached at positions, arrays or tensors [...]; bool."""
    at = [(x - PLACES[name][0]) ** 2 + (y - PLACES[name][1]) ** 2 <= REACH**2 for name in ENDS]
    return at[0] | at[1] | at[2]


def move(position: np.ndarray, action: np.ndarray) -> tuple[np.ndarray, float, bool]:
    """One step from a position [2]: the next one, the reward, and whether the episode ends."""
    following = np.clip(position + STEP * np.clip(action, -1.0, 1.0), -EDGE, EDGE)
    return following, float(height(*following) - height(*position)), bool(over(*following))


@register("termination", ENV)
def ends(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """The environment's endings, for models of it; see `offrl.world_models.known.terminations`."""
    return over(next_observations[..., 0], next_observations[..., 1])


@register("reward", ENV)
def pays(observations: Tensor, actions: Tensor, next_observations: Tensor) -> Tensor:
    """The environment's rewards, for models of it that ask for them (algo.reward=auto)."""
    after, before = (height(s[..., 0], s[..., 1]) for s in (next_observations, observations))
    return after - before


NOTE = "0 is the best return in the data from where episodes are scored, 100 that of the stitched route"
TASK = Task(
    name=NAME,
    env_id=f"offrl.envs.point:{ENV}",
    max_episode_steps=LIMIT,
    ref_min=DECOY,
    ref_max=BEST,
    ref_label="offrl",
    observation_dim=2,
    action_dim=2,
    note=NOTE,
)
register_generated(TASK, lambda: generate(0, EPISODES))


def generate(seed: int, episodes: int) -> RawData:
    """Episodes of a scripted policy that goes from place to place with a speed of the episode's own and noise in each
    action.
    """
    draw = np.random.Generator(np.random.PCG64(seed))
    shares = np.cumsum([share for share, _ in KINDS])[:-1]
    # as many of each as the shares say, in a random order
    kinds = np.searchsorted(shares, (np.arange(episodes) + 0.5) / episodes)
    rows = [
        row for kind in draw.permutation(kinds) for row in play([np.array(PLACES[p]) for p in KINDS[kind][1]], draw)
    ]
    return raw_data(of_steps(rows), TASK, seed, action_low=-1.0, action_high=1.0)


def play(way: Sequence[np.ndarray], draw: np.random.Generator) -> list[tuple[Any, ...]]:
    """The steps of one episode that passes these places, the first its start and the last its end."""
    position, speed, waypoints = way[0] + draw.uniform(-SPREAD, SPREAD, 2), draw.uniform(0.6, 1.0), list(way[1:])
    rows: list[tuple[Any, ...]] = []
    ended = False
    while not ended and len(rows) < LIMIT:
        if len(waypoints) > 1 and np.linalg.norm(waypoints[0] - position) < STEP:
            waypoints.pop(0)
        to = waypoints[0] - position
        action = np.clip(speed * to / max(float(np.linalg.norm(to)), 1e-9) + 0.15 * draw.standard_normal(2), -1.0, 1.0)
        action = action.astype(np.float32).astype(np.float64)  # what is recorded is what was done
        following, reward, ended = move(position, action)
        rows.append((position, action, reward, ended, not ended and len(rows) == LIMIT - 1, following))
        position = following
    return rows
