"""What this replica serves: the run that heartbeats assign to it, at the newest announced weights.

Announcements come by the run's stream `weights`, at once; the answer to a heartbeat repeats the newest one, for a
replica that joins late or lost its connection. What was applied is reported by the next heartbeat.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import redis
from transformers import PreTrainedTokenizerBase

from services.inference.engine import Engine, EngineSpec
from services.inference.engine_thread import EngineThread
from services.inference.settings import Settings
from services.inference.weights import REFERENCE_VERSION, PolicyVersions, reference_weights
from spo import redis_keys
from spo.errors import NotFound, NotReady, PreconditionFailed, SpoError
from spo.messaging import streams
from spo.messaging.redis_client import RedisClient
from spo.model.folder import inspect_model_folder
from spo.model.logprobs import load_tokenizer
from spo.observability import metrics
from spo.observability.logs import get_logger, lines_concern_run
from spo.spec.job_spec import JobSpec, spec_from_json
from spo.v1 import orchestrator_service_pb2 as orchestrator
from spo.v1.weights_pb2 import WeightAnnouncement
from spo.weights.store import WeightStore

log = get_logger("replica")

FOLLOW_SECONDS = 1.0
RETRY_SECONDS = 5.0


@dataclass(frozen=True)
class Assignment:
    """The run this replica serves, ready to serve it."""

    run_id: str
    spec: JobSpec
    engine: EngineThread
    engine_spec: EngineSpec
    versions: PolicyVersions
    tokenizer: PreTrainedTokenizerBase
    sampler: str

    @property
    def policy_version(self) -> int:
        """The version that is loaded; 0 while the engine still holds the last run's weights."""
        loaded = self.engine.loaded
        return loaded.version if loaded.run_id == self.run_id else REFERENCE_VERSION


class ServingReplica:
    """Follows the orchestrator. `follow` is the worker; the other methods may be called from any thread."""

    def __init__(
        self,
        settings: Settings,
        client: RedisClient,
        set_serving: Callable[[bool, str], None],
        restart: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._client = client
        self._set_serving = set_serving
        self._restart = restart
        self._requested = orchestrator.HeartbeatResponse()
        self._assignment: Assignment | None = None
        # The last assignment's engine outlives it: the next run on the same model starts at once.
        self._warm: Assignment | None = None
        self._applied = WeightAnnouncement()
        self._problem = ""
        self._is_ready = False

    # --- heartbeat thread ---

    def on_heartbeat(self, response: orchestrator.HeartbeatResponse) -> None:
        """Store which run and weights the orchestrator wants this replica to serve."""
        self._requested = response

    def report(self, request: orchestrator.HeartbeatRequest) -> None:
        """Fill in what is served, how full the engine is, and why an announced version could not be loaded."""
        assignment = self._assignment
        request.problem = self._problem
        if assignment:
            request.run_id = assignment.run_id
            request.policy_version = assignment.policy_version
            request.load = min(1.0, assignment.engine.running_sequences / self._settings.max_sequences)

    # --- serving threads ---

    def current(self) -> Assignment | None:
        return self._assignment

    def serving(self, run_id: str) -> Assignment:
        """The assignment. Raises NotReady while loading or idle and PreconditionFailed when another run has it."""
        assignment = self._assignment
        if assignment is None:
            raise NotReady(f"no model is loaded yet for run {run_id}: {self._problem or 'waiting for the assignment'}")
        if assignment.run_id != run_id:
            raise PreconditionFailed(f"this replica serves run {assignment.run_id}, not {run_id}", code="other_run")
        return assignment

    # --- worker ---

    def follow(self, stop: threading.Event) -> None:
        """Keep the assignment and its weights up to date until stop; raises when the engine died."""
        position = "0-0"
        while not stop.is_set():
            requested = self._requested
            if requested.run_id != self._serving_run():
                position = "0-0"
                self._reassign(requested, stop)
            assignment = self._assignment
            if assignment is None:
                stop.wait(FOLLOW_SECONDS / 4)
                continue
            if assignment.engine.failure:
                raise assignment.engine.failure
            position = self._follow_weights(assignment, position, stop)

    def close(self) -> None:
        """Stop the engine; for the end of the process."""
        served = self._assignment or self._warm
        if served:
            served.engine.stop()

    def _serving_run(self) -> str:
        return self._assignment.run_id if self._assignment else ""

    def _reassign(self, requested: orchestrator.HeartbeatResponse, stop: threading.Event) -> None:
        before, self._assignment = self._assignment, None
        lines_concern_run("")
        self._warm = before or self._warm
        self._applied = WeightAnnouncement()
        self._problem = ""
        if not requested.run_id:
            self._ready()
            return
        self._not_ready(f"loads the model of run {requested.run_id}")
        try:
            self._assignment = self._assign(requested, stop)
            lines_concern_run(self._serving_run())
            # A replica that joins a running job is ready once it has the job's current weights.
            late = (
                f"loads version {requested.weights.version} of run {requested.run_id}"
                if requested.weights.version
                else ""
            )
            if self._assignment and not late:
                self._ready()
            else:
                self._not_ready(late)
        except SpoError as error:
            self._problem = str(error)
            self._not_ready(self._problem)
            log.error("cannot serve the assigned run; will try again", run=requested.run_id, reason=str(error))
            stop.wait(RETRY_SECONDS)

    def _ready(self) -> None:
        self._is_ready = True
        self._set_serving(True, "")

    def _not_ready(self, reason: str) -> None:
        self._is_ready = False
        self._set_serving(False, reason)

    def _assign(self, requested: orchestrator.HeartbeatResponse, stop: threading.Event) -> Assignment | None:
        text = self._client.get(redis_keys.run_spec(requested.run_id))
        if text is None:
            raise NotFound(f"run {requested.run_id} has no spec")
        spec = spec_from_json(text)
        model_path = Path(requested.model_path or spec.model.path)
        engine_spec = EngineSpec(
            model_path,
            inspect_model_folder(model_path).model_hash,
            spec.model.dtype,
            spec.model.max_prompt_tokens + spec.model.max_response_tokens,
        )
        warm = self._warm
        if warm and warm.engine_spec.fits(engine_spec):
            warm.engine.announce(requested.run_id, warm.versions.reference)
            return replace(warm, run_id=requested.run_id, spec=spec)
        if warm:
            log.info("another model is wanted; the process ends so that it starts with a clean engine")
            self._restart()
            return None
        return self._build(requested.run_id, spec, engine_spec, stop)

    def _build(self, run_id: str, spec: JobSpec, engine_spec: EngineSpec, stop: threading.Event) -> Assignment | None:
        reference = reference_weights(engine_spec.model_path, engine_spec.model_hash)
        engine = EngineThread(lambda: Engine(engine_spec, self._settings), reference, self._settings)
        log.info("building the engine", run=run_id, model=engine_spec.model_hash)
        engine.start()
        while not engine.ready.wait(FOLLOW_SECONDS):
            if engine.failure:
                # Reported before the process ends: the next process may well fail in the same way.
                self._problem = f"vLLM cannot serve the model: {engine.failure}"
                self._not_ready(self._problem)
                stop.wait(RETRY_SECONDS)
                raise engine.failure
            if stop.is_set():
                return None
        return Assignment(
            run_id=run_id,
            spec=spec,
            engine=engine,
            engine_spec=engine_spec,
            versions=PolicyVersions(
                WeightStore(self._settings.weight_place, cache_path=self._settings.weight_cache_path), reference
            ),
            tokenizer=load_tokenizer(engine_spec.model_path),
            sampler=engine_spec.sampler,
        )

    def _follow_weights(self, assignment: Assignment, position: str, stop: threading.Event) -> str:
        """Wait a little for announcements and apply the newest; returns the new position in the stream."""
        newest = WeightAnnouncement()
        try:
            entries = streams.read_after(
                self._client, redis_keys.weights(assignment.run_id), position, block_seconds=FOLLOW_SECONDS
            )
        except redis.RedisError as error:
            log.warning("cannot read weight announcements; trying again", reason=str(error))
            stop.wait(FOLLOW_SECONDS)
            return position
        if entries:
            position = entries[-1].entry_id
            newest = WeightAnnouncement.FromString(entries[-1].payload)
        requested = self._requested.weights if self._requested.run_id == assignment.run_id else WeightAnnouncement()
        if requested.announced_unix_ms > newest.announced_unix_ms:
            newest = requested
        if newest.announced_unix_ms > self._applied.announced_unix_ms:
            self._apply(assignment, newest, stop)
        return position

    def _apply(self, assignment: Assignment, announced: WeightAnnouncement, stop: threading.Event) -> None:
        try:
            weights = assignment.versions.resolve(assignment.run_id, announced.version, announced.manifest_digest)
        except SpoError as error:
            self._problem = f"version {announced.version}: {error}"
            if not self._is_ready:
                self._not_ready(self._problem)
            if error.retryable:
                log.warning("announced weights are not available yet; the old version keeps serving", reason=str(error))
                stop.wait(RETRY_SECONDS)
                return
            self._applied = announced
            log.error("announced weights refused; the old version keeps serving", reason=str(error))
            return
        self._applied = announced
        assignment.engine.announce(assignment.run_id, weights)
        self._problem = ""
        self._ready()
        metrics.POLICY_VERSION.labels(role="inference").set(announced.version)
