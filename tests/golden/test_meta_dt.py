"""Meta-DT and its task model against torch's GRU, float64 NumPy and numbers worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from offrl import registry, rng
from offrl.algorithms.meta_dt.prompts import begin_logits, best_of
from offrl.data.arrays import from_arrays
from offrl.data.dataset import Dataset
from offrl.data.samplers.histories import HistorySampler, prompt_windows
from offrl.errors import UserError
from offrl.evaluation.policy import TrainedPolicy
from offrl.nn.recurrent import GRU
from offrl.settings.train import TrainConfig
from offrl.training.stages import ready
from tests.support.reference.transformer import affine, norm, numpy_of, transformer

LENGTHS, TASKS = (6, 3, 7, 5), (4, 4, 1, 1)
OBS, A = 3, 2


def data(discrete: bool = False, **more: Any) -> Dataset:
    """Four episodes of two tasks, which end by time with a known successor."""
    g, n = np.random.default_rng(0), sum(LENGTHS)
    ends = np.zeros(n, bool)
    ends[np.cumsum(LENGTHS) - 1] = True
    actions = g.integers(0, 3, n) if discrete else g.uniform(-1, 1, (n, A))
    bounds: dict[str, Any] = {"num_actions": 3} if discrete else {"action_low": -1.0, "action_high": 1.0}
    columns = {
        "truncations": ends,
        "terminations": np.zeros(n, bool),
        "tasks": np.repeat(TASKS, LENGTHS),
        **bounds,
        **more,
    }
    observations, after = g.normal(size=(2, n, OBS))
    after[:-1][~ends[:-1]] = observations[1:][~ends[:-1]]
    return from_arrays(observations, actions, g.normal(size=n), next_observations=after, **columns)


def test_gru_is_torchs() -> None:
    ours, theirs = GRU(5, 7), torch.nn.GRU(5, 7, batch_first=True)
    g = torch.Generator().manual_seed(0)
    for parameter in ours.parameters():
        parameter.data = torch.randn(parameter.shape, generator=g)
    theirs.load_state_dict(
        {
            "weight_ih_l0": ours.weight_in,
            "weight_hh_l0": ours.weight,
            "bias_ih_l0": ours.bias_in,
            "bias_hh_l0": ours.bias,
        }
    )
    x = torch.randn(4, 6, 5, generator=g)
    torch.testing.assert_close(ours(x), theirs(x)[0][:, -1])
    torch.testing.assert_close(torch.vmap(lambda row: ours(row.unsqueeze(0))[0])(x), ours(x))


def test_histories() -> None:
    """The transitions before a row in its episode, behind zeros."""
    dataset = data()
    sampler = HistorySampler(3)
    batch = sampler.take(sampler.all_rows(dataset), torch.tensor([0, 1, 5, 6, 8]))
    c = dataset.columns
    assert batch["past_valid"].tolist() == [
        [False] * 3,
        [False, False, True],
        [True] * 3,
        [False] * 3,
        [False, True, True],
    ]
    torch.testing.assert_close(batch["past_observations"][2], c["observations"][2:5])
    torch.testing.assert_close(batch["past_actions"][4], torch.cat([torch.zeros(1, A), c["actions"][6:8]]))
    torch.testing.assert_close(batch["past_rewards"][1], torch.tensor([0.0, 0.0, float(c["rewards"][0])]))
    assert not batch["past_observations"][3].any()
    drawn = sampler(sampler.prepare(dataset), rng.make_key(0), 300)["observations"]
    assert len({tuple(o.tolist()) for o in drawn}) == sum(LENGTHS)


@pytest.mark.parametrize("predicts", ["reward", "observation", "both"])
@pytest.mark.parametrize("discrete", [False, True])
def test_task_model(predicts: str, discrete: bool) -> None:
    """Encoder, decoders and loss; `look` says the same of all rows."""
    dataset = data(discrete)
    kind = registry.get("algo", "task_model")
    algorithm = kind(kind.Config(history=2, embedding=4, recurrent_width=6, predicts=predicts), dataset.spec)
    state = algorithm.init(1)
    p, rows = numpy_of(state.params["model"]), np.arange(sum(LENGTHS))
    c = {k: v.double().numpy() for k, v in dataset.columns.items()}
    acts = np.eye(3)[dataset.columns["actions"].numpy()] if discrete else c["actions"]
    start = np.repeat(np.cumsum(LENGTHS) - LENGTHS, LENGTHS)

    def relu(x: np.ndarray) -> np.ndarray:
        return np.maximum(x, 0.0)

    def deep(x: np.ndarray, name: str) -> np.ndarray:
        return affine(relu(affine(relu(affine(x, p, f"{name}.0")), p, f"{name}.1")), p, f"{name}.2")

    sigmoid, tasks, squared, absolute = (lambda x: 1 / (1 + np.exp(-x))), [], [], []
    for row in rows:
        h = np.zeros(6)
        for at in (row - 2, row - 1):
            there = at >= start[row]
            parts = [
                c["observations"][at] * there,
                acts[at] * there,
                c["rewards"][at : at + 1] * there if there else np.zeros(1),
            ]
            x = np.concatenate([relu(affine(part, p, f"parts.{i}")) for i, part in enumerate(parts)])
            a, b = p["gru.weight_in"] @ x + p["gru.bias_in"], p["gru.weight"] @ h + p["gru.bias"]
            r, z = sigmoid(a[:6] + b[:6]), sigmoid(a[6:12] + b[6:12])
            h = (1 - z) * np.tanh(a[12:] + r * b[12:]) + z * h
        task = affine(h, p, "out")
        seen = (
            (c["observations"][row], "observation"),
            (acts[row], "action"),
            (c["next_observations"][row], "observation"),
        )
        s, act, after = (relu(affine(v, p, name)) for v, name in seen)
        gaps = []
        if predicts != "observation":
            gaps.append(deep(np.concatenate([s, act, after, task]), "reward") - c["rewards"][row])
        if predicts != "reward":
            gaps.append(deep(np.concatenate([s, act, task]), "following") - c["next_observations"][row])
        tasks.append(task)
        squared.append(sum((g**2).mean() for g in gaps))
        absolute.append(sum(np.abs(g).sum() for g in gaps))
    sampler = algorithm.sampler()
    batch = sampler.take(sampler.all_rows(dataset), torch.from_numpy(rows))
    loss, _ = algorithm.model_loss(state.params["model"], state, batch)
    assert float(loss) == pytest.approx(np.mean(squared), rel=1e-4)
    found, errors = algorithm.of_dataset(state.params["model"], dataset, rows=5)
    np.testing.assert_allclose(found.numpy(), tasks, atol=1e-5)
    np.testing.assert_allclose(errors.numpy(), absolute, rtol=1e-4)


# ---- prompts


def test_where_prompts_begin() -> None:
    """By hand: of task 1 the second best episode is too short for a prompt after the history, of task 4 only the best
    is taken.
    """
    rewards = np.zeros(sum(LENGTHS))
    rewards[[0, 6, 9, 16]] = [1.0, 5.0, 2.0, 3.0]  # returns 1 and 5 of task 4, 2 and 3 of task 1
    dataset = data()
    dataset = dataclasses.replace(dataset, raw_returns=torch.tensor([1.0, 5.0, 2.0, 3.0], dtype=torch.float64))
    error = torch.arange(21, dtype=torch.float32)
    one = prompt_windows(dataset, error, length=2, episodes=1, history=1)
    assert one.tasks.tolist() == [1] * 9 + [0] * 12, "tasks 1 and 4 are number 0 and 1"
    assert one.begin.tolist() == [17, 18, 19, 7] and one.last.tolist() == [20, 20, 20, 8]
    two = prompt_windows(dataset, error, length=4, episodes=2, history=3)
    # task 1: the episode of rows 16 to 20 has 5 < 3 + 4 rows: its beginning; that of 9 to 15 begins at its step 3
    assert two.begin.tolist() == [16, 12, 6, 0] and two.size.tolist() == [2, 2] and two.first.tolist() == [0, 2]
    counts = torch.bincount(one.draw(rng.make_key(0), torch.zeros(30_000, dtype=torch.int64)), minlength=4) / 30_000
    sums = torch.tensor([17 + 18, 18 + 19, 19 + 20, 0.0])
    torch.testing.assert_close(counts, sums / sums.sum(), atol=0.01, rtol=0)
    cut = dataclasses.replace(dataset, complete=torch.tensor([True, False, True, True]))
    begin = prompt_windows(cut, error, length=2, episodes=1, history=1).begin
    assert begin.tolist() == [17, 18, 19, 1, 2, 3, 4], "nobody knows what the best one came to"
    alone = dataclasses.replace(dataset, complete=torch.tensor([False, False, True, True]))
    begin = prompt_windows(alone, error, length=2, episodes=1, history=1).begin
    assert begin.tolist() == [17, 18, 19, 7], "task 4 has no whole one"
    even = torch.bincount(two.draw(rng.make_key(0), torch.ones(30_000, dtype=torch.int64)), minlength=4) / 30_000
    torch.testing.assert_close(even, torch.tensor([0.0, 0.0, 0.5, 0.5]), atol=0.01, rtol=0)


def test_a_new_tasks_prompts_begin_alike() -> None:
    error = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0, 0.0], [1.0, 2.0, 3.0, 0.0, 0.0, 0.0]])
    logits = begin_logits(error, torch.tensor([5, 3]), 2, 2)
    torch.testing.assert_close(logits.softmax(-1)[0], torch.tensor([0.0, 0.0, 7 / 16, 9 / 16, 0.0, 0.0]))
    torch.testing.assert_close(logits.softmax(-1)[1], torch.tensor([1.0, 0, 0, 0, 0, 0]))  # 3 < 2 + 2 steps


def test_the_best_episodes_stay() -> None:
    def episode(steps: int, returns: list[float]) -> dict[str, Tensor]:
        return {"error": torch.full((2, 1, steps), float(steps)), "return": torch.tensor(returns).unsqueeze(1)}

    pool: dict[str, Tensor] = {}
    for steps, returns in ((2, [1.0, 5.0]), (4, [3.0, 2.0]), (3, [2.0, 9.0])):
        pool = best_of(pool, episode(steps, returns), 2)
    assert pool["return"].tolist() == [[3.0, 2.0], [9.0, 5.0]]
    assert pool["error"][0].tolist() == [[4.0] * 4, [3.0, 3.0, 3.0, 0.0]]


# ---- the policy


def make(tmp_path: Path, dataset: Dataset, **settings: Any) -> Any:
    kind = registry.get("algo", "meta_dt")
    small = {
        "width": 8,
        "layers": 2,
        "heads": 2,
        "context": 3,
        "dropout": 0.0,
        "prompt": 2,
        "history": 2,
        "batch_size": 6,
    }
    small |= {"prompt_warmup": 0, "prompt_skip": 0.0, "task_model_steps": 2}
    config = kind.Config(**{**small, **settings})
    run = TrainConfig(
        algo=config, seeds=[0], steps=1, runs_dir=str(tmp_path), quiet=True, compile="eager", device="cpu"
    )
    run, pretrained = ready(run, dataset)
    return kind(run.algo, dataset.spec, pretrained)


@pytest.mark.parametrize("discrete", [False, True])
def test_loss(tmp_path: Path, discrete: bool) -> None:
    """The prompt's tokens, then the window's, observations with what was found of the task; only the window's actions
    count.
    """
    dataset = data(discrete)
    algorithm = make(tmp_path, dataset)
    state, sampler = algorithm.init(0), algorithm.sampler()
    batch = sampler(sampler.prepare(dataset), rng.make_key(0), 6)
    steps, whole = numpy_of(state.params["actor"], "steps."), numpy_of(state.params["actor"])
    x = {k: v.double().numpy() for k, v in batch.items()}

    def tokens(prefix: str, b: int, t: int, embed: str) -> list[np.ndarray]:
        at = [x[prefix + name][b, t] for name in ("returns_to_go", "observations", "actions")]
        action = np.eye(3)[int(at[2])] if discrete else at[2]
        observation = at[1] if prefix else np.concatenate([at[1], x["task"][b, t]])
        time = steps[f"{prefix}time.weight"][int(x[prefix + "timesteps"][b, t])]
        values = (np.array([at[0] / algorithm.config.return_scale]), observation, action)
        return [
            affine(v, steps, f"{embed}.{n}") + time
            for v, n in zip(values, ("return", "observation", "action"), strict=True)
        ]

    found = []
    for b in range(6):
        prompt = [
            token for t in range(2) if batch["prompt_valid"][b, t] for token in tokens("prompt_", b, t, "prompt_embed")
        ]
        own = [token for t in range(3) if batch["valid"][b, t] for token in tokens("", b, t, "embed")]
        out = transformer(
            np.stack([*prompt, *norm(np.stack(own), steps, "norm")]),
            numpy_of(state.params["actor"], "steps.trunk."),
            2,
            2,
        )
        for t, y in enumerate(out[len(prompt) + 1 :: 3]):
            z = affine(y, whole, "head.net.head")
            if discrete:
                found.append(-(z - np.log(np.exp(z).sum()))[int(x["actions"][b, t])])
            else:
                found.append(((np.tanh(z) - x["actions"][b, t]) ** 2).mean())
    loss, _ = algorithm.actor_loss(state.params["actor"], state, batch, rng.make_key(3))
    assert float(loss) == pytest.approx(np.mean(found), rel=1e-4)
    rows = {o.tobytes(): i for i, o in enumerate(dataset.columns["observations"].numpy())}
    tasks = dataset.columns["tasks"].numpy()
    for b in range(6):
        own, other = (rows[batch[n][b, 0].numpy().tobytes()] for n in ("observations", "prompt_observations"))
        assert tasks[own] == tasks[other]
        torch.testing.assert_close(
            batch["task"][b, 0],
            algorithm.model.of_dataset(algorithm.pretrained["task_model"].state.params["model"], dataset)[0][own],
        )
    late = dataclasses.replace(algorithm.config, prompt_warmup=10)
    algorithm.config = late
    early = algorithm.actor_loss(state.params["actor"], state, batch, rng.make_key(3))[0]
    changed = {**batch, "prompt_observations": batch["prompt_observations"] + 1.0}
    assert early == algorithm.actor_loss(state.params["actor"], state, changed, rng.make_key(3))[0], (
        "no prompt is seen before that"
    )
    after = state._replace(step=torch.tensor(10))
    assert algorithm.actor_loss(state.params["actor"], after, batch, rng.make_key(3))[0] == loss


@pytest.mark.parametrize("discrete", [False, True])
def test_acts_as_it_was_trained(tmp_path: Path, discrete: bool) -> None:
    """An episode of the data, played again: the window it acts on is the training window; then the next one's prompt is
    of that episode.
    """
    dataset = data(discrete)
    algorithm = make(tmp_path, dataset, target_return=0.0, context=4)
    state, steps = algorithm.init(0), LENGTHS[0]
    c = dataset.columns
    actor = algorithm.actor(state)
    carry = actor.start(1)
    assert not carry.prompt["valid"].any()
    for t in range(steps):
        window = actor.enter(carry, c["observations"][t : t + 1])
        _, carry = actor.act(carry, c["observations"][t : t + 1], rng.make_key(t), explore=False)
        # what was done is what the data did
        done = algorithm.spec.encode(c["actions"][t : t + 1])
        carry = dataclasses.replace(
            carry,
            window={
                **carry.window,
                "actions": torch.cat([carry.window["actions"][:, :-1], c["actions"][t : t + 1].unsqueeze(1)], 1),
            },
            episode={**carry.episode, "actions": torch.cat([carry.episode["actions"][:, :-1], done.unsqueeze(1)], 1)},
        )
        carry = actor.observe_reward(carry, c["rewards"][t : t + 1])
    tasks, errors = algorithm.model.of_dataset(state.extra["task_model"], dataset)
    torch.testing.assert_close(window["task"][0], tasks[2:6])
    source = actor.prompts_of(carry.episode, c["next_observations"][5:6], torch.tensor([steps]))
    torch.testing.assert_close(source["error"][0, 0], errors[:steps])
    torch.testing.assert_close(source["returns_to_go"][0, 0], c["rewards"][:steps].flip(0).cumsum(0).flip(0))
    late = make(tmp_path, dataset, target_return=0.0, context=4, prompt_warmup=10)
    unread = late.actor(state).new_episode(carry, c["next_observations"][5:6], torch.tensor([steps]))
    assert not unread.prompt["valid"].any(), "a policy that never read a prompt is given none"
    last = state._replace(step=torch.tensor(10))  # the last update, number 9, had no prompt yet
    assert (
        not late.actor(last)
        .new_episode(carry, c["next_observations"][5:6], torch.tensor([steps]))
        .prompt["valid"]
        .any()
    )
    carry = actor.new_episode(carry, c["next_observations"][5:6], torch.tensor([steps]))
    at = int(carry.prompt["timesteps"][0, 0])
    assert (
        2 <= at <= steps - 2 and carry.prompt["valid"].all() and carry.t == 0 and not carry.episode["rewards"].numel()
    )
    torch.testing.assert_close(carry.prompt["actions"][0], c["actions"][at : at + 2])
    torch.testing.assert_close(carry.prompt["observations"][0], c["observations"][at : at + 2])


def test_what_names_no_task_model(tmp_path: Path) -> None:
    dataset = data()
    with pytest.raises(UserError, match=r"algo\.task_model=.*there is no run"):
        make(tmp_path, dataset, task_model=str(tmp_path / "nothing"))
    algorithm = make(tmp_path, dataset)
    assert algorithm.config.task_model_id and algorithm.config.task_model_settings["history"] == 2
    again = make(tmp_path, dataset, task_model=algorithm.config.task_model)
    assert again.config == algorithm.config
    policy = TrainedPolicy(algorithm, algorithm.init(0), 0)
    policy.save(tmp_path / "p")
    loaded = TrainedPolicy.load(tmp_path / "p")
    torch.testing.assert_close(loaded.state.extra, policy.state.extra)
