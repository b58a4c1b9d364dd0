"""The directory of a fine-tuning run: its name and its record."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from pathlib import Path
from typing import Any

from offrl.errors import UserError
from offrl.finetuning.config import BALANCE, FREE, LATER, STARTS
from offrl.finetuning.start import KIND, Start
from offrl.runs import record as runs
from offrl.settings.diff import difference
from offrl.settings.field import plain_name, without_places
from offrl.system import files as checkpoint
from offrl.system.plugins.loading import load_named


def directory(start: Start) -> Path:
    """A name given by hand, or one made of algorithm, environment and a hash of the settings: the same command finds
    its own run.
    """
    config = start.config
    if start.run_dir is not None:
        return start.run_dir
    if config.name is not None:
        if not plain_name(config.name):
            raise UserError(f"name={config.name} must be a plain name; where run directories are made is runs_dir=")
        return Path(config.runs_dir) / config.name
    values = {**identity(start), "data": start.described.get("fingerprint")}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:6]
    env = "".join(c if c.isalnum() or c in "-_." else "-" for c in values["env"])
    return Path(config.runs_dir) / f"finetune-{start.label}-{runs.shortened(env)}-{digest}"


def identity(start: Start) -> dict[str, Any]:
    """The settings that decide what comes out; two fine-tuning runs that agree in these are the same one."""
    algo = dataclasses.asdict(start.algorithm.config)
    values: dict[str, Any] = {
        "algo": {k: v for k, v in algo.items() if k not in start.grid},
        "seeds": list(dict.fromkeys(r.seed for r in start.replicas)),
        "dataset": {},
        "env": start.task.env_id or start.task.name,
        "parent": None
        if start.parent is None
        else {k: v for k, v in start.parent.items() if k != "run"},  # wherever it lies
        "finetune": {k: v for k, v in dataclasses.asdict(start.config).items() if k not in (*FREE, "precision")},
        "precision": start.config.precision,
    }
    if start.config.mode == "transitions":  # older runs do not say it
        del values["finetune"]["mode"]
    if start.config.mode != "distill":
        del values["finetune"]["student"]
    if start.config.backend == "warp":  # of the others the same comes
        values["finetune"]["physics"] = "MuJoCo Warp"
    if start.success is not None:
        values["success"] = start.success.classifier.digest()  # whatever its file holds by now
    if start.config.starts == "task":
        for name in STARTS:
            del values["finetune"][name]
    if start.config.replay == "uniform":
        for name in BALANCE:
            del values["finetune"][name]
    values["finetune"] = {k: v for k, v in values["finetune"].items() if k not in LATER or v != LATER[k]}
    if start.data is not None:
        values["dataset"] = without_places(start.data)
    traits, schedule = start.algorithm.traits, getattr(start.algorithm.config, "schedule", "constant")
    if start.anneal or (traits.on_policy and schedule in ("cosine", "linear")):
        values["steps"] = start.config.steps  # over which settings are annealed
    if start.grid:
        values["grid"] = [[name, cells] for name, cells in start.grid.items()]
        if len(start.replicas) < len(values["seeds"]) * math.prod(map(len, start.grid.values())):
            values["paired"] = True
    return json.loads(json.dumps(values, default=str))


def claim(run_dir: Path, start: Start, mode: str, device: str) -> str:
    """Check that `run_dir` is free or holds this very run, write its config and record, and return the mode of the
    step, which a run keeps.

    Raises UserError where anything else is there.
    """
    old = runs.read_record(run_dir) if (run_dir / runs.RECORD).exists() else None
    expected = identity(start)
    if old is None:
        if files := sorted(p.name for p in run_dir.iterdir() if not p.name.startswith(".")) if run_dir.exists() else []:
            raise UserError(
                f"{run_dir} is no run directory and not empty (it has {', '.join(files[:3])}); choose another name="
            )
    else:
        if old.get("kind") != KIND:
            raise UserError(f"{run_dir} holds a run of `offrl train`; choose another name=")
        if old["data"].get("fingerprint") != start.described.get("fingerprint"):
            raise UserError(f"{run_dir} was begun with other data ({old['data']['name']}); choose another name=")
        if old["identity"]["parent"] != expected["parent"]:
            raise UserError(
                f"{run_dir} began from another state ({_words(old['identity']['parent'])}) than "
                f"{_words(expected['parent'])}, which has changed since: offrl finetune resume={run_dir} goes on with "
                "the old one, another name= begins anew"
            )
        both = [
            one | {"finetune": LATER | one.get("finetune", {})} for one in (runs.complete(old["identity"]), expected)
        ]
        changed = difference(*both)
        if changed:
            name, (old_value, new_value) = next(iter(changed.items()))
            if name == "steps" and start.anneal:
                raise UserError(
                    f"{run_dir} was begun with steps={old_value}, over which algo.{next(iter(start.anneal))} changes: "
                    "it cannot go on to more; another name= begins anew"
                )
            raise UserError(
                f"{run_dir} holds another run ({name}: {old_value} there, {new_value} here); choose another name="
            )
        if not checkpoint.steps(run_dir) and (run_dir / "policies").exists():
            raise UserError(
                f"{run_dir} holds a finished run without checkpoints; remove that folder, or choose another name="
            )
        if old["device"] == device and start.config.compile == "auto":
            mode = old["mode"]
    record = {
        "kind": KIND,
        "label": f"{start.label}+{_suffix(start)}",
        "identity": expected,
        "replicas": [{"seed": r.seed, **dict(r.values)} for r in start.replicas],
        "data": start.described,
        "spec": start.spec.to_json(),
        "env": start.task.env_id or "auto",
        "mode": mode,
        "group": len(start.replicas),
        "device": device,
        "online": {"label": start.label, "parent": start.parent, "fixed": start.fixed, "anneal": start.anneal},
    }
    saved: dict[str, Any] = dataclasses.asdict(dataclasses.replace(start.config, name=run_dir.name, resume=None))
    saved["eval"].pop("env")
    saved |= {"algo": dataclasses.asdict(start.algorithm.config), "dataset": None, "given": start.user_settings}
    if start.data is not None:
        saved["dataset"] = dataclasses.asdict(start.data)
    runs.write(run_dir, record, load_named(), saved)
    return mode


def _suffix(start: Start) -> str:
    if start.config.mode == "transitions" or start.parent is None:
        return "online"
    return "ppo" if start.config.mode == "on_policy" else start.config.mode


def _words(parent: dict[str, Any] | None) -> str:
    return "fresh parameters" if parent is None else f"step {parent['step']:,} of a run, {parent['sha256'][:12]}"
