"""What torch's compiler leaves undone in a traced update: results that are in it twice, and products that are made to
be transposed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

from offrl.training.compiling import kernels

aten = torch.ops.aten
UNLIKE = (aten.empty.memory_format, aten.clone.default)  # two calls stand for two places in memory
SMALL = 32  # rows, columns or depth of a product; below, calling and preparing it costs more than is gained
LARGE = 2**25  # rows x columns x depth; from there on libraries prepare more, which pays


class Simpler(CustomGraphPass):
    """A traced update with each result once, each product in the layout that is wanted of it, and some by our own code.

    own: which, see `kernels.kinds`.
    """

    def __init__(self, kernel_kinds: tuple[str, ...] = ()) -> None:
        self.kernel_kinds = kernel_kinds

    def __call__(self, graph: Graph) -> None:
        merge_equal(graph)
        turn_products(graph)
        if self.kernel_kinds:
            use_products(graph, "dense" in self.kernel_kinds)

    def uuid(self) -> Any:
        """What is compiled with another version of this file is not used."""
        return get_hash_for_files((__file__,)) + str(self.kernel_kinds).encode()


def merge_equal(graph: Graph) -> None:
    """An operator called again with the same inputs gives its first result.

    An update asks for the policy at the same observations in several losses: autograd's own graphs are rid of that,
    those of torch.func's gradients are not.
    """
    first: dict[Any, Node] = {}
    for node in list(graph.nodes):
        if isinstance(node.target, OpOverload) and node.target._schema.is_mutable:
            break  # from here on the state is overwritten, and the same inputs hold other numbers
        if not _pure(node):
            continue
        leaves, structure = pytree.tree_flatten((node.args, node.kwargs))
        # 1, 1.0 and True are equal, and give other results
        key = (node.target, str(structure), tuple((type(leaf), leaf) for leaf in leaves))
        try:
            earlier = first.setdefault(key, node)
        except TypeError:  # an input that cannot be a key
            continue
        if earlier is not node and not any(user.op == "output" for user in node.users):
            node.replace_all_uses_with(earlier)
            graph.erase_node(node)


def _pure(node: Node) -> bool:
    """Whether a call's result depends on nothing but its inputs, and is not asked for as memory of its own."""
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or node.target in UNLIKE:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags


def turn_products(graph: Graph) -> None:
    """(A B)^T becomes B^T A^T. Products read their inputs transposed at no cost; the optimiser that reads a gradient so
    takes twice as long. Gradients of gradients are of this kind (EDAC)."""
    for node in list(graph.nodes):
        if node.target is not aten.permute.default or not _swaps_last(node.args[1]):
            continue
        operand = node.args[0]
        product = operand.args[0] if operand.target is aten.view.default else operand
        if product.target is not aten.bmm.default or len(operand.users) > 1 or len(product.users) > 1:
            continue
        with graph.inserting_before(node):
            left, right = (_call(graph, aten.permute.default, factor, [0, 2, 1]) for factor in reversed(product.args))
            turned = _call(graph, aten.bmm.default, left, right)
            node.replace_all_uses_with(_call(graph, aten.view.default, turned, list(node.meta["val"].shape)))
        graph.erase_node(node)
        for unused in (operand, product) if operand is not product else (product,):
            graph.erase_node(unused)


def _swaps_last(dims: list[int]) -> bool:
    """Whether a permutation swaps the last two axes and nothing else."""
    axes = list(range(len(dims)))
    return [d % len(dims) for d in dims] == [*axes[:-2], *axes[:-3:-1]]


def _call(graph: Graph, target: OpOverload, *x: Any) -> Node:
    """A new node with the shape of its result."""
    node = graph.call_function(target, x)
    node.meta["val"] = target(*pytree.tree_map_only(Node, lambda n: n.meta["val"], x))
    return node


def use_products(graph: Graph, dense: bool) -> None:
    """Products with the gradient at the last hidden layer of a ReLU network with one output, with vectors, and if
    `dense` most others, by `kernels`."""
    for node in list(graph.nodes):
        if (
            node.target is not aten.bmm.default
            or node.meta["val"].dtype is not torch.float32
            or node.meta["val"].device.type != "cpu"
        ):
            continue
        with graph.inserting_before(node):
            new = _vector_product(graph, *node.args)
            new = _gated_product(graph, *node.args) if new is None else new
            new = _product(graph, *node.args) if new is None and dense else new
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)


def _vector_product(graph: Graph, left: Any, right: Any) -> Node | None:
    (_, rows, depth), columns = left.meta["val"].shape, right.meta["val"].shape[2]
    if min(depth, max(rows, columns)) < SMALL or min(rows, columns) > 1:
        return None
    if columns == 1:
        product = _call(graph, kernels.vector_product, left, _call(graph, aten.select.int, right, 2, 0))
        return _call(graph, aten.unsqueeze.default, product, 2)
    product = _call(graph, kernels.vector_product, _turned(graph, right), _call(graph, aten.select.int, left, 1, 0))
    return _call(graph, aten.unsqueeze.default, product, 1)


def _gated_product(graph: Graph, left: Any, right: Any) -> Node | None:
    if min(*left.meta["val"].shape[1:], right.meta["val"].shape[2]) < SMALL:
        return None
    for factor, other, is_right in ((left, right, False), (right, left, True)):
        if (parts := _gate(factor)) is None:
            continue
        gate, outer, inner, turned = parts
        count, rows, depth = factor.meta["val"].shape[0], outer.meta["val"].shape[1], inner.meta["val"].shape[2]
        if (
            not count == outer.meta["val"].shape[0] == inner.meta["val"].shape[0]
            or gate.meta["val"].numel() != count * rows * depth
        ):
            continue
        gate = _call(graph, aten.view.default, gate, [count, rows, depth])
        outer, inner = _call(graph, aten.select.int, outer, 2, 0), _call(graph, aten.select.int, inner, 1, 0)
        if turned != is_right:  # a product from the right is one of the transposed factors from the left, transposed
            gate, outer, inner = _turned(graph, gate), inner, outer
        return _call(
            graph, kernels.gated_product, gate, outer, inner, _turned(graph, other) if is_right else other, is_right
        )
    return None


def _product(graph: Graph, left: Any, right: Any) -> Node | None:
    (_, rows, depth), columns = left.meta["val"].shape, right.meta["val"].shape[2]
    if rows * depth * columns > LARGE or min(rows, depth, columns) < 2:
        return None
    if columns % SMALL and min(rows, depth, columns) > 2 * SMALL:  # the rest of a tile would be idle
        return None
    return _call(graph, kernels.product, left, right)


def _gate(node: Any) -> tuple[Node, Node, Node, bool] | None:
    """gate, outer [B, M, 1] and inner [B, 1, K] of what is `outer * inner` where gate > 0 and else 0, and whether it is
    transposed.
    """
    turned, source = False, _source(node)
    while source.target is aten.permute.default and _swaps_last(source.args[1]):
        turned, source = not turned, _source(source.args[0])
    if source.target is not aten.where.self:
        return None
    condition, zero, value = source.args
    if (
        condition.target is not aten.le.Scalar
        or condition.args[1] != 0
        or condition.args[0].meta["val"].shape != source.meta["val"].shape
    ):
        return None
    if getattr(zero, "target", None) is not aten.scalar_tensor.default or zero.args[0] != 0:
        return None
    value = _source(value)
    if value.target is not aten.mul.Tensor or not all(
        isinstance(x, Node) and x.meta["val"].ndim == 3 for x in value.args
    ):
        return None
    outer, inner = value.args if value.args[0].meta["val"].shape[2] == 1 else reversed(value.args)
    if (
        outer.meta["val"].shape[2] != 1
        or inner.meta["val"].shape[1] != 1
        or not condition.args[0].meta["val"].is_contiguous()
    ):
        return None
    return condition.args[0], outer, inner, turned


def _source(node: Any) -> Any:
    """The node whose result this one passes on as it is, but for its leading axes."""
    while (
        node.target in (aten.view.default, aten.expand.default)
        and node.args[0].meta["val"].shape[-2:] == node.meta["val"].shape[-2:]
    ):
        if node.args[0].meta["val"].numel() != node.meta["val"].numel():
            break
        node = node.args[0]
    return node


def _turned(graph: Graph, node: Node) -> Node:
    return _call(graph, aten.permute.default, node, [0, 2, 1])
