"""Training with Stable-Baselines3, every episode written down as it happened, and a snapshot of the policy at equal
steps.

Resumable without pickles: parameters and optimisers as safetensors (offrl.system.files), the replay buffer filled again
from the recorded episodes. A run that was killed goes on from its last checkpoint; what was recorded after it is
trained anew, and the episode that a checkpoint interrupts is left out of the stream, so that no episode is cut, lost or
there twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offrl.collect.config import CollectConfig
from offrl.collect.environment import World
from offrl.collect.episodes import Episode, columns_of, read_shards, shards, write_shard
from offrl.collect.record import KEPT, Stop, Stopped
from offrl.collect.recorder import Recorder, measure, seed_for
from offrl.errors import UserError
from offrl.interop.sb3 import Actor, actor_from
from offrl.system import files as checkpoint
from offrl.system.progress import Progress
from offrl.tasks.episodes import mujoco_warnings

BUFFER = 1_000_000  # transitions that SAC draws from, as D4RL's


@dataclass(frozen=True)
class Snapshot:
    """The policy after `step` steps of training, and the returns of some of its noisy episodes."""

    step: int
    returns: tuple[float, ...]
    path: Path

    @property
    def mean(self) -> float:
        return float(np.mean(self.returns))

    def actor(self, world: World) -> Actor:
        tensors, _ = checkpoint.read(self.path)
        return actor_from(tensors, low=world.low, high=world.high, discrete=world.discrete, where=str(self.path))


def algorithm_of(world: World, config: CollectConfig) -> str:
    """sac or ppo. Raises UserError for SAC with discrete actions."""
    if config.algorithm == "sac" and world.discrete:
        raise UserError(f"{world.env_id} has discrete actions, for which SAC is not made; use algorithm=ppo (or auto)")
    return {"auto": "ppo" if world.discrete else "sac"}.get(config.algorithm, config.algorithm)


def snapshots(folder: Path) -> list[Snapshot]:
    """The snapshots in the folder of a training, by step."""
    result = []
    for path in sorted((folder / "snapshots").glob("step_*.safetensors")):
        _, meta = checkpoint.read(path)
        result.append(Snapshot(int(meta["step"]), tuple(meta["returns"]), path))
    return result


def stream(folder: Path) -> list[Episode]:
    """All recorded episodes, in order; `mark` is the step at which each ended."""
    return read_shards(p for _, _, p in shards(folder / "stream"))


def train(world: World, config: CollectConfig, folder: Path, steps: int, interval: int, stop: Stop) -> None:
    """Train for `steps` steps, from the last checkpoint in `folder` on if there is one. Raises Stopped at Ctrl-C or
    SIGTERM.
    """
    saved = checkpoint.load_latest(folder)
    at = int(saved[1]["step"]) if saved else 0
    if at >= steps:
        return
    num_episodes = int(saved[1]["episodes"]) if saved else 0
    for first, _, path in shards(folder / "stream"):
        if first >= num_episodes:
            path.unlink()
    for snapshot in snapshots(folder):
        if snapshot.step > at:
            snapshot.path.unlink()
    episodes, pending = stream(folder), []
    if len(episodes) != num_episodes:
        raise UserError(
            f"{folder / 'stream'} has {len(episodes)} episodes, its checkpoint {num_episodes}: files are missing; "
            "choose another out="
        )
    rows = sum(map(len, episodes))
    with mujoco_warnings() as unstable:
        recorder = Recorder(world, lambda episode: pending.append(episode), unstable)
        model = _model(world, config, recorder, steps, interval)
        if saved:
            _restore(model, saved[0], saved[1], at)
            if hasattr(model, "replay_buffer") and episodes:
                _refill(model, episodes)
            model.set_random_seed(seed_for(config.seed, "resume", at) % (2**31))
        name = type(model).__name__
        with Progress(f"training {name} on {world.env_id}", steps, "steps", config.quiet, at) as bar:
            recent: list[float] = [e.total for e in episodes[-20:]]

            def save(step: int, snapshot: bool) -> None:
                nonlocal num_episodes, rows
                if pending:
                    write_shard(folder / "stream", num_episodes, num_episodes + len(pending), pending)
                    num_episodes, rows = num_episodes + len(pending), rows + sum(map(len, pending))
                    recent[:] = [*recent, *(e.total for e in pending)][-20:]
                    pending.clear()
                if snapshot:
                    _snapshot(world, config, model, folder, step)
                tensors, meta = _state(model)
                checkpoint.save(folder, step, tensors, {**meta, "episodes": num_episodes, "rows": rows}, keep=2)

            def after_step(*_: Any) -> bool:
                step = model.num_timesteps
                recorder.mark = step + 1  # of the step to come
                due = step % interval == 0 or step >= steps
                if due or stop.asked:
                    save(step, due)
                if due or step % 50 == 0:
                    returns = [*recent, *(e.total for e in pending)][-20:]
                    bar.update(step, f"return {np.mean(returns):.1f}" if returns else "")
                return step < steps and not stop.asked

            if not saved:
                save(0, True)
            recorder.mark = at + 1
            try:
                model.learn(steps - at, callback=after_step, reset_num_timesteps=False)
            finally:
                recorder.close()
    if stop.asked:
        raise Stopped


def _model(world: World, config: CollectConfig, recorder: Recorder, steps: int, interval: int) -> Any:
    """SB3's algorithm with its defaults, which are D4RL's for SAC: two layers of 256, rate 3e-4, batch 256, discount
    0.99.
    """
    sb3 = library()
    if algorithm_of(world, config) == "sac":
        warm_up = max(1, min(10_000, steps // 20))  # uniform actions
        return sb3.SAC("MlpPolicy", recorder, seed=config.seed, learning_starts=warm_up, buffer_size=min(steps, BUFFER))
    # many updates even in a short training
    length = min(2048, max(64, steps // 40 // 64 * 64))
    return sb3.PPO("MlpPolicy", recorder, seed=config.seed, n_steps=length, device="cpu")


def library() -> Any:
    """Stable-Baselines3. Raises UserError where it is not installed."""
    try:
        import stable_baselines3
    except ImportError as error:
        raise UserError(f"recipe=d4rl trains with stable-baselines3 ({error}): pip install 'offrl[collect]'") from None
    return stable_baselines3


def _snapshot(world: World, config: CollectConfig, model: Any, folder: Path, step: int) -> None:
    """Save the actor, with the returns of some noisy episodes."""
    tensors = {
        k: v
        for k, v in model.policy.state_dict().items()
        if not k.startswith(("critic", "value_net", "mlp_extractor.value_net"))
    }
    path = folder / "snapshots" / f"step_{step:09d}.safetensors"
    actor = actor_from(tensors, low=world.low, high=world.high, discrete=world.discrete, where=str(path))
    returns = measure(world, actor, True, config.eval_episodes, seed_for(config.seed, "snapshot", step))
    checkpoint.write(path, tensors, {"kind": "snapshot", "step": step, "returns": returns.tolist()}, KEPT)


def _state(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Parameters, and the state of the optimisers (not their settings, which do not change)."""
    tensors: dict[str, torch.Tensor] = {}
    for name, values in model.get_parameters().items():
        if "param_groups" in values:
            for i, entry in values["state"].items():
                tensors |= {f"{name}/{i}/{k}": torch.as_tensor(v) for k, v in entry.items()}
        else:
            tensors |= {f"{name}/{k}": v for k, v in values.items()}
    if getattr(model, "log_ent_coef", None) is not None:
        tensors["log_ent_coef"] = model.log_ent_coef
    return tensors, {"updates": model._n_updates}


def _restore(model: Any, tensors: Mapping[str, torch.Tensor], meta: Mapping[str, Any], step: int) -> None:
    """The inverse of `_state`."""
    values: dict[str, Any] = {}
    for name, parameter in model.get_parameters().items():
        entries = {k.removeprefix(f"{name}/"): v for k, v in tensors.items() if k.startswith(f"{name}/")}
        if "param_groups" in parameter:
            state: dict[int, dict[str, torch.Tensor]] = {}
            for key, value in entries.items():
                i, _, part = key.partition("/")
                state.setdefault(int(i), {})[part] = value
            values[name] = {"state": state, "param_groups": parameter["param_groups"]}
        else:
            values[name] = entries
    model.set_parameters(values, exact_match=True)
    if "log_ent_coef" in tensors:
        with torch.no_grad():
            model.log_ent_coef.copy_(tensors["log_ent_coef"])
    model.num_timesteps, model._n_updates = step, int(meta["updates"])


def _refill(model: Any, episodes: list[Episode]) -> None:
    """The replay buffer's newest rows, as SB3 had stored them: actions in [-1, 1], time-outs marked."""
    buffer = model.replay_buffer
    columns = {k: v[-buffer.buffer_size :] for k, v in columns_of(episodes).items()}
    n = len(columns["rewards"])
    buffer.observations[:n, 0], buffer.next_observations[:n, 0] = columns["observations"], columns["next_observations"]
    buffer.actions[:n, 0] = model.policy.scale_action(columns["actions"])
    buffer.rewards[:n, 0] = columns["rewards"]
    buffer.dones[:n, 0] = columns["terminations"] | columns["truncations"]
    buffer.timeouts[:n, 0] = columns["truncations"]
    buffer.pos, buffer.full = n % buffer.buffer_size, n == buffer.buffer_size
