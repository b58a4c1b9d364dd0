"""What a dataset shows of the steps before: windows of observations and actions, and the delay of actions."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig
from offrl.statistics.intervals import mean_interval

LONGEST = 20  # steps of delay that are tried
BLOCKS = 20  # parts of the data in a row, whose errors are compared
ROWS = 50_000  # that are looked at
LEAST = 50  # rows of a part
SHARE = 0.01  # of the actions' variance that observations must leave unexplained


def with_history(dataset: Dataset, config: DatasetConfig) -> Dataset:
    """The data shown as windows (specification I.14). With `action_delay=d` the d actions that have not acted yet
    stand beside each observation: with them the process is Markov again (Katsikopoulos and Engelbrecht, 2003), and the
    action of a row stays the one that was chosen in it.

    Raises UserError for data without vectors, and settings that exclude each other.
    """
    spec = dataset.spec
    if len(spec.observation_shape) != 1 or spec.observation_shape == (0,):
        changed = config.changed(DatasetConfig.VIEW[1:])[0]
        raise UserError(f"dataset.{changed} is for vectors, and {spec.name} has none; of images take dataset.frames=n")
    if config.history_stride > 1 and config.history == 1:
        raise UserError("dataset.history_stride is the distance of several observations: say dataset.history=n, too")
    actions, note, text = config.history_actions, "", config.action_delay
    if text != "0":
        if actions:
            raise UserError(
                f"dataset.action_delay={text} sets history_actions to the delay; leave out dataset.history_actions"
            )
        if text == "auto":
            actions, note = find_delay(dataset)
        elif text.isdecimal() and int(text) <= 1000:
            actions = int(text)
        else:
            raise UserError(f"dataset.action_delay={text}: a number of steps from 0 to 1000 is due, or auto")
    spec = replace(spec, history=config.history, history_stride=config.history_stride, history_actions=actions)
    return dataset.changed(f"windows of {spec.history} observations and {actions} actions", note, spec=spec)


def find_delay(dataset: Dataset) -> tuple[int, str]:
    """(the number of steps after which actions act, the evidence in words), of data in order.

    For each delay d from 0 to LONGEST the change o[t+1] - o[t] is fitted linearly to o[t], o[t-1] and a[t-d], on every
    other of BLOCKS parts of the data and on the rest in turn; the delay is the d of the smallest error on the part that
    was left out. Raises UserError where that is not known: too few rows, actions that follow from observations or
    explain nothing, another delay that does as well (a 95% interval of the difference over the parts), and the longest.
    """
    name, cure = dataset.spec.name, "say dataset.action_delay=d yourself"
    changes, before, actions = _steps(dataset)
    if len(changes) < BLOCKS * LEAST:
        raise UserError(
            f"{name}: action_delay=auto needs {BLOCKS * LEAST:,} rows with {LONGEST} rows of their episode before "
            f"them, and there are {len(changes):,}: {cure}"
        )
    width = actions.shape[-1]
    now = _errors(before, actions[:, 0])
    if now.mean() < SHARE * width:
        raise UserError(
            f"{name}: its actions follow from its observations (all but {now.mean() / width:.1%} of their variance), "
            f"so that nothing tells when they act: {cure}"
        )
    without = _errors(before, changes)
    errors = [_errors(np.concatenate([before, actions[:, d]], 1), changes) for d in range(LONGEST + 1)]
    best = int(np.argmin([e.mean() for e in errors]))
    shares = [float(e.mean() / without.mean()) for e in errors]
    curve = ", ".join(f"{d}: {shares[d]:.1%}" for d in range(min(LONGEST, best + 3) + 1))
    evidence = f"what stays unexplained of changes, of what does without actions, by delay: {curve}"
    if not _better(errors[best], without):
        raise UserError(f"{name}: its actions explain nothing of how observations change ({evidence}): {cure}")
    if rivals := [d for d in range(LONGEST + 1) if d != best and not _better(errors[best], errors[d])]:
        raise UserError(f"{name}: delays of {best} and {rivals[0]} steps do equally well ({evidence}): {cure}")
    if best == LONGEST:
        raise UserError(f"{name}: actions act after {LONGEST} steps or more ({evidence}): {cure}")
    return best, f"action_delay=auto: actions act {best} steps later; {evidence}"


def _better(errors: np.ndarray, rival: np.ndarray) -> bool:
    return mean_interval(rival - errors)[1] > 0.0


def _steps(dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(changes [n, O], a constant and the last two observations [n, 1 + 2 O], actions of 0 to LONGEST steps before
    [n, LONGEST + 1, A]), float64, each column of deviation 1, in the order of the data."""
    steps, known = dataset.steps().cpu(), dataset.columns["successor_known"].cpu()
    rows = ((steps >= LONGEST) & known).nonzero().squeeze(-1)
    rows = rows[:ROWS]
    columns = dataset.columns
    current, after = (columns[n][rows].cpu().double().numpy() for n in ("observations", "next_observations"))
    previous = columns["observations"][rows - 1].cpu().double().numpy()
    actions = dataset.spec.encode(columns["actions"]).reshape(len(dataset), -1)
    lagged = np.stack([actions[rows - d].cpu().double().numpy() for d in range(LONGEST + 1)], 1)
    before = np.concatenate([_standard(current), _standard(current - previous)], 1)
    return _standard(after - current), np.concatenate([np.ones((len(rows), 1)), before], 1), _standard(lagged)


def _standard(x: np.ndarray) -> np.ndarray:
    std = x.std(0)
    return (x - x.mean(0)) / np.where(std > 0.0, std, 1.0)


def _errors(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The mean over rows of the squared error, summed over columns, of each part [BLOCKS]: y [n, Y] by x [n, X], fitted
    to every other part.
    """
    parts = [np.concatenate(p, 1) for p in zip(np.array_split(x, BLOCKS), np.array_split(y, BLOCKS), strict=True)]
    products = np.stack([p.T @ p / len(p) for p in parts])
    split, errors = x.shape[1], np.zeros(BLOCKS)
    for half in range(2):
        fitted = products[1 - half :: 2].mean(0)
        ridge = 1e-8 * np.eye(split)
        beta = np.linalg.solve(fitted[:split, :split] + ridge, fitted[:split, split:])
        residual = np.concatenate([-beta, np.eye(y.shape[1])])
        errors[half::2] = np.einsum("ik,bij,jk->b", residual, products[half::2], residual, optimize=True)
    return errors
