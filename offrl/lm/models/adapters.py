"""A language model as the trunk of a policy: its weights frozen, small matrices beside its projections learnt (LoRA,
arXiv 2106.09685).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from offrl import rng
from offrl.errors import UserError
from offrl.lm.models.libraries import packages, silent
from offrl.lm.models.pretrained import Language
from offrl.nn.transformer import drop, visible

if TYPE_CHECKING:
    from typing_extensions import Self

# attention's projections, in one or three
MERGED, SPLIT = (("c_attn", "query_key_value", "qkv_proj", "Wqkv"), ("q_proj", "k_proj", "v_proj"))
INNER = 2_000  # folded into the key of the dropout inside a trunk
TUNE = ("adapters", "all")


class Dropout(nn.Module):
    """Dropout with noise from a key, which the trunk puts here for the length of a call."""

    def __init__(self, rate: float, part: int) -> None:
        super().__init__()
        self.rate, self.part, self.key = rate, part, cast("Tensor | None", None)
        self.p = 0.0  # transformers hands it to attention's kernels, which would draw noise of their own

    def forward(self, x: Tensor) -> Tensor:
        return drop(x, self.rate, self.key, self.part)


class SharingLanguage(nn.Module):
    """A module that shares the frozen tensors of a language model, its buffers, with its copies. It has no training
    mode: a key decides about dropout.
    """

    language: Any  # the `Language`; None: a model from scratch
    base: Any  # transformers' model, without its head

    def train(self, mode: bool = True) -> Self:
        """A no-op."""
        return super().train(False)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        for tensor in self.buffers():
            memo[id(tensor)] = tensor
        if self.language is not None:
            memo[id(self.language)] = self.language
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied


class Trunk(SharingLanguage):
    """The outputs [B, T, D] of a language model for embedded tokens [B, T, D]. Like `Transformer`, with other weights.

    Learnt tensors are parameters; frozen ones are buffers that all trunks of one language model share, and that no
    state dictionary, copy or pickle of a trunk holds. Its own dropout, and that of LoRA's inputs, have the rate
    `dropout`; they are on exactly when a key is given. (The weights of attention are dropped out in GPT-2 alone.)
    """

    def __init__(
        self,
        language: Language,
        *,
        tune: str = "adapters",
        rank: int = 16,
        alpha: float = 32.0,
        dropout: float = 0.1,
        layers: Sequence[str] = (),
        biases: bool = True,
        talks: bool = False,
    ) -> None:
        """tune: "adapters", or "all" for every weight but those of words. rank, alpha: LoRA adds alpha / rank B A x to
        W x. layers: names of the linear layers that get it; none: attention's projections to queries, keys and values.
        biases: those of these layers learn too. talks: it can tell its loss on text.

        Raises UserError where there are no such layers.
        """
        super().__init__()
        self.language = language
        self.settings = {
            "tune": tune,
            "rank": rank,
            "alpha": alpha,
            "dropout": dropout,
            "layers": tuple(layers),
            "biases": biases,
            "talks": talks,
        }
        model = language.copied()
        base = model.base_model
        if not talks:
            base.set_input_embeddings(nn.Embedding(1, 1))  # unused, and large
        embeddings = [] if model.get_output_embeddings() is None or not talks else [model.get_output_embeddings()]
        embeddings.append(base.get_input_embeddings())
        frozen = {id(p) for m in embeddings for p in m.parameters()}
        if tune == "adapters":
            trainable = {id(p) for p in adapt(base, language, layers, rank, alpha, biases)}
        else:
            if not talks and hasattr(base, "wpe"):
                frozen |= {id(p) for p in base.wpe.parameters()}  # see `forward`
            trainable = {id(p) for p in base.parameters()} - frozen
        language.model.requires_grad_(False)  # peft treats shared parameters as its own
        replace_dropout(base, dropout)
        self.base = base
        self.head = model.get_output_embeddings() if talks else None
        self.__dict__["whole"] = model if talks else None  # not a module of this one: its parts are
        freeze(self, trainable)
        self.drops = [m for m in base.modules() if isinstance(m, Dropout)]
        self.placed = "position_ids" in inspect.signature(base.forward).parameters

    def forward(self, x: Tensor, mask: Tensor | None = None, key: Tensor | None = None) -> Tensor:
        """`mask` as by `visible`, [T, T] or [B, 1, T, T]; None: causal. A token's position: how many it sees before it.

        A GPT-2's embedding of positions (its `wpe`) is left out: embedded tokens hold their time step.
        """
        return self._run(self.base, {"inputs_embeds": x}, x.shape[0], mask, key)[0]

    def text_loss(self, text: Tensor, key: Tensor | None = None) -> Tensor:
        """Mean negative log-likelihood of each token int64 [B, T] after the first, given those before it; []."""
        logits = self._run(
            self.__dict__["whole"], {"input_ids": text}, text.shape[0], visible(None, text.shape[1], text.device), key
        )[0]
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), text[:, 1:].flatten())

    def _run(self, model: Any, inputs: dict[str, Tensor], batch: int, mask: Tensor | None, key: Tensor | None) -> Any:
        tensor = next(iter(inputs.values()))
        if mask is None:
            mask = visible(None, tensor.shape[1], tensor.device)
        mask = mask.expand(batch, 1, *mask.shape[-2:])
        # a row that sees nothing does not exist, so the smallest number does for minus infinity
        bias = torch.where(mask, 0.0, torch.finfo(torch.float32).min)
        inner = None if key is None else rng.fold_in(key, INNER)
        for layer in self.drops:
            layer.key = inner
        positions = {"position_ids": mask.sum(-1).squeeze(1) - 1} if self.placed else {}
        if positions and "inputs_embeds" in inputs and hasattr(self.base, "wpe"):
            # which the model is about to add
            inputs = {"inputs_embeds": tensor - self.base.wpe(positions["position_ids"])}
        try:
            return model(**inputs, **positions, attention_mask=bias, use_cache=False, return_dict=False)
        finally:
            for layer in self.drops:
                layer.key = None

    def frozen(self) -> dict[str, Tensor]:
        """The frozen parameters by name, for another process or machine; without those of words."""
        embedding_id = id(self.base.get_input_embeddings())
        names = {name for name, _ in self.language.base.named_parameters()}
        result = {}
        for prefix, module in self.base.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                path = f"{prefix}.{name}".replace(".base_layer", "")
                if id(module) != embedding_id and path in names:
                    result[path] = buffer
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (self.language, self.settings, self.state_dict())


def _rebuild(language: Language, settings: dict[str, Any], state: dict[str, Tensor]) -> Trunk:
    with torch.random.fork_rng(devices=[]):
        trunk = Trunk(language, **settings)
    trunk.load_state_dict(state, assign=True)
    return trunk


def probe(trunk: Trunk, left_padding: bool) -> None:
    """Raise UserError for a model that cannot be a trunk: one that takes no embedded tokens, looks ahead, or attends to
    padding.

    left_padding: windows are padded at the beginning.
    """
    name = trunk.language.place or trunk.language.config.model_type
    x = torch.linspace(-1.0, 1.0, 5 * trunk.language.width).reshape(1, 5, -1).sin()
    try:
        with torch.no_grad():
            y = trunk(x)
            prefix = trunk(x[:, :4])
            padded_output = (
                trunk(x, visible(torch.tensor([[False, True, True, True, True]]), 5)) if left_padding else None
            )
            unpadded_output = trunk(x[:, 1:]) if left_padding else None
    except Exception as error:  # a third-party model may fail in any way here
        problem = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        raise UserError(f"algo.lm={name}: a {trunk.language.config.model_type} cannot be a trunk ({problem})") from None
    if y.shape != x.shape:
        raise UserError(
            f"algo.lm={name}: it makes {tuple(y.shape)} of embedded tokens {tuple(x.shape)}, and the same shape is "
            "needed"
        )
    scale = 1e-4 * float(y.abs().max())
    if float((y[:, :4] - prefix).abs().max()) > scale:
        raise UserError(f"algo.lm={name}: what it makes of a token depends on later ones")
    if (
        padded_output is not None
        and unpadded_output is not None
        and float((padded_output[:, 1:] - unpadded_output).abs().max()) > scale
    ):
        raise UserError(
            f"algo.lm={name}: a {trunk.language.config.model_type} looks at padding; use algo.padding=right"
        )


def linear(model: Any) -> dict[str, Any]:
    """The linear layers that LoRA can stand beside, by name. (GPT-2's are Conv1D: the same with transposed weights.)"""
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D"}


def adapt(base: Any, language: Language, layers: Sequence[str], rank: int, alpha: float, biases: bool) -> list[Tensor]:
    """Put LoRA beside linear layers of `base`; returns the parameters that learn. Raises UserError."""
    modules = linear(base)
    leaves = {name: name.rpartition(".")[2] for name in modules}
    suffixes = tuple(layers) or next(((n,) for n in MERGED if n in leaves.values()), SPLIT)
    targets = [name for name, leaf in leaves.items() if leaf in suffixes]
    if unknown := [n for n in suffixes if n not in leaves.values()] if layers or not targets else []:
        names = ", ".join(sorted(set(leaves.values()))) or "none"
        location = language.place or language.config.model_type
        request = (
            f"algo.lora_layers={','.join(layers)}: {unknown[0]}"
            if layers
            else f"{', '.join((*MERGED, *SPLIT))} (algo.lora_layers)"
        )
        raise UserError(f"algo.lm={location}: it has no linear layers called {request}; those it has: {names}")
    peft = packages()[1]
    settings = peft.LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=targets,
        bias="lora_only" if biases else "none",
        fan_in_fan_out=any(type(modules[name]).__name__ == "Conv1D" for name in targets),
        lora_dropout=1e-9,  # not 0, for then there is no module to replace
    )
    with silent():
        peft.inject_adapter_in_model(settings, base)
    return [p for p in base.parameters() if p.requires_grad]


def replace_dropout(base: nn.Module, rate: float) -> None:
    """Put `Dropout` in place of torch's."""
    dropouts = [
        (m, name) for m in base.modules() for name, child in m.named_children() if isinstance(child, nn.Dropout)
    ]
    for part, (module, name) in enumerate(dropouts):
        module._modules[name] = Dropout(rate, part)


def freeze(module: nn.Module, trainable: set[int]) -> None:
    """Parameters that do not learn become buffers, in memory of the language model; those that do get memory of their
    own.
    """
    for m in module.modules():
        for name, p in list(m._parameters.items()):
            if p is not None and id(p) in trainable:
                m._parameters[name] = nn.Parameter(p.detach().clone())
            elif p is not None:
                del m._parameters[name]
                m.register_buffer(name, p.detach())
        m._non_persistent_buffers_set.update(m._buffers)
