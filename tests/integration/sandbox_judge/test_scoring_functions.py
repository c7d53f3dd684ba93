"""People's scoring functions and those of libraries: scores with parts, and faults that never become a score."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.errors import InvalidInput
from spo.messaging.redis_client import connect
from spo.spec.reward import reward_of
from spo.spec.tasks import RewardSpec
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import Limits, Outcome, ScoringFunction, Verdict


@pytest.fixture(scope="module")
def judge(redis_server: str) -> Iterator[JudgeScheduler]:
    settings = Settings().model_copy(update={"recheck_rate": 0.0})
    with connect(redis_server) as client:
        client.flushdb()
        scheduler = JudgeScheduler(client, settings, choose_tier(settings), workers=1)
        yield scheduler
        scheduler.close(20)


def judged(
    judge: JudgeScheduler, source: str, *responses: str, want_details: bool = False, **fields: object
) -> list[Verdict]:
    pass_score = fields.pop("pass_score", 0.0)
    function = ScoringFunction(**{"source": source, "function": "score", **fields} if source else fields)
    limits = Limits(cpu_seconds=0.15, wall_seconds=0.5)
    test_set = verdict_pb2.TestSet(scoring_function=function, limits=limits, pass_score=pass_score)
    digest = judge.test_sets.upload(test_set)
    batch = judge.submit(responses, "text", digest, Priority.PRIORITY_TRAINING, want_details=want_details)
    return batch.verdicts(120)


def outcome_of(verdict: Verdict) -> str:
    return Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower()


def test_what_rounding_adds_to_a_sum_of_weights_is_no_fault(judge: JudgeScheduler) -> None:
    source = """
def score(response):
    total = 0.0
    for weight in (0.1, 0.2, 0.3, 0.4, 2e-16):
        total += weight
    if response == "parts":
        return {"sum": total, "least": -1e-17}
    return total if response == "sum" else 1 + 1e-6
"""
    whole, parts, beyond = judged(judge, source, "sum", "parts", "beyond", pass_score=0.5)

    assert (whole.score, outcome_of(whole)) == (1.0, "accepted")
    assert [part.score for part in parts.parts] == [1.0, 0.0]
    assert outcome_of(beyond) == "internal_error"
    assert "1.000001, not a number between 0 and 1" in beyond.detail


def test_a_function_gives_a_score_and_names_its_parts(judge: JudgeScheduler) -> None:
    source = """
def score(response, wanted, most=4):
    print("noise", response)
    return {"length": min(len(response), most) / most, "right": wanted in response}
"""
    fields = {"arguments_json": json.dumps({"wanted": "ab"}), "pass_score": 0.75}

    first, second, third = judged(judge, source, "ab", "abcd", "zz", want_details=True, **fields)

    assert [outcome_of(verdict) for verdict in (first, second, third)] == ["accepted", "accepted", "wrong_answer"]
    assert [verdict.score for verdict in (first, second, third)] == [0.75, 1.0, 0.25]
    assert {part.name: part.score for part in first.parts} == {"length": 0.5, "right": 1.0}
    assert (first.tests_passed, first.tests_total, third.tests_passed, third.tests_total) == (1, 1, 0, 1)
    assert third.detail == "score 0.25; 0.75 passes"
    assert third.tests[0].output == "zz"
    assert first.isolation


@pytest.mark.parametrize(("gives", "score"), [("1", 1.0), ("True", 1.0), ("0", 0.0), ("0.5", 0.5)])
def test_any_number_between_0_and_1_is_a_score(judge: JudgeScheduler, gives: str, score: float) -> None:
    (verdict,) = judged(judge, f"def score(response): return {gives}", "a")

    assert verdict.score == score
    assert outcome_of(verdict) == ("accepted" if score == 1 else "wrong_answer")


FAULTS = {
    "raise KeyError('nothing')": "score: KeyError: 'nothing'",
    "return float('nan')": "score: ValueError: the function gave nan, not a number between 0 and 1",
    "return float('inf')": "the function gave inf",
    "return 1.5": "the function gave 1.5",
    "return -1": "the function gave -1.0",
    "return '1'": "the function gave str, not a number",
    "return None": "the function gave NoneType, not a number",
    "return 'x' * (10 << 20)": "the function gave str, not a number",
    "return [1.0, 0.0]": "the function gave list, not a number",
    "return {}": "the function gave 0 parts",
    "return {str(n): 1 for n in range(1000)}": "the function gave 1000 parts",
    "return {'x' * 1000: 1}": "a part's name must be",
    "return {'a': float('nan')}": "the function's part 'a' is nan",
    "import os; os._exit(0)": "its process ended",
    "import sys; sys.exit(0)": "score: SystemExit: 0",
    "import os; os.abort()": "its process ended",
    "return bytearray(1 << 31)": "score: MemoryError",
    "import socket; socket.socket()": "PermissionError",
    "open('/etc/passwd').read()": "Error: [Errno",
    "while True: pass": "score: it took more than 0.15 s of CPU",
    "raise ValueError('x' * (10 << 20))": "score: ValueError: xxx",
    "import os; [os.write(n, b'[\"score\", 1, {}, 0]\\n' * 9) for n in (1, 5) if os.path.exists(f'/dev/fd/{n}')]": "",
}


@pytest.mark.parametrize("body", FAULTS)
def test_a_function_that_fails_is_named_and_scores_nobody(judge: JudgeScheduler, body: str) -> None:
    (verdict,) = judged(judge, f"def score(response):\n    {body}\n", "a")

    assert outcome_of(verdict) == "internal_error", verdict
    assert FAULTS[body] in verdict.detail
    assert len(verdict.detail) <= 500
    assert not verdict.tests_total
    with pytest.raises(InvalidInput) as refused:
        reward_of(verdict, RewardSpec())
    assert refused.value.code == "verifier_failed"
    assert verdict.detail in refused.value.message


@pytest.mark.parametrize(
    ("source", "detail"),
    [
        ("def other(response): return 1", "score: ValueError: the source does not define it"),
        ("def score(response) return 1", "score: SyntaxError"),
        ("import nothing_of_this_name\ndef score(response): return 1", "score: ModuleNotFoundError"),
        ("while True: pass", "score: it took more than 0.15 s of CPU while it was loaded"),
        ("def score(response, missing): return 1", "missing 1 required positional argument"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_named(judge: JudgeScheduler, source: str, detail: str) -> None:
    first, second = judged(judge, source, "a", "b")

    assert outcome_of(first) == outcome_of(second) == "internal_error"
    assert detail in first.detail


def test_one_response_that_fails_takes_no_other_with_it(judge: JudgeScheduler) -> None:
    source = "def score(response):\n    while response == 'loop': pass\n    return len(response) / 10 or 1 / 0\n"

    verdicts = judged(judge, source, "a", "loop", "abc", "", "b" * 10)

    assert [outcome_of(verdict) for verdict in verdicts] == [
        "wrong_answer",
        "internal_error",
        "wrong_answer",
        "internal_error",
        "accepted",
    ]
    assert [verdict.score for verdict in verdicts] == pytest.approx([0.1, 0, 0.3, 0, 1.0])
    assert "of CPU" in verdicts[1].detail
    assert "ZeroDivisionError" in verdicts[3].detail


def test_a_function_that_always_hangs_is_not_asked_about_everybody(judge: JudgeScheduler) -> None:
    started = time.monotonic()

    verdicts = judged(judge, "def score(response):\n    while True: pass\n", *map(str, range(32)))

    assert {outcome_of(verdict) for verdict in verdicts} == {"internal_error"}
    # Three attempts of three responses each, at 0.15 s; all of them would take 14 s of CPU.
    assert time.monotonic() - started < 25


def test_a_passing_fault_is_tried_again(judge: JudgeScheduler) -> None:
    source = "import os\ndef score(response):\n    return 1 if int.from_bytes(os.urandom(1)) < 128 else 1 / 0\n"

    verdicts = judged(judge, source, *map(str, range(64)))

    # One in two fails at first, one in eight after three attempts.
    assert 40 <= sum(outcome_of(verdict) == "accepted" for verdict in verdicts) <= 63


def test_verdicts_are_remembered_and_faults_are_not(judge: JudgeScheduler) -> None:
    source = "def score(response): return 1 / len(response)"

    first, again = (judged(judge, source, "ab", "") for _ in range(2))

    assert [outcome_of(verdict) for verdict in again] == ["wrong_answer", "internal_error"]
    assert [verdict.cached for verdict in [*first, *again]] == [False, False, True, False]
    assert (again[0].score, again[0].detail) == (0.5, first[0].detail)


ENTRY = {"dataset": "prime_factorization", "entry": {"answer": "2 \u00d7 3", "metadata": {"factors": [2, 3]}}}


@pytest.mark.parametrize(
    ("response", "tag", "outcome", "score", "detail"),
    [
        ("2 \u00d7 3", "", "accepted", 1.0, ""),
        (" 3 \u00d7 2\n", "", "accepted", 1.0, ""),
        ("two times three", "", "wrong_answer", 0.0, "the scorer cannot read the answer: ValueError"),
        ("<answer>7</answer> no, <answer>2 \u00d7 3</answer>", "answer", "accepted", 1.0, ""),
        ("2 \u00d7 3", "answer", "wrong_answer", 0.0, "no whole <answer>...</answer>"),
    ],
)
def test_a_generator_of_reasoning_gym_scores(
    judge: JudgeScheduler, response: str, tag: str, outcome: str, score: float, detail: str
) -> None:
    arguments = json.dumps({**ENTRY, **({"tag": tag} if tag else {})})

    (verdict,) = judged(judge, "", response, library="reasoning_gym", arguments_json=arguments)

    assert outcome_of(verdict) == outcome, verdict
    assert verdict.score == pytest.approx(score, abs=1e-6)
    assert detail in verdict.detail


@pytest.mark.parametrize(
    "arguments",
    [
        {"dataset": "no_such_generator", "entry": ENTRY["entry"]},
        {**ENTRY, "entry": {"metadata": {}}},
    ],
)
def test_an_entry_that_its_generator_cannot_score_is_the_verifiers_fault(
    judge: JudgeScheduler, arguments: dict[str, object]
) -> None:
    (verdict,) = judged(judge, "", "2 \u00d7 3", library="reasoning_gym", arguments_json=json.dumps(arguments))

    assert outcome_of(verdict) == "internal_error"
    assert verdict.detail.startswith("reasoning_gym ")


@pytest.mark.parametrize(
    ("fields", "pointer"),
    [
        ({}, "/scoring_function/library"),
        ({"library": "other"}, "/scoring_function/library"),
        ({"source": "x", "function": "f.g"}, "/scoring_function/function"),
        ({"source": "x" * (1 << 20), "function": "f"}, "/scoring_function/source"),
        ({"source": "x", "function": "f", "arguments_json": "[1]"}, "/scoring_function/arguments_json"),
        ({"source": "x", "function": "f", "arguments_json": "{"}, "/scoring_function/arguments_json"),
        ({"library": "reasoning_gym", "arguments_json": "{}"}, "/scoring_function/arguments_json"),
    ],
)
def test_functions_that_cannot_be_judged_by_are_refused(
    judge: JudgeScheduler, fields: dict[str, str], pointer: str
) -> None:
    with pytest.raises(InvalidInput) as refused:
        judge.test_sets.upload(verdict_pb2.TestSet(scoring_function=ScoringFunction(**fields)))
    assert [violation.pointer for violation in refused.value.violations] == [pointer]
