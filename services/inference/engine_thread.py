"""The one thread that owns the engine: continuous batching over groups, weight versions one at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from services.inference.engine import Engine, Sample, SampleRequest
from services.inference.settings import Settings
from services.inference.weight_schedule import next_decision
from services.inference.weights import Weights
from spo.errors import InvalidInput, NotReady
from spo.observability import metrics
from spo.observability.logs import get_logger

log = get_logger("engine")

# A turn lasts at least this many times the load it cost, so that swapping large models stays cheap.
TURN_PER_LOAD_SECONDS = 20.0


@dataclass(eq=False)
class SampleGroup:
    """Sequences that are sampled under the same weights; None: the newest announced of the run."""

    run_id: str
    requests: Sequence[SampleRequest]
    weights: Weights | None
    future: Future[list[Sample]] = field(default_factory=Future)
    request_ids: list[str] = field(default_factory=list)
    samples: dict[str, Sample] = field(default_factory=dict)


class EngineThread:
    """Runs the engine for many callers; `submit`, `announce` and the properties may be used from any thread."""

    def __init__(self, build: Callable[[], Engine], reference: Weights, settings: Settings) -> None:
        self._build = build
        self._settings = settings
        self._reference = reference
        self._wake = threading.Condition()
        self._waiting: list[SampleGroup] = []
        self._newest: dict[str, Weights] = {}
        self._target = reference
        self._stopping = False
        self._running: dict[str, SampleGroup] = {}
        self._turn_ends = 0.0
        self._numbered = 0
        self.loaded = reference
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
            self._newest[run_id] = weights
            self._target = weights
            self._wake.notify()

    def submit(self, group: SampleGroup) -> None:
        """Queue a group; its future gets the samples in request order. Cancelling the future frees its sequences."""
        with self._wake:
            if self._stopping or self.failure:
                raise NotReady("the engine of this replica has stopped")
            self._waiting.append(group)
            self._wake.notify()

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
            self._fail_all(NotReady(f"the engine of this replica failed: {type(error).__name__}"))

    def _wait_for_work(self) -> bool:
        with self._wake:
            while not (self._stopping or self._waiting or self._running or self._target != self.loaded):
                self._wake.wait()
            return not self._stopping

    def _weights_of(self, group: SampleGroup) -> Weights:
        return group.weights or self._newest.get(group.run_id, self._reference)

    def _schedule(self) -> None:
        with self._wake:
            newest = self._target
            decision = next_decision(
                self.loaded,
                newest,
                [self._weights_of(group) for group in self._waiting],
                running=bool(self._running),
                running_may_switch=self._settings.in_flight == "keep" and self._all_running_follow(newest),
                turn_is_up=time.monotonic() >= self._turn_ends,
            )
        if decision.load is not None:
            self._load(decision.load)
        if decision.admit:
            self._admit()

    def _all_running_follow(self, newest: Weights) -> bool:
        return all(
            group.weights is None and self._newest.get(group.run_id) == newest for group in self._running.values()
        )

    def _load(self, weights: Weights) -> None:
        started = time.monotonic()
        self._engine.load(weights.paths, weights.version)
        seconds = time.monotonic() - started
        self.loaded = weights
        self._turn_ends = time.monotonic() + max(self._settings.turn_seconds, TURN_PER_LOAD_SECONDS * seconds)
        metrics.WEIGHTS_PUSH_SECONDS.observe(seconds)
        metrics.WEIGHTS_BYTES.inc(sum(path.stat().st_size for path in weights.paths))
        log.info("weights loaded", run=weights.run_id, version=weights.version, seconds=round(seconds, 3))

    def _admit(self) -> None:
        """Start waiting groups of the loaded version until the batch is full."""
        with self._wake:
            room = self._settings.max_sequences - len(self._running)
            admitted: list[SampleGroup] = []
            for group in self._waiting:
                if room <= 0:
                    break
                if self._weights_of(group) == self.loaded:
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
        for request_id, sample in self._engine.step():
            group = self._running.pop(request_id)
            group.samples[request_id] = sample
            metrics.INFERENCE_TOKENS.inc(len(sample.token_ids))
            if len(group.samples) == len(group.requests):
                _settle(group, None)
        metrics.INFERENCE_RUNNING.set(len(self._running))

    def _drop_cancelled(self) -> None:
        with self._wake:
            self._waiting = [group for group in self._waiting if not group.future.cancelled()]
        for group in {id(group): group for group in self._running.values() if group.future.cancelled()}.values():
            self._abort(group)

    def _abort(self, group: SampleGroup) -> None:
        alive = [request_id for request_id in group.request_ids if self._running.pop(request_id, None)]
        self._engine.abort(alive)

    def _fail_all(self, error: Exception) -> None:
        with self._wake:
            self._stopping = True
            groups = [*self._waiting, *self._running.values()]
            self._waiting = []
        for group in {id(group): group for group in groups}.values():
            _settle(group, error)


def _settle(group: SampleGroup, error: Exception | None) -> None:
    if not group.future.set_running_or_notify_cancel():
        return
    if error is not None:
        group.future.set_exception(error)
    else:
        group.future.set_result([group.samples[request_id] for request_id in group.request_ids])
