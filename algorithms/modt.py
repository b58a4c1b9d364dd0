"""Multi-objective Decision Transformer: "Multi-Objective Decision Transformers for Offline RL" (Ghanem et al., 2023, arXiv 2308.16379)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

from offrl import rng
from offrl.actor import Actor, Carry
from offrl.algorithm import Metrics, TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError
from offrl.families.sequence import History, SequenceActor, SequenceAlgorithm, SequenceSettings, StepPolicy, masked_mean, with_last
from offrl.nn.transformer import Affine
from offrl.optim import Params
from offrl.registry import register
from offrl.settings.field import setting

REGIONS = "regions"
MOST_ROWS = 50_000  # of the data, that k-means looks at


@dataclass
class MODTConfig(SequenceSettings):
    """Settings of MO-DT. The paper's were not at hand; these are DT's."""

    name: str = "modt"
    regions: int = setting(32, "regions of the action space, by k-means on the data's actions", low=2)
    weights: list[float] = setting(
        [], "fixed weights of the losses of action, next observation and next return; []: found anew for each batch (MGDA)", low=0.0
    )


class MODTNet(StepPolicy):
    """The policy, the region of its next action, the next observation and the next return to go."""

    def __init__(self, sizes: Mapping[str, int], config: Any, spec: Any) -> None:
        super().__init__(sizes, config, spec, read="region")
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
        """(action's distribution, logits of its region [B, K, regions], next observation [B, K, O], next return [B, K], and what the
        transformer made of each token). `hidden`: the last, where it is known already."""
        h = self.steps(tokens, timesteps, valid, key) if hidden is None else hidden
        return self.head(h["region"]), self.region(h["observation"]), self.next(h["action"]), self.later(h["action"]).squeeze(-1), h


@register("algo", "modt")
class MODT(SequenceAlgorithm):
    """DT that also predicts the next observation and return, so that its attention serves all three, and acts in two steps: first the
    region of the action, then the action.

    Tokens (return, observation, region, action). The losses are added with the weights that make the combined gradient shortest, which
    no loss then opposes (MGDA: Sener and Koltun, 2018, arXiv 1810.04650); gradients are taken at the transformer's outputs, as in that
    paper's upper bound.
    """

    Config = MODTConfig
    traits = replace(SequenceAlgorithm.traits, actions=("continuous",))  # a region of a discrete action is the action itself

    def modules(self) -> dict[str, nn.Module]:
        weights = self.config.weights
        if weights and (len(weights) != 3 or not any(weights)):
            raise UserError(
                f"algo.weights={weights} must be three numbers, of action, next observation and next return, not all 0; [] finds them"
            )
        return {"actor": MODTNet(self.sizes(), self.config, self.spec)}

    def sizes(self) -> dict[str, int]:
        sizes = super().sizes()
        return {"return": sizes["return"], "observation": sizes["observation"], "region": self.config.regions, "action": sizes["action"]}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        index = torch.arange(self.config.regions, device=batch[REGIONS].device)
        return {**super().tokens(batch), "region": (batch[REGIONS].unsqueeze(-1) == index).float()}

    def sampler(self) -> Sampler:
        return dataclasses.replace(super().sampler(), made=self.divide)  # type: ignore[type-var]

    def divide(self, dataset: Dataset) -> dict[str, Tensor]:
        """The region of each row's action."""
        actions = dataset.columns["actions"].cpu().float()
        centres = kmeans(actions, self.config.regions)
        return {REGIONS: torch.cat([torch.cdist(some, centres).argmin(-1) for some in actions.split(MOST_ROWS)])}

    def objectives(
        self, outputs: tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor, dict[str, Tensor]], batch: Batch
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The losses of action (and its region), next observation and next return, each a mean over the steps that are no padding."""
        dist, regions, following, later, _ = outputs
        valid = batch[VALID]
        both = valid[:, 1:] & valid[:, :-1]  # what comes after a window's last step is not in it
        chance = regions.log_softmax(-1).gather(-1, batch[REGIONS].unsqueeze(-1)).squeeze(-1)
        action = masked_mean(self.policy.bc_loss(dist, batch["actions"]) - chance / self.config.regions, valid)
        model = masked_mean((following[:, :-1] - batch["observations"][:, 1:]).square().mean(-1), both)
        earning = masked_mean((later[:, :-1] - self.scaled(batch[RETURNS][:, 1:])).square(), both)
        return action, model, earning

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        given = self.tokens(batch), batch[STEPS], batch[VALID], key
        outputs = self.apply("actor", actor, *given)
        each = self.objectives(outputs, batch)
        if self.config.weights:
            weights = self.config.weights
        else:
            fixed, hidden = {k: v.detach() for k, v in actor.items()}, {k: h.detach() for k, h in outputs[-1].items()}

            def objective(h: dict[str, Tensor], i: int) -> Tensor:
                return self.objectives(self.apply("actor", fixed, *given, h), batch)[i]

            slopes = [torch.cat([g.flatten() for g in grad(objective)(hidden, i).values()]) for i in range(3)]
            weights = shortest(torch.stack(slopes)).detach().unbind()
        loss = sum((w * x for w, x in zip(weights, each, strict=True)), torch.zeros((), device=each[0].device))
        metrics = dict(zip(("actor/loss", "actor/next", "actor/return"), each, strict=True))
        return loss, {**metrics, "actor/weight": torch.zeros_like(loss) + weights[0]}

    def actor(self, state: TrainState) -> Actor:
        return MODTActor(self, state)


class MODTActor(SequenceActor):
    """Chooses a region of actions, and then an action in it."""

    algorithm: MODT

    def start(self, episodes: int) -> Carry:
        carry = super().start(episodes)
        return dataclasses.replace(carry, window={**carry.window, REGIONS: torch.zeros(episodes, 0, dtype=torch.int64)})

    def now(self, carry: History, observations: Tensor) -> Batch:
        return {**super().now(carry, observations), REGIONS: torch.zeros(len(observations), dtype=torch.int64)}

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        window, (first, second) = self.enter(carry, observations), rng.split(key)
        _, regions, *_ = self.apply("actor", self.algorithm.tokens(window), window[STEPS])
        logits = regions[:, -1]
        drawn = explore and self.algorithm.config.policy != "deterministic"
        window = with_last(window, REGIONS, rng.categorical(first, logits) if drawn else logits.argmax(-1))
        actions = self.choose(self.last(window), second, explore)
        return actions, self.acted(carry, window, actions)

    def last(self, window: Batch) -> tuple[Tensor, ...]:
        dist, *_ = self.apply("actor", self.algorithm.tokens(window), window[STEPS])
        return tuple(x[:, -1] for x in dist)


def shortest(slopes: Tensor, iterations: int = 20) -> Tensor:
    """Weights [M] >= 0 of sum 1 that make |sum_i w_i slopes_i| smallest, for slopes [M, P]: Frank-Wolfe with exact line search.

    A slope of zeros, of a loss that nothing in the batch speaks of, has weight 0: with weight 1 no other loss would be learnt from.
    """
    products = slopes @ slopes.T
    told = products.diagonal() > 0.0
    told = told | ~told.any()
    weights = told.float() / told.sum()
    index = torch.arange(len(slopes), device=slopes.device)
    for _ in range(iterations):
        along = products @ weights
        corner = (index == torch.where(told, along, float("inf")).argmin()).float()
        own, mixed, new = weights @ along, corner @ along, corner @ products @ corner
        step = ((own - mixed) / (own - 2.0 * mixed + new).clamp(min=1e-12)).clamp(0.0, 1.0)
        weights = (1.0 - step) * weights + step * corner
    return weights


def kmeans(points: Tensor, clusters: int, rounds: int = 50) -> Tensor:
    """Centres [clusters, A] of points [R, A], from spread-out first ones (k-means++) by Lloyd's iterations; the same on every call."""
    key = rng.make_key(0)
    if len(points) > MOST_ROWS:
        points = points[rng.randint(rng.fold_in(key, -1), (MOST_ROWS,), len(points))]
    centres = points[:1]
    for i in range(1, clusters):
        distance = torch.cdist(points, centres).amin(-1).square()
        centres = torch.cat([centres, points[rng.categorical(rng.fold_in(key, i), distance.clamp(min=1e-12).log())].unsqueeze(0)])
    for _ in range(rounds):
        nearest = torch.cdist(points, centres).argmin(-1)
        count = torch.bincount(nearest, minlength=clusters).unsqueeze(-1)
        total = torch.zeros_like(centres).index_add_(0, nearest, points)
        moved = torch.where(count > 0, total / count.clamp(min=1), centres)  # a centre that nobody is near stays
        if torch.equal(moved, centres):
            break
        centres = moved
    return centres
