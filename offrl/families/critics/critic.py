"""Critics as a part that an algorithm has: networks with any value head, their values, their losses, their
regularisers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad

from offrl import losses, rng
from offrl.algorithm import DataSpec, Loss, Params, Part, TrainState
from offrl.data.samplers.transitions import SPAN, Batch, discounted
from offrl.errors import UserError
from offrl.families.critics.value import CriticSettings, Objective, Target, Values, make_value_head
from offrl.nn import Bootstrap, EnsembleMLP, Pairs, call
from offrl.nn.encoders.own import ENCODER_PART, members
from offrl.nn.heads import C51


def represents(config: Any) -> bool:
    """Whether these settings ask for latents; of the same name hierarchies have a number."""
    return getattr(config, "representation", "none") == "mrq"


class Critic(Part):
    """An ensemble of E critics Q(s, a), the algorithm's module "critic".

    Continuous actions are inputs; discrete ones have an output each.
    """

    config: CriticSettings
    # z(s, a) [..., L], which critics see in place of [s, a] where there is a representation, while an update runs
    pairs: Callable[[Tensor, Tensor], Tensor] | None = None

    def __init__(
        self, config: CriticSettings, spec: DataSpec, size: int | None = None, *, norm_first: bool = False
    ) -> None:
        """spec: of the critics' observations and actions. size: critics; None: as many as the settings say. norm_first:
        LayerNorm stands before the activation. Raises UserError."""
        super().__init__(config, spec)
        if config.target_critics > config.critics:
            raise UserError(f"algo.target_critics={config.target_critics} is more than algo.critics={config.critics}")
        self.head = make_value_head(config)
        without = spec.discrete or represents(config)  # actions are no inputs
        inputs = spec.observation_dim + (0 if without else spec.action_dim)
        outputs = self.head.out_dim * (spec.num_actions if spec.discrete else 1)
        self.network = self.make_network(size or config.critics, inputs, outputs, norm_first)

    def make_network(self, size: int, inputs: int, outputs: int, norm_first: bool) -> nn.Module:
        """The network of `size` critics, [B, inputs] -> [size, B, outputs]."""
        config = self.config
        return EnsembleMLP(
            size,
            inputs,
            config.critic_hidden or config.hidden,
            outputs,
            activation=config.activation,
            layer_norm=config.layer_norm,
            layer_norm_epsilon=config.layer_norm_epsilon,
            norm_first=norm_first,
            residual=config.residual,
            dropout=config.critic_dropout,
            init=config.init,
        )

    def begin(self, state: TrainState) -> TrainState:
        """The critics and their targets within the bound of their singular values from the first update on."""
        if not self.config.spectral_norm:
            return state
        # the first power iteration starts from equal entries; iterations go on from update to update
        vectors = {
            k: torch.ones_like(w[:, 0])
            for k, w in state.params["critic"].items()
            if k.endswith("weight") and ENCODER_PART not in k
        }
        state = state.with_extra(spectral=vectors)
        for _ in range(20):
            state = self.spectral_normalise(state)
        return state._replace(
            target={**state.target, "critic": {k: v.clone() for k, v in state.params["critic"].items()}}
        )

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
            return self(params, self.inputs(observations, actions), key)
        return self(params, Pairs(observations, actions), key).unflatten(1, actions.shape[:2])

    def inputs(self, observations: Tensor, actions: Tensor) -> Tensor:
        """The inputs of the networks [..., inputs] for continuous actions."""
        return torch.cat([observations, actions], -1) if self.pairs is None else self.pairs(observations, actions)

    def logits_of_all(self, params: Params, observations: Tensor, key: Tensor | None = None) -> Tensor:
        """Outputs of every critic for every discrete action: [E, B, K, out_dim]."""
        out = self(params, observations, key)
        return out.reshape(*out.shape[:2], self.spec.num_actions, self.head.out_dim)

    def q(self, params: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """Q of every critic: [E, B], or [E, M, B] for M actions at each observation."""
        return self.head.mean(self.logits(params, observations, actions))

    def actor_q(self, params: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """What an actor maximises, as `q`: the mean of returns, or their CVaR at the level `risk`."""
        return self.at_risk(self.logits(params, observations, actions))

    def at_risk(self, logits: Tensor) -> Tensor:
        """The same of outputs [..., out_dim]: [...]."""
        mean, risk = self.head.mean(logits), getattr(self.config, "risk", 1.0)
        if not isinstance(risk, Tensor):  # which it is where a grid varies it
            return mean if risk == 1.0 else self.head.cvar(logits, risk)
        return torch.where(risk == 1.0, mean, self.head.cvar(logits, risk))

    def min_q(self, params: Params, observations: Tensor, actions: Tensor) -> Values:
        """The smallest of the critics' values, [B]."""
        return self.smallest(self.logits(params, observations, actions))

    def smallest(self, logits: Tensor) -> Values:
        """The smallest value [B] of outputs [E, B, out_dim], and the outputs [B, out_dim] that it came from if the head
        needs them.
        """
        values = self.head.mean(logits)
        if not self.head.distributional:
            return Values(values.amin(0))
        index = values.argmin(0).view(1, -1, 1).expand(1, -1, logits.shape[-1])
        return Values(values.amin(0), logits.gather(0, index).squeeze(0))

    def expected_q(
        self, params: Params, observations: Tensor, log_p: Tensor, reduce: str = "min", at_risk: bool = False
    ) -> Values:
        """Discrete actions: the mean of Q under a policy's log probabilities [B, K], exact, [B].

        Its outputs, if the head needs them, are the policy's mixture of the distributions of the smallest critics, as
        log probabilities [B, bins]. reduce: see `reduce_ensemble`; at_risk: see `actor_q`.
        """
        outputs = self.logits_of_all(params, observations)  # [E, B, K, out_dim]
        values = self.at_risk(outputs) if at_risk else self.head.mean(outputs)
        value = (log_p.exp() * self.reduce_ensemble(values, reduce)).sum(-1)
        if not self.head.distributional:
            return Values(value)
        self._check_mixture()
        index = values.argmin(0)[None, ..., None].expand(1, *outputs.shape[1:])
        return Values(value, (outputs.log_softmax(-1).gather(0, index).squeeze(0) + log_p.unsqueeze(-1)).logsumexp(-2))

    def aggregate(self, logits: Tensor, how: str, rho: float | Tensor = 0.5) -> Values:
        """One value [B] of the critics' outputs [E, B, out_dim]: their smallest ("min"), their mean ("mean"), or mean -
        rho std ("std").

        std is the population's, over E. A distribution (for a head that uses it) is the mixture of all, moved where a
        std is subtracted."""
        if how == "min":
            return self.smallest(logits)
        value = self.reduce_ensemble(self.head.mean(logits), how, rho)
        if not self.head.distributional:
            return Values(value)
        self._check_mixture()
        return Values(value, logits.log_softmax(-1).logsumexp(0) - math.log(logits.shape[0]))

    def _check_mixture(self) -> None:
        if not isinstance(self.head, C51):
            raise UserError(
                f"algo.value_head={self.config.value_head} cannot hold a mixture of distributions, which targets are "
                "here (discrete actions, or the mean of critics); take c51"
            )

    @staticmethod
    def reduce_ensemble(values: Tensor, reduce: str = "min", rho: float | Tensor = 0.5) -> Tensor:
        """One value of the critics' [E, ...]: the smallest ("min"), their mean ("mean"), or mean - rho std ("std"), the
        population's.
        """
        if reduce == "std":
            return values.mean(0) - rho * values.std(0, correction=0)
        return values.mean(0) if reduce == "mean" else values.amin(0)

    def target_critics(self, state: TrainState, key: Tensor) -> Params:
        """The target critics of a TD target: all, or a random subset (REDQ, arXiv 2101.05982)."""
        c, target = self.config, state.target["critic"]
        if c.target_critics in (0, c.critics):
            return target
        indices = rng.uniform(key, (c.critics,)).topk(c.target_critics).indices
        return members(target, indices)

    def td_target(self, batch: Batch, next_value: Values, discount: float | Tensor | None = None) -> Target:
        """r + discount (1 - terminated) V(s'); of windows of m steps sum_k discount^k r_k + discount^m (1 - terminated)
        V(s_m).

        discount: of what follows a transition; None: the settings'. Raises UserError for n_step where batches have no
        windows."""
        rewards, gamma = (
            (batch["rewards"], discount) if discount is not None else discounted(batch, self.config.discount)
        )
        if self.config.n_step > 1 and SPAN not in batch:
            raise UserError(
                f"algo.n_step={self.config.n_step}: {getattr(self.config, 'name', 'it')} has no n-step targets; leave "
                "it at 1"
            )
        bootstrap = self.bootstrap(next_value, gamma * batch["masks"])
        return Target(losses.td_target(rewards, batch["masks"], gamma, next_value.mean), bootstrap)

    def bootstrap(self, next_value: Values, scale: Tensor) -> Bootstrap | None:
        """The next value's distribution, which counts `scale` [B] in the target; None for a head without a
        distribution.
        """
        if not self.head.distributional or next_value.logits is None:
            return None
        return Bootstrap(next_value.logits, scale)

    # ---- learning

    def objective(self, logits: Tensor, target: Target) -> Tensor:
        """The head's loss of outputs [E, B, out_dim] against their target: [E, B]."""
        return self.head.loss(logits, target.value, target.bootstrap)

    def mean_objective(self, logits: Tensor, target: Target) -> Tensor:
        """`objective` over E, so that `loss` is the mean over critics in place of their sum."""
        return self.objective(logits, target) / logits.shape[0]

    def loss(
        self,
        params: Params,
        batch: Batch,
        target: Target,
        key: Tensor,
        logits: Tensor | None = None,
        objective: Objective | None = None,
    ) -> Loss:
        """The critics' loss at the data's actions: the mean over the batch, summed over critics, with their
        regularisers.

        logits: the critics' outputs there, where they are known already. objective: in place of the head's loss.
        """
        observations, actions = batch["observations"], batch["actions"]
        if logits is None:
            logits = self.logits(
                params, observations, actions, rng.fold_in(key, 101) if self.config.critic_dropout else None
            )
        loss = (objective or self.objective)(logits, target).mean(-1).sum()
        value = self.head.mean(logits)
        metrics = {
            "critic/loss": loss,
            "critic/q": value.mean(),
            "critic/td_error": (value - target.value).abs().mean(),
        }
        if (saturation := self.head.saturation(target.value)) is not None:
            metrics["critic/saturation"] = saturation
        if self.config.lipschitz:
            change = self.fgsm_change(params, observations, actions)
            loss = loss + self.config.lipschitz * change
            metrics["critic/lipschitz"] = change
        return loss, metrics

    def fgsm_change(self, params: Params, observations: Tensor, actions: Tensor) -> Tensor:
        """Mean square of Q(s + d, a) - Q(s, a), summed over critics, with d of size lipschitz_radius in each entry
        along the sign of the gradient (arXiv 2302.01244, the robust regularisation with one step of FGSM)."""
        constant = {k: v.detach() for k, v in params.items()}

        def values(p: Params, inputs: Tensor) -> Tensor:  # of each critic at observations [E, B, O] of its own
            if self.spec.discrete:
                out = self(p, inputs)
                q = self.head.mean(out.reshape(*out.shape[:2], self.spec.num_actions, self.head.out_dim))
                return q.gather(2, actions.view(1, -1, 1).expand(q.shape[0], -1, 1)).squeeze(2)
            return self.head.mean(self(p, self.inputs(inputs, actions.expand(inputs.shape[0], *actions.shape))))

        inputs = observations.expand(self.config.critics, *observations.shape)
        # the sum over critics has each critic's slope apart, for each has observations of its own
        slope = grad(lambda x: values(constant, x).sum())(inputs)
        shifted = inputs + self.config.lipschitz_radius * slope.detach().sign()
        return (values(params, shifted) - values(params, inputs)).square().mean(-1).sum()

    def regularised(self, state: TrainState) -> TrainState:
        """The state after an update of the critics: their singular values within `spectral_norm`, where it is set."""
        return self.spectral_normalise(state) if self.config.spectral_norm else state

    def spectral_normalise(self, state: TrainState) -> TrainState:
        """W <- W min(1, bound / sigma(W)) for every layer of every critic, sigma by one power iteration (arXiv
        2302.01244, section 4).
        """
        critic, vectors = dict(state.params["critic"]), {}
        with torch.autocast(state.step.device.type, enabled=False):  # in bfloat16 sigma is 1% off
            for name, v in state.extra["spectral"].items():
                w = critic[name]  # [E, in, out]
                u = nn.functional.normalize(torch.einsum("eio,eo->ei", w, v), dim=-1)
                product = torch.einsum("eio,ei->eo", w, u)
                # a layer of zeros has no direction: the old one is kept, lest the bound be off for ever
                vectors[name] = torch.where(
                    product.norm(dim=-1, keepdim=True) > 1e-12, nn.functional.normalize(product, dim=-1), v
                )
                sigma = torch.einsum("eio,ei,eo->e", w, u, vectors[name])
                critic[name] = w * (self.config.spectral_norm / sigma.clamp(min=1e-12)).clamp(max=1.0).view(-1, 1, 1)
        return state._replace(params={**state.params, "critic": critic}, extra={**state.extra, "spectral": vectors})
