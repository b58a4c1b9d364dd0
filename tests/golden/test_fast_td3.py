"""FastTD3's target and whole updates by hand, its noise in play, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import offrl
from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.algorithms.fast_td3 import FastTD3
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.export.graph import PolicyGraph
from offrl.finetuning import summary
from offrl.finetuning.config import FinetuneConfig, choose
from offrl.nn.heads import C51
from offrl.settings.compose import compose
from offrl.settings.presets import finetune_settings
from offrl.settings.replicas import Replica
from offrl.system import files as checkpoint
from offrl.training import updates
from offrl.training.run.checkpoints import part

SPEC = DataSpec((3,), 2, action_low=(-1.0,) * 2, action_high=(1.0,) * 2, observation_mean=(0.0, 10.0, -3.0),
                observation_std=(1.0, 4.0, 0.1))  # fmt: skip
LOW, HIGH, BINS = -2.0, 3.0, 6


def make(**settings: object) -> tuple[FastTD3, TrainState]:
    kind = registry.get("algo", "fast_td3")
    small = {"hidden": [8, 4], "critic_hidden": [8], "value_bins": BINS, "value_range": [LOW, HIGH]}
    algorithm = kind(kind.Config(**{**small, "batch_size": 16, **settings}), SPEC)
    return algorithm, algorithm.init(0)


def a_batch(rows: int = 16) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {
        "observations": torch.randn(rows, 3, generator=draw),
        "actions": torch.rand(rows, 2, generator=draw) * 2 - 1,
        "rewards": torch.randn(rows, generator=draw),
        "next_observations": torch.randn(rows, 3, generator=draw),
        "masks": (torch.arange(rows) % 5 > 0).float(),
    }


@pytest.mark.parametrize(("mask", "expected"), [(1.0, (0.32, 0.44, 0.24)), (0.0, (0.0, 0.9, 0.1))])
def test_the_distribution_with_the_smaller_mean_is_the_target_of_both(
    mask: float, expected: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On atoms (-1, 0, 1), with reward .1 and discount .9: (.2, .3, .5) would become (.16, .31, .53), mean .37, and
    (.4, .4, .2) becomes (.32, .44, .24), mean -.08; a terminal's is (0, .9, .1).
    """
    algorithm, state = make(value_bins=3, value_range=[-1.0, 1.0], discount=0.9)
    probabilities = torch.tensor([[0.2, 0.3, 0.5], [0.4, 0.4, 0.2]])
    logits = probabilities.log().unsqueeze(1)  # [2, 1, 3]
    targets = []
    monkeypatch.setattr(type(algorithm.critic), "logits", lambda *_: logits)
    project = C51.project
    monkeypatch.setattr(C51, "project", lambda *x: targets.append(project(*x)) or targets[-1])
    batch = {**a_batch(1), "rewards": torch.tensor([0.1]), "masks": torch.tensor([mask])}
    loss, _ = algorithm.critic_loss(state.params["critic"], state, batch, rng.make_key(0))
    (target,) = targets
    torch.testing.assert_close(target, torch.tensor([expected]))
    entropies = -(torch.tensor(expected) * probabilities.log()).sum(-1)  # of each critic
    assert float(loss) == pytest.approx(float(entropies.sum()), abs=1e-6)


def perceptron(params: dict[str, Tensor], x: Tensor) -> Tensor:
    """The outputs of an actor's or a critic's network, whose layers are [in, out] for a critic."""
    names = sorted({k.rsplit(".", 1)[0] for k in params}, key=lambda k: ("head" in k, k))
    for i, name in enumerate(names):
        weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
        x = x @ (weight if weight.shape[0] == x.shape[-1] and bias.ndim == 2 else weight.T) + bias
        x = x.relu() if i < len(names) - 1 else x
    return x


def projected(p: np.ndarray, rewards: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The distributions [B, K] of r + scale z, atom by atom."""
    atoms, width = np.linspace(LOW, HIGH, BINS), (HIGH - LOW) / (BINS - 1)
    result = np.zeros_like(p)
    for b in range(len(p)):
        for j, z in enumerate(atoms):
            at = (np.clip(rewards[b] + scale[b] * z, LOW, HIGH) - LOW) / width
            low = min(int(np.floor(at)), BINS - 2)
            result[b, low] += p[b, j] * (low + 1 - at)
            result[b, low + 1] += p[b, j] * (at - low)
    return result


def test_two_updates_in_plain_torch() -> None:
    """Both networks by torch's AdamW, the target by loops: the actor moves at the second update, the targets at both,
    and next actions are the actor's own.
    """
    algorithm, state = make(policy_noise=0.4, learning_rate=1e-2, polyak=0.1)
    batch, c = a_batch(), algorithm.config
    actor = {k: v.clone().requires_grad_() for k, v in state.params["actor"].items()}
    critic = {k: v.clone().requires_grad_() for k, v in state.params["critic"].items()}
    target = {k: v.clone() for k, v in state.params["critic"].items()}
    adam = [torch.optim.AdamW(list(p.values()), lr=1e-2, weight_decay=0.1, foreach=False) for p in (critic, actor)]
    atoms = torch.linspace(LOW, HIGH, BINS)

    def logits(params: dict[str, Tensor], observations: Tensor, actions: Tensor) -> list[Tensor]:
        x = torch.cat([observations, actions], -1)
        return [perceptron({k: v[i] for k, v in params.items()}, x) for i in range(2)]

    for phase in (0, 1):
        key = rng.make_key(phase)
        state, metrics = algorithm.update(state, batch, key, phase=phase)
        with torch.no_grad():
            noise = (0.4 * rng.normal(key, (16, 2))).clamp(-0.5, 0.5)
            following = (perceptron(actor, batch["next_observations"]).tanh() + noise).clamp(-1, 1)
            p = [x.softmax(-1) for x in logits(target, batch["next_observations"], following)]
            smaller = (p[0] @ atoms < p[1] @ atoms).unsqueeze(-1)
            chosen = torch.where(smaller, *p)
            assert 0 < int(smaller.sum()) < 16
        scale = 0.99 * batch["masks"].numpy()
        goal = torch.from_numpy(projected(chosen.double().numpy(), batch["rewards"].numpy(), scale)).float()
        outputs = logits(critic, batch["observations"], batch["actions"])
        loss = torch.stack([-(goal * F.log_softmax(x, -1)).sum(-1).mean() for x in outputs]).sum()
        assert float(metrics["critic/loss"]) == pytest.approx(loss.item(), abs=1e-5)
        adam[0].zero_grad()
        loss.backward()
        adam[0].step()
        if phase:
            action = perceptron(actor, batch["observations"]).tanh()
            q = torch.minimum(*(x.softmax(-1) @ atoms for x in logits(critic, batch["observations"], action))).mean()
            assert float(metrics["actor/loss"]) == pytest.approx(-q.item(), abs=1e-5)
            adam[1].zero_grad()
            (-q).backward()
            adam[1].step()
        target = {k: 0.9 * v + 0.1 * critic[k].detach() for k, v in target.items()}
        pairs = (actor, state.params["actor"]), (critic, state.params["critic"]), (target, state.target["critic"])
        for expected, ours in pairs:
            for name, value in expected.items():
                torch.testing.assert_close(ours[name], value.detach(), atol=2e-5, rtol=0.0)
    assert "actor" not in state.target and c.weight_decay == 0.1


def test_defaults_are_the_authors() -> None:
    """HumanoidBench's; the last layer of the actor begins near 0."""
    kind = registry.get("algo", "fast_td3")
    c = kind.Config()
    assert (c.hidden, c.critic_hidden, c.batch_size) == ([512, 256, 128], [1024, 512, 256], 32_768)
    assert (c.learning_rate, c.weight_decay, c.polyak, c.discount) == (3e-4, 0.1, 0.1, 0.99)
    assert (c.policy_noise, c.noise_clip, c.exploration) == (0.001, 0.5, [0.001, 0.4])
    assert (c.value_bins, c.critics, c.n_step, c.layer_norm) == (101, 2, 1, False)
    online = {"mixing": 0, "envs": 128, "utd": 2 / 128, "warmup": 1280, "normalize": "running"}
    assert finetune_settings("fast_td3") == online
    assert choose(FinetuneConfig(), online, True, True).utd == 2 / 128
    assert choose(FinetuneConfig(envs=16), online, True, True).utd == 2 / 16
    assert compose({"algo": "fast_td3", "dataset": "-"}).algo.value_head == "c51"
    algorithm, state = make(hidden=[256, 256])
    assert not state.params["actor"]["net.head.bias"].any()
    assert float(state.params["actor"]["net.head.weight"].std()) == pytest.approx(0.01, rel=0.1)
    assert algorithm.traits.period == 2 and state.target.keys() == {"critic"}


def test_each_environment_keeps_its_noise_for_an_episode() -> None:
    algorithm, state = make(exploration=[0.2, 0.6])
    actor, x = algorithm.actor(state), torch.zeros(4000, 3)
    mean, carry = actor.act(actor.start(4000), x, rng.make_key(0), explore=False)
    assert bool((carry == -1.0).all())  # which a greedy policy has no use for
    _, first = actor.act(carry, x, rng.make_key(1), explore=True)
    assert 0.2 <= float(first.min()) < 0.21 and 0.59 < float(first.max()) <= 0.6
    assert float(first.mean()) == pytest.approx(0.4, abs=0.01)
    actions, second = actor.act(first, x, rng.make_key(2), explore=True)
    assert torch.equal(first, second)
    size = (actions - mean).square().mean(-1)
    assert float((size / first.square()).mean()) == pytest.approx(1.0, abs=0.1)  # few are cut off
    over = torch.arange(4000) % 2 == 0
    _, third = actor.act(actor.begin_anew(second, over), x, rng.make_key(3), explore=True)
    assert torch.equal(third[~over], second[~over]) and not (third[over] == second[over]).any()
    fixed = make(exploration=[0.0, 0.0])
    torch.testing.assert_close(fixed[0].actor(fixed[1]).act(carry, x, rng.make_key(4), explore=True)[0], mean)


def test_an_exported_policy_needs_no_memory() -> None:
    """The greedy policy is a function of the observation."""
    algorithm, state = make()
    policy = TrainedPolicy(algorithm, state, 0)
    graph = PolicyGraph(policy, False)
    raw = torch.randn(50, 3) * torch.tensor(SPEC.observation_std) + torch.tensor(SPEC.observation_mean)
    assert graph.parts == 0
    np.testing.assert_allclose(graph(raw).numpy(), policy.act(raw.numpy()), atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"value_range": []}, r"algo.value_range=\[\] must be \[smallest,largest\] for algo.value_head=c51"),
        ({"exploration": [0.4, 0.1]}, r"algo.exploration=\[0.4, 0.1\] must be \[smallest,largest\]"),
        ({"exploration": [0.4]}, r"algo.exploration=\[0.4\] must be \[smallest,largest\]"),
    ],
)
def test_what_is_refused(settings: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        make(**settings)
    assert "\n" not in str(error.value)


def test_it_learns_in_many_environments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its conventions, noise that a checkpoint remembers, and a line where values leave the range."""
    monkeypatch.setattr(summary, "picture", lambda *a, **k: False)
    said: list[str] = []
    monkeypatch.setattr(updates, "warn", said.append)
    settings = {"algo.hidden": [8], "algo.critic_hidden": [8], "algo.batch_size": 8, "algo.value_bins": 5}
    settings |= {"eval.episodes": 1, "eval.every": 0, "eval.workers": 0, "algo.value_range": [-1.0, 0.0]}
    run = offrl.finetune(
        None, algo="fast_td3", seeds=2, env=lambda: gym.make("Pendulum-v1"), steps=128 * 20, mixing="auto", quiet=True,
        max_steps=8, device="cpu", compile="eager", log_every=128 * 5, runs_dir=str(tmp_path), settings=settings,
    )  # fmt: skip
    tensors, meta = checkpoint.load_latest(run.dir) or ({}, {})
    assert meta["updates"] == 20 and meta["rows"] == [[128 * 20] * 2]  # two each step, after ten of them
    noise = part(tensors, "memory")["0"]
    assert noise.shape == (2, 128) and bool(((noise > 0.0) & (noise <= 0.4)).all())
    assert run.policy(0).spec.observation_mean is not None
    (line,) = said
    assert "of the targets of" in line and "algo.value_range=[-1.0, 0.0]" in line


def test_a_range_that_no_setting_has_names_the_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(updates, "warn", said.append)
    assert updates.warn_saturated({"critic/saturation": torch.tensor([0.06])}, None, [Replica(0)])
    assert "6% of the targets of seed 0 lie beyond the range of the critics' bins" in said[0]
    assert "smaller rewards (dataset.reward_scale=" in said[0]


def test_wider_ranges_are_not_warned_of() -> None:
    for metrics in ({"critic/saturation": torch.tensor([0.04, 0.0])}, {}):
        assert not updates.warn_saturated(metrics, [-1.0, 1.0], [])
