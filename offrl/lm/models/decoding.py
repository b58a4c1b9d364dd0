"""Writing actions token by token: many prompts side by side, with a cache of keys and values.

Shapes in comments: B prompts, T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from offrl import rng

# (new tokens [B, T], valid [B, all so far]) -> logits [B, V] of what comes next
Read = Callable[[Tensor, Tensor], Tensor]


def left_padded(prompts: Sequence[np.ndarray], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, T], valid bool [B, T]) of prompts of at least one token each, with padding before the shorter
    ones.
    """
    width = max(len(p) for p in prompts)
    ids, valid = np.full((len(prompts), width), pad, np.int64), np.zeros((len(prompts), width), bool)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :], valid[row, width - len(prompt) :] = prompt, True
    return torch.from_numpy(ids).to(device), torch.from_numpy(valid).to(device)


def write(
    read: Read,
    prompts: Sequence[np.ndarray],
    *,
    pad: int,
    stops: Tensor,
    allowed: Tensor,
    max_tokens: int,
    noise: Callable[[int], Tensor] | None,
    temperature: float = 1.0,
) -> list[list[int]]:
    """The tokens that follow each prompt, up to and with the first of `stops` (bool [V]), at most `max_tokens`.

    read: carries its caches from call to call. allowed: bool [V], tokens that may be written. noise: gives numbers [B]
    in [0, 1) for the t-th token, which decide the draw from softmax(logits / temperature); None: the likeliest token is
    taken.
    """
    device = stops.device
    ids, valid = left_padded(prompts, pad, device)
    logits = read(ids, valid)
    tokens = torch.zeros(len(prompts), 0, dtype=torch.int64, device=device)
    over = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    lengths = torch.zeros(len(prompts), dtype=torch.int64, device=device)
    for t in range(max_tokens):
        token = choose(logits.masked_fill(~allowed, -torch.inf), None if noise is None else noise(t), temperature)
        tokens = torch.cat([tokens, token.unsqueeze(1)], 1)
        lengths = lengths + (~over).long()
        over = over | stops[token]
        if t + 1 == max_tokens or bool(over.all()):
            break
        valid = torch.cat([valid, torch.ones_like(valid[:, :1])], 1)  # tokens after an end are never attended to
        logits = read(token.unsqueeze(1), valid)
    return [row[:size] for row, size in zip(tokens.tolist(), lengths.tolist(), strict=True)]


def uniform_noise(key: Tensor, rows: Sequence[int], device: torch.device) -> Callable[[int], Tensor]:
    """Numbers [B] in [0, 1) for the t-th token of rows with these numbers, each the same whichever others are drawn
    beside it.
    """
    number = torch.tensor(rows, device=key.device)
    return lambda t: (rng.randint_at(rng.fold_in(key, t), number, 1 << 53).double() * 2.0**-53).to(device)


def choose(logits: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
    """A choice int64 [B] among logits [B, V]: the largest, or drawn by numbers [B] in [0, 1)."""
    if noise is None:
        return logits.argmax(-1)
    shares = (logits.double() / temperature).softmax(-1).cumsum(-1)
    index = torch.searchsorted(shares, noise.double().unsqueeze(-1) * shares[:, -1:], right=True).squeeze(-1)
    return index.clamp(max=logits.shape[-1] - 1)


def right_padded(sequences: Sequence[np.ndarray], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(ids int64 [B, T], lengths int64 [B]) with padding after the shorter ones."""
    width = max((len(s) for s in sequences), default=0)
    ids = np.full((len(sequences), width), pad, np.int64)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = sequence
    return torch.from_numpy(ids).to(device), torch.tensor([len(s) for s in sequences], device=device)
