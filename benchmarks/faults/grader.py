"""The grader that every system calls. It records each reward that it gave, and fails or hangs where a case says so.

FAULTS_GRADER names a JSON file: {"raises": [rows], "nan": [rows], "hangs": [rows]}. Each row does so once,
whatever process asks.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path

from probe import record

HANGS_SECONDS = 3600.0


class GraderUnavailable(RuntimeError):
    """Stands for the 503 of a grading service."""


def grade(row: int, response: str, ids: Sequence[int]) -> float:
    """Returns the share of digits in a response to a row; `ids`: its tokens, by which the auditor finds it again.

    Raises GraderUnavailable, returns NaN or hangs, where the case says so.
    """
    if _is_struck("raises", row):
        record("grade", row=row, ids=list(ids), value=None)
        raise GraderUnavailable(f"the grader is unavailable for row {row}")
    if _is_struck("hangs", row):
        record("grade", row=row, ids=list(ids), value=None)
        time.sleep(HANGS_SECONDS)
    if _is_struck("nan", row):
        record("grade", row=row, ids=list(ids), value=None)
        return float("nan")
    value = sum(character.isdigit() for character in response) / max(len(response), 1)
    record("grade", row=row, ids=list(ids), value=value)
    return value


def _is_struck(how: str, row: int) -> bool:
    """Returns True for the first call that asks for a row of the case."""
    case = Path(os.environ["FAULTS_GRADER"])
    if row not in json.loads(case.read_text()).get(how, []):
        return False
    try:
        case.with_name(f"{how}-{row}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
