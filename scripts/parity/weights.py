"""The same parameters on both sides, and the GPT-2 of 2021 that several references bring."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from parity.common import Ours

# (name of our tensor, the part of it that is the reference's, the reference's tensor)
Pair = tuple[str, Callable[[Tensor], Tensor], Tensor]


def linear(name: str, module: Any, rows: slice = slice(None)) -> list[Pair]:
    """Weight and bias of a linear layer, or of transformers' Conv1D, which is transposed. rows: the part of our
    outputs.
    """
    transposed = not isinstance(module, nn.Linear)
    weight: Pair = (f"{name}.weight", lambda w: w[rows].T if transposed else w[rows], module.weight)
    return [weight] if module.bias is None else [weight, (f"{name}.bias", lambda b: b[rows], module.bias)]


def norm(name: str, module: Any) -> list[Pair]:
    """Weight and bias of a layer normalisation."""
    return [(f"{name}.weight", lambda w: w, module.weight), (f"{name}.bias", lambda b: b, module.bias)]


def table(name: str, module: nn.Embedding) -> list[Pair]:
    """An embedding; the reference may have more rows."""
    return [(f"{name}.weight", lambda w: w, module.weight[: len(module.weight)])]


def scramble(ours: Ours, network: str) -> None:
    """Move our parameters away from their small initial values, so that each of them counts."""
    params = ours.state.params[network]
    for i, name in enumerate(sorted(params)):
        params[name].add_(0.2 * torch.as_tensor(np.random.default_rng(i).normal(size=tuple(params[name].shape))))


def give(pairs: Iterable[Pair], params: Mapping[str, Tensor]) -> None:
    """Give the reference our parameters."""
    with torch.no_grad():
        for name, view, tensor in pairs:
            tensor.copy_(view(params[name]))


def compared(pairs: Iterable[Pair], params: Mapping[str, Tensor]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Parameters of both sides for `Outcome.parameters`."""
    return {
        f"{name}/{i}": (view(params[name]).detach().numpy(), tensor.detach().numpy())
        for i, (name, view, tensor) in enumerate(pairs)
    }


def optimizer(parameters: Iterable[Tensor]) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW and the warm-up of DT's code and its descendants'."""
    adam = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=1e-4)
    return adam, torch.optim.lr_scheduler.LambdaLR(adam, lambda steps: min((steps + 1) / 3, 1))


@contextlib.contextmanager
def stubs(modules: Mapping[str, ModuleType]) -> Iterator[None]:
    """Inside, these modules are imported by these names. Others that are imported meanwhile stay."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def packages(checkout: Path, *names: str) -> dict[str, ModuleType]:
    """Packages of a checkout without what their own files import, for `stubs`: their modules can then be imported
    alone.
    """
    made = {}
    for name in names:
        made[name] = ModuleType(name)
        made[name].__path__ = [str(checkout / name.replace(".", "/"))]
    return made


class OldModel(nn.Module):
    """What GPT2Model of DT's code needs of the base class that transformers had in 2021."""

    def __init__(self, config: Any, *_: Any, **__: Any) -> None:
        super().__init__()
        self.config, self.dtype = config, torch.float64

    def init_weights(self) -> None:
        """The comparison sets them."""

    post_init = init_weights

    def resize_token_embeddings(self, _: int) -> None:
        """They are as many as they are to be."""

    def get_head_mask(self, mask: Any, layers: int) -> list[None]:
        return [None] * layers


@contextlib.contextmanager
def old_transformers() -> Iterator[None]:
    """Inside, transformers has the names of 2021 that the GPT-2 of DT's and Meta-DT's code imports."""
    import transformers
    from transformers.modeling_utils import PreTrainedModel
    from transformers.pytorch_utils import Conv1D

    def decorate(*_: Any, **__: Any) -> Callable[[Any], Any]:
        return lambda function: function

    modules = {name: ModuleType(name) for name in ("file_utils", "utils.model_parallel_utils", "modeling_utils")}
    for name in (
        "add_code_sample_docstrings",
        "add_start_docstrings",
        "add_start_docstrings_to_model_forward",
        "replace_return_docstrings",
    ):
        setattr(modules["file_utils"], name, decorate)
    modules["file_utils"].ModelOutput = transformers.utils.ModelOutput  # type: ignore[attr-defined]
    for name in ("SequenceSummary", "find_pruneable_heads_and_indices", "prune_conv1d_layer"):
        setattr(modules["modeling_utils"], name, None)
    for name in ("assert_device_map", "get_device_map"):
        setattr(modules["utils.model_parallel_utils"], name, None)
    assert PreTrainedModel is not None
    modules["modeling_utils"].Conv1D = Conv1D  # type: ignore[attr-defined]
    modules["modeling_utils"].PreTrainedModel = OldModel  # type: ignore[attr-defined]
    with stubs({f"transformers.{name}": module for name, module in modules.items()}):
        yield


def gpt2_blocks(prefix: str, net: Any) -> list[Pair]:
    """The layers of a GPT2Model."""
    pairs = norm(f"{prefix}.norm", net.ln_f)
    for i, block in enumerate(net.h):
        at = f"{prefix}.blocks.{i}"
        pairs += linear(f"{at}.qkv", block.attn.c_attn) + linear(f"{at}.out", block.attn.c_proj)
        pairs += linear(f"{at}.up", block.mlp.c_fc) + linear(f"{at}.down", block.mlp.c_proj)
        pairs += norm(f"{at}.norm1", block.ln_1) + norm(f"{at}.norm2", block.ln_2)
    return pairs
