"""`offrl model`: how good a trained world model is, on its own data or on others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offrl.errors import UserError
from offrl.runs.paths import check_exists
from offrl.settings.field import describe, setting


@dataclass
class ModelConfig:
    """Settings of `offrl model`."""

    probe: str | None = setting(
        None,
        "of latent models: a column of the data, seen or not, such as info_states: how much of it a linear regression "
        "on latent states explains, in other episodes than it is fitted on",
    )
    ood: str | None = setting(
        None,
        "of ensembles: another dataset: how well each measure of uncertainty tells its rows from the model's own data",
    )
    out: str | None = setting(
        None, "folder of the JSON file and the pictures; null: RUN, or RUN/model-NAME for other data or one file"
    )


LITERAL = ("ood", "out", "probe")  # taken as they stand, whatever characters they hold


USAGE = """\
usage: offrl model RUN [dataset=NAME] [name=value ...]

Measures the world models of a run of algo=dynamics (or one file of its models/): errors, likelihood and coverage of intervals
one step ahead, errors many steps ahead under recorded actions, terminations. On its own data it takes the episodes kept apart.
Of a run with a latent model (rssm, tdmpc2, mrq, director): errors of open-loop predictions, of its own data unless another is named.

  dataset=null                             other data to measure on, all its episodes; also dataset.SETTING=value, for ood= too
{0}"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    return USAGE.format("\n".join(describe(ModelConfig())))


def run(arguments: list[str]) -> int:
    if not arguments or "=" in arguments[0]:
        raise UserError(
            "usage: offrl model RUN [dataset=NAME] [ood=DATASET] [probe=COLUMN] [out=DIR]; offrl model --help says more"
        )
    literal = {k: v for k, _, v in (a.partition("=") for a in arguments[1:]) if k in LITERAL and v}
    from offrl.settings.compose import fill, parse

    values = parse([a for a in arguments[1:] if a.partition("=")[0] not in literal])
    about_data = {k: values.pop(k) for k in list(values) if k.partition(".")[0] == "dataset"}
    config = fill(ModelConfig(), {**values, **literal}, "model")
    dataset = about_data.pop("dataset", None)
    if about_data and dataset is None and config.ood is None:
        raise UserError(f"{next(iter(about_data))} needs the dataset itself: dataset=NAME")
    check_exists(Path(arguments[0]), "a run with a world model, or a file of its models/")
    from offrl.report.models import ensembles, latents

    if latents.is_latent(Path(arguments[0])):
        if config.ood is not None:
            raise UserError("ood= is of ensembles, whose members can disagree: leave it out for a latent model")
        latents.report_again(arguments[0], dataset, about_data, config.probe, config.out)
        return 0
    if config.probe is not None:
        raise UserError(
            "probe= is of latent models: leave it out for an ensemble, which predicts the data's own numbers"
        )
    ensembles.report_again(arguments[0], dataset, about_data, config.ood, config.out)
    return 0
