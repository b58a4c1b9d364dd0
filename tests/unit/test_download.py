"""Downloads from a server on this machine that breaks in every way."""

from __future__ import annotations

import http.server
import io
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from offrl import registry
from offrl.data import DatasetConfig, load_dataset
from offrl.data.formats import d4rl
from offrl.data.formats.download import fetch
from offrl.errors import UserError
from offrl.tasks.task import Task


def hdf5_bytes() -> bytes:
    rng, n = np.random.default_rng(0), 3000
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file["observations"] = rng.normal(size=(n, 11)).astype(np.float32)
        file["actions"] = rng.uniform(-1, 1, (n, 3)).astype(np.float32)
        file["rewards"] = rng.normal(size=n).astype(np.float32)
        file["terminals"] = rng.random(n) < 0.01
        file["timeouts"] = np.arange(n) % 1000 == 999
    return buffer.getvalue()


DATA = hdf5_bytes()


class Server:
    """What the handler serves, how it misbehaves, and what it was asked."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {"/sets/a.hdf5": DATA}
        self.cut_after: list[int] = []  # close the connection after so many bytes, one entry per answer
        self.ranges = True
        self.chunked = False  # the first answer comes in chunks, without its length
        self.etag = '"1"'
        self.asked: list[tuple[str, str | None]] = []
        server = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                server.asked.append((self.path, wanted))
                body = server.files.get(self.path)
                if body is None:
                    self.send_error(404)
                    return
                start = 0
                if wanted and server.ranges and self.headers.get("If-Range", server.etag) == server.etag:
                    start = int(wanted.removeprefix("bytes=").rstrip("-"))
                    if start >= len(body):
                        self.send_response(416)
                        self.send_header("Content-Range", f"bytes */{len(body)}")
                        self.end_headers()
                        return
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
                else:
                    self.send_response(200)
                chunked, server.chunked = server.chunked, False
                if chunked:
                    self.send_header("Transfer-Encoding", "chunked")
                else:
                    self.send_header("Content-Length", str(len(body) - start))
                self.send_header("ETag", server.etag)
                self.end_headers()
                stop = start + server.cut_after.pop(0) if server.cut_after else len(body)
                if chunked:  # one chunk, and then neither another nor the end
                    self.wfile.write(f"{stop - start:x}\r\n".encode() + body[start:stop] + b"\r\n")
                else:
                    self.wfile.write(body[start:stop])

            def log_message(self, *args: object) -> None:
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for variable in ("OFFRL_MIRROR", "OFFRL_CACHE", "D4RL_DATASET_DIR", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("offrl.data.formats.transfer.time.sleep", lambda seconds: None)
    made = Server()
    thread = threading.Thread(target=lambda: made.http.serve_forever(poll_interval=0.01), daemon=True)
    thread.start()
    yield made
    made.http.shutdown()
    made.http.server_close()


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if not p.name.endswith(".lock"))


def test_a_whole_download(server: Server, tmp_path: Path) -> None:
    path = fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify)
    assert path.read_bytes() == DATA and leftovers(tmp_path) == ["a.hdf5", "a.hdf5.json"]
    record = json.loads((tmp_path / "a.hdf5.json").read_text())
    assert record["size"] == len(DATA) and len(record["sha256"]) == 64
    fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify)
    assert len(server.asked) == 1  # the second time nothing is asked


def test_broken_connections_are_resumed_where_they_broke(server: Server, tmp_path: Path) -> None:
    server.cut_after = [50_000, 1, 30_000]
    path = fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify)
    assert path.read_bytes() == DATA
    assert [r for _, r in server.asked] == [None, "bytes=50000-", "bytes=50001-", "bytes=80001-"]


def test_a_download_continues_in_the_next_call(server: Server, tmp_path: Path) -> None:
    server.cut_after = [60_000] + [0] * 10  # then the server sends headers and nothing else
    with pytest.raises(UserError, match=r"60000 bytes are kept and the next attempt continues"):
        fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify)
    assert not (tmp_path / "a.hdf5").exists() and (tmp_path / "a.hdf5.part").stat().st_size == 60_000
    server.cut_after, server.asked = [], []
    assert fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify).read_bytes() == DATA
    assert server.asked == [("/sets/a.hdf5", "bytes=60000-")]


def test_a_server_without_ranges_starts_again(server: Server, tmp_path: Path) -> None:
    server.ranges, server.cut_after = False, [70_000]
    assert fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify).read_bytes() == DATA
    assert len(server.asked) == 2  # the second answer is whole and is not put after the first one's start


def test_a_broken_chunked_answer_keeps_what_arrived(server: Server, tmp_path: Path) -> None:
    server.chunked, server.cut_after = True, [40_000]
    assert fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify).read_bytes() == DATA
    assert [r for _, r in server.asked] == [None, "bytes=40000-"]


def test_a_file_that_changed_meanwhile_is_not_glued_together(server: Server, tmp_path: Path) -> None:
    server.cut_after = [60_000] + [0] * 10
    with pytest.raises(UserError):
        fetch(f"{server.url}/sets/a.hdf5", tmp_path, lambda path: None)
    server.files["/sets/a.hdf5"], server.etag, server.cut_after = DATA[::-1], '"2"', []
    assert fetch(f"{server.url}/sets/a.hdf5", tmp_path, lambda path: None).read_bytes() == DATA[::-1]


def test_a_finished_part_is_only_renamed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "a.hdf5.part").write_bytes(DATA)
    (tmp_path / "a.hdf5.part.json").write_text(json.dumps({"url": f"{server.url}/sets/a.hdf5", "version": '"1"'}))
    assert fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify).read_bytes() == DATA
    assert leftovers(tmp_path) == ["a.hdf5", "a.hdf5.json"]


def test_what_is_no_data_set_is_not_kept(server: Server, tmp_path: Path) -> None:
    server.files["/sets/a.hdf5"] = b"<html>please log in</html>"
    with pytest.raises(UserError, match=r"damaged and was removed.*cannot be read as HDF5"):
        fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify)
    assert leftovers(tmp_path) == []


def test_a_truncated_file_in_the_cache_is_downloaded_again(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify)
    path.write_bytes(DATA[:1000])
    assert fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify).read_bytes() == DATA
    assert "downloading it again" in capsys.readouterr().err


def test_offline_says_what_to_do(server: Server, tmp_path: Path) -> None:
    server.http.shutdown()
    server.http.server_close()
    with pytest.raises(UserError) as caught:
        fetch(f"{server.url}/sets/a.hdf5", tmp_path, d4rl.verify, title="D4RL dataset a")
    text = str(caught.value)
    assert (
        f"{server.url}/sets/a.hdf5" in text
        and str(tmp_path / "a.hdf5") in text
        and "dataset.mirror" in text
        and "\n" not in text
    )


def test_a_missing_file_is_asked_for_once(server: Server, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="404"):
        fetch(f"{server.url}/sets/b.hdf5", tmp_path, d4rl.verify)
    assert len(server.asked) == 1


def test_mirrors(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    official = "http://unreachable.invalid/root/sets/a.hdf5"
    assert fetch(official, tmp_path / "1", d4rl.verify, mirror=server.url).read_bytes() == DATA  # prefix/sets/a.hdf5
    server.files = {"/flat/a.hdf5": DATA}
    # prefix/a.hdf5
    assert fetch(official, tmp_path / "2", d4rl.verify, mirror=f"{server.url}/flat/").read_bytes() == DATA
    folder = tmp_path / "disk" / "sets"
    folder.mkdir(parents=True)
    (folder / "a.hdf5").write_bytes(DATA)
    monkeypatch.setenv("OFFRL_MIRROR", str(tmp_path / "disk"))
    assert fetch(official, tmp_path / "3", d4rl.verify).read_bytes() == DATA
    with pytest.raises(UserError, match=r"has no b\.hdf5"):
        fetch("http://unreachable.invalid/root/sets/b.hdf5", tmp_path / "3", d4rl.verify)


def test_loading_by_name(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task(
        "made-up-v2",
        url=f"{server.url}/sets/a.hdf5",
        observation_dim=11,
        action_dim=3,
        ref_min=0.0,
        ref_max=10.0,
        ref_label="D4RL",
    )
    registry.names("task")
    monkeypatch.setitem(registry._table["task"], "test", lambda name: task if name == "made-up-v2" else None)
    data = load_dataset(DatasetConfig(name="made-up-v2", cache_dir=str(tmp_path)))
    assert data.spec.name == "made-up-v2" and data.spec.task == task and len(data) == 3000
    assert (tmp_path / "d4rl" / "a.hdf5").is_file()
    monkeypatch.setenv("D4RL_DATASET_DIR", str(tmp_path / "d4rl"))  # a file that is already there is used
    server.asked.clear()
    load_dataset(DatasetConfig(name="made-up-v2", cache_dir=str(tmp_path / "other")))
    assert server.asked == []


def test_an_unwritable_cache(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cache_dir"):
        fetch(f"{server.url}/sets/a.hdf5", tmp_path / "file" / "sub", d4rl.verify)
