"""The commands of docs/own-data.md, run on files like those it speaks of."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from offrl.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "own-data.md"
BLOCKS = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
COMMANDS = [shlex.split(line)[1:] for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
HOUSE = """
import gymnasium as gym
import numpy as np


class House(gym.Env):
    observation_space = gym.spaces.Box(-99, 99, (2,), np.float32)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        return np.zeros(2, np.float32), 0.0, True, False, {}
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFRL_TRUST", "")
    lines = [
        f"2024-01-0{d + 1} 0{k}:00:00,h{d},{20 + k / 8},{5 - d / 4},{('off', 'low', 'high')[k % 3]},{-k / 4}"
        for d in range(3)
        for k in range(8)
    ]
    head = "timestamp,house,temp_in,temp_out,heater,cost\n"
    Path("thermostat.csv").write_text(head + "\n".join(lines) + "\n")
    Path("days").mkdir()
    for d in range(3):
        Path(f"days/h{d}.csv").write_text(head + "\n".join(lines[8 * d : 8 * d + 8]) + "\n")
    rows = "".join(f"{i // 8},{i / 8},{i % 3},{(i % 5) / 5},{i % 4},{int(i % 8 == 7)}\n" for i in range(24))
    Path("usual.csv").write_text("episode,obs_0,obs_1,action_0,reward,truncated\n" + rows)
    Path("house.py").write_text(HOUSE)
    rows = "".join(f"{60 * i},{i // 8},{i / 8},{i % 3},60,{i % 5 * 20}.5,{-i}\n" for i in range(24))
    Path("plant.csv").write_text("ts,batch,TI_1,TI_2,FC_101_SP,valve_pct,profit\n" + rows)
    rows = "".join(f"{i // 8},{i / 8},{i % 3},{(i % 5) / 5},{i % 4},{int(i % 8 == 7)}\n" for i in range(24))
    Path("tank.csv").write_text("episode,level,flow,valve,profit,overflow\n" + rows)
    Path("plant.yaml").write_text(re.findall(r"^```yaml\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)[0])


@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "data"], ids=" ".join)
def test_commands_that_look(home: None, command: list[str]) -> None:
    assert main(command) == 0


@pytest.mark.nightly
@pytest.mark.parametrize("command", [c for c in COMMANDS if c[0] == "train"], ids=" ".join)
def test_commands_that_train(home: None, command: list[str]) -> None:
    assert main([*command, "steps=2", "seeds=1", "eval.episodes=1", "algo.batch_size=8", "compile=eager"]) == 0


@pytest.mark.slow
def test_the_lines_of_python(home: None) -> None:
    code = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
    for block in code:
        exec(block.replace("steps=50_000", "steps=2, seeds=1, quiet=True"), {})


def test_all_commands_are_covered() -> None:
    assert len(COMMANDS) == 10 and {c[0] for c in COMMANDS} == {"data", "train"}
