"""`recipe=near-real`: data like those of NeoRL-2 (arXiv 2503.19267), of policies that earn 50 to 80% of what an expert
does.
"""

from __future__ import annotations

from dataclasses import replace

from offrl.collect.config import CollectConfig

CONTROLLERS = {  # of environments that have some
    "offrl/MadePipeline-v0": "offrl.envs.neorl2_made:PIPELINE",
    "offrl/MadeDMSD-v0": "offrl.envs.neorl2_made:MASSES",
}
SHARE = 0.65  # of the expert's return


def near_real(config: CollectConfig) -> CollectConfig:
    """The settings that record so: from the environment's controllers, or from D4RL's recipe the one set of a policy
    that was stopped at `SHARE` of the expert's return.
    """
    if (policy := CONTROLLERS.get(config.env.rpartition(":")[2])) is not None:
        return replace(config, recipe="", policy=policy)
    medium = SHARE if config.medium == CollectConfig().medium else config.medium
    return replace(config, recipe="d4rl", datasets=config.datasets or ["medium"], medium=medium)
