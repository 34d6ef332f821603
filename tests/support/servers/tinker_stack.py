"""A gateway of tinker clients, an executor and an explorer as processes of their own, on a test's nats-server."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from support.servers.nats import NatsServer
from trinity.runtime.process import free_port
from trinity.runtime.trust.keys import make_key_file
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import make_tokens
from trinity.tinker.commands.samples import Samples
from trinity.tinker.commands.wire import Datum, Forward, read_output, read_samples, write_forward

_START_SECONDS, _RESULT_SECONDS = 180.0, 120.0
RUN, BASE, LONGEST, VOCABULARY = "tinker-test", "tiny", 64, 262
_MODULES = {
    "tinker": "trinity.tinker.gateway.main",
    "tenants": "trinity.tinker.executor.main",
    "sampler": "trinity.tinker.sampler.main",
}


class TinkerStack:
    """start -> kill("tinker", "tenants" or "sampler") -> start again -> stop."""

    def __init__(
        self,
        folder: Path,
        nats: NatsServer,
        model: Path,
        snapshot_commands: int = 5,
        *,
        adapters: int = 0,
        waiting: int = 1000,
        session_minutes: float = 120,
        result_hours: float = 24,
    ) -> None:
        """adapters: that the explorer holds; 0: there is none. waiting: commands of a tenant that may wait."""
        self.folder, self.nats = folder, nats
        self.url = f"http://127.0.0.1:{free_port()}"
        keys = folder / "keys"
        self.keys = {name: make_key_file(keys / name, "tml-").read_text().strip() for name in ("alice", "bob")}
        executor = {
            "MODEL_PATH": str(model), "FOLDER": str(folder / "states"), "DEVICE": "cpu", "THREADS": "1",
            "SNAPSHOT_COMMANDS": str(snapshot_commands),
        }  # fmt: skip
        gateway = {
            "SERVE_LISTEN": self.url.removeprefix("http://"), "KEYS_FOLDER": str(keys), "BASE_MODEL": BASE,
            "VOCABULARY": str(VOCABULARY), "LONGEST": str(LONGEST), "MOST_MODELS": "4",
            "MOST_SAVES": "256" if adapters else "4",
            "TOKENIZER": str(model), "WAITING_COMMANDS": str(waiting), "SESSION_MINUTES": str(session_minutes),
        }  # fmt: skip
        kept = {"RESULT_HOURS": str(result_hours)}
        make_tokens(folder / "tokens")
        settings = nats.settings(Role.TINKER, RUN) | {"IDENTITY_FOLDER": str(folder / "tokens")}
        self._settings = {"tenants": executor | kept | settings, "tinker": gateway | kept | settings}
        if adapters:
            address = f"127.0.0.1:{free_port()}"
            self._settings["tinker"] |= {"SAMPLER_ADDRESS": address, "MOST_MODELS": "20"}
            self.sampler_address = address
            self._settings["sampler"] = {
                "IDENTITY_FOLDER": str(folder / "tokens"),
                "LISTEN": address, "MODEL_PATH": str(model), "FOLDER": str(folder / "states"), "DEVICE": "cpu",
                "LONGEST": str(LONGEST), "MOST_ADAPTERS": str(adapters), "MOST_RANK": "32",
            }  # fmt: skip
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str, wait: bool = True) -> None:
        """Starts all processes, or those named, and waits until they are ready."""
        for name in names or tuple(self._settings):
            given = {f"TRINITY_{name.upper()}_{key}": value for key, value in self._settings[name].items()}
            prefix = f"TRINITY_{name.upper()}_"
            announce = self.folder / f"{name}.json"
            announce.unlink(missing_ok=True)
            given |= {f"{prefix}RUN": RUN, f"{prefix}ANNOUNCE_FILE": str(announce), f"{prefix}STOP_WITH_PARENT": "1"}
            out = (self.folder / f"{name}.out").open("wb")
            environment = {key: value for key, value in os.environ.items() if key != "TRINITY_NATS_CREDS"}
            self._processes[name] = subprocess.Popen(
                [sys.executable, "-m", _MODULES[name], "serve"], env=environment | given, stdout=out, stderr=out
            )
        for name in (names or tuple(self._settings)) if wait else ():
            self.wait(name)

    def wait(self, name: str) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while "service.ready" not in (text := self.output(name)):
            assert self._processes[name].poll() is None, text
            assert time.monotonic() < deadline, text
            time.sleep(0.05)

    def output(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()

    def kill(self, name: str) -> None:
        """kill -9."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait(timeout=20)

    def restart(self, name: str) -> None:
        """kill -9 and a start that is not waited for."""
        self.kill(name)
        self.start(name, wait=False)

    def stop(self) -> None:
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait(timeout=20)
        self._processes.clear()


def serve_example(repository: Path, folder: Path, model: Path, port: int, *overrides: str) -> "subprocess.Popen[bytes]":
    """Starts `trinity tinker` with its example's YAML, and waits until it serves. Its output is in <folder>/out."""
    out = (folder / "out").open("wb")
    places = {"TRINITY_CHECKPOINT_ROOT_DIR": str(folder), "TRINITY_MODEL_PATH": str(model)}
    environment = {key: value for key, value in os.environ.items() if key != "TRINITY_NATS_CREDS"}
    yaml = str(repository / "examples/tinker/quickstart.yaml")
    command = [sys.executable, "-m", "trinity.cli.main", "tinker", "--config", yaml, f"port={port}", *overrides]
    process = subprocess.Popen(command, env=environment | places, stdout=out, stderr=out)
    deadline = time.monotonic() + _START_SECONDS
    while b"try it" not in (folder / "out").read_bytes():
        assert process.poll() is None, (folder / "out").read_text()
        assert time.monotonic() < deadline, (folder / "out").read_text()
        time.sleep(0.1)
    return process


class HttpTenant:
    """Speaks to a gateway as the client does, without the client: one session of one tenant."""

    def __init__(self, stack: TinkerStack, name: str) -> None:
        self._client = httpx.Client(base_url=stack.url, headers={"X-API-Key": stack.keys[name]}, timeout=60)
        self.session = self.post("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0"})[
            "session_id"
        ]

    def answer(self, path: str, body: dict[str, Any] | bytes, **headers: str) -> httpx.Response:
        """Repeats a request that finds no gateway."""
        kind = {"Content-Type": "application/x-protobuf"} if isinstance(body, bytes) else {}
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        for _ in range(200):
            try:
                return self._client.post(f"/api/v1/{path}", content=content, headers=kind | headers)
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError(f"no gateway answers {path}")

    def post(self, path: str, body: dict[str, Any] | bytes) -> dict[str, Any]:
        answer = self.answer(path, body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def create(self, rank: int, number: int = 0, **lora: Any) -> str:
        body = {
            "session_id": self.session, "model_seq_id": number, "base_model": BASE,
            "lora_config": {"rank": rank, "seed": 7, **lora},
        }  # fmt: skip
        return str(self.result(self.post("create_model", body)["request_id"])["model_id"])

    def sample(self, seq_id: int, tokens: list[int], **model: str) -> list[list[int]]:
        """Samples two sequences of 4 tokens, greedily, in a new sampling session of that number."""
        body = {"session_id": self.session, "sampling_session_seq_id": seq_id, **model}
        sampler = self.post("create_sampling_session", body)["sampling_session_id"]
        asked = {"sampling_session_id": sampler, "seq_id": 0, "num_samples": 2}
        asked |= {"prompt": {"chunks": [{"tokens": tokens, "type": "encoded_text"}]}}
        asked |= {"sampling_params": {"max_tokens": 4, "temperature": 0.0, "stop": []}}
        found: Samples = self.result(self.post("asample", asked)["request_id"], read_samples)
        return [one.tokens.tolist() for one in found.sequences]

    def result(
        self, request_id: str, read: Callable[[bytes], Any] = read_output, seconds: float = _RESULT_SECONDS
    ) -> Any:
        """Waits for a result: JSON, or the log-probabilities and metrics of a forward pass."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            answer = self.answer("retrieve_future", {"request_id": request_id})
            assert answer.status_code == 200, answer.text
            if "protobuf" in answer.headers["content-type"]:
                return read(answer.content)
            if answer.json().get("type") != "try_again":
                return answer.json()
        raise AssertionError(f"no result of {request_id}")


def datum(seed: int, length: int = 12, loss: str = "cross_entropy") -> Datum:
    """A sequence of random tokens with the inputs of a loss."""
    rng = np.random.default_rng(seed)
    inputs: dict[str, np.ndarray] = {"target_tokens": rng.integers(0, VOCABULARY, length)}
    if loss == "cross_entropy":
        inputs["weights"] = rng.random(length).astype(np.float32)
    else:
        inputs["logprobs"] = (-5 + rng.random(length)).astype(np.float32)
        inputs["advantages"] = rng.standard_normal(length).astype(np.float32)
    return Datum(rng.integers(0, VOCABULARY, length), inputs)


def forward(model: str, seq_id: int, data: list[Datum], loss: str = "cross_entropy", **config: float) -> bytes:
    return write_forward(Forward(model, seq_id, tuple(data), loss, config, True))
