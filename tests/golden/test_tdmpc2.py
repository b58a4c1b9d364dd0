"""TD-MPC2: an update beside plain torch, its values and plans by hand, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from offrl import losses, registry, rng
from offrl.algorithm import TrainState
from offrl.algorithms.tdmpc2 import TDMPC2, TDMPC2Config
from offrl.algorithms.tdmpc2.networks import LatentPolicy
from offrl.algorithms.tdmpc2.settings import discount_for
from offrl.algorithms.tdmpc2.tasks import EMBEDDING, scaled_entropy, within_unit
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.samplers.states import StateSampler
from offrl.data.transforms.episodes import concatenate
from offrl.data.transforms.multitask import as_tasks
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.nn.simnorm import simnorm
from offrl.settings.train import TrainConfig
from offrl.tasks.task import Task
from offrl.training.setup import make_algorithm

OBS, A, LATENT, HIDDEN, E, B, H = 3, 2, 16, [12, 10], 3, 6, 3
SPEC = DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
SMALL: dict[str, Any] = {
    "latent": LATENT,
    "hidden": HIDDEN,
    "encoder_hidden": [8],
    "critics": E,
    "discount": 0.9,
    "episodic": True,
    "plan_horizon": 3,
    "plan_population": 10,
    "plan_elites": 4,
    "plan_iterations": 2,
    "plan_proposals": 3,
}
PUBLISHED: dict[str, Any] = {"bc_weight": 0.0, "target_critics": 2, "plan_start": "previous"}


def make(**settings: Any) -> tuple[TDMPC2, TrainState]:
    """The algorithm and a state in which no head is 0 any more, and targets differ from the critics."""
    algorithm = TDMPC2(TDMPC2Config(**{**SMALL, **settings}), SPEC)
    state, g = algorithm.init(2), torch.Generator().manual_seed(1)
    for params in (*state.params.values(), *state.target.values()):
        params.update({k: v + 0.2 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    return algorithm, state._replace(extra={"scale": torch.tensor(1.5)})


def a_batch() -> dict[str, Tensor]:
    """Windows of two kinds of episodes; a terminal's observation is not known."""
    g, n = np.random.default_rng(0), 24
    last = np.arange(n) % 4 == 3
    terminal = last & (np.arange(n) < 16)
    data = from_arrays(g.normal(size=(n, OBS)), g.uniform(-1, 1, (n, A)), 5 * g.normal(size=n), terminal,
                       last & ~terminal, action_low=[-1.0] * A, action_high=[1.0] * A)  # fmt: skip
    batch = StateSampler(H + 1)(StateSampler(H + 1).prepare(data), rng.make_key(5), B)
    assert batch["is_terminal"].any() and not batch["valid"].all()
    return batch


# ---- shared maths


def test_simnorm() -> None:
    x = torch.tensor([0.0, 1.0, 2.0, 3.0, 0.0, 0.0, 0.0, 0.0])
    x[:4] = torch.tensor([1.0, 2.0, 3.0, 4.0]).log()
    torch.testing.assert_close(simnorm(x, 4), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.25, 0.25, 0.25, 0.25]))
    shift = torch.tensor([5.0] * 4 + [-3.0] * 4)
    torch.testing.assert_close(simnorm(x + shift, 4), simnorm(x, 4))


def test_percentiles() -> None:
    values = torch.tensor([3.0, 10.0, 0.0, 1.0, 2.0])
    low, high = losses.percentile(values, 0.05), losses.percentile(values, 0.95)
    assert (float(low), float(high)) == (pytest.approx(0.2), pytest.approx(8.6))
    assert float(torch.lerp(torch.tensor(1.0), high - low, 0.01)) == pytest.approx(1.074)


def test_the_discount_of_an_episode() -> None:
    lengths = {100: 0.95, 150: 0.9666667, 200: 0.975, 500: 0.99, 1000: 0.995, 10: 0.95, 5000: 0.995}
    for steps, discount in lengths.items():
        assert discount_for(steps) == pytest.approx(discount, rel=1e-6)


@pytest.mark.parametrize(
    ("count", "sizes"),
    [
        (1_214_651, {"latent": 128, "hidden": [384, 384], "encoder_hidden": [256], "critics": 2}),
        (4_960_618, {}),
        (18_062_442, {"latent": 768, "hidden": [1024, 1024], "encoder_hidden": [1024, 1024]}),
        (47_208_298, {"latent": 768, "hidden": [1792, 1792], "encoder_hidden": [1792] * 3}),
    ],
)
def test_published_sizes(count: int, sizes: dict[str, Any]) -> None:
    with torch.device("meta"):
        algorithm = TDMPC2(
            TDMPC2Config(discount=0.99, episodic=False, **sizes),
            DataSpec((24,), 6, action_low=(-1.0,) * 6, action_high=(1.0,) * 6),
        )
    assert sum(p.numel() for network in algorithm.networks.values() for p in network.parameters()) == count


# ---- an update in plain torch


def block(params: dict[str, Tensor], prefix: str, i: int, member: int | None) -> list[nn.Module]:
    weight, bias = params[f"{prefix}layers.{i}.weight"], params[f"{prefix}layers.{i}.bias"]
    names = (
        (f"{prefix}norms.{i}.weight", f"{prefix}norms.{i}.bias") if member is None else (f"scales.{i}", f"shifts.{i}")
    )
    if member is not None:
        weight, bias = weight[member].T, bias[member, 0]
    norm = [params[name] if member is None else params[name][member, 0] for name in names]
    return [linear(weight, bias), layer_norm(*norm), nn.Mish()]


def linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer


def layer_norm(weight: Tensor, bias: Tensor) -> nn.LayerNorm:
    layer = nn.LayerNorm(len(weight))
    layer.weight, layer.bias = nn.Parameter(weight.clone()), nn.Parameter(bias.clone())
    return layer


def perceptron(params: dict[str, Tensor], prefix: str = "", member: int | None = None) -> nn.Sequential:
    count = sum(k.startswith(f"{prefix}layers.") and k.endswith("weight") for k in params)
    weight, bias = params[f"{prefix}head.weight"], params[f"{prefix}head.bias"]
    head = linear(weight, bias) if member is None else linear(weight[member].T, bias[member, 0])
    return nn.Sequential(*(m for i in range(count) for m in block(params, prefix, i, member)), head)


class Softmaxes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, 8).softmax(-1).view(x.shape)


def latent_net(params: dict[str, Tensor], prefix: str = "") -> nn.Sequential:
    net = perceptron(params, f"{prefix}net.")
    return nn.Sequential(*net, layer_norm(params[f"{prefix}out.weight"], params[f"{prefix}out.bias"]), Softmaxes())


BINS = torch.linspace(-10, 10, 101)


def value_of(logits: Tensor) -> Tensor:
    x = (logits.softmax(-1) * BINS).sum(-1)
    return x.sign() * (x.abs().exp() - 1)


def cross_entropy(logits: Tensor, y: Tensor) -> Tensor:
    place = ((y.sign() * (1 + y.abs()).log()).clamp(-10, 10) + 10) / 0.2
    below = place.floor().long().clamp(max=99)
    target = torch.zeros_like(logits)
    target.scatter_(-1, below.unsqueeze(-1), (1 - (place - below)).unsqueeze(-1))
    target.scatter_(-1, (below + 1).unsqueeze(-1), (place - below).unsqueeze(-1))
    return -(target * logits.log_softmax(-1)).sum(-1)


def clipped_gradients(modules: dict[str, list[nn.Module]]) -> dict[str, list[Tensor]]:
    torch.nn.utils.clip_grad_norm_([p for nets in modules.values() for net in nets for p in net.parameters()], 20.0)
    return {name: [p.grad for net in nets for p in net.parameters()] for name, nets in modules.items()}  # type: ignore[misc]


class Plain:
    """The losses of TD-MPC2 as its authors' code has them, without dropout, on modules with a state's parameters."""

    def __init__(self, state: TrainState) -> None:
        p = state.params
        self.encoder = latent_net(p["encoder"])
        self.dynamics, self.reward = latent_net(p["model"], "dynamics."), perceptron(p["model"], "reward.")
        self.ends = perceptron(p["model"], "termination.")
        self.critics = [perceptron(p["critic"], member=i) for i in range(E)]
        self.targets = [perceptron(state.target["critic"], member=i) for i in range(E)]
        self.actor = perceptron(p["actor"], "net.")

    def policy(self, z: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, raw = self.actor(z).chunk(2, -1)
        log_std = -10 + 6 * (raw.tanh() + 1)
        return (mean + log_std.exp() * noise).tanh(), mean.tanh(), log_std

    def model_loss(
        self, batch: dict[str, Tensor], noise: Tensor, among: list[int]
    ) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        with torch.no_grad():
            following = self.encoder(batch["observations"][:, 1:])
            x = torch.cat([following, self.policy(following, noise)[0]], -1)
            q = torch.stack([value_of(self.targets[i](x)) for i in among]).amin(0)
            y = batch["rewards"][:, :-1] + 0.9 * (~batch["is_terminal"][:, 1:]).float() * q
        z, latents, parts = self.encoder(batch["observations"][:, 0]), [], dict.fromkeys(("c", "r", "v", "t"), 0.0)
        latents.append(z)
        for t in range(H):
            x = torch.cat([z, batch["actions"][:, t]], -1)
            z = self.dynamics(x)
            latents.append(z)
            known = batch["valid"][:, t + 1].float()
            parts["c"] += 0.5**t / H * ((z - following[:, t]).square().mean(-1) * known).mean()
            parts["r"] += 0.5**t / H * cross_entropy(self.reward(x), batch["rewards"][:, t]).mean()
            for critic in self.critics:
                parts["v"] += 0.5**t / H / E * cross_entropy(critic(x), y[:, t]).mean()
            ends = self.ends(z).squeeze(-1)
            parts["t"] += F.binary_cross_entropy_with_logits(ends, batch["is_terminal"][:, t + 1].float()) / H
        return parts, torch.stack(latents), y  # type: ignore[return-value]


def by_name(state: TrainState, module: str) -> list[Tensor]:
    """The first moments of Adam, tenths of the gradient after one update, in the order of `Plain`'s parameters."""
    mu: Any = state.opt[module]["mu"]

    def of(prefix: str) -> list[Tensor]:
        count = sum(k.startswith(f"{prefix}layers.") and k.endswith("weight") for k in mu)
        names = [f"{prefix}{p}.{i}.{q}" for i in range(count) for p in ("layers", "norms") for q in ("weight", "bias")]
        return [mu[n] for n in [*names, f"{prefix}head.weight", f"{prefix}head.bias"]]

    if module == "encoder":
        return [*of("net."), mu["out.weight"], mu["out.bias"]]
    if module == "model":
        dynamics = [*of("dynamics.net."), mu["dynamics.out.weight"], mu["dynamics.out.bias"]]
        return [*dynamics, *of("reward."), *of("termination.")]
    if module == "actor":
        return of("net.")
    found = []
    for i in range(E):
        for j in range(len(HIDDEN)):
            layer = [mu[f"layers.{j}.weight"][i].T, mu[f"layers.{j}.bias"][i, 0]]
            found += [*layer, mu[f"scales.{j}"][i, 0], mu[f"shifts.{j}"][i, 0]]
        found += [mu["head.weight"][i].T, mu["head.bias"][i, 0]]
    return found


@pytest.mark.parametrize("settings", [PUBLISHED, {}], ids=["published", "pessimistic"])
def test_an_update_in_plain_torch(settings: dict[str, Any]) -> None:
    algorithm, state = make(critic_dropout=0.0, **settings)
    batch, key = a_batch(), rng.make_key(9)
    after, metrics = algorithm.update(state, batch, key, phase=0)
    keys, plain = rng.split(key, 3), Plain(state)

    # the model's losses, and one clip over the gradients of three modules
    chosen, draw = rng.split(keys[0])
    among = rng.uniform(chosen, (E,)).topk(2).indices.tolist() if settings else [*range(E)]
    noise = rng.normal(draw, (H, B, A)).transpose(0, 1)
    parts, latents, y = plain.model_loss(batch, noise, among)
    for name, part in (
        ("model/consistency", "c"),
        ("model/reward", "r"),
        ("critic/loss", "v"),
        ("model/termination", "t"),
    ):
        assert float(metrics[name]) == pytest.approx(float(parts[part]), rel=2e-5), name
    (20 * parts["c"] + 0.1 * parts["r"] + 0.1 * parts["v"] + parts["t"]).backward()  # type: ignore[union-attr]
    modules: dict[str, list[nn.Module]] = {
        "encoder": [plain.encoder],
        "model": [plain.dynamics, plain.reward, plain.ends],
        "critic": [*plain.critics],
    }
    for module, gradients in clipped_gradients(modules).items():
        for got, gradient in zip(by_name(after, module), gradients, strict=True):
            torch.testing.assert_close(10 * got, gradient, rtol=1e-3, atol=2e-6)
    assert float(y.abs().max()) > 5.0

    # the policy's, with the critics after their step
    moved = Plain(after._replace(params={**after.params, "actor": state.params["actor"]}))
    pair, latents = rng.split(keys[2], 3), latents.detach()
    noise = rng.normal(pair[0], (H + 1, B, A))
    action, _, log_std = moved.policy(latents, noise)
    x = torch.cat([latents, action], -1)
    q = torch.stack([value_of(moved.critics[i](x)) for i in rng.uniform(pair[1], (E,)).topk(2).indices.tolist()]).mean(
        0
    )
    spread = torch.quantile(q[0].detach(), 0.95) - torch.quantile(q[0].detach(), 0.05)
    scale = 1.5 + 0.01 * (max(float(spread), 1.0) - 1.5)
    log_prob = (-0.5 * noise.square() - log_std - 0.9189385332).sum(-1)
    rho = 0.5 ** torch.arange(H + 1)
    loss = (-(1e-4 * -A * log_prob + q / scale).mean(-1) * rho).mean()
    if not settings:
        error = (action[:-1] - batch["actions"].transpose(0, 1)[:-1]).square().mean((1, 2))
        loss = loss + (q / scale).detach().abs().mean() / 2.5 * (rho[:-1] * error).mean()
    assert float(metrics["actor/scale"]) == pytest.approx(scale, rel=1e-5) == float(after.extra["scale"])
    assert float(metrics["actor/loss"]) == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
    loss.backward()
    for got, gradient in zip(
        by_name(after, "actor"), clipped_gradients({"actor": [moved.actor]})["actor"], strict=True
    ):
        torch.testing.assert_close(10 * got, gradient, rtol=1e-3, atol=2e-6)

    for name, target in after.target["critic"].items():
        expected = state.target["critic"][name] + 0.01 * (after.params["critic"][name] - state.target["critic"][name])
        torch.testing.assert_close(target, expected)


def test_dropout_is_of_the_first_layer_before_its_norm() -> None:
    algorithm, state = make(critic_dropout=0.5)
    key, params = rng.make_key(3), state.params["critic"]
    z, a = torch.randn(B, LATENT), torch.randn(B, A)
    x = torch.einsum("bi,eio->ebo", torch.cat([z, a], -1), params["layers.0.weight"]) + params["layers.0.bias"]
    x = torch.where(rng.uniform(key, tuple(x.shape)) >= 0.5, 2 * x, 0.0)
    for i in range(2):
        x = F.mish(F.layer_norm(x, x.shape[-1:]) * params[f"scales.{i}"] + params[f"shifts.{i}"])
        name = f"layers.{i + 1}" if i == 0 else "head"
        x = torch.einsum("ebi,eio->ebo", x, params[f"{name}.weight"]) + params[f"{name}.bias"]
    torch.testing.assert_close(algorithm.critics.logits(params, z, a, key), x, rtol=1e-4, atol=1e-5)


def test_values_and_rewards_are_0_at_first() -> None:
    """So that the first targets are the rewards."""
    algorithm = TDMPC2(TDMPC2Config(**SMALL), SPEC)
    state, batch = algorithm.init(0), {k: v.transpose(0, 1) for k, v in a_batch().items()}
    z = algorithm.apply("encoder", state.params["encoder"], batch["observations"][1:])
    assert torch.equal(algorithm.td_target(state, batch, z, rng.make_key(0)), batch["rewards"][:-1])


def test_the_policy_of_latents(monkeypatch: pytest.MonkeyPatch) -> None:
    """m = 0.2, log sigma = -1, noise 0.3; outputs 0, 1 and -1 for the deviation."""
    policy = LatentPolicy(1, 1, [2])
    mean = torch.tensor([0.2])
    monkeypatch.setattr(rng, "normal", lambda key, shape: torch.full(shape, 0.3))
    action, log_prob = policy.sample_with_log_prob((mean, torch.tensor([-1.0])), rng.make_key(0))
    assert float(action) == pytest.approx(0.300768, abs=1e-6)  # tanh(0.310364)
    assert float(log_prob) == pytest.approx(0.130878, abs=2e-6)
    entropy = scaled_entropy(torch.tensor([-1.0]), torch.tensor([0.3]))
    assert float(entropy) == pytest.approx(-0.036061, abs=1e-6)
    policy.net = nn.Module()
    policy.net.forward = lambda x, key: torch.cat([x, x], -1)  # type: ignore[method-assign]
    got = policy(torch.tensor([[0.0], [1.0], [-1.0]]))[1].squeeze(-1)
    torch.testing.assert_close(got, torch.tensor([-4.0, 0.569565, -8.569565]))


# ---- planning


def test_returns_of_plans() -> None:
    """By hand for each plan alone; after a predicted terminal nothing counts. A distance from the policy's actions
    costs as much as in TD3+BC.
    """
    algorithm, state = make()
    g = torch.Generator().manual_seed(0)
    latents, plans = simnorm(torch.randn(2, LATENT, generator=g)), torch.rand(2, 5, 3, A, generator=g) * 2 - 1
    # so that about half of the plans end at their first step
    params = state.params["model"]
    step = algorithm.apply("model", params, latents.unsqueeze(1).expand(-1, 5, -1), plans[:, :, 0])
    params["termination.head.bias"] = params["termination.head.bias"] - step.termination.median()
    actor, plain, key = algorithm.actor(state), Plain(state), rng.make_key(1)
    pair, draws = rng.split(key)
    noise, among = rng.normal(draws, (5, A)), rng.uniform(pair, (E,)).topk(2).indices.tolist()
    expected, distances, ended = torch.zeros(2, 5), torch.zeros(2, 5), 0
    for b in range(2):
        for p in range(5):
            z, alive, total = latents[b], 1.0, 0.0
            for t in range(3):
                x = torch.cat([z, plans[b, p, t]])
                error = float((plans[b, p, t] - plain.policy(z, torch.zeros(A))[0]).square().mean())
                distances[b, p] += alive * 0.9**t * error
                total, z = total + alive * 0.9**t * float(value_of(plain.reward(x))), plain.dynamics(x)
                alive *= float(plain.ends(z).sigmoid() <= 0.5)
            x = torch.cat([z, plain.policy(z, noise[p])[0]])
            value = sum(float(value_of(plain.critics[i](x))) for i in among) / 2
            expected[b, p], ended = total + alive * 0.9**3 * value, ended + (alive == 0.0)
    assert 0 < ended < 10
    penalty = expected.abs().mean(1, keepdim=True) / 2.5 * distances
    torch.testing.assert_close(actor.returns(latents, plans, key), expected - penalty, rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]
    actor = make(plan_distance_weight=0.0)[0].actor(state)
    torch.testing.assert_close(actor.returns(latents, plans, key), expected, rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]


def test_plans_of_the_policy() -> None:
    algorithm, state = make()
    actor: Any = algorithm.actor(state)
    z, noise, plain = simnorm(torch.randn(1, LATENT)), torch.randn(2, 3, A), Plain(state)
    plans = actor.policy_plans(z, noise)
    for n in range(2):
        latent = z[0]
        for t in range(3):
            action = plain.policy(latent, noise[n, t])[0]
            torch.testing.assert_close(plans[0, n, t], action, rtol=1e-4, atol=1e-5)
            latent = plain.dynamics(torch.cat([latent, action]))


@pytest.mark.parametrize("start", ["policy", "previous"])
def test_plans_begin_around_the_policy_or_the_previous_plan(start: str, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, state = make(plan_start=start)
    actor: Any = algorithm.actor(state)
    calls: list[dict[str, Any]] = []

    def mppi(returns: Any, latents: Tensor, mean: Tensor, *x: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        calls.append({"mean": mean, **settings})
        return torch.zeros(4, A), torch.full_like(mean, 0.25)

    monkeypatch.setattr("offrl.algorithms.tdmpc2.actor.mppi", mppi)
    observations, carry = torch.randn(4, OBS), actor.start(4)
    for _ in range(2):
        _, carry = actor.act(carry, observations, rng.make_key(0), explore=False)
    z = algorithm.apply("encoder", state.params["encoder"], observations)
    first = actor.policy_plans(z, torch.zeros(1, 3, A))[:, 0] if start == "policy" else torch.zeros(4, 3, A)
    assert torch.equal(calls[0]["mean"], first)
    assert torch.equal(calls[1]["mean"], first if start == "policy" else torch.full((4, 3, A), 0.25))
    assert calls[0]["proposals"].shape == (4, 3, 3, A) and calls[0]["population"] == 10
    assert (calls[0]["temperature"], calls[0]["std_max"]) == (5.0, 0.3)


def test_what_is_planned_for_an_episode_depends_on_no_other() -> None:
    """Also where one begins anew while the others go on."""
    algorithm, state = make(plan_elites=10, plan_action="mean", plan_start="previous")
    actor, observations, key = algorithm.actor(state), torch.randn(4, OBS), rng.make_key(0)
    _, carry = actor.act(actor.start(4), observations, key, explore=False)
    carry = actor.begin_anew(carry, torch.tensor([False, False, True, False]))
    together, _ = actor.act(carry, observations, key, explore=False)
    anew, carry = actor.act(actor.start(1), observations[2:3], key, explore=False)
    torch.testing.assert_close(together[2:3], anew, rtol=1e-4, atol=1e-5)
    _, carry = actor.act(actor.start(1), observations[3:], key, explore=False)
    on, _ = actor.act(carry, observations[3:], key, explore=False)
    torch.testing.assert_close(together[3:], on, rtol=1e-4, atol=1e-5)
    assert (on - actor.act(actor.start(1), observations[3:], key, explore=False)[0]).abs().max() > 1e-3


def test_an_episode_begins_anew_on_another_device() -> None:
    """For which torch's meta device stands."""
    algorithm, state = make()
    actor = algorithm.actor(pytree.tree_map(lambda x: x.to("meta"), state))
    carry = actor.begin_anew(actor.start(4), torch.zeros(4, dtype=torch.bool, device="meta"))
    assert carry.mean.device.type == "meta" and carry.mean.shape == (4, 3, A)


def test_without_planning_the_policy_acts() -> None:
    algorithm, state = make(planning=False)
    actor, observations = algorithm.actor(state), torch.randn(4, OBS)
    action, carry = actor.act(actor.start(4), observations, rng.make_key(0), explore=False)
    z = algorithm.apply("encoder", state.params["encoder"], observations)
    assert carry is None and torch.equal(action, algorithm.apply("actor", state.params["actor"], z)[0].tanh())


# ---- settings


def a_dataset(*, ends: bool = True, **more: Any) -> Any:
    flags = np.arange(40) % 20 == 19
    return from_arrays(np.zeros((40, OBS)), more.pop("actions", np.zeros((40, A))), np.zeros(40), flags & ends,
                       flags & (not ends), **more)  # fmt: skip


def test_the_data_decide_discount_and_terminals() -> None:
    fit = lambda data, **settings: TDMPC2.fit_config(TDMPC2Config(**settings), data)  # noqa: E731
    config = fit(a_dataset())
    assert (config.discount, config.episodic) == (0.95, True)
    data = a_dataset(ends=False)
    task = Task(name="x", max_episode_steps=1000)
    config = fit(dataclasses.replace(data, spec=dataclasses.replace(data.spec, task=task)))
    assert (config.discount, config.episodic) == (0.995, False)
    config = fit(a_dataset(), discount=0.8, episodic=False)
    assert (config.discount, config.episodic) == (0.8, False)


def test_refusals() -> None:
    for message, settings in (
        ("algo.latent=20 is no multiple of 8", {"latent": 20}),
        ("algo.target_critics=4 is more than algo.critics=3", {"target_critics": 4}),
        ("algo.plan_proposals=11 is more than algo.plan_population=10", {"plan_proposals": 11}),
        ("algo.plan_elites=20 is more than algo.plan_population=10", {"plan_elites": 20}),
        ("plan_population times algo.plan_horizon times algo.plan_iterations is 6,000,", {"plan_population": 10**9}),
        ("algo.plan_population=1000000, algo.plan_horizon=3, algo.latent=", {"plan_population": 10**6}),
    ):
        with pytest.raises(UserError, match=message):
            make(**settings)
    policy = TrainedPolicy(*make(), 0)
    with pytest.raises(UserError, match=r"algo.plan_elites=.* is more than algo.plan_population=2"):
        policy.with_settings({"plan_population": 2}).act(np.zeros(OBS, np.float32))
    config = TrainConfig(algo=TDMPC2Config())
    with pytest.raises(UserError, match="tdmpc2 needs continuous actions"):
        make_algorithm(config, a_dataset(actions=np.arange(40) % 2))
    with pytest.raises(UserError, match="no window of 31 states"):
        registry.get("algo", "tdmpc2")(TDMPC2Config(**SMALL, horizon=30), SPEC).sampler().prepare(a_dataset())


# ---- several tasks


def of_two_tasks() -> Any:
    """Data of a task with 2 numbers and 1 action, and of one with OBS and A; observations get the task's number."""
    g, n = np.random.default_rng(3), 24
    last = np.arange(n) % 6 == 5
    sizes = ((2, 1, 1.0), (OBS, A, 2.0))
    datasets = [
        from_arrays(g.normal(size=(n, o)), most * g.uniform(-1, 1, (n, a)), 5 * g.normal(size=n),
                    last & (np.arange(n) < 12), last & (np.arange(n) >= 12), action_low=[-most] * a,
                    action_high=[most] * a)
        for o, a, most in sizes
    ]  # fmt: skip
    return concatenate(as_tasks(datasets))


def make_many(**settings: Any) -> tuple[TDMPC2, TrainState, dict[str, Tensor]]:
    """The algorithm, a state in which no head is 0 any more, and a batch of both tasks."""
    data = of_two_tasks()
    algorithm = TDMPC2(TDMPC2Config(**{**SMALL, "discounts": [0.9, 0.6], **settings}), data.spec)
    state, g = algorithm.init(2), torch.Generator().manual_seed(1)
    for params in (*state.params.values(), *state.target.values()):
        params.update({k: v + 0.1 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    sampler = StateSampler(H + 1)
    batch = sampler(sampler.prepare(data), rng.make_key(5), B)
    assert set(batch["observations"][:, 0, -1].tolist()) == {0.0, 1.0}
    return algorithm, state._replace(extra={**state.extra, "scale": torch.tensor(1.5)}), batch


MASKS, DISCOUNTS = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), (0.9, 0.6)


def test_an_update_of_two_tasks_by_hand() -> None:
    """Each window by itself, with the embedding, the actions and the discount of its task."""
    algorithm, state, batch = make_many(critic_dropout=0.0)
    embeddings = 1.2 * state.params["model"]["tasks"] / state.params["model"]["tasks"].norm(dim=-1, keepdim=True)
    state.params["model"]["tasks"] = embeddings
    key = rng.make_key(9)
    after, metrics = algorithm.update(state, batch, key, phase=0)
    keys, plain = rng.split(key, 3), Plain(state)
    noise = rng.normal(rng.split(keys[0])[1], (H, B, A))

    def policy(nets: Plain, z: Tensor, e: Tensor, eps: Tensor, k: int) -> tuple[Tensor, Tensor]:
        mean, raw = nets.actor(torch.cat([z, e])).chunk(2)
        log_std = -10 + 6 * (raw.tanh() + 1)
        count = int(MASKS[k].sum())
        action = ((mean + log_std.exp() * eps) * MASKS[k]).tanh()
        log_prob = (-0.5 * eps.square() - log_std - 0.9189385332)[:count].sum()
        return action, -count * log_prob

    sums = dict.fromkeys(("model/consistency", "model/reward", "critic/loss"), 0.0)
    latents = torch.zeros(H + 1, B, LATENT)
    for b in range(B):
        k = int(batch["observations"][b, 0, -1])
        e = embeddings[k]
        rows = [plain.encoder(torch.cat([row, e])) for row in batch["observations"][b, :, :-1]]
        z = latents[0, b] = rows[0].detach()
        for t in range(H):
            x = torch.cat([z, e, batch["actions"][b, t]])
            next_x = torch.cat([rows[t + 1], e, policy(plain, rows[t + 1], e, noise[t, b], k)[0]])
            q = min(float(value_of(net(next_x))) for net in plain.targets)
            y = batch["rewards"][b, t] + DISCOUNTS[k] * float(~batch["is_terminal"][b, t + 1]) * q
            weight = 0.5**t / H / B
            sums["model/reward"] += weight * float(cross_entropy(plain.reward(x), batch["rewards"][b, t]))
            sums["critic/loss"] += weight / E * sum(float(cross_entropy(net(x), y)) for net in plain.critics)
            z = latents[t + 1, b] = plain.dynamics(x).detach()
            error = float((z - rows[t + 1]).square().mean())
            sums["model/consistency"] += weight * error * float(batch["valid"][b, t + 1])
    for name, value in sums.items():
        assert float(metrics[name]) == pytest.approx(value, rel=2e-5), name

    # the policy's loss, with critics and embeddings after their step; these within the unit ball
    moved = Plain(after._replace(params={**after.params, "actor": state.params["actor"]}))
    embeddings = after.params["model"]["tasks"]
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(2), rtol=1e-5, atol=0.0)
    pair = rng.split(keys[2], 3)
    noise, among = rng.normal(pair[0], (H + 1, B, A)), rng.uniform(pair[1], (E,)).topk(2).indices.tolist()
    q, entropy, bc = torch.zeros(H + 1, B), torch.zeros(H + 1, B), torch.zeros(H, B)
    for b in range(B):
        k = int(batch["observations"][b, 0, -1])
        e, count = embeddings[k], int(MASKS[k].sum())
        for t in range(H + 1):
            action, entropy[t, b] = policy(moved, latents[t, b], e, noise[t, b], k)
            x = torch.cat([latents[t, b], e, action])
            q[t, b] = sum(float(value_of(moved.critics[i](x))) for i in among) / 2
            if t < H:
                bc[t, b] = (action - batch["actions"][b, t])[:count].square().mean()
    spread = torch.quantile(q[0], 0.95) - torch.quantile(q[0], 0.05)
    scale, rho = 1.5 + 0.01 * (max(float(spread), 1.0) - 1.5), 0.5 ** torch.arange(H + 1)
    loss = -((q / scale + 1e-4 * entropy).mean(-1) * rho).mean()
    loss = loss + (q / scale).abs().mean() / 2.5 * (bc.mean(-1) * rho[:-1]).mean()
    assert float(metrics["actor/loss"]) == pytest.approx(float(loss), rel=1e-4, abs=1e-6)


def test_embeddings_of_norm_1_at_most() -> None:
    _, state, _ = make_many()
    params = {"tasks": torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "other": torch.ones(1)}
    inside = within_unit(params)
    torch.testing.assert_close(inside["tasks"], torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    assert float(inside["tasks"].norm(dim=-1).max()) <= 1.0 and inside["other"] is params["other"]
    fresh = TDMPC2(TDMPC2Config(**SMALL), of_two_tasks().spec).init(0).params["model"]["tasks"]
    assert fresh.shape == (2, EMBEDDING) == state.params["model"]["tasks"].shape and float(fresh.abs().max()) <= 0.02


def test_actions_that_a_task_lacks() -> None:
    """They are 0, whatever is drawn, and nothing is learnt of them."""
    algorithm, state, batch = make_many(discounts=[])
    observations = batch["observations"][:, 0]
    first = observations[:, -1] == 0.0
    latents = algorithm.encode(state.params, state.extra, observations)
    dist = algorithm.apply("actor", state.params["actor"], latents)
    for action in (algorithm.policy.sample(dist, rng.make_key(3)), algorithm.policy.mode(dist)):
        assert bool((action[first, 1] == 0.0).all()) and bool((action[~first] != 0.0).all())

    # outputs 0 and 2 are of the action that the task has
    of_first = {name: x[first].transpose(0, 1) for name, x in batch.items()}
    z = algorithm.encode(state.params, state.extra, of_first["observations"])

    def loss(params: dict[str, Tensor]) -> Tensor:
        return algorithm.actor_loss(params, state, of_first, z, rng.make_key(4))[0]

    gradient = torch.func.grad(loss)(state.params["actor"])
    bias = gradient["net.head.bias"]
    assert bool((bias[[1, 3]] == 0.0).all()) and bool((bias[[0, 2]] != 0.0).all())
    assert all(bool(x.isfinite().all()) for x in gradient.values())


@pytest.mark.parametrize("explore", [False, True])
def test_plans_of_a_task_use_its_own_actions(explore: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm, state, batch = make_many()
    actor: Any = algorithm.actor(state)
    observations, plans, returns = batch["observations"][:, 0], list[Tensor](), actor.returns
    first = observations[:, -1] == 0.0

    def record(latents: Tensor, tried: Tensor, key: Tensor) -> Tensor:
        plans.append(tried)
        return returns(latents, tried, key)

    monkeypatch.setattr(actor, "returns", record)
    carry = actor.start(len(observations))
    for t in range(2):
        action, carry = actor.act(carry, observations, rng.make_key(t), explore=explore)
        assert bool((action[first, 1] == 0.0).all()) and bool((action[~first, 1] != 0.0).all())
        assert bool((carry.mean[first][..., 1] == 0.0).all())
    assert len(plans) == 4
    for tried in plans:
        assert bool((tried[first][..., 1] == 0.0).all()) and bool((tried[~first][..., 1].std(1) > 0.0).all())


def test_returns_of_plans_by_the_discount_of_their_task() -> None:
    """Rewards of 1, no values and no ends: 1 + gamma + gamma^2."""
    algorithm, state, batch = make_many(episodic=False, plan_distance_weight=0.0)
    ones = torch.full((101,), -1e3)
    ones[50 + round(np.log(2.0) / 0.2 - 0.5)] = 0.0
    params = {name: torch.zeros_like(x) for name, x in state.params["model"].items()}
    params["reward.head.bias"] = ones
    critic = {name: torch.zeros_like(x) for name, x in state.params["critic"].items()}
    state = state._replace(params={**state.params, "model": params, "critic": critic})
    observations = batch["observations"][:, 0]
    actor: Any = algorithm.actor(state)
    z = algorithm.encode(state.params, state.extra, observations)
    got = actor.returns(z, torch.zeros(B, 5, 3, A), rng.make_key(0))
    gamma = torch.tensor(DISCOUNTS)[observations[:, -1].long()]
    reward = float(value_of(ones))
    torch.testing.assert_close(got, (reward * (1 + gamma + gamma**2)).unsqueeze(-1).expand(-1, 5), rtol=1e-5, atol=1e-5)


def test_discounts_of_tasks() -> None:
    """By each one's longest episode; a number that is given is that of all."""
    g = np.random.default_rng(0)

    def of_length(steps: int) -> Any:
        flags = np.arange(2 * steps) % steps == steps - 1
        return from_arrays(g.normal(size=(2 * steps, 2)), np.zeros((2 * steps, 1)), np.zeros(2 * steps),
                           np.zeros(2 * steps, bool), flags, action_low=[-1.0], action_high=[1.0])  # fmt: skip

    data = concatenate(as_tasks([of_length(200), of_length(500)]))
    config = TDMPC2.fit_config(TDMPC2Config(), data)
    assert config.discounts == pytest.approx([0.975, 0.99]) and config.discount == pytest.approx(0.99)
    assert TDMPC2.fit_config(config, data) == config
    assert TDMPC2.fit_config(TDMPC2Config(discount=0.8), data).discounts == []
    assert TDMPC2.fit_config(TDMPC2Config(), data, {"discount": [0.8, 0.9]}).discounts == []
