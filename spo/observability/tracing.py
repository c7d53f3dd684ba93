"""Traces (OpenTelemetry, OTLP over HTTP): one per prompt group from its dispatch; batches and steps link to groups.

Off unless an endpoint is set; then every function here returns at once. A span's place travels as a W3C `traceparent`:
in gRPC metadata (`spo.rpc`) and as the field `trace` of stream entries. The ids of a group's first span
follow from the group's, so anything that knows a trajectory can link to its trace. Attributes are ids and counts, never
text of prompts or responses, never messages of errors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

from blake3 import blake3

from spo.errors import SpoError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OpenSpan
    from opentelemetry.trace import SpanContext, Tracer

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
# gRPC metadata and stream entries call it so.
HEADER = "traceparent"
EXPORT_SECONDS = 5
Ids = tuple[int, int]
Attribute = str | int | float | bool

_provider: TracerProvider | None = None
_tracer: Tracer | None = None
_current: ContextVar[str] = ContextVar("trace", default="")
_chosen: ContextVar[Ids | None] = ContextVar("chosen_ids", default=None)


class Span:
    """A span under way, or nothing when traces are off; `header` says where its children belong."""

    def __init__(self, span: OpenSpan | None = None) -> None:
        self._span = span
        self.header = _header(span) if span is not None else ""

    def note(self, **attributes: Attribute) -> None:
        """Add attributes: ids and counts."""
        if self._span is not None:
            self._span.set_attributes({f"spo.{name}": value for name, value in attributes.items()})

    def link(self, groups: Sequence[tuple[str, str]]) -> None:
        """Link to the traces of groups, each (run id, group id); each once."""
        if self._span is not None:
            for run_id, group_id in dict.fromkeys(groups):
                self._span.add_link(_context(group_ids(run_id, group_id)))

    def end(self, error_code: str = "") -> None:
        """The work is done, or failed with this code."""
        if self._span is not None:
            if error_code:
                from opentelemetry.trace import StatusCode

                self._span.set_status(StatusCode.ERROR, error_code)
            self._span.end()


_NOTHING = Span()


def configure_traces(service: str, replica_id: str, endpoint: str = "") -> None:
    """Export this process's spans to an OTLP/HTTP endpoint: the setting, else the standard OTEL_* variables, else not.

    A collector that is away costs nothing but its traces.
    """
    global _provider, _tracer
    if not endpoint and not any(os.environ.get(name) for name in ENDPOINT_VARIABLES):
        return
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

    class ChosenIds(RandomIdGenerator):
        def generate_trace_id(self) -> int:
            chosen = _chosen.get()
            return chosen[0] if chosen else super().generate_trace_id()

        def generate_span_id(self) -> int:
            chosen = _chosen.get()
            return chosen[1] if chosen else super().generate_span_id()

    named = {"service.name": service, "service.namespace": "spo", "service.instance.id": replica_id}
    target = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    _provider = TracerProvider(resource=Resource.create(named), id_generator=ChosenIds(), shutdown_on_exit=False)
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=target, timeout=EXPORT_SECONDS)))
    _tracer = _provider.get_tracer("spo")


def finish_traces() -> None:
    """Send what waits, within a few seconds, and switch traces off."""
    global _provider, _tracer
    if _provider is not None:
        _provider.force_flush(EXPORT_SECONDS * 1000)
        _provider.shutdown()
    _provider = _tracer = None


def group_ids(run_id: str, group_id: str) -> Ids:
    """Trace id and first span id of a prompt group."""
    digest = blake3(f"{run_id}/{group_id}".encode()).digest(24)
    return int.from_bytes(digest[:16], "big"), int.from_bytes(digest[16:], "big")


def current() -> str:
    """The traceparent of the span around this code, "" outside of one."""
    return _current.get()


def begin(
    name: str, *, parent: str = "", ids: Ids | None = None, kind: str = "INTERNAL", **attributes: Attribute
) -> Span:
    """Start a span below a traceparent, or a new trace, of these ids if given; the caller ends it, in any thread."""
    if _tracer is None:
        return _NOTHING
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    above = TraceContextTextMapPropagator().extract({HEADER: parent}, Context()) if parent else Context()
    token = _chosen.set(ids)
    try:
        begun = Span(_tracer.start_span(name, above, kind=SpanKind[kind]))
    finally:
        _chosen.reset(token)
    begun.note(**attributes)
    return begun


@contextmanager
def span(name: str, *, parent: str = "", kind: str = "INTERNAL", **attributes: Attribute) -> Iterator[Span]:
    """A span around the body, below `parent`, else below the one around it; gRPC calls of the body are its children."""
    if _tracer is None:
        yield _NOTHING
        return
    begun = begin(name, parent=parent or current(), kind=kind)
    begun.note(**attributes)
    code = ""
    try:
        with within(begun):
            yield begun
    except SpoError as error:
        code = error.code
        raise
    except BaseException as error:
        code = type(error).__name__
        raise
    finally:
        begun.end(code)


@contextmanager
def within(begun: Span) -> Iterator[None]:
    """Make gRPC calls of the body children of a span that somebody else ends."""
    token = _current.set(begun.header)
    try:
        yield
    finally:
        _current.reset(token)


def _context(ids: Ids) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _header(span: OpenSpan) -> str:
    place = span.get_span_context()
    if not place.is_valid:
        return ""
    return f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}"
