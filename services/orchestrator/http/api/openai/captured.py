"""Whether a completion is captured, and what of it: only where its request, or its key, asks for that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace

import redis

from services.orchestrator.auth.principals import Principal
from services.orchestrator.http.api.openai.answers import OpenAiAnswer
from services.orchestrator.http.api.openai.requests import ChatRequest, PlainRequest
from services.orchestrator.serving.capture import Captured, CapturedChoice, CaptureStore
from spo.errors import FieldViolation, InvalidInput, SpoError
from spo.observability import metrics
from spo.observability.logs import get_logger
from spo.v1.inference_service_pb2 import ServeRequest

log = get_logger("capture")

CAPTURE, CONSENT, LICENCE = "x-spo-capture", "x-spo-consent", "x-spo-licence"
MOST_CHARACTERS = 200


def asks_for_capture(principal: Principal, headers: Mapping[str, str], body: ChatRequest | PlainRequest) -> bool:
    """By the header X-SPO-Capture, else `store: true` or a key with the scope models:capture. Raises InvalidInput."""
    said = headers.get(CAPTURE, "").lower()
    if said not in ("", "true", "false"):
        message = f"{CAPTURE} is true or false"
        raise InvalidInput(message, code="invalid_request", violations=(FieldViolation(f"/{CAPTURE}", message),))
    # Whoever may do everything has not asked for anything.
    by_key = "models:capture" in principal.scopes and not principal.is_admin
    return said == "true" if said else body.store or by_key


def capture_terms(
    headers: Mapping[str, str], principal: Principal, body: ChatRequest | PlainRequest, wanted: ServeRequest
) -> Captured:
    """What is known of a completion before it is sampled. Raises InvalidInput."""
    long = [name for name in (CONSENT, LICENCE) if len(headers.get(name, "")) > MOST_CHARACTERS]
    if long:
        message = f"at most {MOST_CHARACTERS} characters"
        raise InvalidInput(message, code="invalid_request", violations=(FieldViolation(f"/{long[0]}", message),))
    turns = body.turns if isinstance(body, ChatRequest) else [{"role": "prompt", "content": wanted.text}]
    return Captured(
        id=wanted.request_id,
        tenant=principal.tenant,
        by=principal.name,
        model=body.model,
        job_id=wanted.run_id,
        created_unix_ms=int(time.time() * 1000),
        messages=tuple(turns),
        choices=(),
        temperature=body.temperature,
        top_p=body.top_p,
        seed=wanted.seed,
        licence=headers.get(LICENCE, ""),
        consent=headers.get(CONSENT, ""),
        metadata=body.metadata,
    )


def keep(captures: CaptureStore, terms: Captured, answer: OpenAiAnswer) -> None:
    """Capture what was sampled; what cannot be captured is told to the log, and spoils no answer."""
    choices = tuple(
        CapturedChoice(
            each.index,
            each.text,
            each.finish_reason,
            each.version_first,
            each.version_last,
            tuple(each.token_ids),
        )
        for each in answer.choices
    )
    captured = replace(
        terms,
        choices=choices,
        prompt_token_ids=tuple(answer.prompt_token_ids),
        model_hash=answer.model_hash,
        sampler=answer.sampler,
    )
    try:
        result = "kept" if captures.keep(captured) else "sampled out"
    except (SpoError, redis.RedisError) as error:
        result = "failed"
        log.warning("a completion could not be captured", completion=answer.id, reason=str(error)[:500])
    metrics.CAPTURED.labels(result=result).inc()
