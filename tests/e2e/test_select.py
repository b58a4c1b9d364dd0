"""`offrl select`: from runs to a ranking, and what a user can get wrong."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from offrl import ope
from offrl.data import load_dataset
from offrl.data.transforms.episodes import keep_episodes
from offrl.ope.candidates import data_of, find_runs, run_candidates
from offrl.runs.settings import run_settings

from .conftest import Offrl

TINY = "updates=20 behavior_updates=20 seeds=2 hidden=[8] compile=eager bootstrap=10"
POLICIES = """
import numpy as np

def zero(observations, rng):
    return np.zeros((len(observations), 3))

def noise(observations, rng):
    return rng.uniform(-1, 1, (len(observations), 3))

both = {"zero": zero, "noise": noise}
wide = {"a": zero, "b": lambda observations, rng: np.zeros((len(observations), 4))}
"""


@pytest.fixture
def trained(offrl: Offrl, write: Callable[..., Path]) -> Path:
    """A run of two seeds with the checkpoints of two steps."""
    data = write("hopper.hdf5")
    arguments = (
        f"dataset={data} eval.env=none seeds=2 steps=20 checkpoint.every=10 checkpoint.keep=0 name=one "
        "dataset.reward_scale=0.1"
    )
    assert offrl(f"train algo=td3_bc {arguments}").status == 0
    return data


def test_ranks_checkpoints_and_other_policies(offrl: Offrl, trained: Path) -> None:
    Path("mine.py").write_text(POLICIES)
    names = [f"one/seed_{s}@{t}" for t in (10, 20) for s in (0, 1)] + ["zero", "noise"]
    lines = [f"{name},{i},{10 - i}" for i, name in enumerate(names)]
    Path("truth.csv").write_text("\n".join(["candidate,return,discounted", *lines]))
    result = offrl(f"select runs/one policy=mine.py:both method=all returns=truth.csv {TINY}")
    assert result.status == 0, result.err
    assert "updates=20 is too few" in result.err
    for words in (
        "rank",
        "fqe [95% interval]",
        "wis [95% interval]",
        "dr [95% interval]",
        "own Q",
        "true value",
        "the data's own episodes",
        "regret@1",
        "regret@5",
        "rank correlation",
        "use the order, not the numbers",
    ):
        assert words in result.out
    with open("runs/one/select.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["rank"] for r in rows] == [str(i + 1) for i in range(6)] and {r["candidate"] for r in rows} == set(names)
    values = [float(r["fqe"]) for r in rows]
    assert values == sorted(values, reverse=True)
    assert all(float(r["fqe_low"]) <= float(r["fqe"]) <= float(r["fqe_high"]) for r in rows)
    assert {r["candidate"]: float(r["truth"]) for r in rows} == {name: 10.0 - i for i, name in enumerate(names)}
    assert {r["candidate"] for r in rows if r["own_q"]} == set(names[:4])  # functions have no critic


@pytest.mark.slow
def test_judges_that_need_data_only(offrl: Offrl, trained: Path) -> None:
    for method in ("lstd", "bvft"):
        result = offrl(f"select runs/one method={method} fits=[base,short,norm] out={method}.csv {TINY}")
        assert result.status == 0, result.err
        assert (
            f"{method}: of 4 candidates, fit '" in result.out
            and "was chosen for" in result.out
            and "updates=20 is too few" in result.err
        )
        with open(f"{method}.csv", newline="") as file:
            rows = list(csv.DictReader(file))
        values = [float(r[method]) for r in rows]
        assert values == sorted(values, reverse=True) and {r[f"{method}_chosen"] for r in rows} <= {
            "base",
            "short",
            "norm",
        }
    for method, header in (("td", "td: -TD error^2"), ("q", "q: own Q")):
        result = offrl(f"select runs/one method={method} out={method}.csv {TINY}")
        assert result.status == 0 and header in result.out and "it does not say which policy is good" in result.out
        assert "too few" not in result.err  # it looks at no updates
    with open("q.csv", newline="") as file:
        assert all(r["q"] == r["own_q"] for r in csv.DictReader(file))


def test_checkpoints_in_memory_on_a_part_of_the_episodes(trained: Path) -> None:
    (run,) = find_runs(["runs/one"])
    candidates, data = run_candidates(run), data_of([run])
    part = keep_episodes(data, torch.tensor([2, 0]), "two of three")
    settings = ope.OPEConfig(updates=5, seeds=1, hidden=[8], compile="eager", fits=["base", "short"])
    result = ope.evaluate_policies(
        part, candidates, ["fqe", "lstd", "td", "q", "wis"], replace(settings, behavior_updates=5)
    )
    assert result.names == tuple(candidates) and result.episodes == 2
    assert all(np.isfinite(e.value).all() for e in result.estimates.values())
    statistics = ope.gates(part, candidates)
    np.testing.assert_allclose(statistics.td_error, -result.estimates["td"].value, rtol=1e-6)
    np.testing.assert_allclose(statistics.q_start, result.own_q, rtol=1e-6)
    np.testing.assert_allclose(statistics.q_bound, 100 * np.abs(part.columns["rewards"].numpy()).max(), rtol=1e-6)
    assert statistics.finite.all() and statistics.passed.all()
    # the same of data as the run saw them: rewards times 0.1, observations normalised
    seen = load_dataset(run_settings(run.dir).dataset)
    assert seen.spec.reward_scale == 0.1
    whole = ope.gates(data, candidates)
    np.testing.assert_allclose(ope.gates(seen, candidates).td_error, whole.td_error, rtol=1e-4)


@pytest.mark.slow
def test_python_gives_the_same(offrl: Offrl, trained: Path) -> None:
    assert offrl(f"select runs out=table.csv {TINY} --quiet").status == 0
    settings = ope.OPEConfig(updates=20, behavior_updates=20, seeds=2, hidden=[8], compile="eager", bootstrap=10)
    result = ope.select("runs/one", settings=settings)
    with open("table.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["candidate"] for r in rows] == [result.names[k] for k in result.order] and rows[0][
        "candidate"
    ] == result.best
    assert [float(r["fqe"]) for r in rows] == [result.estimates["fqe"].value[k] for k in result.order]


@pytest.mark.slow
def test_values_are_in_recorded_rewards(trained: Path) -> None:
    """The run trained on rewards times 0.1; its data and its own critic are valued in those of the file."""
    settings = ope.OPEConfig(updates=5, seeds=1, hidden=[8], compile="eager")
    result = ope.select("runs/one", settings=settings)
    with h5py.File(trained) as file:
        rewards, starts = file["rewards"][:].reshape(3, 100).astype(float), file["observations"][::100]
    assert result.behavior[0] == pytest.approx((rewards * 0.99 ** np.arange(100)).sum(1).mean(), rel=1e-4)
    (run,) = find_runs(["runs/one"])
    policy = run_candidates(run)["one/seed_0@20"]
    actions, _ = policy.step(policy.start(3), starts, 0)
    own = result.own_q[result.names.index("one/seed_0@20")]
    assert own == pytest.approx(10.0 * policy.own_value(starts, actions).mean(), rel=1e-5)


def test_mistakes_are_one_line(offrl: Offrl, trained: Path, write: Callable[..., Path]) -> None:
    Path("mine.py").write_text(POLICIES)
    other = write("other.hdf5", rewards=np.ones(300, np.float32))
    small = write("small.hdf5", observations=np.random.default_rng(0).normal(size=(300, 4)).astype(np.float32))
    assert (
        offrl(f"train algo=bc dataset={other} eval.env=none seeds=1 steps=20 checkpoint.every=20 name=two").status == 0
    )
    Path("bad.csv").write_text("candidate,return\none/seed_0@10,much\n")
    Path("few.csv").write_text("candidate,return\none/seed_0@99,1\n")
    Path("empty").mkdir()
    cases = {
        "select": "usage: offrl select RUN",
        "select nowhere": "nowhere",
        "select empty": "empty is no run directory, and none is in it",
        f"select runs {TINY}": "were trained on different data: say which to evaluate on with dataset=",
        f"select runs/two {TINY}": "there is only one candidate",
        f"select policy=mine.py:both {TINY}": "name a dataset with dataset=",
        f"select runs/one policy=mine.py:wide {TINY}": "candidate b gave actions of shape (300, 4) for 300 observations",  # noqa: E501
        f"select runs/one dataset={small} {TINY}": "takes observations [11] and 3 action dimensions; small has "
        "observations [4]",
        "select runs/one method=fqq": "choose one of fqe, wis, dr, model, td, q, lstd, bvft, all",
        "select runs/one updats=3": "Did you mean 'updates'",
        "select runs/one discount=1": "discount=1.0 is out of range",
        f"select runs/one dataset={trained} dataset.reward_scale=2": "takes the data as recorded",
        f"select runs/one method=lstd fits=[base] {TINY}": "fits=[base]: a tournament needs two different ones of "
        "base, narrow",
        f"select runs/one method=lstd fits=[base,tall] {TINY}": "fits=tall is not allowed",
        f"select runs/one method=lstd tournament=td {TINY}": "tournament=td is not allowed",
        f"select runs/two method=bvft policy=mine.py:both {TINY}": "other: every reward is 1 and no episode ends",
        f"select runs/two method=td policy=mine.py:both {TINY}": "other: every reward is 1 and no episode ends",
        f"select method=td policy=mine.py:both dataset={trained} {TINY}": "none of 2 has one that is finite",
        f"select runs/one returns=missing.csv {TINY}": "missing.csv does not exist",
        f"select runs/one returns=bad.csv {TINY}": "line 2: 'much' is not a number",
        f"select runs/one returns=few.csv {TINY}": "the true returns name 0 of 4 candidates",
    }
    for command, message in cases.items():
        result = offrl(command)
        assert result.status == 2 and message in result.err, (command, result.err)
        assert result.err.count("\n") == 1 and "Traceback" not in result.err, (command, result.err)


def test_data_that_changed_or_are_gone(offrl: Offrl, trained: Path, write: Callable[..., Path]) -> None:
    write("hopper.hdf5", rewards=np.zeros(300, np.float32))
    result = offrl(f"select runs/one {TINY}")
    assert result.status == 2 and "is not what runs/one was trained on any more" in result.err
    trained.unlink()
    result = offrl(f"select runs/one {TINY}")
    assert result.status == 2 and "the data of runs/one cannot be read" in result.err and "dataset=" in result.err


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over(offrl: Offrl, trained: Path) -> None:
    (path, *_) = sorted(Path("runs/one/checkpoints").glob("step_*"))
    path.write_bytes(path.read_bytes()[:100])
    result = offrl(f"select runs/one {TINY}")
    assert (
        result.status == 0
        and "it is left out" in result.err
        and "@10" not in result.out
        and "one/seed_1@20" in result.out
    )
    shutil.rmtree("runs/one/checkpoints")
    result = offrl(f"select runs/one {TINY}")
    assert result.status == 0 and "one/seed_0@final" in result.out
    assert json.loads(Path("runs/one/run.json").read_text())["label"] == "td3_bc"


def test_help_lists_every_setting(offrl: Offrl) -> None:
    out = offrl("select --help").out
    assert all(
        f"  {name}=" in out
        for name in ("updates", "seeds", "networks", "method", "returns", "out", "dataset", "policy", "bootstrap")
    )
