"""Everything that REST, gRPC and the web pages share, put together once."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property

from services.orchestrator.auth.audit import AuditLog
from services.orchestrator.auth.authenticator import Authenticator
from services.orchestrator.auth.paths import require_within
from services.orchestrator.datasets.files import DatasetFiles
from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.datasets.store import Datasets
from services.orchestrator.evaluation.queue import EvaluationLimits, EvaluationQueue
from services.orchestrator.evaluation.scorer import Scorer
from services.orchestrator.jobs.commit import Durability
from services.orchestrator.jobs.event_files import EventFiles
from services.orchestrator.jobs.files import JobFiles
from services.orchestrator.jobs.leases import Leases
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.leadership import Leadership
from services.orchestrator.lifecycle.actions import JobActions
from services.orchestrator.lifecycle.alarms import Alarms
from services.orchestrator.lifecycle.deletion import JobDeletion
from services.orchestrator.lifecycle.dispatcher import PromptDispatcher
from services.orchestrator.lifecycle.forks.fork import Forks
from services.orchestrator.lifecycle.model_check import ModelCheck
from services.orchestrator.lifecycle.monitor import JobMonitor
from services.orchestrator.lifecycle.plan_warnings import PlanWarnings
from services.orchestrator.lifecycle.preparation import JobPreparation
from services.orchestrator.lifecycle.queue import JobQueue
from services.orchestrator.lifecycle.runner import JobRunner
from services.orchestrator.lifecycle.submission import SpecCheck
from services.orchestrator.lifecycle.trainer_deaths import TrainerDeaths
from services.orchestrator.lifecycle.training import JobTraining
from services.orchestrator.recovery.identity import PlatformIdentity
from services.orchestrator.recovery.leftovers import Leftovers
from services.orchestrator.recovery.manifests import JobManifests
from services.orchestrator.recovery.rebuild import JobRebuild
from services.orchestrator.recovery.watch import RecoveryWatch
from services.orchestrator.replicas.assignment import ReplicaAssigner
from services.orchestrator.replicas.autoscaling import Autoscaling
from services.orchestrator.replicas.heartbeats import HeartbeatResponder
from services.orchestrator.replicas.in_hand import GroupsInHand
from services.orchestrator.replicas.registry import ReplicaRegistry
from services.orchestrator.replicas.scaling import Scale
from services.orchestrator.replicas.traffic import ServingTraffic
from services.orchestrator.replicas.weights import WeightAnnouncements
from services.orchestrator.serving.capture import CaptureStore
from services.orchestrator.serving.continual.loop import ContinualLoop
from services.orchestrator.serving.continual.round_experience import RoundExperience
from services.orchestrator.serving.continual.round_jobs import RoundJobs
from services.orchestrator.serving.continual.rounds import ContinualStore
from services.orchestrator.serving.judges import ServedJudges
from services.orchestrator.serving.pool import PoolLimits, ServingPool
from services.orchestrator.serving.quota import ServingQuota
from services.orchestrator.serving.served_models import ServedModels
from services.orchestrator.settings import Settings
from services.orchestrator.values.progress import ValueProgress
from services.orchestrator.values.refresh import ReferenceRefresh
from spo import redis_keys
from spo.errors import InvalidInput, NotFound
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient
from spo.rpc.address_rules import AddressRules
from spo.rpc.client import RpcClient
from spo.rpc.inference_client import InferenceClient
from spo.rpc.judge_pools import JudgePools
from spo.spec.job_spec import TasksSpec
from spo.spec.job_state import ACTIVE
from spo.spec.verifier import verifiers_in
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.tinker_service_pb2_grpc import TinkerServiceStub
from spo.v1.value_service_pb2_grpc import ValueServiceStub


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
        self.audit = AuditLog(self.redis)
        identity = PlatformIdentity(self.redis, place, settings.weight_place)
        self.watch = RecoveryWatch(self.jobs, identity, JobManifests(self.jobs, place))
        self.jobs.absent = self.watch.absent
        self.job_rebuild = JobRebuild(self.jobs, self.files)
        self.watch.mend = self.job_rebuild.mend

    def _follow_replicas(self) -> None:
        settings = self.settings
        self.replicas = ReplicaRegistry(self.jobs, settings.replica_silence_seconds)
        self.assigner = ReplicaAssigner(self.jobs, self.replicas)
        self.weights = WeightAnnouncements(self.jobs)
        self.in_hand = GroupsInHand(self.replicas.live)
        self.heartbeats = HeartbeatResponder(self.jobs, self.assigner, self.weights, self.in_hand)
        traffic = ServingTraffic()
        per_replica = settings.serving_streams_per_replica
        self.autoscaling = Autoscaling(self.jobs, self.assigner, self.judges, traffic, per_replica)
        self.scale = Scale(settings, self.redis)
        self.served_models = ServedModels(self.jobs, self.weights)
        limits = PoolLimits(settings.serving_streams, settings.serving_seconds, settings.serving_wait_seconds)
        self.serving_pool = ServingPool(self.jobs, self.assigner, limits, traffic)
        self.served_judges = ServedJudges(self.jobs, self.served_models, self.weights, self.serving_pool)
        self.serving_quota = ServingQuota(
            settings.serving_streams, settings.serving_streams_per_tenant, settings.serving_tokens_per_minute
        )

    def _run_jobs(self) -> None:
        settings, jobs = self.settings, self.jobs
        self.leases = Leases(jobs, settings.checkpoint_place, settings.weight_place, settings.lease_seconds, self.stop)
        self.leases.before_grant = self.watch.before_lease
        self.alarms = Alarms(jobs, self.weights)
        self.trainer_deaths = TrainerDeaths(jobs, settings.most_trainer_deaths)
        self.queue = JobQueue(jobs, self.replicas, settings.max_running_jobs)
        self.actions = JobActions(jobs, self.queue)
        self.leftovers = Leftovers(jobs, self.files, self.watch)
        self.deletion = JobDeletion(jobs, self.files, self.watch.manifests.forget, self.leftovers.look)
        windows = settings.most_fruitless_windows
        self.dispatcher = PromptDispatcher(jobs, self.library, self.replay, windows, self.in_hand)
        self.value_progress = ValueProgress(self.redis)
        self.references = ReferenceRefresh(jobs, self.library, self.weights)
        scorer = Scorer(
            self.inference,
            self.judges,
            settings.evaluation_requests,
            settings.evaluation_patience_seconds,
            settings.evaluation_attempts,
        )
        limits = EvaluationLimits(settings.evaluation_attempts, settings.evaluations_kept)
        self.evaluations = EvaluationQueue(jobs, self.library, self.weights, scorer, self.assigner, limits)
        self.model_check = ModelCheck(self.replicas, settings.max_dead_letter_share, self.files.models.expected)
        self.spec_check = SpecCheck(self.library, self.model_check, AddressRules.of(settings.verifier_http_hosts))
        self.forks = Forks(jobs, self.spec_check, self.weights, self.references, self.files)
        self.plan_warnings = PlanWarnings(self.replicas)
        self.monitor = JobMonitor(jobs, self.leases, self.assigner, settings.stall_seconds)
        self.monitor.evaluations = self.evaluations.standing
        preparation = JobPreparation(jobs, self.library, self.model_check, self.judges)
        training = JobTraining(jobs, self.leases, self.evaluations, self.references, settings)
        self.runner = JobRunner(jobs, self.queue, preparation, training, self.monitor, self.assigner)

    def _go_on_learning(self) -> None:
        self.continual = ContinualStore(self.jobs)
        self.round_jobs = RoundJobs(self.jobs, self.forks, self.spec_check, self.experience, self.require_usable)
        learned_from = RoundExperience(
            self.experience, self.jobs, self.served_models, self.captures, self.judges, self.library
        )
        self.continual_loop = ContinualLoop(
            self.continual, self.served_models, self.round_jobs, self.evaluations, self.weights, learned_from
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
            with suppress(NotFound, InvalidInput):
                yield self.datasets.resolve(self.jobs.spec(job_id).tasks)

    def close(self) -> None:
        """End the connections to the other services, so that no wait for them outlives the process."""
        for client in (self.inference, self.judges, self.replay, self.values, self.tinker, self.serving_pool):
            client.close()
