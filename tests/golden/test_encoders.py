"""Image encoders and the random shift against float64 NumPy, initial weights, replicas, sizes, ONNX."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from offrl import rng
from offrl.errors import UserError
from offrl.nn.encoders.images import (
    IMAGE_ENCODERS,
    ImageEncoder,
    make_image_encoder,
)
from offrl.nn.encoders.pooling import max_pool, ordered_max_pool
from offrl.nn.encoders.shift import random_shift
from offrl.system.plugins import loading
from tests.support.reference import images as reference

Reference = Callable[[dict[str, np.ndarray], np.ndarray], np.ndarray]


def encoder(name: str, shape: tuple[int, int, int], seed: int = 0) -> ImageEncoder:
    """With biases and scales that are not those it starts with."""
    torch.manual_seed(seed)
    made = make_image_encoder(name, shape)
    for p in made.parameters():
        if p.ndim == 1:
            p.data += 0.2 * torch.randn_like(p)
    return made


def pictures(*shape: int, seed: int = 0) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8))


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("drq", (17, 20, 6), reference.drq),
        ("impala_small", (16, 16, 3), reference.impala),
        ("impala_small", (21, 13, 3), reference.impala),
        ("impala", (22, 11, 1), reference.impala),
        ("impala_large", (8, 9, 3), reference.impala),
        ("resnet18", (32, 37, 3), reference.resnet18),
        ("dreamer", (24, 27, 3), reference.dreamer),
        ("dreamer", (48, 50, 1), reference.dreamer),
        ("tdmpc2", (39, 44, 3), reference.tdmpc2),
        ("mrq", (31, 40, 3), reference.mrq),
    ],
)
def test_features_equal_numpy(name: str, shape: tuple[int, int, int], expected: Reference) -> None:
    made, images = encoder(name, shape), pictures(2, *shape)
    params = {k: v.detach().numpy().astype(np.float64) for k, v in made.named_parameters()}
    features = made(images).detach()
    assert features.shape == (2, made.features)
    np.testing.assert_allclose(features, expected(params, images.numpy().astype(np.float64)), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", IMAGE_ENCODERS)
def test_any_leading_axes_and_floats(name: str) -> None:
    made, images = encoder(name, (40, 40, 3)), pictures(2, 3, 40, 40, 3)
    features = made(images)
    assert features.shape == (2, 3, made.features)
    torch.testing.assert_close(features[1, 2], made(images[1, 2]), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(features, made(images.float()), rtol=0.0, atol=0.0)


def test_numbers_of_features_and_parameters() -> None:
    """Features as published, parameters of ResNet-18 as torchvision's less its last layer (11,689,512 - 513,000)."""
    sizes = {(name, n): make_image_encoder(name, (n, n, 3)) for name in ("drq", "dreamer") for n in (32, 64)}
    features = {key: made.features for key, made in sizes.items()}
    assert features == {("drq", 32): 2592, ("drq", 64): 20_000, ("dreamer", 32): 1024, ("dreamer", 64): 1024}
    assert make_image_encoder("drq", (84, 84, 9)).features == 39_200
    # three stages, then four
    assert [make_image_encoder("dreamer", (n, 64, 3)).features for n in (47, 48)] == [64 * 5 * 8, 64 * 3 * 4]
    assert make_image_encoder("tdmpc2", (64, 64, 9)).features == 512  # TD-MPC2's latent state
    assert make_image_encoder("mrq", (84, 84, 9)).features == 1568
    resnet = make_image_encoder("resnet18", (32, 32, 3))
    assert sum(p.numel() for p in resnet.parameters()) == 11_176_512
    impala = make_image_encoder("impala_small", (64, 64, 3))
    assert impala.get_parameter("head.weight").shape == (512, 2048)


def matrices(made: nn.Module) -> list[Tensor]:
    return [p.detach().flatten(1) for p in made.parameters() if p.ndim > 1]


def test_initial_weights() -> None:
    torch.manual_seed(0)
    for weight in matrices(make_image_encoder("drq", (32, 32, 9))):
        rows = weight if weight.shape[0] <= weight.shape[1] else weight.T
        torch.testing.assert_close(rows @ rows.T, 2.0 * torch.eye(len(rows)), atol=1e-5, rtol=0.0)
    for weight in make_image_encoder("impala", (32, 32, 3)).parameters():
        if weight.ndim > 1:
            area = weight[0, 0].numel()
            limit = (6.0 / (area * (weight.shape[0] + weight.shape[1]))) ** 0.5
            assert 0.98 * limit < weight.abs().max() <= limit
            assert weight.detach().std() == pytest.approx(limit / 3**0.5, rel=0.07)
    for weight in matrices(make_image_encoder("dreamer", (64, 64, 3))):
        assert weight.abs().max() <= 2.0 * 1.1368 * weight.shape[1] ** -0.5
        assert weight.std() == pytest.approx(weight.shape[1] ** -0.5, rel=0.05)
    for layer in make_image_encoder("resnet18", (32, 32, 3)).modules():
        if isinstance(layer, nn.Conv2d):
            outputs = layer.weight[:, 0].numel()
            assert layer.weight.detach().std() == pytest.approx((2.0 / outputs) ** 0.5, rel=0.05)
    for weight in matrices(make_image_encoder("mrq", (32, 32, 9))):
        limit = (12.0 / (weight.shape[1] + 9 * weight.shape[0])) ** 0.5
        assert 0.98 * limit < weight.abs().max() <= limit
    for name in IMAGE_ENCODERS.keys() - {"tdmpc2"}:  # whose are torch's
        made = make_image_encoder(name, (32, 32, 3))
        constants = {k: set(p.tolist()) for k, p in made.named_parameters() if p.ndim == 1}
        assert all(values == {1.0 if "scale" in k else 0.0} for k, values in constants.items())


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("drq", (17, 16, 6)),
        ("impala_small", (11, 8, 3)),
        ("dreamer", (24, 25, 3)),
        pytest.param("resnet18", (32, 32, 3), marks=pytest.mark.nightly),
    ],
)
def test_replicas_equal_single_encoders(name: str, shape: tuple[int, int, int]) -> None:
    members = [encoder(name, shape, seed) for seed in range(2)]
    params = [{k: v.detach() for k, v in made.named_parameters()} for made in members]
    stacked = {k: torch.stack([p[k] for p in params]) for k in params[0]}
    images = pictures(2, 3, *shape)
    features = vmap(lambda p, x: functional_call(members[0], p, (x,)))(stacked, images)

    def loss(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(members[0], p, (x,)).square().mean()

    def gradients(p: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return vmap(grad(loss))(p, x)

    found = make_fx(gradients)(stacked, images)(stacked, images)
    for i, made in enumerate(members):
        torch.testing.assert_close(features[i], made(images[i]), rtol=1e-4, atol=1e-5)
        alone = grad(loss)(params[i], images[i])
        for k, g in alone.items():
            torch.testing.assert_close(found[k][i], g, rtol=1e-3, atol=1e-5 * float(g.abs().max()) + 1e-8)


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize(("height", "width"), [(1, 2), (3, 4), (8, 7), (9, 12)])
def test_pooling_for_gpus_equals_that_for_cpus(height: int, width: int, same: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, height, width)
    before = [n % 2 if same else 1 for n in (height, width)]
    expected = reference.largest(x.permute(0, 2, 3, 1).numpy(), same=same)
    for pool in (lambda x: max_pool(x, same=same), lambda x: ordered_max_pool(x, before)):
        np.testing.assert_array_equal(pool(x).permute(0, 2, 3, 1), expected)
    slope = torch.randn(pool(x).shape)
    left, right = (grad(lambda x, f=f: (f(x) * slope).sum())(x) for f in (pool, lambda x: max_pool(x, same=same)))
    torch.testing.assert_close(left, right)


def test_what_an_encoder_does_not_take() -> None:
    for name, (kind, _) in IMAGE_ENCODERS.items():
        n = kind.smallest
        assert make_image_encoder(name, (n, n, 3))(pictures(1, n, n, 3)).shape[0] == 1
        for shape in ((n - 1, n, 3), (n, n - 1, 3)):
            with pytest.raises(UserError, match=rf"encoder={name} .*these are {shape[0]}x{shape[1]}: .*\[{n},{n}\]"):
                make_image_encoder(name, shape)
    with pytest.raises(UserError, match=r"24x24 to 271x271 .*image_size=\[271,271\]"):
        make_image_encoder("dreamer", (64, 272, 3))
    with pytest.raises(UserError, match="Did you mean 'impala_small'"):
        make_image_encoder("impala-smal", (64, 64, 3))


PLUGIN = """
import torch

class Mean(torch.nn.Module):
    def __init__(self, shape):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(shape[2]))

    def forward(self, images):
        assert images.ndim == 4
        return images.float().mean((1, 2)) * self.scale

def with_buffer(shape):
    return torch.nn.BatchNorm2d(3)

def of_images(shape):
    return torch.nn.Identity()

def number(shape):
    return 3
"""


def test_encoder_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    with loading.scope():
        loading.typed(file)
        images = pictures(2, 3, 8, 9, 3)
        made = make_image_encoder("mine.py:Mean", (8, 9, 3))
        assert made.features == 3
        torch.testing.assert_close(made(images), images.float().mean((2, 3)))
        for name, message in {
            "with_buffer": "has the buffer running_mean",
            "of_images": r"turns images \[2, 8, 9, 3\] into \[2, 8, 9, 3\]; \[2, features\] is due",
            "number": "made a int of",
            "Man": "Did you mean 'Mean'",
        }.items():
            with pytest.raises(UserError, match=message):
                make_image_encoder(f"mine.py:{name}", (8, 9, 3))


def test_shifts_are_crops_of_the_image_padded_by_its_edge() -> None:
    image = pictures(6, 5, 2)
    options = [c.tobytes() for c in reference.crops(image.numpy(), 2)]
    shifted = random_shift(image.expand(40, 25, 6, 5, 2), rng.make_key(0), 2)
    assert shifted.dtype == torch.uint8
    counts = [0] * 25
    for crop in shifted.flatten(0, 1).numpy():
        counts[options.index(crop.tobytes())] += 1
    assert sum(counts) == 1000
    assert min(counts) > 15  # 40 are due, with a standard deviation of 6
    torch.testing.assert_close(random_shift(image, rng.make_key(0), 0), image, rtol=0, atol=0)


def test_each_replica_draws_its_own_shifts() -> None:
    images, keys = pictures(3, 4, 2, 9, 8, 3), torch.stack(rng.split(rng.make_key(1), 3))
    alone = torch.stack([random_shift(x, k, 3) for x, k in zip(images, keys, strict=True)])
    assert torch.equal(vmap(random_shift, (0, 0, None))(images, keys, 3), alone)
    shared = torch.stack([random_shift(images[0], k, 3) for k in keys])
    assert torch.equal(vmap(random_shift, (None, 0, None))(images[0], keys, 3), shared)
    assert not torch.equal(shared[0], shared[1])
    repeated = images[0, :, :1].expand(4, 2, 9, 8, 3)
    together, apart = (random_shift(repeated, keys[0], 3, alike) for alike in (True, False))
    assert torch.equal(together[:, 0], together[:, 1]) and not torch.equal(apart[:, 0], apart[:, 1])
    program = make_fx(lambda x, k: vmap(random_shift, (0, 0, None))(x, k, 3))(images, keys)
    assert torch.equal(program(images, keys), alone)


@pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning")
@pytest.mark.parametrize("name", ["drq", "impala_small"])
def test_onnx_gives_the_same_features(name: str) -> None:
    onnxruntime: Any = pytest.importorskip("onnxruntime")
    made, images = encoder(name, (21, 16, 3)), pictures(5, 21, 16, 3)
    program = torch.export.export(made, (images[:2],), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with contextlib.redirect_stdout(io.StringIO()):
        exported = torch.onnx.export(program, (), None, dynamo=True, input_names=["images"], opset_version=18)
    assert exported is not None
    data = exported.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"images": images.numpy()})[0], made(images).detach(), atol=1e-5)
