"""What a language model's server may do with a key, with time and with the reader of its answers (row 23 of issue 37's
table).
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offrl.errors import UserError
from offrl.labelling import Answers, Endpoint, ask
from offrl.labelling import endpoint as endpoint_module
from tests.support.scripted_endpoint import serving

KEY = "sk-very-secret-0123456789"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "OFFRL_LLM_URL", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OFFRL_LLM_KEY", KEY)


def client(url: str, **more: Any) -> Endpoint:
    return Endpoint(url, "m", **{"timeout": 2.0, "retries": 0, **more})


def test_an_answer_that_repeats_the_key_is_kept_without_it(tmp_path: Path) -> None:
    """Row 23: the answers file had the key in it, although no key ever comes into it."""
    with serving(lambda p: f"as {KEY} says:\n yes") as there:
        texts, _ = ask(client(there.url), ["a"], Answers(tmp_path / "answers.jsonl"), quiet=True)
    assert texts == ["as *** says:\n yes"] and KEY not in (tmp_path / "answers.jsonl").read_text()


def test_a_placeholder_for_a_key_stays_in_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 23: servers without keys are given "EMPTY" or "x"; to take those out would change honest answers."""
    monkeypatch.setenv("OFFRL_LLM_KEY", "x")
    with serving(lambda p: "the box is next to x") as there:
        assert client(there.url).complete(["a"]) == ["the box is next to x"]


@pytest.mark.usefixtures("no_collection")
def test_deep_json_is_one_line() -> None:
    """Row 23: 100,000 brackets ended in a traceback."""
    deep = b"[" * 100_000
    for reply in ((200, {}, deep), (400, {}, deep), (400, {}, b'{"error":' + deep)):
        with serving(lambda p: "x", lambda n, reply=reply: reply) as there, pytest.raises(UserError) as caught:
            client(there.url).complete(["a"])
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def test_plain_http_to_another_host_warns_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 23: the key went unencrypted to any host without a word."""
    endpoint = client("http://llm.example/v1")
    monkeypatch.setattr(endpoint, "_ask", lambda *_: "yes")
    endpoint.complete(["a"])
    endpoint.complete(["b"])
    lines = capsys.readouterr().err.splitlines()
    assert (
        len(lines) == 1
        and "llm.example" in lines[0]
        and "$OFFRL_LLM_KEY" in lines[0]
        and "https://" in lines[0]
        and KEY not in lines[0]
    )
    for url in ("https://llm.example/v1", "http://127.0.0.1:1/v1", "http://localhost:1/v1", "http://[::1]:1/v1"):
        endpoint = client(url)
        monkeypatch.setattr(endpoint, "_ask", lambda *_: "yes")
        endpoint.complete(["a"])
    assert capsys.readouterr().err == ""


@pytest.fixture
def dripping() -> Iterator[Any]:
    """A server that sends `head` and then a byte every few milliseconds, for ever."""
    listener, over, heads = socket.create_server(("127.0.0.1", 0)), threading.Event(), [b""]

    def drip(connection: socket.socket) -> None:
        try:
            with connection:
                connection.sendall(heads[0])
                while not over.wait(0.005):
                    connection.sendall(b" ")
        except OSError:
            pass

    def serve() -> None:
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=drip, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield heads, f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    over.set()
    listener.close()


@pytest.mark.parametrize(
    "head",
    [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\nX-Long:", b"HTTP/1.1 500 Oh\r\n\r\n"],
    ids=["body", "head", "error"],
)
def test_a_reply_in_drips_ends(dripping: Any, head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 23: a byte now and then is a sign of life, and there was no total time: this waited for ever."""
    dripping[0][0] = head
    monkeypatch.setattr(endpoint_module, "PAUSE", 0.1)
    with pytest.raises(UserError, match=r"no whole answer in 0\.2 s"):
        client(dripping[1], timeout=0.1).complete(["a"])


@pytest.mark.usefixtures("no_collection")
def test_damaged_answers_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 23: a kept answer nested too deeply is passed over as any damaged line is."""
    path = tmp_path / "answers.jsonl"
    path.write_text("[" * 100_000 + "\n" + json.dumps({"key": "k", "prompt": "p", "answer": "yes"}) + "\n")
    assert Answers(path).known == {"k": "yes"} and "1 damaged line" in capsys.readouterr().err
