"""A provider of sandboxes on this machine, as a runtime of Harbor's: each is a sandbox by bubblewrap.

A file in `folder` stands for each sandbox that the provider holds, also if its client has lost it. The provider ends
a sandbox when the time of its file is over.
"""

import asyncio
import json
import os
import random
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult, SandboxBuildFailedError
from harbor.environments.capabilities import EnvironmentCapabilities

from trinity.environments.sandbox.limits import Limits
from trinity.environments.sandbox.sandbox import BubblewrapSandbox

_random = random.Random(7)
_episodes = threading.Barrier(64)
_WRONG: dict[str, dict[str, Any]] = {
    "no-code": {"return_code": None},
    "code-of-text": {"return_code": "0"},
    "bytes": {"return_code": 0, "stdout": b""},
}


class Odd(Exception):
    field = "of its own"


class Cloud(BaseEnvironment):
    """fails: the share of starts that fail after the sandbox was made, and of ends that fail once. A third of these
    starts is an error, a third has no end, and a third loses the answer: only its lease can end that sandbox. empty: no
    process is started. slow: seconds of a start, before the sandbox is there, and of an end."""

    def __init__(
        self,
        *args: Any,
        folder: str,
        fails: float = 0.0,
        empty: bool = False,
        slow: float = 0.0,
        lease_seconds: float = 3600.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._fails, self._empty, self._slow, self._lease_seconds = fails, empty, slow, lease_seconds
        self._file, self._ends_at_once = Path(folder) / self.session_id, _random.random() >= fails
        self._machine: BubblewrapSandbox | None = None

    @staticmethod
    def type() -> str:
        return "cloud"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None: ...

    async def start(self, force_build: bool) -> None:
        dockerfile = self.environment_dir / "Dockerfile"
        if dockerfile.exists() and "broken" in dockerfile.read_text():
            raise SandboxBuildFailedError("the Dockerfile has no FROM")
        await asyncio.sleep(self._slow)
        self._file.write_text(json.dumps(self.task_env_config.env))
        os.utime(self._file, (0, time.time() + self._lease_seconds))
        if _random.random() < self._fails:
            match _random.randrange(3):
                case 0:
                    await asyncio.Event().wait()
                case 1:
                    self._file = self._file.rename(self._file.with_suffix(".lost")).with_suffix(".unknown")
            raise RuntimeError("503: no capacity")
        if not self._empty:
            self._machine = BubblewrapSandbox(Limits(ttl_seconds=120), ["/app", "/tests", "/logs"])

    async def stop(self, delete: bool) -> None:
        if not self._ends_at_once:
            self._ends_at_once = True
            raise RuntimeError("502: try again")
        await asyncio.sleep(self._slow)
        if self._machine is not None:
            self._machine.close()
            self._machine = None
        self._file.unlink(missing_ok=True)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        if "odd" in command:
            raise Odd("of a library")
        for name, wrong in _WRONG.items():
            if name in command:
                return SimpleNamespace(**wrong)  # type: ignore[return-value]
        if "print" in command:
            print("pulling", flush=True)
            subprocess.run(["sh", "-c", "echo layer; cat"], check=True)  # noqa: ASYNC221
            return ExecResult(return_code=0)
        if "together" in command:  # ends once each of 64 episodes runs it
            await asyncio.to_thread(_episodes.wait, 20)
            return ExecResult(return_code=0)
        if self._machine is None:
            return ExecResult(stdout="nonsense, which is not base64", return_code=0)
        done = self._machine.run(["bash", "-c", command], cwd=cwd or "/app", env=env, seconds=timeout_sec)
        return ExecResult(stdout=done.text, return_code=done.code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        assert self._machine is not None
        self._machine.run(["bash", "-c", f"cat > {target_path}"], stdin=Path(source_path).read_bytes(), cwd="/")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        raise NotImplementedError

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        raise NotImplementedError

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        raise NotImplementedError
