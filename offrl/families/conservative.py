"""The logsumexp of Q over actions, for penalties that lower Q outside the data: CQL, Cal-QL, COMBO.

"Conservative Q-Learning for Offline Reinforcement Learning" (Kumar et al., 2020, arXiv 2006.04779), CQL(H), with the
details of the implementation by young-geng that CORL and Cal-QL build on; the first authors' code does not give the
paper's scores.
Shapes: B states, M sampled actions for each, E critics.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Batch, Dataset, DataSpec, Grid, Loss, Params, TrainState, Update, merged
from offrl.data.samplers.transitions import FOLLOWING
from offrl.errors import UserError
from offrl.families.critics import Critic
from offrl.families.sac import LogWeight, SoftSettings
from offrl.settings.field import defaults, setting

MAX_MULTIPLIER = 1e6
# observations [B, O], key, n -> [n, B, A], log densities [n, B]
SamplePolicy = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


@dataclass
@defaults(hidden=[256, 256, 256], entropy_in_target=False)
class SoftMaximumSettings(SoftSettings):
    """Settings of every penalty on the logsumexp of Q over actions."""

    actions: int = setting(
        10, "actions tried for each state: so many uniform ones, the policy's at s, and the policy's at s'", low=1
    )
    conservative_weight: float = setting(
        10.0, "weight of the penalty: how far the critics are pushed down outside the data", low=0.0
    )
    cql_temperature: float = setting(1.0, "temperature of the penalty's logsumexp over actions", low=1e-6)
    importance: bool = setting(
        True, "divide by the densities of the tried actions; false: count them alike, with the data's action"
    )
    gradient_samples: int = setting(
        0, "of the tried actions draw so many, by their weight in the penalty, to carry its gradient; 0: all do", low=0
    )


@dataclass
@defaults(actor_learning_rate=3e-5, init="small_head")
class ConservativeSettings(SoftMaximumSettings):
    """Settings of CQL and Cal-QL; the defaults are those for D4RL's locomotion tasks."""

    action_gap: float | None = setting(
        None,
        "learn a multiplier of conservative_weight that holds the penalised difference at this gap; null: no multiplier",  # noqa: E501
        structural=True,
    )
    min_difference: float | None = setting(
        None, "the penalised difference is clipped from below, state by state; null: not"
    )
    max_difference: float | None = setting(None, "and from above; null: not")
    penalty_share: float = setting(
        1.0, "share of the states of a batch on which the penalty is estimated", low=0.0, high=1.0, structural=True
    )


def check(config: ConservativeSettings, grid: Grid = None) -> None:
    """Raise UserError for settings with which the penalty would be a constant."""
    low, high = ((grid or {}).get(name, [getattr(config, name)]) for name in ("min_difference", "max_difference"))
    if None not in (*low, *high) and max(low) >= min(high):
        raise UserError(
            f"algo.min_difference={max(low):g} must be below algo.max_difference={min(high):g}: nothing lies between "
            "them"
        )
    if config.penalty_share <= 0.0:
        raise UserError(
            "algo.penalty_share=0 leaves no state to estimate the penalty on; algo.conservative_weight=0 goes without "
            "it"
        )


def spread_rows(batch: Batch, share: float) -> Batch:
    """A share of the batch's rows, at least one, evenly spread: online, the data's rows come first and the played ones
    after them.
    """
    size = len(batch["rewards"])
    rows = max(1, round(share * size))
    if rows == size:
        return batch
    index = torch.arange(rows, device=batch["rewards"].device) * size // rows
    return {k: v[index] for k, v in batch.items()}


class SampledActions(NamedTuple):
    """Actions that an integral over all actions is estimated with."""

    actions: Tensor  # [M, B, A]
    log_density: Tensor  # [M, B], of the distribution that each was drawn from


def sampled_actions(sample_policy: SamplePolicy, batch: Batch, n: int, key: Tensor) -> SampledActions:
    """M = 3 n actions for each state of the batch: n uniform ones, n of the policy at s, and n of the policy at s'."""
    uniform_key, state_key, next_key = rng.split(key, 3)
    shape = (n, *batch["actions"].shape)
    uniform = rng.uniform(uniform_key, shape, -1.0, 1.0)
    density = torch.full(shape[:2], -shape[-1] * math.log(2.0), device=uniform.device)
    state_actions, state_density = sample_policy(batch["observations"], state_key, n)
    # of the step after this one, also where targets take several
    next_states = batch.get(FOLLOWING, batch["next_observations"])
    next_actions, next_density = sample_policy(next_states, next_key, n)
    return SampledActions(
        torch.cat([uniform, state_actions, next_actions]), torch.cat([density, state_density, next_density])
    )


def data_logits(critic: Critic, params: Params, batch: Batch) -> Tensor | None:
    """The critics' outputs at the batch's actions [E, B, out_dim] for both terms of a loss; None with dropout, which
    one of them has.
    """
    return None if critic.config.critic_dropout else critic.logits(params, batch["observations"], batch["actions"])


def penalised(config: SoftMaximumSettings) -> bool:
    """False where `conservative_weight` is 0 for all replicas: the penalty and its multiplier are then left out."""
    weight = config.conservative_weight
    return isinstance(weight, Tensor) or weight > 0.0


def penalised_loss(algorithm: Any, critic: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
    """The loss of SAC's critics + the algorithm's `penalty`, summed over critics."""
    target = algorithm.target(state, state.params["actor"], batch, key)
    logits = data_logits(algorithm.critic, critic, batch)  # one forward pass for both
    loss, metrics = algorithm.critic.loss(critic, batch, target, key, logits)
    if not penalised(algorithm.config):
        return loss, metrics
    penalty, penalty_metrics = algorithm.penalty(critic, state, batch, rng.fold_in(key, 102), logits)
    return loss + penalty, {**metrics, **penalty_metrics}


class SoftMaximum(NamedTuple):
    """The soft maximum of Q(s, .) over actions, and the values of Q in it."""

    logsumexp_q: Tensor  # [E, B]: temperature * log sum_a exp(Q(s, a) / temperature)
    q_data: Tensor  # [E, B]: Q at the data's action
    q: Tensor  # [E, M, B] at sampled actions; [E, B, K] at all discrete ones


def exact_soft_maximum(critic: Critic, params: Params, batch: Batch, temperature: float | Tensor) -> SoftMaximum:
    """The soft maximum over all discrete actions."""
    q = critic.head.mean(critic.logits_of_all(params, batch["observations"]))
    index = batch["actions"].view(1, -1, 1).expand(q.shape[0], -1, 1)
    return SoftMaximum(temperature * (q / temperature).logsumexp(-1), q.gather(2, index).squeeze(2), q)


def logsumexp_over_actions(scores: Tensor) -> Tensor:
    """The logsumexp of scores [E, M, B] over the M actions: [E, B]."""
    return scores.logsumexp(1)


def soft_maximum(
    critic: Critic,
    params: Params,
    batch: Batch,
    sampled: SampledActions,
    config: SoftMaximumSettings,
    key: Tensor,
    logits: Tensor | None = None,
    *,
    bound: Callable[[Tensor], Tensor] = lambda q: q,
    reduce: Callable[[Tensor], Tensor] = logsumexp_over_actions,
) -> SoftMaximum:
    """The soft maximum, each action's exp(Q) divided by the density that it was drawn with (appendix F of the paper).

    The temperature divides Q minus the log density, as in the implementation followed. Without `importance` actions
    count alike, and the data's is one of them. With `gradient_samples` the value is the same, and the gradient
    `sampled_gradient`'s.

    logits: the critics' outputs at the batch's actions [E, B, out_dim], where they are known already.
    bound: from the values [E, M, B] to those that enter the penalty (Cal-QL). reduce: the reduction of scores over
    actions (COMBO)."""
    observations, temperature = batch["observations"], config.cql_temperature
    q_data = critic.q(params, observations, batch["actions"]) if logits is None else critic.head.mean(logits)
    constant = {k: v.detach() for k, v in params.items()} if config.gradient_samples else params
    q = critic.q(constant, observations, sampled.actions)
    values, actions = bound(q), sampled.actions
    differentiable = values == q  # where a change of Q changes the value in the penalty
    if config.importance:
        scores = (values - sampled.log_density) / temperature
    else:
        data_scores = q_data.detach() if config.gradient_samples else q_data
        actions = torch.cat([actions, batch["actions"].unsqueeze(0)])
        differentiable = torch.cat([differentiable, differentiable.new_ones(data_scores.shape).unsqueeze(1)], 1)
        scores = torch.cat([values, data_scores.unsqueeze(1)], 1) / temperature
    logsumexp_q = temperature * reduce(scores)
    if config.gradient_samples:
        logsumexp_q = logsumexp_q + sampled_gradient(
            critic, params, observations, actions, scores, differentiable, config.gradient_samples, key
        )
    return SoftMaximum(logsumexp_q, q_data, q)


def sampled_gradient(
    critic: Critic,
    params: Params,
    observations: Tensor,
    actions: Tensor,
    scores: Tensor,
    differentiable: Tensor,
    n: int,
    key: Tensor,
) -> Tensor:
    """Zeros [E, B] whose gradient is in expectation that of the logsumexp of scores [E, M, B] over actions [M, B, A].

    That gradient is the mean of Q's over actions drawn from the softmax of the scores, so it is enough to differentiate
    the n that are drawn. differentiable [E, M, B]: True where Q has a gradient.
    """
    size, _, rows = scores.shape
    sample = rng.categorical(key, scores.detach().transpose(1, 2).expand(n, size, rows, -1))  # [n, E, B]
    index = sample.transpose(0, 1)  # [E, n, B]
    sample_actions = actions.expand(size, *actions.shape).gather(
        1, index.unsqueeze(-1).expand(-1, -1, -1, actions.shape[-1])
    )
    inputs = torch.cat([observations.expand(size, n, *observations.shape), sample_actions], -1)
    q = critic.head.mean(critic(params, inputs.flatten(1, 2))).reshape(size, n, rows)
    return ((q - q.detach()) * differentiable.gather(1, index)).mean(1)


ConfigT = TypeVar("ConfigT", bound=ConservativeSettings)


class Conservative(Generic[ConfigT]):
    """What CQL and Cal-QL share beside their penalty's values; named before `SoftActorCritic` among a class's parents.

    All losses of an update are those of the state before it. With `action_gap` there is the module "lagrange", the
    logarithm of the penalty's multiplier.
    """

    config: ConfigT
    spec: DataSpec
    critic: Critic
    apply: Any
    descend: Any
    polyak: Any
    negative_entropy: Any
    entropy_loss: Any
    actor_loss: Any
    critic_loss: Any
    learn_costs: Any
    next_policy: Any
    # log standard deviations have a learnt scale and shift, as in the implementation followed
    actor_form: ClassVar[dict[str, Any]] = {"log_std_min": -20.0, "log_std_max": 2.0, "scaled": True}

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        check(config, grid)
        return super().fit_config(config, dataset, grid)  # type: ignore[misc]

    def modules(self) -> dict[str, nn.Module]:
        modules = super().modules()  # type: ignore[misc]
        return modules if self.config.action_gap is None else {**modules, "lagrange": LogWeight(math.e)}

    def weighted(self, state: TrainState, soft: SoftMaximum) -> Loss:
        """alpha E [logsumexp_q - Q(s, a_data)], clipped and summed over critics; with `action_gap` it is
        multiplier * alpha * (E [...] - gap) (CQL, equation 30).
        """
        c, difference = self.config, soft.logsumexp_q - soft.q_data  # [E, B]
        if c.min_difference is not None:
            difference = difference.clamp(min=c.min_difference)
        if c.max_difference is not None:
            difference = difference.clamp(max=c.max_difference)
        per_critic = difference.mean(-1)
        if c.action_gap is None:
            loss = c.conservative_weight * per_critic.sum()
        else:
            loss = self.multiplier(state.params["lagrange"]) * c.conservative_weight * (per_critic - c.action_gap).sum()
        return loss, {"cql/penalty": loss, "cql/difference": per_critic.mean(), "cql/q_data": soft.q_data.mean()}

    def multiplier(self, lagrange: Params) -> Tensor:
        """The penalty's multiplier, []."""
        return self.apply("lagrange", lagrange).clamp(max=MAX_MULTIPLIER)

    def lagrange_loss(self, lagrange: Params, state: TrainState, difference: Tensor) -> Loss:
        """-multiplier * alpha * (difference - gap), difference [] the mean over critics (CQL, equation 30): it rises
        above the gap.
        """
        multiplier, gap = self.multiplier(lagrange), self.config.action_gap
        assert gap is not None
        loss = -multiplier * self.config.conservative_weight * (difference - gap)
        return loss, {"cql/multiplier": multiplier}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        actor_key, critic_key = rng.split(key)
        negative_entropy = self.negative_entropy(state.params["actor"], batch["observations"], actor_key)
        entropy, entropy_metrics = self.descend(state, "entropy", self.entropy_loss, negative_entropy)
        actor, actor_metrics = self.descend(state, "actor", self.actor_loss, batch, actor_key)
        critic, critic_metrics = self.descend(state, "critic", self.critic_loss, batch, critic_key)
        critic, metrics = self.critic.regularised(critic), {**entropy_metrics, **actor_metrics, **critic_metrics}
        steps = [entropy, actor, critic]
        if self.config.action_gap is not None and penalised(self.config):
            lagrange, lagrange_metrics = self.descend(
                state, "lagrange", self.lagrange_loss, critic_metrics["cql/difference"]
            )
            steps, metrics = [*steps, lagrange], {**metrics, **lagrange_metrics}
        after = self.polyak(merged(state, *steps)._replace(extra=critic.extra), "critic")
        after, costs = self.learn_costs(after, batch, lambda b: self.next_policy(after, b, critic_key), actor_metrics)
        return after, {**metrics, **costs}
