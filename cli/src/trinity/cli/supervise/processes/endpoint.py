"""The OpenAI-compatible endpoint of an explorer: its address, and the keys that it demands."""

import errno
import json
import os
import socket
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, Request, build_opener

from trinity.config import Config, Problem
from trinity.reading.errors import RunError
from trinity.reading.job import Job
from trinity.runtime.process import free_port
from trinity.runtime.settings import LOOPBACK
from trinity.runtime.trust.keys import make_key_file

_KEYS = "TRINITY_EXPLORER_API_KEYS_FILE"
_ASK_SECONDS = 5.0
_NEAR = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
_open = build_opener(ProxyHandler({})).open  # a proxy of the shell could not reach it


def endpoint_problems(config: Config) -> list[Problem]:
    """Returns why an explorer that serves or records could not listen, or demand keys, on this machine."""
    explorer, key, file = config.explorer, "explorer.api_keys_file", _given(config)
    if config.mode != "serve" and not explorer.record:
        return []
    if problem := _port_problem(config):
        return [problem]
    if file is not None:
        return [] if file.is_file() else [Problem(key, f"{file} is no file; write a key on each line")]
    if explorer.listen_address in LOOPBACK:
        return []
    what = f"is empty, and explorer.listen_address is {explorer.listen_address}: other machines could use the model"
    return [Problem(key, f"{what}; name a file with a key on each line here or in {_KEYS}")]


def endpoint_settings(config: Config, job: Job) -> dict[str, str]:
    """Returns the settings of an explorer that listens; empty if it neither serves nor records.

    The configuration has no `endpoint_problems`. Without a named file of keys one is made. Raises RunError if another
    process listens on explorer.proxy_port.
    """
    explorer = config.explorer
    if config.mode != "serve" and not explorer.record:
        return {}
    if problem := _port_problem(config):
        raise RunError(str(problem), 2)
    keys = _given(config) or make_key_file(job.folder / "serve.keys")
    return {
        "SERVE_LISTEN": f"{explorer.listen_address}:{explorer.proxy_port or free_port()}",
        "API_KEYS_FILE": str(keys),
    }


def _port_problem(config: Config) -> Problem | None:
    host, port = config.explorer.listen_address, config.explorer.proxy_port or 0
    if not is_taken(host, port):
        return None
    what = f"another process listens on {host}:{port}; choose another port; explorer.proxy_port=0 takes a free one"
    return Problem("explorer.proxy_port", what)


def is_taken(host: str, port: int) -> bool:
    """True if another process listens on this port."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False


def serves(config: Config, port: int, keys: Path) -> bool:
    """True if the run's endpoint answers on this machine's port, and no other program: it knows the key and the model.

    The endpoint of an explorer that records lists its model under another name.
    """
    host = _NEAR.get(config.explorer.listen_address, config.explorer.listen_address)
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}/v1/models"
    try:
        request = Request(url, headers={"Authorization": f"Bearer {keys.read_text().split()[0]}"})
        with _open(request, timeout=_ASK_SECONDS) as answer:
            names = [one["id"] for one in json.loads(answer.read())["data"]]
    except (OSError, HTTPException, ValueError, LookupError, TypeError):
        return False
    return bool(names) if config.explorer.record else config.name in names


def _given(config: Config) -> Path | None:
    """Returns the named file of keys."""
    given = os.environ.get(_KEYS) or config.explorer.api_keys_file
    return Path(given).expanduser().absolute() if given else None
