"""`offrl report`: runs and benchmarks as one page."""

from __future__ import annotations

import sys
from pathlib import Path

from offrl.errors import UserError, say
from offrl.runs.paths import check_exists

HEAD = """\
usage: offrl report RUNS... [name=value ...]

Writes OUT/index.html, one self-contained page, with its pictures and tables beside it. RUNS: run directories, benchmark directories,
folders above them, results.csv files; and results of other people: .json, .jsonl, .csv (docs/results-exchange.md).

  offrl report runs/d4rl-gym baseline=bc
  offrl report runs/iql-a runs/iql-b out=compared       what differs between two runs
  offrl report runs/iql-a results=mine.json             also the run as a document for others, with the return of every episode
  offrl report mine.json theirs.jsonl runs              own runs beside what others sent
"""  # noqa: E501
LITERAL = ("title", "baseline", "out", "results", "license")  # taken as they stand, whatever characters they hold


def usage(arguments: list[str]) -> str:
    from offrl.report import ReportConfig
    from offrl.settings.field import describe

    return HEAD + "\n" + "\n".join(describe(ReportConfig()))


def run(arguments: list[str]) -> int:
    from offrl.report import ReportConfig
    from offrl.settings.compose import fill, parse

    paths = [a for a in arguments if "=" not in a or Path(a).exists()]
    settings = [a for a in arguments if a not in paths]
    literal = {a.partition("=")[0]: a.partition("=")[2] for a in settings if a.partition("=")[0] in LITERAL}
    values = parse([a for a in settings if a.partition("=")[0] not in LITERAL])
    config = fill(ReportConfig(), {**values, **literal}, "report")
    if not paths:
        raise UserError("which runs? offrl report RUNS..., such as offrl report runs; see offrl report --help")
    for path in paths:
        check_exists(Path(path))
    from offrl.report.build import report

    def tell(line: str) -> None:
        if not config.quiet:
            say(f"{line} ...", file=sys.stderr)

    page = report(paths, config, tell)
    if not config.quiet:
        size = page.stat().st_size
        say(
            f"{page} ({size / 1e6:.1f} MB)" if size >= 1e6 else f"{page} ({size / 1e3:.0f} kB)",
            *([config.results] * bool(config.results)),
        )
    return 0
