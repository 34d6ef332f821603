"""Archives of experience in tests: places for them, small groups, and what makes groups the same."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from support.fakes.data.experience import make_group, make_task
from trinity.archive import Archive, open_archive, read_experiences
from trinity.data.experience import Group

RUN = "tests-run-000000"
KINDS = ("sqlite", "postgres", "jsonl", "parquet")


@dataclasses.dataclass(frozen=True)
class Place:
    path: str
    name: str

    def open(self, run: str = RUN) -> Archive:
        return open_archive(self.path, self.name, run)

    def read(self) -> list[Group]:
        return list(read_experiences(self.path, self.name))


def groups_of(*sequences: int, size: int = 2, response: int = 3) -> list[tuple[int, Group]]:
    """Small groups by log sequence; a sequence has always the same group."""
    made = ((sequence, make_group(make_task(sequence, repeat_times=size), response=response)) for sequence in sequences)
    return [(sequence, dataclasses.replace(g, started_at_seconds=0.1, finished_at_seconds=0.3)) for sequence, g in made]


def facts(group: Group) -> str:
    """Everything in a group, to the bit, but for which NaN a NaN is."""

    def shown(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            canonical = np.where(np.isnan(value), np.float32("nan"), value) if value.dtype == np.float32 else value
            return value.dtype.name, canonical.tobytes()
        return value

    return repr(dataclasses.asdict(group, dict_factory=lambda items: {name: shown(value) for name, value in items}))


def the_same(read: list[Group], written: list[tuple[int, Group]]) -> bool:
    return [facts(group) for group in read] == [facts(group) for _, group in written]


def archived(tmp_path: Path, *sequences: int, run: str = RUN) -> list[bytes]:
    """Lines of a jsonl archive."""
    archive = open_archive(str(tmp_path / "other.jsonl"), "buffer", run)
    archive.append(groups_of(*sequences), position=sequences[-1])
    archive.close()
    return (tmp_path / "other.jsonl").read_bytes().splitlines(keepends=True)
