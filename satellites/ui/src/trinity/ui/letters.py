"""Dead tasks and failed attempts. Dead letters are retried and dropped here."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from trinity.reading.errors import RunError
from trinity.reading.wire import Letter
from trinity.ui import journeys, screens
from trinity.ui.source import Source

Facts = dict[str, Any]

_ATTEMPTS = 50
_RETRIED = 100  # of one cause, by one command or button
_ORDINAL = re.compile("[0-9]{1,18}")


async def dead(source: Source) -> Facts:
    """Returns dead letters, by cause, and failed attempts. Raises RunError if the buffer cannot be read."""
    found = await source.letters()
    await screens.or_none(source.counts(), [])
    ordinals = source.audit.ordinals | {letter.task_id: letter.ordinal for letter in found}
    entries = await asyncio.to_thread(journeys.log_entries, source.folder, {"event": journeys.FAILED})
    failed = entries[: -_ATTEMPTS - 1 : -1]
    causes: dict[str, list[Letter]] = {}
    for letter in found:
        causes.setdefault(letter.cause, []).append(letter)
    most_first = sorted(causes.items(), key=lambda item: -len(item[1]))
    return {
        "letters": found,
        "failed": [(one.order(), one.fields, ordinals.get(str(one.fields.get("task")))) for one in failed],
        "causes": [(cause, ones, _retry(source, ones)) for cause, ones in most_first],
        "command": f"trinity deadletters list {source.option}",
    }


def ordinals_of(fields: Mapping[str, str]) -> list[int]:
    """Returns the ordinals of a form. Raises RunError if they are invalid."""
    ordinals = fields.get("ordinals", "").split()
    if not 1 <= len(ordinals) <= _RETRIED or not all(_ORDINAL.fullmatch(one) for one in ordinals):
        raise RunError(f"ordinals: {fields.get('ordinals', '')[:80]!r} must be 1 to {_RETRIED} ordinals of tasks")
    return [int(one) for one in ordinals]


async def change(source: Source, what: str, ordinals: Sequence[int]) -> None:
    """Feeds these tasks again, or drops their letters.

    Raises RunError unless the run lives and this user is its operator.
    """
    async with source.writing() as buffer:
        await (buffer.retry_letters(ordinals) if what == "retry" else buffer.drop_letters(ordinals))


def _retry(source: Source, letters: Sequence[Letter]) -> str:
    """Returns the command that feeds these tasks again, at most the oldest _RETRIED."""
    ordinals = " ".join(str(one.ordinal) for one in letters[:_RETRIED])
    return f"trinity deadletters retry {ordinals} {source.option}"


async def letter(source: Source, ordinal: int) -> Facts:
    """Returns one dead letter with the row of its task."""
    found = await source.letter(ordinal)
    hidden = ("error", "task")
    task = found["task"]
    return {
        "ordinal": ordinal,
        "letter": found,
        "fields": [(name, value) for name, value in found.items() if name not in hidden],
        "task": [(name, value) for name, value in task.items() if name != "row" and value not in ("", {}, [])],
        "row": json.dumps(task["row"], indent=1, ensure_ascii=False),
        "command": f"trinity deadletters show {ordinal} {source.option}",
    }
