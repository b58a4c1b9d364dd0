"""Pre-training of encoders: pairs of frames, the three losses against NumPy, and runs that start from a trained one."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import offrl
from offrl import registry, rng
from offrl.algorithm import Algorithm
from offrl.api import train
from offrl.data import load_dataset
from offrl.data.dataset import Dataset
from offrl.data.samplers.goals import SUCCESSES
from offrl.envs.drawn import WORLDS, generate
from offrl.errors import UserError
from offrl.nn.encoders.decoder import ImageDecoder
from offrl.runs import record as runs
from offrl.settings.compose import compose
from offrl.settings.dataset import DatasetConfig
from offrl.settings.encoder import EncoderConfig
from offrl.system import files
from offrl.training.setup import make_algorithm
from offrl.training.stages import ready
from tests.support.reference.images import convolution

ROWS, LENGTH, SIZE = 24, 6, 16


@functools.cache
def video(size: int = SIZE) -> Dataset:
    """Frames of four episodes whose first pixel is the number of their row; without rewards, and of actions 0."""
    frames = np.random.default_rng(0).integers(0, 256, (ROWS, size, size, 3)).astype(np.uint8)
    frames[:, 0, 0, 0] = np.arange(ROWS)
    ends = np.arange(ROWS) % LENGTH == LENGTH - 1
    columns = {"actions": np.zeros((ROWS, 1)), "rewards": np.zeros(ROWS), "truncations": ends}
    dataset = offrl.from_arrays(frames, **columns, action_low=-1.0, action_high=1.0)
    encoder = EncoderConfig("drq", width=6, shift=0)
    return dataclasses.replace(dataset, spec=dataclasses.replace(dataset.spec, encoder=encoder))


def make(objective: str, dataset: Dataset) -> Algorithm:
    kind = registry.get("algo", "encoder")
    algorithm: Algorithm = kind(kind.Config(objective=objective, hidden=[8], ahead=2), dataset.spec)
    return algorithm


def batch_of(algorithm: Algorithm, dataset: Dataset, size: int = 5) -> Any:
    sampler = algorithm.sampler()
    return sampler(sampler.prepare(dataset), rng.make_key(3), size)


def test_pairs_of_frames_are_of_one_episode() -> None:
    dataset = video()
    for objective in ("contrast", "value"):
        batch = batch_of(make(objective, dataset), dataset, 500)
        first, later = batch["observations"]["pixels"][:, 0, 0, 0].long().chunk(2)
        distance = later - first
        if objective == "contrast":
            assert (first // LENGTH == later // LENGTH).all() and set(distance.tolist()) == {0, 1, 2}
            assert ((distance > 0) | (first % LENGTH == LENGTH - 2)).all()  # what follows the last rows is not known
        else:
            assert torch.equal(batch[SUCCESSES], (distance == 0).float()) and (first // LENGTH != later // LENGTH).any()
            assert torch.equal(batch["next_observations"]["pixels"][:, 0, 0, 0].long(), first + 1)


def test_contrast_is_the_cross_entropy_of_pairs() -> None:
    algorithm = make("contrast", video())
    state, z = algorithm.init(0), torch.randn(10, 6, generator=torch.Generator().manual_seed(0)).double()
    weight = state.params["similarity"]["weight"].double()
    loss, metrics = algorithm.contrast_loss({"weight": weight}, state, {"observations": z})  # type: ignore[attr-defined]
    logits = z[:5].numpy() @ weight.numpy() @ z[5:].numpy().T
    expected = [np.log(np.exp(row).sum()) - row[i] for i, row in enumerate(logits)]
    assert float(loss) == pytest.approx(np.mean(expected), rel=1e-9)
    assert float(metrics["similarity/accuracy"]) == pytest.approx((logits.argmax(1) == np.arange(5)).mean())


def test_values_are_of_goals_among_later_frames() -> None:
    algorithm: Any = make("value", video())
    state, draw = algorithm.init(0), torch.Generator().manual_seed(1)
    state = state._replace(target={"value": {k: v + 0.1 for k, v in state.params["value"].items()}})
    z = torch.randn(10, 6, generator=draw).requires_grad_()
    reached = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    following = torch.randn(5, 6, generator=draw)
    batch = {"observations": z, "next_observations": following, SUCCESSES: reached}
    loss, _ = algorithm.value_loss(state.params["value"], state, batch)

    def values(params: Any, frames: torch.Tensor) -> np.ndarray:
        return np.asarray(algorithm.v(params, frames, z[5:]).detach().double())

    target, next_v = values(state.target["value"], z[:5]), values(state.target["value"], following)
    v, r, mask = values(state.params["value"], z[:5]), reached.numpy() - 1.0, 1.0 - reached.numpy()
    weight = np.where(r + 0.99 * mask * next_v.min(0) - target.mean(0) < 0.0, 0.1, 0.9)
    expected = (weight * (r + 0.99 * mask * next_v - v) ** 2).mean(1).sum()
    assert float(loss.detach()) == pytest.approx(expected, rel=1e-5)
    # frames and goals are trained, through V alone
    error = -2.0 * torch.from_numpy(weight * (r + 0.99 * mask * next_v - v)) / 5
    (alone,) = torch.autograd.grad((error * algorithm.v(state.params["value"], z[:5], z[5:])).sum(), z)
    torch.testing.assert_close(torch.autograd.grad(loss, z)[0], alone.float(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("shape", [(10, 13, 3), (48, 50, 1)])
def test_a_decoder_equals_numpy(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    decoder, z = ImageDecoder(4, shape, depth=2), np.random.default_rng(0).normal(size=(2, 4))
    p = {k: v.detach().numpy().astype(np.float64) for k, v in decoder.named_parameters()}
    stages = 3 if shape[0] < 48 else 4
    height, width = (-(-n // 2**stages) for n in shape[:2])
    x = (z @ p["entry.weight"].T + p["entry.bias"]).reshape(2, -1, height, width).transpose(0, 2, 3, 1)
    for i in range(stages):
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-4)
        x = (x / (1.0 + np.exp(-x))).repeat(2, 1).repeat(2, 2)
        x = convolution(x, p[f"layers.{i}.weight"], p[f"layers.{i}.bias"])
    expected = 1.0 / (1.0 + np.exp(-x[:, : shape[0], : shape[1]]))
    images = decoder(torch.from_numpy(z).float()).detach()
    assert images.shape == (2, *shape)
    np.testing.assert_allclose(images, expected, atol=1e-5)


def test_autoencoding_draws_the_images_again() -> None:
    dataset = video()
    algorithm: Any = make("autoencode", dataset)
    state, batch = algorithm.init(0), batch_of(algorithm, dataset)
    pixels = batch["observations"]["pixels"]
    z = algorithm.apply("encoder", state.params["encoder"], batch["observations"])
    loss, _ = algorithm.autoencode_loss(state.params["decoder"], state, {**batch, "observations": z})
    images = algorithm.apply("decoder", state.params["decoder"], z)["pixels"].double()
    assert float(loss) == pytest.approx(float((images - pixels / 255.0).square().sum()) / 5, rel=1e-5)


@functools.cache
def drawn() -> Dataset:
    """Pictures of the pendulum, without rewards and actions."""
    columns = generate("pendulum", 0, 600).columns
    frames = WORLDS["pendulum"].pictures(columns["observations"])
    values = {"rewards": np.zeros(600), "actions": np.zeros((600, 1)), "truncations": columns["truncations"]}
    return offrl.from_arrays(frames, **values, action_low=-1.0, action_high=1.0)


SMALL = {"eval.env": "none", "quiet": True, "seeds": 1, "encoder.width": 16, "algo.batch_size": 32}


@pytest.mark.parametrize(
    ("objective", "limit"),
    [
        ("contrast", 0.92),
        pytest.param("value", 0.7, marks=pytest.mark.nightly),
        pytest.param("autoencode", 0.5, marks=pytest.mark.nightly),
    ],
)
def test_a_run_starts_from_the_trained_encoder(tmp_path: Path, objective: str, limit: float) -> None:
    settings = {**SMALL, "runs_dir": str(tmp_path), "encoder.shift": 0 if objective == "autoencode" else 2}
    more = {"algo.objective": objective, "algo.hidden": [32], "steps": 100, "log_every": 20}
    first = train("encoder", drawn(), settings={**settings, **more, "encoder.learning_rate": 1e-3})
    lines = [json.loads(line) for line in (first.dir / "metrics.jsonl").read_text().splitlines()]
    name = next(name for name in lines[0] if name.endswith("/loss"))
    assert lines[-1][name][0] < limit * lines[0][name][0]
    encoder = latest(first.dir)
    more = {"encoder.pretrained": str(first.dir), "algo.hidden": [16], "steps": 1}
    for trained_by in ("none", "auto"):
        run = train("iql", drawn(), settings={**settings, **more, "encoder.trained_by": trained_by})
        moved = latest(run.dir)
        assert all(torch.equal(moved[key], value) for key, value in encoder.items()) is (trained_by == "none")
        for key, value in encoder.items():  # one step of Adam away
            torch.testing.assert_close(moved[key], value, rtol=0.0, atol=4e-4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"algo": "encoder", "dataset": "builtin"}, "algo=encoder learns from images, and .*hopper-mixed-v0 has none"),
        ({"algo": "encoder", "algo.objective": "autoencode"}, "encoder.shift=4 moves what .*: encoder.shift=0"),
        ({"encoder.trained_by": "none"}, "encoder.trained_by=none leaves the encoder .* encoder.pretrained=RUN"),
        ({"encoder.pretrained": "nowhere"}, "encoder.pretrained=nowhere: there is no run; name a run directory"),
        (
            {"encoder.pretrained": "r", "encoder.trained_by": "own", "encoder.fusion": "early", "dataset.frames": 1},
            "encoder.fusion=early: the encoder of r takes one image, and not state and goal side by side; leave fusion",
        ),
        ({"algo": "encoder", "encoder.trained_by": "own"}, "own: not every network of encoder is .*; leave it out"),
        ({"encoder.width": 8}, "has encoder.width=6, and this one on arrays 8; both must agree"),
        ({"encoder": "impala_small"}, "has encoder=drq, and this one on arrays impala_small"),
        ({"dataset.frames": 2}, "has dataset.frames=1, and this one on arrays 2"),
        ({"numbers": 3}, r"it was trained on data with observation_shape=\(0,\), and arrays has \(3,\)"),
        ({"size": 15}, r"has streams=pixels \[16, 16, 3\], and this one on arrays pixels \[15, 15, 3\]"),
    ],
)
def test_what_does_not_suit_is_refused(settings: dict[str, Any], text: str, run_of_video: Path) -> None:
    values = {"algo": "iql", "encoder.width": 6, "dataset": "builtin", "experiment": "none"} | settings
    dataset = load_dataset(DatasetConfig(), quiet=True) if "dataset" in settings else video(values.pop("size", SIZE))
    changes = {"encoder": None, "frames": settings.get("dataset.frames", 1)}
    if numbers := values.pop("numbers", 0):
        changes["observation_shape"] = (numbers,)
    dataset = dataclasses.replace(dataset, spec=dataclasses.replace(dataset.spec, **changes))
    if not {"dataset", "algo", "encoder.trained_by", "encoder.pretrained"} & set(settings):
        values["encoder.pretrained"] = str(run_of_video)
    with pytest.raises(UserError, match=text):
        make_algorithm(*ready_args(values, dataset))


@pytest.fixture(scope="module")
def run_of_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = SMALL | {"runs_dir": str(tmp_path_factory.mktemp("runs")), "encoder.width": 6, "steps": 1}
    dataset = dataclasses.replace(video(), spec=dataclasses.replace(video().spec, encoder=None))
    return train("encoder", dataset, settings={**settings, "algo.objective": "contrast"}).dir


def ready_args(values: dict[str, Any], dataset: Dataset) -> tuple[Any, Dataset, Any]:
    config, pretrained = ready(compose(values), dataset)
    return config, dataset, pretrained


def test_later_settings_do_not_rename_runs() -> None:
    config = compose({"algo": "iql", "dataset": "builtin", "encoder.width": 6, "algo.batch_size": 8})
    identity = runs.identity(config)
    assert "pretrained" not in identity["encoder"] and identity["encoder"].pop("pretrained_id") == ""
    assert not runs.change(identity, runs.identity(config))
    trained = dataclasses.replace(config.encoder, pretrained_id="abc")
    names = [runs.directory(c, video()).name for c in (config, dataclasses.replace(config, encoder=trained))]
    assert names[0] == "iql-arrays-703488" and names[1] != names[0]


def latest(run: Path) -> dict[str, torch.Tensor]:
    saved = files.load_latest(run)
    assert saved is not None
    prefix = "state/params/encoder/"
    return {k.removeprefix(prefix): v for k, v in saved[0].items() if k.startswith(prefix)}
