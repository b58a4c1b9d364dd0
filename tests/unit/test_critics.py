"""The critics' options, and every value head under every algorithm with critics: against NumPy, exact frequencies and
known values.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

from offrl import registry, rng
from offrl.algorithm import TrainState, select, stack, with_config
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.transforms.columns import add_returns_to_go
from offrl.errors import UserError
from offrl.families.critics import Critic, Values
from offrl.nn import BINNED, HEADS, MLP, EnsembleMLP
from offrl.system import files as checkpoint
from offrl.training.compiling import ahead
from offrl.training.step import Step
from tests.support import cases
from tests.support.reference import mlp as ref

FIELDS = {n: kind.Config.__dataclass_fields__ for n, kind in registry.names("algo").items()}
# model-based ones have SAC's critics, and need a model besides
# skill_critic, skill_iql: critics of skills, and not of what the data do in one step; the others have one head alone
LEFT_OUT = ("brc", "crossq", "dsac_t", "fast_td3", *cases.IMITATION, "simbav2", "skill_critic", "skill_iql")
TD = [n for n, fields in FIELDS.items() if "value_head" in fields and "world_model" not in fields and n not in LEFT_OUT]
TD = [n for n in TD if not registry.get("algo", n).traits.text]  # theirs: tests/golden/test_ilql.py, test_text_turns.py
OBS, A, B = 3, 2, 8
SPEC = DataSpec((OBS,), A, action_low=(-1.0,) * A, action_high=(1.0,) * A)
G = np.random.default_rng(4)
X = {
    "observations": G.normal(size=(B, OBS)),
    "actions": G.uniform(-1, 1, (B, A)),
    "rewards": G.normal(size=B),
    "masks": np.array([1, 0, 1, 1, 0, 1, 0, 1]),
    "next_observations": G.normal(size=(B, OBS)),
}
BATCH = {k: torch.tensor(v, dtype=torch.float32) for k, v in X.items()}
X = {k: v.double().numpy() for k, v in BATCH.items()}
INPUT = np.concatenate([X["observations"], X["actions"]], 1)
KEY = rng.make_key(0)


def make(name: str = "td3_bc", **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(**{"hidden": [6, 5], "learning_rate": 0.01, **settings}), SPEC)
    return algorithm, algorithm.init(3)


def layers(params: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of every layer, [..., in, out]."""
    return {k: v for k, v in params.items() if k.endswith("weight")}


# ---- spectral normalisation


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["td3_bc", "iql"])
def test_no_layer_grows_beyond_the_spectral_bound(name: str) -> None:
    bound = 0.8
    state, _ = cases.train(
        cases.Case(name, False, (("spectral_norm", bound), ("learning_rate", 1e-2))).make(), [0, 1], 150
    )
    free, _ = cases.train(cases.Case(name, False, (("learning_rate", 1e-2),)).make(), [0, 1], 150)
    for key, w in layers(state.params["critic"]).items():
        largest = torch.linalg.svdvals(w)[..., 0]  # [replicas, critics]
        # one power iteration an update lags behind, in one run of 15 by 7%
        assert float(largest.max()) <= 1.2 * bound, key
    assert all(
        float(torch.linalg.svdvals(w).max()) > 1.5 * bound
        for k, w in layers(free.params["critic"]).items()
        if "head" not in k
    )


def test_power_iterations_go_on_from_update_to_update() -> None:
    algorithm, state = make(spectral_norm=1e9)
    for _ in range(200):
        new = algorithm.critic.spectral_normalise(state)
        cases.identical(new.params, state.params)  # a layer within the bound stays as it is
        state = new
    for key, w in layers(state.params["critic"]).items():
        _, sigma, right = np.linalg.svd(w.double().numpy())
        v = state.extra["spectral"][key].double().numpy()
        np.testing.assert_allclose(np.abs((v * right[:, 0]).sum(-1)), 1.0, atol=1e-4, err_msg=key)
        np.testing.assert_allclose(
            np.linalg.norm(np.einsum("eio,eo->ei", w.double().numpy(), v), axis=-1), sigma[:, 0], rtol=1e-4
        )
    bounded = with_config(
        algorithm, dataclasses.replace(algorithm.config, spectral_norm=0.1)
    ).critic.spectral_normalise(state)
    for key, w in layers(state.params["critic"]).items():
        largest = np.linalg.svd(w.double().numpy())[1][:, 0].reshape(-1, 1, 1)
        np.testing.assert_allclose(bounded.params["critic"][key], w * np.minimum(1, 0.1 / largest), atol=1e-5)
    assert all(
        torch.equal(v, bounded.params["critic"][k]) for k, v in state.params["critic"].items() if k.endswith("bias")
    )
    cases.identical(bounded._replace(params=state.params, extra=state.extra), state)


def test_a_layer_of_zeros_stays_finite() -> None:
    algorithm, state = make(spectral_norm=1.0)
    state.params["critic"]["head.weight"].zero_()
    for _ in range(3):
        state = algorithm.critic.spectral_normalise(state)
    assert all(x.isfinite().all() for x in checkpoint.flatten(state).values() if x.is_floating_point())
    state.params["critic"]["head.weight"].fill_(9.0)
    for _ in range(30):
        state = algorithm.critic.spectral_normalise(state)
    assert float(torch.linalg.svdvals(state.params["critic"]["head.weight"]).max()) <= 1.001, (
        "it takes up again what grows later"
    )


# ---- Lipschitz penalty


def steepest(nets: list[ref.Net], radius: float) -> tuple[np.ndarray, list[np.ndarray]]:
    """sum over critics of mean (Q(s + d, a) - Q(s, a))**2, and each critic's d, from gradients written by hand."""
    total, moves = np.zeros(()), []
    for n in nets:
        now, inputs = ref.forward(n, INPUT)
        _, slope = ref.backward(n, inputs, np.ones((B, 1)))
        d = np.concatenate([radius * np.sign(slope[:, :OBS]), np.zeros((B, A))], 1)
        moves.append(d)
        total = total + ((ref.forward(n, INPUT + d)[0] - now) ** 2).mean()
    return total, moves


def test_lipschitz_penalty_and_its_gradient() -> None:
    weight, radius = 0.7, 0.3
    algorithm, state = make(lipschitz=weight, lipschitz_radius=radius)
    plain, _ = make()
    g = torch.Generator().manual_seed(5)
    critic = {k: 0.7 * torch.randn(v.shape, generator=g) for k, v in state.params["critic"].items()}
    nets = [ref.net(critic, member=e) for e in range(2)]
    change, moves = steepest(nets, radius)
    assert float(algorithm.critic.fgsm_change(critic, BATCH["observations"], BATCH["actions"])) == pytest.approx(
        float(change), rel=1e-4
    )

    target = algorithm.critic.td_target(BATCH, Values(torch.ones(B)))
    loss, metrics = algorithm.critic.loss(critic, BATCH, target, KEY)
    base, _ = plain.critic.loss(critic, BATCH, target, KEY)
    assert float(loss) == pytest.approx(float(base) + weight * float(change), rel=1e-4)
    assert float(metrics["critic/lipschitz"]) == pytest.approx(float(change), rel=1e-4)
    assert "critic/lipschitz" not in plain.critic.loss(critic, BATCH, target, KEY)[1]

    # the move is a constant for the gradient: finite differences in float64 with d held where it is
    ours = grad(lambda p: algorithm.critic.fgsm_change(p, BATCH["observations"], BATCH["actions"]))(critic)

    def at(e: int, layer: int, part: int, index: tuple[int, ...], by: float) -> float:
        arrays = [[w.copy(), b.copy()] for w, b in nets[e]]
        arrays[layer][part][index] += by
        n = [(w, b) for w, b in arrays]
        return float(((ref.forward(n, INPUT + moves[e])[0] - ref.forward(n, INPUT)[0]) ** 2).mean())

    for e, (layer, name) in itertools.product(range(2), enumerate(["layers.0", "layers.1", "head"])):
        w = nets[e][layer][0]
        for index in [(0, 0), (w.shape[0] - 1, w.shape[1] - 1)]:
            slope = (at(e, layer, 0, index, 1e-6) - at(e, layer, 0, index, -1e-6)) / 2e-6
            assert float(ours[f"{name}.weight"][(e, *index)]) == pytest.approx(slope, rel=1e-3, abs=1e-5)
        slope = (at(e, layer, 1, (0,), 1e-6) - at(e, layer, 1, (0,), -1e-6)) / 2e-6
        assert float(ours[f"{name}.bias"][e, 0, 0]) == pytest.approx(slope, rel=1e-3, abs=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("head", ["scalar", "hl_gauss"])
def test_the_penalty_makes_critics_smoother(head: str) -> None:
    change = []
    for weight in (0.0, 30.0):
        settings = (("lipschitz", weight), ("learning_rate", 3e-3), ("value_head", head))
        algorithm = cases.Case("iql", False, settings).make()
        state, _ = cases.train(algorithm, [0], 150)
        batch = cases.a_batch(algorithm)
        change.append(
            float(
                algorithm.critic.fgsm_change(select(state, 0).params["critic"], batch["observations"], batch["actions"])
            )
        )
    assert change[1] < 0.65 * change[0]  # 0.2 to 0.41 over seeds


def test_lipschitz_of_discrete_actions() -> None:
    algorithm = cases.Case("iql", True, (("lipschitz", 1.0),)).make()
    state, batch = algorithm.init(0), cases.a_batch(algorithm)
    got = algorithm.critic.fgsm_change(state.params["critic"], batch["observations"], batch["actions"])
    total, x, chosen = 0.0, batch["observations"].double().numpy(), batch["actions"].numpy()
    for e in range(2):
        n = ref.net(state.params["critic"], member=e)
        now, inputs = ref.forward(n, x)
        _, slope = ref.backward(n, inputs, np.eye(3)[chosen])
        moved = ref.forward(n, x + 0.1 * np.sign(slope))[0]
        total += float(((moved - now)[np.arange(len(x)), chosen] ** 2).mean())
    assert float(got) == pytest.approx(total, rel=1e-3)


# ---- ensembles


def constant(algorithm: Any, params: dict[str, Tensor], values: list[float]) -> dict[str, Tensor]:
    """Critics whose value is the same everywhere: critic i says values[i]."""
    new = {k: torch.zeros_like(v) for k, v in params.items()}
    new["head.bias"] = torch.tensor(values).reshape(-1, 1, 1)
    return new


def test_each_subset_of_target_critics_is_asked_equally_often() -> None:
    algorithm, state = make(critics=4, target_critics=2)
    state = state._replace(
        target={**state.target, "critic": constant(algorithm, state.target["critic"], [0.0, 1.0, 2.0, 3.0])}
    )
    n = 6000
    keys = rng.fold_in(KEY, torch.arange(n))
    asked = vmap(lambda key: algorithm.critic.target_critics(state, key)["head.bias"].flatten())(keys)
    pairs = Counter(tuple(sorted(p)) for p in asked.tolist())
    assert set(pairs) == set(itertools.combinations([0.0, 1.0, 2.0, 3.0], 2)), "two different ones, and every pair"
    # chi-square with 5 degrees of freedom, p = 0.001
    assert sum((count - n / 6) ** 2 / (n / 6) for count in pairs.values()) < 20.5

    def target(key: Tensor) -> Tensor:  # and the target is the smaller of the two that are asked
        return algorithm.critic.min_q(
            algorithm.critic.target_critics(state, key), BATCH["observations"], BATCH["actions"]
        ).mean[0]

    least = Counter(vmap(target)(keys[:600]).tolist())
    assert least == Counter(min(p) for p in asked[:600].tolist()) and set(least) == {0.0, 1.0, 2.0}


@pytest.mark.parametrize(
    "name", [n for n in TD if n not in ("td3_awr", "dtql", "pex")]
)  # DTQL's target critics serve acting alone, and PEX's critics act
def test_a_critic_that_is_not_asked_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With two of four critics in the targets, NaN in one reaches the other critics in those updates only in which it
    is asked.
    """
    algorithm = cases.Case(name, False, (("critics", 4), ("target_critics", 2))).make()
    state, batch = algorithm.init(0), cases.a_batch(algorithm)
    kept = {k: v.clone() for k, v in state.target["critic"].items()}
    state.target["critic"]["head.bias"][3] = float("nan")
    asked: list[list[int]] = []
    monkeypatch.setattr(Critic, "target_critics", spy(algorithm, kept, asked, Critic.target_critics))
    for i in range(8):
        asked.clear()
        new, _ = algorithm.update(state, batch, rng.make_key(i), phase=0)
        assert asked, "the target asks `target_critics`"
        harmed = any(not v[0].isfinite().all() for v in new.params["critic"].values())
        if not any(3 in members for members in asked):
            assert not harmed
    assert len(state.target["critic"]["head.bias"]) == 4


def spy(algorithm: Any, kept: dict[str, Tensor], asked: list[list[int]], real: Any) -> Any:
    def target_critics(self: Any, state: TrainState, key: Tensor) -> dict[str, Tensor]:
        chosen = real(self, state, key)
        weights = kept["layers.0.weight"]
        asked.append(
            [i for i in range(len(weights)) if any(torch.equal(weights[i], w) for w in chosen["layers.0.weight"])]
        )
        assert len(asked[-1]) == len(chosen["layers.0.weight"]) == algorithm.config.target_critics
        return chosen

    return target_critics


@pytest.mark.parametrize("critics", [1, 5])
def test_any_number_of_critics(critics: int) -> None:
    algorithm, state = make(critics=critics)
    nets = [ref.net(state.params["critic"], member=e) for e in range(critics)]
    q = np.stack([ref.forward(n, INPUT)[0][:, 0] for n in nets])
    np.testing.assert_allclose(
        algorithm.critic.q(state.params["critic"], BATCH["observations"], BATCH["actions"]), q, atol=1e-5
    )
    np.testing.assert_allclose(algorithm.q_value(state, BATCH["observations"], BATCH["actions"]), q.min(0), atol=1e-5)
    y = X["rewards"] + 0.99 * X["masks"]
    loss, _ = algorithm.critic.loss(
        state.params["critic"], BATCH, algorithm.critic.td_target(BATCH, Values(torch.ones(B))), KEY
    )
    assert float(loss) == pytest.approx(((q - y) ** 2).mean(1).sum(), rel=1e-4), (
        "a mean over the batch, a sum over critics"
    )
    state, metrics = algorithm.update(state, BATCH, KEY, phase=1)
    assert all(m.isfinite() for m in metrics.values())


def test_many_actions_for_each_observation_are_one_batch() -> None:
    algorithm, state = make(critics=3, value_head="two_hot", value_range=[-1.0, 1.0], value_bins=4)
    many = torch.tensor(G.uniform(-1, 1, (5, B, A)), dtype=torch.float32)
    out = algorithm.critic.logits(state.params["critic"], BATCH["observations"], many)
    assert out.shape == (3, 5, B, 4)
    for m in range(5):
        torch.testing.assert_close(
            out[:, m],
            algorithm.critic.logits(state.params["critic"], BATCH["observations"], many[m]),
            atol=1e-6,
            rtol=0,
        )


def test_more_target_critics_than_critics() -> None:
    with pytest.raises(UserError, match=r"algo\.target_critics=3 is more than algo\.critics=2"):
        make(target_critics=3)


# ---- the network


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_layer_norm_and_residual_against_numpy(norm: bool, residual: bool) -> None:
    """ReLU, then LayerNorm, then the sum with the layer's input wherever that is as wide."""
    widths = [6, 6, 4, 4]
    nets: list[Any] = [
        EnsembleMLP(2, 6, widths, 3, layer_norm=norm, residual=residual),
        MLP(6, widths, 3, layer_norm=norm, residual=residual),
    ]
    x = torch.tensor(G.normal(size=(7, 6)), dtype=torch.float32)
    for module in nets:
        g = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in module.parameters():
                p.copy_(0.7 * torch.randn(p.shape, generator=g))
        params = {k: v.detach() for k, v in module.named_parameters()}
        members = [None] if isinstance(module, MLP) else [0, 1]
        for member in members:
            h = x.double().numpy()
            *hidden, (w_out, b_out) = ref.net(params, member=member)
            for i, (w, b) in enumerate(hidden):
                y = np.maximum(h @ w + b, 0)
                if norm:
                    y = (y - y.mean(1, keepdims=True)) / np.sqrt(y.var(1, keepdims=True) + 1e-5)
                    keys = (
                        (f"norms.{i}.weight", f"norms.{i}.bias") if member is None else (f"scales.{i}", f"shifts.{i}")
                    )
                    scale, shift = (params[k].double().numpy() for k in keys)
                    y = y * scale + shift if member is None else y * scale[member] + shift[member]
                h = y + h if residual and i in (1, 3) else y
            got = module(x) if member is None else module(x)[member]
            np.testing.assert_allclose(got.detach(), h @ w_out + b_out, atol=1e-3, rtol=1e-4)


def test_options_reach_critics_and_values_and_not_the_actor() -> None:
    algorithm, state = make("iql", layer_norm=True, residual=True, critic_hidden=[7, 7], critics=3)
    for name in ("critic", "value"):
        module = algorithm.networks[name]
        assert module.residual and [
            v.shape[-1] for k, v in state.params[name].items() if k.endswith("layers.0.bias")
        ] == [7]
    assert "scales.1" in state.params["critic"] and "norms.1.weight" in state.params["value"]
    assert not any("norm" in k for k in state.params["actor"]) and state.params["actor"]["net.layers.0.bias"].shape == (
        6,
    )


EPSILON_CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("rebrac", "td3_awr", "xql", "f_dvl", "gcivl", "gciql", "qrl", "crl", "hiql", "ota")),
    ("crl", {"encoder": "residual"}), ("rebrac", {"actor_layer_norm": True}), ("iql", {"layer_norm": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "settings"), EPSILON_CASES)
def test_every_layer_norm_has_the_epsilon(name: str, settings: dict[str, Any]) -> None:
    kind = registry.get("algo", name)
    spec = DataSpec((3,), 2, action_low=(-1.0,) * 2, action_high=(1.0,) * 2)
    algorithm = kind(kind.Config(hidden=[4, 4], layer_norm_epsilon=0.25, **settings), spec)
    modules = [m for n in algorithm.networks.values() for m in n.modules() if getattr(m, "layer_norm", True)]
    epsilons = [getattr(m, "eps", getattr(m, "epsilon", None)) for m in modules]
    assert {e for e in epsilons if e is not None} == {0.25}
    ordinary = 1e-5 if name == "iql" else 1e-6
    assert kind.Config().layer_norm_epsilon == ordinary


def test_dropout_is_on_only_while_critics_learn() -> None:
    algorithm, state = make("iql", critic_dropout=0.4)
    plain, _ = make("iql")
    critic, o, a = state.params["critic"], BATCH["observations"], BATCH["actions"]
    torch.testing.assert_close(algorithm.critic.q(critic, o, a), plain.critic.q(critic, o, a), atol=0, rtol=0)
    inputs = state.target["critic"], BATCH["observations"], BATCH["actions"]
    cases.identical(algorithm.critic.min_q(*inputs).mean, plain.critic.min_q(*inputs).mean)
    target = algorithm.critic.td_target(BATCH, Values(torch.ones(B)))
    losses = [float(algorithm.critic.loss(critic, BATCH, target, rng.make_key(i))[0]) for i in (0, 0, 1)]
    assert losses[0] == losses[1] != losses[2] != float(plain.critic.loss(critic, BATCH, target, KEY)[0])

    # what is dropped: a share 0.4 of the hidden units, the others scaled by 1 / 0.6, anew for each critic and row
    one = EnsembleMLP(2, 5, [2000], 1, dropout=0.4)
    hidden: list[Tensor] = []
    one.head.register_forward_pre_hook(lambda module, x: hidden.append(x[0].detach()))
    x = torch.ones(3, 5)
    one(x), one(x, KEY)
    full, dropped = hidden
    alive = full > 0
    share = float(((dropped == 0) & alive).sum() / alive.sum())
    assert abs(share - 0.4) < 0.03
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], full[kept] / 0.6)
    both = alive[:, 0] & alive[:, 1]
    assert bool((kept[:, 0] != kept[:, 1])[both].any()) and bool((kept[0] != kept[1])[alive[0] & alive[1]].any())


# ---- all of it together, as the training step runs it

OPTIONS: list[tuple[str, dict[str, Any]]] = [
    ("td3_bc", {"spectral_norm": 2.0, "lipschitz": 0.5, "critics": 3, "target_critics": 2, "value_head": "c51"}),
    (
        "iql",
        {
            "spectral_norm": 2.0,
            "lipschitz": 0.5,
            "critic_dropout": 0.2,
            "residual": True,
            "layer_norm": True,
            "value_head": "hl_gauss",
        },
    ),
    ("iql", {"value_head": "c51", "critic_hidden": [16, 16, 16], "target_critics": 1}),
]
options = pytest.mark.parametrize(("name", "settings"), OPTIONS, ids=["td3_bc-c51", "iql-hl_gauss", "iql-c51"])


@options
def test_options_under_vmap(name: str, settings: dict[str, Any]) -> None:
    case = cases.Case(name, False, tuple({**settings, "value_bins": 11}.items()))
    algorithm = case.make()
    among, _ = cases.train(algorithm, [0, 1, 2], 6)
    alone, _ = cases.train(algorithm, [2], 6)
    cases.close(select(alone, 0).params, select(among, 2).params, atol=1e-5)
    cases.close(select(alone, 0).extra, select(among, 2).extra, atol=1e-5)


@pytest.mark.nightly
@options
def test_options_in_one_graph(name: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = cases.Case(name, False, tuple({**settings, "value_bins": 11}.items())).make()
    among, _ = cases.train(algorithm, [0, 1, 2], 6)
    monkeypatch.setattr(ahead, "available", lambda: False)  # tests/conformance takes the other way
    real, graphs = torch.compile, []

    def backend(module: Any, inputs: Any, **kw: Any) -> Any:
        graphs.append(module)
        return module

    monkeypatch.setattr(
        torch, "compile", lambda f, **kw: real(f, backend=backend, **{k: v for k, v in kw.items() if k != "backend"})
    )
    traced, sums = cases.train(algorithm, [0, 1, 2], 6, mode="compiled")
    assert len(graphs) == 1 and all(v.isfinite().all() for v in sums.values())
    cases.close(among, traced, atol=1e-5)


@options
def test_options_resume_bit_for_bit(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    case = cases.Case(name, False, tuple({**settings, "value_bins": 11}.items()))
    whole, _ = cases.train(case.make(), [0, 5], 7)
    state, step = cases.start(case.make(), [0, 5])
    state, _ = step.run(state, {}, 0, 3)
    checkpoint.write(tmp_path / "x", checkpoint.flatten(state), {})
    template, step = cases.start(case.make(), [0, 5])
    state, _ = step.run(checkpoint.unflatten(template, checkpoint.read(tmp_path / "x")[0], "x"), {}, 3, 4)
    cases.identical(state, whole)
    assert ("spectral/layers.0.weight" in checkpoint.flatten(state.extra)) == ("spectral_norm" in settings)


# ---- every head under every algorithm


def ones(discrete: bool) -> Dataset:
    """Episodes of one step, each with reward 1: Q is 1 at the data whatever the algorithm."""
    n = 300
    x = G.normal(size=(n, 4))
    known: dict[str, Any] = {"num_actions": 3} if discrete else {"action_low": -1.0, "action_high": 1.0}
    actions = G.integers(0, 3, n) if discrete else G.uniform(-1, 1, (n, 2))
    return add_returns_to_go(from_arrays(x, actions, np.ones(n), np.ones(n, bool), **known), 0.99)


UNMIXED = ("quantile", "gaussian")  # which hold no mixture, over actions or critics
ALWAYS = (("td3_bc", "scalar"), ("edac", "c51"))  # test_every_head_finds_the_exact_value_of_a_chain has every head
PAIRS = [
    pytest.param(name, head, marks=() if (name, head) in ALWAYS else pytest.mark.nightly, id=f"{name}-{head}")
    for name in TD
    for head in HEADS
    if head not in UNMIXED or name not in ("fql", "ifql", "qc")
]


@pytest.mark.parametrize(("name", "head"), PAIRS)
def test_critics_of_every_algorithm_find_a_constant(name: str, head: str) -> None:
    known = registry.get("algo", name).Config.__dataclass_fields__
    easy: dict[str, Any] = {
        "learning_rate": 1e-2,
        "polyak": 0.2,
        "value_head": head,
        "value_bins": 21,
        "conservative_weight": 0.01,
    }
    easy |= {"critics": 3, "value_range": [-2.0, 6.0], "hidden": [16], "batch_size": 32}
    easy |= {"length": 1} if name == "qc" else {}  # episodes of the data have one step
    easy |= {"model_steps": 20, "model_learning_rate": 1e-2} if name == "mbpo" else {}  # which knows when they end
    for discrete in (False, True):
        if discrete and (head in UNMIXED or not registry.get("algo", name).traits.discrete):
            continue
        case = cases.Case(name, discrete, tuple((k, v) for k, v in easy.items() if k in known))
        data = ones(discrete)
        algorithm = case.make(data)
        state, step = cases.start(algorithm, [0, 1], data)
        rows = [data.columns[k][:64] for k in ("observations", "actions")]
        error = lambda s: max(float((algorithm.q_value(select(s, i), *rows) - 1).abs().mean()) for i in (0, 1))  # noqa: B023, E731
        before = error(state)
        state, sums = step.run(state, {}, 0, 80)
        assert all(v.isfinite().all() for v in sums.values()) and ("critic/saturation" in sums) == (head in BINNED)
        assert error(state) < 0.3 and error(state) < 0.5 * before, (before, error(state))


def chain() -> Dataset:
    """Two states: from the first, reward 1, to the second; from there, reward 2, to the end. At 0.9 they are worth 2.8
    and 2.
    """
    n = 200
    observations = np.tile(np.eye(2), (n, 1))
    return from_arrays(
        observations,
        G.uniform(-1, 1, (2 * n, 1)),
        np.tile([1.0, 2.0], n),
        np.tile([False, True], n),
        action_low=-1.0,
        action_high=1.0,
    )


CHAINS = [("td3_bc", h) for h in HEADS] + [pytest.param("iql", h, marks=pytest.mark.nightly) for h in HEADS]


@pytest.mark.parametrize(("name", "head"), CHAINS)
def test_every_head_finds_the_exact_value_of_a_chain(name: str, head: str) -> None:
    kind, data = registry.get("algo", name), chain()
    config = kind.Config(value_head=head, discount=0.9, hidden=[32], learning_rate=1e-2, polyak=0.1, value_bins=31)
    algorithm = kind(kind.fit_config(config, data), data.spec)
    step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=64, replicas=1)
    state, sums = step.run(stack([algorithm.init(0)]), {}, 0, 300)
    one = select(state, 0)
    actions = torch.tensor([[-0.7], [0.7]])
    q = algorithm.q_value(one, torch.eye(2), actions)
    np.testing.assert_allclose(q, [2.8, 2.0], atol=0.1)
    if name == "iql":
        np.testing.assert_allclose(algorithm.value(one.params["value"], torch.eye(2)).mean, [2.8, 2.0], atol=0.1)
    _, late = step.run(state, {}, 300, 10)
    # values start in the middle of the range, so that some first targets lie beyond it, and no late ones
    if head in BINNED:
        assert 0.0 < float(sums["critic/saturation"]) < 100 and float(late["critic/saturation"]) == 0.0
