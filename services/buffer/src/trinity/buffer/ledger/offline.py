"""Batches from what lies on disk instead of the experience log: rows of a dataset (SFT), or an archive of experience.

The same ledger as of a run with explorers, so the same promise for step k.
"""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from trinity.buffer.hooks import hook
from trinity.buffer.ledger.entries import Ledger
from trinity.buffer.ledger.wire import BatchGroup, Entry, Example
from trinity.buffer.state.context import RunContext
from trinity.buffer.window.groups import StoredGroup
from trinity.config import Plan
from trinity.config.schema.buffer import ExperienceBufferConfig
from trinity.config.schema.model import ModelConfig
from trinity.data.datasets import Row, read_buffer, reader
from trinity.data.experience import Group, Limits
from trinity.data.selectors import make_selector
from trinity.data.vision import image_rules, why_no_images
from trinity.data.wire import encode_outcome
from trinity.plugins import satellites
from trinity.runtime.errors import InvalidInput

_AHEAD = 4
_PATH = "buffer.trainer_input.experience_buffer.path"


class _Source(Protocol):
    @property
    def rows(self) -> Sequence[Any]: ...

    def members(self, rows: Iterable[int]) -> list[StoredGroup]: ...

    def part(self, row: int) -> Example | BatchGroup: ...


class _Examples:
    """Rows of a dataset; the trainer tokenises them."""

    def __init__(self, config: ExperienceBufferConfig, kind: str) -> None:
        self.rows: Sequence[Row] = read_buffer(config)
        self._example = reader(kind, config.format, self.rows[0])

    def members(self, rows: Iterable[int]) -> list[StoredGroup]:
        return []

    def part(self, row: int) -> Example:
        return Example(row, **self._example(self.rows[row], row))


class _Recorded:
    """Groups of experience, as an archive has them. A row is a group."""

    def __init__(self, config: ExperienceBufferConfig, model: ModelConfig) -> None:
        assert config.path
        self._path = config.path
        self._images = Limits(images=image_rules(model.model_path, model.images))
        self._unreadable = why_no_images(model.model_path, model.images)
        self.rows: Sequence[Group] = hook("archive", _PATH).read_experiences(config.path, config.name)

    def members(self, rows: Iterable[int]) -> list[StoredGroup]:
        found = []
        for row in rows:
            group = self.rows[row]
            oldest, newest = group.versions
            found.append(
                StoredGroup(
                    log_sequence=0,
                    task_id=group.task.task_id,
                    ordinal=row + 1,
                    num_experiences=len(group.experiences),
                    oldest_version=oldest,
                    newest_version=newest,
                    num_response_tokens=group.response_tokens,
                    reward_mean=group.reward_mean,
                    num_sampled_tokens=group.sampled_tokens,
                )
            )
        return found

    def part(self, row: int) -> BatchGroup:
        """Raises InvalidInput for images that the model does not read."""
        group = self.rows[row]
        for index, experience in enumerate(group.experiences):
            if experience.images and self._unreadable is not None:
                raise InvalidInput(_PATH, f"{self._path!r} has images in group {row}, and {self._unreadable}")
            if experience.images:
                experience.check(f"group {row} of {self._path}: experiences[{index}]", self._images)
        return BatchGroup(encode_outcome(group), row + 1)


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

    def _entry(self, step: int) -> Entry:
        size = self._context.plan.groups_per_step
        rows = [self._selector.select(position) for position in range((step - 1) * size, step * size)]
        groups = self._source.members(rows)
        experiences = sum(group.num_experiences for group in groups)
        return Entry(
            run=self._context.run,
            step=step,
            rows=tuple(rows),
            groups=tuple(groups),
            created_at_seconds=time.time(),
            policy="dataset",
            reward_mean=sum(g.reward_mean * g.num_experiences for g in groups) / max(1, experiences),
        )

    def part(self, row: int) -> Example | BatchGroup:
        """A row as the trainer gets it. Raises InvalidInput for one that another dataset had."""
        if row >= len(self):
            found = f"has {len(self)} rows, and the ledger names row {row} of the dataset with which the run began"
            raise InvalidInput(_PATH, f"{found}; give that one, or begin another run by name=...")
        return self._source.part(row)


def _open(plan: Plan, config: ExperienceBufferConfig) -> _Source:
    if not config.path:
        raise InvalidInput(_PATH, "is missing")
    found = satellites.find("archive")
    if not plan.algorithm.offline or (found and found.holds_experiences(config.path, config.name)):
        return _Recorded(config, plan.config.model)
    return _Examples(config, plan.algorithm.rows)
