"""The start of a fine-tuning run that was stopped."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from offrl import registry
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.finetuning.config import FinetuneConfig, choose
from offrl.finetuning.start import KIND, Factory, Start, run_data, task_of
from offrl.runs import record as runs
from offrl.settings.compose import fill, flatten
from offrl.settings.dataset import DatasetConfig
from offrl.settings.kinds import misfit, restored
from offrl.settings.replicas import expand
from offrl.settings.train import TrainConfig
from offrl.settings.untrusted import check_code, read_settings
from offrl.system import files as checkpoint

NEEDED = (
    "data.name",
    "data.fingerprint",
    "identity.finetune",
    "online.label",
    "online.parent",
    "online.fixed",
    "online.anneal",
)


def resume(
    config: FinetuneConfig,
    user_settings: dict[str, Any],
    other: dict[str, Any],
    run: Any,
    dataset: Dataset | None,
    env: Factory | None,
) -> Start:
    path = Path(str(config.resume))
    record = runs.read_record(path)
    if record.get("kind") != KIND:
        raise UserError(f"{path} is no fine-tuning run: offrl finetune {path} begins one from it")
    if run is not None:
        raise UserError(f"resume={path} goes on with what it began from; leave out {run}")
    record = runs.read_record(path, NEEDED)
    saved = read_settings(path / runs.CONFIG, user_settings)
    if changed := [k for k in other if k not in ("dataset",) and not k.startswith(("dataset.cache", "dataset.memory"))]:
        raise UserError(f"resume={path} goes on with its own settings; leave out {changed[0]}=")
    identity = record["identity"]
    try:
        kind = registry.get("algo", identity["algo"]["name"])
        algo = restored(kind.Config, saved["algo"], str(path))
        settings = None if saved.get("dataset") is None else DatasetConfig(**saved["dataset"])
        if wrong := misfit(saved.get("dataset"), DatasetConfig | None, "dataset"):
            raise TypeError(wrong)
        run_settings = {
            k: saved[k] for k in (f.name for f in dataclasses.fields(FinetuneConfig)) if k in saved and k != "resume"
        }
    except (KeyError, TypeError) as error:
        raise UserError(
            f"{path / runs.CONFIG} does not fit this version of offrl ({error}); continue with the version that wrote "
            "it"
        ) from None
    run_settings.update({"runs_dir": str(path.resolve().parent), "name": path.resolve().name, "quiet": False})
    merged = {**flatten(run_settings), **{k: v for k, v in user_settings.items() if k not in other}}
    merged.pop("eval.env", None)
    config = choose(fill(FinetuneConfig(), merged, "finetune"), {}, fresh=False)
    for name, value in user_settings.items():
        if name in identity["finetune"] and identity["finetune"][name] != getattr(config, name):
            raise UserError(
                f"{path} began with {name}={identity['finetune'][name]}, not {value}; begin another run, with another "
                "name="
            )
    spec = runs.spec_of(record, path)
    data = None
    check_code(path / runs.CONFIG, saved, user_settings, ("eval", *(("dataset",) if config.mixing != 0.0 else ())))
    if config.mixing != 0.0 and settings is not None:
        # where the data are, and offrl's own files of them
        typed = {k.removeprefix("dataset."): v for k, v in other.items()}
        settings = dataclasses.replace(settings, **{"name" if k == "dataset" else k: v for k, v in typed.items()})
        stand_in = TrainConfig(algo=algo, dataset=settings)
        data = run_data(stand_in, config, dataset, record, path)
    if checkpoint.load_latest(path) is None:
        raise UserError(f"{path} has no checkpoint yet; run the command that began it again")
    task = task_of(
        spec,
        dataclasses.replace(config, env=None),
        str(record.get("env", "auto")),
        env,
        f"offrl finetune resume={path} env=ID",
    )
    grid = dict(identity.get("grid", []))
    more, replicas = record["online"], expand(grid, identity["seeds"], identity.get("paired") is True)
    return Start(
        config,
        kind(algo, spec),
        replicas,
        grid,
        spec,
        task,
        more["label"],
        settings,
        record["data"],
        data,
        None,
        more["parent"],
        more["fixed"],
        {k: (*v, 1.0)[:3] for k, v in more["anneal"].items()},
        saved["given"],
        run_dir=path,
    )
