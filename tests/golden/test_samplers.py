"""Which transitions are drawn from a hand-made dataset with every kind of episode end, and that disk and memory give
the same batches.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.algorithm import Algorithm, Metrics, TrainState, Traits, stack
from offrl.data import DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.raw import MOST_VALUES
from offrl.data.samplers.prefetch import Prefetcher
from offrl.data.samplers.tables import Packed, Unpacked, layout_of, pack
from offrl.data.samplers.transitions import COIN, Batch, TransitionSampler, alias_table
from offrl.errors import UserError
from offrl.training.step import Step

ROWS = 16
# episodes: 0-3 ends in a terminal, 4-7 in a time-out, 8-11 in both (a terminal then), 12-15: the data stop
TERMINALS, TIMEOUTS = [3, 11], [7, 11]
FLAGS = [np.isin(np.arange(ROWS), rows) for rows in (TERMINALS, TIMEOUTS)]
ACTIONS = np.linspace(-1, 1, ROWS)


def hand_made(**more: Any) -> Dataset:
    """Observation i is [i, -i], reward 10 i."""
    i = np.arange(ROWS, dtype=np.float32)
    return from_arrays(np.stack([i, -i], 1), more.pop("actions", ACTIONS[:, None]), 10 * i, *FLAGS, **more)


def draw(dataset: Dataset, n: int = 20_000, sampler: TransitionSampler | None = None) -> tuple[Batch, Tensor]:
    """A large batch and the rows that it holds."""
    sampler = sampler or TransitionSampler()
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), n)
    return batch, batch["observations"][:, 0].long()


def test_without_stored_successors() -> None:
    batch, row = draw(hand_made())
    # their successors are not in the file
    assert sorted(set(row.tolist())) == [i for i in range(ROWS) if i not in (7, 15)]
    counts = torch.bincount(row, minlength=ROWS)[[i for i in range(ROWS) if i not in (7, 15)]].double()
    # chi-square with 13 degrees of freedom, p = 0.001
    assert float(((counts - 20_000 / 14) ** 2 / (20_000 / 14)).sum()) < 34.5
    terminal = torch.isin(row, torch.tensor(TERMINALS))
    assert torch.equal(batch["masks"], (~terminal).float())
    assert torch.equal(batch["next_observations"][~terminal], torch.stack([row + 1.0, -row - 1.0], 1)[~terminal])
    assert torch.equal(batch["rewards"], 10.0 * row) and torch.equal(
        batch["actions"][:, 0], torch.tensor(ACTIONS).float()[row]
    )
    assert {k: v.dtype for k, v in batch.items()} == dict.fromkeys(batch, torch.float32)
    assert {k: tuple(v.shape[1:]) for k, v in batch.items()} == {
        "observations": (2,),
        "actions": (1,),
        "rewards": (),
        "masks": (),
        "next_observations": (2,),
    }


def test_with_stored_successors() -> None:
    i = np.arange(ROWS, dtype=np.float32)
    after = np.stack([i + 1, -i - 1], 1)
    after[[3, 7, 11, 15]] += 100.0  # the true successors at the ends: none of them is the next row's observation
    batch, row = draw(hand_made(next_observations=after))
    assert sorted(set(row.tolist())) == list(range(ROWS))
    assert torch.equal(batch["next_observations"], torch.tensor(after)[row])
    # a time-out goes on: 7 has mask 1
    assert torch.equal(batch["masks"] == 0.0, torch.isin(row, torch.tensor(TERMINALS)))


@pytest.mark.parametrize("offset", [0, MOST_VALUES - ROWS])
def test_discrete_actions_survive_packing(offset: int) -> None:
    actions = np.arange(ROWS) + offset
    dataset = hand_made(actions=actions, num_actions=offset + ROWS)
    sampler = TransitionSampler()
    assert isinstance(sampler.prepare(dataset).table, Packed)
    batch, row = draw(dataset)
    assert batch["actions"].dtype == torch.int64 and torch.equal(batch["actions"], row + offset)


@pytest.mark.parametrize(("largest", "fits"), [((1 << 24) - 1, True), (1 << 24, False)])
def test_integers_are_packed_where_a_float32_holds_them_all(largest: int, fits: bool) -> None:
    assert (layout_of({"label": (torch.tensor([[0], [largest]]), None)}) is not None) == fits


def test_extra_columns_and_images() -> None:
    image = np.arange(ROWS * 12).reshape(ROWS, 2, 2, 3).astype(np.uint8)
    dataset = from_arrays(image, ACTIONS[:, None], np.arange(ROWS), *FLAGS, weights=np.arange(ROWS) * 0.5)
    sampler = TransitionSampler(extra=("weights",))
    batch: Any = sampler(sampler.prepare(dataset), rng.make_key(0), 1_000)
    row, shown = batch["rewards"].long(), batch["observations"]["pixels"]
    assert shown.dtype == torch.uint8 and torch.equal(shown, torch.tensor(image)[row])
    assert torch.equal(batch["weights"], row * 0.5)
    goal = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    rows = torch.tensor([1])
    parts = {"goal": (goal, rows), "label": (torch.tensor([[7], [9]]), rows)}
    layout = layout_of(parts)
    assert layout is not None
    taken = pack(parts, layout).take(torch.tensor([0, 0]))
    assert (
        torch.equal(taken["goal"], goal[[1, 1]])
        and taken["label"].tolist() == [[9], [9]]
        and taken["label"].dtype == torch.int64
    )


def test_batches_depend_on_the_key_alone() -> None:
    sampler = TransitionSampler()
    source = sampler.prepare(hand_made())
    keys = rng.fold_in(rng.make_key(0), torch.arange(4))
    together = vmap(lambda k: sampler(source, k, 9))(keys)
    for i, key in enumerate(keys):
        alone = sampler(source, key, 9)
        assert all(torch.equal(together[name][i], alone[name]) for name in alone)
    assert not torch.equal(together["rewards"][0], together["rewards"][1])


class Recorder(Algorithm):
    """Learns nothing; keeps the batch that it was given."""

    traits = Traits(period=2)

    def modules(self) -> dict[str, nn.Module]:
        return {}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        return state._replace(extra={**batch, "key": key}), {"phase": torch.ones(()) * phase}


@pytest.fixture
def on_disk(tmp_path: Path) -> tuple[Dataset, Dataset]:
    """The same dataset in memory, and memory-mapped from the cache."""
    i = np.arange(3000, dtype=np.float32)
    terminals = (i % 97 == 96).astype(bool)
    np.savez(
        tmp_path / "data.npz",
        observations=np.stack([i, -i], 1),
        actions=np.sin(i)[:, None],
        rewards=i,
        terminations=terminals,
        truncations=i % 250 == 249,
    )
    config = {"name": str(tmp_path / "data.npz"), "format": "columns", "cache_dir": str(tmp_path / "cache")}
    memory, disk = (load_dataset(DatasetConfig(**config, memory=m)) for m in ("device", "mmap"))  # type: ignore[arg-type]
    assert disk.mapped and not memory.mapped
    return memory, disk


@pytest.mark.parametrize("replicas", [1, 3])
def test_prefetched_batches_are_those_the_step_samples_itself(on_disk: tuple[Dataset, Dataset], replicas: int) -> None:
    memory, disk = on_disk
    algorithm = Recorder(None, memory.spec)
    sampler = algorithm.sampler()
    start = stack([algorithm.init(s) for s in range(replicas)])
    first = start._replace(step=start.step + 5)  # as after a resume
    prefetcher = Prefetcher(sampler, sampler.prepare(disk), first.key, 32, 5, torch.device("cpu"), depth=2)
    own = Step(algorithm, sampler.prepare(memory), batch_size=32, replicas=replicas)
    fed = Step(algorithm, None, batch_size=32, replicas=replicas, batches=prefetcher)
    a = b = first
    seen: list[Tensor] = []
    keys: list[int] = []  # of the updates and of the batches
    try:
        for step in range(5, 12):
            a, _ = own.run(a, {}, step, 1)
            b, _ = fed.run(b, {}, step, 1)
            assert sorted(a.extra) == sorted(b.extra) and a.extra["rewards"].shape == (replicas, 32)
            assert all(torch.equal(x, y) for x, y in zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)), (
                step
            )
            seen.append(a.extra["rewards"])
            keys += (
                a.extra["key"].tolist()
                + vmap(lambda k, t: rng.split(rng.fold_in(k, t))[0])(first.key, b.step - 1).tolist()
            )
    finally:
        prefetcher.close()
    # another batch at every update of every replica
    assert len(torch.stack(seen).flatten(0, 1).unique(dim=0)) == 7 * replicas
    assert len(set(keys)) == 2 * 7 * replicas  # and other noise


def test_training_from_disk_equals_training_from_memory(on_disk: tuple[Dataset, Dataset]) -> None:
    memory, disk = on_disk
    kind = registry.get("algo", "td3_bc")
    algorithm = kind(kind.Config(hidden=[8]), memory.spec)
    state = stack([algorithm.init(s) for s in (0, 1)])
    sampler = algorithm.sampler()
    direct, _ = Step(algorithm, sampler.prepare(memory), batch_size=16, replicas=2).run(state, {}, 0, 7)
    prefetcher = Prefetcher(sampler, sampler.prepare(disk), state.key, 16, 0, torch.device("cpu"))
    try:
        fed, _ = Step(algorithm, None, batch_size=16, replicas=2, batches=prefetcher).run(state, {}, 0, 7)
    finally:
        prefetcher.close()
    assert all(torch.equal(x, y) for x, y in zip(pytree.tree_leaves(direct), pytree.tree_leaves(fed), strict=True))


def test_prefetcher_says_what_goes_wrong_and_stops(on_disk: tuple[Dataset, Dataset]) -> None:
    class Broken(TransitionSampler):
        def __call__(self, source: Any, key: Tensor, batch_size: int) -> Batch:
            raise OSError("the disk is gone")

    keys, cpu = torch.stack([rng.make_key(0)]), torch.device("cpu")
    before = threading.active_count()
    broken = Prefetcher(Broken(), None, keys, 4, 0, cpu)
    with pytest.raises(OSError, match="the disk is gone"):
        broken.get(0)
    broken.close()
    good = Prefetcher(TransitionSampler(), TransitionSampler().prepare(on_disk[1]), keys, 4, 3, cpu, depth=1)
    with pytest.raises(RuntimeError, match="batch of step 3 where 4 was asked for"):
        good.get(4)
    good.close()  # while its thread waits for room
    assert threading.active_count() == before


# rows whose next action is in their episode, or not needed: the terminals 3 and 11
AFTER = [i for i in range(ROWS) if i not in (7, 15)]


def expected_next(row: Tensor) -> Tensor:
    """The next row's action; a terminal repeats its own."""
    return torch.tensor(ACTIONS).float()[row + (~torch.isin(row, torch.tensor(TERMINALS))).long()]


@pytest.mark.parametrize("stored", [False, True])
def test_next_actions_are_those_of_the_same_episode(stored: bool) -> None:
    i = np.arange(ROWS, dtype=np.float32)
    # 7 and 15 then have a successor, but no next action
    after = {"next_observations": np.stack([i + 1, -i - 1], 1)} if stored else {}
    batch, row = draw(hand_made(**after), sampler=TransitionSampler(extra=("next_actions",)))
    assert sorted(set(row.tolist())) == AFTER
    assert torch.equal(batch["next_actions"][:, 0], expected_next(row)) and batch["next_actions"].shape == (20_000, 1)
    assert set(row[batch["masks"] == 0.0].tolist()) == set(TERMINALS)


def test_next_actions_unpacked_and_discrete() -> None:
    labels = (1 << 24) + np.arange(ROWS)  # more than float32 tells apart
    dataset = from_arrays(np.arange(ROWS)[:, None], ACTIONS[:, None], np.arange(ROWS), *FLAGS, labels=labels)
    sampler = TransitionSampler(extra=("next_actions", "labels"))
    assert isinstance(sampler.prepare(dataset).table, Unpacked)
    batch, _ = draw(dataset, sampler=sampler)
    sampler = TransitionSampler(extra=("next_actions",))
    row = batch["rewards"].long()
    assert sorted(set(row.tolist())) == AFTER and torch.equal(batch["next_actions"][:, 0], expected_next(row))
    batch, row = draw(hand_made(actions=np.arange(ROWS), num_actions=ROWS), sampler=sampler)
    assert batch["next_actions"].dtype == torch.int64
    assert torch.equal(batch["next_actions"], row + (~torch.isin(row, torch.tensor(TERMINALS))).long())


def test_next_actions_from_disk_are_those_from_memory(on_disk: tuple[Dataset, Dataset]) -> None:
    memory, disk = on_disk
    sampler = TransitionSampler(extra=("next_actions",))
    sources = [sampler.prepare(d) for d in (memory, disk)]
    # no second copy
    assert isinstance(sources[1].table, Unpacked) and sources[1].table.columns["actions"][0] is disk.columns["actions"]
    keys = rng.fold_in(rng.make_key(1), torch.arange(3))
    a, b = (vmap(lambda k, s=source: sampler(s, k, 700))(keys) for source in sources)
    assert sorted(a) == sorted(b) and all(torch.equal(a[name], b[name]) for name in a)
    row = a["rewards"].long()
    assert torch.equal(a["next_actions"][a["masks"] == 1.0], memory.columns["actions"][row[a["masks"] == 1.0] + 1])
    assert not torch.isin(row, torch.tensor([249, 499, 2999])).any()  # time-outs


def test_a_column_that_is_not_there_is_an_error() -> None:
    with pytest.raises(UserError, match=r"arrays: .* dataset\.discount_returns="):
        TransitionSampler(extra=("returns_to_go",)).prepare(hand_made())
    with pytest.raises(UserError, match="lack"):
        TransitionSampler(extra=("weight",)).prepare(hand_made(weights=np.ones(ROWS)))
    alone = from_arrays(
        np.ones((3, 1)), np.zeros((3, 1)), np.ones(3), truncations=np.ones(3), next_observations=np.ones((3, 1))
    )
    with pytest.raises(UserError, match="no transition"):
        TransitionSampler(extra=("next_actions",)).prepare(alone)


def weighted(dataset: Dataset, *weights: float) -> Dataset:
    return replace(dataset, weights=torch.tensor(weights, dtype=torch.float64))


@pytest.mark.parametrize(
    "shares",
    [[1.0], [1.0, 1.0], [5.0, 1.0, 0.5], [1e-30, 1.0, 3.0, 1e-3], list(np.random.default_rng(0).exponential(1.0, 257))],
)
def test_alias_tables_hold_the_exact_probabilities(shares: list[float]) -> None:
    keep, other = alias_table(np.array(shares))
    found = keep / COIN
    np.add.at(found, other, (COIN - keep) / COIN)  # column e gives e with probability keep, else other[e]
    np.testing.assert_allclose(found / len(shares), np.array(shares) / np.sum(shares), rtol=1e-12, atol=1e-16)


def test_rows_are_drawn_in_proportion_to_their_episodes_weight() -> None:
    # without stored successors rows 7 and 15 may not be drawn: the weight is the row's, so that the other rows keep
    # theirs
    batch, row = draw(weighted(hand_made(), 0.5, 3.0, 0.0, 1.0))
    weight = np.repeat([0.5, 3.0, 0.0, 1.0], 4) * ~np.isin(np.arange(ROWS), [7, 15])
    expected = 20_000 * weight / weight.sum()
    counts = torch.bincount(row, minlength=ROWS).double().numpy()
    assert not counts[expected == 0.0].any()
    there = expected > 0.0
    # chi-square with 9 degrees of freedom, p = 0.001
    assert ((counts - expected)[there] ** 2 / expected[there]).sum() < 27.9
    assert torch.equal(batch["rewards"], 10.0 * row)


def test_equal_weights_draw_what_no_weights_draw() -> None:
    plain, _ = draw(hand_made())
    equal, _ = draw(weighted(hand_made(), 2.0, 2.0, 2.0, 2.0))
    assert all(torch.equal(plain[name], equal[name]) for name in plain)
    # as dataset.weighting=top makes them: uniform over what is left
    _, row = draw(weighted(hand_made(), 0.0, 2.0, 0.0, 2.0))
    assert sorted(set(row.tolist())) == [4, 5, 6, 12, 13, 14]
    counts = torch.bincount(row)[torch.tensor([4, 5, 6, 12, 13, 14])].double()
    assert float(((counts - 20_000 / 6) ** 2 / (20_000 / 6)).sum()) < 20.5
    with pytest.raises(UserError, match="no transition has a weight"):
        TransitionSampler().prepare(weighted(hand_made(), 0.0, 0.0, 0.0, 0.0))


def test_weighted_draws_are_the_same_from_disk_and_under_vmap(on_disk: tuple[Dataset, Dataset]) -> None:
    sampler = TransitionSampler(extra=("next_actions",))
    weights = np.random.default_rng(1).exponential(1.0, on_disk[0].num_episodes)
    weights[3] = 0.0
    sources = [sampler.prepare(weighted(d, *weights)) for d in on_disk]
    keys = rng.fold_in(rng.make_key(5), torch.arange(3))
    a, b = (vmap(lambda k, s=source: sampler(s, k, 900))(keys) for source in sources)
    assert isinstance(sources[1].table, Unpacked) and all(torch.equal(a[name], b[name]) for name in a)
    alone = sampler(sources[0], keys[1], 900)
    assert all(torch.equal(a[name][1], alone[name]) for name in a)
    starts, ends = on_disk[0].episode_start[3], on_disk[0].episode_end[3]
    assert not ((a["rewards"] >= starts) & (a["rewards"] < ends)).any()
    inside = a["masks"] == 1.0
    assert torch.equal(a["next_actions"][inside], on_disk[0].columns["actions"][a["rewards"].long()[inside] + 1])
