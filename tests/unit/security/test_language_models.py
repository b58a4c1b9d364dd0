"""Language models that files of strangers name or hold: rows 11, 14, 20 and 21 of what was tried (docs/security.md)."""

from __future__ import annotations

import builtins
import importlib
import json
import pickle
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry
from offrl.data.arrays import from_arrays
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.system import files, trust

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl.labelling import local_model
from offrl.lm.models import pretrained as languages
from offrl.lm.models import tokenizer as tokenizing

EVIL = "import pathlib; pathlib.Path({!r}).write_text('ran')\nclass Model: ...\nclass Config: ...\n"


@pytest.fixture(autouse=True)
def nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is asked anything, and what this process knows is what a fresh one does."""

    def asked(*_: Any) -> str:
        raise AssertionError("a person was asked whether to run code")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.setattr(languages, "_known", {})
    monkeypatch.setenv(trust.SWITCH, "")
    monkeypatch.delenv(languages.ELSEWHERE, raising=False)


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 of random weights with a tokenizer of bytes."""
    import transformers

    folder = tmp_path_factory.mktemp("lm")
    names = {"bos_token": tokenizing.START, "eos_token": tokenizing.END, "pad_token": tokenizing.PAD}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizing.make("bytes", []).backend, **names
    ).save_pretrained(folder)
    sizes = {
        "vocab_size": 260,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 1,
        "n_positions": 64,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).save_pretrained(folder)
    return folder


def copied(source: Path, target: Path, **config: Any) -> Path:
    """The model's folder with other keys in config.json."""
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    about = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(about | config))
    return target


def policy(path: Path, lm: Path, ship: str = "always") -> Path:
    """A policy file of LaMo with the language model, or where it lies."""
    g, n = np.random.default_rng(0), 40
    data = from_arrays(
        g.normal(size=(n, 3)),
        g.uniform(-1, 1, (n, 2)),
        g.normal(size=n),
        np.arange(n) % 20 == 19,
        action_low=-1.0,
        action_high=1.0,
    )
    kind = registry.get("algo", "lamo")
    config = kind.Config(lm=str(lm), context=2, rank=2, ship_lm=ship)
    algorithm = kind(kind.fit_config(config, data), data.spec)
    TrainedPolicy(algorithm, algorithm.init(0), 0).save(path)
    languages._known.clear()
    return path


def changed(path: Path, **assets: Any) -> Path:
    tensors, meta = files.read(path)
    about = meta["assets"] | assets
    files.write(path, tensors, {k: v for k, v in (meta | {"assets": about}).items() if k not in ("version", "sha256")})
    return path


def refused(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        TrainedPolicy.load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_architecture_in_a_file_names_no_code(tmp_path: Path, gpt2: Path) -> None:
    """Row 11: `architecture: {model_type: vit, auto_map: {...}, name_or_path: DIR}` in a policy file."""
    code = tmp_path / "code"
    code.mkdir()
    (code / "evil.py").write_text(EVIL.format(str(tmp_path / "ran")))
    names = {
        "auto_map": {f"Auto{n}": "evil.Model" for n in ("Model", "ModelForCausalLM", "Config")},
        "name_or_path": str(code),
    }
    names |= {
        "_name_or_path": str(code),
        "trust_remote_code": True,
        "attn_implementation": "evil/kernel",
        "quantization_config": {"x": 1},
    }
    path = policy(tmp_path / "p.safetensors", gpt2)
    about = files.read(path)[1]["assets"]["architecture"]
    assert "no causal language model" in refused(changed(path, architecture={"model_type": "vit", **names}))
    for other in (
        {"model_type": "no-such"},
        {"model_type": []},
        {**names},
        [],
        3,
        {"model_type": "gpt2", "n_embd": "x"},
    ):
        refused(changed(path, architecture=other))
    TrainedPolicy.load(changed(path, architecture={**about, **names})).act(np.zeros(3, np.float32))
    assert not (tmp_path / "ran").exists() and not any("evil" in name for name in sys.modules)


@pytest.mark.parametrize(
    "change", [{"n_embd": 30_000}, {"n_layer": 9_000}, {"n_layer": 10**9}, {"n_positions": 900_000_000}], ids=str
)
def test_an_architecture_takes_no_memory_before_it_fits(
    tmp_path: Path, gpt2: Path, change: dict[str, int], monkeypatch: Any
) -> None:
    """Row 20, of the language model in a policy file."""
    from offrl.nn import meta_check

    monkeypatch.setattr(meta_check, "OPERATIONS", 3_000)
    path = policy(tmp_path / "p.safetensors", gpt2)
    about = files.read(path)[1]["assets"]["architecture"]
    text = refused(changed(path, architecture={**about, **change}))
    assert any(words in text for words in ("networks of", "no model has so many", "not of the shape"))


@pytest.mark.parametrize("change", [{"identity": 3}, {"place": []}, {"identity": None}], ids=str)
def test_assets_of_other_types_is_one_line(tmp_path: Path, gpt2: Path, change: dict[str, Any]) -> None:
    """Row 21, of the language model in a policy file."""
    assert "which language model" in refused(changed(policy(tmp_path / "p.safetensors", gpt2), **change))


@pytest.mark.parametrize(
    "numbers", [[0, 2, 10**12], [0, 2, 50_000], [-1, 2, 260], [0, 2], [0, 500, 260], "abc", None, [0, "2", 260]]
)
def test_a_tokenizer_in_a_file_has_as_many_tokens_as_it_says(numbers: Any) -> None:
    """Rows 20 and 21: tables are made of that size."""
    text = tokenizing.make("bytes", []).backend.to_str()
    assert tokenizing.from_json(text, [1, 2, 260], "p").size == 260
    with pytest.raises(UserError, match="its tokenizer is damaged"):
        tokenizing.from_json(text, numbers, "p")


@pytest.mark.parametrize("text", ["", "{}", "[" * 100_000, '{"model": {"type": "BPE"}}', 3])
def test_a_tokenizer_in_a_file_that_is_none(text: Any) -> None:
    """Row 21: the package is in Rust, whose panics are no exceptions of Python."""
    with pytest.raises(UserError, match="its tokenizer is damaged"):
        tokenizing.from_json(text, [1, 2, 260], "p")


# ---------------------------------------------------------------------------------------------------- names of models


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, gpt2: Path) -> list[bool]:
    """What is asked of the Hub: for each question whether it was about local files only. It has every model; the cache
    has none.
    """
    asked: list[bool] = []

    def snapshot_download(name: str, *, local_files_only: bool = False, **_: Any) -> str:
        asked.append(local_files_only)
        if local_files_only:
            raise FileNotFoundError(name)
        return str(gpt2)

    monkeypatch.setattr(importlib.import_module("huggingface_hub"), "snapshot_download", snapshot_download)
    return asked


def test_what_a_policy_file_names_is_not_downloaded(
    tmp_path: Path, gpt2: Path, hub: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 14: a policy file names a model of the Hub."""
    path = changed(policy(tmp_path / "p.safetensors", gpt2, ship="never"), place="evil/model")
    assert "not downloaded" in refused(path) and hub == [True]
    monkeypatch.setenv(languages.ELSEWHERE, str(gpt2))  # a person says where it is
    TrainedPolicy.load(path)
    languages._known.clear()
    monkeypatch.delenv(languages.ELSEWHERE)
    with trust.trusted():
        TrainedPolicy.load(path)
    assert hub == [True, True, False]


def test_a_name_that_is_typed_is_downloaded_and_one_of_a_runs_file_is_not(hub: list[bool], gpt2: Path) -> None:
    """Row 14: nobody typed the settings of a run that continues."""
    assert languages.find("some/model").place == "some/model" and hub == [True, False]
    with trust.settings_of_file(), pytest.raises(UserError, match="not downloaded"):
        languages.find("some/model")
    assert hub == [True, False, True]
    identity = languages.find(str(gpt2)).identity
    languages._known.clear()
    with pytest.raises(UserError, match="not downloaded"):
        languages.open_again("some/model", identity)


def test_a_run_that_continues_downloads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 14: its config.yaml is a file. The same settings from a command are a person's."""
    from offrl.runs import record
    from offrl.settings.train import TrainConfig

    typed = []

    class Kind:
        @staticmethod
        def fit_config(config: Any, dataset: Any, grid: Any) -> Any:
            typed.append(trust.typed_settings())
            return config

    monkeypatch.setattr(registry, "get", lambda *_: Kind)
    algo = registry.names("algo")["bc"].Config()
    record.fit(TrainConfig(algo=algo), None)  # type: ignore[arg-type]
    record.fit(TrainConfig(algo=algo, resume="runs/x"), None)  # type: ignore[arg-type]
    assert typed == [True, False]


def test_another_model_than_the_one_of_training_is_not_even_read(
    tmp_path: Path, gpt2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy file may name any folder of this machine: only a model with the right checksum is opened."""
    path = changed(policy(tmp_path / "p.safetensors", gpt2, ship="never"), identity="0123456789abcdef")
    monkeypatch.setattr(languages, "_load", lambda folder: pytest.fail("it was read"))
    assert "not the one that was trained with" in refused(path)


# ---------------------------------------------------------------------------------------------------- folders of models

READERS = [pytest.param(languages.find, id="algo.lm"), pytest.param(local_model.LocalModel, id="local")]


@pytest.mark.parametrize("read", READERS)
def test_a_folders_code_is_not_run(tmp_path: Path, gpt2: Path, read: Any) -> None:
    """Row 11, of a folder: auto_map in config.json and in tokenizer_config.json, kernels of the Hub."""
    names = {f"Auto{n}": "evil.Model" for n in ("Model", "ModelForCausalLM", "Config", "Tokenizer")}
    folder = copied(gpt2, tmp_path / "lm", auto_map=names, attn_implementation="evil/kernel", use_kernels=True)
    (folder / "evil.py").write_text(EVIL.format(str(tmp_path / "ran")))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(settings | {"auto_map": {"AutoTokenizer": ["evil.Model", "evil.Model"]}})
    )
    assert read(str(folder)).model.config.model_type == "gpt2"
    assert not (tmp_path / "ran").exists() and not any("evil" in name for name in sys.modules)
    copied(gpt2, folder, auto_map=names, model_type="evil")
    with pytest.raises(UserError):
        read(str(folder))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("read", READERS)
def test_an_adapter_beside_a_model_is_not_followed(tmp_path: Path, gpt2: Path, read: Any) -> None:
    """adapter_config.json: peft imports the module that `megatron_core` names, and transformers the base model."""
    folder = copied(gpt2, tmp_path / "lm")
    about = {
        "peft_type": "LORA",
        "base_model_name_or_path": "evil/model",
        "megatron_config": {},
        "megatron_core": "this",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match=r"adapter_config\.json there names an adapter"):
        read(str(folder))
    assert "this" not in sys.modules


class Evil:
    def __reduce__(self) -> Any:
        return exec, ("raise AssertionError('unpickled')",)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside another file"])
def test_pickled_weights_are_not_read(tmp_path: Path, gpt2: Path, read: Any, beside: bool) -> None:
    """pytorch_model.bin alone, or with a safetensors file of another name."""
    folder = copied(gpt2, tmp_path / "lm")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    if beside:
        (folder / "other.safetensors").write_bytes(content)
    with pytest.raises(UserError):
        read(str(folder))


def test_quantised_weights_are_refused(tmp_path: Path, gpt2: Path) -> None:
    """Other packages would be called to read them."""
    with pytest.raises(UserError, match="quantised"):
        languages.find(str(copied(gpt2, tmp_path / "lm", quantization_config={"quant_method": "gptq"})))


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "does not come to an end"),
        ("{% for i in range(9999) %}{{ 'x' * 1000 }}{% endfor %}", "makes 9,999,000 characters"),
    ],
)
def test_chat_templates_come_to_an_end(
    tmp_path: Path, gpt2: Path, monkeypatch: Any, template: str, problem: str
) -> None:
    """A chat template is a program; transformers' sandbox lets it loop."""
    monkeypatch.setattr(local_model, "STEPS", 300_000)
    folder = copied(gpt2, tmp_path / "lm")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert local_model.LocalModel(str(folder))._tokens("hi")
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError, match=problem):
        local_model.LocalModel(str(folder))._tokens("hi")
    assert torch.is_grad_enabled()
