"""The language model and the tokenizer that an algorithm's settings name. A process has one of each, which all its
algorithms share.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import torch
from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.errors import UserError, warn
from offrl.lm.models import pretrained as languages
from offrl.lm.models import tokenizer as tokenizing
from offrl.lm.models.causal_lm import LM, Size, probe
from offrl.lm.models.pretrained import SCRATCH, SMALL, Language
from offrl.lm.models.tokenizer import ENDS_TURN, Tokenizer, from_json

CHECKED = 1_000  # different actions that are tried with the tokenizer
ROOM = 1.5  # times the longest action in the data: how long an action may become
_tokenizers: dict[str, Tokenizer] = {}


def tokenizer_of(config: Any) -> Tokenizer:
    """The tokenizer that the settings name. Raises UserError."""
    c = config
    if c.lm == SCRATCH:
        key = f"{c.tokenizer} {c.vocabulary}"
        if key not in _tokenizers:
            _tokenizers[key] = tokenizing.make(c.tokenizer, c.vocabulary)
        return _tokenizers[key]
    key = f"{c.lm_id} {c.lm}"
    if key not in _tokenizers and c.lm_id in _tokenizers:  # it came with a policy file
        return _tokenizers[c.lm_id]
    if key not in _tokenizers:
        read_tokenizer(c)
    return _tokenizers[key]


def read_tokenizer(config: Any) -> None:
    """Read the tokenizer that lies beside the language model: two models of the same weights may have different ones.
    Raises UserError.
    """
    c = config
    folder, options = tokenizing.tokenizer_place(language_of(c).place)
    _tokenizers[f"{c.lm_id} {c.lm}"] = tokenizing.of_model(folder, f"algo.lm={c.lm}", **options)


def language_of(config: Any) -> Language:
    """The language model that a run or a policy file noted; where none did, the one that the settings name. Raises
    UserError.
    """
    if config.lm_id:
        return languages.known(config.lm_id) or languages.open_again(config.lm, config.lm_id)
    return languages.find(config.lm, typed=False)


def language_model(config: Any, tune: str | None = None) -> LM:
    """The language model of these settings, as a module."""
    c = config
    if c.lm == SCRATCH:
        tokens = tokenizer_of(c).size
        size = Size(c.width, c.layers, c.heads, c.length + (c.action_tokens or 0) + 1, tokens)
        return LM(None, size, tune=tune or c.tune, checkpointing=c.checkpointing)
    return LM(
        language_of(c),
        tune=tune or c.tune,
        rank=c.rank,
        alpha=c.lora_alpha,
        layers=tuple(c.lora_layers),
        checkpointing=c.checkpointing,
    )


def fitted(config: Any, dataset: Dataset) -> Any:
    """The settings completed from the data: vocabulary, how actions end and how long they may be. Raises UserError."""
    c, name = config, dataset.spec.name
    actions = [dataset.strings[i] for i in dataset.columns["actions"].unique().tolist()]
    if c.lm == SCRATCH:
        c = dataclasses.replace(c, vocabulary=c.vocabulary or tokenizing.vocabulary(c.tokenizer, dataset.strings, name))
        if c.tune != "all":
            raise UserError("algo.tune=adapters needs a language model that was trained before: name one by algo.lm")
    else:
        c = dataclasses.replace(c, lm_id=languages.find(c.lm).identity)
        read_tokenizer(c)
    tokenizer = tokenizer_of(c)
    append_end = c.append_end
    if append_end is None:
        append_end = not all(text.find(ENDS_TURN) == len(text) - 1 >= 0 for text in actions)
    if append_end and tokenizer.end is None:
        raise UserError(
            f"algo.lm={c.lm}: its tokenizer has no end token, and the actions of {name} do not all end with a newline: "
            "give it an EOS token, or end each action with a newline (algo.append_end=false)"
        )
    longest = max(len(ids) for ids in tokenizer.encode(actions)) + int(append_end)
    spelt = [t for t in dataset.strings if any(word in t for word in tokenizer.control)] if c.lm != SCRATCH else []
    if spelt:
        control_words = sorted({word for word in tokenizer.control for t in spelt if word in t})
        warn(
            f"{name}: {len(spelt):,} of {len(dataset.strings):,} different texts hold the spelling of a control token "
            f"of {c.lm}, such as {control_words[0]!r}: it is read as plain text"
        )
    altered = tokenizer.unknown(actions[:CHECKED])
    if altered:
        warn(
            f"{name}: encoded and decoded, {len(altered):,} of {min(len(actions), CHECKED):,} actions are not what "
            f"they were, such as {altered[0]!r}: the policy cannot write these"
        )
    action_tokens = c.action_tokens or max(1, min(int(ROOM * longest) + 1, c.length // 2))
    c = dataclasses.replace(c, append_end=append_end, action_tokens=action_tokens)
    with torch.random.fork_rng(devices=[]):
        lm = language_model(c)
        if c.lm != SCRATCH:
            probe(lm, tokenizer.size, f"algo.lm={c.lm}")
    if lm.positions is not None and c.length + action_tokens + 1 > lm.positions:
        length = lm.positions - action_tokens - 1
        if length < 8:
            raise UserError(f"algo.lm={c.lm} looks back {lm.positions} tokens, too few for actions of {action_tokens}")
        c = dataclasses.replace(c, length=length)
    return c


def describe(lm: LM, config: Any) -> str:
    """A line for the log: the language model, and how it writes."""
    c = config
    trainable = sum(p.numel() for p in lm.parameters())
    frozen = sum(b.numel() for b in lm.buffers()) if c.tune == "adapters" else 0
    model = f"a GPT-2 from scratch on {c.tokenizer}" if c.lm == SCRATCH else f"{c.lm} ({lm.base.config.model_type})"
    frozen_note = f" beside {frozen:,} frozen ones" if frozen else ""
    context = "all texts so far" if c.history is None else f"the last {c.history} text{'s' if c.history > 1 else ''}"
    ending = "an end token" if c.append_end else "a newline"
    return (
        f"language model: {model}, {trainable:,} parameters learn{frozen_note}, {tokenizer_of(c).size:,} tokens; it "
        f"reads {context} and writes at most {c.action_tokens} tokens up to {ending}"
    )


def known_tokenizer(identity: str, tokenizer: Tokenizer) -> None:
    """Make the tokenizer that came with a policy file known in this process."""
    _tokenizers[identity] = tokenizer


def pack(lm: LM, tokenizer: Tokenizer, ship: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, values for JSON): all that a policy file needs besides the learnt parameters, or the place of the
    language model.
    """
    language = lm.language
    assert language is not None
    description = {
        "identity": language.identity, "place": language.place, "tokenizer": tokenizer.backend.to_str(),
        "tokens": [tokenizer.start, tokenizer.end, tokenizer.size],
    }  # fmt: skip
    frozen = dict(lm.named_buffers())
    is_small = sum(t.numel() * t.element_size() for t in frozen.values()) <= SMALL
    if ship == "always" or not language.place or (ship == "small" and is_small):
        parameters = {name: p for name, p in language.model.named_parameters() if lm.adapted}
        return parameters, {**description, "architecture": json.loads(language.config.to_json_string(use_diff=False))}
    return {}, description


def unpack(tensors: dict[str, Tensor], description: dict[str, Any]) -> Tokenizer:
    """Make what `pack` gave known in this process. Raises UserError where the language model is neither in the file nor
    in its place.
    """
    identity = find_language(tensors, description, head=True)
    return from_json(description.get("tokenizer"), description.get("tokens"), f"the language model {identity}")


def find_language(tensors: dict[str, Tensor], description: dict[str, Any], head: bool) -> str:
    """The identity of the language model that a policy file holds or names, which is known in this process then. Raises
    UserError.
    """
    identity, location = description.get("identity"), description.get("place")
    if not isinstance(identity, str) or not isinstance(location, str):
        raise UserError(
            "the policy does not say which language model it needs: the file is damaged, or no policy that offrl wrote"
        )
    if languages.known(identity) is None:
        if "architecture" in description:
            languages.unpack(tensors, description["architecture"], identity, head=head)
        else:
            languages.open_elsewhere(location, identity)
    return identity
