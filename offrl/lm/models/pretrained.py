"""Language models as trunks: read from Hugging Face's format, frozen, and adapted by LoRA (Hu et al., 2021, arXiv
2106.09685).

Packages transformers and peft (extra `text`). Weights are read from safetensors files alone, and no code that comes
with a model is run. Shapes in comments: B batch, T tokens, D width, H heads.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offrl.errors import UserError, first_line
from offrl.lm.models import libraries
from offrl.lm.models.libraries import packages, silent
from offrl.nn.meta_check import check_memory, outline
from offrl.system import trust

SCRATCH = "scratch"
GGUF = ".gguf"
SEED = 0  # of the weights of a model from scratch
FILES = [
    "config.json",
    "model*.safetensors",
    "model.safetensors.index.json",
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
]
SMALL = 64 * 2**20  # bytes; a language model that is no larger goes into policy files
ELSEWHERE = "OFFRL_LM"  # names a language model where that of a policy file does not lie where it did
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
# as a context: what is read here is used by many, also where others only draw (`offrl.nn.meta_check`)
REAL = torch.device("cpu")
_known: dict[str, Language] = {}  # read in this process, by identity


@dataclass(eq=False)
class Language:
    """A causal language model, read once in a process. All users share its memory, which is never written."""

    model: Any  # transformers' PreTrainedModel, float32: with its head, or without where it came with a policy
    identity: str  # a checksum of its files, or of what was made
    place: str  # a folder, or a name on the Hub; empty where it lies nowhere

    def __reduce__(self) -> tuple[Any, ...]:
        if self.place:
            return open_again, (self.place, self.identity)
        embedding_ids = {id(p) for p in self.base.get_input_embeddings().parameters()}
        return unpack, (
            {n: p.detach() for n, p in self.base.named_parameters() if id(p) not in embedding_ids},
            self.architecture(),
            self.identity,
        )

    @property
    def base(self) -> Any:
        """The model without its head."""
        return self.model.base_model

    @property
    def config(self) -> Any:
        """The model's configuration in transformers."""
        return self.base.config

    @property
    def width(self) -> int:
        """D: the dimension of states."""
        return int(self.config.hidden_size)

    @property
    def parameters(self) -> int:
        """The number of parameters that were learnt."""
        return sum(p.numel() for p in self.model.parameters())

    def architecture(self) -> dict[str, Any]:
        """The content of config.json without the vocabulary."""
        return {**json.loads(self.config.to_json_string(use_diff=False)), "vocab_size": 1, **dict.fromkeys(TOKENS)}

    def copied(self) -> Any:
        """A copy of the modules around the same tensors."""
        memo = {id(t): t for t in (*self.model.parameters(), *self.model.buffers())}
        return copy.deepcopy(self.model, memo)


# ---- finding one


def find(name: str, identity: str = "", typed: bool = True) -> Language:
    """The language model in a folder (config.json and *.safetensors), or of that name on the Hugging Face Hub. Raises
    UserError.

    identity: that which it must have; nothing but its checksum is looked at otherwise. typed: a person named it; the
    names in files are of folders, or of what was downloaded before.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read(folder, str(folder.resolve()), identity)
    if folder.suffix == GGUF and folder.is_file():
        return _read_gguf(folder.resolve(), identity)
    return _read(snapshot(name, f"algo.lm={name}", typed and trust.typed_settings()), name, identity)


def snapshot(name: str, where: str, typed: bool) -> Path:
    """The copy of a model that Hugging Face's cache has, or gets, which only what a person `typed` does. Raises
    UserError.
    """
    if Path(name).expanduser().is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"{where}: there is no such folder; name one with config.json, a tokenizer and *.safetensors")
    packages()
    hub = importlib.import_module("huggingface_hub")
    with contextlib.suppress(Exception):  # not in the cache, or only in part
        return Path(hub.snapshot_download(name, allow_patterns=FILES, local_files_only=True))
    if not typed and not trust.granted():
        raise UserError(
            f"{where}: there is no such folder here, and what only a file names is not downloaded: download it "
            f"yourself (hf download {name}), or say trust=true"
        )
    try:
        return Path(hub.snapshot_download(name, allow_patterns=FILES))
    except Exception as error:  # whatever the network does
        raise UserError(
            f"{where}: no such folder here, and the Hugging Face Hub did not give it ({first_line(error)}); download "
            "it where there is a network and name its folder"
        ) from None


def _read(folder: Path, location: str, expected: str = "") -> Language:
    config, weights = folder / "config.json", sorted(folder.glob("*.safetensors"))
    if not config.is_file():
        raise UserError(
            f"algo.lm={folder}: it has no config.json; name a folder that a Hugging Face model was saved in"
        )
    if not weights:
        files = sorted(
            p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf")
        )
        reason = f" but {', '.join(files)}, which may hold code and is not read" if files else ""
        raise UserError(
            f"algo.lm={folder}: it has no *.safetensors{reason}; save the model with model.save_pretrained(FOLDER, "
            "safe_serialization=True)"
        )
    libraries.check_folder(folder, f"algo.lm={folder}")
    identity = _identity(folder, [config, *weights], expected)
    language = _known.get(identity)
    # one that came with a policy has no words; a copy elsewhere may have other files beside it
    if language is None or language.place != location:
        _known[identity] = Language(
            language.model if language is not None and language.place else _load(folder), identity, location
        )
    return _known[identity]


def _read_gguf(path: Path, expected: str = "") -> Language:
    """A model in one file of llama.cpp's format, whose numbers may be quantised there and are float32 here. Raises
    UserError.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"algo.lm={path}: GGUF files need the package gguf: pip install gguf")
    identity = _identity(path, [path], expected)
    if identity in _known and _known[identity].place:
        return _known[identity]
    transformers, _ = packages()
    with silent(), libraries.offline(), REAL, torch.random.fork_rng(devices=[]):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False, dtype=torch.float32
            )
        except Exception as error:
            raise UserError(f"algo.lm={path}: it cannot be read as a GGUF model ({first_line(error)})") from None
    for name in ("hf_quantizer", "is_quantized"):  # the numbers are plain ones now, and saving would refuse them
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _known[identity] = Language(_settled(model), identity, str(path))
    return _known[identity]


def checksum(files: Sequence[Path], where: str) -> str:
    """16 hex digits, of the contents of files. Raises UserError."""
    digest = hashlib.sha256()
    for path in files:
        try:
            with open(path, "rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        except OSError as error:
            raise UserError(f"{where}: {path.name} cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:16]


def _identity(location: Path, files: Sequence[Path], expected: str) -> str:
    identity = checksum(files, f"algo.lm={location}")
    if expected and identity != expected:
        raise UserError(
            f"the language model at {location} is not the one that was trained with ({identity} there, {expected} then)"
        )
    return identity


def _load(folder: Path) -> Any:
    transformers, _ = packages()
    if libraries.quantised(folder):
        raise UserError(
            f"algo.lm={folder}: its weights are quantised (quantization_config in config.json); save them as plain "
            "numbers"
        )
    with silent(), libraries.offline(), REAL, torch.random.fork_rng(devices=[]):
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # not JSON, or an architecture that transformers does not know
            raise UserError(
                f"algo.lm={folder}: config.json describes no model known here ({first_line(error)})"
            ) from None
        libraries.check_causal(libraries.scrub(config), f"algo.lm={folder}")
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                dtype=torch.float32,
                attn_implementation=_implementation(config),
                output_loading_info=True,
            )
        except Exception as error:  # damaged files, tensors of other shapes
            raise UserError(
                f"algo.lm={folder}: its weights cannot be read as a {config.model_type} ({first_line(error)})"
            ) from None
    missing = [*map(str, report["missing_keys"]), *(str(m[0]) for m in report["mismatched_keys"])]
    # a head is needed for text alone
    missing = [name for name in missing if not name.startswith(("lm_head.", "embed_out."))]
    if missing:
        raise UserError(
            f"algo.lm={folder}: its files lack {len(missing)} weights that config.json asks for, such as "
            f"{sorted(missing)[0]}"
        )
    return _settled(model)


def _implementation(config: Any) -> str:
    """The choice of attention: one in plain operations, with a mask of any kind."""
    return "offrl" if config.model_type == "gpt2" else "eager"


def _settled(model: Any) -> Any:
    """The module in evaluation mode, so that all dropout is this module's, and frozen."""
    return model.eval().requires_grad_(False)


def gpt2_config(width: int, layers: int, heads: int, **settings: Any) -> Any:
    """The configuration of a GPT-2 from scratch. settings: more of transformers'. Raises UserError for sizes that do
    not fit together."""
    if width % heads:
        raise UserError(f"algo.width={width} is no multiple of algo.heads={heads}")
    return packages()[0].GPT2Config(
        n_embd=width, n_layer=layers, n_head=heads, bos_token_id=None, eos_token_id=None, **settings
    )


def scratch(width: int, layers: int, heads: int, activation: str) -> Language:
    """A GPT-2 of random weights, always the same ones for the same sizes. It has no tokens. Raises UserError."""
    transformers, _ = packages()
    config = gpt2_config(
        width, layers, heads, vocab_size=1, activation_function=activation, attn_implementation="offrl"
    )
    with silent(), outline("algo.lm=scratch"):
        check_memory("algo.lm=scratch", [transformers.GPT2LMHeadModel(config)])
    with silent(), REAL, torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        model = _settled(transformers.GPT2LMHeadModel(config))
    digest = hashlib.sha256(json.dumps([width, layers, heads, activation]).encode())
    for parameter in model.parameters():
        digest.update(parameter.numpy().tobytes())
    identity = f"{SCRATCH}-{digest.hexdigest()[:16]}"
    return _known.setdefault(identity, Language(model, identity, ""))


def known(identity: str) -> Language | None:
    """The language model of this identity that was read or made in this process, or None."""
    return _known.get(identity)


def open_again(location: str, identity: str) -> Language:
    """The model at `location`, which must be the one it was. Raises UserError."""
    return _known.get(identity) or find(location, identity, typed=False)


def open_elsewhere(location: str, identity: str) -> Language:
    """The model that a policy file needs and does not hold. Raises UserError."""
    try:
        typed = os.environ.get(ELSEWHERE)
        return _known.get(identity) or find(typed or location, identity, typed=bool(typed))
    except UserError as error:
        raise UserError(
            f"this policy needs the language model {identity} that lay at {location} when it was trained ({error}); "
            f"set {ELSEWHERE} to the folder where it is (algo.ship_lm=always writes it into policy files)"
        ) from None


def unpack(tensors: dict[str, Tensor], description: dict[str, Any], identity: str, head: bool = False) -> Language:
    """A model, with its head or without, from its architecture and those of its tensors that are given. Raises
    UserError where they do not fit, or ask for more memory than what holds them (`offrl.nn.meta_check`)."""
    if identity not in _known:
        transformers, _ = packages()
        where = f"the language model {identity}"
        config = libraries.config_of(description, where)
        kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
        options = {"attn_implementation": _implementation(config), "dtype": torch.float32, "trust_remote_code": False}
        with silent(), libraries.offline(), torch.random.fork_rng(devices=[]):
            with outline(where):
                skeleton = kind.from_config(config, **options)
            check_memory(where, [skeleton])
            shapes = {name: p.shape for name, p in skeleton.named_parameters()}
            if other := [name for name, value in tensors.items() if shapes.get(name) != value.shape]:
                raise UserError(
                    f"{where}: '{other[0]}' is not of the shape that its architecture has; the file is damaged"
                )
            with REAL:
                model = kind.from_config(config, **options)
        parameters = dict(model.named_parameters())
        for name, value in tensors.items():
            parameters[name].data = value.detach().clone()
        _known[identity] = Language(_settled(model), identity, "")
    return _known[identity]
