"""The dataset that every source becomes: contiguous columns, one row per time step, and the episodes they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.store import Store, StreamSpec, stream_of
from offrl.errors import UserError, one_line
from offrl.settings.encoder import EncoderConfig
from offrl.settings.kinds import check_types, restored
from offrl.tasks.task import Task, task_from_json

# which all have
CORE = ("observations", "actions", "rewards", "terminations", "truncations", "next_observations", "successor_known")


@dataclass(frozen=True)
class ColumnSpec:
    """The column of a table that a dimension was read from: `scale` times what is recorded, in `unit`, plus
    `offset`.
    """

    name: str
    unit: str = ""
    scale: float = 1.0
    offset: float = 0.0
    auto_offset: bool = False  # the reader chose the offset, since float32 merges the recorded numbers


@dataclass(frozen=True)
class DataSpec:
    """Shapes, ranges and names: all that a network, a policy file or an evaluation must know about the data."""

    observation_shape: tuple[int, ...]
    action_dim: int  # A for continuous actions; 1 for discrete ones
    discrete: bool = False
    num_actions: int = 0  # of a discrete action
    action_low: tuple[float, ...] = ()  # the environment's range [A]; columns["actions"] are scaled from it to [-1, 1]
    action_high: tuple[float, ...] = ()
    name: str = ""
    source: str = "arrays"  # d4rl | minari | ogbench | d3rlpy | file | arrays | builtin
    version: str = ""
    task: Task | None = None
    reward_scale: float = 1.0  # columns["rewards"] = reward_scale * recorded + reward_shift
    reward_shift: float = 0.0
    observation_mean: tuple[float, ...] | None = None  # set when the observations were normalised: (s - mean) / std,
    observation_std: tuple[float, ...] | None = None  # where std already holds the epsilon. Evaluation does the same.
    goal_dim: int = 0  # width of the column achieved_goals, in which goals are then given; 0: goals are observations
    observation_columns: tuple[ColumnSpec, ...] = ()  # of tables, one for each dimension of observations; else ()
    action_columns: tuple[ColumnSpec, ...] = ()  # likewise, of continuous actions and of a choice that is one column
    # what the choices of discrete actions are called, by their numbers; (): they are numbers
    action_labels: tuple[str, ...] = ()
    # observations and actions are texts: their columns index `Dataset.strings`; then observation_shape (), action_dim 1
    text: bool = False
    streams: tuple[StreamSpec, ...] = ()  # observations beside the vector, which then may be of shape (0,)
    frames: int = 1  # of images, stacked along their channels, oldest first
    # of the vector, this far apart and oldest first, and of the actions before: what networks see is one window of both
    history: int = 1
    history_stride: int = 1
    history_actions: int = 0
    costs: bool = False  # whether there is a column costs, of undiscounted amounts >= 0, never rescaled
    encoder: EncoderConfig | None = None  # what makes one vector of vector and streams, where a run has chosen it

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", one_line(self.name))  # a file may say it

    @property
    def observation_dim(self) -> int:
        return int(np.prod(self.observation_shape)) if self.observation_shape else 1

    @property
    def windowed(self) -> bool:
        """True where networks see a window: vectors and actions of the steps before, too."""
        return self.history > 1 or self.history_actions > 0

    @property
    def window_dim(self) -> int:
        """Numbers of the vector that networks, or the encoder, see."""
        return self.history * self.observation_dim + self.history_actions * self.encoded_action_dim

    @property
    def first_choice(self) -> int:
        """The environment's number of choice 0 of discrete actions, which the data and networks count from 0."""
        return (self.task.action_start or 0) if self.discrete and self.task is not None else 0

    @property
    def encoded_action_dim(self) -> int:
        """Width of `encode(actions)`."""
        return self.num_actions if self.discrete else self.action_dim

    @property
    def action_bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The environment's range of actions, lowest and highest, [A] float32 each."""
        return np.asarray(self.action_low, np.float32), np.asarray(self.action_high, np.float32)

    @property
    def observation_moments(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Mean and deviation by which the observations were normalised, [O] float32 each; None where they were not."""
        if self.observation_mean is None or self.observation_std is None:
            return None
        return np.asarray(self.observation_mean, np.float32), np.asarray(self.observation_std, np.float32)

    def encode(self, actions: Tensor) -> Tensor:
        """Actions as network input: [B, A] as they are, discrete [B] as one-hot [B, K]."""
        if not self.discrete:
            return actions
        # one_hot itself looks at the values, which neither vmap nor a CUDA graph allows
        return (actions.unsqueeze(-1) == torch.arange(self.num_actions, device=actions.device)).to(torch.float32)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary for a JSON file, less the task's `env_factory`, a function, and `file`, which only a
        download needs.
        """
        data = asdict(replace(self, task=None))
        if self.task is not None:
            data["task"] = self.task.to_json()
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any], where: str = "the description of the data") -> DataSpec:
        """The inverse of `to_json`. Keys it does not know, from a newer version, are ignored.

        Raises UserError for values of other types or sizes. where: the file, for that message.
        """
        if not isinstance(data, Mapping):
            raise UserError(f"{where} is damaged: it has {str(data)[:40]!r} where what offrl writes of its data is due")
        check_types(cls, {k: v for k, v in data.items() if k != "task"}, where)
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in known.items()}
        for key in ("observation_columns", "action_columns"):
            values[key] = tuple(
                ColumnSpec(**{f.name: c[f.name] for f in fields(ColumnSpec) if f.name in c})
                for c in values.get(key, ())
            )
        if values.get("task") is not None:
            values["task"] = task_from_json(values["task"], where)
        if missing := [name for name in ("observation_shape", "action_dim") if name not in values]:
            raise UserError(f"{where} is damaged: it has no {missing[0]}")
        spec = cls(**values)
        if spec.streams:
            spec = replace(spec, streams=tuple(map(stream_of, data["streams"])))
        if data.get("encoder") is not None:
            spec = replace(spec, encoder=restored(EncoderConfig, data["encoder"], where))
        sizes = {
            "observation_columns": spec.observation_dim,
            "action_columns": spec.action_dim,
            "action_labels": spec.num_actions,
            "observation_mean": spec.observation_dim,
            "observation_std": spec.observation_dim,
            "action_low": spec.action_dim,
            "action_high": spec.action_dim,
        }
        edges = [size for stream in spec.streams for size in stream.shape]
        edges += [1] if spec.streams and spec.observation_shape == (0,) else spec.observation_shape
        edges += [spec.history, spec.history_stride, spec.history_actions + 1]
        if min(*edges, spec.frames, spec.action_dim, spec.num_actions + 1, spec.goal_dim + 1, 1) < 1:
            raise UserError(
                f"{where} is damaged: it is of observations {spec.observation_shape} and {spec.action_dim} action "
                "dimensions"
            )
        for name, size in sizes.items():
            if (value := getattr(spec, name)) and len(value) != size:
                raise UserError(f"{where} is damaged: {name} has {len(value)} entries, where {size} are due")
        return spec


@dataclass(frozen=True, repr=False)
class Dataset:
    """Columns with one row per step. Every row of an episode is kept, the last one too; `transition_rows` are the ones
    TD learning may use.

    Columns, all of length R: observations and next_observations float32 (uint8 stays uint8) [R, *O], actions float32
    [R, A] in [-1, 1] or int64 [R], rewards float32 [R], terminations, truncations, successor_known bool [R]; optionally
    costs float32 [R] (0 or above: what a limit bounds the sum of), achieved_goals, desired_goals, returns_to_go and the
    user's own. Episodes tile the rows: episode e is rows
    episode_start[e] to episode_end[e] - 1.

    Text data (`spec.text`, see `offrl.data.text.dataset`) have a row per turn; observations, next_observations and
    actions are then int64 [R], each the index of a text in `strings`.
    """

    columns: dict[str, Tensor]
    episode_start: Tensor  # [E] int64
    episode_end: Tensor  # [E] int64, exclusive
    spec: DataSpec
    fingerprint: str = ""  # sha256 of the data before transforms; the same on every machine
    # [E] float64, of the rewards as recorded
    raw_returns: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64))
    # [E] bool; False: the data stop inside the episode
    complete: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.bool))
    transforms: tuple[str, ...] = ()  # what was done to the data, in order
    notes: tuple[str, ...] = ()  # what a person should know about how the data were read
    mapped: bool = False  # the columns are memory-mapped files
    # float64: how often a row of each episode [E], or each row [R], is drawn, of mean 1 over the rows; None: all alike
    weights: Tensor | None = None
    strings: tuple[str, ...] = ()  # of text data: the different texts, in no order that means anything
    stitch: float = 0.0  # how often goals are stitched, by the column stitch_clusters (`transforms.stitch`); 0: never
    # of text data: JSON objects, what the episodes say of themselves; the column "meta" [R] indexes them
    metas: tuple[str, ...] = ()
    stores: Mapping[str, Store] = field(default_factory=dict)  # the streams' entries, by name

    def __len__(self) -> int:
        return len(self.columns["rewards"])

    def __repr__(self) -> str:
        """One line: name, sizes, returns. The generated one would print every tensor."""
        returns = self.raw_returns
        parts = [self.spec.observation_shape] * (self.spec.observation_shape != (0,))
        shape = ", ".join("x".join(map(str, s)) for s in (*parts, *(s.shape for s in self.spec.streams))) or "text"
        mean = f", mean return {float(returns.mean()):.6g}" if len(returns) else ""
        extra = [c for c in self.columns if c not in CORE]
        more = f", and {', '.join(extra)}" if extra else ""
        return (
            f"Dataset({self.spec.name!r}: {len(self):,} rows, {self.num_episodes:,} episodes{mean}; observations "
            f"{shape}, actions {self._kind_of_actions()}{more}; {self.nbytes / 1e6:,.1f} MB on {self.device})"
        )

    @property
    def num_episodes(self) -> int:
        return len(self.episode_start)

    @property
    def device(self) -> torch.device:
        return self.columns["rewards"].device

    @property
    def nbytes(self) -> int:
        columns = sum(c.numel() * c.element_size() for c in self.columns.values())
        return columns + sum(map(len, self.strings)) + sum(store.nbytes for store in self.stores.values())

    def episode_returns(self) -> Tensor:
        """Undiscounted sum of the (transformed) rewards of each episode, [E] float64 on the CPU."""
        return self._sums("rewards")

    def episode_costs(self) -> Tensor:
        """Undiscounted sum of the costs of each episode, [E] float64 on the CPU. See `refuse_costless`."""
        return self._sums("costs")

    def episode_lengths(self) -> Tensor:
        """Rows of each episode, [E] int64."""
        return self.episode_end - self.episode_start

    def bounds(self) -> tuple[np.ndarray, np.ndarray]:
        """The first row of each episode and the one after its last, [E] int64 each."""
        return self.episode_start.cpu().numpy(), self.episode_end.cpu().numpy()

    def spans(self) -> Iterator[tuple[int, int]]:
        """The same, one episode after the other."""
        return zip(self.episode_start.tolist(), self.episode_end.tolist(), strict=True)

    def per_row(self, values: Tensor) -> Tensor:
        """For each row what `values` [E, ...] has for its episode: [R, ...] on the device of `values`."""
        return torch.repeat_interleave(values, self.episode_lengths().to(values.device), 0)

    def steps(self) -> Tensor:
        """The number of each row's step within its episode, [R] int64."""
        return torch.arange(len(self), device=self.device) - self.per_row(self.episode_start)

    def rows_of(self, episodes: Tensor) -> Tensor:
        """The rows of episodes [N], one episode after the other: int64."""
        lengths = self.episode_lengths()[episodes]
        ends = torch.cumsum(lengths, 0)
        shift = torch.repeat_interleave(self.episode_start[episodes] - (ends - lengths), lengths)
        return torch.arange(len(shift), device=shift.device) + shift

    def flat(self, name: str) -> Tensor:
        """A column as [R, W]."""
        return self.columns[name].reshape(len(self), -1)

    def row_weights(self) -> Tensor:
        """The frequency at which each row is drawn, as a multiple of the average: [R] float64 on the CPU."""
        if self.weights is None:
            return torch.ones(len(self), dtype=torch.float64)
        return self.weights if len(self.weights) == len(self) else self.per_row(self.weights)

    def episode_shares(self) -> Tensor:
        """The share of the draws that each episode has, all its rows together: [E] float64 on the CPU, of sum 1."""
        episode = self.per_row(torch.arange(self.num_episodes))
        shares = torch.zeros(self.num_episodes, dtype=torch.float64).index_add(0, episode, self.row_weights())
        return shares / shares.sum()

    def transition_rows(self) -> Tensor:
        """Rows that hold a whole transition: the successor is known, or not needed because the episode ended there.
        int64.
        """
        return torch.nonzero(self.columns["successor_known"] | self.columns["terminations"]).squeeze(-1)

    def changed(
        self, transform: str, note: str = "", columns: Mapping[str, Tensor] | None = None, **values: Any
    ) -> Dataset:
        """The data with other `values`, and `columns` beside or in place of theirs, as `transform` made them."""
        notes = (*self.notes, note) if note else self.notes
        columns = {**self.columns, **(columns or {})}
        return replace(self, columns=columns, transforms=(*self.transforms, transform), notes=notes, **values)

    def to(self, device: torch.device | str) -> Dataset:
        """The same data on another device. Memory-mapped columns are read in whole."""
        device = torch.device(device)
        if device == self.device:
            return self
        columns = {k: c.to(device) for k, c in self.columns.items()}
        start, end = self.episode_start.to(device), self.episode_end.to(device)
        stores = {name: store.to(device) for name, store in self.stores.items()}
        return replace(self, columns=columns, stores=stores, episode_start=start, episode_end=end, mapped=False)

    def describe(self) -> dict[str, Any]:
        """Numbers and names for a log: plain Python values."""
        returns, lengths = self.raw_returns, self.episode_lengths().double()
        task = self.spec.task
        return {
            "name": self.spec.name,
            "source": self.spec.source,
            "version": self.spec.version,
            "fingerprint": self.fingerprint,
            "transforms": list(self.transforms),
            "notes": list(self.notes),
            "rows": len(self),
            "transitions": len(self.transition_rows()),
            "episodes": self.num_episodes,
            "return_mean": float(returns.mean()),
            "return_min": float(returns.min()),
            "return_max": float(returns.max()),
            "length_mean": float(lengths.mean()),
            "observation_shape": list(self.spec.observation_shape),
            **({"streams": {s.name: list(s.shape) for s in self.spec.streams}} if self.stores else {}),
            "actions": self._kind_of_actions(),
            "environment": task.env_id if task else None,
            "memory_mb": round(self.nbytes / 1e6, 1),
            "memory_mapped": self.mapped,
            **(
                {}
                if self.weights is None
                else {"effective_episodes": effective_episodes(self.episode_shares().numpy())}
            ),
        }

    def _sums(self, name: str) -> Tensor:
        values = self.columns[name].cpu().numpy()
        return torch.from_numpy(np.add.reduceat(values, self.bounds()[0], dtype=np.float64))

    def _kind_of_actions(self) -> str:
        if self.spec.text:
            return "text"
        return f"discrete {self.spec.num_actions}" if self.spec.discrete else f"continuous {self.spec.action_dim}"


def effective_episodes(shares: np.ndarray) -> float:
    """exp(entropy) of the episodes' shares [E] of the draws: how many equally likely episodes vary as much."""
    p = shares[shares > 0.0] / shares.sum()
    return float(np.exp(-(p * np.log(p)).sum()))
