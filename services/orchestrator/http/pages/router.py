"""All pages of the web interface, by what they are about."""

from __future__ import annotations

from fastapi import APIRouter

from services.orchestrator.http.pages import catalogue, compare, reference, submission
from services.orchestrator.http.pages import job as job_pages
from services.orchestrator.http.pages import jobs as jobs_list
from services.orchestrator.http.pages import platform as platform_pages
from services.orchestrator.http.pages import prompts as prompt_pages
from services.orchestrator.http.pages import trajectories as trajectory_pages
from services.orchestrator.http.pages.rendering import STATIC

__all__ = ["STATIC", "router"]

router = APIRouter(include_in_schema=False)
_PAGES = (
    jobs_list,
    compare,
    catalogue,
    reference,
    submission,
    job_pages,
    trajectory_pages,
    prompt_pages,
    platform_pages,
)
for pages in _PAGES:
    router.include_router(pages.router)
