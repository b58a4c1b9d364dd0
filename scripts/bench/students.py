"""Students that see Pendulum's angle without its velocity: taught where they act, beside clones of their teachers' own
episodes.

python scripts/bench/students.py --out FOLDER      # six minutes of CPU

Three teachers (SAC, 5,000 steps); their students see the last three angles, learn for 10,000 steps, and are scored with
and without a torque that the teachers did not know. A clone has as many rows and updates: 50 episodes of its teacher.
What is there in --out is not run again. Prints the table.
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

SEEDS, EPISODES, STEPS, HISTORY = 3, 20, 10_000, 3
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


def taught(teachers: offrl.Run, out: Path, seen: int) -> list[offrl.Run]:
    """Students that see the first `seen` numbers."""
    settings = {**SMALL, "student.observation_keys": [*range(seen)], "eval.every": STEPS // 4}
    settings |= {"student.history": HISTORY if seen == len(ANGLE) else 1}
    name, where = f"taught-{seen}", str(out)
    return [offrl.finetune(teachers, mode="distill", steps=STEPS, name=name, runs_dir=where, settings=settings)]


def cloned(teachers: offrl.Run, out: Path) -> list[offrl.Run]:
    """A clone of each teacher's own episodes, from starts that no evaluation has."""
    runs = []
    for seed in range(SEEDS):
        policy, env, rows = teachers.policy(seed), gym.make(ENV), []
        for episode in range(STEPS // 200):
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
        name, where = f"cloned-{seed}", str(out)
        runs.append(offrl.train("bc", data, seeds=[seed], steps=STEPS, name=name, runs_dir=where, settings=settings))
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
    out = parser.parse_args().out
    online = {**SMALL, "algo.critics": 2, "warmup": 500, "eval.every": 2500, "mixing": 0}
    teachers = offrl.finetune(
        None, algo="sac_n", env=ENV, steps=5_000, seeds=SEEDS, name="teacher", runs_dir=str(out), settings=online
    )
    print("\n".join([
        f"| policy | return, mean over {SEEDS} seeds [95% interval] (each) | with a torque of {TORQUE} N m |",
        "|---|---|---|",
        line("teachers", [teachers]),
        line("students of the angle", taught(teachers, out, 2)),
        line("students of all", taught(teachers, out, 3)),
        line("clones of the angle", cloned(teachers, out)),
    ]))  # fmt: skip


if __name__ == "__main__":
    main()
