"""Other people's JAX code from checkouts, in its own `lax.scan` or in one around its own update: CORL, JAX-CORL,
unifloral, OGBench, FQL and Q-chunking.

Its networks and updates are imported when this runs; sizes are set to those of the others where they can be.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from peers import common, jax_loop
from peers.checkouts import imported, only_checkout
from peers.common import ACTION, BATCH, OBSERVATION, RETURN_SCALE
from peers.flops import BATCHES, DEEP_HIDDEN, DT_CONTEXT, DT_HIDDEN, QC_LENGTH

ABSENT = ("d4rl", "gym", "wandb", "tqdm", "tqdm.auto", "tyro", "pyrallis")
Build = Callable[[Path, str, int], common.Updates]
SOURCES: dict[str, tuple[str, Build]] = {}  # name -> (repository, its contestant)
STATE, DUMMY = jnp.zeros(OBSERVATION), jnp.zeros(ACTION)


def source(name: str, repository: str) -> Callable[[Build], Build]:
    """Decorator that adds a repository."""

    def add(build: Build) -> Build:
        SOURCES[name] = repository, build
        return build

    return add


def repeated(step: Callable[..., Any], carry: Any, count: int, *constants: Any) -> common.Updates:
    """`count` updates in each call of a compiled scan of `step(carry, *constants) -> (carry, losses)`, which `counts`
    has marked where it makes several."""
    each = getattr(step, "updates", 1)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(carry: Any, *constants: Any) -> Any:
        return jax.lax.scan(lambda c, _: step(c, *constants), carry, None, length=count // each)

    state = jax.tree.map(jnp.array, carry)  # donated buffers must not be shared

    def updates(total: int) -> dict[str, float]:
        nonlocal state
        for _ in range(total // count):
            state, losses = run(state, *constants)
        return {k: float(np.mean(v)) for k, v in jax.block_until_ready(losses).items()}

    return updates


def counts(updates: int) -> Callable[[Any], Any]:
    """Decorator that notes how many updates a step makes."""

    def note(step: Any) -> Any:
        step.updates = updates
        return step

    return note


def done(columns: common.Arrays) -> np.ndarray:
    return 1.0 - columns["masks"]


@source("corl", "corl-team/CORL")
def corl(checkout: Path, algo: str, rows: int) -> common.Updates:
    """ReBRAC as `train` sets it up; update after update as its loop makes them, the policy's and the targets' at every
    second one.
    """
    with imported(checkout, f"algorithms.offline.{algo}", ABSENT) as code:
        config, columns, key = code.Config(), common.with_next_actions(rows), jax.random.key(0)
        names = {
            "states": "observations",
            "next_states": "next_observations",
            "actions": "actions",
            "rewards": "rewards",
        }
        data = {
            **{k: columns[v] for k, v in names.items()},
            "next_actions": columns["next_actions"],
            "dones": done(columns),
        }
        adam = code.optax.adam(1e-3)
        net = code.DetActor(ACTION, config.hidden_dim, config.actor_ln, config.actor_n_hiddens)
        critics = code.EnsembleCritic(config.hidden_dim, 2, config.critic_ln, config.critic_n_hiddens)
        first, q = net.init(key, STATE[None]), critics.init(key, STATE[None], DUMMY[None])
        actor = code.ActorTrainState.create(apply_fn=net.apply, params=first, target_params=first, tx=adam)
        critic = code.CriticTrainState.create(apply_fn=critics.apply, params=q, target_params=q, tx=adam)
        metrics = code.Metrics.create(
            ["critic_loss", "q_min", "actor_loss", "batch_entropy", "bc_mse_policy", "bc_mse_random", "action_mse"]
        )
        coefficients = {
            "gamma": 0.99,
            "actor_bc_coef": 0.01,
            "critic_bc_coef": 0.01,
            "tau": 0.005,
            "policy_noise": 0.2,
            "noise_clip": 0.5,
        }

        @counts(2)
        def step(carry: Any, data: Any) -> Any:
            for phase in range(2):
                key, draw = jax.random.split(carry["key"])
                batch = code.ReplayBuffer(data=data).sample_batch(draw, batch_size=BATCHES[algo])
                move, more = (code.update_td3, {"normalize_q": True}) if phase else (code.update_td3_no_targets, {})
                parts = {k: carry[k] for k in ("actor", "critic", "metrics")}
                key, actor, critic, metrics = move(key, batch=batch, **parts, **coefficients, **more)
                carry = {"key": key, "actor": actor, "critic": critic, "metrics": metrics}
            return carry, {"critic_loss": carry["metrics"].accumulators["critic_loss"][0][0]}

        carry = {"key": key, "actor": actor, "critic": critic, "metrics": metrics}
        return first_run(repeated(step, carry, chunk(algo), jax.tree.map(jnp.asarray, data)), chunk(algo))


@source("jax_corl", "nissymori/JAX-CORL")
def jax_corl(checkout: Path, algo: str, rows: int) -> common.Updates:
    """Its `update_n_times`, two updates to a step of the scan; V of IQL without its LayerNorm, CQL's networks as deep
    as the others'.
    """
    name = {"td3_bc": "td3bc"}.get(algo, algo)
    arguments, sys.argv = sys.argv, sys.argv[:1]  # which it would take for its own
    try:
        with imported(checkout / "algos", name, ABSENT) as code:
            if algo == "dt":
                return first_run(jax_corl_dt(code, rows), chunk(algo))
            more = {
                "iql": {"layer_norm": False},
                "cql": {"hidden_dims": DEEP_HIDDEN, "action_dim": ACTION, "target_entropy": -float(ACTION)},
            }.get(algo, {})
            kind = {"iql": "IQL", "td3_bc": "TD3BC", "cql": "CQL"}[algo]
            config = code.config  # which its networks look at as well
            for setting, value in {"n_jitted_updates": 2, **more}.items():
                setattr(config, setting, value)
            columns = common.transitions(rows)
            fields = {k: columns[k] for k in ("observations", "actions", "rewards", "next_observations")}
            fields |= {k: done(columns) for k in ("dones", "dones_float") if k in code.Transition._fields}
            data = code.Transition(**jax.tree.map(jnp.asarray, fields))
            create = getattr(code, f"create_{name}_train_state")
            train = create(jax.random.key(0), data.observations[:1], data.actions[:1], config)
            agent = getattr(code, kind)()

            @counts(2)
            def step(carry: Any, data: Any) -> Any:
                key, draw = jax.random.split(carry["key"])
                train, losses = agent.update_n_times(carry["train"], data, draw, config)
                return {"key": key, "train": train}, {k: v for k, v in losses.items() if "loss" in k}

            return first_run(repeated(step, {"key": jax.random.key(1), "train": train}, chunk(algo), data), chunk(algo))
    finally:
        sys.argv = arguments


def jax_corl_dt(code: Any, rows: int) -> common.Updates:
    columns = common.transitions(rows)
    terminations, timeouts = common.flags(rows)
    data = {**columns, "terminals": terminations, "timeouts": timeouts}
    code.gym.make = lambda name: SimpleNamespace(get_dataset=lambda: data)
    config = code.DTConfig(
        n_blocks=len(DT_HIDDEN), embed_dim=DT_HIDDEN[0], context_len=DT_CONTEXT, rtg_scale=int(RETURN_SCALE)
    )
    episodes, count, lengths, *_ = code.make_padded_trajectories(config)
    episodes = jax.tree.map(lambda x: jnp.asarray(x, jnp.int32 if x.dtype == np.int64 else jnp.float32), episodes)
    train = code.create_dt_train_state(jax.random.key(0), OBSERVATION, ACTION, config)
    agent = code.DT()

    def step(carry: Any, episodes: Any, lengths: Any) -> Any:
        key, draw, noise = jax.random.split(carry["key"], 3)
        batch = code.sample_traj_batch(draw, episodes, BATCHES["dt"], DT_CONTEXT, count, lengths)
        train, loss = agent.update(carry["train"], batch, noise)
        return {"key": key, "train": train}, {"loss": loss}

    return repeated(step, {"key": jax.random.key(1), "train": train}, chunk("dt"), episodes, lengths)


@source("unifloral", "EmptyJackson/unifloral")
def unifloral(checkout: Path, algo: str, rows: int) -> common.Updates:
    """Its train step, which is written for a scan; TD3+BC's and ReBRAC's step updates the critics twice with one
    batch.
    """
    with imported(checkout / "algorithms", algo, ABSENT) as code:
        args = code.Args(batch_size=BATCHES.get(algo, BATCH))
        columns = common.with_next_actions(rows)
        names = {
            "obs": "observations",
            "action": "actions",
            "reward": "rewards",
            "next_obs": "next_observations",
            "next_action": "next_actions",
        }
        fields = {k: columns[v] for k, v in names.items() if k in code.Transition._fields} | {"done": done(columns)}
        data = code.Transition(**jax.tree.map(jnp.asarray, fields))
        moments = (jnp.zeros(OBSERVATION), jnp.ones(OBSERVATION))
        start = functools.partial(code.create_train_state, args, jax.random.key(0))
        if algo == "edac":
            nets = {
                "actor": code.TanhGaussianActor(ACTION),
                "vec_q": code.VectorQ(args.num_critics),
                "alpha": code.EntropyCoef(),
            }
            inputs = {"actor": [STATE], "vec_q": [STATE, DUMMY], "alpha": []}
            pairs = {"vec_q_target": "vec_q"}
        elif algo == "iql":
            nets = {"actor": code.TanhGaussianActor(ACTION, *moments), "dual_q": code.DualQNetwork(*moments)}
            nets["value"] = code.StateValueFunction(*moments)
            inputs = {"actor": [STATE], "dual_q": [STATE, DUMMY], "value": [STATE]}
            pairs = {"dual_q_target": "dual_q"}
        else:
            norms = ((args.actor_ln, args.norm_obs), (args.critic_ln, args.norm_obs)) if algo == "rebrac" else ((), ())
            nets = {
                "actor": code.DeterministicTanhActor(ACTION, *moments, *norms[0]),
                "dual_q": code.DualQNetwork(*moments, *norms[1]),
            }
            inputs = {"actor": [STATE], "dual_q": [STATE, DUMMY]}
            pairs = {"actor_target": "actor", "dual_q_target": "dual_q"}
        states = {name: start(net, inputs[name]) for name, net in nets.items()}
        states |= {target: start(nets[name], inputs[name]) for target, name in pairs.items()}
        agent = code.AgentTrainState(**states)
        applied = [net.apply for net in nets.values()]

        @counts(getattr(args, "num_critic_updates_per_step", 1))
        def step(carry: Any, data: Any) -> Any:
            return code.make_train_step(args, *applied, data)(carry, None)

        return first_run(repeated(step, (jax.random.key(1), agent), chunk(algo), data), chunk(algo))


@source("ogbench", "seohongpark/ogbench")
def ogbench(checkout: Path, algo: str, rows: int) -> common.Updates:
    """QRL's agent in OGBench's own loop, whose batches are drawn in NumPy: its update is compiled, and there is no
    scan.
    """
    with (
        imported(checkout / "impls", f"agents.{algo}", ABSENT) as code,
        imported(checkout / "impls", "utils.datasets", ABSENT) as datasets,
    ):
        config, columns = code.get_config(), common.transitions(rows)
        terminals = np.logical_or(*common.flags(rows))
        terminals[-1] = True
        fields = {k: columns[k] for k in ("observations", "actions", "next_observations", "rewards", "masks")}
        data = datasets.GCDataset(datasets.Dataset.create(**fields, terminals=terminals.astype(np.float32)), config)
        agent = code.QRLAgent.create(0, STATE[None], DUMMY[None], config)

        def updates(count: int) -> dict[str, float]:
            nonlocal agent
            for _ in range(count):
                agent, info = agent.update(data.sample(config["batch_size"]))
            return {k: float(v) for k, v in info.items() if "loss" in k}

        return first_run(updates, chunk(algo))


@source("fql", "seohongpark/fql")
def fql(checkout: Path, algo: str, rows: int) -> common.Updates:
    """FQL's agent, its update in a scan that draws batches as well."""
    with imported(checkout, f"agents.{algo}", ABSENT) as code:
        agent = code.FQLAgent.create(0, STATE[None], DUMMY[None], code.get_config())
        data = {k: jnp.asarray(v) for k, v in common.transitions(rows).items()}

        def step(carry: Any, data: Any) -> Any:
            key, draw = jax.random.split(carry["key"])
            index = jax.random.randint(draw, (BATCH,), 0, rows)
            agent, info = carry["agent"].update({k: v[index] for k, v in data.items()})
            return {"key": key, "agent": agent}, {k: v for k, v in info.items() if k.endswith("_loss")}

        return first_run(repeated(step, {"key": jax.random.key(1), "agent": agent}, chunk(algo), data), chunk(algo))


@source("qc", "ColinQiyangLi/qc")
def qc(checkout: Path, algo: str, rows: int) -> common.Updates:
    """Q-chunking's agent with a distilled policy, its update in a scan that draws windows as well, any row with the
    steps after it.
    """
    with imported(checkout, "agents.acfql", ABSENT) as code:
        config = code.get_config()
        config.update({"actor_type": "distill-ddpg", "action_chunking": True, "horizon_length": QC_LENGTH})
        agent = code.ACFQLAgent.create(0, STATE, DUMMY, config)
        data = {k: jnp.asarray(v) for k, v in common.transitions(rows).items()}
        powers = config["discount"] ** jnp.arange(QC_LENGTH)

        def step(carry: Any, data: Any) -> Any:
            key, draw = jax.random.split(carry["key"])
            first = jax.random.randint(draw, (BATCH,), 0, rows - QC_LENGTH)
            at = first[:, None] + jnp.arange(QC_LENGTH)
            batch = {"observations": data["observations"][first]}
            batch |= {k: data[k][at] for k in ("actions", "next_observations")}
            batch |= {
                "rewards": jnp.cumsum(data["rewards"][at] * powers, 1),
                "masks": jnp.minimum.accumulate(data["masks"][at], 1),
            }
            agent, info = carry["agent"].update({**batch, "valid": jnp.ones((BATCH, QC_LENGTH))})
            return {"key": key, "agent": agent}, {k: v for k, v in info.items() if k.endswith("_loss")}

        return first_run(repeated(step, {"key": jax.random.key(1), "agent": agent}, chunk(algo), data), chunk(algo))


def chunk(algo: str) -> int:
    return common.CHUNKS.get(algo, jax_loop.SCAN)


def first_run(updates: common.Updates, count: int) -> common.Updates:
    """`updates`, compiled while the modules that it was imported with are still there."""
    updates(count)
    return updates


def main() -> None:
    algo = ("--algo", {"required": True})
    options = common.options(algo, ("--source", {"required": True, "choices": [*SOURCES]}), *common.CHECKOUT)
    jax.devices()  # before their files set XLA_FLAGS anew, which hold one thread
    jax.tree_map = jax.tree_util.tree_map  # type: ignore[attr-defined]  # what newer versions dropped
    repository, build = SOURCES[options.source]
    updates = build(only_checkout(options.checkouts, repository), options.algo, options.rows)
    common.serve(updates, chunk(options.algo), note=f"jax {jax.__version__}")


if __name__ == "__main__":
    main()
