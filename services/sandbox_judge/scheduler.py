"""Many programs: one verdict each, from the cache where it is known, otherwise from the workers, evaluation first.

A worker is a thread with zygotes of its own; there are as many as cores. The queue is bounded: beyond it callers are
refused and may try again.
"""

from __future__ import annotations

import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace

from blake3 import blake3

from services.sandbox_judge import redis_keys as own_keys
from services.sandbox_judge.answers.answer_judge import AnswerJudge
from services.sandbox_judge.batch import Batch, judge_by_parts
from services.sandbox_judge.executor import JudgeFault, StartFault
from services.sandbox_judge.isolation.machine import this_machine
from services.sandbox_judge.isolation.memory_budget import MemoryBudget, program_memory
from services.sandbox_judge.isolation.memory_cgroup import memory_parent
from services.sandbox_judge.judge_queue import JudgeQueue, JudgeTask
from services.sandbox_judge.languages import behaviour_of, language_of
from services.sandbox_judge.program_judge import DETAIL_CHARACTERS, Cancelled, JudgeOptions, ProgramJudge, encoded
from services.sandbox_judge.sandbox_worker import Role, SandboxWorker, ZygoteStarts
from services.sandbox_judge.scoring.code_tests import judge_code
from services.sandbox_judge.scoring.packages import SCORING_ROLES, behaviour_of_packages, role_of
from services.sandbox_judge.scoring.right_responses import language_fault, role_fault
from services.sandbox_judge.scoring.scores import MOST_TOGETHER, score_responses
from services.sandbox_judge.scoring.shared_forks import score_groups, shared_by
from services.sandbox_judge.settings import IsolationTier, Settings
from services.sandbox_judge.test_set_store import Store, TestSets
from spo import redis_keys
from spo.errors import NotReady, ResourceExhausted
from spo.observability import metrics
from spo.observability.logs import get_logger
from spo.service.verdict_cache import VerdictCache
from spo.tasks.answer import ANSWER_LANGUAGE
from spo.tasks.problem import tests_digest as digest_of
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import AnswerRule, Checker, Outcome, TestSet, Verdict

log = get_logger("scheduler")

ATTEMPTS = 3
# A program whose second look differs gets so many looks in all.
MOST_RUNS = 4
# Raise it when a change of the judge could change a verdict: cached verdicts and stored values then no longer apply.
REVISION = 4


class JudgeScheduler:
    """The queue of programs and the workers that judge them."""

    def __init__(self, store: Store, settings: Settings, tier: IsolationTier, workers: int) -> None:
        self.judge_version = f"{REVISION}+cpython{platform.python_version()}"
        self.isolation = tier
        metrics.JUDGE_ISOLATION.labels(tier=tier).set(1)
        self.test_sets = TestSets(store)
        self._verdicts = VerdictCache(
            store,
            settings.cache_seconds,
            settings.cache_bytes,
            order=own_keys.verdict_order(),
            held=own_keys.verdict_bytes(),
        )
        self._cgroups = memory_parent(settings.memory_cgroup)
        self.features = ["memory-cgroup"] if self._cgroups else []
        self._settings = settings
        self._queue = JudgeQueue(workers)
        self._program_judge = ProgramJudge(settings.max_source_bytes)
        self._answer_judge = AnswerJudge(settings.max_source_bytes, self.judge_version)
        self._busy = 0
        memory = MemoryBudget(program_memory(this_machine()))
        starts = ZygoteStarts()
        self._workers = [
            SandboxWorker(tier, index, settings, self._cgroups, memory, starts) for index in range(workers)
        ]
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
        run_id: str = "",
    ) -> Batch:
        """Queue what the cache does not know; run_id: whose responses they are. Raises as `submit_with`."""
        asked = JudgeOptions(want_details=want_details, run_id=run_id)
        return self.submit_with(asked, programs, language, tests_digest, priority)

    def submit_with(
        self,
        asked: JudgeOptions,
        programs: Sequence[str],
        language: str,
        tests_digest: str,
        priority: Priority.ValueType,
    ) -> Batch:
        """Queue what the cache does not know. Raises InvalidInput, NotFound, ResourceExhausted."""
        if language != ANSWER_LANGUAGE:
            language_of(language)
        test_set = self.test_sets.get(tests_digest)
        return self._submit(programs, language, tests_digest, test_set, priority, asked)

    def _submit(
        self,
        programs: Sequence[str],
        language: str,
        tests_digest: str,
        test_set: TestSet,
        priority: Priority.ValueType,
        asked: JudgeOptions,
    ) -> Batch:
        want_details = asked.want_details
        if test_set.HasField("composition"):
            # Each part is a request of its own, with its own cached verdicts.
            def judge_part(texts: Sequence[str], part: TestSet) -> Batch:
                return self._submit(texts, language, digest_of(part), part, priority, asked)

            return judge_by_parts(programs, test_set, language, judge_part)
        role = role_of(test_set)
        if role is None and test_set.HasField("answer"):
            return self._answers(programs, test_set.answer, want_details=want_details)
        if role is None:
            language_of(language)
        behaviour = behaviour_of_packages(role) if role else behaviour_of(language)
        decided_by = redis_keys.framed(tests_digest, language, behaviour, self.judge_version)
        keys = {program: _key(program, decided_by) for program in dict.fromkeys(programs)}
        futures = {} if want_details else self._cached(keys)
        missing = [program for program in keys if program not in futures]
        if len(self._queue) + len(missing) > self._settings.max_queued_programs:
            raise ResourceExhausted(f"{len(self._queue)} programs are waiting; try again later")
        urgency = 0 if priority == Priority.PRIORITY_EVALUATION else 1
        cancelled = threading.Event()
        options = replace(asked, wanted=lambda: not cancelled.is_set())
        rechecked = [program for program in missing if self._sampled(keys[program])]
        sharing = shared_by(test_set, asked.run_id)
        for together in (*([program] for program in rechecked), *self._together(missing, rechecked, role)):
            verdicts = tuple(Future[Verdict]() for _ in together)
            for program, verdict in zip(together, verdicts, strict=True):
                if not want_details:
                    verdict.add_done_callback(self._remember(keys[program]))
                futures[program] = verdict
            recheck = together[0] in rechecked
            # A second look at how steady a function is has a process of its own.
            shares = "" if recheck else sharing
            self._queue.put(urgency, JudgeTask(tuple(together), language, test_set, options, recheck, verdicts, shares))
        return Batch(programs, futures, cancelled)

    def _together(self, missing: Sequence[str], rechecked: Sequence[str], role: Role | None) -> Iterator[list[str]]:
        """What one worker judges at once: a program each, or as many responses as leave no worker idle."""
        left = [program for program in missing if program not in set(rechecked)]
        share = -(-len(left) // max(1, len(self._workers)))
        size = max(1, min(MOST_TOGETHER, share)) if role in SCORING_ROLES else 1
        return (left[start : start + size] for start in range(0, len(left), size))

    def _answers(self, responses: Sequence[str], rule: AnswerRule, *, want_details: bool) -> Batch:
        """The verdicts on answers, of no cache: to compare takes less time than to look one up."""
        known, awaited = self._answer_judge.judge(responses, rule, want_details=want_details)
        for outcome, times in Counter(verdict.outcome for verdict in known.values()).items():
            metrics.JUDGE_VERDICTS.labels(outcome=Outcome.Name(outcome)).inc(times)
        for future in awaited.values():
            future.add_done_callback(_count)
        return Batch(responses, awaited, threading.Event(), known=known)

    def interrupt(self) -> None:
        """Kill what runs; it starts again for callers that still wait."""
        for worker in self._workers:
            worker.kill()

    def close(self, seconds: float | None = None) -> None:
        """Finish what is queued, then end the workers, within so many seconds in all; None: `drain_seconds`."""
        deadline = time.monotonic() + (self._settings.drain_seconds if seconds is None else seconds)
        self._queue.end()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._answer_judge.close()

    def _sampled(self, key: str) -> bool:
        """Whether a program gets a second look; its key decides, so that the same ones do on every judge."""
        return int(key[-8:], 16) < self._settings.recheck_rate * (1 << 32)

    def _cached(self, keys: dict[str, str]) -> dict[str, Future[Verdict]]:
        found: dict[str, Future[Verdict]] = {}
        for program, verdict in self._verdicts.find(keys).items():
            found[program] = Future()
            found[program].set_result(verdict)
        return found

    def _remember(self, key: str) -> Callable[[Future[Verdict]], None]:
        def store(future: Future[Verdict]) -> None:
            if future.cancelled() or future.exception():
                return
            # A wall-clock limit says as much about the machine's load as about the program; a fault says nothing of it.
            if future.result().outcome not in (Outcome.OUTCOME_WALL_TIME_LIMIT, Outcome.OUTCOME_INTERNAL_ERROR):
                self._verdicts.put(key, future.result())

        return store

    def _work(self, worker: SandboxWorker) -> None:
        while taken := self._queue.take():
            tasks = [task for task in map(_still_wanted, taken) if task.programs]
            self._busy += 1
            try:
                for task, known in zip(tasks, self._scored_together(tasks, worker), strict=True):
                    self._answer(task, worker, known)
            finally:
                self._busy -= 1
        worker.close()

    def _answer(self, task: JudgeTask, worker: SandboxWorker, known: list[Verdict] | None) -> None:
        """Set the verdicts of a task, those that are known or else what it is judged to be, or what judging raised."""
        try:
            for future, found in zip(task.verdicts, self._decide(task, worker, known), strict=True):
                future.set_result(found)
        except Exception as error:
            if not isinstance(error, NotReady | Cancelled):
                log.exception("judging failed")
            for future in task.verdicts:
                if not future.done():
                    future.set_exception(error)

    def _scored_together(self, tasks: Sequence[JudgeTask], worker: SandboxWorker) -> list[list[Verdict] | None]:
        """The verdicts of groups that share a fork; None for each that is to be judged alone."""
        alone: list[list[Verdict] | None] = [None for _ in tasks]
        if len(tasks) < 2:
            return alone
        groups = [(task.programs, task.test_set, task.options.want_details) for task in tasks]
        try:
            found = score_groups(worker, groups)
        except JudgeFault as error:
            log.warning("judge fault; starting a new zygote", worker=worker.index, role=error.role, reason=str(error))
            found = alone
        except Exception:
            log.exception("groups could not be scored together")
            found = alone
        if None in found:
            self._queue.keep_apart(tasks[0].shares)
        return found

    def _decide(self, task: JudgeTask, worker: SandboxWorker, known: list[Verdict] | None) -> list[Verdict]:
        """The verdicts of a task, after a second look where it is sampled for one. Raises NotReady, Cancelled."""
        verdicts = known if known is not None else self._try(task, worker)
        if task.recheck and verdicts[0].outcome != Outcome.OUTCOME_INTERNAL_ERROR:
            verdicts = [self._look_again(verdicts[0], task, worker)]
        for verdict in verdicts:
            verdict.judge_version = self.judge_version
            verdict.isolation = self.isolation
            metrics.JUDGE_VERDICTS.labels(outcome=Outcome.Name(verdict.outcome)).inc()
            metrics.JUDGE_PROGRAM_SECONDS.observe(verdict.cpu_seconds)
            if verdict.suspected_hard_coded:
                metrics.JUDGE_SUSPECTED_HARD_CODED.inc()
        return verdicts

    def _look_again(self, first: Verdict, task: JudgeTask, worker: SandboxWorker) -> Verdict:
        """The verdict after more runs, with how many of them differ; a program that fails in any of them has failed."""
        seen = [first, *self._try(task, worker)]
        if seen[0].outcome != seen[1].outcome:
            seen += [self._try(task, worker)[0] for _ in range(MOST_RUNS - len(seen))]
            log.warning("flaky program", outcomes=[Outcome.Name(verdict.outcome) for verdict in seen])
            metrics.JUDGE_FLAKY_PROGRAMS.inc()
        metrics.JUDGE_RECHECKED_PROGRAMS.inc()
        verdict = next((failed for failed in seen if failed.outcome != Outcome.OUTCOME_ACCEPTED), first)
        verdict.runs = len(seen)
        verdict.differing_runs = sum(other.outcome != verdict.outcome for other in seen)
        return verdict

    def _judge(self, task: JudgeTask, worker: SandboxWorker) -> list[Verdict]:
        """The verdicts by whichever judge the test set is for. Raises JudgeFault, Cancelled."""
        role, details = role_of(task.test_set), task.options.want_details
        if role in SCORING_ROLES:
            return score_responses(worker, task.programs, task.test_set, task.options)
        (program,) = task.programs
        if role is not None:
            return [judge_code(worker, program, task.test_set, self._settings.max_source_bytes, want_details=details)]
        return [self._program_judge.judge(worker, program, task.language, task.test_set, task.options)]

    def _try(self, task: JudgeTask, worker: SandboxWorker) -> list[Verdict]:
        """Judge a task, with a new zygote after a fault.

        A fault that follows one program through ATTEMPTS zygotes, while they judge what is known to be right, is the
        program's. Raises NotReady where it is the judge's, Cancelled.
        """
        fault = JudgeFault()
        for _ in range(ATTEMPTS):
            try:
                verdicts = self._judge(task, worker)
                worker.retire_old()
                return verdicts
            except JudgeFault as error:
                fault = error
                log.warning(
                    "judge fault; starting a new zygote", worker=worker.index, role=error.role, reason=str(error)
                )
                if not task.options.wanted():
                    raise Cancelled from error
        if isinstance(fault, StartFault):
            raise NotReady(f"the sandbox of {fault.role} does not start: {fault}", code="judge_role_unavailable")
        if len(task.programs) > 1:
            return [self._try(replace(task, programs=(program,)), worker)[0] for program in task.programs]
        if why := self._fault_of_judge(task, fault, worker):
            raise NotReady(f"the judge failed {ATTEMPTS} times on this program: {why}", code="judge_fault")
        log.warning("a fault follows one program; it is the program's", worker=worker.index, reason=str(fault))
        total = len(task.test_set.tests) or 1
        detail = f"the sandbox failed {ATTEMPTS} times on this program alone: {fault}"[:DETAIL_CHARACTERS]
        return [Verdict(outcome=Outcome.OUTCOME_RUNTIME_ERROR, tests_total=total, runs=1, detail=detail)]

    def _fault_of_judge(self, task: JudgeTask, fault: JudgeFault, worker: SandboxWorker) -> str | None:
        """Why others would meet the same fault, None where a response that is right does not."""
        role = role_of(task.test_set)
        why = role_fault(worker, role or Role.PROGRAM)
        if why is None and role is None:
            why = language_fault(worker, task.language)
        if why is None and task.test_set.checker == Checker.CHECKER_SPECIAL:
            why = self._program_judge.checker_fault(worker, task.test_set)
        return why and f"{fault}; {why}"


def _key(program: str, decided_by: bytes) -> str:
    """The key of a program's verdict; decided_by: what else decides about it, framed."""
    # Hashed first: a program need not be UTF-8.
    source = blake3(encoded(program)).hexdigest()
    return own_keys.verdict(redis_keys.digest_of(redis_keys.framed(source) + decided_by))


def _count(future: Future[Verdict]) -> None:
    if not future.cancelled() and not future.exception():
        metrics.JUDGE_VERDICTS.labels(outcome=Outcome.Name(future.result().outcome)).inc()


def _still_wanted(task: JudgeTask) -> JudgeTask:
    """The task without what nobody waits for any more."""
    both = zip(task.programs, task.verdicts, strict=True)
    waited = [(program, verdict) for program, verdict in both if verdict.set_running_or_notify_cancel()]
    programs, verdicts = zip(*waited, strict=True) if waited else ((), ())
    return replace(task, programs=programs, verdicts=verdicts)
