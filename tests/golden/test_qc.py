"""Q-chunking: its losses and targets in float64 NumPy, FQL as a special case, the best of N, and the order of an
update.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import select, stack
from offrl.algorithms.fql import FQL, FQLConfig
from offrl.algorithms.qc import QC, QCConfig
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.chunks import WHOLE, ChunkSampler
from offrl.data.samplers.transitions import TransitionSampler
from offrl.errors import UserError
from offrl.families.generative import cost
from offrl.families.generative.best_of_n import noise_of
from offrl.settings.train import TrainConfig
from offrl.training.stages import ready
from offrl.training.step import Step
from tests.golden.test_fql import critics, numbers, plain

SMALL = {"hidden": [16, 16], "flow_steps": 3, "candidates": 4}
B, H, A = 16, 3, 2


def data() -> Dataset:
    """Four episodes of 10 rows: two end in a terminal, two are cut."""
    g = np.random.default_rng(0)
    s, a, n = g.normal(size=(40, 3)), g.uniform(-1, 1, (40, A)), np.arange(40)
    ends = n % 10 == 9
    after = np.where(ends[:, None], g.normal(size=(40, 3)), np.roll(s, -1, 0))
    return from_arrays(
        s,
        a,
        g.normal(size=40),
        ends & (n < 20),
        ends & (n >= 20),
        next_observations=after,
        action_low=-1.0,
        action_high=1.0,
    )


def make(**settings: object) -> tuple[QC, dict[str, Tensor]]:
    dataset = data()
    algorithm = QC(QCConfig(**{**SMALL, "length": H, **settings}), dataset.spec)  # type: ignore[arg-type]
    sampler = algorithm.sampler()
    return algorithm, sampler(sampler.prepare(dataset), rng.make_key(1), B)


def with_targets(algorithm: QC, seed: int = 5) -> object:
    """A state whose target critics differ from its critics."""
    state = algorithm.init(seed)
    return state._replace(target={"critic": {k: v + 0.01 for k, v in state.params["critic"].items()}})


def integrated(p: dict[str, np.ndarray], s: np.ndarray, z: np.ndarray) -> np.ndarray:
    x = z
    for i in range(3):
        x = x + plain(p, np.concatenate([s, x, np.full((len(x), 1), i / 3)], 1)) / 3
    return x.clip(-1, 1)


# ---- losses


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "n-step"])
@pytest.mark.parametrize("short", ["drop", "bootstrap"])
@pytest.mark.parametrize("actor", ["best", "distil"])
def test_critic_loss(actor: str, short: str, chunked: bool) -> None:
    """The target of a window is worked out step by step; a chunk counts as one action of h A numbers."""
    algorithm, batch = make(actor_type=actor, truncated_windows=short, chunked=chunked, discount=0.9)
    state, key = with_targets(algorithm), rng.make_key(9)
    critic, target = numbers(state.params["critic"]), numbers(state.target["critic"])
    s, s1, masks = (batch[k].double().numpy() for k in ("observations", "next_observations", "masks"))
    rewards, valid = batch["step_rewards"].double().numpy(), batch["valid"].numpy()
    width = (H if chunked else 1) * A
    a = batch["actions"].double().numpy().reshape(B, -1)[:, :width]

    if actor == "distil":
        z = rng.normal(key, (B, width)).double().numpy()
        action = plain(numbers(state.params["actor"]), np.concatenate([s1, z], 1)).clip(-1, 1)
    else:
        z = noise_of(key, 4, B, width).double().numpy().reshape(4, B, width)
        # one candidate after another
        drawn = np.stack([integrated(numbers(state.params["flow"]), s1, z[n]) for n in range(4)])
        # online critics choose
        score = np.stack([critics(critic, np.concatenate([s1, drawn[n]], 1)).mean(0) for n in range(4)])
        action = drawn[score.argmax(0), np.arange(B)]
    value = critics(target, np.concatenate([s1, action], 1)).mean(0)
    y, weight = np.zeros(B), np.zeros(B)
    for b in range(B):
        steps = int(valid[b].sum())
        y[b] = sum(0.9**k * rewards[b, k] for k in range(steps)) + 0.9**steps * masks[b] * value[b]
        weight[b] = short == "bootstrap" or steps == H or masks[b] == 0
    assert weight.sum() > 0 and (weight.sum() < B) == (short == "drop")  # a few windows are cut by a time-out
    # the mean over critics, and over all rows
    expected = (weight * (critics(critic, np.concatenate([s, a], 1)) - y) ** 2).mean()
    loss, metrics = algorithm.critic_loss(state.params["critic"], state, batch, key)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert float(metrics["critic/full_window_share"]) == pytest.approx(float(batch[WHOLE].mean()))


@pytest.mark.parametrize("pessimism", ["min", "std"])
def test_pessimism_of_the_choice_and_of_the_value(pessimism: str) -> None:
    algorithm, batch = make(pessimism=pessimism, rho=0.7)
    state, key = with_targets(algorithm), rng.make_key(9)

    def pooled(p: dict[str, np.ndarray], s: np.ndarray, a: np.ndarray) -> np.ndarray:
        q = critics(p, np.concatenate([s, a], 1))
        return q.min(0) if pessimism == "min" else q.mean(0) - 0.7 * q.std(0)

    s1 = batch["next_observations"].double().numpy()
    z = noise_of(key, 4, B, H * A).double().numpy().reshape(4, B, H * A)
    drawn = np.stack([integrated(numbers(state.params["flow"]), s1, z[n]) for n in range(4)])
    best = np.stack([pooled(numbers(state.params["critic"]), s1, drawn[n]) for n in range(4)]).argmax(0)
    expected = pooled(numbers(state.target["critic"]), s1, drawn[best, np.arange(B)])
    np.testing.assert_allclose(algorithm.next_value(state, batch, key).mean.numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("chunked", [True, False], ids=["chunked", "n-step"])
def test_flow_and_actor_losses(chunked: bool) -> None:
    algorithm, batch = make(actor_type="distil", chunked=chunked, alpha=3.0)
    state, key = with_targets(algorithm), rng.make_key(9)
    actor, field, critic = (numbers(state.params[k]) for k in ("actor", "flow", "critic"))
    s, valid = batch["observations"].double().numpy(), batch["valid"].numpy()
    width = (H if chunked else 1) * A
    a = batch["actions"].double().numpy().reshape(B, -1)[:, :width]
    noise_key, time_key = rng.split(key)
    x0, t = rng.normal(noise_key, (B, width)).double().numpy(), rng.uniform(time_key, (B, 1)).double().numpy()
    error = (plain(field, np.concatenate([s, (1 - t) * x0 + t * a, t], 1)) - (a - x0)) ** 2
    total = sum(error[b, k] for b in range(B) for k in range(width) if valid[b, k // A])
    loss, _ = algorithm.flow_loss(state.params["flow"], state, batch, key)
    # steps that are not there count in the denominator alone
    assert float(loss) == pytest.approx(total / (B * width), rel=1e-5)
    assert valid.all() == False and (not chunked or total < error.sum())  # noqa: E712

    z = rng.normal(key, (B, width)).double().numpy()
    chunk = plain(actor, np.concatenate([s, z], 1))
    distillation = ((chunk - integrated(field, s, z)) ** 2).mean()
    q = critics(critic, np.concatenate([s, chunk.clip(-1, 1)], 1)).mean(0)
    loss, _ = algorithm.actor_loss(state.params["actor"], state, batch, key)
    assert float(loss) == pytest.approx(3.0 * distillation - q.mean(), rel=1e-5)


def test_all_losses_of_an_update_read_what_was_before_it() -> None:
    algorithm, batch = make(actor_type="distil", polyak=0.5)
    state, key = algorithm.init(0), rng.make_key(3)
    state = state._replace(target={"critic": {k: v + 1.0 for k, v in state.params["critic"].items()}})
    after, _ = algorithm.update(state, batch, key, phase=0)
    losses = {"critic": algorithm.critic_loss, "flow": algorithm.flow_loss, "actor": algorithm.actor_loss}
    for (name, loss), own in zip(losses.items(), rng.split(key, 3), strict=True):
        alone, _ = algorithm.descend(state, name, loss, batch, own)
        for k, v in alone.params[name].items():
            assert torch.equal(after.params[name][k], v)
    for k, v in after.target["critic"].items():
        torch.testing.assert_close(v, state.params["critic"][k] + 0.5)  # the targets follow the critics of before


# ---- special cases


def test_chunks_of_one_action_distilled_are_fql_bit_for_bit() -> None:
    dataset, key = data(), rng.make_key(3)
    qc = QC(QCConfig(hidden=[16, 16], flow_steps=3, length=1, actor_type="distil", alpha=10.0), dataset.spec)
    fql = FQL(FQLConfig(hidden=[16, 16], flow_steps=3), dataset.spec)
    chunks, transitions = ChunkSampler(1), TransitionSampler()
    sources = chunks.prepare(dataset), transitions.prepare(dataset)
    own, other = qc.init(0), fql.init(0)
    for i in range(3):
        draw, update = rng.fold_in(key, i), rng.fold_in(key, 100 + i)
        batch = chunks(sources[0], draw, B)
        assert bool((batch[WHOLE] == 1.0).all())
        own, metrics = qc.update(own, batch, update, phase=0)
        other, expected = fql.update(other, transitions(sources[1], draw, B), update, phase=0)
        assert all(torch.equal(metrics[k], v) for k, v in expected.items())
    for trees in ((own.params, other.params), (own.target, other.target)):
        for name in trees[1]:
            for k, v in trees[1][name].items():
                assert torch.equal(trees[0][name][k], v), (name, k)
    observations = torch.randn(5, 3)
    acts = [a.actor(s).act(None, observations, key, explore=True)[0] for a, s in ((qc, own), (fql, other))]
    assert torch.equal(acts[0], acts[1])


@pytest.mark.parametrize("actor", ["best", "distil"])
def test_one_step_is_the_same_chunked_or_not(actor: str) -> None:
    """BFN-n with n = 1 is BFN, FQL-n FQL."""
    states = []
    for chunked in (True, False):
        algorithm, batch = make(length=1, chunked=chunked, actor_type=actor)
        states.append(algorithm.update(algorithm.init(0), batch, rng.make_key(2), phase=0)[0])
    for name, params in states[0].params.items():
        assert all(torch.equal(v, states[1].params[name][k]) for k, v in params.items())


def test_the_best_of_one_is_the_flows_chunk_and_more_are_worth_more() -> None:
    algorithm, batch = make()
    state, key, s = with_targets(algorithm), rng.make_key(9), batch["observations"]
    one = algorithm.decide(state, s, key, 1)
    z = noise_of(key, 1, B, H * A).double().numpy()
    np.testing.assert_allclose(
        one.numpy(), integrated(numbers(state.params["flow"]), s.double().numpy(), z), rtol=1e-4, atol=1e-5
    )
    critic = numbers(state.params["critic"])
    worth = [critics(critic, np.concatenate([s, algorithm.decide(state, s, key, n)], 1)).mean() for n in (1, 4, 32)]
    assert worth[0] < worth[1] < worth[2]


# ---- what each idea does


def two_ways(g: np.random.Generator, h: int) -> Dataset:
    """Episodes of h steps, whose actions all have the sign of the first, which no state tells; large ones are rewarded
    at the end.
    """
    count = 400
    sign, large = np.where(g.random((2, count)) < 0.5, 1.0, -1.0)
    actions = np.repeat(sign * np.where(large > 0.0, 0.8, 0.2), h)[:, None] + 0.05 * g.normal(size=(count * h, 1))
    step = np.tile(np.arange(h), count)
    observations = np.stack([step == 0, step / h], 1).astype(np.float32)
    rewards = (step == h - 1) * np.repeat(large > 0, h).astype(np.float32)
    return from_arrays(observations, actions, rewards, step == h - 1, action_low=-1.0, action_high=1.0)


@pytest.mark.nightly
def test_chunks_keep_to_one_way_where_single_actions_change_theirs() -> None:
    """Q wants large actions, of either sign. A chunk has one sign throughout; single actions draw theirs anew at each
    step.
    """
    dataset, large, ways = two_ways(np.random.default_rng(0), 4), {}, {}
    for chunked in (True, False):
        config = QCConfig(
            length=4,
            chunked=chunked,
            candidates=8,
            hidden=[64, 64],
            learning_rate=3e-3,
            flow_steps=5,
            discount=1.0,
            layer_norm=True,
        )
        algorithm = QC(config, dataset.spec)
        step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=128, replicas=1)
        state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 600)
        policy, played = algorithm.actor(select(state, 0)), []
        carry, key = policy.start(256), rng.make_key(7)
        for t in range(4):
            observations = torch.tensor([[float(t == 0), t / 4]]).expand(256, 2)
            actions, carry = policy.act(carry, observations, rng.fold_in(key, t), explore=False)
            played.append(actions[:, 0])
        actions = torch.stack(played)
        large[chunked] = float((actions.abs() > 0.5).float().mean())
        ways[chunked] = float((actions.sign().sum(0).abs() == 4).float().mean())
    assert min(large.values()) > 0.8  # half of the data's are; 1.0 over two seeds
    assert ways[True] > 0.9 and ways[False] < 0.5  # 1/8 by chance; 1, and 0.16 or less over the seeds


# ---- what it costs, and what is refused


def test_weeks_on_a_cpu_are_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "pick_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(cost, "cores", lambda: 1)
    dataset = data()

    def run(**settings: object) -> None:
        own = {k: settings.pop(k) for k in list(settings) if k not in ("device", "steps")}
        QC.requires(TrainConfig(algo=QCConfig(**own), **settings), dataset)  # type: ignore[arg-type]

    with pytest.raises(
        UserError,
        match=r"algo\.candidates=32 with algo\.hidden=\[512,512,512,512\].*days.*algo\.actor_type=distil.*smaller",
    ) as error:
        run()
    assert "\n" not in str(error.value)
    run(device="cpu")  # asked for by name
    run(steps=1000)  # some 80 minutes for four seeds on one core
    run(actor_type="distil")
    run(hidden=[64, 64], candidates=4)
    monkeypatch.setattr(cost, "pick_device", lambda name: torch.device("cuda"))
    run()
    # 8,192 rows, 10 times through 4 x 512, are 1.2 s as measured
    assert cost.hours(TrainConfig(algo=QCConfig(), steps=1_000_000, seeds=[0]), 32, 28, 25) == pytest.approx(
        333, rel=0.2
    )


def test_n_step_is_another_setting_here() -> None:
    with pytest.raises(UserError, match=r"algo\.n_step=3"):
        ready(TrainConfig(algo=QCConfig(n_step=3), steps=1), data())


def test_q_is_of_chunks() -> None:
    """A chunk has a Q, a single action none, unless single actions are what is decided."""
    for settings, known in (({}, False), ({"chunked": False}, True), ({"length": 1}, True)):
        algorithm, batch = make(**settings)
        q = algorithm.q_value(algorithm.init(0), batch["observations"], batch["actions"][:, 0])
        assert (q is not None) == known == bool(algorithm.traits.critic_modules)
