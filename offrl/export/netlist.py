"""A policy's graph as a short list of named array operations: enough to rebuild the policy from a safetensors file, in any language.

`run` is the reference interpreter, in NumPy; it is what checks the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

Operation = dict[str, Any]  # {"name": of the result, "op": a key of OPERATIONS, "args": [...]}
OBSERVATIONS, BATCH = "observations", "batch"


def _layer_norm(x: np.ndarray, shape: Sequence[int], weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any) -> np.ndarray:
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    y = (x - x.mean(axes, keepdims=True)) / np.sqrt(x.var(axes, keepdims=True) + x.dtype.type(eps))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _gelu(x: np.ndarray, approximate: str = "none") -> np.ndarray:
    if approximate == "tanh":
        return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))
    return (0.5 * x * (1.0 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2.0)))).astype(x.dtype)


def _log_softmax(x: np.ndarray, axis: int, *_: Any) -> np.ndarray:
    y = x - x.max(axis, keepdims=True)
    return y - np.log(np.exp(y).sum(axis, keepdims=True))


def _silu(x: np.ndarray) -> np.ndarray:
    return x * (0.5 * (1.0 + np.tanh(0.5 * x)))


# name -> what it does; arrays are float32, "axis" counts from 0, negative ones from the end
OPERATIONS: dict[str, Callable[..., Any]] = {
    "linear": lambda x, weight, bias=None: x @ weight.T + (0.0 if bias is None else bias),
    "addmm": lambda bias, x, weight: bias + x @ weight,
    "mm": lambda x, weight: x @ weight,
    "permute": lambda x, axes: x.transpose(axes),
    "relu": lambda x: np.maximum(x, 0.0),
    "tanh": np.tanh,
    "sigmoid": lambda x: 0.5 * (1.0 + np.tanh(0.5 * x)),
    "gelu": _gelu,
    "silu": _silu,
    "layer_norm": _layer_norm,
    "native_layer_norm": lambda *x: (_layer_norm(*x),),
    "log_softmax": _log_softmax,
    "argmax": lambda x, axis=None, keep=False: x.argmax(axis).astype(np.int64),
    "clamp": lambda x, low=None, high=None: np.clip(x, low, high),
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul": lambda x, y: x * y,
    "div": lambda x, y: x / y,
    "neg": lambda x: -x,
    "reciprocal": lambda x: 1.0 / x,
    "exp": np.exp,
    "log": np.log,
    "cat": lambda parts, axis=0: np.concatenate(parts, axis),
    "flatten": lambda x, first=0, last=-1: x.reshape(*x.shape[:first], -1, *x.shape[last % x.ndim + 1 :]),
    "norm": lambda x, order=2, axis=None, keep=False: np.linalg.norm(x, order, axis if axis is None else axis[0], keep),
    "reshape": lambda x, shape: x.reshape(shape),
    "expand": lambda x, shape: np.broadcast_to(x, shape),
    "expand_as": lambda x, y: np.broadcast_to(x, y.shape),
    "chunk": lambda x, parts, axis=0: np.array_split(x, parts, axis),
    "split": lambda x, size, axis=0: np.split(x, range(size, x.shape[axis], size), axis),
    "split_with_sizes": lambda x, sizes, axis=0: np.split(x, np.cumsum(sizes)[:-1], axis),
    "getitem": lambda x, index: x[index],
}
SAME = {
    "_log_softmax": "log_softmax",
    "view": "reshape",
    "clamp_min": "clamp",
    "clip": "clamp",
    "linalg_vector_norm": "norm",
}  # other names of the same operation
# operations that leave float32 numbers as they are
NOTHING = ("to", "_to_copy", "detach", "contiguous", "clone", "alias")


class Unknown(Exception):
    """The graph holds an operation that is not in OPERATIONS."""


def describe(program: ExportedProgram, inputs: Sequence[str]) -> tuple[list[Operation], str, dict[str, torch.Tensor]]:
    """(operations in their order, name of the result, tensors by the names that operations call them). `inputs`: names of the inputs.

    Raises Unknown.
    """
    signature = program.graph_signature
    tensors: dict[str, torch.Tensor] = {}
    names: dict[str, Any] = {}
    fields = {**signature.inputs_to_parameters, **signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}
    given = iter(inputs)
    graph = program.graph_module.graph
    needed = _needed(graph)
    operations: list[Operation] = []
    result = ""
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name in fields:
                names[node.name] = fields[node.name].removeprefix("nets.")
                if node in needed:
                    source = program.state_dict if fields[node.name] in program.state_dict else program.constants
                    tensors[names[node.name]] = source[fields[node.name]]
            else:
                names[node.name] = next(given)
        elif node.op == "output":
            result = _argument(node.args[0][0], names)
        elif node in needed:
            op = str(getattr(node.target, "_opname", getattr(node.target, "__name__", node.target)))
            arguments = [_argument(a, names) for a in node.args]
            if op == "size":
                names[node.name] = BATCH
            elif op in NOTHING:
                names[node.name] = arguments[0]
            else:
                op = SAME.get(op, op)
                if op not in OPERATIONS or node.kwargs.get("alpha", 1) != 1:
                    raise Unknown(op)
                arguments += [node.kwargs[k] for k in ("approximate",) if k in node.kwargs]
                names[node.name] = node.name
                operations.append({"name": node.name, "op": op, "args": arguments})
    return operations, result, tensors


def _needed(graph: torch.fx.Graph) -> set[Any]:
    """The nodes that the result depends on."""
    found: set[Any] = set()
    waiting = [node for node in graph.nodes if node.op == "output"]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _argument(value: Any, names: Mapping[str, Any]) -> Any:
    """A node by its name, lists item by item; numbers as they are."""
    if isinstance(value, torch.fx.Node):
        if value.name not in names:  # arithmetic on the batch size
            raise Unknown(str(value.target))
        return names[value.name]
    if isinstance(value, (list, tuple)):
        return [_argument(v, names) for v in value]
    return value if isinstance(value, (int, float, str, bool)) or value is None else str(value)


def run(operations: Sequence[Operation], result: str, tensors: Mapping[str, np.ndarray], inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Calculate the result from the inputs {name: array} of one batch."""
    values: dict[str, Any] = {**tensors, **inputs, BATCH: len(inputs[OBSERVATIONS])}

    def value(argument: Any) -> Any:
        if isinstance(argument, list):
            return [value(a) for a in argument]
        return values.get(argument, argument) if isinstance(argument, str) else argument

    with np.errstate(over="ignore", divide="ignore"):
        for operation in operations:
            values[operation["name"]] = OPERATIONS[operation["op"]](*map(value, operation["args"]))
    return values[result]
