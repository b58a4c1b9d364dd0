"""Advantage-weighted regression (Peng et al., 2019, arXiv 1910.00177) by boosted trees, after "Gradient Boosting
Reinforcement Learning" (Fuhrer et al., 2024, arXiv 2407.08250), offline."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offrl import losses
from offrl.algorithm import Dataset, Params, Requirement, Sampler, TrainConfig, TrainState, Update
from offrl.families.fitted import FittedPolicy, FittedRows, FittedSettings
from offrl.families.teacher import (
    TeacherSettings,
    check_critics,
    observation_rows,
    q_of_data,
    v_of_policy,
    values_requirement,
)
from offrl.nn.students import StudentPolicy, Trees
from offrl.registry import register
from offrl.settings.field import setting

WEIGHTS = "weights"
SAMPLES = 10  # actions of the run's policy whose mean Q is the V of an advantage
CHUNK = 1024  # rows whose actions are computed at once for all numbers of trees


@dataclass
class GBRLAWRConfig(TeacherSettings, FittedSettings):
    """Settings of advantage-weighted trees. The values are IQL's, trained first, or those of a run that is named."""

    name: str = "gbrl_awr"
    temperature: float = setting(
        3.0, "multiplies the advantage in the exponent of the weight; 0: the trees imitate the data", low=0.0
    )
    max_weight: float = setting(100.0, "cap of the exponential weights", low=0.0)
    trees: int = setting(300, "most trees; as many are kept as predict held-out actions best", low=2)
    max_depth: int = setting(4, "most questions on the way to a leaf", low=1, high=12)
    shrinkage: float = setting(0.1, "what each tree counts", low=1e-3, high=1.0, shared=True)
    batch_size: int = setting(10_000, "rows that each tree is fitted to, drawn anew", low=1)


@register("algo", "gbrl_awr")
class GBRLAWR(FittedPolicy[GBRLAWRConfig]):
    """A sum of trees that maximises E min(exp(temperature (Q(s, a) - V(s))), max_weight) log N(a; mu(s), sd): with the
    same sd in all states this is least squares, each row by its weight, whatever sd is.
    """

    traits = replace(FittedPolicy.traits, actions=("continuous",))

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        return values_requirement(config, "iql", {}, partial(check_critics, alternatives="iql, rebrac or td3_bc"))

    def modules(self) -> dict[str, nn.Module]:
        return {"actor": StudentPolicy(self.trees(), discrete=False)}

    def trees(self) -> Trees:
        """The trees before the fit, all 0."""
        return Trees(self.spec.observation_dim, self.spec.action_dim, self.config.trees, self.config.max_depth)

    def sampler(self) -> Sampler:
        return FittedRows(self.config.test_share, self.columns)

    def columns(self, dataset: Dataset) -> dict[str, Tensor]:
        """Actions [R, A] and weights [R] of all rows."""
        run, c = self.pretrained["values"], self.config
        advantage = q_of_data(run, dataset) - v_of_policy(run, observation_rows(dataset), SAMPLES)
        return {
            "actions": dataset.columns["actions"].cpu(),
            WEIGHTS: losses.advantage_weight(advantage, c.temperature, c.max_weight),
        }

    def extra(self, params: dict[str, Params]) -> dict[str, Tensor]:
        """trees that are kept, and the error of held-out actions with them, see `held_out_errors`."""
        return {"trees": torch.zeros(()), "error": torch.zeros(())}

    def fit(self, state: TrainState, source: Any, key: Tensor) -> Update:
        """The first trees of the fit, as many as predict held-out actions best."""
        c, trees, names = self.config, self.trees(), ("observations", "actions", WEIGHTS)
        begin: Params = {name: p.detach() for name, p in trees.named_parameters()}
        train = self.drawn(~source["test"], key)
        x, y, weights = (source[name][train] for name in names)
        params = trees.fit(begin, x, y, torch.ones_like(y, dtype=torch.bool), c, key, weights, c.batch_size)
        trees.load_state_dict(params)
        errors = held_out_errors(trees, *(source[name][source["test"]] for name in names))
        count = int(errors.argmin()) + 1
        params = {name: torch.cat([p[:count], self.trees().get_parameter(name)[count:]]) for name, p in params.items()}
        return self.with_policy(state, params), {"trees": torch.tensor(float(count)), "error": errors[count - 1]}


def held_out_errors(trees: Trees, observations: Tensor, actions: Tensor, weights: Tensor) -> Tensor:
    """[T] Weighted mean of |a - mu(s)|^2 over rows [N, O], [N, A], [N], mu the sum of the first tree, the first two,
    ..., all T.
    """
    total = torch.zeros(len(trees.value))
    for x, y, w in zip(observations.split(CHUNK), actions.split(CHUNK), weights.split(CHUNK), strict=True):
        total += w @ (trees.each(x).cumsum(1) - y[:, None]).square().sum(-1)
    return total / weights.sum()
