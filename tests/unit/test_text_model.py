"""Trained language models as policies: LoRA, the reference without it, saving and loading, and what cannot be a
policy.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from offrl import registry
from offrl.algorithm import select, stack
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.training.stages import ready
from offrl.training.step import Step

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl.data.text.dataset import from_episodes
from offrl.lm.models import configured
from offrl.lm.models import pretrained as languages
from offrl.lm.models import tokenizer as tokenizing

ROOT = Path(__file__).parents[2]
STORIES = ROOT.parent / "shared" / "data" / "text"


def stories(folder: Path) -> None:
    """stories260K as transformers has it."""
    if not (STORIES / "stories260K.bin").is_file():
        pytest.skip("stories260K is not here")
    from llama2c_to_hf import convert

    convert(STORIES / "stories260K.bin", folder, STORIES / "tok512.bin")


def tiny_gpt2(folder: Path, specials: bool = True, tokens: int = 260) -> None:
    """A GPT-2 of random weights with a tokenizer of bytes."""
    import transformers

    tok = tokenizing.make("bytes", [])
    names = (
        {"bos_token": tokenizing.START, "eos_token": tokenizing.END, "pad_token": tokenizing.PAD} if specials else {}
    )
    transformers.PreTrainedTokenizerFast(tokenizer_object=tok.backend, **names).save_pretrained(folder)
    config = transformers.GPT2Config(
        vocab_size=tokens, n_embd=16, n_layer=2, n_head=2, n_positions=128, bos_token_id=None, eos_token_id=None
    )
    torch.manual_seed(0)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)


def story_data(end: str = "\n") -> Any:
    turns = [
        {"obs": "Once upon a time\n", "action": f"there was a {a}.{end}", "reward": float(len(a))}
        for a in ("cat", "dog", "little girl")
    ]
    return from_episodes(
        [{"turns": [t], "final_obs": None, "terminated": True, "truncated": False} for t in turns], name="stories"
    )


def trained(lm: Path, data: Any, updates: int, **settings: Any) -> tuple[Any, Any, dict[str, Any]]:
    kind = registry.get("algo", "lm_bc")
    given: dict[str, Any] = {
        "lm": str(lm),
        "tune": "adapters",
        "rank": 4,
        "length": 64,
        "batch_size": 3,
        "learning_rate": 1e-2,
        **settings,
    }
    config = kind.fit_config(kind.Config(**given), data)
    algorithm = kind(config, data.spec)
    step = Step(algorithm, algorithm.sampler().prepare(data), batch_size=3, replicas=1)
    state, sums = step.run(stack([algorithm.init(0)]), {}, 0, updates)
    return algorithm, select(state, 0), sums


@pytest.mark.parametrize("make", [tiny_gpt2, pytest.param(stories, marks=pytest.mark.nightly)])
def test_adapters_learn_beside_a_frozen_model_and_travel_alone(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, data = tmp_path / "lm", story_data()
    make(folder)
    layers = ["c_attn", "c_fc", "c_proj"] if make is tiny_gpt2 else []
    algorithm, state, first = trained(folder, data, 1, lora_layers=layers)
    updates = 100 if layers else 40
    _, state, later = trained(folder, data, updates, lora_layers=layers)
    # random states say little: 0.963 +- 0.009 over seeds
    assert float(later["policy/loss"]) / updates < (0.99 if layers else 0.8) * float(first["policy/loss"])
    language, lm = configured.language_of(algorithm.config), algorithm.networks["policy"]
    assert all("lora" in name for name in state.params["policy"])
    assert sum(p.numel() for p in state.params["policy"].values()) < 0.2 * language.parameters
    # the reference is the model as it was, to the last bit; with adapters it is another
    ids = torch.tensor([[1, *algorithm.tokenizer.encode(["Once upon a time\n"])[0].tolist()]])
    with torch.no_grad():
        fresh = configured.language_model(algorithm.config, tune="none")
        plain = fresh.logits(fresh.hidden(ids))
        bound = TrainedPolicy(algorithm, state, 0)
        bound.step(bound.start(1), [data.strings[0]], 0)
        policy = bound.actor.state.params["policy"].module
        with policy.reference():
            assert torch.equal(policy.logits(policy.hidden(ids)), plain)
        assert (policy.logits(policy.hidden(ids)) - plain).abs().max() > 0.1
        whole = language.copied()
        whole.set_attn_implementation("eager")
        torch.testing.assert_close(plain, whole(input_ids=ids).logits, rtol=1e-4, atol=1e-4)
    # frozen weights are the language model's own memory, in the module and in every copy
    shared = {p.data_ptr() for p in language.model.parameters()}
    assert all(b.data_ptr() in shared for n, b in lm.named_buffers() if "lora" not in n and n.endswith("weight"))
    # a policy file without the frozen weights is small, and needs their place; one with them needs nothing
    for ship, kept in (("never", False), ("always", True)):
        algorithm.config.ship_lm = ship
        path = tmp_path / f"{ship}.safetensors"
        TrainedPolicy(algorithm, state, 0).save(path)
        with monkeypatch.context() as patch:
            patch.setattr(languages, "_known", {})
            patch.setattr(configured, "_tokenizers", {})
            moved = tmp_path / "elsewhere"
            folder.rename(moved)
            try:
                if kept:
                    assert TrainedPolicy.load(path).act(data.strings[0]) == TrainedPolicy(algorithm, state, 0).act(
                        data.strings[0]
                    )
                else:
                    with pytest.raises(UserError, match="OFFRL_LM"):
                        TrainedPolicy.load(path)
                    patch.setenv("OFFRL_LM", str(moved))
                    assert TrainedPolicy.load(path).act(data.strings[0]) == TrainedPolicy(algorithm, state, 0).act(
                        data.strings[0]
                    )
            finally:
                moved.rename(folder)
    assert (tmp_path / "never.safetensors").stat().st_size < 0.5 * (tmp_path / "always.safetensors").stat().st_size


def test_a_whole_model_learns_and_its_policy_needs_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, data = tmp_path / "lm", story_data(end="")
    tiny_gpt2(folder)
    algorithm, state, _ = trained(folder, data, 3, tune="all")
    assert algorithm.config.append_end  # no action ends with a newline
    policy = TrainedPolicy(algorithm, state, 0)
    policy.save(tmp_path / "p.safetensors")
    said = policy.act(data.strings[0])
    shutil.rmtree(folder)
    monkeypatch.setattr(languages, "_known", {})
    monkeypatch.setattr(configured, "_tokenizers", {})
    assert TrainedPolicy.load(tmp_path / "p.safetensors").act(data.strings[0]) == said


def test_what_does_not_fit_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_gpt2(tmp_path / "few", tokens=200)
    with pytest.raises(UserError, match=r"260 tokens and the model 200: they do not belong together"):
        trained(tmp_path / "few", story_data(), 1)
    tiny_gpt2(tmp_path / "bare", specials=False)
    with pytest.raises(UserError, match=r"no end token, and the actions of stories do not all end with a newline"):
        trained(tmp_path / "bare", story_data(end=""), 1)
    capsys.readouterr()
    trained(tmp_path / "bare", story_data(), 1)
    assert "neither a BOS nor an EOS token" in capsys.readouterr().err
    tiny_gpt2(tmp_path / "no tokenizer")
    for file in (tmp_path / "no tokenizer").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(UserError, match="no tokenizer could be read"):
        trained(tmp_path / "no tokenizer", story_data(), 1)
    with pytest.raises(UserError, match="package gguf"):
        (tmp_path / "m.gguf").write_bytes(b"GGUF")
        trained(tmp_path / "m.gguf", story_data(), 1)
    with pytest.raises(UserError, match=r"no linear layers called .*c_fcc"):
        trained(tmp_path / "bare", story_data(), 1, lora_layers=["c_fcc"])
    with pytest.raises(UserError, match=r"looks back 128 tokens, too few"):
        trained(tmp_path / "bare", story_data(), 1, action_tokens=125)


def test_control_tokens_spelt_in_data_are_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Encoded from the model's folder, and from a policy file, which does not say how."""
    tiny_gpt2(tmp_path)
    tokenizer = tokenizing.of_model(tmp_path, "x")
    numbers = [tokenizer.start, tokenizer.end, tokenizer.size]
    for made in (tokenizer, tokenizing.from_json(tokenizer.backend.to_str(), numbers, "x")):
        text = f"a{tokenizing.END}b{tokenizing.START}\n"
        [ids] = made.encode([text])
        assert (
            not {made.start, made.end} & set(ids.tolist())
            and made.decode(ids.tolist()) == text
            and not made.unknown([text])
        )
    data = story_data()
    assert configured.fitted(configuration(tmp_path), data) and "control token" not in capsys.readouterr().err
    spelt = replace(data, strings=(data.strings[0] + tokenizing.END, *data.strings[1:]))
    configured.fitted(configuration(tmp_path), spelt)
    said = capsys.readouterr().err
    assert (
        f"1 of {len(data.strings)} different texts hold the spelling of a control token" in said
        and tokenizing.END in said
    )


def configuration(folder: Path) -> Any:
    return registry.get("algo", "lm_bc").Config(lm=str(folder), tune="adapters", rank=4, length=64, batch_size=3)


def test_a_long_history_is_cut_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_gpt2(tmp_path)
    algorithm = trained(tmp_path, story_data(), 1)[0]
    ids = algorithm.prompt(["x" * 500])
    assert len(ids) == algorithm.config.length and algorithm.cut_contexts == 1
    algorithm.prompt(["y" * 500])
    assert algorithm.cut_contexts == 2 and capsys.readouterr().err.count("cut at its beginning") == 1


def test_a_clone_with_adapters_is_steered_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a language model lies is no part of a run's identity: the run of the clone says it, to a process that knows
    no model yet.
    """
    from offrl.settings.train import TrainConfig

    tiny_gpt2(tmp_path / "lm")
    data, kind = story_data(), registry.get("algo", "ilql")
    given: dict[str, Any] = {
        "lm": str(tmp_path / "lm"),
        "tune": "adapters",
        "rank": 2,
        "length": 64,
        "batch_size": 3,
        "policy_steps": 2,
    }

    def made(**settings: Any) -> Any:
        run = TrainConfig(
            algo=kind.Config(**settings), seeds=[0], steps=2, runs_dir=str(tmp_path / "runs"), quiet=True, device="cpu"
        )
        run, pretrained = ready(run, data)
        return kind(run.algo, data.spec, pretrained)

    first = made(**given)
    monkeypatch.setattr(languages, "_known", {})
    monkeypatch.setattr(configured, "_tokenizers", {})
    again = made(policy=first.config.policy, tune="adapters", rank=2, length=64)
    assert again.config.lm == given["lm"] and again.config.lm_id == first.config.lm_id
    state = again.init(0)
    policy = TrainedPolicy(again, state, 0)
    policy.save(tmp_path / "p.safetensors")
    shutil.rmtree(tmp_path / "lm")
    shutil.rmtree(tmp_path / "runs")
    for place, name in ((languages, "_known"), (configured, "_tokenizers")):
        monkeypatch.setattr(place, name, {})
    assert TrainedPolicy.load(tmp_path / "p.safetensors").act(data.strings[0]) == policy.act(data.strings[0])
