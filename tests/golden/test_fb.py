"""Forward-backward representations: tasks drawn, both losses and their joint gradient, the conservative penalties, the
actor, the inferred task; in float64 NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from tests.support.reference import forward_backward as ref

B, OBS, A, D, N = 5, 3, 2, 4, 2
G = np.random.default_rng(4)
DATA = {
    "observations": G.normal(size=(B, OBS)),
    "actions": G.uniform(-1, 1, (B, A)),
    "next_observations": G.normal(size=(B, OBS)),
    "rewards": G.normal(size=B),
    "masks": np.array([1.0, 1.0, 0.0, 1.0, 1.0]),
}
BATCH = {k: torch.tensor(v, dtype=torch.float32) for k, v in DATA.items()}
DATA = {k: v.numpy().astype(np.float64) for k, v in BATCH.items()}
Z = torch.tensor(ref.sphere(G.normal(size=(B, D))), dtype=torch.float32)
KEY = rng.make_key(3)


def make(**settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "fb")
    small = {
        "z_dim": D,
        "inputs_hidden": [7, 6],
        "hidden": [9],
        "backward_hidden": [8, 5],
        "inference_samples": 6,
        "actions": N,
    }
    algorithm = kind(
        kind.Config(**{**small, **settings}), DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
    )
    state, g = algorithm.init(0), torch.Generator().manual_seed(1)

    def moved(tree: Any, size: float) -> Any:
        return {n: {k: v + size * torch.randn(v.shape, generator=g) for k, v in p.items()} for n, p in tree.items()}

    lagrange = {n: p for n, p in state.params.items() if n == "lagrange"}
    return algorithm, state._replace(params={**moved(state.params, 0.3), **lagrange}, target=moved(state.target, 0.3))


def noisy(mean: np.ndarray, key: torch.Tensor) -> np.ndarray:
    noise = rng.normal(key, mean.shape).numpy().astype(np.float64)
    return np.clip(mean + np.clip(0.2 * noise, -0.3, 0.3), -1, 1)


def core(algorithm: Any, state: TrainState, params: ref.Arrays) -> float:
    """The measure's and the orthonormality loss at these parameters of F and B."""
    actor, target, z = (
        ref.arrays(state.params["actor"]),
        ref.arrays(state.target["representation"]),
        Z.numpy().astype(np.float64),
    )
    following = noisy(ref.policy(actor, DATA["next_observations"], z), rng.split(KEY)[0])
    f, b = ref.forward(target, DATA["next_observations"], following, z), ref.backward(target, DATA["next_observations"])
    smallest = np.minimum(f[0] @ b.T, f[1] @ b.T)
    f, b = (
        ref.forward(params, DATA["observations"], DATA["actions"], z),
        ref.backward(params, DATA["next_observations"]),
    )
    loss = ref.measure_loss(f, b, smallest, 0.98 * DATA["masks"])
    return float(loss + algorithm.config.orthonormality * ref.orthonormality(b))


def test_tasks_drawn() -> None:
    """Of length sqrt(D): normal numbers scaled, or B of the batch's states in another order."""
    algorithm, state = make(goal_share=0.5)
    z = algorithm.draw_z(state, BATCH, KEY).numpy()
    draw, mix, shuffle = rng.split(KEY, 3)
    goal = rng.uniform(mix, (B, 1)).numpy() < 0.5
    assert 0 < goal.sum() < B
    order = rng.permuted(shuffle, torch.arange(B), B).numpy()
    b = ref.backward(ref.arrays(state.params["representation"]), DATA["observations"][order])
    np.testing.assert_allclose(z, np.where(goal, b, ref.sphere(rng.normal(draw, (B, D)).numpy())), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(z, axis=1), np.sqrt(D), rtol=1e-5)


def test_losses_and_their_joint_gradient() -> None:
    algorithm, state = make(orthonormality=0.7, gradient_limit=0.0)
    params = ref.arrays(state.params["representation"])
    expected = core(algorithm, state, params)
    loss, metrics = algorithm.representation_loss(state.params["representation"], state, BATCH, Z, KEY)
    assert float(loss) == pytest.approx(expected, rel=1e-4)
    assert float(metrics["fb/orthonormality"]) == pytest.approx(
        ref.orthonormality(ref.backward(params, DATA["next_observations"])), rel=1e-4
    )
    new, _ = algorithm.descend(state, "representation", algorithm.representation_loss, BATCH, Z, KEY)
    for name in (
        "ahead.heads.head.weight",
        "ahead.task.layers.0.weight",
        "back.net.layers.1.weight",
        "back.net.head.bias",
    ):
        at, step = tuple(0 for _ in params[name].shape), 1e-6
        up, down = ({**params, name: params[name].copy()} for _ in range(2))
        up[name][at] += step
        down[name][at] -= step
        slope = (core(algorithm, state, up) - core(algorithm, state, down)) / (2 * step)
        found = float(new.opt["representation"]["mu"][name][at]) / 0.1  # the first moment after one step
        assert found == pytest.approx(slope, rel=2e-3, abs=1e-4), name
    limited, _ = make(orthonormality=0.7, gradient_limit=0.01)
    cut, _ = limited.descend(state, "representation", limited.representation_loss, BATCH, Z, KEY)
    for name, mu in cut.opt["representation"]["mu"].items():
        torch.testing.assert_close(mu, new.opt["representation"]["mu"][name].clamp(-0.001, 0.001), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("parts", [["inputs", "backward"], ["actor"], []])
def test_networks_of_the_references(parts: list[str]) -> None:
    """controllable_agent has LayerNorm and tanh in what reads the inputs and in B, zero-shot-rl in the actor's joint
    layers.
    """
    algorithm, state = make(norm_tanh=parts)
    for module, names in {
        "actor": ("state", "task", "net"),
        "representation": ("ahead.action", "ahead.task", "back.net"),
    }.items():
        for name in names:
            part = {"net": "actor", "back.net": "backward"}.get(name, "inputs")
            assert (f"{name}.norm.weight" in state.params[module]) == (part in parts)
    p, actor, z = (
        ref.arrays(state.params["representation"]),
        ref.arrays(state.params["actor"]),
        Z.numpy().astype(np.float64),
    )
    s, a = DATA["observations"], DATA["actions"]
    forward = algorithm.forward_map(state.params["representation"], BATCH["observations"], BATCH["actions"], Z)
    np.testing.assert_allclose(forward, ref.forward(p, s, a, z), rtol=1e-4, atol=1e-4)
    backward = algorithm.backward_map(state.params["representation"], BATCH["observations"])
    np.testing.assert_allclose(backward, ref.backward(p, s), rtol=1e-4, atol=1e-4)
    action = algorithm.apply("actor", state.params["actor"], BATCH["observations"], Z)
    np.testing.assert_allclose(action, ref.policy(actor, s, z), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["value", "measure"])
def test_conservative_penalty(kind: str) -> None:
    algorithm, state = make(conservative=kind, conservative_weight=0.6, penalty_target=2.0, orthonormality=0.7)
    p, actor, z = (
        ref.arrays(state.params["representation"]),
        ref.arrays(state.params["actor"]),
        Z.numpy().astype(np.float64),
    )
    s, a, s2 = DATA["observations"], DATA["actions"], DATA["next_observations"]
    keys = rng.split(rng.split(KEY)[1], 3)
    uniform = rng.uniform(keys[0], (3 * N, B, A), -1.0, 1.0).numpy()
    here, there = (
        noisy(np.broadcast_to(ref.policy(actor, x, z), (N, B, A)), k) for x, k in ((s, keys[1]), (s2, keys[2]))
    )
    tried = [ref.forward(p, s, u, z) for u in uniform] + [ref.forward(p, s, u, z) for u in here]
    tried += [ref.forward(p, s2, u, z) for u in there] + [ref.forward(p, s, a, z)] * N  # 12 for each row
    f, b, expected = ref.forward(p, s, a, z), ref.backward(p, s2), 0.0
    for k in range(2):
        for i in range(B):
            for j in range(B) if kind == "measure" else [i]:
                against = b[j] if kind == "measure" else z[i]
                gap = np.log(np.sum(np.exp([t[k, i] @ against for t in tried]))) - f[k, i] @ against
                expected += gap / (B * B if kind == "measure" else B)
    loss, metrics = algorithm.representation_loss(state.params["representation"], state, BATCH, Z, KEY)
    assert len(tried) == 12 and float(metrics["conservative/penalty"]) == pytest.approx(expected, rel=1e-4)
    assert float(loss) == pytest.approx(core(algorithm, state, p) + 0.6 * expected, rel=1e-4)
    # the weight rises where the penalty is above its target
    assert expected > 2.0
    moved, more = algorithm.descend(state, "lagrange", algorithm.lagrange_loss, metrics["conservative/penalty"])
    assert float(more["conservative/weight_loss"]) == pytest.approx(-0.5 * 0.6 * (expected - 2.0), rel=1e-4)
    assert float(algorithm.weight(moved)) > 0.6
    fixed, other = make(conservative=kind, conservative_weight=0.6, penalty_target=None)
    assert "lagrange" not in other.params and float(fixed.weight(other)) == pytest.approx(0.6)


def test_actor_loss() -> None:
    """-mean of the smaller F . z, at actions with noise; where an action is cut off, its gradient is not."""
    algorithm, state = make()
    p, actor, z = (
        ref.arrays(state.params["representation"]),
        ref.arrays(state.params["actor"]),
        Z.numpy().astype(np.float64),
    )
    action = noisy(ref.policy(actor, DATA["observations"], z), KEY)
    q = (ref.forward(p, DATA["observations"], action, z) * z).sum(-1)
    loss, _ = algorithm.actor_loss(state.params["actor"], state, BATCH, Z, KEY)
    assert float(loss) == pytest.approx(-q.min(0).mean(), rel=1e-4)
    mean = torch.full((3, A), 0.999, requires_grad=True)
    algorithm.noisy(mean, KEY).sum().backward()
    assert bool((algorithm.noisy(mean, KEY) == 1.0).any()) and torch.equal(mean.grad, torch.ones(3, A))


def test_the_inferred_task_decides_the_action() -> None:
    algorithm, state = make()
    states, rewards = G.normal(size=(6, OBS)), G.normal(size=6)
    extra = {"states": torch.tensor(states, dtype=torch.float32), "rewards": torch.tensor(rewards, dtype=torch.float32)}
    state = state._replace(extra=extra)
    p = ref.arrays(state.params["representation"])
    z = ref.sphere(np.mean([r * ref.backward(p, s) for r, s in zip(rewards, states, strict=True)], axis=0))
    np.testing.assert_allclose(algorithm.infer(state).numpy(), z, rtol=1e-3, atol=1e-4)
    expected = ref.policy(ref.arrays(state.params["actor"]), DATA["observations"], np.tile(z, (B, 1)))
    actor = algorithm.actor(state)
    found, _ = actor.act(actor.start(B), BATCH["observations"], KEY, explore=False)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-3, atol=1e-4)
    # another reward, told without training
    other = actor.infer_task(extra["states"][:4], -extra["rewards"][:4])
    told, _ = other.act(other.start(B), BATCH["observations"], KEY, explore=False)
    z = ref.sphere(np.mean([-r * ref.backward(p, s) for r, s in zip(rewards[:4], states[:4], strict=True)], axis=0))
    np.testing.assert_allclose(
        told.numpy(),
        ref.policy(ref.arrays(state.params["actor"]), DATA["observations"], np.tile(z, (B, 1))),
        rtol=1e-3,
        atol=1e-4,
    )


def test_a_goal_is_its_own_task() -> None:
    algorithm, state = make(task="goal")
    assert (
        algorithm.traits.goal_conditioned and not type(algorithm).traits_for(type(algorithm).Config()).goal_conditioned
    )
    actor = algorithm.actor(state)
    carry = actor.set_goal(actor.start(B), BATCH["next_observations"])
    found, carry = actor.act(carry, BATCH["observations"], KEY, explore=False)
    z = ref.backward(ref.arrays(state.params["representation"]), DATA["next_observations"])
    np.testing.assert_allclose(
        found.numpy(), ref.policy(ref.arrays(state.params["actor"]), DATA["observations"], z), rtol=1e-3, atol=1e-4
    )
    np.testing.assert_allclose(carry.numpy(), z, rtol=1e-3, atol=1e-4)
    with pytest.raises(UserError, match="was told none"):
        actor.act(actor.start(B), BATCH["observations"], KEY, explore=False)


def test_published_defaults() -> None:
    c = registry.get("algo", "fb").Config()
    published = {
        "z_dim": 50,
        "learning_rate": 1e-4,
        "polyak": 0.01,
        "discount": 0.98,
        "batch_size": 512,
        "goal_share": 0.5,
    }
    published |= {
        "inputs_hidden": [1024, 512],
        "hidden": [1024, 1024],
        "backward_hidden": [256] * 3,
        "gradient_limit": 1.0,
    }
    published |= {
        "policy_noise": 0.2,
        "noise_clip": 0.3,
        "orthonormality": 1.0,
        "penalty_target": 50.0,
        "inference_samples": 10_000,
    }
    assert {k: getattr(c, k) for k in published} == published
