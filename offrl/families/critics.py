"""Ensembles of critics with any value head: what every algorithm that learns Q shares.

`CriticSettings` are the settings (docs/critics.md says what each does and how the heads meet each objective), `CriticAlgorithm` the
networks, their values and their regularisers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad

from offrl import losses, rng
from offrl.algorithm import Algorithm, LossFn, Metrics, TrainState, Traits, Tree
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.transitions import Batch
from offrl.data.value_range import value_range
from offrl.errors import UserError
from offrl.nn import HEADS, MLP, Bootstrap, EnsembleMLP, make_head
from offrl.optim import Adam, Params
from offrl.settings.field import setting


@dataclass
class CriticSettings:
    """Settings of every algorithm that learns Q; an algorithm's own defaults are in its file."""

    learning_rate: float = setting(3e-4, "Adam's learning rate", low=0.0)
    actor_learning_rate: float | None = setting(None, "the actor's, where it is another; null: learning_rate", low=0.0)
    batch_size: int = setting(256, "transitions in a batch", low=1)
    discount: float = setting(0.99, "discount factor", low=0.0, high=1.0)
    polyak: float = setting(0.005, "share of the online parameters that enters the targets whenever they move", low=0.0, high=1.0)
    hidden: list[int] = setting([256, 256], "widths of the hidden layers", low=1)
    critic_hidden: list[int] = setting([], "widths of the critics' hidden layers (and of V's); []: hidden", low=1)
    init: str = setting(
        "torch",
        "initial weights: torch (uniform), orthogonal, fixed_bias (as EDAC and ReBRAC), small_head (as CQL)",
        choices=("torch", "orthogonal", "fixed_bias", "small_head"),
    )
    critics: int = setting(2, "how many critics; targets take the smallest of their values", low=1)
    target_critics: int = setting(0, "a random subset of so many critics for each target, as in REDQ; 0: all", low=0)
    layer_norm: bool = setting(False, "LayerNorm after each hidden layer of the critics (and of V)")
    residual: bool = setting(False, "hidden layers of equal width add their input, in the critics (and in V)")
    critic_dropout: float = setting(0.0, "dropout rate of the critics while they learn", low=0.0, high=0.99, structural=True)
    spectral_norm: float = setting(0.0, "largest singular value of each layer of the critics; 0: any", low=0.0, structural=True)
    lipschitz: float = setting(
        0.0, "weight of the critics' squared change when observations move by lipschitz_radius; 0: off", low=0.0, structural=True
    )
    lipschitz_radius: float = setting(0.1, "largest move of each observation (normalised), in the direction of steepest change", low=0.0)
    value_head: str = setting("scalar", "how values are represented: one number, or a distribution over value_bins", choices=HEADS)
    value_bins: int = setting(101, "bins of a value head that is not scalar", low=2)
    value_range: list[float] = setting([], "smallest and largest value of the bins; []: found from the data's discounted returns")
    value_sigma: float = setting(0.75, "hl_gauss: standard deviation of a target in widths of a bin", low=1e-3, structural=True)


class Target(NamedTuple):
    """What critics are trained towards."""

    value: Tensor  # [B]
    bootstrap: Bootstrap | None = None  # of which next value, for a head that looks at its distribution


class CriticAlgorithm(Algorithm):
    """Base of algorithms with an ensemble of critics: module "critic", its Polyak copy, and their value head.

    Continuous actions are the critics' input; of discrete ones there is an output for each.
    """

    traits = Traits(targets=("critic",), critic_modules=("critic",))

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """`config` with the bins' range found from the data, where it needs one and has none."""
        if config.value_head == "scalar" or config.value_range:
            return config
        found = [value_range(dataset, float(x)) for x in (grid or {}).get("discount", [config.discount])]
        return dataclasses.replace(config, value_range=[min(low for low, _ in found), max(high for _, high in found)])

    def prepare_head(self) -> None:
        """Choose the value head. Raises UserError where the range of its bins is missing or empty."""
        c = self.config
        low, high = 0.0, 1.0
        if c.value_head != "scalar":
            if len(c.value_range) != 2 or not -math.inf < c.value_range[0] < c.value_range[1] < math.inf:
                raise UserError(
                    f"algo.value_range={c.value_range} must be [smallest,largest] for algo.value_head={c.value_head}; "
                    "without it `offrl train` finds the range from the data"
                )
            low, high = c.value_range
        if c.target_critics > c.critics:
            raise UserError(f"algo.target_critics={c.target_critics} is more than algo.critics={c.critics}")
        self.head = make_head(c.value_head, c.value_bins, low, high, c.value_sigma)

    def make_critic(self, size: int | None = None) -> EnsembleMLP:
        """The critics, or `size` of them."""
        c, s = self.config, self.judged
        self.prepare_head()
        return EnsembleMLP(
            size or c.critics,
            s.observation_dim + (0 if s.discrete else s.action_dim),
            c.critic_hidden or c.hidden,
            self.head.out_dim * (s.num_actions if s.discrete else 1),
            layer_norm=c.layer_norm,
            residual=c.residual,
            dropout=c.critic_dropout,
            init=c.init,
        )

    def make_value(self, *, layer_norm: bool = False, norm_first: bool = False) -> MLP:
        """A network for V with the critics' head and options; `layer_norm`: with LayerNorm even where the critics have none."""
        c = self.config
        self.prepare_head()
        widths, norm = c.critic_hidden or c.hidden, c.layer_norm or layer_norm
        return MLP(
            self.spec.observation_dim, widths, self.head.out_dim, layer_norm=norm, norm_first=norm_first, residual=c.residual, init=c.init
        )

    def optimizer(self, name: str) -> Adam:
        c = self.config
        own = name == "actor" and c.actor_learning_rate is not None
        return Adam(learning_rate=c.actor_learning_rate if own else c.learning_rate)

    def extra(self, params: dict[str, Params]) -> Tree:
        if not self.config.spectral_norm:
            return {}
        # the first power iteration starts from equal entries; iterations go on from update to update
        return {"spectral": {k: torch.ones_like(w[:, 0]) for k, w in params["critic"].items() if k.endswith("weight")}}

    def init(self, seed: int) -> TrainState:
        state = super().init(seed)
        if not self.config.spectral_norm:
            return state
        for _ in range(20):  # the first targets are within the bound as well
            state = self.constrain(state)
        return state._replace(target={**state.target, "critic": {k: v.clone() for k, v in state.params["critic"].items()}})

    # ---- values

    @property
    def judged(self) -> DataSpec:
        """Whose observations and actions the critics judge: the data's, unless an algorithm acts through something else, such as skills."""
        return self.spec

    @property
    def step_discount(self) -> float | Tensor:
        """The discount of what follows a transition."""
        return self.config.discount

    def q(self, critic: Params, observations: Tensor, actions: Tensor, key: Tensor | None = None) -> Tensor:
        """Raw outputs of every critic: [E, B, out_dim]. `key` switches dropout on.

        actions [M, B, A] instead of [B, A]: M actions for each observation in one batch, [E, M, B, out_dim].
        """
        if self.judged.discrete:
            every = self.q_each(critic, observations, key)
            index = actions.view(1, -1, 1, 1).expand(every.shape[0], -1, 1, every.shape[-1])
            return every.gather(2, index).squeeze(2)
        if actions.ndim == 2:
            return self.apply("critic", critic, torch.cat([observations, actions], -1), key)
        many, rows = actions.shape[:2]
        inputs = torch.cat([observations.expand(many, *observations.shape), actions], -1)
        out = self.apply("critic", critic, inputs.reshape(many * rows, -1), key)
        return out.reshape(out.shape[0], many, rows, out.shape[-1])

    def q_each(self, critic: Params, observations: Tensor, key: Tensor | None = None) -> Tensor:
        """Raw outputs of every critic for every discrete action: [E, B, K, out_dim]."""
        out = self.apply("critic", critic, observations, key)
        return out.reshape(*out.shape[:2], self.judged.num_actions, self.head.out_dim)

    def values(self, critic: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """Q of every critic: [E, B], or [E, M, B] for M actions at each observation."""
        return self.head.mean(self.q(critic, observations, actions))

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor:
        return self.values(state.params["critic"], observations, actions).amin(0)

    def voters(self, state: TrainState, key: Tensor) -> Params:
        """The target critics that a target asks: all, or a random subset (REDQ, arXiv 2101.05982)."""
        c, target = self.config, state.target["critic"]
        if c.target_critics in (0, c.critics):
            return target
        chosen = rng.uniform(key, (c.critics,)).topk(c.target_critics).indices
        return {k: v[chosen] for k, v in target.items()}

    def smallest(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of raw outputs [E, B, out_dim] the smallest value [B], and the outputs [B, out_dim] that it came from if the head wants them."""
        value = self.head.mean(logits)
        if not self.head.distributional:
            return value.amin(0), None
        least = value.argmin(0).view(1, -1, 1).expand(1, -1, logits.shape[-1])
        return value.amin(0), logits.gather(0, least).squeeze(0)

    def expected(self, critic: Params, observations: Tensor, log_p: Tensor, how: str = "min") -> tuple[Tensor, Tensor | None]:
        """Discrete actions: the mean under a policy's log probabilities [B, K] of the smallest critic's value, exact, [B]; and, if the head
        wants it, the policy's mixture of the distributions of those values, as log probabilities [B, bins]. `how`: see `joined`."""
        each = self.q_each(critic, observations)  # [E, B, K, out_dim]
        values = self.head.mean(each)
        value = (log_p.exp() * self.joined(values, how)).sum(-1)
        if not self.head.distributional:
            return value, None
        least = values.argmin(0)[None, ..., None].expand(1, *each.shape[1:])
        return value, (each.log_softmax(-1).gather(0, least).squeeze(0) + log_p.unsqueeze(-1)).logsumexp(-2)

    @staticmethod
    def joined(values: Tensor, how: str = "min") -> Tensor:
        """One value of the critics' [E, ...]: the smallest, or with "mean" their mean."""
        return values.mean(0) if how == "mean" else values.amin(0)

    def td_target(self, batch: Batch, next_value: Tensor, next_logits: Tensor | None = None) -> Target:
        """r + discount * (1 - terminated) * V(s')."""
        discount = self.step_discount
        y = losses.td_target(batch["rewards"], batch["masks"], discount, next_value)
        return Target(y, None if next_logits is None else Bootstrap(next_logits, discount * batch["masks"]))

    # ---- learning

    def q_objective(self, logits: Tensor, target: Target) -> Tensor:
        """The loss of the critics' outputs [E, B, out_dim] against their target: one number for each, [E, B]."""
        return self.head.loss(logits, target.value, target.bootstrap)

    def td_loss(self, critic: Params, batch: Batch, target: Target, key: Tensor, logits: Tensor | None = None) -> tuple[Tensor, Metrics]:
        """The critics' loss at the data's actions against one target: the mean over the batch, summed over critics, and regularisers.

        `logits`: the critics' outputs there, where they are known already.
        """
        observations, actions = batch["observations"], batch["actions"]
        if logits is None:
            logits = self.q(critic, observations, actions, rng.fold_in(key, 101) if self.config.critic_dropout else None)
        loss = self.q_objective(logits, target).mean(-1).sum()
        value = self.head.mean(logits)
        metrics = {"critic/loss": loss, "critic/q": value.mean(), "critic/td_error": (value - target.value).abs().mean()}
        saturation = self.head.saturation(target.value)
        if saturation is not None:
            metrics["critic/saturation"] = saturation
        if self.config.lipschitz:
            change = self.steepest_change(critic, observations, actions)
            loss = loss + self.config.lipschitz * change
            metrics["critic/lipschitz"] = change
        return loss, metrics

    def steepest_change(self, critic: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """Mean square of Q(s + d, a) - Q(s, a), summed over critics, with d of size lipschitz_radius in each entry along the sign of the
        gradient (arXiv 2302.01244, the robust regularisation with one step of FGSM)."""
        frozen = {k: v.detach() for k, v in critic.items()}

        def values(p: Params, own: Tensor) -> Tensor:  # of each critic at observations [E, B, O] of its own
            if self.judged.discrete:
                out = self.apply("critic", p, own)
                each = self.head.mean(out.reshape(*out.shape[:2], self.judged.num_actions, self.head.out_dim))
                return each.gather(2, actions.view(1, -1, 1).expand(each.shape[0], -1, 1)).squeeze(2)
            return self.head.mean(self.apply("critic", p, torch.cat([own, actions.expand(own.shape[0], *actions.shape)], -1)))

        here = observations.expand(self.config.critics, *observations.shape)
        # the sum over critics has each critic's slope apart, for each has observations of its own
        slope = grad(lambda own: values(frozen, own).sum())(here)
        moved = values(critic, here + self.config.lipschitz_radius * slope.detach().sign())
        return (moved - values(critic, here)).square().mean(-1).sum()

    def train_critic(self, state: TrainState, loss: LossFn, *x: Any) -> tuple[TrainState, Metrics]:
        """`descend` on the critics, then the bound on their singular values."""
        state, metrics = self.descend(state, "critic", loss, *x)
        return (self.constrain(state) if self.config.spectral_norm else state), metrics

    def constrain(self, state: TrainState) -> TrainState:
        """W <- W min(1, bound / sigma(W)) for every layer of every critic, sigma by one power iteration (arXiv 2302.01244, section 4)."""
        with torch.autocast(state.step.device.type, enabled=False):  # in bfloat16 sigma is 1% off
            return self._constrain(state)

    def _constrain(self, state: TrainState) -> TrainState:
        critic, vectors = dict(state.params["critic"]), {}
        for name, v in state.extra["spectral"].items():
            w = critic[name]  # [E, in, out]
            u = nn.functional.normalize(torch.einsum("eio,eo->ei", w, v), dim=-1)
            after = torch.einsum("eio,ei->eo", w, u)
            # a layer of zeros has no direction: the old one is kept, lest the bound be off for ever
            vectors[name] = torch.where(after.norm(dim=-1, keepdim=True) > 1e-12, nn.functional.normalize(after, dim=-1), v)
            sigma = torch.einsum("eio,ei,eo->e", w, u, vectors[name])
            critic[name] = w * (self.config.spectral_norm / sigma.clamp(min=1e-12)).clamp(max=1.0).view(-1, 1, 1)
        return state._replace(params={**state.params, "critic": critic}, extra={**state.extra, "spectral": vectors})
