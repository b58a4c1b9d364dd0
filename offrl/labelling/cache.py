"""Questions to a language model, each paid for once: answers are kept on disk as they come."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

from offrl.errors import UserError, warn
from offrl.system.files import open_to_append
from offrl.system.progress import Progress
from offrl.system.user_code import guarded

CHUNK = 8  # questions at a time for a labeller that only answers lists

Value = TypeVar("Value")


@runtime_checkable
class Labeller(Protocol):
    """A language model that answers questions.

    One that can give answers as they come has `stream(prompts)` as well, an iterator of (index of the prompt, answer)
    in any order, in which an error comes after the answers that were got before it.
    """

    @property
    def identity(self) -> str:
        """Names the model and everything that its answers depend on besides the question: part of the keys of kept
        answers.
        """

    def complete(self, prompts: Sequence[str]) -> list[str]:
        """One answer for each question. Raises UserError."""


@dataclass
class Counts:
    """Counts of questions and of their answers."""

    prompts: int = 0  # questions, equal ones counted once
    cached: int = 0  # of them, answered before
    unparsable: int = 0  # answers out of which nothing could be read
    pairs: int = 0  # pairs of segments that were compared
    swapped: int = 0  # of them, those whose answers could be read in both orders
    agreed: int = 0  # of these, those with the same answer in both orders
    example: str = ""  # the beginning of the first answer that could not be read

    def read(
        self, prompts: Sequence[str], answers: Sequence[str], parse: Callable[[str], Value | None]
    ) -> list[Value | None]:
        """The parsed answers; those to equal questions are parsed once. None, and counted, where `parse` gives None."""
        known: dict[str, Value | None] = {}
        for prompt, answer in zip(prompts, answers, strict=True):
            if prompt in known:
                continue
            known[prompt] = parse(answer)
            if known[prompt] is None:
                self.unparsable += 1
                self.example = self.example or (" ".join(answer.split())[:80] or "(an empty answer)")
        return [known[prompt] for prompt in prompts]


class Answers:
    """A file of answers: JSON lines {"key", "prompt", "answer"}, appended one by one. Several processes may append to
    one file.

    A line that is damaged, because a process died while it wrote, is passed over. No key of an endpoint ever comes into
    it.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        """path: None keeps answers in memory only. Raises UserError where the file cannot be read."""
        self.path = None if path is None else Path(path).expanduser()
        self.known: dict[str, str] = {}
        self._torn = False
        if self.path is None or not self.path.exists():
            return
        if not self.path.is_file():
            raise UserError(
                f"{self.path} is no plain file, so that no answers can be kept in it; name another with cache="
            )
        damaged = 0
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise UserError(
                f"the kept answers in {self.path} cannot be read ({error.strerror}); name another file with cache="
            ) from None
        for line in data.split(b"\n"):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                key, answer = entry["key"], entry["answer"]
            except (ValueError, LookupError, TypeError, RecursionError):
                key = answer = None
            if isinstance(key, str) and isinstance(answer, str):
                self.known[key] = answer
            else:
                damaged += 1
        self._torn = bool(data) and not data.endswith(b"\n")
        if damaged:
            warn(f"{self.path}: {damaged} damaged line(s) are passed over; what they answered is asked again")

    @staticmethod
    def key(identity: str, prompt: str) -> str:
        """Names an answer."""
        return hashlib.sha256(json.dumps([identity, prompt]).encode()).hexdigest()

    def get(self, key: str) -> str | None:
        return self.known.get(key)

    def put(self, key: str, prompt: str, answer: str) -> None:
        """Keep one answer. Raises UserError where the file cannot be written: what it holds stays."""
        self.known[key] = answer
        if self.path is None:
            return
        line = json.dumps({"key": key, "prompt": prompt, "answer": answer}).encode() + b"\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open_to_append(self.path) as file:  # one write: lines of several processes do not mix
                file.write(b"\n" + line if self._torn else line)
        except OSError as error:
            self._torn = True
            raise UserError(
                f"cannot write the answers to {self.path} ({error.strerror}); make room there, or name another file "
                "with cache="
            ) from None
        self._torn = False


def ask(
    labeller: Labeller,
    prompts: Sequence[str],
    answers: Answers | None = None,
    *,
    title: str = "asking",
    quiet: bool = False,
    limit: int | None = None,
) -> tuple[list[str], Counts]:
    """(an answer for each prompt, counts). Equal questions are sent once, and those in `answers` not at all.

    Whatever stops it, an error or Ctrl-C, answers that came before are in `answers`. limit: of new questions.
    Raises UserError.
    """
    answers = answers or Answers()
    identity = labeller.identity
    keys = [Answers.key(identity, prompt) for prompt in prompts]
    unique = dict(zip(keys, prompts, strict=True))
    new = {key: prompt for key, prompt in unique.items() if answers.get(key) is None}
    counts = Counts(prompts=len(unique), cached=len(unique) - len(new))
    if limit is not None and len(new) > limit:
        raise UserError(
            f"{len(new):,} questions are to be asked, more than max_prompts={limit:,}: ask for less, or set "
            f"max_prompts={len(new)}"
        )
    waiting, texts, got = list(new), list(new.values()), 0
    with Progress(title, len(unique), "answers", quiet, counts.cached) as bar:
        try:
            for index, answer in _stream(labeller, texts):
                answers.put(waiting[index], texts[index], answer)
                got += 1
                bar.update(counts.cached + got)
        except (UserError, KeyboardInterrupt) as error:
            count = counts.cached + got
            progress = f"{count:,} of {len(unique):,} answers are kept" + (
                f" in {answers.path}" if answers.path else " in memory"
            )
            if isinstance(error, KeyboardInterrupt):
                if answers.path is not None and not quiet:
                    bar.say(f"stopped; {progress}: the same command goes on from there")
                raise
            raise UserError(
                f"{error}; {progress}: the same command goes on from there" if answers.path else str(error)
            ) from None
    if got < len(new):
        raise UserError(f"{identity[:80]} gave {got} answers to {len(new)} questions")
    return [answers.known[key] for key in keys], counts


def _stream(labeller: Any, prompts: list[str]) -> Iterator[tuple[int, str]]:
    """(index, answer) as they come."""
    if not prompts:  # then it needs no key
        return
    if callable(getattr(labeller, "stream", None)):
        yield from labeller.stream(prompts)
        return
    where = f"the labeller {type(labeller).__name__}"
    for start in range(0, len(prompts), CHUNK):
        part = prompts[start : start + CHUNK]
        texts = guarded(where, labeller.complete, part)
        if len(texts) != len(part) or not all(isinstance(answer, str) for answer in texts):
            raise UserError(f"{where}: complete() must give one text for each of {len(part)} prompts")
        yield from enumerate(texts, start)
