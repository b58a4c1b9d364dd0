"""Language models as trunks: where they come from, what is refused, what learns, and how a policy finds its model
elsewhere.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import runpy
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.algorithm import select, stack
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.lm.models import libraries
from offrl.lm.models import pretrained as languages
from offrl.lm.models import tokenizer as tokenizing
from offrl.nn.transformer import visible
from offrl.system import files as checkpoint
from offrl.training.step import Step

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl.lm.models.adapters import Trunk, probe

SHARED = Path(os.environ.get("OFFRL_SHARED_DATA", Path(__file__).parents[3] / "shared" / "data"))
WORDS = ["<unk>", *"abcdefgh"]
TINY = {"lm": "", "context": 3, "warmup_steps": 0, "batch_size": 8, "rank": 2}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of grouped heads, and a tokenizer of single letters."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("models") / "llama"
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    g, n = np.random.default_rng(0), 200
    return from_arrays(
        g.normal(size=(n, 4)),
        g.uniform(-1, 1, (n, 2)),
        g.normal(size=n),
        np.arange(n) % 20 == 19,
        action_low=-1.0,
        action_high=1.0,
    )


def make(dataset: Dataset, lm: Any, **settings: Any) -> Any:
    kind = registry.get("algo", "lamo")
    config = kind.Config(**{**TINY, "lm": str(lm), **settings})
    return kind(kind.fit_config(config, dataset), dataset.spec)


def train(algorithm: Any, dataset: Dataset, updates: int) -> Any:
    step = Step(algorithm, algorithm.sampler().prepare(dataset), batch_size=8, replicas=1)
    return select(step.run(stack([algorithm.init(0)]), {}, 0, updates)[0], 0)


def trunk(language: languages.Language, **settings: Any) -> Trunk:
    torch.manual_seed(0)
    made = Trunk(language, **{"rank": 2, "dropout": 0.0, **settings})
    with torch.no_grad():
        for p in made.parameters():  # LoRA's B begins at 0
            p += 0.3 * torch.randn_like(p)
    return made


# ---- what a trunk is


def test_a_trunk_is_the_model_itself_until_it_learns(llama: Path) -> None:
    import transformers

    x, language = torch.randn(2, 5, 16), languages.find(str(llama))
    theirs = transformers.LlamaModel.from_pretrained(llama)
    made = Trunk(language, rank=2)
    with torch.no_grad():
        torch.testing.assert_close(made(x), theirs(inputs_embeds=x).last_hidden_state, atol=1e-5, rtol=1e-4)
        assert not torch.allclose(trunk(language)(x), made(x), atol=1e-2)


@pytest.mark.parametrize("kind", ["llama", "scratch"])
def test_padding_and_later_tokens_change_nothing(kind: str, llama: Path) -> None:
    made = trunk(languages.find(str(llama)) if kind == "llama" else languages.scratch(16, 2, 2, "gelu"))
    x, valid = torch.randn(2, 6, 16), torch.tensor([[True] * 6, [False, False, True, True, True, True]])
    with torch.no_grad():
        left, right = made(x, visible(valid, 6)), made(x.roll(-2, 1), visible(valid.roll(-2, 1), 6))
        alone, other = made(x[:, 2:]), made(torch.cat([x[:, :5], 9 * x[:, 5:]], 1))
    torch.testing.assert_close(left[1, 2:], alone[1])
    torch.testing.assert_close(right[1, :4], alone[1])
    torch.testing.assert_close(made(x)[:, :5], other[:, :5])
    assert not torch.allclose(left[0, 2:], alone[0], atol=1e-2)  # what comes before does count


def test_dropout_is_the_keys_and_nothing_elses(llama: Path) -> None:
    for language in (languages.find(str(llama)), languages.scratch(16, 2, 2, "gelu")):
        made, x = trunk(language, dropout=0.5), torch.randn(2, 5, 16)
        one, two = rng.make_key(1), rng.make_key(2)
        with torch.no_grad():
            torch.manual_seed(0)
            first, plain = made(x, None, one), made(x)
            torch.manual_seed(1)
            made.train()  # it has no dropout that this would switch on
            assert torch.equal(made(x, None, one), first) and torch.equal(made(x), plain)
            assert not torch.equal(made(x, None, two), first) and not torch.equal(first, plain)
        assert all(layer.key is None for layer in made.drops)


def test_memory_is_shared_and_copies_are_small(llama: Path) -> None:
    language = languages.find(str(llama))
    own = {p.data_ptr() for p in language.model.parameters()}
    made = trunk(language)
    size = len(pickle.dumps(made))
    for other in (trunk(language), copy.deepcopy(made)):
        frozen = [b for n, b in other.named_buffers() if "layers" in n]
        assert len(frozen) > 10 and all(b.data_ptr() in own for b in frozen)
        assert not {p.data_ptr() for p in other.parameters()} & (own | {p.data_ptr() for p in made.parameters()})
    assert list(made.state_dict()) == [n for n, _ in made.named_parameters()] and all(
        "lora" in n for n in made.state_dict()
    )
    assert size < 4 * sum(p.numel() for p in language.model.parameters()), "a pickle says where the model lies"
    x = torch.randn(1, 4, 16)
    with torch.no_grad():
        torch.testing.assert_close(pickle.loads(pickle.dumps(made))(x), made(x), rtol=0, atol=0)
        torch.testing.assert_close(copy.deepcopy(made)(x), made(x), rtol=0, atol=0)


def test_all_learns_but_words(llama: Path) -> None:
    language = languages.find(str(llama))
    made = Trunk(language, tune="all", talks=True)
    names = {n.removeprefix("base.") for n, _ in made.named_parameters()}
    assert names == {n for n, _ in language.base.named_parameters()} - {"embed_tokens.weight"}
    assert Trunk(language, biases=False).drops and not any(
        "bias" in n for n, _ in Trunk(language, biases=False).named_parameters()
    )


# ---- language beside acting


def test_loss_on_text_is_transformers_own(llama: Path) -> None:
    import transformers

    made, text = Trunk(languages.find(str(llama)), rank=2, talks=True), torch.randint(0, len(WORDS), (3, 12))
    with torch.no_grad():
        expected = transformers.LlamaForCausalLM.from_pretrained(llama)(text, labels=text).loss
        assert float(made.text_loss(text)) == pytest.approx(float(expected), rel=1e-4)


def test_text_is_learnt_and_resumed_exactly(llama: Path, dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh" * 40)
    (tmp_path / "b.txt").write_text("hgfedcba" * 40)
    given = {
        "text": str(tmp_path / "a.txt"),
        "text_length": 16,
        "learning_rate": 3e-2,
        "language_weight": 1.0,
        "tune": "all",
    }
    algorithm = make(dataset, llama, **given)
    assert algorithm.config.text_id != make(dataset, llama, **{**given, "text": str(tmp_path / "b.txt")}).config.text_id
    source = algorithm.sampler().prepare(dataset)
    step = Step(algorithm, source, batch_size=8, replicas=1)
    state, sums = step.run(stack([algorithm.init(0)]), {}, 0, 1)
    first = float(sums["language/loss"])
    assert first == pytest.approx(np.log(len(WORDS)), rel=0.2)
    path = tmp_path / "x"
    checkpoint.write(path, checkpoint.flatten(state), {})
    assert sum(t.numel() for t in checkpoint.read(path)[0].values()) < 3.1 * sum(
        p.numel() for p in algorithm.init(0).params["actor"].values()
    )
    state, _ = step.run(state, {}, 1, 3)
    last, sums = step.run(state, {}, 4, 1)
    again = make(dataset, llama, **given)
    other = Step(again, again.sampler().prepare(dataset), batch_size=8, replicas=1)
    state = checkpoint.unflatten(stack([again.init(7)]), checkpoint.read(path)[0], "x")
    state, _ = other.run(state, {}, 1, 4)
    for name, value in checkpoint.flatten(last).items():
        assert torch.equal(value, checkpoint.flatten(state)[name]), name
    state, _ = other.run(state, {}, 5, 30)
    _, sums = other.run(state, {}, 35, 1)
    assert float(sums["language/loss"]) < 0.9 * first, "it learns the alphabet"


# ---- policies elsewhere


def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if in another process."""
    monkeypatch.setattr(languages, "_known", {})


@pytest.mark.parametrize("settings", [{}, {"tune": "all"}, {"lm": "scratch", "width": 8, "layers": 1, "heads": 2}])
def test_a_policy_file_holds_a_small_model(
    settings: dict[str, Any], llama: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "gone"
    shutil.copytree(llama, folder)
    policy = TrainedPolicy(algorithm := make(dataset, **{"lm": folder, **settings}), train(algorithm, dataset, 3), 0)
    obs = np.random.default_rng(1).normal(size=(5, 4))
    expected = policy.act(obs)
    policy.save(tmp_path / "policy.safetensors")
    shutil.rmtree(folder)
    elsewhere(monkeypatch)
    loaded = TrainedPolicy.load(tmp_path / "policy.safetensors")
    assert np.array_equal(loaded.act(obs), expected)
    loaded.save(tmp_path / "again.safetensors")
    elsewhere(monkeypatch)
    again = pickle.dumps(TrainedPolicy.load(tmp_path / "again.safetensors"))
    elsewhere(monkeypatch)
    assert np.array_equal(pickle.loads(again).act(obs), expected), "in a process for evaluation"


def test_a_policy_file_without_its_model_says_where_it_lay(
    llama: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(llama, folder)
    algorithm = make(dataset, folder, ship_lm="never")
    policy = TrainedPolicy(algorithm, train(algorithm, dataset, 2), 0)
    path, obs = tmp_path / "policy.safetensors", np.ones((1, 4))
    policy.save(path)
    assert not any(name.startswith("luggage/") for name in checkpoint.read(path)[0])
    expected = policy.act(obs)
    elsewhere(monkeypatch)
    assert np.array_equal(TrainedPolicy.load(path).act(obs), expected)  # it still lies there
    folder.rename(tmp_path / "moved")
    elsewhere(monkeypatch)
    with pytest.raises(UserError, match=r"needs the language model \w+ that lay at .*here.*OFFRL_LM"):
        TrainedPolicy.load(path)
    monkeypatch.setenv("OFFRL_LM", str(tmp_path / "moved"))
    assert np.array_equal(TrainedPolicy.load(path).act(obs), expected)
    (tmp_path / "moved" / "config.json").write_text((tmp_path / "moved" / "config.json").read_text() + " ")
    elsewhere(monkeypatch)
    with pytest.raises(UserError, match="not the one that was trained with"):
        TrainedPolicy.load(path)


def test_another_model_is_another_run(llama: Path, dataset: Dataset, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(llama, folder)
    algorithm = make(dataset, llama)
    assert make(dataset, folder).config.lm_id == algorithm.config.lm_id, "where it lies is no part of what it is"
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert make(dataset, folder).config.lm_id != algorithm.config.lm_id
    with pytest.raises(UserError, match="is not the language model that was trained with"):
        kind = type(algorithm)
        kind(kind.Config(**{**vars(algorithm.config), "lm": str(folder), "lm_id": "0123"}), dataset.spec)


# ---- what is refused


def test_folders_that_hold_no_model(llama: Path, tmp_path: Path) -> None:
    def refused(match: str, folder: Path) -> None:
        with pytest.raises(UserError, match=match) as raised:
            languages.find(str(folder))
        assert "\n" not in str(raised.value)

    refused("there is no such folder", tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    refused("no config.json", tmp_path / "empty")
    for name in ("bin", "damaged", "less", "wide", "bert", "odd", "text"):
        shutil.copytree(llama, tmp_path / name)
    (tmp_path / "bin" / "model.safetensors").rename(tmp_path / "bin" / "pytorch_model.bin")
    refused("pytorch_model.bin, which may hold code and is not read; save the model with", tmp_path / "bin")
    (tmp_path / "damaged" / "model.safetensors").write_bytes(b"\x00" * 100)
    refused("its weights cannot be read as a llama", tmp_path / "damaged")

    def edit(name: str, **changes: Any) -> None:
        path = tmp_path / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    edit("less", num_hidden_layers=3)
    refused(r"lack \d+ weights that config.json asks for, such as model.layers.2", tmp_path / "less")
    edit("wide", hidden_size=32)
    refused("weights", tmp_path / "wide")
    edit("bert", model_type="t5", architectures=["T5Model"])
    refused("t5 is no causal language model", tmp_path / "bert")
    edit("odd", model_type="no-such-thing")
    refused("describes no model known here", tmp_path / "odd")
    (tmp_path / "text" / "config.json").write_text("{")
    refused("describes no model known here", tmp_path / "text")


def test_settings_that_do_not_fit(
    llama: Path, dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for settings, match in (
        ({"width": 64}, "algo.width=64, but algo.lm=.*llama has 16"),
        ({"context": 11}, "33 tokens, and algo.lm=.* looks back 32"),
        (
            {"lora_layers": ["q_proj", "fc"]},
            "no linear layers called algo.lora_layers=q_proj,fc: fc; those it has: down_proj, gate_proj",
        ),
        ({"text": str(tmp_path / "none.txt")}, "algo.text=.*none.txt cannot be read"),
    ):
        with pytest.raises(UserError, match=match):
            make(dataset, llama, **settings)
    with pytest.raises(UserError, match=r"algo.width=10 is no multiple of algo.heads=4"):
        make(dataset, "scratch", width=10, heads=4)
    (tmp_path / "few.txt").write_text("abc")
    with pytest.raises(UserError, match=r"has 3 tokens, fewer than algo.text_length=32"):
        make(dataset, llama, text=str(tmp_path / "few.txt")).sampler().prepare(dataset)
    with pytest.raises(UserError, match="a model from scratch has no tokens"):
        make(dataset, "scratch", text=str(tmp_path / "few.txt"))
    wordless = tmp_path / "wordless"
    shutil.copytree(llama, wordless, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(UserError, match="no tokenizer could be read"):
        make(dataset, wordless, text=str(tmp_path / "few.txt"))
    monkeypatch.setattr("offrl.lm.models.adapters.SPLIT", ("a", "b"))
    with pytest.raises(UserError, match=r"no linear layers called .*\(algo.lora_layers\); those it has: down_proj"):
        make(dataset, llama)


def test_models_that_look_ahead_or_at_padding_are_refused(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, forward = trunk(languages.find(str(llama))), Trunk.forward
    probe(made, left_padding=True)
    monkeypatch.setattr(
        Trunk, "forward", lambda self, x, mask=None, key=None: forward(self, x + x.mean(1, keepdim=True), mask, key)
    )
    with pytest.raises(UserError, match="depends on later ones"):
        probe(made, left_padding=False)
    monkeypatch.setattr(Trunk, "forward", lambda self, x, mask=None, key=None: forward(self, x, None, key))
    probe(made, left_padding=False)
    with pytest.raises(UserError, match=r"looks at padding; use algo.padding=right"):
        probe(made, left_padding=True)
    monkeypatch.setattr(Trunk, "forward", lambda self, x, mask=None, key=None: x[:, :, None])
    with pytest.raises(UserError, match="the same shape is needed"):
        probe(made, left_padding=False)
    monkeypatch.setattr(Trunk, "forward", lambda self, x, mask=None, key=None: self.no_such_thing)
    with pytest.raises(UserError, match=r"a llama cannot be a trunk \(AttributeError"):
        probe(made, left_padding=False)


def test_packages_and_networks_that_are_missing(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    import huggingface_hub

    def fail(*_: Any, **__: Any) -> Any:
        raise OSError("no network\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        UserError, match=r"algo.lm=gpt2: no such folder here, and the Hugging Face Hub did not give it \(no network\)"
    ):
        make(dataset, "gpt2")
    algorithm = make(dataset, "gpt2", lm_fallback=True, width=8, layers=1, heads=1)
    assert algorithm.runtime.notes[0].startswith(
        "LaMo-scratch: without a pre-trained language model"
    ) and algorithm.config.lm_id.startswith("scratch-")
    libraries.packages.cache_clear()
    real = languages.importlib.import_module
    monkeypatch.setattr(
        languages.importlib,
        "import_module",
        lambda name: real(name) if name != "peft" else real("peft_that_is_not_here"),
    )
    try:
        with pytest.raises(UserError, match=r"need the package peft .*pip install 'offrl\[text\]'"):
            libraries.packages()
    finally:
        libraries.packages.cache_clear()


# ---- a real one


def test_a_model_of_llama2c(tmp_path: Path) -> None:
    source = SHARED / "text" / "stories260K.bin"
    if not source.exists():
        pytest.skip(f"{source} is not here")
    import transformers

    script = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "llama2c_to_hf.py"))
    script["convert"](source, tmp_path / "stories", SHARED / "text" / "tok512.bin")
    language = languages.find(str(tmp_path / "stories"))
    (tmp_path / "story.txt").write_text("Once upon a time, there was a little girl named Lily.")
    story = tokenizing.tokens(language, str(tmp_path / "story.txt"))
    text = torch.tensor([[1, *story.tolist()]])
    made = Trunk(language, talks=True)
    with torch.no_grad():
        assert float(made.text_loss(text)) < 0.7, "it knows how stories begin"
        assert float(made.text_loss(text.flip(1))) > 5.0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "stories")
    assert tokenizer.decode(story) == "Once upon a time, there was a little girl named Lily." and len(story) < 20
    source = tmp_path / "cut.bin"
    source.write_bytes((SHARED / "text" / "stories260K.bin").read_bytes()[:-4])
    with pytest.raises(SystemExit, match=r"is no model of llama2\.c"):
        script["convert"](source, tmp_path / "cut")
