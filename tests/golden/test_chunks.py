"""Windows of actions (chunks): at a success, at a time-out, at all other ends; beside brute force over random ends.

Three conventions, of a trajectory that goes on after a success, as OGBench's do (rewards 0 and masks 0 from there on):

- ours: the success ends the episode, and with it the window: `span` steps, masks 0, the rewards up to it. Such a window
  is `whole`: nothing after it is to be valued. A time-out cuts a window too, which is then not whole; what followed it,
  where the data hold that, is its next observation. The last action is repeated, and `valid` leaves it out of losses.
- Q-chunking's code on OGBench's data: windows run on over successes, with the smallest mask of the window and the sum
  of all its rewards, until the trajectory ends; those that cross its end have the next trajectory's actions there,
  count for cloning up to the end, and not at all for Q. No window begins at the last h - 1 rows of the file.
- robomimic (and Diffusion Policy): a demonstration ends at its first success; windows begin at all of its rows and
  repeat the last action to their full length, and a cloning loss counts the repeated ones like any other.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from offrl import rng
from offrl.data import load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.chunks import VALID, WHOLE, ChunkSampler, valid_mean
from offrl.data.samplers.transitions import SPAN, TransitionSampler, discounted
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

H = 3
# rows:    0  1  2  3  4 | 5  6 | 7 | 8  9 10      a success at 4, a time-out at 6, a success alone at 7, the file's end
# after 10
TERMINAL, TIMEOUT, ROWS = (4, 7), (6, 10), 11
REWARDS = np.array([-1.0, -1, -1, -2, 0, -1, -3, 0, -4, -1, -2])


def hand_made(stored: bool) -> Dataset:
    """Observations and actions say their row; `stored`: what followed the last rows is known, and is the row plus
    100.
    """
    i = np.arange(ROWS, dtype=np.float32)
    ends = np.isin(i, (*TERMINAL, *TIMEOUT))
    after = np.where(ends, i + 100, i + 1)[:, None] if stored else None
    flags = np.isin(i, TERMINAL), np.isin(i, TIMEOUT)
    return from_arrays(
        i[:, None], i[:, None] / 20, REWARDS, *flags, next_observations=after, action_low=-1.0, action_high=1.0
    )


def every(dataset: Dataset, length: int, draws: int = 4000) -> dict[int, dict[str, Any]]:
    """The window that begins at each row, by drawing many."""
    sampler = ChunkSampler(length)
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), draws)
    rows = batch["observations"][:, 0].round().long()
    return {int(r): {k: v[int((rows == r).nonzero()[0])] for k, v in batch.items()} for r in rows.unique()}


def numbers(x: Tensor) -> list[float]:
    return [round(float(v), 4) for v in x.reshape(-1)]


def test_windows_by_hand() -> None:
    w = every(hand_made(stored=True), H)
    assert sorted(w) == list(range(ROWS))
    expected = {  # row: (actions, valid, rewards, span, mask, whole, next observation; None where nothing is looked at)
        0: ([0, 1, 2], [1, 1, 1], [-1, -1, -1], 3, 1, 1, 3),
        2: ([2, 3, 4], [1, 1, 1], [-1, -2, 0], 3, 0, 1, None),  # the success is the last step
        3: ([3, 4, 4], [1, 1, 0], [-2, 0, 0], 2, 0, 1, None),  # and here the window is cut by it, and complete
        4: ([4, 4, 4], [1, 0, 0], [0, 0, 0], 1, 0, 1, None),
        5: ([5, 6, 6], [1, 1, 0], [-1, -3, 0], 2, 1, 0, 106),  # cut by a time-out: what followed it is known
        6: ([6, 6, 6], [1, 0, 0], [-3, 0, 0], 1, 1, 0, 106),
        7: ([7, 7, 7], [1, 0, 0], [0, 0, 0], 1, 0, 1, None),  # an episode of one row
        8: ([8, 9, 10], [1, 1, 1], [-4, -1, -2], 3, 1, 1, 110),
        10: ([10, 10, 10], [1, 0, 0], [-2, 0, 0], 1, 1, 0, 110),
    }
    for row, (actions, valid, rewards, span, mask, whole, following) in expected.items():
        window = w[row]
        assert numbers(window["actions"] * 20) == actions
        assert window[VALID].tolist() == [bool(v) for v in valid] and window[VALID].dtype == torch.bool
        assert numbers(window["step_rewards"]) == rewards and float(window["rewards"]) == REWARDS[row]
        assert int(window[SPAN]) == span and float(window["masks"]) == mask and float(window[WHOLE]) == whole
        assert following is None or numbers(window["next_observations"]) == [following]


def test_windows_without_stored_successors() -> None:
    """What follows a time-out is then not known: no window begins or ends there, and the one before it is cut a step
    earlier.
    """
    w = every(hand_made(stored=False), H)
    assert sorted(w) == [r for r in range(ROWS) if r not in TIMEOUT]
    assert numbers(w[5]["actions"] * 20) == [5, 5, 5] and int(w[5][SPAN]) == 1
    assert float(w[5][WHOLE]) == 0.0 and numbers(w[5]["next_observations"]) == [6]
    assert int(w[8][SPAN]) == 2 and numbers(w[8]["next_observations"]) == [10] and float(w[8][WHOLE]) == 0.0
    assert numbers(w[3]["actions"] * 20) == [3, 4, 4] and float(w[3][WHOLE]) == 1.0  # a success needs no successor


def test_returns_of_windows_by_hand() -> None:
    """With g = .9: r = (-1, -2, 0) is -2.8 and g^3 = .729; cut after two steps the sum is the same, and g^2 counts (or
    nothing).
    """
    flags = np.array([0, 0, 1]) > 0
    rewards = np.array([-1.0, -2, 0])
    s = np.arange(3.0)[:, None]
    whole = every(
        from_arrays(s, s / 5, rewards, ~flags & False, flags, next_observations=s + 1, action_low=-1, action_high=1), 3
    )[0]
    value, gamma = discounted({k: v.unsqueeze(0) for k, v in whole.items()}, 0.9)
    assert float(value) == pytest.approx(-2.8) and float(gamma) == pytest.approx(0.729)
    for terminal in (False, True):
        ends = np.array([0, 1, 0, 0, 1]) > 0
        s, rewards = np.arange(5.0)[:, None], np.array([-1.0, -2, 0, 0, 0])
        after = np.where(ends, s[:, 0] + 50, s[:, 0] + 1)[:, None]
        flags = ends & terminal, ends & ~np.bool_(terminal)
        cut = every(from_arrays(s, s / 5, rewards, *flags, next_observations=after, action_low=-1, action_high=1), 3)[0]
        value, gamma = discounted({k: v.unsqueeze(0) for k, v in cut.items()}, 0.9)
        assert float(value) == pytest.approx(-2.8) and float(gamma) == pytest.approx(0.81)
        assert float(cut["masks"]) == float(cut[WHOLE] == 0.0) == float(not terminal)
        assert terminal or numbers(cut["next_observations"]) == [51]


# ---- beside brute force


def brute(dataset: Dataset, row: int, h: int) -> dict[str, Any] | None:
    """The window that begins at a row, step by step; None where none does."""
    columns = {k: v.numpy() for k, v in dataset.columns.items()}
    usable = columns["successor_known"] | columns["terminations"]
    if not usable[row]:
        return None
    end = next(int(e) for e in dataset.episode_end.tolist() if e > row)
    steps = [row]
    while len(steps) < h and steps[-1] + 1 < end and usable[steps[-1] + 1]:
        steps.append(steps[-1] + 1)
    last = steps[-1]
    padded = steps + [last] * (h - len(steps))
    ended = bool(columns["terminations"][last])
    return {
        "observations": columns["observations"][row],
        "actions": columns["actions"][padded],
        "step_rewards": [float(columns["rewards"][s]) for s in steps] + [0.0] * (h - len(steps)),
        VALID: [True] * len(steps) + [False] * (h - len(steps)),
        SPAN: len(steps),
        "masks": 0.0 if ended else 1.0,
        WHOLE: 1.0 if ended or len(steps) == h else 0.0,
        "next_observations": columns["next_observations"][last],
    }


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=8),
    terminal=st.lists(st.booleans(), min_size=8, max_size=8),
    stored=st.booleans(),
    h=st.integers(1, 6),
)
def test_windows_of_random_episodes(lengths: list[int], terminal: list[bool], stored: bool, h: int) -> None:
    """Also those of one row. No window holds a row of another episode, and those of `n_step` are the same but for the
    actions.
    """
    n = sum(lengths)
    ends = np.zeros(n, bool)
    ends[np.cumsum(lengths) - 1] = True
    died = np.zeros(n, bool)
    died[ends] = terminal[: len(lengths)]
    i, g = np.arange(n, dtype=np.float32), np.random.default_rng(n)
    after = np.where(ends, i + 1000, i + 1)[:, None].astype(np.float32) if stored else None
    dataset = from_arrays(
        i[:, None],
        g.uniform(-1, 1, (n, 2)),
        g.normal(size=n),
        died,
        ends & ~died,
        next_observations=after,
        action_low=-1.0,
        action_high=1.0,
    )
    expected = {r: w for r in range(n) if (w := brute(dataset, r, h)) is not None}
    if not expected or h > max(w[SPAN] for w in (brute(dataset, r, n) for r in expected) if w is not None):
        with pytest.raises(UserError, match=r"transition|longest episode"):
            ChunkSampler(h).prepare(dataset)
        return
    found = every(dataset, h, 800)
    assert sorted(found) == sorted(expected)
    for row, window in expected.items():
        for name, value in window.items():
            if name == "next_observations" and window["masks"] == 0.0:
                continue
            np.testing.assert_allclose(
                found[row][name].numpy(), value, rtol=1e-6, err_msg=f"{name} of the window at {row}"
            )
    if h > 1:
        key = rng.make_key(3)
        chunks, steps = ChunkSampler(h), TransitionSampler(n_step=h)
        a, b = chunks(chunks.prepare(dataset), key, 50), steps(steps.prepare(dataset), key, 50)
        assert torch.equal(a["actions"][:, 0], b["actions"])
        assert all(torch.equal(a[k], b[k]) for k in b if k != "actions")


# ---- where the data lie, and how often they are drawn


def test_weighted_episodes() -> None:
    """A row is drawn as often as its episode's weight says, whatever its window."""
    dataset = hand_made(stored=True)
    weights = torch.tensor([0.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    dataset = dataclasses.replace(dataset, weights=weights)
    sampler = ChunkSampler(H)
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), 9000)
    counts = torch.bincount(batch["observations"][:, 0].long(), minlength=ROWS) / 1000.0
    expected = torch.tensor([0.0] * 5 + [3.0] * 2 + [1.0] * 4) * 9 / 10
    torch.testing.assert_close(counts, expected, rtol=0.0, atol=0.15)
    assert bool((batch["actions"][batch["observations"][:, 0] == 6] == 0.3).all())  # the window of a last row


def test_from_disk_as_from_memory(tmp_path: Path) -> None:
    i = np.arange(2000, dtype=np.float32)
    np.savez(tmp_path / "data.npz", observations=np.stack([i, -i], 1), actions=np.sin(i)[:, None], rewards=i,
             terminations=i % 97 == 96, truncations=i % 250 == 249)  # fmt: skip
    config = {"name": str(tmp_path / "data.npz"), "format": "columns", "cache_dir": str(tmp_path / "cache")}
    memory, disk = (load_dataset(DatasetConfig(**config, memory=m)) for m in ("device", "mmap"))  # type: ignore[arg-type]
    assert disk.mapped and not memory.mapped
    for h in (1, 5, 97):
        a, b = (ChunkSampler(h)(ChunkSampler(h).prepare(d), rng.make_key(4), 300) for d in (memory, disk))
        assert a.keys() == b.keys() and all(torch.equal(v, b[k]) for k, v in a.items())


def test_replicas_draw_their_own() -> None:
    sampler = ChunkSampler(H)
    source = sampler.prepare(hand_made(stored=True))
    keys = rng.fold_in(rng.make_key(0), torch.arange(3))
    together = vmap(lambda k: sampler(source, k, 7))(keys)
    for i, key in enumerate(keys):
        assert all(torch.equal(together[name][i], value) for name, value in sampler(source, key, 7).items())


# ---- lengths


def test_a_chunk_longer_than_most_episodes_is_fine_and_than_all_is_not() -> None:
    dataset = hand_made(stored=True)
    w = every(dataset, 5)  # of the first episode alone
    assert int(w[0][SPAN]) == 5 and float(w[0][WHOLE]) == 1.0 and int(w[8][SPAN]) == 3 and float(w[8][WHOLE]) == 0.0
    with pytest.raises(
        UserError,
        match=r"algo\.length=6: no chunk of so many actions.*longest episode has 5 transitions; take a smaller",
    ):
        ChunkSampler(6).prepare(dataset)
    with pytest.raises(UserError, match=r"algo\.length=2.*has 1 transition;"):  # an order that is not known
        ChunkSampler(2).prepare(
            from_arrays(np.eye(3), np.zeros((3, 1)), np.zeros(3), np.ones(3, bool), action_low=-1.0, action_high=1.0)
        )
    with pytest.raises(UserError, match=r"algo\.n_step=2.*order is not known"):
        TransitionSampler(n_step=2).prepare(
            from_arrays(np.eye(3), np.zeros((3, 1)), np.zeros(3), np.ones(3, bool), action_low=-1.0, action_high=1.0)
        )


def test_helpers() -> None:
    chunk = torch.arange(12.0).reshape(2, 3, 2)
    valid = torch.tensor([[True, True, True], [True, False, False]])
    # over all that could be there
    assert float(valid_mean(chunk, valid)) == pytest.approx((0 + 1 + 2 + 3 + 4 + 5 + 6 + 7) / 12)
