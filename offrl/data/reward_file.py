"""Rewards that were made once, for the episodes of a data set, and kept in a file that `dataset.reward_labels` takes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl import checkpoint
from offrl.data.dataset import Dataset
from offrl.data.labels import Labeller, episode_columns
from offrl.errors import UserError

KIND = "offrl reward labels"
PARTS = ("observations", "actions", "rewards")


def episode_key(columns: Mapping[str, np.ndarray]) -> str:
    """A hash of an episode's observations, actions and recorded rewards: the same wherever it stands, in whichever part of the data."""
    digest = hashlib.sha256()
    for name in PARTS:
        values = np.ascontiguousarray(columns[name])
        digest.update(f"{name} {values.dtype.str} {values.shape} ".encode() + values.tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class RewardLabels:
    """Rewards [T] of episodes, by `episode_key`. Called with an episode's columns it gives them, as `label_rewards` wants it."""

    rewards: dict[str, np.ndarray]  # float32 [T] each
    about: dict[str, Any] = field(default_factory=dict)  # the data set's name and fingerprint, and how the rewards were made
    name: str = field(default="reward labels", compare=False)

    @classmethod
    def of(cls, dataset: Dataset, rewards: np.ndarray, about: Mapping[str, Any]) -> RewardLabels:
        """rewards: [R], one for each row. Raises UserError where two episodes that are alike got different ones."""
        found: dict[str, np.ndarray] = {}
        for episode, (start, end) in enumerate(zip(dataset.episode_start.tolist(), dataset.episode_end.tolist(), strict=True)):
            key = episode_key(episode_columns(dataset, start, end))
            values = np.asarray(rewards[start:end], np.float32)
            if key in found and not np.array_equal(found[key], values):
                raise UserError(f"{dataset.spec.name}: episode {episode} is the same as an earlier one, and got other rewards")
            found[key] = values
        return cls(found, {"data": dataset.spec.name, "fingerprint": dataset.fingerprint, **about})

    def __call__(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Rewards [T]. Raises UserError for an episode that has none."""
        found = self.rewards.get(episode_key(columns))
        if found is None:
            raise UserError(
                f"{self.name} has no rewards for an episode of these data; it was made for {self.about.get('data')}: label these data with "
                "offrl data label, and read them with the same dataset. settings"
            )
        return found

    def save(self, path: str | Path) -> None:
        """Write a .safetensors file. Raises UserError."""
        path = Path(path)
        if path.suffix != ".safetensors":
            raise UserError(f"{path}: reward labels are kept in a .safetensors file")
        values = list(self.rewards.values())
        tensors = {
            "rewards": torch.from_numpy(np.concatenate(values) if values else np.zeros(0, np.float32)),
            "lengths": torch.tensor([len(v) for v in values], dtype=torch.int64),
            "keys": torch.tensor([list(bytes.fromhex(key)) for key in self.rewards], dtype=torch.uint8).reshape(-1, 32),
        }
        checkpoint.write(path, tensors, {"kind": KIND, "about": self.about}, " Free some space, or choose another file with out=.")

    @classmethod
    def load(cls, path: str | Path) -> RewardLabels:
        """Read what `save` wrote. Raises UserError for a missing, damaged or other file."""
        tensors, meta = checkpoint.read(Path(path))
        if meta.get("kind") != KIND:
            raise UserError(f"{path} holds no reward labels (`offrl data label` writes them)")
        keys = [bytes(row).hex() for row in tensors["keys"].tolist()]
        values = [v.numpy().copy() for v in tensors["rewards"].split(tensors["lengths"].tolist())]
        return cls(dict(zip(keys, values, strict=True)), meta["about"], str(path))


def load_labels(path: Path) -> Labeller:
    """A file's labeller of rewards: a `PreferenceModel` or `RewardLabels`. Raises UserError."""
    from offrl.data.preferences import KIND as PREFERENCES
    from offrl.data.preferences import PreferenceModel

    kind = checkpoint.read(path)[1].get("kind")
    if kind == KIND:
        return RewardLabels.load(path)
    if kind == PREFERENCES:
        return PreferenceModel.load(path)
    raise UserError(f"{path} holds no rewards: neither a preference model nor what `offrl data label` writes")
