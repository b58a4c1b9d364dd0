"""`offrl report`: runs and benchmarks as one self-contained page, with its pictures and tables as files beside it."""

from __future__ import annotations

from dataclasses import dataclass

from offrl.settings.field import setting


@dataclass
class ReportConfig:
    """Settings of `offrl report`."""

    out: str = setting("report", "folder for index.html, the pictures and tables")
    title: str = setting("", "heading of the page", shown="made of what the runs are")
    baseline: str = setting(
        "",
        "algorithm that the others are compared with (probability of improvement); none: each with each",
        shown="none",
    )
    bootstrap: int = setting(2000, "resamples behind the intervals of aggregates", low=100, high=1_000_000)
    results: str = setting(
        "", "also write what was read as documents for other people: NAME.json, or NAME.jsonl for many", shown="none"
    )
    license: str = setting("", "of the runs' results in that file, such as CC-BY-4.0", shown="none")
    quiet: bool = setting(False, "print nothing")
