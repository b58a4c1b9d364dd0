"""A language model behind an OpenAI-compatible endpoint."""

from __future__ import annotations

import json
import os
import queue
import signal
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from offrl.errors import UserError, warn
from offrl.labelling.pictures import Pictures
from offrl.system.addresses import HERE, unprotected
from offrl.system.signals import handled

if TYPE_CHECKING:
    import openai

KEYS = ("OFFRL_LLM_KEY", "OPENAI_API_KEY")
URLS = ("OFFRL_LLM_URL", "OPENAI_BASE_URL")
OPENAI = "api.openai.com"
PAUSE = 120.0  # seconds that `openai` waits between two attempts at most, where the server asks for so much
SHORT = 8  # characters of a key that is none: servers without keys are given "EMPTY" or "x", which answers may hold


@dataclass
class Endpoint:
    """`/chat/completions` of any server that speaks OpenAI's protocol.

    The key is read from the environment when requests are made: $OFFRL_LLM_KEY, or, for OpenAI's own address and the
    one in $OPENAI_BASE_URL, $OPENAI_API_KEY; or the variable named by `key_env`. It is in no attribute, no file and no
    message.
    """

    url: str  # such as https://api.openai.com/v1 or http://127.0.0.1:8000/v1
    model: str
    temperature: float = 0.0
    max_tokens: int = 256
    system: str = ""  # the system message; empty: none
    extra: Mapping[str, Any] = field(default_factory=dict)  # more fields of the request; None leaves one out
    key_env: str | None = None
    parallel: int = 4  # requests at a time
    timeout: float = 60.0  # seconds without a sign of life
    retries: int = 6  # further attempts of a request
    pictures: Pictures = field(default_factory=Pictures)  # that questions name

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(
                f"url={self.url} is no address; it is such as https://api.openai.com/v1 or http://127.0.0.1:8000/v1"
            )
        if parts.username or parts.password:
            raise UserError(
                "url= holds a name or password, which would be written down; give the key in $OFFRL_LLM_KEY instead"
            )
        if not self.model:
            raise UserError("model= is missing: the name by which the endpoint knows the model")
        self._host = parts.hostname
        path = parts.path.rstrip("/").removesuffix("/chat/completions")
        self._place = f"{parts.scheme}://{parts.netloc}{path}"  # without the query, in which some services have a key
        self._query = dict(urllib.parse.parse_qsl(parts.query))
        self._warned = not unprotected(self.url)

    @property
    def identity(self) -> str:
        """Model and settings. Not the address: the same model elsewhere gives the same answers."""
        return json.dumps(["endpoint", self.model, self._settings(), self.system], sort_keys=True)

    def complete(self, prompts: Sequence[str]) -> list[str]:
        """The answers to `prompts`. Raises UserError."""
        texts = dict(self.stream(prompts))
        return [texts[i] for i in range(len(prompts))]

    def stream(self, prompts: Sequence[str]) -> Iterator[tuple[int, str]]:
        """(index, answer) in the order in which answers come, `parallel` requests at a time.

        After an error, or the first Ctrl-C, no more requests are begun, those on their way are waited for and given,
        and then it is raised. A second Ctrl-C does not wait.
        """
        key, variable = self._key()  # says at once what is wrong with it
        if prompts and not self._warned:
            self._warned = True
            content = f"the key in ${variable}, questions" if key else "questions"
            warn(f"{self._place} is not encrypted: {content} and answers can be read on the way; use https://")
        client = self._client(key)
        results: queue.Queue[tuple[int, str | BaseException]] = queue.Queue()

        def work(index: int, prompt: str) -> None:
            try:
                results.put((index, self._ask(client, key, variable, prompt)))
            except BaseException as error:  # raised by the other thread
                results.put((index, error))

        signals: list[int] = []  # Ctrl-C must not interrupt whoever takes the answers in the middle of keeping one

        def interrupted(number: int, frame: object) -> None:
            signals.append(number)
            if len(signals) > 1:
                raise KeyboardInterrupt

        todo, running = iter(enumerate(prompts)), 0
        failure: BaseException | None = None
        longest = (self.retries + 1) * (self.timeout + PAUSE)  # a byte now and then is a sign of life too
        end = time.monotonic() + longest
        with handled(interrupted, signal.SIGINT):
            while True:
                while failure is None and running < self.parallel and (item := next(todo, None)) is not None:
                    threading.Thread(target=work, args=item, daemon=True).start()
                    running += 1
                if not running:
                    break
                if signals and failure is None:
                    failure = KeyboardInterrupt()
                    warn(f"stopping: waiting for {running} answer(s) on their way; Ctrl-C again leaves them")
                if time.monotonic() > end:
                    raise UserError(f"{self._place} gave no whole answer in {longest:g} s")
                try:
                    index, result = results.get(timeout=0.2)
                except queue.Empty:
                    continue
                running, end = running - 1, time.monotonic() + longest
                if isinstance(result, str):
                    yield index, result
                else:
                    failure = failure or result
        if failure is not None or signals:
            raise failure or KeyboardInterrupt

    def _settings(self) -> dict[str, Any]:
        body: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens, **self.extra}
        return {name: value for name, value in body.items() if value is not None}

    def _key(self) -> tuple[str, str]:
        """(the key or "", the variable it is from or would be). Raises UserError."""
        if self.key_env:
            names: tuple[str, ...] = (self.key_env,)
        else:
            base = os.environ.get("OPENAI_BASE_URL")
            is_openai_host = self._host == OPENAI or (base and urllib.parse.urlsplit(base).hostname == self._host)
            names = KEYS if is_openai_host else KEYS[:1]
        name = next((n for n in names if os.environ.get(n, "").strip()), names[0])
        key = os.environ.get(name, "").strip()
        if not key and (self.key_env or self._host == OPENAI):
            raise UserError(f"{self._place} needs a key: put it into the environment variable {' or '.join(names)}")
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"the key in ${name} has characters that no key has; copy it again")
        return key, name

    def _client(self, key: str) -> openai.OpenAI:
        try:
            import openai
        except ImportError:
            raise UserError("an endpoint needs pip install 'offrl[text]' (the package openai)") from None
        return openai.OpenAI(
            api_key=key or "none",
            base_url=self._place,
            default_query=self._query,
            timeout=self.timeout,
            max_retries=self.retries,
            # a redirect would take the key to another place; no proxy stands before this machine
            http_client=openai.DefaultHttpxClient(follow_redirects=False, trust_env=self._host not in HERE),
        )

    def _ask(self, client: openai.OpenAI, key: str, variable: str, prompt: str) -> str:
        """The answer to one question. Raises UserError."""
        import openai

        messages: Any = [{"role": "system", "content": self.system}] if self.system else []
        messages.append({"role": "user", "content": self.pictures.content(prompt)})
        headers: Any = {name: openai.Omit() for name in ("OpenAI-Organization", "OpenAI-Project")}
        headers["Authorization"] = f"Bearer {key}" if key else openai.Omit()
        start = time.monotonic()
        try:
            reply = client.chat.completions.with_raw_response.create(
                model=self.model,
                messages=messages,
                extra_body=self._settings(),
                extra_headers=headers,
            )
        except openai.APIStatusError as error:
            raise UserError(f"{self._place} {self._refusal(error, key, variable)}") from None
        except openai.APIConnectionError as error:
            silent = isinstance(error, openai.APITimeoutError)
            reason = f"no sign of life for {self.timeout:g} s" if silent else str(error.__cause__ or error)
            raise UserError(
                f"{self._place} gave no answer in {self.retries + 1} attempts ({time.monotonic() - start:.1f} s): "
                f"{_line(reason, key)}"
            ) from None
        try:
            content = json.loads(reply.content)["choices"][0]["message"].get("content")
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError):
            shown = _line(reply.content.decode("utf-8", "replace"), key) or "nothing"
            raise UserError(f"{self._place}: what it gave is no chat completion: {shown}") from None
        if isinstance(content, list):  # parts
            content = "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
        text = "" if content is None else str(content)
        return text.replace(key, "***") if len(key) >= SHORT else text

    def _refusal(self, error: openai.APIStatusError, key: str, variable: str) -> str:
        """A status that is not tried again, or no more, in words."""
        status, body = error.status_code, error.body
        text = body.get("message") or body.get("detail") or body if isinstance(body, Mapping) else body
        pause = error.response.headers.get("Retry-After")
        tail = f": status {status}{f' ({_line(str(text), key)})' if text else ''}"
        tail += f", and asks to wait {pause[:40]} s" if pause else ""
        if status in (401, 403):
            return f"refuses the key in ${variable}{tail}" if key else f"wants a key in ${variable}{tail}"
        if 300 <= status < 400:
            target = urllib.parse.urlsplit(error.response.headers.get("Location") or "")
            shown = urllib.parse.urlunsplit((target.scheme, target.netloc, target.path, "", ""))
            return f"redirects to {shown or 'somewhere'}, where the key is not sent; give the right url="
        if status == 404:
            return f"knows no model '{self.model}', or url= is not the address of an API{tail}"
        return f"refuses the request{tail}"


def _line(text: str, key: str) -> str:
    """`text` in one line, without the key."""
    return " ".join((text.replace(key, "***") if key else text).split())[:200]
