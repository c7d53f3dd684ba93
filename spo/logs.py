"""Structured logs: structlog JSON on stderr, with the service's name; secrets are redacted when written."""

from __future__ import annotations

import re
import sys
from typing import Any

import structlog

_SECRET_NAME = re.compile(r"(?i)(password|secret|token|api_?key|authorization)$")
_URL_PASSWORD = re.compile(r"(\w+://[^:/@\s]*:)[^@\s]+@")


def _redact(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    for name, value in event.items():
        if _SECRET_NAME.search(name):
            event[name] = "[redacted]"
        elif isinstance(value, str):
            event[name] = _URL_PASSWORD.sub(r"\1[redacted]@", value)
    return event


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
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)


def get_logger(component: str) -> Any:
    """A logger that names its component."""
    return structlog.get_logger(component=component)
