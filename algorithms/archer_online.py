"""ArCHer as it was made: the agent plays, a critic of whole utterances learns off-policy from all that was played, and the actor follows it
("ArCHer: Training Language Model Agents via Hierarchical Multi-Turn RL", Zhou et al., 2024, arXiv 2402.19446)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Metrics, TrainState, Traits, Tree
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.fit import check_fit
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.lm import replay as rings
from offrl.lm.actor import PROMPTS
from offrl.lm.algorithm import SHARE, language_model
from offrl.lm.archer import Hierarchical, HierarchicalSettings
from offrl.lm.models.causal_lm import Valued
from offrl.lm.rollouts import played
from offrl.lm.sampler import ACTION, IDS
from offrl.lm.utterances import EACH, trim
from offrl.optim import Params
from offrl.pretrained import Requirement
from offrl.registry import register
from offrl.settings.evaluation import EvalConfig
from offrl.settings.field import setting
from offrl.tasks.environments import resolve_task
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

BAR = "bar"  # the batch's column of Qbar at fresh actions, [B, 2]


@dataclass
class ArCHerOnlineConfig(HierarchicalSettings):
    """Settings of online ArCHer."""

    name: str = "archer_online"
    start: str = setting(
        "cloned",
        "what the actor begins with: the language model as it is, or a cloned policy (algo.policy)",
        choices=("language_model", "cloned"),
    )
    discount: float = setting(0.95, "discount factor, of each turn", low=0.0, high=1.0)
    polyak: float = setting(0.1, "rate at which the critic's target follows", low=0.0, high=1.0)
    env: str = setting("", "Gymnasium id of the environment that is played; empty: the data set's own")
    rollouts: int = setting(128, "episodes that are played in each iteration", low=1)
    parallel: int = setting(32, "episodes that are played side by side", low=1, high=PROMPTS)
    max_turns: int | None = setting(None, "turns after which an episode is cut off; null: the environment's own limit", low=1)
    critic_steps: int = setting(50, "updates of the critic in each iteration", low=1)
    actor_steps: int = setting(3, "updates of the actor in each iteration, after the critic's", low=1)
    warmup_iterations: int = setting(10, "iterations at the beginning in which the critic learns alone", low=0)
    capacity: int = setting(10_000, "turns that are remembered, the newest ones", low=1)
    from_data: bool = setting(False, "the memory begins with the data set's last turns, not empty")
    data_share: float = setting(0.0, "of each batch that is drawn from the data set, the rest from what was played", low=0.0, high=1.0)
    token_baseline: bool = setting(False, "the actor learns from the advantage less what it learns to predict of it at each token")


@register("algo", "archer_online")
class ArCHerOnline(Hierarchical):
    """V_i(s) -> Qbar_i(s, a), a a sample of the actor; the actor minimises -(min Q(s, a) - min V(s)) log pi(a|s) for such samples, a whole
    utterance each (arXiv 2402.19446, sections 4.2 and 4.3, algorithm 1).

    An iteration is `rollouts` episodes, then `critic_steps` and `actor_steps` updates. A turn is drawn from all that is remembered.
    """

    Config = ArCHerOnlineConfig
    rates: ClassVar[dict[str, tuple[float, float]]] = {"actor_learning_rate": (3e-6, 3e-4), "critic_learning_rate": (2e-5, 1e-3)}

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """Raises UserError where there is no environment to play in, or it does not speak; and for legal=rerank."""
        if config.algo.legal == "rerank":
            raise UserError("algo.legal=rerank: archer_online learns from what its actor writes freely; take algo.legal=ignore")
        if dataset.spec.text:
            check_fit(dataset.spec, played_in(config.algo, dataset.spec))
        return super().requires(config, dataset)

    # ---- an iteration

    @property
    def every(self) -> int:
        return self.traits.period

    @classmethod
    def traits_for(cls, config: Any) -> Traits:
        # a pattern is an iteration: what is logged of the critic and of the actor is the mean over their own updates
        return replace(cls.traits, period=int(config.critic_steps + config.actor_steps))

    @property
    def width(self) -> int:
        """Most tokens of a state and an action."""
        return int(self.config.length + (self.config.action_tokens or 1))

    def buffers(self) -> Tree:
        return {"ring": rings.empty(self.config.capacity, self.width)}

    def refresh(self, state: TrainState, source: Any, key: Tensor, *, step: int) -> tuple[TrainState, Metrics]:
        """Play, and remember it."""
        c, ring = self.config, state.buffers["ring"]
        if step == 0 and c.from_data:
            ring = rings.filled(ring, source)
        episodes = played(self, state, played_in(c, self.spec), c.rollouts, key, c.parallel, c.max_turns)
        ring = rings.push(ring, rings.of_episodes(self, episodes, self.width, ring["at"].device))
        many = [len(e["turns"]) for e in episodes]
        found = {
            "return": [sum(t["reward"] for t in e["turns"]) for e in episodes],
            "turns": many,
            "misunderstood": [e["meta"].get("misunderstood", 0) / n for e, n in zip(episodes, many, strict=True)],
            "success": [float(e["meta"]["success"]) for e in episodes if "success" in e["meta"]],
        }
        means = {f"rollout/{n}": torch.tensor(float(sum(v)) / len(v), device=ring["at"].device) for n, v in found.items() if v}
        return state._replace(buffers={**state.buffers, "ring": ring}), means

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        c = self.config
        pick, write = rng.split(rng.fold_in(key, 401))
        own = round(len(batch[IDS]) * c.data_share)
        memory = rings.draw(state.buffers["ring"], pick, len(batch[IDS]) - own)
        turn = trim(rings.joined({name: column[:own] for name, column in batch.items()}, memory))
        fresh = self.fresh(state, turn, write)
        if phase >= c.critic_steps and int(state.step) >= c.warmup_iterations * self.every:
            return self.descend(state, "policy", self.actor_loss, fresh)
        turn[BAR] = self.bars(state, fresh).transpose(0, 1)
        state, metrics = self.descend(state, "critic", self.critic_loss, turn)
        return self.polyak(state, "critic", c.polyak), metrics

    # ---- learning

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        q, read = self.qs(critic, batch)
        v, each = self.vs(critic, read), batch[EACH]
        fit = self.q_loss(q, state, batch)
        follow = (self.head.loss(v, batch[BAR].transpose(0, 1)) * each).sum()
        means = {"critic/q": (self.head.mean(q)[0] * each).sum(), "critic/v": (self.head.mean(v)[0] * each).sum()}
        return fit + follow, {"critic/q_loss": fit, "critic/v_loss": follow, **means}

    def make_actor(self) -> nn.Module:
        lm = language_model(self.config)
        return Valued(lm, {"baseline": 1}, self.config.value_layers) if self.config.token_baseline else lm

    def actor_loss(self, policy: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        """batch: with fresh actions."""
        each, advantage = batch[EACH], self.advantage(state, batch)
        hidden = self.apply("policy", policy, "hidden", batch[IDS])
        likely = self.log_probs_of(batch, hidden, policy)
        means = {"actor/advantage": (advantage * each).sum(), "actor/log_prob": (likely.sum(-1) * each).sum()}
        if not self.config.token_baseline:
            loss = -(advantage * likely.sum(-1) * each).sum()
            return loss, {"actor/loss": loss, **means}
        expected = self.apply("policy", policy, "judge", hidden[:, :-1], "baseline")[0].squeeze(-1)
        rest = (advantage.unsqueeze(-1) - expected) * batch[ACTION][:, 1:]
        loss = -((rest.detach() * likely).sum(-1) * each).sum()
        fit = (rest.square().sum(-1) * batch[SHARE]).sum()
        return loss + fit, {"actor/loss": loss, "actor/baseline_loss": fit, **means}


def played_in(config: Any, spec: DataSpec) -> Task:
    """The task that is played. Raises UserError where there is none."""
    task = resolve_task(spec.task, EvalConfig(env=config.env or "auto"))
    if task is None:
        raise UserError(
            f"{config.name} plays episodes, and {spec.name} names no environment: algo.env=ID names one; algo=archer learns without"
        )
    return task
