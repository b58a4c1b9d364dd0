"""The language model in a policy file, for the policy to act elsewhere."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from offrl.errors import UserError
from offrl.lm.models import pretrained as languages
from offrl.lm.models.causal_lm import LM
from offrl.lm.models.pretrained import SMALL
from offrl.lm.models.tokenizer import Tokenizer, from_json


def pack(lm: LM, tokenizer: Tokenizer, ship: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, values for JSON): all that a policy file needs besides the learnt parameters, or the place of the
    language model.
    """
    language = lm.language
    assert language is not None
    about = {
        "identity": language.identity, "place": language.place, "tokenizer": tokenizer.backend.to_str(),
        "tokens": [tokenizer.start, tokenizer.end, tokenizer.size],
    }  # fmt: skip
    frozen = dict(lm.named_buffers())
    is_small = sum(t.numel() * t.element_size() for t in frozen.values()) <= SMALL
    if ship == "always" or not language.place or (ship == "small" and is_small):
        parameters = {name: p for name, p in language.model.named_parameters() if lm.adapted}
        return parameters, {**about, "architecture": json.loads(language.config.to_json_string(use_diff=False))}
    return {}, about


def unpack(tensors: dict[str, Tensor], about: dict[str, Any]) -> Tokenizer:
    """Make what `pack` gave known in this process. Raises UserError where the language model is neither in the file nor
    in its place.
    """
    identity = find_language(tensors, about, head=True)
    return from_json(about.get("tokenizer"), about.get("tokens"), f"the language model {identity}")


def find_language(tensors: dict[str, Tensor], about: dict[str, Any], head: bool) -> str:
    """The identity of the language model that a policy file holds or names, which is known in this process then. Raises
    UserError.
    """
    identity, place = about.get("identity"), about.get("place")
    if not isinstance(identity, str) or not isinstance(place, str):
        raise UserError(
            "the policy does not say which language model it needs: the file is damaged, or no policy that offrl wrote"
        )
    if languages.known(identity) is None:
        if "architecture" in about:
            languages.unpack(tensors, about["architecture"], identity, head=head)
        else:
            languages.open_elsewhere(place, identity)
    return identity
