"""Rewards and costs that a function or a preference model gives, in place of the recorded ones."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl import registry
from offrl.data.containers.guard import reading
from offrl.data.dataset import Dataset
from offrl.errors import UserError, nearest
from offrl.system import files as checkpoint
from offrl.system.user_code import guarded, python_object

Labeller = Callable[[dict[str, np.ndarray]], Any]
FORMS = "file.py:function, package.module:function, or a preference model or reward labels (.safetensors)"


def label_rewards(dataset: Dataset, labels: str | Labeller) -> Dataset:
    """The dataset with the rewards that `labels` gives: a function, or the name of one; see `labeller`.

    The function is called once for each episode of T steps, with copies of its columns: observations [T, *O] as
    recorded, actions [T, A] in the environment's units or [T] int64, rewards [T] as recorded, terminations,
    truncations, next_observations, the columns of the user's own, and the streams by their names, images [T, H, W, C]
    of uint8, and as next_NAME those that follow (a row's own where that is not known). It returns [T] numbers.
    `Dataset.raw_returns`, by which datasets are compared, stay those of the recorded rewards. Raises UserError, naming
    episode and row, for what it raises and for other than T finite numbers.
    """
    return _labelled(dataset, labels, "reward", "returns")


def label_costs(dataset: Dataset, labels: str | Labeller) -> Dataset:
    """The same for costs, of which none may be negative. The function sees the rewards as `label_rewards` gave them."""
    labelled = _labelled(dataset, labels, "cost", "sums")
    return replace(labelled, spec=replace(labelled.spec, costs=True))


def _labelled(dataset: Dataset, labels: str | Labeller, quantity: str, sums: str) -> Dataset:
    """sums: what the totals of episodes are called."""
    setting, column = f"dataset.{quantity}_labels", f"{quantity}s"
    function, code = labeller(labels, setting) if isinstance(labels, str) else (labels, _code_of(labels))
    name = labels if isinstance(labels, str) else getattr(labels, "__name__", type(labels).__name__)
    if dataset.spec.observation_mean is not None:
        raise UserError(f"{dataset.spec.name}: label {column} before observations are normalised")
    values = np.empty(len(dataset), np.float32)
    for episode, (start, end) in enumerate(dataset.spans()):
        where = f"{setting}={name}, episode {episode}"
        following = {f"next_{n}": s.values[s.following[start:end]].numpy() for n, s in dataset.stores.items()}
        inputs = episode_columns(dataset, start, end) | following
        values[start:end] = call_labeller(where, function, inputs, start, quantity)
    r = np.add.reduceat(values, dataset.bounds()[0], dtype=np.float64)
    note = f"{column} are those of {name}: {sums} {r.mean():.6g} on average, from {r.min():.6g} to {r.max():.6g}"
    fingerprint = hashlib.sha256(f"{dataset.fingerprint} {column} {code}".encode()).hexdigest()
    columns = {column: torch.from_numpy(values)}
    return dataset.changed(f"{quantity}_labels {name}", note, columns, fingerprint=fingerprint)


def call_labeller(
    where: str,
    function: Labeller,
    columns: dict[str, np.ndarray],
    first_row: int | None = None,
    quantity: str = "reward",
) -> np.ndarray:
    """The rewards (or costs, quantity "cost") float32 [T] that `function` gives for the columns of an episode of T
    steps, which begins at `first_row` of the data.

    Raises UserError, which begins with `where`, for what it raises, for other than T finite numbers and for a cost
    below 0.
    """
    steps = len(columns["rewards"])
    values = np.asarray(guarded(where, function, columns))
    if values.dtype.kind not in "biuf":
        raise UserError(f"{where}: it gave {values.dtype} values, not numbers")
    if values.shape not in ((steps,), (steps, 1)):
        raise UserError(
            f"{where}: it gave {quantity}s of shape {list(values.shape)}; [{steps}] is due, one for each step"
        )
    with np.errstate(over="ignore"):
        numbers = values.reshape(-1).astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(numbers) | ((numbers < 0.0) & (quantity == "cost")))
    if len(bad):
        row = "" if first_row is None else f" (row {first_row + bad[0]})"
        raise UserError(f"{where}: the {quantity} of its step {bad[0]}{row} is {values.reshape(-1)[bad[0]]}")
    return numbers


def episode_columns(dataset: Dataset, start: int, end: int) -> dict[str, np.ndarray]:
    """Copies of the columns of rows start to end - 1, for code of the user's: actions in the environment's units;
    images [T, H, W, C] and rows of tables by their names.
    """
    columns = {
        name: column[start:end].cpu().numpy().copy()
        for name, column in dataset.columns.items()
        if name != "successor_known"
    }
    for name, store in dataset.stores.items():
        columns[name] = store.values[store.entries[start:end]].cpu().numpy()
    spec = dataset.spec
    if not spec.discrete:
        low, high = spec.action_bounds
        if (low != -1.0).any() or (high != 1.0).any():
            columns["actions"] = low + (columns["actions"] + 1.0) * (high - low) / 2.0
    return columns


def labeller(text: str, setting: str = "dataset.reward_labels") -> tuple[Labeller, str]:
    """The function that `text` names, and a hash of its code: "file.py:function", "package.module:function" (or a
    callable object) or the file of a `PreferenceModel` or of `RewardLabels`.

    The hash is of the whole file that it stands in, so that data labelled by a function that was changed since count as
    other data. Raises UserError, which begins with `setting`.
    """
    path = Path(text).expanduser()
    if path.suffix == ".safetensors":
        return load_labels(path), hashlib.sha256(path.read_bytes()).hexdigest()
    module, colon, name = text.rpartition(":")
    if not colon or not module or not name.replace(".", "").isidentifier():
        files = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UserError(f"{setting}={text} names no function; it is {FORMS}.{nearest(path.name, files)}")
    function, source = python_object(module, name, text)
    if not callable(function) or isinstance(function, type):
        raise UserError(f"{setting}={text} is a {type(function).__name__}, not a function of an episode's columns")
    code = f"{name} ".encode() + (source.read_bytes() if source is not None and source.is_file() else b"")
    return function, hashlib.sha256(code).hexdigest()


def _code_of(function: Labeller) -> str:
    """A hash of what is known of a function that was handed over: its name and bytecode."""
    code = getattr(function, "__code__", None)
    digest = getattr(function, "digest", None)  # a PreferenceModel's
    identity = f"{getattr(function, '__qualname__', '')} {digest() if callable(digest) else ''}".encode()
    return hashlib.sha256(
        identity + (b"" if code is None else code.co_code + repr(code.co_consts).encode())
    ).hexdigest()


KIND = "offrl reward labels"
PARTS = ("observations", "actions", "rewards")


def episode_key(columns: Mapping[str, np.ndarray]) -> str:
    """A hash of an episode's observations, images too, actions and recorded rewards: the same wherever it stands, in
    whichever part of the data.
    """
    digest = hashlib.sha256()
    images = [n for n, v in columns.items() if v.ndim == 4 and v.dtype == np.uint8 and not n.startswith("next_")]
    for name in (*PARTS, *sorted(images)):
        values = np.ascontiguousarray(columns[name])
        digest.update(f"{name} {values.dtype.str} {values.shape} ".encode() + values.tobytes())
    return digest.hexdigest()


@registry.register("reward_labels", KIND)
@dataclass(frozen=True)
class RewardLabels:
    """Rewards [T] of episodes, by `episode_key`. Called with an episode's columns it gives them, as `label_rewards`
    wants it.
    """

    rewards: dict[str, np.ndarray]  # float32 [T] each
    # the dataset's name and fingerprint, and how the rewards were made
    metadata: dict[str, Any] = field(default_factory=dict)
    name: str = field(default="reward labels", compare=False)

    @classmethod
    def of(cls, dataset: Dataset, rewards: np.ndarray, metadata: Mapping[str, Any]) -> RewardLabels:
        """rewards: [R], one for each row. Raises UserError where two episodes that are alike got different ones."""
        columns: dict[str, np.ndarray] = {}
        for episode, (start, end) in enumerate(dataset.spans()):
            key = episode_key(episode_columns(dataset, start, end))
            values = np.asarray(rewards[start:end], np.float32)
            if key in columns and not np.array_equal(columns[key], values):
                raise UserError(
                    f"{dataset.spec.name}: episode {episode} is the same as an earlier one, and got other rewards"
                )
            columns[key] = values
        return cls(columns, {"data": dataset.spec.name, "fingerprint": dataset.fingerprint, **metadata})

    def __call__(self, columns: Mapping[str, np.ndarray]) -> np.ndarray:
        """Rewards [T]. Raises UserError for an episode that has none."""
        rewards = self.rewards.get(episode_key(columns))
        if rewards is None:
            raise UserError(
                f"{self.name} has no rewards for an episode of these data; it was made for "
                f"{self.metadata.get('data')}: label these data with offrl data label, and read them with the same "
                "dataset. settings"
            )
        return rewards

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
        checkpoint.write(
            path, tensors, {"kind": KIND, "about": self.metadata}, " Free some space, or choose another file with out=."
        )

    @classmethod
    def load(cls, path: str | Path) -> RewardLabels:
        """Read what `save` wrote. Raises UserError for a missing, damaged or other file."""
        tensors, meta = checkpoint.read(Path(path))
        if meta.get("kind") != KIND:
            raise UserError(f"{path} holds no reward labels (`offrl data label` writes them)")
        with reading(path, " as reward labels"):
            rewards, lengths, keys = (tensors[name] for name in ("rewards", "lengths", "keys"))
            if (
                rewards.ndim != 1
                or not rewards.is_floating_point()
                or lengths.ndim != 1
                or keys.shape != (len(lengths), 32)
            ):
                raise UserError(
                    f"{path} is damaged: its rewards have shape {list(rewards.shape)}, its episodes' keys "
                    f"{list(keys.shape)}"
                )
            if not isinstance(meta["about"], dict):
                raise UserError(f"{path} is damaged: it does not say what made its rewards")
            values = [v.numpy().copy() for v in rewards.split(lengths.tolist())]
            return cls(
                dict(zip([bytes(row).hex() for row in keys.tolist()], values, strict=True)), meta["about"], str(path)
            )


def load_labels(path: Path) -> Labeller:
    """The labeller of rewards in a file, by what the file says it is: `RewardLabels` or a preference model. Raises
    UserError.
    """
    kind = registry.names("reward_labels").get(str(checkpoint.read(path)[1].get("kind")))
    if kind is not None:
        return kind.load(path)
    raise UserError(f"{path} holds no rewards: neither a preference model nor what `offrl data label` writes")
