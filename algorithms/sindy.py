"""SINDy: sparse equations of the environment's dynamics, to read and to roll out (arXiv 1509.03580; SINDy-RL, arXiv
2403.09110).

`offrl train algo=sindy dataset=...` prints the equations and leaves a model, which any model-based algorithm takes as
world_model=RUN."""

from __future__ import annotations

from offrl.registry import register
from offrl.world_models.sindy.model import Sindy

register("algo", "sindy")(Sindy)
