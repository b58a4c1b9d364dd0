"""The published settings of single datasets: every file composes, for every dataset that it is for, and holds what its
source says.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest

from offrl import registry
from offrl.errors import UserError
from offrl.settings import compose as composing
from offrl.settings import presets as experiments
from offrl.settings.compose import compose
from offrl.settings.dataset import DatasetConfig
from offrl.settings.field import check
from offrl.settings.presets import config_folder, config_names, find_experiment, read_yaml
from offrl.settings.train import TrainConfig
from tests.support.tiers import nightly_but

TASKS = sorted(json.loads((Path(composing.__file__).parents[1] / "envs" / "d4rl.json").read_text())["tasks"])
D4RL = sorted({name.rpartition("-v")[0]: name for name in TASKS}.values())  # the last version of each
SUITES = {p.stem: read_yaml(p)["datasets"] for p in sorted((config_folder() / "suite").glob("*.yaml"))}
MINARI = (
    "D4RL/antmaze/umaze-diverse-v1",
    "D4RL/pointmaze/large-v2",
    "D4RL/pen/cloned-v2",
    "D4RL/kitchen/mixed-v2",
    "mujoco/hopper/expert-v0",
)
OGBENCH = SUITES["ogbench"]
SINGLE_TASKS = SUITES["ogbench-singletask-default"] + SUITES["ogbench-singletask"]
CHUNKING = SUITES["ogbench-chunking"]
TEXT = ("text-maze", "text-maze-compact", "text-maze-po", "text-wordle")
META_RL = (
    "point-robot",
    "AntDir-v0",
    "HalfCheetahDir-v0",
    "half_cheetah_vel",
    "HopperRandParams-v0",
    "walker-rand-params",
    "reach-v2",
)
ALL_DATA = (*D4RL, *OGBENCH, *SINGLE_TASKS, *CHUNKING, *MINARI, *TEXT, *META_RL, "builtin")
EXPERIMENTS = config_names("experiment")
ROWS = [(e, row) for e in EXPERIMENTS for row in read_yaml(config_folder() / "experiment" / f"{e}.yaml").get("per", {})]


found = functools.cache(find_experiment)


def settings(algo: str, dataset: str, **values: Any) -> TrainConfig:
    return compose({"algo": algo, "dataset": dataset, **values})


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_a_file_belongs_to_an_algorithm_and_fits_its_settings(experiment: str) -> None:
    algo = experiment.partition("/")[0]
    assert algo in registry.names("algo")
    values = read_yaml(config_folder() / "experiment" / f"{experiment}.yaml")
    text = (config_folder() / "experiment" / f"{experiment}.yaml").read_text()
    assert text.startswith("# "), "the source is in the first lines"
    assert set(values) <= {"match", "per", "algo", "dataset", "eval", "steps"}
    mine = [d for d in ALL_DATA if found(algo, d) == experiment]
    asked_for = not experiments._experiment_file(experiment)[0]
    assert bool(mine) != asked_for
    fields = {f.name for f in dataclasses.fields(registry.get("algo", algo).Config)}
    assert set(values.get("algo", {})) <= fields  # also where no run below composes it
    for name, value in experiments.dotted(values).items():
        assert not (isinstance(value, str) and value[:1].isdigit()), (
            f"{name}: {value} is text in YAML 1.1; write 1.0e-4"
        )


# an algorithm is composed by Hydra in a quarter of a second
@pytest.mark.parametrize(
    "experiment", nightly_but([e for e in EXPERIMENTS if e.startswith(("iql/", "dt/", "mopo/"))], EXPERIMENTS)
)
def test_a_file_composes_for_its_first_data_set(experiment: str) -> None:
    algo = experiment.partition("/")[0]
    # the rows of single datasets are checked below
    for dataset in [d for d in ALL_DATA if found(algo, d) == experiment][:1]:
        config = settings(algo, dataset)
        assert config.experiment == experiment
        check_kinds(config.algo)
        check_kinds(config.dataset)


@pytest.mark.parametrize(("experiment", "row"), ROWS)
def test_a_row_is_for_a_data_set_of_a_benchmark_and_is_what_its_run_gets(experiment: str, row: str) -> None:
    algo, (_, common, rows) = experiment.partition("/")[0], experiments._experiment_file(experiment)
    others = {
        "ogbench": OGBENCH,
        "ogbench-singletask": SINGLE_TASKS,
        "ogbench-chunking": CHUNKING,
        "text-tasks": TEXT,
        "meta-rl": META_RL,
    }
    benchmark = others.get(experiment.partition("/")[2], D4RL)
    mine = [d for d in benchmark if experiments._fitting(d, rows) == row]
    assert mine, "no dataset of the benchmark has this row"
    for part, schema in (("algo", registry.get("algo", algo).Config), ("dataset", DatasetConfig)):
        values = {
            k.removeprefix(f"{part}."): v
            for k, v in {**experiments.dotted(common), **experiments.dotted(rows[row])}.items()
        }
        values = {k: v for k, v in values.items() if k in schema.__dataclass_fields__ and "." not in k}
        made = schema(**values)
        check(made)
        check_kinds(made)
    names = {k.partition(".")[2] for k in experiments.dotted(rows[row]) if k.startswith("algo.")}
    assert names <= set(registry.get("algo", algo).Config.__dataclass_fields__)


def test_a_run_gets_its_row_and_says_which() -> None:
    config = settings("edac", "walker2d-medium-expert-v2")
    assert (config.experiment, config.match) == ("edac/d4rl-gym", ["walker2d-medium-expert*"])
    assert (config.algo.critics, config.algo.eta) == (10, 5.0)


def check_kinds(part: Any) -> None:
    """No number written as text ("1e-4" is text in YAML 1.1) and no whole number for a boolean."""
    for field in dataclasses.fields(part):
        value, kind = getattr(part, field.name), str(field.type)
        if value is not None and kind.startswith(("float", "int", "bool", "str")):
            assert type(value).__name__ == kind.partition(" ")[0], f"{field.name}={value!r} is no {kind}"


MODEL_BASED = ("mopo", "combo", "mobile", "morel")
# (algorithm, suite) without a file: the paper and CORL use the algorithm's defaults, or have no settings for it
NOTHING_PUBLISHED = {
    **{("bc", s): "defaults" for s in ("d4rl-gym", "d4rl-adroit", "d4rl-kitchen")},
    **{("percent_bc", s): "defaults" for s in ("d4rl-gym", "d4rl-adroit", "d4rl-kitchen")},
    **{("td3_bc", s): "defaults" for s in ("d4rl-gym", "d4rl-adroit", "d4rl-kitchen")},
    **{(a, "d4rl-kitchen"): "none" for a in ("cql", "cal_ql", "awac", "rebrac", "sac_n", "edac")},
    **{("cal_ql", s): "none" for s in ("d4rl-gym", "d4rl-adroit", "d4rl-maze2d")},
    ("sac_n", "d4rl-adroit"): "none",
    **{("recoil", s): "none" for s in ("d4rl-antmaze", "d4rl-kitchen", "d4rl-maze2d")},
    ("xql", "d4rl-maze2d"): "none",
    ("f_dvl", "d4rl-maze2d"): "none",
    **{(a, s): "none" for a in MODEL_BASED for s in ("d4rl-antmaze", "d4rl-kitchen", "d4rl-maze2d")},
    **{(a, "d4rl-adroit"): "none" for a in ("mopo", "combo", "morel")},
    **{("rambo", s): "none" for s in ("d4rl-adroit", "d4rl-kitchen", "d4rl-maze2d")},
    ("morel", "d4rl-gym"): "defaults",
}
ALGORITHMS = (
    "bc",
    "percent_bc",
    "td3_bc",
    "iql",
    "cql",
    "cal_ql",
    "awac",
    "rebrac",
    "sac_n",
    "edac",
    "xql",
    "f_dvl",
    "recoil",
    "rambo",
    *MODEL_BASED,
)


@pytest.mark.parametrize("suite", [s for s in SUITES if s.startswith("d4rl-")])
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_no_data_set_of_a_suite_is_left_without_settings(algo: str, suite: str) -> None:
    chosen = {d: found(algo, d) for d in SUITES[suite]}
    without = [d for d, e in chosen.items() if e == "none"]
    assert without == (SUITES[suite] if (algo, suite) in NOTHING_PUBLISHED else [])
    if algo in ("rebrac", "edac", "sac_n") and suite in ("d4rl-gym", "d4rl-antmaze", "d4rl-adroit"):
        for d, e in chosen.items():  # tables with a row for each
            assert composing.experiment_settings(e, d)[0] or e in ("none", "edac/d4rl-antmaze", "sac_n/d4rl-antmaze"), d


HAND_PICKED = {  # (algorithm, dataset) -> numbers from specification A
    ("rebrac", "hopper-medium-expert-v2"): {
        "actor_bc": 0.1,
        "critic_bc": 0.01,
        "batch_size": 1024,
        "learning_rate": 1e-3,
    },
    ("rebrac", "/data/hopper_medium_replay.hdf5"): {"actor_bc": 0.05, "critic_bc": 0.5},
    ("rebrac", "hopper-medium-v2"): {"actor_bc": 0.01, "critic_bc": 0.001},
    ("rebrac", "mujoco/hopper/expert-v0"): {"actor_bc": 0.1, "critic_bc": 0.001},
    ("rebrac", "halfcheetah-random-v2"): {"actor_bc": 0.001, "critic_bc": 0.1},
    ("rebrac", "walker2d-random-v2"): {"actor_bc": 0.01, "critic_bc": 0.0},
    ("rebrac", "walker2d-full-replay-v2"): {"actor_bc": 0.01, "critic_bc": 0.01},
    ("rebrac", "antmaze-medium-diverse-v2"): {
        "actor_bc": 0.001,
        "critic_bc": 0.0,
        "discount": 0.999,
        "learning_rate": 5e-5,
    },
    ("rebrac", "D4RL/antmaze/umaze-v1"): {"actor_bc": 0.003, "critic_bc": 0.002, "actor_learning_rate": 3e-4},
    ("rebrac", "relocate-expert-v1"): {"actor_bc": 0.05, "critic_bc": 0.01, "batch_size": 256, "learning_rate": 3e-4},
    ("rebrac", "hammer-cloned-v1"): {"actor_bc": 0.1, "critic_bc": 0.5},
    ("rebrac", "maze2d-large-v1"): {"actor_bc": 0.003, "critic_bc": 0.001},
    ("cql", "walker2d-medium-v2"): {
        "conservative_weight": 10.0,
        "actor_learning_rate": 3e-5,
        "action_gap": None,
        "max_target_actions": 1,
    },
    ("cql", "antmaze-large-play-v2"): {
        "conservative_weight": 5.0,
        "action_gap": 0.8,
        "max_target_actions": 10,
        "critic_hidden": [256] * 5,
    },
    ("cql", "pen-human-v1"): {"conservative_weight": 1.0, "actor_learning_rate": 1e-4},
    ("cql", "maze2d-umaze-v1"): {"action_gap": 5.0},
    ("cal_ql", "antmaze-umaze-v2"): {
        "action_gap": 0.8,
        "hidden": [256, 256],
        "critic_hidden": [256] * 4,
        "discount": 0.99,
    },
    ("awac", "hopper-medium-v2"): {"temperature": 3.0},
    ("awac", "door-human-v1"): {"temperature": 10.0},
    ("sac_n", "hopper-medium-v2"): {"critics": 500},
    ("sac_n", "hopper-medium-replay-v2"): {"critics": 200},
    ("sac_n", "walker2d-medium-v2"): {"critics": 20},
    ("edac", "hopper-medium-expert-v2"): {"critics": 50, "eta": 1.0},
    ("edac", "halfcheetah-medium-expert-v2"): {"critics": 10, "eta": 5.0},
    ("edac", "walker2d-medium-replay-v2"): {"critics": 10, "eta": 1.0},
    ("edac", "pen-human-v1"): {"critics": 20, "eta": 1000.0},
    ("edac", "maze2d-medium-v1"): {"critics": 10, "eta": 0.1},
    ("xql", "hopper-medium-v2"): {"gumbel_temperature": 2.0, "gumbel_clip": 7.0, "batch_size": 256},
    ("xql", "antmaze-umaze-v0"): {"gumbel_temperature": 0.6, "temperature": 10.0, "actor_schedule": "constant"},
    ("f_dvl", "antmaze-umaze-v2"): {"divergence": "total_variation", "greediness": 0.8},
    ("f_dvl", "kitchen-mixed-v0"): {"divergence": "reverse_kl", "gumbel_temperature": 8.0, "temperature": 0.5},
    ("iql", "antmaze-umaze-v2"): {"expectile": 0.9, "temperature": 10.0},
    ("rambo", "halfcheetah-medium-expert-v2"): {
        "horizon": 5,
        "adversarial_weight": 0.0,
        "clone_epochs": 50,
        "model_learning_rate": 3e-4,
    },
    ("rambo", "hopper-random-v2"): {"horizon": 2, "adversarial_weight": 3e-4},
    ("rambo", "walker2d-medium-expert-v2"): {"horizon": 2, "adversarial_weight": 3e-4},
    ("rambo", "walker2d-medium-replay-v2"): {
        "horizon": 5,
        "adversarial_weight": 0.0,
        "model_learning_rate": 3e-4,
        "rollout_every": 250,
    },
    ("rambo", "walker2d-random-v2"): {"horizon": 5, "adversarial_weight": 0.0, "model_learning_rate": 0.0},
    ("rambo", "antmaze-large-play-v2"): {
        "adversarial_weight": 3e-4,
        "model_learning_rate": 3e-4,
        "clone_epochs": 0,
        "rollout_retain": 5,
    },
    ("rambo", "antmaze-umaze-v2"): {
        "adversarial_weight": 3e-4,
        "model_learning_rate": 3e-4,
        "clone_epochs": 0,
        "random_rollouts": False,
    },
    ("rambo", "antmaze-umaze-diverse-v2"): {
        "adversarial_weight": 0.0,
        "model_learning_rate": 0.0,
        "rollout_every": 1000,
    },
    ("rambo", "antmaze-medium-play-v2"): {
        "adversarial_weight": 0.0,
        "model_learning_rate": 0.0,
        "random_rollouts": True,
    },
    ("mopo", "halfcheetah-medium-v2"): {
        "horizon": 5,
        "penalty": 0.5,
        "actor_schedule": "cosine",
        "decay_steps": 3_000_000,
    },
    ("mopo", "/data/hopper_medium_replay.hdf5"): {"horizon": 5, "penalty": 2.5},
    ("mopo", "walker2d-medium-replay-v2"): {"horizon": 1, "penalty": 2.5},
    ("mopo", "walker2d-medium-v2"): {"horizon": 5, "penalty": 0.5},
    ("combo", "walker2d-medium-v2"): {"horizon": 1, "conservative_weight": 5.0},
    ("combo", "hopper-medium-replay-v2"): {"horizon": 5, "conservative_weight": 0.5, "real_share": 0.5},
    ("mobile", "halfcheetah-medium-expert-v2"): {
        "horizon": 5,
        "inconsistency_weight": 1.0,
        "real_share": 0.5,
        "min_target": 0.0,
    },
    ("mobile", "hopper-medium-v2"): {"inconsistency_weight": 1.5, "entropy_weight": 0.2, "entropy_learning_rate": 0.0},
    ("mobile", "walker2d-medium-replay-v2"): {"horizon": 1, "inconsistency_weight": 0.5, "real_share": 0.05},
    ("diffusion_ql", "walker2d-medium-v2"): {"q_weight": 1.0, "clip_norm": 1.0, "max_target_actions": 1},
    ("diffusion_ql", "halfcheetah-medium-expert-v2"): {"clip_norm": 7.0},
    ("diffusion_ql", "antmaze-medium-play-v2"): {
        "q_weight": 2.0,
        "clip_norm": 2.0,
        "max_target_actions": 10,
        "actor_learning_rate": 1e-3,
    },
    ("diffusion_ql", "antmaze-umaze-v2"): {"q_weight": 0.5, "max_target_actions": 1, "actor_learning_rate": None},
    ("diffusion_ql", "pen-cloned-v1"): {
        "q_weight": 0.1,
        "clip_norm": 8.0,
        "actor_learning_rate": 3e-5,
        "learning_rate": 3e-4,
    },
    ("diffusion_ql", "kitchen-complete-v0"): {"q_weight": 0.005, "clip_norm": 9.0},
    ("dtql", "halfcheetah-medium-expert-v2"): {
        "alpha": 50.0,
        "bc_weight": 0.0,
        "expectile": 0.7,
        "schedule": "constant",
    },
    ("dtql", "hopper-medium-v2"): {
        "alpha": 5.0,
        "actor_learning_rate": 1e-4,
        "schedule": "cosine",
        "decay_steps": 1_000_000,
    },
    ("dtql", "walker2d-medium-replay-v2"): {"alpha": 5.0, "actor_learning_rate": None, "schedule": "cosine"},
    ("dtql", "antmaze-large-diverse-v2"): {
        "alpha": 0.5,
        "bc_weight": 1.0,
        "expectile": 0.9,
        "batch_size": 2048,
        "warm_up": None,
    },
    ("dtql", "pen-human-v1"): {"alpha": 1500.0, "actor_learning_rate": 3e-5, "expectile": 0.9, "decay_steps": 300_000},
    ("mobile", "pen-human-v1"): {
        "horizon": 1,
        "real_share": 0.8,
        "max_target_actions": 1,
        "critics": 10,
        "min_target": None,
    },
}


@pytest.mark.parametrize(("algo", "dataset"), HAND_PICKED)
def test_numbers_of_the_sources(algo: str, dataset: str) -> None:
    config = settings(algo, dataset)
    assert {k: getattr(config.algo, k) for k in HAND_PICKED[algo, dataset]} == HAND_PICKED[algo, dataset]


@pytest.mark.parametrize(
    ("algo", "dataset", "wanted"),
    [
        ("cql", "hopper-medium-v2", {"reward_by_return_range": 1000.0, "normalize_observations": True}),
        ("cql", "hopper-medium-replay-v2", {"reward_by_return_range": 0.0, "normalize_observations": True}),
        ("cql", "hopper-medium-expert-v2", {"reward_by_return_range": 0.0}),
        ("cql", "antmaze-umaze-v2", {"reward_scale": 10.0, "reward_shift": -5.0, "normalize_observations": False}),
        ("rebrac", "antmaze-umaze-v2", {"reward_scale": 100.0, "reward_shift": 0.0}),
        ("xql", "hopper-medium-v2", {"reward_by_return_range": 1000.0, "normalize_observations": False}),
        ("rambo", "antmaze-umaze-v2", {"reward_shift": -1.0, "normalize_observations": True}),
        ("awac", "antmaze-umaze-v2", {"reward_shift": -1.0, "normalize_observations": True}),
        ("diffusion_ql", "antmaze-umaze-v2", {"reward_scale": 4.0, "reward_shift": -2.0, "normalize_rewards": False}),
        ("diffusion_ql", "pen-human-v1", {"reward_scale": 1.0, "normalize_rewards": True}),
        ("dtql", "antmaze-umaze-v2", {"reward_scale": 1.0, "reward_shift": -1.0}),
    ],
)
def test_rewards_and_observations(algo: str, dataset: str, wanted: dict[str, Any]) -> None:
    config = settings(algo, dataset)
    assert {k: getattr(config.dataset, k) for k in wanted} == wanted


GOAL_CONDITIONED = ("gcbc", "gcivl", "gciql", "qrl", "crl", "hiql", "ota")
STITCH, EXPLORE, ALONG = (0.0, 0.5, 0.5), (0.0, 0.0, 1.0), (0.0, 1.0, 0.0)  # shares of the policy's goals


@pytest.mark.parametrize("algo", nightly_but(("hiql",), GOAL_CONDITIONED))
def test_ogbench_has_settings_for_every_data_set_and_250_episodes(algo: str) -> None:
    for dataset in OGBENCH:
        config = settings(algo, dataset)
        assert (config.experiment, config.eval.episodes) == (f"{algo}/ogbench", 250)
        c, kind = config.algo, dataset.split("-")[-2]
        shares = ALONG if algo == "gcbc" else {"stitch": STITCH, "explore": EXPLORE}.get(kind, ALONG)
        assert (c.actor_current, c.actor_trajectory, c.actor_random) == shares, dataset
        far = "giant" in dataset or "humanoid" in dataset
        assert c.discount == (0.995 if far and algo not in ("gcbc", "qrl") else 0.99), dataset
        if algo in ("hiql", "ota"):
            steps = 100 if "humanoid" in dataset else 10 if kind in ("play", "noisy") else 25
            assert c.subgoal_steps == steps, dataset
            assert c.low_temperature == c.high_temperature == (10.0 if kind == "explore" else 3.0), dataset
        assert (c.batch_size, c.hidden, c.learning_rate) == (1024, [512, 512, 512], 3e-4)
    assert (
        found(algo, "visual-antmaze-medium-navigate-v0")
        == found(algo, "antmaze-medium-navigate-singletask-v0")
        == "none"
    )


IMITATION = {  # weight of imitation: pointmaze, antmaze, its explore, humanoidmaze, antsoccer, play, noisy
    "gciql": (0.003, 0.3, 0.01, 0.1, 0.1, 1.0, 0.03),
    "qrl": (0.0003, 0.003, 0.001, 0.001, 0.003, 0.3, 0.03),
    "crl": (0.03, 0.1, 0.003, 0.1, 0.3, 3.0, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("algo", IMITATION)
def test_how_much_ogbench_imitates(algo: str) -> None:
    for dataset in OGBENCH:
        env, kind = dataset.split("-")[0], dataset.split("-")[-2]
        families = ("pointmaze", "antmaze", "explore", "humanoidmaze", "antsoccer", "play", "noisy")
        family = kind if kind in families else env
        assert settings(algo, dataset).algo.bc_weight == IMITATION[algo][families.index(family)], dataset


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_mazes_are_scored_in_100_episodes(algo: str) -> None:
    for dataset, suite in (("antmaze-large-play-v2", "d4rl-antmaze"), ("maze2d-large-v1", "d4rl-maze2d")):
        if (algo, suite) not in NOTHING_PUBLISHED:
            assert composing.experiment_settings(find_experiment(algo, dataset), dataset)[1]["eval.episodes"] == 100


# beta of arXiv 2305.09836 for random, medium, expert, medium-expert, medium-replay, full-replay
TUNED_TD3_BC = {
    ("halfcheetah", 6): (0.001, 0.01, 0.4, 0.1, 0.05, 0.01),
    ("hopper", 3): (0.4, 0.05, 0.1, 0.1, 0.4, 0.01),
    ("walker2d", 6): (0.001, 0.4, 0.05, 0.1, 0.1, 0.1),
}
KINDS = ("random", "medium", "expert", "medium-expert", "medium-replay", "full-replay")


def test_tuned_settings_are_used_when_asked_for() -> None:
    for (task, actions), betas in TUNED_TD3_BC.items():
        for kind, beta in zip(KINDS, betas, strict=True):
            alpha = settings("td3_bc", f"{task}-{kind}-v2", experiment="tuned-gym").algo.alpha
            assert alpha == pytest.approx(1.0 / (beta * actions), rel=1e-5)
    assert settings("td3_bc", "hopper-medium-v2").algo.alpha == 2.5
    tuned = settings("iql", "walker2d-medium-v2", experiment="iql/tuned-gym")
    assert (tuned.algo.temperature, tuned.algo.expectile, tuned.dataset.reward_by_return_range) == (6.0, 0.5, 1000.0)
    assert settings("iql", "walker2d-medium-v2").experiment == "iql/d4rl-gym"
    diverse = settings("xql", "antmaze-medium-diverse-v0", experiment="tuned-antmaze").algo
    assert (diverse.value_updates, diverse.gumbel_temperature, diverse.temperature) == (4, 0.6, 10.0)
    with pytest.raises(
        UserError,
        match=r"experiment=iql/tuned-gym has no settings for mine\.npz; it has them for halfcheetah-random\*, ",
    ):
        settings("iql", "mine.npz", experiment="tuned-gym")


def test_a_run_that_is_told_otherwise() -> None:
    assert settings("rebrac", "hopper-medium-v2", **{"algo.critic_bc": 0.3}).algo.critic_bc == 0.3
    plain = settings("rebrac", "hopper-medium-v2", experiment="none")
    assert plain.experiment == "none" and plain.match == [] and plain.algo.critic_bc == 0.01
    own = settings("rebrac", "/data/hopper_mixed.hdf5")  # the suite's file without a row: the defaults
    assert own.experiment == "rebrac/d4rl-gym" and own.match == [] and own.algo.actor_bc == 0.01


@pytest.mark.parametrize(
    ("algo", "dataset", "steps", "episodes", "wanted"),
    [
        ("dt", "hopper-medium-v2", 100_000, 100, {"target_return": 3600.0, "return_scale": 1000.0}),
        ("dt", "pen-human-v1", 100_000, 100, {"target_return": 3100.0}),
        ("dt", "builtin", 6_000, 100, {}),  # the small dataset has its own length
        (
            "edt",
            "walker2d-medium-v2",
            50_000,
            100,
            {"batch_size": 256, "return_scale": 1000.0, "expert_temperature": 25.0},
        ),
        (
            "edt",
            "halfcheetah-medium-v2",
            50_000,
            100,
            {"batch_size": 128, "expert_temperature": 11.0, "target_return": 6_000.0},
        ),
        ("edt", "ant-medium-replay-v2", 50_000, 100, {"batch_size": 256, "return_range": [-325.6, 3879.7]}),
        ("modt", "halfcheetah-medium-v2", 100_000, 100, {"target_return": 12_000.0, "return_scale": 1000.0}),
        ("qdt", "halfcheetah-medium-v2", 100_000, 100, {"target_return": 6_000.0, "return_scale": 1000.0}),
        ("qdt", "mujoco/walker2d/expert-v0", 100_000, 100, {"target_return": 5_000.0}),
        ("vadt", "hopper-medium-expert-v2", 100_000, 100, {"temperature": 6.0, "expectile": 0.5, "values_steps": None}),
        ("vadt", "antmaze-umaze-v2", 200_000, 100, {"values_steps": None}),
        (
            "gadt",
            "antmaze-large-play-v2",
            1_000_000,
            100,
            {"context": 10, "width": 256, "batch_size": 256, "subgoal_steps": 30},
        ),
        ("gadt", "pointmaze-medium-navigate-v0", 1_000_000, 10, {"activation": "gelu", "context": 20}),
        ("diffusion_ql", "hopper-medium-v2", 2_000_000, 10, {}),
        ("diffusion_ql", "kitchen-complete-v0", 250_000, 100, {}),
        ("dtql", "antmaze-medium-play-v2", 450_000, 100, {}),
        ("dtql", "pen-cloned-v1", 250_000, 100, {}),
        ("lamo", "kitchen-partial-v0", 100_000, 20, {"batch_size": 64}),
        ("tt", "ant-medium-v2", 390_625, 5, {"batch_size": 128}),
        ("mbrcsl", "point-stitch", 8_000, 10, {"behaviour_steps": None}),
        ("dpt", "bandits", 500_000, 10, {"activation": "gelu_tanh"}),
        (
            "meta_dt",
            "point-robot",
            100_000,
            10,
            {"learning_rate": 1e-4, "return_scale": 10.0, "context": 20, "prompt": 5},
        ),
        (
            "meta_dt",
            "data/AntDir-v0.hdf5",
            500_000,
            10,
            {"learning_rate": 5e-5, "prompt_warmup": 70_000, "context": 20},
        ),
        ("meta_dt", "data/hopper_rand_params.npz", 100_000, 10, {"context": 8, "prompt": 3, "prompt_warmup": 20_000}),
        ("meta_dt", "reach-v2", 300_000, 10, {"learning_rate": 1e-7, "prompt_warmup": 100_000}),
    ],
)
def test_sequence_models_have_their_published_lengths(
    algo: str, dataset: str, steps: int, episodes: int, wanted: dict[str, Any]
) -> None:
    config = settings(algo, dataset)
    assert (config.steps, config.eval.episodes) == (steps, episodes)
    assert {k: getattr(config.algo, k) for k in wanted} == wanted
    assert settings(algo, dataset, steps=5).steps == 5


def test_the_best_row_is_the_longest_pattern() -> None:
    patterns = ["hopper*", "hopper-medium*", "hopper-medium-replay*"]
    names = {
        "hopper_medium.hdf5": 1,
        "hopper-medium-replay-v2": 2,
        "mujoco/hopper/medium-v0": 1,
        "d4rl:hopper-random-v2": 0,
    }
    for name, row in names.items():
        assert experiments._fitting(name, patterns) == patterns[row]
    assert experiments._fitting("walker2d-medium-v2", patterns) is None


def test_list_says_what_a_data_set_gets(capsys: pytest.CaptureFixture[str]) -> None:
    from offrl.cli.words import listing

    assert listing.run(["algo=rebrac", "dataset=hopper-medium-expert-v2"]) == 0
    assert capsys.readouterr().out == (
        "rebrac on hopper-medium-expert-v2: rebrac/d4rl-gym, row hopper-medium-expert*: algo.actor_bc=0.1 "
        "algo.critic_bc=0.01\n"
    )
    assert listing.run(["algo=td3_bc", "dataset=mine.npz"]) == 0
    assert "no settings of its own" in capsys.readouterr().out
    for wrong in (["dataset=x"], ["algo="], ["algo=iql", "steps=5"], ["algo=iql", "dataset="]):
        with pytest.raises(UserError, match="usage: offrl list"):
            listing.run(wrong)


def test_an_algorithm_file_may_take_none_of_its_algorithm_s(monkeypatch: pytest.MonkeyPatch) -> None:
    read = experiments._algorithm_file

    def changed(algo: str) -> dict[str, Any]:
        return {**read(algo), **({"experiment": "none"} if algo == "percent_bc" else {})}

    assert find_experiment("percent_bc", "antmaze-umaze-v2") == "bc/d4rl-antmaze"
    monkeypatch.setattr(experiments, "_algorithm_file", changed)
    assert find_experiment("percent_bc", "antmaze-umaze-v2") == "none"
    assert find_experiment("bc", "antmaze-umaze-v2") == "bc/d4rl-antmaze"
