"""Critics and V as parts that an algorithm has: networks with any value head, their values, their losses, their regularisers.

docs/critics.md says what each setting does and how the heads meet each objective.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import grad

from offrl import losses, rng
from offrl.algorithm import Metrics, Part, TrainState
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.transitions import Batch
from offrl.data.value_range import value_range
from offrl.errors import UserError
from offrl.nn import HEADS, MLP, Bootstrap, EnsembleMLP, NetworkSettings, Pairs, ValueHead, call, make_head
from offrl.optim import Adam, Params
from offrl.settings.field import setting


def epsilon_field(default: float = 1e-5) -> Any:
    """The setting `layer_norm_epsilon`, at the value of the framework in which an algorithm's authors write."""
    return setting(default, "added to the variance in LayerNorm (torch's is 1e-5, flax's 1e-6)", low=1e-12, structural=True)


@dataclass
class CriticSettings(NetworkSettings):
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
    layer_norm_epsilon: float = epsilon_field()
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


class Values(NamedTuple):
    """Values, and the network's outputs that they were read from."""

    mean: Tensor  # [B], or [E, B] of E critics
    logits: Tensor | None = None  # [..., out_dim]; None where the head does not bootstrap from a distribution


class Target(NamedTuple):
    """The regression target of critics."""

    value: Tensor  # [B]
    bootstrap: Bootstrap | None = None  # from the next value, for a head that uses its distribution


Objective = Callable[[Tensor, Target], Tensor]  # outputs [E, B, out_dim] and their target -> loss of each, [E, B]


def make_value_head(config: CriticSettings) -> ValueHead:
    """The value head of these settings. Raises UserError where the range of its bins is missing or empty."""
    if config.value_head == "scalar":
        return make_head("scalar")
    limits = config.value_range
    if len(limits) != 2 or not -math.inf < limits[0] < limits[1] < math.inf:
        raise UserError(
            f"algo.value_range={limits} must be [smallest,largest] for algo.value_head={config.value_head}; "
            "without it `offrl train` finds the range from the data"
        )
    return make_head(config.value_head, config.value_bins, limits[0], limits[1], config.value_sigma)


def fit_value_range(config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
    """`config` with the range of the value head's bins from the data, where it needs one and has none."""
    if config.value_head == "scalar" or config.value_range:
        return config
    ranges = [value_range(dataset, float(discount)) for discount in (grid or {}).get("discount", [config.discount])]
    return dataclasses.replace(config, value_range=[min(low for low, _ in ranges), max(high for _, high in ranges)])


def optimizer(config: CriticSettings, module: str) -> Adam:
    """Adam with `learning_rate`, for the actor with its own rate where it has one."""
    rate = config.actor_learning_rate if module == "actor" else None
    return Adam(learning_rate=config.learning_rate if rate is None else rate)


class Critic(Part):
    """An ensemble of E critics Q(s, a), the algorithm's module "critic".

    Continuous actions are inputs; discrete ones have an output each.
    """

    config: CriticSettings

    def __init__(self, config: Any, spec: DataSpec, size: int | None = None) -> None:
        """spec: of the critics' observations and actions. size: critics; None: as many as the settings say. Raises UserError."""
        super().__init__(config, spec)
        if config.target_critics > config.critics:
            raise UserError(f"algo.target_critics={config.target_critics} is more than algo.critics={config.critics}")
        self.head = make_value_head(config)
        self.network = EnsembleMLP(
            size or config.critics,
            spec.observation_dim + (0 if spec.discrete else spec.action_dim),
            config.critic_hidden or config.hidden,
            self.head.out_dim * (spec.num_actions if spec.discrete else 1),
            layer_norm=config.layer_norm,
            layer_norm_epsilon=config.layer_norm_epsilon,
            residual=config.residual,
            dropout=config.critic_dropout,
            init=config.init,
        )

    def begin(self, state: TrainState) -> TrainState:
        """The critics and their targets within the bound of their singular values from the first update on."""
        if not self.config.spectral_norm:
            return state
        # the first power iteration starts from equal entries; iterations go on from update to update
        vectors = {k: torch.ones_like(w[:, 0]) for k, w in state.params["critic"].items() if k.endswith("weight")}
        state = state._replace(extra={**state.extra, "spectral": vectors})
        for _ in range(20):
            state = self.spectral_normalise(state)
        return state._replace(target={**state.target, "critic": {k: v.clone() for k, v in state.params["critic"].items()}})

    # ---- values

    def __call__(self, params: Params, *x: Any) -> Tensor:
        """The network's outputs for its own inputs: [E, B, ...]."""
        return call(self.network, params, *x)

    def logits(self, params: Params, observations: Tensor, actions: Tensor, key: Tensor | None = None) -> Tensor:
        """Outputs of every critic: [E, B, out_dim]. `key` switches dropout on.

        actions [M, B, A] instead of [B, A]: M actions for each observation in one batch, [E, M, B, out_dim].
        """
        if self.spec.discrete:
            outputs = self.logits_of_all(params, observations, key)
            index = actions.view(1, -1, 1, 1).expand(outputs.shape[0], -1, 1, outputs.shape[-1])
            return outputs.gather(2, index).squeeze(2)
        if actions.ndim == 2:
            return self(params, torch.cat([observations, actions], -1), key)
        return self(params, Pairs(observations, actions), key).unflatten(1, actions.shape[:2])

    def logits_of_all(self, params: Params, observations: Tensor, key: Tensor | None = None) -> Tensor:
        """Outputs of every critic for every discrete action: [E, B, K, out_dim]."""
        out = self(params, observations, key)
        return out.reshape(*out.shape[:2], self.spec.num_actions, self.head.out_dim)

    def q(self, params: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """Q of every critic: [E, B], or [E, M, B] for M actions at each observation."""
        return self.head.mean(self.logits(params, observations, actions))

    def min_q(self, params: Params, observations: Tensor, actions: Tensor) -> Values:
        """The smallest of the critics' values, [B]."""
        return self.smallest(self.logits(params, observations, actions))

    def smallest(self, logits: Tensor) -> Values:
        """The smallest value [B] of outputs [E, B, out_dim], and the outputs [B, out_dim] that it came from if the head needs them."""
        values = self.head.mean(logits)
        if not self.head.distributional:
            return Values(values.amin(0))
        index = values.argmin(0).view(1, -1, 1).expand(1, -1, logits.shape[-1])
        return Values(values.amin(0), logits.gather(0, index).squeeze(0))

    def expected_q(self, params: Params, observations: Tensor, log_p: Tensor, reduce: str = "min") -> Values:
        """Discrete actions: the mean of Q under a policy's log probabilities [B, K], exact, [B].

        Its outputs, if the head needs them, are the policy's mixture of the distributions of the smallest critics, as log probabilities
        [B, bins]. reduce: see `reduce_ensemble`.
        """
        outputs = self.logits_of_all(params, observations)  # [E, B, K, out_dim]
        values = self.head.mean(outputs)
        value = (log_p.exp() * self.reduce_ensemble(values, reduce)).sum(-1)
        if not self.head.distributional:
            return Values(value)
        index = values.argmin(0)[None, ..., None].expand(1, *outputs.shape[1:])
        return Values(value, (outputs.log_softmax(-1).gather(0, index).squeeze(0) + log_p.unsqueeze(-1)).logsumexp(-2))

    @staticmethod
    def reduce_ensemble(values: Tensor, reduce: str = "min") -> Tensor:
        """One value of the critics' [E, ...]: the smallest, or with "mean" their mean."""
        return values.mean(0) if reduce == "mean" else values.amin(0)

    def target_critics(self, state: TrainState, key: Tensor) -> Params:
        """The target critics of a TD target: all, or a random subset (REDQ, arXiv 2101.05982)."""
        c, target = self.config, state.target["critic"]
        if c.target_critics in (0, c.critics):
            return target
        indices = rng.uniform(key, (c.critics,)).topk(c.target_critics).indices
        return {k: v[indices] for k, v in target.items()}

    def td_target(self, batch: Batch, next_value: Values, discount: float | Tensor | None = None) -> Target:
        """r + discount (1 - terminated) V(s'). discount: of what follows a transition; None: the settings'."""
        gamma = self.config.discount if discount is None else discount
        bootstrap = self.bootstrap(next_value, gamma * batch["masks"])
        return Target(losses.td_target(batch["rewards"], batch["masks"], gamma, next_value.mean), bootstrap)

    def bootstrap(self, next_value: Values, scale: Tensor) -> Bootstrap | None:
        """The next value's distribution, which counts `scale` [B] in the target; None for a head without a distribution."""
        if not self.head.distributional or next_value.logits is None:
            return None
        return Bootstrap(next_value.logits, scale)

    # ---- learning

    def objective(self, logits: Tensor, target: Target) -> Tensor:
        """The head's loss of outputs [E, B, out_dim] against their target: [E, B]."""
        return self.head.loss(logits, target.value, target.bootstrap)

    def loss(
        self, params: Params, batch: Batch, target: Target, key: Tensor, logits: Tensor | None = None, objective: Objective | None = None
    ) -> tuple[Tensor, Metrics]:
        """The critics' loss at the data's actions: the mean over the batch, summed over critics, with their regularisers.

        logits: the critics' outputs there, where they are known already. objective: in place of the head's loss.
        """
        observations, actions = batch["observations"], batch["actions"]
        if logits is None:
            logits = self.logits(params, observations, actions, rng.fold_in(key, 101) if self.config.critic_dropout else None)
        loss = (objective or self.objective)(logits, target).mean(-1).sum()
        value = self.head.mean(logits)
        metrics = {"critic/loss": loss, "critic/q": value.mean(), "critic/td_error": (value - target.value).abs().mean()}
        if (saturation := self.head.saturation(target.value)) is not None:
            metrics["critic/saturation"] = saturation
        if self.config.lipschitz:
            change = self.fgsm_change(params, observations, actions)
            loss = loss + self.config.lipschitz * change
            metrics["critic/lipschitz"] = change
        return loss, metrics

    def fgsm_change(self, params: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """Mean square of Q(s + d, a) - Q(s, a), summed over critics, with d of size lipschitz_radius in each entry along the sign of the
        gradient (arXiv 2302.01244, the robust regularisation with one step of FGSM)."""
        constant = {k: v.detach() for k, v in params.items()}

        def values(p: Params, inputs: Tensor) -> Tensor:  # of each critic at observations [E, B, O] of its own
            if self.spec.discrete:
                out = self(p, inputs)
                q = self.head.mean(out.reshape(*out.shape[:2], self.spec.num_actions, self.head.out_dim))
                return q.gather(2, actions.view(1, -1, 1).expand(q.shape[0], -1, 1)).squeeze(2)
            return self.head.mean(self(p, torch.cat([inputs, actions.expand(inputs.shape[0], *actions.shape)], -1)))

        inputs = observations.expand(self.config.critics, *observations.shape)
        # the sum over critics has each critic's slope apart, for each has observations of its own
        slope = grad(lambda x: values(constant, x).sum())(inputs)
        shifted = inputs + self.config.lipschitz_radius * slope.detach().sign()
        return (values(params, shifted) - values(params, inputs)).square().mean(-1).sum()

    def regularised(self, state: TrainState) -> TrainState:
        """The state after an update of the critics: their singular values within `spectral_norm`, where it is set."""
        return self.spectral_normalise(state) if self.config.spectral_norm else state

    def spectral_normalise(self, state: TrainState) -> TrainState:
        """W <- W min(1, bound / sigma(W)) for every layer of every critic, sigma by one power iteration (arXiv 2302.01244, section 4)."""
        critic, vectors = dict(state.params["critic"]), {}
        with torch.autocast(state.step.device.type, enabled=False):  # in bfloat16 sigma is 1% off
            for name, v in state.extra["spectral"].items():
                w = critic[name]  # [E, in, out]
                u = nn.functional.normalize(torch.einsum("eio,eo->ei", w, v), dim=-1)
                product = torch.einsum("eio,ei->eo", w, u)
                # a layer of zeros has no direction: the old one is kept, lest the bound be off for ever
                vectors[name] = torch.where(product.norm(dim=-1, keepdim=True) > 1e-12, nn.functional.normalize(product, dim=-1), v)
                sigma = torch.einsum("eio,ei,eo->e", w, u, vectors[name])
                critic[name] = w * (self.config.spectral_norm / sigma.clamp(min=1e-12)).clamp(max=1.0).view(-1, 1, 1)
        return state._replace(params={**state.params, "critic": critic}, extra={**state.extra, "spectral": vectors})


class Value(Part):
    """V(s) with the critics' head and options, the algorithm's module "value"."""

    config: CriticSettings

    def __init__(self, config: Any, spec: DataSpec, *, layer_norm: bool = False, norm_first: bool = False) -> None:
        """layer_norm: with LayerNorm even where the critics have none; norm_first: before the activation. Raises UserError."""
        super().__init__(config, spec)
        self.head = make_value_head(config)
        self.network = MLP(
            spec.observation_dim,
            config.critic_hidden or config.hidden,
            self.head.out_dim,
            layer_norm=config.layer_norm or layer_norm,
            layer_norm_epsilon=config.layer_norm_epsilon,
            norm_first=norm_first,
            residual=config.residual,
            init=config.init,
        )

    def __call__(self, params: Params, observations: Tensor) -> Values:
        """V [B] and the outputs [B, out_dim]."""
        logits = call(self.network, params, observations)
        return Values(self.head.mean(logits), logits)

    def objective(self, v: Values, target: Values) -> Tensor:
        """The head's loss of V against the values [B] of critics: [B]."""
        assert v.logits is not None
        bootstrap = None if target.logits is None else Bootstrap(target.logits, torch.ones_like(target.mean))
        return self.head.loss(v.logits, target.mean, bootstrap)
