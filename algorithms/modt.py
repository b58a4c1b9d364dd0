"""Multi-objective Decision Transformer: "Multi-Objective Decision Transformers for Offline RL" (Ghanem et al., 2023,
arXiv 2308.16379).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

from offrl import rng
from offrl.algorithm import Batch, Carry, Dataset, Loss, Params, Sampler, TrainState, Traits
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID
from offrl.errors import UserError
from offrl.families.return_conditioned import TargetReturnSettings
from offrl.families.sequence import (
    History,
    SequenceModel,
    SequenceSettings,
    StepPolicy,
    TargetReturnActor,
    masked_mean,
    with_last,
)
from offrl.nn.transformer import Affine
from offrl.registry import register
from offrl.settings.field import setting

MOST_ROWS = 50_000  # of the data, that k-means looks at


def kmeans(points: Tensor, clusters: int, rounds: int = 50) -> Tensor:
    """Centres [clusters, A] of points [R, A], from spread-out first ones (k-means++) by Lloyd's iterations; the same on
    every call.
    """
    key = rng.make_key(0)
    if len(points) > MOST_ROWS:
        points = points[rng.randint(rng.fold_in(key, -1), (MOST_ROWS,), len(points))]
    centres = points[:1]
    for i in range(1, clusters):
        distance = torch.cdist(points, centres).amin(-1).square()
        centres = torch.cat(
            [centres, points[rng.categorical(rng.fold_in(key, i), distance.clamp(min=1e-12).log())].unsqueeze(0)]
        )
    for _ in range(rounds):
        assignment = torch.cdist(points, centres).argmin(-1)
        count = torch.bincount(assignment, minlength=clusters).unsqueeze(-1)
        total = torch.zeros_like(centres).index_add_(0, assignment, points)
        means = torch.where(count > 0, total / count.clamp(min=1), centres)  # a centre without points stays
        if torch.equal(means, centres):
            break
        centres = means
    return centres


def shortest(slopes: Tensor, iterations: int = 20) -> Tensor:
    """Weights [M] >= 0 of sum 1 that make |sum_i w_i slopes_i| smallest, for slopes [M, P]: Frank-Wolfe with exact line
    search.

    A slope of zeros, of a loss that nothing in the batch speaks of, has weight 0: with weight 1 no other loss would be
    learnt from."""
    products = slopes @ slopes.T
    nonzero = products.diagonal() > 0.0
    nonzero = nonzero | ~nonzero.any()
    weights = nonzero.float() / nonzero.sum()
    index = torch.arange(len(slopes), device=slopes.device)
    for _ in range(iterations):
        projection = products @ weights
        corner = (index == torch.where(nonzero, projection, float("inf")).argmin()).float()
        current, cross, target = weights @ projection, corner @ projection, corner @ products @ corner
        step = ((current - cross) / (current - 2.0 * cross + target).clamp(min=1e-12)).clamp(0.0, 1.0)
        weights = (1.0 - step) * weights + step * corner
    return weights


REGIONS = "regions"


@dataclass
class MODTConfig(TargetReturnSettings, SequenceSettings):
    """Settings of MO-DT. The paper's were not at hand; these are DT's."""

    name: str = "modt"
    regions: int = setting(32, "regions of the action space, by k-means on the data's actions", low=2)
    weights: list[float] = setting(
        [],
        "fixed weights of the losses of action, next observation and next return; []: found anew for each batch (MGDA)",
        low=0.0,
    )


class MODTNet(StepPolicy):
    """The policy, the region of its next action, the next observation and the next return to go."""

    def __init__(self, sizes: Mapping[str, int], config: MODTConfig, spec: Any) -> None:
        super().__init__(sizes, config, spec, output_kind="region")
        self.region = Affine(config.width, config.regions)
        self.next = Affine(config.width, spec.observation_dim)
        self.later = Affine(config.width, 1)

    def forward(  # type: ignore[override]
        self,
        tokens: Mapping[str, Tensor],
        timesteps: Tensor,
        valid: Tensor | None = None,
        key: Tensor | None = None,
        hidden: dict[str, Tensor] | None = None,
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """(action's distribution, logits of its region [B, K, regions], next observation [B, K, O], next return [B, K],
        and the transformer's output at each token). `hidden`: the last, where it is known already."""
        h = self.steps(tokens, timesteps, valid, key) if hidden is None else hidden
        return (
            self.head(h["region"]),
            self.region(h["observation"]),
            self.next(h["action"]),
            self.later(h["action"]).squeeze(-1),
            h,
        )


class MODTActor(TargetReturnActor):
    """Policy that chooses a region of actions, and then an action in it."""

    algorithm: MODT

    def start(self, episodes: int) -> Carry:
        carry = super().start(episodes)
        return dataclasses.replace(carry, window={**carry.window, REGIONS: torch.zeros(episodes, 0, dtype=torch.int64)})

    def current_step(self, carry: History, observations: Tensor) -> Batch:
        return {**super().current_step(carry, observations), REGIONS: torch.zeros(len(observations), dtype=torch.int64)}

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        window, (region_key, action_key) = self.enter(carry, observations), rng.split(key)
        _, regions, *_ = self.apply("actor", self.algorithm.tokens(window), window[STEPS])
        logits = regions[:, -1]
        stochastic = explore and self.algorithm.config.policy != "deterministic"
        window = with_last(window, REGIONS, rng.categorical(region_key, logits) if stochastic else logits.argmax(-1))
        actions = self.choose(self.action_distribution(window), action_key, explore)
        return actions, self.with_actions(carry, window, actions)

    def action_distribution(self, window: Batch) -> tuple[Tensor, ...]:
        dist, *_ = self.apply("actor", self.algorithm.tokens(window), window[STEPS])
        return tuple(x[:, -1] for x in dist)


@register("algo", "modt")
class MODT(SequenceModel[MODTConfig]):
    """DT that also predicts the next observation and return, so that its attention serves all three, and acts in two
    steps: first the region of the action, then the action.

    Tokens (return, observation, region, action). The losses are added with the weights that make the combined gradient
    shortest, which no loss then opposes (MGDA: Sener and Koltun, 2018, arXiv 1810.04650); gradients are taken at the
    transformer's outputs, as in that paper's upper bound.
    """

    traits = Traits(actions=("continuous",))  # a region of a discrete action is the action itself
    actor_class = MODTActor

    def modules(self) -> dict[str, nn.Module]:
        weights = self.config.weights
        if weights and (len(weights) != 3 or not any(weights)):
            raise UserError(
                f"algo.weights={weights} must be three numbers, of action, next observation and next return, not all "
                "0; [] finds them"
            )
        return {"actor": MODTNet(self.sizes(), self.config, self.spec)}

    def sizes(self) -> dict[str, int]:
        s = self.spec
        return {"return": 1, "observation": s.observation_dim, "region": self.config.regions, "action": s.action_dim}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        index = torch.arange(self.config.regions, device=batch[REGIONS].device)
        return {
            "return": self.scaled(batch[RETURNS]).unsqueeze(-1),
            "observation": batch["observations"],
            "region": (batch[REGIONS].unsqueeze(-1) == index).float(),
            "action": batch["actions"],
        }

    def scaled(self, returns: Tensor) -> Tensor:
        """Returns as the network has them."""
        return returns / self.config.scale

    def sampler(self) -> Sampler:
        return dataclasses.replace(super().sampler(), derived_columns=self.divide)  # type: ignore[type-var]

    def divide(self, dataset: Dataset) -> dict[str, Tensor]:
        """The region of each row's action."""
        actions = dataset.columns["actions"].cpu().float()
        centres = kmeans(actions, self.config.regions)
        return {REGIONS: torch.cat([torch.cdist(rows, centres).argmin(-1) for rows in actions.split(MOST_ROWS)])}

    def objectives(
        self, outputs: tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor, dict[str, Tensor]], batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """E |a - pi|^2 - log p(region of a) / regions, E |s' - model|^2 and E (R' - return model)^2, without
        padding.
        """
        dist, regions, next_observations, next_returns, _ = outputs
        valid = batch[VALID]
        pairs = valid[:, 1:] & valid[:, :-1]  # the successor of a window's last step is not in it
        log_p = regions.log_softmax(-1).gather(-1, batch[REGIONS].unsqueeze(-1)).squeeze(-1)
        action = masked_mean(self.policy.bc_loss(dist, batch["actions"]) - log_p / self.config.regions, valid)
        model = masked_mean((next_observations[:, :-1] - batch["observations"][:, 1:]).square().mean(-1), pairs)
        return_loss = masked_mean((next_returns[:, :-1] - self.scaled(batch[RETURNS][:, 1:])).square(), pairs)
        return action, model, return_loss

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """sum_i w_i L_i of `objectives`, with the w >= 0 of sum 1 whose combined gradient is shortest, or fixed
        ones.
        """
        inputs = self.tokens(batch), batch[STEPS], batch[VALID], key
        outputs = self.apply("actor", actor, *inputs)
        objectives = self.objectives(outputs, batch)
        weights: Any = self.config.weights
        if not weights:
            fixed, hidden = {k: v.detach() for k, v in actor.items()}, {k: h.detach() for k, h in outputs[-1].items()}

            def objective(h: dict[str, Tensor], i: int) -> Tensor:
                return self.objectives(self.apply("actor", fixed, *inputs, h), batch)[i]

            slopes = [torch.cat([g.flatten() for g in grad(objective)(hidden, i).values()]) for i in range(3)]
            weights = shortest(torch.stack(slopes)).detach().unbind()
        loss = sum(
            (w * x for w, x in zip(weights, objectives, strict=True)), torch.zeros((), device=objectives[0].device)
        )
        metrics = dict(zip(("actor/loss", "actor/next", "actor/return"), objectives, strict=True))
        return loss, {**metrics, "actor/weight": torch.zeros_like(loss) + weights[0]}
