"""Which variants to train on: MBTL's acquisition and Gaussian process by hand, equal spacing, and tasks that are made
up.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from offrl.benchmark.config import VariantsConfig
from offrl.benchmark.variant_runs import VariantEnv, _variants
from offrl.benchmark.variants import Bank, acquisition, equal, following, gaussian_process, slope_of, train_bank
from offrl.cli.main import main
from offrl.errors import UserError
from offrl.tasks.environments import make_env
from offrl.tasks.perturbed import Perturbation
from offrl.tasks.task import Task


def test_acquisition_by_hand() -> None:
    """Worked out in float64 from the formula; the first: (.6048 + .1048 + .1048) / 3."""
    gains = acquisition(
        np.array([0.8, 0.6, 0.5]),
        np.array([0.1, 0.1, 0.2]),
        np.array([0.3, 0.55, 0.3]),
        np.array([0.0, 0.5, 1.0]),
        0.5,
        2,
    )
    np.testing.assert_allclose(gains, [0.2714813741, 0.1548147074, 0.1365431383], atol=1e-10)


def test_gaussian_process_against_the_textbook() -> None:
    x, y, at = np.array([0.1, 0.5, 0.9]), np.array([0.2, 0.9, 0.4]), np.linspace(0.0, 1.0, 5)
    mean, deviation = gaussian_process(x, y, at)

    def of(length: float, variance: float) -> tuple[float, np.ndarray, np.ndarray]:
        def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
            return variance * np.exp(-0.5 * (a[:, None] - b) ** 2 / length**2)

        inverse = np.linalg.inv(kernel(x, x) + 0.01 * np.eye(3))
        z, k = y - y.mean(), kernel(at, x)
        determinant = np.linalg.slogdet(inverse)[1]
        likelihood = -0.5 * z @ inverse @ z + 0.5 * determinant
        return likelihood, y.mean() + k @ inverse @ z, np.sqrt(variance - np.diag(k @ inverse @ k.T))

    fits = [of(length, variance) for length in np.geomspace(0.01, 10, 31) for variance in np.geomspace(0.01, 10, 16)]
    _, mean_by_hand, deviation_by_hand = max(fits, key=lambda fit: fit[0])
    np.testing.assert_allclose(mean, mean_by_hand, atol=1e-8)
    np.testing.assert_allclose(deviation, deviation_by_hand, atol=1e-6)


def test_equal_spacing() -> None:
    assert equal(20, 1) == [10] and equal(20, 3) == [10, 3, 16]
    assert sorted(equal(7, 7)) == list(range(7)) and sorted(equal(10, 5)) == [1, 3, 5, 7, 9]


def test_slope_and_bank_by_hand() -> None:
    positions = np.array([0.0, 0.5, 1.0])
    rows = {0: np.array([1.0, 0.5, 0.6]), 2: np.array([0.0, 0.4, 0.7])}
    assert slope_of(rows, positions) == pytest.approx((1.0 + 0.6) / 2)  # of .5 / .5 and .3 / .5; the others are far
    fine = np.linspace(0.0, 1.0, 11)
    assert slope_of({5: 1.0 - np.minimum(3.0 * np.abs(fine - 0.5), 0.6)}, fine) == pytest.approx(3.0)
    bank = Bank(np.stack(list(rows.values())), (0, 2), positions)
    assert bank.best.tolist() == [0, 0, 1] and bank.nearest.tolist() == [0, 0, 1]
    assert bank.earned(bank.best).tolist() == [1.0, 0.5, 0.7]


def test_made_up_tasks() -> None:
    """Training at i earns `top[i]` there and less by 2 for a unit of distance."""
    positions = np.linspace(0.0, 1.0, 21)
    top = 1.0 - 0.5 * positions  # the left is easier

    def trained(choose: str, budget: int) -> Bank:
        return train_bank(positions, budget, choose, lambda i: top[i] - 2.0 * np.abs(positions - positions[i]))

    by_mbtl, by_spacing = trained("mbtl", 4), trained("equal", 4)
    assert by_mbtl.trained[0] == 10 and len(set(by_mbtl.trained)) == 4
    means = [float(bank.earned(bank.best).mean()) for bank in (by_mbtl, by_spacing, trained("mbtl", 1))]
    assert means[0] > means[2] + 0.15 and means[0] > means[1] - 0.05
    assert sorted(trained("mbtl", 21).trained) == list(range(21))
    # equal scores say nothing, and nothing divides by 0
    assert following({2: np.ones(5)}, np.linspace(0.0, 1.0, 5), 3, "mbtl") != 2


def test_refusals() -> None:
    with pytest.raises(UserError, match="budget=4 trainings of 3 variants"):
        train_bank(np.linspace(0.0, 1.0, 3), 4, "equal", lambda i: np.zeros(3))
    with pytest.raises(UserError, match="one variant alone"):
        train_bank(np.zeros(1), 1, "mbtl", lambda i: np.zeros(1))


def test_a_variant_is_altered_for_good() -> None:
    task = Task(name="a", env_id="InvertedPendulum-v5")
    env = VariantEnv(task, Perturbation({"mass.pole": 20.0}))()
    env.reset(seed=0)
    env.reset(seed=1)
    masses = [float(e.unwrapped.model.body("pole").mass[0]) for e in (env, make_env(task))]  # type: ignore[attr-defined]
    assert masses[0] == 20.0 and masses[1] != 20.0


def test_variants_that_another_friction_hides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hopper = Task(name="hopper", env_id="Hopper-v5")
    _variants(VariantsConfig(robust="rrls:1", points="grid:10"), hopper)
    told = capsys.readouterr().err
    assert "others than floor have up to 2: 7 of the 10 variants may be the same; robust=contact:1 changes" in told
    (tmp_path / "foot.yaml").write_text("friction.foot_geom: [2.5, 3]\n")  # all others have 1 at most
    for robust in ("contact:1", str(tmp_path / "foot.yaml")):
        _variants(VariantsConfig(robust=robust, points="grid:10"), hopper)
        assert capsys.readouterr().err == ""


@pytest.mark.slow  # 6 s of a core
def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The variant of each run, its row of scores, the same command again, and another one under the same name."""
    monkeypatch.chdir(tmp_path)
    Path("pole.yaml").write_text("mass.pole: [1, 31]\n")
    study = ["robust=pole.yaml", "points=grid:3", "budget=2", "choose=mbtl", "name=few"]
    sizes = ["envs=2", "algo.horizon=32", "steps=64", "eval.every=0", "eval.episodes=1", "eval.max_steps=5"]
    command = ["finetune", "algo=ppo", "env=InvertedPendulum-v5", *study, *sizes, "quiet=true", "seeds=1"]
    assert main(command) == 0
    out = capsys.readouterr().out
    assert "variant 2 of 3: mass.pole=16" in out and "with the one that was trained nearest" in out
    lines = Path("runs/few/variants.csv").read_text().splitlines()
    assert lines[0] == "trained,mass.pole=1,mass.pole=16,mass.pole=31" and len(lines) == 3
    assert lines[1].startswith("variant-1,") and Path("runs/few/variant-1/policies").is_dir()
    assert "InvertedPendulum-v5 with mass.pole=16" in Path("runs/few/variant-1/scores.csv").read_text()
    assert main(command) == 0 and "variant 2 of 3" not in capsys.readouterr().out
    assert main([*command, "algo.discount=0.9"]) == 2 and "other settings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["robust=rrls"], "varies mass.pole, mass.cart"),
        (["robust=rrls:1", "points=grid:4", "budget=5"], "there are no more"),
        (["robust=rrls:1", "env=none"], "name it, env=ID"),
        (["robust=rrls:1", "points=latin:9"], "at equal distances"),
        (["budget=3"], "which robust= names"),
    ],
)
def test_mistakes_in_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["finetune", "algo=ppo", "env=InvertedPendulum-v5", *words]) == 2
    error = capsys.readouterr().err.strip()
    assert text in error and "\n" not in error
