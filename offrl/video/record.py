"""Videos of scored episodes: the same start states, actions and returns as in the scores, all replicas of a run in one
picture.

An episode is played again exactly as it was scored (see `offrl.evaluation.evaluator`), one replica after the other;
pictures are kept, compressed, in a temporary file, and then put together. Drawing reads the physics and changes nothing
of it; the returns are compared to the scored ones."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.errors import UserError, first_line, warn
from offrl.evaluation.evaluator import Evaluator
from offrl.evaluation.result import Evaluation, Tally
from offrl.evaluation.shield_kinds import ShieldSettings
from offrl.settings.evaluation import EvalConfig
from offrl.settings.replicas import Replica, number
from offrl.system.files import file_name
from offrl.system.progress import Progress
from offrl.tasks.environments import choose_opengl
from offrl.tasks.task import Task
from offrl.video.frames import (
    NoVideo,
    Painter,
    Reel,
    draw_fast,
    follow,
    has_physics,
    pictures,
    silently,
    write,
)

if TYPE_CHECKING:
    from offrl.runs.run import SavedRun

FOLDER = "videos"
MOST = 36  # replicas in one picture


def prepare() -> None:
    """Choose how MuJoCo draws (`choose_opengl`). Raises NoVideo where the packages that write a video are missing."""
    for package in ("imageio", "imageio_ffmpeg", "PIL"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise NoVideo(f"the package {package} is not installed: pip install 'offrl[video]'") from None
    import imageio_ffmpeg

    try:
        program = imageio_ffmpeg.get_ffmpeg_exe()
    except RuntimeError:
        raise NoVideo("no ffmpeg was found: pip install 'offrl[video]', or name one in IMAGEIO_FFMPEG_EXE") from None
    if shutil.which(program) is None:
        raise NoVideo(f"the ffmpeg at {program}, which IMAGEIO_FFMPEG_EXE names, cannot be run")
    choose_opengl()


def film(
    run: SavedRun,
    config: EvalConfig,
    *,
    env: Any = None,
    fps: int = 30,
    size: int | None = None,
    videos: int = 1,
    scored: Evaluation | None = None,
    quiet: bool = False,
    shield: ShieldSettings | None = None,
) -> list[Path]:
    """Film the first `videos` of `config.episodes` episodes of a run's final policies; gives the files,
    RUN/videos/*.mp4, one each.

    env: as for `Run.evaluate`, in place of `config.env`. fps: pictures a second at most, at real speed. size: pixels of
    a replica's square. scored: the scores of the same evaluation, to compare with. Raises NoVideo, with the reason,
    where that is not possible; no half-written file is left behind.
    """
    task = run.task(env)
    if task is None:
        raise NoVideo(f"{run.dir} has no environment")
    replicas = run.replicas[:MOST]
    if len(replicas) < len(run.replicas):
        warn(f"the video shows the first {MOST} of {len(run.replicas)} replicas")
    size = size or (480 if len(replicas) == 1 else 320 if len(replicas) <= 4 else 256)
    size += size % 2
    videos = min(videos, config.episodes)
    policies = [run.load_policy(r) for r in replicas]
    policies = [shield.of(p) for p in policies] if shield else policies
    written: list[Path] = []
    with contextlib.ExitStack() as stack:
        evaluator = stack.enter_context(_evaluator(task, config, size))
        painter = stack.enter_context(contextlib.closing(Painter(evaluator.envs[0], size)))
        stride, rate = _speed(evaluator.envs[0], fps)
        progress = stack.enter_context(Progress("filming", len(replicas) * videos, "episodes", quiet))
        stack.enter_context(_disk())
        for episode in range(videos):
            reels: list[Reel] = []
            for n, (replica, policy) in enumerate(zip(replicas, policies, strict=True)):
                reel = stack.enter_context(contextlib.closing(Reel(size, _label(replica))))
                tally = Tally.of([policy], [replica.seed], config.episodes)
                tell = functools.partial(progress.update, episode * len(replicas) + n)
                camera = _Camera(policy, painter, task, tally, episode, stride, reel, str(replica), tell)
                evaluator.play(0, camera, replica.seed, [episode], tally)
                camera.finish()
                if scored is not None and tally.returns[0, episode] != scored.returns[n, episode]:
                    pair = f"{tally.returns[0, episode]:g} in the video, {scored.returns[n, episode]:g} in the scores"
                    warn(f"{replica}, episode {episode}: the return is {pair}: this environment is random")
                reels.append(reel)
            name = f"{file_name((task.env_id or task.name).rpartition(':')[2])}-seed{config.seed}-episode{episode}.mp4"
            path = run.dir / FOLDER / name
            write(path, pictures(reels, stride, rate, f"{run.algorithm} on {run.dataset}, episode {episode}"), rate)
            written.append(path)
            for reel in reels:
                reel.close()
    return written


@contextlib.contextmanager
def _disk() -> Iterator[None]:
    """A full disk, of temporary files say, costs the video and nothing else."""
    try:
        yield
    except OSError as error:
        raise NoVideo(f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}") from error


def _label(replica: Replica) -> str:
    return ", ".join([f"seed {replica.seed}", *(f"{field}={number(value)}" for field, value in replica.values)])


# ------------------------------------------------------------------------------------------------------------- pictures


def _evaluator(task: Task, config: EvalConfig, size: int) -> Evaluator:
    """An evaluator whose environments draw."""
    tasks = [task]
    if task.env_factory is None:  # not every environment takes the size of its pictures
        tasks = [
            dataclasses.replace(task, env_kwargs={**task.env_kwargs, "render_mode": "rgb_array", **extra})
            for extra in ({"width": size, "height": size}, {})
        ]
    for candidate in tasks:
        try:
            # what is amiss was said when the episodes were scored
            evaluator = Evaluator(candidate, config, lambda kind, message: None)
            break
        except UserError as error:
            reason = error
    else:
        raise NoVideo(first_line(reason)) from reason
    env: Any = evaluator.envs[0]
    if env.render_mode != "rgb_array" and not has_physics(env):
        evaluator.close()
        how = "make it with render_mode='rgb_array'" if task.env_factory else "it has no render_mode rgb_array"
        raise NoVideo(f"{task.env_id or task.name} does not draw: {how}")
    draw_fast(env, size)
    follow(env)
    return evaluator


def _speed(env: Any, fps: int) -> tuple[int, float]:
    """(steps between pictures, pictures a second), for real speed where the environment says what that is."""
    native = env.metadata.get("render_fps") or fps
    stride = max(1, math.ceil(native / fps - 1e-9))
    return stride, native / stride


class _Camera:
    """A policy that takes a picture before it acts; all else is the policy's own. Only one episode runs, in the
    evaluator's first environment."""

    def __init__(
        self,
        policy: Any,
        painter: Painter,
        task: Task,
        tally: Tally,
        episode: int,
        stride: int,
        reel: Reel,
        label: str,
        tell: Callable[[str], None],
    ) -> None:
        self.policy, self.painter, self.task, self.tally, self.episode = policy, painter, task, tally, episode
        self.stride, self.reel, self.label, self.tell = stride, reel, label, tell

    def __getattr__(self, name: str) -> Any:
        return getattr(self.policy, name)

    def step(self, carry: Any, observations: np.ndarray, t: int) -> tuple[np.ndarray, Any]:
        if t % self.stride == 0:
            self._shoot(t)
            self.tell(f"{self.label}, episode {self.episode}, step {t:,}")
        return self.policy.step(carry, observations, t)

    def finish(self) -> None:
        """The last picture, where the episode ended."""
        self._shoot(int(self.tally.lengths[0, self.episode]))

    def _shoot(self, t: int) -> None:
        picture, reason = self.painter() if self.reel.marks else silently(self.painter)
        if picture is None:
            raise NoVideo(f"{self.task.env_id or self.task.name} cannot be drawn ({reason})")
        if picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
            raise NoVideo(f"render() gave {picture.dtype} {picture.shape} where a picture is uint8 (height, width, 3)")
        self.reel.add(picture, t, float(self.tally.returns[0, self.episode]))
