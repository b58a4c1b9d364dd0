"""The base of algorithms whose policy is a language model that writes its actions.

The loop, the sampler and evaluation are those of all algorithms. Observations are texts, actions are texts; the columns
of a batch are those of `offrl.lm.sampler`. Shapes in comments: B batch, T tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from offrl.actor import Actor
from offrl.algorithm import Algorithm, Grid, LossFn, Metrics, TrainState, Traits
from offrl.data.dataset import Dataset
from offrl.data.samplers.transitions import Batch, Sampler
from offrl.errors import UserError, warn
from offrl.lm import reference_policy
from offrl.lm.actor import TextActor
from offrl.lm.models import configured
from offrl.lm.models.causal_lm import LM, call, placed
from offrl.lm.models.pretrained import SCRATCH
from offrl.lm.models.tokenizer import Tokenizer
from offrl.lm.sampler import IDS, TextSampler, token_log_probs
from offrl.lm.settings import TextSettings
from offrl.optim import Adam, Params
from offrl.pretrained import Requirement

if TYPE_CHECKING:
    from offrl.settings.train import TrainConfig

ConfigT = TypeVar("ConfigT", bound=TextSettings)


class TextAlgorithm(Algorithm[ConfigT]):
    """A policy is the module "policy", a language model, unless an algorithm says otherwise; where its settings want a
    reference policy, its language models begin with that one's weights."""

    traits = Traits(
        actions=("text",), vectorized=False, cuda_graph=False, acts_on_device=True, policy_modules=("policy",)
    )
    cut_contexts: int = 0  # histories that were too long when acting, of this copy

    @classmethod
    def requires(cls, config: TrainConfig, dataset: Dataset) -> dict[str, Requirement]:
        """The reference policy, where the settings need one."""
        return reference_policy.requirement(config)

    @classmethod
    def adopt(cls, config: TrainConfig, dataset: Dataset, pretrained: Mapping[str, Any]) -> TrainConfig:
        return reference_policy.with_reference_model(config, pretrained)

    @classmethod
    def fit_config(cls, config: Any, dataset: Dataset, grid: Grid = None) -> Any:
        """Find the language model and the tokenizer, how actions end and how long they may be. Raises UserError where
        they do not fit.
        """
        if not dataset.spec.text:
            raise UserError(
                f"{config.name} writes texts, and {dataset.spec.name} holds numbers; use iql, td3_bc or another "
                "algorithm"
            )
        return configured.fitted(reference_policy.with_reference_settings(config), dataset)

    @property
    def tokenizer(self) -> Tokenizer:
        """The policy's tokenizer."""
        return configured.tokenizer_of(self.config)

    def sampler(self) -> Sampler:
        c = self.config
        return TextSampler(self.tokenizer, bool(c.append_end), c.history, c.length)

    def optimizer(self, name: str) -> Adam:
        c = self.config
        rate = getattr(c, "actor_learning_rate" if name == "policy" else "critic_learning_rate", c.learning_rate)
        return Adam(rate, weight_decay=c.weight_decay, clip_norm=c.clip_norm, warmup_steps=c.warmup_steps)

    def init(self, seed: int) -> TrainState:
        # on a copy, so that parts keep the modules of `networks`, whose parameters `descend` puts in place
        state = super(TextAlgorithm, copy.copy(self)).init(seed)
        reference = self.pretrained.get("policy")
        if reference is None:
            return state
        new_starts = self.config.begins_anew
        params = {
            n: p if n in new_starts else reference_policy.with_reference_weights(p, reference)
            for n, p in state.params.items()
        }
        return state._replace(
            params=params, target={n: {k: v.clone() for k, v in params[n].items()} for n in self.traits.targets}
        )

    def apply(self, name: str, params: Params, *x: Any) -> Any:
        """The method x[0] of module `name`, with the given parameters."""
        return call(self.networks[name], params, *x)

    def descend(self, state: TrainState, name: Any, loss_fn: LossFn, *x: Any, **joint: Any) -> Any:
        """One optimiser step on module `name`. The first of x is a batch, which is taken in `accumulate` parts: losses
        and metrics are sums over what a part holds, divided by what the whole batch holds (`share`), so they add up."""
        batch, arguments = x[0], x[1:]
        leaves = {k: v.detach().requires_grad_() for k, v in state.params[name].items()}
        module = _LossGradient(placed(self.networks[name], leaves))
        grads: list[Tensor] | None = None
        metrics: Metrics = {}
        for part in split_batch(batch, self.config.accumulate):
            # the gradient is taken while the parameters are in place, for checkpointed activations are computed again
            # on the way back
            part_grads, values = functional_call(
                module, {f"module.{k}": v for k, v in leaves.items()}, (leaves, loss_fn, state, (part, *arguments))
            )
            grads = part_grads if grads is None else [a + b for a, b in zip(grads, part_grads, strict=True)]
            metrics = {k: metrics[k] + v if k in metrics else v for k, v in values.items()}
        gradients = dict(zip(leaves, cast(list[Tensor], grads), strict=True))
        if self.runtime.reduce_gradients is not None:
            gradients = self.runtime.reduce_gradients(gradients)
        params, opt = self.optimizer(name).update(state.params[name], gradients, state.opt[name])
        return state._replace(params={**state.params, name: params}, opt={**state.opt, name: opt}), metrics

    def log_probs(self, policy: Params, batch: Batch) -> Tensor:
        """[B, L - 1]: log pi of each action token where it is predicted, 0 elsewhere. The sum over a row is that of its
        action.
        """
        hidden = self.apply("policy", policy, "hidden", batch[IDS])
        return token_log_probs(partial(self.apply, "policy", policy, "logits"), hidden, batch)

    # ---- acting

    def actor(self, state: TrainState) -> Actor:
        return TextActor(self, state)

    def prompt(self, texts: Sequence[str]) -> np.ndarray:
        """The tokens int32 [T] that an action is chosen from; the beginning is cut off where they are too many."""
        c, tokenizer = self.config, self.tokenizer
        recent = texts[-c.history :] if c.history else texts
        if len(recent) > c.length:  # each text has a token or more, nearly always
            recent = recent[-c.length :]
        tokens = tokenizer.encode(recent)
        if c.append_end:
            tokens = [
                np.append(ids, np.int32(cast(int, tokenizer.end))) if (len(recent) - i) % 2 == 0 else ids
                for i, ids in enumerate(tokens)
            ]
        ids = np.concatenate([np.zeros(0, np.int32), *tokens])
        limit = c.length - 1
        if len(ids) > limit:
            if not self.cut_contexts:
                warn(
                    f"a history of {len(ids):,} tokens is cut at its beginning to algo.length={c.length} (further ones "
                    "are, too)"
                )
            self.cut_contexts += 1
            ids = ids[-limit:]
        return np.append(np.int32(tokenizer.start), ids)

    def lm(self) -> LM:
        """The language model in the policy."""
        module = self.networks[self.traits.policy_modules[0]]
        return module if isinstance(module, LM) else cast(LM, module.lm)

    # ---- policy files

    def assets(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        if self.config.lm == SCRATCH:
            return {}, {}
        return configured.pack(self.lm(), self.tokenizer, self.config.ship_lm)

    @classmethod
    def load_assets(cls, tensors: dict[str, Tensor], description: dict[str, Any]) -> Mapping[str, Any]:
        configured.known_tokenizer(description["identity"], configured.unpack(tensors, description))
        return {}


class _LossGradient(nn.Module):
    """A loss and its gradient, taken while the parameters of `module` are replaced."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(
        self, leaves: Params, loss_fn: LossFn, state: TrainState, x: tuple[Any, ...]
    ) -> tuple[list[Tensor], Metrics]:
        with torch.enable_grad():
            loss, metrics = loss_fn(leaves, state, *x)
            grads = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True, allow_unused=True)
        return list(grads), {k: v.detach() for k, v in metrics.items()}


def split_batch(batch: Batch, count: int) -> list[Batch]:
    """A batch in `count` parts, or as many as it has rows."""
    rows = len(next(iter(batch.values())))
    bounds = np.linspace(0, rows, min(count, rows) + 1).round().astype(int)
    return [{k: v[a:b] for k, v in batch.items()} for a, b in pairwise(bounds)]
