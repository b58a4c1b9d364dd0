"""Decision Transformer and Elastic Decision Transformer beside their authors' code."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from parity.common import ACTION, OBSERVATION, UPDATES, Ours, Outcome, case, imported
from parity.weights import Pair, compared, give, gpt2_blocks, linear, norm, old_transformers, optimizer, scramble, table

CORL, CORL_COMMIT = "corl-team/CORL", "eeeeef2671235fcce3a3eb255576a207d78840e6"
KZL, KZL_COMMIT = "kzl/decision-transformer", "e2d82e68f330c00f763507b3b01d774740bee53f"
ELASTIC, ELASTIC_COMMIT = "kristery/Elastic-DT", "8517ef64cc49246ddc3b248dea4f783f8e4424fd"
ROWS, STEPS, WIDTH, LAYERS, HEADS, LONGEST = 8, 4, 16, 2, 2, 20
SMALL: dict[str, Any] = {
    "context": STEPS,
    "width": WIDTH,
    "layers": LAYERS,
    "heads": HEADS,
    "dropout": 0.0,
    "max_timestep": LONGEST,
    "warmup_steps": 3,
    "learning_rate": 1e-3,
}

COLUMNS = ("observations", "actions", "rewards", "returns_to_go", "timesteps", "valid")


def windows() -> list[dict[str, np.ndarray]]:
    """Batches of windows, some of them shorter than the context and padded at the end."""
    g = np.random.default_rng(1)
    result = []
    for _ in range(UPDATES):
        valid = np.arange(STEPS) < g.integers(1, STEPS + 1, (ROWS, 1))
        result.append(
            {
                "observations": g.normal(size=(ROWS, STEPS, OBSERVATION)) * valid[..., None],
                "actions": g.uniform(-0.95, 0.95, (ROWS, STEPS, ACTION)) * valid[..., None],
                "rewards": g.normal(size=(ROWS, STEPS)) * valid,
                "returns_to_go": g.uniform(-20.0, 3300.0, (ROWS, STEPS)) * valid,
                "timesteps": (g.integers(0, LONGEST - STEPS, (ROWS, 1)) + np.arange(STEPS)) * valid,
                "valid": valid,
            }
        )
    return result


def columns(batch: Mapping[str, np.ndarray], *names: str) -> list[Tensor]:
    return [torch.as_tensor(batch[name]) for name in names]


# ---- Decision Transformer


@case(
    "dt", CORL, CORL_COMMIT,
    aligned="loss over the steps that are there; GELU on both sides",
    remains="CORL's mean counts padding as zeros; it has GELU where the default here is the paper's ReLU",
)  # fmt: skip
def dt_of_corl(checkout: Path) -> Outcome:
    ours, outcome = Ours("dt", **SMALL, activation="gelu", target_return=1.0, return_scale=1000.0), Outcome()
    scramble(ours, "actor")
    with imported(checkout, "algorithms.offline.dt", ("d4rl", "gym", "pyrallis", "wandb")) as corl:
        net = corl.DecisionTransformer(
            OBSERVATION,
            ACTION,
            seq_len=STEPS,
            episode_len=LONGEST - STEPS,
            embedding_dim=WIDTH,
            num_layers=LAYERS,
            num_heads=HEADS,
        )
    pairs: list[Pair] = [
        *linear("steps.embed.return", net.return_emb),
        *linear("steps.embed.observation", net.state_emb),
        *linear("steps.embed.action", net.action_emb),
        *table("steps.time", net.timestep_emb),
        *norm("steps.norm", net.emb_norm),
        *norm("steps.trunk.norm", net.out_norm),
        *linear("head.net.head", net.action_head[0]),
    ]
    for i, block in enumerate(net.blocks):
        at = f"steps.trunk.blocks.{i}"
        packed = SimpleNamespace(weight=block.attention.in_proj_weight, bias=block.attention.in_proj_bias)
        pairs += [(f"{at}.qkv.weight", lambda w: w, packed.weight), (f"{at}.qkv.bias", lambda b: b, packed.bias)]
        pairs += (
            linear(f"{at}.out", block.attention.out_proj)
            + linear(f"{at}.up", block.mlp[0])
            + linear(f"{at}.down", block.mlp[2])
        )
        pairs += norm(f"{at}.norm1", block.norm1) + norm(f"{at}.norm2", block.norm2)
    give(pairs, ours.state.params["actor"])
    adam, schedule = optimizer(net.parameters())
    for batch in windows():
        losses = ours.update(batch)
        states, actions, returns, steps, mask = columns(
            batch, "observations", "actions", "returns_to_go", "timesteps", "valid"
        )
        predicted = net(states, actions, returns / 1000.0, steps, padding_mask=~mask)
        loss = ((predicted - actions).square() * mask.unsqueeze(-1)).sum() / (mask.sum() * ACTION)
        adam.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.25)
        adam.step()
        schedule.step()
        outcome.losses.append({"loss": (losses["actor/loss"], loss.item())})
    outcome.parameters |= compared(pairs, ours.state.params["actor"])
    return outcome


GPT2 = {
    "n_layer": LAYERS,
    "n_head": HEADS,
    "n_inner": 4 * WIDTH,
    "activation_function": "relu",
    "n_positions": 1024,
    "n_ctx": 1024,
    "resid_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
}


@case(
    "dt, of its authors", KZL, KZL_COMMIT,
    remains="initial weights: torch's own outside the transformer, N(0, 1) for time steps, where ours (as CORL's) are "
            "all N(0, 0.02)",
    needs=("transformers",),
)  # fmt: skip
def dt_of_its_authors(checkout: Path) -> Outcome:
    ours, outcome = Ours("dt", **SMALL, target_return=1.0, return_scale=1000.0), Outcome()
    scramble(ours, "actor")
    with old_transformers():
        with imported(checkout / "gym", "decision_transformer.training.seq_trainer") as training:
            trainer_of = training.SequenceTrainer
        with imported(checkout / "gym", "decision_transformer.models.decision_transformer") as models:
            net = models.DecisionTransformer(OBSERVATION, ACTION, WIDTH, max_length=STEPS, max_ep_len=LONGEST, **GPT2)
    pairs: list[Pair] = [
        *linear("steps.embed.return", net.embed_return),
        *linear("steps.embed.observation", net.embed_state),
        *linear("steps.embed.action", net.embed_action),
        *table("steps.time", net.embed_timestep),
        *norm("steps.norm", net.embed_ln),
        *gpt2_blocks("steps.trunk", net.transformer),
        *linear("head.net.head", net.predict_action[0]),
    ]
    give(pairs, ours.state.params["actor"])
    adam, schedule = optimizer(net.parameters())
    queue = windows()

    def get_batch(_: int) -> tuple[Any, ...]:
        states, actions, rewards, returns, steps, mask = columns(
            batch, "observations", "actions", "rewards", "returns_to_go", "timesteps", "valid"
        )
        returns = torch.cat([returns / 1000.0, torch.zeros(ROWS, 1)], 1).unsqueeze(-1)
        return states, actions, rewards, None, returns, steps, mask.long()

    trainer = trainer_of(
        net, adam, ROWS, get_batch, lambda _, a, __, ___, target, ____: (a - target).square().mean(), schedule
    )
    for batch in queue:
        losses = ours.update(batch)
        expected = trainer.train_step()
        schedule.step()
        outcome.losses.append({"loss": (losses["actor/loss"], expected)})
    outcome.parameters |= compared(pairs, ours.state.params["actor"])
    return outcome


# ---- Elastic Decision Transformer


ENDS = [-20.272305, 3234.3]  # D4RL's reference returns of Hopper
HOPPER: dict[str, Any] = {"env_name": "hopper-medium-v2", "num_bin": 60, "rtg_scale": 1000}


class WithRewards(nn.Module):
    """The outputs of `ElasticDecisionTransformer` by the authors' network that has tokens of rewards."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net, self.predict_rtg2 = net, nn.Linear(WIDTH, 1)
        self.history: list[Tensor] = []
        net.predict_rtg.register_forward_hook(lambda module, inputs, output: self.history.append(inputs[0]))

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        following, actions, bins, rewards = self.net(*inputs)
        return following, actions, bins, self.predict_rtg2(self.history.pop()), rewards


def elastic(checkout: Path, **settings: Any) -> tuple[Ours, WithRewards, list[Pair], Any]:
    """Both sides with the same parameters, and the authors' module of utilities."""
    ours = Ours("edt", **SMALL, return_scale=1000.0, return_range=ENDS, target_return=3600.0, **settings)
    scramble(ours, "actor")
    with imported(checkout, "decision_transformer.model", ("timm",)) as module:
        net = module.DecisionTransformer(
            OBSERVATION, ACTION, LAYERS, WIDTH, STEPS, HEADS, 0.0, max_timestep=LONGEST, **HOPPER
        )
        utilities = sys.modules["decision_transformer.utils"]
    model = WithRewards(net)
    pairs: list[Pair] = [
        *linear("steps.embed.observation", net.embed_state),
        *linear("steps.embed.return", net.embed_rtg),
        *linear("steps.embed.action", net.embed_action),
        *linear("steps.embed.reward", net.embed_reward),
        *table("steps.time", net.embed_timestep),
        *norm("steps.norm", net.embed_ln),
        *linear("head.net.head", net.predict_action[0]),
        *linear("best", model.predict_rtg2),
        *linear("bins", net.predict_rtg),
        *linear("next", net.predict_state),
    ]
    for i, block in enumerate(net.transformer):
        at, attention = f"steps.trunk.blocks.{i}", block.attention
        for j, layer in enumerate((attention.q_net, attention.k_net, attention.v_net)):
            pairs += linear(f"{at}.qkv", layer, slice(j * WIDTH, (j + 1) * WIDTH))
        pairs += (
            linear(f"{at}.out", attention.proj_net)
            + linear(f"{at}.up", block.mlp[0])
            + linear(f"{at}.down", block.mlp[2])
        )
        pairs += norm(f"{at}.norm1", block.ln1) + norm(f"{at}.norm2", block.ln2)
    give(pairs, ours.state.params["actor"])
    return ours, model, pairs, utilities


@case(
    "edt", ELASTIC, ELASTIC_COMMIT,
    aligned="their network with tokens of rewards (`DecisionTransformer`), with the estimate of the return; next "
            "observations in windows",
    remains="their runs have no token of rewards and predict the next observation from return and action; half "
            "precision; other windows",
)  # fmt: skip
def edt(checkout: Path) -> Outcome:
    (ours, model, pairs, utilities), outcome = elastic(checkout), Outcome()
    unused = {id(p) for p in model.net.predict_reward.parameters()}
    adam, schedule = optimizer([p for p in model.parameters() if id(p) not in unused])
    with mock.patch.object(Tensor, "float", Tensor.double):
        for batch in windows():
            losses = ours.update(batch)
            states, actions, rewards, returns, steps, mask = columns(batch, *COLUMNS)
            returns = returns.unsqueeze(-1) / 1000.0
            following, predicted, bins, best, _ = model(steps, states, actions, returns, rewards.unsqueeze(-1))
            difference, bin_of = (returns - best).squeeze(-1)[mask], utilities.encode_return(ret=returns, **HOPPER)
            parts = {
                "actor/loss": (predicted - actions)[mask].square().mean(),
                "actor/next": (following[:, :-1] - states[:, 1:])[mask[:, 1:] & mask[:, :-1]].square().mean(),
                "actor/return": (torch.where(difference > 0, 0.99, 1 - 0.99) * difference**2).mean(),
                "actor/return_bins": nn.functional.cross_entropy(bins[mask], bin_of.squeeze(-1)[mask].long()),
            }
            loss = (
                parts["actor/loss"]
                + parts["actor/next"]
                + 0.5 * parts["actor/return"]
                + 0.001 * parts["actor/return_bins"]
            )
            adam.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            adam.step()
            schedule.step()
            outcome.losses.append({name: (losses[name], part.item()) for name, part in parts.items()})
    outcome.parameters |= compared(pairs, ours.state.params["actor"])
    return outcome


@case(
    "edt, acting", ELASTIC, ELASTIC_COMMIT,
    aligned="as above; the estimated return asked for, not a drawn one",
    remains="a drawn bin is asked for as the one below in theirs (range / 60 for each of 60 bins, where bins are range "
            "/ 59)",
)  # fmt: skip
def edt_acting(checkout: Path) -> Outcome:
    (ours, model, pairs, utilities), outcome = elastic(checkout, expert_temperature=0.0), Outcome()
    policy, g = ours.algorithm.actor(ours.state), np.random.default_rng(3)
    length = 12
    past = {
        "observations": g.normal(size=(1, length, OBSERVATION)),
        "actions": g.uniform(-0.95, 0.95, (1, length, ACTION)),
        "rewards": g.normal(size=(1, length)),
        "returns_to_go": g.uniform(0.0, 3300.0, (1, length)),
        "timesteps": np.arange(length)[None],
    }
    with mock.patch.object(Tensor, "float", Tensor.double), torch.no_grad():
        for t in range(length - STEPS):
            window = {name: torch.as_tensor(x[:, max(0, t + 1 - STEPS) : t + 1]) for name, x in past.items()}
            window["actions"][:, -1], window["rewards"][:, -1] = 0.0, 0.0  # not known yet
            states, actions, rewards, returns, steps = (torch.as_tensor(past[name]).clone() for name in COLUMNS[:-1])
            actions[:, t:], rewards[:, t:] = 0.0, 0.0
            expected, kept = utilities._return_search(
                model,
                steps,
                states,
                actions,
                returns.unsqueeze(-1) / 1000.0,
                rewards.unsqueeze(-1),
                STEPS,
                t,
                HOPPER["env_name"],
                0.15,
                60,
                1000,
                15.0,
            )
            (mean,), steps_seen = policy.search(window, rng.make_key(0))
            count = float(steps_seen.sum())
            reference_count = float(kept - max(0, STEPS - 1 - t))
            both = {f"action/{i}": (mean[0, i].item(), expected[i].item()) for i in range(ACTION)}
            outcome.losses.append({**both, "history": (count, reference_count)})
    outcome.parameters |= compared(pairs, ours.state.params["actor"])
    return outcome
