"""The full disk of a nats-server that `trinity run` did not start is named by whoever cannot store a message there."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.nats import NatsServer
from trinity.cli.supervise.stage import disk
from trinity.cli.supervise.stage.disk import DiskWatch
from trinity.runtime.broker import StreamSpec, connect, ensure_streams
from trinity.runtime.errors import TrinityError

pytestmark = pytest.mark.extended

DISK_MB = 8


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}M", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize("filled_mb", [6.5, 0.0], ids=["by others", "by its own messages"])
async def test_a_run_waits_for_room_and_says_where(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filled_mb: float
) -> None:
    monkeypatch.setattr(disk, "_NATS_AGAIN_SECONDS", 0.01)
    server, filler = NatsServer(small_disk), small_disk / "filler"
    said: list[str] = []
    server.start()
    try:
        async with await connect(server.url, "tests") as broker:
            await ensure_streams(broker, [StreamSpec("S", ("s.>",))])
            filler.write_bytes(bytes(int(filled_mb * 2**20)))
            with pytest.raises(TrinityError) as failed:
                for number in range(DISK_MB * 15):
                    await broker.publish("s.x", os.urandom(100_000), message_id=str(number), deadline_seconds=3)
            watched = DiskWatch([tmp_path], 0.0, None, said.append)
            assert await watched.hold("buffer", f"{type(failed.value).__name__}: {failed.value}")
            assert "the NATS of TRINITY_NATS_URL has no room, and buffer waits for it" in said[0]
        server.kill()
        filler.unlink()
        server.start()
        async with await connect(server.url, "tests") as broker:
            if filled_mb:
                await broker.publish("s.x", b"there is room again", message_id="last")
    finally:
        server.kill()
