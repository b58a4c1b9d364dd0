"""The Trajectory Transformer beside its authors' code."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from parity.common import ACTION, OBSERVATION, UPDATES, Ours, Outcome, case, imported
from parity.sequence import HEADS, LAYERS, ROWS, STEPS, WIDTH
from parity.weights import Pair, compared, give, linear, norm, packages, scramble, stubs, table

JANNER, JANNER_COMMIT = "jannerm/trajectory-transformer", "8834a6ed04ceeab8fdb9465e145c6e041c05d71b"


class OneBatch(torch.utils.data.Dataset[Any]):
    """A batch as the data of an epoch: inputs, targets and which targets count."""

    def __init__(self, tokens: Tensor, counted: Tensor, bins: int) -> None:
        self.tokens, self.counted, self.N = tokens, counted, bins

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.tokens[i, :-1], self.tokens[i, 1:], self.counted[i, 1:]


@case(
    "tt", JANNER, JANNER_COMMIT,
    aligned="learning rate of each update; which predicted tokens count",
    remains="their first update has the full rate and later ones the rate of the tokens before, ours that of the "
            "update itself; the token that counts is the one before in theirs, which differs at an episode's limit",
)  # fmt: skip
def tt(checkout: Path) -> Outcome:
    bins, dims = 11, OBSERVATION + ACTION + 2
    ours = Ours(
        "tt",
        context=STEPS,
        width=WIDTH,
        layers=LAYERS,
        heads=HEADS,
        dropout=0.0,
        bins=bins,
        warmup_steps=3,
        decay_steps=5,
    )
    outcome = Outcome()
    scramble(ours, "trajectory")
    ours.algorithm.runtime.source = SimpleNamespace(bins=SimpleNamespace(_asdict=lambda: ours.state.extra))
    with stubs(packages(checkout, "trajectory.utils", "trajectory.models")):
        with imported(checkout, "trajectory.utils.training") as training:
            trainer_of = training.Trainer
        with imported(checkout, "trajectory.models.transformers") as models:
            net = models.GPT(
                SimpleNamespace(
                    n_layer=LAYERS,
                    n_head=HEADS,
                    n_embd=WIDTH,
                    embd_pdrop=0.0,
                    resid_pdrop=0.0,
                    attn_pdrop=0.0,
                    vocab_size=bins,
                    block_size=STEPS * dims,
                    observation_dim=OBSERVATION,
                    action_dim=ACTION,
                    transition_dim=dims,
                    action_weight=5,
                    reward_weight=1,
                    value_weight=1,
                )
            )
    pairs: list[Pair] = [
        *table("embed", net.tok_emb),
        ("position", lambda x: x, net.pos_emb[0]),
        *norm("trunk.norm", net.ln_f),
        ("head", lambda x: x, net.head.weight),
    ]
    for i, block in enumerate(net.blocks):
        at = f"trunk.blocks.{i}"
        for j, module in enumerate((block.attn.query, block.attn.key, block.attn.value)):
            pairs += linear(f"{at}.qkv", module, slice(j * WIDTH, (j + 1) * WIDTH))
        pairs += (
            linear(f"{at}.out", block.attn.proj) + linear(f"{at}.up", block.mlp[0]) + linear(f"{at}.down", block.mlp[2])
        )
        pairs += norm(f"{at}.norm1", block.ln1) + norm(f"{at}.norm2", block.ln2)
    give(pairs, ours.state.params["trajectory"])
    trainer = trainer_of(
        SimpleNamespace(
            device="cpu",
            batch_size=ROWS,
            num_workers=0,
            learning_rate=6e-4,
            betas=(0.9, 0.95),
            weight_decay=0.1,
            grad_norm_clip=1.0,
            lr_decay=True,
            warmup_tokens=1,
            final_tokens=2,
        )
    )
    with contextlib.redirect_stdout(io.StringIO()):
        adam = trainer.get_optimizer(net)
    rates = ours.algorithm.optimizer("trajectory")
    g = np.random.default_rng(0)
    for update in range(UPDATES):
        tokens = torch.as_tensor(g.integers(0, bins + 1, (ROWS, STEPS * dims)))
        counted = torch.as_tensor(np.repeat(g.random((ROWS, STEPS)) < 0.8, dims, 1))
        with mock.patch.object(Tensor, "float", Tensor.double):
            losses = ours.update({"tokens": tokens.numpy(), "counted": counted.numpy()})
        for group in adam.param_groups:
            group["lr"] = float(rates.rate(torch.tensor(float(update))))
        seen: list[float] = []
        hook = net.register_forward_hook(lambda module, inputs, output, seen=seen: seen.append(output[1].item()))
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train(net, OneBatch(tokens, counted, bins))
        hook.remove()
        outcome.losses.append({"loss": (losses["trajectory/loss"], seen[0])})
    outcome.parameters |= compared(pairs, ours.state.params["trajectory"])
    return outcome
