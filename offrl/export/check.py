"""Comparison of an exported file's actions with the Python policy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offrl.actor import Carry
from offrl.evaluation import streams
from offrl.evaluation.evaluator import plain_products
from offrl.evaluation.past import window_moments
from offrl.evaluation.policy import TrainedPolicy
from offrl.export.draws import Draw, recording
from offrl.export.graph import PolicyGraph, answer, inputs_of, memory_of, parts_of, remembers
from offrl.tasks.entries import VECTOR

# (observations [B, *O] float32, goals, memory and noise) -> actions, or [actions, *memory after them]
Runner = Callable[[np.ndarray, Sequence[np.ndarray]], Any]
TOLERANCE = 1e-5  # of half the range of an action, that is in the units of [-1, 1]
BATCHES = (1_000, 1, 2)
FAR = (10.0, 100.0, 1e4, 1e6)  # standard deviations from the mean
FAR_ROWS = 64
ROUNDING = (
    5.0  # where float32 itself is less exact than TOLERANCE, this multiple of the Python policy's own error is allowed
)
NUDGES = 64
MEMORY_ROWS = 0.01  # share of rows whose memory may differ: where two classes are equally likely, rounding decides


@dataclass
class Check:
    """A comparison. Differences are in units of half an action's range; of discrete actions, the share of rows that
    differ.
    """

    runtime: str
    largest: float = 0.0  # difference on BATCHES, in which observations are as the data's
    far: float = 0.0  # the same on observations far out
    ties: int = 0  # rows of discrete actions that are undecided to within float32, and came out differently
    allowed: float = TOLERANCE  # for `largest`: more than TOLERANCE where float32 itself is less exact than that
    failure: str = ""
    recorded: int = 0  # observations of the data themselves among them

    @property
    def passed(self) -> bool:
        return not self.failure

    def to_json(self) -> dict[str, Any]:
        """For the description."""
        return {
            "runtime": self.runtime,
            "observations": BATCHES[0],
            "recorded_observations": self.recorded,
            "batches": list(BATCHES),
            "tolerance": self.allowed,
            "largest_difference": self.largest,
            "far_out": {"standard_deviations": list(FAR), "largest_difference": self.far},
            "ties": self.ties,
        }


def check(
    policy: TrainedPolicy,
    explore: bool,
    runner: Runner,
    draws: Sequence[Draw],
    runtime: str,
    shown: np.ndarray | None = None,
) -> Check:
    """Compare on 1,000 observations drawn around the data's mean, in batches of 1, 2 and 1,000 and far outside, and on
    those that are `shown`.

    TOLERANCE is allowed, or ROUNDING times what the Python policy itself differs from a float64 calculation where that
    is more: sums in another order differ as much in policies that are very steep, and far out.
    """
    exact = PolicyGraph(policy, explore, torch.float64)
    result, allowed = Check(runtime, recorded=0 if shown is None else len(shown)), 0.0
    rng = np.random.default_rng(0)
    groups = [(n, 1.0) for n in BATCHES] + [(FAR_ROWS, scale) for scale in FAR] + [(result.recorded, 0.0)]
    with torch.no_grad(), plain_products():
        for count, scale in groups[: len(groups) - (shown is None)]:
            observations = shown if shown is not None and not scale else _observations(policy, rng, count, scale)
            goals = [_goals(policy, rng, count, scale)] if policy.goal_conditioned else []
            before = _previous(policy, rng, count) if remembers(policy) else None
            memory = _memory(policy, rng, count, scale, explore)
            with recording() as recorded:
                expected, later = answer(
                    policy, observations.copy(), goals[0] if goals else None, explore, before, memory
                )
            noise = [part for g in goals for part in inputs_of(g)] + ([] if before is None else [before])
            noise += [x.numpy() for x in (*parts_of(memory), *(x for _, x in recorded))]
            try:
                outputs = runner(observations, noise)
                output, *parts = map(np.asarray, outputs if exact.parts else [outputs])
            except Exception as error:  # whatever the runtime raises
                text = (str(error).strip().splitlines() or [""])[0]
                result.failure = f"a batch of {count} fails in {runtime} ({type(error).__name__}: {text})"
                return result
            if output.shape != expected.shape or output.dtype != expected.dtype:
                result.failure = (
                    f"it gives {output.dtype} {output.shape} for a batch of {count}, the policy {expected.dtype} "
                    f"{expected.shape}"
                )
                return result
            wrong = _wrong_memory(parts_of(later), parts) if exact.parts else 0.0
            if scale == 1.0 and wrong > MEMORY_ROWS:
                result.failure = f"the memory after a batch of {count} differs in {wrong:.1%} of its rows in {runtime}"
                return result
            if exact.discrete:
                differ = np.flatnonzero(output != expected)
                real = [i for i in differ if not _tie(exact, observations, noise, draws, int(i), int(output[i]))]
                result.ties += len(differ) - len(real)
                difference, allowed = len(real) / count, 0.0
            else:
                half = _half_range(policy)
                difference = float((np.abs(output - expected) / half).max())
                if scale != 1.0 or count == BATCHES[0]:
                    true = exact(*map(torch.from_numpy, (*inputs_of(observations), *noise)))
                    true = (true[0] if exact.parts else true).numpy()
                    allowed = max(TOLERANCE, ROUNDING * float((np.abs(expected - true) / half).max()))
                if scale == 1.0:
                    result.allowed = allowed
            if scale <= 1.0:
                result.largest = max(result.largest, difference)
            else:
                result.far = max(result.far, difference)
            if not difference <= allowed:  # NaN fails as well
                where = (
                    f"observations {scale:g} standard deviations from the mean"
                    if scale > 1.0
                    else f"a batch of {count}"
                )
                subject = (
                    "of the actions differ"
                    if exact.discrete
                    else f"is the largest difference, where {allowed:.2g} is allowed,"
                )
                result.failure = f"{difference:.2g} {subject} from the Python policy on {where} in {runtime}"
                return result
    return result


def _half_range(policy: TrainedPolicy) -> np.ndarray:
    half = (policy.high.astype(np.float64) - policy.low) / 2.0
    return np.where(half > 0.0, half, 1.0)


def _observations(policy: TrainedPolicy, rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
    """[count, *O] float32: normal around the data's mean where the policy knows it, else around 0 at scales from 0.1 to
    3; images are random bytes.
    """
    spec = policy.spec
    if spec.streams:
        return _streams(policy, rng, count, scale, window=True)
    kind, moments = streams.kind_of(spec, window=True), window_moments(spec)
    x = scale * rng.normal(size=(count, kind.itemsize // 4))
    if moments is not None:
        x = moments[0] + x * moments[1]
    else:
        x *= 10.0 ** rng.uniform(-1.0, 0.5, (count, 1))
    return x.astype(np.float32).reshape(count, *kind.shape)


def _streams(policy: TrainedPolicy, rng: np.random.Generator, count: int, scale: float, window: bool) -> np.ndarray:
    """[count] with a field for each stream: random bytes, and numbers around 0."""
    rows = np.zeros(count, streams.kind_of(policy.spec, window))
    for name in rows.dtype.names or ():
        shape = rows[name].shape
        images = rows[name].dtype == np.uint8
        rows[name] = rng.integers(0, 256, shape) if images else scale * rng.normal(size=shape)
    return rows


def _goals(policy: TrainedPolicy, rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
    """[count, G] float32, or of several streams [count]: like observations, or, where they are not, normal at scales
    from 0.1 to 3.
    """
    width = policy.algorithm.spec.goal_dim
    if policy.spec.streams and not width:
        return _streams(policy, rng, count, scale, window=False)
    if not width:
        return _observations(policy, rng, count, scale).reshape(count, -1)
    return (scale * rng.normal(size=(count, width)) * 10.0 ** rng.uniform(-1.0, 0.5, (count, 1))).astype(np.float32)


def _previous(policy: TrainedPolicy, rng: np.random.Generator, count: int) -> np.ndarray:
    """[count, A] float32: actions of the environment's range, or NaN, where an episode begins."""
    actions = rng.uniform(policy.low, policy.high, (count, policy.spec.action_dim))
    return np.where(rng.random((count, 1)) < 0.1, np.nan, actions).astype(np.float32)


def _tie(
    exact: PolicyGraph,
    observations: np.ndarray,
    noise: Sequence[np.ndarray],
    draws: Sequence[Draw],
    i: int,
    action: int,
) -> bool:
    """True where `action` is chosen within float32's precision around observation i: two actions are equally good
    there.
    """
    rng = np.random.default_rng(0)
    nudged = np.repeat(observations[i : i + 1], NUDGES, 0)
    numbers = nudged[VECTOR] if VECTOR in (nudged.dtype.names or ()) else nudged
    if not numbers.dtype.names:
        numbers *= (1.0 + 1e-6 * rng.normal(size=numbers.shape)).astype(numbers.dtype)
    inputs = []  # the random numbers of row i, for a batch of NUDGES rows like it
    for x, draw in zip(noise, draws, strict=True):
        for axis in (axis for axis, n in enumerate(draw.shape) if n is None):
            x = np.repeat(np.take(x, [i], axis), NUDGES, axis)
        inputs.append(torch.from_numpy(x))
    actions = exact(*map(torch.from_numpy, inputs_of(nudged)), *inputs)
    return action in (actions[0] if exact.parts else actions).tolist()


def _memory(policy: TrainedPolicy, rng: np.random.Generator, count: int, scale: float, explore: bool) -> Carry:
    """The memory of so many episodes after two steps; None for a policy without one."""
    carry = None
    for _ in range(2 * bool(memory_of(policy))):
        _, carry = answer(policy, _observations(policy, rng, count, scale), None, explore, memory=carry)
    return carry


def _wrong_memory(expected: Sequence[Tensor], parts: Sequence[np.ndarray]) -> float:
    """The share of rows whose memory differs by more than 1e-4."""
    wrong = np.zeros(len(expected[0]), bool)
    for x, y in zip(expected, parts, strict=True):
        near = np.isclose(x.numpy(), y, rtol=1e-4, atol=1e-4)
        wrong |= ~near.reshape(len(wrong), -1).all(1)
    return float(wrong.mean())
