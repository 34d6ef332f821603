"""A hub that accepts and says nothing, or sends a byte a second, is named on the screen and given up after a limit."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from trinity.cli.supervise.checks import hub_models, preflight
from trinity.config import Config, make_plan
from trinity.data import datasets
from trinity.runtime import hub, waits
from trinity.runtime.errors import Unavailable

pytestmark = pytest.mark.core

HUB_PROBLEM = preflight.hub_problem  # conftest.py replaces it in tests


class Silent:
    """Accepts connections, reads nothing and answers nothing; with `drips`, a byte of an answer at a time."""

    def __init__(self, drips: bool) -> None:
        self._drips = drips
        self._server = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.url = f"http://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._server.accept()[0]
            except OSError:
                return
            self._open.append(connection)
            if self._drips:
                threading.Thread(target=self._drip, args=(connection,), daemon=True).start()

    def _drip(self, connection: socket.socket) -> None:
        try:
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\nX: ")
            while True:
                connection.sendall(b"a")
                time.sleep(0.1)
        except OSError:
            return

    def was_asked(self) -> bool:
        return bool(self._open)

    def close(self) -> None:
        for one in [self._server, *self._open]:
            one.close()


@pytest.fixture(params=[False, True], ids=["silent", "a byte at a time"])
def silent(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Silent]:
    server = Silent(request.param)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.url)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "STALL_SECONDS", 1.5)
    monkeypatch.setattr(hub, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(waits, "_TELL_SECONDS", 0.2)
    yield server
    server.close()


@pytest.fixture
def said() -> Iterator[list[str]]:
    lines: list[str] = []
    with waits.on_screen(lines.append):
        yield lines


def test_the_files_of_a_model(silent: Silent, said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "STALL_SECONDS", 6.0)  # the child imports the hub's client first
    model = {"model_path": "someone/model"}
    plan = make_plan(Config.model_validate({"project": "p", "name": "n", "model": model, "mode": "serve"}))
    begin = time.monotonic()
    with pytest.raises(Unavailable, match=f"the hub at {silent.url} sends no files of someone/model: 6 s without"):
        hub_models.fetch_models(plan)
    assert time.monotonic() - begin < 30
    assert silent.was_asked()
    assert said == [
        f"waits for the hub at {silent.url} (the files of someone/model; gives up after 6 s without progress)"
    ]


def test_a_dataset(silent: Silent, said: list[str]) -> None:
    with pytest.raises(datasets.DatasetError, match=f"'someone/rows' .*{silent.url}") as raised:
        datasets.read("someone/rows")
    assert said, raised.value
    assert silent.was_asked()
    assert said[0].startswith(f"waits for the hub at {silent.url} (an answer; gives up after 1.5 s")


def test_the_config_of_a_model(silent: Silent, said: list[str]) -> None:
    found = HUB_PROBLEM("someone/model")
    assert f"the hub at {silent.url} sends no config.json of someone/model: 1.5 s without progress" in found
    assert said and silent.was_asked()


def test_work_that_computes_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "STALL_SECONDS", 0.3)
    monkeypatch.setattr(hub, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(hub, "_PROCESSOR_SECONDS", 0.02)

    def compute() -> int:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            sum(range(1000))
        return 7

    assert hub.bounded(compute, "the hub", "rows") == 7
    with pytest.raises(ZeroDivisionError):
        hub.bounded(lambda: 1 // 0, "the hub", "rows")
