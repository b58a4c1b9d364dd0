"""Critics on MR.Q's latents: the loss that trains these is MR.Q's, nothing else trains them, and what critics, V and
policy see and aim at, in plain torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.dataset import DataSpec
from offrl.data.samplers.states import StateSampler, first_steps, in_time
from offrl.data.samplers.transitions import SPAN, TransitionSampler, discounted, windows
from offrl.errors import UserError
from offrl.families.critics.representation import ENCODERS
from offrl.settings.compose import compose
from tests.golden.test_mrq import LATENT, SPEC, data, encode, pair
from tests.golden.test_mrq import make as make_mrq

NAMES = ("td3_bc", "rebrac", "iql")
H, B = 3, 8


def make(name: str, **settings: Any) -> tuple[Any, TrainState, dict[str, Tensor]]:
    """The algorithm, a state in which targets differ from what they follow, and a batch with terminals."""
    kind = registry.get("algo", name)
    small = {"hidden": [5, 7], "latent": LATENT, "representation_horizon": H, "representation": "mrq", "discount": 0.9}
    algorithm = kind(kind.Config(**{**small, **settings}), SPEC)
    state, g = algorithm.init(2), torch.Generator().manual_seed(1)
    for params in (*state.params.values(), *state.target.values()):
        params.update({k: v + 0.2 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    sampler = algorithm.sampler()
    batch = sampler(sampler.prepare(data()), rng.make_key(5), B)
    assert batch["is_terminal"].any()
    return algorithm, state, batch


def q_of(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """Both critics' values of pairs: [2, B]."""
    x = x.expand(2, *x.shape)
    for i in range(2):
        x = (x @ params[f"layers.{i}.weight"] + params[f"layers.{i}.bias"]).relu()
    return (x @ params["head.weight"] + params["head.bias"]).squeeze(-1)


def policy_of(params: dict[str, Tensor], z: Tensor) -> Tensor:
    for i in range(2):
        z = F.linear(z, params[f"net.layers.{i}.weight"], params[f"net.layers.{i}.bias"]).relu()
    return F.linear(z, params["net.head.weight"], params["net.head.bias"]).tanh()


@pytest.mark.parametrize("name", NAMES)
def test_the_loss_is_mr_qs(name: str) -> None:
    algorithm, state, batch = make(name)
    mrq, other = make_mrq(action_latent=LATENT // 2, horizon=H)
    other.target["encoder"].update(state.target["encoder"])
    params = {module: state.params[module] for module in ENCODERS}
    loss, metrics = algorithm.prediction_loss(params, state, in_time(batch))
    expected, terms = mrq.encoder_loss(params, other, in_time(batch))
    torch.testing.assert_close(loss, expected)  # its terms are added in another order
    assert metrics.keys() == terms.keys()
    assert all(torch.equal(value, terms[term]) and value > 0.0 for term, value in metrics.items())


@pytest.mark.parametrize("name", NAMES)
def test_nothing_else_trains_the_encoders(name: str) -> None:
    """After an update they are what a step down that loss alone makes of them; the target is a share nearer."""
    algorithm, state, batch = make(name)
    alone, _ = algorithm.descend(state, ENCODERS, algorithm.prediction_loss, in_time(batch))
    after, _ = algorithm.update(state, batch, rng.make_key(3), phase=algorithm.traits.period - 1)
    for module in ENCODERS:
        for key, value in after.params[module].items():
            assert torch.equal(value, alone.params[module][key]) and not torch.equal(value, state.params[module][key])
    for key, value in after.target["encoder"].items():
        expected = torch.lerp(state.target["encoder"][key], alone.params["encoder"][key], 0.005)
        assert torch.equal(value, expected)
    assert {n: algorithm.optimizer(n).weight_decay for n in ("encoder", "critic")} == {"encoder": 1e-4, "critic": 0.0}


@pytest.mark.parametrize("n_step", [1, 2])
def test_td3_bc_on_latents(n_step: int) -> None:
    """The critics' loss against targets of n steps, and the policy's by the moved critics, through z(s, a)."""
    algorithm, state, batch = make("td3_bc", n_step=n_step)
    key = rng.make_key(3)
    after, metrics = algorithm.update(state, batch, key, phase=1)
    p, target = after.params, state.target
    z, z_next = (encode(p["encoder"], batch["observations"][:, i]) for i in (0, n_step))
    noise = (rng.normal(key, (B, SPEC.action_dim)) * 0.2).clamp(-0.5, 0.5)
    action = (policy_of(target["actor"], z_next) + noise).clamp(-1.0, 1.0)
    bootstrap = q_of(target["critic"], pair(p["pair_encoder"], z_next, action)).amin(0)
    y = torch.zeros(B)
    for b in range(B):
        for t in range(n_step + 1):
            if batch["is_terminal"][b, t]:
                break
            y[b] += 0.9**t * (bootstrap[b] if t == n_step else batch["rewards"][b, t])
    q = q_of(state.params["critic"], pair(p["pair_encoder"], z, batch["actions"][:, 0]))
    assert float(metrics["critic/loss"]) == pytest.approx(float((q - y).square().mean(-1).sum()), rel=1e-4)

    actor = {k: v.clone().requires_grad_() for k, v in state.params["actor"].items()}
    action = policy_of(actor, z)
    q = q_of(p["critic"], pair(p["pair_encoder"], z, action))[0]
    loss = (action - batch["actions"][:, 0]).square().mean() - 2.5 / q.detach().abs().mean() * q.mean()
    assert float(metrics["actor/loss"]) == pytest.approx(loss.item(), rel=1e-4)
    slope = torch.autograd.grad(loss, actor["net.head.weight"])[0]
    torch.testing.assert_close(after.opt["actor"]["mu"]["net.head.weight"], 0.1 * slope, rtol=1e-3, atol=1e-6)

    observations, actions = batch["observations"][:, 0], batch["actions"][:, 0]
    found = q_of(p["critic"], pair(p["pair_encoder"], z, actions)).amin(0)
    torch.testing.assert_close(algorithm.q_value(after, observations, actions), found, rtol=1e-4, atol=1e-5)
    acted, _ = algorithm.actor(after).act(None, observations, key, explore=False)
    torch.testing.assert_close(acted, policy_of(p["actor"], z))


@pytest.mark.parametrize("n_step", [1, 3])
def test_first_steps_are_the_transitions_that_begin_there(n_step: int) -> None:
    dataset = data()
    sampler = TransitionSampler(n_step=n_step, extra=("next_actions",))
    source = sampler.prepare(dataset)
    table = source.take(torch.arange(source.count))["observations"]
    states = StateSampler(n_step + 2, past_end=True)
    batch = first_steps(in_time(states(states.prepare(dataset), rng.make_key(0), 64)), n_step)
    for b in range(64):
        place = int((table == batch["observations"][b]).all(-1).nonzero()[0])
        index = torch.tensor([place])
        row = source.take(index) if n_step == 1 else windows(source, index, n_step)
        for name in ("observations", "actions", "rewards", "masks"):
            assert torch.equal(batch[name][b], row[name][0]), name
        got, expected = (discounted(x, 0.9) for x in ({k: v[b : b + 1] for k, v in batch.items()}, row))
        torch.testing.assert_close(got[0], expected[0])
        if row["masks"][0]:  # nothing else counts behind a terminal
            assert torch.equal(batch["next_observations"][b], row["next_observations"][0])
            assert torch.equal(batch["next_actions"][b], row["next_actions"][0])
            assert n_step == 1 or int(batch[SPAN][b]) == n_step
    assert 0.0 < float(batch["masks"].mean()) < 1.0


@pytest.mark.parametrize(
    ("spec", "settings", "refused"),
    [
        (DataSpec((3,), 1, True, 4), {}, "discrete actions"),
        (SPEC, {"cost_limit": 2.0}, "algo.cost_limit"),
        (DataSpec((3,), 2, history=2), {}, "windows of 2 observations"),
    ],
)
def test_what_has_no_latents_is_refused(spec: DataSpec, settings: dict[str, Any], refused: str) -> None:
    kind = registry.get("algo", "iql")
    with pytest.raises(UserError, match=f"representation=mrq does not go with {refused}"):
        kind(kind.Config(representation="mrq", **settings), spec)


def test_widths() -> None:
    """The encoders' are the networks', an action's latent is half of a state's."""
    state = make("iql", hidden=[8], latent=10)[1]
    shapes = {key: tuple(value.shape) for key, value in state.params["pair_encoder"].items()}
    assert shapes["action.weight"] == (5, 2) and shapes["net.layers.0.weight"] == (8, 15)
    assert state.params["critic"]["layers.0.weight"].shape == (2, 10, 8)
    assert np.prod(state.params["value"]["layers.0.weight"].shape) == 80


@pytest.mark.parametrize("setting", ["latent", "representation_horizon"])
def test_settings_of_latents_do_nothing_without_them(setting: str, tmp_path: Path) -> None:
    message = (
        f"algo.{setting}=4 does nothing with algo.representation=none; leave it out, or set algo.representation=mrq"
    )
    with pytest.raises(UserError, match=message):
        compose({"algo": "td3_bc", f"algo.{setting}": 4})
    compose({"algo": "td3_bc", f"algo.{setting}": 4, "algo.representation": "mrq"})
    (tmp_path / "config.yaml").write_text(f"algo: {{name: td3_bc, {setting}: 4}}\n")  # as a run's own may say
    compose({"config": str(tmp_path / "config.yaml")})
