"""A difference applied to its base gives the version's files byte for byte, or an error that names the tensor."""

import contextlib
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.fakes.data.weight_versions import (
    WIDTHS,
    Tensor,
    changed,
    content_of,
    random_tensor,
    with_delta,
    write_version,
)
from trinity.runtime.errors import InvalidInput
from trinity.weights import delta
from trinity.weights.delta import BLOCK_BYTES, FRAME, Kind
from trinity.weights.delta import decode_block as decode
from trinity.weights.delta import encode_block as encode
from trinity.weights.manifest import Manifest, check_files

pytestmark = pytest.mark.core


def differ(root: Path, old: dict[str, Tensor], new: dict[str, Tensor]) -> tuple[Manifest, Manifest]:
    """Version 1 and 2 in v1 and v2, the difference in delta."""
    base = write_version("run", 1, root / "v1", old)
    manifest = write_version("run", 2, root / "v2", new)
    return base, with_delta(root / "v1", base, root / "v2", manifest, root / "delta")


def apply(root: Path, base: Manifest, manifest: Manifest) -> Path:
    (root / "made").mkdir(exist_ok=True)
    delta.apply(root / "v1", base, root / "delta", manifest, root / "made")
    return root / "made"


tensors = st.builds(
    random_tensor,
    st.sampled_from(sorted(WIDTHS)),
    st.lists(st.integers(0, 40), max_size=3).map(tuple),
    st.integers(0, 2**32),
)
shares = st.sampled_from([0.0, 0.01, 0.3, 0.6, 1.0])


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(st.sampled_from("abcdef"), st.tuples(tensors, shares, st.sampled_from("knr")), min_size=1))
def test_what_is_applied_is_what_was_encoded(pairs: dict[str, tuple[Tensor, float, str]]) -> None:
    """k: kept with a share of its elements changed; n: new in the second version; r: another shape and dtype before."""
    old = {name: tensor if how == "k" else random_tensor("U8", (3,)) for name, (tensor, _, how) in pairs.items()}
    old = {name: tensor for name, tensor in old.items() if pairs[name][2] != "n"} or {"gone": random_tensor("F32", ())}
    new = {name: changed(tensor, share) for name, (tensor, share, _) in pairs.items()}
    with tempfile.TemporaryDirectory() as folder:
        base, manifest = differ(Path(folder), old, new)
        check_files(manifest, apply(Path(folder), base, manifest))


@given(st.binary(min_size=8, max_size=200), st.integers(0, 4), st.sampled_from([1, 2, 4, 8]))
def test_a_frame_of_anything_is_decoded_or_refused(payload: bytes, kind: int, width: int) -> None:
    with contextlib.suppress(ValueError):
        assert len(decode(kind, payload, np.zeros(64, np.uint8), width)) == 64


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize(("share", "most"), [(0.0, 0.001), (0.001, 0.005), (0.01, 0.05), (0.1, 0.2), (1.0, 0.6)])
def test_bytes_that_travel_follow_what_changed(tmp_path: Path, dtype: str, share: float, most: float) -> None:
    tensor = random_tensor(dtype, (3, 1_000_003))
    base, manifest = differ(tmp_path, {"a": tensor}, {"a": changed(tensor, share)})
    assert manifest.delta is not None
    assert sum(info.size_bytes for info in manifest.delta.files) <= most * manifest.size_bytes
    assert content_of(apply(tmp_path, base, manifest), manifest) == content_of(tmp_path / "v2", manifest)


def test_replacing_every_bit_by_random_ones_costs_no_more_than_the_bytes() -> None:
    old, new = (random_tensor("I64", (BLOCK_BYTES // 8,), seed).bits.view(np.uint8) for seed in (0, 1))
    frame = encode(old, new, 8)
    kind, length = FRAME.unpack(frame[: FRAME.size])
    assert (kind, length) == (Kind.WHOLE, BLOCK_BYTES)
    assert np.array_equal(decode(kind, frame[FRAME.size :], old, 8), new)


def test_a_damaged_base_is_found_by_the_tensors_name(tmp_path: Path) -> None:
    old = {"a": random_tensor("F32", (500,)), "b": random_tensor("F32", (500,))}
    base, manifest = differ(tmp_path, old, {name: changed(tensor, 0.1) for name, tensor in old.items()})
    path = tmp_path / "v1" / base.files[1].name
    path.write_bytes(path.read_bytes()[:-4] + b"oops")
    with pytest.raises(InvalidInput, match="b: has checksum"):
        apply(tmp_path, base, manifest)
    assert [p.name for p in (tmp_path / "made").iterdir()] == [manifest.files[0].name]


@pytest.mark.parametrize("position", [0.3, 0.6, 0.999])
def test_a_damaged_difference_is_found_by_name(tmp_path: Path, position: float) -> None:
    old = {"a": random_tensor("BF16", (40_000,))}
    base, manifest = differ(tmp_path, old, {"a": changed(old["a"], 0.3)})
    path = tmp_path / "delta" / (manifest.files[0].name + delta.SUFFIX)
    data = bytearray(path.read_bytes())
    data[int(position * len(data))] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=r"^a: "):
        apply(tmp_path, base, manifest)


def test_a_difference_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    old = {"a": random_tensor("BF16", (40_000,))}
    base, manifest = differ(tmp_path, old, {"a": changed(old["a"], 0.3)})
    path = tmp_path / "delta" / (manifest.files[0].name + delta.SUFFIX)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InvalidInput, match=r"part-00000\.safetensors\.delta: is no whole safetensors file"):
        apply(tmp_path, base, manifest)


def test_a_difference_of_another_base_is_refused(tmp_path: Path) -> None:
    old = {"a": random_tensor("BF16", (10,))}
    base, manifest = differ(tmp_path, old, {"a": changed(old["a"], 0.3)})
    with pytest.raises(InvalidInput, match=r"manifest\.delta\.base_version: is 1; the base given is 7"):
        apply(tmp_path, replace(base, version=7), manifest)


def test_a_tensor_that_the_manifest_has_and_the_file_has_not_is_named(tmp_path: Path) -> None:
    old = {"a": random_tensor("BF16", (10,))}
    base, manifest = differ(tmp_path, old, {"a": changed(old["a"], 0.3)})
    more = replace(manifest, tensors=(*manifest.tensors, replace(manifest.tensors[0], name="lost")))
    with pytest.raises(InvalidInput, match="lost: is not in"):
        delta.encode(tmp_path / "v1", base, tmp_path / "v2", more, tmp_path / "delta")
    with pytest.raises(InvalidInput, match="lost"):
        apply(tmp_path, base, more)


def test_memory_does_not_follow_the_size_of_a_tensor(tmp_path: Path) -> None:
    tensor = random_tensor("F32", (48 << 20,))  # 192 MiB
    base, manifest = differ(tmp_path, {"a": tensor}, {"a": changed(tensor, 0.01)})
    new = manifest.tensors
    del tensor
    tracemalloc.start()
    try:
        (tmp_path / "again").mkdir()
        delta.encode(tmp_path / "v1", base, tmp_path / "v2", replace(manifest, tensors=new), tmp_path / "again")
        encoding = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        check_files(manifest, apply(tmp_path, base, manifest))
        applying = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert encoding < 120 << 20
    assert applying < 120 << 20
