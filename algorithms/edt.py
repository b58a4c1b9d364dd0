"""Elastic Decision Transformer: "Elastic Decision Transformer" (Wu, Wang and Hamaya, 2023, arXiv 2307.02484)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from offrl import losses, rng
from offrl.algorithm import Batch, Carry, Dataset, Grid, Loss, Params, TrainState
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID, drawn_episodes, recorded_returns_to_go
from offrl.errors import UserError
from offrl.families.return_conditioned import TargetReturnSettings, round_digits
from offrl.families.sequence import SequenceModel, SequenceSettings, StepPolicy, TargetReturnActor, masked_mean
from offrl.nn.transformer import Affine
from offrl.registry import register
from offrl.settings.field import defaults, setting

BEST_WEIGHT, BINS_WEIGHT = 0.5, 0.001  # of the losses of the largest return and of its bin, as the authors'


@dataclass
@defaults(layers=4, heads=4, activation="gelu")
class EDTConfig(TargetReturnSettings, SequenceSettings):
    """Settings of EDT; the defaults are the authors' for D4RL's locomotion tasks, but for the width, which is DT's, and
    `return_scale` and `return_range`, which are the data's: theirs, 1000 and D4RL's reference scores, are in
    configs/experiment/edt."""

    name: str = "edt"
    return_expectile: float = setting(
        0.99, "of the returns from a history: the one that is estimated", low=0.0, high=1.0
    )
    return_bins: int = setting(60, "values that a return can have as the network sees it", low=2)
    return_range: list[float] = setting([], "smallest and largest return to go, as recorded; []: the data's")
    stride: int = setting(
        2,
        "steps between the lengths of history that are tried when acting: context, context - stride, ...",
        low=1,
        acting=True,
    )
    expert_temperature: float = setting(
        25.0,
        "acting asks for returns drawn from the bins, the better ones made more likely by exp(this * return in [0, 1]) "
        "(the authors: 10 and 15 more, for HalfCheetah 1 more); 0: for the estimated expectile",
        low=0.0,
        acting=True,
    )
    expert_cut: float = setting(
        0.15, "share of the bins, the least likely ones, that are not drawn", low=0.0, high=0.99, acting=True
    )


class EDTNet(StepPolicy):
    """The policy, the returns that histories promise, and the next observation."""

    def __init__(self, sizes: Mapping[str, int], config: EDTConfig, spec: Any) -> None:
        super().__init__(sizes, config, spec, output_kind="return", post_norm=True, hidden="return")
        self.max_return = Affine(config.width, 1)
        self.bins = Affine(config.width, config.return_bins)
        self.next_observation = Affine(config.width, spec.observation_dim)

    def forward(  # type: ignore[override]
        self, tokens: Mapping[str, Tensor], timesteps: Tensor, valid: Tensor | None = None, key: Tensor | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
        """(action's distribution, largest return [B, K] in units of `return_scale`, logits of its bins [B, K, bins],
        next observation [B, K, O])."""
        h = self.steps(tokens, timesteps, valid, key)
        history = h["observation"]
        return (
            self.head(h["return"]),
            self.max_return(history).squeeze(-1),
            self.bins(history),
            self.next_observation(h["reward"]),
        )


class EDTActor(TargetReturnActor):
    """Policy on the length of history that promises the largest return, which asks for a return that good histories
    have.

    The search is the authors' `_return_search`. For each length the network is asked twice. At first its history begins
    with what is left of the target return, and a return is drawn (or estimated) at each step; then those returns stand
    in the history, and it gives the promise and the action. Draws depend on the seed and the step of the episode alone,
    as the Trajectory Transformer's.
    """

    algorithm: EDT

    def act(self, carry: Carry, observations: Tensor, key: Tensor, *, explore: bool) -> tuple[Tensor, Carry]:
        window = self.enter(carry, observations)
        draw = rng.fold_in(rng.fold_in(self.state.key, DRAW), carry.t)
        actions = self.choose(self.search(window, draw)[0], key, explore)
        return actions, self.with_actions(carry, window, actions)

    def search(self, window: Batch, key: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """The distribution of the action [E, ...], and the steps of the window in the best of all lengths of history,
        bool [E, n].
        """
        algorithm, (episodes, steps) = self.algorithm, window[STEPS].shape
        shape = (episodes, -1)
        device = window[STEPS].device
        lengths = torch.arange(steps, 0, -algorithm.config.stride, device=device)
        masks = torch.arange(steps, device=device) >= steps - lengths.unsqueeze(-1)  # [W, n]
        windows = {name: column.repeat_interleave(len(lengths), 0) for name, column in window.items()}  # [E W, n, ...]
        valid = masks.repeat(episodes, 1)
        _, max_return, bins, _ = self.apply("actor", algorithm.tokens(windows), windows[STEPS], valid, None)
        requested = self.requested_returns(max_return.unflatten(0, shape), bins.unflatten(0, shape), key)
        windows = {**windows, RETURNS: requested.flatten(0, 1)}
        dist, max_return, *_ = self.apply("actor", algorithm.tokens(windows), windows[STEPS], valid, None)
        longest = max_return[:, -1].unflatten(0, shape).argmax(-1)  # of equal promises that of the longest
        rows = torch.arange(episodes, device=device)
        return tuple(x[:, -1].unflatten(0, shape)[rows, longest] for x in dist), masks[longest]

    def requested_returns(self, max_return: Tensor, bins: Tensor, key: Tensor) -> Tensor:
        """The return to ask for at each step [E, W, n], as recorded, of its estimates [E, W, n] and the logits of its
        bins [E, W, n, bins]. The noise is the same for all episodes."""
        c = self.algorithm.config
        if not c.expert_temperature:
            return max_return * c.scale
        logits = bins + c.expert_temperature * torch.linspace(
            0.0, 1.0, c.return_bins, dtype=bins.dtype, device=bins.device
        )
        cut = math.ceil(c.expert_cut * (c.return_bins - 1))  # what lies below that quantile, linearly interpolated
        least = logits.sort(-1).values[..., cut : cut + 1]
        noisy = torch.where(logits >= least, logits, float("-inf")) + rng.gumbel(key, tuple(logits.shape[1:]))
        return self.algorithm.in_bin(noisy.argmax(-1))


@register("algo", "edt")
class EDT(SequenceModel[EDTConfig]):
    """A policy that shortens its history where a shorter one promises a larger return, and so leaves a bad past behind.

    Tokens (observation, return to go, action, reward). From each observation the network also estimates the largest
    return to go, an expectile of it (equation 3); of several lengths of history the policy takes the one with the
    largest estimate.
    As in the authors' code (its `MaskedCausalAttention`; the paper does not say so) nothing attends to returns but that
    of a window's first step: an action sees the return that is asked for through the residual stream of its own token.

    Differences from the authors' code: the reward is a token, as in the paper, where they train a network without; the
    next observation is predicted from it, and not from the return's token with the predicted action; that of a window's
    last step is not in the window, and not predicted. Windows begin at any step of the data, as DT's do, where they
    draw an episode first and then a whole window of it. A drawn bin is asked for as that bin, where their decoding
    (range / bins per bin) makes it the one below.
    """

    actor_class = EDTActor

    @classmethod
    def fit_config(cls, config: EDTConfig, dataset: Dataset, grid: Grid = None) -> EDTConfig:
        config = super().fit_config(config, dataset, grid)
        if not config.return_range:
            complete = torch.zeros(dataset.num_episodes, dtype=torch.bool)
            complete[drawn_episodes(dataset).cpu()] = True
            returns = recorded_returns_to_go(dataset)[dataset.per_row(complete)]
            low, high = round_digits(float(returns.min())), round_digits(float(returns.max()))
            config = dataclasses.replace(config, return_range=[low, high if high > low else low + 1.0])
        return config

    def modules(self) -> dict[str, nn.Module]:
        ends = self.config.return_range
        if ends and not (len(ends) == 2 and ends[0] < ends[1]):
            raise UserError(f"algo.return_range={ends} must be two numbers, the smaller one first; [] takes the data's")
        return {"actor": EDTNet(self.sizes(), self.config, self.spec)}

    def sizes(self) -> dict[str, int]:
        return {
            "observation": self.spec.observation_dim,
            "return": 1,
            "action": self.spec.encoded_action_dim,
            "reward": 1,
        }

    def tokens(self, batch: Batch) -> dict[str, Tensor]:
        half = 0.5 * self.config.return_bins
        share = (self.bin_of(batch[RETURNS]).to(batch["observations"].dtype) - half) / half
        return {
            "observation": batch["observations"],
            "return": share.unsqueeze(-1),
            "action": self.spec.encode(batch["actions"]),
            "reward": batch["rewards"].unsqueeze(-1),
        }

    def bin_of(self, returns: Tensor) -> Tensor:
        """The bin that each return has reached, int64."""
        low, high = self.config.return_range
        share = ((returns - low) / (high - low)).clamp(0.0, 1.0)
        return (share * (self.config.return_bins - 1)).floor().long()

    def in_bin(self, bins: Tensor) -> Tensor:
        """A return in each bin, as recorded, away from its edges."""
        low, high = self.config.return_range
        return low + ((bins + 0.5) / (self.config.return_bins - 1)).clamp(max=1.0) * (high - low)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |a - pi(history, R)|^2, and weighted: |tau - 1(e < 0)| e^2 with e = R - R_best(history) (equation 3),
        R in units of `return_scale`, -log p(bin of R | history) and |s' - model|^2."""
        c, valid, returns = self.config, batch[VALID], batch[RETURNS]
        outputs = self.apply("actor", actor, self.tokens(batch), batch[STEPS], valid, key)
        dist, max_return, bins, next_observations = outputs
        imitation = masked_mean(self.policy.bc_loss(dist, batch["actions"]), valid)
        error = returns / c.scale - max_return
        return_loss = masked_mean(losses.expectile_weight(error, c.return_expectile) * error.square(), valid)
        log_p = bins.log_softmax(-1).gather(-1, self.bin_of(returns).unsqueeze(-1)).squeeze(-1)
        entropy = masked_mean(-log_p, valid)
        # the successor of a window's last step is not in it
        model = masked_mean(
            (next_observations[:, :-1] - batch["observations"][:, 1:]).square().mean(-1), valid[:, 1:] & valid[:, :-1]
        )
        loss = imitation + BEST_WEIGHT * return_loss + BINS_WEIGHT * entropy + model
        return loss, {
            "actor/loss": imitation,
            "actor/return": return_loss,
            "actor/return_bins": entropy,
            "actor/next": model,
        }


DRAW = 223  # folded into the key of the state: of the returns that are asked for
