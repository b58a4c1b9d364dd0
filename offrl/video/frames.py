"""Pictures: drawing an environment, keeping what was drawn, putting replicas side by side, writing the file."""

from __future__ import annotations

import functools
import gc
import math
import os
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offrl.errors import UserError, first_line
from offrl.system.files import replacing
from offrl.tasks.environments import has_physics

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

HOLD = 1.0  # seconds that the last picture stays
OFF = ("disable", "disabled", "off", "false", "0")  # in MUJOCO_GL, as MuJoCo reads it
DIM = 0.35  # brightness of an episode that is over
BACK, INK, FAINT = (24, 26, 31), (240, 240, 240), (150, 155, 165)


class NoVideo(UserError):
    """Videos cannot be made here, or not of this environment."""


def draw_fast(env: Any, size: int) -> None:
    """Without shadows, reflections and smooth edges, which cost six times the rest where a processor draws; with room
    for our size.
    """
    if not has_physics(env):
        return
    model = env.unwrapped.model
    model.light_castshadow[:] = 0
    model.mat_reflectance[:] = 0.0
    model.vis.quality.shadowsize = 0
    model.vis.quality.offsamples = 0
    for name in ("width", "height"):
        current_size = getattr(env.unwrapped, name, 0)
        setattr(model.vis.global_, f"off{name}", max(size, current_size if isinstance(current_size, int) else 0))


def follow(env: Any) -> None:
    """Look through the model's own tracking camera: Gymnasium 1.4 takes a free one, which stays where the robot
    began.
    """
    renderer = getattr(env.unwrapped, "mujoco_renderer", None)
    if renderer is None or not has_physics(env) or getattr(renderer, "camera_id", None) != -1:
        return
    import mujoco

    number = mujoco.mj_name2id(env.unwrapped.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
    if number >= 0:
        renderer.camera_id = number


class Painter:
    """Draws an environment as it draws itself. Where it does not, and is made of MuJoCo's model and data: from where
    MuJoCo looks at it.
    """

    def __init__(self, env: Any, size: int) -> None:
        self.env, self.size = env, size
        self.renderer: Any = None  # MuJoCo's renderer, once it is needed

    def __call__(self) -> tuple[np.ndarray | None, str]:
        """(the picture, ""), or (None, why there is none)."""
        gl = os.environ.get("MUJOCO_GL", "")
        if has_physics(self.env) and gl.lower() in OFF:
            return None, f"MUJOCO_GL={gl} turns drawing off; egl or osmesa turns it on"
        reason = ""
        if self.renderer is None:
            try:
                if self.env.render_mode == "rgb_array":
                    return np.asarray(self.env.render()), ""
                reason = "its render_mode is not rgb_array"
            except Exception as error:  # whatever an OpenGL library, a driver or a third-party environment raises
                reason = first_line(error)
        if not has_physics(self.env):
            return None, reason
        try:
            return self._from_outside(), ""
        except Exception as error:
            also = first_line(error)
            both = reason if also in reason else f"{reason}; MuJoCo's renderer: {also}" if reason else also
            return None, f"{both}; MUJOCO_GL is {gl or 'not set'}: egl or osmesa, set before Python starts, may do"

    def _from_outside(self) -> np.ndarray:
        import mujoco

        base = self.env.unwrapped
        if self.renderer is None:
            self.renderer = mujoco.Renderer(base.model, self.size, self.size)
        self.renderer.update_scene(base.data)
        return self.renderer.render().copy()

    def close(self) -> None:
        if self.renderer is not None:
            self.renderer.close()


def silently(draw: Callable[[], Any]) -> Any:
    """The result of `draw`, without the notices of OpenGL libraries that do not work here: half-made objects complain
    when deleted, after the error itself has been taken."""
    hook = sys.unraisablehook
    sys.unraisablehook = lambda unraisable: None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = draw()
            gc.collect()
            return result
    finally:
        sys.unraisablehook = hook


class Reel:
    """The pictures of one replica's episode, in a temporary file."""

    def __init__(self, size: int, label: str) -> None:
        self.size, self.label = size, label
        self.marks: list[tuple[int, int, int, float]] = []  # place and length in the file, step, return so far
        self._file: Any = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()

    def add(self, picture: np.ndarray, t: int, gain: float) -> None:
        """`picture` [H, W, 3] uint8 is fitted into the square."""
        data = zlib.compress(_fit(picture, self.size).tobytes(), 1)
        self.marks.append((self._file.seek(0, os.SEEK_END), len(data), t, gain))
        self._file.write(data)

    def __getitem__(self, i: int) -> np.ndarray:
        offset, length, _, _ = self.marks[i]
        self._file.seek(offset)
        flat = np.frombuffer(zlib.decompress(self._file.read(length)), np.uint8)
        return flat.reshape(self.size, self.size, 3)

    def close(self) -> None:
        self._file.close()


def _fit(picture: np.ndarray, size: int) -> np.ndarray:
    """[size, size, 3]: scaled to fit, bars where it is not square."""
    if picture.shape == (size, size, 3):
        return picture
    from PIL import Image

    image = Image.fromarray(picture).convert("RGB")
    scale = size / max(image.size)
    small = image.resize(
        (max(1, round(image.width * scale)), max(1, round(image.height * scale))), Image.Resampling.BILINEAR
    )
    square = Image.new("RGB", (size, size), BACK)
    square.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
    return np.asarray(square)


def pictures(reels: Sequence[Reel], stride: int, rate: float, title: str) -> Iterator[np.ndarray]:
    """The finished pictures [H, W, 3], one after the other."""
    from PIL import Image, ImageDraw

    size, count = reels[0].size, len(reels)
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    unit = min(18, max(11, size // 20))  # height of the letters
    bar, gap = 2 * (unit + 4) + 6, max(2, size // 80)
    head = unit + 14
    width = columns * size + (columns + 1) * gap
    height = head + rows * (bar + size) + (rows + 1) * gap
    canvas = Image.new("RGB", (width + width % 2, height + height % 2), BACK)
    draw = ImageDraw.Draw(canvas)
    _text(draw, (gap + 4, 6), title, unit + 1, canvas.width - 2 * gap - 8)
    still: list[int] = [-1] * count  # the last picture of each that was drawn
    total = max(len(reel.marks) for reel in reels)
    frame = np.asarray(canvas)
    for i in range(total):
        for k, reel in enumerate(reels):
            last = len(reel.marks) - 1
            over = i >= last
            if over and still[k] == last:
                continue
            at = min(i, last)
            still[k] = at
            _, _, t, gain = reel.marks[at]
            x, y = gap + k % columns * (size + gap), head + gap + k // columns * (bar + size + gap)
            picture = reel[at]
            if over and last < total - 1:  # others go on
                picture = (picture * DIM).astype(np.uint8)
            draw.rectangle((x, y, x + size - 1, y + bar - 1), fill=BACK)
            _text(draw, (x + 4, y + 2), reel.label, unit, size - 8)
            _text(draw, (x + 4, y + unit + 8), f"return {gain:,.1f}", unit, size * 6 // 10)
            ended = f"ended at step {t}" if over else f"step {t}"
            _text(draw, (x + size - 4, y + unit + 8), ended, unit, size * 4 // 10, FAINT, "ra")
            canvas.paste(Image.fromarray(picture), (x, y + bar))
        frame = np.asarray(canvas)
        yield frame
    for _ in range(round(HOLD * rate)):
        yield frame


@functools.cache
def _font(height: int) -> FreeTypeFont:
    """The letters that come with Matplotlib."""
    import matplotlib
    from PIL import ImageFont

    return ImageFont.truetype(os.path.join(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf"), height)


def _text(
    draw: Any,
    at: tuple[int, int],
    text: str,
    height: int,
    width: int,
    ink: tuple[int, int, int] = INK,
    anchor: str = "la",
) -> None:
    """One line, in smaller letters and at last cut off where it is wider than `width`."""
    while height > 9 and draw.textlength(text, font=_font(height)) > width:
        height -= 1
    while len(text) > 1 and draw.textlength(text, font=_font(height)) > width:
        text = text[:-2] + "…"
    draw.text(at, text, fill=ink, font=_font(height), anchor=anchor)


def write(path: Path, pictures: Iterator[np.ndarray], rate: float) -> None:
    """An H.264 file, put in place when it is complete."""
    import imageio.v2 as imageio

    options: Any = {
        "codec": "libx264",
        "quality": 8,
        "macro_block_size": 2,
        "output_params": ["-preset", "veryfast", "-f", "mp4"],
    }
    writer: Any
    try:
        with (
            replacing(path) as file,
            imageio.get_writer(file.name, format=".mp4", fps=rate, ffmpeg_log_level="error", **options) as writer,
        ):
            for picture in pictures:
                writer.append_data(picture)
    except (OSError, RuntimeError, ValueError) as error:
        raise NoVideo(f"{path} could not be written ({first_line(error)})") from error
