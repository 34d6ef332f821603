"""A collector of OpenTelemetry spans inside a test: the OTLP gRPC endpoint a run exports to."""

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class SeenSpan:
    name: str
    service: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    links: tuple[bytes, ...] = ()


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """start -> environment() for the run -> traces()."""

    spans: list[SeenSpan] = field(default_factory=list)
    _server: grpc.Server | None = None
    _port: int = 0

    def start(self) -> "Collector":
        self._server = grpc.server(ThreadPoolExecutor(2))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)
        self._port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        return self

    def stop(self) -> None:
        if self._server is not None:
            self._server.stop(grace=1).wait(5)

    def environment(self) -> dict[str, str]:
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._port}", "OTEL_EXPORTER_OTLP_INSECURE": "true"}

    def Export(self, request, context):  # type: ignore[no-untyped-def]
        for resource in request.resource_spans:
            service = next(a.value.string_value for a in resource.resource.attributes if a.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    links = tuple(link.span_id for link in span.links)
                    self.spans.append(
                        SeenSpan(span.name, service, span.trace_id, span.span_id, span.parent_span_id, links)
                    )
        return trace_service_pb2.ExportTraceServiceResponse()

    def trained_traces(self) -> list[list[SeenSpan]]:
        """The traces that lead from a task to the gradient step that learnt from it, through every service."""
        steps = {span.span_id for span in self.spans if span.name == "trainer.step"}
        return [spans for spans in self.traces().values() if _is_whole(spans, steps)]

    def traces(self) -> dict[bytes, list[SeenSpan]]:
        found: dict[bytes, list[SeenSpan]] = defaultdict(list)
        for span in self.spans:
            found[span.trace_id].append(span)
        return found


def _is_whole(spans: list[SeenSpan], steps: set[bytes]) -> bool:
    """task.feed -> task.attempt -> task.explore -> (generate, score -> the environment's Score) and on to the step."""
    by_id = {span.span_id: span for span in spans}

    def above(name: str, service: str) -> list[str]:
        """Names from the span of this name up to its root; empty if there is none."""
        span = next((s for s in spans if s.name.endswith(name) and s.service == f"trinity-{service}"), None)
        names = []
        while span is not None:
            names.append(span.name.rpartition("/")[2])
            span = by_id.get(span.parent_id)
        return names

    explored = ["task.explore", "task.attempt", "task.feed"]
    trained = [span for span in spans if span.name == "experience.train" and steps & set(span.links)]
    return (
        above("engine.generate", "explorer") == ["engine.generate", *explored]
        and above("/Score", "environment") == ["Score", "environment.score", *explored]
        and above("buffer.judge", "buffer")[-1:] == ["task.feed"]
        and bool(trained)
        and above("experience.train", "trainer")[-1:] == ["task.feed"]
    )
