"""`offrl completion`: completion of commands by the Tab key, in bash, zsh and fish.

The words that can follow a half-typed command need no torch and folders only: a person waits for the answer.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any

from offrl.cli import NAMES
from offrl.cli.data import ACTIONS
from offrl.cli.words import settings
from offrl.errors import UserError, nearest, say
from offrl.settings import known
from offrl.settings.aliases.algorithms import meant
from offrl.settings.aliases.datasets import FILES, MUJOCO
from offrl.settings.groups import flat_name, grouped_name
from offrl.settings.presets import config_names
from offrl.settings.replicas import varied

SHELLS = ("bash", "zsh", "fish")
ON_RUNS = ("evaluate", "finetune", "distill", "adapt", "report", "select", "model", "export")
ALGOS = ("algo", "algos", "compare")
DATASETS = (
    "dataset",
    "datasets",
    "dataset.name",
    "dataset.concatenate",
    "dataset.imagined",
    "dataset.action_free",
    "dataset.expert",
    "ood",
)
USAGE = """\
usage: offrl completion SHELL

Prints what makes a shell complete commands, settings, algorithms, datasets, files and runs. SHELL: bash, zsh or fish.

  eval "$(offrl completion bash)"                                     in ~/.bashrc
  eval "$(offrl completion zsh)"                                      in ~/.zshrc, after compinit
  offrl completion fish > ~/.config/fish/completions/offrl.fish       once"""

# A shell asks for the words that can follow a line up to the cursor. bash has parted words at = and : already.
BASH = """\
_offrl() {
    local line=${COMP_LINE:0:COMP_POINT} IFS=$'\\n'
    local word=${line##* }
    COMPREPLY=($("$1" completion candidates "$line" 2> /dev/null))
    case $word in
        *[=:]*) COMPREPLY=("${COMPREPLY[@]#"${word%"${word##*[=:]}"}"}") ;;
    esac
    if [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *[=/.,] ]]; then compopt -o nospace 2> /dev/null; fi
}
complete -F _offrl offrl"""
ZSH = """\
#compdef offrl
_offrl() {
    local -a all open closed
    all=(${(f)"$($words[1] completion candidates "${(j: :)words[1,CURRENT-1]} $PREFIX" 2> /dev/null)"})
    open=(${(M)all:#*[=/.,]})
    closed=(${all:#*[=/.,]})
    (( $#open )) && compadd -Q -S '' -a open
    (( $#closed )) && compadd -Q -a closed
}
if [[ $funcstack[1] == _offrl ]]; then _offrl "$@"; else compdef _offrl offrl; fi"""
FISH = """\
complete -c offrl -f -a '(offrl completion candidates (commandline -cp | string collect) 2> /dev/null)'"""


def candidates(line: str) -> list[str]:
    """The words that the last word of `line`, up to the cursor, can become; sorted. line: from the name of the command
    on.
    """
    tokens = line.split(" ")
    current, before = tokens[-1], [w for w in tokens[1:-1] if w]
    if not before:
        return _starting(current, [*NAMES, "--help", "--version"])
    command, previous = before[0], before[1:]
    if command == "completion":
        return _starting(current, SHELLS)
    if command not in NAMES:
        return []
    if command == "data" and not previous:
        return _starting(current, ACTIONS)
    dashes = "--" if current.startswith("--") else ""
    name, equals, value = current.removeprefix("--").partition("=")
    if equals:
        done, comma, part = value.rpartition(",")
        return [f"{dashes}{name}={done}{comma}{v}" for v in _values(command, name.replace("-", "_"), part, previous)]
    if previous and previous[-1].startswith("--") and "=" not in previous[-1] and not dashes:
        return _values(command, previous[-1][2:].replace("-", "_"), current, previous) or _names(
            command, current, previous
        )
    if dashes:
        return [f"--{n}" for n in _names(command, name, previous)] + _starting(current, ["--help"])
    return sorted({*_names(command, current, previous), *_alone(command, current)})


def _alone(command: str, current: str) -> list[str]:
    """Words without a name: runs, datasets, algorithms."""
    if command in ON_RUNS:
        return _runs(current)
    if command == "train":
        return [
            *_starting(current, [*config_names("algo"), *known.datasets()]),
            *(_files(current, FILES) if current else []),
        ]
    if command == "data":
        return [*_starting(current, known.datasets() if current else ()), *_files(current, FILES)]
    return []


def _names(command: str, current: str, previous: Iterable[str]) -> list[str]:
    """Names of settings, flat ones where no name in groups begins as `current` does."""
    names = [*settings(command)]
    if command in ("train", "benchmark", "finetune"):
        algo = _algo(previous)
        names += [f"algo.{grouped_name(n)}" for n in known.settings_of(algo)] + [
            f"grid.{grouped_name(n)}" for n in varied(type(known.schema(algo)))
        ]
    set_names = {flat_name(w.partition("=")[0].removeprefix("--")) for w in previous if "=" in w}
    names = [n for n in names if flat_name(n) not in set_names]
    return _next_parts(current, names) or _next_parts(current, map(flat_name, names))


def _next_parts(current: str, names: Iterable[str]) -> list[str]:
    """The names that begin with `current`, with their `=`; groups are offered whole until one is begun."""
    start = current.rfind(".") + 1
    parts = [n[start:].partition(".") for n in names if n.startswith(current)]
    return sorted({f"{current[:start]}{part}{dot or '='}" for part, dot, _ in parts})


def _algo(previous: Iterable[str]) -> str:
    """The algorithm that a command has chosen so far."""
    for word in previous:
        name, equals, value = word.removeprefix("--").partition("=")
        if chosen := meant(value if equals and name == "algo" else "" if equals else word, config_names("algo")):
            return chosen
    return "iql"


def _values(command: str, name: str, part: str, previous: Iterable[str]) -> list[str]:
    """What the value of a setting can be, as far as it is a name, a word or a file."""
    if name in ALGOS:
        return _starting(part, config_names("algo"))
    if name in DATASETS:
        return [*_starting(part, known.datasets()), *_files(part, FILES)]
    if name == "experiment":
        return _starting(part, ["auto", "none", *config_names("experiment")])
    if name in ("suite", "launcher"):
        return [*_starting(part, config_names(name)), *(_files(part, (".yaml", ".yml")) if name == "suite" else [])]
    if name == "device":
        return _starting(part, ("auto", "cpu", "cuda", "cuda:0", "mps"))
    if name in ("env", "eval.env"):
        return _starting(part, ["auto", "none", *(f"{n}-v5" for n in MUJOCO)])
    if name in ("resume", "from", "algo.world_model", "world_model", "algo.value_run"):
        return _runs(part)
    if name in (
        "config",
        "policy",
        "returns",
        "rewards",
        "out",
        "runs_dir",
        "dataset.reward_labels",
        "dataset.cost_labels",
    ):
        return _files(part, None)
    choices: Any = ()
    either = name == "trust"
    if (field := settings(command).get(name)) is not None:
        choices, either = field.metadata.get("choices"), isinstance(field.default, bool)
    elif name.startswith("algo."):
        entry: dict[str, Any] = known.settings_of(_algo(previous)).get(flat_name(name).removeprefix("algo."), {})
        choices, either = entry.get("choices"), entry.get("type") == "bool"
    return _starting(part, choices or (("true", "false") if either else ()))


def _starting(part: str, options: Iterable[str]) -> list[str]:
    return sorted(o for o in options if o.startswith(part))


def _entries(part: str, fits: Callable[[os.DirEntry[str]], bool]) -> list[str]:
    """The entries of the folder in `part` that begin as it does: folders with a slash, and what fits."""
    folder, begun = os.path.split(part)
    result: list[str] = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(os.path.expanduser(folder) or "."):
            if entry.name.startswith(begun) and (begun.startswith(".") or not entry.name.startswith(".")):
                path = os.path.join(folder, entry.name)
                if fits(entry):
                    result.append(path)
                elif entry.is_dir():
                    result.append(path + "/")
    return sorted(result)


def _files(part: str, suffixes: tuple[str, ...] | None) -> list[str]:
    """Files with one of the suffixes (None: all), Minari's folders, and folders to go on in."""
    return _entries(part, lambda e: e.is_file() and (suffixes is None or e.name.lower().endswith(suffixes)))


def _runs(part: str) -> list[str]:
    """Run directories, and folders to go on in; without a word, those of ./runs."""
    folders = [part] if part else ["runs/", ""]
    matches = (_entries(folder, lambda e: os.path.exists(os.path.join(e.path, "run.json"))) for folder in folders)
    return next(filter(None, matches), [])


def usage(arguments: list[str]) -> str:
    return USAGE


def run(arguments: list[str]) -> int:
    if arguments and arguments[0] == "candidates":
        say(*candidates(" ".join(arguments[1:])))
        return 0
    if len(arguments) != 1 or arguments[0] not in SHELLS:
        word = arguments[0] if arguments else ""
        raise UserError(
            f"offrl completion {word}: name a shell: {', '.join(SHELLS)}.{nearest(word, SHELLS)} See offrl completion "
            "--help"
        )
    say(*{"bash": BASH, "zsh": ZSH, "fish": FISH}[arguments[0]].split("\n"))
    return 0
