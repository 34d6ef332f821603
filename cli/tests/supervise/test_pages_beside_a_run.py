"""monitor.ui: `trinity ui` beside a run, of which the run does not depend."""

import asyncio
import re
import sys
from pathlib import Path

import httpx
import pytest

from support.fakes.pages.recorded_run import RECORDED
from trinity.cli.supervise.stage.display import Pages
from trinity.config import Config
from trinity.runtime.process import is_alive

pytestmark = pytest.mark.core


def pages(monkeypatch: pytest.MonkeyPatch, said: list[str], folder: Path, *, ui: bool, terminal: bool = True) -> Pages:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    return Pages(Config.model_validate({"monitor": {"ui": ui}}), folder, said.append)


async def until(said: list[str], count: int) -> None:
    async with asyncio.timeout(60):
        while len(said) < count:
            await asyncio.sleep(0.05)


async def test_a_run_on_a_terminal_shows_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    made = pages(monkeypatch, said, RECORDED, ui=True)
    await made.start()
    await made.start()
    try:
        await until(said, 1)
        [address] = re.findall(r"http://127\.0\.0\.1:\S+", said[0])
        async with httpx.AsyncClient(follow_redirects=True) as http:
            assert "quickstart" in (await http.get(address)).text
        async with httpx.AsyncClient() as stranger:
            assert (await stranger.get(address.partition("?")[0])).status_code in (401, 403)
    finally:
        process = made._process
        await made.close()
    assert process is not None and not is_alive(process.pid)
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(address)


@pytest.mark.parametrize(("ui", "terminal"), [(False, True), (True, False)], ids=["not asked for", "no terminal"])
async def test_else_there_are_none(monkeypatch: pytest.MonkeyPatch, ui: bool, terminal: bool) -> None:
    made = pages(monkeypatch, [], RECORDED, ui=ui, terminal=terminal)
    await made.start()
    assert made._process is None
    await made.close()


async def test_pages_that_do_not_start_are_said_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said: list[str] = []
    made = pages(monkeypatch, said, tmp_path / "none", ui=True)
    await made.start()
    await until(said, 1)
    await made.close()
    assert len(said) == 1 and "ended with exit code" in said[0] and f"trinity ui --job {tmp_path / 'none'}" in said[0]
