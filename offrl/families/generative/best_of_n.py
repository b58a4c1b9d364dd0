"""Acting by drawing several actions, or chunks of them, and playing the one that critics value most: the extraction of
IDQL (arXiv 2304.10573), IFQL (arXiv 2502.02538) and Q-chunking (arXiv 2507.07969).

Shapes in comments: E episodes, N candidates for each, D numbers in an action or a chunk.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.families.generative.chunks import ChunkActor
from offrl.nn import flow
from offrl.settings.field import setting

Noise = Callable[[Tensor], Tensor]  # key -> [R, D], for R rows that are denoised side by side


def candidates_field(
    default: int, help: str = "actions that are drawn at each step (N), of which the one with the largest Q is played"
) -> Any:
    """The setting `candidates`, which only acting reads."""
    return setting(default, help, low=1, high=100_000, acting=True)


def choice_field() -> Any:
    """The setting `choice` of a `ValuedActor`."""
    return setting(
        "softmax",
        "which of the drawn actions is played: softmax: one drawn with probabilities that grow as exp(Q), as "
        "published; best: the one with the largest Q",
        choices=("softmax", "best"),
        acting=True,
    )


def noise_of(key: Tensor, count: int, rows: int, dim: int) -> Tensor:
    """Standard normal numbers [count * rows, dim], `count` for each of `rows` rows, as `flow.repeated` orders rows.

    The first row's are the same however many rows stand beside it.
    """
    return rng.normal(key, (rows, count, dim)).transpose(0, 1).flatten(0, 1)


def drawn_of(log_weights: Tensor, candidates: Tensor, key: Tensor) -> Tensor:
    """One of N candidates [N, E, D] at each row, with probability proportional to exp(log_weights) [N, E]: [E, D]."""
    return flow.chosen(rng.categorical(key, log_weights.T), candidates)


class BestOfActor(ChunkActor):
    """Draws `candidates` actions (or chunks) at each step and plays the one with the largest score.

    With `greedy` zero all noise is 0 where it does not explore: the candidates are one action.
    """

    def condition(self, observations: Tensor, count: int) -> Tensor:
        """What `draw` is given, a row for each of `count` candidates of each observation [E, O]: the observations,
        [count * E, O].
        """
        return flow.repeated(observations, count)

    @abstractmethod
    def draw(self, observations: Tensor, key: Tensor, noise: Noise) -> Tensor:
        """One action or chunk [R, D] in [-1, 1] for each of the normalised observations [R, O]; all that is random
        comes by `noise`.
        """

    @abstractmethod
    def scores(self, observations: Tensor, candidates: Tensor) -> Tensor:
        """Scores [N, E] of candidates [N, E, D] for observations [E, O]."""

    def choose_of(self, observations: Tensor, candidates: Tensor, key: Tensor) -> Tensor:
        """The action or chunk [E, D] that is played, of candidates [N, E, D]."""
        return flow.best_of(self.scores(observations, candidates), candidates)

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        config, rows = self.algorithm.config, observations.shape[0]
        zero_noise = not explore and getattr(config, "greedy", "sample") == "zero"
        count = 1 if zero_noise else int(config.candidates)
        dim = self.length * self.algorithm.spec.action_dim

        def noise(k: Tensor) -> Tensor:
            return torch.zeros(count * rows, dim, device=k.device) if zero_noise else noise_of(k, count, rows, dim)

        draw_key, choose_key = rng.split(key)
        samples = self.draw(self.condition(observations, count), draw_key, noise)
        chosen = samples if count == 1 else self.choose_of(observations, samples.unflatten(0, (count, -1)), choose_key)
        return chosen.unflatten(1, (self.length, -1))


class BestFlowActor(BestOfActor):
    """The best of N actions, or chunks, of the module "actor", a flow, by the smallest of the online critics."""

    def draw(self, observations: Tensor, key: Tensor, noise: Noise) -> Tensor:
        steps = self.algorithm.config.flow_steps
        return flow.integrate(lambda x, t: self.apply("actor", observations, x, t), noise(key), steps)

    def scores(self, observations: Tensor, candidates: Tensor) -> Tensor:
        critic: Any = self.algorithm.critic  # type: ignore[attr-defined]
        return critic.q(self.state.params["critic"], observations, candidates).amin(0)


class ValuedActor(BestOfActor):
    """Plays one of its candidates by their Q, the smallest of the target critics that training leaves in `extra` as
    "target": drawn with probabilities softmax(Q), as Diffusion-QL does (arXiv 2208.06193), or the best, as the setting
    `choice` says."""

    def scores(self, observations: Tensor, candidates: Tensor) -> Tensor:
        critic: Any = self.algorithm.critic  # type: ignore[attr-defined]
        return critic.q(self.state.extra["target"], observations, candidates).amin(0)

    def choose_of(self, observations: Tensor, candidates: Tensor, key: Tensor) -> Tensor:
        if self.algorithm.config.choice == "best":
            return super().choose_of(observations, candidates, key)
        return drawn_of(self.scores(observations, candidates), candidates, key)
