"""Votes of the platform's own models: of the job's pi0 by the replicas that serve it, or of a served policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from statistics import fmean

from services.verifier.circuit import Circuits
from services.verifier.guarded_post import BadAnswer, ServiceAway
from services.verifier.model_scorer import MOST_POINTS, points_in, question_of
from services.verifier.scores import scored
from services.verifier.served_policy import ServedPolicy
from services.verifier.settings import Settings
from spo import redis_keys
from spo.errors import NotReady, PreconditionFailed, ResourceExhausted
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import RunSpecs
from spo.rpc.inference_client import InferenceClient
from spo.spec.verifier import served_judge
from spo.tasks.verifier_pool import OF_RUN
from spo.v1.inference_service_pb2 import GenerateRequest, GenerateResponse
from spo.v1.prompt_pb2 import Prompt, PromptGroup, Sampling
from spo.v1.verdict_pb2 import TestSet, Verdict


class PlatformModel:
    """Asks pi0 of the run that a test set's address names after OF_RUN, or the served policy that its model names."""

    def __init__(self, client: RedisClient, circuits: Circuits, settings: Settings) -> None:
        self._inference = InferenceClient(settings.inference_address, client)
        self._specs = RunSpecs(client)
        self._served = ServedPolicy(settings)
        self._circuits = circuits
        self._settings = settings
        # Each call is a thread that waits for the engine.
        self._calls = ThreadPoolExecutor(settings.http_calls, thread_name_prefix="own-model")

    async def verdicts(
        self, responses: Sequence[str], test_set: TestSet, language: str = "", look: int = 0
    ) -> list[Verdict]:
        """One verdict per response. Raises BadAnswer, ServiceAway, InvalidInput where a question does not fit."""
        return list(await asyncio.gather(*(self._verdict(response, test_set, look) for response in responses)))

    async def _verdict(self, response: str, test_set: TestSet, look: int) -> Verdict:
        wanted = max(1, test_set.model.votes)
        votes: list[float] = []
        tries = 0

        async def ask() -> list[float]:
            nonlocal tries
            tries += 1
            said = await self._said(response, test_set, wanted - len(votes), f"{look} {tries}")
            votes.extend(points for text in said if (points := _points(text)) is not None)
            if len(votes) < wanted:
                points_in(next(text for text in said if _points(text) is None))
            return votes

        await self._circuits.of(test_set.model.address or test_set.model.model).call(ask)
        told = f"votes of {MOST_POINTS}: {', '.join(f'{points:g}' for points in votes)}"
        return scored(fmean(votes) / MOST_POINTS, "the judge", test_set.pass_score, told)

    async def _said(self, response: str, test_set: TestSet, votes: int, turn: str) -> list[str]:
        """What the model writes, without its reasoning; the same for the same response, judge and turn."""
        run_id = test_set.model.address.removeprefix(OF_RUN)
        asked = redis_keys.digest(
            run_id or test_set.model.model, response, test_set.model.rubric, test_set.model.statement, turn
        )
        question = question_of(test_set.model, response, f"response-{asked[:16]}")
        served = served_judge(test_set.model.model)
        loop = asyncio.get_running_loop()
        if served is not None and not run_id:
            return await loop.run_in_executor(self._calls, self._served.said, served, question, votes, asked)
        found = await loop.run_in_executor(self._calls, self._generate, self._group(run_id, question, votes, asked))
        return [each.response_text[each.reasoning_characters :] for each in found.group.trajectories]

    def _group(self, run_id: str, question: str, votes: int, asked: str) -> PromptGroup:
        temperature = self._settings.model_temperature
        sampling = Sampling(
            samples=votes,
            temperature_min=temperature,
            temperature_max=temperature,
            top_p=1.0,
            max_tokens=min(self._settings.model_tokens, self._specs.of(run_id).model.max_response_tokens),
            seed=int(asked[:15], 16),
        )
        prompt = Prompt(prompt_id=asked, text=question)
        group = PromptGroup(group_id=f"judge-{asked[:32]}", run_id=run_id, prompt=prompt, sampling=sampling)
        group.policy_version = 0
        return group

    def _generate(self, group: PromptGroup) -> GenerateResponse:
        try:
            found: GenerateResponse = self._inference.call(
                "Generate", GenerateRequest(group=group), self._settings.model_seconds
            )
        except (NotReady, PreconditionFailed, ResourceExhausted) as error:
            # No replica serves the run yet, or it is full: the responses wait.
            raise ServiceAway(f"the platform's inference: {error.message}") from None
        if len(found.group.trajectories) != group.sampling.samples:
            raise BadAnswer(f"inference gave {len(found.group.trajectories)} of {group.sampling.samples} votes")
        return found


def _points(text: str) -> float | None:
    try:
        return points_in(text)
    except BadAnswer:
        return None
