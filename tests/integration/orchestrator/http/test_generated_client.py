"""Clients that openapi-python-client and openapi-generator make of docs/openapi.json: each drives a job."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.foreign_clients import environment_of_clients, run_in_clients

ROOT = Path(__file__).parents[4]
METHODS = ("get", "post", "put", "patch", "delete")
SECONDS, SECONDS_OF_JAVA = 200, 600

DRIVES_A_JOB = """
import json, sys
from client import Client
from client.api.events import events
from client.api.jobs import cancel, change_job, delete_job, get_job, list_jobs, submit
from client.api.serving import plain_completion
from client.models import JobSpec, PlainRequest, ProblemDocument, JobChange
url, document = sys.argv[1], json.load(open("spec.json"))
with Client(base_url=url) as client:
    wrong = submit.sync(client=client, body=JobSpec.from_dict({**document, "name": "x" * 1000}))
    assert isinstance(wrong, ProblemDocument) and wrong.errors[0].pointer == "/name", wrong
    job = submit.sync(client=client, body=JobSpec.from_dict(document), idempotency_key="once")
    again = submit.sync(client=client, body=JobSpec.from_dict(document), idempotency_key="once")
    assert job.id == again.id and job.spec["tasks"]["kind"] == "toy", (job, again)
    assert [each.id for each in list_jobs.sync(client=client).items] == [job.id]
    assert change_job.sync(job.id, client=client, body=JobChange(name="renamed")).name == "renamed"
    assert cancel.sync(job.id, client=client).state == "cancelled"
    told = events.sync_detailed(job.id, client=client)
    assert told.status_code == 200, told
    unserved = plain_completion.sync_detailed(client=client, body=PlainRequest(model=job.id, prompt="x", max_tokens=1))
    assert unserved.status_code == 503, unserved
    assert delete_job.sync_detailed(job.id, client=client).status_code == 204
    assert get_job.sync_detailed(job.id, client=client).status_code == 404
print("driven")
"""

# The same by the other generator's classes; what is refused is an exception there.
DRIVES_A_JOB_TOO = """
import json, sys
import made
url, document = sys.argv[1], json.load(open("spec.json"))
with made.ApiClient(made.Configuration(host=url)) as client:
    jobs = made.JobsApi(client)
    try:
        jobs.submit(made.JobSpec.from_dict({**document, "seed": 10**18, "labels": {"k" * 300: "v"}}))
    except made.ApiException as refused:
        assert refused.status == 422 and "/labels" in refused.body, refused
    else:
        raise AssertionError("a label of 300 characters was taken")
    job = jobs.submit(made.JobSpec.from_dict(document), idempotency_key="once")
    again = jobs.submit(made.JobSpec.from_dict(document), idempotency_key="once")
    assert job.id == again.id and job.spec["tasks"]["kind"] == "toy", (job, again)
    assert [each.id for each in jobs.list_jobs().items] == [job.id]
    assert jobs.change_job(job.id, made.JobChange(name="renamed")).name == "renamed"
    assert jobs.cancel(job.id).state == "cancelled"
    unserved = made.PlainRequest(model=job.id, prompt=made.Prompt("x"), max_tokens=1)
    try:
        made.ServingApi(client).plain_completion(unserved)
    except made.ApiException as refused:
        assert refused.status == 503, refused
    jobs.delete_job(job.id)
    try:
        jobs.get_job(job.id)
    except made.ApiException as gone:
        assert gone.status == 404, gone
        print("driven")
"""
METHOD = re.compile(r"^    def (?!_)(\w+?)(?:_with_http_info|_without_preload_content)?\($", re.MULTILINE)


def operations_of(described: Path) -> list[str]:
    """The ids of the document's operations."""
    return [
        operation["operationId"]
        for path in json.loads(described.read_text())["paths"].values()
        for method, operation in path.items()
        if method in METHODS
    ]


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.cpu_seconds(300)
def test_a_client_by_openapi_generator_has_every_operation_and_drives_a_job(
    api: httpx.Client, document: dict[str, Any], tmp_path: Path
) -> None:
    generator = environment_of_clients("openapi-generator-cli") / "openapi-generator-cli"
    described = ROOT / "docs" / "openapi.json"
    # It says what the document does not keep to before it writes anything.
    for command in (["validate"], ["generate", "-g", "python", "-o", tmp_path, "--package-name", "made"]):
        made = subprocess.run(
            [generator, *command, "-i", described],
            capture_output=True,
            text=True,
            timeout=SECONDS_OF_JAVA,
            check=False,
        )
        assert made.returncode == 0, made.stdout[-3000:] + made.stderr[-3000:]

    methods = {
        name for path in (tmp_path / "made" / "api").glob("*_api.py") for name in METHOD.findall(path.read_text())
    }
    assert methods == set(operations_of(described))
    (tmp_path / "spec.json").write_text(json.dumps(document))
    assert "driven" in run_in_clients(DRIVES_A_JOB_TOO, str(api.base_url), folder=tmp_path)


def test_a_generated_client_has_every_operation_and_drives_a_job(
    api: httpx.Client, document: dict[str, Any], tmp_path: Path
) -> None:
    programs = environment_of_clients()
    described = ROOT / "docs" / "openapi.json"
    command = [
        *(programs / "openapi-python-client", "generate", "--meta", "none", "--fail-on-warning"),
        *("--path", described, "--output-path", tmp_path / "client"),
        *("--config", ROOT / "docs" / "openapi-python-client.yml"),
    ]
    # It formats with ruff, which lies beside it.
    paths = {"PATH": f"{programs}:{os.environ['PATH']}"}
    made = subprocess.run(command, capture_output=True, text=True, env=os.environ | paths, timeout=SECONDS, check=False)
    assert made.returncode == 0, made.stdout + made.stderr

    functions = [path.stem for path in (tmp_path / "client" / "api").glob("*/*.py") if path.stem != "__init__"]
    assert sorted(functions) == sorted(operations_of(described))
    (tmp_path / "spec.json").write_text(json.dumps(document))
    assert "driven" in run_in_clients(DRIVES_A_JOB, str(api.base_url), folder=tmp_path)
