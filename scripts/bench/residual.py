"""A residual on a cloned policy: Reacher-v5 with a torque that the demonstrations lack.

python scripts/bench/residual.py --out FOLDER                      # clone, residual and ablation; ten minutes of CPU
python scripts/bench/residual.py --out FOLDER --only clone residual --steps 64000
python scripts/bench/residual.py --out FOLDER --stage table        # what is there, again

150 scripted demonstrations without the torque; a flow that clones them in chunks of 8; a residual of it that learns
with the torque, the same residual that sees no more than a chunk's first observation, and all of them without the
torque. Everything is kept in
--out: what is there is not run again, and a run that was stopped goes on. Writes residual.md and residual.png.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402

import offrl  # noqa: E402
from offrl.finetuning.summary import picture  # noqa: E402
from offrl.runs.record import SCORES  # noqa: E402
from offrl.runs.tables import interval_text  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402

# metres between fingertip and target; largest torque of either joint, in its range
TOLERANCE, PUSH, DEMONSTRATIONS = (0.02, 0.3, 150)
LINKS = 0.1, 0.11
HERE = Path(__file__).resolve()
RESIDUALS: dict[str, dict[str, Any]] = {
    "residual": {"algo.time_limits": "end"},
    "open": {"algo.time_limits": "end", "algo.look_every": 8},
    "bootstrap": {},
}


class Reacher(gym.Wrapper[Any, Any, Any, Any]):
    """Reacher-v5 that reports success within 2 cm of the target, rewards it with 1, and ends there."""

    push = 0.0

    def __init__(self) -> None:
        super().__init__(gym.make("Reacher-v5"))
        self.torque = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """An episode, with its own torque."""
        observation, info = self.env.reset(seed=seed, options=options)
        self.torque = self.unwrapped.np_random.uniform(-self.push, self.push, 2)
        return observation, info

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """A step with the torque added."""
        observation, _, terminated, truncated, info = self.env.step(np.clip(action + self.torque, -1.0, 1.0))
        success = bool(np.linalg.norm(observation[-2:]) < TOLERANCE)
        return observation, float(success), terminated or success, truncated, {**info, "success": success}


class PushedReacher(Reacher):
    """With a torque for each joint in each episode, which nothing observes."""

    push = PUSH


def controller(q: np.ndarray, speed: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Torques of the nearer inverse kinematics, with a spring and a damper on each joint: q [2], speed [2], the target
    in metres [2]."""
    cosine = np.clip((target @ target - LINKS[0] ** 2 - LINKS[1] ** 2) / (2 * LINKS[0] * LINKS[1]), -1.0, 1.0)
    ways = []
    for elbow in (np.arccos(cosine), -np.arccos(cosine)):
        shoulder = np.arctan2(target[1], target[0]) - np.arctan2(
            LINKS[1] * np.sin(elbow), LINKS[0] + LINKS[1] * np.cos(elbow)
        )
        turn = shoulder - q[0]
        ways.append(np.array([np.arctan2(np.sin(turn), np.cos(turn)), elbow - q[1]]))
    error = min(ways, key=lambda way: float(np.abs(way).max()))
    return np.clip(0.6 * error - 0.06 * speed, -1.0, 1.0).astype(np.float32)


def demonstrations() -> dict[str, np.ndarray]:
    """Columns of scripted episodes without the torque."""
    env, rows = Reacher(), []
    physics: Any = env.unwrapped
    for episode in range(DEMONSTRATIONS):
        observation, over = env.reset(seed=episode)[0], False
        while not over:
            action = controller(physics.data.qpos[:2], physics.data.qvel[:2], physics.data.qpos[2:4])
            following, reward, terminated, truncated, _ = env.step(action)
            rows.append((observation, action, reward, following, terminated, truncated and not terminated))
            observation, over = following, terminated or truncated
    names = ("observations", "actions", "rewards", "next_observations", "terminals", "timeouts")
    return {name: np.array(column, np.float32) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=["clone", "residual", "open"], choices=["clone", *RESIDUALS])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=192_000, help="environment steps of each seed")
    parser.add_argument("--updates", type=int, default=5_000, help="of the clone")
    parser.add_argument("--episodes", type=int, default=128, help="of each evaluation and seed")
    parser.add_argument("--stage", default="all", choices=("all", "table"))
    args = parser.parse_args()
    if args.stage == "all":
        data = args.out / "demonstrations.npz"
        if not data.exists():
            args.out.mkdir(parents=True, exist_ok=True)
            np.savez(data, **demonstrations())  # type: ignore[arg-type]
        for name in args.only:
            began = time.process_time()
            run(name, data, args)
            print(f"{name}: {time.process_time() - began:.0f} s of CPU", flush=True)
    table(args.out)


def run(name: str, data: Path, args: argparse.Namespace) -> None:
    """The clone, or a residual of it, in --out/NAME."""
    place: dict[str, Any] = {"runs_dir": str(args.out), "name": name, "quiet": True}
    scored = {"eval.episodes": args.episodes, "eval.workers": 0}
    if name == "clone":
        shape = {"algo.length": 8, "algo.hidden": [128, 128], "dataset.normalize_observations": True}
        scored |= {"eval.env": f"{HERE}:PushedReacher", "eval.every": 0}
        offrl.train("flow_bc", data, seeds=args.seeds, steps=args.updates, settings={**shape, **scored}, **place)
    else:
        more = {
            "algo.scale": 0.5,
            "algo.hidden": [64, 64],
            "algo.actor_learning_rate": 1e-3,
            "eval.every": 32_000,
            **RESIDUALS[name],
        }
        offrl.finetune(
            args.out / "clone",
            env=f"{HERE}:PushedReacher",
            mode="residual",
            steps=args.steps,
            settings={**more, **scored},
            **place,
        )


def table(out: Path) -> None:
    """residual.md and residual.png from the runs that are there."""
    lines = ["| | with the torque | without |", "|---|---|---|"]
    for name in ("clone", *RESIDUALS):
        if not (out / name / SCORES).exists():
            continue
        saved = offrl.Run(out / name)
        rates = [100.0 * float(row["success"]) for row in saved.final_scores]
        plain = saved.evaluate(episodes=128, env=Reacher)
        assert plain.successes is not None
        without = (100.0 * plain.successes.mean(1)).tolist()
        lines.append(f"| {name} | {interval_text(mean_interval(rates))} | {interval_text(mean_interval(without))} |")
    text = "\n".join(lines)
    print(text)
    (out / "residual.md").write_text(text + "\n")
    files = {name: out / name / SCORES for name in RESIDUALS if (out / name / SCORES).exists()}
    if files:
        picture(
            files,
            out / "residual.png",
            title="a residual on a cloned policy, Reacher-v5 with a torque",
            column="success",
        )


if __name__ == "__main__":
    main()
