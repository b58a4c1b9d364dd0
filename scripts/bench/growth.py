"""The growth of offrl's training cost, on this machine's CPU with one thread: replicas, batch, width, size of the data; and its memory.

python scripts/bench/growth.py                  # plots docs/benchmarks/growth-*.png and a table of IQL; about 6 minutes
python scripts/bench/growth.py --memory         # 64 replicas of IQL on 2,000,000 transitions, and 100,000 updates; about 3 minutes
python scripts/bench/growth.py --quick --folder /tmp/growth     # few points and short bursts, to try it
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]

import torch  # noqa: E402
from peers import common, flops  # noqa: E402
from peers.runner import Runner, make, products_per_second, resident, synthetic  # noqa: E402

from offrl.system import backend  # noqa: E402

BASE = {"replicas": 1, "batch": 256, "width": 256, "rows": 1_000_000}
EAGER = {
    "replicas": [1, 2, 4, 8, 16],
    "batch": [64, 128, 256, 512, 1024, 2048],
    "width": [64, 128, 256, 512, 1024],
    "rows": [10_000, 50_000, 200_000, 1_000_000, 5_000_000],
}
COMPILED = {"replicas": [1, 4, 16], "batch": [64, 256, 2048], "width": [64, 256, 1024], "rows": [10_000, 1_000_000, 5_000_000]}
QUICK = {"replicas": [1, 2], "batch": [64, 256], "width": [64, 256], "rows": [10_000, 50_000]}
AXES = {
    "replicas": "replicas (seeds at once)",
    "batch": "batch size",
    "width": "width of the two hidden layers",
    "rows": "transitions in the data",
}
SEEN_AT_FIRST, LONG_RUN = 1_000, 100_000


@dataclass(frozen=True)
class Point:
    """One measurement: which axis is varied, its value, the mode of the step, and the time of an update (of all replicas)."""

    axis: str
    value: int
    mode: str
    seconds: float
    floor: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=SCRIPTS.parent / "docs" / "benchmarks", help="where the plots go")
    parser.add_argument("--out", type=Path, help="also write the text to this Markdown file")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--quick", action="store_true", help="few points, short bursts, eager only")
    options = parser.parse_args()
    note = backend.configure(torch.device("cpu"), 1)
    head = f"{time.strftime('%Y-%m-%d')}, {note}, torch {torch.__version__}."
    if options.memory:
        lines = [
            head,
            "",
            *memory(*((4, 50_000, 3_000) if options.quick else (64, 2_000_000, LONG_RUN)), mode="eager" if options.quick else "compiled"),
        ]
    else:
        options.folder.mkdir(parents=True, exist_ok=True)
        points = list(measure(options.quick))
        for axis in AXES:
            plot([p for p in points if p.axis == axis], axis, options.folder / f"growth-{axis}.png")
        lines = [head, "", *table(points)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def measure(quick: bool) -> Iterator[Point]:
    """All points; what two axes share is measured once."""
    peak, known = products_per_second(), {}
    for mode, axes in {"eager": QUICK if quick else EAGER, **({} if quick else {"compiled": COMPILED})}.items():
        for axis, values in axes.items():
            for value in values:
                sizes = {**BASE, "rows": 10_000 if quick else BASE["rows"], axis: value}
                key = (mode, *sizes.values())
                if key not in known:
                    print(f"{mode}: {axis} {value:,}", file=sys.stderr, flush=True)
                    known[key] = seconds_of(mode, 0.2 if quick else 0.7, **sizes)
                hidden = (sizes["width"],) * 2
                needed = flops.needed("iql", sizes["batch"], common.OBSERVATION, common.ACTION, hidden) * sizes["replicas"]
                yield Point(axis, value, mode, known[key], needed / peak)


def seconds_of(mode: str, burst: float, *, replicas: int, batch: int, width: int, rows: int) -> float:
    """Seconds of one update of IQL, for all replicas together: the median of three bursts."""
    dataset = synthetic(rows)
    algorithm = make("iql", dataset, {"hidden": [width, width]})
    runner = Runner(algorithm, dataset, seeds=range(replicas), mode=mode, batch_size=batch)
    del dataset
    runner.run(4)
    return 1.0 / statistics.median(runner.rate(burst) for _ in range(3))


def plot(points: list[Point], axis: str, path: Path) -> None:
    """One plot with a line for each mode and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, axes = plt.subplots(figsize=(5.5, 3.6))
    for mode, marker, colour in (("eager", "o", "tab:blue"), ("compiled", "s", "tab:orange")):
        curve = [p for p in points if p.mode == mode]
        if curve:
            axes.plot([p.value for p in curve], [1e3 * p.seconds for p in curve], marker=marker, color=colour, label=f"offrl, {mode}")
    floor = sorted({(p.value, 1e3 * p.floor) for p in points})
    axes.plot(*zip(*floor, strict=True), color="0.5", linestyle="--", label="matrix products at the measured rate")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks([v for v, _ in floor])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}"))
    axes.set_xlabel(AXES[axis])
    axes.set_ylabel("ms for one update" + (" of all replicas" if axis == "replicas" else ""))
    axes.set_ylim(bottom=0.5 * min(p.floor for p in points) * 1e3)
    axes.grid(True, color="0.92")
    axes.legend(frameon=False)
    axes.set_title("IQL, one thread", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def table(points: list[Point]) -> list[str]:
    """Every point, and for each axis one sentence."""
    lines = ["| axis | value | mode | ms for one update | of the floor |", "|---|---|---|---|---|"]
    for p in points:
        lines.append(f"| {p.axis} | {p.value:,} | {p.mode} | {1e3 * p.seconds:.2f} | {p.floor / p.seconds:.2f} |")
    lines.append("")
    for axis in AXES:
        mode = "compiled" if any(p.mode == "compiled" and p.axis == axis for p in points) else "eager"
        curve = sorted((p for p in points if p.axis == axis and p.mode == mode), key=lambda p: p.value)
        first, last = curve[0], curve[-1]
        factor, cost = last.value / first.value, last.seconds / first.seconds
        lines.append(
            f"- {axis.capitalize()}, {mode}: from {first.value:,} to {last.value:,} (x{factor:g}) an update takes {cost:.1f} times as long."
        )
    return lines


def memory(replicas: int, rows: int, updates: int, mode: str) -> list[str]:
    """Memory of many replicas on much data, and after many updates."""
    gigabyte = 1e9
    gc.collect()
    before = resident()
    dataset = synthetic(rows)
    runner = Runner(make("iql", dataset), dataset, seeds=range(replicas), mode="eager")
    del dataset
    gc.collect()
    ready = resident() - before
    state, data = runner.resident_bytes()
    runner.run(3)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    lines = [
        "| | GB |",
        "|---|---|",
        f"| state of {replicas} replicas of IQL (parameters, targets, Adam's moments), computed | {state / gigabyte:.3f} |",
        f"| table of {rows:,} transitions, computed | {data / gigabyte:.3f} |",
        f"| both, as the process grew | {ready / gigabyte:.3f} |",
        f"| largest size of the whole process with 3 eager updates and the making of the data | {peak / gigabyte:.3f} |",
        "",
    ]
    del runner
    gc.collect()
    first, last = growth(updates, mode)
    lines.append(
        f"Updates {SEEN_AT_FIRST:,} to {updates:,} of a small IQL ({mode}): the process went from {first / 1e6:.1f} to {last / 1e6:.1f} MB."
    )
    return lines


def growth(updates: int, mode: str, settings: dict[str, Any] | None = None) -> tuple[int, int]:
    """Resident bytes after the first `SEEN_AT_FIRST` updates of a small IQL and after `updates`."""
    dataset = synthetic(2_000)
    algorithm = make("iql", dataset, settings or {"hidden": [8, 8]})
    runner = Runner(algorithm, dataset, seeds=[0], mode=mode, batch_size=8)
    runner.updates(SEEN_AT_FIRST)
    first = resident()
    while runner.done < updates:
        runner.updates(500)
    return first, resident()


if __name__ == "__main__":
    main()
