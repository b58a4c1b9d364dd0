"""The matrix products that one update needs, from the layers' shapes: the floor under any implementation's time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Product = tuple[int, ...]  # (m, k, n): [m, k] times [k, n]; (many, m, k, n): so many of them at once

ENSEMBLE_MEMBERS, ENSEMBLE_HIDDEN = 7, (200, 200, 200, 200)
DEEP_HIDDEN = (256, 256, 256)  # CQL's, EDAC's and ReBRAC's
CQL_TRIED, EDAC_CRITICS = 30, 10
QRL_HIDDEN, QRL_LATENT = (512, 512, 512), 512
FQL_HIDDEN, FQL_STEPS, QC_LENGTH = (512, 512, 512, 512), 10, 5
DT_HIDDEN, DT_CONTEXT = (128, 128, 128), 20  # its blocks' widths; steps, of three tokens each


def flops(products: Sequence[Product]) -> float:
    """Multiplications and additions."""
    return float(sum(2 * math.prod(sizes) for sizes in products))


def forward(batch: int, sizes: Sequence[int]) -> list[Product]:
    """A multi-layer perceptron with layers of these sizes, first to last."""
    return [(batch, i, o) for i, o in zip(sizes[:-1], sizes[1:], strict=True)]


def backward(batch: int, sizes: Sequence[int], *, weights: bool = True, inputs: bool = False) -> list[Product]:
    """Gradients with respect to the weights and to each layer's input; to the first layer's only if `inputs`."""
    products: list[Product] = []
    for index, (i, o) in enumerate(zip(sizes[:-1], sizes[1:], strict=True)):
        if weights:
            products.append((i, batch, o))
        if index or inputs:
            products.append((batch, o, i))
    return products


def _trained(batch: int, sizes: Sequence[int]) -> list[Product]:
    return forward(batch, sizes) + backward(batch, sizes)


def iql(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """Target critics; V; V again and the policy; V of the next state and the critics."""
    v, q, pi = [observation, *hidden, 1], [observation + action, *hidden, 1], [observation, *hidden, action]
    return (
        2 * forward(batch, q)
        + _trained(batch, v)
        + 2 * forward(batch, v)
        + _trained(batch, pi)
        + 2 * _trained(batch, q)
    )


def td3_bc(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """TWO updates, since the policy learns at every second one: critics twice, the policy through the first critic
    once.
    """
    q, pi = [observation + action, *hidden, 1], [observation, *hidden, action]
    critic = forward(batch, pi) + 2 * forward(batch, q) + 2 * _trained(batch, q)
    actor = _trained(batch, pi) + forward(batch, q) + backward(batch, q, weights=False, inputs=True)
    return 2 * critic + actor


def rebrac(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """TWO updates, as TD3+BC's, but the policy learns through both critics."""
    q, pi = [observation + action, *hidden, 1], [observation, *hidden, action]
    critic = forward(batch, pi) + 2 * forward(batch, q) + 2 * _trained(batch, q)
    actor = _trained(batch, pi) + 2 * (forward(batch, q) + backward(batch, q, weights=False, inputs=True))
    return 2 * critic + actor


def qrl(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """The encoder at states, next states and goals, whose encodings at states the policy's step needs as well, and at
    the policy's goals; the dynamics of latents at the data's actions and, for the gradient with respect to the action
    alone, at the policy's."""
    encoder, moves = [observation, *hidden, QRL_LATENT], [QRL_LATENT + action, *hidden, QRL_LATENT]
    actor = _trained(batch, [2 * observation, *hidden, action]) + forward(batch, encoder) + forward(batch, moves)
    actor += backward(batch, [action, *hidden, QRL_LATENT], weights=False, inputs=True)
    return actor + 3 * _trained(batch, encoder) + forward(batch, moves) + backward(batch, moves, inputs=True)


def fql(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """Two critics, after the one-step policy and two target critics; the flow; ten passes of it without gradient, and
    the policy through both critics."""
    q = [observation + action, *hidden, 1]
    field, pi = [observation + action + 1, *hidden, action], [observation + action, *hidden, action]
    critic = forward(batch, pi) + 2 * forward(batch, q) + 2 * _trained(batch, q)
    actor = (
        FQL_STEPS * forward(batch, field)
        + _trained(batch, pi)
        + 2 * (forward(batch, q) + backward(batch, q, weights=False, inputs=True))
    )
    return critic + _trained(batch, field) + actor


def qc(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """FQL's, of chunks."""
    return fql(batch, observation, QC_LENGTH * action, hidden)


def ensemble(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """Seven probabilistic networks, each with its own batch."""
    return ENSEMBLE_MEMBERS * _trained(batch, [observation + action, *hidden, 2 * (observation + 1)])


def _soft(batch: int, q: Sequence[int], pi: Sequence[int], critics: int) -> list[Product]:
    """The products of soft actor-critics besides the critics' training: the policy through all critics, and all target
    critics.
    """
    actor = _trained(batch, pi) + critics * (forward(batch, q) + backward(batch, q, weights=False, inputs=True))
    return actor + forward(batch, pi) + critics * forward(batch, q)


def cql(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """Two critics trained at the data's and at thirty tried actions for each state."""
    q, pi = [observation + action, *hidden, 1], [observation, *hidden, 2 * action]
    return _soft(batch, q, pi, 2) + 2 * _trained((1 + CQL_TRIED) * batch, q)


def edac(batch: int, observation: int, action: int, hidden: Sequence[int]) -> list[Product]:
    """Ten critics; their gradients with respect to the action, from the same forward pass, and the derivatives of
    those.
    """
    q, pi = [observation + action, *hidden, 1], [observation, *hidden, 2 * action]
    only_action = [action, *hidden, 1]
    pull = backward(batch, only_action, weights=False, inputs=True)  # [batch, o] times [o, i]
    # the output's own gradient is a constant
    twice = [(o, b, i) for b, o, i in pull] + [(b, i, o) for b, o, i in pull if o != 1]
    return _soft(batch, q, pi, EDAC_CRITICS) + EDAC_CRITICS * (_trained(batch, q) + pull + twice)


def dt(batch: int, observation: int, action: int, hidden: Sequence[int], spared: bool = True) -> list[Product]:
    """Embeddings of three tokens a step, blocks of attention and an MLP, and the head at the observations' tokens.

    spared: the last block does for the other two tokens of a step, which nobody reads, only what lets the observations'
    attend to them. Attention is worked out for all pairs, though half of them are masked.
    """
    width, steps, tokens = hidden[0], batch * DT_CONTEXT, 3 * DT_CONTEXT
    ends = [product for size in (1, observation, action) for product in _trained(steps, [size, width])]
    head = forward(steps, [width, action]) + backward(steps, [width, action], inputs=True)

    def block(kinds: int) -> list[Product]:
        asking = kinds * DT_CONTEXT
        # q k^T and weights v, and two gradients of each
        products: list[Product] = 3 * [(batch, asking, width, tokens), (batch, asking, tokens, width)]
        for rows, sizes in (
            (3 * steps, [width, 2 * width]),
            (kinds * steps, [width, width]),
            (kinds * steps, [width, width]),
            (kinds * steps, [width, 4 * width, width]),
        ):
            products += forward(rows, sizes) + backward(rows, sizes, inputs=True)
        return products

    return ends + (len(hidden) - 1) * block(3) + block(1 if spared else 3) + head


# name -> (products, updates that they make up)
NEEDED: dict[str, tuple[Callable[[int, int, int, Sequence[int]], list[Product]], int]] = {
    "iql": (iql, 1),
    "td3_bc": (td3_bc, 2),
    "rebrac": (rebrac, 2),
    "cql": (cql, 1),
    "edac": (edac, 1),
    "ensemble": (ensemble, 1),
    "dt": (dt, 1),
    "qrl": (qrl, 1),
    "fql": (fql, 1),
    "qc": (qc, 1),
}
HIDDEN = {  # where they are not `common.HIDDEN`
    "rebrac": DEEP_HIDDEN,
    "cql": DEEP_HIDDEN,
    "edac": DEEP_HIDDEN,
    "ensemble": ENSEMBLE_HIDDEN,
    "dt": DT_HIDDEN,
    "qrl": QRL_HIDDEN,
    "fql": FQL_HIDDEN,
    "qc": FQL_HIDDEN,
}
BATCHES = {"dt": 64, "rebrac": 1024, "qrl": 1024}  # where it is not `common.BATCH`


def needed(name: str, batch: int, observation: int, action: int, hidden: Sequence[int]) -> float:
    """FLOPs of the matrix products of one update, on average over a pattern of updates."""
    products, updates = NEEDED[name]
    return flops(products(batch, observation, action, hidden)) / updates
