"""Language models as trunks: read from Hugging Face's format, frozen, and adapted by LoRA (Hu et al., 2021, arXiv 2106.09685).

Packages transformers and peft (extra `text`). Weights are read from safetensors files alone, and no code that comes with a model is run.
Shapes in comments: B batch, T tokens, D width, H heads.
"""

from __future__ import annotations

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
from offrl.lm.models.libraries import packages, silent

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
        words = {id(p) for p in self.base.get_input_embeddings().parameters()}
        return unpack, ({n: p.detach() for n, p in self.base.named_parameters() if id(p) not in words}, self.architecture(), self.identity)

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


def find(name: str) -> Language:
    """The language model in a folder (config.json and *.safetensors), or of that name on the Hugging Face Hub. Raises UserError."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return _read(folder, str(folder.resolve()))
    if folder.suffix == GGUF and folder.is_file():
        return _read_gguf(folder.resolve())
    if folder.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise UserError(f"algo.lm={name}: there is no such folder; name one with config.json and *.safetensors, or algo.lm={SCRATCH}")
    packages()
    hub = importlib.import_module("huggingface_hub")
    try:
        try:
            snapshot = hub.snapshot_download(name, allow_patterns=FILES, local_files_only=True)
        except Exception:  # not in the cache, or only in part
            snapshot = hub.snapshot_download(name, allow_patterns=FILES)
    except Exception as error:  # whatever the network does
        raise UserError(
            f"algo.lm={name}: no such folder here, and the Hugging Face Hub did not give it ({str(error).strip().splitlines()[0]}); "
            f"download it where there is a network and name its folder, or take algo.lm={SCRATCH}"
        ) from None
    return _read(Path(snapshot), name)


def _read(folder: Path, place: str) -> Language:
    config, weights = folder / "config.json", sorted(folder.glob("*.safetensors"))
    if not config.is_file():
        raise UserError(f"algo.lm={folder}: it has no config.json; name a folder that a Hugging Face model was saved in")
    if not weights:
        files = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf"))
        reason = f" but {', '.join(files)}, which may hold code and is not read" if files else ""
        raise UserError(
            f"algo.lm={folder}: it has no *.safetensors{reason}; save the model with model.save_pretrained(FOLDER, safe_serialization=True)"
        )
    identity = _checksum(folder, [config, *weights])
    language = _known.get(identity)
    # one that came with a policy has no words; a copy elsewhere may have other files beside it
    if language is None or language.place != place:
        _known[identity] = Language(language.model if language is not None and language.place else _load(folder), identity, place)
    return _known[identity]


def _read_gguf(path: Path) -> Language:
    """A model in one file of llama.cpp's format, whose numbers may be quantised there and are float32 here. Raises UserError."""
    if importlib.util.find_spec("gguf") is None:
        raise UserError(f"algo.lm={path}: GGUF files need the package gguf: pip install gguf")
    identity = _checksum(path, [path])
    if identity in _known and _known[identity].place:
        return _known[identity]
    transformers, _ = packages()
    with silent(), torch.random.fork_rng(devices=[]):
        try:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, local_files_only=True, dtype=torch.float32
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


def _checksum(place: Path, files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    for path in files:
        try:
            with open(path, "rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
        except OSError as error:
            raise UserError(f"algo.lm={place}: {path.name} cannot be read ({error.strerror})") from None
    return digest.hexdigest()[:16]


def _load(folder: Path) -> Any:
    transformers, _ = packages()
    with silent(), torch.random.fork_rng(devices=[]):
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # not JSON, or an architecture that transformers does not know
            raise UserError(f"algo.lm={folder}: config.json describes no model known here ({first_line(error)})") from None
        if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or getattr(config, "is_encoder_decoder", False):
            raise UserError(f"algo.lm={folder}: a model of type {config.model_type} is no causal language model")
        try:
            model, report = transformers.AutoModelForCausalLM.from_pretrained(
                folder, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=torch.float32,
                attn_implementation=_implementation(config), output_loading_info=True,
            )  # fmt: skip
        except Exception as error:  # damaged files, tensors of other shapes
            raise UserError(f"algo.lm={folder}: its weights cannot be read as a {config.model_type} ({first_line(error)})") from None
    missing = [*map(str, report["missing_keys"]), *(str(m[0]) for m in report["mismatched_keys"])]
    missing = [name for name in missing if not name.startswith(("lm_head.", "embed_out."))]  # a head is needed for text alone
    if missing:
        raise UserError(f"algo.lm={folder}: its files lack {len(missing)} weights that config.json asks for, such as {sorted(missing)[0]}")
    return _settled(model)


def _implementation(config: Any) -> str:
    """The choice of attention: one in plain operations, with a mask of any kind."""
    return "offrl" if config.model_type == "gpt2" else "eager"


def _settled(model: Any) -> Any:
    """The module in evaluation mode, so that all dropout is this module's, and frozen."""
    return model.eval().requires_grad_(False)


def scratch(width: int, layers: int, heads: int, activation: str) -> Language:
    """A GPT-2 of random weights, always the same ones for the same sizes. It has no tokens. Raises UserError."""
    transformers, _ = packages()
    if width % heads:
        raise UserError(f"algo.width={width} is no multiple of algo.heads={heads}")
    config = transformers.GPT2Config(
        vocab_size=1, n_embd=width, n_layer=layers, n_head=heads, activation_function=activation, bos_token_id=None, eos_token_id=None,
        attn_implementation="offrl",
    )  # fmt: skip
    with silent(), torch.random.fork_rng(devices=[]):
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


def open_again(place: str, identity: str) -> Language:
    """The model at `place`, which must be the one it was. Raises UserError."""
    language = _known.get(identity) or find(place)
    if language.identity != identity:
        raise UserError(f"the language model at {place} is not the one that was trained with ({language.identity} there, {identity} then)")
    return language


def open_elsewhere(place: str, identity: str) -> Language:
    """The model that a policy file needs and does not hold. Raises UserError."""
    try:
        return open_again(os.environ.get(ELSEWHERE) or place, identity)
    except UserError as error:
        raise UserError(
            f"this policy needs the language model {identity} that lay at {place} when it was trained ({error}); "
            f"set {ELSEWHERE} to the folder where it is (algo.ship_lm=always writes it into policy files)"
        ) from None


def unpack(tensors: dict[str, Tensor], about: dict[str, Any], identity: str, head: bool = False) -> Language:
    """A model, with its head or without, from its architecture and those of its tensors that are given."""
    if identity not in _known:
        transformers, _ = packages()
        config = transformers.AutoConfig.for_model(**about)
        kind = transformers.AutoModelForCausalLM if head else transformers.AutoModel
        with silent(), torch.random.fork_rng(devices=[]):
            model = kind.from_config(config, attn_implementation=_implementation(config), dtype=torch.float32)
        parameters = dict(model.named_parameters())
        for name, value in tensors.items():
            parameters[name].data = value.detach().clone()
        _known[identity] = Language(_settled(model), identity, "")
    return _known[identity]


def tokens(language: Language, path: str) -> Tensor:
    """A text file as the model's tokens, int64 [N]. Raises UserError."""
    transformers, _ = packages()
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"algo.text={path} cannot be read as UTF-8 text ({error})") from None
    if not language.place:
        raise UserError(f"algo.text={path}: a model from scratch has no tokens; leave algo.text out, or name a model that was trained")
    place, options = tokenizer_place(language.place)
    with silent():
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, local_files_only=True, trust_remote_code=False, **options)
            ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"], dtype=torch.int64)
        except Exception as error:
            raise UserError(f"algo.text={path}: no tokenizer could be read in {language.place} ({first_line(error)})") from None
    if len(ids) and int(ids.max()) >= language.config.vocab_size:
        raise UserError(f"algo.text={path}: the tokenizer in {language.place} has more tokens than its model")
    return ids


def tokenizer_place(place: str) -> tuple[str, dict[str, str]]:
    """The location of the tokenizer of the model at `place`: a folder, and transformers' arguments for reading it there."""
    path = Path(place)
    return (str(path.parent), {"gguf_file": path.name}) if path.suffix == GGUF else (_folder(place), {})


def _folder(place: str) -> str:
    if Path(place).is_dir():
        return place
    return str(importlib.import_module("huggingface_hub").snapshot_download(place, allow_patterns=FILES, local_files_only=True))


def digest(values: Tensor) -> str:
    """A short checksum of tokens."""
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]
