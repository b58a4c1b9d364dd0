"""The settings that say which dataset is used and how it is prepared. Imports no torch, so that `offrl --help` stays
fast.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from offrl.errors import UserError
from offrl.settings.field import check, marked, setting

FORMATS = ("auto", "d4rl", "minari", "ogbench", "d3rlpy", "columns", "padded", "lerobot", "robomimic", "vd4rl", "text")
MEMORY = ("auto", "device", "mmap")
CACHE = ("auto", "always", "never")
EXPERT_CHOICE = ("first", "best")
ACTION_KINDS = ("auto", "continuous", "discrete", "one_hot", "multi_discrete")
MISSING = ("refuse", "forward")
DECIMAL = ("auto", "point", "comma")
WEIGHTING = ("none", "return", "advantage", "top")
SPLIT_PARTS = ("first", "second")
AUGMENT = ("none", "stitch")
AUGMENT_ON = ("auto", "goals", "observations")


@dataclass
class DatasetConfig:
    """One dataset. Everything below `name` has a default that leaves the data as they are."""

    # Settings of `apply_transforms`: what is done after the columns are assembled.
    TRANSFORMS: ClassVar[tuple[str, ...]] = (
        "concatenate",
        "multitask",
        "split",
        "split_part",
        "split_seed",
        "subsample",
        "subsample_seed",
        "labelled_fraction",
        "labelled_quantile",
        "labelled_seed",
        "action_free",
        "action_free_members",
        "action_free_updates",
        "action_free_hidden",
        "action_free_seed",
        "expert",
        "expert_episodes",
        "expert_choice",
        "expert_unmarked",
        "imagined",
        "reward_labels",
        "cost_labels",
        "terminated_only",
        "keep",
        "top_fraction",
        "weighting",
        "weighting_temperature",
        "weighting_fraction",
        "imagined_share",
        "intervention_share",
        "reward_by_return_range",
        "normalize_rewards",
        "reward_scale",
        "reward_shift",
        "discount_returns",
        "action_margin",
        "normalize_observations",
        "augment",
        "augment_probability",
        "augment_clusters",
        "augment_on",
        "augment_dims",
    )

    # What networks see of observations, rather than what is in the data.
    VIEW: ClassVar[tuple[str, ...]] = ("frames", "history", "history_stride", "history_actions", "action_delay")
    SINGLE: ClassVar[tuple[str, ...]] = ("normalize_observations", "observation_keys", "augment", *VIEW)
    CHANGES: ClassVar[tuple[str, ...]] = (*TRANSFORMS, "drop_timeout_rows", *VIEW, "image_size", "episodes")

    # Those of them that decide what the data are, and not only how an algorithm is to see them: estimates of values
    # keep to these.
    CONTENT: ClassVar[tuple[str, ...]] = TRANSFORMS[: TRANSFORMS.index("terminated_only")]
    name: str = setting(
        "builtin",
        "a file or folder, a D4RL, OGBench or registered name, or a Minari id; also written dataset=NAME",
        place=True,
    )
    format: str = setting(
        "auto",
        "layout; columns: CSV, Parquet, npz, HDF5, a key per column; padded: ImagineBench's; text: JSON lines",
        choices=FORMATS,
    )
    # Columns offrl knows: observations actions rewards terminations truncations next_observations episode_ends (flags
    # or last rows) episode_ids time; any other name is an extra column.
    fields: dict[str, Any] = setting(
        {},
        "column -> key in the file: dataset.fields.observations=obs dataset.fields.terminations=done; of CSV, Parquet "
        "and DataFrames also "
        'lists and patterns: "dataset.fields.observations=[temp,flow_*]"',
    )
    action_kind: str = setting(
        "auto", "what columns of actions in CSV, Parquet and DataFrames are", choices=ACTION_KINDS
    )
    max_gap: float = setting(
        0.0, "of them: a longer gap in dataset.fields.time begins an episode (dates: seconds); 0: none", low=0.0
    )
    missing: str = setting(
        "refuse", "of them: forward: an observation that is missing is the last one before it", choices=MISSING
    )
    decimal: str = setting(
        "auto", "of CSV: the decimal mark; the other stands between thousands; auto: by the numbers", choices=DECIMAL
    )
    observation_keys: list[str] = setting(
        [], "Dict observations: the entries that are used, in order; []: all numbers, sorted, or the only image"
    )
    frames: int = setting(1, "images: the last so many, stacked along their channels", low=1)
    history: int = setting(1, "vectors: the last so many, oldest first, in place of the newest", low=1, high=1000)
    history_stride: int = setting(1, "steps from one of them to the next", low=1, high=1000)
    history_actions: int = setting(
        0, "the last so many actions, oldest first, beside the observation", low=0, high=1000
    )
    action_delay: str = setting(
        "0",
        "steps until an action acts: so many actions before are seen; auto: found out (docs/partial-observation.md)",
    )
    image_size: list[int] = setting(
        [], "images: [height,width] that they are resized to, by area; []: as they are", low=1
    )
    episodes: str = setting("", 'the episodes of dataset.name that are used: 29:32 (29 to 31), or 3,5,9; "": all')
    mask: str = setting("", 'robomimic: the demonstrations of this mask alone, such as train; "": all')
    action_low: list[float] = setting(
        [], "the environment's action range, one value or one per dimension; []: found out"
    )
    action_high: list[float] = setting([], "see action_low")
    concatenate: list[str] = setting([], "more datasets of the same shapes, appended")
    multitask: bool = setting(
        False,
        "several tasks, of any sizes: each dataset with concatenate is one, or each number in the column tasks of one "
        "alone (docs/in-context.md)",
    )
    split: float = setting(
        1.0,
        "divide the episodes, at random within thirds of their returns: this share and the rest",
        above=0.0,
        high=1.0,
    )
    split_part: str = setting(
        "first", "the part that is used: first (that share) or second (the rest)", choices=SPLIT_PARTS
    )
    split_seed: int = setting(0, "decides which episodes are in which", low=0)
    subsample: float = setting(1.0, "keep this share of the episodes, drawn at random", above=0.0, high=1.0)
    subsample_seed: int = setting(0, "decides which episodes subsample keeps", low=0)
    # Semi-supervised data (SS-ORL, arXiv 2210.06518): actions that are not known are labelled by an inverse-dynamics
    # model.
    labelled_fraction: float = setting(
        1.0, "a random share of the episodes keeps its actions; the others count as action-free", above=0.0, high=1.0
    )
    labelled_quantile: float = setting(
        1.0,
        "the ones that keep them are drawn from this share of the episodes, the lowest returns",
        above=0.0,
        high=1.0,
    )
    labelled_seed: int = setting(0, "decides which ones", low=0)
    action_free: list[str] = setting([], "datasets whose actions are missing, or to be ignored: labelled and appended")
    action_free_members: int = setting(
        3, "inverse-dynamics models, whose actions are averaged; 0: leave action-free episodes out", low=0
    )
    action_free_updates: int = setting(
        10_000, "at most so many updates of each; they end where the validation error no longer falls", low=1
    )
    action_free_hidden: list[int] = setting(
        [1024, 1024], "their layers; [256,256] trains about ten times as fast on a CPU", low=1
    )
    action_free_seed: int = setting(0, "seed of the first of them", low=0)
    # Imitation: demonstrations are appended, and the column "expert" marks them for the algorithms that look at it.
    expert: str | None = setting(
        None, "a dataset of an expert's episodes: demonstrations, appended to the others (algo=recoil)"
    )
    expert_episodes: int = setting(1, "how many of its episodes are demonstrations; 0: all", low=0)
    expert_choice: str = setting(
        "first", "which ones: the first, or the best by recorded return", choices=EXPERT_CHOICE
    )
    expert_unmarked: int = setting(
        0, "so many more of its episodes are appended that nothing marks as the expert's", low=0
    )
    # Imagined rollouts, of a language model or a world model, as a second source (ImagineBench, arXiv 2505.10010).
    imagined: list[str] = setting([], "datasets of imagined rollouts, appended; the column imagined marks their rows")
    imagined_share: float | None = setting(
        None, "share of the drawn rows that are imagined; null: as many as there are", low=0.0, high=1.0
    )
    intervention_share: float | None = setting(
        None,
        "share of the drawn rows of which the column intervention is 1 (HIL-SERL: 0.5); null: as many as there are",
        low=0.0,
        high=1.0,
    )
    instruction_encodings: str | None = setting(
        None, "padded data with instructions as texts: npz file of instructions and encodings, appended to observations"
    )
    reward_labels: str | None = setting(
        None,
        "new rewards: file.py:function or package.module:function of an episode's columns, or a file of offrl data "
        "label (.safetensors)",
    )
    cost_labels: str | None = setting(
        None, "new costs, 0 or above, as reward_labels: file.py:function of an episode's columns"
    )
    terminated_only: bool = setting(
        False, "keep the episodes that ended by themselves: where that is success, the successful ones"
    )
    keep: str = setting(
        "",
        'keep the episodes of which this holds, in sums as they stand: "cost <= 20"; of cost, return and length, also '
        '"cost > 5 and cost <= 15"',
    )
    top_fraction: float = setting(
        1.0, "keep this share of the episodes (at least one), the best by return", above=0.0, high=1.0
    )
    # Which episodes are drawn more often (arXiv 2306.13085); unlike with top_fraction the others stay, in normalisation
    # statistics, say.
    weighting: str = setting(
        "none",
        "draw rows by exp(w / temperature), w their episode's scaled return or advantage; top: the best only",
        choices=WEIGHTING,
    )
    weighting_temperature: float = setting(0.1, "the smaller, the more of the draws go to the best episodes", above=0.0)
    weighting_fraction: float = setting(
        0.1, "weighting=top: this share of the episodes (at least one) is drawn from, uniformly", above=0.0, high=1.0
    )
    # Rewards, in this order: by_return_range, normalize, scale, shift.
    reward_by_return_range: float = setting(
        0.0, "x: rewards times x / (largest - smallest episode return); 0: off", low=0.0
    )
    normalize_rewards: bool = setting(False, "(r - mean) / std, with the statistics of the data that were kept")
    reward_scale: float = setting(1.0, "rewards are multiplied by this")
    reward_shift: float = setting(0.0, "and then this is added to them")
    # G_t = r_t + discount_returns (1 - d_t) G_{t+1} within the episode
    discount_returns: float | None = setting(
        None, "adds the column returns_to_go with this discount; null: no column", low=0.0, high=1.0
    )
    drop_timeout_rows: bool = setting(
        False, "leave out time-out rows whose successor is known (as d4rl.qlearning_dataset does)"
    )
    clip_actions: bool = setting(
        False, "clip actions outside the environment's range; without it such data are refused"
    )
    action_margin: float = setting(
        0.0, "clip actions, scaled to [-1, 1], to +-(1 - margin), so that atanh stays finite", low=0.0
    )
    normalize_observations: bool = setting(
        False, "(s - mean) / std (published data: std + 1e-3), with the statistics of the kept data"
    )
    # Temporal augmentation (arXiv 2401.11237), of the goals that a policy learns towards.
    augment: str = setting(
        "none",
        "stitch: goals also from other trajectories that pass the same place (docs/goal-conditioned.md)",
        choices=AUGMENT,
    )
    augment_probability: float = setting(0.5, "share of the policy's goals ahead that are stitched", low=0.0, high=1.0)
    augment_clusters: int = setting(40, "clusters of rows; those of one count as the same place (k-means)", low=2)
    augment_on: str = setting(
        "auto", "what is clustered; auto: achieved goals where the data have any", choices=AUGMENT_ON
    )
    augment_dims: int = setting(0, "the first numbers of it alone (ant: 2, the place); 0: all", low=0)
    memory: str = setting(
        "auto",
        "where columns live: auto picks mmap (files in cache_dir) above memory_limit_gb",
        choices=MEMORY,
        place=True,
    )
    memory_limit_gb: float = setting(0.0, "0: half of the free memory", low=0.0, place=True)
    cache_dir: str | None = setting(
        None, "downloads and memory-mapped columns; null: $OFFRL_CACHE or ~/.cache/offrl", place=True
    )
    mirror: str | None = setting(
        None, "URL prefix or folder to take datasets from, not their own address; null: $OFFRL_MIRROR", place=True
    )
    download_limit_gb: float = setting(
        100.0, "the most that is downloaded of one file whose size is not known", low=0.0, place=True
    )
    cache: str = setting(
        "auto",
        "keep the read data in cache_dir for the next load; auto: if reading took over 0.5 s",
        choices=CACHE,
        place=True,
    )
    cache_limit_gb: float = setting(
        10.0, "disk for them; beyond it those not used for longest are removed", low=0.0, place=True
    )
    check: bool = setting(True, "refuse data whose faults would corrupt training; false: warn only")

    def __post_init__(self) -> None:
        self.fields = {k: v if isinstance(v, list | tuple | dict) else str(v) for k, v in self.fields.items()}

    def anywhere(self) -> DatasetConfig:
        """These settings with the defaults of those that are a `place`: two that agree in it ask for the same treatment
        of the data.
        """
        default = DatasetConfig()
        return replace(self, **{name: getattr(default, name) for name in marked(self, "place")})

    def changed(self, names: Iterable[str]) -> list[str]:
        """Those of some settings that are not at their defaults."""
        default = DatasetConfig()
        return [name for name in names if getattr(self, name) != getattr(default, name)]

    def as_recorded(self) -> list[DatasetConfig]:
        """These settings for each of the sources, without what changes data or leaves rows out on loading."""
        plain = DatasetConfig()
        config = replace(self, **{name: getattr(plain, name) for name in self.CHANGES})
        return [replace(config, name=name) for name in (self.name, *self.concatenate)]

    def of_any_layout(self, *missing: str) -> DatasetConfig:
        """These settings for a further source, which lacks the columns `missing` and of which all episodes are read:
        its layout is found out, unless columns have keys.
        """
        fields = {column: key for column, key in self.fields.items() if column not in missing}
        form = self.format if self.format == "columns" else "auto"
        return replace(self, fields=fields, format=form, episodes="")

    def validate(self) -> None:
        """Raises UserError for the first setting out of range."""
        check(self, "dataset.")
        if self.multitask and (names := self.changed(self.SINGLE)):
            raise UserError(f"dataset.multitask=true: {names[0]} is of a single task's observations; leave it out")
        if self.split == 1.0 and self.split_part == "second":
            raise UserError("dataset.split_part=second needs dataset.split below 1, the share of the first part")
        if self.labelled_fraction > self.labelled_quantile and self.labelled_fraction < 1.0:
            raise UserError(
                f"dataset.labelled_fraction={self.labelled_fraction} of all episodes are more than the share they are "
                f"drawn from, dataset.labelled_quantile={self.labelled_quantile}"
            )
        if self.labelled_quantile < 1.0 and self.labelled_fraction == 1.0:
            raise UserError(
                f"dataset.labelled_quantile={self.labelled_quantile} needs dataset.labelled_fraction below 1"
            )
        if self.imagined_share is not None and not self.imagined:
            raise UserError(
                f"dataset.imagined_share={self.imagined_share:g} needs imagined rollouts: dataset.imagined=[FILE]"
            )
        if self.imagined_share is not None and self.intervention_share is not None:
            raise UserError(
                "dataset.imagined_share and dataset.intervention_share each decide all draws: give one of them"
            )
        if not self.action_free_hidden:
            raise UserError("dataset.action_free_hidden=[] needs at least one layer, such as [256,256]")
        if not self.action_margin < 1.0:
            raise UserError(f"dataset.action_margin={self.action_margin} must be below 1")
        if bool(self.action_low) != bool(self.action_high):
            raise UserError("dataset.action_low and dataset.action_high must be given together")
