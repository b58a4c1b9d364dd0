"""RAMBO: "RAMBO-RL: Robust Adversarial Model-Based Offline Reinforcement Learning" (Rigter et al., 2022, arXiv
2204.12581).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Grid, Loss, TrainState, Tree, Update
from offrl.algorithms.rambo.model import log_mixture, training_table
from offrl.algorithms.rambo.settings import RAMBOConfig, first_params, model_shape, requirements, with_shape
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch
from offrl.errors import UserError
from offrl.families.sac import SoftActorCritic
from offrl.optim import Adam, Params
from offrl.pretrained import Requirement
from offrl.registry import register
from offrl.world_models import ensemble, model_rollouts
from offrl.world_models.dynamics import member_losses
from offrl.world_models.ensemble import GaussianEnsemble
from offrl.world_models.model_rollouts import ModelRollouts, ModelSampler, ModelSource, policy_of
from offrl.world_models.rollout import Imagined, describe

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig


@register("algo", "rambo")
class RAMBO(SoftActorCritic):
    """The model plays against the policy: it learns to lower the policy's value, and stays near what explains the data
    (algorithm 1).

    Module "dynamics" is a replica's own model; it begins as the shared one. All actors begin as one clone of the data's
    behaviour, of a run that comes first (the authors clone it for each seed anew). The authors do 1,000 updates of the
    model after every 1,000 of the policy; here one comes after each, compiled with it: as many, and neither waits for
    the other. Their imagined states go on from one update to the next for `horizon` steps; then, and where an episode
    ended, a new state of the data begins.
    """

    Config = RAMBOConfig
    traits = replace(SoftActorCritic.traits, actions=("continuous",), n_step=False)

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        """The config completed from the data. Raises UserError for settings that contradict each other."""
        model_rollouts.check(config, grid)
        if config.random_rollouts and config.candidates > 1:
            raise UserError(
                f"algo.candidates={config.candidates} chooses among actions of the policy, and "
                "algo.random_rollouts=true imagines random "
                "ones: leave one of them out"
            )
        return super().fit_config(config, dataset, grid)

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        return requirements(config, dataset)

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        return with_shape(config, pretrained["world_model"].model)

    def modules(self) -> dict[str, nn.Module]:
        self.rollouts = ModelRollouts(self.config, self.spec)
        members, history, ending, *hidden = model_shape(self.config)
        inputs = history * (self.spec.observation_dim + self.spec.action_dim)
        model = GaussianEnsemble(members, inputs, self.spec.observation_dim + 1, hidden, ending=bool(ending))
        return {**super().modules(), "dynamics": model}

    def optimizer(self, name: str) -> Adam:
        return Adam(self.config.model_learning_rate) if name == "dynamics" else super().optimizer(name)

    def extra(self, params: dict[str, Params]) -> Tree:
        rows, width, history = self.config.batch_size, self.spec.observation_dim, model_shape(self.config)[1]
        past = torch.zeros(rows, history - 1, width + self.spec.action_dim)
        return {**super().extra(params), "imagined": {"observations": torch.zeros(rows, width), "past": past}}

    def init(self, seed: int) -> TrainState:
        """The actor begins as the clone of the data's behaviour, and the model as the trained one."""
        state = super().init(seed)
        return state._replace(params=first_params(self.pretrained, state.params))

    # ---- rollouts

    def sampler(self) -> ModelSampler:
        return ModelSampler(self.rollouts, self.pretrained, training_table)

    def buffers(self) -> Tree:
        return self.rollouts.buffers()

    @property
    def every(self) -> int:
        return self.config.rollout_every

    def roll(self, state: TrainState, source: ModelSource, key: Tensor) -> Imagined:
        """New rollouts of the policy, or of uniform actions, in the replica's own model."""
        policy = (
            self.random_policy
            if self.config.random_rollouts
            else policy_of(partial(self.sample, state.params["actor"]))
        )
        return self.rollouts.roll(source, policy, self.rollouts.penalised, key, state.params["dynamics"])

    def random_policy(self, observations: Tensor, past: Tensor, key: Tensor) -> Tensor:
        """Uniform actions [B, A]."""
        return rng.uniform(key, (observations.shape[0], self.spec.action_dim), -1.0, 1.0)

    def refresh(self, state: TrainState, source: ModelSource, key: Tensor, *, step: int) -> Update:
        start_key, rollout_key = rng.split(key)
        if step == 0:  # states to imagine from
            observations, past = self.rollouts.starts(source, rng.split(start_key)[1], self.config.batch_size)
            state = state._replace(
                extra={**state.extra, "imagined": {"observations": observations, "past": past.clone()}}
            )
        imagined = self.roll(state, source, rollout_key)
        return self.rollouts.add(state, imagined), describe(imagined)

    # ---- the model against the policy

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        mixture = self.rollouts.mixed(state, batch, rng.fold_in(key, 301))
        state, metrics = super().update(state, mixture, key, phase=phase)
        rate = self.config.model_learning_rate
        if not isinstance(rate, Tensor) and rate == 0.0:  # in a grid it is one: an update at 0 changes nothing either
            return state, metrics
        state, adversarial_metrics = self.oppose(state, rng.fold_in(key, 302))
        return state, {**metrics, **adversarial_metrics}

    def oppose(self, state: TrainState, key: Tensor) -> Update:
        """One update of the model, along one step of the imagined states."""
        c, source, imagined = self.config, self.runtime.source, state.extra["imagined"]
        model, tree = source.model, self.rollouts.tree(source, state.params["dynamics"])
        action_key, member_key, noise_key, end_key, start_key, data_key = rng.split(key, 6)
        observations, past = imagined["observations"], imagined["past"]
        actions, _ = self.sample(state.params["actor"], observations, action_key)

        inputs = model.inputs(observations, actions, past)
        raw = model.raw(tree["params"], tree, inputs)
        member = model.elite(tree, member_key, c.batch_size)
        mean, std = self.moments(tree, raw)
        index = member.view(1, -1, 1).expand(1, -1, model.out_dim)
        sample = mean.gather(0, index) + std.gather(0, index) * rng.normal(
            noise_key, (1, c.batch_size, model.out_dim)
        )  # [1, B, D]
        ending = None if raw.ending is None else raw.ending.gather(0, member.unsqueeze(0))
        prediction = model.read(tree, ensemble.Raw(sample, torch.zeros_like(sample), ending), observations)
        outcome = model.settle(
            tree, prediction, observations, actions, prediction.mean[0], prediction.reward[0], end_key
        )

        advantage = self.advantage(
            state, observations, actions, outcome.rewards, outcome.terminations, outcome.next_observations
        )
        batch = self.real(source, data_key)
        state, metrics = self.descend(state, "dynamics", self.model_loss, inputs, sample[0], advantage, batch)

        restart = (outcome.terminations | ((state.step + 1) % c.horizon == 0)).unsqueeze(-1)
        start_observations, start_past = self.rollouts.starts(source, start_key, c.batch_size)
        continuation = {
            "observations": torch.where(restart, start_observations, outcome.next_observations),
            "past": torch.where(restart.unsqueeze(-1), start_past, model.later_past(past, observations, actions)),
        }
        return state._replace(extra={**state.extra, "imagined": continuation}), metrics

    def moments(self, tree: Tree, raw: ensemble.Raw) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the networks' outputs, float32 [E, B, D]; as rollouts draw them."""
        std = (0.5 * raw.log_var.float()).exp()
        return raw.mean.float(), std * tree["scale"] if self.runtime.source.model.config.calibrated else std

    def advantage(
        self,
        state: TrainState,
        observations: Tensor,
        actions: Tensor,
        rewards: Tensor,
        terminations: Tensor,
        next_observations: Tensor,
    ) -> Tensor:
        """r + discount * V(s') - Q(s, a) with the smallest of the critics at the policy's mode, standardised over the
        batch: [B].
        """
        critic, actor = state.params["critic"], state.params["actor"]
        mode = self.policy.mode(self.apply("actor", actor, next_observations))
        value = self.critic.q(critic, next_observations, mode).amin(0)
        gain = (
            rewards
            + self.config.discount * (1.0 - terminations.float()) * value
            - self.critic.q(critic, observations, actions).amin(0)
        )
        return (gain - gain.mean()) / (gain.std(unbiased=False) + 1e-6)

    def real(self, source: ModelSource, key: Tensor) -> Batch:
        """Transitions of the data as the model learns from them."""
        table = source.extra["table"]
        width = table.shape[1] - source.model.out_dim - 2
        rows = table[rng.randint(key, (self.config.batch_size,), len(table))]
        return {"inputs": rows[:, :width], "targets": rows[:, width:-2], "ending": rows[:, -2], "known": rows[:, -1]}

    def model_loss(
        self, params: Params, state: TrainState, inputs: Tensor, sample: Tensor, advantage: Tensor, batch: Batch
    ) -> Loss:
        """lambda * mean of log p(drawn) * advantage (as policy gradients go, but downhill), and what the model was
        trained with.
        """
        c, source = self.config, self.runtime.source
        model, tree, rows = source.model, source.tree, inputs.shape[0]  # the scaler of the inputs stays as it is
        raw = model.raw(params, tree, torch.cat([inputs, batch["inputs"]]))
        imagined = ensemble.Raw(raw.mean[:, :rows], raw.log_var[:, :rows], None)
        real = ensemble.Raw(
            raw.mean[:, rows:], raw.log_var[:, rows:], None if raw.ending is None else raw.ending[:, rows:]
        )
        mean, std = (x[tree["elites"]] for x in self.moments(tree, imagined))
        log_p = log_mixture(mean, std, sample)
        adversarial = (log_p * advantage).mean()
        per_member = member_losses(real, batch)
        supervised = (
            per_member.sum()
            + ensemble.weight_decay(params, source.extra["decay"])
            + c.bounds_weight * ensemble.bounds_loss(params)
        )
        loss = c.adversarial_weight * adversarial + supervised
        error = ensemble.squared_loss(real.mean, batch["targets"], None, batch["known"]).mean()
        return loss, {
            "model/loss": loss,
            "model/adversarial": adversarial,
            "model/log_density": log_p.mean(),
            "model/error": error,
        }
