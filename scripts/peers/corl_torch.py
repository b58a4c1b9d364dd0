"""CORL's own classes (https://github.com/corl-team/CORL, from a checkout) in its own loop: sample, train; without wandb
and evaluations.
"""

from __future__ import annotations

import itertools
import threading
import traceback
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from peers import common
from peers.checkouts import imported, only_checkout
from peers.common import ACTION, BATCH, OBSERVATION, Arrays
from peers.flops import EDAC_CRITICS
from peers.plain import ONEDNN, arithmetic
from torch import nn

REPOSITORY = "corl-team/CORL"
ABSENT = ("d4rl", "gym", "pyrallis", "wandb")
Train = Callable[[Any], dict[str, float]]  # on a batch; returns losses


def adam(*modules: nn.Module, rate: float = 3e-4) -> torch.optim.Adam:
    return torch.optim.Adam([p for m in modules for p in m.parameters()], lr=rate)


def buffer(corl: Any, columns: Arrays) -> Any:
    rows = len(columns["rewards"])
    made = corl.ReplayBuffer(OBSERVATION, ACTION, rows, "cpu")
    made.load_d4rl_dataset({**columns, "terminals": 1.0 - columns["masks"]})
    return made


def iql(corl: Any) -> Train:
    actor, q, v = (
        corl.GaussianPolicy(OBSERVATION, ACTION, 1.0),
        corl.TwinQ(OBSERVATION, ACTION),
        corl.ValueFunction(OBSERVATION),
    )
    return corl.ImplicitQLearning(1.0, actor, adam(actor), q, adam(q), v, adam(v)).train  # type: ignore[no-any-return]


def td3_bc(corl: Any) -> Train:
    actor, *critics = (
        corl.Actor(OBSERVATION, ACTION, 1.0),
        corl.Critic(OBSERVATION, ACTION),
        corl.Critic(OBSERVATION, ACTION),
    )
    first, second = critics
    return corl.TD3_BC(1.0, actor, adam(actor), first, adam(first), second, adam(second)).train  # type: ignore[no-any-return]


def cql(corl: Any) -> Train:
    first, second = (corl.FullyConnectedQFunction(OBSERVATION, ACTION, True, 3) for _ in range(2))
    actor = corl.TanhGaussianPolicy(OBSERVATION, ACTION, 1.0, log_std_multiplier=1.0, orthogonal_init=True)
    trainer = corl.ContinuousCQL(
        first, adam(first), second, adam(second), actor, adam(actor, rate=3e-5),
        target_entropy=-float(ACTION), policy_lr=3e-5, qf_lr=3e-4, bc_steps=0, cql_alpha=10.0,
    )  # fmt: skip
    return trainer.train  # type: ignore[no-any-return]


def edac(corl: Any) -> Train:
    actor, critic = corl.Actor(OBSERVATION, ACTION, 256), corl.VectorizedCritic(OBSERVATION, ACTION, 256, EDAC_CRITICS)
    return corl.EDAC(actor, adam(actor), critic, adam(critic), alpha_learning_rate=3e-4).update  # type: ignore[no-any-return]


def loop(train: Train, data: Any) -> common.Updates:
    def updates(count: int) -> dict[str, float]:
        for _ in range(count):
            losses = train(data.sample(BATCH))
        return {k: float(v) for k, v in losses.items()}

    return updates


class Turns:
    """Takes the place of the progress bar around a training loop that runs in a thread of its own, and lets it go on by
    so many updates.
    """

    def __init__(self) -> None:
        self.left, self.go, self.done = 0, threading.Semaphore(0), threading.Semaphore(0)
        self.failure = ""

    def __call__(self, *_: Any, **__: Any) -> Iterator[int]:
        for number in itertools.count():
            if not self.left:
                self.done.release()
                self.go.acquire()
            self.left -= 1
            yield number

    def start(self, loop: Callable[[], None]) -> None:
        def run() -> None:
            try:
                loop()
            except Exception:
                self.failure = traceback.format_exc()
            self.done.release()

        threading.Thread(target=run, daemon=True).start()
        self.wait()

    def updates(self, count: int) -> dict[str, float]:
        self.left = count
        self.go.release()
        self.wait()
        return {}

    def wait(self) -> None:
        self.done.acquire()
        if self.failure:
            raise SystemExit(self.failure)


def dt(corl: Any, columns: Arrays) -> Turns:
    """CORL's `train` itself, which has model, data and update in one function, with data of ours and no evaluations."""
    terminations, timeouts = common.flags(len(columns["rewards"]))
    data = {**columns, "terminals": terminations, "timeouts": timeouts}
    spaces = {
        name: SimpleNamespace(shape=(size,))
        for name, size in (("observation_space", OBSERVATION), ("action_space", ACTION))
    }
    corl.gym.make = lambda name: SimpleNamespace(get_dataset=lambda: data)
    corl.wrap_env = lambda **_: SimpleNamespace(**spaces)
    turns = Turns()
    config = corl.TrainConfig(device="cpu", num_workers=0, target_returns=(), eval_every=10**9, update_steps=10**9)
    load = corl.load_d4rl_trajectories.__globals__
    bar = load["trange"]

    def trange(count: int, *arguments: Any, **more: Any) -> Any:
        return turns() if count == config.update_steps else bar(count, *arguments, disable=True, **more)

    load["trange"] = trange
    turns.start(lambda: corl.train(config))
    return turns


def main() -> None:
    trainers = {"iql": iql, "td3_bc": td3_bc, "cql": cql, "edac": edac}
    options = common.options(("--algo", {"required": True, "choices": [*trainers, "dt"]}), ONEDNN, *common.CHECKOUT)
    note = arithmetic(options.onednn)
    columns = common.transitions(options.rows)
    with imported(only_checkout(options.checkouts, REPOSITORY), f"algorithms.offline.{options.algo}", ABSENT) as corl:
        if options.algo == "dt":
            updates = dt(corl, columns).updates
        else:
            updates = loop(trainers[options.algo](corl), buffer(corl, columns))
    common.serve(updates, common.CHUNKS.get(options.algo, 20), note=f"{note}; torch {torch.__version__}")


if __name__ == "__main__":
    main()
