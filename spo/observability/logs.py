"""Structured logs: structlog JSON on stderr, with the service's name; secrets are redacted when written."""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import structlog

from spo.observability.job_lines import job_line

_SECRET_NAME = re.compile(r"(?i)(password|secret|token|api_?key|authorization)$")
# Lines that wait for the next heartbeat, which takes them to the orchestrator; the oldest give way.
MAX_WAITING = 2000
_URL_PASSWORD = re.compile(r"(\w+://[^:/@\s]*:)[^@\s]+@")
# API keys of the platform, and whatever follows the name of a scheme of authorization.
_TOKEN = re.compile(r"\b(spo_[0-9a-f]{16}_|(?i:bearer|basic)\s+)[\w.~+/=-]{8,}")


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
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)


def get_logger(component: str) -> structlog.typing.FilteringBoundLogger:
    """A logger that names its component."""
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(component=component)
    return logger
