"""Texts as tokens of the tokenizer that lies beside a language model."""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path

import torch
from torch import Tensor

from offrl.errors import UserError, first_line
from offrl.lm.models import described
from offrl.lm.models.libraries import packages, silent
from offrl.lm.models.pretrained import FILES, GGUF, Language


def tokens(language: Language, path: str) -> Tensor:
    """A text file as the model's tokens, int64 [N]. Raises UserError."""
    transformers, _ = packages()
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"algo.text={path} cannot be read as UTF-8 text ({error})") from None
    if not language.place:
        raise UserError(
            f"algo.text={path}: a model from scratch has no tokens; leave algo.text out, or name a model that was "
            "trained"
        )
    place, options = tokenizer_place(language.place)
    with silent(), described.offline():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                place, local_files_only=True, trust_remote_code=False, **options
            )
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        except Exception as error:
            raise UserError(
                f"algo.text={path}: no tokenizer could be read in {language.place} ({first_line(error)})"
            ) from None
    if len(ids) and int(ids.max()) >= language.config.vocab_size:
        raise UserError(f"algo.text={path}: the tokenizer in {language.place} has more tokens than its model")
    return ids


def tokenizer_place(place: str) -> tuple[str, dict[str, str]]:
    """The location of the tokenizer of the model at `place`: a folder, and transformers' arguments for reading it
    there.
    """
    path = Path(place)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == GGUF else (_folder(place), {})


def _folder(place: str) -> str:
    if Path(place).is_dir():
        return place
    return str(
        importlib.import_module("huggingface_hub").snapshot_download(place, allow_patterns=FILES, local_files_only=True)
    )


def digest(values: Tensor) -> str:
    """A short checksum of tokens."""
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
