"""BRC: its networks and whole updates, of one task and of two, in plain torch float64, the scaling of rewards by hand,
and what moves it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithm import TrainState, with_settings
from offrl.algorithms.brc.networks import BroNet, TaskEmbedding
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.data.transforms.episodes import concatenate
from offrl.data.transforms.multitask import as_tasks
from offrl.data.value_range import largest_return
from offrl.errors import UserError
from offrl.finetuning.moving import MovingReturns
from offrl.finetuning.play.turns import blank
from offrl.nn import Pairs
from offrl.settings.presets import finetune_settings
from offrl.settings.replicas import Replica
from offrl.tasks.task import Task, TaskPart
from tests.support.golden import KEY, OBS, A, B, spec, transitions

LR, DECAY, DISCOUNT, POLYAK, WEIGHT, LARGEST = 0.01, 0.5, 0.9, 0.1, 0.4, 30.0
ATOMS, LIMIT = 7, 2.0
G = np.random.default_rng(4)
BATCH = transitions(G)
X = {name: x.double() for name, x in BATCH.items()}
NOISE = torch.tensor(G.normal(size=(B, A)))
Params = dict[str, Tensor]


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator has tests of its own; here the noise is known, whatever the key."""
    monkeypatch.setattr(rng, "normal", lambda key, shape: NOISE.float())


def make(of: DataSpec | None = None, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "brc")
    sizes: dict[str, Any] = {"hidden": [6], "critic_hidden": [4, 4], "value_bins": ATOMS}
    sizes |= {"learning_rate": LR, "weight_decay": DECAY, "discount": DISCOUNT, "polyak": POLYAK}
    sizes |= {"entropy_weight": WEIGHT, "value_range": [-LIMIT, LIMIT], "largest_return": LARGEST}
    algorithm = kind(kind.Config(**{**sizes, **settings}), of or spec())
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(22)
    for params in (state.params["critic"], state.target["critic"], state.params["actor"]):
        for name, x in params.items():  # biases, scales and shifts away from where they begin
            if name != "masks":
                params[name] = x + 0.3 * torch.randn(x.shape, generator=g)
    return algorithm, algorithm.critic.begin(state)


# ---- the networks, from their formulas


def layer(p: Params, at: str, x: Tensor) -> Tensor:
    """Linear, and LayerNorm with its epsilon of 1e-6."""
    weight, bias = p[at + ".linear.weight"], p[at + ".linear.bias"]
    y = x @ (weight if at.startswith("critic") else weight.T) + bias
    y = (y - y.mean(-1, keepdim=True)) / (y.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
    return y * p[at + ".scale"] + p[at + ".shift"]


def features(p: Params, at: str, x: Tensor, blocks: int) -> Tensor:
    h = layer(p, f"{at}features.first", x).clamp(min=0.0)
    for i in range(blocks):
        inner = layer(p, f"{at}features.blocks.{i}.0", h).clamp(min=0.0)
        h = h + layer(p, f"{at}features.blocks.{i}.1", inner)
    return h


def distributions(p: Params, observations: Tensor, actions: Tensor) -> Tensor:
    """Logits [2, B, K]."""
    x, logits = torch.cat([observations, actions], -1), []
    for e in range(2):
        q = {f"critic.{k}": v[e] for k, v in p.items()}
        h = features(q, "critic.", x, 2)
        logits.append(h @ q["critic.head.weight"] + q["critic.head.bias"])
    return torch.stack(logits)


def mixture(p: Params, observations: Tensor, actions: Tensor) -> Tensor:
    """The mean of both distributions, [B, K]."""
    return distributions(p, observations, actions).softmax(-1).mean(0)


def policy(p: Params, observations: Tensor) -> tuple[Tensor, Tensor]:
    """The sample that NOISE makes, and its log density with log(1 - a^2) written out."""
    h = features(p, "", observations, 1)
    mean, log_std = (h @ p[f"{head}.weight"].T + p[f"{head}.bias"] for head in ("mean", "log_std"))
    log_std = -10.0 + 6.0 * (1.0 + log_std.tanh())
    u = mean + log_std.exp() * NOISE
    log_p = -0.5 * NOISE**2 - log_std - 0.5 * math.log(2 * math.pi) - (1 - u.tanh() ** 2).log()
    return u.tanh(), log_p.sum(-1)


def double(p: Params) -> Params:
    return {k: v.double().requires_grad_() for k, v in p.items()}


def stepped(p: Params, loss: Tensor) -> Params:
    """The first step of AdamW: LR g / (|g| + 1e-8), and LR DECAY of the parameter."""
    grads = torch.autograd.grad(loss, list(p.values()))
    return {
        name: (x * (1.0 - LR * DECAY) - LR * g / (g.abs() + 1e-8)).detach()
        for (name, x), g in zip(p.items(), grads, strict=True)
    }


def close(result: Params, expected: Params) -> None:
    assert result.keys() == expected.keys()
    for name, x in expected.items():
        np.testing.assert_allclose(result[name], x, atol=2e-5, err_msg=name)


def projection(p: Tensor, atoms: Tensor) -> Tensor:
    """The mass p [K] at `atoms` [K], atom by atom, on K bins over [-LIMIT, LIMIT]."""
    result, width = torch.zeros(len(p), dtype=torch.float64), 2.0 * LIMIT / (len(p) - 1)
    for mass, atom in zip(p, atoms.clamp(-LIMIT, LIMIT), strict=True):
        at = (float(atom) + LIMIT) / width
        below = min(int(at), len(p) - 2)
        result[below] += mass * (1.0 - (at - below))
        result[below + 1] += mass * (at - below)
    return result


def test_an_update_in_the_authors_order() -> None:
    """The critics by the mean of their targets' distributions and scaled rewards; the targets by the new critics; the
    actor by the new critics; the weight of the entropy by the actor before its step.
    """
    algorithm, state = make()
    new, metrics = algorithm.update(state, BATCH, KEY, phase=0)
    actor, critic = double(state.params["actor"]), double(state.params["critic"])
    z = torch.linspace(-LIMIT, LIMIT, ATOMS, dtype=torch.float64)

    divisor = (LARGEST + WEIGHT * 0.5 * A / (1 - DISCOUNT) / 2) / LIMIT
    assert float(metrics["critic/divisor"]) == pytest.approx(divisor, rel=1e-6)
    with torch.no_grad():
        following, log_p = policy(actor, X["next_observations"])
        p = mixture({k: v.double() for k, v in state.target["critic"].items()}, X["next_observations"], following)
        atoms = (X["rewards"] / divisor).unsqueeze(-1) + DISCOUNT * X["masks"].unsqueeze(-1) * (
            z - WEIGHT * log_p.unsqueeze(-1)
        )
        target = torch.stack([projection(p[b], atoms[b]) for b in range(B)])
    loss = -(target * distributions(critic, X["observations"], X["actions"]).log_softmax(-1)).sum(-1).mean(-1).sum()
    assert float(metrics["critic/loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    new_critic = stepped(critic, loss)
    close(new.params["critic"], new_critic)
    moved = {k: POLYAK * v + (1 - POLYAK) * state.target["critic"][k].double() for k, v in new_critic.items()}
    close(new.target["critic"], moved)

    action, log_p = policy(actor, X["observations"])
    q = (mixture(new_critic, X["observations"], action) * z).sum(-1)
    loss = (WEIGHT * log_p - q).mean()
    assert float(metrics["actor/loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    close(new.params["actor"], stepped(actor, loss))

    log = torch.tensor(math.log(WEIGHT), dtype=torch.float64, requires_grad=True)
    slope = torch.autograd.grad(log.exp() * (-log_p.detach().mean() + 0.5 * A), log)[0]
    weight = float((log.detach() - LR * slope.sign()).exp())
    assert float(new.params["entropy"]["log"].exp()) == pytest.approx(weight, rel=1e-5)


def test_targets_are_the_mean_of_both_distributions() -> None:
    """Atoms -1, 0, 1 of (0.2, 0.3, 0.5) and (0.4, 0.4, 0.2) become (0.16, 0.31, 0.53) and (0.32, 0.44, 0.24)."""
    p = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.4, 0.2]])
    critic = make(value_bins=3, value_range=[-1.0, 1.0])[0].critic
    following = critic.aggregate(p.log().unsqueeze(1).expand(2, 2, 3), "mean")
    batch = {"rewards": torch.tensor([0.1, 0.1]), "masks": torch.tensor([1.0, 0.0])}
    target = critic.td_target(batch, following)
    result = critic.head.project(target.value, target.bootstrap)
    np.testing.assert_allclose(result, [[0.24, 0.375, 0.385], [0.0, 0.9, 0.1]], atol=1e-6)


def test_initial_weights() -> None:
    """Orthogonal with gain sqrt(2), the head of log_std with gain 1; LayerNorm changes nothing at first."""
    kind = registry.get("algo", "brc")
    params = kind(kind.Config(hidden=[8], critic_hidden=[8]), spec()).init(0).params["actor"]
    for name, gain in {"features.blocks.0.1.linear": 2.0, "mean": 2.0, "log_std": 1.0}.items():
        weight = params[f"{name}.weight"].double()
        np.testing.assert_allclose(weight @ weight.T, gain * np.eye(len(weight)), atol=1e-6)
    assert all(bool((x == 0.0).all()) for name, x in params.items() if name.endswith(("bias", "shift")))
    assert all(bool((x == 1.0).all()) for name, x in params.items() if name.endswith("scale"))


def test_many_actions_for_each_observation_are_one_batch() -> None:
    algorithm, state = make()
    many = torch.tensor(G.uniform(-1, 1, (5, B, A)), dtype=torch.float32)
    q = algorithm.critic.q(state.params["critic"], BATCH["observations"], many)
    for i in range(5):
        torch.testing.assert_close(q[:, i], algorithm.critic.q(state.params["critic"], BATCH["observations"], many[i]))
    net = BroNet(2, OBS + A, 4, 1)
    pairs = net(Pairs(BATCH["observations"], many)).unflatten(1, (5, B))
    torch.testing.assert_close(pairs[:, 2], net(torch.cat([BATCH["observations"], many[2]], -1)))


# ---- rewards


def test_the_divisor() -> None:
    """max |G| 80, alpha 0.1, target entropy -3, horizon 100, values of at most 10."""
    algorithm, _ = make(value_range=[-10.0, 10.0], discount=0.99, target_entropy=-3.0)
    assert float(algorithm.divisor_for(torch.tensor(80.0), 0.1, {})) == pytest.approx(9.5)


@pytest.mark.parametrize(
    ("rewards", "cut", "result"),
    [
        ([1.0, 2.0, 3.0], [False], 3.5),  # 2.75, 3.5, 3
        ([1.0, 2.0, 3.0], [True], 5.0),  # 3.25, 4.5, 5: as if 2 came for ever
        ([-1.0, -2.0, -3.0], [True], 5.0),
        ([1.0, 2.0, 3.0, 4.0, 4.0], [False, True], 8.0),  # of three and two steps: 3.5 and 8
        ([1.0, 2.0, 3.0, 4.0, 4.0], [True, False], 6.0),
    ],
)
def test_the_largest_return(rewards: list[float], cut: list[bool], result: float) -> None:
    start = np.array([0, 3][: len(cut)])
    end = np.array([3, 5][: len(cut)])
    assert largest_return(np.array(rewards, np.float32), start, end, np.array(cut), 0.5) == pytest.approx(result)


def test_the_largest_return_moves_with_play_and_never_falls() -> None:
    """Two replicas of two environments, with discounts 0.5 and 0: an episode counts once it has ended."""
    replicas = [Replica(0, (("discount", 0.5),)), Replica(1, (("discount", 0.0),))]
    returns, sizes = MovingReturns(replicas, 0.9, 2, torch.device("cpu")), []
    for t, reward in enumerate((1.0, 2.0, 3.0, 1.0, 1.0)):
        turn = blank(np.zeros((4, 1), np.float32), np.zeros((4, 1), np.float32))
        turn.valid[:] = [True, t < 2, True, False]  # the physics of the last blow up at once
        turn.over[:] = [t in (2, 4), t == 2, t == 4, t == 0]
        turn.terminated[:] = [t == 2, False, t == 4, False]
        returns.add(turn, np.array([reward, 10.0, -reward, 99.0]))
        sizes.append(returns.largest.tolist())
    # the second environment's was cut after 10, 10: 20 for ever; the first's 3.5, then 2; the third's -3
    assert sizes == [[0.0, 0.0], [0.0, 0.0], [20.0, 0.0], [20.0, 0.0], [20.0, 3.0]]
    batch = returns.of_batch({"rewards": torch.zeros(2, 5)})
    assert batch["largest_return"].tolist() == [[20.0] * 5, [3.0] * 5]


def test_updates_follow_it() -> None:
    algorithm, state = make()
    for size, result in ((10.0, LARGEST), (50.0, 50.0), (40.0, 50.0)):
        batch = {**BATCH, "largest_return": torch.full((B,), size)}
        state, metrics = algorithm.update(state, batch, KEY, phase=0)
        assert float(state.extra["largest_return"]) == result
        assert float(state.extra["divisor"]) == float(metrics["critic/divisor"]) > result / LIMIT


def test_rewards_are_0_while_no_return_is_known() -> None:
    algorithm, state = make(largest_return=None)
    losses = [
        float(algorithm.update(state, {**BATCH, "rewards": x}, KEY, phase=0)[1]["critic/loss"])
        for x in (BATCH["rewards"], torch.zeros(B))
    ]
    assert losses[0] == losses[1] and float(state.extra["divisor"]) == pytest.approx(0.4 * 0.5 * A / 0.1 / 2 / LIMIT)


def test_the_largest_return_of_data() -> None:
    kind = registry.get("algo", "brc")
    data = from_arrays(
        np.zeros((5, 2)), np.linspace(-1, 1, 5).reshape(5, 1), np.array([1.0, 2.0, 3.0, 4.0, 4.0]),
        np.array([False, False, True, False, False]), np.array([False, False, False, False, True]),
        action_low=-1.0, action_high=1.0,
    )  # fmt: skip
    fitted = kind.fit_config(kind.Config(discount=0.5), data)
    assert fitted.largest_return == 8.0 and kind.fit_config(fitted, data) is fitted
    assert kind.fit_config(kind.Config(), data, {"discount": [0.0, 0.5]}).largest_return == 8.0
    with pytest.raises(UserError, match="brc scales rewards to a range"):
        kind.fit_config(kind.Config(value_range=[]), data)
    with pytest.raises(UserError, match="discount=1 leaves the entropy"):
        kind.fit_config(kind.Config(discount=1.0), data)


def test_values_are_told_in_the_rewards_units() -> None:
    algorithm, state = make()
    z = torch.linspace(-LIMIT, LIMIT, ATOMS, dtype=torch.float64)
    q = (mixture(double(state.params["critic"]), X["observations"], X["actions"]) * z).sum(-1).detach()
    result = algorithm.q_value(state, BATCH["observations"], BATCH["actions"])
    np.testing.assert_allclose(result, float(state.extra["divisor"]) * q, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["brc", "simbav2"])
def test_all_steps_of_a_window_are_scaled(name: str) -> None:
    batch = {"rewards": torch.ones(2), "step_rewards": torch.ones(2, 3), "masks": torch.ones(2)}
    each = registry.get("algo", name).divided(batch, torch.tensor([4.0, 2.0]))
    assert each["step_rewards"].tolist() == [[0.25] * 3, [0.5] * 3] and each["rewards"].tolist() == [0.25, 0.5]
    result = registry.get("algo", name).divided(batch, 4.0)
    assert {k: x.unique().tolist() for k, x in result.items()} == {
        "rewards": [0.25],
        "step_rewards": [0.25],
        "masks": [1.0],
    }


# ---- several tasks

PARTS = tuple(
    TaskPart(Task(name), o, (-1.0,) * a, (1.0,) * a) for name, o, a in (("small", OBS - 1, 1), ("all", OBS, A))
)
TWO = DataSpec((OBS + 1,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A,
               task=Task("both", starts=({"task": 0}, {"task": 1}), parts=PARTS))  # fmt: skip
NUMBERS = torch.tensor([0, 1, 1, 0, 1, 0, 1, 0])
MASK = torch.tensor([[1.0, 0.0], [1.0, 1.0]])[NUMBERS]  # of the batch
BY_TASK = [30.0, 8.0]  # largest returns
BATCH_OF_TWO = {
    **BATCH,
    **{
        name: torch.cat([x, NUMBERS.float().unsqueeze(-1)], -1)
        for name, x in BATCH.items()
        if name.endswith("observations")
    },
}


def make_two(**settings: Any) -> tuple[Any, TrainState]:
    return make(TWO, **{"largest_return": None, "largest_returns": BY_TASK, **settings})


def shown(weight: Tensor, observations: Tensor) -> Tensor:
    """Each row with the embedding of its task, of length 1."""
    rows = [
        torch.cat([x, weight[k] / weight[k].square().sum().sqrt()]) for x, k in zip(observations, NUMBERS, strict=True)
    ]
    return torch.stack(rows)


def split(p: Params) -> tuple[Tensor, Params]:
    """The embeddings of critics, and the parameters of their networks."""
    return p["tasks.weight"], {k.removeprefix("network."): v for k, v in p.items() if k != "tasks.weight"}


def policy_of_two(p: Params, weight: Tensor, observations: Tensor) -> tuple[Tensor, Tensor]:
    """As `policy`, with the actions alone that each task has."""
    h = features(p, "", shown(weight, observations), 1)
    mean, log_std = (h @ p[f"{head}.weight"].T + p[f"{head}.bias"] for head in ("mean", "log_std"))
    log_std = -10.0 + 6.0 * (1.0 + log_std.tanh())
    u = mean + log_std.exp() * NOISE
    log_p = -0.5 * NOISE**2 - log_std - 0.5 * math.log(2 * math.pi) - (1 - u.tanh() ** 2).log()
    return u.tanh() * MASK, (log_p * MASK).sum(-1)


def test_an_update_of_two_tasks() -> None:
    """Each row with its task's embedding, which the critics' loss trains and the policy is told; its rewards divided by
    the task's own number, the entropy of its own actions held at its own target.
    """
    algorithm, state = make_two()
    new, metrics = algorithm.update(state, BATCH_OF_TWO, KEY, phase=0)
    critic, target = double(state.params["critic"]), double(state.target["critic"])
    assert torch.equal(state.params["actor"]["tasks.weight"], state.params["critic"]["tasks.weight"])
    z = torch.linspace(-LIMIT, LIMIT, ATOMS, dtype=torch.float64)
    actions, entropies = X["actions"] * MASK, torch.tensor([-0.5, -1.0])
    divisors = (torch.tensor(BY_TASK) - WEIGHT * entropies / (1 - DISCOUNT) / 2) / LIMIT
    assert float(metrics["critic/divisor"]) == pytest.approx(float(divisors.mean()), rel=1e-6)

    trained = {"tasks.weight", "masks"}
    actor = double({k: v for k, v in state.params["actor"].items() if k not in trained})
    weight, nets = split(critic)
    with torch.no_grad():
        following, log_p = policy_of_two(actor, weight, X["next_observations"])
        p = mixture(split(target)[1], shown(split(target)[0], X["next_observations"]), following)
        atoms = (X["rewards"] / divisors.double()[NUMBERS]).unsqueeze(-1) + DISCOUNT * X["masks"].unsqueeze(-1) * (
            z - WEIGHT * log_p.unsqueeze(-1)
        )
        projected = torch.stack([projection(p[b], atoms[b]) for b in range(B)])
    logits = distributions(nets, shown(weight, X["observations"]), actions)
    loss = -(projected * logits.log_softmax(-1)).sum(-1).mean(-1).sum()
    assert float(metrics["critic/loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    new_critic = stepped(critic, loss)
    close(new.params["critic"], new_critic)
    moved = {k: POLYAK * v + (1 - POLYAK) * state.target["critic"][k].double() for k, v in new_critic.items()}
    close(new.target["critic"], moved)

    weight, nets = split(new_critic)
    action, log_p = policy_of_two(actor, weight, X["observations"])
    q = (mixture(nets, shown(weight, X["observations"]), action) * z).sum(-1)
    loss = (WEIGHT * log_p - q).mean()
    assert float(metrics["actor/loss"]) == pytest.approx(float(loss.detach()), rel=1e-4)
    close({k: v for k, v in new.params["actor"].items() if k not in trained}, stepped(actor, loss))
    # neither trained nor decayed
    assert torch.equal(new.params["actor"]["masks"], state.params["actor"]["masks"])
    assert torch.equal(new.params["actor"]["tasks.weight"], new.params["critic"]["tasks.weight"])

    log = torch.tensor(math.log(WEIGHT), dtype=torch.float64, requires_grad=True)
    difference = -log_p.detach().mean() - entropies[NUMBERS].double().mean()
    slope = torch.autograd.grad(log.exp() * difference, log)[0]
    expected = float((log.detach() - LR * slope.sign()).exp())
    assert float(new.params["entropy"]["log"].exp()) == pytest.approx(expected, rel=1e-5)


def test_the_embedding_stands_in_place_of_the_number() -> None:
    """(3, 4, 0, ...) and (0, 0, -2, ...) become (0.6, 0.8, 0, ...) and (0, 0, -1, ...)."""
    net = TaskEmbedding(2)
    assert net.weight.shape == (2, 32) and 0.7 < float(net.weight.detach().norm(dim=-1).mean()) < 1.3
    with torch.no_grad():
        net.weight.zero_()
        net.weight[0, :2], net.weight[1, 2] = torch.tensor([3.0, 4.0]), -2.0
        rows = net(torch.tensor([[5.0, 0.0], [7.0, 1.0]]))
    assert rows.shape == (2, 33)
    torch.testing.assert_close(rows[:, :4], torch.tensor([[5.0, 0.6, 0.8, 0.0], [7.0, 0.0, 0.0, -1.0]]))


def test_actions_that_a_task_lacks() -> None:
    """They are 0 whatever is drawn, and what was played in their place teaches nothing."""
    algorithm, state = make_two()
    dist = algorithm.apply("actor", state.params["actor"], BATCH_OF_TWO["observations"])
    for action in (algorithm.policy.sample(dist, KEY), algorithm.policy.mode(dist)):
        assert torch.equal(action != 0.0, MASK > 0.0)
    actions = torch.where(MASK > 0.0, BATCH["actions"], 0.7)
    updates = [
        algorithm.update(state, {**BATCH_OF_TWO, "actions": x}, KEY, phase=0)[1] for x in (BATCH["actions"], actions)
    ]
    assert all(torch.equal(updates[0][name], value) for name, value in updates[1].items())
    many = torch.tensor(G.uniform(-1, 1, (5, B, A)), dtype=torch.float32)
    params, observations = state.params["critic"], BATCH_OF_TWO["observations"]
    q = algorithm.critic.q(params, observations, many)
    torch.testing.assert_close(q[:, 3], algorithm.critic.q(params, observations, many[3]))


def test_values_of_each_task_are_told_in_its_own_units() -> None:
    algorithm, state = make_two()
    observations, actions = BATCH_OF_TWO["observations"], BATCH["actions"]
    values = algorithm.q_value(state, observations, actions)
    scaled = algorithm.critic.q(state.params["critic"], observations, actions).mean(0)
    np.testing.assert_allclose(values / scaled, state.extra["divisor"][NUMBERS], rtol=1e-5)


def test_the_largest_return_of_each_task_moves_with_play() -> None:
    """An environment plays task 1, then 0, another 1: each episode counts for its task alone, in its replica."""
    returns = MovingReturns([Replica(0, ()), Replica(1, ())], 0.5, 1, torch.device("cpu"), 2)
    for t, reward in enumerate((1.0, 2.0, 3.0)):
        turn = blank(np.zeros((2, 2), np.float32), np.zeros((2, 1), np.float32))
        turn.observations[:, -1] = [t < 2, 1]
        turn.valid[:] = True
        turn.over[:] = turn.terminated[:] = [t > 0, t == 1]
        returns.add(turn, np.array([reward, 2.0 * reward]))
    assert returns.largest.tolist() == [[3.0, 2.0], [0.0, 4.0]]
    observations = torch.tensor([[[9.0, 1.0], [9.0, 0.0]], [[9.0, 0.0], [9.0, 1.0]]])
    batch = returns.of_batch({"rewards": torch.zeros(2, 2), "observations": observations})
    assert batch["largest_return"].tolist() == [[2.0, 3.0], [0.0, 4.0]]

    algorithm, state = make_two()
    for sizes, result in (([10.0, 9.0], [30.0, 9.0]), ([31.0, 2.0], [31.0, 9.0])):
        column = torch.tensor(sizes)[NUMBERS]
        state = algorithm.update(state, {**BATCH_OF_TWO, "largest_return": column}, KEY, phase=0)[0]
        assert state.extra["largest_return"].tolist() == result
    # a batch without a task leaves it as it is
    rows = {k: x[NUMBERS == 0] for k, x in BATCH_OF_TWO.items()} | {"largest_return": torch.full((4,), 99.0)}
    assert algorithm.scaled(state, rows)[0].extra["largest_return"].tolist() == [99.0, 9.0]


def test_the_largest_return_of_each_task_in_data() -> None:
    """1, 2, 3 to its end is 3.5 at a discount of 0.5; 4, 4 that was cut 8; together they would be 8."""
    kind, lengths = registry.get("algo", "brc"), ([1.0, 2.0, 3.0], [4.0, 4.0])
    data = concatenate(as_tasks([
        from_arrays(np.zeros((len(x), o)), np.zeros((len(x), 1)), np.array(x), np.arange(len(x)) == n,
                    np.arange(len(x)) == len(x) - 1, action_low=-1.0, action_high=1.0)
        for x, o, n in zip(lengths, (2, 3), (2, 9), strict=True)
    ]))  # fmt: skip
    fitted = kind.fit_config(kind.Config(discount=0.5), data)
    assert fitted.largest_returns == [3.5, 8.0] and fitted.largest_return is None
    assert kind.fit_config(fitted, data) is fitted
    assert kind.fit_config(kind.Config(), data, {"discount": [0.0, 0.5]}).largest_returns == [3.5, 8.0]
    assert make(data.spec, largest_return=None, largest_returns=[3.5, 8.0])[1].extra["largest_return"].tolist() == [
        3.5,
        8.0,
    ]
    assert make(data.spec, largest_return=5.0)[1].extra["largest_return"].tolist() == [5.0, 5.0]
    assert kind.fit_config(kind.Config(largest_return=5.0), data).largest_returns == []


def test_rewards_of_a_task_are_0_while_no_return_of_it_is_known() -> None:
    algorithm, state = make_two(largest_returns=[0.0, 8.0])
    rewards = algorithm.scaled(state, BATCH_OF_TWO)[1]["rewards"]
    assert torch.equal(rewards != 0.0, NUMBERS == 1)


# ---- settings


def test_defaults_are_the_authors() -> None:
    kind = registry.get("algo", "brc")
    c = kind.Config()
    assert (c.hidden, c.critic_hidden, c.critics, c.batch_size) == ([256], [4096, 4096], 2, 256)
    assert (c.learning_rate, c.weight_decay, c.discount, c.polyak, c.entropy_weight) == (3e-4, 1e-4, 0.99, 0.005, 0.1)
    assert (c.value_bins, c.value_range, c.layer_norm_epsilon, c.actor_value) == (101, [-10.0, 10.0], 1e-6, "mean")
    algorithm, _ = make()
    assert algorithm.target_entropy == -0.5 * A
    adams = [algorithm.optimizer(name) for name in ("actor", "critic", "entropy")]
    assert [(x.beta1, x.weight_decay) for x in adams] == [(0.9, DECAY), (0.9, DECAY), (0.5, 0.0)]
    assert finetune_settings("brc") == {"mixing": 0, "warmup": 5000, "utd": 2}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"layer_norm": True, "residual": True}, r"leave algo\.layer_norm, algo\.residual as"),
        ({"critic_hidden": [8, 6]}, "blocks of one width"),
        ({"max_target_actions": 2}, "targets of one action"),
        ({"discount": 1.0}, r"algo\.discount=1 leaves"),
    ],
)
def test_what_it_does_not_go_with(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        make(**settings)
    assert "\n" not in str(error.value)


def test_all_critics_make_targets_of_several_tasks() -> None:
    """Those of some would take the embeddings of some tasks."""
    with pytest.raises(UserError, match=r"brc has targets of all critics where .*: leave algo\.target_critics at 0"):
        make_two(target_critics=1)


def test_a_grid_has_returns_of_its_own() -> None:
    algorithm, state = make()
    other = with_settings(algorithm, {"largest_return": 60.0})
    assert float(other.init(3).extra["divisor"]) == pytest.approx(float(state.extra["divisor"]) + 30.0 / LIMIT)
