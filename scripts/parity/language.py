"""Our side of text algorithms, and our small GPT-2 in the place of the references' trained models: texts are token
numbers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl import registry, rng
from offrl.data.text.dataset import from_episodes
from parity.common import Arrays, Ours
from parity.weights import scramble

WIDTH, ROWS = 16, 6
SMALL: dict[str, Any] = {
    "width": WIDTH,
    "layers": 1,
    "heads": 2,
    "length": 60,
    "batch_size": ROWS,
    "tokenizer": "words",
    "clip_norm": 0.0,
    "weight_decay": 0.0,
}


def dialogues(seed: int = 0) -> Any:
    """Finished episodes of three turns, observations of three words, actions of one to three."""
    g = np.random.default_rng(seed)

    def words(count: int, of: str) -> str:
        return " ".join(g.choice(list(of), count)) + "\n"

    episodes = [
        {
            "turns": [
                {"obs": words(3, "abc"), "action": words(int(g.integers(1, 4)), "xyz"), "reward": float(g.normal())}
                for _ in range(3)
            ],
            "final_obs": words(3, "abc"),
            "terminated": True,
            "truncated": False,
        }
        for _ in range(4)
    ]
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
        self.ours.state = state._replace(
            target={n: {k: v.clone() for k, v in state.params[n].items()} for n in state.target}
        )
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

    given = {
        t.RobertaModel: read,
        t.AutoModel: read,
        t.AutoModelForCausalLM: write,
        t.RobertaTokenizer: tokenizer,
        t.AutoTokenizer: tokenizer,
    }
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
