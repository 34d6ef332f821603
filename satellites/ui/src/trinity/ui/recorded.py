"""The ledger of a run as a file, recorded.json: the runs of `trinity ui --demo` have no NATS and no services."""

import json
from pathlib import Path
from typing import Any

from trinity.reading.client import Buffer
from trinity.reading.errors import RunError
from trinity.reading.wire import Letter
from trinity.runtime import files

Facts = dict[str, Any]

_FILE = "recorded.json"
_MOST_LETTERS = 2000


def is_recorded(folder: Path | None) -> bool:
    """Returns True for a copy of a run, which has this file in place of the store of NATS."""
    return folder is not None and (folder / _FILE).is_file() and not (folder / "nats").exists()


async def record(buffer: Buffer, folder: Path) -> None:
    """Writes the answers of a run's buffer to `folder`."""
    counts = await buffer.counts()
    steps = range(1, counts["ledger_step"] + 1)
    letters = await buffer.letters(_MOST_LETTERS)
    found = {
        "counts": counts,
        "entries": [await buffer.accounted_entry(step) for step in steps],
        "attempts": [await buffer.attempts(step) for step in steps],
        "letters": [await buffer.letter(one.ordinal) for one in letters],
    }
    (folder / _FILE).write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


class RecordedBuffer:
    """Has the methods of `trinity.reading.client.Buffer`. Raises RunError as they do."""

    def __init__(self, folder: Path) -> None:
        found = files.read_json(folder / _FILE)
        if not isinstance(found, dict):
            raise RunError(f"{folder / _FILE} is no record of a run; record it again")
        self._found: Facts = found

    async def counts(self) -> Facts:
        return dict(self._found["counts"])

    async def newest_step(self) -> int:
        return len(self._found["entries"])

    async def accounted_entry(self, step: int) -> tuple[Facts, Facts | None]:
        entry, account = self._of_step("entries", step)
        return entry, account

    async def entry(self, step: int) -> Facts:
        return (await self.accounted_entry(step))[0]

    async def attempts(self, step: int) -> dict[int, Facts]:
        return {int(ordinal): one for ordinal, one in self._of_step("attempts", step).items()}

    async def letters(self, limit: int) -> list[Letter]:
        names = Letter.__dataclass_fields__
        return [Letter(**{name: one[name] for name in names}) for one in self._found["letters"][:limit]]

    async def letter(self, ordinal: int) -> Facts:
        for one in self._found["letters"]:
            if one["ordinal"] == ordinal:
                return dict(one)
        raise RunError(f"task {ordinal} has no dead letter")

    def _of_step(self, name: str, step: int) -> Any:
        steps = self._found[name]
        if not 1 <= step <= len(steps):
            raise RunError(f"step {step} has no ledger entry; the newest is {len(steps)}")
        return steps[step - 1]
