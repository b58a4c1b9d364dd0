"""A text dataset as tokens: flat arrays of whole episodes, kept on disk where making them took long.

An episode is the stream obs_0, action_0, obs_1, ..., action_{T-1}, final obs (where it is known), each text encoded on
its own. Shapes in comments: K tokens in all, R turns, E episodes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.lm.models.tokenizer import Tokenizer
from offrl.system.files import BUILDING, cache_dir, discard_entry

SLOW = 2.0  # seconds; what takes longer to encode is kept on disk
ARRAYS = ("ids", "is_action", "turn", "obs_begin", "action_begin", "action_end", "final_begin", "final_end")


@dataclass(frozen=True)
class Stream:
    """Episodes as tokens, in memory or memory-mapped."""

    ids: np.ndarray  # [K] int32
    is_action: np.ndarray  # [K] bool: tokens of actions, which a policy chooses
    # [K] int32: the turn (row of the data) that each token belongs to; a final observation to the last one
    turn: np.ndarray
    obs_begin: np.ndarray  # [R] int64
    action_begin: np.ndarray  # [R] int64
    action_end: np.ndarray  # [R] int64, exclusive
    final_begin: np.ndarray  # [E] int64: of the final observation
    # [E] int64, exclusive: the episode's end; equals final_begin where that observation is not known
    final_end: np.ndarray


def stream(dataset: Dataset, tokenizer: Tokenizer, append_end: bool) -> Stream:
    """The data's episodes as tokens, kept on disk if making them took long. append_end: actions get the tokenizer's end
    token.

    Raises UserError for other than text data.
    """
    if not dataset.spec.text:
        raise UserError(
            f"{dataset.spec.name} is no text: language-model policies need a text dataset, such as text-maze"
        )
    folder = cache_dir() / "tokens" / _key(dataset, tokenizer, append_end)
    stored = _read(folder)
    if stored is not None:
        return stored
    start = time.perf_counter()
    result = encode(dataset, tokenizer, append_end)
    if time.perf_counter() - start > SLOW:
        _write(folder, result)
        return _read(folder) or result
    return result


def encode(dataset: Dataset, tokenizer: Tokenizer, append_end: bool) -> Stream:
    """The `stream` of the data, always made anew."""
    columns = {n: dataset.columns[n].cpu().numpy() for n in ("observations", "actions", "next_observations")}
    known = dataset.columns["successor_known"].cpu().numpy()
    texts = tokenizer.encode(dataset.strings)
    sizes = np.array([len(t) for t in texts], np.int64)
    flat = np.concatenate([np.zeros(0, np.int32), *texts])
    offset = np.cumsum(sizes) - sizes
    start, end = dataset.episode_start.cpu().numpy(), dataset.episode_end.cpu().numpy()
    rows, extra = len(dataset), int(append_end)
    last = end - 1
    final = np.where(known[last], sizes[columns["next_observations"][last]], 0)
    obs, act = sizes[columns["observations"]], sizes[columns["actions"]] + extra
    episode = np.repeat(np.arange(len(start)), end - start)
    final_before = np.concatenate([[0], np.cumsum(final)])[episode]  # final observations of earlier episodes
    turn_end = np.cumsum(obs + act)
    obs_begin = turn_end - obs - act + final_before
    action_begin = obs_begin + obs
    action_end = action_begin + act
    final_begin = action_end[last]
    total = int(final_begin[-1] + final[-1]) if rows else 0
    ids = np.full(total, tokenizer.end if tokenizer.end is not None else 0, np.int32)  # end tokens stay
    is_action, turn = np.zeros(total, bool), np.zeros(total, np.int32)

    def put(begin: np.ndarray, text: np.ndarray, row: np.ndarray, action: bool) -> None:
        size = sizes[text]
        step = np.arange(int(size.sum())) - np.repeat(np.cumsum(size) - size, size)
        index = np.repeat(begin, size) + step
        ids[index] = flat[np.repeat(offset[text], size) + step]
        turn[index] = np.repeat(row, size)
        if action:
            is_action[index] = True

    all_rows = np.arange(rows)
    put(obs_begin, columns["observations"], all_rows, False)
    put(action_begin, columns["actions"], all_rows, True)
    if extra:
        is_action[action_end - 1], turn[action_end - 1] = True, all_rows
    put(final_begin[known[last]], columns["next_observations"][last][known[last]], last[known[last]], False)
    return Stream(ids, is_action, turn, obs_begin, action_begin, action_end, final_begin, final_begin + final)


def _key(dataset: Dataset, tokenizer: Tokenizer, append_end: bool) -> str:
    digest = hashlib.sha256(f"2 {tokenizer.identity} {append_end}".encode())
    for text in dataset.strings:
        digest.update(f"{len(text)} {text}".encode("utf-8", "surrogatepass"))
    for name in ("observations", "actions", "next_observations", "successor_known"):
        digest.update(dataset.columns[name].cpu().numpy().tobytes())
    digest.update(dataset.episode_end.cpu().numpy().tobytes())
    return digest.hexdigest()[:24]


def _read(folder: Path) -> Stream | None:
    try:
        sizes = json.loads((folder / "sizes.json").read_text())
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="c", allow_pickle=False) for name in ARRAYS}
        if {name: len(a) for name, a in arrays.items()} != sizes:
            return None
        return Stream(**arrays)
    except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: made anew
        return None


def _write(folder: Path, content: Stream) -> None:
    """Write the arrays to disk; a no-op where there is no room."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=folder.parent, prefix=BUILDING))
        try:
            for name in ARRAYS:
                np.save(staging / f"{name}.npy", getattr(content, name), allow_pickle=False)
            (staging / "sizes.json").write_text(json.dumps({name: len(getattr(content, name)) for name in ARRAYS}))
            discard_entry(folder, rf"({'|'.join(ARRAYS)})\.npy|sizes\.json")  # an older one, or one that is damaged
            os.replace(staging, folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    except OSError:
        return
