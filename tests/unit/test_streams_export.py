"""Exported policies of images: goals that are images, stacks of frames, the data's own frames."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.evaluation.policy import TrainedPolicy
from offrl.export.write import export_policy, recorded_observations
from tests.unit.test_streams import LATENT, data, images, make

onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


def policy(name: str, frames: int, **columns: Any) -> TrainedPolicy:
    dataset = data(frames=frames, encoder="drq", **columns)
    algorithm = make(name, dataset)
    return TrainedPolicy(algorithm, algorithm.init(0), 0)


@pytest.mark.parametrize(
    ("name", "alone"),
    [
        ("gciql", False),
        *(pytest.param(n, a, marks=pytest.mark.nightly) for n in ("hiql", "gcbc", "gciql") for a in (0, 1)),
    ],
)
def test_goals_of_images_are_inputs(tmp_path: Path, name: str, alone: bool) -> None:
    shown = {"front": images()} if alone else {"front": images(), "state": np.ones((40, 2), np.float32)}
    acting = policy(name, 2, observations=shown)
    exported = export_policy(acting, tmp_path / "p.onnx")
    assert exported.check.passed and exported.check.largest < 1e-5
    goals = [entry for entry in exported.metadata["inputs"] if entry["name"].startswith("goals_")]
    assert goals[-1]["name"] == "goals_front" and goals[-1]["shape"] == ["batch", 16, 16, 3]
    assert goals[-1]["dtype"] == "uint8" and len(goals) == len(shown)
    session = onnxruntime.InferenceSession(exported.path)
    for row, goal in ((3, 9), (3, 20)):
        inputs = {"front": np.tile(shown["front"][[row]], 2), "goals_front": shown["front"][[goal]]}
        if not alone:
            inputs |= {"vector": shown["state"][[row]], "goals_vector": shown["state"][[goal]]}
        acting.reset()
        due = acting.act({k: v[row] for k, v in shown.items()}, goal={k: v[goal] for k, v in shown.items()})
        np.testing.assert_allclose(session.run(None, inputs)[0][0], due, atol=1e-5)


@pytest.mark.nightly
@pytest.mark.parametrize("name", LATENT)
def test_policies_whose_networks_read_streams(tmp_path: Path, name: str) -> None:
    shown = {"front": images(), "state": np.ones((40, 2), np.float32)}
    acting = policy(name, 2, observations=shown)
    exported = export_policy(acting, tmp_path / "p.onnx")
    assert exported.check.passed and exported.check.largest < 1e-5


def test_stacks_of_frames_through_the_file(tmp_path: Path) -> None:
    acting = policy("iql", 3, observations={"front": images()})
    shown = recorded_observations(data(observations={"front": images()}, frames=3))
    exported = export_policy(acting, tmp_path / "p.onnx", shown=shown)
    assert exported.check.recorded == 40 and exported.check.largest < 1e-5
    entry = exported.metadata["inputs"][0]
    assert entry["frames"] == 3 and entry["order"].startswith("oldest first")
    session, frames = onnxruntime.InferenceSession(exported.path), images(50)
    for step in range(len(frames)):
        stack = np.concatenate([frames[max(0, step - back)] for back in (2, 1, 0)], -1)
        np.testing.assert_allclose(session.run(None, {"front": stack[None]})[0][0], acting.act(frames[step]), atol=1e-5)
