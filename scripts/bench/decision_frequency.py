"""Scores of several runs over the number of environment steps between decisions: one table and one picture
(docs/decision-frequency.md).

python scripts/bench/decision_frequency.py "held TD3+BC=runs/seq:action_steps=0" sequence_rl=runs/seq --title Pendulum
--out picture.png

A run is NAME=DIRECTORY; after a colon stand settings that only acting looks at.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

from offrl.api import Run
from offrl.evaluation.sweeps import FrequencyScores
from offrl.figures.evaluations import draw_frequencies
from offrl.runs.tables import interval_text
from offrl.statistics.intervals import mean_interval


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--frequency", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path("frequency.png"))
    args = parser.parse_args()
    curves: dict[str, FrequencyScores] = {}
    for word in args.runs:
        name, _, rest = word.partition("=")
        where, _, settings = rest.partition(":")
        pairs = (pair.partition("=") for pair in settings.split(",") if pair)
        acting = {key: ast.literal_eval(value) for key, _, value in pairs}
        curves[name] = Run(where).evaluate_frequency(args.frequency, episodes=args.episodes, acting=acting)
        print(name, "done", flush=True)
    unit = next(iter(curves.values())).unit
    print(
        f"\n| {unit} | {' | '.join(f'D = {d}' for d in args.frequency)} | frequency score "
        f"|\n|{'---|' * (len(args.frequency) + 2)}"
    )
    for name, scores in curves.items():
        every = range(len(scores.replicas))
        means = [interval_text(mean) for mean in scores.scores(every) or scores.returns(every)]
        total = scores.frequency_score
        print(f"| {name} | {' | '.join(means)} | {'' if total is None else interval_text(mean_interval(total))} |")
    draw_frequencies(curves, args.out, args.title)


if __name__ == "__main__":
    main()
