"""Rows and arguments reach only the addresses and modules that the operator of the environment service allows."""

import socket
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from support.fakes.environments.playing import play
from support.servers.webshop_server import webshop_server
from trinity.environment.settings import EnvironmentSettings
from trinity.environments import ENVIRONMENTS
from trinity.environments.allowed import ADDRESSES_VARIABLE, LOOPBACK, MODULES_VARIABLE, check_address
from trinity.runtime.errors import InvalidInput, Unavailable

pytestmark = pytest.mark.core


def refused(environment: str, task: dict[str, Any], args: dict[str, Any]) -> str:
    with pytest.raises(InvalidInput) as error:
        play(ENVIRONMENTS[environment](), [], task, args)
    return str(error.value)


def test_the_settings_are_the_services_own() -> None:
    fields = EnvironmentSettings.model_fields
    assert {ADDRESSES_VARIABLE, MODULES_VARIABLE} <= {f"TRINITY_ENVIRONMENT_{name}".upper() for name in fields}
    assert fields["allowed_addresses"].default == LOOPBACK


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://10.0.0.1",
        "http://127.0.0.1.example.com:80",
        "http://127.0.0.1@10.0.0.1",
        "http://user:secret@127.0.0.1",
        "http://2130706433/",
        "http://10.0.0.1\\@127.0.0.1",
        "http://[::ffff:10.0.0.1]",
        "http://[::1",
        "http://",
        "http://0",
        "http://127.1",
        "http://0x7f000001",
        "http://localhost.",
        "http://127.0.0.1:99999",
        "http://127.0.0.1/a b",
        "http://127.0.0.1/\r\nHost: 10.0.0.1",
        "http://127.0.0.1\n.example.com",
        "http://127.0.0.1/\u00e9",
    ],
)
def test_other_addresses_than_this_machines_are_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match=r"args\.url: is '"):
        check_address(url, "args.url")
    assert "args.url" in refused("webshop", {"session_id": 1}, {"backend": "http", "url": url})
    if find_spec("websockets"):
        assert "args.url" in refused("openenv", {}, {"url": url})


@pytest.mark.parametrize("url", ["http://localhost:81/a", "ws://127.0.0.1", "https://[::1]:9", "http://LOCALHOST"])
def test_this_machine_may_be_called(url: str) -> None:
    check_address(url, "args.url")


def test_the_operator_names_hosts_and_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESSES_VARIABLE, "shop.example, 10.0.0.7:8000")
    for url in ("http://shop.example:81", "https://Shop.Example/x", "http://10.0.0.7:8000"):
        check_address(url, "args.url")
    for url in ("http://10.0.0.7", "http://10.0.0.7:8001", "http://127.0.0.1"):
        with pytest.raises(InvalidInput, match=rf"adds .* to {ADDRESSES_VARIABLE} \(now: 10\.0\.0\.7:8000, shop"):
            check_address(url, "args.url")


@pytest.fixture
def elsewhere() -> Iterator[str]:
    """A server that sends each caller to another machine."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"{'ws' if 'Upgrade' in self.headers else 'http'}://192.0.2.1/")
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_POST = do_GET

        def log_message(self, *_: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_redirect_is_not_followed(elsewhere: str) -> None:
    with pytest.raises(Unavailable, match="answered 302"):
        play(ENVIRONMENTS["webshop"](), [], {"session_id": 1}, {"backend": "http", "url": elsewhere})
    if find_spec("websockets"):
        with pytest.raises(Unavailable, match=r"redirect|302"):
            play(ENVIRONMENTS["openenv"](), [], {}, {"url": elsewhere, "action_field": "x", "timeout_seconds": 5})


@pytest.mark.parametrize(
    "answer",
    [
        b"no http\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n" + b"[" * 100_000,
    ],
    ids=["no http", "a long header", "no chunk", "deep json"],
)
def test_a_server_that_answers_nonsense_is_named(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises((Unavailable, InvalidInput), match=f"{url}/create"):
            play(ENVIRONMENTS["webshop"](), [], {"session_id": 1}, {"backend": "http", "url": url})


@pytest.mark.skipif(find_spec("gymnasium") is None, reason="gymnasium is not installed: pip install -e '.[gym]'")
@pytest.mark.skipif(find_spec("pygame") is not None, reason="pygame is installed")
def test_a_way_to_render_that_is_not_installed_is_the_tasks_mistake() -> None:
    assert "can reset" in refused("gymnasium", {"id": "CartPole-v1"}, {"make_args": {"render_mode": "human"}})


def test_a_shop_that_is_allowed_is_played() -> None:
    with webshop_server() as (url, _):
        play(ENVIRONMENTS["webshop"](), [], {"session_id": 3}, {"backend": "http", "url": url})


@pytest.mark.skipif(find_spec("gymnasium") is None, reason="gymnasium is not installed: pip install -e '.[gym]'")
def test_no_row_imports_a_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import gymnasium\ngymnasium.register('Harmless-v0', entry_point='gymnasium.envs.toy_text:BlackjackEnv')\n"
    (tmp_path / "harmful.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    for task, args, field in (({"id": "harmful:Harmless-v0"}, {}, "task.id"), ({}, {"id": "harmful:X"}, "args.id")):
        said = refused("gymnasium", task, args)
        assert field in said
        assert MODULES_VARIABLE in said
    assert "harmful" not in sys.modules
    monkeypatch.setenv(MODULES_VARIABLE, "other, harmful")
    play(ENVIRONMENTS["gymnasium"](), [], {"id": "harmful:Harmless-v0"})
    assert sys.modules.pop("harmful")


@pytest.mark.skipif(find_spec("gymnasium") is None, reason="gymnasium is not installed: pip install -e '.[gym]'")
@pytest.mark.parametrize(
    "make_args",
    [
        {"xml_file": "/etc/passwd"}, {"xml_file": "~/key"}, {"xml_file": "../a"}, {"env_id": "harmful:X"},
        {"deep": {"er": ["4x4", "http://10.0.0.1"]}}, {"xml_file": "c:\\a"},
    ],
    ids=str,
)  # fmt: skip
def test_no_row_has_an_environment_open_a_path(make_args: dict[str, Any]) -> None:
    for task, args, where in (
        ({"make_args": make_args}, {"id": "FrozenLake-v1"}, "task"),
        ({"id": "FrozenLake-v1"}, {"make_args": make_args}, "args"),
    ):
        said = refused("gymnasium", task, args)
        assert said.startswith(f"{where}.make_args.{next(iter(make_args))}")
        assert "may be a path, a URL or a module" in said
    play(ENVIRONMENTS["gymnasium"](), [], {"id": "FrozenLake-v1", "make_args": {"map_name": "4x4", "desc": None}})


@pytest.mark.skipif(find_spec("verifiers") is None, reason="verifiers is not installed: pip install -e '.[verifiers]'")
def test_verifiers_loads_only_packages_that_require_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trinity.environments.bridges.verifiers import Verifiers

    (tmp_path / "harm_ful.py").write_text("def load_environment():\n    return 'loaded'\n")
    monkeypatch.syspath_prepend(tmp_path)
    for required in ("", "Requires-Dist: verifiers-like>=0.1\n"):
        if required:
            (tmp_path / "harm_ful-1.dist-info").mkdir()
            (tmp_path / "harm_ful-1.dist-info/METADATA").write_text(f"Name: harm-ful\nVersion: 1\n{required}")
        for name in ("harm-ful", "someone/harm-ful", "json"):
            with pytest.raises(InvalidInput, match=MODULES_VARIABLE) as error:
                play(Verifiers(), [], {"index": 0}, {"env_id": name})
            assert error.value.field == "args.env_id"
    assert "harm_ful" not in sys.modules
    (tmp_path / "harm_ful-1.dist-info/METADATA").write_text(
        "Name: harm-ful\nVersion: 1\nRequires-Dist: verifiers>=0.1\n"
    )
    with pytest.raises(InvalidInput, match="can load"):  # it was imported; a text takes no env_id
        play(Verifiers(), [], {"index": 0}, {"env_id": "someone/harm-ful"})
    assert sys.modules.pop("harm_ful")
    monkeypatch.setenv(MODULES_VARIABLE, "harm_ful")
    (tmp_path / "harm_ful-1.dist-info/METADATA").write_text("Name: harm-ful\nVersion: 1\n")
    with pytest.raises(InvalidInput, match="can load"):
        play(Verifiers(), [], {"index": 0}, {"env_id": "harm-ful"})
    assert sys.modules.pop("harm_ful")
