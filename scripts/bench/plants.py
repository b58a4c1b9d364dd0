"""Five small plants of known truth, and logs of them by plausible controllers: for `scripts/bench/estimates.py`.

Each plant is a class of arrays: `n` copies run side by side, so that the truth of a policy is played in seconds. A
copy's state is a row of `state` [n, S] float64, of which `observe` shows the policy a part, [n, O] float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np

import offrl

Array = np.ndarray
# (observations [n, O], plant state [n, S]) -> actions in the plant's range
Controller = Callable[[Array, Array], Array]


class Plant(ABC):
    """n copies of a process. `choices`: of a discrete plant; otherwise actions are [n, 1] between `low` and `high`."""

    name, episodes, steps = "", 40, 200
    low, high, choices = 0.0, 1.0, 0

    def __init__(self, n: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.state = self.begin(n)

    @abstractmethod
    def begin(self, n: int) -> Array:
        """The first states of n copies, [n, S]."""

    def observe(self) -> Array:
        return self.state.astype(np.float32)

    @abstractmethod
    def step(self, actions: Array) -> tuple[Array, Array]:
        """Rewards [n], and which copies have ended, bool [n]."""

    @abstractmethod
    def controllers(self, n: int) -> Controller:
        """The controllers of n logged batches, each with settings of its own."""


class Tank(Plant):
    """A heated tank: temperature, inflow and ambient temperature; a heater of 0 to 1; cost |T - 60|. Proportional
    controllers, some of them set too low or too high, with noise."""

    name = "heated tank"

    def begin(self, n: int) -> Array:
        return np.stack([self.rng.uniform(30, 70, n), self.rng.uniform(0.5, 1.5, n), self.rng.uniform(10, 20, n)], 1)

    def step(self, actions: Array) -> tuple[Array, Array]:
        t, flow, ambient = self.state.T
        u, noise = np.clip(actions[:, 0], 0, 1), self.rng.normal(size=(3, len(t)))
        t = t + 4.0 * u - 0.04 * flow * (t - ambient) + 0.3 * noise[0]
        flow = np.clip(flow + 0.05 * (1.0 - flow) + 0.05 * noise[1], 0.3, 2.0)
        ambient = ambient + 0.02 * (15.0 - ambient) + 0.1 * noise[2]
        self.state = np.stack([np.clip(t, 0, 120), flow, ambient], 1)
        return -np.abs(self.state[:, 0] - 60.0), np.zeros(len(t), bool)

    def controllers(self, n: int) -> Controller:
        target, gain = self.rng.uniform(52, 68, n), self.rng.uniform(0.02, 0.15, n)
        bias = 0.01 * (target - 15.0)

        def act(seen: Array, _: Array) -> Array:
            return np.clip(bias + gain * (target - seen[:, 0]) + 0.1 * self.rng.normal(size=n), 0, 1)[:, None]

        return act


class Stock(Plant):
    """An inventory: stock, two orders on the way, phase of the season; an order of 0 to 20; sales less storage and lost
    sales. Base-stock rules with different levels and noise."""

    name, high, episodes, steps = "inventory", 20.0, 60, 120

    def begin(self, n: int) -> Array:
        return np.stack(
            [
                self.rng.uniform(5, 25, n),
                self.rng.uniform(0, 10, n),
                self.rng.uniform(0, 10, n),
                self.rng.uniform(0, 30, n),
            ],
            1,
        )

    def observe(self) -> Array:
        phase = 2 * np.pi * self.state[:, 3] / 30
        return np.stack([*self.state.T[:3], np.sin(phase), np.cos(phase)], 1).astype(np.float32)

    def step(self, actions: Array) -> tuple[Array, Array]:
        stock, soon, later, day = self.state.T
        demand = self.rng.poisson(6.0 + 3.0 * np.sin(2 * np.pi * day / 30))
        have = stock + soon
        sold = np.minimum(have, demand)
        left = np.minimum(have - sold, 60.0)
        self.state = np.stack([left, later, np.clip(actions[:, 0], 0, 20), day + 1], 1)
        return sold - 0.15 * left - 0.5 * (demand - sold), np.zeros(len(stock), bool)

    def controllers(self, n: int) -> Controller:
        level = self.rng.uniform(12, 32, n)

        def act(seen: Array, _: Array) -> Array:
            return np.clip(level - seen[:, :3].sum(1) + 2.0 * self.rng.normal(size=n), 0, 20)[:, None]

        return act


class Spring(Plant):
    """A mass on a spring whose force comes two steps late; position, velocity, the last force; -1 to 1; cost of the
    distance from 1. PD controllers of different gains, with noise."""

    name, low, high = "spring with delay", -1.0, 1.0

    def begin(self, n: int) -> Array:
        return np.concatenate([self.rng.uniform(-1, 1, (n, 2)), np.zeros((n, 2))], 1)

    def observe(self) -> Array:
        return self.state[:, [0, 1, 3]].astype(np.float32)  # the force that acts next is hidden

    def step(self, actions: Array) -> tuple[Array, Array]:
        x, v, acting, last = self.state.T
        v = v + 0.1 * (4.0 * acting - 2.0 * x - 0.3 * v) + 0.03 * self.rng.normal(size=len(x))
        x = x + 0.1 * v
        u = np.clip(actions[:, 0], -1, 1)
        self.state = np.stack([np.clip(x, -5, 5), np.clip(v, -9, 9), last, u], 1)
        return -((x - 1.0) ** 2) - 0.05 * u**2, np.zeros(len(x), bool)

    def controllers(self, n: int) -> Controller:
        kp, kd = self.rng.uniform(0, 0.6, n), self.rng.uniform(0, 0.6, n)

        def act(seen: Array, _: Array) -> Array:
            return np.clip(0.5 + kp * (1.0 - seen[:, 0]) - kd * seen[:, 1] + 0.2 * self.rng.normal(size=n), -1, 1)[
                :, None
            ]

        return act


class Levels(Plant):
    """Two tanks, one above the other: their levels and the consumption; a valve of 0 to 1; 1 less the distance of the
    lower level from 5 in each step, and the end of the batch where a tank runs over. PI-like controllers; some let it
    run over."""

    name, episodes = "two tanks", 60

    def begin(self, n: int) -> Array:
        return np.stack([self.rng.uniform(1, 6, n), self.rng.uniform(1, 6, n), self.rng.uniform(0.8, 1.2, n)], 1)

    def step(self, actions: Array) -> tuple[Array, Array]:
        above, below, use = self.state.T
        u = np.clip(actions[:, 0], 0, 1)
        between = 0.35 * np.sqrt(above)
        above = above + 1.6 * u - between + 0.05 * self.rng.normal(size=len(u))
        below = below + between - 0.35 * use * np.sqrt(below) + 0.05 * self.rng.normal(size=len(u))
        use = np.clip(use + 0.05 * (1.0 - use) + 0.04 * self.rng.normal(size=len(u)), 0.5, 1.5)
        self.state = np.stack([np.maximum(above, 0.0), np.maximum(below, 0.0), use], 1)
        return 1.0 - 0.3 * np.abs(self.state[:, 1] - 5.0), (above > 10.0) | (below > 10.0)

    def controllers(self, n: int) -> Controller:
        gain, bias = self.rng.uniform(0.05, 0.4, n), self.rng.uniform(0.35, 0.6, n)

        def act(seen: Array, _: Array) -> Array:
            return np.clip(bias + gain * (5.0 - seen[:, 1]) + 0.1 * self.rng.normal(size=n), 0, 1)[:, None]

        return act


class Thermostat(Plant):
    """A room: temperature, outside temperature, hour; off, half or full; comfort less energy. Thermostats with
    different set points, bands and hands that interfere."""

    name, choices = "thermostat", 3

    def begin(self, n: int) -> Array:
        return np.stack([self.rng.uniform(14, 24, n), self.rng.uniform(-2, 8, n), self.rng.uniform(0, 24, n)], 1)

    def observe(self) -> Array:
        phase = 2 * np.pi * self.state[:, 2] / 24
        return np.stack([self.state[:, 0], self.state[:, 1], np.sin(phase), np.cos(phase)], 1).astype(np.float32)

    def step(self, actions: Array) -> tuple[Array, Array]:
        room, outside, hour = self.state.T
        noise = self.rng.normal(size=(2, len(room)))
        room = room + 0.9 * actions - 0.05 * (room - outside) + 0.1 * noise[0]
        outside = outside + 0.05 * (3.0 + 4.0 * np.sin(2 * np.pi * (hour - 9) / 24) - outside) + 0.3 * noise[1]
        self.state = np.stack([room, outside, hour + 0.5], 1)
        wanted = np.where((hour % 24 > 6) & (hour % 24 < 22), 21.0, 17.0)
        return -np.abs(room - wanted) - 0.3 * actions, np.zeros(len(room), bool)

    def controllers(self, n: int) -> Controller:
        target, band = self.rng.uniform(17, 22, n), self.rng.uniform(0.5, 2, n)

        def act(seen: Array, _: Array) -> Array:
            miss = target - seen[:, 0]
            own = np.where(miss > band, 2, np.where(miss > 0, 1, 0))
            return np.where(self.rng.random(n) < 0.15, self.rng.integers(0, 3, n), own)

        return act


PLANTS: tuple[type[Plant], ...] = (Tank, Stock, Spring, Levels, Thermostat)


def logged(kind: type[Plant], seed: int) -> offrl.Dataset:
    """A log of `episodes` batches of `steps` rows, or fewer where the plant stopped."""
    plant = kind(kind.episodes, seed)
    act = plant.controllers(kind.episodes)
    rows: dict[str, list[Array]] = {
        k: [] for k in ("observations", "actions", "rewards", "terminations", "next_observations")
    }
    for _ in range(kind.steps):
        seen = plant.observe()
        actions = act(seen, plant.state)
        rewards, ended = plant.step(actions)
        for key, value in zip(rows, (seen, actions, rewards, ended, plant.observe()), strict=True):
            rows[key].append(value)
    columns = {k: np.stack(v, 1) for k, v in rows.items()}  # [episodes, steps, ...]
    ended = columns["terminations"]
    used = np.cumsum(ended, 1) - ended == 0
    stop = np.zeros_like(used)
    stop[:, -1] = True
    columns["truncations"] = stop & ~ended
    flat = {k: v[used] for k, v in columns.items()}
    spaces: dict[str, Any] = (
        {"num_actions": kind.choices} if kind.choices else {"action_low": kind.low, "action_high": kind.high}
    )
    return offrl.from_arrays(**flat, **spaces, name=kind.name.replace(" ", "_"))


def play(kind: type[Plant], policy: Any, discount: float, n: int = 256, seed: int = 999) -> tuple[float, float]:
    """The mean discounted return of a policy from the plant's first states, over n copies, and its standard error."""
    plant, carry, total = kind(n, seed), policy.start(n), np.zeros(n)
    alive = np.ones(n, bool)
    for t in range(round(7.0 / (1.0 - discount))):  # what is beyond is less than a thousandth
        actions, carry = policy.step(carry, plant.observe(), t)
        rewards, ended = plant.step(np.asarray(actions))
        total += alive * discount**t * rewards
        alive &= ~ended
    return float(total.mean()), float(total.std(ddof=1) / np.sqrt(n))
