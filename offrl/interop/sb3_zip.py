"""Zip files of Stable-Baselines3, read without unpickling anything.

A zip holds `policy.pth` (tensors, read with `weights_only`) and `data` (JSON, whose values that JSON cannot hold are
pickles, which stay closed, beside a readable summary, which says which activation it has).
"""

from __future__ import annotations

import dataclasses
import io
import json
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.data.containers.guard import DAMAGED, reading, refuse_growth
from offrl.data.containers.plain_files import refuse_special
from offrl.errors import UserError, first_line, warn
from offrl.interop.sb3 import CURE, Actor, actor_from

# arguments of SB3's policies that leave the actor's forward pass as it is (or that the tensors show)
HARMLESS = (
    "net_arch",
    "log_std_init",
    "optimizer_class",
    "optimizer_kwargs",
    "n_critics",
    "n_quantiles",
    "ortho_init",
    "normalize_images",
    "share_features_extractor",
    "full_std",
    "use_sde",
    "dist_kwargs",
    "use_expln",
)
DIGITS = 7  # of the number of action dimensions


def read_zip(path: Path, low: np.ndarray | None, high: np.ndarray | None) -> Actor:
    """The policy of a zip that `model.save` of SB3 (or sb3-contrib) wrote. Nothing is unpickled.

    `low`, `high`: the environment's range of actions; used where the file does not say its own. Raises UserError when
    the file is damaged, or holds a policy that cannot be known without running its code.
    """
    where = str(path)
    blob, content = _members(path)
    tensors = _tensors(blob, where)
    with reading(f"{where}: 'data'"):
        data = json.loads(content) if content else {}
    data = _table(data, f"{where}: data")
    _refuse(data, where)
    space = _table(data.get("action_space"), f"{where}: action_space")
    own_low, own_high = (_bounds(space, key) for key in ("low", "high"))
    if own_low is not None and own_high is not None:
        if own_low.shape != own_high.shape:
            raise UserError(
                f"{where}: the range of its actions has {own_low.size} smallest values and {own_high.size} largest ones"
            )
        if low is not None and high is not None and not _same_range(own_low, own_high, low, high):
            warn(
                f"{path} was trained for actions in {_range(own_low, own_high)}, and here they are in "
                f"{_range(low, high)}"
            )
        low, high = own_low, own_high
    kwargs = _table(data.get("policy_kwargs"), f"{where}: policy_kwargs")
    discrete = "discrete" in str(space.get(":type:", "")).lower()
    rate = data.get("exploration_rate")
    clip_mean = _number(kwargs.get("clip_mean"), 2.0)
    actor = actor_from(
        tensors, activation=_activation(data, where), low=low, high=high, discrete=discrete,
        epsilon=_number(rate, 0.05), clip_mean=clip_mean, where=where,
    )  # fmt: skip
    return _normalised(actor, path)


def _members(path: Path) -> tuple[bytes, bytes]:
    """policy.pth and data of the zip, as they are. Raises UserError."""
    refuse_special(path)
    with reading(path), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if "policy.pth" not in names:
            raise UserError(f"{path} is no Stable-Baselines3 model: it has no policy.pth")
        _refuse_growth(archive, str(path))
        return archive.read("policy.pth"), archive.read("data") if "data" in names else b""


def _refuse_growth(archive: zipfile.ZipFile, where: str) -> None:
    """Raises UserError for a zip whose members would unpack to too much; what they declare is the most that is read of
    them.
    """
    for member in archive.infolist():
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):  # others unpack without a bound
            raise UserError(f"{where}: '{member.filename[:80]}' is packed by a method that SB3 does not use; {DAMAGED}")
        refuse_growth(f"{where}: '{member.filename[:80]}'", member.file_size, member.compress_size)


def _tensors(blob: bytes, where: str) -> dict[str, Tensor]:
    """The tensors of policy.pth. Raises UserError for anything else, and for more numbers than the file holds."""
    with reading(f"{where}: 'policy.pth'"):
        if zipfile.is_zipfile(
            io.BytesIO(blob)
        ):  # torch's format since 1.6; its members are stored as they are, but need not be
            with zipfile.ZipFile(io.BytesIO(blob)) as archive:
                _refuse_growth(archive, f"{where}: policy.pth")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensors = torch.load(io.BytesIO(blob), weights_only=True, map_location="cpu")
    except Exception as error:  # whatever torch's restricted reader objects to
        reason = first_line(error)[:120]
        raise UserError(
            f"{where}: policy.pth holds more than tensors, and nothing is unpickled ({reason}). To use it, {CURE}"
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in tensors.items()
    ):
        raise UserError(f"{where}: policy.pth is no table of tensors")
    for name, value in tensors.items():
        plain = (
            value.layout == torch.strided
            and value.device.type == "cpu"
            and not value.is_quantized
            and not value.is_complex()
        )
        # a view can claim any shape of a few stored numbers, which computing with it would fill in
        if not plain or value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise UserError(
                f"{where}: policy.pth: '{name[:80]}' is no plain tensor, or claims more numbers than are stored; "
                f"{DAMAGED}"
            )
    return tensors


def _table(value: Any, where: str) -> dict[str, Any]:
    """An object of JSON; an empty one for null. Raises UserError for other values."""
    if value is None or isinstance(value, dict):
        return value or {}
    raise UserError(f"{where} is a {type(value).__name__}, where SB3 writes an object; {DAMAGED}")


def _refuse(data: Mapping[str, Any], where: str) -> None:
    """Raise UserError for what the tensors do not show: custom classes, other spaces."""
    module = str(_table(data.get("policy_class"), f"{where}: policy_class").get("__module__", "stable_baselines3"))
    if module.partition(".")[0] not in ("stable_baselines3", "sb3_contrib"):
        raise UserError(
            f"{where} has a policy class of its own ({module}), which only its code knows. To use it, {CURE}"
        )
    for name in ("observation_space", "action_space"):
        kind = str(_table(data.get(name), f"{where}: {name}").get(":type:", "")).rpartition(".")[2].strip("'>")
        allowed = ("Box", "") if name == "observation_space" else ("Box", "Discrete", "")
        if kind not in allowed:
            raise UserError(
                f"{where} has {name.replace('_', ' ')} {kind}; only {' and '.join(allowed[:-1])} is read. To use it, "
                f"{CURE}"
            )
    kwargs = _table(data.get("policy_kwargs"), f"{where}: policy_kwargs")
    extractor = str(kwargs.get("features_extractor_class", "FlattenExtractor"))
    if "FlattenExtractor" not in extractor:
        raise UserError(f"{where} has the features extractor {extractor}, which is not known here. To use it, {CURE}")
    known = (
        *HARMLESS,
        "activation_fn",
        "features_extractor_class",
        "features_extractor_kwargs",
        "clip_mean",
        ":type:",
        ":serialized:",
    )
    if strange := [k for k in kwargs if k not in known and (k, str(kwargs[k])) != ("squash_output", "False")]:
        raise UserError(f"{where}: what its policy_kwargs '{strange[0]}' does is not known here. To use it, {CURE}")


def _activation(data: Mapping[str, Any], where: str) -> str | None:
    """The name of the activation, None for the algorithm's default."""
    kwargs = data.get("policy_kwargs")
    if not data or kwargs is None:
        warn(f"{where} does not say its activation; taking the default of its algorithm")
        return None
    text = str(kwargs.get("activation_fn", ""))
    if not text:
        return None
    match = re.fullmatch(r"<class 'torch\.nn\.modules\.activation\.(\w+)'>", text)
    if match is None:
        raise UserError(f"{where} has the activation {text}, which is not known here. To use it, {CURE}")
    return match[1]


def _bounds(space: Mapping[str, Any], key: str) -> np.ndarray | None:
    """`low` or `high` of a Box as SB3 writes them for people: '[-1. -1.]', shortened where they are many."""
    text = str(space.get(key, ""))
    if "..." in text:
        numbers = set(re.findall(r"[-+]?\d[\d.e+-]*|inf|nan", text))
        size = re.findall(r"\d+", str(space.get("_shape", space.get("shape", ""))))
        once = len(numbers) == 1 and len(size) == 1 and len(size[0]) <= DIGITS
        text = " ".join(list(numbers) * int(size[0])) if once else ""
    try:
        values = np.array(
            [float(v) for v in text.replace("[", " ").replace("]", " ").replace(",", " ").split()], np.float32
        )
    except (ValueError, OverflowError):
        return None
    return values if values.size and np.isfinite(values).all() else None


def _same_range(low: np.ndarray, high: np.ndarray, here_low: np.ndarray, here_high: np.ndarray) -> bool:
    return low.size == here_low.size and np.allclose(low, here_low, 1e-3) and np.allclose(high, here_high, 1e-3)


def _range(low: np.ndarray, high: np.ndarray) -> str:
    return f"[{float(np.min(low)):.4g}, {float(np.max(high)):.4g}]"


def _number(value: Any, default: float) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return default


def _normalised(actor: Actor, path: Path) -> Actor:
    """With the statistics of VecNormalize where they lie beside the zip as arrays; a pickle of them is refused."""
    arrays = path.parent / "vecnormalize.npz"
    if arrays.is_file():
        with reading(arrays, " as the arrays mean and var of VecNormalize"):
            with zipfile.ZipFile(arrays) as archive:
                _refuse_growth(archive, str(arrays))
            with np.load(arrays, allow_pickle=False) as file:
                mean, var = (torch.as_tensor(np.asarray(file[k], np.float64)) for k in ("mean", "var"))
                epsilon, clip = (float(file[k]) if k in file else d for k, d in (("epsilon", 1e-8), ("clip_obs", 10.0)))
        if mean.shape != (actor.observation_dim,) or var.shape != mean.shape:
            raise UserError(
                f"{arrays} is for observations of {tuple(mean.shape)}, the policy takes {actor.observation_dim} numbers"
            )
        return dataclasses.replace(actor, mean=mean.float(), std=torch.sqrt(var + epsilon).float(), clip=clip)
    if (path.parent / "vecnormalize.pkl").exists():
        raise vecnormalize_error(path.parent / "vecnormalize.pkl")
    return actor


def vecnormalize_error(path: Path) -> UserError:
    """The error for a pickle of VecNormalize, with the cure."""
    return UserError(
        f"{path} holds VecNormalize's statistics as a pickle, which is not read. If you trust it, write them as "
        "arrays: "
        "v = pickle.load(open('vecnormalize.pkl', 'rb')); np.savez('vecnormalize.npz', mean=v.obs_rms.mean, "
        "var=v.obs_rms.var, "
        "epsilon=v.epsilon, clip_obs=v.clip_obs); or move the file away if the policy was trained without it"
    )
