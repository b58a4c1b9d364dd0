"""Train every algorithm for a few updates under two commits and compare what they leave, bit for bit.

    python scripts/same_numbers.py OLD [NEW]          # commits; NEW defaults to the working tree
    python scripts/same_numbers.py OLD --only iql,cql

A refactoring keeps the numbers when this prints "same" for each algorithm. Floating-point results depend on the
machine, so both sides run here, one after the other, and nothing is stored. Compared are the tensors of the last
checkpoint, `metrics.jsonl` and the numbers of `scores.csv`. Tensors and metrics are matched by content where names
differ: another name, or another order, is no difference. The exit status is 1 when a number differs.
"""

from __future__ import annotations

import argparse
import collections
import csv
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
# Settings that have another name in older commits: today's name -> the older one. The commands below are written in
# today's names.
RENAMED: dict[str, str] = {
    "max_weight": "largest_weight",
    "min_target": "smallest_target",
    "max_entropy_weight": "largest_entropy_weight",
    "min_difference": "smallest_difference",
    "max_difference": "largest_difference",
    "rollout_retain": "retain",
    "gradient_samples": "followed",
    "penalised_states": "pushed",
    "accepted_episodes": "wanted",
    "max_length": "longest",
    "plan_max_length": "plan_longest",
    "term_dropout": "dropped",
}

COMMON = (
    "steps=50 seeds=2 compile=eager workers=1 log_every=25 compare=[] --quiet eval.workers=0 eval.episodes=2 "
    "eval.max_steps=20 eval.every=25"
)
SMALL: dict[str, Any] = {  # for the algorithms that have the setting
    "hidden": "[16,16]",
    "batch_size": 16,
    # world models, and what learns in them
    "members": 3,
    "elites": 2,
    "epoch": 10,
    "rollouts": 16,
    "iteration_episodes": 16,
    "horizon": 2,
    "rollout_every": 10,
    "rollout_retain": 2,
    "backup_samples": 2,
    "world_model": "MODEL",
    "clone_epochs": 0,
    "plan_horizon": 3,
    "plan_population": 16,
    "plan_elites": 4,
    "plan_iterations": 2,
    "plan_particles": 2,
    "plan_proposals": 4,
    "encoder_hidden": "[16]",
    "range_margin": 10.0,
    # what is trained first
    "skill_length": 3,
    "skill_dim": 4,
    "skill_hidden": "[16,16]",
    "skill_steps": 10,
    "value_hidden": "[16,16]",
    "value_batch_size": 32,
    "values_steps": 20,
    "task_model_steps": 5,
    "prompt_warmup": 0,
    "recurrent_width": 16,
    "behaviour_steps": 10,
    "behaviour_hidden": "[16]",
    "accepted_episodes": 20,
    "policy_steps": 10,
    "values_updates": 10,
    # hierarchies, representations
    "latent": 16,
    "subgoal_steps": 3,
    "option_steps": 2,
    "representation": 4,
    "z_dim": 8,
    "inputs_hidden": "[32,16]",
    "backward_hidden": "[16,16]",
    "actor_hidden": "[16]",
    "inference_samples": 100,
    "acting_samples": 4,
    "feed_forward": 32,
    "embedding": 16,
    "denoising_steps": 4,
    "samples": 2,
    "regions": 4,
    # transformers
    "lm": "scratch",
    "width": 16,
    "layers": 2,
    "heads": 2,
    "context": 3,
    "bins": 9,
    "beam_width": 3,
    "warmup_steps": 0,
    "length": 40,
}
GOALS = "pointmaze-medium-navigate-v0.npz"
CASES: dict[str, str] = {  # what each trains on; further settings. `NAME/variant` is another case of the same algorithm
    "bc": "builtin",
    "bc/discrete": "discrete.hdf5",
    "td3_bc": "builtin",
    "td3_awr": "builtin",
    "rebrac": "builtin",
    "iql": "builtin experiment=iql/d4rl-gym algo.actor_schedule=cosine",
    "iql/discrete": "discrete.hdf5",
    "iql/c51": "builtin experiment=iql/d4rl-gym algo.value_head=c51",
    "iql/grid": "builtin experiment=iql/d4rl-gym grid.expectile=[0.6,0.9] grid.temperature=[1,3]",
    "xql": "builtin",
    "f_dvl": "builtin",
    "recoil": "expert.hdf5 dataset.fields.expert=expert eval.env=Hopper-v5",
    "awac": "builtin",
    "sac_n": "builtin",
    "dsac_t": "builtin",
    "brc": "builtin algo.critic_hidden=[16,16]",
    "crossq": "builtin algo.critic_hidden=[16,16]",
    "fast_td3": "builtin algo.batch_size=64 algo.critic_hidden=[16,16] algo.value_bins=11",
    "simbav2": "builtin algo.critic_hidden=[16,16]",
    "simba_bc": "builtin algo.critic_hidden=[16,16]",
    "edac": "builtin",
    "cql": "builtin",
    "cql/discrete": "discrete.hdf5",
    "cal_ql": "builtin",
    "wsrl": "builtin",
    "dt": "builtin",
    "dt/discrete": "discrete.hdf5",
    "edt": "builtin",
    "modt": "builtin",
    "qdt": "builtin",
    "vadt": "builtin",
    "gadt": GOALS,
    "lamo": "builtin algo.embedding=mlp",
    "rvs": "builtin",
    "tt": "builtin",
    "diffusion_bc": "builtin",
    "fql": "builtin",
    "flow_bc": "builtin",
    "flow_bc/chunks": "builtin algo.length=3",
    "chunk_bc": "builtin",
    "act": "builtin",
    "mbrcsl": "builtin",
    "dynamics": "builtin",
    "mopo": "builtin",
    "morel": "builtin",
    "combo": "builtin",
    "rambo": "builtin dataset.normalize_observations=false",
    "mobile": "builtin",
    "mbpo": "builtin",
    "pets": "builtin",
    "tdmpc2": "builtin",
    "rssm": "builtin algo.length=8",
    "director": "builtin algo.length=8 algo.horizon=2 algo.goal_steps=2",
    "mrq": "builtin",
    "dpt": "bandits algo.contexts=data",
    "task_model": "point-robot",
    "meta_dt": "point-robot",
    "gcbc": GOALS,
    "gcivl": GOALS,
    "gciql": GOALS,
    "qrl": GOALS,
    "crl": GOALS,
    "hiql": GOALS,
    "ota": GOALS,
    "skills": "builtin",
    "skill_iql": "builtin",
    "fb": "builtin",
    "breeze": "builtin",
    "mc_fb": "builtin",
    "vc_fb": "builtin",
    "fb/goals": GOALS + " algo.task=goal",
    "lm_bc": "text-maze-compact",
    "lm_mc": "text-maze-compact",
    "ilql": "text-maze-compact",
    "alol": "text-maze-compact",
    "archer": "text-maze-compact",
    "rlpd": "builtin",
}
KEPT = (
    "step",
    "seed",
    "episodes",
    "return_mean",
    "return_std",
    "length_mean",
    "success",
    "score",
    "discounted_mean",
    "q_overestimation",
)


def write_data(folder: Path) -> None:
    """The datasets that offrl does not bring: made of noise, the same each time."""
    import h5py

    rng = np.random.default_rng(0)
    with h5py.File(folder / "discrete.hdf5", "w") as file:
        file.attrs["env_id"] = "CartPole-v1"
        file["observations"] = rng.normal(size=(400, 4)).astype(np.float32)
        file["actions"] = rng.integers(0, 2, 400)
        file["rewards"] = rng.normal(size=400).astype(np.float32)
        file["terminals"], file["timeouts"] = np.arange(400) % 40 == 39, np.arange(400) % 100 == 89
    with h5py.File(folder / "expert.hdf5", "w") as file:
        file["observations"] = rng.normal(size=(400, 11)).astype(np.float32)
        file["actions"] = rng.uniform(-1, 1, (400, 3)).astype(np.float32)
        file["rewards"] = rng.normal(size=400).astype(np.float32)
        file["terminals"], file["timeouts"] = np.zeros(400, bool), np.arange(400) % 100 == 99
        file["expert"] = np.arange(400) < 100
    actions = rng.uniform(-1, 1, (300, 2)).astype(np.float32)
    places = (np.cumsum(0.2 * actions.reshape(3, 100, 2), 1) + 4.0).reshape(300, 2).astype(np.float32)
    np.savez(folder / GOALS, observations=places, actions=actions, terminals=np.arange(300) % 100 == 99)


def train_all(names: list[str], folder: Path) -> None:
    """Run in the environment of one side: trains each case under `runs/` and writes `results.json`."""
    import importlib
    import re

    os.chdir(folder)
    import offrl
    from offrl import registry

    checkout = Path(offrl.__file__).resolve().parent.parent
    entry = re.search(r'^offrl = "(.+):(.+)"$', (checkout / "pyproject.toml").read_text(), re.M)
    assert entry is not None
    module, function = entry.groups()
    main = getattr(importlib.import_module(module), function)
    kinds = registry.names("algo")
    results = {}
    for case in names:
        algo, dataset = case.split("/")[0], CASES[case]
        if algo not in kinds and not (checkout / f"configs/algo/{algo}.yaml").exists():
            results[case] = {"error": "no such algorithm"}
            continue
        kind = kinds.get(algo) or preset(checkout, algo, kinds)
        known = set(kind.Config.__dataclass_fields__)
        words = [
            "train",
            f"algo={algo}",
            f"name={case.replace('/', '-')}",
            *COMMON.split(),
            *f"dataset={dataset}".split(),
        ]
        if algo not in ("dynamics", "mopo", "morel", "combo", "rambo", "mobile", "pets"):
            known -= {"world_model"}
        if getattr(kind.Config, "representation", "") == "none":  # of this name hierarchies have a number
            known -= {"representation"}
        if "latents" in known or getattr(kind.Config, "representation", "") == "none":
            known -= {"latent"}
        if not kind.traits.text:
            known -= {"length"}  # of chunks, which older commits do not know
        for name, value in SMALL.items():
            name = name if name in known else RENAMED.get(name, name)
            if (
                name in known
                and f"algo.{name}=" not in dataset
                and not (algo == "dynamics" and name == "world_model")
                and value != "MODEL"
            ):
                words.append(f"algo.{name}={value}")
        if (
            algo in ("mopo", "morel", "combo", "rambo", "mobile", "pets", "mbrcsl")
            and "world_model" in kind.Config.__dataclass_fields__
        ):
            words.append("world_model=runs/dynamics")
        words = [translate(word, known) for word in words]
        try:
            status = main(words)
        except BaseException as error:
            results[case] = {"error": f"{type(error).__name__}: {error}"}
            continue
        results[case] = {"error": f"status {status}"} if status else read(folder / "runs" / case.replace("/", "-"))
        Path("results.json").write_text(json.dumps(results))


def preset(checkout: Path, name: str, kinds: dict[str, Any]) -> Any:
    """The class of an algorithm that is another one with other settings."""
    import yaml

    first = yaml.safe_load((checkout / f"configs/algo/{name}.yaml").read_text())["defaults"][0]
    return kinds[first.split("/")[-1].split("@")[0]]


def translate(word: str, known: set[str]) -> str:
    """A word of a command in the names of this side."""
    name, sign, value = word.partition("=")
    head, dot, last = name.rpartition(".")
    return (
        f"{head}{dot}{RENAMED[last]}{sign}{value}"
        if head in ("algo", "grid") and last not in known and last in RENAMED
        else word
    )


def read(run: Path) -> dict[str, Any]:
    """The results of a run, as text: hashes of tensors by name, metrics, scores."""
    from safetensors.numpy import load_file

    latest = sorted((run / "checkpoints").glob("step_*.safetensors"))[-1]
    tensors = {
        k: f"{v.dtype} {list(v.shape)} {hashlib.sha256(v.tobytes()).hexdigest()[:16]}"
        for k, v in load_file(latest).items()
    }
    metrics = {}
    for line in (run / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        metrics.update({f"{row['step']} {name}": json.dumps(value) for name, value in row.items()})
    scores = {}
    if (run / "scores.csv").exists():
        for number, row in enumerate(csv.DictReader((run / "scores.csv").open())):
            scores.update({f"{number} {name}": row[name] for name in KEPT if name in row})
    return {"tensors": tensors, "metrics": metrics, "scores": scores}


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Names whose values differ, after values that both sides have under some name are matched."""
    left = {k: v for k, v in old.items() if new.get(k) != v}
    right = {k: v for k, v in new.items() if old.get(k) != v}
    spare = collections.Counter(right.values())
    missing = []
    for name, value in left.items():
        if spare[value] > 0:
            spare[value] -= 1
        else:
            missing.append(name)
    extra = sum(spare.values()) - len(missing)
    return missing + ([f"({extra} more than before)"] if extra > 0 else [])


def side(commit: str | None, folder: Path, names: list[str]) -> dict[str, Any]:
    checkout = ROOT
    if commit is not None:
        checkout = folder / "checkout"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "-f", checkout, commit], cwd=ROOT, check=True, capture_output=True
        )
    write_data(folder)
    try:
        environment = {
            **os.environ,
            "PYTHONPATH": str(checkout),
            "OFFRL_CACHE": str(folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "OFFRL_PRODUCTS": "default",  # else each side takes the library that is faster while it runs
            "PYTHONSAFEPATH": "1",
        }
        command = [sys.executable, __file__, "--side", str(folder), "--only", ",".join(names)]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if not (folder / "results.json").exists():
            raise SystemExit(f"{commit or 'the working tree'}: {done.stderr[-3000:]}")
        (folder / "log.txt").write_text(done.stdout + done.stderr)
    finally:
        if commit is not None:
            subprocess.run(
                ["git", "worktree", "remove", "--force", checkout], cwd=ROOT, check=True, capture_output=True
            )
    return json.loads((folder / "results.json").read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=textwrap.dedent(__doc__ or ""), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", nargs="?", help="the commit to compare with")
    parser.add_argument("new", nargs="?", help="the commit to compare; the working tree when not given")
    parser.add_argument("--only", default=",".join(CASES), help="cases, with commas")
    parser.add_argument("--out", type=Path, help="keep the runs of both sides here")
    parser.add_argument(
        "--reuse", action="store_true", help="take the old side's results from --out, where they were made before"
    )
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    names = [name for name in args.only.split(",") if name]
    if args.side:
        train_all(names, args.side)
        return 0
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"no such case: {', '.join(unknown)}")
    if not args.old:
        parser.error("which commit is to be compared with?")
    if "dynamics" not in names and {"mopo", "morel", "combo", "rambo", "mobile", "pets"} & set(names):
        names = ["dynamics", *names]
    names.sort(key=lambda name: name != "dynamics")  # the others learn in its model
    out = args.out or Path(tempfile.mkdtemp(prefix="same-numbers-"))
    results = []
    for label, commit in (("old", args.old), ("new", args.new)):
        folder = out / label
        if label == "old" and args.reuse and (folder / "results.json").exists():
            results.append(json.loads((folder / "results.json").read_text()))
            continue
        folder.mkdir(parents=True)
        results.append(side(commit, folder, names))
    old, new = results
    failed = 0
    for name in names:
        a, b = old.get(name, {"error": "nothing"}), new.get(name, {"error": "nothing"})
        if "error" in a or "error" in b:
            print(f"{name:16} old: {a.get('error', 'ran')}; new: {b.get('error', 'ran')}")
            failed += 1
            continue
        gaps = {kind: differences(a[kind], b[kind]) for kind in ("tensors", "metrics", "scores")}
        counts = ", ".join(f"{len(b[kind])} {kind}" for kind in gaps)
        if any(gaps.values()):
            failed += 1
            print(
                f"{name:16} DIFFERS of {counts}: "
                + "; ".join(f"{k}: {len(v)} ({', '.join(v[:4])})" for k, v in gaps.items() if v)
            )
        else:
            print(f"{name:16} same: {counts}")
    print(f"{len(names) - failed} of {len(names)} cases are the same; runs in {out}")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
