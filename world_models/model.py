"""A trained model of an environment: what it predicts, how an outcome is drawn from it, and the file it lives in.

A `WorldModel` is pure functions of a tree of tensors, so that one model is shared by all replicas of a run, or, where
an algorithm trains the model itself (RAMBO), each replica hands in parameters of its own. Observations are in the units
of the dataset that the model was trained on (normalised if those were), actions in [-1, 1] or int64, rewards as the
dataset's transforms made them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from offrl import registry, rng
from offrl.algorithm import Dataset, DataSpec, Params, Requirement, TrainState
from offrl.data.containers.guard import reading
from offrl.data.samplers.transitions import episode_of
from offrl.errors import UserError, nearest
from offrl.nn import call
from offrl.nn.meta_check import of_file, outline
from offrl.settings.replicas import Replica
from offrl.system import files as checkpoint
from offrl.system import trust
from offrl.world_models.ensemble import GaussianEnsemble, Raw

FOLDER = "models"  # of a run directory: seed_0.safetensors, ...
FORMAT = 1
KINDS_OF_RUNS = ("dynamics", "sindy", "pets")
# "params": the networks'; "mean", "std" [I]: of the inputs; "elites" [K] int64; "low", "high" [O]; "scale" [D]
Tree = dict[str, Any]


class Prediction(NamedTuple):
    """The predictions of every member for (s, a), for B pairs."""

    mean: Tensor  # [E, B, O] next observation
    std: Tensor  # [E, B, O]
    reward: Tensor  # [E, B]
    reward_std: Tensor  # [E, B]
    ending: Tensor | None = None  # [E, B] logits of a termination, where it is learnt

    def each(self, change: Callable[[Tensor], Tensor]) -> Prediction:
        """Every one of its tensors changed in the same way."""
        return Prediction(*(x if x is None else change(x) for x in self))  # type: ignore[arg-type]


class Outcome(NamedTuple):
    """One step of B rollouts."""

    next_observations: Tensor  # [B, O]
    rewards: Tensor  # [B]
    terminations: Tensor  # [B] bool
    clipped: Tensor  # [B] bool: some entry of the next observation was cut off at the edge of the allowed range


class WorldModel:
    """An ensemble of Gaussian dynamics networks, with termination and reward functions that are known or learnt."""

    kind = "ensemble"

    def __init__(self, config: Any, spec: DataSpec) -> None:
        """config: `offrl.world_models.dynamics.DynamicsSettings` whose `reward` and `termination` are settled.

        Raises UserError for an unknown termination or reward function.
        """
        self.config, self.spec = config, spec
        self.members, self.history = config.members, config.history
        self.out_dim = spec.observation_dim + 1
        self.learns_ending = config.termination in ("learned", "auto")  # auto: not settled yet; `fit_config` does
        self.learns_variance = getattr(config, "loss", "likelihood") == "likelihood"
        self._ends = None if self.learns_ending else registry.get("termination", config.termination)
        self._rewards = None if config.reward in ("learned", "auto") else registry.get("reward", config.reward)
        self.learns_reward = self._rewards is None
        with torch.random.fork_rng(devices=[]):
            self.network = self.build()
        self._units: dict[torch.device, tuple[Tensor, Tensor, Tensor, Tensor]] = {}

    @property
    def in_dim(self) -> int:
        """Width of the networks' input: `history` observations and actions, oldest first."""
        return self.history * (self.spec.observation_dim + self.spec.encoded_action_dim)

    def build(self) -> GaussianEnsemble:
        """The networks, with fresh parameters."""
        c = self.config
        return GaussianEnsemble(
            c.members,
            self.in_dim,
            self.out_dim,
            c.hidden,
            activation=c.activation,
            residual=c.residual,
            ending=self.learns_ending,
            variance=self.learns_variance,
        )

    # ---- inputs

    def inputs(self, observations: Tensor, actions: Tensor, past: Tensor) -> Tensor:
        """[B, I] from observations [B, O], actions and what came before, [B, history - 1, O + A]."""
        now = torch.cat([observations, self.spec.encode(actions)], -1)
        return now if self.history == 1 else torch.cat([past.flatten(-2), now], -1)

    def first_past(self, observations: Tensor) -> Tensor:
        """The history before the first step of an episode: the observation [B, O] itself, with actions 0; [B, history -
        1, O + A].
        """
        no_action = observations.new_zeros(*observations.shape[:-1], self.spec.encoded_action_dim)
        before = torch.cat([observations, no_action], -1)
        return before.unsqueeze(-2).expand(*before.shape[:-1], self.history - 1, before.shape[-1])

    def later_past(self, past: Tensor, observations: Tensor, actions: Tensor) -> Tensor:
        """`past` one step later."""
        if self.history == 1:
            return past
        now = torch.cat([observations, self.spec.encode(actions)], -1).unsqueeze(-2)
        return torch.cat([past, now], -2)[..., 1:, :]

    # ---- predictions

    def raw(self, params: Params, tree: Tree, x: Tensor) -> Raw:
        """The networks' outputs for inputs [B, I] or [E, B, I], which are standardised here."""
        return call(self.network, params, (x - tree["mean"]) / tree["std"])

    def predict(self, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor) -> Prediction:
        """The prediction of each of the members. observations [B, O]."""
        raw = self.raw(tree["params"], tree, self.inputs(observations, actions, past))
        return self.to_prediction(tree, raw, observations)

    def predict_each(self, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor) -> Prediction:
        """Each member's prediction for pairs of its own: observations [E, B, O], actions [E, B, A], past [E, B, history
        - 1, O + A].
        """
        return self.predict(tree, observations, actions, past)  # whose networks take both shapes

    def to_prediction(self, tree: Tree, raw: Raw, observations: Tensor) -> Prediction:
        """The networks' outputs as a `Prediction`."""
        mean, std = raw.mean, (0.5 * raw.log_var).exp()
        if self.config.calibrated or not self.learns_variance:  # which has one for each output, of the held-out errors
            std = std * tree["scale"]
        following = mean[..., :-1] + observations if self.config.delta else mean[..., :-1]
        return Prediction(following, std[..., :-1], mean[..., -1], std[..., -1], raw.ending)

    def choose(self, prediction: Prediction, member: Tensor) -> Prediction:
        """For each of B pairs the prediction of one member [B], as an ensemble of one."""
        index = member.unsqueeze(0)

        def pick(x: Tensor) -> Tensor:
            wide = index.reshape(*index.shape, *[1] * (x.ndim - 2)).expand(1, *x.shape[1:])
            return x.gather(0, wide)

        return prediction.each(pick)

    def elite(self, tree: Tree, key: Tensor, count: int) -> Tensor:
        """A random elite for each of `count` rows, [count] int64."""
        elites = tree["elites"]
        return elites[rng.randint(key, (count,), elites.shape[0])]

    # ---- outcomes

    def outcome(
        self,
        tree: Tree,
        prediction: Prediction,
        observations: Tensor,
        actions: Tensor,
        key: Tensor,
        *,
        member: Tensor | None = None,
    ) -> Outcome:
        """A sample of s', r and termination: from a random elite for each row, or from `member` [B], or an ensemble of
        one.
        """
        choice, noise, end = rng.split(key, 3)
        if prediction.mean.shape[0] > 1:
            member = self.elite(tree, choice, observations.shape[0]) if member is None else member
            prediction = self.choose(prediction, member)
        draw = rng.normal(noise, (observations.shape[0], self.out_dim))
        following = prediction.mean[0] + prediction.std[0] * draw[:, :-1]
        rewards = prediction.reward[0] + prediction.reward_std[0] * draw[:, -1]
        return self.to_outcome(tree, prediction, observations, actions, following, rewards, end)

    def sample(self, tree: Tree, observations: Tensor, actions: Tensor, past: Tensor, key: Tensor) -> Outcome:
        """Sample as `outcome` of `predict` does, without the other members' predictions: each row evaluates its own
        elite alone.

        The rows are dealt out at random, to every elite as many as to any other, so each still has every elite with the
        same probability."""
        deal, noise_key = rng.split(key)
        elites, rows = tree["elites"], observations.shape[0]
        count = elites.shape[0]
        if count == 1:
            order = torch.arange(rows, device=observations.device)
        else:
            order = rng.uniform(deal, (rows,)).argsort()
        order = order[torch.arange(-(-rows // count) * count, device=order.device) % rows]  # as many for each
        x = self.inputs(observations, actions, past)[order].reshape(count, -1, self.in_dim)
        params = {name: v[elites] if name.startswith("net.") else v for name, v in tree["params"].items()}
        raw = self.raw(params, tree, x)
        prediction = self.to_prediction(tree, raw, observations[order].reshape(count, -1, self.spec.observation_dim))
        back = order[:rows].argsort()
        flat = prediction.each(lambda p: p.reshape(1, -1, *p.shape[2:])[:, :rows][:, back])
        return self.outcome(tree, flat, observations, actions, noise_key)

    def to_outcome(
        self,
        tree: Tree,
        prediction: Prediction,
        observations: Tensor,
        actions: Tensor,
        following: Tensor,
        rewards: Tensor,
        key: Tensor,
    ) -> Outcome:
        """A drawn next observation [B, O] and reward [B], cut off at the allowed range, with known rewards and
        terminations put in.
        """
        low, high = tree["low"], tree["high"]
        inside = following.nan_to_num(0.0).clamp(low, high)
        clipped = ((inside != following) & (low < high)).any(-1)  # what never changed in the data is as it was
        if self._rewards is not None:
            rewards = self.transformed(self._rewards(*self.to_dataset_units(observations, actions, inside)))
        if self._ends is not None:
            ended = self._ends(*self.to_dataset_units(observations, actions, following))
        else:
            assert prediction.ending is not None
            ended = rng.uniform(key, tuple(rewards.shape)) < prediction.ending[0].sigmoid()
        broken = ~torch.isfinite(following).all(-1) | ~torch.isfinite(rewards)
        return Outcome(inside, rewards.nan_to_num(0.0, 0.0, 0.0), ended | broken, clipped | broken)

    def to_dataset_units(
        self, observations: Tensor, actions: Tensor, following: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(s, a, s') in the units of the dataset as recorded, which are the environment's."""
        offset, unit, low, high = self.units(observations.device)
        if self.spec.observation_mean is not None:
            observations, following = observations * unit + offset, following * unit + offset
        if not self.spec.discrete:
            actions = low + (actions + 1.0) * 0.5 * (high - low)
        return observations, actions, following

    def units(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Mean and standard deviation of observations, low and high of actions; made once for a device, as a CUDA graph
        cannot copy.
        """
        if device not in self._units:
            s = self.spec
            numbers = (s.observation_mean or (), s.observation_std or (), s.action_low, s.action_high)
            offset, unit, low, high = (torch.tensor(x, dtype=torch.float32, device=device) for x in numbers)
            self._units[device] = offset, unit, low, high
        return self._units[device]

    def transformed(self, rewards: Tensor) -> Tensor:
        """Rewards of the environment as the dataset's transforms make them."""
        return rewards * self.spec.reward_scale + self.spec.reward_shift

    # ---- files

    def describe(self) -> dict[str, Any]:
        """Plain values that `load` rebuilds the model from."""
        return {
            "kind": "world_model",
            "model": self.kind,
            "format": FORMAT,
            "config": dataclasses.asdict(self.config),
            "spec": self.spec.to_json(),
        }


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with its tensors, as an artefact holds them."""

    model: Any  # WorldModel, or another class with its methods
    tree: Tree
    meta: dict[str, Any]  # "data": name and fingerprint, "held_out": error of each member, "seed", "updates", ...
    path: Path

    @property
    def identity(self) -> str:
        """The same for the same tensors: what tells two models apart."""
        return str(self.meta["sha256"])[:16]

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the data it was trained on."""
        return str(self.meta["data"]["fingerprint"])

    def to(self, device: torch.device | str) -> Trained:
        return dataclasses.replace(self, tree=pytree.tree_map(lambda tensor: tensor.to(device), self.tree))

    def check(self, spec: DataSpec) -> None:
        """Raise UserError where the model was trained on data of other shapes, units or transforms than `spec`'s."""
        source, where = self.model.spec, f"world_model={self.path}"
        trained_on = self.meta.get("data", {}).get("name", source.name)
        if (source.observation_shape, _actions(source)) != (spec.observation_shape, _actions(spec)):
            raise UserError(
                f"{where}: trained on {trained_on} with observations {source.observation_shape} and "
                f"{_actions(source)}; {spec.name} has {spec.observation_shape} and {_actions(spec)}: train one on this "
                "data with algo=dynamics, or leave world_model= out"
            )
        origins = [_place(s) for s in (source, spec)]
        if None not in origins and origins[0] != origins[1]:
            raise UserError(
                f"{where}: trained on {trained_on}, data of {origins[0]}; {spec.name} is of {origins[1]}: train one on "
                "this data"
            )
        for name, setting in {
            **dict.fromkeys(("action_low", "action_high"), "action range"),
            **dict.fromkeys(("observation_mean", "observation_std"), "dataset.normalize_observations"),
            **{name: f"dataset.{name}" for name in ("reward_scale", "reward_shift")},
        }.items():
            expected, actual = getattr(source, name), getattr(spec, name)
            if not _same(expected, actual):
                raise UserError(
                    f"{where}: trained on {trained_on} with another {setting} ({name}: {_short(expected)} there, "
                    f"{_short(actual)} here); train the model with the same dataset settings, or leave world_model= "
                    "out and one is trained"
                )


def _place(spec: DataSpec) -> str | None:
    """The name of an environment's dynamics: its id without the version, and where several mazes share one, the
    maze.
    """
    if spec.task is None or not spec.task.env_id:
        return None
    mazes = [str(spec.task.env_kwargs[name]) for name in ("maze", "maze_map") if name in spec.task.env_kwargs]
    return " ".join([spec.task.env_id.rpartition("-v")[0], *mazes])


def _actions(spec: DataSpec) -> str:
    return f"{spec.encoded_action_dim} {'discrete actions' if spec.discrete else 'action dimensions'}"


def _same(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    return np.allclose(a, b, rtol=1e-5, atol=1e-7)


def _short(value: Any) -> str:
    if isinstance(value, Sequence):
        return f"[{', '.join(f'{x:.4g}' for x in value[:3])}{', ...' if len(value) > 3 else ''}]"
    return "none" if value is None else f"{value:g}"


@runtime_checkable
class ModelTrainer(Protocol):
    """An algorithm whose runs hold world models, as files beside their policies."""

    config: Any
    model: Any

    @property
    def trains_model(self) -> bool:
        """True where this run trains a model: one that was given a model trains none."""

    def save_models(
        self, run_dir: Path, replicas: Sequence[Replica], state: TrainState, dataset: Dataset, quiet: bool
    ) -> None:
        """Write models/REPLICA.safetensors of each replica, unless it is there. state: of the replicas, on the CPU, as
        the dataset.
        """


def save(path: Path, model: Any, tree: Tree, meta: Mapping[str, Any]) -> None:
    """Write a model into one safetensors file. Raises UserError (a full disk)."""
    checkpoint.write(path, checkpoint.flatten(tree), {**model.describe(), **meta})


def load(path: str | Path) -> Trained:
    """A model from its file, or the first seed's of a run directory. Raises UserError for what is none, or cannot be
    read.
    """
    path, kind = Path(path), ""
    if path.is_dir():
        trust.check_folder(path)
        files = sorted((path / FOLDER).glob("*.safetensors"), key=lambda p: (len(p.name), p.name))
        if not files:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
                name = json.loads((path / "run.json").read_text(encoding="utf-8"))["identity"]["algo"]["name"]
                kind = (
                    f"; it is a run of {name}"
                    if name not in KINDS_OF_RUNS
                    else "; its training has not ended: the same command goes on"
                )
            raise UserError(
                f"world_model={path} holds no world model (no {FOLDER}/*.safetensors){kind}. `offrl train "
                "algo=dynamics dataset=...` trains one"
            )
        path = files[0]
    if not path.exists():
        raise UserError(
            f"world_model={path} does not "
            f"exist.{nearest(path.name, (p.parent.name for p in path.parent.glob(f'*/{FOLDER}')))}"
        )
    tensors, meta = checkpoint.read(path)
    if meta.get("kind") != "world_model":
        raise UserError(
            f"{path} is no world model; those are under {FOLDER}/ in the directory of a run of algo=dynamics"
        )
    if meta.get("format") != FORMAT:
        raise UserError(
            f"{path} is of another version of offrl (format {meta.get('format')}, this one reads {FORMAT}): train it "
            "anew"
        )
    with reading(path, " as a world model"), of_file(tensors):
        make = functools.partial(
            registry.get("world_model", meta["model"]), meta["config"], DataSpec.from_json(meta["spec"], str(path))
        )
        with outline(str(path)):
            checkpoint.unflatten({"params": dict(make().network.named_parameters())}, tensors, str(path))
        return Trained(make(), unflatten(tensors), {k: v for k, v in meta.items() if k not in ("config", "spec")}, path)


def required(settings: Mapping[str, Any] | None = None) -> Requirement:
    """The requirement of an algorithm that learns or plans in a world model; settings: of the one that is trained where
    none is named. One model serves runs of all seeds."""
    return Requirement(
        "dynamics", settings or {}, label="dynamics", seed=0, artifact=f"{FOLDER}/*.safetensors", load=load_for
    )


def load_for(path: str | Path, spec: DataSpec) -> Trained:
    """Load as `load` does. Raises UserError, too, for a model that does not fit data of `spec`."""
    trained = load(path)
    trained.check(spec)
    return trained


def unflatten(tensors: Mapping[str, Tensor]) -> Tree:
    """Nested dictionaries from names with slashes."""
    tree: Tree = {}
    for name, tensor in tensors.items():
        *way, last = name.split("/")
        node = tree
        for part in way:
            node = node.setdefault(part, {})
        node[last] = tensor
    return tree


def input_table(model: Any, dataset: Dataset, rows: Tensor) -> Tensor:
    """The inputs [R, I] at `rows` of a dataset, with what came before in their episodes."""
    observations = dataset.flat("observations")
    return model.inputs(observations[rows].float(), dataset.columns["actions"][rows], past_at(model, dataset, rows))


def past_at(model: Any, dataset: Dataset, rows: Tensor) -> Tensor:
    """[R, history - 1, O + A]: what came before `rows`; before an episode's start its first observation, with actions
    0.
    """
    observations, actions = dataset.flat("observations"), dataset.columns["actions"]
    episode = episode_of(dataset, rows)
    start = dataset.episode_start.to(rows.device)[episode]
    at, start = rows.unsqueeze(-1) - torch.arange(model.history - 1, 0, -1, device=rows.device), start.unsqueeze(-1)
    row = torch.maximum(at, start)
    encoded = torch.where((at >= start).unsqueeze(-1), model.spec.encode(actions[row]), 0.0)
    return torch.cat([observations[row].float(), encoded], -1)


def predict_rows(
    model: Any, tree: Tree, dataset: Dataset, rows: Tensor, at_once: int
) -> Iterator[tuple[Tensor, Tensor, Prediction]]:
    """Observations and actions at `rows` of a dataset and what is predicted of them, for `at_once` rows at a time."""
    observations, actions = dataset.flat("observations"), dataset.columns["actions"]
    for part in rows.split(at_once):
        s, a = observations[part].float(), actions[part]
        yield s, a, model.predict(tree, s, a, past_at(model, dataset, part))


def evenly_spread(rows: Tensor, most: int) -> Tensor:
    """`rows`, or `most` of them evenly spread."""
    return rows[torch.linspace(0, len(rows) - 1, min(len(rows), most), device=rows.device).long()]
