"""What whatever learns from its own play alone refuses: settings of other modes, and runs that it cannot go on from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offrl.data.fit import seen_besides
from offrl.errors import UserError, warn
from offrl.evaluation.policy import TrainedPolicy
from offrl.finetuning.config import BALANCE, STARTS
from offrl.finetuning.start import KIND
from offrl.runs.run import SavedRun

# settings of mode=transitions
OTHERS = (
    "mixing",
    "replay",
    *BALANCE,
    "utd",
    "warmup",
    "update_every",
    "noise",
    "capacity",
    "normalize",
    "interventions",
    "starts",
    *STARTS,
)


def check_settings(settings: Mapping[str, Any], learner: str) -> None:
    """Raise UserError where one of `settings` belongs to learning from data. learner: `a residual`."""
    if clash := next((name for name in OTHERS if name in settings), None):
        raise UserError(
            f"{clash}= belongs to mode=transitions: {learner} learns without data from what its present policy just "
            "played; leave it out"
        )


def parent_run(path: Path, learner: str, verb: str) -> SavedRun:
    """The run at `path`, on whose policies `learner`, such as `a residual`, builds: it `verb`, such as `adds to`, real
    numbers. Raises UserError for a run of others.
    """
    saved = SavedRun(path)
    if saved.record.get("kind") == KIND:
        raise UserError(
            f"{path} is a fine-tuning run, whose policies learnt online; give the run that it began from, or another "
            "one"
        )
    if saved.grid:
        raise UserError(
            f"{path} has a grid over {', '.join(saved.grid)}: {learner} is trained for each seed of a run without one"
        )
    spec, label = saved.spec, saved.algorithm
    if spec.discrete or spec.text:
        raise UserError(
            f"{path}: {label} chooses among {'texts' if spec.text else 'discrete actions'}, and {learner} {verb} real "
            "numbers"
        )
    if more := seen_besides(spec):
        raise UserError(
            f"{path}: {label} sees {more}, and {learner} takes rows of numbers: mode=transitions trains such a policy "
            "on"
        )
    if len(spec.observation_shape) != 1:
        raise UserError(
            f"{path}: {label} sees images ({'x'.join(map(str, spec.observation_shape))}), and {learner} takes rows of "
            "numbers"
        )
    return saved


def policies_of(saved: SavedRun) -> tuple[list[TrainedPolicy], dict[str, Any]]:
    """(the policies of a run, which moment of which run they are)."""
    policies = [saved.load_policy(replica, "cpu") for replica in saved.replicas]
    if dead := saved.diverged:
        warn(
            f"{', '.join(map(str, dead))} of {saved.dir} had diverged: what is built on are the last finite parameters"
        )
    files = b"".join((saved.dir / "policies" / f"{r.name}.safetensors").read_bytes() for r in saved.replicas)
    digest = hashlib.sha256(files).hexdigest()
    return policies, {"run": str(saved.dir), "step": int(policies[0].state.step), "sha256": digest}
