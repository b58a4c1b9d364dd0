"""`TrainedPolicy.predict`: actions as Stable-Baselines3 asks for them, whose memory the caller keeps;
`TrainedPolicy.value`: what the policy's own critic says of a state and an action."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.utils import _pytree as pytree

from offrl.data.fit import seen_besides
from offrl.errors import UserError
from offrl.evaluation.observations import as_array, desired_goal, goals_of
from offrl.evaluation.streams import EncodingActor
from offrl.nn.meta_check import outline
from offrl.system import files

if TYPE_CHECKING:
    from offrl.evaluation.policy import TrainedPolicy


class PredictState(NamedTuple):
    """What `predict` hands back for its next call."""

    carry: Any
    t: int  # steps of the episode so far
    rows: int


def task_rewards(rewards: np.ndarray) -> torch.Tensor:
    """Rewards [K] that name a task, as a tensor. Raises UserError for those that name none."""
    values = torch.as_tensor(np.asarray(rewards, np.float32)).reshape(-1)
    if not len(values) or not bool(values.isfinite().all()):
        raise UserError("rewards to act for must be finite numbers, at least one")
    if not bool(values.any()):
        raise UserError(
            "the rewards are 0 in all of the states that were drawn from the data: they say nothing of what to do"
        )
    return values


def numbered(policy: TrainedPolicy, actions: np.ndarray) -> np.ndarray:
    """Actions of `step` as the environment takes them: its own number of each choice, which `step` counts from 0."""
    start = policy.algorithm.spec.first_choice
    return actions + start if start else actions


def predict(
    policy: TrainedPolicy,
    observation: Any,
    memory: PredictState | None,
    episode_start: Any,
    deterministic: bool,
    draw: int,
) -> tuple[Any, PredictState | None]:
    """See `TrainedPolicy.predict`. draw: a number of its own for each call of a policy without a memory, which its
    noise follows from.
    """
    name = policy.algorithm.config.name
    if policy.algorithm.traits.text:
        raise UserError(
            f"a policy of {name} answers texts: policy.act(text), and policy.reset() before another episode"
        )
    if policy.uses_rewards:
        raise UserError(
            f"a policy of {name} must know what its last action earned: policy.act(observation, reward=...) takes it"
        )
    batch, batched = as_array(observation, policy.spec)
    starts = np.broadcast_to(
        np.asarray(False if episode_start is None else episode_start, bool).reshape(-1), len(batch)
    )
    some = bool(starts.any() and not starts.all())
    if memory is not None and some and (not policy.actor.resettable or policy.goal_conditioned):
        raise UserError(
            f"a policy of {name} remembers its episodes, and episode_start begins some of them anew: predict each by "
            "itself"
        )
    if memory is not None and not isinstance(memory, PredictState):
        raise UserError("state= is what the last predict returned, or None where episodes begin")
    if memory is not None and memory.rows != len(batch):
        raise UserError(f"state= is of {memory.rows} episodes, and there are {len(batch)} observations")
    if memory is not None and some:
        anew = torch.tensor(starts, device=policy.device)
        memory = memory._replace(carry=policy.actor.begin_anew(memory.carry, anew))
    elif memory is None or starts.any():
        memory = PredictState(policy.start(len(batch)), 0, len(batch))
        if policy.goal_conditioned:
            goal = desired_goal(observation)
            goals = None if goal is None else goals_of(goal, policy.spec)
            memory = memory._replace(
                carry=policy.set_goal(memory.carry, goals if goals is None or batched else goals[None])
            )
    remembers = memory.carry is not None
    actions, carry = policy.step(memory.carry, batch, memory.t if remembers else draw, not deterministic)
    actions = numbered(policy, actions)
    return actions if batched else actions[0], PredictState(carry, memory.t + 1, len(batch)) if remembers else None


# ---- values


def critic_of(run_dir: Path, policy: TrainedPolicy, index: int) -> dict[str, Any]:
    """The modules of critics, of costs too; see `saved_modules`."""
    return saved_modules(run_dir, policy, index, "Q", (*policy.algorithm.traits.critic_modules, "cost_critic"))


def saved_modules(
    run_dir: Path, policy: TrainedPolicy, index: int, subject: str, modules: Sequence[str] | None = None
) -> dict[str, Any]:
    """Those modules (None: all) of the run's replica `index` that `policy` lacks, from the checkpoint that it was made
    of.

    Raises UserError where that is not there. subject: what it holds, for that message.
    """
    latest = files.load_latest(run_dir)
    step = int(policy.state.step)
    steps = latest[0].get("state/step") if latest is not None else None
    if latest is None or steps is None or len(steps) <= index or int(steps[index]) != step:
        raise UserError(
            f"{subject} is in the checkpoint of update {step:,} under {run_dir / files.FOLDER}, which is not there: "
            "train again, or load the run where its checkpoints are"
        )
    algorithm, where = policy.algorithm, str(run_dir / files.FOLDER)
    with outline(where):
        fresh = type(algorithm)(algorithm.config, algorithm.data_spec, algorithm.pretrained)
        fresh.buffers = dict  # type: ignore[method-assign]
        template = fresh.init(0).params
    names = [n for n in dict.fromkeys(modules or template) if n in template and n not in policy.state.params]
    saved_params = {k: v[index] for k, v in latest[0].items() if k.startswith("state/params/")}
    result = files.unflatten({"state": {"params": {n: template[n] for n in names}}}, saved_params, where)
    return pytree.tree_map(lambda x: x.clone(), result["state"]["params"])


@torch.no_grad()
def own_value(policy: TrainedPolicy, observations: np.ndarray, actions: np.ndarray) -> np.ndarray | None:
    """See `TrainedPolicy.own_value`."""
    algorithm = policy.algorithm
    modules = algorithm.traits.critic_modules
    if not modules or any(n not in policy.state.params for n in modules):
        return None
    if algorithm.spec.discrete:
        scaled = torch.as_tensor(actions)
    else:
        span = np.where(policy.high > policy.low, policy.high - policy.low, 1.0)
        scaled = torch.as_tensor((2.0 * (actions - policy.low) / span - 1.0).astype(np.float32)).clamp(-1.0, 1.0)
    x, actor = policy.normalised(observations), policy.actor
    q = algorithm.q_value(policy.state, actor.encode(x) if isinstance(actor, EncodingActor) else x, scaled)
    return None if q is None else q.double().numpy()


def value_of(policy: TrainedPolicy, observation: Any, action: Any) -> Any:
    """Q(s, a) as the algorithm's critic has it (of several the minimum or the mean, whichever its losses take): a
    number for an observation [O] and an action [A], float64 [B] for batches, both as `TrainedPolicy.act` takes and
    gives them.

    In the units of the recorded rewards (`dataset.reward_scale` is undone); where training added c to each scaled
    reward (`dataset.reward_shift`, `normalize_rewards`), Q of recorded rewards with c / scale added. Raises UserError
    for an algorithm without Q, a policy file without its critic, and observations and actions of other shapes.
    """
    algorithm, spec = policy.algorithm, policy.spec
    name, modules = algorithm.config.name, algorithm.traits.critic_modules
    if not modules:
        raise UserError(
            f"a policy of {name} has no Q(s, a): {name} learns no critic of states and actions (iql, cql and td3_bc do)"
        )
    if any(n not in policy.state.params for n in modules):
        if policy.find_critic is None:
            raise UserError(
                f"this policy of {name} comes from a file without its critic, which acting does not need: Q is in its "
                "run's checkpoint, "
                'offrl.load("runs/NAME").policy(seed=0).value(observation, action)'
            )
        critic: Mapping[str, Any] = policy.find_critic(policy)
        policy.state = policy.state._replace(params={**policy.state.params, **critic})
    if spec.frames > 1 or spec.windowed:
        kind = seen_besides(spec) if spec.windowed else f"{spec.frames} frames"
        raise UserError(f"a policy of {name} that sees {kind} has no Q(s, a) of a single observation")
    rows, batched = as_array(observation, spec)
    if spec.discrete:
        start = spec.first_choice
        numbers = np.asarray(action)
        chosen: Any = numbers.reshape(-1).astype(np.int64) - start
        due = f"whole numbers from {start} to {start + spec.num_actions - 1}"
        fits = numbers.size == len(rows) and bool((chosen + start == numbers.reshape(-1)).all())
        fits = fits and bool(((chosen >= 0) & (chosen < spec.num_actions)).all())
    else:
        chosen = np.asarray(action, np.float32)
        due = f"{spec.action_dim} numbers each"
        fits = chosen.size == len(rows) * spec.action_dim and bool(np.isfinite(chosen).all())
        chosen = chosen.reshape(-1, spec.action_dim)
    if not fits:
        raise UserError(f"the actions of {len(rows)} observations have shape {np.shape(action)}; {due} are due")
    values = policy.own_value(rows, chosen)
    if values is None:
        raise UserError(f"a policy of {name} has no Q(s, a) of single observations and actions")
    with np.errstate(all="ignore"):
        values = values / spec.reward_scale
    return values if batched else float(values[0])
