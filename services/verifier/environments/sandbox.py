"""Programs of the policy, run where the judge runs them: in its sandbox, by its gRPC."""

from __future__ import annotations

from dataclasses import dataclass

from blake3 import blake3

from spo.errors import NotFound, NotReady
from spo.rpc.client import RpcClient
from spo.v1.judge_service_pb2 import PRIORITY_TRAINING, JudgeRequest, JudgeResponse, UploadTestsRequest
from spo.v1.verdict_pb2 import OUTCOME_ACCEPTED, OUTCOME_INTERNAL_ERROR, OUTCOME_WRONG_ANSWER, TestSet, Verdict

# What a program printed is no failure, whatever was expected of it.
_RAN = (OUTCOME_ACCEPTED, OUTCOME_WRONG_ANSWER)
MARGIN_SECONDS = 1.0


@dataclass(frozen=True)
class Sandbox:
    """The judge, as environments use it."""

    judge: RpcClient

    def verdict(self, program: str, language: str, tests_digest: str, seconds: float, output_bytes: int = 0) -> Verdict:
        """The verdict with each test's result up to the first failure.

        Raises NotReady when the judge could not decide, and what the judge raises.
        """
        request = JudgeRequest(
            raw_programs=[program.encode(errors="replace")],
            language=language,
            tests_digest=tests_digest,
            priority=PRIORITY_TRAINING,
            want_details=True,
            stop_early=True,
            output_bytes=output_bytes,
        )
        response: JudgeResponse = self.judge.call("Judge", request, max(MARGIN_SECONDS, seconds - MARGIN_SECONDS))
        if response.verdicts[0].outcome == OUTCOME_INTERNAL_ERROR:
            raise NotReady("the judge could not run a program", code="judge_fault")
        return response.verdicts[0]

    def output(self, program: str, limits: TestSet, seconds: float, output_bytes: int) -> str:
        """What a Python program prints when it is given no input, or how it failed; `limits`: one test without output.

        Raises as `verdict`.
        """
        digest = blake3(limits.SerializeToString(deterministic=True)).hexdigest()
        try:
            verdict = self.verdict(program, "python", digest, seconds, output_bytes)
        except NotFound:
            self.judge.call("UploadTests", UploadTestsRequest(test_sets=[limits]))
            verdict = self.verdict(program, "python", digest, seconds, output_bytes)
        (run,) = verdict.tests
        if verdict.outcome in _RAN:
            return run.output
        failure = run.detail if run.outcome == verdict.outcome else verdict.detail
        return f"{run.output}{failure}" if not run.output or run.output.endswith("\n") else f"{run.output}\n{failure}"
