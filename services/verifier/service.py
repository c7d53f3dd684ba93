"""gRPC service of the verifiers: the judge's contract, for test sets that decide by what lies outside the platform."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError

import grpc

from services.verifier.stage import VerdictBatch, VerifierScheduler
from spo.errors import InvalidInput, NotReady
from spo.rpc.client import DEFAULT_DEADLINE_SECONDS
from spo.rpc.long_calls import judged_parts
from spo.v1 import judge_service_pb2 as judge
from spo.v1.judge_service_pb2_grpc import JudgeServiceServicer


class VerifierService(JudgeServiceServicer):
    def __init__(self, scheduler: VerifierScheduler) -> None:
        self.scheduler = scheduler

    def UploadTests(
        self, request: judge.UploadTestsRequest, context: grpc.ServicerContext
    ) -> judge.UploadTestsResponse:
        """Store test sets by digest."""
        return judge.UploadTestsResponse(
            digests=[self.scheduler.test_sets.upload(test_set) for test_set in request.test_sets]
        )

    def Judge(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> judge.JudgeResponse:
        """One verdict per response; a caller that hangs up cancels the scoring."""
        batch = self._submit(request)
        if not context.add_callback(batch.cancel):
            batch.cancel()
        try:
            verdicts = batch.verdicts(context.time_remaining() or DEFAULT_DEADLINE_SECONDS)
        except (CancelledError, TimeoutError):
            batch.cancel()
            raise NotReady("the caller's deadline passed before all responses were scored") from None
        return judge.JudgeResponse(verdicts=verdicts)

    def JudgeParts(self, request: judge.JudgeRequest, context: grpc.ServicerContext) -> Iterator[judge.JudgePart]:
        """As Judge, however long it takes."""
        batch = self._submit(request)
        try:
            yield from judged_parts(batch, len(request.programs), context)
        except (CancelledError, TimeoutError):
            raise NotReady("the call ended before all responses were scored") from None

    def _submit(self, request: judge.JudgeRequest) -> VerdictBatch:
        if request.raw_programs:
            raise InvalidInput("verifiers score text: responses that are not UTF-8 cannot be sent on")
        return self.scheduler.submit(
            request.programs, request.language, request.tests_digest, request.priority, run_id=request.run_id
        )

    def DescribeJudge(
        self, request: judge.DescribeJudgeRequest, context: grpc.ServicerContext
    ) -> judge.DescribeJudgeResponse:
        """What this verifier is: part of every value key."""
        return judge.DescribeJudgeResponse(
            judge_version=self.scheduler.judge_version, features=sorted(self.scheduler.scorers)
        )
