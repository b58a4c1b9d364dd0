"""Meta-DT's network: a transformer over the steps of a prompt and then of a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from offrl.data.samplers.histories import PROMPT
from offrl.data.samplers.sequences import STEPS, VALID
from offrl.families.sequence import OUTER, Steps
from offrl.nn.transformer import Affine, Table, drop, interleave, visible


class PromptedSteps(Steps):
    """`Steps` after the steps of a prompt, whose tokens have embeddings of their own."""

    def __init__(self, sizes: Mapping[str, int], prompt: Mapping[str, int], config: Any) -> None:
        super().__init__(sizes, config)
        self.prompt_embed = nn.ModuleDict({kind: Affine(size, config.width) for kind, size in prompt.items()})
        self.prompt_time = Table(config.max_timestep or 1, config.width)

    def forward(
        self,
        tokens: Mapping[str, Tensor],
        timesteps: Tensor,
        valid: Tensor | None,
        key: Tensor | None,
        output_kind: str | None = None,
    ) -> dict[str, Tensor]:
        """The outputs of `Steps`; tokens has the prompt's too, by prompt_KIND [B, L, size], with prompt_timesteps,
        prompt_valid [B, L].
        """
        count, time = len(self.kinds), self.time(timesteps)
        x = self.norm(interleave([self.embed[kind](tokens[kind]) + time for kind in self.kinds]))
        prompt_valid, time = tokens[PROMPT + VALID], self.prompt_time(tokens[PROMPT + STEPS])
        prompt = interleave([self.prompt_embed[kind](tokens[PROMPT + kind]) + time for kind in self.kinds])
        x = torch.cat([prompt, x], -2)
        if key is not None:
            x = drop(x, self.rate, key, OUTER)
        all_valid = torch.cat(
            [prompt_valid, torch.ones_like(timesteps, dtype=torch.bool) if valid is None else valid], -1
        )
        return self.outputs(
            x, visible(all_valid.repeat_interleave(count, -1), x.shape[-2]), key, prompt.shape[-2], output_kind
        )
