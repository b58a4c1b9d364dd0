"""Settings under other names: without their prefix (temperature=3), with another library's word (gamma, eval_freq), or
a paper's symbol.

One that can only be meant in one way is taken, and a note says how; one with several meanings is a mistake whose
message lists them."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from offrl.errors import UserError, few, nearest, note
from offrl.settings import known
from offrl.settings.presets import algorithm_group, base_algorithm
from offrl.settings.train import TrainConfig

GROUPS = ("dataset", "encoder", "eval", "checkpoint")
TOP = tuple(f.name for f in dataclasses.fields(TrainConfig))
# the settings that another library's words stand for, the first of them that there is: {settings: words}
SAME = {
    "algo.learning_rate": "lr",
    "algo.actor_learning_rate": "actor_lr policy_lr pi_lr",
    "algo.critic_learning_rate": "critic_lr qf_lr q_lr",
    "algo.value_learning_rate": "value_lr vf_lr",
    "algo.discount": "gamma discount_factor",
    "algo.polyak": "tau soft_target_update_rate target_update_rate ema",
    "algo.expectile": "iql_tau iql_expectile",
    "algo.temperature": "weight_temp inverse_temperature",
    "algo.max_weight": "exp_adv_max adv_clip",
    "algo.conservative_weight": "cql_alpha cql_weight min_q_weight",
    "algo.batch_size": "minibatch_size n_batch bs batch",
    "algo.hidden": "hidden_dim hidden_dims hidden_sizes hidden_units hidden_size net_arch hidden_layers",
    "algo.critics": "n_critics num_critics num_qs n_q",
    "algo.members": "n_members",
    "algo.members algo.critics": "num_ensemble ensemble_size",
    "algo.dropout": "dropout_rate",
    "algo.context": "seq_len context_length context_len",
    "algo.heads": "n_heads num_heads",
    "algo.layers": "n_layers num_layers",
    "algo.target_return": "target_rtg rtg",
    "algo.horizon": "rollout_length",
    "algo.real_share": "real_ratio",
    "algo.iteration_episodes": "rollouts",
    "algo.critic_lm": "critic",
    "algo.value_bins": "bins",
    "algo.actor_type": "actor",
    "algo.truncated_windows": "short",
    "algo.state_source": "recall",
    "algo.credit_assignment": "credit",
    "algo.softplus_offset": "spread",
    "algo.joint_library": "full",
    "algo.min_z_score": "certainty",
    "algo.action_steps": "execute n_action_steps",
    "steps": (
        "max_timesteps total_timesteps timesteps n_steps num_steps train_steps offline_steps n_updates updates "
        "gradient_steps iterations n_iterations max_iters num_train_steps max_steps step update_steps num_updates"
    ),
    "seeds": "n_seeds num_seeds",
    "algo": "algorithm agent algo_name algorithm_name method",
    "dataset": "data dataset_name dataset_path dataset_id data_path dataset_file file path datafile d4rl",
    "eval.every": "eval_freq eval_interval eval_every evaluation_interval",
    "eval.episodes": "n_episodes eval_episodes n_eval_episodes num_eval_episodes n_trials",
    "eval.env": "environment eval_env",
    "log_every": "log_freq log_interval logging_steps",
    "checkpoint.every": "save_freq save_interval save_every checkpoint_freq save_steps",
    "checkpoint.keep": "keep",
    "dataset.normalize_observations": "normalize normalize_obs normalize_states normalise normalise_observations",
    "runs_dir": "out output out_dir output_dir save_dir logdir log_dir checkpoints_path save_path results_dir",
    "name": "run_name exp_name experiment_name",
    "workers": "num_workers n_workers",
    "threads": "n_threads num_threads",
    "resume": "load resume_from load_model",
    "config": "config_file config_path cfg",
    "precision": "dtype",
}
FORMER = {  # of commands that train nothing
    "add": "add_to_rewards",
    "missing": "on_missing",
    "swap": "both_orders",
    "sets": "datasets",
}
WORDS = {word: tuple(names.split()) for names, synonyms in SAME.items() for word in synonyms.split()}
# words with no setting, and what is there in their place
INSTEAD = {
    "policy_freq": "TD3's actor moves every second update, as published",
    "policy_delay": "TD3's actor moves every second update, as published",
    "epochs": "offrl counts updates, each of one batch: steps=N, where N is epochs x rows / batch size",
    "n_epochs": "offrl counts updates, each of one batch: steps=N, where N is epochs x rows / batch size",
    "num_epochs": "offrl counts updates, each of one batch: steps=N, where N is epochs x rows / batch size",
    "max_epochs": "offrl counts updates, each of one batch: steps=N, where N is epochs x rows / batch size",
    "n_steps_per_epoch": "there are no epochs: steps=N counts all updates, log_every=N those between two lines of "
    "metrics",
    "tensorboard": "every run writes for TensorBoard: tensorboard --logdir runs",
    "track": "every run writes for TensorBoard: tensorboard --logdir runs",
    "buffer_size": "the whole dataset is used; fewer episodes: dataset.subsample=0.1, fewer rows: offrl data subset",
    "num_envs": "training touches no environment; eval.parallel=N are alive at once in scoring",
    "n_envs": "training touches no environment; eval.parallel=N are alive at once in scoring",
    "optimizer": "all algorithms use Adam; algo.learning_rate=, algo.weight_decay= and the like where they have them",
    "loss": "a loss belongs to its algorithm: `offrl list` shows them",
    "test_size": "nothing is held out: scores come from the environment, or from offrl select",
    "val_split": "nothing is held out: scores come from the environment, or from offrl select",
    "save_best": "all checkpoints with checkpoint.keep=0; offrl select ranks them",
    "early_stopping": "stop=fqe-plateau ends a run when its value, estimated from data, no longer rises",
    "render": "offrl evaluate RUN video=true makes films",
    "deterministic": "the same command always gives the same numbers on the same kind of machine; nothing has to be set",  # noqa: E501
}
GREEK = {
    "α": "alpha",
    "β": "beta",
    "γ": "gamma",
    "δ": "delta",
    "ε": "epsilon",
    "η": "eta",
    "λ": "lambda",
    "ρ": "rho",
    "τ": "tau",
    "ω": "omega",
}
SURE = ("beta", "tau", "gamma")  # symbols that are settings' names in other libraries, of the same meaning
_YES = (True, 1, "true", "True", "yes", "on")


def understood(values: Mapping[str, Any], algo: str | None = None) -> dict[str, Any]:
    """`values` by the names that offrl has. values: by dotted names. algo: the algorithm, where they do not say it.

    Raises UserError for names that mean nothing, or several things, and for a setting that is given twice.
    """
    if all(name.partition(".")[0] in TOP and "algo." not in name and "grid." not in name for name in values):
        return dict(values)
    result: dict[str, Any] = {}
    values = _renamed(values, WORDS_FOR_ALGO)
    chosen = values.get("algo", algo) or "iql"
    group = algorithm_group(str(chosen))
    for name, value in values.items():
        new, new_value = _one(name, value, group)
        if new in result or (new != name and new in values):
            raise UserError(f"{name} and {new} are the same setting, and both are given; leave one of them out")
        if new != name:
            note(f"{name}={_text(value)} is read as {new}={_text(new_value)}")
        result[new] = new_value
    return result


WORDS_FOR_ALGO = {word for word, names in WORDS.items() if names == ("algo",)}


def _renamed(values: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    """The algorithm first, under its own name: it decides what the others mean. `agent=agents/iql.py` is OGBench's way
    to say iql.
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        if name in names and "algo" not in values and isinstance(value, str):
            new = re.sub(r"^(?:.*/)?(\w+)\.py$", r"\1", value)
            note(f"{name}={value} is read as algo={new}")
            result["algo"] = new
        else:
            result[name] = value
    return result


def _one(name: str, value: Any, algo: str) -> tuple[str, Any]:
    """(name, value) of one setting as offrl writes it. Raises UserError."""
    head, dot, field = name.partition(".")
    if not known.is_known(algo):
        return name, value  # a plugin's algorithm, of which only its class knows
    algo_settings = known.settings_of(algo)
    if head == "agent" and dot:
        head, name = "algo", f"algo.{field}"
    if dot and head in (algo, base_algorithm(algo)) and head not in TOP:
        head, name = "algo", f"algo.{field}"
    if head in ("algo", "grid") and dot:
        if field.partition(".")[0] in algo_settings or field == "name":
            return name, value
        fitting = sorted(o for o in _meanings(field, algo) if o.startswith("algo."))
        if len(fitting) == 1 and _is_sure(field, algo):
            return f"{head}.{fitting[0].removeprefix('algo.')}", value
        if fitting:
            raise UserError(_several(name, fitting, algo))
        return name, value  # whose mistake is found where all settings are known
    if head in TOP:
        return name, value
    if name == "seed" and isinstance(value, int) and not isinstance(value, bool):
        return "seeds", [value]
    if name in ("gpu", "cuda", "use_gpu", "use_cuda", "gpu_id"):
        number = isinstance(value, int) and not isinstance(value, bool) and name in ("gpu", "gpu_id")
        return "device", f"cuda:{value}" if number else "cuda" if value in _YES else "cpu"
    if name in ("env", "env_name", "env_id", "task", "task_name") and isinstance(value, str):
        return ("dataset" if value in known.datasets() or _is_dataset(value) else "eval.env"), value
    if name in ("fp16", "amp", "bf16", "mixed_precision"):
        return "precision", "bf16" if value in _YES else "float32"
    if name in ("verbose", "silent"):
        return "quiet", (value in _YES) == (name == "silent")
    options = sorted(_meanings(name, algo))
    if len(options) == 1 and _is_sure(name, algo):
        return options[0], value
    if options:
        raise UserError(_several(name, options, algo))
    raise UserError(_unknown(name, algo))


def _is_sure(word: str, algo: str) -> bool:
    """Whether a word with one meaning is taken for it: not where only a paper's symbol says so that stands for many
    things elsewhere.
    """
    algo_settings = known.settings_of(algo)
    return (
        word in SURE
        or word in algo_settings
        or word in WORDS
        or any(word.endswith(n) for n in (*algo_settings, *(n for ns in groups().values() for n in ns)))
    )


def _is_dataset(text: str) -> bool:
    """Whether a text has the form of a dataset's name or file: CORL and OGBench call that `env`."""
    return bool(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+){2,}-v\d+", text)) or bool(
        re.search(r"\.(hdf5|h5|npz|parquet|csv)$", text)
    )


def _meanings(word: str, algo: str) -> set[str]:
    """Full names of the settings that `word` can stand for with this algorithm."""
    algo_settings = known.settings_of(algo)
    short = word.replace("-", "_")
    exact = ({f"algo.{short}"} if short in algo_settings else set()) | {
        f"{g}.{short}" for g, names in groups().items() if short in names
    }
    first, _, last = short.partition("_")
    if first in (*groups(), "algo") and last in (algo_settings if first == "algo" else groups()[first]):
        exact.add(f"{first}.{last}")
    if exact:
        return exact
    same = next(
        ([n] for n in WORDS.get(short, ()) if not n.startswith("algo.") or n.removeprefix("algo.") in algo_settings), []
    )
    return {
        *same,
        *(
            f"algo.{n}"
            for n in symbols().get(algo, symbols().get(base_algorithm(algo), {})).get(short, ())
            if n in algo_settings
        ),
    }


@functools.cache
def groups() -> dict[str, tuple[str, ...]]:
    """Names of the settings of each group but the algorithm."""
    config = TrainConfig()
    return {
        g: tuple(f.name for f in dataclasses.fields(getattr(config, g)) if f.metadata.get("help") and f.name != "name")
        for g in GROUPS
    }


@functools.cache
def symbols() -> dict[str, dict[str, list[str]]]:
    """algorithm -> {symbol in Latin letters: its settings}, of the table in docs/glossary.md."""
    return {
        algo: {GREEK.get(symbol, symbol.lower()): names for symbol, names in table.items()}
        for algo, table in known.index()["symbols"].items()
    }


def _several(name: str, options: list[str], algo: str) -> str:
    entries = known.settings_of(algo)
    config = TrainConfig()

    def described(option: str) -> str:
        group, _, last = option.partition(".")
        if group == "algo":
            return str(entries[last]["help"])
        return next(str(f.metadata["help"]) for f in dataclasses.fields(getattr(config, group)) if f.name == last)

    text = "; ".join(f"{o} ({described(o)})" for o in options)
    if len(options) == 1:
        return f"{name}= is no setting of algo={algo}; its paper calls so {text}. Write {options[0]}= if that is meant"
    return f"{name}= can mean several settings of algo={algo}: {text}. Write one of them"


def _unknown(name: str, algo: str) -> str:
    """The message for a name that stands for nothing here."""
    if name in INSTEAD:
        return f"there is no setting '{name}': {INSTEAD[name]}"
    candidates = [name, *(n.removeprefix("algo.") for n in WORDS.get(name, ()))]
    elsewhere = [a for a in known.index()["algorithms"] if any(w in known.settings_of(a) for w in candidates)]
    if elsewhere:
        shown = ", ".join(elsewhere[:5]) + (" and others" if len(elsewhere) > 5 else "")
        word = next(w for w in candidates if w in known.settings_of(elsewhere[0]))
        return (
            f"unknown setting '{name}': algo={algo} has none, algo.{word} is one of {shown}. Its own: offrl list "
            f"algo={algo}"
        )
    names = [
        *TOP,
        *(f"algo.{n}" for n in known.settings_of(algo)),
        *(f"{g}.{n}" for g, ns in groups().items() for n in ns),
    ]
    head, dot, field = name.partition(".")
    names += (
        [f"grid.{field}"]
        if dot and field in known.settings_of(algo) and nearest(head, TOP) == nearest("grid", TOP)
        else []
    )
    bare = {n.rpartition(".")[2]: n for n in reversed(names)}
    close = (
        nearest(name, names) or (nearest(name, bare) and _of_bare(name, bare)) or nearest(name.partition(".")[0], TOP)
    )
    return (
        f"unknown setting '{name}'.{close or few(name, TOP)} All of them: offrl train --help all, offrl list "
        f"algo={algo}"
    )


def _of_bare(name: str, bare: Mapping[str, str]) -> str:
    """As `nearest`, among names without their prefixes: temprature is algo.temperature."""
    return re.sub(r"'(\w+)'", lambda m: f"'{bare[m[1]]}'", nearest(name, bare))


def _text(value: Any) -> str:
    """A value as a command writes it."""
    if isinstance(value, list):
        return ",".join(map(_text, value)) + ("," if len(value) == 1 else "")
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
