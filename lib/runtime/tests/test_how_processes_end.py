"""Exit codes of service processes: whoever supervises them learns whether to start them again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trinity.runtime.errors import EXIT_FOR_GOOD

pytestmark = pytest.mark.core

SERVICE = """
import asyncio
from pathlib import Path
from pydantic_settings import SettingsConfigDict
from trinity.runtime import errors, host
from trinity.runtime.settings import ServiceSettings

class Settings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="TRINITY_TEST_", extra="forbid", frozen=True)

class Failing:
    name, run_id = "test", ""

    def register(self, server):
        return []

    async def work(self, ready, address):
        ready.set()
        async with asyncio.TaskGroup() as group:
            group.create_task(self.fail())

    async def fail(self):
        raise {failure}

    async def drain(self, grace_seconds):
        pass

host.main(Failing(), Settings(listen="127.0.0.1:0", log_file=Path({log!r})))
"""


@pytest.mark.parametrize(
    ("failure", "code", "reason"),
    [
        ("errors.InvalidInput('model.model_path', 'is no folder')", EXIT_FOR_GOOD, "model.model_path: is no folder"),
        ("errors.Unavailable('nobody answers')", 1, "nobody answers"),
        ("OSError('a disk')", 1, "OSError: a disk"),
    ],
)
def test_only_what_a_restart_would_not_mend_says_so(failure: str, code: int, reason: str, tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    script = SERVICE.format(failure=failure, log=str(log))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["reason"] for line in lines if line["event"] == "service.failed"] == [reason]


@pytest.mark.parametrize(
    ("config", "message"), [(None, "config_file: is not set"), ("moodel: {}\n", "moodel")], ids=["none", "misspelt"]
)
def test_a_service_whose_yaml_cannot_be_used_says_why_and_that_it_is_for_good(
    config: str | None, message: str, tmp_path: Path
) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRINITY_")}
    if config is not None:
        (tmp_path / "run.yaml").write_text(config)
        environment["TRINITY_TRAINER_CONFIG_FILE"] = str(tmp_path / "run.yaml")
    command = [sys.executable, "-m", "trinity.trainer.main", "serve"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == EXIT_FOR_GOOD, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
