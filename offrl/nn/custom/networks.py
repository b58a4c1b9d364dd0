"""Networks of a user's own in place of the multi-layer perceptrons: `algo.actor_network=` and
`algo.critic_network=`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from offrl import registry
from offrl.errors import UserError
from offrl.nn.ensemble import EnsembleMLP, Pairs
from offrl.nn.mlp import MLP
from offrl.settings.field import setting
from offrl.system.plugins.loading import object_of

SETTINGS = ("actor_network", "critic_network")


def _network_setting(whose: str) -> Any:
    """The setting for a network of one's own. whose: "the policy's", for its help."""
    return setting(
        None,
        f"{whose} network in place of layers of `hidden`: file.py:NAME, a function of (inputs, outputs), or a "
        "registered one",
    )


@dataclass
class ActorNetworkSettings:
    """The setting of algorithms whose policy may be a network of one's own."""

    actor_network: str | None = _network_setting("the policy's")


@dataclass
class NetworkSettings(ActorNetworkSettings):
    """Those of algorithms with critics besides."""

    critic_network: str | None = _network_setting("each critic's")


def factories(config: Any) -> dict[str, Any]:
    """{setting: the function or class that it names}, of those that are set. Raises UserError."""
    values = {name: getattr(config, name, None) for name in SETTINGS}
    return {k: object_of(v, f"algo.{k}") if ".py:" in v else registry.get("network", v) for k, v in values.items() if v}


def with_own_networks(config: Any, modules: dict[str, nn.Module]) -> dict[str, nn.Module]:
    """An algorithm's modules, with the networks that its settings name inside. Raises UserError for those that do not
    fit.
    """
    for name, factory in factories(config).items():
        where = f"algo.{name}={getattr(config, name)}"
        module = modules.get(name.removesuffix("_network"))
        if name == "actor_network":
            net = getattr(module, "net", None)
            if not isinstance(net, MLP):
                raise UserError(
                    f"{where}: the policy of {config.name} is no multi-layer perceptron, and has no place for it"
                )
            if getattr(config, "dropout", 0.0):
                raise UserError(f"{where}: dropout= is of the layers that it replaces; leave it out")
            module.net = OwnNetwork(_made(factory, _first(net).shape[1], net.head.weight.shape[0], where))  # type: ignore[union-attr]
        elif not isinstance(module, EnsembleMLP):
            raise UserError(
                f"{where}: the critics of {config.name} are no multi-layer perceptrons, and have no place for it"
            )
        elif config.spectral_norm or config.critic_dropout:
            raise UserError(
                f"{where}: spectral_norm= and critic_dropout= are of the layers that it replaces; leave them out"
            )
        else:
            size, inputs, outputs = module.head.weight.shape[0], _first(module).shape[1], module.head.weight.shape[2]
            module.replace(OwnEnsemble([_made(factory, inputs, outputs, where) for _ in range(size)]))
    return modules


class OwnNetwork(nn.Module):
    """A user's module, called as an `MLP` is."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, key: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out]."""
        return self.module(x)


class OwnEnsemble(nn.Module):
    """E modules of one kind, evaluated together; their parameters are stacked [E, ...] under names in which "/" stands
    for a dot.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.names = {name.replace(".", "/"): name for name, _ in members[0].named_parameters()}
        for key, name in self.names.items():
            self.register_parameter(
                key, nn.Parameter(torch.stack([dict(m.named_parameters())[name].detach() for m in members]))
            )
        self.template = (members[0],)  # in a tuple: its own parameters are none of this module's

    def forward(self, x: Tensor | Pairs, key: Tensor | None = None) -> Tensor:
        """As `EnsembleMLP`."""
        if isinstance(x, Pairs):
            x = torch.cat([x.states.expand(x.actions.shape[0], *x.states.shape), x.actions], -1).flatten(0, 1)
        params = {name: getattr(self, key) for key, name in self.names.items()}

        def member(parameters: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
            return functional_call(self.template[0], dict(parameters), (inputs,))

        return vmap(member, in_dims=(0, 0 if x.ndim == 3 else None))(params, x)


def _first(module: MLP | EnsembleMLP) -> Tensor:
    """The weight that the inputs meet, [out, in] or [E, in, out]."""
    return module.layers[0].weight if len(module.layers) else module.head.weight  # type: ignore[return-value]


def _made(factory: Any, inputs: int, outputs: int, where: str) -> nn.Module:
    module = factory(inputs, outputs)
    if not isinstance(module, nn.Module):
        raise UserError(f"{where} made a {type(module).__name__} of ({inputs}, {outputs}); a torch.nn.Module is due")
    if names := [name for name, _ in module.named_buffers()]:
        raise UserError(
            f"{where}: its module has the buffer {names[0]} (as BatchNorm has); updates are pure, so only parameters "
            "may change"
        )
    shape = tuple(module(torch.zeros(2, inputs)).shape)
    if shape != (2, outputs):
        raise UserError(f"{where} turns an input [2, {inputs}] into {list(shape)}; [2, {outputs}] is due")
    return module
