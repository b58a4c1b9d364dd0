"""What a server of datasets may send: how much, which bytes, and where it may lead (row 22 of the table of attacks in
issue 37).
"""

from __future__ import annotations

import hashlib
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from offrl.data import DatasetConfig
from offrl.data.formats import d4rl, ogbench, transfer
from offrl.data.formats.download import fetch
from offrl.data.formats.transfer import GB
from offrl.envs import d4rl as table
from offrl.envs import neorl2
from offrl.errors import UserError
from offrl.system import addresses
from offrl.tasks.task import Task, lookup

DATA = b"whatever a dataset is" * 500
KNOWN = len(DATA), hashlib.sha256(DATA).hexdigest()
Answer = Callable[[http.server.BaseHTTPRequestHandler], None]


class Server:
    """What it does with a request, and the headers of those that came."""

    def __init__(self) -> None:
        self.answer: Answer = send()
        self.headers: list[dict[str, str]] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.headers.append(dict(self.headers))
                try:
                    server.answer(self)
                except OSError:  # who asked has had enough
                    self.close_connection = True

            def log_message(self, *args: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/sets"


def send(body: bytes = DATA, status: int = 200, announce: Any = None, **headers: str) -> Answer:
    """An answer; announce: its Content-Length where that is not true, "" for none."""

    def answer(handler: http.server.BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        if (length := len(body) if announce is None else announce) != "":
            handler.send_header("Content-Length", str(length))
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(body)

    return answer


def endless(handler: http.server.BaseHTTPRequestHandler) -> None:
    send(b"", announce="")(handler)
    while True:
        handler.wfile.write(b"\0" * 65536)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for variable in (
        "OFFRL_MIRROR",
        "OFFRL_CACHE",
        "D4RL_DATASET_DIR",
        "OGBENCH_DATASET_DIR",
        "http_proxy",
        "HTTP_PROXY",
    ):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("offrl.data.formats.transfer.time.sleep", lambda seconds: None)
    made = Server()
    threading.Thread(target=lambda: made.http.serve_forever(poll_interval=0.01), daemon=True).start()
    yield made
    made.http.shutdown()
    made.http.server_close()


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock")) if folder.is_dir() else []


def get(server: Server, folder: Path, **more: Any) -> Path:
    return fetch(f"{server.url}/a.bin", folder, lambda path: None, **more)


def test_an_endless_download_ends_at_the_limit(server: Server, tmp_path: Path) -> None:
    """Row 22: a server that announces no length filled the disk, 2 GB in six seconds."""
    server.answer = endless
    with pytest.raises(UserError, match=r"more than 0\.001 GB are not downloaded.*dataset\.download_limit_gb="):
        get(server, tmp_path, limit_gb=0.001)
    assert leftovers(tmp_path) == []
    with pytest.raises(
        UserError, match=rf"is not the known file: it has [\d,]+ bytes or more, the known one {KNOWN[0]:,}"
    ):
        get(server, tmp_path, known=KNOWN)
    assert leftovers(tmp_path) == []


def test_an_announced_size_over_the_limit_is_refused_before_a_byte_is_read(server: Server, tmp_path: Path) -> None:
    """Row 22."""
    server.answer = send(b"", announce=10**12)
    with pytest.raises(UserError, match=r"1e\+03 GB or more, and more than 100 GB"):
        get(server, tmp_path)
    with pytest.raises(UserError, match="is not the known file"):
        get(server, tmp_path, known=KNOWN)
    assert len(server.headers) == 2 and leftovers(tmp_path) == []


def test_a_file_at_the_limit_is_whole_and_a_broken_one_goes_on(server: Server, tmp_path: Path) -> None:
    """Row 22: honest downloads are as before, up to the last byte of the limit."""

    def first(handler: http.server.BaseHTTPRequestHandler) -> None:
        server.answer = send(DATA[4000:], 206, **{"Content-Range": f"bytes 4000-{len(DATA) - 1}/{len(DATA)}"})
        send(DATA[:4000], announce=len(DATA))(handler)
        handler.close_connection = True

    server.answer = first
    assert get(server, tmp_path, limit_gb=len(DATA) / GB, known=KNOWN).read_bytes() == DATA
    assert server.headers[1]["Range"] == "bytes=4000-"


def test_other_bytes_than_the_known_ones_are_not_kept(server: Server, tmp_path: Path) -> None:
    """Row 22: no checksum was pinned anywhere; a host, or who stands before it, could serve other data of the same
    shape.
    """
    server.answer = send(DATA[::-1])
    read: list[Path] = []
    with pytest.raises(
        UserError,
        match=rf"is not the known one: its SHA-256 is \w{{64}}, that of the known one {KNOWN[1]}; it was removed",
    ):
        fetch(f"{server.url}/a.bin", tmp_path, read.append, known=KNOWN)
    assert leftovers(tmp_path) == [] and read == []  # nothing has opened it
    server.answer = send()
    assert get(server, tmp_path, known=KNOWN).read_bytes() == DATA


def test_the_second_download_must_be_the_first(server: Server, tmp_path: Path) -> None:
    """Row 22: where no checksum is known the first download's is noted, and a later one that differs is refused, with
    the cure.
    """
    path = get(server, tmp_path)
    assert json.loads((tmp_path / "a.bin.json").read_text())["sha256"] == KNOWN[1]
    path.unlink()
    server.answer = send(DATA[::-1])
    with pytest.raises(
        UserError, match=r"is another one than was downloaded before.*remove .*a\.bin\.json and try again"
    ):
        get(server, tmp_path)
    assert leftovers(tmp_path) == ["a.bin.json"]
    (tmp_path / "a.bin.json").unlink()
    assert get(server, tmp_path).read_bytes() == DATA[::-1]


def test_a_mirror_serves_the_same_bytes_and_a_folder_of_ones_own_what_it_likes(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 22."""
    server.answer = send(DATA[::-1])
    official = "https://unreachable.invalid/root/sets/a.bin"
    with pytest.raises(UserError, match="is not the known one"):
        fetch(official, tmp_path / "1", lambda path: None, server.url, known=KNOWN)
    (tmp_path / "a.bin").write_bytes(DATA[::-1])
    assert fetch(official, tmp_path / "2", lambda path: None, str(tmp_path), known=KNOWN).read_bytes() == DATA[::-1]
    assert "is not the known one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("start", "target", "allowed"),
    [
        ("https", "http://h/x", False),
        ("https", "ftp://h/x", False),
        ("http", "file:///etc/passwd", False),
        ("http", "ftp://h/x", False),
        ("https", "https://h/x", True),
        ("http", "https://h/x", True),
        ("http", "http://h/x", True),
    ],
)
def test_no_redirect_leads_to_where_nothing_protects(start: str, target: str, allowed: bool) -> None:
    """Row 22: from https a server could send a download on to plain http, and from there to ftp."""
    request = transfer.urllib.request.Request(f"{start}://host/a", headers={"User-Agent": "offrl"})
    request.add_unredirected_header("Authorization", "Basic x")
    redirects = transfer._Redirects()
    if allowed:
        new = redirects.redirect_request(request, None, 302, "", {}, target)
        assert new.full_url == target and not new.has_header("Authorization")
    else:
        with pytest.raises(UserError, match=rf"redirects to {target.partition(':')[0]}://"):
            redirects.redirect_request(request, None, 302, "", {}, target)


@pytest.mark.parametrize(
    ("target", "words"), [("ftp://127.0.0.1:1/a.bin", "redirects to ftp://"), ("file:///etc/hostname", "302")]
)
def test_a_download_that_is_led_away_leaves_nothing(server: Server, tmp_path: Path, target: str, words: str) -> None:
    """Row 22 (to files it was refused before)."""
    server.answer = send(b"", 302, Location=target)
    with pytest.raises(UserError, match=words):
        get(server, tmp_path)
    assert leftovers(tmp_path) == []


def test_a_mirror_with_a_login(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Row 8: NAME:PASSWORD@ in a mirror's address is sent as a login, and stands in no file and no message."""
    mirror = server.url.replace("://", "://user:pass-word-99@")
    official = "https://unreachable.invalid/root/sets/a.bin"
    fetch(official, tmp_path / "1", lambda path: None, mirror)
    assert (
        server.headers[0]["Authorization"] == "Basic dXNlcjpwYXNzLXdvcmQtOTk="
        and "user" not in server.headers[0]["Host"]
    )
    for answer in (send(status=401), send(status=500), send(b"", announce=10**13), send(DATA[:10], announce=100)):
        server.answer = answer
        with pytest.raises(UserError) as caught:
            fetch(official, tmp_path / "2", lambda path: None, mirror)
        assert "pass-word-99" not in str(caught.value) and "user:" not in str(caught.value)
    server.answer = send(status=401)
    with pytest.raises(UserError, match=r"wants a login: OFFRL_MIRROR=https://NAME:PASSWORD@HOST"):
        fetch(official, tmp_path / "3", lambda path: None, server.url)
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert b"pass-word-99" not in written and "pass-word-99" not in capsys.readouterr().err


def test_plain_http_to_another_host_is_said_where_no_checksum_protects(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 22."""
    get(server, tmp_path / "1")
    assert capsys.readouterr().err == ""  # this machine
    monkeypatch.setattr(addresses, "HERE", ())
    get(server, tmp_path / "2", known=KNOWN)
    assert capsys.readouterr().err == ""
    get(server, tmp_path / "3")
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and "is not encrypted" in line and KNOWN[1] in line


def test_the_tables_of_known_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row 22: D4RL over https with sizes and SHA-256 for the files where TensorFlow Datasets lists them; the setting
    reaches `fetch`.
    """
    asked: list[tuple[str, Any, Any]] = []

    def note(url: str, *_: Any, known: Any = None, limit_gb: float) -> Path:
        asked.append((url, known, limit_gb))
        return tmp_path

    monkeypatch.setattr(d4rl, "fetch", note)
    monkeypatch.setattr(ogbench, "fetch", note)
    monkeypatch.setenv("HOME", str(tmp_path))
    config = DatasetConfig(download_limit_gb=7.0)
    task = lookup("hopper-medium-v2")
    assert isinstance(task, Task)
    d4rl.locate(task, config)
    ogbench.locate("antmaze-large-navigate-v0", config)
    assert all(url.startswith("https://") and limit == 7.0 for url, _, limit in asked)
    assert asked[0][1] == (152_756_557, "5bdf1bc4a713c82941de44633df669b36c89850b652a25985166796d25cf71a0")
    urls = {url for url, *_ in table.table().values()}
    assert len(table.files()) == 97 and set(table.files()) <= urls
    assert all(size > 10**6 and re.fullmatch("[0-9a-f]{64}", digest) for size, digest in table.files().values())
    assert len({digest for _, digest in table.files().values()}) == 97
    gym = [n for n, row in table.table().items() if n.endswith("-v2") and "gym_mujoco_v2" in row[0]]
    assert len(gym) == 24 and all(lookup(n).file for n in gym)  # type: ignore[union-attr]


def test_a_neorl2_file_is_compared_with_the_published_checksum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Row 22: its host is plain http; the package publishes MD5s, which the message with the address and the loader now
    have.
    """
    monkeypatch.setenv("OFFRL_NEORL2", str(tmp_path))
    monkeypatch.setattr(neorl2, "read", lambda name, path, config: path)
    with pytest.raises(
        UserError,
        match=r"http://datasets\.polixir\.site/neorl2/DMSD/DMSD-train\.npz \(MD5 88dfa39aa18904e809056b51c2e6319b\)",
    ):
        neorl2._load("DMSD", DatasetConfig())
    (tmp_path / "DMSD-train.npz").write_bytes(DATA)
    neorl2._load("DMSD", DatasetConfig())
    assert "is not the file that NeoRL-2 published" in capsys.readouterr().err
    monkeypatch.setitem(neorl2.MD5, "DMSD", hashlib.md5(DATA).hexdigest())
    neorl2._load("DMSD", DatasetConfig())
    assert capsys.readouterr().err == "" and set(neorl2.MD5) == set(neorl2.TASKS)
