"""GFLOP/s of float32 matrix products by shape, of the two libraries that torch has for them, of offrl's own, and of
JAX: a Markdown table.

    python scripts/bench/products.py  # this CPU as it is
    python scripts/bench/products.py --limit avx2  # with AVX2's instructions, as an older CPU's
    python scripts/bench/products.py --jax ~/.cache/offrl/compare/jax/bin/python  # beside JAX of another environment

[m, k] times [k, n], one thread; N and T say which factor is stored transposed: NN is the gradient with respect to a
layer's input where its weights are [out, in], NT its forward pass, TN the gradient of its weights. "2 x" are two
products of one call. Libraries take turns, and the median over rounds is shown. oneDNN needs AVX-512 here: torch leaves
products to its default library where that is missing. "gated" is offrl's product with a matrix of zeros and ones
between two vectors (docs/architecture.md), counted as if it were dense; both of offrl's are called from Python here,
which costs thin ones more than compiled updates, that call them directly, pay.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent
FORMS = ("NN", "NT", "TN")
# (many, m, k, n): hidden layers of a batch of 256, first layers, heads, their gradients, CQL's 31 actions for each
# state
SHAPES = (
    (1, 256, 256, 256),
    (1, 256, 11, 256),
    (1, 11, 256, 256),
    (1, 256, 256, 1),
    (1, 256, 1, 256),
    (1, 256, 256, 3),
    (1, 7936, 256, 256),
    (2, 256, 256, 256),
    (2, 256, 14, 256),
    (2, 256, 256, 1),
    (2, 256, 1, 256),
    (10, 256, 256, 256),
)
LIMITS = {  # kind of CPU -> the environment that has each library make do with its instructions
    "none": {},
    "avx2": {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
        "XLA_FLAGS": "--xla_cpu_max_isa=AVX2",
    },
}
Product = Callable[[], object]
SECONDS = 0.004  # of a burst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", choices=sorted(LIMITS), default="none")
    parser.add_argument("--jax", type=Path, help="the interpreter of an environment with jax")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--part", choices=["torch", "jax"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(torch_rates(options.rounds) if options.part == "torch" else jax_rates(options.rounds)))
        return
    parts = {"torch": sys.executable, **({"jax": str(options.jax)} if options.jax else {})}
    columns: dict[str, dict[str, float]] = {}
    for part, python in parts.items():
        columns |= run(part, python, options)
    print(f"| {options.limit if options.limit != 'none' else 'as it is'} | form | {' | '.join(columns)} |")
    print("|---|---|" + "---|" * len(columns))
    for shape in SHAPES:
        for form in FORMS:
            cells = [f"{column[name_of(shape, form)]:.0f}" for column in columns.values()]
            print(f"| {name_of(shape)} | {form} | {' | '.join(cells)} |")


def run(part: str, python: str, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """GFLOP/s by library and product, measured by a process of its own: a CPU's instructions are looked at once."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    limit = dict(LIMITS[options.limit])
    flags = f"{limit.pop('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()
    surroundings = {
        **os.environ,
        **threads,
        **limit,
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(SCRIPTS.parent),
    }
    command = [python, str(Path(__file__).resolve()), "--part", part, "--rounds", str(options.rounds)]
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def name_of(shape: tuple[int, ...], form: str = "") -> str:
    many, m, k, n = shape
    return f"{f'{many} x ' if many > 1 else ''}{m}x{k}x{n}{form}"


def rate(products: dict[str, Product], flop: float, rounds: int) -> dict[str, float]:
    """GFLOP/s of products that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in products}
    counts = {}
    for name, product in products.items():
        product()
        start = time.perf_counter()
        product()
        counts[name] = max(1, int(SECONDS / (time.perf_counter() - start)))
    for _ in range(rounds):
        for name, product in products.items():
            start = time.perf_counter()
            for _ in range(counts[name]):
                product()
            seconds[name].append((time.perf_counter() - start) / counts[name])
    return {name: flop / statistics.median(values) / 1e9 for name, values in seconds.items()}


def torch_rates(rounds: int) -> dict[str, dict[str, float]]:
    import torch

    from offrl.system import devices
    from offrl.training.compiling import kernels

    torch.set_num_threads(1)
    if os.environ.get("ATEN_CPU_CAPABILITY") == "avx2":
        kernels.FLAGS += ("-mno-avx512f",)
    result: dict[str, dict[str, float]] = {"torch's default": {}, "oneDNN": {}, "offrl": {}, "offrl, gated": {}}
    names = {"torch's default": devices.DEFAULT, "oneDNN": devices.ONEDNN}

    def factor(many: int, rows: int, columns: int, turned: bool) -> torch.Tensor:
        x = torch.randn(many, columns, rows).mT if turned else torch.randn(many, rows, columns)
        return x[0] if many == 1 else x

    for shape in SHAPES:
        many, m, k, n = shape
        for form in FORMS:
            a, b = factor(many, m, k, form[0] == "T"), factor(many, k, n, form[1] == "T")
            out = torch.empty(*a.shape[:-1], n)
            multiply = torch.mm if many == 1 else torch.bmm

            def product(library: str, a=a, b=b, out=out, multiply=multiply) -> None:  # type: ignore[no-untyped-def]
                with devices.routed(library):
                    for _ in range(10):
                        multiply(a, b, out=out)

            vectors = torch.ones(many, m), torch.ones(many, k)

            def own(gated: bool, a=a, b=b, vectors=vectors, many=many) -> None:  # type: ignore[no-untyped-def]
                a, b = a.reshape(many, *a.shape[-2:]), b.reshape(many, *b.shape[-2:])
                for _ in range(10):
                    kernels.gated_product(a, *vectors, b, False) if gated else kernels.product(a, b)

            turns = {
                label: (lambda library=library, product=product: product(library)) for label, library in names.items()
            }
            turns |= {"offrl": functools.partial(own, False), "offrl, gated": functools.partial(own, True)}
            for label, value in rate(turns, 10 * 2.0 * many * m * k * n, rounds).items():
                result[label][name_of(shape, form)] = value
    return result


def jax_rates(rounds: int) -> dict[str, dict[str, float]]:
    """JAX's, ten in one compiled loop: a call alone costs as much as a thin product. Each adds a number to its first
    factor before.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    result: dict[str, float] = {}
    for shape in SHAPES:
        many, m, k, n = shape
        for form in FORMS:
            left = jnp.asarray(np.random.randn(*((many, k, m) if form[0] == "T" else (many, m, k))), jnp.float32)
            right = jnp.asarray(np.random.randn(*((many, n, k) if form[1] == "T" else (many, k, n))), jnp.float32)

            @jax.jit
            def product(a, b, form=form, many=many, m=m, n=n):  # type: ignore[no-untyped-def]
                def step(i, z):  # type: ignore[no-untyped-def]
                    # so that no iteration is the one before; all of z is carried, so it is computed
                    x, y = (a + 1e-6 * z.reshape(-1)[0], b)
                    x, y = (x.mT if form[0] == "T" else x), (y.mT if form[1] == "T" else y)
                    return x @ y

                return jax.lax.fori_loop(0, 10, step, jnp.zeros((many, m, n)[many == 1 :]))

            left, right = (left[0], right[0]) if many == 1 else (left, right)
            turn = {"": lambda product=product, a=left, b=right: jax.block_until_ready(product(a, b))}
            result[name_of(shape, form)] = rate(turn, 10 * 2.0 * many * m * k * n, rounds)[""]
    return {f"JAX {jax.__version__}": result}


if __name__ == "__main__":
    main()
