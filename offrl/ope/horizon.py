"""How far ahead one must look on data of random play to act well: the effective horizon of SQIRL (arXiv 2312.08369).

Q_1 is the value of what the data did, of random actions; Q_{k+1} looks one step further. The smallest k whose greedy
policy does well is the part of the effective horizon that data show; the paper's adds log_A of the episodes that Q_1
takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offrl.algorithm import Algorithm, Metrics, TrainState, Traits, Update, select
from offrl.data.dataset import Dataset
from offrl.data.fit import check_fit, refuse_streams, settled
from offrl.data.samplers.transitions import Batch, Sampler, TransitionSampler
from offrl.data.transforms.columns import returns_to_go
from offrl.errors import UserError
from offrl.evaluation.pool.host import evaluate_parallel
from offrl.evaluation.result import Evaluation
from offrl.nn import MLP
from offrl.ope.config import HorizonConfig
from offrl.ope.problem import FLOOR
from offrl.optim import Adam, Params
from offrl.runs.tables import interval_text
from offrl.settings.evaluation import EvalConfig
from offrl.settings.field import check
from offrl.statistics.intervals import mean_interval
from offrl.tasks.environments import make_env, resolve_task
from offrl.tasks.task import Task
from offrl.training.fit import Progress, fit

HIDDEN, BATCH, RATE = (128, 128), 256, 1e-3  # of the network; the rate falls to 0
ENOUGH = 0.8  # share of the most that any depth adds to the data's mean return, from which on a depth suffices
UNEVEN = 2.0  # times as often, or as rarely, as all alike: actions are then hardly random
RETURN, REMAINDER, LAST = "horizon/return", "horizon/remainder", "horizon/last"  # columns that are added
Interval = tuple[float, float, float]


class Lookahead(Algorithm[HorizonConfig]):
    """Q_1 to Q_k of one network with k x A outputs: Q_1(s, a) -> the return that followed, Q_{d+1}(s, a) -> r +
    discount (1 - terminated) max_b Q_d(s', b).

    As in SQIRL's code there is no copy for targets, and all squared errors are averaged. Unlike there one network
    serves all time steps, returns are discounted, and a time-out is no end: the value of random actions in the state
    after it is added. It is no policy of its own, so it is not registered.
    """

    traits = Traits(policy_modules=())

    def __init__(self, config: HorizonConfig, dataset: Dataset) -> None:
        """dataset: see `with_returns`."""
        rows = dataset.transition_rows()
        observations = dataset.flat("observations")
        self.mean, self.std = observations.mean(0), observations.std(0, unbiased=False) + FLOOR
        returns = dataset.columns[RETURN][rows]
        self.level, self.spread = float(returns.mean()), float(returns.std(unbiased=False)) or 1.0
        counts = torch.bincount(dataset.columns["actions"][rows], minlength=dataset.spec.num_actions)
        self.shares = counts / counts.sum()  # [A] of the actions in the data
        super().__init__(config, dataset.spec)

    def modules(self) -> dict[str, nn.Module]:
        return {"critic": MLP(self.spec.observation_dim, HIDDEN, self.config.depth * self.spec.num_actions)}

    def optimizer(self, name: str) -> Adam:
        return Adam(RATE, schedule="cosine", decay_steps=self.config.updates)

    def sampler(self) -> Sampler:
        return TransitionSampler(extra=(RETURN, REMAINDER, LAST))

    def values(self, critic: Params, observations: Tensor) -> Tensor:
        """Q_1 to Q_k of all actions in states [B, ...], in the rewards' units: [B, k, A]."""
        x = (observations.flatten(1) - self.mean.to(observations.device)) / self.std.to(observations.device)
        q = self.apply("critic", critic, x).unflatten(-1, (self.config.depth, self.spec.num_actions))
        return self.level + self.spread * q

    def critic_loss(self, critic: Params, state: TrainState, batch: Batch) -> tuple[Tensor, Metrics]:
        """mean_d (Q_d(s, a) - y_d)^2 with y_1 the return and y_{d+1} = r + discount m max_b Q_d(s', b)."""
        fixed = state.params["critic"]  # no gradient flows into it
        beyond = (self.values(fixed, batch[LAST])[:, 0] * self.shares.to(batch[LAST].device)).sum(-1)
        ahead = self.values(fixed, batch["next_observations"])[:, :-1].amax(-1)
        step = self.config.discount * batch["masks"]
        first = batch[RETURN] + batch[REMAINDER] * beyond
        y = torch.cat([first.unsqueeze(1), batch["rewards"].unsqueeze(1) + step.unsqueeze(1) * ahead], 1)
        chosen = self.spec.encode(batch["actions"]).unsqueeze(1)
        q = (self.values(critic, batch["observations"]) * chosen).sum(-1)
        loss = ((q - y) / self.spread).square().mean()
        return loss, {"critic/loss": loss}

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return self.descend(state, "critic", self.critic_loss, batch)


@dataclass(frozen=True)
class GreedyPolicy:
    """The policy argmax_a Q_depth(s, a) of one network, for an evaluation."""

    lookahead: Lookahead
    critic: Params
    depth: int

    @property
    def discount(self) -> float:
        return self.lookahead.config.discount

    def start(self, episodes: int) -> None:
        """It has no memory."""

    @torch.no_grad()
    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        states = torch.from_numpy(np.asarray(observations, np.float32))
        return self.lookahead.values(self.critic, states)[:, self.depth - 1].argmax(-1).numpy(), None


@dataclass(frozen=True)
class Horizon:
    """What came of it, for depths 1 to k."""

    data: Interval  # mean undiscounted return of the data's episodes, with its 95% interval over them
    best: float  # of them
    score: float | None  # the mean's, where there are reference scores
    values: np.ndarray  # [k, seeds]: the mean of max_a Q_d over the states in which the data's episodes begin
    shares: np.ndarray  # [A] of the actions in the data
    title: str = ""
    evaluations: tuple[Evaluation, ...] = ()  # of each depth's policies; (): there was no environment

    @property
    def returns(self) -> list[Interval]:
        """Of each depth the mean return with its 95% interval, over the seeds; of a single seed over its episodes."""
        return [mean_interval(e.returns.mean(1) if len(e.returns) > 1 else e.returns[0]) for e in self.evaluations]

    @property
    def suffices(self) -> int | None:
        """The smallest depth that earns ENOUGH of the most that any adds to the data's mean return; None where no
        interval lies above that mean, or nothing was played."""
        gains = [mean - self.data[0] if low > self.data[0] else 0.0 for mean, low, _ in self.returns]
        if max(gains, default=0.0) <= 0.0:
            return None
        return 1 + next(d for d, gain in enumerate(gains) if gain >= ENOUGH * max(gains))

    @property
    def uneven(self) -> bool:
        """Whether some action is so frequent, or so rare, that the data are hardly of random play."""
        ratio = self.shares * len(self.shares)
        return bool(ratio.max() > UNEVEN or ratio.min() < 1.0 / UNEVEN)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Headers and rows: the data's own episodes, and the greedy policies of each depth."""
        columns: dict[str, list[str]] = {"policy": ["the data's", *self._names]}
        returns = [interval_text(r, 2) for r in (self.data, *self.returns)]
        columns["return [95% interval]"] = returns if self.evaluations else [*returns, *[""] * len(self.values)]
        if self.evaluations and self.evaluations[0].scores is not None:
            scores = [mean_interval(e.scores.mean(1)) for e in self.evaluations if e.scores is not None]
            mean = "" if self.score is None else f"{self.score:.1f}"
            columns["score [95% interval]"] = [mean, *map(interval_text, scores)]
        columns["its Q where episodes begin"] = ["", *(f"{v:.3g}" for v in self.values.mean(1))]
        return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]

    @property
    def _names(self) -> list[str]:
        return [f"greedy on Q_{1 + d}" for d in range(len(self.values))]

    def lines(self) -> list[str]:
        """What it means."""
        shares, depth, k = ", ".join(f"{share:.0%}" for share in self.shares), len(self.values), self.suffices
        lines = [f"best episode of the data: {self.best:.2f}"]
        if self.uneven:
            lines.append(
                f"the data's actions are not alike often ({shares}): Q_1 is the value of what the data did, not of "
                "random play, and k counts steps of improvement over that"
            )
        if not self.evaluations:
            return [*lines, "nothing was played, for there is no environment: env=ID names one"]
        if not all(np.isfinite(low) for _, low, _ in self.returns):
            return [*lines, "one episode of one network has no interval, and says nothing: raise episodes= or seeds="]
        if k is None:
            return [
                *lines,
                f"no greedy policy surely earns more than the data: the effective horizon of the task is above "
                f"{depth}, unless the data are too few to show it, or not of random play. Where it is, random actions "
                "find little, in an environment as in data",
            ]
        means = "the values of what the data did" if k == 1 else f"{k - 1} step{'s' * (k > 2)} of looking ahead on them"
        share = "all" if depth == 1 else f"{ENOUGH:.0%} or more of all that looking further, up to k = {depth},"
        lines.append(f"k = {k}: greedy on {means} earns {share} adds to the data's mean return")
        easy = "easy to explore: one step of improvement is enough, and what random actions meet tells good from bad"
        hard = f"harder to explore than one step of improvement allows: values must travel {k} decisions back"
        return [*lines, f"by these data the task is {easy if k == 1 else hard}"]


def with_returns(dataset: Dataset, discount: float) -> Dataset:
    """The data with the columns RETURN [R], the discounted rewards from a row to the last of which is known what came
    after it; LAST [R, O], the state thereafter; and REMAINDER [R], the discount of its value, 0 after a termination.
    """
    columns, (start, end) = dataset.columns, dataset.bounds()
    ended, known = columns["terminations"].numpy(), columns["successor_known"].numpy()
    last = end - 1
    closed = (ended | known)[last]
    rewards = columns["rewards"].numpy().astype(np.float64)
    rewards[last[~closed]] = 0.0  # its state is the last that is known
    returns = returns_to_go(rewards, ended, start, end, discount)
    lengths = end - start
    steps = np.repeat(last + closed, lengths) - np.arange(len(dataset))
    remainder = discount**steps * ~np.repeat(ended[last], lengths)
    observations = torch.where(
        torch.from_numpy(closed).unsqueeze(-1),
        dataset.flat("next_observations")[last],
        dataset.flat("observations")[last],
    )
    more = {
        RETURN: torch.from_numpy(returns).float(),
        REMAINDER: torch.from_numpy(remainder).float(),
        LAST: dataset.per_row(observations),
    }
    return dataset.changed("returns of a horizon", columns=more)


def horizon(dataset: Dataset, config: HorizonConfig, progress: Progress | None = None) -> Horizon:
    """Fit Q_1 to Q_k on data of random play, and play their greedy policies where there is an environment.

    dataset: of discrete actions, with rewards as they are to be valued. Raises UserError for other actions, images,
    texts and windows, and for an environment that does not fit.
    """
    check(config)
    name = dataset.spec.name
    if not dataset.spec.discrete:
        kind = "texts" if dataset.spec.text else "continuous"
        raise UserError(
            f"{name}: a horizon is of data with discrete actions, whose maximum is over all; these are {kind}"
        )
    if not dataset.num_episodes:
        raise UserError(f"{name}: there are no episodes")
    refuse_streams(dataset, "the horizon", "leave them out of dataset.observation_keys")
    task = _task(dataset, config)
    data = with_returns(dataset.to("cpu"), config.discount)
    lookahead = Lookahead(config, data)
    seeds = [config.seed + n for n in range(config.seeds)]
    device = torch.device("cpu")
    source = lookahead.sampler().prepare(data)
    engine = fit(lookahead, source, seeds, config.updates, BATCH, device, progress=progress)
    critics = [select(engine.state(), n).params["critic"] for n in range(len(seeds))]
    with torch.no_grad():
        starts = data.columns["observations"][data.episode_start]
        values = torch.stack([lookahead.values(critic, starts).amax(-1).mean(0) for critic in critics], 1)
    returns = dataset.raw_returns.numpy()
    mean = mean_interval(returns)
    score = None if dataset.spec.task is None else dataset.spec.task.normalise(mean[0])
    evaluations = () if task is None else _played(lookahead, critics, seeds, task)
    title = evaluations[0].label if evaluations else name
    shares = lookahead.shares.numpy()
    return Horizon(mean, float(returns.max()), score, values.double().numpy(), shares, title, evaluations)


def _task(dataset: Dataset, config: HorizonConfig) -> Task | None:
    task = resolve_task(dataset.spec.task, EvalConfig(env=config.env))
    if task is None:
        return None
    with contextlib.closing(make_env(task)) as env:
        check_fit(dataset.spec, task, env)
        return settled(replace(dataset.spec, task=task), env, dataset).task


def _played(
    lookahead: Lookahead, critics: Sequence[Params], seeds: Sequence[int], task: Task
) -> tuple[Evaluation, ...]:
    """An evaluation of the greedy policies of each depth."""
    config = lookahead.config
    policies: list[Any] = [GreedyPolicy(lookahead, critic, 1 + d) for d in range(config.depth) for critic in critics]
    scoring = EvalConfig(episodes=config.episodes, seed=config.seed)
    return evaluate_parallel(policies, list(seeds) * config.depth, task, scoring).split(len(seeds))
