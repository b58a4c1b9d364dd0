"""CrossQ in JAX: networks and steps of the authors, whose loop over updates needs an environment."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from parity.common import ACTION, OBSERVATION, Ours, Outcome, batches, case, imported, shared_noise
from parity.flax_nets import NEEDS, compared, jax_float64, of_dimensions, replaced

WIDTHS = {"actor": [8, 6], "critic": [12, 10]}
PASSES = {"actor": 100_000, "critic": 99_998}  # so far: the critics' third update is their first with corrections
COUNT = 2  # hidden layers


def weights(ours: Ours, name: str) -> dict[str, np.ndarray]:
    """Our parameters of a module by flax's paths."""
    params, result = ours.state.params[name], {}
    prefix, body = ("VmapCritic_0/", "") if name == "critic" else ("", "body.")
    for i in range(COUNT + 1):
        result |= {
            f"{prefix}BatchRenorm_{i}/scale": params[f"{body}scales.{i}"].numpy(),
            f"{prefix}BatchRenorm_{i}/bias": params[f"{body}shifts.{i}"].numpy(),
        }
        kernel, bias = (params[f"{body}layers.{i}.{kind}"].numpy() for kind in ("weight", "bias"))
        if name == "critic":
            result |= {f"{prefix}Dense_{i}/kernel": kernel, f"{prefix}Dense_{i}/bias": bias}
            continue
        heads = np.split(kernel.T, 2, 1), np.split(bias, 2)
        layers = zip(*heads, strict=True) if i == COUNT else [(kernel.T, bias)]
        for j, (weight, offset) in enumerate(layers, start=i):  # one for the mean and one for the logarithm of std
            result |= {f"Dense_{j}/kernel": weight, f"Dense_{j}/bias": offset}
    return result


def statistics(ours: Ours, name: str) -> dict[str, np.ndarray]:
    """Our running statistics of a module by flax's paths."""
    known, prefix = ours.state.extra[name], "VmapCritic_0/" if name == "critic" else ""
    pairs = [(f"{prefix}BatchRenorm_{i}/{kind}", f"{kind}{i}") for i in range(COUNT + 1) for kind in ("mean", "var")]
    return {path: known[key].numpy() for path, key in pairs} | {
        f"{prefix}BatchRenorm_{i}/steps": np.full(len(known["mean0"]) if prefix else (), known["passes"].numpy())
        for i in range(COUNT + 1)
    }


@case(
    "crossq",
    "adityab/CrossQ",
    "a318a266679bec3f9d93c44e029860a6da077c89",
    aligned="Adam's epsilon of the critics halved there, whose loss is half as large",
    remains="the critics' loss is half as large there; updates come in threes here, after every third step",
    needs=(*NEEDS, "stable_baselines3"),
)
def crossq(checkout: Path) -> Outcome:
    ours, outcome = Ours("crossq", hidden=WIDTHS["actor"], critic_hidden=WIDTHS["critic"]), Outcome()
    c, g = ours.algorithm.config, np.random.default_rng(3)
    for name, known in ours.state.extra.items():
        for key, x in known.items():  # so far from the batches' that some corrections are cut off
            draw = g.normal(0.0, 2.0, x.shape) if "mean" in key else g.uniform(0.02, 4.0, x.shape)
            known[key] = torch.as_tensor(PASSES[name] if key == "passes" else draw)
    import flax
    import jax
    import optax
    import stable_baselines3  # noqa: F401, whose modules have odd paths, at which `imported` would look
    import tensorflow_probability.substrates.jax  # noqa: F401, which the reference takes for imported

    with (
        jax_float64(),
        jax.disable_jit(),  # a compiled step would keep its first draws
        mock.patch.object(jax.random, "KeyArray", Any, create=True),
        mock.patch.object(jax.random, "normal", of_dimensions),
        imported(checkout, "sbx.sac.sac") as code,
        mock.patch.object(Tensor, "float", Tensor.double),  # value heads compute in float32
    ):
        nets = sys.modules["sbx.sac.policies"]
        shared = {"batch_norm_momentum": 0.99, "use_batch_norm": True}
        modules = {
            "actor": nets.Actor(WIDTHS["actor"], ACTION, **shared, bn_mode="brn_actor"),
            "critic": nets.VectorCritic(WIDTHS["critic"], lambda: flax.linen.relu, **shared, batch_norm_mode="brn"),
        }
        key, states = jax.random.PRNGKey(0), {}
        for name, inputs in {"actor": [OBSERVATION], "critic": [OBSERVATION, ACTION]}.items():
            start = modules[name].init(key, *(np.zeros((1, n)) for n in inputs), train=False)
            params = replaced(start["params"], weights(ours, name))
            moments = replaced(start["batch_stats"], statistics(ours, name))
            target = {"target_params": params, "target_batch_stats": moments} if name == "critic" else {}
            kind = nets.RLTrainState if name == "critic" else nets.ActorTrainState
            adam = optax.adam(c.learning_rate, b1=0.5, eps=0.5e-8 if name == "critic" else 1e-8)
            states[name] = kind.create(
                apply_fn=modules[name].apply, params=params, batch_stats=moments, tx=adam, **target
            )
        entropy, adam = code.EntropyCoef(), optax.adam(c.learning_rate)
        start = replaced(entropy.init(key)["params"], {})
        states["entropy"] = code.TrainState.create(apply_fn=entropy.apply, params=start, tx=adam)
        for i, batch in enumerate(batches()):
            columns = [batch[n] for n in ("observations", "actions", "next_observations")]
            data = code.ReplayBufferSamplesNp(*columns, 1.0 - batch["masks"], batch["rewards"])
            delayed = flax.core.FrozenDict({0: True} if i % 3 == 2 else {})
            arguments = (True, False, False, c.discount, 1.0, -float(ACTION), 1, data, delayed)
            with shared_noise():
                losses = ours.update(batch)
                *after, _, expected = code.SAC._train(
                    *arguments, states["critic"], states["actor"], states["entropy"], key, jax.numpy.min
                )
            states = dict(zip(("critic", "actor", "entropy"), after, strict=True))
            pairs = {"critic": (losses["critic/loss"], 2.0 * expected["critic_loss"])}
            if delayed:
                pairs["actor"] = losses["actor/loss"], expected["actor_loss"]
            outcome.losses.append({name: (a, float(b)) for name, (a, b) in pairs.items()})
        for name in modules:
            outcome.parameters |= compared(name, weights(ours, name), states[name].params)
            outcome.parameters |= compared(f"{name} statistics", statistics(ours, name), states[name].batch_stats)
        log = {"log_ent_coef": ours.state.params["entropy"]["log"].numpy()}
        outcome.parameters |= compared("entropy", log, states["entropy"].params)
    return outcome
