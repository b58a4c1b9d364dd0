"""The jobs of gpu_check.py, their order, and how long each may take. Imports no torch."""

from __future__ import annotations

import argparse
from typing import Any

Job = dict[str, Any]

TOLERANCE = 1e-5  # relative difference of a tensor
# of all tensors of a module together. Rounding moves them by 1e-5 in 20 updates of IQL, batches of another key by 5e-3
MODULES = 1e-4
MOVES = 3  # eager runs from weights moved by one rounding
EARLY, UPDATES = 10, 20  # updates compared; multiples of every algorithm's period
REPLICAS = 4  # compared
FULL_RUN = 1_000_000
BASE_ALGO = "iql"
MEASURED = ("iql", "td3_bc")  # their speed with 1, 8 and 64 seeds
FIRST = ("iql", "td3_bc", "dt", "hiql", "dynamics")  # one of each family: compared before all others, in real sizes
# the others by the kernels of an update, the fewest first (counted once; only the order depends on it); what is not
# named comes last
CHEAPEST = (
    "bc rvs gcbc mbrcsl rebrac td3_awr skills skill_iql awac sac_n task_model mopo morel gcivl pets edac xql f_dvl crl "
    "diffusion_bc recoil mobile gciql dpt cql cal_ql combo lamo qrl tt rambo gadt vadt qdt edt fb ota meta_dt modt "
    "breeze"
)
MISSED = "not reached in the time given (--minutes; --only JOB does it alone)"

# seconds that a job may take
LIMITS = {
    "machine": 90,
    "equality": 60,
    "warm": 120,
    "speed": 90,
    "draws": 60,
    "command": 240,
    "mapped": 150,
    "texts": 90,
    "memory": 120,
    "replica": 90,
    "precision": 120,
    "pair": 90,
    "kernels": 60,
    "sanitizer": 180,
    "timed": 1e9,
}
# several workers share the device for these: they mostly wait for the compiler, and no time is taken
SHARED = ("equality", "warm", "draws", "command", "mapped", "texts", "replica", "precision", "sanitizer")
CHECKS = {
    "command": "the real command",
    "draws": "random numbers and batches",
    "memory": "memory while it runs",
    "replica": "bytes of a replica",
    "precision": "precision",
    "mapped": "mapped data, fine-tuning",
    "texts": "language models",
    "pair": "two processes at once",
    "kernels": "kernels",
    "sanitizer": "compute-sanitizer",
}
OPTIONS = ({"deterministic": False}, {"combo_kernels": True}, {"assert_indirect_indexing": False})


def plan(options: argparse.Namespace) -> list[Job]:
    """The jobs, the most telling first. A job's "share" is the part of the time by which it must be over, so that later
    ones come to their turn; what is missed by that is done at the end, if there is time."""
    cpu, small = options.device == "cpu", options.small
    modes = options.modes or (["compiled"] if cpu else ["cudagraph", "compiled-cudagraph"])
    mode = modes[-1]
    algos = options.algos
    if algos is None:
        from offrl import registry

        algos = list(registry.names("algo"))
    first = [a for a in FIRST if a in algos]
    order = CHEAPEST.split()
    rest = sorted((a for a in algos if a not in FIRST), key=lambda a: order.index(a) if a in order else len(order))
    # compiling them all takes an hour of one core: a trial sees that they are made, run and compared, and compiles one
    trial = cpu and small and options.modes is None
    plain = "eager" if trial else mode
    if trial:
        first, rest = [BASE_ALGO], [*first[1:], *rest]
    rows, seconds = (5_000, 0.3) if small else (2_000_000, 4.0)
    crowds = [1, 2] if small else [1, 8, 64]

    def speed(algo: str, replicas: int, mode: str = mode, **more: Any) -> Job:
        return {
            "job": "speed",
            "algo": algo,
            "replicas": replicas,
            "mode": mode,
            "rows": rows,
            "seconds": seconds,
            **more,
        }

    speeds = [speed(a, n, mode if (a, n) == (BASE_ALGO, 1) else plain) for a in MEASURED for n in crowds]
    if not small:
        speeds += [speed(a, 8) for a in FIRST if a not in MEASURED]
        speeds += [speed(BASE_ALGO, 64, m) for m in ("eager", *modes[:-1]) if m != mode]
    tuned = [
        speed(BASE_ALGO, n, options=o)
        for o in OPTIONS[: 1 if small else None]
        for n in (crowds[:1] if small else (1, 64))
    ]

    def ahead(jobs: list[Job]) -> list[Job]:
        kept = ("algo", "replicas", "mode", "rows", "options")
        return [
            {"job": "warm", **{k: v for k, v in j.items() if k in kept}}
            for j in jobs
            if "compiled" in j["mode"] and not small
        ]

    def equal(algos: list[str], modes: list[str], size: str) -> list[Job]:
        return [{"job": "equality", "algo": a, "mode": m, "size": size} for m in modes for a in algos]

    where = {"mode": plain}
    little = ["compile=eager", "eval.max_steps=20", "algo.hidden=[32,32]"]
    checks: list[Job] = [
        {
            "job": "command",
            **(
                {"seeds": 2, "steps": 400, "settings": little}
                if small
                else {"seeds": 8, "steps": 6_000, "settings": []}
            ),
        },
        {"job": "draws", "mode": "eager"},
        {"job": "draws", "mode": "compiled"},
        *(
            {"job": "replica", "algo": a, "mode": plain if cpu else "cudagraph"}
            for a in ((BASE_ALGO,) if small else (*FIRST, "cql", "fb"))
        ),
        *({"job": "precision", "kind": k, **where, "updates": 40 if small else 400} for k in ("bf16", "tf32")),
        {"job": "mapped", "steps": 40 if small else 200},
        *({"job": "texts", "algo": a, "updates": 10} for a in ("lm_bc", "lamo")),
        *({"job": "sanitizer", "mode": m, "rows": 5_000} for m in ("eager", mode)),
    ]
    alone: list[Job] = [
        {
            "job": "memory",
            **where,
            "size": 1 if small else 4,
            "looks": [100, 400] if small else [1_000, 20_000],
            "rows": rows,
        },
        *(
            {"job": "kernels", "algo": BASE_ALGO, "replicas": n, **where, "rows": rows}
            for n in (crowds[:1] if small else (1, 64))
        ),
        {"job": "pair", "job_of_each": {**speed(BASE_ALGO, 1, plain), "seconds": 0.3 if small else 8.0}},
        *tuned,
    ]
    timed = [
        {
            "job": "timed",
            "algo": BASE_ALGO,
            "replicas": n,
            "mode": mode if n == 1 else plain,
            "rows": rows,
            "updates": 200 if small else FULL_RUN,
        }
        for n in (1, crowds[-1])
    ]
    stages: list[tuple[float, list[Job]]] = [
        (1.0, [{"job": "machine"}]),
        (0.4, [*equal(first, modes, "small" if small else "real"), *ahead(speeds)]),
        (0.5, speeds),
        (0.75, [*checks, *ahead(tuned), *(equal(rest, modes, "small") if not trial else [])]),
        (0.88, alone),
        (0.94, timed[:1]),
        (1.0, timed[1:]),
        (1.0, equal(rest, ["eager"], "small") if trial else []),
    ]
    jobs = [{**job, "share": share} for share, stage in stages for job in stage]
    return [job for job in jobs if not options.only or job["job"] in ("machine", *options.only)]


def limit(job: Job, comparison: float) -> float:
    """Seconds that a job may take; `comparison`: those of a comparison with the eager step."""
    return comparison if job["job"] == "equality" else LIMITS[job["job"]]


def describe(job: Job) -> str:
    """A job in a few words."""
    words = [str(v) for k, v in job.items() if k in ("job", "algo", "kind", "mode", "replicas", "size")]
    return " ".join([*words, *(f"{k}={v}" for k, v in job.get("options", {}).items())])
