"""A contestant of scripts/bench/small_runs.py: small networks, by offrl (of any tree) or a plain loop; it answers in
CPU seconds.
"""

from __future__ import annotations

import importlib
import sys
import time

from peers import common

TREE = ("--tree", {"help": "folder of another checkout of offrl, whose package is used"})
ALGO = ("--algo", {"required": True})
BY = ("--by", {"choices": ["offrl", "plain"], "default": "offrl"})
WIDTH = ("--width", {"type": int, "default": 16})
CHUNK = 20  # updates between two looks at the clock
CLASSES = {"iql": "IQL", "td3_bc": "TD3BC"}


def main() -> None:
    options = common.options(TREE, ALGO, BY, WIDTH)
    if options.tree:
        sys.path.insert(0, options.tree)
    common.HIDDEN = (options.width, options.width)  # before what reads it is imported
    if options.by == "plain":
        from peers import plain

        plain.arithmetic(onednn=False)
        trainer = getattr(importlib.import_module(f"peers.{options.algo}_plain"), CLASSES[options.algo])()
        buffer = plain.Buffer(options.rows)

        def updates(count: int) -> None:
            for _ in range(count):
                trainer.update(buffer.sample(common.BATCH))

    else:
        import torch
        from peers.runner import Runner, make, synthetic

        from offrl.system import backend

        backend.configure(torch.device("cpu"), 1)
        dataset = synthetic(options.rows)
        algorithm = make(options.algo, dataset, {"hidden": list(common.HIDDEN)})
        updates = Runner(algorithm, dataset, seeds=range(options.replicas), mode="eager").run
    updates(2 * CHUNK)
    common.report(ready=True)
    for line in sys.stdin:
        seconds, done, start, used = float(line.split()[1]), 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - start < seconds:
            updates(CHUNK)
            done += CHUNK
        common.report(rate=done / (time.process_time() - used))


if __name__ == "__main__":
    main()
