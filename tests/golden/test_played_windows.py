"""Windows of what is played are those that the offline samplers draw of the same episodes, and policies of chunks play
them online.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from offrl import rng
from offrl.algorithm import select
from offrl.algorithms.flow_bc import FlowBC, FlowBCConfig
from offrl.algorithms.qc import QC, QCConfig
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.chunks import WHOLE, ChunkSampler
from offrl.data.samplers.states import StateSampler
from offrl.data.samplers.transitions import SPAN, VALID, TransitionSampler
from offrl.finetuning.learner import Learner
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.replay import sources
from offrl.finetuning.replay.batches import MixedBatches
from offrl.finetuning.replay.ring import Ring
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.settings.replicas import Replica
from offrl.training.engine import Plan, first_state

# (replica, environment): lengths of its episodes, a minus for one that ends in a terminal; the last one still runs
PLAYED = {(0, 0): [4, -2, 1, 6], (0, 1): [-1, 7, -3, 9], (1, 0): [9, -9], (1, 1): [-5, 5, 3, -2]}
STEPS = 18


def play(apart: bool = False) -> tuple[list[Turn], dict[int, Dataset]]:
    """Turns of 2 x 2 environments whose observations say replica, environment and step; and the same as data of each
    replica, or with `apart` of each environment.
    """
    g, turns = np.random.default_rng(0), []
    episodes: dict[int, list[dict[str, Any]]] = {n: [] for n in range(4 if apart else 2)}
    running: dict[tuple[int, int], list[Any]] = {seat: [] for seat in PLAYED}
    left = {seat: list(lengths) for seat, lengths in PLAYED.items()}
    for t in range(STEPS):
        rows = []
        for n, e in PLAYED:
            size = left[n, e][0] if left[n, e] else 99
            step = (
                n * 1000.0 + e * 100 + t,
                g.uniform(-1, 1, 2).astype(np.float32),
                float(g.normal()),
                n * 1000.0 + e * 100 + t + 0.5,
            )
            running[n, e].append(step)
            over = len(running[n, e]) == abs(size)
            rows.append((*step, over and size < 0, over))
            if over or t == STEPS - 1:  # what still runs is taken for cut
                episodes[2 * n + e if apart else n].append({"rows": running[n, e], "died": over and size < 0})
                running[n, e], left[n, e] = [], left[n, e][1:]
        observations, actions, rewards, after, died, over = (np.array(x) for x in zip(*rows, strict=True))
        turns.append(
            Turn(
                observations[:, None],
                actions,
                rewards,
                after[:, None],
                died,
                over,
                np.ones(4, bool),
                [],
                np.full(4, np.nan),
                rewards + 7.0,
                np.zeros(4, bool),
            )
        )
    data = {}
    for n, parts in episodes.items():
        steps = [row for part in parts for row in part["rows"]]
        last = np.concatenate([[False] * (len(p["rows"]) - 1) + [True] for p in parts])
        died = np.concatenate([[False] * (len(p["rows"]) - 1) + [p["died"]] for p in parts])
        s, a, r, after = (np.array(x, np.float32) for x in zip(*steps, strict=True))
        ends = died, last & ~died
        data[n] = from_arrays(
            s[:, None], a, r, *ends, after[:, None], action_low=-1.0, action_high=1.0, check=False, costs=r + 7.0
        )
    return turns, data


@pytest.mark.parametrize(
    "sampler",
    [
        ChunkSampler(3),
        ChunkSampler(1),
        TransitionSampler(n_step=4),
        TransitionSampler(("next_actions",), n_step=3),
        TransitionSampler(("costs",)),
        TransitionSampler(("costs",), n_step=3),
        StateSampler(3),
        StateSampler(4, past_end=True),
    ],
    ids=[
        *("chunks", "chunks of one", "n-step", "n-step with next actions", "costs", "n-step with costs", "states"),
        "states past terminals",
    ],
)
def test_played_windows_are_those_of_the_data(sampler: Any) -> None:
    turns, data = play()
    spec = data[0].spec
    columns = columns_for(spec, sampler, "it")
    rows = Rows(spec, columns, 2, 2, returns_of(sampler, 0.9), sampler)
    ring = Ring(rows.columns, 2, 200, torch.device("cpu"))
    for turn in turns:
        ring.add(*rows.take(turn))
    # the episodes that still run are cut
    last = dataclasses.replace(turns[-1], over=np.ones(4, bool), valid=np.zeros(4, bool))
    ring.add(*rows.take(last))
    for n in range(2):
        source = sampler.prepare(data[n])
        assert int(ring.counts[n]) == source.count
        played = {k: v[n] for k, v in ring.take(torch.arange(source.count).expand(2, -1)).items()}
        drawn = sampler(source, rng.make_key(0), 3000)
        first, wanted = (batch["observations"].flatten(1)[:, 0].tolist() for batch in (played, drawn))
        pick = torch.tensor([first.index(s) for s in wanted])
        assert sorted(set(pick.tolist())) == list(range(source.count))
        assert drawn.keys() == played.keys()
        for name, column in drawn.items():
            assert column.dtype == played[name].dtype and torch.equal(played[name][pick], column), name


def test_chains_are_those_of_each_environment_s_episodes() -> None:
    """Windows that go on across episodes, each of one environment, all alike."""
    sampler = StateSampler(5, "chain")
    turns, data = play(apart=True)
    rows = Rows(data[0].spec, columns_for(data[0].spec, sampler, "it"), 2, 2, returns_of(sampler, 0.9), sampler)
    ring = Ring(rows.columns, 4, 200, torch.device("cpu"))
    last = dataclasses.replace(turns[-1], over=np.ones(4, bool), valid=np.zeros(4, bool))
    for turn in [*turns, last]:
        ring.add(*rows.take(turn))
    prepared = [sampler.prepare(data[k]) for k in range(4)]
    assert sources.windows(ring, sampler, 2).flatten().tolist() == [source.count for source in prepared]
    played = sources.chains(ring, sampler, torch.stack([rng.make_key(1), rng.make_key(2)]), 3000)
    for n in range(2):
        drawn = [sampler(source, rng.make_key(0), 2000) for source in prepared[2 * n : 2 * n + 2]]
        expected = {name: torch.cat([batch[name] for batch in drawn]) for name in drawn[0]}
        assert expected.keys() == played.keys()
        first = expected["observations"][:, 0, 0].tolist()
        begins = played["observations"][n, :, 0, 0].tolist()
        pick = torch.tensor([first.index(x) for x in begins])
        for name, column in expected.items():
            assert column.dtype == played[name].dtype and torch.equal(played[name][n], column[pick]), name
        counts = np.unique(begins, return_counts=True)[1]
        assert len(counts) == sum(source.count for source in prepared[2 * n : 2 * n + 2])
        mean = 3000 / len(counts)
        assert np.abs(counts - mean).max() < 5 * np.sqrt(mean)


def test_chains_are_of_the_newest_states() -> None:
    """Where the oldest are overwritten, and where an episode was given up, which then ends at its newest state."""
    sampler, keys = StateSampler(3, "chain"), rng.make_key(3).unsqueeze(0)
    turns, data = play(apart=True)
    rows = Rows(data[0].spec, columns_for(data[0].spec, sampler, "it"), 1, 4, returns_of(sampler, 0.9), sampler)
    ring = Ring(rows.columns, 4, 7, torch.device("cpu"))
    history: list[list[float]] = [[] for _ in range(4)]
    for t, turn in enumerate(turns):
        if t == 16:
            rows.drop(1)
        environments, new = rows.take(turn)
        ring.add(environments, new)
        for k, x in zip(environments.tolist(), new["observations"][:, 0].tolist(), strict=True):
            history[k].append(x)
        there = {tuple(h[i : i + 3]) for seen in history for h in [seen[-7:]] for i in range(len(h) - 2)}
        assert int(sources.drawable(ring, sampler, 1)[0]) == len(there)
        if there:
            batch = sources.chains(ring, sampler, keys, 500)
            assert {tuple(w) for w in batch["observations"][0, :, :, 0].tolist()} == there
            assert bool(batch["is_first"][0, :, 0].all()) and not bool(batch["previous_actions"][0, :, 0].any())
    states, last = (batch[name][0].reshape(500, 3).tolist() for name in ("observations", "is_last"))
    assert last[states.index([114.0, 115.0, 116.0])] == [False, True, False]


def test_windows_wait_until_they_are_complete_and_none_is_torn_by_the_ring() -> None:
    turns, data = play()
    sampler = ChunkSampler(3)
    rows = Rows(data[0].spec, columns_for(data[0].spec, sampler, "it"), 2, 2, returns_of(sampler, 0.9), sampler)
    ring = Ring(rows.columns, 2, 5, torch.device("cpu"))  # full after a few steps
    counts = []
    for turn in turns:
        owner, new = rows.take(turn)
        counts.append(len(owner))
        ring.add(owner, new)
        for n in range(2):
            for i in range(int(ring.counts[n])):
                window = {k: v[n, 0] for k, v in ring.take(torch.tensor([[i], [i]])).items()}
                first, span = float(window["observations"][0]), int(window[SPAN])
                # of the same environment, step after step
                assert float(window["next_observations"][0]) == first + span - 0.5
                assert window[VALID].tolist() == [j < span for j in range(3)]
    assert counts[:3] == [1, 0, 3]  # an episode of one step, which is over; all others wait for a third step
    rows.drop(0)
    assert rows.windows is not None and rows.windows.waiting[0] == []


def learner(algorithm: Any, data: Dataset) -> Learner:
    replicas = [Replica(0, ()), Replica(1, ())]
    state = first_state(algorithm, replicas)
    sampler = algorithm.sampler()
    rows = Rows(data.spec, columns_for(data.spec, sampler, "it"), 2, 2, returns_of(sampler, 0.9), sampler)
    batches = MixedBatches(
        Ring(rows.columns, 2, 10, torch.device("cpu")), sampler, sampler.prepare(data), state.key, 8, 1.0
    )
    result = Learner(Plan(algorithm, 8, "eager", "float32", 2), batches, replicas, torch.device("cpu"), {}, {})
    result.load(state, state, {})
    return result


@pytest.mark.parametrize("kind", ["qc", "flow_bc"])
def test_chunks_are_played_from_a_queue_for_each_environment(kind: str) -> None:
    """A chunk is drawn where an episode begins and where the last one is used up, and played whatever is seen
    meanwhile; a memory that was saved goes on with it."""
    _, data = play()
    make: Any = {
        "qc": lambda: QC(QCConfig(length=3, hidden=[8], flow_steps=2, candidates=2), data[0].spec),
        "flow_bc": lambda: FlowBC(FlowBCConfig(length=3, hidden=[8], flow_steps=2), data[0].spec),
    }[kind]
    algorithm = make()
    one = learner(algorithm, data[0])
    one.begin(2, {})
    g = np.random.default_rng(1)
    begun = np.zeros((6, 2, 2), bool)
    begun[0] = True
    begun[2, 0, 1] = True  # one environment of one replica begins anew inside its chunk
    observations = g.normal(size=(6, 2, 2, 1)).astype(np.float32)
    expected: dict[tuple[int, int], list[np.ndarray]] = {(n, e): [] for n in range(2) for e in range(2)}
    saved: dict[str, Any] = {}
    for t in range(6):
        if t == 4:
            saved = one.memory(t)
        actions = one.act(observations[t], t, None, begun[t])
        if t == 4:  # what was chosen and not played leaves no trace
            assert all(torch.equal(x, saved[name]) for name, x in one.memory(t).items())
        assert np.array_equal(actions, one.act(observations[t], t, None, begun[t]))  # asked again, the same
        fresh = [seat for seat, queue in expected.items() if not queue or begun[t][seat]]
        for n, e in fresh:
            state = select(one.state(), n)
            key = rng.fold_in(rng.fold_in(state.key, -(1 << 40)), t)
            chunk = algorithm.actor(state).chunk(torch.tensor(observations[t, n]), key, True)[e]  # type: ignore[attr-defined]
            expected[n, e] = list(chunk.numpy())
        for (n, e), queue in expected.items():
            np.testing.assert_allclose(actions[n, e], queue.pop(0), rtol=1e-5, atol=1e-6)
    other = learner(make(), data[0])
    other.begin(2, saved)
    for t in (4, 5):
        again = other.act(observations[t], t, None, begun[t])
    assert np.array_equal(again, actions)
    assert WHOLE not in saved
