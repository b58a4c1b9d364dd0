"""ILQL beside its authors' code, with the GPT-2 that they bring."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from parity.common import UPDATES, Arrays, Outcome, case, imported
from parity.language import Text
from parity.weights import Pair, compared, give, linear, norm, old_transformers, table

SNELL, SNELL_COMMIT = "Sea-Snell/Implicit-Language-Q-Learning", "0dc556150bfbdca5e1e6ee322c9126486c2162f7"


def token_columns(batch: Arrays) -> dict[str, Tensor]:
    """A batch of whole episodes as `PerTokenIQL` takes it: indices of states and of actions, and padding marked as
    terminal.
    """
    rows, count = len(batch["ids"]), int(batch["action"].sum(1).max())
    ids, valid = torch.as_tensor(batch["ids"]), torch.as_tensor(batch["valid"])
    states, actions, ends = (
        torch.zeros(rows, count + 1).long(),
        torch.zeros(rows, count).long(),
        torch.ones(rows, count + 1).long(),
    )
    rewards = torch.zeros(rows, count)
    for row in range(rows):
        places = np.flatnonzero(batch["action"][row])
        actions[row, : len(places)] = torch.as_tensor(places - 1)
        states[row, : len(places)], states[row, len(places)] = torch.as_tensor(places - 1), places[-1]
        ends[row, : len(places)] = 0
        rewards[row, : len(places)] = torch.as_tensor(batch["reward"][row, places])
    return {
        "tokens": ids,
        "attn_mask": valid.long(),
        "state_idxs": states,
        "action_idxs": actions,
        "rewards": rewards,
        "terminals": ends,
    }


@case(
    "ilql", SNELL, SNELL_COMMIT,
    aligned="weights of the losses; the cloning loss is the mean over the tokens of actions",
    remains="squared errors are halved here, so that other terms weigh twice what they do there; their cloning loss is "
    "divided by all tokens, observations too; they act by the target's values",
    needs=("transformers", "peft"),
)  # fmt: skip
def ilql(checkout: Path) -> Outcome:
    settings = {
        "trunk": "shared",
        "clone_weight": 0.25,
        "conservative_weight": 0.3,
        "discount": 0.9,
        "expectile": 0.7,
        "polyak": 0.05,
    }
    text, outcome = Text("ilql", ("value",), history=None, learning_rate=1e-3, **settings), Outcome()
    algorithm = text.algorithm
    lm = algorithm.networks["value"].lm
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        stack.enter_context(old_transformers())
        models = stack.enter_context(imported(checkout / "src", "models.iql_model", ("wandb",)))
        config = copy.deepcopy(lm.base.config)
        config.n_ctx = config.n_positions
        net = models.GPT2LMHeadModel(config)
        data = SimpleNamespace(max_len=None, tokenizer=SimpleNamespace(num_tokens=lambda: lm.vocabulary))
        net.lm_head.weight = net.transformer.wte.weight
        model = models.PerTokenIQL(
            net,
            data,
            "cpu",
            alpha=0.05,
            gamma=0.9,
            beta=0.0,
            transition_weight=0.0,
            double_q=True,
            tau=0.7,
            seperate_target=True,
            exp_weights=True,
        )
        pairs = value_pairs(model.model.transformer, {"q1": model.q, "q2": model.q2, "v": model.v})
        target = value_pairs(model.lm_target.transformer, {"q1": model.target_q, "q2": model.target_q2})
        give(pairs, text.ours.state.params["value"])
        give(target, text.ours.state.target["value"])
        adam = torch.optim.Adam([p for name, p in model.named_parameters() if "target" not in name], lr=1e-3)
        for number in range(UPDATES):
            batch = text.batch(number)
            losses = text.ours.update(batch)
            inputs = token_columns(batch)
            share = float(inputs["attn_mask"][:, 1:].sum() / batch["action"].sum())
            loss, logged, _ = model.get_loss(
                inputs, awac_weight=0.25 * share, v_loss_weight=0.5, q_loss_weight=0.5, cql_loss_weight=0.3
            )
            adam.zero_grad()
            loss.backward()
            adam.step()
            model.soft_update()
            theirs = {
                "value/q_loss": 0.5 * logged["q_loss"][0], "value/v_loss": 0.5 * logged["v_loss"][0],
                "value/conservative": logged["cql_loss"][0], "policy/loss": share * logged["token_loss"][0],
            }  # fmt: skip
            outcome.losses.append({name: (losses[name], value) for name, value in theirs.items()})
    state = text.ours.state
    outcome.parameters |= compared(pairs, state.params["value"])
    outcome.parameters |= {f"target/{name}": pair for name, pair in compared(target, state.target["value"]).items()}
    return outcome


def value_pairs(transformer: Any, heads: dict[str, Any]) -> list[Pair]:
    """A GPT-2 and its value heads."""
    at = "lm.base"
    pairs = [
        *table(f"{at}.wte", transformer.wte),
        *table(f"{at}.wpe", transformer.wpe),
        *norm(f"{at}.ln_f", transformer.ln_f),
    ]
    for i, block in enumerate(transformer.h):
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            module = block.get_submodule(name)
            pairs += [(f"{at}.h.{i}.{name}.{part}", lambda x: x, getattr(module, part)) for part in ("weight", "bias")]
        pairs += norm(f"{at}.h.{i}.ln_1", block.ln_1) + norm(f"{at}.h.{i}.ln_2", block.ln_2)
    for name, head in heads.items():
        pairs += linear(f"heads.{name}.layers.0", head[0]) + linear(f"heads.{name}.head", head[2])
    return pairs
