"""Files of a user's own: `plugins=my.py` from a command, from Python, in other processes, from runs; and what strangers
name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl as package
from offrl import registry
from offrl.errors import UserError
from offrl.system.plugins import loading
from offrl.system.plugins.known import NAME

from .conftest import Offrl

PAGE = Path(__file__).parents[2] / "docs" / "tutorials" / "own-algorithm.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.M | re.S)
SMALL = {
    "steps": 20,
    "seeds": 2,
    "compile": "eager",
    "compare": [],
    "algo.hidden": [8],
    "log_every": 10,
    "eval.env": "none",
    "quiet": True,
}


@pytest.fixture(autouse=True)
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test registers is no member for the next one."""
    import gymnasium

    for kind in ("algo", "dataset", "network"):
        registry.names(kind)
    before = {kind: dict(members) for kind, members in registry._table.items()}
    environments = dict(gymnasium.registry)
    monkeypatch.delenv(loading.VARIABLE, raising=False)
    monkeypatch.setattr(loading, "_loaded", {})
    with loading.scope():
        yield
    registry._table.clear()
    registry._table.update(before)
    gymnasium.registry.clear()
    gymnasium.registry.update(environments)


@pytest.fixture
def file(offrl: Offrl) -> Path:
    """The tutorial's algorithm, in the working folder."""
    path = Path("td3_huber.py").resolve()
    path.write_text(BLOCKS[0])
    return path


def test_the_tutorials_file_is_short() -> None:
    assert len(BLOCKS[0].splitlines()) <= 60


def test_a_plugin_from_the_command_line(offrl: Offrl, file: Path) -> None:
    assert "td3_huber " in offrl("list plugins=td3_huber.py").out
    assert "algo.delta=0.1" in offrl("list algo=td3_huber plugins=td3_huber.py").out
    trained = offrl("train algo=td3_huber plugins=td3_huber.py seeds=1 eval.env=none name=a")
    assert trained.status == 0, trained.err
    registry._table["algo"].pop("td3_huber")  # as in another process
    loading._loaded.clear()
    again = offrl("train resume=runs/a steps=30")
    assert again.status == 0 and package.load("runs/a").algorithm == "td3_huber", again.err
    policy = package.load("runs/a").policy()
    assert type(policy.algorithm).__module__.startswith(loading.PREFIX)
    file.write_text(BLOCKS[0] + "\n# changed\n")
    changed = offrl("train algo=td3_huber plugins=td3_huber.py seeds=1 eval.env=none name=a")
    assert changed.status == 2 and "holds another run (plugins.td3_huber.py" in changed.err


def test_what_a_stranger_names_is_not_run(offrl: Offrl, file: Path) -> None:
    package.train("td3_huber", plugins=str(file), name="a", settings=SMALL)
    (Path("cache") / NAME).unlink()  # nobody has named it here
    os.environ.pop(loading.VARIABLE)
    file.write_text(BLOCKS[0] + '\nimport pathlib\npathlib.Path("ran").touch()\n')
    for command in (
        "evaluate runs/a",
        "train resume=runs/a",
        "export runs/a",
        "finetune runs/a env=Hopper-v5",
        "train config=runs/a/config.yaml",
    ):
        result = offrl(command)
        assert result.status == 2 and "Python code that is not run unasked" in result.err, (command, result.err)
    assert not Path("ran").exists()
    assert offrl("export runs/a format=pt2 plugins=td3_huber.py").status == 0
    assert Path("ran").exists()
    assert offrl("export runs/a format=pt2").status == 0, "named before, with this content"
    with open(file, "a") as out:
        out.write("# changed\n")
    assert offrl("export runs/a format=pt2").status == 2


def test_files_that_others_may_write_say_nothing(offrl: Offrl, file: Path) -> None:
    loading.typed(str(file))
    place = Path("cache") / NAME
    assert loading.remembered(file)
    place.chmod(0o666)
    assert not loading.remembered(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def f(:\n", "line 1: SyntaxError"),
        ("x = 1\nimport nothing_there\n", "line 2: ModuleNotFoundError: No module named 'nothing_there'"),
        (
            BLOCKS[0].replace('"td3_huber"', '"td3_bc"'),
            r"algo 'td3_bc' is registered twice, by .*my.py:TD3Huber|td3_bc.py:TD3BC",
        ),
        (None, "there is no such file. Did you mean 'mi.py'"),
    ],
)
def test_a_mistake_names_file_and_line(offrl: Offrl, text: str | None, message: str) -> None:
    Path("mi.py" if text is None else "my.py").write_text(text or "")
    result = offrl("list plugins=my.py")
    assert (
        result.status == 2
        and re.search(message, result.err)
        and "my.py" in result.err
        and len(result.err.splitlines()) == 1
    ), result.err


def test_a_mistake_in_a_loss_names_its_line(offrl: Offrl, file: Path) -> None:
    file.write_text(BLOCKS[0].replace("self.config.delta\n", "self.config.delt\n"))
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if text.endswith(".delt"))
    result = offrl("train algo=td3_huber plugins=td3_huber.py seeds=1 eval.env=none")
    assert result.status == 2 and f"{file}, line {line}: AttributeError" in result.err and "Traceback" not in result.err


def test_other_members_of_a_file(offrl: Offrl) -> None:
    Path("more.py").write_text(BLOCKS[-1])
    result = offrl("train algo=bc plugins=more.py dataset=random-pendulum seeds=1 name=a eval.env=Lighter-v0")
    assert result.status == 0 and package.load("runs/a").final_scores[0]["env_id"] == "Lighter-v0", result.err


def test_an_edited_file_is_imported_anew(offrl: Offrl, file: Path) -> None:
    loading.typed(str(file))
    first: Any = registry.get("algo", "td3_huber")
    file.write_text(BLOCKS[0].replace("setting(0.1,", "setting(0.2,"))
    loading.typed(str(file))
    assert (first.Config().delta, registry.get("algo", "td3_huber").Config().delta) == (0.1, 0.2)


def test_what_is_no_file_of_python(offrl: Offrl) -> None:
    with pytest.raises(UserError, match="no Python file"):
        package.train("bc", plugins="my.txt")


@pytest.mark.slow
def test_a_plugin_in_worker_processes_compiled_and_resumed(offrl: Offrl, file: Path) -> None:
    for name, more in (("a", "steps=40"), ("b", "steps=20")):
        command = (
            f"train algo=td3_huber plugins=td3_huber.py seeds=2 workers=2 eval.workers=1 compile=compiled {more} "
            f"name={name}"
        )
        result = offrl(command)
        assert result.status == 0 and "in 2 processes" in result.out, result.err
    assert offrl("train resume=runs/b steps=40 workers=1").status == 0
    a, b = (package.load(f"runs/{name}").policy(1).state.params["actor"] for name in "ab")
    for key, value in a.items():
        torch.testing.assert_close(value, b[key], rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_an_update_reaches_all_rows(offrl: Offrl, tmp_path: Path) -> None:
    """The tutorial's actor and the row that is nearest to it, among all, by NumPy."""
    (code,) = [block for block in BLOCKS if "class TD3Nearest" in block]
    Path("td3_nearest.py").write_text(code)
    rng = np.random.default_rng(0)
    observations, actions = (
        rng.normal(size=(300, 3)).astype(np.float32),
        rng.uniform(-1, 1, (300, 2)).astype(np.float32),
    )
    data = package.from_arrays(
        observations,
        actions,
        rng.normal(size=300),
        np.zeros(300, bool),
        np.arange(300) % 50 == 49,
        action_low=-1,
        action_high=1,
    )
    run = package.train(
        "td3_nearest", data, plugins="td3_nearest.py", settings={**SMALL, "steps": 4, "algo.alpha": 0.0, "log_every": 1}
    )
    policy = run.policy(seed=1)
    algorithm = policy.algorithm
    source = algorithm.sampler().prepare(data)
    algorithm.runtime.source = source
    batch = algorithm.sampler()(source, package.rng.make_key(5), 16)
    critic = {name: torch.zeros_like(value) for name, value in algorithm.networks["critic"].named_parameters()}
    state = policy.state._replace(params={**policy.state.params, "critic": critic})
    with torch.no_grad():
        _, metrics = algorithm.actor_loss(state.params["actor"], state, batch)
        (action,) = algorithm.apply("actor", state.params["actor"], batch["observations"])
    rows = np.hstack([2.0 * observations, actions])
    queries = np.hstack([2.0 * batch["observations"].numpy(), action.numpy()])
    nearest = ((queries[:, None] - rows) ** 2).sum(-1).min(1)
    assert float(metrics["actor/distance"]) == pytest.approx(nearest.mean(), rel=1e-4)
    # nearer than the batch's own row
    assert nearest.mean() < ((batch["actions"].numpy() - action.numpy()) ** 2).sum(1).mean()


def test_the_tutorials_call_from_python(offrl: Offrl, file: Path) -> None:
    scope: dict[str, Any] = {}
    exec(
        BLOCKS[1].replace(
            "steps=1000", "steps=20, quiet=True, settings={'eval.episodes': 1, 'eval.max_steps': 5, 'compare': []}"
        ),
        scope,
    )
    assert scope["run"].algorithm == "td3_huber"
