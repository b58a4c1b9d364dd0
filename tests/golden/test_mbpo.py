"""MBPO: what its model learns from, where rollouts begin and end, of what a batch is made, and COPlanner's choice."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry
from offrl.algorithm import TrainState
from offrl.algorithms import mbpo
from offrl.data.dataset import DataSpec
from offrl.data.samplers.tables import Experience
from offrl.errors import UserError
from offrl.families.sac import SoftActorCritic
from offrl.settings.compose import compose
from offrl.world_models.model import Outcome, Prediction
from offrl.world_models.online import experienced
from offrl.world_models.rollout import Imagined, ImaginedRing
from tests.support.golden import KEY, redraw

LINE = DataSpec((1,), 1, action_low=(-1.0,), action_high=(1.0,))
SMALL: dict[str, Any] = {
    "hidden": [4],
    "model_hidden": [5],
    "members": 3,
    "elites": 2,
    "model_steps": 2,
    "batch_size": 8,
}


def make(spec: DataSpec = LINE, **settings: Any) -> tuple[Any, TrainState]:
    kind = registry.get("algo", "mbpo")
    algorithm = kind(kind.Config(**{**SMALL, "rollouts": 16, "rollout_retain": 2, **settings}), spec)
    return algorithm, algorithm.init(1)


def rows(count: int, start: float = 0.0) -> dict[str, Tensor]:
    """Steps of 1 along a line, which pay where they are."""
    x = start + torch.arange(count, dtype=torch.float32).unsqueeze(-1)
    columns = {"observations": x, "actions": torch.ones(count, 1), "rewards": x[:, 0].clone()}
    return {**columns, "next_observations": x + 1, "masks": torch.ones(count), "unknown": torch.zeros(count)}


def test_the_length_of_rollouts_grows_as_published() -> None:
    """With 20,000 updates in an epoch of 1,000 steps; K.12.6 of the authors' schedule, by hand."""
    for growth, horizon, expected in (
        ([20, 150], 15, [1, 1, 4, 8, 15, 15]),
        ([20, 100], 25, [1, 1, 10, 20, 25, 25]),
        ([20, 150], 1, [1] * 6),
    ):
        algorithm, _ = make(horizon=horizon, horizon_growth=[20_000 * epoch for epoch in growth])
        assert [algorithm.length(20_000 * epoch) for epoch in (0, 20, 50, 85, 150, 300)] == expected
    assert make(horizon=3)[0].length(0) == 3


def test_rollouts_begin_in_what_was_played_and_stop_at_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a model that steps by 1 and ends at 3, from rows 0, 1, 2 of a ring with room for six: whoever gets to 2 makes
    the last step from there, so that all 16 rollouts do, and none of more than 3 steps.
    """
    algorithm, state = make(horizon=5)

    def sample(tree: Any, observations: Tensor, actions: Tensor, past: Tensor, key: Tensor) -> Outcome:
        following, ended = observations + 1.0, observations[:, 0] >= 2.0
        return Outcome(following, observations[:, 0], ended, ended & False)

    monkeypatch.setattr(algorithm.model, "sample", sample)
    played = rows(6)
    played["observations"][3:] = 100.0  # not there yet
    state, metrics = algorithm.refresh(state, Experience({}, played, torch.tensor(3)), KEY, step=0)
    ring = state.buffers["ring"]
    imagined = algorithm.imagined.draw(state, KEY, 2000)
    x, after = imagined["observations"][:, 0], imagined["next_observations"][:, 0]
    assert set(x.tolist()) == {0.0, 1.0, 2.0} and torch.equal(after, x + 1.0)
    assert torch.equal(imagined["masks"], (x < 2.0).float()) and torch.equal(imagined["rewards"], x)
    kept = ring["rows"][: int(ring["count"]), 0]
    counts = [int((kept == value).sum()) for value in (0.0, 1.0, 2.0)]
    assert counts[2] == 16 and 0 < counts[0] < counts[1] < 16
    assert float(metrics["rollout/steps"]) == pytest.approx(sum(counts) / 16)


def test_a_ring_is_filled_as_far_as_rollouts_are_long() -> None:
    """Three rows at a time into four, then eight places: what is old goes, what was never written is not drawn."""
    config = mbpo.MBPOConfig(rollouts=1, rollout_retain=2, horizon=4)
    ring = ImaginedRing(config, LINE)
    content = ring.buffers()["ring"]
    zero, count = torch.zeros(3, 1), 0
    for capacity, expected in (
        (4, [0, 1, 2]),
        (4, [4, 5, 2, 3]),
        (8, [4, 5, 6, 7, 8]),
        (8, [4, 5, 6, 7, 8, 9, 10, 11]),
    ):
        numbers = torch.arange(count, count + 3, dtype=torch.float32).unsqueeze(-1)
        column = zero[:, 0]
        new = Imagined(numbers, zero, zero, zero, column, column > 0, column, column > 0, column == 0)
        content = ring.push(content, Imagined(*(x.unsqueeze(0) for x in new)), capacity)
        count += 3
        assert content["rows"][: int(content["count"]), 0].tolist() == expected


def test_a_batch_is_real_in_part_and_imagined_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of 8 rows, half of which are the data's: one of the data's, one that was played, six of the ring."""
    algorithm, state = make(real_share=0.25, horizon=1)
    seen: list[Any] = []
    monkeypatch.setattr(SoftActorCritic, "update", lambda self, state, batch, key, phase: seen.append(batch))
    content = state.buffers["ring"]
    state = state._replace(buffers={"ring": {**content, "rows": content["rows"] - 1.0, "count": torch.tensor(5)}})
    algorithm.update(state, rows(8), KEY, phase=0)
    assert seen[0]["observations"][:, 0].tolist() == [0.0, 4.0, *[-1.0] * 6]
    assert seen[0]["rewards"].tolist() == [0.0, 4.0, *[-1.0] * 6]


def test_the_model_learns_from_four_fifths_of_what_is_there() -> None:
    """Rewards of every fifth row rank the members and teach nothing but the scale, which stays where two rows exchange
    theirs; rows that were not played yet do neither.
    """
    algorithm, state = make()
    data = rows(3, -3.0)  # before what was played: every fifth of both is rows 1 and 6 of the ring

    def learnt(*pair: int) -> tuple[TrainState, Any]:
        played = rows(10)
        played["rewards"][list(pair)] = played["rewards"][list(pair[::-1])]
        total, count = experienced(Experience(data, played, torch.tensor(8)))
        assert int(count) == 11
        return algorithm.learn_model(state, total, count, KEY)

    plain, metrics = learnt()
    for pair, taught in (((8, 9), False), ((1, 6), False), ((2, 3), True)):
        other, other_metrics = learnt(*pair)
        same = all(torch.equal(v, plain.params["dynamics"][k]) for k, v in other.params["dynamics"].items())
        assert same != taught
        error = "model/held-out error"
        assert torch.equal(other_metrics[error], metrics[error]) == (pair == (8, 9))
    # of -3 to 7 and their successors up to 8; actions never change
    model = plain.extra["model"]
    np.testing.assert_allclose(model["mean"], [2.0, 1.0], rtol=1e-6)
    np.testing.assert_allclose(model["std"], [np.sqrt(10.0), 1.0], rtol=1e-6)
    np.testing.assert_allclose(model["center"], [1.0, (-6.0 + 28.0) / 11.0], rtol=1e-6)
    assert (model["low"].tolist(), model["high"].tolist()) == ([-14.0], [19.0])


def test_the_models_loss() -> None:
    """Likelihood of change and reward, cross-entropy of an end, decay and bounds: float64 NumPy."""
    algorithm, state = make(termination="learned")
    params = dict(state.params["dynamics"])
    redraw(params, torch.Generator().manual_seed(2), 0.3)
    batch = rows(4)
    batch["masks"][3] = 0.0
    batch["unknown"][3] = 1.0  # whose next observation the data lack: its reward and end are learnt
    learnt = algorithm.targets(batch, torch.arange(4).expand(3, 4))
    assert learnt["targets"][0].tolist() == [[1.0, x] for x in (0.0, 1.0, 2.0, 3.0)]
    loss = float(algorithm.model_loss(params, state, learnt)[0])
    p = {k: v.double().numpy() for k, v in params.items()}
    inputs = np.stack([[x, 1.0] for x in range(4)])
    h = inputs @ p["net.layers.0.weight"] + p["net.layers.0.bias"].reshape(3, 1, -1)
    out = h / (1 + np.exp(-h)) @ p["net.head.weight"] + p["net.head.bias"].reshape(3, 1, -1)
    softplus = lambda x: np.log1p(np.exp(x))  # noqa: E731
    high, low = p["max_log_var"], p["min_log_var"]
    log_var = low + softplus(high - softplus(high - out[..., 2:4]) - low)
    y = np.stack([[1.0, x] for x in range(4)])
    each = (out[..., :2] - y) ** 2 * np.exp(-log_var) + log_var
    each[:, 3, 0] = 0.0
    expected = each.mean((1, 2))
    ending = np.array([0.0, 0.0, 0.0, 1.0])
    expected = expected + (softplus(out[..., -1]) - ending * out[..., -1]).mean(-1)
    decay = 2.5e-5 * (p["net.layers.0.weight"] ** 2).sum() / 2 + 1e-4 * (p["net.head.weight"] ** 2).sum() / 2
    assert loss == pytest.approx(expected.sum() + decay + 0.01 * (high.sum() - low.sum()), rel=1e-5)


REWARDS, UNCERTAINTY = torch.tensor([[1.0, 1.0, 1.0], [0.5, 2.0, 1.0]]), torch.tensor([[0.1] * 3, [0.9, 0.2, 0.1]])


@pytest.mark.parametrize(
    ("optimism", "second"),
    [(1.0, True), (0.0, True), (-2.0, False)],  # by hand: 3.2020 < 4.5690, 2.9109 < 3.3809, 2.3287 > 1.0047
)
def test_exploration_takes_the_future_of_most_reward_and_surprise(
    optimism: float, second: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two candidates with known rewards and uncertainties of three steps, discounted by 0.97 (K.12.7)."""
    spec = DataSpec((2,), 1, action_low=(-1.0,), action_high=(1.0,))
    algorithm, state = make(spec, candidates=2, lookahead=3, optimism=abs(optimism))
    algorithm.config.optimism = optimism

    def sample(actor: Any, observations: Tensor, key: Tensor) -> tuple[Tensor, None]:
        """The two candidates of the first step, then whatever was begun with."""
        first = torch.tensor([[-0.5], [0.5]]) if bool((observations[:, 0] == 0).all()) else observations[:, :1] / 2
        return first, None

    def predict(tree: Any, observations: Tensor, actions: Tensor, past: Tensor) -> Prediction:
        return Prediction(observations, observations, actions, actions)

    def outcome(tree: Any, prediction: Any, observations: Tensor, actions: Tensor, key: Tensor) -> Outcome:
        chosen = (actions[:, 0] > 0).long()
        step = observations[:, 1].long()
        following = torch.stack([2.0 * chosen - 1.0, observations[:, 1] + 1.0], -1)
        return Outcome(following, REWARDS[chosen, step], chosen > 1, chosen > 1)

    monkeypatch.setattr(algorithm, "sample", sample)
    monkeypatch.setattr(algorithm.model, "predict", predict)
    monkeypatch.setattr(algorithm.model, "outcome", outcome)
    look = lambda model, tree, prediction, o, a: UNCERTAINTY[(a[:, 0] > 0).long(), o[:, 1].long()]  # noqa: E731
    monkeypatch.setattr(mbpo, "measure", lambda name: {"ensemble_std": look}[name])
    actor = algorithm.actor(state)
    action, _ = actor.act(None, torch.zeros(1, 2), KEY, explore=True)
    assert float(action) == (0.5 if second else -0.5)
    mode = algorithm.policy.mode(algorithm.apply("actor", state.params["actor"], torch.zeros(1, 2)))
    assert torch.equal(actor.act(None, torch.zeros(1, 2), KEY, explore=False)[0], mode)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"members": 1, "elites": 1, "candidates": 2}, "algo.candidates=2: .*the model has one: more algo.members"),
        ({"elites": 4}, "algo.elites=4 is more than algo.members=3"),
        ({"horizon_growth": [5]}, r"algo.horizon_growth=\[5\] must be \[\] or two updates"),
        ({"horizon_growth": [5, 5]}, "the first one smaller"),
        ({"termination": "hoper"}, "hopper"),
    ],
)
def test_refusals(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        make(**settings)


@pytest.mark.parametrize(
    ("algo", "name", "value", "reader", "off", "least"),
    [
        ("mbpo", "optimism", 2.0, "candidates", 1, 1),
        ("mbpo", "horizon_growth", [10, 20], "horizon", 1, 1),
        ("mopo", "repeats", 4, "sample_dropout", 0.0, 0),
        ("dreamerv3", "penalty_unit", "one", "members", 1, 1),
    ],
)
def test_settings_below_the_number_that_reads_them_are_refused(
    algo: str, name: str, value: Any, reader: str, off: float, least: int
) -> None:
    values = {"algo": algo, f"algo.{name}": value}
    with pytest.raises(UserError) as error:
        compose(values)
    assert str(error.value) == (
        f"algo.{name}={str(value).replace(' ', '')} does nothing with algo.{reader}={off}; leave it out, or set "
        f"algo.{reader} above {least}"
    )
    compose({**values, f"algo.{reader}": least + 0.5 if isinstance(off, float) else 2})
