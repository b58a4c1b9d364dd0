"""d3rlpy's own sampling and update, without the rest of its `fit` (progress bar, logs), which would only add to its time."""

from __future__ import annotations

import numpy as np
import torch
from peers import common
from peers.common import BATCH
from peers.flops import DEEP_HIDDEN


def main() -> None:
    options = common.options(("--algo", {"required": True, "choices": ["iql", "td3_bc", "cql"]}))
    if options.check:
        raise SystemExit("d3rlpy's update is its own: there is nothing to check")
    import d3rlpy

    torch.set_num_threads(1)
    columns = common.transitions(options.rows)
    terminations, timeouts = common.flags(options.rows)
    data = d3rlpy.dataset.MDPDataset(
        columns["observations"], columns["actions"], columns["rewards"], terminations.astype(np.float32), timeouts.astype(np.float32)
    )
    algos = d3rlpy.algos
    config = {"iql": algos.IQLConfig, "td3_bc": algos.TD3PlusBCConfig, "cql": algos.CQLConfig}[options.algo]
    deep = d3rlpy.models.VectorEncoderFactory(list(DEEP_HIDDEN))
    settings = {"actor_encoder_factory": deep, "critic_encoder_factory": deep} if options.algo == "cql" else {}
    algorithm = config(batch_size=BATCH, **settings).create(device="cpu:0")
    algorithm.build_with_dataset(data)

    def updates(count: int) -> dict[str, float]:
        for _ in range(count):
            losses = algorithm.update(data.sample_transition_batch(BATCH))
        return {k: float(v) for k, v in losses.items()}

    common.serve(updates, note=f"d3rlpy {d3rlpy.__version__}, torch {torch.__version__}")


if __name__ == "__main__":
    main()
