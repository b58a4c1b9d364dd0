"""IDQL (philippe-eecs/IDQL) in JAX: the learner that its script for fine-tuning sets up. Its draws are replaced by the
numbers of ours.

Worked with jax 0.4.38, flax 0.10.4 and optax 0.2.4 on Python 3.11. Both sides take their own defaults.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from parity.common import ACTION, BATCH, OBSERVATION, UNUSED, Ours, Outcome, batches, case, draws, imported
from parity.flows import same_noise
from parity.ogbench import Tree, layer

IDQL, COMMIT = "philippe-eecs/IDQL", "7582571ce686c77b4ee0f592dd639ab8151295fa"
NEEDS = ("jax", "flax", "optax")
ABSENT = ("gym", "gym.spaces", "gym.utils")


def dense(params: Mapping[str, Tensor], *names: str) -> Tree:
    return {f"Dense_{i}": layer(params, name) for i, name in enumerate(names)}


def denoiser(params: Mapping[str, Tensor], blocks: int) -> Tree:
    """The diffusion model: the waves of a step, its two layers, and the residual network."""
    net = dense(params, "first", "head")
    for i in range(blocks):
        norm = {"scale": params[f"blocks.{i}.scale"].numpy(), "bias": params[f"blocks.{i}.shift"].numpy()}
        net[f"MLPResNetBlock_{i}"] = {"LayerNorm_0": norm, **dense(params, f"blocks.{i}.wide", f"blocks.{i}.narrow")}
    return {
        "FourierFeatures_0": {"kernel": params["waves"].numpy()[:, None]},
        "MLP_0": dense(params, "up", "down"),
        "MLPResNet_0": net,
    }


def perceptron(params: Mapping[str, Tensor], head: str) -> Tree:
    """V or critics: the hidden layers, and the one of the value, which is called `head`."""
    return {"MLP_0": dense(params, "layers.0", "layers.1"), head: layer(params, "head")}


def trees(ours: Ours) -> dict[str, Tree]:
    p, state, blocks = ours.state.params, ours.state, int(ours.algorithm.config.blocks)
    members = {"critic": p["critic"], "target_critic": state.target["critic"]}
    return {
        "score_model": denoiser(p["actor"], blocks),
        "target_score_model": denoiser(state.extra["average"], blocks),
        "value": perceptron(p["value"], "OutputVDense"),
        **{name: {"VmapStateActionValue_0": perceptron(params, "Dense_0")} for name, params in members.items()},
    }


@contextlib.contextmanager
def learner(checkout: Path) -> Iterator[Any]:
    """The module of the learner, without the others of its packages, which need more than it does."""
    packages = {
        "jaxrl5.agents": checkout / "jaxrl5" / "agents",
        "jaxrl5.agents.ddpm_iql": checkout / "jaxrl5" / "agents" / "ddpm_iql",
    }
    for name, folder in packages.items():
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(folder)]
    try:
        with imported(checkout, "jaxrl5.agents.ddpm_iql.ddpm_iql_learner", absent=ABSENT) as code:
            yield code
    finally:
        for name in packages:
            del sys.modules[name]


@contextlib.contextmanager
def same_draws() -> Iterator[None]:
    """`same_noise`, for steps and masks of dropout as well."""
    import jax

    def integers(key: Any, shape: Any, low: Any, high: Any, dtype: Any = None) -> Any:
        return jax.numpy.asarray((draws.theirs(shape, "integer") * high).astype(np.int64))

    def kept(key: Any, p: Any = 0.5, shape: Any = ()) -> Any:
        return jax.numpy.asarray(draws.theirs(shape, "uniform") >= 1.0 - p)

    with (
        same_noise(
            {BATCH * 256: (UNUSED, 0, 1, 2)}
        ),  # masks of dropout, after the initial weights of a layer, which flax asks for
        mock.patch.object(jax.random, "randint", integers),
        mock.patch.object(jax.random, "bernoulli", kept),
    ):
        yield


SMALLER = (
    "their script for D4RL takes a smaller learner: SiLU for Mish, 128 waves for 64, V's observations through LayerNorm"
)


@case("idql", IDQL, COMMIT, needs=NEEDS, remains=SMALLER)
def idql(checkout: Path) -> Outcome:
    import jax

    jax.config.update("jax_enable_x64", True)
    from flax.traverse_util import flatten_dict

    outcome, ours = Outcome(), Ours("idql")
    spaces = [SimpleNamespace(sample=lambda n=n: np.zeros(n), shape=(n,)) for n in (OBSERVATION, ACTION)]
    with learner(checkout) as code:
        settings = {
            "actor_architecture": "ln_resnet",
            "actor_dropout_rate": 0.1,
            "actor_num_blocks": 3,
            "actor_layer_norm": True,
        }
        agent = code.DDPMIQLLearner.create(0, *spaces, **settings, decay_steps=3_000_000)
        for name, tree in trees(ours).items():
            state = getattr(agent, name)
            first = jax.tree_util.tree_map(lambda x: jax.numpy.asarray(np.array(x, np.float64)), tree)
            shapes = [{k: v.shape for k, v in flatten_dict(t).items()} for t in (first, dict(state.params))]
            assert shapes[0] == shapes[1], f"networks of other forms: {shapes}"
            begun = {"opt_state": state.tx.init(first)} if not name.startswith("target") else {}
            agent = agent.replace(**{name: state.replace(params=first, **begun)})
        for batch in batches():
            with same_draws():
                found = ours.update(batch)
                agent, expected = agent.update(batch)
            names = {"actor/loss": "actor_loss", "value/loss": "value_loss", "critic/loss": "critic_loss"}
            outcome.losses.append({a: (found[a], float(expected[b])) for a, b in names.items()})
        for name, tree in trees(ours).items():
            reached = flatten_dict(dict(getattr(agent, name).params))
            outcome.parameters |= {
                "/".join((name, *k)): (v, np.asarray(reached[k])) for k, v in flatten_dict(tree).items()
            }
    return outcome
