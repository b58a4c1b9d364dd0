"""The same ensemble as a per-step PyTorch loop, as model-based libraries write it: einsum layers, batches indexed in
NumPy.
"""

from __future__ import annotations

import numpy as np
import torch
from peers import common, plain
from peers.common import ACTION, BATCH, OBSERVATION, Arrays
from peers.flops import ENSEMBLE_HIDDEN, ENSEMBLE_MEMBERS
from torch import nn
from torch.nn import functional as F


class EnsembleLinear(nn.Module):
    def __init__(self, members: int, inputs: int, outputs: int, decay: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(members, inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(members, 1, outputs))
        nn.init.trunc_normal_(self.weight, std=1.0 / (2.0 * inputs**0.5))
        self.decay = decay

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bij,bjk->bik", x, self.weight) + self.bias

    def decay_loss(self) -> torch.Tensor:
        return self.decay * 0.5 * (self.weight**2).sum()


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        decays, outputs = (2.5e-5, 5e-5, 7.5e-5, 7.5e-5, 1e-4), OBSERVATION + 1
        sizes = [OBSERVATION + ACTION, *ENSEMBLE_HIDDEN, 2 * outputs]
        layers = zip(sizes[:-1], sizes[1:], decays, strict=True)
        self.layers = nn.ModuleList(EnsembleLinear(ENSEMBLE_MEMBERS, i, o, d) for i, o, d in layers)
        self.max_logvar = nn.Parameter(torch.ones(outputs) * 0.5)
        self.min_logvar = nn.Parameter(torch.ones(outputs) * -10.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        for layer in self.layers[:-1]:
            x = layer(x)
            x = x * torch.sigmoid(x)
        mean, logvar = torch.chunk(self.layers[-1](x), 2, dim=-1)
        logvar = self.max_logvar - F.softplus(self.max_logvar - logvar)
        return mean, self.min_logvar + F.softplus(logvar - self.min_logvar)


def update(model: Model, optimizer: torch.optim.Optimizer, x: np.ndarray, y: np.ndarray) -> dict[str, float]:
    mean, logvar = model(torch.from_numpy(x))
    inverse = torch.exp(-logvar)
    mse = (torch.pow(mean - torch.from_numpy(y), 2) * inverse).mean(dim=(1, 2))
    loss = mse.sum() + logvar.mean(dim=(1, 2)).sum()
    loss = loss + sum(layer.decay_loss() for layer in model.layers)
    loss = loss + 0.01 * model.max_logvar.sum() - 0.01 * model.min_logvar.sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return {"model/loss": loss.item()}


def load(model: Model, weights: Arrays) -> None:
    with torch.no_grad():
        for i, layer in enumerate(model.layers):
            layer.weight.copy_(torch.from_numpy(weights[f"model/w{i}"]))
            layer.bias.copy_(torch.from_numpy(weights[f"model/b{i}"]))


def main() -> None:
    options = common.options(plain.ONEDNN)
    note = plain.arithmetic(options.onednn)
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if options.check:
        weights, batches = common.load_check(options.check)
        load(model, weights)
        common.report(losses=[update(model, optimizer, b["x"], b["y"]) for b in batches])
        return
    columns = common.transitions(options.rows)
    inputs = np.concatenate([columns["observations"], columns["actions"]], 1)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0)
    targets = np.concatenate([columns["next_observations"] - columns["observations"], columns["rewards"][:, None]], 1)
    rows = np.random.randint(options.rows, size=(ENSEMBLE_MEMBERS, options.rows))
    at = 0

    def updates(count: int) -> dict[str, float]:
        nonlocal at
        for _ in range(count):
            at = at if at + BATCH <= options.rows else 0
            picked = rows[:, at : at + BATCH]
            log = update(model, optimizer, inputs[picked], targets[picked])
            at += BATCH
        return log

    common.serve(updates, note=note)


if __name__ == "__main__":
    main()
