"""Students that see Pendulum's angle without its velocity: taught where they act, beside clones of their teachers' own
episodes.

python scripts/bench/students.py --out FOLDER      # five minutes of CPU
python scripts/bench/students.py --out FOLDER --rows 1000 --only students clones

Three teachers (SAC, 5,000 steps); their students see the last three angles, make 10,000 updates on --rows steps of
their own, and are scored with and without a torque that the teachers did not know. A clone has as many rows, of its
teacher's episodes, and updates. What is there in --out is not run again. Prints the table.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402

import offrl  # noqa: E402
from offrl.data.arrays import from_arrays  # noqa: E402
from offrl.runs.tables import interval_text  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402
from offrl.tasks.task import Task  # noqa: E402

SEEDS, EPISODES, UPDATES, HISTORY = 3, 20, 10_000, 3
ENV, ANGLE, TORQUE = "Pendulum-v1", (0, 1), 0.3  # N m
SMALL: dict[str, Any] = {"algo.hidden": [128, 128], "algo.learning_rate": 1e-3, "eval.workers": 0}
HERE = Path(__file__).resolve()


class Pushed(gym.ActionWrapper[Any, Any, Any]):
    """Pendulum with a constant torque beside the action, of which both together stay in the range."""

    def __init__(self) -> None:
        super().__init__(gym.make(ENV))

    def action(self, action: Any) -> Any:
        """With the torque."""
        return action + TORQUE


def taught(teachers: offrl.Run, out: Path, steps: int, numbers: int) -> list[offrl.Run]:
    """Students that see the first `numbers` of an observation."""
    settings = {**SMALL, "student.observation_keys": [*range(numbers)], "eval.every": steps // 4}
    settings |= {"student.history": HISTORY if numbers == len(ANGLE) else 1, "utd": UPDATES / steps}
    name, where = f"taught-{numbers}-{steps}", str(out)
    return [offrl.finetune(teachers, mode="distill", steps=steps, name=name, runs_dir=where, settings=settings)]


def cloned(teachers: offrl.Run, out: Path, count: int) -> list[offrl.Run]:
    """A clone of each teacher's own episodes, from starts that no evaluation has."""
    runs = []
    for seed in range(SEEDS):
        policy, env, rows = teachers.policy(seed), gym.make(ENV), []
        for episode in range(count // 200):
            observation, over = env.reset(seed=10_000 + 1_000 * seed + episode)[0], False
            while not over:
                action = policy.act(observation)
                after, reward, terminated, over, _ = env.step(action)
                rows.append((observation[:2], action, reward, terminated, over, after[:2]))
                observation = after
        columns = [np.array(column) for column in zip(*rows, strict=True)]
        task = Task(ENV, env_id=ENV, observation_numbers=ANGLE)
        data = from_arrays(*columns, action_low=-2.0, action_high=2.0, name=f"teacher-{seed}", task=task)
        settings = {**SMALL, "dataset.history": HISTORY, "eval.every": 0}
        name, where = f"cloned-{seed}-{count}", str(out)
        runs.append(offrl.train("bc", data, seeds=[seed], steps=UPDATES, name=name, runs_dir=where, settings=settings))
    return runs


def line(label: str, runs: list[offrl.Run]) -> str:
    """A row of the table: with the environment as it is, and with the torque."""
    cells = [label]
    for env in (ENV, f"{HERE}:Pushed"):
        returns = [row["return_mean"] for run in runs for row in run.evaluate(EPISODES, env=env).rows()]
        cells.append(interval_text(mean_interval(returns), 1) + f" ({', '.join(f'{x:.0f}' for x in returns)})")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=10_000)
    parts = ("teachers", "students", "all", "clones")
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    options = parser.parse_args()
    out, rows = options.out, options.rows
    online = {**SMALL, "algo.critics": 2, "warmup": 500, "eval.every": 2500, "mixing": 0}
    teachers = offrl.finetune(
        None, algo="sac_n", env=ENV, steps=5_000, seeds=SEEDS, name="teacher", runs_dir=str(out), settings=online
    )
    lines = {
        "teachers": lambda: line("teachers", [teachers]),
        "students": lambda: line("students of the angle", taught(teachers, out, rows, 2)),
        "all": lambda: line("students of all", taught(teachers, out, rows, 3)),
        "clones": lambda: line("clones of the angle", cloned(teachers, out, rows)),
    }
    print(f"| policy | return, mean over {SEEDS} seeds [95% interval] (each) | with a torque of {TORQUE} N m |")
    print("|---|---|---|")
    print("\n".join([lines[part]() for part in parts if part in options.only]))


if __name__ == "__main__":
    main()
