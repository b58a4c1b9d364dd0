"""The packages transformers and peft (extra `text`): loaded once, quiet, with the attention that this library needs;
and what files say of a language model: a configuration is data, which names no code, no kernels and no other model.

transformers reads all of these from config.json, and from the architecture in a policy file.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from offrl.errors import UserError


@functools.cache
def packages() -> tuple[Any, Any]:
    """(transformers, peft). Raises UserError where they are not installed."""
    modules = []
    for name in ("transformers", "peft"):
        try:
            modules.append(importlib.import_module(name))
        except ImportError as error:
            raise UserError(f"language models need the package {name} ({error}): pip install 'offrl[text]'") from None
    transformers = modules[0]
    transformers.AttentionInterface.register("offrl", _attention)
    return transformers, modules[1]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, scaling: float, **options: Any
) -> tuple[Tensor, Tensor]:
    """GPT-2's attention, with the dropout of its weights in the module that the trunk has replaced."""
    weights = (query @ key.transpose(-1, -2) * scaling + attention_mask).softmax(-1)
    weights = module.attn_dropout(weights.to(value.dtype))
    return (weights @ value).transpose(1, 2), weights


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """A context without progress bars and advice of transformers and peft."""
    log = packages()[0].utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


# keys by which a configuration names code to fetch, kernels to fetch, or another model
FOREIGN = frozenset(
    {
        "auto_map",
        "name_or_path",
        "_name_or_path",
        "trust_remote_code",
        "code_revision",
        "custom_pipelines",
        "use_kernels",
        "kernel_config",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "quantization_config",
        "_commit_hash",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
        "adapter_kwargs",
        "_adapter_model_path",
    }
)
ADAPTER = "adapter_config.json"  # transformers would load the adapter, of any kind, and the base model that it names
# of a description: the most layers, heads and experts, and the largest whole number
LAYERS, LARGEST = (10_000, 1_000_000_000)


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Within it, nothing is asked of the Hugging Face Hub, whatever the files say."""
    constants = importlib.import_module("huggingface_hub").constants
    before, constants.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def config_of(description: Any, where: str) -> Any:
    """The configuration of a causal language model, from what a file says of one. Raises UserError for anything
    else.
    """
    transformers, _ = packages()
    kind = description.get("model_type") if isinstance(description, Mapping) else None
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise UserError(
            f"{where}: it describes no language model that transformers knows (model_type: {str(kind)[:60]})"
        )
    try:
        config = transformers.AutoConfig.for_model(**plain(description, where))
    except UserError:
        raise
    except Exception as error:  # whatever the values do to transformers
        raise UserError(f"{where}: it describes no {kind} ({' '.join(str(error).split())[:200]})") from None
    check_causal(config, where)
    return config


def check_causal(config: Any, where: str) -> None:
    """Raise UserError for the configuration of what is no causal language model of transformers."""
    if type(config) not in packages()[0].MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{where}: a model of type {config.model_type} is no causal language model")


def plain(value: Any, where: str, key: str = "") -> Any:
    """The value without the keys of `FOREIGN`, at any depth. Raises UserError for sizes that no model has."""
    if isinstance(value, Mapping):
        return {str(k): plain(v, where, str(k)) for k, v in value.items() if k not in FOREIGN}
    if isinstance(value, list):
        return [plain(item, where, key) for item in value]
    counted = key.endswith(("layer", "layers", "heads", "head", "experts")) and "_token" not in key
    if isinstance(value, int) and abs(value) > (LAYERS if counted else LARGEST):
        raise UserError(f"{where}: it has {key}={value}, and no model has so many")
    return value


def scrub(config: Any, keep: Collection[str] = ()) -> Any:
    """A configuration that transformers read, and those in it, without what they name: see `FOREIGN`. keep: keys that
    stay.
    """
    for part in (config, *(v for v in vars(config).values() if isinstance(v, packages()[0].PretrainedConfig))):
        for name in (FOREIGN & vars(part).keys()) - set(keep):
            if name.endswith("_internal"):
                setattr(part, name, None)
            else:
                delattr(part, name)
    return config


def check_folder(folder: Path, where: str) -> None:
    """Raise UserError for a folder of a model with which transformers would read more than the model itself."""
    if (folder / ADAPTER).exists():
        raise UserError(
            f"{where}: {ADAPTER} there names an adapter and another model, which are not followed; merge them "
            "(merge_and_unload of peft), or move that file away"
        )


def quantised(folder: Path) -> bool:
    """Whether config.json says that the weights are quantised, for whose reading other packages are called."""
    try:
        content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False  # which is said where it is read
    return isinstance(content, dict) and bool(content.get("quantization_config"))
