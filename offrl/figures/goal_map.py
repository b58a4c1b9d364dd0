"""A picture of what a goal-conditioned algorithm learnt in a maze: how far every place is from a goal, the subgoals
that it would choose on the way there, and the way that its policy takes. matplotlib is imported when one is drawn."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.goals import ACHIEVED
from offrl.errors import UserError
from offrl.evaluation.evaluator import Evaluator
from offrl.figures import style
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.environments import flattener, make_env, resolve_task
from offrl.tasks.episodes import goal_of, reset_seed, success_of
from offrl.tasks.task import Task

if TYPE_CHECKING:
    from offrl.algorithm import TrainState
    from offrl.evaluation.policy import TrainedPolicy
    from offrl.families.goal_conditioned import GoalConditioned

PICTURE = "goal_map.png"
MAZE = re.compile("maze", re.IGNORECASE)
PANELS = 5
STATES = 6_000  # of the data, in each panel
CANDIDATES = 2_000  # of them: a subgoal is shown as the one that it means
SUBGOALS = 20  # one after another, at most
STEPS = 1_000  # of the policy, at most
CHUNK = 2_048  # rows that the networks are given at once
START, GOAL, SUBGOAL, WAY, WALL = "#ffffff", "#d7191c", "#ff7f0e", "#000000", "#d5d8dd"


@dataclass
class Panel:
    """One start and one goal, as the environment or the data give them."""

    title: str
    start: np.ndarray  # [O]
    goal: np.ndarray  # [G]
    begin: np.ndarray  # [2] where the start is
    way: np.ndarray | None = None  # [T, 2] where the policy, or the data, went from there
    subgoals: np.ndarray = field(default_factory=lambda: np.zeros((0, 2)))
    distances: np.ndarray | None = None  # [N] of the states that are drawn


@dataclass
class Scene:
    """The content of the picture: panels, and the maze's walls, [W, 4]: left, bottom, width, height."""

    panels: list[Panel]
    walls: np.ndarray
    way: str  # what `Panel.way` is


def is_maze(spec: DataSpec) -> bool:
    """True where observations of the data begin with a position in a maze: a flat observation, and a task with such a
    name.
    """
    task = spec.task
    names = f"{spec.name} {task.name} {task.env_id}" if task is not None else ""
    return len(spec.observation_shape) == 1 and spec.observation_dim >= 2 and MAZE.search(names) is not None


@torch.no_grad()
def draw(
    out: Path,
    algorithm: GoalConditioned,
    state: TrainState,
    policy: TrainedPolicy,
    dataset: Dataset,
    label: str,
    env: str = "auto",
) -> None:
    """Draw one replica's picture. env: `eval.env`. Raises UserError when `out` cannot be written."""
    spec = dataset.spec
    scene = _scene_of_environment(policy, spec, env) or _scene_of_data(dataset)
    rows = torch.randint(len(dataset), (min(STATES, len(dataset)),), generator=torch.Generator().manual_seed(0))
    observations, goals = dataset.columns["observations"][rows].float(), _goal_column(dataset)[rows].float()
    positions = _positions(dataset, rows)
    for panel in scene.panels:
        goal = _as_input(spec, panel.goal, not spec.goal_dim)
        parts = [algorithm.distances(state, o, goal.expand(len(o), -1)) for o in observations.split(CHUNK)]
        known = [part for part in parts if part is not None]
        panel.distances = torch.cat(known).double().numpy() if known else None
        chosen = subgoals(
            algorithm, state, _as_input(spec, panel.start, True), goal, observations[:CANDIDATES], goals[:CANDIDATES]
        )
        panel.subgoals = positions[chosen]
    name = algorithm.config.name
    _picture(out, scene, positions, f"{name} on {spec.name}, {label}, {int(state.step):,} updates")


def subgoals(
    algorithm: GoalConditioned, state: TrainState, start: Tensor, goal: Tensor, observations: Tensor, goals: Tensor
) -> list[int]:
    """The candidates [N, O], which as goals are [N, G], that a hierarchical policy passes on the way from `start` [O]
    to `goal` [G].

    A subgoal is a latent: the candidate is taken whose own latent is nearest. From there the next one is asked for,
    until that is the goal itself or a candidate that was passed already. Empty for policies without a high level.
    """
    from offrl.families.subgoals import Candidates, Subgoals, nearest

    path: list[int] = []
    if algorithm.subgoal_kind != "latent":
        return path
    position, provider = start, Subgoals.from_algorithm(algorithm)
    candidates = Candidates(observations, torch.cat([goals, goal.unsqueeze(0)]))
    while len(path) < SUBGOALS:
        target = provider.choose(state, position.unsqueeze(0), goal.unsqueeze(0))
        best = int(nearest(provider, state, position.unsqueeze(0), target, candidates))
        if best == len(goals) or best in path:
            break
        path.append(best)
        position = observations[best]
    return path


def _statistics(spec: DataSpec) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation by which the observations [O] were normalised, float32."""
    if spec.observation_mean is None or spec.observation_std is None:
        return np.zeros(spec.observation_dim, np.float32), np.ones(spec.observation_dim, np.float32)
    return np.asarray(spec.observation_mean, np.float32), np.asarray(spec.observation_std, np.float32)


def _as_input(spec: DataSpec, raw: np.ndarray, observation: bool) -> Tensor:
    """The networks' input: observations as they were normalised."""
    values = np.asarray(raw, np.float32)
    mean, std = _statistics(spec)
    return torch.as_tensor((values - mean) / std if observation else values)


def _goal_column(dataset: Dataset) -> Tensor:
    return dataset.columns[ACHIEVED if dataset.spec.goal_dim else "observations"]


def _positions(dataset: Dataset, rows: Tensor) -> np.ndarray:
    """Positions of the rows, [N, 2], in the environment's units."""
    positions = _goal_column(dataset)[rows].double()[:, :2].numpy()
    mean, std = _statistics(dataset.spec)
    return positions if dataset.spec.goal_dim else positions * std[:2] + mean[:2]


# -------------------------------------------------------------------------------------------- starts, goals, ways,
# walls


class _Tracked(gym.Wrapper):
    """An environment that notes where its agent goes in an episode, which ends where the goal is reached."""

    def __init__(self, task: Task) -> None:
        super().__init__(make_env(task))
        self.flatten, self.shape, _ = flattener(self.env, task.observation_keys)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self.start, self.goal = self.flatten(observation), goal_of(observation, info)
        self.way = [self._position(observation)]
        return observation, info

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        self.way.append(self._position(observation))
        return observation, reward, terminated or (success_of(info) or 0.0) >= 1.0, truncated, info

    def _position(self, observation: Any) -> np.ndarray:
        """[2]: where an observation is."""
        achieved = observation.get("achieved_goal") if isinstance(observation, Mapping) else None
        return np.asarray(self.flatten(observation) if achieved is None else achieved, np.float64).ravel()[:2]


def _scene_of_environment(policy: TrainedPolicy, spec: DataSpec, name: str) -> Scene | None:
    """PANELS episodes of an evaluation; None where there is no environment or it tells no goal."""
    task = resolve_task(spec.task, EvalConfig(env=name), goals=True)
    if task is None:
        return None
    envs: list[_Tracked] = []

    def make() -> gym.Env:
        envs.append(_Tracked(task))
        return envs[-1]

    config = EvalConfig(episodes=PANELS, max_steps=STEPS)
    try:
        evaluator = Evaluator(dataclasses.replace(task, env_factory=make), config, lambda kind, message: None)
    except UserError:  # a package that is not installed: an evaluation would have said so
        return None
    with evaluator:
        first = envs[0]
        first.reset(seed=reset_seed(0, policy.seed, 0), options=dict(task.starts[0]) if task.starts else None)
        width = spec.goal_dim or spec.observation_dim
        if first.goal is None or len(first.goal) != width or first.shape != tuple(spec.observation_shape):
            return None
        walls = _walls(first, first.way[0])
        successes = evaluator([policy], [policy.seed]).successes
    panels = []
    for e, env in enumerate(envs):
        assert env.goal is not None
        reached = successes is not None and successes[0, e] >= 1.0
        title = f"goal {e + 1}: {'' if reached else 'not '}reached in {len(env.way) - 1:,} steps"
        panels.append(Panel(title, env.start, env.goal, env.way[0], np.stack(env.way)))
    return Scene(panels, walls, "the policy's way")


def _walls(env: Any, begin: np.ndarray) -> np.ndarray:
    """The boxes that stand in MuJoCo's world, [W, 4], in the observations' coordinates, in which the agent now is at
    `begin`.
    """
    base = env.unwrapped
    inner: tuple[Any, ...] = (base, getattr(base, "point_env", None), getattr(base, "ant_env", None))
    simulated: Any = next(
        (x for x in inner if hasattr(x, "model") and hasattr(x, "data") and hasattr(x.model, "geom_type")), None
    )
    if simulated is None:
        return np.zeros((0, 4))
    import mujoco

    model, data = simulated.model, simulated.data
    shift = data.xpos[model.jnt_bodyid[0]][:2] - begin  # some models' joints count from elsewhere
    boxes = np.flatnonzero((model.geom_type == int(mujoco.mjtGeom.mjGEOM_BOX)) & (model.geom_bodyid == 0))
    half = model.geom_size[boxes][:, :2]
    return np.concatenate([model.geom_pos[boxes][:, :2] - shift - half, 2.0 * half], axis=1)


def _scene_of_data(dataset: Dataset) -> Scene:
    """Without an environment: the episodes of the data, of some hundreds, whose ends lie farthest apart."""
    start, last = dataset.episode_start.cpu(), dataset.episode_end.cpu() - 1
    indices = torch.linspace(0, len(start) - 1, min(500, len(start))).long().unique()
    apart = np.linalg.norm(_positions(dataset, last[indices]) - _positions(dataset, start[indices]), axis=1)
    panels = []
    for number, e in enumerate(indices[torch.from_numpy(np.argsort(-apart, kind="stable")[:PANELS].copy())].tolist()):
        rows = torch.arange(int(start[e]), int(last[e]) + 1)
        way = _positions(dataset, rows)
        mean, std = _statistics(dataset.spec)
        first, goal = dataset.columns["observations"][rows[0]].float(), _goal_column(dataset)[rows[-1]].float()
        raw = [first.numpy() * std + mean, goal.numpy() if dataset.spec.goal_dim else goal.numpy() * std + mean]
        panels.append(Panel(f"goal {number + 1}: the end of episode {e}", raw[0], raw[1], way[0], way))
    return Scene(panels, np.zeros((0, 4)), "the episode's way")


@style.own_settings()
def _picture(out: Path, scene: Scene, positions: np.ndarray, title: str) -> None:
    from matplotlib.colors import Normalize

    points = np.concatenate(
        [positions, *(p.way for p in scene.panels if p.way is not None), *(p.goal[None, :2] for p in scene.panels)]
    )
    margin = 0.09 * np.ptp(points, 0)  # of walls around the maze a part is enough
    low, high = points.min(0) - margin, points.max(0) + margin
    width, height = high - low
    columns = min(3, len(scene.panels) + 1)
    lines = math.ceil((len(scene.panels) + 1) / columns)
    side = 3.3  # inches
    tall = side * float(np.clip(height / max(width, 1e-9), 0.4, 1.6)) + 0.3
    figure, grid = style.new_grid(title, lines, columns, lines * tall + 0.4, columns * side)
    all_axes = grid.ravel()
    known = [p.distances[np.isfinite(p.distances)] for p in scene.panels if p.distances is not None]
    all_known = np.concatenate(known) if known else np.zeros(0)
    norm = Normalize(*np.percentile(all_known, (1, 99))) if len(all_known) else None
    for axes, panel in zip(all_axes, scene.panels, strict=False):
        _draw_panel(axes, panel, scene, positions, norm, side / max(width, 1e-9))
        axes.set_xlim(low[0], high[0])
        axes.set_ylim(low[1], high[1])
    for axes in all_axes[len(scene.panels) :]:
        axes.axis("off")
    _legend(figure, all_axes[len(scene.panels)], scene, norm)
    style.save(figure, out)


def _draw_panel(axes: Any, panel: Panel, scene: Scene, positions: np.ndarray, norm: Any, scale: float) -> None:
    """scale: inches of one unit of length."""
    from matplotlib.collections import PatchCollection
    from matplotlib.patches import Rectangle

    boxes = [Rectangle((x, y), w, h) for x, y, w, h in scene.walls.tolist()]
    axes.add_collection(PatchCollection(boxes, facecolor=WALL, edgecolor="none", zorder=1))
    coloured = panel.distances is not None and norm is not None
    colours = {"c": panel.distances, "cmap": "viridis_r", "norm": norm} if coloured else {"c": "#c8ccd4"}
    axes.scatter(*positions.T, s=7, linewidths=0, zorder=2, **colours)
    if panel.way is not None:
        axes.plot(*panel.way.T, color="#ffffff", linewidth=3.0, alpha=0.75, zorder=3)
        axes.plot(*panel.way.T, color=WAY, linewidth=1.3, zorder=4)
    if len(panel.subgoals):
        chain = np.vstack([panel.begin, panel.subgoals])
        axes.plot(*chain.T, color=SUBGOAL, linewidth=1.0, linestyle=(0, (2, 2)), zorder=5)
        axes.scatter(*panel.subgoals.T, s=46, color=SUBGOAL, edgecolors="#ffffff", linewidths=0.8, zorder=6)
        for number, (x, y) in enumerate(panel.subgoals.tolist(), 1):
            bold: Any = {"fontsize": 5, "fontweight": "bold", "color": "#ffffff", "zorder": 7}
            axes.text(x, y - 0.008 / scale, str(number), ha="center", va="center", **bold)
    axes.scatter(*panel.begin, s=60, color=START, edgecolors="#000000", linewidths=1.6, zorder=8)
    axes.scatter(*panel.goal[:2], s=190, marker="*", color=GOAL, edgecolors="#ffffff", linewidths=0.9, zorder=9)
    style.plain_axes(axes, heading=panel.title, grid="")
    axes.spines["bottom"].set_visible(False)
    axes.set(aspect="equal", xticks=[], yticks=[])


def _legend(figure: Any, axes: Any, scene: Scene, norm: Any) -> None:
    """In the place that the panels leave: what the signs mean, and the colours' scale."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.lines import Line2D

    def sign(marker: str, size: float, face: str, edge: str, name: str) -> Any:
        return Line2D(
            [], [], linestyle="", marker=marker, markersize=size, markerfacecolor=face, markeredgecolor=edge, label=name
        )

    signs = [sign("o", 7, START, "#000000", "start"), sign("*", 13, GOAL, "#ffffff", "goal")]
    signs.append(Line2D([], [], color=WAY, linewidth=1.3, label=scene.way))
    if any(len(p.subgoals) for p in scene.panels):
        signs.append(sign("o", 7, SUBGOAL, "#ffffff", "subgoals, one after another:\nthe data's states that are meant"))
    written: Any = {"fontsize": 9.5, "labelcolor": style.INK, "frameon": False}
    axes.legend(handles=signs, loc="upper left", borderaxespad=0.0, labelspacing=0.9, **written)
    if norm is None:
        grey = "it learns no distances:\ngrey are states of the data"
        axes.text(0.0, 0.1, grey, fontsize=9.5, color=style.INK, transform=axes.transAxes)
        return
    bar = axes.inset_axes((0.03, 0.14, 0.8, 0.06))
    figure.colorbar(ScalarMappable(norm, "viridis_r"), cax=bar, orientation="horizontal").outline.set_visible(False)
    style.plain_axes(bar, heading="learnt distance to the goal", grid="")
    bar.spines["bottom"].set_visible(False)
