"""Networks of a user's own: by file or by registered name, many seeds, compiled, resumed, in policy files, and what is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import offrl as package
from offrl.errors import UserError
from offrl.system.plugins import loading

from .conftest import Offrl
from .test_cli import arrays
from .test_plugins import forgotten

__all__ = ["forgotten"]
FILE = """
import torch
from torch import nn
from offrl.registry import register

class Wide(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(inputs, 16), nn.LayerNorm(16), nn.SiLU())
        self.head = nn.Linear(16 + inputs, outputs)

    def forward(self, x):
        return self.head(torch.cat([self.body(x), x], -1))

@register("network", "skip")
def skip(inputs, outputs):
    return Wide(inputs, outputs)

def wrong(inputs, outputs):
    return nn.Linear(inputs, outputs + 1)

def normed(inputs, outputs):
    return nn.Sequential(nn.BatchNorm1d(inputs), nn.Linear(inputs, outputs))
"""
SMALL = {
    "steps": 20,
    "seeds": 2,
    "compile": "eager",
    "compare": [],
    "algo.hidden": [8],
    "log_every": 10,
    "eval.env": "none",
    "quiet": True,
}
OWN = {"algo.actor_network": "nets.py:Wide", "algo.critic_network": "skip", "plugins": "nets.py"}


@pytest.fixture(autouse=True)
def nets(offrl: Offrl) -> Iterator[Path]:
    Path("nets.py").write_text(FILE)
    yield Path("nets.py").resolve()


def test_networks_of_a_file(nets: Path) -> None:
    run = package.train("td3_bc", arrays(), settings={**SMALL, **OWN}, name="a")
    policy = run.policy(1)
    assert policy.state.params["actor"]["net.module.body.0.weight"].shape == (16, 3)
    assert (
        run.record["identity"]["algo"]["actor_network"] == "nets.py:Wide"
        and "nets.py" in run.record["identity"]["plugins"]
    )
    x = np.linspace(-1, 1, 6).reshape(2, 3)
    again = package.load_policy(run.dir / "policies" / "seed_1.safetensors").act(x)
    assert np.array_equal(again, policy.act(x))
    straight = package.train("td3_bc", arrays(), settings={**SMALL, **OWN, "steps": 30}, name="b")
    resumed = package.train("td3_bc", arrays(), settings={**SMALL, **OWN, "steps": 30}, name="a")
    for one, two in zip(
        straight.policy(1).state.params["actor"].values(), resumed.policy(1).state.params["actor"].values(), strict=True
    ):
        assert torch.equal(one, two)
    loading._loaded.clear()  # as elsewhere: the policy's file is data, and says what it needs
    with loading.scope():
        import os

        os.environ.pop(loading.VARIABLE)
        with pytest.raises(UserError, match=r"needs the plugin nets\.py: say plugins=nets\.py"):
            package.load_policy(run.dir / "policies" / "seed_1.safetensors")


def test_each_critic_is_the_users_network() -> None:
    from offrl.nn.custom.networks import OwnEnsemble

    loading.typed("nets.py")
    wide = loading.object_of("nets.py:Wide", "x")
    members = [wide(4, 2) for _ in range(3)]
    together, x = OwnEnsemble(members), torch.randn(5, 4)
    torch.testing.assert_close(together(x), torch.stack([m(x) for m in members]))
    each = torch.randn(3, 5, 4)
    torch.testing.assert_close(together(each), torch.stack([m(v) for m, v in zip(members, each, strict=True)]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algo.actor_network": "nets.py:wrong"}, r"turns an input \[2, 3\] into \[2, 2\]; \[2, 1\] is due"),
        ({"algo.actor_network": "nets.py:normed"}, "has the buffer 0.running_mean"),
        ({"algo.actor_network": "nets.py:Wid"}, "has no 'Wid'. Did you mean 'Wide'"),
        ({"algo.critic_network": "skp", "plugins": "nets.py"}, "unknown network 'skp'. Did you mean 'skip'"),
        (
            {"algo.critic_network": "nets.py:Wide", "algo.spectral_norm": 1.0},
            "spectral_norm= and critic_dropout= are of the layers",
        ),
        ({"algo.critic_network": "net.py:Wide"}, "there is no such file. Did you mean 'nets.py'"),
    ],
)
def test_networks_that_do_not_fit(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        package.train("td3_bc", arrays(), settings={**SMALL, **settings})


@pytest.mark.nightly
@pytest.mark.parametrize("algo", ["iql", "cql", "edac", "awac", "rebrac", "bc", "td3_awr"])
def test_networks_in_other_algorithms(algo: str) -> None:
    own = {k: v for k, v in OWN.items() if algo != "bc" or "critic" not in k}
    run = package.train(algo, arrays(), settings={**SMALL, **own})
    assert run.policy(1).act(np.zeros(3)).shape == (1,)


@pytest.mark.nightly
def test_compiled_in_processes() -> None:
    for name, compile in (("a", "compiled"), ("b", "eager")):
        package.train("td3_bc", arrays(), settings={**SMALL, **OWN, "compile": compile, "workers": 2}, name=name)
    a, b = (package.load(f"runs/{name}").policy(1).state.params["actor"] for name in "ab")
    for key, value in a.items():
        torch.testing.assert_close(value, b[key], rtol=1e-3, atol=1e-4)
