"""Where a run ends by its estimated values: the rule, and that it survives an interruption."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from offrl.data import Dataset
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.ope.stopping import Plateau
from offrl.settings.replicas import Replica
from offrl.settings.train import TrainConfig

DATA = from_arrays(np.zeros((6, 2)), np.zeros((6, 1)), np.zeros(6), episode_ends=[2, 5])


def plateau(folder: Path, rows: list[list[float | None]], patience: int = 2, resume_step: int | None = 100) -> Plateau:
    if not (folder / "fqe.jsonl").exists():
        (folder / "fqe.jsonl").write_text(
            "".join(json.dumps({"step": 10 * (i + 1), "value": row}) + "\n" for i, row in enumerate(rows))
        )
    config = TrainConfig(stop="fqe-plateau", stop_patience=patience)
    return Plateau(config, DATA, folder, [Replica(s) for s in range(len(rows[0]))], resume_step)


@pytest.mark.parametrize(
    ("values", "end"),
    [
        ([1, 2, 3, 4, 5], None),  # rises
        ([1, 3, 2, 2.5], 40),  # two looks without a new best
        ([1, 3, 3, 3, 9], 40),  # as good as the best is not better; what comes later does not count
        ([1, 3, 2, 4, 3], None),
        ([5, 4], None),  # too few looks
        ([5, 4, 3], 30),
        ([None, None, None], 30),  # nothing to hope for
        ([None, 1, 2, 3], None),
    ],
)
def test_the_rule(tmp_path: Path, values: list[float | None], end: int | None) -> None:
    assert plateau(tmp_path, [[v] for v in values]).end == end


def test_all_replicas_must_have_stopped_rising(tmp_path: Path) -> None:
    assert plateau(tmp_path, [[3.0, 1.0], [2.0, 2.0], [1.0, 3.0], [0.0, 2.0], [0.0, 2.9]]).end == 50


def test_looks_after_the_checkpoint_are_forgotten(tmp_path: Path) -> None:
    rows: list[list[float | None]] = [[3.0], [2.0], [1.0]]
    assert plateau(tmp_path, rows).end == 30
    with open(tmp_path / "fqe.jsonl", "a") as file:
        file.write('{"step": 40, "val')
    assert plateau(tmp_path, rows, resume_step=20).end is None
    assert (tmp_path / "fqe.jsonl").read_text().count("\n") == 2
    assert plateau(tmp_path, rows, resume_step=None).rows == []


def test_an_estimate_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl import ope
    from offrl.ope import Estimates

    seen = []

    def estimate(dataset: Dataset, candidates: dict[str, object], settings: object, device: str) -> Estimates:
        assert device == "cpu"
        seen.append((dataset, list(candidates), settings))
        return Estimates("fqe", tuple(candidates), np.array([1.5, 7.0, np.nan]), np.zeros(3), np.zeros(3), 0.99, {})

    monkeypatch.setattr(ope, "estimate", estimate)
    one = plateau(tmp_path, [[0.0, 0.0, 0.0]], resume_step=None)
    text = one.look(50, ["a", "b", "c"], torch.tensor([True, False, True]))
    assert text == "step 50: estimated value 1.5"  # the second has diverged, the third has no value
    assert (tmp_path / "fqe.jsonl").read_text() == '{"step": 50, "value": [1.5, null, null]}\n'
    assert seen[0][:2] == (DATA, ["seed_0", "seed_1", "seed_2"])


def test_settings_without_looks_are_refused(tmp_path: Path) -> None:
    config = TrainConfig(stop="fqe-plateau")
    config.eval.every = 0
    with pytest.raises(UserError, match=r"eval\.every=0"):
        Plateau(config, DATA, tmp_path, [Replica(0)], None)


def test_what_a_reader_of_results_asks(tmp_path: Path) -> None:
    assert Plateau.ended(tmp_path, {"stop_patience": 2}) is None  # no file
    plateau(tmp_path, [[3.0], [2.0], [1.0]]).close()
    assert [Plateau.ended(tmp_path, {"stop_patience": n}) for n in (2, 3, None)] == [30, None, None]
    (tmp_path / "fqe.jsonl").write_text('{"step": 10, "val')
    assert Plateau.ended(tmp_path, {"stop_patience": 2}) is None
