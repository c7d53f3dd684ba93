"""All pages of the web interface, by what they are about."""

from __future__ import annotations

from fastapi import APIRouter

from services.orchestrator.web import job_pages, jobs_list, platform_pages, prompt_pages, submission, trajectory_pages
from services.orchestrator.web.rendering import STATIC

__all__ = ["STATIC", "router"]

router = APIRouter(include_in_schema=False)
for pages in (jobs_list, submission, job_pages, trajectory_pages, prompt_pages, platform_pages):
    router.include_router(pages.router)
