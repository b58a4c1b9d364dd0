"""What torch's compiler leaves undone in a traced update: results that are in it twice, and products that are made to be transposed."""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils import _pytree as pytree

aten = torch.ops.aten
UNLIKE = (aten.empty.memory_format, aten.clone.default)  # two calls stand for two places in memory


class Simpler(CustomGraphPass):
    """A traced update with each result once, and each product in the layout that is wanted of it."""

    def __call__(self, graph: Graph) -> None:
        merge_equal(graph)
        turn_products(graph)

    def uuid(self) -> Any:
        """What is compiled with another version of this file is not used."""
        return get_hash_for_files((__file__,))


def merge_equal(graph: Graph) -> None:
    """An operator called again with the same inputs gives its first result.

    An update asks for the policy at the same observations in several losses: autograd's own graphs are rid of that, those of torch.func's
    gradients are not.
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
    """(A B)^T becomes B^T A^T. Products read their inputs transposed at no cost; the optimiser that reads a gradient so takes twice as
    long. Gradients of gradients are of this kind (EDAC)."""
    for node in list(graph.nodes):
        if node.target is not aten.permute.default or not _swaps_last(node.args[1]):
            continue
        seen = node.args[0]
        product = seen.args[0] if seen.target is aten.view.default else seen
        if product.target is not aten.bmm.default or len(seen.users) > 1 or len(product.users) > 1:
            continue
        with graph.inserting_before(node):
            left, right = (_call(graph, aten.permute.default, factor, [0, 2, 1]) for factor in reversed(product.args))
            turned = _call(graph, aten.bmm.default, left, right)
            node.replace_all_uses_with(_call(graph, aten.view.default, turned, list(node.meta["val"].shape)))
        graph.erase_node(node)
        for unused in (seen, product) if seen is not product else (product,):
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
