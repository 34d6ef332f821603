"""A version of the weights through object storage on a local disk: the engine's pause, and all that is outside of it.

    python benchmarks/gpu/sync_object.py          1.5 B; trainer and engine take turns on one GPU; four minutes
    python benchmarks/gpu/sync_object.py --cpu --tiny

The trainer's engine (ZeRO 2, bf16 with float32 masters) publishes version 0, makes one real optimizer step at lr 1e-6,
and publishes version 1: by its own writer, into a folder. The difference between the two is what travels to stores that
take differences. An explorer has version 1 by its cache, checked in place or as a copy, or from base and difference.
Then its engine loads the files while requests run; the pause lasts until sampling resumes.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from own_process import FOUND, found_by

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests")]

if TYPE_CHECKING:
    from trinity.weights.manifest import Manifest

SHAPE = {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "intermediate": 8960, "vocabulary": 151_936}
TINY = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "intermediate": 256, "vocabulary": 512}
PROCESSES = ("trainer", "explorer")
MOST_PAUSE, PROCESS_SECONDS, LEARNING_RATE = 0.5, 220, 1e-6
_REQUESTS, _PROMPT, _RESPONSE = 32, 32, 1500

Found = dict[str, float]


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def train_and_publish(args: argparse.Namespace) -> Found:
    """Both versions and their difference below --folder, and the seconds to make them."""
    from trainer import make_batch

    from support.programs.trainer.training import BASE
    from trinity.config import make_plan
    from trinity.config.schema import Config
    from trinity.trainer.engine import TrainEngine
    from trinity.trainer.process.ranks import ranks_from_environment
    from trinity.weights import delta as deltas
    from trinity.weights.manifest import Delta, FolderOffer

    root = Path(args.folder)
    config = json.loads(json.dumps(BASE))
    config["checkpoint_root_dir"] = args.folder
    config["model"] = {"model_path": f"{args.folder}/model", "max_model_len": args.length, "max_prompt_tokens": 1}
    config["algorithm"] |= {"optimizer": {"lr": LEARNING_RATE}, "kl_loss_fn": "none"}
    config["trainer"] = {"deepspeed": {"zero_stage": 2, "dtype": "bfloat16"}, "max_token_len_per_gpu": 4 * args.length}
    engine = TrainEngine(make_plan(Config.model_validate(config)), ranks_from_environment(1), args.device)
    base = publish(engine, root, 0)
    found = {"step": seconds_of(lambda: engine.train(make_batch([args.length] * 4, args.vocabulary, 1), 1000))}
    begin = time.perf_counter()
    manifest = publish(engine, root, 1)
    found["publish"] = time.perf_counter() - begin
    engine.close()
    (root / "delta").mkdir()
    begin = time.perf_counter()
    infos = deltas.encode(root / "v0", base, root / "v1", manifest, root / "delta")
    found |= {"encode": time.perf_counter() - begin, "bytes": manifest.size_bytes}
    found["delta"] = sum(info.size_bytes for info in infos)
    manifest = replace(manifest, delta=Delta(0, infos), offers=(FolderOffer(str(root / "v1")),))
    for number, version in enumerate((base, manifest)):
        save(root, number, version)
    return found | {"changed": changed_share(root, manifest)}


def publish(engine: Any, root: Path, version: int) -> "Manifest":
    """Writes and hashes a version, and offers it in place, like the trainer's publisher."""
    from trinity.trainer.weights.shards import write_shards
    from trinity.weights.manifest import FolderOffer, Manifest

    folder = root / f"v{version}"
    tensors, infos = write_shards(engine.weights.read(), engine.weights.layout(), folder, "part-{:05d}.safetensors")
    return Manifest("bench", version, version, tuple(tensors), tuple(infos), (FolderOffer(str(folder)),), time.time())


def save(root: Path, version: int, manifest: "Manifest") -> None:
    from trinity.weights.wire import manifest_to_proto

    (root / f"manifest{version}").write_bytes(manifest_to_proto(manifest).SerializeToString())


def load(root: Path, version: int) -> "Manifest":
    from trinity.weights.wire import decode_manifest

    return decode_manifest((root / f"manifest{version}").read_bytes())


def changed_share(root: Path, manifest: "Manifest") -> float:
    """Share of the elements whose bits the step changed."""
    import torch

    from trinity.trainer.weights.shards import read_version

    changed = total = 0
    pairs = zip(read_version(manifest, root / "v0"), read_version(manifest, root / "v1"), strict=True)
    for (_, old), (_, new) in pairs:
        changed += int((old.view(torch.int16) != new.view(torch.int16)).sum())
        total += old.numel()
    return changed / total


async def fetch_and_load(args: argparse.Namespace) -> Found:
    """The explorer's side of version 1: each way to get its files, then the engine's pauses with requests running."""
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions
    from trinity.weights import delta as deltas
    from trinity.weights.stores import open_store
    from trinity.weights.stores.cache import WeightCache

    root = Path(args.folder)
    base, manifest = load(root, 0), load(root, 1)
    elsewhere = open_store(str(root / "store"), "bench", folder=root, nats_url="")
    copied = replace(manifest, delta=None, offers=(elsewhere.put(manifest, root / "v1", False),))
    elsewhere.seal(copied)
    in_place, cache = (WeightCache(root / name, "bench", ["folder"], "") for name in ("seen", "cache"))
    (root / "applied").mkdir()
    found = {
        "in place": seconds_of(lambda: in_place.fetch(manifest)),
        "fetch": seconds_of(lambda: cache.fetch(copied)),
        "apply": seconds_of(lambda: deltas.apply(root / "v0", base, root / "delta", manifest, root / "applied")),
    }
    files, tensors = manifest.load_arguments(root / "applied")
    update = {"files": files, "tensors": [list(tensor) for tensor in tensors]}
    memory = {} if args.cpu else {"gpu_memory_utilization": 0.6}
    engine = await Engine.start(
        EngineOptions(f"{root}/model", args.device, _PROMPT + _RESPONSE + 1, dtype="bfloat16", **memory)
    )
    try:
        pauses = await pauses_of(engine, update, args.updates)
    finally:
        engine.close()
    return found | {"first": pauses[0], "pause": statistics.median(pauses[1:])}


async def pauses_of(engine: Any, update: dict[str, Any], updates: int) -> list[float]:
    """Seconds, the first one included, which allocates."""
    from trinity.data.experience import SamplingParams

    sampling = SamplingParams(max_tokens=_RESPONSE, ignore_eos=True)

    async def requests(index: int) -> None:
        while True:
            await engine.generate([1 + index, *range(2, _PROMPT)], sampling)

    running = [asyncio.create_task(requests(index)) for index in range(_REQUESTS)]
    done, _ = await asyncio.wait(running, timeout=2)
    for request in done:  # they end only by failing
        request.result()
    pauses = []
    for serial in range(1, updates + 1):
        pauses.append(await asyncio.wait_for(engine.load(serial, update), PROCESS_SECONDS))
        await asyncio.sleep(0.3)
    for request in running:
        request.cancel()
    await asyncio.gather(*running, return_exceptions=True)
    return pauses


def show(args: argparse.Namespace, found: Found) -> None:
    from buffer_table import Table, at_most

    size = found["bytes"]
    table = Table(
        f"one step at lr {LEARNING_RATE:g}, from trainer to engine by a folder, {size / 1e9:.3g} GB in bf16",
        ("", "seconds", "MB", "MB/s", "limit", "ratio"),
        [
            f"the step changed {found['changed']:.2%} of the elements; it took {found['step']:.2f} s, the first of all",
            f"pause: median of {args.updates - 1} with {_REQUESTS} requests running, after a first of "
            f"{found['first']:.3f} s",
        ],
    )
    rows: list[tuple[str, str, float, str, str]] = [
        ("pause", "pause", size, f"<= {at_most(found['pause'], MOST_PAUSE)} s", f"{found['pause'] / MOST_PAUSE:.2f}"),
        ("outside: publish (write and hash)", "publish", size, "", ""),
        ("outside: checked in place", "in place", size, "of a copy fetched",
         f"{found['in place'] / found['fetch']:.2f}"),
        ("outside: fetched as a copy", "fetch", size, "", "1.00"),
        ("difference: encode", "encode", found["delta"], "of the whole bytes", f"{found['delta'] / size:.4f}"),
        ("difference: apply to the base", "apply", found["delta"], "of a copy fetched",
         f"{found['apply'] / found['fetch']:.2f}"),
    ]  # fmt: skip
    for name, key, moved, limit, ratio in rows:
        rate = f"{size / 1e6 / found[key]:,.0f}"
        table.rows.append((name, f"{found[key]:.3f}", f"{moved / 1e6:,.1f}", rate, limit, ratio))
    table.notes.append("MB/s: of the whole version")
    table.show()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {**SHAPE, "length": 2048, "updates": 6}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--cpu", action="store_true", help="trainer and engine on the CPU")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    parser.add_argument("--process", choices=PROCESSES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.device = "cpu" if args.cpu else "cuda"
    if args.tiny:
        vars(args).update(TINY, length=64, updates=2)
    if args.process:
        found = train_and_publish(args) if args.process == "trainer" else asyncio.run(fetch_and_load(args))
        print(f"\n{FOUND}{json.dumps(found)}", flush=True)
        return
    with tempfile.TemporaryDirectory(prefix="sync-object-", dir=os.environ.get("TMPDIR")) as folder:
        import torch
        from rollout import make_model

        make_model(Path(folder) / "model", args)
        torch.cuda.empty_cache()
        parts = (found_by(part, "--folder", folder, limit_seconds=PROCESS_SECONDS) for part in ("trainer", "explorer"))
        show(args, {name: value for part in parts for name, value in part.items()})


if __name__ == "__main__":
    main()
