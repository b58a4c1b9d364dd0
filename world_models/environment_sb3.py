"""A model's batched episodes as stable-baselines3's VecEnv; imported only where that package is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode
from stable_baselines3.common.vec_env import VecEnv


class ModelVecEnv(VecEnv):
    """Wraps `ModelVectorEnv`, whose episodes begin anew within the step that ends them, as SB3 expects. What is asked
    of one environment by name (`get_attr`, `set_attr`, `env_method`) is asked of the batch, once."""

    def __init__(self, envs: Any) -> None:
        """envs: a `ModelVectorEnv`."""
        self.envs = envs
        self.envs.autoreset_mode = envs.metadata["autoreset_mode"] = AutoresetMode.SAME_STEP
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)
        self._actions: Any = None

    def reset(self) -> np.ndarray:
        seed = self._seeds[0]  # SB3 counts up from it for the others
        options = dict(self._options[0]) if self._options and self._options[0] else None
        observations, _ = self.envs.reset(seed=seed, options=options)
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        self._actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        observations, rewards, terminated, truncated, infos = self.envs.step(self._actions)
        dones = terminated | truncated
        step_infos: list[dict[str, Any]] = []
        for i in range(self.num_envs):
            info: dict[str, Any] = {
                "uncertainty": float(infos["uncertainty"][i]),
                "clipped": bool(infos["clipped"][i]),
                "TimeLimit.truncated": bool(truncated[i]),
            }
            if truncated[i]:
                info["truncation"] = infos["truncation"][i]
            if dones[i]:
                info["terminal_observation"] = infos["final_obs"][i]
            step_infos.append(info)
        return observations, rewards.astype(np.float32), dones, step_infos

    def close(self) -> None:
        self.envs.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.envs, attr_name) for _ in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        setattr(self.envs, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        result = getattr(self.envs, method_name)(*method_args, **method_kwargs)
        return [result for _ in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        return [None] * self.num_envs
