"""Beam search for the plan that promises the largest return, in a model of token sequences (arXiv 2106.02039, algorithm
1).

Not the most probable sequence is looked for: sequences are drawn from the model, so they are probable ones, and kept by
the rewards and the value that the model expects of them. The same sequence drawn twice is kept once, as long as there
are others: few or discrete actions would else fill all beams with copies of one plan. (The authors keep the copies.)
Pure functions, of which nothing is learnt here.

Shapes in comments: E episodes, W beams, C = W * expand candidates, D tokens a step, N bins, R rows (E * W or E * C).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng

Decoder = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""(tokens [R, m], past) -> logits [R, N + 1] of the next token, and the longer past. past: None at the start of a
sequence, else a tree of tensors whose first axis is R."""


@dataclass(frozen=True)
class Search:
    """Settings of the search for plans."""

    horizon: int  # steps of a plan
    width: int  # beams
    expand: int  # continuations tried of each
    context: int  # steps that a sequence begins with at most, the one that is planned first included
    longest: int  # steps of a sequence, after which it goes on from its last `context` - 1
    discount: float
    action_cdf: float = 0.0  # actions are not drawn from the least probable tokens that have this share together
    action_top_k: int = 0  # nor from any but this number of the most probable ones; 0: from all
    observation_top_k: int = 1  # and observations; 1: the most probable token


class Plans(NamedTuple):
    """The beams at the end, the best one first."""

    actions: Tensor  # [E, W, H, A] int64 tokens
    score: Tensor  # [E, W] expected: discounted rewards of the plan's steps, and the value after the last one


def keep_likely(logits: Tensor, cdf: float = 0.0, top_k: int = 0) -> Tensor:
    """`logits` [..., N] with -inf for the least probable tokens, those that have less than `cdf` together and as many
    as are no more probable than one of them, and for all but the `top_k` most probable ones. The most probable token
    always stays."""
    probabilities = logits.softmax(-1)
    if cdf > 0.0:
        ordered = probabilities.sort(-1).values
        tail = ordered.cumsum(-1) < cdf
        threshold = torch.where(tail, ordered, ordered[..., :1]).amax(-1, keepdim=True)
        likely = (probabilities > threshold) | (probabilities == ordered[..., -1:])
        logits = torch.where(likely, logits, -torch.inf)
    if 0 < top_k < logits.shape[-1]:
        logits = torch.where(logits >= logits.topk(top_k).values[..., -1:], logits, -torch.inf)
    return logits


class _Drawing:
    """Sampling of tokens. All episodes meet the same noise: the plan of one depends neither on the others nor on its
    place.
    """

    def __init__(self, occupied: Tensor, key: Tensor, episodes: int) -> None:
        bins = occupied.shape[-1]
        self.occupied, self.key, self.episodes, self.stop, self.count = occupied, key, episodes, bins, 0

    def __call__(
        self, logits: Tensor, dim: int, terminated: Tensor, ends: bool, top_k: int, cdf: float = 0.0
    ) -> Tensor:
        """Tokens [R] of dimension `dim` from logits [R, N + 1], from tokens that occur in the data; the stop token
        where the episode is `terminated` [R], and else only if it may end here."""
        mask = torch.cat([self.occupied[dim], torch.tensor([ends], device=logits.device)])
        logits = keep_likely(torch.where(mask, logits, -torch.inf), cdf, top_k)
        if top_k != 1:
            self.count += 1
            shape = (len(logits) // self.episodes, logits.shape[-1])
            uniform = rng.uniform(rng.fold_in(self.key, self.count), shape).clamp(2.0**-25, 1.0 - 2.0**-24)
            logits = (logits.unflatten(0, (self.episodes, -1)) - torch.log(-torch.log(uniform))).flatten(0, 1)
        return torch.where(terminated, self.stop, logits.argmax(-1))


def beam_search(
    decode: Decoder,
    prefix: Tensor,
    sizes: tuple[int, int],
    values: tuple[Tensor, Tensor],
    occupied: Tensor,
    search: Search,
    key: Tensor,
) -> Plans:
    """The best plans after prefixes [E, P] int64: whole steps, at most `context` - 1, and then the tokens of the
    present observation.

    sizes: tokens of the observation and of the action. values: what the tokens of rewards and values stand for, each
    [N]; rewards and values are expected ones, by the model's probabilities before anything is left out, and 0 where the
    episode is over. occupied [D, N] bool: which tokens occur. The first step of all beams of an episode is drawn from
    one distribution; later each beam has its own.
    """
    episodes, (width_o, width_a) = len(prefix), sizes
    dims = width_o + width_a + 2
    draw = _Drawing(occupied, key, episodes)
    device = prefix.device
    index = torch.arange(episodes, device=device)
    logits, past = decode(prefix, None)
    tokens, total = prefix, torch.zeros(episodes, device=device)
    terminated = torch.zeros(episodes, dtype=torch.bool, device=device)
    actions = prefix.new_zeros(episodes, 0, width_a)
    trace = torch.zeros(episodes, dtype=torch.int64, device=device)  # a number that tells what was drawn so far
    beams, score = 1, total.unsqueeze(-1)
    for t in range(search.horizon):
        copies = search.width * search.expand // beams
        rows = torch.arange(len(tokens), device=device).repeat_interleave(copies)
        tokens, total, terminated, actions, trace, logits, past = _take(
            (tokens, total, terminated, actions, trace, logits, past), rows
        )
        action_tokens = []
        for a in range(width_a):
            action_tokens.append(draw(logits, width_o + a, terminated, False, search.action_top_k, search.action_cdf))
            trace = rng.fold_in(trace, action_tokens[-1])
            logits, past = decode(action_tokens[-1].unsqueeze(-1), past)
        reward = _expected(logits, values[0], terminated)
        reward_token = draw(logits, dims - 2, terminated, False, 1)
        logits, past = decode(reward_token.unsqueeze(-1), past)
        value = _expected(logits, values[1], terminated)
        value_token = draw(logits, dims - 1, terminated, False, 1)
        total = total + search.discount**t * reward
        score = (total + search.discount ** (t + 1) * value).view(episodes, -1)
        best = torch.where(_duplicates(trace.view(episodes, -1)), -torch.inf, score).topk(search.width, -1).indices
        score = score.gather(-1, best)
        beams = search.width
        action = torch.stack(action_tokens, -1)
        # after an end that does not come true there is still something to do
        step_action = torch.where(terminated.unsqueeze(-1), actions[:, -1], action) if t else action
        actions = torch.cat([actions, step_action.unsqueeze(-2)], -2)
        tokens = torch.cat([tokens, action, reward_token.unsqueeze(-1), value_token.unsqueeze(-1)], -1)
        survivors = (index.unsqueeze(-1) * (search.width * search.expand) + best).flatten()
        tokens, total, terminated, actions, trace, past = _take(
            (tokens, total, terminated, actions, trace, past), survivors
        )
        if t < search.horizon - 1:
            if tokens.shape[-1] // dims < search.longest:
                logits, past = decode(tokens[:, -1:], past)
            else:
                tokens = tokens[:, tokens.shape[-1] - (search.context - 1) * dims :]
                logits, past = decode(tokens, None)
            for o in range(width_o):
                token = draw(logits, o, terminated, o == 0, search.observation_top_k)
                terminated, trace = token == draw.stop, rng.fold_in(trace, token)
                tokens = torch.cat([tokens, token.unsqueeze(-1)], -1)
                logits, past = decode(token.unsqueeze(-1), past)
    return Plans(actions.unflatten(0, (episodes, -1)), score)


def _take(tree: Any, rows: Tensor) -> Any:
    return pytree.tree_map(lambda x: x[rows], tree)


def _duplicates(trace: Tensor) -> Tensor:
    """True for the candidates [E, C] that are the same as an earlier one."""
    equal = trace.unsqueeze(-1) == trace.unsqueeze(-2)
    return equal.tril(-1).any(-1)


def _expected(logits: Tensor, values: Tensor, terminated: Tensor) -> Tensor:
    """Expected number, [R]: the stop token stands for 0."""
    return torch.where(terminated, 0.0, logits.softmax(-1)[:, :-1] @ values)
