"""The identity of a run, and that of one made before some of today's settings were there."""

from __future__ import annotations

import json
from pathlib import Path

from offrl import registry
from offrl.runs import record as runs
from offrl.runs.settings import run_settings
from offrl.settings.compose import compose
from offrl.settings.field import describe

OLD = Path(__file__).parents[1] / "data" / "run-0.1"


def test_runs_are_told_apart_in_words() -> None:
    plain, more = (
        runs.identity(compose(values)) for values in ({"algo": "iql"}, {"algo": "iql", "algo.critics": 3, "dataset.weighting": "return"})
    )
    assert runs.change(plain, plain) == "" and runs.complete(plain) == plain
    assert runs.change(plain, {**more, "dataset": plain["dataset"]}) == "algo.critics: 2 there, 3 here"
    assert runs.change({**more, "algo": plain["algo"]}, plain) == "dataset.weighting: return there, none here"
    assert runs.change(plain, runs.identity(compose({"algo": "iql", "algo.expectile": 0.8}))) == "algo.expectile: 0.7 there, 0.8 here"


def test_a_run_made_before_a_setting_was_there_had_its_default() -> None:
    old = json.loads((OLD / "run.json").read_text())["identity"]
    same = run_settings(OLD)
    assert "critics" not in old["algo"] and "weighting" not in old["dataset"] and "precision" not in old
    assert runs.change(old, json.loads(json.dumps(runs.identity(same)))) == ""
    for name, words in {
        "algo.critics": "algo.critics: 2 there, 3 here",
        "algo.expectile": "algo.expectile: 0.7 there, 3 here",
        "dataset.expert_episodes": "dataset.expert_episodes: 1 there, 3 here",
    }.items():
        part, _, field = name.partition(".")
        new = runs.identity(same)
        new[part] = {**new[part], field: 3}
        assert runs.change(old, new) == words
    assert runs.change(old, {**runs.identity(same), "precision": "bf16"}) == "precision: float32 there, bf16 here"


def test_what_a_grid_varies_is_not_completed() -> None:
    identity = runs.identity(compose({"algo": "iql", "grid.temperature": [1, 3]}))
    assert "temperature" not in identity["algo"] and runs.complete(identity) == identity


def test_help_leaves_out_what_the_library_fills_in() -> None:
    text = "\n".join(describe(registry.get("algo", "vadt").Config(), "algo."))
    assert "algo.values=" in text and "algo.values_id" not in text and "algo.values_settings" not in text
