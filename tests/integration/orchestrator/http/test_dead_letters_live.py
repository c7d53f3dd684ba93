"""Dead letters over REST, SDK and command line of a really served orchestrator: listed, shown, redriven, dropped."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import redis

from services.orchestrator.container import AppContext
from spo import redis_keys
from spo.client import Client
from spo.errors import Conflict, InvalidInput, NotFound
from spo.messaging.streams.entries import counted_append_words
from spo.messaging.streams.recovery import StreamHolder
from spo.messaging.streams.stage import Consumer
from spo.spec.job_spec import parse_job_spec
from spo.spec.section import JobState
from spo.testing.runs import judged_group
from tests.support import command_line

OPERATOR_KEY = "the-operators-own-key"
VERDICTS = redis_keys.verdicts()


@pytest.fixture
def context(open_context: Callable[..., AppContext]) -> AppContext:
    return open_context(api_key=OPERATOR_KEY)


@pytest.fixture
def url(context: AppContext, serve: Callable[[AppContext], str]) -> str:
    return serve(context)


def submitted(context: AppContext, document: dict[str, Any], tenant: str = "") -> str:
    job_id = context.jobs.submit(parse_job_spec(document), tenant=tenant)
    for state in (JobState.VALIDATING, JobState.ESTIMATING, JobState.RUNNING):
        context.jobs.transition(job_id, state, "test")
    return job_id


def give_up(client: redis.Redis, run_id: str, *payloads: bytes) -> None:
    for payload in payloads:
        words = (
            counted_append_words(VERDICTS, payload, run_id) if run_id else [("XADD", VERDICTS, "*", "payload", payload)]
        )
        for command in words:
            client.execute_command(*command)
    consumer = Consumer(client, VERDICTS, redis_keys.INGEST_GROUP, "i", holder=StreamHolder())
    for entry in consumer.read(len(payloads), 0.1):
        consumer.dead_letter(entry, "cannot be learnt from")


def test_a_tenant_lists_shows_redrives_and_drops_the_letters_of_its_job_and_of_no_other(
    context: AppContext, url: str, document: dict[str, Any], redis_client: redis.Redis
) -> None:
    job_id, other = submitted(context, document, "red"), submitted(context, document, "blue")
    group = judged_group([0, 1], run_id=job_id).SerializeToString()
    give_up(redis_client, job_id, group, b"\xff malformed", group)
    give_up(redis_client, other, b"of blue")
    give_up(redis_client, "", b"of nobody")
    with Client(url, OPERATOR_KEY) as operator:
        scopes = ["jobs:read", "jobs:write", "trajectories:read"]
        token = operator.platform.create_key("ada", "red", scopes).token
        (jobless,) = operator.dead_letters.newest()
        assert (jobless.job_id, jobless.stream) == (None, "verdicts")
        assert operator.dead_letters.get(jobless.id).message is None

    with Client(url, token) as ada:
        letters = ada.dead_letters.newest(job_id)
        assert [(letter.job_id, letter.stream, letter.reason) for letter in letters] == [
            (job_id, "verdicts", "cannot be learnt from")
        ] * 3
        assert ada.dead_letters.newest(job_id, limit=1) == letters[:1]
        assert ada.dead_letters.newest(job_id, "rollouts") == []
        assert ada.dead_letters.totals(job_id)["verdicts"].given_up == 3
        shown = ada.dead_letters.get(letters[0].id, job_id)
        assert shown.message is not None
        assert shown.message["request"]["run_id"] == job_id
        assert ada.dead_letters.get(letters[1].id, job_id).message is None

        assert ada.dead_letters.redrive(letters[0].id, job_id)
        assert not ada.dead_letters.redrive(letters[0].id, job_id), "asked for twice it happens once"
        ada.dead_letters.drop(letters[1].id, job_id)
        assert [letter.id for letter in ada.dead_letters.newest(job_id)] == [letters[2].id]
        assert ada.dead_letters.totals(job_id)["verdicts"].given_up == 2, "a dropped one stays counted"
        assert redis_client.xlen(VERDICTS) == 1

        with pytest.raises(NotFound):
            ada.dead_letters.get(letters[1].id, job_id)
        with pytest.raises(NotFound):
            ada.dead_letters.newest(other)
        with pytest.raises(NotFound):
            ada.dead_letters.get(jobless.id, job_id)
        with pytest.raises(InvalidInput, match="admin"):
            ada.dead_letters.newest()


def test_pages_of_letters_go_through_all_streams(
    context: AppContext, url: str, document: dict[str, Any], redis_client: redis.Redis
) -> None:
    job_id = submitted(context, document)
    give_up(redis_client, job_id, *(str(number).encode() for number in range(7)))
    judges = {
        redis_keys.rollouts(): redis_keys.JUDGE_GROUP,
        redis_keys.verifier_rollouts(): redis_keys.VERIFIER_GROUP,
    }
    for stream, group in judges.items():
        for words in counted_append_words(stream, b"rollout", job_id):
            redis_client.execute_command(*words)
        judge = Consumer(redis_client, stream, group, "j", holder=StreamHolder())
        judge.dead_letter(judge.read(1, 0.1)[0], "no group")

    found, cursor = [], None
    with Client(url, OPERATOR_KEY) as client:
        while cursor != "":
            page = client._connection.content(
                "GET", f"/v1/jobs/{job_id}/dead-letters", params={"limit": 3, "cursor": cursor or ""}
            )
            found += [letter["id"] for letter in page["items"]]  # type: ignore[index]
            cursor = page["next_cursor"] or ""  # type: ignore[index]
        assert found == [letter.id for letter in client.dead_letters.newest(job_id)]
        for letter_id in found:
            client.dead_letters.drop(letter_id, job_id)
        assert client.dead_letters.newest(job_id) == []
    assert (len(found), len(set(found))) == (9, 9)
    assert [letter_id.split("-")[0] for letter_id in found[:3]] == ["rollouts", "verifier_rollouts", "verdicts"]


def test_a_job_that_has_ended_has_no_use_for_its_letters(
    context: AppContext, url: str, document: dict[str, Any], redis_client: redis.Redis
) -> None:
    job_id = submitted(context, document)
    give_up(redis_client, job_id, b"x")
    context.jobs.fail(job_id, "internal", "test")
    with Client(url, OPERATOR_KEY) as client:
        (letter,) = client.dead_letters.newest(job_id)
        with pytest.raises(Conflict, match="failed"):
            client.dead_letters.redrive(letter.id, job_id)


def test_letters_are_redriven_and_dropped_on_the_command_line(
    context: AppContext, url: str, document: dict[str, Any], redis_client: redis.Redis
) -> None:
    job_id = submitted(context, document)
    give_up(redis_client, job_id, b"1", b"2", b"3")

    def spo(*arguments: str) -> str:
        environment = {"SPO_API_URL": url, "SPO_API_KEY": OPERATOR_KEY}
        done = command_line.spo("dead-letters", *arguments, environment=environment)
        assert done.returncode == 0, done.stderr
        return done.stdout

    listed = spo("list", "--job", job_id)
    assert "cannot be learnt from" in listed
    assert "verdicts: 3 given up on" in listed
    letter = next(word for word in listed.split() if word.startswith("verdicts-"))
    assert "cannot be learnt from" in spo("show", letter, "--job", job_id)
    redriven = json.loads(spo("redrive", letter, "--job", job_id, "-o", "json"))
    assert redriven == [{"id": letter, "redriven": True}]
    assert len(json.loads(spo("drop", "--all", "--job", job_id, "-o", "json"))) == 2
    assert redis_client.xlen(VERDICTS) == 1
    assert redis_client.xlen(redis_keys.dead_letters(VERDICTS)) == 0
