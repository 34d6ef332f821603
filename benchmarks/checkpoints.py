"""Checkpoints of one rank into the job folder and to S3, against bare copies of the same bytes.

    python benchmarks/checkpoints.py [--parameters 40000000] [--runs 3] [--tiny]

Weights, moments and the optimizer are real, of one large layer in float32; no step is trained. S3 is SeaweedFS on this
machine, so both sides of a transfer take its processors. `of copy` compares wall times within a round, and processor
seconds are of this process: checksums, copies and requests, without the server's.
"""

import argparse
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from trinity.runtime import files

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

LEAST_OF_COPY = 0.60
_ROUNDS_BEFORE = 1  # the first one warms caches up


class Rank:
    """The only rank."""

    is_first, world_size = True, 1

    def share(self, value: Any) -> Any:
        return value

    def collect(self, value: Any) -> list[Any]:
        return [value]


def make_state(parameters: int, meeting: Path) -> Any:
    """A layer, AdamW after an update, and its slices."""
    import torch
    import torch.distributed as dist

    from trinity.trainer.engine.slices import SlicedState

    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    width = max(8, round((parameters / 8) ** 0.5))
    module = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    module(torch.randn(4, width)).square().mean().backward()
    optimizer.step()
    engine = SimpleNamespace(module=module, optimizer=optimizer)
    return SlicedState(engine, optimizer, "adamw", 0, torch.float32, torch.device("cpu"))


class Bench:
    """The steps of saving and resuming, each with its bare counterpart."""

    def __init__(self, state: Any, root: Path, bucket: Any) -> None:
        from trinity.trainer.engine.checkpoint_store import CheckpointStore

        self.state, self.root, self.bucket = state, root, bucket
        self.folder = CheckpointStore(root / "folder")
        self.s3 = CheckpointStore(root / "s3", [bucket], in_folder=False)
        self.new = CheckpointStore(root / "new", [bucket])
        self.engine = SimpleNamespace(zero_stage=0, load=lambda actor: state.load(actor / "slices"))
        self.write: Callable[[], list[Path]] = list

    def snapshot(self) -> None:
        self.write = self.state.snapshot(self.root / "snapshot", {})

    def save(self, store: Any) -> None:
        from trinity.trainer.engine.checkpoint_store import TrainerState

        folder = store.begin(1)
        written = self.state.snapshot(folder / "actor/slices", {})()
        part = store.put(1, "attempt", written, True)
        store.finish(TrainerState("bench", 1, 0, 1, 0), None, [part], "attempt")

    def copy(self) -> None:
        shutil.copytree(self.folder.path(1), self.root / "copy")
        files.sync_tree(self.root / "copy")

    def upload(self) -> None:
        source = self.folder.path(1)
        names = [path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()]
        self.bucket.upload(9, "bare", source, names)

    def download(self) -> None:
        bare, target = self.bucket._bucket, self.root / "bare"
        target.mkdir()
        for index, name in enumerate(bare.names("global_step_9")):
            bare.download(name, target / str(index))
        files.sync_tree(target)

    def resume(self) -> None:
        self.new.load(1, self.engine, Rank(), unverified=False)

    def clean(self) -> None:
        for name in ("copy", "bare", "new", "snapshot"):
            shutil.rmtree(self.root / name, ignore_errors=True)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    os.sync()  # earlier writes do not count
    begin, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - begin, time.process_time() - cpu


def measure(bench: Bench, runs: int) -> None:
    work: dict[str, Callable[[], object]] = {
        "snapshot (the step waits)": bench.snapshot,
        "save to the folder": lambda: bench.save(bench.folder),
        "bare copy, synced": bench.copy,
        "save to S3": lambda: bench.save(bench.s3),
        "bare upload": bench.upload,
        "resume from S3, empty disk": bench.resume,
        "bare download, synced": bench.download,
    }
    bare = {name: other for name, other in zip(work, list(work)[1:], strict=False) if other.startswith("bare")}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in work}
    for run in range(runs + _ROUNDS_BEFORE):
        for name, part in work.items():
            took = timed(part)
            if run >= _ROUNDS_BEFORE:
                times[name].append(took)
        bench.clean()
    mb = sum(path.stat().st_size for path in bench.folder.path(1).rglob("*") if path.is_file()) / 1e6
    print(f"\na checkpoint of {mb:,.0f} MB")
    print(f"{'':28}{'seconds':>9}{'CPU s':>8}{'MB/s':>9}{'of copy':>9}{'limit':>9}")
    for name, found in times.items():
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        ratio = limit = ""
        if name in bare:
            pairs = zip(times[bare[name]], found, strict=True)
            ratio = f"{statistics.median(b[0] / own[0] for b, own in pairs):.2f}"
            limit = f">= {LEAST_OF_COPY:.2f}" if "S3" in name else ""
        print(f"{name:28}{wall:9.2f}{cpu:8.2f}{mb / wall:9,.0f}{ratio:>9}{limit:>9}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=40_000_000, help="12 bytes each")
    parser.add_argument("--runs", type=int, default=3, help="repetitions; medians are shown")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.parameters, args.runs = 100_000, 1
    import structlog

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    from support.servers.s3 import S3Server
    from trinity.weights.checkpoint_buckets import CheckpointBucket

    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=os.environ.get("TMPDIR")) as name:
        root = Path(name)
        server = S3Server(root / "weed").start()
        try:
            os.environ.update(server.environment)
            bucket = CheckpointBucket("s3://checkpoints/bench", "bench")
            measure(Bench(make_state(args.parameters, root / "meeting"), root, bucket), args.runs)
        finally:
            server.stop()


if __name__ == "__main__":
    main()
