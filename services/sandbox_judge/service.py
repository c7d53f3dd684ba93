"""gRPC service of the judge: decodes requests, asks the scheduler, encodes verdicts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError

import grpc

from services.sandbox_judge.executor import languages, version_of
from services.sandbox_judge.program_judge import OUTPUT_BYTES, Cancelled, JudgeOptions
from services.sandbox_judge.stage import Batch, JudgeScheduler
from services.sandbox_judge.test_set_store import tests_in
from spo.errors import FieldViolation, InvalidInput, NotReady
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS, judged_parts
from spo.v1 import judge_service_pb2 as judge
from spo.v1.judge_service_pb2_grpc import JudgeServiceServicer

# One answer must stay well below what gRPC carries.
MOST_DETAILS = 20_000
MOST_OUTPUT_BYTES = 64 << 10
MOST_OUTPUT_BYTES_IN_ALL = 16 << 20


class JudgeService(JudgeServiceServicer):
    def __init__(self, scheduler: JudgeScheduler) -> None:
        self.scheduler = scheduler

    def UploadTests(
        self, request: judge.UploadTestsRequest, context: grpc.ServicerContext
    ) -> judge.UploadTestsResponse:
        """Store test sets by digest."""
        return judge.UploadTestsResponse(
            digests=[self.scheduler.test_sets.upload(test_set) for test_set in request.test_sets]
        )

    def Judge(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> judge.JudgeResponse:
        """One verdict per program; a caller that hangs up cancels its waiting programs."""
        batch = self._submit(request)
        if not context.add_callback(batch.cancel):
            batch.cancel()
        try:
            verdicts = batch.verdicts(context.time_remaining() or DEFAULT_DEADLINE_SECONDS)
        except (Cancelled, CancelledError, TimeoutError):
            batch.cancel()
            raise NotReady("the caller's deadline passed before all programs were judged") from None
        return judge.JudgeResponse(verdicts=verdicts)

    def JudgeParts(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> Iterator[judge.JudgePart]:
        """As Judge, however long it takes."""
        batch = self._submit(request)
        try:
            yield from judged_parts(batch, len(batch.programs), context)
        except (Cancelled, CancelledError, TimeoutError):
            raise NotReady("the call ended before all programs were judged") from None

    def _submit(self, request: judge.JudgeRequest) -> Batch:
        raw = [program.decode("utf-8", "surrogateescape") for program in request.raw_programs]
        programs = [*request.programs, *raw]
        if request.want_details:
            self._require_few_details(len(programs), request)
        asked = JudgeOptions(
            want_details=request.want_details,
            stop_early=request.stop_early,
            output_bytes=request.output_bytes or OUTPUT_BYTES,
            run_id=request.run_id,
        )
        return self.scheduler.submit_with(asked, programs, request.language, request.tests_digest, request.priority)

    def _require_few_details(self, programs: int, request: judge.JudgeRequest) -> None:
        if not 0 <= request.output_bytes <= MOST_OUTPUT_BYTES:
            violation = FieldViolation("/output_bytes", f"must be from 0 to {MOST_OUTPUT_BYTES}")
            raise InvalidInput("so much of an output does not come back", violations=(violation,))
        runs = programs * tests_in(self.scheduler.test_sets.get(request.tests_digest))
        most = min(MOST_DETAILS, MOST_OUTPUT_BYTES_IN_ALL // max(1, request.output_bytes))
        if runs > most:
            raise InvalidInput(f"details of {runs} runs do not fit one answer; at most {most} do")

    def DescribeJudge(
        self, request: judge.DescribeJudgeRequest, context: grpc.ServicerContext
    ) -> judge.DescribeJudgeResponse:
        """What this judge is: part of every value key."""
        return judge.DescribeJudgeResponse(
            judge_version=self.scheduler.judge_version,
            isolation=self.scheduler.isolation,
            languages=languages(),
            features=self.scheduler.features,
            language_versions={name: version_of(name) for name in languages()},
        )
