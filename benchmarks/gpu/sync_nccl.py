"""A whole weight update over the collective group, as the engine sees it, against the bare broadcast of the same bytes.

    python benchmarks/gpu/sync_nccl.py [--size 1.5B 7B]     two GPUs: sender and engine; about three minutes a size
    python benchmarks/gpu/sync_nccl.py --cpu --tiny         the same over gloo

The sender holds the weights as a trainer's rank 0 does; the engine is vLLM, sampling while it is updated. `pause` is
from the pause of sampling to its going on; the limit is 2.5 x the bare broadcast.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
SHAPES = {
    "tiny": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocabulary": 512},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960, "vocabulary": 151936},
    "7B": {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "intermediate": 18944, "vocabulary": 152064},
}
LIMIT, SECONDS, BUCKET = 2.5, 120.0, 256 * 1024**2
BARE_EPOCH, EPOCH = 1, 2


def device_of(args: argparse.Namespace) -> Any:
    import torch

    return torch.device("cpu" if args.cpu else "cuda:0")


def backend_of(args: argparse.Namespace) -> str:
    return "gloo" if args.cpu else "nccl"


def timed_broadcasts(group: Any, size: int, count: int = 5) -> float:
    """Seconds of the fastest of some broadcasts of `size` bytes; every rank calls it."""
    import torch

    buffer = torch.zeros(size, dtype=torch.uint8, device=group.device)
    times = []
    for _ in range(count):
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        group.wait(group.broadcast(buffer))
        if group.device.type == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return min(times[1:])


def send_all(args: argparse.Namespace, model: Path, child: list[str]) -> dict[str, float]:
    """The sender: rank 0. Starts the engine's process, and gives its figures and the broadcast's."""
    import torch
    from transformers import AutoModelForCausalLM

    from trinity.runtime.weights.collective import Group, Store, send
    from trinity.trainer.weights.shards import describe

    device = device_of(args)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype="auto").to(device)
    weights = [(name, parameter.data) for name, parameter in policy.named_parameters()]
    tensors = [describe(name, tensor.dtype, tensor.shape) for name, tensor in weights]
    size = sum(info.size_bytes for info in tensors)
    store = Store.serve("127.0.0.1")
    layout = [[info.name, info.dtype, list(info.shape), info.size_bytes] for info in tensors]
    (model / "layout.json").write_text(json.dumps(layout))
    gpu = {} if args.cpu else {"CUDA_VISIBLE_DEVICES": "1"}
    command = [*child, "--store", store.address, "--bytes", str(size)]
    process = subprocess.Popen(command, env={**os.environ, **gpu}, stdout=subprocess.PIPE, text=True)
    try:
        bare = Group(store, BARE_EPOCH, backend_of(args), 0, 2, device, SECONDS)
        seconds = timed_broadcasts(bare, size)
        bare.close()
        assert store.wait("engine", 300), "the engine did not start"
        store.say("go/group")
        group = Group(store, EPOCH, backend_of(args), 0, 2, device, SECONDS)
        if not args.cpu:
            torch.cuda.reset_peak_memory_stats()
        base = 0 if args.cpu else torch.cuda.memory_allocated()
        for update in range(1, args.updates + 1):
            assert store.wait(f"ready/{update}", SECONDS)
            send(group, tensors, weights, BUCKET)
        extra = 0 if args.cpu else torch.cuda.max_memory_allocated() - base
        out, _ = process.communicate(timeout=SECONDS)
        print('\n'.join(line for line in out.splitlines() if 'engine.loaded' in line), file=sys.stderr)
        found = json.loads(out.splitlines()[-1])
        return {"bytes": size, "broadcast": seconds, "sender_gib": extra / 2**30, **found}
    finally:
        process.kill()


async def receive_all(args: argparse.Namespace) -> dict[str, float]:
    """The engine's side: rank 1."""
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.engine.types import EngineOptions
    from trinity.runtime.experience import SamplingParams
    from trinity.runtime.weights.collective import Group, Store

    store = Store.connect(args.store, SECONDS)
    bare = Group(store, BARE_EPOCH, backend_of(args), 1, 2, device_of(args), SECONDS)
    timed_broadcasts(bare, args.bytes)
    bare.close()
    if not args.cpu:
        import torch

        torch.cuda.empty_cache()
    options = EngineOptions(
        model=args.model, device="cpu" if args.cpu else "cuda", max_model_len=2048, gpu_memory_utilization=0.6,
        enforce_eager=args.eager,
    )  # fmt: skip
    engine = await Engine.start(options)
    store.say("engine")
    assert store.wait("go/group", SECONDS)
    group = {"epoch": EPOCH, "backend": backend_of(args), "store_address": args.store, "first_rank": 1,
             "world_size": 2, "timeout_seconds": SECONDS}  # fmt: skip
    await engine.enter_group(group)
    layout = json.loads((Path(args.model) / "layout.json").read_text())
    update = {"epoch": EPOCH, "bucket_bytes": BUCKET, "tensors": layout}
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    running = [asyncio.create_task(engine.generate([1, 2, 3, 4 + index], sampling)) for index in range(32)]
    await asyncio.sleep(2)
    pauses, memory = [], _LeastFree(args.cpu)
    for number in range(1, args.updates + 1):
        store.say(f"ready/{number}")
        pauses.append(await engine.load(number, update))
        await asyncio.sleep(0.3)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    engine.close()
    return {"first": pauses[0], "pause": statistics.median(pauses[1:]), "engine_gib": memory.used_gib()}


class _LeastFree:
    """Memory of the device that was taken beside what is in use now, at most, while updates came."""

    def __init__(self, cpu: bool) -> None:
        self._cpu, self._done = cpu, threading.Event()
        self._first = self._least = 0 if cpu else self._free()
        if not cpu:
            threading.Thread(target=self._watch, daemon=True).start()

    def _free(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info()[0])

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._least = min(self._least, self._free())

    def used_gib(self) -> float:
        self._done.set()
        return (self._first - self._least) / 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SHAPES), default=["1.5B", "7B"])
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--cpu", action="store_true", help="gloo and a CPU engine")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: starts faster, pauses are the same")
    parser.add_argument("--model", help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.store:
        print("\n" + json.dumps(asyncio.run(receive_all(args))), flush=True)
        return
    from rollout import make_model

    rows = []
    for size in ["tiny"] if args.tiny else args.size:
        with tempfile.TemporaryDirectory() as folder:
            shape = argparse.Namespace(device="cpu" if args.cpu else "cuda", **SHAPES[size])
            make_model(Path(folder), shape)
            flags = [flag for flag in ("--cpu", "--eager") if getattr(args, flag[2:])]
            child = [sys.executable, __file__, *flags, "--updates", str(args.updates), "--model", folder]
            rows.append((size, send_all(args, Path(folder), child)))
    heads = ("model", "GB", "broadcast s", "GB/s", "first s", "pause s", "sender GiB", "engine GiB", "ratio", "limit")
    print("".join(f"{head:>13}" for head in heads))
    for size, f in rows:
        cells = (size, f"{f['bytes'] / 1e9:.2f}", f"{f['broadcast']:.4f}", f"{f['bytes'] / f['broadcast'] / 1e9:.0f}",
                 f"{f['first']:.3f}", f"{f['pause']:.3f}", f"{f['sender_gib']:.2f}", f"{f['engine_gib']:.2f}",
                 f"{f['pause'] / f['broadcast']:.2f}", f"{LIMIT}")  # fmt: skip
        print("".join(f"{cell:>13}" for cell in cells))


if __name__ == "__main__":
    main()
