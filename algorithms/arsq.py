"""ARSQ: "Learning from Suboptimal Data in Continuous Control via Auto-Regressive Soft Q-Network" (Liu et al., 2025,
arXiv 2502.00288).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Actor, Algorithm, Carry, Loss, Params, TrainState, Traits, Update
from offrl.data.samplers.demonstrations import DEMONSTRATION, BestEpisodeSampler
from offrl.data.samplers.transitions import Batch, discounted
from offrl.errors import UserError
from offrl.nn import EnsembleMLP, Pairs
from offrl.registry import register
from offrl.settings.field import setting


@dataclass(frozen=True)
class Digits:
    """Actions [B, A] in [-1, 1] as P = levels * A digits below `bins`. Position p = level * A + dimension.

    What is known of an action after some of its digits is a point: the middle of each dimension's interval, at first 0.
    A whole number of digits decodes to such a point, so that the ends of the range are not reached (41 bins of one
    level: +-0.976).
    """

    levels: int
    bins: int
    dims: int  # A

    @property
    def positions(self) -> int:
        """P: the digits of an action."""
        return self.levels * self.dims

    def width(self, level: int) -> float:
        """The width of an interval after the digit of `level`."""
        return 2.0 / self.bins ** (level + 1)

    def finer(self, middle: Tensor, digits: Tensor, level: int) -> Tensor:
        """The middles [...] of the intervals that `digits` [...] choose in those of middle `middle` [...]."""
        return middle + (digits - 0.5 * (self.bins - 1)) * self.width(level)

    def encode(self, actions: Tensor) -> tuple[Tensor, Tensor]:
        """(digits [B, P] int64, prefixes [P, B, A]): prefix p is what is known before digit p."""
        middle, digits, prefixes = torch.zeros_like(actions), [], []
        dimension = torch.arange(self.dims, device=actions.device)
        for level in range(self.levels):
            low = middle - 0.5 * self.bins * self.width(level)
            digit = ((actions - low) / self.width(level)).floor().clamp(0, self.bins - 1)
            after = self.finer(middle, digit, level)
            prefixes += [torch.where(dimension < d, after, middle) for d in range(self.dims)]
            digits.append(digit.long())
            middle = after
        return torch.cat(digits, -1), torch.stack(prefixes)

    def append(self, prefix: Tensor, digit: Tensor, position: int) -> Tensor:
        """The prefix [B, A] after digit [B] at `position`."""
        level, dimension = divmod(position, self.dims)
        chosen = torch.arange(self.dims, device=prefix.device) == dimension
        return torch.where(chosen, self.finer(prefix, digit.unsqueeze(-1), level), prefix)


class PositionValues(nn.Module):
    """Two copies of V and of U, with tanh and orthogonal weights (output layers of gain 0.01), as published."""

    def __init__(self, observations: int, actions: int, hidden: Sequence[int], positions: int, bins: int) -> None:
        super().__init__()
        self.value = EnsembleMLP(2, observations, hidden, 1, activation="tanh", init="small_head")
        self.blocks = EnsembleMLP(
            2, observations + actions, hidden, positions * bins, activation="tanh", init="small_head"
        )
        self.positions, self.bins = positions, bins

    def forward(
        self, part: str, observations: Tensor, prefixes: Tensor | None = None, position: int | None = None
    ) -> Tensor:
        """`part` "value": V [2, B] of observations [B, O].

        "blocks": U of each position p with its own prefix, [2, P, B, bins] of prefixes [P, B, A]; or with `position` of
        that one alone, [2, 1, B, bins] of prefixes [1, B, A].
        """
        if part == "value":
            return self.value(observations).squeeze(-1)
        assert prefixes is not None
        x: Tensor | Pairs = Pairs(observations, prefixes)
        for layer in self.blocks.layers:
            x = torch.tanh(layer(x))
        if isinstance(x, Pairs):  # no hidden layers
            x = (
                torch.cat([observations.expand(len(prefixes), *observations.shape), prefixes], -1)
                .flatten(0, 1)
                .expand(2, -1, -1)
            )
        # of each row the one block that is read: P times less work than the whole output layer
        weight = self.blocks.head.weight.unflatten(-1, (self.positions, self.bins)).transpose(1, 2)  # [2, P, H, bins]
        bias = self.blocks.head.bias.unflatten(-1, (self.positions, self.bins)).transpose(1, 2)  # [2, P, 1, bins]
        if position is not None:
            weight, bias = weight[:, position : position + 1], bias[:, position : position + 1]
        return torch.matmul(x.unflatten(1, (len(prefixes), -1)), weight) + bias


MOST = 4096  # outputs of the network that values digits


@dataclass
class ARSQConfig:
    """Settings of ARSQ; the defaults are those of its authors' code for D4RL's locomotion tasks, and bc_weight that of
    hopper-medium.
    """

    name: str = "arsq"
    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(
        512, "transitions in a batch; half of them demonstrations where demo_share is below 1", low=2
    )
    discount: float = setting(0.99, "discount factor", low=0.0, high=1.0)
    polyak: float = setting(
        0.005, "share of the online parameters that enters the targets at each update", low=0.0, high=1.0
    )
    hidden: list[int] = setting([512, 512, 512], "widths of the hidden layers", low=1)
    n_step: int = setting(
        1,
        "targets sum the rewards of so many steps of the data before they bootstrap; fewer where an episode ends",
        low=1,
    )
    levels: int = setting(1, "levels of digits, each of which cuts the intervals of the one before (hopper: 2)", low=1)
    bins: int = setting(41, "values of a digit: intervals that each level cuts into (hopper: 7)", low=2)
    entropy_weight: float = setting(
        0.01,
        "temperature of the policy softmax(advantage / this), in the units of the rewards; V is the soft maximum of Q",
        low=1e-6,
    )
    imitation: str = setting(
        "cql",
        "cql: the logsumexp of the other digits' advantages above the demonstration's; margin: the mean of their "
        "differences from it",
        choices=("cql", "margin"),
    )
    bc_weight: float = setting(0.5, "weight of imitation", low=0.0)
    floor: float = setting(
        -1.0, "imitation asks no more of a digit once its term is below this, in the units of the rewards"
    )
    demo_share: float = setting(
        1.0,
        "share of the episodes, the best by return, that are imitated; 1: all the data",
        low=0.0,
        high=1.0,
        shared=True,
    )
    independent: bool = setting(
        False, "digits do not see those before them (an ablation: the advantage is a sum over dimensions)"
    )


class DigitValues(NamedTuple):
    """What the networks say of actions."""

    advantages: Tensor  # [2, P, B, bins]: of every digit at each position, after the action's own digits before it
    chosen: Tensor  # [2, P, B]: of the action's digits
    alternatives: Tensor  # [P, B, bins] bool: the digits that are not the action's
    q: Tensor  # [2, B]


class DigitActor(Actor):
    """Chooses digit after digit: the one of the largest advantage, by the smaller of the two copies, or with `explore`
    a draw by it.
    """

    algorithm: ARSQ

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        algorithm, keys = self.algorithm, rng.split(key, self.algorithm.digits.positions)
        prefix = observations.new_zeros(observations.shape[0], algorithm.spec.action_dim)
        for position in range(algorithm.digits.positions):
            both = algorithm.advantages(self.state.params["critic"], observations, prefix.unsqueeze(0), position)
            advantages = both.squeeze(1).amin(0)  # [E, bins]
            if explore:
                digit = rng.categorical(keys[position], advantages / algorithm.config.entropy_weight)
            else:
                digit = advantages.argmax(-1)
            prefix = algorithm.digits.append(prefix, digit, position)
        return prefix, carry


@register("algo", "arsq")
class ARSQ(Algorithm[ARSQConfig]):
    """Q(s, a) = V(s) + sum_p A_p(s, a_<p, a_p): digits of the action, each valued after those before it.

    A / alpha are log-probabilities, so that V is the soft maximum of Q by construction: no action is searched, nor
    sampled from an actor.

    Module "critic": two copies of V and of the network of A; targets take the smaller V, acting the smaller A.
    """

    traits = Traits(
        targets=("critic",), policy_modules=("critic",), critic_modules=("critic",), actions=("continuous",)
    )
    actor_class = DigitActor

    def modules(self) -> dict[str, nn.Module]:
        c, s = self.config, self.spec
        self.digits = Digits(c.levels, c.bins, s.action_dim)
        outputs = self.digits.positions * c.bins
        if outputs > MOST:
            raise UserError(
                f"algo.levels={c.levels} x {s.action_dim} action dimensions x algo.bins={c.bins} are {outputs:,} "
                f"outputs, of at most {MOST:,}; take fewer bins and more levels"
            )
        return {"critic": PositionValues(s.observation_dim, s.action_dim, c.hidden, self.digits.positions, c.bins)}

    def sampler(self) -> BestEpisodeSampler:
        return BestEpisodeSampler(n_step=self.config.n_step, share=self.config.demo_share)

    def advantages(self, critic: Params, observations: Tensor, prefixes: Tensor, position: int | None = None) -> Tensor:
        """A = U - alpha logsumexp(U / alpha), alpha times log-probabilities of digits; shapes as `PositionValues`."""
        alpha = self.config.entropy_weight
        known = torch.zeros_like(prefixes) if self.config.independent else prefixes
        return alpha * (self.apply("critic", critic, "blocks", observations, known, position) / alpha).log_softmax(-1)

    def values(self, critic: Params, observations: Tensor, actions: Tensor) -> DigitValues:
        """Q and its parts at actions [B, A]."""
        digits, prefixes = self.digits.encode(actions)
        advantages = self.advantages(critic, observations, prefixes)
        index = digits.T.unsqueeze(-1)  # [P, B, 1]
        chosen = advantages.gather(-1, index.expand(2, -1, -1, -1)).squeeze(-1)
        alternatives = torch.arange(self.config.bins, device=index.device) != index
        return DigitValues(
            advantages, chosen, alternatives, self.apply("critic", critic, "value", observations) + chosen.sum(1)
        )

    def imitation(self, values: DigitValues) -> Tensor:
        """c [2, B], over the digits j that are not the action's own. cql: sum_p max(log sum_j exp(A_pj) - A_p,own,
        floor); margin: sum_p of the mean over j of max(A_pj - A_p,own, floor)."""
        c, gap = self.config, values.advantages - values.chosen.unsqueeze(-1)
        if c.imitation == "cql":
            return gap.masked_fill(~values.alternatives, -torch.inf).logsumexp(-1).clamp(min=c.floor).sum(1)
        return torch.where(values.alternatives, gap.clamp(min=c.floor), 0.0).sum((1, -1)) / (c.bins - 1)

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> Loss:
        """sum_k E (Q_k(s, a) - r - gamma min_k V'_k(s'))^2 + bc_weight sum_k E[c_k | demonstration]."""
        c = self.config
        rewards, discount = discounted(batch, c.discount)
        next_v = self.apply("critic", state.target["critic"], "value", batch["next_observations"]).amin(0)
        target = losses.td_target(rewards, batch["masks"], discount, next_v)
        values = self.values(critic, batch["observations"], batch["actions"])
        td = (values.q - target).square().mean(-1).sum()
        shown = batch[DEMONSTRATION]
        imitation = (shown * self.imitation(values)).sum() / shown.sum().clamp(min=1.0)
        loss = td + c.bc_weight * imitation
        # by the smaller A of the copies, as when acting
        agrees = values.chosen.amin(0) >= values.advantages.amin(0).amax(-1)
        metrics = {"critic/loss": loss, "critic/td": td, "critic/imitation": imitation, "critic/q": values.q.mean()}
        return loss, {**metrics, "critic/target": target.mean(), "critic/greedy": agrees.float().mean()}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, metrics = self.descend(state, "critic", self.critic_loss, batch)
        return self.polyak(state, "critic"), metrics

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        return self.values(state.params["critic"], observations, actions).q.amin(0)
