"""`offrl tune`: proposals, rungs, judgements and the choice, in plain order.

Every stage ends with one small file that is written in one step (`state/`), and begins by looking for it. What a stage
does is a function of the files before it, so that a tune that was killed anywhere comes to the same choice as one that
was not.
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from offrl.data.containers.guard import from_json
from offrl.errors import UserError, first_line
from offrl.system import files, trust
from offrl.system.progress import StageProgress
from offrl.tuning.config import OPTUNA
from offrl.tuning.judging import (
    Summary,
    judge,
    judged_rows,
    policies_of,
    rung_settings,
    summarise,
    write_trials,
)
from offrl.tuning.plan import GROUP, Tune
from offrl.tuning.search import states, store
from offrl.tuning.search.launch import train_all
from offrl.tuning.search.propose import propose
from offrl.tuning.search.rungs import Rung, cost, survivors
from offrl.tuning.search.training import RungRun, Values

Trials = dict[str, tuple[str, Values]]  # setting: (algorithm, values)


class TuningSearch:
    """A tune at work: what was found so far, stage by stage."""

    def __init__(self, work: Tune, show: StageProgress) -> None:
        self.work, self.config, self.show = work, work.config, show
        self.trials: Trials = {}  # all settings so far
        self.history: dict[str, list[tuple[Values, tuple[float, ...] | None]]] = {a: [] for a in work.spaces}
        self.finalists: list[str] = []  # settings that were trained in full
        self.finalist_runs: list[RungRun] = []  # the runs that hold them
        self.rows: list[dict[str, Any]] = []  # of trials.csv
        self.trained: list[list[Rung]] = []  # the rungs of each bracket, with as many settings as there were
        self.wild_cards: set[str] = set()  # settings that go on to the end, whatever they are worth

    # ---- stages

    def stage(
        self, name: str, make: Callable[[], dict[str, Any]], settings: Collection[str] | None = None
    ) -> dict[str, Any]:
        """What a stage found: from its file, or made now and written there. See `state`."""
        if (result := self.state(name, settings)) is not None:
            return result
        started = time.monotonic()
        result = json.loads(json.dumps(make()))
        files.write_text(self._path(name), json.dumps(result, indent=1) + "\n")
        self.time(name, time.monotonic() - started)
        return result

    def state(self, name: str, settings: Collection[str] | None = None) -> dict[str, Any] | None:
        """What the file of a stage holds; None where there is none yet. settings: those that it may name; None: all so
        far.

        Raises UserError for a file that does not hold what the stage makes.
        """
        path = self._path(name)
        if not path.exists():
            return None
        try:
            result = from_json(trust.read_text(path))
            reason = "it holds no entries"
            if isinstance(result, dict):
                reason = states.fault(
                    name, result, self.trials if settings is None else settings, self.config.data_judges
                )
        except (ValueError, RecursionError, OSError) as error:
            reason = first_line(error)
        if reason:
            raise UserError(f"{path} is damaged ({reason}); remove it, and the same command makes it again")
        return dict(result)

    def _path(self, name: str) -> Path:
        return self.work.folder / "state" / f"{name}.json"

    def time(self, stage: str, seconds: float) -> None:
        """Note how long a stage took, in a file that is no part of the result."""
        with files.open_to_append(self.work.folder / "timing.jsonl") as file:
            file.write((json.dumps({"stage": stage, "seconds": round(seconds, 3)}) + "\n").encode())

    def run(self) -> None:
        """Train and judge all brackets."""
        for number, size in enumerate(self.work.brackets):
            self._bracket(number, size)
        write_trials(self.work.folder, self.rows)

    def _bracket(self, number: int, size: int) -> None:
        config, work = self.config, self.work
        proposals = self.stage(f"bracket-{number}", lambda: self._propose(size))
        if wrong := states.unknown_proposal(proposals["settings"], work.spaces):
            raise UserError(f"{work.folder}/state/bracket-{number}.json: {wrong}; begin again with another out=")
        trials: Trials = {name: (algo, values) for name, (algo, values) in proposals["settings"].items()}
        self.trials |= trials
        if not trials:  # a space of listed values is used up
            return
        first: Summary | None = None
        runs: list[RungRun] = []
        rungs = work.rungs(len(trials))
        self.trained.append([])
        for i, rung in enumerate(rungs):
            self.trained[-1].append(Rung(len(trials), rung.updates))
            last = i == len(rungs) - 1
            runs = work.rung_runs(number, i, rung, trials, runs)
            self._train(number, i, rung, runs, len(trials))
            if last and (len(work.brackets) == 1 or len(rungs) > 1):
                break  # all finalists are judged together, at the end
            if not config.data_judges:
                break
            judging = functools.partial(self._judge, f"bracket {number + 1}, rung {i + 1}", runs, False)
            record = self.stage(f"judged-{number}-{i}", judging)
            summary = summarise(record, list(trials), work.seeds)
            first = first or summary
            names = list(trials)
            fates = dict.fromkeys(names, "finalist")
            if not last:
                promoted = self._promote(number, i, rungs[i + 1], trials, summary)
                fates = dict.fromkeys(names, "dropped") | promoted
                trials = {name: trials[name] for name in promoted}
            decisive = config.data_judges[0]
            self.rows += judged_rows(self.trials, summary, decisive, str(i + 1), rung.updates, fates, number + 1)
        self.finalists += list(trials)
        self.finalist_runs += runs
        if first is not None:
            self._record_results(proposals["settings"], first)

    def _propose(self, size: int) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for algo, space in self.work.spaces.items():
            before = len(self.history[algo])
            for index, values in enumerate(
                propose(space, self.config.proposer, size, self.history[algo], self.config.seed)
            ):
                settings[f"{algo}-{before + index:02d}"] = [algo, values]
        return {"settings": settings}

    def _train(self, number: int, i: int, rung: Rung, runs: list[RungRun], settings: int) -> None:
        title = (
            f"bracket {number + 1}, rung {i + 1}: {settings} settings x {self.config.seeds} seeds to {rung.updates:,} "
            "updates"
        )
        self.stage(f"trained-{number}-{i}", lambda: train_all(self.work, runs, title, self.show))

    def _judge(self, title: str, runs: list[RungRun], last: bool) -> dict[str, Any]:
        policies = policies_of(runs)
        if not policies:
            raise UserError(
                "every policy diverged: lower learning rates (algo.learning_rate=), or look at the data with offrl "
                "data inspect"
            )
        device = self.config.device if self.config.device != "auto" else "cpu"
        self.show.tell(f"{title}: judging {len(policies)} policies on {self.work.judged_on.num_episodes:,} episodes")
        settings = rung_settings(self.config.ope, last, len(policies))
        return judge(
            policies, self.work.judged_on, self.config.data_judges, settings, device, self.show.stage, self.show.tell,
            self.config.cost_limit is not None,
        )  # fmt: skip

    def judge_finalists(self) -> dict[str, Any]:
        """The judgement that chooses: of all settings that were trained in full, by one fit."""
        record = self.stage("judged", lambda: self._judge("finalists", self.finalist_runs, True))
        if not any(self.history.values()):  # one bracket of one rung: this is the first judgement
            self._record_results(self.trials, summarise(record, list(self.trials), self.work.seeds))
        return record

    def _promote(self, number: int, i: int, following: Rung, trials: Trials, summary: Summary) -> dict[str, str]:
        """{setting: reason} of the settings that go on."""
        names = list(trials)
        values = [
            float("nan") if reason else v
            for v, reason in zip(summary.standing(self.config.cost_limit).tolist(), summary.exploded, strict=True)
        ]
        multiple = GROUP // math.gcd(GROUP, self.config.seeds)  # programs of one size are compiled once
        wild = self.config.seed + 7 * number + i
        always = [k for k, name in enumerate(names) if name in self.wild_cards]
        chosen = survivors(values, following.settings, wild, [trials[n][0] for n in names], multiple, always)
        if not chosen:
            raise UserError(
                "every setting diverged in the first rung: lower learning rates, or look at the data with offrl data "
                "inspect"
            )
        going = {"settings": {names[k]: reason for k, reason in chosen.items()}}
        promoted: dict[str, str] = self.stage(f"kept-{number}-{i}", lambda: going, names)["settings"]
        self.wild_cards |= {name for name, reason in promoted.items() if reason == "wild card"}
        best = max((k for k in chosen), key=lambda k: values[k])
        self.show.tell(
            f"{len(promoted)} of {len(names)} settings go on; best so far {names[best]} ({summary.value[best]:.4g})"
        )
        return promoted

    def _record_results(self, proposals: Mapping[str, Any], summary: Summary) -> None:
        results = dict(zip(summary.names, summary.criteria(self.config.criteria).tolist(), strict=True))
        for name, (algo, values) in proposals.items():
            result = tuple(results[name])
            self.history[algo].append((values, None if any(x != x for x in result) else result))
        if self.config.proposer in OPTUNA:
            work, config = self.work, self.config
            store.record(config.storage, work.folder, work.spaces, self.history, work.identity, len(config.criteria))


def introduction(work: Tune) -> list[str]:
    """What is going to be done, and what it costs, before it begins."""
    config = work.config
    configs, steps = config.configs_and_steps()
    lines = [
        f"tune of {', '.join(config.algos)} on {work.judged_on.spec.name}: {configs} settings of each, {config.seeds} "
        f"seeds; {work.folder}"
    ]
    for algo, space in work.spaces.items():
        lines.append(f"  {algo}: " + ", ".join(f"{d.name} {d.text()}" for d in space.dimensions))
    updates = judged = 0
    for size in work.brackets:
        rungs = work.rungs(size * len(config.algos))
        updates += cost(rungs, config.seeds)
        judged += (len(rungs) - 1) * (config.ope.updates // 2)
        lines.append("  " + ", then ".join(f"{r.settings} settings to {r.updates:,} updates" for r in rungs))
    full = configs * len(config.algos) * steps * config.seeds
    lines.append(f"  {updates:,} updates of single policies in place of {full:,} ({updates / full:.0%})")
    if config.data_judges:
        lines.append(
            f"  judged by {', '.join(config.data_judges)}; fitted Q evaluation makes {judged + config.ope.updates:,} "
            f"updates of its own{', and as many for the costs' if config.cost_limit is not None else ''}"
        )
    if config.proposer in OPTUNA and len(work.brackets) == 1:
        lines.append(
            f"  proposer={config.proposer} is told nothing before the only bracket: it proposes at random (bracket= "
            "makes more)"
        )
    return lines
