"""Tokens of text data: what belongs to which text, with tokenizers of three kinds and random strings; windows, returns,
cuts, the cache.
"""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

if not find_spec("tokenizers"):
    pytest.skip("needs the extra 'text'", allow_module_level=True)

from offrl import rng
from offrl.data.dataset import Dataset
from offrl.data.text.dataset import from_episodes
from offrl.lm import tokens
from offrl.lm.models import tokenizer as tokenizing
from offrl.lm.sampler import (
    ACTION,
    DONE,
    IDS,
    KNOWN,
    LAST,
    NEXT,
    OBSERVED,
    RETURN,
    REWARD,
    SUCCESSOR,
    VALID,
    TextSampler,
    take,
)

ALPHABET = "ab cZ09.,!?\n\t'\"<>/éüß中文😀"


def text(g: random.Random, most: int = 12, least: int = 0) -> str:
    special = ["</s>", "<pad>", "  ", "don't"]
    return "".join(g.choice(special) if g.random() < 0.1 else g.choice(ALPHABET) for _ in range(g.randint(least, most)))


def episodes(seed: int, count: int = 8, least: int = 1) -> list[dict[str, Any]]:
    g = random.Random(seed)
    made = []
    for _ in range(count):
        turns = [
            {"obs": text(g), "action": text(g, least=least), "reward": round(g.uniform(-2, 2), 3)}
            for _ in range(g.randint(1, 5))
        ]
        ended = g.random() < 0.5
        final = text(g) if ended or g.random() < 0.5 else None
        made.append({"turns": turns, "final_obs": final, "terminated": ended, "truncated": not ended})
    return made


def tokenizer(kind: str, data: Dataset) -> tokenizing.Tokenizer:
    return tokenizing.make(kind, tokenizing.vocabulary(kind, data.strings, "toy"))


@pytest.mark.parametrize("kind", tokenizing.KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_tokens_masks_and_rewards_line_up(kind: str, seed: int) -> None:
    told = episodes(seed)
    data = from_episodes(told, name="toy")
    tok, gamma = tokenizer(kind, data), 0.9
    assert tok.unknown(data.strings) == []
    flat = [(e, t, turn) for e, episode in enumerate(told) for t, turn in enumerate(episode["turns"])]
    for history in (1, 2, 3):
        source = TextSampler(tok, True, history, 500, gamma).prepare(data)
        batch = {k: v.numpy() for k, v in take(source, torch.arange(len(source.begin))).items()}
        assert len(source.begin) == len(flat)
        for i, (e, t, turn) in enumerate(flat):
            ids, action = batch[IDS][i], batch[ACTION][i]
            assert ids[0] == tok.start and not action[0]
            own = ids[action].tolist()
            assert own[-1] == tok.end and tok.decode(own[:-1]) == turn["action"]
            said = [x for other in told[e]["turns"][: t + 1] for x in (other["obs"], other["action"])][:-1]
            # windows may begin with an action, which has an end token too
            shown = ids[batch[VALID][i] & ~action][1:].tolist()
            assert tok.decode(shown) == "".join(said[-history:])
            last = np.flatnonzero(action)[-1]
            assert batch[LAST][i][last] and not batch[LAST][i][action][:-1].any()
            final = t == len(told[e]["turns"]) - 1
            assert batch[REWARD][i][last] == np.float32(turn["reward"]) and batch[DONE][i][last] == (
                final and told[e]["terminated"]
            )
            assert batch[KNOWN][i][last] == (not final or told[e]["terminated"] or told[e]["final_obs"] is not None)
            after = told[e]["turns"][t + 1]["obs"] if not final else told[e]["final_obs"] or ""
            window = [*said, turn["action"], after][-history:]
            assert tok.decode(batch[NEXT + IDS][i][batch[NEXT + VALID][i]].tolist()) == "".join(window)
            # the return: every token of every action from here on discounts
            later = [(len(tok.encode([x["action"]])[0]) + 1, x["reward"]) for x in told[e]["turns"][t:]]
            expected, passed = 0.0, -1
            for size, reward in later:
                passed += size
                expected += gamma**passed * reward
            assert batch[RETURN][i][np.flatnonzero(action)[0]] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("kind", tokenizing.KINDS)
def test_whole_episodes_and_where_the_next_state_is(kind: str) -> None:
    told = episodes(11)
    data = from_episodes(told, name="toy")
    tok = tokenizer(kind, data)
    source = TextSampler(tok, False, None, 2000).prepare(data)
    batch = {k: v.numpy() for k, v in take(source, torch.arange(len(told))).items()}
    for i, episode in enumerate(told):
        ids, action, valid = batch[IDS][i], batch[ACTION][i], batch[VALID][i]
        whole = [x for turn in episode["turns"] for x in (turn["obs"], turn["action"])] + [episode["final_obs"] or ""]
        assert tok.decode(ids[valid][1:].tolist()) == "".join(whole)
        assert tok.decode(ids[action].tolist()) == "".join(turn["action"] for turn in episode["turns"])
        assert not (batch[OBSERVED][i] & action).any() and (batch[OBSERVED][i] | action)[1 : valid.sum()].all()
        chosen = np.flatnonzero(action)
        for position, following in zip(chosen, [*chosen[1:], valid.sum()], strict=True):
            inside = not batch[LAST][i][position]
            assert batch[SUCCESSOR][i][position] == (position if inside else following - 1)
        assert batch[REWARD][i].sum() == pytest.approx(sum(turn["reward"] for turn in episode["turns"]), abs=1e-4)


def test_what_does_not_fit_is_cut_at_its_beginning() -> None:
    turns = [{"obs": f"{i}" * 4, "action": "x" * 5 + "\n", "reward": float(i)} for i in range(10)]
    data = from_episodes([{"turns": turns, "final_obs": "end", "terminated": True, "truncated": False}], name="toy")
    tok = tokenizer("characters", data)
    source = TextSampler(tok, False, None, 30).prepare(data)
    batch = {k: v.numpy() for k, v in take(source, torch.arange(len(source.begin))).items()}
    assert source.cut > 0 and batch[IDS].shape[1] <= 31
    # every action token is learnt from in exactly one piece, with every reward and the state after each action in sight
    assert batch[ACTION].sum() == 60 and batch[REWARD][batch[ACTION]].sum() == 45.0
    for row in range(len(source.begin)):
        for position in np.flatnonzero(batch[ACTION][row] & batch[LAST][row]):
            assert batch[VALID][row][batch[SUCCESSOR][row][position]]
            assert batch[SUCCESSOR][row][position] > position
    window = TextSampler(tok, False, 9, 12).prepare(data)
    shown = take(window, torch.tensor([8]))
    assert window.cut > 0 and tok.decode(shown[IDS][0][shown[VALID][0]].tolist()) == "x\n8888xxxxx\n"


@pytest.mark.parametrize(("size", "shown"), [(20, True), (40, False)])
def test_a_state_that_does_not_fit_behind_its_action_is_not_taken_for_known(size: int, shown: bool) -> None:
    turns = [{"obs": f"{i}" * size + "\n", "action": "ab\n", "reward": 1.0} for i in range(6)]
    data = from_episodes([{"turns": turns, "final_obs": "end\n", "terminated": False, "truncated": True}], name="toy")
    source = TextSampler(tokenizer("characters", data), False, None, 30).prepare(data)
    batch = take(source, torch.arange(len(source.begin)))
    # each is learnt from once
    assert int(batch[ACTION].sum()) == 6 * 3 and float(batch[REWARD][batch[ACTION]].sum()) == 6.0
    ends = batch[ACTION] & batch[LAST]
    for row, position in ends.nonzero().tolist():
        last_turn = int(source.begin[row]) + position - 1 > 5 * (size + 4)
        assert bool(batch[KNOWN][row, position]) is (shown or last_turn)
        if batch[KNOWN][row, position]:
            state = int(source.begin[row]) + int(batch[SUCCESSOR][row, position]) - 1
            assert state == int(source.flat[SUCCESSOR][int(source.begin[row]) + position - 1]) < int(source.end[row])


def test_weights_decide_what_is_drawn() -> None:
    from dataclasses import replace

    told = episodes(3, count=6)
    data = from_episodes(told, name="toy")
    weights = torch.tensor([0.0, 3.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    data = replace(data, weights=weights)
    sampler = TextSampler(tokenizer("bytes", data), True, 1, 300)
    source = sampler.prepare(data)
    drawn = sampler(source, rng.make_key(0), 4000)
    lengths = data.episode_lengths().numpy()
    share = 3.0 * lengths[1] / (3.0 * lengths[1] + lengths[3])
    first = sampler(source, rng.make_key(0), 4000)
    assert torch.equal(first[IDS], drawn[IDS])  # pure
    owner = [int(x) for x in np.repeat(np.arange(6), lengths)]
    rows = {
        e: {tuple(take(source, torch.tensor([i]))[IDS][0].tolist()) for i, o in enumerate(owner) if o == e}
        for e in (1, 3)
    }
    seen = [tuple(row) for row in drawn[IDS].tolist()]
    assert all(row in rows[1] | rows[3] for row in seen)
    assert abs(np.mean([row in rows[1] for row in seen]) - share) < 4 * (share * (1 - share) / 4000) ** 0.5


def test_what_took_long_is_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("OFFRL_CACHE", str(tmp_path))
    monkeypatch.setattr(tokens, "SLOW", -1.0)
    data = from_episodes(episodes(5), name="toy")
    tok = tokenizer("words", data)
    made = tokens.stream(data, tok, True)
    calls = []
    real = tokens.encode
    monkeypatch.setattr(tokens, "encode", lambda *a: calls.append(a) or real(*a))
    kept = tokens.stream(data, tok, True)
    assert not calls and all(np.array_equal(getattr(made, n), getattr(kept, n)) for n in tokens.ARRAYS)
    tokens.stream(data, tok, False)
    assert len(calls) == 1  # other tokens
    for file in tmp_path.rglob("ids.npy"):
        file.write_bytes(file.read_bytes()[:-8])
    tokens.stream(data, tok, True)
    assert len(calls) == 2  # damaged: made anew
