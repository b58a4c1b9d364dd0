"""What Python users meet: a run at a prompt, its scores and pictures, `predict`, callbacks, the bar of a notebook."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

import offrl as package
from offrl.errors import UserError
from offrl.system.progress import NotebookBar, TrainingProgress, in_notebook

from .conftest import Offrl
from .test_cli import arrays

SMALL = {
    "steps": 20,
    "seeds": 2,
    "compile": "eager",
    "compare": [],
    "algo.hidden": [8],
    "log_every": 5,
    "eval.every": 5,
    "eval.episodes": 1,
    "eval.max_steps": 5,
    "quiet": True,
}


@pytest.fixture
def run(offrl: Offrl) -> package.Run:
    return package.train("td3_bc", arrays(env="Pendulum-v1"), settings=SMALL)


def test_a_run_at_a_prompt_and_in_a_notebook(run: package.Run) -> None:
    text = repr(run)
    assert text.startswith("Run: td3_bc on mine\n")
    assert (
        "2: 0, 1" in text
        and "steps      20\n" in text
        and "95% interval over seeds (step 20" in text
        and str(run.dir) in text
    )
    assert "Pendulum-v1" in text and "not finished" not in text
    assert run._repr_html_().count("<tr>") == text.count("\n")
    frame = run.scores
    assert list(frame["step"]) == [5, 5, 10, 10, 15, 15, 20, 20] and set(frame["seed"]) == {0, 1}
    assert frame.to_dict("records")[-1]["return_mean"] == run.final_scores[-1]["return_mean"]
    figure = run.plot()
    assert figure is not None and figure._repr_png_().startswith(b"\x89PNG")  # type: ignore[attr-defined]
    (run.dir / "scores.csv").unlink()
    assert run.plot() is None and run.scores.empty and "step" in run.scores and "not evaluated yet" in repr(run)


def test_names_from_files_stay_text(run: package.Run) -> None:
    run.dataset = "<script>\x1b[2J"
    assert "<script>" not in run._repr_html_() and "\x1b" not in repr(run)


def test_without_pandas(run: package.Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"pip install pandas; run\.score_rows is the same"):
        _ = run.scores
    assert len(run.score_rows) == 8


def test_predict(run: package.Run) -> None:
    policy, batch = run.policy(seed=1), np.linspace(-1, 1, 12).reshape(4, 3)
    action, state = policy.predict(batch[0], deterministic=True)
    assert state is None and np.array_equal(action, policy.act(batch[0]))
    actions, _ = policy.predict(batch, state, np.ones(4, bool), deterministic=True)
    assert actions.shape == (4, 1) and np.allclose(actions[0], action, atol=1e-6)
    first, second = policy.predict(batch)[0], policy.predict(batch)[0]
    assert not np.array_equal(first, second), "each sample is another one"
    with pytest.raises(UserError, match="this policy takes"):
        policy.predict(np.zeros(4), deterministic=True)


def test_a_callback_sees_each_evaluation_and_ends_the_run(offrl: Offrl) -> None:
    seen: list[Any] = []

    def look(event: package.EvaluationEvent) -> bool | None:
        seen.append((event.step, len(event.policies), event.mean, [row["seed"] for row in event.scores]))
        return False if event.step >= 10 else None

    run = package.train("bc", arrays(env="Pendulum-v1"), settings=SMALL, on_evaluation=look)
    assert [s[0] for s in seen] == [5, 10] and seen[0][1] == 2 and seen[0][3] == [0, 1]
    assert seen[-1][2] == pytest.approx(np.mean([r["return_mean"] for r in run.final_scores]))
    assert run.final_scores[0]["step"] == 10 and run.policy(1).act(np.zeros(3)).shape == (1,)
    from offrl.runs.results import collect

    assert {s.step for s in collect([run.dir]).scores if s.final} == {10}, "it is a finished run"
    again = package.train("bc", arrays(env="Pendulum-v1"), settings=SMALL, on_evaluation=look)
    assert len(seen) == 2 and again.final_scores == run.final_scores, "the same call returns at once"
    more = package.train("bc", arrays(env="Pendulum-v1"), settings={**SMALL, "steps": 30})
    assert more.dir == run.dir and more.final_scores[0]["step"] == 30


def test_a_callback_that_fails_loses_nothing(offrl: Offrl) -> None:
    def fails(event: Any) -> None:
        if event.step == 10:
            raise KeyError("best")

    with pytest.raises(
        UserError, match=r"fails failed at .*test_python.py:\d+ \(step 10\): KeyError: 'best'; all is saved in runs"
    ):
        package.train("bc", arrays(env="Pendulum-v1"), name="a", settings=SMALL, on_evaluation=fails)
    run = package.train("bc", arrays(env="Pendulum-v1"), name="a", settings=SMALL)
    straight = package.train("bc", arrays(env="Pendulum-v1"), name="b", settings=SMALL)
    assert run.score_rows == straight.score_rows
    with pytest.raises(UserError, match="cannot be called with one argument"):
        package.train("bc", arrays(), settings=SMALL, on_evaluation=lambda: None)


def test_the_bar_of_a_notebook(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[dict[str, str]] = []

    def display(data: dict[str, str], raw: bool, display_id: bool) -> Any:
        shown.append(data)
        return types.SimpleNamespace(update=lambda data, raw: shown.append(data))

    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: types.SimpleNamespace(kernel=object())  # type: ignore[attr-defined]
    ipython.display = types.ModuleType("IPython.display")  # type: ignore[attr-defined]
    ipython.display.display = display  # type: ignore[attr-defined]
    assert not in_notebook() or "IPython" in sys.modules
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", ipython.display)
    assert in_notebook()
    bar = TrainingProgress("iql on <x>", 100, 4, "4 seeds")
    bar.update(50, 10.0, "score 12 <b>")
    bar.update(100, 10.0)
    bar.stop()
    assert (
        "width:50.0%" in shown[0]["text/html"]
        and "50/100" in shown[0]["text/html"]
        and "&lt;b&gt;" in shown[0]["text/html"]
    )
    assert "width:100.0%" in shown[-1]["text/html"] and shown[-1]["text/plain"].startswith("100/100")
    assert capsys.readouterr().out == "iql on <x>\n", "no lines besides"
    NotebookBar(None, "reading").update(3, now=True)
    assert "3" in shown[-1]["text/plain"]
    assert TrainingProgress("", 10, quiet=True).cell is None
