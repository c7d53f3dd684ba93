"""The one thread that owns the engine: continuous batching over groups, which version is served next, and what
engines died of.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from socket import gethostname

from services.inference.engine import Engine, Sample, SampledPart, SampleRequest
from services.inference.settings import Settings
from services.inference.weights import Weights
from spo import observability, redis_keys
from spo.errors import IntegrityError, InvalidInput, NotReady
from spo.messaging.redis_client import RedisClient
from spo.messaging.run_specs import tenants_in_turn
from spo.messaging.streams.recovery import WorkDeaths, last_line
from spo.observability import get_logger
from spo.v1.prompt_pb2 import PromptGroup
from spo.weights.broadcast import BroadcastFailed

# What the library raises of what a folder is made of; an engine that dies of its device raises others.
HOPELESS_ERRORS = (ValueError, KeyError, TypeError, AttributeError, NotImplementedError, AssertionError)

log = get_logger("engine")

# A turn lasts at least this many times the load it cost, so that swapping large models stays cheap.
TURN_PER_LOAD_SECONDS = 20.0
# What a broken broadcast leaves in the engine: nothing runs until some version is loaded whole.
NOTHING_WHOLE = Weights("", -1, "", None)


class EngineDeaths(WorkDeaths):
    """The notes of all inference replicas."""

    def __init__(self, client: RedisClient) -> None:
        super().__init__(client, redis_keys.engine_deaths, "the engine", code="kills_engine")

    @contextmanager
    def building(self, work: str) -> Iterator[None]:
        """As `during`; a model that vLLM does not know, or whose tensors do not fit, is refused from then on."""
        with self.during(work, ends_process=True):
            try:
                yield
            except HOPELESS_ERRORS as error:
                # For want of memory it may go better the next time.
                if "memory" not in str(error).lower():
                    self.give_up(work, error)
                raise


def engine_failed(error: Exception) -> NotReady:
    """What the groups in an engine fail with that died: it is tried again, and found out which one it was."""
    return NotReady(f"the engine of this replica failed: {last_line(error)}", code="engine_failed")


def sampling_of(group: PromptGroup) -> str:
    """The work of sampling a group, by name."""
    return f"group {group.group_id} of run {group.run_id}"


@dataclass(frozen=True)
class ScheduleDecision:
    """Admit waiting groups of the loaded version, or load another one, or (neither) let the running ones finish."""

    admit: bool = False
    load: Weights | None = None


def next_decision(
    loaded: Weights,
    newest: Weights,
    waiting: Sequence[Weights],
    *,
    running: bool,
    running_may_switch: bool,
    turn_is_up: bool,
) -> ScheduleDecision:
    """Decide from the versions that waiting groups ask for, oldest group first.

    The loaded version is served for one turn, and longer while the oldest group asks for it. Then the running groups
    finish, and the version of the oldest group is loaded. So no group waits for ever, and versions are swapped at most
    once per turn. With no group waiting, a newly announced version is loaded as soon as no group runs.
    running_may_switch: running groups may go on under `newest`.
    """
    requested = waiting[0] if waiting else newest
    if loaded in waiting and (requested == loaded or not turn_is_up):
        return ScheduleDecision(admit=True)
    if requested == loaded or (running and not (running_may_switch and requested == newest)):
        return ScheduleDecision()
    return ScheduleDecision(load=requested)


@dataclass(eq=False)
class SampleGroup:
    """Sequences that are sampled under the same weights; None: the newest announced of the run.

    tenant: whose run it is. alone: with no other group in the engine, since one died while it worked on this one.
    on_part: of a group that somebody reads, whose sequences come in parts to it, in the engine's thread; such a group
    is taken before others of its tenant.
    any_version: without weights, whichever version of the run is loaded, so that no turn is waited for.
    """

    run_id: str
    requests: Sequence[SampleRequest]
    weights: Weights | None
    alone: bool = False
    # Whether its sequences may go on under a newer version of their run.
    may_switch: bool = True
    on_part: Callable[[int, SampledPart], None] | None = None
    # Called with each finished sequence's place, in the engine's thread.
    on_sample: Callable[[int, Sample], None] | None = None
    any_version: bool = False
    tenant: str = ""
    future: Future[list[Sample]] = field(default_factory=Future)
    request_ids: list[str] = field(default_factory=list)
    samples: dict[str, Sample] = field(default_factory=dict)


class EngineThread:
    """Runs the engine for many callers; `submit`, `announce` and the properties may be used from any thread."""

    def __init__(
        self, build: Callable[[], Engine], reference: Weights, settings: Settings, deaths: EngineDeaths
    ) -> None:
        self._build = build
        self._settings = settings
        self._deaths = deaths
        # Versions that have killed engines, and what is said to those who ask for them.
        self._refused: dict[Weights, InvalidInput] = {}
        self._reference = reference
        self._wake = threading.Condition()
        self._waiting: list[SampleGroup] = []
        self._newest: dict[str, Weights] = {}
        self._target = reference
        self._stopping = False
        self._running: dict[str, SampleGroup] = {}
        self._turn_ends = 0.0
        self._numbered = 0
        # Signs of life: steps so far, and what is being loaded.
        self.steps = 0
        self.loading: Weights | None = None
        self.loaded = reference
        self._without_files: Weights | None = None
        self.ready = threading.Event()
        self.failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Build the engine in its thread; `ready` is set when it can serve, `failure` when it cannot."""
        self._thread.start()

    def stop(self, wait_seconds: float = 10.0) -> None:
        """End the thread after its current step; groups that are not finished fail with NotReady."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(wait_seconds)

    def announce(self, run_id: str, weights: Weights) -> None:
        """Make `weights` the newest of the run; they are loaded when running groups allow."""
        with self._wake:
            if weights in self._refused:
                return
            self._newest[run_id] = weights
            self._target = weights
            self._wake.notify()

    def take_missing(self) -> Weights | None:
        """The version that was to come by a broadcast and did not: it is to be announced again, with its files."""
        with self._wake:
            missing, self._without_files = self._without_files, None
            return missing

    def submit(self, group: SampleGroup) -> None:
        """Queue a group; its future gets the samples in request order. Cancelling the future frees its sequences."""
        with self._wake:
            if self._stopping or self.failure:
                raise NotReady("the engine of this replica has stopped")
            if group.weights in self._refused:
                raise self._refused[group.weights]
            place = len(self._waiting)
            if group.on_part:
                # Somebody looks at it: rollouts of the same tenant can wait.
                place = next((i for i, other in enumerate(self._waiting) if other.on_part is None), place)
            self._waiting.insert(place, group)
            self._wake.notify()

    def waits_for(self, group: SampleGroup) -> str:
        """What a group that is not sampled yet waits for, in words; "" once it is sampled."""
        with self._wake:
            place = self._waiting.index(group) if group in self._waiting else -1
        loading = self.loading
        if loading is not None:
            return f"weights that are loaded (version {loading.version})"
        if place < 0:
            return ""
        return f"its turn in the engine, behind {place} groups" if place else "room in the engine, or its weights"

    @property
    def running_sequences(self) -> int:
        return len(self._running)

    def _run(self) -> None:
        try:
            self._engine = self._build()
            self.ready.set()
            while self._wait_for_work():
                self._drop_cancelled()
                self._schedule()
                self._step()
            self._fail_all(NotReady("the replica is stopping"))
        except Exception as error:
            log.exception("the engine failed")
            self.failure = error
            for group in self._groups_running():
                _settle(group, engine_failed(error))
            self._running = {}
            self._fail_all(NotReady(f"the engine of this replica failed before it began: {last_line(error)}"))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._target != self.loaded or self._has_work()):
                self._wake.wait()
            return not self._stopping

    def _has_work(self) -> bool:
        return self.loaded != NOTHING_WHOLE and bool(self._waiting or self._running)

    def _weights_of(self, group: SampleGroup) -> Weights:
        if group.any_version and self.loaded.run_id == group.run_id:
            return self.loaded
        return group.weights or self._newest.get(group.run_id, self._reference)

    def _schedule(self) -> None:
        if self.loaded == NOTHING_WHOLE:
            self._load(self._target)
            return
        with self._wake:
            sampled = (group.tenant for group in self._running.values())
            self._waiting = tenants_in_turn(self._waiting, sampled, size_of=lambda group: len(group.requests))
            newest = self._target
            decision = next_decision(
                self.loaded,
                newest,
                [self._weights_of(group) for group in self._waiting],
                running=bool(self._running),
                running_may_switch=self._settings.in_flight != "finish" and self._all_running_follow(newest),
                turn_is_up=time.monotonic() >= self._turn_ends,
            )
        if decision.load is not None:
            self._load(decision.load)
        if decision.admit:
            self._admit()

    def _all_running_follow(self, newest: Weights) -> bool:
        """Whether what runs may go on under `newest`; after a rollback nothing may: a response's versions only grow."""
        return newest.version > self.loaded.version and all(
            group.may_switch and group.weights is None and self._newest.get(group.run_id) == newest
            for group in self._running.values()
        )

    @property
    def problem(self) -> str:
        """Why versions are refused that were announced or asked for, "" when none is."""
        return "; ".join(refusal.message for refusal in self._refused.values())

    def _load(self, weights: Weights) -> None:
        # A machine's own trouble is no reason to refuse a version elsewhere.
        work = f"loading version {weights.version} of run {weights.run_id} ({weights.digest[:16]}) on {gethostname()}"
        started = time.monotonic()
        self.loading = weights
        try:
            with self._deaths.during(work, ends_process=True):
                size_bytes = self._receive(weights) if weights.paths is None else self._read(weights, weights.paths)
        except InvalidInput as refusal:
            self._refuse(weights, refusal)
            return
        finally:
            self.loading = None
        if not size_bytes:
            self._ask_for_files(weights)
            return
        seconds = time.monotonic() - started
        self.loaded = weights
        self._turn_ends = time.monotonic() + max(self._settings.turn_seconds, TURN_PER_LOAD_SECONDS * seconds)
        observability.WEIGHTS_PUSH_SECONDS.observe(seconds)
        observability.WEIGHTS_BYTES.inc(size_bytes)
        source = "files" if weights.paths is not None else "broadcast"
        log.info(
            "weights loaded", run=weights.run_id, version=weights.version, seconds=round(seconds, 3), source=source
        )

    def _read(self, weights: Weights, paths: Sequence[Path]) -> int:
        self._engine.load(paths, weights.version)
        return sum(path.stat().st_size for path in paths)

    def _receive(self, weights: Weights) -> int:
        """Load what a trainer sends; returns its bytes, 0 where that failed."""
        if weights.broadcast is None:
            return 0
        try:
            joined = weights.broadcast.join(self._settings.tensor_parallel_size)
        except (BroadcastFailed, IntegrityError) as error:
            log.info("not in the broadcast of a version", version=weights.version, reason=str(error))
            return 0
        try:
            self._engine.receive(joined, weights.version)
        # Whatever a transport, vLLM or a model raises: the model is no version now, and the files make it one again.
        except Exception as error:
            log.warning("a broadcast of weights broke off", version=weights.version, reason=last_line(error))
            self.loaded = NOTHING_WHOLE
            return 0
        return joined.size_bytes

    def _ask_for_files(self, weights: Weights) -> None:
        """Go on with the loaded version until `announce` gives the files of one that did not come by broadcast."""
        with self._wake:
            if self._target == weights and self._target.paths is not None:
                # Announced with its files while the broadcast was waited for: an equal version, not to be taken back.
                return
            self._without_files = weights
            self._keep_loaded(weights)

    def _keep_loaded(self, weights: Weights) -> None:
        """Serve what is loaded wherever `weights` were to be served."""
        if self._target == weights:
            self._target = self.loaded
        for run_id in [run_id for run_id, newest in self._newest.items() if newest == weights]:
            self._newest[run_id] = self.loaded

    def _refuse(self, weights: Weights, refusal: InvalidInput) -> None:
        """Go on without a version that kills engines: what asks for it fails, the last one stays loaded."""
        log.error("weights refused; the loaded version keeps serving", run=weights.run_id, reason=refusal.message)
        with self._wake:
            self._refused[weights] = refusal
            self._keep_loaded(weights)
            if self.loaded == NOTHING_WHOLE:
                self._target = self._reference
            refused = [group for group in self._waiting if group.weights == weights]
            self._waiting = [group for group in self._waiting if group not in refused]
        for group in refused:
            _settle(group, refusal)

    def _admit(self) -> None:
        """Start waiting groups of the loaded version until the batch is full; one that has to be alone, alone."""
        with self._wake:
            room = self._settings.max_sequences - len(self._running)
            admitted: list[SampleGroup] = []
            for group in self._waiting:
                if room <= 0 or any(running.alone for running in (*self._groups_running(), *admitted)):
                    break
                if self._weights_of(group) == self.loaded:
                    if group.alone and (self._running or admitted):
                        # Those before it finish, none is let past it.
                        break
                    admitted.append(group)
                    room -= len(group.requests)
            self._waiting = [group for group in self._waiting if group not in admitted]
        for group in admitted:
            self._begin(group)

    def _begin(self, group: SampleGroup) -> None:
        try:
            for request in group.requests:
                self._numbered += 1
                request_id = str(self._numbered)
                self._engine.add(request_id, request)
                group.request_ids.append(request_id)
                self._running[request_id] = group
        except InvalidInput as error:
            self._abort(group)
            _settle(group, error)

    def _step(self) -> None:
        if not self._running:
            return
        stepped = self._engine.step()
        self.steps += 1
        for request_id, found in stepped:
            observability.INFERENCE_TOKENS.inc(len(found.token_ids))
            group = self._running[request_id]
            if isinstance(found, SampledPart):
                if group.on_part:
                    group.on_part(group.request_ids.index(request_id), found)
                if not found.finish_reason:
                    continue
                # What was passed on is not kept.
                stopped = found.finish_reason == "stop"
                found = Sample((), (), stopped, found.version_first, found.version_last)
            del self._running[request_id]
            group.samples[request_id] = found
            if group.on_sample:
                group.on_sample(group.request_ids.index(request_id), found)
            if len(group.samples) == len(group.requests):
                _settle(group, None)
        observability.INFERENCE_RUNNING.set(len(self._running))

    def _drop_cancelled(self) -> None:
        with self._wake:
            self._waiting = [group for group in self._waiting if not group.future.cancelled()]
        for group in self._groups_running():
            if group.future.cancelled():
                self._abort(group)

    def _groups_running(self) -> list[SampleGroup]:
        return list({id(group): group for group in self._running.values()}.values())

    def _abort(self, group: SampleGroup) -> None:
        alive = [request_id for request_id in group.request_ids if self._running.pop(request_id, None)]
        self._engine.abort(alive)

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            self._stopping = True
            groups = [*self._waiting, *self._groups_running()]
            self._waiting = []
        for group in groups:
            _settle(group, error)


def _settle(group: SampleGroup, error: Exception | None) -> None:
    if not group.future.set_running_or_notify_cancel():
        return
    if error is not None:
        group.future.set_exception(error)
    else:
        group.future.set_result([group.samples[request_id] for request_id in group.request_ids])
