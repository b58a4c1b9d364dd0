"""Text data: what is kept of episodes, what is refused, and what becomes of them in files, transforms and tools."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl.data import load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.text import tools as text_tools
from offrl.data.text.dataset import from_episodes, shared_strings, to_episodes
from offrl.data.tools.convert import convert, merge, subset
from offrl.data.tools.inspect import inspect_dataset
from offrl.data.tools.subset import Choice
from offrl.data.transforms.episodes import concatenate
from offrl.errors import UserError
from offrl.report.dataset import doctor
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.task import Task

ARCHER = Path(os.environ.get("OFFRL_DATA", "/work/shared/data")) / "text" / "archer_guess_my_city.json"


def episode(
    turns: list[tuple[str, str, float]], final: str | None = "end", ended: str = "terminated", **meta: Any
) -> dict[str, Any]:
    return {
        "turns": [{"obs": o, "action": a, "reward": r} for o, a, r in turns],
        "final_obs": final,
        "terminated": ended == "terminated",
        "truncated": ended == "truncated",
        "meta": meta,
    }


EPISODES = [
    episode([("a", "left\n", -1.0), ("b", "right\n", 0.1)], final=None, ended="truncated", word="é"),
    episode([("b", "left\n", -1.0)], final="c"),
    episode([("c", "up\n", 2.5), ("a", "up\n", -1.0), ("a", "left\n", 0.0)], final="a", ended="neither"),
    episode([("d", "", 1.0)], final="b", ended="truncated"),
]


def lines(path: Path, values: list[Any]) -> Path:
    path.write_text("".join(json.dumps(v) + "\n" for v in values), encoding="utf-8")
    return path


def loaded(path: Path, **settings: Any) -> Dataset:
    return load_dataset(DatasetConfig(name=str(path), cache_dir=str(path.parent / "cache"), **settings))


# ------------------------------------------------------------------------------------------------------------ in memory


def test_episodes_become_columns_and_come_back() -> None:
    data = from_episodes(EPISODES, name="toy")
    assert data.spec == DataSpec((), 1, name="toy", text=True) and DataSpec.from_json(data.spec.to_json()) == data.spec
    column = {k: v.tolist() for k, v in data.columns.items()}

    def texts(name: str) -> list[str]:
        return [data.strings[i] for i in column[name]]

    assert texts("observations") == ["a", "b", "b", "c", "a", "a", "d"]
    assert texts("actions") == ["left\n", "right\n", "left\n", "up\n", "up\n", "left\n", ""]
    assert texts("next_observations") == ["b", "b", "c", "a", "a", "a", "b"]  # row 1: not known, so its own
    assert column["successor_known"] == [True, False, True, True, True, True, True]
    assert column["terminations"] == [False, False, True, False, False, False, False]
    assert column["truncations"] == [False, True, False, False, False, True, True]
    assert data.episode_start.tolist() == [0, 2, 3, 6] and data.episode_end.tolist() == [2, 3, 6, 7]
    assert data.complete.tolist() == [True, True, False, True]
    np.testing.assert_allclose(data.raw_returns, [-0.9, -1.0, 1.5, 1.0], atol=1e-7)
    assert len(data.strings) == len(set(data.strings)) == 8 and data.transition_rows().tolist() == [0, 2, 3, 4, 5, 6]
    assert list(to_episodes(data)) == EPISODES
    assert data.describe()["actions"] == "text" and json.dumps(data.describe())


def test_the_fingerprint_is_that_of_the_turns() -> None:
    data = from_episodes(EPISODES, name="toy")
    # the same turns over another order of strings
    other = shared_strings([from_episodes(EPISODES[::-1], name="x"), data])[1]
    assert other.strings != data.strings
    again = from_episodes([{k: v for k, v in e.items() if k != "meta"} for e in to_episodes(other)], name="else")
    assert again.fingerprint == data.fingerprint
    for change in (("obs", "A"), ("action", "left"), ("reward", -1.5)):
        changed = json.loads(json.dumps(EPISODES))
        changed[0]["turns"][0][change[0]] = change[1]
        assert from_episodes(changed, name="toy").fingerprint != data.fingerprint
    for key, value in (("final_obs", "b"), ("truncated", False), ("terminated", True)):
        changed = json.loads(json.dumps(EPISODES))
        changed[0] |= {"truncated": False, key: value}
        assert from_episodes(changed, name="toy").fingerprint != data.fingerprint
    # texts that run into each other the same way are told apart
    pairs = [from_episodes([episode([(o, a, 0.0)])], name="x").fingerprint for o, a in (("ab", "c"), ("a", "bc"))]
    assert pairs[0] != pairs[1]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"turns": []}, "episode 1 has no turns"),
        ({"turns": "no"}, "'turns' is a text, not a list"),
        ({"turns": [3]}, "turn 0 is a number, not an object"),
        ({"turns": [{"obs": "a", "reward": 0}]}, "turn 0 has no 'action'. It has: obs, reward"),
        ({"turns": [{"obs": "a", "action": "b", "rewards": 0}]}, "no 'reward'. Did you mean 'rewards'"),
        ({"turns": [{"obs": None, "action": "b", "reward": 0}]}, "'obs' is null, not a text"),
        ({"turns": [{"obs": "a", "action": "b", "reward": "1"}]}, "'reward' is a text, not a number"),
        ({"turns": [{"obs": "a", "action": "b", "reward": True}]}, "'reward' is true or false, not a number"),
        ({"turns": [{"obs": "a", "action": "b", "reward": float("nan")}]}, "turn 0: the reward is nan"),
        ({"turns": [{"obs": "a", "action": "b", "reward": 1e39}]}, r"the reward is 1e\+39, which is no finite float32"),
        ({"turns": [{"obs": "a", "action": "b", "reward": 10**400}]}, "no finite float32"),
        (
            {"turns": [{"obs": "a\ud800", "action": "b", "reward": 0}]},
            r"'obs' holds half a character \(\\ud800, a lone surrogate\) at 1",
        ),
        ({"terminated": True, "truncated": True}, "both terminated and truncated"),
        ({"terminated": 1}, "'terminated' is a number, not true or false"),
        ({"final_obs": 3}, "'final_obs' is a number, not a text or null"),
        ({"meta": []}, "'meta' is a list, not an object"),
    ],
)
def test_bad_episodes_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        from_episodes([EPISODES[0], EPISODES[1] | change], name="toy", where="log")
    assert str(caught.value).startswith("log: episode 1") and "\n" not in str(caught.value)


def test_nothing_and_half_episodes_are_refused() -> None:
    with pytest.raises(UserError, match="toy: there are no episodes"):
        from_episodes([], name="toy")
    without = {k: v for k, v in EPISODES[1].items() if k != "final_obs"}
    with pytest.raises(UserError, match=r"no 'final_obs'.*write null"):
        from_episodes([without], name="toy")
    numbers = from_arrays(np.zeros((2, 3)), np.zeros((2, 1)), np.zeros(2))
    with pytest.raises(UserError, match="hold no texts"):
        next(to_episodes(numbers))


# ------------------------------------------------------------------------------------------------------------- JSON
# files


def test_lines_lists_and_packed_files_are_the_same_data(tmp_path: Path) -> None:
    plain = loaded(lines(tmp_path / "log.jsonl", EPISODES))
    assert (
        list(to_episodes(plain)) == EPISODES
        and plain.spec.name == "log"
        and plain.spec.source == "file"
        and plain.spec.task is None
    )
    packed = tmp_path / "log.jsonl.gz"
    packed.write_bytes(gzip.compress((tmp_path / "log.jsonl").read_bytes()))
    listed, indented, marked, unnamed = (tmp_path / n for n in ("a.json", "b.json", "c.jsonl", "d.txt"))
    listed.write_text(json.dumps(EPISODES))
    indented.write_text(json.dumps(EPISODES, indent=2))
    marked.write_bytes(b"\xef\xbb\xbf\r\n" + (tmp_path / "log.jsonl").read_bytes().replace(b"\n", b"\r\n"))
    unnamed.write_bytes((tmp_path / "log.jsonl").read_bytes())
    for path in (packed, listed, indented, marked, unnamed):
        assert loaded(path).fingerprint == plain.fingerprint, path
    assert loaded(packed).spec.name == "log"


def test_the_header_names_the_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = Task("mine", env_id="CartPole-v1", ref_min=0.0, ref_max=2.0, starts=({"a": 1},))
    written = convert(DatasetConfig(name=str(lines(tmp_path / "a.jsonl", EPISODES))), str(tmp_path / "b.jsonl"))
    first = json.loads(written.path.read_text().splitlines()[0])["offrl"]
    assert first["name"] == "a" and "converted from" in first["history"][0]
    spelled = DataSpec((), 1, task=task, text=True).to_json()["task"]
    assert loaded(lines(tmp_path / "c.jsonl", [{"offrl": {"name": "n", "task": spelled}}, *EPISODES])).spec.task == task
    known = loaded(lines(tmp_path / "d.jsonl", [{"offrl": {"task": "text-maze"}}, *EPISODES]))
    assert known.spec.task is not None and known.spec.task.name == "text-maze" and known.spec.name == "d"
    convert(DatasetConfig(name=str(tmp_path / "d.jsonl")), str(tmp_path / "g.jsonl"))
    assert json.loads((tmp_path / "g.jsonl").read_text().splitlines()[0])["offrl"]["task"] == "text-maze"
    unknown = loaded(lines(tmp_path / "e.jsonl", [{"offrl": {"task": "text-mazy"}}, *EPISODES]))
    assert unknown.spec.task is None and "there is no task 'text-mazy' here" in capsys.readouterr().err
    with pytest.raises(UserError, match="line 1: the header's task must be"):
        loaded(lines(tmp_path / "f.jsonl", [{"offrl": {"task": {"nome": 1}}}, *EPISODES]))


GOOD = json.dumps(EPISODES[1]).encode() + b"\n"


@pytest.mark.usefixtures("no_collection")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\n \n", "nothing but blank lines"),
        (b"[]", "there are no episodes"),
        (GOOD + b'{"turns": [\n', "line 2 is not JSON"),
        (GOOD + b"\n\n[1, 2\n" + GOOD, "line 4 is not JSON"),
        (GOOD + GOOD.replace(b"left", b"\xff"), "line 2 is not UTF-8 \\(byte 0xff at "),
        (GOOD + GOOD.replace(b"-1.0", b"NaN"), "line 2, turn 0: the reward is nan"),
        (GOOD + GOOD.replace(b'"action"', b'"act"'), "line 2, turn 0 has no 'action'"),
        (GOOD + b"3\n", "line 2 is a number, not an object"),
        (b"3\n" + GOOD, "line 1 is no episode that offrl knows"),
        (b'{"state": "a"}\n', "line 1 is no episode that offrl knows.*it has state"),
        (gzip.compress(GOOD * 400)[:-12], "cannot be unpacked after line [0-9]+ .*cut or damaged"),
        (b"[" * 100_000 + b"\n" + GOOD, "line 1 cannot be read as JSON"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        loaded(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_missing_files_are_guessed(tmp_path: Path) -> None:
    lines(tmp_path / "guesses.jsonl", EPISODES)
    for name in ("gueses.jsonl", "guesses.json"):
        with pytest.raises(UserError, match=r"there is no file .*Did you mean 'guesses.jsonl'"):
            loaded(tmp_path / name)


# ---------------------------------------------------------------------------------------------------------- foreign
# forms


def test_lmrl_gym_sequences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [["w", 0], ["x", False], ["A\n", 1.0], ["B\n", True], ["y", 0], ["C\n", 1], ["z", 0]]
    each = {"sequence": texts, "reward": [0, 0, -1, -2, 0, -3, 0], "done": True, "word": "q"}
    rest = {"sequence": texts, "reward": [0, -1, -2, 0, -3, 0], "done": False}  # without the first text
    acts = {"sequence": texts[2:6], "reward": [-1, -2, -3], "done": 0.0}  # begins with an action, and ends with one
    mute = {"sequence": [["w", 0]], "reward": [0], "done": True}
    data = loaded(lines(tmp_path / "a.jsonl", [each, rest, acts, mute]))
    turns = [("wx", "A\n", -1.0), ("", "B\n", -2.0), ("y", "C\n", -3.0)]
    assert list(to_episodes(data)) == [
        episode(turns, final="z", word="q"),
        episode(turns, final="z", ended="truncated"),
        episode([("", "A\n", -1.0), *turns[1:]], final=None, ended="truncated"),
    ]
    assert "1 episode in which nobody acts left out (first: line 4)" in capsys.readouterr().err and len(data.notes) == 1
    for change, message in (
        ({"reward": [1, 2]}, "2 rewards for 7 texts, of which 3 are actions"),
        ({"reward": [1, 0, -1, -2, 0, -3, 0]}, "text 0, an observation, has the reward 1"),
        ({"sequence": [["w", 2]]}, "'is_action of text 0' is 2, not true or false"),
        ({"sequence": [["w"]]}, "no \\[text, is_action\\] at 0"),
        ({"done": None}, "'done' is None"),
    ):
        with pytest.raises(UserError, match=f"line 2: .*{message}"):
            loaded(lines(tmp_path / "b.jsonl", [each, each | change]))
    with pytest.raises(UserError, match="nobody acts in any of its 1 episodes"):
        loaded(lines(tmp_path / "c.jsonl", [mute]))


def test_lmrl_gym_histories_and_steps(tmp_path: Path) -> None:
    history = {"text_history": ["a", "X\n", "b", "Y\n", "c"], "rewards": [-1, 0], "dones": [False, True]}
    full = {"text_history": ["a", "X\n", "b", "Y\n"], "rewards": [9, -1, 9, 0], "dones": [0, 0, 0, 0]}
    turns = [("a", "X\n", -1.0), ("b", "Y\n", 0.0)]
    found = list(to_episodes(loaded(lines(tmp_path / "a.jsonl", [history, full]))))
    assert found == [episode(turns, final="c"), episode(turns, final=None, ended="truncated")]
    steps = [{"state": o, "action": a, "reward": r, "done": k == 1} for k, (o, a, r) in enumerate(turns)]
    one, two = lines(tmp_path / "one.jsonl", [steps]), lines(tmp_path / "two.jsonl", [steps, steps[:1]])
    assert list(to_episodes(loaded(one))) == [episode(turns, final=None)]
    assert list(to_episodes(loaded(two))) == [
        episode(turns, final=None),
        episode(turns[:1], final=None, ended="truncated"),
    ]
    with pytest.raises(UserError, match="line 1: step 1 is marked as done, and 1 follow it"):
        loaded(lines(tmp_path / "b.jsonl", [[*steps, steps[0]]]))


def test_archer_dialogues(tmp_path: Path) -> None:
    one = {"conversation": ["Is it? Really? No.", "Oslo? Yes, Oslo."], "done": True, "word": "oslo,norway"}
    two = {"lines": ["Is it red? No."], "correct": False, "word": ["apple"]}
    turns = [("Questions:\n", "Is it? Really?\n", -1.0), ("No.\n", "Oslo?\n", 0.0)]
    assert list(to_episodes(loaded(lines(tmp_path / "a.jsonl", [one, two])))) == [
        episode(turns, final="Yes, Oslo.\n", word="oslo,norway"),
        episode([("Questions:\n", "Is it red?\n", -1.0)], final="No.\n", ended="truncated", word=["apple"]),
    ]
    with pytest.raises(UserError, match=r"line 1: line 1 of the conversation is no 'Question\? Answer': 'Hm\.'"):
        loaded(lines(tmp_path / "b.jsonl", [one | {"conversation": ["A? B", "Hm."]}]))


@pytest.mark.skipif(not ARCHER.is_file(), reason=f"the Guess-My-City dialogues are not at {ARCHER}")
def test_guess_my_city() -> None:
    report = inspect_dataset(str(ARCHER))
    assert (
        len(report.lengths) == 950 and report.turns == 17_606 and report.terminated == 590 and report.truncated == 360
    )
    raw = json.loads(ARCHER.read_text())
    expected = [-(len(d["conversation"]) - d["done"]) for d in raw]
    assert report.returns.tolist() == expected and report.lengths.tolist() == [len(d["conversation"]) for d in raw]
    assert not report.corrupting and "17,606 turns, 950 episodes (590 terminated, 360 cut off)" in str(report)


# ------------------------------------------------------------------------------------------------- transforms and
# caches


def test_selection_weights_and_rewards_work_on_texts(tmp_path: Path) -> None:
    path = lines(tmp_path / "log.jsonl", EPISODES)  # returns -0.9, -1, 1.5, 1
    best = loaded(path, top_fraction=0.5, reward_scale=2.0, reward_shift=1.0)
    assert [e["turns"][0]["obs"] for e in to_episodes(best)] == ["c", "d"]
    assert [t["reward"] for e in to_episodes(best) for t in e["turns"]] == [6.0, -1.0, 1.0, 3.0]
    assert next(to_episodes(best))["final_obs"] == "a"
    top = loaded(path, weighting="top", weighting_fraction=0.25)
    assert top.weights is not None and [w > 0 for w in top.weights.tolist()] == [False, False, True, False]
    half = loaded(path, subsample=0.5, subsample_seed=3)
    assert half.num_episodes == 2 and all(e in EPISODES for e in to_episodes(half))
    togo = loaded(path, discount_returns=0.5).columns["returns_to_go"]
    np.testing.assert_allclose(togo[3:6], [2.5 - 0.5, -1.0, 0.0])
    assert loaded(path, drop_timeout_rows=True).transition_rows().tolist() == [0, 2, 3, 4]


@pytest.mark.parametrize(
    "settings",
    [{"normalize_observations": True}, {"action_margin": 0.01}, {"clip_actions": True}, {"weighting": "advantage"},
     {"fields": {"rewards": "r"}}, {"labelled_fraction": 0.5}, {"reward_labels": "x.py:f"}],
)  # fmt: skip
def test_what_needs_numbers_refuses_texts(tmp_path: Path, settings: dict[str, Any]) -> None:
    key = next(iter(settings))
    with pytest.raises(UserError, match=f"dataset.{key}=.* holds texts|holds texts, and dataset.{key} is for numbers"):
        loaded(lines(tmp_path / "log.jsonl", EPISODES), **settings)


def test_concatenation_interns_again(tmp_path: Path) -> None:
    one, two = lines(tmp_path / "one.jsonl", EPISODES[:2]), lines(tmp_path / "two.jsonl", [EPISODES[3], EPISODES[1]])
    both = loaded(one, concatenate=[str(two)])
    assert list(to_episodes(both)) == [*EPISODES[:2], EPISODES[3], EPISODES[1]]  # two has no meta at all
    assert len(set(both.strings)) == len(both.strings) == 7
    numbers = from_arrays(np.zeros((2, 3)), np.zeros((2, 1)), np.zeros(2), name="floats")
    for order in ((both, numbers), (numbers, both)):
        with pytest.raises(UserError, match="one holds texts, floats does not"):
            concatenate(order)


def test_mapped_columns_keep_the_texts(tmp_path: Path) -> None:
    path = lines(tmp_path / "log.jsonl", EPISODES)
    for _ in range(2):  # written, then opened
        data = loaded(path, memory="mmap")
        assert data.mapped and list(to_episodes(data)) == EPISODES
    assert data.fingerprint == loaded(path, cache="always").fingerprint == loaded(path, cache="always").fingerprint


# -------------------------------------------------------------------------------------------------------- tools,
# inspect


def test_tools_make_text_data_from_text_data(tmp_path: Path) -> None:
    one, two = lines(tmp_path / "one.jsonl", EPISODES[:2]), lines(tmp_path / "two.jsonl", EPISODES[2:])
    merged = merge([DatasetConfig(name=str(p)) for p in (one, two)], str(tmp_path / "all.jsonl.gz"))
    assert (merged.rows, merged.episodes, merged.form) == (7, 4, "jsonl") and loaded(
        merged.path
    ).fingerprint == merged.fingerprint
    found = list(to_episodes(loaded(merged.path)))
    assert [e["meta"].pop("source") for e in found] == [0, 0, 1, 1] and found == EPISODES
    before = merged.path.read_bytes()
    again = merge([DatasetConfig(name=str(p)) for p in (one, two)], str(merged.path), force=True)
    assert again.path.read_bytes() == before, "the same data make the same file"
    third = merge([DatasetConfig(name=str(p)) for p in (one, merged.path)], str(tmp_path / "more.jsonl"))
    assert [e["meta"]["source"] for e in to_episodes(loaded(third.path))] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(UserError, match="exists; give another name"):
        convert(DatasetConfig(name=str(one)), str(two))
    with pytest.raises(UserError, match="holds numbers"):
        merge([DatasetConfig(name=str(one)), DatasetConfig()], str(tmp_path / "x.jsonl"))
    with pytest.raises(UserError, match="D4RL's layout holds numbers"):
        convert(DatasetConfig(name=str(one)), str(tmp_path / "x.hdf5"))
    with pytest.raises(UserError, match="JSON lines hold texts"):
        convert(DatasetConfig(), str(tmp_path / "x.jsonl"))
    with pytest.raises(UserError, match=r"dataset\.top_fraction is for loading"):
        convert(DatasetConfig(name=str(one), top_fraction=0.5), str(tmp_path / "x.jsonl"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["all.jsonl.gz", "more.jsonl", "one.jsonl", "two.jsonl"]


def test_subset_keeps_what_it_says(tmp_path: Path) -> None:
    path = lines(tmp_path / "log.jsonl", EPISODES)
    cases: list[tuple[dict[str, Any], list[dict[str, Any]]]] = [
        ({"episodes": "1:3"}, EPISODES[1:3]),
        ({"episodes": [3, 0]}, [EPISODES[3], EPISODES[0]]),
        ({"min_return": -0.95, "max_return": 1.2}, [EPISODES[0], EPISODES[3]]),
        ({"top": 0.5}, EPISODES[2:]),
        ({"rows": "1:4"}, [
            episode([("b", "right\n", 0.1)], final=None, ended="truncated", word="é"),
            EPISODES[1],
            episode([("c", "up\n", 2.5)], final="a", ended="truncated"),
        ]),
    ]  # fmt: skip
    for number, (choice, expected) in enumerate(cases):
        written = subset(DatasetConfig(name=str(path)), str(tmp_path / f"{number}.jsonl"), Choice(**choice))
        assert list(to_episodes(loaded(written.path))) == expected, choice
    shares = [
        text_tools.take(text_tools.read(DatasetConfig(name=str(path))), Choice(fraction=0.5, seed=s), "x")[0]
        for s in (1, 1, 2)
    ]
    assert shares[0].dataset.num_episodes == 2 and shares[0].dataset.fingerprint == shares[1].dataset.fingerprint
    with pytest.raises(UserError, match="no episode is left"):
        subset(DatasetConfig(name=str(path)), str(tmp_path / "x.jsonl"), Choice(min_return=9.0))
    with pytest.raises(UserError, match="say what to keep"):
        subset(DatasetConfig(name=str(path)), str(tmp_path / "x.jsonl"), Choice())
    path.write_bytes(path.read_bytes() + b"oops\n" + GOOD.replace(b"-1.0", b"Infinity"))
    kept = subset(DatasetConfig(name=str(path)), str(tmp_path / "sound.jsonl"), Choice(drop_faulty=True))
    assert list(to_episodes(loaded(kept.path))) == EPISODES and [n.partition(":")[2][:7] for n in kept.notes] == [
        " line 5",
        " line 6",
    ]


def test_inspect_tells_what_is_likely_wrong(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "log.jsonl",
        [*EPISODES, episode([("\ufeffa", "le\nft", 0.0)]), EPISODES[1], episode([("x" * 30_000, "up\n", 0.0)])],
    )
    said = str(inspect_dataset(str(path)))
    assert "10 turns, 7 episodes (4 terminated, 2 cut off, 1 unfinished)" in said
    assert '4  40.0%  "left\\n"' in said and "example: episode 5" not in said
    for text in (
        "[newline] 2 of 10 actions end without a newline, unlike the others (first at episode 3, row 6)",
        "[newline] 1 actions have a newline inside",
        "[empty] 1 actions are empty texts (first at episode 3, row 6)",
        "[mark] 1 observations begin with a byte-order mark (U+FEFF) (first at episode 4, row 7)",
        "[long] 1 observations have more than 20,000 characters, one 30,000",
        "[final] 1 episodes were cut off and have no final_obs",
        "[unfinished] 1 episodes are neither",
        "[duplicate] 1 episode repeats an earlier one, episode 5 the first (of 1)",
    ):
        assert text in said, text
    assert "\ufeff" not in said and "[rewards]" not in said
    lines(path, [EPISODES[1], EPISODES[1] | {"terminated": None}, EPISODES[1]])
    report = inspect_dataset(str(path))
    said = str(report)
    assert len(report.corrupting) == 1
    assert "FAULT [episode] line 2: 'terminated' is null" in said and "2 turns, 2 episodes" in said
    assert (
        "every reward is -1" in said
        and "all 2 episodes have the same return" in said
        and 'every action is "left\\n"' in said
    )
    with pytest.raises(UserError, match="use offrl data inspect"):
        doctor(DatasetConfig(name=str(path)), tmp_path / "page")


# -----------------------------------------------------------------------------------------------------------------
# Minari


@pytest.mark.filterwarnings("ignore::UserWarning:minari")
def test_minari_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    minari, h5py = pytest.importorskip("minari"), pytest.importorskip("h5py")
    from gymnasium.spaces import Text
    from minari.data_collector import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "root"))
    # Minari's own writer, read by offrl
    buffer = [
        EpisodeBuffer(
            None, None, None, ["a", "é", ""], ["L\n", "R\n"], [-1.0, 0.5], [False, True], [False, True], None
        ),
        EpisodeBuffer(None, None, None, ["b", "c"], ["L\n"], [2.0], [False], [True], None),
    ]
    space = Text(9, min_length=0, charset="abcéLR\n")
    for form in ("hdf5", "arrow"):
        minari.create_dataset_from_buffers(
            f"own/{form}-v0", buffer, observation_space=space, action_space=space, data_format=form
        )
        data = loaded(tmp_path / "root" / "own" / f"{form}-v0")
        turns = [("a", "L\n", -1.0), ("é", "R\n", 0.5)]
        assert list(to_episodes(data)) == [
            episode(turns, final=""),
            episode([("b", "L\n", 2.0)], final="c", ended="truncated"),
        ]
        assert (
            data.spec.source == "minari"
            and data.spec.name == f"own/{form}-v0"
            and load_dataset(f"own/{form}-v0").num_episodes == 2
        )
    # offrl's, read by Minari
    task = Task("chain-of-texts", env_id="CartPole-v1", ref_min=0.0, ref_max=1.0)
    header = {"offrl": {"name": "log", "task": dataclasses.asdict(task), "description": "by hand"}}
    path = lines(tmp_path / "log.jsonl", [header, *EPISODES])
    written = convert(DatasetConfig(name=str(path)), "mine/log-v0")
    back = minari.load_dataset("mine/log-v0")
    assert (back.total_episodes, back.total_steps) == (4, 7) and isinstance(back.action_space, Text)
    third = list(back.iterate_episodes())[2]
    assert third.observations == ["c", "a", "a", "a"] and third.actions == ["up\n", "up\n", "left\n"]
    assert third.rewards.tolist() == [2.5, -1.0, 0.0] and not third.terminations.any() and not third.truncations.any()
    assert all(back.observation_space.contains(o) for e in back.iterate_episodes() for o in e.observations)
    data = loaded(written.path)
    assert list(to_episodes(data)) == EPISODES and data.fingerprint == written.fingerprint and data.spec.task == task
    lines_again = convert(DatasetConfig(name="mine/log-v0"), str(tmp_path / "again.jsonl"))
    assert lines_again.fingerprint == written.fingerprint and loaded(lines_again.path).spec.task == task
    with pytest.raises(UserError, match=r"dataset\.normalize_observations"):
        loaded(written.path, normalize_observations=True)
    assert torch.equal(loaded(written.path).columns["rewards"], from_episodes(EPISODES, name="x").columns["rewards"])
    # other hands
    path = written.path / "data"
    meta = json.loads((path / "metadata.json").read_text())
    (path / "metadata.json").write_text(json.dumps(meta | {"total_steps": 8}))
    by_layout = list(to_episodes(loaded(written.path)))
    assert (
        by_layout[0]["final_obs"] == "b"
        and by_layout[0]["meta"] == {}
        and "not those that offrl wrote" in capsys.readouterr().err
    )
    with h5py.File(path / "main_data.hdf5", "a") as file:
        file["episode_2/terminations"][0] = True
        del file["episode_3/actions"]
    for message in ("episode_2 is marked as ended at step 0, and 2 more follow", "episode_3 has no 'actions'"):
        assert message in str(inspect_dataset(str(written.path)))
    with pytest.raises(UserError, match="episode_2 is marked as ended"):
        loaded(written.path)
    with pytest.raises(UserError, match="zero character"):
        convert(DatasetConfig(name=str(lines(tmp_path / "nul.jsonl", [episode([("a\0", "b", 0.0)])]))), "mine/nul-v0")
    assert not (tmp_path / "root" / "mine" / "nul-v0").exists()
