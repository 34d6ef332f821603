"""Stores of versions: differences between whole ones, stores that do not answer, and remains of a crash."""

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from trinity.runtime.broker import PublishRefused
from trinity.runtime.errors import PermissionDenied, TrinityError, Unavailable
from trinity.trainer.weights import write_shards
from trinity.trainer.weights.shards import describe
from trinity.trainer.weights.version_stores import VersionStores
from trinity.weights.manifest import FolderOffer, Manifest, Offer
from trinity.weights.stores import FolderStore

pytestmark = pytest.mark.core

RUN = "tests-stores-000000"


class Remote(FolderStore):
    """A folder in the place of a store that takes differences; it may be out of order."""

    kind: ClassVar[str] = "s3"
    answers = seals = True
    deleted: tuple[int, ...] = ()
    fails_with: type[TrinityError] = Unavailable

    def put(self, manifest: Manifest, source: Path, delta: bool) -> Offer:
        if not self.answers:
            raise self.fails_with("it is out of order")
        return super().put(manifest, source, delta)

    def seal(self, manifest: Manifest) -> None:
        if not self.seals:
            raise self.fails_with("it is out of order")
        super().seal(manifest)

    def delete(self, version: int) -> None:
        if not self.answers:
            raise self.fails_with("it is out of order")
        self.deleted = (*self.deleted, version)
        super().delete(version)


def weights(version: int) -> dict[str, torch.Tensor]:
    """A fiftieth of the elements changes with each version."""
    tensor = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    for step in range(1, version + 1):
        tensor[step * 200 : (step + 1) * 200] += step
    return {"w": tensor}


def made(stores: VersionStores, version: int, content: int | None = None, at_seconds: float = 0.0) -> Manifest:
    """A version whose whole files are in the folder."""
    given = weights(version if content is None else content)
    layout = [describe(name, tensor.dtype, tensor.shape) for name, tensor in given.items()]
    infos, files = write_shards(given.items(), layout, stores.folder(version), "part-{:05d}.safetensors")
    return Manifest(RUN, version, version, tuple(infos), tuple(files), (), at_seconds)


def published(stores: VersionStores, version: int) -> Manifest:
    manifest = stores.put(made(stores, version))
    stores.seal(manifest)
    return manifest


def bases(manifests: list[Manifest]) -> list[int | None]:
    return [manifest.delta.base_version if manifest.delta else None for manifest in manifests]


@pytest.mark.parametrize(
    ("full_interval", "expected"), [(1, [None] * 5), (2, [None, 1, None, 3, None]), (9, [None, 1, 2, 3, 4])]
)
def test_every_so_many_versions_are_whole(full_interval: int, expected: list[int | None], tmp_path: Path) -> None:
    remote = Remote(tmp_path / "remote", RUN)
    stores = VersionStores(tmp_path / "weights", RUN, [remote], full_interval, "")
    found = [published(stores, version) for version in range(1, 6)]
    assert bases(found) == expected
    for manifest in found:
        assert remote.manifest(manifest.version) == manifest
        assert manifest.offers == (remote.offer(manifest.version, manifest.delta is not None),)
    assert not list((tmp_path / "weights").glob(".*"))


def test_a_folder_has_whole_versions_beside_a_store_with_differences(tmp_path: Path) -> None:
    local, remote = FolderStore(tmp_path / "weights", RUN), Remote(tmp_path / "remote", RUN)
    stores = VersionStores(tmp_path / "weights", RUN, [local, remote], 9, "")
    published(stores, 1)
    second = published(stores, 2)
    assert second.folder == tmp_path / "weights/v2"
    assert [offer.delta for offer in second.offers if isinstance(offer, FolderOffer)] == [False, True]


def test_after_a_rejection_or_a_rollback_the_next_version_is_whole(tmp_path: Path) -> None:
    stores = VersionStores(tmp_path / "weights", RUN, [Remote(tmp_path / "remote", RUN)], 9, "")
    found = [published(stores, 1), published(stores, 2)]
    stores.end_delta_chain()
    found += [published(stores, 3), published(stores, 4)]
    assert bases(found) == [None, 1, None, 3]


def test_a_version_whose_base_is_gone_is_whole(tmp_path: Path) -> None:
    stores = VersionStores(tmp_path / "weights", RUN, [Remote(tmp_path / "remote", RUN)], 9, "")
    published(stores, 1)
    stores.delete([1])
    assert bases([published(stores, 2)]) == [None]


def test_a_difference_that_saves_little_is_not_made(tmp_path: Path) -> None:
    stores = VersionStores(tmp_path / "weights", RUN, [Remote(tmp_path / "remote", RUN)], 9, "")
    published(stores, 1)
    other = {"w": torch.randn(10_000, generator=torch.Generator().manual_seed(5))}
    layout = [describe("w", torch.float32, (10_000,))]
    infos, files = write_shards(other.items(), layout, stores.folder(2), "part-{:05d}.safetensors")
    second = stores.put(Manifest(RUN, 2, 2, tuple(infos), tuple(files), (), 0.0))
    assert second.delta is None


def test_a_store_that_does_not_answer_is_left_out_and_gets_a_whole_version_later(tmp_path: Path) -> None:
    first, second = Remote(tmp_path / "first", RUN), Remote(tmp_path / "second", RUN)
    stores = VersionStores(tmp_path / "weights", RUN, [first, second], 9, "")
    published(stores, 1)
    second.answers = False
    assert published(stores, 2).offers == (first.offer(2, True),)
    second.answers = True
    third = published(stores, 3)
    assert third.offers == (first.offer(3, True), second.offer(3, False))
    assert published(stores, 4).offers == (first.offer(4, True), second.offer(4, True))
    first.answers = second.answers = False
    with pytest.raises(Unavailable, match="out of order"):
        stores.put(made(stores, 5))


@pytest.mark.parametrize("error", [PublishRefused, PermissionDenied])
def test_a_store_without_room_or_one_that_refuses_is_left_out_too(error: type[TrinityError], tmp_path: Path) -> None:
    """A stream that is full, credentials that have expired: the others have the version."""
    own, remote = FolderStore(tmp_path / "weights", RUN), Remote(tmp_path / "remote", RUN)
    remote.fails_with = error
    stores = VersionStores(tmp_path / "weights", RUN, [own, remote], 9, "")
    remote.answers = False
    assert published(stores, 1).offers == (own.offer(1, False),)
    remote.answers, remote.seals = True, False
    published(stores, 2)
    assert own.manifest(2).version == 2
    remote.seals = True
    assert published(stores, 3).offers == (own.offer(3, False), remote.offer(3, False))


def test_a_store_that_fails_at_the_end_gets_a_whole_version_later(tmp_path: Path) -> None:
    first, second = Remote(tmp_path / "first", RUN), Remote(tmp_path / "second", RUN)
    stores = VersionStores(tmp_path / "weights", RUN, [first, second], 9, "")
    published(stores, 1)
    second.seals = False
    published(stores, 2)
    second.seals = True
    assert published(stores, 3).offers == (first.offer(3, True), second.offer(3, False))
    assert second.manifest(3) == first.manifest(3)
    first.seals = second.seals = False
    with pytest.raises(Unavailable, match="out of order"):
        published(stores, 4)


def test_a_version_is_deleted_once_however_often_it_is_named(tmp_path: Path) -> None:
    """Sync names the last ones with every publication; one that a store could not delete is tried again."""
    first, second = Remote(tmp_path / "first", RUN), Remote(tmp_path / "second", RUN)
    stores = VersionStores(tmp_path / "weights", RUN, [first, second], 9, "")
    for version in (1, 2, 3):
        published(stores, version)
    first.deleted = second.deleted = ()  # before each version, what a crash may have left
    stores.delete([1])
    second.answers = False
    stores.delete([1, 2])
    second.answers = True
    stores.delete([1, 2])
    stores.delete([1, 2])
    assert (first.deleted, second.deleted) == ((1, 2, 2), (1, 2))
    stores.end_delta_chain()
    published(stores, 2)
    stores.delete([2])
    assert not (tmp_path / "second/v2").exists() and not stores.folder(2).exists(), "it was made again"


def test_a_version_is_sealed_again_where_its_files_were_lost_and_nowhere_else(tmp_path: Path) -> None:
    own, shared = FolderStore(tmp_path / "weights", RUN), FolderStore(tmp_path / "shared", RUN)
    stores = VersionStores(tmp_path / "weights", RUN, [own, shared], 9, "")
    without_shared = replace(made(stores, 1), offers=(own.offer(1, False),))
    stores.seal_again(without_shared)
    assert own.manifest(1) == without_shared


def test_a_base_that_was_damaged_makes_the_next_version_whole(tmp_path: Path) -> None:
    stores = VersionStores(tmp_path / "weights", RUN, [Remote(tmp_path / "remote", RUN)], 9, "")
    published(stores, 1)
    (stores.folder(1) / "part-00000.safetensors").write_bytes(b"damaged")
    assert bases([published(stores, 2)]) == [None]


@pytest.mark.parametrize("content", [1, 7])
def test_what_a_trainer_left_that_died_before_stage_is_replaced(content: int, tmp_path: Path) -> None:
    """Whether its weights were the same ones or not: the manifest says when it was made."""
    remote = Remote(tmp_path / "remote", RUN)
    before = VersionStores(tmp_path / "weights", RUN, [remote], 9, "")
    before.seal(before.put(made(before, 1, content, at_seconds=1.0)))
    after = VersionStores(tmp_path / "weights", RUN, [remote], 9, "")
    manifest = published(after, 1)
    assert remote.manifest(1) == manifest


def test_a_version_that_is_not_in_the_folder_is_fetched(tmp_path: Path) -> None:
    shared = FolderStore(tmp_path / "shared", RUN)
    stores = VersionStores(tmp_path / "weights", RUN, [shared], 9, "")
    manifest = published(stores, 1)
    assert stores.find(manifest) == tmp_path / "weights/v1"
    (tmp_path / "weights/v1/part-00000.safetensors").write_bytes(b"damaged")
    assert stores.find(manifest) == tmp_path / "shared/v1"
    damaged = replace(manifest, offers=())
    with pytest.raises(Exception, match="cannot roll back to version 1"):
        stores.find(damaged)
