"""Meta-DT: offline meta-RL as sequence modelling, with what a world model makes of the task (Wang et al., 2024, arXiv 2410.11448)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.actor import Actor, Carry
from offrl.algorithm import Metrics, TrainState, Tree
from offrl.data.dataset import Dataset
from offrl.data.samplers.contexts import TASKS, episode_tasks, ranked_episodes
from offrl.data.samplers.histories import PROMPT, PromptSampler, Windows, prompt_windows
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID, SequenceSampler
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError, warn
from offrl.families.return_conditioned import round_digits
from offrl.families.sequence import (
    History,
    SequenceActor,
    SequenceAlgorithm,
    SequenceSettings,
    StepPolicy,
    Steps,
    masked_mean,
    with_last,
)
from offrl.nn.transformer import Affine, Table, drop, interleave, visible
from offrl.optim import Params
from offrl.pretrained import Pretrained, Requirement
from offrl.registry import register
from offrl.settings.field import setting

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

OUTER = 1_000  # folded into the key of the dropout of embeddings; the transformer's layers have 0, 1, ...
PROMPTING = -(1 << 42)  # keys of the prompts of new episodes: other draws have smaller numbers
TASK = "task"


@dataclass
class MetaDTConfig(SequenceSettings):
    """Settings of Meta-DT; the defaults are the authors', but for `prompt_skip`, which they do not have."""

    name: str = "meta_dt"
    batch_size: int = setting(128, "windows in a batch", low=1)
    target_return: float | None = setting(
        None,
        "what it is asked to earn in an episode, in the units of the recorded rewards; null: the mean over tasks of the best in the data",
        acting=True,
    )
    prompt: int = setting(5, "steps of an earlier episode of the task that stand before the window; 0: no prompt", low=0)
    prompts: int = setting(3, "they are from one of so many episodes of the task, the best", low=1)
    prompt_warmup: int = setting(20_000, "updates before windows, and new episodes of a task, have a prompt", low=0)
    prompt_skip: float = setting(
        0.1, "share of the windows without a prompt after that, as in the first episode of a new task", low=0.0, high=1.0
    )
    task_model: str = setting("", "a run of algo=task_model; empty: one is trained first", place=True)
    task_model_id: str = setting("", "which one that is", filled=True)
    task_model_settings: dict[str, Any] = setting({}, "its settings", filled=True)
    task_model_steps: int = setting(20_000, "updates of the task model that is trained first", low=1, place=True)
    history: int = setting(4, "the same task model: transitions that tell the task", low=1)
    predicts: str = setting("reward", "the same task model: what differs between tasks", choices=("reward", "observation", "both"))


class PromptedSteps(Steps):
    """`Steps` after the steps of a prompt, whose tokens have embeddings of their own."""

    def __init__(self, sizes: Mapping[str, int], prompt: Mapping[str, int], config: Any) -> None:
        super().__init__(sizes, config)
        self.prompt_embed = nn.ModuleDict({kind: Affine(size, config.width) for kind, size in prompt.items()})
        self.prompt_time = Table(config.max_timestep or 1, config.width)

    def forward(
        self, tokens: Mapping[str, Tensor], timesteps: Tensor, valid: Tensor | None, key: Tensor | None, read: str | None = None
    ) -> dict[str, Tensor]:
        """As `Steps`; tokens has the prompt's as well, by prompt_KIND [B, L, size], and its prompt_timesteps, prompt_valid [B, L]."""
        many, time = len(self.kinds), self.time(timesteps)
        x = self.norm(interleave([self.embed[kind](tokens[kind]) + time for kind in self.kinds]))
        before, time = tokens[PROMPT + VALID], self.prompt_time(tokens[PROMPT + STEPS])
        prompt = interleave([self.prompt_embed[kind](tokens[PROMPT + kind]) + time for kind in self.kinds])
        x = torch.cat([prompt, x], -2)
        if key is not None:
            x = drop(x, self.rate, key, OUTER)
        whole = torch.cat([before, torch.ones_like(timesteps, dtype=torch.bool) if valid is None else valid], -1)
        return self.became(x, visible(whole.repeat_interleave(many, -1), x.shape[-2]), key, prompt.shape[-2], read)


@dataclass(frozen=True)
class Memory(History):
    """What is remembered of E tasks: the window, the episode so far, and episodes before it."""

    episode: Batch = field(default_factory=dict)  # [E, t, ...] observations, actions as a network takes them, rewards
    pool: Batch = field(default_factory=dict)  # the P best episodes so far, [E, P, T, ...]; see `MetaDTActor.prompts_of`
    prompt: Batch = field(default_factory=dict)  # [E, L, ...]; nothing valid in the first episode
    episodes: int = 0  # that are over


pytree.register_dataclass(Memory)


@register("algo", "meta_dt")
class MetaDT(SequenceAlgorithm):
    """DT whose observations carry what a trained encoder makes of the last transitions, after a prompt: steps of another episode of the
    same task, where a model of the world that is told that much errs most.

    The prompts of training are from the best episodes of a window's task; those of a new task from the best of its episodes so far (`offrl
    adapt`), so that the first has none: zero-shot. A prompt begins at a step in proportion to the model's summed absolute error over it.
    """

    Config = MetaDTConfig

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        c = config.algo
        if c.prompt:
            episode_tasks(dataset)  # what is missing is said before anything is trained
            if config.steps <= c.prompt_warmup:
                warn(
                    f"no prompt is trained on or acted on: steps={config.steps} are over before algo.prompt_warmup={c.prompt_warmup} "
                    "is; lower it, or train for longer"
                )
        settings, steps = {"history": c.history, "predicts": c.predicts}, c.task_model_steps
        return {"task_model": Requirement("task_model", settings, steps=steps, label="task_model", check=check_task_model, of_rewards=True)}

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """The return asked for is, unless given, the mean over the data's tasks of the best: the best of all would tell of an easy task."""
        if config.target_return is None and TASKS in dataset.columns:
            tasks, whole = ranked_episodes(dataset)
            best = [dataset.raw_returns[((tasks == task) & whole).cpu()].max() for task in tasks.unique()]
            config = dataclasses.replace(config, target_return=round_digits(float(torch.stack(best).mean())))
        return super().fit_config(config, dataset, grid)

    def modules(self) -> dict[str, nn.Module]:
        kind, c = registry.get("algo", "task_model"), self.config
        self.model = kind(kind.Config(**(c.task_model_settings or {"history": c.history, "predicts": c.predicts})), self.spec)
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
        sizes = super().sizes()
        return {**sizes, "observation": sizes["observation"] + self.embedding}

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
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
        steps = SequenceSampler(c.context, left=c.padding == "left", made=self.judge)
        return PromptSampler(steps, c.prompt, self.begins) if c.prompt else steps

    def judge(self, dataset: Dataset) -> dict[str, Tensor]:
        """What the transitions before each row tell of its task."""
        return {TASK: self.model.look(self.pretrained["task_model"].state.params["model"], dataset)[0]}

    def begins(self, dataset: Dataset) -> Windows:
        """Where prompts may begin."""
        error = self.model.look(self.pretrained["task_model"].state.params["model"], dataset)[1]
        return prompt_windows(dataset, error, self.config.prompt, self.config.prompts, self.model.config.history)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        c = self.config
        if c.prompt:
            skip, key = rng.split(key)
            given = (state.step >= c.prompt_warmup) & (rng.uniform(skip, (len(batch["rewards"]), 1)) >= c.prompt_skip)
            batch = {**batch, PROMPT + VALID: batch[PROMPT + VALID] & given}
        dist = self.apply("actor", actor, self.tokens(batch), batch[STEPS], batch[VALID], key)
        loss = masked_mean(self.policy.bc_loss(dist, batch["actions"]), batch[VALID])
        return loss, {"actor/loss": loss}

    def actor(self, state: TrainState) -> Actor:
        return MetaDTActor(self, state)


class MetaDTActor(SequenceActor):
    """Acts after a prompt from earlier episodes of the same task. A carry is a `Memory`, whose pool of prompts outlives episodes."""

    algorithm: MetaDT

    def start(self, episodes: int) -> Carry:
        old, algorithm = super().start(episodes), self.algorithm
        actions = torch.zeros(episodes, 0, algorithm.spec.encoded_action_dim)
        episode = {"observations": old.window["observations"], "actions": actions, "rewards": torch.zeros(episodes, 0)}
        steps, prompt = algorithm.config.prompt, {}
        if steps:
            prompt = {
                "observations": torch.zeros(episodes, steps, algorithm.spec.observation_dim),
                "actions": torch.zeros(episodes, steps, *old.window["actions"].shape[2:], dtype=old.window["actions"].dtype),
                RETURNS: torch.zeros(episodes, steps),
                STEPS: torch.zeros(episodes, steps, dtype=torch.int64),
                VALID: torch.zeros(episodes, steps, dtype=torch.bool),
            }
        window = {**old.window, TASK: torch.zeros(episodes, 0, algorithm.embedding)}
        return Memory(window, old.remaining, old.t, episode, {}, prompt)

    def now(self, carry: History, observations: Tensor) -> Batch:
        assert isinstance(carry, Memory)
        task = self.algorithm.model.task(self.state.extra["task_model"], *self.recent(carry.episode))
        return {**super().now(carry, observations), TASK: task}

    def recent(self, episode: Batch) -> tuple[Tensor, ...]:
        """The last transitions as the encoder takes them, behind zeros where the episode is shorter."""
        h, columns = self.algorithm.model.config.history, (episode[name] for name in ("observations", "actions", "rewards"))
        return tuple(torch.cat([column.new_zeros(len(column), h, *column.shape[2:]), column], 1)[:, -h:] for column in columns)

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        window = self.enter(carry, observations)
        dist = self.last({**window, **{PROMPT + name: column for name, column in carry.prompt.items()}})
        actions = self.choose(dist, key, explore)
        new = {"observations": observations, "actions": self.algorithm.spec.encode(actions), "rewards": torch.zeros(len(observations))}
        episode = {name: torch.cat([column, new[name].unsqueeze(1)], 1) for name, column in carry.episode.items()}
        return actions, dataclasses.replace(carry, window=with_last(window, "actions", actions), t=carry.t + 1, episode=episode)

    def observe_reward(self, carry: Carry, rewards: Tensor) -> Carry:
        carry = super().observe_reward(carry, rewards)
        return dataclasses.replace(carry, episode=with_last(carry.episode, "rewards", rewards))

    def new_episode(self, carry: Carry, observations: Tensor, lengths: Tensor) -> Carry:
        """With a prompt from one of the best episodes so far."""
        fresh, c = self.start(len(lengths)), self.algorithm.config
        if not c.prompt or 0 < c.prompt_warmup >= int(self.state.step):  # it has not learnt to read one
            return fresh
        pool = best_of(carry.pool, self.prompts_of(carry.episode, observations, lengths), c.prompts)
        keys = rng.split(rng.fold_in(self.state.key, PROMPTING - carry.episodes))
        rows = torch.arange(len(lengths))
        chosen = rng.randint(keys[0], (len(lengths),), pool["error"].shape[1])
        one = {name: column[rows, chosen] for name, column in pool.items()}  # [E, T, ...]
        begin = rng.categorical(keys[1], begin_logits(one["error"], one["length"], c.prompt, self.algorithm.model.config.history))
        at = begin.unsqueeze(-1) + torch.arange(c.prompt)
        valid = at < one["length"].unsqueeze(-1)
        at = at.clamp(max=one["error"].shape[1] - 1)
        prompt = {name: one[name][rows.unsqueeze(-1), at] for name in ("observations", "actions", RETURNS)}
        return dataclasses.replace(fresh, pool=pool, prompt={**prompt, STEPS: at, VALID: valid}, episodes=carry.episodes + 1)

    def prompts_of(self, episode: Batch, observations: Tensor, lengths: Tensor) -> Batch:
        """An episode as a source of prompts: columns [E, 1, T, ...], the model's error at each step, and its return and length [E, 1]."""
        algorithm, many = self.algorithm, episode["rewards"].shape[1]
        h = algorithm.model.config.history
        step, ends = torch.arange(many), lengths.unsqueeze(-1)
        made = step < ends
        after = torch.cat([episode["observations"][:, 1:], observations.unsqueeze(1)], 1)
        after = torch.where((step == ends - 1).unsqueeze(-1), observations.unsqueeze(1), after)
        windows = {}
        for name, column in episode.items():
            behind = torch.cat([column.new_zeros(len(column), h, *column.shape[2:]), column], 1)
            windows["past_" + name] = torch.stack([behind[:, t : t + h] for t in range(many)], 1).flatten(0, 1)
        rows = {**{name: column.flatten(0, 1) for name, column in episode.items()}, "next_observations": after.flatten(0, 1)}
        error = algorithm.model.errors(self.state.extra["task_model"], {**rows, **windows})[2].unflatten(0, made.shape)
        rewards = torch.where(made, algorithm.recorded(episode["rewards"]), 0.0)
        left = rewards.flip(1).cumsum(1).flip(1)
        actions = episode["actions"].argmax(-1) if algorithm.spec.discrete else episode["actions"]
        columns = {"observations": episode["observations"], "actions": actions, RETURNS: left, "error": torch.where(made, error, 0.0)}
        return {name: x.unsqueeze(1) for name, x in {**columns, "return": rewards.sum(1), "length": lengths}.items()}


def check_task_model(run: Pretrained) -> None:
    """Raise UserError for a run of another algorithm."""
    if run.settings["name"] != "task_model":
        raise UserError(f"algo.task_model: a run of {run.settings['name']} is none of algo=task_model")


def best_of(pool: Batch, new: Batch, most: int) -> Batch:
    """The `most` episodes [E, P, ...] with the highest returns of those in the pool and the new ones."""
    if not pool:
        return new
    long = max(x["error"].shape[2] for x in (pool, new))

    def longer(column: Tensor) -> Tensor:
        if column.ndim < 3:
            return column
        return torch.cat([column, column.new_zeros(*column.shape[:2], long - column.shape[2], *column.shape[3:])], 2)

    both = {name: torch.cat([longer(pool[name]), longer(new[name])], 1) for name in new}
    kept = both["return"].argsort(dim=1, descending=True, stable=True)[:, :most]
    return {name: column[torch.arange(len(kept)).unsqueeze(-1), kept] for name, column in both.items()}


def begin_logits(error: Tensor, lengths: Tensor, steps: int, history: int) -> Tensor:
    """Log-probabilities, but for a constant, of the steps [E, T] at which a prompt begins: of the sum of the errors [E, T] over it; see
    `prompt_windows`."""
    total = torch.cat([torch.zeros_like(error[:, :1]), error.cumsum(1)], 1)
    step = torch.arange(error.shape[1])
    sums = total[:, (step + steps).clamp(max=error.shape[1])] - total[:, :-1]
    last = lengths.unsqueeze(-1) - steps
    may = torch.where(last >= history, (step >= history) & (step <= last), step == 0)
    return torch.where(may, sums.clamp(min=1e-9).log(), float("-inf"))
