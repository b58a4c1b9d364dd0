"""Sequence models beside their authors' code: Decision Transformers, Elastic DT, the Trajectory Transformer."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl import rng
from parity.common import ACTION, OBSERVATION, UPDATES, Ours, Outcome, case, imported

CORL, CORL_COMMIT = "corl-team/CORL", "eeeeef2671235fcce3a3eb255576a207d78840e6"
KZL, KZL_COMMIT = "kzl/decision-transformer", "e2d82e68f330c00f763507b3b01d774740bee53f"
ELASTIC, ELASTIC_COMMIT = "kristery/Elastic-DT", "8517ef64cc49246ddc3b248dea4f783f8e4424fd"
JANNER, JANNER_COMMIT = "jannerm/trajectory-transformer", "8834a6ed04ceeab8fdb9465e145c6e041c05d71b"
ROWS, STEPS, WIDTH, LAYERS, HEADS, LONGEST = 8, 4, 16, 2, 2, 20
SMALL: dict[str, Any] = {
    "context": STEPS, "width": WIDTH, "layers": LAYERS, "heads": HEADS, "dropout": 0.0, "max_timestep": LONGEST, "warmup_steps": 3,
    "learning_rate": 1e-3,
}  # fmt: skip

COLUMNS = ("observations", "actions", "rewards", "returns_to_go", "timesteps", "valid")

# (name of our tensor, the part of it that is the reference's, the reference's tensor)
Pair = tuple[str, Callable[[Tensor], Tensor], Tensor]


def linear(name: str, module: Any, rows: slice = slice(None)) -> list[Pair]:
    """Weight and bias of a linear layer, or of transformers' Conv1D, which is transposed. rows: the part of our outputs."""
    transposed = not isinstance(module, nn.Linear)
    weight: Pair = (f"{name}.weight", lambda w: w[rows].T if transposed else w[rows], module.weight)
    return [weight] if module.bias is None else [weight, (f"{name}.bias", lambda b: b[rows], module.bias)]


def norm(name: str, module: Any) -> list[Pair]:
    """Weight and bias of a layer normalisation."""
    return [(f"{name}.weight", lambda w: w, module.weight), (f"{name}.bias", lambda b: b, module.bias)]


def table(name: str, module: nn.Embedding) -> list[Pair]:
    """An embedding; the reference may have more rows."""
    return [(f"{name}.weight", lambda w: w, module.weight[: len(module.weight)])]


def scramble(ours: Ours, network: str) -> None:
    """Move our parameters away from their small initial values, so that each of them counts."""
    params = ours.state.params[network]
    for i, name in enumerate(sorted(params)):
        params[name].add_(0.2 * torch.as_tensor(np.random.default_rng(i).normal(size=tuple(params[name].shape))))


def give(pairs: Iterable[Pair], params: Mapping[str, Tensor]) -> None:
    """Give the reference our parameters."""
    with torch.no_grad():
        for name, view, tensor in pairs:
            tensor.copy_(view(params[name]))


def compared(pairs: Iterable[Pair], params: Mapping[str, Tensor]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Parameters of both sides for `Outcome.parameters`."""
    return {f"{name}/{i}": (view(params[name]).detach().numpy(), tensor.detach().numpy()) for i, (name, view, tensor) in enumerate(pairs)}


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


def optimizer(parameters: Iterable[Tensor]) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and the warm-up of DT's code and its descendants'."""
    adam = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-4)
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda steps: min((steps + 1) / 3, 1))


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
            OBSERVATION, ACTION, seq_len=STEPS, episode_len=LONGEST - STEPS, embedding_dim=WIDTH, num_layers=LAYERS, num_heads=HEADS
        )
    pairs: list[Pair] = [
        *linear("steps.embed.return", net.return_emb), *linear("steps.embed.observation", net.state_emb),
        *linear("steps.embed.action", net.action_emb), *table("steps.time", net.timestep_emb), *norm("steps.norm", net.emb_norm),
        *norm("steps.trunk.norm", net.out_norm), *linear("head.net.head", net.action_head[0]),
    ]  # fmt: skip
    for i, block in enumerate(net.blocks):
        at = f"steps.trunk.blocks.{i}"
        packed = SimpleNamespace(weight=block.attention.in_proj_weight, bias=block.attention.in_proj_bias)
        pairs += [(f"{at}.qkv.weight", lambda w: w, packed.weight), (f"{at}.qkv.bias", lambda b: b, packed.bias)]
        pairs += linear(f"{at}.out", block.attention.out_proj) + linear(f"{at}.up", block.mlp[0]) + linear(f"{at}.down", block.mlp[2])
        pairs += norm(f"{at}.norm1", block.norm1) + norm(f"{at}.norm2", block.norm2)
    give(pairs, ours.state.params["actor"])
    adam, schedule = optimizer(net.parameters())
    for batch in windows():
        losses = ours.update(batch)
        states, actions, returns, steps, mask = columns(batch, "observations", "actions", "returns_to_go", "timesteps", "valid")
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


class OldModel(nn.Module):
    """What GPT2Model of DT's code needs of the base class that transformers had in 2021."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config, self.dtype = config, torch.float64

    def init_weights(self) -> None:
        """The comparison sets them."""

    def get_head_mask(self, mask: Any, layers: int) -> list[None]:
        return [None] * layers


@contextlib.contextmanager
def old_transformers() -> Iterator[None]:
    """Inside, transformers has the names of 2021 that the GPT-2 of DT's and Meta-DT's code imports."""
    import transformers
    from transformers.modeling_utils import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    def decorate(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    modules = {name: ModuleType(name) for name in ("file_utils", "utils.model_parallel_utils", "modeling_utils")}
    for name in (
        "add_code_sample_docstrings",
        "add_start_docstrings",
        "add_start_docstrings_to_model_forward",
        "replace_return_docstrings",
    ):
        setattr(modules["file_utils"], name, decorate)
    modules["file_utils"].ModelOutput = transformers.utils.ModelOutput  # type: ignore[attr-defined]
    for name in ("SequenceSummary", "find_pruneable_heads_and_indices", "prune_conv1d_layer"):
        setattr(modules["modeling_utils"], name, None)
    for name in ("assert_device_map", "get_device_map"):
        setattr(modules["utils.model_parallel_utils"], name, None)
    assert PreTrainedModel is not None
    modules["modeling_utils"].Conv1D = Conv1D  # type: ignore[attr-defined]
    modules["modeling_utils"].PreTrainedModel = OldModel  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, {f"transformers.{name}": module for name, module in modules.items()}):
        yield


def gpt2_blocks(prefix: str, net: Any) -> list[Pair]:
    """The layers of a GPT2Model."""
    pairs = norm(f"{prefix}.norm", net.ln_f)
    for i, block in enumerate(net.h):
        at = f"{prefix}.blocks.{i}"
        pairs += linear(f"{at}.qkv", block.attn.c_attn) + linear(f"{at}.out", block.attn.c_proj)
        pairs += linear(f"{at}.up", block.mlp.c_fc) + linear(f"{at}.down", block.mlp.c_proj)
        pairs += norm(f"{at}.norm1", block.ln_1) + norm(f"{at}.norm2", block.ln_2)
    return pairs


GPT2 = {
    "n_layer": LAYERS, "n_head": HEADS, "n_inner": 4 * WIDTH, "activation_function": "relu", "n_positions": 1024, "n_ctx": 1024,
    "resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0,
}  # fmt: skip


@case(
    "dt, of its authors", KZL, KZL_COMMIT,
    remains="initial weights: torch's own outside the transformer, N(0, 1) for time steps, where ours (as CORL's) are all N(0, 0.02)",
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
        *linear("steps.embed.return", net.embed_return), *linear("steps.embed.observation", net.embed_state),
        *linear("steps.embed.action", net.embed_action), *table("steps.time", net.embed_timestep), *norm("steps.norm", net.embed_ln),
        *gpt2_blocks("steps.trunk", net.transformer), *linear("head.net.head", net.predict_action[0]),
    ]  # fmt: skip
    give(pairs, ours.state.params["actor"])
    adam, schedule = optimizer(net.parameters())
    queue = windows()

    def get_batch(_: int) -> tuple[Any, ...]:
        states, actions, rewards, returns, steps, mask = columns(
            batch, "observations", "actions", "rewards", "returns_to_go", "timesteps", "valid"
        )
        returns = torch.cat([returns / 1000.0, torch.zeros(ROWS, 1)], 1).unsqueeze(-1)
        return states, actions, rewards, None, returns, steps, mask.long()

    trainer = trainer_of(net, adam, ROWS, get_batch, lambda _, a, __, ___, target, ____: (a - target).square().mean(), schedule)
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
        net = module.DecisionTransformer(OBSERVATION, ACTION, LAYERS, WIDTH, STEPS, HEADS, 0.0, max_timestep=LONGEST, **HOPPER)
        utilities = sys.modules["decision_transformer.utils"]
    model = WithRewards(net)
    pairs: list[Pair] = [
        *linear("steps.embed.observation", net.embed_state), *linear("steps.embed.return", net.embed_rtg),
        *linear("steps.embed.action", net.embed_action), *linear("steps.embed.reward", net.embed_reward),
        *table("steps.time", net.embed_timestep), *norm("steps.norm", net.embed_ln), *linear("head.net.head", net.predict_action[0]),
        *linear("best", model.predict_rtg2), *linear("bins", net.predict_rtg), *linear("next", net.predict_state),
    ]  # fmt: skip
    for i, block in enumerate(net.transformer):
        at, attention = f"steps.trunk.blocks.{i}", block.attention
        for j, layer in enumerate((attention.q_net, attention.k_net, attention.v_net)):
            pairs += linear(f"{at}.qkv", layer, slice(j * WIDTH, (j + 1) * WIDTH))
        pairs += linear(f"{at}.out", attention.proj_net) + linear(f"{at}.up", block.mlp[0]) + linear(f"{at}.down", block.mlp[2])
        pairs += norm(f"{at}.norm1", block.ln1) + norm(f"{at}.norm2", block.ln2)
    give(pairs, ours.state.params["actor"])
    return ours, model, pairs, utilities


@case(
    "edt", ELASTIC, ELASTIC_COMMIT,
    aligned="their network with tokens of rewards (`DecisionTransformer`), with the estimate of the return; next observations in windows",
    remains="their runs have no token of rewards and predict the next observation from return and action; half precision; other windows",
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
            loss = parts["actor/loss"] + parts["actor/next"] + 0.5 * parts["actor/return"] + 0.001 * parts["actor/return_bins"]
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
    remains="a drawn bin is asked for as the one below in theirs (range / 60 for each of 60 bins, where bins are range / 59)",
)  # fmt: skip
def edt_acting(checkout: Path) -> Outcome:
    (ours, model, pairs, utilities), outcome = elastic(checkout, expert_temperature=0.0), Outcome()
    policy, g = ours.algorithm.actor(ours.state), np.random.default_rng(3)
    length = 12
    past = {
        "observations": g.normal(size=(1, length, OBSERVATION)), "actions": g.uniform(-0.95, 0.95, (1, length, ACTION)),
        "rewards": g.normal(size=(1, length)), "returns_to_go": g.uniform(0.0, 3300.0, (1, length)), "timesteps": np.arange(length)[None],
    }  # fmt: skip
    with mock.patch.object(Tensor, "float", Tensor.double), torch.no_grad():
        for t in range(length - STEPS):
            window = {name: torch.as_tensor(x[:, max(0, t + 1 - STEPS) : t + 1]) for name, x in past.items()}
            window["actions"][:, -1], window["rewards"][:, -1] = 0.0, 0.0  # not known yet
            states, actions, rewards, returns, steps = (torch.as_tensor(past[name]).clone() for name in COLUMNS[:-1])
            actions[:, t:], rewards[:, t:] = 0.0, 0.0
            expected, kept = utilities._return_search(
                model, steps, states, actions, returns.unsqueeze(-1) / 1000.0, rewards.unsqueeze(-1), STEPS, t, HOPPER["env_name"],
                0.15, 60, 1000, 15.0,
            )  # fmt: skip
            (mean,), steps_seen = policy.search(window, rng.make_key(0))
            count = float(steps_seen.sum())
            reference_count = float(kept - max(0, STEPS - 1 - t))
            both = {f"action/{i}": (mean[0, i].item(), expected[i].item()) for i in range(ACTION)}
            outcome.losses.append({**both, "history": (count, reference_count)})
    outcome.parameters |= compared(pairs, ours.state.params["actor"])
    return outcome


# ---- Trajectory Transformer


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
    remains="their first update has the full rate and later ones the rate of the tokens before, ours that of the update itself; the token "
    "that counts is the one before in theirs, which differs at an episode's limit",
)  # fmt: skip
def tt(checkout: Path) -> Outcome:
    bins, dims = 11, OBSERVATION + ACTION + 2
    ours = Ours("tt", context=STEPS, width=WIDTH, layers=LAYERS, heads=HEADS, dropout=0.0, bins=bins, warmup_steps=3, decay_steps=5)
    outcome = Outcome()
    scramble(ours, "trajectory")
    ours.algorithm.runtime.source = SimpleNamespace(bins=SimpleNamespace(_asdict=lambda: ours.state.extra))
    packages = SimpleNamespace(**{name: ModuleType(f"trajectory.{name}") for name in ("utils", "models")})
    for name, package in vars(packages).items():
        package.__path__ = [str(checkout / "trajectory" / name)]  # without what the package itself imports
    with mock.patch.dict(sys.modules, {f"trajectory.{name}": package for name, package in vars(packages).items()}):
        with imported(checkout, "trajectory.utils.training") as training:
            trainer_of = training.Trainer
        with imported(checkout, "trajectory.models.transformers") as models:
            net = models.GPT(
                SimpleNamespace(
                    n_layer=LAYERS, n_head=HEADS, n_embd=WIDTH, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0, vocab_size=bins,
                    block_size=STEPS * dims, observation_dim=OBSERVATION, action_dim=ACTION, transition_dim=dims, action_weight=5,
                    reward_weight=1, value_weight=1,
                )
            )  # fmt: skip
    pairs: list[Pair] = [
        *table("embed", net.tok_emb), ("position", lambda x: x, net.pos_emb[0]), *norm("trunk.norm", net.ln_f),
        ("head", lambda x: x, net.head.weight),
    ]  # fmt: skip
    for i, block in enumerate(net.blocks):
        at = f"trunk.blocks.{i}"
        for j, module in enumerate((block.attn.query, block.attn.key, block.attn.value)):
            pairs += linear(f"{at}.qkv", module, slice(j * WIDTH, (j + 1) * WIDTH))
        pairs += linear(f"{at}.out", block.attn.proj) + linear(f"{at}.up", block.mlp[0]) + linear(f"{at}.down", block.mlp[2])
        pairs += norm(f"{at}.norm1", block.ln1) + norm(f"{at}.norm2", block.ln2)
    give(pairs, ours.state.params["trajectory"])
    trainer = trainer_of(
        SimpleNamespace(
            device="cpu", batch_size=ROWS, num_workers=0, learning_rate=6e-4, betas=(0.9, 0.95), weight_decay=0.1, grad_norm_clip=1.0,
            lr_decay=True, warmup_tokens=1, final_tokens=2,
        )
    )  # fmt: skip
    adam, rates = trainer.get_optimizer(net), ours.algorithm.optimizer("trajectory")
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
