"""Settings that train, and can hardly be meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from offrl.errors import say
from offrl.settings.train import TrainConfig, seed_list

MANY_SEEDS = 64


def sanity_checks(config: TrainConfig, rows: int) -> Iterator[str]:
    """One line for each setting of a run on `rows` transitions that can hardly be meant. Rates of learning:
    `warn_of_rates`.
    """
    algo: Any = config.algo
    values = {name: getattr(algo, name, None) for name in ("batch_size", "discount", "polyak", "real_share")}
    grid = {name: config.grid.get(name) or [value] for name, value in values.items() if isinstance(value, (int, float))}
    if (values["batch_size"] or 0) > rows:
        yield (
            f"algo.batch_size={values['batch_size']:,} is more than the {rows:,} rows of the data: rows repeat in "
            "every batch"
        )
    if 0.0 in grid.get("discount", ()):
        yield "algo.discount=0: only the reward of the step itself counts, and values look no further; 0.99 is usual"
    if any(0.0 < v < 0.5 for v in grid.get("discount", ())):
        low = min(v for v in grid["discount"] if v > 0.0)
        yield (
            f"algo.discount={low:g} looks {1.0 / (1.0 - low):.1f} steps ahead; 0.99 is usual, and 1 - discount is "
            "another quantity"
        )
    if 0.0 in grid.get("polyak", ()):
        yield "algo.polyak=0: target networks never move, so values stay those of the first parameters; 0.005 is usual"
    if any(0.5 <= v < 1.0 for v in grid.get("polyak", ())):
        high = max(v for v in grid["polyak"] if v < 1.0)
        yield f"algo.polyak={high:g} of the online parameters enters the targets in every update; 0.005 is usual"
    updates = getattr(algo, "model_updates", 0)
    if getattr(algo, "policy_after_model", False) and updates >= config.steps:
        yield (
            f"steps={config.steps:,} are all the model's (algo.model_updates={updates:,}), and actor and critic learn "
            "after them: more steps=, or a smaller algo.model_updates="
        )
    if config.eval.every and config.eval.every > config.steps:
        yield (
            f"eval.every={config.eval.every:,} is more than steps={config.steps:,}: policies are scored at the end only"
        )
    if config.checkpoint.every and config.checkpoint.every > config.steps:
        yield (
            f"checkpoint.every={config.checkpoint.every:,} is more than steps={config.steps:,}: one checkpoint is "
            "written, at the end"
        )
    if "log_every" in config.given and config.log_every > config.steps:
        yield f"log_every={config.log_every:,} is more than steps={config.steps:,}: there is one line of metrics"
    if len(seeds := seed_list(config.seeds)) > MANY_SEEDS:
        yield f"{len(seeds):,} seeds are that many policies to train; seed {len(seeds)} alone is seeds={len(seeds)},"


PUBLISHED = 1_000_000  # updates, the default of papers on a million rows
CPU = 50_000  # some minutes
LEAST = 10_000


def choose_steps(config: TrainConfig, rows: int, on_cpu: bool) -> None:
    """Set `config.steps` where neither a person nor a file of settings says how long the run is, and say so."""
    if not is_open(config):
        return
    config.steps = steps_for(rows, on_cpu)
    if not config.quiet and config.steps != PUBLISHED:
        say(words(config.steps, rows, on_cpu))


def steps_for(rows: int, on_cpu: bool) -> int:
    """Updates of a first run: about one for each row, as papers' runs have, within what a CPU does in minutes. Two
    digits.
    """
    steps = max(LEAST, min(rows, CPU if on_cpu else PUBLISHED))
    unit = 10 ** (len(str(steps)) - 2)
    return -(-steps // unit) * unit


def is_open(config: TrainConfig) -> bool:
    """Whether neither a person nor a file of settings says how long the run is."""
    return (
        "steps" not in config.given and config.experiment == "none" and config.steps == PUBLISHED and not config.resume
    )


def words(steps: int, rows: int, on_cpu: bool) -> str:
    """The line that says what was chosen."""
    return (
        f"steps={steps:,} is a first run's length, for {rows:,} rows{' on a CPU' if on_cpu else ''}; published runs "
        f"have {PUBLISHED:,}: the same command with steps={PUBLISHED} goes on from there"
    )
