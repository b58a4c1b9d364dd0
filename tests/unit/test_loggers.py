"""W&B as a logger, with a package that only takes notes."""

from __future__ import annotations

import importlib.machinery
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from offrl.errors import UserError
from offrl.runs.log import RunLog
from offrl.settings.replicas import expand
from offrl.settings.train import logger_names


class Wandb(types.ModuleType):
    """Notes what it is told: runs by id, each a list of calls."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
        self.runs: dict[str, list[Any]] = {}
        self.fails = False

    def init(self, *, id: str, resume: str, config: dict[str, Any], **about: Any) -> Any:
        notes = self.runs.setdefault(id, [])
        notes.append(("init", resume, config, about["project"]))

        def log(values: dict[str, Any]) -> None:
            if self.fails:
                raise ConnectionError("no route\nto host")
            notes.append(values)

        return types.SimpleNamespace(
            log=log,
            define_metric=lambda *a, **k: None,
            finish=lambda: notes.append("finished"),
            config=types.SimpleNamespace(update=lambda values, allow_val_change: None),
            summary=types.SimpleNamespace(update=notes.append),
        )

    Histogram = staticmethod(list)


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Wandb:
    module = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return module


def start(path: Path, *loggers: str, resume_step: int | None = None) -> RunLog:
    return RunLog(
        path,
        resume_step=resume_step,
        quiet=True,
        total_steps=40,
        replicas=expand({}, [3, 7]),
        title="",
        loggers=loggers,
        settings={"lr": 0.1},
    )


def test_a_resumed_run_goes_on_in_the_same_run_of_wandb(tmp_path: Path, wandb: Wandb) -> None:
    with start(tmp_path, "wandb") as log:
        log.metrics(10, {"loss": [1.0, 3.0]})
        log.scores(10, [{"seed": s, "return_mean": 5.0, "episodes": 1} for s in (3, 7)])
    with start(tmp_path, "wandb", resume_step=10) as log:
        log.metrics(20, {"loss": [2.0, float("nan")]})
        log.hparams({"lr": 0.1})
    ((identity, notes),) = wandb.runs.items()
    assert json.loads((tmp_path / "loggers.json").read_text()) == {"wandb": identity}
    assert notes[0] == ("init", "allow", {"lr": 0.1}, "offrl")
    assert notes[1] == {"update": 10, "loss/mean": 2.0, "seed_3/loss": 1.0, "seed_7/loss": 3.0}
    assert notes[2]["eval/return/mean"] == 5.0
    assert notes[3] == "finished" and notes[4][0] == "init"
    assert notes[5] == {"update": 20, "loss/mean": 2.0, "seed_3/loss": 2.0}


def test_a_service_that_fails_loses_nothing(tmp_path: Path, wandb: Wandb, capsys: pytest.CaptureFixture[str]) -> None:
    with start(tmp_path, "wandb") as log:
        log.metrics(10, {"loss": [1.0, 3.0]})
        wandb.fails = True
        for step in (20, 30):
            log.metrics(step, {"loss": [1.0, 3.0]})
    assert (
        capsys.readouterr().err == "offrl: warning: logger=wandb is left out from here on: ConnectionError: no route\n"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_names_of_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    assert logger_names("tensorboard") == ["tensorboard"] and logger_names("none") == [] and logger_names(None) == []
    with pytest.raises(UserError, match=r"logger=wandbb is not known.*Did you mean 'wandb'"):
        logger_names(["tensorboard", "wandbb"])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="logger=wandb needs pip install wandb"):
        logger_names("wandb")
