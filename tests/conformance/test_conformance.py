"""What every registered algorithm must satisfy. A new one is picked up by itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.actor import NoisyActor
from offrl.algorithm import Algorithm, TrainState, select, stack, with_settings
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.settings.field import check
from offrl.settings.replicas import varied
from offrl.system import files as checkpoint
from offrl.training.compiling import ahead
from offrl.training.step import Step
from offrl.training.updates import metric_means
from tests.support.cases import (
    ACTING,
    ALGORITHMS,
    ALL,
    BASE,
    BATCH,
    BATCHED,
    OWN_LAYERS,
    REPRESENTATIVES,
    WAITING,
    Case,
    a_batch,
    begin,
    close,
    copy,
    data,
    each,
    goals,
    identical,
    representatives,
    start,
    train,
)
from tests.support.tiers import nightly_but

# ---- replicas

UPDATES = 6  # whole patterns of every period, and two refreshes


@each(representatives(BATCHED))
def test_seed_3_alone_is_seed_3_among_8(case: Case) -> None:
    algorithm = case.make()
    alone, alone_sums = train(algorithm, [3], UPDATES)
    among, among_sums = train(algorithm, list(range(8)), UPDATES)
    # a gradient that is nothing but rounding is a whole step of Adam, up or down; another seed differs by 0.1
    close(select(alone, 0).params, select(among, 3).params, atol=1e-3)
    close(select(alone, 0).target, select(among, 3).target, atol=1e-3)
    assert torch.equal(alone.key[0], among.key[3]) and int(among.step[3]) == UPDATES
    a, b = metric_means(alone_sums, UPDATES), metric_means(among_sums, UPDATES)
    for name, value in a.items():
        assert float(value[0]) == pytest.approx(float(b[name][3]), rel=1e-3, abs=1e-4), name
    first = [select(among, i).params for i in range(8)]
    for i, j in itertools.combinations(range(8), 2):  # and no two seeds are alike
        assert any(not torch.equal(x, y) for x, y in zip(*(pytree.tree_leaves(first[k]) for k in (i, j)), strict=True))


@each(representatives(BATCHED))
def test_trains_in_bfloat16(case: Case) -> None:
    """Under autocast, with LayerNorm where there is a choice; parameters and sums of metrics stay float32."""
    known = {f.name for f in dataclasses.fields(ALGORITHMS[case.name].Config)}
    norms = {name: True for name in ("layer_norm", "actor_layer_norm") if name in known and case.name not in OWN_LAYERS}
    algorithm = case.make(**norms)
    state, sums = train(algorithm, [0, 1], 2 * algorithm.traits.period, precision="bf16")
    assert all(
        v.dtype == torch.float32 and v.isfinite().all() for v in [*pytree.tree_leaves(state.params), *sums.values()]
    )


@each(representatives(BATCHED))
def test_a_replica_of_nan_harms_no_other(case: Case) -> None:
    algorithm = case.make()
    state, step = start(algorithm, [0, 1, 2])
    poisoned = copy(state)
    for leaf in pytree.tree_leaves(poisoned.params):
        leaf[1] = float("nan")
    updates = 6 if algorithm.every else 3  # after a refresh from poisoned parameters, one from poisoned updates
    clean, clean_sums = step.run(state, {}, 0, updates)
    sick, sick_sums = step.run(poisoned, {}, 0, updates)
    for i in (0, 2):
        identical(select(clean, i), select(sick, i))
        assert all(torch.equal(clean_sums[k][i], sick_sums[k][i]) for k in clean_sums)
    assert any(sick_sums[k][1].isnan() for k in sick_sums)


@each(representatives([c for c in ALL if ALGORITHMS[c.name].traits.vectorized]))
def test_a_point_of_a_grid_is_as_alone(case: Case) -> None:
    """For all settings at once that no mark forbids: one that decided shapes, branches or batches would fail, or be the
    other point's.
    """
    algorithm = case.make()
    given = {name: getattr(algorithm.config, name) for name in varied(type(algorithm.config))}
    if given.get("cost_limit") is None:  # `fit_config` has a limit of a grid's: without one there are no costs
        given = {name: x for name, x in given.items() if name not in ("cost_limit", "cost_horizon")}
    other = {name: 0.4 if x is None else 0.9 * x for name, x in given.items()}
    hyper = {name: torch.tensor([0.5 if x is None else x, other[name]]) for name, x in given.items()}
    source = algorithm.sampler().prepare(data(algorithm.spec.discrete))
    step = Step(algorithm, source, batch_size=BATCH, replicas=2, hyper=hyper)
    begun = stack([algorithm.init(0), with_settings(algorithm, other).init(0)])
    alone = type(algorithm)(dataclasses.replace(algorithm.config, **other), algorithm.spec, algorithm.pretrained)
    updates = algorithm.traits.period
    _, among_sums = step.run(begun, {}, 0, updates)
    _, alone_sums = train(alone, [0], updates)
    for name, value in metric_means(alone_sums, updates).items():
        assert float(value[0]) == pytest.approx(
            float(metric_means(among_sums, updates)[name][1]), rel=1e-3, abs=1e-4
        ), name


# ---- tracing


@each(
    [
        pytest.param(c, marks=pytest.mark.slow if str(c) in ("iql", "dt", "mopo") else pytest.mark.nightly)
        for c in BATCHED
    ]
)
def test_traces_in_one_graph(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.compile, which compiles what is not made a library ahead of time."""
    monkeypatch.setattr(ahead, "available", lambda: False)
    real, graphs = torch.compile, []

    def backend(module: Any, inputs: Any, **options: Any) -> Any:
        graphs.append(module)
        return module

    monkeypatch.setattr(
        torch, "compile", lambda f, **kw: real(f, backend=backend, **{k: v for k, v in kw.items() if k != "backend"})
    )
    known = {f.name for f in dataclasses.fields(ALGORITHMS[case.name].Config)}
    # tracing takes longer the more operations there are
    algorithm = case.make(**{k: v for k, v in {"hidden": [16], "layers": 1}.items() if k in known})
    # a pattern twice, and for delayed actors a part of one
    updates = 2 * algorithm.traits.period + algorithm.traits.period - 1
    eager, eager_sums = train(algorithm, [0, 1], updates)
    traced, traced_sums = train(algorithm, [0, 1], updates, mode="compiled")
    assert len(graphs) == 1
    close(eager, traced, atol=1e-5)
    close(dict(sorted(eager_sums.items())), dict(sorted(traced_sums.items())), atol=1e-3)


@pytest.mark.parametrize(
    "own", [(), pytest.param(("gated", "dense"), marks=pytest.mark.nightly)], ids=["libraries", "kernels"]
)
@each([pytest.param(c, marks=() if str(c) == "td3_bc" else pytest.mark.nightly) for c in BATCHED])
def test_is_traced_ahead_of_time(case: Case, own: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a library is made of it, but for the compiler: the traced operations themselves are run, or what the passes
    make of them with kernels of our own wherever one fits."""
    calls: list[int] = []

    def library(work: ahead.Work, trees: tuple[Any, ...], subject: Any) -> Any:
        leaves, structure = pytree.tree_flatten(trees)
        graph, constants = ahead._traced(work, leaves, structure)
        if own:
            graph = with_kernels(graph, [*(x.clone() for x in leaves), *constants], own, monkeypatch)

        def run(*trees: Any) -> None:
            calls.append(len(constants))
            graph(*pytree.tree_leaves(trees), *constants)

        return run

    monkeypatch.setattr(ahead, "Library", library)
    monkeypatch.setattr(ahead, "available", lambda: True)
    algorithm = case.make()
    updates = 2 * algorithm.traits.period + algorithm.traits.period - 1
    eager, eager_sums = train(algorithm, [0, 1], updates)
    traced, traced_sums = train(algorithm, [0, 1], updates, mode="compiled")
    assert len(calls) == 3  # the comparison with the uncompiled pattern, and two patterns
    # EDAC makes 4e-5 of another order of sums; gradients of Director's worker near 0 come through the whole model
    atol = 5e-4 if case.name == "director" else 1e-4
    close(eager, traced, atol=atol if own else 1e-5, outliers=1e-3 if own else 0.0)
    rtol = 1e-4 if own else 0.0  # BREEZE's losses are in the hundreds
    close(dict(sorted(eager_sums.items())), dict(sorted(traced_sums.items())), atol=1e-3, rtol=rtol)


def with_kernels(
    graph: fx.GraphModule, inputs: list[Tensor], own: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> fx.GraphModule:
    """A traced update in the operators that Inductor compiles, as the passes leave it; the tests' networks are
    small.
    """
    from torch._inductor.decomposition import select_decomp_table

    from offrl.training.compiling import kernels, passes

    if kernels.native() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setattr(passes, "SMALL", 4)
    graph = make_fx(graph, decomposition_table=select_decomp_table(), tracing_mode="fake")(*inputs)
    passes.Simpler(own)(graph.graph)
    graph.graph.lint()
    graph.recompile()
    return graph


def test_what_moves_to_another_name_is_read_before_it_is_overwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiled step writes its results over the old state; here the target becomes the parameters before the
    update.
    """
    monkeypatch.setattr(torch, "compile", lambda f, **kw: f)
    monkeypatch.setattr(ahead, "available", lambda: False)
    algorithm = Case("td3_bc").make()
    monkeypatch.setattr(
        type(algorithm),
        "polyak",
        lambda self, state, name, rate=None: state._replace(target={**state.target, name: self.old[name]}),
    )
    real = type(algorithm).update

    def update(self: Any, state: TrainState, *rest: Any, **phase: int) -> Any:
        self.old = state.params
        return real(self, state, *rest, **phase)

    monkeypatch.setattr(type(algorithm), "update", update)
    eager, _ = train(algorithm, [0, 1], 6)
    written, _ = train(algorithm, [0, 1], 6, mode="compiled")
    close(eager, written, atol=1e-6)


@pytest.mark.slow
@pytest.mark.skipif(not any(shutil.which(c) for c in ("c++", "g++", "clang++")), reason="no C++ compiler")
def test_inductor_agrees_with_eager() -> None:
    """One algorithm stands for all: compiling costs seconds. Dropout's noise comes from keys inside the compiled
    function.
    """
    algorithm = Case("bc").make(dropout=0.2)
    eager, eager_sums = train(algorithm, [0, 1, 2], 20)
    compiled, step = start(algorithm, [0, 1, 2], mode="compiled")
    sums: dict[str, Tensor] = {}
    for first, count in ((0, 1), (1, 7), (8, 12)):  # however long the slices are
        compiled, sums = step.run(compiled, sums, first, count)
    close(eager, compiled)
    close(eager_sums, sums, atol=1e-3)
    assert torch.equal(eager.key, compiled.key) and torch.equal(eager.step, compiled.step)
    torch._dynamo.reset()


# ---- resuming


def moments(algorithm: Algorithm) -> tuple[int, ...]:
    """When to interrupt. Period 2: inside a pattern, between two, inside again. One moment is as good as another where
    all are alike.
    """
    return (1, 4, 7) if algorithm.traits.period > 1 or type(algorithm).refresh is not Algorithm.refresh else (2,)


@each(representatives(ALL))
def test_resumes_bit_for_bit(case: Case, tmp_path: Path) -> None:
    """Interrupted at every moment that differs, and each time taken up from a file by a new algorithm and a new
    step.
    """
    algorithm = case.make()
    seeds = [0, 5] if algorithm.traits.vectorized else [0]
    interruptions = moments(algorithm)
    updates = interruptions[-1] + 2  # where it is refreshed, that happens after each interruption
    whole, whole_sums = train(algorithm, seeds, updates)
    state, step = start(case.make(), seeds)
    sums: dict[str, Tensor] = {}
    first = 0
    for interrupted in interruptions:
        state, sums = step.run(state, sums, first, interrupted - first)
        checkpoint.write(tmp_path / "x", checkpoint.flatten({"state": state, "sums": sums}), {"step": interrupted})
        del state, sums, step

        tensors, meta = checkpoint.read(tmp_path / "x")  # in a new process
        template, step = start(case.make(), seeds)
        state = checkpoint.unflatten({"state": template}, tensors, "x")["state"]
        sums = {k.removeprefix("sums/"): v for k, v in tensors.items() if k.startswith("sums/")}
        first = meta["step"]
    state, sums = step.run(state, sums, first, updates - first)
    identical(state, whole)
    assert sorted(sums) == sorted(whole_sums)
    for name in sums:  # the metrics of the interval that the interruptions cut
        assert torch.equal(sums[name], whole_sums[name]), name


# ---- purity


PRETRAINED = {("rambo", "dynamics")}  # modules that begin as those of a run that came first, whatever the seed


@each([pytest.param(c, marks=pytest.mark.nightly if c.settings else ()) for c in ALL])
def test_init_depends_on_the_seed_alone(case: Case) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    algorithm = case.make()
    first = algorithm.init(3)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    identical(case.make().init(3), first)
    other = algorithm.init(4)
    assert not torch.equal(other.key, first.key)
    for name, params in first.params.items():
        if (case.name, name) in PRETRAINED:
            continue
        # one learnt number, such as the weight of an entropy, starts as a constant
        single = sum(p.numel() for p in params.values()) == 1
        assert single or any(not torch.equal(p, other.params[name][k]) for k, p in params.items()), name
    for name in algorithm.traits.targets:
        identical(first.target[name], first.params[name])


@each([pytest.param(c, marks=pytest.mark.nightly if c.settings else ()) for c in ALL])
def test_update_is_a_pure_function(case: Case) -> None:
    algorithm = case.make()
    state, batch, key = algorithm.init(0), a_batch(algorithm), rng.make_key(1)
    kept = copy((state, batch))
    for phase in range(algorithm.traits.period):
        torch.manual_seed(phase)
        new, metrics = algorithm.update(state, batch, key, phase=phase)
        torch.manual_seed(phase + 10)
        again, _ = algorithm.update(state, batch, key, phase=phase)
        identical(new, again)
        identical(kept, (state, batch))
        assert all(v.shape == () and v.isfinite() for v in metrics.values()) and metrics
        for a, b in zip(pytree.tree_leaves(state), pytree.tree_leaves(new), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype


# ---- what trains what


@each([pytest.param(c, marks=pytest.mark.nightly if c.settings else ()) for c in ALL])
def test_each_loss_trains_its_own_module_and_targets_only_follow(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = case.make()
    descended: list[str] = []
    followed: list[str] = []
    descend, polyak = Algorithm.descend, Algorithm.polyak

    def spy_descend(self: Algorithm, state: TrainState, name: str | tuple[str, ...], *args: Any, **joint: Any) -> Any:
        before, names = copy(state), (name,) if isinstance(name, str) else name
        new, *more = descend(self, state, name, *args, **joint)  # type: ignore[misc]
        identical(before, state)
        for module in names:
            assert all(not torch.equal(v, before.params[module][k]) for k, v in new.params[module].items()), (
                f"{module}: a parameter does not learn"
            )
            assert int(new.opt[module]["count"]) == int(before.opt[module]["count"]) + 1  # type: ignore[arg-type]
        params, opt = ({n: getattr(before, part)[n] for n in names} for part in ("params", "opt"))
        identical(new._replace(params={**new.params, **params}, opt={**new.opt, **opt}), before)
        descended.extend(names)
        return new, *more

    def spy_polyak(self: Algorithm, state: TrainState, name: str, rate: Any = None) -> TrainState:
        before, rate = copy(state), self.config.polyak if rate is None else rate
        new = polyak(self, state, name, rate)
        expected = {k: v + rate * (before.params[name][k] - v) for k, v in before.target[name].items()}
        close(new.target[name], expected, atol=1e-6)
        identical(new._replace(target=before.target), before)
        identical({**new.target, name: 0 * rng.make_key(0)}, {**before.target, name: 0 * rng.make_key(0)})
        followed.append(name)
        return new

    state, batch = algorithm.init(0), a_batch(algorithm)
    if case.name in WAITING:
        state, _ = algorithm.update(state, batch, rng.make_key(1), phase=0)
    monkeypatch.setattr(Algorithm, "descend", spy_descend)
    monkeypatch.setattr(Algorithm, "polyak", spy_polyak)
    if algorithm.every:  # which may teach modules, too
        state, _ = algorithm.refresh(state, start(algorithm, [0])[1].source, rng.make_key(2), step=0)
    taught, copied = {*descended}, {*followed}
    for phase in range(algorithm.traits.period):
        descended.clear()
        followed.clear()
        new, _ = algorithm.update(state, batch, rng.fold_in(rng.make_key(0), phase), phase=phase)
        for group, moved in ((("params", "opt"), descended), (("target",), followed)):
            for part in group:
                for name, value in getattr(new, part).items():
                    if name not in moved:
                        identical(value, getattr(state, part)[name])
        assert len(set(descended)) == len(descended)
        state = new
    assert taught | {*descended} == {*state.params}, "in the last phase of a pattern every module learns"
    assert copied | {*followed} == {*algorithm.traits.targets}


@each(representatives(ALL))
def test_the_optimiser_has_the_configured_learning_rate(case: Case) -> None:
    """With a learning rate of 0 nothing moves but the statistics."""
    fields = [f.name for f in dataclasses.fields(ALGORITHMS[case.name].Config) if f.name.endswith("learning_rate")]
    algorithm = case.make(**dict.fromkeys(fields, 0.0))
    begun, step = start(algorithm, [1])
    if algorithm.every:  # to take over a trained model before the first update is no learning
        begun, _ = step._refresh(begun, {}, 0, {})
    before = copy(begun.params)
    state, _ = step.run(begun, {}, 0, 2 * algorithm.traits.period)
    identical(state.params, before)


# ---- settings


@pytest.mark.parametrize("name", ALGORITHMS)
def test_settings(name: str) -> None:
    kind = ALGORITHMS[name]
    config = kind.Config()
    check(config)
    assert config.name == name and kind.__doc__ and kind.Config.__doc__
    for field in dataclasses.fields(config):
        assert field.name == "name" or field.metadata.get("help"), f"{name}.{field.name} has no help text"
    changed = dataclasses.replace(config, batch_size=config.batch_size + 1)
    for c in (config, changed):
        assert kind.Config(**json.loads(json.dumps(dataclasses.asdict(c)))) == c
    with pytest.raises(UserError, match="batch_size=0 is out of range"):
        check(dataclasses.replace(config, batch_size=0))
    if kind.__module__.startswith("offrl."):  # not of a plugin
        text = (resources.files("offrl.configs") / "algo" / f"{name}.yaml").read_text()
        assert name in text, "configs/algo has a file for every algorithm"


@pytest.mark.parametrize("name", nightly_but({c.split("-")[0] for c in REPRESENTATIVES}, ALGORITHMS))
def test_every_choice_of_a_setting_makes_networks(name: str) -> None:
    for field in dataclasses.fields(ALGORITHMS[name].Config):
        for choice in field.metadata.get("choices") or ():
            if choice == "value_gradient":  # asks for a trained run: tests/golden/test_value_gradient.py
                continue
            penalty = {"penalty": 0.0} if (field.name, choice) == ("uncertainty", "none") else {}  # else refused
            assert Case(name).make(**{field.name: choice, **penalty}).init(0).params


# ---- acting


@each(representatives(ACTING))
def test_act(case: Case, tmp_path: Path) -> None:
    algorithm, seed = case.make(), 3
    trained, _ = train(algorithm, [seed], 4)
    state, spec = select(trained, 0), algorithm.spec
    actor = algorithm.actor(state)
    obs = 5 * torch.randn(64, spec.observation_dim, generator=torch.Generator().manual_seed(0))
    actions: dict[bool, Tensor] = {}
    for explore in (False, True):
        actions[explore], _ = actor.act(begin(actor, 64), obs, rng.make_key(0), explore=explore)
        again, _ = actor.act(begin(actor, 64), obs, rng.make_key(0), explore=explore)
        other, _ = actor.act(begin(actor, 64), obs, rng.make_key(1), explore=explore)
        assert torch.equal(actions[explore], again)
        # a deterministic policy has no noise, but where it is to be trained on in an environment (IQL's and its
        # relatives')
        noisy = explore and (
            getattr(algorithm.config, "policy", "") != "deterministic" or isinstance(actor, NoisyActor)
        )
        noisy |= explore and spec.discrete
        # generative policies draw when they are scored, too
        drawn = getattr(algorithm.config, "greedy", "") == "sample"
        assert torch.equal(actions[explore], other) == (not (noisy or drawn))
        assert torch.equal(actions[explore], actions[False]) == (drawn or not noisy)
        if spec.discrete:
            assert actions[explore].shape == (64,) and actions[explore].dtype == torch.int64
            assert int(actions[explore].min()) >= 0 and int(actions[explore].max()) < spec.num_actions
        else:
            assert actions[explore].shape == (64, spec.action_dim) and actions[explore].dtype == torch.float32
            assert float(actions[explore].abs().max()) <= 1.0

    # the memory is a tree of tensors with the episodes first: restored from its leaves, it goes on as before
    carry = begin(actor, 64)
    for t in range(2):
        _, carry = actor.act(carry, obs, rng.make_key(t), explore=False)
        carry = actor.observe_reward(carry, torch.ones(64))
    leaves, tree = pytree.tree_flatten(carry)
    assert all(leaf is None or isinstance(leaf, int) or len(leaf) == 64 for leaf in leaves)
    restored = pytree.tree_unflatten([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree)
    assert torch.equal(*(actor.act(memory, obs, rng.make_key(2), explore=False)[0] for memory in (carry, restored)))

    if actor.resettable and begin(actor, 4) is not None:  # on any device, for which torch's meta device stands
        elsewhere = algorithm.actor(pytree.tree_map(lambda x: x.to("meta"), state))
        elsewhere.begin_anew(elsewhere.start(4), torch.zeros(4, dtype=torch.bool, device="meta"))

    policy = TrainedPolicy(algorithm, state, seed)
    raw = (obs * torch.tensor(spec.observation_std) + torch.tensor(spec.observation_mean)).numpy()
    where = goals(algorithm, 64) * torch.tensor(spec.observation_std) + torch.tensor(spec.observation_mean)
    goal = where.numpy() if policy.goal_conditioned else None
    greedy = policy.act(raw, goal=goal)
    if drawn:  # with the key of an episode's first step
        actions[False], _ = actor.act(begin(actor, 64), obs, rng.fold_in(state.key, -1), explore=False)
    expected = actions[False].numpy()
    if not spec.discrete:  # in the environment's range
        low, high = np.array([-2.0, 0.0]), np.array([2.0, 4.0])
        expected = low + (expected + 1) / 2 * (high - low)
        assert (greedy >= low).all() and (greedy <= high).all()
    np.testing.assert_allclose(greedy, expected, atol=1e-4)
    policy.reset()
    row = 0 if drawn else 5  # noise is a row's own
    alone = policy.act(raw[row], goal=None if goal is None else goal[row])
    np.testing.assert_allclose(alone, greedy[row], atol=1e-5)  # one observation is a batch of one
    policy.reset()

    q = algorithm.q_value(state, obs, actions[False])
    assert (q is None) == (not algorithm.traits.critic_modules)
    found = policy.own_value(raw, greedy)  # from raw observations and actions
    if q is None:
        assert found is None
    else:
        critic = algorithm.q_value(state, obs.flip(0), actions[False].flip(0))
        assert (
            q.shape == (64,)
            and critic is not None
            and torch.allclose(critic.flip(0), q, atol=1e-4)
            and float(q.std()) > 0
        )
        assert found is not None
        np.testing.assert_allclose(found, q.numpy(), atol=1e-3 * float(q.abs().max()))

    policy.save(tmp_path / "policy.safetensors")
    loaded = TrainedPolicy.load(tmp_path / "policy.safetensors")
    assert loaded.seed == seed and loaded.algorithm.config == algorithm.config and loaded.algorithm.spec == spec
    for t, explore in ((0, False), (0, True), (3, True)):
        a, b = (p.step(p.set_goal(p.start(64), goal), raw, t, explore)[0] for p in (policy, loaded))
        assert np.array_equal(a, b), "a policy read from its file acts as before"
        assert a.dtype == (np.int64 if spec.discrete else np.float32)
    early, late = (policy.step(policy.set_goal(policy.start(64), goal), raw, t, explore=True)[0] for t in (0, 3))
    assert np.array_equal(early, late) == (not noisy), "every time step explores anew"
    tensors, _ = checkpoint.read(tmp_path / "policy.safetensors")
    assert {k.split("/")[1] for k in tensors if k.startswith("params/")} == set(algorithm.traits.policy_modules)
    assert not any(k.startswith(("opt/", "target/")) for k in tensors)
    # critics that choose among drawn actions
    critics = set(algorithm.traits.critic_modules)
    assert (loaded.own_value(raw, greedy) is not None) == (
        critics > set() and critics <= set(algorithm.traits.policy_modules)
    )


@each([c for c in BASE if c in ACTING])
def test_a_policy_refuses_what_is_no_observation(case: Case, tmp_path: Path) -> None:
    algorithm = case.make()
    policy = TrainedPolicy(algorithm, algorithm.init(0), 0)
    for wrong in (np.zeros(3), np.zeros((2, 5)), np.zeros((1, 2, 4)), 1.0):
        with pytest.raises(UserError, match="observation has shape"):
            policy.act(wrong)
    with pytest.raises(UserError, match="NaN or infinity"):
        policy.act([0.0, float("nan"), 0.0, 0.0])
    checkpoint.write(tmp_path / "x", {"w": torch.ones(1)}, {"kind": "checkpoint"})
    with pytest.raises(UserError, match="not a policy file"):
        TrainedPolicy.load(tmp_path / "x")
