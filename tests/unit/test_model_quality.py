"""The report on a trained model: what it measures, what it writes, and the command."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from offrl.cli import main as cli
from offrl.data.arrays import from_arrays
from offrl.data.dataset import DataSpec
from offrl.figures import world_model as quality_plots
from offrl.report.models import ensembles as quality_report
from offrl.settings.replicas import Replica
from offrl.system import files as checkpoint
from offrl.world_models import quality
from offrl.world_models.dynamics import DynamicsSettings, split
from offrl.world_models.model import FOLDER, Outcome, Prediction, WorldModel, save

NOISE = 0.05


def draws(seed):
    return np.random.Generator(np.random.PCG64(seed))


def episodes(count=12, length=40, seed=0, noise=NOISE, offset=0.0, successors=True):
    """s' = 0.9 s + 0.5 a + noise in two dimensions, r = s[0]; whole episodes that end by a time limit, the first one in
    a termination.
    """
    draw = draws(seed)
    rows = count * length
    observations, following = np.zeros((rows, 2), np.float32), np.zeros((rows, 2), np.float32)
    actions = draw.uniform(-1, 1, (rows, 1)).astype(np.float32)
    for i in range(rows):
        observations[i] = draw.normal(size=2) + offset if i % length == 0 else following[i - 1]
        following[i] = 0.9 * observations[i] + 0.5 * actions[i] + noise * draw.normal(size=2)
    ends = np.arange(rows) % length == length - 1
    terminations = np.zeros(rows, bool)
    terminations[length - 1] = True
    return from_arrays(
        observations,
        actions,
        observations[:, 0],
        terminations,
        ends & ~terminations,
        following if successors else None,
        action_low=-1.0,
        action_high=1.0,
        name="linear",
    )


class Exact:
    """The dynamics of `episodes` themselves, as an ensemble of equal members that believe in noise of `std`."""

    members, history, out_dim, kind = 3, 1, 3, "exact"
    spec = DataSpec((2,), 1)
    config = SimpleNamespace(loss="likelihood", termination="never", calibrated=False)

    def __init__(self, std=NOISE, wrong=0.0):
        self.std, self.wrong = std, wrong

    def later_past(self, past, observations, actions):
        return past

    def predict(self, tree, observations, actions, past):
        mean = (0.9 * observations + 0.5 * actions).expand(3, -1, -1) + self.wrong * torch.tensor(
            [-1.0, 0.0, 1.0]
        ).view(3, 1, 1)
        return Prediction(
            mean,
            torch.full_like(mean, self.std),
            mean[..., 0] * 0 + observations[:, 0],
            torch.full(mean.shape[:2], 0.01),
        )

    def to_outcome(self, tree, prediction, observations, actions, following, rewards, key):
        ended = torch.zeros_like(rewards, dtype=torch.bool)
        return Outcome(following, rewards, ended, ended)

    def outcome(self, tree, prediction, observations, actions, key):
        return self.to_outcome(tree, prediction, observations, actions, prediction.mean[0], prediction.reward[0], key)

    def to_dataset_units(self, observations, actions, following):
        return observations, actions, following


TREE = {
    "elites": torch.tensor([0, 2]),
    "scale": torch.ones(3),
    "low": torch.full((2,), -9.0),
    "high": torch.full((2,), 9.0),
}


def test_scales_make_intervals_cover_what_they_should():
    data = episodes(60)
    rows = data.transition_rows()
    for std in (NOISE / 4, NOISE, 4 * NOISE):
        model = Exact(std)
        scale = quality.scales(model, TREE, data, rows)
        assert scale[:2].numpy() == pytest.approx(NOISE / std, rel=0.06)
        held, _ = quality.look(model, TREE, data, rows)
        after = quality.coverage(quality.central(held, scale))[:2]
        assert after.numpy() == pytest.approx(np.tile(quality.LEVELS, (2, 1)), abs=0.03)
    assert quality.scales(Exact(), TREE, data, rows[: quality.FEWEST - 1]).tolist() == [1.0] * 3


def test_levels_recalibrate_what_no_factor_can():
    data = episodes(60)
    # elites that disagree more than they err: too narrow and too wide
    rows, model = (data.transition_rows(), Exact(NOISE, wrong=2 * NOISE))
    half = torch.arange(len(rows)) % 2 == 0
    tree = {**TREE, "scale": quality.scales(model, TREE, data, rows[half])}
    asked = quality.levels(model, tree, data, rows[half])
    held, _ = quality.look(model, tree, data, rows[~half])
    level = quality.central(held, tree["scale"])
    after, before = (quality.coverage(level, x)[:2].numpy() for x in (asked, None))
    wanted = np.tile(quality.LEVELS, (2, 1))
    assert after == pytest.approx(wanted, abs=0.06) and np.abs(before - wanted).max() > 2 * np.abs(after - wanted).max()
    assert torch.equal(quality.levels(model, tree, data, rows[:5]), torch.tensor(quality.LEVELS).expand(3, -1))


def test_scales_of_a_mixture_and_of_what_has_no_error():
    # elites that lie 0.4 apart around the truth, of whose errors they know nothing: two spikes would match some levels,
    # and be unlikely
    data = episodes(30)
    rows, model = data.transition_rows(), Exact(2 * NOISE, wrong=0.2)
    scale = quality.scales(model, TREE, data, rows)
    held, _ = quality.look(model, TREE, data, rows)
    assert (quality.nll(held, scale) <= quality.nll(held) + 1e-5).all()
    assert (scale[:2] > 0.5).all()
    assert scale[2] == pytest.approx(1.0, abs=1e-4)  # the reward is exact: every factor covers alike, and 1 is taken


def test_a_model_without_deviations_gets_them_from_its_errors():
    data, model = episodes(30), Exact(1.0)
    model.kind, model.config = "ensemble", SimpleNamespace(loss="squared")
    rows = data.transition_rows()
    scale = quality.scales(model, TREE, data, rows)
    assert scale[:2].numpy() == pytest.approx(NOISE, rel=0.06) and scale[2] < 1e-5  # the reward is exact
    assert quality.scales(model, TREE, data, rows[:20])[:2].numpy() == pytest.approx(NOISE, rel=0.5)


def test_one_step_numbers_against_numpy():
    data, model = episodes(20), Exact(2 * NOISE, wrong=0.1)
    rows = data.transition_rows()
    found = quality.one_step(model, {**TREE, "scale": torch.tensor([0.5, 0.5, 1.0])}, data, rows)
    s, a, y = (
        data.columns[n][rows].numpy().astype(np.float64) for n in ("observations", "actions", "next_observations")
    )
    error = y - (0.9 * s + 0.5 * a)
    assert found["rmse"][:2] == pytest.approx(np.sqrt((error**2).mean(0)), rel=1e-5)
    assert found["r2"][:2] == pytest.approx(1 - (error**2).mean(0) / y.var(0), rel=1e-5)
    assert found["r2_change"][:2] == pytest.approx(1 - (error**2).mean(0) / (y - s).var(0), rel=1e-5)

    def density(std):  # the elites lie at -0.1 and 0.1
        return sum(0.5 * np.exp(-0.5 * ((error - m) / std) ** 2) / (std * math.sqrt(2 * math.pi)) for m in (-0.1, 0.1))

    assert found["nll"][:2] == pytest.approx(-np.log(density(2 * NOISE)).mean(0), rel=1e-4)
    assert found["nll_calibrated"][:2] == pytest.approx(-np.log(density(NOISE)).mean(0), rel=1e-4)
    cdf = sum(
        0.5 * np.vectorize(lambda x: 0.5 * (1 + math.erf(x / math.sqrt(2))))((error - m) / (2 * NOISE))
        for m in (-0.1, 0.1)
    )
    inside = np.stack([(np.abs(2 * cdf - 1) <= p).mean(0) for p in quality.LEVELS], -1)
    assert np.array(found["coverage"][:2]) == pytest.approx(inside, abs=2e-3)


def test_many_steps_follow_the_recorded_actions():
    exact = episodes(12, 62, noise=0.0)
    everywhere = torch.ones(len(exact), dtype=torch.bool)
    found = quality.many_steps(Exact(), TREE, exact, everywhere)
    assert found["horizon"] == quality.HORIZON and len(found["mean"]["median"]) == quality.HORIZON
    # the truth has no error at any horizon
    assert max(found["mean"]["high"]) < 1e-5 and max(found["return_rmse"]) < 1e-4
    assert min(found["unchanged"]["median"]) > 0.1
    data = episodes(12, 62)
    noisy = quality.many_steps(Exact(), TREE, data, everywhere)
    # s_k is off by noise * sqrt(sum of 0.81^i, i < k)
    for k in (1, 3, 20):
        assert noisy["rmse"][k - 1] == pytest.approx([NOISE * math.sqrt((1 - 0.81**k) / 0.19)] * 2, rel=0.2)


def test_roll_outs_start_where_enough_steps_are_recorded():
    data = episodes(4, 10, successors=False)  # without them the last row of an episode has no known successor
    starts, horizon = quality.starts_of(data, torch.ones(len(data), dtype=torch.bool))
    assert horizon == 5 and len(starts) == 20  # 36 rows have a step ahead; 6 steps would leave fewer than half of them
    assert all(s % 10 < 5 for s in starts.tolist())
    only = torch.zeros(len(data), dtype=torch.bool)
    only[13] = True
    starts, horizon = quality.starts_of(data, only)
    assert starts.tolist() == [13] and horizon == 6  # rows 13 to 18 have successors
    assert quality.starts_of(data, torch.zeros(len(data), dtype=torch.bool))[1] == 0


def test_auroc_by_hand():
    assert quality.auroc(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([2.0, 4.0])) == pytest.approx(4.5 / 6)
    assert quality.auroc(torch.zeros(5), torch.zeros(7)) == 0.5


# ---- real ensembles


def ensemble(data, **settings):
    """An untrained one and its tensors."""
    wanted = {
        "hidden": [8],
        "members": 3,
        "elites": 2,
        "termination": "never",
        "reward": "learned",
        "epoch": 1,
        **settings,
    }
    model = WorldModel(DynamicsSettings(**wanted), data.spec)
    tree = {
        "params": dict(model.network.named_parameters()),
        "mean": torch.zeros(model.in_dim),
        "std": torch.ones(model.in_dim),
        "elites": torch.arange(wanted["elites"]),
        "low": torch.full(data.spec.observation_shape, -9.0),
        "high": torch.full(data.spec.observation_shape, 9.0),
        "scale": torch.ones(model.out_dim),
    }
    return model, {k: {n: p.detach() for n, p in v.items()} if k == "params" else v for k, v in tree.items()}


def discrete(seed=0):
    draw = draws(seed)
    ends = np.arange(300) % 30 == 29
    return from_arrays(draw.normal(size=(300, 2)), draw.integers(0, 4, 300), draw.normal(size=300), ends, num_actions=4)


def wide():
    """More dimensions than have names in the picture, one of them constant."""
    draw, ends = draws(3), np.arange(300) % 30 == 29
    observations = draw.normal(size=(300, 50))
    observations[:, 3] = 2.0
    return from_arrays(
        observations, draw.uniform(-1, 1, (300, 1)), draw.normal(size=300), ends, action_low=-1.0, action_high=1.0
    )


@pytest.mark.parametrize(
    "data, settings",
    [
        (episodes, {"termination": "learned"}),
        (episodes, {"history": 3, "calibrated": True}),
        (wide, {"members": 1, "elites": 1, "loss": "squared", "delta": False}),
        (discrete, {"termination": "learned", "history": 2}),
    ],
)
def test_every_kind_of_ensemble_has_a_report(data, settings, tmp_path, capsys, pictures):
    data = data()
    model, tree = ensemble(data, **settings)
    quality_report.report(tmp_path, model, [(Replica(0), tree)], data, split(data, DynamicsSettings()), quiet=False)
    found = json.loads((tmp_path / "model.json").read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    assert (
        found["dimensions"][0] == "obs[0]"
        and found["dimensions"][-1] == "reward"
        and "that it was not trained on" in found["measured_on"]
    )
    explained, coverage, many, each, *_ = pictures["model.png"].axes
    one = found["models"][0]["one_step"]
    for line, key in zip(explained.lines, ("r2", "r2_change"), strict=True):
        np.testing.assert_allclose(line.get_ydata(), np.array(one[key], float).clip(min(line.get_ydata()), None))
    assert len(coverage.lines) >= 3 and len(many.lines) == 3 and len(each.images) == 1
    assert found["models"][0]["termination"]["function"] == model.config.termination
    assert "many steps ahead" in capsys.readouterr().out
    areas = quality.ood(model, tree, data, data)
    assert all(area == 0.5 for area in areas.values()) and ("aleatoric" in areas) == (model.config.loss == "likelihood")


def test_few_episodes_are_measured_on_held_out_rows():
    data = episodes(3)
    model, tree = ensemble(data)
    parts = split(data, DynamicsSettings())
    chosen = quality.sample(data, parts)
    assert (
        not len(parts.test) and chosen.rows.equal(parts.held_out) and "no episode was kept apart" in chosen.description
    )
    assert quality.measured(model, tree, data, chosen)["many_steps"]["horizon"] >= 1


def test_ood_sees_what_is_far_and_density_is_not_fitted_to_what_it_judges():
    data, far = episodes(), episodes(60, 4, seed=1, offset=5.0)
    model, tree = ensemble(data)
    rows = data.transition_rows()
    areas = quality.ood(model, tree, data, far, rows[::3])
    assert areas["density"] > 0.8 and set(areas) == {
        "aleatoric",
        "ensemble_std",
        "deviation",
        "disagreement",
        "density",
        "single",
    }
    assert areas["density"] != quality.ood(model, tree, data, far)["density"]


def test_a_report_is_made_once_for_the_same_models(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(quality_plots, "draw", lambda result, out: out.write_text("a picture"))
    data = episodes()
    model, tree = ensemble(data)
    parts, replicas = split(data, model.config), [(Replica(0), tree)]

    def write():
        save(tmp_path / FOLDER / f"{Replica(0).name}.safetensors", model, replicas[0][1], {})
        quality_report.report(tmp_path, model, replicas, data, parts, quiet=False)
        return capsys.readouterr().out

    assert write() and not write()
    replicas = [(Replica(0), {**tree, "scale": torch.full((3,), 2.0)})]
    assert write()
    (tmp_path / "model.json").write_text("{ broken")
    assert write()


def test_data_take_the_units_of_the_models():
    from offrl.data.transforms.columns import normalize_observations, scale_rewards

    data = episodes()
    there = normalize_observations(scale_rewards(data, 2.0, 1.0))
    here = quality_report.in_units_of(episodes(), there.spec)
    for name in ("observations", "next_observations", "rewards"):
        torch.testing.assert_close(here.columns[name], there.columns[name])
    assert here.spec == there.spec
    assert quality_report.in_units_of(data, data.spec).spec == data.spec


# ---- the command


@pytest.fixture(scope="module")
def quickly():
    """The command without its pictures, of which others see enough."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality_plots, "draw", lambda result, out: checkpoint.write_text(out, "a picture"))
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory, quickly):
    """A run on a file, and other files."""
    import h5py

    folder = tmp_path_factory.mktemp("model")
    for name, made in (("mine", episodes()), ("far", episodes(seed=1, offset=5.0)), ("wide", episodes(seed=2))):
        with h5py.File(folder / f"{name}.hdf5", "w") as file:
            for key in ("observations", "next_observations", "actions", "rewards", "terminations", "truncations"):
                column = made.columns[key].numpy()
                column = (
                    np.concatenate([column, column], -1) if name == "wide" and key.endswith("observations") else column
                )
                file[{"terminations": "terminals", "truncations": "timeouts"}.get(key, key)] = column
    small = [
        "algo.hidden=[8]",
        "algo.members=3",
        "algo.elites=2",
        "algo.batch_size=16",
        "steps=12",
        "algo.epoch=4",
        "seeds=2",
    ]
    where = [
        f"dataset={folder}/mine.hdf5",
        "dataset.action_low=[-1]",
        "dataset.action_high=[1]",
        f"runs_dir={folder}",
        "name=run",
    ]
    assert cli.main(["train", "algo=dynamics", "compile=eager", "quiet=true", *small, *where]) == 0
    return folder


def model(capsys, *arguments):
    status = cli.main(["model", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


RANGE = ("dataset.action_low=[-1]", "dataset.action_high=[1]")


def test_the_command_measures_a_run_again(trained, capsys):
    written = json.loads((trained / "run" / "model.json").read_text())
    status, out, _ = model(capsys, trained / "run", f"out={trained}/again")
    again = json.loads((trained / "again" / "model.json").read_text())
    assert status == 0 and "one step ahead" in out and again == written  # the same numbers, bit for bit
    assert [m["seed"] for m in again["models"]] == [0, 1]


def test_the_command_takes_other_data_and_tells_them_apart(trained, capsys):
    status, out, _ = model(capsys, trained / "run", f"dataset={trained}/far.hdf5", *RANGE)
    assert status == 0 and "12 episodes that it was not trained on (far)" in out
    assert (trained / "run" / "model-far" / "model.json").exists()
    one = next((trained / "run" / FOLDER).glob("*.safetensors"))
    status, out, _ = model(capsys, one, f"ood={trained}/far.hdf5", *RANGE)
    assert status == 0 and "tells far from mine" in out
    written = json.loads((trained / "run" / f"model-{one.stem}" / "model.json").read_text())
    assert len(written["models"]) == 1 and written["ood"]["auroc"][0]["density"] > 0.5


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "usage: offrl model RUN"),
        (["nowhere"], "does not exist"),
        (["RUN", "dataset=wide.hdf5", *RANGE], "has (4,) and 1 action"),
        (["RUN", "dataset.format=d4rl"], "needs the dataset itself"),
        (["RUN", "odd=far"], "no setting 'odd'. Did you mean 'ood'?"),
    ],
)
def test_mistakes_take_one_line(trained, capsys, arguments, said):
    arguments = [a.replace("RUN", f"{trained}/run").replace("wide", f"{trained}/wide") for a in arguments]
    status, _, err = model(capsys, *arguments)
    assert status == 2 and said in err and err.count("\n") == 1
