"""The dynamics of the environment, learnt from data: probabilistic ensembles (PETS, arXiv 1805.12114; MBPO, arXiv
1906.08253).

`offrl train algo=dynamics dataset=...` leaves a model, which any model-based algorithm takes as
world_model=RUN, and a report on how good it is.
"""

from __future__ import annotations

from offrl.registry import register
from offrl.world_models.dynamics import Dynamics

register("algo", "dynamics")(Dynamics)
