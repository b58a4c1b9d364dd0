"""Updates of algorithms whose observations an encoder makes a vector of."""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import Algorithm, TrainState, Update
from offrl.data.dataset import DataSpec
from offrl.data.samplers.transitions import Batch
from offrl.nn.encoders.streams import ENCODER, OWN, SHIFTS, EncodedBatch, encoded_spec
from offrl.optim import Params


def set_spec(algorithm: Algorithm, spec: DataSpec) -> None:
    """Take another specification of the same data, with what an environment says of them."""
    algorithm.data_spec, algorithm.spec = spec, encoded_spec(spec, algorithm.traits.observations)


def with_spec(algorithm: Algorithm, spec: DataSpec) -> Algorithm:
    """A copy of `algorithm` with another specification of the same data."""
    copied = copy.copy(algorithm)
    set_spec(copied, spec)
    return copied


def encoded_update(algorithm: Algorithm, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
    """`Algorithm.update` with the encoder's vectors in place of observations of several streams. Only the batch's own
    observations train it, with the loss of `encoder_module`; successors, goals and targets are constants, as in DrQ-v2
    (arXiv 2107.09645). With encoders of the networks' own the vectors are the raw numbers.
    """
    encoder, params = algorithm.encoder, state.params[ENCODER]
    assert encoder is not None
    streams: list[tuple[str, Any]] = [(name, x) for name, x in batch.items() if isinstance(x, dict)]
    observed = {n: encoder.shifted(x, rng.fold_in(key, SHIFTS + i)) for i, (n, x) in enumerate(streams)}
    if algorithm.encoder_module == OWN:
        raw = {name: algorithm.apply(ENCODER, params, x) for name, x in observed.items()}
        return algorithm.update(state, {**batch, **raw}, key, phase=phase)
    observations = observed.pop("observations")
    if algorithm.runtime.alone:
        leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
        with torch.enable_grad():
            graph = algorithm.apply(ENCODER, leaves, observations)
        z = graph.detach()

        def pull(gradient: Tensor) -> Params:
            return dict(zip(leaves, torch.autograd.grad(graph, list(leaves.values()), gradient), strict=True))
    else:
        z, vjp = cast(Any, torch.func.vjp)(lambda p: algorithm.apply(ENCODER, p, observations), params)

        def pull(gradient: Tensor) -> Params:
            return cast(Params, vjp(gradient)[0])

    vectors = {name: algorithm.apply(ENCODER, params, x) for name, x in observed.items()}
    algorithm.runtime.encoded = EncodedBatch(z, algorithm.encoder_module, pull)
    try:
        return algorithm.update(state, {**batch, **vectors, "observations": z}, key, phase=phase)
    finally:
        algorithm.runtime.encoded = None
