"""Prometheus metrics. Names: trinity_<service>_<noun>_<unit or total>; every process serves them on /metrics."""

import logging

from prometheus_client import Counter, Gauge, Histogram, start_http_server

__all__ = ["Counter", "Gauge", "Histogram", "serve"]

RPC_SECONDS = Histogram(
    "trinity_rpc_seconds",
    "Duration of RPCs served, in seconds",
    ["method", "code"],
    buckets=(0.001, 0.005, 0.02, 0.1, 0.5, 2, 10, 60, 600),
)


def serve(host: str, port: int) -> int:
    """Serve /metrics; port 0 takes a free one. Returns the port."""
    logging.getLogger("prometheus_client").setLevel(logging.WARNING)
    server, _ = start_http_server(port, addr=host)
    return int(server.server_port)
