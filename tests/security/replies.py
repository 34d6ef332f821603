"""Requests with another party's subject as reply: NATS checks no reply subject, and sends the answer there.

Whatever a role may ask, it asks with its real credentials: acknowledgements of its own messages, what it stored before,
states of streams, tasks and their ends. `TARGETS` are subjects that somebody else decides about.
"""

import asyncio
import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client

from trinity.runtime import names
from trinity.runtime.broker import Broker, on_subject
from trinity.runtime.names import RunNames, owner_of
from trinity.runtime.trust import nats_users
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.subjects import ALL_RUNS, grants, matches

# The buffer is left out: its users are in the account of the streams (docs/security.md).
ROLES = (Role.EXPLORER, Role.READER, Role.TRAINER, Role.ENVIRONMENT, Role.OPERATOR, Role.SYNC)
MARK = b"forged by a reply"
NAME, VICTIM = "mallory", owner_of("victim")
_FAR = 10**6 + 7
_GETS = ({"seq": 1}, {"seq": 1, "batch": 3, "max_bytes": 4096}, {"seq": _FAR})
_NEXTS: tuple[dict[str, Any], ...] = ({"batch": 1, "expires": 50_000_000}, {"batch": 1, "no_wait": True})

_WORDS = (b'+NXT {"batch": 1, "no_wait": true}', b"+WPI", b"+ACK", b'-NAK {"delay": 1}')


def targets(run: RunNames) -> dict[str, str]:
    """What a forger would like to write, and its subject."""
    keys = {
        "the pointer to the LIVE version": (names.VERSIONS_BUCKET, run.live_key),
        "a version's record": (names.VERSIONS_BUCKET, run.version_key(_FAR)),
        "the trainer's claim": (names.VERSIONS_BUCKET, run.claim_key),
        "the canary's candidate": (names.VERSIONS_BUCKET, run.candidate_key),
        "a manifest": (names.MANIFESTS_BUCKET, run.manifest_key(_FAR, "0" * 64)),
        "a member": (names.MEMBERS_BUCKET, run.member_key("victim")),
        "the run's record": (names.RUNS_BUCKET, run.job_key),
        "the commit record": (names.RUNS_BUCKET, run.commit_key),
        "the announcement": (names.ANNOUNCEMENTS_BUCKET, run.announcement_key),
    }
    return {
        "a fence": run.control,
        "an operator's skip": run.skip(_FAR),
        "a ledger entry": run.batch(_FAR),
        "a cursor": run.cursor,
        "a task": run.task("sums", _FAR),
        "an evaluation's task": run.evaluation_task("sums"),
        "a dead letter": run.dead_letter(_FAR),
        "another's group": run.experience(VICTIM, 0, "sums"),
        "another's failure": run.failure(VICTIM, "sums"),
        "another's evaluation": run.evaluation(VICTIM, "sums"),
        "another's blob": run.blob(VICTIM, "0" * 32, 0),
        "another's turn": run.turn(1, 1, VICTIM),
        "another's line": run.line("explorer", VICTIM),
        "the buffer's line": run.line("buffer", VICTIM),
        "weights": run.weights_part("v1", "f", 0),
        **{what: f"$KV.{bucket}.{key}" for what, (bucket, key) in keys.items()},
    }


# What a run itself writes under such subjects.
_WRITTEN = ("the pointer to the LIVE version", "the trainer's claim", "the canary's candidate", "the run's record",
            "the commit record", "the announcement", "a cursor")  # fmt: skip
_ANSWERS = (b'{"type":"io.nats.jetstream', b'{"stream":"', MARK)


async def forged(broker: Broker, run: RunNames) -> list[str]:
    """Targets under which a live run has what it did not write. Where it writes itself, answers of JetStream count."""
    found = []
    for what, subject in targets(run).items():
        try:
            stream = await broker.js.find_stream_name_by_subject(subject)
        except nats.js.errors.NotFoundError:
            continue  # the run uses none
        async for message in on_subject(broker, stream, subject):
            if what not in _WRITTEN or not message.data or message.data.startswith(_ANSWERS):
                found.append(f"{what}: {message.data[:60]!r}")
                break
    return found


def credentials(accounts: Path, role: Role, run: RunNames, place: Path) -> Path:
    """A file with real credentials of a role, in a folder."""
    path = place / f"{role}.creds"
    path.write_text(nats_users.issue_user(accounts, role, NAME, _run(role, run)))
    return path


def _run(role: Role, run: RunNames) -> str:
    return ALL_RUNS if role is Role.SYNC else run.run


async def forge(url: str, creds: Path, role: Role, run: RunNames, takes_tasks: bool = True) -> dict[str, str]:
    """Everything that a role may ask, with every target as reply that it may not write. Returns these targets.

    Without `takes_tasks`, an explorer leaves the tasks of a live run to others, which it may also acknowledge.
    """
    allowed = grants(role, _run(role, run), NAME).publish
    found = {what: subject for what, subject in targets(run).items() if not any(matches(p, subject) for p in allowed)}
    inbox = f"_INBOX_{role}_{names.token(NAME)}"
    client = await nats.connect(url, user_credentials=str(creds), inbox_prefix=inbox, error_cb=_ignore)
    try:
        leased = await _lease(client, run) if role is Role.EXPLORER and takes_tasks else []
        for subject, body in [*_requests(allowed), *leased]:
            if not takes_tasks and f"NEXT.{run.tasks_stream}." in subject:
                continue
            for reply in found.values():
                await client.publish(subject, body, reply=reply)
        if role is Role.TRAINER:
            await _republish(client, run, found.values())
        await client.flush()
        await asyncio.sleep(0.2)  # pull requests end with a status
    finally:
        await client.close()
    return found


def _requests(allowed: Iterable[str]) -> list[tuple[str, bytes]]:
    """Subject and body of what may be asked. Content comes first, for what reads it."""
    found: list[tuple[str, bytes]] = []
    for pattern in sorted(allowed, key=lambda pattern: pattern.startswith("$JS")):
        subject = pattern.replace("*", "1").replace(">", "x.y")
        bodies = [MARK]
        if subject.startswith("$JS.ACK"):
            continue  # by the replies of leased tasks
        if ".MSG.NEXT." in subject:
            bodies = [json.dumps(one).encode() for one in _NEXTS]
        elif subject.startswith("$JS.API.DIRECT.GET.") and not pattern.endswith(">") and "$KV" not in pattern:
            bodies = [json.dumps(one).encode() for one in _GETS]
        elif subject.startswith("$JS."):
            bodies = [b""]
        found += [(subject, body) for body in bodies]
    return found


async def _ignore(_: Exception) -> None: ...


async def _republish(client: Client, run: RunNames, wanted: Iterable[str]) -> None:
    """Have the stream of weights send what is put into it to others' subjects."""
    stream, own, part = run.weights_stream, run.subjects("weights"), run.weights_part("v1", "own", 0)
    for subject in wanted:
        config = {"name": stream, "subjects": [own], "republish": {"src": part, "dest": subject}, "storage": "file",
                  "retention": "limits", "max_bytes": -1, "max_msgs": -1, "num_replicas": 1}  # fmt: skip
        for verb in ("CREATE", "UPDATE"):
            await client.publish(f"$JS.API.STREAM.{verb}.{stream}", json.dumps(config).encode(), reply="_INBOX.none")
        await client.publish(part, MARK)


async def _lease(client: Client, run: RunNames) -> list[tuple[str, bytes]]:
    """What a holder of tasks may say of them, on their replies: also that it wants the next."""
    inbox = client.new_inbox()
    tasks = await client.subscribe(inbox)
    pull = f"$JS.API.CONSUMER.MSG.NEXT.{run.tasks_stream}.{names.TASKS_CONSUMER}"
    await client.publish(pull, b'{"batch": 4, "expires": 1000000000}', reply=inbox)
    leased = []
    with contextlib.suppress(TimeoutError, nats.errors.TimeoutError):  # a live run may have fewer
        while len(leased) < len(_WORDS):
            leased.append(await tasks.next_msg(1))
    await tasks.unsubscribe()
    return [(one.reply, word) for one, word in zip(leased, _WORDS, strict=False)]


# Verbs of JetStream's API that change something, or hand it out. The name of a stream follows, then a consumer's.
_OF_STREAMS = ("CREATE", "UPDATE", "DELETE", "PURGE", "MSG.DELETE", "MSG.GET", "SNAPSHOT", "RESTORE", "LEADER.STEPDOWN",
               "PEER.REMOVE")  # fmt: skip
_OF_CONSUMERS = ("CREATE", "DURABLE.CREATE", "DELETE", "PAUSE", "UNPIN", "RESET", "LEADER.STEPDOWN")


async def misuse(url: str, creds: Path, role: Role, run: RunNames) -> int:
    """Every request that changes streams or consumers, mirrors them, or has them deliver to others' subjects.

    Returns how many were sent. NATS answers none that its permissions refuse.
    """
    own_run = (run.experiences_stream, run.tasks_stream, run.batches_stream, run.turns_stream, run.dead_letters_stream)
    buckets = (f"KV_{names.VERSIONS_BUCKET}", f"KV_{names.RUNS_BUCKET}", f"KV_{names.MEMBERS_BUCKET}")
    delivers = {"deliver_subject": run.control, "durable_name": "evil", "ack_policy": "none", "deliver_policy": "all"}
    requests: list[tuple[str, dict[str, Any]]] = []
    for stream in (*own_run, *buckets):
        changed = {"name": stream, "subjects": [f"{stream}.evil"], "max_msgs": 1, "storage": "file",
                   "republish": {"src": ">", "dest": run.control}, "allow_rollup_hdrs": True}  # fmt: skip
        body = {**changed, "seq": 1, "deliver_subject": run.control, "config": changed, "peer": "x"}
        requests += [(f"STREAM.{verb}.{stream}", body) for verb in _OF_STREAMS]
        asked = {"stream_name": stream, "config": delivers, "pause_until": "2100-01-01T00:00:00Z", "group": "x"}
        for verb in _OF_CONSUMERS:
            requests += [(f"CONSUMER.{verb}.{stream}.{name}", asked) for name in (names.TASKS_CONSUMER, "evil")]
        requests += [(f"CONSUMER.CREATE.{stream}", asked), (f"CONSUMER.CREATE.{stream}.evil.{run.control}", asked)]
        for copied in ({"mirror": {"name": stream}}, {"sources": [{"name": stream}]}, {"subjects": [run.control]}):
            requests.append(("STREAM.CREATE.EVIL", {"name": "EVIL", "storage": "file", **copied}))
    requests += [("ACCOUNT.PURGE.x", {}), ("META.LEADER.STEPDOWN", {}), ("SERVER.REMOVE", {"peer": "x"})]
    client = await nats.connect(
        url, user_credentials=str(creds), inbox_prefix=f"_INBOX_{role}_{names.token(NAME)}", error_cb=_ignore
    )
    try:
        for subject, about in requests:
            await client.publish(f"$JS.API.{subject}", json.dumps(about).encode(), reply=client.new_inbox())
        await client.flush()
        await asyncio.sleep(0.2)
    finally:
        await client.close()
    return len(requests)
