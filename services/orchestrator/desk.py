"""Everything the orchestrator's doors (REST, gRPC, pages) share, put together once."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import redis

from services.orchestrator.access.audit import AuditLog
from services.orchestrator.access.doorkeeper import Doorkeeper
from services.orchestrator.access.local_files import require_within
from services.orchestrator.alarms import Alarms
from services.orchestrator.datasets import Datasets
from services.orchestrator.evaluation import Evaluator
from services.orchestrator.examinations import Examinations
from services.orchestrator.feeder import Feeder
from services.orchestrator.forks import Forks
from services.orchestrator.jobs import JobStore
from services.orchestrator.leases import Leases
from services.orchestrator.places import Places
from services.orchestrator.references import ReferenceRefresh
from services.orchestrator.replicas import Replicas
from services.orchestrator.retirement import Retirement
from services.orchestrator.runner import JobRunner
from services.orchestrator.scale import Scale
from services.orchestrator.scoring import Scorer
from services.orchestrator.settings import Settings
from services.orchestrator.sharing import Sharing
from services.orchestrator.task_sets import TaskLibrary
from services.orchestrator.value_progress import ValueProgress
from services.orchestrator.weights import WeightVersions
from services.orchestrator.wishes import Wishes
from spo.experience.store import ExperienceStore
from spo.inference_client import InferenceClient
from spo.job_spec import TasksSpec
from spo.rpc import Client
from spo.v1.judge_service_pb2_grpc import JudgeServiceStub
from spo.v1.replay_service_pb2_grpc import ReplayServiceStub
from spo.v1.value_service_pb2_grpc import ValueServiceStub
from spo.weight_store import WeightStore


@dataclass
class Desk:
    """The orchestrator without its doors; `stop` ends its waits."""

    settings: Settings
    redis: redis.Redis
    stop: threading.Event
    library: TaskLibrary = field(default_factory=TaskLibrary)

    def __post_init__(self) -> None:
        settings = self.settings
        self.inference = InferenceClient(settings.inference_address, self.redis)
        self.judge = Client("sandbox-judge", settings.sandbox_judge_address, JudgeServiceStub)
        self.replay = Client("replay-buffer", settings.replay_buffer_address, ReplayServiceStub)
        self.values = Client("value-estimation", settings.value_estimation_address, ValueServiceStub)
        self.datasets = Datasets(self.redis, settings.state_path, settings.max_dataset_bytes)
        self.library.resolve = self.datasets.resolve
        self.experience = ExperienceStore(settings.experience_place)
        self.doorkeeper = Doorkeeper(settings, self.redis)
        self.audit = AuditLog(self.redis)
        store = WeightStore(settings.weight_place, cache_path=settings.weight_cache_path)
        self.jobs = JobStore(self.redis, settings.durable_writes)
        self.leases = Leases(self.jobs, settings.state_path, settings.weight_place, settings.lease_seconds, self.stop)
        self.replicas = Replicas(self.jobs, settings.replica_silence_seconds)
        self.sharing = Sharing(self.jobs, self.replicas)
        self.places = Places(self.jobs, self.replicas, settings.max_running_jobs)
        self.value_progress = ValueProgress(self.redis)
        self.weights = WeightVersions(self.jobs)
        self.wishes = Wishes(self.jobs, self.sharing, self.weights)
        self.retirement = Retirement(self.jobs, settings.state_path, store)
        self.scale = Scale(settings, self.redis)
        self.alarms = Alarms(self.jobs, self.weights)
        self.feeder = Feeder(self.jobs, self.library, self.replay)
        scorer = Scorer(self.inference, self.judge, settings.evaluation_requests)
        self.evaluator = Evaluator(self.jobs, self.library, self.weights, scorer, self.sharing)
        self.examinations = Examinations(self.jobs, self.library, self.weights, scorer, self.sharing)
        self.references = ReferenceRefresh(self.jobs, self.library, self.weights)
        self.forks = Forks(self.jobs, self.library, self.weights, self.references, settings.state_path, store)
        self.runner = JobRunner(
            self.jobs,
            self.library,
            self.evaluator,
            self.leases,
            self.replicas,
            self.judge,
            settings,
            self.references,
            self.places,
            self.sharing,
        )

    def require_usable(self, tasks: TasksSpec | None, tenant: str | None, model: str | None = None) -> None:
        """Refuse tasks, and the folder of a model, that are not the tenant's to use (None: anybody's).

        Raises InvalidInput with a pointer to each.
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
