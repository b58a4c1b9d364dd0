"""Windows of observations and actions: in batches, in policies, in files, and the delay that data show."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl import registry, rng
from offrl.algorithm import Algorithm, stack
from offrl.cli.main import main
from offrl.data import load_dataset
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.goals import GoalSampler, Mix
from offrl.data.samplers.transitions import TransitionSampler
from offrl.data.transforms.apply import apply_transforms
from offrl.envs.delayed import DELAY, Delay, generate, pendulum
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.export import check
from offrl.export.describe import description
from offrl.export.graph import PolicyGraph
from offrl.finetuning.play.turns import Turn
from offrl.finetuning.transitions import Rows, columns_for, returns_of
from offrl.ope.problem import make_problem
from offrl.runs.record import complete, directory
from offrl.runs.run import SavedRun
from offrl.settings.compose import compose, parse
from offrl.settings.dataset import DatasetConfig
from offrl.training.setup import make_algorithm
from offrl.training.step import Step
from tests.support.documents import ROOT, commands

LENGTH, ROWS = 6, 18  # of an episode, and of all
ENCODED = [name for name, kind in registry.names("algo").items() if kind.traits.observations == "encoded"]
ENCODED = [name for name in ENCODED if not registry.get("algo", name).traits.goal_conditioned]
SLOW = [pytest.param(name, marks=() if name in ("iql", "chunk_bc") else pytest.mark.nightly) for name in ENCODED]


def data(discrete: bool = False, rows: int = ROWS, **settings: Any) -> Dataset:
    """Episodes of two numbers whose ends are time-outs with known successors; actions in [-2, 4], or three choices."""
    draw = np.random.default_rng(0)
    observations = draw.normal(size=(rows + 1, 2)).astype(np.float32)
    actions = draw.integers(0, 3, rows) if discrete else draw.uniform(-2.0, 4.0, (rows, 1)).astype(np.float32)
    after = observations[1:].copy()
    after[LENGTH - 1 :: LENGTH] += 5.0
    bounds: dict[str, Any] = {} if discrete else {"action_low": -2.0, "action_high": 4.0}
    dataset = offrl.from_arrays(
        observations=observations[:-1],
        actions=actions,
        rewards=draw.normal(size=rows),
        truncations=np.arange(rows) % LENGTH == LENGTH - 1,
        next_observations=after,
        **bounds,
    )
    return apply_transforms([dataset], DatasetConfig(**settings))


def config(name: str, *settings: str) -> Any:
    small = ["batch_size=8", "hidden=[16]", "critic_hidden=[16]", "length=4", "action_steps=1", "candidates=4"]
    fields = {f.name for f in dataclasses.fields(registry.get("algo", name).Config)}
    chosen = [f"algo.{s}" for s in small if s.partition("=")[0] in fields]
    return compose(parse([f"algo={name}", *chosen, "eval.env=none", *settings]))


def made(name: str, dataset: Dataset, *settings: str) -> Algorithm:
    chosen = config(name, *settings)
    kind = registry.get("algo", name)
    return make_algorithm(dataclasses.replace(chosen, algo=kind.fit_config(chosen.algo, dataset, None)), dataset)


def expected(dataset: Dataset, row: int, following: bool) -> np.ndarray:
    """The window of a row of `data`, or its successor's, by loops over single steps."""
    spec, first = dataset.spec, row - row % LENGTH
    states = dataset.columns["observations"].numpy().copy()
    if following:  # behind an episode's end stands the next one's start
        states = np.insert(states, row + 1, dataset.columns["next_observations"][row], 0)
    newest, out = row + following, []
    for i in reversed(range(spec.history)):
        out += list(states[max(newest - i * spec.history_stride, first)])
    for i in range(spec.history_actions, 0, -1):
        action = dataset.columns["actions"][max(newest - i, first)]
        known = newest - i >= first
        encoded = np.eye(3)[int(action)] if spec.discrete else action.numpy()
        out += list(encoded * known)
    return np.array(out, np.float32)


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize(("history", "stride", "actions"), [(3, 1, 2), (2, 2, 0), (1, 1, 3)])
def test_a_batch_holds_each_row_s_window_and_its_successor_s(
    discrete: bool, history: int, stride: int, actions: int
) -> None:
    dataset = data(discrete, history=history, history_stride=stride, history_actions=actions)
    batch = TransitionSampler().prepare(dataset).take(torch.arange(ROWS))
    for name, following in (("observations", False), ("next_observations", True)):
        for row in range(ROWS):
            np.testing.assert_array_equal(batch[name][row], expected(dataset, row, following), f"{name} {row}")


def test_a_window_by_hand() -> None:
    dataset = offrl.from_arrays(
        observations=np.arange(4.0)[:, None],
        actions=np.array([[0.1], [0.2], [0.3], [0.4]]),
        rewards=np.zeros(4),
        truncations=np.arange(4) == 3,
        action_low=-1.0,
        action_high=1.0,
    )
    dataset = apply_transforms([dataset], DatasetConfig(history=2, history_stride=2, history_actions=2))
    batch = TransitionSampler().prepare(dataset).take(torch.arange(3))
    windows = [[0, 0, 0, 0], [0, 1, 0, 0.1], [0, 2, 0.1, 0.2], [1, 3, 0.2, 0.3]]
    torch.testing.assert_close(batch["observations"], torch.tensor(windows[:3]))
    torch.testing.assert_close(batch["next_observations"], torch.tensor(windows[1:]))


def test_goals_of_their_own_are_no_windows() -> None:
    dataset = data(history=3)
    columns = {**dataset.columns, "achieved_goals": dataset.columns["observations"][:, :1]}
    dataset = dataclasses.replace(dataset, columns=columns, spec=dataclasses.replace(dataset.spec, goal_dim=1))
    sampler = GoalSampler(value=Mix(0.0, 1.0, 0.0))
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), 8)
    assert batch["observations"].shape == (8, 6) and batch["value_goals"].shape == (8, 1)
    assert made("gcbc", dataset).spec.observation_shape == (6,)


@pytest.mark.parametrize("name", SLOW)
@pytest.mark.parametrize("encoder", ["stack", "gru"])
def test_updates_learn_from_windows(name: str, encoder: str) -> None:
    dataset = data(history=3, history_actions=2)
    algorithm = made(name, dataset, f"encoder={encoder}", *(["encoder.width=12"] if encoder == "gru" else []))
    assert algorithm.spec.observation_shape == ((12,) if encoder == "gru" else (8,))
    dataset = dataclasses.replace(dataset, spec=algorithm.data_spec)
    source = algorithm.sampler().prepare(dataset)
    states = []
    for seeds in ([0], [0, 1]):
        step = Step(algorithm, source, batch_size=8, replicas=len(seeds))
        with torch.no_grad():
            states.append(step.run(stack([algorithm.init(seed) for seed in seeds]), {}, 0, 2)[0])
    before = algorithm.init(0)
    for module, params in before.params.items():
        for key, value in params.items():
            torch.testing.assert_close(states[0].params[module][key][0], states[1].params[module][key][0],
                                       rtol=0, atol=2e-3)  # fmt: skip
            assert module != "encoder" or not torch.equal(states[0].params[module][key][0], value), key


def policy(encoder: str, discrete: bool = False, name: str = "iql") -> tuple[TrainedPolicy, Dataset]:
    dataset = data(discrete, rows=60, history=2, history_stride=1 + (encoder == "stack"), history_actions=3,
                   normalize_observations=True)  # fmt: skip
    algorithm = made(name, dataset, f"encoder={encoder}")
    return TrainedPolicy(algorithm, algorithm.init(0), 0), dataset


def raw(dataset: Dataset, rows: slice) -> np.ndarray:
    moments = dataset.spec.observation_moments
    assert moments is not None
    return (dataset.columns["observations"][rows].numpy() * moments[1] + moments[0]).astype(np.float32)


@pytest.mark.parametrize("encoder", ["stack", "gru"])
@pytest.mark.parametrize("discrete", [False, True])
def test_a_policy_sees_the_windows_of_the_data(encoder: str, discrete: bool, tmp_path: Path) -> None:
    """Each episode of the data is played again: what acts in it is what a batch holds of that row."""
    acting, dataset = policy(encoder, discrete)
    acting.save(tmp_path / "policy.safetensors")
    acting = TrainedPolicy.load(tmp_path / "policy.safetensors")
    spec, actions = acting.spec, dataset.columns["actions"]
    assert spec.history_actions == 3 and (spec.encoder is None) == (encoder == "stack")
    played = dataclasses.replace(dataset, spec=spec)
    windows: Any = TransitionSampler().prepare(played).take(torch.arange(LENGTH))["observations"]
    seen = []

    class Recorded(type(acting.actor.inner)):  # type: ignore[misc]
        def act(self, carry: Any, observations: Any, key: Any, *, explore: bool) -> Any:
            seen.append(observations)
            return actions[len(seen) - 1][None], carry

    acting.actor.inner.__class__ = Recorded  # type: ignore[attr-defined]
    carry = acting.start(1)
    for t, observation in enumerate(raw(dataset, slice(0, LENGTH))):
        _, carry = acting.step(carry, observation[None], t)
    due = windows if encoder == "stack" else acting.actor.apply("encoder", windows)
    torch.testing.assert_close(torch.cat(seen), due, rtol=0, atol=1e-6)


@pytest.mark.parametrize("encoder", ["stack", "gru"])
@pytest.mark.parametrize("name", ["iql", "chunk_bc"])
def test_an_exported_policy_acts_as_python_for_50_steps(encoder: str, name: str) -> None:
    acting, dataset = policy(encoder, name=name)
    spec, graph = acting.spec, PolicyGraph(acting, explore=False)
    text = description(acting, False, (), {})
    entry = text["inputs"][0]
    assert text["version"] == 2 and len(entry["dimensions"]) == spec.window_dim == entry["shape"][1]
    assert [d["steps_back"] for d in entry["dimensions"]] == [2 - (encoder == "gru")] * 2 + [0, 0, 3, 2, 1]
    middle = np.array(entry["window"]["action_at_start"], np.float32)
    assert middle == [1.0]
    observations, before = raw(dataset, slice(0, 50)), [middle] * 3
    stride = entry["window"]["stride"]
    for t, observation in enumerate(observations):
        window = np.concatenate([observations[max(0, t - stride)], observation, *before[-3:]])
        action = acting.act(observation)
        out = graph(torch.from_numpy(window)[None]).numpy()[0]
        np.testing.assert_allclose(out if name == "iql" else out[0], action, rtol=0, atol=1e-5)
        before.append(action)

    def runner(x: np.ndarray, noise: Any) -> np.ndarray:
        return graph(torch.from_numpy(x)).numpy()

    assert not check.check(acting, False, runner, (), "torch").failure


@pytest.mark.parametrize("encoder", ["stack", "gru"])
def test_played_windows_are_those_of_the_data(encoder: str) -> None:
    dataset = data(history=3, history_actions=2)
    dataset = dataclasses.replace(dataset, spec=made("iql", dataset, f"encoder={encoder}").data_spec)
    sampler = TransitionSampler()
    columns = columns_for(dataset.spec, sampler, "it")
    rows = Rows(dataset.spec, columns, 1, 1, returns_of(sampler, 0.9), sampler)
    due: Any = sampler.prepare(dataset).take(torch.arange(ROWS))
    no, one = np.zeros(1, bool), np.zeros(1)
    parts = [dataset.columns[n].numpy() for n in ("observations", "actions", "next_observations")]
    for row in range(ROWS):
        before, action, after = (x[row : row + 1] for x in parts)
        shown = rows.observed(before)
        over = np.array([row % LENGTH == LENGTH - 1])
        _, taken = rows.take(Turn(before, action, one, after, no, over, ~no, [], one, one, no))
        for name in ("observations", "next_observations"):
            value = due[name] if encoder == "stack" else due[name]["vector"]
            found = taken[name if encoder == "stack" else f"{name}/vector"]
            np.testing.assert_array_equal(found[0], value[row])
            if name == "observations":
                np.testing.assert_array_equal(shown if isinstance(shown, np.ndarray) else shown["vector"], found)


def plant(delay: int, rows: int = 4000, noise: float = 1.0) -> Dataset:
    """A second-order system in episodes of 100 steps, pushed by random actions that act `delay` steps later."""
    draw = np.random.default_rng(0)
    states, actions = np.zeros((rows + 1, 2), np.float32), draw.uniform(-1, 1, (rows, 1)).astype(np.float32)
    for t in range(rows):
        x, v = states[t] if t % 100 else (0.0, 0.0)
        states[t] = x, v
        push = actions[t - delay, 0] if t % 100 >= delay else 0.0
        states[t + 1] = x + 0.1 * v, v + 0.1 * (noise * push - x) + 0.02 * draw.normal()
    return offrl.from_arrays(
        observations=states[:-1],
        actions=actions,
        rewards=np.zeros(rows),
        truncations=np.arange(rows) % 100 == 99,
        action_low=-1.0,
        action_high=1.0,
    )


@pytest.mark.parametrize("delay", [0, 3, 19])
def test_the_delay_is_found(delay: int) -> None:
    dataset = apply_transforms([plant(delay)], DatasetConfig(action_delay="auto"))
    assert dataset.spec.history_actions == delay and f"act {delay} steps later" in dataset.notes[-1]
    assert made("iql", dataset).spec.observation_dim == 2 + delay
    assert apply_transforms([plant(0)], DatasetConfig(action_delay="3")).spec.history_actions == 3


def followed(dataset: Dataset) -> Dataset:
    """Data whose actions are a function of their observations."""
    return dataclasses.replace(dataset, columns={**dataset.columns, "actions": dataset.columns["observations"][:, :1]})


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        (lambda: plant(3, 1000), "needs 1,000 rows with 20 rows of their episode before them, and there are 7"),
        (lambda: plant(20), "after 20 steps or more"),
        (lambda: plant(3, noise=0.0), "explain nothing|do equally well"),
        (lambda: followed(plant(3)), "its actions follow from its observations"),
    ],
)
def test_a_delay_that_is_not_known_is_refused(dataset: Any, text: str) -> None:
    with pytest.raises(UserError, match=text) as error:
        apply_transforms([dataset()], DatasetConfig(action_delay="auto"))
    assert "\n" not in str(error.value) and "dataset.action_delay=d" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"history_stride": 2}, "dataset.history=n, too"),
        ({"action_delay": "3", "history_actions": 2}, "leave out dataset.history_actions"),
        ({"action_delay": "-1"}, "0 to 1000 is due, or auto"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        data(**settings)


@pytest.mark.parametrize("setting", ["history=0", "history_actions=-1", "history_stride=0"])
def test_negative_windows_are_refused(setting: str) -> None:
    with pytest.raises(UserError, match=setting.partition("=")[0]):
        compose(parse([f"dataset.{setting}"]))


@pytest.mark.parametrize(
    ("name", "window", "settings", "text"),
    [
        ("iql", {}, ["encoder=stack"], "dataset.history=n"),
        ("iql", {"history": 2}, ["encoder=drq"], "take stack or gru"),
        ("iql", {"history": 2}, ["encoder=stack", "encoder.width=9"], "no parameters"),
        ("iql", {"history": 2, "history_stride": 2, "history_actions": 1}, ["encoder=gru"], "history_stride"),
        ("dynamics", {"history": 2}, [], "set algo.history, its own"),
        ("dt", {"history": 2}, [], "reads single observations"),
        ("gcbc", {"history": 2}, [], "goals of gcbc are single observations"),
    ],
)
def test_windows_that_nothing_reads_are_refused(name: str, window: Any, settings: list[str], text: str) -> None:
    with pytest.raises(UserError, match=text) as error:
        made(name, data(**window), *settings)
    assert "\n" not in str(error.value)


def test_estimates_refuse_windows() -> None:
    acting, dataset = policy("stack")
    with pytest.raises(UserError, match="windows of 2 observations and 3 actions: play"):
        make_problem(dataset, {"it": acting})
    with pytest.raises(UserError, match="has no Q"):
        acting.value(np.zeros(2), np.zeros(1))


def test_runs_without_windows_keep_their_names() -> None:
    dataset, plain = data(), config("iql")
    other = config("iql", "dataset.history=2")
    assert directory(plain, dataset) != directory(other, dataset)
    new = {"history": 1, "history_stride": 1, "history_actions": 0, "action_delay": "0"}
    assert new.items() <= complete({"algo": {"name": "iql"}, "dataset": {"name": "x"}})["dataset"].items()


def test_a_description_with_windows_that_are_none_is_damaged() -> None:
    values = data(history=2).spec.to_json()
    assert DataSpec.from_json(values) == data(history=2).spec
    with pytest.raises(UserError, match="damaged"):
        DataSpec.from_json({**values, "history": 0})


def test_data_of_a_delayed_plant_are_what_its_environment_does() -> None:
    env, data = pendulum(), generate(1).columns
    env.reset(seed=0)
    cos, sin, velocity = data["observations"][0]
    env.unwrapped.states = np.array([[np.arctan2(sin, cos), velocity]], np.float64)  # type: ignore[attr-defined]
    buffer = np.zeros(1, np.float32)
    for t in range(20):  # it is not stable: rounding grows
        buffer[:] = data["actions"][t]
        observation, reward, *_ = env.step(buffer)
        np.testing.assert_allclose(observation, data["next_observations"][t], atol=1e-3)
        np.testing.assert_allclose(reward, data["rewards"][t], atol=1e-2)
    moved = Delay(env.unwrapped, 2)
    moved.reset(seed=1)
    moved.step(np.ones(1, np.float32))
    assert [float(a[0]) for a in moved.pending] == [0.0, 1.0]


def test_the_delayed_pendulum_s_delay_is_found() -> None:
    dataset = load_dataset(DatasetConfig(name="delayed-pendulum", action_delay="auto", subsample=0.2))
    assert dataset.spec.history_actions == DELAY
    assert dataset.spec.task is not None and dataset.spec.task.env_kwargs == {"delay": DELAY}


PAGE = [words for words in commands(ROOT / "docs" / "partial-observation.md") if words[0] == "train"]


@pytest.mark.parametrize("words", [pytest.param(w, marks=[pytest.mark.slow][:i]) for i, w in enumerate(PAGE)])
def test_the_page_s_commands_train(words: list[str], tmp_path: Path) -> None:
    small = [
        f"runs_dir={tmp_path}",
        "steps=2",
        "seeds=1",
        "algo.hidden=[16]",
        "eval.episodes=1",
        "dataset.subsample=0.2",
    ]
    assert main([*words, *small, "compile=eager", "quiet=true"]) == 0
    (run,) = tmp_path.iterdir()
    assert SavedRun(run).spec.windowed and len(SavedRun(run).final_scores) == 1
