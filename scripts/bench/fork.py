"""Two ways round an obstacle: what clones their mean, what clones both, and what takes the better one
(docs/benchmarks/generative.md).

python scripts/bench/fork.py --out FOLDER                  # everything; some minutes of one core for each row
python scripts/bench/fork.py --out FOLDER --only fql bc    # these rows
python scripts/bench/fork.py --out FOLDER --stage table    # what is there, again
python scripts/bench/fork.py --out OTHER --first 5         # seeds 5 to 9, which nothing was chosen by

Trains each row's five seeds, plays 200 episodes with each, and writes fork.md (tables and commands) and fork.png. What
is there is not trained again.
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

import offrl  # noqa: E402
from offrl.envs import fork  # noqa: E402
from offrl.errors import UserError  # noqa: E402
from offrl.figures import style  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402

SEEDS, EPISODES, SHOWN = 5, 200, 60
COMMON = (
    'seeds={seeds} "algo.hidden=[128,128]" algo.batch_size=128 algo.learning_rate=1e-3 '
    "dataset.normalize_observations=false "
    f"eval.every=0 eval.episodes={EPISODES} eval.workers=0 workers=1 compile=compiled"
)
CLONES, VALUES = "steps=4000", "steps=4000"
FLOW, DIFFUSION = "algo.average=0.005", "algo.embedding=32 algo.polyak=0.005 algo.greedy=sample"
FQL = "algo.flow_steps=5 algo.normalize_q=true algo.pessimism=min algo.polyak=0.01 algo.discount=0.8"


class Row(NamedTuple):
    """One line of a table."""

    label: str
    task: str
    settings: str


ROWS = {
    "bc": Row("Gaussian cloning", "point-fork", f"algo=bc algo.policy=gaussian {CLONES}"),
    "flow": Row("flow cloning", "point-fork", f"algo=flow_bc {FLOW} {CLONES}"),
    "diffusion": Row("diffusion cloning", "point-fork", f"algo=diffusion_bc {DIFFUSION} {CLONES}"),
    "fql": Row("FQL", "point-fork", f"algo=fql {FQL} algo.alpha=0.6 {VALUES}"),
    "stale-bc": Row("Gaussian cloning, one action", "stale-fork", f"algo=bc algo.policy=gaussian {CLONES}"),
    "stale-chunk": Row(
        "Gaussian cloning, chunks of 4", "stale-fork", f"algo=chunk_bc algo.policy=gaussian algo.length=4 {CLONES}"
    ),
    "stale-flow": Row("flow cloning, one action", "stale-fork", f"algo=flow_bc {FLOW} {CLONES}"),
    "stale-flow-chunk": Row("flow cloning, chunks of 4", "stale-fork", f"algo=flow_bc algo.length=4 {FLOW} {CLONES}"),
    "stale-diffusion": Row("diffusion cloning, one action", "stale-fork", f"algo=diffusion_bc {DIFFUSION} {CLONES}"),
    "stale-diffusion-chunk": Row(
        "diffusion cloning, chunks of 4", "stale-fork", f"algo=diffusion_bc algo.length=4 {DIFFUSION} {CLONES}"
    ),
}
PANELS = ("bc", "flow", "fql")


def command(name: str, first: int) -> str:
    """The command that trains a row, with SEEDS seeds from `first` on."""
    row, seeds = ROWS[name], ",".join(map(str, range(first, first + SEEDS)))
    return f"offrl train dataset={row.task} {row.settings} {COMMON.format(seeds=seeds)} name={name}"


def train(name: str, out: Path, first: int) -> None:
    """Train a row; a run that was stopped goes on, and one that is done stays."""
    print(command(name, first), flush=True)
    subprocess.run(f"{command(name, first)} runs_dir={out} quiet=true", shell=True, check=True)


def done(name: str, out: Path, first: int) -> bool:
    """True for a row that was trained to its end."""
    try:
        offrl.load(out / name).policy(seed=first)
    except UserError:
        return False
    return True


def line(name: str, out: Path) -> str:
    """A row of its table: means over seeds, with intervals."""
    evaluation = offrl.load(out / name).evaluate(episodes=EPISODES)
    assert evaluation.successes is not None
    goal, returns = evaluation.successes, evaluation.returns
    limit = fork.LIMIT * fork.PARTS[ROWS[name].task]
    shares = (
        goal.mean(1),
        ((goal == 1) & (returns > fork.ABOVE)).mean(1),
        ((goal == 0) & (evaluation.lengths < limit)).mean(1),
    )
    cells = [f"{100 * np.mean(v):.0f} {span(100 * v)}" for v in shares]
    return f"| {ROWS[name].label} | {' | '.join(cells)} | {returns.mean():.2f} {span(returns.mean(1), 2)} |"


def span(values: np.ndarray, digits: int = 0) -> str:
    """The 95% interval of the mean over seeds."""
    _, low, high = mean_interval(values)
    return f"[{low:.{digits}f}, {high:.{digits}f}]"


def table(out: Path, first: int) -> str:
    """Both tables and their commands, of the rows that are there."""
    parts = []
    for task in fork.PARTS:
        names = [n for n, row in ROWS.items() if row.task == task and done(n, out, first)]
        if names:
            head = f"| `{task}` | reaches the goal, % | above, % | crashes, % | return |\n|---|---|---|---|---|\n"
            parts.append(head + "\n".join(line(n, out) for n in names))
            parts.append("\n".join(f"    {command(n, first)}" for n in names))
    return "\n\n".join(parts) + "\n"


@style.own_settings()
def draw(out: Path, first: int) -> None:
    """The ways that policies of the first seed take, beside one another."""
    from matplotlib.patches import Circle

    figure, alone = style.new_figure("", height=3.1, width=10.2)
    alone.remove()
    for axes, name in zip(figure.subplots(1, len(PANELS)), PANELS, strict=True):
        for way, colour in ways(name, out, first):
            axes.plot(*way.T, color=colour, linewidth=0.9, alpha=0.45, solid_capstyle="round")
        axes.add_patch(Circle((0.0, 0.0), fork.RADIUS, color="#c9ccd1", zorder=3))
        axes.add_patch(Circle(tuple(fork.GOAL), fork.REACH, color=style.COLOURS[2], alpha=0.35, zorder=0))
        axes.set_title(ROWS[name].label, loc="left", fontsize=10.5, color="#333333")
        axes.set_xlim(-1.3, 1.3)
        axes.set_ylim(-1.15, 1.15)
        axes.set_aspect("equal")
        axes.set_xticks([])
        axes.set_yticks([])
        for spine in axes.spines.values():
            spine.set_color("#dddddd")
    style.save(figure, out / "fork.png")


def ways(name: str, out: Path, first: int) -> list[tuple[np.ndarray, str]]:
    """Positions [T, 2] of episodes of the first seed, and a colour by how they end."""
    policy: Any = offrl.load(out / name).policy(seed=first)
    parts, lines = fork.PARTS[ROWS[name].task], []
    envs = [fork.PointFork(parts) for _ in range(SHOWN)]
    rows = np.stack([env.reset(seed=e)[0] for e, env in enumerate(envs)])
    carry, points, ended = policy.start(SHOWN), [[env.position] for env in envs], [0.0] * SHOWN
    running, arrived = set(range(SHOWN)), [False] * SHOWN
    for t in range(fork.LIMIT * parts):
        actions, carry = policy.step(carry, rows, t)
        for e in tuple(running):
            rows[e], reward, over, _, info = envs[e].step(actions[e])
            arrived[e] = info["success"]
            points[e].append(envs[e].position)
            ended[e] += reward
            if over:
                running.discard(e)
    for e in range(SHOWN):
        number = 0 if arrived[e] and ended[e] > fork.ABOVE else 5 if arrived[e] else 1
        lines.append((np.stack(points[e]), style.COLOURS[number]))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", choices=tuple(ROWS), default=list(ROWS))
    parser.add_argument("--first", type=int, default=0, help="the first of five seeds")
    parser.add_argument("--stage", choices=("all", "train", "table"), default="all")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.stage != "table":
        for name in given.only:
            train(name, given.out, given.first)
    if given.stage != "train":
        (given.out / "fork.md").write_text(table(given.out, given.first))
        print((given.out / "fork.md").read_text())
        if all((given.out / name / "scores.csv").is_file() for name in PANELS):
            draw(given.out, given.first)


if __name__ == "__main__":
    main()
