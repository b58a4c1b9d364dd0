"""The run of `offrl finetune`: the environments, whoever scores, and the loop that the algorithm needs."""

from __future__ import annotations

import contextlib
from pathlib import Path

from offrl.data.fit import settled
from offrl.encoding import set_spec
from offrl.evaluation.evaluator import Evaluator
from offrl.finetuning import record as place
from offrl.finetuning.checks import check_windows
from offrl.finetuning.distillation import students
from offrl.finetuning.distillation.loop import DistillLoop
from offrl.finetuning.off_policy.loop import TransitionLoop
from offrl.finetuning.on_policy.loop import OnPolicyLoop
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.interventions import Interventions
from offrl.finetuning.play.snapshots import load as load_snapshots
from offrl.finetuning.start import Start
from offrl.system import backend
from offrl.system.devices import pick_device
from offrl.system.locks import exclusive
from offrl.training.execution import choose_mode


def finetune(start: Start, run_dir: Path) -> None:
    """Play and learn to `start.config.steps` environment steps of each replica, going on from the newest checkpoint in
    `run_dir`.

    Raises UserError for what does not fit, or where the environment fails (what was learnt is saved then); Interrupted
    after Ctrl-C or SIGTERM, when all is saved.
    """
    config, traits = start.config, start.algorithm.traits
    if config.mode == "distill" and start.teacher is None:  # it goes on
        start.teacher = students.back(start, run_dir)
    teacher = start.teacher
    device = pick_device(config.device)
    arithmetic = backend.configure(device, config.threads, config.precision)
    with contextlib.ExitStack() as stack:
        evaluator = stack.enter_context(Evaluator(start.task, config.eval))
        seeds = [r.seed for r in start.replicas]
        margin = 0.0 if start.data is None else start.data.action_margin
        person = None if config.interventions is None else Interventions(config.interventions, start.spec)
        play = stack.enter_context(
            Play(
                start.task if teacher is None else teacher.task,
                start.spec if teacher is None else teacher.spec,
                seeds,
                config.envs or 1,
                config.seed,
                config.eval.max_steps,
                margin,
                person,
                config.backend,
                config.device,
            )
        )
        play.success = start.success
        if traits.goal_conditioned:
            play.goal_dim = start.spec.observation_dim
        if config.starts == "data" and start.data is not None:
            play.begin_in(load_snapshots(config, start.data, start.spec.source))
        check_windows(start, play)
        start.spec = settled(start.spec, play.env)
        set_spec(start.algorithm, start.spec)
        kind = OnPolicyLoop if traits.on_policy else TransitionLoop if teacher is None else DistillLoop
        stack.enter_context(exclusive(run_dir))
        mode = choose_mode(config.compile, device, kind.lengths(start)[1], start.algorithm)
        if not traits.vectorized:
            mode = "eager"
        mode = place.claim(run_dir, start, mode, device.type)
        if teacher is not None:
            teacher.save(run_dir)
        if mode.startswith("compiled"):
            backend.cache_compiled()
        kind(start, run_dir, device, mode, evaluator, play, arithmetic).run()
