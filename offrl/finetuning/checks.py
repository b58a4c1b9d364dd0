"""What an algorithm cannot learn from in an environment, whatever it began from."""

from __future__ import annotations

from offrl.data.samplers.decisions import DecisionSampler
from offrl.data.samplers.states import StateSampler
from offrl.errors import UserError
from offrl.finetuning.config import check_goals, check_length, check_memory, check_play
from offrl.finetuning.replay.balanced import check_balanced
from offrl.finetuning.replay.sources import is_chain
from offrl.finetuning.start import Start
from offrl.finetuning.transitions import columns_for


def check(start: Start) -> None:
    """Raise UserError for settings that do not fit the algorithm, and for what is not played."""
    config, algorithm = start.config, start.algorithm
    name, sampler, traits = algorithm.config.name, algorithm.sampler(), algorithm.traits
    if traits.on_policy:
        return
    columns_for(start.spec, sampler, name)
    if is_chain(sampler):
        check_length(config, sampler.length, name)
    if algorithm.actor_class.remembers_actions:
        check_memory(config, name)
    if traits.goal_conditioned:
        check_goals(config, name)
    if config.replay == "balanced":
        check_balanced(algorithm, start.spec)
    model = traits.learns_model
    if isinstance(sampler, DecisionSampler):
        check_play(config, f"both levels of {name}")
    if model and isinstance(sampler, StateSampler):
        check_play(config, f"the encoders of {name}")
    if model and not start.dataset and (config.warmup or 0) < algorithm.config.batch_size:
        raise UserError(
            f"warmup={config.warmup}: {name} learns a model of the environment before its first update, which so few "
            f"steps do not teach: warmup={algorithm.config.batch_size} or more"
        )
    if config.normalize == "running" and (model or traits.goal_conditioned):
        learner = "learns a model of" if model else "draws goals from"
        raise UserError(
            f"normalize=running: {name} {learner} observations as they were played, whose statistics must stay: leave "
            "it out"
        )
