"""Policies from elsewhere, by name: offrl runs and policy files, Python functions. Nothing is unpickled."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from offrl import rng
from offrl.errors import UserError, first_line, nearest
from offrl.evaluation.policy import TrainedPolicy
from offrl.evaluation.result import Policy
from offrl.runs.paths import RECORD
from offrl.runs.run import SavedRun
from offrl.system.user_code import guarded, python_object
from offrl.tasks.episodes import observe_reward

FORMS = "an offrl run directory, an offrl policy (.safetensors), file.py:name or package.module:name"


def load_agents(
    text: str, *, observation_dim: int, action_dim: int, discrete: bool, images: Sequence[str] = ()
) -> dict[str, Policy]:
    """The policies that `text` names, by their own names: one, or all replicas of a run.

    `text`: an offrl run directory, an offrl policy file (.safetensors), or "file.py:name" / "package.module:name": a
    function act(observations [E, O], rng) -> actions [E, A] or [E], an object with `start` and `step` as
    `offrl.evaluation.result.Policy` has them, or a dict {name: either}.
    Of observations with images a function gets a dictionary of arrays by name, of a single image [E, H, W, C].
    `observation_dim`: numbers in a flat observation. `action_dim`: of an action, where they are not discrete. `images`:
    the names of those that there are. All policies take `step(carry, observations, t, explore=False)`; see `reseeded`
    for their noise.

    Raises UserError for what cannot be found, read or run, and for a policy of other observations or actions than
    these.
    """
    agents = _load(text)
    for name, agent in agents.items():
        where = f"{text}" + (f" ({name})" if len(agents) > 1 else "")
        _check_fit(agent, where, observation_dim, action_dim, discrete, images)
    return agents


def reseeded(policy: Policy, seed: int) -> Policy:
    """A copy whose noise (under `explore`) is another for every `seed`, and the same for the same one."""
    if isinstance(policy, TrainedPolicy):
        other = copy.copy(policy)
        other.state = policy.state._replace(key=rng.fold_in(policy.state.key, seed))
        other._ready = None
        return other
    if dataclasses.is_dataclass(policy) and not isinstance(policy, type) and hasattr(policy, "seed"):
        return dataclasses.replace(policy, seed=seed)
    return policy


@dataclasses.dataclass(frozen=True)
class FunctionPolicy:
    """A user's function act(observations [E, O], rng) as a policy. It gets `explore` where it has an argument of that
    name.
    """

    function: Callable[..., Any]
    where: str
    seed: int = 0

    def start(self, episodes: int) -> np.random.Generator:
        return np.random.default_rng(self.seed)

    def step(self, carry: Any, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, Any]:
        extra = {"explore": explore} if "explore" in _parameters(self.function) else {}
        actions = np.asarray(guarded(self.where, self.function, _shown(observations), carry, **extra))
        if actions.ndim == 0 or len(actions) != len(observations):
            raise UserError(
                f"{self.where} gave actions of shape {actions.shape} for {len(observations)} observations; one action "
                f"for each is due: [{len(observations)}, A], or [{len(observations)}] choices"
            )
        return actions, carry


@dataclasses.dataclass(frozen=True)
class ObjectPolicy:
    """A user's object with `start` and `step`, which may lack the argument `explore`."""

    policy: Any
    where: str

    def start(self, episodes: int) -> Any:
        return guarded(self.where, self.policy.start, episodes)

    def step(self, carry: Any, observations: np.ndarray, t: int, explore: bool = False) -> tuple[np.ndarray, Any]:
        extra = {"explore": explore} if "explore" in _parameters(self.policy.step) else {}
        result = guarded(self.where, self.policy.step, carry, _shown(observations), t, **extra)
        if not isinstance(result, tuple) or len(result) != 2:
            raise UserError(f"{self.where}: step must return (actions, carry), it returned a {type(result).__name__}")
        return np.asarray(result[0]), result[1]

    def observe_reward(self, carry: Any, rewards: np.ndarray) -> Any:
        return guarded(self.where, observe_reward, self.policy, carry, rewards)

    def observe_cost(self, carry: Any, costs: np.ndarray) -> Any:
        method = getattr(self.policy, "observe_cost", None)
        return carry if method is None else guarded(self.where, method, carry, costs)


def _shown(observations: np.ndarray) -> Any:
    """Copies of observations [E, ...] for code of the user's."""
    names = observations.dtype.names
    if names is None:
        return np.array(observations)
    return {n: observations[n].copy() for n in names} if len(names) > 1 else observations[names[0]].copy()


def _parameters(function: Callable[..., Any]) -> Mapping[str, Any]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a built-in
        return {}


def _load(text: str) -> dict[str, Policy]:
    path = Path(text).expanduser()
    if path.is_dir():
        return _run_policies(path)
    suffix = path.suffix.lower()
    if path.is_file() and suffix in (".pkl", ".pickle", ".pt", ".pth"):
        raise UserError(f"{path} may hold a pickle, which is not read; give {FORMS}")
    if path.is_file() and suffix == ".zip":
        raise UserError(
            f"{path} is not read: load it in a Python file, model = SAC.load('{path.name}'), and give a function that "
            "calls model.predict: policy=FILE.py:act"
        )
    if path.is_file() and suffix == ".safetensors":
        return {path.stem: TrainedPolicy.load(path)}
    if path.is_file():
        cure = f"; name what is in it: {text}:NAME" if suffix == ".py" else f"; a policy is {FORMS}"
        raise UserError(f"{path} is not a policy{cure}")
    source, colon, name = text.rpartition(":")
    if colon and source and name.replace(".", "").isidentifier():
        return _python(source, name, text)
    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    raise UserError(f"there is no policy {text}: a policy is {FORMS}.{nearest(path.name, names)}")


def _run_policies(path: Path) -> dict[str, Policy]:
    """All replicas of a run."""
    if not (path / RECORD).exists():
        files = sorted(p.name for p in path.iterdir() if p.suffix == ".safetensors")
        hint = f"; it holds the policies {', '.join(files[:5])}: name one of them" if files else ""
        raise UserError(f"{path} is not a run directory (it has no {RECORD}){hint}")
    run = SavedRun(path)
    return {replica.name: run.load_policy(replica) for replica in run.replicas}


def _python(source: str, name: str, text: str) -> dict[str, Policy]:
    """The policies that the Python file or module `source` calls `name`."""
    value = python_object(source, name, text)[0]
    if isinstance(value, Mapping):
        if not value:
            raise UserError(f"{text} is an empty dict; it must hold policies by name")
        return {str(k): _wrap(v, f"{text}[{k!r}]") for k, v in value.items()}
    return {name: _wrap(value, text)}


def _wrap(value: Any, where: str) -> Policy:
    if inspect.isclass(value):
        raise UserError(
            f"{where} is a class; give an object of it, such as a module-level {value.__name__.lower()} = "
            f"{value.__name__}()"
        )
    if callable(getattr(value, "start", None)) and callable(getattr(value, "step", None)):
        return value if hasattr(value, "algorithm") else ObjectPolicy(value, where)
    if callable(value):
        return FunctionPolicy(value, where)
    raise UserError(f"{where} is a {type(value).__name__}; it must be a function act(observations, rng), an object "
                    "with start and step, or a dict of those by name")  # fmt: skip


def _check_fit(
    agent: Any, where: str, observation_dim: int, action_dim: int, discrete: bool, images: Sequence[str]
) -> None:
    """Raises UserError where the policy says that it is for other observations or actions. Functions do not say."""
    spec, problem = getattr(getattr(agent, "algorithm", None), "data_spec", None), ""
    if spec is None:
        return
    kinds = ("continuous", "discrete")
    if missing := [s.name for s in spec.streams if s.name not in images]:
        problem = f"sees {', '.join(missing)}, and here there are {', '.join(images) or 'numbers alone'}"
    elif spec.observation_shape != (0,) and spec.observation_dim != observation_dim:
        problem = f"takes observations of {spec.observation_dim} numbers, and here they have {observation_dim}"
    elif spec.discrete != discrete:
        problem = f"gives {kinds[spec.discrete]} actions, and here they are {kinds[discrete]}"
    elif not discrete and spec.action_dim != action_dim:
        problem = f"gives actions of {spec.action_dim} dimensions, and here they have {action_dim}"
    if problem:
        raise UserError(f"{where} {problem}: it is for another environment")


HUB = "hf://"
FILE = "policy.safetensors"
SUFFIX = ".safetensors"


def load_policy(
    source: str | Path, seed: int | None = None, *, revision: str | None = None, device: str = "auto", **values: float
) -> Any:
    """The trained policy behind `source`.

    source: a policy file (.safetensors), a folder that `offrl export` wrote, a run directory, or "hf://USER/REPOSITORY"
    of the Hugging Face Hub, with "/FOLDER/FILE.safetensors" behind it where it is not policy.safetensors. seed, values:
    which replica of a run, as `Run.policy`. revision: a commit, tag or branch of the repository (also
    "hf://USER/REPOSITORY@REVISION"); name a commit where the policy must stay what it is. device: where it acts, if
    that pays.

    What is read is safetensors and JSON, never a pickle, and runs no code. Raises UserError for what is missing,
    damaged or no policy."""
    text = str(source)
    if text.startswith(HUB):
        if seed is not None or values:
            raise UserError(
                f"{text} holds single policies: seed= and settings choose one of a run; name the file, "
                f"{text}/FOLDER/{FILE}"
            )
        return TrainedPolicy.load(_download(text, revision), device)
    if revision is not None:
        raise UserError(f"revision={revision} is of a repository, and {text} is none: write {HUB}USER/REPOSITORY")
    path = Path(source).expanduser()
    if (path / RECORD).exists():
        run = SavedRun(path)
        return run.load_policy(run.replica(run.seeds[0] if seed is None else seed, values), device)
    if seed is not None or values:
        raise UserError(f"{path} is no run directory, of which seed= and settings choose a policy")
    if path.is_dir():
        files = sorted(path.glob(f"*{SUFFIX}"))
        chosen = path / FILE if path / FILE in files else files[0] if len(files) == 1 else None
        if chosen is None:
            names = ", ".join(p.name for p in files[:5])
            raise UserError(
                f"{path} is no run directory and has no {FILE}{f'; it has {names}: name one' if names else ''}"
            )
        path = chosen
    if not path.exists():
        siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        hub = f" A repository of the Hub is written {HUB}{text}" if re.fullmatch(r"[\w.-]+/[\w.-]+", text) else ""
        raise UserError(f"there is no policy {path}.{nearest(path.name, siblings)}{hub}")
    return TrainedPolicy.load(path, device)


def _download(text: str, revision: str | None) -> Path:
    """The policy's file in the Hub's cache on this machine."""
    match = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)(?:@([\w./-]+?))?(?:/([\w./-]+\.safetensors))?/?", text)
    if match is None:
        raise UserError(
            f"{text} names no repository: write {HUB}USER/REPOSITORY, or "
            f"{HUB}USER/REPOSITORY@REVISION/FOLDER/FILE{SUFFIX}"
        )
    repository, typed, file = match.groups()
    if typed and revision and typed != revision:
        raise UserError(f"{text} and revision={revision} are two revisions; leave one of them out")
    try:
        import huggingface_hub as hub
    except ImportError:
        raise UserError(
            f"{text} needs pip install huggingface_hub; a file or folder that is here already does not"
        ) from None
    name = file or FILE
    try:
        return Path(hub.hf_hub_download(repository, name, revision=revision or typed))
    except Exception as error:  # its errors have no common base, and come from several libraries
        kind = type(error).__name__
        if kind == "EntryNotFoundError":
            files = [f for f in hub.list_repo_files(repository, revision=revision or typed) if f.endswith(SUFFIX)]
            names = (
                f"; it has {', '.join(files[:5])}: {HUB}{repository}/{files[0]}"
                if files
                else ", nor another policy of offrl"
            )
            raise UserError(f"{HUB}{repository} has no {name}{names}") from None
        cure = {
            "RepositoryNotFoundError": "is the name right, and the repository public? (`hf auth login` for a private "
            "one)",
            "RevisionNotFoundError": f"it has no revision {revision or typed}",
            "GatedRepoError": "its owner lets in only those who asked on its page, after `hf auth login`",
        }.get(kind, first_line(error))
        raise UserError(f"cannot load {text}: {cure}") from error
