"""Running statistics of observations: what they are of, where they end up, that a stop leaves no trace, and what is
refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.numpy import load_file

import offrl
from offrl.api import Run
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.export.graph import PolicyGraph
from offrl.finetuning import summary
from offrl.finetuning.config import FinetuneConfig, choose
from offrl.finetuning.moving import EPSILON, Moving, MovingStatistics
from offrl.finetuning.on_policy.parents import check_settings
from offrl.finetuning.play.turns import Turn
from offrl.system import files as checkpoint

BRC = {"algo": "brc", "algo.critic_hidden": [8], "algo.n_step": 2, "normalize": "data"}
SPEC = DataSpec((3,), 1, action_low=(-1.0,), action_high=(1.0,))


class Scales(gym.Env):
    """Three numbers of sizes far apart: the first moves with the action, the second counts, the third is noise."""

    observation_space, action_space = spaces.Box(-1e9, 1e9, (3,)), spaces.Box(-1.0, 1.0, (1,))
    discrete_action_space = spaces.Discrete(3)

    def __init__(self, discrete: bool = False) -> None:
        if discrete:
            self.action_space = self.discrete_action_space

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.x, self.t = 1e-2 * float(self.np_random.normal()), 0
        return self._seen(), {}

    def _seen(self) -> np.ndarray:
        return np.array([self.x, 1000.0 + 50.0 * self.t, self.np_random.normal()], np.float32)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.x += 1e-2 * float(np.reshape(action, -1)[0])
        self.t += 1
        return self._seen(), -abs(self.x), self.x > 0.05, self.t >= 7, {}


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "picture", lambda *a, **k: False)


def tune(folder: Path, name: str = "run", discrete: bool = False, **more: Any) -> Run:
    settings: dict[str, Any] = {
        "algo.hidden": [8],
        "algo.batch_size": 16,
        "eval.episodes": 2,
        "eval.every": 20,
        "eval.workers": 0,
        "checkpoint.every": 10,
    }
    call: dict[str, Any] = {"algo": "sac_n", "steps": 60, "warmup": 8, "envs": 2, "mixing": 0, "normalize": "running"}
    call |= {"seeds": 2, "quiet": True, "device": "cpu", "compile": "eager", "log_every": 10, **more}
    settings |= {k: call.pop(k) for k in list(call) if "." in k}
    return offrl.finetune(
        None, env=lambda: Scales(discrete), name=name, runs_dir=str(folder), settings=settings, **call
    )


def seen(run: Run, replica: int) -> np.ndarray:
    """All observations in which a replica has acted, as its replay buffer has them: [R, 3]."""
    files = [load_file(path) for path in sorted((run.dir / "replay").iterdir())]
    return np.concatenate([f["observations"][f["replica"] == replica] for f in files]).astype(np.float64)


def test_they_are_those_of_all_that_was_seen() -> None:
    """Also where the mean is large beside the deviation, and for each replica apart."""
    g = np.random.default_rng(0)
    steps = [g.normal([1e5, 0.0, -3.0], [1.0, 1e-3, 10.0], (8, 3)).astype(np.float32) for _ in range(50)]
    statistics = MovingStatistics(SPEC, 2, torch.device("cpu"))
    for rows in steps:
        statistics.add(rows)
    every = np.stack(steps).astype(np.float64).reshape(50, 2, 4, 3)
    for n in range(2):
        flat, spec = every[:, n].reshape(-1, 3), statistics.spec_of(n)
        moments = statistics.moments
        np.testing.assert_allclose(moments.mean.reshape(2, 3)[n], flat.mean(0), rtol=1e-12)
        np.testing.assert_allclose(moments.variance.reshape(2, 3)[n], flat.var(0), rtol=1e-6)
        np.testing.assert_allclose(spec.observation_mean, flat.mean(0), rtol=1e-6)
        np.testing.assert_allclose(spec.observation_std, flat.std(0) + EPSILON, rtol=1e-6)
        assert int(moments.num_values.reshape(2, 3)[n, 0]) == 200


def test_batches_follow_them() -> None:
    """Columns of observations alone are normalised, whatever their axes; windows of states too."""
    statistics = MovingStatistics(replace(SPEC, observation_shape=(2,)), 2, torch.device("cpu"))
    statistics.add(np.array([[1.0, 10.0], [3.0, 30.0], [5.0, 5.0], [5.0, 5.0]], np.float32))
    raw = torch.tensor([3.0, 20.0])
    batch = {"observations": raw.expand(2, 4, 2), "next_observations": raw.expand(2, 4, 5, 2), "rewards": torch.ones(2)}
    made = statistics.of_batch(batch)
    first, second = [1.0 / (1.0 + EPSILON), 0.0], [-2.0 / EPSILON, 15.0 / EPSILON]
    for name, shape in (("observations", (4, 2)), ("next_observations", (4, 5, 2))):
        torch.testing.assert_close(made[name][0], torch.tensor(first).expand(shape))
        torch.testing.assert_close(made[name][1], torch.tensor(second).expand(shape))
    assert made["rewards"] is batch["rewards"] and batch["observations"].data_ptr() == raw.data_ptr()


@pytest.mark.parametrize("algo", ["sac_n", pytest.param("simbav2", marks=pytest.mark.nightly)])
def test_a_policys_file_holds_them(algo: str, tmp_path: Path) -> None:
    """Its actions for raw observations are those of its network for normalised ones; an exported file has the same."""
    more = {"algo.critic_hidden": [8]} if algo == "simbav2" else {}
    run = tune(tmp_path, algo=algo, **more)
    for n in range(2):
        rows, policy = seen(run, n), run.policy(n)
        assert rows.shape == (60, 3) and rows[:, 1].mean() > 1000.0
        np.testing.assert_allclose(policy.spec.observation_mean, rows.mean(0), rtol=1e-5)
        np.testing.assert_allclose(policy.spec.observation_std, rows.std(0) + EPSILON, rtol=1e-5)
        raw = rows[:20].astype(np.float32)
        expected = policy.act(raw)
        x = torch.from_numpy(((raw - rows.mean(0)) / (rows.std(0) + EPSILON)).astype(np.float32))
        dist = policy.algorithm.apply("actor", policy.state.params["actor"], x)
        np.testing.assert_allclose(policy.algorithm.policy.mode(dist).detach(), expected, atol=1e-5)
        exported = PolicyGraph(policy, False)(torch.from_numpy(raw)).numpy()
        np.testing.assert_allclose(exported, expected, atol=1e-5)
        assert expected.std() > 0
    assert run.policy(0).spec.observation_mean != run.policy(1).spec.observation_mean


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="plain"),
        pytest.param({"algo.n_step": 3, "capacity": 25}, id="windows", marks=pytest.mark.nightly),
        pytest.param(BRC, id="returns", marks=pytest.mark.nightly),
        pytest.param({"algo": "iql", "discrete": True}, id="discrete", marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("moment", [23, pytest.param(51, marks=pytest.mark.nightly)])
def test_a_stop_leaves_no_trace(
    moment: int, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after kill -9: what came after the last checkpoint is played again, and counts once."""
    whole = tune(tmp_path, "whole", **settings)
    add, calls = Moving.add, []

    def dies(self: Moving, turn: Turn) -> None:
        calls.append(1)
        if len(calls) == moment // 2:
            raise SystemExit
        add(self, turn)

    monkeypatch.setattr(Moving, "add", dies)
    with pytest.raises(SystemExit):
        tune(tmp_path, "stopped", **settings)
    monkeypatch.setattr(Moving, "add", add)
    resumed = tune(tmp_path, "stopped", **settings)
    (tensors, _), (expected, _) = (checkpoint.load_latest(r.dir) or ({}, {}) for r in (resumed, whole))
    moving = "returns/largest" if settings == BRC else "statistics/mean"
    assert tensors and tensors.keys() == expected.keys() and bool((tensors[moving] != 0.0).all())
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name]), name
    for name in ("metrics.jsonl", "scores.csv", "policies/seed_0.safetensors", "policies/seed_1.safetensors"):
        assert (resumed.dir / name).read_bytes() == (whole.dir / name).read_bytes(), name


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mixing": 0.5, "dataset": "builtin"}, "normalize=running is for fresh parameters without data"),
        ({"mixing": 0, "dataset": "builtin"}, "normalize=running is for fresh parameters without data"),
        ({"algo": "gciql"}, "normalize=running: gciql draws goals from observations as they were played"),
        ({"algo": "mbpo", "warmup": 30}, "normalize=running: mbpo learns a model of observations as they were played"),
        ({"normalize": "moving"}, "normalize=moving is not allowed; choose one of auto, data, running"),
    ],
)
def test_what_they_do_not_go_with(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error:
        tune(tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_what_learns_from_its_own_play_has_its_own() -> None:
    with pytest.raises(UserError, match="normalize= belongs to mode=transitions: ppo learns without data"):
        check_settings({"normalize": "running"}, "ppo")


def test_an_algorithm_may_be_used_with_them() -> None:
    """Only where there are no data at all, and a command's setting wins."""
    config, online = FinetuneConfig(steps=2000), {"normalize": "running"}
    assert choose(config, online, fresh=True, without_data=True).normalize == "running"
    assert choose(config, online, fresh=True).normalize == "data"
    data = replace(config, normalize="data")
    assert choose(data, online, fresh=True, without_data=True).normalize == "data"
