"""Several observation streams: what batches hold, what the encoder learns from, and what policies see."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.utils import _pytree as pytree

import offrl
from offrl import registry, rng
from offrl.algorithm import Algorithm, TrainState, stack
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.goals import GoalSampler, Mix
from offrl.data.samplers.states import StateSampler
from offrl.data.samplers.transitions import TransitionSampler
from offrl.encoding import encoded_update
from offrl.errors import UserError
from offrl.evaluation.observations import goals_of
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.predict import PredictState
from offrl.evaluation.streams import kind_of
from offrl.settings.compose import compose
from offrl.settings.encoder import EncoderConfig
from offrl.settings.train import TrainConfig
from offrl.system import files
from offrl.training.setup import check_kind, make_algorithm, with_encoder
from offrl.training.step import Step

ROWS, LENGTH, SIZE = 40, 8, 16
ENCODED = [name for name, kind in registry.names("algo").items() if kind.traits.observations == "encoded"]
# those whose own networks read streams, in small
LATENT: dict[str, dict[str, Any]] = {
    "tdmpc2": {"encoder_hidden": [16], "latent": 8, "horizon": 2, "planning": False},
    "mrq": {"latent": 8, "action_latent": 4, "horizon": 2, "target_every": 2},
    "rssm": {
        "recurrent_width": 8,
        "blocks": 2,
        "groups": 2,
        "width": 8,
        "depth": 2,
        "horizon": 2,
        "learning_rate": 0.1,
    },
    "director": {
        "recurrent_width": 8,
        "blocks": 2,
        "groups": 2,
        "width": 8,
        "depth": 2,
        "horizon": 2,
        "goal_steps": 1,
        "learning_rate": 0.1,
    },
}
SLOW = [pytest.param(name, marks=() if name in ("iql", "gcivl") else pytest.mark.nightly) for name in ENCODED]


def images(rows: int = ROWS) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (rows, SIZE, SIZE, 3)).astype(np.uint8)


def data(frames: int = 1, encoder: str | None = None, **columns: Any) -> Dataset:
    draw = np.random.default_rng(1)
    observations = {"state": draw.normal(size=(ROWS, 2)).astype(np.float32), "front": images()}
    values: dict[str, Any] = {
        "observations": observations,
        "actions": draw.uniform(-1.0, 1.0, (ROWS, 2)).astype(np.float32),
        "rewards": draw.normal(size=ROWS),
        "truncations": np.arange(ROWS) % LENGTH == LENGTH - 1,
        "action_low": -1.0,
        "action_high": 1.0,
    }
    dataset = offrl.from_arrays(**values | columns)
    settings = None if encoder is None else EncoderConfig(name=encoder, width=12, shift=2)
    return dataclasses.replace(dataset, spec=dataclasses.replace(dataset.spec, frames=frames, encoder=settings))


def make(name: str, dataset: Dataset, **settings: Any) -> Algorithm:
    kind = registry.get("algo", name)
    small = {"hidden": [16], "critic_hidden": [16], "batch_size": 8, "length": 4} | LATENT.get(name, {})
    config = kind.Config()
    config = dataclasses.replace(config, **{k: v for k, v in small.items() if hasattr(config, k)}, **settings)
    algorithm: Algorithm = kind(kind.fit_config(config, dataset, None), dataset.spec)
    return algorithm


def trained(algorithm: Algorithm, dataset: Dataset, seeds: list[int], updates: int, mode: str = "eager") -> TrainState:
    step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=8, replicas=len(seeds), mode=mode)
    with torch.no_grad():
        return step.run(stack([algorithm.init(seed) for seed in seeds]), {}, 0, updates)[0]


def test_a_batch_holds_each_row_s_frames_and_its_successor_s() -> None:
    dataset, frames = data(frames=3), torch.from_numpy(images())
    source = TransitionSampler().prepare(dataset)
    batch: Any = source.take(torch.tensor([0, 1, 2, 7]))  # rows 0 to 2 of the first episode, row 8: the second's first
    assert source.count == ROWS - ROWS // LENGTH  # what follows a time-out is not known
    for i, rows in enumerate(([0, 0, 0], [0, 0, 1], [0, 1, 2], [8, 8, 8])):
        assert torch.equal(batch["observations"]["front"][i], torch.cat([frames[row] for row in rows], -1))
    for i, rows in enumerate(([0, 0, 1], [0, 1, 2], [1, 2, 3], [8, 8, 9])):
        assert torch.equal(batch["next_observations"]["front"][i], torch.cat([frames[row] for row in rows], -1))
    state = torch.from_numpy(np.random.default_rng(1).normal(size=(ROWS, 2)).astype(np.float32))
    assert torch.equal(batch["observations"]["vector"], state[[0, 1, 2, 8]])


def test_last_successors_are_held_once() -> None:
    after = np.concatenate([images()[1:], images()[:1]])
    after[LENGTH - 1 :: LENGTH] = 7
    dataset = data(observations=images(), next_observations=after)
    store = dataset.stores["pixels"]
    assert len(store.values) == ROWS + ROWS // LENGTH and dataset.columns["successor_known"].all()
    last: Any = TransitionSampler().prepare(dataset).take(torch.tensor([LENGTH - 1, ROWS - 1]))
    assert (last["next_observations"]["pixels"] == 7).all()
    assert torch.equal(last["observations"]["pixels"], torch.from_numpy(images()[[LENGTH - 1, ROWS - 1]]))


def test_goals_are_images_of_the_row_s_future() -> None:
    dataset = data()
    sampler = GoalSampler(value=Mix(0.0, 1.0, 0.0), extra=("timesteps",))
    dataset = dataclasses.replace(dataset, columns={**dataset.columns, "timesteps": torch.arange(ROWS)})
    batch: Any = sampler(sampler.prepare(dataset), rng.make_key(0), 64)
    shown = batch["value_goals"]["front"].flatten(1)
    index = (shown.unsqueeze(1) == torch.from_numpy(images()).flatten(1)).all(-1).int().argmax(-1)
    rows = batch["timesteps"]
    assert (index // LENGTH == rows // LENGTH).all() and (index > rows).any() and (index >= rows).all()


@pytest.mark.parametrize("replicas", [1, 2])
def test_the_encoder_s_gradient_is_that_of_the_joint_loss(replicas: int) -> None:
    dataset = data(frames=2, encoder="drq")
    algorithm = make("bc", dataset)
    source = algorithm.sampler().prepare(dataset)
    state, key = algorithm.init(0), rng.make_key(5)
    batch: Any = source.take(torch.arange(8))
    gradients = {}

    def step(self: Algorithm, state: TrainState, name: str, grads: dict[str, torch.Tensor]) -> TrainState:
        gradients[name] = grads
        return state

    observed = copy.copy(algorithm)
    observed.__class__ = type("Observed", (type(algorithm),), {"_stepped": step})
    observed.runtime.alone = replicas == 1
    run = torch.no_grad()(lambda key: encoded_update(observed, state, batch, key, phase=0)[1]["actor/loss"])
    run(key) if replicas == 1 else torch.vmap(run)(torch.stack([key, key]))
    encoder, actor = algorithm.networks["encoder"], algorithm.networks["actor"]
    shifted = encoder.shifted(batch["observations"], rng.fold_in(key, 90_001))  # type: ignore[operator]
    leaves = {n: {k: v.clone().requires_grad_() for k, v in state.params[n].items()} for n in ("encoder", "actor")}
    z = functional_call(encoder, leaves["encoder"], (shifted,))
    loss = algorithm.policy.bc_loss(functional_call(actor, leaves["actor"], (z,)), batch["actions"]).mean()
    loss.backward()
    for name, parameters in leaves.items():
        for key_of, value in parameters.items():
            found = gradients[name][key_of]
            found = torch._C._functorch.get_unwrapped(found)[0] if replicas > 1 else found
            assert (value.grad is not None and float(value.grad.abs().max()) > 0.0) or "bias" in key_of
            torch.testing.assert_close(found, value.grad, rtol=0.0, atol=2e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("trained_by", ["auto", "own"])
def test_compiled_gradients_are_the_eager_ones(trained_by: str) -> None:
    """Adam's first moments after one update are a tenth of the gradients."""
    dataset = data(frames=2, encoder="drq")
    assert dataset.spec.encoder is not None
    settings = dataclasses.replace(dataset.spec.encoder, trained_by=trained_by)
    dataset = dataclasses.replace(dataset, spec=dataclasses.replace(dataset.spec, encoder=settings))
    eager, compiled = (trained(make("iql", dataset), dataset, [0], 1, mode).opt for mode in ("eager", "compiled"))
    for a, b in zip(pytree.tree_leaves(eager), pytree.tree_leaves(compiled), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", SLOW)
def test_updates_train_the_encoder(name: str) -> None:
    dataset = data(frames=2, encoder="drq")
    algorithm = make(name, dataset)
    before = algorithm.init(0)
    assert "encoder" not in before.target and algorithm.spec.observation_shape == (12,)
    alone, both = trained(algorithm, dataset, [0], 2), trained(algorithm, dataset, [0, 1], 2)
    for key, value in before.params["encoder"].items():
        assert not torch.equal(alone.params["encoder"][key][0], value), key
        torch.testing.assert_close(alone.params["encoder"][key][0], both.params["encoder"][key][0], rtol=0, atol=2e-3)


def test_the_algorithms_of_streams_are_those_tested_here() -> None:
    assert set(LATENT) == {n for n, kind in registry.names("algo").items() if kind.traits.observations == "streams"}


@pytest.mark.parametrize("kind", ["strict", "chain"])
def test_windows_of_states_hold_each_state_s_frames(kind: str) -> None:
    after = np.concatenate([images()[1:], images()[:1]])
    after[LENGTH - 1 :: LENGTH] = 7
    dataset = data(frames=2, observations=images(), next_observations=after)
    sampler = StateSampler(LENGTH + 1, kind)
    source = sampler.prepare(dataset)
    batch: Any = sampler(source, rng.make_key(0), 64)
    frames, shown = torch.from_numpy(images()), batch["observations"]["pixels"]
    same = (shown[:, 0, ..., 3:].flatten(1).unsqueeze(1) == frames.flatten(1)).all(-1)
    first = same.int().argmax(-1)
    whole = same.any(-1) & (first % LENGTH == 0)
    assert whole.all() if kind == "strict" else not whole.all()
    for begin, window in zip(first[whole].tolist(), shown[whole], strict=True):
        for step in range(LENGTH):
            stack = torch.cat([frames[begin + max(0, step - 1)], frames[begin + step]], -1)
            assert torch.equal(window[step], stack)
        assert torch.equal(window[LENGTH], torch.cat([frames[begin + LENGTH - 1], torch.full_like(frames[0], 7)], -1))


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *(pytest.param(n, {}, marks=() if n == "mrq" else pytest.mark.nightly) for n in LATENT),
        pytest.param("rssm", {"objective": "bottleneck", "kl_weight": 0.1}, marks=pytest.mark.nightly),
        pytest.param("rssm", {"objective": "information"}, marks=pytest.mark.nightly),
        pytest.param("rssm", {"objective": "none", "latents": "gaussian"}, marks=pytest.mark.nightly),
        pytest.param("rssm", {"core": "scan"}, marks=pytest.mark.nightly),
        pytest.param("rssm", {"actor_gradient": "model"}, marks=pytest.mark.nightly),
    ],
)
def test_networks_of_streams_learn(name: str, settings: dict[str, Any]) -> None:
    dataset = data(frames=2, encoder="drq")
    algorithm = make(name, dataset, **settings)
    assert algorithm.encoder is None and algorithm.spec.streams
    before = algorithm.init(0)
    alone, both = trained(algorithm, dataset, [0], 4), trained(algorithm, dataset, [0, 1], 4)
    for key, value in before.params["encoder"].items():
        assert not torch.equal(alone.params["encoder"][key][0], value), key
        torch.testing.assert_close(alone.params["encoder"][key][0], both.params["encoder"][key][0], rtol=0, atol=2e-3)
    acting = TrainedPolicy(algorithm, algorithm.init(0), 0)
    shown = [{"state": np.full(2, i, np.float32), "front": images()[i]} for i in range(3)]
    actions = [acting.act(x) for x in shown]
    acting.reset()
    np.testing.assert_array_equal(acting.act(shown[0]), actions[0])
    assert not np.array_equal(actions[0], actions[1])


@pytest.mark.parametrize(
    ("algorithm", "field", "value"), [("mrq", "width", 20), ("rssm", "shift", 2), ("tdmpc2", "trained_by", "own")]
)
def test_an_encoder_inside_a_model_has_no_settings_of_those_before(algorithm: str, field: str, value: Any) -> None:
    settings = compose({"algo": algorithm, "dataset": "builtin", f"encoder.{field}": value})
    with pytest.raises(UserError, match=rf"encoder.{field}={value}: the encoder is a part of {algorithm}'s model"):
        make_algorithm(settings, data())


def test_the_encoder_does_not_move_the_other_modules_initial_numbers() -> None:
    vector = data(observations=np.zeros((ROWS, 12), np.float32))
    plain, encoded = make("td3_bc", vector).init(3), make("td3_bc", data(encoder="drq")).init(3)
    for name, params in plain.params.items():
        for key, value in params.items():
            assert torch.equal(value, encoded.params[name][key])


def test_only_the_module_named_trains_it() -> None:
    dataset = data(encoder="drq")
    assert dataset.spec.encoder is not None
    for module in ("actor", "critic"):
        settings = dataclasses.replace(dataset.spec.encoder, trained_by=module)
        chosen = dataclasses.replace(dataset, spec=dataclasses.replace(dataset.spec, encoder=settings))
        algorithm = make("iql", chosen)
        assert algorithm.encoder_module == module
        change = (
            trained(algorithm, chosen, [0], 1).params["encoder"]["trunk.0.weight"][0]
            - algorithm.init(0).params["encoder"]["trunk.0.weight"]
        )
        assert change.any()
    for module, message in (
        ("critics", r"encoder.trained_by=critics: the modules are value, actor, critic.*critic"),
        ("value", "V is fitted to Q, .* no reward keeps the encoder .*: critic, actor or own"),
    ):
        settings = dataclasses.replace(dataset.spec.encoder, trained_by=module)
        with pytest.raises(UserError, match=message):
            make("iql", dataclasses.replace(dataset, spec=dataclasses.replace(dataset.spec, encoder=settings)))


@pytest.mark.parametrize(("algorithm", "module"), [("gciql", "critic"), ("gcivl", "value"), ("bc", "actor")])
def test_the_loss_that_sees_rewards_trains_it(algorithm: str, module: str) -> None:
    assert make(algorithm, data(encoder="drq")).encoder_module == module


def policy(frames: int) -> tuple[TrainedPolicy, list[dict[str, np.ndarray]]]:
    dataset = data(frames=frames, encoder="drq")
    algorithm = make("iql", dataset)
    shown = [{"state": np.full(2, i, np.float32), "front": images()[i]} for i in range(6)]
    return TrainedPolicy(algorithm, algorithm.init(0), 0), shown


def test_a_policy_sees_the_frames_of_its_episode(tmp_path: Path) -> None:
    acting, shown = policy(3)
    actions = [acting.act(observation) for observation in shown]
    spec = acting.spec
    for t, action in enumerate(actions):
        stacked = np.concatenate([shown[max(0, t - back)]["front"] for back in (2, 1, 0)], -1)
        rows = np.zeros(1, kind_of(spec, window=True))
        rows["vector"], rows["front"] = shown[t]["state"], stacked
        np.testing.assert_array_equal(action, acting.step(None, rows, t)[0][0])
    acting.reset()
    np.testing.assert_array_equal(acting.act(shown[0]), actions[0])
    acting.save(tmp_path / "policy.safetensors")
    loaded = TrainedPolicy.load(tmp_path / "policy.safetensors")
    assert loaded.spec == spec and loaded.spec.frames == 3
    for observation, action in zip(shown, actions, strict=True):
        np.testing.assert_array_equal(loaded.act(observation), action)


def test_a_policy_remembers_on_the_device_on_which_it_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames, plans, and which episodes begin anew; torch's meta device stands for any."""
    settings: dict[str, Any] = {"planning": True, "plan_population": 8, "plan_elites": 4, "plan_proposals": 2}
    algorithm = make("tdmpc2", data(frames=2, encoder="drq"), discount=0.9)
    acting = TrainedPolicy(algorithm, algorithm.init(0), 0, "meta").with_settings(settings)
    shown = {"vector": torch.zeros(2, 2), "front": torch.zeros(2, SIZE, SIZE, 3, dtype=torch.uint8)}
    seen = pytree.tree_map(lambda x: x.to("meta"), shown)
    _, carry = acting.actor.act(acting.start(2), seen, acting.actor.state.key, explore=False)
    assert {leaf.device.type for leaf in pytree.tree_leaves(carry)} == {"meta"}
    told: list[Any] = []
    monkeypatch.setattr(acting, "step", lambda carry, *_: (np.zeros((2, 2)), told.append(carry) or carry))  # type: ignore[func-returns-value]
    observations = {"state": np.zeros((2, 2), np.float32), "front": images(2)}
    acting.predict(observations, PredictState(carry, 1, 2), np.array([True, False]))
    assert {leaf.device.type for leaf in pytree.tree_leaves(told)} == {"meta"}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("encoder", "width", 10**8), r"where these settings need torch.float32 \(16, 100000000\)"),
        (("encoder", "name", "/tmp/other.py:f"), "which is not loaded: say plugins="),
        (("encoder", "learning_rate", "x"), "encoder.learning_rate is 'x', where a number is due"),
        (("streams", 0, {"name": "front", "shape": [10**5, 10**5, 3]}), "takes images from 15x15 to 4096x4096"),
        (("streams", 0, {"name": "front"}), "the file is damaged"),
    ],
)
def test_a_policy_file_of_other_streams_is_refused(tmp_path: Path, change: tuple[str, Any, Any], text: str) -> None:
    part, key, value = change
    policy(2)[0].save(path := tmp_path / "policy.safetensors")
    tensors, meta = files.read(path)
    meta["spec"][part][key] = value
    files.write(path, tensors, meta)
    with pytest.raises(UserError, match=text):
        TrainedPolicy.load(path)


def test_a_policy_s_inputs_are_checked() -> None:
    acting, shown = policy(1)
    front = shown[0]["front"]
    for observation, text in (
        ({"state": shown[0]["state"]}, "no entry 'front'"),
        ({**shown[0], "front": front.astype(np.float32) / 255}, "front is float32; images are uint8"),
        ({**shown[0], "front": front.transpose(2, 0, 1)}, r"front has shape \[3, 16, 16\]; 16 x 16 x 3 is due"),
        ({**shown[0], "state": np.full(2, np.nan, np.float32)}, "vector holds NaN"),
        (front, "takes a dictionary with the entries front, state"),
    ):
        with pytest.raises(UserError, match=text):
            acting.act(observation)
    with pytest.raises(UserError, match=r"the goal's front has shape \[8, 8, 3\]; 16 x 16 x 3 is due"):
        goals_of({**shown[0], "front": front[:8, :8]}, acting.spec)
    batch = acting.act({name: np.stack([part, part]) for name, part in shown[0].items()})
    acting.reset()
    np.testing.assert_allclose(batch[1], acting.act(shown[0]), atol=1e-6)
    acting.reset()
    alone = acting.act({name: part[None] for name, part in shown[0].items()})
    assert alone.shape == (1, 2)
    np.testing.assert_allclose(alone[0], batch[1], atol=1e-6)


@pytest.mark.parametrize(
    ("observations", "text"),
    [
        (images().transpose(0, 3, 1, 2), r"channels first; height x width x channels are due"),
        ({"front": images() / 255.0}, r"float32 from 0 to 1; images are uint8, 0 to 255: give numpy.rint\(255 \* x\)"),
        ({"front": images().astype(np.float32)}, r"give numpy.rint\(x\).astype\(numpy.uint8\)"),
        (
            {"front": images()[:30], "state": np.zeros((ROWS, 1))},
            r"'front' has 30 images for 40 rows; one for each is needed",
        ),
        ({"front": images()[:, :0]}, r"images of 0 x 16 pixels; at least 1 and at most 4096 an edge"),
        ({"front": images(), "text": np.array(["a"] * ROWS)}, r"must be numbers .* they are text <U1 \[40\]"),
        (
            {"front": images(), "a": np.zeros((ROWS, 1)), "b": np.zeros((9, 1))},
            r"a float64 \[40, 1\], b float64 \[9, 1\]",
        ),
        (np.zeros((ROWS, 8, 8, 9), np.uint8), r"with 1 to 4 channels \(a stack of frames is made by dataset.frames="),
    ],
)
def test_images_of_other_forms_are_refused(observations: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        data(observations=observations)


def test_images_are_not_shifted_out_of_sight() -> None:
    with pytest.raises(UserError, match=r"encoder.shift=16 leaves nothing of images of 16 pixels"):
        make_algorithm(config(**{"encoder.shift": 16}), data())


def config(**values: Any) -> TrainConfig:
    return compose({"algo": "iql", "dataset": "builtin", **values})


def test_what_needs_numbers_says_what_to_take_instead() -> None:
    dataset = data()
    with pytest.raises(
        UserError,
        match=r"tt reads the numbers of observations, and arrays has front: take .*act.*dataset.observation_keys",
    ):
        check_kind(registry.get("algo", "tt"), "tt", dataset)
    vector: DataSpec = data(observations=np.zeros((ROWS, 3), np.float32)).spec
    with pytest.raises(
        UserError, match=r"encoder=drq: the observations of arrays are a vector, which needs no encoder"
    ):
        with_encoder(config(encoder="drq"), vector)
    algorithm = make_algorithm(config(**{"algo.hidden": [16]}), dataset)
    assert algorithm.data_spec.encoder is not None and algorithm.data_spec.encoder.name == "drq"
    assert "observations have front: encoder=drq, trained by the loss of 'critic'" in algorithm.runtime.notes


def test_encoders_are_set_like_other_groups() -> None:
    assert config(encoder="impala_small").encoder.name == "impala_small"
    assert config(**{"encoder.width": 64, "encoder.trained_by": "actor"}).encoder == EncoderConfig(
        width=64, trained_by="actor"
    )
    with pytest.raises(UserError, match=r"encoder\.width"):
        config(**{"encoder.width": 0})
