"""The main of every service process.

It serves NOT_SERVING until the service is ready, SERVING from then on, NOT_SERVING again before it drains on SIGTERM or
SIGINT, and exits 0 after a drain. A service that fails ends the process with what it raised. One whose work returns is
finished: the announce file says so, for a supervisor that is not to start it again.
"""

import asyncio
import contextlib
import os
import time
import traceback
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, NoReturn, Protocol

import grpc.aio
import structlog
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from trinity.runtime import broker, files, log_stream, logs, metrics, process, rpc, tracing
from trinity.runtime.errors import (
    EXIT_FOR_GOOD,
    EXIT_UNEXPECTED,
    UNEXPECTED,
    InvalidInput,
    TrinityError,
    Unavailable,
)
from trinity.runtime.settings import NatsSettings, ServiceSettings, is_loopback, reached_at, split_address
from trinity.runtime.trust import identity as trust
from trinity.runtime.trust import revoked
from trinity.runtime.trust.gate import Gate
from trinity.runtime.trust.identity import Identity
from trinity.runtime.trust.roles import Role
from trinity.runtime.trust.tls import TlsFiles, TlsIdentity, server_credentials
from trinity.runtime.trust.tokens import KnownTokens

log = structlog.get_logger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Service(Protocol):
    """The interface of a service: its name, its servicers, its work, its drain."""

    name: str
    run_id: str

    def register(self, server: grpc.aio.Server) -> list[str]:
        """Add the servicers; returns the full gRPC service names."""

    async def work(self, ready: asyncio.Event, address: str) -> None:
        """Do the work for ever; set `ready` once requests can be served. Ending by itself means: finished."""

    async def drain(self, grace_seconds: float) -> None:
        """Stop taking work and finish or hand back what runs, within the grace."""


def main(service: Service, settings: ServiceSettings) -> NoReturn:
    """Run the service until SIGTERM, and end the process. Exit code 0 when the work is finished, and after a drain
    unless the settings say another; 1 after a failure, which is logged; EXIT_FOR_GOOD if a restart would
    not mend it, EXIT_UNEXPECTED if a restart may not mend it."""
    if settings.stop_with_parent:
        process.die_with_parent()
    process.allow_many_files()
    logs.configure(service.name, level=settings.log_level, file=settings.log_file, mib=settings.log_mib)
    tracing.configure(service.name, service.run_id)
    code = 0
    try:
        if isinstance(settings, NatsSettings):
            broker.configure(settings.nats_creds, settings.nats_ca)
            log_stream.start(settings, service.name, service.run_id, getattr(service, "explorer_id", service.name))
        trust.configure(identity_of(service.name, settings))
        finished = asyncio.run(_serve(service, settings))
        code = 0 if finished else settings.exit_code_when_stopped
    except (Exception, SystemExit) as error:  # plugins and what they import may exit
        reason = _first_cause(error)
        if isinstance(reason, (TrinityError, ValueError)):
            log.error("service.failed", reason=str(reason))
        else:
            log.exception("service.failed", reason=f"{type(reason).__name__}: {reason}")
        code = _exit_code(reason, getattr(settings, "plugin_dirs", ""))
    finally:
        tracing.shutdown()
        log_stream.stop()
    process.end(code)


def _exit_code(reason: BaseException, plugin_dirs: str) -> int:
    """Returns the exit code. Only a plugin's OSErrors may vanish at a restart: torch raises RuntimeError for shapes."""
    if isinstance(reason, TrinityError):
        return EXIT_FOR_GOOD if reason.for_good else 1
    of_plugin = not isinstance(reason, OSError) and _passes(reason, plugin_dirs)
    return EXIT_UNEXPECTED if of_plugin or isinstance(reason, UNEXPECTED) else 1


def _passes(reason: BaseException, folders: str) -> bool:
    """Returns True if a file in these folders is in the error's traceback."""
    places = [Path(folder).expanduser().resolve() for folder in folders.split(os.pathsep) if folder]
    files_passed = {Path(frame.filename) for frame in traceback.extract_tb(reason.__traceback__)}
    return any(file.is_relative_to(place) for file in files_passed for place in places)


def _first_cause(error: BaseException) -> BaseException:
    """The first cause inside the exception groups that task groups raise."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def _serve(service: Service, settings: ServiceSettings) -> bool:
    """Returns True if the work finished, False if it was stopped."""
    host, _ = split_address(settings.listen, "listen")
    server = grpc.aio.server(interceptors=[rpc.Edge(_gate(settings, host))], options=rpc.SERVER_OPTIONS)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    names = [*service.register(server), health.SERVICE_NAME]
    if settings.reflection:
        names.append(reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
    await _set_health(checks, names, _NOT_SERVING)

    own = trust.own()
    if own is not None and own.tls is not None:
        port = server.add_secure_port(settings.listen, server_credentials(own.tls))
    else:
        port = server.add_insecure_port(settings.listen)
    address = reached_at(settings, port)
    metrics_host, metrics_port = split_address(settings.metrics_listen, "metrics_listen")
    try:
        metrics_port = metrics.serve(metrics_host, metrics_port, settings.metrics_token_file, service.run_id)
    except OSError as error:
        raise Unavailable(
            f"metrics_listen: {settings.metrics_listen} cannot be listened on: {error.strerror}"
        ) from None
    await server.start()
    log.info("service.started", pid=os.getpid(), address=address, metrics=f"{metrics_host}:{metrics_port}")
    about = {"pid": os.getpid(), "address": address, "metrics": f"{metrics_host}:{metrics_port}"}
    if settings.announce_file:
        files.write_json(settings.announce_file, about)

    stop = asyncio.Event()
    for signum in process.ending_signals():
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    ready = asyncio.Event()
    work = asyncio.create_task(service.work(ready, address), name="work")
    try:
        await _first_of(ready.wait(), stop.wait(), work)
        if ready.is_set() and not work.done():
            await _set_health(checks, names, _SERVING)
            log.info("service.ready")
            await _first_of(stop.wait(), work)
        await _set_health(checks, names, _NOT_SERVING)
        if not work.done():
            log.info("service.draining", seconds=settings.drain_seconds)
            begin = time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(service.drain(settings.drain_seconds), settings.drain_seconds + 1)
            log.info("service.drained", seconds=round(time.monotonic() - begin, 3))
    finally:
        work.cancel()
        await asyncio.wait([work], timeout=2)
        await server.stop(grace=1.0)
        await cancelled_handlers_end()
    if work.done() and not work.cancelled():
        work.result()
    finished = not stop.is_set()
    if settings.announce_file and finished:
        files.write_json(settings.announce_file, {**about, "finished": True})
    log.info("service.stopped")
    return finished


def identity_of(name: str, settings: ServiceSettings) -> Identity | None:
    """The service's identity, by its certificate or its token. Raises InvalidInput for unusable files."""
    role = settings.role or name
    prefix = str(settings.model_config.get("env_prefix", ""))
    tls = TlsFiles.of(settings.tls_cert, settings.tls_key, settings.tls_ca, prefix)
    if tls is not None:
        own = trust.of_certificate(TlsIdentity(tls))
        if own.role != role:
            raise InvalidInput(f"{prefix}TLS_CERT", f"{tls.cert} is for the role {own.role}, must be for {role}")
        return own
    if settings.identity_folder is None:
        return None
    own = Identity(Role(role), settings.identity_folder, insecure=settings.insecure)
    if not own.metadata():
        problem = f"{settings.identity_folder} has no tokens/{role} that this user may read; `trinity run` makes it"
        raise InvalidInput(f"{prefix}IDENTITY_FOLDER", problem)
    return own


def _gate(settings: ServiceSettings, host: str) -> Gate | None:
    """The check of callers; None on the loopback, or where the settings allow calls without an identity."""
    local = is_loopback(host)
    prefix = str(settings.model_config.get("env_prefix", ""))
    if settings.tls_ca is not None:  # only certificates
        path = settings.tls_revoked or settings.tls_ca.with_name(revoked.FILE)
        must_exist = settings.tls_revoked is not None
        return Gate(None, revoked.RevokedList(path, f"{prefix}TLS_REVOKED", must_exist=must_exist))
    if settings.tls_revoked is not None:
        problem = f"is {settings.tls_revoked}, but the service has no certificate; set {prefix}TLS_CERT, _KEY and _CA"
        raise InvalidInput(f"{prefix}TLS_REVOKED", problem)
    if settings.identity_folder is not None:
        if not local:
            log.warning("service.tokens_unencrypted", listen=settings.listen, reason="tokens cross the network as text")
        return Gate(KnownTokens(settings.identity_folder))
    if not local and not settings.insecure:
        raise InvalidInput(
            "listen",
            f"is {settings.listen}, which other machines reach, and this service demands no identity of its callers; "
            "set tls_cert, tls_key and tls_ca, or insecure=1 to let every caller do everything",
        )
    log.warning("service.open", listen=settings.listen, reason="no identity is demanded: each caller may do everything")
    return None


async def _set_health(checks: Any, names: list[str], status: int) -> None:
    for name in ["", *names]:
        await checks.set(name, status)


async def cancelled_handlers_end() -> None:
    """Waits until the handlers have ended that the server cancelled.

    gRPC prints a traceback of each that is still ending when asyncio.run cancels what is left.
    """
    handlers = [task for task in asyncio.all_tasks() if task.get_name().startswith("HandleExceptions[")]
    if handlers:
        await asyncio.wait(handlers, timeout=1.0)


async def _first_of(*waits: "Coroutine[Any, Any, Any] | asyncio.Task[Any]") -> None:
    """Wait until one is done; cancel the others unless they are tasks of the caller's."""
    tasks = {wait: asyncio.ensure_future(wait) for wait in waits}
    try:
        await asyncio.wait(tasks.values(), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait, task in tasks.items():
            if wait is not task:
                task.cancel()
