"""Tokenizers: small ones made from the data (characters, words, bytes), and those that come with a language model, and
files as their tokens.

All are objects of the package `tokenizers`. Every text is encoded on its own and the tokens are put one after another,
so that it is always known which token belongs to which text: a joined text would merge tokens across the seams.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.errors import UserError, first_line, warn
from offrl.lm.models.libraries import offline, packages, silent
from offrl.lm.models.pretrained import FILES, GGUF, Language

KINDS = ("characters", "words", "bytes")
PAD, START, END, UNKNOWN = "<pad>", "<s>", "</s>", "<unk>"
OWN = (PAD, START, END, UNKNOWN)  # of tokenizers made here, in this order
# every character is in exactly one piece, so nothing is lost
PIECES = {"characters": r"[\s\S]", "words": r" ?\w+|\s|[^\w\s]"}
MOST_WORDS = 20_000
SPARE = 1_000  # numbers of tokens that a vocabulary may leave out
ENDS_TURN = "\n"
# one of them is there where a tokenizer is
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
CURE = (
    "save one with tokenizer.save_pretrained(FOLDER), or take algo.lm=scratch with algo.tokenizer=characters, words or "
    "bytes"
)


@functools.cache
def package() -> Any:
    """The package tokenizers. Raises UserError where it is not installed."""
    try:
        return importlib.import_module("tokenizers")
    except ImportError as error:
        raise UserError(f"text needs the package tokenizers ({error}): pip install 'offrl[text]'") from None


@dataclass(eq=False)
class Tokenizer:
    """Texts to token ids and back, without special tokens."""

    backend: Any  # tokenizers.Tokenizer
    size: int  # ids are 0 .. size - 1
    start: int  # the token before every sequence
    end: int | None  # the token that ends an action where the actions' texts do not say so themselves
    pad: int  # never attended to

    def __post_init__(self) -> None:
        self.backend.encode_special_tokens = True  # a text that happens to hold "</s>" is only text; no file keeps this

    @property
    def control(self) -> list[str]:
        """The spellings of tokens that control the model, which in a text are text."""
        return [t.content for t in self.backend.get_added_tokens_decoder().values() if t.special and t.content]

    @functools.cached_property
    def identity(self) -> str:
        """A short checksum of the tokenizer."""
        return hashlib.sha256(self.backend.to_str().encode() + f" {self.start} {self.end}".encode()).hexdigest()[:16]

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids int32 [T] of each text."""
        return [
            np.asarray(e.ids, np.int32) for e in self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        ]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens say nothing."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=True))

    @functools.cached_property
    def stops(self) -> np.ndarray:
        """[size] bool: tokens that end an action whose text ends with a newline."""
        texts = self.backend.decode_batch([[i] for i in range(self.size)], skip_special_tokens=False)
        return np.array([text.endswith(ENDS_TURN) for text in texts])

    def unknown(self, texts: Iterable[str]) -> list[str]:
        """The texts that do not survive encoding and decoding."""
        texts = list(texts)
        return [t for t, ids in zip(texts, self.encode(texts), strict=True) if self.decode(ids.tolist()) != t]


def vocabulary(kind: str, texts: Iterable[str], source: str) -> list[str]:
    """The vocabulary that a tokenizer of `kind` needs for these texts, sorted; empty for bytes. Raises UserError for
    too many words.
    """
    if kind == "bytes":
        return []
    pattern = re.compile(PIECES[kind])
    pieces = {piece for text in texts for piece in pattern.findall(text)}
    if kind == "words" and len(pieces) > MOST_WORDS:
        raise UserError(
            f"{source} has {len(pieces):,} different words, more than {MOST_WORDS:,}: take algo.tokenizer=bytes or "
            "characters"
        )
    return sorted(pieces)


def make(kind: str, pieces: Sequence[str]) -> Tokenizer:
    """A tokenizer of `kind` ("characters", "words" or "bytes") over `pieces`, as `vocabulary` gives them. Others become
    unknown.
    """
    tokenizers = package()
    models, pre, decoders = tokenizers.models, tokenizers.pre_tokenizers, tokenizers.decoders
    if kind == "bytes":
        entries = list(OWN) + sorted(pre.ByteLevel.alphabet())
        backend = tokenizers.Tokenizer(models.BPE({w: i for i, w in enumerate(entries)}, [], unk_token=UNKNOWN))
        backend.pre_tokenizer = pre.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
    else:
        entries = [*OWN, *pieces]
        backend = tokenizers.Tokenizer(models.WordLevel({w: i for i, w in enumerate(entries)}, unk_token=UNKNOWN))
        backend.pre_tokenizer = pre.Split(tokenizers.Regex(PIECES[kind]), "isolated")
        backend.decoder = decoders.Fuse()
    backend.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in OWN])
    return Tokenizer(backend, len(entries), OWN.index(START), OWN.index(END), OWN.index(PAD))


def from_json(text: Any, numbers: Any, where: str) -> Tokenizer:
    """A tokenizer from what `backend.to_str()` gave, and (start, end, size), as policy files hold them. Raises
    UserError for others.
    """
    problem = f"{where}: its tokenizer is damaged"
    if not (isinstance(text, str) and isinstance(numbers, list) and len(numbers) == 3):
        raise UserError(problem)
    start, end, size = numbers
    try:
        backend = package().Tokenizer.from_str(text)
    except BaseException as error:  # a panic of its Rust code is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit | UserError):
            raise
        raise UserError(f"{problem} ({first_line(error)})") from None
    if not all(type(n) is int and 0 <= n < 2**31 for n in (start, size, 0 if end is None else end)):
        raise UserError(problem)
    if max(start, end or 0) >= size or size > 2 * backend.get_vocab_size() + SPARE:
        raise UserError(f"{problem}: it is said to have {size:,} tokens")
    return Tokenizer(backend, size, start, end, start)


def of_model(folder: str | Path, source: str, **options: Any) -> Tokenizer:
    """The tokenizer that lies beside a language model's weights in `folder`. Raises UserError where there is none that
    can be used.

    options: more arguments of transformers' `from_pretrained`, such as `gguf_file`.
    """
    transformers, _ = packages()
    # transformers would make one without a vocabulary
    if not options and not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(f"{source}: no tokenizer could be read there (none of {', '.join(TOKENIZER_FILES)}); {CURE}")
    with silent(), offline():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False, **options
            )
        except Exception as error:  # no files, damaged ones, a kind that transformers does not know
            raise UserError(f"{source}: no tokenizer could be read there ({first_line(error)}); {CURE}") from None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        kind = type(tokenizer).__name__
        raise UserError(
            f"{source}: its tokenizer ({kind}) has no fast form, which is needed; convert it to tokenizer.json"
        )
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        start = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        text = tokenizer.convert_ids_to_tokens(start)
        warn(f"{source}: its tokenizer has neither a BOS nor an EOS token; token {start} ({text!r}) begins each text")
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else start
    return Tokenizer(
        backend,
        max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1),
        int(start),
        tokenizer.eos_token_id,
        int(pad),
    )


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
    location, options = tokenizer_place(language.place)
    with silent(), offline():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                location, local_files_only=True, trust_remote_code=False, **options
            )
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        except Exception as error:
            raise UserError(
                f"algo.text={path}: no tokenizer could be read in {language.place} ({first_line(error)})"
            ) from None
    if len(ids) and int(ids.max()) >= language.config.vocab_size:
        raise UserError(f"algo.text={path}: the tokenizer in {language.place} has more tokens than its model")
    return ids


def tokenizer_place(location: str) -> tuple[str, dict[str, str]]:
    """The location of the tokenizer of the model at `location`: a folder, and transformers' arguments for reading it
    there.
    """
    path = Path(location)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == GGUF else (_folder(location), {})


def _folder(location: str) -> str:
    if Path(location).is_dir():
        return location
    return str(
        importlib.import_module("huggingface_hub").snapshot_download(
            location, allow_patterns=FILES, local_files_only=True
        )
    )


def digest(values: Tensor) -> str:
    """A short checksum of tokens."""
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
