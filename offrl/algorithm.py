"""The contract of an algorithm: pure functions of ONE seed. The training step adds the replica axis, speed and
everything else. The types that its signatures name can be imported from here.
"""

from __future__ import annotations

import copy
import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast, get_args, get_origin

import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.utils import _pytree as pytree

from offrl import rng
from offrl.actor import Actor, BoundParams, MemorylessActor
from offrl.actor import Carry as Carry
from offrl.data.dataset import Dataset, DataSpec
from offrl.data.samplers.transitions import Batch, Sampler, TransitionSampler
from offrl.joint import joined, joint_loss, step_jointly
from offrl.joint import merged as merged
from offrl.nn import call
from offrl.nn.custom.networks import with_own_networks
from offrl.nn.encoders.own import initial_params, with_encoders
from offrl.nn.encoders.streams import (
    ENCODER,
    EncodedBatch,
    Streams,
    Z,
    encoded_spec,
    trained_by,
    with_observations,
)
from offrl.nn.policies import Policy
from offrl.optim import Adam, OptState, Params, constant, gradient
from offrl.pretrained import Requirement
from offrl.settings.field import that_fit
from offrl.settings.train import TrainConfig

Metrics = dict[str, Tensor]
Loss = tuple[Tensor, Metrics]  # [], and what the log tells of it
LossFn = Callable[..., Loss]
Tree = Any  # nested dictionaries, lists and tuples of tensors

Grid = Mapping[str, Sequence[float]] | None  # settings that differ between replicas, with all their values

AnyAlgorithm = TypeVar("AnyAlgorithm", bound="Algorithm")
ConfigT = TypeVar("ConfigT", bound=Any)  # an algorithm's settings


class TrainState(NamedTuple):
    """The state of training, for one seed."""

    params: dict[str, Params]  # module name -> {parameter name: tensor}
    target: dict[str, Params]  # Polyak copies; never optimised
    opt: dict[str, OptState]
    extra: Tree  # e.g. a Lagrange multiplier's state, running statistics
    # read by updates, e.g. imagined transitions: changed by `Algorithm.refresh` alone, never copied per update
    buffers: Tree
    step: Tensor  # [] int64, updates done
    key: Tensor  # [] int64 random key of the seed

    def with_extra(self, **values: Any) -> TrainState:
        """The state with other entries in `extra`."""
        return self._replace(extra={**self.extra, **values})


Update = tuple[TrainState, Metrics]  # the state afterwards


def stack(states: list[TrainState], device: torch.device | str = "cpu") -> TrainState:
    """One state with a leading replica axis from the states of single seeds."""
    return pytree.tree_map(lambda *leaves: torch.stack(leaves).to(device), *states)


def select(state: TrainState, index: int) -> TrainState:
    """The state of one replica."""
    return pytree.tree_map(lambda leaf: leaf[index], state)


@dataclass(frozen=True)
class Traits:
    """Facts about an algorithm that hold before one is made: for the trainer, the command line and the
    documentation.
    """

    targets: tuple[str, ...] = ()  # modules with a Polyak copy
    # vector: it reads the numbers of observations; encoded: it learns from any vector that an encoder makes of them;
    # streams: its own networks read images and vectors, by their names
    observations: str = "vector"
    image_encoder: str = "drq"  # `encoder.name=auto`
    shifts_images: bool = True  # False: `encoder.shift` is 0
    own_encoders: bool = True  # False: observations are not its networks' first inputs
    # modules that acting needs, which a policy file holds; (): it trains no policy
    policy_modules: tuple[str, ...] = ("actor",)
    critic_modules: tuple[str, ...] = ()  # modules that `Algorithm.q_value` needs; (): it has no Q
    actions: tuple[str, ...] = ("continuous", "discrete")  # kinds of actions that it learns; or ("text",)
    goal_conditioned: bool = False  # its policies act towards the goals of `Actor.set_goal`
    n_step: bool = True  # False: its targets look one step ahead, though its settings have n_step
    learns_model: bool = False  # `refresh` trains a model on all transitions: online its source is an `Experience`
    scales_by_returns: bool = False  # online its batches have the column `largest_return`: see `MovingReturns`
    on_policy: bool = False  # it learns from what its present policy just played: an `OnPolicy`
    period: int = 1  # updates of a repeating pattern; `phase` counts within it
    vectorized: bool = True  # False: one replica at a time, and an update may work in place
    cuda_graph: bool = True  # False: an update waits for values, which no CUDA graph can hold
    compiles: bool = True  # False: compiling takes minutes and gives back little, so it is done only on request
    unrolled: int = 0  # steps of recurrences, of which each has operations of its own in an update's program
    multitask: bool = False  # it learns from multi-task data (`dataset.multitask`)
    acts_on_device: bool = False  # an action takes so long that policies act where they are trained, not on the CPU

    @property
    def discrete(self) -> bool:
        """True for an algorithm of discrete actions."""
        return "discrete" in self.actions

    @property
    def text(self) -> bool:
        """True where its policies read and write texts (`offrl.lm`)."""
        return "text" in self.actions


class Part:
    """A component that algorithms have in common: a network with its values and losses, which reads the algorithm's
    settings.

    An algorithm makes its parts in `modules` and keeps them as attributes; `with_config` hands them other settings.
    """

    def __init__(self, config: Any, spec: DataSpec) -> None:
        self.config, self.spec = config, spec

    def begin(self, state: TrainState) -> TrainState:
        """The state before the first update, with what this part needs of it."""
        return state


@dataclass
class Runtime:
    """Surroundings of a copy of an algorithm that trains or acts; the step fills them in."""

    # what `Sampler.prepare` made of the dataset, the same for all replicas, on the device; None where policies act
    source: Any = None
    reduce_gradients: Callable[[Params], Params] | None = None  # the mean over the processes that share a batch
    alone: bool = False  # updates are run eagerly and for one replica, outside of all transforms of torch.func
    notes: Sequence[str] = ()  # lines for the log about the algorithm's setup
    encoded: EncodedBatch | None = None  # while an update behind an encoder runs


class Algorithm(ABC, Generic[ConfigT]):
    """Base class of every algorithm. The parameter is its dataclass of settings: `class IQL(Algorithm[IQLConfig])`.

    Shapes in comments: B batch, O observation, A action, E ensemble, K discrete actions.
    """

    Config: ClassVar[type]  # the parameter: a dataclass whose fields are made with `offrl.settings.field.setting`
    traits: Traits = Traits()  # of an instance: those that `traits_for` gives for its settings
    actor_class: ClassVar[type[Actor]] = MemorylessActor  # its policies: the mode, or a sample, of the module "actor"

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for base in vars(cls).get("__orig_bases__", ()):
            parent, parameters = get_origin(base), get_args(base)
            if isinstance(parent, type) and issubclass(parent, Algorithm) and isinstance(parameters[0], type):
                cls.Config = parameters[0]

    def __init__(self, config: ConfigT, spec: DataSpec, pretrained: Mapping[str, Any] | None = None) -> None:
        """pretrained: the runs that `requires` names, for training; a policy acts without them, from the tensors in its
        file.
        """
        self.config = config
        self.data_spec, self.spec = spec, encoded_spec(spec, self.traits.observations)
        self.traits = self._traits(config)
        self.pretrained: Mapping[str, Any] = pretrained or {}
        self.runtime = Runtime()
        with torch.random.fork_rng(devices=[]), that_fit(config):
            # only their structure is used: `apply` is handed the parameters
            self.networks = self._networks()
        # what makes the vector that other modules see of the data's observations, and the module whose loss trains it
        self.encoder: Streams | None = cast(Any, self.networks[ENCODER]) if self._encoded else None
        self.encoder_module = trained_by(spec, self.networks) if self.encoder else ""

    @property
    def _encoded(self) -> bool:
        return self.data_spec.encoder is not None and self.traits.observations != "streams"

    def _networks(self) -> dict[str, nn.Module]:
        """The modules, and last the encoder, so that the others' initial parameters do not depend on it."""
        modules = with_own_networks(self.config, self.modules())
        return with_encoders(copy.copy(self), modules) if self._encoded else modules

    def _traits(self, config: ConfigT) -> Traits:
        traits = self.traits_for(config)
        if not self._encoded:
            return traits
        policy, critic = (
            (*names, ENCODER) if names else () for names in (traits.policy_modules, traits.critic_modules)
        )
        return dataclasses.replace(traits, policy_modules=policy, critic_modules=critic, compiles=False)

    def __copy__(self) -> Algorithm:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        return copied

    def __getstate__(self) -> dict[str, Any]:
        # other processes are handed the states and the source that were made of it
        return {**self.__dict__, "pretrained": {}}

    @classmethod
    def fit_config(cls, config: ConfigT, dataset: Dataset, grid: Grid = None) -> ConfigT:
        """`config` completed from the data; called once, before anything is built.

        grid: settings that differ between replicas, with all their values; the result has to suit every one of them.
        """
        return config

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """The runs that must exist before this one, by the setting that names each; called once, before anything else.

        The settings NAME_id and NAME_settings, where there are such, are filled in with the run's identity and its
        algorithm's settings. Raises UserError for settings that cannot be trained with.
        """
        return {}

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        """The run's `config` with the settings that follow from the runs it requires; called before `fit_config`."""
        return config

    @classmethod
    def traits_for(cls, config: ConfigT) -> Traits:
        """`traits` of an algorithm with these settings, where they decide some."""
        return cls.traits

    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """Ordinary modules by name; their initial parameters are the state's."""

    @abstractmethod
    def update(self, state: TrainState, batch: Batch, key: Tensor, *, phase: int) -> Update:
        """One update. Pure: returns the new state and scalar metrics; no branch on a tensor, no host copy."""

    @property
    def every(self) -> int:
        """Updates between two calls of `refresh`, a multiple of `period`; 0: it is never called."""
        return 0

    def refresh(self, state: TrainState, source: Any, key: Tensor, *, step: int) -> Update:
        """Work before update `step`, a multiple of `every`, and before the first: rollouts, an evaluation on held-out
        data.

        Pure like `update`, but never compiled, so it may take long and depend on `step`; it alone may change `buffers`.
        source: what the sampler prepared.
        """
        return state, {}

    def finished(self, state: TrainState) -> Tensor | None:
        """[] bool: training this replica further changes nothing that counts; a run ends early when all of them say so.
        None: never.
        """
        return None

    def actor(self, state: TrainState) -> Actor:
        """The policy with these parameters. state: what acting needs of it."""
        return self.actor_class(self, state)

    def q_value(self, state: TrainState, observations: Tensor, actions: Tensor) -> Tensor | None:
        """The algorithm's own estimate of Q(s, a) [B], in the units of the rewards it trains on; None where it has
        none.

        observations [B, O] normalised, actions [B, A] in [-1, 1] or [B] int64. For logs, and for the selection of
        policies to beat."""
        return None

    def sampler(self) -> Sampler:
        """The source of batches; uniform transitions unless overridden, or windows of `n_step` of them."""
        return TransitionSampler(n_step=getattr(self.config, "n_step", 1))

    def optimizer(self, name: str) -> Adam:
        """The optimiser of a module; the same for all unless overridden."""
        return Adam(learning_rate=self.config.learning_rate)

    def extra(self, params: dict[str, Params]) -> Tree:
        """Initial state besides parameters: `TrainState.extra`."""
        return {}

    def buffers(self) -> Tree:
        """Initial tensors that updates only read: `TrainState.buffers`. No policy file holds them."""
        return {}

    def assets(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Contents of a policy file besides parameters that the policy needs to act: tensors, and values for JSON."""
        return {}, {}

    @classmethod
    def load_assets(cls, tensors: dict[str, Tensor], description: dict[str, Any]) -> Mapping[str, Any]:
        """Take `assets` out of a policy file, before the algorithm of that file is made: returns the `pretrained` that
        it is made with.
        """
        return {}

    def init(self, seed: int) -> TrainState:
        """The state before the first update. Depends on the seed alone, and leaves torch's global generator as it
        was.
        """
        with torch.random.fork_rng(devices=[]), that_fit(self.config):
            # `torch.manual_seed` would seed a GPU's too, which is not put back
            torch.default_generator.manual_seed(seed)
            params = initial_params(self._networks(), self.pretrained.get(ENCODER, {}))
        state = TrainState(
            params=params,
            target={n: {k: v.clone() for k, v in params[n].items()} for n in self.traits.targets},
            opt={n: self._optimizer(n).init(p) for n, p in params.items() if p},
            extra=self.extra(params),
            buffers=self.buffers(),
            step=torch.zeros((), dtype=torch.int64),
            key=rng.make_key(seed),
        )
        for part in parts_of(self).values():
            state = part.begin(state)
        return state

    def apply(self, name: str, params: Params, *x: Any) -> Any:
        """Module `name` with the given parameters. Gradients flow into `params` only where a loss was handed them."""
        return params.module(*x) if isinstance(params, BoundParams) else call(self.networks[name], params, *x)

    def descend(
        self, state: TrainState, name: str | tuple[str, ...], loss_fn: Callable[..., Any], *x: Any, **joint: Any
    ) -> Any:
        """One optimiser step on module `name` down `loss_fn(params, state, *x) -> (loss, metrics)`; everything else is
        constant, but the encoder of observations where this module trains it.

        name: a tuple names modules that descend together. `params` are then theirs by name; one gradient is taken of
        all, scaled down where its norm is above `clip` (inf), and each module steps by its own optimiser. aux=True: the
        loss returns (loss, metrics, tensors) and `descend` (state, metrics, tensors), constants from then on.
        """
        encoded = self.runtime.encoded
        if isinstance(name, tuple):
            loss_fn, params = joint_loss(loss_fn, name), joined(state.params, name)
        else:
            params = state.params[name]
        if encoded is not None and name == encoded.module:
            loss_fn, params = with_observations(loss_fn, name, encoded.z, x), {**params, Z: encoded.z}
        # without the wrappers of torch.func, which take longer than the products of a small network
        if self.runtime.alone:
            leaves = {k: v.detach().requires_grad_() for k, v in params.items()}
            with torch.enable_grad():
                loss, metrics = loss_fn(leaves, state, *x)
            grads, metrics = gradient(loss, leaves), constant(metrics)
        else:
            grads, (_, metrics) = grad_and_value(loss_fn, has_aux=True)(params, state, *x)
        if isinstance(name, tuple):
            return step_jointly(self, state, name, grads, metrics, **joint)
        if encoded is not None and name == encoded.module:
            state = self._stepped(state, ENCODER, encoded.pull(grads.pop(Z)))
        return self._stepped(state, name, grads), metrics

    def _stepped(self, state: TrainState, name: str, grads: Params, *, reduced: bool = False) -> TrainState:
        """The state after a step of a module's optimiser. reduced: all processes have these gradients in common."""
        if self.runtime.reduce_gradients is not None and not reduced:
            grads = self.runtime.reduce_gradients(grads)
        params, opt = self._optimizer(name).update(state.params[name], grads, state.opt[name])
        return state._replace(params={**state.params, name: params}, opt={**state.opt, name: opt})

    def _optimizer(self, name: str) -> Adam:
        settings = self.data_spec.encoder
        if name != ENCODER or settings is None or self.encoder is None:
            return self.optimizer(name)
        adam = self.optimizer(self.encoder_module)
        return (
            adam if settings.learning_rate is None else dataclasses.replace(adam, learning_rate=settings.learning_rate)
        )

    def polyak(self, state: TrainState, name: str, rate: float | Tensor | None = None) -> TrainState:
        """target <- target + rate (online - target). rate: None: the setting `polyak`."""
        rate = self.config.polyak if rate is None else rate
        target = {k: torch.lerp(v, state.params[name][k], rate) for k, v in state.target[name].items()}
        return state._replace(target={**state.target, name: target})

    @property
    def policy(self) -> Policy:
        """The module "actor", for its distribution's methods; its own parameters are not used."""
        return cast(Policy, self.networks["actor"])


def with_config(algorithm: AnyAlgorithm, config: Any) -> AnyAlgorithm:
    """`algorithm` with other values of settings that do not decide its networks: those of a replica, or of acting."""
    copied = copy.copy(algorithm)
    copied.config, copied.traits, copied.runtime = config, algorithm._traits(config), copy.copy(algorithm.runtime)
    for name, part in parts_of(algorithm).items():
        part = copy.copy(part)
        part.config = config
        setattr(copied, name, part)
    return copied


def parts_of(algorithm: Algorithm) -> dict[str, Part]:
    """The parts that an algorithm has, by attribute."""
    return {name: value for name, value in vars(algorithm).items() if isinstance(value, Part)}


def with_settings(algorithm: AnyAlgorithm, values: Mapping[str, Any]) -> AnyAlgorithm:
    """`with_config` by values of settings by name; the algorithm itself where there are none."""
    return with_config(algorithm, dataclasses.replace(algorithm.config, **values)) if values else algorithm
