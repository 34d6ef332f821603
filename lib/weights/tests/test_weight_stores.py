"""Versions in a folder, on a real S3 server and on a real NATS: immutable keys, the manifest last, clear errors."""

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from support.fakes.data.weight_versions import Storage, changed, content_of, random_tensor, with_delta, write_version
from support.servers.nats import NatsCluster, NatsServer
from support.servers.s3 import S3Server
from trinity.runtime.errors import AlreadyExists, InvalidInput, NotFound, PermissionDenied, Unavailable
from trinity.weights.manifest import FileInfo, FolderOffer, Manifest, S3Offer, check_files
from trinity.weights.stores import FolderStore, Store, open_offer, open_store
from trinity.weights.stores.jetstream import CHUNK_BYTES, MOST_BYTES, JetStreamStore
from trinity.weights.stores.s3 import S3Store

pytestmark = pytest.mark.core

TENSORS = {"a": random_tensor("BF16", (900_000,)), "b": random_tensor("F32", ()), "c": random_tensor("U8", (0, 3))}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    server = S3Server(tmp_path_factory.mktemp("s3")).start()
    yield server
    server.stop()


@pytest.fixture
def aws(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in s3.environment.items():
        monkeypatch.setenv(name, value)
    return s3


@pytest.fixture(params=["folder", "s3", "jetstream"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    nats_url = request.getfixturevalue("nats_url") if request.param == "jetstream" else ""
    if request.param == "s3":
        request.getfixturevalue("aws")
    return Storage(request.param, f"run-{tmp_path.name}", tmp_path / "store", nats_url)


@pytest.fixture
def store(storage: Storage) -> Iterator[Store]:
    opened = storage.open()
    yield opened
    opened.close()


def version(store: Store, folder: Path, number: int = 1) -> Manifest:
    """A version with its whole files put, not sealed."""
    manifest = write_version(store.run, number, folder, TENSORS)
    return replace(manifest, offers=(store.put(manifest, folder, delta=False),))


def test_what_is_put_is_what_is_fetched(store: Store, storage: Storage, tmp_path: Path) -> None:
    manifest = version(store, tmp_path / "v1")
    store.seal(manifest)
    reader = open_offer(manifest.offers[0], store.run, nats_url=storage.nats_url)
    assert (reader.kind, reader.manifest(1)) == (storage.kind, manifest)
    for info in manifest.files:
        reader.fetch(manifest.offers[0], info.name, tmp_path / info.name)
    assert content_of(tmp_path, manifest) == content_of(tmp_path / "v1", manifest)
    reader.close()


def test_a_difference_lies_beside_the_whole_files(store: Store, tmp_path: Path) -> None:
    base = version(store, tmp_path / "v1")
    new = {name: changed(tensor, 0.01) for name, tensor in TENSORS.items()}
    manifest = write_version(store.run, 2, tmp_path / "v2", new)
    manifest = with_delta(tmp_path / "v1", base, tmp_path / "v2", manifest, tmp_path / "delta")
    offers = store.put(manifest, tmp_path / "v2", delta=False), store.put(manifest, tmp_path / "delta", delta=True)
    manifest = replace(manifest, offers=offers)
    store.seal(manifest)
    assert store.manifest(2).offers == offers
    assert manifest.delta is not None
    name = manifest.delta.files[0].name
    store.fetch(offers[1], name, tmp_path / name)
    assert (tmp_path / name).read_bytes() == (tmp_path / "delta" / name).read_bytes()


def test_a_version_without_its_manifest_does_not_exist(store: Store, tmp_path: Path) -> None:
    manifest = version(store, tmp_path / "v1")
    with pytest.raises(NotFound, match="version 1 is not in"):
        store.manifest(1)
    store.seal(manifest)
    assert store.manifest(1) == manifest


async def test_the_manifest_is_not_written_while_a_file_is_missing(
    store: Store, storage: Storage, tmp_path: Path
) -> None:
    manifest = version(store, tmp_path / "v1")
    await storage.remove(1, manifest.files[1].name)
    with pytest.raises(InvalidInput, match=r"part-00001\.safetensors: of version 1 is not there in"):
        store.seal(manifest)
    with pytest.raises(NotFound):
        store.manifest(1)


def test_putting_the_same_again_is_fine_and_other_content_is_refused(store: Store, tmp_path: Path) -> None:
    manifest = version(store, tmp_path / "v1")
    assert store.put(manifest, tmp_path / "v1", delta=False) == manifest.offers[0]
    store.seal(manifest)
    store.seal(manifest)
    others = {**TENSORS, "a": changed(TENSORS["a"], 0.001)}
    other = write_version(store.run, 1, tmp_path / "other", others)
    with pytest.raises(AlreadyExists, match=r"part-00000\.safetensors of version 1 is in .* keys never change"):
        store.put(other, tmp_path / "other", delta=False)
    with pytest.raises(AlreadyExists, match="with another manifest"):
        store.seal(replace(manifest, step=5))
    assert store.manifest(1) == manifest
    store.fetch(manifest.offers[0], manifest.files[0].name, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == (tmp_path / "v1" / manifest.files[0].name).read_bytes()


def test_a_deleted_version_is_gone_and_others_stay(store: Store, tmp_path: Path) -> None:
    first, second = version(store, tmp_path / "v1"), version(store, tmp_path / "v11", 11)
    store.seal(first)
    store.seal(second)
    store.delete(1)
    store.delete(1)
    with pytest.raises(NotFound):
        store.manifest(1)
    with pytest.raises(NotFound, match=r"part-00000"):
        store.fetch(first.offers[0], first.files[0].name, tmp_path / "fetched")
    store.fetch(second.offers[0], second.files[0].name, tmp_path / "fetched")
    # The number may be used again: what was put of it was never seen.
    others = {**TENSORS, "a": changed(TENSORS["a"], 0.001)}
    again = write_version(store.run, 1, tmp_path / "again", others)
    again = replace(again, offers=(store.put(again, tmp_path / "again", delta=False),))
    store.seal(again)
    assert store.manifest(1).files == again.files


def test_source_files_that_are_not_what_the_manifest_says_are_refused(store: Store, tmp_path: Path) -> None:
    manifest = write_version(store.run, 1, tmp_path / "v1", TENSORS)
    path = tmp_path / "v1" / manifest.files[1].name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InvalidInput, match=r"part-00001\.safetensors: in .* has \d+ bytes, the manifest says"):
        store.put(manifest, tmp_path / "v1", delta=False)
    path.unlink()
    with pytest.raises(InvalidInput, match=r"part-00001\.safetensors: is missing in"):
        store.put(manifest, tmp_path / "v1", delta=False)


def test_names_and_runs_of_others_are_refused(store: Store, tmp_path: Path) -> None:
    manifest = version(store, tmp_path / "v1")
    for name in ("../v1/x", "..", "", "manifest.pb", ".hidden"):
        with pytest.raises(InvalidInput, match=r"manifest\.files"):
            store.fetch(manifest.offers[0], name, tmp_path / "fetched")
    with pytest.raises(InvalidInput, match=r"manifest\.run: is 'other'"):
        store.put(replace(manifest, run="other"), tmp_path / "v1", delta=False)


def test_the_trainers_own_folder_is_not_copied(tmp_path: Path) -> None:
    store = open_store("folder", "run", folder=tmp_path / "weights", nats_url="")
    manifest = write_version("run", 3, tmp_path / "weights/v3", TENSORS)
    assert store.put(manifest, tmp_path / "weights/v3", delta=False) == FolderOffer(str(tmp_path / "weights/v3"))
    store.seal(manifest)
    assert sorted(p.name for p in (tmp_path / "weights/v3").iterdir()) == [
        "manifest.pb",
        *content_of(tmp_path / "weights/v3", manifest),
    ]


@pytest.mark.parametrize("entry", ["", "disk", "relative/path", "s3://", "s3:///prefix", "s3://b/p?x=1", "gs://bucket"])
def test_an_entry_that_is_no_storage_is_refused_by_name(entry: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"synchronizer\.storage"):
        open_store(entry, "run", folder=tmp_path, nats_url="nats://127.0.0.1:1")


def test_a_model_above_the_limit_is_not_for_jetstream(tmp_path: Path) -> None:
    manifest = write_version("run", 1, tmp_path / "v1", TENSORS)
    large = replace(manifest, files=(replace(manifest.files[0], size_bytes=MOST_BYTES), manifest.files[1]))
    store = open_store("jetstream", "run", folder=tmp_path, nats_url="nats://127.0.0.1:1")
    with pytest.raises(InvalidInput, match=r"synchronizer\.storage: jetstream is for models up to 256 MiB"):
        store.put(large, tmp_path / "v1", delta=False)


@pytest.mark.parametrize("open_far", [
    lambda: S3Store("weights", "run", "run", patience_seconds=2.0),
    lambda: JetStreamStore("run", "nats://127.0.0.1:1", patience_seconds=2.0),
])  # fmt: skip
def test_storage_that_is_not_there_is_said_within_the_time(
    open_far: Callable[[], Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    store = open_far()
    begin = time.monotonic()
    with pytest.raises(Unavailable, match=r"did not answer|does not answer"):
        store.manifest(1)
    store.close()
    assert time.monotonic() - begin < 15


def test_a_hanging_s3_server_is_unavailable(aws: S3Server) -> None:
    store = S3Store("weights", "run", "run", patience_seconds=2.0)
    aws.hold()
    try:
        begin = time.monotonic()
        with pytest.raises(Unavailable, match="s3://weights/run does not answer"):
            store.manifest(1)
        assert time.monotonic() - begin < 15
    finally:
        aws.go_on()


def test_wrong_credentials_are_named(aws: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(PermissionDenied, match=r"s3://weights/run refuses .* AWS_SECRET_ACCESS_KEY"):
        S3Store("weights", "run", "run").manifest(1)


def test_only_the_readers_own_endpoint_gets_its_credentials(aws: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    offer = S3Offer("weights", "run/v1", "http://127.0.0.1:1")
    with pytest.raises(NotFound):
        open_offer(offer, "run", nats_url="").manifest(1)
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInput, match=r"on S3 at 'http://127.0.0.1:\d+'; .* set AWS_ENDPOINT_URL"):
        open_offer(replace(offer, endpoint=aws.url), "run", nats_url="")


@pytest.mark.parametrize("bucket", ["", "evil.example/x", "a@b", "a:9", "..", "x" * 300, "a\n"])
def test_what_is_no_bucket_becomes_no_part_of_an_address(bucket: str) -> None:
    with pytest.raises(InvalidInput, match="is no name of a bucket"):
        open_offer(S3Offer(bucket, "run/v1"), "run", nats_url="")


@pytest.mark.parametrize("delta", [True, False])
def test_a_folder_on_offer_with_anything_but_files_is_not_read(delta: bool, tmp_path: Path) -> None:
    """A pipe or a device would be read for ever."""
    (tmp_path / "v1").mkdir()
    os.mkfifo(tmp_path / "v1/model.safetensors")
    if delta:
        with pytest.raises(InvalidInput, match=r"model.safetensors: in .*v1 is no regular file"):
            FolderStore(tmp_path, "run").fetch(
                FolderOffer(str(tmp_path / "v1"), True), "model.safetensors", tmp_path / "copy"
            )
    info = FileInfo("model.safetensors", 0, "")
    with pytest.raises(InvalidInput, match=r"model.safetensors: in .*v1 is no regular file"):
        check_files(Manifest("run", 1, 1, (), (info,), (), 0.0), tmp_path / "v1")


def test_an_upload_goes_on_when_nats_is_killed_in_the_middle(nats_server: NatsServer, tmp_path: Path) -> None:
    store = JetStreamStore("run", nats_server.url)
    store.delete(1)  # connected
    manifest = write_version("run", 1, tmp_path / "v1", {"a": random_tensor("U8", (200 * CHUNK_BYTES + 7,))}, shards=1)
    with ThreadPoolExecutor(1) as pool:
        putting = pool.submit(store.put, manifest, tmp_path / "v1", False)
        time.sleep(0.2)
        nats_server.kill()
        assert not putting.done()
        nats_server.start()
        offer = putting.result(timeout=90)
    store.fetch(offer, manifest.files[0].name, tmp_path / "fetched")
    assert (tmp_path / "fetched").read_bytes() == (tmp_path / "v1" / manifest.files[0].name).read_bytes()
    store.close()


def test_a_cluster_of_three_gives_back_at_once_what_it_took(tmp_path: Path) -> None:
    with NatsCluster(tmp_path / "nats") as cluster:
        store = JetStreamStore("run", cluster.url)
        for number in range(1, 6):
            manifest = version(store, tmp_path / f"v{number}", number)
            store.seal(manifest)
            for info in manifest.files:
                store.fetch(manifest.offers[0], info.name, tmp_path / info.name)
            assert content_of(tmp_path, manifest) == content_of(tmp_path / f"v{number}", manifest)
        store.close()
