"""Endpoints that serve or record: which file of keys they ask for, and what is refused before anything starts."""

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from support.checks.deep_check import check
from trinity.cli.supervise.processes.endpoint import endpoint_problems, endpoint_settings, serves
from trinity.config import Config, ConfigError
from trinity.modes import join
from trinity.reading.errors import RunError
from trinity.reading.job import Job

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def none_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRINITY_EXPLORER_API_KEYS_FILE", raising=False)


def _config(folder: Path, mode: str = "serve", **explorer: Any) -> Config:
    model = {"model_path": "model"}
    given = {"project": "p", "name": "n", "checkpoint_root_dir": str(folder), "model": model, "explorer": explorer}
    return Config.model_validate({"mode": mode, **given})


def _said(config: Config) -> list[str]:
    return [str(problem) for problem in endpoint_problems(config)]


def test_a_key_is_made_in_the_job_folder_and_kept(tmp_path: Path) -> None:
    config = _config(tmp_path)
    assert _said(config) == []
    assert not (tmp_path / "p").exists(), "a look makes no key"
    file = Path(endpoint_settings(config, Job(config))["API_KEYS_FILE"])
    made = file.read_text()
    assert (file, file.stat().st_mode & 0o777) == (tmp_path / "p/n/serve.keys", 0o600)
    endpoint_settings(config, Job(config))
    assert file.read_text() == made


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.5", "::"])
def test_other_machines_need_a_file_of_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    config = _config(tmp_path, listen_address=host)
    (said,) = _said(config)
    assert said.startswith("explorer.api_keys_file: is empty") and "TRINITY_EXPLORER_API_KEYS_FILE" in said
    keys = tmp_path / "keys"
    keys.write_text("one\n")
    monkeypatch.setenv("TRINITY_EXPLORER_API_KEYS_FILE", str(keys))
    assert _said(config) == []
    assert endpoint_settings(config, Job(config))["API_KEYS_FILE"] == str(keys)


def test_the_yaml_names_a_file_that_must_be_there(tmp_path: Path) -> None:
    (said,) = _said(_config(tmp_path, api_keys_file=str(tmp_path / "keys")))
    assert said == f"explorer.api_keys_file: {tmp_path}/keys is no file; write a key on each line"


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_port_that_another_process_holds_is_refused(tmp_path: Path, host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as held:
        port = held.getsockname()[1]
        config = _config(tmp_path, listen_address=host, proxy_port=port)
        with pytest.raises(RunError, match=rf"proxy_port: another process listens on {host}:{port}; choose"):
            endpoint_settings(config, Job(config))
        assert any(f"another process listens on {host}:{port}" in said for said in _said(config))
    assert endpoint_settings(config, Job(config))["SERVE_LISTEN"].endswith(f":{port}")


class _OnIpv6(HTTPServer):
    address_family = socket.AF_INET6


@contextmanager
def _listening(body: str, host: str = "127.0.0.1") -> Iterator[int]:
    """A program that answers a right key with this body, and others with 401."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            keyed = self.headers["Authorization"] == "Bearer one"
            self.send_response(200 if keyed else 401)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None: ...

    with (_OnIpv6 if ":" in host else HTTPServer)((host, 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize(
    ("body", "key", "host", "is_own"),
    [
        ('{"data": [{"id": "n"}]}', "one", "127.0.0.1", True),
        ('{"data": [{"id": "n"}]}', "one", "::1", True),
        ('{"data": [{"id": "n"}]}', "other", "127.0.0.1", False),
        ('{"data": [{"id": "llama"}]}', "one", "127.0.0.1", False),
        ("<html>It works!</html>", "one", "127.0.0.1", False),
        ('{"data": "none"}', "one", "127.0.0.1", False),
        ("[]", "one", "127.0.0.1", False),
    ],
)
def test_only_the_runs_own_endpoint_counts_as_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, key: str, host: str, is_own: bool
) -> None:
    """Another program may have taken the port while the model was loaded."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    (keys := tmp_path / "keys").write_text(f"{key}\nanother\n")
    with _listening(body, host) as port:
        assert serves(_config(tmp_path, listen_address=host), port, keys) is is_own
        everywhere = "::" if ":" in host else "0.0.0.0"
        assert serves(_config(tmp_path, listen_address=everywhere), port, keys) is is_own
    assert not serves(_config(tmp_path, listen_address=host), port, keys)


def test_a_model_that_records_has_other_names(tmp_path: Path) -> None:
    (keys := tmp_path / "keys").write_text("one")
    with _listening(json.dumps({"data": [{"id": "policy"}]})) as port:
        assert serves(_config(tmp_path, record=True), port, keys)


def test_an_explorer_that_does_not_listen_needs_no_keys(tmp_path: Path) -> None:
    config = _config(tmp_path, "explore", listen_address="0.0.0.0")
    assert _said(config) == [] and endpoint_settings(config, Job(config)) == {}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["mode=serve", "explorer.listen_address=0.0.0.0"], "is empty, and explorer.listen_address is 0.0.0.0"),
        (["explorer.record=true", "explorer.listen_address=0.0.0.0"], "is empty, and explorer.listen_address"),
        (["explorer.record=true", "explorer.api_keys_file=/nope"], "/nope is no file"),
    ],
)
def test_check_refuses_what_run_would(tmp_path: Path, overrides: list[str], said: str) -> None:
    code, output = check(tmp_path, {"question": "1+1", "answer": "2"}, *overrides)
    assert code == 2, output
    assert output.splitlines()[-1].startswith(f"{tmp_path}/run.yaml: explorer.api_keys_file: {said}")
    assert not (tmp_path / "tests").exists()


def test_check_makes_no_key(tmp_path: Path) -> None:
    for overrides in (["mode=serve"], ["explorer.record=true"], ["mode=train", "explorer.api_keys_file=/nope"]):
        code, output = check(tmp_path, {"question": "1+1", "answer": "2"}, *overrides)
        assert code == 0, output
    assert not list(tmp_path.rglob("*.keys"))


def test_an_explorer_that_joins_is_refused_before_it_looks_for_its_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^x\.yaml: explorer\.api_keys_file: /nope is no file"):
        join.join(_config(tmp_path, "explore", record=True, api_keys_file="/nope"), "x.yaml")
