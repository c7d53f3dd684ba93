"""Names under which policies are served: what each means now, and every change of it.

A name is a tenant's own. It stands for a weight version of a job (version 0 is pi0), or for the newest that the job has
published. Whoever publishes to it, a person or a continual job, leaves a numbered change that can be rolled back.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

from services.orchestrator import redis_keys as own_keys
from services.orchestrator.jobs.commit import Write, timestamp
from services.orchestrator.jobs.store import JobStore
from services.orchestrator.replicas.weights import WeightAnnouncements
from spo.errors import Conflict, NotFound, PreconditionFailed
from spo.spec.stored import record_of

# No slash, which ends a name in Redis, and no "@", which begins a version.
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,99}$"
KEPT_CHANGES = 1000
# Of one tenant, removed ones whose history is kept among them.
MOST_NAMES = 1000
_BY_JOB = re.compile(r"(job_[0-9A-HJKMNP-TV-Z]{26})(?:@(0|[1-9][0-9]{0,15}|newest))?")


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

    def __init__(self, jobs: JobStore, weights: WeightAnnouncements) -> None:
        self.jobs = jobs
        self.weights = weights
        self._lock = threading.Lock()

    def publish(self, tenant: str, name: str, target: Target, change: Change) -> ServedModel:
        """Make a name mean something; what it means already stays as it is.

        Raises NotFound where the tenant has no such job or the job no such version, Conflict (code "served_elsewhere")
        when the name has changed since `change.expected`.
        """
        if name.startswith("job_"):
            raise Conflict("names that begin with job_ are those of jobs", code="name_taken")
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
                raise PreconditionFailed(message, code="nothing_before")
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
        except NotFound as error:
            raise NotFound(f"there is no model {model}: {error.message}", code="model_not_found") from None
        return target

    def require(self, tenant: str, target: Target) -> None:
        """Raises NotFound where the tenant ("": the operator) has no such job, or the job no such version."""
        if tenant not in ("", self.jobs.tenant(target.job_id)):
            raise NotFound(f"there is no job {target.job_id}", code="job_not_found")
        if target.version:
            known = {int(each["version"]) for each in self.weights.versions(target.job_id)}
            if target.version not in known:
                message = f"job {target.job_id} has no weight version {target.version}"
                raise NotFound(message, code="weight_version_not_found")

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
            raise Conflict(f"{MOST_NAMES} names of yours are served already", code="too_many_models")
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
        raise Conflict(f"the last change of {name} is number {number}, not {change.expected}", code="served_elsewhere")


def _absent(name: str) -> NotFound:
    return NotFound(f"there is no model {name}", code="model_not_found")


def _field(tenant: str, name: str) -> str:
    return f"{name}/{tenant}"


def _model_of(raw: bytes) -> ServedModel:
    return record_of(ServedModel, json.loads(raw))
