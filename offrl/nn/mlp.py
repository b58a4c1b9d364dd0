"""Multi-layer perceptrons, and modules called with parameters that are handed in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from offrl import rng


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation, which is JAX's default."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "tanh": torch.tanh,
    "mish": F.mish,
    "elu": F.elu,
}


INITS = (
    "torch", "orthogonal", "fixed_bias", "small_head", "truncated", "zero", "gpt", "xavier", "xavier_relu", "isometric",
    "lecun",
)  # fmt: skip


def initialise(weight: Tensor, bias: Tensor | None, init: str, *, head: bool = False, actor: bool = False) -> None:
    """Fill one [out, in] weight and its [out] bias in place; `head`: it is an output layer, `actor`: of a policy.

    "torch": both uniform in +-1/sqrt(in), as nn.Linear. "orthogonal": gain sqrt(2), bias 0 (jaxrl's networks).
    "fixed_bias": hidden weights as "torch" with biases of 0.1, output layers uniform in +-0.003, of a policy +-0.001
    (SAC-N, EDAC and ReBRAC's code). "small_head": critics orthogonal with an output layer of gain 0.01, policies as
    "torch" with an output layer by Xavier of gain 0.01 (CQL's code). "truncated": normal with standard deviation bound
    / 2, cut off at twice that, biases 0 (PETS' code). "zero": both 0. "gpt": normal with standard deviation 0.02,
    biases 0 (GPT-2's code). "xavier": uniform in +-sqrt(6 / (in + out)), an actor's output layer in a tenth of it,
    biases 0 (OGBench's code). "xavier_relu": uniform in sqrt(2) of that in all layers, biases 0 (MR.Q's
    code). "isometric": orthogonal with gain 1, biases 0 (DTQL's policy). "lecun": normal with standard deviation
    1/sqrt(in) once it is cut off at twice that of before, biases 0 (flax's).
    """
    if init not in INITS:
        raise ValueError(f"init is {init!r}; it must be one of {', '.join(INITS)}")
    bound = weight.shape[-1] ** -0.5
    with torch.no_grad():
        if init == "torch" or (init == "small_head" and actor and not head):
            weight.uniform_(-bound, bound)
            if bias is not None:
                bias.uniform_(-bound, bound)
            return
        if init == "fixed_bias" and head:
            edge = 1e-3 if actor else 3e-3
            weight.uniform_(-edge, edge)
            if bias is not None:
                bias.uniform_(-edge, edge)
            return
        if bias is not None:
            bias.fill_(0.1 if init == "fixed_bias" else 0.0)
        if init == "fixed_bias":
            weight.uniform_(-bound, bound)
        elif init == "gpt":
            weight.normal_(0.0, 0.02)
        elif init == "xavier":
            nn.init.xavier_uniform_(weight, 0.1 if head and actor else 1.0)
        elif init == "xavier_relu":
            nn.init.xavier_uniform_(weight, 2.0**0.5)
        elif init == "truncated":
            nn.init.trunc_normal_(weight, 0.0, 0.5 * bound, -bound, bound)
        elif init == "isometric":
            nn.init.orthogonal_(weight)
        elif init == "lecun":
            std = bound / 0.87962566  # the deviation that is left of 1
            nn.init.trunc_normal_(weight, 0.0, std, -2.0 * std, 2.0 * std)
        elif init == "orthogonal" or (init == "small_head" and not actor):
            nn.init.orthogonal_(weight, 0.01 if head and init == "small_head" else 2.0**0.5)
        elif init == "small_head":
            nn.init.xavier_uniform_(weight, 0.01)
        else:
            weight.zero_()


class Linear(nn.Module):
    """y = x W^T + b; x [..., in] -> [..., out]."""

    def __init__(
        self, in_dim: int, out_dim: int, init: str = "torch", *, head: bool = False, actor: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_dim, in_dim))
        self.bias = nn.Parameter(torch.empty(out_dim))
        initialise(self.weight, self.bias, init, head=head, actor=actor)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def dropout(x: Tensor, rate: float, key: Tensor) -> Tensor:
    """Zero a share `rate` of the entries and scale the rest, with noise from a key instead of hidden global state."""
    mask = rng.uniform(key, tuple(x.shape)) >= rate
    return torch.where(mask, x / (1.0 - rate), 0.0)


class Layers(nn.Module, ABC):
    """Hidden layers and a head, as `MLP` and `EnsembleMLP` make them. Each hidden layer is linear, activation,
    LayerNorm (with `layer_norm`), dropout (if a key is given).

    The order, LayerNorm after the activation, is ReBRAC's (arXiv 2305.09836); `norm_first`: before it, as in XQL's V.
    `affine=False`: it only normalises, as in MR.Q (arXiv 2501.16142).
    `residual`: a hidden layer as wide as the one before adds its input to its output. `layer_norm_epsilon` is added to
    the variance: 1e-5 is torch's, 1e-6 flax's. `dropout_first`: dropout is in the first layer alone, right after the
    linear map, as in TD-MPC2.
    """

    head: nn.Module

    def __init__(
        self,
        layers: Iterable[nn.Module],
        *,
        activation: str = "relu",
        layer_norm: bool = False,
        layer_norm_epsilon: float = 1e-5,
        norm_first: bool = False,
        affine: bool = True,
        residual: bool = False,
        dropout: float = 0.0,
        dropout_first: bool = False,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.activation = ACTIVATIONS[activation]
        self.layer_norm, self.epsilon, self.norm_first = layer_norm, layer_norm_epsilon, norm_first
        self.affine = layer_norm and affine
        self.residual, self.dropout, self.dropout_first = residual, dropout, dropout_first

    @abstractmethod
    def norm(self, i: int) -> tuple[Tensor, Tensor]:
        """What the normalised outputs of layer i are multiplied by, and what is added to them."""

    def forward(self, x: Any, key: Tensor | None = None) -> Tensor:
        """x [..., in_dim] -> [..., out_dim]. Dropout is on exactly when a key is given."""
        for i, layer in enumerate(self.layers):
            y = layer(x)
            if key is not None and self.dropout_first and i == 0:
                y = dropout(y, self.dropout, key)
            y = y if self.norm_first else self.activation(y)
            if self.layer_norm:
                # not nn.LayerNorm itself: under vmap and autocast to bfloat16 that fails (torch 2.13)
                y = F.layer_norm(y, y.shape[-1:], eps=self.epsilon)
            if self.affine:
                scale, shift = self.norm(i)
                y = y * scale + shift
            y = self.activation(y) if self.norm_first else y
            if key is not None and self.dropout > 0.0 and not self.dropout_first:
                y = dropout(y, self.dropout, rng.fold_in(key, i))
            x = x + y if self.residual and i > 0 and x.shape[-1] == y.shape[-1] else y
        return self.head(x)


class MLP(Layers):
    """in_dim -> hidden... -> out_dim. form: see `Layers`. `actor`: the network is a policy's (matters for `init`
    only)."""

    head: Linear

    def __init__(
        self,
        in_dim: int,
        hidden: Sequence[int],
        out_dim: int,
        *,
        init: str = "torch",
        actor: bool = False,
        **form: Any,
    ) -> None:
        sizes = [in_dim, *hidden]
        super().__init__((Linear(i, o, init, actor=actor) for i, o in pairwise(sizes)), **form)
        self.norms = nn.ModuleList(nn.LayerNorm(o, self.epsilon) for o in sizes[1:]) if self.affine else None
        self.head = Linear(sizes[-1], out_dim, init, head=True, actor=actor)

    def norm(self, i: int) -> tuple[Tensor, Tensor]:
        norm = cast(nn.LayerNorm, cast(nn.ModuleList, self.norms)[i])
        return norm.weight, norm.bias


Places = dict[str, tuple[dict[str, Any], str]]
_places: WeakKeyDictionary[nn.Module, Places] = WeakKeyDictionary()


def call(module: nn.Module, params: Mapping[str, Tensor], *x: Any) -> Any:
    """`module(*x)` with `params` by name in place of its own, as `torch.func.functional_call` does it, in a fifth of
    its time.

    What looks every name up at each call is kept here for each module: its submodules and the names of their parameters
    must stay as they are. Compiled, the two are the same. A module whose parameters have two names (tied weights) is
    left to torch.
    """
    # before `_places` is read: the compiler would check its entries, which come and go
    if torch.compiler.is_compiling():
        return functional_call(module, dict(params), x)
    locations = _places.get(module)
    if locations is None:
        locations = _places[module] = _find(module)
    if not locations or not params.keys() <= locations.keys():
        return functional_call(module, dict(params), x)
    replacements = [(*locations[name], value) for name, value in params.items()]
    before = [owner[name] for owner, name, _ in replacements]
    try:
        for owner, name, value in replacements:
            owner[name] = value
        return module(*x)
    finally:
        for (owner, name, _), value in zip(replacements, before, strict=True):
            owner[name] = value


def _find(module: nn.Module) -> Places:
    """Where each parameter is held; empty where one has two names."""
    tied = len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.named_parameters()))
    submodules = [] if tied else module.named_modules()
    return {
        f"{path}.{name}" if path else name: (owner._parameters, name)
        for path, owner in submodules
        for name in owner._parameters
    }
