"""Learning in context, as a picture: the curves of several learners over the steps or episodes of tasks that are in no
data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from offrl.evaluation.in_context import Played
from offrl.figures.curves import draw_lines
from offrl.figures.style import COLOURS, label_ends, new_figure, own_settings, save


@own_settings()
def draw(played: Mapping[str, Sequence[Played]], out: Path, title: str = "") -> None:
    """The curves as a picture: the mean over tasks with its 95% interval; of several policies of a learner their
    mean.
    """
    figure, axes = new_figure(title)
    lines, axis_label, single = {}, "", True
    for i, (name, policies) in enumerate(played.items()):
        x, _, axis_label = policies[0].curve()
        single = single and len(policies[0].ends) == 1
        values = np.mean([one.curve()[1] for one in policies], axis=0)  # [N, X]
        keep = np.unique(np.linspace(0, len(x) - 1, 60).round().astype(int))
        curves = {n: dict(zip(x[keep].tolist(), row[keep].tolist(), strict=True)) for n, row in enumerate(values)}
        lines[name] = (curves, COLOURS[i % len(COLOURS)])
    xlabel = "steps in the task" if single else "episodes of the task"
    n_tasks = len(next(iter(played.values()))[0].tasks)
    heading = f"{axis_label}  (mean over {n_tasks} unseen tasks, 95% interval)"
    ends = draw_lines(axes, lines, spread=True, thin=False, xlabel=xlabel, heading=heading)
    label_ends(axes, ends)
    save(figure, out)
