"""A gateway and an executor on a test's nats-server."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.nats import NatsServer
from support.servers.tinker_stack import TinkerStack


@pytest.fixture
def stack(tmp_path: Path, nats_server: NatsServer, quickstart_model: Path) -> Iterator[TinkerStack]:
    folder = tmp_path / "tinker"
    folder.mkdir()
    running = TinkerStack(folder, nats_server, quickstart_model)
    running.start()
    yield running
    running.stop()
