"""RAMBO: "RAMBO-RL: Robust Adversarial Model-Based Offline Reinforcement Learning" (Rigter et al., 2022, arXiv
2204.12581).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Adam, Batch, Dataset, Grid, Loss, Params, Requirement, TrainConfig, TrainState, Tree, Update
from offrl.errors import UserError
from offrl.families.sac import SoftActorCritic
from offrl.registry import register
from offrl.settings.field import defaults, setting
from offrl.world_models import ensemble
from offrl.world_models.dynamics import DynamicsSettings, member_losses, targets
from offrl.world_models.ensemble import GaussianEnsemble
from offrl.world_models.model import input_table, required
from offrl.world_models.model_rollouts import LearnsInModel, ModelBasedSettings, ModelSource
from offrl.world_models.rollout import Imagined

# of the model that is trained first
MODEL_SETTINGS: dict[str, Any] = {"learning_rate": 3e-4, "patience": 10, "bounds_weight": 0.001}


@dataclass
@defaults(max_entropy_weight=1.0, real_share=0.5, rollout_every=250, rollout_retain=20, uncertainty="none")
class RAMBOConfig(ModelBasedSettings):
    """Settings of RAMBO; the defaults are OfflineRL-Kit's for D4RL's HalfCheetah."""

    name: str = "rambo"
    random_rollouts: bool = setting(False, "rollouts choose uniform actions, not the policy's (most of AntMaze)")
    adversarial_weight: float = setting(
        3e-4, "weight of what lowers the policy's value, beside the model's likelihood (lambda)", low=0.0
    )
    model_learning_rate: float = setting(
        3e-4, "Adam's, for the model while the policy learns; 0: it stays as it is", low=0.0
    )
    bounds_weight: float = setting(
        0.001, "weight of the distance between the bounds of the log variance, meanwhile", low=0.0
    )
    behaviour: str = setting(
        "", "a trained run of bc that the actor begins as; empty: one is trained first", place=True
    )
    behaviour_id: str = setting("", "which one that is", filled=True)
    clone_epochs: int = setting(50, "times through the data of that training; 0: the actor begins as it is", low=0)
    clone_learning_rate: float = setting(1e-4, "Adam's, meanwhile", low=0.0, shared=True)
    world_model_shape: list[int] = setting(
        [], "the world model's members, history, 1 where it learns terminations, hidden widths", place=True, filled=True
    )


def model_shape(config: RAMBOConfig) -> list[int]:
    """The model's members, history, whether it learns terminations, and widths: as found, or those of one that would be
    trained.
    """
    default = DynamicsSettings(**MODEL_SETTINGS)
    return config.world_model_shape or [default.members, default.history, 0, *default.hidden]


def log_mixture(mean: Tensor, std: Tensor, x: Tensor) -> Tensor:
    """log of the mean over K of N(x; mean, diag(std^2)), [B], for means and standard deviations [K, B, D] and x [B, D].

    Densities themselves would underflow: at 18 dimensions, five standard deviations off, they are below float32's
    smallest number."""
    log_p = -0.5 * ((x - mean) / std).square() - std.log() - 0.5 * math.log(2.0 * math.pi)
    return log_p.sum(-1).logsumexp(0) - math.log(mean.shape[0])


@register("algo", "rambo")
class RAMBO(LearnsInModel[RAMBOConfig], SoftActorCritic[RAMBOConfig]):
    """The model plays against the policy: it learns to lower the policy's value, and stays near what explains the data
    (algorithm 1).

    Module "dynamics" is a replica's own model; it begins as the shared one. All actors begin as one clone of the data's
    behaviour, of a run that comes first (the authors clone it for each seed anew). The authors do 1,000 updates of the
    model after every 1,000 of the policy; here one comes after each, compiled with it: as many, and neither waits for
    the other. Their imagined states go on from one update to the next for `horizon` steps; then, and where an episode
    ended, a new state of the data begins.
    """

    @classmethod
    def fit_config(cls, config: RAMBOConfig, dataset: Dataset, grid: Grid = None) -> RAMBOConfig:
        """The config completed from the data. Raises UserError for settings that contradict each other."""
        if config.random_rollouts and config.candidates > 1:
            raise UserError(
                f"algo.candidates={config.candidates} chooses among actions of the policy, and "
                "algo.random_rollouts=true imagines random ones: leave one of them out"
            )
        return super().fit_config(config, dataset, grid)

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """The world model, and a clone of the data's behaviour by least squares between its samples and the data's
        actions.
        """
        c = config.algo
        runs = {"world_model": required({**MODEL_SETTINGS, "members": c.members})}
        if not c.clone_epochs and not c.behaviour:
            return runs
        settings = {
            "policy": "tanh_gaussian",
            "loss": "sample_error",
            "hidden": list(c.hidden),
            "init": c.init,
            "batch_size": c.batch_size,
            "learning_rate": c.clone_learning_rate,
        }
        steps = math.ceil(c.clone_epochs * len(dataset.transition_rows()) / c.batch_size)
        return {**runs, "behaviour": Requirement("bc", settings, steps=steps, label="behaviour-bc")}

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The settings with the shape of the model. Raises UserError for one that has no likelihood."""
        model = pretrained["world_model"].model
        loss = getattr(model.config, "loss", "")
        if model.kind != "ensemble" or loss != "likelihood":
            description = f"one trained with loss={loss}" if model.kind == "ensemble" else f"of the kind '{model.kind}'"
            raise UserError(
                f"world_model={config.algo.world_model} is {description}; rambo goes on training an ensemble by its "
                "likelihood (algo=dynamics with loss=likelihood), or leave world_model= out"
            )
        shape = [model.members, model.history, int(model.learns_ending), *model.config.hidden]
        return replace(config, algo=replace(config.algo, world_model_shape=shape))

    def modules(self) -> dict[str, nn.Module]:
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
        """The actor begins as the clone of the data's behaviour, and the model as the trained one. Raises UserError
        where the clone's network is another.
        """
        state = super().init(seed)
        params = dict(state.params)
        if "behaviour" in self.pretrained:
            clone = self.pretrained["behaviour"].state.params.get("actor", {})
            if {name: x.shape for name, x in clone.items()} != {name: x.shape for name, x in params["actor"].items()}:
                raise UserError(
                    "algo.behaviour: its policy's network is not this one's: name a run of bc with "
                    "algo.policy=tanh_gaussian and the same algo.hidden, or leave it out"
                )
            params["actor"] = {name: clone[name].clone() for name in params["actor"]}
        if "world_model" in self.pretrained:
            model_params = self.pretrained["world_model"].tree["params"]
            # replicas must not share what they train
            params["dynamics"] = {name: model_params[name].clone() for name in params["dynamics"]}
        return state._replace(params=params)

    # ---- rollouts

    def roll(self, state: TrainState, source: ModelSource, key: Tensor) -> Imagined:
        """New rollouts of the policy, or of uniform actions, in the replica's own model."""
        policy = self.random_policy if self.config.random_rollouts else self.policy_of(state)
        return self.rollouts.roll(source, policy, partial(self.judged, source), key, state.params["dynamics"])

    def derived(self, source: ModelSource, dataset: Dataset) -> Tree:
        """All transitions, for the model to go on learning from, and the "decay" of each of its layers' weights.

        "table" [R, I + D + 2]: inputs, targets, terminations and whether the next observation is known.
        """
        model, c, known = source.model, source.model.config, dataset.columns["successor_known"]
        rows = dataset.transition_rows()
        flags = torch.stack([dataset.columns["terminations"][rows], known[rows]], -1).float()
        table = torch.cat([input_table(model, dataset, rows), targets(dataset, rows, c.delta), flags], -1)
        decay = ensemble.decay_of_layers(c.weight_decay, len(c.hidden) + 1)
        return {"table": table, "decay": torch.tensor(decay, device=rows.device)}

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
        return super().refresh(state, source, rollout_key, step=step)

    # ---- the model against the policy

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        state, metrics = super().update(state, batch, key, phase=phase)
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
        # [1, B, D]
        sample = mean.gather(0, index) + std.gather(0, index) * rng.normal(noise_key, (1, c.batch_size, model.out_dim))
        ending = None if raw.ending is None else raw.ending.gather(0, member.unsqueeze(0))
        prediction = model.to_prediction(tree, ensemble.Raw(sample, torch.zeros_like(sample), ending), observations)
        outcome = model.to_outcome(
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
        return state.with_extra(imagined=continuation), metrics

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
