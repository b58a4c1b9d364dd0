"""Training updates per second of offrl beside plain PyTorch loops, other people's own classes, d3rlpy and JAX, in turns
on one core.

    # all tables: a quarter of an hour, most of it compilers
    python scripts/compare_speed.py --checkouts FOLDER --out FILE.md
    # one algorithm, with narrower ranges
    python scripts/compare_speed.py --only iql --rounds 10 --seconds 3
    # shows that everything works; its numbers mean little
    python scripts/compare_speed.py --quick --only iql
    # only compares the losses of the loops with offrl's
    python scripts/compare_speed.py --check

Each contestant is a program of its own (scripts/peers). In every round each of them runs one burst while the others
wait, so that whatever else happens on the machine meets all of them; numbers are medians over rounds, and a ratio is
taken within a round. The first run makes a virtual environment for d3rlpy and one for JAX, where a table has them, in
--work.

FOLDER holds checkouts of corl-team/CORL, nissymori/JAX-CORL, EmptyJackson/unifloral, seohongpark/ogbench,
seohongpark/fql and ColinQiyangLi/qc, as OWNER+NAME, OWNER/NAME or NAME. Their classes are imported from there when
their contestants run; without it, or without one of them, those rows are left out.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import queue
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))

from peers import checkouts, common, flops  # noqa: E402 - only the script's own folder has it
from peers.contest import Contestant, ask, burst, cores, environment, machine, say, span, start, stop  # noqa: E402

PACKAGES = {  # environment -> pip's calls, in order
    "d3rlpy": [["torch==2.13.0"], ["d3rlpy==2.8.1"]],
    "jax": [["jax", "optax", "flax", "distrax", "chex", "pydantic", "omegaconf", "ml_collections"]],
}
TITLES = {
    "iql": "IQL: observations 11, actions 3, networks 2 x 256, batch 256",
    "td3_bc": "TD3+BC: observations 11, actions 3, networks 2 x 256, batch 256",
    "rebrac": "ReBRAC: observations 11, actions 3, networks 3 x 256, LayerNorm in the critics, batch 1024",
    "cql": "CQL: observations 11, actions 3, networks 3 x 256, batch 256, 30 tried actions for each state",
    "edac": "EDAC: observations 11, actions 3, networks 3 x 256, batch 256, 10 critics",
    "dt": "Decision Transformer: observations 11, actions 3, 3 blocks of width 128, 1 head, 20 steps, batch 64, "
    "dropout 0.1",
    "qrl": "QRL: observations and goals 11, actions 3, networks 3 x 512, latent 512, batch 1024",
    "fql": "FQL: observations 11, actions 3, networks 4 x 512, batch 256, 10 steps of the flow",
    "qc": "Q-chunking, distilled: the same with chunks of 5 actions",
    "ensemble": "World model: 7 members of 4 x 200, batch 256 for each",
}
PLAIN, CORL, D3RLPY, JAX = "plain PyTorch loop", "CORL's classes", "d3rlpy", "JAX, lax.scan"
BEST = "the best JAX"  # the fastest row of JAX with one seed
OURS = "offrl, compiled"
OF_D3RLPY = ("iql", "td3_bc", "rebrac", "cql", "dt")
OF_JAX = ("iql", "td3_bc", "rebrac")  # those that scripts/peers has a loop of
OF_CORL = ("iql", "td3_bc", "cql", "edac", "dt")  # in PyTorch
CHECKOUTS = {  # table -> sources of scripts/peers/jax_checkouts.py
    "iql": ("jax_corl", "unifloral"),
    "td3_bc": ("jax_corl", "unifloral"),
    "rebrac": ("corl", "unifloral"),
    "cql": ("jax_corl",),
    "edac": ("unifloral",),
    "dt": ("jax_corl",),
    "qrl": ("ogbench",),
    "fql": ("fql",),
    "qc": ("qc",),
}
LABELS = {
    "corl": (f"{CORL}, JAX, lax.scan", "corl-team/CORL"),
    "jax_corl": ("JAX-CORL's, lax.scan", "nissymori/JAX-CORL"),
    "unifloral": ("unifloral's, lax.scan", "EmptyJackson/unifloral"),
    "ogbench": ("OGBench's own loop, JAX", "seohongpark/ogbench"),
    "fql": ("its authors' JAX, lax.scan", "seohongpark/fql"),
    "qc": ("its authors' JAX, lax.scan", "ColinQiyangLi/qc"),
}
SEVERAL = ("iql", "td3_bc")  # measured with several seeds as well


@dataclass
class Row:
    """A line of the table: one contestant, or two that run side by side, and how many seeds they train together."""

    label: str
    keys: list[str]
    seeds: int = 1
    # of `PLAIN`, `CORL`, `D3RLPY`, `JAX`, `OURS`: what others are divided by, or stand in the summary for
    roles: tuple[str, ...] = ()
    rates: list[float] = field(default_factory=list)  # seeds x updates/s, one for each round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only", choices=sorted(TITLES), action="append", help="one table; may be repeated (default: all)"
    )
    parser.add_argument("--checkouts", type=Path, help="folder of other people's repositories (see above)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5, help="length of a burst")
    parser.add_argument("--rows", type=int, default=1_000_000, help="transitions in the data")
    parser.add_argument("--out", type=Path, help="also write the tables to this Markdown file")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path.home() / ".cache" / "offrl" / "compare",
        help="where the environments are kept",
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of 0.3 s on 50,000 transitions")
    parser.add_argument("--check", action="store_true", help="only compare the losses of the loops with offrl's")
    parser.add_argument("--no-peers", action="store_true", help="leave out d3rlpy, JAX and checkouts")
    parser.add_argument("--no-profiles", action="store_true", help="leave out where offrl's time goes")
    options = parser.parse_args()
    if options.quick:
        options.rounds, options.seconds, options.rows = 2, 0.3, 50_000
    options.work.mkdir(parents=True, exist_ok=True)
    pythons = {"offrl": sys.executable}
    missing = {}
    names = options.only or list(TITLES)
    if options.no_peers:
        options.checkouts = None
    needed = {program.environment for name in names for program in contestants(name, options.checkouts)[0]} - {"offrl"}
    for name in sorted(set() if options.no_peers else needed):
        python, failure = environment(options.work / name, PACKAGES[name])
        if failure:
            missing[name] = failure
            say(f"{name} cannot be installed: {failure}")
        else:
            pythons[name] = python
    head, parts = ["# Training speed beside others", "", machine(), ""], list[str]()
    summary = [*SUMMARY_HEAD]
    for name in names:
        checked = check(name, pythons)
        if options.check:
            parts += [f"{name}: {checked}"]
            continue
        lines, line = table(name, options, pythons, missing)
        parts += [*lines, "", checked, ""]
        summary.append(line)
        write(options.out, [*head, *summary, "", *parts])  # what there is, in case the rest fails
    print(write(options.out, [*head, *([] if options.check else [*summary, ""]), *parts]))


def write(path: Path | None, lines: list[str]) -> str:
    text = "\n".join(lines).rstrip() + "\n"
    if path:
        path.write_text(text)
    return text


# ---- contestants


def contestants(name: str, folder: Path | None) -> tuple[list[Contestant], list[Row]]:
    """Programs and rows of a table. folder: of checkouts; None leaves their rows out."""
    programs: list[Contestant] = []
    rows: list[Row] = []

    def add(row: Row, *made: Contestant) -> None:
        programs.extend(made)
        rows.append(row)

    add(Row(PLAIN, ["plain"], roles=(PLAIN,)), Contestant("plain", f"{name}_plain"))
    add(
        Row("the same with offrl's back end and memory", ["plain+"]),
        Contestant("plain+", f"{name}_plain", ["--onednn"]),
    )
    if folder is not None and name in OF_CORL and checkouts.checkout_of(folder, "corl-team/CORL"):
        add(
            Row(CORL, ["corl"], roles=(CORL,)),
            Contestant("corl", "corl_torch", ["--algo", name, "--checkouts", str(folder)]),
        )
    if name in OF_D3RLPY:
        add(Row(D3RLPY, ["d3rlpy"], roles=(D3RLPY,)), Contestant("d3rlpy", "d3rlpy_speed", ["--algo", name], "d3rlpy"))
    if name in OF_JAX:
        add(Row(JAX, ["jax"], roles=(JAX,)), Contestant("jax", f"{name}_jax", [], "jax"))
    if name in OF_JAX and name in SEVERAL:
        add(Row(f"{JAX}, vmap", ["jax4"], 4), Contestant("jax4", f"{name}_jax", ["--replicas", "4"], "jax"))
    for source in CHECKOUTS.get(name, ()) if folder is not None else ():
        label, repository = LABELS[source]
        if checkouts.checkout_of(folder, repository):
            arguments = ["--algo", name, "--source", source, "--checkouts", str(folder)]
            roles = (CORL, JAX) if source == "corl" else (JAX,)
            add(Row(label, [source], roles=roles), Contestant(source, "jax_checkouts", arguments, "jax"))
    ours = ["--algo", name, "--mode"]
    add(Row("offrl, eager", ["eager"]), Contestant("eager", "offrl_speed", [*ours, "eager"]))
    add(Row(OURS, ["compiled"], roles=(OURS,)), Contestant("compiled", "offrl_speed", [*ours, "compiled"]))
    if name in SEVERAL:
        four = [*ours, "compiled", "--replicas", "4"]
        add(Row(OURS, ["compiled4"], 4), Contestant("compiled4", "offrl_speed", four))
        if len(cores()) > 1:
            other = Contestant("compiled4b", "offrl_speed", [*four, "--first-seed", "4"], core=1)
            add(Row(f"{OURS}, two processes on two cores", ["compiled4", "compiled4b"], 8), other)
    return [*programs, Contestant("square", "gemm"), Contestant("own", "gemm", ["--products", name])], rows


# ---- tables


def check(name: str, pythons: dict[str, str]) -> str:
    """Give the loops offrl's initial weights and batches, and say how far their losses are from offrl's. Raises
    SystemExit if far.
    """
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--check", str(Path(folder, "check.npz"))]
        losses = {"offrl": ask("offrl_speed", pythons["offrl"], ["--algo", name, *arguments])["losses"]}
        losses["plain loop"] = ask(f"{name}_plain", pythons["offrl"], arguments)["losses"]
        if "jax" in pythons and name in OF_JAX:
            losses["JAX"] = ask(f"{name}_jax", pythons["jax"], arguments)["losses"]
    words = []
    for program, values in losses.items():
        if program != "offrl":
            worst = difference(losses["offrl"], values)
            if not worst < 1e-3:
                raise SystemExit(
                    f"{name}: the {program}'s losses differ from offrl's by {worst:.1e}: they do not train the same"
                )
            words.append(f"{program} {worst:.0e}")
    return (
        f"Same weights, same {common.CHECKED_UPDATES} batches: the losses' largest difference from offrl's, relative "
        f"to 1 or to the loss if that is larger: {', '.join(words)}."
    )


def difference(expected: list[dict[str, float]], actual: list[dict[str, float]]) -> float:
    """Largest difference of any loss, relative to it where it is above 1; NaN where one side has a loss that the other
    has not.
    """
    if [sorted(row) for row in expected] != [sorted(row) for row in actual]:
        return float("nan")
    return max(abs(a[k] - b[k]) / max(abs(a[k]), 1.0) for a, b in zip(expected, actual, strict=True) for k in a)


def table(
    name: str, options: argparse.Namespace, pythons: dict[str, str], missing: dict[str, str]
) -> tuple[list[str], str]:
    """Measure one table and write it; its lines, and its line of the summary."""
    programs, rows = contestants(name, options.checkouts)
    by_key = {c.key: c for c in programs}
    try:
        for contestant in programs:
            if contestant.environment not in pythons:
                contestant.failure = missing.get(contestant.environment, "left out")
        warm_up(name, [c for c in programs if not c.failure], pythons, options.rows)
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
    floor = Row("the floor", [], rates=[2 * 256**3 * rate / needed for rate in floors["square"].rates])
    own = statistics.median(floors["own"].rates)
    about = (
        f"One update needs {needed / 1e6:.0f} MFLOP of matrix products. At "
        f"{statistics.median(floor.rates) * needed / 1e9:.0f} GFLOP/s (256 x 256 products, offrl's back end, same "
        f"rounds) that is a floor of {statistics.median(floor.rates):.1f} updates/s; its products alone, in their own "
        f"shapes, ran at {own:.1f}."
    )
    reference = {**references(rows), floor.label: floor}
    head = f"| | seeds | updates/s | seeds x updates/s | {' | '.join(f'of {label} (range)' for label in reference)} |"
    lines = [f"## {TITLES[name]}", "", head, "|" + "---|" * head.count(" |")]
    lines += [line_of(row, [by_key[k] for k in row.keys], reference) for row in rows]
    notes = {
        c.facts["note"]: c.environment for c in programs if c.facts and c.key in ("compiled", "d3rlpy", "jax", *LABELS)
    }
    lines += ["", "; ".join(f"{environment}: {note}" for note, environment in notes.items()) + ".", "", about]
    if not options.no_profiles:
        lines += ["", *profiles(name, options.rows, pythons["offrl"])]
    return lines, summary_line(name, rows, reference)


def warm_up(name: str, programs: list[Contestant], pythons: dict[str, str], rows: int) -> None:
    """Start the programs, as many at a time as there are cores: most of it is waiting for compilers."""
    free = queue.SimpleQueue[int]()
    for core in cores():
        free.put(core)

    def go(contestant: Contestant) -> None:
        core = free.get()
        say(f"{name}: {contestant.key} warms up")
        start(contestant, pythons[contestant.environment], rows, core)
        free.put(core)

    with concurrent.futures.ThreadPoolExecutor(len(cores())) as pool:
        list(pool.map(go, programs))


def references(rows: list[Row]) -> dict[str, Row]:
    """The rows that the others are divided by, by what they stand for."""
    measured = [row for row in rows if row.rates]
    chosen = {role: next((row for row in measured if role in row.roles), None) for role in (PLAIN, CORL, D3RLPY)}
    jax = [row for row in measured if JAX in row.roles]
    chosen[BEST] = max(jax, key=lambda row: statistics.median(row.rates)) if jax else None
    return {role: row for role, row in chosen.items() if row is not None}


SUMMARY_HEAD = (
    f"| {OURS}, one seed | updates/s | of the {PLAIN} | of {CORL} | of d3rlpy | of {BEST} | of the floor |",
    "|---|---|---|---|---|---|---|",
)


def summary_line(name: str, rows: list[Row], reference: dict[str, Row]) -> str:
    """A row of the summary: offrl compiled with one seed."""
    ours = next(row for row in rows if OURS in row.roles)
    if not ours.rates:
        return f"| {TITLES[name].partition(':')[0]} | failed |" + " |" * 5
    cells = [TITLES[name].partition(":")[0], f"{statistics.median(ours.rates):.1f}"]
    for role in (PLAIN, CORL, D3RLPY, BEST, "the floor"):
        cell = ratio(ours, reference[role]) if role in reference else "-"
        cells.append(f"{cell}, {reference[role].label}" if role == BEST and role in reference else cell)
    return f"| {' | '.join(cells)} |"


def ratio(row: Row, other: Row) -> str:
    """The median of the ratios of rates within a round, with their smallest and largest."""
    ratios = [a / b for a, b in zip(row.rates, other.rates, strict=True)]
    return span(ratios)


def line_of(row: Row, parts: list[Contestant], reference: dict[str, Row]) -> str:
    """A row of the table; its ratios are of seeds x updates/s, those of the floor for each of its processes."""
    failure = next((c.failure for c in parts if c.failure), "")
    if failure:
        return f"| {row.label} | {row.seeds} | {failure} |" + " |" * (len(reference) + 1)
    total = statistics.median(row.rates)
    single = Row(row.label, row.keys, rates=[rate / len(parts) for rate in row.rates])
    cells = [row.label, str(row.seeds), f"{total / row.seeds:.1f}", f"{total:.1f}"]
    cells += [ratio(single if label == "the floor" else row, other) for label, other in reference.items()]
    return f"| {' | '.join(cells)} |"


def profiles(name: str, rows: int, python: str) -> list[str]:
    """The breakdown of offrl's time, eager and compiled."""
    kinds = [("eager", 1), ("compiled", 1)]
    lines, head = [], []
    performed = 0.0
    for mode, seeds in kinds:
        say(f"{name}: profile of {mode}, {seeds} seeds")
        answer = ask(
            "offrl_profile", python, ["--algo", name, "--mode", mode, "--replicas", str(seeds), "--rows", str(rows)]
        )
        performed = answer["performed"]
        head = list(answer["shares"])
        lines.append(f"| {mode} | {seeds} | " + " | ".join(f"{100 * v:.0f}%" for v in answer["shares"].values()) + " |")
    return [
        f"Where offrl's time goes (torch's profiler, one core; an update does {performed / 1e6:.0f} MFLOP of products):",  # noqa: E501
        "",
        f"| | seeds | {' | '.join(head)} |",
        "|" + "---|" * (len(head) + 2),
        *lines,
    ]


if __name__ == "__main__":
    main()
