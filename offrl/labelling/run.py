"""`offrl data label`: a language model labels a dataset, and a file for `dataset.reward_labels` is written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError, nearest, say
from offrl.labelling.config import LabelSettings
from offrl.settings.field import dataset_stem
from offrl.system.user_code import python_object

if TYPE_CHECKING:
    import numpy as np

    from offrl.data.dataset import Dataset
    from offrl.labelling.cache import Counts, Labeller
    from offrl.labelling.pictures import Pictures
    from offrl.settings.train import TrainConfig

# taken as they stand on the command line, whatever characters they hold
PLAIN = ("task", "out", "url", "model", "key_env", "local", "labeller", "cache", "render", "reached")
SYSTEM = "You judge recorded behaviour of a controlled system. Answer in exactly the form that is asked for."
USAGE = """\
usage: offrl data label DATASET kind=success labels=COLUMN [name=value ...]
       offrl data label DATASET kind=preferences|rewards|subgoals task='WHAT IS TO BE ACHIEVED' model=MODEL [url=URL] [name=value ...]

A language model, or a classifier of success in images, labels a dataset; training then takes dataset.reward_labels=FILE. The key of an endpoint comes from $OFFRL_LLM_KEY.
The same command goes on where it was stopped: answers are kept, and none is asked for twice.

Settings and their defaults:
"""  # noqa: E501


def usage() -> str:
    """The help text of `offrl data label`."""
    from offrl.settings.field import describe

    more = [
        f"  {'fit.NAME=...':<40} kind=preferences: members, hidden, updates, learning_rate, batch_size, held_out, seed "
        "of the reward",
        f"  {'fit.NAME=..., encoder.NAME=...':<40} kind=success: hidden, dropout, updates, learning_rate, batch_size, "
        "held_out, reward, threshold, seed; the encoder's settings as for offrl train",
        f"  {'extra.NAME=VALUE':<40} another field of requests to the endpoint; null leaves one out: "
        "extra.max_tokens=null",
        f"  {'dataset.NAME=VALUE':<40} how DATASET is read, as for offrl train",
    ]
    return USAGE + "\n".join([*describe(LabelSettings()), *more])


def run(names: list[str], settings: list[str]) -> int:
    """The command. Raises UserError; Ctrl-C leaves every answer that came in the cache."""
    if not names and not settings:
        say(*usage().split("\n"))
        return 0
    if len(names) != 1:
        raise UserError(f"usage: offrl data label DATASET [name=value ...]; {len(names)} names were given, 1 is needed")
    options, data_settings, fit, extra = _parse(settings)
    target = Path(options.out or f"labels-{dataset_stem(names[0])}-{options.kind}.safetensors").expanduser()
    if target.suffix != ".safetensors":
        raise UserError(f"out={target} must end in .safetensors")
    if target.exists() and not options.force:
        raise UserError(f"{target} exists; force=true replaces it, out= names another file")
    if options.kind == "success":
        _success(names[0], options, data_settings, fit, target)
        return 0
    task, labeller = _task(options.task), _labeller(options, extra)
    composed = _read_by(names[0], data_settings)
    config = composed.dataset

    from offrl.data import load_dataset
    from offrl.data.loading.resolve import resolve
    from offrl.labelling.cache import Answers
    from offrl.labelling.prompts import Renderer, check_labelable, named_function
    from offrl.system.files import cache_dir

    if resolve(config.name, config).text:
        raise UserError(
            f"{names[0]} is a text dataset; offrl data label is for control data, whose observations are numbers"
        )
    dataset = load_dataset(config, quiet=options.quiet)
    check_labelable(dataset, options.show_images)
    function = named_function(options.render, "render") if options.render else None
    render = Renderer(
        dataset.spec,
        options.names,
        options.action_names,
        options.steps,
        options.digits,
        options.show_actions,
        options.show_rewards,
        function,
        f"render={options.render}",
        _pictures(options, labeller),
    )
    typed = Path(options.cache).expanduser() if options.cache else None
    if typed is not None and typed.is_symlink():  # a person's own link is followed
        typed = typed.resolve()
    digest = hashlib.sha256(labeller.identity.encode()).hexdigest()[:16]
    path = typed or cache_dir(config.cache_dir) / "labels" / f"answers-{digest}.jsonl"
    shared: dict[str, Any] = {
        "render": render,
        "answers": Answers(path),
        "quiet": options.quiet,
        "limit": options.max_prompts,
    }
    metadata = {"kind": options.kind, "task": task, "labeller": labeller.identity}
    if options.kind == "preferences":
        from offrl.labelling.rewards import label_preferences
        from offrl.relabel.preferences import PreferenceSettings
        from offrl.settings.compose import fill

        model, counts = label_preferences(
            dataset,
            labeller,
            task,
            pairs=options.pairs,
            length=options.length or 25,
            both_orders=options.both_orders,
            seed=options.seed,
            fit=fill(PreferenceSettings(), fit, "data label"),
            encoder=composed.encoder if options.show_images else None,
            device=options.device,
            **shared,
        )
        model.save(target)
        left_out = counts.pairs - counts.swapped if options.both_orders else counts.unparsable
        rows = [("pairs left out", f"{left_out:,}"), ("held-out accuracy", f"{model.accuracy:.3f}")]
        _report(counts, path, target, options.quiet, rows)
        return 0
    import torch

    from offrl.data.transforms.reward_labels import RewardLabels

    rewards, counts = _rewards(dataset, labeller, task, options, {**shared, "on_missing": options.on_missing})
    RewardLabels.of(dataset, rewards, {**metadata, "unparsable": counts.unparsable}).save(target)
    returns = replace(dataset, columns={**dataset.columns, "rewards": torch.from_numpy(rewards)}).episode_returns()
    summary = f"{returns.mean():.6g} on average, from {returns.min():.6g} to {returns.max():.6g}"
    _report(counts, path, target, options.quiet, [("labelled returns", summary)])
    return 0


def _success(name: str, options: LabelSettings, settings: dict[str, Any], fit: dict[str, Any], target: Path) -> None:
    """kind=success."""
    from offrl.data import load_dataset
    from offrl.data.dataset import CORE
    from offrl.relabel.success import SuccessClassifier, SuccessSettings
    from offrl.settings.compose import fill

    config, learning = _read_by(name, settings), fill(SuccessSettings(), fit, "data label")
    fields = (
        config.dataset.fields if options.labels in CORE else {options.labels: options.labels, **config.dataset.fields}
    )
    dataset = load_dataset(replace(config.dataset, fields=fields), quiet=options.quiet)
    model = SuccessClassifier.fit(
        dataset, options.labels, learning, config.encoder, device=options.device, quiet=options.quiet
    )
    model.save(target)
    held_out = [(f"held-out {n}", f"{getattr(model, n):.3f}") for n in ("accuracy", "precision", "recall")]
    threshold = [] if model.threshold is None else [("threshold", f"{model.threshold:.3f}")]
    _table("classifier of success", held_out + threshold, target, options.quiet)


def _rewards(
    dataset: Dataset, labeller: Labeller, task: str, options: LabelSettings, shared: Mapping[str, Any]
) -> tuple[np.ndarray, Counts]:
    """kind=rewards and kind=subgoals. shared: what every kind of question takes."""
    if options.kind == "rewards":
        from offrl.labelling.rewards import label_by_score

        return label_by_score(
            dataset, labeller, task, length=options.length, low=options.low, high=options.high, **shared
        )
    from offrl.labelling.prompts import named_function
    from offrl.labelling.rewards import label_subgoals

    if options.choices and not options.reached:
        raise UserError("choices= are words, for which reached=file.py:function has to say what reaches them")
    reached = named_function(options.reached, "reached") if options.reached else None
    return label_subgoals(
        dataset,
        labeller,
        task,
        most=options.subgoals,
        entries=options.entries,
        radius=options.radius,
        reached=reached,
        where=f"reached={options.reached}",
        choices=options.choices,
        ordered=options.ordered,
        bonus=options.bonus,
        add_to_rewards=options.add_to_rewards,
        **shared,
    )


def _parse(settings: list[str]) -> tuple[LabelSettings, dict[str, Any], dict[str, Any], dict[str, Any]]:
    """(the command's own settings, how the data are read, settings of the fit, more fields of requests). Raises
    UserError.
    """
    from offrl.settings.compose import fill, parse

    known = [f.name for f in fields(LabelSettings)]
    plain = {key: text for key, _, text in (a.partition("=") for a in settings) if key in PLAIN}
    if empty := next((key for key, text in plain.items() if not text), None):
        raise UserError(f"'{empty}=' has no value")
    values = parse([a for a in settings if a.partition("=")[0] not in PLAIN])
    for key in values:
        if key not in known and key.partition(".")[0] not in ("dataset", "encoder", "fit", "extra"):
            raise UserError(
                f"offrl data label has no setting '{key}'.{nearest(key, known)} `offrl data label` alone shows them all"
            )
    parts: dict[str, dict[str, Any]] = {
        prefix: {k.removeprefix(f"{prefix}."): v for k, v in values.items() if k.startswith(f"{prefix}.")}
        for prefix in ("fit", "extra")
    }
    chosen = {k: v for k, v in values.items() if k in known} | {k: None if v == "null" else v for k, v in plain.items()}
    data_settings = {k: v for k, v in values.items() if k.partition(".")[0] in ("dataset", "encoder")}
    if data_settings.get("dataset.reward_labels") is not None:
        raise UserError("offrl data label makes new rewards from the recorded ones; leave out dataset.reward_labels")
    return fill(LabelSettings(), chosen, "data label"), data_settings, parts["fit"], parts["extra"]


def _read_by(name: str, data_settings: dict[str, Any]) -> TrainConfig:
    """The settings that read the dataset for labelling, without the transforms that follow reward labelling in
    training, and those of the encoder.
    """
    from offrl.settings.compose import compose
    from offrl.settings.dataset import DatasetConfig

    config = compose(
        {**data_settings, "dataset": name, "algo": "bc", "experiment": "none", "dataset.normalize_observations": False}
    )
    default = DatasetConfig()
    later = {key: getattr(default, key) for key in DatasetConfig.TRANSFORMS if key not in DatasetConfig.CONTENT}
    data = replace(config.dataset, **later, reward_labels="offrl.labelling.prompts:recorded")
    return replace(config, dataset=data)


def _task(text: str) -> str:
    """The task in words, from the setting or the file that it names."""
    if not text:
        raise UserError(
            "task= is missing: say in words what is to be achieved, such as task='run forward without falling', or "
            "task=@FILE"
        )
    if not text.startswith("@"):
        return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"" else text
    path = Path(text[1:]).expanduser()
    try:
        content = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"task=@{path} cannot be read as UTF-8 text ({getattr(error, 'strerror', None) or 'other characters'})"
        ) from None
    if not content:
        raise UserError(f"task=@{path} is empty")
    return content


def _labeller(options: LabelSettings, extra: dict[str, Any]) -> Labeller:
    """The language model that the settings name. Raises UserError."""
    from offrl.labelling.cache import Labeller
    from offrl.labelling.endpoint import URLS, Endpoint

    sources = [name for name in ("url", "local", "labeller") if getattr(options, name)]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(f'{n}=' for n in sources)} name several language models; give one of them")
    if options.labeller:
        source, _, name = options.labeller.rpartition(":")
        if not source:
            raise UserError(
                f"labeller={options.labeller} names no object; it is file.py:object or package.module:object"
            )
        labeller = python_object(source, name, options.labeller)[0]
        if isinstance(labeller, type) or not isinstance(labeller, Labeller):
            raise UserError(
                f"labeller={options.labeller} must be an object with identity and complete(prompts), as "
                "offrl.labelling.Labeller says"
            )
        return labeller
    if options.local:
        from offrl.labelling.local_model import LocalModel

        return LocalModel(
            options.local, max_tokens=options.max_tokens, system=SYSTEM, batch=options.batch, device=options.device
        )
    url = options.url or next((os.environ[name] for name in URLS if os.environ.get(name)), None)
    if not url:
        raise UserError(
            "no language model is named: url=http://127.0.0.1:8000/v1 model=NAME (any OpenAI-compatible endpoint; its "
            "address may stand in $OFFRL_LLM_URL, its key in $OFFRL_LLM_KEY), or local=FOLDER"
        )
    return Endpoint(
        url,
        options.model,
        options.temperature,
        options.max_tokens,
        SYSTEM,
        extra,
        options.key_env,
        options.parallel,
        options.timeout,
        options.retries,
    )


def _pictures(options: LabelSettings, labeller: Labeller) -> Pictures | None:
    """What takes the images of questions and gives them to the endpoint. Raises UserError where none can be shown."""
    from offrl.labelling.endpoint import Endpoint

    if not options.show_images:
        return None
    if not isinstance(labeller, Endpoint) or options.kind == "subgoals" or options.render:
        raise UserError(
            "show_images=true shows images to an endpoint (url=, model=), for kind=rewards and kind=preferences, "
            "without render="
        )
    return labeller.pictures


def _report(counts: Counts, cache: Path, target: Path, quiet: bool, more: list[tuple[str, str]]) -> None:
    rows = [
        ("questions", f"{counts.prompts:,}"),
        ("answered now", f"{counts.prompts - counts.cached:,}"),
        ("answered before", f"{counts.cached:,}"),
        ("unreadable answers", f"{counts.unparsable:,}" + (f", such as '{counts.example}'" if counts.example else "")),
    ]
    if counts.swapped:
        rows.append(("same answer in both orders", f"{counts.agreed / counts.swapped:.0%} of {counts.swapped:,} pairs"))
    if not quiet:
        say(f"answers: {cache}")
    _table("labelled by a language model", rows + more, target, quiet)


def _table(title: str, rows: list[tuple[str, str]], target: Path, quiet: bool) -> None:
    if quiet:
        return
    from offrl.runs.tables import print_table

    print_table([title, ""], [list(row) for row in rows], "")
    say(f"labels: {target}; train with dataset.reward_labels={target}")
