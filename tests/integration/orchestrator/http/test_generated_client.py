"""A client that openapi-python-client makes of docs/openapi.json: it has every operation, and drives a job."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx

from tests.support.foreign_clients import environment_of_clients, run_in_clients

ROOT = Path(__file__).parents[4]
METHODS = ("get", "post", "put", "patch", "delete")
SECONDS = 200

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

    operations = [
        operation["operationId"]
        for path in json.loads(described.read_text())["paths"].values()
        for method, operation in path.items()
        if method in METHODS
    ]
    functions = [path.stem for path in (tmp_path / "client" / "api").glob("*/*.py") if path.stem != "__init__"]
    assert sorted(functions) == sorted(operations)
    (tmp_path / "spec.json").write_text(json.dumps(document))
    assert "driven" in run_in_clients(DRIVES_A_JOB, str(api.base_url), folder=tmp_path)
