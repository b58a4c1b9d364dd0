"""The settings that say which data set is used and how it is prepared. Imports no torch, so that `offrl --help` stays fast."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from offrl.errors import UserError
from offrl.settings import check, setting

FORMATS = ("auto", "d4rl", "minari", "ogbench", "d3rlpy", "columns")
MEMORY = ("auto", "device", "mmap")
CACHE = ("auto", "always", "never")


@dataclass
class DatasetConfig:
    """One data set. Everything below `name` has a default that leaves the data as they are."""

    # Settings that decide where data come from and where they are put, and nothing about the data.
    PLACES: ClassVar[tuple[str, ...]] = ("name", "cache_dir", "mirror", "memory", "memory_limit_gb", "cache", "cache_limit_gb")
    # Settings of `apply_transforms`: what is done after the columns are assembled.
    TRANSFORMS: ClassVar[tuple[str, ...]] = (
        "concatenate",
        "subsample",
        "subsample_seed",
        "top_fraction",
        "reward_by_return_range",
        "reward_scale",
        "reward_shift",
        "discount_returns",
        "action_margin",
        "normalize_observations",
    )

    name: str = setting("builtin", "a file or folder, a D4RL, OGBench or registered name, or a Minari id; also written dataset=NAME")
    format: str = setting("auto", "layout of the file; columns: plain npz, HDF5 or Parquet with a key per column", choices=FORMATS)
    # Columns offrl knows: observations actions rewards terminations truncations next_observations episode_ends (flags or last rows)
    # episode_ids; any other name is an extra column.
    fields: dict[str, str] = setting({}, "column -> key in the file: dataset.fields.observations=obs dataset.fields.terminations=done")
    observation_keys: list[str] = setting([], "Dict observations: the entries that make the flat one, in order; []: all, sorted")
    action_low: list[float] = setting([], "the environment's action range, one value or one per dimension; []: found out")
    action_high: list[float] = setting([], "see action_low")
    concatenate: list[str] = setting([], "more data sets of the same shapes, appended")
    subsample: float = setting(1.0, "keep this share of the episodes, drawn at random", high=1.0)
    subsample_seed: int = setting(0, "decides which episodes subsample keeps", low=0)
    top_fraction: float = setting(1.0, "keep this share of the episodes (at least one), the best by return", high=1.0)
    # Rewards, in this order: by_return_range, scale, shift.
    reward_by_return_range: float = setting(0.0, "x: rewards times x / (largest - smallest episode return); 0: off", low=0.0)
    reward_scale: float = setting(1.0, "rewards are multiplied by this")
    reward_shift: float = setting(0.0, "and then this is added to them")
    # G_t = r_t + discount_returns (1 - d_t) G_{t+1} within the episode
    discount_returns: float | None = setting(None, "adds the column returns_to_go with this discount; null: no column", low=0.0, high=1.0)
    drop_timeout_rows: bool = setting(False, "leave out time-out rows whose successor is known (as d4rl.qlearning_dataset does)")
    clip_actions: bool = setting(False, "clip actions outside the environment's range; without it such data are refused")
    action_margin: float = setting(0.0, "clip actions, scaled to [-1, 1], to +-(1 - margin), so that atanh stays finite", low=0.0)
    normalize_observations: bool = setting(False, "(s - mean) / (std + 1e-3), with the statistics of the data that were kept")
    memory: str = setting("auto", "where columns live: auto picks mmap (files in cache_dir) above memory_limit_gb", choices=MEMORY)
    memory_limit_gb: float = setting(0.0, "0: half of the free memory", low=0.0)
    cache_dir: str | None = setting(None, "downloads and memory-mapped columns; null: $OFFRL_CACHE or ~/.cache/offrl")
    mirror: str | None = setting(None, "URL prefix or folder to take data sets from, not their own address; null: $OFFRL_MIRROR")
    cache: str = setting("auto", "keep the read data in cache_dir for the next load; auto: if reading took over 0.5 s", choices=CACHE)
    cache_limit_gb: float = setting(10.0, "disk for them; beyond it those not used for longest are removed", low=0.0)
    check: bool = setting(True, "refuse data whose faults would corrupt training; false: warn only")

    def anywhere(self) -> DatasetConfig:
        """These settings with the defaults of `PLACES`: two that agree in it ask for the same treatment of the data."""
        default = DatasetConfig()
        return replace(self, **{name: getattr(default, name) for name in self.PLACES})

    def validate(self) -> None:
        """Raises UserError for the first setting out of range."""
        check(self, "dataset.")
        for key in ("subsample", "top_fraction"):
            if not getattr(self, key) > 0.0:
                raise UserError(f"dataset.{key}={getattr(self, key)} must be above 0 (and at most 1)")
        if not self.action_margin < 1.0:
            raise UserError(f"dataset.action_margin={self.action_margin} must be below 1")
        if bool(self.action_low) != bool(self.action_high):
            raise UserError("dataset.action_low and dataset.action_high must be given together")
