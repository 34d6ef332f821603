"""The outcome of one check."""

from collections.abc import Awaitable
from dataclasses import dataclass
from enum import StrEnum

import grpc

from trinity.sdk.provider.client import Broken, Refused


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


class Skipped(Exception):
    """The check cannot be tried."""


class Noted(Exception):
    """Allowed, but worth knowing."""


async def refused(work: Awaitable[object], *codes: grpc.StatusCode) -> None:
    """Raises Broken unless the call is refused with one of these codes."""
    names = " or ".join(code.name for code in codes)
    try:
        await work
    except Refused as refusal:
        if refusal.code not in codes:
            raise Broken(f"it was refused with {refusal}; must be {names}") from None
        return
    raise Broken(f"it was answered; must be refused with {names}")


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
