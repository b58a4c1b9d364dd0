"""MBRCSL: which imagined episodes are kept, what they promise, what is asked for, and that the three parts are made
once.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import offrl
from offrl import registry, rng
from offrl.algorithm import stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.settings.train import TrainConfig
from offrl.system import files as checkpoint
from offrl.training.step import Step
from offrl.world_models import imagined
from offrl.world_models.model import Outcome, Prediction

KEY = rng.make_key(0)
LOW, HIGH = -1.0, 3.0


class Line:
    """A model of a point on a line: an action moves it, the reward is where it was plus noise, and beyond 1 the episode
    ends.
    """

    learns_reward = True

    def first_past(self, observations: Tensor) -> Tensor:
        return observations.new_zeros(len(observations), 0, 2)

    def later_past(self, past: Tensor, *_: Tensor) -> Tensor:
        return past

    def sample(self, tree: Any, observations: Tensor, actions: Tensor, past: Tensor, key: Tensor) -> Outcome:
        following = observations + actions
        noise = rng.normal(key, (len(actions),))
        clipped = ((following < tree["low"]) | (following > tree["high"])).any(-1)
        inside = following.clamp(tree["low"], tree["high"])
        return Outcome(inside, observations[:, 0] + 5.0 * noise, following[:, 0] > 1.0, clipped)

    def predict(self, tree: Any, observations: Tensor, actions: Tensor, past: Tensor) -> Prediction:
        # the third is no elite
        one = torch.stack([observations[:, 0] - 1.0, observations[:, 0] + 1.0, torch.full((len(actions),), 1e6)])
        return Prediction(observations.unsqueeze(0), observations.unsqueeze(0), one, one)


def data(**options: Any) -> Dataset:
    """Two episodes on the line, from 0 and from 0.5, with returns 3 and 2."""
    observations = np.array([[0.0], [0.2], [0.5], [0.6]])
    return from_arrays(
        observations,
        np.full((4, 1), 0.1),
        [1.0, 2.0, 1.0, 1.0],
        [False, True, False, True],
        action_low=-1.0,
        action_high=1.0,
        **options,
    )


def collect(steps: dict[float, float], dataset: Dataset | None = None, **options: Any) -> imagined.Kept:
    """Episodes in which each start has its own action all along."""

    def act(observations: Tensor, past: Tensor, key: Tensor) -> Tensor:
        if not chosen:  # the first step of a batch: remember where each began
            chosen.append(torch.tensor([[steps[round(float(x), 3)]] for x in observations[:, 0]]))
        calls.append(0)
        actions = chosen[0]
        if len(calls) == horizon:
            chosen.clear()
            calls.clear()
        return actions

    chosen: list[Tensor] = []
    calls: list[int] = []
    horizon = options.get("horizon", 4)
    tree = {"low": torch.tensor([LOW]), "high": torch.tensor([HIGH]), "elites": torch.tensor([0, 1])}
    given = {"threshold": 1.0, "horizon": horizon, "batch": 6, "accepted": 5, "most": 60, **options}
    return imagined.collect(Line(), tree, act, dataset or data(), KEY, **given)


def test_only_better_episodes_are_kept_and_with_expected_rewards() -> None:
    """From 0 by 0.1 the return is 0 + 0.1 + 0.2 + 0.3; from 0.5 by 0.3 it is 0.5 + 0.8, and the episode ends beyond
    1.
    """
    columns, about = collect({0.0: 0.1, 0.5: 0.3})
    assert (columns["lengths"] == 2).all() and len(columns["lengths"]) == about["beat"] >= 5
    np.testing.assert_allclose(columns["returns"].numpy(), 1.3, rtol=1e-5)
    # without the noise
    np.testing.assert_allclose(columns["rewards"].reshape(-1, 2).numpy(), [[0.5, 0.8]] * about["beat"], rtol=1e-5)
    assert columns["terminations"].reshape(-1, 2).tolist() == [[False, True]] * about["beat"]
    assert about["played"] % 6 == 0 and about["played"] < 60 and about["left"] == 0
    again, _ = collect({0.0: 0.1, 0.5: 0.3})
    assert all(torch.equal(again[k], v) for k, v in columns.items())


def test_where_none_beats_the_data_the_best_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    columns, about = collect({0.0: 0.1, 0.5: 0.3}, threshold=9.0, most=20)
    assert about["beat"] == 0 and about["played"] == 24 and len(columns["returns"]) == 5
    np.testing.assert_allclose(columns["returns"].numpy(), 1.3, rtol=1e-5)  # the five best of 24
    assert len(columns["rewards"]) == int(columns["lengths"].sum())
    imagined.say(about, "mbrcsl")
    assert "none of 24 episodes" in capsys.readouterr().err


def test_what_leaves_the_range_does_not_count() -> None:
    columns, about = collect({0.0: 0.1, 0.5: -0.9}, threshold=0.5)  # below -1 after two steps
    np.testing.assert_allclose(columns["returns"].numpy(), 0.6, rtol=1e-5)
    assert about["left"] > 0
    with pytest.raises(UserError, match="left the data's range"):
        collect({0.0: -0.9, 0.5: -0.9})


def test_returns_are_those_of_the_recorded_rewards() -> None:
    from dataclasses import replace

    dataset = data()
    dataset = replace(dataset, spec=replace(dataset.spec, reward_scale=0.1, reward_shift=-1.0))
    columns, _ = collect({0.0: 0.1, 0.5: 0.3}, dataset, threshold=40.0)
    # 0.6 and 1.3, + 1 a step, / 0.1: 46 and 33
    np.testing.assert_allclose(columns["returns"].numpy(), 10 * (0.6 + 4), rtol=1e-5)


def file(path: Path, dataset: Dataset) -> str:
    """Ten episodes of two steps that promise 1 to 10."""
    rows = torch.arange(20.0)
    columns = {
        "observations": rows.unsqueeze(1),
        "actions": torch.full((20, 1), 0.25),
        "next_observations": rows.unsqueeze(1) + 1,
    }
    columns |= {"rewards": torch.arange(1.0, 11.0).repeat_interleave(2) / 2, "terminations": rows % 4 == 1}
    columns |= {"lengths": torch.full((10,), 2), "returns": torch.arange(1.0, 11.0)}
    about = {"kind": imagined.KIND, "format": imagined.FORMAT, "spec": dataset.spec.to_json(), "best": 10.0}
    checkpoint.write(path, columns, about)
    return str(path)


def make(dataset: Dataset, **settings: Any) -> Any:
    kind = registry.get("algo", "mbrcsl")
    config = kind.Config(**{"hidden": [8], **settings})
    return kind(kind.fit_config(config, dataset), dataset.spec)


@pytest.mark.parametrize(("quantile", "asked"), [(1.0, 10.0), (0.9, 9.1), (0.0, 1.0)])
def test_what_is_asked_for(tmp_path: Path, quantile: float, asked: float) -> None:
    dataset = data()
    algorithm = make(dataset, imagined=file(tmp_path / "e.safetensors", dataset), target_quantile=quantile)
    assert algorithm.config.target_return == pytest.approx(asked) and algorithm.config.return_scale == 3.0
    np.testing.assert_allclose(algorithm.actor(algorithm.init(0)).start(2).numpy(), asked, rtol=1e-6)


@pytest.mark.parametrize(("share", "real"), [(0.0, 0), (0.25, 8), (1.0, 32)])
def test_batches(tmp_path: Path, share: float, real: int) -> None:
    dataset = data()
    algorithm = make(dataset, imagined=file(tmp_path / "e.safetensors", dataset), real_share=share)
    sampler = algorithm.sampler()
    batch = sampler(sampler.prepare(dataset), KEY, 32)
    ours = torch.isclose(batch["actions"][:, 0, 0], torch.tensor(0.1))
    assert int(ours.sum()) == real and ours[:real].all()
    first = batch["timesteps"][:, 0] == 0
    whole = batch["returns_to_go"][~ours][first[~ours]].flatten()
    assert {float(x) for x in whole} <= {float(i) for i in range(1, 11)}
    step = Step(algorithm, sampler.prepare(dataset), batch_size=32, replicas=1)
    _, sums = step.run(stack([algorithm.init(0)]), {}, 0, 3)
    assert sums["actor/loss"].isfinite().all()


def test_a_share_too_small_for_one_row(tmp_path: Path) -> None:
    dataset = data()
    with pytest.raises(UserError, match=r"algo\.real_share=0\.01 of algo\.batch_size=32 rows is none"):
        make(dataset, imagined=file(tmp_path / "e.safetensors", dataset), real_share=0.01, batch_size=32)


def test_refuses_what_is_no_file_of_episodes(tmp_path: Path) -> None:
    dataset = data()
    with pytest.raises(UserError, match="there is no such file"):
        imagined.read(tmp_path / "x", dataset.spec)
    checkpoint.write(tmp_path / "m", {"w": torch.ones(1)}, {"kind": "world_model"})
    with pytest.raises(UserError, match="no file of episodes"):
        imagined.read(tmp_path / "m", dataset.spec)
    other = SimpleNamespace(**{**vars(dataset.spec), "reward_scale": 2.0})
    with pytest.raises(UserError, match="another reward_scale"):
        imagined.read(file(tmp_path / "e", dataset), other)  # type: ignore[arg-type]


@pytest.mark.nightly
def test_a_run_makes_its_parts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dynamics = offrl.train(
        "dynamics",
        "point-stitch",
        seeds=1,
        steps=40,
        runs_dir=str(tmp_path),
        quiet=True,
        compile="eager",
        settings={"algo.members": 2, "algo.hidden": [8], "algo.epoch": 20, "algo.reward": "auto", "compare": []},
    )
    settings = {
        "algo.world_model": str(dynamics.dir),
        "algo.behaviour_steps": 20,
        "algo.behaviour_hidden": [8],
        "algo.rollouts": 20,
        "algo.rollout_batch": 20,
        "algo.horizon": 5,
        "algo.hidden": [8],
        "algo.range_margin": 9.0,
        "compare": [],
        "eval.every": 0,
    }
    common: dict[str, Any] = {"seeds": 1, "steps": 10, "runs_dir": str(tmp_path), "quiet": True, "compile": "eager"}
    run = offrl.train("mbrcsl", "point-stitch", settings=settings, **common)
    made = sorted(p.name for p in tmp_path.iterdir())
    assert sum(n.startswith("imagined-") and n.endswith(".safetensors") for n in made) == 1
    assert sum(n.startswith("behaviour-diffusion_bc") for n in made) == 1
    assert "none of 20 episodes" in capsys.readouterr().err
    times = {p: p.stat().st_mtime_ns for p in tmp_path.glob("imagined-*.safetensors")}
    other = offrl.train("mbrcsl", "point-stitch", settings={**settings, "algo.learning_rate": 1e-3}, **common)
    assert other.dir != run.dir and times == {p: p.stat().st_mtime_ns for p in tmp_path.glob("imagined-*.safetensors")}
    assert run.record["identity"]["algo"]["imagined_id"] == other.record["identity"]["algo"]["imagined_id"] != ""
    with pytest.raises(UserError, match="remembers"):  # a policy with a memory cannot play
        offrl.train("mbrcsl", "point-stitch", settings={**settings, "algo.behaviour": str(run.dir)}, **common)


@pytest.mark.parametrize(
    ("steps", "given", "expected"), [(8_000, None, 100), (80_000, None, 100), (2_000, None, 25), (10, 7, 7)]
)
def test_updates_of_the_behaviour_policy(steps: int, given: int | None, expected: int) -> None:
    """50 times through 512 rows, in batches of 256, beside 8,000 updates."""
    dataset = from_arrays(
        np.zeros((512, 1)), np.zeros((512, 1)), np.zeros(512), np.arange(512) == 511, action_low=-1.0, action_high=1.0
    )
    kind = registry.get("algo", "mbrcsl")
    required = kind.requires(TrainConfig(algo=kind.Config(behaviour_steps=given), steps=steps), dataset)
    assert required["behaviour"].steps == expected


def test_published_defaults() -> None:
    c = registry.get("algo", "mbrcsl").Config()
    published = {
        "learning_rate": 5e-5,
        "weight_decay": 0.1,
        "hidden": [1024, 1024],
        "batch_size": 256,
        "rollout_batch": 200,
        "accepted_episodes": 100,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert c.members == 7 and c.condition == "to_go" and c.policy == "deterministic" and c.behaviour_hidden == [512] * 3
