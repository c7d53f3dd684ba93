"""Whatever passes our bounds is taken by the engine: the installed vLLM's own SamplingParams, built at each bound."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from services.inference.episodes import sample_requests
from services.orchestrator.http.training import CompletionRequest, EvaluationRequest
from spo.errors import InvalidInput
from spo.spec.job_spec import JobSpec, parse_job_spec
from spo.spec.section import HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE, Temperature, TopP
from spo.v1.prompt_pb2 import Sampling

Document = dict[str, Any]
JOB_ID = "job_01ARZ3NDEKTSV4RRFFQ69G5FAV"


def bounds(annotation: Any) -> list[float]:
    """The least and the greatest number that an annotated type takes."""
    schema = TypeAdapter(annotation).json_schema()
    return [schema["minimum"], schema["maximum"]]


def sampling(**fields: Any) -> Sampling:
    chosen = {"samples": 3, "temperature_min": 1.0, "temperature_max": 1.0, "top_p": 1.0, "max_tokens": 8, "seed": 5}
    return Sampling(**{**chosen, **fields})


def params_of(request: Sampling) -> list[SamplingParams]:
    """What the engine builds for the group, as services.inference.engine does."""
    return [
        SamplingParams(temperature=each.temperature, top_p=each.top_p, max_tokens=each.max_tokens, seed=each.seed)
        for each in sample_requests((1, 2), request)
    ]


@pytest.mark.parametrize("temperature", [0.0, *bounds(Temperature)])
def test_the_engine_samples_at_exactly_each_temperature_that_passes(temperature: float) -> None:
    made = params_of(sampling(temperature_min=temperature, temperature_max=temperature))

    # Single precision on the wire; the engine would lift anything below its lowest temperature.
    assert [each.temperature for each in made] == pytest.approx([temperature] * 3, rel=1e-6)


@pytest.mark.parametrize("top_p", bounds(TopP))
@pytest.mark.parametrize(
    "tokens", [1, JobSpec.model_json_schema()["$defs"]["ModelSpec"]["properties"]["max_response_tokens"]["maximum"]]
)
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_engine_takes_every_other_bound(top_p: float, tokens: int, seed: int) -> None:
    for each in params_of(sampling(top_p=top_p, max_tokens=tokens, seed=seed)):
        assert each.top_p == pytest.approx(top_p)
        assert each.max_tokens == tokens


def test_the_bounds_are_the_engines_own() -> None:
    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=float(np.nextafter(HIGHEST_TEMPERATURE, 3)))
    with pytest.raises(VLLMValidationError, match="temperature"):
        SamplingParams(temperature=-0.01)
    with pytest.raises(VLLMValidationError, match="top_p"):
        SamplingParams(top_p=0.0)
    # Below the lowest it says nothing and samples hotter.
    assert SamplingParams(temperature=LOWEST_TEMPERATURE / 2).temperature == LOWEST_TEMPERATURE


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature_min": 2.1, "temperature_max": 2.1},
        {"temperature_max": 3.3},
        {"temperature_min": 0.0},
        {"temperature_min": 0.005},
        {"temperature_min": float("nan")},
        {"temperature_max": float("inf")},
        {"top_p": 1e-60},
    ],
)
def test_what_the_engine_would_refuse_or_change_is_refused_before_it(fields: Document) -> None:
    with pytest.raises(InvalidInput):
        sample_requests((1, 2), sampling(**fields))


SPECS = [
    ("/rollout/temperature", lambda value: {"rollout": {"temperature": value}}),
    ("/rollout/temperature/0", lambda value: {"rollout": {"temperature": [value, value]}}),
    ("/value/temperature", lambda value: {"value": {"temperature": value}}),
    ("/value/retry_temperature", lambda value: {"value": {"retry_temperature": value}}),
    ("/value/extra_temperature/0", lambda value: {"value": {"extra_temperature": [value, value]}}),
    ("/evaluation/temperature", lambda value: {"evaluation": {"temperature": value}}),
]


@pytest.mark.parametrize(("pointer", "document"), SPECS, ids=[pointer for pointer, _ in SPECS])
def test_a_job_spec_ends_where_the_engine_does(pointer: str, document: Any) -> None:
    model = {"model": {"path": "/models/pi0"}}
    for value in (HIGHEST_TEMPERATURE, LOWEST_TEMPERATURE):
        assert parse_job_spec({**model, **document(value)})
    for value in (2.01, 3.3, 5, 0.0, 0.009, float("nan")):
        with pytest.raises(InvalidInput) as caught:
            parse_job_spec({**model, **document(value)})
        assert any(fault.pointer.startswith(pointer.removesuffix("/0")) for fault in caught.value.violations)


def test_a_range_of_extra_samples_is_ordered() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_job_spec({"model": {"path": "/models/pi0"}, "value": {"extra_temperature": [0.8, 0.1]}})

    assert [fault.pointer for fault in caught.value.violations] == ["/value/extra_temperature"]


@pytest.mark.parametrize(
    ("kind", "rest"), [(EvaluationRequest, {"job_id": JOB_ID}), (CompletionRequest, {"prompt": "a prompt"})]
)
def test_requests_over_rest_end_there_too(kind: Any, rest: Document) -> None:
    assert kind.model_validate({**rest, "temperature": HIGHEST_TEMPERATURE})
    for fields in ({"temperature": 3.3}, {"temperature": 0}, {"top_p": 1e-60}, {"top_p": 1.01}):
        with pytest.raises(ValidationError):
            kind.model_validate({**rest, **fields})
