"""Agents in JAX: FQL, IFQL, and IQL and ReBRAC for OGBench's single tasks (seohongpark/fql), Q-chunking
(ColinQiyangLi/qc). Their draws are replaced by those of ours.

Worked with jax 0.4.38, flax 0.10.4, distrax 0.1.5 and optax 0.2.4 on Python 3.11. Both sides take their own defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from parity.common import (
    ACTION,
    BATCH,
    OBSERVATION,
    Arrays,
    Ours,
    Outcome,
    batches,
    case,
    draws,
    imported,
    shared_noise,
)
from parity.ogbench import NEEDS, Tree, mlp, policy

FQL, COMMIT = "seohongpark/fql", "719d04417cb0b206deddbc7d761b3e710c3d750c"
Trees = Callable[[Ours], Tree]


@contextlib.contextmanager
def same_noise(order: Mapping[int, Sequence[int]] | None = None) -> Iterator[None]:
    """`shared_noise`, for jax.random's normal and uniform as well."""
    import jax

    def normal(key: Any, shape: Any = (), dtype: Any = None) -> Any:
        return jax.numpy.asarray(draws.theirs(shape))

    def uniform(key: Any, shape: Any = (), dtype: Any = None, minval: float = 0.0, maxval: float = 1.0) -> Any:
        return minval + (maxval - minval) * jax.numpy.asarray(draws.theirs(shape, "uniform"))

    with (
        shared_noise(order),
        mock.patch.object(jax.random, "normal", normal),
        mock.patch.object(jax.random, "uniform", uniform),
    ):
        yield


def compare_agents(
    folder: Path, module: str, ours: Ours, config: Mapping[str, Any], trees: Trees, losses: Mapping[str, str],
    pairs: list[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]], examples: tuple[Any, ...] | None = None,
    delayed: int = 0,
) -> Outcome:  # fmt: skip
    """Five updates beside the agent of agents/`module`.py in `folder`, whose batches are the second of `pairs`.

    examples: what its `create` is handed for the shapes; None: an observation and an action. delayed: its actor takes
    every so-manieth update only; 0: it has no such order."""
    import jax

    jax.config.update("jax_enable_x64", True)
    from flax.traverse_util import flatten_dict

    outcome = Outcome()
    with imported(folder, f"agents.{module}") as code:
        chosen = code.get_config()
        chosen.update(config)
        kind = next(
            v for k, v in vars(code).items() if k.endswith("Agent") and k.removesuffix("Agent").lower() == module
        )
        agent = kind.create(0, *(examples or (np.zeros((1, OBSERVATION)), np.zeros((1, ACTION)))), chosen)

        def parameters() -> Tree:
            return {f"modules_{name}": tree for name, tree in trees(ours).items()}

        def shapes(tree: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[int, ...]]:
            return {k: v.shape for k, v in flatten_dict(tree).items()}

        own, theirs = shapes(parameters()), shapes(agent.network.params)
        assert {k: theirs.get(k) for k in own} == own, "networks of other forms"
        unused = {k: v for k, v in agent.network.params.items() if k not in parameters()}
        first = jax.tree_util.tree_map(lambda x: jax.numpy.asarray(np.array(x, np.float64)), {**unused, **parameters()})
        agent = agent.replace(network=agent.network.replace(params=first, opt_state=agent.network.tx.init(first)))
        for number, (mine, batch) in enumerate(pairs, 1):
            with same_noise():
                found = ours.update(mine)
                agent, expected = agent.update(batch, **({"full_update": number % delayed == 0} if delayed else {}))
            outcome.losses.append({a: (found[a], float(expected[b])) for a, b in losses.items() if b in expected})
        reached = flatten_dict(agent.network.params)
        outcome.parameters = {"/".join(k): (v, np.asarray(reached[k])) for k, v in flatten_dict(parameters()).items()}
    return outcome


def critics(ours: Ours) -> Tree:
    """The critics and their targets."""
    p, target = ours.state.params["critic"], ours.state.target["critic"]
    return {"critic": {"value_net": mlp(p)}, "target_critic": {"value_net": mlp(target)}}


def fql_trees(ours: Ours) -> Tree:
    p = ours.state.params
    return {
        **critics(ours),
        "actor_bc_flow": {"mlp": mlp(p["flow"], "net.")},
        "actor_onestep_flow": {"mlp": mlp(p["actor"], "net.")},
    }


def ifql_trees(ours: Ours) -> Tree:
    p = ours.state.params
    return {**critics(ours), "value": {"value_net": mlp(p["value"])}, "actor_flow": {"mlp": mlp(p["actor"], "net.")}}


@case("ifql", FQL, COMMIT, needs=NEEDS)
def ifql(checkout: Path, seed: int = 0) -> Outcome:
    names = {"value/loss": "value/value_loss", "critic/loss": "critic/critic_loss", "actor/loss": "actor/actor_loss"}
    return compare_agents(
        checkout, "ifql", Ours("ifql", seed=seed), {}, ifql_trees, names, [(b, b) for b in batches(seed)]
    )


@case("ifql, other weights and batches", FQL, COMMIT, needs=NEEDS)
def ifql_again(checkout: Path) -> Outcome:
    return ifql(checkout, seed=1)


SINGLE_TASK = {
    "hidden": [512] * 4,
    "activation": "gelu_tanh",
    "layer_norm": True,
    "layer_norm_epsilon": 1e-6,
    "batch_size": BATCH,
}


def iql_trees(ours: Ours) -> Tree:
    p = ours.state.params
    return {**critics(ours), "value": {"value_net": mlp(p["value"])}, "actor": policy(p["actor"])}


@case("iql, for single tasks", FQL, COMMIT, needs=NEEDS)
def iql(checkout: Path) -> Outcome:
    names = {"value/loss": "value/value_loss", "critic/loss": "critic/critic_loss"}
    form = {"policy": "unit_gaussian", "actor_schedule": "constant", "update_order": "simultaneous"}
    ours = Ours("iql", **SINGLE_TASK, **form, expectile=0.9, temperature=10.0)
    return compare_agents(checkout, "iql", ours, {}, iql_trees, names, [(b, b) for b in batches()])


def rebrac_trees(ours: Ours) -> Tree:
    actors = {"actor": policy(ours.state.params["actor"]), "target_actor": policy(ours.state.target["actor"])}
    return {**critics(ours), **actors}


@case("rebrac, for single tasks", FQL, COMMIT, needs=NEEDS)
def rebrac(checkout: Path) -> Outcome:
    names = {"critic/loss": "critic/critic_loss", "actor/loss": "actor/total_loss", "actor/bc": "actor/mse"}
    weights = {"actor_bc": 0.3, "critic_bc": 0.01}
    ours = Ours("rebrac", **SINGLE_TASK, **weights, learning_rate=3e-4, update_order="simultaneous")
    theirs = {"alpha_actor": weights["actor_bc"], "alpha_critic": weights["critic_bc"]}
    data = batches(next_actions=lambda g: g.uniform(-0.95, 0.95, (BATCH, ACTION)))
    return compare_agents(checkout, "rebrac", ours, theirs, rebrac_trees, names, [(b, b) for b in data], delayed=2)


LOSSES = {
    "critic/loss": "critic/critic_loss", "flow/loss": "actor/bc_flow_loss", "actor/distillation": "actor/distill_loss",
    "actor/q": "actor/q",
}  # fmt: skip


def fql(checkout: Path, config: Mapping[str, Any], **settings: Any) -> Outcome:
    return compare_agents(
        checkout, "fql", Ours("fql", **settings), config, fql_trees, LOSSES, [(b, b) for b in batches()]
    )


@case("fql", FQL, COMMIT, needs=NEEDS)
def fql_defaults(checkout: Path) -> Outcome:
    return fql(checkout, {})


@case("fql, min and normalised Q", FQL, COMMIT, needs=NEEDS)
def fql_variant(checkout: Path) -> Outcome:
    return fql(
        checkout, {"q_agg": "min", "normalize_q_loss": True, "alpha": 0.3}, pessimism="min", normalize_q=True, alpha=0.3
    )


# ---- Q-chunking

QC, QC_COMMIT, LENGTH = "ColinQiyangLi/qc", "48283b4f662bd1c127ec9fa80647b49759f10653", 4
CUT = (
    "windows that end in a termination before their last step count here (nothing of them is missing), theirs are left "
    "out; what is padded in those that a time-out cuts counts nowhere"
)


def windows(seed: int) -> list[tuple[Arrays, Arrays]]:
    """Windows of `LENGTH` steps as both sides have them, ours first: whole ones, and some that a time-out cuts."""

    def steps(*shape: int) -> Callable[[np.random.Generator], np.ndarray]:
        return lambda g: g.uniform(-0.95, 0.95, (BATCH, LENGTH, *shape))

    def spans(g: np.random.Generator) -> np.ndarray:
        return np.where(g.random(BATCH) < 0.3, g.integers(1, LENGTH, BATCH), LENGTH)

    pairs = []
    for columns in batches(seed, actions=steps(ACTION), step_rewards=steps(), span=spans):
        span = columns["span"]
        valid = np.arange(LENGTH) < span[:, None]
        whole = (span == LENGTH).astype(np.float64)
        masks = np.where(whole, columns["masks"], 1.0)
        rewards = columns["step_rewards"] * valid
        ours = {
            **columns,
            "step_rewards": rewards,
            "rewards": rewards[:, 0],
            "valid": valid,
            "whole": whole,
            "masks": masks,
        }
        summed = np.cumsum(rewards * 0.99 ** np.arange(LENGTH), 1)
        theirs = {k: columns[k] for k in ("observations", "actions")} | {
            "rewards": summed,
            "valid": valid.astype(np.float64),
        }
        theirs |= {"masks": np.repeat(masks[:, None], LENGTH, 1)}
        theirs |= {"next_observations": np.repeat(columns["next_observations"][:, None], LENGTH, 1)}
        pairs.append((ours, theirs))
    return pairs


def qc(checkout: Path, config: Mapping[str, Any], seed: int = 0, **settings: Any) -> Outcome:
    ours = Ours("qc", seed=seed, length=LENGTH, **settings)

    def trees(ours: Ours) -> Tree:
        tree = {**critics(ours), "actor_bc_flow": {"mlp": mlp(ours.state.params["flow"], "net.")}}
        return tree | (
            {"actor_onestep_flow": {"mlp": mlp(ours.state.params["actor"], "net.")}}
            if "actor" in ours.state.params
            else {}
        )

    names = {"critic/loss": "critic/critic_loss", "flow/loss": "actor/bc_flow_loss"}
    names |= {"actor/distillation": "actor/distill_loss"} if ours.algorithm.config.actor_type == "distil" else {}
    examples = np.zeros(OBSERVATION), np.zeros(ACTION)  # without a batch
    return compare_agents(
        checkout, "acfql", ours, {"horizon_length": LENGTH, **config}, trees, names, windows(seed), examples
    )


@case("qc, distilled", QC, QC_COMMIT, needs=NEEDS, remains=CUT)
def qc_distilled(checkout: Path, seed: int = 0) -> Outcome:
    return qc(checkout, {"actor_type": "distill-ddpg", "action_chunking": True}, seed, actor_type="distil")


@case("qc, distilled, other weights and batches", QC, QC_COMMIT, needs=NEEDS, remains=CUT)
def qc_distilled_again(checkout: Path) -> Outcome:
    return qc_distilled(checkout, seed=1)


@case("qc, best of 8", QC, QC_COMMIT, needs=NEEDS, remains=CUT)
def qc_best(checkout: Path) -> Outcome:
    return qc(checkout, {"actor_type": "best-of-n", "actor_num_samples": 8, "action_chunking": True}, candidates=8)


@case("qc, single actions", QC, QC_COMMIT, needs=NEEDS, remains=CUT)
def qc_single(checkout: Path) -> Outcome:
    return qc(
        checkout,
        {"actor_type": "distill-ddpg", "action_chunking": False, "q_agg": "min"},
        actor_type="distil",
        chunked=False,
        pessimism="min",
    )
