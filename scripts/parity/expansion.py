"""PEX's authors' code (Haichao-Zhang/PEX)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from offrl import rng
from offrl.nn.policies import Gaussian
from parity.common import (
    ACTION,
    OBSERVATION,
    Ours,
    Outcome,
    batches,
    case,
    draws,
    fill,
    imported,
    linears,
    pair_layers,
    shared_noise,
    tensors,
)
from parity.corl import fill_critics, pair, pair_critics

PEX, COMMIT = "Haichao-Zhang/PEX", "b0ae11e17e5fd9ae38840748ce043aff895e952b"


@contextlib.contextmanager
def same_choices() -> Iterator[None]:
    """Our samples are not clipped, and one of two actions is drawn by the same Gumbel noise on both sides."""

    def gumbel(uniform: Any) -> Tensor:
        return -(-torch.as_tensor(uniform).log()).log()

    def categorical(self: Any, shape: Any = ()) -> Tensor:
        return (self.logits + gumbel(draws.theirs(self.logits.shape, "uniform"))).argmax(-1)

    def sample(self: Gaussian, dist: tuple[Tensor, ...], key: Tensor) -> Tensor:
        mean, log_std = dist
        return mean + log_std.exp() * draws.ours(key, mean.shape)

    with (
        mock.patch.object(rng, "gumbel", lambda key, shape: gumbel(draws.ours(key, shape, "uniform"))),
        mock.patch.object(torch.distributions.Categorical, "sample", categorical),
        mock.patch.object(Gaussian, "sample", sample),
    ):
        yield


@case(
    "pex",
    PEX,
    COMMIT,
    aligned="terminals in float64; samples of actions are not clipped; Adam's epsilon of the critics halved there",
    remains="samples are clipped here; the critics' loss is a mean there, a sum here; scores are greedy here, with "
    "draws in a tenth of the states there",
)
def pex(checkout: Path) -> Outcome:
    ours = Ours("pex", temperature=10.0, expectile=0.7, actor_schedule="constant")
    ours.state = ours.state.with_extra(old={k: v.double() for k, v in ours.algorithm.init(1).params["actor"].items()})
    outcome = Outcome()
    with (
        imported(checkout, "pex.algorithms.pex", ("d4rl", "gym")) as module,
        imported(checkout, "pex.networks.policy", ("d4rl", "gym")) as policies,
        imported(checkout, "pex.networks.value_functions", ("d4rl", "gym")) as values,
    ):
        critic, vf = values.DoubleCriticNetwork(OBSERVATION, ACTION), values.ValueNetwork(OBSERVATION)
        policy = policies.GaussianPolicy(OBSERVATION, ACTION, 256)
        networks = [network.double() for network in (critic, vf, policy)]
        fill(linears(policy), ours.mlp("actor"))
        fill(linears(vf), ours.mlp("value"))
        fill_critics(ours, critic.q1, critic.q2)
        reference = module.PEX(
            *networks,
            optimizer_ctor=lambda parameters: torch.optim.Adam(parameters, lr=3e-4),
            tau=0.7,
            beta=10.0,
            discount=0.99,
            target_update_rate=0.005,
            ckpt_path=None,
            inv_temperature=10.0,
        )
    reference.q_optimizer.param_groups[0]["eps"] = 1e-8 / 2
    fill(linears(reference.policy_offline), ours.mlp_of(ours.state.extra["old"]))
    backward, names = Tensor.backward, ("value/loss", "critic/loss", "actor/loss")
    for batch in batches():
        b, expected = tensors(batch), []

        def recorded(loss: Tensor, expected: list[float] = expected) -> None:
            expected.append(loss.item())
            backward(loss)

        with shared_noise(), same_choices():
            losses = ours.update(batch)
            # terminals are made float32 there
            with mock.patch.object(Tensor, "backward", recorded), mock.patch.object(Tensor, "float", Tensor.double):
                reference.update(b["observations"], b["actions"], b["next_observations"], b["rewards"], 1 - b["masks"])
        expected[1] *= 2  # the mean over two critics there
        outcome.losses.append({name: (losses[name], loss) for name, loss in zip(names, expected, strict=True)})
    outcome.parameters |= pair_layers("actor", ours.mlp("actor"), linears(policy))
    outcome.parameters |= pair_layers("value", ours.mlp("value"), linears(vf)) | pair_critics(
        ours, critic.q1, critic.q2
    )
    outcome.parameters["std"] = pair(ours.state.params["actor"]["log_std"], policy.log_std)
    return outcome
