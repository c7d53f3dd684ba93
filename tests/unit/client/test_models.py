"""The SDK's models and the API's OpenAPI document say the same, field by field."""

from __future__ import annotations

import typing
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError, create_model

from services.orchestrator import scoring
from spo import errors
from spo.client import models
from spo.client.answers import parsed
from tests.support.openapi_documents import OPENAI_PATHS, OPENAPI, SCHEMAS, example

# Parts that the OpenAPI document leaves open, and what all documents share.
OPEN_PARTS = {"EvaluationResult", "StepEvaluation", "PassAtK", "ProblemScore", "AnnouncedVersion"}
SHARED = {"Document", "Listing", "Page"}
MODELS = {
    name: kind
    for name, kind in vars(models).items()
    if isinstance(kind, type) and issubclass(kind, BaseModel) and name not in SHARED
}
# Bodies: the schema of that name, without what the call takes as an argument.
BODIES = {
    "ForkRequest": set(),
    "CompletionRequest": {"prompt"},
    "EvaluationRequest": {"job_id"},
    "Export": {"format"},
    "Rejudge": set(),
    "Compact": set(),
    "Prune": set(),
}
# Filters: the query parameters of an operation, without the call's arguments and paging.
FILTERS = {
    "JobFilters": "/v1/jobs",
    "LogFilters": "/v1/jobs/{job_id}/logs",
    "TrajectoryFilters": "/v1/jobs/{job_id}/trajectories",
    "CalibrationDesign": "/v1/jobs/{job_id}/calibration",
    "StoreFilters": "/v1/experience",
    "RowFilters": "/v1/experience/rows",
}
ARGUMENTS = {"limit", "cursor", "name"}
FREE = "any object"


def shape(schema: dict[str, Any]) -> Any:
    """A schema as what can be compared: names of documents, sets of alternatives, nested lists."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        named = SCHEMAS.get(name, {})
        return shape(named) if "enum" in named else ("document", name)
    if "allOf" in schema:
        return shape(schema["allOf"][0])
    if "anyOf" in schema:
        return frozenset().union(*(_set(shape(part)) for part in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ("one of", frozenset(schema.get("enum", [schema.get("const")])))
    if schema.get("type") == "array":
        return ("list of", shape(schema.get("items", {})))
    if schema.get("type") == "object":
        values = schema.get("additionalProperties")
        return ("map to", shape(values)) if isinstance(values, dict) and values else FREE
    return schema.get("type", FREE)


def _set(found: Any) -> frozenset[Any]:
    return found if isinstance(found, frozenset) else frozenset({found})


def fits(ours: Any, theirs: Any) -> bool:
    """Whether our type says what theirs does; where theirs is any object, ours may name it."""
    if isinstance(ours, frozenset) or isinstance(theirs, frozenset):
        return len(_set(ours)) == len(_set(theirs)) and all(
            any(fits(mine, other) for other in _set(theirs)) for mine in _set(ours)
        )
    if theirs == FREE:
        return ours == FREE or ours[0] in ("document", "map to")
    if isinstance(ours, tuple) and isinstance(theirs, tuple) and ours[0] == theirs[0] != "document":
        return ours[1] == theirs[1] if ours[0] == "one of" else fits(ours[1], theirs[1])
    return bool(ours == theirs)


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Fields of theirs that ours lacks, the other way round, and those of another type."""
    lacking = [f"{name} is missing" for name in sorted(set(theirs) - set(ours))]
    unknown = [f"{name} is not the API's" for name in sorted(set(ours) - set(theirs))]
    other = [
        f"{name}: {shape(ours[name])} is not {shape(theirs[name])}"
        for name in sorted(set(ours) & set(theirs))
        if not fits(shape(ours[name]), shape(theirs[name]))
    ]
    return lacking + unknown + other


def test_every_answer_of_the_api_has_a_model() -> None:
    answered = {
        content["schema"]["$ref"].rpartition("/")[2]
        for path, operations in OPENAPI["paths"].items()
        if path not in OPENAI_PATHS
        for operation in operations.values()
        for status, response in operation["responses"].items()
        if status.startswith("2")
        for content in response.get("content", {}).values()
        if "$ref" in content.get("schema", {})
    }

    assert answered - set(MODELS) == set()
    assert set(MODELS) - set(SCHEMAS) == OPEN_PARTS


@pytest.mark.parametrize("name", sorted(set(MODELS) - OPEN_PARTS))
def test_a_model_has_the_fields_of_its_document(name: str) -> None:
    ours = MODELS[name].model_json_schema(ref_template="#/components/schemas/{model}")
    theirs = SCHEMAS[name]

    assert differences(ours["properties"], theirs["properties"]) == []
    # What the API may leave out, the SDK does not ask for; what it promises, the SDK may rely on.
    assert set(ours.get("required", ())) <= set(theirs.get("required", ()))


@pytest.mark.parametrize("name", sorted(BODIES))
def test_a_request_has_the_fields_of_its_body(name: str) -> None:
    ours = _fields(getattr(models, name))
    theirs = {field: part for field, part in SCHEMAS[name]["properties"].items() if field not in BODIES[name]}

    # The SDK takes a JSON object where the API has a spec of its own.
    assert differences(ours, {field: _opened(part) for field, part in theirs.items()}) == []


def _fields(keywords: type) -> dict[str, Any]:
    """The schemas of a TypedDict's members."""
    members: dict[str, Any] = {name: (kind, ...) for name, kind in typing.get_type_hints(keywords).items()}
    properties: dict[str, Any] = create_model(keywords.__name__, **members).model_json_schema()["properties"]
    return properties


def _opened(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("$ref", "").endswith("TasksSpec"):
        return {"type": "object"}
    return {**schema, "anyOf": [_opened(part) for part in schema["anyOf"]]} if "anyOf" in schema else schema


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_filters_are_the_parameters_of_their_operation(name: str) -> None:
    ours = _fields(getattr(models, name))
    theirs = _parameters("get", FILTERS[name])

    assert differences(_present(ours), _present(theirs)) == []


def test_the_options_of_an_import_are_its_parameters() -> None:
    ours = _fields(models.ImportOptions)

    assert differences(_present(ours), _present(_parameters("post", "/v1/experience/import"))) == []


def _parameters(method: str, path: str) -> dict[str, Any]:
    found = OPENAPI["paths"][path][method]["parameters"]
    return {each["name"]: each["schema"] for each in found if each["in"] == "query" and each["name"] not in ARGUMENTS}


def _present(fields: dict[str, Any]) -> dict[str, Any]:
    """Without null: a filter that is None is not sent."""
    return {
        name: {"anyOf": [part for part in schema.get("anyOf", [schema]) if part.get("type") != "null"]}
        for name, schema in fields.items()
    }


def test_the_scores_of_an_evaluation_are_those_that_the_orchestrator_writes() -> None:
    score = models.ProblemScore(
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
    written = scoring.summary(task, [scoring.ProblemScore(**score.model_dump())])

    assert models.EvaluationResult.model_validate(written).model_dump() == written


def test_a_newer_api_may_answer_more_and_nothing_of_it_is_lost() -> None:
    document = example(SCHEMAS["JobSummary"]) | {"new_field": {"nested": 1}}

    assert parsed(models.JobSummary, document).model_dump(mode="json") == document


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
