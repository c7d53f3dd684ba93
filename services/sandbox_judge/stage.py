"""The sandbox judge's stage: rollouts that name no verifiers, queued program by program, one verdict each, cached
where known.

What waits for the workers: programs one by one, and groups of responses that may be scored in one fork together.
Only groups of one run and one function do, so that nothing of another run or tenant is ever in their process.

Many programs: one verdict each, from the cache where it is known, otherwise from the workers, which tenants share.
A worker is a thread with zygotes of its own; there are as many as cores. The queue is bounded, for each tenant that
has something in it alike: beyond it callers are refused and may try again.

What waits for the workers of a judge, and whose turn it is: tenants share the workers, whatever each has waiting.

Programs cannot be interrupted for another tenant's, and the worst of them hold a worker as long as they are allowed
to. So a tenant does not only come first that has used the workers least: where several are there, none has more than
its part of the workers at once, so that another's next program finds one free and waits for no program of a stranger.
Within a tenant's share evaluations go first, then what came first.

gRPC service of the judge: decodes requests, asks the scheduler, encodes verdicts.
"""

from __future__ import annotations

import heapq
import itertools
import platform
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass, field, replace

import grpc
from blake3 import blake3

from services.sandbox_judge.executor import JudgeFault, StartFault, behaviour_of, language_of, languages, version_of
from services.sandbox_judge.probe import language_fault, role_fault
from services.sandbox_judge.program_judge import (
    DETAIL_CHARACTERS,
    OUTPUT_BYTES,
    Cancelled,
    JudgeOptions,
    ProgramJudge,
    encoded,
)
from services.sandbox_judge.sandbox_worker import (
    MemoryBudget,
    Role,
    SandboxWorker,
    ZygoteStarts,
    memory_parent,
    program_memory,
    this_machine,
)
from services.sandbox_judge.scoring import (
    MOST_TOGETHER,
    SCORING_ROLES,
    AnswerJudge,
    behaviour_of_packages,
    judge_code,
    role_of,
    score_groups,
    score_responses,
    shared_by,
)
from services.sandbox_judge.settings import IsolationTier, Settings
from services.sandbox_judge.test_set_store import Store, TestSets, tests_in
from spo import observability, redis_keys
from spo.errors import FieldViolation, InvalidInput, NotReady, ResourceExhausted
from spo.messaging.redis_client import RedisClient
from spo.messaging.streams.stage import Consumer
from spo.observability import get_logger
from spo.rpc.server import JudgeCalls
from spo.service.judge_stage import JudgeStage, VerdictCache
from spo.tasks.answer import ANSWER_LANGUAGE
from spo.tasks.problem import tests_digest as digest_of
from spo.tasks.verifier import composed, gate_has_failed, text_for
from spo.v1 import judge_service_pb2 as judge
from spo.v1.judge_service_pb2 import Priority
from spo.v1.verdict_pb2 import AnswerRule, Checker, Outcome, TestSet, Verdict

# Groups that one fork scores at most.
MOST_GROUPS = 16
# For so long the groups of a run and function that spoilt a fork have one each.
APART_SECONDS = 60.0
_MOST_APART = 1000
# A tenant's part of the workers stays free for so long after its last program: between two rounds of samples of a
# prompt nothing of it waits here, and the next should not find every worker at another's endless loop.
KEPT_SECONDS = 10.0
# How often a worker looks whether a part that is kept free is so no more.
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class JudgeTask:
    """One program waiting for its verdict, or several responses that are scored together.

    shares: the same text for groups that may be in one fork; empty: none may. tenant: whose share of the workers it is
    taken from, "" the operator's.
    """

    programs: tuple[str, ...]
    language: str
    test_set: TestSet
    options: JudgeOptions
    recheck: bool
    verdicts: tuple[Future[Verdict], ...]
    shares: str = ""
    tenant: str = ""


@dataclass(eq=False)
class TenantShare:
    """What a tenant has waiting, by urgency and arrival, and what it has of the workers."""

    # (urgency, arrival, task); those that share a fork may have been taken with another since.
    waiting: list[tuple[int, int, JudgeTask]] = field(default_factory=list)
    # When each worker that it has began.
    began: list[float] = field(default_factory=list)
    used_seconds: float = 0.0
    left_at: float = float("-inf")

    def is_there(self, now: float) -> bool:
        """Whether its part of the workers is its own: it has something here, or had just now."""
        return bool(self.waiting or self.began) or now - self.left_at < KEPT_SECONDS

    def used_by(self, now: float) -> float:
        """Seconds of workers that it has had since it came, those of now among them."""
        return self.used_seconds + sum(now - began for began in self.began)


class JudgeQueue:
    """Tasks by whose turn it is, then urgency, then arrival. Safe from several threads.

    A worker that is done with what it took says so: `done`.
    """

    def __init__(self, workers: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._workers = workers
        self._clock = clock
        self._ready = threading.Condition()
        self._ended = False
        self._numbers = itertools.count()
        self._waiting = 0
        self._tenants: dict[str, TenantShare] = {}
        # Those that share, by arrival.
        self._sharing: dict[tuple[int, str], dict[int, JudgeTask]] = {}
        self._apart: dict[str, float] = {}

    def __len__(self) -> int:
        return self._waiting

    def room(self, tenant: str, most: int) -> int:
        """How many more of a tenant may wait, where `most` may in all: an equal part for each that has some waiting."""
        with self._ready:
            others = sum(bool(share.waiting) for name, share in self._tenants.items() if name != tenant)
            mine = self._tenants.get(tenant, TenantShare()).waiting
            return most // (others + 1) - len(mine)

    def put(self, urgency: int, task: JudgeTask) -> None:
        """Let a task wait; of a tenant's the least urgency goes first."""
        with self._ready:
            number = next(self._numbers)
            if task.shares:
                self._sharing.setdefault((urgency, task.shares), {})[number] = task
            heapq.heappush(self._present(task.tenant).waiting, (urgency, number, task))
            self._waiting += 1
            self._ready.notify()

    def take(self) -> list[JudgeTask]:
        """The next task, and those that may share its fork, as many as leave no worker idle; empty: the end."""
        with self._ready:
            while True:
                now = self._clock()
                share = self._next(now)
                if share is not None:
                    taken = self._taken(share)
                    share.began.append(now)
                    return taken
                if self._ended and not self._waiting:
                    self._ready.notify()
                    return []
                self._ready.wait(_LOOK_SECONDS if self._waiting else None)

    def done(self, tenant: str) -> None:
        """A worker that had taken something of a tenant is free again."""
        with self._ready:
            share, now = self._tenants[tenant], self._clock()
            # Whichever of the tenant's it was: the sum comes out the same.
            share.used_seconds += now - share.began.pop()
            share.left_at = now
            self._ready.notify()

    def end(self) -> None:
        """Let every worker end once nothing waits."""
        with self._ready:
            self._ended = True
            self._ready.notify_all()

    def keep_apart(self, shares: str) -> None:
        """Have a fork each for the groups of a run and function, for a while."""
        with self._ready:
            if len(self._apart) >= _MOST_APART:
                self._apart.clear()
            self._apart[shares] = self._clock() + APART_SECONDS

    def _present(self, tenant: str) -> TenantShare:
        """A tenant's share; one that comes, or comes back, is owed nothing for the time before."""
        now = self._clock()
        share = self._tenants.get(tenant)
        if share is None or not share.is_there(now):
            self._tenants = {name: each for name, each in self._tenants.items() if each.is_there(now)}
            least = min((each.used_by(now) for each in self._tenants.values()), default=0.0)
            share = self._tenants[tenant] = TenantShare(used_seconds=least)
        return share

    def _next(self, now: float) -> TenantShare | None:
        """Who gets the worker that is free: of those with less than their part, who has used the workers least."""
        there = [share for share in self._tenants.values() if share.is_there(now)]
        most = -(-self._workers // max(1, len(there)))
        having = [share for share in there if share.waiting and (len(there) == 1 or len(share.began) < most)]
        return min(having, key=lambda share: share.used_by(now), default=None)

    def _taken(self, share: TenantShare) -> list[JudgeTask]:
        """The tenant's first task and its companions, which wait no more."""
        urgency, number, task = heapq.heappop(share.waiting)
        found = [task]
        if task.shares:
            sharing = self._sharing[urgency, task.shares]
            is_apart = self._apart.get(task.shares, 0.0) > self._clock()
            most = 1 if is_apart else min(MOST_GROUPS, -(-len(sharing) // self._workers))
            del sharing[number]
            others = list(itertools.islice(sharing, most - 1))
            found += [sharing.pop(each) for each in others]
            if others:
                gone = set(others)
                share.waiting = [each for each in share.waiting if each[1] not in gone]
                heapq.heapify(share.waiting)
            if not sharing:
                del self._sharing[urgency, task.shares]
        self._waiting -= len(found)
        return found


# For comparisons of answers, which take microseconds.
GATE_SECONDS = 1.0

log = get_logger("stage")

ATTEMPTS = 3
# A program whose second look differs gets so many looks in all.
MOST_RUNS = 4
# Raise it when a change of the judge could change a verdict: cached verdicts and stored values then no longer apply.
REVISION = 5


@dataclass(frozen=True)
class Batch:
    """Programs of one request; `programs[i]` gets the verdict of `futures[programs[i]]`, put together from `parts`, or
    that in `known`, which was there at once: most answers take less time than a future does."""

    programs: Sequence[str]
    futures: dict[str, Future[Verdict]]
    cancelled: threading.Event
    parts: Sequence[Batch] = ()
    known: Mapping[str, Verdict] = field(default_factory=dict)

    def verdicts(self, timeout_seconds: float | None = None) -> list[Verdict]:
        """The verdicts in the order of the programs. Raises what judging raised, TimeoutError, CancelledError."""
        known, futures = self.known, self.futures
        return [
            known[program] if program in known else futures[program].result(timeout_seconds)
            for program in self.programs
        ]

    def pending(self) -> list[Future[Verdict]]:
        """What is waited for."""
        return list(self.futures.values())

    def future_of(self, program: str) -> Future[Verdict]:
        """The future of a program's verdict, one that has ended where the verdict was there at once."""
        if program in self.futures:
            return self.futures[program]
        ended: Future[Verdict] = Future()
        ended.set_result(self.known[program])
        return ended

    def cancel(self) -> None:
        """Judge nothing more for it: what waits is dropped, what runs ends before its next test."""
        self.cancelled.set()
        for future in self.futures.values():
            future.cancel()
        for part in self.parts:
            part.cancel()


# Judges texts by the test set of a part.
JudgePart = Callable[[Sequence[str], TestSet], Batch]


def judge_by_parts(responses: Sequence[str], test_set: TestSet, language: str, judge: JudgePart) -> Batch:
    """The verdicts on responses by a composition. Raises what `judge` raises.

    Gates come first, those that compare answers are waited for, and a response that has failed one by then is not shown
    to the others. language: of the programs that parts with tests find in the responses.
    """
    parts = [part for part in test_set.composition.parts if part.HasField("verifier")]
    judged: dict[str, dict[str, Future[Verdict]]] = {response: {} for response in responses}
    batches: list[Batch] = []
    try:
        for part in sorted(parts, key=lambda part: not part.gate):
            asked = [one for one in judged if not gate_has_failed(test_set.composition, _known(judged[one]))]
            if asked:
                texts = [text_for(part, response, language) for response in asked]
                batches.append(judge(texts, part.verifier))
                for response, text in zip(asked, texts, strict=True):
                    judged[response][part.name] = batches[-1].future_of(text)
                if part.gate and part.verifier.HasField("answer"):
                    wait(batches[-1].futures.values(), GATE_SECONDS)
    except Exception:
        for batch in batches:
            batch.cancel()
        raise
    futures = {response: _whole(response, test_set, verdicts) for response, verdicts in judged.items()}
    return Batch(responses, futures, threading.Event(), batches)


def _known(verdicts: Mapping[str, Future[Verdict]]) -> dict[str, Verdict]:
    """Those that have come in by now."""
    ended = {name: one for name, one in verdicts.items() if one.done() and not one.cancelled()}
    return {name: one.result() for name, one in ended.items() if one.exception() is None}


def _whole(response: str, test_set: TestSet, verdicts: Mapping[str, Future[Verdict]]) -> Future[Verdict]:
    """The future of the whole, set by whichever part ends last."""
    whole: Future[Verdict] = Future()
    waiting = len(verdicts)
    lock = threading.Lock()

    def one_ended(_part: Future[Verdict]) -> None:
        nonlocal waiting
        with lock:
            waiting -= 1
            if waiting:
                return
        if not whole.set_running_or_notify_cancel():
            return
        try:
            whole.set_result(composed(response, test_set, {name: one.result() for name, one in verdicts.items()}))
        except (Exception, CancelledError) as error:
            whole.set_exception(error)

    for future in verdicts.values():
        future.add_done_callback(one_ended)
    return whole


class JudgeScheduler:
    """The queue of programs and the workers that judge them."""

    def __init__(
        self,
        store: Store,
        settings: Settings,
        tier: IsolationTier,
        workers: int,
        tenant_of: Callable[[str], str] = lambda _run_id: "",
    ) -> None:
        """tenant_of: whose a run is; without it all programs are one tenant's."""
        self._tenant_of = tenant_of
        self.judge_version = f"{REVISION}+cpython{platform.python_version()}"
        self.isolation = tier
        observability.JUDGE_ISOLATION.labels(tier=tier).set(1)
        self.test_sets = TestSets(store)
        self._verdicts = VerdictCache(
            store,
            settings.cache_seconds,
            settings.cache_bytes,
            order=redis_keys.cached_verdict_order(),
            held=redis_keys.cached_verdict_bytes(),
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
        tenant = self._tenant_of(asked.run_id) if missing else ""
        if len(missing) > self._queue.room(tenant, self._settings.max_queued_programs):
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
            task = JudgeTask(tuple(together), language, test_set, options, recheck, verdicts, shares, tenant)
            self._queue.put(urgency, task)
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
            observability.JUDGE_VERDICTS.labels(outcome=Outcome.Name(outcome)).inc(times)
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
                self._queue.done(taken[0].tenant)
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
            observability.JUDGE_VERDICTS.labels(outcome=Outcome.Name(verdict.outcome)).inc()
            observability.JUDGE_PROGRAM_SECONDS.observe(verdict.cpu_seconds)
            if verdict.suspected_hard_coded:
                observability.JUDGE_SUSPECTED_HARD_CODED.inc()
        return verdicts

    def _look_again(self, first: Verdict, task: JudgeTask, worker: SandboxWorker) -> Verdict:
        """The verdict after more runs, with how many of them differ; a program that fails in any of them has failed."""
        seen = [first, *self._try(task, worker)]
        if seen[0].outcome != seen[1].outcome:
            seen += [self._try(task, worker)[0] for _ in range(MOST_RUNS - len(seen))]
            log.warning("flaky program", outcomes=[Outcome.Name(verdict.outcome) for verdict in seen])
            observability.JUDGE_FLAKY_PROGRAMS.inc()
        observability.JUDGE_RECHECKED_PROGRAMS.inc()
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
    return redis_keys.cached_verdict(redis_keys.digest_of(redis_keys.framed(source) + decided_by))


def _count(future: Future[Verdict]) -> None:
    if not future.cancelled() and not future.exception():
        observability.JUDGE_VERDICTS.labels(outcome=Outcome.Name(future.result().outcome)).inc()


def _still_wanted(task: JudgeTask) -> JudgeTask:
    """The task without what nobody waits for any more."""
    both = zip(task.programs, task.verdicts, strict=True)
    waited = [(program, verdict) for program, verdict in both if verdict.set_running_or_notify_cancel()]
    programs, verdicts = zip(*waited, strict=True) if waited else ((), ())
    return replace(task, programs=programs, verdicts=verdicts)


class JudgeWorker(JudgeStage):
    """Judges rollout groups from the stream; call it with a stop event."""

    def __init__(self, client: RedisClient, scheduler: JudgeScheduler, consumer_name: str, settings: Settings) -> None:
        stream, group = redis_keys.rollouts(), redis_keys.JUDGE_GROUP
        consumer = Consumer(client, stream, group, consumer_name, settings.reclaim_seconds)
        super().__init__("sandbox-judge", consumer, scheduler, settings.stream_groups, settings.drain_seconds)


# One answer must stay well below what gRPC carries.
MOST_DETAILS = 20_000
MOST_OUTPUT_BYTES = 64 << 10
MOST_OUTPUT_BYTES_IN_ALL = 16 << 20


class JudgeService(JudgeCalls):
    """The calls of this pool: programs are run in the sandbox."""

    def __init__(self, scheduler: JudgeScheduler) -> None:
        super().__init__(scheduler.test_sets, (Cancelled, CancelledError))
        self.scheduler = scheduler

    def submitted(self, request: judge.JudgeRequest) -> Batch:
        """The verdicts to come on programs. Raises InvalidInput, NotFound, ResourceExhausted."""
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
