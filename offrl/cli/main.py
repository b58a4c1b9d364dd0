"""The command line. Nothing heavy is imported before it is known what to do."""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from types import TracebackType

from offrl.cli import NAMES
from offrl.errors import UserError, nearest, out_of_memory, say
from offrl.system.plugins.loading import VARIABLE, blaming, load_named, typed
from offrl.system.plugins.loading import scope as plugin_scope
from offrl.system.trust import trusted

HELP = """\
offrl: offline reinforcement learning from logged data

usage: offrl COMMAND [name=value ...]

begin
  offrl train                        train IQL on the dataset that ships with offrl, and score it in MuJoCo
  offrl list                         algorithms and experiments; `offrl list algo=NAME` shows an algorithm's settings
  offrl data list                    datasets that can be named
  offrl doctor                       is training right on this machine, how fast, how many seeds fit (device=cuda)

your data
  offrl data inspect DATASET         what is in a dataset, and every fault in it; `offrl data doctor` makes a page of it
  offrl data convert DATASET OUT     to D4RL HDF5 or Minari; also merge, subset, render, label
  offrl collect env=Hopper-v5 recipe=d4rl                          record datasets; policy=mine.py:act records from any policy

train
  offrl train td3_bc hopper-medium-v2 seeds=4 steps=1e6            the same as algo=td3_bc dataset=hopper-medium-v2 ...
  offrl train my.hdf5 dataset.fields.observations=obs eval.env=Hopper-v5
  offrl train grid.temperature=1,3,10 grid.expectile=0.7,0.9       24 policies as one program
  offrl train resume=runs/NAME       continue a run (so does the command that began it)
  offrl tune dataset=my.hdf5 algos=iql,td3_bc budget=32x40000      choose settings by the data alone; episodes=20: and 20 real ones
  offrl finetune runs/NAME env=Hopper-v5 steps=100000              let its policies go on learning in an environment; fresh: algo=sac_n
  offrl benchmark suite=d4rl-gym algos=bc,td3_bc,iql seeds=5       datasets x algorithms x seeds; launcher=local, ray, slurm

look at what came out
  offrl report runs/NAME ...         one HTML page: scores with intervals, curves, profiles, published numbers
  offrl evaluate runs/NAME           score a run's policies again (episodes=100 seed=1 env=Hopper-v5), or film them (video=true)
  offrl select runs/NAME ...         rank checkpoints and policies by the data alone
  offrl adapt runs/NAME              let policies of algo=dpt or meta_dt learn tasks in context that are in no data
  offrl model runs/NAME              how good a world model is, on its own data or dataset=OTHER; ood=OTHER, probe=COLUMN
  offrl export runs/NAME             a policy as ONNX, or for torch.export (format=pt2)
  offrl distill runs/NAME into=tree  a tree, a formula or a small network that imitates its policies; as C code too

help
  offrl COMMAND --help               its settings; offrl train --help dataset, offrl data merge --help
  offrl completion bash              completion by the Tab key, also for zsh and fish
  offrl COMMAND ... plugins=my.py    your own file with algorithms, networks, data sources, environments (docs/tutorials/own-algorithm.md)
  offrl COMMAND ... trust=true       files that a command reads may name Python code, which runs: for files whose author you trust
  offrl --version
"""  # noqa: E501

TRUST = (
    f"  {'trust=false':<40} true: files of this command may name Python code, which runs; say so only where you trust "
    "their author"
)
MODULES = {"list": "words.listing", "completion": "words.completion"}  # where they are not called by the command
UNTRUSTING = ("list", "doctor", "completion")  # commands that read no files of others

# what the machine refuses, whatever was asked for: a full or failing disk, missing rights
_OUTSIDE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.EIO, errno.EMFILE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0 done, 1 faults found or training failed, 2 a mistake in the input,
    130 interrupted.
    """
    if arguments is None:  # a command, not a call from Python
        sys.excepthook = _show_traceback
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        arguments, trust = _trust(arguments)
        with trusted(trust), plugin_scope():
            arguments = _plugins(arguments)
            command, remaining = _command(arguments)
            with blaming():
                status = command(remaining)
        if any(a in ("-h", "--help") for a in arguments[1:]) and arguments[0] not in UNTRUSTING:
            say(TRUST)
        return status
    except UserError as error:
        return _fail(str(error))
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader of our output has gone
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        if error.errno not in _OUTSIDE:
            raise
        return _fail(
            f"{error.strerror}{f': {error.filename}' if error.filename else ''}; what was saved before is untouched"
        )
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        return _fail(
            "out of memory; a smaller algo.batch_size, fewer replicas at once (group=N), or dataset.memory=mmap needs "
            "less"
        )
    except KeyboardInterrupt:
        say("offrl: interrupted", file=sys.stderr)
        return 130


def _trust(arguments: list[str]) -> tuple[list[str], bool | None]:
    """The arguments without trust=VALUE, and that value: it belongs to a command, and to no run. Raises UserError for
    another value.
    """
    values = [a.removeprefix("trust=") for a in arguments if a.startswith("trust=")]
    for value in values:
        if value not in ("true", "false"):
            raise UserError(f"trust={value} must be true or false")
    if len(set(values)) > 1:
        raise UserError("trust=true and trust=false are both given; leave one of them out")
    return [a for a in arguments if not a.startswith("trust=")], values[0] == "true" if values else None


def _plugins(arguments: list[str]) -> list[str]:
    """The arguments without plugins=FILES, which are imported now, so that every command knows what is in them;
    $OFFRL_PLUGINS has them from here on. Raises UserError."""
    texts = [a.removeprefix("plugins=") for a in arguments if a.startswith("plugins=")]
    names = [name.strip(" '\"") for text in texts for name in text.removeprefix("[").removesuffix("]").split(",")]
    if texts or os.environ.get(VARIABLE):
        load_named()
        typed([name for name in names if name])
    return [a for a in arguments if not a.startswith("plugins=")]


def _fail(message: str) -> int:
    say(f"offrl: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _show_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Of a bug; its message may quote a stranger's file."""
    import traceback

    text = "".join(traceback.format_exception(kind, error, trace))
    say(*text.rstrip("\n").split("\n"), file=sys.stderr)


def _command(arguments: list[str]) -> tuple[Callable[[list[str]], int], list[str]]:
    """The function of a command, and the arguments it is given. Raises UserError for a command that there is not."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _show, [HELP.removesuffix("\n")]
    if arguments[0] in ("-V", "--version", "version"):
        from importlib.metadata import version

        return _show, [f"offrl {version('offrl')}"]
    arguments = [a for a in arguments if a]
    name, remaining = arguments[0], arguments[1:]
    if name not in NAMES:
        raise UserError(
            f"unknown command '{name}'.{nearest(name, NAMES)} Commands: {', '.join(NAMES)}; see offrl --help"
        )
    module = importlib.import_module(f"offrl.cli.{MODULES.get(name, name)}")
    if any(re.match(r"--?[A-Za-z]|[A-Za-z_.]*-[\w.-]*=", a) for a in remaining):
        from offrl.cli.words import switches
        from offrl.settings.aliases.arguments import as_settings

        remaining = as_settings(remaining, switches(name))
    if any(a in ("-h", "--help") for a in remaining):
        return _show, [module.usage([a for a in remaining if not a.startswith("-")])]
    if stray := next((a for a in remaining if a.startswith("-")), None):
        from offrl.cli.words import settings

        key = stray.lstrip("-").replace("-", "_")
        problem = f"'{key}=' has no value" if key in settings(name) else f"offrl {name} has no option {stray}"
        raise UserError(f"{problem}; settings are written name=value, and offrl {name} --help shows them")
    return module.run, remaining


def _show(lines: list[str]) -> int:
    say(*(line for text in lines for line in text.split("\n")))
    return 0
