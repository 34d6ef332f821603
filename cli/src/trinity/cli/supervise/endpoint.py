"""The OpenAI-compatible endpoint of an explorer: where it listens, and the keys that it asks for."""

import os
from pathlib import Path

from trinity.cli.supervise.job import Job
from trinity.config import Config, ConfigError, Problem
from trinity.runtime.process import free_port
from trinity.runtime.settings import LOOPBACK
from trinity.runtime.trust.keys import make_key_file

_KEYS = "TRINITY_EXPLORER_API_KEYS_FILE"


def endpoint_settings(config: Config, job: Job, source: str) -> dict[str, str]:
    """Settings of the explorer that listens; none where it neither serves nor records. Raises ConfigError."""
    explorer = config.explorer
    if config.mode != "serve" and not explorer.record:
        return {}
    listen = f"{explorer.listen_address}:{explorer.proxy_port or free_port()}"
    return {"SERVE_LISTEN": listen, "API_KEYS_FILE": str(api_keys(config, job, source))}


def api_keys(config: Config, job: Job, source: str) -> Path:
    """The file of keys that clients must send. One is made where only this machine reaches the endpoint."""
    explorer = config.explorer
    if given := os.environ.get(_KEYS) or explorer.api_keys_file:
        path = Path(given).expanduser().absolute()
        if not path.is_file():
            raise ConfigError(
                source, [Problem("explorer.api_keys_file", f"{path} is no file; write a key on each line")]
            )
        return path
    if explorer.listen_address not in LOOPBACK:
        what = f"is empty, and explorer.listen_address is {explorer.listen_address}: other machines could use the model"
        fix = f"name a file with a key on each line here or in {_KEYS}"
        raise ConfigError(source, [Problem("explorer.api_keys_file", f"{what}; {fix}")])
    return make_key_file(job.folder / "serve.keys")
