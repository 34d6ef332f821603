"""The outcome of one check."""

from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    OK = "ok"
    FAILED = "FAILED"
    # Could not be tried; the detail has the reason.
    SKIPPED = "skipped"
    # Allowed, but worth knowing.
    NOTE = "note"


@dataclass(frozen=True)
class Result:
    """`subject`: the environment or scorer, or "provider"."""

    subject: str
    check: str
    verdict: Verdict
    detail: str = ""


class Broken(Exception):
    """The contract is violated."""


class Skipped(Exception):
    """The check cannot be tried."""


class Noted(Exception):
    """Allowed, but worth knowing."""


async def judge(subject: str, check: str, work: Awaitable[None]) -> Result:
    """Runs a check."""
    try:
        await work
    except Broken as error:
        return Result(subject, check, Verdict.FAILED, str(error))
    except Skipped as error:
        return Result(subject, check, Verdict.SKIPPED, str(error))
    except Noted as error:
        return Result(subject, check, Verdict.NOTE, str(error))
    return Result(subject, check, Verdict.OK)
