"""How well judges rank settings: rank correlation and regret, also after real episodes. For docs/benchmarks/tuning.md.

    python scripts/bench/judges.py TUNE ... --out docs/benchmarks/tuning.png

Each TUNE is a folder of `offrl tune ... rungs=1 truth=N`, whose settings were all trained in full and played.
`--more wis,lstd` lets other judges look at one seed of the same policies first, and keeps what they say in
TUNE/more-*.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

import numpy as np  # noqa: E402
from bench.regret import EPISODES, quality, regret_curve  # noqa: E402
from bench.regret import MEASURES as MEASURE  # noqa: E402

from offrl.figures.style import new_figure, plain_axes, save  # noqa: E402
from offrl.ope.config import OPEConfig  # noqa: E402
from offrl.tuning.judging import judge, policies_of  # noqa: E402
from offrl.tuning.plan import prepare  # noqa: E402

MEASURES = ("spearman", "regret@1", "regret@3")


def main(words: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tunes", nargs="+", type=Path)
    parser.add_argument("--more", default="", help="judges to ask besides, of one seed of each setting")
    parser.add_argument("--updates", type=int, default=20_000, help="of each fitted Q evaluation of theirs")
    parser.add_argument("--polyak", type=float, default=0.02, help="of these")
    parser.add_argument("--out", type=Path, help="a picture of regret against real episodes")
    args = parser.parse_args(words)
    if args.more:
        for folder in args.tunes:
            ask(folder, args.more.split(","), args.updates, args.polyak)
    rng = np.random.default_rng(0)
    tables = {folder.name: Truth(folder) for folder in args.tunes}
    for name, table in tables.items():
        low, middle, high = table.mean.min(), table.mean.mean(), table.mean.max()
        print(f"\n{name}: {len(table.names)} settings, true returns {low:.0f} to {high:.0f}, mean {middle:.0f}")
        print("| judge | " + " | ".join(MEASURES) + " |\n|---|" + "---|" * len(MEASURES))
        for judge_name, estimate in table.estimates.items():
            cells = [quality(table.returns, estimate, m, reps=500) for m in MEASURES]
            print(f"| {judge_name} | " + " | ".join(f"{c.value:.2f} [{c.low:.2f}, {c.high:.2f}]" for c in cells) + " |")
        chance = [
            np.mean([MEASURE[m](table.mean, rng.normal(size=len(table.mean))) for _ in range(2_000)]) for m in MEASURES
        ]
        print("| at random | " + " | ".join(f"{c:.2f}" for c in chance) + " |")
    print("\nregret (1: a setting at random) after n real episodes, by sequential halving of the 8 best by the judge")
    print("| file | prior | " + " | ".join(map(str, EPISODES)) + " |\n|---|---|" + "---|" * len(EPISODES))
    curves = {}
    for name, table in tables.items():
        for prior in ("fqe", "td", "near the data", "at random"):
            curve = regret_curve(table.returns, prior=table.estimates.get(prior), trials=400, resamples=100)
            curves[name, prior] = curve
            cells = (
                f"{v:.2f} [{lo:.2f}, {hi:.2f}]" for v, lo, hi in zip(curve.value, curve.low, curve.high, strict=True)
            )
            print(f"| {name} | {prior} | " + " | ".join(cells) + " |")
    if args.out:
        draw(curves, args.out)


class Truth:
    """Returns and estimates of the settings of one tune: returns [K, S episodes], the seeds' side by side."""

    def __init__(self, folder: Path) -> None:
        truth, judged = (json.loads((folder / "state" / f"{name}.json").read_text()) for name in ("truth", "judged"))
        returns: dict[str, list[list[float]]] = {}
        for row in truth["policies"]:
            returns.setdefault(row["setting"], []).append(row["returns"])
        seeds = max(map(len, returns.values()))
        self.names = [n for n, own in returns.items() if len(own) == seeds]
        self.returns = np.array([np.concatenate(returns[n]) for n in self.names])
        self.mean = self.returns.mean(1)
        self.estimates = {m: self.column(judged, m) for m in judged["methods"]}
        self.estimates["near the data"] = -self.column(judged, "distance")
        for path in sorted(folder.glob("more-*.json")):
            more = json.loads(path.read_text())
            self.estimates |= {
                f"{m} (one seed, {more['updates']:,} updates)": self.column(more, m) for m in more["methods"]
            }

    def column(self, record: dict[str, Any], key: str) -> np.ndarray:
        """The mean over seeds of what a record says of each setting, [K]."""
        own: dict[str, list[float]] = {}
        for row in record["policies"]:
            if row[key] is not None:
                own.setdefault(row["setting"], []).append(row[key])
        return np.array([np.mean(own[n]) if n in own else np.nan for n in self.names])


def ask(folder: Path, methods: list[str], updates: int, polyak: float) -> None:
    """Let other judges look at one seed of each setting, and write what they say; at once where that was done
    before.
    """
    path = folder / f"more-{'-'.join(methods)}-{updates}.json"
    if path.exists():
        return
    work = prepare({"resume": str(folder), "quiet": True})
    trials = json.loads((folder / "state" / "bracket-0.json").read_text())["settings"]
    (rung,) = work.rungs(len(trials))
    runs = work.rung_runs(0, 0, rung, {n: (a, v) for n, (a, v) in trials.items()}, [])
    one = {key: policy for key, policy in policies_of(runs).items() if key[1] == work.seeds[0]}
    began = time.monotonic()
    ope = work.config.ope
    settings = OPEConfig(
        updates=updates, polyak=polyak, hidden=ope.hidden, pairs=ope.pairs, fits=["base", "norm", "short"]
    )
    record = judge(one, work.judged_on, methods, settings, "cpu")
    path.write_text(json.dumps({**record, "updates": updates}))
    print(
        f"{folder.name}: {', '.join(methods)} of {len(one)} policies in {time.monotonic() - began:.0f} s",
        file=sys.stderr,
    )


def draw(curves: dict[tuple[str, str], Any], out: Path) -> None:
    """Mean regret over the files, with each file's curve of the first prior thin behind it."""
    figure, axes = new_figure("Regret of the chosen setting, after n real episodes")
    priors = list(dict.fromkeys(prior for _, prior in curves))
    for number, prior in enumerate(priors):
        own = [c for (_, p), c in curves.items() if p == prior]
        x, mean = np.arange(len(own[0].x)), np.mean([c.value for c in own], 0)
        for c in own:
            axes.plot(x, c.value, color=f"C{number}", alpha=0.25, linewidth=1.0)
        axes.plot(x, mean, color=f"C{number}", linewidth=2.4, marker="o", label=f"first choice: {prior}")
    axes.set_xticks(np.arange(len(EPISODES)), [str(n) for n in EPISODES])
    axes.set_xlabel("real episodes, in all")
    axes.set_ylabel("regret (0: the best setting, 1: one at random)")
    plain_axes(axes)
    axes.legend(frameon=False)
    save(figure, out)


if __name__ == "__main__":
    main(sys.argv[1:])
