"""Kernels of our own: the same numbers as torch's, in every layout and shape, and where a traced update gets them."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from offrl.system import backend
from offrl.training.compiling import kernels
from tests.unit.test_passes import aten, count, simpler

OWN = ("gated", "dense")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    if not any(map(shutil.which, ("c++", "g++", "clang++"))):
        pytest.skip("there is no C++ compiler")
    assert kernels.native() is not None


def layouts(draw: torch.Generator, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Three times a random tensor of this shape: by rows, by columns, and by neither."""
    x = torch.randn(shape, generator=draw)
    return x, x.mT.contiguous().mT, torch.stack((x, x), -1)[..., 0]


def assert_near(ours: Tensor, exact: Tensor, depth: int) -> None:
    """Rounding of float32, in another order of sums; a term that is wrong or left out is of size 1."""
    assert ours.shape == exact.shape
    torch.testing.assert_close(ours.double(), exact, rtol=0.0, atol=2e-5 * depth**0.5)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(256, 256, 256), (1, 600, 7), (13, 11, 300), (100, 33, 65), (31, 64, 2), (5, 1, 96)]
)
def test_products_are_those_of_float64(rows: int, depth: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(0)
    vector = torch.randn(2, depth, generator=draw)
    for left, right in itertools.product(layouts(draw, 2, rows, depth), layouts(draw, 2, depth, columns)):
        assert_near(kernels.product(left, right), left.double() @ right.double(), depth)
        assert_near(kernels.vector_product(left, vector), (left.double() @ vector.double()[..., None])[..., 0], depth)


@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(256, 256, 256), (40, 33, 70), (64, 200, 200), (33, 7, 16), (1, 40, 3)]
)
def test_gated_products_are_those_of_float64(rows: int, depth: int, columns: int) -> None:
    draw = torch.Generator().manual_seed(0)
    outer, inner = torch.randn(2, rows, 2, generator=draw)[..., 0], torch.randn(2, depth, generator=draw)
    for gate, right in itertools.product(layouts(draw, 2, rows, depth), layouts(draw, 2, depth, columns)):
        exact = (outer[..., None] * (gate > 0) * inner[:, None]).double() @ right.double()
        ours = kernels.gated_product(gate, outer, inner, right, False)
        assert_near(ours, exact, depth)
        assert torch.equal(kernels.gated_product(gate, outer, inner, right, True), ours.mT)


def test_a_unit_at_zero_is_off_and_one_that_is_no_number_is_on() -> None:
    """As in torch's gradient of ReLU."""
    gate = torch.tensor([[[-1.0, 0.0, 1e-30, float("nan")]]])
    ours = kernels.gated_product(
        gate, torch.ones(1, 1), torch.ones(1, 4), torch.tensor([[[1.0], [2.0], [4.0], [8.0]]]), False
    )
    assert float(ours) == 12.0


def test_a_row_does_not_depend_on_what_else_is_in_the_batch() -> None:
    draw = torch.Generator().manual_seed(0)
    gate, right = torch.randn(3, 50, 64, generator=draw), torch.randn(3, 64, 48, generator=draw)
    outer, inner = torch.randn(3, 50, generator=draw), torch.randn(3, 64, generator=draw)
    together = kernels.gated_product(gate, outer, inner, right, False)
    assert torch.equal(together[1:2], kernels.gated_product(gate[1:2], outer[1:2], inner[1:2], right[1:2], False))
    assert torch.equal(kernels.product(gate, right)[2:], kernels.product(gate[2:], right[2:]))


def backward(gate: Tensor, loss: Tensor, head: Tensor, weight: Tensor, before: Tensor) -> tuple[Tensor, ...]:
    """The gradient through a hidden layer [2, 64, 48] -> [2, 64, 40] and one output, as Inductor sees it."""
    hidden = torch.where(gate.view(1, 2, 64, 40) <= 0, 0.0, (loss * head).view(1, 2, 64, 40)).view(2, 64, 40)
    into = torch.bmm(hidden, weight.permute(0, 2, 1))
    return into, torch.bmm(before.permute(0, 2, 1), hidden), torch.bmm(hidden.permute(0, 2, 1), before), hidden.sum(1)


def parts(draw: torch.Generator) -> list[Tensor]:
    shapes = ((2, 64, 40), (2, 64, 1), (2, 1, 40), (2, 48, 40), (2, 64, 48))
    return [torch.randn(shape, generator=draw) for shape in shapes]


def test_a_gradient_behind_one_output_is_gated() -> None:
    module = simpler(backward, *parts(torch.Generator().manual_seed(0)), own=OWN)
    assert count(module, kernels.gated_product) == 3 and count(module, aten.bmm.default) == 0
    assert count(simpler(backward, *parts(torch.Generator().manual_seed(0)), own=()), aten.bmm.default) == 3


def test_other_gradients_are_not_gated() -> None:
    def two_outputs(gate: Tensor, loss: Tensor, head: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(torch.where(gate <= 0, 0.0, torch.bmm(loss, head)), weight)

    def another_threshold(gate: Tensor, loss: Tensor, head: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(torch.where(gate <= 0.5, 0.0, loss * head), weight)

    def not_cut_to_zero(gate: Tensor, loss: Tensor, head: Tensor, weight: Tensor) -> Tensor:
        return torch.bmm(torch.where(gate <= 0, 1.0, loss * head), weight)

    for function, outputs in ((two_outputs, 2), (another_threshold, 1), (not_cut_to_zero, 1)):
        x = [torch.randn(shape) for shape in ((1, 64, 40), (1, 64, outputs), (1, outputs, 40), (1, 40, 48))]
        assert count(simpler(function, *x, own=OWN), kernels.gated_product) == 0


def test_products_with_vectors_and_small_ones() -> None:
    def update(x: Tensor, w: Tensor, v: Tensor, u: Tensor, small: Tensor) -> tuple[Tensor, ...]:
        return torch.bmm(x, w), torch.bmm(x, v), torch.bmm(u, x), torch.bmm(small, small)

    x = [torch.randn(shape) for shape in ((1, 64, 96), (1, 96, 32), (1, 96, 1), (1, 1, 64), (1, 1, 1))]
    module = simpler(update, *x, own=OWN)
    assert [count(module, k) for k in (kernels.product, kernels.vector_product, aten.bmm.default)] == [1, 2, 1]
    # dense ones where the library is the faster
    assert count(simpler(update, *x, own=("gated",)), aten.bmm.default) == 2


def test_they_are_compiled_beside_other_work_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    kernels.native.cache_clear()
    try:
        ended: list[str] = []

        def another() -> None:
            with kernels.compiling() as compilation:
                ended.append("another" if compilation is None else "twice")

        with kernels.compiling() as compilation:
            assert compilation is not None
            other = threading.Thread(target=another)
            other.start()
            assert compilation.result() is not None
            assert list(tmp_path.glob("programs/kernels-*.so"))
            other.join(0.2)
            ended.append("first")
        other.join()
        assert ended == ["first", "another"]
        assert kernels.native() is not None
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "other"))
        monkeypatch.setattr(kernels.torch, "get_num_threads", lambda: 2)  # where they do not serve
        with kernels.compiling() as compilation:
            assert compilation is None
    finally:
        monkeypatch.undo()
        kernels.native.cache_clear()


def test_without_a_compiler_libraries_do_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*x: object, **y: object) -> None:
        raise subprocess.CalledProcessError(1, "c++")

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels.subprocess, "run", refuse)
    kernels.native.cache_clear()
    try:
        assert backend.compiled_folder() == tmp_path
        assert kernels.native() is None and kernels.kinds() == ()
        assert not list(tmp_path.glob("building-*"))
    finally:
        monkeypatch.undo()
        kernels.native.cache_clear()
