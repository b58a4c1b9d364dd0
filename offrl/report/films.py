"""The films, goal maps and open-loop predictions that runs have, in the page itself."""

from __future__ import annotations

import base64
import contextlib
from collections.abc import Sequence
from pathlib import Path

from offrl.figures import goal_map, goals, open_loop
from offrl.report.context import ReportContext, count
from offrl.report.page import escape
from offrl.runs.run import SavedRun
from offrl.video.record import FOLDER

LARGEST, MOST_BYTES = 6_000_000, 20_000_000  # of a file, and of all of them: base64 makes a third more of it
MOST = 6  # runs whose film is shown, and whose picture of a kind
FILM = "Episodes as they were scored, all seeds of the run side by side."
PICTURES = {  # file -> (what it is, a caption)
    goal_map.PICTURE: (
        "Goal map",
        "The way that the policy takes to each goal; where the algorithm learns them, its distances to the goal as "
        "colours, and its subgoals.",
    ),
    open_loop.PICTURE: (
        "Open-loop prediction",
        "What the latent model expects of windows of the data that it learnt from, of whose first five states it has "
        "seen the observations, along the recorded actions.",
    ),
    goals.PICTURE: (
        "Manager goal",
        "What the manager asks for in states of the data, as the model decodes it, and the worker's imagined way.",
    ),
}


def films(context: ReportContext) -> None:
    """A section with the first film and the pictures of each run that has some; of large ones and of many the rest is
    named.
    """
    runs = context.results.runs
    kinds = {"Films": [(run, file) for run in runs for file in _films(run)[:1]]}
    kinds |= {
        f"{kind}s": [(run, file) for run in runs for file in _inside(run, [run.dir / name])]
        for name, (kind, _) in PICTURES.items()
    }
    kinds = {heading: files for heading, files in kinds.items() if files}
    if not kinds:
        return
    page = context.page
    first, *more_kinds = kinds
    page.heading(" and ".join([first, *(kind.lower() for kind in more_kinds)]))
    room, file_names = MOST_BYTES, []
    with page.gallery() if sum(map(len, kinds.values())) > 1 else contextlib.nullcontext():
        for number, (run, file) in (pair for files in kinds.values() for pair in enumerate(files)):
            content = _content(file, min(room, LARGEST)) if number < MOST else b""
            subject = f"{run.algorithm} on {run.dataset}"
            picture = PICTURES.get(file.name)
            if picture and content.startswith(b"\x89PNG\r\n\x1a\n"):
                kind, caption = picture
                page.figure(content, f"{subject}. {caption}", alt=f"{kind} of {subject}. {caption}")
            elif not picture and (element := _element(content, f"Film: {subject}")):
                num_further = len(_films(run)) - 1
                more = f" {count(num_further, 'more film')} beside it." if num_further else ""
                caption = f"{escape(f'{subject}. {FILM}{more}')} <code>{escape(file)}</code>"
                page.markup(f"<figure>{element}<figcaption>{caption}</figcaption></figure>")
            else:
                file_names.append(str(file))
                continue
            room -= len(content)
    if file_names:
        with page.details(f"{count(len(file_names), 'file')} more, not shown to keep the page small"):
            page.items(file_names)


def _films(run: SavedRun) -> list[Path]:
    folder = run.dir / FOLDER
    return _inside(run, sorted([*folder.glob("*.mp4"), *folder.glob("*.gif")])) if folder.is_dir() else []


def _inside(run: SavedRun, files: Sequence[Path]) -> list[Path]:
    """Those that are plain files in the run's own folder: a link in a stranger's run would put another file into the
    page.
    """
    root = run.dir.resolve()
    return [file for file in files if file.is_file() and file.resolve().is_relative_to(root)]


def _content(file: Path, most: int) -> bytes:
    """The file's bytes; none of one that is larger than `most`, or cannot be read."""
    try:
        return file.read_bytes() if file.stat().st_size <= most else b""
    except OSError:
        return b""


def _element(content: bytes, alt: str) -> str:
    """A film as an element that needs no other file; empty where the bytes are neither MP4 nor GIF."""
    data = base64.b64encode(content).decode()
    if content[4:8] == b"ftyp":
        attributes = f'aria-label="{escape(alt)}" src="data:video/mp4;base64,{data}"'
        return f'<video controls loop muted playsinline preload="metadata" {attributes}></video>'
    if content.startswith((b"GIF87a", b"GIF89a")):
        return f'<img alt="{escape(alt)}" src="data:image/gif;base64,{data}">'
    return ""
