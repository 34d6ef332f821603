"""The same bytes through alternatives: nats-py without Trinity, SQLite as in Trinity-RFT, a queue in memory."""

import asyncio
import sqlite3
import time
from dataclasses import dataclass
from pathlib import Path

import nats
from nats.js.api import StreamConfig

from support.servers.nats import NatsServer

IN_FLIGHT = 64


@dataclass(frozen=True)
class Work:
    """Puts `count` groups of 8 responses of `response` tokens, and takes batches of `per_step`."""

    folder: Path
    server: NatsServer
    response: int
    payload: bytes
    count: int
    per_step: int


async def nats_py(work: Work) -> float:
    """Seconds of nats-py on the same server: pipelined publish, then fetch. As durable as ours, without checks."""
    client = await nats.connect(work.server.url, pending_size=64 * 1024 * 1024)
    js = client.jetstream(publish_async_max_pending=IN_FLIGHT)
    await js.add_stream(StreamConfig(name="RAW", subjects=["raw"], allow_direct=True))
    begin = time.perf_counter()
    acknowledged = []
    for index in range(work.count):
        acknowledged.append(await js.publish_async("raw", work.payload, headers={"Nats-Msg-Id": str(index)}))
    await asyncio.gather(*acknowledged)
    pull = await js.pull_subscribe("raw", durable="bench")
    got = 0
    while got < work.count:
        messages = await pull.fetch(min(IN_FLIGHT, work.count - got), timeout=10)
        got += len(messages)
        await asyncio.gather(*(message.ack() for message in messages))
    seconds = time.perf_counter() - begin
    await js.delete_stream("RAW")
    await client.close()
    return seconds


async def sqlite(work: Work) -> float:
    """Seconds of SQLite with its defaults: as durable as ours."""
    return _sqlite(work, "DELETE")


async def sqlite_wal(work: Work) -> float:
    return _sqlite(work, "WAL")


def _sqlite(work: Work, journal: str) -> float:
    """One transaction per put, and one per take, which selects a batch and marks it. Put and take alternate."""
    database = sqlite3.connect(work.folder / f"{journal}.db", isolation_level=None)
    database.execute(f"PRAGMA journal_mode={journal}")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE groups (id INTEGER PRIMARY KEY, data BLOB, consumed INTEGER DEFAULT 0)")
    database.execute("CREATE INDEX fresh ON groups (consumed, id)")
    begin, taken = time.perf_counter(), 0
    for index in range(1, work.count + 1):
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO groups (data) VALUES (?)", (work.payload,))
        database.execute("COMMIT")
        if index % work.per_step == 0:
            database.execute("BEGIN IMMEDIATE")
            query = "SELECT id, data FROM groups WHERE consumed = 0 ORDER BY id LIMIT ?"
            rows = database.execute(query, (work.per_step,)).fetchall()
            database.executemany("UPDATE groups SET consumed = 1 WHERE id = ?", [(row[0],) for row in rows])
            database.execute("COMMIT")
            taken += len(rows)
    seconds = time.perf_counter() - begin
    assert taken == work.count
    database.close()
    return seconds


async def queue(work: Work) -> float:
    """Seconds of an asyncio.Queue between two tasks of this process, which stores nothing."""
    groups: asyncio.Queue[bytes] = asyncio.Queue(maxsize=IN_FLIGHT)

    async def put() -> None:
        for _ in range(work.count):
            await groups.put(bytes(bytearray(work.payload)))  # a copy, like a received message

    begin = time.perf_counter()
    putting = asyncio.create_task(put())
    for _ in range(work.count // work.per_step):
        batch = [await groups.get() for _ in range(work.per_step)]
        assert len(batch) == work.per_step
    await putting
    return time.perf_counter() - begin
