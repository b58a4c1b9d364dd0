"""The process that makes, judges and loads cases, one a line of its standard input; a case may end it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

HEADROOM = 700  # MB of address space beyond what the libraries take


def main() -> None:
    """Lines in: {"layout", "seed", "number", "folder"} or {"replay": path}. Lines out: {"stage"}, and {"result"}."""
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    if tree := os.environ.get("FUZZ_TREE"):
        sys.path.insert(0, tree)
    from tests.fuzz import case

    def tell(stage: str) -> None:
        print(json.dumps({"stage": stage}), file=answers, flush=True)

    _warm_up(case)
    used = (
        int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        if Path("/proc/self/statm").exists()
        else 0
    )
    if used:
        resource.setrlimit(resource.RLIMIT_AS, (used + (HEADROOM << 20),) * 2)
    tell("ready")
    for line in sys.stdin:
        order = json.loads(line)
        try:
            result = _one(case, order, tell)
        except Exception as error:  # a fault of the fuzzer's own
            import traceback

            result = case.Result("fuzzer", message="".join(traceback.format_exception(error))[-1500:])
        print(json.dumps({"result": vars(result)}), file=answers, flush=True)


def _one(case: Any, order: dict[str, Any], tell: Any) -> Any:
    folder = Path(order["folder"])
    if order.get("make", True):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        tell("make")
        case.make(order["layout"], order["seed"], order["number"], folder)
    path, config = case.settings_of(folder) if (folder / case.DRAFT).exists() else (folder, {})
    result = case.run(path, config, tell)
    if (folder / case.DRAFT).exists():
        result.changes = json.loads((folder / case.DRAFT).read_text())["changes"]
    return result


def _warm_up(case: Any) -> None:
    """Load a file of each kind, so that what the libraries take at their first use is not counted to a case."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for k, layout in enumerate(("d4rl", "npz", "parquet", "minari", "arrow", "text")):
            place = Path(folder, str(k))
            place.mkdir()
            try:
                case.make(layout, 0, 0, place)
                case.run(*case.settings_of(place))
            except Exception:
                continue


if __name__ == "__main__":
    main()
