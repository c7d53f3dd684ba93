"""Many responses: one verdict each, all under way at once on one event loop, since verifiers mostly wait for others."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from services.verifier import redis_keys as own_keys
from services.verifier.settings import Settings
from services.verifier.test_set_rules import VERIFIER_VERSION, ResponseScorer, of_run, require_scorable
from spo.errors import ResourceExhausted
from spo.observability import metrics
from spo.service.stored_test_sets import KeptBytes, StoredTestSets
from spo.tasks.verifier_pool import composed_version, kind_of, own_judges
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import Outcome, TestSet, Verdict


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
        self.test_sets = StoredTestSets(store, own_keys.verifier_tests, require_scorable)
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
            metrics.JUDGE_VERDICTS.labels(outcome=Outcome.Name(verdict.outcome)).inc()
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
