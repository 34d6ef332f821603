"""The gateway waits for results, and refuses odd requests so that no reader of the log meets them."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from trinity.runtime.broker import connect
from trinity.runtime.names import RunNames
from trinity.runtime.trust.keys import make_key_file
from trinity.tinker.commands.log import CommandLog, Kind, Result
from trinity.tinker.gateway import app
from trinity.tinker.gateway.app import Gateway
from trinity.tinker.gateway.journal import Journal
from trinity.tinker.gateway.results import Results
from trinity.tinker.gateway.saves import Saves
from trinity.tinker.gateway.settings import TinkerSettings
from trinity.tinker.gateway.tenants import TenantKeys

pytestmark = pytest.mark.core


class _Place:
    """A gateway on a log without an executor, and a client with a model."""

    def __init__(self, log: CommandLog, folder: Path) -> None:
        self.log = log
        self.results = Results(log, 3600)
        settings = TinkerSettings(run="answers", keys_folder=folder, base_model="tiny", vocabulary=10)
        self.gateway = Gateway(settings, TenantKeys(folder), Journal(log, Saves(4)), self.results, log, None, 2**20)
        self.app = self.gateway.app()
        self.key = (folder / "alice").read_text().strip()
        transport = httpx.ASGITransport(app=self.app)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://gateway", headers={"X-API-Key": self.key})

    async def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        return await self.client.post(f"/api/v1/{path}", json=body)

    async def create(self) -> str:
        session = (await self.post("create_session", {})).json()["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 4}}
        return str((await self.post("create_model", body)).json()["model_id"])


@pytest.fixture
async def place(nats_url: str, tmp_path: Path) -> AsyncIterator[_Place]:
    make_key_file(tmp_path / "keys" / "alice", "tml-")
    async with await connect(nats_url, "test") as broker:
        log = CommandLog(broker, RunNames("answers"))
        await log.open(2**24, 3600)
        made = _Place(log, tmp_path / "keys")
        following = asyncio.create_task(made.results.follow())
        yield made
        following.cancel()
        await made.client.aclose()


async def test_a_wait_ends_at_its_limit_and_at_its_result(place: _Place, monkeypatch: pytest.MonkeyPatch) -> None:
    request_id = f"{await place.create()}:0"
    monkeypatch.setattr(app, "_WAIT_SECONDS", 0.2)
    begin = asyncio.get_running_loop().time()
    answer = await place.post("retrieve_future", {"request_id": request_id})
    assert answer.json() == {"type": "try_again", "request_id": request_id, "queue_state": "active"}
    assert 0.2 <= asyncio.get_running_loop().time() - begin < 10
    monkeypatch.setattr(app, "_WAIT_SECONDS", 60.0)
    waiting = [asyncio.create_task(place.post("retrieve_future", {"request_id": request_id})) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert not any(one.done() for one in waiting)
    command = [one async for one in place.log.commands(0, await place.log.last_command())][-1]
    await place.log.add_result(
        Result(request_id, Kind.CREATE_MODEL, b'{"model_id": "m"}', command.position), command, 0
    )
    for one in waiting:
        assert (await asyncio.wait_for(one, 30)).json() == {"model_id": "m"}


async def test_odd_numbers_are_refused_and_not_stored(place: _Place) -> None:
    model = await place.create()
    last = await place.log.last_command()
    for path in ("optim_step", "save_weights_external"):
        for number in (True, 0, -1, 1.0, "1", None):
            answer = await place.post(path, {"model_id": model, "seq_id": number, "adam_params": {}})
            assert answer.status_code == 422, (path, number, answer.text)
    for number in ("\u00b2", "\u0660", "9" * 5000, "-1", "1", ""):
        answer = await place.post("retrieve_future", {"request_id": f"{model}:{number}"})
        assert answer.status_code == 404, (number[:9], answer.text)
    assert await place.log.last_command() == last


async def test_what_stays_in_the_log_is_short(place: _Place) -> None:
    model = await place.create()
    long = "x" * 2**17
    save = {"model_id": model, "path": "s"}
    load = {"model_id": model, "path": f"tinker://{model}/weights/{long}", "optimizer": False}
    bad = [
        ("create_session", {"user_metadata": {"note": long}}, "user_metadata"),
        ("create_session", {"tags": [long]}, "tags"),
        ("save_weights", {**save, "seq_id": 1, "user_metadata": {"note": long}}, "user_metadata"),
        ("save_weights", {**save, "seq_id": 2, long: 1}, "xxx"),
        ("load_weights", {**load, "seq_id": 3}, "path"),
    ]  # fmt: skip
    for path, body, field in bad:
        answer = await place.post(path, body)
        assert (answer.status_code, field in answer.json()["error"][:300]) == (422, True), (path, answer.text[:300])
    assert (await place.post("create_session", {"tags": ["a"], "unknown": long})).status_code == 200
    stored = [one async for one in place.log.commands(0, await place.log.last_command())]
    assert [one.kind for one in stored[2:]] == ["refused"] * 3 + ["session"]
    assert max(len(one.body) for one in stored) < 1000


async def test_a_client_that_leaves_within_a_body_is_no_error(place: _Place) -> None:
    async def leave() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        pass

    headers = [(b"x-api-key", place.key.encode())]
    await place.app(
        {"type": "http", "method": "POST", "path": "/api/v1/optim_step", "headers": headers, "query_string": b""},
        leave,
        send,
    )
