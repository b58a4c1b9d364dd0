"""A run goes on in the scale of observations that it began with, also where this version of offrl finds another in its
data.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import safetensors.torch
import torch

import offrl
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.transforms import columns
from offrl.data.transforms.columns import normalize_observations
from offrl.data.transforms.rescale import apart, in_scale_of
from offrl.errors import UserError
from offrl.finetuning.setup import begin

SMALL: dict[str, Any] = {
    "algo": "td3_bc",
    "seeds": 2,
    "log_every": 10,
    "checkpoint.every": 10,
    "compile": "eager",
    "algo.hidden": [8],
    "workers": 1,
    "algo.batch_size": 16,
    "device": "cpu",
    "eval.env": "none",
    "compare": [],
}


class Walk(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-99, 99, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, True, False, {}


def data() -> Dataset:
    """The first sensor in amperes: its spread is far below the floor of 1e-3 that version 0.1.0 added."""
    rng = np.random.default_rng(0)
    observations = np.stack([rng.normal(size=300) * 1e-4, rng.normal(size=300) + 3.0], 1)
    ends = np.arange(300) % 100 == 99
    actions = rng.uniform(-1, 1, (300, 1))
    return from_arrays(
        observations, actions, rng.normal(size=300), np.zeros(300, bool), ends, action_low=-1, action_high=1
    )


@pytest.fixture
def floor(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Scales as 0.1.0 found them, until `floor.undo()`."""
    monkeypatch.setattr(columns, "scales", lambda std, *_: std + 1e-3)
    yield monkeypatch


def test_a_run_that_goes_on_ends_as_it_would_have(
    tmp_path: Path, floor: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = {"runs_dir": str(tmp_path)}
    offrl.train(dataset=data(), steps=20, settings={**SMALL, **folder, "name": "whole"})
    offrl.train(dataset=data(), steps=10, settings={**SMALL, **folder, "name": "parts"})
    before = json.loads((tmp_path / "parts/run.json").read_text())["spec"]["observation_std"]
    floor.undo()
    capsys.readouterr()
    offrl.train(dataset=data(), steps=20, settings={**SMALL, **folder, "name": "parts"})
    said = capsys.readouterr().out
    assert "observations keep the scale that the run began with: they are divided in dimension 0 by 0.0011" in said
    assert json.loads((tmp_path / "parts/run.json").read_text())["spec"]["observation_std"] == before
    parts, whole = (
        safetensors.torch.load_file(tmp_path / name / "policies" / "seed_1.safetensors") for name in ("parts", "whole")
    )
    assert (
        all(torch.allclose(parts[key], whole[key], rtol=1e-4, atol=1e-6) for key in whole)
        and parts.keys() == whole.keys()
    )
    offrl.train(dataset=data(), steps=10, settings={**SMALL, **folder, "name": "new"})
    assert "keep the scale" not in capsys.readouterr().out


def test_fine_tuning_goes_on_in_the_scale_of_its_run(tmp_path: Path, floor: pytest.MonkeyPatch) -> None:
    run = offrl.train(dataset=data(), steps=10, settings={**SMALL, "runs_dir": str(tmp_path), "quiet": True})
    old = normalize_observations(data())
    floor.undo()
    start = begin(run.dir, {"mixing": 0.5, "steps": 10}, data(), Walk)
    assert (
        start.spec.observation_std == run.spec.observation_std == old.spec.observation_std and start.dataset is not None
    )
    assert torch.allclose(start.dataset.columns["observations"], old.columns["observations"], rtol=1e-6, atol=1e-7)
    assert any("keep the scale" in note for note in start.dataset.notes)


def test_what_is_alike_stays(floor: pytest.MonkeyPatch) -> None:
    old = normalize_observations(data())
    floor.undo()
    new = normalize_observations(data())
    assert apart(old.spec, new.spec).tolist() == [True, True] and in_scale_of(new, new.spec) is new
    assert (
        in_scale_of(data(), old.spec).spec.observation_std is None
    )  # not normalised here: another setting, which is refused elsewhere
    rounded = replace(new.spec, observation_std=tuple(x * (1 + 1e-7) for x in new.spec.observation_std or ()))
    assert in_scale_of(new, rounded).notes == new.notes  # as another machine rounds: nothing to say
    with pytest.raises(UserError, match=r"memory-mapped columns are not changed: continue with dataset\.memory=device"):
        in_scale_of(replace(new, mapped=True), old.spec)
