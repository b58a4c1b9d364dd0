"""Networks whose output is a latent state on simplices, as TD-MPC2's (arXiv 2310.16828)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from offrl.nn.mlp import MLP

GROUP = 8  # numbers of a simplex


def simnorm(x: Tensor, group: int = GROUP) -> Tensor:
    """Softmax within each `group` numbers of the last axis: [..., L] -> [..., L]."""
    return x.unflatten(-1, (-1, group)).softmax(-1).flatten(-2)


class SimNormMLP(nn.Module):
    """in_dim -> hidden... -> latent: layers of a linear map, LayerNorm and Mish, the last with `simnorm` for Mish.

    latent: a multiple of GROUP.
    """

    def __init__(self, in_dim: int, hidden: Sequence[int], latent: int) -> None:
        super().__init__()
        self.net = MLP(in_dim, hidden, latent, activation="mish", layer_norm=True, norm_first=True, init="gpt")
        self.out = nn.LayerNorm(latent)

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_dim] -> [..., latent]."""
        y = self.net(x)  # not nn.LayerNorm itself: see `Layers`
        return simnorm(F.layer_norm(y, y.shape[-1:], eps=self.out.eps) * self.out.weight + self.out.bias)
