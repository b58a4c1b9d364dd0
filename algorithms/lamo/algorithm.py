"""LaMo: "Unleashing the Power of Pre-trained Language Models for Offline Reinforcement Learning" (Shi et al., 2024,
arXiv 2310.20587).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from offrl import rng
from offrl.algorithm import Adam, Batch, BoundParams, Dataset, Grid, Loss, Params, Sampler, TrainState, Traits
from offrl.algorithms.lamo.language import describe, load_model, model_of_run
from offrl.algorithms.lamo.model import LanguagePolicy, trunk, trunk_of
from offrl.algorithms.lamo.sampler import SPEAKING, TEXT, LanguageSampler
from offrl.data.samplers.sequences import STEPS, VALID
from offrl.errors import UserError
from offrl.families.return_conditioned import TargetReturnSettings
from offrl.families.sequence import SequenceModel, SequenceSettings, TargetReturnActor, masked_mean
from offrl.lm.models import tokenizer
from offrl.lm.models.adapters import TUNE, probe
from offrl.lm.models.configured import find_language
from offrl.lm.models.pretrained import SMALL
from offrl.registry import register
from offrl.settings.field import defaults, setting


@dataclass
@defaults(warmup_steps=2_500)
class LaMoConfig(TargetReturnSettings, SequenceSettings):
    """Settings of LaMo; the defaults are those of the authors' run.sh for D4RL."""

    name: str = "lamo"
    lm: str = setting(
        "gpt2",
        "the language model: a folder with config.json and *.safetensors, a name on the Hugging Face Hub, or scratch: "
        "a GPT-2 of random weights, with the settings width, layers, heads and activation",
        place=True,
    )
    lm_id: str = setting("", "which model that is", filled=True)
    lm_fallback: bool = setting(False, "take lm=scratch where the language model cannot be had", place=True)
    tune: str = setting(
        "adapters", "what learns in the language model: LoRA beside its attention, or all but its words", choices=TUNE
    )
    rank: int = setting(16, "of LoRA's matrices", low=1)
    lora_alpha: float = setting(32.0, "LoRA's output is scaled by lora_alpha / rank", low=0.0)
    lora_layers: list[str] = setting(
        [], "linear layers that get LoRA, by name; none: attention's projections to queries, keys and values"
    )
    embedding: str = setting(
        "mlp", "embeddings of tokens and the action's head: with a hidden layer, or linear", choices=("mlp", "linear")
    )
    ship_lm: str = setting(
        "small",
        "which language models are written into policy files; one that is not there is needed where the policy acts "
        "(small: up to 64 MB)",
        choices=("small", "always", "never"),
        place=True,
    )
    text: str = setting(
        "", "a text file: the model goes on learning language beside acting; empty: it does not", place=True
    )
    text_id: str = setting("", "which text that is", filled=True)
    language_weight: float = setting(0.1, "text: weight of the loss on it", low=0.0)
    text_length: int = setting(1024, "text: tokens in a window, at most as many as the model looks back", low=2)
    weight_decay: float = setting(1e-5, "AdamW's decay of all that learns", low=0.0)
    activation: str = setting("gelu", "lm=scratch: of the blocks", choices=("relu", "gelu", "silu", "tanh"))


@register("algo", "lamo")
class LaMo(SequenceModel[LaMoConfig]):
    """DT whose transformer is a frozen language model with LoRA (section 4). The trained weights are the module
    "actor".

    Differences from the authors' code: LoRA beside a merged projection to queries, keys and values has one A, not
    three; the weights of attention are dropped out in GPT-2 alone, where other models may do so as well.
    """

    traits = Traits(vectorized=False, compiles=False)
    actor_class = TargetReturnActor

    @classmethod
    def fit_config(cls, config: LaMoConfig, dataset: Dataset, grid: Grid = None) -> LaMoConfig:
        """Find the language model, note its identity and sizes, and try it. Raises UserError where it cannot be the
        trunk.
        """
        config = super().fit_config(config, dataset, grid)
        language = load_model(config)
        architecture = language.config
        sizes = {
            "width": language.width,
            "layers": architecture.num_hidden_layers,
            "heads": architecture.num_attention_heads,
        }
        for name, value in sizes.items():
            setting_value, default = getattr(config, name), LaMoConfig.__dataclass_fields__[name].default
            if setting_value not in (default, value):
                raise UserError(
                    f"algo.{name}={setting_value}, but algo.lm={config.lm} has {value}: leave the first out"
                )
        positions = getattr(architecture, "max_position_embeddings", None)
        if positions and 3 * config.context > positions:
            raise UserError(
                f"algo.context={config.context} steps are {3 * config.context} tokens, and algo.lm={config.lm} looks "
                f"back {positions}"
            )
        text_id = ""
        if config.text:
            text_id = tokenizer.digest(tokenizer.tokens(language, config.text))
        config = dataclasses.replace(config, **sizes, lm_id=language.identity, text_id=text_id)
        with torch.random.fork_rng(devices=[]):
            probe(trunk(config, language), config.padding == "left")
        return config

    def modules(self) -> dict[str, nn.Module]:
        self.language = model_of_run(self.config)
        actor = LanguagePolicy(self.sizes(), self.config, self.spec, self.language)
        self.runtime.notes = [describe(self.language, actor, self.config)]
        return {"actor": actor}

    @property
    def text_length(self) -> int:
        """Tokens in a window of text."""
        return min(
            self.config.text_length,
            getattr(self.language.config, "max_position_embeddings", None) or self.config.text_length,
        )

    def sampler(self) -> Sampler:
        return LanguageSampler(self, super().sampler())

    def optimizer(self, name: str) -> Adam:
        return dataclasses.replace(super().optimizer(name), eps=1e-6)

    def apply(self, name: str, params: Params, *x: Any) -> Any:
        if isinstance(params, BoundParams):
            return super().apply(name, params, *x)
        # those of the modules are on the CPU
        frozen = self.runtime.source.frozen if next(iter(params.values())).is_cuda else {}
        return functional_call(self.networks[name], {**frozen, **params}, x, tie_weights=False)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> Loss:
        """E |a_t - pi(R_1, s_1, a_1, ..., R_t, s_t)|^2 + lambda L_language, L_language -log p(word | words before it),
        where text= names a text (section 4)."""
        dist = self.apply("actor", actor, self.tokens(batch), batch[STEPS], batch[VALID], key)
        loss = masked_mean(self.policy.bc_loss(dist, batch["actions"]), batch[VALID])
        metrics = {"actor/loss": loss}
        if TEXT not in batch:
            return loss, metrics
        text = self.apply("actor", actor, batch[TEXT], None, None, rng.fold_in(key, SPEAKING))
        return loss + self.config.language_weight * text, {**metrics, "language/loss": text}

    # ---- policy files

    def assets(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The frozen weights, or where the language model lay."""
        frozen = trunk_of(self.networks["actor"]).frozen()
        is_small = sum(t.numel() * t.element_size() for t in frozen.values()) <= SMALL
        description: dict[str, Any] = {"identity": self.language.identity, "place": self.language.place}
        if self.config.ship_lm == "always" or not self.language.place or (self.config.ship_lm == "small" and is_small):
            return frozen, {**description, "architecture": self.language.architecture()}
        return {}, description

    @classmethod
    def load_assets(cls, tensors: dict[str, Tensor], description: dict[str, Any]) -> Mapping[str, Any]:
        find_language(tensors, description, head=False)
        return {}
