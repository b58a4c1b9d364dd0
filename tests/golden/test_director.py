"""Director: goals, codes, the time scales of manager and worker, their losses by hand, and what trains what."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import TrainState
from offrl.algorithms.director import Director, DirectorConfig
from offrl.algorithms.director.hierarchy import abstract, coded, entropy_shares, max_cosine, segments
from offrl.algorithms.director.imagination import GoalRollout, goal_rollout
from offrl.algorithms.director.scales import correction, deviation, followed, policy_loss
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.samplers.states import StateSampler
from offrl.errors import UserError
from offrl.world_models.recurrent.latents import LatentWindows
from offrl.world_models.recurrent.networks import HEAD

OBS, A, B, T, H, K = 3, 2, 4, 5, 4, 2
D, F = 8, 8 + 6  # recurrent state; with the sample
SPEC = DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
SMALL: dict[str, Any] = {
    "length": T,
    "horizon": H,
    "goal_steps": K,
    "goal_groups": 2,
    "goal_classes": 3,
    "goal_kl": 0.1,
    "recurrent_width": D,
    "blocks": 2,
    "groups": 2,
    "classes": 3,
    "width": 8,
    "warmup_steps": 0,
    "learning_rate": 1e-3,
    "members": 1,
    "penalty": 0.0,
    "free_bits": 0.0,
    "exploration_weight": 0.1,
}
HIERARCHY = ("goal_encoder", "goal_decoder", "manager", "actor", "critic", "exploration_critic", "goal_critic")


def make(**settings: Any) -> tuple[Director, TrainState]:
    """The algorithm and a state in which no head is 0 any more, and the slow critics differ from the critics."""
    algorithm = Director(DirectorConfig(**{**SMALL, **settings}), SPEC)
    state, g = algorithm.init(2), torch.Generator().manual_seed(1)
    for params in (*state.params.values(), *state.target.values()):
        params.update({k: v + 0.1 * torch.randn(v.shape, generator=g) for k, v in params.items()})
    return algorithm, state


def a_batch() -> dict[str, Tensor]:
    """Windows [T, B] over several episodes, of which some end in terminals whose observation is not known."""
    g, n = np.random.default_rng(0), 24
    last = np.arange(n) % 4 == 3
    terminal = last & (np.arange(n) < 16)
    data = from_arrays(g.normal(size=(n, OBS)), g.uniform(-1, 1, (n, A)), g.normal(size=n), terminal, last & ~terminal,
                       action_low=[-1.0] * A, action_high=[1.0] * A)  # fmt: skip
    sampler = StateSampler(T, "chain")
    batch = {k: v.transpose(0, 1) for k, v in sampler(sampler.prepare(data), rng.make_key(5), B).items()}
    assert not batch["valid"].all()
    return batch


def with_gradients(state: TrainState) -> dict[str, dict[str, Tensor]]:
    return {n: {k: v.clone().requires_grad_() for k, v in p.items()} for n, p in state.params.items()}


def gradients(loss: Tensor, params: dict[str, Tensor]) -> list[Tensor | None]:
    return list(torch.autograd.grad(loss, list(params.values()), retain_graph=True, allow_unused=True))


def observed(algorithm: Director, params: dict[str, Any]) -> LatentWindows:
    return algorithm.model_loss(params, a_batch(), rng.split(rng.make_key(3)))[0]


def a_rollout(algorithm: Director, state: TrainState, params: dict[str, Any] | None = None) -> GoalRollout:
    windows = observed(algorithm, state.params)
    return goal_rollout(algorithm, state.params if params is None else params, windows, rng.make_key(4))


# ---- rewards, time scales and weights


def test_the_reward_for_reaching_a_goal() -> None:
    goals = torch.tensor([[3.0, 4.0], [3.0, 4.0], [3.0, 4.0], [0.0, 0.0], [1.0, 0.0]])
    states = torch.tensor([[6.0, 8.0], [0.0, 5.0], [3.0, 4.0], [0.0, 0.0], [-2.0, 0.0]])
    torch.testing.assert_close(max_cosine(goals, states), torch.tensor([0.5, 0.8, 1.0, 0.0, -0.5]))


def test_the_time_of_each_goal() -> None:
    """Of 4 steps and goals of 2, from two states: 0 1 2 and 2 3 4."""
    x = torch.arange(5.0)[:, None] + torch.tensor([0.0, 10.0])
    assert segments(x, 2).tolist() == [[0.0, 10.0, 2.0, 12.0], [1.0, 11.0, 3.0, 13.0], [2.0, 12.0, 4.0, 14.0]]


def test_the_time_of_the_manager() -> None:
    """Going on with 1, 0.5, 0.8, 1, 0.5: rewards (1 r1 + 0.5 r2) / 2 and (0.8 r3 + 0.8 r4) / 2, and one discount for
    0.5 x 0.8 and 1 x 0.5.
    """
    rewards = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0]).unsqueeze(-1)
    alive = 0.9 * torch.tensor([1.0, 0.5, 0.8, 1.0, 0.5]).unsqueeze(-1)
    means, discounts = abstract(rewards, alive, 2, 0.9)
    torch.testing.assert_close(means[1:, 0], torch.tensor([1.0, 2.8]))
    torch.testing.assert_close(discounts[:, 0], torch.tensor([0.9, 0.36, 0.45]))
    sure = abstract(rewards, torch.ones(5, 1), 2, 0.9)[1]  # a prediction above the discount is no growth
    torch.testing.assert_close(sure[:, 0], torch.full((3,), 0.9))


def test_a_weight_follows_its_target() -> None:
    weight, weights = 1.0, []
    for value in (5.0, 9.0, 9.2, 12.0, 10.9):
        weight *= float(correction(torch.tensor(value), 10.0))
        weights.append(weight)
    assert weights == pytest.approx([0.909091, 0.826446, 0.826446, 0.909091, 0.909091], rel=1e-5)


def test_running_moments() -> None:
    """Of one batch its own deviation; of two, 0.9 x 0.1 and 0.1 parts of 0.19."""
    first, second = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 5.0])
    once = followed(torch.zeros(3), first, 0.9)
    torch.testing.assert_close(once, torch.tensor([0.2, 0.5, 0.1]))
    assert float(deviation(once, 0.01)) == pytest.approx(1.0, rel=1e-5)
    twice = followed(once, second, 0.9)
    mean, square = (0.09 * 2 + 0.1 * 5) / 0.19, (0.09 * 5 + 0.1 * 25) / 0.19
    assert float(deviation(twice, 0.01)) == pytest.approx(math.sqrt(square - mean**2), rel=1e-4)
    assert float(deviation(followed(torch.zeros(3), second, 0.9), 0.01)) == pytest.approx(0.01)


# ---- the goal autoencoder


def test_codes_by_hand() -> None:
    """Logits ln 3 and 0 in one group: code (1, 0) with noise against the likelier class (0, 1), and KL ln 2 - H."""
    table = torch.tensor([[1.0, 2.0], [3.0, 5.0]])
    networks = {"goal_encoder": lambda h: torch.tensor([math.log(3.0), 0.0]).expand(len(h), 2),
                "goal_decoder": lambda z: z @ table}  # fmt: skip
    c = DirectorConfig(goal_groups=1, goal_classes=2)
    noise = torch.tensor([[[0.0, 0.0]], [[0.0, 5.0]]])
    error, divergence = coded(lambda name, x: networks[name](x), c, torch.tensor([[0.0, 2.5], [3.0, 3.0]]), noise)
    torch.testing.assert_close(error, torch.tensor([[1.0, 0.25], [0.0, 4.0]]))
    torch.testing.assert_close(divergence, torch.full((2,), 0.75 * math.log(1.5) + 0.25 * math.log(0.5)))
    assert float(entropy_shares(torch.tensor([0.75, 0.25]).log())) == pytest.approx(0.811278, rel=1e-5)


def test_the_loss_of_the_goal_autoencoder() -> None:
    """The mean over known states, with the weight of after its step; recurrent states learn nothing from it."""
    algorithm, state = make()
    batch, key = a_batch(), rng.make_key(7)
    params = with_gradients(state)
    windows = observed(algorithm, params)
    loss, metrics, extra = algorithm.goal_loss(params, state, windows, batch, key)
    errors, divergences = [], []
    noise = rng.gumbel(key, (T, B, 2, 3))
    for t, b in batch["valid"].nonzero().tolist():
        h = windows.state.recurrent[t, b].detach()
        p = algorithm.apply("goal_encoder", state.params["goal_encoder"], h).view(2, 3).softmax(-1)
        code = torch.nn.functional.one_hot((p.log() + noise[t, b]).argmax(-1), 3).float().flatten()
        errors.append((algorithm.apply("goal_decoder", state.params["goal_decoder"], code) - h).square().sum())
        divergences.append((p * (3.0 * p).log()).sum())
    error, divergence = float(torch.stack(errors).mean()), float(torch.stack(divergences).mean())
    weight = 1.0 / 1.1 if divergence < 0.1 / 1.1 else 1.0
    assert float(extra["goal_kl"]) == pytest.approx(weight)
    assert float(metrics["goal/kl"].detach()) == pytest.approx(divergence, rel=1e-4)
    assert float(loss.detach()) == pytest.approx(error + weight * divergence, rel=1e-5)
    for module in ("goal_encoder", "goal_decoder"):
        assert all(g is not None and g.any() for g in gradients(loss, params[module])), module
    assert all(g is None for n in params if not n.startswith("goal_e") and n != "goal_decoder"
               for g in gradients(loss, params[n]))  # fmt: skip
    for start, kl, expected in ((1.0, 1e-6, 1.0), (0.5, 1e-6, 0.55), (1e-5, 100.0, 1e-5)):
        algorithm.config.goal_kl, state.extra["goal_kl"] = kl, torch.tensor(start)
        _, _, extra = algorithm.goal_loss(params, state, windows, batch, key)
        assert float(extra["goal_kl"]) == pytest.approx(expected)


# ---- imagination


@pytest.mark.parametrize("settings", [{}, {"members": 3, "penalty": 2.0, "penalty_unit": "one"}], ids=["", "penalty"])
def test_imagination_step_by_step(settings: dict[str, Any]) -> None:
    algorithm, state = make(**settings)
    windows, params = observed(algorithm, state.params), state.params
    rollout, keys = a_rollout(algorithm, state), rng.split(rng.make_key(4), H + 1)
    latents = algorithm.latents(params)
    at = pytree.tree_map(lambda x: x.flatten(0, 1), windows.state)
    n, disagreements, features = T * B, [torch.zeros(T * B)], [at.features]
    for i in range(H):
        pick, draw, move = rng.split(keys[i], 3)
        if i % K == 0:
            p = algorithm.apply("manager", params["manager"], at.features).view(n, 2, 3).softmax(-1)
            chosen = ((0.99 * p + 0.01 / 3).log() + rng.gumbel(pick, (n, 2, 3))).argmax(-1)
            code = torch.nn.functional.one_hot(chosen, 3).float().flatten(1)
            goal = algorithm.apply("goal_decoder", params["goal_decoder"], code)
            torch.testing.assert_close(rollout.codes[i // K], code)
            torch.testing.assert_close(rollout.goals[i // K], goal)
        mean, log_std = algorithm.apply("actor", params["actor"], torch.cat([at.features, goal], -1))
        at, disagreement = latents.imagine(at, mean + log_std.exp() * rng.normal(draw, (n, A)), move)
        features.append(at.features)
        disagreements.append(disagreement)
    torch.testing.assert_close(rollout.features, torch.stack(features))
    rewards = HEAD.mean(algorithm.apply("reward", params["reward"], rollout.features))
    if settings:
        rewards = rewards - 2.0 * torch.stack(disagreements)
        assert torch.stack(disagreements)[1:].all()
    torch.testing.assert_close(rollout.rewards, rewards)
    h = rollout.features[..., :D]
    error, _ = coded(latents.apply, algorithm.config, h, rng.gumbel(keys[H], (H + 1, n, 2, 3)))
    torch.testing.assert_close(rollout.surprise, error.sum(-1) / D)
    alive = algorithm.apply("continuation", params["continuation"], rollout.features).squeeze(-1).sigmoid()
    torch.testing.assert_close(rollout.alive, alive)


# ---- the losses of worker and manager


def returns_of(rewards: list[Tensor], values: list[Tensor], alive: list[Tensor]) -> list[Tensor]:
    """R_i of each state but the last, of what is received and predicted on arriving."""
    following, returns = values[-1], []
    for i in range(len(rewards) - 1, 0, -1):
        following = rewards[i] + alive[i] * (0.05 * values[i] + 0.95 * following)
        returns.insert(0, following)
    return returns


def critic_error(algorithm: Director, state: TrainState, name: str, x: Tensor, returns: Tensor) -> Tensor:
    logits = algorithm.apply(name, state.params[name], x).log_softmax(-1)
    slow = HEAD.mean(algorithm.apply(name, state.target[name], x))
    return -sum(((HEAD.project(y, None) * logits).sum(-1) for y in (returns, slow)), torch.zeros(()))


def valued(
    algorithm: Director, state: TrainState, name: str, x: list[Tensor], rewards: list[Tensor], alive: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Advantages in units of this batch's returns' deviation, the critic's errors, and the weights of states."""
    values = [HEAD.mean(algorithm.apply(name, state.params[name], y)) for y in x]
    returns = torch.stack(returns_of(rewards, values, alive))
    errors = torch.stack([critic_error(algorithm, state, name, y, r) for y, r in zip(x[:-1], returns, strict=True)])
    weights = torch.stack([torch.stack(alive[: i + 1]).prod(0) for i in range(len(alive) - 1)])
    return (returns - torch.stack(values[:-1])) / max(float(returns.std(correction=0)), 0.01), errors, weights


def test_the_loss_of_the_worker() -> None:
    """Each goal's two steps by themselves, the last of which ends with a value towards the same goal."""
    algorithm, state = make()
    rollout = a_rollout(algorithm, state)
    loss, metrics, extra = algorithm.worker_loss(state.params, state, rollout)
    gains, errors, weights, entropies, rewards = [], [], [], [], []
    times = [(s, range(s * K, s * K + K + 1)) for s in range(H // K)]
    x = [torch.cat([torch.cat([rollout.features[t[i]], rollout.goals[s]], -1) for s, t in times]) for i in range(K + 1)]
    for i in range(K + 1):
        goal, h = x[i][:, F:], x[i][:, :D]
        longest = torch.maximum(goal.norm(dim=-1), h.norm(dim=-1))
        rewards.append((goal * h).sum(-1) / longest**2)
    alive = [torch.cat([rollout.alive[t[i]] for _, t in times]) for i in range(K + 1)]
    gains, errors, weights = valued(algorithm, state, "goal_critic", x, rewards, alive)
    gains = (gains - gains.mean()) / gains.std(correction=0)
    _, log_std = algorithm.apply("actor", state.params["actor"], torch.stack(x[:-1]))
    entropies = (log_std - math.log(0.1)) / (0.0 - math.log(0.1))
    assert 0.0 < float(entropies.min()) < float(entropies.max()) < 1.0
    eta = torch.where(entropies.mean((0, 1)) > 0.55, 1.0 / 1.1, 1.0)
    expected = (weights * errors).mean() - (weights * (gains + (eta * entropies).sum(-1))).mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)
    assert float(metrics["worker/reward"]) == pytest.approx(float(torch.stack(rewards).mean()), rel=1e-4)
    torch.testing.assert_close(extra["worker_entropy"], eta)


def test_the_loss_of_the_manager() -> None:
    """Two choices: advantages of the task with a tenth of exploration's, times log probabilities of what was chosen."""
    algorithm, state = make(goal_kl=1.0)
    rollout = a_rollout(algorithm, state)
    loss, _, extra = algorithm.manager_loss(state.params, state, rollout)
    x, gamma = [rollout.features[i] for i in (0, 2, 4)], algorithm.config.discount
    goes_on = (rollout.alive / gamma).clamp(max=1.0)
    alive = [gamma * y for y in (goes_on[0], goes_on[1] * goes_on[2], goes_on[3] * goes_on[4])]
    total, critics = torch.zeros(2, T * B), torch.zeros(())
    for name, share, reward in (("critic", 1.0, rollout.rewards), ("exploration_critic", 0.1, rollout.surprise)):
        means = [(goes_on[i] * reward[i + 1] + goes_on[i] * goes_on[i + 1] * reward[i + 2]) / 2.0 for i in (0, 2)]
        gains, errors, weights = valued(algorithm, state, name, x, [reward[0], *means], alive)
        total, critics = total + share * gains, critics + (weights * errors).mean()
    total = (total - total.mean()) / total.std(correction=0)
    p = algorithm.apply("manager", state.params["manager"], torch.stack(x[:2])).unflatten(-1, (2, 3)).softmax(-1)
    p = 0.99 * p + 0.01 / 3
    log_prob = (rollout.codes.unflatten(-1, (2, 3)) * p).sum(-1).log().sum(-1)
    entropies = -(p * p.log()).sum(-1) / math.log(3.0)
    assert (entropies.mean((0, 1)) > 0.55).all()
    expected = critics - (weights * (log_prob * total + entropies.sum(-1) / 1.1)).mean()
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)
    torch.testing.assert_close(extra["manager_entropy"], torch.full((2,), 1.0 / 1.1))
    assert set(extra) == {"critic", "exploration_critic", "manager", "manager_entropy"}


def test_the_weight_of_an_entropy_rises_where_it_is_small() -> None:
    c = DirectorConfig()
    extra = {"worker": torch.zeros(3), "worker_entropy": torch.tensor([1.0, 1.0, 100.0, 1.0])}
    entropy = torch.tensor([0.9, 0.4, 0.4, 0.5]).expand(2, 3, 4)
    _, _, after = policy_loss(c, "worker", extra, torch.randn(2, 3), entropy, torch.ones(3, 3))
    torch.testing.assert_close(after["worker_entropy"], torch.tensor([1.0 / 1.1, 1.1, 100.0, 1.0]))


def test_what_trains_what() -> None:
    """Worker and manager move neither the model nor one another; the worker learns through the model's steps."""
    algorithm, state = make()
    params, batch, key = with_gradients(state), a_batch(), rng.make_key(1)
    keys = rng.split(key, 4)
    windows, _, model, _ = algorithm.model_loss(params, batch, keys[:2])
    total, _, _ = algorithm.loss(params, state, batch, key)
    for name in algorithm.model:
        for got, other in zip(gradients(total, params[name]), gradients(model, params[name]), strict=True):
            assert got is not None and other is not None and got.any()
            torch.testing.assert_close(got, other)
    rollout = goal_rollout(algorithm, {**state.params, "actor": params["actor"]}, windows, keys[2])
    constants = ("goals", "codes", "rewards", "surprise")
    assert rollout.features.requires_grad and not any(getattr(rollout, x).requires_grad for x in constants)
    worker, _, _ = algorithm.worker_loss(params, state, rollout)
    manager, _, _ = algorithm.manager_loss(params, state, rollout)
    for loss, trained in ((worker, {"actor", "goal_critic"}), (manager, {"manager", "critic", "exploration_critic"})):
        for name in HIERARCHY:
            grads = gradients(loss, params[name])
            assert all(g is not None and g.any() for g in grads) if name in trained else not any(
                g is not None for g in grads), name  # fmt: skip
    still = pytree.tree_map(lambda x: x.detach(), rollout)
    assert any(not torch.equal(x, y) for x, y in zip(
        gradients(worker, params["actor"]), gradients(algorithm.worker_loss(params, state, still)[0], params["actor"]),
        strict=True))  # fmt: skip


# ---- updates and acting


def test_an_update_moves_everything() -> None:
    algorithm, state = make()
    batch = {name: column.transpose(0, 1) for name, column in a_batch().items()}
    after, metrics = algorithm.update(state, batch, rng.make_key(1), phase=0)
    for name in (*algorithm.model, *HIERARCHY):
        assert all(not torch.equal(v, state.params[name][k]) for k, v in after.params[name].items()), name
    assert all(v.isfinite() for v in metrics.values())
    for name in ("critic", "exploration_critic", "goal_critic"):
        for k, v in after.target[name].items():
            torch.testing.assert_close(v, 0.98 * state.target[name][k] + 0.02 * after.params[name][k])
    frozen, old = make(model_updates=1)
    after, _ = frozen.update(old._replace(step=torch.tensor(1)), batch, rng.make_key(1), phase=0)
    assert all(torch.equal(v, old.params[n][k]) for n in frozen.model for k, v in after.params[n].items())
    assert not torch.equal(after.extra["goal_kl"], old.extra["goal_kl"])


def test_a_goal_is_kept_for_its_steps() -> None:
    """Two steps, and anew where an episode begins; greedy goals are those of the likeliest code."""
    algorithm, state = make()
    actor, observations = algorithm.actor(state), torch.randn(5, 4, OBS, generator=torch.Generator().manual_seed(0))
    carry, goals = actor.start(4), []
    for t in range(5):
        if t == 3:
            carry = actor.begin_anew(carry, torch.tensor([True, False, False, False]))
        action, carry = actor.act(carry, observations[t], rng.make_key(t), explore=False)
        features = carry.latent.state.features
        code = algorithm.apply("manager", state.params["manager"], features).view(4, 2, 3).argmax(-1)
        code = torch.nn.functional.one_hot(code, 3).float().flatten(1)
        fresh = algorithm.apply("goal_decoder", state.params["goal_decoder"], code)
        begins = torch.tensor([t in (0, 2, 3), *[t in (0, 2, 4)] * 3])
        torch.testing.assert_close(carry.goal[begins], fresh[begins])
        assert t == 0 or torch.equal(carry.goal[~begins], goals[-1][~begins])
        mean, _ = algorithm.apply("actor", state.params["actor"], torch.cat([features, carry.goal], -1))
        torch.testing.assert_close(action, mean)
        torch.testing.assert_close(carry.latent.action, action)
        goals.append(carry.goal)
    assert carry.step.tolist() == [0, 1, 1, 1]


def test_the_published_settings() -> None:
    c = DirectorConfig()
    assert (c.goal_steps, c.goal_groups, c.goal_classes, c.goal_kl, c.horizon) == (8, 8, 8, 10.0, 16)
    assert (c.discount, c.decay, c.entropy_share) == (0.99, 0.95, 0.5)


def test_imagined_goals_are_pursued_to_their_ends() -> None:
    with pytest.raises(UserError, match=r"algo\.horizon=5 is no multiple of algo\.goal_steps=2"):
        make(horizon=5)
