"""Settings of `offrl finetune`. Imports nothing heavy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from offrl.errors import UserError
from offrl.settings.evaluation import MOST_PROCESSES, EvalConfig
from offrl.settings.field import setting
from offrl.settings.train import CheckpointConfig

WARMUP = 1_000  # steps before the first update from fresh parameters, or before networks tell play from data
# of each replica, unless `envs` says otherwise
ENVIRONMENTS = {"transitions": 1, "residual": 16, "expansion": 1, "on_policy": 16, "distill": 1}
STARTS = ("start_steps", "start_limit", "start_share")  # settings of starts=data
BALANCE = ("replay_temperature", "replay_fresh")  # of replay=balanced
# what an algorithm's `finetune` block may say besides settings of its own
CONVENTIONS = ("mixing", "update_every", "noise", "warmup", "utd", "normalize", "envs")


@dataclass
class StudentConfig:
    """Settings of what students see."""

    observation_keys: list[str] = setting(
        [],
        "entries of a Dict observation, or of a row of numbers their positions from 0 and ranges of them (0:8), that a "
        "student sees; []: what its teacher sees",
    )
    history: int = setting(1, "observations: the last so many, oldest first, in place of the newest", low=1, high=1000)
    history_stride: int = setting(1, "steps from one of them to the next", low=1, high=1000)
    history_actions: int = setting(
        0, "the last so many actions, oldest first, beside the observation", low=0, high=1000
    )


@dataclass
class FinetuneConfig:
    """Settings of the replicas' play, of the data they learn from, and of the length. Steps are environment steps of
    each replica.
    """

    mode: str = setting(
        "transitions",
        "transitions: the replicas learn on, from single transitions of data and play; residual: a small policy "
        "learns, by PPO, what to add to the actions of the run's policies, which stay as they are; expansion: a new "
        "policy learns beside each of a run of iql, which stays as it is, and their values draw which acts (PEX); "
        "on_policy: the policies of a run of bc go on learning by PPO, from what they play alone; algo=ppo is it from "
        "fresh parameters; distill: students act, and imitate what the run's policies would do in the states that they "
        "come to (DAgger)",
        choices=tuple(ENVIRONMENTS),
    )
    env: str | None = setting(None, "a Gymnasium id; null: the environment that the run was scored in", shown="ID")
    steps: int = setting(100_000, "environment steps of each replica", low=1)
    envs: int | None = setting(
        None,
        "environments of each replica, stepped side by side; null: 1, or what the algorithm is used with (FastTD3: "
        "128, mode=residual and PPO: 16)",
        low=1,
        high=1024,
    )
    backend: str = setting(
        "sequential",
        "sequential: the environments are stepped one after the other, in the process that learns; processes: by a "
        "process for each core, which pays where a step takes long; threads: by a thread for each core, Gymnasium's "
        "plain MuJoCo robots alone; no number changes with these; warp: the same robots, all at once on the GPU "
        "by MuJoCo Warp, in float32, whose numbers are others",
        choices=("sequential", "processes", "threads", "warp"),
    )
    mixing: Any = setting(
        "auto",
        "share of each batch drawn from the data, the rest from what was played; 0: without the data; null: from the "
        "union of both, in proportion; auto: the algorithm's own, 0.5 for most (docs/finetune.md)",
    )
    replay: str = setting(
        "uniform",
        "uniform: batches of data and play as mixing= says; balanced: each row in proportion to a power of how much "
        "likelier it is in play than in the data, which a network learns along (Off2OnRL)",
        choices=("uniform", "balanced"),
    )
    replay_temperature: float = setting(
        5.0, "of replay=balanced: rows count with the ratio of densities to the power of 1/this", above=0.0
    )
    replay_fresh: float = setting(
        0.5,
        "of replay=balanced: share of each batch for the newest 1,000 rows of play; once there are more of play, by so "
        "much less",
        low=0.0,
        high=1.0,
    )
    utd: float | None = setting(
        None,
        "updates for each environment step; null: the algorithm's own, 1 for most (docs/finetune.md)",
        low=0.0,
    )
    warmup: int | None = setting(
        None,
        "environment steps before the first update; null: the algorithm's own (docs/finetune.md), or else 0, and 1,000 "
        "from fresh parameters and with replay=balanced",
        low=0,
    )
    update_every: Any = setting(
        "auto",
        "environment steps between updates, which then come utd times as many at once; episode: when each replica has "
        "ended one; auto: what the algorithm is used with (Cal-QL: episode, the others: 1)",
    )
    noise: Any = setting(
        "auto",
        "null: the policy's own exploration (a sample, or TD3's noise); a number: its greedy action and Gaussian noise "
        "of that standard deviation, in half widths of the action range (discrete: probability of a random action); "
        "auto: what the algorithm is used with",
    )
    normalize: str = setting(
        "auto",
        "data: observations by the data's statistics, where those were normalised; running: by the mean and deviation "
        "of all that a replica has seen so far, from fresh parameters without data; auto: what the algorithm is used "
        "with (FastTD3, SimbaV2, without data: running; the others: data)",
        choices=("auto", "data", "running"),
    )
    capacity: int | None = setting(None, "transitions of each replica that are kept; null: all", low=1)
    interventions: str | None = setting(
        None,
        "file.py:FUNCTION(observation, action): the action of a person or script in place of the policy's while it "
        "plays (not while it is scored), or None; such rows count as the data's where mixing is a share",
        shown="FILE:FUNCTION",
    )
    success: str | None = setting(
        None,
        "a file of `offrl data label kind=success`: the rewards of what is played are 1 where it sees success, which "
        "ends the episode, else 0; scores are the environment's",
        shown="FILE",
    )
    seed: int = setting(0, "decides the start states of the episodes, together with the replica's seed", low=0)
    max_steps: int | None = setting(
        None, "cut episodes, played and scored, after so many steps; null: the environment's own limit", low=1
    )
    starts: str = setting(
        "task",
        "task: episodes begin where the task's do; data: in recorded states of the data (columns infos/qpos and "
        "infos/qvel), during the first start_steps steps",
        choices=("task", "data"),
    )
    start_steps: int | None = setting(
        None, "environment steps of each replica during which episodes begin in states of the data; null: half", low=1
    )
    start_limit: int | None = setting(
        100, "cut episodes that begin in a state of the data after so many steps; null: as the others", low=2
    )
    start_share: float = setting(
        1.0, "share of the episodes of those steps that begin in states of the data", above=0.0, high=1.0
    )
    student: StudentConfig = field(default_factory=StudentConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log_every: int = setting(1_000, "environment steps between two lines of metrics", low=1)
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    compile: str = setting(
        "auto", "how updates run: auto picks by device and number", choices=("auto", "eager", "cudagraph", "compiled")
    )
    precision: str = setting("float32", "see offrl train", choices=("float32", "tf32", "bf16"))
    threads: int = setting(1, "torch threads on CPU", low=1, high=MOST_PROCESSES)
    runs_dir: str = setting("runs", "where run directories are made")
    name: str | None = setting(
        None, "the run directory's name; null: finetune, algorithm, environment and a hash of the settings"
    )
    resume: str | None = setting(
        None, "a fine-tuning run to continue; neither the run that it began from nor its settings are needed"
    )
    quiet: bool = setting(False, "print the final table only (also --quiet)")

    @property
    def reads_data(self) -> bool:
        """Whether the data are needed: for batches, or for states in which episodes begin."""
        return self.mixing != 0.0 or self.starts == "data"


# What may change when a fine-tuning run is continued: these alter neither an update nor an episode. `steps` alters both
# where a setting of the algorithm is annealed over them.
FREE = (
    "env",
    "steps",
    "backend",
    "eval",
    "checkpoint",
    "log_every",
    "device",
    "compile",
    "threads",
    "runs_dir",
    "name",
    "resume",
    "quiet",
)

# what a run's identity leaves out because older ones do not have it
LATER = {
    "normalize": "data",
    "starts": "task",
    "replay": "uniform",
    "interventions": None,
    "success": None,
    "physics": "MuJoCo",
}


def choose(
    config: FinetuneConfig, online: Mapping[str, Any], fresh: bool, without_data: bool = False
) -> FinetuneConfig:
    """`config` without what it leaves open: `online` is the algorithm's, `fresh` whether parameters are, without_data:
    whether no data are there at all. Raises UserError.
    """
    defaults = {"mixing": 0.5, "update_every": 1, "noise": None}
    chosen = {
        k: online.get(k, default) if getattr(config, k) == "auto" else getattr(config, k)
        for k, default in defaults.items()
    }
    if config.replay == "balanced":
        check_mixing(config.mixing, without_data)
        chosen["mixing"] = None
    mixing, update_every, noise = (chosen[k] for k in defaults)
    if mixing is not None and not (_number(mixing) and 0.0 <= mixing <= 1.0):
        raise UserError(f"mixing={mixing} must be auto, null, or a number from 0 (no data) to 1 (data only)")
    if update_every != "episode" and not (
        _number(update_every) and update_every == int(update_every) and update_every >= 1
    ):
        raise UserError(f"update_every={update_every} must be auto, episode, or a whole number of environment steps")
    if noise is not None and not (_number(noise) and noise >= 0.0):
        raise UserError(f"noise={noise} must be auto, null (the policy's own exploration) or a number from 0")
    envs = online.get("envs", ENVIRONMENTS[config.mode]) if config.envs is None else config.envs
    # an algorithm that is used with so many environments makes its updates after a step of all of them
    published = online.get("utd", 1.0) * online.get("envs", envs) / envs
    utd = float(published if config.utd is None else config.utd)
    if not utd > 0.0:
        raise UserError(f"utd={utd:g} must be above 0")
    chosen["normalize"] = "data"
    if without_data:
        chosen["normalize"] = online.get("normalize", "data") if config.normalize == "auto" else config.normalize
    elif config.normalize == "running":
        raise UserError(
            "normalize=running is for fresh parameters without data, offrl finetune algo=NAME env=ID mixing=0: where "
            "there are data or a run, its statistics stay as they are"
        )
    chosen["mixing"] = None if mixing is None else float(mixing)
    chosen["update_every"] = update_every if update_every == "episode" else int(update_every)
    chosen["noise"] = None if noise is None else float(noise)
    first = WARMUP if fresh or config.replay == "balanced" else 0
    warmup = online.get("warmup", first) if config.warmup is None else config.warmup
    if warmup >= config.steps:
        raise UserError(f"warmup={warmup} leaves no update in steps={config.steps}: more steps=, or a smaller warmup=")
    evaluation = (
        config.eval if config.max_steps is None else dataclasses.replace(config.eval, max_steps=config.max_steps)
    )
    if config.starts == "data" and config.start_steps is None:
        chosen["start_steps"] = -(-config.steps // 2)
    plain = FinetuneConfig()
    for owner, value, names in (("starts", "data", STARTS), ("replay", "balanced", BALANCE)):
        changed = [k for k in names if getattr(config, k) != getattr(plain, k)]
        if changed and getattr(config, owner) != value:
            raise UserError(f"{changed[0]}={getattr(config, changed[0])} is a setting of {owner}={value}")
    if config.mode != "distill" and config.student != StudentConfig():
        raise UserError("student.* are settings of mode=distill, in which students learn from the policies of a run")
    if config.student.history_stride > 1 and config.student.history == 1:
        raise UserError("student.history_stride is the distance of several observations: say student.history=n, too")
    return dataclasses.replace(config, **chosen, utd=utd, warmup=warmup, envs=envs, eval=evaluation)


def check_mixing(mixing: Any, without_data: bool) -> None:
    """Raise UserError where replay=balanced has nothing to balance, or does not decide alone. mixing: as it is set."""
    if without_data or mixing == 0:
        missing = "there are no data: dataset=NAME" if without_data else "mixing=0 leaves the data out"
        raise UserError(f"replay=balanced weighs what is played against data, and {missing}")
    if mixing not in ("auto", None):
        raise UserError(
            f"mixing={mixing}: replay=balanced decides itself how much of a batch is the data's: leave it out"
        )


def check_goals(config: FinetuneConfig, name: str) -> None:
    """Raise UserError for settings that goals in hindsight do not go with."""
    if config.capacity is not None and config.capacity < config.steps:
        raise UserError(
            f"capacity={config.capacity} would overwrite episodes from which {name} draws goals: leave it out"
        )


def check_play(config: FinetuneConfig, learners: str) -> None:
    """Raise UserError where batches would have rows of data, of which some networks cannot learn."""
    if config.mixing != 0.0:
        share = "null" if config.mixing is None else f"{config.mixing:g}"
        raise UserError(f"mixing={share}: {learners} learn from what is played alone: mixing=0")


def check_memory(config: FinetuneConfig, name: str) -> None:
    """Raise UserError for settings that replace actions which a policy remembers as its own."""
    if changed := "interventions" if config.interventions else "noise" if config.noise else None:
        raise UserError(
            f"{changed}={getattr(config, changed)}: a policy of {name} remembers the actions that it chose, and would "
            "take others for them: leave it out"
        )


def check_length(config: FinetuneConfig, length: int, name: str) -> None:
    """Raise UserError where no environment ever keeps `length` states in a row."""
    states = min(config.capacity or config.steps, config.steps) // (config.envs or 1)
    if states < length:
        raise UserError(
            f"{name} learns from {length} states in a row, and each of {config.envs} environments keeps {states}: more "
            "steps= (or capacity=), fewer envs=, or a shorter algo.length="
        )


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == value
