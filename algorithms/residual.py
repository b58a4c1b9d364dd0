"""A residual on a frozen policy: "From Imitation to Refinement - Residual RL for Precise Assembly" (ResiP; Ankile et
al., 2024, arXiv 2407.16677), in small.

`offrl finetune RUN mode=residual env=ID` trains it on top of the policies of a run, from what it plays
(`offrl.finetuning.on_policy`)."""

from __future__ import annotations

from offrl.families.on_policy.residual import Residual
from offrl.registry import register

register("algo", "residual")(Residual)
