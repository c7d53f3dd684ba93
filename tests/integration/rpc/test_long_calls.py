"""Calls that may take any time: they live while the other side shows signs of life, and nothing is done for nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from services.replay_buffer.ingest import ReferenceScores
from services.sandbox_judge.stage import Batch
from spo.errors import InvalidInput, NotReady, SpoError, Unreachable
from spo.rpc import client as client_module
from spo.rpc.client import Parts, RpcClient, UnknownMethod, generate, judge, judged_parts
from spo.rpc.server import RpcServer
from spo.testing.peers import wait_until
from spo.v1 import inference_service_pb2 as inference, judge_service_pb2 as judging, value_service_pb2 as values
from spo.v1.inference_service_pb2_grpc import (
    InferenceServiceServicer,
    InferenceServiceStub,
    add_InferenceServiceServicer_to_server,
)
from spo.v1.judge_service_pb2_grpc import JudgeServiceServicer, JudgeServiceStub, add_JudgeServiceServicer_to_server
from spo.v1.prompt_pb2 import PromptGroup, Sampling
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.value_service_pb2_grpc import ValueServiceServicer, add_ValueServiceServicer_to_server
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, Verdict

GROUP = PromptGroup(group_id="g", run_id="r", sampling=Sampling(samples=4))
BEAT, SILENT = 0.1, 0.5


class Engine(InferenceServiceServicer, JudgeServiceServicer, ValueServiceServicer):  # type: ignore[misc]
    """Works through a list of samples, with a beat or a pause before each; `script` says which, and what ends it."""

    def __init__(self, script: Callable[[int], Iterator[int | None]]) -> None:
        self.script = script
        self.asked: list[list[int]] = []
        self.gone = 0

    def GenerateParts(self, request: inference.GenerateRequest, context: Any) -> Iterator[inference.GeneratePart]:
        indexes = list(request.sample_indexes)
        self.asked.append(indexes)
        try:
            for index in self.script(len(self.asked)):
                if not context.is_active():
                    self.gone += 1
                    return
                finished = [] if index is None else [Trajectory(sample_index=index)]
                yield inference.GeneratePart(finished=finished)
        except GeneratorExit:
            # The call ended between two parts: gRPC asks for no more.
            self.gone += 1


class OldEngine(InferenceServiceServicer, JudgeServiceServicer, ValueServiceServicer):  # type: ignore[misc]
    """A server of a release without parts, whose work takes longer than any deadline that there was."""

    needs = 1.4
    calls = 0

    def Generate(self, request: inference.GenerateRequest, context: Any) -> inference.GenerateResponse:
        self._work()
        samples = [Trajectory(sample_index=index) for index in range(request.group.sampling.samples)]
        return inference.GenerateResponse(group=RolloutGroup(request=request.group, trajectories=samples))

    def Judge(self, request: judging.JudgeRequest, context: Any) -> judging.JudgeResponse:
        self._work()
        return judging.JudgeResponse(verdicts=[Verdict(outcome=OUTCOME_ACCEPTED)] * len(request.programs))

    def ComputeReferenceLogprobs(
        self, request: values.ComputeReferenceLogprobsRequest, context: Any
    ) -> values.ComputeReferenceLogprobsResponse:
        self._work()
        scored = [values.TokenLogprobs(logprobs=[-1.0] * len(each.response_token_ids)) for each in request.sequences]
        return values.ComputeReferenceLogprobsResponse(sequences=scored, reference_hash="h")

    def _work(self) -> None:
        self.calls += 1
        time.sleep(self.needs)


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    servers = []

    def start(servicer: Any) -> str:
        server = RpcServer("127.0.0.1", 0)
        add_InferenceServiceServicer_to_server(servicer, server.server)
        add_JudgeServiceServicer_to_server(servicer, server.server)
        add_ValueServiceServicer_to_server(servicer, server.server)
        server.start()
        servers.append(server)
        return server.address

    yield start
    for server in servers:
        server.stop(0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RpcClient.parts, "__defaults__", (lambda: True, SILENT))


def client_of(address: str) -> RpcClient:
    return RpcClient("inference", address, InferenceServiceStub)


def beats(count: int, then: Sequence[int] = ()) -> Iterator[int | None]:
    for _ in range(count):
        time.sleep(BEAT)
        yield None
    yield from then


def test_a_call_outlives_every_deadline_while_there_are_signs_of_life(serve: Callable[[Any], str]) -> None:
    engine = Engine(lambda call: beats(12, range(4)))
    signs: list[None] = []

    found = generate(client_of(serve(engine)), GROUP, kept={}, alive=lambda: signs.append(None))

    assert [each.sample_index for each in found] == [0, 1, 2, 3]
    assert (len(engine.asked), len(signs)) == (1, 16)


def test_a_call_ends_soon_after_the_last_sign_and_a_second_try_samples_only_what_is_missing(
    serve: Callable[[Any], str],
) -> None:
    hangs = threading.Event()

    def script(call: int) -> Iterator[int | None]:
        if call == 1:
            yield from (0, 2)
            hangs.wait(30)
        yield from (1, 3)

    engine, kept = Engine(script), dict[int, Trajectory]()
    client = client_of(serve(engine))
    with pytest.raises(Unreachable, match="showed no progress for"):
        generate(client, GROUP, kept=kept)
    assert sorted(kept) == [0, 2]

    assert len(generate(client, GROUP, kept=kept)) == 4
    assert engine.asked == [[], [1, 3]]
    hangs.set()


def test_nothing_is_asked_for_where_all_is_kept(serve: Callable[[Any], str]) -> None:
    engine = Engine(lambda call: iter(()))
    kept = {index: Trajectory(sample_index=index) for index in range(4)}
    assert len(generate(client_of(serve(engine)), GROUP, kept=kept)) == 4
    assert not engine.asked


def test_an_engine_that_leaves_samples_out_has_not_answered(serve: Callable[[Any], str]) -> None:
    with pytest.raises(NotReady, match="every sample"):
        generate(client_of(serve(Engine(lambda call: iter([0, 1])))), GROUP, kept={})


def test_what_the_server_raises_comes_as_it_is(serve: Callable[[Any], str]) -> None:
    def refuses(call: int) -> Iterator[int | None]:
        yield 0
        raise InvalidInput("it kills engines", code="kills_engine")

    kept: dict[int, Trajectory] = {}
    with pytest.raises(InvalidInput) as refused:
        generate(client_of(serve(Engine(refuses))), GROUP, kept=kept)
    assert (refused.value.code, list(kept)) == ("kills_engine", [0])


def test_a_call_that_nobody_wants_any_more_ends_on_both_sides(serve: Callable[[Any], str]) -> None:
    engine = Engine(lambda call: beats(300))
    with pytest.raises(Unreachable, match="nobody waits"):
        generate(client_of(serve(engine)), GROUP, kept={}, wanted=lambda: not engine.asked)
    wait_until(lambda: engine.gone, "the server stops")


@pytest.mark.parametrize("what", ["generate", "judge", "reference log-probs"])
def test_servers_of_earlier_releases_are_asked_once_and_have_all_the_time_they_need(
    serve: Callable[[Any], str], what: str
) -> None:
    old = OldEngine()
    address = serve(old)
    if what == "generate":
        assert len(generate(client_of(address), GROUP, kept={})) == 4
    elif what == "judge":
        client = RpcClient("sandbox-judge", address, JudgeServiceStub)
        assert len(judge(client, judging.JudgeRequest(programs=["a", "b"])).verdicts) == 2
    else:
        rows = [Trajectory(prompt_token_ids=[1], response_token_ids=[2] * 8) for _ in range(4)]
        scores = ReferenceScores.at(address, deadline_seconds=1.0)
        scores.add("run", rows, patience_seconds=0.1, stop=threading.Event())
        assert [list(row.reference_logprobs) for row in rows] == [[-1.0] * 8] * 4
    assert old.calls == 1


def test_a_method_that_a_server_does_not_have_is_told_from_a_failure(serve: Callable[[Any], str]) -> None:
    with pytest.raises(UnknownMethod):
        list(client_of(serve(OldEngine())).parts("GenerateParts", inference.GenerateRequest(group=GROUP)))


class Forwards(Engine):
    """Reference log-probs, a forward a sequence; the first call breaks off after two of them."""

    def ReferenceLogprobsParts(
        self, request: values.ComputeReferenceLogprobsRequest, context: Any
    ) -> Iterator[values.ReferenceLogprobsPart]:
        self.asked.append([each.response_token_ids[0] for each in request.sequences])
        for place, each in enumerate(request.sequences):
            if len(self.asked) == 1 and place == 2:
                raise NotReady("the process is stopping")
            found = values.ScoredSequence(index=place, logprobs=[-float(each.response_token_ids[0])])
            yield values.ReferenceLogprobsPart(scored=[found], reference_hash="h")


def test_log_probs_that_a_broken_call_has_found_are_not_computed_again(serve: Callable[[Any], str]) -> None:
    forwards = Forwards(lambda call: iter(()))
    rows = [Trajectory(prompt_token_ids=[1], response_token_ids=[number]) for number in range(1, 5)]
    scores = ReferenceScores.at(serve(forwards), deadline_seconds=SILENT)

    scores.add("run", rows, patience_seconds=10, stop=threading.Event())

    assert [list(row.reference_logprobs) for row in rows] == [[-1.0], [-2.0], [-3.0], [-4.0]]
    assert forwards.asked == [[1, 2, 3, 4], [3, 4]]


class Context:
    """A call, as a server sees it."""

    def __init__(self) -> None:
        self.active = True
        self.callbacks: list[Callable[[], None]] = []

    def is_active(self) -> bool:
        return self.active

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return self.active

    def hang_up(self) -> None:
        self.active = False
        for callback in self.callbacks:
            callback()


@pytest.mark.parametrize("ending", ["whole", "error", "caller"])
def test_a_server_beats_while_it_works_and_stops_with_the_call(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(client_module, "BEAT_SECONDS", 0.02)
    context = Context()
    parts: Parts[str] = Parts(context)
    sent: list[str] = []
    alive = iter(["beat", "beat", None, "beat"])
    error: list[SpoError] = []

    def send() -> None:
        try:
            sent.extend(parts.sent(lambda: next(alive, "beat")))
        except SpoError as raised:
            error.append(raised)

    thread = threading.Thread(target=send)
    thread.start()
    wait_until(lambda: next(alive, "") == "", "beats are asked for")
    parts.put("sample")
    if ending == "caller":
        context.hang_up()
    else:
        parts.end(NotReady("the engine failed") if ending == "error" else None)
    thread.join(10)
    assert not thread.is_alive()
    assert parts.is_wanted is (ending != "caller")
    assert sent[-1] == "sample" or ending == "caller"
    assert bool(error) is (ending == "error")


@pytest.mark.parametrize("ending", ["verdicts", "a fault", "the caller"])
def test_a_judge_beats_until_all_verdicts_are_there_and_cancels_what_nobody_waits_for(
    monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    monkeypatch.setattr(client_module, "BEAT_SECONDS", 0.01)
    context, futures = Context(), {"a": Future[Verdict](), "b": Future[Verdict]()}
    batch = Batch(["a", "b", "a"], futures, threading.Event())
    parts = judged_parts(batch, 3, context)

    first = next(parts)
    futures["a"].set_result(Verdict(outcome=OUTCOME_ACCEPTED))
    assert (first.judged, first.programs) == (1, 3)
    if ending == "verdicts":
        futures["b"].set_result(Verdict())
        last = list(parts)[-1]
        assert [each.outcome for each in last.response.verdicts] == [OUTCOME_ACCEPTED, 0, OUTCOME_ACCEPTED]
    elif ending == "a fault":
        futures["b"].set_exception(NotReady("three faults"))
        with pytest.raises(NotReady, match="three faults"):
            list(parts)
    else:
        context.hang_up()
        with pytest.raises(NotReady, match="gone"):
            list(parts)
        assert futures["b"].cancelled()
