"""The encoder that stands before an algorithm where observations are images or several streams: one vector of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.data.dataset import DataSpec
from offrl.data.samplers.tables import Batch
from offrl.errors import UserError, nearest
from offrl.nn.encoders.images import make_image_encoder
from offrl.nn.encoders.shift import random_shift
from offrl.nn.recurrent import GRU
from offrl.tasks.entries import VECTOR

ENCODER = "encoder"  # the module before the others
OWN = "own"  # `encoder.trained_by`: each network trains an encoder of its own
SHIFTS = 90_001  # folded into an update's key for the random shifts of images
Z = "observations of the encoder"  # beside a module's parameters while their gradients are taken


class Streams(nn.Module):
    """What makes one tensor of observations of several streams."""

    def __init__(self, spec: DataSpec) -> None:
        """Raises UserError for images smaller than they are shifted."""
        super().__init__()
        assert spec.encoder is not None
        self.shift = spec.encoder.shift
        self.stacks = {s.name: (s.shape[0], s.shape[1], s.shape[2] * spec.frames) for s in spec.streams if s.image}
        if self.shift >= (edge := min((min(s[:2]) for s in self.stacks.values()), default=self.shift + 1)):
            raise UserError(f"encoder.shift={self.shift} leaves nothing of images of {edge} pixels; DrQ-v2 has 4 of 84")

    def shifted(self, observations: Mapping[str, Tensor], key: Tensor, together: bool = False) -> dict[str, Tensor]:
        """The same observations with each image shifted by up to `shift` pixels, drawn apart for each [..., H, W, C].
        together: for each window [B, K, H, W, C].
        """
        if not self.shift:
            return dict(observations)
        keys = dict(zip(self.stacks, rng.split(key, max(1, len(self.stacks))), strict=False))
        return {n: random_shift(x, keys[n], self.shift, together) if n in keys else x for n, x in observations.items()}


class StreamFeatures(Streams):
    """The features of each image, and the numbers of the vector and of rows of tables."""

    def __init__(self, spec: DataSpec, **options: Any) -> None:
        """options: of the image encoder. Raises UserError for images smaller than it takes, or than they are
        shifted."""
        super().__init__(spec)
        assert spec.encoder is not None
        images = [make_image_encoder(spec.encoder.name, shape, **options) for shape in self.stacks.values()]
        self.images = nn.ModuleList(images)
        self.features = sum(module.features for module in images)
        self.numbers = sum(math.prod(s.shape) for s in spec.streams if not s.image) + spec.window_dim

    def image_features(self, observations: Mapping[str, Tensor]) -> list[Tensor]:
        """{stream: [..., H, W, C] uint8} -> the features of each image, [..., F]."""
        return [module(observations[name]) for name, module in zip(self.stacks, self.images, strict=True)]

    def vectors(self, observations: Mapping[str, Tensor]) -> list[Tensor]:
        """The vector and the rows of tables, [..., L] each."""
        return [x for name, x in observations.items() if name not in self.stacks]

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """{stream: [..., H, W, C] uint8 or [..., L]} -> all of them side by side, [..., features + numbers]."""
        return torch.cat([*self.image_features(observations), *self.vectors(observations)], -1)


class StreamNetwork(StreamFeatures):
    """A network behind the features and numbers of streams."""

    def __init__(self, spec: DataSpec, make: Callable[[int], nn.Module]) -> None:
        """make: the network for so many inputs."""
        super().__init__(spec)
        self.head = make(self.features + self.numbers)

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """{stream: [..., H, W, C] uint8 or [..., L]} -> what the network makes of them."""
        return self.head(super().forward(observations))


def observation_network(spec: DataSpec, make: Callable[[int], nn.Module]) -> nn.Module:
    """`make(inputs)` for observations that are vectors, and the same behind the features of streams."""
    return StreamNetwork(spec, make) if spec.streams else make(spec.observation_dim)


def shifted_windows(network: nn.Module, batch: Batch, key: Tensor, together: bool = False) -> Batch:
    """A batch [B, K] with its images shifted, where `network` reads some; see `Streams.shifted`. key: of the update."""
    if not isinstance(network, Streams):
        return batch
    observations: Any = batch["observations"]
    return {**batch, "observations": network.shifted(observations, rng.fold_in(key, SHIFTS), together)}  # type: ignore[dict-item]


class StreamEncoder(StreamFeatures):
    """z = tanh(LayerNorm(W [features of each image, vector, rows of tables])): the trunk of DrQ-v2 (arXiv
    2107.09645).
    """

    def __init__(self, spec: DataSpec) -> None:
        super().__init__(spec)
        assert spec.encoder is not None
        inputs, width = self.features + self.numbers, spec.encoder.width
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.LayerNorm(width), nn.Tanh())

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """{stream: [..., H, W, C] uint8 or [..., L]} -> [..., width]."""
        return self.trunk(super().forward(observations))


class WindowEncoder(Streams):
    """z = tanh(LayerNorm(W [o_t, h])) of a window: h is the state of a GRU over its steps, each an observation and the
    action before it, as in recurrent model-free learning (Ni et al., arXiv 2110.05038). Of the longer of observations
    and actions the oldest steps lack the other, which is 0 there.
    """

    def __init__(self, spec: DataSpec) -> None:
        super().__init__(spec)
        assert spec.encoder is not None
        width, self.numbers, self.actions = spec.encoder.width, spec.observation_dim, spec.encoded_action_dim
        self.history = spec.history
        self.gru = GRU(self.numbers + self.actions * (spec.history_actions > 0), width)
        self.trunk = nn.Sequential(nn.Linear(self.numbers + width, width), nn.LayerNorm(width), nn.Tanh())

    def forward(self, observations: Mapping[str, Tensor]) -> Tensor:
        """{"vector": [..., W]} -> [..., width]."""
        numbers = observations[VECTOR]
        split = self.history * self.numbers
        steps = numbers[..., :split].unflatten(-1, (self.history, self.numbers))
        newest = steps[..., -1, :]
        if numbers.shape[-1] > split:
            actions = numbers[..., split:].unflatten(-1, (-1, self.actions))
            count = max(self.history, actions.shape[-2])
            parts = (F.pad(x, (0, 0, count - x.shape[-2], 0)) for x in (steps, actions))
            steps = torch.cat(list(parts), -1)
        h = self.gru(steps.flatten(0, -3)).unflatten(0, steps.shape[:-2])
        return self.trunk(torch.cat([newest, h], -1))


def make_encoder(spec: DataSpec) -> Streams:
    """The encoder of `spec.encoder` for these observations."""
    return StreamEncoder(spec) if spec.streams else WindowEncoder(spec)


@dataclass(frozen=True)
class EncodedBatch:
    """What the encoder made of the observations of a batch, while an update runs."""

    z: Tensor  # [B, Z]
    module: str  # whose loss trains the encoder
    pull: Callable[[Tensor], dict[str, Tensor]]  # the gradient of its parameters from that of z


def encoded_spec(spec: DataSpec, observations: str) -> DataSpec:
    """The specification as modules see it: the encoder's vector, or the window, is the observation; `spec` without
    them, and where `observations` (see `Traits`) says streams.
    """
    if (spec.encoder is None and not spec.windowed) or observations == "streams":
        return spec
    return replace(
        spec,
        observation_shape=(spec.window_dim if spec.encoder is None else spec.encoder.width,),
        observation_columns=(),
        observation_mean=None,
        observation_std=None,
        streams=(),
        frames=1,
        history=1,
        history_stride=1,
        history_actions=0,
        encoder=None,
    )


def trained_by(spec: DataSpec, modules: Collection[str]) -> str:
    """The module whose loss trains the encoder, of an algorithm with these; `OWN`: each trains its own; "": none does.
    Raises UserError where there is none of the name that the settings give, and for V beside Q: V's loss is least where
    the encoder, and so Q, is constant.
    """
    assert spec.encoder is not None
    module, names = spec.encoder.trained_by, [name for name in modules if name != ENCODER]
    if module == OWN:
        return OWN
    if spec.encoder.fusion == "early":
        raise UserError("encoder.fusion=early is of encoders of the networks' own: encoder.trained_by=own")
    if module == "auto":
        return next((name for name in ("critic", "value", "actor") if name in names), names[0])
    if module == "none":
        return ""
    if module not in names:
        raise UserError(
            f"encoder.trained_by={module}: the modules are {', '.join(names)}; or own, none."
            f"{nearest(module, [*names, OWN])}"
        )
    if module == "value" and "critic" in names:
        raise UserError(
            "encoder.trained_by=value: V is fitted to Q, both of what the encoder makes, and no reward keeps the "
            "encoder from making the same of all images: critic, actor or own"
        )
    return module


def with_observations(loss_fn: Callable[..., Any], name: str, z: Tensor, x: Sequence[Any]) -> Callable[..., Any]:
    """The loss of the module `name` as a function of the encoded observations too, which are the entry Z of its
    parameters.
    """
    leaves, tree = pytree.tree_flatten(x)
    at = {i for i, leaf in enumerate(leaves) if leaf is z}
    if not at:
        raise UserError(
            f"encoder.trained_by={name}: its loss is not given the batch's observations as they are; name another one"
        )

    def loss(params: Mapping[str, Tensor], state: Any, *_: Any) -> Any:
        parameters = {key: value for key, value in params.items() if key != Z}
        filled = [params[Z] if i in at else leaf for i, leaf in enumerate(leaves)]
        return loss_fn(parameters, state, *pytree.tree_unflatten(filled, tree))

    return loss
