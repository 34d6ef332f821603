"""OpenTelemetry: one trace from the task to the gradient step.

The context travels in message headers and gRPC metadata as W3C `traceparent`. Spans are exported by OTLP when the
standard OTEL_ variables name an endpoint, and cost next to nothing otherwise.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def configure(service: str, run: str) -> None:
    """Export spans of this process if an OTLP endpoint is set. OTEL_SDK_DISABLED and the samplers are respected."""
    if not any(os.environ.get(name) for name in _ENDPOINTS):
        return
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    resource = Resource.create({"service.name": f"trinity-{service}", "trinity.run": run})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)


def shutdown() -> None:
    """Sends the buffered spans."""
    provider = trace.get_tracer_provider()
    if isinstance(provider, TracerProvider):
        provider.shutdown()


def _collected() -> bool:
    return isinstance(trace.get_tracer_provider(), TracerProvider)


def inject(headers: dict[str, str] | None = None) -> dict[str, str]:
    """Headers with the current trace context added."""
    headers = headers if headers is not None else {}
    propagate.inject(headers)
    return headers


def extract(headers: Mapping[str, str]) -> Context:
    """The context a sender put in its headers; empty without a collector."""
    return Context() if not _collected() else propagate.extract({key.lower(): value for key, value in headers.items()})


@contextmanager
def within(seen: Context) -> Iterator[None]:
    """Log lines belong to the span that was the current one in this context."""
    token = context.attach(seen)
    try:
        yield
    finally:
        context.detach(token)


@contextmanager
def span(
    name: str, parent: Context | None = None, links: list[Link] | None = None, **attributes: Any
) -> Iterator[Span]:
    """A span as the current one; an exception inside is recorded on it. Costs almost nothing without a collector."""
    if not _collected():
        yield trace.INVALID_SPAN
        return
    tracer = trace.get_tracer("trinity")
    with tracer.start_as_current_span(name, context=parent, links=links, attributes=attributes) as current:
        yield current
