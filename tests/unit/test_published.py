"""Published scores: the numbers of the papers under the exact names of the datasets."""

from __future__ import annotations

import json
import math
from importlib import resources

import pytest
import yaml

from offrl import registry
from offrl.envs import d4rl, published
from offrl.statistics.aggregate import aggregates

KINDS = ("medium", "medium-replay", "medium-expert")
GYM = [f"{robot}-{kind}-v2" for robot in ("halfcheetah", "hopper", "walker2d") for kind in KINDS]
ANTMAZE = [
    f"antmaze-{maze}-v2"
    for maze in ("umaze", "umaze-diverse", "medium-play", "medium-diverse", "large-play", "large-diverse")
]
ADROIT = [
    f"{task}-{data}-v1" for task in ("pen", "door", "hammer", "relocate") for data in ("human", "cloned", "expert")
]
ALL18 = [
    f"{r}-{k}-v2" for r in ("halfcheetah", "hopper", "walker2d") for k in (*KINDS, "random", "expert", "full-replay")
]


def by_label(label: str, dataset: str, algorithm: str) -> float:
    return next(p.mean for p in published.every(dataset, algorithm) if p.label == label)


@pytest.mark.parametrize(
    ("label", "datasets", "averages", "rounding"),
    [  # the averages that the sources print: they catch a slip in any number below them
        (
            "CORL",
            GYM,
            {
                "bc": 50.40,
                "percent_bc": 69.29,
                "td3_bc": 76.45,
                "awac": 79.39,
                "cql": 78.28,
                "iql": 81.63,
                "rebrac": 89.74,
                "sac_n": 83.52,
                "edac": 92.92,
                "dt": 73.84,
            },
            0.00501,
        ),
        (
            "CORL",
            ANTMAZE,
            {
                "bc": 17.21,
                "percent_bc": 19.71,
                "td3_bc": 19.33,
                "awac": 18.58,
                "cql": 50.71,
                "iql": 57.17,
                "rebrac": 78.42,
                "dt": 18.12,
            },
            0.00501,
        ),
        (
            "CORL",
            [f"maze2d-{size}-v1" for size in ("umaze", "medium", "large")],
            {
                "bc": 1.13,
                "percent_bc": 12.58,
                "td3_bc": 61.99,
                "awac": 121.92,
                "cql": 33.65,
                "iql": 46.23,
                "rebrac": 96.77,
            },
            0.01,
        ),
        (
            "CORL",
            ADROIT,
            {
                "bc": 48.18,
                "percent_bc": 42.69,
                "td3_bc": 10.40,
                "awac": 55.71,
                "cql": 1.53,
                "iql": 53.43,
                "rebrac": 59.39,
                "sac_n": 12.43,
                "edac": 18.78,
                "dt": 49.21,
            },
            0.00501,
        ),
        ("ReBRAC paper", ALL18, {"td3_bc": 70.3, "iql": 72.9, "sac_rnd": 82.6, "rebrac": 81.2}, 0.0501),
        ("ReBRAC paper", ANTMAZE, {"rebrac": 76.8}, 0.1),
        ("EDAC paper", ALL18, {"cql": 73.6, "sac_n": 84.4, "edac": 85.2}, 0.0501),
    ],
)
def test_averages_that_the_sources_print(
    label: str, datasets: list[str], averages: dict[str, float], rounding: float
) -> None:
    for algorithm, average in averages.items():
        scores = [[by_label(label, d, algorithm)] for d in datasets]
        assert aggregates(scores, reps=1)["mean"].value == pytest.approx(average, abs=rounding), algorithm


def test_spot_checks() -> None:
    one = published.published("hopper-medium-v2", "iql")
    assert one is not None and (one.mean, one.std, one.unit) == (67.53, 3.78, "score")
    assert "last checkpoint, 4 seeds" in one.source and "CORL" in one.source
    expect = {
        ("walker2d-medium-expert-v2", "td3_bc"): (110.03, 0.36),
        ("antmaze-umaze-v2", "iql"): (77.0, 5.52),
        ("halfcheetah-random-v2", "rebrac"): (29.5, None),
        ("hopper-medium-v2", "mobile"): (103.6, 1.0),
        ("walker2d-expert-v2", "rorl"): (115.4, None),
        ("DMSD", "bc"): (65.09, 1.64),
        ("SafetyHalfCheetah", "rambo"): (-200.4, None),
        ("antmaze-giant-navigate-v0", "hiql"): (65.0, 5.0),
        ("pointmaze-medium-navigate-v0", "qrl"): (82.0, 5.0),
    }
    for (dataset, algorithm), numbers in expect.items():
        found = published.published(dataset, algorithm)
        assert found is not None and (found.mean, found.std) == numbers
    assert [p.label for p in published.every("hopper-medium-v2", "iql")] == ["CORL", "ReBRAC paper", "OfflineRL-Kit"]


def test_numbers_that_the_specification_marks_as_from_memory_are_not_there() -> None:
    for dataset, algorithm in (
        ("pointmaze-medium-navigate-v0", "gcbc"),
        ("cube-single-play-v0", "gciql"),
        ("hopper-random-v2", "mobile"),
    ):
        assert published.published(dataset, algorithm) is None


def test_only_exact_names() -> None:
    for name in (
        "hopper-medium",
        "hopper_medium",
        "hopper-medium-v2.hdf5",
        "mujoco/hopper/medium-v0",
        "hopper_medium-v2",
    ):
        assert published.published(name, "iql") is None
    assert published.published("hopper-medium-v2", "iql (temperature=5)") is None


def test_every_name_is_a_data_set_and_no_number_is_there_twice() -> None:
    suites = resources.files("offrl") / "configs" / "suite"
    listed = {
        str(d)
        for name in ("ogbench", "ogbench-singletask", "ogbench-singletask-default", "neorl2")
        for d in yaml.safe_load((suites / f"{name}.yaml").read_text())["datasets"]
    }
    known = {*d4rl.table(), *listed}
    assert {d for d, _ in published.table()} <= known
    for numbers in published.table().values():
        assert len({p.label for p in numbers}) == len(numbers)
        assert all(math.isfinite(p.mean) and (p.std is None or p.std >= 0) for p in numbers)

    def no_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
        assert len({k for k, _ in pairs}) == len(pairs), pairs
        return dict(pairs)

    json.loads((resources.files("offrl.envs") / "published.json").read_text(), object_pairs_hook=no_twins)


def test_registered() -> None:
    assert registry.get("published", "papers")("hopper-medium-v2", "bc").mean == 53.51
