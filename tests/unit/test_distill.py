"""Small policies: fits by hand, C code that is the policy, and what cannot be a teacher."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import offrl
from offrl import registry, rng
from offrl.algorithm import Algorithm, TrainState, Traits
from offrl.algorithms.gbrl_awr import held_out_errors
from offrl.cli.main import main
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.transforms.columns import normalize_observations
from offrl.distilling import FILE
from offrl.distilling.measure import drifted
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.export import c_code
from offrl.export.check import check
from offrl.nn.students import Polynomial, Trees
from offrl.pretrained import Pretrained
from tests.support.cases import ALGORITHMS, Case

KEY = rng.make_key(0)
needs_cc = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler, cc")


def fit(net: Any, x: Tensor, y: Tensor, inside: Tensor, **settings: Any) -> Any:
    """The fitted module."""
    config = registry.get("algo", "distill").Config(**settings)
    params = {name: p.detach() for name, p in net.named_parameters()}
    net.load_state_dict(net.fit(params, x, y, inside, config, KEY))
    return net


def everywhere(y: Tensor) -> Tensor:
    return torch.ones_like(y, dtype=torch.bool)


# ---- fits


def test_a_clipped_product_is_found_with_two_terms() -> None:
    """a = clip(.5 x1 - x1 x2): from the rows inside the range exactly; the clipped ones would bend it to .25 and
    -.48."""
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(4_000, 2)))
    y = (0.5 * x[:, :1] - x[:, :1] * x[:, 1:]).clamp(-1.0, 1.0)
    net = fit(Polynomial(2, 1, 2, []), x, y, y.abs() < 1.0, into="sindy")
    assert net.size == (2, "terms", 2)
    plain = np.ones(1)
    assert net.formulas(["x1", "x2"], plain, 0 * plain) == ["-x1 x2 + 0.5 x1"]
    assert net.formulas(["x1", "x2"], 2 * plain, plain) == ["-2 x1 x2 + x1 + 1"]
    row = dict(zip(map(tuple, net.terms.tolist()), net.coefficients[0].tolist(), strict=True))
    assert row[1, 0] == pytest.approx(0.5, abs=1e-3) and row[1, 2] == pytest.approx(-1.0, abs=1e-3)
    bent = fit(net, x, y, everywhere(y), into="sindy").coefficients[0].tolist()
    row = dict(zip(map(tuple, net.terms.tolist()), bent, strict=True))
    assert row[1, 0] == pytest.approx(0.25, abs=0.03) and row[1, 2] == pytest.approx(-0.48, abs=0.03)


def test_a_formula_of_sines_and_one_without_rows() -> None:
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(500, 1)))
    net = fit(Polynomial(1, 1, 1, [0]), x, 0.5 * x.cos(), everywhere(x), into="sindy")
    assert net.formulas(["x"], np.ones(1), np.zeros(1)) == ["0.5 cos(x)"]
    with pytest.raises(UserError, match="action 0: the teacher is at an end of its range in all but 0 of 500 rows"):
        fit(net, x, x, ~everywhere(x))
    with pytest.raises(UserError, match=r"algo\.angles names observation 1, and there are 1: 0 to 0"):
        Polynomial(1, 1, 1, [1])


def test_a_tree_of_one_question_asks_for_the_sign() -> None:
    pytest.importorskip("sklearn")
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(500, 1))).float().double()
    net = fit(Trees(1, 1, 1, 1), x, x.sign(), everywhere(x))
    assert float(x[x < 0].max()) <= float(net.threshold) < float(x[x > 0].min())
    assert torch.equal(net(x.float()), x.sign().float()) and net.size == (2, "leaves", 4)


@pytest.mark.parametrize("count", [1, 3])
def test_trees_are_those_of_the_library(count: int) -> None:
    tree = pytest.importorskip("sklearn.tree")
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.normal(size=(300, 3))).float().double()
    y = torch.from_numpy(draw.normal(size=(300, 2))) + x[:, :2].sign()
    net = fit(Trees(3, 2, count, 4), x, y, everywhere(y), shrinkage=0.5)
    expected = np.zeros((300, 2)) if count == 1 else np.tile(y.mean(0).numpy(), (300, 1))
    scale = 1.0 if count == 1 else 0.5
    for _ in range(count):
        model = tree.DecisionTreeRegressor(max_depth=4, min_samples_leaf=1e-3, random_state=0)
        expected += scale * model.fit(x.numpy(), y.numpy() - expected).predict(x.numpy())
    np.testing.assert_allclose(net(x.float()).numpy(), expected, atol=1e-5)


def test_trees_imitate_actions_by_their_advantage() -> None:
    """gbrl_awr of one question: leaves are the weighted means of their rows' actions, and of more trees as many are
    kept as predict held-out rows best.
    """
    pytest.importorskip("sklearn")
    rows, kind = 1_000, registry.get("algo", "gbrl_awr")
    draw = np.random.default_rng(0)
    x, good = torch.from_numpy(draw.normal(size=(rows, 1))).float(), torch.arange(rows) % 2 == 0
    y = torch.where(good[:, None], 0.5 * x.sign(), torch.zeros(1))  # a bad action is 0
    source = {
        "observations": x,
        "actions": y,
        "weights": torch.where(good, 3.0, 1.0),
        "test": torch.arange(rows) >= 900,
    }
    dataset = from_arrays(x.numpy(), y.numpy(), np.zeros(rows, np.float32), truncations=np.arange(rows) == rows - 1)
    config = kind.Config(trees=2, max_depth=1, shrinkage=1.0, batch_size=20_000)
    algorithm = kind(config, dataset.spec)
    state, metrics = algorithm.refresh(algorithm.init(0), source, KEY, step=0)
    acted = TrainedPolicy(algorithm, state, 0).actor.act(None, torch.tensor([[-1.0], [1.0]]), KEY, explore=False)[0]
    assert acted.flatten().tolist() == pytest.approx([-0.375, 0.375], abs=0.02)  # 3 of 4 parts of +-0.5
    trees = Trees(1, 1, 2, 1)
    trees.value.data = torch.tensor([[[1.0], [1.0]], [[-1.0], [-1.0]]])
    errors = held_out_errors(trees, x[:2], torch.tensor([[0.0], [0.5]]), torch.tensor([3.0, 1.0]))
    assert errors.tolist() == pytest.approx([(3 * 1.0 + 0.25) / 4, 0.25 / 4])
    assert 1 <= float(metrics["trees"]) <= 2


# ---- students of a teacher


def rows(discrete: bool, normalised: bool) -> Dataset:
    draw = np.random.default_rng(0)
    count = 1_200
    columns: dict[str, Any] = {
        "observations": draw.normal(3.0, 2.0, (count, 3)).astype(np.float32),
        "actions": draw.integers(0, 3, count) if discrete else draw.uniform(-1, 1, (count, 2)).astype(np.float32),
        "rewards": draw.normal(size=count).astype(np.float32),
        "truncations": np.arange(count) % 100 == 99,
    }
    dataset = from_arrays(
        **columns, action_low=None if discrete else [-1, -1], action_high=None if discrete else [1, 1]
    )
    return normalize_observations(dataset) if normalised else dataset


def student(
    into: str, discrete: bool = False, normalised: bool = False, **settings: Any
) -> tuple[Algorithm, TrainState]:
    """A student of an untrained policy whose observations are normalised."""
    kind = ALGORITHMS["bc"]
    teacher = kind(kind.Config(hidden=[16, 16]), rows(discrete, True).spec)
    dataset, distill = rows(discrete, normalised), registry.get("algo", "distill")
    config = distill.Config(into=into, **{"updates": 300, "trees": 5, "max_depth": 3, **settings})
    pretrained = {"teacher": Pretrained(((teacher, teacher.init(4)), (teacher, teacher.init(7))), {}, "")}
    algorithm = distill(config, dataset.spec, pretrained)
    state = algorithm.init(7)
    fitted, metrics = algorithm.refresh(state, algorithm.sampler().prepare(dataset), KEY, step=0)
    assert {k: float(v) for k, v in metrics.items()} == {k: float(v) for k, v in fitted.extra.items()}
    return algorithm, fitted


@needs_cc
@pytest.mark.parametrize(
    ("into", "discrete", "normalised"),
    [
        ("tree", False, True),
        ("trees", False, False),
        ("sindy", False, False),
        ("linear", False, True),
        ("mlp", False, True),
        ("tree", True, False),
        ("mlp", True, True),
    ],
)
def test_c_code_is_the_policy(into: str, discrete: bool, normalised: bool) -> None:
    if into.startswith("tree"):
        pytest.importorskip("sklearn")
    algorithm, state = student(into, discrete, normalised)
    policy = TrainedPolicy(algorithm, state, 7)
    result = check(policy, False, c_code.compiled(policy, c_code.source(policy)), [], "cc")
    assert result.passed, result.failure
    assert result.largest <= 1e-6
    assert float(state.extra["r2"]) > 0.2  # of a smooth teacher, by a small student


def test_each_student_imitates_the_teacher_of_its_seed() -> None:
    algorithm, state = student("linear", normalised=True)
    teachers = algorithm.pretrained["teacher"].replicas
    x = torch.randn(50, 3)
    expected = teachers[1][0].actor(teachers[1][1]).act(None, x, KEY, explore=False)[0]
    torch.testing.assert_close(algorithm.labels(state, x), expected, atol=1e-5, rtol=0)  # type: ignore[attr-defined]
    # students see raw observations, the teacher normalised ones
    raw, state = student("linear", normalised=False)
    mean, std = map(torch.from_numpy, teachers[1][0].data_spec.observation_moments)
    torch.testing.assert_close(raw.labels(state, x * std + mean), expected, atol=1e-5, rtol=0)  # type: ignore[attr-defined]


# ---- the command


@needs_cc
def test_a_run_is_distilled_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # which takes seconds; test_export and the page of small policies make ONNX files
    monkeypatch.setattr("offrl.export.write.ONNX_PACKAGES", ("no_such_package",))
    draw = np.random.default_rng(0)
    dataset = from_arrays(
        observations=draw.normal(size=(400, 3)).astype(np.float32),
        actions=draw.uniform(-2, 2, (400, 1)).astype(np.float32),
        rewards=np.zeros(400, np.float32),
        truncations=np.arange(400) % 50 == 49,
        action_low=[-2.0],
        action_high=[2.0],
    )
    common: dict[str, Any] = {
        "quiet": True,
        "device": "cpu",
        "runs_dir": str(tmp_path),
        "settings": {"eval.episodes": 2, "eval.max_steps": 20, "eval.env": "Pendulum-v1"},
    }
    teacher = offrl.train("bc", dataset, seeds=[3, 5], steps=2, compare=[], **common)
    result = offrl.distill(teacher, "sindy", dataset=dataset, **common)
    assert result.algorithm == "distill-sindy" and result.seeds == [3, 5] and len(result.final_scores) == 2
    written = json.loads((result.dir / FILE).read_text())
    assert [s["seed"] for s in written["students"]] == [3, 5]
    for entry in written["students"]:
        assert entry["c"]["largest_difference"] <= 1e-6 and entry["c"]["microseconds"] > 0
        assert entry["formula"][0].startswith("act[0] = clip(") and entry["formula"][0].endswith(", -2, 2)")
        assert entry["visited"]["r2"] <= 1.0 and len(entry["largest_differences"]) == 5
    # played as the run itself was scored
    assert written["scores"]["student"]["per_seed"] == pytest.approx([r["return_mean"] for r in result.final_scores])
    assert written["scores"]["teacher"]["per_seed"] == pytest.approx([r["return_mean"] for r in teacher.final_scores])
    assert (result.dir / "export" / "seed_5" / "policy.c").exists()
    with pytest.raises(UserError, match=r"has no policy of seed 4 \(it was not trained, or diverged\); set seeds="):
        offrl.distill(teacher, "linear", dataset=dataset, seeds=[3, 4], **common)


def test_drift_is_fidelity_without_the_score() -> None:
    result: dict[str, Any] = {
        "students": [{"held_out": {"r2": 0.995}}],
        "scores": {"student": {"mean": -180.0}, "teacher": {"mean": -150.0}},
    }
    assert drifted(result)
    assert not drifted({**result, "students": [{"held_out": {"r2": 0.9}}]})
    assert not drifted({**result, "scores": {"student": {"mean": -160.0}, "teacher": {"mean": -150.0}}})


# ---- bad input


def test_who_can_be_no_teacher(tmp_path: Path) -> None:
    from offrl.families.teacher import check_imitable, check_memoryless

    for traits, kind in (
        (Traits(actions=("text",)), "a language policy"),
        (Traits(goal_conditioned=True), "a policy that takes goals"),
        (Traits(policy_modules=()), "a model"),
    ):
        with pytest.raises(UserError, match=f"^a run of x is {kind}, and a student maps .*distil a run of iql"):
            check_imitable("x", traits)
    memory = Case("dt").make()
    with pytest.raises(UserError, match=r"^a policy of dt remembers the episode, .* such as iql or td3_bc$"):
        check_memoryless(Pretrained(((memory, memory.init(0)),), {}, ""))
    with pytest.raises(UserError, match="algo=distill imitates a trained run: `offrl distill RUN into=tree`"):
        offrl.train("distill", rows(False, False), steps=1, seeds=1, compare=[], runs_dir=str(tmp_path), quiet=True)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UserError, match=r"there is no compiler 'no-such-compiler': install one \(apt install gcc\)"):
        c_code.compiler()


def test_c_code_of_another_policy() -> None:
    kind = ALGORITHMS["bc"]
    algorithm = kind(kind.Config(), rows(False, False).spec)
    with pytest.raises(UserError, match=r"format=c is for small policies .*, and this one is of bc"):
        c_code.source(TrainedPolicy(algorithm, algorithm.init(0), 0))


def test_the_command_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["distill"]) == 2
    assert "usage: offrl distill RUN into=tree|trees|sindy|linear|mlp" in capsys.readouterr().err
    assert main(["distill", "no-such-run", "into=tree"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
