"""An OpenAI-compatible endpoint in a thread, which answers by a rule on the prompt. Shared by tests."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, dict[str, str], bytes]  # status, headers, body


def completion(text: Any) -> bytes:
    """The body of an answer."""
    return json.dumps(
        {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}
    ).encode()


@dataclass
class Scripted:
    """The endpoint's script, and the requests that it has seen."""

    rule: Callable[[str], Any]  # prompt -> answer
    # request n (from 0) -> another reply, "drop", or None for the rule's
    before: Callable[[int], Reply | str | None] = lambda n: None
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def prompts(self) -> list[str]:
        return [body["messages"][-1]["content"] for body in self.bodies]


@contextlib.contextmanager
def serving(
    rule: Callable[[str], Any], before: Callable[[int], Reply | str | None] = lambda n: None
) -> Iterator[Scripted]:
    """A running endpoint."""
    script = Scripted(rule, before)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with script.lock:
                number = len(script.bodies)
                script.bodies.append(body)
                script.headers.append({name.title(): value for name, value in self.headers.items()})
            reply = script.before(number)
            if reply == "drop":
                self.connection.close()
                return
            if reply is None:
                reply = 200, {}, completion(script.rule(body["messages"][-1]["content"]))
            assert isinstance(reply, tuple)
            status, headers, data = reply
            self.send_response(status if self.path == "/v1/chat/completions" else 404)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError):  # a connection that was dropped on purpose
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    script.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
