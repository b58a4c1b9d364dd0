"""Policies that play chunks of actions from a queue, wherever a policy acts: one step after another, in scores and
their processes, in recordings, in files of other runtimes, and in off-policy evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import vmap

from offrl import ope, rng
from offrl.algorithms.act import ACT, ACTConfig
from offrl.algorithms.qc import QC, QCConfig
from offrl.collect.environment import look
from offrl.collect.record import Stop
from offrl.collect.recorder import record
from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.pool.host import EvaluationPool
from offrl.evaluation.predict import PredictState
from offrl.export import card
from offrl.export.check import check
from offrl.export.graph import PolicyGraph
from offrl.export.write import export_policy
from offrl.families.generative.chunks import ChunkActor, Queue
from offrl.ope.stopping import Plateau
from offrl.settings.evaluation import EvalConfig
from offrl.settings.replicas import Replica
from offrl.settings.train import TrainConfig
from offrl.tasks.episodes import reset_seed
from offrl.tasks.task import Task
from tests.support import linear_model
from tests.support.evaluation import evaluate

SPEC = DataSpec(
    (2,), 1, action_low=(-2.0,), action_high=(2.0,), name="it", observation_mean=(1.0, 0.5), observation_std=(2.0, 3.0)
)


class Echo(gym.Env):
    """Shows its number and its step, and rewards the action itself; 3 to 12 steps long, as the seed says."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-2, 2, (1,), np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict[str, Any]]:
        super().reset(seed=seed)
        self.length, self.t = int(self.np_random.integers(3, 13)), 0
        return np.array([self.length, 0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([self.length, self.t], np.float32), float(action[0]), self.t == self.length, False, {}


gym.register("TestEcho-v0", Echo, max_episode_steps=20)


def policy(spec: DataSpec = SPEC, **settings: Any) -> TrainedPolicy:
    """Chunks of four, of which three are played; random weights, without noise unless asked for."""
    config = QCConfig(
        **{
            "length": 4,
            "action_steps": 3,
            "actor_type": "distil",
            "greedy": "zero",
            "hidden": [16],
            "flow_steps": 2,
            **settings,
        }
    )
    algorithm = QC(config, spec)
    return TrainedPolicy(algorithm, algorithm.init(1), 1)


def by_hand(acts: TrainedPolicy, observations: np.ndarray) -> np.ndarray:
    """The actions [T, A] of an episode with these observations [T, O]: a chunk is drawn at steps 0, 3, 6, ..."""
    return np.stack([acts.chunk(observations[t - t % 3][None])[0, t % 3] for t in range(len(observations))])


# ---- the queue


class Spoken(ChunkActor):
    """Chunks that say at what time they were drawn and which action of them it is; counts how often it is asked."""

    asked = 0

    def chunk(self, observations: Tensor, key: Tensor, explore: bool) -> Tensor:
        self.asked += 1
        return observations[:, :1, None] * 10 + torch.arange(4.0).reshape(1, 4, 1)


def spoken(**settings: Any) -> Spoken:
    acts = policy(**settings)
    return Spoken(acts.algorithm, acts.state)


def test_three_of_four_actions_are_played() -> None:
    actor, key = spoken(), rng.make_key(0)
    carry, played = actor.start(2), []
    for t in range(8):
        if t == 5:
            carry = actor.begin_anew(carry, torch.tensor([False, True]))
        actions, carry = actor.act(carry, torch.full((2, 1), float(t)), key, explore=False)
        played.append(actions[:, 0].tolist())
    assert [a for a, _ in played] == [0, 1, 2, 30, 31, 32, 60, 61]
    # after its reset a new chunk, and no rest of the old one
    assert [b for _, b in played] == [0, 1, 2, 30, 31, 50, 51, 52]
    assert actor.asked == 4  # at 0, 3, 5 and 6


def test_all_are_played_unless_told_otherwise_and_one_needs_no_memory() -> None:
    assert (
        spoken(action_steps=0).action_steps,
        spoken(action_steps=9).action_steps,
        spoken(action_steps=2).action_steps,
    ) == (4, 4, 2)
    for settings in ({"action_steps": 1}, {"length": 1, "action_steps": 0}, {"chunked": False, "action_steps": 0}):
        assert policy(**settings).start(3) is None
    actor = spoken(action_steps=1)
    actions, carry = actor.act(None, torch.full((2, 1), 7.0), rng.make_key(0), explore=False)
    assert actions.tolist() == [[70.0], [70.0]] and carry is None


def test_the_queue_under_vmap() -> None:
    actor, key = spoken(), rng.make_key(0)
    carries = Queue(torch.arange(16.0).reshape(2, 2, 4, 1), torch.tensor([[0, 1], [3, 0]]))
    observations = torch.tensor([[[5.0], [6.0]], [[7.0], [8.0]]])
    actions, after = vmap(lambda c, o: actor.act(c, o, key, explore=False))(carries, observations)
    assert actions[..., 0].tolist() == [[50.0, 4.0], [8.0, 80.0]] and after.remaining.tolist() == [[2, 0], [2, 2]]
    for n in range(2):
        alone, carry = actor.act(Queue(carries.actions[n], carries.remaining[n]), observations[n], key, explore=False)
        assert torch.equal(alone, actions[n]) and torch.equal(carry.actions, after.actions[n])


# ---- one step after another


def test_act_and_predict_play_open_loop(tmp_path: Path) -> None:
    acts, g = policy(), np.random.default_rng(0)
    observations = g.normal(size=(7, 2)).astype(np.float32)
    expected = by_hand(acts, observations)
    assert np.unique(expected).size == 7
    acts.save(tmp_path / "policy.safetensors")
    for one in (acts, TrainedPolicy.load(tmp_path / "policy.safetensors")):
        for _ in range(2):
            one.reset()
            np.testing.assert_allclose(np.stack([one.act(o) for o in observations]), expected, rtol=1e-6)
    state, found = None, []
    for o in observations:
        action, state = acts.predict(o, state, deterministic=True)
        found.append(action)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    looks = acts.with_settings({"action_steps": 1})
    np.testing.assert_allclose([looks.act(o) for o in observations], acts.chunk(observations)[:, 0], rtol=1e-6)
    assert looks.predict(observations[0])[1] is None


def test_predict_begins_some_episodes_anew() -> None:
    """As vectorised environments of Stable-Baselines3 ask for it."""
    acts, g = policy(), np.random.default_rng(0)
    observations = g.normal(size=(6, 2, 2)).astype(np.float32)
    state, found = None, []
    for t in range(6):
        actions, state = acts.predict(
            observations[t], state, episode_start=np.array([t == 0, t in (0, 2)]), deterministic=True
        )
        assert isinstance(state, PredictState)
        found.append(actions)
    first, second = observations[:, 0], observations[:, 1]
    expected = np.stack(
        [by_hand(acts, first), np.concatenate([by_hand(acts, second[:2]), by_hand(acts, second[2:])])], 1
    )
    np.testing.assert_allclose(np.stack(found), expected, rtol=1e-4, atol=1e-6)


# ---- in environments


def test_scores() -> None:
    acts = policy()
    task = Task("echo", f"{__name__}:TestEcho-v0")
    result = evaluate([acts, policy(action_steps=2)], [0, 1], task, EvalConfig(episodes=5))
    returns = []
    for e in range(5):
        env = gym.make("TestEcho-v0")
        first, _ = env.reset(seed=reset_seed(0, 0, e))
        length = int(first[0])
        rows = np.array([[length, t] for t in range(length)], np.float32)
        returns.append(by_hand(acts, rows).sum())
    np.testing.assert_allclose(result.returns[0], returns, rtol=1e-5)
    assert not np.allclose(result.returns[0], result.returns[1])


@pytest.mark.slow
def test_scores_of_processes() -> None:
    task, policies = (
        Task("echo", f"{__name__}:TestEcho-v0"),
        [policy(), policy(action_steps=2, actor_type="best", greedy="sample")],
    )
    result = evaluate(policies, [0, 1], task, EvalConfig(episodes=5))
    with EvaluationPool(task, EvalConfig(episodes=5), 1) as pool:
        other = pool.evaluate(policies, [0, 1])
    np.testing.assert_array_equal(other.returns, result.returns)


def test_recordings(tmp_path: Path) -> None:
    acts = policy()
    episodes = record(
        look("TestEcho-v0"),
        acts,
        tmp_path,
        rows=None,
        episodes=6,
        seed=1,
        explore=False,
        noise=0.0,
        parallel=3,
        title="",
        quiet=True,
        stop=Stop(),
    )
    for episode in episodes:
        np.testing.assert_allclose(
            episode.columns["actions"], by_hand(acts, episode.columns["observations"]), rtol=1e-5
        )
    assert len({len(e.columns["rewards"]) for e in episodes}) > 1  # of several lengths, side by side


# ---- files of other runtimes


BEST, DISTIL = {"actor_type": "best", "candidates": 4, "greedy": "sample"}, {"greedy": "sample"}
NIGHTLY = {"marks": pytest.mark.nightly}


@pytest.mark.parametrize(
    ("format", "settings"),
    [
        pytest.param("pt2", BEST, id="pt2-best"),
        pytest.param("pt2", DISTIL, id="pt2-distil", **NIGHTLY),
        pytest.param("pt2", {}, id="pt2-zero", **NIGHTLY),
        pytest.param("onnx", BEST, id="onnx-best", **NIGHTLY),
        pytest.param("onnx", DISTIL, id="onnx-distil", **NIGHTLY),
        pytest.param("onnx", {}, id="onnx-zero"),
    ],
)
def test_files_map_an_observation_to_a_chunk(tmp_path: Path, format: str, settings: dict[str, Any]) -> None:
    if format == "onnx":
        pytest.importorskip("onnxruntime")
    acts = policy(**settings)
    done = export_policy(acts, tmp_path / f"policy.{format}", format)
    assert done.check.passed and done.check.largest < 1e-5
    about = json.loads(done.description.read_text())
    output = about["outputs"][0]
    assert output["shape"] == ["batch", 4, 1] and output["action_steps"] == 3
    assert "play the first 3" in output["meaning"]
    assert [i["name"] for i in about["inputs"]] == (["observations"] if not settings else ["observations", "noise"])
    words = card.text(acts, about)
    assert "chunks of 4 actions, `[batch, 4, 1]`: play the first 3 of them" in words
    if not settings:  # the rest by hand: without noise the file alone plays an episode as the policy does
        observations = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
        if format == "onnx":
            import onnxruntime

            session = onnxruntime.InferenceSession(done.path)
            found = [session.run(None, {"observations": observations[t - t % 3][None]})[0][0, t % 3] for t in range(8)]
        else:
            module = torch.export.load(done.path).module()
            found = [module(torch.from_numpy(observations[t - t % 3][None]))[0, t % 3].numpy() for t in range(8)]
        np.testing.assert_allclose(found, [acts.act(o) for o in observations], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_mean_of_chunks_is_the_callers(tmp_path: Path) -> None:
    algorithm = ACT(ACTConfig(length=4, ensemble=0.01, width=8, feed_forward=16, heads=2, layers=1), SPEC)
    acts = TrainedPolicy(algorithm, algorithm.init(1), 1)
    done = export_policy(acts, tmp_path / "policy.pt2", "pt2")
    output = json.loads(done.description.read_text())["outputs"][0]
    assert (
        output["ensemble"] == 0.01
        and output["action_steps"] == 1
        and "the mean of what all chunks so far say" in output["meaning"]
    )
    o = np.zeros((2, 2), np.float32)
    np.testing.assert_allclose(
        torch.export.load(done.path).module()(torch.from_numpy(o)).numpy(), acts.chunk(o), rtol=1e-6
    )


def test_a_check_sees_a_wrong_action_at_the_end_of_a_chunk() -> None:
    acts = policy()
    graph = PolicyGraph(acts, False)

    def wrong(x: np.ndarray, noise: Any) -> np.ndarray:
        chunk = graph(torch.from_numpy(x)).numpy()
        chunk[:, 3] += 0.01
        return chunk

    assert check(acts, False, lambda x, _: graph(torch.from_numpy(x)).numpy(), (), "it").passed
    assert "is the largest difference" in check(acts, False, wrong, (), "it").failure
    assert "(1000, 4, 1)" in check(acts, False, lambda x, _: graph(torch.from_numpy(x)).numpy()[:, 0], (), "it").failure


# ---- values from data


def test_values_by_state_are_refused_and_a_model_plays_chunks_out(tmp_path: Path) -> None:
    data = linear_model.rows(episodes=4)
    spec = data.spec
    acts = policy(spec)
    for method in ("fqe", "wis", "dr", "all"):
        with pytest.raises(UserError, match=r"candidate a plays 3 actions at a time.*method=model") as error:
            ope.evaluate_policies(data, {"a": acts}, method)
        assert "\n" not in str(error.value)
    path = linear_model.write(tmp_path / "m.safetensors", data)
    settings = ope.OPEConfig(discount=0.9, world_model=str(path), rollouts=4, horizon=7)
    estimates = ope.evaluate_policies(data, {"a": acts}, "model", settings).estimates["model"]
    low, high = np.array(spec.action_low), np.array(spec.action_high)
    totals = []
    for member in (0, 1):
        for s in data.columns["observations"][data.episode_start].double().numpy():
            total, chunk = 0.0, np.zeros(0)
            for t in range(7):
                if t % 3 == 0:
                    chunk = acts.chunk(s[None])[0]
                action = np.clip(chunk[t % 3], low, high)
                s, reward = linear_model.step(member, s, float(action[0]))
                total += 0.9**t * reward
            totals.append(total)
    assert estimates.value[0] == pytest.approx(np.mean(totals), rel=1e-3, abs=1e-4)
    one = ope.evaluate_policies(
        data, {"a": acts.with_settings({"action_steps": 1})}, "fqe", ope.OPEConfig(updates=5, seeds=1)
    )
    assert np.isfinite(one.estimates["fqe"].value).all()  # it decides at each step


def test_stopping_by_values_is_refused_before_the_first_update(tmp_path: Path) -> None:
    data = linear_model.rows(episodes=4)
    replicas = [Replica(0, ())]
    small = {"actor_type": "distil", "hidden": [8], "length": 4}
    with pytest.raises(UserError, match=r"stop=fqe-plateau.*qc plays 4 at a time.*algo\.action_steps=1"):
        Plateau(TrainConfig(algo=QCConfig(**small)), data, tmp_path, replicas, None)  # type: ignore[arg-type]
    Plateau(TrainConfig(algo=QCConfig(**small, action_steps=1)), data, tmp_path, replicas, None).close()  # type: ignore[arg-type]
