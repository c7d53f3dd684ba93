"""Serving policies: the pool of replicas, quotas, names and every change of them, and served policies as judges.

Names under which policies are served: what each means now, and every change of it.
A name is a tenant's own. It stands for a weight version of a job (version 0 is pi0), or for the newest that the job has
published. Whoever publishes to it, a person or a continual job, leaves a numbered change that can be rolled back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace

from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.autoscaling import ServingTraffic
from services.orchestrator.commit import Write, timestamp
from services.orchestrator.jobs import JobStore
from services.orchestrator.replicas import LiveReplica, ReplicaAssigner
from services.orchestrator.versions import announced_version, published_versions
from spo import errors
from spo.redis_keys import digest
from spo.rpc.client import ResponseStream, RpcClient
from spo.spec.job_spec import JobSpec, TasksSpec
from spo.spec.section import HOLDS_SLOT, record_of
from spo.spec.tasks import SERVED, ModelVerifier, PinnedJudge, served_judge, verifiers_in, with_models
from spo.v1.inference_service_pb2 import ServeRequest, ServeResponse
from spo.v1.inference_service_pb2_grpc import InferenceServiceStub
from spo.v1.orchestrator_service_pb2 import CompleteServedRequest

LOOK_SECONDS = 0.25
# A replica with so many times its share of what is under way is passed over by those that would rather be near it.
CROWDED = 1.5
# For so long a replica that said it cannot serve a run is not asked for it again.
UNFIT_SECONDS = 30.0
# An ended run's use is noted no more often than this.
NOTE_SECONDS = 20.0
MOST_UNFIT = 1000

# No slash, which ends a name in Redis, and no "@", which begins a version.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}$"
KEPT_CHANGES = 1000
# Of one tenant, removed ones whose history is kept among them.
MOST_NAMES = 1000
_BY_JOB = re.compile(r"(job_[0-9A-HJKMNP-TV-Z]{26})(?:@(0|[1-9][0-9]{0,15}|newest))?")


class ServingQuota:
    """Counted in this process, since one orchestrator leads. Safe from several threads."""

    def __init__(self, streams: int, streams_per_tenant: int, tokens_per_minute: int) -> None:
        self._streams = streams
        self._streams_per_tenant = streams_per_tenant
        self._tokens = RateLimitItemPerMinute(tokens_per_minute) if tokens_per_minute else None
        self._limiter = FixedWindowRateLimiter(MemoryStorage())
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()

    @contextmanager
    def completion(self, tenant: str) -> Iterator[None]:
        """Hold a place while the body runs. Raises ResourceExhausted (code "rate_limited") where none is left."""
        if self._tokens and not self._limiter.test(self._tokens, tenant):
            raise errors.ResourceExhausted("the tokens of this minute are used up; try again", code="rate_limited")
        with self._lock:
            if self._under_way[tenant] >= self._streams_per_tenant or self._under_way.total() >= self._streams:
                message = f"{self._under_way[tenant]} completions of yours are under way; try again"
                raise errors.ResourceExhausted(message, code="rate_limited")
            self._under_way[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[tenant] -= 1
                if not self._under_way[tenant]:
                    del self._under_way[tenant]

    def spend(self, tenant: str, tokens: int) -> None:
        """Count tokens that were read or written."""
        if self._tokens and tokens:
            self._limiter.hit(self._tokens, tenant, cost=tokens)


class NotServed(errors.NotReady):
    """No replica has come to serve a run; one may be on its way, which takes as long as a model takes to load."""

    retry_after_seconds = 10


@dataclass(frozen=True)
class PoolLimits:
    """How many completions are under way at once, how long one may take, and wait for its model."""

    streams: int
    seconds: float
    wait_seconds: float


@dataclass
class _KnownReplicas:
    """Live replicas as they were read a moment ago, and what is remembered of them."""

    replicas: list[LiveReplica] = field(default_factory=list)
    read_at: float = float("-inf")
    unfit: dict[tuple[str, str], float] = field(default_factory=dict)
    noted: dict[str, float] = field(default_factory=dict)


class ServingPool:
    """Asks the replicas; a thread reads each answer, and its parts are awaited in the event loop of whoever asks."""

    def __init__(self, jobs: JobStore, assigner: ReplicaAssigner, limits: PoolLimits, traffic: ServingTraffic) -> None:
        self.jobs = jobs
        self.assigner = assigner
        self.limits = limits
        self.traffic = traffic
        self._threads = ThreadPoolExecutor(limits.streams, thread_name_prefix="serving")
        self._lock = threading.Lock()
        self._clients: dict[str, RpcClient] = {}
        self._turn = itertools.count()
        # Of each address, how many are under way; changed in the event loop alone.
        self._asked: Counter[str] = Counter()
        self._known = _KnownReplicas()

    async def serve(self, request: ServeRequest, near: str = "") -> AsyncGenerator[ServeResponse, None]:
        """The answer in parts. Closing the iterator ends the sampling.

        near: requests with the same one go to the same replica, whose engine has their prefixes, while it is not
        crowded beside the others; "": to whichever has its turn.
        Raises NotServed when no replica has come to serve the run in time, and what the replica raises.
        """
        with self.traffic.completion(request.run_id):
            async with contextlib.aclosing(self._served(request, near)) as answer:
                async for response in answer:
                    yield response

    async def _served(self, request: ServeRequest, near: str) -> AsyncGenerator[ServeResponse, None]:
        deadline = time.monotonic() + self.limits.wait_seconds
        while True:
            replica = await asyncio.to_thread(self._replica_for, request.run_id, near)
            if replica is None:
                if time.monotonic() > deadline:
                    raise await asyncio.to_thread(self._not_served, request.run_id)
                await asyncio.sleep(LOOK_SECONDS)
                continue
            begun = False
            try:
                async with contextlib.aclosing(self._answer(replica, request)) as answer:
                    async for response in answer:
                        begun = True
                        yield response
                return
            except errors.SpoError as error:
                moved = error.code == "other_run" or isinstance(error, errors.NotReady)
                if begun or not moved or time.monotonic() > deadline:
                    raise
                self._note_unfit(replica, request.run_id)
                await asyncio.sleep(LOOK_SECONDS)

    async def _answer(self, replica: LiveReplica, request: ServeRequest) -> AsyncGenerator[ServeResponse, None]:
        stream = self._client(replica.address).stream("Serve", request, self.limits.seconds)
        arrived: asyncio.Queue[ServeResponse | BaseException | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        self._threads.submit(_read, stream, lambda found: loop.call_soon_threadsafe(arrived.put_nowait, found))
        self._asked[replica.address] += 1
        try:
            while (found := await arrived.get()) is not None:
                if isinstance(found, BaseException):
                    raise found
                yield found
        finally:
            stream.cancel()
            self._asked[replica.address] -= 1
            if not self._asked[replica.address]:
                del self._asked[replica.address]

    def _replica_for(self, run_id: str, near: str) -> LiveReplica | None:
        """One that is assigned to the run, else one that holds its model; None, and the use noted, where none does."""
        spec = self.jobs.spec(run_id)
        candidates = [each for each in self._live() if self._is_fit(each, run_id)]
        chosen = [each for each in candidates if each.run_id == run_id]
        if self.jobs.state(run_id) not in HOLDS_SLOT:
            self._note_use(run_id)
        if not chosen:
            chosen = [each for each in candidates if each.run_id and self._holds(each.run_id, spec)]
        if not chosen:
            return None
        return self._nearest(chosen, near) if near else chosen[next(self._turn) % len(chosen)]

    def _nearest(self, chosen: list[LiveReplica], near: str) -> LiveReplica:
        """The first in an order of its own (rendezvous hashing) that is asked for no more than CROWDED of its share."""
        asked = {each.replica_id: self._asked[each.address] for each in chosen}
        share = CROWDED * (1 + sum(asked.values())) / len(chosen)
        ranked = sorted(chosen, key=lambda each: digest(near, each.replica_id))
        return next(each for each in ranked if asked[each.replica_id] < share)

    def _live(self) -> list[LiveReplica]:
        with self._lock:
            known = self._known
            if time.monotonic() - known.read_at > LOOK_SECONDS:
                live = self.assigner.replicas.live()
                known.replicas = [each for each in live if each.pool == "inference" and not each.draining]
                known.read_at = time.monotonic()
                for address in set(self._clients) - {each.address for each in live}:
                    self._clients.pop(address).close()
            return known.replicas

    def _is_fit(self, replica: LiveReplica, run_id: str) -> bool:
        until = self._known.unfit.get((replica.replica_id, run_id), 0.0)
        return bool(replica.address) and replica.refused_run_id != run_id and time.monotonic() > until

    def _holds(self, served: str, spec: JobSpec) -> bool:
        """Whether an engine that serves one run may well serve another; the replica knows it for certain."""
        try:
            other = self.jobs.spec(served)
        except errors.NotFound:
            return False
        return (other.model.path, other.model.dtype) == (spec.model.path, spec.model.dtype)

    def _note_unfit(self, replica: LiveReplica, run_id: str) -> None:
        with self._lock:
            self._known.read_at = float("-inf")
            if replica.run_id != run_id:
                if len(self._known.unfit) >= MOST_UNFIT:
                    self._known.unfit.clear()
                self._known.unfit[replica.replica_id, run_id] = time.monotonic() + UNFIT_SECONDS

    def _note_use(self, run_id: str) -> None:
        with self._lock:
            if time.monotonic() - self._known.noted.get(run_id, float("-inf")) < NOTE_SECONDS:
                return
            self._known.noted = {run_id: time.monotonic(), **dict(itertools.islice(self._known.noted.items(), 100))}
        self.assigner.note_use(run_id)

    def _not_served(self, run_id: str) -> errors.SpoError:
        live, coming = self._live(), self.assigner.serving(run_id)
        busy = sorted({each.run_id for each in live if each.run_id and each.run_id != run_id})
        if not live:
            reason = "no inference replica is running yet, and one is asked for (spo_wanted_replicas)"
        elif coming:
            reason = f"replica {coming[0]} has not loaded its model yet"
        elif busy:
            tenant = self._tenant(run_id)
            named = [other for other in busy if self._tenant(other) == tenant]
            reason = f"the replicas serve {', '.join(named[:3]) or 'other jobs'}"
        else:
            reason = "no replica has loaded its model yet"
        waited = f"{self.limits.wait_seconds:g} s"
        return NotServed(f"no replica serves {run_id} after {waited}: {reason}; try again", code="policy_not_served")

    def _tenant(self, run_id: str) -> str | None:
        try:
            return self.jobs.tenant(run_id)
        except errors.NotFound:
            return None

    def _client(self, address: str) -> RpcClient:
        with self._lock:
            if address not in self._clients:
                self._clients[address] = RpcClient("inference", address, InferenceServiceStub)
            return self._clients[address]

    def close(self) -> None:
        """End the connections; completions under way fail."""
        with self._lock:
            for client in self._clients.values():
                client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def _read(stream: ResponseStream, put: Callable[[ServeResponse | BaseException | None], object]) -> None:
    """Pass on what comes, then None, or what was raised."""
    try:
        for response in stream:
            put(response)
        put(None)
    except errors.SpoError as error:
        _put_if_awaited(put, error)
    except RuntimeError:
        # The loop has closed: nobody waits.
        stream.cancel()
    except Exception as error:
        _put_if_awaited(put, errors.Unreachable(f"the answer of a replica broke off: {type(error).__name__}"))


def _put_if_awaited(put: Callable[[ServeResponse | BaseException | None], object], error: errors.SpoError) -> None:
    try:
        put(error)
    except RuntimeError:
        return


@dataclass(frozen=True)
class Target:
    """What is served: a weight version of a job, 0 for its pi0 and None for whichever it has published last."""

    job_id: str
    version: int | None = None


@dataclass(frozen=True)
class Change:
    """Who changes a name and why; expected: the number of the change that it builds on, None for whatever is there.

    min_replicas: those that stay for the name whoever asks; None: as many as before.
    """

    by: str
    note: str = ""
    expected: int | None = None
    min_replicas: int | None = None


@dataclass(frozen=True)
class ServedModel:
    """A name and what it means since its last change, whose number is one more than that of the change before.

    restores: the number of the earlier change that a roll-back has brought back. removed: the name means nothing now.
    """

    name: str
    tenant: str
    job_id: str
    version: int | None
    number: int
    at: str
    by: str
    note: str = ""
    before: Mapping[str, object] | None = None
    restores: int | None = None
    removed: bool = False
    min_replicas: int = 0

    @property
    def target(self) -> Target:
        return Target(self.job_id, self.version)


class ServedModels:
    """The names of all tenants in Redis. Safe from several threads: only the leading orchestrator writes."""

    def __init__(self, jobs: JobStore) -> None:
        self.jobs = jobs
        self._lock = threading.Lock()

    def publish(self, tenant: str, name: str, target: Target, change: Change) -> ServedModel:
        """Make a name mean something; what it means already stays as it is.

        Raises NotFound where the tenant has no such job or the job no such version, Conflict (code "served_elsewhere")
        when the name has changed since `change.expected`.
        """
        if name.startswith("job_"):
            raise errors.Conflict("names that begin with job_ are those of jobs", code="name_taken")
        self.require(tenant, target)
        with self._lock:
            last = self._last(tenant, name)
            _check_expected(name, last, change)
            same_replicas = change.min_replicas is None or (last and last.min_replicas == change.min_replicas)
            if last and not last.removed and last.target == target and same_replicas:
                return last
            return self._append(last, _next(tenant, name, last, target, change))

    def roll_back(self, tenant: str, name: str, change: Change, to: int | None = None) -> ServedModel:
        """Bring back what the name meant after change number `to`, or before the change that it rests on now.

        Called again without `to`, it goes back one further. Raises NotFound, Conflict, PreconditionFailed (code
        "nothing_before") where there was nothing before.
        """
        with self._lock:
            last = self._last(tenant, name)
            if last is None:
                raise _absent(name)
            _check_expected(name, last, change)
            number = to if to is not None else (last.restores or last.number) - 1
            found = self._numbered(tenant, name, number)
            if found is None or found.removed:
                message = f"change {number} of {name} is not kept, or the name meant nothing then"
                raise errors.PreconditionFailed(message, code="nothing_before")
            self.require(tenant, found.target)
            made = _next(tenant, name, last, found.target, change)
            return self._append(last, replace(made, restores=found.restores or found.number))

    def remove(self, tenant: str, name: str, change: Change) -> ServedModel:
        """Let a name mean nothing; its history stays, and it can be rolled back. Raises NotFound, Conflict."""
        with self._lock:
            last = self._last(tenant, name)
            if last is None or last.removed:
                raise _absent(name)
            _check_expected(name, last, change)
            made = _next(tenant, name, last, last.target, change)
            return self._append(last, replace(made, removed=True))

    def get(self, tenant: str, name: str) -> ServedModel:
        """What a name means. Raises NotFound (code "model_not_found")."""
        found = self._last(tenant, name)
        if found is None or found.removed:
            raise _absent(name)
        return found

    def all(self, tenant: str | None) -> list[ServedModel]:
        """The names of a tenant, or with None of all, in alphabetical order."""
        found = [_model_of(raw) for raw in self.jobs.client.hvals(own_keys.served_models())]
        kept = [each for each in found if not each.removed and tenant in (None, each.tenant)]
        return sorted(kept, key=lambda each: (each.name, each.tenant))

    def history(self, tenant: str, name: str, limit: int = KEPT_CHANGES) -> list[ServedModel]:
        """The changes of a name, newest first. Raises NotFound when it never meant anything."""
        found = self.jobs.client.lrange(own_keys.served_model_changes(_field(tenant, name)), 0, limit - 1)
        if not found:
            raise _absent(name)
        return [_model_of(raw) for raw in found]

    def resolve(self, tenant: str, model: str, *, of_anyone: bool = False) -> Target:
        """What a request's `model` means: a name, or `job_...`, `job_...@3`, `job_...@newest`.

        of_anyone: other tenants' jobs too. Raises NotFound (code "model_not_found").
        """
        of_job = _BY_JOB.fullmatch(model)
        if of_job is None:
            return self.get(tenant, model).target
        job_id, version = of_job.groups()
        target = Target(job_id, None if version in (None, "newest") else int(version))
        try:
            self.require("" if of_anyone else tenant, target)
        except errors.NotFound as error:
            raise errors.NotFound(f"there is no model {model}: {error.message}", code="model_not_found") from None
        return target

    def require(self, tenant: str, target: Target) -> None:
        """Raises NotFound where the tenant ("": the operator) has no such job, or the job no such version."""
        if tenant not in ("", self.jobs.tenant(target.job_id)):
            raise errors.NotFound(f"there is no job {target.job_id}", code="job_not_found")
        if target.version:
            known = {int(each["version"]) for each in published_versions(self.jobs, target.job_id)}
            if target.version not in known:
                message = f"job {target.job_id} has no weight version {target.version}"
                raise errors.NotFound(message, code="weight_version_not_found")

    def _append(self, last: ServedModel | None, made: ServedModel) -> ServedModel:
        forgotten = self._make_room(made.tenant) if last is None else ()
        document, field = json.dumps(asdict(made)), _field(made.tenant, made.name)
        changes = own_keys.served_model_changes(field)
        self.jobs.write(
            ("HSET", own_keys.served_models(), field, document),
            ("LPUSH", changes, document),
            ("LTRIM", changes, 0, KEPT_CHANGES - 1),
            *self._kept_warm(made),
            *forgotten,
        )
        return made

    def _make_room(self, tenant: str) -> list[Write]:
        """What makes room for another name of the tenant: one that was removed longest ago is forgotten.

        Raises Conflict (code "too_many_models") where all of them are served.
        """
        stored = map(_model_of, self.jobs.client.hvals(own_keys.served_models()))
        own = [each for each in stored if each.tenant == tenant]
        if len(own) < MOST_NAMES:
            return []
        removed = min((each for each in own if each.removed), key=lambda each: each.at, default=None)
        if removed is None:
            raise errors.Conflict(f"{MOST_NAMES} names of yours are served already", code="too_many_models")
        field = _field(tenant, removed.name)
        return [("HDEL", own_keys.served_models(), field), ("DEL", own_keys.served_model_changes(field))]

    def _kept_warm(self, made: ServedModel) -> list[tuple[str | int, ...]]:
        """What is written of the replicas that all names keep, once a change is made."""
        others = (each for each in self.all(None) if (each.tenant, each.name) != (made.tenant, made.name))
        least: Counter[str] = Counter()
        for each in (made, *others):
            if each.min_replicas and not each.removed:
                least[each.job_id] = max(least[each.job_id], each.min_replicas)
        key = own_keys.kept_warm()
        return [("DEL", key), *(("HSET", key, job_id, replicas) for job_id, replicas in least.items())]

    def _last(self, tenant: str, name: str) -> ServedModel | None:
        raw = self.jobs.client.hget(own_keys.served_models(), _field(tenant, name))
        return _model_of(raw) if raw else None

    def _numbered(self, tenant: str, name: str, number: int) -> ServedModel | None:
        return next((each for each in self.history(tenant, name) if each.number == number), None)


def _next(tenant: str, name: str, last: ServedModel | None, target: Target, change: Change) -> ServedModel:
    before = asdict(last.target) if last and not last.removed else None
    number = last.number + 1 if last else 1
    made = ServedModel(name, tenant, target.job_id, target.version, number, timestamp(), change.by, change.note, before)
    kept = last.min_replicas if last else 0
    return replace(made, min_replicas=kept if change.min_replicas is None else change.min_replicas)


def _check_expected(name: str, last: ServedModel | None, change: Change) -> None:
    number = last.number if last else 0
    if change.expected is not None and change.expected != number:
        raise errors.Conflict(
            f"the last change of {name} is number {number}, not {change.expected}", code="served_elsewhere"
        )


def _absent(name: str) -> errors.NotFound:
    return errors.NotFound(f"there is no model {name}", code="model_not_found")


def _field(tenant: str, name: str) -> str:
    return f"{name}/{tenant}"


def _model_of(raw: bytes) -> ServedModel:
    return record_of(ServedModel, json.loads(raw))


class ServedJudges:
    """What names of judges mean, and what those judges say."""

    def __init__(self, jobs: JobStore, served: ServedModels, pool: ServingPool) -> None:
        self.jobs = jobs
        self.served = served
        self.pool = pool

    def pinned(self, tasks: TasksSpec, tenant: str) -> TasksSpec:
        """The tasks with every served judge pinned to the version that its name means now to the tenant.

        Raises InvalidInput with a pointer to each name that means nothing.
        """
        faults: list[errors.FieldViolation] = []

        def renamed(at: str, verifier: ModelVerifier) -> str:
            judge = served_judge(verifier.model) if verifier.is_served else None
            if judge is None or judge.job_id:
                return verifier.model
            try:
                target = self.served.get(tenant, judge.name).target
            except errors.NotFound as error:
                faults.append(errors.FieldViolation(f"/tasks/{at}/model", f"{error.message} that is served"))
                return verifier.model
            return PinnedJudge(judge.name, target.job_id, self._version(target)).model

        verifier = with_models(tasks.verifier, renamed)
        _refuse(faults)
        return tasks if verifier == tasks.verifier else tasks.model_copy(update={"verifier": verifier})

    def require_pinned(self, tasks: TasksSpec, tenant: str | None) -> None:
        """Refuse judges that are not pinned, or to what the tenant has not; None has all. Raises InvalidInput."""
        faults: list[errors.FieldViolation] = []
        for at, verifier in verifiers_in(tasks.verifier):
            judge = served_judge(verifier.model) if isinstance(verifier, ModelVerifier) and verifier.is_served else None
            if judge is None:
                continue
            try:
                if not judge.job_id:
                    example = f"{SERVED}{judge.name}=job_...@VERSION"
                    raise errors.NotFound(f"must name what {judge.name} means, {example}: /v1/served-models says it")
                self.served.require(tenant or "", Target(judge.job_id, judge.version))
            except errors.NotFound as error:
                faults.append(errors.FieldViolation(f"/tasks/{at}/model", error.message))
        _refuse(faults)

    def complete(self, request: CompleteServedRequest, seconds: float) -> list[str]:
        """What the judge says, without its reasoning. Raises what serving raises, NotReady after so many seconds."""
        model = self.jobs.spec(request.run_id).model
        wanted = ServeRequest(
            request_id=f"judge-{request.seed:x}",
            run_id=request.run_id,
            policy_version=request.policy_version,
            messages_json=json.dumps([{"role": "user", "content": request.question}]),
            samples=request.samples,
            temperature=request.temperature,
            top_p=1.0,
            max_tokens=min(request.max_tokens, model.max_response_tokens),
            seed=request.seed,
        )
        try:
            texts = asyncio.run(asyncio.wait_for(self._texts(wanted), seconds))
        except TimeoutError:
            raise errors.NotReady(
                f"the judge did not answer within {seconds:.0f} s", code="policy_not_served"
            ) from None
        return [text[model.chat_format.reasoning_length(text) :] for text in texts]

    async def _texts(self, wanted: ServeRequest) -> list[str]:
        texts = [""] * wanted.samples
        async with contextlib.aclosing(self.pool.serve(wanted)) as answer:
            async for response in answer:
                for part in response.parts:
                    texts[part.index] += part.text
        return texts

    def _version(self, target: Target) -> int:
        if target.version is not None:
            return target.version
        announced = announced_version(self.jobs, target.job_id)
        return announced.version if announced else 0


def _refuse(faults: list[errors.FieldViolation]) -> None:
    if faults:
        raise errors.InvalidInput("this judge cannot be asked", code="invalid_job_spec", violations=tuple(faults))
