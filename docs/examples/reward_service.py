"""A reward service for `tasks.verifier: {kind: http}`: how much of the expected word a response has.

    REWARD_SECRET=... uvicorn --app-dir docs/examples reward_service:app --port 9000

REWARD_SECRET is the platform's SPO_VERIFIER_HTTP_SECRET; without it requests are taken from anybody.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from typing import Annotated, Any, Literal

from fastapi import Depends, FastAPI, Header, HTTPException, Request
from pydantic import BaseModel, Field

OLDEST_SECONDS = 300

app = FastAPI(
    title="Reward service", version="1", description="What the platform asks, and what it takes for an answer."
)


class ScoreRequest(BaseModel):
    """Responses to one problem."""

    version: Literal[1]
    responses: list[str] = Field(description="Without their reasoning; equal ones once; the order decides.")
    arguments: dict[str, Any] = Field(description="Of the problem: its row's own, `statement` and `expected`.")


class ScoreAnswer(BaseModel):
    """One score per response, in their order."""

    scores: list[float | dict[str, float]] = Field(
        description="Between 0 and 1. Numbers by name: their mean is the score, each a curve of its own."
    )
    details: list[str | None] | None = Field(default=None, description="Why, for people; one per response.")


async def require_signature(
    request: Request,
    spo_timestamp: Annotated[str, Header(description="Unix seconds.")],
    idempotency_key: Annotated[str, Header(description="The same whenever the same batch is sent again.")],
    spo_signature: Annotated[str, Header(description="v1= and HMAC-SHA256, hexadecimal, of `timestamp.body`.")] = "",
) -> None:
    """Refuse what the platform has not signed, and what it signed long ago."""
    secret = os.environ.get("REWARD_SECRET", "")
    if not secret:
        return
    signed = spo_timestamp.encode() + b"." + await request.body()
    wanted = "v1=" + hmac.new(secret.encode(), signed, hashlib.sha256).hexdigest()
    recent = spo_timestamp.isdigit() and abs(time.time() - int(spo_timestamp)) < OLDEST_SECONDS
    if not recent or not hmac.compare_digest(wanted.encode(), spo_signature.encode()):
        raise HTTPException(401, "not signed by the platform")


@app.post("/score", dependencies=[Depends(require_signature)])
def score(asked: ScoreRequest) -> ScoreAnswer:
    """The score of each response."""
    expected = str((asked.arguments.get("expected") or [""])[0])
    right = [{"exact": float(each == expected), "has_it": float(expected in each)} for each in asked.responses]
    return ScoreAnswer(scores=right, details=[f"{len(each)} characters" for each in asked.responses])
