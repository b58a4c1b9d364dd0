"""A transformer of one replica: pre-LN blocks in the manner of GPT-2, with a cache of keys and values for decoding.

"Attention Is All You Need" (Vaswani et al., 2017, arXiv 1706.03762); pre-LN as in GPT-2 (Radford et al., 2019). Shapes
in comments: B batch, T tokens, S tokens that may be attended to (those of the cache and the new ones), D width, H
heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.nn.mlp import ACTIVATIONS, initialise

Cache = tuple[tuple[Tensor, Tensor], ...]  # of each layer keys and values [B, H, S, D / H]; (): nothing yet


class Affine(nn.Module):
    """y = x W^T + b; x [..., in] -> [..., out]. Initial weights as in GPT-2."""

    def __init__(self, in_dim: int, out_dim: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim)) if bias else None
        initialise(self.weight, self.bias, "gpt")

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def part(self, x: Tensor, i: int, parts: int) -> Tensor:
        """Part i of `parts` equal ones of the output."""
        return F.linear(x, self.weight.chunk(parts)[i], None if self.bias is None else self.bias.chunk(parts)[i])


class Table(nn.Module):
    """Embeddings, at first as GPT-2's: index int64 [...] -> [..., width]. An index past the end takes the last row."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        initialise(self.weight, None, "gpt")

    def forward(self, index: Tensor) -> Tensor:
        rows = len(self.weight)
        index = index.clamp(0, rows - 1)
        if self.weight.device.type == "cpu":
            return self.weight[index]
        # compiled for a GPU the gradient of a lookup is added up in no fixed order; that of a product is
        one_hot = (index.unsqueeze(-1) == torch.arange(rows, device=index.device)).to(self.weight.dtype)
        with torch.autocast("cuda", enabled=False):
            return one_hot @ self.weight


class Norm(nn.Module):
    """Layer normalisation over the last axis. nn.LayerNorm itself fails under vmap and autocast to bfloat16 (torch
    2.13).
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:]) * self.weight + self.bias


def drop(x: Tensor, rate: float, key: Tensor | None, part: int) -> Tensor:
    """Zero a share `rate` of the entries and scale the rest; as it is without a key. `part` tells apart the layers that
    share a key.
    """
    if key is None or rate <= 0.0:
        return x
    mask = rng.keep(rng.fold_in(key, part), tuple(x.shape), rate)
    return torch.where(mask, x / (1.0 - rate), 0.0)


def visible(valid: Tensor | None, tokens: int, device: torch.device | None = None) -> Tensor:
    """The attention mask, bool [T, T], or [B, 1, T, T] for tokens of which valid [B, T] are no padding.

    Causal: a token sees itself and valid ones before it. A padded token sees at least itself, so that no row of weights
    is empty."""
    index = torch.arange(tokens, device=valid.device if valid is not None else device)
    causal = index.unsqueeze(-1) >= index
    if valid is None:
        return causal
    return ((causal & valid.unsqueeze(-2)) | (index.unsqueeze(-1) == index)).unsqueeze(-3)


def _fused_attention_allowed() -> bool:
    """True where torch's fused attention may be used: it has no batching rule, so under vmap it would take replicas one
    by one.
    """
    return not torch.compiler.is_compiling() and torch._C._functorch.maybe_current_level() is None


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, key: Tensor | None) -> Tensor:
    """Softmax attention: q [B, H, T, d], k and v [B, H, S, d], mask bool [..., T, S] True where it may attend -> [B, H,
    T, d].
    """
    if _fused_attention_allowed() and (key is None or rate <= 0.0):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if mask is not None:
        scores = torch.where(mask, scores, float("-inf"))
    return drop(scores.softmax(-1), rate, key, 0) @ v


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x)); with `post_norm` the norms stand after the sums, as in the
    original.
    """

    def __init__(self, width: int, heads: int, dropout: float, activation: str, post_norm: bool) -> None:
        super().__init__()
        self.heads, self.rate, self.activation, self.post_norm = heads, dropout, ACTIVATIONS[activation], post_norm
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.qkv, self.out = Affine(width, 3 * width), Affine(width, width)
        self.up, self.down = Affine(width, 4 * width), Affine(4 * width, width)

    def split(self, x: Tensor) -> Tensor:
        """[B, T, D] -> [B, H, T, D / H]"""
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        key: Tensor | None,
        past: tuple[Tensor, Tensor] | None,
        cached: bool,
        rows: slice | None = None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """rows: the tokens whose outputs are computed; the others are only attended to."""
        h = x if self.post_norm else self.norm1(x)
        if rows is None:
            q, k, v = (self.split(part) for part in self.qkv(h).chunk(3, -1))
        else:
            q, (k, v) = (
                self.split(self.qkv.part(h[:, rows], 0, 3)),
                (self.split(self.qkv.part(h, i, 3)) for i in (1, 2)),
            )
            x, mask = x[:, rows], None if mask is None else mask[..., rows, :]
        if past is not None:
            k, v = torch.cat([past[0], k], -2), torch.cat([past[1], v], -2)
        attention = attend(q, k, v, mask, self.rate, key).transpose(-2, -3).flatten(-2)
        x = x + drop(self.out(attention), self.rate, key, 1)
        if self.post_norm:
            x = self.norm1(x)
        x = x + drop(self.down(self.activation(self.up(x if self.post_norm else self.norm2(x)))), self.rate, key, 2)
        return (self.norm2(x) if self.post_norm else x), ((k, v) if cached else None)


class Transformer(nn.Module):
    """Embedded tokens [B, T, D] -> outputs [B, T, D]. The order of tokens is the embeddings' affair."""

    def __init__(
        self,
        width: int,
        layers: int,
        heads: int,
        *,
        dropout: float = 0.0,
        activation: str = "gelu",
        post_norm: bool = False,
    ) -> None:
        """`post_norm`: norms after the sums, and none at the end. Raises ValueError where `heads` does not divide
        `width`.
        """
        super().__init__()
        if width % heads:
            raise ValueError(f"width {width} is no multiple of heads {heads}")
        self.blocks = nn.ModuleList(Block(width, heads, dropout, activation, post_norm) for _ in range(layers))
        self.norm = None if post_norm else Norm(width)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, key: Tensor | None = None, rows: slice | None = None
    ) -> Tensor:
        """`mask` as by `visible`, [T, T] or [B, 1, T, T]; None: causal. Dropout is on exactly when a key is given.
        rows: the tokens whose outputs are needed, which spares the last block the work for the others."""
        return self._run(x, visible(None, x.shape[-2], x.device) if mask is None else mask, key, None, rows)[0]

    def extend(self, x: Tensor, past: Cache = (), mask: Tensor | None = None) -> tuple[Tensor, Cache]:
        """Outputs for more tokens x [B, T, D] after those in `past`, and the longer cache: the same as all at once.

        mask: bool [..., T, S] over the cached tokens and the new ones; None: each sees all before it. Without dropout.
        """
        if mask is None:
            cached = past[0][0].shape[-2] if past else 0
            row = torch.arange(x.shape[-2], device=x.device) + cached
            mask = row.unsqueeze(-1) >= torch.arange(cached + x.shape[-2], device=x.device)
        x, cache = self._run(x, mask, None, past)
        return x, cache

    def _run(
        self, x: Tensor, mask: Tensor, key: Tensor | None, past: Cache | None, rows: slice | None = None
    ) -> tuple[Tensor, Cache]:
        cache = []
        for i, block in enumerate(self.blocks):
            block_key = None if key is None else rng.fold_in(key, i)
            block_rows = rows if i == len(self.blocks) - 1 else None
            x, block_cache = cast(Block, block)(
                x, mask, block_key, past[i] if past else None, past is not None, block_rows
            )
            cache.append(block_cache)
        return x if self.norm is None else self.norm(x), cast(Cache, tuple(cache))


def interleave(tokens: Sequence[Tensor]) -> Tensor:
    """M kinds of tokens, each [B, K, D], as one sequence [B, M K, D]: the M of step 0, the M of step 1, ..."""
    return torch.stack(list(tokens), -2).flatten(-3, -2)
