"""Plans by diffusion: the U-net's form, inpainting, guidance, the losses in NumPy, and classifier-free guidance by
hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl import rng
from offrl.algorithms.decision_diffuser import DecisionDiffuser, DecisionDiffuserConfig
from offrl.algorithms.diffuser import Diffuser, DiffuserConfig
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import VALID, windows
from offrl.data.transforms.columns import scale_rewards
from offrl.families.generative.plans import RETURN, denoise, with_first_state
from offrl.nn import diffusion
from offrl.nn.temporal_unet import ConvBlock, PlanValue, TemporalUnet

SMALL = {"plan_horizon": 4, "denoising_steps": 3, "base": 8, "multiples": [1, 2]}


def data() -> Dataset:
    g = np.random.default_rng(0)
    ends = np.isin(np.arange(24), (5, 14, 23))
    return from_arrays(
        g.normal(size=(24, 3)),
        g.uniform(-1, 1, (24, 2)),
        np.arange(24.0),
        ends & (np.arange(24) != 14),
        np.arange(24) == 14,
        action_low=-1.0,
        action_high=1.0,
    )


# ---- networks


def test_a_block_is_convolution_group_norm_and_mish() -> None:
    torch.manual_seed(0)
    block, x = ConvBlock(5, 32), torch.randn(3, 5, 7)
    torch.nn.init.normal_(block.scale)
    expected = F.conv1d(x, block.convolution.weight, block.convolution.bias, padding=2)
    expected = F.mish(F.group_norm(expected, 8, block.scale, block.shift))
    torch.testing.assert_close(block(x), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("horizon", [4, 5, 8])
def test_shapes_of_any_horizon(horizon: int) -> None:
    net, x, step = TemporalUnet(3, 8, [1, 2, 4], condition=1), torch.randn(2, horizon, 3), torch.tensor([0, 5])
    share = torch.ones(2, 1)
    assert net(x, step, share).shape == (2, horizon, 3)
    free = net(x, step, share, torch.zeros(2))
    torch.testing.assert_close(free, net(x, step, 7.0 * share, torch.zeros(2)))  # what is hidden has no influence
    assert not torch.allclose(free, net(x, step, share))
    assert PlanValue(horizon, 3, 8, [1, 2])(x, step).shape == (2,)


# ---- sampling


def test_the_first_state_is_kept_at_every_step() -> None:
    states, seen = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), []

    def predict(x: Tensor, t: int) -> Tensor:
        seen.append(x[:, 0, 1:].clone())
        return torch.zeros_like(x)

    plans = denoise(predict, states, 3, 5, 4, rng.make_key(0))
    assert len(seen) == 4 and all(torch.equal(s, states) for s in [*seen, plans[:, 0, 1:]])
    torch.testing.assert_close(plans[:, 1:], torch.zeros(2, 4, 3))  # the last step gives what was predicted
    changed = with_first_state(torch.zeros(2, 3, 3), states)
    assert changed[:, 0].tolist() == [[0.0, 1.0, 2.0], [0.0, 3.0, 4.0]] and not changed[:, 1:].any()


def test_guidance_moves_plans_along_the_values_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a linear value c x: by scale * variance_t * c for each of its steps, and by nothing in the last denoising
    steps.
    """
    settings = {"guide_scale": 0.5, "guide_steps": 2, "guide_stop": 1, "candidates": 1}
    algorithm = Diffuser(DiffuserConfig(**{**SMALL, **settings}), data().spec)  # type: ignore[arg-type]
    c, moved = torch.linspace(-1.0, 1.0, 20).reshape(4, 5), {}

    def apply(name: str, params: object, x: Tensor, step: Tensor) -> Tensor:
        if name == "value":
            return (x * c).sum((1, 2))
        moved[int(step[0])] = x
        return torch.zeros_like(x)

    monkeypatch.setattr(algorithm, "apply", apply)
    states = torch.zeros(1, 3)
    plans, values = algorithm.guided({"plan": {}, "value": {}}, states, rng.make_key(1))
    torch.testing.assert_close(values, (plans * c).sum((1, 2)))
    guided = dict(moved)
    algorithm.config.guide_scale = 0.0
    algorithm.guided({"plan": {}, "value": {}}, states, rng.make_key(1))
    free = dict(moved)
    for t, factor in ((2, 2.0), (0, 0.0)):
        variance = diffusion.transition(t, 3)[3] ** 2
        push = with_first_state((factor * 0.5 * variance * c)[None], states)
        carried = 0.0 if t == 2 else guided[0] - free[0]  # at step 0: of the steps before, and nothing more
        torch.testing.assert_close(guided[t] - free[t], push + carried, rtol=1e-4, atol=1e-6)
    assert float(guided[1][0, 1, 0] - free[1][0, 1, 0]) != 0.0


# ---- losses


def linear(weight: Tensor) -> Callable[..., Tensor]:
    """A network whose output is its noisy plan times a matrix."""
    return lambda name, params, x, *rest: x @ weight


def test_losses_of_diffuser(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data()
    config = DiffuserConfig(**SMALL, action_weight=10.0, discount=0.5, termination_penalty=-100.0)  # type: ignore[arg-type]
    algorithm = Diffuser(config, dataset.spec)
    sampler = algorithm.sampler()
    batch = sampler(sampler.prepare(dataset), rng.make_key(2), 32)
    assert not batch[VALID].all()
    # returns of rows 12 to 14, which end by a time-out, and of the last two rows, which end in a termination
    column = algorithm.returns(dataset)[RETURN]
    assert column[12:15].tolist() == [12 + 6.5 + 3.5, 13 + 7.0, 14.0]
    assert column[22:].tolist() == [22 - 38.5, 23 - 100.0]

    weight, key = torch.linspace(-1.0, 1.0, 25).reshape(5, 5), rng.make_key(4)
    monkeypatch.setattr(algorithm, "apply", linear(weight))
    loss, _ = algorithm.plan_loss({}, algorithm.init(0), batch, key)
    keys = rng.split(key)
    step = rng.randint(keys[0], (32,), 3)
    noise = rng.normal(keys[1], (32, 4, 5)).double().numpy()
    x = torch.cat([batch["actions"], batch["observations"]], -1).double().numpy()
    abar = diffusion.signal(step, 3).double().numpy()[:, None, None]
    noisy = np.sqrt(abar) * x + np.sqrt(1 - abar) * noise
    noisy[:, 0, 2:] = x[:, 0, 2:]
    predicted = noisy @ weight.double().numpy()
    predicted[:, 0, 2:] = x[:, 0, 2:]
    weights = np.ones((4, 5))
    weights[0, :2] = 10.0
    error = weights * (predicted - x) ** 2 * batch[VALID].numpy()[..., None]
    assert float(loss) == pytest.approx(error.mean(), rel=1e-5)

    monkeypatch.setattr(algorithm, "apply", lambda name, params, x, step: x.sum((1, 2)))
    loss, _ = algorithm.value_loss({}, algorithm.init(0), batch, key)
    assert float(loss) == pytest.approx(((noisy.sum((1, 2)) - batch[RETURN][:, 0].numpy()) ** 2).mean(), rel=1e-5)


def test_losses_of_decision_diffuser(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = data()
    config = DecisionDiffuser.fit_config(DecisionDiffuserConfig(**SMALL, condition_dropout=0.5), dataset)  # type: ignore[arg-type]
    algorithm = DecisionDiffuser(config, dataset.spec)
    sampler = algorithm.sampler()
    batch = sampler(sampler.prepare(dataset), rng.make_key(2), 32)
    key, given = rng.make_key(4), []

    def apply(name: str, params: object, x: Tensor, *rest: Tensor) -> Tensor:
        if name == "inverse":
            return x[..., :2] - x[..., 3:5]
        given.extend(rest)
        return 0.5 * x

    monkeypatch.setattr(algorithm, "apply", apply)
    loss, _ = algorithm.plan_loss({}, algorithm.init(0), batch, key)
    keys = rng.split(key, 3)
    noise = rng.normal(keys[1], (32, 4, 3)).double().numpy()
    abar = diffusion.signal(rng.randint(keys[0], (32,), 3), 3).double().numpy()[:, None, None]
    x = batch["observations"].double().numpy()
    noisy = np.sqrt(abar) * x + np.sqrt(1 - abar) * noise
    error = (0.5 * noisy - noise) ** 2 * batch[VALID].numpy()[..., None]
    assert float(loss) == pytest.approx(0.5 * error[:, 1:].sum() / error.size, rel=1e-5)  # the first state is given
    np.testing.assert_allclose(given[1][:, 0], batch[RETURN][:, 0] / config.return_scale)
    assert 0.1 < float(given[2].mean()) < 0.9 and set(given[2].tolist()) == {0.0, 1.0}

    loss, _ = algorithm.inverse_loss({}, algorithm.init(0), batch)
    error = (x[:, :-1, :2] - x[:, 1:, :2] - batch["actions"][:, :-1].double().numpy()) ** 2 * batch[VALID].numpy()[
        :, 1:, None
    ]
    assert float(loss) == pytest.approx(0.5 * error.mean(), rel=1e-5)


def test_decision_diffuser_asks_for_a_discounted_return(capsys: pytest.CaptureFixture[str]) -> None:
    """The authors' (scripts/evaluate_inv_parallel.py): nine tenths of the scale, which on their data is the largest
    return.
    """
    settings = {**SMALL, "discount": 0.5, "termination_penalty": -100.0}
    config = DecisionDiffuserConfig(**settings)  # type: ignore[arg-type]
    largest = 18 + 19 / 2 + 20 / 4 + 21 / 8 + 22 / 16 - 77 / 32  # row 18's
    for dataset in (data(), scale_rewards(data(), 0.1, 3.0)):  # in the units of the recorded rewards
        fitted = DecisionDiffuser.fit_config(config, dataset)
        assert fitted.return_scale == 95.0 and fitted.target_return == pytest.approx(0.9 * largest, rel=1e-4)
        algorithm = DecisionDiffuser(fitted, dataset.spec)
        sampler = algorithm.sampler()
        source = sampler.prepare(dataset)
        ahead = windows(source, torch.tensor([5, 12, 14, 18, 23]), 1)[RETURN][:, 0]
        np.testing.assert_allclose(ahead, [5 - 100, 12 + 6.5 + 3.5, 14, largest, 23 - 100], rtol=1e-5)
    words = (
        "asks for a discounted return of 30.684 (algo.target_return) at every step, in units of 95 "
        "(algo.return_scale): the largest"
    )
    assert words in capsys.readouterr().err

    costs = replace(data(), columns={**data().columns, "rewards": -1.0 - data().columns["rewards"]})
    fitted = DecisionDiffuser.fit_config(DecisionDiffuserConfig(**SMALL, discount=0.5), costs)  # type: ignore[arg-type]
    best = -sum((k + 1) / 2**k for k in range(6))  # row 0's; nine tenths of a cost would be better than any row
    assert fitted.target_return == pytest.approx(1.1 * best, rel=1e-4) and fitted.return_scale > -best

    own = DecisionDiffuser.fit_config(replace(config, target_return=7.0), data())
    assert own.target_return == 7.0 and own.return_scale == 95.0
    published = replace(config, target_return=360.0, return_scale=400.0)
    capsys.readouterr()
    assert DecisionDiffuser.fit_config(published, data()) == published and capsys.readouterr().err == ""


def test_decision_diffuser_asks_for_the_same_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = DecisionDiffuser(DecisionDiffuserConfig(**SMALL, target_return=360.0, return_scale=400.0), data().spec)  # type: ignore[arg-type]
    asked, apply = [], algorithm.apply

    def spy(name: str, params: object, *inputs: Tensor) -> Tensor:
        asked.extend(inputs[2].flatten().tolist() if name == "plan" else [])
        return apply(name, params, *inputs)  # type: ignore[arg-type]

    monkeypatch.setattr(algorithm, "apply", spy)
    actor = algorithm.actor(algorithm.init(0))
    carry = actor.start(2)
    for _ in range(2):
        _, carry = actor.act(carry, torch.zeros(2, 3), rng.make_key(0), explore=False)
        carry = actor.observe_reward(carry, torch.tensor([100.0, 0.0]))
    # steps, episodes, with the return and without, denoising steps
    assert asked == pytest.approx([0.9] * 2 * 2 * 2 * 3)


def test_classifier_free_guidance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Noises 2 with the return and 1 without, w = 1.2: 2.2."""
    config = DecisionDiffuserConfig(**SMALL, target_return=1.0, return_scale=1.0, guidance=1.2, clip=100.0)  # type: ignore[arg-type]
    algorithm = DecisionDiffuser(config, data().spec)
    monkeypatch.setattr(
        algorithm,
        "apply",
        lambda name, params, x, step, share, keep: torch.ones_like(x) * (1.0 + keep.reshape(-1, 1, 1)),
    )
    x = torch.full((2, 4, 3), 0.7)
    abar = float(diffusion.signal(torch.tensor([1]), 3))
    expected = (0.7 - (1 - abar) ** 0.5 * 2.2) / abar**0.5
    torch.testing.assert_close(
        algorithm.expected({}, x, 1, torch.ones(2, 1)), torch.full((2, 4, 3), expected), rtol=1e-5, atol=1e-5
    )
