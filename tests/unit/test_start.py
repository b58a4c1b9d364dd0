"""What a command loads before it answers, and how parameters reach a module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.func import functional_call

from offrl.nn import call

MISTAKES = """
import sys
from offrl.cli.main import main
for command in ("train algo=iqll", "train algo=iql steps", "trian", "evaluate nothing", "export nothing", "finetune nothing env=Hopper-v5",
                "adapt nothing", "report nothing", "select nothing", "model nothing", "tune nothing", "benchmark nothing",
                "train resume=nothing", "--help", "--version", "train --help", "evaluate --help"):
    status = main(command.split())
    assert status == (0 if "--" in command else 2), (command, status)
    assert "torch" not in sys.modules, command
"""  # noqa: E501


def test_mistakes_are_told_before_torch_is_imported(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", MISTAKES], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "Did you mean 'iql'?" in result.stderr and result.stderr.count("nothing is not a run directory") == 6
    assert result.stderr.count("nothing does not exist; give ") == 2


class Two(nn.Module):
    """A module in a module, with a parameter that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.scale = nn.Linear(3, 4, bias=False), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) * self.scale


def test_call_is_functional_call() -> None:
    module, x = Two(), torch.randn(5, 3)
    own = dict(module.named_parameters())
    for names in (("first.weight", "scale"), ("scale",), ()):
        params = {name: torch.randn_like(own[name]) for name in names}
        assert torch.equal(call(module, params, x), functional_call(module, params, (x,)))
        assert all(value is own[name] for name, value in module.named_parameters())
    with pytest.raises(RuntimeError):
        call(module, {"first.weight": torch.zeros(4, 9)}, x)
    assert all(value is own[name] for name, value in module.named_parameters()), "also after an error"
    tied = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    tied[1].weight = tied[0].weight
    stack = nn.Sequential(*tied)
    assert torch.equal(
        call(stack, {"0.weight": torch.ones(3, 3)}, x), functional_call(stack, {"0.weight": torch.ones(3, 3)}, (x,))
    )
