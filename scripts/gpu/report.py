"""The report of gpu_check.py as Markdown, at any time: what is not there yet says so."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from gpu.plan import BASE_ALGO, CHECKS, EARLY, FULL_RUN, MISSED, MODULES, MOVES, REPLICAS, TOLERANCE, UPDATES, describe

Job = dict[str, Any]
Answer = dict[str, Any]
Pairs = list[tuple[Job, Answer]]


def report(jobs: Sequence[Job], answers: Sequence[Answer | None], seconds: float, device: str) -> str:
    """The whole report as Markdown. An answer is None while a job has not been reached."""
    pairs = [(job, {"missed": MISSED} if answer is None else answer) for job, answer in zip(jobs, answers, strict=True)]

    def of(*names: str) -> Pairs:
        return [p for p in pairs if p[0]["job"] in names]

    about = next((a.get("text") or why(a) for _, a in of("machine")), "")
    lines = ["# Check on a GPU" if device != "cpu" else "# The check for GPUs, tried on a CPU", ""]
    lines += [f"{time.strftime('%Y-%m-%d')}, {about}. Took {seconds / 60:.1f} minutes.", "", *summary(pairs), ""]
    lines += equality_table(of("equality"))
    lines += speed_table([p for p in of("speed") if not p[0].get("options")], of("warm"))
    lines += options_table([p for p in of("speed") if p[0].get("options")], of("speed"))
    lines += timed_lines(of("timed"))
    lines += checks_table(of(*CHECKS))
    lines += failures(pairs)
    return "\n".join(lines).rstrip() + "\n"


def why(answer: Answer) -> str:
    """The reason why there is no result, in one line; empty where there is one."""
    return cell(next((answer[k] for k in ("missed", "skipped", "error") if k in answer), ""))


def cell(text: str) -> str:
    """One line that does not break a table."""
    return " ".join(str(text).split()).replace("|", "\\|")


def summary(pairs: Pairs) -> list[str]:
    """The number of jobs of each outcome, and the failed ones by name."""
    counts: Counter[str] = Counter()
    wrong = []
    for job, answer in pairs:
        kind = next((k for k in ("missed", "skipped", "error") if k in answer), "done")
        counts[kind] += 1
        result = verdict(answer) if "losses" in answer else answer.get("verdict", "")
        if result.split(" ")[0].isupper() or result.startswith("NOT "):
            wrong.append(f"{describe(job)} ({result})")
    words = (
        f"{counts['done']} jobs done, {counts['skipped']} skipped, {counts['error']} failed, {counts['missed']} not "
        "reached."
    )
    return [words, f"Wrong: {'; '.join(wrong)}." if wrong else "Nothing that was compared is wrong."]


def verdict(answer: Answer) -> str:
    """equal: within 1e-5; as rounding: within three times what a last-place change of the weights makes, or within 1e-4
    where a module's tensors are taken together; else where it differs."""
    if answer["cpu"] is not None and not answer["cpu"] <= MODULES:
        return f"DIFFERENT from the CPU at {answer['cpu where']}"
    if answer["parameters late"] <= TOLERANCE:
        return "equal"
    allowed = {when: max(3.0 * (answer[f"rounding {when}"] or 0.0), TOLERANCE) for when in ("early", "late")}
    if answer["modules"] <= MODULES or all(answer[f"parameters {when}"] <= most for when, most in allowed.items()):
        return "as rounding"
    return f"DIFFERENT at {answer['where']}"


def equality_table(pairs: Pairs) -> list[str]:
    """Every algorithm and mode against eager."""
    if not pairs:
        return []
    lines = [
        f"## The same numbers as the eager step, {UPDATES} updates of {REPLICAS} replicas",
        "",
        f"Largest difference of a parameter tensor, relative to its norm, after {EARLY} and {UPDATES} updates; beside "
        "it what eager runs",
        f"differ by when their first weights are moved by one unit in the last place (the largest of {MOVES}). "
        f"Modules: after {UPDATES}",
        f"updates, the tensors of a module taken together; CPU: the same for the eager step there, after {EARLY}. "
        "Losses: largest",
        f"difference of a mean over {EARLY} updates, relative to 1 or to the loss if that is larger. Sizes: real are "
        "the algorithm's",
        "defaults, small the conformance tests'.",
        "",
        f"| algorithm | size | mode | {EARLY} updates | one rounding | {UPDATES} updates | one rounding | modules | "
        "losses | CPU | verdict |",
        "|" + "---|" * 11,
    ]
    missed: dict[str, list[str]] = {}
    for job, answer in pairs:
        head = f"| {job['algo']} | {job['size']} | {job['mode']} |"
        if "missed" in answer:
            missed.setdefault(f"{job['mode']}, {why(answer)}", []).append(job["algo"])
        elif "losses" in answer:
            names = (
                "parameters early",
                "rounding early",
                "parameters late",
                "rounding late",
                "modules",
                "losses",
                "cpu",
            )
            cells = ["-" if answer[k] is None else f"{answer[k]:.1e}" for k in names]
            lines.append(f"{head} {' | '.join(cells)} | {verdict(answer)} |")
        else:
            lines.append(f"{head} | | | | | | | {why(answer)} |")
    for reason, algos in missed.items():
        lines += ["", f"{reason}: {', '.join(algos)}"]
    return [*lines, ""]


def speed_table(pairs: Pairs, warm: Pairs) -> list[str]:
    """Updates, memory and business by algorithm, mode and replicas."""
    if not pairs:
        return []
    compiling = {
        (j["algo"], j["replicas"], j["mode"]): a["warm"] for j, a in warm if "warm" in a and not j.get("options")
    }
    lines = [
        f"## Speed and memory: {pairs[0][0]['rows']:,} transitions on the device, default settings",
        "",
        "| algorithm | mode | replicas | updates/s | replicas x updates/s | 1M updates, minutes | peak memory, GB | "
        "state, MB | GPU busy | kernels | of the floor | compiling, s | to the first update, s |",
        "|" + "---|" * 13,
    ]
    for job, answer in pairs:
        head = f"| {job['algo']} | {job['mode']} | {job['replicas']} |"
        if "rate" not in answer:
            lines.append(f"{head} {why(answer)} |" + " |" * 9)
            continue
        rate, floor = answer["rate"], answer.get("floor")
        cells = [
            f"{rate:.0f}",
            f"{rate * job['replicas']:.0f}",
            f"{1e6 / rate / 60:.1f}",
            f"{answer['peak'] / 1e9:.2f}",
        ]
        cells += [f"{answer['state'] / 1e6:.0f}", percent(answer["busy"]), percent(answer.get("kernels"))]
        ahead = compiling.get((job["algo"], job["replicas"], job["mode"]))
        cells += [
            percent(rate / floor if floor else None),
            "-" if ahead is None else f"{ahead:.0f}",
            f"{answer['warm']:.0f}",
        ]
        lines.append(f"{head} {' | '.join(cells)} |")
    return [
        *lines,
        "",
        "GPU busy: nvidia-smi's share of the time in which a kernel ran. Kernels: their times added up, over the time. "
        "Floor: the longer",
        "of the matrix products at this GPU's float32 rate for that many replicas, and reading and writing the state "
        "once at its copy",
        "rate. Compiling: ahead, beside the comparisons (-: with the first update).",
        "1M updates: scaled from a few seconds. On a CPU peak memory is the process's.",
        "",
    ]


def options_table(pairs: Pairs, every: Pairs) -> list[str]:
    """The effect of the compiler's options."""
    if not pairs:
        return []
    plain = {
        (j["replicas"], j["mode"]): a["rate"]
        for j, a in every
        if j["algo"] == BASE_ALGO and "rate" in a and not j.get("options")
    }
    head = [
        "## Options of the compiler: IQL",
        "",
        "| option | replicas | updates/s | as it is | change |",
        "|---|---|---|---|---|",
    ]
    lines = []
    for job, answer in pairs:
        name = ", ".join(f"{k}={v}" for k, v in job["options"].items())
        before = plain.get((job["replicas"], job["mode"]))
        if "rate" not in answer:
            lines.append(f"| {name} | {job['replicas']} | {why(answer)} | | |")
            continue
        after = answer["rate"]
        change = "-" if before is None else f"{after / before - 1.0:+.0%}"
        lines.append(
            f"| {name} | {job['replicas']} | {after:.0f} | {'-' if before is None else f'{before:.0f}'} | {change} |"
        )
    return [*head, *lines, ""]


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f}%"


def timed_lines(pairs: Pairs) -> list[str]:
    """Long runs of IQL."""
    if not pairs:
        return []
    lines = [f"## {FULL_RUN:,} updates of IQL", ""]
    for job, answer in pairs:
        head = f"- {job['replicas']} seed{'s' if job['replicas'] > 1 else ''}: "
        if "updates" not in answer:
            lines.append(f"{head}not measured: {why(answer)}.")
            continue
        updates, seconds = answer["updates"], answer["seconds"]
        words = f"{updates:,} updates in {seconds:.0f} s, after {answer['warm']:.0f} s until the first ones were done"
        if not updates:
            lines.append(f"{head}not measured: its time was over before the first update.")
        elif updates >= FULL_RUN:
            lines.append(f"{head}measured: {words}.")
        else:
            minutes = seconds * FULL_RUN / updates / 60
            lines.append(
                f"{head}{words}. EXTRAPOLATED to {FULL_RUN:,} updates: {minutes:.1f} minutes (--full runs them all)."
            )
    return [*lines, ""]


def checks_table(pairs: Pairs) -> list[str]:
    """The further checks."""
    if not pairs:
        return []
    lines = ["## Checks", "", "| what | verdict | |", "|---|---|---|"]
    tables: list[str] = []
    for job, answer in pairs:
        lines.append(
            f"| {CHECKS[job['job']]}{particulars(job)} | {answer.get('verdict', '')} | "
            f"{cell(answer.get('text', '')) or why(answer)} |"
        )
        if rows := answer.get("table"):
            tables += [
                "",
                f"### {CHECKS[job['job']]}{particulars(job)}",
                "",
                f"| {' | '.join(rows[0])} |",
                "|" + "---|" * len(rows[0]),
            ]
            tables += [f"| {' | '.join(map(cell, row))} |" for row in rows[1:]]
    return [*lines, *tables, ""]


def particulars(job: Job) -> str:
    named = [str(job[k]) for k in ("algo", "kind", "mode", "replicas") if k in job]
    return f" ({', '.join(named)})" if named else ""


def failures(pairs: Pairs) -> list[str]:
    """Every failure in full."""
    lines = ["## Failures", ""]
    for job, answer in pairs:
        if "error" in answer:
            lines += [f"### {describe(job)}", "", "```text", answer.get("trace") or answer["error"], "```", ""]
    return lines if len(lines) > 2 else [*lines, "None."]
