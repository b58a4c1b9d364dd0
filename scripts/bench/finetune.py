"""Curves of fine-tuning on Pendulum-v1: IQL, TD3+BC, Cal-QL from medium-replay data, SAC from scratch with and without
it, SB3's SAC; and, without data, MBPO, DSAC-T and MR.Q beside SAC.

    # the data, two minutes
    offrl collect env=Pendulum-v1 recipe=d4rl steps=10000 rows=20000 out=pendulum
    # all; several hours on one core
    python scripts/bench/finetune.py --data pendulum/pendulum-v1-medium-replay.hdf5 --out FOLDER
    # a part of it
    python scripts/bench/finetune.py ... --only iql scratch sb3 --seeds 2 --steps 5000 --updates 5000
    # what is there, again
    python scripts/bench/finetune.py --out FOLDER --stage table

Everything is kept in --out: what is there already is not run again, and a run that was stopped goes on. Writes
finetune.md and .png."""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402

import offrl  # noqa: E402
from offrl.data import load_dataset  # noqa: E402
from offrl.evaluation.evaluator import Evaluator  # noqa: E402
from offrl.figures import curves as plots  # noqa: E402
from offrl.finetuning.outcome import EARLY  # noqa: E402
from offrl.finetuning.summary import FILE, picture  # noqa: E402
from offrl.runs.log import SCORE_COLUMNS  # noqa: E402
from offrl.runs.record import SCORES  # noqa: E402
from offrl.runs.tables import interval_text  # noqa: E402
from offrl.settings.evaluation import EvalConfig  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402
from offrl.tasks.task import Task  # noqa: E402

HIDDEN = [256, 256]
SMALL = {"algo.hidden": [64, 64]}  # of the curves beside MBPO
MODEL = {
    "algo.model_hidden": [64, 64],
    "algo.members": 5,
    "algo.elites": 3,
    "algo.model_steps": 200,
    "algo.rollouts": 2_000,
    "algo.rollout_every": 1_000,  # 250 steps, at 4 updates each
}
CONSERVATIVE = {**SMALL, "algo.critics": 2, "algo.actions": 4, "algo.actor_learning_rate": 3e-4}
# name -> (algorithm, settings of it, settings of offrl finetune, the curve whose training on the data comes first, or
# None)
CURVES: dict[str, tuple[str, dict[str, Any], dict[str, Any], str | None]] = {
    "iql": ("iql", {"dataset.normalize_observations": True}, {"mixing": None}, "iql"),
    "td3_bc": ("td3_bc", {"dataset.normalize_observations": True}, {}, "td3_bc"),
    "cal_ql": ("cal_ql", {"algo.actor_learning_rate": 3e-4}, {}, "cal_ql"),
    "sac_n2_mixed": ("sac_n", {"algo.critics": 2}, {"mixing": 0.5}, None),
    "rlpd": ("rlpd", {"algo.utd_split": 1, "algo.batch_size": 256}, {"mixing": 0.5}, None),
    "scratch": ("sac_n", {"algo.critics": 2}, {"mixing": 0}, None),
    "small_iql": ("iql", {"dataset.normalize_observations": True, **SMALL}, {"mixing": None}, "small_iql"),
    "small_iql_warm": (
        "iql",
        {"dataset.normalize_observations": True, **SMALL},
        {"mixing": None, "warmup": 1_000},
        "small_iql",
    ),
    "small_iql_balanced": (
        "iql",
        {"dataset.normalize_observations": True, **SMALL},
        {"replay": "balanced"},
        "small_iql",
    ),
    "small_cal_ql": ("cal_ql", CONSERVATIVE, {}, "small_cal_ql"),
    "small_wsrl": ("wsrl", CONSERVATIVE, {"warmup": 1_000}, "small_wsrl"),
    "small_wsrl_cold": ("wsrl", CONSERVATIVE, {"warmup": 0}, "small_wsrl"),
    "small_rlpd": (
        "rlpd",
        {**SMALL, "algo.critics": 2, "algo.utd_split": 4, "algo.batch_size": 1024},
        {"mixing": 0.5},
        None,
    ),
    "small_sac": ("sac_n", {"algo.critics": 2, **SMALL}, {"mixing": 0}, None),
    "small_dsac_t": ("dsac_t", {**SMALL}, {"mixing": 0}, None),
    "small_dsac_t_rate": ("dsac_t", {**SMALL, "algo.learning_rate": 3e-4}, {"mixing": 0}, None),
    "small_mrq": (
        "mrq",
        {**SMALL, "algo.latent": 64, "algo.action_latent": 32},
        {"mixing": 0, "warmup": 256},
        None,
    ),
    "small_sac_utd4": ("sac_n", {"algo.critics": 2, **SMALL}, {"mixing": 0, "utd": 4}, None),
    "mbpo": ("mbpo", {**SMALL, **MODEL}, {"utd": 4, "warmup": 256}, None),
    "mbpo_longer": ("mbpo", {**SMALL, **MODEL, "algo.model_steps": 1_000}, {"utd": 4, "warmup": 256}, None),
    "mbpo_optimistic": ("mbpo", {**SMALL, **MODEL, "algo.candidates": 5}, {"utd": 4, "warmup": 256}, None),
    "mbpo_longer_optimistic": (
        "mbpo",
        {**SMALL, **MODEL, "algo.model_steps": 1_000, "algo.candidates": 5},
        {"utd": 4, "warmup": 256},
        None,
    ),
}
WITHOUT_DATA = (
    "small_sac",
    "small_dsac_t",
    "small_dsac_t_rate",
    "small_mrq",
    "small_sac_utd4",
    "mbpo",
    "mbpo_longer",
    "mbpo_optimistic",
    "mbpo_longer_optimistic",
)
WARMUP = 100  # steps with random actions from scratch: SB3's learning_starts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="HDF5 of the data, from offrl collect")
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs="*", default=[*CURVES, "sb3"], choices=[*CURVES, "sb3"])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10_000, help="environment steps of each seed")
    parser.add_argument("--updates", type=int, default=20_000, help="offline updates before")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--every", type=int, default=500, help="environment steps between evaluations")
    parser.add_argument("--compile", default="auto", choices=("auto", "eager", "compiled"))
    parser.add_argument("--stage", default="all", choices=("all", "table"))
    args = parser.parse_args()
    if args.stage == "all":
        if args.data is None and not set(args.only) <= set(WITHOUT_DATA):
            parser.error(
                "--data is missing: offrl collect env=Pendulum-v1 recipe=d4rl steps=10000 rows=20000 out=pendulum "
                "makes it"
            )
        for name in args.only:
            began = time.monotonic()
            if name == "sb3":
                sb3(args)
            else:
                ours(name, args)
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    table(args.out)


def ours(name: str, args: argparse.Namespace) -> None:
    """One curve of ours, in --out/NAME; offline training, where there is any, in --out/FIRST-offline."""
    algo, settings, online, first = CURVES[name]
    settings = {"algo.hidden": HIDDEN, **settings}
    common = {"runs_dir": str(args.out), "quiet": True, "device": "cpu", "compile": args.compile}
    scoring = {"eval.episodes": args.episodes, "eval.workers": 0}
    run = None
    if first is not None:
        run = offrl.train(algo, args.data, seeds=args.seeds, steps=args.updates, env=args.env, name=f"{first}-offline",
                          settings={**settings, **scoring, "eval.every": 0}, **common)  # fmt: skip
        more: dict[str, Any] = {}
    else:
        more = {**settings, "algo": algo, "seeds": args.seeds, "warmup": WARMUP, "dataset": args.data}
    tuning = {**more, **online, **scoring, "eval.every": args.every}
    offrl.finetune(run, env=args.env, steps=args.steps, settings=tuning, name=name, **common)


def sb3(args: argparse.Namespace) -> None:
    """Stable-Baselines3's SAC with its defaults, in --out/sb3."""
    import gymnasium as gym
    import torch
    from stable_baselines3 import SAC

    torch.set_num_threads(1)
    task = load_dataset(args.data).spec.task
    assert task is not None
    steps, scoring = range(0, args.steps + 1, args.every), EvalConfig(episodes=args.episodes, env=args.env)
    score_sb3(
        args.out / "sb3", args.seeds, steps, task, scoring,
        lambda seed: SAC("MlpPolicy", gym.make(args.env), seed=seed, device="cpu"),
    )  # fmt: skip


def score_sb3(
    folder: Path,
    seeds: int,
    steps: Sequence[int],
    task: Task,
    scoring: EvalConfig,
    model_of: Callable[[int], Any],
    scale: float = 1.0,
) -> None:
    """Train Stable-Baselines3's models, made by `model_of(seed)`, and score them after `steps` environment steps by our
    evaluator from the same start states: folder/scores.csv. scale: what their actions are multiplied by.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        part = folder / f"seed_{seed}.json"
        if part.exists() and json.loads(part.read_text())[-1]["step"] >= steps[-1]:
            continue
        rows: list[dict[str, Any]] = []
        model = model_of(seed)
        with Evaluator(task, scoring) as evaluator:
            for step in steps:
                if more := step - model.num_timesteps:
                    model.learn(more, reset_num_timesteps=False)
                row = evaluator([_Greedy(model, scale)], [seed]).rows()[0]
                scores = {name: row[name] for name in ("return_mean", "score")}
                identity = {"step": step, "seed": seed, "episodes": scoring.episodes, "dataset": ""}
                rows.append({**identity, **scores, **asdict(evaluator.provenance)})
        part.write_text(json.dumps(rows))
    records = [row for path in sorted(folder.glob("seed_*.json")) for row in json.loads(path.read_text())]
    with open(folder / SCORES, "w", newline="") as file:
        writer = csv.DictWriter(file, SCORE_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(records, key=lambda r: (r["step"], r["seed"])))


class _Greedy:
    """SB3's model as a policy for our evaluator."""

    def __init__(self, model: Any, scale: float) -> None:
        self.model, self.scale, self.discount = model, scale, model.gamma

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        return self.scale * self.model.predict(observations, deterministic=True)[0], None


def table(out: Path) -> None:
    """Write finetune.md and finetune.png of all curves in `out`."""
    labels = {
        "iql": "IQL",
        "td3_bc": "TD3+BC",
        "cal_ql": "Cal-QL",
        "sac_n2_mixed": "SAC + data",
        "rlpd": "RLPD",
        "scratch": "SAC",
        "small_iql": "IQL, 2 x 64",
        "small_iql_warm": "IQL, 2 x 64, after 1,000 steps",
        "small_iql_balanced": "IQL, 2 x 64, balanced replay",
        "small_cal_ql": "Cal-QL, 2 x 64",
        "small_wsrl": "WSRL, 2 x 64",
        "small_wsrl_cold": "WSRL, 2 x 64, without warm-up",
        "small_rlpd": "RLPD, 2 x 64",
        "small_sac": "SAC, 2 x 64",
        "small_dsac_t": "DSAC-T, 2 x 64",
        "small_dsac_t_rate": "DSAC-T, 2 x 64, SAC's learning rate",
        "small_mrq": "MR.Q, 2 x 64",
        "small_sac_utd4": "SAC, 2 x 64, 4 updates a step",
        "mbpo": "MBPO",
        "mbpo_longer": "MBPO, models trained longer",
        "mbpo_optimistic": "MBPO, optimistic exploration",
        "mbpo_longer_optimistic": "MBPO, models trained longer, optimistic exploration",
        "sb3": "SB3 SAC",
    }
    files = {labels[name]: out / name / SCORES for name in labels if (out / name / SCORES).exists()}
    lines = [
        "| | seeds | return at step 0 | lowest in the first tenth | at half | at the end | mean online |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, path in files.items():
        (curves,) = plots.read_curves(path, "return_mean").values()
        steps = sorted(next(iter(curves.values())))
        if len(steps) < 2 or any(sorted(c) != steps for c in curves.values()):
            continue
        half = min(steps, key=lambda s: abs(s - steps[-1] / 2))
        early = [s for s in steps if 0 < s <= EARLY * steps[-1]]

        def cell(values: list[float]) -> str:
            return interval_text(mean_interval(values), 0)

        every = list(curves.values())
        lowest = cell([min(c[s] for s in early) for c in every]) if early else ""
        online = cell([float(np.mean([v for s, v in c.items() if s])) for c in every])
        cells = [
            cell([c[0] for c in every]),
            lowest,
            cell([c[half] for c in every]),
            cell([c[steps[-1]] for c in every]),
            online,
        ]
        lines.append(f"| {label}, {steps[-1]:,} steps | {len(every)} | {' | '.join(cells)} |")
    text = "\n".join([*lines, "", *outcomes({label: path.parent for label, path in files.items()})]) + "\n"
    (out / "finetune.md").write_text(text)
    print(text)
    if files:
        picture(files, out / "finetune.png", title="Fine-tuning", column="return_mean")


def outcomes(runs: dict[str, Path]) -> list[str]:
    """A table of what finetune.json says of the runs that have one, and of how far below step 0 a score ever was."""
    names = {"offline": 1, "fall": 1, "final": 1, "gain": 1, "regret_area": 2, "regret_play": 2}  # digits
    lines = [f"| scores | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for label, folder in runs.items():
        if not (folder / FILE).exists():
            continue
        (result,) = json.loads((folder / FILE).read_text())
        if result["unit"] != "score":
            continue
        (curves,) = plots.read_curves(folder / SCORES, "score").values()
        result["fall"] = [c[0] - min(v for s, v in c.items() if s) for c in curves.values()]
        cells = [interval_text(mean_interval(result[name]), digits) for name, digits in names.items()]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return lines


if __name__ == "__main__":
    main()
