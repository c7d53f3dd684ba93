"""Served policies as judges: names are pinned when a job is submitted, and the pinned version is asked from then on."""

from __future__ import annotations

import asyncio
import contextlib
import json

from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.weights import WeightAnnouncements
from services.orchestrator.serving.pool import ServingPool
from services.orchestrator.serving.served_models import ServedModels, Target
from spo.errors import FieldViolation, InvalidInput, NotFound, NotReady
from spo.spec.job_spec import TasksSpec
from spo.spec.verifier import SERVED, ModelVerifier, PinnedJudge, served_judge, verifiers_in, with_models
from spo.v1.inference_service_pb2 import ServeRequest
from spo.v1.orchestrator_service_pb2 import CompleteServedRequest


class ServedJudges:
    """What names of judges mean, and what those judges say."""

    def __init__(self, jobs: JobStore, served: ServedModels, weights: WeightAnnouncements, pool: ServingPool) -> None:
        self.jobs = jobs
        self.served = served
        self.weights = weights
        self.pool = pool

    def pinned(self, tasks: TasksSpec, tenant: str) -> TasksSpec:
        """The tasks with every served judge pinned to the version that its name means now to the tenant.

        Raises InvalidInput with a pointer to each name that means nothing.
        """
        faults: list[FieldViolation] = []

        def renamed(at: str, verifier: ModelVerifier) -> str:
            judge = served_judge(verifier.model) if verifier.is_served else None
            if judge is None or judge.job_id:
                return verifier.model
            try:
                target = self.served.get(tenant, judge.name).target
            except NotFound as error:
                faults.append(FieldViolation(f"/tasks/{at}/model", f"{error.message} that is served"))
                return verifier.model
            return PinnedJudge(judge.name, target.job_id, self._version(target)).model

        verifier = with_models(tasks.verifier, renamed)
        _refuse(faults)
        return tasks if verifier == tasks.verifier else tasks.model_copy(update={"verifier": verifier})

    def require_pinned(self, tasks: TasksSpec, tenant: str | None) -> None:
        """Refuse judges that are not pinned, or to what the tenant has not; None has all. Raises InvalidInput."""
        faults: list[FieldViolation] = []
        for at, verifier in verifiers_in(tasks.verifier):
            judge = served_judge(verifier.model) if isinstance(verifier, ModelVerifier) and verifier.is_served else None
            if judge is None:
                continue
            try:
                if not judge.job_id:
                    example = f"{SERVED}{judge.name}=job_...@VERSION"
                    raise NotFound(f"must name what {judge.name} means, {example}: /v1/served-models says it")
                self.served.require(tenant or "", Target(judge.job_id, judge.version))
            except NotFound as error:
                faults.append(FieldViolation(f"/tasks/{at}/model", error.message))
        _refuse(faults)

    def complete(self, request: CompleteServedRequest, seconds: float) -> list[str]:
        """What the judge says, without its reasoning. Raises what serving raises, NotReady after so many seconds."""
        model = self.jobs.spec(request.run_id).model
        wanted = ServeRequest(
            request_id=f"judge-{request.seed:x}",
            run_id=request.run_id,
            policy_version=request.policy_version,
            messages_json=json.dumps([{"role": "user", "content": request.question}]),
            samples=request.samples,
            temperature=request.temperature,
            top_p=1.0,
            max_tokens=min(request.max_tokens, model.max_response_tokens),
            seed=request.seed,
        )
        try:
            texts = asyncio.run(asyncio.wait_for(self._texts(wanted), seconds))
        except TimeoutError:
            raise NotReady(f"the judge did not answer within {seconds:.0f} s", code="policy_not_served") from None
        return [text[model.chat_format.reasoning_length(text) :] for text in texts]

    async def _texts(self, wanted: ServeRequest) -> list[str]:
        texts = [""] * wanted.samples
        async with contextlib.aclosing(self.pool.serve(wanted)) as answer:
            async for response in answer:
                for part in response.parts:
                    texts[part.index] += part.text
        return texts

    def _version(self, target: Target) -> int:
        if target.version is not None:
            return target.version
        announced = self.weights.announced(target.job_id)
        return announced.version if announced else 0


def _refuse(faults: list[FieldViolation]) -> None:
    if faults:
        raise InvalidInput("this judge cannot be asked", code="invalid_job_spec", violations=tuple(faults))
