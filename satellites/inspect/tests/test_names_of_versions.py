"""`trinity weights rollback` takes names of versions besides numbers."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from typer.testing import CliRunner

from trinity.cli.main import app
from trinity.inspect import versions
from trinity.inspect.rollback import numbered
from trinity.reading.errors import RunError

pytestmark = pytest.mark.core


class Sync:
    async def versions(self) -> list[Any]:
        states = {9: "REJECTED", 8: "RETIRED", 7: "LIVE", 6: "RETIRED", 5: "WITHDRAWN", 4: "RETIRED"}
        return [SimpleNamespace(version=n, step=10 * n, state=state) for n, state in states.items()]


SYNC: Any = Sync()


@pytest.mark.parametrize(
    ("name", "version"),
    [("latest", 8), ("latest-2", 6), ("live", 7), ("live-1", 6), ("live-2", 4), ("checkpoint:60", 6)],
)
async def test_a_name_means_a_version_that_was_live(name: str, version: int) -> None:
    assert await numbered(SYNC, name) == version


@pytest.mark.parametrize("name", ["checkpoint:90", "checkpoint:50", "latest-9"])
async def test_one_that_is_not_there_is_refused_with_those_that_are(name: str) -> None:
    with pytest.raises(RunError, match=f"no version that was LIVE is {name}; there are versions 4, 6, 7, 8"):
        await numbered(SYNC, name)


@pytest.mark.parametrize("name", ["newest", "-1", "checkpoint:", "latest-", "²", "12345678901234567890123"])
async def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(RunError, match="names no version; give a number"):
        await numbered(SYNC, name)


@pytest.mark.parametrize("name", ["²", "99999999999999999999999"])
def test_a_number_that_no_version_has_is_refused_as_a_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "ask", lambda _live, _stage, read: asyncio.run(read(SYNC)))
    with pytest.raises(RunError, match="names no version; give a number"):
        versions.rollback(cast(Any, None), name, yes=True)


@pytest.mark.parametrize("arguments", [["weights", "show"], ["weights", "pin"], ["batch", "show"]])
def test_a_number_that_no_request_holds_is_one_sentence(arguments: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(app, [*arguments, str(2**63), "--job", str(tmp_path)])
    assert (done.exit_code, "give a number up to 2147483647" in done.output) == (2, True), done.output
