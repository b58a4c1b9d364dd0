"""Settings common to policies that are language models, and of the value heads of some of them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from offrl.data.dataset import Dataset
from offrl.data.value_range import value_range
from offrl.lm.models import tokenizer as tokenizing
from offrl.lm.models.pretrained import SCRATCH
from offrl.nn.heads import ValueHead, make_head
from offrl.settings.field import setting

TUNE = ("all", "adapters")


@dataclass
class TextSettings:
    """Settings of all language-model policies."""

    name: str = ""
    lm: str = setting(
        SCRATCH,
        "the language model: a folder with config.json and *.safetensors, a GGUF file, a name on the Hugging Face Hub, "
        "or scratch: a small GPT-2 of random weights, with the settings width, layers and heads",
        place=True,
    )
    lm_id: str = setting("", "which model that is", filled=True)
    tokenizer: str = setting(
        "characters", "lm=scratch: tokens are characters, words or bytes", choices=tokenizing.KINDS
    )
    vocabulary: list[str] = setting([], "the characters or words that there are", filled=True)
    width: int = setting(64, "lm=scratch: width of the transformer", low=1)
    layers: int = setting(2, "lm=scratch: blocks", low=1)
    heads: int = setting(4, "lm=scratch: attention heads", low=1)
    tune: str = setting(
        "all", "what learns in the language model: all of it, or LoRA adapters beside some linear layers", choices=TUNE
    )
    rank: int = setting(16, "of LoRA's matrices", low=1)
    lora_alpha: float = setting(32.0, "LoRA's output is scaled by lora_alpha / rank", low=0.0)
    lora_layers: list[str] = setting(
        [], "linear layers that get LoRA, by name; none: attention's projections to queries, keys and values"
    )
    ship_lm: str = setting(
        "small",
        "which frozen language models are written into policy files; one that is not there is needed where the policy "
        "acts (small: up to 64 MB)",
        choices=("small", "always", "never"),
        place=True,
    )
    history: int | None = setting(
        None,
        "how many texts, observations and actions in turn, an action is chosen from; null: all since the episode began",
        low=1,
    )
    length: int = setting(512, "most tokens of a sequence; a longer history is cut at its beginning", low=8)
    append_end: bool | None = setting(
        None,
        "actions end with the tokenizer's end token; null: unless each of them ends with its only newline, which then "
        "ends them",
    )
    action_tokens: int | None = setting(
        None, "most tokens of an action that is written; null: half as many again as the longest in the data", low=1
    )
    decoding: str = setting(
        "sample",
        "how actions are chosen in evaluation: drawn, or always the likeliest token",
        choices=("sample", "greedy"),
        acting=True,
    )
    sampling_temperature: float = setting(
        1.0, "logits are divided by it before a token is drawn", low=1e-6, acting=True
    )
    legal: str = setting(
        "ignore",
        "what is done with the list of legal actions that some environments give: nothing, or the action is chosen "
        "from it by how likely the policy is to write it",
        choices=("ignore", "rerank"),
        acting=True,
    )
    learning_rate: float = setting(1e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(128, "sequences in a batch", low=1)
    accumulate: int = setting(
        1, "a batch's gradient is summed over so many parts, one after another, which takes less memory", low=1
    )
    checkpointing: bool = setting(
        False, "activations are computed again on the way back, which takes less memory and more time"
    )
    weight_decay: float = setting(0.0, "AdamW's decay", low=0.0)
    clip_norm: float = setting(1.0, "largest norm of a gradient; 0: any", low=0.0)
    warmup_steps: int = setting(0, "updates until the learning rate is reached", low=0)

    @property
    def wants_reference(self) -> bool:
        """True where these settings need a reference policy (`offrl.lm.reference_policy`)."""
        return False

    @property
    def begins_anew(self) -> tuple[str, ...]:
        """Modules whose language model does not begin with the reference policy's weights."""
        return ()


@dataclass
class ValueHeadSettings:
    """Settings of value heads."""

    value_head: str = setting(
        "scalar",
        "values are numbers, or distributions over bins (for each token: small vocabularies only)",
        choices=("scalar", "hl_gauss"),
    )
    value_bins: int = setting(51, "bins of such a distribution", low=2)
    value_min: float | None = setting(None, "lowest value of its bins; null: from the data")
    value_max: float | None = setting(None, "highest value of its bins; null: from the data")


def with_value_range(config: Any, dataset: Dataset, tokens: float = 1.0) -> Any:
    """Settings whose bins have a range, from the data where it is not given. tokens: how often a turn is discounted, on
    average.
    """
    c = config
    if c.value_head == "scalar" or None not in (c.value_min, c.value_max):
        return c
    low, high = value_range(dataset, c.discount**tokens)
    return dataclasses.replace(
        c,
        value_min=min(low, 0.0) if c.value_min is None else c.value_min,
        value_max=max(high, 0.0) if c.value_max is None else c.value_max,
    )


def head_of(config: Any) -> ValueHead:
    """The value head of these settings."""
    c = config
    low, high = (-1.0, 1.0) if c.value_min is None or c.value_max is None else (c.value_min, c.value_max)
    return make_head(c.value_head, c.value_bins, low, high)
