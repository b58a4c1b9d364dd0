"""The settings that say which data set is used and how it is prepared. Imports no torch, so that `offrl --help` stays fast."""

from __future__ import annotations

from dataclasses import dataclass, field

from offrl.errors import UserError, nearest

FORMATS = ("auto", "d4rl", "minari", "ogbench", "d3rlpy", "columns")
MEMORY = ("auto", "device", "mmap")


@dataclass
class DatasetConfig:
    """One data set. Everything below `name` has a default that leaves the data as they are."""

    # What to load: a file or folder, a D4RL, OGBench or registered name, a Minari id, or "builtin".
    name: str = "builtin"
    # Layout of the file: auto | d4rl | minari | ogbench | d3rlpy | columns (plain npz, HDF5 or Parquet with a key per column).
    format: str = "auto"
    # Column -> key in the file, e.g. {observations: obs, terminations: done}. Columns offrl knows: observations actions rewards
    # terminations truncations next_observations episode_ends (flags or last rows) episode_ids; any other name is an extra column.
    fields: dict[str, str] = field(default_factory=dict)
    # Dict observations: the entries that make the flat observation, in this order. Empty: all of them, sorted (Gymnasium's order).
    observation_keys: list[str] = field(default_factory=list)
    # The environment's action range, one value or one per dimension, for files that do not say. Empty: found out.
    action_low: list[float] = field(default_factory=list)
    action_high: list[float] = field(default_factory=list)
    # More data sets of the same shapes, appended.
    concatenate: list[str] = field(default_factory=list)
    # Keep this share of the episodes, drawn at random with `subsample_seed`.
    subsample: float = 1.0
    subsample_seed: int = 0
    # Keep the best max(1, floor(top_fraction * episodes)) episodes by return.
    top_fraction: float = 1.0
    # Rewards, in this order: r * by_return_range / (largest - smallest episode return), r * scale, r + shift. 0 turns the first one off.
    reward_by_return_range: float = 0.0
    reward_scale: float = 1.0
    reward_shift: float = 0.0
    # Adds the column returns_to_go, G_t = r_t + discount_returns (1 - d_t) G_{t+1} within the episode. None: no column.
    discount_returns: float | None = None
    # Treat a time-out row as unusable even where its successor is known (what d4rl.qlearning_dataset does).
    drop_timeout_rows: bool = False
    # Clip actions outside the environment's range; without it such data are refused.
    clip_actions: bool = False
    # After scaling to [-1, 1], clip actions to +-(1 - action_margin), so that atanh stays finite.
    action_margin: float = 0.0
    # (s - mean) / (std + 1e-3) with the statistics of the data that were kept.
    normalize_observations: bool = False
    # Where the columns live: device, mmap (files in cache_dir), or auto (mmap when they need more than memory_limit_gb).
    memory: str = "auto"
    # 0: half of the free memory.
    memory_limit_gb: float = 0.0
    # Downloads and memory-mapped columns. None: $OFFRL_CACHE or ~/.cache/offrl.
    cache_dir: str | None = None
    # URL prefix or folder to take data-set files from instead of the official address. None: $OFFRL_MIRROR.
    mirror: str | None = None
    # Refuse data whose faults would corrupt training. False prints them as warnings.
    check: bool = True

    def validate(self) -> None:
        """Raises UserError for the first setting out of range."""
        for key, value, options in (("format", self.format, FORMATS), ("memory", self.memory, MEMORY)):
            if value not in options:
                raise UserError(f"dataset.{key}={value} is not one of {', '.join(options)}.{nearest(value, options)}")
        for key in ("subsample", "top_fraction"):
            if not 0.0 < getattr(self, key) <= 1.0:
                raise UserError(f"dataset.{key}={getattr(self, key)} must lie in (0, 1]")
        if not 0.0 <= self.action_margin < 1.0:
            raise UserError(f"dataset.action_margin={self.action_margin} must lie in [0, 1)")
        if self.discount_returns is not None and not 0.0 <= self.discount_returns <= 1.0:
            raise UserError(f"dataset.discount_returns={self.discount_returns} must lie in [0, 1]")
        if self.reward_by_return_range < 0.0 or self.memory_limit_gb < 0.0:
            raise UserError("dataset.reward_by_return_range and dataset.memory_limit_gb must not be negative")
        if bool(self.action_low) != bool(self.action_high):
            raise UserError("dataset.action_low and dataset.action_high must be given together")
