"""The best of K policies with n episodes of the environment: sequential halving, UCB, and a normal posterior.

All three say which (arm, episode) to play next (`pulls`) and are given its return (`add`). Episode e of every arm
should be played with the same reset seed, a function of e alone: differences between arms are then paired. What they
ask for is a function of what they were given and of their arguments, so a killed search goes on when the recorded
returns are added again in the order of the record.

Priors are estimates of the arms' returns made without the environment (FQE): larger is better, NaN ranks last.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from offrl.errors import UserError
from offrl.statistics.maxima import chance_within

FINALISTS = 8
NOISE_EPISODES = 4.0  # how many episodes the expected spread of returns counts as, against the spread seen
Pull = tuple[int, int]


def finalists(prior: Sequence[float] | Any, episodes: int, most: int = FINALISTS) -> list[int]:
    """The arms to play with `episodes` episodes: the `most` of largest prior, or max(2, episodes // 2) where that is
    fewer; best first.

    Raises UserError for fewer than 2 arms, or episodes below 1.
    """
    order = ranked(prior)
    _check(len(order), episodes)
    return order[: max(2, min(most, episodes // 2))]


def ranked(prior: Sequence[float] | Any) -> list[int]:
    """Arms by prior, largest first; of equal ones the first, NaN last."""
    x = np.asarray(prior, np.float64)
    return [int(i) for i in np.argsort(-np.where(np.isnan(x), -np.inf, x), kind="stable")]


def schedule(arms: int, episodes: int) -> list[tuple[int, int, int]]:
    """Rounds of sequential halving: (arms left, episodes for each, and one more for so many of the first of them).

    ceil(log2 arms) rounds; each of K_i arms is played max(1, episodes // (rounds K_i)) times, or less often where the
    episodes would not do, and the better ceil(K_i / 2) go on; the last round, of two arms, plays what is left (Karnin
    et al. 2013, but for the last round). Raises UserError for fewer than 2 arms, for episodes below 1, and where arms
    cannot be played once in each round.
    """
    _check(arms, episodes)
    rounds = (arms - 1).bit_length()
    sizes = [arms]
    while sizes[-1] > 2:
        sizes.append(-(-sizes[-1] // 2))
    if episodes < (least := sum(sizes[:-1])):
        raise UserError(
            f"halving {arms} arms needs {least} episodes, to play each once in each round, not {episodes}: play fewer "
            "arms"
        )
    plan, left = [], episodes
    for place, size in enumerate(sizes[:-1]):
        spare = left - sum(sizes[place + 1 : -1])  # one episode of each arm of the rounds to come
        each = max(1, min(episodes // (rounds * size), spare // size))
        plan.append((size, each, 0))
        left -= size * each
    return [*plan, (sizes[-1], *divmod(left, sizes[-1]))]


class EpisodeSearch(ABC):
    """What the three have in common: the returns of each arm by number of episode."""

    def __init__(self, arms: int, episodes: int, prior: Sequence[float] | Any | None = None) -> None:
        """arms: their number K, at least 2. episodes: how many may be played in all, at least 1. prior: [K], or None:
        the first arms are preferred where nothing else decides. Raises UserError."""
        _check(arms, episodes)
        self.arms, self.episodes = arms, episodes
        self.prior = np.zeros(arms) if prior is None else np.asarray(prior, np.float64)
        if self.prior.shape != (arms,):
            raise UserError(f"{arms} arms have {self.prior.size} prior values: give one for each arm")
        self.returns: list[dict[int, float]] = [{} for _ in range(arms)]
        self.banned: dict[int, int] = {}  # arm: the episode that broke a limit
        self.order = ranked(self.prior)

    def add(self, arm: int, episode: int, value: float, *, broke_limit: bool = False) -> None:
        """The return of one episode. broke_limit: the arm is not played again and cannot be chosen.

        Raises UserError for a return that is not finite, and for a pull that was not asked for, as those of another
        search are."""
        if not math.isfinite(value):
            raise UserError(
                f"the return of episode {episode} of arm {arm} is {value}: leave out policies that cannot be played"
            )
        if (arm, episode) not in self.pulls():
            raise UserError(
                f"episode {episode} of arm {arm} was not asked for: the record is of another search; start one in a "
                "new folder"
            )
        self.returns[arm][episode] = float(value)
        if broke_limit:
            self.banned[arm] = min(episode, self.banned.get(arm, episode))

    @abstractmethod
    def pulls(self) -> list[Pull]:
        """What to play now, in this order or at the same time; empty when the search is over."""

    @property
    def played(self) -> int:
        return sum(map(len, self.returns))

    def counts(self) -> np.ndarray:
        """Episodes of each arm, int64 [K]."""
        return np.array([len(r) for r in self.returns])

    def means(self) -> np.ndarray:
        """Mean returns, float64 [K]; NaN for an arm that was not played."""
        return np.array([math.fsum(r.values()) / len(r) if r else math.nan for r in self.returns])

    def best(self) -> int:
        """The arm to choose now. Raises UserError when every arm broke the limit."""
        return self._first([a for a in self.order if a not in self.banned])

    def _first(self, order: Sequence[int]) -> int:
        """Of arms ordered by prior the one of the largest mean; without any episode, the first."""
        if not order:
            raise UserError("every policy broke the limit in its episodes: raise the limit, or train other policies")
        means = self.means()
        return min(order, key=lambda a: math.inf if math.isnan(means[a]) else -means[a])  # of equal ones the first


class SequentialHalving(EpisodeSearch):
    """Halves the arms until two are left; no constant to choose. Equal means are decided by the prior.

    A round's pulls may be played at the same time where no limit can be broken. Episodes that a banned arm does not
    play go to the last round.
    """

    def __init__(self, arms: int, episodes: int, prior: Sequence[float] | Any | None = None) -> None:
        super().__init__(arms, episodes, prior)
        self.schedule = schedule(arms, episodes)

    def pulls(self) -> list[Pull]:
        return self._now()[0]

    def best(self) -> int:
        """Among the arms that are left; those halved away are not chosen, whatever their means."""
        left = self._now()[1]
        return self._first([a for a in self.order if a in left and a not in self.banned])

    def _now(self) -> tuple[list[Pull], list[int]]:
        """(what is still to be played in the round that is not complete, the arms of that round)."""
        left, start = list(self.order), [0] * self.arms  # episodes of an arm before this round
        for number, (_, each, extra) in enumerate(self.schedule):
            if number == len(self.schedule) - 1 and left:  # banned arms played less than was planned
                each, extra = divmod(self.episodes - sum(start), len(left))
            end = {arm: start[arm] + each + (place < extra) for place, arm in enumerate(left)}
            alive = [a for a in left if not self.banned.get(a, math.inf) < end[a]]
            last = max((end[a] for a in alive), default=0)
            todo = [(a, e) for e in range(last) for a in alive if start[a] <= e < end[a] and e not in self.returns[a]]
            if len(alive) < 2:  # nothing is left to find out
                return [], alive
            if todo or number == len(self.schedule) - 1:
                return todo, alive
            for arm in left:
                start[arm] = end[arm] if arm in alive else len(self.returns[arm])
            means = {a: math.fsum(v for e, v in self.returns[a].items() if e < end[a]) / end[a] for a in alive}
            keep = self.schedule[number + 1][0]
            left = sorted(sorted(alive, key=self.order.index), key=lambda a: -means[a])[:keep]
        raise AssertionError("a schedule has a last round")


def ucb_scores(means: Any, counts: Any, total: int, alpha: float = 2.0) -> np.ndarray:
    """mean_i + sqrt(alpha ln(total) / count_i), float64 [..., K]; infinite for arms that were not played, whose means
    do not matter.
    """
    counts = np.asarray(counts, np.float64)
    played = counts > 0
    return np.where(
        played, np.where(played, means, 0.0) + np.sqrt(alpha * math.log(total) / np.where(played, counts, 1.0)), np.inf
    )


class UpperConfidence(EpisodeSearch):
    """UCB with unifloral's protocol (EmptyJackson/unifloral f2dc127, `evaluation.py`): the arm of the largest
    `ucb_scores`, total being the pull's number from 1, ties at random; chosen is the largest mean. Other than there,
    only arms that were played can be chosen, for with negative returns the empirical mean 0 of the others would win,
    and a mask stands for the count of 1e-9."""

    def __init__(
        self, arms: int, episodes: int, prior: Sequence[float] | Any | None = None, *, low: float, high: float,
        alpha: float = 2.0, seed: int = 0,
    ) -> None:  # fmt: skip
        """low, high: the data's smallest and largest return, between which returns are brought to 0..1 (a policy may
        leave it): alpha is on their scale. Raises UserError unless low < high and alpha >= 0."""
        super().__init__(arms, episodes, prior)
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise UserError(
                f"UCB needs the range of returns, not {low} to {high}: give the smallest and the largest return of the "
                "data"
            )
        if not alpha >= 0.0:
            raise UserError(f"alpha={alpha} must be at least 0")
        self.low, self.high, self.alpha, self.seed = low, high, alpha, seed

    def pulls(self) -> list[Pull]:
        played = self.played
        open_arms = [a for a in range(self.arms) if a not in self.banned]
        if played >= self.episodes or len(open_arms) < 2:
            return []
        scores = ucb_scores((self.means() - self.low) / (self.high - self.low), self.counts(), played + 1, self.alpha)[
            open_arms
        ]
        tied = np.flatnonzero(scores == scores.max())
        arm = open_arms[int(np.random.default_rng([self.seed, played]).choice(tied))]
        return [(arm, len(self.returns[arm]))]


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
        """prior, prior_sd: of the mean return, in its units (`offrl.tuning.choice.calibrated`); noise: the spread
        expected of one arm's returns. It ends when the chosen arm is within `margin` of the best (1% of the data's
        range) with probability `confidence`. Raises UserError for a NaN prior, a spread that is not above 0, a margin
        below 0, or a confidence outside 0..1."""
        super().__init__(arms, episodes, prior)
        if not np.isfinite(self.prior).all():
            raise UserError(
                "a posterior needs a finite prior value for each arm: leave out the arms without an estimate"
            )
        for name, value in (("prior_sd", prior_sd), ("noise", noise)):
            if not (math.isfinite(value) and value > 0.0):
                raise UserError(f"{name}={value} must be above 0: take the spread of the data's returns")
        if not margin >= 0.0:
            raise UserError(f"margin={margin} must be at least 0")
        if not 0.0 < confidence < 1.0:
            raise UserError(f"confidence={confidence} must lie between 0 and 1, both left out")
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
        return self._open()[0]

    def certainty(self) -> float:
        """Probability that `best` is within the margin of the best of the arms that may be chosen."""
        order = self._open()
        mean, sd = self.posterior()
        return chance_within(mean[order], sd[order], 0, self.margin)

    def pulls(self) -> list[Pull]:
        played = self.played
        if played >= self.episodes or len(self.banned) > self.arms - 2 or self.certainty() >= self.confidence:
            return []
        order = self._open()
        mean, sd = (x[order] for x in self.posterior())
        rng = np.random.default_rng([self.seed, played])
        place = int(np.argmax(mean + sd * rng.standard_normal(len(order))))
        if rng.random() < 0.5 and len(order) > 1:
            cost = np.maximum(mean[place] - mean, 0.0) ** 2 / (sd[place] ** 2 + sd**2)
            cost[place] = np.inf
            place = int(np.argmin(cost))
        arm = order[place]
        return [(arm, len(self.returns[arm]))]

    def _open(self) -> list[int]:
        """The arms that may be chosen, largest posterior mean first."""
        mean = self.posterior()[0]
        order = sorted((a for a in self.order if a not in self.banned), key=lambda a: -mean[a])
        if not order:
            self._first([])
        return order


def _check(arms: int, episodes: int) -> None:
    if arms < 2:
        raise UserError(f"there {'is 1 policy' if arms == 1 else 'are no policies'} to choose from: give at least 2")
    if episodes < 1:
        raise UserError(f"episodes={episodes} must be at least 1: without an episode take the first of the ranking")
