"""Settings as people write them, nonsense that trains, and the completion of commands."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import habits
import pytest

from offrl.algorithms.iql import IQLConfig
from offrl.cli import data, train
from offrl.cli.main import main
from offrl.cli.words import switches
from offrl.cli.words.completion import BASH, FISH, ZSH, candidates
from offrl.collect.config import CollectConfig
from offrl.errors import UserError
from offrl.labelling.config import LabelSettings
from offrl.settings import known
from offrl.settings.advice import sanity_checks
from offrl.settings.aliases.algorithms import NOT_HERE, OTHER_NAMES
from offrl.settings.aliases.arguments import as_settings, train_values
from offrl.settings.aliases.datasets import environment_hint, hint
from offrl.settings.aliases.names import WORDS, groups, understood
from offrl.settings.compose import compose, fill, parse, rehearse
from offrl.settings.field import describe
from offrl.settings.presets import algorithm_group, config_names
from offrl.settings.train import TrainConfig

LATER = ("device=cuda:0, but torch",)  # said when the device is asked for


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    habits.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(command: str) -> dict[str, object]:
    return rehearse(train_values(as_settings(command.split()[1:], switches("train"))))


@pytest.mark.parametrize(("command", "habit", "answer"), habits.CASES, ids=[c for c, _, _ in habits.CASES])
def test_habits(folder: Path, command: str, habit: str, answer: str) -> None:
    if answer in LATER:
        assert read(command)["device"] == "cuda:0"
        return
    if not answer.startswith(habits.TRAINS):
        with pytest.raises(UserError) as error:
            read(command)
        assert answer in str(error.value) and "\n" not in str(error.value)
        return
    values = read(command)
    name, _, value = answer.removeprefix(habits.TRAINS).partition("=")
    if name == "algo":
        assert algorithm_group(str(values["algo"])) == value
    elif name == "steps":
        assert name in values  # 100k becomes a number where it is set
    else:
        assert [*map(str, flat(values[name]))] == [v.removesuffix(".0") for v in value.split(",")]


def flat(value: object) -> list[object]:
    values = value if isinstance(value, list) else [value]
    return [str(v).lower() if isinstance(v, bool) else v for v in values]


def test_counts_have_units_and_lists_may_have_one_entry() -> None:
    values = parse(["steps=100k", "eval.every=1.5k", "seeds=7,", "dataset.concatenate=b.hdf5", "compare=bc,awac"])
    config = compose({**values, "dataset": "builtin"})
    assert (config.steps, config.eval.every, config.seeds) == (100_000, 1500, [7])
    assert config.dataset.concatenate == ["b.hdf5"] and config.compare == ["bc", "awac"]
    with pytest.raises(UserError, match=r"steps=1\.5x must be a whole number"):
        compose(parse(["steps=1.5x"]))


def test_notes_say_what_was_understood_and_python_is_as_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert compose({"lr": 1e-4, "gamma": 0.9}).algo.learning_rate == 1e-4
    shown = capsys.readouterr().err
    assert (
        "note: lr=0.0001 is read as algo.learning_rate=0.0001" in shown
        and "note: gamma=0.9 is read as algo.discount=0.9" in shown
    )
    assert understood({"algo.temperature": 3.0, "steps": 5}) == {"algo.temperature": 3.0, "steps": 5}
    assert capsys.readouterr().err == ""


def test_every_word_stands_for_settings_that_there_are() -> None:
    every = {f"algo.{n}" for a in known.index()["algorithms"] for n in known.settings_of(a)}
    every |= {f"{g}.{n}" for g, names in groups().items() for n in names} | set(TrainConfig.__dataclass_fields__)
    assert not [(word, n) for word, names in WORDS.items() for n in names if n not in every]
    assert not [word for word in WORDS if word in TrainConfig.__dataclass_fields__]
    assert not {*OTHER_NAMES.values()} - {*config_names("algo")} and not NOT_HERE.keys() & OTHER_NAMES.keys()


def test_the_index_is_what_the_algorithms_say() -> None:
    from offrl import registry

    for name, about in known.index()["algorithms"].items():
        kind = registry.get("algo", about.get("base", name)).Config
        own = {f.name: f.metadata for f in dataclasses.fields(kind) if f.name != "name"}
        entries = {known.index()["settings"][key]["name"]: known.index()["settings"][key] for key in about["settings"]}
        cure = "python scripts/known_names.py"
        assert entries.keys() == own.keys(), cure
        assert all(
            entries[f]["help"] == m.get("help", "") and entries[f].get("low") == m.get("low") for f, m in own.items()
        ), cure
    assert {*known.index()["algorithms"]} == {*config_names("algo")}
    lines = {line.split("=")[0]: line for line in describe(IQLConfig(), "algo.")}
    assert lines["  algo.expectile"] in describe(known.schema("iql"), "algo.")


@pytest.mark.slow  # composes every algorithm
def test_the_index_is_up_to_date() -> None:
    import known_names

    assert known_names.make() == known.FILE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("old", "new"),
    {
        "algo=qc short=drop": "algo.truncated_windows",
        "algo=qc algo.actor=distil": "algo.actor_type",
        "algo=act algo.execute=2": "algo.action_steps",
        "algo=sequence_rl recall=data": "algo.state_source",
        "algo=alol credit=reward": "algo.credit_assignment",
        "algo=qrl spread=4": "algo.softplus_offset",
        "algo=sindy algo.full=true": "algo.joint_library",
        "algo=sindy certainty=2": "algo.min_z_score",
        "algo=archer_online rollouts=3": "algo.iteration_episodes",
        "algo=archer bins=21": "algo.value_bins",
        "algo=archer algo.critic=scratch": "algo.critic_lm",
    }.items(),
)
def test_settings_by_former_names(old: str, new: str) -> None:
    assert new in rehearse(train_values(old.split()))


def test_settings_of_other_commands_by_former_names() -> None:
    assert fill(CollectConfig(), {"sets": ["random"]}, "collect").datasets == ["random"]
    labels = fill(LabelSettings(), {"add": False, "missing": "zero", "swap": False}, "data label")
    assert (labels.add_to_rewards, labels.on_missing, labels.both_orders) == (False, "zero", False)


def test_old_names() -> None:
    assert "hopper-medium-v2" in hint("Hopper-v2") and "eval.env=Hopper-v5" in hint("Hopper-v2")
    assert (
        "Hopper-v5 works" in environment_hint("Hopper-v2")
        and environment_hint("Hopper-v5") == environment_hint("Maze-v0") == ""
    )
    assert "hopper-medium-v2" in hint("hopper-medium-v9") and hint("nothing") == ""


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"algo.batch_size": 500}, "more than the 400 rows"),
        ({"algo.discount": 0.0}, "look no further"),
        ({"algo.discount": 0.01}, "1.0 steps ahead"),
        ({"algo.polyak": 0.0}, "never move"),
        ({"algo.polyak": 0.995}, "0.005 is usual"),
        ({"grid.polyak": [0.005, 0.995]}, "0.005 is usual"),
        ({"eval.every": 500}, "at the end only"),
        ({"checkpoint.every": 500}, "one checkpoint"),
        ({"log_every": 500}, "one line of metrics"),
        ({"seeds": 100}, "seed 100 alone is seeds=100,"),
        ({"algo": "offline_dv2"}, "actor and critic learn after them"),
        ({"algo": "offline_dv2", "algo.model_updates": 50}, ""),
        ({}, ""),
    ],
)
def test_nonsense_that_trains_is_doubted(settings: dict[str, object], words: str) -> None:
    config = compose({"steps": 100, "dataset": "-", "algo.batch_size": 64, **settings})
    lines = [*sanity_checks(config, 400)]
    assert len(lines) == bool(words) and words in "".join(lines)
    if words == "more than the 400 rows":
        with pytest.raises(UserError, match="largest allowed value is 1"):
            compose({"algo.discount": 1.5})


# ---------------------------------------------------------------------------------------------------- help


def test_help_begins_with_what_people_need_and_folds_the_rest() -> None:
    text = train.usage([])
    order = [text.index(f"\n  {name}=") for name in ("algo", "dataset", "steps", "seeds", "device", "name")]
    assert order == sorted(order) and "dataset.fields.observations=obs" in text and "  dataset.format=" not in text
    assert "  dataset.format=" in train.usage(["dataset"]) and "  algo.expectile=" in train.usage(["algo=IQL"])
    everything = train.usage(["all"])
    assert not [
        line
        for line in describe(TrainConfig())
        if line not in everything and "dataset=" not in line and ".name=" not in line
    ]
    with pytest.raises(UserError, match="Did you mean 'dataset'"):
        train.usage(["datset"])


def test_each_action_of_data_has_help_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "merge", "--help"]) == 0
    merge = capsys.readouterr().out
    assert (
        merge.startswith("usage: offrl data merge A B [...] OUT") and "force=false" in merge and "top=1.0" not in merge
    )
    assert main(["data", "subset", "--help"]) == 0 and "top=1.0" in capsys.readouterr().out
    assert main(["data", "label", "--help"]) == 0 and "kind=" in capsys.readouterr().out
    for action in data.USES:
        assert main(["data", action, "--help"]) == 0
        assert capsys.readouterr().out.count("usage: ") == 1
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(f"\n{task}\n" in text for task in ("begin", "your data", "train", "look at what came out", "help"))


# ---------------------------------------------------------------------------------------------------- completion


def test_candidates(folder: Path) -> None:
    (folder / "runs" / "first").mkdir(parents=True)
    (folder / "runs" / "first" / "run.json").write_text("{}")
    assert candidates("offrl tra") == ["train"]
    assert candidates("offrl train algo=i") == ["algo=idql", "algo=ifql", "algo=ilql", "algo=infopower", "algo=iql"]
    assert candidates("offrl train algo.expec") == ["algo.expectile="] and candidates(
        "offrl train td3_bc algo.alp"
    ) == ["algo.alpha="]
    assert candidates("offrl train --algo td3_b") == ["td3_bc"] and candidates("offrl train --dev") == ["--device="]
    assert candidates("offrl train dataset=mine") == ["dataset=mine.hdf5"] and "builtin" in candidates(
        "offrl train bui"
    )
    assert "dataset=hopper-medium-v2" in candidates("offrl train dataset=hopper-med")
    assert candidates("offrl train compile=c") == ["compile=compiled", "compile=cudagraph"]
    assert candidates("offrl benchmark algos=bc,iq") == ["algos=bc,iql"]
    assert candidates("offrl train dataset.normalize_observations=t") == ["dataset.normalize_observations=true"]
    assert "runs/first" in candidates("offrl evaluate ") and candidates("offrl evaluate runs/f") == ["runs/first"]
    assert candidates("offrl data ins") == ["inspect"] and candidates("offrl data inspect mor") == ["more.hdf5"]
    assert candidates("offrl completion z") == ["zsh"] and candidates("offrl nothing ") == []


WORDS_OF = "offrl train algo=iq"
SHELLS = {
    "bash": (
        BASH,
        'COMP_LINE="offrl train algo=iq"; COMP_POINT=${#COMP_LINE}; _offrl offrl; printf "%s\\n" "${COMPREPLY[@]}"',
        "iql",
    ),
    "zsh": (
        f"compdef() {{ }}; {ZSH}",
        'compadd() { print -rl -- $closed }; words=(offrl train algo=iq); CURRENT=3; PREFIX="algo=iq"; _offrl',
        "algo=iql",
    ),
    "fish": (FISH, f"complete -C '{WORDS_OF}'", "algo=iql"),
}


@pytest.mark.nightly  # starts shells, and Python from them
@pytest.mark.parametrize("shell", SHELLS)
def test_the_shells_themselves(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    define, use, expected = SHELLS[shell]
    command = tmp_path / "offrl"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m offrl.cli "$@"\n')
    command.chmod(0o755)
    plain = {"bash": ["--norc", "-c"], "zsh": ["-fc"], "fish": ["--no-config", "-c"]}[shell]
    root = str(Path(__file__).resolve().parents[2])
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": root, "HOME": str(tmp_path)}
    done = subprocess.run([shell, *plain, f"{define}\n{use}"], capture_output=True, text=True, cwd=tmp_path, env=path)
    assert done.stdout.split() == [expected], done


LIGHT = """
import json, sys
from offrl.cli.main import main
for command in json.loads(sys.argv[1]):
    main(command)
    assert "torch" not in sys.modules, command
"""


def test_lists_completion_and_mistakes_need_no_torch(tmp_path: Path) -> None:
    commands = [
        ["list"],
        ["list", "algo=iql"],
        ["train", "bogus=1"],
        ["train", "algo.expectile=2"],
        ["train", "algo=td3_bc", "expectile=1"],
        ["train", "--help", "algo=cql"],
        ["completion", "bash"],
        ["completion", "candidates", "offrl train algo."],
        ["completion", "candidates", "offrl benchmark "],
        ["benchmark", "--help"],
        ["train", "seeds=0"],
        ["train", "grid.expectile=2"],
    ]
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, json.dumps(commands)], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_known_name_is_not_a_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    from offrl import registry

    with contextlib.suppress(ImportError):
        import offrl.algorithms  # noqa: F401
    assert not registry.has_plugins("algo"), "offrl's own members are no extension"
