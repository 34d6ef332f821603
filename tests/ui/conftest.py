"""Debian's chromium for the pages of trinity.ui. Without it the tests are skipped: apt-get install chromium."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from playwright.sync_api import Browser, Dialog, Page, sync_playwright

from trinity.runtime.process import free_port
from trinity.ui.app import make_app
from trinity.ui.places import Places

CHROMIUM = shutil.which("chromium")
KEY = "the-key"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one file: while it is open, its event loop counts as running in this thread, so that async tests could not."""
    if CHROMIUM is None:
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--headless", "--no-sandbox"])
        yield found
        found.close()


@dataclass
class Watched:
    """A page, and what went wrong in it: errors and refusals of its policy, dialogs that something opened."""

    page: Page
    address: str
    wrong: list[str] = field(default_factory=list)

    def open(self, path: str) -> Page:
        self.page.goto(self.address + path)
        return self.page


@pytest.fixture
def watch(browser: Browser) -> Iterator[Callable[..., Watched]]:
    """Opens a page in a context of its own."""
    opened: list[Page] = []

    def make(address: str, width: int = 1280, scheme: str = "light") -> Watched:
        page = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme).new_page()  # type: ignore[arg-type]
        opened.append(page)
        watched = Watched(page, address.partition("/run/")[0].partition("/?")[0])

        def dismiss(dialog: Dialog) -> None:
            watched.wrong.append(dialog.message)
            dialog.dismiss()

        page.set_default_timeout(30_000)
        page.on("console", lambda message: watched.wrong.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: watched.wrong.append(str(error)))
        page.on("dialog", dismiss)
        page.goto(address)
        return watched

    yield make
    for page in opened:
        page.context.close()


@pytest.fixture
def served() -> Iterator[Callable[[Path | None], str]]:
    """Serves a job folder, or all runs, in this process; returns the address with its key."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(job: Path | None) -> str:
        port = free_port()
        app = make_app(Places(job), KEY, writes=True)
        config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 30
        while not server.started:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        return f"http://127.0.0.1:{port}/?key={KEY}"

    yield serve
    for server, thread in running:
        server.should_exit = True
        thread.join(30)
