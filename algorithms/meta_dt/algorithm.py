"""Meta-DT: offline meta-RL as sequence modelling, with a world model's representation of the task (Wang et al., 2024,
arXiv 2410.11448).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offrl import registry, rng
from offrl.algorithm import Batch, Dataset, Grid, Loss, Params, Sampler, TrainConfig, TrainState, Tree
from offrl.algorithms.meta_dt.actor import TASK, MetaDTActor
from offrl.algorithms.meta_dt.model import PromptedSteps
from offrl.data.samplers.contexts import TASKS, episode_tasks, ranked_episodes
from offrl.data.samplers.histories import PROMPT, PromptSampler, Windows, prompt_windows
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID, SequenceSampler
from offrl.errors import UserError, warn
from offrl.families.return_conditioned import TargetReturnSettings, round_digits
from offrl.families.sequence import SequenceModel, SequenceSettings, StepPolicy, masked_mean
from offrl.pretrained import Pretrained, Requirement
from offrl.registry import register
from offrl.settings.field import defaults, setting


@dataclass
@defaults(batch_size=128)
class MetaDTConfig(TargetReturnSettings, SequenceSettings):
    """Settings of Meta-DT; the defaults are the authors', but for `prompt_skip`, which they do not have."""

    name: str = "meta_dt"
    target_return: float | None = setting(
        None,
        "what it is asked to earn in an episode, in the units of the recorded rewards; null: the mean over tasks of "
        "the best in the data",
        acting=True,
    )
    prompt: int = setting(
        5, "steps of an earlier episode of the task that stand before the window; 0: no prompt", low=0
    )
    prompts: int = setting(3, "they are from one of so many episodes of the task, the best", low=1)
    prompt_warmup: int = setting(20_000, "updates before windows, and new episodes of a task, have a prompt", low=0)
    prompt_skip: float = setting(
        0.1,
        "share of the windows without a prompt after that, as in the first episode of a new task",
        low=0.0,
        high=1.0,
    )
    task_model: str = setting("", "a run of algo=task_model; empty: one is trained first", place=True)
    task_model_id: str = setting("", "which one that is", filled=True)
    task_model_settings: dict[str, Any] = setting({}, "its settings", filled=True)
    task_model_steps: int = setting(20_000, "updates of the task model that is trained first", low=1, place=True)
    history: int = setting(4, "the same task model: transitions that tell the task", low=1)
    predicts: str = setting(
        "reward", "the same task model: what differs between tasks", choices=("reward", "observation", "both")
    )


@register("algo", "meta_dt")
class MetaDT(SequenceModel[MetaDTConfig]):
    """DT whose observations carry the task z, a pretrained encoding of the last transitions, after a prompt: the steps
    of another episode of the same task at which the world model, given z, errs most.

    The prompts of training are from the best episodes of a window's task; those of a new task from the best of its
    episodes so far (`offrl adapt`), so that the first has none: zero-shot. A prompt begins at a step in proportion to
    the model's summed absolute error over it."""

    actor_class = MetaDTActor

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        if c.prompt:
            episode_tasks(dataset)  # raises before anything is trained
            if config.steps <= c.prompt_warmup:
                warn(
                    f"no prompt is trained on or acted on: steps={config.steps} are over before "
                    f"algo.prompt_warmup={c.prompt_warmup} is; lower it, or train for longer"
                )
        settings, steps = {"history": c.history, "predicts": c.predicts}, c.task_model_steps
        return {
            "task_model": Requirement(
                "task_model", settings, steps=steps, label="task_model", check=check_task_model, of_rewards=True
            )
        }

    @classmethod
    def fit_config(cls, config: MetaDTConfig, dataset: Dataset, grid: Grid = None) -> MetaDTConfig:
        """The target return is, unless given, the mean over the data's tasks of the best: the best of all is an easy
        task's.
        """
        if config.target_return is None and TASKS in dataset.columns:
            tasks, complete = ranked_episodes(dataset)
            best = [dataset.raw_returns[((tasks == task) & complete).cpu()].max() for task in tasks.unique()]
            config = dataclasses.replace(config, target_return=round_digits(float(torch.stack(best).mean())))
        return super().fit_config(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        kind, c = registry.get("algo", "task_model"), self.config
        self.model = kind(
            kind.Config(**(c.task_model_settings or {"history": c.history, "predicts": c.predicts})), self.spec
        )
        self.embedding = self.model.config.embedding
        actor = StepPolicy(self.sizes(), c, self.spec)
        if c.prompt:
            actor.steps = PromptedSteps(self.sizes(), super().sizes(), c)
        return {"actor": actor}

    def extra(self, params: dict[str, Params]) -> Tree:
        """The task model, which acts but does not learn."""
        run = self.pretrained.get("task_model")
        return {"task_model": (run.state if run else self.model.init(0)).params["model"]}  # a policy's file has its own

    def sizes(self) -> dict[str, int]:
        return {**super().sizes(), "observation": self.spec.observation_dim + self.embedding}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        """(prompt, R_1, (s_1, z_1), a_1, ..., R_K, (s_K, z_K), a_K), the prompt DT's (R, s, a) of its steps."""
        tokens = super().tokens(batch)
        tokens["observation"] = torch.cat([batch["observations"], batch[TASK]], -1)
        if self.config.prompt:
            prompt = {name: batch[PROMPT + name] for name in ("observations", "actions", RETURNS)}
            tokens |= {PROMPT + kind: x for kind, x in super().tokens(prompt).items()}
            tokens |= {PROMPT + name: batch[PROMPT + name] for name in (STEPS, VALID)}
        return tokens

    # ---- training

    def sampler(self) -> Sampler:
        c = self.config
        steps = SequenceSampler(c.context, left_padded=c.padding == "left", derived_columns=self.tasks)
        return PromptSampler(steps, c.prompt, self.windows_of_prompts) if c.prompt else steps

    def tasks(self, dataset: Dataset) -> dict[str, Tensor]:
        """The task at each row by the transitions before it."""
        return {TASK: self.model.of_dataset(self.pretrained["task_model"].state.params["model"], dataset)[0]}

    def windows_of_prompts(self, dataset: Dataset) -> Windows:
        """The windows that are prompts."""
        error = self.model.of_dataset(self.pretrained["task_model"].state.params["model"], dataset)[1]
        return prompt_windows(dataset, error, self.config.prompt, self.config.prompts, self.model.config.history)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |a_t - pi(prompt, R_1, (s_1, z_1), a_1, ..., R_t, (s_t, z_t))|^2, or -log pi(a_t | ...), z the task by the
        last transitions.
        """
        c = self.config
        if c.prompt:
            skip, key = rng.split(key)
            mask = (state.step >= c.prompt_warmup) & (rng.uniform(skip, (len(batch["rewards"]), 1)) >= c.prompt_skip)
            batch = {**batch, PROMPT + VALID: batch[PROMPT + VALID] & mask}
        dist = self.apply("actor", actor, self.tokens(batch), batch[STEPS], batch[VALID], key)
        loss = masked_mean(self.policy.bc_loss(dist, batch["actions"]), batch[VALID])
        return loss, {"actor/loss": loss}


def check_task_model(run: Pretrained) -> None:
    """Raise UserError for a run of another algorithm."""
    if run.settings["name"] != "task_model":
        raise UserError(f"algo.task_model: a run of {run.settings['name']} is none of algo=task_model")
