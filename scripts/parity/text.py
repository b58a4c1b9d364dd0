"""Language models as policies beside their authors' code: ArCHer, offline and online, and ILQL.

Texts are written as token numbers, and both sides read and write with the same small GPT-2, ours, in the place of trained ones.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl import registry, rng
from offrl.data.text.dataset import from_episodes
from parity.common import UPDATES, Arrays, Ours, Outcome, case, imported
from parity.weights import Pair, compared, give, linear, old_transformers, packages, scramble, stubs

OFFLINE, OFFLINE_COMMIT = "andreazanette/OfflineArcher", "56d3b72665671be853bcbc961e7cd14459a3a1d1"
ONLINE, ONLINE_COMMIT = "YifeiZhou02/ArCHer", "7c771a7610cb34e54ba53d69d1fb7337103e5648"
SNELL, SNELL_COMMIT = "Sea-Snell/Implicit-Language-Q-Learning", "0dc556150bfbdca5e1e6ee322c9126486c2162f7"
WIDTH, ROWS = 16, 6
SMALL: dict[str, Any] = {
    "width": WIDTH, "layers": 1, "heads": 2, "length": 60, "batch_size": ROWS, "tokenizer": "words", "clip_norm": 0.0, "weight_decay": 0.0,
}  # fmt: skip
SIZES = {"critic": "value_layers"}


def dialogues(seed: int = 0) -> Any:
    """Finished episodes of three turns, observations of three words, actions of one to three."""
    g = np.random.default_rng(seed)

    def words(count: int, of: str) -> str:
        return " ".join(g.choice(list(of), count)) + "\n"

    episodes = [
        {
            "turns": [
                {"obs": words(3, "abc"), "action": words(int(g.integers(1, 4)), "xyz"), "reward": float(g.normal())} for _ in range(3)
            ],
            "final_obs": words(3, "abc"), "terminated": True, "truncated": False,
        }
        for _ in range(4)
    ]  # fmt: skip
    return from_episodes(episodes, name="dialogues")


class Text:
    """Our side of a text algorithm, and batches of its data as float64."""

    def __init__(self, method: str, networks: Sequence[str], **settings: Any) -> None:
        data, kind = dialogues(), registry.get("algo", method)
        config = kind.fit_config(kind.Config(**{**SMALL, **settings}), data)
        self.ours = Ours(method, data.spec, **dataclasses.asdict(config))
        self.algorithm = self.ours.algorithm
        for name in networks:
            scramble(self.ours, name)
        state = self.ours.state
        self.ours.state = state._replace(target={n: {k: v.clone() for k, v in state.params[n].items()} for n in state.target})
        self.sampler = self.algorithm.sampler()
        self.source = self.sampler.prepare(data)

    def batch(self, number: int) -> Arrays:
        """A batch of the data, as NumPy's arrays."""
        drawn = self.sampler(self.source, rng.make_key(100 + number), ROWS)
        return {name: x.numpy().astype(np.float64) if x.is_floating_point() else x.numpy() for name, x in drawn.items()}

    def lm(self, network: str) -> Any:
        """A copy of a network's language model with our parameters."""
        module = copy.deepcopy(self.algorithm.networks[network]).double()
        module.load_state_dict(self.ours.state.params[network], strict=False)
        return getattr(module, "lm", module)


class Encoded(dict[str, Tensor]):
    """What a tokenizer of transformers gives."""

    @property
    def input_ids(self) -> Tensor:
        return self["input_ids"]

    def to(self, _: Any) -> Encoded:
        return self


class Numbers:
    """A tokenizer of texts that are token numbers; a critic's puts the start token before texts without it."""

    eos_token, eos_token_id, pad_token_id = "", 0, 0

    def __init__(self, start: int | None) -> None:
        self.start = start

    def __call__(self, texts: str | Sequence[str], **_: Any) -> Encoded:
        rows = [[int(x) for x in text.split()] for text in ([texts] if isinstance(texts, str) else texts)]
        if self.start is not None:
            rows = [row if row[:1] == [self.start] else [self.start, *row] for row in rows]
        ids, mask = (torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64) for _ in range(2))
        for i, row in enumerate(rows):
            ids[i, : len(row)], mask[i, : len(row)] = torch.tensor(row), 1
        return Encoded(input_ids=ids, attention_mask=mask)


class Reader(nn.Module):
    """In the place of a critic's RoBERTa: our language model, whose state at the last token stands for a text."""

    device = torch.device("cpu")

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        state = self.lm.hidden(input_ids)[torch.arange(len(input_ids)), attention_mask.sum(-1) - 1]
        return SimpleNamespace(last_hidden_state=state.unsqueeze(1), pooler_output=state)


class Writer(nn.Module):
    """In the place of an actor's GPT-2: ours."""

    device, dtype = torch.device("cpu"), torch.float64

    def __init__(self, lm: Any) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return SimpleNamespace(logits=self.lm.logits(self.lm.hidden(input_ids)))


@contextmanager
def our_models(text: Text) -> Iterator[None]:
    """Inside, transformers gives our language models and token numbers, whatever name it is asked for."""
    import transformers as t

    start = int(text.source.sequences.start)

    def read(*_: Any, **__: Any) -> Reader:
        return Reader(text.lm("critic"))

    def write(*_: Any, **__: Any) -> Writer:
        return Writer(text.lm("policy"))

    def tokenizer(name: str, **_: Any) -> Numbers:
        return Numbers(start if "roberta" in name else None)

    given = {t.RobertaModel: read, t.AutoModel: read, t.AutoModelForCausalLM: write, t.RobertaTokenizer: tokenizer, t.AutoTokenizer: tokenizer}
    with ExitStack() as stack:
        for kind, make in given.items():
            stack.enter_context(mock.patch.object(kind, "from_pretrained", make))
        yield


def written(ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """Rows of token numbers as texts."""
    return ["".join(f"{token} " for token in row[keep]) for row, keep in zip(ids, mask, strict=True)]


def turns(batch: Arrays) -> dict[str, Any]:
    """A batch of turns as the references have it: texts, rewards, and whether the episode is over."""
    before = np.arange(batch["ids"].shape[1]) < batch["action"].argmax(1)[:, None]
    return {
        "observation": written(batch["ids"], before), "action": written(batch["ids"], batch["action"]),
        "next_observation": written(batch["next_ids"], batch["next_valid"]), "reward": batch["reward"].tolist(),
        "done": batch["done"].tolist(),
    }  # fmt: skip


def critic_pairs(critic: Any) -> list[Pair]:
    """A double critic of ArCHer's."""
    pairs: list[Pair] = [(f"lm.{name}", lambda x: x, tensor) for name, tensor in critic.base_lm.lm.named_parameters()]
    for name, head in zip(("q1", "q2", "v1", "v2"), (critic.critic1, critic.critic2, critic.v_critic1, critic.v_critic2), strict=True):
        for at, layer in zip(("layers.0", "layers.1", "head"), head[::2], strict=True):
            pairs += linear(f"heads.{name}.{at}", layer)
    return pairs


def lightning() -> dict[str, ModuleType]:
    """`lightning` as far as OfflineArcher's training step needs it, for `stubs`."""
    members = {
        "device": torch.device("cpu"), "save_hyperparameters": lambda *_, **__: None, "log_dict": lambda *_, **__: None,
        "manual_backward": lambda self, loss: loss.backward(), "optimizers": lambda self: self.pair,
    }  # fmt: skip
    made = {name: ModuleType(name) for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks")}
    made["lightning"].LightningModule = type("LightningModule", (nn.Module,), members)  # type: ignore[attr-defined]
    made["lightning.pytorch.callbacks"].Callback = object  # type: ignore[attr-defined]
    simulation = ModuleType("SimulateOnEnv")
    simulation.batch_simulate_on_environment = None  # type: ignore[attr-defined]
    return {**made, "SimulateOnEnv": simulation}


def shrunk(kind: Any) -> Any:
    """A patch: double critics of this class are for states of our width in place of 768."""
    original = kind.__init__

    def build(self: Any, *arguments: Any, in_dim: int, out_dim: int, **more: Any) -> None:
        original(self, *arguments, in_dim=WIDTH, out_dim=out_dim, **more)

    return mock.patch.object(kind, "__init__", build)


@case(
    "archer", OFFLINE, OFFLINE_COMMIT,
    aligned="the same small GPT-2 on both sides, whose last token stands for a text; no cap of the weights, no clipping",
    remains="their critic is RoBERTa at its first token; our cap of 100 and clipping at 1; 32 turns in 4 parts are their batch",
    needs=("transformers", "peft"),
)  # fmt: skip
def archer(checkout: Path) -> Outcome:
    text, outcome = Text("archer", ("policy", "critic"), max_weight=1e12, actor_learning_rate=1e-4, critic_learning_rate=1e-5), Outcome()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        stack.enter_context(our_models(text))
        stack.enter_context(stubs(lightning()))
        critics = stack.enter_context(imported(checkout, "ArcherCritic"))
        algorithms = stack.enter_context(imported(checkout, "Algorithms"))
        stack.enter_context(shrunk(critics.ArcherDoubleCritic))
        stack.enter_context(stubs({"ArcherCritic": critics}))
        settings = {"tau": 0.05, "accumulate_grad_batches": 1, "discount_factor": 0.99, "critic_expectile": 0.9}
        model = algorithms.OfflineArcher(inv_temp=1.0, actor_lr=1e-4, critic_lr=1e-5, optimize_critic=True, **settings)
        pairs, params = critic_pairs(model.critic.critic), text.ours.state.params
        give(pairs, params["critic"])
        model.critic.soft_update_target_critic(1)
        model.pair = model.configure_optimizers()
        logged: dict[str, Any] = {}
        model.log_dict = lambda values, **_: logged.update(values)
        for number in range(UPDATES):
            batch = text.batch(number)
            losses = text.ours.update(batch)
            model.training_step(turns(batch), number)
            theirs = {
                "actor/loss": logged["actor/loss"], "critic/q_loss": logged["critic/q1.loss"] + logged["critic/q2.loss"],
                "critic/v_loss": logged["critic/v1.loss"] + logged["critic/v2.loss"],
            }  # fmt: skip
            outcome.losses.append({name: (losses[name], float(value)) for name, value in theirs.items()})
    state = text.ours.state
    outcome.parameters |= compared(pairs, state.params["critic"])
    targets = compared(critic_pairs(model.critic.target_critic), state.target["critic"])
    outcome.parameters |= {f"target/{name}": pair for name, pair in targets.items()}
    policy = [(name, lambda x: x, tensor) for name, tensor in model.actor.model.lm.named_parameters()]
    outcome.parameters |= {f"policy/{name}": pair for name, pair in compared(policy, state.params["policy"]).items()}
    return outcome
