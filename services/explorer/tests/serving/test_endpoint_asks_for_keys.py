"""The OpenAI endpoint's keys: 401 in OpenAI's form without one, several keys, the file read again."""

from pathlib import Path
from typing import Any

import openai
import pytest
from prometheus_client import make_asgi_app
from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.testclient import TestClient
from starlette.websockets import WebSocket, WebSocketDisconnect

from trinity.explorer.serving.endpoint import listen_at, open_keys, with_keys
from trinity.runtime.errors import InvalidInput
from trinity.runtime.trust.keys import KeyFile, make_key_file

pytestmark = pytest.mark.core


async def _models(request: Request) -> JSONResponse:
    return JSONResponse({"object": "list", "data": [{"id": "m", "object": "model", "created": 0, "owned_by": "t"}]})


async def _socket(socket: WebSocket) -> None:
    await socket.accept()
    await socket.close()


def _client(file: Path) -> TestClient:
    app: Any = Starlette(
        routes=[Route("/v1/models", _models), Route("/health", _models), WebSocketRoute("/ws", _socket)]
    )
    return TestClient(with_keys(app, KeyFile(file, "file")), base_url="http://endpoint")


def _ask(http: TestClient, key: str) -> list[str]:
    client = openai.OpenAI(base_url="http://endpoint/v1", api_key=key, http_client=http, max_retries=0)
    return [model.id for model in client.models.list().data]


def test_an_openai_client_needs_one_of_the_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-of-ann\n\n  key-of-bob  \n")
    http = _client(file)
    assert _ask(http, "key-of-ann") == _ask(http, "key-of-bob") == ["m"]
    with pytest.raises(openai.AuthenticationError) as refused:
        _ask(http, "key-of-eve")
    assert (refused.value.status_code, refused.value.code, refused.value.type) == (
        401, "invalid_api_key", "invalid_request_error"
    )  # fmt: skip


def test_anthropics_clients_send_it_in_a_header_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("key-of-ann\n")
    http = _client(tmp_path / "keys")
    assert http.get("/v1/models", headers={"x-api-key": "key-of-ann"}).status_code == 200
    refused = http.post("/v1/messages", headers={"x-api-key": "key-of-eve"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")


@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer ", "bearer keys", "Basic key-of-ann", "key-of-ann"])
def test_no_path_answers_without_a_key(tmp_path: Path, authorization: str) -> None:
    file = tmp_path / "keys"
    file.write_text("key-of-ann\n")
    http = _client(file)
    for path in ("/v1/models", "/health", "/metrics", "/"):
        answer = http.get(path, headers={"Authorization": authorization})
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(WebSocketDisconnect), http.websocket_connect("/ws", headers={"Authorization": authorization}):
        pass
    with http.websocket_connect("/ws", headers={"Authorization": "Bearer key-of-ann"}):
        pass


def test_a_browsers_preflight_alone_passes_without_a_key(tmp_path: Path) -> None:
    """vLLM mounts an application like this one, which answers every method."""
    file = tmp_path / "keys"
    file.write_text("key-of-ann\n")
    app = Starlette(routes=[Mount("/metrics", make_asgi_app())])
    app.add_middleware(CORSMiddleware, allow_origins=["*"])
    http = TestClient(with_keys(app, KeyFile(file, "file")), base_url="http://endpoint")
    origin, asked = {"Origin": "http://page"}, {"Access-Control-Request-Method": "GET"}
    for headers in ({}, origin, asked):
        assert http.options("/metrics", headers=headers).status_code == 401
    preflight = http.options("/metrics", headers=origin | asked)
    assert (preflight.status_code, preflight.text) == (200, "OK")
    assert "python_info" in http.options("/metrics", headers={"Authorization": "Bearer key-of-ann"}).text


def test_a_removed_key_fails_and_an_added_one_works_without_a_restart(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    http = _client(file)
    assert _ask(http, "old") == ["m"]
    file.write_text("new\n")
    assert _ask(http, "new") == ["m"]
    with pytest.raises(openai.AuthenticationError):
        _ask(http, "old")


def test_without_keys_it_listens_on_the_loopback_alone(tmp_path: Path) -> None:
    assert open_keys("127.0.0.1:8010", None) is None
    for host in ("0.0.0.0", "[::]", "10.0.0.5"):
        with pytest.raises(InvalidInput, match="TRINITY_EXPLORER_API_KEYS_FILE: is empty"):
            open_keys(f"{host}:8010", None)
    (tmp_path / "empty").touch()
    for file in ("absent", "empty"):
        with pytest.raises(InvalidInput, match="TRINITY_EXPLORER_API_KEYS_FILE"):
            open_keys("127.0.0.1:8010", tmp_path / file)


def test_a_made_file_has_one_key_that_its_owner_alone_reads(tmp_path: Path) -> None:
    file = make_key_file(tmp_path / "job" / "serve.keys")
    key = file.read_text().strip()
    assert (file.stat().st_mode & 0o777, len(key)) == (0o600, 43)
    assert make_key_file(file).read_text().strip() == key, "kept over restarts"


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_port_that_was_taken_meanwhile_is_named(host: str) -> None:
    with listen_at(f"{host}:0") as held:
        port = held.getsockname()[1]
        with pytest.raises(InvalidInput, match=rf":{port} cannot be listened on: .*in use.*; choose another port"):
            listen_at(f"{host}:{port}")
    listen_at(f"{host}:{port}").close()
