"""Groups of settings: names, mistakes, and how few lines a list of an algorithm has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offrl.cli.words.listing import algorithm_settings
from offrl.errors import UserError
from offrl.settings import known
from offrl.settings.compose import compose, flatten, parse, rehearse
from offrl.settings.groups import CONTENT, FLAT, GROUPED, GROUPS, by_group, flat_name, grouped_name
from offrl.settings.train import TrainConfig
from offrl.tuning.plan import flatten_names

ALGORITHMS = [*known.index()["algorithms"]]
SHOWN = {"iql": 17, "cql": 22, "combo": 25}  # lines of settings and groups, at most
MOST = 30


def test_each_name_in_a_group_is_one_setting() -> None:
    assert len(FLAT) == len(GROUPED) == sum(len(names.split()) for names in GROUPS.values()) and [*CONTENT] == [*GROUPS]
    for algo in ALGORITHMS:
        names = [*known.settings_of(algo)]
        assert [flat_name(f"algo.{grouped_name(n)}") for n in names] == [f"algo.{n}" for n in names]
        assert not GROUPS.keys() & {*names}, "algo.critic=... would be a setting and a group"
        assert sorted(n for members in by_group(names).values() for n in members) == sorted(names)
    assert not GROUPED.keys() - {n for algo in ALGORITHMS for n in known.settings_of(algo)}
    assert not GROUPS.keys() & {*TrainConfig.__dataclass_fields__, "all"}


@pytest.mark.parametrize(
    ("flat", "grouped"),
    [
        ("critic_hidden", "critic.hidden"),
        ("layer_norm", "critic.layer_norm"),
        ("value_head", "critic.value_head"),
        ("actor_learning_rate", "actor.learning_rate"),
        ("learning_rate", "optimizer.learning_rate"),
        ("max_entropy_weight", "entropy.max_weight"),
        ("model_dropout", "model.dropout"),
        ("plan_horizon", "plan.horizon"),
        ("expectile", "expectile"),
        ("batch_size", "batch_size"),
    ],
)
def test_names(flat: str, grouped: str) -> None:
    assert grouped_name(flat) == grouped and flat_name(grouped) == flat
    for prefix in ("algo.", "grid.", "space.", "space.iql.", ""):
        assert flat_name(prefix + grouped) == prefix + flat


def test_groups_are_understood_wherever_settings_are_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "algo: {name: iql, critic: {hidden: [8], layer_norm: true}}\ngrid: {actor: {learning_rate: [1, 2]}}"
    )
    values = parse(["algo.critic.hidden=[8]", "algo.critic.layer_norm=true", "grid.actor.learning_rate=1,2"])
    for given in (
        values,
        {"config": str(file)},
        {"algo": {"name": "iql", "critic": {"hidden": [8], "layer_norm": True}}},
    ):
        config = compose({"dataset": "-", **given})
        assert config.algo.critic_hidden == [8] and config.algo.layer_norm
        assert config.grid == ({} if "algo" in given else {"actor_learning_rate": [1.0, 2.0]})
    assert capsys.readouterr().err == "", "neither name is a habit of others, which a note explains"
    assert compose({"dataset": "-", "algo": "iql", "critic.hidden": [8]}).algo.critic_hidden == [8]
    assert flatten({"algo.critic.network": "a:b"}) == {"algo.critic_network": "a:b"}
    assert parse(["algo.critic.network=a b.py:NAME"]) == {"algo.critic.network": "a b.py:NAME"}
    names = flatten_names({"space.actor.learning_rate": [1, 2], "space.iql.critic.lipschitz": [1, 2]})
    assert [*names] == ["space.actor_learning_rate", "space.iql.lipschitz"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algo.critic.hiden": [8]}, r"unknown setting 'algo.critic.hiden'. Did you mean 'algo.critic.hidden'\?"),
        ({"algo.critic": 3}, r"algo.critic=3: critic is a group of settings; write one of them, such as algo.critic."),
        ({"algo": "bc", "algo.entropy.wight": 3}, r"'algo.entropy.wight': the algorithm has no settings of the group"),
        ({"algo.critic.hidden": [8], "algo.critic_hidden": [8]}, r"algo.critic_hidden is given twice"),
        ({"grid.critic.lipschiz": [1, 2]}, r"'grid.critic.lipschiz'. Did you mean 'critic.lipschitz_radius'\?"),
    ],
)
def test_mistakes(values: dict[str, Any], message: str) -> None:
    for check in (compose, rehearse):
        with pytest.raises(UserError, match=message):
            check({"dataset": "-", **values})


def test_a_list_shows_the_papers_settings_and_folds_the_groups() -> None:
    for algo in ALGORITHMS:
        lines = [line for line in algorithm_settings(algo) if line.startswith(("  algo.", "  offrl list"))]
        assert len(lines) <= SHOWN.get(algo, MOST), algo
        everything = {line.split("=")[0] for line in algorithm_settings(f"{algo}.all")}
        assert everything >= {f"  algo.{grouped_name(n)}" for n in known.settings_of(algo)}
    text = "\n".join(algorithm_settings("iql"))
    assert (
        "  algo.expectile=0.7" in text and "  offrl list algo=iql.critic " in text and "algo.critic.hidden" not in text
    )
    assert algorithm_settings("IQL.critic")[0].startswith("  algo.critic.hidden=[] ")
    with pytest.raises(UserError, match=r"algo=iql has no group of settings 'critc'. Did you mean 'critic'\?"):
        algorithm_settings("iql.critc")
