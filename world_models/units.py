"""Between a model's units and the environment's: observations that were normalised, actions scaled to [-1, 1], rewards
transformed.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import DataSpec
from offrl.errors import UserError


class Units:
    """The transforms that a model's dataset applied to observations, actions and rewards, both ways.

    Raises UserError where rewards were multiplied by 0, for then those of the environment are lost.
    """

    def __init__(self, spec: DataSpec, device: torch.device | str = "cpu") -> None:
        if spec.reward_scale == 0.0:
            raise UserError(
                f"the model of {spec.name} was trained with rewards multiplied by 0 and knows nothing of the "
                "environment's"
            )
        self.spec, self.device = spec, torch.device(device)
        self.normalised = spec.observation_mean is not None
        self.mean, self.std = (np.asarray(x or (), np.float32) for x in (spec.observation_mean, spec.observation_std))
        if not spec.discrete:
            self.low, self.high = spec.action_bounds

    def observations(self, raw: np.ndarray) -> Tensor:
        """Observations of the environment [B, *O] as the model takes them: [B, O] float32."""
        flat = np.asarray(raw, np.float32).reshape(len(raw), self.spec.observation_dim)
        flat = (flat - self.mean) / self.std if self.normalised else flat
        return torch.from_numpy(np.ascontiguousarray(flat)).to(self.device)

    def raw(self, observations: Tensor) -> np.ndarray:
        """A model's observations [B, O] as the environment gives them: [B, *O] float32."""
        flat = observations.cpu().numpy()
        flat = flat * self.std + self.mean if self.normalised else flat
        return flat.reshape(len(flat), *self.spec.observation_shape)

    def actions(self, raw: np.ndarray, count: int) -> Tensor:
        """Actions in the environment's range [B, A], cut off at its ends, as the model takes them: [-1, 1]; or choices
        [B] as they are.

        Raises UserError for another shape, what is not finite, or a choice that there is not.
        """
        values, spec = np.asarray(raw), self.spec
        expected = (count,) if spec.discrete else (count, spec.action_dim)
        if values.shape != expected:
            raise UserError(f"actions of shape {values.shape}; the model of {spec.name} takes {expected}")
        if not np.isfinite(values).all():
            raise UserError(f"NaN or infinite actions; the model of {spec.name} takes finite ones")
        if spec.discrete:
            if ((values < 0) | (values >= spec.num_actions)).any():
                last_choice = spec.num_actions - 1
                raise UserError(
                    f"actions {values.min()} to {values.max()}; those of the model of {spec.name} are 0 to "
                    f"{last_choice}"
                )
            return torch.from_numpy(values.astype(np.int64)).to(self.device)
        span = np.where(self.high > self.low, self.high - self.low, 1.0).astype(np.float32)
        scaled = np.where(self.high > self.low, np.clip(2.0 * (values - self.low) / span - 1.0, -1.0, 1.0), 0.0)
        return torch.from_numpy(scaled.astype(np.float32)).to(self.device)

    def rewards(self, rewards: Tensor) -> np.ndarray:
        """A model's rewards [B] as the environment gives them: float64."""
        return (rewards.cpu().double().numpy() - self.spec.reward_shift) / self.spec.reward_scale
