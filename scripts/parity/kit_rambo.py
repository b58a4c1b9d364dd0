"""OfflineRL-Kit's RAMBO (yihaosun1124/OfflineRL-Kit): the policy's update, and the model's against the policy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from offrl.families.sac import SoftActorCritic
from offrl.world_models.model_rollouts import ModelSource
from parity.align import CRITICS_FIRST, steps_in_order, tanh_epsilon
from parity.common import BATCH, OBSERVATION, Ours, Outcome, batches, case, draws, pattern, shared_noise
from parity.corl import adam
from parity.offlinerl_kit import (
    COMMIT,
    HIDDEN,
    KIT,
    MEMBERS,
    ORDER,
    SMALL,
    TANH,
    actor_critic_losses,
    actor_critics,
    halves,
    kit,
    learnt_alpha,
    pair_models,
    parameters,
    reference_model,
    unmixed,
    world,
)

SPREAD = "advantages' standard deviation (n - 1 there, n here)"


@contextlib.contextmanager
def same_draws(ours: Ours, network: Any) -> Iterator[None]:
    """The same member for each row and the same noise on both sides; the reference's standard deviation divides by
    n.
    """
    member = np.where(pattern((BATCH,), "uniform") < 0.5, 2, 0)
    deviation = Tensor.std

    def normal(mean: Tensor, std: Tensor) -> Tensor:
        return mean + std * torch.as_tensor(draws.theirs((1, *mean.shape[1:])))

    with (
        mock.patch.object(network, "random_elite_idxs", lambda count: member),
        mock.patch.object(
            ours.algorithm.runtime.source.model, "elite", lambda tree, key, count: torch.as_tensor(member)
        ),
        mock.patch.object(torch, "normal", normal),
        mock.patch.object(Tensor, "std", lambda x, *a, **_: deviation(x, *a, unbiased=False)),
    ):
        yield


@case("rambo", KIT, COMMIT, aligned=f"{TANH}; {ORDER}; {SPREAD}", remains=f"{TANH}: ours is exact; {ORDER}; {SPREAD}; "
                                                                          "the model's updates "
      "come one after each of the policy's here, 1,000 after 1,000 there")  # fmt: skip
def rambo(checkout: Path) -> Outcome:
    weight, rate = 0.5, 3e-4
    settings = {**SMALL, "horizon": 100, "world_model_shape": [MEMBERS, 1, 0, *HIDDEN], "adversarial_weight": weight}
    ours = Ours("rambo", entropy_learning_rate=1e-4, real_share=0.5, **settings)
    outcome, (model, tree) = Outcome(), world(ours)
    algorithm, state = ours.algorithm, ours.state
    algorithm.runtime.source = ModelSource(
        None, model, tree, None, None, {"decay": torch.tensor(model.config.weight_decay)}
    )  # type: ignore[arg-type]
    state.params["dynamics"].update({k: v.clone() for k, v in tree["params"].items()})
    start = torch.as_tensor(pattern((BATCH, OBSERVATION)))
    state.extra["imagined"]["observations"] = start
    algorithm.moments = lambda tree, raw: (raw.mean, (0.5 * raw.log_var).exp())  # ours are cast to float32
    algorithm.rollouts.starts = lambda source, key, count: (start, model.first_past(start))
    observations = start.numpy()
    with kit(checkout) as k:
        actor, critics = actor_critics(k, ours, [256, 256])
        target, log_alpha, optimiser = learnt_alpha()
        dynamics = reference_model(k, model, tree, rate)
        reference = k.policy.RAMBOPolicy(
            dynamics, actor, *critics, adam(actor, rate=1e-4), adam(critics[0]), adam(critics[1]), dynamics.optim,
            alpha=(target, log_alpha, optimiser), adv_weight=weight,
        )  # fmt: skip
        unmixed(ours)
        update = mock.patch.object(
            SoftActorCritic, "update", lambda self, *a, **b: steps_in_order(self, "cae")(*a, **b)
        )
        for batch, real in zip(batches(), batches(seed=1), strict=True):
            following = real["next_observations"] - real["observations"]
            rows = {
                "inputs": torch.as_tensor(np.concatenate([real["observations"], real["actions"]], -1)),
                "targets": torch.as_tensor(np.concatenate([following, real["rewards"][:, None]], -1)),
                "ending": torch.zeros(BATCH),
                "known": torch.ones(BATCH),
            }
            algorithm.real = lambda source, key, rows=rows: rows
            with shared_noise(CRITICS_FIRST), tanh_epsilon(), same_draws(ours, dynamics.model), update:
                losses, expected = ours.update(batch), reference.learn(halves(batch, BATCH // 2))
                columns = [torch.as_tensor(real[name]) for name in ("observations", "actions", "next_observations")]
                observations, _, info = reference.dynamics_step_and_forward(
                    observations,
                    reference.select_action(observations),
                    *columns,
                    torch.as_tensor(real["rewards"])[:, None],
                )
            pairs = {"model/loss": "all_loss", "model/adversarial": "adv_loss", "model/log_density": "adv_log_prob"}
            model_losses = {name: (losses[name], info[f"adv_dynamics_update/{other}"]) for name, other in pairs.items()}
            outcome.losses.append({**actor_critic_losses(losses, expected), **model_losses})
    outcome.parameters |= parameters(ours, actor, critics, log_alpha) | pair_models(
        ours.state.params["dynamics"], dynamics.model
    )
    return outcome
