"""A value head by one word of the command: its range is found once, kept with the run and its policies, and the same
when it goes on.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

import offrl as package
from offrl.system import files as checkpoint

from .conftest import Offrl

COMMAND = "train algo=iql algo.value_head=hl_gauss algo.value_bins=21 seeds=2 checkpoint.every=10 eval.env=none"


@pytest.mark.slow
def test_a_run_with_a_head_resumes_is_scored_selected_and_loaded(offrl: Offrl) -> None:
    result = offrl(f"{COMMAND} runs_dir=a")
    assert result.status == 0, result.err
    (run,) = Path("a").iterdir()
    settings = yaml.safe_load((run / "config.yaml").read_text())
    low, high = settings["algo"]["value_range"]
    assert low < 0 < high and settings["algo"]["value_head"] == "hl_gauss"
    first = (run / "config.yaml").read_bytes()

    again = offrl(f"{COMMAND} runs_dir=a steps=40")  # the same command finds its run: the range is part of its name
    assert again.status == 0 and list(Path("a").iterdir()) == [run], again.err
    assert (run / "config.yaml").read_bytes() == first.replace(b"steps: 20", b"steps: 40")
    assert offrl(f"{COMMAND} runs_dir=b steps=40").status == 0  # without a pause
    (whole,) = Path("b").iterdir()
    assert whole.name == run.name
    for name in ("seed_0", "seed_1"):
        files = [checkpoint.read(r / "policies" / f"{name}.safetensors") for r in (run, whole)]
        assert all(np.array_equal(files[0][0][k], files[1][0][k]) for k in files[1][0])
        assert files[0][1]["config"]["value_range"] == [low, high]
    assert (run / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert '"critic/saturation"' in (run / "metrics.jsonl").read_text()

    resumed = offrl(f"train resume={run} steps=50")
    assert resumed.status == 0 and yaml.safe_load((run / "config.yaml").read_text())["algo"]["value_range"] == [
        low,
        high,
    ], resumed.err
    # found or given: the same run
    assert offrl(f"{COMMAND} runs_dir=a steps=50 algo.value_range=[{low},{high}]").status == 0
    assert list(Path("a").iterdir()) == [run]

    assert offrl(f"evaluate {run} episodes=1 max_steps=10 env=Hopper-v5").status == 0
    chosen = offrl(f"select {run} updates=20 behavior_updates=20 seeds=1 hidden=[8] compile=eager bootstrap=10")
    assert chosen.status == 0 and "own Q" in chosen.out, chosen.err
    loaded = package.load(run)
    policy = loaded.policy(seed=1)
    assert policy.algorithm.critic.head.out_dim == 21 and policy.act(np.zeros(11)).shape == (3,)


def test_a_range_that_was_given_wins(offrl: Offrl) -> None:
    result = offrl(
        "train algo=td3_bc algo.value_head=c51 algo.value_bins=5 algo.value_range=[-1,2] seeds=1 name=mine "
        "eval.env=none"
    )
    assert result.status == 0, result.err
    assert yaml.safe_load(Path("runs/mine/config.yaml").read_text())["algo"]["value_range"] == [-1.0, 2.0]
    refused = offrl("train algo=td3_bc algo.value_head=c51 algo.value_bins=5 seeds=1 name=mine eval.env=none steps=30")
    assert refused.status == 2 and "value_range" in refused.err and len(refused.err.splitlines()) == 1
    refused = offrl("train algo=iql algo.value_head=hl_gaus")
    assert refused.status == 2 and "hl_gauss" in refused.err
    refused = offrl("train algo=iql algo.value_head=hl_gauss grid.value_sigma=[0.5,1]")
    assert refused.status == 2 and "value_sigma decides how the networks are built" in refused.err
