"""Videos: the scored episodes, frame by frame, or one line that says why there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

from offrl.data.dataset import DataSpec
from offrl.evaluation.result import Evaluation
from offrl.runs.run import SavedRun
from offrl.settings.evaluation import EvalConfig
from offrl.settings.replicas import Replica, expand
from offrl.tasks.episodes import reset_seed
from offrl.tasks.provenance import Provenance
from offrl.tasks.task import Task, with_factory
from offrl.video import NoVideo, film, prepare
from offrl.video import frames as picture
from offrl.video.frames import Reel, pictures
from offrl.video.record import _speed
from tests.support.evaluation import evaluate

iio = pytest.importorskip("imageio.v2", reason="needs pip install 'offrl[video]'")
pytest.importorskip("imageio_ffmpeg", reason="needs pip install 'offrl[video]'")

SIZE = 48


class Counter(gym.Env):
    """Shows how often it was stepped as a shade of grey, 10 for each step. Ends when the policy's seed says so; the
    return is the start.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012  # Gymnasium declares it so
    observation_space = spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, render_mode: str | None = "rgb_array", wide: bool = False) -> None:
        self.render_mode, self.wide = render_mode, wide

    def observe(self) -> np.ndarray:
        return np.array([self.start, self.t], np.float32)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.t, self.start = 0, float(self.np_random.uniform())
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return self.observe(), self.start, bool(action[0] > 0), self.t == 12, {}

    def render(self) -> np.ndarray:
        return np.full((SIZE, SIZE * (2 if self.wide else 1), 3), 10 * self.t, np.uint8)


class Stop:
    """Ends the episode at a step of its own."""

    def __init__(self, at: int) -> None:
        self.at, self.calls = at, 0

    def start(self, episodes: int) -> None:
        return None

    def step(self, carry: None, observations: np.ndarray, t: int) -> tuple[np.ndarray, None]:
        self.calls += 1
        return np.full((len(observations), 1), 1.0 if t + 1 == self.at else -1.0, np.float32), None


def run_of(tmp_path: Path, stops: list[int]) -> Any:
    """What `film` takes of a run."""
    spec = DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,), name="counted")
    seeds = list(range(len(stops)))
    return SimpleNamespace(
        dir=tmp_path,
        replicas=expand({}, seeds),
        record={"spec": spec.to_json()},
        algorithm="stop",
        dataset="counted",
        load_policy=lambda replica: Stop(stops[replica.seed]),
        task=lambda env: with_factory(None, env, "counted"),
    )


def frames(path: Path) -> list[np.ndarray]:
    return [np.asarray(f) for f in iio.mimread(path, memtest=False)]


@pytest.mark.nightly
def test_every_picture_of_every_replica(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shades tell which step each tile shows; a replica that is over stays, dimmed; all pictures are there."""
    run = run_of(tmp_path, [4, 9, 12])
    config = EvalConfig(episodes=3)
    scored = evaluate([Stop(4), Stop(9), Stop(12)], [0, 1, 2], Task("counted", env_factory=Counter), config)
    (path,) = film(run, config, env=Counter, size=SIZE, scored=scored, quiet=True)
    assert path == tmp_path / "videos" / "counted-seed0-episode0.mp4" and capsys.readouterr().err == ""
    seen = frames(path)
    assert len(seen) == 13 + 10  # steps 0 to 12, and one second of the end
    height, width = seen[0].shape[:2]
    assert height % 2 == width % 2 == 0 and not list(path.parent.glob(".*"))
    reels = tiles(height, width)
    for t in range(13):
        for k, end in enumerate((4, 9, 12)):
            shade = 10 * min(t, end) * (picture.DIM if t >= end and end < 12 else 1.0)
            assert abs(seen[t][reels[k]].mean() - shade) < 6, (t, k)


def tiles(height: int, width: int) -> list[tuple[int, int]]:
    """The middles of three tiles in two columns."""
    bar, gap = 2 * (11 + 4) + 6, 2
    head = 11 + 14
    middles = [
        (head + gap + row * (bar + SIZE + gap) + bar + SIZE // 2, gap + column * (SIZE + gap) + SIZE // 2)
        for row in (0, 1)
        for column in (0, 1)
    ]
    assert middles[3][0] < height and middles[3][1] < width
    return middles[:3]


@pytest.mark.nightly
def test_the_start_is_the_scored_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seeds: list[int] = []
    reset = Counter.reset

    def watched(self: Counter, *, seed: int | None = None, **more: Any) -> Any:
        seeds.append(seed or 0)
        return reset(self, seed=seed, **more)

    monkeypatch.setattr(Counter, "reset", watched)
    config = EvalConfig(episodes=4, seed=7, max_steps=3)
    paths = film(run_of(tmp_path, [9, 9]), config, env=Counter, size=SIZE, videos=2, quiet=True)
    assert seeds == [reset_seed(7, 0, 0), reset_seed(7, 1, 0), reset_seed(7, 0, 1), reset_seed(7, 1, 1)]
    assert [p.name for p in paths] == ["counted-seed7-episode0.mp4", "counted-seed7-episode1.mp4"]
    assert len(frames(paths[0])) == 4 + 10  # cut at 3 steps
    other = Evaluation(np.zeros((2, 4)), np.zeros((2, 4), np.int64), None, None, "", Provenance())
    film(run_of(tmp_path, [9, 9]), config, env=Counter, size=SIZE, scored=other, quiet=True)
    assert "seed 0, episode 0: the return is" in capsys.readouterr().err


def test_labels_and_running_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    monkeypatch.setattr(picture, "_text", lambda draw, at, text, *more: texts.append(text))
    reels = [Reel(SIZE, "temperature=3, seed 0"), Reel(SIZE, "temperature=3, seed 1")]
    for reel, steps in zip(reels, ((0, 5, 7), (0, 5, 10, 13)), strict=True):
        for t in steps:
            reel.add(np.zeros((SIZE, SIZE, 3), np.uint8), t, 1234.5 * t)
    assert len(list(pictures(reels, 5, 10.0, "iql on data"))) == 4 + 10
    assert texts[0] == "iql on data" and texts[1:4] == ["temperature=3, seed 0", "return 0.0", "step 0"]
    assert texts.count("ended at step 7") == 1 and "return 8,641.5" in texts and texts[-1] == "ended at step 13"
    for reel in reels:
        reel.close()


def test_odd_pictures_are_fitted() -> None:
    reel = Reel(SIZE, "")
    reel.add(np.full((40, 80, 3), 200, np.uint8), 0, 0.0)
    square = reel[0]
    assert square.shape == (SIZE, SIZE, 3) and (square[SIZE // 2] == 200).all() and (square[2] == picture.BACK).all()
    reel.close()


@pytest.mark.parametrize(
    ("native", "fps", "stride", "rate"), [(125, 30, 5, 25.0), (20, 30, 1, 20.0), (60, 30, 2, 30.0), (None, 24, 1, 24.0)]
)
def test_speed_is_real(native: int | None, fps: int, stride: int, rate: float) -> None:
    assert _speed(SimpleNamespace(metadata={"render_fps": native}), fps) == (stride, rate)


@pytest.mark.slow
def test_what_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EvalConfig(episodes=1)
    with pytest.raises(NoVideo, match="counted does not draw: make it with render_mode='rgb_array'"):
        film(run_of(tmp_path, [3]), config, env=lambda: Counter(render_mode=None), quiet=True)

    class Broken(Counter):
        def render(self) -> np.ndarray:
            raise RuntimeError("no OpenGL here\nlong story")

    class Grey(Counter):
        def render(self) -> np.ndarray:
            return np.zeros((4, 4), np.uint8)

    with pytest.raises(NoVideo, match=r"counted cannot be drawn \(no OpenGL here\)"):
        film(run_of(tmp_path, [3]), config, env=Broken, quiet=True)
    with pytest.raises(NoVideo, match=r"uint8 \(4, 4\) where a picture is"):
        film(run_of(tmp_path, [3]), config, env=Grey, quiet=True)
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", sys.executable)  # a program, but not ffmpeg
    with pytest.raises(NoVideo, match="could not be written"):
        film(run_of(tmp_path, [3]), config, env=Counter, size=SIZE, quiet=True)
    assert not list(tmp_path.rglob("*.mp4"))
    monkeypatch.setenv("IMAGEIO_FFMPEG_EXE", "/nowhere/ffmpeg")
    with pytest.raises(NoVideo, match="ffmpeg at /nowhere/ffmpeg"):
        prepare()
    monkeypatch.setitem(sys.modules, "imageio", None)
    with pytest.raises(NoVideo, match=r"pip install 'offrl\[video\]'"):
        prepare()


def test_the_back_end_is_chosen_only_where_nobody_did(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MUJOCO_GL", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    found = {"EGL": "libEGL.so.1", "OSMesa": "libOSMesa.so.8"}
    monkeypatch.setattr("ctypes.util.find_library", found.get)
    prepare()
    assert os.environ.pop("MUJOCO_GL") == "egl"
    del found["EGL"]
    prepare()
    assert os.environ["MUJOCO_GL"] == "osmesa"
    os.environ["MUJOCO_GL"] = "glfw"
    prepare()
    assert os.environ.pop("MUJOCO_GL") == "glfw"
    monkeypatch.setenv("DISPLAY", ":0")
    prepare()
    assert "MUJOCO_GL" not in os.environ


MUJOCO = """
import sys, numpy as np
from pathlib import Path
from types import SimpleNamespace
from offrl.video import film, prepare, NoVideo
prepare()
from offrl.data.dataset import DataSpec
from offrl.settings.evaluation import EvalConfig
from offrl.evaluation.evaluator import Evaluator
from offrl.settings.replicas import expand
from offrl.tasks.task import Task

class Wave:
    def start(self, episodes):
        return None
    def step(self, carry, observations, t):
        return np.sin(observations[:, :1] * 30.0 + t) * np.ones((1, 3)), None

task = Task("hop", sys.argv[2])
spec = DataSpec((11,), 3, action_low=(-1.0,) * 3, action_high=(1.0,) * 3, name="hop", task=task)
config = EvalConfig(episodes=2, max_steps=6)
run = SimpleNamespace(dir=Path(sys.argv[1]), replicas=expand({}, [0, 1]), record={"spec": spec.to_json()}, algorithm="wave", dataset="hop",
                      task=lambda env: task, load_policy=lambda replica: Wave())
scored = Evaluator(task, config)([Wave(), Wave()], [0, 1])
try:
    look = {"size": 700, "fps": 30} if len(sys.argv) > 3 else {"size": 64, "fps": 125}
    print("FILE", *film(run, config, scored=scored, quiet=True, **look))
except NoVideo as error:
    print("NONE", error)
"""  # noqa: E501


@pytest.mark.nightly
@pytest.mark.parametrize("size", ["small", "larger than MuJoCo's buffer"])
def test_mujoco(size: str, tmp_path: Path) -> None:
    """In a process of its own, for the back end is chosen when MuJoCo is imported. No warning: the returns are the
    scored ones.
    """
    arguments = [sys.executable, "-c", MUJOCO, str(tmp_path), "Hopper-v5", *(["large"] if size != "small" else [])]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if done.stdout.startswith("NONE"):
        pytest.skip(f"MuJoCo cannot draw here: {done.stdout.strip()}")
    assert "warning" not in done.stderr, done.stderr
    seen = frames(Path(done.stdout.removeprefix("FILE").strip()))
    assert len(seen) >= (7 if size == "small" else 3)
    middle = seen[0][100:, : seen[0].shape[1] // 2].astype(float)
    assert middle.std() > 20  # a chequered floor, not an empty picture
    if size == "small":
        assert np.abs(seen[6].astype(float) - seen[0]).max() > 50  # it moved


@pytest.mark.slow
def test_mujoco_without_a_back_end(tmp_path: Path) -> None:
    environment = {**os.environ, "MUJOCO_GL": "disable"}
    arguments = [sys.executable, "-c", MUJOCO, str(tmp_path), "Hopper-v5"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    assert "NONE Hopper-v5 cannot be drawn (MUJOCO_GL=disable turns drawing off" in done.stdout


def test_replica_labels() -> None:
    from offrl.video.record import _label

    assert (
        _label(Replica(2)) == "seed 2"
        and _label(Replica(0, (("temperature", 3.0), ("expectile", 0.7)))) == "seed 0, temperature=3, expectile=0.7"
    )


def test_a_full_disk_costs_only_the_video(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Reel, *_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Reel, "add", full)
    with pytest.raises(NoVideo, match="No space left on device"):
        film(run_of(tmp_path, [3]), EvalConfig(episodes=1), env=Counter, size=SIZE, quiet=True)


def test_the_environment_that_the_run_was_scored_in(tmp_path: Path) -> None:
    low, high = (-1.0,) * 3, (1.0,) * 3
    spec = DataSpec((11,), 3, action_low=low, action_high=high, name="hop", task=Task("hop", "Hopper-v4"))
    identity = {"seeds": [0], "algo": {"name": "bc"}}
    record = {"identity": identity, "data": {"name": "hop"}, "spec": spec.to_json(), "env": "Hopper-v5"}
    (tmp_path / "run.json").write_text(json.dumps(record))
    run = SavedRun(tmp_path)
    recorded, own = run.task(), run.task("auto")
    assert recorded is not None and recorded.env_id == "Hopper-v5" and own is not None and own.env_id == "Hopper-v4"
    with pytest.raises(NoVideo, match="has no environment"):
        film(run, EvalConfig(), env="none")


def test_the_camera_follows_the_robot() -> None:
    """Gymnasium 1.4 looks from where the robot began."""
    import mujoco

    env: Any = gym.make("Hopper-v5", render_mode="rgb_array")
    picture.follow(env)
    assert (
        env.unwrapped.mujoco_renderer.camera_id
        == mujoco.mj_name2id(env.unwrapped.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
        >= 0
    )
    chosen: Any = gym.make("Hopper-v5", render_mode="rgb_array", camera_id=0)
    picture.follow(chosen)
    assert chosen.unwrapped.mujoco_renderer.camera_id == 0
    picture.follow(Counter())  # no physics, nothing to do
    for one in (env, chosen):
        one.close()
