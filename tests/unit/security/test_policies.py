"""Policies, models and labels of strangers: rows 20 and 21 of what was tried (docs/security.md)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from offrl import registry
from offrl.data.containers.file_type import pickled
from offrl.data.dataset import DataSpec
from offrl.data.transforms.reward_labels import RewardLabels, load_labels
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.interop.policies import load_agents
from offrl.labelling.cache import Answers
from offrl.nn import meta_check
from offrl.relabel.preferences import PreferenceModel
from offrl.settings.kinds import restored
from offrl.system import files

SPEC = DataSpec((3,), 2, action_low=(-1.0, -1.0), action_high=(1.0, 1.0))
DEEP = '{"a":' * 100_000 + "1" + "}" * 100_000


def saved(path: Path, name: str = "td3_bc", **settings: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and meta of a policy that was not trained."""
    kind = registry.get("algo", name)
    config = kind.Config(**settings)
    algorithm = kind(config, SPEC)
    TrainedPolicy(algorithm, algorithm.init(0), 0).save(path)
    return files.read(path)


def rewritten(path: Path, tensors: dict[str, torch.Tensor], meta: dict[str, Any]) -> Path:
    """The file with other contents and a checksum that is right, as a stranger writes it."""
    files.write(path, tensors, {k: v for k, v in meta.items() if k not in ("version", "sha256")})
    return path


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        TrainedPolicy.load(path)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


class Watch(TorchDispatchMode):
    """Sees every tensor that is made."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        sizes = [
            t.untyped_storage().nbytes()
            for t in pytree.tree_leaves(out)
            if isinstance(t, torch.Tensor) and t.device.type == "cpu"
        ]
        assert max(sizes, default=0) < 10**7, "memory of the size that the settings ask for"
        return out


@pytest.fixture
def watched() -> Iterator[None]:
    with Watch():
        yield


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("td3_bc", {"hidden": [30_000, 30_000]}),
        ("td3_bc", {"critic_hidden": [30_000, 30_000]}),  # of which the file holds nothing
        ("td3_bc", {"critics": 10_000_000}),
        ("td3_bc", {"hidden": [8] * 9_000}),
        ("dt", {"layers": 50_000_000}),
        ("dt", {"max_timestep": 90_000_000}),
        ("dt", {"width": 80_000_000}),
        ("fb", {"inference_samples": 90_000_000}),
        ("pets", {"history": 90_000_000}),
        ("rssm", {"recurrent_width": 80_000_000}),
        ("rssm", {"scan_states": 90_000_000}),
        ("rssm", {"scan_layers": 90_000_000}),
        ("rssm", {"groups": 90_000_000}),
        ("rssm", {"latent": 90_000_000, "latents": "gaussian"}),
        ("tdmpc2", {"latent": 80_000_000}),
        ("tdmpc2", {"hidden": [90_000_000]}),
        ("tdmpc2", {"critics": 90_000_000}),
        ("tdmpc2", {"plan_population": 10_000_000}),
        ("tdmpc2", {"plan_horizon": 10_000_000}),
        ("mrq", {"latent": 90_000_000}),
        ("mrq", {"action_latent": 90_000_000}),
        ("mrq", {"hidden": [90_000_000, 90_000_000]}),
        ("director", {"goal_groups": 90_000_000}),
        ("director", {"goal_classes": 90_000_000}),
        ("director", {"recurrent_width": 80_000_000}),
        ("director", {"members": 90_000_000}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else value,
)
def test_networks_are_not_built_before_their_shapes_fit(
    tmp_path: Path, name: str, change: dict[str, Any], watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 20: `hidden: [30000,30000]` in a policy of some kilobytes."""
    monkeypatch.setattr(meta_check, "OPERATIONS", 4_000)
    small = {
        "dt": {"width": 8, "heads": 1, "layers": 1, "max_timestep": 10},
        "pets": {"termination": "never", "reward": "learned"},
        "rssm": {"core": "scan", "recurrent_width": 8, "groups": 2, "width": 8, "members": 1},
        "tdmpc2": {"encoder_hidden": [8], "latent": 8, "critics": 2, "discount": 0.9, "episodic": True},
        "mrq": {"latent": 8, "action_latent": 8},
        "director": {"recurrent_width": 8, "groups": 2, "width": 8, "goal_groups": 2, "goal_classes": 2, "members": 1},
    }
    settings = {"hidden": [8, 8]} if hasattr(registry.get("algo", name).Config(), "hidden") else {}
    settings |= (
        {"inference_samples": 4, "z_dim": 4, "inputs_hidden": [8], "backward_hidden": [8]} if name == "fb" else {}
    )
    tensors, meta = saved(tmp_path / "p.safetensors", name, **settings, **small.get(name, {}))
    TrainedPolicy.load(tmp_path / "p.safetensors")
    where = rewritten(tmp_path / "p.safetensors", tensors, {**meta, "config": {**meta["config"], **change}})
    text = refused(where)
    assert any(
        words in text for words in ("where these settings need", "describe networks of", "would take", "are tried")
    )


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("tt", {"beam_width": 99_999_999}, "more than 100,000"),
        ("tt", {"beam_width": 20_000, "plan_max_length": 10, "context": 10}, "each action would take"),
        ("pets", {"plan_population": 99_999_999}, "at most 1,000,000,000 are tried"),
        (
            "pets",
            {"plan_population": 9_999_999, "plan_horizon": 1, "plan_iterations": 1},
            "would take 800 MB of memory",
        ),
        ("pets", {"plan_particles": 99_999_999}, "at most 1,000,000,000 are tried"),
        (
            "pets",
            {"plan_particles": 9_999_999, "plan_population": 20, "plan_iterations": 1, "plan_horizon": 1},
            "would",
        ),
        ("tdmpc2", {"plan_population": 1_000_000}, "each action would take 20.7 GB of memory"),
        ("tdmpc2", {"plan_population": 64, "plan_horizon": 999_999}, "each action would take"),
        ("diffuser", {"candidates": 99_999}, "each action would take"),
        ("decision_diffuser", {"plan_horizon": 99_999_999}, "the largest allowed value is 10000"),
        ("qc", {"acting_candidates": 99_999_999}, "the largest allowed value is 100000"),
        ("pets", {"elites": 1_000_000}, "elites=1000000 is more than"),
        ("breeze", {"acting_samples": 99_999_999}, "the largest allowed value is 100000"),
        ("diffusion_bc", {"denoising_steps": 99_999_999}, "the largest allowed value is 1000"),
    ],
)
def test_what_acting_takes_has_an_end(name: str, change: dict[str, Any], problem: str) -> None:
    """Row 20: memory that acting would take, which no tensor shows."""
    kind = registry.get("algo", name)
    settled = {
        "pets": {"termination": "never", "reward": "learned"},
        "tdmpc2": {"discount": 0.9, "episodic": True},
        "decision_diffuser": {"target_return": 1.0, "return_scale": 1.0},
    }
    with pytest.raises(UserError, match=problem):
        kind(restored(kind.Config, {"name": name, **settled.get(name, {}), **change}, "p"), SPEC)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"config": {"name": "td3_bc", "new_setting": 1}}, "the setting new_setting"),
        ({"config": {"name": "td3_bc", "hidden": "abc"}}, "hidden is 'abc', where a list"),
        ({"config": {"name": "td3_bc", "hidden": [[1]]}}, "hidden[0] is [1]"),
        ({"config": {"name": "td3_bc", "hidden": [8] * 20_000}}, "hidden has 20,000 entries"),
        ({"config": {"name": "td3_bc", "critics": 10**30}}, "critics is 1000"),
        ({"config": {"name": "td3_bc", "critics": 10**9}}, "critics is 1000000000, where 100,000,000 at most is due"),
        ({"config": {"name": "td3_bc", "critics": True}}, "critics is True, where a whole number is due"),
        ({"config": {"name": "td3_bc", "discount": None}}, "discount is None, where a number is due"),
        ({"config": {"name": "td3_bc", "value_head": "evil"}}, "value_head=evil"),
        ({"config": {"name": ["td3_bc"]}}, "does not say which algorithm"),
        ({"config": []}, "does not say which algorithm"),
        ({"config": {"name": "dynamics"}}, "trains no policy"),
        ({"spec": 3}, "does not say which algorithm"),
        ({"spec": {"observation_shape": "ab", "action_dim": 2}}, "observation_shape is 'ab'"),
        ({"spec": {"observation_shape": [3], "action_dim": -2}}, "-2 action dimensions"),
        (
            {"spec": {"observation_shape": [3], "action_dim": 2, "action_low": [0.0]}},
            "action_low has 1 entries, where 2",
        ),
        (
            {"spec": {"observation_shape": [3], "action_dim": 2, "task": {"name": "x", "env_kwargs": []}}},
            "env_kwargs is",
        ),
        ({"spec": {"observation_shape": [90_000_000, 90_000_000, 90_000_000], "action_dim": 2}}, ""),
        ({"seed": {}}, "has the seed {}"),
        ({"assets": 3}, "does not say which algorithm"),
    ],
    ids=lambda value: json.dumps(value)[:60] if isinstance(value, dict) else "",
)
def test_settings_of_other_types_are_one_line(tmp_path: Path, change: dict[str, Any], problem: str) -> None:
    """Row 21: a policy with an unknown setting, and with values that are no settings."""
    tensors, meta = saved(tmp_path / "p.safetensors", hidden=[8])
    assert problem in refused(rewritten(tmp_path / "p.safetensors", tensors, {**meta, **change}))


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    "header",
    [
        "[]",
        "3",
        "{}",
        '{"version": 2}',
        '{"version": "2", "sha256": ""}',
        '{"version": 2, "sha256": []}',
        DEEP,
        "{",
        "9" * 5000,
    ],
    ids=lambda text: text[:20],
)
def test_headers_of_other_kinds_are_one_line(tmp_path: Path, header: str) -> None:
    """Row 21: meta that is no dictionary, without version or sha256, and too deep."""
    path = tmp_path / "p.safetensors"
    path.write_bytes(safetensors.torch.save({"x": torch.ones(2)}, {"offrl": header}))
    assert "damaged" in refused(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    """Row 20: a pipe, which would be read for ever, and a device without an end."""
    os.mkfifo(tmp_path / "p.safetensors")
    assert "a pipe or a device" in refused(tmp_path / "p.safetensors")
    (tmp_path / "zero.safetensors").symlink_to("/dev/zero")
    assert "a pipe or a device" in refused(tmp_path / "zero.safetensors")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl", ".pt2", ".onnx", ".zip"])
def test_exports_and_pickles_are_no_policies(tmp_path: Path, suffix: str) -> None:
    """Nothing loads a stranger's TorchScript, torch.export, ONNX or pickle."""
    (tmp_path / f"policy{suffix}").write_bytes(b"x")
    with pytest.raises(UserError):
        load_agents(str(tmp_path / f"policy{suffix}"), observation_dim=3, action_dim=1, discrete=False)


# ---------------------------------------------------------------------------------------------------- models that label


def labels(path: Path, **change: Any) -> Path:
    RewardLabels({"00" * 32: np.ones(3, np.float32)}, {"data": "x"}).save(path)
    assert load_labels(path)
    tensors, meta = files.read(path)
    tensors |= {k: v for k, v in change.items() if isinstance(v, torch.Tensor)}
    meta |= {k: v for k, v in change.items() if not isinstance(v, torch.Tensor)}
    return rewritten(path, {k: v for k, v in tensors.items() if k not in change.get("drop", ())}, meta)


@pytest.mark.parametrize(
    "change",
    [
        {"lengths": torch.tensor([5])},
        {"lengths": torch.tensor([-3])},
        {"lengths": torch.tensor(3)},
        {"keys": torch.zeros(1, 2)},
        {"rewards": torch.ones(3, 1)},
        {"rewards": torch.ones(3, dtype=torch.int64)},
        {"about": []},
        {"drop": ["keys"]},
        {"kind": ["x"]},
    ],
    ids=lambda value: str(value)[:40],
)
def test_reward_labels_of_other_kinds_are_one_line(tmp_path: Path, change: dict[str, Any]) -> None:
    """Row 21, of labels: what `dataset.reward_labels=FILE.safetensors` reads."""
    path = labels(tmp_path / "l.safetensors", **change)
    with pytest.raises(UserError, match=r"l\.safetensors"):
        load_labels(path)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": [30_000, 30_000]},
        {"members": 99_999_999},
        {"members": [1]},
        {"members": 0},
        {"hidden": 3},
        {"spec": []},
        {"accuracy": []},
        {"mean": torch.ones(1)},
    ],
    ids=lambda value: str(value)[:40],
)
def test_preference_models_of_other_kinds_are_one_line(tmp_path: Path, change: dict[str, Any], watched: None) -> None:
    """Rows 20 and 21, of preference models: their sizes are compared first."""
    from offrl.relabel.preferences import Preferences, PreferenceSettings

    members = [dict(Preferences(PreferenceSettings(hidden=[8]), SPEC).init(0).params["reward"])]
    path = tmp_path / "m.safetensors"
    PreferenceModel(SPEC, [8], torch.zeros(5), torch.ones(5), members, 0.5).save(path)
    assert len(PreferenceModel.load(path).members) == 1
    tensors, meta = files.read(path)
    tensors |= {k: v for k, v in change.items() if isinstance(v, torch.Tensor)}
    rewritten(path, tensors, {**meta, **{k: v for k, v in change.items() if not isinstance(v, torch.Tensor)}})
    with pytest.raises(UserError, match=r"m\.safetensors"):
        PreferenceModel.load(path)


@pytest.mark.parametrize(
    "change", [{"hidden": [30_000, 30_000]}, {"members": 90_000_000}, {"hidden": {}}, {"members": "3"}], ids=str
)
def test_world_models_are_not_built_before_their_shapes_fit(
    tmp_path: Path, change: dict[str, Any], watched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 20 and 21, of world models, which `offrl model` and model-based algorithms read."""
    from offrl.world_models import model as world_model
    from offrl.world_models.dynamics import DynamicsSettings

    monkeypatch.setattr(meta_check, "OPERATIONS", 4_000)
    made = world_model.WorldModel(DynamicsSettings(members=2, hidden=[8], termination="never", reward="learned"), SPEC)
    path = tmp_path / "m.safetensors"
    tree = {
        "params": {k: v.detach() for k, v in made.network.named_parameters()},
        "mean": torch.zeros(5),
        "std": torch.ones(5),
    }
    world_model.save(path, made, tree, {"data": {"name": "x", "fingerprint": "y"}})
    assert world_model.load(path).model.members == 2
    tensors, meta = files.read(path)
    rewritten(path, tensors, {**meta, "config": {**meta["config"], **change}})
    with pytest.raises(UserError) as caught:
        world_model.load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("no_collection")
def test_kept_answers_of_other_kinds_are_passed_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 21, of the file of answers: deep JSON and wrong types."""
    lines = [
        DEEP,
        "[1]",
        "3",
        '{"key": 1, "answer": "a"}',
        '{"key": "k", "answer": ["a"]}',
        '{"key": "good", "answer": "yes"}',
        "\xff",
    ]
    (tmp_path / "answers.jsonl").write_bytes("\n".join(lines).encode("latin-1"))
    assert Answers(tmp_path / "answers.jsonl").known == {"good": "yes"}
    assert "6 damaged line(s) are passed over" in capsys.readouterr().err
    os.mkfifo(tmp_path / "pipe.jsonl")
    with pytest.raises(UserError, match="no plain file"):
        Answers(tmp_path / "pipe.jsonl")


@pytest.mark.parametrize("size", [0x0280, 0x0580, 0x80])
def test_the_length_of_a_header_is_no_pickle(tmp_path: Path, size: int) -> None:
    (path := tmp_path / "p.safetensors").write_bytes(size.to_bytes(8, "little") + b"{".ljust(size))
    assert not pickled(path)
    path.write_bytes(b"\x80\x04\x95" + bytes(20))
    assert pickled(path)
