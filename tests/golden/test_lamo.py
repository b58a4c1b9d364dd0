"""LaMo in float64 NumPy: its embedding, LoRA, and a whole policy on a small GPT-2, with its loss and what that
trains.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offrl import registry, rng
from offrl.data.dataset import DataSpec
from offrl.data.samplers.sequences import RETURNS, STEPS, VALID

if not (find_spec("transformers") and find_spec("peft")):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

B, K, OBS, A, D, H, RANK, ALPHA, SCALE = 3, 4, 3, 2, 8, 2, 2, 6.0, 10.0
G = np.random.default_rng(5)
VALIDS = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]], bool)
X: dict[str, Any] = {
    "observations": G.normal(size=(B, K, OBS)),
    "actions": G.uniform(-1, 1, (B, K, A)),
    "rewards": G.normal(size=(B, K)),
    RETURNS: 20 * G.normal(size=(B, K)),
    STEPS: np.array([[5, 6, 7, 8], [0, 1, 0, 0], [8, 0, 0, 0]]),
    VALID: VALIDS,
}
BATCH = {
    k: torch.tensor(v) if v.dtype in (bool, np.int64) else torch.tensor(v, dtype=torch.float32) for k, v in X.items()
}


def make(**settings: Any) -> Any:
    kind = registry.get("algo", "lamo")
    given = {
        "lm": "scratch",
        "width": D,
        "layers": 1,
        "heads": H,
        "rank": RANK,
        "lora_alpha": ALPHA,
        "context": K,
        "max_timestep": 9,
    }
    given |= {"target_return": 1.0, "return_scale": SCALE, "dropout": 0.0, "warmup_steps": 4, **settings}
    spec = DataSpec(
        name="toy", observation_shape=(OBS,), action_dim=A, num_actions=0, action_low=[-1.0] * A, action_high=[1.0] * A
    )
    return kind(kind.Config(**given), spec)


def started(algorithm: Any, seed: int = 0) -> Any:
    """The state before the first update, with all parameters moved away from where they begin: LoRA's B from 0, above
    all.
    """
    state = algorithm.init(seed)
    g = torch.Generator().manual_seed(1)
    moved = {k: v + 0.3 * torch.randn(v.shape, generator=g) for k, v in state.params["actor"].items()}
    return state._replace(params={"actor": moved})


def weights(algorithm: Any, state: Any) -> dict[str, np.ndarray]:
    """Learnt and frozen, by name in the trunk or in the policy."""
    actor = algorithm.networks["actor"]
    every = {**dict(actor.named_buffers()), **state.params["actor"]}
    return {
        k.replace("steps.trunk.base.", "").replace(".default", ""): v.numpy().astype(np.float64)
        for k, v in every.items()
    }


gelu = np.vectorize(lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2))))


def norm(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    return x * w[name + ".weight"] + w[name + ".bias"]


def embed(x: np.ndarray, w: dict[str, np.ndarray], kind: str) -> np.ndarray:
    h = x @ w[f"steps.embed.{kind}.first.weight"].T + w[f"steps.embed.{kind}.first.bias"]
    return gelu(h) @ w[f"steps.embed.{kind}.second.weight"].T + w[f"steps.embed.{kind}.second.bias"] + h


def lora(x: np.ndarray, w: dict[str, np.ndarray], name: str) -> np.ndarray:
    """GPT-2 stores the weights of its linear layers as [in, out]."""
    low = x @ w[name + ".lora_A.weight"].T @ w[name + ".lora_B.weight"].T
    return x @ w[name + ".base_layer.weight"] + w[name + ".base_layer.bias"] + ALPHA / RANK * low


def gpt2(x: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    """One block on tokens [T, D] of one sequence without padding, without GPT-2's embeddings of positions."""
    q, k, v = np.split(lora(norm(x, w, "h.0.ln_1"), w, "h.0.attn.c_attn"), 3, -1)
    seen = []
    for h in range(H):
        part = slice(h * D // H, (h + 1) * D // H)
        scores = q[:, part] @ k[:, part].T / math.sqrt(D / H)
        scores[np.triu_indices(len(x), 1)] = -np.inf
        e = np.exp(scores - scores.max(-1, keepdims=True))
        seen.append(e / e.sum(-1, keepdims=True) @ v[:, part])
    x = x + np.concatenate(seen, -1) @ w["h.0.attn.c_proj.weight"] + w["h.0.attn.c_proj.bias"]
    y = gelu(norm(x, w, "h.0.ln_2") @ w["h.0.mlp.c_fc.weight"] + w["h.0.mlp.c_fc.bias"])
    return norm(x + y @ w["h.0.mlp.c_proj.weight"] + w["h.0.mlp.c_proj.bias"], w, "ln_f")


def policy(w: dict[str, np.ndarray], b: int, first: int, last: int) -> np.ndarray:
    """Actions of steps `first` to `last` of row `b`, which are no padding."""
    rows = slice(first, last)
    tokens = {
        "return": X[RETURNS][b, rows, None] / SCALE,
        "observation": X["observations"][b, rows],
        "action": X["actions"][b, rows],
    }
    x = np.stack([embed(tokens[kind], w, kind) for kind in tokens], 1).reshape(-1, D)
    x = norm(x, w, "steps.norm") + np.repeat(w["steps.time.weight"][X[STEPS][b, rows]], 3, 0)
    y = gpt2(x, w)[1::3]
    y = gelu(y @ w["head.net.layers.0.weight"].T + w["head.net.layers.0.bias"])
    return y @ w["head.net.head.weight"].T + w["head.net.head.bias"]


def test_embedding() -> None:
    algorithm = make()
    w, x = weights(algorithm, algorithm.init(0)), G.normal(size=(5, OBS))
    module = algorithm.networks["actor"].steps.embed["observation"]
    own = {
        k.removeprefix("steps.embed.observation."): v
        for k, v in algorithm.init(0).params["actor"].items()
        if "embed.obs" in k
    }
    found = torch.func.functional_call(module, own, torch.tensor(x, dtype=torch.float32))
    np.testing.assert_allclose(found.numpy(), embed(x, w, "observation"), atol=1e-5)
    plain = make(embedding="linear").networks["actor"].steps.embed["observation"]
    assert plain.second is None and [n for n, _ in plain.named_parameters()] == ["first.weight", "first.bias"]


def test_lora_adds_to_what_is_frozen() -> None:
    algorithm = make()
    layer = algorithm.networks["actor"].get_submodule("steps.trunk.base.h.0.attn.c_attn")
    x = G.normal(size=(5, D))
    for state, adds in ((algorithm.init(0), False), (started(algorithm), True)):
        prefix = "steps.trunk.base.h.0.attn.c_attn."
        own = {k.removeprefix(prefix): v for k, v in state.params["actor"].items() if k.startswith(prefix)}
        assert sorted(own) == ["base_layer.bias", "lora_A.default.weight", "lora_B.default.weight"]
        assert own["lora_A.default.weight"].shape == (RANK, D) and own["lora_B.default.weight"].shape == (3 * D, RANK)
        found = torch.func.functional_call(layer, own, torch.tensor(x, dtype=torch.float32)).numpy()
        w = weights(algorithm, state)
        np.testing.assert_allclose(found, lora(x, w, "h.0.attn.c_attn"), atol=1e-4)
        frozen = x @ w["h.0.attn.c_attn.base_layer.weight"] + w["h.0.attn.c_attn.base_layer.bias"]
        assert (np.abs(found - frozen).max() > 0.1) == adds, "B is 0 at first"


@pytest.mark.parametrize("padding", ["right", "left"])
def test_loss(padding: str) -> None:
    """Windows of 4, 2 and 1 steps; where they are filled up changes nothing."""
    algorithm = make(padding=padding)
    state = started(algorithm)
    w, batch = weights(algorithm, state), BATCH
    if padding == "left":
        lengths = VALIDS.sum(1)
        batch = {
            k: torch.stack([x.roll(K - int(n), 0) for x, n in zip(v, lengths, strict=True)]) for k, v in BATCH.items()
        }
    errors = [(policy(w, b, 0, n) - X["actions"][b, :n]) ** 2 for b, n in enumerate(VALIDS.sum(1))]
    expected = np.concatenate([e.mean(-1) for e in errors]).mean()
    loss, _ = algorithm.actor_loss(state.params["actor"], state, batch, rng.make_key(0))
    assert float(loss) == pytest.approx(expected, rel=1e-4)


def test_actions_while_the_window_grows_and_slides() -> None:
    """The head is not squashed but cut off, and the greedy action follows from the last K steps."""
    algorithm = make(context=3)
    state = started(algorithm)
    w, window = weights(algorithm, state), BATCH
    for t in range(1, K + 1):
        part = {k: v[:1, max(0, t - 3) : t] for k, v in window.items()}
        found = algorithm.policy.mode(algorithm.actor(state).action_distribution(part))[0]
        expected = policy(w, 0, max(0, t - 3), t)[-1]
        np.testing.assert_allclose(found.numpy(), expected.clip(-1, 1), atol=1e-4)


@pytest.mark.parametrize("tune", ["adapters", "all"])
def test_positions_are_of_texts_alone(tune: str, tmp_path: Path) -> None:
    """Whatever GPT-2 adds for a position, embedded tokens of any length and padding become the same; a text does
    not.
    """
    import transformers

    from offrl.lm.models.adapters import Trunk
    from offrl.lm.models.pretrained import find
    from offrl.nn.transformer import visible

    words = {"vocab_size": 9, "bos_token_id": None, "eos_token_id": None}
    transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=D, n_layer=2, n_head=H, **words)).save_pretrained(
        tmp_path
    )
    x = torch.tensor(G.normal(size=(2, 6, D)), dtype=torch.float32)
    mask = visible(torch.tensor([[True] * 6, [False, False, True, True, True, True]]), 6)
    for talks in (False, True):
        trunk = Trunk(find(str(tmp_path)), tune=tune, talks=talks)
        own = {
            **dict(trunk.named_buffers(remove_duplicate=False)),
            **dict(trunk.named_parameters(remove_duplicate=False)),
        }
        name = next(n for n in own if n.endswith("wpe.weight"))
        assert (name in dict(trunk.named_parameters())) == (talks and tune == "all")
        other = {**own, name: 50.0 * own[name]}
        for given in ((x, mask), (x, None), (x[:1, :3], None)):
            torch.testing.assert_close(
                torch.func.functional_call(trunk, other, given, tie_weights=False), trunk(*given), atol=1e-5, rtol=0
            )
    text = torch.arange(5).unsqueeze(0)
    before = float(trunk.text_loss(text).detach())
    (trunk.get_parameter if tune == "all" else trunk.get_buffer)(name).data.mul_(50.0)
    assert abs(float(trunk.text_loss(text).detach()) - before) > 1e-3


def test_update_trains_adapters_and_heads_and_nothing_frozen() -> None:
    algorithm = make(clip_norm=0.25, learning_rate=0.01, weight_decay=0.5)
    before = {k: v.clone() for k, v in algorithm.networks["actor"].named_buffers()}
    state, key = algorithm.init(0), rng.make_key(0)
    trunk = [k for k in state.params["actor"] if k.startswith("steps.trunk.")]
    assert len(trunk) == 3 and not any("wpe" in k or "mlp" in k or "ln_" in k for k in trunk)
    gradient = torch.func.grad(lambda p, s: algorithm.actor_loss(p, s, BATCH, key)[0])
    first = gradient(state.params["actor"], state)
    assert {k.split(".")[-3]: bool((first[k] != 0).any()) for k in trunk if "lora" in k} == {
        "lora_A": False,
        "lora_B": True,
    }
    later = started(algorithm)
    assert all(bool((g != 0).any()) for g in gradient(later.params["actor"], later).values())
    new, _ = algorithm.update(later, BATCH, key, phase=0)
    after = dict(algorithm.networks["actor"].named_buffers())
    assert list(after) == list(before) and all(torch.equal(after[k], before[k]) for k in before)
    # AdamW by hand: eps 1e-6, the first of four warming updates, the gradient cut to a norm of 0.25, and decay of
    # everything
    grads = gradient(later.params["actor"], later)
    length = math.sqrt(sum(float(g.double().square().sum()) for g in grads.values()))
    assert length > 0.25
    for name, g in grads.items():
        g, p = (
            g.numpy().astype(np.float64) * 0.25 / (length + 1e-6),
            later.params["actor"][name].numpy().astype(np.float64),
        )
        expected = p * (1 - 0.01 / 4 * 0.5) - 0.01 / 4 * g / (np.abs(g) + 1e-6)
        np.testing.assert_allclose(new.params["actor"][name].numpy(), expected, atol=2e-5)


def test_published_defaults() -> None:
    c = registry.get("algo", "lamo").Config()
    published = {
        "learning_rate": 1e-4,
        "weight_decay": 1e-5,
        "warmup_steps": 2500,
        "batch_size": 64,
        "context": 20,
        "clip_norm": 0.25,
    }
    assert {k: getattr(c, k) for k in published} == published
    assert (c.lm, c.rank, c.lora_alpha, c.dropout, c.embedding, c.tune) == ("gpt2", 16, 32.0, 0.1, "mlp", "adapters")
    assert c.text == "" and c.language_weight == 0.1
