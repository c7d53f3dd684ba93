"""What is asked of value-estimation: all training problems, no held-out one, and solutions as the budget needs."""

from __future__ import annotations

from typing import Any

import pytest

from services.orchestrator.container import AppContext
from services.orchestrator.values import publish_estimates
from spo import redis_keys
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.v1.value_pb2 import EstimateRequest

Document = dict[str, Any]


def asked(context: AppContext, document: Document) -> list[EstimateRequest]:
    """The requests published for a job of this spec, across a restart."""
    job_id = context.jobs.submit(parse_job_spec(document), None)
    for state in (JobState.VALIDATING, JobState.ESTIMATING):
        context.jobs.transition(job_id, state, "test")
    for _ in range(2):
        publish_estimates(context.jobs, job_id, context.library.load(context.jobs.spec(job_id).tasks))
    entries: Any = context.redis.xrange(redis_keys.estimates())
    return [EstimateRequest.FromString(fields[b"payload"]) for _, fields in entries]


def test_evaluation_problems_are_never_estimated(context: AppContext, document: Document) -> None:
    requests = asked(context, document)

    tasks = context.library.load(parse_job_spec(document).tasks)
    assert [request.prompt.prompt_id for request in requests] == [problem.problem_id for problem in tasks.train]
    assert not {request.prompt.prompt_id for request in requests} & {each.problem_id for each in tasks.evaluation}


@pytest.mark.parametrize(
    ("value", "offline", "further"),
    [({}, True, False), ({"sequential": {}}, True, True), ({"sequential": {}}, False, False)],
    ids=["fixed number", "sequential", "no human data wanted"],
)
def test_further_right_programs_go_along_where_a_prior_is_learned_from_them(
    context: AppContext, document: Document, value: Document, offline: bool, further: bool
) -> None:
    mix = [{"source": "online", "share": 0.5}, {"source": "reference", "share": 0.5}]
    asking = {"value": value, "offline": {"human_solutions": offline}, "replay": {"mix": mix}}

    requests = asked(context, {**document, **asking})

    assert {bool(request.further_solutions) for request in requests} == {further}
    for request in requests:
        assert not set(request.further_solutions) & set(request.human_solutions)
