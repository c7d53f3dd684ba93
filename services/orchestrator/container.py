"""Everything that REST, gRPC and the web pages share, put together once, and what routers take from a request:
context, who asks, bounds, threads.

Threads of their own for what nobody else may wait for: checks of specs, calls that last, and the door.
All other requests share the threads that come with the event loop. What lasts would take all of those, and then neither
a health check nor who asks could be looked up.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial, wraps
from typing import Annotated, Any, ParamSpec, TypeVar

import anyio.to_thread
from anyio import CapacityLimiter
from anyio.lowlevel import RunVar
from fastapi import Depends, Path, Query, Request
from starlette.concurrency import run_in_threadpool

from services.orchestrator.agent_episodes import AgentEpisodes
from services.orchestrator.agents import AgentSessions
from services.orchestrator.auth import AuditLog, Authenticator, Principal, require_within
from services.orchestrator.autoscaling import Autoscaling, Scale, ServingTraffic
from services.orchestrator.capture import CaptureStore
from services.orchestrator.checks import ModelCheck, PlanWarnings, SpecCheck
from services.orchestrator.commit import Durability, Leadership
from services.orchestrator.continual import ContinualLoop, ContinualStore, RoundExperience, RoundJobs
from services.orchestrator.damaged_jobs import belongs_to
from services.orchestrator.datasets import DatasetFiles, Datasets, TaskLibrary
from services.orchestrator.deletion import JobDeletion, Leftovers
from services.orchestrator.dispatch import PromptDispatcher
from services.orchestrator.evaluation import EvaluationLimits, EvaluationQueue
from services.orchestrator.forks import Forks
from services.orchestrator.jobs import EventFiles, JobStore
from services.orchestrator.leases import JobFiles, Leases
from services.orchestrator.monitor import JobMonitor
from services.orchestrator.recovery import JobManifests, JobRebuild, PlatformIdentity, RecoveryWatch
from services.orchestrator.replicas import GroupsInHand, ReplicaAssigner, ReplicaRegistry
from services.orchestrator.scoring import Scorer
from services.orchestrator.serving import PoolLimits, ServedJudges, ServedModels, ServingPool, ServingQuota
from services.orchestrator.settings import Settings
from services.orchestrator.steps import JobPreparation, JobQueue, JobRunner, JobTraining
from services.orchestrator.values import ValueProgress
from spo import redis_keys
from spo.api import JOB_ID_PATTERN, SESSION_ID_PATTERN
from spo.errors import InvalidInput, NotFound, NotReady
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient, only_this_job
from spo.rpc.client import RpcClient
from spo.rpc.pools import AddressRules, InferenceClient, JudgePools
from spo.spec.job_spec import TasksSpec
from spo.spec.section import ACTIVE
from spo.spec.tasks import verifiers_in
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.tinker_service_pb2_grpc import TinkerServiceStub
from spo.v1.value_service_pb2_grpc import ValueServiceStub

# Checks of specs read files and start processes; one tenant takes at most half of the places.
CHECKS, CHECKS_WAITING = 4, 32
# Calls that last wait for a model, a judge or the store, up to minutes.
LASTING, LASTING_WAITING = 32, 32
DOOR = 8

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


class BoundedThreads:
    """Runs few calls at a time and lets few more wait; built in the event loop that it serves."""

    def __init__(self, threads: int, most_waiting: int, refusal: NotReady) -> None:
        self._limiter = CapacityLimiter(threads)
        self._most = threads + most_waiting
        self._refusal = refusal
        # The limiter counts a task only once it waits, which is too late where many come at once.
        self._under_way = 0

    async def run(self, call: Callable[[], Answer]) -> Answer:
        """What the call returns. Raises NotReady, the refusal, when too many wait already."""
        if self._under_way >= self._most:
            raise NotReady(self._refusal.message, code=self._refusal.code)
        self._under_way += 1
        try:
            return await anyio.to_thread.run_sync(call, limiter=self._limiter)
        finally:
            self._under_way -= 1


class SharedThreads:
    """Bounded threads of which one tenant takes at most half, so that its slow calls leave room for others'."""

    def __init__(self, threads: int, most_waiting: int, refusal: NotReady) -> None:
        self._all = BoundedThreads(threads, most_waiting, refusal)
        self._refusal = refusal
        self._threads_of_one = max(1, threads // 2)
        self._most_of_one = (threads + most_waiting) // 2
        self._gates: dict[str, CapacityLimiter] = {}
        self._under_way: Counter[str] = Counter()

    async def run(self, call: Callable[[], Answer], tenant: str) -> Answer:
        """What the call returns. Raises NotReady, the refusal, when too many, or too many of the tenant's, wait."""
        if self._under_way[tenant] >= self._most_of_one:
            raise NotReady(self._refusal.message, code=self._refusal.code)
        self._under_way[tenant] += 1
        try:
            async with self._gates.setdefault(tenant, CapacityLimiter(self._threads_of_one)):
                return await self._all.run(call)
        finally:
            self._under_way[tenant] -= 1
            if not self._under_way[tenant]:
                del self._under_way[tenant], self._gates[tenant]


def threads_for_checks() -> SharedThreads:
    """For checks of specs."""
    return SharedThreads(
        CHECKS, CHECKS_WAITING, NotReady("too many specs are being checked; try again", code="checks_busy")
    )


def lasting_calls() -> BoundedThreads:
    """For calls that last, of the running event loop."""
    try:
        return _LASTING.get()
    except LookupError:
        refusal = NotReady("too many requests wait for models, judges or the store; try again", code="calls_busy")
        made = BoundedThreads(LASTING, LASTING_WAITING, refusal)
        _LASTING.set(made)
        return made


def lasting(endpoint: Callable[Given, Answer]) -> Callable[Given, Coroutine[Any, Any, Answer]]:
    """The endpoint as one whose calls last."""

    @wraps(endpoint)
    async def apart(*args: Given.args, **kwargs: Given.kwargs) -> Answer:
        return await lasting_calls().run(partial(endpoint, *args, **kwargs))

    return apart


async def at_the_door(call: Callable[[], Answer]) -> Answer:
    """What comes before and after every request, and says whether the platform is ready: never behind requests."""
    try:
        limiter = _DOOR.get()
    except LookupError:
        limiter = CapacityLimiter(DOOR)
        _DOOR.set(limiter)
    return await anyio.to_thread.run_sync(call, limiter=limiter)


_LASTING: RunVar[BoundedThreads] = RunVar("_LASTING")
_DOOR: RunVar[CapacityLimiter] = RunVar("_DOOR")


@dataclass
class AppContext:
    """The orchestrator without what listens for requests; `stop` ends its waits."""

    settings: Settings
    redis: RedisClient
    stop: threading.Event
    leadership: Leadership
    library: TaskLibrary = field(default_factory=TaskLibrary)

    def __post_init__(self) -> None:
        self._connect_services()
        self._open_stores()
        self._follow_replicas()
        self._run_jobs()
        self._go_on_learning()

    @cached_property
    def platform_id(self) -> str:
        """The platform's, by which processes tell whose a state folder is; "" where none has held one."""
        return (self.redis.hget(redis_keys.platform(), "id") or b"").decode()

    def _connect_services(self) -> None:
        settings = self.settings
        self.inference = InferenceClient(settings.inference_address, self.redis)
        self.judges = JudgePools(settings.sandbox_judge_address, settings.verifier_address)
        self.replay = RpcClient("replay-buffer", settings.replay_buffer_address, ReplayServiceStub)
        self.tinker = RpcClient("tinker", settings.tinker_address or "127.0.0.1:7077", TinkerServiceStub)
        self.values = RpcClient("value-estimation", settings.value_estimation_address, ValueServiceStub)

    def _open_stores(self) -> None:
        settings = self.settings
        self.files = JobFiles.of(settings)
        place = self.files.place
        durable = Durability(settings.durable_writes, settings.durable_replicas)
        self.jobs = JobStore(self.redis, self.leadership, EventFiles(place), durable=durable)
        self.datasets = Datasets(self.jobs, DatasetFiles(place, settings.state_path), settings.max_dataset_bytes)
        self.library.resolve = self.datasets.resolve
        self.library.in_use = self._tasks_in_use
        self.experience = ExperienceStore(settings.experience_place)
        self.weight_store = self.files.weights
        self.authenticator = Authenticator(settings, self.redis)
        self.captures = CaptureStore(self.redis)
        self.agent_sessions = AgentSessions(self.jobs)
        self.agent_episodes = AgentEpisodes(self.jobs, self.agent_sessions)
        self.audit = AuditLog(self.redis)
        identity = PlatformIdentity(self.redis, place, settings.weight_place)
        self.job_rebuild = JobRebuild(self.jobs, self.files)
        self.watch = RecoveryWatch(self.jobs, identity, JobManifests(self.jobs, place), self.job_rebuild.mend)
        self.jobs.absent = self.watch.absent

    def _follow_replicas(self) -> None:
        settings = self.settings
        self.replicas = ReplicaRegistry(self.jobs, settings.replica_silence_seconds)
        self.assigner = ReplicaAssigner(self.jobs, self.replicas)
        self.in_hand = GroupsInHand(self.replicas.live)
        traffic = ServingTraffic()
        per_replica = settings.serving_streams_per_replica
        self.autoscaling = Autoscaling(self.jobs, self.assigner, self.judges, traffic, per_replica)
        self.scale = Scale(settings, self.redis)
        self.served_models = ServedModels(self.jobs)
        limits = PoolLimits(settings.serving_streams, settings.serving_seconds, settings.serving_wait_seconds)
        self.serving_pool = ServingPool(self.jobs, self.assigner, limits, traffic)
        self.served_judges = ServedJudges(self.jobs, self.served_models, self.serving_pool)
        self.serving_quota = ServingQuota(
            settings.serving_streams, settings.serving_streams_per_tenant, settings.serving_tokens_per_minute
        )

    def _run_jobs(self) -> None:
        settings, jobs = self.settings, self.jobs
        self.leases = Leases(jobs, settings.checkpoint_place, settings.weight_place, settings.lease_seconds, self.stop)
        self.leases.before_grant = self.watch.before_lease
        self.queue = JobQueue(jobs, self.replicas, settings.max_running_jobs)
        self.leftovers = Leftovers(jobs, self.files, self.watch)
        self.deletion = JobDeletion(jobs, self.files, self.watch.manifests.forget, self.leftovers.look)
        windows = settings.most_fruitless_windows
        self.dispatcher = PromptDispatcher(jobs, self.library, self.replay, windows, self.in_hand)
        self.value_progress = ValueProgress(self.redis)
        scorer = Scorer(
            self.inference,
            self.judges,
            settings.evaluation_requests,
            settings.evaluation_patience_seconds,
            settings.evaluation_attempts,
        )
        limits = EvaluationLimits(settings.evaluation_attempts, settings.evaluations_kept)
        self.evaluations = EvaluationQueue(jobs, self.library, scorer, self.assigner, limits)
        self.model_check = ModelCheck(self.replicas, settings.max_dead_letter_share, self.files.models.expected)
        self.spec_check = SpecCheck(self.library, self.model_check, AddressRules.of(settings.verifier_http_hosts))
        self.forks = Forks(jobs, self.spec_check, self.files)
        self.plan_warnings = PlanWarnings(self.replicas, lambda: self.redis.info("memory")["maxmemory"])
        self.monitor = JobMonitor(jobs, self.leases, self.assigner, settings.stall_seconds)
        self.monitor.evaluations = self.evaluations.standing
        self.monitor.episodes = self.agent_episodes.standing
        preparation = JobPreparation(jobs, self.library, self.model_check, self.judges)
        training = JobTraining(jobs, self.leases, self.evaluations, self.library, settings)
        self.runner = JobRunner(jobs, self.queue, preparation, training, self.monitor, self.assigner)

    def _go_on_learning(self) -> None:
        self.continual = ContinualStore(self.jobs)
        self.round_jobs = RoundJobs(self.jobs, self.forks, self.spec_check, self.experience, self.require_usable)
        learned_from = RoundExperience(
            self.experience, self.jobs, self.served_models, self.captures, self.judges, self.library
        )
        self.continual_loop = ContinualLoop(
            self.continual, self.served_models, self.round_jobs, self.evaluations, learned_from
        )

    def require_usable(
        self, tasks: TasksSpec | None, tenant: str | None, models: Mapping[str, str] | None = None
    ) -> None:
        """Refuse tasks, and folders of models by pointers, that the tenant may not use; None may use all.

        Raises InvalidInput with a pointer to each fault.
        """
        self.datasets.require_usable(tasks, tenant)
        if tasks is not None:
            self.served_judges.require_pinned(tasks, tenant)
        if tenant is not None:
            named: dict[str, str | None] = dict(models or {})
            if tasks is not None:
                named |= {"/tasks/path": tasks.path, "/tasks/evaluation_path": tasks.evaluation_path}
                for at, one in verifiers_in(tasks.verifier):
                    named |= {f"/tasks/{at}/path": one.path} if one.kind == "python" else {}
            require_within(self.settings.tenant_folders, named)

    def _tasks_in_use(self) -> Iterator[TasksSpec]:
        """The tasks of active jobs, as files."""
        for job_id in self.jobs.in_states(ACTIVE):
            # Of a job that ends meanwhile, or whose dataset is gone, nothing is used.
            with suppress(NotFound, InvalidInput), only_this_job():
                yield self.datasets.resolve(self.jobs.spec(job_id).tasks)

    def close(self) -> None:
        """End the connections to the other services, so that no wait for them outlives the process."""
        for client in (self.inference, self.judges, self.replay, self.values, self.tinker, self.serving_pool):
            client.close()


async def _context(request: Request) -> AppContext:
    context: AppContext = request.app.state.context
    return context


async def _principal(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


def checks_of(request: Request) -> SharedThreads:
    """The threads for checks of specs."""
    checks: SharedThreads = request.app.state.checks
    return checks


ContextDep = Annotated[AppContext, Depends(_context)]
PrincipalDep = Annotated[Principal, Depends(_principal)]


async def _own_job(
    context: ContextDep,
    principal: PrincipalDep,
    job_id: Annotated[str, Path(pattern=JOB_ID_PATTERN, description="Id of a job.")],
) -> str:
    if not principal.is_admin:
        await run_in_threadpool(require_own_job, context, principal, job_id)
    return job_id


def require_own_job(context: AppContext, principal: Principal, job_id: str) -> None:
    """Raises NotFound for another tenant's job as for one that never was, so that nobody can tell which it is."""
    if principal.is_admin:
        return
    try:
        is_own = belongs_to(context.jobs, job_id, principal.tenant)
    except NotFound:
        raise context.watch.absent(job_id, principal.tenant) from None
    if not is_own:
        raise NotFound(f"there is no job {job_id}", code="job_not_found")


JobId = Annotated[str, Depends(_own_job)]
SessionId = Annotated[str, Path(pattern=SESSION_ID_PATTERN)]
PromptId = Annotated[str, Path(pattern=r"^[0-9a-f]{1,128}$")]
TrajectoryId = Annotated[str, Path(pattern=r"^traj_[0-9A-Za-z]{1,64}$")]

Limit = Annotated[int, Query(ge=1, le=1000)]
PolicyVersion = Annotated[int | None, Query(ge=0, le=2**53, description="Weight version; default: the newest, 0: pi0.")]
