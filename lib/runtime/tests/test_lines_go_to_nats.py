"""The log lines of a service reach its run's stream on NATS; a NATS that is away never holds the service up."""

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from support.servers.nats import NatsServer
from trinity.runtime import broker, log_stream, logs
from trinity.runtime.broker import Broker, connect, ensure_streams
from trinity.runtime.names import RunNames, owner_of
from trinity.runtime.process import free_port
from trinity.runtime.settings import NO_RUN, NatsSettings
from trinity.runtime.trust.roles import Role

pytestmark = pytest.mark.core

RUN, OTHER = RunNames("a-run"), RunNames("b-run")
_SECONDS = 60.0

log = structlog.get_logger("test")


@pytest.fixture(autouse=True)
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process with a log file, whose handlers and credentials are gone after the test."""
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", root.handlers)
    monkeypatch.setattr(root, "level", root.level)
    logs.configure("explorer", file=tmp_path / "explorer.log")
    yield
    senders = list(log_stream._senders)
    log_stream.stop()
    for sender in senders:  # what they say would be among the next test's lines
        sender._thread.join(_SECONDS)
    broker.configure(None, None)
    structlog.contextvars.clear_contextvars()


async def make(connection: Broker, *runs: RunNames, mib: int = 1) -> None:
    await ensure_streams(connection, [log_stream.stream_spec(run, mib=mib, hours=1.0, replicas=1) for run in runs])


async def stored(connection: Broker, run: RunNames, event: str) -> list[tuple[str, dict[str, Any]]]:
    """The subject and the fields of every line of a run, once this event is among them."""
    async with asyncio.timeout(_SECONDS):
        while True:
            messages = await connection.several(run.lines_stream, 1, 1000)
            found = [(message.subject, json.loads(line)) for message in messages for line in message.data.split(b"\n")]
            if event in [fields["event"] for _, fields in found]:
                return found
            await asyncio.sleep(0.05)


def settings(server: NatsServer, role: Role, run: str, name: str = "", **given: Any) -> NatsSettings:
    own = server.settings(role, run, name)
    found = NatsSettings(nats_url=own["NATS_URL"], nats_creds=Path(own["NATS_CREDS"]), **given)
    broker.configure(found.nats_creds, None)
    return found


async def test_lines_come_under_the_processes_own_subject_without_secrets(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    password = "of-the-run-alone"
    async with await connect(nats_server.url, "test") as connection:
        log_stream.start(settings(nats_server, Role.EXPLORER, RUN.run, "pool"), "explorer", RUN.run, "pool/one")
        log.info("first", url=f"nats://user:{password}@host:1", nested={"urls": [f"s3://{password}@bucket"]})
        log.debug("not of this level")
        try:
            _fail(password)
        except ValueError:
            log.exception("failed")
        await make(connection, RUN)  # lines wait for their stream
        log.info("long", text="x" * log_stream.MAX_LINE_BYTES)
        log.info("last")
        found = await stored(connection, RUN, "last")
    assert [fields["event"] for _, fields in found] == ["first", "failed", "long", "last"]
    assert {subject for subject, _ in found} == {RUN.line("explorer", owner_of("pool"))}
    assert {(fields["service"], fields["process"]) for _, fields in found} == {("explorer", "pool/one")}
    assert found[0][1]["url"] == "nats://***@host:1"
    assert found[1][1]["exception"][0]["exc_value"] == "no"
    assert found[2][1]["cut_bytes"] > log_stream.MAX_LINE_BYTES > len(json.dumps(found[2][1]))
    assert password not in json.dumps(found)
    assert password not in (tmp_path / "explorer.log").read_text()


def _fail(token: str) -> None:
    raise ValueError("no")


async def test_a_nats_that_is_away_costs_lines_and_no_time(nats_server: NatsServer) -> None:
    async with await connect(nats_server.url, "test") as connection:
        await make(connection, RUN, mib=8)
    nats_server.kill()
    log_stream.start(settings(nats_server, Role.BUFFER, RUN.run), "buffer", RUN.run, "buffer")
    before, lost = log_stream.DROPPED._value.get(), 100
    begin = time.thread_time()
    for number in range(log_stream.MAX_LINES + lost):
        log.info("line", number=number)
    assert time.thread_time() - begin < 30
    assert log_stream.DROPPED._value.get() - before >= lost
    nats_server.start()
    async with await connect(nats_server.url, "test") as connection:
        found = [fields for _, fields in await stored(connection, RUN, "log.lines.dropped")]
    numbers = [fields["number"] for fields in found if fields["event"] == "line"]
    assert numbers == list(range(len(numbers)))
    dropped = next(fields["lines"] for fields in found if fields["event"] == "log.lines.dropped")
    assert len(numbers) + dropped >= log_stream.MAX_LINES + lost


async def test_lines_that_nats_forbids_are_dropped_and_the_next_ones_are_sent(nats_server: NatsServer) -> None:
    """Sync serves several runs: a line belongs to the run that it names, else to the one of the settings."""
    async with await connect(nats_server.url, "test") as connection:
        await make(connection, RUN, OTHER)
        given = settings(nats_server, Role.SYNC, RUN.run, log_run=RUN.run)  # credentials of one run alone
        before = log_stream.DROPPED._value.get()
        log_stream.start(given, "sync", "", "sync")
        log.info("of the other", run=OTHER.run)
        log.info("of no run", run="trinity.>")
        log.info("its own", run=RUN.run)
        found = await stored(connection, RUN, "its own")
        assert (await connection.state(OTHER.lines_stream)).messages == 0
    events = [fields["event"] for _, fields in found]
    assert "of no run" in events and "of the other" not in events
    assert log_stream.DROPPED._value.get() - before == 1


async def test_sync_sends_the_lines_of_each_run_to_that_run(nats_server: NatsServer) -> None:
    async with await connect(nats_server.url, "test") as connection:
        await make(connection, RUN, OTHER)
        log_stream.start(settings(nats_server, Role.SYNC, "*"), "sync", "", "sync")
        log.info("of none")
        for run in (RUN, OTHER, RunNames("without-a-stream"), RUN):
            log.info(f"of {run.run}", run=run.run)
        log.info("last", run=OTHER.run)
        assert [fields["event"] for _, fields in await stored(connection, OTHER, "last")] == ["of b-run", "last"]
        assert [fields["event"] for _, fields in await stored(connection, RUN, "of a-run")] == ["of a-run"] * 2


async def test_the_environment_service_knows_its_run_by_its_credentials(nats_server: NatsServer) -> None:
    async with await connect(nats_server.url, "test") as connection:
        await make(connection, RUN)
        log_stream.start(settings(nats_server, Role.ENVIRONMENT, RUN.run), "environment", "", "environment")
        log.info("an episode")
        assert [fields["event"] for _, fields in await stored(connection, RUN, "an episode")] == ["an episode"]


def test_settings_keep_lines_here(nats_server: NatsServer) -> None:
    handlers = list(logging.getLogger().handlers)
    log_stream.start(settings(nats_server, Role.BUFFER, RUN.run, log_run=NO_RUN), "buffer", RUN.run, "buffer")
    log_stream.start(NatsSettings(nats_url=""), "environment", "", "environment")
    broker.configure(None, None)
    log_stream.start(NatsSettings(nats_url=f"nats://127.0.0.1:{free_port()}"), "environment", "", "environment")
    assert logging.getLogger().handlers == handlers
