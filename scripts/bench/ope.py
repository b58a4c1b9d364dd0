"""Off-policy evaluation against true returns: TRPO histories and offrl's own runs on replay data, and what many
candidates cost.

python scripts/bench/ope.py --runs RUNS --cache FOLDER            # truth, estimates, table; an hour on one core
python scripts/bench/ope.py --cache FOLDER --stage timing         # 16 candidates beside one, interleaved; two minutes
python scripts/bench/ope.py --cache FOLDER --stage table          # what is in the cache
python scripts/bench/ope.py --cache FOLDER --world-model hopper=RUN halfcheetah=RUN --method model       # rollouts in
learned models too

Candidates: 16 of the 26 snapshots of each TRPO history, evenly spaced over its iterations, as greedy policies; and with
--runs the final greedy policies of offrl's own td3_bc and iql runs on the same data (directories ALGORITHM-DATASET).
Everything is kept in --cache."""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gymnasium as gym  # noqa: E402
import h5py  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from offrl import ope  # noqa: E402
from offrl.data import load_dataset  # noqa: E402
from offrl.ope.candidates import find_runs, run_candidates  # noqa: E402
from offrl.ope.fqe import FQE, Scale, standardised  # noqa: E402
from offrl.ope.metrics import regret, spearman  # noqa: E402
from offrl.ope.problem import Problem, make_problem  # noqa: E402
from offrl.settings.replicas import Replica  # noqa: E402
from offrl.system import backend  # noqa: E402
from offrl.tasks.episodes import observe_reward  # noqa: E402
from offrl.training.engine import LocalEngine, Plan, first_state  # noqa: E402

METHODS = ("fqe", "wis", "dr", "model", "own_q")  # columns of the table
ROBOTS = {"hopper": ("Hopper-v4", "log_Hopper-v1_4.h5"), "halfcheetah": ("HalfCheetah-v4", "log_HalfCheetah-v1_2.h5")}
SNAPSHOTS, DISCOUNT = 16, 0.99
MODEL = ("rollouts", "propagation", "noise", "horizon")  # settings of method=model
STEP = 0.015  # share of the largest true value by which "distinct" candidates differ at least


class Trpo:
    """One snapshot of a TRPO history (OpenAI's imitation repository), as a policy; greedy unless `explore`."""

    def __init__(self, group: Any) -> None:
        self.mean, self.std = 0.0, 1.0
        if "Standardizer" in group["obsnorm"]:
            self.mean = group["obsnorm/Standardizer/mean_1_D"][:]
            self.std = np.sqrt(np.maximum(0, group["obsnorm/Standardizer/meansq_1_D"][:] - self.mean**2))
        net = group["hidden/FeedforwardNet"]
        self.layers = [
            (net[k]["AffineLayer/W"][:], net[k]["AffineLayer/b"][:]) for k in sorted(net) if "AffineLayer" in net[k]
        ]
        self.w, self.b, self.log_std = (
            group["out/AffineLayer/W"][:],
            group["out/AffineLayer/b"][:],
            group["logstdevs_1_Da"][:][0],
        )

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, None]:
        x = (observations - self.mean) / (self.std + 1e-6)
        for w, b in self.layers:
            x = np.tanh(x @ w + b)
        actions = x @ self.w + self.b
        if explore:
            actions = actions + np.exp(self.log_std) * np.random.default_rng(t).standard_normal(actions.shape)
        return np.clip(actions, -1.0, 1.0), None


def snapshots(robot: str, data: Path) -> dict[str, Trpo]:
    with h5py.File(data / "policies" / ROBOTS[robot][1]) as file:
        names = sorted(file["snapshots"])
        chosen = [names[round(i)] for i in np.linspace(0, len(names) - 1, SNAPSHOTS)]
        return {name: Trpo(file["snapshots"][name]["GaussianPolicy"]) for name in chosen}


def candidates(robot: str, data: Path, runs: Path | None) -> dict[str, Any]:
    result: dict[str, Any] = dict(snapshots(robot, data))
    for algorithm in ("td3_bc", "iql") if runs else ():
        (run,) = find_runs([runs / f"{algorithm}-{robot}_medium_replay"])
        policies = run_candidates(run)
        last = max(int(name.rpartition("@")[2]) for name in policies)
        result |= {name: policy for name, policy in policies.items() if name.endswith(f"@{last}")}
    return result


def play(env_id: str, policy: Any, episodes: int) -> tuple[float, float]:
    """Mean return and mean discounted return of the greedy policy over episodes of up to 1,000 steps, side by side."""
    envs = [gym.make(env_id).unwrapped for _ in range(episodes)]
    observations = np.stack([env.reset(seed=1_000 + i)[0] for i, env in enumerate(envs)])
    alive, returns, discounted = np.ones(episodes, bool), np.zeros(episodes), np.zeros(episodes)
    carry = policy.start(episodes)
    for t in range(1_000):
        actions, carry = policy.step(carry, observations, t)
        rewards = np.zeros(episodes)
        for i in np.flatnonzero(alive):
            observations[i], rewards[i], over, _, _ = envs[i].step(actions[i])
            alive[i] = not over
        returns += rewards
        discounted += DISCOUNT**t * rewards
        carry = observe_reward(policy, carry, rewards)
        if not alive.any():
            break
    return float(returns.mean()), float(discounted.mean())


def truth(robot: str, args: argparse.Namespace) -> None:
    """Play what is not in the cache yet: `returns-ROBOT.csv`, which `offrl select returns=` reads as well."""
    path = args.cache / f"returns-{robot}.csv"
    known = {r["candidate"]: r for r in csv.DictReader(path.open())} if path.exists() else {}
    for name, policy in candidates(robot, args.data, args.runs).items():
        if name not in known:
            returns, discounted = play(ROBOTS[robot][0], policy, args.episodes)
            known[name] = {"candidate": name, "return": returns, "discounted": discounted}
            print(f"{robot} {name}: return {returns:.1f}, discounted {discounted:.1f}", flush=True)
            with path.open("w", newline="") as file:
                out = csv.DictWriter(file, ["candidate", "return", "discounted"])
                out.writeheader()
                out.writerows(known.values())


def estimate(robot: str, args: argparse.Namespace) -> None:
    """All methods on all candidates: `estimates-ROBOT.csv`, of one method alone `estimates-ROBOT-METHOD.csv`."""
    shown = [time.monotonic()]

    def stage(title: str, total: int) -> Any:
        print(f"{robot}: {title}, {total:,} updates", flush=True)

        def progress(step: int, rate: float) -> None:
            if time.monotonic() - shown[0] > 60.0:
                shown[0] = time.monotonic()
                print(f"{robot}: update {step:,}, {rate:.0f} a second", flush=True)

        return progress

    dataset = load_dataset(str(args.data / "d4rl" / f"{robot}_medium_replay.hdf5"))
    given: dict[str, Any] = {
        "updates": args.updates,
        "seeds": args.seeds,
        "networks": args.networks,
        "schedule": args.schedule,
    }
    given |= {"rollouts": args.rollouts, "propagation": args.propagation, "noise": not args.no_noise, "horizon": 1_000}
    models = dict(text.partition("=")[::2] for text in args.world_model)
    settings = ope.OPEConfig(**given, layer_norm=not args.no_layer_norm, world_model=models.get(robot, ""))
    method = args.method if args.networks == "shared" else "fqe"
    began = time.process_time()
    result = ope.evaluate_policies(
        dataset, candidates(robot, args.data, args.runs), method, settings, stage=stage, tell=print
    )
    suffix = "" if method == "all" else "-separate" if args.networks == "separate" else f"-{method}"
    result.write(args.cache / f"estimates-{robot}{suffix}.csv")
    about = {name: given[name] for name in (MODEL if method == "model" else ("updates", "seeds"))}
    about |= {"cpu_seconds": round(time.process_time() - began), "behavior": result.behavior}
    (args.cache / f"estimates-{robot}{suffix}.json").write_text(json.dumps(about))


def distinct(values: dict[str, float]) -> list[str]:
    """Names from the largest true value down, each at least STEP times the largest below the one kept before."""
    kept: list[str] = []
    for name in sorted(values, key=lambda n: -values[n]):
        if not kept or values[kept[-1]] - values[name] >= STEP * max(values.values()):
            kept.append(name)
    return kept


def table(args: argparse.Namespace) -> None:
    for robot in args.robots:
        known = {
            r["candidate"]: float(r["discounted"]) for r in csv.DictReader((args.cache / f"returns-{robot}.csv").open())
        }
        for suffix in ("", "-separate", *(f"-{m}" for m in METHODS)):
            path = args.cache / f"estimates-{robot}{suffix}.csv"
            if not path.exists():
                continue
            rows = {r["candidate"]: r for r in csv.DictReader(path.open())}
            about = json.loads(path.with_suffix(".json").read_text())
            trpo = {n: known[n] for n in rows if n.startswith("iter")}
            own = {n: known[n] for n in rows if n not in trpo}
            methods = [m for m in METHODS if any(r.get(m) for r in rows.values())]
            print(
                f"\n### {robot}{suffix}: {about}\n\n| candidate | truth | {' | '.join(methods)} "
                f"|\n|---|---|{'---|' * len(methods)}"
            )
            for name in sorted(rows, key=lambda n: -known[n]):
                cells = [f"{float(rows[name][m]):.1f}" if rows[name].get(m) else "" for m in methods]
                print(f"| {name} | {known[name]:.1f} | {' | '.join(cells)} |")
            groups = {f"{len(trpo)} TRPO": list(trpo), f"{len(distinct(trpo))} TRPO, distinct": distinct(trpo)}
            groups |= {f"{len(own)} td3_bc and iql": list(own), f"all {len(rows)}": list(rows)} if own else {}
            print(
                "\n| candidates | method | Spearman | regret@1 | regret@5 | mean absolute error "
                "|\n|---|---|---|---|---|---|"
            )
            for title, names in groups.items():
                for method in methods:
                    if all(rows[n].get(method) for n in names):
                        v, e = np.array([known[n] for n in names]), np.array([float(rows[n][method]) for n in names])
                        numbers = (
                            f"{spearman(v, e):.2f} | {regret(v, e, 1):.2f} | {regret(v, e, 5):.2f} | "
                            f"{np.abs(v - e).mean():.1f}"
                        )
                        print(f"| {title} | {method} | {numbers} |")


def timing(args: argparse.Namespace) -> None:
    """CPU time of an update for one candidate and for 16, taken in turns."""
    for robot in args.robots:
        dataset = load_dataset(str(args.data / "d4rl" / f"{robot}_medium_replay.hdf5"))
        problem = make_problem(dataset, snapshots(robot, args.data))

        def engine(count: int, networks: str, problem: Problem = problem) -> LocalEngine:
            part = Problem(
                problem.names[:count], problem.policies[:count], problem.dataset, False, problem.actions[:count]
            )
            scale = Scale.of(part.dataset, DISCOUNT)
            algorithm = FQE(ope.FQEConfig(seeds=1, networks=networks), part.dataset, scale, count)
            source = algorithm.sampler().prepare(standardised(part, scale))
            made = LocalEngine(
                Plan(algorithm, 256, "compiled", "float32", 1), source, [Replica(0)], torch.device("cpu")
            )
            state = first_state(algorithm, [Replica(0)])
            made.load(state, state, {})
            made.run(0, 3)
            return made

        cases = {"1": engine(1, "shared"), "16, shared": engine(16, "shared"), "16, separate": engine(16, "separate")}
        times: dict[str, list[float]] = {name: [] for name in cases}
        for _ in range(args.turns):
            for name, made in cases.items():
                updates = 15 if "separate" in name else 100
                began = time.process_time()
                made.run(0, updates)
                times[name].append((time.process_time() - began) / updates)
        for name, taken in times.items():
            ratio = statistics.median(a / b for a, b in zip(taken, times["1"], strict=True))
            print(
                f"{robot}, {name} candidates: {1e3 * statistics.median(taken):.2f} ms an update, {ratio:.2f} times one",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument(
        "--runs", type=Path, help="folder of offrl's runs td3_bc-ROBOT_medium_replay and iql-ROBOT_medium_replay"
    )
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--stage", default="all", choices=("truth", "estimate", "table", "timing", "all"))
    parser.add_argument("--robots", nargs="*", default=list(ROBOTS), choices=list(ROBOTS))
    parser.add_argument("--networks", default="shared", choices=("shared", "separate"))
    parser.add_argument("--no-layer-norm", action="store_true")
    parser.add_argument("--schedule", default="cosine", choices=("cosine", "constant"))
    parser.add_argument("--updates", type=int, default=ope.OPEConfig().updates)
    parser.add_argument("--seeds", type=int, default=ope.OPEConfig().seeds)
    parser.add_argument("--method", default="all", choices=("all", "fqe", "wis", "dr", "model"))
    parser.add_argument(
        "--world-model",
        nargs="*",
        default=[],
        metavar="ROBOT=RUN",
        help="method=model; without one it is trained first",
    )
    parser.add_argument("--rollouts", type=int, default=ope.OPEConfig().rollouts)
    parser.add_argument("--propagation", default="tsinf", choices=("tsinf", "ts1"))
    parser.add_argument("--no-noise", action="store_true")
    parser.add_argument("--episodes", type=int, default=24)
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    args.cache.mkdir(parents=True, exist_ok=True)
    print(backend.configure(torch.device("cpu"), 1))
    backend.cache_compiled()
    for robot in args.robots:
        if args.stage in ("truth", "all"):
            truth(robot, args)
        if args.stage in ("estimate", "all"):
            estimate(robot, args)
    if args.stage in ("table", "all"):
        table(args)
    if args.stage in ("timing", "all"):
        timing(args)


if __name__ == "__main__":
    main()
