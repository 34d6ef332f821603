"""What an update of the weights costs: an engine's pause, the bytes of a difference, publish and fetch on a folder.

    python benchmarks/sync.py [--tiny] [--hidden 896 --layers 24 ...] [--runs 5]

One table, the ratio in its last column. By default a random Qwen2 of 0.5 B parameters in float32, on the CPU. The pause
is that of the explorer's own engine with requests running, from pause to resume; against the same engine's load of the
same files while it has nothing to do. The other two, in more detail: sync_storage.py.
"""

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import structlog
from buffer_table import Table, at_least, at_most
from rollout import make_model
from sync_storage import LEAST_OF_COPY, MOST_OF_BYTES, delta_bytes, own_folder_times, two_versions, weights

MOST_OF_BARE = 1.3
CHANGED = 0.01
FULL = {"hidden": 896, "layers": 24, "intermediate": 4864, "heads": 14, "kv_heads": 2, "vocabulary": 76_000, "runs": 5}
TINY = {"hidden": 128, "layers": 2, "intermediate": 256, "heads": 4, "kv_heads": 2, "vocabulary": 512, "runs": 1}
_REQUESTS, _BUSY_SECONDS = 8, 2.0
_PROMPT, _RESPONSE = 32, 400


def pauses(args: argparse.Namespace, folder: Path) -> tuple[list[float], list[float]]:
    """Seconds: (pauses with requests running, bare loads of the idle engine), in turns."""
    make_model(folder, args)
    return asyncio.run(_pauses(folder, args.runs))


async def _pauses(folder: Path, runs: int) -> tuple[list[float], list[float]]:
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions
    from trinity.weights import manifest_of_folder

    files, tensors = manifest_of_folder("bench", 1, folder, checksums=False).load_arguments(folder)
    update = {"files": files, "tensors": [list(tensor) for tensor in tensors]}
    options = EngineOptions(str(folder), "cpu", _PROMPT + _RESPONSE + 1, max_num_seqs=_REQUESTS)
    engine = await Engine.start(options)
    paused, bare = [], []
    try:
        await _bare_load(engine, update)  # the first one compiles and allocates
        for run in range(runs):
            bare.append(await _bare_load(engine, update))
            requests = [asyncio.create_task(_request(engine)) for _ in range(_REQUESTS)]
            done, _ = await asyncio.wait(requests, timeout=_BUSY_SECONDS)
            for request in done:  # they end by failing alone
                request.result()
            paused.append(await engine.load(run + 1, update))
            for request in requests:
                request.cancel()
            await asyncio.gather(*requests, return_exceptions=True)
    finally:
        engine.close()
    return paused, bare


async def _request(engine: Any) -> None:
    from trinity.data.experience import SamplingParams

    while True:
        await engine.generate(list(range(_PROMPT)), SamplingParams(max_tokens=_RESPONSE, ignore_eos=True))


async def _bare_load(engine: Any, update: dict[str, Any]) -> float:
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    begin = time.perf_counter()
    await engine.llm.start_weight_update()
    await engine.llm.update_weights(WeightTransferUpdateRequest(update_info=update))
    await engine.llm.finish_weight_update()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in FULL.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    args.device = "cpu"
    if args.tiny:
        vars(args).update(TINY)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paused, bare = pauses(args, folder / "model")
        size = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        parameters = size // 4
        _, changed = two_versions(folder / "delta", weights(parameters, "BF16"), CHANGED, "BF16")
    version_bytes, times = own_folder_times(parameters, args.runs)
    publish, fetch, copy = (statistics.median(times[what]) for what in ("publish", "fetch", "copy"))
    of_copy = statistics.median(c / (p + f) for p, f, c in zip(*times.values(), strict=True))
    table = Table(
        f"an update of {parameters / 1e6:,.0f} M parameters", ("", "ours", "compared with", "limit", "ratio"),
        [f"medians of {args.runs}; the engine in float32, what is stored in bf16, {version_bytes / 1e6:,.0f} MB"],
    )  # fmt: skip
    part, whole = delta_bytes(changed), changed.size_bytes
    pause, load = statistics.median(paused), statistics.median(bare)
    rows = (
        ("pause, requests running", f"{pause:.3f} s", f"bare load {load:.3f} s", pause / load, MOST_OF_BARE, at_most),
        (f"difference, {CHANGED:.0%} changed", f"{part / 1e6:,.1f} MB", f"whole version {whole / 1e6:,.0f} MB",
         part / whole, MOST_OF_BYTES[CHANGED], at_most),
        ("publish + fetch, folder", f"{publish + fetch:.2f} s", f"plain copy {copy:.2f} s", of_copy,
         LEAST_OF_COPY, at_least),
    )  # fmt: skip
    for what, ours, against, ratio, limit, judge in rows:
        sign = "<=" if judge is at_most else ">="
        table.rows.append((what, ours, against, f"{sign} {judge(ratio, limit)}", f"{ratio:.3f}"))
    table.show()


if __name__ == "__main__":
    main()
