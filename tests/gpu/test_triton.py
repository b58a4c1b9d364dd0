"""What Inductor would write for a GPU: no 64-bit constants in index arithmetic, and code that Triton compiles.

What needs Triton itself is skipped without it: `pip install triton` (no GPU is needed) runs it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.algorithm import stack
from offrl.system import backend
from offrl.training.step import Step
from offrl.training.updates import update_keys
from tests.support import cases
from tests.support.triton_code import code_for, compiled, index_constants, kernels

META = torch.device("meta")
TABLE, KEYS = torch.empty(1000, 17, device=META), torch.empty(4, dtype=torch.int64, device=META)


def draws(keys: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    """Rows of a table, uniform and normal numbers, of four keys."""
    rows = vmap(lambda k: table[rng.randint(rng.split(k)[0], (256,), 1000)])(keys)
    return rows, vmap(lambda k: rng.uniform(k, (300,)))(keys), vmap(lambda k: rng.normal(k, (300,)))(keys)


def update_code(case: Any) -> str:
    """The code of a whole update of two replicas."""
    algorithm = case.make()
    source = backend.move(algorithm.sampler().prepare(cases.data(case.discrete)), META)
    seeds = [0, 1] if algorithm.traits.vectorized else [0]
    state = pytree.tree_map(lambda x: x.to(META), stack([algorithm.init(s) for s in seeds]))
    step = Step(algorithm, source, batch_size=cases.BATCH, replicas=len(seeds), mode="compiled-cudagraph")
    leaves, spec = pytree.tree_flatten(state)

    def update(*leaves: Tensor) -> list[Tensor]:
        state = pytree.tree_unflatten(list(leaves), spec)
        keys = update_keys(state, algorithm.traits.period).transpose(0, 1)
        return pytree.tree_leaves(step.updates(0, algorithm.traits.period)(state, keys, {}, []))

    return code_for(update, *leaves)


@pytest.mark.slow
def test_random_numbers_are_no_index_arithmetic() -> None:
    assert not index_constants(code_for(draws, KEYS, TABLE))

    def naive(
        table: Tensor,
    ) -> Tensor:  # the check sees what it is for: without `^ 0` the product is taken for an index
        return table[(torch.arange(256, device=META) * rng._GAMMA) % 1000]

    assert index_constants(code_for(naive, TABLE))


FAMILIES = ("iql", "cql", "dt", "hiql", "dynamics", "tt")
FIRST = [c for c in cases.BASE if c.name in FAMILIES and not c.discrete]


@pytest.mark.nightly
@cases.each(FIRST)
def test_updates_have_no_wide_index(case: Any, tmp_path: Path) -> None:
    """Each kernel of an update; where there is Triton, it compiles them for an H100."""
    code = update_code(case)
    assert len(kernels(code)) > 5
    assert not index_constants(code)
    if find_spec("triton") is not None:
        assert set(compiled(code, tmp_path)) == set(kernels(code))


def test_kernels_of_random_numbers_compile_for_an_h100(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    code = code_for(draws, KEYS, TABLE)
    found = compiled(code, tmp_path)
    assert set(found) == set(kernels(code))
    assert all("lo.s64" in ptx and ".target sm_90" in ptx for ptx in found.values())


def test_kernels_of_random_numbers_give_known_answers() -> None:
    """Triton's interpreter, which has to be asked for before Triton is there, against the CPU's integers."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.support.interpreted"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == {"uniform": 0.0, "rows": 0.0, "normal": pytest.approx(0.0, abs=1e-6)}
