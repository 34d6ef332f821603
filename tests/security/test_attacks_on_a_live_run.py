"""`tests/security/attacks.py` on real services: no process ends, steps come, nothing obeys.

An explorer and a trainer without engines make the steps (support/fakes/peers.py).
"""

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from support.fakes.peers import explorer
from support.servers.buffer_run import BufferRun
from support.servers.nats import NatsServer
from support.servers.service import ServiceProcess
from trinity.reading.job import ProcessRecord, SupervisorRecord
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tokens import make_tokens

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

sys.path.insert(0, str(Path(__file__).parent))

import attacks  # noqa: E402

STEPS = 2000
INTERVAL = 100  # steps between versions
# After a kill -9 of buffer, sync and nats-server, which read the streams again.
AGAIN = [
    "headers that NATS itself uses in answers",
    "replies to others' subjects as explorer",
    "replies to others' subjects as reader",
]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    """NATS with users for each role, as `trinity run` has it."""
    server = NatsServer(tmp_path / "nats", users=tmp_path / "job/identity/nats")
    server.start()
    monkeypatch.setenv("TRINITY_NATS_CREDS", str(server.admin()))  # of the test, and of its stand-ins
    yield server
    server.kill()


async def test_a_run_under_attack_goes_on(server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINITY_SYNC_CLAIM_SECONDS", "3600")  # this trainer does not renew its claim
    identities = tmp_path / "job/identity"
    make_tokens(identities)
    changes = {"explorer": {"max_dead_letters_in_a_row": 0}, "synchronizer": {"sync_interval": INTERVAL}}
    run = BufferRun(tmp_path, server, steps=STEPS, identities=identities, **changes).start()
    environment = ServiceProcess("environment", tmp_path, IDENTITY_FOLDER=str(identities)).start()
    trainer = run.trainer()
    services = {"buffer": run.buffer, "sync": run.sync, "environment": environment}
    processes = [ProcessRecord(name, name, one.pid, one.address) for name, one in services.items()]
    record = SupervisorRecord(os.getpid(), "both", run.run, "", run.nats.url, processes, str(server.users))
    (tmp_path / "job/run").mkdir()
    (tmp_path / "job/run.yaml").write_text(run.config_file.read_text())
    (tmp_path / "job/run/main.json").write_text(json.dumps(asdict(record)))

    try:
        await trainer.begin()
        await trainer.claim()
        # So slowly that tasks are outstanding until the attacks end.
        async with explorer(run.nats.url, run.run, tasks_at_once=1, seconds=0.05):
            training = asyncio.create_task(trainer.train(STEPS, INTERVAL, tmp_path))
            rows = await attacks.attack(tmp_path / "job")
            for process in (run.buffer, run.sync, server):
                process.kill()
                process.start()
                rows += await attacks.attack(tmp_path / "job", AGAIN)
            assert not training.done()
            training.cancel()
        alive = {name: one.is_running() for name, one in services.items()}
    finally:
        await trainer.close()
        environment.kill()
        run.stop()
    assert {row.attack: row.problem for row in rows if row.problem} == {}
    assert len(rows) == len(attacks.ATTACKS) + len(attacks.OF_OWN_NATS) + 1 + 3 * (len(AGAIN) + 1)
    assert all(alive.values()), alive
    logs = "".join(path.read_text(errors="replace") for path in [*tmp_path.glob("*.log"), *tmp_path.glob("*.out")])
    assert logs
    assert not [role for role in Role if (identities / "tokens" / role).read_text() in logs], "a token is in a log"
    for row in rows:
        print(f"{row.attack}: {row.outcome}")
