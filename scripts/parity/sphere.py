"""SimbaV2 in JAX, with imitation: both critics' distributions, the weight of the entropy, and the projected weights."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from parity.common import ACTION, OBSERVATION, Ours, Outcome, batches, case, imported, shared_noise
from parity.flax_nets import NEEDS, compared, jax_float64, of_dimensions, replaced

ABSENT = ("scale_rl.agents.wrappers",)
WIDTHS, BLOCKS = {"actor": 8, "critic": 12}, {"actor": 1, "critic": 2}
HEADS = {"mean": "mean_{}", "log_std": "std_{}", "head": "{}"}


def weights(params: dict[str, Tensor], blocks: int, prefix: str) -> dict[str, np.ndarray]:
    """Our parameters of a module by flax's paths."""
    names = {
        "features.first.weight": "embedder/w/hyper_dense/kernel",
        "features.scale.vector": "embedder/scaler/scaler",
    }
    for i in range(blocks):
        ours, theirs = f"features.blocks.{i}", f"encoder/layers_{i}"
        names[f"{ours}.first.weight"] = f"{theirs}/mlp/w1/hyper_dense/kernel"
        names[f"{ours}.scale.vector"] = f"{theirs}/mlp/scaler/scaler"
        names[f"{ours}.second.weight"] = f"{theirs}/mlp/w2/hyper_dense/kernel"
        names[f"{ours}.share.vector"] = f"{theirs}/alpha_scaler/scaler"
    for head, form in HEADS.items():
        names[f"{head}.first.weight"] = f"predictor/{form.format('w1')}/hyper_dense/kernel"
        names[f"{head}.scale.vector"] = f"predictor/{form.format('scaler')}/scaler"
        names[f"{head}.second.weight"] = f"predictor/{form.format('w2')}/hyper_dense/kernel"
        names[f"{head}.bias"] = f"predictor/{'value_bias' if head == 'head' else form.format('bias')}"
    return {prefix + names[name]: x.numpy() for name, x in params.items()}


def settings(ours: Ours) -> dict[str, Any]:
    """The reference's."""
    c = ours.algorithm.config
    result: dict[str, Any] = {"seed": 0, "gamma": c.discount, "n_step": 1, "target_tau": c.polyak}
    result |= dict.fromkeys(("normalize_observation", "normalize_reward", "load_only_param"), False)
    result |= dict.fromkeys(("load_param_key", "load_observation_normalizer", "load_reward_normalizer"))
    result |= {"normalized_g_max": 5.0, "learning_rate_init": 1e-4, "learning_rate_end": 1e-4}
    result |= {"learning_rate_decay_rate": 1.0, "learning_rate_decay_step": 1}
    for name, width in WIDTHS.items():
        root, count = math.sqrt(2 / width), BLOCKS[name]
        result |= {f"{name}_num_blocks": count, f"{name}_hidden_dim": width, f"{name}_c_shift": 3.0}
        result |= {f"{name}_scaler_init": root, f"{name}_scaler_scale": root}
        result |= {f"{name}_alpha_init": 1 / (count + 1), f"{name}_alpha_scale": width**-0.5}
    result |= {"actor_bc_alpha": c.bc_weight, "critic_use_cdq": True, "critic_num_bins": c.value_bins}
    result |= {"critic_min_v": -5.0, "critic_max_v": 5.0, "temp_initial_value": c.entropy_weight}
    return result | {"temp_target_entropy": None, "temp_target_entropy_coef": -0.5}


@case(
    "simbav2, bc_weight",
    "dojeon-ai/SimbaV2",
    "14fafb27e6f78f0b65d19b8873b4433547a2193c",
    aligned="learning rates are constant, which a schedule there rounds to float32; rewards are taken as they are",
    remains="rewards and observations are scaled by running statistics there, by those of the data here",
    needs=NEEDS,
)
def simbav2(checkout: Path) -> Outcome:
    hidden = {f"{'critic_' if k == 'critic' else ''}hidden": [w] * BLOCKS[k] for k, w in WIDTHS.items()}
    ours, outcome = Ours("simbav2", **hidden, bc_weight=0.1, decay_to=1.0, reward_divisor=1.0), Outcome()
    import flax
    import jax
    import optax

    with (
        jax_float64(),
        imported(checkout, "scale_rl.agents.simbaV2.simbaV2_agent", ABSENT) as code,
        mock.patch.object(jax.random, "normal", of_dimensions),
        mock.patch.object(Tensor, "float", Tensor.double),  # value heads compute in float32
    ):
        flax.config.update("flax_return_frozendict", False)
        spaces = [SimpleNamespace(shape=(n,)) for n in (OBSERVATION, ACTION)]
        agent = code.SimbaV2Agent(*spaces, settings(ours))
        prefix = "VmapSimbaV2Critic_0/"

        def ours_by_path(state: Any) -> dict[str, dict[str, np.ndarray]]:
            return {
                "_actor": weights(state.params["actor"], BLOCKS["actor"], ""),
                "_critic": squeezed(weights(state.params["critic"], BLOCKS["critic"], prefix)),
                "_target_critic": squeezed(weights(state.target["critic"], BLOCKS["critic"], prefix)),
                "_temperature": {"log_temp": state.params["entropy"]["log"].numpy()},
            }

        for name, values in ours_by_path(ours.state).items():
            network, adam = getattr(agent, name), optax.adam(1e-4)
            params = flax.core.unfreeze(replaced(network.params, values))
            learnt = {} if network.tx is None else {"tx": adam, "opt_state": adam.init(params)}
            setattr(agent, name, network.replace(params=params, **learnt))
        for i, batch in enumerate(batches()):
            theirs = {"terminated": 1.0 - batch["masks"]} | {
                name.removesuffix("s"): column for name, column in batch.items() if name != "masks"
            }
            with shared_noise():
                losses = ours.update(batch)
                expected = agent.update(i, theirs)
            pairs = {"actor": "actor/loss", "critic": "critic/loss"}
            outcome.losses.append(
                {k: (losses[v], expected[v]) for k, v in pairs.items()}
                | {"alpha": (losses["entropy/weight"], expected["temperature/value"])}
            )
        for name, values in ours_by_path(ours.state).items():
            outcome.parameters |= compared(name, values, getattr(agent, name).params)
    return outcome


def squeezed(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Vectors of critics without the axis of the batch."""
    return {k: x[:, 0] if x.shape[1] == 1 else x for k, x in values.items()}
