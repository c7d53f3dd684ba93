"""Reward services at a real HTTP server: what is sent, what is an answer, what a hostile one brings about."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from services.verifier.http_scorer import signature_of
from services.verifier.settings import Settings
from services.verifier.stage import VerifierScheduler, VerifierService, VerifierWorker
from spo import redis_keys
from spo.cli.app import app
from spo.errors import InvalidInput, NotReady, SpoError
from spo.messaging.streams.entries import publish
from spo.rpc.server import RpcServer
from spo.testing.peers import wait_until
from spo.testing.runs import RUN, start_run
from spo.v1 import verdict_pb2 as wire
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING
from spo.v1.judge_service_pb2_grpc import add_JudgeServiceServicer_to_server
from spo.v1.prompt_pb2 import Prompt, PromptGroup
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from tests.integration.verifier.conftest import Reply, RewardServer, answer

Schedulers = Callable[..., VerifierScheduler]
HUGE = 5 << 20


def scored(scheduler: VerifierScheduler, url: str, responses: list[str], **fields: Any) -> list[wire.Verdict]:
    http = wire.HttpScore(url=url, arguments_json='{"expected":["57"]}', timeout_seconds=fields.pop("timeout", 5))
    digest = scheduler.test_sets.upload(wire.TestSet(http=http, **fields))
    return scheduler.submit(responses, "text", digest, PRIORITY_TRAINING).verdicts(20)


def test_batches_are_signed_and_carry_the_responses_the_arguments_and_a_key_that_repeats(
    server: RewardServer, schedulers: Schedulers
) -> None:
    refused_once = iter([answer(503)])
    server.reply = lambda asked: next(refused_once, answer(scores=[len(each) / 10 for each in asked["responses"]]))

    verdicts = scored(schedulers(http_secret="s3", http_batch=2, http_calls=1), server.url, ["a", "bbb", "a"])

    assert [verdict.score for verdict in verdicts] == [0.1, 0.3, 0.1]
    documents = [json.loads(body) for body in server.bodies]
    assert documents == [{"version": 1, "responses": ["a", "bbb"], "arguments": {"expected": ["57"]}}] * 2
    assert len({headers["idempotency-key"] for headers in server.headers}) == 1
    for headers, body in zip(server.headers, server.bodies, strict=True):
        assert headers["spo-signature"] == signature_of("s3", headers["spo-timestamp"], body)
        assert abs(int(headers["spo-timestamp"]) - time.time()) < 60


def test_scores_by_name_are_parts_and_their_mean_passes_or_not(server: RewardServer, schedulers: Schedulers) -> None:
    server.reply = lambda _: answer(scores=[{"style": 0.5, "truth": 1}, 0.7], details=["well", None])

    first, second = scored(schedulers(), server.url, ["a", "b"], pass_score=0.75)

    accepted = first.outcome == wire.OUTCOME_ACCEPTED, second.outcome == wire.OUTCOME_ACCEPTED
    assert (first.score, first.detail, accepted) == (0.75, "well", (True, False))
    assert [(part.name, part.score) for part in first.parts] == [("style", 0.5), ("truth", 1.0)]
    assert second.detail == "score 0.7; 0.75 passes"


def test_a_reward_service_is_tried_by_a_preview_before_a_job(
    server: RewardServer, schedulers: Schedulers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.reply = lambda asked: answer(scores=[float("57" in each) for each in asked["responses"]])
    door = RpcServer("127.0.0.1", 0)
    add_JudgeServiceServicer_to_server(VerifierService(schedulers()), door.server)
    door.start()
    monkeypatch.setenv("SPO_VERIFIER_ADDRESS", door.address)
    row = {"statement": "12 + 45?", "arguments": {"unit": "m"}, "human_solutions": ["57 m"], "wrong_solutions": ["58"]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    spec = tmp_path / "tasks.yaml"
    verifier = {"kind": "http", "url": server.url}
    tasks = {"kind": "jsonl", "path": str(tmp_path / "rows.jsonl"), "evaluation_problems": 0, "verifier": verifier}
    spec.write_text(json.dumps({"tasks": tasks}))

    tried = CliRunner().invoke(app, ["tasks", "preview", str(spec), "-o", "json"])
    server.reply = lambda asked: answer(scores=[1.0] * len(asked["responses"]))
    generous = CliRunner().invoke(app, ["tasks", "preview", str(spec)])
    server.reply = lambda _: answer(404)
    absent = CliRunner().invoke(app, ["tasks", "preview", str(spec)])
    door.stop(1)

    assert tried.exit_code == 0, tried.output
    (shown,) = json.loads(tried.stdout)
    assert (shown["right"]["outcome"], shown["wrong"]["outcome"]) == ("accepted", "wrong_answer")
    sent = json.loads(server.bodies[0])
    assert sent["responses"] == ["57 m"]
    assert sent["arguments"]["unit"] == "m"
    assert generous.exit_code == 1
    assert "1 of 2 responses were judged otherwise than expected" in generous.output
    assert absent.exit_code == 1
    assert "status 404" in absent.output


def raw(content: bytes, **headers: str) -> Reply:
    return 200, content, headers


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (answer(scores=[1.0]), "answered 1 scores for 2 responses"),
        (answer(scores=[1.0] * 3), "answered 3 scores for 2 responses"),
        (answer(scores=[1.0, 0.5], details=["a"]), "answered 1 details"),
        (raw(b'{"scores": [1.0, NaN]}'), "scores[1] is nan"),
        (raw(b'{"scores": [1.0, 1e999]}'), "scores[1] is inf"),
        (raw(b'{"scores": [1.0, 1' + b"0" * 400 + b"]}"), "scores[1] is 1000"),
        (answer(scores=[1.0, 1.5]), "scores[1] is 1.5, not between 0 and 1"),
        (answer(scores=[-0.1, 1.0]), "scores[0] is -0.1"),
        (answer(scores=[True, 1.0]), "scores[0] is bool, not a number"),
        (answer(scores=["1", 1.0]), "scores[0] is str"),
        (answer(scores=[{}, 1.0]), "between 1 and 16 names"),
        (answer(scores=[{"a b": 1}, 1.0]), "between 1 and 16 names"),
        (answer(scores=None), "without a list of scores"),
        (raw(b"[1, 1]"), "no object"),
        (raw(b"<html>"), "no JSON"),
        (raw(b"[" * 100_000), "no JSON"),
        (raw(b" " * HUGE), "more than 4194304 bytes"),
        (raw(b"{}", **{"Content-Encoding": "gzip"}), "packed its answer"),
        (answer(404, detail="nothing here"), "status 404"),
        ((302, b"", {"Location": "http://169.254.169.254/"}), "status 302"),
    ],
)
def test_what_is_no_answer_is_an_error_with_its_name_and_never_a_score(
    server: RewardServer, schedulers: Schedulers, reply: Reply, said: str
) -> None:
    server.reply = lambda _: reply

    with pytest.raises(InvalidInput) as refused:
        scored(schedulers(), server.url, ["a", "b"])

    assert refused.value.code == "verifier_bad_answer"
    assert said in refused.value.message
    assert len(server.bodies) == 2, "it is tried again"


def test_a_service_that_hangs_is_cut_by_its_deadline(server: RewardServer, schedulers: Schedulers) -> None:
    def hang(_: dict[str, Any]) -> Reply:
        server.released.wait(20)
        return answer(scores=[1.0])

    server.reply = hang
    begun = time.monotonic()
    with pytest.raises(NotReady, match=r"did not answer within 0.2 s") as late:
        scored(schedulers(), server.url, ["a"], timeout=0.2)
    assert (late.value.code, time.monotonic() - begun < 5) == ("verifier_error", True)


def test_a_service_that_fails_in_a_row_is_left_alone_and_asked_again_later(
    server: RewardServer, schedulers: Schedulers
) -> None:
    server.reply = lambda _: answer(500, detail="out of memory")
    scheduler = schedulers(failures_to_rest=2, rest_seconds=0.3)
    failures = []
    for _ in range(3):
        with pytest.raises(SpoError) as failed:
            scored(scheduler, server.url, ["a"])
        failures.append(failed.value.code)

    assert failures == ["verifier_error", "verifier_away", "verifier_away"]
    assert len(server.bodies) == 2
    time.sleep(0.35)
    server.reply = lambda _: answer(scores=[1.0])
    assert scored(scheduler, server.url, ["a"])[0].score == 1.0


@pytest.mark.parametrize(
    ("fields", "url", "said"),
    [
        ({"verifier_http_hosts": []}, None, "SPO_VERIFIER_HTTP_HOSTS"),
        ({"http_networks": []}, None, "no public address"),
        ({"verifier_http_hosts": ["localhost"], "http_networks": []}, "http://localhost/score", "no public address"),
        ({}, "http://user@127.0.0.1/score", "without a user"),
        ({}, "ftp://127.0.0.1/score", "http or https"),
    ],
)
def test_an_address_that_is_not_allowed_is_not_called(
    server: RewardServer, schedulers: Schedulers, fields: dict[str, Any], url: str | None, said: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        scored(schedulers(**fields), url or server.url, ["a"])

    assert (refused.value.code, said in refused.value.message) == ("address_not_allowed", True)
    assert server.bodies == []


def test_a_group_that_a_service_fails_on_is_set_aside_with_its_reason_and_others_go_on(
    server: RewardServer, schedulers: Schedulers, redis_client: redis.Redis
) -> None:
    def reply(asked: dict[str, Any]) -> Reply:
        return answer(500, detail="poisoned") if "poison" in asked["responses"] else answer(scores=[1.0])

    server.reply = reply
    scheduler = schedulers(attempts=1, failures_to_rest=100)
    start_run(redis_client)
    digest = scheduler.test_sets.upload(wire.TestSet(http=wire.HttpScore(url=server.url)))
    prompt = Prompt(prompt_id="p", tests_digest=digest, verifier_pool="verifier")
    groups = [
        RolloutGroup(
            request=PromptGroup(run_id=RUN, group_id=text, prompt=prompt),
            trajectories=[Trajectory(trajectory_id=text, run_id=RUN, response_text=text)],
        ).SerializeToString()
        for text in ("good", "poison", "fine")
    ]
    stream = redis_keys.verifier_rollouts()
    publish(redis_client, stream, groups)
    stop = threading.Event()
    worker = VerifierWorker(redis_client, scheduler, "v-0", Settings(group_failures=2, reclaim_seconds=0.4))
    thread = threading.Thread(target=worker, args=(stop,), daemon=True)
    thread.start()
    wait_until(lambda: redis_client.xlen(redis_keys.dead_letters(stream)) == 1, "the poisoned group is set aside")
    wait_until(lambda: redis_client.xlen(redis_keys.verdicts()) == 2, "the others are scored")
    stop.set()
    thread.join(5)

    ((_, letter),) = redis_client.xrange(redis_keys.dead_letters(stream))
    assert b"failed 2 times" in letter[b"reason"]
    assert b"poisoned" in letter[b"reason"]
    assert redis_client.xlen(stream) == 0
