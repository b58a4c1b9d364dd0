"""Makes the dataset that ships with offrl: mixed-quality Hopper-v5 episodes (needs the extra `collect`).

    # about 30 minutes on one core: SAC, a snapshot every 5,000 steps
    python scripts/make_builtin_dataset.py train --out /tmp/hopper
    python scripts/make_builtin_dataset.py collect --snapshots /tmp/hopper --out offrl/assets/hopper-mixed-v0.hdf5

`train` learns one SAC policy with stable-baselines3 and prints each snapshot's deterministic return. `collect` sorts
the snapshots by that return and rolls out (stochastically) an untrained, an early, a medium and the best one. Most rows
are bad on purpose: what imitates everything fails here, and what weighs actions by their value does not. The reference
scores written to the file are measured here as well: 0 is the untrained policy, 100 the best snapshot acting greedily.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gymnasium as gym
import h5py
import numpy as np

ENV = "Hopper-v5"
MIX = {"untrained": 0.20, "early": 0.50, "medium": 0.15, "best": 0.15}  # shares of the rows
ROWS = 60_000


def rollout(policy, seed: int, deterministic: bool) -> dict[str, np.ndarray]:
    """One episode: observations [T+1, O], actions [T, A], rewards, terminations, truncations [T]."""
    import torch

    torch.manual_seed(seed)
    env = gym.make(ENV)
    observation, _ = env.reset(seed=seed)
    rows: dict[str, list] = {
        "observations": [observation],
        "actions": [],
        "rewards": [],
        "terminations": [],
        "truncations": [],
    }
    done = False
    while not done:
        action, _ = policy.predict(observation, deterministic=deterministic)
        observation, reward, terminated, truncated, _ = env.step(action)
        done = terminated or truncated
        for key, value in zip(rows, (observation, action, reward, terminated, truncated), strict=True):
            rows[key].append(value)
    return {k: np.asarray(v, np.bool_ if k in ("terminations", "truncations") else np.float32) for k, v in rows.items()}


def mean_return(policy, episodes: int = 10, deterministic: bool = True) -> float:
    return float(np.mean([rollout(policy, 10_000 + i, deterministic)["rewards"].sum() for i in range(episodes)]))


def train(out: Path, steps: int, seed: int) -> None:
    import torch
    from stable_baselines3 import SAC
    from stable_baselines3.common.callbacks import BaseCallback

    torch.set_num_threads(1)
    out.mkdir(parents=True, exist_ok=True)
    returns: dict[str, float] = {}

    class Snapshots(BaseCallback):
        def _on_step(self) -> bool:
            if self.num_timesteps % 5_000 == 0:
                name = f"sac_{self.num_timesteps:07d}"
                self.model.policy.save(out / f"{name}.pt")
                returns[name] = mean_return(self.model.policy)
                print(name, round(returns[name], 1), flush=True)
                (out / "returns.json").write_text(json.dumps(returns, indent=1))
            return True

    model = SAC("MlpPolicy", ENV, seed=seed, device="cpu", learning_starts=5_000)
    model.policy.save(out / "sac_0000000.pt")
    returns["sac_0000000"] = mean_return(model.policy)
    model.learn(steps, callback=Snapshots())


def collect(snapshots: Path, out: Path) -> None:
    from stable_baselines3.sac.policies import SACPolicy

    returns = json.loads((snapshots / "returns.json").read_text())
    ranked = sorted((r, n) for n, r in returns.items() if n != "sac_0000000")
    top = ranked[-1][0]

    def nearest(target: float) -> str:
        return min(ranked, key=lambda rn: abs(rn[0] - target))[1]

    chosen = {
        "untrained": "sac_0000000",
        "early": nearest(0.10 * top),
        "medium": nearest(0.40 * top),
        "best": ranked[-1][1],
    }
    policies = {part: SACPolicy.load(snapshots / f"{name}.pt", device="cpu") for part, name in chosen.items()}
    episodes, part_means, seed = [], {}, 0
    for part, share in MIX.items():
        rows, part_returns = 0, []
        while rows < share * ROWS:  # whole episodes only
            episode = rollout(policies[part], seed, deterministic=False)
            episodes.append(episode)
            part_returns.append(episode["rewards"].sum())
            rows, seed = rows + len(episode["rewards"]), seed + 1
        part_means[part] = float(np.mean(part_returns))
        print(f"{part}: {chosen[part]}, {len(part_returns)} episodes, {rows} rows, mean return {part_means[part]:.1f}")
    order = np.random.default_rng(0).permutation(len(episodes))
    episodes = [episodes[i] for i in order]
    reference = {
        "ref_min_score": mean_return(policies["untrained"], 20, False),
        "ref_max_score": mean_return(policies["best"], 20),
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(out, "w") as file:
        columns = {
            k: np.concatenate([e[k] for e in episodes]) for k in ("actions", "rewards", "terminations", "truncations")
        }
        columns["terminals"], columns["timeouts"] = columns.pop("terminations"), columns.pop("truncations")
        columns["observations"] = np.concatenate([e["observations"][:-1] for e in episodes])
        # successor of each episode's last row
        columns["final_observations"] = np.stack([e["observations"][-1] for e in episodes])
        for key, value in columns.items():
            file.create_dataset(
                key, data=value, compression="gzip", compression_opts=9, shuffle=value.dtype == np.float32
            )
        file.attrs.update(env_id=ENV, dataset_id="offrl/hopper-mixed-v0", **reference)
        file.attrs["recipe"] = json.dumps(
            {"mix": MIX, "policies": chosen, "mean_returns": part_means, "gymnasium": gym.__version__}
        )
    print(
        f"wrote {out}: {out.stat().st_size / 2**20:.2f} MiB, {len(columns['rewards'])} rows, {len(episodes)} episodes, "
        f"{reference}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("train")
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--steps", type=int, default=200_000)
    p.add_argument("--seed", type=int, default=0)
    p = commands.add_parser("collect")
    p.add_argument("--snapshots", type=Path, required=True)
    p.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    train(args.out, args.steps, args.seed) if args.command == "train" else collect(args.snapshots, args.out)
