"""Fetched versions are whole and checked, by the first transport that works; else the error names each one's fault."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.fakes.data.weight_versions import Publisher, Storage, random_tensor, write_version
from support.servers.s3 import S3Server
from trinity.runtime.errors import InvalidInput, PermissionDenied, Unavailable
from trinity.weights.manifest import CollectiveOffer, FolderOffer, JetStreamOffer, S3Offer
from trinity.weights.stores import Store
from trinity.weights.stores.cache import WeightCache
from trinity.weights.wire import manifest_to_proto

pytestmark = pytest.mark.core

RUN = "run"
ALL = ("folder", "s3", "jetstream")
COPIED = ("s3", "jetstream")  # whole files in a folder are used in place


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    started = S3Server(tmp_path_factory.mktemp("s3")).start()
    yield started
    started.stop()


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server


@pytest.fixture(params=["folder", "s3", "jetstream"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    nats_url = request.getfixturevalue("nats_url") if request.param == "jetstream" else ""
    if request.param == "s3":
        request.getfixturevalue("s3")
    return Storage(request.param, f"{RUN}-{tmp_path.name}", tmp_path / "store", nats_url)


@pytest.fixture
def publisher(storage: Storage, tmp_path: Path) -> Iterator[Publisher]:
    store = storage.open()
    yield Publisher(tmp_path / "made", [store])
    store.close()


@pytest.fixture
def cache(storage: Storage, tmp_path: Path) -> Iterator[WeightCache]:
    made = WeightCache(tmp_path / "cache", storage.run, ALL, storage.nats_url)
    yield made
    made.close()


def left(cache: WeightCache) -> list[str]:
    return sorted(path.name for path in cache._root.iterdir())


def test_a_whole_version_is_fetched_and_kept(storage: Storage, publisher: Publisher, cache: WeightCache) -> None:
    manifest = publisher.publish(1)
    fetched = cache.fetch(manifest)
    assert fetched.transport == storage.kind
    assert publisher.is_in(fetched.folder, 1)
    assert cache.fetch(manifest) == fetched
    in_place = storage.kind == "folder"
    assert fetched.folder == Path(getattr(manifest.offers[0], "path", cache._root / "v1"))
    assert left(cache) == ([] if in_place else ["v1"])
    if not in_place:  # what says by which transport it came is damaged: the version is not
        (cache._root / "v1/.transport").write_bytes(b"\xff\xfe")
        assert cache.fetch(manifest) == replace(fetched, transport="")


@pytest.mark.parametrize("damage", ["", "flip_a_bit", "truncate", "remove"])
async def test_files_in_a_folder_can_be_loaded_before_they_are_checked_unless_their_size_is_wrong(
    storage: Storage, publisher: Publisher, cache: WeightCache, damage: str
) -> None:
    manifest = publisher.publish(1)
    if damage:
        await getattr(storage, damage)(1, manifest.files[1].name)
    there = storage.kind == "folder" and damage in ("", "flip_a_bit")
    assert cache.in_place(manifest) == (Path(getattr(manifest.offers[0], "path", "")) if there else None)
    if not damage:
        cache.fetch(manifest)
        difference = publisher.publish(2, base=1, whole=False)
        assert cache.in_place(difference) is None


@pytest.mark.parametrize("damage", ["truncate", "flip_a_bit", "remove"])
@pytest.mark.parametrize("shard", [0, 1])
async def test_a_damaged_shard_is_found_by_name(
    storage: Storage, publisher: Publisher, cache: WeightCache, damage: str, shard: int
) -> None:
    manifest = publisher.publish(1)
    await getattr(storage, damage)(1, manifest.files[shard].name)
    with pytest.raises(InvalidInput, match=rf"version 1: .*{storage.kind}: part-0000{shard}\.safetensors"):
        cache.fetch(manifest)
    assert left(cache) == []


@pytest.mark.parametrize("damage", ["truncate", "flip_a_bit", "remove"])
async def test_a_damaged_difference_is_found_by_name(
    storage: Storage, publisher: Publisher, cache: WeightCache, damage: str
) -> None:
    first = publisher.publish(1)
    second = publisher.publish(2, base=1, whole=False)
    cache.fetch(first)
    await getattr(storage, damage)(2, "part-00000.safetensors.delta")
    with pytest.raises(InvalidInput, match=r"version 2: .*difference.*part-00000\.safetensors\.delta"):
        cache.fetch(second)
    assert left(cache) == ([] if storage.kind == "folder" else ["v1"])


def test_a_late_joiner_goes_back_to_the_whole_version(publisher: Publisher, cache: WeightCache) -> None:
    publisher.publish(1)
    for version in (2, 3, 4):
        publisher.publish(version, base=version - 1, whole=False)
    fetched = cache.fetch(publisher.manifests[4])
    assert publisher.is_in(fetched.folder, 4)
    assert left(cache) == ["v4"]  # what was only on the way is gone
    publisher.publish(5, base=4, whole=False)
    assert publisher.is_in(cache.fetch(publisher.manifests[5]).folder, 5)
    assert left(cache) == ["v4", "v5"]
    cache.keep_only([5])
    assert left(cache) == ["v5"]


@pytest.mark.parametrize("storage", COPIED, indirect=True)
def test_a_difference_whose_base_is_here_goes_before_the_whole_files(publisher: Publisher, cache: WeightCache) -> None:
    cache.fetch(publisher.publish(1))
    second = publisher.publish(2, base=1)
    assert [getattr(offer, "delta", False) for offer in cache._offers(second)] == [True, False]
    cache.keep_only([])
    assert [getattr(offer, "delta", False) for offer in cache._offers(second)] == [False, True]
    assert publisher.is_in(cache.fetch(second).folder, 2)


def test_a_base_that_is_gone_is_named(publisher: Publisher, cache: WeightCache) -> None:
    publisher.publish(1)
    publisher.publish(2, base=1, whole=False)
    third = publisher.publish(3, base=2, whole=False)
    publisher.stores[0].delete(1)
    with pytest.raises(InvalidInput, match=r"version 1, the base of version 2, is gone from"):
        cache.fetch(third)
    assert left(cache) == []


@pytest.mark.parametrize("storage", COPIED, indirect=True)
def test_a_damaged_copy_is_fetched_again(publisher: Publisher, cache: WeightCache) -> None:
    publisher.publish(1)
    second = publisher.publish(2, base=1, whole=False)
    copy = cache.fetch(publisher.manifests[1]).folder / "part-00000.safetensors"
    copy.write_bytes(copy.read_bytes()[:-3] + b"xyz")
    assert publisher.is_in(cache.fetch(second).folder, 2)
    assert publisher.is_in(cache.fetch(publisher.manifests[1]).folder, 1)


def test_a_folder_that_is_not_here_is_not_usable(tmp_path: Path) -> None:
    manifest = write_version(RUN, 1, tmp_path / "v1", {"a": random_tensor("F32", (3,))})
    offers = (JetStreamOffer("v1"), S3Offer("b", "p/v1"), FolderOffer("/not/here"), CollectiveOffer(1, 1))
    cache = WeightCache(tmp_path / "cache", RUN, [*ALL, "collective-gloo"], "nats://127.0.0.1:1")
    assert cache.usable(replace(manifest, offers=offers)) == ["s3", "jetstream"]
    assert cache.usable(manifest) == ["folder"]
    assert WeightCache(tmp_path / "other", RUN, ["s3"], "").usable(replace(manifest, offers=offers)) == ["s3"]
    with pytest.raises(InvalidInput, match=r"manifest\.offers: of version 1: jetstream.*can use folder"):
        WeightCache(tmp_path / "third", RUN, ["folder"], "").fetch(replace(manifest, offers=(JetStreamOffer("v1"),)))


class Several:
    """A version on all three transports."""

    def __init__(self, tmp_path: Path, nats_url: str) -> None:
        run = f"{RUN}-{tmp_path.name}"
        self.storages = [Storage(kind, run, tmp_path / "store", nats_url) for kind in ALL]
        self.stores = [storage.open() for storage in self.storages]
        self.publisher = Publisher(tmp_path / "made", self.stores)
        self.cache = WeightCache(tmp_path / "cache", run, ALL, nats_url)


@pytest.fixture
def several(tmp_path: Path, nats_url: str, s3: S3Server) -> Iterator[Several]:
    made = Several(tmp_path, nats_url)
    yield made
    for store in made.stores:
        store.close()
    made.cache.close()


async def test_a_damaged_transport_is_followed_by_the_next(several: Several) -> None:
    manifest = several.publisher.publish(1)
    name = manifest.files[0].name
    assert several.cache.fetch(manifest).transport == "folder"
    await several.storages[0].flip_a_bit(1, name)
    assert several.cache.fetch(manifest).transport == "s3"
    several.cache.keep_only([])
    await several.storages[1].truncate(1, name)
    fetched = several.cache.fetch(manifest)
    assert fetched.transport == "jetstream"
    assert several.publisher.is_in(fetched.folder, 1)
    several.cache.keep_only([])
    await several.storages[2].remove(1, name)
    expected = (
        r"folder: part-00000\.saf.* checksum.*; s3: part-00000\.saf.* bytes.*; jetstream: part-00000\.saf.*missing"
    )
    with pytest.raises(InvalidInput, match=expected):
        several.cache.fetch(manifest)


def test_a_base_that_cannot_be_had_is_looked_for_once_in_each_store(
    several: Several, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every version of a chain would be tried three times as often as the one after it."""
    publisher = several.publisher
    publisher.publish(1)
    for version in range(2, 6):
        publisher.publish(version, base=version - 1, whole=False)
    for store in several.stores:
        store.delete(1)
    asked: list[int] = []
    manifest = Store.manifest
    monkeypatch.setattr(Store, "manifest", lambda store, version: [asked.append(version), manifest(store, version)][1])
    with pytest.raises(InvalidInput, match=r"the base of version 2, is gone from .* is gone from .* is gone from"):
        several.cache.fetch(publisher.manifests[5])
    assert sorted(asked) == [version for version in (1, 2, 3, 4) for _ in ALL]


def test_storage_that_does_not_answer_is_not_damage(several: Several, s3: S3Server) -> None:
    manifest = several.publisher.publish(1)
    on_s3 = replace(manifest, offers=tuple(offer for offer in manifest.offers if isinstance(offer, S3Offer)))
    s3.kill()
    try:
        with pytest.raises(
            Unavailable, match=r"version 1 cannot be fetched now: s3: s3://weights/jobs.* does not answer"
        ):
            several.cache.fetch(on_s3)
        elsewhere = replace(manifest, offers=manifest.offers[1:])
        assert several.cache.fetch(elsewhere).transport == "jetstream"
    finally:
        s3.start()


def test_storage_that_refuses_access_is_not_damage(
    cache: WeightCache, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = publisher.publish(1)

    def refuse(*_: object) -> None:
        raise PermissionDenied("the credentials have expired")

    monkeypatch.setattr(cache, "_take", refuse)
    with pytest.raises(Unavailable, match=r"version 1 cannot be fetched now: .*the credentials have expired"):
        cache.fetch(manifest)


_FETCH = """
import sys
from pathlib import Path
from trinity.weights.wire import decode_manifest
from trinity.weights.stores.cache import WeightCache
manifest = decode_manifest(Path(sys.argv[1]).read_bytes())
WeightCache(Path(sys.argv[2]), manifest.run, ["s3"], "").fetch(manifest)
"""


def test_a_fetch_that_is_killed_leaves_nothing_that_looks_whole(s3: S3Server, tmp_path: Path) -> None:
    run = f"{RUN}-{tmp_path.name}"
    storage = Storage("s3", run, tmp_path / "store", "")
    store = storage.open()
    tensors = {"a": random_tensor("U8", (1000,)), "b": random_tensor("U8", (96 << 20,))}
    publisher = Publisher(tmp_path / "made", [store], tensors)
    manifest = publisher.publish(1)
    sealed = tmp_path / "manifest"
    sealed.write_bytes(manifest_to_proto(manifest).SerializeToString())
    root = tmp_path / "cache" / run
    command = [sys.executable, "-c", _FETCH, str(sealed), str(tmp_path / "cache")]
    process = subprocess.Popen(command, env={**os.environ, **s3.environment})
    try:
        deadline = time.monotonic() + 60
        while not list(root.glob(".v1.*.partial/part-00001.safetensors")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.0005)
        s3.hold()  # the rest of the second file does not come
        assert process.poll() is None
        assert not (root / "v1").exists()
    finally:
        process.kill()
        process.wait(timeout=20)
        s3.go_on()
    cut_off = next(root.glob(".v1.*.partial"))
    assert (cut_off / "part-00000.safetensors").exists()
    cache = WeightCache(tmp_path / "cache", run, ["s3"], "")
    assert left(cache) == []
    assert publisher.is_in(cache.fetch(manifest).folder, 1)
