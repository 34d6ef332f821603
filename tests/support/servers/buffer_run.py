"""A run of only the buffer: NATS, sync and buffer as real processes. Its peers are support.fakes.peers."""

import json
from pathlib import Path
from typing import Any

import yaml

from support.fakes.peers import FakeTrainer
from support.programs.forked_run import ForkedService
from support.servers.certificates import identity_of, tls_settings
from support.servers.nats import NatsServer
from trinity.config import load, make_plan
from trinity.runtime import names, rpc
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role


class BufferRun:
    """start -> trainer() ... -> stop."""

    def __init__(
        self,
        folder: Path,
        nats: NatsServer,
        *,
        steps: int = 6,
        groups: int = 4,
        settings: dict[str, str] | None = None,
        certificates: Path | None = None,
        identities: Path | None = None,
        **changes: Any,
    ) -> None:
        """`changes` of the YAML: a mapping is merged into the section of that name. `settings` are the buffer's.
        `certificates`: the folder of `make_certificates`, for mTLS; `identities`: a folder with tokens. With neither
        every process on this machine may call."""
        self.folder = folder
        self.nats = nats
        self.config_file = folder / "run.yaml"
        rows = [{"question": f"{i}+1", "answer": f"#### {i + 1}"} for i in range(50)]
        (folder / "data").mkdir(exist_ok=True)
        (folder / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / "data/test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:5]))
        self.config_file.write_text(yaml.safe_dump(self._config(steps, groups, changes)))
        plan = make_plan(load(self.config_file))
        self.run = names.run_id(plan.config.project, plan.config.name, plan.config.group)
        self.steps, self.groups = steps, groups
        tokens = {"IDENTITY_FOLDER": str(identities)} if identities else {}
        self.identities = identities
        self.certificates = certificates
        tls = {name: tls_settings(certificates, name) if certificates else {} for name in ("sync", "buffer")}
        self.sync = ForkedService("sync", folder, **tokens, **nats.settings(Role.SYNC, self.run), **tls["sync"])
        limits = {"LOG_GIB": "0.5", "LOG_KEEP_GIB": "0", **(settings or {})}
        limits |= {"CONFIG_FILE": str(self.config_file), "SYNC_ADDRESS": self.sync.address}
        limits |= nats.settings(Role.BUFFER, self.run)
        self.buffer = ForkedService("buffer", folder, **limits, **tokens, **tls["buffer"])

    def _config(self, steps: int, groups: int, changes: dict[str, Any]) -> dict[str, Any]:
        taskset = {"name": "sums", "path": str(self.folder / "data"), "split": "train"}
        taskset["format"] = {"prompt_key": "question", "response_key": "answer"}  # type: ignore[assignment]
        base: dict[str, Any] = {
            "project": "tests",
            "name": self.folder.name,
            "checkpoint_root_dir": str(self.folder / "jobs"),
            "model": {"model_path": "none", "max_prompt_tokens": 32, "max_response_tokens": 32},
            "algorithm": {"algorithm_type": "grpo", "repeat_times": 4},
            "buffer": {"batch_size": groups, "total_steps": steps, "explorer_input": {"taskset": taskset}},
            "explorer": {"max_retry_times": 2},
            "synchronizer": {"sync_interval": 1000},
        }
        return {**base, **{k: {**base.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}}

    def start(self) -> "BufferRun":
        self.sync.start()
        self.buffer.start()
        return self

    def stop(self) -> None:
        self.buffer.kill()
        self.sync.kill()

    def trainer(self) -> FakeTrainer:
        identity: rpc.Shown = identity_of(self.certificates, "trainer") if self.certificates else "own"
        if self.identities is not None:
            identity = Identity(Role.TRAINER, self.identities)
        return FakeTrainer(self.run, self.buffer.address, self.sync.address, identity)
