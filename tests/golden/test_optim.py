"""Adam and AdamW against torch.optim, schedules and clipping by hand, replicas apart from one another."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from offrl.optim import Adam, Params, global_norm

STEPS = 60


def problem(seed: int) -> tuple[Params, Tensor]:
    g = torch.Generator().manual_seed(seed)
    params = {"w": torch.randn(4, 3, generator=g), "b": torch.randn(3, generator=g)}
    return params, torch.randn(STEPS, 4, 3, generator=g)


def loss(params: Params, x: Tensor) -> Tensor:
    return ((params["w"] * x).sum(0) + params["b"]).tanh().square().sum() + 0.1 * params["w"].pow(4).sum()


def ours(adam: Adam, params: Params, inputs: Tensor) -> Params:
    state = adam.init(params)
    for x in inputs:
        params, state = adam.update(params, grad(loss)(params, x), state)
    return params


def theirs(params: Params, inputs: Tensor, clip: float = 0.0, factor: object = None, **settings: object) -> Params:
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    kind = torch.optim.AdamW if settings.get("weight_decay") else torch.optim.Adam
    optimizer = kind(list(leaves.values()), **settings)  # type: ignore[arg-type]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor) if factor else None  # type: ignore[arg-type]
    for x in inputs:
        optimizer.zero_grad()
        loss(leaves, x).backward()
        if clip:
            torch.nn.utils.clip_grad_norm_(list(leaves.values()), clip)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return {k: v.detach() for k, v in leaves.items()}


def same(a: Params, b: Params) -> None:
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
def test_equals_torch_optim(weight_decay: float, betas: tuple[float, float]) -> None:
    params, inputs = problem(0)
    adam = Adam(learning_rate=0.02, beta1=betas[0], beta2=betas[1], eps=1e-6, weight_decay=weight_decay)
    reference = theirs(params, inputs, lr=0.02, betas=betas, eps=1e-6, weight_decay=weight_decay)
    same(ours(adam, params, inputs), reference)
    assert float((params["w"] - reference["w"]).abs().max()) > 0.1  # it went somewhere


def test_decays_the_named_parameters_only() -> None:
    params, inputs = problem(0)
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    groups = [{"params": [leaves["w"]], "weight_decay": 0.3}, {"params": [leaves["b"]], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    for x in inputs:
        optimizer.zero_grad()
        loss(leaves, x).backward()
        optimizer.step()
    named = ours(Adam(learning_rate=0.02, weight_decay=0.3, decayed=frozenset({"w"})), params, inputs)
    same(named, {k: v.detach() for k, v in leaves.items()})
    assert (
        float((named["b"] - ours(Adam(learning_rate=0.02, weight_decay=0.3), params, inputs)["b"]).abs().max()) > 1e-3
    )


def test_first_update_is_one_learning_rate_long() -> None:
    """By hand: m / (1 - beta1) = g and v / (1 - beta2) = g**2, so the step is lr * sign(g)."""
    params, grads = {"x": torch.tensor([1.0, 2.0, 3.0])}, {"x": torch.tensor([0.3, -7.0, 0.0])}
    adam = Adam(learning_rate=0.1)
    state = adam.init(params)
    new, after = adam.update(params, grads, state)
    torch.testing.assert_close(new["x"], torch.tensor([0.9, 2.1, 3.0]))
    assert params["x"].tolist() == [1, 2, 3] and float(state["count"]) == 0 and float(after["count"]) == 1  # type: ignore[arg-type]
    torch.testing.assert_close(after["mu"]["x"], torch.tensor([0.03, -0.7, 0.0]))  # type: ignore[index]
    torch.testing.assert_close(after["nu"]["x"], torch.tensor([0.9e-4, 0.049, 0.0]))  # type: ignore[index]


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, {0: 1.0, 10**6: 1.0}),
        ({"schedule": "cosine", "decay_steps": 100}, {0: 1.0, 25: 0.853553, 50: 0.5, 75: 0.146447, 100: 0.0, 250: 0.0}),
        ({"schedule": "linear", "decay_steps": 100}, {0: 1.0, 25: 0.75, 99: 0.01, 100: 0.0, 101: 0.0}),
        (
            {"schedule": "cosine", "decay_steps": 100, "floor": 0.1},
            {0: 1.0, 25: 0.853553, 75: 0.146447, 90: 0.1, 100: 0.1, 250: 0.1},
        ),
        (
            {"schedule": "cosine", "decay_steps": 10, "floor": 0.1, "warmup_steps": 4},
            {0: 0.25, 1: 0.487764, 9: 0.1, 20: 0.1},
        ),
        ({"warmup_steps": 4}, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 50: 1.0}),
        (  # the Trajectory Transformer's: 10 updates up, 100 down, 100 up again
            {"schedule": "cosine_cycle", "decay_steps": 100, "floor": 0.1, "warmup_steps": 10},
            {
                0: 0.1,
                4: 0.5,
                9: 1.0,
                34: 0.853553,
                59: 0.5,
                84: 0.146447,
                109: 0.1,
                134: 0.146447,
                159: 0.5,
                209: 1.0,
                259: 0.5,
                309: 0.1,
            },
        ),
        (
            {"schedule": "cosine", "decay_steps": 100, "schedule_from": 40},
            {0: 1.0, 40: 1.0, 65: 0.853553, 90: 0.5, 140: 0.0, 300: 0.0},
        ),
        (
            {"schedule": "linear", "decay_steps": 10, "warmup_steps": 4},
            {0: 0.25, 1: 0.45, 2: 0.6, 3: 0.7, 4: 0.6, 10: 0.0},
        ),
    ],
)
def test_schedules_by_hand(settings: dict[str, object], rates: dict[int, float]) -> None:
    adam = Adam(learning_rate=3e-4, **settings)  # type: ignore[arg-type]
    for count, factor in rates.items():
        assert float(adam.rate(torch.tensor(float(count)))) == pytest.approx(3e-4 * factor, rel=1e-4, abs=1e-10)


def test_scheduled_updates_equal_torch_optim() -> None:
    params, inputs = problem(1)
    adam = Adam(learning_rate=0.05, schedule="cosine", decay_steps=40, warmup_steps=5)

    def factor(t: int) -> float:
        return 0.5 * (1 + math.cos(math.pi * min(t / 40, 1.0))) * min((t + 1) / 5, 1.0)

    same(ours(adam, params, inputs), theirs(params, inputs, lr=0.05, factor=factor))
    same(ours(adam, params, inputs[:40]), ours(adam, params, inputs))  # 0 from the 40th update on


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="'step'; it must be constant, cosine, linear or cosine_cycle"):
        Adam(schedule="step")
    with pytest.raises(ValueError, match="cosine schedule needs decay_steps > 0"):
        Adam(schedule="cosine")


def test_global_norm_is_over_all_tensors() -> None:
    assert (
        float(global_norm({"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]]), "c": torch.tensor(12.0)})) == 13.0
    )


def test_clipping_equals_torch() -> None:
    params, inputs = problem(2)
    clipped = theirs(params, inputs, clip=0.2, lr=0.02)
    same(ours(Adam(learning_rate=0.02, clip_norm=0.2), params, inputs), clipped)
    assert float((clipped["w"] - theirs(params, inputs, lr=0.02)["w"]).abs().max()) > 1e-3  # it bites
    never = ours(Adam(learning_rate=0.02, clip_norm=1e6), params, inputs)
    same(never, ours(Adam(learning_rate=0.02), params, inputs))


def test_replicas_have_their_own_norm_and_learning_rate() -> None:
    problems = [problem(s) for s in range(3)]
    for i, (params, _) in enumerate(problems):
        params["w"] *= 3.0**i  # gradients of very different size: a norm over all replicas would clip wrongly
    rates = torch.tensor([0.01, 0.02, 0.003])
    params = {k: torch.stack([p[k] for p, _ in problems]) for k in ("w", "b")}
    inputs = torch.stack([x for _, x in problems])
    together = vmap(lambda r, p, x: ours(Adam(learning_rate=r, clip_norm=0.5), p, x))(rates, params, inputs)
    for i, (p, x) in enumerate(problems):
        same({k: v[i] for k, v in together.items()}, theirs(p, x, clip=0.5, lr=float(rates[i])))
