"""What updates that draw many candidates cost, so that nobody begins weeks of them on a CPU unawares."""

from __future__ import annotations

from itertools import pairwise

from offrl.errors import UserError
from offrl.settings.evaluation import cores
from offrl.settings.field import shown_value
from offrl.settings.replicas import replicas
from offrl.settings.train import TrainConfig
from offrl.system.devices import pick_device

# floating-point operations in a second of one core, measured: 32 chunks at 256 rows by 10 steps of 4 x 512 take 1.2 s
SPEED = 1.2e11
LONGEST = 2.0  # hours that a run may take on a CPU without being asked for by name


def hours(config: TrainConfig, candidates: int, observation_dim: int, dim: int) -> float:
    """Hours that the candidates of a run's targets take on this machine's cores: `flow_steps` passes of a field over
    `dim` numbers.
    """
    algo = config.algo
    widths = [observation_dim + dim + 1, *algo.hidden, dim]
    operations = 2.0 * candidates * algo.batch_size * algo.flow_steps * sum(a * b for a, b in pairwise(widths))
    count = len(replicas(config))
    return operations * config.steps * count / (SPEED * min(cores(), count * config.threads) * 3600.0)


def check_cost(config: TrainConfig, candidates: int, observation_dim: int, dim: int, cure: str) -> None:
    """Raise UserError for a run of more than LONGEST hours on a CPU that was not asked for. cure: a setting that draws
    no candidates.
    """
    if config.device != "auto" or pick_device("auto").type != "cpu":
        return
    algo, time = config.algo, hours(config, candidates, observation_dim, dim)
    if time > LONGEST:
        duration = f"{time / 24.0:,.0f} days" if time > 48.0 else f"{time:.0f} hours"
        raise UserError(
            f"algo.candidates={candidates} with algo.hidden={shown_value(algo.hidden)} is for a GPU: {config.steps:,} "
            f"updates take about {duration} on this CPU; take {cure}, smaller algo.candidates or algo.hidden, or fewer "
            "steps= (device=cpu begins nevertheless)"
        )
