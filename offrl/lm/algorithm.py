"""The base of algorithms whose policy is a language model that writes its actions.

The loop, the sampler and evaluation are those of all algorithms. Observations are texts, actions are texts; what a batch holds is said in
`offrl.lm.sampler`. Shapes in comments: B batch, L tokens, M tokens of actions, D width, V tokens that there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from offrl import rng
from offrl.actor import Actor, BoundParams
from offrl.algorithm import Algorithm, LossFn, Metrics, TrainState, Traits
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError, warn
from offrl.lm.actor import TextActor
from offrl.lm.models import decoding
from offrl.lm.models import pretrained as languages
from offrl.lm.models import tokenizer as tokenizing
from offrl.lm.models.causal_lm import LM, Size, pack, probe, unpack
from offrl.lm.models.pretrained import SCRATCH, Language
from offrl.lm.models.tokenizer import ENDS_TURN, Tokenizer
from offrl.lm.sampler import ACTION, COUNT, IDS, NEXT, SUCCESSOR, VALID, TextSampler
from offrl.optim import Adam, Params
from offrl.settings.field import setting

if TYPE_CHECKING:
    pass

TUNE = ("all", "adapters")
CHECKED = 1_000  # different actions that are tried with the tokenizer
ROOM = 1.5  # times the longest action in the data: how long an action may become


@dataclass
class TextSettings:
    """Settings of all language-model policies."""

    name: str = ""
    lm: str = setting(
        SCRATCH,
        "the language model: a folder with config.json and *.safetensors, a GGUF file, a name on the Hugging Face Hub, or scratch: a small "
        "GPT-2 of random weights, with the settings width, layers and heads",
        place=True,
    )
    lm_id: str = setting("", "which model that is", filled=True)
    tokenizer: str = setting("characters", "lm=scratch: tokens are characters, words or bytes", choices=tokenizing.KINDS)
    vocabulary: list[str] = setting([], "the characters or words that there are", filled=True)
    width: int = setting(64, "lm=scratch: width of the transformer", low=1)
    layers: int = setting(2, "lm=scratch: blocks", low=1)
    heads: int = setting(4, "lm=scratch: attention heads", low=1)
    tune: str = setting("all", "what learns in the language model: all of it, or LoRA adapters beside some linear layers", choices=TUNE)
    rank: int = setting(16, "of LoRA's matrices", low=1)
    lora_alpha: float = setting(32.0, "LoRA's output is scaled by lora_alpha / rank", low=0.0)
    lora_layers: list[str] = setting([], "linear layers that get LoRA, by name; none: attention's projections to queries, keys and values")
    ship_lm: str = setting(
        "small",
        "which frozen language models are written into policy files; one that is not there is needed where the policy acts "
        "(small: up to 64 MB)",
        choices=("small", "always", "never"),
        place=True,
    )
    history: int | None = setting(
        None, "how many texts, observations and actions in turn, an action is chosen from; null: all since the episode began", low=1
    )
    length: int = setting(512, "most tokens of a sequence; a longer history is cut at its beginning", low=8)
    append_end: bool | None = setting(
        None, "actions end with the tokenizer's end token; null: unless each of them ends with its only newline, which then ends them"
    )
    action_tokens: int | None = setting(
        None, "most tokens of an action that is written; null: half as many again as the longest in the data", low=1
    )
    decoding: str = setting(
        "sample", "how actions are chosen in evaluation: drawn, or always the likeliest token", choices=("sample", "greedy"), acting=True
    )
    sampling_temperature: float = setting(1.0, "logits are divided by it before a token is drawn", low=1e-6, acting=True)
    legal: str = setting(
        "ignore",
        "what is done with the list of legal actions that some environments give: nothing, or the action is chosen from it by how likely "
        "the policy is to write it",
        choices=("ignore", "rerank"),
        acting=True,
    )
    learning_rate: float = setting(1e-4, "Adam's learning rate", low=0.0)
    batch_size: int = setting(128, "sequences in a batch", low=1)
    accumulate: int = setting(1, "a batch's gradient is summed over so many parts, one after another, which takes less memory", low=1)
    checkpointing: bool = setting(False, "activations are computed again on the way back, which takes less memory and more time")
    weight_decay: float = setting(0.0, "AdamW's decay", low=0.0)
    clip_norm: float = setting(1.0, "largest norm of a gradient; 0: any", low=0.0)
    warmup_steps: int = setting(0, "updates until the learning rate is reached", low=0)


class TextAlgorithm(Algorithm):
    """A policy is the module "policy", a language model, unless an algorithm says otherwise."""

    traits = Traits(actions=("text",), vectorized=False, cuda_graph=False, acts_on_device=True, policy_modules=("policy",))
    returns_discount: ClassVar[str] = ""  # the setting by which the batch's column "return" is discounted
    cut_contexts: int = 0  # histories that were too long when acting, of this copy

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Mapping[str, Sequence[float]] | None = None) -> Any:
        """Find the language model and the tokenizer, how actions end and how long they may be. Raises UserError where they do not fit."""
        if not dataset.spec.text:
            raise UserError(f"{config.name} writes texts, and {dataset.spec.name} holds numbers; use iql, td3_bc or another algorithm")
        c = super().fit_config(config, dataset, grid)
        actions = [dataset.strings[i] for i in dataset.columns["actions"].unique().tolist()]
        if c.lm == SCRATCH:
            c = dataclasses.replace(c, vocabulary=c.vocabulary or tokenizing.vocabulary(c.tokenizer, dataset.strings, dataset.spec.name))
            if c.tune != "all":
                raise UserError("algo.tune=adapters needs a language model that was trained before: name one by algo.lm")
        else:
            c = dataclasses.replace(c, lm_id=languages.find(c.lm).identity)
            read_tokenizer(c)
        tokenizer = tokenizer_of(c)
        append = c.append_end
        if append is None:
            append = not all(text.find(ENDS_TURN) == len(text) - 1 >= 0 for text in actions)
        if append and tokenizer.end is None:
            raise UserError(
                f"algo.lm={c.lm}: its tokenizer has no end token, and the actions of {dataset.spec.name} do not all end with a newline: "
                "give it an EOS token, or end each action with a newline (algo.append_end=false)"
            )
        longest = max(len(ids) for ids in tokenizer.encode(actions)) + int(append)
        strange = tokenizer.unknown(actions[:CHECKED])
        if strange:
            warn(
                f"{dataset.spec.name}: encoded and decoded, {len(strange):,} of {min(len(actions), CHECKED):,} actions are not what they "
                f"were, such as {strange[0]!r}: the policy cannot write these"
            )
        most = c.action_tokens or max(1, min(int(ROOM * longest) + 1, c.length // 2))
        c = dataclasses.replace(c, append_end=append, action_tokens=most)
        with torch.random.fork_rng(devices=[]):
            lm = language_model(c)
            if c.lm != SCRATCH:
                probe(lm, tokenizer.size, f"algo.lm={c.lm}")
        if lm.positions is not None and c.length + most + 1 > lm.positions:
            fits = lm.positions - most - 1
            if fits < 8:
                raise UserError(f"algo.lm={c.lm} looks back {lm.positions} tokens, too few for actions of {most}")
            c = dataclasses.replace(c, length=fits)
        return c

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer."""
        return tokenizer_of(self.config)

    def modules(self) -> dict[str, nn.Module]:
        policy = language_model(self.config)
        self.runtime.notes = [self.described(policy)]
        return {"policy": policy}

    def described(self, lm: LM) -> str:
        """A line for the log: which language model writes how."""
        c = self.config
        learns = sum(p.numel() for p in lm.parameters())
        frozen = sum(b.numel() for b in lm.buffers()) if c.tune == "adapters" else 0
        what = f"a GPT-2 from scratch on {c.tokenizer}" if c.lm == SCRATCH else f"{c.lm} ({lm.base.config.model_type})"
        beside = f" beside {frozen:,} frozen ones" if frozen else ""
        seen = "all texts so far" if c.history is None else f"the last {c.history} text{'s' if c.history > 1 else ''}"
        ends = "an end token" if c.append_end else "a newline"
        return (
            f"language model: {what}, {learns:,} parameters learn{beside}, {self.tokenizer.size:,} tokens; it reads {seen} "
            f"and writes at most {c.action_tokens} tokens up to {ends}"
        )

    def sampler(self) -> Sampler:
        c = self.config
        discount = float(getattr(c, self.returns_discount)) if self.returns_discount else 1.0
        return TextSampler(self.tokenizer, bool(c.append_end), c.history, c.length, discount)

    def optimizer(self, name: str) -> Adam:
        c = self.config
        return Adam(c.learning_rate, weight_decay=c.weight_decay, clip_norm=c.clip_norm, warmup_steps=c.warmup_steps)

    def apply(self, name: str, params: Params, *x: Any) -> Any:
        """The method x[0] of module `name`, with the given parameters."""
        if not isinstance(params, BoundParams):
            self.placed(name, params)
        return super().apply(name, params, *x)

    def placed(self, name: str, params: Params) -> nn.Module:
        """Module `name`, its frozen tensors moved once to where its parameters are."""
        module, device = self.networks[name], next(iter(params.values())).device
        buffer = next(module.buffers(), None)
        if buffer is not None and buffer.device != device:
            module.to(device)
        return module

    def descend(self, state: TrainState, name: str, loss_fn: LossFn, *x: Any) -> tuple[TrainState, Metrics]:
        """One optimiser step on module `name`. The first of x is a batch, which is taken in `accumulate` parts: losses and metrics are sums
        over what a part holds, divided by what the whole batch holds (`share`), so they add up."""
        batch, rest = x[0], x[1:]
        leaves = {k: v.detach().requires_grad_() for k, v in state.params[name].items()}
        module = _Inside(self.placed(name, leaves))
        grads: list[Tensor] | None = None
        metrics: Metrics = {}
        for part in parts_of(batch, self.config.accumulate):
            # the gradient is taken while the parameters are in place, for checkpointed activations are computed again on the way back
            found, more = functional_call(module, {f"module.{k}": v for k, v in leaves.items()}, (leaves, loss_fn, state, (part, *rest)))
            grads = found if grads is None else [a + b for a, b in zip(grads, found, strict=True)]
            metrics = {k: metrics[k] + v if k in metrics else v for k, v in more.items()}
        named = dict(zip(leaves, cast(list[Tensor], grads), strict=True))
        if self.runtime.reduce_gradients is not None:
            named = self.runtime.reduce_gradients(named)
        params, opt = self.optimizer(name).update(state.params[name], named, state.opt[name])
        return state._replace(params={**state.params, name: params}, opt={**state.opt, name: opt}), metrics

    def cross_entropy(self, name: str, params: Params, hidden: Tensor, batch: Batch, which: str = ACTION) -> Tensor:
        """-log pi of the tokens of the column `which`, given states [B, L, D]: their sum over the number of the batch's action tokens."""
        before, tokens = chosen(hidden, batch, which)
        each = nn.functional.cross_entropy(self.apply(name, params, "logits", before), tokens, reduction="none")
        return (each * batch[SHARE][0]).sum()

    # ---- acting

    def actor(self, state: TrainState) -> Actor:
        return TextActor(self, state)

    def reply(
        self, state: TrainState, histories: Sequence[Sequence[str]], legal: Sequence[Any], rows: Sequence[int], key: Tensor, explore: bool
    ) -> list[str]:
        """An action for each history; `rows` number them, so that what is drawn does not depend on who else is there."""
        c, tokenizer = self.config, self.tokenizer
        sampled = explore or c.decoding == "sample"
        device = next(iter(state.params[self.traits.policy_modules[0]].values())).device
        prompts = [self.prompt(texts) for texts in histories]
        choosing = c.legal == "rerank"
        listed = [i for i, actions in enumerate(legal) if choosing and actions]
        free = [i for i, actions in enumerate(legal) if not (choosing and actions)]
        said = [""] * len(prompts)
        if listed:
            noise = noise_of(key, [rows[i] for i in listed], device)(0) if sampled else None
            picked = self.rerank(state, [prompts[i] for i in listed], [list(legal[i]) for i in listed], noise)
            for i, action in zip(listed, picked, strict=True):
                said[i] = action
        if free:
            drawn = noise_of(key, [rows[i] for i in free], device) if sampled else None
            for i, ids in zip(free, self.continued(state, [prompts[i] for i in free], drawn), strict=True):
                said[i] = tokenizer.decode(ids)
        return said

    def continued(self, state: TrainState, prompts: Sequence[np.ndarray], noise: Callable[[int], Tensor] | None) -> list[list[int]]:
        """The tokens of an action for each prompt; see `decoding.write`."""
        c, tokenizer = self.config, self.tokenizer
        device = next(iter(state.params[self.traits.policy_modules[0]].values())).device
        stops = (
            torch.from_numpy(tokenizer.stops.copy()).to(device)
            if not c.append_end
            else torch.zeros(tokenizer.size, dtype=torch.bool, device=device)
        )
        if tokenizer.end is not None:
            stops[tokenizer.end] = True
        return decoding.write(
            self.reader(state), prompts, pad=tokenizer.pad, stops=self.widened(stops), allowed=self.allowed(device),
            most=int(c.action_tokens or 1), noise=noise, temperature=c.sampling_temperature,
        )  # fmt: skip

    def prompt(self, texts: Sequence[str]) -> np.ndarray:
        """The tokens int32 [T] that an action is chosen from; the beginning is cut off where they are too many."""
        c, tokenizer = self.config, self.tokenizer
        seen = texts[-c.history :] if c.history else texts
        if len(seen) > c.length:  # each text has a token or more, nearly always
            seen = seen[-c.length :]
        encoded = tokenizer.encode(seen)
        if c.append_end:
            encoded = [
                np.append(ids, np.int32(cast(int, tokenizer.end))) if (len(seen) - i) % 2 == 0 else ids for i, ids in enumerate(encoded)
            ]
        ids = np.concatenate([np.zeros(0, np.int32), *encoded])
        room = c.length - 1
        if len(ids) > room:
            if not self.cut_contexts:
                warn(f"a history of {len(ids):,} tokens is cut at its beginning to algo.length={c.length} (further ones are, too)")
            self.cut_contexts += 1
            ids = ids[-room:]
        return np.append(np.int32(tokenizer.start), ids)

    def reader(self, state: TrainState) -> decoding.Read:
        """What reads tokens and says how likely each next one is; it keeps caches of its own."""
        params = state.params["policy"]
        cache = LM.fresh_cache()

        def read(ids: Tensor, valid: Tensor) -> Tensor:
            return self.apply("policy", params, "logits", self.apply("policy", params, "hidden", ids, valid, cache)[:, -1])

        return read

    def scores(self, state: TrainState, ids: Tensor) -> Tensor:
        """The logits [B, T, V] by which tokens are drawn, at every position of tokens [B, T], without a cache."""
        params = state.params["policy"]
        return self.apply("policy", params, "logits", self.apply("policy", params, "hidden", ids))

    def rerank(self, state: TrainState, prompts: Sequence[np.ndarray], legal: Sequence[Sequence[str]], noise: Tensor | None) -> list[str]:
        """One of the legal actions for each prompt, drawn in proportion to how likely the policy is to write it, or the likeliest."""
        tokenizer, c = self.tokenizer, self.config
        picked = []
        for row, (prompt, actions) in enumerate(zip(prompts, legal, strict=True)):
            encoded = tokenizer.encode(actions)
            if c.append_end:
                encoded = [np.append(ids, np.int32(cast(int, tokenizer.end))) for ids in encoded]
            device = next(iter(state.params[self.traits.policy_modules[0]].values())).device
            ids, lengths = decoding.right_padded([np.append(prompt, own) for own in encoded], tokenizer.pad, device)
            likely = self.scores(state, ids[:, :-1])[..., : tokenizer.size].log_softmax(-1)
            each = likely.gather(-1, ids[:, 1:].unsqueeze(-1)).squeeze(-1)
            at = torch.arange(each.shape[1], device=device)
            mine = (at >= len(prompt) - 1) & (at < lengths.unsqueeze(-1) - 1)
            total = (each * mine).sum(-1).unsqueeze(0)
            picked.append(actions[int(decoding.choose(total, None if noise is None else noise[row : row + 1], c.sampling_temperature))])
        return picked

    def allowed(self, device: torch.device) -> Tensor:
        """[V] bool: tokens that may be written: not those that stand for nothing."""
        tokenizer = self.tokenizer
        fine = torch.zeros(self.lm().vocabulary, dtype=torch.bool, device=device)
        fine[: tokenizer.size] = True
        if self.config.lm == SCRATCH:
            fine[: len(tokenizing.OWN)] = False
        if tokenizer.end is not None:
            fine[tokenizer.end] = True
        return fine

    def widened(self, flags: Tensor) -> Tensor:
        """Flags of the tokenizer's tokens as flags [V] of the model's, which may have more."""
        more = self.lm().vocabulary - len(flags)
        return torch.cat([flags, flags.new_zeros(more)]) if more > 0 else flags

    def lm(self) -> LM:
        """The language model in the policy."""
        module = self.networks[self.traits.policy_modules[0]]
        return module if isinstance(module, LM) else cast(LM, module.lm)

    # ---- policy files

    def assets(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.config.lm == SCRATCH:
            return {}, {}
        return pack(self.lm(), self.tokenizer, self.config.ship_lm)

    @classmethod
    def load_assets(cls, tensors: dict[str, Tensor], about: dict[str, Any]) -> Mapping[str, Any]:
        _tokenizers[about["identity"]] = unpack(tensors, about)
        return {}


def noise_of(key: Tensor, rows: Sequence[int], device: torch.device) -> Callable[[int], Tensor]:
    """Numbers [B] in [0, 1) for the t-th token of rows with these numbers, each the same whoever else is there."""
    number = torch.tensor(rows, device=key.device)
    return lambda t: (rng.randint_at(rng.fold_in(key, t), number, 1 << 53).double() * 2.0**-53).to(device)


class _Inside(nn.Module):
    """A loss and its gradient, taken while the parameters of `module` are replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, leaves: Params, loss_fn: LossFn, state: TrainState, x: tuple[Any, ...]) -> tuple[list[Tensor], Metrics]:
        with torch.enable_grad():
            loss, metrics = loss_fn(leaves, state, *x)
            grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True)
        return list(grads), {k: v.detach() for k, v in metrics.items()}


def parts_of(batch: Batch, count: int) -> list[Batch]:
    """A batch in `count` parts, or as many as it has rows."""
    many = len(next(iter(batch.values())))
    bounds = np.linspace(0, many, min(count, many) + 1).round().astype(int)
    return [{k: v[a:b] for k, v in batch.items()} for a, b in zip(bounds[:-1], bounds[1:], strict=True)]


SHARE = "share"


def trimmed(batch: Batch) -> Batch:
    """A batch without the columns that are padding in all rows, and with `share`: 1 over its number of action tokens, [B].

    Where processes share a batch it is that of the whole batch, as often as there are processes, whose gradients are averaged.
    """
    long = int(batch[VALID].sum(-1).max())
    new = {k: (v[:, :long] if v.ndim > 1 and not k.startswith(NEXT) else v) for k, v in batch.items()}
    if SUCCESSOR in batch:
        new[SUCCESSOR] = new[SUCCESSOR].clamp(max=long - 1)
    if NEXT + VALID in batch:
        long = int(batch[NEXT + VALID].sum(-1).max())
        new |= {k: v[:, :long] for k, v in new.items() if k.startswith(NEXT) and v.ndim > 1}
    rows = len(new[IDS])
    count = new.pop(COUNT)[0] * rows if COUNT in new else new[ACTION].sum()
    return {**new, SHARE: (1.0 / count.clamp(min=1)).expand(rows)}


def chosen(hidden: Tensor, batch: Batch, which: str = ACTION) -> tuple[Tensor, Tensor]:
    """(states [M, D] before the action tokens of a batch, or those of the column `which`; these tokens int64 [M])."""
    mask = batch[which][:, 1:]
    return hidden[:, :-1][mask], batch[IDS][:, 1:][mask]


# ---- models and tokenizers, of which a process has one each

_tokenizers: dict[str, Tokenizer] = {}


def tokenizer_of(config: Any) -> Tokenizer:
    """The tokenizer that the settings name. Raises UserError."""
    c = config
    if c.lm == SCRATCH:
        key = f"{c.tokenizer} {c.vocabulary}"
        if key not in _tokenizers:
            _tokenizers[key] = tokenizing.make(c.tokenizer, c.vocabulary)
        return _tokenizers[key]
    key = f"{c.lm_id} {c.lm}"
    if key not in _tokenizers and c.lm_id in _tokenizers:  # it came with a policy file
        return _tokenizers[c.lm_id]
    if key not in _tokenizers:
        read_tokenizer(c)
    return _tokenizers[key]


def read_tokenizer(config: Any) -> None:
    """Read the tokenizer that lies beside the language model: two models of the same weights may have different ones. Raises UserError."""
    c = config
    folder, more = languages.tokenizer_place(language_of(c).place)
    _tokenizers[f"{c.lm_id} {c.lm}"] = tokenizing.of_model(folder, f"algo.lm={c.lm}", **more)


def language_of(config: Any) -> Language:
    """The language model that a run or a policy file noted; where none did, the one that the settings name. Raises UserError."""
    if config.lm_id:
        return languages.known(config.lm_id) or languages.open_again(config.lm, config.lm_id)
    return languages.find(config.lm)


def language_model(config: Any, tune: str | None = None) -> LM:
    """The module that the settings ask for."""
    c = config
    if c.lm == SCRATCH:
        tokens = tokenizer_of(c).size
        size = Size(c.width, c.layers, c.heads, c.length + (c.action_tokens or 0) + 1, tokens)
        return LM(None, size, tune=tune or c.tune, checkpointing=c.checkpointing)
    return LM(
        language_of(c), tune=tune or c.tune, rank=c.rank, alpha=c.lora_alpha, layers=tuple(c.lora_layers), checkpointing=c.checkpointing
    )
