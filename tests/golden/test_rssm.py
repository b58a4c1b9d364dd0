"""RSSM: the latent model, its losses and the policy that is trained in it, by hand; and what it refuses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import TrainState
from offrl.algorithms.rssm import RSSM, RSSMConfig
from offrl.algorithms.rssm.imagination import LatentRollout, latent_rollout
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.states import StateSampler
from offrl.errors import UserError
from offrl.nn.heads import symlog
from offrl.optim import LaProp
from offrl.settings.compose import compose
from offrl.settings.presets import finetune_settings
from offrl.settings.train import TrainConfig
from offrl.training.setup import make_algorithm
from offrl.world_models.recurrent.distributions import Classes, Normals, drawn_classes, kl, one_head
from offrl.world_models.recurrent.latents import LatentState, LatentWindows
from offrl.world_models.recurrent.modules import model_networks
from offrl.world_models.recurrent.networks import HEAD, BlockGRU, BlockLinear, BoundedNormal, gated
from offrl.world_models.recurrent.objectives import OBJECTIVES, action_log_prob, balanced_kl, contrastive, squared_error
from offrl.world_models.recurrent.returns import lambda_returns

OBS, A, B, T, H = 3, 2, 5, 6, 3
SPEC = DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
SMALL: dict[str, Any] = {
    "length": T,
    "horizon": H,
    "recurrent_width": 16,
    "blocks": 4,
    "groups": 3,
    "classes": 4,
    "width": 8,
    "warmup_steps": 0,
    "learning_rate": 1e-3,
    "members": 1,
    "penalty": 0.0,
    "bc_weight": 0.0,
}


def make(**settings: Any) -> tuple[RSSM, TrainState]:
    """The algorithm and a state in which no head is 0 any more, and the slow critic differs from the critic."""
    algorithm = RSSM(RSSMConfig(**{**SMALL, **settings}), SPEC)
    state, g = algorithm.init(2), torch.Generator().manual_seed(1)
    for params in (*state.params.values(), *state.target.values()):
        params.update({k: v + 0.1 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    return algorithm, state


def episodes(rewards: float = 5.0, **more: Any) -> Dataset:
    """Of four rows each, of which some end in terminals whose observation is not known."""
    g, n = np.random.default_rng(0), 24
    last = np.arange(n) % 4 == 3
    terminal = last & (np.arange(n) < 16)
    return from_arrays(g.normal(size=(n, OBS)), more.pop("actions", g.uniform(-1, 1, (n, A))),
                       rewards * g.normal(size=n), terminal, last & ~terminal, **more)  # fmt: skip


def a_batch() -> dict[str, Tensor]:
    """Windows [T, B] over several episodes."""
    data = episodes(action_low=[-1.0] * A, action_high=[1.0] * A)
    sampler = StateSampler(T, "chain")
    batch = {k: v.transpose(0, 1) for k, v in sampler(sampler.prepare(data), rng.make_key(5), B).items()}
    assert batch["is_terminal"].any() and batch["is_first"][1:].any() and not batch["valid"].all()
    return batch


def observed(
    algorithm: RSSM, params: dict[str, Any], batch: dict[str, Tensor], key: Tensor | None = None
) -> LatentWindows:
    return algorithm.latents(params).observe_windows(
        batch["observations"], batch["previous_actions"], batch["is_first"], rng.make_key(3) if key is None else key
    )


def model_loss(
    algorithm: RSSM, params: dict[str, Any], windows: LatentWindows, batch: dict[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    objective = OBJECTIVES[algorithm.config.objective]
    return objective(algorithm.latents(params), windows, batch, rng.make_key(0), params)


def gradients(loss: Tensor, params: dict[str, Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, list(params.values()), retain_graph=True, allow_unused=True))


# ---- shared maths


def test_bins_whose_values_are_symexp() -> None:
    values = HEAD.values(torch.zeros(()))
    assert values.shape == (255,) and float(values[-1]) == pytest.approx(485165194.4, rel=1e-5) == -float(values[0])
    torch.testing.assert_close(values[126:130], torch.tensor([-0.170558, 0.0, 0.170558, 0.370205]), rtol=1e-5, atol=0)
    for y, low, weights in (
        (1.0, 131, (0.617329, 0.382671)),
        (5.0, 138, (0.640706, 0.359294)),
        (-3.7, 117, (0.815568, 0.184432)),
        (0.0, 127, (1.0, 0.0)),
        (-1e10, 0, (1.0, 0.0)),
        (1e10, 253, (0.0, 1.0)),
    ):
        p = HEAD.project(torch.tensor([y]), None)[0]
        torch.testing.assert_close(p[low : low + 2], torch.tensor(weights), rtol=1e-5, atol=2e-6)
        assert int((p > 0).sum()) <= 2
        if abs(y) < 100:
            assert float(HEAD.mean((p + 1e-30).log())) == pytest.approx(y, rel=1e-5, abs=1e-6)
    assert float(HEAD.mean(torch.full((255,), 0.3))) == 0.0
    logits = torch.zeros(255, requires_grad=True)
    (gradient,) = torch.autograd.grad(HEAD.loss(logits, torch.tensor(5.0)), logits)
    torch.testing.assert_close(gradient, 1 / 255 - HEAD.project(torch.tensor(5.0), None), rtol=1e-5, atol=1e-7)


def test_laprop_with_a_clip_for_each_tensor() -> None:
    """p = 1, gradients 1 and -0.1: the first is clipped to 0.3; and a zero tensor is clipped by 1e-3."""
    adam, params = LaProp(4e-5, eps=1e-20), {"p": torch.ones(1), "zero": torch.zeros(1)}
    state = adam.init(params)
    once, state = adam.update(params, {"p": torch.ones(1), "zero": torch.ones(1)}, state)
    assert float(once["p"]) == pytest.approx(1 - 4e-5, abs=6e-8)
    assert float(state["nu"]["zero"]) == pytest.approx(1e-3 * 0.0003**2, rel=1e-5)  # type: ignore[index, arg-type]
    twice, state = adam.update(once, {"p": torch.full((1,), -0.1), "zero": torch.ones(1)}, state)
    momentum = float(state["mu"]["p"]) / (1 - 0.9**2)  # type: ignore[index, arg-type]
    assert momentum == pytest.approx(0.238262, abs=1e-5)
    assert float(once["p"] - twice["p"]) == pytest.approx(4e-5 * 0.238262, abs=6e-8)
    warm = LaProp(1.0, warmup_steps=4)
    moved = warm.init(params)
    for n in range(6):
        new, moved = warm.update(params, {"p": torch.ones(1), "zero": torch.ones(1)}, moved)
        assert float(params["p"] - new["p"]) == pytest.approx(min(n / 4, 1.0), rel=1e-4)


def with_logits(*values: float) -> Tensor:
    """Log probabilities of one group of three classes."""
    return Classes(1, 3, 0.01).read(torch.tensor(values))


def test_latents_have_a_share_of_the_uniform_distribution() -> None:
    p, q = with_logits(2.0, 0.0, 0.0), with_logits(0.0, 1.0, 0.0)
    torch.testing.assert_close(p.exp(), torch.tensor([[0.782450, 0.108775, 0.108775]]), rtol=1e-5, atol=0)
    torch.testing.assert_close(q.exp(), torch.tensor([[0.213155, 0.573689, 0.213155]]), rtol=1e-5, atol=0)
    assert float(kl(p, q)) == pytest.approx(0.763454, rel=1e-5)


def test_latents_without_a_share_of_the_uniform_distribution() -> None:
    kind = Classes(1, 3, 0.0)
    torch.testing.assert_close(
        kind.read(torch.tensor([1.0, 2.0, 3.0]))[0], torch.tensor([1.0, 2.0, 3.0]).log_softmax(-1)
    )
    far = kind.read(torch.tensor([-500.0, 0.0, 500.0]))
    assert far.isfinite().all() and float(kl(far, far)) == 0.0


def test_a_sample_has_the_gradient_of_the_probabilities() -> None:
    logits = torch.tensor([[0.3, 2.0, -1.0], [1.0, 0.0, 0.5]], requires_grad=True)
    weights = torch.tensor([1.0, 2.0, 4.0, 3.0, 5.0, 7.0])
    log_p = logits.log_softmax(-1)
    assert drawn_classes(log_p, None).tolist() == [0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    noise = torch.zeros(2, 3)
    noise[1, 2] = 10.0
    sample = drawn_classes(log_p, noise)
    assert sample.tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    (got,) = torch.autograd.grad(sample @ weights, logits, retain_graph=True)
    (expected,) = torch.autograd.grad(logits.softmax(-1).flatten() @ weights, logits)
    torch.testing.assert_close(got, expected)


def test_gates() -> None:
    """h = 0.5: candidate and update 1, then all 0."""
    h, zero, one = torch.tensor([0.5]), torch.zeros(1), torch.ones(1)
    assert float(gated(h, zero, one, one)) == pytest.approx(0.481059, rel=1e-5)
    assert float(gated(h, zero, zero, zero)) == pytest.approx(0.365529, rel=1e-5)


def test_blocks_are_a_block_diagonal_matrix() -> None:
    blocks = BlockLinear(3, 4, 2)
    torch.nn.init.normal_(blocks.bias)
    x = torch.randn(5, 12)
    dense = torch.block_diag(*blocks.weight).T
    expected = F.linear(x, dense, blocks.bias.flatten())
    torch.testing.assert_close(blocks(x.unflatten(-1, (3, 4))).flatten(-2), expected)


def test_a_step_of_the_recurrent_network() -> None:
    """Beside dense layers in plain torch, for two blocks; actions beyond 1 count as 1."""
    torch.manual_seed(0)
    gru = BlockGRU(4, 3, 2, 5, 2)
    for p in gru.parameters():
        torch.nn.init.normal_(p, std=0.5)
    h, z, a = torch.randn(6, 4), torch.randn(6, 3), torch.tensor([[0.5, -3.0]]).expand(6, 2)

    def activation(x: Tensor, scale: Tensor) -> Tensor:
        return F.silu(F.rms_norm(x, x.shape[-1:], scale, 1e-4))

    x = [activation(net[0][0](x), net[0][1].scale) for net, x in zip(gru.inputs, (h, z, a.clamp(-1, 1)), strict=True)]
    hidden = torch.cat([torch.cat([part, *x], -1) @ w + b for part, w, b in zip(
        h.chunk(2, -1), gru.hidden.weight, gru.hidden.bias, strict=True)], -1)  # fmt: skip
    hidden = activation(hidden, gru.activation.scale)
    expected = []
    for i, part in enumerate(hidden.chunk(2, -1)):
        reset, candidate, update = (part @ gru.gates.weight[i] + gru.gates.bias[i]).chunk(3, -1)
        share = torch.sigmoid(update - 1)
        expected.append(share * torch.tanh(torch.sigmoid(reset) * candidate) + (1 - share) * h.chunk(2, -1)[i])
    torch.testing.assert_close(gru(h, z, a), torch.cat(expected, -1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("expected", "sizes"),
    [
        pytest.param(360_320, (), id="size1m"),
        pytest.param(5_717_504, (2048, 256, 16), id="size12m"),
        pytest.param(12_852_480, (3072, 384, 24), id="size25m"),
        pytest.param(22_838_272, (4096, 512, 32), id="size50m"),
        pytest.param(51_362_304, (6144, 768, 48), id="size100m"),
        pytest.param(91_289_600, (8192, 1024, 64), id="size200m"),
    ],
)
def test_published_sizes(expected: int, sizes: tuple[int, ...]) -> None:
    """Recurrent network, prior and posterior without what reads the embedding, for 6 actions."""
    settings = dict(zip(("recurrent_width", "width", "classes"), sizes, strict=False))
    c = RSSMConfig(members=1, **settings)  # type: ignore[arg-type]
    with torch.device("meta"):
        networks = model_networks(c, DataSpec((OBS,), 6, action_low=(-1.0,) * 6, action_high=(1.0,) * 6))
    counts = [p.numel() for name in ("dynamics", "prior", "posterior") for p in networks[name].parameters()]
    assert sum(counts) - c.width**2 == expected


def test_lambda_returns() -> None:
    rewards, values = torch.tensor([9.0, 1.0, 2.0, 3.0]), torch.tensor([0.5, 1.0, 1.5, 2.0])
    alive, on, end = torch.full((4,), 0.9), torch.ones(4), torch.tensor([1.0, 1.0, 0.0, 1.0])
    for expected, x, y, decay in (
        ((6.3216325, 6.1715, 4.8), alive, on, 0.95),
        ((3.90925, 3.35, 4.8), alive, end, 0.95),
        ((2.755, 2.0, 4.8), alive * end, end, 0.95),
        ((1.9, 3.35, 4.8), alive, on, 0.0),
    ):
        torch.testing.assert_close(lambda_returns(rewards, values, x, y, decay), torch.tensor(expected))


def test_without_decay_a_return_is_the_discounted_sum_and_the_last_value() -> None:
    g = torch.Generator().manual_seed(0)
    rewards, values = torch.randn(6, 3, generator=g), torch.randn(6, 3, generator=g)
    alive = torch.rand(6, 3, generator=g)
    found = lambda_returns(rewards, values, alive, torch.ones(6, 3), 1.0)
    for t in range(5):
        following = values[-1]
        for i in range(5, t, -1):
            following = rewards[i] + alive[i] * following
        torch.testing.assert_close(found[t], following)


def test_disagreement_of_heads() -> None:
    p = torch.tensor([[[0.5, 0.5], [1.0, 1e-12]], [[0.7, 0.3], [0.8, 0.2]]])
    disagreement = Classes(2, 2, 0.0).disagreement
    assert float(disagreement(p.log())) == pytest.approx(0.2, rel=1e-5)
    assert float(disagreement(p.flip(0).log())) == pytest.approx(0.2, rel=1e-5)
    assert float(disagreement(p[:1].expand(3, 2, 2).log())) == 0.0


def test_normal_latents() -> None:
    """softplus(0) + 0.1 = 0.793147; KL(N(1, 0.5) | N(0, 1)) = ln 2 + 1.25 / 2 - 1/2, summed over numbers."""
    kind = Normals(2)
    assert (kind.size, kind.outputs) == (2, 4)
    known = kind.read(torch.tensor([0.5, -1.0, 0.0, math.log(math.expm1(0.4))]))
    torch.testing.assert_close(known, torch.tensor([[0.5, 0.793147], [-1.0, 0.5]]))
    assert kind.draw(known, None).tolist() == [0.5, -1.0]
    torch.testing.assert_close(kind.draw(known, torch.tensor([1.0, -2.0])), torch.tensor([1.293147, -2.0]))
    torch.testing.assert_close(kind.noise(rng.make_key(0), 3), rng.normal(rng.make_key(0), (3, 2)))
    p, q = torch.tensor([[1.0, 0.5], [0.0, 1.0]]), torch.tensor([[0.0, 1.0], [0.0, 1.0]])
    assert float(kind.kl(p, q)) == pytest.approx(0.818147, abs=1e-6)
    assert float(kind.kl(p, p)) == 0.0
    plain = torch.distributions.kl_divergence(*(torch.distributions.Normal(x[:, 0], x[:, 1]) for x in (q, p)))
    assert float(kind.kl(q, p)) == pytest.approx(float(plain.sum()), rel=1e-6)


def test_disagreement_of_normal_heads() -> None:
    """Means 0 and 0.6 of one number, deviations 0.2 and 1 of another: 0.3 and 0.4 from their means, 0.5 together."""
    kind, heads = Normals(2), torch.tensor([[[0.0, 1.0], [5.0, 0.2]], [[0.6, 1.0], [5.0, 1.0]]])
    assert float(kind.disagreement(heads)) == pytest.approx(0.5, rel=1e-6)
    assert float(kind.disagreement(heads[:1].expand(3, 2, 2))) == 0.0


@pytest.mark.parametrize(("ahead", "share"), [(0.8, 0.2), (5 / 6, 1 / 6), (1.0, 0.1)])
def test_the_divergence_of_normal_latents_trains_prior_and_posterior_apart(ahead: float, share: float) -> None:
    """DreamerV2's balance, RePo's and DreamerV3's: a state of 0.818147 nats is within the free bits, one of twice that
    trains the prior by the first share and the posterior by the second.
    """
    algorithm, _ = make(latents="gaussian", latent=1, dynamics_weight=ahead, representation_weight=share)
    posterior = torch.tensor([[[[1.0, 0.5]]], [[[math.sqrt(1.0 + 2 * 0.818147), 0.5]]]], requires_grad=True)
    prior = torch.tensor([0.0, 1.0]).expand(2, 1, 1, 2).clone().requires_grad_()
    zeros = LatentState(torch.zeros(2, 1, 16), torch.zeros(2, 1, 1))
    windows = LatentWindows(zeros, posterior, prior.unsqueeze(-3), torch.zeros(2, 1, 8))
    loss, mean = balanced_kl(algorithm.latents({}), windows, two_states(True, True), rng.make_key(0))
    assert float(mean.detach()) == pytest.approx(1.5 * 0.818147, rel=1e-5)
    assert float(loss.detach()) == pytest.approx((ahead + share) * (1.0 + 2 * 0.818147) / 2, rel=1e-5)
    of_posterior, of_prior = torch.autograd.grad(loss, [posterior, prior])
    plain = torch.autograd.grad(Normals(1).kl(posterior, prior)[1].mean() / 2, [posterior, prior])
    torch.testing.assert_close(of_posterior, share * plain[0])
    torch.testing.assert_close(of_prior, ahead * plain[1])
    assert not of_posterior[0].any() and of_posterior[1].all()


def test_the_bounded_normal() -> None:
    policy = BoundedNormal(4, 2, 8)
    policy.mean, policy.deviation = torch.nn.Identity(), torch.nn.Identity()
    policy.body = torch.nn.Identity()  # type: ignore[assignment]
    mean, log_std = policy(torch.tensor([-2.0, 0.0, 2.0]))
    torch.testing.assert_close(log_std.exp(), torch.tensor([0.55, 0.892717, 0.983812]), rtol=1e-5, atol=0)
    assert float(mean[2]) == pytest.approx(math.tanh(2.0))
    dist = (torch.tensor([0.5]).tanh(), log_std[1:2])
    assert float(policy.log_prob(dist, torch.tensor([0.1]))) == pytest.approx(-0.887723, rel=1e-5)
    assert float(policy.entropy(dist)) == pytest.approx(1.305453, rel=1e-5)
    far = (torch.full((100, 1), 0.9), torch.zeros(100, 1))
    assert float(policy.sample(far, rng.make_key(0)).max()) == 1.0 < float(policy.unbounded(far, rng.make_key(0)).max())


# ---- windows


@pytest.mark.parametrize(("core", "latents"), [("gru", "classes"), ("scan", "classes"), ("gru", "gaussian")])
def test_a_window_is_its_steps_one_by_one(core: str, latents: str) -> None:
    """With the noise of the window; an episode's first state knows nothing of what came before."""
    algorithm, state = make(core=core, latents=latents, latent=5)
    batch, key = a_batch(), rng.make_key(3)
    windows = observed(algorithm, state.params, batch)
    model = algorithm.latents(state.params)
    noise = rng.gumbel(key, (T, B, 3, 4)) if latents == "classes" else rng.normal(key, (T, B, 5))
    for b in range(B):
        for t in range(T):
            if batch["is_first"][t, b]:
                known = model.begin(1, torch.device("cpu"))
            embedding = model.embed(batch["observations"][t, b : b + 1])
            action = batch["previous_actions"][t, b : b + 1]
            known, posterior = model.observe(known, action, embedding, noise[t, b : b + 1])
            torch.testing.assert_close(windows.state.features[t, b], known.features[0], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(windows.posterior[t, b], posterior[0], rtol=1e-4, atol=1e-5)
            memory = pytree.tree_map(lambda x, t=t, b=b: x[t, b : b + 1], windows.state.memory)
            torch.testing.assert_close(memory, known.memory, rtol=1e-4, atol=1e-5)
            prior = model.kind.read(algorithm.apply("prior", state.params["prior"], known.recurrent))
            torch.testing.assert_close(windows.prior[t, b], prior[0], rtol=1e-4, atol=1e-5)
    wild = {**batch, "previous_actions": torch.where(batch["is_first"].unsqueeze(-1), 1e6, batch["previous_actions"])}
    torch.testing.assert_close(observed(algorithm, state.params, wild), windows, rtol=0, atol=0)


@pytest.mark.parametrize("core", ["gru", "scan"])
def test_memory_ends_with_the_episode_in_the_gradient_too(core: str) -> None:
    algorithm, state = make(core=core)
    batch = a_batch()
    observations = batch["observations"].clone().requires_grad_()
    windows = observed(algorithm, state.params, {**batch, "observations": observations})
    t, b = next((t, b) for b in range(B) for t in range(2, T) if batch["is_first"][t, b])
    (gradient,) = torch.autograd.grad(windows.state.features[t:, b].square().sum(), observations)
    assert not gradient[:t, b].any() and gradient[t, b].abs().sum() > 0
    (before,) = torch.autograd.grad(observed(algorithm, state.params, {**batch, "observations": observations})
                                    .state.features[t - 1, b].square().sum(), observations)  # fmt: skip
    assert before[t - 2, b].abs().sum() > 0


def small_observed(posterior: Tensor, prior: Tensor) -> LatentWindows:
    """One window of two states with these log probabilities [2, 1, 3, 4]."""
    state = LatentState(torch.zeros(2, 1, 16), torch.zeros(2, 1, 12))
    return LatentWindows(state, posterior, prior.unsqueeze(-3), torch.zeros(len(posterior), 1, 8))


@pytest.mark.parametrize("scale", [0.2, 4.0])
def test_the_divergence_trains_prior_and_posterior_apart(scale: float) -> None:
    """Below the free bits neither; above, the prior by the first term and the posterior by a tenth of the second."""
    algorithm, state = make()
    g = torch.Generator().manual_seed(0)
    raw = [scale * torch.randn(2, 1, 12, generator=g) for _ in range(2)]
    posterior, prior = (x.requires_grad_() for x in raw)
    latents = algorithm.latents(state.params)
    p, q = latents.kind.read(posterior), latents.kind.read(prior)
    batch = {k: v[:2, :1] for k, v in a_batch().items()} | {"valid": torch.ones(2, 1, dtype=torch.bool)}
    loss, metrics = model_loss(algorithm, state.params, small_observed(p, q), batch)
    of_posterior, of_prior = torch.autograd.grad(loss, [posterior, prior], retain_graph=True)
    divergence = kl(p, q)
    assert (divergence > 1.0).all() == (scale == 4.0) == (not (divergence < 1.0).all())
    assert float(metrics["model/kl"].detach()) == pytest.approx(float(divergence.detach().mean()), rel=1e-5)
    if scale < 1.0:
        assert not of_posterior.any() and not of_prior.any()
        return
    plain = torch.autograd.grad(divergence.mean(), [posterior, prior])
    torch.testing.assert_close(of_posterior, 0.1 * plain[0])
    torch.testing.assert_close(of_prior, plain[1])


def test_free_bits_are_of_each_state() -> None:
    """Divergences of 0.2 and 3 count 1 and 3, times 1 and 0.1."""
    algorithm, state = make(groups=1, classes=2)
    probabilities = torch.tensor([[[[0.99, 0.01]]], [[[0.99, 0.01]]]])
    other = torch.tensor([[[[0.6, 0.4]]], [[[0.03, 0.97]]]])
    zeros = LatentState(torch.zeros(2, 1, 16), torch.zeros(2, 1, 2))
    windows = LatentWindows(zeros, probabilities.log(), other.log()[:, :, None], torch.zeros(2, 1, 8))
    divergence = kl(windows.posterior, windows.prior[:, :, 0]).flatten()
    assert float(divergence[0]) < 1.0 < float(divergence[1])
    batch = {k: v[:2, :1] for k, v in a_batch().items()} | {"valid": torch.ones(2, 1, dtype=torch.bool)}
    loss, metrics = model_loss(algorithm, state.params, windows, batch)
    rest = metrics["model/reward"] + metrics["model/continuation"] + metrics["model/reconstruction"]
    assert float(loss - rest) == pytest.approx(1.1 * (1.0 + float(divergence[1])) / 2, rel=1e-4)


def test_free_bits_of_the_mean() -> None:
    """Divergences of 0.2 and 3, of which the mean counts, or 1 where that is less, times 0.8 and 0.2; unknown states
    count nothing.
    """
    algorithm, state = make(free_bits_of="mean", dynamics_weight=0.8, representation_weight=0.2)
    for nats, valid, expected in (((0.2, 3.0), (True, True), 1.6), ((0.2, 3.0), (True, False), 1.0)):
        loss, metrics = model_loss(algorithm, state.params, of_divergence(*nats), two_states(*valid))
        rest = metrics["model/reward"] + metrics["model/continuation"] + metrics["model/reconstruction"]
        assert float(loss - rest) == pytest.approx(expected, rel=1e-4)


def test_what_the_model_predicts() -> None:
    """Observations that are known, the rewards that led to states, and whether episodes go on, by hand."""
    algorithm, state = make()
    batch = a_batch()
    windows = observed(algorithm, state.params, batch)
    _, metrics = model_loss(algorithm, state.params, windows, batch)
    features = windows.state.features
    rec, rew, con = [], [], []
    for t in range(T):
        for b in range(B):
            f, row = features[t, b], {k: v[t, b] for k, v in batch.items()}
            out = algorithm.apply("decoder", state.params["decoder"], f)
            if row["valid"]:
                rec.append((out - symlog(row["observations"])).square().sum())
            if not row["is_first"]:
                logits = algorithm.apply("reward", state.params["reward"], f)
                rew.append(-(HEAD.project(row["arrival_rewards"][None], None)[0] * logits.log_softmax(-1)).sum())
            p = algorithm.apply("continuation", state.params["continuation"], f).sigmoid()
            target = 0.0 if row["is_terminal"] else 1 - 1 / 333
            con.append(-target * p.log() - (1 - target) * (1 - p).log())
    for name, parts in (("reconstruction", rec), ("reward", rew), ("continuation", con)):
        assert float(metrics[f"model/{name}"]) == pytest.approx(float(torch.stack(parts).mean()), rel=1e-4), name


@pytest.mark.parametrize("latents", ["classes", "gaussian"])
def test_a_model_that_learns_from_rewards_and_ends_alone(latents: str) -> None:
    """Without an objective: the same losses, but the reconstruction trains the decoder and nothing else."""
    algorithm, state = make(objective="none", latents=latents, latent=5)
    batch = a_batch()
    params = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in state.params.items()}
    windows = observed(algorithm, params, batch)
    loss, metrics = model_loss(algorithm, params, windows, batch)
    kind, valid, prior = algorithm.latents(params).kind, batch["valid"], windows.prior[:, :, 0]
    free = 1.1 * kind.kl(windows.posterior, prior).clamp(min=1.0)[valid].mean()
    decoded = algorithm.apply("decoder", params["decoder"], windows.state.features)
    drawing = (decoded - symlog(batch["observations"])).square().sum(-1)[valid].mean()
    rest = metrics["model/reward"] + metrics["model/continuation"]
    assert float(loss.detach()) == pytest.approx(float((free + rest + drawing).detach()), rel=1e-5)
    torch.testing.assert_close(metrics["model/reconstruction"], drawing)
    for got, other in zip(gradients(loss, params["decoder"]), gradients(drawing, params["decoder"]), strict=True):
        torch.testing.assert_close(got, other)
    balanced, _ = balanced_kl(algorithm.latents(params), windows, batch, rng.make_key(0))
    for module in ("encoder", "dynamics", "posterior", "prior"):
        learnt = gradients(balanced + rest, params[module])
        torch.testing.assert_close(gradients(loss, params[module]), learnt)
        assert all(g is None or not g.any() for g in gradients(metrics["model/reconstruction"], params[module]))
        assert any(g is not None and g.any() for g in learnt), module


# ---- the bottleneck


def of_divergence(*nats: float) -> LatentWindows:
    """One window of states whose posterior and prior are so far apart, by prior numbers that do not sum to 1."""
    posterior = torch.full((len(nats), 1, 3, 4), 0.25).log()
    prior = posterior - torch.tensor(nats)[:, None, None, None] / 3.0
    state = LatentState(torch.zeros(len(nats), 1, 16), torch.zeros(len(nats), 1, 12))
    return LatentWindows(state, posterior, prior.unsqueeze(-3), torch.zeros(len(posterior), 1, 8))


def two_states(*valid: bool) -> dict[str, Tensor]:
    return {k: v[:2, :1] for k, v in a_batch().items()} | {"valid": torch.tensor(valid).unsqueeze(-1)}


def test_the_multiplier_rises_above_the_limit_and_falls_below() -> None:
    """Divergences 5, 5, 1, 1 around a limit of 3: Adam's steps are 1, 1, 0.261993 and -0.104973 rates."""
    algorithm, state = make(objective="bottleneck", kl_weight=1.0, multiplier_learning_rate=0.01)
    state = state._replace(params={**state.params, "multiplier": {"log": torch.zeros(())}})
    logs = []

    def loss(params: dict[str, Any], state: TrainState, windows: LatentWindows) -> tuple[Tensor, dict[str, Tensor]]:
        return model_loss(algorithm, {**state.params, **params}, windows, two_states(True, True))

    for nats in (5.0, 5.0, 1.0, 1.0):
        state, metrics = algorithm.descend(state, ("multiplier",), loss, of_divergence(nats, nats))
        assert float(metrics["model/kl"]) == pytest.approx(nats, rel=1e-6)
        logs.append(float(state.params["multiplier"]["log"]))
    assert logs == pytest.approx([0.01, 0.02, 0.02261993, 0.02157020], rel=1e-5)


def test_the_bottleneck_starts_as_published() -> None:
    c = RSSMConfig(**{**SMALL, "objective": "bottleneck"})
    algorithm = RSSM(c, SPEC)
    params = algorithm.init(0).params
    assert float(params["multiplier"]["log"]) == pytest.approx(-11.512925, rel=1e-6)
    assert (c.kl_limit, algorithm.optimizer("multiplier").learning_rate) == (3.0, 1e-4)
    assert "decoder" not in params and algorithm.model[-1] == "multiplier"


def test_the_loss_of_the_bottleneck() -> None:
    """beta = 0.5 and a divergence of 4 at the only state that is known: 0.5 (4 - 3) - ln(0.5) (4 - 3)."""
    algorithm, state = make(objective="bottleneck")
    params = {**state.params, "multiplier": {"log": torch.tensor(0.5).log()}}
    loss, metrics = model_loss(algorithm, params, of_divergence(4.0, 100.0), two_states(True, False))
    rest = metrics["model/reward"] + metrics["model/continuation"]
    assert float(loss - rest) == pytest.approx(0.5 + math.log(2.0), rel=1e-4)
    assert float(metrics["model/kl_weight"]) == pytest.approx(0.5)


def test_the_bottleneck_trains_mostly_the_prior() -> None:
    """Of beta times the divergence 5/6 train the prior and 1/6 the posterior; the limit spares neither."""
    algorithm, state = make(objective="bottleneck", representation_weight=0.2, kl_limit=100.0)
    log = torch.tensor(0.5).log().requires_grad_()
    g = torch.Generator().manual_seed(0)
    posterior, prior = (torch.randn(2, 1, 12, generator=g).requires_grad_() for _ in range(2))
    latents = algorithm.latents(state.params)
    p, q = latents.kind.read(posterior), latents.kind.read(prior)
    params = {**state.params, "multiplier": {"log": log}}
    loss, _ = model_loss(algorithm, params, small_observed(p, q), two_states(True, True))
    found = torch.autograd.grad(loss, [posterior, prior, log], retain_graph=True)
    divergence = kl(p, q).mean()
    plain = torch.autograd.grad(divergence, [posterior, prior])
    torch.testing.assert_close(found[0], 0.5 / 6.0 * plain[0])
    torch.testing.assert_close(found[1], 2.5 / 6.0 * plain[1])
    assert float(found[2]) == pytest.approx(100.0 - float(divergence.detach()), rel=1e-6)


def test_small_rewards_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    data = episodes(rewards=0.004)
    size = float(data.columns["rewards"].abs().mean())
    RSSM.fit_config(RSSMConfig(), data)
    RSSM.fit_config(RSSMConfig(objective="bottleneck"), episodes(rewards=0.1))
    assert not capsys.readouterr().err
    RSSM.fit_config(RSSMConfig(objective="bottleneck"), data)
    (line,) = capsys.readouterr().err.splitlines()
    scale = float(line.rsplit(" ", 1)[1])
    assert "multiply dataset.reward_scale by" in line and 0.9 < scale * size < 1.1


# ---- information


def test_the_contrast_by_loops() -> None:
    """Among its own observation and those of other windows, without what the data lack."""
    g = torch.Generator().manual_seed(0)
    queries, embeddings = (torch.randn(3, 2, 4, generator=g) for _ in range(2))
    valid = torch.tensor([[True, True], [True, True], [False, True]])
    losses = []
    for t in range(3):
        for b in range(2):
            known = [(t, b)] + [(u, 1 - b) for u in range(3) if valid[u, 1 - b]]
            scores = torch.stack([queries[t, b] @ embeddings[u, d] for u, d in known])
            losses += [float(scores.logsumexp(0) - scores[0])] if valid[t, b] else []
    assert len(losses) == 5
    assert float(contrastive(queries, embeddings, valid)) == pytest.approx(float(np.mean(losses)), rel=1e-5)
    alone = contrastive(torch.zeros(1, 3, 1), torch.ones(1, 3, 1), torch.ones(1, 3, dtype=torch.bool))
    assert float(alone) == pytest.approx(math.log(3.0), rel=1e-6)


def informed(**settings: Any) -> tuple[RSSM, TrainState]:
    return make(objective="information", **settings)


def test_the_loss_of_information() -> None:
    """Its parts, with beta = 0.5; the multiplier's gradient is the limit less the contrast, and the inverse model's
    that of the actions which the states' episodes have."""
    algorithm, state = informed(contrast_limit=0.5)
    log = torch.tensor(0.5).log().requires_grad_()
    params, batch = {**state.params, "multiplier": {"log": log}}, a_batch()
    windows = observed(algorithm, params, batch)
    loss, metrics = model_loss(algorithm, params, windows, batch)
    excess = float(metrics["model/contrast"].detach()) - 0.5
    assert excess > 0.0
    parts = [float(metrics[f"model/{name}"].detach()) for name in ("reward", "continuation", "inverse")]
    free = 1.1 * kl(windows.posterior, windows.prior[:, :, 0]).clamp(min=1.0)
    divergence = float(free[batch["valid"]].mean().detach())
    assert float(loss.detach()) == pytest.approx(sum(parts) + divergence + (0.5 + math.log(2.0)) * excess, rel=1e-4)
    assert float(torch.autograd.grad(loss, log, retain_graph=True)[0]) == pytest.approx(-excess, rel=1e-5)
    features = windows.state.features
    changes = torch.cat([features[:-1], features[1:]], -1)
    mean, raw = algorithm.apply("inverse", params["inverse"], changes).chunk(2, -1)
    log_std = raw.clamp(-2.0, 2.0)
    normal = torch.distributions.Normal(mean, log_std.exp()).log_prob(batch["previous_actions"][1:]).sum(-1)
    torch.testing.assert_close(
        action_log_prob(algorithm.latents(params), features, batch["previous_actions"][1:]), normal
    )
    known = ~batch["is_first"][1:] & batch["valid"][1:]
    assert parts[2] == pytest.approx(-float(normal[known].mean().detach()), rel=1e-5)
    assert "decoder" not in state.params


def test_what_actions_bring_about_is_rewarded() -> None:
    """By 0.3 times ln q(a|s, s') - ln pi(a|s), and offline not at all."""
    rollouts = []
    for weight in (0.0, 0.3):
        algorithm, state = informed(empowerment_weight=weight, decay=0.0)
        for name in ("reward", "critic"):
            state.params[name].update({k: torch.zeros_like(v) for k, v in state.params[name].items()})
        windows = observed(algorithm, state.params, a_batch())
        rollouts.append(latent_rollout(algorithm, state, windows, rng.make_key(7)))
    rollout = rollouts[0]
    known = action_log_prob(algorithm.latents(state.params), rollout.features, rollout.actions.clamp(-1.0, 1.0))
    chosen = algorithm.policy.log_prob(  # type: ignore[operator]
        algorithm.apply("actor", state.params["actor"], rollout.features[:-1]), rollout.actions
    )
    assert torch.equal(rollout.features, rollouts[1].features)
    torch.testing.assert_close(rollouts[1].returns - rollout.returns, 0.3 * (known - chosen), rtol=1e-4, atol=1e-4)
    assert RSSMConfig().empowerment_weight == 0.0


def test_online_no_preset_keeps_what_is_for_data_alone() -> None:
    online = finetune_settings("rssm") or {}
    for name in ("dreamerv3", "repo", "infopower", "offline_dv2", "drama"):
        assert online.items() <= (finetune_settings("rssm", name) or {}).items(), name


def test_the_error_of_several_streams() -> None:
    """Images in units of their range, the numbers beside them in symlog units, all summed."""
    image = torch.randint(0, 256, (T, B, 2, 3, 1), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    state, table = torch.randn(T, B, 2), torch.randn(T, B, 1)
    drawn, numbers = torch.rand(T, B, 2, 3, 1), torch.randn(T, B, 3)
    found = squared_error(({"front": drawn}, numbers), {"vector": state, "front": image, "text": table})
    pixels = (drawn - image.float() / 255.0).square().sum((-3, -2, -1))
    expected = pixels + (numbers - symlog(torch.cat([state, table], -1))).square().sum(-1)
    torch.testing.assert_close(found, expected)


# ---- imagination


def a_rollout(algorithm: RSSM, state: TrainState, batch: dict[str, Tensor]) -> tuple[LatentWindows, LatentRollout]:
    windows = observed(algorithm, state.params, batch)
    return windows, latent_rollout(algorithm, state, windows, rng.make_key(4))


def steps_of_imagination(algorithm: RSSM, params: dict[str, Any], windows: LatentWindows) -> LatentRollout:
    """What `imagined` gives, one step after another, without a scale of returns."""
    c, latents, keys = algorithm.config, algorithm.latents(params), rng.split(rng.make_key(4), H)
    at = pytree.tree_map(lambda x: x.flatten(0, 1).detach(), windows.state)
    features, disagreements, actions = [at.features], [torch.zeros(T * B)], []
    for i in range(H):
        draw, move = rng.split(keys[i])
        mean, log_std = algorithm.apply("actor", params["actor"], at.features)
        actions.append(mean + log_std.exp() * rng.normal(draw, (T * B, A)))
        recurrent, memory = latents.advance(at, actions[-1])
        heads = latents.kind.read(algorithm.apply("prior", params["prior"], recurrent))
        pick, chance = rng.split(move)
        one = one_head(heads, pick)
        if c.latents == "gaussian":
            sample = one[..., 0] + one[..., 1] * rng.normal(chance, (T * B, c.latent))
        else:
            sample = drawn_classes(one, rng.gumbel(chance, (T * B, 3, 4)))
        at = LatentState(recurrent, sample, memory)
        features.append(at.features)
        disagreements.append(latents.kind.disagreement(heads))
    f = torch.stack(features)
    rewards = HEAD.mean(algorithm.apply("reward", params["reward"], f))
    if c.members > 1:
        unit = latents.kind.disagreement(windows.prior).mean().detach() if c.penalty_unit == "mean" else torch.ones(())
        assert float(unit) > 0
        rewards = rewards - c.penalty * torch.stack(disagreements) / unit
    alive = algorithm.apply("continuation", params["continuation"], f).squeeze(-1).sigmoid()
    values = HEAD.mean(algorithm.apply("critic", params["critic"], f))
    returns = lambda_returns(rewards, values, alive, torch.ones_like(alive), 0.95)
    weights = torch.stack([alive[: i + 1].prod(0) for i in range(H)])
    return LatentRollout(f, torch.stack(actions), values, returns, weights, torch.zeros(()), torch.zeros(()))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"members": 3, "penalty": 2.0},
        {"members": 3, "penalty": 2.0, "penalty_unit": "one"},
        {"core": "scan"},
        {"latents": "gaussian", "latent": 5, "members": 3, "penalty": 2.0},
    ],
    ids=["published", "penalty", "offline_dv2", "scan", "gaussian"],
)
def test_imagination_step_by_step(settings: dict[str, Any]) -> None:
    algorithm, state = make(**settings)
    state.extra["low"], state.extra["high"] = torch.tensor(-1.0), torch.tensor(3.0)
    windows, rollout = a_rollout(algorithm, state, a_batch())
    expected = steps_of_imagination(algorithm, state.params, windows)
    for name in ("features", "actions", "values", "weights"):
        torch.testing.assert_close(getattr(rollout, name), getattr(expected, name))
    torch.testing.assert_close(rollout.returns, expected.returns, rtol=1e-4, atol=1e-3)
    low, high = np.percentile(expected.returns.detach().numpy(), [5, 95])
    assert float(rollout.low) == pytest.approx(-0.99 + 0.01 * low, rel=1e-4)
    assert float(rollout.high) == pytest.approx(2.97 + 0.01 * high, rel=1e-4)


def test_one_head_for_each_state() -> None:
    prior = torch.arange(3.0)[:, None, None].expand(400, 3, 2, 2)
    chosen = one_head(prior, rng.make_key(0))
    assert chosen.shape == (400, 2, 2) and {float(x) for x in chosen[:, 0, 0]} == {0.0, 1.0, 2.0}
    assert torch.equal(chosen[:, 0, 0], chosen[:, 1, 1])


def test_the_losses_of_actor_and_critic() -> None:
    algorithm, state = make(bc_weight=0.3)
    batch = a_batch()
    windows, rollout = a_rollout(algorithm, state, batch)
    rollout = rollout._replace(low=torch.tensor(0.0), high=torch.tensor(2.5))
    loss, _ = algorithm.actor_loss(state.params["actor"], rollout, windows, batch)
    mean, log_std = algorithm.apply("actor", state.params["actor"], rollout.features[:-1])
    normal = torch.distributions.Normal(mean, log_std.exp())
    gain = normal.log_prob(rollout.actions).sum(-1) * (rollout.returns - rollout.values[:-1]) / 2.5
    expected = -(rollout.weights * (gain + 3e-4 * normal.entropy().sum(-1))).mean()
    mean, log_std = algorithm.apply("actor", state.params["actor"], windows.state.features)
    known = torch.distributions.Normal(mean, log_std.exp()).log_prob(batch["actions"]).sum(-1)
    expected = expected - 0.3 * known[~batch["is_last"]].mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-4)

    def entropy_of(features: Tensor, target: Tensor) -> Tensor:
        online = algorithm.apply("critic", state.params["critic"], features)
        slow = HEAD.mean(algorithm.apply("critic", state.target["critic"], features))
        return -sum(((HEAD.project(y, None) * online.log_softmax(-1)).sum(-1) for y in (target, slow)), torch.zeros(()))

    loss, _ = algorithm.critic_loss(state.params["critic"], state, rollout, windows, batch)
    imagined = (rollout.weights * entropy_of(rollout.features[:-1], rollout.returns)).mean()
    again, parts = rollout.returns[0].unflatten(0, (T, B)), []
    for b in range(B):
        following = again[-1, b]
        for t in range(T - 2, -1, -1):
            goes_on = 0.95 * float(not batch["is_last"][t + 1, b])
            live = (1 - 1 / 333) * float(not batch["is_terminal"][t + 1, b])
            following = batch["arrival_rewards"][t + 1, b] + live * (
                (1 - goes_on) * again[t + 1, b] + goes_on * following
            )
            ce = entropy_of(windows.state.features[t, b], following)
            parts.append(ce * float(not batch["is_last"][t, b]))
    assert float(loss) == pytest.approx(float(imagined + 0.3 * torch.stack(parts).mean()), rel=1e-4)


@pytest.mark.parametrize("latents", ["classes", "gaussian"])
def test_the_gradient_of_returns_through_the_model(latents: str) -> None:
    """Beside the steps one by one: it reaches the policy alone, through actions, probabilities and the penalty."""
    algorithm, state = make(
        actor_gradient="model", members=3, penalty=2.0, entropy_weight=0.1, latents=latents, latent=5
    )
    batch = a_batch()
    params = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in state.params.items()}
    windows = observed(algorithm, params, batch)
    rollout = latent_rollout(algorithm, state, windows, rng.make_key(4), params["actor"])
    loss, _ = algorithm.actor_loss(params["actor"], rollout, windows, batch)
    by_hand = steps_of_imagination(algorithm, {**state.params, "actor": params["actor"]}, windows)
    dist = algorithm.apply("actor", params["actor"], by_hand.features[:-1].detach())
    entropy = algorithm.policy.entropy(dist)  # type: ignore[operator]
    expected = -(by_hand.weights.detach() * (by_hand.returns + 0.1 * entropy)).mean()
    torch.testing.assert_close(loss, expected)
    for got, other in zip(gradients(loss, params["actor"]), gradients(expected, params["actor"]), strict=True):
        assert got is not None and other is not None and got.any()
        torch.testing.assert_close(got, other, rtol=1e-4, atol=1e-5)
    for name in (*algorithm.model, "critic"):
        assert all(g is None for g in gradients(loss, params[name])), name
    key = rng.make_key(1)
    total, _, _ = algorithm.loss(params, state, batch, key)
    windows = observed(algorithm, params, batch, rng.split(key, 3)[0])
    rollout = latent_rollout(algorithm, state, windows, rng.split(key, 3)[2], params["actor"])
    loss, _ = algorithm.actor_loss(params["actor"], rollout, windows, batch)
    for got, other in zip(gradients(total, params["actor"]), gradients(loss, params["actor"]), strict=True):
        torch.testing.assert_close(got, other)  # the critic's loss moves no policy


def test_what_trains_what() -> None:
    """Actor and critic learn in imagination without moving the model; the data's returns move it."""
    algorithm, state = make(bc_weight=1.0)
    batch = a_batch()
    params = {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in state.params.items()}
    windows = observed(algorithm, params, batch)
    rollout = latent_rollout(algorithm, state, windows, rng.make_key(4))
    assert not any(x.requires_grad for x in rollout)
    actor, _ = algorithm.actor_loss(params["actor"], rollout, windows, batch)
    critic, _ = algorithm.critic_loss(params["critic"], state, rollout, windows, batch)
    for module in ("encoder", "dynamics", "posterior"):
        assert all(g is None for g in gradients(actor, params[module])), module
        assert all(g is not None and g.any() for g in gradients(critic, params[module])), module
    algorithm.config.replay_weight = 0.0
    critic, _ = algorithm.critic_loss(params["critic"], state, rollout, windows, batch)
    assert all(g is None or not g.any() for g in gradients(critic, params["encoder"]))
    model, _ = model_loss(algorithm, params, windows, batch)
    for module in algorithm.model:
        assert all(g is not None and g.any() for g in gradients(model, params[module])), module
    assert all(g is None for g in gradients(model, params["actor"]))


@pytest.mark.parametrize("objective", ["reconstruction", "information"])
def test_the_order_of_windows_does_not_matter(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, which is drawn for each place of a batch."""
    for name in ("gumbel", "normal"):
        monkeypatch.setattr(rng, name, lambda key, shape: torch.zeros(shape))
    algorithm, state = make(objective=objective, bc_weight=0.3)
    batch, order = a_batch(), torch.tensor([3, 0, 4, 1, 2])
    loss, metrics, _ = algorithm.loss(state.params, state, batch, rng.make_key(0))
    other = {name: column[:, order] for name, column in batch.items()}
    permuted, same, _ = algorithm.loss(state.params, state, other, rng.make_key(0))
    torch.testing.assert_close(permuted, loss)
    torch.testing.assert_close(same, metrics)


def test_rewards_and_values_are_0_at_first_and_the_policy_is_wide() -> None:
    algorithm = RSSM(RSSMConfig(**SMALL), SPEC)
    state = algorithm.init(0)
    windows, rollout = a_rollout(algorithm, state, a_batch())
    assert not rollout.returns.any() and not rollout.values.any()
    dist = algorithm.apply("actor", state.params["actor"], windows.state.features)
    assert float(algorithm.policy.entropy(dist).mean()) == pytest.approx(A * 1.305453, abs=1e-2)  # type: ignore[operator]


# ---- updates


def update(algorithm: RSSM, state: TrainState, **changes: Any) -> tuple[TrainState, dict[str, Tensor]]:
    batch = {name: column.transpose(0, 1) for name, column in a_batch().items()} | changes
    return algorithm.update(state, batch, rng.make_key(1), phase=0)


def test_burn_in_is_not_learnt_from() -> None:
    """Rewards and observations there change no loss but through the memory."""
    algorithm, state = make(burn_in=2)
    _, metrics = update(algorithm, state)
    rewards = a_batch()["arrival_rewards"].transpose(0, 1).clone()
    rewards[:, :2] = 100.0
    _, same = update(algorithm, state, arrival_rewards=rewards)
    assert {k: float(v) for k, v in same.items()} == {k: float(v) for k, v in metrics.items()}
    rewards[:, 2] = 100.0
    _, other = update(algorithm, state, arrival_rewards=rewards)
    assert float(other["model/reward"]) != float(metrics["model/reward"])


def test_a_model_stays_as_it_is_after_its_updates() -> None:
    algorithm, state = make(model_updates=2)
    for step, learns in ((1, True), (2, False)):
        after, _ = update(algorithm, state._replace(step=torch.tensor(step)))
        for name in algorithm.model:
            assert all(torch.equal(v, state.params[name][k]) != learns for k, v in after.params[name].items()), name
        assert all(not torch.equal(v, state.params["actor"][k]) for k, v in after.params["actor"].items())


def test_a_policy_waits_for_its_model() -> None:
    """Actor, critic, their optimisers, the slow critic and the scale of returns stay as they are until then."""
    algorithm, state = make(model_updates=2, policy_after_model=True, actor_gradient="model")
    for step, waits in ((1, True), (2, False)):
        before = state._replace(step=torch.tensor(step))
        after, _ = update(algorithm, before)
        for old, new in ((before.params, after.params), (before.opt, after.opt), (before.target, after.target)):
            for name in ("actor", "critic"):
                if name in new:
                    leaves = zip(pytree.tree_leaves(old[name]), pytree.tree_leaves(new[name]), strict=True)
                    assert all(torch.equal(x, y) for x, y in leaves) == waits, name
        assert all(torch.equal(after.extra[k], before.extra[k]) == waits for k in ("low", "high"))
        for name in algorithm.model:
            assert all(torch.equal(v, state.params[name][k]) != waits for k, v in after.params[name].items()), name


# ---- acting


@pytest.mark.parametrize(("core", "kind"), [("gru", "classes"), ("scan", "classes"), ("gru", "gaussian")])
def test_acting_remembers(core: str, kind: str) -> None:
    """Greedy: the likeliest classes and the mean; what was played enters the next state, until an episode ends."""
    algorithm, state = make(core=core, latents=kind, latent=5)
    actor, latents = algorithm.actor(state), algorithm.latents(state.params)
    observations = torch.randn(3, 4, OBS, generator=torch.Generator().manual_seed(0))
    carry, known, action = actor.start(4), latents.begin(4, torch.device("cpu")), torch.zeros(4, A)
    for t in range(3):
        played, carry = actor.act(carry, observations[t], rng.make_key(t), explore=False)
        known, _ = latents.observe(known, action, latents.embed(observations[t]), None)
        action = algorithm.apply("actor", state.params["actor"], known.features)[0]
        torch.testing.assert_close(played, action)
    mask = torch.tensor([True, False, False, True])
    begun, _ = actor.act(actor.begin_anew(carry, mask), observations[0], rng.make_key(0), explore=False)
    fresh, _ = actor.act(actor.start(4), observations[0], rng.make_key(0), explore=False)
    assert torch.equal(begun[mask], fresh[mask]) and not torch.isclose(begun[~mask], fresh[~mask]).any()


# ---- settings


def test_settings_that_do_nothing_are_refused() -> None:
    for name, value, reason, cure in (
        ("groups", 8, "latents=gaussian", "latents=classes"),
        ("classes", 8, "latents=gaussian", "latents=classes"),
        ("unimix", 0.1, "latents=gaussian", "latents=classes"),
        ("latent", 8, "latents=classes", "latents=gaussian"),
        ("scan_layers", 3, "core=gru", "core=scan"),
        ("kl_limit", 1.0, "objective=none", "objective=bottleneck"),
        ("multiplier_learning_rate", 1.0, "objective=none", "objective=bottleneck or information"),
        ("free_bits", 2.0, "objective=bottleneck", "objective=reconstruction or information or none"),
    ):
        setting, given = reason.split("=")
        values = {"algo": "rssm", f"algo.{setting}": given, f"algo.{name}": value}
        with pytest.raises(UserError) as error:
            compose(values)
        assert str(error.value) == (
            f"algo.{name}={value} does nothing with algo.{reason}; leave it out, or set algo.{cure}"
        )
        del values[f"algo.{name}"]
        compose(values)
    compose({"algo": "director", "algo.latents": "gaussian", "algo.unimix": 0.1})  # its goals' codes are classes
    compose({"algo": "infopower", "algo.free_bits": 2.0, "algo.multiplier_learning_rate": 1.0})


def test_refusals() -> None:
    for message, settings in (
        ("algo.length=6 leaves fewer than 2 states after algo.burn_in=5", {"burn_in": 5}),
        ("algo.recurrent_width=16 is no multiple of algo.blocks=3", {"blocks": 3}),
        (r"algo\.policy_after_model needs a model that is ready", {"policy_after_model": True}),
        (
            r"algo\.dynamics_weight or algo\.representation_weight above 0",
            {"objective": "bottleneck", "dynamics_weight": 0.0, "representation_weight": 0.0},
        ),
    ):
        with pytest.raises(UserError, match=message):
            make(**settings)
    with pytest.raises(UserError, match="all rewards are 0"):
        RSSM.fit_config(RSSMConfig(), episodes(rewards=0.0))
    for penalty, grid in ((1.0, None), (0.0, {"penalty": [0.0, 1.0]})):
        with pytest.raises(UserError, match=r"algo\.penalty needs heads"):
            RSSM.fit_config(RSSMConfig(members=1, penalty=penalty), episodes(), grid)
    assert RSSM.fit_config(RSSMConfig(penalty=1.0, members=2), episodes()).penalty == 1.0
    with pytest.raises(UserError, match="rssm needs continuous actions"):
        make_algorithm(TrainConfig(algo=RSSMConfig()), episodes(actions=np.arange(24) % 2))
    with pytest.raises(UserError, match="no window of 64 states"):
        RSSM(RSSMConfig(), SPEC).sampler().prepare(episodes())
