"""What stands around training on images: fine-tuning, recording, and refusals of what reads numbers alone."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import gymnasium as gym
import h5py
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from offrl.cli.main import main
from offrl.data import load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.fit import check_fit
from offrl.data.samplers.transitions import TransitionSampler, windows
from offrl.data.store import StreamSpec
from offrl.data.transforms.apply import apply_transforms
from offrl.data.transforms.columns import normalize_observations
from offrl.data.transforms.reward_labels import episode_columns
from offrl.envs.drawn import TASKS, WORLDS
from offrl.errors import UserError
from offrl.finetuning.play.environments import Play
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.replay.batches import MixedBatches
from offrl.finetuning.replay.ring import Ring
from offrl.finetuning.start import spec_of
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.interop import policies
from offrl.ope.problem import make_problem
from offrl.relabel.actions import label_actions
from offrl.relabel.bradley_terry import check_pairs
from offrl.settings.dataset import DatasetConfig
from offrl.tasks.entries import PIXELS, VECTOR
from offrl.tasks.environments import choose_opengl, flattener

LENGTHS = (4, 2, 1, 5)
ROWS = sum(LENGTHS)
STATE = "offrl.envs.drawn:offrl/DrawnPendulumState-v0"
DICT = "offrl.envs.drawn:offrl/DrawnPointMassDict-v0"


def data(numbers: bool = True, frames: int = 1) -> tuple[Dataset, list[dict[str, np.ndarray]]]:
    """Episodes of images 6 x 6, with or without two numbers, and their observations [T + 1]."""
    g = np.random.default_rng(0)
    episodes = [
        {
            "front": g.integers(0, 256, (n + 1, 6, 6, 3), np.uint8),
            "state": g.normal(size=(n + 1, 2)).astype(np.float32),
        }
        for n in LENGTHS
    ]
    names = ("front", "state") if numbers else ("front",)
    ends = np.zeros(ROWS, bool)
    ends[np.cumsum(LENGTHS) - 1] = True
    dataset = from_arrays(
        {name: np.concatenate([e[name][:-1] for e in episodes]) for name in names},
        g.uniform(-1, 1, (ROWS, 1)).astype(np.float32),
        np.arange(ROWS, dtype=np.float32),
        np.zeros(ROWS, bool),
        truncations=ends,
        next_observations={name: np.concatenate([e[name][1:] for e in episodes]) for name in names},
    )
    return apply_transforms([dataset], DatasetConfig(frames=frames)), episodes


def played(dataset: Dataset, episodes: list[dict[str, np.ndarray]]) -> list[Turn]:
    """The same episodes as turns of one environment."""
    kind = np.dtype([(VECTOR, np.float32, (2,)), ("front", np.uint8, (6, 6, 3))])
    turns, actions = [], dataset.columns["actions"].numpy()
    for episode in episodes:
        rows = np.zeros(len(episode["front"]), kind)
        rows[VECTOR], rows["front"] = episode["state"], episode["front"]
        for t in range(len(rows) - 1):
            over, row = np.array([t == len(rows) - 2]), len(turns)
            no, reward = np.zeros(1, bool), np.array([float(row)])
            turns.append(
                Turn(
                    rows[t][None],
                    actions[row][None],
                    reward,
                    rows[t + 1][None],
                    no,
                    over,
                    ~no,
                    [],
                    *2 * [reward * np.nan],
                    no,
                )
            )
    return turns


@pytest.mark.parametrize("n_step", [1, 3])
def test_played_observations_are_those_of_the_data(n_step: int) -> None:
    dataset, episodes = data(frames=3)
    sampler = TransitionSampler(n_step=n_step)
    rows = Rows(dataset.spec, columns_for(dataset.spec, sampler, "it"), 1, 1, returns_of(sampler, 0.9), sampler)
    ring = Ring(rows.columns, 1, ROWS, torch.device("cpu"))
    for turn in played(dataset, episodes):
        ring.add(*rows.take(turn))
    taken: Any = ring.take(torch.arange(ROWS)[None])
    source: Any = sampler.prepare(dataset)
    every: Any = source.take(torch.arange(ROWS)) if n_step == 1 else windows(source, torch.arange(ROWS), n_step)
    assert set(taken) == set(every)
    for name, column in every.items():
        if isinstance(column, dict):
            assert list(column) == list(taken[name]) == [VECTOR, "front"]
            for stream, value in column.items():
                assert torch.equal(taken[name][stream][0], value), (name, stream)
        else:
            assert torch.equal(taken[name][0], column), name


@pytest.mark.parametrize("mixing", [None, 0.5, 0.0, 1.0])
def test_batches_of_data_and_play_have_the_same_streams(mixing: float | None) -> None:
    dataset, episodes = data(frames=2)
    sampler = TransitionSampler()
    rows = Rows(dataset.spec, columns_for(dataset.spec, sampler, "it"), 1, 1, returns_of(sampler, 0.9), sampler)
    ring = Ring(rows.columns, 1, 3, torch.device("cpu"))  # overwritten
    for turn in played(dataset, episodes):
        ring.add(*rows.take(turn))
    batches = MixedBatches(ring, sampler, sampler.prepare(dataset), torch.tensor([7]), 8, mixing)
    batch: Any = batches.get(0)
    assert batch["observations"]["front"].shape == (1, 8, 6, 6, 6)
    assert batch["observations"]["front"].dtype == torch.uint8
    for b, reward in enumerate(batch["rewards"][0].int().tolist()):  # a row's number
        whole = dataset.stores["front"].frames(torch.tensor(reward), 2, following=True)
        assert torch.equal(batch["next_observations"]["front"][0, b], whole)
        assert torch.equal(batch["observations"][VECTOR][0, b], dataset.columns["observations"][reward])


def test_the_ring_says_what_it_needs_before_it_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offrl.finetuning.replay.ring.free_bytes", lambda: 1e6)
    with pytest.raises(UserError, match=r"1,000 transitions .* need 0.0 GB; set a smaller capacity="):
        Ring({"observations/front": ((64, 64, 9), torch.uint8)}, 1, 1000, torch.device("cpu"))


def test_play_of_images_goes_on_in_the_middle_of_episodes() -> None:
    task = TASKS["drawn-pendulum"]
    dataset = from_arrays(
        np.zeros((2, 32, 32, 3), np.uint8), np.zeros((2, 1), np.float32), np.zeros(2), np.array([False, True])
    )

    def play() -> Play:
        return Play(task, dataset.spec, [0], 2, 0, 3)

    actions = np.random.default_rng(0).uniform(-1, 1, (5, 2, 1)).astype(np.float32)
    with play() as first, play() as second:
        first.begin()
        for action in actions[:4]:
            turn = first.step(action)
        assert turn.observations.dtype.names == (PIXELS,)
        turns, restarted = second.resume(first.state())
        assert (len(turns), restarted) == (1, [])
        assert first.step(actions[4]).next_observations.tobytes() == second.step(actions[4]).next_observations.tobytes()


def test_an_environment_of_images_needs_data_that_say_what_is_seen() -> None:
    with pytest.raises(UserError, match="dataset=PATH mixing=0"):
        spec_of(TASKS["drawn-pendulum"])


# ---------------------------------------------------------------------------------------------------------- recording


def load(path: Path, keys: tuple[str, ...] = ()) -> Dataset:
    return load_dataset(DatasetConfig(name=str(path), observation_keys=list(keys)), "cpu", True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    (home / "p.py").write_text(
        "import numpy as np\n"
        "def one(observations, rng):\n"
        "    assert observations.shape[1:] in ((3,), (32, 32, 3))\n"
        "    return rng.uniform(-1, 1, (len(observations), 1))\n"
        "def two(observations, rng):\n"
        "    assert observations['pixels'].dtype == np.uint8 and observations['vector'].shape[1] == 2\n"
        "    return rng.uniform(-1, 1, (len(observations['vector']), 2))\n"
    )
    return home


def collected(folder: Path, env: str, name: str, *more: str) -> Path:
    """The file of three episodes of 4 steps."""
    out = folder / f"{env.rpartition('/')[2]}{len(more)}"
    command = f"collect env={env} policy={folder}/p.py:{name} episodes=3 max_steps=4 out={out} quiet=true"
    assert main([*command.split(), *more]) == 0
    return next(out.glob("*.hdf5"))


def test_rendered_images_are_recorded_beside_the_state(folder: Path) -> None:
    path = collected(folder, STATE, "one", "images=true", "size=[32,32]")
    plain, both, pixels = load(path), load(path, ("state", PIXELS)), load(path, (PIXELS,))
    assert not plain.stores and plain.spec.observation_shape == (3,)
    assert pixels.spec.observation_shape == (0,) and list(pixels.stores) == list(both.stores) == [PIXELS]
    draw, store, rows = WORLDS["pendulum"].pictures, both.stores[PIXELS], torch.arange(len(both))
    for column, following in (("observations", False), ("next_observations", True)):
        shown = draw(both.columns[column].numpy())  # rendered 8 times as large
        assert np.array_equal(store.frames(rows, 1, following).numpy(), shown)
    assert bool(pixels.columns["successor_known"].all())
    with pytest.raises(UserError, match=r"no entry 'pixls'.*Did you mean 'pixels'"):
        load(path, ("pixls",))


def test_dict_observations_with_images_are_recorded(folder: Path) -> None:
    path = collected(folder, DICT, "two")
    plain, both = load(path), load(path, (PIXELS, "state"))
    assert not plain.stores and plain.spec.task is not None and plain.spec.task.observation_keys == ("state",)
    assert both.stores[PIXELS].values.shape == (15, 32, 32, 3)  # with what follows each of three episodes
    assert both.spec.task is not None
    check_fit(both.spec, both.spec.task)
    copy = folder / "copy.hdf5"
    assert main(["data", "subset", str(path), str(copy), "episodes=1:3", "quiet=true"]) == 0
    rows = torch.arange(8)
    frames = load(copy, (PIXELS, "state")).stores[PIXELS].frames(rows, 3, following=True)
    assert torch.equal(frames, both.stores[PIXELS].frames(rows + 4, 3, following=True))


def test_environments_of_images_are_recorded(folder: Path) -> None:
    path = collected(folder, "offrl.envs.drawn:offrl/DrawnPendulum-v0", "one")
    dataset = load(path)
    assert list(dataset.stores) == [PIXELS] and dataset.stores[PIXELS].values.shape == (15, 32, 32, 3)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (f"env={STATE} policy=p.py:one camera=top", "add images=true"),
        (f"env={DICT} policy=p.py:two images=true", "have images already"),
        (f"env={DICT} policy=p.py:two format=minari", "HDF5"),
        (f"env={DICT} recipe=d4rl", "policy=FILE.py:NAME"),
    ],
)
def test_mistakes_of_recording_are_told_in_one_line(
    folder: Path, settings: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["collect", *settings.split(), "out=none"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and re.search(words, error), error


DOT = """
import gymnasium as gym
import h5py
import numpy as np
class Dot(gym.Env):
    observation_space, action_space = gym.spaces.Box(-9, 9, (2,)), gym.spaces.Box(-1, 1, (1,))
    render_mode = "rgb_array"
    def __init__(self, render_mode=None):
        pass
    def reset(self, seed=None, options=None):
        return np.zeros(2), {}
    def set_state(self, qpos, qvel):
        assert qpos.shape == qvel.shape == (1,)
        self.place = qpos[0]
    def render(self):
        return np.full((16, 16, 3), self.place, np.uint8)
"""


def states_file(path: Path, **changed: Any) -> Path:
    rows = np.arange(12)
    columns = {"observations": np.ones((12, 2)), "actions": np.zeros((12, 1)), "rewards": np.zeros(12)}
    columns |= {"terminals": rows % 4 == 3, "infos/qpos": rows[:, None] * 20.0, "infos/qvel": rows[:, None] * 1.0}
    with h5py.File(path, "w") as file:
        for name, values in (columns | changed).items():
            if values is not None:
                file[name] = values
    return path


def test_recorded_states_are_rendered(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "dot.py").write_text(DOT)
    out, env = tmp_path / "x.hdf5", f"env={tmp_path}/dot.py:Dot"
    command = ["data", "render", str(states_file(tmp_path / "a.hdf5")), str(out), "size=[8,8]", "quiet=true"]
    assert main([*command, env]) == 0
    dataset = load(out, ("state", PIXELS))
    shown = dataset.stores[PIXELS].values
    assert shown.shape == (12, 8, 8, 3) and shown[:, 0, 0, 0].tolist() == [20 * row for row in range(12)]
    assert dataset.columns["observations"].shape == (12, 2) and not dataset.columns["successor_known"][3]
    for changed, words, text in (
        ({"infos/qvel": None}, [env], "holds no states of MuJoCo"),
        ({}, [], "names no environment: say which its states are of"),
        ({}, ["env=CartPole-v1"], "CartPole-v1 does not take the states of .*row 0"),
        ({"infos/qpos": np.zeros((12, 2))}, [env], "does not take the states"),
    ):
        states_file(tmp_path / "a.hdf5", **changed)
        capsys.readouterr()
        assert main([*command, *words, "force=true"]) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert re.search(text, error), error


@pytest.mark.nightly
def test_rendered_states_are_what_the_environment_showed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "h.py").write_text(
        "import numpy as np\ndef act(observations, rng):\n    return rng.uniform(-1, 1, (len(observations), 3))\n"
    )
    monkeypatch.setenv("MUJOCO_GL", os.environ.get("MUJOCO_GL", ""))  # which is put back after the test
    choose_opengl()
    paths = []
    for k, more in enumerate(([], ["images=true"])):
        words = f"collect env=Hopper-v5 policy={folder}/h.py:act episodes=1 max_steps=4 out={folder}/hop{k} quiet=true"
        if main([*words.split(), *more]):
            pytest.skip("nothing renders on this machine: neither EGL nor OSMesa")
        paths += (folder / f"hop{k}").glob("*.hdf5")
    assert main(["data", "render", str(paths[0]), str(folder / "hop.hdf5"), "quiet=true"]) == 0
    again, shown = (load(path, (PIXELS,)).stores[PIXELS] for path in (folder / "hop.hdf5", paths[1]))
    rows = torch.arange(4)
    difference = again.frames(rows, 1).float() - shown.frames(rows, 1).float()
    assert difference.abs().mean() < 0.1  # of 255: states are recorded as float32


def test_policies_of_images_are_refused_where_there_are_none(folder: Path) -> None:
    class Seeing:
        class algorithm:
            data_spec = data()[0].spec

        def start(self, episodes: int) -> None: ...

        def step(self, carry: None, observations: Any, t: int) -> None: ...

    with pytest.raises(UserError, match="sees front, and here there are numbers alone"):
        policies._check_fit(Seeing(), "it", 2, 1, False, ())
    policies._check_fit(Seeing(), "it", 2, 1, False, ("front",))
    assert policies.load_agents(f"{folder}/p.py:one", observation_dim=3, action_dim=1, discrete=False)


# ----------------------------------------------------------------------------------------------------------- refusals


class Straying(gym.Env):
    """Promises bytes and gives other things."""

    observation_space = gym.spaces.Box(0, 255, (6, 6, 3), np.uint8)
    action_space = gym.spaces.Box(-1, 1, (1,))


@pytest.mark.parametrize("image", [np.ones((6, 6, 3), np.float32), np.ones((3, 6, 6), np.uint8)])
def test_images_other_than_the_space_says_are_refused(image: np.ndarray) -> None:
    flatten = flattener(Straying())[0]
    flatten(np.ones((6, 6, 3), np.uint8))
    with pytest.raises(UserError, match="its space says uint8"):
        flatten(image)


def test_what_reads_numbers_alone_refuses_images() -> None:
    with pytest.raises(UserError, match=r"numbers of observations"):
        make_problem(data()[0], {"a": object()})
    images = data(numbers=False)[0]
    pairs = np.zeros((2, 2), int)
    for call in (lambda: check_pairs(images, pairs, [0, 1], 1), lambda: label_actions(images, images)):
        with pytest.raises(UserError, match=r"observations of numbers only"):
            call()
    with pytest.raises(UserError, match=r"augment=stitch .* has front"):
        apply_transforms([images], DatasetConfig(augment="stitch"))


def test_tables_that_no_environment_gives_are_refused() -> None:
    task = TASKS["drawn-point-mass-dict"]
    streams = (StreamSpec(PIXELS, (32, 32, 3)), StreamSpec("language", (5,)))
    spec = dataclasses.replace(data()[0].spec, streams=streams, action_dim=2)
    with pytest.raises(UserError, match="the table 'language', which"):
        check_fit(spec, task)


# -------------------------------------------------------------------------------------------------------------- data


def test_data_without_numbers_are_normalised_as_they_are() -> None:
    dataset = data(numbers=False)[0]
    assert normalize_observations(dataset).spec.observation_mean is None


def test_streams_that_are_not_named_are_left_out() -> None:
    dataset = data()[0]
    alone = apply_transforms([dataset], DatasetConfig(observation_keys=["state"]))
    assert not alone.stores and not alone.spec.streams and alone.spec.observation_shape == (2,)
    with pytest.raises(UserError, match="joined of front,state"):
        apply_transforms([dataset], DatasetConfig(observation_keys=["front"]))


def test_labellers_see_images() -> None:
    dataset, episodes = data()
    assert np.array_equal(episode_columns(dataset, 4, 6)["front"], episodes[1]["front"][:2])


# ------------------------------------------------------------------------------------------------------------ nightly


@pytest.mark.nightly
@pytest.mark.parametrize("algo", ["iql algo.n_step=3", "td3_bc", "qc"])
def test_fine_tuning_from_images_goes_on_bit_for_bit(
    algo: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where the report goes
    world, g = WORLDS["pendulum"], np.random.default_rng(0)
    states = g.normal(size=(60, 3)).astype(np.float32)
    np.savez(
        tmp_path / "drawn-pendulum.npz",
        observations=world.pictures(states),
        actions=g.uniform(-1, 1, (60, 1)).astype(np.float32),
        rewards=g.normal(size=60),
        terminations=np.zeros(60, bool),
        truncations=np.arange(60) % 20 == 19,
        final_observations=world.pictures(states[:3]),
    )
    train = (
        f"train algo={algo} dataset={tmp_path}/drawn-pendulum.npz dataset.frames=2 steps=6 seeds=2 algo.hidden=[8,8] "
        f"algo.batch_size=4 encoder.width=8 eval.episodes=1 eval.max_steps=4 runs_dir={tmp_path} name=run"
    )
    assert main(train.split()) == 0
    online = f"finetune {tmp_path}/run envs=2 eval.episodes=1 eval.every=99 max_steps=7 runs_dir={tmp_path} mixing=0.5"
    assert main([*online.split(), "steps=40", "name=long"]) == 0
    assert main([*online.split(), "steps=18", "name=short"]) == 0
    assert main(["finetune", f"resume={tmp_path}/short", "steps=40"]) == 0
    for path in sorted((tmp_path / "long" / "policies").iterdir()):
        a, b = load_file(path), load_file(tmp_path / "short" / "policies" / path.name)
        assert all(np.array_equal(a[k], b[k]) for k in a) and a.keys() == b.keys()
    assert main(["finetune", f"{tmp_path}/run", "mode=residual"]) == 2
    assert main(["select", f"{tmp_path}/run"]) == 2
    assert main(["report", f"{tmp_path}/long"]) == 0
