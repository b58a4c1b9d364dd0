"""Rewards of a classifier that learns success from images: thresholds, held-out episodes, files, the command."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl import rng
from offrl.cli.main import main
from offrl.data import DatasetConfig, load_dataset
from offrl.data.dataset import Dataset
from offrl.data.transforms.reward_labels import label_rewards
from offrl.errors import UserError
from offrl.relabel.held_out import held_out_rows, precise, success_rows
from offrl.relabel.success import BalancedSampler, LabelledImages, SuccessClassifier, SuccessSettings
from offrl.settings.encoder import EncoderConfig
from offrl.system import files

EPISODES, LENGTH, SIZE = 20, 6, 16
ROWS = EPISODES * LENGTH


@functools.cache
def values() -> dict[str, Any]:
    """Episodes in which a bright square moves right; those of even number reach the edge in their frame 3."""
    draw = np.random.default_rng(0)
    frames = draw.integers(0, 60, (ROWS, SIZE, SIZE, 3)).astype(np.uint8)
    step, even = np.arange(ROWS) % LENGTH, np.arange(ROWS) // LENGTH % 2 == 0
    for row, column in enumerate(2 * step * (1 + even)):
        frames[row, 6:10, min(column, SIZE - 4) : column + 4] = 250
    success = even & (step >= 2)  # what the steps led to; of the last one that is not known
    actions = draw.uniform(-1.0, 1.0, (ROWS, 2)).astype(np.float32)
    ends = step == LENGTH - 1
    return {
        "observations": frames,
        "actions": actions,
        "rewards": np.zeros(ROWS),
        "truncations": ends,
        "success": success,
    }


def data(**changes: Any) -> Dataset:
    return offrl.from_arrays(**values() | changes, action_low=-1.0, action_high=1.0)


SETTINGS = SuccessSettings(updates=60, batch_size=32, learning_rate=2e-3, hidden=[16])
ENCODER = EncoderConfig(width=16, shift=1)


@pytest.fixture(scope="module")
def model() -> SuccessClassifier:
    return SuccessClassifier.fit(data(), "success", SETTINGS, ENCODER, quiet=True)


def test_rewards_are_success_on_other_data(model: SuccessClassifier, tmp_path: Path) -> None:
    assert min(model.accuracy, model.precision, model.recall) > 0.9 and model.threshold is not None
    model.save(path := tmp_path / "success.safetensors")
    loaded = SuccessClassifier.load(path)
    assert loaded.spec == model.spec and loaded.digest() == model.digest()
    labelled = label_rewards(data(), str(path))
    rewards = labelled.columns["rewards"].numpy()
    assert set(rewards) == {0.0, 1.0} and (rewards == values()["success"]).mean() > 0.95
    flipped = SuccessClassifier(model.spec, model.hidden, model.params, model.scale)  # without a threshold
    probability = label_rewards(data(), flipped).columns["rewards"]
    assert torch.equal((probability >= model.threshold).float(), labelled.columns["rewards"])
    assert len(probability.unique()) > 10
    with pytest.raises(
        UserError, match=r"learnt on images pixels \[16, 16, 3\], and these data have \[15, 16, 3\]: read"
    ):
        label_rewards(data(observations=values()["observations"][:, 1:]), str(path))
    tensors, meta = files.read(path)
    for key, value in (
        ("hidden", [10**9]),
        ("threshold", "high"),
        ("scale", None),
        ("spec", []),
        ("spec", {**meta["spec"], "encoder": None}),
    ):
        files.write(path, tensors, {**meta, key: value})
        with pytest.raises(UserError, match=r"success\.safetensors"):
            SuccessClassifier.load(path)


def test_batches_hold_as_much_success_as_failure() -> None:
    dataset, source = data(), values()
    success = success_rows(dataset, "success")
    rows = torch.nonzero(~success).squeeze(-1), torch.nonzero(success).squeeze(-1)
    batch = BalancedSampler()(LabelledImages(dataset.stores, rows), rng.make_key(0), 9)
    assert batch["label"].tolist() == [0.0] * 4 + [1.0] * 5
    following = np.where(np.arange(ROWS) % LENGTH == LENGTH - 1, np.arange(ROWS), np.arange(ROWS) + 1)
    for image, label in zip(batch["observations"]["pixels"].numpy(), batch["label"], strict=True):
        row = np.flatnonzero((source["observations"][following] == image).all((1, 2, 3)))
        assert (source["success"][row] == bool(label)).all() and len(row) > 0


def test_whole_episodes_are_held_out() -> None:
    dataset, success = data(), success_rows(data(), "success")
    rows = held_out_rows(dataset, success, 0.2, 0).reshape(EPISODES, LENGTH)
    assert (rows.all(1) | ~rows.any(1)).all()
    assert rows[::2, 0].sum() == rows[1::2, 0].sum() == 2  # a fifth of those with success, and of those without
    first = {k: v[: 2 * LENGTH] for k, v in values().items()}
    with pytest.raises(UserError, match=r"1 of 2 episodes have success; .* two with success and two with failure"):
        held_out_rows(data(**first), success[: 2 * LENGTH], 0.2, 0)


def test_the_threshold_is_the_smallest_that_is_precise() -> None:
    truth = torch.tensor([True, True, False, True, False])
    probability = torch.tensor([0.9, 0.8, 0.4, 0.3, 0.1])
    assert precise(probability, truth, "x") == pytest.approx(0.6)
    assert precise(probability, truth | True, "x") == pytest.approx(0.05)
    with pytest.raises(UserError, match=r"no threshold rewards success alone on held-out episodes .* 50% are success"):
        precise(torch.tensor([0.9, 0.8]), truth[2:4], "x")
    with pytest.raises(UserError, match="no threshold"):  # equal rows are rewarded alike
        precise(torch.tensor([0.9, 0.9]), truth[1:3], "x")


def test_features_may_be_pretrained_and_frozen(tmp_path: Path) -> None:
    settings = {"steps": 1, "seeds": 1, "encoder.width": 16, "algo.hidden": [8], "algo.batch_size": 8}
    settings |= {"eval.env": "none", "quiet": True, "runs_dir": str(tmp_path)}
    run = offrl.train("encoder", data(), settings=settings)
    encoder = EncoderConfig(width=16, pretrained=str(run.dir), trained_by="none")
    brief = replace(SETTINGS, updates=2, reward="probability")
    found = SuccessClassifier.fit(data(), "success", brief, encoder, quiet=True).params["encoder"]
    tensors = files.load_latest(run.dir)[0]  # type: ignore[index]
    assert all(torch.equal(value, tensors[f"state/params/encoder/{name}"][0]) for name, value in found.items())
    with pytest.raises(UserError, match=r"encoder.pretrained: the run of arrays has encoder.width=16, and this one"):
        SuccessClassifier.fit(data(), "success", brief, replace(encoder, width=8), quiet=True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"observations": np.zeros((ROWS, 2), np.float32)}, "arrays has no images for a classifier of success"),
        (
            {"succes": values()["success"], "success": np.arange(ROWS)},
            "labels=success: arrays has 2 in the column .success., row 2; 0 or 1 is due",
        ),
    ],
)
def test_other_data_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        success_rows(data(**changes), "success")
    with pytest.raises(UserError, match=r"labels=sucess: arrays has no column .sucess..*success"):
        success_rows(data(), "sucess")


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("frames.npz", **values())
    small = ["encoder.width=16", "encoder.shift=1", "fit.updates=40", "fit.batch_size=32", "fit.learning_rate=2e-3"]
    assert main(["data", "label", "frames.npz", "kind=success", "fit.threshold=0.5", *small]) == 0
    out = capsys.readouterr().out
    assert "held-out accuracy" in out and "threshold  " in out
    label = "labels-frames-success.safetensors"
    assert f"train with dataset.reward_labels={label}" in out
    rewards = load_dataset(DatasetConfig(name="frames.npz", reward_labels=label), quiet=True).columns["rewards"]
    assert 0.0 < float(rewards.mean()) < 0.5
    assert main(["data", "label", "frames.npz", "kind=success", "fit.treshold=0.5", "force=true"]) == 2
    assert "threshold" in capsys.readouterr().err
