"""Many programs: one verdict each, from the cache where it is known, otherwise from the workers, evaluation first.

A worker is a thread with zygotes of its own; there are as many as cores. The queue is bounded: beyond it callers are
refused and may try again.
"""

from __future__ import annotations

import itertools
import platform
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import redis
from blake3 import blake3

from services.sandbox_judge import redis_keys as own_keys
from services.sandbox_judge.executor import JudgeFault
from services.sandbox_judge.isolation.memory_cgroup import memory_parent
from services.sandbox_judge.languages import behaviour_of, language_of
from services.sandbox_judge.program_judge import Cancelled, JudgeOptions, ProgramJudge, encoded
from services.sandbox_judge.sandbox_worker import SandboxWorker
from services.sandbox_judge.settings import IsolationTier, Settings
from services.sandbox_judge.test_set_store import Store, TestSets
from spo import redis_keys
from spo.errors import NotReady, ResourceExhausted
from spo.observability import metrics
from spo.observability.logs import get_logger
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import Outcome, TestSet, Verdict

log = get_logger("scheduler")

ATTEMPTS = 3
# A program whose second look differs gets so many looks in all.
MOST_RUNS = 4
# Raise it when a change of the judge could change a verdict: cached verdicts and stored values then no longer apply.
REVISION = 2
_LAST = 1 << 30


@dataclass(frozen=True)
class JudgeTask:
    """One program waiting for its verdict."""

    program: str
    language: str
    test_set: TestSet
    options: JudgeOptions
    recheck: bool
    verdict: Future[Verdict] = field(default_factory=Future)


@dataclass(frozen=True)
class Batch:
    """Programs of one request; `programs[i]` gets the verdict of `futures[programs[i]]`."""

    programs: Sequence[str]
    futures: dict[str, Future[Verdict]]
    cancelled: threading.Event

    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]:
        """The verdicts in the order of the programs. Raises what judging raised, TimeoutError, CancelledError."""
        return [self.futures[program].result(timeout_seconds) for program in self.programs]

    def cancel(self) -> None:
        """Judge nothing more for it: what waits is dropped, what runs ends before its next test."""
        self.cancelled.set()
        for future in self.futures.values():
            future.cancel()


class JudgeScheduler:
    """The queue of programs and the workers that judge them."""

    def __init__(self, store: Store, settings: Settings, tier: IsolationTier, workers: int) -> None:
        self.judge_version = f"{REVISION}+cpython{platform.python_version()}"
        self.isolation = tier
        metrics.JUDGE_ISOLATION.labels(tier=tier).set(1)
        self.test_sets = TestSets(store)
        self._store = store
        self._cgroups = memory_parent(settings.memory_cgroup)
        self.features = ["memory-cgroup"] if self._cgroups else []
        self._settings = settings
        # (urgency, arrival, task); a worker ends at None, which sorts after every task.
        self._queue: queue.PriorityQueue[tuple[int, int, JudgeTask | None]] = queue.PriorityQueue()
        self._numbers = itertools.count()
        self._program_judge = ProgramJudge(settings.max_source_bytes)
        self._busy = 0
        self._workers = [SandboxWorker(tier, index, settings, self._cgroups) for index in range(workers)]
        self._threads = [
            threading.Thread(target=self._work, args=(worker,), name=f"worker-{worker.index}", daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    @property
    def load(self) -> float:
        """0 idle, 1 when every worker is busy."""
        return min(1.0, self._busy / len(self._workers))

    def submit(
        self,
        programs: Sequence[str],
        language: str,
        tests_digest: str,
        priority: Priority.ValueType,
        *,
        want_details: bool = False,
        stop_early: bool = False,
    ) -> Batch:
        """Queue what the cache does not know. Raises InvalidInput, NotFound, ResourceExhausted."""
        language_of(language)
        test_set = self.test_sets.get(tests_digest)
        keys = {program: self._key(program, language, tests_digest) for program in dict.fromkeys(programs)}
        futures = {} if want_details else self._cached(keys)
        missing = [program for program in keys if program not in futures]
        if self._queue.qsize() + len(missing) > self._settings.max_queued_programs:
            raise ResourceExhausted(f"{self._queue.qsize()} programs are waiting; try again later")
        urgency = 0 if priority == Priority.PRIORITY_EVALUATION else 1
        cancelled = threading.Event()
        options = JudgeOptions(want_details, stop_early, wanted=lambda: not cancelled.is_set())
        for program in missing:
            task = JudgeTask(program, language, test_set, options, self._sampled(keys[program]))
            if not want_details:
                task.verdict.add_done_callback(self._remember(keys[program]))
            futures[program] = task.verdict
            self._queue.put((urgency, next(self._numbers), task))
        return Batch(programs, futures, cancelled)

    def interrupt(self) -> None:
        """Kill what runs; it starts again for callers that still wait."""
        for worker in self._workers:
            worker.kill()

    def close(self) -> None:
        """Finish what is queued, then end the workers."""
        for _ in self._workers:
            self._queue.put((_LAST, next(self._numbers), None))
        for thread in self._threads:
            thread.join(self._settings.drain_seconds)

    def _key(self, program: str, language: str, tests_digest: str) -> str:
        # Hashed first: a program need not be UTF-8.
        source = blake3(encoded(program)).hexdigest()
        return own_keys.verdict(
            redis_keys.digest(source, tests_digest, language, behaviour_of(language), self.judge_version)
        )

    def _sampled(self, key: str) -> bool:
        """Whether a program gets a second look; its key decides, so that the same ones do on every judge."""
        return int(key[-8:], 16) < self._settings.recheck_rate * (1 << 32)

    def _cached(self, keys: dict[str, str]) -> dict[str, Future[Verdict]]:
        if not keys or not self._settings.cache_seconds:
            return {}
        found: dict[str, Future[Verdict]] = {}
        stored: list[bytes | None] = self._store.mget(list(keys.values()))
        for program, serialized in zip(keys, stored, strict=True):
            if serialized is not None:
                verdict = Verdict.FromString(serialized)
                verdict.cached = True
                found[program] = Future()
                found[program].set_result(verdict)
        metrics.JUDGE_CACHE_HITS.inc(len(found))
        return found

    def _remember(self, key: str) -> Callable[[Future[Verdict]], None]:
        def store(future: Future[Verdict]) -> None:
            if future.cancelled() or future.exception() or not self._settings.cache_seconds:
                return
            # A wall-clock limit says as much about the machine's load as about the program.
            if future.result().outcome != Outcome.OUTCOME_WALL_TIME_LIMIT:
                try:
                    self._store.set(key, future.result().SerializeToString(), ex=self._settings.cache_seconds)
                except redis.RedisError as error:
                    log.warning("verdict not cached", reason=str(error))

        return store

    def _work(self, worker: SandboxWorker) -> None:
        while (task := self._queue.get()[2]) is not None:
            if not task.verdict.set_running_or_notify_cancel():
                continue
            self._busy += 1
            try:
                task.verdict.set_result(self._decide(task, worker))
            except Exception as error:
                if not isinstance(error, NotReady | Cancelled):
                    log.exception("judging failed")
                task.verdict.set_exception(error)
            finally:
                self._busy -= 1
        worker.close()

    def _decide(self, task: JudgeTask, worker: SandboxWorker) -> Verdict:
        """The verdict of a task, after a second look where it is sampled for one. Raises NotReady, Cancelled."""
        verdict = self._try(task, worker)
        if task.recheck:
            verdict = self._look_again(verdict, task, worker)
        verdict.judge_version = self.judge_version
        verdict.isolation = self.isolation
        metrics.JUDGE_VERDICTS.labels(outcome=Outcome.Name(verdict.outcome)).inc()
        metrics.JUDGE_PROGRAM_SECONDS.observe(verdict.cpu_seconds)
        if verdict.suspected_hard_coded:
            metrics.JUDGE_SUSPECTED_HARD_CODED.inc()
        return verdict

    def _look_again(self, first: Verdict, task: JudgeTask, worker: SandboxWorker) -> Verdict:
        """The verdict after more runs, with how many of them differ; a program that fails in any of them has failed."""
        seen = [first, self._try(task, worker)]
        if seen[0].outcome != seen[1].outcome:
            seen += [self._try(task, worker) for _ in range(MOST_RUNS - len(seen))]
            log.warning("flaky program", outcomes=[Outcome.Name(verdict.outcome) for verdict in seen])
            metrics.JUDGE_FLAKY_PROGRAMS.inc()
        metrics.JUDGE_RECHECKED_PROGRAMS.inc()
        verdict = next((failed for failed in seen if failed.outcome != Outcome.OUTCOME_ACCEPTED), first)
        verdict.runs = len(seen)
        verdict.differing_runs = sum(other.outcome != verdict.outcome for other in seen)
        return verdict

    def _try(self, task: JudgeTask, worker: SandboxWorker) -> Verdict:
        """Judge a task, with new zygotes after a fault. Raises NotReady after ATTEMPTS faults, Cancelled."""
        fault = ""
        for _ in range(ATTEMPTS):
            try:
                verdict = self._program_judge.judge(worker, task.program, task.language, task.test_set, task.options)
                worker.retire_old()
                return verdict
            except JudgeFault as error:
                fault = str(error)
                log.warning("judge fault; starting new zygotes", worker=worker.index, reason=fault)
                worker.close()
                if not task.options.wanted():
                    raise Cancelled from error
        raise NotReady(f"the judge failed {ATTEMPTS} times on this program: {fault}", code="judge_fault")
