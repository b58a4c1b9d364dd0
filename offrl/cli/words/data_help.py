"""What `offrl data ACTION --help` prints: one action's usage, with its own settings only."""

from __future__ import annotations

import re
from collections.abc import Sequence

USES = {
    "inspect": ("DATASET", "offrl data inspect my.hdf5 dataset.fields.observations=obs"),
    "doctor": ("DATASET [out=FOLDER]", "offrl data doctor hopper-medium-v2 out=page"),
    "convert": (
        "DATASET OUT",
        "offrl data convert my.npz my.hdf5\n  offrl data convert my.hdf5 mine/hopper-v0 format=minari",
    ),
    "merge": (
        "A B [...] OUT",
        "offrl data merge day1.hdf5 day2.hdf5 both.hdf5\n  offrl data merge logs/*.hdf5 all.hdf5",
    ),
    "subset": (
        "DATASET OUT",
        "offrl data subset my.hdf5 best.hdf5 top=0.1\n  offrl data subset my.hdf5 two.hdf5 episodes=5,7",
    ),
    "list": ("", "offrl data list"),
}
WRITING = ("convert", "merge", "subset")


def text(usage: str, arguments: Sequence[str]) -> str:
    """The part of `usage`, that of all actions, which is for the action among `arguments`; all of it where there is
    none.
    """
    action = next((a for a in arguments if a in USES), None)
    if action is None:
        return usage
    parts = re.split(r"\n\n", usage)
    entry = re.search(rf"^  offrl data {action}\b.*(?:\n {{10,}}.*)*", usage, re.MULTILINE)
    about = " ".join(re.sub(r"^  offrl data \w+ ?([A-Z\[.\] ]*) {2,}", "", entry[0]).split()) if entry else ""
    words, example = USES[action]
    lines = [
        f"usage: offrl data {action} {words} [name=value ...]".replace("  ", " "),
        "",
        f"{about[:1].upper()}{about[1:]}.",
        "",
        f"  {example}",
    ]
    for part in parts:
        title = part.split("\n", 1)[0]
        fits = (
            (title.startswith("DATASET is") and action != "list")
            or (title.startswith("settings of convert") and action in WRITING)
            or (title.startswith("what subset keeps") and action == "subset")
            or (title.startswith("settings of all") and action != "list")
            or title.startswith("exit status")
        )
        if fits:
            lines += ["", part]
    return "\n".join(lines)
