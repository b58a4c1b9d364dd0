"""Steps of policies that decide once in several steps, with the decision that each belongs to: what is played, for the
data do not say what was decided."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from offrl.data.dataset import Dataset
from offrl.data.samplers.tables import Batch
from offrl.errors import UserError

# Columns beside those of a transition and, of all rewards of the decision, step_rewards [B, H] and span [B]
SKILLS = "skills"  # [B, Z]: what was decided
POSITION = "position"  # [B] int64: of the step within the decision, from 0
DECISION = "decision_"  # before observations, next_observations and masks: of the decision as one transition


@dataclass(frozen=True)
class DecisionSampler:
    """Batches of single steps, each with its decision: a vector of `width` numbers that holds for `length` steps, or
    fewer where the episode ends. A decision is drawn as often as its steps are.
    """

    length: int
    width: int

    def prepare(self, dataset: Dataset) -> None:
        """Nothing, for no data have such rows."""

    def __call__(self, source: None, key: Tensor, batch_size: int) -> Batch:
        raise UserError("data do not say which skills were chosen: their batches are of what is played, mixing=0")
