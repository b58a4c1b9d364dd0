"""Padded rollouts as ImagineBench stores them, and imagined rollouts as a second source."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.data import Dataset, DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.samplers.transitions import TransitionSampler
from offrl.data.transforms.imagined import append_imagined
from offrl.data.transforms.sources import share_draws
from offrl.errors import UserError

N, T, D, A = 4, 5, 3, 2
LENGTHS = (3, 5, 0, 1)
R = np.random.default_rng(0)
MASKS = (np.arange(T) < np.array(LENGTHS)[:, None])[..., None].astype(np.float64)
ROLLOUTS: dict[str, Any] = {
    "observations": R.normal(size=(N, T, D)),
    "actions": R.uniform(-1, 1, size=(N, T, A)),
    "rewards": R.normal(size=(N, T, 1)),
    "masks": MASKS,
}
TEXTS = np.array(["go left", "go right", "jump", "go left"])
ENCODED = {
    "instructions": np.array(["go right", "go left", "jump"]),
    "encodings": np.arange(6, dtype=np.float32).reshape(3, 2),
}


def write(path: Path, form: str, **arrays: Any) -> str:
    """The file `rollouts.FORM`."""
    target = path / f"rollouts.{form}"
    if form == "npz":
        np.savez(target, **arrays)
    elif form == "hdf5":
        import h5py

        with h5py.File(target, "w") as file:
            for name, values in arrays.items():
                file[name] = values.astype(object) if values.dtype.kind == "U" else values
    else:  # as ImagineBench's loader reads it: a row per rollout, in any order
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet as pq

        order = [2, 0, 3, 1]
        columns: dict[str, Any] = {"row_index": order, "file_name": ["x"] * N}
        for name, values in arrays.items():
            if name == "instructions":
                columns["list_instructions"] = [[str(values[i]), "in other words"] for i in order]
                continue
            columns |= {
                f"{name}_data": [values[i].tobytes() for i in order],
                f"{name}_shape": [str(values.shape)] * N,
                f"{name}_dtype": [str(values.dtype)] * N,
            }
        pq.write_table(pa.table(columns), target)
    return str(target)


@pytest.mark.parametrize("form", ["npz", "hdf5", "parquet"])
def test_padded_rollouts(form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "codes.npz", **ENCODED)
    name = write(tmp_path, form, **ROLLOUTS, instructions=TEXTS)
    data = load_dataset(DatasetConfig(name, cache="never", instruction_encodings=str(tmp_path / "codes.npz")))
    valid = MASKS[..., 0] > 0
    assert data.episode_lengths().tolist() == [3, 5, 1] and len(data) == 9
    for column, width in (("observations", D), ("actions", A)):
        np.testing.assert_allclose(data.columns[column][:, :width], ROLLOUTS[column][valid], rtol=1e-6)
    np.testing.assert_allclose(data.columns["rewards"], ROLLOUTS["rewards"][valid][:, 0], rtol=1e-6)
    assert data.columns["observations"][:, D:].tolist() == [[2, 3]] * 3 + [[0, 1]] * 5 + [[2, 3]]
    assert data.columns["terminations"].tolist() == [False, False, True, False, False, False, False, False, True]
    assert data.columns["truncations"].nonzero().flatten().tolist() == [7]
    assert not data.columns["successor_known"][7] and len(data.transition_rows()) == 8
    assert any("1 of 4 rollouts fill all 5 steps" in n for n in data.notes) and any(
        "1 rollouts without a valid" in n for n in data.notes
    )
    plain = load_dataset(DatasetConfig(name, cache="never"))
    assert plain.spec.observation_shape == (D,) and any("instruction_encodings" in n for n in plain.notes)


def test_encodings_and_flags_in_the_file_itself(tmp_path: Path) -> None:
    codes = np.arange(N * 2).reshape(N, 2)
    flags = np.zeros((N, T), bool)
    flags[1, 4] = True
    more = {
        **ROLLOUTS,
        "actions": np.full((N, T), 3),
        "instruction_encodings": codes,
        "terminals": flags,
        "action_masks": MASKS[..., 0],
    }
    data = load_dataset(
        DatasetConfig(write(tmp_path, "npz", **{k: v for k, v in more.items() if k != "masks"}), cache="never")
    )
    assert data.spec.discrete and data.spec.num_actions == 4
    assert data.columns["observations"][:, D:].tolist() == np.repeat(codes, LENGTHS, 0).tolist()
    assert data.columns["terminations"].nonzero().flatten().tolist() == [7]


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "gap": ({"masks": np.where(np.arange(T) == 1, 0, MASKS[..., 0])}, "the mask of rollout 0 has gaps"),
    "none": ({"masks": 0 * MASKS}, "mark no step as valid"),
    "shape": ({"rewards": np.zeros((N, T - 1))}, r"'rewards' has shape \[4, 4\]; \[4, 5\]"),
    "lacking": ({"rewards": None}, "has no 'rewards'"),
    "unknown": (
        {"instructions": np.array(["go up"] * N)},
        r"has no encoding of the instruction of rollout 0, 'go up'. Did you mean",
    ),
    "texts": ({"rewards": np.full((N, T), "a")}, "holds .* values, not numbers"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_faults_are_named(kind: str, tmp_path: Path) -> None:
    change, words = FAULTS[kind]
    np.savez(tmp_path / "codes.npz", **ENCODED)
    arrays = {k: v for k, v in {**ROLLOUTS, "instructions": TEXTS, **change}.items() if v is not None}
    config = DatasetConfig(
        write(tmp_path, "npz", **arrays), cache="never", instruction_encodings=str(tmp_path / "codes.npz")
    )
    with pytest.raises(UserError, match=words):
        load_dataset(config)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    np.save(tmp_path / "real.npy", ROLLOUTS, allow_pickle=True)  # type: ignore[arg-type] - as ImagineBench's first files
    with pytest.raises(UserError, match="Python objects, a pickle, which may run code and is not read"):
        load_dataset(str(tmp_path / "real.npy"))
    name = write(tmp_path, "npz", **ROLLOUTS, instructions=TEXTS)
    np.savez(
        tmp_path / "codes.npz", instructions=ENCODED["instructions"].astype(object), encodings=ENCODED["encodings"]
    )
    with pytest.raises(UserError, match=r"codes.npz cannot be read .*an npz file with the arrays instructions"):
        load_dataset(DatasetConfig(name, cache="never", instruction_encodings=str(tmp_path / "codes.npz")))


# ---- a second source


def arrays(rows: int, length: int, value: float) -> dict[str, Any]:
    return {
        "observations": np.full((rows, 2), value) + np.arange(rows)[:, None],
        "actions": np.full((rows, 1), value),
        "rewards": np.full(rows, value),
        "terminations": np.arange(rows) % length == length - 1,
    }


def files(tmp_path: Path) -> tuple[str, str]:
    np.savez(tmp_path / "real.npz", **arrays(40, 10, 1.0))
    np.savez(tmp_path / "made.npz", **arrays(120, 6, 0.25))
    return str(tmp_path / "real.npz"), str(tmp_path / "made.npz")


def drawn(dataset: Dataset, count: int = 20_000) -> float:
    """The share of imagined rows among draws."""
    sampler = TransitionSampler(("imagined",))
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), count)
    return float(batch["imagined"].float().mean())


@pytest.mark.parametrize("share", [None, 0.0, 0.2, 1.0])
def test_imagined_rows_have_their_share_of_the_draws(share: float | None, tmp_path: Path) -> None:
    real, made = files(tmp_path)
    config = DatasetConfig(
        real, imagined=[made], imagined_share=share, action_low=[-2.0], action_high=[2.0], cache="never"
    )
    data = load_dataset(config)
    assert len(data) == 160 and data.columns["imagined"].tolist() == [False] * 40 + [True] * 120
    assert data.columns["actions"][50].item() == 0.125 and data.spec.action_high == (2.0,)
    want = 0.75 if share is None else share
    marks = data.columns["imagined"][data.episode_start]
    assert float(data.episode_shares()[marks].sum()) == pytest.approx(want, abs=1e-12)
    assert float(data.row_weights().mean()) == pytest.approx(1.0)
    assert drawn(data) == pytest.approx(
        want, abs=0.0 if want in (0.0, 1.0) else 5 * (want * (1 - want) / 20_000) ** 0.5
    )


def test_the_share_goes_with_other_settings(tmp_path: Path) -> None:
    real, made = files(tmp_path)
    (tmp_path / "mine.py").write_text("def count(columns):\n    return columns['observations'][:, 0]\n")
    config = DatasetConfig(
        real,
        imagined=[made, made],
        imagined_share=0.3,
        weighting="return",
        reward_labels=f"{tmp_path}/mine.py:count",
        cache="never",
    )
    data = load_dataset(replace(config, subsample=0.5))
    marks = data.columns["imagined"][data.episode_start]
    assert int((~data.columns["imagined"]).sum()) == 20 and int(marks.sum()) == 40
    shares = data.episode_shares()
    assert float(shares[marks].sum()) == pytest.approx(0.3)
    assert float(shares[~marks].max()) > 1.5 * float(shares[~marks].min())  # weighting goes on among the real ones
    assert torch.equal(data.columns["rewards"], data.columns["observations"][:, 0])
    mapped = load_dataset(replace(config, memory="mmap", cache_dir=str(tmp_path / "cache")))
    again = load_dataset(replace(config, memory="mmap", cache_dir=str(tmp_path / "cache")))
    assert (
        mapped.mapped
        and torch.equal(mapped.weights, again.weights)
        and torch.equal(again.columns["imagined"], mapped.columns["imagined"])
    )  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"no row with imagined 0 to draw 0.7"):
        load_dataset(replace(config, weighting="none", top_fraction=0.1))


def test_what_does_not_fit(tmp_path: Path) -> None:
    real, made = files(tmp_path)
    with pytest.raises(UserError, match=r"needs imagined rollouts: dataset.imagined="):
        load_dataset(DatasetConfig(real, imagined_share=0.5))
    with pytest.raises(UserError, match=r"smallest allowed value is 0|largest allowed value is 1"):
        load_dataset(DatasetConfig(real, imagined=[made], imagined_share=1.5))
    data = load_dataset(DatasetConfig(real, cache="never"))
    with pytest.raises(UserError, match="has no column 'imagined'"):
        share_draws(data, 0.5, "imagined")
    extra = from_arrays(**arrays(6, 3, 0.5), extra=np.zeros(6), action_low=-1.0, action_high=1.0)
    joined = append_imagined(data, extra)
    assert "extra" not in joined.columns and any("'extra'" in n for n in joined.notes) and joined.num_episodes == 6
    with pytest.raises(UserError, match="has a column 'imagined' of its own"):
        append_imagined(append_imagined(data, data), data)
