"""Networks against float64 NumPy, members of an ensemble against separate networks, and initial weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from offrl import rng
from offrl.nn import MLP, EnsembleLinear, EnsembleMLP, Linear, Pairs, Scalar, call, initialise, make_head
from offrl.nn.mlp import dropout
from tests.support.reference import mlp as reference


def params_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {k: v.detach() for k, v in module.named_parameters()}


def test_mlp_equals_numpy() -> None:
    torch.manual_seed(0)
    net, x = MLP(5, [7, 6], 3), torch.randn(11, 5)
    expected, _ = reference.forward(reference.net(params_of(net)), x.numpy())
    np.testing.assert_allclose(net(x).detach(), expected, atol=1e-5)
    assert MLP(5, [], 3)(x).shape == (11, 3)


@pytest.mark.parametrize(("activation", "epsilon"), [("relu", 1e-5), ("gelu", 1e-5), ("silu", 1e-5), ("tanh", 0.5)])
def test_layer_norm_comes_after_the_activation(activation: str, epsilon: float) -> None:
    torch.manual_seed(1)
    options = {} if epsilon == 1e-5 else {"layer_norm_epsilon": epsilon}
    net, x = MLP(4, [6, 6], 2, activation=activation, layer_norm=True, **options), torch.randn(9, 4)
    for p in net.parameters():
        p.data = torch.randn_like(p)
    h, p = x.double(), {k: v.double() for k, v in params_of(net).items()}
    functions = {"relu": torch.relu, "gelu": nn.functional.gelu, "silu": nn.functional.silu, "tanh": torch.tanh}
    for i in range(2):
        h = functions[activation](h @ p[f"layers.{i}.weight"].T + p[f"layers.{i}.bias"])
        h = (h - h.mean(-1, keepdim=True)) / (h.var(-1, keepdim=True, unbiased=False) + epsilon).sqrt()
        h = h * p[f"norms.{i}.weight"] + p[f"norms.{i}.bias"]
    torch.testing.assert_close(net(x).double(), h @ p["head.weight"].T + p["head.bias"], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("layer_norm", "epsilon", "first"),
    [(False, 1e-5, False), (True, 1e-5, False), (True, 0.5, False), (True, 0.5, True)],
)
def test_ensemble_equals_separate_networks(layer_norm: bool, epsilon: float, first: bool) -> None:
    torch.manual_seed(2)
    size, x = 3, torch.randn(8, 4)
    form: dict[str, Any] = {
        "layer_norm": layer_norm,
        "layer_norm_epsilon": epsilon,
        "norm_first": first,
        "activation": "mish",
    }
    ensemble = EnsembleMLP(size, 4, [6, 5], 2, **form)
    for p in ensemble.parameters():
        p.data = torch.randn_like(p)
    out = ensemble(x)
    assert out.shape == (size, 8, 2)
    for e in range(size):
        alone = MLP(4, [6, 5], 2, **form)
        for ours, theirs in zip([*alone.layers, alone.head], [*ensemble.layers, ensemble.head], strict=True):
            ours.weight.data, ours.bias.data = theirs.weight.data[e].T, theirs.bias.data[e, 0]
        if layer_norm:
            for norm, scale, shift in zip(alone.norms, ensemble.scales, ensemble.shifts, strict=True):  # type: ignore[arg-type]
                norm.weight.data, norm.bias.data = scale.data[e, 0], shift.data[e, 0]
        torch.testing.assert_close(out[e], alone(x), rtol=1e-4, atol=1e-4)
    weights = torch.randn(size)
    (out.sum((1, 2)) * weights).sum().backward()  # a member's gradient comes from its own output only
    torch.testing.assert_close(ensemble.head.bias.grad[:, 0], weights[:, None].expand(size, 2) * 8)  # type: ignore[index]


@pytest.mark.parametrize(("hidden", "layer_norm"), [([6, 4], False), ([6, 6], True), ([], False)])
def test_actions_at_shared_states_give_what_their_rows_give(hidden: list[int], layer_norm: bool) -> None:
    """Values and gradients, in float64: W_s s + W_a a + b, the first part made once for each state, is W [s; a] + b."""
    torch.manual_seed(3)
    net = EnsembleMLP(2, 5 + 2, hidden, 3, layer_norm=layer_norm, residual=layer_norm).double()
    states, actions, weights = (torch.randn(*shape, dtype=torch.float64) for shape in ((8, 5), (4, 8, 2), (2, 32, 3)))
    results = []
    for make in (lambda s, a: Pairs(s, a), lambda s, a: torch.cat([s.expand(4, 8, 5), a], -1).flatten(0, 1)):
        inputs = {**params_of(net), "states": states, "actions": actions}

        def value(p: dict[str, torch.Tensor], make: Any = make) -> torch.Tensor:
            return (
                call(
                    net, {k: v for k, v in p.items() if k not in ("states", "actions")}, make(p["states"], p["actions"])
                )
                * weights
            ).sum()

        results.append((call(net, params_of(net), make(states, actions)), torch.func.grad(value)(inputs)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


def test_an_ensemble_layer_takes_one_input_or_one_for_each_member() -> None:
    layer, x = EnsembleLinear(2, 3, 4), torch.randn(5, 3)
    torch.testing.assert_close(layer(torch.stack([x, x])), layer(x))
    different = layer(torch.stack([x, 2 * x]))
    torch.testing.assert_close(different[0], layer(x)[0])
    assert not torch.allclose(different[1], layer(x)[1])


def test_uniform_initial_weights_fill_the_bound_of_nn_linear() -> None:
    torch.manual_seed(3)
    for fan_in in (4, 400):
        bound = fan_in**-0.5
        for module in (Linear(fan_in, 500), EnsembleLinear(3, fan_in, 500), nn.Linear(fan_in, 500)):
            for p in (module.weight.detach(), module.bias.detach()):
                assert 0.98 * bound < float(p.abs().max()) <= bound * (1 + 1e-6)
                assert abs(float(p.mean())) < 0.1 * bound and float(p.std()) == pytest.approx(bound / 3**0.5, rel=0.08)


def test_members_start_differently() -> None:
    weight = EnsembleMLP(3, 4, [5], 1).layers[0].weight
    assert not torch.equal(weight[0], weight[1]) and not torch.equal(weight[1], weight[2])


def test_orthogonal_initial_weights() -> None:
    torch.manual_seed(4)
    for out_dim, in_dim in ((6, 6), (4, 9), (9, 4)):
        layer, ensemble = Linear(in_dim, out_dim, "orthogonal"), EnsembleLinear(2, in_dim, out_dim, "orthogonal")
        for w in (layer.weight, ensemble.weight[0].T, ensemble.weight[1].T):
            gram = w @ w.T if out_dim <= in_dim else w.T @ w
            torch.testing.assert_close(gram, 2.0 * torch.eye(len(gram)), rtol=1e-4, atol=1e-4)  # gain sqrt(2)
        assert not layer.bias.any() and not ensemble.bias.any()


def test_isometric_initial_weights() -> None:
    torch.manual_seed(5)
    layer = Linear(9, 4, "isometric")
    torch.testing.assert_close(layer.weight @ layer.weight.T, torch.eye(4), rtol=1e-4, atol=1e-4)  # gain 1
    assert not layer.bias.any()


def test_lecun_initial_weights() -> None:
    """Of variance 1 / inputs though they are cut off, at 2 / 0.8796 of it."""
    torch.manual_seed(5)
    layer = EnsembleLinear(2, 100, 500, "lecun")
    assert float(layer.weight.detach().std()) == pytest.approx(0.1, rel=0.02)
    assert 0.226 < float(layer.weight.detach().abs().max()) <= 0.2274
    assert not layer.bias.any()


def test_zero_and_unknown_initial_weights() -> None:
    layer = Linear(3, 2, "zero")
    assert not layer.weight.any() and not layer.bias.any()
    with pytest.raises(ValueError, match="init is 'xavir'; it must be one of torch, orthogonal"):
        initialise(torch.zeros(2, 2), None, "xavir")


def test_dropout_keeps_the_mean_and_needs_a_key() -> None:
    key, x = rng.make_key(0), torch.full((2000, 50), 3.0)
    y = dropout(x, 0.3, key)
    assert y.unique().tolist() == pytest.approx([0.0, 3.0 / 0.7])
    assert float((y == 0).double().mean()) == pytest.approx(0.3, abs=0.006) and torch.equal(y, dropout(x, 0.3, key))
    net = MLP(4, [64, 64], 2, dropout=0.5)
    a = torch.randn(10, 4)
    assert torch.equal(net(a), net(a)) and torch.equal(net(a, key), net(a, key))
    assert not torch.equal(net(a), net(a, key)) and not torch.equal(net(a, rng.make_key(1)), net(a, key))
    seen: list[torch.Tensor] = []
    for layer in net.layers[1:]:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    net(torch.randn(500, 4), key)
    masks = [h == 0 for h in seen]
    # relu halves, dropout halves: each is 0 three times in four
    agreement = float((masks[0] == masks[1]).double().mean())
    assert agreement < 0.75  # the layers' noise differs
    plain = MLP(4, [64], 2)
    assert torch.equal(plain(a), plain(a, key))  # rate 0: a key changes nothing


def test_scalar_head() -> None:
    head, logits = make_head("scalar"), torch.tensor([[[1.0], [2.0]], [[3.0], [5.0]]])  # [E, B, 1]
    assert isinstance(head, Scalar) and head.out_dim == 1
    assert head.mean(logits).tolist() == [[1, 2], [3, 5]]
    assert head.loss(logits, torch.tensor([0.0, 4.0])).tolist() == [[1, 4], [9, 1]]
