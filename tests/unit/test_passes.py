"""The passes over a traced update: each result once, no product that is made to be transposed, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from offrl.optim import once
from offrl.training.compiling.passes import Simpler

aten = torch.ops.aten


def simpler(function: Callable[..., Any], *x: Tensor, own: tuple[str, ...] = ()) -> GraphModule:
    """What the passes make of a function's trace, of which they may change the numbers by rounding only."""
    module = make_fx(function, tracing_mode="fake")(*x)
    Simpler(own)(module.graph)
    module.graph.lint()
    module.graph.eliminate_dead_code()
    module.recompile()
    torch.testing.assert_close(module(*(v.clone() for v in x)), function(*(v.clone() for v in x)), rtol=1e-5, atol=1e-5)
    return module


def count(module: GraphModule, target: Any) -> int:
    return sum(node.target is target for node in module.graph.nodes)


def test_the_same_product_is_made_once() -> None:
    x, w = torch.randn(3, 4), torch.randn(4, 5)
    module = simpler(lambda x, w: (x @ w).relu().sum() + (x @ w).relu().square().sum() + (x @ (2.0 * w)).sum(), x, w)
    assert count(module, aten.mm.default) == 2 and count(module, aten.relu.default) == 1


def test_equal_numbers_of_other_kinds_stay_apart() -> None:
    x = torch.tensor([3, 4])
    module = simpler(lambda x: (x * 1, x * 1.0, x + 2 * (x * 1.0)), x)
    assert [v.dtype for v in module(x)] == [torch.int64, torch.float32, torch.float32]


def test_what_is_read_after_a_change_is_read_anew() -> None:
    def update(state: Tensor) -> Tensor:
        before = state * 2.0
        state.copy_(before + 1.0)
        return before + state * 2.0

    assert count(simpler(update, torch.randn(3)), aten.mul.Tensor) == 2


def test_random_numbers_are_drawn_each_time() -> None:
    module = make_fx(lambda x: torch.rand_like(x) - torch.rand_like(x), tracing_mode="fake")(torch.ones(9))
    Simpler()(module.graph)
    assert count(module, aten.rand_like.default) == 2


def test_two_results_have_memory_of_their_own() -> None:
    module = simpler(lambda x: (x * 2.0, x * 2.0), torch.ones(3))
    first, second = module(torch.ones(3))
    assert first.data_ptr() != second.data_ptr()


def test_a_transposed_product_is_that_of_the_transposed_factors() -> None:
    def update(x: Tensor, y: Tensor, p: Tensor) -> Tensor:
        return p - torch.bmm(x, y).view(1, 3, 5, 4).permute(0, 1, 3, 2)

    module = simpler(update, torch.randn(3, 5, 6), torch.randn(3, 6, 4), torch.randn(1, 3, 4, 5))
    shape = next(node.meta["val"].shape for node in module.graph.nodes if node.target is aten.bmm.default)
    assert shape == (3, 4, 5)


def test_a_product_that_is_read_both_ways_stays() -> None:
    module = simpler(
        lambda x, y: torch.bmm(x, y) + torch.bmm(x, y).permute(0, 2, 1), torch.randn(2, 4, 6), torch.randn(2, 6, 4)
    )
    assert count(module, aten.bmm.default) == 1


def test_a_scalar_is_computed_once_by_whatever_traces_it() -> None:
    """A reduction is not fused into its readers, each of whose rows would else compute the exponentials anew."""
    module = make_fx(lambda count: once(-torch.expm1(count)), tracing_mode="fake")(torch.ones(()))
    assert count(module, aten.amax.default) == 1
    x = torch.ones(())
    assert once(x) is x
