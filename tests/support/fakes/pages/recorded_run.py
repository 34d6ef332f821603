"""A job folder and a ledger for the pages of trinity.ui, without a run: hand-made entries behind a fake buffer."""

import base64
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.fakes.data.experience import make_task
from support.fakes.data.files import write
from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.api.common.v1 import experience_pb2
from trinity.data.wire import task_to_proto
from trinity.reading import wire
from trinity.reading.accounts.device_log import folder_of
from trinity.reading.errors import RunError
from trinity.reading.reader import JobStage
from trinity.ui import source

STEPS, GROUPS, ROLLOUTS = 3, 4, 2
# A real run of 8 steps of 4 groups, one step ahead. While the trainer paused before step 1, rows 2 and 6 could not be
# scored, and row 2 was retried. At step 4 the explorer was killed.
RECORDED = Path(__file__).parent / "recorded"


@dataclass
class Doctored:
    """Ledger entries that a test may change."""

    entries: list[pb.LedgerEntry]

    @property
    def last(self) -> pb.LedgerEntry:
        return self.entries[-1]

    def move(self, ordinal: int, step: int) -> None:
        """Have a group in one more step."""
        group = next(group for entry in self.entries for group in entry.groups if group.ordinal == ordinal)
        self.entries[step - 1].groups.add().CopyFrom(group)

    def drop(self, step: int, ordinal: int, reason: str = "stale") -> None:
        self.entries[step - 1].dropped.add(ordinal=ordinal, reason=reason, log_sequence=ordinal)

    def cut(self, step: int, ordinal: int) -> None:
        self.entries[step - 1].cut.add(ordinal=ordinal, task_id=f"sums/0/{ordinal}")


def ledger(
    *,
    policy: str = "fifo",
    dropped: Mapping[int, Sequence[int]] | None = None,
    cut: Mapping[int, Sequence[int]] | None = None,
    late: Mapping[int, Sequence[int]] | None = None,
    dead: Sequence[int] = (),
    requeued: Sequence[int] = (),
    pending: Sequence[int] = (),
) -> Doctored:
    """STEPS entries of GROUPS groups, ordinals from 1. Others than theirs ended too, as the arguments say."""
    found = Doctored([_entry(step, policy) for step in range(1, STEPS + 1)])
    for step, ordinals in (dropped or {}).items():
        for ordinal in ordinals:
            found.drop(step, ordinal)
    for step, ordinals in (cut or {}).items():
        for ordinal in ordinals:
            found.cut(step, ordinal)
    for step, ordinals in (late or {}).items():
        for ordinal in ordinals:
            found.drop(step, ordinal, "cut")
    lost = [ordinal for ordinals in (dropped or {}).values() for ordinal in ordinals]
    gone = [ordinal for ordinals in (cut or {}).values() for ordinal in ordinals]
    cursor = found.last.cursor
    cursor.log_sequence, cursor.ended_through = 100, STEPS * GROUPS
    cursor.stored, cursor.dead_letters = STEPS * GROUPS + len(lost) + len(pending), len(dead)
    cursor.cut_tasks = len(gone)
    cursor.ended.extend([*lost, *gone, *dead, *requeued, *pending])
    cursor.dead.extend(dead)
    cursor.requeued.update({ordinal: ordinal for ordinal in requeued})
    for ordinal in pending:
        cursor.pending.add(ordinal=ordinal)
    return found


def _entry(step: int, policy: str) -> pb.LedgerEntry:
    groups = [
        pb.LedgerGroup(
            task_id=f"sums/0/{ordinal}", ordinal=ordinal, log_sequence=ordinal, num_experiences=ROLLOUTS, use_count=1,
            oldest_version=step - 1, newest_version=step - 1, num_response_tokens=8, reward_mean=0.5,
        )
        for ordinal in range((step - 1) * GROUPS + 1, step * GROUPS + 1)
    ]  # fmt: skip
    return pb.LedgerEntry(step=step, policy=policy, groups=groups, reward_mean=0.5, created_at_seconds=1.7e9)


def counts_of(found: Doctored) -> dict[str, Any]:
    """Counts of a buffer with one outstanding task."""
    stored = STEPS * GROUPS
    stats = pb.StatsResponse(
        fed=stored + 1 + found.last.cursor.cut_tasks, stored=stored, outstanding=1, ledger_step=len(found.entries),
        cut_tasks=found.last.cursor.cut_tasks, last_step=9,
        max_staleness_steps=1, groups_per_step=GROUPS,
        waiting_by_version=Counter(group.newest_version for group in found.last.cursor.pending),
    )  # fmt: skip
    return wire.counts(stats)


@dataclass
class FakeBuffer:
    """Answers as `trinity.reading.client.Buffer` does."""

    found: Doctored
    dead: list[experience_pb2.AttemptFailure] = field(default_factory=list)
    retried: list[int] = field(default_factory=list)

    async def letters(self, limit: int) -> list[wire.Letter]:
        return [wire.letter(one) for one in self.dead[:limit]]

    async def letter(self, ordinal: int) -> dict[str, Any]:
        for one in self.dead:
            if one.task.ordinal == ordinal:
                return wire.whole_letter(one)
        raise RunError(f"ordinals: {ordinal} has no letter")

    async def retry_letters(self, ordinals: Sequence[int]) -> list[int]:
        self.retried += await self.drop_letters(ordinals)
        return list(ordinals)

    async def drop_letters(self, ordinals: Sequence[int]) -> list[int]:
        found = [await self.letter(ordinal) for ordinal in ordinals]
        self.dead[:] = [one for one in self.dead if one.task.ordinal not in ordinals]
        return [int(one["task"]["ordinal"]) for one in found]

    async def newest_step(self) -> int:
        return len(self.found.entries)

    async def attempts(self, step: int) -> dict[int, Any]:
        raise RunError(f"step {step}: the log has released its groups")

    async def counts(self) -> dict[str, Any]:
        return counts_of(self.found)

    async def accounted_entry(self, step: int) -> tuple[dict[str, Any], dict[str, Any] | None]:
        return await self.entry(step), wire.account(self.found.entries[step - 1])

    async def entry(self, step: int) -> dict[str, Any]:
        if not 1 <= step <= len(self.found.entries):
            raise RunError(f"step: {step} has no ledger entry; the newest is {len(self.found.entries)}")
        return wire.batch(self.found.entries[step - 1])


def serve_ledger(
    monkeypatch: pytest.MonkeyPatch, found: Doctored, dead: Sequence[experience_pb2.AttemptFailure] = ()
) -> FakeBuffer:
    """Have every stage answered by a FakeBuffer, as if it were live."""
    buffer = FakeBuffer(found, list(dead))

    @contextlib.asynccontextmanager
    async def answered(job_stage: JobStage) -> AsyncIterator[Any]:
        yield type("Reader", (), {"buffer": buffer})()

    monkeypatch.setattr(source, "live_buffer", answered)
    return buffer


def dead_letter(ordinal: int, text: str) -> experience_pb2.AttemptFailure:
    """With the same text wherever it may hold one."""
    task = task_to_proto(make_task(ordinal, row_json=json.dumps({"question": text})))
    task.task_id = task.taskset = text
    return experience_pb2.AttemptFailure(task=task, cause=text, error=text, explorer_id=text, attempt=3, final=True)


def experience(step: int, ordinal: int, rollout: int, **changes: Any) -> dict[str, Any]:
    """A line of buffer/experience_buffer.jsonl: two prompt tokens and four response tokens, the last not trained."""
    arrays = {
        "token_ids": np.array([1, 2, 10, 11, 12, 13], "<i4"),
        "mask": np.array([1, 1, 1, 0], "u1"),
        "logprobs": np.array([-0.05, -0.5, -2.0, -9.0], "<f4"),
        "new_logprobs": np.array([-0.05, -0.2, -2.1, -9.3], "<f4"),
        "entropy": np.array([0.0625, 1.0, 2.0, 4.0], "<f2"),
        "clipped": np.array([0, 1, 0, 0], "u1"),
    }
    return {
        "step": step, "task_id": f"sums/0/{ordinal}", "ordinal": ordinal, "rollout": rollout, "turn": 0,
        "reward": float(rollout), "advantage": rollout - 0.5, "versions": [[step - 1, 0, 2], [step, 2, 4]],
        "staleness": 0, "prompt_tokens": 2, "response_tokens": 4, "truncation": "none",
        "metrics": {"accuracy": float(rollout)}, "log_sequence": ordinal, "prompt": "1+1", "response": "It is 2.",
        "arrays": {name: base64.b64encode(values.tobytes()).decode() for name, values in arrays.items()},
        **changes,
    }  # fmt: skip


def write_account(job: Path, name: str = "explorer", fate: str = "failed") -> None:
    """Devices of a trainer and an explorer for ten seconds each; the explorer's have 3 s of stored groups, 1 s of
    `fate`."""
    events = [
        {"time": 1.7e9, "event": "began", "name": "trainer", "service": "trainer", "devices": 1},
        {"time": 1.7e9, "event": "began", "name": name, "service": "explorer", "devices": 1},
        {"time": 1.7e9, "event": "started", "name": "trainer", "pid": 21},
        {"time": 1.7e9 + 1, "event": "started", "name": name, "pid": 22},
        {"time": 1.7e9 + 10, "event": "ended", "name": "trainer"},
        {"time": 1.7e9 + 10, "event": "ended", "name": name},
    ]
    folder = folder_of(job)
    write(folder / "main.jsonl", *(json.dumps(event) + "\n" for event in events))
    own = {"pid": 22, "began": 1.7e9 + 2, "time": 1.7e9 + 10, "seconds": {"stored": 3.0, fate: 1.0}, "running": 0.0}
    write(folder / "explorer-22.json", json.dumps(own))


def version_of(number: int, text: str) -> dict[str, Any]:
    """All fields of a weight version, with the same text wherever it may hold one."""
    measured = {"explorer": text, "mean_error": 1e-6, "max_error": 1e-5}
    canary = {"probes": 4, "tokens": 64, "mean_tolerance": 0.01, "max_tolerance": 0.1, "measured": measured}
    offer = {"transport": text, "delta": True, "bytes": 1 << 20, "where": text}
    return {
        "version": number, "step": number, "state": "REJECTED", "explorers": [text], "reason": text, "pinned": True,
        "made_at_seconds": 1.7e9, "offers": [offer], "base_version": number - 1, "base_model": text, "tensors": 12,
        "files": 1, "files_gone": False, "canary": canary,
    }  # fmt: skip


def serve_versions(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Have every stage answer with one version, as if it were live; `text` as in `version_of`."""
    row = _version_row(text)

    async def versions(asked: source.Source) -> list[wire.VersionRow]:
        return [row]

    async def version(asked: source.Source, number: int) -> dict[str, Any]:
        return version_of(number, text)

    monkeypatch.setattr(source.Source, "versions", versions)
    monkeypatch.setattr(source.Source, "version", version)


def _version_row(text: str) -> wire.VersionRow:
    return wire.VersionRow(
        version=1, step=1, state="REJECTED", explorers=1, size_bytes=1 << 20, delta_bytes=1 << 10, base_version=0,
        transports=[text], canary=True, canary_max_error=1e-5, pinned=True, made_at_seconds=1.7e9, reason=text,
        judged=True,
    )  # fmt: skip


@dataclass
class FakeSync:
    """Answers like `trinity.reading.client.Sync`: only version 1, which it pins."""

    pinned: bool = False
    asked: list[tuple[str, int, bool]] = field(default_factory=list)  # as which role

    def identify(self, job: Path | None, role: str) -> None:
        self.role = str(role)

    async def pin(self, number: int, pinned: bool) -> None:
        if number != 1:
            raise RunError(f"version: there is no version {number}")
        self.asked.append((self.role, number, pinned))
        self.pinned = pinned

    async def versions(self, limit: int) -> list[wire.VersionRow]:
        return [replace(_version_row("sound"), pinned=self.pinned)]


def serve_sync(monkeypatch: pytest.MonkeyPatch) -> FakeSync:
    """Have every stage's versions answered by a FakeSync, as if it were live."""
    sync = FakeSync()

    @contextlib.asynccontextmanager
    async def answered(job_stage: JobStage) -> AsyncIterator[FakeSync]:
        yield sync

    monkeypatch.setattr(source, "live_sync", answered)
    monkeypatch.setattr(source.jobs, "identify", sync.identify)
    return sync


def serve_status(monkeypatch: pytest.MonkeyPatch, status: dict[str, Any] | None) -> None:
    """Have every stage answer with this, as `trinity status` has it."""

    async def answered(asked: source.Source) -> dict[str, Any] | None:
        return status

    monkeypatch.setattr(source.Source, "status", answered)


def write_versions(job: Path, reason: str) -> None:
    """Sync's log of two versions: a loaded LIVE version, and a rejected one with its reason."""
    lines = [
        {"event": "sync.version.staged", "version": 1, "step": 1, "time": "2026-11-24T01:12:12Z"},
        {"event": "sync.version.live", "version": 1, "step": 1, "time": "2026-11-24T01:12:14Z"},
        {"event": "sync.version.staged", "version": 2, "step": 2, "time": "2026-11-24T01:12:18Z"},
        {"event": "sync.version.rejected", "version": 2, "reason": reason, "time": "2026-11-24T01:12:19Z"},
        {"event": "sync.run.rolled_back", "version": 3, "reason": reason, "time": "2026-11-24T01:12:20Z"},
        {"event": "sync.version.pinned", "version": 1, "by": reason, "time": "2026-11-24T01:12:21Z"},
    ]
    write(job / "log/sync.log", *(json.dumps(line) + "\n" for line in lines))


def make_job(folder: Path, change: Callable[[dict[str, Any]], Any] = lambda row: None) -> Path:
    """A job folder as a stopped run leaves it, without NATS' store. `change` is applied to every experience."""
    config = {
        "project": "tests", "name": folder.name, "checkpoint_root_dir": str(folder.parent),
        "model": {"model_path": "none", "max_prompt_tokens": 8, "max_response_tokens": 8},
        "algorithm": {"algorithm_type": "grpo", "repeat_times": ROLLOUTS},
        "buffer": {"batch_size": GROUPS, "total_steps": 9,
                   "explorer_input": {"taskset": {"name": "sums", "path": str(folder)}}},
    }  # fmt: skip
    write(folder / "config.json", json.dumps(config))
    write(folder / ".lock", "")
    (folder / "log").mkdir()
    rows = [
        experience(step, ordinal, rollout)
        for step in range(1, STEPS + 1)
        for ordinal in range((step - 1) * GROUPS + 1, step * GROUPS + 1)
        for rollout in range(ROLLOUTS)
    ]
    for row in rows:
        change(row)
    write(folder / "buffer/experience_buffer.jsonl", *(json.dumps(row) + "\n" for row in rows))
    lines = [{"step": step, "time": 1.7e9 + 3 * step, "sample/reward_mean": 0.5, "time/step": 1.0, "time/wait": 2.0}
             for step in range(1, STEPS + 1)]  # fmt: skip
    write(folder / "monitor/trainer.jsonl", *(json.dumps(line) + "\n" for line in lines))
    return folder
