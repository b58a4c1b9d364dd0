"""The table of students under a folder of runs, from their student.json.

offrl distill runs/TEACHER into=tree          # and others
python scripts/bench/small_policies.py runs
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offrl.distilling import FILE
from offrl.runs.tables import interval_text

HEAD = ("student", "R<sup>2</sup> held out", "visited", "score", "size", "bytes", "us C", "us ONNX", "C differs")


def span(values: Sequence[float], form: str) -> str:
    """`0.94 to 0.96`, or one number where they are alike."""
    ends = [format(x, form) for x in (min(values), max(values))]
    return " to ".join(dict.fromkeys(ends))


def row(result: dict[str, Any], name: str) -> list[str]:
    """The cells of a student."""
    students = result["students"]
    noun = next(n for n in ("leaves", "terms", "weights") if n in students[0])

    def cells(part: str, key: str, form: str) -> str:
        return span([s[part][key] for s in students], form)

    return [
        name,
        cells("held_out", "r2", ".2f"),
        cells("visited", "r2", ".2f"),
        score(result["scores"]["student"]),
        f"{span([s[noun] for s in students], ',d')} {noun}",
        span([s["bytes"] for s in students], ",d"),
        cells("c", "microseconds", ".2f"),
        cells("onnx", "microseconds", ".0f"),
        f"{max(s['c']['largest_difference'] for s in students):.0e}",
    ]


def score(value: dict[str, Any]) -> str:
    return interval_text((value["mean"], value["low"], value["high"]))


def main(folder: str) -> None:
    teachers: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for path in sorted(Path(folder).glob(f"*/{FILE}")):
        result = json.loads(path.read_text())
        teachers.setdefault(result["teacher"], []).append((path.parent.name, result))
    for teacher, students in teachers.items():
        print(f"\nTeacher {Path(teacher).name}: {score(students[0][1]['scores']['teacher'])}\n")
        print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
        for name, result in students:
            print(f"| {' | '.join(row(result, name))} |")


if __name__ == "__main__":
    main(sys.argv[1])
