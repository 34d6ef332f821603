"""A whole weight update over the collective group, measured in the engine, against a bare broadcast of the same bytes.

    python benchmarks/gpu/sync_nccl.py [--size 1.5B 7B]     two GPUs: sender and engine; about two minutes a size
    python benchmarks/gpu/sync_nccl.py --zero3              four: a trainer of two ranks with ZeRO-3, and two engines
    python benchmarks/gpu/sync_nccl.py --cpu --tiny [--zero3]

The sender has the weights, like a trainer's rank 0; under ZeRO-3 they are gathered while they are sent. vLLM engines
sample during the updates. `pause` is the time from pause to resume of the slowest engine, as the median of all updates
but the first. Its limit is 2.5 x the bare broadcast, and twice that under ZeRO-3.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]
SHAPES = {
    "tiny": {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 128, "vocabulary": 512},
    "1.5B": {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960, "vocabulary": 151936},
    "7B": {"hidden": 3584, "layers": 28, "heads": 28, "kv_heads": 4, "intermediate": 18944, "vocabulary": 152064},
}
LIMIT, MOST_GIB = 2.5, 3.0
SECONDS, START_SECONDS, SIZE_SECONDS, BUCKET_MIB = 120.0, 400.0, 560.0, 256
BUCKET = BUCKET_MIB * 1024**2
BARE_EPOCH, EPOCH = 1, 2

Job = dict[str, Any]
Found = dict[str, Any]


def device_of(job: Job) -> Any:
    import torch

    return torch.device("cpu" if job["cpu"] else "cuda:0")


def group_of(job: Job, store: Any, epoch: int, rank: int) -> Any:
    from trinity.weights.collective import Group

    return Group(store, epoch, backend_of(job), rank, 1 + job["engines"], device_of(job), SECONDS)


def backend_of(job: Job) -> str:
    return "gloo" if job["cpu"] else "nccl"


def timed_broadcasts(group: Any, size: int, count: int = 5) -> float:
    """Seconds of the fastest of several broadcasts of `size` bytes. Every rank calls it."""
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


class Held:
    """A whole model's weights, as in a trainer of one rank."""

    def __init__(self, job: Job) -> None:
        from transformers import AutoModelForCausalLM

        policy = AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto").to(device_of(job))
        self.weights, self._tensors = self, [(name, parameter.data) for name, parameter in policy.named_parameters()]

    def layout(self) -> list[Any]:
        from trinity.trainer.weights.shards import describe

        return [describe(name, tensor.dtype, tensor.shape) for name, tensor in self._tensors]

    def read(self) -> Iterator[tuple[str, Any]]:
        return iter(self._tensors)


def sharded(job: Job) -> Any:
    """One rank of the trainer's engine."""
    from support.programs.trainer.training import BASE
    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment

    config = json.loads(json.dumps(BASE))
    config["checkpoint_root_dir"] = job["folder"]
    config["model"] = {"model_path": job["model"], "max_model_len": 2048, "max_prompt_tokens": 1}
    config["trainer"] = {"deepspeed": {"zero_stage": 3}}
    config["synchronizer"] = {"bucket_mib": BUCKET_MIB}
    return TrainEngine(make_plan(Config.model_validate(config)), ranks_from_environment(1), device_of(job).type)


def train_side(job: Job, index: int) -> Found:
    """A rank of the trainer. Rank 0 sends; other ranks take part in gathering."""
    import torch

    if job["cpu"]:
        torch.set_num_threads(1)
    engine = sharded(job) if job["zero3"] else Held(job)
    found = send_all(job, engine) if index == 0 else gather_all(job, engine)
    if job["zero3"]:
        engine.close()
    return found


def send_all(job: Job, engine: Any) -> Found:
    from trinity.weights.collective import Store, send

    store, tensors = Store.connect(job["store"], job["secret"], SECONDS), engine.weights.layout()
    layout = [[info.name, info.dtype, list(info.shape), info.size_bytes] for info in tensors]
    (Path(job["folder"]) / "layout.json").write_text(json.dumps(layout))
    store.say("layout")
    size = sum(info.size_bytes for info in tensors)
    bare = group_of(job, store, BARE_EPOCH, 0)
    seconds = timed_broadcasts(bare, size)
    bare.close()
    if not job["cpu"]:
        import torch

        torch.cuda.empty_cache()
    wait_for_all(job, store, "engine", START_SECONDS)
    store.say("go/group")
    group, memory = group_of(job, store, EPOCH, 0), _MostTensors(job)
    for update in range(1, job["updates"] + 1):
        wait_for_all(job, store, f"ready/{update}", SECONDS)
        store.say(f"go/{update}")
        send(group, tensors, engine.weights.read(), BUCKET)
    return {"bytes": size, "broadcast": seconds, "gib": memory.gib()}


def gather_all(job: Job, engine: Any) -> Found:
    memory = _MostTensors(job)
    for _ in range(job["updates"]):
        for _ in engine.weights.read():
            pass
    return {"gib": memory.gib()}


def wait_for_all(job: Job, store: Any, what: str, seconds: float) -> None:
    heard = store.wait_all([f"{what}/{index}" for index in range(job["engines"])], seconds)
    assert all(heard), f"{what}: heard {heard} of the engines within {seconds:g} s"


async def engine_side(job: Job, index: int) -> Found:
    """One engine: rank 1 + index of the group."""
    from trinity.data.experience import SamplingParams
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions
    from trinity.weights.collective import Store

    store = Store.connect(job["store"], job["secret"], SECONDS)
    assert store.wait("layout", START_SECONDS), "the trainer did not start"
    layout = json.loads((Path(job["folder"]) / "layout.json").read_text())
    bare = group_of(job, store, BARE_EPOCH, 1 + index)
    timed_broadcasts(bare, sum(tensor[-1] for tensor in layout))
    bare.close()
    if not job["cpu"]:
        import torch

        torch.cuda.empty_cache()
    options = EngineOptions(
        model=job["model"], device=device_of(job).type, max_model_len=2048, gpu_memory_utilization=0.6,
        enforce_eager=job["eager"],
    )  # fmt: skip
    engine = await Engine.start(options)
    store.say(f"engine/{index}")
    assert await asyncio.to_thread(store.wait, "go/group", START_SECONDS), "another engine did not start"
    group = {"epoch": EPOCH, "backend": backend_of(job), "store_address": job["store"], "store_secret": job["secret"],
             "first_rank": 1 + index, "world_size": 1 + job["engines"], "timeout_seconds": SECONDS}  # fmt: skip
    await engine.enter_group(group)
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    running = [asyncio.create_task(engine.generate([1, 2, 3, 4 + number], sampling)) for number in range(32)]
    await asyncio.sleep(2)
    loads, memory = [], _LeastFree(job)
    for number in range(1, job["updates"] + 1):
        store.say(f"ready/{number}/{index}")
        assert await asyncio.to_thread(store.wait, f"go/{number}", SECONDS), "the sender does not continue"
        pause = await engine.load(number, {"epoch": EPOCH, "bucket_bytes": BUCKET, "tensors": layout})
        parts = engine.last_load
        assert parts is not None
        loads.append([pause, parts.pausing, parts.loading, parts.resuming])
        await asyncio.sleep(0.3)
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    engine.close()
    return {"loads": loads, "gib": memory.gib()}


class _MostTensors:
    """Peak GPU memory of this process's tensors above the current amount."""

    def __init__(self, job: Job) -> None:
        import torch

        self._cuda = None if job["cpu"] else torch.cuda
        if self._cuda is not None:
            self._cuda.reset_peak_memory_stats()
            self._before = self._cuda.memory_allocated()

    def gib(self) -> float:
        return 0.0 if self._cuda is None else (self._cuda.max_memory_allocated() - self._before) / 2**30


class _LeastFree:
    """Peak memory of the GPU during updates, above the current amount."""

    def __init__(self, job: Job) -> None:
        self._cpu, self._done = job["cpu"], threading.Event()
        self._first = self._least = 0 if self._cpu else self._free()
        if not self._cpu:
            threading.Thread(target=self._watch, daemon=True).start()

    def _free(self) -> int:
        import torch

        return int(torch.cuda.mem_get_info()[0])

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._least = min(self._least, self._free())

    def gib(self) -> float:
        self._done.set()
        return (self._first - self._least) / 2**30


def one_process(file: Path, role: str, index: int) -> None:
    job = json.loads(file.read_text())
    if role == "make":
        from rollout import make_model

        make_model(Path(job["model"]), argparse.Namespace(device=device_of(job).type, **SHAPES[job["size"]]))
        return
    found = train_side(job, index) if role == "trainer" else asyncio.run(engine_side(job, index))
    file.with_name(f"{role}{index}.json").write_text(json.dumps(found))


def environments(job: Job) -> dict[tuple[str, int], dict[str, str]]:
    """The GPU of each process: the trainer's ranks have the first ones, engines the next ones."""
    from trinity.runtime.process import free_port

    ranks, engines = job["ranks"], job["engines"]
    given = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(str(index) for index in range(ranks + engines))
    gpus = given.split(",")
    if not job["cpu"] and len(gpus) < ranks + engines:
        raise SystemExit(f"{ranks + engines} GPUs are needed, CUDA_VISIBLE_DEVICES is {given}")
    launch = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
              "MASTER_PORT": str(free_port()), "CUDA_VISIBLE_DEVICES": ",".join(gpus[:ranks])}  # fmt: skip
    found = {("trainer", rank): {**launch, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)}
    found |= {("engine", index): {"CUDA_VISIBLE_DEVICES": gpu} for index, gpu in enumerate(gpus[ranks:][:engines])}
    few = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"} if job["cpu"] else {}
    return {process: {**own, **few} for process, own in found.items()}


def run(job: Job) -> dict[str, list[Found]]:
    """Results of trainer and engines, by role. Raises SystemExit with the reason if one fails or hangs."""
    from trinity.weights.collective import Store

    folder = Path(job["folder"])
    store, file = Store.serve("127.0.0.1"), folder / "job.json"
    file.write_text(json.dumps({**job, "store": store.address, "secret": store.secret}))
    command = [sys.executable, __file__, "--process", str(file)]
    subprocess.run([*command, "make", "0"], check=True, timeout=SECONDS, stdout=subprocess.DEVNULL)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for (role, index), own in environments(job).items():
            with (folder / f"{role}{index}.txt").open("wb") as output:
                processes[f"{role}{index}"] = subprocess.Popen(
                    [*command, role, str(index)], env={**os.environ, **own}, stdout=output, stderr=subprocess.STDOUT,
                    start_new_session=True,
                )  # fmt: skip
        end = time.monotonic() + SIZE_SECONDS
        while any(process.poll() is None for process in processes.values()) and time.monotonic() < end:
            if any(process.poll() for process in processes.values()):
                break
            time.sleep(0.1)
        codes = {name: process.poll() for name, process in processes.items()}
    finally:
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # an engine's core too
            process.wait(15)
    if any(code != 0 for code in codes.values()):
        told = [f"{name}, code {code}: {(folder / f'{name}.txt').read_text()[-2500:]}" for name, code in codes.items()]
        raise SystemExit("\n\n".join(told))
    roles = {"trainer": job["ranks"], "engine": job["engines"]}
    return {
        role: [json.loads((folder / f"{role}{index}.json").read_text()) for index in range(count)]
        for role, count in roles.items()
    }


def rows_of(size: str, found: dict[str, list[Found]], limit: float) -> Iterator[tuple[str, ...]]:
    from buffer_table import at_most

    sender = found["trainer"][0]
    broadcast, nbytes = sender["broadcast"], sender["bytes"]
    slowest = [max(loads) for loads in zip(*(engine["loads"] for engine in found["engine"]), strict=True)]
    later = sorted(slowest[1:])
    pause, pausing, loading, resuming = later[(len(later) - 1) // 2]
    cells = [f"{figure:.4f}" for figure in (pausing, loading, resuming, pause)]
    ratio = round(pause / broadcast, 2)
    yield (size, f"{nbytes / 1e9:.2f}", f"{broadcast:.4f}", f"{nbytes / broadcast / 1e9:.0f}", f"{slowest[0][0]:.3f}",
           *cells, "", f"pause <= {at_most(ratio, limit)}", f"{ratio:.2f}")  # fmt: skip
    for role, about in (("trainer", "sender"), ("engine", "engine")):
        gib = max(one["gib"] for one in found[role])
        kept = f"GiB <= {at_most(round(gib, 2), MOST_GIB)}"
        yield (f"{size}, extra memory, {about}", *[""] * 8, f"{gib:.2f}", kept, f"{gib / MOST_GIB:.2f}")


def main() -> None:
    if sys.argv[1:2] == ["--process"]:
        one_process(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=list(SHAPES), default=["1.5B", "7B"])
    parser.add_argument("--updates", type=int, default=6)
    parser.add_argument("--zero3", action="store_true", help="a trainer of two ranks with ZeRO-3, and two engines")
    parser.add_argument("--cpu", action="store_true", help="gloo and CPU engines")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: it starts faster and pauses more slowly")
    args = parser.parse_args()
    if args.updates < 2:
        parser.error("--updates: the first one is not counted")
    from buffer_table import Table

    several, limit = (2, 2 * LIMIT) if args.zero3 else (1, LIMIT)
    job: Job = {
        "ranks": several,
        "engines": 1 if args.tiny else several,  # an engine takes far longer to start than all the rest
        **{n: getattr(args, n) for n in ("updates", "zero3", "cpu", "eager")},
    }
    trainer = f"{several} ranks with ZeRO-3" if args.zero3 else "1 rank"
    sides = f"{trainer}, {job['engines']} engine(s)"
    table = Table(
        f"a weight update over {backend_of(job)}, {sides}, CUDA graphs: {not (args.eager or args.cpu)}",
        ("model", "GB", "broadcast s", "GB/s", "first s", "pausing s", "loading s", "resuming s", "pause s", "GiB",
         "limit", "ratio"),
        ["limit and ratio of a pause: to the bare broadcast of the same bytes"],
    )  # fmt: skip
    for size in ["tiny"] if args.tiny else args.size:
        with tempfile.TemporaryDirectory(prefix="sync-nccl-") as folder:
            print(f"{size}: starting", file=sys.stderr, flush=True)
            found = run({**job, "size": size, "folder": folder, "model": f"{folder}/model"})
        table.rows.extend(rows := list(rows_of(size, found, limit)))
        print(*(" ".join(cell for cell in row if cell) for row in rows), sep="\n", file=sys.stderr, flush=True)
    table.show()


if __name__ == "__main__":
    main()
