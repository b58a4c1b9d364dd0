"""The settings that a run was trained with, from its config.yaml."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.errors import UserError, warn
from offrl.runs.record import CONFIG, read_record
from offrl.runs.run import SavedRun
from offrl.settings import known
from offrl.settings.aliases.names import understood
from offrl.settings.compose import finish, flatten
from offrl.settings.presets import algorithm_group
from offrl.settings.train import TrainConfig
from offrl.settings.untrusted import check_code, read_settings
from offrl.system import trust


def run_settings(
    run_dir: str | Path, values: Mapping[str, Any] | None = None, parts: Collection[str] = ("dataset",)
) -> TrainConfig:
    """The settings of a run, with `values` (see `compose`) on top: those that continue it. Raises UserError.

    Values that must not change are refused later, when the run's identity is compared. parts: "dataset" where the data
    will be read, "eval" where the environment will be made: code that the run's file names for it is refused (see
    `offrl.settings.untrusted`).
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    run_dir, values = Path(run_dir), flatten(values or {})
    run_dir = run_dir if run_dir.name not in ("", "..") else run_dir.resolve()
    if read_record(run_dir).get("kind") == "finetune":  # which says what is wrong when this is no run
        raise UserError(f"{run_dir} is a fine-tuning run: `offrl finetune resume={run_dir}` continues it")
    saved = read_settings(run_dir / CONFIG, values)
    check_code(run_dir / CONFIG, saved, values, parts)
    trust.typed(values.get("eval.env"))
    name = (saved.get("algo") or {}).get("name")
    if name in known.index()["algorithms"]:
        values = understood(values, str(name))
    user_values = {**saved.pop("given"), **values}
    algo, dataset = values.pop("algo", None), values.pop("dataset", None)
    if (
        algo is not None
        and algo != saved.get("label")
        and (requested := algorithm_group(algo)) not in (name, saved.get("label"))
    ):
        raise UserError(
            f"{run_dir} was trained with algo={name}, not {requested}; a run continues with its own algorithm only"
        )
    for key in ("experiment", "resume"):
        values.pop(key, None)
    schema = OmegaConf.structured(TrainConfig)
    schema.algo = OmegaConf.structured(registry.get("algo", str(name)).Config)
    try:
        config = OmegaConf.merge(schema, OmegaConf.create({**saved, "quiet": False}))
    except OmegaConfBaseException as error:
        reason = f"{error.full_key}: {str(error).splitlines()[0]}"
        raise UserError(
            f"{run_dir / CONFIG} does not fit this version of offrl ({reason}); continue with the version it names"
        ) from None
    if dataset is not None:
        config.dataset.name = str(dataset)
    result = finish(config, {**values, "runs_dir": str(run_dir.parent), "name": run_dir.name}, user_values)
    result.resume = str(run_dir)
    return result


def data_named(config: TrainConfig) -> None:
    """Raises UserError where a run goes on that was trained on arrays from Python, which no name stands for."""
    if (
        not config.resume
        or config.dataset.name in registry.names("dataset")
        or SavedRun(config.resume).spec.source != "arrays"
    ):
        return
    raise UserError(
        f"{config.resume} was trained on arrays from Python: offrl.train(resume={config.resume!r}, dataset=...) "
        "continues it"
    )


def scored_again(config: TrainConfig) -> TrainConfig:
    """The settings of a run that goes on, with the environment that code of the user's made; a warning where nothing
    names that. Raises UserError where only the run's file does."""
    run = SavedRun(config.resume or "")
    env_name, task = run.record.get("env", "auto"), run.spec.task
    if config.eval.env != "auto" or task is None or task.env_id is not None:
        return config
    if env_name not in ("auto", "none"):
        if not trust.importable(env_name):
            raise UserError(
                f"{run.dir} is scored in {env_name}, which is code and only its file names: say it again, "
                f"eval.env={env_name}"
            )
        return dataclasses.replace(config, eval=dataclasses.replace(config.eval, env=env_name))
    if "no file names" in task.note:
        warn(f"{run.dir} goes on without scores. {task.note}")
    return config
