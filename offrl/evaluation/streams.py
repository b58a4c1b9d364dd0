"""Observations of several streams on their way to a policy: arrays with a field for each stream, tensors, and
an actor that keeps what it saw.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from offrl.actor import Actor, Carry
from offrl.data.dataset import DataSpec
from offrl.data.raw import join_observations
from offrl.data.raw.streams import resize
from offrl.errors import UserError
from offrl.evaluation.past import Past, acted, begin, push, window_moments
from offrl.nn.encoders.streams import ENCODER
from offrl.tasks.entries import VECTOR, entries


def kind_of(spec: DataSpec, window: bool = False) -> np.dtype:
    """The type of one observation: the vector's where it is alone, else "vector", where there is one, and a field for
    each stream. window: as networks see it, stacks of frames and windows.
    """
    shape = (spec.window_dim,) if window and spec.windowed else spec.observation_shape
    if not spec.streams:
        return np.dtype((np.float32, shape))
    vector = [(VECTOR, np.float32, shape)] * (shape != (0,))
    count = spec.frames if window else 1
    shapes = {s.name: (*s.shape[:-1], s.shape[-1] * count) if s.image else s.shape for s in spec.streams}
    return np.dtype([*vector, *((s.name, np.uint8 if s.image else np.float32, shapes[s.name]) for s in spec.streams)])


def as_streams(observation: Any, spec: DataSpec, whose: str = "the observation's") -> tuple[np.ndarray, bool]:
    """([B] of `kind_of`, whether it is a batch rather than one) of the dictionary that an environment gives, or of an
    array, for policies of a single image alone.

    Raises UserError, naming the stream of `whose`, for one that is missing, of another shape or type, or not finite.
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
            raise UserError(f"{whose} {name} is {part.dtype}; images are uint8, 0 to 255")
        if image and part.shape[-2:] == shape[:2] and shape[-1] == 1:
            part = part[..., None]
        stream = next((s for s in spec.streams if s.name == name), None)
        sizes = [shape] + ([(*stream.recorded, shape[-1])] if stream is not None and stream.recorded else [])
        if part.shape[-len(shape) :] not in sizes or part.ndim - len(shape) not in (0, 1):
            due = " x ".join(map(str, sizes[-1]))
            raise UserError(f"{whose} {name} has shape {list(part.shape)}; {due} is due, or a batch of those")
        if part.dtype.kind == "f" and not np.isfinite(part).all():
            raise UserError(f"{whose} {name} holds NaN or infinity")
        batches.add(part.shape[: part.ndim - len(shape)])
        parts[name] = part
    if len(batches) > 1:
        raise UserError(f"{whose} entries are batches of different sizes: {sorted(batches)}")
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
    """Rows [B] by stream, the vector, or a whole window of vectors and actions, normalised."""
    shapes = {s.name: s.shape for s in spec.streams}
    parts = {n: rows[n] for n in rows.dtype.names} if rows.dtype.names else {VECTOR: rows.astype(np.float32)}
    out = {
        n: torch.from_numpy(np.require(sized(x, shapes.get(n, ())), requirements=["C", "W"])) for n, x in parts.items()
    }
    if VECTOR in out:
        check_offsets(out[VECTOR], spec)
        width = out[VECTOR].shape[-1]
        moments = window_moments(spec) if width != spec.observation_dim else spec.observation_moments
        if moments is not None:
            mean, std = map(torch.from_numpy, moments)
            out[VECTOR] = (out[VECTOR] - mean) / std
    return out


def check_offsets(observations: Tensor, spec: DataSpec) -> None:
    """Raise UserError for numbers of [E, O] that lie at what a table recorded before the reader moved them."""
    for d, column in enumerate(spec.observation_columns):
        if column.auto_offset and bool((observations[:, d].abs() > abs(column.offset) / 2).any()):
            raise UserError(
                f"observation {d} lies at what {column.name} records, of which float32 merges the numbers: add "
                f"{column.offset:.15g} to it, in float64"
            )


class EncodingActor(Actor):
    """An actor behind the encoder, or of windows: observations are dictionaries of streams, of which it keeps the last
    frames, and the last vectors and actions.
    """

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

    def encode(self, observations: Mapping[str, Tensor]) -> Any:
        """What the algorithm takes of streams, by its encoder a vector [E, Z]; an image or a vector alone is taken for
        an episode's first one, and repeated.
        """
        kind = kind_of(self.spec, window=True)
        stacks = {
            name: x.repeat(1, 1, 1, kind[name].shape[-1] // x.shape[-1]) if x.ndim == 4 else x
            for name, x in observations.items()
        }
        if self.spec.windowed and stacks[VECTOR].shape[-1] == self.spec.observation_dim:
            alone = stacks[VECTOR].repeat(1, self.spec.history)
            stacks[VECTOR] = F.pad(alone, (0, self.spec.window_dim - alone.shape[-1]))
        if self.spec.encoder is None:
            return stacks[VECTOR]
        return stacks if self.algorithm.encoder is None else self.apply(ENCODER, stacks)

    def start(self, episodes: int) -> Carry:
        carry = self.inner.start(episodes)
        if self.spec.frames > 1 or self.spec.windowed:
            carry = moved(begin(episodes, self.spec, carry), self.state.step.device)
        return carry

    def begin_anew(self, carry: Carry, mask: Tensor) -> Carry:
        if not isinstance(carry, Past):
            return self.inner.begin_anew(carry, mask)
        return carry._replace(fresh=carry.fresh | mask, inner=self.inner.begin_anew(carry.inner, mask))

    def act(self, carry: Carry, observations: Any, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        if not isinstance(carry, Past):
            return self.inner.act(carry, self.encode(observations), key, explore=explore)
        stacked, past = push(carry, observations, self.spec)
        actions, inner = self.inner.act(past.inner, self.encode(stacked), key, explore=explore)
        return actions, acted(past, actions, self.spec)._replace(inner=inner)

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


def moved(tree: Any, device: torch.device) -> Any:
    """The tensors of a tree, such as observations of several streams, on a device."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(device), tree)
