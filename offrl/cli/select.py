"""`offrl select`: rank checkpoints and policies by estimated value, on logged data alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError, say, warn
from offrl.ope.config import METHOD_NAMES, OPEConfig, short_fit
from offrl.runs.paths import no_run
from offrl.settings.evaluation import MOST_PROCESSES
from offrl.settings.field import describe, setting

if TYPE_CHECKING:
    from offrl.ope.selection import Selection

HEADERS = {"td": "td: -TD error^2", "q": "q: own Q"}  # of methods whose numbers are no fitted values


@dataclass
class SelectConfig(OPEConfig):
    """Settings of `offrl select`: what decides the estimates, and where things are."""

    method: str = setting(
        "fqe",
        "fqe: fitted Q; wis: importance sampling; dr: doubly robust; model: rollouts in a learned model; td, q: minus "
        "the squared TD error and the value of each candidate's own critic, as baselines; lstd, bvft: the best of "
        "several fitted Q for each candidate, by a tournament, at some six times the cost of fqe; all: the first four "
        "(model: with world_model=)",
        choices=(*METHOD_NAMES, "all"),
    )
    returns: str | None = setting(
        None, "CSV of true values (candidate,return[,discounted]): says how good the ranking is"
    )
    out: str | None = setting(
        None, "the table's file, or a folder for select.csv; null: the first run's directory, or here"
    )
    device: str = setting("auto", "auto, cpu, cuda or cuda:N")
    threads: int = setting(1, "torch threads on CPU", low=1, high=MOST_PROCESSES)
    quiet: bool = setting(False, "print the table only (also --quiet)")


USAGE = """\
usage: offrl select [RUN ...] [policy=AGENT ...] [name=value ...] [--quiet]

Ranks every checkpoint and final policy of runs (or of folders of runs), and other policies, by their estimated discounted
return on logged data; no environment is touched. Data: the runs' own, or dataset=NAME.

Settings and their defaults (lists are written a,b):

  dataset=null                             data to evaluate on, in place of the runs' own; also dataset.SETTING=value
  policy=AGENT                             a run, a policy file or file.py:name; may be given several times
{0}
"""  # noqa: E501


def usage(arguments: list[str]) -> str:
    return USAGE.format("\n".join(describe(SelectConfig())))


def run(arguments: list[str]) -> int:
    paths = [a for a in arguments if "=" not in a]
    policies = [a.partition("=")[2] for a in arguments if a.startswith("policy=")]
    from offrl.settings.compose import fill, parse

    values = parse([a for a in arguments if "=" in a and not a.startswith("policy=")])
    if not paths and not policies:
        raise UserError(
            "usage: offrl select RUN ... (run directories), or offrl select policy=AGENT ... dataset=NAME; --help "
            "shows more"
        )
    about_data = {k: values.pop(k) for k in list(values) if k.partition(".")[0] == "dataset"}
    config = fill(SelectConfig(), values, "select")
    for path in paths:
        if not Path(path).is_dir():
            raise no_run(Path(path))
    from offrl import ope
    from offrl.ope.candidates import find_runs
    from offrl.settings.compose import compose
    from offrl.system import backend
    from offrl.system.devices import pick_device

    dataset: Any = None
    if about_data:
        if "dataset" not in about_data:
            raise UserError(f"{next(iter(about_data))} needs the dataset itself: dataset=NAME")
        refuse_transforms(about_data)
        dataset = compose({**about_data, "algo": "bc", "experiment": "none"}).dataset
    runs = [run_path for path in paths for run_path in find_runs([path])]
    target = output(config.out, runs[0].dir if runs else Path())
    device = pick_device(config.device)
    arithmetic = backend.configure(device, config.threads)
    from offrl.system.progress import StageProgress

    show = StageProgress(config.quiet, arithmetic)
    settings = OPEConfig(**{f.name: getattr(config, f.name) for f in fields(OPEConfig)})
    try:
        result = ope.select(
            runs,
            dataset,
            policies=policies,
            method=config.method,
            returns=config.returns,
            settings=settings,
            device=str(device),
            stage=show.stage,
            tell=show.tell,
        )
    finally:
        show.stop()
    report(result)
    result.write(target)
    say(f"table: {target}")
    if warning := short_fit(settings, [config.method]):
        warn(warning)
    return 0


def refuse_transforms(data_settings: dict[str, Any]) -> None:
    """Raise UserError for settings that change what is valued: estimates are in recorded rewards."""
    from offrl.settings.dataset import DatasetConfig

    for name in data_settings:
        key = name.partition(".")[2]
        if key in DatasetConfig.TRANSFORMS and key not in DatasetConfig.CONTENT:
            raise UserError(
                f"{name}: offrl select takes the data as recorded, so that values are in the rewards' own units; leave "
                "it out"
            )


def output(out: str | None, default: Any) -> Any:
    """The file to write: `out` where it is a .csv, else select.csv in that folder."""
    path = Path(out) if out else default
    return path if path.suffix == ".csv" else path / "select.csv"


def report(result: Selection) -> None:
    """Print the ranking, and how good it is where true values were given."""
    import numpy as np

    from offrl.runs.tables import interval_text, print_table

    first = next(iter(result.estimates))
    has_truth = len(result.truth) > 0
    has_estimate = bool(np.isfinite(result.own_q).any())
    rows = []
    for rank, k in enumerate(result.order, 1):
        cells = [interval_text((e.value[k], e.low[k], e.high[k])) for e in result.estimates.values()]
        cells += [interval_text((result.own_q[k], np.nan, np.nan))] if has_estimate else []
        cells += [f"{result.distance[k]:.2f}"]
        cells += [interval_text((result.truth[k], np.nan, np.nan))] if has_truth else []
        rows.append([str(rank), result.names[k], *cells])
    headers = ["rank", "candidate", *(f"{HEADERS.get(m, m)} [95% interval]" for m in result.estimates)]
    headers += (
        ["own Q"] * has_estimate
        + ["from data"]
        + [f"true {'' if result.truth_kind == 'discounted' else 'undiscounted '}value"] * has_truth
    )
    print_table(
        headers,
        rows,
        f"{result.data}: return discounted by {result.discount:g} from the data's {result.episodes:,} starts",
    )
    say(f"the data's own episodes: {interval_text(result.behavior)}")
    for method, estimate in result.estimates.items():
        if "effective_episodes" in estimate.details:
            typical = float(np.median(estimate.details["effective_episodes"]))
            say(
                f"{method}: the weight of {result.episodes:,} episodes lies on {typical:.1f} of them (median over "
                "candidates)"
            )
        if "clipped" in estimate.details:
            cut, steps = (float(np.median(estimate.details[name])) for name in ("clipped", "steps"))
            say(f"{method}: rollouts of {steps:,.0f} steps, {cut:.1%} of which leave the data's range (medians over "
                f"candidates), in {estimate.details['world_model']}")  # fmt: skip
        if "chosen" in estimate.details:
            counts = Counter(fit for fit in estimate.details["chosen"] if fit).most_common()
            say(
                f"{method}: of {len(result.names)} candidates, fit "
                + ", ".join(f"'{fit}' was chosen for {n}" for fit, n in counts)
            )
    quality = result.quality()
    if quality:
        names = [n for n in next(iter(quality.values())) if any(np.isfinite(q[n]) for q in quality.values())]
        table = [[method, *(f"{q[n]:.2f}" for n in names)] for method, q in quality.items()]
        print_table(
            ["method", *names], table, f"against the true {'discounted ' * (result.truth_kind == 'discounted')}returns"
        )
    if first in ("td", "q"):
        say(
            f"ranked by {first}, which finds critics that exploded; it does not say which policy is good: rank with "
            "method=fqe."
        )
        return
    say(f"ranked by {first}. Policies far from the data are mostly overestimated: use the order, not the numbers.")
