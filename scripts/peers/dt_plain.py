"""The Decision Transformer as a plain PyTorch loop, as single-file code has it: nn.MultiheadAttention, windows cut and
padded in NumPy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from peers import common, plain
from peers.common import ACTION, EPISODE, OBSERVATION, RETURN_SCALE, Arrays
from peers.flops import BATCHES, DT_CONTEXT, DT_HIDDEN
from torch import nn
from torch.nn import functional as F

WIDTH, HEADS, TOKENS = DT_HIDDEN[0], 1, 3 * DT_CONTEXT
# what offrl calls the parts of the model, and those of a block
PARTS = {
    "embed_return.": "steps.embed.return.",
    "embed_state.": "steps.embed.observation.",
    "embed_action.": "steps.embed.action.",
    "embed_time.": "steps.time.",
    "norm.": "steps.norm.",
    "blocks.": "steps.trunk.blocks.",
    "last_norm.": "steps.trunk.norm.",
    "head.0.": "head.net.head.",
}
OF_BLOCK = {"attention.in_proj_": "qkv.", "attention.out_proj.": "out.", "mlp.0.": "up.", "mlp.2.": "down."}


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.drop = nn.Dropout(dropout)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, dropout, batch_first=True)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )
        self.causal: torch.Tensor  # True where a token may not look
        self.register_buffer("causal", ~torch.tril(torch.ones(TOKENS, TOKENS)).bool(), persistent=False)

    def forward(self, x: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        seen, _ = self.attention(h, h, h, attn_mask=self.causal, key_padding_mask=padding, need_weights=False)
        x = x + self.drop(seen)
        return x + self.mlp(self.norm2(x))


class DecisionTransformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.embed_return, self.embed_state = nn.Linear(1, WIDTH), nn.Linear(OBSERVATION, WIDTH)
        self.embed_action, self.embed_time = nn.Linear(ACTION, WIDTH), nn.Embedding(EPISODE, WIDTH)
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in DT_HIDDEN)
        self.last_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Sequential(nn.Linear(WIDTH, ACTION), nn.Tanh())
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, 0.0, 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Actions [B, K, A] from what became of the states' tokens."""
        time = self.embed_time(batch["timesteps"])
        tokens = (
            self.embed_return((batch["returns_to_go"] / RETURN_SCALE).unsqueeze(-1)) + time,
            self.embed_state(batch["observations"]) + time,
            self.embed_action(batch["actions"]) + time,
        )
        x = torch.stack(tokens, 1).permute(0, 2, 1, 3).reshape(len(time), TOKENS, WIDTH)
        valid = batch["valid"]
        padding = ~torch.stack([valid, valid, valid], 1).permute(0, 2, 1).reshape(len(time), TOKENS)
        x = self.drop(self.norm(x))
        for block in self.blocks:
            x = block(x, padding)
        return self.head(self.last_norm(x)[:, 1::3])


class DT:
    def __init__(self, dropout: float = 0.1, warmup: int = 10_000) -> None:
        self.model = DecisionTransformer(dropout)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, betas=(0.9, 0.999), weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: min((done + 1) / warmup, 1.0))

    def load(self, weights: Arrays) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                other = next(new + name.removeprefix(old) for old, new in PARTS.items() if name.startswith(old))
                for old, new in OF_BLOCK.items():
                    other = other.replace(old, new)
                parameter.copy_(torch.from_numpy(weights[f"actor/{other}"]))

    def update(self, batch: dict[str, torch.Tensor]) -> dict[str, float]:
        predicted, valid = self.model(batch), batch["valid"]
        loss = F.mse_loss(predicted[valid], batch["actions"][valid])
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.optimizer.step()
        self.scheduler.step()
        return {"actor/loss": loss.item()}


class Windows:
    """The dataset as a list of episodes, of which windows are cut one by one."""

    def __init__(self, rows: int) -> None:
        columns, (starts, ends) = common.transitions(rows), common.episodes(rows)
        self.episodes = []
        for start, end in zip(starts, ends, strict=True):
            episode = {name: columns[name][start:end] for name in ("observations", "actions", "rewards")}
            episode["returns_to_go"] = np.cumsum(episode["rewards"][::-1])[::-1]
            self.episodes.append(episode)
        self.chance = (ends - starts) / (ends - starts).sum()

    def window(self, episode: Arrays) -> tuple[np.ndarray, ...]:
        """States, actions, returns and time steps from a random step on, and which of them are no padding."""
        start = np.random.randint(len(episode["rewards"]))
        parts = [episode[name][start : start + DT_CONTEXT] for name in ("observations", "actions", "returns_to_go")]
        count = len(parts[0])
        parts.append(np.arange(start, start + count))
        valid = np.arange(DT_CONTEXT) < count
        if count < DT_CONTEXT:
            parts = [
                np.concatenate([part, np.zeros((DT_CONTEXT - count, *part.shape[1:]), part.dtype)]) for part in parts
            ]
        return (*parts, valid)

    def sample(self, batch_size: int) -> dict[str, torch.Tensor]:
        numbers = np.random.choice(len(self.episodes), size=batch_size, p=self.chance)
        columns = zip(*(self.window(self.episodes[i]) for i in numbers), strict=True)
        names = ("observations", "actions", "returns_to_go", "timesteps", "valid")
        return {name: torch.as_tensor(np.stack(column)) for name, column in zip(names, columns, strict=True)}


# the warm-up of a check is short: at a ten-thousandth of the learning rate nothing would be compared but the first
# weights
QUIET: dict[str, Any] = {"dropout": 0.0, "warmup": 3}

if __name__ == "__main__":
    plain.main(lambda check: DT(**QUIET) if check else DT(), Windows, BATCHES["dt"], common.CHUNKS["dt"])
