"""ArCHer, offline and online, beside its authors' code.

Texts are written as token numbers, and both sides read and write with the same small GPT-2, ours, in the place of
trained ones."""

from __future__ import annotations

import io
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from offrl.algorithms.archer_online import TARGET_Q
from offrl.lm.utterances import trim, with_actions
from parity.common import UPDATES, Outcome, case, imported
from parity.language import ROWS, WIDTH, Text, our_models, turns
from parity.weights import Pair, compared, give, linear, packages, stubs

OFFLINE, OFFLINE_COMMIT = "andreazanette/OfflineArcher", "56d3b72665671be853bcbc961e7cd14459a3a1d1"
ONLINE, ONLINE_COMMIT = "YifeiZhou02/ArCHer", "7c771a7610cb34e54ba53d69d1fb7337103e5648"


def critic_pairs(critic: Any) -> list[Pair]:
    """A double critic of ArCHer's."""
    pairs: list[Pair] = [(f"lm.{name}", lambda x: x, tensor) for name, tensor in critic.base_lm.lm.named_parameters()]
    for name, head in zip(
        ("q1", "q2", "v1", "v2"), (critic.critic1, critic.critic2, critic.v_critic1, critic.v_critic2), strict=True
    ):
        for at, layer in zip(("layers.0", "layers.1", "head"), head[::2], strict=True):
            pairs += linear(f"heads.{name}.{at}", layer)
    return pairs


def lightning() -> dict[str, ModuleType]:
    """`lightning` as far as OfflineArcher's training step needs it, for `stubs`."""
    members = {
        "device": torch.device("cpu"), "save_hyperparameters": lambda *_, **__: None, "log_dict": lambda *_, **__: None,
        "manual_backward": lambda self, loss: loss.backward(), "optimizers": lambda self: self.pair,
    }  # fmt: skip
    made = {name: ModuleType(name) for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks")}
    made["lightning"].LightningModule = type("LightningModule", (nn.Module,), members)  # type: ignore[attr-defined]
    made["lightning.pytorch.callbacks"].Callback = object  # type: ignore[attr-defined]
    simulation = ModuleType("SimulateOnEnv")
    simulation.batch_simulate_on_environment = None  # type: ignore[attr-defined]
    return {**made, "SimulateOnEnv": simulation}


def shrunk(kind: Any) -> Any:
    """A patch: double critics of this class are for states of our width in place of 768."""
    original = kind.__init__

    def build(self: Any, *arguments: Any, in_dim: int, out_dim: int, **more: Any) -> None:
        original(self, *arguments, in_dim=WIDTH, out_dim=out_dim, **more)

    return mock.patch.object(kind, "__init__", build)


@case(
    "archer",
    OFFLINE,
    OFFLINE_COMMIT,
    aligned="the same small GPT-2 on both sides, whose last token stands for a text; no cap of the weights, no clipping",  # noqa: E501
    remains="their critic is RoBERTa at its first token; our cap of 100 and clipping at 1; 32 turns in 4 parts are "
    "their batch",
    needs=("transformers", "peft"),
)
def archer(checkout: Path) -> Outcome:
    text, outcome = (
        Text("archer", ("policy", "critic"), max_weight=1e12, actor_learning_rate=1e-4, critic_learning_rate=1e-5),
        Outcome(),
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        stack.enter_context(our_models(text))
        stack.enter_context(stubs(lightning()))
        critics = stack.enter_context(imported(checkout, "ArcherCritic"))
        algorithms = stack.enter_context(imported(checkout, "Algorithms"))
        stack.enter_context(shrunk(critics.ArcherDoubleCritic))
        stack.enter_context(stubs({"ArcherCritic": critics}))
        settings = {"tau": 0.05, "accumulate_grad_batches": 1, "discount_factor": 0.99, "critic_expectile": 0.9}
        with redirect_stdout(io.StringIO()):
            model = algorithms.OfflineArcher(
                inv_temp=1.0, actor_lr=1e-4, critic_lr=1e-5, optimize_critic=True, **settings
            )
        pairs, params = critic_pairs(model.critic.critic), text.ours.state.params
        give(pairs, params["critic"])
        model.critic.soft_update_target_critic(1)
        model.pair = model.configure_optimizers()
        logged: dict[str, Any] = {}
        model.log_dict = lambda values, **_: logged.update(values)
        for number in range(UPDATES):
            batch = text.batch(number)
            losses = text.ours.update(batch)
            model.training_step(turns(batch), number)
            theirs = {
                "actor/loss": logged["actor/loss"],
                "critic/q_loss": logged["critic/q1.loss"] + logged["critic/q2.loss"],
                "critic/v_loss": logged["critic/v1.loss"] + logged["critic/v2.loss"],
            }
            outcome.losses.append({name: (losses[name], float(value)) for name, value in theirs.items()})
    state = text.ours.state
    outcome.parameters |= compared(pairs, state.params["critic"])
    targets = compared(critic_pairs(model.critic.target_critic), state.target["critic"])
    outcome.parameters |= {f"target/{name}": pair for name, pair in targets.items()}
    policy = [(name, lambda x: x, tensor) for name, tensor in model.actor.model.lm.named_parameters()]
    outcome.parameters |= {f"policy/{name}": pair for name, pair in compared(policy, state.params["policy"]).items()}
    return outcome


@case(
    "archer_online", ONLINE, ONLINE_COMMIT,
    aligned="as for archer; the same answers of the actor; observations of equal length; no clipping",
    remains="their critic is RoBERTa's pooled output; positions of an action count the padding before it; clipping the "
            "actor counts the critic's last gradient too; `token_baseline` divides by action tokens, theirs by padded "
            "positions",
    needs=("transformers", "peft"),
)  # fmt: skip
def archer_online(checkout: Path) -> Outcome:
    rates = {"actor_learning_rate": 1e-5, "critic_learning_rate": 2e-5}
    text, outcome = Text("archer_online", ("policy", "critic"), start="language_model", history=1, **rates), Outcome()
    algorithm, g = text.algorithm, np.random.default_rng(7)
    nothing = SimpleNamespace(
        prepare=lambda *x: x if len(x) > 1 else x[0],
        backward=lambda loss: loss.backward(),
        clip_grad_norm_=lambda *_: None,
        unwrap_model=lambda model: model,
    )
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Tensor, "float", Tensor.double))
        stack.enter_context(our_models(text))
        stack.enter_context(
            stubs(packages(checkout, "archer", "archer.models", "archer.algorithms", "archer.algorithms.archer"))
        )
        stack.enter_context(shrunk(stack.enter_context(imported(checkout, "archer.models.critic")).DoubleCritic))
        agents = stack.enter_context(imported(checkout, "archer.models.archer_agent"))
        training = stack.enter_context(imported(checkout, "archer.algorithms.archer.trainer"))
        agent = agents.ArcherAgent("cpu", nothing)
        pairs = critic_pairs(agent.critic)
        give(pairs, text.ours.state.params["critic"])
        agent.soft_update_target_critic(1)
        trainer = training.ArcherTrainer(
            agent,
            nothing,
            agent.tokenizer,
            critic_lr=2e-5,
            lm_lr=1e-5,
            grad_accum_steps=1,
            gamma=0.95,
            tau=0.1,
            epochs=1,
            actor_epochs=1,
        )
        for number in range(UPDATES):
            both = [
                trim({name: torch.as_tensor(x) for name, x in text.batch(2 * number + i).items()}) for i in range(2)
            ]
            answers = [[g.integers(3, 9, int(n)).tolist() for n in g.integers(1, 4, ROWS)] for _ in both]
            new = [with_actions(batch, answer) for batch, answer in zip(both, answers, strict=True)]
            state = text.ours.state
            turn = {**both[0], TARGET_Q: algorithm.critic.target_q(state.target["critic"], new[0]).transpose(0, 1)}
            state, losses = algorithm.descend(state, "critic", algorithm.critic_loss, turn)
            state = algorithm.polyak(state, "critic", 0.1)
            text.ours.state, actor_losses = algorithm.descend(state, "policy", algorithm.actor_loss, new[1])

            rows = [turns({name: x.numpy() for name, x in batch.items()}) for batch in both]
            queue = iter(
                [
                    {name: [column[i]] for name, column in row.items()} | {"mc_return": [0.0]}
                    for row in rows
                    for i in range(ROWS)
                ]
            )
            spoken = iter([["".join(f"{token} " for token in answer) for answer in part] for part in answers])
            agent.get_action = lambda _, spoken=spoken: next(spoken)
            with redirect_stdout(io.StringIO()):
                info = trainer.update(SimpleNamespace(sample=lambda _, queue=queue: next(queue), batch_size=ROWS))
            theirs = {
                "critic/q_loss": info["q1.loss"] + info["q2.loss"],
                "critic/v_loss": info["v1.loss"] + info["v2.loss"],
            }
            ours = {**losses, **actor_losses}
            expected = {**theirs, "actor/loss": info["pg.loss"]}
            outcome.losses.append({name: (float(ours[name]), float(value)) for name, value in expected.items()})
    outcome.parameters |= compared(pairs, text.ours.state.params["critic"])
    policy = [(name, lambda x: x, tensor) for name, tensor in agent.model.lm.named_parameters()]
    outcome.parameters |= {
        f"policy/{name}": pair for name, pair in compared(policy, text.ours.state.params["policy"]).items()
    }
    return outcome
