"""How pages are rendered: templates that escape everything, filters for numbers and times, errors with a remedy."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from pathlib import Path

import redis
from fastapi import Request, Response
from fastapi.templating import Jinja2Templates
from starlette.datastructures import Headers

from services.orchestrator.container import AppContext
from services.orchestrator.jobs.states import ACTIONS
from spo.error_codes import CATALOGUE
from spo.spec.job_state import JobState

FOLDER = Path(__file__).parent
STATIC = FOLDER / "static"

templates = Jinja2Templates(FOLDER / "templates")

# Remedies that differ in a browser from those for a program.
ADVICE = {
    "unauthorized": "Reload and sign in: any user name, and your API key as the password.",
    "forbidden": "Ask an administrator for a key with this scope.",
    "cross_site": "Open the page by the address that the platform printed when it started.",
    "job_not_found": "It may have been deleted, or belong to somebody else. The list of jobs has those you may see.",
}
OTHERWISE = "Go back to the jobs; if it happens again, the log of the orchestrator has more."


def show(request: Request, template: str, **facts: object) -> Response:
    """A page, or the part of one that htmx asked for; no cache keeps it, since it may show what a model wrote."""
    # Error codes are explained to anybody; nobody is known there.
    principal = getattr(request.state, "principal", None)
    response = templates.TemplateResponse(
        request, template, {"principal": principal, "path": request.url.path, "notice": _notice(request), **facts}
    )
    response.headers["Cache-Control"] = "no-store"
    response.headers["Vary"] = "HX-Request"
    return response


def _notice(request: Request) -> str:
    """What everybody should know of lost data; nothing where Redis does not answer."""
    try:
        context: AppContext = request.app.state.context
        return context.watch.notice()
    except (redis.RedisError, OSError):
        return ""


def is_part(request: Request) -> bool:
    """Whether htmx asks for a part, not a person for the whole page."""
    headers = request.headers
    return headers.get("hx-request") == "true" and headers.get("hx-history-restore-request") != "true"


def wants_page(path: str, headers: Headers) -> bool:
    """Whether an error should come as a page: a browser navigates, and not to the API."""
    return "text/html" in headers.get("accept", "") and not path.startswith(("/v1/", "/static/", "/metrics"))


def error_page(status: int, code: str, detail: str) -> str:
    """What went wrong and what to do about it, as HTML."""
    known = CATALOGUE.get(code)
    advice = ADVICE.get(code) or (known.remedy if known else OTHERWISE)
    facts = {"status": status, "code": code, "detail": detail, "advice": advice}
    return templates.get_template("errors/page.html").render(facts)


def _clock(unix_ms: int) -> str:
    return datetime.fromtimestamp(unix_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _moment(rfc3339: str) -> str:
    return rfc3339[:19].replace("T", " ")


def _ago(rfc3339: str) -> str:
    return _span(time.time() - datetime.fromisoformat(rfc3339).timestamp())


def _span(seconds: float) -> str:
    """A length of time in its two largest units."""
    if seconds < 10:
        return f"{max(0.0, seconds):.1f} s"
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _number(value: float) -> str:
    return f"{value:,.0f}".replace(",", " ")


def legal_actions(state: JobState) -> list[str]:
    """What may be asked of a job now, by the one table of transitions."""
    actions = [action.name for action in ACTIONS if state in action.moves]
    return [*sorted(actions, reverse=True), *(["checkpoint"] if state is JobState.RUNNING else [])]


templates.env.globals["legal_actions"] = legal_actions
templates.env.filters |= {
    "clock": _clock,
    "moment": _moment,
    "ago": _ago,
    "span": _span,
    "size": _size,
    "number": _number,
}
