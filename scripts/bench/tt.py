"""The Trajectory Transformer's parts: what its tokens lose, what keys that are kept save, what beam search finds.

    offrl train algo=tt dataset=pendulum_v1.1.0.h5 experiment=none seeds=1 steps=3000 name=tt-pendulum \\
        compile=compiled eval.env=none algo.width=64 algo.layers=2 algo.heads=2 algo.batch_size=64 \\
        algo.learning_rate=1e-3 algo.dropout=0 algo.warmup_steps=100 algo.decay_steps=3000 algo.plan_horizon=10
    python scripts/bench/tt.py --run runs/tt-pendulum --env Pendulum-v1 --data FILE ... \\
        --out docs/benchmarks/trajectory-transformer.md

Tokens: the root mean square of (what comes back - number), by the standard deviation of the dimension, averaged over
dimensions. "Published" is the authors' rule: thresholds at every ceil(R/N)-th of the sorted samples and the largest, a
bin stands for the middle between two. Time: seconds of CPU for a plan, on one thread, median of interleaved rounds;
"anew" computes all keys for each token. Plans: from the same prefixes of the data and the same starts of episodes;
earned is what the environment paid in whole episodes.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import gymnasium as gym  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from offrl import registry, rng  # noqa: E402
from offrl.algorithms.tt.beam_search import Plans, beam_search  # noqa: E402
from offrl.algorithms.tt.discretizer import decode, encode  # noqa: E402
from offrl.api import Run  # noqa: E402
from offrl.data import load_dataset  # noqa: E402
from offrl.data.dataset import Dataset  # noqa: E402
from offrl.evaluation.policy import TrainedPolicy  # noqa: E402
from offrl.settings.dataset import DatasetConfig  # noqa: E402
from offrl.statistics.intervals import mean_interval  # noqa: E402
from offrl.system import backend  # noqa: E402
from offrl.tasks.episodes import observe_reward, reset_seed  # noqa: E402

BINS = 100


# ---- what tokens lose


def published(column: np.ndarray) -> np.ndarray:
    """The values that the authors' tokens decode to."""
    thresholds = np.append(np.sort(column)[:: -(-len(column) // BINS)], column.max())
    token = np.clip(np.searchsorted(thresholds, column, side="right") - 1, 0, len(thresholds) - 2)
    return 0.5 * (thresholds[token] + thresholds[token + 1])


def ours(column: np.ndarray, fitted: Any, alone: tuple[float, ...]) -> np.ndarray:
    bins = fitted(column, alone)
    return decode(encode(torch.from_numpy(column).unsqueeze(-1), bins.edges), bins.values).squeeze(-1).numpy()


def round_trip(name: str) -> list[str]:
    """Rows of a table for a file."""
    dataset: Dataset = load_dataset(DatasetConfig(name=name))
    kind = registry.get("algo", "tt")
    ends = bool(dataset.columns["terminations"].any())
    rule = {"terminal_reward": -100.0} if ends else {}
    alone = (-100.0,) if ends else ()
    rows = []
    variants = {"ours": {}, "ours, mean": {"bin_value": "mean"}, "uniform": {"discretizer": "uniform"}}
    samplers = {
        n: kind(kind.fit_config(kind.Config(**rule, **v), dataset), dataset.spec).sampler() for n, v in variants.items()
    }
    rewards, values = samplers["ours"].targets(dataset)
    observations, actions = samplers["ours"].columns(dataset, torch.arange(len(dataset)))
    groups = {"observations": observations, "actions": actions, "rewards": rewards[:, None], "values": values[:, None]}
    for group, columns in groups.items():
        errors: dict[str, list[float]] = {n: [] for n in ("published", *samplers)}
        for column in columns.T.numpy():
            column = np.ascontiguousarray(column)
            special = alone if group in ("rewards", "values") else ()
            reconstructions = {
                "published": published(column),
                **{n: ours(column, s.bins_of, special) for n, s in samplers.items()},
            }
            for n, x in reconstructions.items():
                errors[n].append(float(np.sqrt(np.square(x - column).mean()) / max(float(column.std()), 1e-12)))
        rows.append(
            f"| {Path(name).stem} | {group} | "
            + " | ".join(f"{100 * np.mean(e):.2f} %" for e in errors.values())
            + " |"
        )
    if ends:
        column, where = rewards.numpy(), np.flatnonzero(rewards.numpy() == -100.0)[:1]
        back = [
            published(column)[where][0],
            *(float(ours(column, s.bins_of, alone)[where][0]) for s in samplers.values()),
        ]
        rows.append(
            f"| {Path(name).stem} | a fall's -100 comes back as | " + " | ".join(f"{x:.1f}" for x in back) + " |"
        )
    return rows


# ---- plans


def changed(policy: TrainedPolicy, **settings: Any) -> TrainedPolicy:
    """The policy with other settings of its planner."""
    config = dataclasses.replace(policy.algorithm.config, **settings)
    return TrainedPolicy(type(policy.algorithm)(config, policy.algorithm.spec), policy.state, policy.seed)


def anew(policy: TrainedPolicy, prefix: Tensor, key: Tensor) -> Plans:
    """Plans without keys that are kept."""
    actor: Any = policy.actor

    def decoder(tokens: Tensor, past: Any) -> tuple[Tensor, Any]:
        tokens = tokens if past is None else torch.cat([past, tokens], -1)
        return actor.apply("trajectory", tokens)[:, -1], tokens

    values = actor.bins.values[-2], actor.bins.values[-1]
    return beam_search(decoder, prefix, actor.sizes, values, actor.bins.occupied, actor.search, key)


def kept(policy: TrainedPolicy, prefix: Tensor, key: Tensor) -> Plans:
    actor: Any = policy.actor
    return actor.plan(prefix, key)


def prefixes(policy: TrainedPolicy, dataset: Dataset, count: int) -> Tensor:
    """Beginnings of plans: whole steps and an observation, from the data."""
    algorithm: Any = policy.algorithm
    actor: Any = policy.actor
    sampler = algorithm.sampler()
    source, steps = sampler.prepare(dataset), actor.search.context - 1
    batch = sampler(source, rng.make_key(5), 8 * count)
    inside = (batch["tokens"] < algorithm.config.bins).all(-1)
    return batch["tokens"][inside][:count, : steps * algorithm.dims + algorithm.sizes[0]]


def timing(policy: TrainedPolicy, dataset: Dataset, widths: list[int], rounds: int) -> list[str]:
    rows = []
    actor: Any = policy.actor
    context = policy.algorithm.config.context
    for width, episodes in [(w, e) for w in widths for e in (1, 10)]:
        short, long = (changed(policy, beam_width=width, plan_max_length=n) for n in (actor.search.context, context))
        prefix, key = prefixes(policy, dataset, episodes), rng.make_key(0)
        cases = {
            name: partial(run, p, prefix, key)
            for name, run, p in (("anew", anew, short), ("kept", kept, short), ("longer", kept, long))
        }
        times: dict[str, list[float]] = {n: [] for n in cases}
        plans = {}
        for _ in range(rounds):
            for n, run in cases.items():
                begin = time.process_time()
                plans[n] = run()
                times[n].append(time.process_time() - begin)
        # a token on the edge of the filter may differ
        same = (plans["anew"].actions[:, 0] == plans["kept"].actions[:, 0]).flatten(1).all(1)
        scores = torch.stack([plans[n].score[:, 0] for n in ("anew", "kept")])[:, same]
        worst = float(((scores[0] - scores[1]) / scores[0]).abs().amax())
        t = {n: statistics.median(x) for n, x in times.items()}
        ratio, more = (
            statistics.median(a / b for a, b in zip(times["anew"], times[n], strict=True)) for n in ("kept", "longer")
        )
        measured = f"{t['anew']:.2f} s | {t['kept']:.2f} s | {ratio:.1f} | {t['longer']:.2f} s | {more:.1f}"
        rows.append(f"| {width} | {episodes} | {measured} | {int(same.sum())} of {episodes} | {worst:.0e} |")
    return rows


def play(policy: TrainedPolicy, env_id: str, episodes: int) -> tuple[np.ndarray, float]:
    """(returns [E], seconds of CPU for a step of all) of whole episodes with the same starts for every policy."""
    envs = [gym.make(env_id) for _ in range(episodes)]
    rows = np.stack([env.reset(seed=reset_seed(0, policy.seed, e))[0] for e, env in enumerate(envs)])
    returns, alive, carry, t, begin = (
        np.zeros(episodes),
        np.ones(episodes, bool),
        policy.start(episodes),
        0,
        time.process_time(),
    )
    while alive.any():
        actions, carry = policy.step(carry, rows, t)
        rewards = np.zeros(episodes)
        for e in np.flatnonzero(alive):
            rows[e], rewards[e], over, cut, _ = envs[e].step(actions[e])
            alive[e] = not (over or cut)
        returns, carry, t = returns + rewards, observe_reward(policy, carry, rewards), t + 1
    return returns, (time.process_time() - begin) / t


def comparison(policy: TrainedPolicy, dataset: Dataset, env_id: str, episodes: int, widths: list[int]) -> list[str]:
    greedy = {"beam_width": 1, "beam_expand": 1, "action_top_k": 1}
    cases = {
        "the most probable actions": greedy,
        "one sample": {"beam_width": 1, "beam_expand": 1},
        "1 beam of 2": {"beam_width": 1},
    }
    cases |= {f"{w} beams of 2": {"beam_width": w} for w in widths}
    rows, first = [], None
    prefix = prefixes(policy, dataset, 100)
    for name, settings in cases.items():
        one = changed(policy, **settings)
        promised = kept(one, prefix, rng.make_key(1)).score[:, 0].numpy()
        returns, seconds = play(one, env_id, episodes)
        first = first or (promised, returns)
        more = [mean_interval(x - x0) for x, x0 in zip((promised, returns), first, strict=True)]
        shown = [f"{m:.1f} ({low:.1f} to {high:.1f})" if rows else "" for m, low, high in more]
        rows.append(
            f"| {name} | {promised.mean():.1f} | {shown[0]} | {returns.mean():.0f} | {shown[1]} | {1000 * seconds:.0f} "
            "ms |"
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run of algo=tt; none: tokens only")
    parser.add_argument(
        "--data",
        nargs="+",
        required=True,
        help="datasets whose numbers become tokens; the run has learnt from the first",
    )
    parser.add_argument("--env", default="Pendulum-v1")
    parser.add_argument("--episodes", type=int, default=10)
    parser.add_argument("--widths", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--timed", type=int, nargs="*", default=[8, 32], help="beams for the times")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="a Markdown file")
    args = parser.parse_args()
    text = [
        "# Trajectory Transformer: tokens, keys that are kept, plans",
        "",
        "`python scripts/bench/tt.py`; its first lines say how.",
        "",
    ]
    text += ["## What tokens lose", "", f"{BINS} tokens of each number.", ""]
    text += [
        "| data | | published rule | ours | ours, bins stand for means | bins of equal width |",
        "|---|---|---|---|---|---|",
    ]
    for name in args.data:
        text += round_trip(name)
    if args.run:
        arithmetic = backend.configure(torch.device("cpu"), 1, "float32")
        run = Run(args.run)
        policy = run.policy(run.seeds[0])
        c = policy.algorithm.config
        dataset = load_dataset(DatasetConfig(name=args.data[0]))
        size = (
            f"{c.layers} layers of width {c.width}, {policy.algorithm.dims} tokens a step, plans of {c.plan_horizon} "
            "steps"
        )
        with torch.no_grad():
            times = timing(policy, dataset, args.timed, args.rounds)
            print("\n".join(times), flush=True)
            plans = comparison(policy, dataset, args.env, args.episodes, args.widths)
        text += ["", "## A plan with keys that are kept", "", f"{arithmetic}; torch {torch.__version__}; {size}."]
        text += ["Windows of at most 5 steps as published, and of at most as many as were trained.", ""]
        text += ["| beams | episodes | anew | kept | times as fast | kept, longer windows | times as fast "]
        text[-1] += "| same best plan, anew and kept | whose scores differ by |"
        text += ["|---|---|---|---|---|---|---|---|---|", *times]
        text += [
            "",
            "## Beam search against one plan",
            "",
            f"{dataset.spec.name}, {int(policy.state.step):,} updates, {args.env}, ",
        ]
        text[-1] += (
            f"{args.episodes} episodes. Promised: the discounted return that the model expects, mean of 100 prefixes "
            "from the data. "
        )
        text[-1] += (
            "Differences are of the same prefixes and of the same starts, with 95% intervals that are not corrected "
            "for how many plans are compared."
        )
        text += ["", "| plan | promised | more than the first | earned | more than the first | CPU for a step of all |"]
        text += ["|---|---|---|---|---|---|", *plans]
    if args.out:
        Path(args.out).write_text("\n".join(text) + "\n")
    else:
        print("\n".join(text))


if __name__ == "__main__":
    main()
