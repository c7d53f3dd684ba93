"""Everything that REST, gRPC and the web pages share, put together once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from services.orchestrator.auth.audit import AuditLog
from services.orchestrator.auth.authenticator import Authenticator
from services.orchestrator.auth.paths import require_within
from services.orchestrator.datasets.library import TaskLibrary
from services.orchestrator.datasets.store import Datasets
from services.orchestrator.evaluation.queue import EvaluationQueue
from services.orchestrator.evaluation.scorer import Scorer
from services.orchestrator.jobs.leases import Leases
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.lifecycle.actions import JobActions
from services.orchestrator.lifecycle.alarms import Alarms
from services.orchestrator.lifecycle.deletion import JobDeletion
from services.orchestrator.lifecycle.dispatcher import PromptDispatcher
from services.orchestrator.lifecycle.forks.fork import Forks
from services.orchestrator.lifecycle.monitor import JobMonitor
from services.orchestrator.lifecycle.preparation import JobPreparation
from services.orchestrator.lifecycle.queue import JobQueue
from services.orchestrator.lifecycle.runner import JobRunner
from services.orchestrator.lifecycle.training import JobTraining
from services.orchestrator.replicas.assignment import ReplicaAssigner
from services.orchestrator.replicas.heartbeats import HeartbeatResponder
from services.orchestrator.replicas.registry import ReplicaRegistry
from services.orchestrator.replicas.scaling import Scale
from services.orchestrator.replicas.weights import WeightAnnouncements
from services.orchestrator.settings import Settings
from services.orchestrator.values.progress import ValueProgress
from services.orchestrator.values.refresh import ReferenceRefresh
from spo.experience.store import ExperienceStore
from spo.messaging.redis_client import RedisClient
from spo.rpc.client import RpcClient
from spo.rpc.inference_client import InferenceClient
from spo.spec.job_spec import TasksSpec
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.value_service_pb2_grpc import ValueServiceStub
from spo.weights.store import WeightStore


@dataclass
class AppContext:
    """The orchestrator without what listens for requests; `stop` ends its waits."""

    settings: Settings
    redis: RedisClient
    stop: threading.Event
    library: TaskLibrary = field(default_factory=TaskLibrary)

    def __post_init__(self) -> None:
        self._connect_services()
        self._open_stores()
        self._follow_replicas()
        self._run_jobs()

    def _connect_services(self) -> None:
        settings = self.settings
        self.inference = InferenceClient(settings.inference_address, self.redis)
        self.judge = RpcClient("sandbox-judge", settings.sandbox_judge_address, JudgeServiceStub)
        self.replay = RpcClient("replay-buffer", settings.replay_buffer_address, ReplayServiceStub)
        self.values = RpcClient("value-estimation", settings.value_estimation_address, ValueServiceStub)

    def _open_stores(self) -> None:
        settings = self.settings
        self.jobs = JobStore(self.redis, durable=settings.durable_writes)
        self.datasets = Datasets(self.redis, settings.state_path, settings.max_dataset_bytes)
        self.library.resolve = self.datasets.resolve
        self.experience = ExperienceStore(settings.experience_place)
        self.weight_store = WeightStore(settings.weight_place, cache_path=settings.weight_cache_path)
        self.authenticator = Authenticator(settings, self.redis)
        self.audit = AuditLog(self.redis)

    def _follow_replicas(self) -> None:
        settings = self.settings
        self.replicas = ReplicaRegistry(self.jobs, settings.replica_silence_seconds)
        self.assigner = ReplicaAssigner(self.jobs, self.replicas)
        self.weights = WeightAnnouncements(self.jobs)
        self.heartbeats = HeartbeatResponder(self.jobs, self.assigner, self.weights)
        self.scale = Scale(settings, self.redis)

    def _run_jobs(self) -> None:
        settings, jobs = self.settings, self.jobs
        self.leases = Leases(jobs, settings.state_path, settings.weight_place, settings.lease_seconds, self.stop)
        self.alarms = Alarms(jobs, self.weights)
        self.queue = JobQueue(jobs, self.replicas, settings.max_running_jobs)
        self.actions = JobActions(jobs, self.queue)
        self.deletion = JobDeletion(jobs, settings.state_path, self.weight_store)
        self.dispatcher = PromptDispatcher(jobs, self.library, self.replay)
        self.value_progress = ValueProgress(self.redis)
        self.references = ReferenceRefresh(jobs, self.library, self.weights)
        scorer = Scorer(self.inference, self.judge, settings.evaluation_requests)
        self.evaluations = EvaluationQueue(jobs, self.library, self.weights, scorer, self.assigner)
        self.forks = Forks(jobs, self.library, self.weights, self.references, settings.state_path, self.weight_store)
        self.monitor = JobMonitor(jobs, self.leases, self.assigner, settings.stall_seconds)
        preparation = JobPreparation(jobs, self.library, self.judge, settings.max_dead_letter_share)
        training = JobTraining(jobs, self.leases, self.evaluations, self.references, settings)
        self.runner = JobRunner(jobs, self.queue, preparation, training, self.monitor, self.assigner)

    def require_usable(self, tasks: TasksSpec | None, tenant: str | None, model: str | None = None) -> None:
        """Refuse tasks, and the folder of a model, that the tenant may not use; None may use all.

        Raises InvalidInput with a pointer to each fault.
        """
        self.datasets.require_usable(tasks, tenant)
        if tenant is not None:
            named = {"/model/path": model}
            if tasks is not None:
                named |= {"/tasks/path": tasks.path, "/tasks/evaluation_path": tasks.evaluation_path}
            require_within(self.settings.tenant_folders, named)

    def close(self) -> None:
        """End the connections to the other services, so that no wait for them outlives the process."""
        for client in (self.inference, self.judge, self.replay, self.values):
            client.close()
