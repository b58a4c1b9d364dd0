"""Export: files that agree with the Python policy, load without offrl, and are not kept where they disagree."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl import registry, rng
from offrl.actor import Actor, MemorylessActor
from offrl.cli.export import run as export
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.export import SUFFIX
from offrl.export.check import check
from offrl.export.draws import Draw
from offrl.export.graph import PolicyGraph, draws_of
from offrl.export.write import export_policy

pytestmark = pytest.mark.filterwarnings(r"ignore:`isinstance\(treespec:FutureWarning")
CONTINUOUS = DataSpec(
    (5,),
    2,
    action_low=(-0.4, 0.0),
    action_high=(0.4, 3.0),
    observation_mean=(0.0, 10.0, -3.0, 0.5, 100.0),
    observation_std=(1.0, 4.0, 0.1, 2.0, 30.0),
)
needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxruntime", "onnxscript")),
    reason="needs pip install 'offrl[export]'",
)
FORMATS = [pytest.param("onnx", marks=needs_onnx), "pt2"]
DISCRETE = DataSpec((4,), 1, discrete=True, num_actions=3, name="cart")
NIGHTLY = pytest.mark.nightly


@pytest.fixture(autouse=True, scope="module")
def operators() -> Iterator[None]:
    """ONNX's list of operators is made once for all files, not for each: it takes longer than the rest of an export."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:  # another version of torch has it elsewhere
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(ONNXRegistry, "from_torchlib"):
            patch.setattr(ONNXRegistry, "from_torchlib", staticmethod(functools.cache(ONNXRegistry.from_torchlib)))
        yield


def trained(name: str, spec: DataSpec = CONTINUOUS, seed: int = 3, **settings: Any) -> TrainedPolicy:
    """A policy with random weights, larger than fresh ones, so that clipping and saturation occur."""
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(hidden=[16, 16], **settings), spec)
    state = algorithm.init(seed)
    actor = {
        k: 1.3 * v + 0.1 * rng.normal(rng.make_key(i), tuple(v.shape))
        for i, (k, v) in enumerate(state.params["actor"].items())
    }
    return TrainedPolicy(algorithm, state._replace(params={**state.params, "actor": actor}), seed)


def mlp(policy: TrainedPolicy, x: np.ndarray) -> np.ndarray:
    """The actor's network in float64, by hand."""
    w = {k: v.double().numpy() for k, v in policy.state.params["actor"].items()}
    for layer in ("net.layers.0", "net.layers.1"):
        x = np.maximum(x @ w[f"{layer}.weight"].T + w[f"{layer}.bias"], 0.0)
    return x @ w["net.head.weight"].T + w["net.head.bias"]


def by_numpy(policy: TrainedPolicy, observations: np.ndarray) -> np.ndarray:
    """The greedy action of a policy that ends in a tanh."""
    x = np.tanh(mlp(policy, (observations - np.array(CONTINUOUS.observation_mean)) / CONTINUOUS.observation_std))[:, :2]
    low, high = np.array(CONTINUOUS.action_low), np.array(CONTINUOUS.action_high)
    return np.clip(low + (x + 1.0) / 2.0 * (high - low), low, high)


FOREIGN = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "offrl":
            raise ImportError("offrl is not here")

sys.meta_path.insert(0, Blocked())
import json, numpy as np

found = {}
for path in sys.argv[1:]:
    about = json.load(open(path.rpartition(".")[0] + ".json"))
    given = np.load(path + ".npz")
    inputs = {i["name"]: given[i["name"]] for i in about["inputs"]}
    if path.endswith(".onnx"):
        import onnxruntime
        session = onnxruntime.InferenceSession(path)
        found[path] = session.run(None, inputs)[0]
        single = session.run(None, {name: x[:1] for name, x in inputs.items()})[0]
    else:
        import torch
        file = torch.export.load(path).module()
        found[path] = file(*map(torch.from_numpy, inputs.values())).numpy()
        single = file(*(torch.from_numpy(x[:1]) for x in inputs.values())).numpy()
    assert single.dtype == found[path].dtype and np.allclose(single, found[path][:1], atol=1e-5)
assert not any(name.partition(".")[0] == "offrl" for name in sys.modules)
for path, actions in found.items():
    np.save(path + ".npy", actions)
"""


def run_foreign(given: dict[Path, dict[str, np.ndarray]]) -> list[np.ndarray]:
    """Each file's actions for its inputs, in one process that cannot import offrl; batches of one are tried as well."""
    for path, inputs in given.items():
        np.savez(f"{path}.npz", **inputs)
    subprocess.run([sys.executable, "-W", "ignore", "-c", FOREIGN, *map(str, given)], check=True, timeout=300)
    return [np.load(f"{path}.npy") for path in given]


@needs_onnx
@pytest.mark.parametrize(
    "policies",
    [pytest.param(["iql"], marks=pytest.mark.slow), pytest.param(["td3_bc", "bc"], marks=pytest.mark.nightly)],
    ids="-".join,
)
def test_files_agree_with_numpy_in_a_process_without_offrl(policies: list[str], tmp_path: Path) -> None:
    """Gaussian (iql), deterministic (td3_bc), squashed Gaussian (bc) and categorical (iql) policies."""
    draw = np.random.default_rng(1)
    observations = (draw.normal(size=(50, 5)) * CONTINUOUS.observation_std + CONTINUOUS.observation_mean).astype(
        np.float32
    )
    expected: dict[Path, np.ndarray] = {}
    given: dict[Path, dict[str, np.ndarray]] = {}
    for name in policies:
        policy = trained(name, **({"policy": "tanh_gaussian"} if name == "bc" else {}))
        for format in ("onnx", "pt2"):
            result = export_policy(policy, tmp_path / name / f"p{SUFFIX[format]}", format)
            assert result.check.passed and result.check.largest < 1e-5
            expected[result.path], given[result.path] = by_numpy(policy, observations), {"observations": observations}
        assert np.ptp(expected[result.path], axis=0).min() > 0.1
    discrete = trained("iql", DISCRETE)
    states = draw.normal(size=(300, 4)).astype(np.float32)
    for format in ("onnx", "pt2"):
        result = export_policy(discrete, tmp_path / "discrete" / f"p{SUFFIX[format]}", format)
        expected[result.path], given[result.path] = mlp(discrete, states).argmax(1), {"observations": states}
        assert len(set(expected[result.path].tolist())) > 1
    assert result.metadata["outputs"] == [
        {
            "name": "actions",
            "shape": ["batch"],
            "dtype": "int64",
            "choices": 3,
            "meaning": "the action's number, 0 to 2",
        }
    ]
    # a stochastic file: with noise 0 a Gaussian's sample is its mean, with noise z it is the mean plus exp(log_std) z,
    # clipped
    gaussian = trained("iql")
    result = export_policy(gaussian, tmp_path / "s.onnx", stochastic=True)
    same = np.tile(np.array(CONTINUOUS.observation_mean, np.float32), (3, 1))
    noise = np.array([[0, 0], [1, -1], [50, -50]], np.float32)
    given[result.path] = {"observations": same, "noise": noise}
    step = np.array([0.4, 1.5]) * np.exp(np.clip(gaussian.state.params["actor"]["log_std"].double().numpy(), -5.0, 2.0))
    expected[result.path] = np.clip(
        by_numpy(gaussian, same) + step * noise, CONTINUOUS.action_low, CONTINUOUS.action_high
    )
    assert expected[result.path][2] == pytest.approx([0.4, 0.0])
    for path, found in zip(given, run_foreign(given), strict=True):
        if path.parent.name == "discrete":
            assert found.dtype == np.int64 and np.array_equal(found, expected[path])
        else:
            assert found.dtype == np.float32 and np.abs(found - expected[path]).max() < 1e-5, path


@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_files_take_noise_as_an_input(format: str, tmp_path: Path) -> None:
    policy = trained("iql")
    result = export_policy(policy, tmp_path / f"p{SUFFIX[format]}", format, stochastic=True)
    assert [i["name"] for i in result.metadata["inputs"]] == ["observations", "noise"] and "sample" in result.metadata[
        "policy"
    ]["acts"]


@pytest.mark.nightly
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", ["diffusion_bc", "diffusion_ql", "dtql"])
def test_denoised_and_chosen_actions(name: str, format: str, tmp_path: Path) -> None:
    """A reverse process of several steps, and candidates that critics choose among."""
    policy = trained(name, **({"greedy": "sample"} if name == "diffusion_bc" else {"candidates": 3}))
    result = export_policy(policy, tmp_path / f"p{SUFFIX[format]}", format)
    assert result.check.passed and len(result.metadata["inputs"]) > 2


def test_categorical_samples_follow_the_probabilities(tmp_path: Path) -> None:
    policy = trained("bc", DISCRETE)
    result = export_policy(policy, tmp_path / "p.pt2", "pt2", stochastic=True)
    noise = np.random.default_rng(0).uniform(size=(40_000, 3)).astype(np.float32)
    noise[0], noise[1] = 0.0, 1.0  # neither end gives NaN
    file = torch.export.load(result.path).module()
    observation = np.array([[0.3, -0.2, 0.5, 0.1]], np.float32)
    actions = file(torch.from_numpy(np.repeat(observation, len(noise), 0)), torch.from_numpy(noise)).numpy()
    graph = policy.algorithm.apply("actor", policy.state.params["actor"], torch.from_numpy(observation))
    assert np.bincount(actions, minlength=3) / len(actions) == pytest.approx(graph[0][0].exp().numpy(), abs=0.01)


def test_description(tmp_path: Path) -> None:
    import dataclasses

    from offrl.tasks.task import Task

    low, high = (-1.0,) * 3, (1.0,) * 3
    mean, std = (0.1,) * 11, (2.0,) * 11
    spec = DataSpec(
        (11,),
        3,
        action_low=low,
        action_high=high,
        observation_mean=mean,
        observation_std=std,
        name="h",
        task=Task("h", "Hopper-v5"),
    )
    policy = trained("td3_bc", spec)
    result = export_policy(policy, tmp_path / "hopper.pt2", "pt2")
    about = json.loads((tmp_path / "hopper.json").read_text())
    assert about == result.metadata
    (observations,) = about["inputs"]
    assert observations["shape"] == ["batch", 11] and observations["dtype"] == "float32"
    # Hopper's observation: z, angle of the torso, three joints; then six velocities (Gymnasium's documentation)
    assert observations["dimensions"][0] == {"index": 0, "name": "rootz position", "unit": "m", "mean": 0.1, "std": 2.0}
    assert (
        observations["dimensions"][1]["unit"] == "rad"
        and observations["dimensions"][10]["name"] == "foot_joint velocity"
    )
    assert observations["dimensions"][5] == {
        "index": 5,
        "name": "rootx velocity",
        "unit": "m/s",
        "mean": 0.1,
        "std": 2.0,
    }
    (actions,) = about["outputs"]
    assert actions["dimensions"][2] == {
        "index": 2,
        "name": "foot_joint",
        "meaning": "torque on foot_joint",
        "unit": "200 N m",
        "low": -1.0,
        "high": 1.0,
    }
    assert about["environment"] == {"id": "Hopper-v5", "note": "", "steps_limit": 1000, "actions_per_second": 125}
    assert about["policy"]["seed"] == 3 and about["policy"]["settings"] == dataclasses.asdict(policy.algorithm.config)
    entry = about["files"]["hopper.pt2"]
    assert entry["sha256"] == hashlib.sha256((tmp_path / "hopper.pt2").read_bytes()).hexdigest()
    assert entry["check"]["largest_difference"] < 1e-5 and entry["check"]["observations"] == 1000
    # another format of the same policy shares the description; another policy replaces it
    if importlib.util.find_spec("onnxruntime") is not None:
        export_policy(policy, tmp_path / "hopper.onnx")
        assert set(json.loads((tmp_path / "hopper.json").read_text())["files"]) == {"hopper.pt2", "hopper.onnx"}
    export_policy(trained("td3_bc", spec, seed=4), tmp_path / "hopper.pt2", "pt2")
    assert set(json.loads((tmp_path / "hopper.json").read_text())["files"]) == {"hopper.pt2"}


def test_a_file_that_disagrees_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained("td3_bc")
    path = tmp_path / "p.pt2"
    forward = PolicyGraph.forward

    def wrong(self: PolicyGraph, observations: torch.Tensor, *noise: torch.Tensor) -> torch.Tensor:
        return forward(self, observations, *noise) + (2e-5 if self.dtype == torch.float32 else 0.0)

    monkeypatch.setattr(PolicyGraph, "forward", wrong)
    with pytest.raises(UserError, match=r"p\.pt2 was not kept: .*largest difference.* 1e-05 is allowed"):
        export_policy(policy, path, "pt2")
    assert not list(tmp_path.iterdir())


def test_check_sees_what_is_wrong() -> None:
    policy, discrete = trained("td3_bc"), trained("bc", DISCRETE)
    graph, choose = PolicyGraph(policy, False), PolicyGraph(discrete, False)

    def right(x: np.ndarray, noise: Any) -> np.ndarray:
        return graph(torch.from_numpy(x)).numpy()

    def other(x: np.ndarray, noise: Any) -> np.ndarray:
        actions = choose(torch.from_numpy(x)).numpy()
        actions[:1] = (actions[:1] + 1) % 3
        return actions

    def failing(x: np.ndarray, noise: Any) -> np.ndarray:
        if len(x) == 1:
            raise RuntimeError("batch of one\nmore")
        return right(x, noise)

    assert check(policy, False, right, (), "here").passed
    assert (
        "nan is the largest" in check(policy, False, lambda x, n: right(x, n) * np.float32(np.nan), (), "here").failure
    )
    assert "far" not in check(policy, False, failing, (), "here").failure
    assert (
        check(policy, False, failing, (), "here").failure == "a batch of 1 fails in here (RuntimeError: batch of one)"
    )
    assert "float64 (1000, 2)" in check(policy, False, lambda x, n: right(x, n).astype(np.float64), (), "here").failure
    unclipped = check(
        policy,
        False,
        lambda x, n: np.where(np.abs(x).max(1, keepdims=True) > 1e4, 9.0, right(x, n)).astype("f4"),
        (),
        "here",
    )
    assert "standard deviations from the mean" in unclipped.failure
    assert check(discrete, False, lambda x, n: choose(torch.from_numpy(x)).numpy(), (), "here").passed
    assert "of the actions differ" in check(discrete, False, other, (), "here").failure


def test_draws() -> None:
    assert draws_of(trained("iql"), False) == () and draws_of(trained("td3_bc"), True) == (Draw("normal", (None, 2)),)
    assert draws_of(trained("bc", DISCRETE), True) == (Draw("uniform", (None, 3)),)


OWN_GOALS = dataclasses.replace(CONTINUOUS, goal_dim=3)


@pytest.mark.parametrize(
    ("name", "format", "spec", "settings"),
    [
        pytest.param("hiql", "onnx", CONTINUOUS, {}, marks=needs_onnx),
        pytest.param("hiql", "pt2", CONTINUOUS, {}, marks=pytest.mark.nightly),
        ("gciql", "pt2", OWN_GOALS, {}),
        pytest.param("crl", "onnx", DISCRETE, {}, marks=[needs_onnx, pytest.mark.nightly]),
        pytest.param("fb", "pt2", CONTINUOUS, {"task": "goal"}, marks=pytest.mark.nightly),
    ],
)
def test_goals_are_an_input(tmp_path: Path, format: str, name: str, spec: DataSpec, settings: dict[str, Any]) -> None:
    policy = trained(name, spec, **settings)
    result = export_policy(policy, tmp_path / f"p{SUFFIX[format]}", format)
    assert result.check.passed
    told = result.metadata["inputs"][1]
    assert told["name"] == "goals" and told["shape"] == ["batch", spec.goal_dim or spec.observation_dim]
    assert ("achieved_goals" in told["meaning"]) == (spec is OWN_GOALS)
    if format == "pt2" and not spec.discrete:  # the goal matters, and the file heeds it as the policy does
        draw = np.random.default_rng(0)
        observations, goals = (draw.normal(size=(6, n)).astype("f4") for n in (spec.observation_dim, told["shape"][1]))
        file = torch.export.load(result.path).module()
        found = [
            file(torch.from_numpy(observations), torch.from_numpy(g)).numpy()
            for g in (goals, 30.0 * goals[::-1].copy())
        ]
        assert not np.allclose(*found)
        for actions, g in zip(found, (goals, 30.0 * goals[::-1]), strict=True):
            policy.reset()
            np.testing.assert_allclose(actions, policy.act(observations, goal=g), rtol=1e-4, atol=1e-5)


def test_a_policy_keeps_the_epsilon_of_its_layer_norms(tmp_path: Path) -> None:
    observations = np.random.default_rng(0).normal(size=(5, 5)).astype("f4")
    policy = trained("td3_awr", layer_norm_epsilon=0.25)
    actions = policy.act(observations)
    policy.save(tmp_path / "policy")
    np.testing.assert_array_equal(TrainedPolicy.load(tmp_path / "policy").act(observations), actions)


@pytest.mark.nightly
@pytest.mark.parametrize("format", FORMATS)
def test_an_exported_policy_keeps_it(tmp_path: Path, format: str) -> None:
    policy = trained("td3_awr", layer_norm_epsilon=0.25)
    assert export_policy(policy, tmp_path / f"p{SUFFIX[format]}", format).check.passed  # against the policy itself


def test_what_cannot_be_exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained("bc")
    with pytest.raises(UserError, match="deterministic: stochastic=true has nothing to draw"):
        export_policy(policy, tmp_path / "p.onnx", stochastic=True)
    with pytest.raises(UserError, match="opset=18 belongs to format=onnx"):
        export_policy(policy, tmp_path / "p.pt2", "pt2", opset=18)
    with pytest.raises(UserError, match=r"format=onxx is not known.*Did you mean 'onnx'"):
        export_policy(policy, tmp_path / "p.pt2", "onxx")
    (tmp_path / "package.json").write_text('{"name": "mine"}')
    with pytest.raises(UserError, match=r"package\.json is no description"):
        export_policy(policy, tmp_path / "package.pt2", "pt2")
    assert (tmp_path / "package.json").read_text() == '{"name": "mine"}'
    for package in ("onnxruntime", "onnxscript", "onnx") if importlib.util.find_spec("onnxruntime") else ():
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            with pytest.raises(UserError, match=rf"pip install 'offrl\[export\]': {package} cannot be imported"):
                export_policy(policy, tmp_path / "p.onnx")
    monkeypatch.setattr(MemorylessActor, "start", lambda self, episodes: torch.zeros(episodes, 4))
    with pytest.raises(UserError, match="policy of bc remembers the episode so far"):
        export_policy(policy, tmp_path / "p.pt2", "pt2")
    assert [p.name for p in tmp_path.iterdir()] == ["package.json"]


def test_what_plans_is_exported_without_planning(tmp_path: Path) -> None:
    """By the setting with which `offrl evaluate` scores it, from a run that planned."""
    columns = np.zeros((40, 3)), np.random.default_rng(0).uniform(-1, 1, (40, 2)), np.zeros(40), np.zeros(40, bool)
    data = offrl.from_arrays(*columns, np.arange(40) % 20 == 19)
    settings = {"algo.hidden": [8], "algo.encoder_hidden": [8], "algo.latent": 8, "algo.batch_size": 4, "quiet": True}
    settings |= {"eval.env": "none", "compile": "eager"}
    run = offrl.train("tdmpc2", data, seeds=1, steps=2, name="run", runs_dir=str(tmp_path), settings=settings)
    place = [str(run.dir), "format=pt2", f"out={tmp_path}"]
    with pytest.raises(UserError, match=r"plans cannot be exported: offrl export RUN acting.planning=false"):
        export(place)
    with pytest.raises(UserError, match=r"policy of tdmpc2 cannot act with another latent, only .*planning"):
        export([*place, "acting.latent=16"])
    with pytest.raises(UserError, match="policy of tdmpc2 cannot act with another latent"):
        run.export("pt2", acting={"latent": 16})
    assert (
        export([*place, "acting.planning=false", "acting.plan_population=7"]) == 0
    )  # fewer than elites: nothing plans
    about = json.loads((tmp_path / "policy.json").read_text())["policy"]
    assert about["acting"] == {"planning": False, "plan_population": 7} and not about["settings"]["planning"]
    act = runner_of(tmp_path / "policy.pt2", "pt2", ["observations"])
    policy = run.policy().with_settings({"planning": False})
    for observation in np.random.default_rng(1).normal(size=(50, 1, 3)).astype(np.float32):
        assert act(observation)[0] == pytest.approx(policy.act(observation)[0], abs=1e-5)
    saved = TrainedPolicy.load(tmp_path / "policy.safetensors")
    assert not saved.algorithm.config.planning


def runner_of(path: Path, format: str, names: list[str]) -> Any:
    """A function of an exported file's inputs that gives its outputs."""
    if format == "pt2":
        module = torch.export.load(path).module()
        return lambda *x: [y.numpy() for y in module(*map(torch.from_numpy, x))]
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    return lambda *x: session.run(None, dict(zip(names, x, strict=True)))


@pytest.mark.parametrize("format", ["pt2", pytest.param("onnx", marks=[pytest.mark.slow, needs_onnx])])
def test_a_memory_goes_in_and_comes_out(format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained("bc")
    act, size = MemorylessActor.act, policy.spec.observation_dim

    def remembering(self: Any, carry: Any, obs: torch.Tensor, key: torch.Tensor, *, explore: bool) -> Any:
        level = 0.5 * carry["level"] + obs
        return act(self, None, level, key, explore=explore)[0], {"count": carry["count"] + 1, "level": level}

    def start(self: Any, episodes: int) -> Any:
        return {"count": torch.zeros(episodes, dtype=torch.int64), "level": torch.zeros(episodes, size)}

    for name, value in {"resettable": True, "act": remembering, "start": start}.items():
        monkeypatch.setattr(MemorylessActor, name, value)
    exported = export_policy(policy, tmp_path / f"p.{format}", format)
    entries = {entry["name"]: entry for entry in exported.metadata["inputs"]}
    assert exported.check.passed and exported.metadata["version"] == 2
    assert entries["state_0"]["shape"] == ["batch"] and entries["state_1"]["shape"] == ["batch", size]
    assert entries["state_1"]["begin"] == "zeros" and entries["state_0"]["dtype"] == "int64"
    assert [out["name"] for out in exported.metadata["outputs"]] == ["actions", "next_state_0", "next_state_1"]
    run = runner_of(exported.path, format, list(entries))
    carry, memory = policy.start(2), [np.zeros(2, np.int64), np.zeros((2, size), np.float32)]
    for t, observation in enumerate(np.random.default_rng(0).normal(size=(50, 2, size)).astype(np.float32)):
        expected, carry = policy.step(carry, observation, t)
        actions, *memory = run(observation, *memory)
        np.testing.assert_allclose(actions, expected, rtol=0, atol=1e-5)
    assert memory[0].tolist() == [50, 50]


RECURRENT: dict[str, Any] = {"recurrent_width": 8, "groups": 2, "width": 8, "members": 1, "penalty": 0.0}


@pytest.mark.parametrize("format", ["pt2", pytest.param("onnx", marks=[pytest.mark.slow, needs_onnx])])
@pytest.mark.parametrize(
    ("name", "settings", "states"),
    [
        ("rssm", {"core": "scan", **RECURRENT}, 7),
        ("rssm", {"latents": "gaussian", "latent": 3, **RECURRENT}, 3),
        ("director", RECURRENT, 5),
        ("skill_critic", {"skills_settings": {"skill_length": 7, "skill_dim": 2}}, 2),
    ],
)
def test_memories_of_several_tensors(
    name: str, settings: dict[str, Any], states: int, format: str, tmp_path: Path
) -> None:
    """Played for 50 steps with a memory that goes round, of layers of a scan, or with a goal or a skill that is
    renewed, the file acts as the policy does.
    """
    kind = registry.get("algo", name)
    algorithm = kind(kind.Config(**settings), CONTINUOUS)
    policy = TrainedPolicy(algorithm, algorithm.init(0), 0)
    exported = export_policy(policy, tmp_path / f"p.{format}", format)
    entries = exported.metadata["inputs"]
    assert [e["name"] for e in entries] == ["observations", *(f"state_{i}" for i in range(states))]
    file = runner_of(exported.path, format, [e["name"] for e in entries])
    memory = [np.zeros([1, *e["shape"][1:]], e["dtype"]) for e in entries[1:]]
    for i in range(50):
        x = (10.0 * np.sin(np.arange(5.0) + i)).astype(np.float32)
        actions, *memory = file(x[None], *memory)
        np.testing.assert_allclose(actions[0], policy.act(x), atol=1e-5)


@pytest.mark.slow
@needs_onnx
def test_an_actor_with_a_memory_may_give_its_own_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained("bc")

    class Own(torch.nn.Module):
        def __init__(self, actor: Actor) -> None:
            super().__init__()
            self.net: Any = actor.state.params["actor"].module  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)[0]

    monkeypatch.setattr(MemorylessActor, "start", lambda self, episodes: torch.zeros(episodes, 4))
    monkeypatch.setattr(MemorylessActor, "graph", lambda self, explore: Own(self), raising=False)
    assert export_policy(policy, tmp_path / "p.onnx").check.passed


@needs_onnx
def test_policies_that_draw_otherwise_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained("bc")

    def by_integers(self: Any, carry: Any, obs: torch.Tensor, key: torch.Tensor, *, explore: bool) -> Any:
        return rng.randint(key, (obs.shape[0], 2), 3).float() - 1.0, carry

    def by_batch(self: Any, carry: Any, obs: torch.Tensor, key: torch.Tensor, *, explore: bool) -> Any:
        return rng.normal(key, (2 * len(obs), 2))[: len(obs)], carry

    def several(self: Any, carry: Any, obs: torch.Tensor, key: torch.Tensor, *, explore: bool) -> Any:
        a, b = rng.split(rng.fold_in(key, 1))
        candidates = rng.normal(a, (3, obs.shape[0], 2)).mean(0) + rng.uniform(b, (obs.shape[0], 2), -0.1, 0.1)
        return (candidates + 0.0 * self.apply("actor", obs)[0]).tanh(), carry

    monkeypatch.setattr(MemorylessActor, "act", by_integers)
    with pytest.raises(UserError, match="bc cannot be exported: it draws whole numbers"):
        export_policy(policy, tmp_path / "p.pt2", "pt2")
    monkeypatch.setattr(MemorylessActor, "act", by_batch)
    with pytest.raises(UserError, match=r"of shape \(6, 2\) for 3 observations and \(10, 2\) for 5"):
        export_policy(policy, tmp_path / "p.pt2", "pt2")
    monkeypatch.setattr(MemorylessActor, "act", several)
    for format in ("onnx", "pt2"):
        result = export_policy(policy, tmp_path / f"p{SUFFIX[format]}", format)
        shapes = [(i["name"], i["shape"]) for i in result.metadata["inputs"]]
        assert shapes[1:] == [("noise_0", [3, "batch", 2]), ("noise_1", ["batch", 2])]


@needs_onnx
def test_a_constant_batch_size_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = trained("bc")

    def act(self: Any, carry: Any, obs: torch.Tensor, key: torch.Tensor, *, explore: bool) -> Any:
        return self.apply("actor", obs)[0] + torch.zeros(len(obs), 2), carry

    monkeypatch.setattr(MemorylessActor, "act", act)
    with pytest.raises(UserError, match=r"the number of observations a constant \(len\(obs\)"):
        export_policy(policy, tmp_path / "p.onnx")


@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_observations_of_other_shapes(format: str, tmp_path: Path) -> None:
    """A matrix goes in as a matrix; the file flattens it as the policy does."""
    import dataclasses

    spec = DataSpec((2, 3), 2, action_low=(-1.0, -1.0), action_high=(1.0, 1.0))
    result = export_policy(trained("td3_bc", spec), tmp_path / f"p{SUFFIX[format]}", format)
    assert result.metadata["inputs"][0]["shape"] == ["batch", 2, 3] and result.check.passed
    normalised = dataclasses.replace(spec, observation_mean=(1.0,) * 6, observation_std=(2.0,) * 6)
    assert export_policy(trained("td3_bc", normalised), tmp_path / f"p{SUFFIX[format]}", format).check.passed


@pytest.mark.slow
def test_float64_observations_are_refused_by_the_runtimes(tmp_path: Path) -> None:
    policy = trained("td3_bc")
    observations = np.random.default_rng(0).normal(size=(6, 5))
    result = export_policy(policy, tmp_path / "p.pt2", "pt2")
    with pytest.raises(RuntimeError, match="dtype mismatch"):
        torch.export.load(result.path).module()(torch.from_numpy(observations))
    ort = pytest.importorskip("onnxruntime", reason="needs pip install 'offrl[export]'")
    session = ort.InferenceSession(export_policy(policy, tmp_path / "p.onnx").path)
    with pytest.raises(Exception, match="Unexpected input data type"):
        session.run(None, {"observations": observations})


@needs_onnx
@pytest.mark.parametrize(
    "opset",
    [pytest.param(18, marks=pytest.mark.slow), pytest.param(20, marks=NIGHTLY), pytest.param(21, marks=NIGHTLY)],
)
def test_opsets(opset: int, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="needs pip install 'offrl[export]'")
    result = export_policy(trained("iql"), tmp_path / "p.onnx", opset=opset)
    model = onnx.load(result.path)
    assert [o.version for o in model.opset_import if o.domain == ""] == [opset] and model.ir_version <= 10
    assert [d.dim_param or d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim] == ["batch", 5]
    onnx.checker.check_model(model)


@pytest.mark.slow
def test_steep_policies_are_allowed_float32s_own_error(tmp_path: Path) -> None:
    policy = trained("td3_bc")
    steep = {k: 20.0 * v for k, v in policy.state.params["actor"].items()}
    steep_policy = TrainedPolicy(policy.algorithm, policy.state._replace(params={"actor": steep}), 0)
    assert export_policy(steep_policy, tmp_path / "p.pt2", "pt2").check.allowed > 1e-5
    assert export_policy(trained("bc"), tmp_path / "q.pt2", "pt2").check.allowed == 1e-5
