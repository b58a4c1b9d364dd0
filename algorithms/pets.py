"""PETS: model-predictive control in a learned ensemble (Chua et al., 2018, arXiv 1805.12114), here from data alone.

Training is that of `algo=dynamics`; the policy is a search for the best plan in the model, made anew before every action. Nothing keeps
plans near the data by itself: `penalty` takes the model's uncertainty off its rewards.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from offrl import rng
from offrl.actor import Actor, Carry
from offrl.algorithm import Metrics, TrainState, Tree
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError
from offrl.pretrained import Requirement
from offrl.registry import register
from offrl.settings.field import setting
from offrl.world_models import uncertainty
from offrl.world_models.dynamics import Dynamics, DynamicsSampler, DynamicsSettings, DynamicsSource, data_range
from offrl.world_models.model import Prediction, Trained, WorldModel, required
from offrl.world_models.planning import PlanSettings, check_plan, first_plan, plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from offrl.optim import Params
    from offrl.settings.train import TrainConfig

CHUNK = 8192  # predictions at once; no random number depends on it
MODEL = {f.name for f in dataclasses.fields(DynamicsSettings)} - {"name"}
FREE = {"reward", "calibrated"}  # of these, what a finished model can still be asked for


@dataclass
class PETSConfig(PlanSettings, DynamicsSettings):
    """Settings of PETS. The model's are those of algo=dynamics, the planner's PETS's but for fewer plans, particles and steps."""

    name: str = "pets"
    # PETS: 30, 500, 50 and 20, that is 1.5 million predictions before each action, not 75,000
    plan_horizon: int = setting(15, "steps of a plan (PETS: 30)", low=1, acting=True)
    plan_population: int = setting(200, "plans tried in each iteration (PETS: 500)", low=1, acting=True)
    plan_elites: int = setting(20, "the best of them, which the next iteration is drawn around (PETS: 50)", low=1, acting=True)
    plan_particles: int = setting(5, "roll-outs of each plan, whose returns are averaged (PETS: 20)", low=1, acting=True)
    plan_members: str = setting(
        "fixed", "fixed: a particle keeps one elite of the model for the whole plan (TSinf); drawn: it gets another at each step (TS1)",
        choices=("fixed", "drawn"), acting=True
    )  # fmt: skip
    plan_discount: float = setting(1.0, "of the rewards of a plan", low=0.0, high=1.0, acting=True)
    penalty: float = setting(
        0.0,
        "times the uncertainty, is taken off each reward of a plan (MOPO's lambda); above 0 all members are asked",
        low=0.0,
        acting=True,
    )
    uncertainty: str = setting("aleatoric", "penalty: how uncertain the model is of a step", choices=uncertainty.names())
    range_margin: float = setting(
        1.0, "plans' observations are cut off where they leave the data's range by so many times its width", low=0.0, acting=True
    )
    world_model: str = setting("", "a trained model: a run of algo=dynamics, or a file in its models/; empty: it is trained", place=True)
    world_model_id: str = setting("", "which model that is", filled=True)


class PlanCarry(NamedTuple):
    """What planning remembers from step to step of B episodes."""

    mean: Tensor  # [B, H, A] where the search begins
    past: Tensor  # [B, history - 1, O + A]
    t: int


@dataclass(frozen=True)
class PlanSource(DynamicsSource):
    """And what acting needs to know of the data."""

    about: Tree


@dataclass(frozen=True)
class GivenSource:
    """A finished model."""

    params: Params
    extra: Tree


@dataclass(frozen=True)
class PlanSampler(DynamicsSampler):
    """Prepares `PlanSource`."""

    algorithm: PETS

    def prepare(self, dataset: Dataset) -> PlanSource:
        source = super().prepare(dataset)
        about = {**data_range(dataset), "scale": torch.ones(self.algorithm.model.out_dim, device=source.mean.device)}
        return PlanSource(**vars(source), about=self.algorithm.prepared(about, dataset))


@dataclass(frozen=True)
class GivenSampler:
    """Prepares `GivenSource`."""

    algorithm: PETS

    def prepare(self, dataset: Dataset) -> GivenSource:
        c = self.algorithm.config
        trained = self.algorithm.pretrained["world_model"].to(dataset.columns["rewards"].device)
        tree = self.algorithm.prepared(trained.tree, dataset)
        extra = {name: tree[name] for name in ("mean", "std", *self.algorithm.about)}
        # as it would be at the end of its training; only the errors' order counts
        extra["error"] = torch.tensor(trained.meta["held_out"], device=tree["mean"].device).nan_to_num(torch.inf)
        extra["stale"] = torch.tensor(c.patience, device=tree["mean"].device)
        return GivenSource(tree["params"], extra)

    def __call__(self, source: GivenSource, key: Tensor, batch_size: int) -> Batch:
        return {}


@register("algo", "pets")
class PETS(Dynamics):
    """Acts by the first action of the best plan that a search finds in the ensemble; module "dynamics"."""

    Config = PETSConfig
    traits = replace(Dynamics.traits, policy_modules=("dynamics",), acts_on_device=True, actions=("continuous",))

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """The model that is named; none where its own training makes one."""
        c = config.algo
        if c.world_model:
            return {"world_model": required()}
        if c.calibrated:
            raise UserError("algo.calibrated=true needs a finished model: train one with algo=dynamics, then algo.world_model=RUN takes it")
        return super().requires(config, dataset)

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The settings of the model that is named."""
        if "world_model" not in pretrained:
            return config
        return dataclasses.replace(config, algo=with_model(config.algo, pretrained["world_model"]))

    def modules(self) -> dict[str, Any]:
        c = self.config
        check_plan(c)
        self.runtime.notes = ()
        modules = super().modules()
        # without what is the planner's: this is what the model's file describes
        self.model = WorldModel(DynamicsSettings(**{n: vars(c)[n] for n in MODEL}), self.spec)
        asked = c.plan_population * c.plan_iterations * c.plan_particles * c.plan_horizon
        self.runtime.notes = (*self.runtime.notes, f"planning asks the model {asked:,} times before each action (algo.plan_*)")
        return modules

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        config = super().fit_config(config, dataset, grid)
        if max([config.penalty, *(grid or {}).get("penalty", [])]) > 0.0:
            asked = SimpleNamespace(config=config, members=config.members)
            if problem := uncertainty.fault(config.uncertainty, asked):
                raise UserError(f"algo.{problem}; choose another, or leave algo.penalty at 0")
        return config

    # ---- learning, or taking a model that has learnt

    @property
    def about(self) -> tuple[str, ...]:
        """What acting needs to know of the data, by its name in a model's tree."""
        return ("low", "high", "scale", *(["density"] if self.config.uncertainty == "density" else []))

    def prepared(self, tree: Tree, dataset: Dataset) -> Tree:
        """`tree` with what the measure of uncertainty needs."""
        return uncertainty.prepare("density", self.model, tree, dataset) if "density" in self.about else tree

    def sampler(self) -> Sampler:
        return GivenSampler(self) if self.config.world_model else PlanSampler(self)

    def extra(self, params: dict[str, Params]) -> Tree:
        s, found = self.spec, super().extra(params)
        found |= {"low": torch.zeros(s.observation_dim), "high": torch.zeros(s.observation_dim), "scale": torch.ones(self.model.out_dim)}
        if "density" in self.about:
            found["density"] = uncertainty.fit_density(torch.zeros(1, s.observation_dim + s.action_dim))  # of the right shapes
        return found

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> tuple[TrainState, Metrics]:
        if self.config.world_model:
            return state, {"dynamics/loss": torch.zeros((), device=state.step.device)}
        return super().update(state, batch, key, phase=phase)

    def refresh(self, state: TrainState, source: Any, key: Tensor, *, step: int) -> tuple[TrainState, Metrics]:
        if self.config.world_model:
            return (self.given(state, source), {}) if step == 0 else (state, {})
        state, metrics = super().refresh(state, source, key, step=step)
        return (state._replace(extra=filled(state.extra, source.about)), metrics) if step == 0 else (state, metrics)

    def review(self, state: TrainState, source: DynamicsSource) -> tuple[TrainState, Metrics]:
        state, metrics = super().review(state, source)
        if not self.model.learns_variance:  # a standard deviation for each output: that of the held-out errors
            extra, held = state.extra, source.held
            elites = extra["error"].topk(self.config.elites, largest=False).indices
            mean = self.model.raw(extra["best"], extra, held["inputs"]).mean[elites]
            scale = (mean - held["targets"]).square().mean((0, 1)).sqrt()
            state = state._replace(extra={**extra, "scale": scale})
        return state, metrics

    def given(self, state: TrainState, source: GivenSource) -> TrainState:
        """The state at the end of the training of a finished model."""
        params = {"dynamics": filled(state.params["dynamics"], source.params)}
        return state._replace(params=params, extra=filled(state.extra, {**source.extra, "best": source.params}))

    @property
    def trains_model(self) -> bool:  # type: ignore[override]
        return not self.config.world_model

    # ---- acting

    def actor(self, state: TrainState) -> Actor:
        return PETSActor(self, state)

    def acting_tree(self, state: TrainState) -> Tree:
        """The model as plans see it."""
        tree = {**{n: state.extra[n] for n in self.about}, **self.tree(state)}
        margin = self.config.range_margin * (tree["high"] - tree["low"])
        return {**tree, "low": tree["low"] - margin, "high": tree["high"] + margin}

    def returns(self, tree: Tree, observations: Tensor, past: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        """What the model expects of plans [B, P, H, A] from observations [B, O]: [B, P]. All plans meet the same random numbers."""
        flat, tried = plans.flatten(0, 1), plans.shape[1]
        parts = torch.arange(flat.shape[0], device=plans.device).split(max(1, CHUNK // self.config.plan_particles))
        found = [self.score(tree, observations[rows // tried], past[rows // tried], flat[rows], key) for rows in parts]
        return torch.cat(found).view(plans.shape[:2])

    def score(self, tree: Tree, observations: Tensor, past: Tensor, plans: Tensor, key: Tensor) -> Tensor:
        """The return of plans [R, H, A], each from an observation [R, O] of its own, mean over particles: [R]; NaN where the model breaks.

        A reward counts as far as the episode goes on to it: not at all after a known end, and by the probability of that where ends are
        learnt. Particle n meets the same noise, and asks the same members, in all plans, so that plans differ by what they do alone.
        """
        c, n = self.config, self.config.plan_particles
        rows, horizon = plans.shape[:2]
        assign, noise = rng.split(key)
        observations, past = observations.expand(n, *observations.shape), past.expand(n, *past.shape)
        total = observations.new_zeros(n, rows)
        alive, weight = torch.ones_like(total), 1.0
        for t in range(horizon):
            if t == 0 or c.plan_members == "drawn":
                chosen = members(rng.fold_in(assign, t), tree["elites"], n)
                own = {name: v[chosen] if name.startswith("net.") else v for name, v in tree["params"].items()}
            actions = plans[:, t].expand(n, rows, -1)
            doubt: Tensor | float = 0.0
            if c.penalty == 0.0:
                prediction = self.model.predict_each({**tree, "params": own}, observations, actions, past)
            else:
                everyone, doubt = self.judged(tree, observations, actions, past)
                each = torch.arange(n, device=chosen.device)
                prediction = Prediction(*(None if x is None else x.unflatten(1, (n, rows))[chosen, each] for x in everyone))  # type: ignore[arg-type]
            draw = rng.normal(rng.fold_in(noise, t), (n, self.model.out_dim)).unsqueeze(1)
            following = prediction.mean + prediction.std * draw[..., :-1]
            rewards = prediction.reward + prediction.reward_std * draw[..., -1]
            sure = prediction
            if prediction.ending is not None:
                sure = prediction._replace(ending=torch.full_like(prediction.ending, -torch.inf).unsqueeze(0))  # no end is drawn
            outcome = self.model.settle(tree, sure, observations, actions, following, rewards, noise)
            broken = ~(torch.isfinite(following).all(-1) & torch.isfinite(rewards))
            gain = torch.where(broken, torch.nan, outcome.rewards - c.penalty * doubt)
            total = total + torch.where(alive > 0.0, weight * alive * gain, 0.0)
            goes_on = 1.0 - outcome.terminations.float()
            alive = alive * (goes_on if prediction.ending is None else goes_on * (-prediction.ending).sigmoid())
            observations, past = outcome.next_observations, self.model.later_past(past, observations, actions)
            weight = weight * c.plan_discount
        return total.mean(0)

    def judged(self, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor) -> tuple[Prediction, Tensor]:
        """What all members expect of pairs [N, R], as [E, N R], and how uncertain that is, [N, R]."""
        o, a, p = (x.flatten(0, 1) for x in (observations, actions, past))
        prediction = self.model.predict(tree, o, a, p)
        doubt = uncertainty.measure(self.config.uncertainty)(self.model, tree, prediction, o, a).nan_to_num(1e6, 1e6)
        return prediction, doubt.view(observations.shape[:2])


class PETSActor(Actor):
    """The first action of the plan that the search ends with.

    Without `explore` its random numbers depend on the seed and the step of the episode alone; with it they are the key's, and mppi adds
    noise to the action.
    """

    algorithm: PETS

    def __init__(self, algorithm: PETS, state: TrainState) -> None:
        super().__init__(algorithm, state)
        self.tree = algorithm.acting_tree(state)

    def start(self, episodes: int) -> Carry:
        c, spec, (low, high) = self.algorithm.config, self.algorithm.spec, self.bounds("cpu")
        past = torch.zeros(episodes, c.history - 1, spec.observation_dim + spec.action_dim)
        return PlanCarry(first_plan(episodes, c.plan_horizon, low, high), past, 0)

    def bounds(self, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """The smallest and the largest action, [A]."""
        one = torch.ones(self.algorithm.spec.action_dim, device=device)
        return -one, one

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        algorithm, device = self.algorithm, observations.device
        past = algorithm.model.first_past(observations) if carry.t == 0 else carry.past
        if not explore:
            key = rng.fold_in(rng.fold_in(self.state.key, 211), carry.t)

        def returns(observations: Tensor, plans: Tensor, key: Tensor) -> Tensor:
            return algorithm.returns(self.tree, observations, past, plans, key)

        mean = carry.mean.to(device)
        action, mean = plan(algorithm.config, returns, observations, mean, *self.bounds(device), key, explore=explore)
        return action, PlanCarry(mean, algorithm.model.later_past(past, observations, action), carry.t + 1)


def members(key: Tensor, elites: Tensor, particles: int) -> Tensor:
    """Which elite each particle asks, [particles]: each is asked by as many particles as any other, or by one more."""
    deal, order = rng.split(key)
    shuffled = elites[rng.uniform(deal, tuple(elites.shape)).argsort()]
    return shuffled[rng.uniform(order, (particles,)).argsort() % elites.shape[0]]


def filled(tree: Tree, news: Tree) -> Tree:
    """`tree`, its names in their order, with what `news` has under the same ones."""
    # clones: under vmap what comes out must not be what all replicas share
    return {k: v if k not in news else filled(v, news[k]) if isinstance(v, dict) else news[k].clone() for k, v in tree.items()}


def with_model(config: PETSConfig, trained: Trained) -> PETSConfig:
    """`config` with the settings of the model that it names. Raises UserError for one that cannot be planned in, and for settings of
    the model's that are given beside it."""
    if trained.model.kind != "ensemble":
        kind = trained.meta["model"]
        raise UserError(f"algo.world_model={config.world_model} is a model of kind {kind}; algo=pets plans in those of algo=dynamics")
    first, there = PETSConfig(), trained.model.config
    taken: dict[str, Any] = {}
    for name in sorted(MODEL):
        mine, its = getattr(config, name), getattr(there, name)
        given = mine != getattr(first, name)
        if given and mine != its and name not in FREE:
            raise UserError(f"algo.{name}={mine}, but algo.world_model={config.world_model} is trained and has {its}: leave the first out")
        taken[name] = mine if given and name in FREE else its
    return dataclasses.replace(config, **taken)
