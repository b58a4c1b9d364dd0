"""Images beside the numbers of a recorded dataset: MuJoCo's recorded states, shown again."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from offrl.collect.pictures import check_camera, rendered
from offrl.data.formats.image_columns import PREFIX
from offrl.data.memory import Memory
from offrl.data.raw import RawData
from offrl.data.raw.infer import fitting_task
from offrl.data.raw.streams import size_of
from offrl.data.tools.convert import Progress, Written, convert
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.system import trust
from offrl.tasks.entries import PIXELS
from offrl.tasks.environments import make_env
from offrl.tasks.states import set_state, states_of
from offrl.tasks.task import Task

LOOKED = 64  # rows whose observations are compared with the environment's


def render(
    config: DatasetConfig,
    out: str,
    size: Sequence[int] = (64, 64),
    camera: str = "",
    env: str = "",
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Written:
    """Write the dataset `config` as D4RL HDF5 with what its environment shows in each row's state (qpos and qvel), as
    the images `camera`, or "pixels".

    size: height and width, each pixel the mean of what it covers. env: the environment, in place of the data's own.
    What a state does not hold, such as a goal, is shown as after reset(seed=0); what followed an episode's last row is
    not known. Raises UserError without recorded states, and where the environment does not take or show them.
    """

    def add(raw: RawData, memory: Memory) -> str:
        task = Task(name=env, env_id=env) if env else fitting_task(raw)
        if task is None or task.env_id is None:
            raise UserError(f"{raw.where} names no environment: say which its states are of, env=Hopper-v5")
        _show(raw, task, size_of(size), camera, memory, progress or (lambda share: None))
        return f"rendered in {task.env_id}, of"

    if not out.endswith((".hdf5", ".h5")):
        raise UserError(f"{out}: images beside numbers are written as HDF5 alone: name it {out}.hdf5")
    trust.typed(env)
    return convert(config, out, "d4rl", force=force, progress=progress, change=add)


def _show(raw: RawData, task: Task, size: tuple[int, int], camera: str, memory: Memory, progress: Progress) -> None:
    """Add the images to the columns."""
    cure = "from which alone images can be made: record them with offrl collect, or images themselves (images=true)"
    states = states_of(raw.columns, raw.where, cure)
    name = PREFIX + (camera or PIXELS)
    if name in raw.columns:
        raise UserError(f"{raw.where} has the images '{camera or PIXELS}' already; render another camera")
    shown = {"render_mode": "rgb_array", **({"camera_name": camera} if camera else {})}
    with contextlib.closing(make_env(replace(task, env_kwargs={**task.env_kwargs, **shown}))) as env:
        check_camera(env, camera, str(task.env_id))
        env.reset(seed=0)
        base: Any = env.unwrapped
        images: np.ndarray | None = None
        differ = 0
        for row in range(raw.rows):
            set_state(env, [part[row] for part in states], str(task.env_id), f"{raw.where}, row {row}")
            image = rendered(env, size, str(task.env_id))
            if images is None:
                images = memory.empty(name, (raw.rows, *image.shape), np.uint8)
            images[row] = image
            progress(row / raw.rows)
            if row < LOOKED and hasattr(base, "_get_obs"):
                differ += not _alike(base._get_obs(), raw.columns["observations"][row])
    if differ:
        raw.note(
            f"{task.env_id} observes other numbers than the data hold in {differ} of the first "
            f"{min(LOOKED, raw.rows)} states: look whether it is the environment that they come from (env=ID)"
        )
    assert images is not None
    raw.columns[name] = images


def _alike(observed: Any, recorded: np.ndarray) -> bool:
    """Whether most numbers agree; forces of contact are not known in a state that was set."""
    return np.shape(observed) != recorded.shape or bool(np.mean(np.isclose(observed, recorded, 1e-3, 1e-3)) > 0.5)
