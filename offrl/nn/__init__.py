"""Networks: MLPs, ensembles, policies and value heads. Ordinary modules of one replica; `vmap` adds the replica
axis.
"""

from offrl.nn.custom.networks import NetworkSettings
from offrl.nn.ensemble import EnsembleLinear, EnsembleMLP, Pairs
from offrl.nn.heads import BINNED, HEADS, Bootstrap, Scalar, ValueHead, make_head
from offrl.nn.mlp import MLP, Linear, call, initialise
from offrl.nn.policies import Categorical, Deterministic, Gaussian, Policy, TanhGaussian, make_policy
from offrl.nn.transformer import Transformer

__all__ = [
    "BINNED",
    "HEADS",
    "MLP",
    "Bootstrap",
    "Categorical",
    "Deterministic",
    "EnsembleLinear",
    "EnsembleMLP",
    "Gaussian",
    "Linear",
    "NetworkSettings",
    "Pairs",
    "Policy",
    "Scalar",
    "TanhGaussian",
    "Transformer",
    "ValueHead",
    "call",
    "initialise",
    "make_head",
    "make_policy",
]
