"""What algorithms score: our own measurements (docs/benchmarks) and the published ones (envs/published.json), as
tables.

Used by scripts/algorithm_pages.py for the algorithms' pages and docs/choosing.md; computes nothing that the pages of
docs/benchmarks do not show.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "docs" / "benchmarks"
SUITES = {  # of published scores: title -> what a dataset's name begins with
    "D4RL locomotion": ("halfcheetah-medium", "hopper-medium", "walker2d-medium"),
    "D4RL AntMaze": (
        "antmaze-umaze",
        "antmaze-medium-play",
        "antmaze-medium-diverse",
        "antmaze-large-play",
        "antmaze-large-diverse",
    ),
    "D4RL Maze2d": ("maze2d-",),
    "D4RL Adroit": ("pen-", "door-", "hammer-", "relocate-"),
    "NeoRL-2": (
        "Pipeline",
        "Simglucose",
        "RocketRecovery",
        "RandomFrictionHopper",
        "DMSD",
        "Fusion",
        "SafetyHalfCheetah",
    ),
    "OGBench pointmaze": ("pointmaze-",),
    "OGBench antmaze": ("antmaze-medium-", "antmaze-large-", "antmaze-giant-"),
    "OGBench humanoidmaze": ("humanoidmaze-",),
}


def own_scores() -> dict[str, dict[str, dict[str, str]]]:
    """{page: {algorithm: {dataset: "mean [95% interval] (seeds)"}}}, as the first table of each page of docs/benchmarks
    has them.
    """
    pages: dict[str, dict[str, dict[str, str]]] = {}
    for path in sorted(BENCHMARKS.glob("*.md")):
        head = re.search(r"^\| \| updates: .*?\|(.+)\|\n\|[-|]+\n((?:\|.+\n)+)", path.read_text(), re.M)
        if head is None:
            continue
        datasets = [cell.strip() for cell in head[1].split("|")]
        pages[path.stem] = {}
        for line in head[2].splitlines():
            name, _, *cells = [cell.strip().replace("**", "") for cell in line.strip("|").split("|")]
            pages[path.stem][name] = {d: c for d, c in zip(datasets, cells, strict=True) if d != "mean" and c != "-"}
    return pages


def published() -> list[dict[str, Any]]:
    """The tables of envs/published.json."""
    tables: list[dict[str, Any]] = json.loads((ROOT / "envs" / "published.json").read_text())["tables"]
    return tables


def published_means(table: dict[str, Any], suite: str) -> dict[str, tuple[float, int]]:
    """{algorithm: (mean over a suite's datasets, how many)} in a published table, of algorithms that have them all, or
    all but one.
    """
    goals = table["unit"].startswith("success")
    names = [n for n in table["scores"] if n.startswith(SUITES[suite]) and goals == suite.startswith("OGBench")]
    by_algorithm: dict[str, list[float]] = defaultdict(list)
    for name in names:
        for algorithm, value in table["scores"][name].items():
            by_algorithm[algorithm].append(value[0])
    return {a: (statistics.fmean(v), len(v)) for a, v in by_algorithm.items() if len(v) >= max(1, len(names) - 1)}


def suite_table(suite: str, known: set[str]) -> list[str]:
    """A table of the published means of a suite, best first, a row a source. `known`: the algorithms that offrl has."""
    rows = ["| Source | Means over the suite's datasets, best first |", "|---|---|"]
    for table in published():
        means = published_means(table, suite)
        if len(means) > 1:
            order = sorted(means.items(), key=lambda item: -item[1][0])
            cells = [f"{'`' + name + '`' if name in known else name} {mean:.1f}" for name, (mean, _) in order]
            rows.append(f"| {table['label']}, {max(n for _, n in means.values())} datasets | {', '.join(cells)} |")
    return rows


def parity_rows(name: str) -> list[tuple[str, str, str]]:
    """(variant and reference, largest difference of losses, of parameters) of an algorithm in
    docs/benchmarks/parity.md.
    """
    rows = []
    for line in (BENCHMARKS / "parity.md").read_text().splitlines():
        cells = line.split(" | ")
        if re.match(rf"\| {name}(,| \|)", line) and "github.com" in line:
            rows.append((f"{cells[1]} (`{cells[0][2:]}`)", cells[2], cells[3]))
    return rows


def section(name: str, labels: list[str]) -> list[str]:
    """The lines of "Measured" of an algorithm's page; `labels`: its name and those of its presets."""
    lines: list[str] = []
    for page, table in own_scores().items():
        where = f"[{page}](../benchmarks/{page}.md), fewer updates and smaller networks than published"
        for label in labels:
            if label in table:
                cells = "; ".join(f"{dataset} {score}" for dataset, score in table[label].items())
                lines.append(f"- Here, `{label}` ({where}): {cells}.")
    here = bool(lines)
    for source in published():
        for label in labels:
            means = {suite: published_means(source, suite).get(label) for suite in SUITES}
            cells = "; ".join(
                f"{suite} {value[0]:.1f} ({value[1]} datasets)" for suite, value in means.items() if value
            )
            if cells:
                lines.append(f"- Published, `{label}` ({source['label']}; {source['protocol']}): {cells}.")
    for reference, losses, parameters in parity_rows(name):
        differences = f"losses differ by at most {losses}, parameters by {parameters}"
        lines.append(f"- Five updates beside {reference}: {differences} ([parity](../benchmarks/parity.md)).")
    if not lines:
        return []
    note = (
        "Scores from here are means over seeds [95% interval] (seeds), of other files than the published ones: no "
        "common table."
    )
    return ["", "## Measured", "", *lines, *(["", note] if here else [])]
