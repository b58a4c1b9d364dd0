"""Meta-DT in point-robot tasks that no data hold: its returns on its own, and after three recorded episodes of the task
were shown to it.

python scripts/bench/few_shot.py runs/META [runs/DT ...] --targets -3 -6 -10
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from offrl.api import Run
from offrl.data.dataset import Dataset
from offrl.data.loading.assemble import assemble
from offrl.envs import point_robot
from offrl.evaluation.in_context import Arena, Trained

FIRST, SHOWN = 1_000_000, 3  # number of the first task; episodes that are shown


class Shown(Trained):
    """A policy that begins with a prompt from recorded episodes, SHOWN of each task, in the order of the tasks."""

    def __init__(self, policy: Any, data: Dataset) -> None:
        super().__init__(policy, explore=False)
        self.data = data

    @torch.no_grad()
    def begin(self, tasks: Sequence[int], seed: int) -> Any:
        policy, c = self.policy, self.data.columns
        carry, starts = super().begin(tasks, seed), self.data.episode_start.reshape(len(tasks), SHOWN)
        for number in range(SHOWN):
            rows = starts[:, number].unsqueeze(1) + torch.arange(point_robot.LIMIT)
            seen = {name: c[name][rows] for name in ("observations", "actions", "rewards")}
            seen["observations"] = (seen["observations"] - policy.mean) / policy.std
            carry = dataclasses.replace(carry, episode=seen)
            carry = self.new_episode(
                carry, c["next_observations"][rows[:, -1]].numpy(), [point_robot.LIMIT] * len(tasks)
            )
        return carry


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--targets", type=float, nargs="+", default=[-3.0, -6.0, -10.0])
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--episodes", type=int, default=4)
    args = parser.parse_args()
    data = assemble(point_robot.generate(5, args.tasks, SHOWN, first=FIRST))
    of_task = data.raw_returns.reshape(args.tasks, SHOWN)
    print(f"what is shown: mean return {of_task.mean():.2f}, of the best of {SHOWN} {of_task.max(1).values.mean():.2f}")
    task = point_robot.TASK
    with Arena(task, range(FIRST, FIRST + args.tasks)) as arena:
        for where in args.runs:
            run = Run(where)
            for target in args.targets:
                policy = run.policy().with_target_return(target)
                learners = {"alone": Trained(policy, explore=False)}
                if getattr(policy.algorithm.config, "prompt", 0):
                    learners["shown"] = Shown(policy, data)
                for name, learner in learners.items():
                    returns = arena.play(learner, args.episodes).returns().mean(0)
                    print(
                        f"{run.algorithm} asked for {target:g}, {name}: {'  '.join(f'{r:.2f}' for r in returns)}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
