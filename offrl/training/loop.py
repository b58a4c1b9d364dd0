"""The training loop: one for all algorithms, in plain order, without callbacks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offrl.data.dataset import Dataset
from offrl.settings.train import TrainConfig
from offrl.system.progress import duration
from offrl.training import distributed
from offrl.training.listeners.callback import OnEvaluation
from offrl.training.session import Session
from offrl.training.setup import set_up


def train(
    config: TrainConfig,
    dataset: Dataset,
    run_dir: Path,
    pretrained: Mapping[str, Any] | None = None,
    on_evaluation: OnEvaluation | Sequence[OnEvaluation] | None = None,
) -> None:
    """Train all seeds to `config.steps` updates in `run_dir`, going on from its newest checkpoint if there is one.

    config, pretrained: as `stages.ready` gives them. on_evaluation: see `offrl.train`.

    Raises UserError for settings that do not fit the data, the environment or the run found in `run_dir`; Interrupted
    after Ctrl-C or SIGTERM, when all is saved.
    """
    with contextlib.ExitStack() as resources:
        setup = set_up(config, dataset, run_dir, pretrained, resources)
        dataset = setup.dataset
        run = Session(config, dataset, run_dir, setup, resources, on_evaluation)
        engine, log, scores, slices, signals = run.engine, run.log, run.scores, run.slices, run.signals
        trains, started = run.step < run.end, time.monotonic()
        resources.enter_context(log)
        resources.enter_context(signals.handled(log.say))
        compiled, compiling = setup.plan.mode.startswith("compiled"), 0.0
        if trains and compiled:
            log.say("compiling the step, 10 to 30 seconds; at once where it was compiled before")
        while run.step < run.end and run.alive.any():
            stop = run.next_stop()
            slices.begin(run.step)
            while run.step < stop and not signals.count:
                end = slices.next(run.step, stop)
                if run.world.size > 1:
                    end, signals.count = distributed.agree(end, signals.count, run.device)
                    if signals.count:
                        break
                engine.run(run.step, end - run.step)
                run.step = end
                first_seconds = slices.done(end)
                if first_seconds is not None:
                    log.timing(end, first_updates=first_seconds)
                    compiling = first_seconds if compiled else 0.0
                    continue
                scores.poll()
                if end < run.end:
                    log.progress(end, slices.recent, run.text)
            if run.step == stop:
                run.write_metrics()
                if run.step < run.end and run.finished():
                    run.end = run.step
                    log.say(f"stopping at step {run.end:,}: nothing gets better any more")
                log.timing(run.step, updates_per_second=slices.rate)
                run.heed_callbacks()
                if run.due(run.eval_every):
                    scores.begin(run.step, run.policies)
                    run.consult_stopping_rule()
                    run.heed_callbacks()
                    slices.pause()
                if run.step == run.end:
                    scores.wait()
                if run.due(run.save_every):
                    run.save()
            if signals.count:
                run.save(cut_short=True)
                raise run.interrupted()
        scores.wait()
        if scores.step is not None:  # a signal came
            raise run.interrupted()
        if run.rescored or (run.step < run.end and not run.alive.any()):
            run.save()
        run.write_results()
        if trains or run.rescored:
            log.hparams({**vars(config.algo), "dataset": dataset.spec.name, "steps": run.step})
        if trains:
            log.say(time_text(time.monotonic() - started, compiling, scores.seconds_waited))


def time_text(total: float, compiling: float, waited: float) -> str:
    """`trained in 1 min 57 s, of which compiling 1 min 50 s`, from seconds: what else than updates took longer than one
    is named.
    """
    parts = {"compiling": compiling, "waiting for evaluation": waited}
    shown = " and ".join(f"{what} {duration(seconds)}" for what, seconds in parts.items() if seconds > 1.0)
    return f"trained in {duration(total)}" + (f", of which {shown}" if shown else "")
