"""offrl's training step: the same algorithms, sizes and data as the others, as `offrl train` runs them between two
evaluations.
"""

from __future__ import annotations

import numpy as np
import torch
from peers import common, flops, plain
from peers.common import BATCH, EPISODE, RETURN_SCALE, Arrays
from peers.ensemble import Ensemble, EnsembleConfig
from peers.runner import Runner, make, synthetic

from offrl import rng
from offrl.algorithm import Algorithm, select, stack
from offrl.families.goal_conditioned import GoalConditioned
from offrl.families.sequence import SequenceModel
from offrl.system import backend

MODE = ("--mode", {"default": "eager", "choices": ["eager", "compiled"]})
ALGO = ("--algo", {"required": True})
FIRST_SEED = ("--first-seed", {"type": int, "default": 0, "help": "a second process has other seeds"})
SETTINGS = {
    "dt": {
        "activation": "gelu",
        "max_timestep": EPISODE,
        "return_scale": RETURN_SCALE,
    },  # GELU as in the code of others
    "qc": {"actor_type": "distil"},
}
# settings without randomness in the update, for a check; and with a warm-up after which the weights have moved
QUIET = {"td3_bc": {"policy_noise": 0.0}, "rebrac": {"policy_noise": 0.0}, "dt": {"dropout": 0.0, "warmup_steps": 3}}
# their random numbers are replaced by `plain.zeros` and `plain.spread`, in a check on both sides
DRAWN = ("cql", "edac", "fql", "qc")
COMPARED = ("loss", "penalty", "alignment")  # metrics that end so are compared


def build(name: str, rows: int, settings: dict | None = None):
    """The algorithm, or the bare ensemble, and its data."""
    dataset = synthetic(rows)
    if name == "ensemble":
        return Ensemble(EnsembleConfig(), dataset.spec), dataset
    return make(name, dataset, {**SETTINGS.get(name, {}), **(settings or {})}), dataset


def batch_size(name: str) -> int:
    return flops.BATCHES.get(name, BATCH)


def weights_of(algorithm: Algorithm, seed: int) -> Arrays:
    """A seed's initial weights under the names of `common.load_check`."""
    arrays: Arrays = {}
    for net, params in algorithm.init(seed).params.items():
        if isinstance(algorithm, (SequenceModel, GoalConditioned)):
            arrays |= {f"{net}/{name}": value.numpy() for name, value in params.items()}
            continue
        layers = sorted(
            {k.rpartition(".")[0] for k in params if k.endswith("weight")}, key=lambda k: (k.endswith("head"), k)
        )
        for i, layer in enumerate(layers):
            w, b = params[layer + ".weight"].numpy(), params[layer + ".bias"].numpy()
            if net == "critic":
                for member in range(len(w)):
                    arrays[f"{net}{member}/w{i}"], arrays[f"{net}{member}/b{i}"] = w[member], b[member, 0]
            elif net == "model":
                arrays[f"{net}/w{i}"], arrays[f"{net}/b{i}"] = w, b
            else:
                arrays[f"{net}/w{i}"], arrays[f"{net}/b{i}"] = w.T, b
    return arrays


def check(name: str, path) -> list[dict[str, float]]:
    """Write weights and batches for the others to `path`, and return the losses that offrl has with them."""
    algorithm, dataset = build(name, 2_000, QUIET.get(name))
    if name in DRAWN:
        rng.normal = lambda key, shape: plain.zeros(shape)  # type: ignore[assignment]
        rng.uniform = lambda key, shape, low=0.0, high=1.0: plain.spread(shape)  # type: ignore[assignment]
    sampler = algorithm.sampler()
    source = sampler.prepare(dataset)
    batches = [sampler(source, rng.make_key(i), batch_size(name)) for i in range(common.CHECKED_UPDATES)]
    common.save_check(path, weights_of(algorithm, 0), [{k: v.numpy() for k, v in b.items()} for b in batches])
    return losses_of(algorithm, batches)


def losses_of(algorithm: Algorithm, batches: list[dict[str, torch.Tensor]]) -> list[dict[str, float]]:
    """The losses of the first updates of seed 0 with these batches."""
    state, seen = select(stack([algorithm.init(0)]), 0), []
    for i, batch in enumerate(batches):
        state, metrics = algorithm.update(state, batch, rng.make_key(i), phase=i % algorithm.traits.period)
        seen.append({k: float(v) for k, v in metrics.items() if k.endswith(COMPARED)})
    return seen


def main() -> None:
    options = common.options(ALGO, MODE, FIRST_SEED)
    note = backend.configure(torch.device("cpu"), 1)
    np.random.seed(0)
    if options.check:
        common.report(losses=check(options.algo, options.check))
        return
    algorithm, dataset = build(options.algo, options.rows)
    seeds = range(options.first_seed, options.first_seed + options.replicas)
    runner = Runner(algorithm, dataset, seeds=seeds, mode=options.mode, batch_size=batch_size(options.algo))
    common.serve(runner.updates, common.CHUNKS.get(options.algo, 20), note=f"{note}; torch {torch.__version__}")


if __name__ == "__main__":
    main()
