"""ARSQ beside the PyTorch of a copy that calls itself its authors' code (mihir-chauhan/CQN-AS-Franka, ARSQ-main)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl.data.samplers.demonstrations import DEMONSTRATION
from parity.common import ACTION, BATCH, OBSERVATION, Ours, Outcome, batches, case, fill, imported, linears, pair_layers

REPOSITORY, COMMIT = "mihir-chauhan/CQN-AS-Franka", "fe90e726de072c18aa427a6f57717acbfb72b248"
LEVELS, BINS, ALPHA = 2, 7, 0.1


class Config(SimpleNamespace):
    """Settings that are read as attributes and as items."""

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


def parts(ours: Ours, params: Any, member: int, net: Any) -> list[tuple[str, Any, list[nn.Linear]]]:
    """(name, our layers, theirs) of V and of the advantages of one of the two copies."""
    pairs = (("value", net.v_network), ("blocks", net.q_networks[0]))
    return [(name, ours.mlp_of(params, member, f"{name}."), linears(module)) for name, module in pairs]


def arsq(checkout: Path, imitation: str, weight: float, shown: float, floor: float, summed: int = 1) -> Outcome:
    """Five updates, and what both would play after them. shown: share of demonstrations; summed: times our imitation in
    theirs.
    """
    settings = {
        "levels": LEVELS,
        "bins": BINS,
        "entropy_weight": ALPHA,
        "imitation": imitation,
        "bc_weight": weight,
        "floor": floor,
    }
    ours, outcome = Ours("arsq", **settings), Outcome()
    config = Config(
        levels=LEVELS,
        bins=BINS,
        act_alpha=ALPHA,
        soft_alpha=ALPHA,
        use_nbias=False,
        abl_skip=-1,
        qchunk_size=-1,
        optimizer_type="adam",
        vf_lr=3e-4,
        qf_lr=3e-4,
        bellman_loss_coef=1.0,
        discount=0.99,
        soft_target_update_rate=0.005,
        act_network="default",
        cql_type=imitation,
        cql_min_q_weight=weight / summed,
        cql_temp=1.0,
        cql_clip_diff_min=floor,
        cql_clip_diff_max=1e7,
    )
    # they name a type and a GPU
    here = SimpleNamespace(**{**vars(torch), "float32": torch.float64, "device": lambda _: "cpu"})
    with (
        imported(checkout / "ARSQ-main" / "d4rl", "arsq_d4rl.alg.sqar") as code,
        mock.patch.object(code, "torch", here),
    ):
        agent = code.SQAR(config, OBSERVATION, ACTION)
        copies = (agent.qf1, agent.target_qf1), (agent.qf2, agent.target_qf2)
        for member, nets in enumerate(copies):
            for net in nets:
                for _, layers, modules in parts(ours, ours.state.params["critic"], member, net):
                    fill(modules, layers)
        for batch in batches(**{DEMONSTRATION: lambda g: (g.random(BATCH) < shown).astype(np.float64)}):
            losses = ours.update(batch)
            rows = {k: batch[k] for k in ("observations", "actions", "next_observations", "rewards")}
            rows |= {"dones": 1.0 - batch["masks"], "mc_returns": batch["rewards"], "demos": batch[DEMONSTRATION]}
            expected = agent.update(rows, False)
            td, imitated = (
                sum(expected[name.format(i)] for i in (1, 2)) for name in ("qf{}_bellman_loss", "cql/cql_qf{}_diff")
            )
            outcome.losses.append(
                {
                    "loss": (losses["critic/loss"], expected["qf1_loss"] + expected["qf2_loss"]),
                    "td": (losses["critic/td"], td),
                    "imitation": (losses["critic/imitation"], imitated / summed),
                }
            )
        for member, nets in enumerate(copies):
            trees = {"critic": ours.state.params["critic"], "target": ours.state.target["critic"]}
            for (name, tree), net in zip(trees.items(), nets, strict=True):
                for part, layers, modules in parts(ours, tree, member, net):
                    outcome.parameters |= pair_layers(f"{name}{member}/{part}", layers, modules)
        seen = torch.as_tensor(batch["observations"])
        played: Tensor = ours.algorithm.actor(ours.state).act(None, seen, ours.state.key, explore=False)[0]
        outcome.parameters["actions"] = played.numpy(), agent.act(batch["observations"], deterministic=True)
    return outcome


REMAINS = (
    "their weight of TD's error is a setting; half of a batch is what was played; time-outs are dropped there, here "
    "they are rows"
)
SUMMED = (
    "their margin, [B] times [B, 1], is the sum over a batch's rows, demonstrations or not, here the mean over "
    "demonstrations"
)


@case("arsq", REPOSITORY, COMMIT, remains=REMAINS)
def arsq_cql(checkout: Path) -> Outcome:
    return arsq(checkout, "cql", 0.5, shown=0.5, floor=0.5)


@case(
    "arsq, imitation=margin", REPOSITORY, COMMIT, aligned="all rows are demonstrations; their weight divided by a "
                                                          "batch's rows",
    remains=f"{SUMMED}; {REMAINS}",
)  # fmt: skip
def arsq_margin(checkout: Path) -> Outcome:
    return arsq(checkout, "margin", 0.5, shown=1.0, floor=-1.0, summed=BATCH)
