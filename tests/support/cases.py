"""The algorithms in small, on data made of noise. Only `SETTINGS`, `VARIANTS` and `IMITATION` know names."""

from __future__ import annotations

import atexit
import dataclasses
import functools
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.actor import Actor
from offrl.algorithm import Algorithm, TrainState, select, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.transforms.columns import normalize_observations
from offrl.settings.train import TrainConfig
from offrl.system import files as checkpoint
from offrl.system.plugins.loading import load_named
from offrl.training.stages import ready
from offrl.training.step import Step
from offrl.world_models.dynamics import Dynamics, data_range
from offrl.world_models.model import save

load_named()  # OFFRL_PLUGINS=my.py: one's own algorithms are cases too
# of images, from what they play, beside a run's policy, by one regression, and to a trained run: tests of their own
FITTED = ("encoder", "ppo", "residual", "pex", "skill_critic", "sindy", "distill", "gbrl_awr")
ABSENT = () if find_spec("transformers") and find_spec("peft") else ("lamo",)  # their packages are not installed
# texts: test_text.py
ALGORITHMS = {
    name: kind for name, kind in registry.names("algo").items() if name not in FITTED + ABSENT and not kind.traits.text
}
BATCH = 32
# clone the data's actions, whatever their rewards
IMITATION = ("act", "bc", "chunk_bc", "diffusion_bc", "dpt", "flow_bc", "recoil")
# of DT, which stands for them where discrete actions are concerned
DESCENDANTS = ("edt", "lamo", "meta_dt", "modt", "qdt", "vadt")
OWN_LAYERS = ("brc", "crossq", "simbav2")  # which refuse LayerNorm
# whose first update leaves a parameter as it is: LoRA's A learns once its B is no longer 0, layers once the heads are
WAITING = ("director", "lamo", "rssm", "tdmpc2")
LEARNER = {"actor_learning_rate": 3e-3, "polyak": 0.05, "horizon": 1, "critics": 2, "entropy_in_target": False}
LATENT_MODEL = {
    "length": 3,
    "horizon": 1,
    "recurrent_width": 32,
    "groups": 8,
    "classes": 8,
    "width": 32,
    "members": 1,
    "penalty": 0.0,
    "free_bits": 0.1,
    "polyak": 0.05,
}
SETTINGS: dict[str, dict[str, Any]] = {  # so that the toy problem is solved within a second
    "act": {
        "length": 1,
        "width": 32,
        "feed_forward": 64,
        "layers": 1,
        "dropout": 0.0,
        "weight_decay": 0.0,
    },  # its episodes are of one step
    "cdt": {"dropout": 0.0, "context": 2},
    "chunk_bc": {"length": 1},
    "flow_bc": {"greedy": "zero", "average": 0.05, "hidden": [64, 64], "learning_rate": 5e-3},
    "arsq": {"entropy_weight": 0.2, "bc_weight": 0.0, "polyak": 0.05, "bins": 9},
    "bcq_lag": {"polyak": 0.05, "perturbation": 0.5},
    "bear_lag": {"polyak": 0.05},
    "cal_ql": {"actor_learning_rate": 3e-3, "conservative_weight": 0.1, "polyak": 0.05},
    "wsrl": {"actor_learning_rate": 3e-3, "conservative_weight": 0.1, "polyak": 0.05, "critics": 3},
    "cql": {"actor_learning_rate": 3e-3, "conservative_weight": 0.1, "polyak": 0.05},
    "coptidice": {"divergence_weight": 0.1},
    "crl": {"bc_weight": 0.3},  # at 0.1 one seed in five has not learnt yet
    "meta_dt": {"dropout": 0.0, "context": 2, "prompt": 1, "prompt_warmup": 0, "task_model_steps": 50},
    "dpt": {"width": 32, "context": 2, "policy": "deterministic"},
    "dt": {"dropout": 0.0, "context": 2},
    "edt": {"dropout": 0.0, "context": 2, "stride": 1},
    "modt": {"dropout": 0.0, "context": 2},
    "qdt": {"dropout": 0.0, "context": 2, "values_steps": 700, "conservative_weight": 0.1},
    "vadt": {
        "dropout": 0.0,
        "context": 2,
        "values_steps": 2000,
        "temperature": 10.0,
        "expectile": 0.95,
        "value_learning_rate": 3e-3,
    },
    "breeze": {
        "polyak": 0.05,
        "inference_samples": 3000,
        "attention": False,
        "acting_samples": 32,
        "expectile": 0.9,
        "value_learning_rate": 3e-3,
        "weight_decay": 0.0,
        "orthonormality": 1.0,
    },
    "gadt": {
        "dropout": 0.0,
        "context": 2,
        "temperature": 3.0,
        "values_steps": 1200,
        "value_learning_rate": 3e-3,
        "weight_decay": 0.0,
    },
    "decision_diffuser": {"plan_horizon": 2, "guidance": 2.0, "noise_scale": 0.05, "polyak": 0.05},
    "diffuser": {"plan_horizon": 2, "candidates": 64, "guide_scale": 1.0, "termination_penalty": 0.0, "polyak": 0.05},
    "diffusion_ql": {"polyak": 0.05, "average": 0.1, "average_from": 0, "choice": "best", "clip_norm": 0.0},
    "dtql": {"polyak": 0.05, "alpha": 0.1, "expectile": 0.9, "choice": "best", "candidates": 64},
    "brc": {"polyak": 0.05, "learning_rate": 3e-3},
    "dsac_t": {"polyak": 0.05, "learning_rate": 3e-3, "entropy_weight": 0.1},
    "edac": {"polyak": 0.05, "critics": 3},
    "fast_td3": {"learning_rate": 3e-3, "weight_decay": 0.0, "policy_noise": 0.2},
    "fb": {"polyak": 0.05, "inference_samples": 3000},
    "f_dvl": {"temperature": 10.0, "polyak": 0.05, "actor_schedule": "constant", "random_actions": 0},
    "fql": {"alpha": 0.3, "polyak": 0.05},
    "awm": {"polyak": 0.05, "candidates": 16},  # alone the weights draw too widely for this problem
    "idql": {"polyak": 0.05, "expectile": 0.9, "dropout": 0.0, "average": 0.05},
    "ifql": {"polyak": 0.05},
    "iql": {"temperature": 10.0, "polyak": 0.05, "actor_schedule": "constant"},
    **{
        name: {"rollouts": 1000, "rollout_every": 100, "real_share": 0.75, **LEARNER}
        for name in ("combo", "mobile", "mopo", "ogsrl", "morel", "rambo")
    },
    "mbpo": {
        "rollouts": 1000,
        "rollout_every": 100,
        "real_share": 0.75,
        "model_hidden": [32],
        "model_steps": 50,
        **LEARNER,
    },
    "lamo": {"dropout": 0.0, "context": 2, "layers": 1},
    # what promises more than this problem's best return, which the data hold, is the error of a small model: few of it
    "mbrcsl": {
        "rollouts": 200,
        "accepted_episodes": 50,
        "real_share": 0.95,
        "target_quantile": 0.5,
        "weight_decay": 0.0,
    },
    "pets": {
        "loss": "squared",
        "epoch": 100,
        "batch_size": 128,
        "learning_rate": 5e-3,
        "plan_horizon": 2,
        "plan_population": 50,
        "plan_elites": 8,
        "plan_iterations": 4,
        "plan_particles": 4,
    },
    "qc": {"length": 2, "polyak": 0.05, "flow_steps": 5},
    "rssm": LATENT_MODEL,
    "director": LATENT_MODEL | {"horizon": 2, "goal_steps": 1, "goal_groups": 4, "goal_classes": 4, "goal_kl": 4.0},
    "sac_n": {"polyak": 0.05, "critics": 3},
    "simbav2": {"polyak": 0.05, "learning_rate": 3e-3},
    "sequence_rl": {
        "polyak": 0.05,
        "length": 2,
        "action_steps": 1,
        "sequence_decay_steps": 3000,
        "sequence_learning_rate": 3e-3,
    },
    "skill_iql": {
        "temperature": 10.0,
        "polyak": 0.05,
        "actor_schedule": "constant",
        "prior_weight": 0.0,
        "skill_length": 1,
        "skill_steps": 600,
        "expectile": 0.9,
        "critic_hidden": [64, 64],
        "skill_learning_rate": 3e-3,
    },
    "td3_bc": {"polyak": 0.05},
    "mrq": {"learning_rate": 1e-3, "encoder_learning_rate": 1e-3, "target_every": 50, "bc_weight": 0.1},
    "tdmpc2": {
        "learning_rate": 1e-3,
        "polyak": 0.05,
        "bc_weight": 0.1,
        "plan_horizon": 2,
        "plan_population": 50,
    },
    "tt": {
        "learning_rate": 6e-3,
        "context": 2,
        "width": 24,
        "layers": 1,
        "dropout": 0.0,
        "bins": 16,
        "action_cdf": 0.0,
        "plan_horizon": 2,
        "beam_width": 16,
    },
    "xql": {"temperature": 10.0, "polyak": 0.05, "actor_schedule": "constant"},
}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "arsq": [{"imitation": "margin", "levels": 2, "bins": 3, "demo_share": 0.5, "n_step": 2}],
    "awm": [{"weights": "exp", "length": 3, "candidates": 2}],
    "bc": [{"policy": "gaussian"}, {"policy": "tanh_gaussian", "dropout": 0.2}],
    "act": [{"ensemble": 0.01, "length": 3}],
    "chunk_bc": [{"policy": "gaussian", "dropout": 0.2, "action_steps": 2}],
    "diffusion_bc": [{"length": 3, "action_steps": 2, "greedy": "sample"}],
    "flow_bc": [{"length": 3, "action_steps": 2, "average": 0.01}],
    "awac": [{"cost_limit": 2.0, "multiplier": "dual"}],
    "cql": [{"action_gap": 1.0, "max_target_actions": 2}, {"cost_limit": 2.0}],
    "edac": [{"cost_limit": 2.0}],
    "gciql": [{"learner": "awr"}],
    "sharsa": [{"low_values": True, "value_loss": "squared", "pessimism": "mean"}],
    "qrl": [{"learner": "awr", "quasimetric": "mrn"}],
    "crl": [{"learner": "awr", "encoder": "residual", "width": 16, "contrast": "infonce", "energy": "l2"}],
    "idql": [{"choice": "expectile"}],
    "ifql": [{"n_step": 3, "critics": 3, "pessimism": "std"}],
    "cdt": [{"policy": "deterministic", "relabelled_share": 0.0, "drawn_cost": 0.0, "padding": "left"}],
    "coptidice": [{"cost_radius": 0.0, "cost_scale": "sum"}],
    "cpq": [{"ood": "paper"}],
    "fql": [{"cost_limit": 2.0, "cost_pessimism": "min"}],
    "iql": [
        {"policy": "tanh_gaussian", "dropout": 0.2},
        {"policy": "deterministic"},
        {"cost_limit": 2.0},
        {"representation": "mrq", "update_order": "simultaneous"},
    ],
    "dt": [{"padding": "left", "policy": "gaussian"}, {"prompt": "goal"}],
    "rvs": [{"condition": "goal"}],
    "combo": [{"kit_compat": True, "penalised_states": "model"}],
    "task_model": [{"predicts": "both", "history": 2}],
    "meta_dt": [{"prompt": 0, "predicts": "observation"}, {"padding": "left"}],
    "dpt": [{"policy": "deterministic", "shuffle": False, "dropout": 0.2}],
    "diffusion_ql": [{"chain": False, "max_target_actions": 2, "critics": 3}],
    "dtql": [{"schedule": "cosine", "decay_steps": 5, "bc_weight": 1.0}],
    "dynamics": [{"history": 2, "loss": "squared"}],
    "lamo": [{"tune": "all", "policy": "gaussian", "padding": "left", "embedding": "linear"}],
    "mbpo": [{"candidates": 2, "lookahead": 2, "horizon_growth": [0, 8]}],
    "mobile": [{"min_target": 0.0}],
    "mopo": [
        {"candidates": 2, "lookahead": 2, "uncertainty": "density"},
        {"sample_dropout": 0.5, "repeats": 4, "model_dropout": 0.4},
    ],
    "morel": [{"threshold": "quantile", "threshold_scale": 0.5}],
    "ogsrl": [{"cost_limit": None, "cost_states": "first"}, {"cost_states": "first", "multiplier": "dual"}],
    "pets": [{"history": 2, "planner": "mppi", "penalty": 1.0, "plan_members": "drawn"}],
    "qc": [
        {"actor_type": "distil", "length": 3},
        {"chunked": False, "truncated_windows": "bootstrap", "pessimism": "std"},
    ],
    "brc": [{"n_step": 2, "critic_hidden": [], "critics": 3}],
    "crossq": [{"n_step": 2, "critic_hidden": [], "critics": 3}],
    "fast_td3": [{"n_step": 2, "critic_hidden": [], "critics": 3}],
    "recoil": [{"implicit_maximum": "expectile", "value_head": "c51"}],
    "fb": [{"conservative": "value"}, {"conservative": "measure", "penalty_target": None}],
    "bcq_lag": [{"cost_limit": None}],
    "bear_lag": [{"cost_limit": None, "mmd_kernel": "laplacian"}],
    "breeze": [{"data_share": 0.3}, {"attention": False, "samples": 1}],
    "rebrac": [{"cost_limit": 2.0, "n_step": 2}, {"representation": "mrq", "n_step": 2}],
    "sac_n": [{"cost_limit": 2.0, "cost_after_end": "hold"}],
    "simbav2": [{"bc_weight": 0.1, "critics": 1, "n_step": 2}],
    "td3_bc": [{"cost_limit": 2.0, "cost_states": "first"}, {"representation": "mrq"}],
    "xql": [{"cost_limit": 2.0, "cost_states": "first"}],
    "sequence_rl": [
        {"state_source": "model", "cutoff": 1.0},
        {"state_source": "distil", "action_steps": 9},
        {"action_steps": 0, "n_step": 3},
    ],
    "rssm": [
        {"bc_weight": 0.1, "burn_in": 1, "model_updates": 2},
        {"members": 1, "penalty": 0.0},
        {"objective": "bottleneck", "kl_weight": 0.1},
        {"objective": "information", "empowerment_weight": 0.1},
        {"actor_gradient": "model", "penalty_unit": "one", "free_bits_of": "mean", "unimix": 0.0},
        {"core": "scan", "scan_states": 3},
        {"latents": "gaussian", "latent": 6, "actor_gradient": "model", "objective": "none"},
    ],
    "director": [
        {
            "exploration_weight": 0.1,
            "members": 1,
            "penalty": 0.0,
            "objective": "bottleneck",
            "core": "scan",
            "latents": "gaussian",
        }
    ],
    "mrq": [{"bc_weight": 0.0, "episodic": False}],
    "tdmpc2": [
        {"bc_weight": 0.0, "target_critics": 2, "plan_start": "previous", "plan_std_max": 2.0, "episodic": False},
        {"planning": False},
    ],
    "tt": [
        {
            "discretizer": "uniform",
            "bin_value": "mean",
            "terminal_reward": -9.0,
            "plan_every": 2,
            "plan_max_length": 3,
            "plan_context": 2,
        }
    ],
}


SMALL: dict[str, Any] = {
    "hidden": [32, 32],
    "autoencoder_hidden": [32],
    "batch_size": BATCH,
    "actions": 2,
    # world models, and what learns in them
    "members": 3,
    "elites": 2,
    "epoch": 4,
    "real_share": 0.25,
    "rollouts": 16,
    "iteration_episodes": 16,
    "horizon": 2,
    "rollout_every": 4,
    "target_every": 4,
    "rollout_retain": 2,
    "backup_samples": 2,
    "model_hidden": [16],
    "model_steps": 2,
    # skills
    "skill_length": 3,
    "skill_dim": 4,
    "skill_hidden": [32, 32],
    "skill_steps": 10,
    # transformers with another algorithm's values
    "value_hidden": [32, 32],
    "value_batch_size": 128,
    "samples": 2,
    "regions": 4,
    "task_model_steps": 3,
    "prompt_warmup": 0,
    "recurrent_width": 16,
    "clone_epochs": 0,
    "plan_horizon": 3,
    "plan_population": 16,
    "plan_elites": 4,
    "plan_iterations": 2,
    "plan_particles": 2,
    "plan_proposals": 4,
    "encoder_hidden": [16],
    # hierarchical
    "latent": 16,
    "subgoal_steps": 3,
    "option_steps": 2,
    "representation": 4,
    # diffusion, and episodes that it plays in a model
    "embedding": 16,
    "denoising_steps": 4,
    "base": 16,
    "multiples": [1, 2],
    "behaviour_steps": 10,
    "behaviour_hidden": [16],
    "range_margin": 10.0,
    "accepted_episodes": 20,
    # forward-backward representations
    "z_dim": 8,
    "inputs_hidden": [32, 16],
    "backward_hidden": [32, 32],
    "actor_hidden": [32],
    "inference_samples": 100,
    "acting_samples": 4,
    "feed_forward": 32,
    # transformers
    "lm": "scratch",
    "width": 16,
    "layers": 2,
    "heads": 2,
    "context": 3,
    "bins": 9,
    "beam_width": 3,
    "action_cdf": 0.0,  # of three actions more would leave one
    "warmup_steps": 0,
}


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    discrete: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.name, *(["discrete"] if self.discrete else []), *(f"{k}={v}" for k, v in self.settings)])

    def make(self, dataset: Dataset | None = None, **settings: Any) -> Algorithm:
        kind = ALGORITHMS[self.name]
        known = {f.name for f in dataclasses.fields(kind.Config)}
        dataset = dataset or data(self.discrete)
        needs = "world_model" in known and not issubclass(kind, Dynamics)  # one that trains a model trains its own
        if self.name == "sequence_rl":  # which refuses a model that nothing asks
            needs = {**dict(self.settings), **settings}.get("state_source", "data") != "data"
        small = {**SMALL, "world_model": world_model(dataset) if needs else ""}
        if getattr(kind.Config, "representation", "") == "none":  # of this name hierarchies have a number
            del small["representation"]
        if self.name == "diffuser":
            small["candidates"] = 2  # plans; of this name MOPO has models
        if "diffuser" in self.name:
            small["learning_rate"] = 1e-4  # a gradient that is nothing but rounding is a whole step of Adam
        if self.name == "tdmpc2":  # all values are 0 at first, so that rounding would decide which plans are elites
            small |= {"plan_elites": 16, "plan_action": "mean"}
        if self.name in ("rssm", "director"):  # small divergences train as well
            small |= {"length": 4, "groups": 4, "classes": 4, "free_bits": 0.0}
        if self.name == "director":
            small |= {"goal_steps": 2, "goal_groups": 2, "goal_classes": 4}
        if self.name in OWN_LAYERS:
            small["critic_hidden"] = [32, 32]  # brc, simbav2: blocks of another width than the policy's
        if self.name == "lamo":
            small["embedding"] = "linear"  # of this name others have a width
        config = kind.Config(**{**{k: v for k, v in small.items() if k in known}, **dict(self.settings), **settings})
        config, pretrained = completed(config, dataset)
        return kind(config, dataset.spec, pretrained)


BASE = [
    Case(n, d)
    for n, kind in ALGORITHMS.items()
    for d in ([False, True] if kind.traits.discrete and n not in DESCENDANTS else [False])
]
ALL = BASE + [Case(n, False, tuple(v.items())) for n in ALGORITHMS for v in VARIANTS.get(n, [])]
# the others are trained for something else, such as world models
ACTING = [c for c in ALL if ALGORITHMS[c.name].traits.policy_modules]
GOALS = [c for c in BASE if ALGORITHMS[c.name].traits.goal_conditioned]
BATCHED = [c for c in BASE if ALGORITHMS[c.name].traits.vectorized]
each = functools.partial(pytest.mark.parametrize, "case", ids=str)
# one of each mechanism: plain, delayed actors, values with policies, discrete actions, sequences, refreshed models,
# goals, flows, limits of costs
REPRESENTATIVES = ("bc", "td3_bc", "iql", "iql-discrete", "dt", "mopo", "gciql", "fql", "iql-cost_limit=2.0")


def representatives(cases: list[Case]) -> list[Any]:
    """The cases, all but those of the representatives, and of algorithms from a plugin, marked `nightly`."""
    shipped = {name for name, kind in ALGORITHMS.items() if kind.__module__.startswith("offrl.")}
    return [
        pytest.param(c, marks=pytest.mark.nightly if c.name in shipped and str(c) not in REPRESENTATIVES else ())
        for c in cases
    ]


@functools.lru_cache
def data(discrete: bool) -> Dataset:
    """Noise with terminals and time-outs; the environment's actions lie in [-2, 2] x [0, 4] or are one of 3."""
    g, n = np.random.default_rng(0), 400
    actions = g.integers(0, 3, n) if discrete else np.stack([g.uniform(-2, 2, n), g.uniform(0, 4, n)], 1)
    bounds = {"num_actions": 3} if discrete else {"action_low": [-2.0, 0.0], "action_high": [2.0, 4.0]}
    flags = np.arange(n) % 40 == 39, np.arange(n) % 100 == 89
    expert = {"expert": np.arange(n) < 90}  # for algorithms that imitate one
    expert |= {"tasks": np.arange(n) // 120, "optimal_actions": actions[::-1].copy()}  # for those that learn many tasks
    expert["costs"] = (np.arange(n) % 5 == 0).astype(np.float32)
    dataset = from_arrays(3 + 2 * g.normal(size=(n, 4)), actions, g.normal(size=n), *flags, **bounds, **expert)  # type: ignore[arg-type]
    return normalize_observations(dataset)


@functools.lru_cache
def scratch() -> Path:
    """A folder of this session."""
    folder = Path(tempfile.mkdtemp(prefix="offrl-conformance-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


_completed: dict[tuple[str, int], tuple[Dataset, tuple[Any, dict[str, Any]]]] = {}


def completed(config: Any, dataset: Dataset) -> tuple[Any, dict[str, Any]]:
    """The config with what the data decide, and the runs that it builds on: trained and read once in a session, then
    the same objects.
    """
    key = (repr(config), id(dataset))
    if key not in _completed:
        run = TrainConfig(
            algo=config, seeds=[0], steps=1, runs_dir=str(scratch()), quiet=True, compile="eager", device="cpu"
        )
        run, pretrained = ready(run, dataset)
        _completed[key] = dataset, (run.algo, pretrained)  # with the dataset, lest another has its id
    return _completed[key][1]


_models: dict[str, str] = {}


def world_model(dataset: Dataset) -> str:
    """The file of a small model of `dataset`, trained once in a session."""
    if dataset.fingerprint not in _models:
        algorithm = Case("dynamics").make(dataset, epoch=100, learning_rate=3e-3, batch_size=128, test_share=0.0)
        state, _ = train(algorithm, [0], 401, batch_size=1, dataset=dataset)
        replica = select(state, 0)
        tree = {**algorithm.tree(replica), **data_range(dataset), "scale": torch.ones(dataset.spec.observation_dim + 1)}  # type: ignore[attr-defined]
        path = scratch() / f"{dataset.fingerprint}.safetensors"
        about = {
            "data": {"name": dataset.spec.name, "fingerprint": dataset.fingerprint},
            "held_out": replica.extra["error"].tolist(),
        }
        save(path, algorithm.model, tree, about)  # type: ignore[attr-defined]
        _models[dataset.fingerprint] = str(path)
    return _models[dataset.fingerprint]


def start(
    algorithm: Algorithm, seeds: list[int], dataset: Dataset | None = None, **options: Any
) -> tuple[TrainState, Step]:
    source = algorithm.sampler().prepare(dataset or data(algorithm.spec.discrete))
    options = {"batch_size": BATCH, "replicas": len(seeds), **options}
    return stack([algorithm.init(s) for s in seeds]), Step(algorithm, source, **options)


def train(
    algorithm: Algorithm, seeds: list[int], updates: int, dataset: Dataset | None = None, **options: Any
) -> tuple[TrainState, dict[str, Tensor]]:
    state, step = start(algorithm, seeds, dataset, **options)
    return step.run(state, {}, 0, updates)


def identical(a: Any, b: Any) -> None:
    left, right = checkpoint.flatten(a), checkpoint.flatten(b)
    assert list(left) == list(right)
    for name in left:
        assert torch.equal(left[name], right[name]), name


def close(a: Any, b: Any, atol: float = 1e-4, rtol: float = 0.0, outliers: float = 0.0) -> None:
    """outliers: the share of all numbers that may differ by up to 10 atol: Adam's first steps follow the sign of a
    gradient, which rounding decides where it is 0.
    """
    left, right = checkpoint.flatten(a), checkpoint.flatten(b)
    assert list(left) == list(right)
    if outliers:
        differences = torch.cat([(left[name].double() - right[name].double()).abs().flatten() for name in left])
        assert float((differences > atol).double().mean()) <= outliers
        atol *= 10.0
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=rtol, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


def begin(actor: Actor, count: int) -> Any:
    """The carry of so many episodes, with goals where the policy takes them."""
    carry = actor.start(count)
    return actor.set_goal(carry, goals(actor.algorithm, count)) if actor.algorithm.traits.goal_conditioned else carry


def goals(algorithm: Algorithm, count: int) -> Tensor:
    """Goals [count, G], the same each time."""
    width = algorithm.spec.goal_dim or algorithm.spec.observation_dim
    return torch.randn(count, width, generator=torch.Generator().manual_seed(1))


def copy(tree: Any) -> Any:
    return pytree.tree_map(torch.clone, tree)


def a_batch(algorithm: Algorithm) -> dict[str, Tensor]:
    """A batch of what is prepared, which the algorithm then knows as it does in a step."""
    sampler = algorithm.sampler()
    algorithm.runtime.source = sampler.prepare(data(algorithm.spec.discrete))
    return sampler(algorithm.runtime.source, rng.make_key(17), BATCH)
