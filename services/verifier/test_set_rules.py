"""What a verifier can score by; anything else is refused with its name."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Protocol

from spo.errors import FieldViolation, InvalidInput
from spo.spec.verifier import OWN_MODEL, SERVED, served_judge
from spo.tasks.scoring.rules import require_composable
from spo.tasks.verifier_pool import OF_RUN, VERIFIER, kind_of, pool_of
from spo.v1.verdict_pb2 import HttpScore, ModelScore, TestSet, Verdict

# Raise it when a change here could change a verdict: stored values then no longer apply.
VERIFIER_VERSION = "verifier-1"
LONGEST_URL = 2048
MOST_SECONDS = 600.0
MOST_RUBRIC = 32_768
MOST_VOTES = 15
KINDS = ("http", "model")


class ResponseScorer(Protocol):
    """Decides by one kind of test set."""

    async def verdicts(
        self, responses: Sequence[str], test_set: TestSet, language: str = "", look: int = 0
    ) -> list[Verdict]:
        """One verdict per response; language: of programs in them; look: counted where asked again. Raises SpoError."""


def of_run(test_set: TestSet, run_id: str) -> TestSet:
    """The test set, asking pi0 of the run where it asks the platform's own model.

    Raises InvalidInput where it does and no run is named.
    """
    asking = [test_set, *(part.verifier for part in test_set.composition.parts)]
    if not any(_asks_own_model(one) for one in asking):
        return test_set
    if not run_id:
        raise InvalidInput("the job's pi0 judges these responses, and they are of no job: name a model by its address")
    found = TestSet()
    found.CopyFrom(test_set)
    for one in (found, *(part.verifier for part in found.composition.parts)):
        if _asks_own_model(one):
            one.model.address = OF_RUN + run_id
    return found


def _asks_own_model(test_set: TestSet) -> bool:
    return test_set.HasField("model") and not test_set.model.address and not test_set.model.model.startswith(SERVED)


def require_scorable(test_set: TestSet) -> None:
    """Raises InvalidInput naming each field that cannot be scored by."""
    kind = kind_of(test_set)
    if kind == "composition" and pool_of(test_set) == VERIFIER:
        require_composable(test_set, _require_part)
        return
    if kind not in KINDS:
        raise InvalidInput(
            "this test set cannot be scored by",
            violations=(FieldViolation(f"/{kind}", "belongs to sandbox-judge: verifiers score by http and model"),),
        )
    rules = _rules_of_http(test_set.http) if kind == "http" else _rules_of_model(test_set.model)
    rules["/pass_score"] = (_within(test_set.pass_score, 1), "between 0 and 1")
    faults = tuple(FieldViolation(pointer, f"must be {rule}") for pointer, (holds, rule) in rules.items() if not holds)
    if faults:
        raise InvalidInput("this test set cannot be scored by", violations=faults)


def _require_part(test_set: TestSet) -> None:
    """What belongs to the sandbox judge is looked at there."""
    if kind_of(test_set) in KINDS:
        require_scorable(test_set)


def _rules_of_http(http: HttpScore) -> dict[str, tuple[bool, str]]:
    return {
        "/http/url": (0 < len(http.url) <= LONGEST_URL, f"an address of at most {LONGEST_URL} characters"),
        "/http/arguments_json": (_is_object(http.arguments_json), "a JSON object"),
        "/http/timeout_seconds": (_within(http.timeout_seconds, MOST_SECONDS), f"at most {MOST_SECONDS:g}"),
    }


def _rules_of_model(model: ModelScore) -> dict[str, tuple[bool, str]]:
    return {
        "/model/rubric": (0 < len(model.rubric) <= MOST_RUBRIC, f"not empty, at most {MOST_RUBRIC} characters"),
        "/model/address": (
            len(model.address) <= LONGEST_URL and not model.address.startswith(OF_RUN),
            "the base address of an OpenAI-compatible service, or left out for the job's pi0",
        ),
        "/model/model": (
            bool(model.model) if model.address else model.model in ("", OWN_MODEL) or _is_pinned(model.model),
            f"the name of a model at that address, and without one {OWN_MODEL} or {SERVED}NAME=job_...@VERSION",
        ),
        "/model/votes": (0 <= model.votes <= MOST_VOTES, f"at most {MOST_VOTES}"),
    }


def _is_pinned(model: str) -> bool:
    judge = served_judge(model)
    return judge is not None and bool(judge.job_id)


def _within(value: float, most: float) -> bool:
    return math.isfinite(value) and 0 <= value <= most


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False
