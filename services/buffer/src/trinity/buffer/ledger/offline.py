"""Batches from what lies on disk instead of the experience log: rows of a dataset (SFT), or an archive of experience.

The same ledger as of a run with explorers, so the same promise for step k.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.ledger.entries import Ledger
from trinity.buffer.state.context import RunContext
from trinity.config import Plan
from trinity.config.schema.buffer import ExperienceBufferConfig
from trinity.data.archive import Experiences, holds_experiences, read_experiences
from trinity.data.datasets import Row, read_buffer, reader
from trinity.data.selectors import make_selector
from trinity.data.wire import encode_outcome
from trinity.runtime.errors import InvalidInput

_AHEAD = 4


class _Source(Protocol):
    @property
    def rows(self) -> Sequence[Any]: ...

    def members(self, rows: Iterable[int]) -> list[pb.LedgerGroup]: ...

    def part(self, row: int) -> pb.BatchPart: ...


class _Examples:
    """Rows of a dataset; the trainer tokenises them."""

    def __init__(self, config: ExperienceBufferConfig, kind: str) -> None:
        self.rows: Sequence[Row] = read_buffer(config)
        self._example = reader(kind, config.format, self.rows[0])

    def members(self, rows: Iterable[int]) -> list[pb.LedgerGroup]:
        return []

    def part(self, row: int) -> pb.BatchPart:
        return pb.BatchPart(example=pb.Example(row=row, **self._example(self.rows[row], row)))


class _Recorded:
    """Groups of experience, as an archive has them. A row is a group."""

    def __init__(self, config: ExperienceBufferConfig) -> None:
        assert config.path
        self.rows: Experiences = read_experiences(config.path, config.name)

    def members(self, rows: Iterable[int]) -> list[pb.LedgerGroup]:
        found = []
        for row in rows:
            group = self.rows[row]
            member = pb.LedgerGroup(task_id=group.task.task_id, ordinal=row + 1, num_experiences=len(group.experiences))
            member.oldest_version, member.newest_version = group.versions
            member.num_response_tokens, member.reward_mean = group.response_tokens, group.reward_mean
            member.num_sampled_tokens = group.sampled_tokens
            found.append(member)
        return found

    def part(self, row: int) -> pb.BatchPart:
        return pb.BatchPart(group=pb.BatchGroup(outcome=encode_outcome(self.rows[row]), ordinal=row + 1))


class OfflineSource:
    """Rows of what `config` names, in ledger order. Raises DatasetError or InvalidInput."""

    def __init__(self, context: RunContext, ledger: Ledger, config: ExperienceBufferConfig) -> None:
        self._context = context
        self._ledger = ledger
        self._source = _open(context.plan, config)
        self._selector = make_selector(config.data_selector, self._source.rows)

    def __len__(self) -> int:
        return len(self._source.rows)

    async def run(self) -> None:
        while True:
            await self._context.changed.wait_for(lambda: self._ledger.newest_step < self._target())
            while self._ledger.newest_step < self._target():
                await self._ledger.append(self._entry(self._ledger.newest_step + 1))
                await self._context.changed.notify()

    def _target(self) -> int:
        """Entries are written up to a few beyond the step that the trainer asks for."""
        return min(self._context.wanted_step + _AHEAD, self._context.last_step)

    def _entry(self, step: int) -> pb.LedgerEntry:
        size = self._context.plan.groups_per_step
        rows = [self._selector.select(position) for position in range((step - 1) * size, step * size)]
        groups = self._source.members(rows)
        experiences = sum(group.num_experiences for group in groups)
        return pb.LedgerEntry(
            run=self._context.run,
            step=step,
            rows=rows,
            groups=groups,
            created_at_seconds=time.time(),
            policy="dataset",
            reward_mean=sum(g.reward_mean * g.num_experiences for g in groups) / max(1, experiences),
        )

    def part(self, row: int) -> pb.BatchPart:
        """A row as the trainer gets it."""
        return self._source.part(row)


def _open(plan: Plan, config: ExperienceBufferConfig) -> _Source:
    if not config.path:
        raise InvalidInput("buffer.trainer_input.experience_buffer.path", "is missing")
    if not plan.algorithm.offline or holds_experiences(config.path, config.name):
        return _Recorded(config)
    return _Examples(config, plan.algorithm.rows)
