"""Write docs/openapi.json: the REST API as the orchestrator describes it. `make openapi`; a test holds it."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

import redis

from services.orchestrator.commit import Leadership
from services.orchestrator.container import AppContext
from services.orchestrator.http.app import create_app
from services.orchestrator.settings import Settings

PLACE = Path(__file__).parents[1] / "docs" / "openapi.json"


def document() -> str:
    """The OpenAPI document as committed; no server is asked, so none needs to run."""
    # A client connects when it is first used, and describing the API uses none.
    client = redis.Redis()
    context = AppContext(Settings(), client, threading.Event(), Leadership(client, "openapi"))
    try:
        return json.dumps(create_app(context).openapi(), indent=1, sort_keys=True) + "\n"
    finally:
        context.close()


if __name__ == "__main__":
    PLACE.write_text(document())
    sys.exit(0)
