"""VaGraM's weights: gradients of trained critics by central differences in float64 NumPy, other units, and what weights
are good for.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl.algorithm import select, stack
from offrl.algorithms.dynamics import Dynamics
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.transforms.apply import apply_transforms
from offrl.errors import UserError
from offrl.runs.record import directory
from offrl.settings.compose import compose
from offrl.settings.train import TrainConfig
from offrl.system import files as checkpoint
from offrl.training import stages
from offrl.training.step import Step
from offrl.world_models import value_gradient
from offrl.world_models.dynamics import DynamicsSettings
from offrl.world_models.model import load
from offrl.world_models.value_gradient import weights
from tests.support.reference import mlp as ref

OBS, A = 3, 1
QUIET: dict[str, Any] = {"quiet": True, "experiment": "none", "env": "none", "compare": [], "workers": 1}
AGENT = {"algo.hidden": [6, 5], "algo.batch_size": 16, "compile": "eager"}


def arrays(seed: int = 0, observations: int = OBS, scale: float = 1.0) -> Dataset:
    g, n = np.random.default_rng(seed), 200
    s = scale * (2.0 + 3.0 * g.normal(size=(n, observations)) * np.arange(1, observations + 1))
    options: dict[str, Any] = {"action_low": -1.0, "action_high": 1.0}
    return from_arrays(
        s, g.uniform(-1, 1, (n, A)), g.normal(size=n), np.arange(n) % 50 == 49, np.arange(n) % 50 == 24, **options
    )


def agent(folder: Path, name: str = "td3_bc", dataset: Dataset | None = None, **settings: Any) -> offrl.Run:
    given = {**AGENT, **settings}
    data = arrays() if dataset is None else dataset
    return offrl.train(
        name,
        data,
        seeds=2,
        steps=2,
        runs_dir=str(folder),
        name=f"{name}-{len(list(folder.iterdir()))}",
        settings=given,
        **QUIET,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> offrl.Run:
    return agent(tmp_path_factory.mktemp("runs"))


def newest(run: Path) -> Path:
    return max((run / "checkpoints").glob("step_*"))


def known(dataset: Dataset) -> torch.Tensor:
    return torch.nonzero(dataset.columns["successor_known"]).squeeze(-1)


def np_squares(run: offrl.Run, raw: np.ndarray, unit: np.ndarray | float) -> np.ndarray:
    """[R, O]: the mean over seeds and critics of (dQ(s, pi(s)) / ds)^2 at raw observations, with the step along each
    entry in `unit`s.
    """
    tensors, _ = checkpoint.load_latest(run.dir)  # type: ignore[misc]
    spec = run.record["spec"]
    mean, std = (np.array(spec[k]) if spec[k] else d for k, d in (("observation_mean", 0.0), ("observation_std", 1.0)))
    found, step = [], 1e-5
    for seed in range(2):
        nets = {
            m: {
                k.removeprefix(f"state/params/{m}/"): v[seed]
                for k, v in tensors.items()
                if k.startswith(f"state/params/{m}/")
            }
            for m in ("actor", "critic")
        }
        actor = ref.net(nets["actor"], "net.")
        for e in range(2):
            critic = ref.net(nets["critic"], member=e)

            def value(at: np.ndarray, actor: ref.Net = actor, critic: ref.Net = critic) -> np.ndarray:
                s = (at - mean) / std
                return ref.forward(critic, np.concatenate([s, np.tanh(ref.forward(actor, s)[0])], 1))[0][:, 0]

            moves = step * np.eye(raw.shape[1]) * unit
            found.append(np.stack([(value(raw + m) - value(raw - m)) / (2 * step) for m in moves], 1) ** 2)
    return np.mean(found, 0)


def critics(path: Path | str, dataset: Dataset) -> Any:
    """What a run with `value_run=path` is handed."""
    return stages.load(path, dataset.spec, "algo.value_run", value_gradient.required())


def following(dataset: Dataset, rows: torch.Tensor) -> np.ndarray:
    return dataset.columns["next_observations"][rows].numpy().astype(np.float64)


def test_the_weights_are_squared_gradients_of_mean_1(run: offrl.Run) -> None:
    data = arrays()
    rows = known(data)
    expected = np_squares(run, following(data, rows), 1.0)
    found = weights(critics(run.dir, data), data, rows[10:40], quantile=1.0)
    assert found.shape == (30, OBS + 1) and (found[:, -1] == 1).all()
    np.testing.assert_allclose(found[:, :-1], (expected / expected.mean())[10:40], rtol=2e-3, atol=2e-3)
    everything = weights(critics(run.dir, data), data, rows, quantile=1.0)
    assert float(everything[:, :-1].mean()) == pytest.approx(1.0, rel=1e-4)


def test_long_gradients_are_shortened(run: offrl.Run) -> None:
    data = arrays()
    rows = known(data)
    square = np_squares(run, following(data, rows), 1.0)
    length = square.sum(1, keepdims=True)
    expected = square * np.minimum(1.0, np.quantile(length, 0.7) / length)
    assert (expected < square).mean() > 0.2
    np.testing.assert_allclose(
        weights(critics(run.dir, data), data, rows, quantile=0.7)[:, :-1],
        expected / expected.mean(),
        rtol=5e-3,
        atol=5e-3,
    )


@pytest.mark.parametrize(("agents", "models"), [(False, True), (True, False), (True, True)])
def test_other_units_follow_the_chain_rule(tmp_path: Path, agents: bool, models: bool) -> None:
    """Of the agent's data, of the model's, or of both the observations are normalised; with other statistics."""
    run = agent(tmp_path, **{"dataset.normalize_observations": agents})
    recorded = arrays(1, scale=0.5)
    settings = {"algo": "td3_bc", "dataset.normalize_observations": models}
    data = apply_transforms([recorded], compose(settings | {"dataset": "x", "experiment": "none"}).dataset)
    assert (data.spec.observation_mean is not None) == models
    rows = known(data)
    unit = np.array(data.spec.observation_std) if models else 1.0
    expected = np_squares(run, following(recorded, rows), unit)
    np.testing.assert_allclose(
        weights(critics(run.dir, data), data, rows, quantile=1.0)[:, :-1],
        expected / expected.mean(),
        rtol=5e-3,
        atol=5e-3,
    )


def test_seeds_that_diverged_do_not_count(tmp_path: Path, run: offrl.Run) -> None:
    data = arrays()
    shutil.copytree(run.dir, tmp_path / "sick")
    path = newest(tmp_path / "sick")
    tensors, meta = checkpoint.read(path)
    meta = {k: v for k, v in meta.items() if k not in ("version", "sha256")}
    broken = {k: v.clone() for k, v in tensors.items()}
    for name, value in broken.items():
        if name.startswith("state/params/critic"):
            value[1] = torch.nan
    broken["alive"][1] = False
    checkpoint.write(path, broken, meta)
    assert len(critics(tmp_path / "sick", data).replicas) == 1
    assert torch.isfinite(weights(critics(tmp_path / "sick", data), data, known(data))).all()
    broken["alive"][0] = False
    checkpoint.write(path, broken, meta)
    with pytest.raises(UserError, match="all its replicas diverged"):
        weights(critics(tmp_path / "sick", data), data, known(data))


def test_what_has_no_values_is_refused(tmp_path: Path, run: offrl.Run) -> None:
    data, rows = arrays(), known(arrays())
    clone = agent(tmp_path, "bc")
    shutil.copytree(run.dir, tmp_path / "shipped")
    shutil.rmtree(tmp_path / "shipped" / "checkpoints")
    for path, words in (
        (str(tmp_path / "nowhere"), "value_run=.*nowhere: there is no run; name a run directory$"),
        (str(clone.dir), "bc learns no values; take a run of .*iql"),
        (str(tmp_path / "shipped"), "has no checkpoint"),
    ):
        with pytest.raises(UserError, match=words):
            weights(critics(path, data), data, rows)
    with pytest.raises(UserError, match=r"observation_shape=\(3,\), and .* has \(4,\)"):
        weights(critics(run.dir, arrays(observations=4)), arrays(observations=4), rows)


def test_a_value_that_does_not_move_says_nothing(run: offrl.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    data = arrays()
    monkeypatch.setattr(
        value_gradient, "slopes", lambda algorithm, state, observations: torch.zeros(2, *observations.shape)
    )
    with pytest.raises(UserError, match="do not change with the observation"):
        weights(critics(run.dir, data), data, known(data))


# ---- what it is good for


def system(rows: int = 1500) -> Dataset:
    """Entry 0 is what counts; 1 and 2 are large distractors that fill a small network if all entries count alike."""
    g = np.random.default_rng(0)
    s = g.uniform(-1, 1, (rows, 3))
    a = g.uniform(-1, 1, (rows, 1))
    following = np.stack(
        [0.3 * np.tanh(3 * s[:, 0]) + 0.3 * a[:, 0], 2 * np.sin(6 * s[:, 1]), 2 * np.cos(6 * s[:, 2])], 1
    )
    ends, cut = np.zeros(rows, bool), np.ones(rows, bool)  # episodes of one step
    return from_arrays(s, a, -(s[:, 0] ** 2), ends, cut, next_observations=following, action_low=-1.0, action_high=1.0)


def steep(run: Path, values: np.ndarray) -> None:
    """Make the critics of a run's checkpoint the linear function values . (s, a) + 1000, with one hidden layer that
    stays open.
    """
    path = newest(run)
    tensors, meta = checkpoint.read(path)
    width = tensors["state/params/critic/layers.0.weight"].shape[-1]
    for name, value in tensors.items():
        if name.startswith("state/params/critic/"):
            value.zero_()
    tensors["state/params/critic/layers.0.weight"][..., 0] = torch.tensor(values, dtype=torch.float32)
    tensors["state/params/critic/layers.0.bias"][..., 0] = 1000.0
    tensors["state/params/critic/head.weight"][..., 0, 0] = 1.0
    assert width >= 1
    checkpoint.write(path, tensors, {k: v for k, v in meta.items() if k not in ("version", "sha256")})


@pytest.mark.nightly
def test_a_tiny_model_learns_what_matters(tmp_path: Path) -> None:
    data = system()
    run = agent(tmp_path, "td3_bc", data, **{"algo.hidden": [4]})
    steep(run.dir, np.array([1.0, 0.0, 0.0, 0.0]))
    found = weights(critics(run.dir, data), data, known(data))
    np.testing.assert_allclose(found.numpy(), np.tile([3.0, 0.0, 0.0, 1.0], (len(found), 1)), atol=1e-5)

    errors = {}
    for loss in ("squared", "value_gradient"):
        settings: dict[str, Any] = {
            "hidden": [3],
            "members": 5,  # by itself one in ten learns little more than with the other loss
            "elites": 5,
            "learning_rate": 1e-2,
            "batch_size": 128,
            "epoch": 25,
            "termination": "never",
        }
        config = DynamicsSettings(loss=loss, value_run=str(run.dir) if loss == "value_gradient" else "", **settings)
        pretrained = {"value_run": critics(run.dir, data)} if loss == "value_gradient" else {}
        algorithm = Dynamics(Dynamics.fit_config(config, data), data.spec, pretrained)
        step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=1, replicas=1)
        state, _ = step.run(stack([algorithm.init(0)]), {}, 0, 401)
        tree = {**algorithm.tree(select(state, 0)), "scale": torch.ones(4)}
        o, a = data.columns["observations"], data.columns["actions"]
        prediction = algorithm.model.predict(tree, o, a, algorithm.model.first_past(o))
        errors[loss] = (prediction.mean - data.columns["next_observations"]).square().mean((0, 1))
    assert errors["value_gradient"][0] < 0.7 * errors["squared"][0]  # 0.37 +- 0.08 over seeds
    assert errors["value_gradient"][1] > errors["squared"][1]  # and does not learn what does not


def test_which_critics_is_part_of_what_the_model_is(tmp_path: Path, run: offrl.Run) -> None:
    data = arrays()

    def fitted(**settings: Any) -> TrainConfig:
        config = TrainConfig(algo=DynamicsSettings(**settings), seeds=[0], label="dynamics")
        return stages.ready(config, data)[0]

    with pytest.raises(UserError, match=r"algo\.value_run=.* where algo\.loss=value_gradient, and it is likelihood"):
        fitted(value_run=str(run.dir))
    with pytest.raises(UserError, match="name its run"):
        fitted(loss="value_gradient")
    other = agent(tmp_path, **{"algo.learning_rate": 1e-2})
    names = [directory(fitted(loss="value_gradient", value_run=str(r.dir)), data).name for r in (run, other, run)]
    assert names[0] == names[2] != names[1]


def test_a_model_is_trained_with_them(tmp_path: Path, run: offrl.Run) -> None:
    settings = {
        "algo.hidden": [4],
        "algo.members": 2,
        "algo.epoch": 2,
        "algo.loss": "value_gradient",
        "algo.value_run": str(run.dir),
    }
    found = offrl.train(
        "dynamics",
        arrays(),
        seeds=1,
        steps=4,
        runs_dir=str(tmp_path),
        settings={**settings, "compile": "eager"},
        **QUIET,
    )
    identity = found.record["identity"]["algo"]
    # where it lies is no part of what the model is
    assert "value_run" not in identity and len(identity["value_run_id"]) == 16
    model = load(found.dir)
    assert torch.isfinite(model.tree["scale"]).all() and model.model.config.loss == "value_gradient"
