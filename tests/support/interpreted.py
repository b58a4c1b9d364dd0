"""Run by test_triton.py: Inductor's kernels for random numbers by Triton's interpreter; prints differences from the
CPU's.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch.func import vmap

from offrl import rng
from tests.support.triton_code import code_for, kernels, loaded

META = torch.device("meta")
TABLE = torch.randn(1000, 17, generator=torch.Generator().manual_seed(0))


def carried_out(f: Callable[[Tensor, Tensor], Tensor], key: Tensor) -> Tensor:
    """`f` of keys and the table, which becomes kernels that are carried out one after the other, their buffers made as
    the file says.
    """
    code = code_for(f, torch.empty_like(key, device=META), torch.empty_like(TABLE, device=META))
    sources, folder = kernels(code), Path(tempfile.mkdtemp())
    values: dict[str, Any] = {"arg0_1": key, "arg1_1": TABLE}
    for line in code.split("def call(")[-1].splitlines():
        line = line.strip()
        if made := re.match(r"(buf\d+) = empty_strided_cuda\(\((.*?)\), \((.*?)\), torch\.(\w+)\)", line):
            shape, stride = (tuple(int(x) for x in made[i].split(",") if x.strip()) for i in (2, 3))
            values[made[1]] = torch.empty_strided(shape, stride, dtype=getattr(torch, made[4]))
        elif again := re.match(r"(buf\d+) = (buf\d+|reinterpret_tensor\((buf\d+).*); del", line):
            values[again[1]] = values[again[3] or again[2]]
        elif run := re.match(r"(triton_\w+)\.run\((.*), stream=", line):
            *tensors, size = (x.strip() for x in run[2].split(","))
            kernel, count = loaded(run[1], sources[run[1]], folder)[0], int(size)
            kernel[(-(-count // 64),)](*(values[t] for t in tensors), count, XBLOCK=64)
        elif line.startswith("return"):
            return values[re.findall(r"buf\d+", line)[0]]
    raise RuntimeError("the file returns nothing")


def main() -> None:
    key = vmap(rng.fold_in)(torch.arange(4), torch.arange(4))
    ways: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "uniform": lambda key, table: vmap(lambda k: rng.uniform(k, (300,)))(key),
        "normal": lambda key, table: vmap(lambda k: rng.normal(k, (300,)))(key),
        "rows": lambda key, table: vmap(lambda k: table[rng.randint(k, (256,), 1000)])(key),
    }
    print(
        json.dumps(
            {
                name: float((carried_out(f, key).reshape(f(key, TABLE).shape) - f(key, TABLE)).abs().max())
                for name, f in ways.items()
            }
        )
    )


if __name__ == "__main__":
    main()
