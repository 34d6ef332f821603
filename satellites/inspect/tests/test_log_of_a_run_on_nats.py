"""`trinity log --nats --run`: the lines that services send, from a machine without the job folder."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from trinity.inspect.log import show
from trinity.reading.errors import RunError
from trinity.reading.find import RunOnNats, find_log
from trinity.runtime import names
from trinity.runtime.broker import connect, ensure_streams
from trinity.runtime.log_stream import stream_spec
from trinity.runtime.names import RunNames, owner_of
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role

pytestmark = pytest.mark.core

RUN = names.run_id("p", "n")
_LIMIT_SECONDS = 60.0


def line(age: float, event: str, process: str, level: str = "info", **fields: object) -> bytes:
    moment = datetime.fromtimestamp(time.time() - age, UTC).isoformat()
    return json.dumps({**fields, "event": event, "process": process, "level": level, "time": moment}).encode()


async def send(url: str, *messages: tuple[str, str, bytes], run: str = RUN) -> None:
    """Store messages of (service, process, lines)."""
    async with await connect(url, "test") as broker:
        await ensure_streams(broker, [stream_spec(RunNames(run), mib=1, hours=1.0, replicas=1)])
        for number, (service, process, data) in enumerate(messages):
            subject = RunNames(run).line(service, owner_of(process))
            await broker.publish(subject, data, message_id=f"{time.time_ns()}-{number}")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("COLUMNS", "TRINITY_NATS_URL", "TRINITY_CHECKPOINT_ROOT_DIR"):
        monkeypatch.delenv(variable, raising=False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


def shown(capsys: pytest.CaptureFixture[str], place: RunOnNats, *args: object, **options: object) -> list[list[str]]:
    """Process and event of each line shown."""
    show(place, *args, **options)  # type: ignore[arg-type]
    return [text.split()[2:4] for text in capsys.readouterr().out.splitlines()]


def test_lines_are_shown_in_the_order_of_time_as_they_were_asked_for(
    nats_server: NatsServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    many = [("trainer", "trainer", line(2000 - n, f"old{n}", "trainer", "debug")) for n in range(600)]
    both = b"\n".join([line(40, "joined", "pool/one"), line(20, "ready", "pool/one", "warning")])
    asyncio.run(
        send(
            nats_server.url, *many,
            ("explorer", "pool/one", both),
            ("explorer", "pool/two", line(30, "joined", "pool/two", url="\x1b[31m")),
            ("explorer", "other", line(10, "forged", "pool/one")),
            ("buffer", "buffer", b"no JSON at all"),
        )
    )  # fmt: skip
    assert nats_server.users is not None
    reader = nats_users.user_file(nats_server.users, Role.READER, "reader", RUN)
    monkeypatch.setenv("TRINITY_NATS_CREDS", str(reader))  # a role that may change nothing
    place = find_log(None, None, nats_server.url, RUN)
    assert place == RunOnNats(nats_server.url, RUN), "a run that has ended, by its id"
    assert find_log(None, None, nats_server.url, "p/n") == place, "and by project and name"
    assert isinstance(place, RunOnNats)
    expected = [["pool/one", "joined"], ["pool/two", "joined"], ["pool/one", "ready"]]
    forged = [f"explorer/{owner_of('other')}", "forged"]
    assert shown(capsys, place, lines=4)[-4:] == [*expected, forged]
    assert shown(capsys, place, "explorer", level="debug") == [*expected, forged]
    assert shown(capsys, place, named="pool/one") == [expected[0], expected[2]]
    assert shown(capsys, place, "explorer", level="warning") == [expected[2]]
    assert shown(capsys, place, "explorer", since="25s") == [expected[2], forged]
    assert shown(capsys, place, "trainer", 0, level="debug") == [["trainer", f"old{n}"] for n in range(600)]
    assert shown(capsys, place, "trainer", 3, level="debug") == [["trainer", f"old{n}"] for n in range(597, 600)]
    assert len(shown(capsys, place, "trainer", level="debug")) == 50
    with pytest.raises(RunError, match=r"^--since 10: must be a number with s, m, h or d, as 10m"):
        show(place, since="10")
    with pytest.raises(RunError, match=f"no run other lives at nats://127.0.0.1:{nats_server.port}"):
        find_log(None, None, nats_server.url, "other")


def test_it_follows_until_it_is_interrupted(nats_server: NatsServer) -> None:
    asyncio.run(send(nats_server.url, ("buffer", "buffer", line(1, "before", "buffer"))))
    command = [sys.executable, "-m", "trinity.cli.main", "log", "--nats", nats_server.url, "--run", RUN, "-f"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )  # fmt: skip
    timer = threading.Timer(_LIMIT_SECONDS, process.kill)
    timer.start()
    try:
        assert process.stdout is not None
        assert "before" in process.stdout.readline()
        asyncio.run(send(nats_server.url, ("sync", "sync", line(0, "after", "sync"))))
        assert "after" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(_LIMIT_SECONDS) == 0
    finally:
        timer.cancel()
        process.kill()
        process.wait()


def test_services_of_a_live_run_send_their_lines(tmp_path: Path, nats_server: NatsServer) -> None:
    """Those of sync name the run that they are about."""
    run = BufferRun(tmp_path, nats_server, settings={"LINES_MIB": "2", "LINES_HOURS": "1"})
    run.sync._environment["TRINITY_SYNC_LOG_RUN"] = run.run
    run.start()
    try:
        asyncio.run(_begin(run))
        found = asyncio.run(
            _until_known(nats_server.url, run.run, {("buffer", "service.ready"), ("sync", "service.ready")})
        )
    finally:
        run.stop()
    assert [one["run"] for one in found if one["event"] == "sync.version.live"] == [run.run]
    assert {one["process"] for one in found} == {"buffer", "sync"}


async def _begin(run: BufferRun) -> None:
    trainer = run.trainer()
    await trainer.begin()
    await trainer.close()


async def _until_known(url: str, run: str, wanted: set[tuple[str, str]]) -> list[dict[str, str]]:
    stream = RunNames(run).lines_stream
    async with asyncio.timeout(_LIMIT_SECONDS), await connect(url, "test") as broker:
        while True:
            messages = await broker.several(stream, 1, 1000)
            found = [json.loads(text) for message in messages for text in message.data.split(b"\n")]
            seen = {(one["process"], one["event"]) for one in found}
            if wanted <= seen and "sync.version.live" in [event for _, event in seen]:
                info = await broker.js.stream_info(stream)
                assert (info.config.max_bytes, info.config.max_age) == (2 * 2**20, 3600.0)
                return found
            await asyncio.sleep(0.1)
