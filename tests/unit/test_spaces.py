"""Spaces of environments against data: the order of Dict entries, numbers of choices, scaled actions, observations that
are no numbers.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import FlattenObservation

import offrl
from offrl import registry
from offrl.data.dataset import DataSpec
from offrl.data.fit import check_fit, settled
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.export.describe import description
from offrl.ope.candidates import run_candidates
from offrl.settings.evaluation import EvalConfig
from offrl.tasks.entries import OWN_ORDER, entries, joined
from offrl.tasks.environments import flattener, resolve_task
from offrl.tasks.task import Task, with_factory

NUMBER = spaces.Box(-9.0, 9.0, (1,))
PLACES = np.random.default_rng(0).normal(size=(400, 2)).astype(np.float32)
TENTH = np.arange(400) % 10 == 9


class Heat(gym.Env):
    """Ten steps; the reward is 1 for an action of the target's sign. Its Dict is not sorted."""

    observation_space = spaces.Dict(OrderedDict(target=NUMBER, noise=NUMBER))
    action_space = spaces.Discrete(2, start=-1)

    def observe(self) -> dict[str, np.ndarray]:
        self.values = self.np_random.normal(size=(2, 1)).astype(np.float32)
        return {"noise": self.values[1], "target": self.values[0]}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action)
        reward = float((action == 0) == (self.values[0, 0] > 0))
        self.t += 1
        return self.observe(), reward, False, self.t == 10, {}


gym.register("OffrlHeat-v0", f"{__name__}:Heat")  # Minari records a place, no class


def env_of(space: spaces.Space, actions: spaces.Space = NUMBER) -> Any:
    made = gym.Env()
    made.observation_space, made.action_space = space, actions
    return made


def data(observations: Any = PLACES, actions: Any = None, **more: Any) -> Any:
    chosen = (PLACES[:, 0] > 0).astype(np.int64) if actions is None else actions
    return offrl.from_arrays(
        observations, chosen, np.ones(len(chosen)), truncations=TENTH[: len(chosen)], name="heat", **more
    )


def train(dataset: Any, folder: Path, name: str, algo: str = "bc", steps: int = 80, **settings: Any) -> Any:
    more = {
        "algo.hidden": [16],
        "algo.batch_size": 64,
        "algo.learning_rate": 0.01,
        "compile": "eager",
        "eval.episodes": 5,
        "eval.workers": 0,
    } | settings
    return offrl.train(
        algo, dataset, seeds=1, steps=steps, quiet=True, name=name, runs_dir=str(folder), settings=more, env=Heat
    )


# ---------------------------------------------------------------------------------------------------- Dict observations


NESTED = spaces.Dict(OrderedDict(z=NUMBER, a=spaces.Dict(OrderedDict(y=NUMBER, x=NUMBER)), n=spaces.Discrete(3)))
VALUE = {"n": 1, "a": {"x": np.array([1.0]), "y": np.array([2.0])}, "z": np.array([3.0])}


@pytest.mark.parametrize(
    "space",
    [
        spaces.Dict({"b": NUMBER, "a": NUMBER}, sort_keys=False),
        spaces.Dict(OrderedDict(b=NUMBER, a=NUMBER)),
        spaces.Dict([("b", NUMBER), ("a", NUMBER)]),
        spaces.Dict(b=NUMBER, a=NUMBER),
        spaces.Dict({"a": spaces.Dict(d=NUMBER, c=NUMBER)}),  # sorted outside alone
    ],
)
def test_a_dict_that_is_not_sorted_is_asked_about(space: spaces.Dict) -> None:
    own = "a/d,a/c" if "b" not in space.spaces else "b,a"
    with pytest.raises(
        UserError, match=rf"as {own} \(its own.*dataset\.observation_keys=\[{own}\] or dataset\.observation_keys=\["
    ):
        flattener(env_of(space))
    assert joined(space, OWN_ORDER) == tuple(own.split(","))
    value = {
        k: {"d": np.array([1.0]), "c": np.array([2.0])} if k == "a" and "/" in own else np.array([float(k == "a")])
        for k in space.spaces
    }
    np.testing.assert_array_equal(flattener(env_of(space), OWN_ORDER)[0](value), spaces.flatten(space, value))


def test_entries_have_one_order_everywhere() -> None:
    keys = ("a", "n", "z")  # sorted, and sorted inside
    assert (
        ["/".join(path) for path, _ in entries(NESTED)]
        == ["a/x", "a/y", "n", "z"]
        == ["/".join(path) for path, _ in entries(VALUE)]
    )
    np.testing.assert_array_equal(flattener(env_of(NESTED), keys)[0](VALUE), [1, 2, 0, 1, 0, 3])
    assert flattener(env_of(NESTED), ("z", "a/y"))[0](VALUE).tolist() == [3.0, 2.0]
    with pytest.raises(UserError, match=r"no entry 'a/w'; they have a, n, z"):
        flattener(env_of(NESTED), ("a/w",))
    # Gymnasium has sorted it: both orders are the same
    assert joined(spaces.Dict({"b": NUMBER, "a": NUMBER})) == ("a", "b")


def test_flat_data_of_a_dict_environment(tmp_path: Path) -> None:
    """The first number is the target, as FlattenObservation gives it."""
    with pytest.raises(
        UserError, match=r"dataset\.observation_keys=\[target,noise\] or dataset\.observation_keys=\[noise,target\]"
    ):
        train(data(), tmp_path, "asked")
    run = train(data(), tmp_path, "named", **{"dataset.observation_keys": ["target", "noise"]})
    assert run.final_scores[0]["return_mean"] > 7.0 and run.spec.task.observation_keys == ("target", "noise")
    policy = run.policy()
    for target in (1.0, -1.0):
        entry = {"noise": np.array([0.2]), "target": np.array([target])}
        assert policy.act(np.array([target, 0.2])) == policy.act(entry) == (0 if target > 0 else -1)
    about = description(policy, False, (), {})
    assert [d["name"] for d in about["inputs"][0]["dimensions"]] == ["target", "noise"]
    assert run.evaluate(env=lambda: FlattenObservation(Heat()), episodes=2).returns.mean() > 7.0


def test_dict_data_of_a_dict_environment(tmp_path: Path) -> None:
    again = train(data({"target": PLACES[:, :1], "noise": PLACES[:, 1:]}), tmp_path, "dict")
    assert again.final_scores[0]["return_mean"] > 7.0 and again.spec.task.observation_keys == ("noise", "target")
    with pytest.raises(
        UserError, match="made of noise,target, and the environment's FlattenObservation joins target,noise"
    ):
        again.evaluate(env=lambda: FlattenObservation(Heat()))
    with pytest.raises(UserError, match=r"joined of noise,target, and dataset\.observation_keys says target,noise"):
        train(
            data({"noise": PLACES[:, 1:], "target": PLACES[:, :1]}),
            tmp_path,
            "both",
            **{"dataset.observation_keys": ["target", "noise"]},
        )


def test_keys_stay_where_the_environment_changes() -> None:
    task = Task("t", env_id="A-v0", observation_keys=("b", "a"))
    other = resolve_task(task, EvalConfig(env="B-v0"))
    assert other is not None and other.observation_keys == ("b", "a") == with_factory(task, Heat, "t").observation_keys


@pytest.mark.filterwarnings("ignore")
def test_minari_data_recorded_through_the_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    minari = pytest.importorskip("minari")
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    env, buffers = FlattenObservation(gym.make("OffrlHeat-v0")), []
    for seed in range(3):
        rows, actions, over = [env.reset(seed=seed)[0]], [], False
        while not over:
            actions.append(np.int64(0 if rows[-1][0] > 0 else -1))
            row, _, _, over, _ = env.step(actions[-1])
            rows.append(row)
        ends, n = [*[False] * 9, True], 10
        buffers.append(
            EpisodeBuffer(
                observations=np.stack(rows),
                actions=actions,
                rewards=[1.0] * n,
                terminations=[False] * n,
                truncations=ends,
            )
        )
    minari.create_dataset_from_buffers(
        "test/heat-v0", buffers, observation_space=env.observation_space, action_space=env.action_space
    )
    metadata = tmp_path / "test" / "heat-v0" / "data" / "metadata.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"env_spec": env.spec.to_json()}))  # type: ignore[union-attr]
    loaded = offrl.load_dataset("test/heat-v0")
    assert (
        loaded.spec.task is not None
        and loaded.spec.task.observation_keys == OWN_ORDER
        and loaded.spec.first_choice == -1
    )
    assert any("environment's own order" in note for note in loaded.notes)
    assert (
        (loaded.columns["observations"][:, 0] > 0).long() == loaded.columns["actions"]
    ).all() and loaded.spec.num_actions == 2
    assert settled(loaded.spec, Heat()).task.observation_keys == ("target", "noise")  # type: ignore[union-attr]


# --------------------------------------------------------------------------------------------------------- actions


def lever(start: int, count: int = 3) -> Any:
    class Lever(gym.Env):
        observation_space, action_space = NUMBER, spaces.Discrete(count, start=start)

    return Lever()


@pytest.mark.parametrize(
    ("numbers", "start", "first"),
    [
        ((-1, 0, 1), -1, 0),
        ((0, 1, 2), -1, 0),
        ((-1, 0), -1, 0),
        ((1, 2, 3), 1, 0),
        ((0, 1), 1, 0),
        ((4, 5), 4, 0),
        ((5, 6), 4, 1),
    ],
)
def test_choices_are_counted_from_0(numbers: tuple[int, ...], start: int, first: int) -> None:
    task = Task("t", env_factory=lambda: lever(start))
    made = data(PLACES[: len(numbers)], np.array(numbers), task=task)
    assert (
        made.columns["actions"].tolist() == [n + first - min(numbers) for n in numbers] and made.spec.num_actions == 3
    )
    told = [n for n in made.notes if "counted from 0" in n]
    assert made.spec.first_choice == start and bool(told) == (made.columns["actions"].tolist() != list(numbers))


@pytest.mark.parametrize(("numbers", "start"), [((0, 1), -1), ((1, 2), 1)])
def test_choices_of_two_numberings_are_asked_about(numbers: tuple[int, ...], start: int) -> None:
    actions, task = np.array(numbers), Task("t", env_factory=lambda: lever(start))
    with pytest.raises(UserError, match=rf"may be its numbers or count from 0.*actions - \({start}\).*num_actions=3"):
        data(PLACES[:2], actions, task=task)
    with pytest.raises(UserError, match="may be its numbers or count from 0"):
        settled(data(PLACES[:2], actions).spec, lever(start), data(PLACES[:2], actions))
    stated = data(PLACES[:2], actions, task=task, num_actions=3)
    assert stated.columns["actions"].tolist() == list(numbers) and stated.spec.first_choice == start


def test_a_policy_acts_in_the_environments_numbers(tmp_path: Path) -> None:
    run = train(data(), tmp_path, "lever", **{"dataset.observation_keys": ["target", "noise"]})
    policy, env, total, over = run.policy(), Heat(), 0.0, False
    observation, _ = env.reset(seed=0)
    while not over:
        observation, reward, _, over, _ = env.step(policy.act(observation))
        total += reward
    assert (
        total >= 7.0
        and policy.act(np.array([2.0, 0.0])) == 0 == policy.predict(np.array([2.0, 0.0]), deterministic=True)[0]
    )
    about = description(policy, False, (), {})["outputs"][0]
    assert (about["first"], about["choices"]) == (-1, 2) and "-1 to 0" in about["meaning"]
    exported = pytest.importorskip("torch").export.load(run.export("pt2")).module()
    assert exported(pytest.importorskip("torch").tensor([[2.0, 0.0], [-2.0, 0.0]])).tolist() == [0, -1]


@pytest.mark.parametrize(
    ("low", "high", "size", "told"),
    [(-2, 2, 1.0, True), (-1, 5, 1.0, True), (-2, 2, 0.7, False), (-2, 2, 1.5, False), (-1, 1, 1.0, False)],
)
def test_actions_that_look_scaled(
    low: float, high: float, size: float, told: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    actions = np.clip(PLACES[:, :1], -size, size)
    task = Task("t", env_factory=lambda: env_of(NUMBER, spaces.Box(low, high, (1,))))
    data(actions=actions, task=task)
    line = capsys.readouterr().err
    assert ("end at exactly -1 or 1" in line and f"low=[{low}], high=[{high}]" in line) == told
    data(actions=actions, action_low=low, action_high=high)
    assert ("end at exactly -1 or 1" in capsys.readouterr().err) == told
    spec = data(actions=np.clip(PLACES[:, :1], -1, 1)).spec
    check_fit(replace(spec, observation_shape=(1,)), Task("t"), env_of(NUMBER, spaces.Box(low, high, (1,))))
    assert ("taken to lie in [-1, 1]" in capsys.readouterr().err) == ((low, high) != (-1, 1))


@pytest.mark.parametrize(
    ("space", "cure"),
    [
        (spaces.Discrete(16), r"numbers from 0 to 15.*numpy\.eye\(16\)\[states\]"),
        (spaces.Discrete(4, start=2), r"numbers from 2 to 5.*numpy\.eye\(4\)\[states - \(2\)\]"),
        (spaces.MultiDiscrete([3, 2]), r"a MultiDiscrete.*makes 5 numbers.*gymnasium\.spaces\.flatten"),
        (spaces.MultiBinary(3), r"a MultiBinary.*gymnasium\.spaces\.flatten"),
        (spaces.Tuple([NUMBER, spaces.Discrete(2)]), r"a Tuple.*makes 3 numbers.*gymnasium\.spaces\.flatten"),
        (spaces.Dict(a=NUMBER, b=spaces.Discrete(3)), r"a Dict.*makes 4 numbers"),
        (spaces.Sequence(NUMBER), "kind Sequence cannot be made into one array: wrap"),
        (spaces.Dict(a=spaces.Sequence(NUMBER)), "entry a of kind Sequence.*observation_keys"),
    ],
)
def test_observations_that_are_no_box(space: spaces.Space, cure: str) -> None:
    spec = replace(
        data(PLACES[:, :1], PLACES[:, :1], clip_actions=True, action_low=-9, action_high=9).spec, observation_shape=(2,)
    )
    with pytest.raises(UserError, match=cure):
        check_fit(spec, Task("t"), env_of(space))


# --------------------------------------------------------------------------------------------------------- values


def test_value_is_the_checkpoints_critic(tmp_path: Path) -> None:
    dataset = data(actions=np.clip(PLACES[:, :1], -1, 1) * 2, action_low=-2, action_high=2)
    run = offrl.train(
        "iql", dataset, seeds=2, steps=5, quiet=True, name="q", runs_dir=str(tmp_path), env="none",
        settings={"algo.hidden": [8], "algo.batch_size": 16, "compile": "eager", "dataset.reward_scale": 4.0},
    )  # fmt: skip
    policy, own = run.policy(seed=1), next(p for name, p in run_candidates(run).items() if name.endswith("seed_1@5"))
    expected = own.own_value(PLACES[:5], PLACES[:5, :1])
    assert expected is not None and expected.std() > 0
    # in recorded rewards
    np.testing.assert_allclose(policy.value(PLACES[:5], PLACES[:5, :1]), expected / 4.0, rtol=1e-6)
    assert policy.value(PLACES[0], PLACES[0, :1]) == pytest.approx(expected[0] / 4.0, rel=1e-5)
    np.testing.assert_array_equal(
        offrl.load(run.dir).policy(seed=1).value(PLACES[:5], PLACES[:5, :1]), policy.value(PLACES[:5], PLACES[:5, :1])
    )
    with pytest.raises(UserError, match=r"actions of 5 observations have shape \(4, 1\); 1 numbers each are due"):
        policy.value(PLACES[:5], PLACES[:4, :1])
    file = run.dir / "policies" / "seed_1.safetensors"
    with pytest.raises(
        UserError, match=r"file without its critic.*offrl\.load\(\"runs/NAME\"\)\.policy\(seed=0\)\.value"
    ):
        TrainedPolicy.load(file).value(PLACES[:5], PLACES[:5, :1])
    for checkpoint in (run.dir / "checkpoints").iterdir():
        checkpoint.unlink()
    with pytest.raises(UserError, match=r"checkpoint of update 5 under .*checkpoints, which is not there"):
        offrl.load(run.dir).policy().value(PLACES[0], PLACES[0, :1])


def test_an_algorithm_without_q_says_so() -> None:
    kind = registry.get("algo", "bc")
    algorithm = kind(kind.Config(hidden=[4]), DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,)))
    with pytest.raises(UserError, match=r"bc has no Q\(s, a\)"):
        TrainedPolicy(algorithm, algorithm.init(0), 0).value(PLACES[0], 0.5)
    with pytest.raises(UserError, match=r"takes \(2,\) \(a state's number, one-hot: numpy\.eye\(2\)\[number\]\)"):
        TrainedPolicy(algorithm, algorithm.init(0), 0).act(1)


def test_a_task_of_before_has_no_first_choice() -> None:
    spec = DataSpec((2,), 1, discrete=True, num_actions=2, task=Task("t", env_id="A-v0"))
    text = json.loads(json.dumps(spec.to_json()))
    del text["task"]["action_start"]
    assert DataSpec.from_json(text).first_choice == 0 == spec.first_choice
