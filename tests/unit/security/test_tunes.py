"""A stranger's tune that somebody continues: its files choose numbers, never a place, a service or code; damage is one
line.
"""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offrl.errors import UserError
from offrl.settings.compose import compose
from offrl.settings.evaluation import cores
from offrl.settings.train import TrainConfig, logger_names
from offrl.settings.untrusted import read_settings
from offrl.tuning import engine, plan, real_episodes
from offrl.tuning.search import states, store
from offrl.tuning.search.space import space_of

Tune = Callable[..., Path]


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tune:
    """`stranger(name=value)`: a tune of which nothing is trained yet, with settings in its tune.json that a stranger
    added.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home" / ".config").mkdir(parents=True)
    g = np.random.default_rng(0)
    np.savez(tmp_path / "log.npz", observations=g.normal(size=(300, 3)), actions=g.uniform(-1, 1, (300, 2)),
             rewards=g.normal(size=300), terminals=np.zeros(300, bool), timeouts=np.arange(300) % 5 == 4)  # fmt: skip

    def make(**more: Any) -> Path:
        plan.prepare(
            {
                "dataset": "log.npz",
                "algos": "iql",
                "budget": "4x64",
                "rungs": 1,
                "retrain": False,
                "out": "t",
                "env": "none",
                "proposer": "random",
                "algo.hidden": [4],
                "algo.expectile": 0.7,
                "quiet": True,
            }
        )
        record = json.loads(Path("t/tune.json").read_text())
        record["given"] |= more
        Path("t/tune.json").write_text(json.dumps(record))
        return tmp_path / "t"

    return make


@pytest.mark.parametrize("name", ["storage", "train.storage"])
def test_a_tunes_file_names_no_store(
    name: str, stranger: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A text file's last line was cut, an empty file filled, a database changed, a file made where the desktop starts
    programs.
    """
    text, empty, base = (tmp_path / "home" / n for n in ("diary.txt", "empty", "base.sqlite"))
    text.write_text("one\ntwo, without an end")
    empty.touch()
    with sqlite3.connect(base) as connection:
        connection.execute("CREATE TABLE letters (text TEXT)")
    before = base.read_bytes()
    new = tmp_path / "home" / ".config" / "autostart" / "x.desktop"
    for place in (text, empty, f"sqlite:///{base}", new):
        folder = stranger(**{name: str(place)})
        assert plan.prepare({"resume": str(folder)}).config.storage is None
        assert f"storage={place}"[:40] in capsys.readouterr().err
    assert text.read_text() == "one\ntwo, without an end" and not empty.read_bytes() and base.read_bytes() == before
    assert not new.parent.exists()
    assert plan.prepare({"resume": str(folder), "storage": "mine.log"}).config.storage == "mine.log", (
        "what a person types"
    )


PLACES = {"launcher": "ray", "jobs": 10**6, "device": "cuda:7", "threads": 100_000, "out": "else", "quiet": False,
          "ope.models_dir": "home/.config", "dataset.cache_dir": "home", "logger": ["tensorboard", "wandb"],
          "workers": 100_000}  # fmt: skip


def test_a_tunes_file_names_no_place_service_or_code(
    stranger: Tune, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')\n")
    (tmp_path / "evil.yaml").write_text("threads: 7\n")
    code = {"plugins": str(tmp_path / "evil.py"), "train.config": str(tmp_path / "evil.yaml")}
    work = plan.prepare({"resume": str(stranger(**PLACES, **code))})
    config, base = work.config, work.base["iql"]
    assert (config.launcher, config.jobs, config.device, config.threads) == ("none", None, "auto", 1)
    assert config.ope.models_dir == "runs" and "dataset.cache_dir" not in base and work.folder == tmp_path / "t"
    assert base["logger"] == ["tensorboard"] and base["workers"] == cores()
    assert not (tmp_path / "PWNED").exists() and not (tmp_path / "else").exists()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(f"{name}=" in error for name in (*PLACES, "plugins", " config"))


def test_what_a_person_types_beside_a_strangers_tune(stranger: Tune, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offrl.settings.train.LOGGERS", ("tensorboard", "wandb"))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    typed = {"threads": 3, "workers": cores() + 1, "logger": "wandb", "jobs": 2, "dataset.memory": "mmap"}
    work = plan.prepare({"resume": str(stranger(**PLACES)), **typed})
    assert (work.config.threads, work.config.jobs) == (3, 2)
    assert {k: work.base["iql"][k] for k in ("workers", "logger", "dataset.memory")} == {
        k: typed[k] for k in typed if k not in ("threads", "jobs")
    }


@pytest.mark.parametrize(
    "name", ["bracket", "algo.temperature", "dataset.concatenate", "space.temperature", "algos", "logger", "given"]
)
def test_settings_of_other_types_are_one_line(name: str, stranger: Tune) -> None:
    path = stranger() / "tune.json"
    record = json.loads(path.read_text())
    for value in ([], [[]], [{}], {"a": {"b": [1]}}, 1.5, "x"):
        path.write_text(json.dumps({**record, "given": {**record["given"], name: value}}))
        with contextlib.suppress(UserError):
            plan.prepare({"resume": str(path.parent)})
    path.write_text('{"given": ' + '{"a": ' * 100 + "1" + "}" * 101)
    with pytest.raises(UserError, match=r"tune\.json cannot be read"):
        plan.prepare({"resume": str(path.parent)})


@pytest.mark.parametrize("name", ["threads", "workers", "eval.workers"])
def test_a_number_of_processes_has_a_bound(name: str) -> None:
    """threads=100000 ended the process."""
    with pytest.raises(UserError, match=rf"{name}=100000 is out of range: the largest allowed value is 1024"):
        compose({name: 100_000})


def test_a_run_sends_its_curves_to_no_service(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "logger: [wandb, tensorboard]\nthreads: 100000\neval: {workers: 100000}\ngiven: {logger: wandb, threads: "
        "100000}\n"
    )
    saved = read_settings(path)
    assert saved["logger"] == ["tensorboard"] and saved["threads"] == saved["eval"]["workers"] == cores()
    assert saved["given"] == {"logger": "none", "threads": cores(), "dataset": None} or saved["given"] == {
        "logger": "none",
        "threads": cores(),
    }
    error = capsys.readouterr().err
    assert (
        all(text in error for text in ("logger=", "threads=100000", "eval.workers=100000")) and error.count("\n") == 1
    )
    path.write_text("logger: tensorboard\nthreads: 1\n")
    assert read_settings(path)["logger"] == "tensorboard" and not capsys.readouterr().err
    with pytest.raises(UserError, match="logger=5 is no name"):
        logger_names(5)
    assert TrainConfig().threads == 1


# ------------------------------------------------------------------------------------------------------------ the store


@pytest.mark.parametrize("content", [b"one\ntwo, without an end", b"\0" * 4096, b"{}\n"])
def test_what_is_no_journal_stays_as_it_is(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("optuna")
    (tmp_path / store.JOURNAL).write_bytes(content)
    with pytest.raises(UserError, match=r"journal\.log is no journal of Optuna's"):
        store.check(None, tmp_path, ["iql"], "me", 1)
    assert (tmp_path / store.JOURNAL).read_bytes() == content


def test_a_sparse_journal_is_not_read(tmp_path: Path) -> None:
    """5 GB of nothing, behind the beginning of a journal or not; and a line that does not end."""
    pytest.importorskip("optuna")
    path = tmp_path / store.JOURNAL
    for size, words in ((5 << 30, "and a journal has 268,435,456 at most"), (100 << 20, "its last line has more than")):
        path.write_bytes(b'{"op_code": 4, ')
        os.truncate(path, size)
        with pytest.raises(UserError, match=words):
            store.check(None, tmp_path, ["iql"], "me", 1)
        assert path.stat().st_size == size
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(UserError, match="is no plain file"):
        store.check(None, tmp_path, ["iql"], "me", 1)


# --------------------------------------------------------------------------------------------------------------- stages

CHOSEN = {
    "setting": "iql-01",
    "why": "",
    "order": ["iql-01", "iql-00"],
    "members": [],
    "vetoed": {},
    "overruled": {},
    "unsafe": {},
    "cost": None,
    "reference": None,
}
ROW = {"setting": "iql-00", "seed": 0, "fqe": 1.0, "distance": 0.1, "exploded": ""}


@pytest.mark.parametrize(
    ("stage", "record", "words"),
    [
        ("chosen", {**CHOSEN, "setting": "iql-99"}, "names the setting iql-99"),
        ("chosen", {**CHOSEN, "order": ["iql-99"]}, "names the setting iql-99"),
        ("chosen", {**CHOSEN, "setting": ["iql-01"]}, "setting"),
        ("chosen", {"setting": "iql-01"}, "'why' is missing"),
        ("played", {"setting": "x", "why": "", "episodes": 3}, "names the setting x"),
        ("kept-0-0", {"settings": {"x": "kept"}}, "names the setting x"),
        ("kept-0-0", {"settings": {}}, "no setting goes on"),
        ("bracket-0", {"settings": ["x"]}, "settings"),
        ("judged", {"methods": ["wis"], "policies": []}, "is judged by fqe"),
        ("judged", {"methods": ["fqe"], "policies": [{**ROW, "fqe": "1"}]}, "fqe"),
        (
            "judged-0-0",
            {"methods": ["fqe"], "policies": [{k: v for k, v in ROW.items() if k != "fqe"}]},
            "'fqe' is missing",
        ),
        ("judged", {"methods": ["fqe"], "policies": [{**ROW, "fqe_draws": "abc"}]}, "fqe_draws"),
        (
            "truth",
            {"environment": "x", "episodes": 1, "normalised": True, "policies": [{"setting": "iql-00"}]},
            "missing",
        ),
        ("retrained-winner", {}, "'rows' is missing"),
        ("retrained-winner", {"rows": [5]}, "rows[0]"),
        ("trained-0-0", {"policies": 5, "rows": 5, "methods": 5}, ""),
    ],
)
def test_a_stage_of_other_settings_is_one_line(stage: str, record: dict[str, Any], words: str) -> None:
    """state/chosen.json with an unknown setting was a KeyError."""
    assert words in states.fault(stage, record, ["iql-00", "iql-01"], ["fqe"])
    assert states.fault("chosen", CHOSEN, ["iql-00", "iql-01"], ["fqe"]) == ""
    assert states.fault("judged", {"methods": ["fqe"], "policies": [ROW]}, [], ["fqe"]) == ""


def test_a_tune_whose_choice_is_unknown_is_refused(stranger: Tune) -> None:
    search = engine.TuningSearch(plan.prepare({"resume": str(stranger())}), show=None)  # type: ignore[arg-type]
    search.finalists = ["iql-00"]
    state = search.work.folder / "state"
    state.mkdir()
    for text in (json.dumps(CHOSEN), "[]", "{", "[" * 100_000):
        (state / "chosen.json").write_text(text)
        with pytest.raises(UserError, match=r"state/chosen\.json is damaged .*; remove it"):
            search.stage("chosen", dict, search.finalists)


@pytest.mark.parametrize(
    "line",
    ["[]", "{", '{"setting": "x", "episode": 0, "return": 1.0}', '{"setting": "a", "episode": "0", "return": 1}'],
)
def test_episodes_of_others_are_one_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / real_episodes.EPISODES
    path.write_text('{"setting": "a", "episode": 0, "return": 1.0}\n' + line + "\n")
    with pytest.raises(UserError, match=r"episodes\.jsonl: line 2 is no episode of a finalist"):
        real_episodes._lines(path, ["a"], False)


def test_proposals_lie_within_what_is_searched() -> None:
    spaces = {
        "iql": space_of(
            "iql",
            compose({"algo": "iql", "experiment": "none"}).algo,
            "none",
            {"temperature": [1, 4], "hidden": [[4], [8]]},
        )
    }
    sound = {"temperature": 4, "hidden": [8]}
    assert states.unknown_proposal({"iql-00": ["iql", sound]}, spaces) == ""
    for wrong in (
        {**sound, "hidden": [10**9]},
        {**sound, "temperature": 1e30},
        {**sound, "temperature": float("nan")},
        {"hidden": [8]},
        5,
    ):
        assert "iql-00" in states.unknown_proposal({"iql-00": ["iql", wrong]}, spaces)
