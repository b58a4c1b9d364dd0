"""Training from more frames than memory is to hold: IQL with `encoder=drq` from a file of frames that is mapped, beside
the same from a smaller file in memory.

python scripts/bench/frames.py --out FOLDER --large 10 --small 1 --updates 100

FOLDER gets frames-*.hdf5 (uint8 [R, 64, 64, 3], episodes of 200 rows) and the cache, which are deleted at the end.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import psutil

SHAPE, LENGTH, ACTIONS = (64, 64, 3), 200, 6


def write(path: Path, rows: int) -> None:
    """Frames of noise, which no layout packs."""
    draw = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        frames = file.create_dataset("observations", (rows, *SHAPE), np.uint8)
        for start in range(0, rows, LENGTH):
            frames[start : start + LENGTH] = draw.integers(0, 256, (LENGTH, *SHAPE), np.uint8)
        file["actions"] = draw.uniform(-1.0, 1.0, (rows, ACTIONS)).astype(np.float32)
        file["rewards"] = draw.normal(size=rows).astype(np.float32)
        file["timeouts"] = np.arange(rows) % LENGTH == LENGTH - 1
        file["terminals"] = np.zeros(rows, bool)


def opened(path: Path, memory: str) -> float:
    """Seconds to open the file, into memory or mapped files, which the cache keeps."""
    from offrl.data import DatasetConfig, load_dataset

    start = time.monotonic()
    load_dataset(DatasetConfig(name=str(path), memory=memory, cache_dir=str(path.parent / "cache")))
    return time.monotonic() - start


def train(path: Path, memory: str, updates: int) -> tuple[float, float]:
    """(updates a second in the second half, largest anonymous memory in GB)."""
    runs, anonymous = path.parent / "runs", 0
    settings = ["algo=iql", f"dataset={path}", f"dataset.memory={memory}", f"dataset.cache_dir={path.parent / 'cache'}"]
    settings += ["encoder=drq", "dataset.frames=3", "seeds=1", f"steps={updates}", f"log_every={updates // 2}"]
    settings += ["eval.every=0", f"runs_dir={runs}"]
    process = psutil.Popen([sys.executable, "-m", "offrl.cli", "train", *settings], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        text = Path(f"/proc/{process.pid}/status").read_text()
        anonymous = max(anonymous, int((text.split("RssAnon:") + ["0"])[1].split()[0]))
        time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"{path}: offrl train ended with {process.returncode}")
    lines = [json.loads(line) for line in next(runs.rglob("timing.jsonl")).read_text().splitlines()]
    shutil.rmtree(runs)
    return next(line["updates_per_second"] for line in reversed(lines) if "updates_per_second" in line), anonymous / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--large", type=float, default=10.0, help="GB of frames that are mapped")
    parser.add_argument("--small", type=float, default=1.0, help="GB of frames in memory")
    parser.add_argument("--updates", type=int, default=100)
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    print("| frames | memory | opened, frames/s | updates/s | anonymous memory |\n|---|---|---|---|---|", flush=True)
    for size, memory in ((arguments.small, "device"), (arguments.large, "mmap")):
        rows = round(size * 1e9 / np.prod(SHAPE)) // LENGTH * LENGTH
        path = arguments.out / f"frames-{memory}.hdf5"
        write(path, rows)
        with ProcessPoolExecutor(1) as pool:  # whose memory is given back
            seconds = pool.submit(opened, path, memory).result()
        speed, anonymous = train(path, memory, arguments.updates)
        print(f"| {size:g} GB | {memory} | {rows / seconds:,.0f} | {speed:.2f} | {anonymous:.2f} GB |", flush=True)
        path.unlink()
        shutil.rmtree(arguments.out / "cache", ignore_errors=True)


if __name__ == "__main__":
    main()
