"""The environments of play on a GPU: Gymnasium's plain robots, whose physics MuJoCo Warp (google-deepmind/mujoco_warp)
steps for all at once. Its numbers are float32 and not MuJoCo's; observations, rewards and ends are computed from them
as of robots in threads.

A GPU may add in another order each time, so that episodes cannot be played again to come back to their middle: what
was answered in them is kept, and the state of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from offrl.errors import UserError, first_line, warn
from offrl.evaluation.steppers import Steps
from offrl.finetuning.play.backends import Backend, Beginning, EnvFailed
from offrl.finetuning.play.robots import Motion
from offrl.finetuning.play.threads import CURE, Threads
from offrl.system.devices import pick_device
from offrl.tasks.task import Task

STATE = ("qpos", "qvel", "qacc_warmstart", "act", "time")  # of a world: all that a step depends on
Answer = tuple[np.ndarray, float]  # an observation and a reward
LIMIT = 1e10  # beyond which MuJoCo calls physics unstable; MuJoCo Warp does not look
# the most contacts of two bodies of these shapes, and of two others
PLAIN, FEW, MANY = ("mjGEOM_PLANE", "mjGEOM_SPHERE", "mjGEOM_CAPSULE"), 2, 8


class Warp(Backend):
    """K worlds, stepped at once."""

    def __init__(self, task: Task, count: int, device: str) -> None:
        """device: the setting, whose CPU is taken only where it is named. Raises UserError without a GPU, without the
        package, and for an environment that is none of `ROBOTS` or whose model MuJoCo Warp does not step.
        """
        chosen, self.name = pick_device(device), task.env_id or task.name
        self.one = Threads(task, [0], "warp")  # in which episodes begin
        if chosen.type != "cuda" and device != "cpu":
            self.one.close()
            raise UserError(
                f"backend=warp steps on a CUDA GPU, and torch finds none: backend=threads steps {self.name} on the CPU"
            )
        self.base: Any = self.one.envs[0].unwrapped
        self.device = str(chosen)
        self.state: dict[str, np.ndarray] = {}  # of the worlds, and where they are along x
        self.locations = np.zeros(count)
        self.answered: list[list[Answer]] = [[] for _ in range(count)]  # of the running episodes
        self.recorded: list[list[Answer]] = [[] for _ in range(count)]  # to be answered again, last first
        try:
            self._open(count)
        except BaseException:
            self.close()
            raise
        if chosen.type == "cpu":
            warn(
                f"backend=warp on the CPU is for tests: backend=threads steps {self.name} faster; what it compiles "
                "takes a minute or two the first time"
            )

    def close(self) -> None:
        """Close the environment in which episodes begin."""
        self.one.close()

    def reset(self, beginnings: Sequence[Beginning]) -> list[tuple[np.ndarray, np.ndarray | None]]:
        """As `Backend.reset`."""
        if not beginnings:
            return []
        answers, states, locations = [], [], []
        for beginning in beginnings:
            try:
                answers += self.one.reset([beginning._replace(k=0)])
            except (EnvFailed, UserError) as error:
                self._take_back()
                if isinstance(error, UserError):
                    raise
                raise EnvFailed(beginning.k, error.text) from error.__cause__
            states.append([np.array(getattr(self.base.data, name)) for name in STATE])
            locations.append(self.one.robot.position(self.base)[0])
        at = [beginning.k for beginning in beginnings]
        for name, column in zip(STATE, zip(*states, strict=True), strict=True):
            self.state[name][at] = np.stack(column)
        self.locations[at] = locations
        for k in at:
            self.answered[k] = []
        self._write()
        return answers

    def step(self, at: Sequence[int], actions: Sequence[Any] | np.ndarray) -> tuple[np.ndarray, Steps]:
        """As `Backend.step`, of all environments. After `load` first what was answered before, of any of them.
        Raises UserError where contacts would be lost.
        """
        if any(self.recorded):
            answers = [self._again(k) for k in at]
            rewards, never = np.array([reward for _, reward in answers]), np.zeros(len(at), bool)
            unknown = np.full(len(at), np.nan)
            steps = Steps([], rewards, never, never.copy(), unknown, unknown.copy(), {})
            return np.stack([row for row, _ in answers]), steps
        actions = np.asarray(actions)
        self.data.ctrl.assign(actions.astype(np.float32))
        with self.warp.ScopedDevice(self.device):
            if self.graph is None:
                self._move()
            else:
                self.warp.capture_launch(self.graph)
        if self.data.overflow.numpy().any():
            raise UserError(
                f"backend=warp: {self.name} has more than {self.data.naconmax:,} contacts, or {self.data.njmax:,} "
                "constraints in a world, for which memory was set aside, so that some were lost: begin another run "
                "with backend=threads"
            )
        self.before = self.state, self.locations
        self.state = {name: getattr(self.data, name).numpy().copy() for name in STATE}
        parts = [self.state[name] for name in ("qpos", "qvel", "qacc_warmstart")]
        stable = (np.abs(np.concatenate(parts, axis=1)) < LIMIT).all(axis=1)
        qpos, qvel, _ = (np.where(stable[:, None], part.astype(float), 0.0) for part in parts)
        body = self.one.robot.body
        self.locations = qpos[:, 0] if body is None else self.data.xpos.numpy()[:, body, 0].astype(float)
        speeds = np.where(stable, (self.locations - self.before[1]) / self.one.seconds, 0.0)
        forces = np.zeros((len(at), 0))
        if self.one.robot.feels:
            forces = np.where(stable[:, None, None], self.data.cfrc_ext.numpy().astype(float), 0.0)
        text = f"its state is not finite, or beyond {LIMIT:g}"
        unstable = dict.fromkeys(np.flatnonzero(~stable).tolist(), text)
        rows, steps = self.one.answer(Motion(actions, speeds, qpos, qvel, forces), unstable)
        for answered, row, reward in zip(self.answered, rows, steps.rewards, strict=True):
            answered.append((row, reward))
        return rows, steps

    # ---- in the middle of an episode

    def save(self) -> dict[str, torch.Tensor]:
        """As `Backend.save`: the state of each world, and what was answered in the running episodes."""
        columns = [self.state[name].reshape(len(self.locations), -1) for name in STATE]
        answered = [answer for world in self.answered for answer in world]
        empty = np.zeros((0, *self.one.shape), self.one.kind)
        return {
            "physics": torch.from_numpy(np.concatenate(columns, axis=1)),
            "locations": torch.from_numpy(self.locations.copy()),
            "rows": torch.from_numpy(np.concatenate([empty, *(row[None] for row, _ in answered)])),
            "rewards": torch.tensor([reward for _, reward in answered], dtype=torch.float64),
        }

    def load(self, saved: dict[str, torch.Tensor], ends: np.ndarray) -> None:
        """As `Backend.load`: `step` answers what it answered in the running episodes before it moves anything."""
        widths = [self.state[name][0].size for name in STATE]
        columns = np.split(saved["physics"].numpy(), np.cumsum(widths)[:-1], axis=1)
        for name, column in zip(STATE, columns, strict=True):
            self.state[name] = column.reshape(self.state[name].shape).copy()
        self.locations = saved["locations"].numpy().copy()
        rows, rewards = (np.split(saved[name].numpy(), ends) for name in ("rows", "rewards"))
        self.recorded = [list(zip(*parts, strict=True))[::-1] for parts in zip(rows, rewards, strict=True)]
        self._write()

    def _again(self, k: int) -> Answer:
        self.answered[k].append(self.recorded[k].pop())
        return self.answered[k][-1]

    def _take_back(self) -> None:
        """Forget the last step: the next one counts as not made where an episode cannot begin behind it."""
        self.state, self.locations = self.before
        for answered in self.answered:
            del answered[-1:]

    # ---- on the device

    def _open(self, count: int) -> None:
        """Take the package, and the model and `count` worlds to the device."""
        try:
            import warp

            # its lines about each kernel; the second name is that of older versions
            warp.config.log_level, warp.config.quiet = getattr(warp, "LOG_ERROR", 40), True
            import mujoco_warp
        except ImportError as error:
            raise UserError(f"backend=warp needs pip install 'offrl[warp]' ({first_line(error)})") from None
        self.note = (
            f"physics of play by MuJoCo Warp {mujoco_warp.__version__} on {self.device}, in float32: other numbers "
            "than MuJoCo's, and on a GPU perhaps others each time (exact=no); scores are by MuJoCo"
        )
        self.warp, self.api, self.graph, model = warp, mujoco_warp, None, self.base.model
        with warp.ScopedDevice(self.device):
            try:
                self.model = mujoco_warp.put_model(model)
            except (NotImplementedError, ValueError) as error:
                raise UserError(
                    f"backend=warp: MuJoCo Warp does not step this {self.name} ({first_line(error)}): {CURE}"
                ) from None
            self.model.opt.warn_overflow = False  # it is an error here
            contacts, rows = room(model, self.model)
            self.data = mujoco_warp.make_data(model, nworld=count, nconmax=contacts, njmax=rows)
            self.state = {name: getattr(self.data, name).numpy().copy() for name in STATE}
            self.before = self.state, self.locations  # a step
            if warp.get_device(self.device).is_cuda:  # a launch for each kernel would take most of the time
                self._move()  # compiles
                with warp.ScopedCapture() as capture:
                    self._move()
                self.graph = capture.graph

    def _move(self) -> None:
        for _ in range(self.one.frames):
            self.api.step(self.model, self.data)
        if self.one.robot.feels:
            self.api.rne_postconstraint(self.model, self.data)

    def _write(self) -> None:
        """Put all worlds into `state`."""
        for name in STATE:
            getattr(self.data, name).assign(self.state[name])


def room(model: Any, on_device: Any) -> tuple[int, int]:
    """(contacts, rows of constraints) that a world can have at most. MuJoCo Warp's own guesses are smaller, and what
    exceeds them is lost; between two steps of RK4 it does not even say so.
    """
    import mujoco

    plain = np.isin(model.geom_type, [getattr(mujoco.mjtGeom, name) for name in PLAIN]).all()
    contacts = (FEW if plain else MANY) * len(on_device.nxn_geom_pair_filtered)
    limits = 2 * (model.njnt + model.ntendon) + model.nv + 6 * model.neq  # limits, friction, equalities
    return max(1, contacts), int(contacts * on_device.nmaxpyramid + limits)
