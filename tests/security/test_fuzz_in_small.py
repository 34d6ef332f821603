"""`make fuzz` in small: the table has every RPC and every subject, and no violation."""

import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

sys.path.insert(0, str(Path(__file__).parent))

import fuzz  # noqa: E402


async def test_malformed_messages_break_nothing() -> None:
    rows = {row.place: row for row in await fuzz.fuzz(calls=40, messages=30, seed=3)}
    for service in fuzz.SERVICES:
        for method in fuzz.methods_of(service):
            assert rows[f"{method.containing_service.name}.{method.name}"].sent == 40
    assert [row.sent for name, row in rows.items() if name.startswith("batches.")] == [30, 30, 30]
    assert {name: row.problems for name, row in rows.items() if row.problems} == {}


def test_a_violation_shows() -> None:
    row = fuzz.Row("BufferService.Stats", 3)
    row.problems.append("2 INTERNAL")
    assert "2 INTERNAL" in "".join(str(cell) for column in fuzz.table([row]).columns for cell in column.cells)
