"""DPT's network: a transformer over a query and the transitions of a context."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from offrl.data.dataset import DataSpec
from offrl.nn import Linear, Transformer, initialise, make_policy
from offrl.nn.transformer import Affine, Cache, drop

OUTER = 1_000  # folded into the key of the dropout of embeddings; the transformer's layers have 0, 1, ...


class InContext(nn.Module):
    """The distribution of the best action after each of T tokens, the first of which is the query and the others are
    transitions.
    """

    def __init__(self, size: int, config: Any, spec: DataSpec) -> None:
        super().__init__()
        c, self.rate = config, config.dropout
        self.embed = Linear(size, c.width)
        self.trunk: nn.Module = Transformer(c.width, c.layers, c.heads, dropout=c.dropout, activation=c.activation)
        for part in self.trunk.modules():
            if isinstance(part, Affine):
                initialise(part.weight, part.bias, c.init)
        self.head = make_policy(c.policy, c.width, spec.action_dim, spec.num_actions, [])

    def forward(
        self, tokens: Tensor, mask: Tensor | None = None, key: Tensor | None = None, past: Cache | None = None
    ) -> Any:
        """tokens [B, T, size] -> parameters of the distributions [B, T, ...]; with `past`, those of the new tokens and
        the longer cache.
        """
        x = self.embed(tokens)
        if past is not None:
            x, cache = cast(Transformer, self.trunk).extend(x, past, mask)
            return self.head(x), cache
        if key is not None:
            x = drop(x, self.rate, key, OUTER)
        return self.head(self.trunk(x, mask, key))
