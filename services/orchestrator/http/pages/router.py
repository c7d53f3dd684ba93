"""All pages of the web interface, by what they are about."""

from __future__ import annotations

from fastapi import APIRouter

from services.orchestrator.http.pages import (
    compare,
    submission,
)
from services.orchestrator.http.pages import (
    job as job_pages,
)
from services.orchestrator.http.pages import (
    jobs as jobs_list,
)
from services.orchestrator.http.pages import (
    platform as platform_pages,
)
from services.orchestrator.http.pages import (
    prompts as prompt_pages,
)
from services.orchestrator.http.pages import (
    trajectories as trajectory_pages,
)
from services.orchestrator.http.pages.rendering import STATIC

__all__ = ["STATIC", "router"]

router = APIRouter(include_in_schema=False)
for pages in (jobs_list, compare, submission, job_pages, trajectory_pages, prompt_pages, platform_pages):
    router.include_router(pages.router)
