"""`trinity tinker` serves tenants by its example's YAML, goes on where it was killed, and samples."""

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.servers.tinker_stack import HttpTenant, datum, forward, serve_example
from trinity.runtime.process import free_port
from trinity.tinker import cost

pytestmark = [pytest.mark.extended, pytest.mark.timeout(600)]


def test_the_example_serves_and_resumes(repository: Path, quickstart_model: Path, tmp_path: Path) -> None:
    port = free_port()
    process = serve_example(repository, tmp_path, quickstart_model, port, "base_model=tiny")
    try:
        keys = tmp_path / "tinker/quickstart/keys"
        place = SimpleNamespace(
            url=f"http://127.0.0.1:{port}", keys={name: (keys / name).read_text().strip() for name in ("alice", "bob")}
        )
        alice = HttpTenant(place, "alice")
        model = alice.create(4)
        before = alice.result(alice.post("forward_backward", forward(model, 1, [datum(1)]))["request_id"])
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 128 + signal.SIGTERM
        assert b"died" not in (tmp_path / "out").read_bytes(), "a stop is no death"
        process = serve_example(repository, tmp_path, quickstart_model, port, "base_model=tiny")
        bob = HttpTenant(place, "bob")
        assert bob.create(16)
        after = alice.result(alice.post("forward_backward", forward(model, 2, [datum(1)]))["request_id"])
        assert after[0][0].tobytes() == before[0][0].tobytes()
        saved = {"model_id": model, "seq_id": 3, "path": "first"}
        path = alice.result(alice.post("save_weights_for_sampler", saved)["request_id"])["path"]
        base = bob.sample(0, [1, 2, 3], base_model="tiny")
        assert base[0] == base[1] and len(base[0]) == 4
        assert alice.sample(0, [1, 2, 3], model_path=path) == base, "new adapters change nothing"
    finally:
        process.terminate()
        process.wait(timeout=60)
    used = cost.collect(tmp_path / "tinker/quickstart")["tenants"]
    assert used["alice"]["uses"]["forward_backward"]["requests"] == 2, "one before the stop, and one after it"
    assert all(used[tenant]["uses"]["sample"]["requests"] == 1 for tenant in ("alice", "bob"))
    assert all(use["seconds"] > 0 for tenant in used.values() for use in tenant["uses"].values())
