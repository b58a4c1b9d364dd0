"""Training updates per second of offrl beside a plain PyTorch loop, d3rlpy and JAX, measured in turns on one core.

    python scripts/compare_speed.py --out FILE.md      # about 20 minutes; half of it is waiting for compilers
    python scripts/compare_speed.py --quick --only iql                     # shows that everything works; its numbers mean little
    python scripts/compare_speed.py --check                                # only compares the losses of the loops with offrl's

Each contestant is a program of its own (scripts/peers). In every round each of them runs one burst while the others wait, so that whatever
else happens on the machine meets all of them; numbers are medians over rounds, and a ratio is taken within a round. The first run
makes a virtual environment for d3rlpy and one for JAX, where a table has them, in --work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

from peers import common, flops  # noqa: E402 - only the script's own folder has it

PACKAGES = {"d3rlpy": [["torch==2.13.0"], ["d3rlpy==2.8.1"]], "jax": [["jax", "optax"]]}  # environment -> pip's calls, in order
TITLES = {
    "iql": "IQL: observations 11, actions 3, networks 2 x 256, batch 256",
    "td3_bc": "TD3+BC: observations 11, actions 3, networks 2 x 256, batch 256",
    "cql": "CQL: observations 11, actions 3, networks 3 x 256, batch 256, 30 tried actions for each state",
    "edac": "EDAC: observations 11, actions 3, networks 3 x 256, batch 256, 10 critics",
    "dt": "Decision Transformer: observations 11, actions 3, 3 blocks of width 128, 1 head, 20 steps, batch 64, dropout 0.1",
    "ensemble": "World model: 7 members of 4 x 200, batch 256 for each",
}
PLAIN, D3RLPY, JAX = "plain PyTorch loop", "d3rlpy", "JAX, lax.scan"
PEERS = {"iql": (D3RLPY, JAX), "td3_bc": (D3RLPY, JAX), "cql": (D3RLPY,), "dt": (D3RLPY,)}  # what else there is beside the plain loop


@dataclass
class Contestant:
    """A program to be started: `core` is the number of the core (among those allowed) that it is held on."""

    key: str
    module: str
    arguments: list[str] = field(default_factory=list)
    environment: str = "offrl"
    core: int = 0
    process: subprocess.Popen[str] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    failure: str = ""


@dataclass
class Row:
    """A line of the table: one contestant, or two that run side by side, and how many seeds they train together."""

    label: str
    keys: list[str]
    seeds: int = 1
    rates: list[float] = field(default_factory=list)  # seeds x updates/s, one for each round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=sorted(TITLES), action="append", help="one table; may be repeated (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a burst")
    parser.add_argument("--rows", type=int, default=1_000_000, help="transitions in the data")
    parser.add_argument("--out", type=Path, help="also write the tables to this Markdown file")
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "offrl" / "compare", help="where the environments are kept")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 0.3 s on 50,000 transitions")
    parser.add_argument("--check", action="store_true", help="only compare the losses of the loops with offrl's")
    parser.add_argument("--no-peers", action="store_true", help="leave out d3rlpy and JAX")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.rows = 2, 0.3, 50_000
    options.work.mkdir(parents=True, exist_ok=True)
    pythons = {"offrl": sys.executable}
    missing = {}
    names = options.only or list(TITLES)
    labels = set() if options.no_peers else {label for name in names for label in PEERS.get(name, ())}
    for name in (package for label, package in ((D3RLPY, "d3rlpy"), (JAX, "jax")) if label in labels):
        python, failure = environment(options.work / name, PACKAGES[name])
        if failure:
            missing[name] = failure
            say(f"{name} cannot be installed: {failure}")
        else:
            pythons[name] = python
    parts = ["# Training speed beside others", "", machine(), ""]
    for name in names:
        checked = check(name, pythons)
        if options.check:
            parts += [f"{name}: {checked}"]
            continue
        parts += table(name, options, pythons, missing) + ["", checked, ""]
    text = "\n".join(parts).rstrip() + "\n"
    print(text)
    if options.out:
        options.out.write_text(text)


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def environment(folder: Path, calls: list[list[str]]) -> tuple[str, str]:
    """The interpreter of a virtual environment with these packages, made if need be, and an empty text, or why there is none."""
    python, mark = folder / "bin" / "python", folder / "installed.json"
    if mark.exists() and json.loads(mark.read_text()) == calls:
        return str(python), ""
    say(f"making the environment {folder}: {' '.join(word for call in calls for word in call)}")
    commands = [[sys.executable, "-m", "venv", str(folder)], *([str(python), "-m", "pip", "install", "-q", *call] for call in calls)]
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            return "", last_line(done.stderr) or f"{' '.join(command)} failed"
    mark.write_text(json.dumps(calls))
    return str(python), ""


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def machine() -> str:
    """One line about the machine and when this was."""
    model = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        model = next((line.partition(":")[2].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")), model)
    return f"{time.strftime('%Y-%m-%d')}, {model}, {len(cores())} cores, Python {platform.python_version()}."


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


# ---- contestants


def contestants(name: str) -> tuple[list[Contestant], list[Row]]:
    """Programs and rows of a table."""
    square, own = Contestant("square", "gemm"), Contestant("own", "gemm", ["--products", name])
    plain = [Contestant("plain", f"{name}_plain"), Contestant("plain+", f"{name}_plain", ["--onednn"])]
    rows = [Row(PLAIN, ["plain"]), Row("the same with offrl's matrix back end", ["plain+"])]
    programs = [*plain]
    if name == "ensemble":
        for mode in ("eager", "compiled"):
            programs.append(Contestant(mode, "offrl_speed", ["--algo", name, "--mode", mode]))
            rows.append(Row(f"offrl, {mode}", [mode]))
        return [*programs, square, own], rows
    if D3RLPY in PEERS.get(name, ()):
        programs.append(Contestant("d3rlpy", "d3rlpy_speed", ["--algo", name], "d3rlpy"))
        rows.append(Row(D3RLPY, ["d3rlpy"]))
    if JAX in PEERS.get(name, ()):
        programs += [Contestant("jax", f"{name}_jax", [], "jax"), Contestant("jax4", f"{name}_jax", ["--replicas", "4"], "jax")]
        rows += [Row(JAX, ["jax"]), Row("JAX, lax.scan, vmap", ["jax4"], 4)]
    for mode in ("eager", "compiled"):
        one, four, other = f"{mode}1", f"{mode}4", f"{mode}4b"
        arguments = ["--algo", name, "--mode", mode]
        programs.append(Contestant(one, "offrl_speed", arguments))
        programs.append(Contestant(four, "offrl_speed", [*arguments, "--replicas", "4"]))
        rows += [Row(f"offrl, {mode}", [one]), Row(f"offrl, {mode}", [four], 4)]
        if len(cores()) > 1:
            programs.append(Contestant(other, "offrl_speed", [*arguments, "--replicas", "4", "--first-seed", "4"], core=1))
            rows.append(Row(f"offrl, {mode}, two processes on two cores", [four, other], 8))
    return [*programs, square, own], rows


def command(python: str, module: str, arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command that starts a program of scripts/peers, and its environment, with one thread for everything."""
    paths = [str(SCRIPTS), str(SCRIPTS.parent)]
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    jax = {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "JAX_PLATFORMS": "cpu"}
    surroundings = {**os.environ, **threads, **jax, "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    return [python, "-m", f"peers.{module}", *arguments], surroundings


def start(contestant: Contestant, python: str, rows: int) -> None:
    """Start a contestant on its core and wait until it is warm; notes why if it does not get there."""
    line, surroundings = command(python, contestant.module, [*contestant.arguments, "--rows", str(rows)])
    core = cores()[contestant.core]

    def hold() -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})

    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - read when the program has ended
    pipe = subprocess.PIPE
    contestant.process = subprocess.Popen(line, stdin=pipe, stdout=pipe, stderr=errors, text=True, env=surroundings, preexec_fn=hold)
    assert contestant.process.stdout is not None
    ready = contestant.process.stdout.readline()
    if ready:
        contestant.facts = json.loads(ready)
    else:
        contestant.process.wait()
        errors.seek(0)
        contestant.failure = last_line(errors.read()) or f"ended with status {contestant.process.returncode}"
        say(f"{contestant.key} failed: {contestant.failure}")


def burst(group: list[Contestant], seconds: float) -> list[float]:
    """Updates per second of contestants that run side by side."""
    for contestant in group:
        assert contestant.process is not None and contestant.process.stdin is not None
        contestant.process.stdin.write(f"burst {seconds}\n")
        contestant.process.stdin.flush()
    rates = []
    for contestant in group:
        assert contestant.process is not None and contestant.process.stdout is not None
        line = contestant.process.stdout.readline()
        if not line:
            raise SystemExit(f"{contestant.key} ended during a burst")
        rates.append(json.loads(line)["rate"])
    return rates


def stop(programs: list[Contestant]) -> None:
    for contestant in programs:
        if contestant.process is not None and contestant.process.stdin is not None:
            contestant.process.stdin.close()
            contestant.process.wait()


# ---- tables


def check(name: str, pythons: dict[str, str]) -> str:
    """Give the loops offrl's initial weights and batches, and say how far their losses are from offrl's. Raises SystemExit if far."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--check", str(Path(folder, "check.npz"))]
        losses = {"offrl": ask("offrl_speed", pythons["offrl"], ["--algo", name, *arguments])["losses"]}
        losses["plain loop"] = ask(f"{name}_plain", pythons["offrl"], arguments)["losses"]
        if "jax" in pythons and JAX in PEERS.get(name, ()):
            losses["JAX"] = ask(f"{name}_jax", pythons["jax"], arguments)["losses"]
    words = []
    for program, values in losses.items():
        if program != "offrl":
            worst = difference(losses["offrl"], values)
            if not worst < 1e-3:
                raise SystemExit(f"{name}: the {program}'s losses differ from offrl's by {worst:.1e}: they do not train the same")
            words.append(f"{program} {worst:.0e}")
    return (
        f"Same weights, same {common.CHECKED_UPDATES} batches: the losses' largest difference from offrl's, relative to 1 or to the loss "
        f"if that is larger: {', '.join(words)}."
    )


def difference(expected: list[dict[str, float]], actual: list[dict[str, float]]) -> float:
    """Largest difference of any loss, relative to it where it is above 1; NaN where one side has a loss that the other has not."""
    if [sorted(row) for row in expected] != [sorted(row) for row in actual]:
        return float("nan")
    return max(abs(a[k] - b[k]) / max(abs(a[k]), 1.0) for a, b in zip(expected, actual, strict=True) for k in a)


def ask(module: str, python: str, arguments: list[str]) -> dict[str, Any]:
    """Run a program of scripts/peers on the first core and return its one answer."""
    line, surroundings = command(python, module, arguments)
    done = subprocess.run(line, env=surroundings, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{module}: {last_line(done.stderr)}")
    return json.loads(last_line(done.stdout))


def table(name: str, options: argparse.Namespace, pythons: dict[str, str], missing: dict[str, str]) -> list[str]:
    """Measure one table and write it."""
    programs, rows = contestants(name)
    by_key = {c.key: c for c in programs}
    try:
        for contestant in programs:
            if contestant.environment not in pythons:
                contestant.failure = missing.get(contestant.environment, "left out")
                continue
            say(f"{name}: {contestant.key} warms up")
            start(contestant, pythons[contestant.environment], options.rows)
        running = [row for row in rows if not any(by_key[k].failure for k in row.keys)]
        floors = {key: Row(key, [key]) for key in ("square", "own")}
        for number in range(options.rounds):
            say(f"{name}: round {number + 1} of {options.rounds}")
            for row in [*running, *floors.values()]:
                rates = burst([by_key[k] for k in row.keys], options.seconds)
                row.rates.append(sum(rates) * row.seeds / len(row.keys))
    finally:
        stop(programs)
    hidden = flops.HIDDEN.get(name, common.HIDDEN)
    needed = flops.needed(name, flops.BATCHES.get(name, common.BATCH), common.OBSERVATION, common.ACTION, hidden)
    rate = 2 * 256**3 * statistics.median(floors["square"].rates)
    floor = rate / needed
    own = statistics.median(floors["own"].rates)
    about = (
        f"One update needs {needed / 1e6:.0f} MFLOP of matrix products. At {rate / 1e9:.0f} GFLOP/s (256 x 256 products, offrl's back end, "
        f"same rounds) that is a floor of {floor:.0f} updates/s; its products alone, in their own shapes, ran at {own:.0f}."
    )
    lines = [f"## {TITLES[name]}", "", table_head(name), "|" + "---|" * table_head(name).count(" |")]
    reference = {label: next(r for r in rows if r.label == label) for label in compared(name)}
    for row in rows:
        lines.append(line_of(row, [by_key[k] for k in row.keys], reference, floor))
    facts = [
        f"{label}: {by_key[key].facts['note']}"
        for label, key in ((D3RLPY, "d3rlpy"), ("JAX", "jax"))
        if key in by_key and by_key[key].facts
    ]
    ours = by_key["compiled" if name == "ensemble" else "compiled1"].facts.get("note", "")
    lines += ["", f"offrl: {ours}. {'. '.join(facts)}{'.' if facts else ''}", "", about]
    return lines + ["", *profiles(name, options.rows, pythons["offrl"])]


def compared(name: str) -> list[str]:
    """The rows that the others are divided by."""
    return [PLAIN, *PEERS.get(name, ())]


def table_head(name: str) -> str:
    ratios = " | ".join(f"of {label} (range)" for label in compared(name))
    return f"| | seeds | updates/s | seeds x updates/s | {ratios} | of the floor |"


def line_of(row: Row, parts: list[Contestant], reference: dict[str, Row], floor: float) -> str:
    """A row of the table; its ratios are of seeds x updates/s, within a round, with their smallest and largest."""
    failure = next((c.failure for c in parts if c.failure), "")
    if failure:
        return f"| {row.label} | {row.seeds} | {failure} |" + " |" * (len(reference) + 2)
    total = statistics.median(row.rates)
    cells = [row.label, str(row.seeds), f"{total / row.seeds:.1f}", f"{total:.0f}"]
    for other in reference.values():
        if other.rates:
            ratios = [a / b for a, b in zip(row.rates, other.rates, strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
        else:
            cells.append("-")
    cells.append(f"{total / floor / len(parts):.2f}")
    return f"| {' | '.join(cells)} |"


def profiles(name: str, rows: int, python: str) -> list[str]:
    """The breakdown of offrl's time, for each of its rows on one core."""
    kinds = [("eager", 1), ("compiled", 1)] if name == "ensemble" else [("eager", 1), ("compiled", 1), ("eager", 4), ("compiled", 4)]
    lines, head = [], []
    performed = 0.0
    for mode, seeds in kinds:
        say(f"{name}: profile of {mode}, {seeds} seeds")
        answer = ask("offrl_profile", python, ["--algo", name, "--mode", mode, "--replicas", str(seeds), "--rows", str(rows)])
        performed = answer["performed"]
        head = list(answer["shares"])
        lines.append(f"| {mode} | {seeds} | " + " | ".join(f"{100 * v:.0f}%" for v in answer["shares"].values()) + " |")
    return [
        f"Where offrl's time goes (torch's profiler, one core; an update does {performed / 1e6:.0f} MFLOP of products):",
        "",
        f"| | seeds | {' | '.join(head)} |",
        "|" + "---|" * (len(head) + 2),
        *lines,
    ]


if __name__ == "__main__":
    main()
