"""Batches from a dataset instead of the experience log (SFT). The same ledger, so the same promise for step k."""

import json
import time
from collections.abc import Sequence

from trinity.api.buffer.v1 import buffer_pb2 as pb
from trinity.buffer.ledger import Ledger
from trinity.buffer.selectors import make_selector
from trinity.buffer.shared import RunContext
from trinity.config.datasets import Row, read_buffer, sft_format, sft_messages
from trinity.config.schema.buffer import ExperienceBufferConfig

_AHEAD = 4


class OfflineSource:
    """Rows of the dataset, in ledger order."""

    def __init__(self, context: RunContext, ledger: Ledger, config: ExperienceBufferConfig) -> None:
        self._context = context
        self._ledger = ledger
        self._config = config
        self._rows: Sequence[Row] = read_buffer(config)
        self._selector = make_selector(config.data_selector, self._rows)
        self._format = sft_format(config.format, self._rows[0])

    def __len__(self) -> int:
        return len(self._rows)

    async def run(self) -> None:
        while True:
            await self._context.bell.wait_for(lambda: self._ledger.newest_step < self._target())
            while self._ledger.newest_step < self._target():
                await self._ledger.append(self._entry(self._ledger.newest_step + 1))
                await self._context.bell.ring()

    def _target(self) -> int:
        """Entries are written up to a few beyond the step that the trainer asks for."""
        return min(self._context.wanted_step + _AHEAD, self._context.last_step)

    def _entry(self, step: int) -> pb.LedgerEntry:
        size = self._context.plan.groups_per_step
        rows = [self._selector.select(position) for position in range((step - 1) * size, step * size)]
        return pb.LedgerEntry(
            run=self._context.run, step=step, rows=rows, created_at_seconds=time.time(), policy="dataset"
        )

    def part(self, row: int) -> pb.BatchPart:
        """A row as the trainer gets it."""
        messages = sft_messages(self._rows[row], self._format, row)
        return pb.BatchPart(example=pb.Example(row=row, messages_json=json.dumps(messages)))
