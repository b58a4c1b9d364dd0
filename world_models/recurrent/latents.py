"""The latent model: what is remembered, what is predicted of the next observation, and what was then seen.

Shapes: D recurrent state; Z latent sample; [S, K] its distribution (see `distributions`); M prior heads; T states of a
window; B windows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.nn.heads import symlog
from offrl.world_models.recurrent.distributions import latent_kind, one_head
from offrl.world_models.recurrent.scan import ScanMemory, empty_memory
from offrl.world_models.recurrent.settings import LatentConfig


class LatentState(NamedTuple):
    """What is known of a state."""

    recurrent: Tensor  # [..., D]: all that came before, with the last action
    sample: Tensor  # [..., Z]: one class of each group, as ones and zeros, or normal numbers
    memory: ScanMemory = ()  # what the recurrent network keeps besides, with core=scan

    @property
    def features(self) -> Tensor:
        """[..., D + Z]: what heads read."""
        return torch.cat([self.recurrent, self.sample], -1)


class LatentWindows(NamedTuple):
    """The states of windows."""

    state: LatentState
    posterior: Tensor  # [T, B, S, K]: with the observation
    prior: Tensor  # [T, B, M, S, K]: without it
    embeddings: Tensor  # [T, B, E]: of the observations

    def since(self, step: int) -> LatentWindows:
        """The windows without their first states."""
        return pytree.tree_map(lambda x: x[step:], self)


class Latents:
    """The modules of the model, which `apply(name, *x)` calls."""

    def __init__(self, apply: Callable[..., Any], config: LatentConfig) -> None:
        self.apply, self.config, self.kind = apply, config, latent_kind(config)

    def begin(self, count: int, device: torch.device) -> LatentState:
        """The state of `count` episodes before their first observation."""
        c = self.config
        memory: ScanMemory = ()
        if c.core == "scan":
            memory = empty_memory(count, c.recurrent_width, c.blocks, c.scan_states, c.scan_layers, device)
        recurrent, sample = (torch.zeros(count, n, device=device) for n in (c.recurrent_width, self.kind.size))
        return LatentState(recurrent, sample, memory)

    def embed(self, observations: Tensor | Mapping[str, Tensor]) -> Tensor:
        """[..., O], or several streams -> [..., E]."""
        return self.apply("encoder", symlog(observations) if isinstance(observations, Tensor) else observations)

    def observe(
        self, before: LatentState, action: Tensor, embedding: Tensor, noise: Tensor | None
    ) -> tuple[LatentState, Tensor]:
        """The state after an action [..., A] and the embedding [..., E] of what was then seen, and its posterior
        [..., S, K]. noise: of `kind.noise`; None: the likeliest sample.
        """
        recurrent, memory = self.advance(before, action)
        known = embedding if self.config.core == "scan" else torch.cat([recurrent, embedding], -1)
        posterior = self.kind.read(self.apply("posterior", known))
        return LatentState(recurrent, self.kind.draw(posterior, noise), memory), posterior

    def advance(self, before: LatentState, action: Tensor) -> tuple[Tensor, ScanMemory]:
        """The recurrent state [B, D] and the memory after an action [B, A]."""
        if self.config.core == "gru":
            return self.apply("dynamics", before.recurrent, before.sample, action), ()
        # a window of one step
        recurrent, memory = self.apply("dynamics", before.sample[None], action[None], before.memory)
        return recurrent[0], pytree.tree_map(lambda x: x[0], memory)

    def observe_windows(
        self, observations: Tensor | Mapping[str, Tensor], previous: Tensor, first: Tensor, key: Tensor
    ) -> LatentWindows:
        """The states of observations [T, B, O], or several streams, after previous actions [T, B, A]; memory and action
        are emptied where an episode begins, first bool [T, B].
        """
        c, (steps, windows) = self.config, first.shape
        embeddings, fresh = self.embed(observations), self.begin(windows, first.device)
        noise = self.kind.noise(key, steps, windows)
        begins = first.unsqueeze(-1)
        actions = torch.where(begins, 0.0, previous)
        if c.core == "scan":  # what was seen is known without the memory, so that all steps are taken at once
            posterior = self.kind.read(self.apply("posterior", embeddings))
            sample = self.kind.draw(posterior, noise)
            before = torch.where(begins, 0.0, torch.cat([fresh.sample.unsqueeze(0), sample[:-1]]))
            recurrent, memory = self.apply("dynamics", before, actions, fresh.memory, first)
            state = LatentState(recurrent, sample, memory)
        else:
            state, states, posteriors = fresh, [], []
            moments = (x.unbind() for x in (begins, actions, embeddings, noise))
            for begin, action, embedding, draws in zip(*moments, strict=True):
                state = LatentState(torch.where(begin, 0.0, state.recurrent), torch.where(begin, 0.0, state.sample))
                state, known = self.observe(state, action, embedding, draws)
                states.append(state)
                posteriors.append(known)
            state, posterior = pytree.tree_map(lambda *x: torch.stack(x), *states), torch.stack(posteriors)
        return LatentWindows(state, posterior, self.kind.read(self.apply("prior", state.recurrent)), embeddings)

    def imagine(self, before: LatentState, action: Tensor, key: Tensor) -> tuple[LatentState, Tensor]:
        """The state after an action [B, A], by one of the prior heads for each row, and the heads' disagreement [B]."""
        recurrent, memory = self.advance(before, action)
        prior = self.kind.read(self.apply("prior", recurrent))
        pick, draw = rng.split(key)
        one = one_head(prior, pick)
        sample = self.kind.draw(one, self.kind.noise(draw, *one.shape[:-2]))
        return LatentState(recurrent, sample, memory), self.kind.disagreement(prior)
