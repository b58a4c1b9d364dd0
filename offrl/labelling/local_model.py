"""A language model on this machine: any causal one in Hugging Face's format."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from offrl.errors import UserError, first_line
from offrl.lm.models import libraries
from offrl.lm.models.libraries import packages, silent
from offrl.lm.models.pretrained import GGUF, checksum, snapshot
from offrl.lm.models.tokenizer import TOKENIZER_FILES

# lines of Python, which take seconds; a chat template of a thousand lines takes 200,000, read and rendered
STEPS = 5_000_000
DECISIVE = (".json", ".safetensors", ".txt", ".model", ".jinja")  # files that decide the answers
MOST_TEXT = 1_000_000  # characters that a chat template may add


class LocalModel:
    """Greedy answers of a causal language model, batch by batch, in the chat format of its tokenizer where it has one.

    Weights are read from safetensors files alone, and no code that comes with a model is run.
    """

    def __init__(
        self, name: str, *, max_tokens: int = 256, system: str = "", batch: int = 8, device: str = "cpu"
    ) -> None:
        """name: a folder with config.json, tokenizer and *.safetensors, a .gguf file, or a name on the Hub. Raises
        UserError.
        """
        self.name, self.max_tokens, self.system, self.batch, self.device = (
            name,
            max_tokens,
            system,
            batch,
            torch.device(device),
        )
        folder, more = _place(name)
        transformers, _ = packages()
        # transformers would make one that knows nothing
        if not more and not any((folder / file).is_file() for file in TOKENIZER_FILES):
            raise UserError(f"local={name}: no tokenizer can be read in it (none of {', '.join(TOKENIZER_FILES)})")
        files = [folder / more["gguf_file"]] if more else sorted(p for p in folder.iterdir() if p.suffix in DECISIVE)
        self._files = checksum(files, f"local={name}")
        with silent():
            options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, **more}
            try:
                self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, padding_side="left", **options)
            except Exception as error:  # whatever its files do to transformers
                raise UserError(f"local={name}: no tokenizer can be read in it ({first_line(error)})") from None
            try:
                if not more:
                    config = transformers.AutoConfig.from_pretrained(
                        folder, local_files_only=True, trust_remote_code=False
                    )
                    options |= {
                        "config": libraries.scrub(config, keep=("quantization_config",)),
                        "use_safetensors": True,
                    }
                model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
            except Exception as error:
                raise UserError(
                    f"local={name}: it cannot be read as a causal language model ({first_line(error)})"
                ) from None
        self.model = model.eval().requires_grad_(False).to(self.device)
        if self.tokenizer.pad_token_id is None:  # it only fills up: the attention mask hides it
            self.tokenizer.pad_token_id = self.tokenizer.eos_token_id if self.tokenizer.eos_token_id is not None else 0
        if len(self.tokenizer) > self.model.get_input_embeddings().num_embeddings:
            raise UserError(f"local={name}: its tokenizer has more tokens than its model; they do not belong together")

    @property
    def identity(self) -> str:
        """The files' checksum and the settings."""
        return json.dumps(["local", self._files, self.max_tokens, self.system])

    def complete(self, prompts: Sequence[str]) -> list[str]:
        """The answers to `prompts`. Raises UserError for one that is too long for the model."""
        texts = dict(self.stream(prompts))
        return [texts[i] for i in range(len(prompts))]

    @torch.no_grad()
    def stream(self, prompts: Sequence[str]) -> Iterator[tuple[int, str]]:
        """(index, answer), the shortest prompts first, so that those of a batch need little padding."""
        ids = [self._tokens(prompt) for prompt in prompts]
        room = getattr(self.model.config, "max_position_embeddings", None)
        longest = max(map(len, ids), default=0)
        if room is not None and longest + self.max_tokens > room:
            raise UserError(
                f"local={self.name} has room for {room} tokens, and a question of {longest} and an answer of "
                f"{self.max_tokens} are more: show less with steps=, names= or digits=, or set max_tokens="
            )
        order = sorted(range(len(prompts)), key=lambda i: len(ids[i]))
        for start in range(0, len(order), self.batch):
            part = order[start : start + self.batch]
            width = len(ids[part[-1]])
            pad = int(self.tokenizer.pad_token_id)
            tokens = torch.tensor([[pad] * (width - len(ids[i])) + ids[i] for i in part], device=self.device)
            mask = torch.tensor([[0] * (width - len(ids[i])) + [1] * len(ids[i]) for i in part], device=self.device)
            with silent():
                output = self.model.generate(
                    input_ids=tokens,
                    attention_mask=mask,
                    max_new_tokens=self.max_tokens,
                    do_sample=False,
                    num_beams=1,
                    pad_token_id=pad,
                    temperature=None,
                    top_p=None,
                    top_k=None,
                )
            for i, row in zip(part, output[:, width:].tolist(), strict=True):
                yield i, str(self.tokenizer.decode(row, skip_special_tokens=True)).strip()

    def _tokens(self, prompt: str) -> list[int]:
        if self.tokenizer.chat_template:
            messages = [{"role": "system", "content": self.system}] if self.system else []
            try:
                text = self._chat([*messages, {"role": "user", "content": prompt}])
            except UserError:
                raise
            except Exception:  # a template without a place for system messages
                text = self._chat(
                    [{"role": "user", "content": f"{self.system}\n\n{prompt}" if self.system else prompt}]
                )
            tokens = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            tokens = self.tokenizer(f"{self.system}\n\n{prompt}\nAnswer:" if self.system else f"{prompt}\nAnswer:")[
                "input_ids"
            ]
        return [int(token) for token in tokens] or [int(self.tokenizer.pad_token_id)]

    def _chat(self, messages: list[dict[str, str]]) -> str:
        with bounded(f"local={self.name}: its chat template"):
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        if len(text) > MOST_TEXT + 2 * sum(len(m["content"]) for m in messages):
            raise UserError(
                f"local={self.name}: its chat template makes {len(text):,} characters of a question; it is damaged, or "
                "hostile"
            )
        return text


@contextlib.contextmanager
def bounded(where: str) -> Iterator[None]:
    """Raises UserError when Python has run `STEPS` lines within it: a chat template is a program, which transformers
    runs in Jinja's sandbox, where it can do nothing but go on for ever."""
    count = 0

    def trace(frame: Any, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        if count > STEPS:
            raise UserError(f"{where} does not come to an end; it is damaged, or hostile")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def _place(name: str) -> tuple[Path, dict[str, str]]:
    """The folder of a model, or the copy that Hugging Face's cache has or gets of it, and more arguments for reading it
    there.
    """
    folder = Path(name).expanduser()
    if folder.suffix == GGUF and folder.is_file():
        if importlib.util.find_spec("gguf") is None:
            raise UserError(f"local={name}: GGUF files need the package gguf: pip install gguf")
        return folder.parent, {"gguf_file": folder.name}
    if not folder.is_dir():
        folder = snapshot(name, f"local={name}", typed=True)
    if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        lacking = "*.safetensors" if (folder / "config.json").is_file() else "config.json"
        raise UserError(
            f"local={name}: it has no {lacking}; save a model there with model.save_pretrained(FOLDER, "
            "safe_serialization=True)"
        )
    libraries.check_folder(folder, f"local={name}")
    return folder, {}
