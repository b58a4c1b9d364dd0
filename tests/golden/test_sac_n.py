"""SAC-N and EDAC: each loss in float64 NumPy, the diversity term by numerical differentiation, and whole updates in the
authors' order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import TrainState
from offrl.algorithms.edac import action_gradients as slopes
from offrl.errors import UserError
from tests.support.golden import KEY, OBS, A, B, K, critics, double, q_values, redraw, spec, transitions
from tests.support.reference import mlp as ref

N = 5
LR, DISCOUNT, POLYAK, WEIGHT, ETA = 0.01, 0.9, 0.1, 0.4, 0.7
G = np.random.default_rng(4)
BATCH = transitions(G)
X = double(BATCH)
NOISE = G.normal(size=(6, B, A)).astype(np.float32)


@pytest.fixture(autouse=True)
def known_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator has tests of its own; here the noise is known: the first rows of NOISE, whatever the key."""
    monkeypatch.setattr(
        rng, "normal", lambda key, shape: torch.tensor(NOISE[0] if len(shape) == 2 else NOISE[: shape[0]])
    )


def make(name: str = "sac_n", discrete: bool = False, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", name)
    defaults: dict[str, Any] = {"hidden": [6, 5], "learning_rate": LR, "discount": DISCOUNT, "polyak": POLYAK}
    defaults |= {"critics": N, "entropy_weight": WEIGHT}
    algorithm = kind(
        kind.Config(**{**defaults, **({"eta": ETA} if name == "edac" else {}), **settings}), spec(K if discrete else 0)
    )
    state = algorithm.init(3)
    g = torch.Generator().manual_seed(5)  # larger than initial weights: each critic is the smallest somewhere
    for params in (state.params["critic"], state.target["critic"], state.params["actor"]):
        redraw(params, g, 0.6)
    return algorithm, state


def sample(actor: ref.Net, observations: np.ndarray, noise: np.ndarray) -> dict[str, Any]:
    """The action, its log density with log(1 - a**2) written out, and what the gradient needs."""
    out, inputs = ref.forward(actor, observations)
    log_std = np.clip(out[:, A:], -5.0, 2.0)
    u = out[:, :A] + np.exp(log_std) * noise
    a = np.tanh(u)
    log_p = (-0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - a**2)).sum(-1)
    return {
        "a": a,
        "log_p": log_p,
        "inputs": inputs,
        "log_std": log_std,
        "inside": (out[:, A:] > -5) & (out[:, A:] < 2),
        "noise": noise,
    }


def td_target(actor: ref.Net, targets: list[ref.Net], weight: float, entropy: bool = True) -> np.ndarray:
    s = sample(actor, X["next_observations"], NOISE[0].astype(np.float64))
    q = q_values(targets, X["next_observations"], s["a"])
    assert len(set(q.argmin(0))) > 1
    return X["rewards"] + DISCOUNT * X["masks"] * (q.min(0) - entropy * weight * s["log_p"])


@pytest.mark.parametrize(("limit", "counts"), [(None, 1.5), (2.0, 1.5), (1.0, 1.0)])
def test_the_weight_of_the_entropy_counts_up_to_its_limit(limit: float | None, counts: float) -> None:
    """In the actor's loss and in the target; what is learnt is not limited."""
    algorithm, state = make(max_entropy_weight=limit, entropy_weight=1.5)
    actor, nets = ref.net(state.params["actor"], "net."), critics(state.params["critic"])
    s = sample(actor, X["observations"], NOISE[0].astype(np.float64))
    expected = (counts * s["log_p"] - q_values(nets, X["observations"], s["a"]).min(0)).mean()
    assert float(algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0]) == pytest.approx(expected, rel=1e-4)
    y = td_target(actor, critics(state.target["critic"]), counts)
    np.testing.assert_allclose(
        algorithm.target(state, state.params["actor"], BATCH, KEY).value, y, rtol=1e-4, atol=1e-4
    )
    assert float(algorithm.update(state, BATCH, KEY, phase=0)[1]["entropy/weight"]) == pytest.approx(1.5)


def test_model_based_methods_limit_it_as_offlinerl_kit_does() -> None:
    limits = {
        name: registry.get("algo", name).Config().max_entropy_weight
        for name in ("mopo", "rambo", "mobile", "combo", "sac_n")
    }
    assert limits == {"mopo": 1.0, "rambo": 1.0, "mobile": 1.0, "combo": None, "sac_n": None}


def action_gradients(nets: list[ref.Net]) -> np.ndarray:
    """[E, B, A], from the chain rule."""
    both, found = np.concatenate([X["observations"], X["actions"]], 1), []
    for net in nets:
        out, inputs = ref.forward(net, both)
        found.append(ref.backward(net, inputs, np.ones_like(out))[1][:, OBS:])
    return np.stack(found)


def diversity(nets: list[ref.Net]) -> float:
    """Equation 4, pair by pair."""
    g = action_gradients(nets)
    g = g / (np.linalg.norm(g, axis=-1, keepdims=True) + 1e-10)
    pairs = [(g[i] * g[j]).sum(-1) for i in range(len(g)) for j in range(len(g)) if i != j]
    return float(sum(p.mean() for p in pairs) / (len(g) - 1))


def diversity_gradient(nets: list[ref.Net], step: float = 1e-6) -> list[list[np.ndarray]]:
    """With respect to every parameter of every critic, by central differences."""
    found = []
    for net in nets:
        grads = []
        for value in ref.flat(net):
            grad = np.zeros_like(value)
            for at in np.ndindex(value.shape):
                old, ends = value[at], []
                for sign in (1, -1):
                    value[at] = old + sign * step
                    ends.append(diversity(nets))
                value[at] = old
                grad[at] = (ends[0] - ends[1]) / (2 * step)
            grads.append(grad)
        found.append(grads)
    return found


def test_the_gradients_by_numerical_differentiation() -> None:
    """Of the reference itself, which the other tests rely on."""
    _, state = make()
    nets, step = critics(state.params["critic"]), 1e-6
    for i in range(A):
        move = step * np.eye(A)[i]
        slope = q_values(nets, X["observations"], X["actions"] + move) - q_values(
            nets, X["observations"], X["actions"] - move
        )
        np.testing.assert_allclose(action_gradients(nets)[:, :, i], slope / (2 * step), atol=1e-7)


def test_the_weight_of_the_entropy() -> None:
    algorithm, state = make()
    log_p = sample(ref.net(state.params["actor"], "net."), X["observations"], NOISE[0].astype(np.float64))["log_p"]
    loss, metrics = algorithm.entropy_loss(state.params["entropy"], state, torch.tensor(log_p, dtype=torch.float32))
    assert float(loss) == pytest.approx(-(np.log(WEIGHT) * (log_p - A)).mean(), rel=1e-4)  # the target is -A
    assert float(metrics["entropy/policy"]) == pytest.approx(-log_p.mean(), rel=1e-4)
    scaled, _ = make(target_entropy_scale=0.5)
    assert algorithm.target_entropy == -2.0 and scaled.target_entropy == -1.0
    assert make(target_entropy=-3.0, target_entropy_scale=0.5)[0].target_entropy == -3.0


def test_a_weight_that_fell_to_nothing_can_still_learn() -> None:
    """Where the entropy stays above its target, the logarithm falls without end."""
    algorithm, state = make()
    gradient = torch.func.grad(lambda p: algorithm.entropy_loss(p, state, torch.full((B,), 5.0))[0])
    assert float(gradient({"log": torch.tensor(-200.0)})["log"]) == pytest.approx(-(5.0 - A))


@pytest.mark.parametrize("how", ["min", "mean"])
def test_actor_loss(how: str) -> None:
    algorithm, state = make(actor_value=how)
    s = sample(ref.net(state.params["actor"], "net."), X["observations"], NOISE[0].astype(np.float64))
    q = q_values(critics(state.params["critic"]), X["observations"], s["a"])
    expected = (WEIGHT * s["log_p"] - (q.min(0) if how == "min" else q.mean(0))).mean()
    assert float(algorithm.actor_loss(state.params["actor"], state, BATCH, KEY)[0]) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("entropy", [True, False])
def test_critic_loss(entropy: bool) -> None:
    algorithm, state = make(entropy_in_target=entropy)
    y = td_target(ref.net(state.params["actor"], "net."), critics(state.target["critic"]), WEIGHT, entropy)
    q = q_values(critics(state.params["critic"]), X["observations"], X["actions"])
    loss, metrics = algorithm.critic_loss(state.params["critic"], state, BATCH, KEY)
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-5)
    assert "critic/alignment" not in metrics


@pytest.mark.parametrize("entropy", [True, False])
def test_the_best_of_many_actions_in_the_target(entropy: bool) -> None:
    algorithm, state = make(max_target_actions=6, entropy_in_target=entropy)
    actor, targets = ref.net(state.params["actor"], "net."), critics(state.target["critic"])
    tried = [sample(actor, X["next_observations"], NOISE[m].astype(np.float64)) for m in range(6)]
    least = np.stack([q_values(targets, X["next_observations"], s["a"]).min(0) for s in tried])  # [M, B]
    best = least.argmax(0)
    assert len(set(best)) > 2
    value = least.max(0) - entropy * WEIGHT * np.stack([s["log_p"] for s in tried])[best, np.arange(B)]
    target = algorithm.target(state, state.params["actor"], BATCH, KEY)
    np.testing.assert_allclose(target.value, X["rewards"] + DISCOUNT * X["masks"] * value, rtol=1e-4, atol=1e-5)


def test_diversity_and_its_gradient() -> None:
    """EDAC's loss is SAC-N's and eta times equation 4; so is its gradient with respect to the critics' parameters."""
    (edac, state), (sac_n, _) = make("edac"), make()
    critic, nets = state.params["critic"], critics(state.params["critic"])
    loss, metrics = edac.critic_loss(critic, state, BATCH, KEY)
    plain, _ = sac_n.critic_loss(critic, state, BATCH, KEY)
    assert float(loss - plain) == pytest.approx(ETA * diversity(nets), rel=1e-3)
    assert float(metrics["critic/alignment"]) == pytest.approx(diversity(nets) / N, rel=1e-4)  # the mean cosine
    ours, without = (
        torch.func.grad(lambda p, a=a: a.critic_loss(p, state, BATCH, KEY)[0])(critic) for a in (edac, sac_n)
    )
    mine = diversity_gradient(nets)
    difference = {k: (ours[k] - without[k]) / ETA for k in ours}
    assert float(difference["layers.0.weight"].abs().max()) > 0.01
    for e in range(N):
        ref.close(ref.unflat(mine[e]), difference, member=e, atol=1e-4)
    silent, _ = make("edac", eta=0.0)
    for k, v in torch.func.grad(lambda p: silent.critic_loss(p, state, BATCH, KEY)[0])(critic).items():
        torch.testing.assert_close(v, without[k])


@pytest.mark.parametrize(
    "options",
    [{"layer_norm": True}, {"residual": True, "hidden": [6, 6]}, {"value_head": "two_hot", "value_range": [-9.0, 9.0]}],
)
def test_gradients_with_the_critics_options(options: dict[str, Any]) -> None:
    """By central differences of the network itself, one critic at a time."""
    algorithm, state = make("edac", **options)
    critic, observations, actions = state.params["critic"], BATCH["observations"], BATCH["actions"]
    logits, found = slopes(algorithm.critic, critic, observations, actions)
    torch.testing.assert_close(logits, algorithm.critic.logits(critic, observations, actions))
    wide = {k: v.double() for k, v in critic.items()}
    # that head's arithmetic is float32 by itself: a longer step
    step, tolerance = (1e-3, 2e-2) if "value_head" in options else (1e-6, 1e-4)
    for i in range(A):
        move = step * torch.eye(A, dtype=torch.float64)[i]
        up, down = (
            algorithm.critic.q(wide, observations.double(), actions.double() + s * move).double() for s in (1, -1)
        )
        np.testing.assert_allclose(found[:, :, i], (up - down) / (2 * step), atol=tolerance)


def test_a_subset_of_critics_estimates_the_diversity_of_all() -> None:
    (part, state), (whole, _) = make("edac", compared_critics=2), make("edac")
    critic = state.params["critic"]
    found = [part.critic_loss(critic, state, BATCH, rng.make_key(i)) for i in range(120)]
    expected, metrics = whole.critic_loss(critic, state, BATCH, KEY)
    assert np.mean([float(loss) for loss, _ in found]) == pytest.approx(float(expected), abs=0.25)
    each = {round(float(m["critic/alignment"]), 4) for _, m in found}
    assert len(each) == N * (N - 1) // 2 and np.mean(list(each)) == pytest.approx(
        float(metrics["critic/alignment"]), abs=1e-4
    )


def test_discrete_expectations_are_exact() -> None:
    algorithm, state = make(discrete=True)
    batch = {**BATCH, "actions": torch.tensor([0, 3, 1, 1, 2, 0, 3, 2])}
    actor, online, targets = (
        ref.net(state.params["actor"], "net."),
        critics(state.params["critic"]),
        critics(state.target["critic"]),
    )

    def soft(nets: list[ref.Net], observations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        z = ref.forward(actor, observations)[0]
        log_p = z - np.log(np.exp(z).sum(1, keepdims=True))
        q = np.stack([ref.forward(n, observations)[0] for n in nets]).min(0)  # of each action the smallest
        return (np.exp(log_p) * (q - WEIGHT * log_p)).sum(1), (np.exp(log_p) * log_p).sum(1)

    value, negative = soft(online, X["observations"])
    assert float(algorithm.actor_loss(state.params["actor"], state, batch, KEY)[0]) == pytest.approx(
        -value.mean(), rel=1e-4
    )
    y = X["rewards"] + DISCOUNT * X["masks"] * soft(targets, X["next_observations"])[0]
    q = np.stack([ref.forward(n, X["observations"])[0] for n in online])[:, np.arange(B), batch["actions"]]
    assert float(algorithm.critic_loss(state.params["critic"], state, batch, KEY)[0]) == pytest.approx(
        ((q - y) ** 2).mean(1).sum(), rel=1e-4
    )
    new, metrics = algorithm.update(state, batch, KEY, phase=0)
    assert algorithm.target_entropy == pytest.approx(0.1 * np.log(K)) and float(
        metrics["entropy/policy"]
    ) == pytest.approx(-negative.mean(), rel=1e-4)
    up = -negative.mean() < 0.1 * np.log(K)  # too little entropy raises its weight
    assert (float(new.params["entropy"]["log"]) > np.log(WEIGHT)) == up


class Reference:
    """SAC-N and EDAC in float64: the entropy's weight, the actor with the new weight, the critics with both new, the
    targets.
    """

    def __init__(self, state: TrainState, eta: float) -> None:
        self.actor, self.log, self.eta = ref.net(state.params["actor"], "net."), np.array(np.log(WEIGHT)), eta
        self.critics, self.targets = critics(state.params["critic"]), critics(state.target["critic"])
        self.adam = [ref.Adam(lambda t: LR) for _ in range(N + 2)]

    def update(self) -> None:
        s = sample(self.actor, X["observations"], NOISE[0].astype(np.float64))
        (self.log,) = self.adam[0].step([self.log], [np.array(-(s["log_p"] - A).mean())])
        weight = float(np.exp(self.log))

        both = np.concatenate([X["observations"], s["a"]], 1)
        passes = [ref.forward(n, both) for n in self.critics]
        least = np.stack([out[:, 0] for out, _ in passes]).argmin(0)
        into = np.zeros((B, A))  # of the mean of -min Q with respect to the action
        for e, (_, inputs) in enumerate(passes):
            into += ref.backward(self.critics[e], inputs, -1.0 / B * (least == e)[:, None])[1][:, OBS:]
        # d log p / du = 2 a (the correction alone: the Gaussian's own part does not move with its mean or scale), d / d
        # log_std = -1
        du = into * (1 - s["a"] ** 2) + weight / B * 2 * s["a"]
        d_log_std = (du * np.exp(s["log_std"]) * s["noise"] - weight / B) * s["inside"]
        grads, _ = ref.backward(self.actor, s["inputs"], np.concatenate([du, d_log_std], 1))
        self.actor = ref.unflat(self.adam[1].step(ref.flat(self.actor), grads))

        y = td_target(self.actor, self.targets, weight)
        both = np.concatenate([X["observations"], X["actions"]], 1)
        diverse = diversity_gradient(self.critics) if self.eta else None
        moved = []
        for e, critic in enumerate(self.critics):
            out, inputs = ref.forward(critic, both)
            grads, _ = ref.backward(critic, inputs, 2 * (out - y[:, None]) / B)
            if diverse is not None:
                grads = [g + self.eta * d for g, d in zip(grads, diverse[e], strict=True)]
            moved.append(ref.unflat(self.adam[2 + e].step(ref.flat(critic), grads)))
        self.critics = moved
        self.targets = [ref.polyak(t, o, POLYAK) for t, o in zip(self.targets, self.critics, strict=True)]


@pytest.mark.parametrize("name", ["sac_n", "edac"])
def test_updates_in_the_authors_order(name: str) -> None:
    algorithm, state = make(name)
    mine = Reference(state, ETA if name == "edac" else 0.0)
    for _ in range(2 if name == "edac" else 5):
        state, _ = algorithm.update(state, BATCH, KEY, phase=0)
        mine.update()
        assert float(state.params["entropy"]["log"]) == pytest.approx(float(mine.log), abs=1e-5)
        ref.close(mine.actor, state.params["actor"], "net.", atol=1e-4)
        for e in range(N):
            ref.close(mine.critics[e], state.params["critic"], member=e, atol=1e-4)
            ref.close(mine.targets[e], state.target["critic"], member=e, atol=1e-4)


def test_what_cannot_be_compared_is_refused() -> None:
    for name, settings in (
        ("edac", {"critics": 1}),
        ("edac", {"compared_critics": 1}),
        ("edac", {"compared_critics": 6}),
    ):
        with pytest.raises(UserError, match="critics="):
            make(name, **settings)


@pytest.mark.parametrize("name", ["sac_n", "edac"])
def test_published_defaults(name: str) -> None:
    c = registry.get("algo", name).Config()
    published = {
        "learning_rate": 3e-4,
        "batch_size": 256,
        "discount": 0.99,
        "polyak": 0.005,
        "critics": 10,
        "entropy_weight": 1.0,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert c.hidden == [256, 256, 256] and c.init == "fixed_bias" and c.entropy_in_target and c.target_entropy is None
    if name == "edac":
        assert c.eta == 1.0 and c.compared_critics == 0
