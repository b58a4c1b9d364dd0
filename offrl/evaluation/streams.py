"""Observations of several streams on their way to a policy: arrays with a field for each stream, tensors, and stacks of
frames.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl.actor import Actor, Carry
from offrl.data.dataset import DataSpec
from offrl.data.raw import join_observations
from offrl.data.raw.streams import resize
from offrl.errors import UserError
from offrl.nn.stream_encoder import ENCODER
from offrl.tasks.entries import VECTOR, entries


class Past(NamedTuple):
    """The carry of E episodes of a policy that sees stacks of frames."""

    frames: dict[str, Tensor]  # [E, H, W, frames * C] uint8, oldest first
    fresh: Tensor  # [E] bool: of episodes without an observation so far
    inner: Any  # the actor's own


def kind_of(spec: DataSpec, frames: int = 1) -> np.dtype:
    """The type of one observation: "vector", where there is one, and a field for each stream. frames: of each image."""
    vector = [(VECTOR, np.float32, spec.observation_shape)] * (spec.observation_shape != (0,))
    shapes = {s.name: (*s.shape[:-1], s.shape[-1] * frames) if s.image else s.shape for s in spec.streams}
    return np.dtype([*vector, *((s.name, np.uint8 if s.image else np.float32, shapes[s.name]) for s in spec.streams)])


def as_streams(observation: Any, spec: DataSpec) -> tuple[np.ndarray, bool]:
    """([B] of `kind_of`, whether it is a batch rather than one) of the dictionary that an environment gives, or of an
    array, for policies of a single image alone.

    Raises UserError, naming the stream, for one that is missing, of another shape or type, or not finite.
    """
    kind = kind_of(spec)
    assert kind.names is not None
    if not isinstance(observation, Mapping):
        if len(kind.names) > 1:
            raise UserError(f"this policy takes a dictionary with the entries {', '.join(_due(spec))}")
        parts = {kind.names[0]: np.asarray(observation)}
    else:
        parts = {s.name: np.asarray(entries(observation, (s.name,))[0][1]) for s in spec.streams}
        if VECTOR in kind.names:
            first, shape = parts[spec.streams[0].name], spec.streams[0].shape
            grey = shape[-1:] == (1,) and first.shape[-2:] == shape[:2]
            parts[VECTOR] = _vector(observation, spec, first.ndim + grey > len(shape))
    batches = set()
    for name, part in parts.items():
        shape, image = kind[name].shape, kind[name].base == np.uint8
        if image and part.dtype != np.uint8:
            raise UserError(f"the observation's {name} is {part.dtype}; images are uint8, 0 to 255")
        if image and part.shape[-2:] == shape[:2] and shape[-1] == 1:
            part = part[..., None]
        stream = next((s for s in spec.streams if s.name == name), None)
        sizes = [shape] + ([(*stream.recorded, shape[-1])] if stream is not None and stream.recorded else [])
        if part.shape[-len(shape) :] not in sizes or part.ndim - len(shape) not in (0, 1):
            due = " x ".join(map(str, sizes[-1]))
            raise UserError(f"the observation's {name} has shape {list(part.shape)}; {due} is due, or a batch of those")
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            raise UserError(f"the observation's {name} holds NaN or infinity")
        batches.add(part.shape[: part.ndim - len(shape)])
        parts[name] = part
    if len(batches) > 1:
        raise UserError(f"the observation's entries are batches of different sizes: {sorted(batches)}")
    batch = batches.pop()
    rows = np.zeros(batch or (1,), kind)
    for name, part in parts.items():
        rows[name] = sized(part if batch else part[None], kind[name].shape)
    return rows, bool(batch)


def sized(images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Images [B, H, W, C] in the size that a policy takes; all else as it is."""
    if len(shape) != 3 or images.shape[1:3] == shape[:2]:
        return images
    return np.stack([resize(image, (shape[0], shape[1])) for image in images])


def _due(spec: DataSpec) -> list[str]:
    keys = spec.task.observation_keys if spec.task is not None else ()
    return list(keys) or list(kind_of(spec).names or ())


def _vector(observation: Mapping[str, Any], spec: DataSpec, batched: bool) -> np.ndarray:
    """The numbers of an observation, [O] or where it is `batched` [B, O], joined as the data's were."""
    names = [key for key in _due(spec) if key not in {s.name for s in spec.streams}]
    if VECTOR in observation and names == [VECTOR]:
        return np.asarray(observation[VECTOR], np.float32)
    leaves = {"/".join(path): np.asarray(leaf) for path, leaf in entries(observation, names)}
    rows = leaves if batched else {name: leaf[None] for name, leaf in leaves.items()}
    joined = join_observations(rows, list(leaves), "the observation")
    return joined if batched else joined[0]


def tensors_of(rows: np.ndarray, spec: DataSpec) -> dict[str, Tensor]:
    """Rows [B] as an encoder takes them, the vector normalised."""
    shapes = {s.name: s.shape for s in spec.streams}
    names = rows.dtype.names or ()
    out = {n: torch.from_numpy(np.ascontiguousarray(sized(rows[n], shapes.get(n, ())))) for n in names}
    if VECTOR in out and (moments := spec.observation_moments) is not None:
        out[VECTOR] = (out[VECTOR] - moments[0]) / moments[1]
    return out


def begin(episodes: int, spec: DataSpec, inner: Any) -> Past:
    """The carry before the first observations."""
    kind = kind_of(spec, spec.frames)
    images = [s.name for s in spec.streams if s.image]
    frames = {name: torch.zeros(episodes, *kind[name].shape, dtype=torch.uint8) for name in images}
    return Past(frames, torch.ones(episodes, dtype=torch.bool), inner)


def push(past: Past, observed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Past]:
    """(what the policy sees, the next carry): each image's stack with the newest frame [E, H, W, C] at its end; an
    episode's first frame fills it.
    """
    frames = {}
    for name, old in past.frames.items():
        new = observed[name]
        repeated = new.repeat(1, 1, 1, old.shape[-1] // new.shape[-1])
        shifted = torch.cat([old[..., new.shape[-1] :], new], -1)
        frames[name] = torch.where(past.fresh.reshape(-1, 1, 1, 1), repeated, shifted)
    return {**observed, **frames}, past._replace(frames=frames, fresh=torch.zeros_like(past.fresh))


class EncodingActor(Actor):
    """An actor behind the encoder: observations are dictionaries of streams, of which it keeps the last frames."""

    def __init__(self, inner: Actor, spec: DataSpec) -> None:
        super().__init__(inner.algorithm, inner.state)
        self.inner, self.spec, self.resettable = inner, spec, inner.resettable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what actors of some kinds have besides

    @property
    def action_steps(self) -> int:
        return self.inner.action_steps

    def actions_per_decision(self, steps: int) -> int:
        return self.inner.actions_per_decision(steps)

    def encode(self, observations: Mapping[str, Tensor]) -> Tensor:
        """The encoder's vector [E, Z] of streams; an image alone is taken for an episode's first one, and repeated."""
        kind = kind_of(self.spec, self.spec.frames)
        stacks = {
            name: x.repeat(1, 1, 1, kind[name].shape[-1] // x.shape[-1]) if x.ndim == 4 else x
            for name, x in observations.items()
        }
        return self.apply(ENCODER, stacks)

    def start(self, episodes: int) -> Carry:
        carry = self.inner.start(episodes)
        return begin(episodes, self.spec, carry) if self.spec.frames > 1 else carry

    def begin_anew(self, carry: Carry, mask: Tensor) -> Carry:
        if not isinstance(carry, Past):
            return self.inner.begin_anew(carry, mask)
        return carry._replace(fresh=carry.fresh | mask, inner=self.inner.begin_anew(carry.inner, mask))

    def act(self, carry: Carry, observations: Any, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        if not isinstance(carry, Past):
            return self.inner.act(carry, self.encode(observations), key, explore=explore)
        stacked, past = push(carry, observations)
        actions, inner = self.inner.act(past.inner, self.encode(stacked), key, explore=explore)
        return actions, past._replace(inner=inner)

    def chunk(self, observations: Any, key: Tensor, explore: bool) -> Tensor:
        """See the chunk of actors of chunks."""
        return self.inner.chunk(self.encode(observations), key, explore)  # type: ignore[attr-defined]

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        return self._within(carry, self.inner.observe_reward, rewards)

    def observe_cost(self, carry: Carry, costs: Tensor) -> Carry:
        return self._within(carry, self.inner.observe_cost, costs)

    def set_goal(self, carry: Carry, goals: Any) -> Carry:
        return self._within(carry, self.inner.set_goal, goals if isinstance(goals, Tensor) else self.encode(goals))

    def new_episode(self, carry: Carry, observations: Any, lengths: Tensor) -> Carry:
        return self.start(len(lengths))

    @staticmethod
    def _within(carry: Carry, change: Callable[[Carry, Tensor], Carry], x: Tensor) -> Carry:
        return carry._replace(inner=change(carry.inner, x)) if isinstance(carry, Past) else change(carry, x)


def moved(observations: Any, device: torch.device) -> Any:
    """Observations, a tensor or a dictionary of them, on a device."""
    return pytree.tree_map(lambda x: x.to(device), observations)
