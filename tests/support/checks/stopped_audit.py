"""Audits I1 to I4 of a stopped run: its streams on NATS against the logs of its processes.

audit.py audits finished runs; here batches may be unfinished and tasks outstanding.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from support.checks.audit import Records, TrainerRecord, read, read_acknowledged
from support.servers.nats import NatsServer
from trinity.runtime import names
from trinity.runtime.broker import connect

_SECONDS = 120.0


def audited(job: Path, logs: Sequence[Path], counts: dict[str, int]) -> list[str]:
    """Contradictions in what a run left that was stopped while idle, as text; empty: every invariant holds.

    `logs`: the log folders of its explorers; `counts`: what the buffer said last, as `trinity status` shows it.
    """
    record = TrainerRecord(job / "monitor/batches.jsonl")
    record.read()
    server = NatsServer(job / "nats", users=job / "identity" / "nats")
    server.start()
    try:
        records = asyncio.run(_read(server, job, logs, record, counts))
    finally:
        server.stop()
    return violations(records, counts)


def violations(records: Records, counts: dict[str, int]) -> list[str]:
    return [*_lost(records), *_ledger(records), *_counts(records, counts)]


async def _read(
    server: NatsServer, job: Path, logs: Sequence[Path], record: TrainerRecord, counts: dict[str, int]
) -> Records:
    async with asyncio.timeout(_SECONDS), await connect(server.url, "audit", creds=server.admin()) as broker:
        run = names.run_id(job.parent.name, job.name)
        records = await read(broker, run, job, record.said, summary=counts)
    for folder in logs:
        records.acknowledged.extend(read_acknowledged(folder))
    return records


def _lost(records: Records) -> list[str]:
    """I1: what JetStream acknowledged is in the log."""
    there = {(entry.sequence, entry.ordinal) for entry in records.log if entry.kind == "group" and entry.intact}
    gone = [ack for ack in records.acknowledged if (ack.sequence, ack.ordinal) not in there]
    return [f"I1: an acknowledged group is not in the log: {ack}" for ack in gone]


def _ledger(records: Records) -> list[str]:
    """I2: a group is in the ledger once. I3: step k is one batch."""
    found = []
    used = [member.ordinal for _, members in records.ledger for member in members]
    if len(used) != len(set(used)):
        found.append(f"I2: {len(used) - len(set(used))} groups are in the ledger twice")
    if [step for step, _ in records.ledger] != list(range(1, len(records.ledger) + 1)):
        found.append(f"I3: the steps of the ledger are {[step for step, _ in records.ledger]}")
    ledger = {step: {tuple(member.sequence for member in members)} for step, members in records.ledger}
    found += [
        f"I3: step {step} was trained as {said}" for step, said in records.said.items() if ledger.get(step) != said
    ]
    return found


def _counts(records: Records, counts: dict[str, int]) -> list[str]:
    """I4: every task that was fed is stored, dead or outstanding, and the buffer counts them so."""
    stored = {entry.ordinal for entry in records.log if entry.kind == "group"}
    dead = set(records.letters)
    open_tasks = set(range(1, records.fed + 1)) - stored - dead
    found = []
    own = {"fed": records.fed, "stored": len(stored), "dead_letters": len(dead), "outstanding": len(open_tasks)}
    if own != {name: counts[name] for name in own}:
        found.append(f"I4: the buffer counted {counts}, the log has {own}")
    if gone := open_tasks - {ordinal for ordinal, _ in records.tasks}:
        found.append(f"I4: tasks {sorted(gone)} are outstanding and not in the queue")
    return found
