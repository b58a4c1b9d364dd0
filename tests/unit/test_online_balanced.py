"""Batches that are balanced between data and play, in `offrl finetune`: what they are made of, that a stop leaves no
trace, and what is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl import rng
from offrl.api import Run
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.transitions import TransitionSampler
from offrl.errors import UserError
from offrl.finetuning import summary
from offrl.finetuning.config import FinetuneConfig, choose
from offrl.finetuning.on_policy.parents import check_settings
from offrl.finetuning.replay import balanced
from offrl.finetuning.replay.balanced import BalancedBatches
from offrl.finetuning.replay.ring import Ring
from offrl.system import files as checkpoint
from tests.unit.test_online_interventions import Stopping

COLUMNS = {"observations": ((2,), torch.float32), "actions": ((1,), torch.float32), "rewards": ((), torch.float32)}
COLUMNS |= {"next_observations": ((2,), torch.float32), "masks": ((), torch.float32)}

OF_DATA = 10_000  # the reward of the first row of the data; those of play are smaller


@pytest.fixture(autouse=True)
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summary, "picture", lambda *a, **k: False)
    monkeypatch.setattr(balanced, "WIDTHS", (8, 8))


def data(count: int = 6) -> Dataset:
    """Rows 10000, 10001, ...: by their rewards."""
    g = np.random.default_rng(0)
    return from_arrays(
        g.normal(size=(count, 2)),
        np.linspace(-2, 4, count)[:, None],
        OF_DATA + np.arange(count),
        episode_ends=[count - 1],
    )


def played(counts: list[int], capacity: int = 5000, mean: float = 0.0) -> Ring:
    """Row i of each replica has reward i."""
    ring, g = Ring(COLUMNS, len(counts), capacity, torch.device("cpu")), np.random.default_rng(1)
    for n, count in enumerate(counts):
        rows = {name: mean + g.normal(size=(count, *shape)) for name, (shape, _) in COLUMNS.items()}
        ring.add(np.full(count, n), {**rows, "rewards": np.arange(count)})
    return ring


def batches(ring: Ring, size: int = 100, fresh: float = 0.5, seeds: tuple[int, ...] = (0, 1)) -> BalancedBatches:
    dataset, sampler = data(200), TransitionSampler()
    keys = torch.stack([rng.make_key(seed) for seed in seeds])
    return BalancedBatches(ring, sampler, sampler.prepare(dataset), keys, size, dataset.spec, 5.0, fresh)


def test_new_rows_have_a_share_that_falls_as_play_grows() -> None:
    """Half of a batch while there are 1,000 rows or fewer, a sixth with 3,000; the others are of all rows, about alike,
    for w begins at 1.
    """
    made = batches(played([50, 4000], capacity=3000), fresh=0.5)
    few, many = torch.cat([made.get(step)["rewards"] for step in range(40)], 1)
    assert few[few < OF_DATA].max() < 50 and not (many < 1000).any()  # which are overwritten
    for rewards, first, new, of_play in ((few, 0, 0.5, 50), (many, 3000, 0.5 / 3, 1000)):
        share = float(((rewards >= first) & (rewards < OF_DATA)).double().mean())
        rows = 200 + (50 if first == 0 else 3000)
        assert share == pytest.approx(new + (1 - new) * of_play / rows, abs=0.04)
    assert len(set(many[many >= OF_DATA].int().tolist())) > 100


def test_without_new_rows_batches_are_of_all_rows_alike_at_first() -> None:
    made = batches(played([100, 1]), fresh=0.0)
    drawn = torch.cat([made.get(step)["rewards"] for step in range(20)], 1) < OF_DATA
    assert float(drawn[0].double().mean()) == pytest.approx(100 / 300, abs=0.05)
    assert float(drawn[1].double().mean()) == pytest.approx(1 / 201, abs=0.01)
    means = made.means(20)
    assert means["replay/play"] == pytest.approx(drawn.double().mean(1).tolist())
    # two candidates of 200 rows and two of one row: two and a little count
    assert means["replay/effective_candidates"][1] == pytest.approx(402**2 / (2 * (200**2 + 1)), abs=0.02)
    assert made.means(0) == {} and not made.sums.any()


def test_rows_that_look_like_play_are_drawn_more_often() -> None:
    made = batches(played([100], mean=3.0), fresh=0.0, seeds=(0,))
    made.density.adam.learning_rate = 1e-2
    for step in range(60):
        made.get(step)
    made.means(60)
    rewards = torch.cat([made.get(step)["rewards"] for step in range(60, 80)], 1)
    share = float((rewards < OF_DATA).double().mean())
    metrics = made.means(20)
    assert share > 1.2 * 100 / 300 and metrics["replay/play"][0] == pytest.approx(share)
    assert metrics["replay/density_loss"][0] < -0.5  # at w = 1 it is 0


def test_one_replica_draws_the_same_alone() -> None:
    both, alone = batches(played([60, 70])), batches(played([60]), seeds=(0,))
    for step in range(5):
        one, two = both.get(step), alone.get(step)
        assert torch.equal(one["rewards"][0], two["rewards"][0])


def tune(folder: Path, run: Run | None = None, name: str = "run", **more: Any) -> Run:
    settings: dict[str, Any] = {"algo.batch_size": 8, "eval.episodes": 1, "eval.every": 0, "eval.workers": 0}
    settings |= {"log_every": 7, "max_steps": 4, "compile": "eager"}
    call: dict[str, Any] = {"steps": 14, "warmup": 4, "replay": "balanced", "dataset": data(), "env": Stopping}
    call |= {} if run is not None else {"algo": "td3_bc", "seeds": 2, "algo.hidden": [4]}
    call |= more
    settings |= {k: call.pop(k) for k in list(call) if "." in k}
    return offrl.finetune(
        run, runs_dir=str(folder), name=name, settings=settings, device="cpu", quiet=True, **{"env": Stopping, **call}
    )


def offline(folder: Path, algo: str, **settings: Any) -> Run:
    settings = {"algo.hidden": [4], "algo.batch_size": 8, "eval.env": "none", "compile": "eager", **settings}
    call: dict[str, Any] = {"seeds": 2, "steps": 4, "name": algo, "runs_dir": str(folder), "device": "cpu"}
    return offrl.train(algo, data(), settings=settings, quiet=True, **call)


@pytest.mark.usefixtures("heeds_signals")
@pytest.mark.parametrize(
    "algo, more",
    [
        ("td3_bc", {}),
        pytest.param("td3_bc", {"capacity": 6, "checkpoint.every": 3, "utd": 2}, marks=pytest.mark.nightly),
        pytest.param("iql", {"algo.n_step": 2, "envs": 2, "log_every": 8}, marks=pytest.mark.nightly),
        pytest.param("cal_ql", {"algo.actions": 2}, marks=pytest.mark.nightly),
    ],
)
def test_a_stop_leaves_no_trace(algo: str, more: dict[str, Any], tmp_path: Path, monkeypatch: Any) -> None:
    """Of a run, or of fresh parameters: networks, their optimiser and the sums of metrics go on where they were."""
    settings = {k: v for k, v in more.items() if k.startswith("algo.")}
    parent = None if algo == "td3_bc" else offline(tmp_path, algo, **settings)
    more = {k: v for k, v in more.items() if k not in settings}

    def play(name: str, stop_at: int = -1) -> Run:
        monkeypatch.setattr(Stopping, "steps", 0)
        monkeypatch.setattr(Stopping, "stop_at", stop_at)
        return tune(tmp_path, parent, name, **more)

    whole = play("whole")
    total = Stopping.steps
    lines = [json.loads(line) for line in (whole.dir / "metrics.jsonl").read_text().splitlines()]
    shares = np.array([line["replay/play"] for line in lines if "replay/play" in line])
    assert ((shares > 0) & (shares < 1)).all() and len(shares)
    assert all(np.isfinite(line["replay/density_loss"]).all() for line in lines if "replay/play" in line)
    with pytest.raises(offrl.Interrupted):
        play("stopped", total * 3 // 5)
    again = play("stopped")
    (tensors, _), (expected, _) = (checkpoint.load_latest(run.dir) or ({}, {}) for run in (again, whole))
    assert expected.keys() == tensors.keys() and any(k.startswith("batches/opt/nu/") for k in expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    for name in ("metrics.jsonl", "scores.csv", "policies/seed_1.safetensors"):
        assert (again.dir / name).read_bytes() == (whole.dir / name).read_bytes(), name
    assert whole.record["identity"]["finetune"]["replay"] == "balanced"
    with pytest.raises(UserError, match=r"began with replay_temperature=5.0, not 2"):
        offrl.finetune(resume=whole.dir, dataset=data(), env=Stopping, replay_temperature=2.0)


def test_discrete_actions_are_told_apart() -> None:
    spec = DataSpec((2,), 1, discrete=True, num_actions=3, name="choices")
    columns = {**COLUMNS, "actions": ((), torch.int64)}
    ring, sampler = Ring(columns, 1, 10, torch.device("cpu")), TransitionSampler()
    rows = {name: np.zeros((4, *shape)) for name, (shape, _) in columns.items()}
    ring.add(np.zeros(4, np.int64), {**rows, "actions": np.array([0, 1, 2, 2])})
    dataset = from_arrays(np.zeros((3, 2)), np.array([0, 1, 2]), np.ones(3), episode_ends=[2], num_actions=3)
    made = BalancedBatches(ring, sampler, sampler.prepare(dataset), rng.make_key(0)[None], 6, spec, 5.0, 0.5)
    assert made._inputs(ring.take(torch.tensor([[0, 3]]))).tolist() == [[[0, 0, 1, 0, 0], [0, 0, 0, 0, 1]]]
    assert made.get(0)["actions"].dtype == torch.int64


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"replay_temperature": 0.0}, "replay_temperature=0.0 must be above 0"),
        ({"replay_temperature": -1.0}, "replay_temperature=-1.0 must be above 0"),
        ({"replay_fresh": 1.5}, "replay_fresh=1.5 is out of range"),
        ({"replay": "prioritised"}, "replay=prioritised is not allowed; choose one of uniform, balanced"),
        ({"mixing": 0}, "replay=balanced weighs what is played against data, and mixing=0 leaves the data out"),
        ({"dataset": None}, "and there are no data: dataset=NAME"),
        ({"mixing": 0.25}, "mixing=0.25: replay=balanced decides itself how much of a batch is the data's"),
        ({"replay": "uniform", "replay_fresh": 0.1}, "replay_fresh=0.1 is a setting of replay=balanced"),
        ({"algo": "qc", "algo.length": 2}, "replay=balanced weighs single transitions, and qc learns from windows"),
        ({"algo": "gciql"}, "and gciql learns from windows, goals or a model of its own: leave it out"),
        ({"algo": "mbpo", "warmup": 9}, "and mbpo learns from windows, goals or a model of its own"),
    ],
)
def test_what_cannot_be_balanced(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=words) as error:
        tune(tmp_path, **settings)
    assert "\n" not in str(error.value)


def test_what_learns_from_its_own_play_has_nothing_to_balance() -> None:
    with pytest.raises(UserError, match="replay= belongs to mode=transitions: ppo learns without data"):
        check_settings({"replay": "balanced"}, "ppo")


def test_networks_first_see_a_thousand_rows_of_play() -> None:
    """Fewer say nothing of where play goes next; as the authors do, and a command's setting wins."""
    balanced_config = FinetuneConfig(replay="balanced", steps=5000)
    config = choose(balanced_config, {"mixing": 0.5}, fresh=False)
    assert (config.warmup, config.mixing) == (1000, None)
    assert choose(replace(balanced_config, warmup=0), {}, fresh=False).warmup == 0
    assert choose(FinetuneConfig(), {}, fresh=False).warmup == 0
