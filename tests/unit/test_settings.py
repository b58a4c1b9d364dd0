"""The identity of a run, and that of one made before some of today's settings were there."""

from __future__ import annotations

import json

import pytest

from offrl import registry
from offrl.errors import UserError
from offrl.runs import record as runs
from offrl.settings.compose import compose, parse
from offrl.settings.field import describe


def test_runs_are_told_apart_in_words() -> None:
    plain, more = (
        runs.identity(compose(values))
        for values in ({"algo": "iql"}, {"algo": "iql", "algo.critics": 3, "dataset.weighting": "return"})
    )
    assert runs.change(plain, plain) == "" and runs.complete(plain) == plain
    assert runs.change(plain, {**more, "dataset": plain["dataset"]}) == "algo.critics: 2 there, 3 here"
    assert runs.change({**more, "algo": plain["algo"]}, plain) == "dataset.weighting: return there, none here"
    assert (
        runs.change(plain, runs.identity(compose({"algo": "iql", "algo.expectile": 0.8})))
        == "algo.expectile: 0.7 there, 0.8 here"
    )


def test_a_run_made_before_a_setting_was_there_had_its_default() -> None:
    same = compose({"algo": "iql"})
    old = json.loads(json.dumps(runs.identity(same)))
    for settings, name in ((old["algo"], "critics"), (old["dataset"], "weighting"), (old, "precision")):
        del settings[name]
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


def test_a_number_is_a_list_of_one() -> None:
    config = compose(parse(["dataset.action_low=-1", "dataset.action_high=2.5", "algo.hidden=64"]))
    assert (config.dataset.action_low, config.dataset.action_high, config.algo.hidden) == ([-1.0], [2.5], [64])
    with pytest.raises(UserError, match=r"dataset\.action_low=[Tt]rue"):
        compose(parse(["dataset.action_low=true", "dataset.action_high=1"]))
