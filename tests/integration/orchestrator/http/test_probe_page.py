"""The submit page's probe: a job of no steps, and what its prompts page makes of the values."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

import httpx
import pytest
import yaml

from services.orchestrator.container import AppContext
from services.orchestrator.http.pages.jobs import VERIFIERS
from spo import redis_keys
from spo.spec.job_spec import parse_job_spec
from spo.v1.value_pb2 import PromptValue

RIGHT = (0, 8, 3, 5, 0)


def test_a_probe_is_a_job_of_no_steps_whose_prompts_say_what_can_be_learned_from(
    api: httpx.Client, context: AppContext, document: dict[str, Any]
) -> None:
    typed = {**document, "name": "mine", "tasks": {**document["tasks"], "train_problems": len(RIGHT)}}
    answer = api.post("/submit", content=urlencode({"spec": yaml.safe_dump(typed), "probe": "1"}))

    place = answer.headers["HX-Redirect"]
    job_id = place.split("/")[2]
    spec = context.jobs.spec(job_id)
    assert (spec.name, spec.trainer.steps, spec.value and spec.value.samples) == ("probe of mine", 0, 8)
    assert "What can be learned from" not in api.get(place).text

    train = context.library.load(spec.tasks).train
    for problem, successes in zip(train, RIGHT, strict=True):
        value = PromptValue(prompt_id=problem.problem_id, samples=8, successes=successes)
        context.redis.hset(redis_keys.run_values(job_id), problem.problem_id, value.SerializeToString())

    page = api.get(place).text
    assert "<strong>2</strong> learnable" in page
    assert "<strong>2</strong> unsolved" in page
    assert "<strong>1</strong> solved" in page
    assert "mean success <strong>0.400</strong>" in page
    assert "retry_hotter" in page


@pytest.mark.parametrize("kind", VERIFIERS)
def test_the_verifiers_that_the_page_offers_can_be_pasted(api: httpx.Client, kind: str) -> None:
    assert f"<h2>{kind}</h2>" in api.get("/submit").text
    tasks = {"kind": "toy", **yaml.safe_load(VERIFIERS[kind])}
    mix = [{"source": "online", "share": 0.5}, {"source": "reference", "share": 0.5}]

    spec = parse_job_spec({"model": {"path": "/models/pi0"}, "tasks": tasks, "replay": {"mix": mix}})

    assert spec.tasks.verifier.kind == kind
