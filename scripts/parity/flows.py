"""Flow Q-learning's agents (seohongpark/fql) in JAX: FQL, and its IQL with flows. Their draws are replaced by the numbers that ours draw.

Worked with jax 0.4.38, flax 0.10.4, distrax 0.1.5 and optax 0.2.4 on Python 3.11. Both sides take their own defaults.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from parity.common import ACTION, OBSERVATION, Ours, Outcome, batches, case, imported, pattern, shared_noise
from parity.ogbench import NEEDS, Tree, mlp

FQL, COMMIT = "seohongpark/fql", "719d04417cb0b206deddbc7d761b3e710c3d750c"
Trees = Callable[[Ours], Tree]


@contextlib.contextmanager
def same_noise() -> Iterator[None]:
    """`shared_noise`, for jax.random's normal and uniform as well."""
    import jax

    def normal(key: Any, shape: Any = (), dtype: Any = None) -> Any:
        return jax.numpy.asarray(pattern(shape))

    def uniform(key: Any, shape: Any = (), dtype: Any = None, minval: float = 0.0, maxval: float = 1.0) -> Any:
        return minval + (maxval - minval) * jax.numpy.asarray(pattern(shape, "uniform"))

    with shared_noise(), mock.patch.object(jax.random, "normal", normal), mock.patch.object(jax.random, "uniform", uniform):
        yield


def compare_agents(
    folder: Path, module: str, ours: Ours, config: Mapping[str, Any], trees: Trees, losses: Mapping[str, str],
    pairs: list[tuple[Mapping[str, np.ndarray], Mapping[str, np.ndarray]]], examples: tuple[Any, ...] | None = None,
) -> Outcome:  # fmt: skip
    """Five updates beside the agent of agents/`module`.py in `folder`, whose batches are the second of `pairs`.

    examples: what its `create` is handed for the shapes; None: an observation and an action."""
    import jax

    jax.config.update("jax_enable_x64", True)
    from flax.traverse_util import flatten_dict

    outcome = Outcome()
    with imported(folder, f"agents.{module}") as code:
        chosen = code.get_config()
        chosen.update(config)
        kind = next(v for k, v in vars(code).items() if k.endswith("Agent") and k.removesuffix("Agent").lower() == module)
        agent = kind.create(0, *(examples or (np.zeros((1, OBSERVATION)), np.zeros((1, ACTION)))), chosen)

        def parameters() -> Tree:
            return {f"modules_{name}": tree for name, tree in trees(ours).items()}

        def shapes(tree: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[int, ...]]:
            return {k: v.shape for k, v in flatten_dict(tree).items()}

        assert shapes(parameters()) == shapes(agent.network.params), "networks of other forms"
        first = jax.tree_util.tree_map(lambda x: jax.numpy.asarray(np.array(x, np.float64)), parameters())
        agent = agent.replace(network=agent.network.replace(params=first, opt_state=agent.network.tx.init(first)))
        for mine, batch in pairs:
            with same_noise():
                found = ours.update(mine)
                agent, expected = agent.update(batch)
            outcome.losses.append({a: (found[a], float(expected[b])) for a, b in losses.items()})
        reached = flatten_dict(agent.network.params)
        outcome.parameters = {"/".join(k): (v, np.asarray(reached[k])) for k, v in flatten_dict(parameters()).items()}
    return outcome


def critics(ours: Ours) -> Tree:
    """The critics and their targets."""
    p, target = ours.state.params["critic"], ours.state.target["critic"]
    return {"critic": {"value_net": mlp(p)}, "target_critic": {"value_net": mlp(target)}}


def fql_trees(ours: Ours) -> Tree:
    p = ours.state.params
    return {**critics(ours), "actor_bc_flow": {"mlp": mlp(p["flow"], "net.")}, "actor_onestep_flow": {"mlp": mlp(p["actor"], "net.")}}


LOSSES = {
    "critic/loss": "critic/critic_loss", "flow/loss": "actor/bc_flow_loss", "actor/distillation": "actor/distill_loss",
    "actor/q": "actor/q",
}  # fmt: skip


def fql(checkout: Path, config: Mapping[str, Any], **settings: Any) -> Outcome:
    return compare_agents(checkout, "fql", Ours("fql", **settings), config, fql_trees, LOSSES, [(b, b) for b in batches()])


@case("fql", FQL, COMMIT, needs=NEEDS)
def fql_defaults(checkout: Path) -> Outcome:
    return fql(checkout, {})


@case("fql, min and normalised Q", FQL, COMMIT, needs=NEEDS)
def fql_variant(checkout: Path) -> Outcome:
    return fql(checkout, {"q_agg": "min", "normalize_q_loss": True, "alpha": 0.3}, pessimism="min", normalize_q=True, alpha=0.3)
