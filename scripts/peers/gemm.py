"""The matrix products of one update and nothing else, with the back end that offrl picks: the floor, as measured."""

from __future__ import annotations

import torch
from peers import common, flops
from peers.common import ACTION, BATCH, HIDDEN, OBSERVATION

from offrl.system import backend


def main() -> None:
    """`--products NAME`: an update's, in their own shapes; "square": one product of 256 x 256 matrices, the fastest
    shape here.
    """
    options = common.options(("--products", {"default": "square", "choices": ["square", *flops.NEEDED]}))
    note = backend.configure(torch.device("cpu"), 1)
    if options.products == "square":
        products: list[flops.Product] = [(256, 256, 256)]
        per_run = 1
    else:
        function, per_run = flops.NEEDED[options.products]
        hidden = flops.HIDDEN.get(options.products, HIDDEN)
        products = function(flops.BATCHES.get(options.products, BATCH), OBSERVATION, ACTION, hidden)
    shapes = set(products)
    left = {s: torch.randn(*s[:-1]) for s in shapes}
    right = {s: torch.randn(*s[:-3], *s[-2:]) for s in shapes}
    out = {s: torch.empty(*s[:-2], s[-1]) for s in shapes}
    jobs = [(torch.mm if len(s) == 3 else torch.bmm, left[s], right[s], out[s]) for s in products]

    def updates(count: int) -> dict[str, float]:
        for _ in range(count // per_run):
            for multiply, a, b, c in jobs:
                multiply(a, b, out=c)
        return {}

    common.serve(
        updates, chunk=1000 if options.products == "square" else common.CHUNKS.get(options.products, 20), note=note
    )


if __name__ == "__main__":
    main()
