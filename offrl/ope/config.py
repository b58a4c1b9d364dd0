"""Settings of off-policy evaluation. Imports no torch, so that help and mistakes in a command are quick."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from offrl.errors import UserError
from offrl.settings.field import check, setting

METHOD_NAMES = ("fqe", "wis", "dr", "model", "td", "q", "lstd", "bvft")
ALL_NAMES = ("fqe", "wis", "dr", "model")  # what method=all runs: the tournaments would make it several times as long
FIT_NAMES = ("base", "narrow", "wide", "norm", "short")  # of lstd and bvft; `judges.fits.variants` says what each is
LSTD_LOSSES = ("minus_std", "minus", "plain_std", "plain", "hybrid", "td_square", "avg_bellman")


@dataclass
class FQEConfig:
    """Fitted Q evaluation. The defaults are those of DOPE's code (arXiv 2103.16596), except for `updates`, `seeds`,
    `networks`, `layer_norm` and `schedule` (docs/policy-selection.md says why)."""

    discount: float = setting(0.99, "discount factor of the values that are estimated", low=0.0, high=0.9999)
    updates: int = setting(100_000, "updates of the Q networks", low=1)
    seeds: int = setting(
        3, "Q functions for each candidate, each on episodes drawn anew (bootstrap); 1: all episodes once", low=1
    )
    seed: int = setting(0, "decides first weights, batches and bootstrap samples")
    networks: str = setting(
        "shared",
        "shared: one network with an output for each candidate; separate: one for each, as published, at that many "
        "times the cost",
        choices=("shared", "separate"),
    )
    pairs: int = setting(
        4, "shared networks: candidates whose target is computed for each row of a batch, drawn anew each time", low=1
    )
    explore: bool = setting(
        False, "value the candidates as they explore (one random action a row) in place of their greedy actions"
    )
    learning_rate: float = setting(3e-4, "AdamW's learning rate", low=1e-9)
    weight_decay: float = setting(
        1e-5, "share of each weight taken off at each update; falls as the learning rate does", low=0.0, high=0.1
    )
    polyak: float = setting(
        0.005, "share of the online network that enters the target at each update", low=0.0, high=1.0
    )
    batch_size: int = setting(256, "transitions in a batch", low=1)
    hidden: list[int] = setting([256, 256], "widths of the hidden layers", low=1)
    layer_norm: bool = setting(
        True, "LayerNorm in the Q networks, which bounds what they make of actions far from the data"
    )
    schedule: str = setting(
        "cosine", "of the learning rate: cosine falls to 0 at the last update", choices=("cosine", "constant")
    )
    compile: str = setting(
        "auto", "auto compiles from 5,000 updates on", choices=("auto", "eager", "cudagraph", "compiled")
    )


@dataclass
class OPEConfig(FQEConfig):
    """All methods: what `fqe` has, importance sampling, rollouts in a learned model, and tournaments between several
    fits.
    """

    behavior_updates: int = setting(30_000, "wis, dr: updates of the model of the policy that made the data", low=1)
    target_std: float = setting(
        0.1, "wis, dr: spread given to a greedy candidate's action, in units of [-1, 1]", low=1e-6
    )
    bootstrap: int = setting(200, "wis, dr, td: resamples of the episodes for the interval", low=2)
    world_model: str = setting(
        "", "model: a run of algo=dynamics, or a file in its models/; empty: one is trained first, in models_dir"
    )
    models_dir: str = setting("runs", "model: where a model that is trained first is put, or found again")
    rollouts: int = setting(
        100, "model: rollouts of each candidate by each member, from the data's initial states", low=1
    )
    horizon: int | None = setting(
        None, "model: steps of a rollout; null: the task's limit, else the longest episode of the data", low=1
    )
    propagation: str = setting(
        "tsinf",
        "model: tsinf: one member plays a whole rollout; ts1: one drawn anew at each step",
        choices=("tsinf", "ts1"),
    )
    noise: bool = setting(
        True, "model: next states and rewards are drawn from the predicted distributions; false: their means"
    )
    fits: list[str] = setting(
        list(FIT_NAMES),
        "lstd, bvft: fits to choose between: base: the settings as they are; narrow, wide: half and twice the widths; "
        "norm: layer_norm the other way; short: half the updates",
        choices=FIT_NAMES,
    )
    tournament: str = setting("minus_std", "lstd: which loss decides (docs/policy-selection.md)", choices=LSTD_LOSSES)


@dataclass
class HorizonConfig:
    """Settings of `offrl data horizon`."""

    env: str = setting(
        "auto", "where the greedy policies are played: auto (the data's own environment), none, an id, or file.py:Name"
    )
    depth: int = setting(3, "Q_1 to Q_depth are fitted (k of SQIRL)", low=1, high=20)
    discount: float = setting(0.99, "discount factor of returns and targets", low=0.0, high=0.9999)
    updates: int = setting(5_000, "updates of the network", low=1)
    seeds: int = setting(3, "networks, each with other first weights and batches", low=1)
    seed: int = setting(0, "decides first weights, batches and start states")
    episodes: int = setting(20, "episodes that each greedy policy plays", low=1)
    quiet: bool = setting(False, "show no progress")


UPDATING = ("fqe", "dr", "lstd", "bvft", "all")  # methods whose estimates grow with `updates`


def short_fit(settings: FQEConfig, methods: Collection[str], name: str = "updates") -> str:
    """What to say where fitted Q evaluation is too short for its values to be there; "" where it is long enough, or no
    method has one.

    The target network follows by `polyak`, and a value reaches back over 1 / (1 - discount) steps: an estimate grows
    from 0 as 1 - exp(-updates polyak (1 - discount)), to 86% of its value after twice that time. name: what the user
    calls `updates`.
    """
    due = round(2.0 / max(1e-9, settings.polyak * (1.0 - settings.discount)))
    if settings.updates >= due or not set(UPDATING) & set(methods):
        return ""
    growth = f"values grow from 0 over the first {due:,}, and before that their order says little"
    return f"{name}={settings.updates:,} is too few for fitted Q evaluation: {growth}"


def validate(settings: FQEConfig) -> None:
    """Raise UserError for the first setting out of range."""
    check(settings)
    if not settings.hidden:
        raise UserError("hidden=[] leaves no hidden layer; write at least one width, such as hidden=[256]")
