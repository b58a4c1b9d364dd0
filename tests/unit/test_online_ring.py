"""The ring of played transitions, and batches of which a known share is the data's."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.transitions import TransitionSampler
from offrl.errors import UserError
from offrl.finetuning.replay.batches import MixedBatches
from offrl.finetuning.replay.ring import Column, Replay, Ring

COLUMNS: dict[str, Column] = {
    "observations": ((2,), torch.float32),
    "actions": ((), torch.int64),
    "rewards": ((), torch.float32),
    "next_observations": ((2,), torch.float32),
    "masks": ((), torch.float32),
}


def rows(numbers: list[int]) -> dict[str, np.ndarray]:
    """Rows that can be told apart: row i has reward i, action i, observations (i, i + 0.5)."""
    i = np.array(numbers)
    observations = np.stack([i, i + 0.5], 1).astype(np.float32)
    return {
        "observations": observations,
        "actions": i,
        "rewards": i.astype(np.float32),
        "next_observations": -observations,
        "masks": np.ones(len(i), np.float32),
    }


def ring(capacity: int = 4, replicas: int = 2, columns: dict[str, Column] = COLUMNS) -> Ring:
    return Ring(columns, replicas, capacity, torch.device("cpu"))


def held(made: Ring, n: int) -> list[int]:
    """Rewards of replica n's slots, in their order."""
    slots = torch.arange(int(made.counts[n])).expand(made.replicas, -1)
    return made.take(slots)["rewards"][n].int().tolist()


def data(count: int) -> Dataset:
    """Rows 1000, 1001, ...: each an episode of one step."""
    i = 1000 + np.arange(count)
    return from_arrays(np.stack([i, i], 1), np.arange(count) % 3, i, np.ones(count, bool), num_actions=3)


def test_the_oldest_rows_are_overwritten_and_replicas_do_not_mix() -> None:
    made = ring()
    made.add(np.array([0, 1, 0]), rows([1, 11, 2]))
    assert (held(made, 0), held(made, 1)) == ([1, 2], [11])
    made.add(np.array([0, 0, 0, 1]), rows([3, 4, 5, 12]))
    assert (held(made, 0), held(made, 1)) == ([5, 2, 3, 4], [11, 12])
    assert made.total.tolist() == [5, 2] and made.counts.tolist() == [4, 2]
    made.add(np.zeros(11, np.int64), rows(list(range(20, 31))))  # more at once than there is room for
    assert sorted(held(made, 0)) == [27, 28, 29, 30] and made.total.tolist() == [16, 2]
    batch = made.take(torch.tensor([[0], [1]]))
    assert batch["observations"].tolist() == [[[27.0, 27.5]], [[12.0, 12.5]]]  # 27 is the 13th row: slot 12 % 4
    assert batch["actions"].dtype == torch.int64 and batch["actions"].tolist() == [[27], [12]]
    assert {k: v.shape[2:] for k, v in batch.items()} == {k: torch.Size(shape) for k, (shape, _) in COLUMNS.items()}


def test_images_stay_bytes() -> None:
    pictures: dict[str, Column] = {"observations": ((2, 2), torch.uint8), "rewards": ((), torch.float32)}
    made = ring(columns=pictures)
    picture = np.arange(8, dtype=np.uint8).reshape(2, 2, 2)
    made.add(np.array([1, 1]), {"observations": picture, "rewards": np.array([1.0, 2.0], np.float32)})
    taken = made.take(torch.tensor([[0, 0], [1, 0]]))
    assert taken["observations"].dtype == torch.uint8
    assert taken["observations"][1].tolist() == picture[::-1].tolist()


def batches(
    mixing: float | None, size: int, counts: tuple[int, int] = (10, 40), rows_of_data: int = 30
) -> MixedBatches:
    made = ring(capacity=64)
    for n, count in enumerate(counts):
        made.add(np.full(count, n), rows([100 * n + i for i in range(count)]))
    sampler = TransitionSampler()
    source = sampler.prepare(data(rows_of_data)) if mixing != 0.0 else None
    return MixedBatches(made, sampler, source, torch.stack([rng.make_key(s) for s in (0, 1)]), size, mixing)


@pytest.mark.parametrize("mixing, expected", [(0.0, 0), (0.25, 2), (0.5, 4), (1.0, 8)])
def test_a_share_is_exact_in_every_batch(mixing: float, expected: int) -> None:
    made = batches(mixing, 8)
    for step in range(50):
        rewards = made.get(step)["rewards"]
        assert rewards.shape == (2, 8)
        assert ((rewards >= 1000).sum(1) == expected).all()
        played = [set(r[r < 1000].int().tolist()) for r in rewards]
        assert played[0] <= set(range(10)) and played[1] <= set(range(100, 140))  # each replica's own


def test_each_part_of_a_batch_has_its_share_of_the_data() -> None:
    """RLPD: 5,120 rows, 2,560 of them the data's, make 20 parts of 256."""
    kind = registry.get("algo", "sac_n")
    algorithm = kind(kind.Config(hidden=[2], utd_split=20), DataSpec((2,), 1))
    parts = algorithm.batch_parts({"rewards": batches(0.5, 5120).get(0)["rewards"][0]})
    assert [(len(p["rewards"]), int((p["rewards"] >= 1000).sum())) for p in parts] == [(256, 128)] * 20


def test_rows_of_each_kind_are_uniform() -> None:
    made = batches(0.5, 200)
    drawn = torch.cat([made.get(step)["rewards"] for step in range(200)], 1).int()
    for n, (first, count) in enumerate(((0, 10), (100, 40))):
        played = drawn[n][drawn[n] < 1000].numpy() - first
        seen = np.bincount(played, minlength=count)
        assert len(seen) == count and len(played) == 20_000
        chi = float(((seen - 20_000 / count) ** 2).sum() * count / 20_000)
        assert chi < count - 1 + 5 * np.sqrt(2 * (count - 1))  # five standard deviations
    assert len(set(drawn[0][drawn[0] >= 1000].tolist())) == 30


def test_the_union_is_drawn_in_proportion() -> None:
    made = batches(None, 500)
    drawn = torch.cat([made.get(step)["rewards"] for step in range(100)], 1)
    for n, count in enumerate((10, 40)):
        share, exact = float((drawn[n] >= 1000).double().mean()), 30 / (30 + count)
        assert abs(share - exact) < 5 * np.sqrt(exact * (1 - exact) / 50_000)
    made.ring.add(np.array([0]), rows([50]))  # what came now is drawn from now on
    assert 50 in torch.cat([made.get(step)["rewards"][0] for step in range(10)]).int().tolist()


def test_the_union_with_nothing_played_is_the_data() -> None:
    made = batches(None, 16, (0, 5))
    assert (made.get(3)["rewards"][0] >= 1000).all()


def test_a_batch_depends_on_key_step_and_rows_only() -> None:
    for mixing in (0.0, 0.5, None):
        first, again = batches(mixing, 16), batches(mixing, 16)
        again.get(0)
        one, two, later = first.get(7), again.get(7), first.get(8)
        assert all(torch.equal(one[k], two[k]) for k in one)
        assert not torch.equal(one["rewards"], later["rewards"])
        assert not torch.equal(one["rewards"][0] % 100, one["rewards"][1] % 100)


def test_batches_are_as_the_data_sampler_gives_them() -> None:
    sampler = TransitionSampler()
    offline = sampler(sampler.prepare(data(30)), rng.make_key(0), 8)
    for mixing in (0.0, 0.5, None, 1.0):
        mixed = batches(mixing, 8).get(0)
        assert {k: (v.dtype, v.shape[1:]) for k, v in mixed.items()} == {
            k: (v.dtype, v.shape) for k, v in offline.items()
        }


def test_what_is_kept_on_the_disk_fills_a_ring_the_same(tmp_path: Path) -> None:
    made = ring()
    replay = Replay(tmp_path, made)
    replay.add(np.array([0, 1, 0]), rows([1, 11, 2]))
    assert replay.save() == 1
    replay.add(np.array([0, 0, 0]), rows([3, 4, 5]))
    replay.add(np.array([], np.int64), {})
    assert replay.save() == 2 and replay.save() == 2  # nothing new
    total = made.total.tolist()
    replay.add(np.array([1]), rows([12]))
    replay.save()  # after the checkpoint: it is to be played anew
    again = ring()
    other = Replay(tmp_path, again)
    other.load(2, total)
    assert torch.equal(again.packed.table[:4], made.packed.table[:4]) and held(again, 1) == [11]
    assert sorted(p.name for p in (tmp_path / "replay").iterdir()) == ["000000.safetensors", "000001.safetensors"]
    (tmp_path / "replay" / "000000.safetensors").unlink()
    with pytest.raises(UserError, match="begin anew"):
        Replay(tmp_path, ring()).load(2, total)
