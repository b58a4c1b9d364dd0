"""Quasimetrics: distances that obey the triangle inequality and need not be the same both ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from offrl.nn.mlp import MLP

QUASIMETRICS = ("iqe", "mrn")


def interval_lengths(x: Tensor, y: Tensor) -> Tensor:
    """Lengths of unions of intervals: x and y [..., C, K] -> [..., C], of the K intervals [x_k, max(x_k, y_k)] each
    (arXiv 2211.15120).

    Sorted by where it begins, an interval adds what reaches beyond all before it; gradients are those of the ends that
    count.
    """
    begin, order = x.sort(-1)
    end = torch.maximum(x, y).gather(-1, order)
    reach = end.cummax(-1).values if x.device.type == "cpu" else _running_maximum(end)
    previous = torch.cat([begin[..., :1], torch.maximum(reach[..., :-1], begin[..., 1:])], -1)
    return (reach - previous).clamp(min=0.0).sum(-1)


def _running_maximum(x: Tensor) -> Tensor:
    """cummax over the few entries of the last axis [..., K], whose gradients CUDA's own adds up in no fixed order."""
    columns = list(x.unbind(-1))
    for k in range(1, len(columns)):
        columns[k] = torch.where(columns[k] < columns[k - 1], columns[k - 1], columns[k])
    return torch.stack(columns, -1)


class Quasimetric(nn.Module):
    """d(x, y) [B] >= 0 of latents [B, D]: d(x, x) = 0 and d(x, z) <= d(x, y) + d(y, z).

    "iqe": intervals of `components` dimensions each, their lengths' mean and maximum mixed by a learnt share (interval
    quasimetric embeddings, arXiv 2211.15120). "mrn": Euclidean in one half of the latent, plus the largest positive
    difference in the other (metric residual networks, arXiv 2208.08133).
    """

    def __init__(self, kind: str, latent: int, component: int = 8) -> None:
        super().__init__()
        if kind not in QUASIMETRICS:
            raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(QUASIMETRICS)}")
        if (kind == "iqe" and latent % component) or (kind == "mrn" and latent % 2):
            raise ValueError(
                f"a latent of {latent} dimensions does not divide into {component if kind == 'iqe' else 2}"
            )
        self.kind, self.component = kind, component
        self.alpha = nn.Parameter(torch.zeros(())) if kind == "iqe" else None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.alpha is None:
            half = x.shape[-1] // 2
            square = (x[..., :half] - y[..., :half]).square().sum(-1)
            return square.clamp(min=1e-12).sqrt() + (x[..., half:] - y[..., half:]).amax(-1).clamp(min=0.0)
        lengths = interval_lengths(x.unflatten(-1, (-1, self.component)), y.unflatten(-1, (-1, self.component)))
        share = self.alpha.sigmoid()
        return share * lengths.mean(-1) + (1.0 - share) * lengths.amax(-1)


class QuasimetricModel(nn.Module):
    """A quasimetric between states and, optionally, the dynamics of their latents: phi(s), phi(s) + T(phi(s), a)."""

    def __init__(self, encoder: MLP, moves: MLP | None, distance: Quasimetric, multiplier: float = 0.0) -> None:
        super().__init__()
        self.encoder, self.moves, self.distance = encoder, moves, distance
        self.log_multiplier = nn.Parameter(torch.tensor(multiplier))

    def forward(self, part: str, *x: Tensor) -> Tensor:
        """`part`: "encode" s [B, O] -> [B, D]; "move" (phi, a [B, A]) -> [B, D]; "between" (phi, phi) -> [B];
        "multiplier" -> [].
        """
        if part == "encode":
            return self.encoder(*x)
        if part == "move":
            assert self.moves is not None
            return x[0] + self.moves(torch.cat(x, -1))
        return self.distance(*x) if part == "between" else self.log_multiplier.exp()
