"""What clients own: sessions, models and samplers, saved adapters as sealed folders, and operations, each once
whatever is sent again.

Saved adapters as sealed folders: `<root>/<model_id>/<kind>/<name>`, which clients call tinker://model_id/kind/name.
Every folder says in its manifest whose it is; to everybody else it is not there.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from blake3 import blake3
from safetensors.torch import save_file
from torch import Tensor
from ulid import ULID

from services.tinker.shared_model import LoraShape, TrainingAdapter
from spo import errors
from spo.manifest_folder import (
    MANIFEST,
    open_folder,
    read_manifest,
    remove_folder,
    seal_folder,
    staging_folder,
)
from spo.model.folder import TENSORS_FILE, Adapter, read_tensors
from spo.v1 import tinker_service_pb2 as wire

Kind = Literal["weights", "sampler_weights"]
SCHEME = "tinker://"
MOMENTS_FILE = "optimizer.safetensors"
# Of saves for one sampling session, which nobody names.
UNNAMED = "session-"
_PATH = re.compile(r"tinker://(tnk_[0-9A-Za-z]{26}:train:\d{1,9})/(weights|sampler_weights)/([A-Za-z0-9][\w.-]{0,127})")
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,127}")

PREFIX = "tnk_"
_MODEL_ID = re.compile(r"(tnk_[0-9A-Za-z]{26}):train:\d{1,9}")


@dataclass
class Operation:
    """lane: what is changed by it, or sampled from; operations of one lane run in the order in which they came."""

    request_id: str
    tenant: str
    lane: str
    request: wire.SubmitTinkerRequest
    digest: bytes
    deadline: float
    result: wire.TinkerResult | None = None
    ended: float = 0.0

    def check(self) -> None:
        """Raises NotReady once its time is over."""
        if time.monotonic() > self.deadline:
            raise errors.NotReady("the operation took too long, its wait included", code="tinker_too_late")


@dataclass
class Operations:
    """Safe from several threads. Tenants take turns, and so do the lanes of one."""

    most_per_tenant: int
    life_seconds: float
    result_seconds: float
    _known: OrderedDict[tuple[str, str], Operation] = field(default_factory=OrderedDict)
    _lanes: dict[str, OrderedDict[str, deque[Operation]]] = field(default_factory=dict)
    _waiting: Counter[str] = field(default_factory=Counter)
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def submit(self, request_id: str, lane: str, request: wire.SubmitTinkerRequest) -> None:
        """Queue an operation; again with the same content changes nothing.

        Raises ResourceExhausted where too much of the tenant waits, InvalidInput on another content under a known id.
        """
        digest = blake3(request.SerializeToString(deterministic=True)).digest()
        with self._changed:
            self._forget()
            known = self._known.get((request.tenant, request_id))
            if known:
                if known.digest != digest:
                    message = f"{request_id} was another request before"
                    raise errors.InvalidInput(message, code="tinker_request_reused")
                return
            if self._waiting[request.tenant] >= self.most_per_tenant:
                message = f"{self.most_per_tenant} operations of yours wait; collect some results first"
                raise errors.ResourceExhausted(message, code="tinker_limit")
            operation = Operation(
                request_id, request.tenant, lane, request, digest, time.monotonic() + self.life_seconds
            )
            self._known[request.tenant, request_id] = operation
            self._lanes.setdefault(request.tenant, OrderedDict()).setdefault(lane, deque()).append(operation)
            self._waiting[request.tenant] += 1
            self._changed.notify_all()

    def collect(self, tenant: str, request_ids: Iterator[str]) -> Iterator[wire.TinkerResult]:
        """What is done, and which ids are unknown, or another tenant's."""
        for request_id in request_ids:
            with self._changed:
                known = self._known.get((tenant, request_id))
            if known is None:
                yield wire.TinkerResult(request_id=request_id, unknown=True)
            elif known.result is not None:
                yield known.result

    def take(self, seconds: float, fits: Callable[[Operation, Operation], bool], most: int) -> list[Operation]:
        """The next operation, and those behind it in its lane that fit it; empty when none came in time."""
        with self._changed:
            if not self._lanes:
                self._changed.wait(seconds)
            if not self._lanes:
                return []
            tenant, lanes = next(iter(self._lanes.items()))
            lane, queue = lanes.popitem(last=False)
            taken = [queue.popleft()]
            while queue and len(taken) < most and fits(taken[0], queue[0]):
                taken.append(queue.popleft())
            if queue:
                lanes[lane] = queue
            del self._lanes[tenant]
            if lanes:
                self._lanes[tenant] = lanes
            return taken

    def end(self, operation: Operation, result: wire.TinkerResult) -> None:
        """Its result can be collected from now on."""
        result.request_id = operation.request_id
        with self._changed:
            operation.result, operation.ended = result, time.monotonic()
            # What was sent is needed no more; its digest says whether it is sent again.
            operation.request = wire.SubmitTinkerRequest()
            self._waiting[operation.tenant] -= 1

    def _forget(self) -> None:
        oldest = time.monotonic() - self.result_seconds
        for key, operation in list(self._known.items()):
            if not operation.ended or operation.ended > oldest:
                break
            del self._known[key]


def checked_name(name: str) -> str:
    """A client's name for a checkpoint. Raises InvalidInput unless it is a plain one."""
    if not _NAME.fullmatch(name) or name.startswith(UNNAMED):
        message = f"a checkpoint is named by letters, digits, _, . and -, and not {UNNAMED}...: {name[:140]!r} is not"
        raise errors.InvalidInput(message, code="tinker_name")
    return name


def _is_unnamed(path: CheckpointPath) -> bool:
    return path.kind == "sampler_weights" and path.name.startswith(UNNAMED)


def _absent(path: str) -> errors.NotFound:
    return errors.NotFound(f"there is no checkpoint {path[:300]}", code="tinker_not_found")


@dataclass(frozen=True)
class CheckpointPath:
    """A client's name for a checkpoint, taken apart."""

    model_id: str
    kind: Kind
    name: str

    @classmethod
    def parse(cls, path: str) -> CheckpointPath:
        """Raises NotFound on what can be no checkpoint's."""
        found = _PATH.fullmatch(path)
        if not found:
            raise _absent(path)
        return cls(found[1], "weights" if found[2] == "weights" else "sampler_weights", found[3])

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"


@dataclass(frozen=True)
class AdapterCheckpoint:
    """What a folder's manifest says of it."""

    path: CheckpointPath
    tenant: str
    shape: LoraShape
    steps: int
    created_unix_ms: int
    expires_unix_ms: int
    size_bytes: int

    @property
    def is_over(self) -> bool:
        return bool(self.expires_unix_ms) and self.expires_unix_ms < time.time() * 1000


@dataclass(frozen=True)
class SavedAdapter:
    """The tensors of a checkpoint; moments: AdamW's, where it is one to go on from."""

    checkpoint: AdapterCheckpoint
    tensors: dict[str, Tensor]
    moments: dict[str, Tensor]


@dataclass(frozen=True)
class CheckpointStore:
    """base_model: hash of the model whose adapters these are; most: checkpoints of one tenant, unnamed ones apart."""

    root: Path
    base_model: str
    most: int

    def write(self, checkpoint: AdapterCheckpoint, adapter: Adapter, saved: SavedAdapter, *, overwrite: bool) -> None:
        """Seal a checkpoint. Raises Conflict where the name is taken, ResourceExhausted
        beyond the tenant's limit and where the disk is full (code "disk_full").
        """
        destination = self._folder(checkpoint.path)
        if destination.exists() and not overwrite:
            message = f"{checkpoint.path} is there already; save with overwrite, or under another name"
            raise errors.Conflict(message, code="tinker_name_taken")
        if not destination.exists():
            self._require_room(checkpoint)
        with errors.storage_faults_named(self.root):
            destination.parent.mkdir(parents=True, exist_ok=True)
            with staging_folder(destination) as writing:
                adapter.write(writing)
                save_file(saved.tensors, writing / TENSORS_FILE)
                if saved.moments:
                    save_file(saved.moments, writing / MOMENTS_FILE)
                # A later save is of a newer epoch, so it replaces the one that is there.
                seal_folder(writing, destination, self._head(checkpoint))

    def find(self, tenant: str, path: str) -> AdapterCheckpoint:
        """Raises NotFound, whether it is another tenant's or none at all."""
        found = self._read(CheckpointPath.parse(path))
        if found is None or found.tenant != tenant or found.is_over:
            raise _absent(path)
        return found

    def load(self, tenant: str, path: str) -> SavedAdapter:
        """The verified tensors. Raises NotFound as `find`, IntegrityError on damage, InvalidInput on another base."""
        checkpoint = self.find(tenant, path)
        folder = open_folder(self._folder(checkpoint.path))
        if folder.manifest["base_model"] != self.base_model:
            raise errors.InvalidInput(f"{path} was trained on another base model", code="tinker_model")
        moments = folder.path / MOMENTS_FILE
        return SavedAdapter(
            checkpoint, read_tensors(folder.path / TENSORS_FILE), read_tensors(moments) if moments.exists() else {}
        )

    def delete(self, tenant: str, path: str) -> None:
        """Raises NotFound as `find`."""
        remove_folder(self._folder(self.find(tenant, path).path))

    def all(self, tenant: str, model_id: str = "") -> list[AdapterCheckpoint]:
        """A tenant's, named ones only, the oldest first."""
        mine = [found for found in self._everything() if found.tenant == tenant and not _is_unnamed(found.path)]
        wanted = [found for found in mine if not found.is_over and model_id in ("", found.path.model_id)]
        return sorted(wanted, key=lambda found: found.created_unix_ms)

    def unnamed(self, model_id: str) -> list[AdapterCheckpoint]:
        """A model's saves for sampling sessions, the oldest first."""
        found = [each for each in self._everything(model_id) if _is_unnamed(each.path)]
        return sorted(found, key=lambda each: each.created_unix_ms)

    def remove(self, checkpoint: AdapterCheckpoint) -> None:
        """Take it away, whoever's it is."""
        remove_folder(self._folder(checkpoint.path))

    def sweep(self) -> None:
        """Remove what has expired."""
        for found in self._everything():
            if found.is_over:
                self.remove(found)

    def forget_unnamed(self) -> None:
        """Remove all saves for sampling sessions: no session has outlived the process that served it."""
        for found in self._everything():
            if _is_unnamed(found.path):
                self.remove(found)

    def _everything(self, model_id: str = "*") -> Iterator[AdapterCheckpoint]:
        for manifest in self.root.glob(f"{model_id}/*/*/{MANIFEST}") if self.root.is_dir() else ():
            model, kind, name = manifest.parts[-4:-1]
            if _PATH.fullmatch(f"{SCHEME}{model}/{kind}/{name}"):
                found = self._read(CheckpointPath.parse(f"{SCHEME}{model}/{kind}/{name}"))
                if found:
                    yield found

    def _read(self, path: CheckpointPath) -> AdapterCheckpoint | None:
        file = self._folder(path) / MANIFEST
        try:
            head = read_manifest(file)
            return AdapterCheckpoint(
                path=path,
                tenant=str(head["tenant"]),
                shape=LoraShape(**head["shape"]),
                steps=int(head["steps"]),
                created_unix_ms=int(head["created_unix_ms"]),
                expires_unix_ms=int(head["expires_unix_ms"]),
                size_bytes=sum(int(entry["size_bytes"]) for entry in head["files"]),
            )
        except (errors.IntegrityError, KeyError, TypeError, ValueError):
            # A folder without a readable manifest is nobody's.
            return None

    def _head(self, checkpoint: AdapterCheckpoint) -> dict[str, Any]:
        return {
            "epoch": checkpoint.created_unix_ms,
            "tenant": checkpoint.tenant,
            "base_model": self.base_model,
            "shape": checkpoint.shape.document(),
            "steps": checkpoint.steps,
            "created_unix_ms": checkpoint.created_unix_ms,
            "expires_unix_ms": checkpoint.expires_unix_ms,
        }

    def _require_room(self, checkpoint: AdapterCheckpoint) -> None:
        if not _is_unnamed(checkpoint.path) and len(self.all(checkpoint.tenant)) >= self.most:
            message = f"{self.most} checkpoints of yours are kept; delete some"
            raise errors.ResourceExhausted(message, code="tinker_limit")

    def _folder(self, path: CheckpointPath) -> Path:
        return self.root / path.model_id / path.kind / path.name


@dataclass
class Session:
    """One client process; `finished`: it has said that it is done."""

    id: str
    tenant: str
    beaten: float
    finished: bool = False


@dataclass(frozen=True)
class Sampler:
    """One sampling client; path: the checkpoint it draws from, empty: the base model."""

    id: str
    session_id: str
    tenant: str
    path: str


@dataclass
class TrainedModel:
    """One training client; saved_steps: those that a checkpoint has."""

    id: str
    session_id: str
    tenant: str
    adapter: TrainingAdapter
    saved_steps: int = 0


@dataclass
class Sessions:
    """Safe from several threads; models are added and removed by the one that computes."""

    silence_seconds: float
    most_models: int
    most_models_per_tenant: int
    most_sessions_per_tenant: int
    most_samplers_per_tenant: int
    _sessions: dict[str, Session] = field(default_factory=dict)
    _samplers: dict[str, Sampler] = field(default_factory=dict)
    _models: dict[str, TrainedModel] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def open(self, tenant: str) -> str:
        """A new session's id. Raises InvalidInput (code "tinker_limit") where the tenant has all it may have."""
        session = Session(f"{PREFIX}{ULID()}", tenant, time.monotonic())
        with self._lock:
            own = [each for each in self._sessions.values() if each.tenant == tenant and not self._is_over(each)]
            if len(own) >= self.most_sessions_per_tenant:
                message = (
                    f"{len(own)} sessions of yours are open; finish one (close its client), or wait: without a "
                    f"heartbeat it ends after {self.silence_seconds:g} s. The oldest is {own[0].id}"
                )
                raise errors.InvalidInput(message, code="tinker_limit")
            self._sessions[session.id] = session
        return session.id

    def beat(self, tenant: str, session_id: str, *, finish: bool = False) -> None:
        """It is alive, or done. Raises NotFound (code "tinker_session_over" at a heartbeat)."""
        with self._lock:
            session = self._session(tenant, session_id, "tinker_not_found" if finish else "tinker_session_over")
            session.beaten, session.finished = time.monotonic(), session.finished or finish

    def require(self, tenant: str, session_id: str) -> None:
        """Raises NotFound for another tenant's session as for one that never was."""
        with self._lock:
            self._session(tenant, session_id)

    def require_model(self, tenant: str, model_id: str) -> None:
        """Raises NotFound unless it may be a model of one of the tenant's sessions, one that is being made included."""
        found = _MODEL_ID.fullmatch(model_id)
        with self._lock:
            session = self._sessions.get(found[1]) if found else None
        if session is None or session.tenant != tenant:
            raise _no_model(model_id)

    def model(self, tenant: str, model_id: str) -> TrainedModel:
        """Raises NotFound."""
        with self._lock:
            found = self._models.get(model_id)
        if found is None or found.tenant != tenant:
            raise _no_model(model_id)
        return found

    def require_room(self, tenant: str) -> None:
        """Raises ResourceExhausted where the tenant, or the service, has all the models it may have."""
        with self._lock:
            own = sum(model.tenant == tenant for model in self._models.values())
            if own >= self.most_models_per_tenant or len(self._models) >= self.most_models:
                message = f"{own} training clients of yours and {len(self._models)} in all are there; finish some"
                raise errors.ResourceExhausted(message, code="tinker_limit")

    def add_model(self, model: TrainedModel) -> None:
        """Known from now on."""
        with self._lock:
            self._models[model.id] = model

    def drop_model(self, model_id: str) -> TrainedModel | None:
        """Known no more."""
        with self._lock:
            return self._models.pop(model_id, None)

    def models(self) -> list[TrainedModel]:
        """Every tenant's."""
        with self._lock:
            return list(self._models.values())

    def add_sampler(self, tenant: str, session_id: str, number: int, path: str) -> str:
        """A sampling session's id; the same for the same number. Raises NotFound, InvalidInput on another path
        and where the tenant has all it may have.
        """
        sampler = Sampler(f"{session_id}:sample:{number}", session_id, tenant, path)
        with self._lock:
            self.require_sampler_room(tenant, session_id, number)
            known = self._samplers.setdefault(sampler.id, sampler)
        if known != sampler:
            raise errors.InvalidInput(f"{sampler.id} samples from something else", code="tinker_request_reused")
        return sampler.id

    def require_sampler_room(self, tenant: str, session_id: str, number: int) -> None:
        """Raises NotFound, and InvalidInput (code "tinker_limit") where a further sampler is one too many."""
        with self._lock:
            self._session(tenant, session_id)
            if f"{session_id}:sample:{number}" in self._samplers:
                return
            own = [each for each in self._samplers.values() if each.tenant == tenant]
            if len(own) >= self.most_samplers_per_tenant:
                message = (
                    f"{len(own)} samplers of yours are open; finish a session (close its client), and those opened "
                    "in it go, or delete a checkpoint, and those of it go. "
                    f"The oldest is of session {own[0].session_id}"
                )
                raise errors.InvalidInput(message, code="tinker_limit")

    def drop_samplers(self, tenant: str, path: str) -> None:
        """Forget what draws from a checkpoint that is there no more."""
        with self._lock:
            gone = [name for name, each in self._samplers.items() if (each.tenant, each.path) == (tenant, path)]
            for name in gone:
                del self._samplers[name]

    def sampler(self, tenant: str, sampler_id: str) -> Sampler:
        """Raises NotFound."""
        with self._lock:
            found = self._samplers.get(sampler_id)
        if found is None or found.tenant != tenant:
            raise errors.NotFound(f"there is no sampling session {sampler_id[:200]}", code="tinker_not_found")
        return found

    def take_ended(self) -> list[TrainedModel]:
        """Forget sessions that are done or silent, and what they sampled from; returns the models they trained."""
        with self._lock:
            ended = {each.id for each in self._sessions.values() if self._is_over(each)}
            for session_id in ended:
                del self._sessions[session_id]
            self._samplers = {name: each for name, each in self._samplers.items() if each.session_id not in ended}
            return [model for model in self._models.values() if model.session_id in ended]

    def _is_over(self, session: Session) -> bool:
        return session.finished or session.beaten < time.monotonic() - self.silence_seconds

    def _session(self, tenant: str, session_id: str, code: str = "tinker_not_found") -> Session:
        found = self._sessions.get(session_id)
        if found is None or found.tenant != tenant:
            raise errors.NotFound(f"there is no session {session_id[:200]}: it is over, or was never yours", code=code)
        return found


def _no_model(model_id: str) -> errors.NotFound:
    message = (
        f"there is no model {model_id[:200]}: it is not yours, or its session has ended; where it was, a new training "
        "client can go on from its checkpoints, weights/autosave among them"
    )
    return errors.NotFound(message, code="tinker_not_found")
