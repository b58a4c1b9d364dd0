"""d3rlpy's own sampling and update, without the rest of its `fit` (progress bar, logs), which would only add to its
time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from peers import common
from peers.common import BATCH, EPISODE
from peers.flops import BATCHES, DEEP_HIDDEN, DT_CONTEXT, DT_HIDDEN


def main() -> None:
    options = common.options(("--algo", {"required": True, "choices": ["iql", "td3_bc", "rebrac", "cql", "dt"]}))
    if options.check:
        raise SystemExit("d3rlpy's update is its own: there is nothing to check")
    import d3rlpy

    torch.set_num_threads(1)
    columns = common.transitions(options.rows)
    terminations, timeouts = common.flags(options.rows)
    data = d3rlpy.dataset.MDPDataset(
        columns["observations"],
        columns["actions"],
        columns["rewards"],
        terminations.astype(np.float32),
        timeouts.astype(np.float32),
    )
    algorithm, sample = transformer(d3rlpy, data) if options.algo == "dt" else q_learner(d3rlpy, data, options.algo)
    algorithm.build_with_dataset(data)

    def updates(count: int) -> dict[str, float]:
        for _ in range(count):
            losses = algorithm.update(sample())
        return {k: float(v) for k, v in losses.items()}

    chunk = common.CHUNKS.get(options.algo, 20)
    common.serve(updates, chunk, note=f"d3rlpy {d3rlpy.__version__}, torch {torch.__version__}")


def q_learner(d3rlpy: Any, data: Any, name: str) -> tuple[Any, Callable[[], Any]]:
    """The algorithm, and what draws its batches."""
    algos = d3rlpy.algos
    configs = {
        "iql": algos.IQLConfig,
        "td3_bc": algos.TD3PlusBCConfig,
        "rebrac": algos.ReBRACConfig,
        "cql": algos.CQLConfig,
    }
    actor, critic = (
        d3rlpy.models.VectorEncoderFactory(list(DEEP_HIDDEN), use_layer_norm=norm) for norm in (False, name == "rebrac")
    )
    settings = {"actor_encoder_factory": actor, "critic_encoder_factory": critic} if name in ("rebrac", "cql") else {}
    size = BATCHES.get(name, BATCH)
    return configs[name](batch_size=size, **settings).create(device="cpu:0"), lambda: data.sample_transition_batch(size)


def transformer(d3rlpy: Any, data: Any) -> tuple[Any, Callable[[], Any]]:
    """The Decision Transformer, and what draws its batches. Its width is that of the observation's encoder, one linear
    layer here.
    """
    warmup = d3rlpy.optimizers.WarmupSchedulerFactory(warmup_steps=10_000)
    config = d3rlpy.algos.DecisionTransformerConfig(
        batch_size=BATCHES["dt"],
        context_size=DT_CONTEXT,
        max_timestep=EPISODE,
        encoder_factory=d3rlpy.models.VectorEncoderFactory([DT_HIDDEN[0]], exclude_last_activation=True),
        optim_factory=d3rlpy.optimizers.AdamWFactory(
            weight_decay=1e-4, clip_grad_norm=0.25, lr_scheduler_factory=warmup
        ),
        num_heads=1,
        num_layers=len(DT_HIDDEN),
        activation_type="gelu",
    )
    return config.create(device="cpu:0"), lambda: data.sample_trajectory_batch(BATCHES["dt"], length=DT_CONTEXT)


if __name__ == "__main__":
    main()
