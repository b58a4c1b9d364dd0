"""The cost of a world model: its training against a loop over members, and rollouts for one replica and for several
that share it.

    python scripts/bench/world_model.py --out docs/benchmarks/world-models-speed.md     # about 5 minutes
    python scripts/bench/world_model.py --rollouts 2000 --rounds 1 --updates 5 --mode eager      # shows that it works

Training: one update of every member, of the same networks on the same rows with the same loss and Adam. The loop is
what one writes first: a module and a torch.optim.Adam for each member, one after the other; once with the library of
products that offrl picks on this CPU, and once with the one that torch picks. Rollouts: `--rollouts` x `--horizon`
steps, with the uncertainty that MOPO asks for (every member predicts) and without (one elite for each row). Rounds are
interleaved, and ratios are taken within a round."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.func import vmap  # noqa: E402

from offrl import rng  # noqa: E402
from offrl.data import load_dataset  # noqa: E402
from offrl.settings.replicas import Replica  # noqa: E402
from offrl.system import backend, devices  # noqa: E402
from offrl.system.devices import pick_device  # noqa: E402
from offrl.training.engine import first_state  # noqa: E402
from offrl.training.step import Step  # noqa: E402
from offrl.world_models import ensemble  # noqa: E402
from offrl.world_models.dynamics import Dynamics, DynamicsSettings, data_range  # noqa: E402
from offrl.world_models.rollout import branched  # noqa: E402
from offrl.world_models.uncertainty import measure  # noqa: E402


class Loop:
    """Members one after the other."""

    def __init__(self, algorithm: Dynamics, source: Any, device: torch.device) -> None:
        c, width = algorithm.config, algorithm.model.in_dim
        self.source, self.batch_size, self.decay = source, c.batch_size, algorithm.decay
        self.members = [
            ensemble.GaussianEnsemble(1, width, algorithm.model.out_dim, c.hidden, activation=c.activation).to(device)
            for _ in range(c.members)
        ]
        self.optimisers = [torch.optim.Adam(m.parameters(), lr=c.learning_rate) for m in self.members]

    def update(self) -> None:
        source = self.source
        for member, optimiser in zip(self.members, self.optimisers, strict=True):
            rows = torch.randint(source.count, (self.batch_size,), device=source.mean.device)
            batch = source.table.take(rows)
            raw = member((batch["inputs"] - source.mean) / source.std)
            params = dict(member.named_parameters())
            loss = ensemble.gaussian_loss(raw.mean, raw.log_var, batch["targets"]).sum()
            loss = loss + ensemble.weight_decay(params, self.decay) + 0.01 * ensemble.bounds_loss(params)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            optimiser.step()


def seconds(run: Callable[[], Any], device: torch.device) -> float:
    """The seconds of one call."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def trainers(
    dataset: Any, device: torch.device, members: int, hidden: list[int], updates: int, mode: str
) -> tuple[dict[str, Callable[[], None]], Dynamics, Any, Any]:
    """By name, what makes so many updates of every member; and the algorithm, its rows and its first state."""
    config = Dynamics.fit_config(DynamicsSettings(members=members, hidden=hidden), dataset)
    algorithm = Dynamics(config, dataset.spec)
    source = algorithm.sampler().prepare(dataset.to(device))
    state = first_state(algorithm, [Replica(0)])
    state = torch.utils._pytree.tree_map(lambda x: x.to(device), state)
    step = Step(algorithm, source, batch_size=config.batch_size, replicas=1, mode=mode)
    held = {"state": state, "sums": {}, "at": 0}
    loop = Loop(algorithm, source, device)

    def ours() -> None:
        held["state"], held["sums"] = step.run(held["state"], held["sums"], held["at"], updates)
        held["at"] += updates

    def theirs() -> None:
        for _ in range(updates):
            loop.update()

    def plainly() -> None:
        with devices.routed(devices.DEFAULT):
            theirs()

    size = " x ".join(map(str, hidden))
    named = {
        "all members at once": ours,
        "a loop over members": theirs,
        "a loop over members, torch's products": plainly,
    }
    return {f"update of {size}, {name}": run for name, run in named.items()}, algorithm, source, state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="builtin")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--mode", default="compiled", choices=("eager", "compiled", "cudagraph", "compiled-cudagraph"))
    parser.add_argument("--members", type=int, default=7)
    parser.add_argument("--hidden", type=int, nargs="+", default=[200, 200, 200, 200])
    parser.add_argument("--small", type=int, nargs="+", default=[128, 128, 128], help="another size, trained only")
    parser.add_argument("--replicas", type=int, default=8, help="that share the model in rollouts")
    parser.add_argument("--rollouts", type=int, default=50_000)
    parser.add_argument("--horizon", type=int, default=5)
    parser.add_argument("--updates", type=int, default=100, help="of each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = pick_device(args.device)
    words = backend.configure(device, 1, "float32")
    dataset = load_dataset(args.dataset)
    parts: dict[str, Callable[[], None]] = {}
    for hidden in (args.small, args.hidden):  # rollouts are of the last
        trainer, algorithm, source, state = trainers(dataset, device, args.members, hidden, args.updates, args.mode)
        parts = trainer | parts
    config = algorithm.config
    model = algorithm.model
    tree = {k: torch.as_tensor(v).to(device) for k, v in data_range(dataset).items()}
    tree |= {"params": {k: v[0] for k, v in state.params["dynamics"].items()}, "mean": source.mean, "std": source.std}
    tree |= {"elites": torch.arange(config.elites, device=device), "scale": torch.ones(model.out_dim, device=device)}
    observations = dataset.columns["observations"].to(device)
    weight = torch.randn(args.replicas, dataset.spec.observation_dim, dataset.spec.action_dim, device=device)

    def roll(replicas: int, uncertain: bool) -> Callable[[], None]:
        keys = torch.stack([rng.make_key(i) for i in range(replicas)]).to(device)
        what = measure("aleatoric") if uncertain else None

        def one(key: torch.Tensor, actor: torch.Tensor) -> torch.Tensor:
            rows = rng.randint(key, (args.rollouts,), len(observations))
            start = observations[rows]
            act = lambda o, past, k: (o @ actor).tanh()  # noqa: E731
            return branched(
                model, tree, act, start, model.first_past(start), args.horizon, key, measure=what
            ).rewards.mean()

        def run() -> None:
            with torch.no_grad():
                if device.type == "cpu":  # one after the other, as `offrl.training.step` has them there
                    for n in range(replicas):
                        one(keys[n], weight[n])
                else:
                    vmap(one)(keys, weight[:replicas])

        return run

    updates = list(parts)
    parts |= {
        "rollouts, every member": roll(1, True),
        "rollouts, one elite for each row": roll(1, False),
        f"rollouts, every member, {args.replicas} replicas": roll(args.replicas, True),
        f"rollouts, one elite for each row, {args.replicas} replicas": roll(args.replicas, False),
    }
    times: dict[str, list[float]] = {name: [] for name in parts}
    for name in updates:
        parts[name]()  # compiles
    for turn in range(args.rounds):
        for name, run in parts.items():
            if turn == 0 or "replicas" not in name:  # those take minutes on a CPU
                times[name].append(seconds(run, device))
    middle = {name: statistics.median(t) for name, t in times.items()}
    sizes = [" x ".join(map(str, hidden)) for hidden in (args.hidden, args.small)]
    lines = [
        f"{words}, torch {torch.__version__}, {args.mode}; {args.members} members, batches of {config.batch_size}; "
        f"{dataset.spec.name}. Rollouts are of the larger model. Medians of {args.rounds} interleaved rounds; several "
        "replicas once.",
        "",
        "| what | time | per second |",
        "|---|---|---|",
    ]
    for name in parts:
        if name in updates:
            lines.append(
                f"| {name} | {1e3 * middle[name] / args.updates:.1f} ms | {args.updates / middle[name]:.0f} updates |"
            )
        else:
            count = args.rollouts * args.horizon * (args.replicas if "replicas" in name else 1)
            lines.append(
                f"| {name} ({args.rollouts:,} x {args.horizon}) | {middle[name]:.2f} s | {count / middle[name]:,.0f} "
                "transitions |"
            )
    for size, (rate, *loops) in zip(sizes, (updates[:3], updates[3:]), strict=True):
        ratio, plain = (
            statistics.median(b / a for a, b in zip(times[rate], times[loop], strict=True)) for loop in loops
        )
        lines += [
            "",
            f"{size}: all members at once are {ratio:.1f} times as fast as the loop, and {plain:.1f} times with "
            "torch's products.",
        ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        header = (
            "# Cost of a world model\n\n`python scripts/bench/world_model.py --out "
            "docs/benchmarks/world-models-speed.md`\n\n"
        )
        args.out.write_text(header + text, encoding="utf-8")


if __name__ == "__main__":
    main()
