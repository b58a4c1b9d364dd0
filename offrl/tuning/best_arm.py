"""The best of K policies with n episodes of the environment: sequential halving, and a normal posterior.

Both say which (arm, episode) to play next (`pulls`) and take its return (`add`). Episode e of every arm should be
played with the same reset seed, a function of e alone: differences between arms are then paired. Their pulls are a
function of the returns and of their arguments, so a killed search goes on when the recorded returns are added again in
the order of the record.

Arms stand in the order of the data's estimates, the best first: it decides between equals.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from offrl.errors import UserError
from offrl.statistics.maxima import chance_within

NOISE_EPISODES = 4.0  # how many episodes the expected spread of returns counts as, against the spread seen
Pull = tuple[int, int]


def schedule(arms: int, episodes: int) -> list[tuple[int, int, int]]:
    """Rounds of sequential halving: (number of arms K_i, episodes of each, number of arms with one more).

    ceil(log2 arms) rounds; each of K_i arms is played max(1, episodes // (rounds K_i)) times, or less often where the
    episodes would not do, and the better ceil(K_i / 2) go on; the last round, of two arms, plays the remaining episodes
    (Karnin et al. 2013, but for the last round). Raises UserError where arms cannot be played once in each round.
    """
    rounds = (arms - 1).bit_length()
    sizes = [arms]
    while sizes[-1] > 2:
        sizes.append(-(-sizes[-1] // 2))
    if episodes < (least := sum(sizes[:-1])):
        raise UserError(
            f"halving {arms} arms needs {least} episodes, to play each once in each round, not {episodes}: play fewer "
            "arms"
        )
    plan, remaining = [], episodes
    for number, size in enumerate(sizes[:-1]):
        spare = remaining - sum(sizes[number + 1 : -1])  # one episode of each arm of the rounds to come
        each = max(1, min(episodes // (rounds * size), spare // size))
        plan.append((size, each, 0))
        remaining -= size * each
    return [*plan, (sizes[-1], *divmod(remaining, sizes[-1]))]


class EpisodeSearch(ABC):
    """The returns and costs of each arm by number of episode."""

    def __init__(self, arms: int, episodes: int) -> None:
        """arms: their number K, at least 2. episodes: the number that may be played in all."""
        self.arms, self.episodes = arms, episodes
        self.returns: list[dict[int, float]] = [{} for _ in range(arms)]
        self.costs: list[dict[int, float]] = [{} for _ in range(arms)]

    def add(self, arm: int, episode: int, value: float, cost: float = 0.0) -> None:
        """The return and the cost of one episode. Raises UserError for a return that is not finite, and for a pull of
        another search."""
        if not math.isfinite(value):
            raise UserError(
                f"the return of episode {episode} of arm {arm} is {value}: leave out policies that cannot be played"
            )
        if (arm, episode) not in self.pulls():
            raise UserError(
                f"episode {episode} of arm {arm} was not asked for: the record is of another search; start one in a "
                "new folder"
            )
        self.returns[arm][episode], self.costs[arm][episode] = float(value), float(cost)

    @abstractmethod
    def pulls(self) -> list[Pull]:
        """The next pulls, in this order or at the same time; empty when the search is over."""

    @abstractmethod
    def best(self) -> int:
        """The arm to choose now."""

    @property
    def played(self) -> int:
        return sum(map(len, self.returns))

    def counts(self) -> np.ndarray:
        """Episodes of each arm, int64 [K]."""
        return np.array([len(r) for r in self.returns])

    def means(self) -> np.ndarray:
        """Mean returns, float64 [K]; NaN for an arm that was not played."""
        return _means(self.returns)

    def mean_costs(self) -> np.ndarray:
        """Likewise of the costs."""
        return _means(self.costs)


def _means(played: Sequence[dict[int, float]]) -> np.ndarray:
    return np.array([math.fsum(r.values()) / len(r) if r else math.nan for r in played])


class SequentialHalving(EpisodeSearch):
    """Halves the arms until two are left; no constant to choose. A round's pulls may be played at the same time.

    With a limit of the costs those whose mean cost keeps it are better than all others, among themselves by their
    returns; of the others the one that costs less is better.
    """

    def __init__(self, arms: int, episodes: int, limit: float | None = None) -> None:
        super().__init__(arms, episodes)
        self.schedule, self.limit = schedule(arms, episodes), limit

    def pulls(self) -> list[Pull]:
        return self._round()[0]

    def best(self) -> int:
        """The largest mean of the last round's arms: those halved away are not chosen, whatever their means."""
        return min(sorted(self._round()[1]), key=lambda a: self._key(a, self.episodes))

    def _key(self, arm: int, end: int) -> tuple[float, float]:
        """By what arms are sorted, the best first, from their episodes before `end`."""
        played = [e for e in self.returns[arm] if e < end]
        if not played:
            return math.inf, math.inf
        value, cost = (math.fsum(x[arm][e] for e in played) / len(played) for x in (self.returns, self.costs))
        return (0.0 if self.limit is None or cost <= self.limit else cost), -value

    def _round(self) -> tuple[list[Pull], list[int]]:
        """(pulls of the first round that is not complete, the arms of that round)."""
        arms, start = list(range(self.arms)), 0
        for number, (_, each, extra) in enumerate(self.schedule):
            end = {arm: start + each + (i < extra) for i, arm in enumerate(arms)}
            episodes = range(start, max(end.values()))
            todo = [(a, e) for e in episodes for a in arms if e < end[a] and e not in self.returns[a]]
            if todo or number == len(self.schedule) - 1:
                return todo, arms
            arms = sorted(sorted(arms), key=lambda a: self._key(a, end[a]))[: self.schedule[number + 1][0]]
            start += each
        raise AssertionError("a schedule has a last round")


class TopTwo(EpisodeSearch):
    """A normal prior and normal returns of one spread: the posterior of each arm's mean, and a stop when the best is
    known well enough.

    Played is, each with probability one half, the arm that is best in one draw of the posterior, or the arm that is
    hardest to tell from it (top-two Thompson sampling with the challenger of Shang et al. 2020; from memory). The
    spread of returns is estimated over all arms, with `noise` counting as NOISE_EPISODES episodes, and is taken as
    known after that.
    """

    def __init__(
        self, arms: int, episodes: int, prior: Sequence[float] | Any, *, prior_sd: float, noise: float,
        margin: float = 0.0, confidence: float = 0.9, seed: int = 0,
    ) -> None:  # fmt: skip
        """prior, prior_sd: of the mean return, [K] or one for all, and above 0; noise: the spread expected of one arm's
        returns, above 0. It ends when the chosen arm is within `margin` of the best (1% of the data's range) with
        probability `confidence`."""
        super().__init__(arms, episodes)
        self.prior = np.broadcast_to(np.asarray(prior, np.float64), (arms,))
        self.prior_sd, self.noise, self.margin, self.confidence, self.seed = prior_sd, noise, margin, confidence, seed

    def posterior(self) -> tuple[np.ndarray, np.ndarray]:
        """Means and standard deviations of the arms' mean returns, both float64 [K]."""
        counts, means = self.counts(), self.means()
        squares = sum(
            math.fsum((v - m) ** 2 for v in r.values()) for r, m in zip(self.returns, means, strict=True) if r
        )
        freedom = int(np.maximum(counts - 1, 0).sum())
        variance = (NOISE_EPISODES * self.noise**2 + squares) / (NOISE_EPISODES + freedom)
        precision = 1.0 / self.prior_sd**2 + counts / variance
        sums = np.where(counts > 0, means, 0.0) * counts
        return (self.prior / self.prior_sd**2 + sums / variance) / precision, np.sqrt(1.0 / precision)

    def best(self) -> int:
        """The arm of the largest posterior mean."""
        return int(np.argmax(self.posterior()[0]))

    def certainty(self) -> float:
        """Probability that `best` is within the margin of the best arm."""
        mean, sd = self.posterior()
        order = np.argsort(-mean, kind="stable")
        return chance_within(mean[order], sd[order], 0, self.margin)

    def pulls(self) -> list[Pull]:
        played = self.played
        if played >= self.episodes or self.certainty() >= self.confidence:
            return []
        mean, sd = self.posterior()
        order = np.argsort(-mean, kind="stable")
        mean, sd = mean[order], sd[order]
        rng = np.random.default_rng([self.seed, played])
        leader = int(np.argmax(mean + sd * rng.standard_normal(len(order))))
        if rng.random() < 0.5:
            cost = np.maximum(mean[leader] - mean, 0.0) ** 2 / (sd[leader] ** 2 + sd**2)
            cost[leader] = np.inf
            leader = int(np.argmin(cost))
        arm = int(order[leader])
        return [(arm, len(self.returns[arm]))]
