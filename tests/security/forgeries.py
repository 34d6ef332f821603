"""What the attacks use: groups as no explorer makes them, calls that change a run, a user without limits, a joiner."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nats
import nats.errors

from trinity.api.buffer.v1 import buffer_pb2
from trinity.api.common.v1 import experience_pb2
from trinity.api.sync.v1 import sync_pb2
from trinity.config import Config
from trinity.runtime.broker import Broker
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.subjects import Grants

# What a publisher may write before its message. NATS checks nothing of it.
_STATUSES = [b"Status: %d" % code for code in (100, 404, 408, 409, 503)]
HEADERS = [
    *(b"NATS/1.0\r\n" + line + b"\r\nDescription: No Messages\r\n\r\n" for line in _STATUSES),
    b"NATS/1.0 404 No Messages\r\n\r\n",
    b"NATS/1.0 100 Idle Heartbeat\r\nNats-Last-Stream: 5\r\n\r\n",
    b"NATS/1.0 \xff\xfe\xff\r\n\r\n",
    b"NATS/1.0\r\nNats-Sequence: 9\r\nNats-Subject: trinity.a-run.experiences.control\r\nNats-Num-Pending: x\r\n\r\n",
    b"NATS/1.0\r\nEnds: here\r\n\r\nNats-Sequence: 9\r\n\r\n",
    b"NATS/1.0\r\nKV-Operation: PURGE\r\nNats-Time-Stamp: never\r\n\r\n",
    b"NATS/1.0\r\n no name\r\n\xff: \xff\r\n: \r\n\r\n",
    b"NATS/1.0",
    b"garbage",
]


def long(group: experience_pb2.Group) -> None:
    first = group.experiences[0]
    first.token_ids.data = bytes(4 * 900_000)
    del first.token_ids.shape[:]
    first.token_ids.shape.append(900_000)


def many(group: experience_pb2.Group) -> None:
    for _ in range(5000):
        group.experiences.add().CopyFrom(group.experiences[0])


def each(**values: Any) -> Callable[[experience_pb2.Group], None]:
    def change(group: experience_pb2.Group) -> None:
        for one in group.experiences:
            for name, value in values.items():
                setattr(one, name, value)

    return change


def token(group: experience_pb2.Group) -> None:
    data = bytearray(group.experiences[0].token_ids.data)
    data[:4] = (2**31 - 1).to_bytes(4, "little")
    group.experiences[0].token_ids.data = bytes(data)


def teacher(group: experience_pb2.Group) -> None:
    group.experiences[0].teacher_logprobs.CopyFrom(group.experiences[0].token_ids)


def metrics(group: experience_pb2.Group) -> None:
    group.experiences[0].metrics["reward"] = float("nan")


def wrong_checksum(reference: experience_pb2.BlobReference) -> None:
    reference.crc32 ^= 1


def join(folder: Path, theirs: Config, nats_url: str, creds: Path | None, identity: Path, refused: str) -> str:
    """Joins as from another machine; the refusal, which names `refused`, empty if there is none."""
    own = {"project": theirs.project, "group": theirs.group, "name": theirs.name, "mode": "explore",
           "checkpoint_root_dir": str(folder / "jobs"), "model": {"model_path": theirs.model.model_path}}  # fmt: skip
    (folder / "explorer.json").write_text(json.dumps({**own, "explorer": {"name": "elsewhere"}}))
    command = [sys.executable, "-m", "trinity.cli.main", "run", "--config", str(folder / "explorer.json")]
    environment = {**os.environ, "TRINITY_NATS_URL": nats_url, "TRINITY_IDENTITY_FOLDER": str(identity)}
    environment |= {"TRINITY_NATS_CREDS": str(creds)} if creds is not None else {}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    ends = done.returncode in (1, 2) and refused in done.stderr and not list(folder.glob("**/*.config.json"))
    return f"refused: {done.stderr.strip().splitlines()[-1]}" if ends else ""


async def without_a_user(nats_url: str) -> str:
    """How NATS answers a client that shows it no user; empty if it takes it."""
    try:
        client = await nats.connect(nats_url, allow_reconnect=False, connect_timeout=20)
    except (nats.errors.Error, OSError) as error:
        return f"refused: {error}" if "authorization" in str(error).lower() else ""
    await client.close()
    return ""


def calls_that_change(run: str, service: str) -> list[tuple[str, Any]]:
    """Calls that change a run. All were once answered with OK, for any caller."""
    if service == "buffer":
        return [
            ("Fence", buffer_pb2.FenceRequest(run=run, versions=range(1, 5000))),
            ("CommitStep", buffer_pb2.CommitStepRequest(run=run, step=10**6, oldest_kept_step=10**6)),
            ("DropDeadLetters", buffer_pb2.DropDeadLettersRequest(run=run)),
            ("SkipStep", buffer_pb2.SkipStepRequest(run=run, step=1, reason="an attack")),
        ]
    manifest = sync_pb2.Manifest(run=run, version=10**6, step=10**6)
    return [
        ("Publish", sync_pb2.PublishRequest(manifest=manifest)),
        ("Claim", sync_pb2.ClaimRequest(run=run, trainer_id="attacker", pid=1, host="elsewhere")),
        ("Rollback", sync_pb2.RollbackRequest(run=run, version=0, reason="an attack")),
        ("Pin", sync_pb2.PinRequest(run=run, version=0, pinned=True)),
    ]


def may_do_everything(accounts: Path, folder: Path) -> Path:
    """Credentials of a user of the run's own NATS."""
    path = folder / "attacker.creds"
    path.write_text(nats_users.issue(accounts, "attacker", Grants((">",), (">",))))
    return path


async def with_headers(broker: Broker, subject: str, body: bytes) -> None:
    """Publish one message with each of HEADERS. Their bytes go to NATS as they are, which a usual client prevents."""
    for header in HEADERS:
        line = f"HPUB {subject} {len(header)} {len(header) + len(body)}\r\n".encode()
        await broker.client._send_command(line + header + body + b"\r\n")
    await broker.client.flush()
