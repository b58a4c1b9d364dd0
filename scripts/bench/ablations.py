"""The key ideas of the model-free algorithms, each switched off: what it does to the score, and to what it is meant to
do.

    python scripts/bench/ablations.py rebrac-layernorm --data FOLDER --steps 50000 --seeds 4
    python scripts/bench/ablations.py all --data FOLDER             # every part, with each part's own number of updates
    python scripts/bench/ablations.py edac-diversity --dry          # prints what would be trained

FOLDER holds D4RL files (hopper_mixed.hdf5, ...); --files picks others than a part's own. Each variant is an ordinary
run directory under --runs, so the same command goes on where it was stopped, and with more --steps goes on from where
it ended; other settings (--set algo.batch_size=128, for all variants) are other runs. Every part prints a table and
writes it into --out (docs/benchmarks/ablations.md) between its own marks.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SPIKE = 10.0  # times the running median
WINDOW = 20  # lines of metrics that the running median is taken of

Lines = list[dict[str, Any]]  # of metrics.jsonl
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Trained:
    """A variant on one dataset, read back from its run directory. Lists are one entry for each seed."""

    variant: str
    file: str
    scores: list[float]  # of the last evaluation: normalised, or the return where there is no reference
    # Q at the first state and action of each episode minus the discounted return that followed
    overestimation: list[float]
    discounted: list[float]
    metrics: Lines

    @property
    def seeds(self) -> int:
        return max((len(v) for v in self.metrics[-1].values() if isinstance(v, list)), default=0) if self.metrics else 0

    def last(self, name: str, lines: int = 5) -> list[float]:
        """A metric over the last lines, averaged, for each seed; NaN where it was not finite."""
        rows = [line[name] for line in self.metrics[-lines:] if name in line]
        return [_mean([row[i] for row in rows]) for i in range(self.seeds)] if rows else []

    def series(self, name: str, seed: int) -> list[float]:
        """A metric of one seed over training; infinite where it was not finite."""
        return [
            math.inf if line[name][seed] is None else float(line[name][seed]) for line in self.metrics if name in line
        ]


Column = tuple[str, Callable[[Trained], "list[float] | str"]]


@dataclass(frozen=True)
class Part:
    """One ablation: its variants are trained on each file, with everything else the same."""

    title: str
    claim: str  # what the paper reports, to be read beside the table
    files: tuple[str, ...]
    steps: int
    variants: dict[str, Values]
    columns: tuple[Column, ...] = ()  # besides the score
    common: Values = field(default_factory=dict)
    notes: str = ""


def _mean(values: Sequence[float | None]) -> float:
    if any(v is None for v in values) or not values:
        return math.nan
    return math.fsum(float(v) for v in values if v is not None) / len(values)


def spikes(series: Sequence[float], factor: float = SPIKE, window: int = WINDOW) -> int:
    """The number of entries that exceed `factor` times the median of the `window` entries before them (at least 5), in
    absolute value.

    A line that is not finite counts. A median of almost nothing says nothing: it is taken to be at least a thousandth
    of the series' own."""
    from statistics import median

    size = [abs(v) for v in series]
    finite = [v for v in size if math.isfinite(v)]
    least = median(finite) * 1e-3 if finite else 0.0
    count = 0
    for i, v in enumerate(size):
        before = [x for x in size[max(0, i - window) : i] if math.isfinite(x)]
        if not math.isfinite(v) or (len(before) >= 5 and v > factor * max(median(before), least)):
            count += 1
    return count


def counted(name: str) -> Callable[[Trained], list[float] | str]:
    """Spikes of a metric, for each seed."""
    return lambda run: [float(spikes(run.series(name, i))) for i in range(run.seeds)] if _has(run, name) else "-"


def largest(name: str) -> Callable[[Trained], list[float] | str]:
    """The largest absolute value of a metric over training, for each seed."""
    return lambda run: (
        [max((abs(v) for v in run.series(name, i)), default=math.nan) for i in range(run.seeds)]
        if _has(run, name)
        else "-"
    )


def at_end(name: str) -> Callable[[Trained], list[float] | str]:
    """A metric's mean over the last lines, for each seed."""
    return lambda run: run.last(name) if _has(run, name) else "-"


def over_time(name: str, points: int = 4) -> Callable[[Trained], list[float] | str]:
    """A metric, averaged over seeds, after the first line and at equal distances up to the last."""

    def text(run: Trained) -> str:
        rows = [line for line in run.metrics if name in line]
        if not rows:
            return "-"
        at = [round(i * (len(rows) - 1) / (points - 1)) for i in range(points)]
        return ", ".join(f"{_mean(rows[i][name]):.2f}" for i in dict.fromkeys(at))

    return text


def _has(run: Trained, name: str) -> bool:
    return any(name in line for line in run.metrics)


DVL = {"algo.gumbel_clip": 7.0, "dataset.action_margin": 1e-5, "log_every": 20}
SPIKE_COLUMNS: tuple[Column, ...] = (
    ("spikes of V's loss", counted("value/loss")),
    ("of its largest row", counted("value/largest")),
    ("of its gradient", counted("value/gradient")),
    ("largest gradient of V", largest("value/gradient")),
    ("largest gap of Q and V", largest("value/gap")),
)
ESTIMATE: tuple[Column, ...] = (
    ("Q minus discounted return", lambda run: run.overestimation),
    ("discounted return", lambda run: run.discounted),
    ("Q of the data's actions", at_end("critic/q")),
)
PARTS: dict[str, Part] = {
    "rebrac-layernorm": Part(
        "ReBRAC with and without LayerNorm",
        "Without LayerNorm in the critics ReBRAC falls from 80.6 to 59.2 on D4RL's locomotion and to 0 on AntMaze "
        "(arXiv 2305.09836).",
        ("hopper_medium_replay", "hopper_mixed"),
        50_000,
        {"LayerNorm": {}, "without": {"algo.layer_norm": False}},
        (*ESTIMATE, ("spikes of the critics' loss", counted("critic/loss"))),
        {"algo": "rebrac", "algo.batch_size": 256, "algo.learning_rate": 3e-4},
        "Batch 256 and learning rate 3e-4 for both, for a CPU's sake; the paper's locomotion runs have 1024 and 1e-3.",
    ),
    "edac-diversity": Part(
        "EDAC with and without diversity of gradients",
        "The diversity term keeps the cosine of the critics' action gradients down, so that 10 to 50 critics do what "
        "SAC-N needs up to 500 for (arXiv 2110.01548).",
        ("hopper_medium_replay", "hopper_medium_expert"),
        50_000,
        {"eta 1": {"algo.eta": 1.0}, "eta 0": {"algo.eta": 0.0}, "eta 5": {"algo.eta": 5.0}},
        (
            ("cosine over training", over_time("critic/alignment")),
            ("cosine at the end", at_end("critic/alignment")),
            *ESTIMATE,
        ),
        {"algo": "edac", "algo.critics": 10, "algo.hidden": [256, 256]},
        "10 critics for all. The cosine is measured at the data's actions, on the batches; with eta 0 it is only "
        "measured.",
    ),
    "cql-weight": Part(
        "CQL with and without its penalty",
        "Without the penalty CQL is SAC on data: Q at the policy's actions exceeds what the policy earns (arXiv "
        "2006.04779).",
        ("hopper_mixed", "hopper_medium_replay"),
        30_000,
        {"weight 10": {"algo.conservative_weight": 10.0}, "weight 0": {"algo.conservative_weight": 0.0}},
        ESTIMATE,
        {"algo": "cql", "algo.hidden": [256, 256], "algo.penalty_share": 0.25},
        "Networks of 2 x 256; the penalty is estimated on a quarter of each batch. Q and return are of the first state "
        "and action of each scored episode, in the units of the recorded rewards (docs/runs.md).",
    ),
    "dvl-stability": Part(
        "f-DVL against XQL: stability",
        "XQL's loss of V is exponential in (Q - V) / temperature, so its gradients spike where that is large; the "
        "losses of f-DVL grow linearly or quadratically (arXiv 2302.08560).",
        ("hopper_medium_replay", "hopper_mixed"),
        20_000,
        {
            **{f"XQL, temperature {t:g}": {"algo": "xql", "algo.gumbel_temperature": t} for t in (0.5, 1.0, 2.0, 5.0)},
            **{
                f"XQL, temperature {t:g}, no clip": {
                    "algo": "xql",
                    "algo.gumbel_temperature": t,
                    "algo.gumbel_clip": 1e3,
                }
                for t in (0.5, 1.0)
            },
            **{
                f"XQL, temperature {t:g}, loss not rescaled": {
                    "algo": "xql",
                    "algo.gumbel_temperature": t,
                    "algo.gumbel_rescaled": False,
                }
                for t in (0.5, 1.0, 2.0)
            },
            "f-DVL, chi-square": {"algo": "f_dvl", "algo.divergence": "chi_square"},
            "f-DVL, total variation": {"algo": "f_dvl", "algo.divergence": "total_variation"},
        },
        SPIKE_COLUMNS,
        {**DVL, "algo.batch_size": 256, "algo.random_actions": 0},
        f"A spike is a line of metrics (20 updates, averaged) that exceeds {SPIKE:g} times the median of the {WINDOW} "
        "lines before it, or is not finite. Counts are for each seed. Both with the same batches, networks and "
        "LayerNorm in V; XQL's clip of 7 as published.",
    ),
    "hl-gauss": Part(
        "HL-Gauss against a scalar head on large critics",
        "Classification keeps large critics trainable where regression gets worse with size (arXiv 2403.03950).",
        ("hopper_medium_replay",),
        10_000,
        {"scalar": {"algo.value_head": "scalar"}, "HL-Gauss": {"algo.value_head": "hl_gauss"}},
        (*ESTIMATE, ("TD error", at_end("critic/td_error")), ("spikes of the critics' loss", counted("critic/loss"))),
        {"algo": "td3_bc", "algo.critic_hidden": [1024, 1024, 1024, 1024], "algo.batch_size": 128},
        "Critics of 4 x 1024, the actor as it is.",
    ),
    "weighting": Part(
        "Weighted sampling on data that are mostly bad",
        "Average over 73 datasets, uniform, advantage-weighted, top 10%: CQL 42.9, 62.8, 51.6; IQL 58.0, 65.9, 47.9; "
        "TD3+BC 41.0, 56.6, 39.8 (the repository of arXiv 2306.13085).",
        ("hopper_mixed",),
        50_000,
        {
            f"{label}, {words}": {"algo": algo, **more, **own}
            for algo, label, own in (
                ("iql", "IQL", {}),
                ("td3_bc", "TD3+BC", {}),
                ("cql", "CQL", {"algo.hidden": [256, 256], "algo.penalty_share": 0.25}),
            )
            for words, more in (
                ("uniform", {}),
                (
                    "AW",
                    {"dataset.weighting": "advantage", "dataset.weighting_temperature": 0.2 if algo == "cql" else 0.1},
                ),
                ("RW", {"dataset.weighting": "return", "dataset.weighting_temperature": 0.2 if algo == "cql" else 0.1}),
                ("top 10%", {"dataset.weighting": "top", "dataset.weighting_fraction": 0.1}),
            )
        },
        notes="Temperatures as published: 0.2 for CQL, 0.1 for the others. CQL with networks of 2 x 256, its penalty "
        "on a quarter of each batch.",
    ),
}


def plan(part: Part, options: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """(variant, file, settings of offrl.training.loop) of every run of a part, in order."""
    steps = options.steps or part.steps
    result = []
    for file in options.files or part.files:
        for variant, values in part.variants.items():
            path = Path(file) if Path(file).suffix else Path(options.data) / f"{file}.hdf5"
            settings = {
                "experiment": "none" if options.plain else "auto",
                "eval.every": max(1, math.ceil(steps / 5)),
                **part.common,
                **values,
                **options.set,
                "dataset": str(path),
                "seeds": options.seeds,
                "steps": steps,
                "runs_dir": str(Path(options.runs) / options.part_name),
                "label": "".join(c if c.isalnum() or c in "-_." else "-" for c in variant.lower()),
                "quiet": not options.verbose,
            }
            result.append((variant, path.stem, settings))
    return result


def trained(variant: str, file: str, settings: dict[str, Any]) -> Trained:
    """Train, or go on, or find it finished; and read the run back."""
    import offrl

    given = dict(settings)
    run = offrl.train(given.pop("algo"), given.pop("dataset"), settings=given)
    rows = run.final_scores
    lines = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]

    def column(name: str) -> list[float]:
        return [math.nan if row.get(name) is None else float(row[name]) for row in rows]

    values = [r["return_mean"] if r["score"] is None else r["score"] for r in rows]
    scores = [math.nan if v is None else float(v) for v in values]
    return Trained(variant, file, scores, column("q_overestimation"), column("discounted_mean"), lines)


def cell(values: list[float] | str) -> str:
    """Mean and 95% interval over seeds."""
    from offrl.statistics.intervals import mean_interval

    if isinstance(values, str):
        return values
    finite = [v for v in values if math.isfinite(v)]
    lost = len(values) - len(finite)
    more = f"; {lost} of {len(values)} not finite" if lost else ""
    if not finite:
        return f"-{more}"
    mean, low, high = mean_interval(finite)

    def short(x: float) -> str:
        return f"{x:.2f}" if abs(mean) < 10 else f"{x:.1f}" if abs(mean) < 1000 else f"{x:.2g}"

    interval = f" [{short(low)}, {short(high)}]" if len(finite) > 1 else ""
    return f"{short(mean)}{interval}{more}"


def report(name: str, part: Part, runs: list[Trained], command: str, settings: list[dict[str, Any]]) -> str:
    """A part of ablations.md."""
    from bench.scores_page import published_updates, share

    rows = [[run.file, run.variant, cell(run.scores), *(cell(value(run)) for _, value in part.columns)] for run in runs]
    seeds, steps = settings[0]["seeds"], settings[0]["steps"]
    shares = sorted({share(steps, published_updates(s["algo"])) for s in settings})
    length = f"{steps:,} updates (**{', '.join(shares)}** of the published)"
    heads = ["data", f"variant; {length}", "score", *(title for title, _ in part.columns)]
    many = (
        f"{seeds} seed{'s' if seeds != 1 else ''}" if isinstance(seeds, int) else f"seeds {', '.join(map(str, seeds))}"
    )
    return "\n".join(
        [
            f"## {part.title}",
            "",
            f"    {command}",
            "",
            f"{part.claim} {part.notes}".strip(),
            "",
            f"{many}, {steps:,} updates, last evaluation; mean over seeds with its 95% interval.",
            "",
            f"| {' | '.join(heads)} |",
            "|" + "---|" * len(heads),
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


HEAD = """# Ablations

Each table trains variants that differ in one setting, side by side, with `scripts/bench/ablations.py`. The scores are normalised with
D4RL's reference returns; the runs are short, so they show directions and not published scores.
"""  # noqa: E501


def insert(old: str, name: str, text: str) -> str:
    """The page with this part between its marks: in the place where it was, or at the end."""
    begin, end = f"<!-- part: {name} -->", f"<!-- end: {name} -->"
    block = f"{begin}\n{text}\n{end}"
    page = old or HEAD
    if begin in page and end in page:
        before, _, rest = page.partition(begin)
        return f"{before}{block}{rest.partition(end)[2]}"
    return f"{page.rstrip()}\n\n{block}\n"


def show(name: str, options: argparse.Namespace) -> None:
    """Train and write one part."""
    from offrl.runs.tables import print_table
    from offrl.system import files as checkpoint

    part, options.part_name = PARTS[name], name
    todo = plan(part, options)
    if options.dry:
        for variant, file, settings in todo:
            print(f"{name}: {variant} on {file}")
            print(
                "  offrl train "
                + " ".join(shlex.quote(f"{k}={_written(v)}") for k, v in settings.items() if k != "quiet")
            )
        return
    runs = []
    for i, (variant, file, settings) in enumerate(todo, 1):
        print(f"{name}: {variant} on {file} ({i} of {len(todo)})", file=sys.stderr, flush=True)
        runs.append(trained(variant, file, settings))
    text = report(name, part, runs, _command(name, options), [s for _, _, s in todo])
    rows = [[run.file, run.variant, cell(run.scores), *(cell(value(run)) for _, value in part.columns)] for run in runs]
    print_table(["data", "variant", "score", *(title for title, _ in part.columns)], rows, part.title)
    if options.out:
        out = Path(options.out)
        checkpoint.write_text(out, insert(out.read_text() if out.exists() else "", name, text))


def _written(value: Any) -> str:
    return (
        f"[{','.join(map(str, value))}]"
        if isinstance(value, list)
        else str(value).lower()
        if isinstance(value, bool)
        else str(value)
    )


def _command(name: str, options: argparse.Namespace) -> str:
    more = [f"--steps {options.steps}"] if options.steps else []
    more += [f"--files {' '.join(options.files)}"] if options.files else []
    more += [f"--set {' '.join(f'{k}={_written(v)}' for k, v in options.set.items())}"] if options.set else []
    return " ".join([f"python scripts/bench/ablations.py {name} --data FOLDER --seeds {options.seeds}", *more])


def main(arguments: Sequence[str] | None = None) -> int:
    from offrl.errors import Interrupted, UserError
    from offrl.settings.compose import parse

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=[*PARTS, "all"])
    parser.add_argument("--data", default=".", help="folder of the D4RL files")
    parser.add_argument(
        "--files", nargs="+", default=[], help="other data than the part's own: names in --data, or paths"
    )
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, help="updates of each seed (default: the part's own number)")
    parser.add_argument("--runs", default="runs/ablations", help="where run directories are made")
    parser.add_argument(
        "--out", default=str(ROOT / "docs" / "benchmarks" / "ablations.md"), help="the page; '' writes none"
    )
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help="settings of offrl train for all variants"
    )
    parser.add_argument(
        "--plain", action="store_true", help="leave out the dataset's published settings (experiment=none)"
    )
    parser.add_argument("--verbose", action="store_true", help="show each run's progress")
    parser.add_argument("--dry", action="store_true", help="print the commands and train nothing")
    options = parser.parse_args(arguments)
    try:
        options.set = parse(options.set)
        for name in PARTS if options.part == "all" else [options.part]:
            show(name, options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
