"""The power fails under load: with the settings Trinity ships, JetStream's files hold all that was acknowledged (I1).

What the disk would hold is modelled from the server's own syncs: chaos/power_cut.py says how, and what that is
not.
The control arm takes `sync_interval: always` away; the same check then finds acknowledged messages missing, and finds
them all where only the server was killed.
"""

import asyncio
import itertools
import os
import random
import shutil
import sys
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from nats.js.api import Header

from chaos import power_cut
from support.fakes.data.experience import make_group, make_task
from support.servers.nats import NatsServer
from trinity.buffer.state.streams import stream_specs
from trinity.data.wire import encode_outcome
from trinity.explorer.rollout import attempt
from trinity.reading import nats
from trinity.runtime import headers, names
from trinity.runtime.broker import Broker, Bucket, connect, ensure_streams, tail

pytestmark = [pytest.mark.core, pytest.mark.timeout(120)]

NAMES = names.RunNames("tests-power-000000")
IN_FLIGHT = 32
LOG_BYTES = 8 * 1024 * 1024  # of blocks of a quarter: the log begins new ones under load
SHIPPED = "  sync_interval: always\n"


@dataclass
class Acknowledged:
    """What the server said it has: checksums of groups and of ledger entries by message id, and values by key."""

    groups: dict[str, int] = field(default_factory=dict)
    batches: dict[str, int] = field(default_factory=dict)
    values: dict[str, bytes] = field(default_factory=dict)


class PoweredServer(NatsServer):
    """start -> cut: the server is gone, and the returned one, not started, has what its disk holds."""

    def use_default_sync(self) -> None:
        text = self._config.read_text()
        assert SHIPPED in text
        self._config.write_text(text.replace(SHIPPED, ""))

    def start(self) -> None:
        program = [str(nats.find_binary()), "-c", str(self._config)]
        with (self.folder / "nats.out").open("ab") as out:
            try:
                self._process = power_cut.start(self.folder / "store", self._copy / "store", program, out)
            except power_cut.Untraceable as reason:
                pytest.skip(f"no power cut can be simulated here: {reason}")
        assert nats.wait_until_open("127.0.0.1", self.port, 20), (self.folder / "nats.out").read_text()

    def cut(self) -> NatsServer:
        tracer = self._process
        assert tracer is not None
        self.stop()  # the tracer gets SIGTERM and kills the server with -9
        assert tracer.returncode == 0, (self.folder / "nats.out").read_text()
        return NatsServer(self._copy)

    @property
    def _copy(self) -> Path:
        return self.folder.with_name("after_the_cut")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where there is room: the disk is a model, and a busy real one would only make the test slow."""
    memory = Path("/dev/shm")
    roomy = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > 48 * 2**20
    with tempfile.TemporaryDirectory(prefix="trinity-power-cut-", dir=memory if roomy else tmp_path) as name:
        yield Path(name)


async def make_streams(broker: Broker) -> Bucket:
    await ensure_streams(broker, stream_specs(NAMES, log_bytes=LOG_BYTES, replicas=1))
    return await Bucket.open(broker, names.VERSIONS_BUCKET)


async def load_until_cut(server: PoweredServer, acks: int) -> tuple[Acknowledged, NatsServer]:
    """Groups, ledger entries and versions as fast as they are acknowledged; the cut comes after `acks` groups."""
    done = Acknowledged()
    async with await connect(server.url, "load") as broker:
        bucket = await make_streams(broker)
        ordinals = itertools.count(1)
        writers = [_store_groups(broker, ordinals, done) for _ in range(IN_FLIGHT)]
        writers += [_append_batches(broker, done), _put_values(bucket, done)]
        running = [asyncio.create_task(writer) for writer in writers]
        try:
            async with asyncio.timeout(60):
                while len(done.groups) < acks or not (done.batches and done.values):
                    await asyncio.sleep(0.001)
                    assert not any(task.done() for task in running), [task for task in running if task.done()]
            return done, await asyncio.to_thread(server.cut)  # the load continues meanwhile
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _store_groups(broker: Broker, ordinals: "itertools.count[int]", done: Acknowledged) -> None:
    for ordinal in ordinals:
        group = make_group(make_task(ordinal), response=ordinal % 200)
        await attempt.store(broker, NAMES, group)
        done.groups[str(ordinal)] = zlib.crc32(encode_outcome(group))


async def _append_batches(broker: Broker, done: Acknowledged) -> None:
    for step in itertools.count(1):
        data = random.Random(step).randbytes(200)
        subject, message_id = NAMES.batch(step), f"batch/{step}"
        await broker.append(subject, NAMES.batches_stream, data, message_id=message_id, last_sequence=step - 1)
        done.batches[message_id] = zlib.crc32(data)


async def _put_values(bucket: Bucket, done: Acknowledged) -> None:
    for version in itertools.count():
        key, value = NAMES.version_key(version), f"manifest of {version}".encode()
        await bucket.put_if(key, value, 0)
        done.values[key] = value


async def check(server: NatsServer, acknowledged: Acknowledged) -> None:
    """Everything acknowledged can be read, once and whole; the log continues, and knows its content."""
    server.start()
    try:
        async with await connect(server.url, "check") as broker:
            groups = await _checksums(broker, NAMES.experiences_stream, headers.ORDINAL)
            _compare("groups", acknowledged.groups, groups)
            _compare(
                "batches", acknowledged.batches, await _checksums(broker, NAMES.batches_stream, Header.MSG_ID.value)
            )
            bucket = await Bucket.open(broker, names.VERSIONS_BUCKET)
            values = {key: (await bucket.get(key)).value for key in acknowledged.values}
            _compare("values", acknowledged.values, values)
            first = await broker.get(NAMES.experiences_stream, 1)
            again = {"message_id": first.headers[Header.MSG_ID.value], "headers": first.headers}
            assert (await broker.publish(first.subject, first.data, **again)).duplicate, "a retry was stored again"
    finally:
        server.stop()


async def _checksums(broker: Broker, stream: str, name: str) -> dict[str, int]:
    """Of every message, by the header of this name. NotFound for a stream that is gone, Gap for one with a hole."""
    found: dict[str, int] = {}
    last = (await broker.state(stream)).last_sequence
    if not last:
        return found
    async with asyncio.timeout(30), aclosing(tail(broker, stream, 0)) as messages:
        async for message in messages:
            checksum, message_id = zlib.crc32(message.data), message.headers[name]
            assert message.headers.get(headers.CRC32, str(checksum)) == str(checksum), f"{message_id} is damaged"
            assert message_id not in found, f"{message_id} is there twice"
            found[message_id] = checksum
            if message.sequence == last:
                break
    return found


def _compare(what: str, acknowledged: Mapping[str, object], found: Mapping[str, object]) -> None:
    missing = [key for key, value in acknowledged.items() if found.get(key) != value]
    assert not missing, f"{len(missing)} of {len(acknowledged)} acknowledged {what} are missing, {missing[0]} first"


@pytest.mark.parametrize("seed", [1, 2, 7])
async def test_nothing_acknowledged_is_missing_after_a_power_cut(folder: Path, seed: int) -> None:
    server = PoweredServer(folder / "nats")
    server.start()
    try:
        acknowledged, survivor = await load_until_cut(server, random.Random(seed).randint(50, 1200))
    finally:
        server.kill()
    await check(survivor, acknowledged)


async def test_the_brokers_default_loses_what_was_acknowledged(folder: Path) -> None:
    """Control arm. The streams are on disk before; what is missing afterwards are messages."""
    before = NatsServer(folder / "nats")
    before.start()
    async with await connect(before.url, "before") as broker:
        await make_streams(broker)
    before.stop()
    server = PoweredServer(folder / "nats")
    server.use_default_sync()
    server.start()
    try:
        acknowledged, survivor = await load_until_cut(server, 500)
    finally:
        server.kill()
    with pytest.raises(AssertionError, match="acknowledged groups are missing"):
        await check(survivor, acknowledged)
    await check(NatsServer(server.folder), acknowledged)  # the process died, the power did not fail


WRITER = """
import os
os.write(os.open("folder/before", os.O_WRONLY | os.O_APPEND), b" and not")
os.mkdir("folder/inner")
synced = os.open("folder/synced", os.O_RDWR | os.O_CREAT)
os.write(synced, b"durable"), os.fsync(synced), os.write(synced, b" and not")
always = os.open("folder/always", os.O_WRONLY | os.O_CREAT | os.O_DSYNC)
os.write(always, b"at once")
cut = os.open("folder/cut", os.O_RDWR | os.O_CREAT)
os.write(cut, b"truncated"), os.fdatasync(cut), os.ftruncate(cut, 5), os.write(cut, b"never synced")
os.rename("folder/always", "folder/renamed")
os.write(os.open("folder/empty", os.O_WRONLY | os.O_CREAT), b"never synced")
os.fsync(os.open("folder/inner", os.O_RDONLY))
os.unlink("folder/synced"), os.mkdir("folder/late")
"""


def test_a_cut_keeps_what_was_synced_and_nothing_else(tmp_path: Path) -> None:
    program = [sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}){WRITER}"]
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/before").write_bytes(b"durable")
    with (tmp_path / "out").open("wb") as out:
        try:
            process = power_cut.start(tmp_path / "folder", tmp_path / "copy", program, out)
        except power_cut.Untraceable as reason:
            pytest.skip(f"no power cut can be simulated here: {reason}")
        assert process.wait(timeout=20) == 0, (tmp_path / "out").read_text()
    kept = {path.name: path.read_bytes() if path.is_file() else None for path in (tmp_path / "copy").rglob("*")}
    assert kept == {
        "before": b"durable",
        "inner": None,
        "synced": b"durable",
        "renamed": b"at once",
        "cut": b"trunc",
        "empty": b"",
    }
