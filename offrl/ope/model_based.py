"""Model-based off-policy evaluation: returns of the candidates in rollouts of a trained model from the data's initial
states.

As in DOPE's code (arXiv 2103.16596), states and rewards are cut off at the data's range. Each elite plays its own
rollouts to the end (TSinf; PETS, arXiv 1805.12114, section 5), so that the spread between them says how far the members
disagree about a policy.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.ope.config import OPEConfig
from offrl.ope.fqe import combine
from offrl.ope.problem import Estimates, Note, Problem, raw_observations, reward_range, scale
from offrl.tasks.episodes import observe_reward
from offrl.training.stages import train_first
from offrl.world_models.environment import horizon_of
from offrl.world_models.model import Prediction, Trained, Tree, load, required
from offrl.world_models.units import Units

NEGLIGIBLE = 1e-6  # a rollout ends where rewards are discounted below this share


def model_values(problem: Problem, settings: OPEConfig, device: str, tell: Note | None = None) -> Estimates:
    """Values of all candidates, with intervals over the elites and the initial states (see `offrl.ope.fqe.combine`)."""
    return estimate(problem, load_or_train(problem.dataset, settings, device, tell is None).to(device), settings, tell)


def load_or_train(dataset: Dataset, settings: OPEConfig, device: str, quiet: bool) -> Trained:
    """The model that `world_model` names, checked against the data, or one that is trained now.

    Raises UserError for a model of other spaces. What its own dataset did to observations and rewards may differ: both
    are converted."""
    path = settings.world_model
    if not path:
        from offrl.settings.compose import compose
        from offrl.settings.untrusted import literal

        overrides = {
            "algo": "dynamics",
            "experiment": "none",
            "dataset": literal(dataset.spec.name),
            "compile": settings.compile,
        }
        config = compose({**overrides, "device": device, "runs_dir": settings.models_dir, "quiet": quiet})
        path = str(train_first(config, dataset.to(device), "world_model", required()))
    trained = load(path)
    model_spec = trained.model.spec
    names = ("observation_mean", "observation_std", "reward_scale", "reward_shift")
    trained.check(dataclasses.replace(dataset.spec, **{name: getattr(model_spec, name) for name in names}))
    return trained


def estimate(problem: Problem, trained: Trained, settings: OPEConfig, tell: Any = None) -> Estimates:
    """Mean, over the data's initial states and the model's elites, of the discounted sum of rewards of a rollout.

    All candidates meet the same random numbers. Raises UserError for a candidate whose actions do not fit.
    """
    horizon = settings.horizon or horizon_of(trained, problem.dataset)
    rows = chosen_starts(problem, settings.rollouts)
    elites = trained.tree["elites"]
    started, values, cut, steps = time.monotonic(), [], [], []
    if tell is not None:
        tell(
            f"rollouts of {len(problem.names)} candidates in {trained.path}: up to {horizon:,} steps from "
            f"{len(rows):,} starts, by {len(elites)} members each"
        )
    for name, policy in zip(problem.names, problem.policies, strict=True):
        result = play(name, policy, problem, trained, rows, horizon, settings)
        values.append(result.returns)
        cut.append(float(result.clipped.sum() / result.lengths.sum()))
        steps.append(float(result.lengths.mean()))
        if tell is not None and time.monotonic() - started > 10.0:
            tell(f"{name}: {result.returns.mean():.4g} ({len(values)} of {len(problem.names)})")
    states = len(np.unique(rows))  # each of which was started from equally often
    by_state = np.stack(values, -1).reshape(len(elites), -1, states, len(values)).mean(1)  # [E, M, K]
    if settings.propagation == "ts1":
        by_state = by_state.mean(0, keepdims=True)  # each rollout met all elites
    value, low, high = combine(by_state)
    details = {
        "members": by_state.mean(1).tolist(),
        "clipped": cut,
        "steps": steps,
        "world_model": str(trained.path),
    }
    return Estimates("model", problem.names, value, low, high, settings.discount, details)


def chosen_starts(problem: Problem, count: int) -> np.ndarray:
    """Rows at which rollouts begin, [>= count]: `count` of the episodes' first rows, spread evenly, or, of fewer, each
    equally often.
    """
    starts = problem.starts.numpy()
    if len(starts) >= count:
        return starts[np.linspace(0, len(starts) - 1, count).round().astype(np.int64)]
    return np.tile(starts, -(-count // len(starts)))


@dataclasses.dataclass(frozen=True)
class Played:
    """Rollouts of one candidate: E elites from M starts."""

    returns: np.ndarray  # [E, M] float64, in the units of the data's rewards
    lengths: np.ndarray  # [E, M]
    clipped: np.ndarray  # [E, M] steps that were cut off at the data's range


@torch.no_grad()
def play(
    name: str, policy: Any, problem: Problem, trained: Trained, rows: np.ndarray, horizon: int, settings: OPEConfig
) -> Played:
    """Rollouts of one candidate from the observations at `rows`, by every elite."""
    model, elites = trained.model, trained.tree["elites"]
    dataset, members, count = problem.dataset, len(trained.tree["elites"]), len(rows)
    units = Units(model.spec, elites.device)
    low, high = reward_range(dataset)
    first = np.tile(
        raw_observations(dataset, "observations")[rows], (members, *[1] * len(dataset.spec.observation_shape))
    )
    observations = units.observations(first)
    past, root = model.first_past(observations), rng.make_key(settings.seed, elites.device)
    total, weight = np.zeros(members * count), 1.0
    alive = np.ones(members * count, bool)
    lengths, clipped = np.zeros(members * count, np.int64), np.zeros(members * count, np.int64)
    carry, more = policy.start(members * count), {"explore": True} if settings.explore else {}
    for t in range(horizon):
        if weight < NEGLIGIBLE or not alive.any():
            break
        deal, draw = rng.split(rng.fold_in(root, t))
        chosen, carry = policy.step(carry, units.raw(observations), t, **more)
        actions = torch.from_numpy(scale(name, chosen, members * count, dataset, alive)).to(elites.device)
        order = torch.arange(members * count, device=elites.device)
        if settings.propagation == "ts1":
            order = rng.uniform(deal, (members * count,)).argsort()
        prediction = per_elite(model, trained.tree, observations, actions, past, order)
        if settings.noise:
            outcome = model.outcome(trained.tree, prediction, observations, actions, draw)
        else:
            outcome = model.to_outcome(
                trained.tree, prediction, observations, actions, prediction.mean[0], prediction.reward[0], draw
            )
        recorded = units.rewards(outcome.rewards)
        rewards = recorded * dataset.spec.reward_scale + dataset.spec.reward_shift
        total += weight * np.where(alive, np.clip(rewards, low, high), 0.0)
        lengths, clipped = lengths + alive, clipped + (alive & outcome.clipped.cpu().numpy())
        alive = alive & ~outcome.terminations.cpu().numpy()
        past = model.later_past(past, observations, actions)
        carry = observe_reward(policy, carry, np.where(alive, recorded, 0.0))
        observations, weight = outcome.next_observations, weight * settings.discount
    shape = (members, count)
    return Played(total.reshape(shape), lengths.reshape(shape), clipped.reshape(shape))


def per_elite(model: Any, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor, order: Tensor) -> Prediction:
    """One elite's prediction for each row, as an ensemble of one: the first elite of the first rows of `order`, and so
    on, equally many.
    """
    elites, back = tree["elites"], order.argsort()
    share = len(order) // len(elites)
    if "params" not in tree:  # no networks, of which only the elites' could be evaluated
        member = elites.repeat_interleave(share)[back]
        return model.choose(model.predict(tree, observations, actions, past), member)
    elite_tree = {
        **tree,
        "params": {name: v[elites] if name.startswith("net.") else v for name, v in tree["params"].items()},
    }
    parts = [x[order].reshape(len(elites), share, *x.shape[1:]) for x in (observations, actions, past)]
    flat = [
        None if x is None else x.reshape(1, -1, *x.shape[2:])[:, back] for x in model.predict_each(elite_tree, *parts)
    ]
    return Prediction(*flat)  # type: ignore[arg-type]
