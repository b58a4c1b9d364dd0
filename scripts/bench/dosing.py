"""Doses of a drug under a limit of costs: what policies earn, cost and leave of the data, beside the best treatment
(docs/benchmarks/limits.md).

python scripts/bench/dosing.py --out FOLDER                     # everything
python scripts/bench/dosing.py --out FOLDER --only ogsrl cpq    # these rows
python scripts/bench/dosing.py --out FOLDER --stage table       # what is there, again

Trains each row's seeds, plays 2,000 episodes with each, and writes dosing.md (table and commands). What is there is not
trained again. The best treatment is that of dynamic programming on a grid of concentrations and doses, with the price
of a cost at which the limit is kept.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402

import offrl  # noqa: E402
from offrl import registry  # noqa: E402
from offrl.data import load_dataset  # noqa: E402
from offrl.envs import dosing  # noqa: E402
from offrl.errors import UserError  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402
from offrl.world_models.model import load  # noqa: E402

SEEDS, EPISODES, COST_LIMIT, FRESH = 3, 2000, 3.0, 5
COMMON = (
    f'dataset=dosing seeds={SEEDS} "algo.hidden=[64,64]" algo.batch_size=128 eval.every=0 eval.episodes=10 '
    'eval.workers=0 workers=1 "compare=[]"'
)
VALUES = f"algo.discount=0.95 algo.cost_limit={COST_LIMIT:g} algo.cost.discount=0.95 steps=10000"
MODEL = (
    "world_model={out}/model algo.rollouts=1000 algo.rollout_every=250 algo.optimizer.learning_rate=1e-3 "
    "algo.actor.learning_rate=3e-4 algo.entropy.target=-3 algo.cost.states=first"
)
OSRL = '"algo.autoencoder_hidden=[64,64]"'
DYNAMICS = 'offrl train dataset=dosing algo=dynamics seeds=1 "algo.hidden=[64,64]" algo.members=5 steps=3000 name=model'


class Row(NamedTuple):
    """One line of the table."""

    label: str
    settings: str


ROWS = {
    "bc": Row("cloning", "algo=bc steps=3000"),
    "bc-safe": Row(
        "cloning of the episodes that keep the limit", f'algo=bc "dataset.keep=cost <= {COST_LIMIT:g}" steps=3000'
    ),
    "cpq": Row("CPQ", f"algo=cpq {VALUES} {OSRL}"),
    "cpq-paper": Row("CPQ in the paper's form", f"algo=cpq {VALUES} {OSRL} algo.ood=paper"),
    "bcq": Row("BCQ-Lagrangian", f"algo=bcq_lag {VALUES} {OSRL} algo.cost.states=first"),
    "bear": Row("BEAR-Lagrangian", f"algo=bear_lag {VALUES} {OSRL} algo.cost.states=first"),
    "ogsrl": Row("OGSRL", f"algo=ogsrl {VALUES} {MODEL}"),
    "unguarded": Row("OGSRL without its guardian", f"algo=ogsrl {VALUES} {MODEL} algo.guardian_limit=1"),
}


# ---- the best treatment

CONCENTRATIONS, DOSES = np.linspace(0.0, 2.6, 261), np.linspace(0.0, 1.0, 51)
NOISE = np.linspace(-4.0, 4.0, 33)
WEIGHTS = np.exp(-(NOISE**2) / 2) / np.exp(-(NOISE**2) / 2).sum()


def planned(price: float) -> tuple[float, float, np.ndarray]:
    """The treatment that earns most where each cost takes `price` off: its mean return, its mean cost, and its doses
    [T, X] at CONCENTRATIONS.
    """
    after = dosing.follow(CONCENTRATIONS[:, None, None], DOSES[:, None], NOISE)  # [X, U, Z]
    rewards, costs = dosing.reward(DOSES[:, None], after) @ WEIGHTS, (after > dosing.TOXIC) @ WEIGHTS
    at = np.clip(after / CONCENTRATIONS[1], 0.0, len(CONCENTRATIONS) - 1.001)
    low, share = at.astype(int), at % 1.0

    def expected(values: np.ndarray) -> np.ndarray:
        return ((1.0 - share) * values[low] + share * values[low + 1]) @ WEIGHTS

    gain, cost, doses = np.zeros(len(CONCENTRATIONS)), np.zeros(len(CONCENTRATIONS)), []
    for _ in range(dosing.LIMIT):
        gains, losses = rewards + expected(gain), costs + expected(cost)
        best = (gains - price * losses).argmax(1)
        rows = np.arange(len(best))
        gain, cost = gains[rows, best], losses[rows, best]
        doses.append(DOSES[best])
    first = CONCENTRATIONS <= dosing.START
    return float(gain[first].mean()), float(cost[first].mean()), np.array(doses[::-1])


def optimum(limit: float) -> float:
    """The largest mean return of a treatment, random ones included, whose mean cost is at most `limit`: the least over
    prices of return less price (cost - limit), which is exact.
    """
    low, high = 0.0, 10.0
    for _ in range(12):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if planned(middle)[1] > limit else (low, middle)
    gain, cost, _ = planned(high)
    return gain - high * (cost - limit)


# ---- what policies do


def play(policy: Any, seed: int = 999) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Returns and costs [E] of EPISODES episodes played side by side, and their observations and doses [T, E, 1]."""
    draw, carry = np.random.default_rng(seed), policy.start(EPISODES)
    concentration = draw.uniform(0.0, dosing.START, (EPISODES, 1))
    gains, costs, pairs = np.zeros(EPISODES), np.zeros(EPISODES), []
    for t in range(dosing.LIMIT):
        observations = concentration.astype(np.float32)
        doses, carry = policy.step(carry, observations, t)
        doses = np.clip(np.asarray(doses, np.float64), 0.0, 1.0)
        concentration = dosing.follow(concentration, doses, draw.standard_normal((EPISODES, 1)))
        gains += dosing.reward(doses, concentration)[:, 0]
        costs += concentration[:, 0] > dosing.TOXIC
        pairs.append((observations, doses))
    observations, actions = (np.stack(x) for x in zip(*pairs, strict=True))
    return gains, costs, observations, actions


class Guard:
    """OGSRL's guardian of the data."""

    def __init__(self, model: Path) -> None:
        data, kind = load_dataset("dosing"), registry.get("algo", "ogsrl")
        self.algorithm = kind(kind.Config(cost_limit=None), data.spec, {"world_model": load(model)})
        self.source = self.algorithm.sampler().prepare(data)

    def outside(self, observations: np.ndarray, doses: np.ndarray) -> float:
        """The share of observations [..., 1] with doses [..., 1] that it excludes."""
        pairs = (torch.tensor(x.reshape(-1, 1), dtype=torch.float32) for x in (observations, 2.0 * doses - 1.0))
        return float(self.algorithm.outside(self.source, *pairs).mean())

    def fresh(self, seed: int) -> float:
        """The share of rows of the data's own treatments, from another seed, that it excludes."""
        data = dosing.generate(seed, dosing.EPISODES)
        return self.outside(data.columns["observations"], data.columns["actions"])


# ---- training and the table


def command(name: str, out: Path) -> str:
    """The command that trains a row."""
    return f"offrl train {COMMON} {ROWS[name].settings.format(out=out)} name={name}"


def train(line: str, name: str, out: Path) -> None:
    """Train a run, unless it is done."""
    try:
        offrl.load(out / name)
    except UserError:
        print(line, flush=True)
        subprocess.run(f"{line} runs_dir={out} quiet=true", shell=True, check=True)


def span(values: Any, digits: int = 1) -> str:
    """A mean over seeds with its 95% interval."""
    mean, low, high = mean_interval(np.asarray(values))
    return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def table(out: Path, names: list[str]) -> str:
    """The table and its commands."""
    guard, best, free = Guard(out / "model"), optimum(COST_LIMIT), planned(0.0)
    excluded = [100 * guard.fresh(seed) for seed in range(1, FRESH + 1)]
    lines = [
        "| | return | cost | seeds that keep the limit | steps outside the data, % |",
        "|---|---|---|---|---|",
        f"| best treatment, limit {COST_LIMIT:g} | {best:.1f} | {COST_LIMIT:g} | | |",
        f"| best treatment, no limit | {free[0]:.1f} | {free[1]:.1f} | | |",
    ]
    data = load_dataset("dosing")
    returns, costs = data.episode_returns(), data.episode_costs()
    lines.append(f"| the data | {float(returns.mean()):.1f} | {float(costs.mean()):.1f} | | 5 by definition |")
    for name in names:
        plays = [play(offrl.load(out / name).policy(seed=seed)) for seed in range(SEEDS)]
        gains, spent = [p[0].mean() for p in plays], np.array([p[1].mean() for p in plays])
        outside = [100 * guard.outside(*p[2:]) for p in plays]
        safe = f"{(spent <= COST_LIMIT).sum()} of {SEEDS}"
        lines.append(f"| {ROWS[name].label} | {span(gains)} | {span(spent)} | {safe} | {span(outside, 0)} |")
    lines += ["", f"Excluded of {FRESH} fresh sets of as many rows, %: {', '.join(f'{x:.2f}' for x in excluded)}.", ""]
    return "\n".join([*lines, f"    {DYNAMICS}", *(f"    {command(n, Path('runs'))}" for n in names)]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--stage", choices=("all", "table"), default="all")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.stage == "all":
        train(DYNAMICS, "model", options.out)
        for name in options.only:
            train(command(name, options.out), name, options.out)
    (options.out / "dosing.md").write_text(table(options.out, options.only))
    print((options.out / "dosing.md").read_text())


if __name__ == "__main__":
    main()
