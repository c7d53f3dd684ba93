"""What a served policy says as judge: the orchestrator knows which replicas hold its pinned version."""

from __future__ import annotations

from services.verifier.guarded_post import BadAnswer, ServiceAway, ServiceFailed
from services.verifier.settings import Settings
from spo.errors import IntegrityError, InternalError, InvalidInput, NotFound, SpoError
from spo.rpc.client import RpcClient
from spo.spec.verifier import PinnedJudge
from spo.v1.orchestrator_service_pb2 import CompleteServedRequest, CompleteServedResponse
from spo.v1.orchestrator_service_pb2_grpc import OrchestratorServiceStub


class ServedPolicy:
    """Asks the orchestrator for completions. Safe from several threads."""

    def __init__(self, settings: Settings) -> None:
        self._orchestrator = RpcClient("orchestrator", settings.orchestrator_address, OrchestratorServiceStub)
        self._settings = settings

    def said(self, judge: PinnedJudge, question: str, samples: int, seed: str) -> list[str]:
        """So many texts; seed: hexadecimal digits.

        Raises InvalidInput where the question does not fit, ServiceFailed where the version is there no more or serving
        it is broken, ServiceAway where no replica serves it yet, BadAnswer.
        """
        request = CompleteServedRequest(
            run_id=judge.job_id,
            policy_version=judge.version,
            question=question,
            samples=samples,
            temperature=self._settings.model_temperature,
            max_tokens=self._settings.model_tokens,
            seed=int(seed[:15], 16),
        )
        try:
            found: CompleteServedResponse = self._orchestrator.call(
                "CompleteServed", request, self._settings.model_seconds
            )
        except InvalidInput:
            raise
        except (NotFound, IntegrityError, InternalError) as error:
            # A deleted job, a version that is not kept: it may come back from a backup, so the responses are kept. A
            # defect is no absence: waiting for it would never end.
            raise ServiceFailed(f"{judge.model}: {error.message}") from None
        except SpoError as error:
            # No replica serves it yet, all are full or hold another model, or another orchestrator begins to lead.
            raise ServiceAway(f"{judge.model}: {error.message}") from None
        if len(found.texts) != samples:
            raise BadAnswer(f"{judge.model} gave {len(found.texts)} of {samples} votes")
        return list(found.texts)
