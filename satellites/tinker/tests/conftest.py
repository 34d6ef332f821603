"""A gateway and an executor on a test's nats-server, and an explorer for the tests that sample."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.servers.nats import NatsServer
from support.servers.tinker_stack import LONGEST, TinkerStack


@pytest.fixture
def stack(tmp_path: Path, nats_server: NatsServer, quickstart_model: Path) -> Iterator[TinkerStack]:
    folder = tmp_path / "tinker"
    folder.mkdir()
    running = TinkerStack(folder, nats_server, quickstart_model)
    running.start()
    yield running
    running.stop()


@pytest.fixture(scope="session")
def sampling_stack(tmp_path_factory: pytest.TempPathFactory, quickstart_model: Path) -> Iterator[TinkerStack]:
    """One for all tests that sample, since vLLM starts slowly. Its explorer holds two adapters.

    The base model's last norm is 10 times as large: with adapters below a random output projection it could else not
    become sure of a token. Its config.json allows no more tokens than the gateway does.
    """
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("tinker")
    model = folder / "model"
    shutil.copytree(quickstart_model, model)
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] *= 10
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": LONGEST}))
    nats = NatsServer(folder / "nats", users=folder / "identity" / "nats")
    nats.start()
    running = TinkerStack(folder, nats, model, adapters=2)
    running.start()
    yield running
    running.stop()
    nats.stop()
