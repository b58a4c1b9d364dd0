"""C code of a small policy (`offrl distill`, `algo=gbrl_awr`): one function without state, memory or
library but math.h.
"""

from __future__ import annotations

import copy
import ctypes
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from offrl.errors import UserError, one_line
from offrl.evaluation.policy import TrainedPolicy
from offrl.export.dimensions import dimension_names
from offrl.nn.students import Polynomial, SmallMLP, StudentPolicy, Trees

FLAGS = ("-O2", "-ffp-contract=off", "-shared", "-fPIC")  # no fused products: they round otherwise
ROWS = """
void policy_rows(long rows, const float *observations, {kind} *actions) {{
    for (long i = 0; i < rows; i++) {call};
}}
"""


def compiler() -> str:
    """The C compiler, $CC or cc. Raises UserError where there is none."""
    name = os.environ.get("CC") or "cc"
    if (path := shutil.which(name)) is None:
        raise UserError(
            f"C code is compiled and compared with the policy, and there is no compiler '{name}': install one (apt "
            "install gcc), or set CC="
        )
    return path


def source(policy: TrainedPolicy) -> str:
    """The C file. Raises UserError for a policy that is no student."""
    networks, spec = policy.algorithm.networks, policy.spec
    if not isinstance(student := networks.get("actor"), StudentPolicy):
        raise UserError(
            "format=c is for small policies (offrl distill, gbrl_awr), and this one is of "
            f"{policy.algorithm.config.name}: offrl distill RUN into=tree makes one of it"
        )
    student = copy.deepcopy(student).requires_grad_(False)
    student.load_state_dict(policy.state.params["actor"])
    observed, actions = spec.observation_dim, spec.encoded_action_dim
    names = dimension_names(spec)["observations"]
    known = [f" * x[{i}]: {_comment(names[i]['name'])}" for i in range(observed) if names.get(i, {}).get("name")]
    kind = "double" if not isinstance(student.net, Trees) else "float"  # trees compare as the policy does, in float32
    lines = [
        f"/* A policy of {policy.algorithm.config.name}. Observations are in the data's units, actions in the",
        " * environment's.",
        *known,
        " */",
        "#include <math.h>",
        "",
        f"{'int' if spec.discrete else 'void'} policy(const float *s{'' if spec.discrete else ', float *action'}) {{",
        f"    {kind} x[{observed}];",
        f"    double y[{actions}] = {{0}};",
    ]
    for i in range(observed):
        value = f"s[{i}]"
        if policy.mean is not None and policy.std is not None:
            value = f"(s[{i}] - {_float(policy.mean[i])}) / {_float(policy.std[i])}"
        lines.append(f"    x[{i}] = {value};")
    lines += [f"    {line}" for line in BODIES[type(student.net)](student.net)]
    if spec.discrete:
        lines += ["    int best = 0;", f"    for (int k = 1; k < {actions}; k++) if (y[k] > y[best]) best = k;"]
        return "\n".join([*lines, f"    return best + {spec.first_choice};", "}", ""])
    for d, (low, high) in enumerate(zip(policy.low.astype(float), policy.high.astype(float), strict=True)):
        clipped = f"fmin(fmax(y[{d}], -1.0), 1.0)"
        lines.append(f"    action[{d}] = (float)({low:.9g} + ({clipped} + 1.0) * {0.5 * (high - low):.9g});")
    return "\n".join([*lines, "}", ""])


def _comment(text: str) -> str:
    return one_line(text).replace("*/", "* /").replace("\\", "/")


def _float(x: Tensor) -> str:
    return f"{float(x):.8e}f"


def _polynomial(net: Polynomial) -> Iterator[str]:
    inputs = int(net.terms.max()) - 2 * len(net.angles)
    waves = [f"{f}(x[{int(a)}])" for f in ("sin", "cos") for a in net.angles]
    variables = [*(f"x[{i}]" for i in range(inputs)), *waves]
    for d, row in enumerate(net.coefficients):
        for t in row.nonzero().flatten().tolist():
            product = [variables[v - 1] for v in net.terms[t].tolist() if v > 0]
            yield f"y[{d}] += {' * '.join([f'{float(row[t]):.9g}', *product])};"


def _trees(net: Trees) -> Iterator[str]:
    for k in range(len(net.value)):
        yield from branches(net, k, 0, lambda values: "".join(f"y[{d}] += {v}; " for d, v in enumerate(values)))


def branches(net: Trees, tree: int, node: int, leaf: Callable[[list[str]], str], indent: str = "") -> Iterator[str]:
    """The lines of one tree from a node on, a line for each leaf."""
    inner = net.feature.shape[1]
    while node < inner and net.threshold[tree, node].isinf():
        node = 2 * node + 1
    if node >= inner:
        yield indent + leaf([f"{float(v):.9g}" for v in net.value[tree, node - inner]]).rstrip()
        return
    yield f"{indent}if (x[{int(net.feature[tree, node])}] <= {_float(net.threshold[tree, node])}) {{"
    yield from branches(net, tree, 2 * node + 1, leaf, indent + "    ")
    yield f"{indent}}} else {{"
    yield from branches(net, tree, 2 * node + 2, leaf, indent + "    ")
    yield f"{indent}}}"


def _network(net: SmallMLP) -> Iterator[str]:
    layers: list[Any] = [*net.layers, net.head]
    before = "x"
    for i, layer in enumerate(layers):
        width, inputs = layer.weight.shape
        after = "y" if i == len(layers) - 1 else f"h{i}"
        rows = ",\n        ".join("{" + ", ".join(map(_float, row)) + "}" for row in layer.weight)
        yield f"static const float w{i}[{width}][{inputs}] = {{{rows}}};"
        yield f"static const float b{i}[{width}] = {{{', '.join(map(_float, layer.bias))}}};"
        if after != "y":
            yield f"double {after}[{width}];"
        yield f"for (int i = 0; i < {width}; i++) {{"
        yield f"    {after}[i] = b{i}[i];"
        yield f"    for (int j = 0; j < {inputs}; j++) {after}[i] += w{i}[i][j] * {before}[j];"
        yield "}" if after == "y" else f"    {after}[i] = fmax({after}[i], 0.0);\n    }}"
        before = after


BODIES: dict[type[nn.Module], Any] = {Polynomial: _polynomial, Trees: _trees, SmallMLP: _network}


def compiled(policy: TrainedPolicy, code: str) -> Callable[[np.ndarray, Sequence[np.ndarray]], np.ndarray]:
    """The compiled code as a runner: observations [B, O] float32 -> actions. Raises UserError."""
    spec = policy.spec
    call = (
        "actions[i] = policy(observations + i * {o})"
        if spec.discrete
        else "policy(observations + i * {o}, actions + i * {a})"
    )
    kind = "int" if spec.discrete else "float"
    rows = ROWS.format(kind=kind, call=call.format(o=spec.observation_dim, a=spec.action_dim))
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "policy.so")
        arguments = [compiler(), *FLAGS, "-x", "c", "-", "-o", str(library), "-lm"]
        done = subprocess.run(arguments, input=code + rows, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"the C compiler fails ({one_line(done.stderr)[:200]}); is it a compiler of C99?")
        function = ctypes.CDLL(str(library)).policy_rows  # stays loaded when its file goes

    def run(observations: np.ndarray, noise: Sequence[np.ndarray] = ()) -> np.ndarray:
        x = np.ascontiguousarray(observations, np.float32).reshape(len(observations), -1)
        shape = (len(x),) if spec.discrete else (len(x), spec.action_dim)
        actions = np.empty(shape, np.int32 if spec.discrete else np.float32)
        function(ctypes.c_long(len(x)), ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(actions.ctypes.data))
        return actions.astype(np.int64) if spec.discrete else actions

    return run
