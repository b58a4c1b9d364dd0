"""G-ADT: prompts and weights from a trained run in float64 NumPy, and the subgoals that are chosen when it acts."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import windows
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.families.subgoals import Candidates, Subgoals, nearest, words
from offrl.pretrained import Requirement
from offrl.settings.train import TrainConfig
from offrl.training import stages
from tests.support.reference import goals

K, N = 2, 9
G = np.random.default_rng(0)
OBSERVATIONS = G.normal(size=(N, 3)).astype(np.float32)
AHEAD = [2, 3, 4, 4, 4, 7, 8, 8, 8]  # two trajectories, of 5 and of 4 rows
CUT = [4, 8]  # rows without a successor


def data() -> Dataset:
    ends = np.isin(np.arange(N), CUT)
    return from_arrays(
        OBSERVATIONS, G.uniform(-1, 1, (N, 2)), np.zeros(N), np.zeros(N, bool), ends, action_low=-1.0, action_high=1.0
    )


def trained(tmp_path: Path, dataset: Dataset, teacher: str) -> Any:
    """G-ADT after three updates of `teacher`, whose networks the run's first seed has."""
    kind = registry.get("algo", "gadt")
    small = {
        "width": 8,
        "layers": 1,
        "heads": 1,
        "context": 2,
        "value_hidden": [4],
        "values_steps": 3,
        "value_batch_size": 8,
    }
    algo = kind.Config(**small, subgoal_steps=K, representation=4, candidates=5)
    run = TrainConfig(algo=algo, seeds=[0], runs_dir=str(tmp_path / "runs"), quiet=True, compile="eager", device="cpu")
    if teacher != "hiql":
        own = {"hidden": [4], "batch_size": 8}
        path = stages.train_first(run, dataset, "values", Requirement(teacher, own, steps=3, label="values"))
        run = dataclasses.replace(run, algo=dataclasses.replace(algo, values=str(path)))
    run, pretrained = stages.ready(run, dataset)
    return kind(run.algo, dataset.spec, pretrained)


def join(*x: np.ndarray) -> np.ndarray:
    return np.concatenate(x, -1).astype(np.float64)


def latent(p: Any, s: np.ndarray, g: np.ndarray) -> np.ndarray:
    z = goals.mlp(p, join(s, g), "represent.")
    return np.asarray(z * np.sqrt(z.shape[1]) / np.linalg.norm(z, axis=1, keepdims=True))


def value(name: str, p: Any, s: np.ndarray, g: np.ndarray) -> np.ndarray:
    """The mean of twins, [B]."""
    both = goals.twins(p, join(s, latent(p, s, g)), "heads.low.") if name == "hiql" else goals.twins(p, join(s, g))
    return np.asarray(both[..., 0].mean(0))


@pytest.mark.parametrize("name", ["hiql", "gcivl"])
def test_prompts_and_weights(name: str, tmp_path: Path) -> None:
    dataset = data()
    algorithm = trained(tmp_path, dataset, name)
    p, wanted = algorithm.pretrained["values"].state.params["value"], OBSERVATIONS[AHEAD]
    batch = windows(algorithm.sampler().prepare(dataset), torch.arange(N), 1)
    prompts = latent(p, OBSERVATIONS, wanted) if name == "hiql" else wanted
    np.testing.assert_allclose(batch["prompts"][:, 0], prompts, rtol=1e-4, atol=1e-5)
    gain = value(name, p, np.roll(OBSERVATIONS, -1, 0), wanted) - value(name, p, OBSERVATIONS, wanted)
    # what leads nowhere is not imitated
    weight = np.where(np.isin(np.arange(N), CUT), 0.0, np.minimum(np.exp(gain), 100.0))
    np.testing.assert_allclose(algorithm.weight(batch)[:, 0], weight, rtol=1e-4, atol=1e-6)
    tokens = algorithm.tokens(batch)
    np.testing.assert_allclose(tokens["observation"][:, 0], join(prompts, OBSERVATIONS), rtol=1e-4, atol=1e-5)


def test_it_acts_on_what_the_high_level_chooses(tmp_path: Path) -> None:
    dataset = data()
    algorithm = trained(tmp_path, dataset, "hiql")
    policy = TrainedPolicy(algorithm, algorithm.init(0), 0)
    policy.save(tmp_path / "policy.safetensors")
    here, there = G.normal(size=(4, 3)).astype(np.float32), G.normal(size=(4, 3)).astype(np.float32)
    with pytest.raises(UserError, match="towards a goal, and none was given"):
        policy.act(here)
    policy.reset()
    expected = policy.act(here, goal=there)
    high = algorithm.pretrained["values"].state.params["high"]
    mean = goals.mlp(high, join(here, there), "net.")
    chosen = mean * 2.0 / np.linalg.norm(mean, axis=1, keepdims=True)  # on the sphere of radius sqrt(4)
    np.testing.assert_allclose(policy._carry.window["prompts"][:, -1], chosen, atol=1e-5)
    policy.act(here + 1, goal=there + 1)  # another goal on the way: what was seen before stays
    np.testing.assert_allclose(policy._carry.window["prompts"][:, 0], chosen, atol=1e-5)
    shutil.rmtree(tmp_path / "runs")
    assert np.array_equal(TrainedPolicy.load(tmp_path / "policy.safetensors").act(here, goal=there), expected)


def test_subgoals_among_states_of_the_data(tmp_path: Path) -> None:
    dataset = data()
    algorithm = trained(tmp_path, dataset, "gcivl")
    source = algorithm.sampler().prepare(dataset)
    state, _ = algorithm.refresh(algorithm.init(0), source, rng.make_key(1), step=0)
    states = state.extra["candidates"][0].numpy()
    assert all((s == OBSERVATIONS).all(1).any() for s in states) and len(np.unique(states, axis=0)) > 2
    # values of another size, so that some states are within reach and some are not
    g = torch.Generator().manual_seed(2)
    own = {k: v + torch.randn(v.shape, generator=g) - 2.0 * (k == "head.bias") for k, v in state.extra["value"].items()}
    here, there = G.normal(size=(64, 3)).astype(np.float32), G.normal(size=(64, 3)).astype(np.float32)
    state = state._replace(extra={**state.extra, "value": own})
    actor = algorithm.actor(state)
    carry = actor.set_goal(actor.start(64), torch.from_numpy(there))
    _, carry = actor.act(carry, torch.from_numpy(here), rng.make_key(0), explore=False)
    reach, kinds = -(1 - 0.99**K) / (1 - 0.99), set()
    for i, prompt in enumerate(carry.window["prompts"][:, -1].numpy()):
        every = np.concatenate([states, there[i : i + 1]])
        near = value("gcivl", own, np.tile(here[i], (len(every), 1)), every)
        onward = np.append(value("gcivl", own, states, np.tile(there[i], (len(states), 1))), 0.0)
        within = near >= reach
        best = int(np.argmax(np.where(within, onward, -np.inf))) if within.any() else int(np.argmax(near))
        assert np.array_equal(prompt, every[best])
        kinds.add((bool(within.any()), best == len(states)))
    assert len(kinds) >= 3


def test_a_run_without_values_of_goals_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="gcbc has no V"):
        trained(tmp_path, data(), "gcbc")


def test_subgoals_for_others(tmp_path: Path) -> None:
    """What a latent means, and what words say of it."""
    dataset = data()
    run = trained(tmp_path, dataset, "hiql").pretrained["values"]
    provider, rows = Subgoals.of_run(run), torch.from_numpy(OBSERVATIONS)
    assert provider.latent and provider.steps == K and provider.width == 4
    meant = provider.describe(run.state, rows[:3], rows[[5, 1, 7]])
    assert nearest(provider, run.state, rows[:3], meant, Candidates(rows, rows)).tolist() == [5, 1, 7]
    spec = dataclasses.replace(dataset.spec, observation_mean=(1.0, 0.0, 0.0), observation_std=(2.0, 1.0, 1.0))
    assert words(torch.tensor([[1.25, -0.001, 3.0]]), spec, ("x", "y")) == ["x 3.5, y 0"]
    assert words(torch.tensor([[0.126, 2.0, 3.0]]), dataset.spec) == ["0 0.13, 1 2, 2 3"]
