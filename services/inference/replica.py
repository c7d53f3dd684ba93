"""What this replica serves: the run that heartbeats assign to it, at the newest announced weights.

Announcements come by the run's stream `weights`, at once; the answer to a heartbeat repeats the newest one, for a
replica that joins late or lost its connection. What was applied is reported by the next heartbeat.
"""

from __future__ import annotations

import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from socket import gethostname

import redis
from transformers import PreTrainedTokenizerBase

from services.inference.engine import Engine, EngineSpec, device_memory_bytes, head_sizes, is_accelerated
from services.inference.engine_thread import EngineDeaths, EngineThread
from services.inference.environment_pool import EnvironmentPool
from services.inference.settings import Settings
from services.inference.weights import REFERENCE_VERSION, PolicyVersions, Weights, reference_weights, room_for
from spo import observability, redis_keys
from spo.errors import NotFound, NotReady, PreconditionFailed, SpoError
from spo.messaging.redis_client import RedisClient, as_spo_error
from spo.messaging.run_specs import RunTenants
from spo.messaging.streams.entries import read_after
from spo.model.folder import inspect_model_folder, tensor_shapes
from spo.model.tokenizer import end_tokens, load_tokenizer
from spo.model.tool_calls import ToolFormat, probe_tools
from spo.observability import get_logger, lines_concern_run
from spo.spec.job_spec import JobSpec, spec_from_json
from spo.v1 import orchestrator_service_pb2 as orchestrator
from spo.v1.weights_pb2 import BroadcastOffer, WeightAnnouncement
from spo.weights.model_folders import MadeModels
from spo.weights.store import WeightStore

log = get_logger("replica")
CLOSE_SECONDS = 3.0
FOLLOW_SECONDS = 1.0
RETRY_SECONDS = 5.0
# How often it is asked whether a model that killed engines may be tried again.
REFUSED_SECONDS = 60.0
# What takes so long is told while it goes on: storage may be silent for minutes before that is an error.
LASTS_TELL_SECONDS = 15.0
# How often weights that were refused as damaged are looked at again.
REPAIR_SECONDS = 10.0


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
    tenant: str = ""

    @cached_property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a response of this run."""
        folder = inspect_model_folder(self.engine_spec.model_path)
        return end_tokens(self.tokenizer, folder.end_token_ids, self.spec.model.chat_format)

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How this model's tools are written and read, as its chat template and vLLM's parsers have it."""
        return probe_tools(self.tokenizer, self.spec.model.chat_format, self.end_token_ids)

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
        self._models = MadeModels(settings.state_place, settings.state_path)
        self._client = client
        self._tenants = RunTenants(client)
        self._set_serving = set_serving
        self._restart = restart
        self._requested = orchestrator.HeartbeatResponse()
        self._assignment: Assignment | None = None
        # The last assignment's engine outlives it: the next run on the same model starts at once.
        self._warm: Assignment | None = None
        self._applied = WeightAnnouncement()
        # What the engine was told to serve of this run; when refused weights are looked at again.
        self._serves: Weights | None = None
        self._look_again_at = math.inf
        self._problem = ""
        # Since when, and what, in words.
        self._in_hand: tuple[float, str] | None = None
        # The run whose model this replica has given up on for now.
        self._refused_run = ""
        self._is_ready = False
        self._devices = device_memory_bytes(settings)
        self.environments = EnvironmentPool(settings.verifier_address)

    # --- heartbeat thread ---

    def on_heartbeat(self, response: orchestrator.HeartbeatResponse) -> None:
        """Store which run and weights the orchestrator wants this replica to serve."""
        self._requested = response

    @property
    def groups_in_hand(self) -> int:
        """Most groups to have in hand, so that other replicas of the run get theirs; without limit: a large number."""
        return self._requested.groups_in_hand or sys.maxsize

    def report(self, request: orchestrator.HeartbeatRequest) -> None:
        """Fill in what is served, how full the engine is, and why an announced version could not be loaded."""
        assignment = self._assignment
        request.problem = self._long() or self._problem or (assignment.engine.problem if assignment else "")
        request.head_sizes.extend(head_sizes())
        request.device_memory_bytes.extend(self._devices)
        request.accelerated = is_accelerated()
        request.refused_run_id = self._refused_run
        if assignment:
            request.run_id = assignment.run_id
            request.policy_version = assignment.policy_version
            # Of what it may have at once: with all its groups in hand it is busy, however much more it could hold.
            groups = min(self._settings.groups_in_flight, self.groups_in_hand)
            room = min(self._settings.max_sequences, groups * assignment.spec.rollout.samples_per_prompt)
            request.load = min(1.0, assignment.engine.running_sequences / room)

    def _long(self) -> str:
        """What the worker has had in hand for LASTS_TELL_SECONDS, in words; "" for nothing."""
        since, what = self._in_hand or (math.inf, "")
        seconds = time.monotonic() - since
        return f"{what} has taken {seconds:.0f} s so far" if seconds >= LASTS_TELL_SECONDS else ""

    # --- serving threads ---

    def current(self) -> Assignment | None:
        return self._assignment

    def serving(self, run_id: str) -> Assignment:
        """The assignment. Raises NotReady while loading or idle and PreconditionFailed when another run has it."""
        assignment = self._assignment
        if assignment is None:
            raise NotReady(f"no model is loaded yet for run {run_id}: {self._problem or 'waiting for the assignment'}")
        if assignment.run_id != run_id:
            raise PreconditionFailed(f"this replica serves another run, not {run_id}", code="other_run")
        return assignment

    # --- worker ---

    def follow(self, stop: threading.Event) -> None:
        """Keep the assignment and its weights up to date until stop; raises when the engine died."""
        position = "0-0"
        while not stop.is_set():
            requested = self._requested
            if requested.run_id != self._serving_run() or self._refused_run:
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
        self.environments.close()
        served = self._assignment or self._warm
        if served:
            # Its groups are given up on already; whoever sent SIGTERM waits no longer than for the rest of the process.
            served.engine.stop(CLOSE_SECONDS)

    def _serving_run(self) -> str:
        return self._assignment.run_id if self._assignment else ""

    def _reassign(self, requested: orchestrator.HeartbeatResponse, stop: threading.Event) -> None:
        before, self._assignment = self._assignment, None
        lines_concern_run("")
        self._warm = before or self._warm
        self._applied = WeightAnnouncement()
        self._serves = None
        if requested.run_id != self._refused_run:
            self._problem = self._refused_run = ""
        if not requested.run_id:
            self._ready()
            return
        if not self._refused_run:
            self._not_ready(f"loads the model of run {requested.run_id}")
        try:
            with self._doing(f"to load the model of run {requested.run_id}"):
                assignment = self._assign(requested, stop)
            if assignment:
                if self._refused_run:
                    self._problem = self._refused_run = ""
                # Its engine stays when the weights do not come.
                self._warm = assignment
                self._join(assignment, requested.weights)
            self._assignment = assignment
            lines_concern_run(self._serving_run())
        except (SpoError, redis.RedisError) as failure:
            error = failure if isinstance(failure, SpoError) else as_spo_error(failure)
            self._problem = str(error)
            self._not_ready(self._problem)
            log.error("cannot serve the assigned run; will try again", run=requested.run_id, reason=str(error))
            stop.wait(RETRY_SECONDS)

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        before, self._in_hand = self._in_hand, (time.monotonic(), what)
        try:
            yield
        finally:
            self._in_hand = before

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
        engine_spec = engine_spec_of(spec, self._models.here(requested.model_path or spec.model.path))
        warm = self._warm
        if warm and warm.engine_spec.fits(engine_spec):
            warm.engine.announce(requested.run_id, warm.versions.reference)
            return replace(warm, run_id=requested.run_id, spec=spec, tenant=self._tenants.of(requested.run_id))
        if warm:
            log.info("another model is wanted; the process ends so that it starts with a clean engine")
            self._restart()
            return None
        return self._build(requested.run_id, spec, engine_spec, stop)

    def _build(self, run_id: str, spec: JobSpec, engine_spec: EngineSpec, stop: threading.Event) -> Assignment | None:
        reference = reference_weights(engine_spec.model_path, engine_spec.model_hash)
        deaths = EngineDeaths(self._client)
        engine = EngineThread(lambda: self._built(engine_spec, deaths), reference, self._settings, deaths)
        log.info("building the engine", run=run_id, model=engine_spec.model_hash)
        engine.start()
        while not engine.ready.wait(FOLLOW_SECONDS):
            if engine.failure:
                # Reported before the process ends: the next process may well fail in the same way.
                self._problem = f"vLLM cannot serve the model: {engine.failure}"
                self._not_ready(self._problem)
                if isinstance(engine.failure, SpoError) and engine.failure.code == "kills_engine":
                    # Nothing was built: the process stays, says so, and looks again later whether it may try.
                    self._refused_run = run_id
                    self._wait_refused(run_id, stop)
                    return None
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
                WeightStore(self._settings.weight_place, cache_path=self._settings.weight_cache_path),
                reference,
                engine_spec.adapters,
            ),
            tokenizer=load_tokenizer(engine_spec.model_path),
            sampler=engine_spec.sampler,
            tenant=self._tenants.of(run_id),
        )

    def _wait_refused(self, run_id: str, stop: threading.Event) -> None:
        deadline = time.monotonic() + REFUSED_SECONDS
        while self._requested.run_id == run_id and time.monotonic() < deadline and not stop.wait(FOLLOW_SECONDS):
            pass

    def _built(self, spec: EngineSpec, deaths: EngineDeaths) -> Engine:
        """The engine; one that dies of this model again and again is not built any more for a while."""
        # Of this replica: others of the machine that build theirs at the same time have died of nothing.
        place = f"{gethostname()}:{self._settings.port}"
        work = f"building the engine of model {spec.model_hash[:16]} for {spec.max_tokens} tokens on {place}"
        with deaths.building(work):
            return Engine(spec, self._settings)

    def _follow_weights(self, assignment: Assignment, position: str, stop: threading.Event) -> str:
        """Wait a little for announcements and apply the newest; returns the new position in the stream."""
        newest, sent = WeightAnnouncement(), None
        try:
            entries = read_after(
                self._client, redis_keys.weights(assignment.run_id), position, block_seconds=FOLLOW_SECONDS
            )
        except redis.RedisError as error:
            log.warning("cannot read weight announcements; trying again", reason=str(error))
            stop.wait(FOLLOW_SECONDS)
            return position
        if entries:
            position = entries[-1].entry_id
            newest = WeightAnnouncement.FromString(entries[-1].payload)
            newest.entry_id = position
            sent = newest.broadcast if newest.HasField("broadcast") else None
        requested = self._requested.weights if self._requested.run_id == assignment.run_id else WeightAnnouncement()
        if _place(requested) > _place(newest):
            newest, sent = requested, None
        if assignment.engine.take_missing():
            self._look_again_at = 0.0
        if _place(newest) > _place(self._applied):
            self._apply(assignment, newest, stop, sent)
        elif time.monotonic() >= self._look_again_at:
            self._apply(assignment, self._applied, stop)
        return position

    def _join(self, assignment: Assignment, announced: WeightAnnouncement) -> None:
        """Begin with the weights that the run has by now, so that no prompt meets pi0 in their place.

        Raises SpoError when they cannot be had yet.
        """
        if not announced.version:
            self._ready()
            return
        self._not_ready(f"loads version {announced.version} of run {assignment.run_id}")
        self._take_up(assignment, announced)

    def _apply(
        self,
        assignment: Assignment,
        announced: WeightAnnouncement,
        stop: threading.Event,
        sent: BroadcastOffer | None = None,
    ) -> None:
        try:
            self._take_up(assignment, announced, sent)
        except SpoError as error:
            self._problem = f"version {announced.version}: {error}"
            log.warning("announced weights are not available yet; the old version keeps serving", reason=str(error))
            stop.wait(RETRY_SECONDS)

    def _take_up(
        self, assignment: Assignment, announced: WeightAnnouncement, sent: BroadcastOffer | None = None
    ) -> None:
        """Serve what was announced, or say why not; `sent`: it also comes by broadcast, just now.

        Raises SpoError where another try may help.
        """
        of_run = assignment.run_id, announced.version, announced.manifest_digest
        if self._settings.weight_transfer == "files":
            sent = None
        try:
            with self._doing(f"to fetch the weights of version {announced.version}"):
                weights = assignment.versions.offered(*of_run, sent) if sent else None
                weights = weights or assignment.versions.resolve(*of_run)
        except SpoError as error:
            if error.retryable:
                raise
            self._refuse(assignment, announced, error)
            return
        self._serve(assignment, weights)
        self._applied, self._look_again_at = announced, math.inf
        self._problem = ""
        self._ready()
        observability.POLICY_VERSION.labels(role="inference").set(announced.version)

    def _refuse(self, assignment: Assignment, announced: WeightAnnouncement, error: SpoError) -> None:
        """Go on with what is served, or begin with the newest intact version before it; it may be repaired."""
        if self._serves is None:
            before = published_before(self._client, announced)
            self._serve(assignment, assignment.versions.newest_intact(assignment.run_id, before))
            if self._serves and self._serves.version:
                self._ready()
        served = self._serves.version if self._serves else REFERENCE_VERSION
        observability.POLICY_VERSION.labels(role="inference").set(served)
        problem = f"version {announced.version}: {error}; version {served} is served in its place"
        if problem != self._problem:
            log.error("announced weights refused", version=announced.version, served=served, reason=str(error))
        self._problem = problem
        if not self._is_ready:
            self._not_ready(problem)
        self._applied, self._look_again_at = announced, time.monotonic() + REPAIR_SECONDS

    def _serve(self, assignment: Assignment, weights: Weights) -> None:
        self._serves = weights
        assignment.engine.announce(assignment.run_id, weights)


def engine_spec_of(spec: JobSpec, model_path: Path) -> EngineSpec:
    """What an engine has to be built for to serve a run. Raises InvalidInput when the folder may not be loaded."""
    folder = inspect_model_folder(model_path)
    return EngineSpec(
        model_path,
        folder.model_hash,
        spec.model.dtype,
        spec.model.max_prompt_tokens + spec.model.max_response_tokens,
        room_for(spec.model.lora, tensor_shapes(folder.safetensors_files)) if spec.model.lora else None,
    )


def published_before(client: RedisClient, announced: WeightAnnouncement) -> list[tuple[int, str]]:
    """(version, manifest digest) of what the run published before a version, newest first. Raises NotReady."""
    try:
        entries = read_after(client, redis_keys.weights(announced.run_id), "0-0", block_seconds=0)
    except redis.RedisError as error:
        raise NotReady(f"the run's weight announcements cannot be read: {error}") from error
    found = [WeightAnnouncement.FromString(entry.payload) for entry in entries]
    known = {each.version: each.manifest_digest for each in found if 0 < each.version < announced.version}
    return sorted(known.items(), reverse=True)


def _place(announced: WeightAnnouncement) -> tuple[int, ...]:
    """Where an announcement stands in the run's stream; before all where it does not say."""
    return tuple(map(int, announced.entry_id.split("-"))) if announced.entry_id else (0, 0)
