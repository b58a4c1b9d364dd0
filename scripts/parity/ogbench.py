"""OGBench's goal-conditioned agents (seohongpark/ogbench), and OTA's, which are built on the same code; JAX and flax.

Worked with jax 0.4.38, flax 0.10.4, distrax 0.1.5, tensorflow-probability 0.25 and optax 0.2.4 on Python 3.11. Both
sides take their own defaults, so that a default that differs would show. The agents draw nothing at random in an update
(`const_std`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from parity.common import ACTION, BATCH, OBSERVATION, Arrays, Ours, Outcome, batches, case, imported

OGBENCH, COMMIT = "seohongpark/ogbench", "1d4140997f60c52c6fb0702ec100dc988b18c548"
OTA, OTA_COMMIT = "ktolnos/TTGS", "0a6d7a94ecfa1e563357327f9af7344e17e0745e"
NEEDS = ("jax", "flax", "distrax", "optax", "ml_collections")
GOALS = (
    "goals at uniform distances: all later rows alike, theirs rounds, which draws the first and the last half as often"
)
Tree = dict[str, Any]  # flax's parameters: nested dictionaries


# ---- our parameters as flax has them


def layer(params: Mapping[str, Tensor], name: str) -> Tree:
    """A linear layer, or one for each member of an ensemble."""
    weight, bias = params[f"{name}.weight"].numpy(), params[f"{name}.bias"].numpy()
    return {"kernel": weight.T, "bias": bias} if weight.ndim == 2 else {"kernel": weight, "bias": bias[:, 0]}


def mlp(params: Mapping[str, Tensor], prefix: str = "") -> Tree:
    """A perceptron or an ensemble of them, the head as its last layer, with its LayerNorms."""
    tree: Tree = {}
    depth = sum(k.startswith(f"{prefix}layers.") and k.endswith(".weight") for k in params)
    for i in range(depth):
        tree[f"Dense_{i}"] = layer(params, f"{prefix}layers.{i}")
        if f"{prefix}norms.{i}.weight" in params:
            names = {"scale": f"{prefix}norms.{i}.weight", "bias": f"{prefix}norms.{i}.bias"}
            tree[f"LayerNorm_{i}"] = {k: params[v].numpy() for k, v in names.items()}
        elif f"{prefix}scales.{i}" in params:
            names = {"scale": f"{prefix}scales.{i}", "bias": f"{prefix}shifts.{i}"}
            tree[f"LayerNorm_{i}"] = {k: params[v].numpy()[:, 0] for k, v in names.items()}
    return {**tree, f"Dense_{depth}": layer(params, f"{prefix}head")}


def policy(params: Mapping[str, Tensor]) -> Tree:
    """A policy: the layers of its body, and the one of its mean."""
    *body, head = mlp(params, "net.").items()
    return {"actor_net": dict(body), "mean_net": head[1]}


def alone(tree: Tree) -> Tree:
    """The only member of an ensemble."""
    return {name: {k: v[0] for k, v in part.items()} for name, part in tree.items()}


def encoders(params: Mapping[str, Tensor], ensemble: bool = True) -> Tree:
    """CRL's phi and psi."""
    trees = {"phi": mlp(params, "near."), "psi": mlp(params, "far.")}
    return trees if ensemble else {name: alone(tree) for name, tree in trees.items()}


def quasimetric(params: Mapping[str, Tensor]) -> Tree:
    """QRL's modules besides the policy."""
    tree: Tree = {"lam": {"log_value": params["log_multiplier"].numpy()}, "value": {"phi": mlp(params, "encoder.")}}
    if "distance.alpha" in params:
        tree["value"]["alpha"] = {"value": params["distance.alpha"].numpy()}
    if any(k.startswith("moves.") for k in params):
        tree["dynamics"] = mlp(params, "moves.")
    return tree


def head(params: Mapping[str, Tensor], name: str) -> Tree:
    """HIQL's or OTA's values above the representation of goals."""
    return {"value_net": mlp(params, f"heads.{name}.")}


def levels(ours: Ours) -> Tree:
    """What HIQL and OTA have besides values."""
    p = ours.state.params
    return {
        "goal_rep": {"layers_0": mlp(p["value"], "represent.")},
        "low_actor": policy(p["actor"]),
        "high_actor": policy(p["high"]),
    }


TREES: dict[str, Callable[[Ours], Tree]] = {
    "gcbc": lambda o: {"actor": policy(o.state.params["actor"])},
    "gcivl": lambda o: {
        "actor": policy(o.state.params["actor"]),
        "value": {"value_net": mlp(o.state.params["value"])},
        "target_value": {"value_net": mlp(o.state.target["value"])},
    },
    "gciql": lambda o: {
        "actor": policy(o.state.params["actor"]),
        "value": {"value_net": mlp(o.state.params["value"])},
        "critic": {"value_net": mlp(o.state.params["critic"])},
        "target_critic": {"value_net": mlp(o.state.target["critic"])},
    },
    "qrl": lambda o: {"actor": policy(o.state.params["actor"]), **quasimetric(o.state.params["value"])},
    "crl": lambda o: {
        "actor": policy(o.state.params["actor"]),
        "critic": encoders(o.state.params["critic"]),
        **({"value": encoders(o.state.params["value"], ensemble=False)} if "value" in o.state.params else {}),
    },
    "hiql": lambda o: {
        **levels(o),
        "value": head(o.state.params["value"], "low"),
        "target_value": head(o.state.target["value"], "low"),
    },
    "ota": lambda o: {
        **levels(o),
        **{f"{name}_value": head(o.state.params["value"], name) for name in ("low", "high")},
        **{f"target_{name}_value": head(o.state.target["value"], name) for name in ("low", "high")},
    },
}
LOSSES = {
    "gcbc": {"actor/loss": "actor/actor_loss"},
    "gcivl": {"actor/loss": "actor/actor_loss", "value/loss": "value/value_loss"},
    "gciql": {"actor/loss": "actor/actor_loss", "value/loss": "value/value_loss", "critic/loss": "critic/critic_loss"},
    "qrl": {
        "actor/loss": "actor/actor_loss",
        "value/loss": "value/total_loss",
        "value/dynamics": "dynamics/dynamics_loss",
    },
    "crl": {
        "actor/loss": "actor/actor_loss",
        "critic/loss": "critic/contrastive_loss",
        "value/loss": "value/contrastive_loss",
    },
    "hiql": {
        "value/loss": "value/value_loss",
        "low/loss": "low_actor/actor_loss",
        "high/loss": "high_actor/actor_loss",
    },
    "ota": {
        "value/loss": "low_value/low_value_loss",
        "value/high_loss": "high_value/high_value_loss",
        "low/loss": "low_actor/actor_loss",
        "high/loss": "high_actor/actor_loss",
    },
}
COLUMNS = {  # theirs -> ours
    "value_goals": "value_goals",
    "actor_goals": "actor_goals",
    "low_actor_goals": "low_goals",
    "high_actor_goals": "high_goals",
    "high_actor_targets": "high_targets",
    "high_value_goals": "option_goals",
    "high_value_option_observations": "option_states",
}


def goal_batches() -> list[tuple[Arrays, Arrays]]:
    """The same batches as both sides take them, ours first."""

    def goals(g: np.random.Generator) -> np.ndarray:
        return g.normal(size=(BATCH, OBSERVATION))

    def flags(g: np.random.Generator) -> np.ndarray:
        return (g.random(BATCH) < 0.2).astype(np.float64)

    pairs = []
    for columns in batches(**dict.fromkeys(COLUMNS, goals), successes=flags, option_successes=flags):
        ours = {
            **columns,
            **{b: columns[a] for a, b in COLUMNS.items()},
            "high_target_states": columns["high_actor_targets"],
        }
        theirs = {**columns, "rewards": columns["successes"] - 1.0, "masks": 1.0 - columns["successes"]}
        theirs |= {
            "high_value_rewards": columns["option_successes"] - 1.0,
            "high_value_masks": 1.0 - columns["option_successes"],
        }
        pairs.append((ours, theirs))
    return pairs


def compare(folder: Path, method: str, config: Mapping[str, Any], **settings: Any) -> Outcome:
    """Five updates beside the agent `method` of the code in `folder`, with these settings of each side on top of its
    defaults.
    """
    import jax

    jax.config.update("jax_enable_x64", True)
    from flax.traverse_util import flatten_dict

    ours, outcome = Ours(method, **settings), Outcome()
    with imported(folder, f"agents.{method}") as module:
        chosen = module.get_config()
        chosen.update(config)
        kind = getattr(module, f"{method.upper()}Agent")
        agent = kind.create(0, np.zeros((1, OBSERVATION)), np.zeros((1, ACTION)), chosen)

        def parameters() -> Tree:
            return {f"modules_{name}": tree for name, tree in TREES[method](ours).items()}

        def shapes(tree: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[int, ...]]:
            return {k: v.shape for k, v in flatten_dict(tree).items()}

        assert shapes(parameters()) == shapes(agent.network.params), "networks of other forms"
        first = jax.tree_util.tree_map(lambda x: jax.numpy.asarray(np.array(x, np.float64)), parameters())
        agent = agent.replace(network=agent.network.replace(params=first, opt_state=agent.network.tx.init(first)))
        for mine, batch in goal_batches():
            losses = ours.update(mine)
            agent, expected = agent.update(batch)
            outcome.losses.append(
                {a: (losses[a], float(expected[b])) for a, b in LOSSES[method].items() if a in losses}
            )
        reached = flatten_dict(agent.network.params)
        outcome.parameters = {"/".join(k): (v, np.asarray(reached[k])) for k, v in flatten_dict(parameters()).items()}
    return outcome


VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # method -> (their settings, ours)
    **dict.fromkeys(("gcbc", "gcivl", "gciql", "qrl", "crl", "hiql"), ({}, {})),
    "gciql, awr": ({"actor_loss": "awr", "alpha": 3.0}, {"learner": "awr"}),
    "qrl, mrn and awr": (
        {"quasimetric_type": "mrn", "actor_loss": "awr", "alpha": 3.0},
        {"quasimetric": "mrn", "learner": "awr"},
    ),
    "crl, awr": ({"actor_loss": "awr", "alpha": 3.0}, {"learner": "awr"}),
}


def add(method: str, config: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    name = method.partition(",")[0]
    case(method, OGBENCH, COMMIT, needs=NEEDS, remains=GOALS)(
        lambda path: compare(path / "impls", name, config, **settings)
    )


for _method, (_config, _settings) in sorted(VARIANTS.items()):
    add(_method, _config, _settings)


@case(
    "ota",
    OTA,
    OTA_COMMIT,
    needs=NEEDS,
    remains=f"{GOALS}; the reference is the copy of the authors' code in impls/ota-v",
)
def ota(checkout: Path) -> Outcome:
    return compare(checkout / "impls" / "ota-v", "ota", {})
