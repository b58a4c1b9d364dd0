"""SINDy's equations as a world model, and the run that finds them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from offrl.algorithm import Algorithm, Batch, Dataset, DataSpec, Grid, Sampler, TrainState, Traits, Tree, Update
from offrl.errors import UserError, say
from offrl.registry import register
from offrl.settings.field import setting
from offrl.settings.kinds import restored
from offrl.settings.replicas import Replica
from offrl.system import files as checkpoint
from offrl.world_models.dynamics import Dynamics, DynamicsSettings, HeldOutSettings, Split, save_calibrated, split
from offrl.world_models.model import FOLDER, Outcome, Prediction, WorldModel, load
from offrl.world_models.sindy import regression as sindy

EQUATIONS = "equations.txt"


@dataclass
class SindySettings(sindy.SindyConfig, HeldOutSettings):
    """Settings of the sparse regression, and of what a model of the environment needs besides."""

    name: str = "sindy"
    batch_size: int = setting(256, "no meaning here: the fit takes all rows", low=1)
    noise: bool = setting(False, "rollouts add noise of the size of the one-step error")
    termination: str = setting("auto", "auto: the environment's own rule, where it is known; never; or a rule's name")
    history: ClassVar[int] = 1
    delta: ClassVar[bool] = True
    loss: ClassVar[str] = "least squares"  # no learnt variance: uncertainty=aleatoric says so


class SindyModel(WorldModel):
    """Members are the ensemble's and, as the last one, the median that rollouts follow. Equations are in the
    environment's units.
    """

    kind = "sindy"

    def __init__(self, config: Any, spec: DataSpec) -> None:
        super().__init__(config, spec)
        self.members = config.members + 1

    def build(self) -> Any:
        return nn.Module()

    def predict(self, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor) -> Prediction:
        s, a, _ = self.to_dataset_units(observations, actions, observations)
        return self.told(tree, *sindy.predict_members(tree, s, self.spec.encode(a)))

    def predict_each(self, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor) -> Prediction:
        s, a, _ = self.to_dataset_units(observations, actions, observations)

        def one(dynamics: Tensor, reward: Tensor, s: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
            medians = {k: {**tree[k], "median": v} for k, v in zip(sindy.PARTS, (dynamics, reward), strict=True)}
            return sindy.predict({**tree, **medians}, s, a)

        dynamics, reward = (tree[k]["coefficients"] for k in sindy.PARTS)
        nexts, rewards = torch.vmap(one)(dynamics, reward, s, self.spec.encode(a))
        return self.told(tree, nexts, rewards)

    def sample(self, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor, key: Tensor) -> Outcome:
        return self.outcome(tree, self.predict(tree, observations, actions, past), observations, actions, key)

    def told(self, tree: Tree, nexts: Tensor, rewards: Tensor) -> Prediction:
        """In the dataset's units."""
        std, reward_std = (tree[k]["residual"].to(nexts.dtype) for k in sindy.PARTS)
        if self.spec.observation_mean is not None:
            offset, unit, _, _ = self.units(nexts.device)
            nexts, std = (nexts - offset) / unit, std / unit
        std = torch.cat([std, reward_std * abs(self.spec.reward_scale)]).clamp(min=1e-6)
        if self.config.calibrated:
            std = std * tree["scale"]
        return Prediction(nexts, std[:-1].expand(nexts.shape), self.transformed(rewards), std[-1].expand(rewards.shape))

    def outcome(self, tree: Tree, prediction: Prediction, *x: Any, **more: Any) -> Outcome:
        if not self.config.noise:
            prediction = prediction._replace(
                std=torch.zeros_like(prediction.std), reward_std=torch.zeros_like(prediction.reward_std)
            )
        return super().outcome(tree, prediction, *x, **more)


@dataclass(frozen=True)
class _Nothing:
    """No batches: the fit is one regression at the end."""

    def prepare(self, dataset: Dataset) -> None:
        return None

    def __call__(self, source: Any, key: Tensor, batch_size: int) -> Batch:
        return {}


class Sindy(Algorithm[SindySettings]):
    """Sparse equations of the environment. The run's updates do nothing; `save_models` fits the model of each seed."""

    traits = Traits(policy_modules=(), cuda_graph=False)

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        spec = dataset.spec
        known = Dynamics.fit_config(DynamicsSettings(termination=config.termination, reward=config.reward), dataset)
        if known.termination == "learned":
            raise UserError(
                f"the rule by which episodes of {spec.name} end is not known, and SINDy learns none: set "
                "algo.termination to one, or never"
            )
        # refuses what is too large before a run directory is made
        sindy.factors(spec.observation_dim, spec.encoded_action_dim, config)
        return dataclasses.replace(config, termination=known.termination, reward=known.reward)

    def modules(self) -> dict[str, nn.Module]:
        self.model = SindyModel(self.config, self.spec)
        return {}

    def sampler(self) -> Sampler:
        return _Nothing()

    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        return state, {"sindy/loss": torch.zeros_like(state.step, dtype=torch.float32)}

    def finished(self, state: TrainState) -> Tensor:
        return torch.ones_like(state.step, dtype=torch.bool)

    trains_model = True

    def save_models(
        self, run_dir: Path, replicas: Sequence[Replica], state: TrainState, dataset: Dataset, quiet: bool
    ) -> None:
        """Fit a model for each seed, and write its equations; see `offrl.world_models.model.ModelTrainer`."""
        parts, lines = split(dataset, self.config), []
        for replica in replicas:
            path = run_dir / FOLDER / f"{replica.name}.safetensors"
            if not path.exists():
                self.write(path, replica, dataset, parts)
            trained = load(path)
            report = [
                *(f"  note: {n}" for n in trained.meta["notes"]),
                *(f"  {e}" for e in sindy.equations(trained.tree)),
            ]
            lines += [f"seed {replica.seed}", *report, ""]
        checkpoint.write_text(run_dir / EQUATIONS, "\n".join(lines))
        if not quiet:
            say(*lines)

    def write(self, path: Path, replica: Replica, dataset: Dataset, parts: Split) -> None:
        """Fit the model of one seed and keep it."""
        model, actions, train, held_out = self.model, dataset.columns["actions"], parts.train, parts.held_out
        flat = {k: dataset.flat(k).float() for k in ("observations", "next_observations")}
        s, a, nexts = model.to_dataset_units(
            flat["observations"][train], actions[train], flat["next_observations"][train]
        )
        rewards = (dataset.columns["rewards"][train] - self.spec.reward_shift) / (self.spec.reward_scale or 1.0)
        tree, notes = sindy.fit(s, model.spec.encode(a), rewards, nexts, self.config, replica.seed)
        for part in sindy.PARTS:
            tree[part]["coefficients"] = torch.cat([tree[part]["coefficients"], tree[part]["median"][None]])
        tree |= {"elites": torch.tensor([model.members - 1]), "scale": torch.ones(model.out_dim)}
        prediction = model.predict(tree, flat["observations"][held_out], actions[held_out], flat["observations"][:0])
        errors = (prediction.mean - flat["next_observations"][held_out]).square().mean((-2, -1))
        meta = {"held_out": errors.tolist(), "seed": replica.seed, "updates": 0, "epochs": 0, "notes": list(notes)}
        save_calibrated(path, model, tree, dataset, held_out, meta)


@register("world_model", "sindy")
def rebuilt(config: Mapping[str, Any], spec: DataSpec) -> SindyModel:
    """The model that a file describes."""
    return SindyModel(restored(SindySettings, config, "the model"), spec)
