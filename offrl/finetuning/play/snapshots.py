"""Episodes that begin in states of the data (SnapshotRL, arXiv 2403.00673, whose snapshots are of a teacher's episodes
and drawn by groups of value).
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from offrl.data.memory import IN_MEMORY
from offrl.data.tools.convert import read_whole
from offrl.errors import UserError
from offrl.finetuning.config import FinetuneConfig
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.states import set_state, states_of

TASK = -1  # in place of a row: the episode begins where the task begins
LOOKED = 64  # rows whose observations are compared with the environment's
TOLERANCE = 1e-5  # relative
CURE = "in which episodes could begin: starts=data needs what offrl collect or D4RL recorded; leave starts= out"


@dataclass(frozen=True)
class Snapshots:
    """The recorded states of R rows, and which episodes begin in them. Raises UserError, as its methods do."""

    where: str  # the data
    observations: np.ndarray  # [R, *O] as recorded
    states: list[np.ndarray]  # [R, ...] each, the arguments of `set_state`
    seed: int
    steps: int  # environment steps of each replica during which episodes begin in states of the data
    share: float  # of those episodes
    limit: int  # steps of an episode that begins in one

    def draw(self, replica_seed: int, env: int, episode: int, t: int) -> int:
        """The row in which an episode begins that follows environment step t of its replica, or TASK: a function of
        the seeds and the numbers alone.
        """
        text = f"offrl finetune snapshot {self.seed} {replica_seed} {env} {episode}".encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        share, row = (int.from_bytes(part, "little") for part in (digest[:8], digest[8:]))
        return row % len(self.observations) if t < self.steps and share < self.share * 2**64 else TASK

    def entry(self, row: int, name: str) -> Callable[[Any], Any]:
        """What puts an environment, which was reset, into the state of a row, and gives its observation there: other
        processes can be given it.
        """
        return functools.partial(_enter, [part[row] for part in self.states], name, f"{self.where}, row {row}")

    def check(self, env: Any, read: Callable[[Any], Any], name: str) -> None:
        """Compare what the environment observes in some of the states with the data."""
        if not all(hasattr(env.unwrapped, method) for method in ("set_state", "_get_obs")):
            raise UserError(
                f"{name} has no set_state(qpos, qvel) and _get_obs() as Gymnasium's MuJoCo environments have, so that "
                "none of its episodes can begin in states of the data: leave starts= out"
            )
        env.reset(seed=self.seed)
        for row in np.unique(np.linspace(0, len(self.observations) - 1, LOOKED).astype(int)).tolist():
            observed, recorded = np.asarray(read(self.entry(row, name)(env))), self.observations[row]
            if observed.shape != recorded.shape or not np.allclose(observed, recorded, TOLERANCE, TOLERANCE):
                raise UserError(
                    f"the states of {self.where} are not those of {name}: it observes other numbers in that of row "
                    f"{row} than the data hold; name the environment that they are of, env=ID, or leave starts= out"
                )


def _enter(state: list[np.ndarray], name: str, where: str, env: Any) -> Any:
    set_state(env, state, name, where)
    return env.unwrapped._get_obs()


def load(config: FinetuneConfig, settings: DatasetConfig, source: str) -> Snapshots:
    """The states of all rows of the files that `settings` names. source: of the data (`DataSpec.source`)."""
    if source == "arrays":
        raise UserError("starts=data reads recorded states from files, and these data are arrays from Python")
    parts = [read_whole(part, IN_MEMORY) for part in settings.as_recorded()]
    states = [states_of(raw.columns, raw.where, CURE) for raw in parts]
    return Snapshots(
        " + ".join(raw.where for raw in parts),
        np.concatenate([raw.columns["observations"] for raw in parts]),
        [np.concatenate(columns) for columns in zip(*states, strict=True)],
        config.seed,
        config.start_steps or 0,
        config.start_share,
        config.start_limit or config.steps,
    )
