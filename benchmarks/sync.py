"""Cost of a weight update: an engine's pause, the bytes of a difference, publish and fetch on a folder.

    python benchmarks/sync.py [tls] [--tiny] [--hidden 896 --layers 24 ...] [--runs 5]

With `tls`, only the pause is measured, with the explorer's calls to sync over mTLS and without.

Otherwise one table, with the ratio in its last column. By default a random Qwen2 of 0.5 B parameters in float32, on the
CPU. The pause is the time from pause to resume of the explorer's engine with requests running, against a load of the
same files by the idle engine. sync_storage.py has the other two figures in detail.
"""

import argparse
import asyncio
import contextlib
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import structlog
from buffer_table import Table, at_least, at_most
from rollout import make_model
from sync_storage import LEAST_OF_COPY, MOST_OF_BYTES, delta_bytes, own_folder_times, two_versions, weights

MOST_OF_BARE = 1.3
MOST_OF_PLAIN = 1.03
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
    paused, bare = [], []
    async with _engine(folder) as (engine, update):
        for run in range(runs):
            bare.append(await _bare_load(engine, update))
            paused.append(await _pause(engine, update, run + 1))
    return paused, bare


@contextlib.asynccontextmanager
async def _engine(folder: Path) -> AsyncIterator[tuple[Any, dict[str, Any]]]:
    """The explorer's engine, and the arguments by which it loads the same weights again."""
    from trinity.explorer.engine.engine import Engine
    from trinity.explorer.types import EngineOptions
    from trinity.weights.manifest import manifest_of_folder

    files, tensors = manifest_of_folder("bench", 1, folder, checksums=False).load_arguments(folder)
    update = {"files": files, "tensors": [list(tensor) for tensor in tensors]}
    options = EngineOptions(str(folder), "cpu", _PROMPT + _RESPONSE + 1, max_num_seqs=_REQUESTS)
    engine = await Engine.start(options)
    try:
        await _bare_load(engine, update)  # the first round compiles and allocates
        yield engine, update
    finally:
        engine.close()


async def _pause(engine: Any, update: dict[str, Any], version: int) -> float:
    requests = [asyncio.create_task(_request(engine)) for _ in range(_REQUESTS)]
    done, _ = await asyncio.wait(requests, timeout=_BUSY_SECONDS)
    for request in done:  # they end only by failing
        request.result()
    seconds = await engine.load(version, update)
    for request in requests:
        request.cancel()
    await asyncio.gather(*requests, return_exceptions=True)
    return cast(float, seconds)


async def cost_of_tls(args: argparse.Namespace, folder: Path) -> Table:
    """The pause of an engine in the process of a run's member, with and without mTLS, in turns.

    The member watches, and reports every 0.4 s.
    """
    from support.fakes.explorers.sync_member import FakeMember
    from support.servers.certificates import identity_of, make_certificates, tls_settings
    from support.servers.nats import NatsServer
    from support.servers.service import ServiceProcess
    from trinity.runtime.trust import identity

    make_model(folder / "model", args)
    certificates = make_certificates(folder / "identity")
    nats = NatsServer(folder / "nats")
    own = {False: None, True: identity_of(certificates, "explorer")}
    services: dict[bool, ServiceProcess] = {}
    for secure in own:
        tls = tls_settings(certificates, "sync") if secure else {}
        place = folder / f"sync-{secure}"
        place.mkdir()
        services[secure] = ServiceProcess("sync", place, NATS_URL=nats.url, LEASE_SECONDS="2", **tls)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    nats.start()
    try:
        for service in services.values():
            service.start()
        async with _engine(folder / "model") as (engine, update):
            for run in range(args.runs):
                for secure in (False, True) if run % 2 == 0 else (True, False):
                    identity.configure(own[secure])
                    async with FakeMember(services[secure].address, f"bench-{secure}", "explorer"):
                        seconds[secure].append(await _pause(engine, update, 2 * run + secure + 1))
    finally:
        for service in services.values():
            service.kill()
        nats.kill()
    ratios = [secure / plain for plain, secure in zip(seconds[False], seconds[True], strict=True)]
    ratio = statistics.median(ratios)
    medians = (f"{statistics.median(seconds[secure]):.3f}" for secure in (False, True))
    table = Table(
        f"pause, with mTLS and without: medians of {args.runs} pairs of rounds",
        ("plain s", "mTLS s", "ratio", "limit", "ratios of the pairs"), [],
    )  # fmt: skip
    table.rows.append((*medians, f"{ratio:.3f}", at_most(ratio, MOST_OF_PLAIN), ", ".join(f"{r:.2f}" for r in ratios)))
    return table


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
    parser.add_argument("part", nargs="?", choices=["tls"], help="the cost of mTLS alone")
    parser.add_argument("--tiny", action="store_true", help="seconds of work: shows that it runs, measures nothing")
    args = parser.parse_args()
    args.device = "cpu"
    if args.tiny:
        vars(args).update(TINY)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    if args.part == "tls":
        with tempfile.TemporaryDirectory() as name:
            asyncio.run(cost_of_tls(args, Path(name))).show()
        return
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
