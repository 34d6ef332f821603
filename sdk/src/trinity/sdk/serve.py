"""A provider as a gRPC server, which runs name by address."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any

import grpc.aio

from trinity.sdk.arena import Arena
from trinity.sdk.environment import EnvironmentClass
from trinity.sdk.scoring import Scorer
from trinity.sdk.servicer import SERVER_OPTIONS, ProviderServicer

log = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def serving(
    *environments: EnvironmentClass,
    address: str = "127.0.0.1:0",
    scorers: Mapping[str, Scorer] | None = None,
    grace_seconds: float = 5.0,
) -> AsyncIterator[str]:
    """Serves inside the `async with`; yields the address with its port. Raises OSError if it cannot listen there."""
    arena = Arena(environments, scorers)
    server = grpc.aio.server(options=SERVER_OPTIONS)
    ProviderServicer(arena).register(server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:  # gRPC's own sentence asks for a variable to learn more
        what = "cannot be listened on: it is another process's, or no address of this machine; choose another port"
        raise OSError(f"address {address!r} {what}") from error
    await server.start()
    try:
        yield f"{address.rpartition(':')[0]}:{port}"
    finally:
        await arena.drain(grace_seconds)
        await server.stop(grace=0)


async def serve_async(
    *environments: EnvironmentClass, address: str = "127.0.0.1:7010", scorers: Mapping[str, Scorer] | None = None
) -> None:
    """Serves until cancelled."""
    async with serving(*environments, address=address, scorers=scorers) as listening:
        print(f"serving at {listening}", flush=True)
        await asyncio.Event().wait()


def serve(
    *environments: EnvironmentClass, address: str = "127.0.0.1:7010", scorers: Mapping[str, Scorer] | None = None
) -> None:
    """Serves until SIGTERM or Ctrl-C; open episodes then get five seconds to end."""
    asyncio.run(until_signal(serve_async(*environments, address=address, scorers=scorers)))


async def until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Runs the coroutine until SIGTERM or SIGINT cancels it, and waits for its end."""
    task = asyncio.ensure_future(work)
    for signum in (signal.SIGTERM, signal.SIGINT):
        with contextlib.suppress(
            NotImplementedError, RuntimeError, ValueError
        ):  # not in this thread, not on this system
            asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
