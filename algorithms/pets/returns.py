"""Returns of plans by trajectory sampling: particles that each follow members of the ensemble (arXiv 1805.12114,
section 5).
"""

from __future__ import annotations

import torch
from torch import Tensor

from offrl import rng
from offrl.algorithm import DataSpec, Part, Tree
from offrl.algorithms.pets.settings import PETSConfig
from offrl.world_models import uncertainty
from offrl.world_models.model import Prediction, WorldModel

CHUNK = 8192  # predictions at once; no random number depends on it


class PlanReturns(Part):
    """The returns of plans in the model, as the planner's settings define them."""

    def __init__(self, config: PETSConfig, spec: DataSpec, model: WorldModel) -> None:
        super().__init__(config, spec)
        self.model = model

    def __call__(self, tree: Tree, observations: Tensor, past: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        """The expected returns of plans [B, P, H, A] from observations [B, O]: [B, P]. All plans meet the same random
        numbers.
        """
        flat, count = plans.flatten(0, 1), plans.shape[1]
        chunks = torch.arange(flat.shape[0], device=plans.device).split(max(1, CHUNK // self.config.plan_particles))
        values = [
            self.score(tree, observations[rows // count], past[rows // count], flat[rows], key) for rows in chunks
        ]
        return torch.cat(values).view(plans.shape[:2])

    def score(self, tree: Tree, observations: Tensor, past: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        """The return of plans [R, H, A], each from an observation [R, O] of its own, mean over particles: [R]; NaN
        where the model breaks.

        A reward counts as far as the episode goes on to it: not at all after a known end, and by the probability of
        that where ends are learnt. Particle n meets the same noise, and follows the same members, in all plans, so that
        plans differ by their actions alone."""
        c, n = self.config, self.config.plan_particles
        rows, horizon = plans.shape[:2]
        assign, noise = rng.split(key)
        observations, past = observations.expand(n, *observations.shape), past.expand(n, *past.shape)
        total = observations.new_zeros(n, rows)
        alive, weight = torch.ones_like(total), 1.0
        for t in range(horizon):
            if t == 0 or c.plan_members == "drawn":
                elite = members(rng.fold_in(assign, t), tree["elites"], n)
                params = {name: v[elite] if name.startswith("net.") else v for name, v in tree["params"].items()}
            actions = plans[:, t].expand(n, rows, -1)
            u: Tensor | float = 0.0
            if c.penalty == 0.0:
                prediction = self.model.predict_each({**tree, "params": params}, observations, actions, past)
            else:
                predictions, u = self.with_uncertainty(tree, observations, actions, past)
                picks = elite, torch.arange(n, device=elite.device)
                prediction = predictions.each(lambda x, picks=picks: x.unflatten(1, (n, rows))[picks])  # type: ignore[misc]
            draw = rng.normal(rng.fold_in(noise, t), (n, self.model.out_dim)).unsqueeze(1)
            next_observations = prediction.mean + prediction.std * draw[..., :-1]
            rewards = prediction.reward + prediction.reward_std * draw[..., -1]
            transition = prediction
            if prediction.ending is not None:
                # no end is drawn
                transition = prediction._replace(ending=torch.full_like(prediction.ending, -torch.inf).unsqueeze(0))
            outcome = self.model.to_outcome(tree, transition, observations, actions, next_observations, rewards, noise)
            broken = ~(torch.isfinite(next_observations).all(-1) & torch.isfinite(rewards))
            gain = torch.where(broken, torch.nan, outcome.rewards - c.penalty * u)
            total = total + torch.where(alive > 0.0, weight * alive * gain, 0.0)
            survival = 1.0 - outcome.terminations.float()
            alive = alive * (survival if prediction.ending is None else survival * (-prediction.ending).sigmoid())
            observations, past = outcome.next_observations, self.model.later_past(past, observations, actions)
            weight = weight * c.plan_discount
        return total.mean(0)

    def with_uncertainty(
        self, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor
    ) -> tuple[Prediction, Tensor]:
        """Predictions of all members for pairs [N, R], as [E, N R], and their uncertainty, [N, R]."""
        o, a, p = (x.flatten(0, 1) for x in (observations, actions, past))
        prediction = self.model.predict(tree, o, a, p)
        u = uncertainty.measure(self.config.uncertainty)(self.model, tree, prediction, o, a).nan_to_num(1e6, 1e6)
        return prediction, u.view(observations.shape[:2])


def members(key: Tensor, elites: Tensor, particles: int) -> Tensor:
    """The elite that each particle follows, [particles]: each has as many particles as any other, or one more."""
    elite_key, order_key = rng.split(key)
    shuffled = elites[rng.uniform(elite_key, tuple(elites.shape)).argsort()]
    return shuffled[rng.uniform(order_key, (particles,)).argsort() % elites.shape[0]]
