"""Language models that label control data: the endpoint, its answers on disk, what they say, and the labels."""

from __future__ import annotations

import base64
import io
import json
import re
import socket
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from PIL import Image

from offrl.cli import main as cli
from offrl.data import DatasetConfig, load_dataset
from offrl.data.arrays import from_arrays
from offrl.data.transforms.reward_labels import RewardLabels
from offrl.errors import UserError
from offrl.labelling import Answers, Endpoint, Renderer, ask, label_by_score, label_subgoals, parse
from offrl.labelling.rewards import compare, first_reached
from tests.support.scripted_endpoint import completion, serving

KEY = "sk-very-secret-0123456789"
ERROR = json.dumps({"error": {"message": f"wrong key {KEY}", "code": "invalid_api_key"}}).encode()


@pytest.fixture(autouse=True)
def no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OFFRL_LLM_KEY", "OPENAI_API_KEY", "OFFRL_LLM_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)


def client(url: str, **more: Any) -> Endpoint:
    return Endpoint(url, "m", **{"timeout": 2.0, "retries": 3, **more})


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which are not waited for."""
    pauses: list[float] = []
    monkeypatch.setattr(openai._base_client, "time", types.SimpleNamespace(time=time.time, sleep=pauses.append))
    return pauses


# ---- the endpoint


def test_answers_come_in_the_order_of_the_questions() -> None:
    with serving(lambda p: p.upper()) as there:
        endpoint = client(there.url, system="be brief", extra={"max_tokens": None, "top_p": 0.5})
        assert endpoint.complete([f"q{i}" for i in range(10)]) == [f"Q{i}" for i in range(10)]
    body = there.bodies[0]
    assert body["model"] == "m" and body["temperature"] == 0.0 and body["top_p"] == 0.5 and "max_tokens" not in body
    assert body["messages"][0] == {"role": "system", "content": "be brief"}
    assert "Authorization" not in there.headers[0]


FAILURES = {
    "500": (500, {}, b"oops"),
    "429": (429, {"Retry-After": "0"}, b"slow down"),
    "dropped": "drop",
}


@pytest.mark.parametrize("kind", FAILURES)
def test_what_may_pass_is_tried_again(kind: str) -> None:
    with serving(lambda p: "yes", lambda n: FAILURES[kind] if n < 3 else None) as there:
        assert client(there.url, parallel=1).complete(["a", "b"]) == ["yes", "yes"]
    assert len(there.bodies) == 5


def test_a_server_that_asks_for_a_pause_gets_it_or_the_work_ends(no_pauses: list[float]) -> None:
    with serving(lambda p: "yes", lambda n: (429, {"Retry-After": "17"}, b"") if n == 0 else None) as there:
        assert client(there.url).complete(["a"]) == ["yes"]
    assert no_pauses == [17.0]
    with serving(lambda p: "yes", lambda n: (503, {"Retry-After": "3600"}, b"")) as there:
        with pytest.raises(UserError, match=r"refuses the request: status 503, and asks to wait 3600 s"):
            client(there.url).complete(["a"])
        assert len(there.bodies) == 1


REFUSED = {
    "401": ((401, {}, ERROR), "refuses the key in .OFFRL_LLM_KEY: status 401 .wrong key ...."),
    "404": ((404, {}, b'{"error": {"message": "no model m"}}'), "knows no model 'm'.*no model m"),
    "400": ((400, {}, b'{"detail": "bad"}'), "refuses the request: status 400"),
    "no JSON": ((200, {}, b"<html>busy</html>"), "no chat completion: <html>busy"),
    "no choices": ((200, {}, b'{"error": "loading"}'), "no chat completion"),
    "redirect": (
        (302, {"Location": "http://elsewhere.example/v1?key=1"}, b""),
        "redirects to http://elsewhere.example/v1,",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_will_not_pass_is_not_tried_again_and_no_message_has_the_key(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OFFRL_LLM_KEY", KEY)
    reply, words = REFUSED[kind]
    with serving(lambda p: "yes", lambda n: reply) as there, pytest.raises(UserError, match=words) as caught:
        client(there.url, parallel=1).complete(["a", "b", "c"])
    assert KEY not in str(caught.value) and len(there.bodies) == 1
    assert there.headers[0]["Authorization"] == f"Bearer {KEY}"


def test_a_key_for_openai_goes_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serving(lambda p: "yes") as there:
        client(there.url).complete(["a"])
        monkeypatch.setenv("OPENAI_BASE_URL", there.url)
        client(there.url).complete(["a"])
    assert "Authorization" not in there.headers[0] and there.headers[1]["Authorization"] == f"Bearer {KEY}"
    assert KEY not in repr(client(there.url)) + client(there.url).identity
    with pytest.raises(UserError, match="variable ABSENT"):
        client(there.url, key_env="ABSENT").complete(["a"])
    with pytest.raises(UserError, match="give the key in"):
        Endpoint("http://me:secret@host/v1", "m")


def test_an_endpoint_that_is_down_says_so() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UserError, match=rf"127.0.0.1:{port}.* gave no answer in 4 attempts .*refused"):
        client(f"http://127.0.0.1:{port}/v1").complete(["a"])
    with serving(lambda p: time.sleep(0.3)) as there, pytest.raises(UserError, match=r"no sign of life for 0.05 s"):
        client(there.url, timeout=0.05, retries=1).complete(["a"])


# ---- answers on disk


def test_nothing_is_asked_twice_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRL_LLM_KEY", KEY)
    path, prompts = tmp_path / "in" / "answers.jsonl", [f"q{i}" for i in range(9)] + ["q0"]
    with serving(lambda p: p.upper(), lambda n: (401, {}, ERROR) if n >= 5 else None) as there:
        words = r"status 401.*5 of 9 answers are kept in .*answers.jsonl: the same command goes on from there"
        with pytest.raises(UserError, match=words):
            ask(client(there.url, parallel=1), prompts, Answers(path), quiet=True)
    path.write_bytes(path.read_bytes() + b'{"key": "torn')  # a process that died while it wrote
    with serving(lambda p: p.upper()) as there:
        found, counts = ask(client(there.url), prompts, Answers(path), quiet=True)
        assert found == [p.upper() for p in prompts] and sorted(there.prompts) == ["q5", "q6", "q7", "q8"]
        assert (counts.prompts, counts.cached) == (9, 5)
        again, counts = ask(client(there.url), prompts, Answers(path), quiet=True)
        assert again == found and counts.cached == 9 and len(there.bodies) == 4
        # no key for what is known
        assert ask(client(there.url, key_env="ABSENT"), prompts, Answers(path), quiet=True)[0] == found
        ask(client(there.url, temperature=0.5), prompts[:1], Answers(path), quiet=True)  # other settings, other answers
        assert len(there.bodies) == 5
        with pytest.raises(UserError, match="2 questions are to be asked, more than max_prompts=1"):
            ask(client(there.url), ["new", "newer"], Answers(path), quiet=True, limit=1)
    assert KEY not in path.read_text()


@pytest.mark.usefixtures("heeds_signals")
def test_ctrl_c_keeps_the_answers_that_came(tmp_path: Path) -> None:
    import os
    import signal

    def interrupted(prompt: str) -> str:
        if prompt == "q3":
            os.kill(os.getpid(), signal.SIGINT)
        if int(prompt[1:]) > 3:
            time.sleep(0.05)  # the signal is heeded long before the last answer
        return prompt

    path = tmp_path / "answers.jsonl"
    with serving(interrupted) as there:
        with pytest.raises(KeyboardInterrupt):
            ask(client(there.url, parallel=1), [f"q{i}" for i in range(200)], Answers(path), quiet=True)
        assert len(Answers(path).known) == len(there.bodies) < 200  # those on their way are waited for
        assert {"q0", "q1", "q2", "q3"} <= set(Answers(path).known.values())


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("offrl.labelling.cache.open_to_append", full)
    with (
        serving(lambda p: p) as there,
        pytest.raises(UserError, match=r"cannot write the answers to .*No space left.*cache="),
    ):
        ask(client(there.url), ["a"], Answers(tmp_path / "a.jsonl"), quiet=True)


def test_a_labeller_of_ones_own() -> None:
    class Mine:
        identity = "mine"

        def complete(self, prompts: Any) -> list[str]:
            return [p[::-1] for p in prompts]

    assert ask(Mine(), [f"a{i}" for i in range(20)], quiet=True)[0][-1] == "91a"
    Mine.complete = lambda self, prompts: ["one"]  # type: ignore[method-assign]
    with pytest.raises(UserError, match="one text for each"):
        ask(Mine(), ["a", "b"], quiet=True)


# ---- what answers say


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("1", 0.0),
        ("2.", 1.0),
        (" Tie ", 0.5),
        ("**2**", 1.0),
        ("Segment 2", 1.0),
        ("Answer: 1", 0.0),
        ('{"answer": 2}', 1.0),
        ("<think>1 falls, so 1... no</think>\n2", 1.0),
        ("Segment 1 falls after 2 steps.\n\nAnswer: 2", 1.0),
        ("I prefer segment 1.", 0.0),
        ("Segment 2 is clearly better because it moves 1 m.", 1.0),
        ("The answer is tie", 0.5),
        ("2\n\nIt runs faster.", 1.0),
        ("", None),
        ("I cannot say.", None),
        ("Segment 1 has 2 falls", None),
        ("1 or 2", None),
        ("12", None),
        ("answer: 1.5", None),
        ("Answer: 1 or 2", None),
        ("It is hard to say which is better. 2 m is far", None),
        ("<think>2", None),
        ("1\n2", None),
        ("I do not prefer 1", None),
        ("I wouldn't choose 1", None),
        ("Segment 1 is hardly better", None),
        ("{'answer': '2'}", 1.0),
    ],
)
def test_choices(answer: str, value: float | None) -> None:
    assert parse.choice(answer) == value


@pytest.mark.parametrize(
    ("answer", "value"),
    [
        ("7", 7.0),
        ("0", 0.0),
        ("7/10", 7.0),
        ("**8.5** out of 10.", 8.5),
        ("Score: 3", 3.0),
        ("It goes 2.1 m, 8 steps.\nScore: 6.", 6.0),
        ('{"reward": 4}', 4.0),
        ("It earns 9", 9.0),
        ("10 steps, 2 falls\n3", 3.0),
        ("<think>5? 6?</think>7", 7.0),
        ("11", None),
        ("-1", None),
        ("good", None),
        ("between 3 and 5", None),
        ("", None),
        ("nan", None),
    ],
)
def test_numbers(answer: str, value: float | None) -> None:
    assert parse.number(answer, 0.0, 10.0) == value


def test_subgoals_in_answers() -> None:
    assert parse.points("[1, 2.5]\n[3, -4]", ["x", "y"], 4) == [[1.0, 2.5], [3.0, -4.0]]
    assert parse.points("```json\n[[1, 2], [3, 4]]\n``` (in order)", ["x", "y"], 1) == [[1.0, 2.0]]
    assert parse.points('{"X": 1, "y": 2} then (5, 6)', ["x", "y"], 4) == [[1.0, 2.0], [5.0, 6.0]]
    assert parse.points("[1, 2, 3]", ["x", "y"], 4) is None and parse.points("go right", ["x", "y"], 4) is None
    assert parse.points('["a", 2]', ["x", "y"], 4) is None
    assert parse.words('Sure: ["get the key", "open the door"]', [], 4) == ["get the key", "open the door"]
    assert parse.words("1. Key\n2. **door**\n- Goal", ["key", "door", "goal"], 2) == ["key", "door"]
    assert parse.words("1. fly", ["key"], 4) is None and parse.words("  ", [], 4) is None


# ---- text of rows


def walks(episodes: int = 12, length: int = 10, seed: int = 0) -> dict[str, np.ndarray]:
    """Random walks in two numbers, of which only x matters; each begins at the origin."""
    r = np.random.default_rng(seed)
    moves = r.normal(size=(episodes, length, 2)).astype(np.float32)
    places = np.concatenate([np.zeros((episodes, 1, 2), np.float32), moves.cumsum(1)[:, :-1]], 1).astype(np.float32)
    ends = np.arange(episodes * length) % length == length - 1
    return {
        "observations": places.reshape(-1, 2),
        "actions": np.clip(moves, -3, 3).reshape(-1, 2),
        "rewards": np.zeros(episodes * length, np.float32),
        "truncations": ends,
        "next_observations": (places + moves).reshape(-1, 2),
    }


def test_rows_in_words() -> None:
    data = from_arrays(
        np.array([[1.23456, -2.0], [0.0, 1e-9], [5.0, 6.0]]),
        np.array([1, 0, 1]),
        np.zeros(3),
        num_actions=2,
        terminations=[0, 0, 1],
    )
    from offrl.data.transforms.reward_labels import episode_columns

    columns = episode_columns(data, 0, 3)
    assert (
        Renderer(data.spec, ["x", "-"], ["left", "right"], steps=2)(columns)
        == "step 0: x 1.23 | action right\nstep 2: x 5 | action right"
    )
    assert Renderer(data.spec, function=lambda c: f"{len(c['rewards'])} rows")(columns) == "3 rows"
    with pytest.raises(UserError, match="names= has 1 names and an observation of arrays 2 numbers"):
        Renderer(data.spec, ["x"])
    wide = from_arrays(np.zeros((2, 60)), np.zeros((2, 1)), np.zeros(2))
    with pytest.raises(UserError, match="has 60 numbers, too many"):
        Renderer(wide.spec)
    hopper = load_dataset(DatasetConfig())
    text = Renderer(hopper.spec)(episode_columns(hopper, 0, 25))
    assert (
        text.count("\n") == 7
        and text.startswith("step 0: height 1.2")
        and "forward velocity" in text
        and "| action " in text
    )


# ---- preferences


def larger_x(prompt: str) -> str:
    """Prefers the segment that shows larger x."""
    first, second = prompt.split("Segment 2:")
    sums = [sum(float(x) for x in re.findall(r"x (-?[\d.e+-]+)", part)) for part in (first, second)]
    return "1" if sums[0] > sums[1] else "2" if sums[1] > sums[0] else "tie"


def test_the_order_of_the_segments_cancels() -> None:
    data = from_arrays(**walks())
    render = Renderer(data.spec, ["x", "y"])
    pairs = np.array([[0, 40], [15, 15], [80, 21]])

    class Rule:
        identity = "rule"

        def __init__(self, rule: Any) -> None:
            self.rule = rule

        def complete(self, prompts: Any) -> list[str]:
            return [self.rule(p) for p in prompts]

    x = data.columns["observations"][:, 0].numpy()
    want = [float(x[b : b + 5].sum() > x[a : a + 5].sum()) if a != b else 0.5 for a, b in pairs]
    labels, counts = compare(data, pairs, 5, Rule(larger_x), "x", render)
    assert labels.tolist() == want and (counts.swapped, counts.agreed, counts.unparsable, counts.pairs) == (3, 3, 0, 3)
    labels, counts = compare(data, pairs, 5, Rule(lambda p: "1"), "x", render)  # it looks at places, not at segments
    assert labels.tolist() == [0.5, 0.5, 0.5] and (counts.swapped, counts.agreed) == (3, 0)
    assert compare(data, pairs, 5, Rule(lambda p: "1"), "x", render, both_orders=False)[0].tolist() == [0.0, 0.0, 0.0]
    seen = []
    labels, counts = compare(
        data, pairs[:1], 5, Rule(lambda p: (seen.append(p), "1" if len(seen) == 1 else "who knows")[1]), "x", render
    )
    assert np.isnan(labels).all() and (counts.swapped, counts.unparsable, counts.example) == (0, 1, "who knows")


def test_preferences_of_an_endpoint_become_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OFFRL_LLM_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    np.savez("walks.npz", **{k: v for k, v in walks(30).items() if k != "rewards"})  # type: ignore[arg-type] - without rewards
    command = [
        "data",
        "label",
        "walks.npz",
        "kind=preferences",
        "task=have a large x, 'always'",
        "model=m",
        "names=[x,y]",
        "pairs=80",
    ]
    command += [
        "length=5",
        "fit.members=1",
        "fit.hidden=[32]",
        "fit.updates=120",
        "fit.learning_rate=0.01",
        "dataset.cache_dir=cache",
    ]
    command += ["out=model.safetensors", "--quiet"]
    with serving(larger_x, lambda n: (500, {}, b"") if n % 7 == 0 else None) as there:
        assert cli.main([*command, f"url={there.url}"]) == 0, capsys.readouterr().err
        assert "have a large x, 'always'" in there.prompts[0] and len(there.bodies) >= 160
        asked = len(there.bodies)
        assert cli.main([*command, f"url={there.url}"]) == 2 and "force=true" in capsys.readouterr().err
        assert cli.main([*command[:-1], f"url={there.url}", "force=true"]) == 0
        shown = capsys.readouterr().out
        assert len(there.bodies) == asked and "100% of 80 pairs" in shown and re.search(r"answered now +0\b", shown)
    labelled = load_dataset(DatasetConfig(name="walks.npz", reward_labels="model.safetensors"))
    x = labelled.columns["observations"].reshape(30, 10, 2)[:, :, 0].sum(1).numpy()
    assert np.corrcoef(x, labelled.episode_returns().numpy())[0, 1] > 0.8
    written = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert any(p.suffix == ".jsonl" for p in written) and not any(KEY.encode() in p.read_bytes() for p in written)


def test_a_model_that_prefers_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "w.npz", **walks())  # type: ignore[arg-type]
    with serving(lambda p: "As an assistant I cannot") as there:
        assert (
            cli.main(
                [
                    "data",
                    "label",
                    str(tmp_path / "w.npz"),
                    "task=x",
                    "model=m",
                    f"url={there.url}",
                    "pairs=3",
                    "-q",
                    "length=5",
                    f"cache={tmp_path}/a",
                    f"out={tmp_path}/o.safetensors",
                ]
            )
            == 2
        )
    error = capsys.readouterr().err
    assert "0 of 3 pairs" in error and "As an assistant I cannot" in error and error.count("offrl: error") == 1
    assert not (tmp_path / "o.safetensors").exists()


# ---- rewards


def test_rewards_of_stretches_and_what_has_none(tmp_path: Path) -> None:
    data = from_arrays(**{**walks(2, 5), "rewards": np.arange(10)})
    with serving(lambda p: str(len(re.findall("step", p)))) as there:
        rewards, counts = label_by_score(
            data, client(there.url), "t", render=Renderer(data.spec, ["x", "y"], steps=9), length=3
        )
        assert rewards.tolist() == [0, 0, 4, 0, 3, 0, 0, 4, 0, 3]  # "steps" in the question counts, too
        assert counts.prompts == 4 and "Answer with one number" in there.prompts[0]
    with serving(lambda p: "11" if "step 4" in p else "5") as there:
        with pytest.raises(
            UserError,
            match=r"2 of the answers do not hold a number from 0 to 10; the first of them: '11'.*on_missing=zero",
        ):
            label_by_score(data, client(there.url), "t")
        assert label_by_score(data, client(there.url), "t", on_missing="recorded")[0].tolist() == list(range(10))
        assert label_by_score(data, client(there.url), "t", length=1, on_missing="zero")[0].tolist() == [5.0] * 10


def brightness(content: Any) -> str:
    """The mean of the pictures in a message, from 0 to 10."""
    files = [part["image_url"]["url"] for part in content if part["type"] == "image_url"]
    heads = {file[: file.index(",")] for file in files}
    assert heads == {"data:image/png;base64"}
    images = [np.asarray(Image.open(io.BytesIO(base64.b64decode(file.partition(",")[2])))) for file in files]
    return f"{np.mean(images) / 25.5:.3f}"


def seen(walk: dict[str, np.ndarray], images: Any) -> dict[str, Any]:
    """A walk of which images are observed."""
    return {**{k: v for k, v in walk.items() if k != "next_observations"}, "observations": images}


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_an_endpoint_sees_images(channels: int) -> None:
    images = np.random.default_rng(0).integers(0, 256, (10, 5, 4, channels)).astype(np.uint8)
    data = from_arrays(**seen(walks(2, 5), images))
    with serving(brightness) as there:
        endpoint = client(there.url)
        render = Renderer(data.spec, steps=2, pictures=endpoint.pictures)
        rewards, _ = label_by_score(data, endpoint, "be bright", render=render, length=1, answers=Answers())
        np.testing.assert_allclose(rewards, images.mean((1, 2, 3)) / 25.5, atol=1e-3)
        stretch, _ = label_by_score(data, endpoint, "be bright", render=render)
        expected = [images[[0, 4]].mean() / 25.5, images[[5, 9]].mean() / 25.5]
        np.testing.assert_allclose(stretch[[4, 9]], expected, atol=1e-3)
    content = there.bodies[-1]["messages"][-1]["content"]
    assert [part["type"] for part in content] == ["text", "image_url", "text", "image_url", "text"]
    assert content[0]["text"].startswith("Task: be bright") and content[0]["text"].endswith("step 0: pixels ")
    assert content[2]["text"].startswith(" | action ") and "How good is this" in content[4]["text"]


def pictures_of(walk: dict[str, np.ndarray]) -> np.ndarray:
    """Images that are the brighter the farther to the right a walk is."""
    return np.broadcast_to(
        np.clip(8 * walk["observations"][:, 0] + 100, 0, 255).astype(np.uint8)[:, None, None, None],
        (len(walk["actions"]), 4, 4, 3),
    )


def test_the_command_shows_images(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    walk = walks(4, 8)
    images = pictures_of(walk)
    np.savez(tmp_path / "v.npz", **walk)  # type: ignore[arg-type]
    np.savez(tmp_path / "p.npz", **seen(walk, images))
    command = ["data", "label", str(tmp_path / "p.npz"), "task=right", "model=m", f"cache={tmp_path}/a.jsonl"]
    command += [f"out={tmp_path}/o.safetensors", "length=4", "show_images=true", "force=true"]
    labelled = DatasetConfig(name=str(tmp_path / "p.npz"), reward_labels=f"{tmp_path}/o.safetensors", cache="never")
    with serving(brightness) as there:
        for _ in range(2):  # what was answered is not asked again
            assert cli.main([*command, "kind=rewards", f"url={there.url}", "--quiet"]) == 0
            assert len(there.bodies) == 8 and "base64" not in (tmp_path / "a.jsonl").read_text()
        assert int((load_dataset(labelled, quiet=True).columns["rewards"] > 0.0).sum()) == 8
        np.savez(tmp_path / "p.npz", **seen(walk, images + 1))  # other pictures of the same actions
        with pytest.raises(UserError, match="has no rewards for an episode of these data"):
            load_dataset(labelled, quiet=True)
        for words, text in (
            (
                [c for c in command if c[:4] != "show"] + ["kind=preferences"],
                "has images alone: show_images=true shows",
            ),
            ([c.replace("p.npz", "v.npz") for c in command] + ["kind=preferences"], "is read without images"),
            ([*command, "kind=subgoals"], "show_images=true shows images to an endpoint"),
            ([c.replace("p.npz", "v.npz") for c in command] + ["kind=rewards"], "is read without images"),
        ):
            assert cli.main([*words, f"url={there.url}"]) == 2
            assert text in capsys.readouterr().err
        assert len(there.bodies) == 8


def test_segments_are_compared_by_images() -> None:
    walk = walks(4, 8)
    data = from_arrays(**seen(walk, {"state": walk["observations"], "front": pictures_of(walk)}))

    def brighter(content: Any) -> str:
        at = next(i for i, part in enumerate(content) if "Segment 2" in part.get("text", ""))
        first, second = (float(brightness(part)) for part in (content[:at], content[at:]))
        return "tie" if first == second else "1" if first > second else "2"

    pairs = np.array([[0, 8], [3, 17], [24, 9]])
    with serving(brighter) as there:
        endpoint = client(there.url)
        render = Renderer(data.spec, ["x", "-"], pictures=endpoint.pictures)
        labels, counts = compare(data, pairs, 4, endpoint, "right", render)
    means = pictures_of(walk)[pairs[..., None] + np.arange(4)].mean((2, 3, 4, 5))
    assert labels.tolist() == (0.5 + 0.5 * np.sign(means[:, 1] - means[:, 0])).tolist() and counts.agreed == 3


def test_reward_labels_are_found_wherever_the_episode_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = walks(6, 5)
    np.savez(tmp_path / "w.npz", **values)  # type: ignore[arg-type]
    out = tmp_path / "labels.safetensors"
    common = [
        "task=@" + str(tmp_path / "task.txt"),
        "model=m",
        f"cache={tmp_path}/a.jsonl",
        f"out={out}",
        "--quiet",
        "dataset.cache=never",
    ]
    (tmp_path / "task.txt").write_text("move, please\n")
    with serving(lambda p: str(round(abs(float(re.findall(r"s0 (\S+),", p)[-1])) % 10, 3))) as there:
        name = str(tmp_path / "w.npz")
        assert cli.main(["data", "label", name, "kind=rewards", f"url={there.url}", *common]) == 0, (
            capsys.readouterr().err
        )
        assert "Task: move, please\n" in there.prompts[0]
    labels = RewardLabels.load(out)
    assert labels.metadata["kind"] == "rewards" and "m" in labels.metadata["labeller"] and len(labels.rewards) == 6
    whole = load_dataset(DatasetConfig(name=name, reward_labels=str(out)))
    want = np.zeros(30, np.float32)
    want[4::5] = [float(f"{abs(float(f'{v:.3g}')) % 10:.3f}") for v in values["observations"][4::5, 0]]
    np.testing.assert_allclose(whole.columns["rewards"], want, atol=1e-6)
    part = load_dataset(DatasetConfig(name=name, reward_labels=str(out), subsample=0.5, reward_scale=2.0))
    kept = [
        i
        for i in range(6)
        if torch.isin(torch.from_numpy(values["observations"][5 * i + 4]), part.columns["observations"]).all()
    ]
    np.testing.assert_allclose(part.columns["rewards"][4::5], 2 * want[4::5][kept], atol=1e-6)
    np.savez(tmp_path / "other.npz", **walks(2, 5, seed=1))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"episode 0|no rewards for an episode of these data; it was made for w"):
        load_dataset(DatasetConfig(name=str(tmp_path / "other.npz"), reward_labels=str(out)))


# ---- subgoals


def test_first_reached() -> None:
    flags = np.array([[0, 1, 0, 1, 0], [0, 1, 0, 0, 1], [1, 0, 0, 0, 1]], bool)
    assert first_reached(flags, ordered=False).tolist() == [2, 0, 0, 0]  # the third was reached before the first step
    assert first_reached(flags, ordered=True).tolist() == [2, 0, 0, 1]  # after the others it is reached again
    assert first_reached(np.array([[0, 0, 0], [0, 1, 1]], bool), ordered=True).tolist() == [0, 0]
    assert first_reached(np.array([[1, 1, 1]], bool), ordered=True).tolist() == [0, 0]


def test_subgoals_by_hand() -> None:
    x = np.array([0, 1, 2, 3, 0, -1, 0, 1], np.float32)
    after = np.array([1, 2, 3, 4, -1, 0, 1, 2], np.float32)
    data = from_arrays(
        np.stack([x, 9 + x], 1), np.ones((8, 1)), np.full(8, 0.5), next_observations=np.stack([after, 9 + after], 1),
        truncations=np.arange(8) % 4 == 3,
    )  # fmt: skip
    with serving(
        lambda p: "First [2], then [4]." if "[x]" in p else '["far"]' if "JSON list of texts" in p else "?"
    ) as there:
        options: dict[str, Any] = {"render": Renderer(data.spec, ["x", "-"]), "entries": [0], "radius": 0.25}
        rewards, counts = label_subgoals(data, client(there.url), "go right", **options)
        assert rewards.tolist() == [0.5, 1.5, 0.5, 1.5, 0.5, 0.5, 0.5, 1.5]
        assert counts.prompts == 1  # both begin alike
        only = label_subgoals(data, client(there.url), "go right", **options, bonus=2.0, add_to_rewards=False)[0]
        assert only.tolist() == [0, 2, 0, 2, 0, 0, 0, 2]
        found = label_subgoals(
            data,
            client(there.url),
            "go",
            reached=lambda c, goal: (c["next_observations"][:, 0] > 2) & (goal == "far"),
            add_to_rewards=False,
        )[0]
        assert found.tolist() == [0, 0, 1, 0, 0, 0, 0, 0]
        with pytest.raises(UserError, match="subgoals of the form that was asked for; the first of them: '\\?'"):
            label_subgoals(data, client(there.url), "go right", render=Renderer(data.spec, ["y", "x"]), entries=[0])
        with pytest.raises(UserError, match="no column achieved_goals: say which numbers"):
            label_subgoals(data, client(there.url), "go")
        with pytest.raises(UserError, match=r"8 values of shape|4 flags are due"):
            label_subgoals(data, client(there.url), "go", reached=lambda c, goal: np.zeros(8, bool))


# ---- the command's mistakes


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["kind=prefs", "task=x", "model=m", "url=http://h/v1"], "Did you mean 'preferences'"),
        (["model=m", "url=http://h/v1"], "task= is missing"),
        (["task=x"], "no language model is named"),
        (["task=x", "url=http://h/v1"], "model= is missing"),
        (["task=x", "model=m", "url=h/v1"], "is no address"),
        (["task=x", "model=m", "url=http://h/v1", "local=/nowhere"], "several language models"),
        (["task=x", "local=/nowhere"], "there is no such folder"),
        (["task=x", "modle=m"], "Did you mean 'model'"),
        (["task=x", "model=m", "url=http://h/v1", "dataset.reward_labels=a.py:b"], "leave out dataset.reward_labels"),
        (["task=x", "model=m", "url=http://h/v1", "out=a.npz"], "must end in .safetensors"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "label", "builtin", *arguments]) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_parts_of_an_answer_are_joined() -> None:
    with serving(
        lambda p: [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}] if p == "list" else None
    ) as there:
        assert client(there.url).complete(["list", "nothing"]) == ["ab", ""]
    assert json.loads(completion("x"))["choices"]


# ---- a model on this machine


def tiny(folder: Path, template: str | None = None) -> str:
    """A random GPT-2 that knows the characters of a few words, saved with its tokenizer, which has no token for
    padding.
    """
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    letters = sorted(set("abcdefghijklmnopqrstuvwxyz :?.")) + ["<end>"]
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(letters)}, unk_token=" "))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", chat_template=template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
    end = len(letters) - 1
    config = transformers.GPT2Config(
        vocab_size=len(letters), **sizes, bos_token_id=end, eos_token_id=end, initializer_range=0.5
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return str(folder)


def test_a_local_model_answers_the_same_in_a_batch_and_alone(tmp_path: Path) -> None:
    from offrl.labelling import LocalModel

    model = LocalModel(tiny(tmp_path / "plain"), max_tokens=6, batch=2)
    prompts = ["which one?", "a", "is this a longer question?"]
    answers = model.complete(prompts)
    assert answers == [model.complete([p])[0] for p in prompts] and any(answers)
    chat = LocalModel(
        tiny(tmp_path / "chat", "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{% endfor %}"),
        max_tokens=6,
        system="be",
    )
    assert chat.tokenizer.decode(chat._tokens("go")).replace(" ", "") == "system:beuser:go"
    assert chat.identity != model.identity == LocalModel(str(tmp_path / "plain"), max_tokens=6).identity
    with pytest.raises(UserError, match="has room for 64 tokens, and a question of 98"):
        model.complete(["ab" * 45])
    (tmp_path / "plain" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer can be read in it"):
        LocalModel(str(tmp_path / "plain"))
    (tmp_path / "chat" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(UserError, match=r"it cannot be read as a causal language model"):
        LocalModel(str(tmp_path / "chat"))
    with pytest.raises(UserError, match=r"it has no config.json"):
        LocalModel(str(tmp_path))


def test_a_missing_extra_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import offrl.lm.models.libraries
    from offrl.labelling import local_model as local

    offrl.lm.models.libraries.packages.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"pip install 'offrl\[text\]'"):
        local.LocalModel(str(tmp_path))
    offrl.lm.models.libraries.packages.cache_clear()
