"""A causal language model as a module of an algorithm: its states, its head, value heads, and a cache for writing.

Shapes in comments: B batch, T tokens, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from offrl.actor import BoundParams
from offrl.errors import UserError, first_line
from offrl.lm.models.adapters import SharingLanguage, adapt, freeze, replace_dropout
from offrl.lm.models.libraries import packages, silent
from offrl.lm.models.pretrained import Language, gpt2_config
from offrl.nn.mlp import MLP
from offrl.optim import Params
from offrl.system import backend

SAME = 1e-3  # of the largest logit: how far two ways of computing logits may differ


@dataclass(frozen=True)
class Size:
    """Sizes of a GPT-2 from scratch."""

    width: int
    layers: int
    heads: int
    positions: int
    tokens: int


def gpt2(size: Size) -> Any:
    """A GPT-2 with random weights from torch's generator. Raises UserError for sizes that do not fit together."""
    config = gpt2_config(
        size.width,
        size.layers,
        size.heads,
        vocab_size=size.tokens,
        n_positions=size.positions,
        activation_function="gelu_pytorch_tanh",  # GPT-2's own in one kernel
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        attn_implementation="sdpa",
    )
    with silent():
        return packages()[0].GPT2LMHeadModel(config).eval()


class LM(SharingLanguage):
    """A language model without dropout. Its methods are called by name: forward("hidden", ids), as `functional_call`
    needs it.

    Learnt tensors are parameters; frozen ones are buffers that all copies share and no checkpoint holds (see
    `offrl.lm.models.adapters`)."""

    def __init__(
        self,
        language: Language | None,
        size: Size | None = None,
        *,
        tune: str = "all",
        rank: int = 16,
        alpha: float = 32.0,
        layers: tuple[str, ...] = (),
        checkpointing: bool = False,
    ) -> None:
        """language: a trained one; None: one from scratch of `size`. tune: "all", "adapters" (LoRA beside the linear
        `layers`) or "none".

        Raises UserError for layers that are not there.
        """
        super().__init__()
        assert language is not None or size is not None
        model = language.copied() if language is not None else gpt2(size)  # type: ignore[arg-type]
        base, self.language = model.base_model, language
        if hasattr(base, "set_attn_implementation"):
            base.set_attn_implementation("sdpa" if getattr(base, "_supports_sdpa", False) else "eager")
        head, embedding = model.get_output_embeddings(), base.get_input_embeddings()
        self.tied = head is None or head.weight is embedding.weight
        self.base = base
        self.head = None if self.tied else head
        cap, scale = getattr(base.config, "final_logit_softcapping", None), getattr(base.config, "logits_scaling", None)
        self.cap, self.scale = cap, getattr(base.config, "logit_scale", None) or (1.0 / scale if scale else None)
        self.adapted = tune == "adapters"
        trainable = {id(p) for p in self.parameters()} if tune == "all" else set()
        if self.adapted:
            assert language is not None
            trainable = {id(p) for p in adapt(base, language, layers, rank, alpha, False)}
        if language is not None:
            language.model.requires_grad_(False)  # peft treats shared parameters as its own
        replace_dropout(self.base, 0.0)
        for module in self.base.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = 0.0
        freeze(self, trainable)
        self.placed = "position_ids" in inspect.signature(base.forward).parameters
        self.checkpointing = checkpointing
        if checkpointing:
            with silent():
                base.gradient_checkpointing_enable({"use_reentrant": False})
        self.train(False)

    @property
    def width(self) -> int:
        """D: the dimension of states."""
        return int(self.base.config.hidden_size)

    @property
    def vocabulary(self) -> int:
        """V: the number of tokens of the vocabulary."""
        return int(self.base.get_input_embeddings().weight.shape[0])

    @property
    def positions(self) -> int | None:
        """The number of tokens that it can attend to; None: unknown."""
        limit = getattr(self.base.config, "max_position_embeddings", None)
        return None if limit is None else int(limit)

    def forward(self, method: str, *arguments: Any) -> Any:
        """The method of that name."""
        return getattr(self, method)(*arguments)

    def hidden(self, ids: Tensor, valid: Tensor | None = None, cache: Any = None) -> Tensor:
        """States [B, T, D] of tokens int64 [B, T], each from those up to it.

        valid [B, C + T]: False where there is padding, at the beginning; None: there is none but at the end. cache: of
        the C tokens before, as `fresh_cache` gives it; it is added to.
        """
        options: dict[str, Any] = {}
        if self.checkpointing:  # transformers does so in training mode, and then keeps no cache
            nn.Module.train(self, cache is None and torch.is_grad_enabled())
        if valid is not None:
            options["attention_mask"] = valid.long()
            if self.placed:
                options["position_ids"] = (valid.long().cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if cache is not None:
            options["past_key_values"] = cache
        # checkpointed activations are computed again elsewhere, and have to be computed alike
        keys = ids.shape[1] if valid is None else valid.shape[1]
        with contextlib.nullcontext() if self.checkpointing else backend.attention(ids.device, keys):
            return self.base(input_ids=ids, use_cache=cache is not None, **options).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., V] float32, of the next token."""
        out = F.linear(hidden, self.base.get_input_embeddings().weight) if self.head is None else self.head(hidden)
        out = out.float() if self.scale is None else out.float() * self.scale
        return out if self.cap is None else self.cap * torch.tanh(out / self.cap)

    @staticmethod
    def fresh_cache() -> Any:
        """An empty cache of keys and values."""
        return packages()[0].DynamicCache()

    @contextlib.contextmanager
    def reference(self) -> Iterator[None]:
        """A context without the adapters: the model as it was before training."""
        if not self.adapted:
            raise UserError("a reference policy needs algo.tune=adapters")
        layers = [m for m in self.base.modules() if hasattr(m, "_disable_adapters")]
        flags = [m._disable_adapters for m in layers]
        for m in layers:
            m._disable_adapters = True
        try:
            yield
        finally:
            for m, value in zip(layers, flags, strict=True):
                m._disable_adapters = value


def probe(lm: LM, tokens: int, source: str) -> None:
    """Raise UserError for a language model that cannot be a policy: one that looks ahead, has fewer tokens than its
    tokenizer, cannot continue from a cache, or has a head that is unknown here."""
    if tokens > lm.vocabulary:
        raise UserError(
            f"{source}: its tokenizer has {tokens:,} tokens and the model {lm.vocabulary:,}: they do not belong "
            "together"
        )
    ids = (torch.arange(6) * 7 % min(tokens, lm.vocabulary)).unsqueeze(0)
    try:
        with torch.no_grad():
            logits = lm.logits(lm.hidden(ids))
            prefix_logits = lm.logits(lm.hidden(ids[:, :4]))
            padded_logits = lm.logits(lm.hidden(torch.cat([ids[:, :1], ids], 1), torch.tensor([[False] + [True] * 6])))[
                :, 1:
            ]
            cache = lm.fresh_cache()
            lm.hidden(ids[:, :3], torch.ones(1, 3, dtype=torch.bool), cache)
            cached_logits = lm.logits(lm.hidden(ids[:, 3:], torch.ones(1, 6, dtype=torch.bool), cache))
            model_logits = logits
            if lm.language is not None and lm.language.model.get_output_embeddings() is not None:
                model = lm.language.copied()
                model.set_attn_implementation("eager")
                model_logits = model(input_ids=ids).logits
    except UserError:
        raise
    except Exception as error:  # a third-party model may fail in any way here
        raise UserError(
            f"{source}: a {lm.base.config.model_type} cannot be a policy here ({type(error).__name__}: "
            f"{first_line(error)})"
        ) from None
    scale = SAME * float(logits.abs().max())
    for difference, problem in (
        (prefix_logits - logits[:, :4], "what it makes of a token depends on later ones"),
        (padded_logits - logits, "it looks at padding"),
        (cached_logits - logits[:, 3:], "it cannot continue from a cache of keys and values"),
        (model_logits - logits, "its head does more than a linear layer"),
    ):
        if float(difference.abs().max()) > scale:
            raise UserError(f"{source}: a {lm.base.config.model_type} cannot be a policy here: {problem}")


def value_mlp(width: int, hidden: Sequence[int], out: int, bias: float = 0.0) -> MLP:
    """A value head; its last layer begins at 0 (arXiv 2206.11871) plus `bias`."""
    head = MLP(width, hidden, out)
    nn.init.zeros_(head.head.weight)
    nn.init.constant_(head.head.bias, bias)
    return head


class LMWithHeads(nn.Module):
    """A language model with value heads on its states. Methods are called by name, as `LM`'s."""

    def __init__(self, lm: LM, outs: Mapping[str, int], layers: int, bias: float = 0.0) -> None:
        """outs: head name -> width of its output. layers: of each head, hidden ones twice as wide as the states. bias:
        see `value_mlp`.
        """
        super().__init__()
        self.lm = lm
        self.heads = nn.ModuleDict(
            {name: value_mlp(lm.width, [2 * lm.width] * (layers - 1), out, bias) for name, out in outs.items()}
        )

    def forward(self, method: str, *arguments: Any) -> Any:
        """The method of that name, of this or of the language model."""
        return getattr(self if hasattr(type(self), method) else self.lm, method)(*arguments)

    def outputs(self, states: Tensor, *names: str) -> tuple[Tensor, ...]:
        """Outputs [..., out] of the heads of these names for states [..., D], or what else they read."""
        return tuple(self.heads[name](states).float() for name in names)


def call(module: nn.Module, params: Params, *x: Any) -> Any:
    """The method x[0] of a module with these parameters."""
    if isinstance(params, BoundParams):
        return params.module(*x)
    return functional_call(placed(module, params), params, x)


def placed(module: nn.Module, params: Params) -> nn.Module:
    """The module, its frozen tensors moved once to where its parameters are."""
    device, buffer = next(iter(params.values())).device, next(module.buffers(), None)
    if buffer is not None and buffer.device != device:
        module.to(device)
    return module
