"""Updates and decisions of latent models beside their authors' code: `python scripts/bench/latent_speed.py updates
--checkout FOLDER`.

FOLDER holds nicklashansen/tdmpc2 and NM512/r2dreamer (needs tensordict); without one of them its rows are left out.
Both sides run in one process of one thread on noise in Hopper's shape, with batches of offrl's sampler and equal
settings; each figure is the median over interleaved rounds of CPU seconds, so that what else the machine does counts
little. What is compiled is compiled anew, and its seconds are those of the first update, with the compiler's own.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # so that this process starts its compilers and waits for them

import torch
from image_replicas import seconds
from omegaconf import OmegaConf

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from parity.latent import Torch
from peers.checkouts import checkout_of, imported
from peers.common import ACTION, OBSERVATION
from peers.runner import Runner, make, synthetic

from offrl import rng
from offrl.actor import bind
from offrl.data.samplers.states import ARRIVAL_REWARDS, PREVIOUS_ACTIONS, in_time
from offrl.system import backend, devices

Run = Callable[[], object]
ROWS, EPISODES = 20_000, (1, 8)
REPOSITORIES = {"tdmpc2": "nicklashansen/tdmpc2", "dreamerv3": "NM512/r2dreamer"}
CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "algo"
SETTINGS = {  # over the presets'
    "tdmpc2": {"encoder_hidden": [256], "hidden": [384, 384], "latent": 128, "critics": 2, "episodic": False},
    "dreamerv3": {},
}
PRESETS = {"tdmpc2": ("tdmpc2", "tdmpc2_published"), "dreamerv3": ("rssm", "dreamerv3")}


def problem(options: argparse.Namespace) -> tuple[Any, Any]:
    """The algorithm as published and its data."""
    name, preset = PRESETS[options.model]
    settings = {**OmegaConf.load(CONFIGS / f"{preset}.yaml").algo, **SETTINGS[options.model]}
    if options.model == "dreamerv3":
        settings["length"] = options.length
    dataset = synthetic(ROWS)
    return make(name, dataset, settings), dataset


def drawn(algorithm: Any, dataset: Any, batch_size: int) -> Iterator[Any]:
    """Batches [T, B, ...] for the authors' code."""
    sampler = algorithm.sampler()
    source = sampler.prepare(dataset)
    return (in_time(sampler(source, rng.make_key(i), batch_size)) for i in itertools.count())


class TDMPC2:
    """The authors' agent of one task, of the published 1M size."""

    def __init__(self, checkout: Path, batches: Iterator[Any], compiled: bool, stack: contextlib.ExitStack) -> None:
        module = stack.enter_context(imported(checkout / "tdmpc2", "tdmpc2"))
        from common.parser import cfg_to_dataclass

        file = OmegaConf.load(checkout / "tdmpc2" / "config.yaml")
        known = {name: file[name] for name in file if not OmegaConf.is_missing(file, name)}
        sizes = {"enc_dim": 256, "mlp_dim": 384, "latent_dim": 128, "num_enc_layers": 2, "num_q": 2}
        task = {"obs_shape": {"state": [OBSERVATION]}, "action_dim": ACTION, "episode_length": 1000, "task_dim": 0}
        more = {"multitask": False, "bin_size": 0.2, "compile": compiled}
        scale = module.RunningScale.__init__.__globals__
        stay = mock.patch.object(module.WorldModel, "to", lambda model, _: model)  # all is on the CPU
        with stay, mock.patch.object(module, "torch", Torch()), mock.patch.dict(scale, torch=Torch()):
            self.agent = module.TDMPC2(cfg_to_dataclass(OmegaConf.create({**known, **sizes, **task, **more})))
        groups = (*self.agent.optim.param_groups, *self.agent.pi_optim.param_groups)
        learnt = (p for group in groups for p in group["params"] if not p.is_meta)
        self.batches, self.parameters = batches, sum(p.numel() for p in learnt)

    def update(self) -> object:
        batch = next(self.batches)
        rewards, ends = batch["rewards"][:-1, :, None], batch["is_terminal"][1:, :, None].float()
        columns = batch["observations"], batch["actions"][:-1], rewards, ends, None
        return self.agent.update(SimpleNamespace(sample=lambda: columns))

    def decide(self, observations: torch.Tensor) -> object:
        """One decision for each of some episodes [E, O]."""
        return [self.agent.act(observation, t0=True, eval_mode=True) for observation in observations]


class DreamerV3:
    """R2-Dreamer's agent with DreamerV3's loss and sizes, in float32."""

    def __init__(self, checkout: Path, batches: Iterator[Any], compiled: bool, stack: contextlib.ExitStack) -> None:
        module = stack.enter_context(imported(checkout, "dreamer", ("torch.utils.tensorboard",)))
        module.autocast = lambda **_: contextlib.nullcontext()
        module.GradScaler = lambda: torch.amp.GradScaler("cpu", enabled=False)
        keys = {"mlp_keys": ".*", "cnn_keys": "$^"}
        sizes = {"deter": 512, "hidden": 64, "discrete": 4, "units": 64, "depth": 4, "act": "SiLU", "norm": True}
        base = OmegaConf.load(checkout / "configs" / "model" / "_base_.yaml")
        flags = {"rep_loss": "dreamer", "compile": compiled}
        root = OmegaConf.create({"device": "cpu", "env": {"encoder": keys, "decoder": keys}})
        root.model = OmegaConf.merge(base, sizes, flags)
        spaces = SimpleNamespace(spaces={"state": SimpleNamespace(shape=(OBSERVATION,))})
        self.agent = module.Dreamer(root.model, spaces, SimpleNamespace(shape=(ACTION,)))
        self.batches, self.make = batches, module.TensorDict
        self.parameters = sum(p.numel() for p in self.agent._named_params.values())

    def update(self) -> object:
        columns = {name: value.transpose(0, 1) for name, value in next(self.batches).items()}
        data = {"state": columns["observations"], "action": columns[PREVIOUS_ACTIONS]}
        data |= {"reward": columns[ARRIVAL_REWARDS][..., None], "is_first": columns["is_first"]}
        data |= {name: columns[name][..., None] for name in ("is_last", "is_terminal")}
        size = columns["is_first"].shape
        state = self.agent.get_initial_state(size[0])
        sample = self.make(data, batch_size=size), None, (state["stoch"], state["deter"])
        return self.agent.update(SimpleNamespace(sample=lambda: sample, update=lambda *_: None))


AUTHORS = {"tdmpc2": TDMPC2, "dreamerv3": DreamerV3}


def with_default(run: Run) -> Run:
    """With matrix products by torch's default library, whichever offrl has picked."""

    def inner() -> None:
        switch = devices.matmul_switch()
        picked, switch.fp32_precision = switch.fp32_precision, "none"
        run()
        switch.fp32_precision = picked

    return inner


def with_compiler(run: Run) -> float:
    """CPU seconds of this process and of those that it started and that have ended."""

    def spent() -> float:
        return sum(os.times()[:4])

    start = spent()
    run()
    return spent() - start


def interleaved(runs: dict[Any, Run], rounds: int) -> dict[Any, float]:
    """Median CPU seconds of each."""
    times = [{name: seconds(run) for name, run in runs.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in times) for name in runs}


def table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    print(f"\n| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)


def updates(runners: dict[str, tuple[Run, int]], rounds: int) -> None:
    """The table of updates: each row's run is one update of so many seeds."""
    first = {name: with_compiler(run) for name, (run, _) in runners.items()}
    medians = interleaved({name: run for name, (run, _) in runners.items()}, rounds)
    rows = []
    for name, (_, seeds) in runners.items():
        time = medians[name]
        rows.append((name, f"{first[name]:.0f}", f"{1e3 * time:.0f}", f"{1 / time:.1f}", f"{seeds / time:.1f}"))
    table(("updates", "first one, s", "one, ms", "updates/s", "times seeds"), rows)


def decisions(algorithm: Any, authors: dict[str, Any], rounds: int) -> None:
    """The table of TD-MPC2's planner: decisions for all episodes, which the authors' agent makes one by one."""
    actor, key = algorithm.actor(bind(algorithm, algorithm.init(0))), rng.make_key(0)
    draw = torch.Generator().manual_seed(0)
    runs: dict[Any, Run] = {}
    for count in EPISODES:
        observations = torch.randn(count, OBSERVATION, generator=draw)
        carry = actor.start(count)
        runs["offrl, eager", count] = lambda o=observations, c=carry: actor.act(c, o, key, explore=False)
        for name, agent in authors.items():
            runs[name, count] = with_default(lambda a=agent, o=observations: a.decide(o))
    with torch.no_grad():
        for run in runs.values():
            run()
        medians = interleaved(runs, rounds)
    names = list(dict.fromkeys(name for name, _ in runs))
    rows = [(name, *(f"{1e3 * medians[name, count]:.0f}" for count in EPISODES)) for name in names]
    table(("a decision by planning", *(f"E = {count}, ms" for count in EPISODES)), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", choices=("updates", "decisions"))
    parser.add_argument("--model", choices=SETTINGS, default="tdmpc2")
    parser.add_argument("--checkout", type=Path, help="folder of the authors' repositories")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 4])
    parser.add_argument("--modes", nargs="*", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--length", type=int, default=16, help="dreamerv3: states of a window")
    options = parser.parse_args()
    if options.table == "decisions" and options.model != "tdmpc2":
        parser.error("only tdmpc2 plans")
    print(f"torch {torch.__version__}, {backend.configure(torch.device('cpu'), 1)}", flush=True)
    algorithm, dataset = problem(options)
    batch_size, repository = algorithm.config.batch_size, REPOSITORIES[options.model]
    checkout = checkout_of(options.checkout, repository) if options.checkout else None
    sizes = {"offrl": sum(v.numel() for params in algorithm.init(0).params.values() for v in params.values())}
    with contextlib.ExitStack() as stack:
        # a pattern of torch 2.13's that fails where two of two critics are drawn (pytorch/pytorch#183988)
        stack.enter_context(mock.patch("torch._inductor.fx_passes.misc_patterns._misc_patterns_init"))
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = stack.enter_context(tempfile.TemporaryDirectory())
        authors = {}
        # torch 2.13 does not compile the authors' planner in a process that has not compiled their update
        modes = options.modes if options.table == "updates" else ["eager"]
        for mode in modes if checkout is not None else ():
            batches = drawn(algorithm, dataset, batch_size)
            agent = AUTHORS[options.model](checkout, batches, mode == "compiled", stack)
            authors[f"{repository}, {mode}"] = agent
            sizes[repository] = agent.parameters
        print(f"parameters: {', '.join(f'{name} {size:,}' for name, size in sizes.items())}", flush=True)
        if options.table == "decisions":
            decisions(algorithm, authors, options.rounds)
            return
        ways: dict[str, tuple[Run, int]] = {}
        for mode, count in itertools.product(options.modes, options.seeds):
            runner = Runner(algorithm, dataset, seeds=range(count), mode=mode, batch_size=batch_size)
            ways[f"offrl, {mode}, {count} seed{'s' if count > 1 else ''}"] = lambda r=runner: r.run(1), count
        for name, agent in authors.items():
            ways[name] = with_default(agent.update), 1
            ways[f"{name}, products as offrl's"] = agent.update, 1
        updates(ways, options.rounds)


if __name__ == "__main__":
    main()
