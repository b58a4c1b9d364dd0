"""Settings of `offrl tune`. Imports no torch, so that help and mistakes in a command are quick."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from offrl.errors import UserError, nearest
from offrl.ope.config import METHOD_NAMES, OPEConfig, validate
from offrl.settings.evaluation import MOST_PROCESSES
from offrl.settings.field import check, setting

PROPOSERS = ("tpe", "random", "sobol", "grid", "cmaes", "nsga2")
OPTUNA = ("tpe", "cmaes", "nsga2")
SPACES = ("wide", "published", "none")
RULES = ("one-se", "best")
CRITERIA = ("return", "worst", "distance", "cost")
LAUNCHERS = ("none", "local", "ray")
PLAY = "episodes"
FEW_EPISODES = 20  # of judging: with fewer, the split itself decides
MOST_GROUPS = 6  # programs of one algorithm in one rung


@dataclass
class TuneConfig:
    """What is searched, how long, and by what it is judged."""

    algos: list[str] = setting(["iql"], "algorithms, each with a search space of its own")
    budget: str = setting("32x40000", "settings of each algorithm x updates of a full training")
    space: str = setting(
        "wide",
        "wide: the hull of the published values, and twice as far on both sides; published: those values; none: only "
        "space.NAME=",
        choices=SPACES,
    )
    proposer: str = setting(
        "tpe", "who proposes settings; tpe, cmaes and nsga2 are Optuna's samplers", choices=PROPOSERS
    )
    bracket: int = setting(
        16, "settings of an algorithm that are asked for at once; the next ones are told how those did", low=1
    )
    rungs: int = setting(
        2,
        "successive halving: how often the settings are thinned out, and the end; 1: all are trained in full",
        low=1,
        high=6,
    )
    eta: int = setting(4, "the share that goes on from a rung is 1/eta, for eta times the updates", low=2)
    seeds: int = setting(2, "seeds of each setting while it is searched", low=1)
    judge: list[str] = setting(
        ["fqe"],
        f"{', '.join(METHOD_NAMES)}; the first one decides, others are shown beside it; episodes: play (needs "
        "episodes=n)",
    )
    episodes: int = setting(
        0, "real episodes, in all, for the last choice among the best by the data; 0: by the data alone", low=0
    )
    finalists: int = setting(
        8, "how many settings are played then; fewer where there are fewer than two episodes for each", low=2
    )
    confidence: float = setting(
        1.0,
        "stop playing where one is within 1% of the best with this probability; 1: play all episodes",
        low=0.5,
        high=1.0,
    )
    rule: str = setting(
        "one-se",
        "one-se: the most conservative setting within a standard error of the best; best: the best",
        choices=RULES,
    )
    criteria: list[str] = setting(
        ["return"],
        "several make a Pareto front: return, worst (of the seeds), distance (from the data's actions), cost (of an "
        "episode; needs cost_limit=)",
    )
    cost_limit: float | None = setting(
        None, "criteria=[return,cost]: the choice has the best return of those whose episodes cost no more", low=0.0
    )
    veto: float = setting(
        3.0,
        "settings whose actions lie further from the data than so many times a linear clone's are not chosen; 0: none",
        low=0.0,
    )
    split: float = setting(
        0.5, "share of the episodes that trains; the rest judges; 1: all do both, which is optimistic", high=1.0
    )
    ope: OPEConfig = field(default_factory=OPEConfig)
    retrain: bool = setting(True, "train the winner, and the default settings, anew on all episodes with new seeds")
    final_seeds: int = setting(4, "seeds of that", low=1)
    eval_episodes: int = setting(10, "episodes of each of these seeds for the score that is reported", low=1)
    truth: int = setting(
        0, "play every finalist so many episodes after the choice, to see what it cost; 0: do not", low=0
    )
    env: str = setting("auto", "environment of episodes=, truth= and of the reported score; none: there is none")
    seed: int = setting(0, "decides proposals, the split and seeds", low=0)
    out: str = setting("tune", "the folder of the tune; the same command continues it", place=True)
    storage: str | None = setting(
        None, "Optuna's store: null: journal.log in that folder; or sqlite:///FILE, or a journal's file", place=True
    )
    launcher: str = setting(
        "none",
        "where the runs of a rung train: none: here, one after the other; local: in processes; ray",
        choices=LAUNCHERS,
        place=True,
    )
    jobs: int | None = setting(
        None, "launcher: runs at once; null: one for each core", low=1, high=MOST_PROCESSES, place=True
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N", place=True)
    threads: int = setting(1, "torch threads on CPU", low=1, high=MOST_PROCESSES, place=True)
    quiet: bool = setting(False, "print the result only (also --quiet)", place=True)

    def configs_and_steps(self) -> tuple[int, int]:
        """(settings of each algorithm, updates of a full training). Raises UserError where `budget` is no such pair."""
        text = re.fullmatch(r"([0-9_]+)\s*[xX*]\s*([0-9_]+(?:\.\d+)?(?:[eE][0-9]+)?)", str(self.budget))
        if text is None:
            raise UserError(f"budget={self.budget} must be SETTINGSxUPDATES, such as budget=32x40000")
        configs, steps = int(text[1]), int(float(text[2].replace("_", "")))
        if configs < 1 or steps < 1:
            raise UserError(f"budget={self.budget}: at least one setting and one update are needed")
        return configs, steps

    @property
    def data_judges(self) -> list[str]:
        """The judges that look at data."""
        return [j for j in self.judge if j != PLAY]

    def validate(self) -> None:
        """Raises UserError for settings out of range, or that contradict each other."""
        check(self)
        validate(self.ope)
        configs, steps = self.configs_and_steps()
        if not self.algos:
            raise UserError("algos=[] names no algorithm; write algos=[iql,td3_bc]")
        if twice := next((a for a in self.algos if self.algos.count(a) > 1), None):
            raise UserError(f"algos= names {twice} twice")
        known = (*METHOD_NAMES, PLAY)
        for name in self.judge:
            if name not in known:
                raise UserError(f"unknown judge '{name}'.{nearest(name, known)} Judges: {', '.join(known)}")
        if not self.judge:
            raise UserError("judge=[] leaves nothing that chooses; write judge=fqe")
        for name in self.criteria:
            if name not in CRITERIA:
                raise UserError(f"unknown criterion '{name}'.{nearest(name, CRITERIA)} Criteria: {', '.join(CRITERIA)}")
        if not self.criteria or self.criteria[0] != "return" or len(set(self.criteria)) != len(self.criteria):
            raise UserError("criteria= begins with return, each criterion once, such as criteria=[return,worst]")
        if "cost" in self.criteria and self.cost_limit is None:
            raise UserError(
                "criteria=cost needs the limit of an episode's cost that the choice is to keep, such as cost_limit=20"
            )
        if "cost" not in self.criteria and self.cost_limit is not None:
            raise UserError("cost_limit= is what the choice keeps with criteria=[return,cost]: add that, or leave it")
        if self.cost_limit is not None and self.confidence < 1.0:
            raise UserError("confidence= looks at returns alone; leave it out with criteria=cost")
        if not self.split > 0.0:
            raise UserError(
                f"split={self.split} must be above 0 (and at most 1): the share of the episodes that trains"
            )
        if PLAY in self.judge and not self.episodes:
            raise UserError("judge=episodes needs the number of real episodes that may be played: episodes=50")
        if self.episodes and self.env == "none":
            raise UserError("episodes= needs an environment: env=ID, or leave env=none out")
        if not self.data_judges and self.rungs > 1:
            raise UserError(
                "judge=episodes alone judges once, at the end: write rungs=1, or judge=[fqe,episodes] to thin out by "
                "the data"
            )
        if "model" in self.judge and not self.ope.world_model:
            raise UserError(
                "judge=model needs a learned model: ope.world_model=RUN, a run of algo=dynamics on the same data"
            )
        if self.proposer == "nsga2" and len(self.criteria) < 2:
            raise UserError(
                "proposer=nsga2 is for several criteria, such as criteria=[return,distance]; with one take proposer=tpe"
            )
        if self.proposer == "cmaes" and len(self.criteria) > 1:
            raise UserError("proposer=cmaes knows one criterion; with several take proposer=nsga2 or tpe")
        if configs < self.eta ** (self.rungs - 1) and configs > 1:
            raise UserError(
                f"budget={self.budget}: {configs} settings cannot be thinned out {self.rungs - 1} time(s) to "
                f"1/{self.eta}; take {self.eta ** (self.rungs - 1)} settings or more, or rungs=1"
            )
        if steps < self.eta ** (self.rungs - 1):
            raise UserError(
                f"budget={self.budget}: {steps} updates are fewer than one for the first of {self.rungs} rungs; take "
                "more, or rungs=1"
            )
