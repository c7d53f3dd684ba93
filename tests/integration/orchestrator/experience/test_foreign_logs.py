"""Logs of other programs over a live orchestrator: a map of their fields, and the best reward they have."""

from __future__ import annotations

import json

import httpx

from spo.spec.job_spec import TasksSpec
from spo.tasks.load import load_tasks

TASKS = {"kind": "toy", "train_problems": 6, "evaluation_problems": 3}


def put(api: httpx.Client, body: bytes, **options: str) -> httpx.Response:
    parameters = {"name": "logs", "tasks": json.dumps(TASKS), **options}
    headers = {"Content-Type": "application/x-ndjson"}
    return api.post("/v1/experience/import", params=parameters, content=body, headers=headers)


def test_they_come_in_by_a_map_of_fields_and_their_best_reward(api: httpx.Client) -> None:
    problem = load_tasks(TasksSpec.model_validate(TASKS)).train[0]
    row = {"asked": [{"text": problem.statement}], "said": "an answer", "score": 0.25, "other": "unread"}
    fields = {"statement": "asked.-1.text", "response_text": "said", "reward": "score"}
    body = json.dumps(row).encode()

    imported = put(api, body, fields=json.dumps(fields), reward_best="1")

    assert imported.status_code == 201, imported.text
    (found,) = api.get("/v1/experience/rows", params={"run": "logs"}).json()["items"]
    assert (found["prompt_id"], found["reward"]) == (problem.problem_id, -0.75)
    refused = put(api, body, fields=json.dumps({"nobody": "said"}))
    assert (refused.status_code, refused.json()["code"]) == (422, "bad_mapping")
    assert put(api, body, fields="[1]").json()["code"] == "bad_mapping"


def test_a_known_log_is_named_and_what_it_lacks_is_mapped(api: httpx.Client) -> None:
    problem = load_tasks(TasksSpec.model_validate(TASKS)).train[0]
    asked = json.dumps({"messages": [{"role": "user", "content": problem.statement}]})
    row = {"id": "obs-1", "type": "GENERATION", "input": asked, "output": "an answer", "scores": {"helpful": 1}}

    imported = put(
        api, json.dumps(row).encode(), log="langfuse", fields='{"reward": "scores.helpful"}', reward_best="1"
    )

    assert imported.status_code == 201, imported.text
    (found,) = api.get("/v1/experience/rows", params={"run": "logs"}).json()["items"]
    assert (found["prompt_id"], found["reward"]) == (problem.problem_id, 0.0)
    assert put(api, b"{}", log="nobody").status_code == 422
