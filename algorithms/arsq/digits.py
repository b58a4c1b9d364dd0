"""Actions as digits, coarse to fine: at each level every dimension's interval is cut into as many equal ones, and the
digit says which.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Digits:
    """Actions [B, A] in [-1, 1] as P = levels * A digits below `bins`. Position p = level * A + dimension.

    What is known of an action after some of its digits is a point: the middle of each dimension's interval, at first 0.
    A whole number of digits decodes to such a point, so that the ends of the range are not reached (41 bins of one
    level: +-0.976).
    """

    levels: int
    bins: int
    dims: int  # A

    @property
    def positions(self) -> int:
        """P: the digits of an action."""
        return self.levels * self.dims

    def width(self, level: int) -> float:
        """The width of an interval after the digit of `level`."""
        return 2.0 / self.bins ** (level + 1)

    def finer(self, middle: Tensor, digits: Tensor, level: int) -> Tensor:
        """The middles [...] of the intervals that `digits` [...] choose in those of middle `middle` [...]."""
        return middle + (digits - 0.5 * (self.bins - 1)) * self.width(level)

    def encode(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """(digits [B, P] int64, prefixes [P, B, A]): prefix p is what is known before digit p."""
        middle, digits, prefixes = torch.zeros_like(actions), [], []
        dimension = torch.arange(self.dims, device=actions.device)
        for level in range(self.levels):
            low = middle - 0.5 * self.bins * self.width(level)
            digit = ((actions - low) / self.width(level)).floor().clamp(0, self.bins - 1)
            after = self.finer(middle, digit, level)
            prefixes += [torch.where(dimension < d, after, middle) for d in range(self.dims)]
            digits.append(digit.long())
            middle = after
        return torch.cat(digits, -1), torch.stack(prefixes)

    def append(self, prefix: Tensor, digit: Tensor, position: int) -> Tensor:
        """The prefix [B, A] after digit [B] at `position`."""
        level, dimension = divmod(position, self.dims)
        chosen = torch.arange(self.dims, device=prefix.device) == dimension
        return torch.where(chosen, self.finer(prefix, digit.unsqueeze(-1), level), prefix)
