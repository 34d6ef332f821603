"""A run pauses while a disk is full, says so, and continues by itself; a nats-server that keeps its error restarts."""

import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from trinity.cli.supervise.stage import disk
from trinity.cli.supervise.stage.disk import DiskWatch
from trinity.reading.children import Child

pytestmark = pytest.mark.core

TOTAL, WANTED = 100e9, 200e6


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The free bytes of every disk."""
    known = SimpleNamespace(bytes=50e9)

    def statvfs(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(f_bavail=known.bytes, f_blocks=TOTAL, f_frsize=1, f_favail=9, f_files=9)

    monkeypatch.setattr(disk, "os", SimpleNamespace(statvfs=statvfs, stat=disk.os.stat))
    for name in ("_LOOK_SECONDS", "_HEALTH_SECONDS", "_AGAIN_SECONDS"):
        monkeypatch.setattr(disk, name, 0.01)
    return known


def watch(folder: Path, said: list[str], nats: Child | None = None) -> DiskWatch:
    return DiskWatch([folder, folder.parent], 0.0, nats, said.append)


async def test_the_disk_is_named_once_and_again_when_it_has_room(free: SimpleNamespace, tmp_path: Path) -> None:
    said: list[str] = []
    watched = watch(tmp_path, said)
    for free.bytes in (50e9, 0, 0, 100e6, 199e6, 0):
        watched.look()
    assert said == [f"disk of {tmp_path.parent} is full, 0 B free; the run waits for 200 MB"]
    free.bytes = 300e6
    watched.look()
    assert said[1:] == [f"disk of {tmp_path.parent} has 300 MB free again; the run continues"]


async def test_a_process_that_cannot_write_waits_for_room_whatever_it_died_of(
    free: SimpleNamespace, tmp_path: Path
) -> None:
    said: list[str] = []
    watched = watch(tmp_path, said)
    assert not await watched.hold("trainer", "exit code 1")
    free.bytes = 0
    watching = asyncio.create_task(watched.run())
    held = asyncio.create_task(watched.hold("trainer", "exit code 1"))
    await asyncio.sleep(0.1)
    assert not held.done()
    free.bytes = 2 * WANTED
    assert await asyncio.wait_for(held, 5)
    watching.cancel()


async def test_room_that_was_too_little_for_a_write_is_not_tried_again(free: SimpleNamespace, tmp_path: Path) -> None:
    said: list[str] = []
    watched = watch(tmp_path, said)
    free.bytes = 1e9
    watching = asyncio.create_task(watched.run())
    held = asyncio.create_task(watched.hold("trainer", "OSError: [Errno 28] No space left on device: 'model'"))
    await asyncio.sleep(0.1)
    assert not held.done() and said == [f"disk of {tmp_path.parent} is full, 1 GB free; the run waits for 1.2 GB"]
    free.bytes = 1.3e9
    assert await asyncio.wait_for(held, 5)
    watching.cancel()


async def test_the_disk_of_the_path_in_an_error_is_named(
    free: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    (tmp_path / "other").mkdir()
    watched = watch(tmp_path, said)
    own = disk.os.stat

    def stat(folder: Path) -> object:
        return SimpleNamespace(st_dev=99) if "other" in str(folder) else own(folder)

    monkeypatch.setattr(disk.os, "stat", stat)
    reason = f"OSError: [Errno 28] No space left on device: '{tmp_path}/other/model.safetensors'"
    held = asyncio.create_task(watched.hold("explorer", reason))
    await asyncio.sleep(0.05)
    assert said == [f"disk of {tmp_path}/other is full, 50 GB free; the run waits for 50.2 GB"]
    free.bytes = 60e9
    assert await asyncio.wait_for(held, 5)


@pytest.fixture
def broken_nats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Child]:
    """A process whose /healthz tells a write error. It is near, so a proxy of the shell is not asked."""
    for name in ("http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(503 if self.path == "/healthz" else 200)
            self.end_headers()
            error = {"error": "stream 'A' write error: 1.blk: no space left on device"}
            store = {"storage": 990_000_000, "config": {"max_storage": 1_000_000_000}}
            self.wfile.write(json.dumps(error if self.path == "/healthz" else store).encode())

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    address = f"127.0.0.1:{server.server_port}"
    child = Child("nats", "nats", command, {}, "", tmp_path / "nats.log", metrics=address)
    child.start()
    yield child
    child.end_group(9)
    server.shutdown()


async def test_a_nats_server_that_keeps_a_write_error_is_ended_once_there_is_room(
    free: SimpleNamespace, tmp_path: Path, broken_nats: Child
) -> None:
    said: list[str] = []
    free.bytes = 0
    watched = watch(tmp_path, said, broken_nats)
    watching = asyncio.create_task(watched.run())
    await asyncio.sleep(0.3)
    assert broken_nats.is_running(), "it would meet the same disk"
    free.bytes = 2 * WANTED
    async with asyncio.timeout(10):
        while broken_nats.is_running():
            await asyncio.sleep(0.01)
    watching.cancel()
    assert "nats-server keeps an error of the full disk; it is started again" in said
    assert sum(line.startswith("NATS refuses messages: JetStream holds 990 MB of 1 GB, ") for line in said) == 1
    assert await watched.hold("nats", "Server Exiting.."), "no start is spent on it"


@pytest.mark.parametrize("said_by_nats", ["write 2.blk: no space left on device", "insufficient storage resources"])
async def test_the_disk_of_another_ones_nats_is_not_looked_for_here(
    free: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said_by_nats: str
) -> None:
    monkeypatch.setattr(disk, "_NATS_AGAIN_SECONDS", 0.01)
    said: list[str] = []
    watched = watch(tmp_path, said)
    reason = f"NATS did not store a message on trinity.r.batches.4 within 60 s: {said_by_nats}; raise TRINITY_BUFFER"
    for _ in range(3):
        assert await asyncio.wait_for(watched.hold("buffer", reason), 5), "a full NATS costs no start"
    (line,) = said
    assert line.startswith("the NATS of TRINITY_NATS_URL has no room, and buffer waits for it: NATS did not store")
    assert said_by_nats in line and str(tmp_path) not in line
    full_log = "NATS did not store a message on trinity.r.batches.4 within 60 s: maximum bytes exceeded"
    assert not await watched.hold("buffer", full_log), "the run's own limit ends the run with its reason"
