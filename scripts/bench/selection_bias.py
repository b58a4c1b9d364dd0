"""What a tuner promises too much when it reports on the episodes that selected: a simulation with known truth.

python scripts/bench/selection_bias.py --out bias.png        # the table and the picture of
docs/benchmarks/tuning-statistics.md python scripts/bench/selection_bias.py --coverage 200        # and how often the
intervals of regret curves hold the truth, five minutes"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
from bench.regret import halving, regret_curve  # noqa: E402

from offrl.figures.style import COLOURS, GREY, label_ends, new_figure, own_settings, plain_axes, save  # noqa: E402
from offrl.runs.tables import interval_text, print_table  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402
from offrl.statistics.maxima import selection_optimism  # noqa: E402
from offrl.tuning.best_arm import schedule  # noqa: E402

ARMS = (2, 4, 8, 16, 32)
# of each arm, on average; its policies, which play them in turn. The spread of a policy's returns is 1
EPISODES, SEEDS = (10, 2)
SPREAD = 0.5  # of policies about their setting's mean
FRESH = 100  # episodes for the report
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Bias:
    """Report less the true mean of the chosen setting, mean and interval over trials, in standard deviations of one
    return.
    """

    selecting: Interval  # the mean of the episodes that selected
    same: Interval  # FRESH other episodes of the same policies
    retrained: Interval  # FRESH episodes of policies trained anew
    exact: float  # what integration says of `selecting`; NaN where more episodes go to better arms


def equal(count: int) -> np.ndarray:
    return np.zeros(count)


def unequal(count: int) -> np.ndarray:
    """True means that spread as a policy's returns do: quantiles of the standard normal."""
    return np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])


WORLDS: dict[str, Callable[[int], np.ndarray]] = {"equal": equal, "unequal": unequal}


def simulate(truth: np.ndarray, adaptive: bool, trials: int, seed: int = 0) -> Bias:
    """Choose among settings of true means `truth` [K] with EPISODES * K episodes: as many for each and the largest
    mean, or sequential halving of all (`adaptive`)."""
    count = len(truth)
    plan = schedule(count, EPISODES * count)
    longest = sum(each for _, each, _ in plan) + 1 if adaptive else EPISODES
    gaps: list[np.ndarray] = []
    for start in range(0, trials, 250):
        size = min(250, trials - start)
        rng = np.random.default_rng([seed, count, adaptive, start])
        rows = np.arange(size)
        means = truth[rng.random((size, count)).argsort(1)]  # the order says nothing
        policies = means[:, :, None] + SPREAD * rng.standard_normal((size, count, SEEDS))
        draws = policies[:, :, np.arange(longest) % SEEDS] + rng.standard_normal((size, count, longest))
        if adaptive:
            chosen = halving(draws, [EPISODES * count], most=count)[:, 0]
            played = longest - 1  # the last round's two arms play alike: what is left of EPISODES * K is even
            assert plan[-1][2] == 0
        else:
            chosen, played = draws.mean(2).argmax(1), EPISODES
        picked = policies[rows, chosen]
        anew = means[rows, chosen][:, None] + SPREAD * rng.standard_normal((size, SEEDS))
        reports = [draws[rows, chosen, :played].mean(1), *(_fresh(p, rng) for p in (picked, anew))]
        gaps.append(np.stack(reports) - means[rows, chosen])
    selecting, same, retrained = (mean_interval(g) for g in np.concatenate(gaps, 1))
    error = math.sqrt(SPREAD**2 / SEEDS + 1 / EPISODES)
    exact = math.nan if adaptive else selection_optimism(truth, np.full(count, error))
    return Bias(selecting, same, retrained, exact)


def _fresh(policies: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The mean of FRESH episodes, of the policies [trials, SEEDS] in turn."""
    return (policies[:, np.arange(FRESH) % SEEDS] + rng.standard_normal((len(policies), FRESH))).mean(1)


def coverage(count: int, experiments: int, ns: list[int]) -> list[list[str]]:
    """Of `regret_curve`: for each n the regret averaged over 3,000 sets of `count` settings, the share of `experiments`
    other sets whose interval holds it, and the mean ends of the intervals. Settings are standard normal, with 20
    returns each of spread 1, and a judge whose errors have a spread of .7."""

    def made(number: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([number, count])
        means = rng.standard_normal(count)
        return means[:, None] + rng.standard_normal((count, 20)), means + 0.7 * rng.standard_normal(count)

    def curve(number: int, trials: int, resamples: int) -> Any:
        returns, prior = made(number)
        return regret_curve(returns, ns, prior=prior, trials=trials, resamples=resamples)

    true = np.mean([curve(number, 50, 1).value for number in range(10_000, 13_000)], 0)
    curves = [curve(number, 200, 200) for number in range(experiments)]
    inside = np.mean([(c.low <= true) & (true <= c.high) for c in curves], 0)
    low, high = (np.mean([getattr(c, end) for c in curves], 0) for end in ("low", "high"))
    return [
        [str(count), str(n), f"{true[i]:.2f}", f"{100 * inside[i]:.1f}%", f"{low[i]:.2f} to {high[i]:.2f}"]
        for i, n in enumerate(ns)
    ]


@own_settings()
def draw(biases: dict[tuple[str, bool, int], Bias], out: Path) -> None:
    """The three reports over the number of settings, as many episodes for each: equal settings full, unequal ones
    broken lines.
    """
    figure, axes = new_figure("What is reported of the winner, less what it is worth")
    axes.axhline(0.0, color=GREY, linewidth=1.0)
    names = {"selecting": "selecting episodes", "same": "fresh episodes", "retrained": "fresh, retrained"}
    ends = []
    for (name, label), colour in zip(names.items(), COLOURS, strict=False):
        for world, style in (("equal", "-"), ("unequal", "--")):
            mean, low, high = np.array([getattr(biases[world, False, count], name) for count in ARMS]).T
            axes.plot(ARMS, mean, style, color=colour, linewidth=2.0)
            axes.fill_between(ARMS, low, high, color=colour, alpha=0.2, linewidth=0)
            if world == "equal":
                ends.append((float(mean[-1]), label, colour))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ARMS, [str(count) for count in ARMS])
    axes.set_xlabel(
        "settings to choose from (full: of equal worth, broken: of unequal worth)", fontsize=9.5, color="#333333"
    )
    axes.set_title(
        "standard deviations of one return, mean and 95% interval over trials",
        loc="left",
        fontsize=9.5,
        color="#333333",
    )
    plain_axes(axes)
    label_ends(axes, ends)
    save(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="draw a picture there")
    parser.add_argument("--coverage", type=int, default=0, help="experiments on regret curves")
    options = parser.parse_args()
    started = time.monotonic()
    biases = {
        (world, adaptive, count): simulate(means(count), adaptive, options.trials)
        for world, means in WORLDS.items()
        for adaptive in (False, True)
        for count in ARMS
    }
    rows = [
        [world, "halving" if adaptive else "alike", count, f"{b.exact:.3f}" if math.isfinite(b.exact) else "",
         *(interval_text(x, 3) for x in (b.selecting, b.same, b.retrained))]
        for (world, adaptive, count), b in biases.items()
    ]  # fmt: skip
    headers = ["settings", "episodes", "K", "exact", "selecting episodes", "fresh episodes", "fresh, retrained"]
    print_table(headers, rows, f"report less worth of the chosen setting, {options.trials} trials")
    if options.coverage:
        rows = [row for count in (16, 32) for row in coverage(count, options.coverage, [0, 2, 5, 20, 50])]
        print_table(
            ["K", "n", "regret", "intervals that hold it", "mean ends"], rows, "regret curves, halving after a judge"
        )
    print(f"{time.monotonic() - started:.0f} s")
    if options.out is not None:
        draw(biases, options.out)


if __name__ == "__main__":
    main()
