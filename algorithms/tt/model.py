"""A language model of trajectories: every number of a step is a token, and each token is predicted from those before
it.

The network of the Trajectory Transformer (Janner et al., 2021, arXiv 2106.02039, section 3.1 and appendix A). A step is
D tokens: those of the observation, of the action, of the reward, of the value. Shapes in comments: B rows, T tokens, D
tokens a step, N bins, W width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offrl.nn.mlp import initialise
from offrl.nn.transformer import Cache, Table, Transformer, drop

OUTER = 1_000  # folded into the key of the dropout of embeddings; the transformer's layers have 0, 1, ...
PRODUCTS = (".qkv.weight", ".out.weight", ".up.weight", ".down.weight")  # of the transformer's blocks


class TokenModel(nn.Module):
    """Tokens 0, ..., N - 1 in each of D dimensions, and N in all of them: the episode is over. Token i of a sequence
    has dimension i % D.

    Each dimension has embeddings and an output layer of its own; the position in the sequence has an embedding too. A
    token sees itself and those before it, but for values: no token sees a value, not even itself, so what comes after
    it does not depend on the return that it promises.
    """

    def __init__(
        self, dims: int, bins: int, steps: int, width: int, layers: int, heads: int, dropout: float = 0.0
    ) -> None:
        """steps: the longest sequence, in steps of `dims` tokens, of which the last is the value."""
        super().__init__()
        self.dims, self.bins, self.rate = dims, bins, dropout
        self.embed = Table(dims * bins + 1, width)
        self.position = nn.Parameter(torch.zeros(steps * dims, width))
        self.trunk = Transformer(width, layers, heads, dropout=dropout)
        self.head = nn.Parameter(torch.empty(dims, bins + 1, width))
        initialise(self.head, None, "torch")  # the authors' EinLinear; all else is N(0, 0.02)

    def forward(
        self, tokens: Tensor, key: Tensor | None = None, past: Cache | None = None
    ) -> Tensor | tuple[Tensor, Cache]:
        """Logits [B, T, N + 1] of the token after each of tokens [B, T] int64, the first of which has dimension 0. A
        key: with dropout.

        With `past`, () at first: logits [B, N + 1] of the token after the last one, where `past` holds the tokens
        before these, and the cache with these.
        """
        past_length = past[0][0].shape[-2] if past else 0
        end = past_length + tokens.shape[-1]
        index = torch.arange(past_length, end, device=tokens.device)
        dim = index % self.dims
        row = torch.where(tokens == self.bins, self.dims * self.bins, tokens + dim * self.bins)
        x = self.embed(row) + self.position[past_length:end]
        mask = self.mask(index, end)
        if past is not None:
            x, cache = self.trunk.extend(x, past, mask)
            return x[:, -1] @ self.head[(end - 1) % self.dims].transpose(0, 1), cache
        x = self.trunk(drop(x, self.rate, key, OUTER), mask, key)
        missing = -tokens.shape[-1] % self.dims  # whole steps, so that each dimension's output is one product
        steps = nn.functional.pad(x, (0, 0, 0, missing)).unflatten(-2, (-1, self.dims))
        logits = torch.einsum("bkdw,dvw->bkdv", steps, self.head).flatten(-3, -2)
        return logits[:, : tokens.shape[-1]]

    def mask(self, index: Tensor, end: int) -> Tensor:
        """Bool [T, end]: which of the first `end` tokens those at `index` [T] see."""
        column = torch.arange(end, device=index.device)
        return (index.unsqueeze(-1) >= column) & (column % self.dims != self.dims - 1)

    def decayed(self) -> frozenset[str]:
        """Names of the weights of matrix products: not embeddings, norms and biases."""
        return frozenset(k for k, _ in self.named_parameters() if k == "head" or k.endswith(PRODUCTS))


def weighted_loss(logits: Tensor, tokens: Tensor, weights: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """(loss [], cross-entropy of each predicted token [B, T - 1]): tokens [B, T] from logits [B, T - 1, N + 1] of those
    before them.

    weights [D] by dimension; mask [B, T] bool: others count 0. The loss is the mean over all B (T - 1) tokens, as
    published.
    """
    target = tokens[:, 1:]
    entropy = -logits.float().log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1)
    token_weights = weights.repeat(tokens.shape[-1] // len(weights))[1:]
    return (entropy * token_weights * mask[:, 1:]).mean(), entropy
