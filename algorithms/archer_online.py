"""ArCHer as it was made: the agent plays, a critic of whole utterances learns off-policy from all that was played, and
the actor follows it ("ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL", Zhou et al., 2024, arXiv
2402.19446)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import (
    Batch,
    Dataset,
    DataSpec,
    Grid,
    Loss,
    Params,
    Requirement,
    Sampler,
    TrainConfig,
    TrainState,
    Traits,
    Tree,
    Update,
)
from offrl.data.fit import check_fit
from offrl.errors import UserError
from offrl.lm import replay as rings
from offrl.lm.actor import PROMPTS, TextActor
from offrl.lm.algorithm import TextAlgorithm
from offrl.lm.models.causal_lm import LMWithHeads
from offrl.lm.models.configured import language_model
from offrl.lm.models.decoding import uniform_noise
from offrl.lm.rollouts import episode_means, play_episodes
from offrl.lm.sampler import ACTION, IDS, KNOWN, SHARE, token_log_probs
from offrl.lm.settings import ValueHeadSettings, with_value_range
from offrl.lm.utterance_critic import UtteranceCritic, UtteranceCriticSettings
from offrl.lm.utterances import EACH, first_of, trim, utterance_sampler, with_actions, with_rates
from offrl.registry import register
from offrl.settings.evaluation import EvalConfig
from offrl.settings.field import defaults, setting
from offrl.tasks.environments import resolve_task
from offrl.tasks.task import Task

TARGET_Q = "target_q"  # the batch's column of Qbar at fresh actions, [B, 2]
RATES = {"actor_learning_rate": (3e-6, 3e-4), "critic_learning_rate": (2e-5, 1e-3)}


@dataclass
@defaults(start="cloned")
class ArCHerOnlineConfig(ValueHeadSettings, UtteranceCriticSettings):
    """Settings of online ArCHer."""

    name: str = "archer_online"
    discount: float = setting(0.95, "discount factor, of each turn", low=0.0, high=1.0)
    polyak: float = setting(0.1, "rate at which the critic's target follows", low=0.0, high=1.0)
    env: str = setting("", "Gymnasium id of the environment that is played; empty: the dataset's own")
    iteration_episodes: int = setting(128, "episodes that are played in each iteration", low=1)
    parallel: int = setting(32, "episodes that are played side by side", low=1, high=PROMPTS)
    max_turns: int | None = setting(
        None, "turns after which an episode is cut off; null: the environment's own limit", low=1
    )
    critic_steps: int = setting(50, "updates of the critic in each iteration", low=1)
    actor_steps: int = setting(3, "updates of the actor in each iteration, after the critic's", low=1)
    warmup_iterations: int = setting(10, "iterations at the beginning in which the critic learns alone", low=0)
    capacity: int = setting(10_000, "turns that are remembered, the newest ones", low=1)
    from_data: bool = setting(False, "the memory begins with the dataset's last turns, not empty")
    data_share: float = setting(
        0.0, "of each batch that is drawn from the dataset, the rest from what was played", low=0.0, high=1.0
    )
    token_baseline: bool = setting(
        False, "the actor learns from the advantage less what it learns to predict of it at each token"
    )


@register("algo", "archer_online")
class ArCHerOnline(TextAlgorithm[ArCHerOnlineConfig]):
    """A critic of whole utterances, learnt off-policy, above an actor that writes tokens (arXiv 2402.19446, sections
    4.2 and 4.3, algorithm 1). Two Qs and two Vs, each pair with targets of its own.

    An iteration is `iteration_episodes` episodes, then `critic_steps` and `actor_steps` updates. Turns are drawn from
    the whole ring.
    """

    traits = replace(TextAlgorithm.traits, targets=("critic",))

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """The reference policy, where one is cloned. Raises UserError without an environment of texts, and for
        legal=rerank.
        """
        if config.algo.legal == "rerank":
            raise UserError(
                "algo.legal=rerank: archer_online learns from what its actor writes freely; take algo.legal=ignore"
            )
        if dataset.spec.text:
            check_fit(dataset.spec, played_in(config.algo, dataset.spec))
        return super().requires(config, dataset)

    @classmethod
    def fit_config(cls, config: ArCHerOnlineConfig, dataset: Dataset, grid: Grid = None) -> ArCHerOnlineConfig:
        return with_value_range(with_rates(super().fit_config(config, dataset, grid), RATES), dataset)

    def modules(self) -> dict[str, nn.Module]:
        c = self.config
        self.critic = UtteranceCritic(c, self.spec)
        lm = language_model(c)
        return {
            "policy": LMWithHeads(lm, {"baseline": 1}, c.value_layers) if c.token_baseline else lm,
            "critic": self.critic.network,
        }

    def sampler(self) -> Sampler:
        return utterance_sampler(self.config, self.config.discount)

    @property
    def every(self) -> int:
        return self.traits.period

    @classmethod
    def traits_for(cls, config: ArCHerOnlineConfig) -> Traits:
        # a pattern is an iteration: what is logged of the critic and of the actor is the mean over their own updates
        return replace(cls.traits, period=int(config.critic_steps + config.actor_steps))

    @property
    def width(self) -> int:
        """The largest number of tokens of a state and an action."""
        return int(self.config.length + (self.config.action_tokens or 1))

    def buffers(self) -> Tree:
        return {"ring": rings.empty(self.config.capacity, self.width)}

    def refresh(self, state: TrainState, source: Any, key: Tensor, *, step: int) -> Update:
        """Play episodes and add their turns to the ring."""
        c, ring = self.config, state.buffers["ring"]
        if step == 0 and c.from_data:
            ring = rings.fill(ring, source)
        episodes = play_episodes(
            self, state, played_in(c, self.spec), c.iteration_episodes, key, c.parallel, c.max_turns
        )
        ring = rings.push(ring, rings.of_episodes(self, episodes, self.width, ring["at"].device))
        means = {name: torch.tensor(mean, device=ring["at"].device) for name, mean in episode_means(episodes).items()}
        return state._replace(buffers={**state.buffers, "ring": ring}), means

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        c = self.config
        draw_key, write_key = rng.split(rng.fold_in(key, 401))
        from_data = round(len(batch[IDS]) * c.data_share)
        memory = rings.draw(state.buffers["ring"], draw_key, len(batch[IDS]) - from_data)
        turn = trim(rings.join({name: column[:from_data] for name, column in batch.items()}, memory))
        rewritten = self.rewritten(state, turn, write_key)
        if phase >= c.critic_steps and int(state.step) >= c.warmup_iterations * self.every:
            return self.descend(state, "policy", self.actor_loss, rewritten)
        turn[TARGET_Q] = self.critic.target_q(state.target["critic"], rewritten).transpose(0, 1)
        state, metrics = self.descend(state, "critic", self.critic_loss, turn)
        return self.polyak(state, "critic"), metrics

    def rewritten(self, state: TrainState, batch: Batch, key: Tensor) -> Batch:
        """The batch with actions that the policy writes now."""
        lengths, ids = first_of(batch).tolist(), batch[IDS].cpu().numpy()
        prompts = [ids[row, :end] for row, end in enumerate(lengths)]
        with torch.no_grad():
            return with_actions(
                batch, TextActor(self, state).write(prompts, uniform_noise(key, range(len(prompts)), batch[IDS].device))
            )

    # ---- learning

    def q_loss(self, q: Tensor, state: TrainState, batch: Batch) -> Tensor:
        """sum_i E (r + gamma (1 - d) Vbar_i(s') - Q_i(s, a))^2, where s' is known or not needed. q: outputs [2, B,
        K].
        """
        target = self.critic.td_target(state.target["critic"], batch)
        return (self.critic.head.loss(q, target) * batch[KNOWN].float() * batch[EACH]).sum()

    def v_loss(self, v: Tensor, batch: Batch) -> Tensor:
        """sum_i E (Qbar_i(s, a) - V_i(s))^2, a a sample of the actor. v: outputs [2, B, K]."""
        return (self.critic.head.loss(v, batch[TARGET_Q].transpose(0, 1)) * batch[EACH]).sum()

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> Loss:
        """L_Q + L_V."""
        q, v = self.critic.q_and_v(critic, batch)
        q_loss, v_loss = self.q_loss(q, state, batch), self.v_loss(v, batch)
        means = {
            name: (self.critic.head.mean(x)[0] * batch[EACH]).sum() for name, x in (("critic/q", q), ("critic/v", v))
        }
        return q_loss + v_loss, {"critic/q_loss": q_loss, "critic/v_loss": v_loss, **means}

    def actor_loss(self, policy: Params, state: TrainState, batch: Batch) -> Loss:
        """-E sum_t (A - b_t) log pi(a_t|s, a_<t) + E (A - b_t)^2, a the actor's, A = min_i Q_i(s, a) - min_i V_i(s),
        b_t the baseline of each token (0 without `token_baseline`). batch: with fresh actions."""
        row_weight, advantage = batch[EACH], self.critic.advantage(state.params["critic"], batch)
        hidden = self.apply("policy", policy, "hidden", batch[IDS])
        log_probs = token_log_probs(partial(self.apply, "policy", policy, "logits"), hidden, batch)
        means = {
            "actor/advantage": (advantage * row_weight).sum(),
            "actor/log_prob": (log_probs.sum(-1) * row_weight).sum(),
        }
        if not self.config.token_baseline:
            loss = -(advantage * log_probs.sum(-1) * row_weight).sum()
            return loss, {"actor/loss": loss, **means}
        baseline = self.apply("policy", policy, "outputs", hidden[:, :-1], "baseline")[0].squeeze(-1)
        residual = (advantage.unsqueeze(-1) - baseline) * batch[ACTION][:, 1:]
        loss = -((residual.detach() * log_probs).sum(-1) * row_weight).sum()
        baseline_loss = (residual.square().sum(-1) * batch[SHARE]).sum()
        return loss + baseline_loss, {"actor/loss": loss, "actor/baseline_loss": baseline_loss, **means}


def played_in(config: ArCHerOnlineConfig, spec: DataSpec) -> Task:
    """The task that is played. Raises UserError where there is none."""
    task = resolve_task(spec.task, EvalConfig(env=config.env or "auto"))
    if task is None:
        raise UserError(
            f"{config.name} plays episodes, and {spec.name} names no environment: algo.env=ID names one; algo=archer "
            "learns without"
        )
    return task
