"""WSRL in JAX: Cal-QL with many critics on data, and soft actor-critic with several updates of the critics for one of
the policy in an environment.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.families.conservative import SoftMaximum
from offrl.families.sac import LogWeight
from parity.common import (
    ACTION,
    BATCH,
    OBSERVATION,
    Ours,
    Outcome,
    batches,
    case,
    draws,
    imported,
    pattern,
    shared_noise,
)
from parity.corl import split_head
from parity.flax_nets import compared, dense, jax_float64, replaced
from parity.jax_actor_critics import ensemble

WSRL, COMMIT = "zhouzypaul/wsrl", "891ee353afe5303835da421c60d4ac35f6e2ef10"
NEEDS = ("jax", "flax", "optax", "distrax", "chex", "ml_collections", "overrides")
CRITICS, DRAWN, ACTIONS, PARTS = 4, 2, 4, 4
# keys of draws that ours do not make by themselves
PENALTY, OWN = torch.tensor(-1), torch.tensor(-2)
ALIGNED = (
    "each critic has a last layer of its own; Adam's epsilon of the critics, a mean there; alpha is a softplus, with "
    "its loss; critics are drawn without replacement"
)
REMAINS = (
    "the critics share their last layer there; alpha is a logarithm here; critics are drawn with replacement there; "
    "the last hidden layer begins 100 times smaller there"
)


def subset() -> list[int]:
    """The critics of a draw; ours are those of the largest uniform numbers."""
    return torch.as_tensor(draws.theirs((CRITICS,), "uniform")).topk(DRAWN).indices.tolist()


@contextlib.contextmanager
def their_draws(rows: Sequence[int]) -> Iterator[None]:
    """Run eagerly, so that every call draws; subsets of critics without replacement; noise for a whole batch in the
    order of its rows there, which are ours at `rows`, and uniform actions [B, M, A] as ours [M, B, A].
    """
    import jax

    def normal(key: Any, shape: Sequence[int], dtype: Any = None) -> Any:
        noise = draws.theirs(shape)
        return jax.numpy.asarray(noise[..., list(rows), :] if shape[-2] == len(rows) else noise)

    def uniform(key: Any, shape: Sequence[int], minval: float = 0.0, maxval: float = 1.0) -> Any:
        noise = pattern((shape[1], shape[0], shape[2]), "uniform").transpose(1, 0, 2)  # the only draw of this kind
        return minval + (maxval - minval) * jax.numpy.asarray(noise)

    with (
        jax.disable_jit(),
        mock.patch.object(jax.random, "randint", lambda *_: jax.numpy.asarray(subset())),
        mock.patch.object(jax.random, "normal", normal),
        mock.patch.object(jax.random, "uniform", uniform),
    ):
        yield


@contextlib.contextmanager
def softplus_weight(ours: Ours) -> Iterator[None]:
    """Our weight of the entropy as a softplus, with the authors' loss."""

    def entropy_loss(entropy: Any, state: Any, negative_entropy: Tensor) -> Any:
        weight = F.softplus(entropy["log"])
        return -(weight * (negative_entropy + ours.algorithm.target_entropy)).mean(), {"entropy/weight": weight}

    ours.algorithm.entropy_loss = entropy_loss
    ours.state.params["entropy"]["log"].copy_(torch.tensor(math.log(math.e - 1.0)))
    with mock.patch.object(LogWeight, "forward", lambda self: F.softplus(self.log)):
        yield


def own_heads(module: Any) -> contextlib.AbstractContextManager[Any]:
    """Let agents of a module have critics that share no layer."""
    separate = partial(module.ensemblize(module.Critic, CRITICS))
    return mock.patch.multiple(module, Critic=separate, ensemblize=lambda network, size: network)


def weights(ours: Ours) -> dict[str, np.ndarray]:
    """Our parameters by the paths of the reference's."""
    params, actor, critic = ours.state.params, "modules_actor/", "modules_critic/"
    hidden = [f"network/Dense_{i}" for i in range(2)]
    result = dense(split_head(ours.mlp("actor")), [actor + x for x in (*hidden, "Dense_0", "Dense_1")])
    for i in range(2):
        for name, path in (("weight", "scale"), ("bias", "bias")):
            result[f"{actor}network/LayerNorm_{i}/{path}"] = params["actor"][f"net.norms.{i}.{name}"].numpy()
    result |= ensemble(
        ours, [critic + x for x in (*hidden, "Dense_0")], [f"{critic}network/LayerNorm_{i}" for i in range(2)]
    )
    return {**result, "modules_temperature/lagrange": params["entropy"]["log"].numpy()}


def made(kind: Any, module: Any, config: Any, ours: Ours) -> Any:
    """An agent of the reference with our weights, and Adam's epsilon of a sum over critics."""
    import jax
    import optax

    with own_heads(module):
        agent = kind.create(
            jax.random.PRNGKey(0), np.zeros((1, OBSERVATION)), np.zeros((1, ACTION)), encoder_def=None, **config
        )
    params = replaced(agent.state.params, weights(ours))
    txs = {
        "actor": optax.adam(1e-4),
        "critic": optax.adam(3e-4, eps=1e-8 / CRITICS),
        "temperature": optax.adam(1e-4),
    }
    opt_states = {name: adam.init(params) for name, adam in txs.items()}
    return agent.replace(state=agent.state.replace(params=params, target_params=params, txs=txs, opt_states=opt_states))


@case(
    "wsrl",
    WSRL,
    COMMIT,
    aligned=f"{ALIGNED}; the penalty of two drawn critics; alpha's loss has several actions at s'",
    remains=f"{REMAINS}; the penalty is of all critics here, of two drawn ones there; alpha's loss has the actor's "
    "draw at s here, draws of its own at s' there",
    needs=NEEDS,
)
def on_data(checkout: Path) -> Outcome:
    ours, outcome = Ours("wsrl", critics=CRITICS, actions=ACTIONS, max_target_actions=ACTIONS), Outcome()
    algorithm, weighted, at_once = ours.algorithm, ours.algorithm.weighted, ours.algorithm.update

    def of_two(state: Any, soft: SoftMaximum) -> Any:
        chosen = torch.as_tensor(draws.ours(PENALTY, (CRITICS,), "uniform")).topk(DRAWN).indices
        loss, metrics = weighted(state, SoftMaximum(soft.logsumexp_q[chosen], soft.q_data[chosen], soft.q))
        return loss * CRITICS / DRAWN, metrics

    def update(state: Any, batch: Any, key: Tensor, *, phase: int) -> Any:
        def at_next(actor: Any, *_: Any) -> Tensor:
            return algorithm.sample(actor, batch["next_observations"], OWN, ACTIONS)[1]

        with mock.patch.object(algorithm, "negative_entropy", at_next):
            return at_once(state, batch, key, phase=phase)

    algorithm.weighted, algorithm.update = of_two, update
    with (
        jax_float64(),
        imported(checkout, "experiments.configs.train_config") as settings,
        imported(checkout, "experiments.configs.ensemble_config") as larger,
        imported(checkout, "wsrl.agents.cql") as module,
        imported(checkout, "wsrl.agents.calql") as code,
        softplus_weight(ours),
    ):
        config = larger.add_redq_config(settings.get_config("locomotion_cql")["agent_kwargs"])
        config.update({"critic_ensemble_size": CRITICS, "cql_n_actions": ACTIONS})
        agent = made(code.CalQLAgent, module, config, ours)
        # ours draw first for alpha's loss, the reference last
        order = {ACTIONS * BATCH * ACTION: (1, 2, 3, 0)}
        for batch in batches(returns_to_go=lambda g: g.normal(size=BATCH)):
            with shared_noise(order), their_draws(range(BATCH)):
                losses = ours.update(batch)
                agent, expected = agent.update({**batch, "mc_returns": batch["returns_to_go"]})
            penalty = CRITICS * 5.0 * float(expected["critic"]["cql_loss"])
            outcome.losses.append(
                {
                    "critic": (losses["critic/loss"], CRITICS * float(expected["critic"]["td_loss"])),
                    "penalty": (CRITICS / DRAWN * losses["cql/penalty"], penalty),
                    "actor": (losses["actor/loss"], float(expected["actor"]["actor_loss"])),
                    "alpha": (losses["entropy/weight"], float(expected["actor"]["temperature"])),
                }
            )
        outcome.parameters = compared("wsrl", weights(ours), agent.state.params)
    return outcome


def only_those_updated(module: Any) -> contextlib.AbstractContextManager[Any]:
    """Let a network whose loss is left out of an update of the reference stay where it is: there Adam goes on by its
    momentum.
    """
    original = module.JaxRLTrainState.apply_loss_fns

    def apply(self: Any, losses: Any, **options: Any) -> Any:
        after, metrics = original(self, losses, **options)
        names = [name for name, loss in losses.items() if isinstance(loss, partial)]
        params = {k: after.params[k] if k.removeprefix("modules_") in names else v for k, v in self.params.items()}
        opt_states = {k: after.opt_states[k] if k in names else v for k, v in self.opt_states.items()}
        return after.replace(params=type(self.params)(params), opt_states=opt_states), metrics

    return mock.patch.object(module.JaxRLTrainState, "apply_loss_fns", apply)


@case(
    "wsrl, in an environment",
    WSRL,
    COMMIT,
    aligned=f"{ALIGNED}; a network moves in its own updates alone; which rows are a part",
    remains=f"{REMAINS}; networks move on by Adam's momentum in the updates of others there, the policy 2.2 times as "
    "far in all; a part is every fourth row here, a quarter in a row there",
    needs=NEEDS,
)
def online(checkout: Path) -> Outcome:
    ours, outcome = (
        Ours("wsrl", critics=CRITICS, max_target_actions=1, conservative_weight=0.0, utd_split=PARTS),
        Outcome(),
    )
    rows = np.arange(BATCH).reshape(-1, PARTS).T.reshape(-1)  # of our parts, one after the other
    with (
        jax_float64(),
        imported(checkout, "experiments.configs.train_config") as settings,
        imported(checkout, "wsrl.agents.sac") as module,
        only_those_updated(module),
        softplus_weight(ours),
    ):
        config = settings.get_config("locomotion_wsrl")["agent_kwargs"]
        config.update({"critic_ensemble_size": CRITICS})
        agent = made(module.SACAgent, module, config, ours)
        # ours draw first for alpha's loss, the reference last
        order = {BATCH * ACTION: (1, 0)}
        for batch in batches():
            with shared_noise(order), their_draws(rows):
                losses = ours.update(batch)
                theirs = {name: column[rows] for name, column in batch.items()}
                agent, expected = agent.update_high_utd(theirs, utd_ratio=PARTS)
            outcome.losses.append(
                {
                    "critic": (losses["critic/loss"], CRITICS * float(expected["critic"]["critic_loss"])),
                    "actor": (losses["actor/loss"], float(expected["actor"]["actor_loss"])),
                    "alpha": (losses["entropy/weight"], float(expected["actor"]["temperature"])),
                }
            )
        outcome.parameters = compared("wsrl", weights(ours), agent.state.params)
        ours.state = ours.state._replace(params={**ours.state.params, "critic": ours.state.target["critic"]})
        targets = {k: v for k, v in weights(ours).items() if "critic" in k}
        outcome.parameters |= compared("target", targets, agent.state.target_params)
    return outcome
