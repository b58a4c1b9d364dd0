"""Perturbed environments: what each parameter changes, what a study is made of, and what is reported of it."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import mujoco
import numpy as np
import pytest
from gymnasium import spaces

import offrl
from offrl.api import Run
from offrl.cli.main import main
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.result import Evaluation
from offrl.evaluation.robust import RobustScores, worst_points
from offrl.evaluation.studies import RRLS, Study, study_of
from offrl.settings.evaluation import EvalConfig
from offrl.settings.replicas import Replica
from offrl.tasks.environments import make_env
from offrl.tasks.perturbed import Perturbation, PerturbedEnv, nominal_values, perturbed
from offrl.tasks.provenance import Provenance
from offrl.tasks.task import Task
from tests.support.documents import ROOT, blocks

HOPPER = Task("hopper", env_id="Hopper-v5")
POINTS = [{"friction.floor": f, "mass.torso": m} for f in (0.1, 2.13, 2.71) for m in (0.39, 1.55, 2.71)]


class Swing:
    """Actions that follow from the observation and the step."""

    perturbation: Perturbation | None = None

    def __init__(self, perturbation: Perturbation | None = None) -> None:
        self.perturbation = perturbation

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        return 0.1 * np.sin(3.0 * observations[:, :3] + 0.3 * t), None


def scored(task: Task, *perturbations: Perturbation | None, steps: int = 40) -> Evaluation:
    with Evaluator(task, EvalConfig(episodes=2, max_steps=steps, parallel=1)) as evaluator:
        return evaluator([Swing(p) for p in perturbations], [0] * len(perturbations))


def edited(change: Callable[[Any, Any], None]) -> Task:
    """Hopper whose model was edited by hand, once and for all."""

    def make() -> gym.Env:
        env = make_env(HOPPER)
        base: Any = env.unwrapped
        change(base.model, base.data)
        return env

    return Task("hopper", env_factory=make)


def rrls(point: dict[str, float]) -> Callable[[Any, Any], None]:
    """As RRLS sets them: by index, without a word to MuJoCo."""

    def change(model: Any, data: Any) -> None:
        model.geom_friction[0, 0] = point["friction.floor"]
        model.body_mass[1] = point["mass.torso"]

    return change


@pytest.mark.parametrize("points", [POINTS[:3], pytest.param([*POINTS, POINTS[0]], marks=pytest.mark.nightly)])
def test_a_grid_equals_environments_edited_by_hand(points: list[dict[str, float]]) -> None:
    """Bit for bit, one after the other in the same environments, and the environment as it is in the end."""
    together = scored(HOPPER, *(Perturbation(p, consistent=False) for p in points), None)
    for n, point in enumerate(points):
        np.testing.assert_array_equal(together.returns[n : n + 1], scored(edited(rrls(point)), None).returns)
    np.testing.assert_array_equal(together.returns[-1:], scored(HOPPER, None).returns)
    assert len(np.unique(together.returns)) > len(points)


def test_a_consistent_mass_has_its_inertia() -> None:
    def change(model: Any, data: Any) -> None:
        model.body_mass[1], factor = 2.0, 2.0 / model.body_mass[1]
        model.body_inertia[1] *= factor
        mujoco.mj_setConst(model, data)

    values = {"mass.torso": 2.0}
    consistent, parity = scored(HOPPER, Perturbation(values), Perturbation(values, consistent=False)).returns
    np.testing.assert_array_equal(consistent[None], scored(edited(change), None).returns)
    assert not np.array_equal(consistent, parity)


def test_models_are_as_they_were_afterwards() -> None:
    env = make_env(Task("ant", env_id="Ant-v5"))
    base: Any = env.unwrapped
    names = [n for n in dir(base.model) if isinstance(getattr(base.model, n), np.ndarray)]
    before = {n: getattr(base.model, n).copy() for n in names}
    values = {"mass.torso": 2.0, "friction": 3.0, "friction.floor": 0.2, "damping": 2.0, "gravity": 5.0}
    with perturbed([env], Perturbation(values)):
        model = base.model
        assert model.geom_friction[:, 0].max() == 3.0 and model.geom("floor").friction[0] == 0.2
        assert model.opt.gravity[2] == -5.0 and model.body("torso").mass == 2.0
        np.testing.assert_array_equal(model.dof_damping, 2.0 * before["dof_damping"])
        assert not np.array_equal(model.body_subtreemass, before["body_subtreemass"])
    for n in names:
        np.testing.assert_array_equal(getattr(base.model, n), before[n])


def test_a_parameter_that_there_is_not_is_no_silence() -> None:
    with (
        pytest.raises(ValueError, match="there is no parameter masses"),
        perturbed([make_env(HOPPER)], Perturbation({"masses": 2.0})),
    ):
        pass


def test_floors_below_the_friction_of_the_feet_change_nothing() -> None:
    points = [{"friction.floor": v} for v in (0.1, 0.39, 1.84, 2.42)]
    evaluation = scored(HOPPER, None, *(Perturbation(p) for p in points))
    study = Study("rrls:1", {"friction.floor": (0.1, 3.0)}, {"friction.floor": 1.0}, True)
    scores = RobustScores((Replica(0),), evaluation.split(1), study, tuple(points), (), (0, 1))
    assert scores.unchanged() == {"friction.floor": [[0.1, 0.39, 1.84]]}


class Echo(gym.Env):
    """Five steps; observes twice the number of the step, and remembers the actions."""

    observation_space = spaces.Box(-99, 99, (2,))
    action_space = spaces.Box(np.array([-1.0, 0.0]), np.array([1.0, 4.0]), dtype=np.float64)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.actions: list[list[float]] = []
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.actions.append(action.tolist())
        return np.full(2, len(self.actions), np.float32), 0.0, False, len(self.actions) == 5, {}


def play(seed: int, **values: float) -> tuple[np.ndarray, list[list[float]]]:
    """Observations [6, 2] of an episode whose action at step t is (t / 10, t), and the actions that were applied."""
    env = PerturbedEnv(Echo(), Perturbation(values, deviations=np.array([1.0, 10.0])))
    shown = [env.reset(seed=seed)[0]]
    shown += [env.step(np.array([t / 10, float(t)]))[0] for t in range(5)]
    return np.stack(shown), env.unwrapped.actions  # type: ignore[attr-defined]


def test_actions_come_late() -> None:
    assert play(0, delay=2.0)[1] == [[0.0, 2.0], [0.0, 2.0], [0.0, 0.0], [0.1, 1.0], [0.2, 2.0]]


def test_sensors_err_in_units_of_the_data() -> None:
    exact, noisy = play(3)[0], play(3, noise=0.1)[0]
    errors = noisy - exact
    assert noisy.dtype == np.float32 and 0.02 < np.abs(errors[:, 0]).mean() < 0.3
    assert 0.2 < np.abs(errors[:, 1]).mean() < 3.0
    np.testing.assert_array_equal(noisy, play(3, noise=0.1)[0])
    np.testing.assert_allclose(2 * errors, play(3, noise=0.2)[0] - exact, atol=1e-5)  # the same random numbers
    assert not np.allclose(noisy, play(4, noise=0.1)[0])


def test_sensors_that_drop_out_keep_their_last_value() -> None:
    np.testing.assert_array_equal(play(0, dropout=1.0)[0], np.zeros((6, 2)))
    steps = np.diff(np.concatenate([play(seed, dropout=0.3)[0] for seed in range(200)]).reshape(200, 6, 2), axis=1)
    assert 0.27 < (steps == 0.0).mean() < 0.33


def test_forces_push_along_the_axes_of_the_world() -> None:
    env = make_env(HOPPER)
    base: Any = env.unwrapped
    with perturbed([env], Perturbation({"force.foot.x": -3.0, "impulse.torso.z": 2.0})) as (windy,):
        windy.reset(seed=0)
        forces = []
        for _ in range(101):
            windy.step(np.zeros(3))
            forces.append(base.data.xfrc_applied.copy())
    foot, torso = (base.model.body(name).id for name in ("foot", "torso"))
    assert all(f[foot].tolist() == [-3.0, 0, 0, 0, 0, 0] for f in forces)
    assert [bool(f[torso, 2]) for f in forces] == [True] * 5 + [False] * 95 + [True]
    base.reset()
    assert not base.data.xfrc_applied.any()


def test_points_of_a_study() -> None:
    """RRLS's arange(0.1, 3, 0.29): 0.1, 0.39, ..., 2.71; a file's grid holds both ends."""
    ranges = {"friction.floor": (0.1, 3.0), "mass.torso": (0.1, 3.0)}
    study = Study("rrls", ranges, {"friction.floor": 1.0, "mass.torso": 3.665}, True)
    grid = study.points("grid")
    assert len(grid) == 100 and grid[0] == {"friction.floor": 0.1, "mass.torso": 0.1}
    np.testing.assert_allclose([p["mass.torso"] for p in grid[:10]], 0.1 + 0.29 * np.arange(10))
    axis = study.points("axis")
    assert len(axis) == 42 and {"mass.torso": 3.665} in axis and {"friction.floor": 1.0} in axis
    own = Study("my.yaml", {"delay": (0.0, 3.0), "gravity": (8.0, 12.0)}, {"delay": 0.0, "gravity": 9.81})
    assert own.points("grid:3") == [
        {"delay": d, "gravity": g}
        for d, g in itertools.product((0.0, 2.0, 3.0), (8.0, 10.0, 12.0))  # 1.5 is 2 steps
    ]
    latin = np.array([[p["delay"], p["gravity"]] for p in own.points("latin:20")])
    assert sorted(np.floor(5 * (latin[:, 1] - 8.0)).tolist()) == list(range(20))
    for text in ("gird", "grid:1", "latin:x"):
        with pytest.raises(UserError, match="points are grid, grid:5, latin:100 or axis"):
            own.points(text)


def evaluation_of(returns: np.ndarray) -> Evaluation:
    """[R, E]."""
    lengths = np.ones(returns.shape, np.int64)
    return Evaluation(returns, lengths, None, None, "t", Provenance("Toy-v0"), (0, 1), limits=np.full((2, 1), np.nan))


def scores_of(means: list[float], replays: dict[int, float], nominal: float) -> RobustScores:
    """Two seeds that lie 1 below and above these means."""
    around = np.array([[-1.0], [1.0]])
    evaluations = [evaluation_of(mean + around) for mean in (nominal, *means, *replays.values())]
    study = Study("my.yaml", {"gravity": (0.0, float(len(means)))}, {"gravity": 0.5})
    points = tuple({"gravity": float(i)} for i in range(len(means)))
    return RobustScores((Replica(0), Replica(1)), tuple(evaluations), study, points, tuple(replays), (0, 1))


def test_a_summary_by_hand() -> None:
    """25 points: CVaR 10% is the mean of the worst two and half of the third, played again; the interval of two seeds
    that differ by 2 is 12.7062 to each side."""
    means = [40.0 + i for i in range(25)]
    means[7], means[3], means[20] = 1.0, 2.0, 3.0
    assert worst_points(np.array(means)) == [7, 3, 20]
    (one,) = scores_of(means, {3: 8.0, 7: 6.0, 20: 10.0}, 50.0).summaries()
    assert one.point == 7 and one.nominal == pytest.approx((50.0, 50.0 - 12.7062, 50.0 + 12.7062), abs=1e-3)
    assert one.worst[0] == 6.0 and one.cvar[0] == pytest.approx((6.0 + 8.0 + 0.5 * 10.0) / 2.5)
    assert one.mean[0] == pytest.approx(np.mean(means))
    assert one.share is not None and one.share[0] == pytest.approx(
        0.86
    )  # 21 points reach 80% of 49, 22 reach 80% of 51
    (few,) = scores_of([3.0, 4.0], {0: 5.0}, -1.0).summaries()
    assert few.worst[0] == few.cvar[0] == 5.0 and few.share is None  # 80% of what is below 0 means nothing


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    random = np.random.default_rng(0)
    rows, ends = (300, 11), np.arange(300) % 100 == 99
    arrays = random.normal(size=rows), random.uniform(-1, 1, (300, 3)), random.normal(size=300)
    data = offrl.from_arrays(*arrays, terminations=0 * ends, truncations=ends)
    settings = {
        "compile": "eager",
        "quiet": True,
        "eval.every": 0,
        "eval.episodes": 1,
        "eval.max_steps": 5,
        "compare": [],
        "algo.hidden": [8],
    }
    folder = str(tmp_path_factory.mktemp("runs"))
    return offrl.train("bc", data, seeds=2, steps=2, env="Hopper-v5", runs_dir=folder, settings=settings)


def test_the_command_writes_its_files(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], pictures: dict[str, Any]
) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("friction.floor: [0.1, 0.5]\ndelay: [0, 2]\n")
    assert main(["evaluate", str(run.dir), f"robust={file}", "points=grid:3", "episodes=2", "max_steps=10"]) == 0
    out = capsys.readouterr().out
    assert "9 points" in out and "friction.floor 0.1, 0.3, 0.5: the same episodes" in out
    record = json.loads((run.dir / "robust.json").read_text())
    assert record["unchanged"] == {"friction.floor": [[0.1, 0.3, 0.5]]} and len(record["points"]) == 9
    assert record["played_again"][0]["point"] == record["cells"][0]["point"]
    rows = list(csv.DictReader((run.dir / "robust.csv").open()))
    assert len(rows) == 2 * (1 + 9 + 1) and rows[0]["friction.floor"] == "1.0" and rows[0]["delay"] == "0.0"
    assert [r["eval_seed"] for r in rows[-2:]] == ["1", "1"] and {r["point"] for r in rows} == set(map(str, range(10)))
    plain = run.evaluate(episodes=2, max_steps=10)
    assert [float(r["return_mean"]) for r in rows[:2]] == plain.returns.mean(1).tolist()
    page = (run.dir / "robust.html").read_text()
    assert "all 9 points" in page and "Values that change nothing" in page and "<svg" in page
    assert len(pictures["robust.png"].axes) == 1


@pytest.mark.parametrize("points", ["axis", "latin:6"])
def test_pictures_of_other_points(run: Run, tmp_path: Path, pictures: dict[str, Any], points: str) -> None:
    from offrl.report.robust import write_robust

    scores = run.evaluate_robust("contact:3" if points != "axis" else "rrls:1", points, episodes=1, max_steps=2)
    write_robust(scores, tmp_path, "bc")
    assert [a for a in pictures["robust.png"].axes if a.get_xlabel()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mass.torzo: [1, 2]", r"Hopper-v5 has no parameter 'mass.torzo'. Did you mean 'mass.torso'\?"),
        ("gravity: [9, 7]", r"gravity goes from 9 down to 7; write gravity: \[7, 9\]"),
        ("mass.torso: [0, 2]", "mass.torso from 0 to 2; it is in kg, above 0"),
        ("dropout: [0, 2]", "a probability, 0 to 1"),
        ("delay: [0, 1.5]", "a whole number of steps"),
        ("noise: [-0.1, 0.1]", "0 or more"),
        ("gravity: 9", r"write its lowest and highest value, gravity: \[0.5, 2\]"),
        ("gravity: [.nan, 9]", "write its lowest and highest value"),
        ("", "names no parameter"),
    ],
)
def test_files_that_say_what_cannot_be(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=message) as refusal:
        study_of(str(file), make_env(HOPPER), "Hopper-v5")
    assert "\n" not in str(refusal.value) and str(file) in str(refusal.value)


def test_studies_that_there_are_not(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("mass.pole: [1, 2]")
    hopper, pendulum = make_env(HOPPER), gym.make("Pendulum-v1")
    for text, env, message in (
        ("rrlz", hopper, "Did you mean 'rrls'"),
        ("rrls:4", hopper, "for Env it has 1 to 3 parameters"),
        ("none.yaml", hopper, "cannot read none.yaml"),
        ("rrls", pendulum, "no MuJoCo environment; of others noise, dropout, delay can be changed"),
        (str(file), pendulum, "no MuJoCo environment: its physics cannot be changed"),
        ("rrls", gym.make("Swimmer-v5"), "robust=rrls is for Ant, HalfCheetah, Hopper"),
        ("contact", gym.make("Ant-v5"), "robust=contact is for HalfCheetah, Hopper, Walker2d, not for Env"),
    ):
        with pytest.raises(UserError, match=message):
            study_of(text, env, "Env")
    assert {*nominal_values(gym.make("CartPole-v1"))} == {"noise", "dropout"}


def test_every_study_fits_its_robot() -> None:
    for robot, rows in RRLS.items():
        study = study_of(f"rrls:{len(rows)}", make_env(Task("x", env_id=f"{robot}-v5")), robot)
        assert len(study.points("grid")) == 10 ** len(rows)
    cheetah = make_env(Task("x", env_id="HalfCheetah-v4"))
    assert study_of("rrls:1", cheetah, "").ranges == {"friction": (0.1, 3.0)}
    assert study_of("contact", make_env(HOPPER), "").ranges == {"friction": (0.1, 3.0), "mass.torso": (0.1, 3.0)}


def test_the_file_of_the_page(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(next(text for language, text in blocks(ROOT / "docs" / "robustness.md") if language == "yaml"))
    assert len(study_of(str(file), make_env(HOPPER), "Hopper-v5").points("grid:2")) == 16


def test_data_without_an_environment(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = offrl.from_arrays(np.zeros((20, 2)), np.zeros((20, 1)), np.zeros(20), terminations=np.arange(20) % 10 == 9)
    settings = {"compile": "eager", "quiet": True, "compare": [], "algo.hidden": [8]}
    bc = offrl.train("bc", data, seeds=1, steps=1, runs_dir=str(tmp_path), settings=settings)
    assert main(["evaluate", str(bc.dir), "robust=rrls"]) == 2
    assert "there is no environment to score in; name one: offrl evaluate" in capsys.readouterr().err
