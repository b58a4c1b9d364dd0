"""Keys and passwords come into no file, however cells are launched (row 8 of the table of attacks in issue 37)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offrl.benchmark import cell, plan
from offrl.data import DatasetConfig, load_dataset
from offrl.data.dataset import DataSpec
from offrl.finetuning import record as finetuned
from offrl.finetuning.config import FinetuneConfig
from offrl.runs import record
from offrl.settings.compose import compose
from offrl.system.addresses import split_login, without_logins
from offrl.tasks.task import Task

KEY, PASSWORD = "sk-very-secret-0123456789", "pass-word-99"
MIRROR = f"https://user:{PASSWORD}@mirror.example/sets"


@pytest.fixture
def secretive(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFFRL_LLM_KEY", "OFFRL_HUB_TOKEN", "OFFRL_DB_PASSWORD", "OFFRL_ANY_SECRET"):
        monkeypatch.setenv(name, KEY)
    monkeypatch.setenv("OFFRL_MIRROR", MIRROR)
    monkeypatch.setenv("OFFRL_TRUST", "1")
    monkeypatch.setenv("MINARI_DATASETS_PATH", "/data/minari")


def orders(**values: Any) -> dict[str, Any]:
    return {
        "token": "t",
        "command": ["host", "", 1],
        "cwd": "/",
        "cells": {"x": {"dataset": "d", "steps": 1, "values": values}},
    }


def test_a_plan_holds_no_key_and_no_password(tmp_path: Path, secretive: None) -> None:
    """Row 8: every variable OFFRL_* was written to cells/plan.json, which everybody could read."""
    (tmp_path / plan.CELLS).mkdir()
    with cell.write_job_spec(tmp_path, orders(**{"dataset.mirror": MIRROR})):
        path = tmp_path / plan.CELLS / plan.PLAN
        text = path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert KEY not in text and PASSWORD not in text and "user:" not in text
    content = json.loads(text)
    assert content["environment"] == {
        "OFFRL_MIRROR": "https://mirror.example/sets",
        "OFFRL_TRUST": "1",
        "MINARI_DATASETS_PATH": "/data/minari",
        **{
            name: os.environ[name]
            for name in cell.PASSED_ON
            if name in os.environ and name not in ("OFFRL_MIRROR", "OFFRL_TRUST")
        },
    }
    assert content["cells"]["x"]["values"] == {"dataset.mirror": "https://mirror.example/sets"}


def test_a_plan_replaces_a_file_that_everybody_reads(tmp_path: Path) -> None:
    """Row 8: what lay there under that name, readable by all or a link, is replaced and not written to."""
    (tmp_path / plan.CELLS).mkdir()
    path, elsewhere = tmp_path / plan.CELLS / plan.PLAN, tmp_path / "elsewhere"
    elsewhere.write_text("")
    (path.parent / f".{plan.PLAN}.part").symlink_to(elsewhere)
    path.symlink_to(elsewhere)
    with cell.write_job_spec(tmp_path, orders()):
        assert not path.is_symlink() and path.stat().st_mode & 0o777 == 0o600
    assert elsewhere.read_text() == ""


def test_jobs_of_this_machine_still_have_the_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 8: a login typed in dataset.mirror goes to jobs by the environment, which a launcher hands on, and is gone
    afterwards.
    """
    monkeypatch.delenv("OFFRL_MIRROR", raising=False)
    (tmp_path / plan.CELLS).mkdir()
    with cell.write_job_spec(tmp_path, orders(**{"dataset.mirror": MIRROR})):
        saved = json.loads((tmp_path / plan.CELLS / plan.PLAN).read_text())["cells"]["x"]["values"]["dataset.mirror"]
        url, login = split_login(saved, os.environ["OFFRL_MIRROR"])  # as `fetch` does
    assert url == "https://mirror.example/sets" and login == split_login(MIRROR)[1] is not None
    assert "OFFRL_MIRROR" not in os.environ
    # no login goes to another host
    assert split_login("https://other.example/sets", MIRROR) == ("https://other.example/sets", None)
    assert split_login("http://mirror.example/sets", MIRROR)[1] is None


def test_a_run_saves_its_mirror_without_the_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 8: a password in dataset.mirror was saved twice in config.yaml, which goes along when a run is shared."""
    config = compose({"algo": "bc", "dataset": "builtin", "dataset.mirror": MIRROR, "seeds": 1, "name": "x"})
    assert config.dataset.mirror == MIRROR  # this run has it
    data = load_dataset(config.dataset, quiet=True)
    record.prepare(tmp_path, config, data, lambda: ("eager", 1), torch.device("cpu"))
    files = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(files) == {record.CONFIG, record.RECORD} and PASSWORD not in "".join(files.values())
    assert files[record.CONFIG].count("https://mirror.example/sets") == 2  # the setting, and what was given


def test_a_fine_tuning_run_saves_its_mirror_without_the_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 8."""
    monkeypatch.setattr(finetuned, "identity", lambda start: {})
    data = DatasetConfig(mirror=MIRROR)
    start: Any = SimpleNamespace(
        config=FinetuneConfig(),
        algorithm=SimpleNamespace(config=data),
        user_settings={"dataset.mirror": MIRROR},
        data=data,
        described={},
        spec=DataSpec((1,), 1),
        task=Task("x"),
        replicas=[],
        label="x",
        parent=None,
        fixed={},
        anneal={},
    )
    finetuned.claim(tmp_path, start, "eager", "cpu")
    text = "".join(path.read_text() for path in tmp_path.iterdir())
    assert PASSWORD not in text and text.count("https://mirror.example/sets") == 3


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        (MIRROR, "https://mirror.example/sets"),
        ("cannot reach http://a:b@h/x and ftp://c@d.", "cannot reach http://h/x and ftp://d."),
        ("https://h/path@2x?q=a@b", "https://h/path@2x?q=a@b"),
        ("https://user:pa/s?s#@h:8443/x", "https://h:8443/x"),
        ("http://h:8080/x@2 and http://h:8080/?q=a@b", "http://h:8080/x@2 and http://h:8080/?q=a@b"),
        ("me@h.example", "me@h.example"),
        ("https://us%40er:p%2Fw@h:8443", "https://h:8443"),
    ],
)
def test_logins_in_addresses(text: str, bare: str) -> None:
    """Row 8."""
    assert without_logins(text) == bare and without_logins({"a": [text, 1]}) == {"a": [bare, 1]}
    assert ("***@" in without_logins(text, "***@")) == (text != bare)
