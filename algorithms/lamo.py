"""LaMo: "Unleashing the Power of Pre-trained Language Models for Offline Reinforcement Learning" (Shi et al., 2024, arXiv 2310.20587)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from offrl import rng
from offrl.actor import BoundParams
from offrl.algorithm import Metrics, TrainState
from offrl.data.dataset import Dataset
from offrl.data.samplers.sequences import Sequences
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError, warn
from offrl.families.sequence import SequenceAlgorithm, SequenceSettings, StepPolicy
from offrl.lm.models import pretrained as languages
from offrl.lm.models.adapters import TUNE, Trunk, probe
from offrl.lm.models.pretrained import SCRATCH, SMALL, Language
from offrl.nn.mlp import ACTIVATIONS, Linear
from offrl.nn.policies import Deterministic, make_policy
from offrl.nn.transformer import Norm, Table, interleave, visible
from offrl.optim import Adam, Params
from offrl.registry import register
from offrl.settings.field import setting

if TYPE_CHECKING:
    pass

TEXT = "text"  # a column of batches: tokens [text_batch, text_length]
SPEAKING = 3_001  # folded into an update's key for the text that is drawn, and for the dropout on it


@dataclass
class LaMoConfig(SequenceSettings):
    """Settings of LaMo; the defaults are those of the authors' run.sh for D4RL."""

    name: str = "lamo"
    lm: str = setting(
        "gpt2",
        "the language model: a folder with config.json and *.safetensors, a name on the Hugging Face Hub, or scratch: a GPT-2 of random "
        "weights, with the settings width, layers, heads and activation",
        place=True,
    )
    lm_id: str = setting("", "which model that is", filled=True)
    lm_fallback: bool = setting(False, "take lm=scratch where the language model cannot be had", place=True)
    tune: str = setting("adapters", "what learns in the language model: LoRA beside its attention, or all but its words", choices=TUNE)
    rank: int = setting(16, "of LoRA's matrices", low=1)
    lora_alpha: float = setting(32.0, "LoRA's output is scaled by lora_alpha / rank", low=0.0)
    lora_layers: list[str] = setting([], "linear layers that get LoRA, by name; none: attention's projections to queries, keys and values")
    lora_biases: bool = setting(True, "the biases of these layers learn too")
    embedding: str = setting("mlp", "embeddings of tokens and the action's head: with a hidden layer, or linear", choices=("mlp", "linear"))
    ship_lm: str = setting(
        "small",
        "which language models are written into policy files; one that is not there is needed where the policy acts (small: up to 64 MB)",
        choices=("small", "always", "never"),
        place=True,
    )
    text: str = setting("", "a text file: the model goes on learning language beside acting; empty: it does not", place=True)
    text_id: str = setting("", "which text that is", filled=True)
    language_weight: float = setting(0.1, "text: weight of the loss on it", low=0.0)
    text_length: int = setting(1024, "text: tokens in a window, at most as many as the model looks back", low=2)
    text_batch: int = setting(2, "text: windows in an update", low=1)
    weight_decay: float = setting(1e-5, "AdamW's decay of all that learns", low=0.0)
    warmup_steps: int = setting(2_500, "updates until the learning rate is reached", low=0)
    activation: str = setting("gelu", "lm=scratch: of the blocks", choices=("relu", "gelu", "silu", "tanh"))


class Embedding(nn.Module):
    """h = W x + b; with `deep` W' gelu(h) + b' + h. x [..., in] -> [..., D]."""

    def __init__(self, in_dim: int, width: int, deep: bool) -> None:
        super().__init__()
        self.first = Linear(in_dim, width)
        self.second = Linear(width, width) if deep else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return h if self.second is None else self.second(ACTIVATIONS["gelu"](h)) + h


class Clipped(Deterministic):
    """a = f(s), cut off at the ends of its range when acting: the authors' head with a hidden layer has no tanh."""

    def forward(self, observations: Tensor, key: Tensor | None = None) -> tuple[Tensor, ...]:
        return (self.net(observations, key),)

    def mode(self, dist: tuple[Tensor, ...]) -> Tensor:
        return dist[0].clamp(-1.0, 1.0)

    def sample(self, dist: tuple[Tensor, ...], key: Tensor) -> Tensor:
        return self.mode(dist)


class LanguageSteps(nn.Module):
    """As `Steps`, with a language model for its transformer. The embedding of time is added after the norm, as in the authors' code."""

    def __init__(self, sizes: Mapping[str, int], config: Any, language: Language) -> None:
        super().__init__()
        c, self.kinds = config, tuple(sizes)
        self.embed = nn.ModuleDict({kind: Embedding(size, language.width, c.embedding == "mlp") for kind, size in sizes.items()})
        self.time = Table(c.max_timestep, language.width)
        nn.init.normal_(self.time.weight)  # as large as what the norm gives
        self.norm = Norm(language.width)
        self.trunk = trunk(c, language)

    def forward(
        self, tokens: Mapping[str, Tensor], timesteps: Tensor, valid: Tensor | None, key: Tensor | None, read: str | None = None
    ) -> dict[str, Tensor]:
        """tokens [B, K, size] by kind, timesteps and valid [B, K] -> what became of them, [B, K, D] by kind, whichever is read."""
        many = len(self.kinds)
        x = self.norm(interleave([self.embed[kind](tokens[kind]) for kind in self.kinds]))
        x = x + self.time(timesteps).repeat_interleave(many, -2)
        mask = None if valid is None else visible(valid.repeat_interleave(many, -1), x.shape[-2])
        x = self.trunk(x, mask, key).unflatten(-2, (-1, many))
        return {kind: x[..., i, :] for i, kind in enumerate(self.kinds)}


class LanguagePolicy(StepPolicy):
    """`StepPolicy` on a language model. Given text int64 [B, T] in place of an episode's tokens, it tells the loss on that."""

    def __init__(self, sizes: Mapping[str, int], config: Any, spec: Any, language: Language) -> None:
        nn.Module.__init__(self)
        self.read, c = "observation", config
        self.steps = cast(Any, LanguageSteps(sizes, c, language))
        hidden = [language.width] if c.embedding == "mlp" else []
        if hidden and c.policy == "deterministic" and not spec.discrete:
            self.head = Clipped(language.width, spec.action_dim, hidden, activation="gelu")
        else:
            self.head = make_policy(c.policy, language.width, spec.action_dim, spec.num_actions, hidden, activation="gelu")

    def forward(self, tokens: Any, timesteps: Any, valid: Tensor | None = None, key: Tensor | None = None) -> Any:
        if isinstance(tokens, Tensor):
            return trunk_of(self).text_loss(tokens, key)
        return super().forward(tokens, timesteps, valid, key)


@dataclass(frozen=True)
class Source:
    """What all replicas share: windows of episodes, the language model's frozen tensors, and a text's tokens [N]."""

    sequences: Sequences
    frozen: dict[str, Tensor]
    text: Tensor | None


@dataclass(frozen=True)
class LanguageSampler:
    """Windows of episodes, and of a text."""

    algorithm: LaMo
    inner: Sampler

    def prepare(self, dataset: Dataset) -> Source:
        actor, c = self.algorithm.networks["actor"], self.algorithm.config
        text = languages.tokens(self.algorithm.language, c.text).to(dataset.device) if c.text else None
        if text is not None and len(text) < self.algorithm.text_length:
            raise UserError(f"algo.text={c.text} has {len(text)} tokens, fewer than algo.text_length={self.algorithm.text_length}")
        moved: dict[int, Tensor] = {}  # words and the head may be one tensor
        frozen = {name: moved.setdefault(id(t), t.to(dataset.device)) for name, t in actor.named_buffers(remove_duplicate=False)}
        return Source(self.inner.prepare(dataset), frozen, text)

    def __call__(self, source: Source, key: Tensor, batch_size: int) -> Batch:
        batch = self.inner(source.sequences, key, batch_size)
        if source.text is None:
            return batch
        c, length = self.algorithm.config, self.algorithm.text_length
        begin = rng.randint(rng.fold_in(key, SPEAKING), (c.text_batch,), len(source.text) - length + 1)
        rows = begin.unsqueeze(-1) + torch.arange(length, device=begin.device)
        return {**batch, TEXT: source.text[rows]}


@register("algo", "lamo")
class LaMo(SequenceAlgorithm):
    """DT whose transformer is a frozen language model with LoRA (section 4). What learns is the module "actor".

    Differences from the authors' code: LoRA beside a merged projection to queries, keys and values has one A, not three; the weights of
    attention are dropped out in GPT-2 alone, where other models may do so as well.
    """

    Config = LaMoConfig
    traits = replace(SequenceAlgorithm.traits, vectorized=False, compiles=False)

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """Find the language model, note which one it is and its sizes, and try it. Raises UserError where it cannot be the trunk."""
        config = super().fit_config(config, dataset, grid)
        language = chosen(config)
        found = language.config
        own = {"width": language.width, "layers": found.num_hidden_layers, "heads": found.num_attention_heads}
        for name, value in own.items():
            mine, default = getattr(config, name), LaMoConfig.__dataclass_fields__[name].default
            if mine not in (default, value):
                raise UserError(f"algo.{name}={mine}, but algo.lm={config.lm} has {value}: leave the first out")
        most = getattr(found, "max_position_embeddings", None)
        if most and 3 * config.context > most:
            raise UserError(
                f"algo.context={config.context} steps are {3 * config.context} tokens, and algo.lm={config.lm} looks back {most}"
            )
        text_id = ""
        if config.text:
            text_id = languages.digest(languages.tokens(language, config.text))
        config = dataclasses.replace(config, **own, lm_id=language.identity, text_id=text_id)
        with torch.random.fork_rng(devices=[]):
            probe(trunk(config, language), config.padding == "left")
        return config

    def modules(self) -> dict[str, nn.Module]:
        self.language = identified(self.config)
        actor = LanguagePolicy(self.sizes(), self.config, self.spec, self.language)
        self.runtime.notes = [described(self.language, actor, self.config)]
        return {"actor": actor}

    @property
    def text_length(self) -> int:
        """Tokens in a window of text."""
        return min(self.config.text_length, getattr(self.language.config, "max_position_embeddings", None) or self.config.text_length)

    def sampler(self) -> Sampler:
        return LanguageSampler(self, super().sampler())

    def optimizer(self, name: str) -> Adam:
        return dataclasses.replace(super().optimizer(name), eps=1e-6)

    def apply(self, name: str, params: Params, *x: Any) -> Any:
        if isinstance(params, BoundParams):
            return super().apply(name, params, *x)
        frozen = self.runtime.source.frozen if next(iter(params.values())).is_cuda else {}  # those of the modules are on the CPU
        return functional_call(self.networks[name], {**frozen, **params}, x, tie_weights=False)

    def actor_loss(self, actor: Params, state: TrainState, batch: Batch, key: Tensor) -> tuple[Tensor, Metrics]:
        loss, metrics = super().actor_loss(actor, state, batch, key)
        if TEXT not in batch:
            return loss, metrics
        text = self.apply("actor", actor, batch[TEXT], None, None, rng.fold_in(key, SPEAKING))
        return loss + self.config.language_weight * text, {**metrics, "language/loss": text}

    # ---- policy files

    def assets(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The frozen weights, or where the language model lay."""
        frozen = trunk_of(self.networks["actor"]).frozen()
        small = sum(t.numel() * t.element_size() for t in frozen.values()) <= SMALL
        about: dict[str, Any] = {"identity": self.language.identity, "place": self.language.place}
        if self.config.ship_lm == "always" or not self.language.place or (self.config.ship_lm == "small" and small):
            return frozen, {**about, "architecture": self.language.architecture()}
        return {}, about

    @classmethod
    def load_assets(cls, tensors: dict[str, Tensor], about: dict[str, Any]) -> Mapping[str, Any]:
        identity, place = about["identity"], about["place"]
        if languages.known(identity) is None:
            if "architecture" in about:
                languages.unpack(tensors, about["architecture"], identity)
            else:
                languages.open_elsewhere(place, identity)
        return {}


def trunk(config: Any, language: Language) -> Trunk:
    """The trunk that the settings ask for."""
    c = config
    return Trunk(
        language,
        tune=c.tune,
        rank=c.rank,
        alpha=c.lora_alpha,
        dropout=c.dropout,
        layers=c.lora_layers,
        biases=c.lora_biases,
        talks=bool(c.text),
    )


def trunk_of(actor: nn.Module) -> Trunk:
    """The trunk in a policy's module."""
    return cast(Trunk, actor.get_submodule("steps.trunk"))


def chosen(config: Any) -> Language:
    """The language model that the settings name. Raises UserError."""
    if config.lm != SCRATCH:
        try:
            return languages.find(config.lm)
        except UserError as error:
            if not config.lm_fallback:
                raise
            warn(f"{error}; going on from scratch (algo.lm_fallback=true)")
    return languages.scratch(config.width, config.layers, config.heads, config.activation)


def identified(config: Any) -> Language:
    """The language model that a run or a policy file noted; where none did, the one that the settings name. Raises UserError."""
    language = languages.known(config.lm_id)
    if language is None:
        language = chosen(config)
        if config.lm_id and language.identity != config.lm_id:
            raise UserError(
                f"algo.lm={config.lm} is not the language model that was trained with ({language.identity}, not {config.lm_id})"
            )
    return language


def described(language: Language, actor: nn.Module, config: Any) -> str:
    """What a person should know about the trunk."""
    learnt = sum(p.numel() for p in actor.parameters())
    c = config
    if language.identity.startswith(SCRATCH):
        held = "frozen (algo.tune=all lets them learn)" if c.tune == "adapters" else "learnt from these data alone"
        return (
            f"LaMo-scratch: without a pre-trained language model. Its trunk is a GPT-2 of random weights ({c.layers} layers of width "
            f"{language.width}), {held}; results published for LaMo do not apply. {learnt:,} numbers learn"
        )
    what = "frozen, with LoRA" if c.tune == "adapters" else "all of it learning"
    return (
        f"language model {language.place or language.identity} ({language.config.model_type}, {language.parameters:,} numbers, {what}); "
        f"{learnt:,} numbers learn"
    )
