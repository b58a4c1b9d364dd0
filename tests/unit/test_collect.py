"""Recording: the recorder's columns, resuming, D4RL's choice of policies, OGBench's loops."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from offrl.cli.main import main
from offrl.collect import episodes as shard_files
from offrl.collect import ogbench as goals
from offrl.collect.config import CollectConfig
from offrl.collect.d4rl import choose
from offrl.collect.environment import look
from offrl.collect.episodes import Episode, first_rows, read_shards, shards, write_shard
from offrl.collect.ogbench import mazes
from offrl.collect.ogbench.manipulation import in_sight, player
from offrl.collect.ogbench.rows import as_episode
from offrl.collect.record import Stop, Stopped
from offrl.collect.recorder import Recorder, record
from offrl.collect.train import Snapshot, stream
from offrl.data import load_dataset
from offrl.errors import UserError
from offrl.settings.dataset import DatasetConfig

SHARED = Path(os.environ.get("OFFRL_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
REFERENCE = SHARED / "ogbench" / "pointmaze-medium-navigate-v0.npz"


class Counter(gym.Env):
    """Observation: (episode, step). Even episodes end after 3 steps by a termination, odd ones by the limit of 5.
    Choices 4 and 5.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2, 1), np.float64)
    action_space = gym.spaces.Discrete(2, start=4)

    def __init__(self) -> None:
        self.episode, self.taken = -1, []

    def _see(self) -> np.ndarray:
        return np.array([[self.episode], [self.t]], float)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self._see(), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert action in (4, 5)
        self.t += 1
        return self._see(), float(action), self.episode % 2 == 0 and self.t == 3, False, {}


class Wild(Counter):
    """Lengths drawn from the seed: 1 to 12 steps. Actions in [-2, 2]; the reward is the action that came."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
    action_space = gym.spaces.Box(-2, 2, (1,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.length, self.t = int(self.np_random.integers(1, 13)), 0
        return np.array([self.length, 0], np.float32), {}

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict]:
        assert action.dtype == np.float64 and action.shape == (1,)
        self.t += 1
        return np.array([self.length, self.t], np.float32), float(action[0]), self.t == self.length, False, {}


class Pictures(Counter):
    observation_space = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)


class Named(Counter):
    observation_space = gym.spaces.Dict({"a": Counter.observation_space})


class Crowd(Counter):
    action_space = gym.spaces.Tuple((gym.spaces.Discrete(2), gym.spaces.Discrete(2)))


class Endless(Counter):
    pass


class Broken(Counter):
    def step(self, action: Any) -> Any:
        raise ZeroDivisionError("my bug")


for kind in (Counter, Wild, Pictures, Named, Crowd, Broken):
    gym.register(f"Test{kind.__name__}-v0", kind, max_episode_steps=5 if kind is Counter else 100)
gym.register("TestEndless-v0", Endless)


class Constant:
    """Choice 1 always; what it sees is kept."""

    def start(self, episodes: int) -> None: ...

    def step(self, carry: Any, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, Any]:
        return np.ones(len(observations), np.int64), carry


def test_recorder_writes_what_happened() -> None:
    world, kept = look("TestCounter-v0"), []
    recorder = Recorder(world, kept.append, [])
    assert recorder.observation_space.shape == (2,) and recorder.action_space == gym.spaces.Discrete(2)
    for _ in range(2):
        observation, _ = recorder.reset()
        done, t = False, 0
        while not done:
            np.testing.assert_array_equal(observation, [recorder.unwrapped.episode, t])
            observation, reward, terminated, truncated, _ = recorder.step(t % 2)
            assert reward == 4 + t % 2
            done, t = terminated or truncated, t + 1
    first, second = kept
    np.testing.assert_array_equal(first.columns["observations"], np.float32([[0, 0], [0, 1], [0, 2]]))
    np.testing.assert_array_equal(first.columns["actions"], [0, 1, 0])
    np.testing.assert_array_equal(first.columns["terminations"], [False, False, True])
    assert not first.columns["truncations"].any() and first.columns["actions"].dtype == np.int64
    np.testing.assert_array_equal(first.final, [0, 3])
    np.testing.assert_array_equal(second.columns["truncations"], [False] * 4 + [True])  # a time-out is no termination
    assert not second.columns["terminations"].any() and second.total == 4 + 5 + 4 + 5 + 4
    np.testing.assert_array_equal(second.final, [1, 5])


def test_max_steps_cuts_as_a_time_out() -> None:
    world, kept = look("TestEndless-v0", max_steps=2), []
    recorder = Recorder(world, kept.append, [])
    recorder.reset()
    assert recorder.step(0)[2:4] == (False, False) and recorder.step(0)[2:4] == (False, True)
    np.testing.assert_array_equal(kept[0].columns["truncations"], [False, True])


def test_unstable_physics_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    kept: list[Episode] = []
    recorder = Recorder(look("TestCounter-v0"), kept.append, ["Nan, Inf in QACC"])
    for _ in range(2):
        recorder.reset()
        while not any(recorder.step(0)[2:4]):
            pass
    assert len(kept) == 1 and "left out" in capsys.readouterr().err


def test_mujoco_state_is_that_before_the_action() -> None:
    world, kept = look("InvertedPendulum-v5"), []
    recorder = Recorder(world, kept.append, [])
    recorder.reset(seed=0)
    start = recorder.unwrapped.data.qpos.copy()
    while not any(recorder.step(np.array([3.0]))[2:4]):
        pass
    (episode,) = kept
    np.testing.assert_array_equal(episode.columns["infos/qpos"][0], start.astype(np.float32))
    both = np.concatenate([episode.columns["infos/qpos"], episode.columns["infos/qvel"]], 1)
    np.testing.assert_array_equal(both, episode.columns["observations"])  # this environment observes just that
    assert episode.columns["terminations"][-1] and not np.array_equal(
        episode.final, episode.columns["observations"][-1]
    )


def play(folder: Path, **changes: Any) -> list[Episode]:
    def act(observations: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return rng.uniform(-3, 3, (len(observations), 1))

    from offrl.interop.policies import FunctionPolicy

    world = look("TestWild-v0")
    options: dict[str, Any] = {
        "rows": 2000,
        "episodes": None,
        "seed": 1,
        "explore": True,
        "noise": 0.0,
        "parallel": 4,
        "title": "",
        "quiet": True,
    }
    return record(world, FunctionPolicy(act, "act"), folder, **{"stop": Stop(), **options, **changes})


def same(a: list[Episode], b: list[Episode]) -> bool:
    return len(a) == len(b) and all(
        np.array_equal(x.final, y.final) and all(np.array_equal(x.columns[k], y.columns[k]) for k in x.columns)
        for x, y in zip(a, b, strict=True)
    )


def test_a_recording_that_was_stopped_goes_on_to_the_same_episodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offrl.collect.episodes.SHARD_ROWS", 100)
    whole = play(tmp_path / "a")
    assert sum(map(len, whole)) >= 2000 > sum(map(len, whole[:-1]))
    assert len(shards(tmp_path / "a")) > 5
    stop = Stop()
    stop.asked = True
    for _ in range(3):
        with pytest.raises(Stopped):
            play(tmp_path / "b", stop=stop)
    assert 0 < len(read_shards(p for *_, p in shards(tmp_path / "b"))) < len(whole)
    assert same(play(tmp_path / "b"), whole)
    for *_, path in shards(tmp_path / "a")[2:]:  # as after a kill, with a half-written file beside
        path.unlink()
    (tmp_path / "a" / ".00000009-00000012.safetensors.part").write_bytes(b"x")
    assert same(play(tmp_path / "a"), whole)
    assert not same(play(tmp_path / "c", seed=2), whole)
    assert len(play(tmp_path / "d", episodes=7, rows=None)) == 7


def test_short_episodes_are_not_preferred(tmp_path: Path) -> None:
    """Lengths are uniform on 1..12: their mean is 6.5, with a standard error of 0.09 here."""
    lengths = [len(e) for e in play(tmp_path, rows=10_000, parallel=16)]
    assert abs(np.mean(lengths) - 6.5) < 0.35
    assert all(
        len(e) == e.columns["observations"][0, 0] == e.final[1] for e in play(tmp_path, rows=10_000, parallel=16)
    )


def test_actions_are_recorded_as_the_environment_got_them(tmp_path: Path) -> None:
    episodes = play(tmp_path, rows=500)
    actions = np.concatenate([e.columns["actions"] for e in episodes])
    np.testing.assert_array_equal(actions[:, 0], np.concatenate([e.columns["rewards"] for e in episodes]))
    assert actions.min() == -2 and actions.max() == 2 and actions.dtype == np.float32
    quiet = np.concatenate([e.columns["actions"] for e in play(tmp_path / "noise", rows=500, noise=0.5)])
    assert quiet.std() > actions.std()


def test_shards_keep_every_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def episode(length: int) -> Episode:
        return Episode(
            {"rewards": rng.normal(size=length).astype(np.float32), "actions": rng.integers(3, size=length)},
            np.float32([length]),
            length,
        )

    episodes = [episode(n) for n in (3, 1, 4)]
    write_shard(tmp_path, 0, 2, episodes[:2])
    write_shard(tmp_path, 2, 3, episodes[2:])
    write_shard(tmp_path, 4, 5, [])  # after a gap
    back = read_shards(p for *_, p in shards(tmp_path))
    assert [list(e.columns) for e in back] == [list(e.columns) for e in episodes[:3]], (
        "the order of a dataset's columns is theirs"
    )
    assert same(back, episodes) and [e.mark for e in back] == [3, 1, 4]
    assert [len(e) for e in first_rows(back, 4)] == [3, 1] and [len(e) for e in first_rows(back, 5)] == [3, 1, 4]
    path = shards(tmp_path)[0][2]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="damaged"):
        read_shards([path])


def test_choice_of_policies() -> None:
    """Random at 0, expert at 90; a third of the gain is 30."""

    def found(*means: float) -> list[Snapshot]:
        return [Snapshot(100 * i, (m - 1, m + 1), Path()) for i, m in enumerate(means)]

    # nearest before the first that reaches 30
    assert choose(found(0, 10, 28, 60, 30, 90), 1 / 3, "last").medium.step == 200
    choice = choose(found(0, 10, 20, 33, 29, 90), 1 / 3, "last")
    assert (choice.medium.step, choice.expert.step, choice.random.step) == (
        300,
        500,
        0,
    ) and choice.level == pytest.approx(33 / 90)
    assert choose(found(0, 10, 28, 120, 90), 1 / 3, "best").expert.step == 300
    assert choose(found(0, 5, 90), 1 / 3, "last").medium.step == 100  # never the untrained policy
    # negative returns: a third of the way, not of the number
    assert choose(found(-300, -200, -250, -90), 1 / 3, "last").medium.step == 100
    assert np.isnan(choose(found(5, 3, 1), 1 / 3, "last").level)


# ------------------------------------------------------------------------------------------------------- the command


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path


def fails(capsys: pytest.CaptureFixture[str], command: str, *words: str) -> None:
    capsys.readouterr()
    assert main(command.split()) == 2, capsys.readouterr().out
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and all(w in error for w in words), error


def test_mistakes_are_told_in_one_line(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "p.py").write_text(
        "import numpy as np\ndef one(observations, rng): return np.ones(len(observations), int)\n"
    )
    one = "policy=p.py:one"
    fails(capsys, "collect env=Hoper-v5 recipe=d4rl", "Hopper-v5")
    fails(capsys, "collect recipe=d4rl", "name the environment")
    fails(capsys, "collect env=Hopper-v5", "recipe= or policy=")
    fails(capsys, f"collect env=Hopper-v5 recipe=d4rl {one}", "both given")
    fails(capsys, "collect env=Hopper-v5 recipe=d4rll", "d4rl")
    fails(capsys, "collect env=Hopper-v5 recipe=d4rl datasets=[exprt]", "expert")
    fails(capsys, "collect env=Hopper-v5 recipe=d4rl stepps=5", "steps")
    fails(capsys, "collect env=Hopper-v5 recipe=d4rl format=hdf5", "d4rl, minari, both")
    fails(capsys, f"collect env=TestPictures-v0 {one}", "its space says uint8 [8, 8, 3]")
    fails(capsys, f"collect env=TestNamed-v0 {one}", "Dict", "FlattenObservation")
    fails(capsys, f"collect env=TestCrowd-v0 {one}", "several agents")
    fails(capsys, f"collect env=TestEndless-v0 {one}", "max_steps")
    fails(capsys, f"collect env=TestBroken-v0 {one} rows=5", "ZeroDivisionError", "my bug")
    fails(capsys, "collect env=CartPole-v1 recipe=d4rl algorithm=sac", "discrete")
    fails(capsys, f"collect env=Pendulum-v1 {one} rows=5", "shape")
    fails(capsys, f"collect env=CartPole-v1 {one} steps=5", "recipe=d4rl")
    assert main(f"collect env=CartPole-v1 {one} rows=50 out=a quiet=true".split()) == 0
    fails(capsys, f"collect env=CartPole-v1 {one} rows=60 out=a", "another collection", "rows")
    fails(capsys, "collect env=CartPole-v1 recipe=d4rl out=a", "another collection", "recipe")
    fails(capsys, f"collect env=CartPole-v1 {one} rows=50 out=.", "not empty")
    fails(capsys, f"collect env=CartPole-v1 {one} rows=50 out=p.py", "is a file")
    (home / "p.py").write_text(
        "import numpy as np\ndef one(observations, rng): return np.zeros(len(observations), int)\n"
    )
    fails(capsys, f"collect env=CartPole-v1 {one} rows=50 out=a", "policy_file")  # the same name, another policy
    monkeypatch.setitem(__import__("sys").modules, "stable_baselines3", None)
    fails(capsys, "collect env=Pendulum-v1 recipe=d4rl", "offrl[collect]")


def test_a_full_disk_leaves_what_was_there(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "p.py").write_text(
        "import numpy as np\ndef one(observations, rng): return np.ones(len(observations), int)\n"
    )
    command = "collect env=CartPole-v1 policy=p.py:one rows=100 out=a quiet=true"
    real = __import__("os").fsync

    def full(handle: int) -> None:
        import os

        if "episodes" in os.readlink(f"/proc/self/fd/{handle}"):
            raise OSError(28, "No space left on device")
        real(handle)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        fails(capsys, command, "No space left", "same command")
    assert main(command.split()) == 0


def test_a_policy_is_recorded_in_both_formats(home: Path) -> None:
    import h5py
    import minari

    Path("mine.py").write_text(
        "import numpy as np\ndef act(observations, rng): return 3 * np.tanh(rng.normal(size=(len(observations), 1)))\n"
    )
    command = "collect env=InvertedPendulum-v5 policy=mine.py:act rows=300 out=a format=both name=mine/pole quiet=true"
    assert main(command.split()) == 0
    with h5py.File("a/inverted" + "pendulum-v5-data.hdf5") as file:
        columns = {
            k: file[k][()] for k in ("observations", "actions", "rewards", "terminals", "timeouts", "next_observations")
        }
        columns |= {k: file[f"infos/{k}"][()] for k in ("qpos", "qvel")}
        assert file.attrs["env_id"] == "InvertedPendulum-v5"
    assert all(c.dtype == np.float32 for k, c in columns.items() if k not in ("terminals", "timeouts"))
    assert (
        len(columns["rewards"]) >= 300
        and (np.abs(columns["actions"]) <= 3).all()
        and np.abs(columns["actions"]).max() > 1
    )
    np.testing.assert_array_equal(np.concatenate([columns["qpos"], columns["qvel"]], 1), columns["observations"])
    inner = np.flatnonzero(~(columns["terminals"] | columns["timeouts"]))
    np.testing.assert_array_equal(columns["next_observations"][inner], columns["observations"][inner + 1])
    theirs = minari.load_dataset("mine/pole/data-v0")
    found = list(theirs.iterate_episodes())
    np.testing.assert_array_equal(np.concatenate([e.observations[:-1] for e in found]), columns["observations"])
    np.testing.assert_array_equal(np.concatenate([e.actions for e in found]), columns["actions"])
    np.testing.assert_array_equal(np.concatenate([e.terminations for e in found]), columns["terminals"])
    assert theirs.spec.env_spec.id == "InvertedPendulum-v5"
    ours = [load_dataset(DatasetConfig(name=n)) for n in ("a/invertedpendulum-v5-data.hdf5", "mine/pole/data-v0")]
    for data in ours:
        np.testing.assert_allclose(data.columns["actions"].numpy() * 3, columns["actions"], atol=1e-6)
        assert data.spec.task is not None and data.spec.task.env_id == "InvertedPendulum-v5"
        assert bool(data.columns["successor_known"].all())
    assert ours[0].fingerprint == ours[1].fingerprint
    card = json.loads(Path("a/card.json").read_text())["sets"]["data"]
    assert card["episodes"] == len(found) and card["rows"] == len(columns["rewards"])
    assert card["return_mean"] == pytest.approx(np.mean([e.rewards.sum() for e in found]))
    assert main(command.split()) == 0  # nothing to do
    before = Path("minari/mine/pole/data-v0/data/main_data.hdf5").stat().st_mtime_ns
    assert main(command.replace("out=a", "out=b").split()) == 2  # the id is taken
    assert Path("minari/mine/pole/data-v0/data/main_data.hdf5").stat().st_mtime_ns == before


def test_d4rl_recipe_with_a_stop_on_the_way(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pendulum, episodes of 50 steps, stopped at step 70: sets of whole episodes, none lost or twice, and a replay
    buffer as SB3 had it.
    """
    sb3 = pytest.importorskip("stable_baselines3", reason="needs the extra `collect`")
    from offrl.collect import train

    command = (
        "collect env=Pendulum-v1 recipe=d4rl steps=160 max_steps=50 snapshot_every=40 rows=100 eval_episodes=1 out=a "
        "format=both quiet=true"
    )
    seen: list[Any] = []
    make = train._model

    def model(*a: Any) -> Any:
        made = make(*a)
        made.batch_size = 8
        seen.append(made)
        return made

    monkeypatch.setattr(train, "_model", model)
    from offrl.collect import record as place

    class Early(place.Stop):
        asked = property(lambda self: bool(seen) and seen[-1].num_timesteps == 70, lambda self, value: None)

    with monkeypatch.context() as patch:
        patch.setattr(place, "Stop", Early)
        assert main(command.split()) == 130
    folder = Path("a/train")
    first, _ = stream(folder), seen.clear()
    assert [e.mark for e in first] == [50]  # the second episode was under way
    assert main(command.split()) == 0
    episodes = stream(folder)
    assert [e.mark for e in episodes] == [50, 120] and same(episodes[:1], first)  # 70 + 50; the third is not whole
    assert len({e.columns["observations"].tobytes() for e in episodes}) == len(episodes)
    buffer = seen[0].replay_buffer  # refilled with the first episode, then SB3's own rows of the second
    rows = train.columns_of(episodes)
    np.testing.assert_array_equal(buffer.observations[:100, 0], rows["observations"])
    np.testing.assert_array_equal(buffer.next_observations[:100, 0], rows["next_observations"])
    np.testing.assert_allclose(buffer.actions[:100, 0] * 2, rows["actions"], atol=1e-6)
    np.testing.assert_array_equal(buffer.dones[:100, 0], rows["truncations"])
    np.testing.assert_array_equal(buffer.timeouts[:100, 0], rows["truncations"])
    assert [s.step for s in train.snapshots(folder)] == [0, 40, 80, 120, 160]
    cards = json.loads(Path("a/card.json").read_text())["sets"]
    assert list(cards) == ["random", "medium-replay", "medium", "medium-expert", "expert", "full-replay"]
    assert cards["medium-expert"]["rows"] == 200 and cards["full-replay"]["rows"] == 100
    for name in cards:
        ours = [
            load_dataset(DatasetConfig(name=n)) for n in (f"a/pendulum-v1-{name}.hdf5", f"offrl/pendulum-v1/{name}-v0")
        ]
        assert ours[0].fingerprint == ours[1].fingerprint and len(ours[0].columns["rewards"]) == cards[name]["rows"]
    assert sb3 is not None


def test_state_of_training_is_restored_to_the_bit(home: Path) -> None:
    sb3 = pytest.importorskip("stable_baselines3", reason="needs the extra `collect`")
    from offrl.collect.train import _restore, _state

    def made(seed: int) -> Any:
        return sb3.SAC(
            "MlpPolicy", "Pendulum-v1", device="cpu", seed=seed, learning_starts=5, batch_size=8, buffer_size=100
        )

    one, two = made(0), made(1)
    one.learn(20)
    tensors, meta = _state(one)
    assert any("exp_avg" in k for k in tensors) and "log_ent_coef" in tensors
    _restore(two, tensors, meta, 20)
    again, _ = _state(two)
    assert set(again) == set(tensors) and all(torch.equal(again[k], tensors[k]) for k in tensors)
    assert two.num_timesteps == 20 and two._n_updates == one._n_updates > 0
    two.learn(3, reset_num_timesteps=False)
    # the optimiser still holds the tensor that is trained
    assert not torch.equal(two.log_ent_coef, tensors["log_ent_coef"])


@pytest.mark.slow
def test_discrete_recipe(home: Path) -> None:
    pytest.importorskip("stable_baselines3", reason="needs the extra `collect`")
    command = (
        "collect env=CartPole-v1 recipe=d4rl steps=700 snapshot_every=300 rows=200 eval_episodes=2 out=a quiet=true"
    )
    assert main(command.split()) == 0
    data = load_dataset(DatasetConfig(name="a/cartpole-v1-full-replay.hdf5"))
    assert data.spec.discrete and data.spec.num_actions == 2
    card = json.loads(Path("a/card.json").read_text())["sets"]["medium"]
    assert card["policy"] == "ppo" and "infos/action_log_probs" in card["columns"]


# ----------------------------------------------------------------------------------------------------------- OGBench


def test_cells_of_a_maze() -> None:
    maze = np.array([[1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [1, 1, 1, 0, 1], [1, 0, 0, 0, 1], [1, 1, 1, 1, 1]])
    free, vertices = mazes.cells(maze)
    assert free == [(1, 1), (1, 2), (1, 3), (2, 3), (3, 1), (3, 2), (3, 3)]
    assert vertices == [(1, 1), (1, 3), (3, 1), (3, 3)]  # two ends and two corners
    assert mazes.at_distance(maze, (1, 1), 3) == [(2, 3)] and mazes.at_distance(maze, (1, 1), 4) == [(3, 3)]
    assert mazes.at_distance(maze, (1, 1), 9) == [] and mazes.at_distance(maze, (1, 1), 0) == [(1, 1)]


def test_point_maze_is_recorded_as_ogbench_does(
    home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ogbench", reason="needs the extra `ogbench`")
    monkeypatch.setattr(goals, "LENGTH", 301)
    command = "collect env=pointmaze-medium-v0 recipe=ogbench episodes=10 quiet=true"
    assert main([*command.split(), "out=a"]) == 0
    with np.load("a/pointmaze-medium-navigate-v0.npz") as file:
        data = dict(file)
    assert (
        set(data) == {"observations", "actions", "terminals", "qpos", "qvel"}
        and data["observations"].dtype == np.float32
    )
    np.testing.assert_array_equal(np.flatnonzero(data["terminals"]), 301 * np.arange(1, 11) - 1)
    np.testing.assert_array_equal(data["qpos"], data["observations"])  # the point observes where it is
    inner = np.flatnonzero(~data["terminals"])
    moved = data["observations"][inner + 1] - data["observations"][inner]
    assert np.corrcoef(moved[:, 0], data["actions"][inner, 0])[0, 1] > 0.8
    assert np.load("a/pointmaze-medium-navigate-v0-val.npz")["terminals"].sum() == 1
    ours = load_dataset(DatasetConfig(name="a/pointmaze-medium-navigate-v0.npz"))
    assert len(ours.columns["rewards"]) == 3010
    if REFERENCE.is_file():
        with np.load(REFERENCE) as file:
            theirs = dict(file)
        np.testing.assert_allclose(data["actions"].std(0), theirs["actions"].std(0), atol=0.05)
        np.testing.assert_allclose(np.abs(data["actions"]).mean(0), np.abs(theirs["actions"]).mean(0), atol=0.05)
    monkeypatch.setattr(shard_files, "SHARD_SECONDS", 0.0)  # a shard for each episode
    assert main([*command.replace("episodes=10", "episodes=3").split(), "out=b"]) == 0
    np.testing.assert_array_equal(np.load("b/pointmaze-medium-navigate-v0.npz")["actions"], data["actions"][:903])
    fails(capsys, "collect env=antmaze-medium-v0 recipe=ogbench", "experts", "pointmaze-medium-v0")
    fails(capsys, "collect env=pointmaze-medium-v0 recipe=ogbench kind=play", "navigate")
    fails(capsys, "collect env=visual-cube-single-v0 recipe=ogbench", "images")


@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_cube_oracles() -> None:
    """The cube is carried about: its place (numbers 19 and 20 of the observation) changes within an episode."""
    pytest.importorskip("ogbench", reason="needs the extra `ogbench`")
    import ogbench.manipspace  # noqa: F401 - registers the environments

    env = gym.make("cube-single-v0", terminate_at_goal=False, mode="data_collection", max_episode_steps=150)
    found = {}
    for kind in ("play", "noisy"):
        config = CollectConfig(env="cube-single-v0", kind=kind)
        with goals.numpy_seed(3):
            found[kind] = as_episode(player(config, env)(env, config, 3)).columns
        assert found[kind]["observations"].shape == (150, 28) and found[kind]["terminals"].sum() == 1
        assert found[kind]["observations"][:, 19:21].std(0).max() > 0.3  # tenths of a metre; a cube that lies has 0.00
    play, noisy = (np.abs(np.diff(found[k]["actions"], axis=0)).mean() for k in ("play", "noisy"))
    assert noisy > play  # independent noise is rougher
    with goals.numpy_seed(3):
        again = as_episode(player(config, env)(env, config, 3)).columns
    for name, values in found["noisy"].items():
        np.testing.assert_array_equal(again[name], values, name)  # the random actions too


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["play", "noisy"])
@pytest.mark.filterwarnings("ignore:.*precision lowered")
def test_scene_and_puzzle_oracles(kind: str) -> None:
    """Parts are moved by the oracles of their kinds, and the states of the buttons are kept."""
    pytest.importorskip("ogbench", reason="needs the extra `ogbench`")
    import ogbench.manipspace  # noqa: F401 - registers the environments

    for name, steps in (("scene-v0", 700), ("puzzle-3x3-v0", 250)):
        env = gym.make(name, terminate_at_goal=False, mode="data_collection", max_episode_steps=steps)
        config = CollectConfig(env=name, kind=kind)
        cube, drawer = 0.0, 0.0
        # which parts an episode moves depends on the processor's last digits: one in ten leaves some alone
        for seed in range(2, 7):
            with goals.numpy_seed(seed):
                found = as_episode(player(config, env)(env, config, seed)).columns
            assert found["terminals"].sum() == 1 and found["button_states"].dtype == np.int64
            pressed = len(np.unique(found["button_states"], axis=0)) >= 3
            if name == "scene-v0":
                assert in_sight(found["qpos"])
                # or window
                cube, drawer = (
                    np.ptp(found["qpos"][:, part], axis=0).max() for part in (slice(14, 17), slice(-2, None))
                )
            if pressed and (name != "scene-v0" or (cube > 0.1 and drawer > 0.05)):  # metres
                break
        else:
            pytest.fail(f"{name}: no episode of five moved its parts")


def test_the_scenes_cube_must_be_in_sight() -> None:
    seen = np.zeros((3, 23))
    assert in_sight(seen)
    right, left, drawer = seen.copy(), seen.copy(), seen.copy()
    right[1, 15] = 0.3
    left[2, 15:17] = -0.35, 0.02
    drawer[2, 15:17] = -0.35, 0.07
    assert not in_sight(right) and not in_sight(left) and in_sight(drawer)
