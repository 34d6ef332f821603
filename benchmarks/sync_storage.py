"""Weight versions through storage: size of differences, and speed of put and fetch.

    python benchmarks/sync_storage.py [delta] [folder] [s3] [jetstream] [--parameters 500000000] [--tiny]

Without names, all four. Each part prints one table of figures and limits. Weights are normally distributed, in bf16
unless stated. All files were written just before they are read, so they are in the page cache. S3 is SeaweedFS, NATS
has the settings of `trinity run`; both run on this machine.
"""

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zstandard
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
if TYPE_CHECKING:
    from trinity.weights.manifest import Manifest

Bits = NDArray[np.unsignedinteger]
PARTS = ("delta", "folder", "s3", "jetstream")
SHARES = (0.001, 0.01, 0.1, 1.0)
MOST_OF_BYTES = {0.01: 0.05}
LEAST_OF_COPY = 0.60
_FILES = "part-{:05d}.safetensors"
_TENSOR = 16 << 20  # elements


def weights(elements: int, dtype: str) -> dict[str, Bits]:
    """Tensors of bit patterns: repeated random numbers, which are cheap, and which compression does not detect."""
    random = np.random.default_rng(0)
    values = random.standard_normal(_TENSOR + 1_000_003, dtype=np.float32) * np.float32(0.02)
    bits = values.view(np.uint32) if dtype == "F32" else (values.view(np.uint32) >> 16).astype(np.uint16)
    tensors = {}
    for index, start in enumerate(range(0, elements, _TENSOR)):
        size = min(_TENSOR, elements - start)
        begin = 7919 * index % 1_000_003
        tensors[f"layer.{index}"] = bits[begin : begin + size]
    return tensors


def updated(bits: Bits, share: float) -> Bits:
    """`share` of the elements changed by about 1 % in bf16, 0.01 % in float32; at least by the last bit."""
    random = np.random.default_rng(1)
    where = np.arange(len(bits)) if share == 1 else random.integers(0, len(bits), int(share * len(bits)))
    narrow = bits.itemsize == 2
    values = bits[where].astype(np.uint32) << (16 if narrow else 0)
    noise = 1 + (0.01 if narrow else 0.0001) * random.standard_normal(len(where), dtype=np.float32)
    moved = (values.view(np.float32) * noise).astype(np.float32).view(np.uint32)
    moved = ((moved + 0x8000) >> 16 if narrow else moved).astype(bits.dtype)
    new = bits.copy()
    new[where] = np.where(moved == bits[where], moved ^ 1, moved)
    return new


@contextmanager
def _folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="sync-storage-", dir=os.environ.get("TMPDIR")) as name:
        yield Path(name)


def _seconds(work: Callable[[], object]) -> float:
    os.sync()  # earlier writes do not count
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _table(title: str, columns: dict[str, int], rows: list[list[str]]) -> None:
    print(f"\n{title}")
    widths = list(columns.values())
    for row in [list(columns), *rows]:
        cells = [f"{cell:<{widths[0]}}" if index == 0 else f"{cell:>{widths[index]}}" for index, cell in enumerate(row)]
        print("".join(cells), flush=True)


def _packed_xor(old: Bits, new: Bits) -> int:
    """Bytes of the alternative: XOR of all elements, compressed."""
    step = 4 << 20
    pairs = ((old[at : at + step], new[at : at + step]) for at in range(0, len(old), step))
    return sum(len(zstandard.compress((a ^ b).tobytes(), 1)) for a, b in pairs)


def measure_delta(args: argparse.Namespace) -> None:
    """Bytes to transfer for a version, by the share of changed elements."""
    rows = []
    for dtype, elements in (("BF16", args.delta_parameters), ("F32", args.delta_parameters // 2)):
        old = weights(elements, dtype)
        with _folder() as root:
            rows += [_delta_row(root / str(share), old, share, dtype, args.runs) for share in SHARES]
    columns = {"elements changed": 18, "MB": 8, "travels": 10, "limit": 8, "XOR + zstd": 12, "encode s": 10,
               "apply s": 9, "copy s": 8}  # fmt: skip
    _table("delta: part of the full bytes that travels", columns, rows)


def two_versions(root: Path, old: dict[str, Bits], share: float, dtype: str) -> "tuple[Manifest, Manifest]":
    """Write the folders base, new (with `share` of the elements changed) and delta (the difference)."""
    from support.fakes.data.weight_versions import Tensor, with_delta, write_version

    new = {name: updated(bits, share) for name, bits in old.items()}
    base, manifest = (
        write_version("bench", number, root / place, {n: Tensor(dtype, b) for n, b in held.items()}, shards=1)
        for number, place, held in ((1, "base", old), (2, "new", new))
    )
    return base, with_delta(root / "base", base, root / "new", manifest, root / "delta")


def delta_bytes(manifest: "Manifest") -> int:
    """Bytes to transfer for a version with a difference."""
    assert manifest.delta is not None
    return sum(info.size_bytes for info in manifest.delta.files)


def _delta_row(root: Path, old: dict[str, Bits], share: float, dtype: str, runs: int) -> list[str]:
    from trinity.weights import delta

    base, encoded = two_versions(root, old, share, dtype)
    (root / "made").mkdir()
    times = _in_turns(
        runs,
        {
            "encode": lambda: delta.encode(root / "base", base, root / "new", encoded, root / "delta"),
            "apply": lambda: delta.apply(root / "base", base, root / "delta", encoded, root / "made"),
            "copy": lambda: _copy(root / "new", root / "copy"),
        },
        lambda: shutil.rmtree(root / "copy"),
    )
    shutil.rmtree(root)
    full = encoded.size_bytes
    part = delta_bytes(encoded) / full
    xor = sum(_packed_xor(bits, updated(bits, share)) for bits in old.values()) / full
    limit = f"< {MOST_OF_BYTES[share]:.0%}" if share in MOST_OF_BYTES else ""
    seconds = [f"{statistics.median(taken):.2f}" for taken in times.values()]
    return [f"{dtype} {share:.1%}", f"{full / 1e6:,.0f}", f"{part:.2%}", limit, f"{xor:.2%}", *seconds]


def _copy(source: Path, target: Path) -> None:
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)


def measure_own_folder(args: argparse.Namespace) -> None:
    size_bytes, times = own_folder_times(args.parameters, args.runs)
    _show("folder, the trainer's own (publish: write and hash)", size_bytes / 1e6, times, limit=True)


def own_folder_times(parameters: int, runs: int) -> tuple[int, dict[str, list[float]]]:
    """The trainer's folder: written by its writer, sealed, and verified in place by an explorer; and a plain copy.

    Bytes of a version, and seconds of each run of "publish", "fetch" and "copy".
    """
    import torch

    from trinity.trainer.weights.shards import describe, write_shards
    from trinity.weights.manifest import Manifest
    from trinity.weights.stores import open_store
    from trinity.weights.stores.cache import WeightCache

    held = {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in weights(parameters, "BF16").items()}
    layout = [describe(name, tensor.dtype, tensor.shape) for name, tensor in held.items()]
    with _folder() as root:
        store = open_store("folder", "bench", folder=root, nats_url="")
        cache = WeightCache(root / "cache", "bench", ["folder"], "")
        offered: list[Manifest] = []

        def publish() -> None:
            tensors, infos = write_shards(held.items(), layout, root / ".v1.partial", _FILES)
            (root / ".v1.partial").rename(root / "v1")
            manifest = Manifest("bench", 1, 1, tuple(tensors), tuple(infos), (), time.time())
            offered[:] = [replace(manifest, offers=(store.put(manifest, root / "v1", delta=False),))]
            store.seal(offered[0])

        write_shards(held.items(), layout, root / "plain", _FILES)
        times = _in_turns(
            runs,
            {
                "publish": publish,
                "fetch": lambda: cache.fetch(offered[0]),
                "copy": lambda: _copy(root / "plain", root / "copy"),
            },
            lambda: (store.delete(1), shutil.rmtree(root / "copy")),
        )
    return offered[0].size_bytes, times


def measure_store(args: argparse.Namespace, entry: str, nats_url: str, parameters: int) -> None:
    """Another store: put, seal, and fetch into an explorer's cache (a folder is verified in place)."""
    from support.fakes.data.weight_versions import Tensor, write_version
    from trinity.weights.manifest import Manifest
    from trinity.weights.stores import open_store
    from trinity.weights.stores.cache import WeightCache

    with _folder() as root:
        held = {name: Tensor("BF16", bits) for name, bits in weights(parameters, "BF16").items()}
        manifest = write_version("bench", 1, root / "v1", held, shards=4)
        store = open_store(entry.format(root=root), "bench", folder=root, nats_url=nats_url)
        cache = WeightCache(root / "cache", "bench", [store.kind], nats_url)
        offered: list[Manifest] = []

        def publish() -> None:
            offered[:] = [replace(manifest, offers=(store.put(manifest, root / "v1", delta=False),))]
            store.seal(offered[0])

        times = _in_turns(
            args.runs,
            {
                "publish": publish,
                "fetch": lambda: cache.fetch(offered[0]),
                "copy": lambda: _copy(root / "v1", root / "copy"),
            },
            lambda: (store.delete(1), cache.keep_only([]), shutil.rmtree(root / "copy")),
        )
        cache.close()
        store.close()
    title = "folder, another one (publish: copy)" if store.kind == "folder" else store.kind
    _show(title, manifest.size_bytes / 1e6, times, limit=store.kind == "folder")


def _in_turns(runs: int, work: dict[str, Callable[[], object]], clean: Callable[[], object]) -> dict[str, list[float]]:
    """Seconds of each, in turns, in reverse order in every other round. The first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in work}
    names = list(work)
    for run in range(runs + 1):
        order = names if run % 2 else [names[-1], *names[:-1]]
        took = {name: _seconds(work[name]) for name in order}
        clean()
        if run:
            for name, seconds in took.items():
                times[name].append(seconds)
    return times


def _show(title: str, mb: float, times: dict[str, list[float]], limit: bool) -> None:
    publish, fetch, copy = (statistics.median(seconds) for seconds in times.values())
    of_copy = statistics.median(c / (p + f) for p, f, c in zip(*times.values(), strict=True))
    rows = [
        [name, f"{seconds:.2f}", f"{mb / seconds:,.0f}", "", ""]
        for name, seconds in (("plain copy", copy), ("publish", publish), ("fetch, checked", fetch))
    ]
    both = publish + fetch
    bound = f">= {LEAST_OF_COPY:.2f}" if limit else ""
    rows.append(["publish + fetch", f"{both:.2f}", f"{mb / both:,.0f}", f"{of_copy:.2f}", bound])
    columns = {"": 20, "seconds": 9, "MB/s": 9, "of copy": 9, "limit": 10}
    _table(f"{title}: a whole version of {mb:,.0f} MB", columns, rows)


def measure_folders(args: argparse.Namespace) -> None:
    measure_own_folder(args)
    measure_store(args, "{root}/other", "", args.parameters)


def measure_s3(args: argparse.Namespace) -> None:
    from support.servers.s3 import S3Server

    with _folder() as root:
        server = S3Server(root).start()
        try:
            os.environ.update(server.environment)
            measure_store(args, "s3://weights/jobs", "", args.small_parameters)
        finally:
            server.stop()


def measure_jetstream(args: argparse.Namespace) -> None:
    from support.servers.nats import NatsServer

    with _folder() as root:
        server = NatsServer(root / "nats")
        server.start()
        try:
            measure_store(args, "jetstream", server.url, args.small_parameters)
        finally:
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--parameters", type=int, default=500_000_000, help="folder: of the model, in bf16")
    parser.add_argument("--delta-parameters", type=int, default=128 << 20, help="delta: in bf16, and half in float32")
    parser.add_argument("--small-parameters", type=int, default=50_000_000, help="s3 and jetstream: in bf16")
    parser.add_argument("--runs", type=int, default=5, help="repetitions; medians are shown")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    unknown = sorted(set(args.parts) - set(PARTS))
    if unknown:
        parser.error(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}")
    if args.tiny:
        args.parameters = args.delta_parameters = args.small_parameters = 1_000_000
        args.runs = 1
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    parts: dict[str, Callable[[], None]] = {
        "delta": lambda: measure_delta(args),
        "folder": lambda: measure_folders(args),
        "s3": lambda: measure_s3(args),
        "jetstream": lambda: measure_jetstream(args),
    }
    for name in args.parts or PARTS:
        parts[name]()


if __name__ == "__main__":
    main()
