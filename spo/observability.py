"""What a process shows of itself: structured logs, Prometheus metrics, and traces.

Log lines as they go to the people whose job they concern: short enough to be kept, and without the server's paths.
The process's own log, on stderr, has everything in full.

Traces (OpenTelemetry, OTLP over HTTP): one per prompt group from its dispatch; batches and steps link to groups.
Off unless an endpoint is set; then every function here returns at once. A span's place travels as a W3C `traceparent`:
in gRPC metadata (`spo.rpc`) and as the field `trace` of stream entries. The ids of a group's first span
follow from the group's, so anything that knows a trajectory can link to its trace. Attributes are ids and counts, never
text of prompts or responses, never messages of errors.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import resource
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, cast

import psutil
import structlog
from blake3 import blake3
from prometheus_client import Counter, Gauge, Histogram, start_http_server

from spo.errors import SpoError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OpenSpan, SpanContext, Tracer


# Of a line as one JSON object.
MAX_CHARACTERS = 4000
# Of a text that is cut, so much is its beginning: the end of a traceback is what happened.
HEAD_SHARE = 0.3
LEAST_KEPT = 60
_TRACED_FILE = re.compile(r'File "([^"\n]+)"')

_SECRET_NAME = re.compile(r"(?i)(password|secret|token|api_?key|authorization)$")
# Lines that wait for the next heartbeat, which takes them to the orchestrator; the oldest give way.
MAX_WAITING = 2000
_URL_PASSWORD = re.compile(r"(\w+://[^:/@\s]*:)[^@\s]+@")
# API keys of the platform, and whatever follows the name of a scheme of authorization.
_TOKEN = re.compile(r"\b(spo_[0-9a-f]{16}_|(?i:bearer|basic)\s+)[\w.~+/=-]{8,}")

CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# What libraries say where they raise no error of a type of its own: torch's allocators, C++.
_SAYINGS = ("can't allocate memory", "out of memory", "Cannot allocate memory", "std::bad_alloc")
# Above it a limit of version 1 means that there is none.
_UNLIMITED = 1 << 60

INFERENCE_TOKENS = Counter("spo_inference_tokens_total", "Response tokens generated")
TOOL_CALLS = Counter(
    "spo_tool_calls_total", "Calls of tools read from served answers, and answers with none", ["result"]
)
AGENT_CALLS = Counter("spo_agents_calls_total", "Calls of agents' sessions, stored", ["dialect"])
AGENT_BREAKS = Counter("spo_agents_breaks_total", "Calls that did not go on from their session's tokens", ["reason"])
AGENT_REPEATED = Counter(
    "spo_agents_prefill_repeated_tokens_total", "Prompt tokens of calls that a break has written anew", ["reason"]
)
AGENT_EPISODES = Gauge("spo_agents_episodes", "Episodes of groups that are open, by state", ["state"])
AGENT_LEASE_AGE = Gauge("spo_agents_lease_age_seconds", "Since the oldest lease of an episode was given")
AGENT_CALLS_OF_EPISODE = Histogram(
    "spo_agents_calls_per_episode", "Calls of an ended episode", buckets=(0, 1, 2, 5, 10, 20, 50, 100, 200, 500)
)
AGENT_OPEN_EPISODES = Gauge("spo_agents_open_episodes", "Episodes that wait for a runner or are played", ["pool"])
RUNNER_EPISODES = Counter("spo_agent_runner_episodes_total", "Episodes that this runner has played", ["status"])
RUNNER_PLAYING = Gauge("spo_agent_runner_playing", "Episodes that this runner plays now")
INFERENCE_RUNNING = Gauge("spo_inference_running_sequences", "Sequences being decoded")
JUDGE_VERDICTS = Counter("spo_judge_verdicts_total", "Verdicts given", ["outcome"])
JUDGE_CACHE_HITS = Counter("spo_judge_cache_hits_total", "Verdicts answered from the cache")
JUDGE_PROGRAM_SECONDS = Histogram("spo_judge_program_seconds", "CPU seconds per judged program")
JUDGE_RECHECKED_PROGRAMS = Counter(
    "spo_judge_rechecked_programs_total", "Programs judged again to see whether it differs"
)
JUDGE_FLAKY_PROGRAMS = Counter("spo_judge_flaky_programs_total", "Of those, programs whose verdict differed")
JUDGE_SUSPECTED_HARD_CODED = Counter(
    "spo_judge_suspected_hard_coded_total", "Programs that seem to print remembered answers of public tests"
)
JUDGE_ISOLATION = Gauge("spo_judge_isolation", "1 for the isolation tier in force", ["tier"])
REPLAY_INSERTS = Counter("spo_replay_inserts_total", "Trajectories offered to the buffer", ["result"])
REPLAY_STORED = Counter("spo_replay_stored_total", "Trajectories written to the experience store")
REPLAY_MEMORY_SHARE = Gauge("spo_replay_memory_share", "Memory of Redis in use, as a share of its maxmemory")
REPLAY_SAMPLE_AGE = Histogram(
    "spo_replay_sample_age_versions",
    "Weight versions behind, mean of a batch's online trajectories",
    buckets=(0, 1, 2, 4, 8, 16, 32, 64),
)
STREAM_LAG = Gauge("spo_stream_lag_entries", "Entries no consumer has seen", ["stream"])
STREAM_PENDING = Gauge("spo_stream_pending_entries", "Entries delivered and unfinished", ["stream"])
DEAD_LETTERS = Counter("spo_dead_letters_total", "Entries given up on", ["stream"])
POLICY_VERSION = Gauge("spo_policy_version", "Newest weight version", ["role"])
WEIGHTS_PUSH_SECONDS = Histogram("spo_weights_push_seconds", "Seconds to gather and write, or to load a version")
WEIGHTS_BYTES = Counter("spo_weights_bytes_total", "Bytes of weights moved")
TRAINER_STEP_SECONDS = Histogram("spo_trainer_step_seconds", "Seconds per optimiser step")
TRAINER_COLLAPSE_ALARMS = Counter("spo_trainer_collapse_alarms_total", "Signs of a collapse that began", ["alarm"])
TRAINER_WAIT_SECONDS = Histogram("spo_trainer_wait_batch_seconds", "Seconds the trainer waited for a batch")
VALUE_SAMPLES = Counter("spo_value_samples_total", "Samples of pi0 spent on value estimation")
PIVOTAL_ROLLOUTS = Counter("spo_pivotal_rollouts_total", "Rollouts of pi0 from prefixes, in search of pivotal tokens")
JOBS = Gauge("spo_jobs", "Jobs by state", ["state"])
CAPTURED = Counter("spo_captured_completions_total", "Completions whose capture was asked for", ["result"])
REPLICAS = Gauge("spo_replicas", "Live registered replicas", ["pool"])
DELETIONS_FAILING = Gauge("spo_deletions_failing", "Deleted jobs whose files could not be removed so far")
LEFTOVERS = Counter("spo_leftovers_total", "Jobs that were not there, and of which keys or files were, now removed")
WANTED_REPLICAS = Gauge("spo_wanted_replicas", "Replicas that the jobs need; 0: the pool is not needed", ["pool"])

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


def job_line(event: Mapping[str, object]) -> str:
    """The event as JSON of at most MAX_CHARACTERS, its longest texts cut in the middle."""
    shown = {
        name: without_paths(value) if isinstance(value, str) else value for name, value in json_safe(event).items()
    }
    while len(line := json.dumps(shown)) > MAX_CHARACTERS:
        longest = max(shown, key=lambda name: len(json.dumps(shown[name])))
        value = shown[longest]
        text = value if isinstance(value, str) else json.dumps(value)
        # Escapes make it longer in JSON than it is: several rounds.
        room = len(text) - max(1, (len(line) - MAX_CHARACTERS) * len(text) // len(json.dumps(text)))
        if len(text) <= LEAST_KEPT:
            # Nothing in it is long, there is much of it.
            return json.dumps({"event": head_and_tail(line, MAX_CHARACTERS // 4)})
        shown[longest] = head_and_tail(text, max(LEAST_KEPT, room))
    return line


def json_safe(event: Mapping[str, object]) -> dict[str, object]:
    """The event as JSON can hold it."""
    decoded: dict[str, object] = json.loads(json.dumps(dict(event), default=repr))
    return decoded


def head_and_tail(text: str, most: int) -> str:
    """The text, or its beginning and its end and how much is missing between them; at most so many characters."""
    if len(text) <= most:
        return text
    gap = f"\n[{len(text) - most} characters left out]\n"
    room = max(0, most - len(gap))
    head = int(room * HEAD_SHARE)
    return text[:head] + gap[: most - room] + text[len(text) - (room - head) :]


def without_paths(text: str) -> str:
    """A traceback with modules in place of files: `File "spo.model.folder"`."""
    return _TRACED_FILE.sub(lambda found: f'File "{_module(found[1])}"', text)


def _module(file: str) -> str:
    for root in sorted(filter(None, sys.path), key=len, reverse=True):
        if file.startswith(f"{root.rstrip('/')}/"):
            file = file[len(root.rstrip("/")) + 1 :]
            break
    else:
        # Of a file that no import found, and of what has no file, the name is enough.
        file = file.rpartition("/")[2]
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@dataclass(frozen=True)
class Line:
    """A redacted line as people of the job read it; run_id is empty where it concerns no run, or several."""

    run_id: str
    level: str
    at_unix_ms: int
    text: str


waiting: deque[Line] = deque(maxlen=MAX_WAITING)


@dataclass
class _ProcessRun:
    run_id: str = ""


_process_run = _ProcessRun()


def lines_concern_run(run_id: str) -> None:
    """From now on, lines of this process that name no run concern this one; "" for none."""
    _process_run.run_id = run_id


def _keep(_logger: object, method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    run_id = str(event.get("run") or event.get("job") or _process_run.run_id)
    waiting.append(Line(run_id, method, int(time.time() * 1000), job_line(event)))
    return event


def _redact(_logger: object, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    return {name: redacted(value, name) for name, value in event.items()}


def redacted(value: object, name: str = "") -> object:
    """The value without what is secret by its name or its form, however deep in it."""
    if _SECRET_NAME.search(name):
        return "[redacted]"
    if isinstance(value, str):
        return _TOKEN.sub(r"\1[redacted]", _URL_PASSWORD.sub(r"\1[redacted]@", value))
    if isinstance(value, dict):
        return {key: redacted(member, str(key)) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(member) for member in value]
    return value


class _LogStream:
    """Standard error, which may be a file on a full disk or a pipe that nobody reads any more.

    A line that cannot be written is lost, and who wrote it goes on: whether there is room for logs decides nothing
    else. The next line that can be written says how many were lost.
    """

    def __init__(self, service: str) -> None:
        self._service = service
        self._lost = 0

    def write(self, text: str) -> None:
        try:
            if self._lost:
                told = {"event": "lines of the log were lost", "lost": self._lost, "level": "warning"}
                # On a line of its own: a part of the first that was lost may stand there.
                sys.stderr.write("\n" + json.dumps({**told, "service": self._service}) + "\n")
                sys.stderr.flush()
                self._lost = 0
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, ValueError):  # ValueError: it is closed
            self._lost += 1

    def flush(self) -> None:
        """Each line is flushed as it is written."""


def configure_logs(service: str, level: str = "info", log_format: str = "json") -> None:
    """Set up logging of this process; log_format is "json" or "console"."""
    renderer: Any = (
        structlog.processors.JSONRenderer() if log_format == "json" else structlog.dev.ConsoleRenderer(colors=False)
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _redact,
            _keep,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _LogStream(service))),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
    root = logging.getLogger()
    root.handlers = [each for each in root.handlers if not isinstance(each, _LibraryLines)] + [_LibraryLines()]


class _LibraryLines(logging.Handler):
    """What libraries log, as lines of ours: who collects logs finds one form in them."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)
            exc_info = {"exc_info": record.exc_info} if record.exc_info else {}
            get_logger("library").log(level, record.getMessage(), library=record.name, **exc_info)
        except Exception:  # what a library gave its logger; never an error of who called it
            self.handleError(record)


def take_over_logs(*libraries: str, level: str = "WARNING") -> None:
    """Have libraries that bring handlers of their own, once they are imported, log by ours, from this level on."""
    for library in libraries:
        logger = logging.getLogger(library)
        logger.handlers.clear()
        logger.propagate = True
        logger.setLevel(level)


def get_logger(component: str) -> structlog.typing.FilteringBoundLogger:
    """A logger that names its component."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component)
    return logger


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the host or a device had no memory left, as far as the error or what it came from says."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or getattr(seen, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(seen, RuntimeError) and any(saying in str(seen) for saying in _SAYINGS):
            return True
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return False


def memory_limit_bytes() -> int:
    """What this process and its siblings may take: the least of the machine's, its cgroups' and its own limit."""
    limits = [psutil.virtual_memory().total]
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if soft != resource.RLIM_INFINITY:
        limits.append(soft)
    limits += [
        found
        for folder in _own_cgroups()
        for name in ("memory.max", "memory.limit_in_bytes")
        if (found := _number(folder / name)) is not None and found < _UNLIMITED
    ]
    return min(limits)


def oom_kills() -> int | None:
    """Processes of this one's cgroup that the kernel has killed for want of memory; None where it cannot be read."""
    for folder in _own_cgroups():
        for name in ("memory.events", "memory.oom_control"):
            try:
                lines = (folder / name).read_text().splitlines()
            except OSError:
                continue
            for line in lines:
                word, _, count = line.partition(" ")
                if word == "oom_kill" and count.isdecimal():
                    return int(count)
    return None


def _own_cgroups() -> list[Path]:
    """The folders of this process's memory cgroup and of those around it, the innermost first."""
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = CGROUPS / "memory" if controllers else CGROUPS
        inner = root / path.lstrip("/")
        # In a container the path may be the host's, and only the root is to be seen.
        found += [inner, *[parent for parent in inner.parents if parent == root or root in parent.parents]]
    return found


def _number(file: Path) -> int | None:
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def serve_metrics(host: str, port: int) -> None:
    """Expose /metrics on its own port; port 0 switches it off."""
    if port:
        start_http_server(port, addr=host)


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


def _context(ids: Ids) -> SpanContext:
    from opentelemetry.trace import SpanContext, TraceFlags

    return SpanContext(*ids, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))


def _header(span: OpenSpan) -> str:
    place = span.get_span_context()
    if not place.is_valid:
        return ""
    return f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}"


_NOTHING = Span()


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
