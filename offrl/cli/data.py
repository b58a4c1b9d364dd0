"""`offrl data`: look at datasets, and make datasets from datasets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError, nearest, say
from offrl.settings.field import dataset_stem, setting

if TYPE_CHECKING:
    from offrl.data.tools.convert import Written
    from offrl.settings.dataset import DatasetConfig

INTRODUCTION = """\
usage: offrl data ACTION ...

  offrl data inspect DATASET           what is in a dataset, and every fault in it
  offrl data doctor DATASET            the same as a page with pictures (out=FOLDER, by default doctor-NAME)
  offrl data horizon DATASET           how far ahead one must look on data of random play to act well (discrete actions)
  offrl data convert DATASET OUT       write it as D4RL HDF5 (OUT ends in .hdf5) or as a Minari dataset (OUT is an id or a folder);
                                       as a LeRobot dataset (OUT ends in .lerobot, with fps=30);
                                       texts as JSON lines (OUT ends in .jsonl or .jsonl.gz) or as a Minari dataset
  offrl data merge A B [...] OUT       several datasets of the same spaces as one
  offrl data subset DATASET OUT ...    some of its rows or episodes
  offrl data render DATASET OUT.hdf5   with images of its recorded MuJoCo states (qpos, qvel) beside the numbers
  offrl data label DATASET ...         let a language model label rewards, preferences or subgoals (alone: `offrl data label`, its settings)
  offrl data list                      datasets that can be named"""  # noqa: E501
READING = ("inspect", "doctor", "horizon", "convert", "merge", "subset", "render")
WRITING = READING[3:6]
# of the help: a part, and the actions that it is for
SECTIONS = (
    (
        """\
DATASET is a file or folder, or a name, as dataset= of `offrl train`. What is written is read back and compared before it is put in place.""",  # noqa: E501
        READING,
    ),
    (
        """\
settings of horizon:
  env=auto             where the greedy policies are played: auto (the data's own environment), none, an id, or file.py:Name
  depth=3              Q_1 to Q_depth are fitted: Q_1 is the value of what the data did, each further one looks a step further ahead
  discount=0.99        discount factor
  updates=5000         updates of the network
  seeds=3              networks, each with other first weights and batches
  seed=0               decides first weights, batches and start states
  episodes=20          episodes that each greedy policy plays
  quiet=false          show no progress""",  # noqa: E501
        ("horizon",),
    ),
    (
        """\
settings of convert, merge and subset:
  format=auto          d4rl, minari, lerobot or jsonl; auto: by the name of OUT
  fps=null             rows per second, which LeRobot data need
  force=false          replace OUT where it exists
  quiet=false          show no progress""",
        WRITING,
    ),
    (
        """\
what subset keeps, in this order:
  rows=0:5000          rows (from 0, the end not included); episodes are cut where they end
  episodes=0:100       episodes, or a list: episodes=[0,5,7]
  drop_faulty=false    leave out episodes with NaN, infinite values, or actions outside their range; of texts, whatever is refused
  min_return=null      episodes with at least this undiscounted return
  max_return=null      episodes with at most this undiscounted return
  top=1.0              this share of the episodes (at least one), the best by return
  fraction=1.0         this share of the episodes, drawn at random
  seed=0               decides which ones fraction draws""",  # noqa: E501
        ("subset",),
    ),
    (
        """\
settings of render:
  size=[64,64]         height and width, each pixel the mean of what it covers
  camera=              MuJoCo's camera, and the name of the images; empty: the environment's own, and pixels
  env=                 the environment that the states are of; empty: the data's own
  force=false          replace OUT where it exists
  quiet=false          show no progress""",
        ("render",),
    ),
    (
        """\
settings of all of them: how DATASET is read
  dataset.format=auto, dataset.fields.COLUMN=KEY, dataset.action_low=..., dataset.action_high=..., dataset.clip_actions=true,
  dataset.check=false (take faulty data all the same) and the others of `offrl train --help`
  config=FILE          the dataset's settings in a YAML file; DATASET may then be left out of inspect and doctor""",  # noqa: E501
        READING,
    ),
    (
        """\
exit status: 0 done, 1 inspect or doctor found faults that would corrupt training, 2 a mistake in the input""",
        (*READING, "list"),
    ),
)

ACTIONS = ("inspect", "doctor", "horizon", "convert", "merge", "subset", "render", "label", "list")
_SETTING = re.compile(r"[A-Za-z_][\w.-]*=")


@dataclass
class Output:
    """Settings of what writes a dataset."""

    format: str = setting("auto", "layout of what is written", choices=("auto", "d4rl", "minari", "jsonl", "lerobot"))
    force: bool = setting(False, "replace what exists")
    quiet: bool = setting(False, "no progress")
    fps: float | None = setting(None, "rows per second, which LeRobot data need")


@dataclass
class RenderSettings:
    """Settings of render."""

    size: list[int] = setting([64, 64], "height and width")
    camera: str = setting("", "MuJoCo's camera, and the name of the images")
    env: str = setting("", "the environment; empty: the data's own")
    force: bool = setting(False, "replace what exists")
    quiet: bool = setting(False, "no progress")


def usage(arguments: list[str]) -> str:
    from offrl.labelling.run import usage as label

    return label() if "label" in arguments else text(arguments)


def run(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in ACTIONS:
        word = arguments[0] if arguments else ""
        known = ", ".join(ACTIONS)
        raise UserError(f"offrl data {word}: say what to do: {known}.{nearest(word, ACTIONS)} See offrl data --help")
    action, remaining = arguments[0], arguments[1:]
    if action == "list":
        from offrl.cli.words.listing import print_data_sets

        print_data_sets()
        return 0
    first = next((i for i, a in enumerate(remaining) if _SETTING.match(a)), len(remaining))
    names, settings = remaining[:first], remaining[first:]
    if stray := [a for a in settings if not _SETTING.match(a)]:
        raise UserError(f"offrl data {action}: '{stray[0]}' stands after the settings; names of datasets come first")
    from offrl.system.signals import terminable

    with terminable():  # what is half-written goes
        actions = {"inspect": _inspect, "doctor": _doctor, "horizon": _horizon, "label": _label, "render": _render}
        return actions.get(action, _make)(action, names, settings)


def _expect(action: str, names: list[str], count: int, arguments: str) -> None:
    if len(names) != count:
        raise UserError(
            f"usage: offrl data {action} {arguments} [name=value ...]; {len(names)} names were given, {count} are "
            "needed"
        )


def _dataset(name: str, settings: list[str], names: tuple[str, ...] = ()) -> tuple[DatasetConfig, dict[str, Any]]:
    """The settings that read the dataset `name`, and the values of the action's settings, whose names are `names`."""
    from offrl.settings.compose import compose, flatten, parse

    arguments = [a for a in settings if a.partition("=")[0] in names]
    files = [a for a in settings if a.startswith("config=")]
    dataset_settings = [a for a in settings if a not in (*arguments, *files)]
    short = [a for a in dataset_settings if not a.startswith("dataset.")]
    if names and short:
        key = short[0].partition("=")[0]
        raise UserError(
            f"there is no setting '{key}' here.{nearest(key, names)} Settings: {', '.join(names)}, config, dataset...."
        )
    # a file may be of a whole run
    values = {k: v for k, v in flatten(parse(files)).items() if k.partition(".")[0] == "dataset"}
    full_names = [f"dataset.{a}" if a in short else a for a in dataset_settings]
    values |= parse([f"dataset={name}", *full_names] if name else full_names)
    if not values.get("dataset"):
        raise UserError(f"{files[0]} names no dataset (dataset: name: FILE); name one before the settings")
    config = compose({**values, "algo": "bc", "experiment": "none", "dataset.normalize_observations": False}).dataset
    return config, parse(arguments)


def _one_dataset(action: str, names: list[str], settings: list[str]) -> str:
    """The dataset of an action that takes one; "" where the file named by config= is to say it."""
    if not names and any(a.startswith("config=") for a in settings):
        return ""
    _expect(action, names, 1, "DATASET")
    return names[0]


def _inspect(action: str, names: list[str], settings: list[str]) -> int:
    from offrl.data.tools.inspect import inspect_dataset

    config = _dataset(_one_dataset(action, names, settings), settings)[0]
    report = inspect_dataset(config)
    say(*report.render().split("\n"))
    if config.weighting != "none" and not report.corrupting:
        from offrl.data import load_dataset

        say("", *(f"  {note}" for note in load_dataset(config).notes if note.startswith("weighting")))
    return 1 if report.corrupting else 0


def _doctor(action: str, names: list[str], settings: list[str]) -> int:
    from offrl.report.dataset import doctor

    config, values = _dataset(_one_dataset(action, names, settings), settings, ("out",))
    out = Path(str(values.get("out", f"doctor-{dataset_stem(config.name)}"))).expanduser()
    report = doctor(config, out)
    faults = f"{len(report.corrupting)} fault(s)" if report.corrupting else "no fault"
    say(f"{report.name}: {faults} that would corrupt training; see {out / 'index.html'}")
    return 1 if report.corrupting else 0


def _horizon(action: str, names: list[str], settings: list[str]) -> int:
    from dataclasses import fields

    from offrl.data import load_dataset
    from offrl.ope.config import HorizonConfig
    from offrl.ope.horizon import horizon
    from offrl.runs.tables import print_table
    from offrl.settings.compose import fill
    from offrl.system import trust
    from offrl.system.progress import Progress

    source = _one_dataset(action, names, settings)
    config, values = _dataset(source, settings, tuple(f.name for f in fields(HorizonConfig)))
    chosen = fill(HorizonConfig(), values, "data horizon")
    trust.typed(None if chosen.env in ("auto", "none") else chosen.env)
    dataset = load_dataset(config)
    with Progress("fitting", chosen.updates, "updates", chosen.quiet, stderr=True) as bar:
        result = horizon(dataset, chosen, lambda done, rate: bar.update(done))
    headers, rows = result.table()
    print_table(headers, rows, result.title)
    say(*result.lines())
    return 0


def _label(action: str, names: list[str], settings: list[str]) -> int:
    from offrl.labelling.run import run as label

    return label(names, settings)


def _render(action: str, names: list[str], settings: list[str]) -> int:
    from dataclasses import fields

    from offrl.collect.render import render
    from offrl.settings.compose import fill
    from offrl.system.progress import Progress
    from offrl.tasks.environments import choose_opengl

    _expect(action, names, 2, "DATASET OUT.hdf5")
    config, values = _dataset(names[0], settings, tuple(f.name for f in fields(RenderSettings)))
    pictures = fill(RenderSettings(), values, "data render")
    choose_opengl()
    with Progress(f"writing {names[1]}", 100, "%", pictures.quiet) as bar:
        written = render(
            config,
            names[1],
            pictures.size,
            pictures.camera,
            pictures.env,
            force=pictures.force,
            progress=lambda share: bar.update(round(100 * share)),
        )
    _report(written, pictures.quiet)
    return 0


def _make(action: str, names: list[str], settings: list[str]) -> int:
    """convert, merge and subset."""
    from dataclasses import fields

    from offrl.data.tools.convert import convert, merge, subset
    from offrl.data.tools.subset import Choice
    from offrl.settings.compose import fill
    from offrl.system.progress import Progress

    if action == "merge":
        if len(names) < 3:
            raise UserError(
                "usage: offrl data merge A B [...] OUT [name=value ...]; the last name is that of the new dataset"
            )
    else:
        _expect(action, names, 2, "DATASET OUT")
    *sources, out = names
    chosen = tuple(f.name for f in fields(Choice)) if action == "subset" else ()
    outputs = tuple(f.name for f in fields(Output))
    config, values = _dataset(sources[0], settings, (*outputs, *chosen))
    output = fill(Output(), {k: v for k, v in values.items() if k in outputs}, f"data {action}")
    configs = [config, *(replace(config, name=name) for name in sources[1:])]
    with Progress(f"writing {out}", 100, "%", output.quiet) as bar:
        options: dict[str, Any] = {"force": output.force, "fps": output.fps}
        options["progress"] = lambda share: bar.update(round(100 * share))
        if action == "convert":
            written = convert(config, out, output.format, **options)
        elif action == "merge":
            written = merge(configs, out, output.format, **options)
        else:
            choice = fill(Choice(), {k: v for k, v in values.items() if k in chosen}, "data subset")
            written = subset(config, out, choice, output.format, **options)
    _report(written, output.quiet)
    return 0


def _report(written: Written, quiet: bool) -> None:
    if quiet:
        return
    files = [written.path] if written.path.is_file() else [p for p in written.path.rglob("*") if p.is_file()]
    size = sum(p.stat().st_size for p in files) / 1e6
    say(*(f"note: {note}" for note in written.notes))
    same = "its columns are" if written.form == "lerobot" else "it is"
    say(
        f"wrote {written.path} ({written.form}): {written.rows:,} rows, {written.episodes:,} episodes, {size:,.1f} MB; "
        f"verified: read back, {same} the same bit for bit (fingerprint {written.fingerprint[:16]})"
    )


USES = {
    "inspect": ("DATASET", "offrl data inspect my.hdf5 dataset.fields.observations=obs"),
    "doctor": ("DATASET [out=FOLDER]", "offrl data doctor hopper-medium-v2 out=page"),
    "horizon": ("DATASET", "offrl data horizon cartpole/random.hdf5 env=CartPole-v1"),
    "convert": (
        "DATASET OUT",
        "offrl data convert my.npz my.hdf5\n  offrl data convert my.hdf5 mine/hopper-v0 format=minari",
    ),
    "merge": (
        "A B [...] OUT",
        "offrl data merge day1.hdf5 day2.hdf5 both.hdf5\n  offrl data merge logs/*.hdf5 all.hdf5",
    ),
    "subset": (
        "DATASET OUT",
        "offrl data subset my.hdf5 best.hdf5 top=0.1\n  offrl data subset my.hdf5 two.hdf5 episodes=5,7",
    ),
    "render": ("DATASET OUT.hdf5", "offrl data render hopper.hdf5 hopper-images.hdf5 size=[64,64]"),
    "list": ("", "offrl data list"),
}


def text(arguments: Sequence[str]) -> str:
    """The help for the action among `arguments`; that of all actions where there is none."""
    action = next((a for a in arguments if a in USES), None)
    if action is None:
        return "\n\n".join([INTRODUCTION, *(part for part, _ in SECTIONS)])
    entry = re.search(rf"^  offrl data {action}\b.*(?:\n {{10,}}.*)*", INTRODUCTION, re.MULTILINE)
    summary = " ".join(re.sub(r"^  offrl data \w+ ?([A-Z\[.\] ]*) {2,}", "", entry[0]).split()) if entry else ""
    names, example = USES[action]
    lines = [
        f"usage: offrl data {action} {names} [name=value ...]".replace("  ", " "),
        f"{summary[:1].upper()}{summary[1:]}.",
        f"  {example}",
        *(part for part, actions in SECTIONS if action in actions),
    ]
    return "\n\n".join(lines)
