"""The verifiers' stage: test sets they can score by, and many responses under way at once, one verdict each.

gRPC service of the verifiers: the judge's contract, for test sets that decide by what lies outside the platform.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from services.verifier.http_scorer import ServiceFailed
from services.verifier.settings import Settings
from spo import observability, redis_keys
from spo.errors import FieldViolation, InvalidInput, ResourceExhausted
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams.stage import Consumer
from spo.rpc.server import JudgeCalls
from spo.service.judge_stage import JudgedEntry, JudgeStage, KeptBytes, StoredTestSets
from spo.spec.tasks import OWN_MODEL, SERVED, served_judge
from spo.tasks.verifier import OF_RUN, VERIFIER, composed_version, kind_of, own_judges, pool_of, require_composable
from spo.v1 import judge_service_pb2 as judge
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import HttpScore, ModelScore, Outcome, TestSet, Verdict

# Raise it when a change here could change a verdict: stored values then no longer apply.
VERIFIER_VERSION = "verifier-1"
LONGEST_URL = 2048
MOST_SECONDS = 600.0
MOST_RUBRIC = 32_768
MOST_VOTES = 15
KINDS = ("http", "model")


class ResponseScorer(Protocol):
    """Decides by one kind of test set."""

    async def verdicts(
        self, responses: Sequence[str], test_set: TestSet, language: str = "", look: int = 0
    ) -> list[Verdict]:
        """One verdict per response; language: of programs in them; look: counted where asked again. Raises SpoError."""


def of_run(test_set: TestSet, run_id: str) -> TestSet:
    """The test set, asking pi0 of the run where it asks the platform's own model.

    Raises InvalidInput where it does and no run is named.
    """
    asking = [test_set, *(part.verifier for part in test_set.composition.parts)]
    if not any(_asks_own_model(one) for one in asking):
        return test_set
    if not run_id:
        raise InvalidInput("the job's pi0 judges these responses, and they are of no job: name a model by its address")
    found = TestSet()
    found.CopyFrom(test_set)
    for one in (found, *(part.verifier for part in found.composition.parts)):
        if _asks_own_model(one):
            one.model.address = OF_RUN + run_id
    return found


def _asks_own_model(test_set: TestSet) -> bool:
    return test_set.HasField("model") and not test_set.model.address and not test_set.model.model.startswith(SERVED)


def require_scorable(test_set: TestSet) -> None:
    """Raises InvalidInput naming each field that cannot be scored by."""
    kind = kind_of(test_set)
    if kind == "composition" and pool_of(test_set) == VERIFIER:
        require_composable(test_set, _require_part)
        return
    if kind not in KINDS:
        raise InvalidInput(
            "this test set cannot be scored by",
            violations=(FieldViolation(f"/{kind}", "belongs to sandbox-judge: verifiers score by http and model"),),
        )
    rules = _rules_of_http(test_set.http) if kind == "http" else _rules_of_model(test_set.model)
    rules["/pass_score"] = (_within(test_set.pass_score, 1), "between 0 and 1")
    faults = tuple(FieldViolation(pointer, f"must be {rule}") for pointer, (holds, rule) in rules.items() if not holds)
    if faults:
        raise InvalidInput("this test set cannot be scored by", violations=faults)


def _require_part(test_set: TestSet) -> None:
    """What belongs to the sandbox judge is looked at there."""
    if kind_of(test_set) in KINDS:
        require_scorable(test_set)


def _rules_of_http(http: HttpScore) -> dict[str, tuple[bool, str]]:
    return {
        "/http/url": (0 < len(http.url) <= LONGEST_URL, f"an address of at most {LONGEST_URL} characters"),
        "/http/arguments_json": (_is_object(http.arguments_json), "a JSON object"),
        "/http/timeout_seconds": (_within(http.timeout_seconds, MOST_SECONDS), f"at most {MOST_SECONDS:g}"),
    }


def _rules_of_model(model: ModelScore) -> dict[str, tuple[bool, str]]:
    return {
        "/model/rubric": (0 < len(model.rubric) <= MOST_RUBRIC, f"not empty, at most {MOST_RUBRIC} characters"),
        "/model/address": (
            len(model.address) <= LONGEST_URL and not model.address.startswith(OF_RUN),
            "the base address of an OpenAI-compatible service, or left out for the job's pi0",
        ),
        "/model/model": (
            bool(model.model) if model.address else model.model in ("", OWN_MODEL) or _is_pinned(model.model),
            f"the name of a model at that address, and without one {OWN_MODEL} or {SERVED}NAME=job_...@VERSION",
        ),
        "/model/votes": (0 <= model.votes <= MOST_VOTES, f"at most {MOST_VOTES}"),
    }


def _is_pinned(model: str) -> bool:
    judge = served_judge(model)
    return judge is not None and bool(judge.job_id)


def _within(value: float, most: float) -> bool:
    return math.isfinite(value) and 0 <= value <= most


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text or "{}"), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True)
class VerdictBatch:
    """The verdicts of one request: `programs[i]` gets that of `unique[programs[i]]` in `future`'s list."""

    programs: Sequence[str]
    unique: Mapping[str, int]
    future: Future[list[Verdict]]

    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]:
        """In the order of the responses. Raises what scoring raised, TimeoutError, CancelledError."""
        found = self.future.result(timeout_seconds)
        return [found[self.unique[program]] for program in self.programs]

    def pending(self) -> list[Future[list[Verdict]]]:
        """What is waited for."""
        return [self.future]

    def cancel(self) -> None:
        """Score nothing more for it."""
        self.future.cancel()


class VerifierScheduler:
    """The test sets, the scorers by kind, and the loop on which they work."""

    judge_version = VERIFIER_VERSION

    def __init__(self, store: KeptBytes, settings: Settings, scorers: Mapping[str, ResponseScorer]) -> None:
        self.test_sets = StoredTestSets(store, redis_keys.verifier_tests, require_scorable)
        self.scorers = scorers
        self._settings = settings
        self._waiting = 0
        self._lock = threading.Lock()
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="scoring", daemon=True)
        self._thread.start()

    @property
    def load(self) -> float:
        """0 idle, 1 when no more responses are taken."""
        return min(1.0, self._waiting / self._settings.max_waiting_responses)

    def submit(
        self,
        programs: Sequence[str],
        language: str,
        tests_digest: str,
        priority: Priority.ValueType,
        *,
        want_details: bool = False,
        run_id: str = "",
    ) -> VerdictBatch:
        """Begin to score responses, equal ones once. Raises InvalidInput, NotFound, ResourceExhausted."""
        test_set = of_run(self.test_sets.get(tests_digest), run_id)
        unique = {program: number for number, program in enumerate(dict.fromkeys(programs))}
        with self._lock:
            if self._waiting and self._waiting + len(unique) > self._settings.max_waiting_responses:
                raise ResourceExhausted(f"{self._waiting} responses are being scored; try again later")
            self._waiting += len(unique)
        future = self._begin(self._scored(list(unique), test_set, language))
        future.add_done_callback(lambda _: self._count_off(len(unique)))
        return VerdictBatch(programs, unique, future)

    async def _scored(self, responses: Sequence[str], test_set: TestSet, language: str) -> list[Verdict]:
        verdicts = await self.scorers[kind_of(test_set)].verdicts(responses, test_set, language)
        # Another run's pi0, or another version that a name means, is another judge: it judges anew.
        own = own_judges(test_set)
        for verdict in verdicts:
            # A composition's verdict brings the version of the sandbox judge, where that has decided parts of it.
            verdict.judge_version = composed_version(self.judge_version, verdict.judge_version, *own)
            observability.JUDGE_VERDICTS.labels(outcome=Outcome.Name(verdict.outcome)).inc()
        return verdicts

    def _begin(self, work: Coroutine[Any, Any, list[Verdict]]) -> Future[list[Verdict]]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _count_off(self, responses: int) -> None:
        with self._lock:
            self._waiting -= responses

    def close(self, seconds: float) -> None:
        """End the loop; what is under way is cancelled."""

        async def end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task()}
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self.loop).result(max(1.0, seconds))
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(max(1.0, seconds))
        if not self._thread.is_alive():
            self.loop.close()


class VerifierWorker(JudgeStage):
    """Scores rollout groups from the stream; call it with a stop event."""

    def __init__(
        self, client: RedisClient, scheduler: VerifierScheduler, consumer_name: str, settings: Settings
    ) -> None:
        stream, group = redis_keys.verifier_rollouts(), redis_keys.VERIFIER_GROUP
        consumer = Consumer(client, stream, group, consumer_name, settings.reclaim_seconds)
        super().__init__("verifier", consumer, scheduler, settings.stream_groups, settings.drain_seconds)
        self.most_failures = settings.group_failures

    def _forward(self, judged: JudgedEntry) -> None:
        """What a service that is there fails on time after time is set aside with its reason, and others go on."""
        try:
            super()._forward(judged)
        except ServiceFailed as error:
            failures = self.consumer.failures(judged.entry) + 1
            if failures < self.most_failures:
                raise
            raise InvalidInput(f"failed {failures} times: {error.message}", code=error.code) from error


class VerifierService(JudgeCalls):
    """The calls of this pool: responses are scored by whoever is outside the platform."""

    def __init__(self, scheduler: VerifierScheduler) -> None:
        super().__init__(scheduler.test_sets, (CancelledError,))
        self.scheduler = scheduler

    def submitted(self, request: judge.JudgeRequest) -> VerdictBatch:
        """The scores to come. Raises InvalidInput, NotFound, ResourceExhausted."""
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
