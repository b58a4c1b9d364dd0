"""Shields: what they correct, what is counted, what they refuse, and the exported graph that holds them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import offrl
from offrl.api import Run
from offrl.cli.main import main
from offrl.envs.forbidden_disc import RADIUS
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.pool.protocol import from_bytes, to_bytes
from offrl.evaluation.shield import ShieldedPolicy
from offrl.evaluation.shield_kinds import (
    CANDIDATES,
    CriticShield,
    ModelShield,
    Rule,
    ShieldSettings,
    shield_of,
)
from offrl.export.write import export_policy
from offrl.settings.evaluation import EvalConfig
from offrl.system.user_code import function_of
from offrl.world_models.model import Prediction
from tests.support.cases import Case
from tests.support.documents import ROOT, blocks

RULES = '''
import numpy as np
import torch

def outside(observations, actions):
    """The nearest action whose step of 0.1 ends outside of the disc."""
    after = observations + 0.1 * actions
    size = after.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return torch.where(size < 0.82, (0.82 * after / size - observations) / 0.1, actions)

def slow(observations, actions, previous):
    return previous - 0.1, previous + 0.1

def reversed_bounds(observations, actions):
    return actions + 1.0, actions

def nan(observations, actions):
    return actions * float("nan")

def wide(observations, actions):
    return torch.zeros(5)

def elsewhere(observations, actions):
    return 2.0, 3.0

def in_numpy(observations, actions):
    return torch.from_numpy(np.clip(np.asarray(actions), -0.1, 0.1))
'''


@pytest.fixture(scope="module")
def rules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("rules") / "rules.py"
    file.write_text(RULES)
    return file


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = {"compile": "eager", "quiet": True, "eval.every": 0, "eval.episodes": 1, "compare": []}
    settings |= {"algo.hidden": [16], "algo.learning_rate": 0.01}
    folder = str(tmp_path_factory.mktemp("runs"))
    return offrl.train("bc", "forbidden-disc", seeds=2, steps=100, runs_dir=folder, settings=settings)


def policy_of(name: str = "td3_bc") -> TrainedPolicy:
    algorithm = Case(name).make()
    return TrainedPolicy(algorithm, algorithm.init(0), 0)


class Sum:
    """A model of s' = s + a with two members, the second of which says 0.1 more."""

    history, spec = 1, None

    def first_past(self, observations: Tensor) -> Tensor:
        return observations[:, None, :0]

    def predict(self, tree: Any, observations: Tensor, actions: Tensor, past: Tensor) -> Prediction:
        following = torch.stack([observations + actions, observations + actions + tree["more"]])
        return Prediction(following, following, following[..., 0], following[..., 0])

    def to_dataset_units(self, observations: Tensor, actions: Tensor, following: Tensor) -> tuple[Tensor, ...]:
        return observations, actions, following


def model_shield(more: float = 0.0, limit: float = 1.0, safe: float = -0.5) -> ModelShield:
    """Of one dimension, with the constraint s' <= limit."""
    one = np.ones(1, np.float32)
    policy: Any = SimpleNamespace(mean=None, std=None, low=-one, high=one, spec=None)
    tree = {"elites": torch.tensor([0, 1]), "more": torch.tensor(more)}
    trained: Any = SimpleNamespace(model=Sum(), tree=tree, path="m", check=lambda spec: None)
    return ModelShield(policy, trained, lambda s: s[:, 0] - limit, torch.tensor([safe]))


def test_the_nearest_action_whose_next_state_is_allowed() -> None:
    """s' = s + a <= 1 from 0.8: 0.5 becomes 0.2, or 0.1 where a member says 0.1 more; 0.1 stays to the bit."""
    s, a = torch.tensor([[0.8], [0.8]]), torch.tensor([[0.5], [0.1]])
    answer = model_shield()(s, a, a)
    assert answer.actions[0].item() == pytest.approx(0.2, abs=1e-4) and answer.actions[1] == a[1]
    assert not answer.unsolved.any() and not answer.faulty.any()
    assert model_shield(more=0.1)(s[:1], a[:1], a[:1]).actions.item() == pytest.approx(0.1, abs=1e-4)
    beyond = torch.tensor([[2.5]])  # where no action is short enough
    answer = model_shield()(beyond, a[:1], a[:1])
    assert answer.actions.item() == -0.5 and answer.unsolved.tolist() == [True]
    nan = model_shield()
    nan.function = lambda s: s[:, 0] * torch.nan
    assert nan(s, a, a).faulty.all()


def test_a_critic_of_costs_chooses_among_near_actions() -> None:
    """Q = sum a, the cost is a_0 + 10 in the second row; the limit is 0.1."""
    policy = policy_of()
    policy.algorithm.constraint = SimpleNamespace(  # type: ignore[attr-defined]
        threshold=0.1, cost=lambda params, x, a: a[:, 0] + 10.0 * x[:, 0]
    )
    policy.algorithm.q_value = lambda state, x, a: a.sum(-1)  # type: ignore[method-assign]
    policy.state = policy.state._replace(params={**policy.state.params, "cost_critic": {}})
    shield, width = CriticShield(policy), policy.spec.action_dim
    x = torch.zeros(3, policy.spec.observation_dim)
    x[1] = 1.0
    if policy.mean is not None and policy.std is not None:
        x = x * policy.std + policy.mean
    low, high = torch.from_numpy(policy.low), torch.from_numpy(policy.high)
    scaled = torch.tensor([0.2, 0.2, -0.4]).unsqueeze(1).expand(3, width)
    raw = low + (scaled + 1.0) * 0.5 * (high - low)
    answer = shield(x, raw, raw)
    near = (scaled[0] + shield.offsets.float()).clamp(-1.0, 1.0)
    allowed = near[near[:, 0] <= 0.1]
    assert 0 < len(allowed) <= CANDIDATES and answer.unsolved.tolist() == [False, True, False]
    chosen = 2.0 * (answer.actions - low) / (high - low) - 1.0
    torch.testing.assert_close(chosen[0], allowed[allowed.sum(1).argmax()])
    torch.testing.assert_close(chosen[1], near[near[:, 0].argmin()])  # none is cheap enough
    assert torch.equal(answer.actions[2], raw[2])


def test_a_rule_keeps_the_point_out_of_the_disc(run: Run, rules: Path) -> None:
    plain = run.evaluate(episodes=3)
    shielded = run.evaluate(episodes=3, shield=ShieldSettings(f"{rules}:outside"))
    assert plain.costs is not None and shielded.costs is not None and plain.shielded is None
    assert (plain.costs > 5).all() and (shielded.costs == 0).all()
    row = shielded.rows()[0]
    assert 0.1 < row["shielded"] < 1.0 and row["unsolved"] == 0.0 and 0.0 < row["shield_change"] < row["shielded"]
    assert "shielded" not in plain.rows()[0]


def test_the_rules_of_the_page(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "rules.py"
    codes = [text for language, text in blocks(ROOT / "docs" / "shields.md") if language == "python"]
    file.write_text("\n".join(codes[:2]))
    x = np.array([[-0.85, 0.0], [0.0, 0.85]], np.float32)
    for name in ("outside", "gentle"):
        policy = ShieldSettings(f"{file}:{name}").of(run.policy(0))
        actions, _ = policy.step(policy.start(2), x, 0)
        if name == "outside":
            assert bool((function_of(f"{file}:allowed", "")(torch.from_numpy(x + 0.1 * actions)) < 1e-4).all())


def test_a_rate_is_kept_from_the_second_step_on(run: Run, rules: Path) -> None:
    policy = ShieldSettings(f"{rules}:slow").of(run.policy(0))
    carry, actions = policy.start(2), []
    for t in range(4):
        raw, carry = policy.step(carry, np.array([[t % 2, -2.0], [-1.0, t % 2]], np.float32), t)
        actions.append(raw)
    np.testing.assert_array_equal(actions[0], run.policy(0).step(None, np.array([[0, -2.0], [-1, 0]]), 0)[0])
    assert np.abs(np.diff(actions, axis=0)).max() <= 0.1 + 1e-6


def test_a_policy_is_itself_where_nothing_is_corrected(run: Run) -> None:
    everything = ShieldSettings(lambda observations, actions: (-9.0, 9.0))
    np.testing.assert_array_equal(run.evaluate(episodes=2).returns, run.evaluate(episodes=2, shield=everything).returns)


def test_other_processes_read_the_rule_themselves(run: Run, rules: Path) -> None:
    policy, algorithms = ShieldSettings(f"{rules}:outside").of(run.policy(0)), []
    copy = from_bytes(to_bytes(policy, algorithms), algorithms)
    x = np.array([[-0.8, 0.0], [0.0, 1.5]], np.float32)
    for one in (copy, policy):
        np.testing.assert_array_equal(one.step(one.start(2), x, 0)[0], policy.step(policy.start(2), x, 0)[0])


def test_without_a_solution_the_safe_action_is_played_and_counted(run: Run, rules: Path) -> None:
    settings = ShieldSettings(f"{rules}:elsewhere", (0.5, -0.25))
    policy = settings.of(run.policy(0))
    actions, _ = policy.step(policy.start(2), np.zeros((2, 2), np.float32), 0)
    assert actions.tolist() == [[0.5, -0.25]] * 2
    evaluation = run.evaluate(episodes=1, max_steps=3, shield=settings)
    assert evaluation.rows()[0]["unsolved"] == 1.0


def test_the_command_shows_both_and_warns(run: Run, rules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(run.dir), f"shield={rules}:elsewhere", "episodes=1", "max_steps=9"]) == 0
    out, err = capsys.readouterr()
    assert all(header in out for header in ("steps changed", "no solution", "cost without", "return without"))
    assert "the shield changes more than 20% of the steps" in err


def test_perturbed_environments_have_shields_too(run: Run, rules: Path, tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("noise: [0, 0.01]")
    shield = ShieldSettings(f"{rules}:outside")
    scores = run.evaluate_robust(str(file), "grid:2", episodes=1, max_steps=15, shield=shield)
    assert all(e.shielded is not None for e in scores.evaluations)
    scores.write(tmp_path / "robust.csv")
    assert ",cost_normalized,safe,shielded,unsolved" in (tmp_path / "robust.csv").read_text().splitlines()[0]
    assert scores.evaluations[1].costs is not None and not scores.evaluations[1].costs.any()  # no noise


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["shield={}:reversed_bounds"],
            "it gave NaN, or a lower bound above the upper one (seed 0, episode 0, step 0)",
        ),
        (["shield={}:nan"], "it gave NaN, or a lower bound above the upper one"),
        (["shield={}:wide"], "it gave Tensor of shape [5]; actions of shape [1, 2] are due"),
        (["shield={}:outsid"], "Did you mean 'outside'?"),
        (["shield=outside"], "names no function: shield=file.py:FUNCTION"),
        (["shield={}:outside", "safe_action=[0,2]"], "2 numbers from [-1.0, -1.0] to [1.0, 1.0] are due"),
        (["shield=critic"], "train it with algo.cost_limit="),
        (["shield=model"], "needs constraint=file.py:FUNCTION"),
        (["shield={}:outside", "world_model=runs/x"], "belong to shield=model"),
        (["safe_action=[0,0]"], "belong to a shield"),
        (["shield={}:outside", "frequency=1,2"], "shield= and frequency= are different evaluations"),
    ],
)
def test_what_cannot_be(
    run: Run, rules: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    given = [word.format(rules) for word in words]
    assert main(["evaluate", str(run.dir), *given, "episodes=1", "max_steps=3"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and message in error[0]


def test_policies_that_no_shield_fits() -> None:
    with pytest.raises(UserError, match="bc has discrete actions here"):
        ShieldSettings("rules.py:outside").of(
            TrainedPolicy(*(lambda a: (a, a.init(0), 0))(Case("bc", discrete=True).make()))
        )
    sequences = Case("dt").make()
    with pytest.raises(UserError, match="dt has a memory of the actions that it chose here"):
        ShieldSettings("rules.py:outside").of(TrainedPolicy(sequences, sequences.init(0), 0))
    windows = Case("bc").make()
    windows.data_spec = dataclasses.replace(windows.data_spec, history_actions=2)
    with pytest.raises(UserError, match="bc has windows here"):
        ShieldSettings("rules.py:outside").of(TrainedPolicy(windows, windows.init(0), 0))
    assert shield_of(None, [], None, None) is None


def test_the_exported_graph_holds_the_rule(run: Run, rules: Path, tmp_path: Path) -> None:
    policy = ShieldSettings(f"{rules}:outside").of(run.policy(0))
    done = export_policy(policy, tmp_path / "p.pt2", "pt2")  # which compares both
    assert done.check.passed and json.loads(done.description.read_text())["policy"]["shield"] == f"{rules}:outside"
    program = torch.export.load(done.path).module()
    x = torch.tensor([[-0.9, 0.0], [-0.75, 0.35]])
    assert bool(((x + 0.1 * program(x)).norm(dim=-1) >= RADIUS).all())


def test_the_graph_takes_the_actions_before(run: Run, rules: Path, tmp_path: Path) -> None:
    done = export_policy(ShieldSettings(f"{rules}:slow").of(run.policy(0)), tmp_path / "p.pt2", "pt2")
    assert [one["name"] for one in done.metadata["inputs"]] == ["observations", "previous_actions"]
    program, x = torch.export.load(done.path).module(), torch.tensor([[-1.0, 0.0]] * 2)
    actions = program(x, torch.tensor([[0.0, 0.0], [torch.nan, torch.nan]]))
    assert float(actions[0].abs().max()) == pytest.approx(0.1) and float(actions[1].abs().max()) > 0.11


def test_what_the_graph_cannot_hold(run: Run, rules: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is not of torch alone"):
        export_policy(ShieldSettings(f"{rules}:in_numpy").of(run.policy(0)), tmp_path / "p.pt2", "pt2")
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_the_graph_of_a_model(run: Run, tmp_path: Path) -> None:
    policy = run.policy(0)
    tree = {"elites": torch.tensor([0, 1]), "more": torch.tensor(0.0)}
    trained: Any = SimpleNamespace(model=Sum(), tree=tree, path="m", check=lambda spec: None)
    shield = ModelShield(policy, trained, lambda s: s[:, 0] - 1.0, torch.zeros(2))
    assert export_policy(ShieldedPolicy(policy, shield), tmp_path / "p.pt2", "pt2").check.passed
    assert Rule(lambda o, a: a, policy, torch.zeros(2)).name == "<lambda>"


@pytest.mark.nightly
def test_a_film_shows_the_corrected_actions(run: Run, rules: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It compares its returns with the scores, and warns where they differ."""
    video = pytest.importorskip("offrl.video")
    pytest.importorskip("imageio_ffmpeg", reason="needs pip install 'offrl[video]'")
    shield = ShieldSettings(f"{rules}:outside")
    scored = run.evaluate(episodes=1, shield=shield)
    (path,) = video.film(run, EvalConfig(episodes=1), size=48, scored=scored, shield=shield, quiet=True)
    assert path.stat().st_size > 0 and "the return is" not in capsys.readouterr().err
