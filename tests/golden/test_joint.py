"""`descend` on several modules: autograd on the sum of the losses, one clip over all, each module's own optimiser."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap

from offrl.algorithm import Adam, Algorithm, Batch, Params, TrainState, Update, select, stack
from offrl.data.dataset import DataSpec
from tests.support.cases import close

CLIP = 0.5
RATES = {"encoder": 0.1, "model": 0.2, "critic": 0.3}
X = torch.linspace(-1.0, 2.0, 12).view(4, 3)


@dataclass
class Config:
    name: str = "joint"
    learning_rate: float = 0.1
    batch_size: int = 4
    clip: float = CLIP


class Joint(Algorithm[Config]):
    def modules(self) -> dict[str, nn.Module]:
        return {
            "encoder": nn.Linear(3, 2),
            "model": nn.Linear(2, 2),
            "critic": nn.Linear(2, 1),
            "actor": nn.Linear(2, 1),
        }

    def optimizer(self, name: str) -> Adam:
        return Adam(RATES.get(name, 0.1))

    def model_loss(self, params: dict[str, Params], state: TrainState, x: Tensor) -> tuple[Tensor, Any, Tensor]:
        z = self.apply("encoder", params["encoder"], x).tanh()
        following, value = (self.apply(name, params[name], z) for name in ("model", "critic"))
        losses = (following - 1.0).square().mean(), (value + 3.0).square().mean()
        return 20.0 * losses[0] + losses[1], {"model": losses[0], "critic": losses[1]}, z

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        names = ("encoder", "model", "critic")
        state, metrics, z = self.descend(state, names, self.model_loss, batch["x"], clip=self.config.clip, aux=True)
        return state, {**metrics, "z": z.sum(), "constant": torch.tensor(float(z.requires_grad))}


def by_autograd(algorithm: Joint, state: TrainState) -> dict[str, nn.Module]:
    """The modules after one step of torch's own clip and optimiser."""
    nets = {name: net for name, net in algorithm.modules().items() if name != "actor"}
    for name, net in nets.items():
        net.load_state_dict(state.params[name])
    z = nets["encoder"](X).tanh()
    loss = 20.0 * (nets["model"](z) - 1.0).square().mean() + (nets["critic"](z) + 3.0).square().mean()
    loss.backward()
    parameters = [p for net in nets.values() for p in net.parameters()]
    assert torch.nn.utils.clip_grad_norm_(parameters, CLIP) > 2 * CLIP
    torch.optim.Adam([{"params": [*net.parameters()], "lr": RATES[name]} for name, net in nets.items()]).step()
    return nets


@pytest.mark.parametrize(
    "mode",
    [
        "alone",
        "vmap",
        pytest.param(
            "compiled",
            marks=[pytest.mark.nightly, pytest.mark.skipif(not shutil.which("c++"), reason="needs a C++ compiler")],
        ),
    ],
)
def test_a_joint_step_is_autograd_on_the_sum(mode: str) -> None:
    algorithm = Joint(Config(), DataSpec((3,), 1))
    algorithm.runtime.alone = mode == "alone"
    states = [algorithm.init(seed) for seed in (0, 1)]
    if mode == "alone":
        results = [algorithm.update(state, {"x": X}, state.key, phase=0) for state in states]
    else:
        update: Any = vmap(lambda state, key: algorithm.update(state, {"x": X}, key, phase=0))
        together = stack(states)
        new, metrics = (torch.compile(update) if mode == "compiled" else update)(together, together.key)
        results = [(select(new, i), {k: v[i] for k, v in metrics.items()}) for i in range(2)]
    for state, (after, metrics) in zip(states, results, strict=True):
        for name, net in by_autograd(algorithm, state).items():
            close(after.params[name], dict(net.state_dict()), atol=1e-5 if mode == "compiled" else 1e-6)
            assert int(after.opt[name]["count"]) == 1  # type: ignore[arg-type]
        assert after.params["actor"] is state.params["actor"] or mode != "alone"
        assert torch.equal(after.params["actor"]["weight"], state.params["actor"]["weight"])
        z = algorithm.apply("encoder", state.params["encoder"], X).tanh()
        assert float(metrics["z"]) == pytest.approx(float(z.sum()), abs=1e-5) and metrics["constant"] == 0.0
