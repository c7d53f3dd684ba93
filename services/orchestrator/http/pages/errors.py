"""The catalogue of error codes as pages: the `type` of every problem leads here, with or without a key."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from services.orchestrator.http.pages.rendering import show
from spo.error_codes import CATALOGUE
from spo.errors import NotFound

router = APIRouter(prefix="/errors", include_in_schema=False)


@router.get("")
def show_codes(request: Request) -> Response:
    """All codes."""
    return show(request, "errors/codes.html", title="Error codes", entries=CATALOGUE)


@router.get("/{code}")
def show_code(request: Request, code: str) -> Response:
    """One code."""
    if code not in CATALOGUE:
        raise NotFound("there is no such error code")
    return show(request, "errors/codes.html", title=code, entries={code: CATALOGUE[code]})
