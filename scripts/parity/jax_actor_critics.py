"""Actor-critics in JAX: ReBRAC (CORL's file, which is its authors' code, and their own repository) and RLPD."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from offrl.nn.ensemble import EnsembleMLP
from parity.common import ACTION, BATCH, OBSERVATION, Ours, Outcome, batches, case, draws, imported, shared_noise
from parity.corl import COMMIT, CORL, split_head
from parity.flax_nets import NEEDS, compared, dense, flat, jax_float64, replaced

JAX = ("jax", "flax", "optax", "chex")
RLPD_ABSENT = ("gym", "d4rl", "rlpd.agents.drq", "rlpd.agents.drq.drq_learner", "rlpd.data", "rlpd.data.dataset")


def ensemble(ours: Ours, paths: list[str], norms: list[str]) -> dict[str, np.ndarray]:
    """Our critics under the paths of a vectorised flax module, members first; their LayerNorms under `norms`."""
    params, result = ours.state.params["critic"], {}
    names = [f"layers.{i}" for i in range(len(paths) - 1)] + ["head"]
    for name, path in zip(names, paths, strict=True):
        result |= {
            f"{path}/kernel": params[f"{name}.weight"].numpy(),
            f"{path}/bias": params[f"{name}.bias"].numpy()[:, 0],
        }
    for i, path in enumerate(norms):
        result |= {
            f"{path}/scale": params[f"scales.{i}"].numpy()[:, 0],
            f"{path}/bias": params[f"shifts.{i}"].numpy()[:, 0],
        }
    return result


def prefix_of(params: Any, ending: str) -> str:
    """What stands before `ending` in the paths of flax's parameters; vectorised modules have names of their own."""
    return next(path for path in flat(params) if path.endswith(ending)).removesuffix(ending)


def follow_old_actor(ours: Ours) -> None:
    """Let the actor's target move towards the actor of before its step."""
    update, polyak = ours.algorithm.update, ours.algorithm.config.polyak

    def lagging(state: Any, *inputs: Any, phase: int) -> Any:
        after, metrics = update(state, *inputs, phase=phase)
        if phase:
            old, target = state.params["actor"], state.target["actor"]
            moved = {k: (1 - polyak) * target[k] + polyak * old[k] for k in target}
            after = after._replace(target={**after.target, "actor": moved})
        return after, metrics

    ours.algorithm.update = lagging


def rebrac(checkout: Path, module: str) -> Outcome:
    ours, outcome = Ours("rebrac", actor_bc=0.1, critic_bc=0.3), Outcome()
    follow_old_actor(ours)
    import jax
    import optax

    with jax_float64(), imported(checkout, module, ("d4rl", "gym", "pyrallis", "wandb")) as code:
        adam, key = optax.adam(1e-3), jax.random.PRNGKey(0)
        states, actions = np.zeros((1, OBSERVATION)), np.zeros((1, ACTION))
        networks = {
            "actor": (code.DetActor(ACTION, 256, False, 3), (states,), code.ActorTrainState),
            "critic": (code.EnsembleCritic(256, 2, True, 3), (states, actions), code.CriticTrainState),
        }
        layers, trained = [f"Dense_{i}" for i in range(4)], {}
        body = ""

        def weights() -> dict[str, dict[str, np.ndarray]]:
            critic = ensemble(ours, [f"{body}{path}" for path in layers], [f"{body}LayerNorm_{i}" for i in range(3)])
            return {
                name: {f"params/{k}": v for k, v in x.items()}
                for name, x in (("actor", dense(ours.mlp("actor"), layers)), ("critic", critic))
            }

        for name, (network, inputs, kind) in networks.items():
            params = network.init(key, *inputs)
            if name == "critic":
                body = prefix_of(params, "Dense_0/kernel").removeprefix("params/")
            params = replaced(params, weights()[name])
            trained[name] = kind.create(apply_fn=network.apply, params=params, target_params=params, tx=adam)
        actor, critic = trained["actor"], trained["critic"]
        next_actions = {"next_actions": lambda g: g.uniform(-0.95, 0.95, (32, ACTION))}
        names = ["critic_loss", "q_min", "actor_loss", "bc_mse_policy", "bc_mse_random", "action_mse"]
        settings = {
            "gamma": 0.99,
            "actor_bc_coef": 0.1,
            "critic_bc_coef": 0.3,
            "tau": 0.005,
            "policy_noise": 0.2,
            "noise_clip": 0.5,
        }
        for i, batch in enumerate(batches(**next_actions)):
            rows = {
                "states": batch["observations"],
                "next_states": batch["next_observations"],
                "dones": 1 - batch["masks"],
            }
            rows |= {k: batch[k] for k in ("actions", "rewards", "next_actions")}
            metrics = code.Metrics.create(names)
            with shared_noise():
                losses = ours.update(batch)
            step, more = (code.update_td3, {"normalize_q": True}) if i % 2 else (code.update_td3_no_targets, {})
            key, actor, critic, metrics = step(key, actor, critic, rows, metrics=metrics, **settings, **more)
            expected = metrics.compute()
            pairs = {"critic": (losses["critic/loss"], float(expected["critic_loss"][0]))}
            if i % 2:
                pairs["actor"] = losses["actor/loss"], float(expected["actor_loss"][0])
            outcome.losses.append(pairs)
        for name, state in (("actor", actor), ("critic", critic)):
            outcome.parameters |= compared(name, weights()[name], state.params)
    target = [np.asarray(flat(actor.target_params)[f"params/{path}/kernel"]) for path in layers]
    own = [weight for weight, _ in ours.mlp_of(ours.state.target["actor"])]
    outcome.parameters |= {f"target{i}": pair for i, pair in enumerate(zip(own, target, strict=True))}
    return outcome


ALIGNED = "the actor's target follows the actor of before its step; actor's steps at odd updates"
REMAINS = "the actor's target follows the new actor here, as in TD3; its first step is at "\
    "update 0 there, 1 here"  # fmt: skip


@case("rebrac", CORL, COMMIT, aligned=ALIGNED, remains=REMAINS, needs=JAX)
def rebrac_corl(checkout: Path) -> Outcome:
    return rebrac(checkout, "algorithms.offline.rebrac")


def critic_norm_first(self: EnsembleMLP, x: Tensor, key: Tensor | None = None) -> Tensor:
    """Our critics with LayerNorm before the activation."""
    for i, layer in enumerate(self.layers):
        y = layer(x)
        x = self.activation(F.layer_norm(y, y.shape[-1:], eps=self.epsilon) * self.scales[i] + self.shifts[i])
    return self.head(x)  # type: ignore[no-any-return]


@contextlib.contextmanager
def same_draws(size: int, drawn: int) -> Iterator[None]:
    """The same random subset of target critics on both sides, and the noise of actions, which tfp draws transposed, as
    ours.
    """
    import jax

    def chosen() -> np.ndarray:
        return torch.as_tensor(draws.theirs((size,), "uniform")).topk(drawn).indices.numpy()

    with (
        mock.patch.object(jax.random, "choice", lambda *_, **__: jax.numpy.asarray(chosen())),
        mock.patch.object(
            jax.random, "normal", lambda key, shape, dtype=None: jax.numpy.asarray(draws.theirs(shape[::-1]).T)
        ),
    ):
        yield


@case(
    "rlpd",
    "ikostrikov/rlpd",
    "c90fd4baf28c9c9ef40a81460a2e395092844f88",
    aligned="LayerNorm before the activation; loss of alpha; Adam's epsilon of the critics, a mean there; which rows "
    "are a part of a batch",
    remains="these; the floor of the log-std is -20 there, -5 here; initial weights are Xavier's there, PyTorch's "
    "here; a part is every twentieth row here, rows in a row there",
    needs=NEEDS,
)
def rlpd(checkout: Path) -> Outcome:
    critics, drawn, parts = 4, 2, 2
    settings = {
        "utd_split": parts,
        "critics": critics,
        "target_critics": drawn,
        "layer_norm": True,
        "layer_norm_epsilon": 1e-6,
        "actor_value": "mean",
        "target_entropy_scale": 0.5,
    }
    ours, outcome = Ours("sac_n", hidden=[256, 256], init="torch", **settings), Outcome()

    def entropy_loss(entropy: Any, state: Any, negative_entropy: Tensor) -> Any:
        weight = entropy["log"].exp()
        return -(weight * (negative_entropy + ours.algorithm.target_entropy)).mean(), {"entropy/weight": weight}

    ours.algorithm.entropy_loss = entropy_loss
    descend, last = ours.algorithm.descend, {}

    def recorded(state: Any, name: str, *inputs: Any) -> Any:
        state, last[name] = descend(state, name, *inputs)
        return state, last[name]

    ours.algorithm.descend = recorded
    rows = np.arange(BATCH).reshape(-1, parts).T.reshape(-1)  # of our parts, one after the other
    import optax
    import tensorflow_probability.substrates.jax  # noqa: F401, which the reference takes for imported

    with jax_float64(), imported(checkout, "rlpd.agents.sac.sac_learner", RLPD_ABSENT) as code:
        spaces = [SimpleNamespace(sample=lambda n=n: np.zeros(n), shape=(n,)) for n in (OBSERVATION, ACTION)]
        agent = code.SACLearner.create(0, *spaces, num_qs=critics, num_min_qs=drawn, critic_layer_norm=True)
        body = prefix_of(agent.critic.params, "MLP_0/Dense_0/kernel")

        def weights() -> dict[str, dict[str, np.ndarray]]:
            actor = dense(
                split_head(ours.mlp("actor")),
                ["MLP_0/Dense_0", "MLP_0/Dense_1", "OutputDenseMean", "OutputDenseLogStd"],
            )
            layers = [f"{body}MLP_0/Dense_0", f"{body}MLP_0/Dense_1", f"{body}Dense_0"]
            critic = ensemble(ours, layers, [f"{body}MLP_0/LayerNorm_{i}" for i in range(2)])
            return {"actor": actor, "critic": critic, "temp": {"log_temp": ours.state.params["entropy"]["log"].numpy()}}

        rates = {"actor": 1e-8, "critic": 1e-8 / critics, "temp": 1e-8}
        states = {}
        for name, epsilon in rates.items():
            old, adam = getattr(agent, name), optax.adam(3e-4, eps=epsilon)
            params = replaced(old.params, weights()[name])
            states[name] = old.replace(params=params, tx=adam, opt_state=adam.init(params))
        target = agent.target_critic.replace(params=states["critic"].params)
        agent = agent.replace(**states, target_critic=target)
        for batch in batches():
            with shared_noise(), mock.patch.object(EnsembleMLP, "forward", critic_norm_first):
                losses = ours.update(batch)
            with same_draws(critics, drawn):
                agent, expected = agent.update({name: column[rows] for name, column in batch.items()}, parts)
            # the last part's
            pairs = {"critic": (float(last["critic"]["critic/loss"]), critics * float(expected["critic_loss"]))}
            pairs |= {"actor": (losses["actor/loss"], float(expected["actor_loss"]))}
            outcome.losses.append({**pairs, "alpha": (losses["entropy/weight"], float(expected["temperature"]))})
        for name, x in weights().items():
            outcome.parameters |= compared(name, x, getattr(agent, name).params)
    return outcome
