"""`offrl export` and `offrl evaluate video=true`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import offrl as library

Offrl = Callable[..., Any]


def refused(result: Any, *words: str) -> None:
    assert result.status == 2 and result.out == ""
    lines = result.err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("offrl: error: "), result.err
    for word in words:
        assert word in lines[0], (word, lines[0])


@pytest.mark.slow
def test_export(offrl: Offrl) -> None:
    ort = pytest.importorskip("onnxruntime", reason="needs pip install 'offrl[export]'")
    assert offrl("train algo=iql dataset.normalize_observations=true seeds=2 name=mine").status == 0
    done = offrl("export runs/mine seed=1")
    assert done.status == 0 and done.err == "", done.err
    assert (
        "observations [batch, 11] float32 -> actions [batch, 3] float32" in done.out
        and "checked with onnxruntime" in done.out
    )
    run = library.load("runs/mine")
    path = Path("runs/mine/export/seed_1/policy.onnx")
    observations = np.random.default_rng(0).normal(size=(20, 11)).astype(np.float32)
    found = ort.InferenceSession(path).run(None, {"observations": observations})[0]
    assert np.abs(found - run.policy(seed=1).act(observations)).max() < 1e-5
    about = json.loads(path.with_name("policy.json").read_text())
    assert about["policy"]["seed"] == 1 and about["policy"]["run"] == "mine" and about["policy"]["updates"] == 20
    assert about["dataset"]["fingerprint"] == run.record["data"]["fingerprint"]
    row = run.final_scores[1]
    own, everyone = about["scores"]
    assert own["return_mean"] == row["return_mean"] and own["episodes"] == 1 and own["return_95_percent"] is None
    assert everyone["return_mean"] == pytest.approx(np.mean([r["return_mean"] for r in run.final_scores]))
    assert everyone["return_95_percent"][0] < everyone["return_mean"] < everyone["return_95_percent"][1]
    assert len(about["inputs"][0]["dimensions"]) == 11 and {"mean", "std", "name", "unit"} <= set(
        about["inputs"][0]["dimensions"][3]
    )
    assert offrl("export runs/mine seed=1 format=pt2").status == 0
    files = json.loads(path.with_name("policy.json").read_text())["files"]
    assert set(files) == {"policy.onnx", "policy.pt2"}
    assert offrl("export runs/mine stochastic=true format=pt2 out=elsewhere/x.pt2").status == 0
    assert [p.name for p in sorted(Path("elsewhere").iterdir())] == ["x.json", "x.pt2"]
    refused(offrl("export runs/mien"), "Did you mean 'mine'")
    refused(offrl("export"), "usage")
    refused(offrl("export runs/mine seed=9"), "no seed 9", "0, 1")
    refused(offrl("export runs/mine formt=onnx"), "Did you mean 'format'")
    refused(
        offrl("export runs/mine format=torchscript"), "format=torchscript is not allowed", "choose one of onnx, pt2"
    )
    refused(offrl("export runs/mine temperature=3"), "no setting 'temperature'")
    refused(offrl("export runs/mine opset=11"), "opset=11", "18")
    refused(offrl("export runs/mine format=pt2 out=x.onnx"), "does not end in .pt2")
    refused(offrl("export runs/mine out=runs/mine/policies/seed_0.onnx"), "keeps its own policies")
    assert "stochastic=" in offrl("export --help").out
    run.dir.joinpath("policies", "seed_0.safetensors").write_bytes(b"half of it")
    refused(offrl("export runs/mine"), "seed_0.safetensors", "damaged")


def test_export_a_cell_of_a_grid(offrl: Offrl) -> None:
    assert offrl("train algo=bc grid.learning_rate=[1e-4,1e-2] seeds=1 name=mine eval.env=none").status == 0
    refused(offrl("export runs/mine format=pt2"), "learning_rate=0.0001 or learning_rate=0.01")
    refused(offrl("export runs/mine format=pt2 learning_rate=0.5"), "no policy with learning_rate=0.5")
    done = offrl("export runs/mine format=pt2 learning_rate=1e-2")
    assert done.status == 0, done.err
    (path,) = Path("runs/mine/export").rglob("policy.pt2")
    about = json.loads(path.with_suffix(".json").read_text())
    assert about["policy"]["cell"] == {"learning_rate": 0.01} and about["scores"] == []
    assert about["policy"]["settings"]["learning_rate"] == 0.01


@pytest.mark.slow
def test_evaluate_with_a_video(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio_ffmpeg", reason="needs pip install 'offrl[video]'")
    assert offrl("train algo=bc seeds=2 name=mine").status == 0
    command = "evaluate runs/mine episodes=2"
    plain = offrl(command)
    with monkeypatch.context() as patch:
        patch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
        without = offrl(f"{command} video=true")
    assert without.status == 0 and without.out == plain.out  # the scores all the same
    assert without.err.count("\n") == 1 and without.err.startswith(
        "offrl: warning: no video: the ffmpeg at /nowhere/ffmpeg"
    )
    with monkeypatch.context() as patch:
        patch.setenv("MUJOCO_GL", "disable")
        without = offrl(f"{command} video=true")
    assert without.status == 0 and without.out == plain.out
    assert without.err.count("\n") == 1 and "MUJOCO_GL=disable turns drawing off" in without.err
    monkeypatch.delenv("DISPLAY", raising=False)
    done = offrl(f"{command} video=true size=64 video_episodes=2")
    assert done.status == 0 and done.out.startswith(plain.out)
    refused(offrl(f"{command} video=maybe"), "video=maybe")
    refused(offrl(f"{command} vidoe=true"), "Did you mean 'video'")
    if done.err:
        pytest.skip(f"MuJoCo cannot draw here: {done.err}")
    assert sorted(p.name for p in Path("runs/mine/videos").iterdir()) == [
        "Hopper-v5-seed0-episode0.mp4",
        "Hopper-v5-seed0-episode1.mp4",
    ]


@pytest.mark.slow
def test_video_of_an_environment_whose_package_is_missing(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("imageio_ffmpeg", reason="needs pip install 'offrl[video]'")
    rng = np.random.default_rng(0)
    data = library.from_arrays(
        rng.normal(size=(60, 4)),
        rng.integers(2, size=60),
        np.ones(60),
        truncations=np.arange(60) % 20 == 19,
        num_actions=2,
        env="CartPole-v1",
    )
    library.train(
        "bc", data, seeds=2, steps=5, quiet=True, name="cart", compare=[],
        settings={"compile": "eager", "algo.hidden": [8], "eval.episodes": 1, "eval.every": 0},
    )  # fmt: skip
    import sys

    monkeypatch.setitem(sys.modules, "pygame", None)
    done = offrl("evaluate runs/cart episodes=1 video=true")
    assert done.status == 0 and "over seeds" in done.out
    assert done.err.count("\n") == 1 and "no video: CartPole-v1 cannot be drawn (pygame is not installed" in done.err
    assert offrl("export runs/cart format=pt2").out.count("actions [batch] int64") == 1
