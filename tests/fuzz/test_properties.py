"""Properties, by hypothesis: arrays become the episodes that the oracle sees in them, and what is written is read
back.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.data import DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays, raw_from_arrays
from offrl.data.loading.assemble import assemble
from offrl.data.text.dataset import from_episodes, to_episodes
from offrl.data.text.write import write_text
from offrl.data.writing.write import write_data
from offrl.errors import UserError
from tests.fuzz.compare import difference
from tests.fuzz.oracle import columns, judge
from tests.fuzz.oracle.verdict import Doubts, Refused

pytest.importorskip("hypothesis", reason="the extra `dev` is not installed")

import hypothesis
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

PHASES = (hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink)
SETTINGS: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "phases": PHASES,
    "suppress_health_check": list(hypothesis.HealthCheck),
}
QUICK, THOROUGH = 4, 200  # examples
# sixteenths: a successor that is closer to the next observation than floats are told apart is taken, on purpose, for
# the same
FLOATS = st.one_of(st.integers(-160_000, 160_000).map(lambda n: n / 16), st.sampled_from([-0.0, 1e6, -1e6]))


@st.composite
def tables(draw: Any) -> dict[str, np.ndarray]:
    """Columns of a few episodes, with flags, ends, ids and successors that may or may not be there."""
    lengths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rows = sum(lengths)
    ends = np.zeros(rows, bool)
    ends[np.cumsum(lengths) - 1] = True
    shape = (rows, *draw(st.sampled_from([(), (1,), (2,)])))
    table = {
        "observations": draw(arrays.arrays(np.float32, shape, elements=FLOATS)),
        "actions": draw(
            st.one_of(
                arrays.arrays(np.float32, (rows, 2), elements=st.floats(-1, 1, width=32)),
                arrays.arrays(np.int64, rows, elements=st.integers(0, 5)),
            )
        ),
        "rewards": draw(arrays.arrays(np.float32, rows, elements=FLOATS)),
    }
    marks = draw(
        st.sampled_from(
            [("terminations",), ("terminations", "truncations"), ("episode_ends",), ("terminations", "episode_ends")]
        )
    )
    flagged = draw(arrays.arrays(bool, rows))
    if "terminations" in marks:
        table["terminations"] = ends & flagged
    if "truncations" in marks:
        table["truncations"] = ends & (~flagged | draw(arrays.arrays(bool, rows)))
    if "episode_ends" in marks:
        table["episode_ends"] = ends
    if draw(st.booleans()):
        successors = np.roll(table["observations"], -1, 0)
        successors[ends] = draw(arrays.arrays(np.float32, successors[ends].shape, elements=FLOATS))
        table["next_observations"] = successors
    return table


def _arrays_become_what_the_oracle_sees(table: dict[str, np.ndarray]) -> None:
    doubts = Doubts()
    try:
        truths = columns.episodes({k: v.copy() for k, v in table.items()}, doubts)
    except Refused:
        with pytest.raises(UserError):
            from_arrays(**table)
        return
    try:
        dataset = from_arrays(**table)
    except UserError:
        assert doubts.all
        return
    assert doubts.blind or difference(dataset, truths) == ""


def _what_is_written_is_read_back(table: dict[str, np.ndarray], form: str) -> None:
    """The dataset is the same, bit for bit; and the oracle, which knows no record of offrl's, finds the same episodes
    in the file.
    """
    case = DatasetConfig(name="case")
    try:
        due = assemble(raw_from_arrays(table, case))
    except UserError:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "case.hdf5" if form == "d4rl" else "case-v0")
        write_data(raw_from_arrays(table, case), path, form)
        again = load_dataset(DatasetConfig(name=str(path), cache="never", memory="device"))
        truths = judge(path, {}).episodes
    assert again.fingerprint == due.fingerprint
    for name, column in due.columns.items():
        assert again.columns[name].numpy().tobytes() == column.numpy().tobytes(), name
    for part in ("episode_start", "episode_end", "complete", "raw_returns"):
        assert getattr(again, part).equal(getattr(due, part)), part
    assert truths is not None
    for number, truth in enumerate(truths):
        truth.complete = None  # the layout has a flag on every last row, and a last observation always
        last = int(due.episode_end[number]) - 1
        if not due.columns["successor_known"][last]:
            truth.successors[-1] = None
    if all(
        known or t.successors[-1] is None
        for known, t in zip(due.columns["successor_known"][due.episode_end - 1], truths, strict=True)
    ):
        assert difference(again, truths) in ("", *(f"episode {k}: successors known" for k in range(9)))


# HDF5 keeps no zero characters: refused
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@st.composite
def texts(draw: Any) -> list[dict[str, Any]]:
    turn = st.fixed_dictionaries({"obs": TEXTS, "action": TEXTS, "reward": st.integers(-999, 999).map(lambda k: k / 8)})
    episode = st.fixed_dictionaries(
        {
            "turns": st.lists(turn, min_size=1, max_size=3),
            "final_obs": st.none() | TEXTS,
            "terminated": st.booleans(),
            "truncated": st.booleans(),
            "meta": st.dictionaries(TEXTS, TEXTS | st.integers() | st.none(), max_size=2),
        }
    )
    episodes = draw(st.lists(episode, min_size=1, max_size=4))
    for e in episodes:
        e["truncated"] &= not e["terminated"]
    return episodes


def _texts_are_read_back(episodes: list[dict[str, Any]], name: str) -> None:
    due = from_episodes(episodes, name="case")
    assert list(to_episodes(due)) == json.loads(json.dumps(episodes))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, name)
        write_text(due, path, "minari" if name.endswith("-v0") else "jsonl")
        again = load_dataset(DatasetConfig(name=str(path), cache="never"))
        verdict = judge(path, {})
    assert again.fingerprint == due.fingerprint
    assert list(to_episodes(again)) == list(to_episodes(due))
    if name.endswith("-v0"):  # without the record a last observation is always known, and an end always marked
        assert verdict.episodes is not None and [t.actions for t in verdict.episodes] == [
            [x["action"] for x in e["turns"]] for e in episodes
        ]
    else:
        assert verdict.episodes is not None and difference(again, verdict.episodes) == ""


CHECKS = {
    "arrays": (_arrays_become_what_the_oracle_sees, {"table": tables()}),
    "d4rl": (_what_is_written_is_read_back, {"table": tables(), "form": st.just("d4rl")}),
    "minari": (_what_is_written_is_read_back, {"table": tables(), "form": st.just("minari")}),
    "jsonl": (_texts_are_read_back, {"episodes": texts(), "name": st.sampled_from(["case.jsonl", "case.jsonl.gz"])}),
    "minari texts": (_texts_are_read_back, {"episodes": texts(), "name": st.just("case-v0")}),
}


@pytest.mark.parametrize("examples", [QUICK, pytest.param(THOROUGH, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("check", CHECKS)
def test_property(check: str, examples: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    function, strategies = CHECKS[check]
    hypothesis.settings(max_examples=examples, **SETTINGS)(hypothesis.given(**strategies)(function))()


def test_zeros_of_both_signs_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last successor of -0 is no copy of the 0 that the next episode starts with."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    zeros = np.zeros(1, np.float32)
    table = {
        "observations": zeros,
        "actions": np.zeros((1, 2), np.float32),
        "rewards": zeros,
        "terminations": np.zeros(1, bool),
    }
    for form in ("minari", "d4rl"):
        _what_is_written_is_read_back(table | {"next_observations": -zeros}, form)
