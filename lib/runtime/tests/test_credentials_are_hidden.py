"""The user, password or token of a URL is in no log line and in no error."""

import asyncio
import io
import json
import logging
from pathlib import Path

import pytest
import structlog

from support.servers.nats import NatsServer
from trinity.config import Config
from trinity.reading.job import Job, SupervisorRecord
from trinity.runtime import logs
from trinity.runtime.broker import connect
from trinity.runtime.errors import Unauthenticated, Unavailable
from trinity.runtime.process import free_port

pytestmark = pytest.mark.core

SECRET = "s3cr3t"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("nats://user:s3cr3t@host:4222", "nats://***@host:4222"),
        ("nats://s3cr3t@host", "nats://***@host"),
        ("tls://u:s3@cr3t@a,nats://u:s3cr3t@b", "tls://***@a,nats://***@b"),
        ("at postgresql+psycopg://me:s3cr3t@db/x: no answer", "at postgresql+psycopg://***@db/x: no answer"),
        ("nats://host:4222", "nats://host:4222"),
        ("mail a@b or http://host/a@b", "mail a@b or http://host/a@b"),
    ],
)
def test_what_is_shown_of_a_url(text: str, shown: str) -> None:
    assert logs.without_credentials(text) == shown


async def test_a_disconnect_does_not_print_the_password(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", f'authorization {{ user: trinity, password: "{SECRET}" }}\n')
    server.start()
    url = server.url.replace("//", f"//trinity:{SECRET}@")
    try:
        with structlog.testing.capture_logs() as events:
            async with await connect(url, "test"):
                server.kill()
                async with asyncio.timeout(10):
                    while not events:
                        await asyncio.sleep(0.05)
    finally:
        server.stop()
    assert events[0]["event"] == "nats.client.disconnected"
    assert SECRET not in str(events)


async def test_an_error_does_not_print_the_password() -> None:
    url = f"nats://trinity:{SECRET}@127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable) as error:
        await connect(url, "test", wait_seconds=0.3)
    assert "nats://***@127.0.0.1" in str(error.value)
    assert SECRET not in str(error.value)


async def test_a_refused_user_is_named_at_once_and_the_password_is_not(tmp_path: Path) -> None:
    server = NatsServer(tmp_path / "nats", 'authorization { user: trinity, password: "another" }\n')
    server.start()
    try:
        with structlog.testing.capture_logs() as events, pytest.raises(Unauthenticated) as error:
            await connect(server.url.replace("//", f"//trinity:{SECRET}@"), "test", wait_seconds=300)
    finally:
        server.stop()
    assert "nats://***@127.0.0.1" in str(error.value)
    assert "refuses trinity:" in str(error.value)
    assert SECRET not in str(error.value) + str(events)


def test_no_log_line_has_a_password(tmp_path: Path) -> None:
    root, before = logging.getLogger(), logging.getLogger().handlers
    level, stream, file = root.level, io.StringIO(), tmp_path / "service.log"
    try:
        logs.configure("test", file=file, stream=stream)
        structlog.get_logger("ours").warning("lost", server=f"nats://u:{SECRET}@host", count=1)
        logging.getLogger("theirs").warning("lost nats://u:%s@host", SECRET)
        for handler in root.handlers:
            handler.flush()
    finally:
        root.handlers, root.level = before, level
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
    assert SECRET not in stream.getvalue() + file.read_text()
    assert stream.getvalue().count("***@host") == 2


def test_the_record_of_a_run_is_the_owners_alone(tmp_path: Path) -> None:
    job = Job(Config.model_validate({"project": "p", "name": "n", "checkpoint_root_dir": str(tmp_path)}))
    job.write_record("main", SupervisorRecord(1, "both", "r", "s", f"nats://u:{SECRET}@host"))
    path = job.folder / "run" / "main.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert json.loads(path.read_text())["nats_url"] == "nats://host"
