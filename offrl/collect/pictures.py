"""Images of environments that `render()` shows."""

from __future__ import annotations

import os
from typing import Any

import gymnasium as gym
import numpy as np

from offrl.data.raw.streams import resize
from offrl.errors import UserError, first_line, nearest
from offrl.tasks.environments import has_physics


def check_camera(env: gym.Env, camera: str, env_id: str) -> None:
    """Raises UserError for a camera that MuJoCo's model does not have; it would show another one without a word."""
    if camera and has_physics(env):
        model: Any = env.unwrapped.model  # type: ignore[attr-defined]
        names = [model.camera(i).name for i in range(model.ncam)]
        if camera not in names:
            raise UserError(
                f"{env_id} has no camera '{camera}'; it has {', '.join(names) or 'none'}.{nearest(camera, names)}"
            )


def rendered(env: gym.Env, size: tuple[int, ...], env_id: str) -> np.ndarray:
    """What `env.render()` shows, [*size, C]. Raises UserError where it shows no image."""
    cure = ": MUJOCO_GL=egl takes a GPU's driver, MUJOCO_GL=osmesa the package libosmesa6" * has_physics(env)
    if cure and os.environ.get("MUJOCO_GL") == "disable":  # see `import_mujoco`
        raise UserError(f"{env_id} cannot be rendered without OpenGL{cure}")
    try:
        image = np.asarray(env.render())
    except Exception as error:  # third-party environment, and whatever OpenGL raises
        fault = f"{type(error).__name__}: {first_line(error)}"
        raise UserError(f"{env_id} cannot be rendered ({fault}){cure}") from error
    if image.dtype != np.uint8 or image.ndim != 3:
        raise UserError(f"{env_id}: render() gave {image.dtype} {list(image.shape)} where an image is uint8 [H, W, C]")
    return resize(image, (size[0], size[1]))
