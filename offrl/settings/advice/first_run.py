"""The length of a first run on data of one's own, where nobody gave it. Published settings stay what they are."""

from __future__ import annotations

from offrl.errors import say
from offrl.settings.train import TrainConfig

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
        "have "
        f"{PUBLISHED:,}: the same command with steps={PUBLISHED} goes on from there"
    )
