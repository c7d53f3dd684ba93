"""Answers at the real judge: decided at once, whatever the workers do, and kept apart from programs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from concurrent.futures import Future

import psutil
import pytest
import redis

from services.sandbox_judge.comparison_child import Finding
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.scoring import ComparisonPool
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler, JudgeService
from spo.errors import InvalidInput
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.spec.job_spec import RewardSpec
from spo.spec.reward import reward_of
from spo.tasks.problem import Problem
from spo.tasks.records import Record, jsonl_problem
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import JudgeRequest, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub, add_JudgeServiceServicer_to_server
from spo.v1.verdict_pb2 import AnswerRule, Outcome, Verdict

ACCEPTED, WRONG = Outcome.OUTCOME_ACCEPTED, Outcome.OUTCOME_WRONG_ANSWER


@pytest.fixture
def judge(redis_client: redis.Redis) -> Iterator[RpcClient]:
    # Without a worker no program is ever judged: answers need none.
    scheduler = JudgeScheduler(redis_client, Settings(), choose_tier(Settings()), workers=0)
    server = RpcServer("127.0.0.1", 0)
    add_JudgeServiceServicer_to_server(JudgeService(scheduler), server.server)
    server.start()
    client = RpcClient("sandbox-judge", server.address, JudgeServiceStub)
    yield client
    client.close()
    server.stop(1)
    scheduler.close(1)


def problem_of(**answer: object) -> Problem:
    return jsonl_problem(Record("a.jsonl, line 1", {"statement": "12 + 45 =", "answer": answer}))


def judged(judge: RpcClient, problem: Problem, responses: list[str], **fields: object) -> list[Verdict]:
    digests = judge.call("UploadTests", UploadTestsRequest(test_sets=[problem.tests])).digests
    assert list(digests) == [problem.tests_digest]
    request = JudgeRequest(language=problem.language, tests_digest=digests[0], **fields)
    raw = [response.encode("utf-8", "surrogateescape") for response in responses]
    request.raw_programs.extend(raw)
    return list(judge.call("Judge", request, deadline_seconds=30).verdicts)


def test_answers_get_their_verdicts_in_order_with_a_reason_and_no_worker(judge: RpcClient) -> None:
    problem = problem_of(expected=["57"], comparison="numeric", extraction="first_line")

    verdicts = judged(judge, problem, [" 57\n1 + 1 = 3", "58", "", "57.0", "58", "\udcff"])

    assert [verdict.outcome for verdict in verdicts] == [ACCEPTED, WRONG, WRONG, ACCEPTED, WRONG, WRONG]
    assert [verdict.detail for verdict in verdicts[:3]] == [
        "",
        "expected '57', found '58'",
        "no answer found: the response is empty",
    ]
    assert all(verdict.judge_version and verdict.tests_total == 1 and not verdict.isolation for verdict in verdicts)
    assert [verdict.tests_passed for verdict in verdicts] == [1, 0, 0, 1, 0, 0]


def test_details_are_one_result_and_a_response_of_any_size_is_judged(judge: RpcClient) -> None:
    problem = problem_of(expected=["1"], extraction="boxed")

    right, too_long = judged(judge, problem, ["\\boxed{1}", "\\boxed{" * 100_000], want_details=True)

    assert (right.tests[0].outcome, right.tests[0].output) == (ACCEPTED, "\\boxed{1}")
    assert too_long.outcome == too_long.tests[0].outcome == WRONG
    assert "at most 65536 are judged" in too_long.detail


@pytest.mark.parametrize(
    ("test_set", "pointer"),
    [
        (verdict_pb2.TestSet(answer=AnswerRule(comparison=1, extraction=1)), "/answer/expected"),
        (verdict_pb2.TestSet(answer=AnswerRule(expected=["x"], comparison=2, extraction=1)), "/answer/expected/*"),
        (verdict_pb2.TestSet(answer=AnswerRule(expected=["Paris"], comparison=3, extraction=1)), "/answer/expected/*"),
        (verdict_pb2.TestSet(answer=AnswerRule(expected=["a("], comparison=4, extraction=1)), "/answer/expected/*"),
        (verdict_pb2.TestSet(answer=AnswerRule(expected=["[]"], comparison=5, extraction=1)), "/answer/expected/*"),
        (verdict_pb2.TestSet(answer=AnswerRule(expected=["x"], comparison=0, extraction=1)), "/answer/comparison"),
        (verdict_pb2.TestSet(answer=AnswerRule(expected=["x"], comparison=1, extraction=99)), "/answer/extraction"),
        (verdict_pb2.TestSet(answer=AnswerRule(expected=["x"], comparison=1, extraction=4)), "/answer/marker"),
        (
            verdict_pb2.TestSet(
                answer=AnswerRule(expected=["x"], comparison=1, extraction=1), tests=[verdict_pb2.TestCase()]
            ),
            "/tests",
        ),
    ],
)
def test_a_rule_that_decides_nothing_is_refused_by_field(
    judge: RpcClient, test_set: verdict_pb2.TestSet, pointer: str
) -> None:
    with pytest.raises(InvalidInput) as raised:
        judge.call("UploadTests", UploadTestsRequest(test_sets=[test_set]))

    assert [fault.pointer for fault in raised.value.violations] == [pointer]


def test_choices_expressions_and_schemas_decide(judge: RpcClient) -> None:
    choice = problem_of(expected=["B"], comparison="choice", extraction="boxed")
    date = problem_of(expected=[r"\d{4}-\d\d-\d\d"], comparison="regular_expression", extraction="first_line")
    schema = '{"type": "object", "required": ["a"]}'
    document = problem_of(expected=[schema], comparison="json_schema", extraction="xml_tag", marker="json")

    found = [
        *judged(judge, choice, [r"\boxed{(b)}", r"\boxed{A or B}"]),
        *judged(judge, date, ["2024-02-29\nis it", "29.2.2024", "\udcff"]),
        *judged(judge, document, ['<json>{"a": "\udcff"}</json>', "<json>{}</json>"]),
    ]

    assert [verdict.outcome for verdict in found] == [ACCEPTED, WRONG, ACCEPTED, WRONG, WRONG, ACCEPTED, WRONG]
    assert found[-1].detail == "$: 'a' is a required property"
    assert all(verdict.judge_version for verdict in found)


def test_an_answer_on_which_an_expression_runs_for_ever_is_cut_and_others_are_compared(judge: RpcClient) -> None:
    problem = problem_of(expected=["(a+)+"], comparison="regular_expression")

    before = time.process_time()
    verdicts = judged(judge, problem, ["aaa", "a" * 40 + "b", "b", "a" * 60_000])

    assert [verdict.outcome for verdict in verdicts] == [ACCEPTED, Outcome.OUTCOME_CPU_TIME_LIMIT, WRONG, ACCEPTED]
    assert "more than 1 s of processor time" in verdicts[1].detail
    assert time.process_time() - before < 0.8, "it ran in a process of its own"


def test_a_schema_that_cannot_decide_is_an_error_and_never_a_wrong_answer(judge: RpcClient) -> None:
    problem = problem_of(expected=['{"$ref": "#/$defs/missing"}'], comparison="json_schema")

    (verdict,) = judged(judge, problem, ["1"])

    assert verdict.outcome == Outcome.OUTCOME_INTERNAL_ERROR
    assert "refers to what is not there" in verdict.detail
    with pytest.raises(InvalidInput):
        reward_of(verdict, RewardSpec())


def test_a_process_that_dies_is_replaced(redis_client: redis.Redis) -> None:
    pool = ComparisonPool()
    rule = AnswerRule(expected=["a"], comparison=4, extraction=1)

    def found(response: str) -> tuple[Finding, str]:
        futures: dict[str, Future[tuple[Finding, str]]] = {response: Future()}
        pool.compare(rule, futures, lambda _, finding, reason: (finding, reason))
        return futures[response].result(30)

    assert found("a") == (Finding.RIGHT, "")
    for child in psutil.Process().children(recursive=True):
        # Children of earlier tests may be ending, and show no command line then.
        with contextlib.suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if "comparison_child" in " ".join(child.cmdline()):
                child.kill()
                child.wait(10)
    assert found("b")[0] is Finding.WRONG
    pool.close()
