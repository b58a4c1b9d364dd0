"""A stranger's config.yaml: it runs no code, reads no environment variable, and says nothing of where offrl's own files
lie.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

import offrl
from offrl import registry
from offrl.cli.main import main
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.finetuning.setup import begin
from offrl.ope.candidates import data_of, run_candidates
from offrl.runs.record import read_record
from offrl.runs.run import SavedRun
from offrl.runs.settings import run_settings
from offrl.settings.compose import compose
from offrl.settings.replicas import checked
from offrl.settings.train import seed_list
from offrl.settings.untrusted import literal, read_settings
from offrl.system import files as checkpoint
from offrl.system import trust
from offrl.training.stages import _places

SAVED = Path(__file__).parents[2] / "data" / "run"
Edit = Callable[[dict[str, Any]], Any]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Edit], Path]:
    """`run(edit)`: a run whose config.yaml somebody edited, in an empty working folder with a home of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKEN", "hf_SECRET")
    monkeypatch.delenv(trust.SWITCH, raising=False)

    def make(edit: Edit, kind: str = "") -> Path:
        folder = Path(shutil.copytree(SAVED, tmp_path / "runs" / "stranger"))
        values = yaml.safe_load((folder / "config.yaml").read_text())
        edit(values)
        (folder / "config.yaml").write_text(yaml.safe_dump(values))
        return folder

    return make


def notes(tmp_path: Path) -> str:
    """Code of the stranger's that leaves a mark."""
    (tmp_path / "notes.py").write_text(
        f"open({str(tmp_path / 'PWNED')!r}, 'w')\ndef f(columns): return columns['rewards']\n"
    )
    return f"{tmp_path / 'notes.py'}:f"


def set_in(part: str, name: str, value: Any) -> Edit:
    return lambda values: values.setdefault(part, {}).update({name: value})


COMMANDS = [
    "train resume=RUN",
    "train config=RUN/config.yaml",
    "select RUN",
    "finetune RUN env=Hopper-v5 steps=10 mixing=0.5",
]


@pytest.mark.parametrize(
    ("command", "setting"), [(c, "reward_labels") for c in COMMANDS] + [(COMMANDS[0], "cost_labels")]
)
def test_code_that_a_run_names_is_not_run(
    command: str, setting: str, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 1: such a setting of a run's config.yaml names the stranger's Python file."""
    text = notes(tmp_path)
    folder = run(set_in("dataset", setting, text))
    assert main(command.replace("RUN", str(folder)).split()) == 2
    error = capsys.readouterr().err
    assert f"{folder / 'config.yaml'}: dataset.{setting}={text} is Python code" in error and error.count("\n") == 1
    assert f"say dataset.{setting}={text} yourself" in error and "trust=true" in error
    assert not (tmp_path / "PWNED").exists()


def test_code_in_what_was_once_given_is_not_run(run: Any, tmp_path: Path) -> None:
    """Row 1: `given` makes the settings of the algorithms of `compare`."""
    folder = run(set_in("given", "train.dataset.reward_labels", notes(tmp_path)))
    with pytest.raises(UserError, match="is Python code"):
        run_settings(folder)
    for name in ("config", "train.config"):
        shutil.rmtree(folder)
        folder = run(set_in("given", name, str(tmp_path / "other.yaml")))
        assert "config" not in run_settings(folder).given
    assert not (tmp_path / "PWNED").exists()


def test_code_that_a_person_names_is_run(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 1, honest: the command says it again, or trust=true; one line says whose code it is. Names of data are no
    code.
    """
    text = notes(tmp_path)
    folder = run(set_in("dataset", "reward_labels", text))
    assert run_settings(folder, {"dataset.reward_labels": text}).dataset.reward_labels == text
    assert capsys.readouterr().err.count("names Python code, which is run: dataset.reward_labels=") == 1
    trust._tell.cache_clear()
    with offrl.trusted():
        assert run_settings(folder).dataset.reward_labels == text
    assert capsys.readouterr().err.count("names Python code, which is run") == 1
    with pytest.raises(UserError):
        run_settings(folder)
    with pytest.raises(UserError, match="is Python code"):  # another function is not that one
        data_of([SavedRun(folder)])
    shutil.rmtree(folder)
    assert (
        run_settings(run(set_in("dataset", "reward_labels", "labels.safetensors"))).dataset.reward_labels
        == "labels.safetensors"
    )


def test_what_reads_no_data_takes_such_a_run(run: Any, tmp_path: Path) -> None:
    """Row 1, honest: a run's candidates, and fine-tuning without data, need none of its code."""
    folder = run(set_in("dataset", "reward_labels", notes(tmp_path)))
    assert len(run_candidates(SavedRun(folder))) > 1
    start = begin(folder, {"env": "Hopper-v5", "mixing": 0.0})
    assert start.data is not None and start.data.reward_labels is not None and not (tmp_path / "PWNED").exists()


PLACES = {
    "cache": "always",
    "cache_dir": "stranger/cache",
    "cache_limit_gb": 1e-9,
    "memory": "mmap",
    "memory_limit_gb": 1e-9,
    "mirror": "http://127.0.0.1:9/",
}


def test_places_are_the_users_own(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows 2 and 7: where the cache lies, what it holds, and who serves downloads, are said by the command or by
    default.
    """
    folder = run(
        lambda v: (
            v["dataset"].update(PLACES),
            v["given"].update({f"dataset.{k}": p for k, p in PLACES.items()}),
        )
    )
    config = run_settings(folder, {"dataset.memory": "device"})
    default = offrl.data.DatasetConfig()
    assert {k: getattr(config.dataset, k) for k in PLACES} == {k: getattr(default, k) for k in PLACES} | {
        "memory": "device"
    }
    assert not {f"dataset.{k}" for k in PLACES if k != "memory"} & config.given.keys()
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "dataset.mirror=http://127.0.0.1:9/" in error and "memory=mmap" not in error
    with offrl.trusted():
        assert run_settings(folder).dataset.cache_dir == "stranger/cache"
    assert compose({"config": str(folder / "config.yaml")}).dataset.mirror is None
    # the user's own file
    assert compose({"config": str(shutil.copy(folder / "config.yaml", "own.yaml"))}).dataset.memory == "mmap"


def test_a_runs_cache_folder_is_not_emptied(run: Any, tmp_path: Path) -> None:
    """Row 2: a cache folder in the run whose `flat` is a link to the home; the run's data are read."""
    thesis = tmp_path / "home" / "thesis"
    thesis.mkdir(parents=True)
    places = {"cache": "always", "cache_dir": str(tmp_path / "cache")}  # in the run the link would be refused
    folder = run(lambda v: v["dataset"].update(places))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "flat").symlink_to(tmp_path / "home")
    data_of([SavedRun(folder)])
    assert thesis.is_dir() and os.listdir(tmp_path / "home") == ["thesis"]


TEXTS = {
    "label": lambda v: v.update(label="${oc.env:TOKEN}"),
    "dataset.mirror": set_in("dataset", "mirror", "http://127.0.0.1:9/${oc.env:TOKEN}"),
    "dataset.concatenate[0]": set_in("dataset", "concatenate", ["x${oc.env:TOKEN}"]),
    "algo.name": set_in("algo", "name", "${oc.env:TOKEN}"),
    "dataset.fields.\\${a}": lambda v: v["dataset"]["fields"].update({"\\${a}": "b"}),
    "compare[0]": lambda v: v.update(compare=["\\${oc.env:TOKEN}"]),
}


@pytest.mark.parametrize("name", TEXTS)
def test_no_text_of_a_run_is_an_interpolation(name: str, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 6: ${oc.env:TOKEN}, escaped or not, as a value or a key; even trust=true does not resolve it."""
    folder = run(TEXTS[name])
    where = f"{folder / 'config.yaml'}: {name} has an interpolation"
    reads = [
        lambda: run_settings(folder),
        lambda: compose({"config": str(folder / "config.yaml")}),
        lambda: _places(folder, None),
    ]
    for read in reads:
        with pytest.raises(UserError) as error:
            read()
        assert str(error.value).startswith(where) and "hf_SECRET" not in str(error.value)
    assert main(["train", f"resume={folder}", "trust=true"]) == 2 and where in capsys.readouterr().err
    with pytest.raises(UserError, match="has an interpolation"):  # of a fine-tuning run
        read_settings(folder / "config.yaml")


def test_what_a_person_gave_as_an_interpolation_is_the_value_that_it_had(run: Any) -> None:
    """Row 6, honest: `dataset=${oc.env:DATA}/x.hdf5` stood in the command; the file has the path beside it. Also for a
    stranger's.
    """
    given = {
        "dataset": "${oc.env:TOKEN}",
        "eval.episodes": "${oc.env:TOKEN}",
        "label": "x",
        "no.setting": "${oc.env:TOKEN}",
    }
    config = run_settings(run(lambda v: v.update(given=given)))
    assert config.given == {"dataset": "builtin", "eval.episodes": 1}


def test_dollars_are_plain_text(run: Any) -> None:
    """Row 6, honest: a path may hold $; what a person types is resolved as before, and their own file too."""
    folder = run(set_in("dataset", "name", "/data/$x/{y}/a$.hdf5"))
    assert run_settings(folder).dataset.name == "/data/$x/{y}/a$.hdf5"
    assert run_settings(folder, {"dataset": "${oc.env:TOKEN}"}).dataset.name == "hf_SECRET"
    Path("mine.yaml").write_text("label: ${oc.env:TOKEN}\n")
    assert compose({"config": "mine.yaml"}).label == "hf_SECRET"


@pytest.mark.parametrize("name", ["${oc.env:TOKEN}", "\\${oc.env:TOKEN}", "a\\\\${x}${y}", "plain $x"])
def test_the_name_of_data_is_plain_text(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 6: a data file names itself, and algorithms are trained on `Dataset` objects of that name."""
    monkeypatch.setenv("TOKEN", "hf_SECRET")
    assert compose({"dataset": literal(name)}).dataset.name == name


def test_an_environment_of_a_run_needs_a_persons_word(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 9: eval.env of a resumed run, of a file of settings in a run, and in what was once given."""
    env = "runs.stranger.evil:X-v0"
    folder = run(set_in("eval", "env", env))
    whole = ("dataset", "eval")
    for read in (lambda: run_settings(folder, parts=whole), lambda: compose({"config": str(folder / "config.yaml")})):
        with pytest.raises(UserError, match=f"environment '{env}' is named by a file.*eval.env={env}.*trust=true"):
            read()
    assert run_settings(folder).eval.env == env, "where no environment is made it is a text"
    monkeypatch.setenv(trust.SWITCH, "")  # what is typed is noted there
    assert run_settings(folder, {"eval.env": env}, whole).eval.env == env and trust.importable(env)
    monkeypatch.setenv(trust.SWITCH, "")
    compose({"eval.env": "mine:Y-v0"})
    assert trust.importable("mine:Y-v0") and not trust.importable(env)
    shutil.rmtree(folder)
    with pytest.raises(UserError, match="is named by a file"):
        run_settings(run(set_in("given", "eval.env", env)), parts=whole)


TEN = {i: ", ".join([f"*a{i}"] * 10) for i in range(8)}
BOMBS = {
    "aliases": "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{TEN[i]}]\n" for i in TEN),
    "merged": "a0: &a0 {x: 1}\n" + "".join(f"a{i + 1}: &a{i + 1} {{<<: [{TEN[i]}]}}\n" for i in TEN),
    "deep": "a: " + "[" * 400 + "]" * 400 + "\n",
    "deep by aliases": "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 200)),
    "itself": "a: &a [*a]\n",
}


@pytest.mark.parametrize("name", BOMBS)
def test_yaml_that_explodes_is_refused(name: str, run: Any) -> None:
    """Row 20: a kilobyte of YAML that stands for 10^9 values, or for a list in a list in a list; reports read it
    too.
    """
    from offrl.runs.parse import yaml_or_error

    folder = run(lambda v: None)
    path = folder / "config.yaml"
    path.write_text(path.read_text() + BOMBS[name])
    for read in (lambda: run_settings(folder), lambda: compose({"config": str(path)})):
        with pytest.raises(
            UserError, match=r"config\.yaml is not valid YAML.*(unfolds to more than|more than 50 levels)"
        ):
            read()
    assert isinstance(yaml_or_error(path), Exception)


def test_a_pipe_is_no_config(run: Any) -> None:
    """Row 20: it would be read for ever."""
    folder = run(lambda v: None)
    (folder / "config.yaml").unlink()
    os.mkfifo(folder / "config.yaml")
    with pytest.raises(UserError, match=r"config\.yaml is neither a file"):
        run_settings(folder)


@pytest.mark.parametrize(
    "edit",
    [
        lambda v: v.update(dataset=[1]),
        lambda v: v.update(given=[1]),
        lambda v: v["algo"].update(hidden="wide"),
        lambda v: v.update(seeds="x"),
        lambda v: v.update(seeds=10**9),
        lambda v: v.update(
            grid={"temperature": list(range(1, 200)), "expectile": [0.5 + i / 1000 for i in range(200)]}
        ),
        lambda v: v.update(trust=True),
        lambda v: v["given"].update({"trust": True}),
        lambda v: v.update(steps={"a": 1}),
        lambda v: v.update(label="a/b", stop=["x"]),
    ],
)
def test_settings_of_other_kinds_are_one_line(edit: Edit, run: Any) -> None:
    """Rows 20 and 21: wrong types in config.yaml, and 10^9 replicas."""
    with pytest.raises(UserError) as error:
        run_settings(run(edit))
    assert "\n" not in str(error.value)


def test_lists_of_seeds_and_values_are_bounded() -> None:
    """Row 20: before the values of a list are compared with one another."""
    with pytest.raises(UserError, match="at most 10,000"):
        seed_list(range(10_001))
    with pytest.raises(UserError, match="at most 10,000"):
        checked({"temperature": list(range(1, 20_000))}, registry.get("algo", "iql").Config(), 1, True)


@pytest.mark.nightly
def test_a_resumed_run_is_exact_wherever_its_data_lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows 2 and 7, honest: columns in mapped files were the command's choice; without them the same bits come out."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path / "cache"))
    small: dict[str, Any] = {
        "compile": "eager",
        "algo.hidden": [8],
        "eval.env": "none",
        "workers": 1,
        "quiet": True,
        "seeds": 2,
        "checkpoint.keep": 0,
    }
    offrl.train(steps=20, name="one", settings=small)
    offrl.train(steps=10, name="two", settings={**small, "dataset.memory": "mmap", "dataset.cache": "always"})
    assert read_record(Path("runs/two"))["data"]["memory_mapped"]
    offrl.train(resume="runs/two", steps=20)
    ends = [checkpoint.load_latest(Path("runs") / name) for name in ("one", "two")]
    (one, _), (two, _) = (end for end in ends if end is not None)
    assert all(torch.equal(one[k], two[k]) for k in one if k.startswith("state/"))


def test_a_dataset_object_keeps_its_odd_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 6: `offrl.train(dataset=...)` on what a file called ${oc.env:TOKEN}."""
    monkeypatch.setenv("TOKEN", "hf_SECRET")
    seen: list[str] = []
    monkeypatch.setattr("offrl.api.train_from", lambda values, *rest: [seen.append(compose(values).dataset.name)])
    rows = {"observations": torch.zeros(4, 2), "actions": torch.zeros(4, 1), "rewards": torch.zeros(4)}
    data = from_arrays(
        **{k: v.numpy() for k, v in rows.items()}, terminations=[False, True, False, True], name="${oc.env:TOKEN}"
    )
    offrl.train(dataset=data)
    assert seen == ["${oc.env:TOKEN}"]
