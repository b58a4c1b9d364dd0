"""Checkpoints under bad conditions: damage, full disks, other versions, other settings."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors
import safetensors.torch
import torch

from offrl.errors import UserError
from offrl.system import files as checkpoint
from offrl.system import locks, trust


class State(NamedTuple):
    params: dict[str, Any]
    step: torch.Tensor


def tree(value: float = 1.0) -> State:
    weights = {"w": torch.full((2, 3), value), "b": torch.arange(3) * value}
    return State({"actor": weights, "log_std": torch.tensor(value)}, torch.tensor(int(value)))


def save(run: Path, step: int, keep: int = 0) -> None:
    checkpoint.save(run, step, checkpoint.flatten(tree(float(step))), {"note": "x"}, keep)


def file(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step_{step:09d}.safetensors"


def loaded(run: Path) -> float:
    found = checkpoint.load_latest(run)
    assert found is not None
    state = checkpoint.unflatten(tree(), found[0], "here")
    assert float(state.params["actor"]["w"][0, 0]) == float(state.step) == found[1]["step"]
    return float(state.step)


def disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_flatten_and_back() -> None:
    flat = checkpoint.flatten(tree(2.0))
    assert list(flat) == ["params/actor/w", "params/actor/b", "params/log_std", "step"]
    back = checkpoint.unflatten(tree(), flat, "here")
    assert isinstance(back, State) and torch.equal(back.params["actor"]["b"], tree(2.0).params["actor"]["b"])


def test_every_bit_survives(tmp_path: Path) -> None:
    strange = {
        "nan": torch.tensor([float("nan"), -0.0, float("inf"), 1e-42]),
        "int": torch.tensor([-(2**63), 2**63 - 1]),
        "bool": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
        "scalar": torch.tensor(1.5, dtype=torch.float64),
    }
    checkpoint.write(tmp_path / "x.safetensors", strange, {"a": [1, "ü"]})
    tensors, meta = checkpoint.read(tmp_path / "x.safetensors")
    assert meta["a"] == [1, "ü"] and meta["version"] == checkpoint.VERSION
    for k, v in strange.items():
        assert tensors[k].dtype == v.dtype and tensors[k].shape == v.shape
        a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (tensors[k], v))
        assert torch.equal(a, b), k
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


def test_tensors_that_share_memory_are_written(tmp_path: Path) -> None:
    """What an update leaves alone is one and the same tensor in the old state and the new; an interrupt saves both."""
    shared = torch.arange(4.0)
    parts = {"old": shared, "new": shared, "row": shared[1:3], "wide": shared[0].expand(3)}
    checkpoint.write(tmp_path / "x", parts, {})
    tensors, _ = checkpoint.read(tmp_path / "x")
    assert all(torch.equal(tensors[k], v) for k, v in parts.items())


def test_latest_and_keep(tmp_path: Path) -> None:
    assert checkpoint.load_latest(tmp_path) is None and checkpoint.steps(tmp_path) == []
    for step in (10, 20, 30, 1_000_000_000):
        save(tmp_path, step, keep=2)
    assert checkpoint.steps(tmp_path) == [30, 1_000_000_000] and loaded(tmp_path) == 1_000_000_000
    everything = tmp_path / "all"
    for step in (1, 2, 3):
        save(everything, step)
    assert checkpoint.steps(everything) == [1, 2, 3]
    assert sorted(p.name for p in (everything / "checkpoints").iterdir()) == [
        "latest",
        *(file(everything, s).name for s in (1, 2, 3)),
    ]


def test_the_pointer_decides(tmp_path: Path) -> None:
    """A file newer than `latest` belongs to a save that was cut off before it was complete."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    (tmp_path / "checkpoints" / "latest").write_text(file(tmp_path, 1).name + "\n")
    assert loaded(tmp_path) == 1
    for text in ("step_000000099.safetensors", "../../etc/passwd", ""):  # nothing there: the newest
        (tmp_path / "checkpoints" / "latest").write_text(text)
        assert loaded(tmp_path) == 2
    (tmp_path / "checkpoints" / "latest").unlink()
    assert loaded(tmp_path) == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "bit", "text"])
def test_a_damaged_file_is_passed_over_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str
) -> None:
    save(tmp_path, 1)
    save(tmp_path, 2)
    path = file(tmp_path, 2)
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-3] ^= 1  # inside a tensor: only the checksum knows
    path.write_bytes(
        {"truncated": bytes(content[:-7]), "empty": b"", "bit": bytes(content), "text": b"hello" * 100}[damage]
    )
    with pytest.raises(UserError, match="checksum does not match" if damage == "bit" else "damaged"):
        checkpoint.read(path)
    assert loaded(tmp_path) == 1
    warning = capsys.readouterr().err
    assert warning.startswith("offrl: warning: ") and path.name in warning and "step 1\n" in warning
    assert warning.count("\n") == 1
    file(tmp_path, 1).write_bytes(b"")
    with pytest.raises(UserError, match=r"step_000000002.* damaged.*1 before: restore a checkpoint, or start anew"):
        checkpoint.load_latest(tmp_path)


def test_missing_foreign_and_newer_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"gone\.safetensors does not exist"):
        checkpoint.read(tmp_path / "gone.safetensors")
    safetensors.torch.save_file({"w": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(UserError, match="was not written by offrl"):
        checkpoint.read(tmp_path / "other")
    monkeypatch.setattr(checkpoint, "VERSION", 7)
    checkpoint.write(tmp_path / "future", {"w": torch.ones(2)}, {})
    monkeypatch.undo()
    with pytest.raises(
        UserError, match=rf"written by a newer offrl \(layout 7, this one reads up to {checkpoint.VERSION}\); upgrade"
    ):
        checkpoint.read(tmp_path / "future")
    save(tmp_path / "run", 1)
    os.replace(tmp_path / "future", file(tmp_path / "run", 2))
    (tmp_path / "run" / "checkpoints" / "latest").write_text(file(tmp_path / "run", 2).name)
    with pytest.raises(UserError, match="newer offrl"):  # going on from step 1 would lose what step 2 holds
        checkpoint.load_latest(tmp_path / "run")


def test_the_checksum_covers_names_and_values(tmp_path: Path) -> None:
    a, b = torch.ones(3), torch.zeros(3)
    checkpoint.write(tmp_path / "x", {"a": a, "b": b}, {})
    with safetensors.safe_open(tmp_path / "x", framework="pt") as opened:
        header = opened.metadata()
    for swapped in ({"a": b, "b": a}, {"a": a, "c": b}, {"a": a}):
        safetensors.torch.save_file(swapped, tmp_path / "y", header)
        with pytest.raises(UserError, match="checksum"):
            checkpoint.read(tmp_path / "y")
    assert json.loads(header["offrl"])["version"] == checkpoint.VERSION


def test_other_settings_are_named(tmp_path: Path) -> None:
    flat = checkpoint.flatten(tree())
    with pytest.raises(UserError, match="run x has no 'params/actor/w': it was written by another version"):
        checkpoint.unflatten(tree(), {k: v for k, v in flat.items() if k != "params/actor/w"}, "run x")
    with pytest.raises(
        UserError, match=r"run x: 'params/actor/w' is torch.float32 \(3, 3\) where these settings need .* \(2, 3\)"
    ):
        checkpoint.unflatten(tree(), {**flat, "params/actor/w": torch.ones(3, 3)}, "run x")
    with pytest.raises(UserError, match=r"'step' is torch.float32"):
        checkpoint.unflatten(tree(), {**flat, "step": torch.tensor(1.0)}, "run x")


@pytest.mark.parametrize("function", ["fsync", "replace"])
def test_a_full_disk_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, function, disk_full)
        with pytest.raises(UserError, match="No space left on device") as error:
            save(tmp_path, 5)
        assert "survives" not in str(error.value)  # there is none yet
    save(tmp_path, 1)
    content = file(tmp_path, 1).read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, function, disk_full)
        with pytest.raises(
            UserError, match=r"step_000000002\.safetensors: No space left on device.* checkpoint of step 1 survives"
        ):
            save(tmp_path, 2, keep=1)
        with pytest.raises(UserError, match="No space left"):
            save(tmp_path, 1, keep=1)  # over itself
    assert file(tmp_path, 1).read_bytes() == content and checkpoint.steps(tmp_path) == [1] and loaded(tmp_path) == 1
    assert not list((tmp_path / "checkpoints").glob(".*")), "a partial file is left"
    save(tmp_path, 2, keep=1)  # space is back
    assert checkpoint.steps(tmp_path) == [2] and loaded(tmp_path) == 2


def test_a_disk_that_fills_up_while_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pointer's turn comes after the file's: when only that fails, nothing is deleted and what it points at is
    whole.
    """
    save(tmp_path, 1)
    real, calls = os.replace, []

    def second_fails(a: Any, b: Any) -> None:
        calls.append(b)
        if len(calls) == 2:
            disk_full()
        real(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", second_fails)
        with pytest.raises(UserError, match="survives"):
            save(tmp_path, 2, keep=1)
    assert loaded(tmp_path) == 1 and checkpoint.steps(tmp_path) == [1, 2]


def test_the_file_is_synced_before_it_is_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, _name=name: (order.append(_name), _real(*a))[1])
    checkpoint.write(tmp_path / "x", {"a": torch.ones(1)}, {})
    assert order == ["fsync", "replace", "fsync"]  # the file, its name, the folder


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with pytest.raises(UserError, match="could not write"):
        save(tmp_path, 1)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl"])
def test_a_folder_of_a_run_that_fails_at_once_goes_again(name: str, tmp_path: Path) -> None:
    """Where it holds settings alone, and was made for it."""
    for folder, fails, stays in (("new", True, name != "run.json"), ("old", True, True), ("done", False, True)):
        run = tmp_path / folder / "run"
        if folder == "old":
            run.mkdir(parents=True)
        with contextlib.suppress(UserError), locks.exclusive(run):
            (run / name).touch()
            if fails:
                raise UserError("refused")
        assert run.exists() == run.parent.exists() == stays


def test_a_folder_that_another_process_removes_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that has just been refused, between the two steps of this one."""
    run, calls, opened = tmp_path / "runs" / "run", list[Path](), trust.open_to_write

    def open_to_write(path: Path, mode: str) -> Any:
        calls.append(path)
        if len(calls) == 1:
            run.rmdir()
        return opened(path, mode)

    monkeypatch.setattr(trust, "open_to_write", open_to_write)
    with locks.exclusive(run):
        assert len(calls) == 2 and (run / ".lock").exists()
