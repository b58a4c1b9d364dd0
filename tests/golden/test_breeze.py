"""BREEZE: its schedule, attention, implicit reward, value and weighted cloning, in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.algorithms.breeze.networks import AttentiveBackward, AttentiveForward
from offrl.data.dataset import DataSpec
from offrl.nn import diffusion
from tests.support.reference import forward_backward as ref

B, OBS, A, D, T, K = 5, 3, 2, 4, 3, 6
G = np.random.default_rng(5)
DATA = {
    "observations": G.normal(size=(B, OBS)),
    "actions": G.uniform(-1, 1, (B, A)),
    "next_observations": G.normal(size=(B, OBS)),
    "next_actions": G.uniform(-1, 1, (B, A)),
    "rewards": G.normal(size=B),
    "masks": np.array([1.0, 0.0, 1.0, 1.0, 1.0]),
}
BATCH = {k: torch.tensor(v, dtype=torch.float32) for k, v in DATA.items()}
DATA = {k: v.numpy().astype(np.float64) for k, v in BATCH.items()}
Z = torch.tensor(ref.sphere(G.normal(size=(B, D))), dtype=torch.float32)
Z64 = Z.numpy().astype(np.float64)
KEY = rng.make_key(3)


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "breeze")
    small = {
        "z_dim": D,
        "inputs_hidden": [7, 6],
        "hidden": [9],
        "backward_hidden": [8],
        "attention": False,
        "value_hidden": [6, 5],
    }
    small |= {"actor_hidden": [8], "denoising_steps": T, "embedding": 8, "acting_samples": K, "inference_samples": 4}
    algorithm = kind(
        kind.Config(**{**small, **settings}), DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
    )
    state, g = algorithm.init(0), torch.Generator().manual_seed(1)

    def moved(tree: Any) -> Any:
        return {n: {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in p.items()} for n, p in tree.items()}

    return algorithm, state._replace(params=moved(state.params), target=moved(state.target))


def kept(steps: int) -> np.ndarray:
    """abar_t of the variance-preserving schedule: alpha_t = exp(-0.1 / T - 0.5 (10 - 0.1) (2 t - 1) / T**2), t = 1 to
    T.
    """
    t = np.arange(1, steps + 1)
    return np.cumprod(np.exp(-0.1 / steps - 0.5 * 9.9 * (2 * t - 1) / steps**2))


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_schedule(steps: int) -> None:
    bar = kept(steps)
    np.testing.assert_allclose(diffusion.signal(torch.arange(steps), steps, "vp").numpy(), bar, rtol=1e-5)
    for t in range(steps):
        before = bar[t - 1] if t else 1.0
        beta = 1 - bar[t] / before
        expected = bar[t], np.sqrt(1 - beta) * (1 - before) / (1 - bar[t]), np.sqrt(before) * beta / (1 - bar[t])
        np.testing.assert_allclose(diffusion.transition(t, steps, "vp")[:3], expected, rtol=1e-9, atol=1e-12)
        assert diffusion.transition(t, steps, "vp")[3] == pytest.approx(np.sqrt(beta * (1 - before) / (1 - bar[t])))


def test_implicit_reward_and_representation_loss() -> None:
    algorithm, state = make(reward_weight=0.4, orthonormality=0.7)
    p, target = ref.arrays(state.params["representation"]), ref.arrays(state.target["representation"])
    value = {f"v.{k}": x for k, x in ref.arrays(state.params["value"]).items()}
    s, a, s2, a2 = (DATA[k] for k in ("observations", "actions", "next_observations", "next_actions"))
    f, b = ref.forward(target, s2, a2, Z64), ref.backward(target, s2)
    smallest = np.minimum(f[0] @ b.T, f[1] @ b.T)
    f, b = ref.forward(p, s, a, Z64), ref.backward(p, s2)
    inverse = np.linalg.inv(b.T @ b / B + 1e-3 * np.eye(D))
    reward = np.array([b[i] @ inverse @ Z64[i] for i in range(B)])
    wanted = reward + 0.98 * DATA["masks"] * ref.trunk(value, "v", ref.join(s2, Z64))[:, 0]
    regression = 0.5 * sum(((f[k] * Z64).sum(-1) - wanted) @ ((f[k] * Z64).sum(-1) - wanted) / B for k in range(2))
    expected = ref.measure_loss(f, b, smallest, 0.98 * DATA["masks"]) + 0.7 * ref.orthonormality(b) + 0.4 * regression
    loss, metrics = algorithm.representation_loss(
        state.params["representation"], state, BATCH, Z, BATCH["next_actions"]
    )
    assert float(metrics["fb/reward_loss"]) == pytest.approx(regression, rel=1e-3)
    assert float(metrics["fb/implicit_reward"]) == pytest.approx(reward.mean(), rel=1e-3)
    assert float(loss) == pytest.approx(expected, rel=1e-3)


def test_value_loss() -> None:
    algorithm, state = make(expectile=0.8)
    value = {f"v.{k}": x for k, x in ref.arrays(state.params["value"]).items()}
    f = ref.forward(ref.arrays(state.params["representation"]), DATA["observations"], DATA["actions"], Z64)
    gap = (f * Z64).sum(-1).min(0) - ref.trunk(value, "v", ref.join(DATA["observations"], Z64))[:, 0]
    loss, _ = algorithm.value_loss(state.params["value"], state, BATCH, Z)
    assert (gap > 0).any() and (gap < 0).any()
    assert float(loss) == pytest.approx(np.mean(np.where(gap > 0, 0.8, 0.2) * gap**2), rel=1e-4)


def test_weighted_cloning() -> None:
    algorithm, state = make(temperature=3.0)
    p = ref.arrays(state.params["representation"])
    value = {f"v.{k}": x for k, x in ref.arrays(state.params["value"]).items()}
    s, a = DATA["observations"], DATA["actions"]
    q = (ref.forward(p, s, a, Z64) * Z64).sum(-1).min(0)
    weight = np.minimum(np.exp(3.0 * (q - ref.trunk(value, "v", ref.join(s, Z64))[:, 0])), 100.0)
    choose, draw = rng.split(KEY)
    step, noise = rng.randint(choose, (B,), T), rng.normal(draw, (B, A)).numpy().astype(np.float64)
    bar = kept(T)[step.numpy()][:, None]
    guessed = denoiser(
        ref.arrays(state.params["actor"]), np.sqrt(bar) * a + np.sqrt(1 - bar) * noise, step.numpy(), ref.join(s, Z64)
    )
    loss, _ = algorithm.actor_loss(state.params["actor"], state, BATCH, Z, KEY)
    assert float(loss) == pytest.approx((weight * ((guessed - noise) ** 2).sum(-1)).mean(), rel=1e-3)


def denoiser(p: ref.Arrays, x: np.ndarray, step: np.ndarray, condition: np.ndarray) -> np.ndarray:
    """One residual block of width 8, steps embedded by learnt waves."""

    def mish(y: np.ndarray) -> np.ndarray:
        return y * np.tanh(np.log1p(np.exp(y)))

    angle = 2 * np.pi * step[:, None] * p["waves"]
    time = ref.linear(p, "down", mish(ref.linear(p, "up", ref.join(np.cos(angle), np.sin(angle)))))
    times, plus = np.split(ref.linear(p, "blocks.0.film", ref.join(time, condition)), 2, axis=1)
    y = times * mish(ref.norm(p, "blocks.0.norm1", ref.linear(p, "blocks.0.first", x))) + plus
    y = mish(ref.norm(p, "blocks.0.norm2", ref.linear(p, "blocks.0.second", y))) + ref.linear(p, "blocks.0.skip", x)
    return ref.linear(p, "head", y)


def test_the_best_of_what_is_drawn_acts() -> None:
    """Greedily from noise that all states and times share; exploring, from other noise each time."""
    algorithm, state = make()
    z = Z[:1].expand(B, -1)
    shared = algorithm.draw(state.extra["average"], BATCH["observations"], z, K, rng.make_key(0), shared_noise=True)
    q = (
        ref.forward(ref.arrays(state.params["representation"]), DATA["observations"], shared[0].numpy(), z.numpy())
        * z.numpy()
    ).sum(-1)
    every = [
        (
            ref.forward(ref.arrays(state.params["representation"]), DATA["observations"], x.numpy(), z.numpy())
            * z.numpy()
        )
        .sum(-1)
        .min(0)
        for x in shared
    ]
    np.testing.assert_allclose(q.min(0), every[0])
    chosen = np.argmax(every, 0)
    assert len(set(chosen.tolist())) > 1
    found = algorithm.best(state, BATCH["observations"], z, K, rng.make_key(0), shared_noise=True)
    np.testing.assert_allclose(found.numpy(), shared.numpy()[chosen, np.arange(B)], atol=1e-6)
    free = algorithm.draw(state.extra["average"], BATCH["observations"][:1].expand(B, -1), z, 1, KEY)[0]
    assert float(free.std(0).min()) > 0.0  # rows draw their own noise
    same = algorithm.draw(
        state.extra["average"], BATCH["observations"][:1].expand(B, -1), z, 1, KEY, shared_noise=True
    )[0]
    torch.testing.assert_close(same, same[:1].expand(B, -1))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_next_actions(share: float) -> None:
    algorithm, state = make(samples=3, data_share=share)
    draw, choose = rng.split(KEY)
    best = algorithm.best(state, BATCH["next_observations"], Z, 3, draw)
    own = rng.uniform(choose, (B, 1)) < share
    found = algorithm.next_actions(state, BATCH, Z, KEY)
    assert torch.equal(found, torch.where(own, BATCH["next_actions"], best)) and 0 <= int(own.sum()) < B
    assert bool(own.any()) == (share > 0.0)
    assert ("next_actions" in algorithm.sampler().extra) == (share > 0.0)


def test_attention() -> None:
    """Of F against torch's own attention and norms; of B against its transformer, whose queries and keys do nothing
    here.
    """
    torch.manual_seed(0)
    net = AttentiveForward(OBS, A, D, [7, 6], [9])
    s, a = BATCH["observations"], BATCH["actions"]
    x = torch.stack([net.task(torch.cat([s, Z], -1)), net.action(torch.cat([s, a], -1))], 1)
    for block in net.blocks:
        q, k, v = block.query(x), x @ block.key.T, block.value(x)
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        rms = y / y.square().sum(-1, keepdim=True).sqrt() * 6**0.5 * block.gain
        y = y + block.narrow(torch.nn.functional.gelu(block.wide(rms)))
        x = torch.nn.functional.layer_norm(y, (6,), block.norm.weight, block.norm.bias)
    expected = [x.flatten(1) @ net.heads[0].weight[i] + net.heads[0].bias[i] for i in range(2)]
    expected = [y @ net.heads[1].weight[i] + net.heads[1].bias[i] for i, y in enumerate(expected)]
    torch.testing.assert_close(net(s, a, Z), torch.stack(expected), rtol=1e-4, atol=1e-5)

    width, back = 8, AttentiveBackward(OBS, D, 8, 2, 16)
    whole = torch.nn.Transformer(width, 2, 2, 2, 16, dropout=0.0, batch_first=True)
    with torch.no_grad():
        for ours, theirs in ((back.encoder, whole.encoder), (back.decoder, whole.decoder)):
            for mine, layer in zip(ours, theirs.layers, strict=True):
                pairs = [(mine.own, layer.self_attn)] + (
                    [] if mine.other is None else [(mine.other, layer.multihead_attn)]
                )
                for one, attention in pairs:
                    attention.in_proj_weight[2 * width :], attention.in_proj_bias[2 * width :] = (
                        one.value.weight,
                        one.value.bias,
                    )
                    attention.out_proj.weight.copy_(one.out.weight)
                    attention.out_proj.bias.copy_(one.out.bias)
                for one, theirs_one in ((mine.wide, layer.linear1), (mine.narrow, layer.linear2)):
                    theirs_one.weight.copy_(one.weight)
                    theirs_one.bias.copy_(one.bias)
    src, tgt = back.read(s).unsqueeze(1), back.begin.expand(B, 1, width)
    z = back.head(whole(src, tgt).squeeze(1))
    torch.testing.assert_close(back(s), D**0.5 * z / z.norm(dim=-1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_published_defaults() -> None:
    c = registry.get("algo", "breeze").Config()
    published = {
        "orthonormality": 10.0,
        "learning_rate": 1e-4,
        "value_learning_rate": 3e-4,
        "denoising_steps": 10,
        "actor_polyak": 1e-3,
    }
    published |= {
        "acting_samples": 64,
        "samples": 1,
        "data_share": 0.0,
        "expectile": 0.99,
        "reward_weight": 1e-3,
        "temperature": 0.05,
    }
    published |= {"feed_forward": 2048, "layers": 2, "hidden": [256], "value_hidden": [512, 512], "weight_decay": 0.03}
    assert {k: getattr(c, k) for k in published} == published
