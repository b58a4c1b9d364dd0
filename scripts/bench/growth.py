"""The growth of offrl's training cost, on this machine's CPU with one thread: replicas, batch, width, size of the data;
and its memory.

python scripts/bench/growth.py                  # plots docs/benchmarks/growth-*.png and a table of IQL; about 15
minutes, 11 GB of disk python scripts/bench/growth.py --axis rows --points /tmp/points.json     # one axis; the others
as they were measured before python scripts/bench/growth.py --memory         # 64 replicas of IQL on 2,000,000
transitions, and 100,000 updates; about 3 minutes python scripts/bench/growth.py --quick --folder /tmp/growth     # few
points and short bursts, to try it

All points of an axis take turns: in each round each of them runs one burst. Numbers are medians over rounds.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(SCRIPTS), str(SCRIPTS.parent)]

import torch  # noqa: E402
from peers import common, flops  # noqa: E402
from peers.runner import Runner, make, on_disk, products_per_second, resident, synthetic  # noqa: E402

from offrl.data.dataset import Dataset  # noqa: E402
from offrl.system import backend  # noqa: E402

BASE = {"replicas": 1, "batch": 256, "width": 256, "rows": 1_000_000}
VALUES = {
    "replicas": [1, 2, 4, 8, 16, 32, 64],
    "batch": [64, 128, 256, 512, 1024, 2048, 4096],
    "width": [64, 128, 256, 512, 1024],
    "rows": [100_000, 1_000_000, 10_000_000],
}
MAPPED = [1_000_000, 10_000_000, 100_000_000]
QUICK = {"replicas": [1, 2], "batch": [64, 256], "width": [64, 256], "rows": [10_000, 50_000]}
QUICK_MAPPED = [10_000, 50_000]
AXES = {
    "replicas": "replicas (seeds at once)",
    "batch": "batch size",
    "width": "width of the two hidden layers",
    "rows": "transitions in the data",
}
COLOURS = {"eager": "tab:blue", "compiled": "tab:orange"}
SEEN_AT_FIRST, LONG_RUN = 1_000, 100_000


@dataclass(frozen=True)
class Point:
    """One measurement: which axis is varied, its value, how, and the time of an update (of all replicas)."""

    axis: str
    value: int
    mode: str  # of the step
    mapped: bool  # the data are memory-mapped files, else a table in memory
    seconds: float
    low: float  # the fastest and
    high: float  # the slowest round
    floor: float

    @property
    def label(self) -> str:
        return self.mode + (", memory map" if self.mapped else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=SCRIPTS.parent / "docs" / "benchmarks", help="where the plots go"
    )
    parser.add_argument("--out", type=Path, help="also write the text to this Markdown file")
    parser.add_argument("--axis", choices=list(AXES), action="append", help="may be repeated; default: all")
    parser.add_argument(
        "--points", type=Path, help="keep what is measured in this JSON file, and show what it holds of the other axes"
    )
    parser.add_argument(
        "--maps", type=Path, help="folder of the memory-mapped data, kept; default: one that is removed"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.3, help="length of a burst at least")
    parser.add_argument("--memory", action="store_true", help="measure memory instead")
    parser.add_argument("--quick", action="store_true", help="few points, short bursts, eager only")
    options = parser.parse_args()
    note = backend.configure(torch.device("cpu"), 1)
    head = f"{time.strftime('%Y-%m-%d')}, {note}, torch {torch.__version__}."
    if options.memory:
        lines = [
            head,
            "",
            *memory(
                *((4, 50_000, 3_000) if options.quick else (64, 2_000_000, LONG_RUN)),
                mode="eager" if options.quick else "compiled",
            ),
        ]
    else:
        options.folder.mkdir(parents=True, exist_ok=True)
        backend.cache_compiled()
        points = measured(options)
        for axis in AXES:
            if curve := [p for p in points if p.axis == axis]:
                plot(curve, axis, options.folder / f"growth-{axis}.png")
        lines = [head, "", *table(points)]
    text = "\n".join(lines) + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def measured(options: argparse.Namespace) -> list[Point]:
    """The points of the chosen axes, measured now, and of the others from the file of earlier ones."""
    chosen, points = options.axis or list(AXES), []
    if options.points and options.points.exists():
        points = [Point(**p) for p in json.loads(options.points.read_text()) if p["axis"] not in chosen]
    with contextlib.ExitStack() as stack:
        maps = options.maps or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offrl-growth-")))
        for axis in chosen:
            points += measure(axis, options, maps)
            gc.collect()  # networks that die while others are compiled would end the compilation
            if options.points:
                options.points.write_text(json.dumps([asdict(p) for p in points], indent=1))
    return sorted(points, key=lambda p: list(AXES).index(p.axis))


def measure(axis: str, options: argparse.Namespace, maps: Path) -> list[Point]:
    """All points of an axis, by turns."""
    burst, rounds = (0.1, 2) if options.quick else (options.seconds, options.rounds)
    values, mapped = (QUICK[axis], QUICK_MAPPED) if options.quick else (VALUES[axis], MAPPED)
    base = {**BASE, "rows": QUICK["rows"][0]} if options.quick else BASE
    places = [(value, False) for value in values] + [(value, True) for value in mapped if axis == "rows"]
    runners: dict[tuple[int, str, bool], Runner] = {}
    data: dict[tuple[int, bool], Dataset] = {}
    sources: dict[tuple[int, bool], Any] = {}
    for value, disk in places:
        sizes = {**base, axis: value}
        where = sizes["rows"], disk
        data = {k: v for k, v in data.items() if k == where or v.mapped}  # a runner keeps what its sampler packed
        if where not in data:
            data[where] = on_disk(where[0], maps) if disk else synthetic(where[0])
        for mode in ("eager",) if options.quick else COLOURS:
            print(f"{axis} {value:,}{', memory map' * disk}, {mode}: warms up", file=sys.stderr, flush=True)
            algorithm = make("iql", data[where], {"hidden": [sizes["width"]] * 2})
            runner = Runner(
                algorithm,
                data[where],
                seeds=range(sizes["replicas"]),
                mode=mode,
                batch_size=sizes["batch"],
                source=sources.get(where),
            )
            sources[where] = runner.source
            runner.run(4)
            runners[value, mode, disk] = runner
    times: dict[tuple[int, str, bool], list[float]] = {key: [] for key in runners}
    peaks = []
    for number in range(rounds):
        print(f"{axis}: round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        peaks.append(products_per_second())
        for key, runner in runners.items():
            times[key].append(1.0 / runner.rate(burst))
    peak = statistics.median(peaks)

    def point(value: int, mode: str, disk: bool, seconds: Sequence[float]) -> Point:
        sizes = {**base, axis: value}
        needed = (
            flops.needed("iql", sizes["batch"], common.OBSERVATION, common.ACTION, (sizes["width"],) * 2)
            * sizes["replicas"]
        )
        return Point(axis, value, mode, disk, statistics.median(seconds), min(seconds), max(seconds), needed / peak)

    points = [point(*key, seconds) for key, seconds in times.items()]
    for runner in runners.values():
        runner.close()
    return points


def plot(points: list[Point], axis: str, path: Path) -> None:
    """One plot with a line for each mode and place of the data, and the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, axes = plt.subplots(figsize=(5.5, 3.6))
    for label in dict.fromkeys(p.label for p in points):
        curve = sorted((p for p in points if p.label == label), key=lambda p: p.value)
        first = curve[0]
        style, marker = ("--", "s") if first.mapped else ("-", "o")
        seconds = [1e3 * p.seconds for p in curve]
        ranges = [[1e3 * (p.seconds - p.low) for p in curve], [1e3 * (p.high - p.seconds) for p in curve]]
        axes.errorbar(
            [p.value for p in curve],
            seconds,
            ranges,
            color=COLOURS[first.mode],
            linestyle=style,
            marker=marker,
            markersize=4,
            linewidth=1.4,
            capsize=2,
            label=f"offrl, {label}",
        )
    floor = sorted({p.value: 1e3 * p.floor for p in points}.items())
    axes.plot(
        *zip(*floor, strict=True), color="0.5", linestyle=(0, (1, 1)), label="matrix products at the measured rate"
    )
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
    handles, labels = axes.get_legend_handles_labels()
    # lines come before those with ranges
    axes.legend(handles[1:] + handles[:1], labels[1:] + labels[:1], frameon=False, fontsize=8)
    axes.set_title("IQL, one thread", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def table(points: list[Point]) -> list[str]:
    """Every point, and for each axis one sentence."""
    lines = ["| axis | value | mode | ms for one update (range) | of the floor |", "|---|---|---|---|---|"]
    for p in points:
        span = f"{1e3 * p.seconds:.2f} ({1e3 * p.low:.2f} to {1e3 * p.high:.2f})"
        lines.append(f"| {p.axis} | {p.value:,} | {p.label} | {span} | {p.floor / p.seconds:.2f} |")
    lines.append("")
    for axis in AXES:
        words = []
        for label in dict.fromkeys(p.label for p in points if p.axis == axis):
            curve = sorted((p for p in points if p.axis == axis and p.label == label), key=lambda p: p.value)
            first, last = curve[0], curve[-1]
            words.append(f"{last.seconds / first.seconds:.1f} times {label} ({first.value:,} to {last.value:,})")
        if words:
            lines.append(f"- {axis.capitalize()}: an update's time grows {'; '.join(words)}.")
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
        f"| state of {replicas} replicas of IQL (parameters, targets, Adam's moments), computed | "
        f"{state / gigabyte:.3f} |",
        f"| table of {rows:,} transitions, computed | {data / gigabyte:.3f} |",
        f"| both, as the process grew | {ready / gigabyte:.3f} |",
        f"| largest size of the whole process with 3 eager updates and the making of the data | {peak / gigabyte:.3f} |",  # noqa: E501
        "",
    ]
    del runner
    gc.collect()
    first, last = growth(updates, mode)
    lines.append(
        f"Updates {SEEN_AT_FIRST:,} to {updates:,} of a small IQL ({mode}): the process went from {first / 1e6:.1f} to "
        f"{last / 1e6:.1f} MB."
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
