"""Whole episodes that a behaviour policy plays in a model, those that promise more than any in the data, kept in a
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset, DataSpec
from offrl.errors import UserError, warn
from offrl.system import files as checkpoint
from offrl.world_models.model import Tree
from offrl.world_models.rollout import Act, Imagined, branched

KIND, FORMAT = "episodes", 1
Tell = Callable[[str], None]
Kept = tuple[dict[str, Tensor], dict[str, Any]]


def collect(
    model: Any,
    tree: Tree,
    act: Act,
    dataset: Dataset,
    key: Tensor,
    *,
    threshold: float,
    horizon: int,
    batch: int,
    accepted: int,
    most: int,
    tell: Tell | None = None,
) -> Kept:
    """Play from first observations of the data, `batch` episodes at a time, until `accepted` have a return above
    `threshold`, or `most` are played; where none has, take the `accepted` ones with the largest returns.

    An episode lasts until the model ends it, or `horizon` steps, and does not count if it leaves the range that the
    tree allows: there the model knows nothing. Its rewards are those that the model's elites expect on the way that was
    drawn, not drawn ones: the largest of many noisy sums would promise what nobody can earn. Returns are in the units
    of the recorded rewards.

    Gives columns, observations [R, O], actions [R, A], rewards [R] in training units, next_observations [R, O],
    terminations bool [R], lengths [E] int64 and returns [E]; and what to say of them. Raises UserError where every
    episode leaves the range.
    """
    first = dataset.episode_start
    observations = dataset.flat("observations")[first].float()
    past = model.first_past(observations)
    parts: list[dict[str, Tensor]] = []
    best: dict[str, Tensor] | None = None  # so far, of those that do not beat the data
    played = beat = out_of_range = 0
    while played < most and beat < accepted:
        begin, go = rng.split(rng.fold_in(key, played // batch))
        rows = rng.randint(begin, (batch,), len(first))
        rollouts = expected(model, tree, branched(model, tree, act, observations[rows], past[rows], horizon, go))
        returns = episode_returns(rollouts, dataset.spec)
        inside = ~(rollouts.clipped & rollouts.valid).any(0)
        better = inside & (returns > threshold)
        parts.append(choose(rollouts, returns, torch.nonzero(better).squeeze(-1)))
        played, beat, out_of_range = played + batch, beat + int(better.sum()), out_of_range + int((~inside).sum())
        if not beat:
            candidates = choose(rollouts, returns, torch.nonzero(inside).squeeze(-1))
            best = merge([*([best] if best else []), candidates], accepted)
        if tell is not None:
            tell(
                f"{played:,} episodes played in the model, {beat:,} above the data's best return {threshold:g} (until "
                f"{accepted:,} are)"
            )
    episodes = merge(parts) if beat else best
    if episodes is None or not len(episodes["returns"]):
        raise UserError(
            f"{dataset.spec.name}: all {played:,} episodes played in the model left the data's range: train a better "
            "model or behaviour policy, or allow more (algo.range_margin=)"
        )
    description = {
        "played": played,
        "left": out_of_range,
        "beat": beat,
        "threshold": threshold,
        "best": float(episodes["returns"].max()),
    }
    return episodes, description


def expected(model: Any, tree: Tree, rollouts: Imagined) -> Imagined:
    """Rollouts with the mean of the elites' rewards, where those are learnt."""
    if not model.learns_reward:
        return rollouts
    rewards = []
    for observations, actions, past in zip(rollouts.observations, rollouts.actions, rollouts.past, strict=True):
        rewards.append(model.predict(tree, observations, actions, past).reward[tree["elites"]].mean(0))
    return rollouts._replace(rewards=torch.stack(rewards))


def episode_returns(rollouts: Imagined, spec: DataSpec) -> Tensor:
    """[B] sums of the rewards of rollouts [H, B], in the units of the recorded ones."""
    rewards = (rollouts.rewards - spec.reward_shift) / (spec.reward_scale or 1.0)
    return (rewards.double() * rollouts.valid).sum(0).float()


def choose(rollouts: Imagined, returns: Tensor, indices: Tensor) -> dict[str, Tensor]:
    """Rollouts number `indices` [n] of [H, B] as columns, one after another, without what comes after their ends."""
    valid = rollouts.valid[:, indices].T  # [n, H]
    names = ("observations", "actions", "rewards", "next_observations", "terminations")
    columns = {name: getattr(rollouts, name)[:, indices].transpose(0, 1)[valid] for name in names}
    return {**columns, "lengths": valid.sum(1), "returns": returns[indices]}


def merge(parts: list[dict[str, Tensor]], count: int | None = None) -> dict[str, Tensor]:
    """Episodes of several parts, one after another; of more than `count` those with the largest returns."""
    columns = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if count is None or len(columns["returns"]) <= count:
        return columns
    keep = torch.zeros(len(columns["returns"]), dtype=torch.bool, device=columns["returns"].device)
    keep[columns["returns"].topk(count).indices] = True
    rows = keep.repeat_interleave(columns["lengths"])
    return {name: column[keep if name in ("lengths", "returns") else rows] for name, column in columns.items()}


def say(description: Mapping[str, Any], name: str) -> str:
    """The result of the search, in a line. A warning where nothing beats the data."""
    played, out_of_range, beat, threshold, best = (
        description[k] for k in ("played", "left", "beat", "threshold", "best")
    )
    if not beat:
        warn(
            f"{name}: none of {played:,} episodes played in the model promises more than the data's best return "
            f"{threshold:g}: it learns from the best of them, which promise up to {best:.4g}, and will not do better "
            "than the data. More may: algo.rollouts="
        )
    return (
        f"{beat:,} of {played:,} episodes played in the model promise more than the data's best return {threshold:g}, "
        f"the best of them {best:.4g}; {out_of_range:,} left the data's range and do not count"
    )


def about_file(path: str | Path, spec: DataSpec) -> dict[str, Any]:
    """The description in a file of episodes. Raises UserError where it is none, or does not fit data of `spec`."""
    return read(path, spec)[1]


def read(path: str | Path, spec: DataSpec) -> tuple[Dataset, dict[str, Any]]:
    """The episodes in a file as a dataset of `spec`, and what is said of them. Raises UserError as `about_file`."""
    if not Path(path).is_file():
        raise UserError(f"imagined={path}: there is no such file; leave it out, and the episodes are played anew")
    columns, description = checkpoint.read(Path(path))
    if description.get("kind") != KIND or description.get("format") != FORMAT:
        raise UserError(
            f"imagined={path} is no file of episodes of this version of offrl; leave it out, and they are played anew"
        )
    file_spec = DataSpec.from_json(description["spec"])
    same = ("observation_shape", "action_dim", "action_low", "action_high", "observation_mean", "observation_std")
    for name in (*same, "reward_scale", "reward_shift"):
        if getattr(file_spec, name) != getattr(spec, name):
            raise UserError(f"imagined={path}: made of data with another {name} than {spec.name} has; leave it out")
    lengths, returns = columns.pop("lengths"), columns.pop("returns")
    end = lengths.cumsum(0)
    count, all_complete = len(columns["rewards"]), torch.ones(len(lengths), dtype=torch.bool)
    ends = torch.zeros(count, dtype=torch.bool)
    ends[end - 1] = True
    columns["truncations"] = ends & ~columns["terminations"]
    columns["successor_known"] = torch.ones(count, dtype=torch.bool)
    return Dataset(columns, end - lengths, end, spec, raw_returns=returns.double(), complete=all_complete), description
