"""The recurrent core of state-space layers: beside the loop of its recurrence, by hand, and across episodes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from offrl.world_models.recurrent import scan as module
from offrl.world_models.recurrent.scan import ScanCore, ScanMemory, empty_memory, scan, states_of

T, B, G, P, N = 12, 3, 2, 4, 5
D, S, A = 4, 6, 2  # of the core: G heads of P = 2 D / G


def inputs(seed: int = 0, steps: int = T) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    return {
        "x": normal(steps, B, G, P),
        "log_decay": -normal(steps, B, G).exp(),
        "b": normal(steps, B, N),
        "c": normal(steps, B, N),
        "state": normal(B, G, P, N),
    }


def begins(steps: int = T) -> Tensor:
    """Row 0 goes on with its memory, row 1 begins anew at once and twice later, row 2 in the middle."""
    first = torch.zeros(steps, B, dtype=torch.bool)
    first[0, 1] = first[5, 1] = first[6, 1] = first[7, 2] = True
    return first


def loop(x: Tensor, log_decay: Tensor, b: Tensor, c: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence, step by step: outputs and states."""
    outputs, states = [], []
    for t in range(len(x)):
        state = torch.where(first[t][:, None, None, None], 0.0, state)
        state = log_decay[t].exp()[..., None, None] * state + x[t][..., None] * b[t][:, None, None]
        outputs.append((state * c[t][:, None, None]).sum(-1))
        states.append(state)
    return torch.stack(outputs), torch.stack(states)


@pytest.mark.parametrize("chunk", [1, 3, 5, 12, 64])
def test_the_scan_is_the_loop(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs, states and gradients, for chunks that divide the window and others."""
    monkeypatch.setattr(module, "CHUNK", chunk)
    given = {k: v.requires_grad_() for k, v in inputs().items()}
    first = begins()
    y, end = scan(**given, episode=first.long().cumsum(0))
    expected, states = loop(**given, first=first)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(end, states[-1], rtol=1e-12, atol=1e-12)
    without = {k: v for k, v in given.items() if k != "c"}
    torch.testing.assert_close(states_of(**without, first=first), states, rtol=1e-12, atol=1e-12)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for got, other in zip(
        torch.autograd.grad((y * weights).sum() + end.square().sum(), list(given.values())),
        torch.autograd.grad((expected * weights).sum() + states[-1].square().sum(), list(given.values())),
        strict=True,
    ):
        torch.testing.assert_close(got, other, rtol=1e-10, atol=1e-10)


def test_two_steps_by_hand() -> None:
    """ln a = -0.5, x = 1 and 2, b = c = 1: 1 and 2 + e^-0.5; where an episode begins at the second, 1 and 2."""
    x = torch.tensor([1.0, 2.0]).reshape(2, 1, 1, 1)
    log_decay, one = torch.full((2, 1, 1), -0.5), torch.ones(2, 1, 1)
    for episode, second in ((torch.tensor([0, 0]), 2.606531), (torch.tensor([0, 1]), 2.0)):
        y, end = scan(x, log_decay, one, one, torch.zeros(1, 1, 1, 1), episode.unsqueeze(-1))
        assert y.flatten().tolist() == pytest.approx([1.0, second], rel=1e-6)
        assert float(end) == pytest.approx(second, rel=1e-6)


def test_long_windows_neither_overflow_nor_lose_their_gradient() -> None:
    """Decays of e^-100 a step, whose inverse over a window is infinite in float32."""
    given = {k: v.float() for k, v in inputs(steps=64).items()}
    given["log_decay"] = torch.full_like(given["log_decay"], -100.0).requires_grad_()
    y, _ = scan(**given, episode=begins(64).long().cumsum(0))
    (gradient,) = torch.autograd.grad(y.sum(), given["log_decay"])
    assert y.isfinite().all() and gradient.isfinite().all()


def core(dtype: torch.dtype = torch.float64) -> ScanCore:
    torch.manual_seed(0)
    net = ScanCore(D, S, A, G, N, 2).to(dtype)
    for p in net.parameters():
        p.data += 0.1 * torch.randn(p.shape, dtype=dtype)
    return net


def window(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, ScanMemory]:
    g = torch.Generator().manual_seed(2)
    memory = pytree.tree_map(
        lambda x: torch.randn(x.shape, generator=g, dtype=dtype), empty_memory(B, D, G, N, 2, torch.device("cpu"))
    )
    return torch.randn(T, B, S, generator=g, dtype=dtype), torch.randn(T, B, A, generator=g, dtype=dtype), memory


def by_steps(net: ScanCore, sample: Tensor, action: Tensor, memory: ScanMemory, first: Tensor) -> tuple[Any, Any]:
    outputs, memories = [], []
    for t in range(len(sample)):
        memory = pytree.tree_map(lambda x, t=t: torch.where(first[t].reshape(-1, *[1] * (x.ndim - 1)), 0.0, x), memory)
        h, after = net(sample[t : t + 1], action[t : t + 1], memory)
        memory = pytree.tree_map(lambda x: x[0], after)
        outputs.append(h[0])
        memories.append(memory)
    return torch.stack(outputs), pytree.tree_map(lambda *x: torch.stack(x), *memories)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_a_window_is_its_single_steps(dtype: torch.dtype, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers, with memories that are emptied where episodes begin; and the gradients of all parameters."""
    monkeypatch.setattr(module, "CHUNK", 5)
    net, (sample, action, memory) = core(dtype), window(dtype)
    h, after = net(sample, action, memory, begins())
    expected, memories = by_steps(net, sample, action, memory, begins())
    torch.testing.assert_close(h, expected, rtol=error, atol=error)
    torch.testing.assert_close(after, memories, rtol=error, atol=error)
    parameters = list(net.parameters())
    for got, other in zip(
        torch.autograd.grad(h.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
        strict=True,
    ):
        torch.testing.assert_close(got, other, rtol=100 * error, atol=100 * error)


def test_nothing_passes_from_one_episode_to_the_next() -> None:
    """Neither states nor the convolution's inputs."""
    net, (sample, action, memory) = core(), window()
    h, _ = net(sample, action, memory, begins())
    other = sample.clone()
    other[:7, 2] += 1.0
    changed, _ = net(other, action, pytree.tree_map(lambda x: x + 1.0, memory), begins())
    assert torch.equal(changed[7:, 2], h[7:, 2]) and torch.equal(changed[:, 1], h[:, 1])
    assert not torch.isclose(changed[:7, 2], h[:7, 2]).any() and not torch.isclose(changed[:, 0], h[:, 0]).any()


def test_a_layer_by_hand() -> None:
    """One step of a layer beside its formulas in plain torch."""
    net, (_, _, memory) = core(), window()
    layer, x = net.layers[0], torch.randn(1, B, D, dtype=torch.float64)
    first = torch.zeros(1, B, dtype=torch.bool)
    inputs, state = memory[0]
    got, _, after = layer(x, inputs, state, first)
    inner = 2 * D
    z, mixed, dt = layer.entry(F.rms_norm(x[0], (D,), layer.scale, 1e-5)).split([inner, inner + 2 * N, G], -1)
    mixed = F.silu(torch.einsum("bkc,kc->bc", torch.cat([inputs, mixed[:, None]], 1), layer.taps) + layer.bias)
    values, b, c = mixed.split([inner, N, N], -1)
    values, dt = values.reshape(B, G, P), F.softplus(dt + layer.step)
    state = (dt * -layer.log_rate.exp()).exp()[..., None, None] * state
    state = state + torch.einsum("bg,bgp,bn->bgpn", dt, values, b)
    y = torch.einsum("bgpn,bn->bgp", state, c) + layer.direct[:, None] * values
    y = F.rms_norm(y.flatten(1) * F.silu(z), (inner,), layer.inner_scale, 1e-5)
    torch.testing.assert_close(after[0], state)
    torch.testing.assert_close(got[0], x[0] + layer.exit(y))


def test_initial_steps_and_decays() -> None:
    """Steps in [1e-3, 0.1], rates in [1, 16]."""
    layer = ScanCore(64, S, A, 32, N, 1).layers[0]
    steps, rates = F.softplus(layer.step.detach()), layer.log_rate.detach().exp()
    assert 1e-3 <= float(steps.min()) < 0.01 < float(steps.max()) <= 0.1 + 1e-6
    assert 1.0 <= float(rates.min()) < 5.0 < float(rates.max()) <= 16.0
    assert math.isclose(float(layer.direct.detach().sum()), 32.0)
