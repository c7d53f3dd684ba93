"""Jobs are renamed whatever their state, and deleted several at once; both by REST, SDK and command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from services.orchestrator.container import AppContext
from services.orchestrator.evaluation import ScheduledEvaluation
from services.orchestrator.job_records import JobFilter, report_writes
from services.orchestrator.jobs import find_jobs
from spo.cli.app import app
from spo.client import Client
from spo.console import ExitCode
from spo.errors import InvalidInput, NotFound

ABSENT = "job_01J00000000000000000000000"


@pytest.fixture
def client(api: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("SPO_API_URL", str(api.base_url))
    with Client(str(api.base_url)) as client:
        yield client


def test_a_renamed_job_is_found_by_its_new_name_and_keeps_its_spec(
    context: AppContext, client: Client, document: dict[str, Any]
) -> None:
    job_id = client.submit(document).id

    assert client.rename(job_id, "the good one").name == "the good one"
    client.rename(job_id, "the good one")

    assert client.get(job_id).spec["name"] == "test job"
    assert find_jobs(context.jobs, JobFilter(), "good one", None, 10).job_ids == [job_id]
    assert [event.body for event in client.history(job_id) if event.kind == "renamed"] == [{}]
    with pytest.raises(InvalidInput) as refused:
        client.rename(job_id, "")
    assert refused.value.violations[0].pointer == "/name"
    with pytest.raises(NotFound):
        client.rename(ABSENT, "x")


def test_of_many_jobs_those_that_ended_are_deleted_and_the_others_named(
    client: Client, document: dict[str, Any]
) -> None:
    ended, running = client.submit(document).id, client.submit(document).id
    client.cancel(ended)

    told = client.delete_jobs([ended, running, ABSENT, ended])

    assert told.deleted == [ended]
    assert {each.id: each.code for each in told.refused} == {running: "illegal_transition", ABSENT: "job_not_found"}
    assert [job.id for job in client.jobs()] == [running]
    # Again: nothing more happens.
    assert client.delete_jobs([ended]).refused[0].code == "job_not_found"


def test_another_tenants_job_is_as_one_that_never_was(
    open_context: Callable[..., AppContext], serve: Callable[[AppContext], str], document: dict[str, Any]
) -> None:
    url = serve(open_context(api_key="operators-own-key"))
    with Client(url, "operators-own-key") as client:
        job_id = client.submit(document).id
        client.cancel(job_id)
        key = client.platform.create_key("ada", "red", ["jobs:read", "jobs:write"])
    with Client(url, key.token) as stranger:
        assert [each.code for each in stranger.delete_jobs([job_id]).refused] == ["job_not_found"]
        with pytest.raises(NotFound):
            stranger.rename(job_id, "mine")


def test_the_command_line_renames_deletes_and_lists_metrics(
    context: AppContext, client: Client, document: dict[str, Any]
) -> None:
    first, second = (client.submit(document).id for _ in range(2))
    context.jobs.write(*report_writes(first, [(3, {"reward": -0.25, "loss": float("nan")})]))
    score = {"value": 0.5, "low": 0.4, "high": 0.6}
    context.evaluations.schedule.store(ScheduledEvaluation(first, 0, 0), {"pass_at_k": {"10": score}})
    client.cancel(first)
    run = CliRunner().invoke

    assert run(app, ["job", "rename", first, "other"], catch_exceptions=False).exit_code == 0
    listed = run(app, ["job", "list", "--metric", "reward", "--metric", "pass@10"]).stdout
    refused = run(app, ["job", "delete", first, second])

    assert "other" in listed
    assert "-0.25" in listed
    assert "0.5" in listed
    assert client.get(second).metrics == {}
    assert refused.exit_code == ExitCode.CONFLICT
    assert first in refused.stdout
    assert [job.id for job in client.jobs()] == [second]
