"""Seconds from a step's end until its version is LIVE, part by part: trainer and explorer share one GPU.

    python benchmarks/gpu/version_live.py [--size 1.5B 7B] [--out FILE]        three minutes a size
    python benchmarks/gpu/version_live.py --before shards.py     against the writer of an older commit, in turns
    python benchmarks/gpu/version_live.py --cpu --tiny

The trainer copies its weights into the version's files in /dev/shm. Then sync reads the files, while an explorer's
engine loads them and computes a canary. `quiet`: both wait for the version, as in a synchronous run. `busy`:
the trainer's main thread computes, and the engine samples. `before` is the order up to 0.3: the explorer checks, then
loads. The calls to sync and NATS are left out.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import queue
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from own_process import FOUND
from sync_nccl import SHAPES
from sync_object import load, save

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

LIMITS = {"tiny": 60.0, "1.5B": 0.5, "7B": 1.5}
MEMORY_GIB = {"tiny": 1, "1.5B": 16, "7B": 40}  # of the engine
START_SECONDS, ROUND_SECONDS = 600.0, 120.0
COLUMNS = ("", "", "GB", "copied s", "written s", "sync read s", "checked s", "pause s", "canary s", "LIVE s", "limit",
           "ahead s", "lost s")  # fmt: skip
_REQUESTS, _RESPONSE, _TOKENS = 32, 1500, (4, 512)

Found = dict[str, Any]


def answer(found: Found) -> None:
    print(f"\n{FOUND}{json.dumps(found)}", flush=True)


def module_of(path: str) -> Any:
    """The trainer's writer: of this tree, or from a file."""
    from trinity.trainer.weights import shards

    if not path:
        return shards
    spec = importlib.util.spec_from_file_location("shards_before", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class TrainerSide:
    """Publishes by a thread, while the main thread computes if it is told to be busy."""

    def __init__(self, job: Found) -> None:
        import torch
        from rollout import make_model
        from transformers import AutoModelForCausalLM

        self.folder, self.device = Path(job["folder"]), torch.device("cpu" if job["cpu"] else "cuda:0")
        make_model(self.folder / "model", argparse.Namespace(device=self.device.type, **SHAPES[job["size"]]))
        self.model = AutoModelForCausalLM.from_pretrained(self.folder / "model", dtype="auto").to(self.device)
        self.writers = {name: module_of(path) for name, path in job["writers"].items()}
        now = self.writers["now"].Snapshot(self.device, Path(job["root"]))
        others = {name: module.Snapshot(self.device) for name, module in self.writers.items() if name != "now"}
        self.snapshots = {"now": now, **others}
        self.tokens = torch.ones(*_TOKENS, dtype=torch.long, device=self.device)
        self.passes: list[float] = []  # seconds of the main thread's work

    def weights(self) -> Iterator[tuple[str, Any]]:
        return ((name, parameter.data) for name, parameter in self.model.named_parameters())

    def publish(self, command: Found) -> None:
        import torch

        from trinity.weights.manifest import Canary, FolderOffer, Manifest, Probe

        which, version = command["writer"], command["version"]
        module, snapshot = self.writers[which], self.snapshots[which]
        layout = [module.describe(name, tensor.dtype, tensor.shape) for name, tensor in self.weights()]
        snapshot.reserve(layout)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.passes.clear()
        copied, times = threading.Event(), {"begin": time.monotonic()}

        def write() -> None:
            folder = Path(command["root"]) / f"v{version}"
            if which == "now" and snapshot.has_files:
                tensors, infos = snapshot.give(folder)
            else:
                tensors, infos = module.write_shards(snapshot, layout, folder, "part-{:05d}.safetensors", all_stay=True)
            times["written"] = time.monotonic()
            probes = tuple(Probe((*range(1 + index, 65 + index),), (-1.0,) * 63) for index in range(4))
            manifest = Manifest("bench", version, version, tuple(tensors), tuple(infos), (FolderOffer(str(folder)),),
                                time.time(), canary=Canary(probes, 1e9, 1e9))  # fmt: skip
            save(self.folder, version, manifest)
            copied.wait()
            answer({**times, "bytes": manifest.size_bytes})
            begin = time.monotonic()
            snapshot.reserve(layout)
            took, passes = time.monotonic() - begin, list(self.passes) or [0.0]
            usual = statistics.median(passes)
            answer({"ahead": took, "lost": sum(passes) - len(passes) * usual, "slowest": max(passes), "usual": usual})

        thread = threading.Thread(target=write)
        if which == "now":  # it is written while it is taken
            snapshot.expect(layout)
            thread.start()
        snapshot.take(layout, self.weights())
        times["copied"] = time.monotonic()
        copied.set()
        if which != "now":
            thread.start()

    def run(self) -> None:
        import torch

        commands = commands_of(sys.stdin)
        answer({})
        busy = False
        while True:
            with contextlib.suppress(queue.Empty):
                command = commands.get(block=not busy)
                if command is None:
                    return
                busy = command.get("busy", busy)
                if "version" in command:
                    self.publish(command)
            if busy:
                begin = time.monotonic()
                with torch.no_grad():
                    self.model(self.tokens)
                if self.device.type == "cuda":
                    torch.cuda.synchronize()
                self.passes.append(time.monotonic() - begin)


def commands_of(lines: Any) -> "queue.Queue[Found | None]":
    """Commands as they come; None after the last."""
    found: queue.Queue[Found | None] = queue.Queue()

    def read() -> None:
        for line in lines:
            found.put(json.loads(line))
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def sync_side(job: Found) -> None:
    """Reads a version's files, as the sync service does."""
    from trinity.weights.manifest import check_files

    commands = commands_of(sys.stdin)
    answer({})
    while (command := commands.get()) is not None:
        manifest = load(Path(job["folder"]), command["version"])
        begin = time.monotonic()
        check_files(manifest, manifest.folder or Path())
        answer({"read": time.monotonic() - begin, "end": time.monotonic()})


async def explorer_side(job: Found) -> None:
    from trinity.data.experience import SamplingParams
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.engine.pool import EnginePool
    from trinity.explorer.types import EngineOptions
    from trinity.explorer.weights import loader
    from trinity.weights.stores.cache import WeightCache

    folder = Path(job["folder"])
    memory = {} if job["cpu"] else {"gpu_memory_gib": MEMORY_GIB[job["size"]]}
    options = EngineOptions(str(folder / "model"), "cpu" if job["cpu"] else "cuda", 2048, enforce_eager=True, **memory)
    engine = await Engine.start(options)
    pool = EnginePool([engine])
    load_version = loader.Loader(pool, WeightCache(folder / "cache", "bench", ["folder"], ""), options.model).load
    spent: dict[str, float] = {}
    check, measure = loader.check_files if hasattr(loader, "check_files") else None, pool.measure

    def timed_check(*given: Any) -> None:
        begin = time.monotonic()
        assert check is not None
        check(*given)
        spent["checked"] = time.monotonic() - begin

    async def timed_measure(canary: Any) -> Any:
        begin = time.monotonic()
        found = await measure(canary)
        spent["canary"] = time.monotonic() - begin
        return found

    loader.check_files, pool.measure = timed_check, timed_measure  # type: ignore[assignment, method-assign]
    sampling, commands = SamplingParams(max_tokens=_RESPONSE, ignore_eos=True), commands_of(sys.stdin)

    async def requests(index: int) -> None:
        while True:
            await engine.generate([1 + index, *range(2, 32)], sampling)

    running: list[asyncio.Task[None]] = []
    answer({})
    while (command := await asyncio.to_thread(commands.get)) is not None:
        if command.get("busy") and not running:
            running = [asyncio.create_task(requests(index)) for index in range(_REQUESTS)]
        if "version" not in command:
            continue
        manifest, begin = load(folder, command["version"]), time.monotonic()
        loaded = await load_version(manifest, lambda: command["before"], lambda: True)
        assert loaded is not None and loaded.right
        end = time.monotonic()
        if command["before"]:
            spent["checked"] = end - begin - spent["canary"] - loaded.pause_seconds
        answer({**spent, "pause": loaded.pause_seconds, "end": end})
    for request in running:
        request.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    engine.close()


class Side:
    """One process, which answers each command with a line."""

    def __init__(self, role: str, job: Found) -> None:
        few = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"} if job["cpu"] else {}
        self._log = Path(job["folder"]) / f"{role}.log"
        command = [sys.executable, __file__, "--process", role, json.dumps(job)]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True,
                env={**os.environ, **few},
            )  # fmt: skip
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(FOUND):
                self._answers.put(line.removeprefix(FOUND))

    def tell(self, **command: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self, seconds: float = ROUND_SECONDS) -> Found:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with contextlib.suppress(queue.Empty):
                return dict(json.loads(self._answers.get(timeout=1)))
            if self._process.poll() is not None:
                break
        raise SystemExit(f"{self._log.stem}: no answer within {seconds:g} s: {self._log.read_text()[-3000:]}")

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # an engine's core too
        self._process.wait(15)


def one_version(sides: dict[str, Side], root: Path, version: int, which: str, writers: Any) -> Found:
    """Publishes and loads a version. Returns seconds of each part, and until the last has ended."""
    writer = which if which in writers else "now"
    sides["trainer"].tell(version=version, writer=writer, root=str(root))
    times = sides["trainer"].answer()
    sides["sync"].tell(version=version)
    sides["explorer"].tell(version=version, before=which == "before")
    read, loaded, ahead = sides["sync"].answer(), sides["explorer"].answer(), sides["trainer"].answer()
    shutil.rmtree(root / f"v{version}")
    live = max(read["end"], loaded["end"]) - times["begin"]
    parts = {"copied": times["copied"] - times["begin"], "written": times["written"] - times["begin"]}
    return {**parts, **ahead, **read, **loaded, "live": live, "bytes": times["bytes"]}


def row_of(size: str, load: str, which: str, rounds: list[Found]) -> tuple[str, ...]:
    """Medians of the rounds."""
    from buffer_table import at_most

    middle = {key: statistics.median(found[key] for found in rounds) for key in rounds[0]}
    cells = [f"{middle[key]:.3f}" for key in ("copied", "written", "read", "checked", "pause", "canary", "live")]
    limit = f"<= {at_most(middle['live'], LIMITS[size])}" if which == "now" else ""
    after = f"{middle['ahead']:.3f}", f"{middle['lost']:.3f}"
    return f"{size}, {load}", which, f"{middle['bytes'] / 1e9:.2f}", *cells, limit, *after


def rows_of(size: str, args: argparse.Namespace, folder: Path, root: Path) -> Iterator[tuple[str, ...]]:
    writers = {"now": ""} | ({"before": args.before} if args.before else {})
    job = {"size": size, "cpu": args.cpu, "folder": str(folder), "root": str(root), "writers": writers}
    sides: dict[str, Side] = {}
    try:
        for role in ("trainer", "explorer", "sync"):  # the engine reads the trainer's model
            sides[role] = Side(role, job)
            sides[role].answer(START_SECONDS)
        version = 0
        for load in ("quiet", "busy"):
            for side in sides.values():
                side.tell(busy=load == "busy") if side is not sides["sync"] else None
            rounds: dict[str, list[Found]] = {"before": [], "now": []}
            for round_ in range(args.rounds + 1):
                for which in ("before", "now") if round_ % 2 else ("now", "before"):
                    version += 1
                    found = one_version(sides, root, version, which, writers)
                    print(f"{size} {load} {which}: {json.dumps(found)}", file=sys.stderr, flush=True)
                    if round_:  # the first allocates
                        rounds[which].append(found)
            for which, of_one in rounds.items():
                yield row_of(size, load, which, of_one)
    finally:
        for side in sides.values():
            side.kill()


def main() -> None:
    if sys.argv[1:2] == ["--process"]:
        from trinity.runtime.torch_builds import hide_unusable_companions

        hide_unusable_companions()
        role, job = sys.argv[2], json.loads(sys.argv[3])
        if role == "trainer":
            TrainerSide(job).run()
        elif role == "sync":
            sync_side(job)
        else:
            asyncio.run(explorer_side(job))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SHAPES), default=["1.5B", "7B"])
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each; an uncounted one precedes them")
    parser.add_argument("--before", default="", metavar="FILE", help="shards.py of an older commit")
    parser.add_argument("--out", type=Path, help="gets the table after every row")
    parser.add_argument("--cpu", action="store_true", help="trainer and engine on the CPU")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    if args.tiny:
        args.size, args.rounds = ["tiny"], 1
    from buffer_table import Table

    note = f"medians of {args.rounds} rounds in turns; written and LIVE: since the step's end; limit: of LIVE; ahead: "
    note += "memory for the next version; lost: by the trainer's main thread from the step's end until then"
    table = Table("a version, from the end of its step until it is LIVE, on one GPU", COLUMNS, [note])
    for size in args.size:
        with (
            tempfile.TemporaryDirectory(prefix="version-live-") as folder,
            tempfile.TemporaryDirectory(prefix="version-live-", dir="/dev/shm") as root,
        ):
            for row in rows_of(size, args, Path(folder), Path(root)):
                table.rows.append(row)
                if args.out is not None:
                    with args.out.open("w") as out, contextlib.redirect_stdout(out):
                        table.show()
    table.show()


if __name__ == "__main__":
    main()
