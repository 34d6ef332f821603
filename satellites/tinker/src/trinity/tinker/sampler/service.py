"""Wiring of the explorer that samples by tenants' adapters."""

import asyncio
from contextlib import closing

import grpc.aio
import torch

from trinity.explorer.engine.engine import Engine, start_engines
from trinity.explorer.engine.versions import Versions
from trinity.explorer.types import EngineFailed, EngineOptions
from trinity.runtime import process, waits
from trinity.runtime.devices import choose
from trinity.runtime.errors import InvalidInput
from trinity.tinker.commands import account
from trinity.tinker.sampler.seconds import Seconds
from trinity.tinker.sampler.servicer import SamplerServicer
from trinity.tinker.sampler.settings import SamplerSettings
from trinity.tinker.saved_adapters import FOLDER, saved_in

_HEALTH_SECONDS = 5.0
_MEMORY_KEY = "sampler_gpu_gib"  # of the YAML of `trinity tinker`


class SamplerService:
    name = "sampler"

    def __init__(self, settings: SamplerSettings) -> None:
        self._settings = settings
        self.run_id = settings.run
        self._servicer = SamplerServicer()

    def register(self, server: grpc.aio.Server) -> list[str]:
        return [self._servicer.add_to(server)]

    async def work(self, ready: asyncio.Event, address: str) -> None:
        settings = self._settings
        process.guard_group()  # vLLM's process would survive a kill of this one
        waits.phase("loads vLLM and the model")
        try:
            (engine,) = await start_engines(self._options(), [settings.devices or None])
        except InvalidInput as error:
            problem = f"is {settings.most_adapters}, and vLLM refuses: {error}; with 0 tenants train and do not sample"
            raise InvalidInput("sampled_adapters", problem) from error
        except EngineFailed as error:  # vLLM's own text names options that the YAML does not have
            raise EngineFailed(f"{error}; {_MEMORY_KEY} is the explorer's memory, sampler_devices its GPUs") from error
        with closing(engine):
            versions = Versions(engine, saved_in(settings.folder / FOLDER), settings.most_adapters)
            path = account.path_of(settings.folder, self.name)
            used = account.read(path)
            self._servicer.serve(versions, Seconds(used))
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(account.keep(used, path))
                ready.set()
                tasks.create_task(self._watch(engine))

    async def _watch(self, engine: Engine) -> None:
        while True:
            await asyncio.sleep(_HEALTH_SECONDS)
            await engine.check()

    def _options(self) -> EngineOptions:
        settings = self._settings
        return EngineOptions(
            settings.model_path,
            choose(settings.device, "TRINITY_SAMPLER_DEVICE", torch.cuda.is_available()),
            settings.longest,
            settings.dtype,
            gpu_memory_gib=settings.gpu_memory_gib,
            memory_key=_MEMORY_KEY,
            adapters=settings.most_adapters,
            adapter_rank=settings.most_rank,
            rates_whole=True,
            engine_args={"scheduling_policy": "priority"},
        )

    async def drain(self, grace_seconds: float) -> None:
        pass  # the gateway repeats a request that is cut off
