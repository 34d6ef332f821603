"""Audits invariants I1 to I4 of a run from its records, without the buffer's code.

read: every message of the log, the ledger, the dead letters and the queue, from NATS; the acknowledgements of
JetStream, from the explorers' logs; the trainer's notes of each step, from all states of its record during the run.
audit: contradictions as text. Empty if the run kept the invariants.
"""

import contextlib
import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trinity.api.buffer.v1 import buffer_pb2
from trinity.api.common.v1 import experience_pb2, task_pb2
from trinity.runtime import headers
from trinity.runtime.broker import Broker, StoredMessage
from trinity.runtime.errors import NotFound
from trinity.runtime.names import RunNames

_SUMMARY = {
    "groups_fed": "fed",
    "groups_stored": "stored",
    "dead_letters": "dead_letters",
    "outstanding": "outstanding",
    "duplicates_dropped": "duplicates_dropped",
}
_ENDS = ("group", "failure")


@dataclass(frozen=True)
class LogEntry:
    """One message of the experience log. `intact`: the payload is what its header says."""

    sequence: int
    kind: str
    task_id: str
    ordinal: int
    crc32: int
    intact: bool = True
    final: bool = False
    max_attempts: int = 3


@dataclass(frozen=True)
class Acknowledged:
    """A group that JetStream acknowledged. `duplicate`: as a duplicate of an earlier one of the task."""

    task_id: str
    ordinal: int
    sequence: int
    crc32: int
    duplicate: bool = False


@dataclass(frozen=True)
class Member:
    """A group in a ledger entry."""

    sequence: int
    task_id: str
    ordinal: int


@dataclass
class Records:
    """The records of a finished run.

    `ledger`: (step, groups) in the order of the stream. `tasks`: (ordinal, task id) of the queue; tasks that have
    ended may be gone. `said`: step -> every list of log sequences that the trainer ever noted. `counts`: what the
    buffer said on the way, as `trinity status` shows it.
    """

    log: list[LogEntry]
    acknowledged: list[Acknowledged]
    ledger: list[tuple[int, tuple[Member, ...]]]
    letters: list[int]
    tasks: list[tuple[int, str]]
    fed: int
    said: dict[int, set[tuple[int, ...]]]
    summary: Mapping[str, object]
    counts: list[Mapping[str, int]] = field(default_factory=list)


@dataclass
class Findings:
    """Contradictions as text. `stored`: groups in the log, each task once; `acknowledged`: of those."""

    stored: int
    acknowledged: int
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    ledger: list[str] = field(default_factory=list)
    counts: list[str] = field(default_factory=list)

    @property
    def differences(self) -> list[str]:
        return [*self.lost, *self.doubled, *self.ledger, *self.counts]


class TrainerRecord:
    """monitor/batches.jsonl, read repeatedly. Groups once seen for a step stay recorded if the file changes later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.said: dict[int, set[tuple[int, ...]]] = {}
        self.lines: list[int] = []  # the step of each, as the file is now

    def read(self) -> None:
        text = self._path.read_text() if self._path.exists() else ""
        entries = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        self.lines = [entry["step"] for entry in entries]
        for entry in entries:
            self.said.setdefault(entry["step"], set()).add(tuple(entry["groups"]))


def read_acknowledged(log_folder: Path) -> list[Acknowledged]:
    """From the explorers' own logs. A line that a kill truncated does not count."""
    found = []
    for path in sorted(log_folder.glob("*.log*")):
        for line in path.read_text(errors="replace").splitlines():
            if "explorer.group.stored" not in line:
                continue
            with contextlib.suppress(ValueError):
                entry = json.loads(line)
                if entry["kind"] == "train":
                    found.append(
                        Acknowledged(
                            entry["task"], entry["ordinal"], entry["sequence"], entry["crc32"], entry["duplicate"]
                        )
                    )
    return found


async def read(
    broker: Broker,
    run: str,
    job: Path,
    said: dict[int, set[tuple[int, ...]]],
    counts: Iterable[Mapping[str, int]] = (),
    summary: Mapping[str, object] | None = None,
) -> Records:
    """Records of a finished run. `broker` is connected to its NATS. `summary` is given for a stopped run."""
    names = RunNames(run)
    batches = [buffer_pb2.LedgerEntry.FromString(m.data) for m in await messages(broker, names.batches_stream)]
    queue = await messages(broker, names.tasks_stream)
    fed = [task_pb2.Task.FromString(message.data) for message in queue]
    return Records(
        log=[_log_entry(message) for message in await messages(broker, names.experiences_stream)],
        acknowledged=read_acknowledged(job / "log"),
        ledger=[
            (entry.step, tuple(Member(g.log_sequence, g.task_id, g.ordinal) for g in entry.groups)) for entry in batches
        ],
        letters=[
            experience_pb2.AttemptFailure.FromString(message.data).task.ordinal
            for message in await messages(broker, names.dead_letters_stream)
        ],
        tasks=[(task.ordinal, task.task_id) for task in fed],
        fed=max((int(message.headers[headers.FED]) for message in queue), default=0),
        said=said,
        summary=json.loads((job / "summary.json").read_text()) if summary is None else summary,
        counts=list(counts),
    )


async def messages(broker: Broker, stream: str) -> list[StoredMessage]:
    """Messages in order of sequence. Deleted ones are skipped."""
    found = []
    for sequence in range(1, (await broker.state(stream)).last_sequence + 1):
        with contextlib.suppress(NotFound):
            found.append(await broker.get(stream, sequence))
    return found


def _log_entry(message: StoredMessage) -> LogEntry:
    outcome = experience_pb2.Outcome.FromString(message.data)
    kind = outcome.WhichOneof("outcome") or "nothing"
    checksum = zlib.crc32(message.data)
    intact = message.headers.get(headers.CRC32) == str(checksum)
    if kind not in _ENDS:
        return LogEntry(message.sequence, kind, "", 0, checksum, intact)
    task = getattr(outcome, kind).task
    return LogEntry(
        sequence=message.sequence,
        kind=kind,
        task_id=task.task_id,
        ordinal=task.ordinal,
        crc32=checksum,
        intact=intact,
        final=kind == "failure" and outcome.failure.final,
        max_attempts=task.max_attempts,
    )


def audit(records: Records, steps: int, groups_per_step: int) -> Findings:
    """Contradictions in a finished run's records."""
    stored, dead, duplicates = _judge(records.log)
    findings = Findings(len(stored), len({ack.ordinal for ack in records.acknowledged}))
    findings.lost += _lost(records, stored)
    findings.doubled += _doubled(records)
    findings.ledger += _ledger(records, stored, steps, groups_per_step)
    findings.counts += _counts(records, set(stored), dead, duplicates)
    return findings


def _judge(log: Iterable[LogEntry]) -> tuple[dict[int, LogEntry], set[int], int]:
    """The first group of each task that was not dead before, the dead tasks, and how many groups came too late."""
    stored: dict[int, LogEntry] = {}
    dead: set[int] = set()
    failures: Counter[int] = Counter()
    duplicates = 0
    for entry in log:
        ended = entry.ordinal in stored or entry.ordinal in dead
        if entry.kind == "group" and ended:
            duplicates += 1
        elif entry.kind == "group":
            stored[entry.ordinal] = entry
        elif entry.kind == "failure" and not ended:
            failures[entry.ordinal] += 1
            if entry.final or failures[entry.ordinal] >= entry.max_attempts:
                dead.add(entry.ordinal)
    return stored, dead, duplicates


def _lost(records: Records, stored: Mapping[int, LogEntry]) -> Iterable[str]:
    """I1: acknowledged groups are stored unchanged, and stored groups were trained."""
    if not records.acknowledged:
        yield "the explorers' logs say of no group that it was acknowledged: nothing can be said of lost ones"
    by_sequence = {entry.sequence: entry for entry in records.log}
    for sequence in range(1, max(by_sequence, default=0) + 1):
        if sequence not in by_sequence:
            yield f"log: sequence {sequence} is missing"
        elif not by_sequence[sequence].intact:
            yield f"log: sequence {sequence} is not what its checksum says"
    for ack in records.acknowledged:
        what = f"task {ack.task_id} was acknowledged at sequence {ack.sequence}"
        there = by_sequence.get(ack.sequence)
        if there is None:
            yield f"{what}: nothing is there"
        elif there.kind != "group" or there.task_id != ack.task_id or there.ordinal != ack.ordinal:
            yield f"{what}: a {there.kind} of task {there.task_id} is there"
        elif there.crc32 != ack.crc32 and not ack.duplicate:
            yield f"{what}: another group of the task is there"
    used = {member.sequence for _, members in records.ledger for member in members}
    for ordinal, entry in stored.items():
        if entry.sequence not in used:
            yield f"the group of task {ordinal}, sequence {entry.sequence}, is in no batch"


def _doubled(records: Records) -> Iterable[str]:
    """I2: a group enters the ledger once. A task is fed once."""
    members = [(step, member) for step, members in records.ledger for member in members]
    for what in ("ordinal", "task_id", "sequence"):
        steps_of: dict[object, list[int]] = {}
        for step, member in members:
            steps_of.setdefault(getattr(member, what), []).append(step)
        for key, steps in steps_of.items():
            if len(steps) > 1:
                yield f"ledger: {what} {key} is in steps {steps}"
    for (ordinal, task_id), times in Counter(records.tasks).items():
        if times > 1:
            yield f"queue: task {task_id}, ordinal {ordinal}, is there {times} times"
    tasks = {*records.tasks, *((e.ordinal, e.task_id) for e in records.log if e.kind in _ENDS)}
    for index, what in enumerate(("ordinal", "task id")):
        for key, times in Counter(task[index] for task in tasks).items():
            if times > 1:
                yield f"{what} {key} was fed as {times} tasks: {sorted(task for task in tasks if task[index] == key)}"


def _ledger(records: Records, stored: Mapping[int, LogEntry], steps: int, groups_per_step: int) -> Iterable[str]:
    """I3: step k is one batch, in the ledger and in all that the trainer ever said. Steps are 1..N without a gap."""
    if [step for step, _ in records.ledger] != list(range(1, steps + 1)):
        yield f"ledger: its steps are {[step for step, _ in records.ledger]}, not 1 to {steps}"
    for step, members in records.ledger:
        if len(members) != groups_per_step:
            yield f"ledger: step {step} has {len(members)} groups, not {groups_per_step}"
        for member in members:
            entry = stored.get(member.ordinal)
            if entry is None or (entry.sequence, entry.task_id) != (member.sequence, member.task_id):
                yield f"ledger: step {step} has {member}, the log has {entry}"
    of_step = {step: tuple(member.sequence for member in members) for step, members in records.ledger}
    for step in sorted(of_step.keys() | records.said.keys()):
        said = records.said.get(step, set())
        if said != {of_step.get(step)}:
            yield f"step {step}: the trainer said {sorted(said)}, the ledger says {of_step.get(step)}"


def _counts(records: Records, stored: set[int], dead: set[int], duplicates: int) -> Iterable[str]:
    """I4: every task that was fed is stored, dead or outstanding; what the buffer counted is so."""
    fed = set(range(1, records.fed + 1))
    own = {
        "fed": len(fed),
        "stored": len(stored),
        "dead_letters": len(dead),
        "outstanding": len(fed - stored - dead),
        "duplicates_dropped": duplicates,
    }
    for name, meant in _SUMMARY.items():
        if records.summary.get(name) != own[meant]:
            yield f"summary: {name} is {records.summary.get(name)}, counted {own[meant]}"
    if sorted(records.letters) != sorted(dead):
        yield f"dead letters are of tasks {sorted(records.letters)}; by the log, {sorted(dead)} are dead"
    if both := stored & set(records.letters):
        yield f"tasks {sorted(both)} are stored and have a dead letter"
    if unfed := (stored | dead) - fed:
        yield f"tasks {sorted(unfed)} ended and were not fed; {records.fed} were"
    queue = dict(records.tasks)
    if gone := fed - queue.keys() - stored - dead:
        yield f"tasks {sorted(gone)} are outstanding and not in the queue"
    for entry in records.log:
        if entry.kind not in _ENDS:
            yield f"log: sequence {entry.sequence} is a {entry.kind}, which these runs do not have"
        elif entry.ordinal in queue and queue[entry.ordinal] != entry.task_id:
            fed_as = queue[entry.ordinal]
            yield f"log: sequence {entry.sequence} is of task {entry.task_id}; {entry.ordinal} was fed as {fed_as}"
    for said in records.counts:
        parts = [said["stored"], said["dead_letters"], said["outstanding"]]
        if said["fed"] != sum(parts) or min(parts) < 0 or any(said[name] > own[name] for name in ("fed", "stored")):
            yield f"on the way: {dict(said)}"
