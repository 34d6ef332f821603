"""Prometheus metrics. Names: trinity_<service>_<noun>_<unit or total>; every process serves them on /metrics."""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from prometheus_client import (
    REGISTRY,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    make_wsgi_app,
    start_http_server,
)
from prometheus_client.metrics_core import Metric

from trinity.runtime.trust.keys import KeyFile

__all__ = ["Counter", "Gauge", "Histogram", "sample", "serve", "show"]

_SAMPLE_SECONDS = 5.0
_ODD_VERSION = re.compile(r"version\s*=(?!\s*[0-9]{1,9}(\.[0-9]{1,9})*\s*([;,]|$))", re.IGNORECASE)

RPC_SECONDS = Histogram(
    "trinity_rpc_seconds",
    "Duration of RPCs served, in seconds",
    ["method", "code"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 600),
)

_App = Callable[[dict[str, Any], Any], Iterable[bytes]]


def serve(host: str, port: int, token_file: Path | None = None, run: str = "") -> int:
    """Serve /metrics; port 0 takes a free one. Returns the port. `run` becomes a label of every sample without it.

    With `token_file` a request must carry a token of that file (`Authorization: Bearer`), else it gets a 401. Raises
    InvalidInput if the file has none.
    """
    keys = KeyFile(token_file, "metrics_token_file") if token_file is not None else None
    logging.getLogger("prometheus_client").setLevel(logging.WARNING)
    server, _ = start_http_server(port, addr=host, registry=CollectorRegistry())  # empty until the check is in front
    app = _in_known_format(make_wsgi_app(_OfRun(run)))
    server.set_app(_checked(app, keys) if keys is not None else app)
    return int(server.server_port)


def _in_known_format(app: _App) -> _App:
    """In the plain format where the Accept header has a version that is no number: prometheus_client raises for it."""

    def answered(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        odd = _ODD_VERSION.search(environ.get("HTTP_ACCEPT", ""))
        return app({**environ, "HTTP_ACCEPT": ""} if odd else environ, start_response)

    return answered


def _checked(app: _App, keys: KeyFile) -> _App:
    def checked(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if keys.allows(environ.get("HTTP_AUTHORIZATION", "")):
            return app(environ, start_response)
        start_response("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"/metrics asks for a token: send it as `Authorization: Bearer <token>`\n"]

    return checked


class _OfRun(CollectorRegistry):
    """The metrics of this process, which serves one run; with an empty `run` the service names runs itself."""

    def __init__(self, run: str) -> None:
        super().__init__()
        self._run = run

    def collect(self) -> Iterator[Metric]:
        for metric in REGISTRY.collect():
            if self._run:
                metric.samples = [one._replace(labels={"run": self._run, **one.labels}) for one in metric.samples]
            yield metric


async def sample(measure: Callable[[], Awaitable[None]]) -> NoReturn:
    """Calls `measure` every five seconds, for ever, in the event loop that owns the measured state."""
    while True:
        await measure()
        await asyncio.sleep(_SAMPLE_SECONDS)


def show(gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
    """Set a gauge by its labels' values, and remove the samples that are not among them."""
    for labels, value in values.items():
        gauge.labels(*labels).set(value)
    for metric in gauge.collect():
        for one in metric.samples:
            if (labels := tuple(one.labels.values())) not in values:
                gauge.remove(*labels)
