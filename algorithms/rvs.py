"""RvS: "RvS: What is Essential for Offline RL via Supervised Learning?" (Emmons et al., 2021, arXiv 2112.10751), conditioned on returns
(RvS-R). With `condition=to_go` it is the plain return-conditioned supervised learning that MBRCSL (arXiv 2310.19308) calls RCSL."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.families.return_conditioned import OutcomeConditioned, OutcomeSettings
from offrl.registry import register
from offrl.settings.field import setting


@dataclass
class RvSConfig(OutcomeSettings):
    """Settings of RvS; the defaults are the authors' for D4RL's locomotion tasks, but for smaller batches (theirs: 16,384)."""

    name: str = "rvs"
    condition: str = setting(
        "average",
        "average: the return to go divided by the steps that are left until `longest`, and when acting a constant; to_go: the return that "
        "is left, less with every reward (RCSL)",
        choices=("average", "to_go"),
    )


@register("algo", "rvs")
class RvS(OutcomeConditioned):
    """Behaviour cloning whose network sees the average reward of what came after."""

    Config = RvSConfig
