"""The same bytes through what else there is: nats-py alone, SQLite as Trinity-RFT uses it, a queue in memory."""

import asyncio
import sqlite3
import time
from pathlib import Path

IN_FLIGHT = 64


async def nats_py(url: str, payload: bytes, count: int) -> float:
    """Seconds of nats-py: pipelined publish, then fetch. The same server, so as durable as ours; no checks."""
    import nats
    from nats.js.api import StreamConfig

    client = await nats.connect(url, pending_size=64 * 1024 * 1024)
    js = client.jetstream(publish_async_max_pending=IN_FLIGHT)
    await js.add_stream(StreamConfig(name="RAW", subjects=["raw"], allow_direct=True))
    begin = time.perf_counter()
    acknowledged = []
    for index in range(count):
        acknowledged.append(await js.publish_async("raw", payload, headers={"Nats-Msg-Id": str(index)}))
    await asyncio.gather(*acknowledged)
    pull = await js.pull_subscribe("raw", durable="bench")
    got = 0
    while got < count:
        messages = await pull.fetch(min(IN_FLIGHT, count - got), timeout=10)
        got += len(messages)
        await asyncio.gather(*(message.ack() for message in messages))
    seconds = time.perf_counter() - begin
    await js.delete_stream("RAW")
    await client.close()
    return seconds


def sqlite(file: Path, payload: bytes, count: int, per_step: int, journal: str) -> float:
    """Seconds of SQLite in this process: one transaction a put; a take selects a batch and marks it in one."""
    database = sqlite3.connect(file, isolation_level=None)
    database.execute(f"PRAGMA journal_mode={journal}")
    database.execute("PRAGMA synchronous=FULL")
    database.execute("CREATE TABLE experience (id INTEGER PRIMARY KEY, data BLOB, consumed INTEGER DEFAULT 0)")
    database.execute("CREATE INDEX unconsumed ON experience (consumed, id)")
    begin, taken = time.perf_counter(), 0
    for index in range(1, count + 1):
        database.execute("BEGIN IMMEDIATE")
        database.execute("INSERT INTO experience (data) VALUES (?)", (payload,))
        database.execute("COMMIT")
        if index % per_step == 0:
            database.execute("BEGIN IMMEDIATE")
            query = "SELECT id, data FROM experience WHERE consumed = 0 ORDER BY id LIMIT ?"
            rows = database.execute(query, (per_step,)).fetchall()
            database.executemany("UPDATE experience SET consumed = 1 WHERE id = ?", [(row[0],) for row in rows])
            database.execute("COMMIT")
            taken += len(rows)
    seconds = time.perf_counter() - begin
    assert taken == count
    database.close()
    return seconds


async def queue(payload: bytes, count: int, per_step: int) -> float:
    """Seconds of an asyncio.Queue between two tasks of this process: what a buffer that keeps nothing costs."""
    groups: asyncio.Queue[bytes] = asyncio.Queue(maxsize=IN_FLIGHT)

    async def put() -> None:
        for _ in range(count):
            await groups.put(bytes(bytearray(payload)))  # a copy each, as it were received

    begin = time.perf_counter()
    putting = asyncio.create_task(put())
    for _ in range(count // per_step):
        batch = [await groups.get() for _ in range(per_step)]
        assert len(batch) == per_step
    await putting
    return time.perf_counter() - begin
