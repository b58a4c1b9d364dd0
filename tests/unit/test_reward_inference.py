"""Zero-shot policies that are told another reward: the task inferred from the data, both returns, the command, and who
cannot be told.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offrl
from offrl.api import Run
from offrl.cli.main import main
from offrl.data import load_dataset
from offrl.envs.point_mass import at_centre, at_ring
from offrl.errors import UserError
from offrl.evaluation import reward_inference
from offrl.evaluation.policy import TrainedPolicy

SMALL: dict[str, Any] = {"compile": "eager", "quiet": True, "eval.env": "none", "compare": []}
FB = {
    "algo.hidden": [8],
    "algo.inputs_hidden": [8],
    "algo.backward_hidden": [8],
    "algo.z_dim": 3,
    "algo.batch_size": 16,
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    settings = {
        **SMALL,
        **FB,
        "algo.inference_samples": 50,
        "dataset.normalize_observations": True,
        "dataset.reward_shift": -1.0,
    }
    return offrl.train(
        "fb", "point-mass", seeds=2, steps=3, runs_dir=str(tmp_path_factory.mktemp("runs")), settings=settings
    )


def rings(columns: dict[str, np.ndarray]) -> np.ndarray:
    assert columns["observations"].shape == (len(columns["rewards"]), 4) and columns["truncations"].tolist()[-1]
    np.testing.assert_array_equal(columns["observations"][1:], columns["next_observations"][:-1])
    # as recorded
    np.testing.assert_allclose(columns["rewards"], at_centre(columns["next_observations"][:, :2]), atol=1e-5)
    return at_ring(columns["next_observations"][:, :2])


def test_both_returns(run: Run, tmp_path: Path) -> None:
    earned = run.evaluate_on_reward(rings, episodes=3)
    data = load_dataset("point-mass")
    returns = at_ring(data.columns["next_observations"][:, :2].numpy()).reshape(-1, 50).sum(1)
    assert earned.name == "rings" and earned.data == pytest.approx(returns.mean(), rel=1e-4)
    # the same episodes, played by the policies that were told, which `save` keeps
    states, values, _ = reward_inference.sample(data, rings)
    assert states.shape == (10_000, 4)
    np.testing.assert_allclose(values, at_ring(states[:, :2]), atol=1e-6)
    told = [run.policy(seed).infer_task(states, values) for seed in (0, 1)]
    for policy, n in zip(told, range(2), strict=True):
        policy.save(tmp_path / "told.safetensors")
        loaded = TrainedPolicy.load(tmp_path / "told.safetensors")
        observations = states[:5]
        np.testing.assert_array_equal(loaded.act(observations), policy.act(observations))
        assert not np.array_equal(run.policy(n).act(observations), loaded.act(observations))
    assert (
        earned.returns.shape == (2, 3) == earned.evaluation.returns.shape
        and (earned.returns != earned.evaluation.returns).all()
    )
    own = run.evaluate_on_reward(lambda columns: columns["rewards"], episodes=3)
    np.testing.assert_allclose(own.returns, own.evaluation.returns, rtol=1e-4)  # the environment's own reward, told


def test_the_task_of_the_data_is_the_one_it_acts_for(run: Run) -> None:
    """Told the rewards of the states that it carries, a policy acts as it does."""
    policy = run.policy(0)
    kept = policy.state.extra
    assert kept["states"].shape == (50, 4) and policy.mean is not None and policy.std is not None
    raw = (kept["states"] * policy.std + policy.mean).numpy()
    np.testing.assert_allclose(kept["rewards"].numpy(), at_centre(raw[:, :2]) - 1.0, atol=1e-4)  # shifted, as the data
    again = policy.infer_task(raw, kept["rewards"].numpy())
    np.testing.assert_allclose(again.act(raw[:7]), policy.act(raw[:7]), atol=1e-4)


def test_command(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            ["evaluate", str(run.dir), "rewards=[offrl.envs.point_mass:ring,offrl.envs.point_mass:band]", "episodes=2"]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert "point_mass:ring" in text and "the environment's return" in text
    with open(run.dir / reward_inference.TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["rewards"][-4:], r["seed"]) for r in rows] == [
        ("ring", "0"),
        ("ring", "1"),
        ("band", "0"),
        ("band", "1"),
    ]
    assert all(float(r["return_mean"]) != float(r["environment_return_mean"]) for r in rows)


def test_what_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="say nothing of what to do"):
        run.evaluate_on_reward(lambda columns: np.zeros(len(columns["rewards"])), episodes=1)
    assert (
        main(["evaluate", str(run.dir), "rewards=nofile.py:f"]) == 2 and "no file nofile.py" in capsys.readouterr().err
    )
    bc = offrl.train(
        "bc", "point-mass", seeds=1, steps=2, runs_dir=str(tmp_path), settings={**SMALL, "algo.hidden": [4]}
    )
    with pytest.raises(UserError, match="a policy of bc has to be trained for other rewards"):
        bc.evaluate_on_reward("offrl.envs.point_mass:ring", episodes=1)
