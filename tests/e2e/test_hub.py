"""`offrl.load_policy` and the model card, with a Hub that is a folder."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import offrl as package
from offrl.errors import UserError

from .conftest import Offrl
from .test_cli import arrays
from .test_python import SMALL


class EntryNotFoundError(Exception):
    pass


class RevisionNotFoundError(Exception):
    pass


@pytest.fixture
def exported(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of an exported policy, which is also the only repository of a Hub, me/walker at revision abc."""
    package.train("bc", arrays(env="Pendulum-v1"), name="a", settings=SMALL)
    done = offrl("export runs/a format=pt2")
    assert done.status == 0 and "is a repository for the Hub: README.md, policy.safetensors" in done.out, done.err
    folder = Path("runs/a/export/seed_0").resolve()
    hub: Any = types.ModuleType("huggingface_hub")

    def hf_hub_download(repository: str, name: str, revision: str | None = None) -> str:
        assert repository == "me/walker"
        if revision not in (None, "abc"):
            raise RevisionNotFoundError("404\nRevision Not Found")
        if not (folder / name).exists():
            raise EntryNotFoundError("404")
        return str(folder / name)

    hub.hf_hub_download = hf_hub_download
    hub.list_repo_files = lambda repository, revision=None: [p.name for p in folder.iterdir()]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    return folder


def test_a_policy_from_a_file_a_run_and_the_hub(exported: Path) -> None:
    x = np.linspace(-1, 1, 3)
    expected = package.load("runs/a").policy(0).act(x)
    sources = [
        "runs/a",
        exported,
        exported / "policy.safetensors",
        "hf://me/walker",
        "hf://me/walker@abc",
        "hf://me/walker/policy.safetensors",
    ]
    for source in sources:
        assert np.array_equal(package.load_policy(source).act(x), expected), source
    assert np.array_equal(package.load_policy("runs/a", seed=1).act(x), package.load("runs/a").policy(1).act(x))
    assert np.array_equal(package.load_policy("hf://me/walker", revision="abc").act(x), expected)
    for source, more, message in (
        ("hf://me/walker", {"revision": "xyz"}, "it has no revision xyz"),
        ("hf://me/walker/other.safetensors", {}, "has no other.safetensors; it has policy.safetensors"),
        ("hf://me", {}, "names no repository"),
        ("hf://me/walker@abc", {"revision": "abd"}, "two revisions"),
        ("hf://me/walker", {"seed": 1}, "holds single policies"),
        ("runs/b", {}, "there is no policy runs/b"),
        ("me/walker", {}, "A repository of the Hub is written hf://me/walker"),
        (exported, {"revision": "abc"}, "is of a repository"),
    ):
        with pytest.raises(UserError, match=message):
            package.load_policy(source, **more)


def test_the_card(exported: Path) -> None:
    _, head, body = (exported / "README.md").read_text().split("---\n", 2)
    about = yaml.safe_load(head)
    assert about["library_name"] == "offrl" and {"offrl", "bc", "Pendulum-v1"} <= set(about["tags"])
    (result,) = about["model-index"][0]["results"]
    run = package.load("runs/a")
    rewards = [m for m in result["metrics"] if m["type"] == "mean_reward"]
    assert rewards[0]["value"] == pytest.approx(run.final_scores[0]["return_mean"], abs=1e-3)
    assert rewards[1]["value"] == pytest.approx(np.mean([r["return_mean"] for r in run.final_scores]), abs=1e-3)
    assert "[" in rewards[1]["name"] and result["dataset"]["name"] == "Pendulum-v1" and "load_policy" in body
    (exported / "README.md").write_text("# My own words\n")
    run.export(format="pt2")
    assert (exported / "README.md").read_text() == "# My own words\n"


def test_without_the_hubs_package(offrl: Offrl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match="pip install huggingface_hub"):
        package.load_policy("hf://me/walker")
