"""TRINITY_NATS_URL may have a password: no line has it, of a service or a command, while NATS is away or refuses."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess

pytestmark = [pytest.mark.extended, pytest.mark.timeout(120)]

PASSWORD = "s3cr3t-of-nats"


async def until(service: ServiceProcess, event: str) -> None:
    async with asyncio.timeout(60):
        while not any(line["event"] == event for line in service.events()):
            await asyncio.sleep(0.05)


async def test_a_password_is_in_no_line(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", f'authorization {{ user: trinity, password: "{PASSWORD}" }}\n')
    server.start()
    url = server.url.replace("//", f"//trinity:{PASSWORD}@")
    sync = ServiceProcess("sync", tmp_path, NATS_URL=url).start()
    (tmp_path / "wrong").mkdir()
    wrong = ServiceProcess("sync", tmp_path / "wrong", NATS_URL=url.replace("trinity:", "other:"))
    try:
        server.kill()
        await until(sync, "nats.client.disconnected")
        status = [sys.executable, "-m", "trinity.cli.main", "status", "--nats", url, "--run", "none"]
        said = await asyncio.to_thread(subprocess.run, status, capture_output=True, text=True, timeout=100)
        assert said.returncode != 0
        server.start()
        await until(sync, "nats.client.reconnected")
        assert wrong.start(wait_seconds=0).wait(60) != 0, "NATS refuses the user"
    finally:
        sync.kill()
        server.kill()
    lines = {str(path): path.read_text() for path in tmp_path.glob("**/sync.*")}
    assert len(lines) == 4 and all(lines.values())
    lines |= {"stdout": said.stdout, "stderr": said.stderr}
    assert not [name for name, text in lines.items() if PASSWORD in text]
