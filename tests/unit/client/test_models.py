"""The API's documents as both sides use them: a client is lenient, a server strict, and keywords are fields."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from services.orchestrator import scoring
from spo import api, errors
from spo.client import models
from spo.client.models import parsed
from tests.support.openapi_documents import OPENAPI, SCHEMAS, example

DOCUMENTS = [kind for kind in vars(api).values() if isinstance(kind, type) and issubclass(kind, BaseModel)]
ANSWERED = [kind for kind in DOCUMENTS if issubclass(kind, api.Document) and kind.__name__ in SCHEMAS]
ASKED = [kind for kind in DOCUMENTS if issubclass(kind, api.RequestBody) and kind.__name__ in SCHEMAS]
# Bodies: the request, and which of its fields are arguments of the call.
BODIES: list[tuple[Any, type[api.RequestBody], set[str]]] = [
    (models.ForkKeywords, api.ForkRequest, set()),
    (models.CompletionKeywords, api.CompletionRequest, {"prompt"}),
    (models.EvaluationKeywords, api.EvaluationRequest, {"job_id"}),
    (models.ExportKeywords, api.Export, {"format"}),
    (models.RejudgeKeywords, api.Rejudge, set()),
    (models.CompactKeywords, api.Compact, set()),
    (models.PruneKeywords, api.Prune, set()),
    (models.FeedbackKeywords, api.FeedbackRequest, {"id", "index"}),
]
# Filters: the query parameters of an operation, without the call's arguments and paging.
FILTERS: list[tuple[Any, str, str]] = [
    (models.JobFilters, "get", "/v1/jobs"),
    (models.LogFilters, "get", "/v1/jobs/{job_id}/logs"),
    (models.TrajectoryFilters, "get", "/v1/jobs/{job_id}/trajectories"),
    (models.CalibrationKeywords, "get", "/v1/jobs/{job_id}/calibration"),
    (models.StoreFilters, "get", "/v1/experience"),
    (models.RowFilters, "get", "/v1/experience/rows"),
    (models.ImportOptions, "post", "/v1/experience/import"),
]


def test_the_sdk_has_every_document_of_the_api_and_no_other_of_that_name() -> None:
    assert len(ANSWERED) > 80
    assert len(ASKED) > 15
    assert [kind.__name__ for kind in DOCUMENTS if getattr(models, kind.__name__) is not kind] == []


@pytest.mark.parametrize("kind", ANSWERED, ids=lambda kind: kind.__name__)
def test_a_client_ignores_what_a_newer_server_adds(kind: type[BaseModel]) -> None:
    document = example(SCHEMAS[kind.__name__])

    found = parsed(kind, with_new_fields(document) | {"new_field": 1})

    assert found == kind.model_validate(document)
    assert "new_field" not in found.model_dump_json()


def with_new_fields(node: Any) -> Any:
    """The document with a field more in each object; maps, which have one entry in examples, stay as they are."""
    if isinstance(node, list):
        return [with_new_fields(each) for each in node]
    if not isinstance(node, dict):
        return node
    grown = {name: with_new_fields(value) for name, value in node.items()}
    return grown | {"new_field": 1} if len(grown) > 1 else grown


@pytest.mark.parametrize("kind", ASKED, ids=lambda kind: kind.__name__)
def test_a_server_refuses_a_field_that_a_request_does_not_have(kind: type[BaseModel]) -> None:
    with pytest.raises(ValidationError) as refused:
        kind.model_validate({"no_such_field": 1})

    assert ("no_such_field",) in [
        fault["loc"] for fault in refused.value.errors() if fault["type"] == "extra_forbidden"
    ]


@pytest.mark.parametrize(("keywords", "request_kind", "arguments"), BODIES)
def test_the_keywords_of_a_call_are_fields_of_its_request(
    keywords: Any, request_kind: type[api.RequestBody], arguments: set[str]
) -> None:
    assert set(typing.get_type_hints(keywords)) == set(request_kind.model_fields) - arguments


@pytest.mark.parametrize(("keywords", "method", "path"), FILTERS)
def test_filters_are_the_parameters_of_their_operation(keywords: Any, method: str, path: str) -> None:
    found = {each["name"] for each in OPENAPI["paths"][path][method]["parameters"] if each["in"] == "query"}

    assert set(typing.get_type_hints(keywords)) == found - {"limit", "cursor", "name"}


def test_the_scores_of_an_evaluation_are_those_that_the_orchestrator_writes() -> None:
    score = api.ProblemScore(
        prompt_id="p",
        samples=2,
        correct=1,
        distinct=1,
        public_only=0,
        hard_coded=0,
        entropy=0.5,
        response_tokens=3.0,
        scores={"score": 0.25, "format": 1.0},
    )
    task: Any = SimpleNamespace(version=3, protocol=SimpleNamespace(ks=(1, 2), samples=2), spec=SimpleNamespace(seed=0))
    written = scoring.summary(task, [score])

    assert api.EvaluationResult.model_validate(written).model_dump() == written
    brief = {name: value for name, value in written.items() if name != "per_problem"}
    assert api.EvaluationResult.model_validate(brief).model_dump() == brief, "what is left out does not come back empty"


def test_an_answer_of_another_form_is_a_typed_error_that_names_the_field() -> None:
    document = example(SCHEMAS["Job"])
    document["progress"]["step"] = "many"

    with pytest.raises(errors.InternalError, match="Job: /progress/step") as raised:
        parsed(models.Job, document)

    assert raised.value.code == "unexpected_answer"
    assert not isinstance(raised.value, ValidationError)


def test_models_cannot_be_changed() -> None:
    hop = models.Hop(service="trainer", at_unix_ms=1)

    with pytest.raises(ValidationError):
        hop.service = "inference"  # type: ignore[misc]
    assert typing.get_type_hints(models.Hop)["service"] is str
