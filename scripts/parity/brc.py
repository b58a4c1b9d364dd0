"""BRC in JAX, for one task and for two: networks, steps and the scaling of rewards by the returns of episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor

from offrl.data.dataset import DataSpec
from offrl.data.value_range import LARGEST_RETURN, largest_return
from offrl.tasks.task import Task, TaskPart
from parity.common import ACTION, BATCH, OBSERVATION, Ours, Outcome, batches, case, imported, shared_noise
from parity.flax_nets import NEEDS, compared, jax_float64, replaced

# no weight has as many numbers as a batch of actions, for flax draws initial weights anew at each call
WIDTHS, BLOCKS = {"actor": 8, "critic": 10}, {"actor": 1, "critic": 2}
HEADS = {"mean": "Dense_0", "log_std": "Dense_1"}
CRITIC = "q_value_ensemble/q_value_ensemble/critic"
NEEDED = (*NEEDS, "distrax")


def weights(params: dict[str, Tensor], name: str) -> dict[str, np.ndarray]:
    """Our parameters of a module by flax's paths."""
    prefix, result = CRITIC if name == "critic" else "BroNet_0", {}
    embeddings = params.get("tasks.weight")
    if name == "critic" and embeddings is not None:
        params = {k.removeprefix("network."): v for k, v in params.items()}
        result["task_embedding/embeddings/embedding"] = embeddings.numpy()
        first, o = params["features.first.linear.weight"], OBSERVATION
        # a row begins with [s, e, a] here, with [s, a, e] there
        order = [*range(o), *range(o + embeddings.shape[1], first.shape[1]), *range(o, o + embeddings.shape[1])]
        params["features.first.linear.weight"] = first[:, order]

    def add(ours: str, dense: str, norm: str = "") -> None:
        kernel = params[f"{ours}.weight"].numpy()
        result[f"{dense}/kernel"] = kernel if name == "critic" else kernel.T
        result[f"{dense}/bias"] = params[f"{ours}.bias"].numpy()
        if norm:
            layer = ours.removesuffix(".linear")
            result[f"{norm}/scale"], result[f"{norm}/bias"] = (
                params[f"{layer}.{k}"].numpy() for k in ("scale", "shift")
            )

    add("features.first.linear", f"{prefix}/Dense_0", f"{prefix}/LayerNorm_0")
    for i in range(BLOCKS[name]):
        block = f"{prefix}/BronetBlock_{i}"
        for j in range(2):
            add(f"features.blocks.{i}.{j}.linear", f"{block}/Dense_{j}", f"{block}/LayerNorm_{j}")
    for ours, dense in {"head": f"{prefix}/Dense_1"}.items() if name == "critic" else HEADS.items():
        add(ours, dense)
    return result


def of_tasks(tasks: int) -> DataSpec:
    """Of several tasks, whose number an observation ends with."""
    part = TaskPart(Task("one"), OBSERVATION, (-1.0,) * ACTION, (1.0,) * ACTION)
    task = Task("all", starts=tuple({"task": k} for k in range(tasks)), parts=(part,) * tasks)
    limits = {"action_low": (-1.0,) * ACTION, "action_high": (1.0,) * ACTION}
    return DataSpec((OBSERVATION + 1,), ACTION, task=task, **limits)


@case(
    "brc",
    "naumix/BiggerRegularizedCategorical",
    "eec512f4e060da63f8a114b91898c554a60ed66b",
    aligned="the smallest and largest return are held in float64 there",
    remains="the weight of the entropy by which rewards are scaled is that of the update here, of the environment step "
    "there; an episode that ends and is cut off at once has ended here, and goes on there",
    needs=NEEDED,
)
def brc(checkout: Path) -> Outcome:
    return beside(checkout, 1)


@case(
    "brc, two tasks",
    "naumix/BiggerRegularizedCategorical",
    "eec512f4e060da63f8a114b91898c554a60ed66b",
    aligned="as one task; both tasks have as many actions",
    remains="as one task; actions that a task lacks are 0 here and count in no entropy, there they are an action like "
    "any other",
    needs=NEEDED,
)
def brc_two_tasks(checkout: Path) -> Outcome:
    return beside(checkout, 2)


def beside(checkout: Path, tasks: int) -> Outcome:
    """Five updates of both, of so many tasks."""
    hidden = {f"{'critic_' if k == 'critic' else ''}hidden": [w] * BLOCKS[k] for k, w in WIDTHS.items()}
    many = tasks > 1
    ours, outcome, g = Ours("brc", of_tasks(tasks) if many else None, **hidden), Outcome(), np.random.default_rng(3)
    c = ours.algorithm.config
    import flax
    import jax
    import optax

    with (
        jax_float64(),
        jax.disable_jit(),  # a compiled step would keep its first draws
        imported(checkout, "jaxrl.agent.brc_learner") as code,
        imported(checkout, "jaxrl.normalizer") as scaling,
        mock.patch.object(Tensor, "float", Tensor.double),  # value heads compute in float32
    ):
        flax.config.update("flax_return_frozendict", False)
        inputs = np.zeros((1, OBSERVATION)), np.zeros((1, ACTION))
        agent = code.BRC(0, *inputs, num_tasks=tasks, width_critic=WIDTHS["critic"], width_actor=WIDTHS["actor"])
        normalizer = scaling.RewardNormalizer(tasks, target_entropy=-ACTION / 2)
        normalizer.returns_min_norm, normalizer.returns_max_norm = np.full(tasks, np.inf), np.full(tasks, -np.inf)

        def ours_by_path(state: Any) -> dict[str, dict[str, np.ndarray]]:
            return {
                "actor": weights(state.params["actor"], "actor"),
                "critic": weights(state.params["critic"], "critic"),
                "target_critic": weights(state.target["critic"], "critic"),
                "temp": {"log_temp": state.params["entropy"]["log"].numpy()},
            }

        adam = optax.adamw(c.learning_rate)
        steps = {"actor": adam, "critic": adam, "temp": optax.adam(c.learning_rate, b1=0.5)}
        models: dict[str, Any] = {}
        for name, values in ours_by_path(ours.state).items():
            model = getattr(agent, name)
            params = replaced(model.params, values)
            learnt = {"tx": steps[name], "opt_state": steps[name].init(params)} if name in steps else {}
            models[name] = model.replace(params=params, **learnt)
        largest = np.zeros(tasks)
        for i, batch in enumerate(batches()):
            # an episode of each task before each update, the second's with rewards three times as large
            rewards, cut = g.normal(1.0, 3.0 + i, 7), i % 2 == 0
            each = np.stack([rewards * (1 + 2 * k) for k in range(tasks)], 1)
            for t, row in enumerate(each):
                over = np.full(tasks, t == len(rewards) - 1)
                normalizer.update(row, over & (not cut), over & cut)
            bounds = np.array([0]), np.array([len(rewards)])
            sizes = [largest_return(column, *bounds, np.array([cut]), c.discount) for column in each.T]
            largest = np.maximum(largest, sizes)
            numbers = g.integers(tasks, size=BATCH).astype(np.int32) if many else np.zeros(BATCH, np.int32)
            theirs = normalizer.normalize(code.Batch(**batch, task_ids=numbers), np.asarray(models["temp"]()))
            if many:
                observed = {k: np.c_[x, numbers] for k, x in batch.items() if k.endswith("observations")}
                batch = batch | observed
            order = "actor", "critic", "target_critic", "temp"
            arguments = c.discount, c.polyak, -ACTION / 2, c.value_bins, 10.0, many
            with shared_noise():
                losses = ours.update(batch | {LARGEST_RETURN: largest[numbers]})
                _, *after, expected = code._update(
                    jax.random.PRNGKey(0), *(models[name] for name in order), theirs, *arguments
                )
            models = dict(zip(order, after, strict=True))
            pairs = {
                "critic": (losses["critic/loss"], expected["critic_loss"]),
                "actor": (losses["actor/loss"], expected["actor_loss"]),
                "alpha": (losses["entropy/weight"], expected["temperature"]),
                "entropy": (losses["entropy/policy"], expected["entropy"]),
            }
            outcome.losses.append({name: (a, float(b)) for name, (a, b) in pairs.items()})
        for name, values in ours_by_path(ours.state).items():
            outcome.parameters |= compared(name, values, models[name].params)
    return outcome
