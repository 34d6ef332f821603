"""Services for runs with versions and members, started once for any number of runs: NATS, sync, storage, environment.

Only the engines of the members and the learning are not real. Each run has a different name.
"""

import os
import sys
from functools import cached_property
from pathlib import Path

import numpy as np
import obstore
import torch
from obstore.store import S3Store
from safetensors.numpy import save_file

from chaos.versions.maker import Named
from support.fakes.explorers.member_engine import logprobs, read_weights
from support.programs.member_process import ENGINE
from support.servers.nats import NatsCluster, NatsServer
from support.servers.s3 import S3Server
from support.servers.service import ServiceProcess

ROOT = Path(__file__).parents[3]
BUCKET = "weights"
LEASE_SECONDS = 3.0
TENSORS = 12
_SHAPE = (64, 128)


class SmallPolicy:
    """The model of member_engine, with the quickstart's tokenizer."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        if not folder.exists():
            _make_model(folder)
        weights = read_weights(folder.glob("*.safetensors"))
        self.base: Named = [(name, torch.from_numpy(weights[name])) for name in sorted(weights)]

    def logprobs(self, weights: Named, token_ids: "list[int] | tuple[int, ...]") -> list[float]:  # type: ignore[override]
        return [float(value) for value in logprobs({name: tensor.numpy() for name, tensor in weights}, token_ids)]


def _make_model(folder: Path) -> None:
    sys.path.insert(0, str(ROOT / "examples/quickstart"))
    from make_model import make_tokenizer

    chance = np.random.default_rng(0)
    make_tokenizer().save_pretrained(folder)
    tensors = {f"layer.{index:02d}": chance.standard_normal(_SHAPE, dtype=np.float32) for index in range(TENSORS)}
    save_file(tensors, folder / "model.safetensors")


def bucket() -> S3Store:
    """The S3 store of all runs."""
    return S3Store(BUCKET, client_options={"allow_http": True})


class World:
    """A context manager. `stop_seconds`: how long a member is stopped; `engine`: what the members have for vLLM;
    `nats`: another one than a single server."""

    deadline = 2.0  # of each step of a collective
    serve_seconds = 30.0  # within which a member serves what it ought to; mostly it takes a fifth of a second

    def __init__(
        self, folder: Path, *, stop_seconds: float = 12.0, engine: str = ENGINE, nats: NatsCluster | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.stop_seconds, self.engine = stop_seconds, engine
        self.nats: NatsServer | NatsCluster = nats or NatsServer(folder / "nats")
        self.policy = SmallPolicy(folder / "model")
        self._ends: list[ServiceProcess | S3Server] = []

    def __enter__(self) -> "World":
        self.nats.start()
        settings = {"LEASE_SECONDS": f"{LEASE_SECONDS}", "CLAIM_SECONDS": "3", "CANARY_SECONDS": "10"}
        self.sync = ServiceProcess("sync", self.folder, NATS_URL=self.nats.url, **settings).start()
        return self

    def restart_sync(self) -> None:
        """kill -9, and start again on the same address."""
        self.sync.kill()
        self.sync.start()

    def __exit__(self, *_: object) -> None:
        for service in self._ends:
            service.kill()
        self.sync.kill()
        self.nats.stop()

    @cached_property
    def s3(self) -> S3Server:
        """Its credentials are put into this process's environment, for the maker."""
        server = S3Server(self.folder / "s3").start()
        self._ends.append(server)
        os.environ.update(server.environment)
        obstore.put(bucket(), "made", b"")
        return server

    @cached_property
    def environment(self) -> ServiceProcess:
        service = ServiceProcess("environment", self.folder).start()
        self._ends.append(service)
        return service
