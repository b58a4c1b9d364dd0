"""Distillation: a policy small enough to read, or for a microcontroller, that imitates a trained one.

`offrl distill RUN into=tree` trains it and measures it. Fits are made once, before the first update, on the host."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offrl import rng
from offrl.algorithm import Dataset, Params, Requirement, TrainConfig, TrainState, Update
from offrl.errors import UserError
from offrl.families.fitted import FittedPolicy, FittedSettings
from offrl.families.teacher import check_memoryless
from offrl.nn.students import agreement, make_student
from offrl.registry import register
from offrl.settings.field import setting
from offrl.settings.replicas import seed_list

CHUNK = 16_384  # rows that the teacher labels at once
END = 0.999  # of an action's range [-1, 1]: beyond it a target is not `inside`


@dataclass
class DistillConfig(FittedSettings):
    """Settings of the student."""

    name: str = "distill"
    teacher: str = setting(
        "", "the trained run whose policies are imitated, each by the student of its seed", place=True
    )
    teacher_id: str = setting("", "which one that is", filled=True)
    teacher_settings: dict[str, Any] = setting({}, "its algorithm's settings", filled=True)
    into: str = setting(
        "tree",
        "tree: one decision tree; trees: a sum of boosted ones; sindy: a sparse formula; linear: a formula of degree 1 "
        "with all terms; mlp: a small network",
        choices=("tree", "trees", "sindy", "linear", "mlp"),
    )
    max_depth: int = setting(6, "tree, trees: most questions on the way to a leaf", low=1, high=12)
    trees: int = setting(100, "trees: how many", low=2)
    shrinkage: float = setting(0.1, "trees: what each tree counts", low=1e-3, high=1.0, shared=True)
    degree: int = setting(2, "sindy: highest degree of the products of observations", low=1, high=4)
    angles: list[int] = setting([], "sindy: numbers of observations, in radians, whose sine and cosine are terms too")
    threshold: float = setting(
        7e-3, "sindy: a term's smallest effect, in standard deviations of the action", low=0.0, high=1.0, shared=True
    )
    hidden: list[int] = setting([32], "mlp: widths of the hidden layers", low=1)
    updates: int = setting(20_000, "mlp: steps of Adam with a cosine schedule", low=1)
    learning_rate: float = setting(3e-3, "mlp: Adam's learning rate", low=0.0)
    batch_size: int = setting(256, "mlp: rows in a batch", low=1)


@register("algo", "distill")
class Distill(FittedPolicy[DistillConfig]):
    """A student of each seed of the teacher, fitted to its greedy actions at the data's states."""

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        if not config.algo.teacher:
            raise UserError(
                "algo=distill imitates a trained run: `offrl distill RUN into=tree`, or name it: algo.teacher=RUN"
            )
        return {"teacher": Requirement(every_replica=True, allow_other_normalisation=True, check=check_memoryless)}

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        teacher, spec = pretrained["teacher"], dataset.spec
        keys = [int(state.key) for _, state in teacher.replicas]
        if len(set(keys)) < len(keys):
            raise UserError(f"algo.teacher={config.algo.teacher} is a grid of settings; name a run of one of them")
        known = teacher.algorithm.data_spec
        if (known.action_low, known.action_high, known.num_actions) != (
            spec.action_low,
            spec.action_high,
            spec.num_actions,
        ):
            raise UserError(
                f"algo.teacher={config.algo.teacher} acts in another range than the actions of {spec.name}: distil it "
                "on the data that it was trained on"
            )
        missing = [seed for seed in seed_list(config.seeds) if int(rng.make_key(seed)) not in keys]
        if missing:
            raise UserError(
                f"algo.teacher={config.algo.teacher} has no policy of seed {missing[0]} (it was not trained, or "
                "diverged); set seeds= to those that it has"
            )
        return config

    def modules(self) -> dict[str, nn.Module]:
        return {"actor": make_student(self.config, self.spec)}

    def extra(self, params: dict[str, Params]) -> dict[str, Tensor]:
        """Fidelity on held-out rows, see `agreement`."""
        return {"r2": torch.zeros(()), "difference": torch.zeros(())}

    def fit(self, state: TrainState, source: Any, key: Tensor) -> Update:
        """The student, and its fidelity."""
        train, test = (self.drawn(~source["test"], key), self.drawn(source["test"], rng.fold_in(key, 1)))
        x = source["observations"][train]
        y = self.labels(state, x)
        net: Any = self.policy.net
        inside = (y.abs() < END) | self.spec.discrete
        begin = {name.removeprefix("net."): p.cpu() for name, p in state.params["actor"].items()}
        state = self.with_policy(state, net.fit(begin, x, y, inside, self.config, rng.fold_in(key, 2)))
        return state, self.fidelity(state, source["observations"][test])

    @torch.no_grad()
    def labels(self, state: TrainState, observations: Tensor) -> Tensor:
        """The teacher's greedy actions [N, A], discrete ones as one-hot [N, K], at observations [N, O] as students see
        them.
        """
        pairs = self.pretrained["teacher"].replicas
        algorithm, teacher = next(pair for pair in pairs if torch.equal(pair[1].key, state.key.cpu()))
        x = observations
        for spec, inverse in ((self.spec, True), (algorithm.data_spec, False)):
            if (moments := spec.observation_moments) is not None:
                mean, std = map(torch.from_numpy, moments)
                x = x * std + mean if inverse else (x - mean) / std
        actor = algorithm.actor(teacher)
        return self.spec.encode(torch.cat([actor.act(None, r, teacher.key, explore=False)[0] for r in x.split(CHUNK)]))

    def fidelity(self, state: TrainState, observations: Tensor) -> dict[str, Tensor]:
        """See `extra`."""
        labels = self.labels(state, observations)
        policy = self.actor(state)
        acted = policy.act(None, observations.to(state.step.device), state.key, explore=False)[0].cpu()
        r2, difference = agreement(labels, self.spec.encode(acted), self.spec.discrete)
        return {"r2": r2, "difference": difference}
