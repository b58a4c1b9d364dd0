"""The identity of a run, and that of one made before some of today's settings were there."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from offrl import registry
from offrl.errors import UserError
from offrl.runs import record as runs
from offrl.runs.settings import run_settings
from offrl.settings.compose import compose, parse
from offrl.settings.field import describe
from offrl.settings.saved import restored

OLD = Path(__file__).parents[1] / "data" / "run-0.1"


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


FLAX = {"layer_norm_epsilon": (1e-5, 1e-6)}
TARGETS = {**FLAX, "target_update": ("after", "before")}
YOUNGER: dict[str, dict[str, tuple[Any, Any]]] = {  # {setting: (what version 0.1 did, today's default)}
    **dict.fromkeys(("rebrac", "td3_awr", "xql", "f_dvl", "recoil", "qrl"), FLAX),
    **dict.fromkeys(("gcivl", "gciql", "hiql", "ota"), TARGETS),
    "crl": {**FLAX, "energy_floor": (math.log(1e-6), None)},
    "decision_diffuser": {"discount": (1.0, 0.99)},
}


@pytest.mark.parametrize("name", YOUNGER)
def test_a_run_made_before_a_default_changed_goes_on_as_it_began(name: str, tmp_path: Path) -> None:
    """In what is resumed, compared, fine-tuned, built on and loaded as a policy."""
    younger, kind = YOUNGER[name], registry.get("algo", name)
    today = compose({"algo": name, "dataset": "-", "runs_dir": str(tmp_path), "name": "run"})
    assert {k: getattr(today.algo, k) for k in younger} == {k: new for k, (_, new) in younger.items()}
    old = json.loads(json.dumps(runs.identity(today)))
    saved = json.loads(json.dumps(dataclasses.asdict(today)))
    for settings in (old["algo"], saved["algo"]):
        for setting in younger:
            del settings[setting]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / runs.RECORD).write_text(json.dumps({"identity": old}))
    (tmp_path / "run" / runs.CONFIG).write_text(json.dumps(saved))  # JSON is YAML
    before = {k: value for k, (value, _) in younger.items()}
    resumed = run_settings(tmp_path / "run")
    policy = restored(kind.Config, saved["algo"], "policy.safetensors")
    record = runs.read_record(tmp_path / "run")["identity"]
    for config in (resumed.algo, policy):
        assert {k: getattr(config, k) for k in younger} == before
    assert runs.change(record, json.loads(json.dumps(runs.identity(resumed)))) == ""
    assert f"algo.{min(younger, key=list(record['algo']).index)}: " in runs.change(record, runs.identity(today))


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
