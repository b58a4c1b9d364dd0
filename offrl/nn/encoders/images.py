"""Image encoders: [*, H, W, C] in 0..255 -> [*, F].

Images are HWC everywhere else; an encoder alone permutes and scales them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl.errors import UserError, nearest
from offrl.nn.encoders.pooling import max_pool
from offrl.nn.mlp import Linear, gelu_tanh, initialise
from offrl.system.plugins.loading import object_of

Shape = tuple[int, int, int]  # height, width, channels: those of all stacked frames


class ImageEncoder(nn.Module, ABC):
    """Images [*, H, W, C], uint8 or float, in 0..255 -> features [*, F]."""

    features: int  # F
    smallest: ClassVar[int] = 1  # height and width that it takes, in pixels
    largest: ClassVar[int] = 4096

    def forward(self, images: Tensor) -> Tensor:
        flat = self.encode(images.reshape(-1, *images.shape[-3:]))
        return flat.reshape(*images.shape[:-3], self.features)

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """[B, H, W, C] in 0..255 -> [B, F], or what has as many numbers."""


def scaled(images: Tensor) -> Tensor:
    """[B, H, W, C] in 0..255 -> [B, C, H, W] in 0..1. The numbers stay where they lay: convolutions and pooling are
    as fast with channels last, or faster."""
    images = images.permute(0, 3, 1, 2)
    return (images if images.is_floating_point() else images.float()) / 255.0


class DrQ(ImageEncoder):
    """DrQ-v2's (Yarats et al., arXiv 2107.09645): four convolutions 3x3 of 32 channels, the first with stride 2, each
    with ReLU; weights orthogonal with gain sqrt(2). Images are scaled to -0.5..0.5.
    """

    smallest = 15

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        height, width, channels = shape
        layers = [nn.Conv2d(32 if i else channels, 32, 3, 1 if i else 2) for i in range(4)]
        for layer in layers:
            initialise(layer.weight, layer.bias, "orthogonal")
        self.layers = nn.ModuleList(layers)
        self.features = 32 * ((height - 3) // 2 - 5) * ((width - 3) // 2 - 5)

    def encode(self, images: Tensor) -> Tensor:
        x = scaled(images) - 0.5
        for layer in self.layers:
            x = F.relu(layer(x))
        return x


class Convolutions(ImageEncoder):
    """Four convolutions of 32 channels. Images are scaled to -0.5..0.5."""

    sizes: ClassVar[Sequence[tuple[int, int]]]  # edge and stride of each

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        height, width, channels = shape
        self.layers = nn.ModuleList(nn.Conv2d(32 if i else channels, 32, *size) for i, size in enumerate(self.sizes))
        for edge, stride in self.sizes:
            height, width = ((n - edge) // stride + 1 for n in (height, width))
        self.features = 32 * height * width


class TDMPC2Convolutions(Convolutions):
    """TD-MPC2's (Hansen et al., arXiv 2310.16828): ReLU between convolutions, weights as torch makes them."""

    smallest, sizes = 39, ((7, 2), (5, 2), (3, 2), (3, 1))

    def encode(self, images: Tensor) -> Tensor:
        x = scaled(images) - 0.5
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x)


class MRQConvolutions(Convolutions):
    """MR.Q's (Fujimoto et al., arXiv 2501.16142): ELU after each convolution; weights Xavier-uniform with ReLU's gain,
    biases 0.
    """

    smallest, sizes = 31, ((3, 2), (3, 2), (3, 2), (3, 1))

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        for layer in cast(list[nn.Conv2d], self.layers):
            initialise(layer.weight, layer.bias, "xavier_relu")

    def encode(self, images: Tensor) -> Tensor:
        x = scaled(images) - 0.5
        for layer in self.layers:
            x = F.elu(layer(x))
        return x


class PreactivationBlock(nn.Module):
    """x [B, C, H, W] -> x plus two convolutions 3x3 of it, ReLU before each."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.relu(self.first(F.relu(x))))


class Impala(ImageEncoder):
    """IMPALA's (Espeholt et al., arXiv 1802.01561) as in OGBench (arXiv 2410.20092): for each of `stacks` a convolution
    3x3 of so many channels, `max_pool`, and `blocks` residual blocks; ReLU, a linear layer of width `hidden`, GELU.

    All weights Xavier-uniform, biases 0. Images are scaled to 0..1. Features are flattened channel by channel; OGBench
    flattens pixel by pixel.
    """

    smallest = 8

    def __init__(
        self, shape: Shape, *, stacks: Sequence[int] = (16, 32, 32), blocks: int = 2, hidden: int = 512
    ) -> None:
        super().__init__()
        self.entries = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairwise([shape[2], *stacks]))
        self.blocks = nn.ModuleList(nn.Sequential(*(PreactivationBlock(o) for _ in range(blocks))) for o in stacks)
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                initialise(layer.weight, layer.bias, "xavier")
        height, width = (-(-n // 2 ** len(stacks)) for n in shape[:2])
        self.head = Linear(stacks[-1] * height * width, hidden, "xavier")
        self.features = hidden

    def encode(self, images: Tensor) -> Tensor:
        x = scaled(images)
        for entry, blocks in zip(self.entries, self.blocks, strict=True):
            x = blocks(max_pool(entry(x), same=True))
        return gelu_tanh(self.head(F.relu(x).flatten(1)))


class Dreamer(ImageEncoder):
    """DreamerV3's (Hafner et al., arXiv 2301.04104, and its code of 2026): four times a convolution 5x5 of `depth` *
    (2, 3, 4, 4) channels, the largest of 2x2 pixels, RMS normalisation over the channels, SiLU. Three times where that
    would leave fewer than 3 pixels along an edge; an odd size loses its last row or column.

    Weights: a normal distribution cut off at two standard deviations, of variance 1 / inputs; biases 0. Images are
    scaled to -0.5..0.5. depth 16 is that of its size of 12 million parameters.
    """

    smallest, largest = 24, 271  # which leave 3 to 16 pixels along an edge

    def __init__(self, shape: Shape, *, depth: int = 16) -> None:
        super().__init__()
        height, width, channels = shape
        stages = 4 if min(height, width) >= 48 else 3
        sizes = [channels, *(depth * m for m in (2, 3, 4, 4)[:stages])]
        layers = [nn.Conv2d(i, o, 5, padding=2) for i, o in pairwise(sizes)]
        for layer in layers:
            deviation = 1.1368 * layer.weight[0].numel() ** -0.5  # before it is cut off, which narrows it
            nn.init.trunc_normal_(layer.weight, 0.0, deviation, -2.0 * deviation, 2.0 * deviation)
            nn.init.zeros_(cast(Tensor, layer.bias))
        self.layers = nn.ModuleList(layers)
        self.scales = nn.ParameterList(torch.ones(o) for o in sizes[1:])
        self.features = sizes[-1] * (height >> stages) * (width >> stages)

    def encode(self, images: Tensor) -> Tensor:
        x = scaled(images) - 0.5
        for layer, scale in zip(self.layers, self.scales, strict=True):
            height, width = (n // 2 for n in x.shape[-2:])
            y = layer(x)[..., : 2 * height, : 2 * width]
            y = y.unflatten(-1, (width, 2)).unflatten(-3, (height, 2)).amax((-3, -1)).float()
            x = F.silu(scaled_channels(y, scale))
        return x


def scaled_channels(x: Tensor, scale: Tensor) -> Tensor:
    """x [B, C, H, W] divided by the root mean square over its channels, times scale [C]."""
    return x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-4) * scale[:, None, None]


class NormedConvolution(nn.Module):
    """A convolution without bias, and group normalisation of 16 channels each: [B, I, H, W] -> [B, O, H', W']."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
        nn.init.kaiming_normal_(self.convolution.weight, mode="fan_out", nonlinearity="relu")
        self.scale, self.shift = nn.Parameter(torch.ones(outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x)
        # not F.group_norm: its rule under vmap copies each member
        grouped = y.unflatten(1, (-1, 16)).flatten(2)
        y = F.layer_norm(grouped, grouped.shape[-1:], eps=1e-5).reshape(y.shape)
        return y * self.scale[:, None, None] + self.shift[:, None, None]


class BasicBlock(nn.Module):
    """Two convolutions 3x3 plus the input, or a convolution 1x1 of it where sizes differ; ReLU after both."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = NormedConvolution(inputs, outputs, 3, stride)
        self.second = NormedConvolution(outputs, outputs, 3, 1)
        self.skip = NormedConvolution(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(F.relu(self.first(x)))
        return F.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet18(ImageEncoder):
    """The residual network of 18 layers (He et al., arXiv 1512.03385) with group normalisation in place of batch
    normalisation and without its last layer, as Diffusion Policy trains it (Chi et al., arXiv 2303.04137): the mean
    over all pixels of 512 channels.

    Weights by Kaiming's rule for ReLU (outputs). Images are scaled to -1..1.
    """

    smallest = 32
    features = 512

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.entry = NormedConvolution(shape[2], 64, 7, 2)
        self.blocks = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        for inputs, outputs in pairwise((64, 128, 256, 512)):
            self.blocks.extend([BasicBlock(inputs, outputs, 2), BasicBlock(outputs, outputs, 1)])

    def encode(self, images: Tensor) -> Tensor:
        x = F.relu(self.entry(2.0 * scaled(images) - 1.0))
        return self.blocks(max_pool(x, same=False)).mean((-2, -1))


class OwnEncoder(ImageEncoder):
    """A person's module: images [B, H, W, C] as they are -> [B, F]."""

    def __init__(self, name: str, shape: Shape) -> None:
        super().__init__()
        where = f"encoder={name}"
        module = object_of(name, "encoder")(shape)
        if not isinstance(module, nn.Module):
            raise UserError(f"{where} made a {type(module).__name__} of {shape}; a torch.nn.Module is due")
        if names := [buffer for buffer, _ in module.named_buffers()]:
            raise UserError(
                f"{where}: its module has the buffer {names[0]} (as BatchNorm has); updates are pure, so only "
                "parameters may change"
            )
        size = list(module(torch.zeros(2, *shape, dtype=torch.uint8)).shape)
        if len(size) != 2 or size[0] != 2:
            raise UserError(f"{where} turns images {[2, *shape]} into {size}; [2, features] is due")
        self.module, self.features = module, size[1]

    def encode(self, images: Tensor) -> Tensor:
        return self.module(images)


IMAGE_ENCODERS: dict[str, tuple[type[ImageEncoder], dict[str, Any]]] = {
    "drq": (DrQ, {}),
    "impala": (Impala, {}),
    "impala_small": (Impala, {"blocks": 1}),
    "impala_large": (Impala, {"stacks": (64, 128, 128), "hidden": 1024}),
    "resnet18": (ResNet18, {}),
    "dreamer": (Dreamer, {}),
    "tdmpc2": (TDMPC2Convolutions, {}),
    "mrq": (MRQConvolutions, {}),
}


def make_image_encoder(name: str, shape: Shape, **options: Any) -> ImageEncoder:
    """One of `IMAGE_ENCODERS` with further options, or file.py:NAME, a function of `shape` in a plugin that makes a
    torch.nn.Module (images [B, H, W, C] uint8 -> [B, F]).

    Raises UserError for a name that is not known, images that it does not take, and a module that does not fit.
    """
    if ".py:" in name:
        return OwnEncoder(name, shape)
    if name not in IMAGE_ENCODERS:
        raise UserError(
            f"encoder={name} is not known.{nearest(name, IMAGE_ENCODERS)} There are {', '.join(IMAGE_ENCODERS)}, and "
            "file.py:NAME for one of your own"
        )
    kind, form = IMAGE_ENCODERS[name]
    height, width, _ = shape
    small, large = kind.smallest, kind.largest
    if min(height, width) < small or max(height, width) > large:
        size = small if min(height, width) < small else large
        raise UserError(
            f"encoder={name} takes images from {small}x{small} to {large}x{large} pixels, and these are "
            f"{height}x{width}: say dataset.image_size=[{size},{size}], or take another encoder"
        )
    return kind(shape, **form, **options)
