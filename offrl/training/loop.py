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
from offrl.training.run.callbacks import OnEvaluation
from offrl.training.run.session import Session
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
        clock = run.clock
        trains, started = clock.running, time.monotonic()
        resources.enter_context(log)
        resources.enter_context(signals.handled(log.say))
        compiled, compiling = setup.plan.mode.startswith("compiled"), 0.0
        if trains and compiled:
            took = "minutes" if setup.plan.algorithm.traits.unrolled else "10 to 30 seconds"
            log.say(f"compiling the step, {took}; at once where it was compiled before")
        while clock.running and run.alive.any():
            stop = clock.next_stop()
            slices.begin(clock.step)
            while clock.step < stop and not signals.count:
                end = slices.next(clock.step, stop)
                if run.process_group.size > 1:
                    end, signals.count = distributed.agree(end, signals.count, run.device)
                    if signals.count:
                        break
                engine.run(clock.step, end - clock.step)
                clock.step = end
                first_seconds = slices.done(end)
                if first_seconds is not None:
                    log.timing(end, first_updates=first_seconds)
                    compiling = first_seconds if compiled else 0.0
                    continue
                scores.poll()
                if end < clock.end:
                    log.progress(end, slices.recent, run.text)
            if clock.step == stop:
                run.write_metrics()
                if clock.running and run.finished():
                    clock.end = clock.step
                    log.say(f"stopping at step {clock.end:,}: nothing gets better any more")
                log.timing(clock.step, updates_per_second=slices.rate)
                run.stop_if_callback_asked()
                if clock.due(clock.eval_every):
                    scores.begin(clock.step, run.policies)
                    run.consult_stopping_rule()
                    run.stop_if_callback_asked()
                    slices.pause()
                if clock.step == clock.end:
                    scores.wait()
                if clock.due(clock.save_every):
                    run.save()
            if signals.count:
                run.save(cut_short=True)
                raise run.interrupted()
        scores.wait()
        if scores.step is not None:  # a signal came
            raise run.interrupted()
        if run.rescored or (clock.running and not run.alive.any()):
            run.save()
        run.write_results()
        if trains or run.rescored:
            log.hparams({**vars(config.algo), "dataset": dataset.spec.name, "steps": clock.step})
        if trains:
            log.say(time_text(time.monotonic() - started, compiling, scores.seconds_waited))


def time_text(total: float, compiling: float, waited: float) -> str:
    """`trained in 1 min 57 s, of which compiling 1 min 50 s`, from seconds: what else than updates took longer than one
    is named.
    """
    parts = {"compiling": compiling, "waiting for evaluation": waited}
    shown = " and ".join(f"{part} {duration(seconds)}" for part, seconds in parts.items() if seconds > 1.0)
    return f"trained in {duration(total)}" + (f", of which {shown}" if shown else "")
