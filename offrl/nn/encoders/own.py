"""Encoders of images and several streams inside each network (encoder.trained_by=own), as OGBench has them (arXiv
2410.20092).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.nn.custom.networks import with_own_networks
from offrl.nn.encoders.streams import ENCODER, OWN, StreamEncoder, Streams, make_encoder
from offrl.nn.ensemble import Pairs
from offrl.nn.mlp import Layers
from offrl.optim import Params
from offrl.tasks.entries import VECTOR

ENCODER_PART = ".encoder."  # in the names of an encoder's parameters inside a network


class RawStreams(Streams):
    """All numbers of an observation side by side, as networks with an encoder of their own take it."""

    def __init__(self, spec: DataSpec) -> None:
        super().__init__(spec)
        vector = {VECTOR: (spec.window_dim,)} if spec.window_dim else {}
        self.shapes = vector | {s.name: self.stacks.get(s.name, s.shape) for s in spec.streams}
        self.sizes = [math.prod(shape) for shape in self.shapes.values()]

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """{stream: [..., *shape]} -> [..., R]."""
        parts = [observations[n].flatten(-len(shape)) for n, shape in self.shapes.items()]
        return torch.cat([part if part.is_floating_point() else part.float() for part in parts], -1)

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """The observations of [..., R]."""
        parts = zip(self.shapes.items(), x.split(self.sizes, -1), strict=True)
        return {name: part.unflatten(-1, shape) for (name, shape), part in parts}


class EncodedLayer(nn.Module):
    """A network's own encoder, before its first layer: the network's inputs begin with `count` observations (a state
    and a goal are two), as `RawStreams` gives them.

    encoder.fusion late: each is encoded alone; early: images and numbers of all side by side, into one encoder of
    `count` times the width (OGBench, arXiv 2410.20092).
    """

    def __init__(self, spec: DataSpec, count: int, layer: nn.Module) -> None:
        super().__init__()
        assert spec.encoder is not None
        self.count, self.early, self.raw = count, spec.encoder.fusion == "early", RawStreams(spec)
        self.encoder = StreamEncoder(_side_by_side(spec, count) if self.early else spec)
        self.layer = layer

    def forward(self, x: Tensor | Pairs) -> Tensor:
        """x [..., count * R + N] -> what the layer makes of [..., count * width + N]."""
        if isinstance(x, Pairs):
            return self.layer(Pairs(self.encoded(x.states), x.actions))
        size = self.count * sum(self.raw.sizes)
        return self.layer(torch.cat([self.encoded(x[..., :size]), x[..., size:]], -1))

    def encoded(self, x: Tensor) -> Tensor:
        """The vectors [..., count * width] of observations [..., count * R]."""
        observations = self.raw.split(x.unflatten(-1, (self.count, -1)))
        if not self.early:
            return self.encoder(observations).flatten(-2)
        # the channels of images, and the numbers of vectors
        joined = {n: x.movedim(-len(self.raw.shapes[n]) - 1, -2).flatten(-2) for n, x in observations.items()}
        return self.encoder(joined)


def _side_by_side(spec: DataSpec, count: int) -> DataSpec:
    """The specification of `count` observations in one, as one encoder of them all takes them."""
    assert spec.encoder is not None
    return replace(
        spec,
        frames=spec.frames * count,
        observation_shape=(spec.window_dim * count,),
        history=1,
        history_actions=0,
        streams=tuple(s if s.image else replace(s, shape=(math.prod(s.shape) * count,)) for s in spec.streams),
        encoder=replace(spec.encoder, width=spec.encoder.width * count),
    )


class Builder(Protocol):
    """An algorithm, as far as its networks are built here."""

    config: Any
    spec: DataSpec  # as its networks see it, behind an encoder
    data_spec: DataSpec
    traits: Any

    def modules(self) -> dict[str, nn.Module]: ...


def with_encoders(builder: Builder, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """These modules of an algorithm and, last, the encoder before them all. Where each network has an encoder of its
    own, that is `RawStreams`, and the networks are built again for vectors of one more number: the inputs that a
    network then has more tell how many observations it sees.

    builder: a copy of the algorithm, which is changed. Raises UserError for own encoders of an algorithm with networks
    of another form.
    """
    spec = builder.data_spec
    assert spec.encoder is not None
    if spec.encoder.trained_by != OWN:
        return {**modules, ENCODER: make_encoder(spec)}
    if spec.encoder.learning_rate is not None:
        raise UserError("encoder.learning_rate= is of one encoder for all networks: not with encoder.trained_by=own")
    builder.spec = replace(builder.spec, observation_shape=(spec.encoder.width + 1,))
    wider = with_own_networks(builder.config, builder.modules())
    fits = builder.traits.own_encoders
    for module, other in zip(modules.values(), wider.values(), strict=True):
        shapes = {key: p.shape for key, p in other.named_parameters()}
        changed = {key for key, p in module.named_parameters() if p.shape != shapes[key]}
        for path, network in list(module.named_modules()):
            weight = f"{path}.layers.0.weight".removeprefix(".")
            if isinstance(network, Layers) and weight in changed:
                first = network.layers[0]
                count = shapes[weight][1] - first.get_parameter("weight").shape[1]
                network.layers[0] = EncodedLayer(spec, count, first)
                changed.remove(weight)
        fits = fits and not changed
    if not fits:
        raise UserError(
            f"encoder.trained_by=own: not every network of {builder.config.name} is a multi-layer perceptron that "
            "observations enter first; leave it out, for one encoder of all networks"
        )
    return {**modules, ENCODER: RawStreams(spec)}


def members(params: Params, index: Tensor | slice) -> Params:
    """The parameters of some of an ensemble's networks, and of the encoder before them all."""
    return {key: value if ENCODER_PART in key else value[index] for key, value in params.items()}


def initial_params(modules: Mapping[str, nn.Module], encoder: Params) -> dict[str, Params]:
    """Copies of these modules' parameters, with those of a pretrained encoder in the place of each encoder's; encoder
    {}: as the modules were made.
    """

    def copied(path: str, value: Tensor) -> Tensor:
        return encoder.get(path.partition(ENCODER_PART)[2], value).detach().clone()

    return {name: {k: copied(f".{name}.{k}", v) for k, v in m.named_parameters()} for name, m in modules.items()}
