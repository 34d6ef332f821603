"""What is wrong with one run's records ends neither that run's part nor any other's."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.servers.sync_instances import RUN, base_manifest, instance, make_manifest, make_member, served, until
from trinity.api.sync.v1 import sync_pb2 as pb
from trinity.runtime.broker import Bucket, connect
from trinity.runtime.errors import DataLoss, InvalidInput
from trinity.runtime.names import MEMBERS_BUCKET, VERSIONS_BUCKET, RunNames
from trinity.sync.runs import Run
from trinity.sync.settings import SyncSettings
from trinity.sync.store import records
from trinity.weights.pointer import decode_live, encode
from trinity.weights.wire import ExplorerState, manifest_to_proto

pytestmark = pytest.mark.core


@pytest.fixture
async def run(nats_url: str) -> AsyncIterator[Run]:
    async with instance(nats_url) as opened:
        await opened.versions.publish(base_manifest())
        yield opened


@pytest.mark.parametrize("error", [DataLoss("the manifest is gone"), TypeError("an unexpected keyword argument")])
async def test_a_candidate_that_cannot_be_read_does_not_end_the_judging(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    asked = 0

    def unreadable(kind: Any, value: bytes, decode: Any = records.decode_or_new) -> Any:
        nonlocal asked
        if kind is not records.Candidate:
            return decode(kind, value)
        asked += 1
        raise error

    await run.members.join(make_member("a"))
    with monkeypatch.context() as broken:
        broken.setattr(records, "decode_or_new", unreadable)
        await run.versions.publish(make_manifest(tmp_path, 1, canary=True))
        await until(lambda: asked > 1)
    await until(lambda: run.state.candidate.version == 1)


GARBAGE = [b"", b"\xff\xfe", b"null", b"[]", b"[" * 100_000, b"{}", b'{"version": "1"}', b'{"state": 7, "members": 3}']


async def test_garbage_under_every_key_is_stepped_over_and_what_was_there_stays(nats_url: str) -> None:
    names = RunNames(RUN)
    keys = [names.live_key, names.claim_key, names.candidate_key, names.epoch_key, names.platform_key]
    keys.append(names.version_key(0))
    keys += [f"{RUN}.version.x", f"{RUN}.version.9", f"{RUN}.nothing"]
    async with await connect(nats_url, "test") as broker, served(nats_url) as stub:
        await stub.Publish(pb.PublishRequest(manifest=manifest_to_proto(base_manifest())), timeout=20)
        member = pb.JoinRequest(run=RUN, explorer_id="a", pid=1, host="h")
        lease = (await stub.Join(member, timeout=20)).lease_id
        claim = (await stub.Claim(pb.ClaimRequest(run=RUN, trainer_id="t", pid=1, host="h"), timeout=20)).lease_id
        versions, members = await Bucket.open(broker, VERSIONS_BUCKET), await Bucket.open(broker, MEMBERS_BUCKET)
        before = decode_live((await versions.get(names.live_key)).value)
        for value in GARBAGE[1:]:
            for bucket, key in [*((versions, key) for key in keys), (members, names.member_key("a"))]:
                await bucket.update(key, lambda _, value=value: value)  # type: ignore[misc]
            await members.update(f"{names.members}.b", lambda _, value=value: value)  # type: ignore[misc]
            listed = await stub.ListVersions(pb.ListVersionsRequest(run=RUN), timeout=20)
            assert [v.manifest.version for v in listed.versions] == [0]
            await stub.Report(pb.ReportRequest(run=RUN, lease_id=lease, state=ExplorerState.RUNNING), timeout=20)
            await stub.Claim(pb.ClaimRequest(run=RUN, trainer_id="t", lease_id=claim), timeout=20)
        known = (await stub.ListMembers(pb.ListMembersRequest(run=RUN), timeout=20)).members
        assert [m.explorer_id for m in known] == ["a"]
        async with asyncio.timeout(20):
            while (await versions.get(names.live_key)).value != encode(before):
                await asyncio.sleep(0.05)


async def test_a_service_that_starts_steps_over_what_cannot_be_read(nats_url: str) -> None:
    names = RunNames(RUN)
    async with await connect(nats_url, "test") as broker:
        versions, members = await Bucket.open(broker, VERSIONS_BUCKET), await Bucket.open(broker, MEMBERS_BUCKET)
        keys = (names.live_key, names.claim_key, names.candidate_key, names.epoch_key, names.platform_key)
        for key in (*keys, f"{RUN}.version.x"):
            await versions.put_if(key, b"[]", 0)
        await members.put_if(names.member_key("a"), b"{", 0)
        async with served(nats_url) as stub:
            published = await stub.Publish(pb.PublishRequest(manifest=manifest_to_proto(base_manifest())), timeout=20)
            assert published.state == pb.VERSION_STATE_LIVE
            await stub.Join(pb.JoinRequest(run=RUN, explorer_id="a", pid=1, host="h"), timeout=20)
        assert decode_live((await versions.get(names.live_key)).value).version == 0


async def test_a_manifest_longer_than_nats_takes_is_refused_with_the_setting(run: Run, tmp_path: Path) -> None:
    manifest = make_manifest(tmp_path, 1)
    bucket: Any = run.manifests._bucket
    bucket._broker.client._max_payload = 100
    with pytest.raises(
        InvalidInput, match=r"version 1 has \d+ bytes \(1 tensors, 1 files\); NATS takes .* max_payload"
    ):
        await run.versions.publish(manifest)


def test_leases_outlive_no_explorer_that_starts_again() -> None:
    with pytest.raises(ValueError, match=r"lease_seconds\n.*less than or equal to 30"):
        SyncSettings(lease_seconds=60)
