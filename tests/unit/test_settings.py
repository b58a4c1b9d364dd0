"""Settings that were added after runs existed."""

from __future__ import annotations

from offrl.runs import record as runs
from offrl.settings.compose import compose


def test_a_setting_added_later_is_part_of_a_run_only_where_it_is_used() -> None:
    """Runs of before it keep their names and continue; others are told apart, and in words."""
    plain, more = ({"algo": "iql"}, {"algo": "iql", "algo.critics": 3, "dataset.weighting": "return"})
    old, new = (runs.identity(compose(values)) for values in (plain, more))
    assert "critics" not in old["algo"] and "weighting" not in old["dataset"]
    assert new["algo"]["critics"] == 3 and new["dataset"]["weighting"] == "return"
    assert runs.change(old, old) == ""
    assert runs.change(old, {**new, "dataset": old["dataset"]}) == "algo.critics: 2 there, 3 here"
    assert runs.change({**new, "algo": old["algo"]}, old) == "dataset.weighting: return there, none here"
    assert runs.change(old, runs.identity(compose({"algo": "iql", "algo.expectile": 0.8}))) == "algo.expectile: 0.7 there, 0.8 here"
