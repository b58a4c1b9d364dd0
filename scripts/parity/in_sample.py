"""In-sample learning in JAX: IQL's authors' code, and those of XQL, f-DVL and ReCOIL, which descend from it."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np

from parity.common import ACTION, BATCH, OBSERVATION, Arrays, Ours, Outcome, batches, case, imported, shared_noise
from parity.flax_nets import NEEDS, compared, dense, jax_float64, replaced

ABSENT = ("d4rl", "gym")
COLUMNS = ("observations", "actions", "rewards", "masks", "next_observations")
# what the reference's flags make of a run; hashable, for it is static to jit
Flags = namedtuple("Flags", "f sample_random_times grad_pen noise noise_std lambda_gp max_clip num_v_updates log_loss")


def flags(**settings: Any) -> Flags:
    defaults = {"f": "", "sample_random_times": 0, "grad_pen": False, "noise": False, "noise_std": 0.1, "lambda_gp": 1}
    return Flags(**{**defaults, "max_clip": 7.0, "num_v_updates": 1, "log_loss": False, **settings})


def weights(ours: Ours) -> dict[str, dict[str, np.ndarray]]:
    """Our parameters under the reference's paths, by network."""
    hidden = len(ours.algorithm.config.hidden)
    body, actor = [f"MLP_0/Dense_{i}" for i in range(hidden + 1)], ours.state.params["actor"]
    policy = dense(ours.mlp("actor"), [*body[:-1], "Dense_0"]) | {"log_stds": actor["log_std"].numpy()}
    critic = {f"Critic_{e}/{k}": v for e in range(2) for k, v in dense(ours.mlp("critic", e), body).items()}
    norms = {k: v.numpy() for k, v in ours.state.params["value"].items() if k.startswith("norms.")}
    value = dense(ours.mlp("value"), body)
    for name, x in norms.items():
        _, index, kind = name.split(".")
        value[f"MLP_0/LayerNorm_{index}/{'scale' if kind == 'weight' else 'bias'}"] = x
    return {"actor": policy, "critic": critic, "value": value}


def compare(checkout: Path, ours: Ours, rows: list[Arrays], learner: str = "learner", **settings: Any) -> Outcome:
    """Five updates of ours and of the reference's `Learner`. Rows with expert_observations: ReCOIL's."""
    outcome, c = Outcome(), ours.algorithm.config
    checkout = checkout / "offline" if (checkout / "offline").is_dir() else checkout
    with jax_float64(), imported(checkout, learner, ABSENT) as module, imported(checkout, "common", ABSENT) as common:
        agent = module.Learner(
            0,
            np.zeros((1, OBSERVATION)),
            np.zeros((1, ACTION)),
            hidden_dims=tuple(c.hidden),
            temperature=c.temperature,
            expectile=0.8,
            max_steps=c.decay_steps,
            **settings,
        )
        start = weights(ours)
        for name in ("actor", "critic", "value"):
            model = getattr(agent, name)
            # as older versions of flax popped them
            old = model.params[1] if isinstance(model.params, tuple) else model.params
            params = replaced(old, start[name])
            setattr(agent, name, model.replace(params=params, opt_state=model.tx.init(params)))
        agent.target_critic = agent.target_critic.replace(params=agent.critic.params)
        for batch in rows:
            with shared_noise():
                losses = ours.update(batch)
            own = common.Batch(*(batch[k] for k in COLUMNS))
            if "expert_observations" in batch:
                expert = common.Batch(*(batch.get(f"expert_{k}", np.zeros(BATCH)) for k in COLUMNS))
                expected = agent.update(common.MixedBatch(*own, np.arange(BATCH) % 2), expert)
            else:
                expected = agent.update(own)
            critic = losses["critic/loss"] + losses.get("critic/expert_loss", 0.0)
            pairs = {"value": (losses["value/loss"], float(expected["value_loss"]))}
            pairs |= {
                "critic": (critic, float(expected["critic_loss"])),
                "actor": (losses["actor/loss"], float(expected["actor_loss"])),
            }
            outcome.losses.append(pairs)
        for name, x in weights(ours).items():
            outcome.parameters |= compared(name, x, getattr(agent, name).params)
    return outcome


@case("iql, of its authors", "ikostrikov/implicit_q_learning", "09d700248117881a75cb21f0adb95c6c8a694cb2", needs=NEEDS)
def iql(checkout: Path) -> Outcome:
    return compare(checkout, Ours("iql", expectile=0.8, decay_steps=1000), batches())


@case(
    "xql", "Div99/XQL", "dff09afb893fe782be259c2420903f8dfb50ef2c", needs=NEEDS
)  # fmt: skip
def xql(checkout: Path) -> Outcome:
    ours = Ours("xql", gumbel_temperature=2.0, gumbel_clip=1.0, random_actions=1, huber_delta=20.0, decay_steps=1000)
    settings = flags(max_clip=1.0, sample_random_times=1)
    return compare(checkout, ours, batches(), layernorm=True, vanilla=False, loss_temp=2.0, args=settings)


def divergence(checkout: Path, name: str, parameter: float, **settings: Any) -> Outcome:
    ours = Ours("f_dvl", divergence=name, random_actions=1, decay_steps=1000, **settings)
    chosen = flags(f=name.replace("_", "-"), max_clip=5.0, sample_random_times=1)
    return compare(checkout, ours, batches(), layernorm=True, vanilla=False, loss_temp=parameter, args=chosen)


DVL = ("hari-sikchi/DVL", "4b7cf1199998fed2a5d06780fe561900fd1d2ce1")


@case("f_dvl", *DVL, remains="lambda (`greediness`) is 1 by its flag's default, 0.8 here", needs=NEEDS)
def f_dvl(checkout: Path) -> Outcome:
    return divergence(checkout, "chi_square", 0.8, greediness=0.8)


@case("f_dvl, total variation", *DVL, needs=NEEDS)
def f_dvl_variation(checkout: Path) -> Outcome:
    return divergence(checkout, "total_variation", 0.7, greediness=0.7)


RECOIL = ("chufanchen/ReCOIL", "c88ba6d29f7d1e78a047f3e848eb0c59c8061caa")


def expert_rows() -> list[Arrays]:
    """Batches with the expert's beside them."""
    pairs = zip(batches(), batches(seed=1), strict=True)
    return [{**own, **{f"expert_{k}": v for k, v in expert.items() if k != "rewards"}} for own, expert in pairs]


@case("recoil", *RECOIL, remains="several updates of V there are one", needs=NEEDS)
def recoil(checkout: Path) -> Outcome:
    ours = Ours("recoil", gumbel_temperature=5.0, decay_steps=1000)
    return compare(
        checkout, ours, expert_rows(), "learner_imitate", layernorm=True, vanilla=False, loss_temp=5.0, args=flags()
    )


@case("recoil, expectile", *RECOIL, needs=NEEDS)
def recoil_expectile(checkout: Path) -> Outcome:
    ours = Ours("recoil", implicit_maximum="expectile", expectile=0.8, decay_steps=1000)
    return compare(
        checkout, ours, expert_rows(), "learner_imitate", layernorm=True, vanilla=True, beta=0.1, args=flags()
    )
