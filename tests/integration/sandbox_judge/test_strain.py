"""The judge under odd and hostile requests: typed refusals or verdicts, nothing kept, nothing waited for in vain."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import grpc
import psutil
import pytest
import redis
from prometheus_client import REGISTRY

from services.sandbox_judge.embedded import MemoryStore
from services.sandbox_judge.probe import choose_tier
from services.sandbox_judge.settings import Settings
from services.sandbox_judge.stage import MOST_DETAILS, JudgeScheduler, JudgeService
from spo import redis_keys
from spo.errors import InvalidInput, NotReady, ResourceExhausted, SpoError
from spo.rpc.client import RpcClient
from spo.rpc.server import RpcServer
from spo.testing.peers import wait_until
from spo.v1 import verdict_pb2
from spo.v1.judge_service_pb2 import DescribeJudgeRequest, JudgeRequest, Priority, UploadTestsRequest
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub, add_JudgeServiceServicer_to_server
from spo.v1.verdict_pb2 import Limits, Outcome

ONE = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdin=b"1\n", stdout=b"2\n")])
RIGHT = "print(2 * int(input()))"
SLEEPER = "import time\ntime.sleep(60)"


@pytest.fixture(scope="module")
def tier() -> str:
    return choose_tier(Settings())


@pytest.fixture
def make_scheduler(tier: str) -> Iterator[Callable[..., JudgeScheduler]]:
    made: list[JudgeScheduler] = []

    def make(**changes: object) -> JudgeScheduler:
        made.append(JudgeScheduler(MemoryStore(), Settings().model_copy(update=changes), tier, workers=1))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for scheduler in made:
        scheduler.close()


@pytest.fixture
def scheduler(make_scheduler: Callable[..., JudgeScheduler]) -> JudgeScheduler:
    return make_scheduler(recheck_rate=0.0)


@pytest.fixture
def judge(scheduler: JudgeScheduler) -> Iterator[RpcClient]:
    server = RpcServer("127.0.0.1", 0)
    add_JudgeServiceServicer_to_server(JudgeService(scheduler), server.server)
    server.start()
    client = RpcClient("sandbox-judge", server.address, JudgeServiceStub)
    yield client
    client.close()
    server.stop(1)


def upload(judge: RpcClient, tests: verdict_pb2.TestSet = ONE) -> str:
    return str(judge.call("UploadTests", UploadTestsRequest(test_sets=[tests])).digests[0])


def judge_one(scheduler: JudgeScheduler, program: str, tests: verdict_pb2.TestSet = ONE) -> verdict_pb2.Verdict:
    digest = scheduler.test_sets.upload(tests)
    return scheduler.submit([program], "python", digest, Priority.PRIORITY_TRAINING).verdicts(60)[0]


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


def test_a_flaky_program_is_reported_and_earns_nothing(make_scheduler: Callable[..., JudgeScheduler]) -> None:
    scheduler = make_scheduler(recheck_rate=1.0)
    before = metric("spo_judge_flaky_programs_total")
    coin = "import os\nprint(2 if os.urandom(1)[0] % 2 else 3)"

    verdicts = [judge_one(scheduler, f"{coin}  # {number}") for number in range(16)]

    # Each of them looks alike twice with probability one half.
    flaky = [verdict for verdict in verdicts if verdict.differing_runs]
    assert 1 <= len(flaky) < 16
    assert {verdict.outcome for verdict in flaky} == {Outcome.OUTCOME_WRONG_ANSWER}
    assert {verdict.runs for verdict in flaky} == {4}
    assert {verdict.runs for verdict in verdicts if not verdict.differing_runs} == {2}
    assert metric("spo_judge_flaky_programs_total") - before == len(flaky)


def test_a_second_look_at_a_steady_program_changes_nothing(make_scheduler: Callable[..., JudgeScheduler]) -> None:
    verdict = judge_one(make_scheduler(recheck_rate=1.0), RIGHT)

    assert (verdict.outcome, verdict.runs, verdict.differing_runs) == (Outcome.OUTCOME_ACCEPTED, 2, 0)


def test_the_share_of_second_looks_is_about_the_rate(make_scheduler: Callable[..., JudgeScheduler]) -> None:
    scheduler = make_scheduler(recheck_rate=0.25)

    sampled = sum(scheduler._sampled(redis_keys.digest(str(number))) for number in range(4000))

    assert 850 < sampled < 1150


def test_a_hard_coded_program_is_flagged_and_the_public_tests_are_counted(scheduler: JudgeScheduler) -> None:
    pairs = [(12, 144), (31, 961), (5, 25), (7, 49), (9, 81)]
    tests = verdict_pb2.TestSet(
        tests=[
            verdict_pb2.TestCase(stdin=b"%d" % given, stdout=b"%d" % wanted, public=position < 2)
            for position, (given, wanted) in enumerate(pairs)
        ]
    )
    before = metric("spo_judge_suspected_hard_coded_total")

    cheat = judge_one(scheduler, "print({'12': 144, '31': 961}.get(input(), 0))", tests)
    wrong = judge_one(scheduler, "n = int(input())\nprint(n * n if n > 7 else n)", tests)

    assert (cheat.outcome, cheat.suspected_hard_coded) == (Outcome.OUTCOME_WRONG_ANSWER, True)
    assert (cheat.public_tests_passed, cheat.public_tests_total) == (2, 2)
    assert (cheat.tests_passed, cheat.tests_total) == (2, 5)
    assert (wrong.outcome, wrong.suspected_hard_coded) == (Outcome.OUTCOME_WRONG_ANSWER, False)
    assert metric("spo_judge_suspected_hard_coded_total") - before == 1


def test_the_tier_is_a_metric_and_the_judge_tells_versions(judge: RpcClient, tier: str) -> None:
    described = judge.call("DescribeJudge", DescribeJudgeRequest())

    assert metric("spo_judge_isolation", tier=tier) == 1
    assert set(described.language_versions) == set(described.languages)
    assert described.language_versions["python"].startswith("3.")


def test_ten_thousand_tests_are_judged_and_one_more_is_refused(scheduler: JudgeScheduler) -> None:
    case = verdict_pb2.TestCase(stdin=b"1\n", stdout=b"2\n")
    many = verdict_pb2.TestSet(tests=[case] * 10_000)

    verdict = judge_one(scheduler, "import sys\nif input() == '1': print(0)", many)
    assert (verdict.outcome, verdict.tests_total) == (Outcome.OUTCOME_WRONG_ANSWER, 10_000)
    with pytest.raises(InvalidInput) as refusal:
        scheduler.test_sets.upload(verdict_pb2.TestSet(tests=[case] * 10_001))
    assert [each.pointer for each in refusal.value.violations] == ["/tests"]


def test_details_that_no_message_could_carry_are_refused(judge: RpcClient) -> None:
    many = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase()] * 10_000)
    programs = [f"#{number}" for number in range(MOST_DETAILS // 10_000 + 1)]
    request = JudgeRequest(programs=programs, language="python", tests_digest=upload(judge, many), want_details=True)

    with pytest.raises(InvalidInput, match="at most 20000"):
        judge.call("Judge", request)


@pytest.mark.parametrize(
    ("limits", "pointer"),
    [
        (Limits(cpu_seconds=-1), "/limits/cpu_seconds"),
        (Limits(cpu_seconds=float("nan")), "/limits/cpu_seconds"),
        (Limits(wall_seconds=float("inf")), "/limits/wall_seconds"),
        (Limits(memory_bytes=-1), "/limits/memory_bytes"),
        (Limits(memory_bytes=1 << 60), "/limits/memory_bytes"),
        (Limits(output_bytes=-5), "/limits/output_bytes"),
        (Limits(processes=100_000), "/limits/processes"),
    ],
)
def test_unusable_limits_are_refused_by_field(scheduler: JudgeScheduler, limits: Limits, pointer: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        scheduler.test_sets.upload(verdict_pb2.TestSet(tests=ONE.tests, limits=limits))
    assert [each.pointer for each in refusal.value.violations] == [pointer]


def test_zero_limits_are_the_defaults(scheduler: JudgeScheduler) -> None:
    verdict = judge_one(scheduler, RIGHT, verdict_pb2.TestSet(tests=ONE.tests, limits=Limits()))

    assert verdict.outcome == Outcome.OUTCOME_ACCEPTED


def test_a_large_input_and_a_large_output_go_through_with_flat_memory(scheduler: JudgeScheduler) -> None:
    size = 8 << 20
    tests = verdict_pb2.TestSet(
        tests=[verdict_pb2.TestCase(stdin=b"x" * size, stdout=b"y" * size)] * 2, limits=Limits(output_bytes=size + 1)
    )
    echo = "import sys\nsys.stdout.write('y' * len(sys.stdin.read()))"
    # The allocator of a process that has run other tests takes a few rounds to settle.
    for number in range(13):
        if number == 3:
            resident = psutil.Process().memory_info().rss
        assert judge_one(scheduler, f"{echo}  # {number}", tests).outcome == Outcome.OUTCOME_ACCEPTED
    assert psutil.Process().memory_info().rss - resident < 5 * size


def test_a_right_output_is_never_too_long_by_default(scheduler: JudgeScheduler) -> None:
    tests = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdout=b"y" * (3 << 20))])

    assert judge_one(scheduler, "print('y' * (3 << 20))", tests).outcome == Outcome.OUTCOME_ACCEPTED
    assert judge_one(scheduler, "print('y' * (7 << 20))", tests).outcome == Outcome.OUTCOME_OUTPUT_LIMIT


def test_a_message_larger_than_the_wire_takes_is_a_typed_refusal(judge: RpcClient) -> None:
    huge = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdin=b"x" * (65 << 20))])

    with pytest.raises(ResourceExhausted):
        judge.call("UploadTests", UploadTestsRequest(test_sets=[huge]))


def test_sources_that_are_not_utf_8_are_judged_as_the_bytes_they_are(judge: RpcClient) -> None:
    sources = [
        b"# coding: latin-1\nprint(2 if len('\xe9') == 1 else 0)",
        b"print('\xe9')",
        "# coding: utf-16\nprint(2)".encode("utf-16"),
    ]
    request = JudgeRequest(programs=[RIGHT], raw_programs=sources, language="python", tests_digest=upload(judge))

    assert [verdict.outcome for verdict in judge.call("Judge", request).verdicts] == [
        Outcome.OUTCOME_ACCEPTED,
        Outcome.OUTCOME_ACCEPTED,
        Outcome.OUTCOME_COMPILE_ERROR,
        Outcome.OUTCOME_COMPILE_ERROR,
    ]


def test_an_output_that_is_not_utf_8_is_compared_as_bytes_and_told_readably(scheduler: JudgeScheduler) -> None:
    tests = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase(stdout=b"\xff\xfe")])
    say = "import sys\nsys.stdout.buffer.write({!r})"

    assert judge_one(scheduler, say.format(b"\xff\xfe"), tests).outcome == Outcome.OUTCOME_ACCEPTED
    verdict = judge_one(scheduler, say.format(b"\xff\xfd"), tests)
    assert verdict.outcome == Outcome.OUTCOME_WRONG_ANSWER
    assert "\\ufffd" in verdict.detail


def test_many_tests_at_their_time_limit_end_in_skipped_ones(scheduler: JudgeScheduler) -> None:
    tests = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase()] * 100, limits=Limits(cpu_seconds=0.01, wall_seconds=5))
    digest = scheduler.test_sets.upload(tests)

    (verdict,) = scheduler.submit(
        ["while True: pass"], "python", digest, Priority.PRIORITY_TRAINING, want_details=True
    ).verdicts(60)

    outcomes = [result.outcome for result in verdict.tests]
    assert outcomes == [Outcome.OUTCOME_CPU_TIME_LIMIT] * 20 + [Outcome.OUTCOME_SKIPPED] * 80


def test_a_client_that_vanishes_frees_its_work(judge: RpcClient, scheduler: JudgeScheduler) -> None:
    tests = verdict_pb2.TestSet(tests=[verdict_pb2.TestCase()] * 50, limits=Limits(cpu_seconds=1, wall_seconds=0.2))
    digest = upload(judge, tests)
    request = JudgeRequest(
        programs=[f"{SLEEPER}  # {number}" for number in range(50)],
        language="python",
        tests_digest=digest,
        want_details=True,
    )
    refused: list[SpoError] = []

    def ask() -> None:
        try:
            impatient.call("Judge", request, deadline_seconds=120)
        except SpoError as error:
            refused.append(error)

    impatient = RpcClient("sandbox-judge", judge.address, JudgeServiceStub)
    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: scheduler.load == 1, "the program runs")
    impatient.close()
    asking.join(20)

    # Alone the first program would take 4 s, all of them minutes.
    started = time.monotonic()
    request = JudgeRequest(programs=[RIGHT], language="python", tests_digest=upload(judge))
    assert judge.call("Judge", request, deadline_seconds=60).verdicts[0].outcome == Outcome.OUTCOME_ACCEPTED
    wait_until(lambda: scheduler.load == 0, "the scheduler is idle")
    assert time.monotonic() - started < 20
    assert len(refused) == 1


def test_a_deadline_that_passes_is_an_answer_and_frees_the_work(judge: RpcClient, scheduler: JudgeScheduler) -> None:
    tests = verdict_pb2.TestSet(tests=ONE.tests, limits=Limits(cpu_seconds=1, wall_seconds=2))
    request = JudgeRequest(programs=[SLEEPER], language="python", tests_digest=upload(judge, tests))

    with pytest.raises(NotReady):
        judge.call("Judge", request, deadline_seconds=0.5)
    wait_until(lambda: scheduler.load == 0, "the scheduler is idle")


def test_a_closing_judge_finishes_what_it_has_taken(make_scheduler: Callable[..., JudgeScheduler]) -> None:
    scheduler = make_scheduler(recheck_rate=0.0)
    digest = scheduler.test_sets.upload(ONE)
    programs = [f"{RIGHT}  # {number}" for number in range(40)]
    batch = scheduler.submit(programs, "python", digest, Priority.PRIORITY_TRAINING)

    scheduler.close()

    assert {verdict.outcome for verdict in batch.verdicts(0)} == {Outcome.OUTCOME_ACCEPTED}


def test_a_test_set_is_stored_once_under_its_digest(redis_client: redis.Redis, tier: str) -> None:
    scheduler = JudgeScheduler(redis_client, Settings(), tier, workers=1)  # type: ignore[arg-type]
    try:
        digests = {scheduler.test_sets.upload(ONE) for _ in range(3)}
        assert len(digests) == 1
        assert redis_client.keys(redis_keys.judge_tests("*")) == [redis_keys.judge_tests(digests.pop()).encode()]
    finally:
        scheduler.close()


def test_garbage_on_the_wire_is_refused_and_the_judge_goes_on(judge: RpcClient) -> None:
    with grpc.insecure_channel(judge.address) as channel:
        call = channel.unary_unary("/spo.v1.JudgeService/Judge", lambda raw: raw, lambda raw: raw)
        with pytest.raises(grpc.RpcError):
            call(b"\xff" * 1000, timeout=10)
    request = JudgeRequest(programs=[RIGHT], language="python", tests_digest=upload(judge))
    assert judge.call("Judge", request).verdicts[0].outcome == Outcome.OUTCOME_ACCEPTED
