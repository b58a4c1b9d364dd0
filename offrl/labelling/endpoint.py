"""A language model behind an OpenAI-compatible endpoint, spoken to with the standard library alone."""

from __future__ import annotations

import http.client
import json
import os
import queue
import signal
import ssl
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offrl.errors import UserError, warn
from offrl.labelling import replies
from offrl.system.addresses import HERE, unprotected
from offrl.system.signals import handled

KEYS = ("OFFRL_LLM_KEY", "OPENAI_API_KEY")
URLS = ("OFFRL_LLM_URL", "OPENAI_BASE_URL")
OPENAI = "api.openai.com"
AGAIN = (408, 409, 425, 429, 500, 502, 503, 504, 520, 522, 524, 529)  # worth another attempt


class _Stopped(Exception):
    """Another request has failed for good, or the user has had enough."""


class _Retry(Exception):
    """This attempt has failed; `wait`: seconds that the server asks for."""

    def __init__(self, why: str, wait: float | None = None) -> None:
        super().__init__(why)
        self.wait = wait


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another place."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass
class Endpoint:
    """`/chat/completions` of any server that speaks OpenAI's protocol.

    The key is read from the environment when a request is made: $OFFRL_LLM_KEY, or, for OpenAI's own address and the
    one in $OPENAI_BASE_URL, $OPENAI_API_KEY; or the variable named by `key_env`. It is in no attribute, no file and no
    message.
    """

    url: str  # such as https://api.openai.com/v1 or http://127.0.0.1:8000/v1
    model: str
    temperature: float = 0.0
    max_tokens: int = 256
    system: str = ""  # the system message; empty: none
    extra: Mapping[str, Any] = field(
        default_factory=dict
    )  # more fields of the request; None leaves one of the others out
    key_env: str | None = None
    parallel: int = 4  # requests at a time
    timeout: float = 60.0  # seconds without a sign of life
    retries: int = 6  # further attempts of a request
    backoff: float = 1.0  # seconds before the second attempt; doubled each time
    longest_wait: float = 120.0  # a server that asks for a longer pause ends the work
    longest_answer: float = (
        600.0  # seconds of a request in all, however often there is a sign of life; at least `timeout`
    )

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
        path = parts.path.rstrip("/")
        path = path if path.endswith("/chat/completions") else f"{path}/chat/completions"
        self._target = urllib.parse.urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
        self._place = f"{parts.scheme}://{parts.netloc}{path}"  # without the query, in which some services have a key
        handlers: list[Any] = [_NoRedirect()]
        if parts.hostname in HERE:
            handlers.append(urllib.request.ProxyHandler({}))
        self._opener = urllib.request.build_opener(*handlers)
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
        key, name = self._key()  # says at once what is wrong with it
        if prompts and not self._warned:
            self._warned = True
            what = f"the key in ${name}, questions" if key else "questions"
            warn(f"{self._place} is not encrypted: {what} and answers can be read on the way; use https://")
        done: queue.Queue[tuple[int, str | None, BaseException | None]] = queue.Queue()
        lock, stop = threading.Lock(), threading.Event()
        todo, taken = iter(enumerate(prompts)), 0

        def halt() -> None:
            with lock:  # from here on nothing is taken
                stop.set()

        def work() -> None:
            nonlocal taken
            while True:
                with lock:
                    if stop.is_set() or (item := next(todo, None)) is None:
                        return
                    taken += 1
                index, prompt = item
                try:
                    done.put((index, self._ask(prompt, stop), None))
                except BaseException as error:  # set by the other thread
                    halt()
                    done.put((index, None, error))

        for _ in range(min(self.parallel, len(prompts))):
            threading.Thread(target=work, daemon=True).start()
        given = 0
        failure: BaseException | None = None
        asked: list[int] = []  # Ctrl-C, which must not interrupt whoever takes the answers in the middle of keeping one

        def interrupted(number: int, frame: object) -> None:
            asked.append(number)
            if len(asked) > 1:
                raise KeyboardInterrupt

        try:
            with handled(interrupted, signal.SIGINT):
                while given < (taken if stop.is_set() else len(prompts)):
                    if asked and failure is None:
                        halt()
                        failure = KeyboardInterrupt()
                        if taken > given:
                            warn(
                                f"stopping: waiting for {taken - given} answer(s) on their way; Ctrl-C again leaves "
                                "them"
                            )
                        continue
                    try:
                        index, answer, error = done.get(timeout=0.2)
                    except queue.Empty:
                        continue
                    given += 1
                    if answer is not None:
                        yield index, answer
                    elif not isinstance(error, _Stopped):
                        failure = failure or error
        finally:
            halt()
        if failure is None and asked:
            failure = KeyboardInterrupt()
        if failure is not None:
            raise failure

    # ---- one request

    def _settings(self) -> dict[str, Any]:
        body: dict[str, Any] = {"temperature": self.temperature, "max_tokens": self.max_tokens, **self.extra}
        return {name: value for name, value in body.items() if value is not None}

    def _key(self) -> tuple[str, str]:
        """(the key or "", the variable it is from or would be). Raises UserError."""
        host = urllib.parse.urlsplit(self.url).hostname
        if self.key_env:
            names: tuple[str, ...] = (self.key_env,)
        else:
            base = os.environ.get("OPENAI_BASE_URL")
            own = host == OPENAI or (base and urllib.parse.urlsplit(base).hostname == host)
            names = KEYS if own else KEYS[:1]
        name = next((n for n in names if os.environ.get(n, "").strip()), names[0])
        key = os.environ.get(name, "").strip()
        if not key and (self.key_env or host == OPENAI):
            raise UserError(f"{self._place} needs a key: put it into the environment variable {' or '.join(names)}")
        if not (key.isascii() and key.isprintable()):
            raise UserError(f"the key in ${name} has characters that no key has; copy it again")
        return key, name

    def _ask(self, prompt: str, stop: threading.Event) -> str:
        began = time.monotonic()
        for attempt in range(self.retries + 1):
            if stop.is_set():
                raise _Stopped
            try:
                return self._once(prompt)
            except _Retry as error:
                why, wait = str(error), error.wait
            if wait is not None and wait > self.longest_wait:
                raise UserError(
                    f"{self._place}: {why}, and asks to wait {wait:.0f} s: come back then, or set "
                    f"longest_wait={wait:.0f}"
                )
            pause = max(wait or 0.0, min(self.backoff * 2.0**attempt, self.longest_wait))
            if attempt < self.retries and stop.wait(pause):
                raise _Stopped
        spent = time.monotonic() - began
        raise UserError(f"{self._place} gave no answer in {self.retries + 1} attempts ({spent:.1f} s): {why}")

    def _once(self, prompt: str) -> str:
        """One request. One that takes too long is left to a thread of its own: nothing else ends a reply that comes in
        drips, whose head may do so too."""
        done: queue.Queue[str | BaseException] = queue.Queue()
        most = max(self.longest_answer, self.timeout)

        def work() -> None:
            try:
                done.put(
                    self._request(prompt, time.monotonic() + most + 1.0)
                )  # after that nobody waits for it any more
            except BaseException as error:
                done.put(error)

        threading.Thread(target=work, daemon=True).start()
        try:
            result = done.get(timeout=most)
        except queue.Empty:
            raise _Retry(f"no whole answer in {most:g} s (longest_answer=)") from None
        if isinstance(result, BaseException):
            raise result
        return result

    def _request(self, prompt: str, end: float) -> str:
        """The answer, by the time `end`."""
        key, name = self._key()
        messages = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*messages, {"role": "user", "content": prompt}], **self._settings()}
        headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "offrl"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self._target, json.dumps(body).encode(), headers, method="POST")
        try:
            with self._opener.open(request, timeout=self.timeout) as reply:
                data = replies.read(reply, end)
        except urllib.error.HTTPError as error:
            with error:
                raise self._refused(error, key, name, end) from None
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            if isinstance(reason, ssl.SSLCertVerificationError):
                raise UserError(
                    f"{self._place}: its certificate cannot be verified ({reason.verify_message})"
                ) from None
            if isinstance(reason, TimeoutError):
                raise _Retry(f"no sign of life for {self.timeout:g} s") from None
            words = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
            raise _Retry(self._clean(words, key)) from None
        return self._text(data, key)

    def _refused(self, error: urllib.error.HTTPError, key: str, name: str, end: float) -> Exception:
        """The error to raise at a status other than 200."""
        try:
            data = replies.read(error, end)
        except (OSError, http.client.HTTPException):
            data = b""
        text, code = replies.message(data)
        text = self._clean(text, key)
        tail = f" ({text})" if text else ""
        status = error.code
        if status in (401, 403):
            problem = (
                f"refuses the key in ${name}" if key else f"wants a key: put it into the environment variable {name}"
            )
            return UserError(f"{self._place} {problem}: status {status}{tail}")
        if 300 <= status < 400:
            target = urllib.parse.urlsplit(error.headers.get("Location") or "")
            shown = urllib.parse.urlunsplit((target.scheme, target.netloc, target.path, "", ""))
            return UserError(
                f"{self._place} redirects to {shown or 'somewhere'}, where the key is not sent; give the right url="
            )
        if status == 404:
            return UserError(
                f"{self._place} knows no model '{self.model}', or url= is not the address of an API: status 404{tail}"
            )
        if status in AGAIN and code != "insufficient_quota":
            return _Retry(f"status {status}{tail}", replies.wait(error.headers.get("Retry-After")))
        return UserError(f"{self._place} refuses the request: status {status}{tail}")

    def _text(self, data: bytes, key: str) -> str:
        """The answer in a reply. Raises _Retry for what is none."""
        try:
            text = replies.answer(data)
        except ValueError:
            text, _ = replies.message(data)
            raise _Retry(f"what it gave is no chat completion: {self._clean(text, key) or 'nothing'}") from None
        return replies.without_key(text, key)

    @staticmethod
    def _clean(text: str, key: str) -> str:
        """In one line, without the key."""
        return " ".join((text.replace(key, "***") if key else text).split())[:200]
