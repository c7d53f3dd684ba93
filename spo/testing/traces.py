"""A collector of traces for tests: an HTTP server that takes OTLP as protobuf, as real collectors do."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came over the wire; ids are hexadecimal."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[tuple[str, str], ...]
    attributes: dict[str, Any]
    error: str


class Collector:
    """Listens on a free loopback port; use as a context manager."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Everything received so far."""
        return [span for body in list(self.bodies) for span in _spans(body)]

    def wait_for(self, holds: Callable[[list[ReceivedSpan]], Any], what: str, limit_seconds: float = 30) -> Any:
        """What `holds` finds in the spans, once that is something."""
        deadline = time.monotonic() + limit_seconds
        while not (found := holds(self.spans)):
            names = sorted({(span.service, span.name) for span in self.spans})
            assert time.monotonic() < deadline, f"waited {limit_seconds:g} s for {what}; received {names}"
            time.sleep(0.1)
        return found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                sound = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                if sound:
                    bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if sound else 400)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _spans(body: bytes) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            service=_attributes(resource.resource.attributes)["service.name"],
            name=span.name,
            kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            attributes=_attributes(span.attributes),
            error=span.status.message,
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
