"""Mathematics by math-verify in the sandbox: notations that mean the same, and answers that hang or break it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler
from spo.messaging.redis_client import connect
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import AnswerComparison, AnswerExtraction, AnswerRule, Limits, Outcome, Verdict

WHOLE = AnswerExtraction.ANSWER_EXTRACTION_WHOLE
BOXED = AnswerExtraction.ANSWER_EXTRACTION_BOXED


@pytest.fixture(scope="module")
def judge(redis_server: str) -> Iterator[JudgeScheduler]:
    settings = Settings().model_copy(update={"recheck_rate": 0.0})
    with connect(redis_server) as client:
        client.flushdb()
        scheduler = JudgeScheduler(client, settings, choose_tier(settings), workers=1)
        yield scheduler
        scheduler.close(20)


def judged(
    judge: JudgeScheduler,
    expected: list[str],
    *responses: str,
    extraction: AnswerExtraction.ValueType = BOXED,
    cpu_seconds: float = 2,
) -> list[Verdict]:
    rule = AnswerRule(expected=expected, comparison=AnswerComparison.ANSWER_COMPARISON_MATH, extraction=extraction)
    limits = Limits(cpu_seconds=cpu_seconds, wall_seconds=5)
    digest = judge.test_sets.upload(verdict_pb2.TestSet(answer=rule, limits=limits))
    return judge.submit(responses, "text", digest, Priority.PRIORITY_TRAINING).verdicts(200)


def outcomes_of(verdicts: list[Verdict]) -> list[str]:
    return [Outcome.Name(verdict.outcome).removeprefix("OUTCOME_").lower() for verdict in verdicts]


@pytest.mark.parametrize(
    ("expected", "right", "wrong"),
    [
        ("1/2", ["0.5", "\\frac{1}{2}", "\\frac12", "2/4", "50\\%"], ["0.51", "2", "1/3", "x"]),
        ("2\\sqrt{2}", ["\\sqrt{8}", "2\\cdot\\sqrt2", "\\frac{4}{\\sqrt{2}}"], ["\\sqrt{2}", "2.8"]),
        ("x^2+2x+1", ["(x+1)^2", "1+2x+x^2"], ["x^2+1", "(x-1)^2"]),
        ("(1, 2)", ["(1,2)", "\\left(1,2\\right)"], ["(2,1)", "1"]),
        ("\\{1,2,3\\}", ["\\{3,2,1\\}"], ["\\{1,2\\}"]),
        ("1,234", ["1234", "1,234"], ["1.234"]),
        (
            r"\begin{pmatrix} 1 & -2 \\ 3 & 4 \end{pmatrix}",
            [r"\begin{pmatrix}1&-2\\3&4\end{pmatrix}", r"\begin{bmatrix}1&-2\\3&\frac{8}{2}\end{bmatrix}"],
            [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", "4"],
        ),
        (
            r"(-\infty, 2) \cup (3, \infty)",
            [r"x<2 \text{ or } x>3", "x < 2 or x > 3", r"x\in(3,\infty)\cup(-\infty,2)"],
            [r"x \le 2 \text{ or } x>3", "x<2", r"x<2 \text{ or } y>3", r"x<2 \text{ or } x<3", r"x>3 \text{ or } 7"],
        ),
        ("[1,2)", [r"x \in [1, 2)", r"\left[1,2\right)", r"1 \le x < 2"], ["[1,2]", r"x\in[1,2]", "(1,2)"]),
        (
            "2516_8",
            ["2516_{8}", "(2516)_8", r"2516_{\text{eight}}", "2516"],
            ["2516_9", r"2516_{\text{nine}}", "(2516)_9", "2517_8"],
        ),
        ("e^2", [r"\mathrm{e}^2", r"\text{e}^{2}"], [r"\mathrm{e}^3", r"\mathrm{e}"]),
        (
            r"\text{Monday}",
            ["Monday", r"\textbf{Monday}", r"\text{monday}"],
            [r"\text{Tuesday}", r"\text{Monday or Tuesday}"],
        ),
        ("(2,-1)", ["(x,y)=(2,-1)", "x=2, y=-1"], ["(-1,2)", "x=2"]),
        (r"1 \pm \sqrt{19}", [r"1+\sqrt{19},1-\sqrt{19}"], [r"1+\sqrt{19}"]),
        (r"\$32,\!348", ["32348", r"\$32,348", "$32348$"], ["32", "348"]),
    ],
)
def test_what_means_the_same_is_right(judge: JudgeScheduler, expected: str, right: list[str], wrong: list[str]) -> None:
    responses = [f"so it is \\boxed{{{text}}}." for text in (*right, *wrong)]

    verdicts = judged(judge, [expected], *responses)

    assert outcomes_of(verdicts) == ["accepted"] * len(right) + ["wrong_answer"] * len(wrong), verdicts
    assert [verdict.score for verdict in verdicts] == [1.0] * len(right) + [0.0] * len(wrong)


def test_any_of_the_expected_answers_is_right_and_none_found_is_wrong(judge: JudgeScheduler) -> None:
    verdicts = judged(judge, ["3", "\\pi"], "\\boxed{3.0}", "\\boxed{\\pi}", "3", "", "\\boxed{}", "\\boxed{$}")

    assert outcomes_of(verdicts) == ["accepted", "accepted", *["wrong_answer"] * 4]
    assert verdicts[2].detail == "no answer found: boxed"


def test_an_answer_that_makes_the_package_loop_is_cut_by_time_and_holds_up_no_other(judge: JudgeScheduler) -> None:
    loops = "9^{9^{9^{9}}}", "1" + "0" * 400 + "!"

    verdicts = judged(
        judge, ["7"], "\\boxed{7}", *(f"\\boxed{{{text}}}" for text in loops), "\\boxed{8}", cpu_seconds=0.5
    )

    found = outcomes_of(verdicts)
    assert (found[0], found[-1]) == ("accepted", "wrong_answer")
    assert "cpu_time_limit" in found[1:3], verdicts
    assert set(found[1:3]) <= {"cpu_time_limit", "memory_limit", "wrong_answer", "runtime_error"}


@pytest.mark.parametrize(
    "response",
    [
        "\\boxed{" * 3000,
        "\\boxed{" + "(" * 3000 + "}",
        "\\boxed{\\frac{1}{0}}",
        "\\boxed{__import__('os').system('id')}",
        "\\boxed{\udcff\x00}",
        "\\boxed{" + "\\frac{1}{" * 60 + "2" + "}" * 60 + "}",
    ],
)
def test_a_hostile_answer_is_only_wrong(judge: JudgeScheduler, response: str) -> None:
    (verdict,) = judged(judge, ["7"], response)

    assert outcomes_of([verdict])[0] not in ("accepted", "internal_error"), verdict


def test_an_expected_answer_that_cannot_be_read_is_nobodys_wrong_answer(judge: JudgeScheduler) -> None:
    (verdict,) = judged(judge, ["\\"], "\\boxed{7}")

    assert outcomes_of([verdict]) == ["internal_error"]
    assert "math-verify" in verdict.detail


def test_a_verdict_is_remembered(judge: JudgeScheduler) -> None:
    first, again = (judged(judge, ["41"], "\\boxed{41}", "\\boxed{x}") for _ in range(2))

    assert outcomes_of(first) == outcomes_of(again) == ["accepted", "wrong_answer"]
    assert [verdict.cached for verdict in first + again] == [False, False, True, True]


def test_a_whole_response_is_read_as_the_package_reads_it(judge: JudgeScheduler) -> None:
    verdicts = judged(judge, ["12"], "First 7, then the answer is 12.", "It is $\\boxed{11}$.", extraction=WHOLE)

    assert outcomes_of(verdicts) == ["accepted", "wrong_answer"]
