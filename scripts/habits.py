"""Mistakes and habits from other libraries: what each command gets, in this tree and in another;
docs/benchmarks/habits.md is its table.

    python scripts/habits.py                         # the table of this tree
    python scripts/habits.py --before CHECKOUT       # beside what another checkout (an older commit) answers

Nothing is trained: a command that would train says with which settings. The fast tests hold this tree to the third
column of CASES."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# (command, whose habit or which mistake, words of the answer: TRAINS and a setting, or a part of the message)
TRAINS = "trains: "
CASES = (
    ("train --algo iql --steps 1000", "argparse", TRAINS + "steps=1000"),
    ("train --algo=iql", "argparse", TRAINS + "algo=iql"),
    ("train --dataset builtin --seeds 3", "argparse", TRAINS + "seeds=3"),
    ("train --seeds 3 7", "argparse, nargs=+", TRAINS + "seeds=3,7"),
    ("train --dataset.normalize-observations", "a switch with dashes", TRAINS + "dataset.normalize_observations=true"),
    ("train --no-quiet", "argparse.BooleanOptionalAction", TRAINS + "quiet=false"),
    ("train steps=1e5", "scientific notation", TRAINS + "steps=100000"),
    ("train steps=100k", "a unit", TRAINS + "steps=100000"),
    ("train steps=100,000", "thousands by commas", "without commas: steps=100000"),
    ("train epochs=10", "Keras, d3rlpy 1", "offrl counts updates"),
    ("train n_epochs=10", "d3rlpy 1", "offrl counts updates"),
    ("train n_steps=1000", "d3rlpy", TRAINS + "steps=1000"),
    ("train n_steps_per_epoch=1000", "d3rlpy", "log_every=N"),
    ("train total_timesteps=1000", "Stable-Baselines3", TRAINS + "steps=1000"),
    ("train max_timesteps=1000", "CORL", TRAINS + "steps=1000"),
    ("train --offline_steps=1000", "OGBench", TRAINS + "steps=1000"),
    ("train --agent=agents/iql.py", "OGBench", TRAINS + "algo=iql"),
    ("train --agent.lr=3e-4", "OGBench", TRAINS + "algo.learning_rate=0.0003"),
    ("train env=hopper-medium-v2", "CORL", TRAINS + "dataset=hopper-medium-v2"),
    ("train env_name=builtin", "OGBench", TRAINS + "dataset=builtin"),
    ("train env=Hopper-v5", "Stable-Baselines3", TRAINS + "eval.env=Hopper-v5"),
    ("train eval_freq=500", "CORL", TRAINS + "eval.every=500"),
    ("train n_episodes=5", "CORL", TRAINS + "eval.episodes=5"),
    ("train eval_episodes=5", "OGBench", TRAINS + "eval.episodes=5"),
    ("train log_interval=100", "OGBench", TRAINS + "log_every=100"),
    ("train save_interval=100", "OGBench", TRAINS + "checkpoint.every=100"),
    ("train seed=3", "everybody: one seed", TRAINS + "seeds=3"),
    ("train seeds=3,7", "no brackets under zsh", TRAINS + "seeds=3,7"),
    ("train grid.temperature=1,3,10", "no brackets under zsh", TRAINS + "grid.temperature=1.0,3.0,10.0"),
    ("train temperature=1,3,10", "a grid without its name", "grid.temperature=a,b trains with each value"),
    ("train gpu=0", "d3rlpy 1", "device=cuda:0, but torch"),
    ("train cuda=false", "others", TRAINS + "device=cpu"),
    ("train normalize=true", "CORL", TRAINS + "dataset.normalize_observations=true"),
    ("train checkpoints_path=out", "CORL", TRAINS + "runs_dir=out"),
    ("train buffer_size=1000", "CORL", "the whole dataset is used"),
    ("train tensorboard=true", "others", "tensorboard --logdir"),
    ("train lr=1e-4", "a setting's short name", TRAINS + "algo.learning_rate=0.0001"),
    ("train gamma=0.9", "a paper's symbol", TRAINS + "algo.discount=0.9"),
    ("train beta=5", "a paper's symbol, CORL", TRAINS + "algo.temperature=5.0"),
    ("train tau=0.01", "a symbol with two meanings", "algo.expectile"),
    ("train algo=td3_bc tau=0.01", "a symbol with one meaning", TRAINS + "algo.polyak=0.01"),
    ("train iql_tau=0.8", "CORL", TRAINS + "algo.expectile=0.8"),
    ("train temperature=5", "no prefix", TRAINS + "algo.temperature=5.0"),
    ("train batch_size=64", "no prefix", TRAINS + "algo.batch_size=64"),
    ("train batch-size=64", "dashes", TRAINS + "algo.batch_size=64"),
    ("train iql.expectile=0.8", "the algorithm as prefix", TRAINS + "algo.expectile=0.8"),
    ("train hidden_units=64,64", "d3rlpy", TRAINS + "algo.hidden=64,64"),
    ("train algo.hidden_dims=64,64", "OGBench, CORL", TRAINS + "algo.hidden=64,64"),
    ("train temprature=3", "a slip", "Did you mean 'algo.temperature'?"),
    (
        "train algo=td3_bc expectile=0.8",
        "another algorithm's setting",
        "algo=td3_bc has none, algo.expectile is one of",
    ),
    ("train lr=1e-4 algo.learning_rate=1e-3", "twice", "the same setting, and both are given"),
    ("train algo=IQL", "capitals", TRAINS + "algo=iql"),
    ("train algo=td3+bc", "the paper's spelling", TRAINS + "algo=td3_bc"),
    ("train algo=TD3-BC", "the paper's spelling", TRAINS + "algo=td3_bc"),
    ("train algo=TD3PlusBC", "d3rlpy's class", TRAINS + "algo=td3_bc"),
    ("train algo=decision_transformer", "the long name", TRAINS + "algo=dt"),
    ("train algo=BCQ", "d3rlpy: not here", "nearest in kind: iql or td3_bc"),
    ("train algo=iqll", "a slip", "Did you mean 'iql'?"),
    ("train iql builtin", "words without a name", TRAINS + "algo=iql"),
    ("train mine.hdf5", "a file alone", TRAINS + "dataset=mine.hdf5"),
    ("train mine.hdf5 more.hdf5", "files that the shell made of a pattern", TRAINS + "dataset.concatenate=more.hdf5"),
    ("train dataset=m*.hdf5", "a pattern that the shell left", TRAINS + "dataset.concatenate=more.hdf5"),
    ("train dataset=nothing/*.hdf5", "a pattern without files", "no file fits this pattern"),
    ("train Hopper-v2", "an environment for a dataset", "It is an environment's id"),
    ("train config=twice.yaml", "a name twice in YAML", "'steps' is given twice, in lines 1 and 3"),
    ("train bogus=1", "a name that means nothing", "unknown setting 'bogus'"),
)


def prepare(folder: Path) -> None:
    """The files that the commands name."""
    for name in ("mine.hdf5", "more.hdf5"):
        (folder / name).touch()
    (folder / "twice.yaml").write_text("steps: 10\nseeds: 2\nsteps: 20\n", encoding="utf-8")


class Accepted(Exception):
    """Raised in place of training."""


def answers() -> list[str]:
    """What this tree's command says to each of CASES: its message, or the settings that it would train with."""
    import offrl.api
    from offrl.cli.main import main
    from offrl.settings.compose import compose

    def stop(values: dict[str, Any], *_: Any) -> Any:
        config = compose(values)
        offrl.api.pick_device(config.device)
        if "hdf5" not in config.dataset.name and "-v2" not in config.dataset.name:
            offrl.api.load_dataset(config.dataset, quiet=True)
        raise Accepted(" ".join(f"{k}={shown(v)}" for k, v in {"algo": config.algo.name, **meant(config)}.items()))

    offrl.api.train_from = stop  # type: ignore[assignment]
    result = []
    for command, _, _ in CASES:
        text = io.StringIO()
        try:
            with contextlib.redirect_stderr(text), contextlib.redirect_stdout(text):
                main(command.split())
            result.append(text.getvalue().strip().splitlines()[-1].removeprefix("offrl: error: "))
        except Accepted as accepted:
            result.append(f"{TRAINS}{accepted}")
        except Exception as error:
            result.append(f"a traceback: {type(error).__name__}: {error}")
    return result


def meant(config: Any) -> dict[str, Any]:
    """The settings that were given, with their values in `config`."""
    result = {}
    for name in config.given:
        if name not in ("algo", "dataset"):
            group, _, last = name.rpartition(".")
            place = getattr(config, group) if group else config
            result[name] = place[last] if isinstance(place, dict) else getattr(place, last)
    return result | ({"dataset": config.dataset.name} if "dataset" in config.given else {})


def shown(value: Any) -> str:
    return (
        ",".join(map(shown, value))
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def of_tree(tree: Path) -> list[str]:
    """`answers` of a checkout, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder))
        command = [sys.executable, str(Path(__file__).resolve()), "--answers"]
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, "PYTHONPATH": str(tree)}, capture_output=True, text=True, check=True
        )
    return list(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--answers", action="store_true")
    arguments = parser.parse_args()
    if arguments.answers:
        print(json.dumps(answers()))
        return
    trees = [*([arguments.before] if arguments.before else []), Path(__file__).resolve().parents[1]]
    columns = [of_tree(tree.resolve()) for tree in trees]
    heads = (["before"] if arguments.before else []) + ["now"]
    print(f"| `offrl ...` | {' | '.join(['a habit of', *heads])} |", "|---" * (2 + len(heads)) + "|", sep="\n")
    for (command, habit, _), *texts in zip(CASES, *columns, strict=True):
        cells = [
            text.replace("|", "\\|") if len(text) < 200 else text[:197].replace("|", "\\|") + "..." for text in texts
        ]
        print(f"| `{command}` | {habit} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
