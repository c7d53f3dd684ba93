"""What tests hold a platform against: doubles of the services, a collector of traces, the law that no trajectory is
lost, and waiting.
"""

# ruff: noqa: N802  (gRPC method names come from the proto)

from __future__ import annotations

import gzip
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeVar

import grpc
from blake3 import blake3
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span as WireSpan

from spo import redis_keys
from spo.errors import NotReady
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient
from spo.rpc.server import RpcServer
from spo.v1 import inference_service_pb2 as inference, judge_service_pb2 as judge, replay_service_pb2 as replay
from spo.v1.inference_service_pb2_grpc import InferenceServiceServicer, add_InferenceServiceServicer_to_server
from spo.v1.judge_service_pb2_grpc import JudgeServiceServicer, add_JudgeServiceServicer_to_server
from spo.v1.prompt_pb2 import SOURCE_ONLINE, PromptGroup
from spo.v1.replay_service_pb2_grpc import ReplayServiceServicer, add_ReplayServiceServicer_to_server
from spo.v1.trajectory_pb2 import RolloutGroup, Trajectory
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR, OUTCOME_WRONG_ANSWER, Verdict

Found = TypeVar("Found")

RIGHT = "right"
# What the verifier of a person fails on, and how.
BREAKS, FAULT = "breaks", "score: ValueError: no number"


def wait_until(holds: Callable[[], Found], what: str, seconds: float = 60, poll_seconds: float = 0.02) -> Found:
    """Poll until `holds` returns something true, and return that. Raises TimeoutError saying what did not happen."""
    deadline = time.monotonic() + seconds
    while not (found := holds()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(poll_seconds)
    return found


@dataclass(frozen=True)
class ReceivedSpan:
    """One span as it came over the wire; ids are hexadecimal."""

    service: str
    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    links: tuple[tuple[str, str], ...]
    attributes: dict[str, Any]
    error: str


class Collector:
    """Listens on a free loopback port; use as a context manager."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    @property
    def spans(self) -> list[ReceivedSpan]:
        """Everything received so far."""
        return [span for body in list(self.bodies) for span in _spans(body)]

    def wait_for(self, holds: Callable[[list[ReceivedSpan]], Any], what: str, limit_seconds: float = 30) -> Any:
        """What `holds` finds in the spans, once that is something."""
        deadline = time.monotonic() + limit_seconds
        while not (found := holds(self.spans)):
            names = sorted({(span.service, span.name) for span in self.spans})
            assert time.monotonic() < deadline, f"waited {limit_seconds:g} s for {what}; received {names}"
            time.sleep(0.1)
        return found

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                sound = self.path == "/v1/traces" and self.headers["Content-Type"] == "application/x-protobuf"
                if sound:
                    bodies.append(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200 if sound else 400)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        return Handler


def _spans(body: bytes) -> list[ReceivedSpan]:
    return [
        ReceivedSpan(
            service=_attributes(resource.resource.attributes)["service.name"],
            name=span.name,
            kind=WireSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            links=tuple((link.trace_id.hex(), link.span_id.hex()) for link in span.links),
            attributes=_attributes(span.attributes),
            error=span.status.message,
        )
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


def check_ledger(
    client: RedisClient,
    job_id: str,
    samples_per_prompt: int = 4,
    dead_letters: Mapping[str, int] | None = None,
    experience: ExperienceStore | None = None,
    missing: Collection[tuple[str, int]] = (),
) -> int:
    """Every dispatched sample is in the ledger once, or its group still waits as a prompt; returns how many are.

    dead_letters: how many each stream may have, none by default. experience: where trajectories are that have left
    Redis; without it none may have. missing: groups and samples that are counted as lost, which must not be there.
    Waits a minute for the pipeline to empty. Raises AssertionError that begins with how many were lost and doubled
    where any were, TimeoutError.
    """
    moving = redis_keys.rollouts(), redis_keys.verifier_rollouts(), redis_keys.verdicts()
    wait_until(lambda: sum(map(client.xlen, moving)) == 0, "the pipeline is empty")
    for stream in (redis_keys.prompts(job_id), *moving, redis_keys.estimates()):
        given_up = client.xlen(redis_keys.dead_letters(stream))
        assert given_up <= (dead_letters or {}).get(stream, 0), f"{given_up} dead letters of {stream}"
    ledger = trajectories_of(client, job_id, experience)
    for trajectory in ledger:
        assert len(trajectory.reference_logprobs) == len(trajectory.response_token_ids) > 0
        assert trajectory.HasField("reward")
    online = Counter((entry.group_id, entry.sample_index) for entry in ledger if entry.source == SOURCE_ONLINE)
    waiting = client.xrange(redis_keys.prompts(job_id))
    still_prompts = {PromptGroup.FromString(fields[b"payload"]).group_id for _, fields in waiting}
    dispatched = int(client.hget(redis_keys.dispatch_cursor(job_id), "position") or 0)
    expected = {
        (f"{job_id}-{number}", sample)
        for number in range(dispatched)
        if f"{job_id}-{number}" not in still_prompts
        for sample in range(samples_per_prompt)
    } - set(missing)
    lost, doubled = len(expected - set(online)), sum(online.values()) - len(online)
    unknown = sorted(set(online) - expected)[:5]
    assert (lost, doubled, unknown) == (0, 0, []), f"{lost} lost, {doubled} doubled; never dispatched: {unknown}"
    counters = client.hgetall(redis_keys.replay_counters(job_id))
    inserted = {name: int(count) for name, count in counters.items() if name.startswith(b"inserted:")}
    assert sum(inserted.values()) == len(ledger)
    assert inserted[b"inserted:online"] == len(online)
    return len(online)


def trajectories_of(client: RedisClient, job_id: str, experience: ExperienceStore | None = None) -> list[Trajectory]:
    """The job's ledger: what Redis has, and what has left it for the experience store. Raises AssertionError."""
    numbered = client.zrange(redis_keys.replay_ids(job_id), 0, -1, withscores=True)
    ids = [raw.decode() for raw, _ in numbered]
    payloads = client.mget([redis_keys.replay_trajectory(job_id, trajectory_id) for trajectory_id in ids])
    ledger = [Trajectory.FromString(payload) for payload in payloads if payload]
    # What has left the window is in the experience store, and nowhere else.
    left = [trajectory_id for trajectory_id, payload in zip(ids, payloads, strict=True) if not payload]
    stored = int(client.hget(redis_keys.replay_stored(job_id), "written") or 0)
    assert all(number <= stored for (_, number), payload in zip(numbered, payloads, strict=True) if not payload)
    archived = _archived(experience, job_id, set(left)) if left else []
    assert sorted(trajectory.trajectory_id for trajectory in archived) == sorted(left)
    return ledger + archived


def _archived(experience: ExperienceStore | None, job_id: str, wanted: set[str]) -> list[Trajectory]:
    assert experience is not None, f"{len(wanted)} trajectories have left Redis; where is the experience store?"
    rows = (row.trajectory for file in experience.files(job_id) for batch in experience.batches(file) for row in batch)
    return [trajectory for trajectory in rows if trajectory.trajectory_id in wanted]


class JudgeServiceDouble(JudgeServiceServicer):
    """Accepts programs that start with `right`; on `breaks` it has no verdict. parts: of every score, by name."""

    def __init__(self) -> None:
        self.uploaded: set[str] = set()
        self.version = "test"
        self.programs = 0
        self.parts: dict[str, float] = {}

    def UploadTests(
        self, request: judge.UploadTestsRequest, context: grpc.ServicerContext
    ) -> judge.UploadTestsResponse:
        digests = [blake3(tests.SerializeToString(deterministic=True)).hexdigest() for tests in request.test_sets]
        self.uploaded.update(digests)
        return judge.UploadTestsResponse(digests=digests)

    def DescribeJudge(
        self, request: judge.DescribeJudgeRequest, context: grpc.ServicerContext
    ) -> judge.DescribeJudgeResponse:
        return judge.DescribeJudgeResponse(judge_version=self.version)

    def Judge(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> judge.JudgeResponse:
        self.programs += len(request.programs)
        outcomes = [
            OUTCOME_ACCEPTED if program.startswith(RIGHT) else OUTCOME_WRONG_ANSWER for program in request.programs
        ]
        verdicts = [Verdict(outcome=outcome, judge_version=self.version) for outcome in outcomes]
        for program, verdict in zip(request.programs, verdicts, strict=True):
            if program == BREAKS:
                verdict.outcome, verdict.detail = OUTCOME_INTERNAL_ERROR, FAULT
            for name, score in self.parts.items():
                verdict.parts.add(name=name, score=score)
                verdict.score = score
        if request.want_details:
            for verdict in verdicts:
                verdict.tests.add(outcome=verdict.outcome, output="<b>printed</b>")
        return judge.JudgeResponse(verdicts=verdicts)


def _whole(parts: inference.ServeResponse) -> inference.ServeResponse:
    """The same with one part for each sample."""
    found = inference.ServeResponse()
    found.CopyFrom(parts)
    del found.parts[:]
    for index in sorted({part.index for part in parts.parts}):
        own = [part for part in parts.parts if part.index == index]
        whole = found.parts.add()
        for part in own:
            whole.MergeFrom(part)
        whole.text = "".join(part.text for part in own)
    return found


class InferenceDouble(InferenceServiceServicer):
    """Answers each sample with the text that `respond` gives; `unready` calls are refused first.

    Completions say what `says` does, a word a part and token, until `goes_on` is set where they wait for it. in_parts:
    those too that are not streamed, which engines send whole.
    """

    def __init__(self) -> None:
        self.respond: Callable[[PromptGroup, int], str] = lambda group, index: RIGHT if index % 2 else "wrong"
        self.unready = 0
        self.says: Callable[[inference.ServeRequest], str] = lambda request: "one two three"
        self.goes_on: threading.Event | None = None
        self.in_parts = True
        # What each word's token looks like where log-probs are asked for.
        self.shown: Callable[[str], inference.ServedToken] = lambda word: inference.ServedToken(text=word)
        self.asked = inference.ServeRequest()
        self.prompt_of: Callable[[inference.ServeRequest], list[int]] = lambda request: [1, 2]
        # The token ids of each word: its place among the words, unless a test says otherwise.
        self.ids_of: Callable[[int], list[int]] = lambda number: [number]
        self.calls: list[inference.ServedCall] = []
        self.serving = 0
        # Of the weights that completions are sampled from, and how many of them end in the middle.
        self.version = 0
        self.dies = 0
        self.versions: list[int] = []
        self._lock = threading.Lock()

    def Serve(
        self, request: inference.ServeRequest, context: grpc.ServicerContext
    ) -> Iterator[inference.ServeResponse]:
        self.serving += 1
        self.asked = request
        ended = threading.Event()
        context.add_callback(ended.set)
        text = self.says(request)
        words = text.split(" ") if text else []
        first = inference.ServeResponse(prompt_token_ids=self.prompt_of(request), model_hash="f" * 64, sampler="double")
        try:
            for number, word in enumerate(words, 1):
                text = word if number == len(words) else f"{word} "
                for index in range(request.samples):
                    part = first.parts.add(index=index, text=text, token_ids=self.ids_of(number))
                    part.version_first = part.version_last = self.version
                    part.finish_reason = "stop" if number == len(words) else ""
                    part.calls.extend(self.calls if part.finish_reason else ())
                    if request.logprobs:
                        part.tokens.extend(self.shown(text) for _ in part.token_ids)
                if self.in_parts or request.stream:
                    yield first
                    first = inference.ServeResponse()
                if self.dies:
                    self.dies -= 1
                    raise NotReady("the replica has died")
                while self.goes_on and not self.goes_on.wait(0.02) and not ended.is_set():
                    pass
            if first.parts:
                yield _whole(first)
        finally:
            self.serving -= 1

    def Generate(self, request: inference.GenerateRequest, context: grpc.ServicerContext) -> inference.GenerateResponse:
        group = request.group
        with self._lock:
            if self.unready > 0:
                self.unready -= 1
                raise NotReady("the model still loads")
            self.versions.append(group.policy_version)
        samples = [
            Trajectory(
                sample_index=index,
                response_text=self.respond(group, index),
                response_token_ids=[1, 2],
                sampling_logprobs=[-0.5, -0.5],
            )
            for index in range(group.sampling.samples)
        ]
        return inference.GenerateResponse(group=RolloutGroup(request=group, trajectories=samples))


class ReplayDouble(ReplayServiceServicer):
    """Admits what the test says and lists the trajectories it was given."""

    def __init__(self) -> None:
        self.admissible = 0
        self.groups_per_replica = 0
        self.asked = replay.GetReplayStatusRequest()
        self.backpressure = ""
        self.counts: list[replay.SourceCount] = []
        self.trajectories: list[Trajectory] = []

    def GetReplayStatus(
        self, request: replay.GetReplayStatusRequest, context: grpc.ServicerContext
    ) -> replay.GetReplayStatusResponse:
        self.asked = request
        return replay.GetReplayStatusResponse(
            admissible_inserts=self.admissible,
            counts=self.counts,
            backpressure=self.backpressure,
            groups_per_replica=self.groups_per_replica,
        )

    def ListTrajectories(
        self, request: replay.ListTrajectoriesRequest, context: grpc.ServicerContext
    ) -> replay.ListTrajectoriesResponse:
        return replay.ListTrajectoriesResponse(trajectories=self.trajectories[: request.limit])

    def GetTrajectory(
        self, request: replay.GetTrajectoryRequest, context: grpc.ServicerContext
    ) -> replay.GetTrajectoryResponse:
        found = next(
            trajectory for trajectory in self.trajectories if trajectory.trajectory_id == request.trajectory_id
        )
        steps = range(request.steps_from, 7)[: request.steps_limit]
        return replay.GetTrajectoryResponse(trajectory=found, steps=steps, times_sampled=7)

    def GetBatch(self, request: replay.GetBatchRequest, context: grpc.ServicerContext) -> replay.GetBatchResponse:
        return replay.GetBatchResponse(trajectory_ids=[trajectory.trajectory_id for trajectory in self.trajectories])


class ServiceDoubles:
    """One server that plays inference, judge and replay buffer; use as a context manager. port: 0 for any."""

    def __init__(self, port: int = 0) -> None:
        # Calls that no test of the orchestrator makes stay unimplemented, and say so when made.
        self.judge = JudgeServiceDouble()  # type: ignore[abstract]
        self.inference = InferenceDouble()  # type: ignore[abstract]
        self.replay = ReplayDouble()  # type: ignore[abstract]
        self._server = RpcServer("127.0.0.1", port)
        server: grpc.Server = self._server.server
        add_JudgeServiceServicer_to_server(self.judge, server)
        add_InferenceServiceServicer_to_server(self.inference, server)
        add_ReplayServiceServicer_to_server(self.replay, server)

    @property
    def address(self) -> str:
        return self._server.address

    def __enter__(self) -> ServiceDoubles:
        self._server.start()
        self._server.set_serving(True)
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(1)
